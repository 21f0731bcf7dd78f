//! What this crate pulls in: under which licences, in how many versions, and by which feature.
//!
//! `cargo metadata` is asked offline first, so that the check works in a build without network.

#![allow(clippy::unwrap_used, reason = "a test says what is wrong by failing")]

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use serde_json::Value;

/// Licences whose terms anybody can meet who ships this crate in a closed product.
const ALLOWED: &[&str] = &[
    "Apache-2.0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CDLA-Permissive-2.0",
    "ISC",
    "MIT",
    "Unicode-3.0",
    "Zlib",
];

/// Crates whose types meet those of the application: a second version of one of them does not
/// compile against it, or doubles the build.
const ONE_VERSION: &[&str] = &[
    "axum",
    "axum-core",
    "bytes",
    "deadpool",
    "deadpool-redis",
    "http",
    "http-body",
    "hyper",
    "metrics",
    "prost",
    "redis",
    "serde",
    "serde_json",
    "sqlx",
    "sqlx-core",
    "thiserror",
    "tokio",
    "tokio-util",
    "tower",
    "tower-layer",
    "tower-service",
    "tracing",
];

/// What only an optional feature may pull in.
const NOT_WITHOUT_FEATURES: &[&str] = &[
    "axum",
    "axum-core",
    "deadpool",
    "deadpool-redis",
    "hyper",
    "redis",
    "reqwest",
    "reqwest-middleware",
    "sqlx",
    "tower",
];

fn metadata(features: &[&str]) -> Value {
    let run = |offline: &[&str]| {
        Command::new(env!("CARGO"))
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .args(["metadata", "--format-version", "1", "--locked"])
            .args(features)
            .args(offline)
            .output()
            .expect("cargo runs")
    };
    let mut output = run(&["--offline"]);
    if !output.status.success() {
        output = run(&[]);
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "cargo metadata: {errors}");
    serde_json::from_slice(&output.stdout).expect("cargo metadata answers in JSON")
}

struct Package {
    name: String,
    version: String,
    licence: String,
}

/// What the library itself is built from: its normal and build dependencies and theirs.
fn dependencies(metadata: &Value) -> Vec<Package> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let by_id = |list: &Value| -> BTreeMap<String, Value> {
        list.as_array().unwrap().iter().map(|each| (text(&each["id"]), each.clone())).collect()
    };
    let packages = by_id(&metadata["packages"]);
    let nodes = by_id(&metadata["resolve"]["nodes"]);
    let root = text(&metadata["resolve"]["root"]);
    let mut seen = BTreeSet::new();
    let mut open = vec![root.clone()];
    while let Some(id) = open.pop() {
        if !seen.insert(id.clone()) {
            continue;
        }
        for dependency in nodes[&id]["deps"].as_array().unwrap() {
            let kinds = dependency["dep_kinds"].as_array().unwrap();
            // `null` is a normal dependency.
            if kinds.iter().any(|kind| kind["kind"] != "dev") {
                open.push(text(&dependency["pkg"]));
            }
        }
    }
    seen.remove(&root);
    let package = |id: &String| Package {
        name: text(&packages[id]["name"]),
        version: text(&packages[id]["version"]),
        licence: text(&packages[id]["license"]),
    };
    seen.iter().map(package).collect()
}

/// Whether an SPDX expression is satisfied by the allowed licences. `/` is the old way to say `OR`.
/// A licence with an exception only grants more, but it must be listed as such.
fn is_allowed(expression: &str) -> bool {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let (allowed, rest) = either(&words);
    allowed && rest.is_empty()
}

fn either<'a, 'b>(words: &'b [&'a str]) -> (bool, &'b [&'a str]) {
    let (mut allowed, mut rest) = both(words);
    while let ["OR", tail @ ..] = rest {
        let (other, tail) = both(tail);
        (allowed, rest) = (allowed || other, tail);
    }
    (allowed, rest)
}

fn both<'a, 'b>(words: &'b [&'a str]) -> (bool, &'b [&'a str]) {
    let (mut allowed, mut rest) = one(words);
    while let ["AND", tail @ ..] = rest {
        let (other, tail) = one(tail);
        (allowed, rest) = (allowed && other, tail);
    }
    (allowed, rest)
}

fn one<'a, 'b>(words: &'b [&'a str]) -> (bool, &'b [&'a str]) {
    match words {
        ["(", inner @ ..] => match either(inner) {
            (allowed, [")", rest @ ..]) => (allowed, rest),
            (_, rest) => (false, rest),
        },
        [_, "WITH", _, rest @ ..] => (false, rest),
        [licence, rest @ ..] => (ALLOWED.contains(licence), rest),
        [] => (false, words),
    }
}

#[test]
fn every_dependency_has_a_licence_that_is_allowed() {
    let all = dependencies(&metadata(&["--all-features"]));
    assert!(all.len() > 50, "only {} dependencies: is the tree read rightly?", all.len());
    let refused: Vec<String> = all
        .iter()
        .filter(|package| !is_allowed(&package.licence))
        .map(|package| format!("{} {}: {:?}", package.name, package.version, package.licence))
        .collect();
    assert!(refused.is_empty(), "not allowed:\n{}", refused.join("\n"));
}

#[test]
fn every_main_crate_has_one_version() {
    let mut versions: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for package in dependencies(&metadata(&["--all-features"])) {
        versions.entry(package.name).or_default().insert(package.version);
    }
    for name in ["tokio", "http", "redis", "axum", "deadpool"] {
        assert!(versions.contains_key(name), "{name} is not found: is the tree read rightly?");
    }
    versions.retain(|name, versions| ONE_VERSION.contains(&name.as_str()) && versions.len() > 1);
    assert_eq!(versions, BTreeMap::new(), "more than one version");
}

#[test]
fn without_features_there_is_neither_a_database_nor_a_web_framework() {
    let names = |features: &[&str]| -> BTreeSet<String> {
        // What `metadata` resolves for dev-dependencies would blur features, so the tree is asked.
        let run = |offline: &[&str]| {
            Command::new(env!("CARGO"))
                .current_dir(env!("CARGO_MANIFEST_DIR"))
                .args(["tree", "--locked", "--edges", "normal,build", "--prefix", "none"])
                .args(["--format", "{p}"])
                .args(features)
                .args(offline)
                .output()
                .expect("cargo runs")
        };
        let mut output = run(&["--offline"]);
        if !output.status.success() {
            output = run(&[]);
        }
        assert!(output.status.success(), "cargo tree: {}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8(output.stdout).unwrap();
        text.lines().filter_map(|line| line.split(' ').next()).map(str::to_owned).collect()
    };
    let none = names(&["--no-default-features"]);
    assert!(none.contains("tokio") && none.contains("http"), "is the tree read rightly? {none:?}");
    for name in NOT_WITHOUT_FEATURES {
        assert!(!none.contains(*name), "{name} is pulled in without any feature");
    }
    let redis = names(&["--no-default-features", "--features", "redis"]);
    assert!(redis.contains("redis") && redis.contains("deadpool-redis"));
    assert!(!redis.contains("axum"), "redis pulls in axum");
    let sqlite = names(&["--no-default-features", "--features", "sqlite"]);
    assert!(sqlite.contains("sqlx-sqlite") && !sqlite.contains("sqlx-postgres"));
    assert!(!sqlite.contains("sqlx-macros"), "sqlite pulls in the macros");
    let postgres = names(&["--no-default-features", "--features", "postgres"]);
    assert!(postgres.contains("sqlx-postgres") && !postgres.contains("libsqlite3-sys"));
    let axum = names(&["--no-default-features", "--features", "axum"]);
    assert!(axum.contains("axum"));
    assert!(!axum.contains("redis"), "axum pulls in redis");
}

#[test]
fn licence_expressions_are_judged_rightly() {
    for allowed in [
        "MIT",
        "MIT OR Apache-2.0",
        "MIT/Apache-2.0",
        "Apache-2.0 / MIT",
        "Unlicense OR MIT",
        "MIT OR Apache-2.0 OR LGPL-2.1-or-later",
        "(MIT OR Apache-2.0) AND Unicode-3.0",
        "MIT AND BSD-3-Clause",
        "Apache-2.0 WITH LLVM-exception OR Apache-2.0 OR MIT",
        "GPL-3.0 AND MIT OR ISC",
    ] {
        assert!(is_allowed(allowed), "{allowed}");
    }
    for refused in [
        "",
        "GPL-3.0",
        "MIT AND GPL-3.0",
        "(MIT OR GPL-3.0) AND MPL-2.0",
        "MIT (",
        "(MIT",
        "GPL-2.0 WITH Classpath-exception-2.0",
        "MIT Apache-2.0",
    ] {
        assert!(!is_allowed(refused), "{refused}");
    }
}
