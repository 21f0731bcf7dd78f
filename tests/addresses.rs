//! Addresses with a slip in them, as the program for operators and the sandbox are given them: each error says what
//! to change.
#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]
#![allow(clippy::wildcard_enum_match_arm, reason = "every other outcome fails the test")]

#[path = "support/program.rs"]
mod program;
#[path = "support/sandbox.rs"]
mod sandbox;

use program::Cli;

/// What both programs say of an address.
fn told(address: &str) -> [(&'static str, String); 2] {
    let ran = Cli::new(address).run(&["trail"]);
    assert!(ran.code == 1 || ran.code == 2, "{ran:?}");
    let (code, said) = sandbox::refused(&["--store", address], &[]);
    assert_ne!(code, Some(0), "{said}");
    [("idempotency", ran.errors), ("payments", said)]
}

#[test]
fn a_blank_in_the_middle_of_an_address_is_told_with_what_to_do() {
    for (address, shown) in [
        ("redis://u:s3cret@local host:6379/", r#""redis://local host:6379/""#),
        ("redis://u:s3cret@h :6379", r#""redis://h :6379""#),
        (
            "redis://u:s3cret@h:6379/0 redis://other:6379",
            r#""redis://h:6379/0 redis://other:6379""#,
        ),
        ("redis+cluster://u:s3cret@a:1, b:2", r#""redis+cluster://a:1, b:2""#),
        ("redis://u:s3 cret@h:6379/", r#""redis://h:6379/""#),
        ("redis: //h:6379", "\"\""),
        ("postgres://u:s3cret@h /payments", r#""postgres://h /payments""#),
        ("postgres://u:s3cret@h/pay ments", r#""postgres://h/pay ments""#),
        ("postgres://u:s3\tcret@h/d", r#""postgres://h/d""#),
        ("sqlite: payments.db", r#""sqlite: payments.db""#),
    ] {
        for (program, said) in told(address) {
            let words = ["a blank or a line end in it", "take it away"];
            assert!(words.iter().all(|word| said.contains(word)), "{program}, {address:?}: {said}");
            assert!(shown == "\"\"" || said.contains(shown), "{program}: no {shown} in {said}");
            assert!(!said.contains("s3") && !said.contains("cret"), "{program}: {said}");
        }
    }
}

#[test]
fn a_sqlite_address_with_slashes_of_a_host_is_told_with_the_one_to_write() {
    for (address, write) in [
        ("sqlite:///", "sqlite:/path/payments.db"),
        ("sqlite:////", "sqlite:/path/payments.db"),
        ("sqlite://", "sqlite:/path/payments.db"),
        ("sqlite:///var/lib/pay.db", "write sqlite:/var/lib/pay.db"),
        ("sqlite://pay.db", "write sqlite:pay.db"),
    ] {
        for (program, said) in told(address) {
            assert!(said.contains("no host"), "{program}, {address}: {said}");
            assert!(said.contains(write), "{program}, {address}: no {write} in {said}");
        }
    }
}

#[test]
fn a_sqlite_address_of_a_directory_asks_for_the_file_in_it() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().display();
    for address in [format!("sqlite:{folder}"), format!("sqlite:{folder}/")] {
        for (program, said) in told(&address) {
            let write = format!("sqlite:{folder}/payments.db");
            assert!(said.contains("it is a directory"), "{program}, {address}: {said}");
            assert!(said.contains(&write), "{program}, {address}: no {write} in {said}");
        }
    }
}
