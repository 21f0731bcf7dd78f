//! The OpenAPI document is true: schemathesis makes requests from it, good ones and bad ones, sends
//! them to the live sandbox, and finds nothing in the answers that is not written there.
#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

use std::collections::HashMap;
use std::path::Path;
use std::process::{Command, Stdio};

#[path = "support/sandbox.rs"]
mod sandbox;
#[path = "support/tools.rs"]
#[allow(dead_code, unreachable_pub, reason = "each test program uses a part of it")]
mod tools;

use sandbox::{Call, Sandbox};

/// Cases for each operation; `SCHEMA_EXAMPLES=1000` makes those that are promised.
const EXAMPLES: &str = "60";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn schemathesis_finds_no_answer_that_the_document_does_not_describe() {
    let sandbox = Sandbox::start(&[]);
    let folder = tempfile::tempdir().unwrap();
    let examples = std::env::var("SCHEMA_EXAMPLES").unwrap_or_else(|_| EXAMPLES.to_owned());
    let document = Path::new(env!("CARGO_MANIFEST_DIR")).join("openapi.yaml");
    // One worker: CPython 3.11 has a fault in its compiler that several of them meet.
    let output = Command::new(tools::python())
        .args(["-m", "schemathesis.cli", "--config-file"])
        .arg(tools::file("sdk/schemathesis.toml"))
        .arg("run")
        .arg(document)
        .args(["--url", &format!("http://{}", sandbox.address)])
        .args(["--header", "Authorization: Bearer sk_test_acme"])
        .args(["--max-examples", &examples, "--seed", "20260101", "--workers", "1"])
        .args(["--generation-database", "none", "--no-color"])
        .env("SCHEMATHESIS_HOOKS", tools::file("sdk/hooks.py"))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .current_dir(&folder)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    let cases =
        said.lines().find(|line| line.contains(" generated, ")).expect("it counts its cases");
    println!("schemathesis, {examples} examples: {}", cases.trim());

    // It stands as it stood, and no key paid twice.
    assert_eq!(sandbox.send(Call::get("/healthz")).await.status, 200);
    let (_, errors) = sandbox.said();
    let panics: Vec<_> = errors.lines().filter(|line| line.contains("panicked at")).collect();
    let meant = errors.lines().filter(|line| line.starts_with("tok_panic_")).count();
    assert_eq!(panics.len(), meant, "{panics:?}");
    let mut charges: HashMap<(String, String), u32> = HashMap::new();
    for entry in sandbox.ledger().await["entries"].as_array().unwrap() {
        let text = |name: &str| entry[name].as_str().unwrap().to_owned();
        if text("action") == "charge" && !text("key_id").is_empty() {
            *charges.entry((text("account"), text("key_id"))).or_default() += 1;
        }
    }
    assert!(charges.len() > 10, "{}", charges.len());
    assert!(charges.values().all(|charges| *charges == 1));
}
