//! Every row of the matrix has a test, and every test that is named exists.

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

/// The rows of a table: id, and what stands in the last column.
fn rows(file: &str) -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = fs::read_to_string(root.join(file)).unwrap();
    let rows = text.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| id"));
    rows.map(|line| {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        (cells[0].to_owned(), cells.last().unwrap().to_string())
    })
    .collect()
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

fn check(file: &str, ids: impl IntoIterator<Item = String>) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut all = BTreeSet::new();
    tests(&root.join("tests"), &mut all);
    tests(&root.join("src"), &mut all);
    assert_eq!(faults(&rows(file), ids, &all), [""; 0], "{file}");
}

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
        "tests/faults/rows.md",
        ids.iter().flat_map(|(part, last)| (1..=*last).map(move |n| format!("{part}{n}"))),
    );
}

#[test]
fn every_fault_of_claims_and_of_redis_that_people_met_names_a_test_that_exists() {
    let numbers = [1, 2, 3, 5, 6].into_iter().chain(8..=16).chain(76..=82).chain(84..=87);
    check("tests/faults-a-h.md", numbers.map(|number| format!("B{number:02}")));
}
