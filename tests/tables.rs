//! The tables `cases.md` and `faults.md` are complete, and what they name exists.

#![allow(clippy::unwrap_used, reason = "a test says what is wrong by failing")]

use std::fs;
use std::path::{Path, PathBuf};

#[path = "support/named.rs"]
mod named;

use named::tests_in;

/// The faults of sections B to G, I and L; the numbering has gaps.
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
    106..=106,
    108..=113,
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

/// True if there is such a test.
fn is_test(name: &str) -> bool {
    let (module, function) = name.rsplit_once("::").expect("file::function");
    let path = source(module);
    let text =
        fs::read_to_string(&path).unwrap_or_else(|_| panic!("{name}: no {}", path.display()));
    tests_in(&text).contains(function)
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
    assert!(is_test("transaction::a_refusal_may_keep_its_writes"), "on two databases");
    assert!(is_test("fuzzing::any_bytes_are_a_response_that_stays_the_same_or_none"), "proptest");
    assert!(!is_test("layers::row_nothing"));
    assert!(!is_test("layers::keyed_nothing"));
    assert!(!is_test("layers::zipped"), "a helper, however often it is used");
    assert!(!is_test("sandbox::sources_do_what_they_say"), "a helper of three tests");
    assert!(!is_test("transaction::on_sqlite"), "a helper beside a list of tests");
}

#[test]
fn the_checker_reads_attributes_and_lists() {
    let text = "
#[test]
fn plain() {}

/// Says something.
#[tokio::test(start_paused = true)]
#[allow(clippy::unwrap_used)]
// cases: 1
async fn with_more_attributes() {}

#[test]
#[ignore = \"slow\"]
fn ignored() {}

#[allow(dead_code)]
fn helper_after_a_test() {}

#[test]
struct NoFunction;
fn after_no_function() {}

// #[test]
fn commented_out() {}

suite! {
    promised,
}

both! {
    listed(config());
    listed_too(
        config().wait(secs(1))
    );
}

fn listed_nowhere(listed: u8) {}

proptest! {
    #[test]
    fn generated(bytes: Vec<u8>) {}
}
";
    let tests: Vec<String> = tests_in(text).into_iter().collect();
    let expected =
        ["generated", "listed", "listed_too", "plain", "promised", "with_more_attributes"];
    assert_eq!(tests, expected);
}
