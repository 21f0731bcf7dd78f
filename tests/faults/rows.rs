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

fn check(file: &str, ids: impl IntoIterator<Item = String>) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut all = BTreeSet::new();
    tests(&root.join("tests"), &mut all);
    tests(&root.join("src"), &mut all);
    let rows = rows(file);
    let present: BTreeSet<_> = rows.iter().map(|(id, _)| id.clone()).collect();
    assert_eq!(present.len(), rows.len(), "{file}: an id stands there twice");
    for id in ids {
        assert!(present.contains(&id), "{file}: no row {id}");
    }
    for (id, cell) in rows {
        let named: Vec<&str> = cell.split('`').skip(1).step_by(2).collect();
        assert!(!named.is_empty() || cell.starts_with("not here:"), "{file}, {id}: no test");
        for name in named {
            assert!(all.contains(name), "{file}, {id}: no test is named {name}");
        }
    }
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
