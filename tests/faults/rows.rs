//! Every row of the matrix has a test, every test that is named exists, and no test of a row is left out.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use crate::named::tests_in;

fn tests(folder: &Path, into: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            tests(&path, into);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            into.extend(tests_in(&fs::read_to_string(path).unwrap()));
        }
    }
}

/// The rows of a table: id, and what stands behind it.
fn rows_whole(file: &str) -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = fs::read_to_string(root.join(file)).unwrap();
    let rows = text.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| id"));
    rows.map(|line| {
        let (id, rest) = line.trim_matches('|').split_once('|').unwrap();
        (id.trim().to_owned(), rest.to_owned())
    })
    .collect()
}

/// The rows of a table: id, and what stands in the last column.
fn rows(file: &str) -> Vec<(String, String)> {
    let last = |rest: String| rest.split('|').next_back().unwrap().trim().to_owned();
    rows_whole(file).into_iter().map(|(id, rest)| (id, last(rest))).collect()
}

/// What is wrong with these rows: no id may be missing or stand there twice, each has to name a test, and
/// every test that is named has to be among these.
fn faults(
    rows: &[(String, String)],
    ids: impl IntoIterator<Item = String>,
    tests: &BTreeSet<String>,
) -> Vec<String> {
    let present: BTreeSet<_> = rows.iter().map(|(id, _)| id.clone()).collect();
    let missing = ids.into_iter().filter(|id| !present.contains(id));
    let mut faults: Vec<String> = missing.map(|id| format!("no row {id}")).collect();
    if present.len() != rows.len() {
        faults.push("an id stands there twice".to_owned());
    }
    for (id, cell) in rows {
        let mut named = cell.split('`').skip(1).step_by(2).peekable();
        if named.peek().is_none() {
            faults.push(format!("{id} names no test"));
        }
        let absent = named.filter(|&name| !tests.contains(name));
        faults.extend(absent.map(|name| format!("{id}: no test is named {name}")));
    }
    faults
}

/// The tests in `tests/` and `src/`.
fn all_tests() -> BTreeSet<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut all = BTreeSet::new();
    tests(&root.join("tests"), &mut all);
    tests(&root.join("src"), &mut all);
    all
}

fn check(file: &str, ids: impl IntoIterator<Item = String>) {
    assert_eq!(faults(&rows(file), ids, &all_tests()), [""; 0], "{file}");
}

/// The row that the name of a test begins with: `C19` of `c19_scripts_…`, `B8` of `b08_…`.
fn row_of(test: &str) -> Option<(char, u32)> {
    let (id, _) = test.split_once('_')?;
    let part = id.chars().next().filter(|part| ('a'..='d').contains(part))?;
    let digits = &id[1..];
    let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| (part.to_ascii_uppercase(), digits.parse().expect("digits")))
}

/// The tests that begin with the id of a row and are not named in a row of that id.
fn left_out(rows: &[(String, String)], tests: &BTreeSet<String>) -> Vec<String> {
    let named = |test: &str, row: (char, u32)| {
        let of_it = |id: &str| row_of(&format!("{}_", id.to_ascii_lowercase())) == Some(row);
        // Some tables say also in which file it is.
        let names = |cell: &str| {
            let mut names = cell.split('`').skip(1).step_by(2);
            names.any(|name| name.rsplit("::").next() == Some(test))
        };
        rows.iter().any(|(id, cell)| of_it(id) && names(cell))
    };
    let begins = tests.iter().filter_map(|test| Some((test, row_of(test)?)));
    begins.filter(|(test, row)| !named(test, *row)).map(|(test, _)| test.clone()).collect()
}

const MATRIX: &str = "tests/faults/rows.md";
const OF_OTHERS: &str = "tests/faults-a-h.md";
/// Held by `tests/tables.rs`.
const MORE_OF_OTHERS: &str = "tests/faults.md";

/// Those that test the tests of this folder.
const OF_THE_TESTS: [&str; 6] = [
    "history.rs",
    "invariants_refuse.rs",
    "ports.rs",
    "rows.rs",
    "random/schedule.rs",
    "random/reached.rs",
];

#[test]
fn a_row_without_a_test_or_with_one_that_does_not_exist_is_found() {
    let faults_of = |cells: &[(&str, &str)]| {
        let rows = cells.iter().map(|&(id, cell)| (id.to_owned(), cell.to_owned()));
        let tests = BTreeSet::from(["there".to_owned()]);
        faults(&rows.collect::<Vec<_>>(), ["C1".to_owned()], &tests)
    };
    assert_eq!(faults_of(&[("C1", "`there` (of sorts)")]), [""; 0]);
    assert_eq!(faults_of(&[]), ["no row C1"]);
    assert_eq!(faults_of(&[("C1", "not here: elsewhere")]), ["C1 names no test"]);
    assert_eq!(faults_of(&[("C1", "`there`, `gone`")]), ["C1: no test is named gone"]);
    assert_eq!(faults_of(&[("C1", "`there`"), ("C1", "`there`")]), ["an id stands there twice"]);
}

#[test]
fn every_row_of_the_matrix_names_a_test_that_exists() {
    let ids = [('A', 8), ('B', 16), ('C', 25), ('D', 13)];
    check(
        MATRIX,
        ids.iter().flat_map(|(part, last)| (1..=*last).map(move |n| format!("{part}{n}"))),
    );
}

#[test]
fn every_fault_of_claims_and_of_redis_that_people_met_names_a_test_that_exists() {
    let numbers = [1, 2, 3, 5, 6].into_iter().chain(8..=16).chain(76..=82).chain(84..=87);
    check(OF_OTHERS, numbers.map(|number| format!("B{number:02}")));
}

#[test]
fn a_test_that_stands_in_no_row_of_its_id_is_found() {
    let rows = [("B8", "`b8_in`, `b9_in`"), ("B08", "`client::b08_in` | why"), ("C19", "`c19_in`")];
    let rows = rows.map(|(id, cell)| (id.to_owned(), cell.to_owned()));
    let out = |tests: &[&str]| {
        left_out(&rows, &tests.iter().map(|&test| test.to_owned()).collect::<BTreeSet<_>>())
    };
    assert_eq!(out(&["b8_in", "b08_in", "c19_in"]), [""; 0]);
    // In no row, in a row of another id, in one that is none; and a beginning that is not the whole.
    let all = ["b8_out", "b9_in", "c1_out", "d99_out", "c19_i"];
    assert_eq!(out(&all), ["b8_out", "b9_in", "c19_i", "c1_out", "d99_out"]);
    assert_eq!(out(&["a_twin", "b_8", "case_114_keys", "i1_refuses", "c_", "bb8_x"]), [""; 0]);
}

#[test]
fn no_test_that_begins_with_the_id_of_a_row_is_left_out() {
    let rows = [MATRIX, OF_OTHERS, MORE_OF_OTHERS].map(rows_whole).concat();
    assert_eq!(left_out(&rows, &all_tests()), [""; 0]);
}

#[test]
fn every_test_of_this_folder_is_named() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = root.join("tests/faults");
    let (mut here, mut of_the_tests) = (BTreeSet::new(), BTreeSet::new());
    tests(&folder, &mut here);
    for file in OF_THE_TESTS {
        of_the_tests.extend(tests_in(&fs::read_to_string(folder.join(file)).unwrap()));
    }
    let tables = [MATRIX, OF_OTHERS].map(|file| fs::read_to_string(root.join(file)).unwrap());
    let named: BTreeSet<_> =
        tables.iter().flat_map(|text| text.split('`').skip(1).step_by(2)).collect();
    let missing = here.difference(&of_the_tests).filter(|test| !named.contains(test.as_str()));
    assert_eq!(missing.collect::<Vec<_>>(), [""; 0]);
}
