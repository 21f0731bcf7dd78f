//! The tables `cases.md` and `faults.md` are complete, and what they name exists.

#![allow(clippy::unwrap_used, reason = "a test says what is wrong by failing")]

use std::fs;
use std::path::{Path, PathBuf};

/// The faults of sections B to G, and I; the numbering has gaps.
const FAULTS: &[std::ops::RangeInclusive<u32>] = &[
    17..=17,
    19..=27,
    29..=35,
    37..=39,
    41..=49,
    51..=57,
    59..=71,
    73..=75,
    88..=88,
    90..=92,
    94..=96,
];

struct Row {
    number: u32,
    tests: Vec<String>,
    about: String,
}

/// The rows of a table whose first cell is a number behind this letter.
fn rows(table: &str, letter: &str) -> Vec<Row> {
    let rows = table.lines().filter_map(|line| {
        let mut cells = line.strip_prefix("| ")?.trim_end_matches(" |").split(" | ");
        let number = cells.next()?.strip_prefix(letter)?.parse().ok()?;
        let tests = cells.next()?.split(", ").map(|name| name.trim_matches('`').to_owned());
        Some(Row { number, tests: tests.collect(), about: cells.next()?.to_owned() })
    });
    rows.collect()
}

/// The file of `layers`, `http_contract/replay` or `src/scope`.
fn source(module: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let path = if module.starts_with("src/") { root.to_owned() } else { root.join("tests") };
    path.join(module).with_extension("rs")
}

/// True if there is such a function, and something makes a test of it.
fn is_test(name: &str) -> bool {
    let (module, function) = name.rsplit_once("::").expect("file::function");
    let path = source(module);
    let text =
        fs::read_to_string(&path).unwrap_or_else(|_| panic!("{name}: no {}", path.display()));
    let declared = [format!("fn {function}("), format!("fn {function}<")];
    let Some(at) = declared.iter().find_map(|declared| text.find(declared)) else { return false };
    // An attribute above it; or, for one that runs on several stores, its name in a list of tests.
    let before = text[..at].lines().rev().take(4).any(|line| line.contains("test"));
    before || text.matches(function).count() > 1 || text[..at].contains("proptest!")
}

#[track_caller]
fn check(rows: &[Row]) {
    for Row { number, tests, about } in rows {
        assert!(about.len() > 5, "{number} says nothing");
        for test in tests {
            assert!(is_test(test), "{number}: there is no test {test}");
        }
    }
}

#[test]
fn cases_152_to_177_stand_in_their_table_once_with_tests_that_exist() {
    let rows = rows(include_str!("cases.md"), "");
    let numbers: Vec<u32> = rows.iter().map(|row| row.number).collect();
    assert_eq!(numbers, (152..=177).collect::<Vec<_>>());
    check(&rows);
}

#[test]
fn every_fault_stands_in_its_table_once_with_tests_that_exist() {
    let rows = rows(include_str!("faults.md"), "B");
    let numbers: Vec<u32> = rows.iter().map(|row| row.number).collect();
    assert_eq!(numbers, FAULTS.iter().cloned().flatten().collect::<Vec<_>>());
    check(&rows);
}

#[test]
fn the_checker_knows_what_is_no_test() {
    assert!(is_test("layers::row_cors"));
    assert!(!is_test("layers::row_nothing"));
    assert!(!is_test("layers::keyed_nothing"));
}
