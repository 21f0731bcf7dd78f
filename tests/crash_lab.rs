//! The table that `examples/crash_lab` prints: attempts, durable effects, and what the client is told.
#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

use std::process::Command;

#[path = "support/sandbox.rs"]
mod sandbox;

/// Boundary; then for each cut attempts, effects, status and code.
const PAID: &str = "201 paid";
const UNKNOWN: &str = "409 idempotency_outcome_unknown";
type Row = (u32, u32, &'static str);
const TABLE: [(&str, [Row; 4]); 6] = [
    ("effect and key in one transaction", [(2, 1, PAID), (2, 1, PAID), (1, 1, PAID), (1, 1, PAID)]),
    ("key first, in its own transaction", [(1, 0, PAID), (1, 1, PAID), (1, 1, PAID), (1, 1, PAID)]),
    (
        "effect first, in its own transaction",
        [(2, 1, PAID), (2, 2, PAID), (1, 1, PAID), (1, 1, PAID)],
    ),
    ("Redis, at most once", [(1, 0, UNKNOWN), (1, 1, UNKNOWN), (1, 1, PAID), (1, 1, PAID)]),
    ("Redis, at least once", [(2, 1, PAID), (2, 2, PAID), (1, 1, PAID), (1, 1, PAID)]),
    (
        "Redis, at least once, with a downstream key",
        [(2, 1, PAID), (2, 1, PAID), (1, 1, PAID), (1, 1, PAID)],
    ),
];

#[test]
fn the_boundary_of_the_transaction_decides_what_a_crash_costs() {
    let output = Command::new(sandbox::built("crash_lab")).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}\n{errors}");
    assert!(!said.contains("left out"), "this test needs redis-server: `tests/run` installs it");
    let rows: Vec<Vec<&str>> = said
        .lines()
        .skip(2)
        .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
        .collect();
    let cuts = ["after the claim", "after the effect", "after the commit", "answer lost"];
    let expected = TABLE.iter().flat_map(|(boundary, rows)| {
        rows.iter().zip(cuts).map(move |((attempts, effects, told), cut)| {
            [
                boundary.to_string(),
                cut.into(),
                attempts.to_string(),
                effects.to_string(),
                told.to_string(),
            ]
        })
    });
    for (row, expected) in rows.iter().zip(expected.clone()) {
        assert_eq!(row[..5], expected, "{said}");
    }
    assert_eq!(rows.len(), expected.count(), "{said}");
}
