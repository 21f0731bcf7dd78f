//! The architecture, checked: imports run downward only, and what a floor must not know it does not
//! name.
//!
//! | floor | |
//! |---|---|
//! | 0 | words: `key scope fingerprint guard token response checkpoint error`, and `by_digest`, `mistakes` |
//! | 1 | rules: `record`, and `config`, which may use `record` |
//! | 2 | the contract: `store`, `store/conformance` |
//! | 3 | stores: `store/{memory,redis,sql,faulty}`, which never see each other |
//! | 4 | `engine` |
//! | 5 | `middleware` |
//! | 6 | satellites, which never see each other |
//! | roof | `lib.rs`, `guide` |
//!
//! The checker reads text. It knows comments, literals, `#[cfg(test)]`, inline modules and groups of
//! imports, and nothing else of Rust; macros that build paths would get past it.

#![allow(clippy::unwrap_used, reason = "a test says what is wrong by failing")]

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::path::Path;

/// Floors of what stands directly in `src`.
const TOP: &[(&str, u8)] = &[
    ("by_digest", 0),
    ("checkpoint", 0),
    ("error", 0),
    ("fingerprint", 0),
    ("guard", 0),
    ("key", 0),
    ("mistakes", 0),
    ("response", 0),
    ("scope", 0),
    ("token", 0),
    ("config", 1),
    ("record", 1),
    ("store", 2),
    ("engine", 4),
    ("middleware", 5),
    ("admin", 6),
    ("client", 6),
    ("inbox", 6),
    ("outbox", 6),
    ("sidecar", 6),
    // Programs use the crate from outside.
    ("bin", ROOF),
    ("guide", ROOF),
    ("lib", ROOF),
];
/// Within `store`, these are stores; the rest is the contract.
const STORES: &[&str] = &["faulty", "memory", "protected", "redis", "sql"];
const ROOF: u8 = u8::MAX;

const RULES: u8 = 1;
const STORES_FLOOR: u8 = 3;
const EDGE: u8 = 5;
const SATELLITES: u8 = 6;

const MOST_LINES: usize = 600;

/// Who may name a status code, and for what.
const STATUS_CODES: &[&str] = &[
    // What each refusal is answered with.
    "middleware/problem.rs",
    // What a handler's own status means for its record.
    "middleware/answer.rs",
    // The extractors' rejection in a route that has no layer.
    "middleware/extension.rs",
    // What a server's status means for a client that may retry.
    "client/judge.rs",
    // What an operator's mistake is answered with.
    "admin/router.rs",
];

/// Where a file or an import stands.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Place<'a> {
    floor: u8,
    /// Floors 3 and 6: which of the siblings. Floor 1: which of the two. Empty on other floors.
    unit: &'a str,
}

impl<'a> Place<'a> {
    /// The place of a module path such as `["store", "redis", "script"]`; none if its first part
    /// is no module with a floor.
    fn of(path: &[&'a str]) -> Option<Self> {
        let first = *path.first()?;
        let (_, floor) = *TOP.iter().find(|(name, _)| *name == first)?;
        let place = match path.get(1) {
            Some(second) if first == "store" && STORES.contains(second) => {
                Self { floor: STORES_FLOOR, unit: second }
            }
            _ if [RULES, SATELLITES].contains(&floor) => Self { floor, unit: first },
            _ => Self { floor, unit: "" },
        };
        Some(place)
    }

    fn may_use(self, other: Self) -> bool {
        match self.floor {
            ROOF => true,
            // Configuration speaks of terms and policies, the rules do not know of configuration.
            RULES if other.floor == RULES => self.unit == other.unit || self.unit == "config",
            STORES_FLOOR | SATELLITES if other.floor == self.floor => self.unit == other.unit,
            floor => other.floor <= floor,
        }
    }
}

impl fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.floor, self.unit) {
            (ROOF, _) => f.write_str("roof"),
            (floor, "") => write!(f, "floor {floor}"),
            (floor, unit) => write!(f, "floor {floor}, {unit}"),
        }
    }
}

/// Everything that is wrong with one file; `path` is relative to `src`, with `/`.
fn breaches(path: &str, text: &str) -> Vec<String> {
    if is_test_file(path) {
        return Vec::new();
    }
    let module = module_path(path);
    let module: Vec<&str> = module.iter().map(String::as_str).collect();
    let top = if module.is_empty() { &["lib"][..] } else { &module };
    let Some(here) = Place::of(top) else {
        return vec![format!("{path}: has no floor; give it one in tests/floors.rs")];
    };
    let code = code_of(text);
    let tokens = tokens(&code);
    let mut found = Vec::new();

    for target in imports(&tokens, &module) {
        let parts: Vec<&str> = target.iter().map(String::as_str).collect();
        let shown = parts.join("::");
        match Place::of(&parts) {
            // The roof sees everything, and a name that is taken from it hides its floor.
            None if here.floor != ROOF => {
                found.push(format!("{path}: `crate::{shown}` is taken from the roof"));
            }
            Some(there) if !here.may_use(there) => {
                found.push(format!("{path} ({here}) uses `crate::{shown}` ({there})"));
            }
            None | Some(_) => {}
        }
    }

    let names: BTreeSet<&str> = tokens.iter().copied().filter(|token| is_word(token)).collect();
    let mut forbid = |words: &[&str], why: &str| {
        for word in words.iter().filter(|word| names.contains(**word)) {
            found.push(format!("{path} ({here}) names `{word}`: {why}"));
        }
    };
    if here.floor <= RULES {
        forbid(&["tokio", "Instant", "SystemTime"], "words and rules do no I/O and read no clock");
    }
    if here.floor <= 4 {
        forbid(
            &["axum", "axum_core", "hyper", "tower", "tower_layer", "tower_service"],
            "only the edge knows who carries the requests",
        );
    }
    if here.floor <= EDGE && path != "store/mod.rs" {
        let own = |kind: &str| here.floor == STORES_FLOOR && kind.to_lowercase() == here.unit;
        for (kind, name) in [
            ("memory", "MemoryStore"),
            ("redis", "RedisStore"),
            ("sql", "PostgresStore"),
            ("sql", "PostgresLeaseStore"),
            ("sql", "SqliteStore"),
            ("sql", "SqliteLeaseStore"),
        ] {
            if !own(kind) {
                forbid(&[name], "nothing but a store itself knows which store it is");
            }
        }
    }
    if here.floor != ROOF && !STATUS_CODES.contains(&path) && names_a_status(&tokens) {
        found.push(format!("{path} ({here}) decides a status code"));
    }

    let lines = code.lines().filter(|line| !line.trim().is_empty()).count();
    if lines >= MOST_LINES {
        found.push(format!("{path}: {lines} lines of code; a file has less than {MOST_LINES}"));
    }
    found
}

/// `src/x/tests.rs` and everything in `src/x/tests/`: their modules are `#[cfg(test)]`.
fn is_test_file(path: &str) -> bool {
    path.split('/').any(|part| part == "tests" || part == "tests.rs")
}

/// `store/redis/mod.rs` is `store::redis`; `lib.rs` is nothing.
fn module_path(path: &str) -> Vec<String> {
    let stem = path.strip_suffix(".rs").unwrap_or(path);
    let mut parts: Vec<String> = stem.split('/').map(str::to_owned).collect();
    if parts.last().is_some_and(|last| last == "mod") || parts == ["lib"] {
        parts.pop();
    }
    parts
}

/// The text without comments, without what stands in literals, and without `#[cfg(test)]` items.
fn code_of(text: &str) -> String {
    without_tests(&without_comments_and_literals(text))
}

fn without_comments_and_literals(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let at = |index: usize| chars.get(index).copied().unwrap_or('\0');
    let mut code = String::with_capacity(text.len());
    let mut i = 0;
    while i < chars.len() {
        let start = i;
        match at(i) {
            '/' if at(i + 1) == '/' => {
                while i < chars.len() && at(i) != '\n' {
                    i += 1;
                }
                continue;
            }
            '/' if at(i + 1) == '*' => {
                let mut depth = 0;
                loop {
                    match (at(i), at(i + 1)) {
                        ('/', '*') => (depth, i) = (depth + 1, i + 2),
                        ('*', '/') => (depth, i) = (depth - 1, i + 2),
                        _ => i += 1,
                    }
                    if depth == 0 || i >= chars.len() {
                        break;
                    }
                }
            }
            'r' if matches!(at(i + 1), '"' | '#') && !is_word_char_before(&chars, i) => {
                let mut hashes = 0;
                while at(i + 1 + hashes) == '#' {
                    hashes += 1;
                }
                if at(i + 1 + hashes) == '"' {
                    i += 2 + hashes;
                    let closes = |i: usize| at(i) == '"' && (1..=hashes).all(|n| at(i + n) == '#');
                    while i < chars.len() && !closes(i) {
                        i += 1;
                    }
                    i += 1 + hashes;
                } else {
                    i += 1; // a raw name
                    code.push('r');
                    continue;
                }
            }
            '"' => {
                i += 1;
                while i < chars.len() && at(i) != '"' {
                    i += if at(i) == '\\' { 2 } else { 1 };
                }
                i += 1;
            }
            '\'' if at(i + 1) == '\\' || at(i + 2) == '\'' => {
                i += if at(i + 1) == '\\' { 3 } else { 2 };
                while i < chars.len() && at(i) != '\'' {
                    i += 1;
                }
                i += 1;
            }
            other => {
                code.push(other);
                i += 1;
                continue;
            }
        }
        // Lines keep their number, so that a literal over three lines counts as three.
        let skipped = &chars[start..i.min(chars.len())];
        if skipped.first() == Some(&'/') {
            code.extend(skipped.iter().filter(|c| **c == '\n'));
        } else {
            code.push('_');
            skipped.iter().filter(|c| **c == '\n').for_each(|_| code.push_str("\n_"));
        }
    }
    code
}

fn is_word_char_before(chars: &[char], index: usize) -> bool {
    // `br"` and `cr"` are literals too, so only names longer than their prefix count.
    index > 1 && is_word_char(chars[index - 1]) && is_word_char(chars[index - 2])
}

fn without_tests(code: &str) -> String {
    let mut kept = String::with_capacity(code.len());
    let mut rest = code;
    while let Some(start) = rest.find("#[cfg(test)]") {
        kept.push_str(&rest[..start]);
        rest = &rest[start..];
        let mut depth = 0_i32;
        let mut end = rest.len();
        for (index, c) in rest.char_indices() {
            match c {
                '(' | '[' | '{' => depth += 1,
                ')' | ']' => depth -= 1,
                '}' => {
                    depth -= 1;
                    if depth == 0 {
                        end = index + 1;
                        break;
                    }
                }
                ';' if depth == 0 => {
                    end = index + 1;
                    break;
                }
                _ => {}
            }
        }
        rest = &rest[end..];
    }
    kept.push_str(rest);
    kept
}

fn is_word_char(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

fn is_word(token: &str) -> bool {
    token.chars().next().is_some_and(|c| is_word_char(c) && !c.is_ascii_digit())
}

/// Words, `::`, and every other character by itself.
fn tokens(code: &str) -> Vec<&str> {
    let mut tokens = Vec::new();
    let mut rest = code.trim_start();
    while let Some(first) = rest.chars().next() {
        let length = if is_word_char(first) {
            rest.find(|c| !is_word_char(c)).unwrap_or(rest.len())
        } else if rest.starts_with("::") {
            2
        } else {
            first.len_utf8()
        };
        let (token, tail) = rest.split_at(length);
        tokens.push(token);
        rest = tail.trim_start();
    }
    tokens
}

/// All paths that start with `crate` or leave their module with `super`, from the crate's root.
fn imports(tokens: &[&str], module: &[&str]) -> BTreeSet<Vec<String>> {
    let mut found = BTreeSet::new();
    let mut braces: Vec<Option<&str>> = Vec::new();
    let mut i = 0;
    while i < tokens.len() {
        match tokens[i] {
            "{" => {
                let inline = i >= 2 && tokens[i - 2] == "mod";
                braces.push(inline.then(|| tokens[i - 1]));
            }
            "}" => drop(braces.pop()),
            "crate" if tokens.get(i + 1) == Some(&"::") => {
                i = expand(tokens, i + 2, &mut Vec::new(), &mut found);
                continue;
            }
            "super" if tokens.get(i + 1) == Some(&"::") => {
                let mut base: Vec<String> = module
                    .iter()
                    .copied()
                    .chain(braces.iter().flatten().copied())
                    .map(str::to_owned)
                    .collect();
                while tokens.get(i) == Some(&"super") && tokens.get(i + 1) == Some(&"::") {
                    base.pop();
                    i += 2;
                }
                i = expand(tokens, i, &mut base, &mut found);
                continue;
            }
            _ => {}
        }
        i += 1;
    }
    found
}

/// Follows a path from `at`, through groups; gives the index behind it.
fn expand(
    tokens: &[&str],
    mut at: usize,
    base: &mut Vec<String>,
    found: &mut BTreeSet<Vec<String>>,
) -> usize {
    let depth = base.len();
    loop {
        match tokens.get(at) {
            Some(&"{") => {
                at += 1;
                while !matches!(tokens.get(at), None | Some(&"}")) {
                    at = expand(tokens, at, base, found);
                    while !matches!(tokens.get(at), None | Some(&"," | &"}")) {
                        at += 1; // `as name`
                    }
                    if tokens.get(at) == Some(&",") {
                        at += 1;
                    }
                }
                base.truncate(depth);
                return at + 1;
            }
            Some(&"self" | &"*") => {
                found.insert(base.clone());
                base.truncate(depth);
                return at + 1;
            }
            Some(word) if is_word(word) => {
                base.push((*word).to_owned());
                at += 1;
                if tokens.get(at) == Some(&"::") {
                    at += 1;
                    continue;
                }
            }
            // A turbofish, or nothing that this checker knows.
            _ => {}
        }
        found.insert(base.clone());
        base.truncate(depth);
        return at;
    }
}

/// `StatusCode::NOT_FOUND`, but not `StatusCode::from_u16`.
fn names_a_status(tokens: &[&str]) -> bool {
    tokens.windows(3).any(|three| {
        three[0] == "StatusCode"
            && three[1] == "::"
            && three[2].chars().all(|c| c.is_ascii_uppercase() || c == '_')
    })
}

fn sources(directory: &Path, prefix: &str, into: &mut Vec<(String, String)>) {
    for entry in fs::read_dir(directory).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        let path = if prefix.is_empty() { name } else { format!("{prefix}/{name}") };
        if entry.file_type().unwrap().is_dir() {
            sources(&entry.path(), &path, into);
        } else if path.ends_with(".rs") {
            into.push((path, fs::read_to_string(entry.path()).unwrap()));
        }
    }
}

#[test]
fn imports_run_downward_and_no_floor_knows_what_it_must_not() {
    let mut files = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), "", &mut files);
    for wanted in ["lib.rs", "record/mod.rs", "store/memory.rs", "token.rs"] {
        assert!(files.iter().any(|(path, _)| path == wanted), "{wanted} was not found");
    }
    let found: Vec<String> = files.iter().flat_map(|(path, text)| breaches(path, text)).collect();
    assert!(found.is_empty(), "\n{}", found.join("\n"));
}

/// Test files are passed over, so whoever declares one must not ship it.
#[test]
fn modules_of_tests_are_compiled_for_tests_only() {
    let mut files = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), "", &mut files);
    for (path, text) in files.iter().filter(|(path, _)| !is_test_file(path)) {
        let code = code_of(text);
        let shipped = tokens(&code).windows(2).any(|two| two == ["mod", "tests"]);
        assert!(!shipped, "{path} declares `mod tests` without #[cfg(test)]");
    }
}

// ---- The checker itself can fail. ----

#[track_caller]
fn refused(path: &str, text: &str, part: &str) {
    let found = breaches(path, text);
    let hit = found.iter().any(|breach| breach.contains(part));
    assert!(hit, "{path}: expected a breach with {part:?} in {found:#?}");
}

#[track_caller]
fn fine(path: &str, text: &str) {
    assert_eq!(breaches(path, text), Vec::<String>::new());
}

#[test]
fn an_import_that_goes_up_is_refused() {
    refused("token.rs", "use crate::record::Record;", "floor 1, record");
    refused("record/mod.rs", "use crate::store::Lease;", "floor 2");
    refused("record/codec.rs", "use crate::config::Config;", "floor 1, config");
    refused("store/mod.rs", "use crate::engine::Engine;", "floor 4");
    refused("store/memory.rs", "use crate::middleware::Outcome;", "floor 5");
    refused("engine/keeper.rs", "use crate::middleware::problem;", "floor 5");
    refused("middleware/layer.rs", "use crate::client::Client;", "floor 6");
    refused("store/conformance.rs", "use crate::store::memory::MemoryStore;", "floor 3, memory");
}

#[test]
fn an_import_that_goes_down_or_stays_is_fine() {
    fine("scope.rs", "use crate::key::IdempotencyKey;");
    fine("config.rs", "use crate::record::{OnExpired, Terms};");
    fine("store/redis/mod.rs", "use super::{Lease, Store}; use super::super::record; mod script;");
    fine("store/redis/script.rs", "use super::connect; use super::super::Lease;");
    fine("engine/mod.rs", "use crate::store::{Lease, Store}; use crate::record::*;");
    fine("middleware/service.rs", "use crate::engine::{Engine, Run}; use tower_service::Service;");
    fine("client/mod.rs", "use crate::{engine::Engine, key::IdempotencyKey as Key};");
    fine("lib.rs", "pub use store::redis::RedisStore; pub use crate::middleware::Outcome;");
}

#[test]
fn siblings_never_see_each_other() {
    refused("store/redis/mod.rs", "use crate::store::memory::Clock;", "floor 3, memory");
    refused("store/sql/tx.rs", "use super::super::redis::script;", "floor 3, redis");
    refused("store/memory.rs", "use super::redis;", "floor 3, redis");
    refused("client/mod.rs", "use crate::admin::Settle;", "floor 6, admin");
    refused("store/redis/mod.rs", "use crate::store::MemoryStore;", "MemoryStore");
}

#[test]
fn paths_in_code_and_in_groups_count_like_imports() {
    refused("token.rs", "fn f() { let _ = crate::store::Lease::new::<u8>(); }", "store");
    refused("error.rs", "use crate::{key::KeyError, engine::{self, wait as w}};", "engine");
    refused("record/codec.rs", "fn f(x: super::super::store::Lease) {}", "store");
    refused("key.rs", "mod inner { use super::super::engine::Engine; }", "engine");
    fine("key.rs", "mod inner { use super::Thing; use super::super::token::Fence; }");
}

#[test]
fn a_name_taken_from_the_roof_is_refused() {
    refused("engine/mod.rs", "use crate::Fence;", "roof");
    refused("engine/mod.rs", "use crate::*;", "roof");
    refused("token.rs", "use super::Config;", "roof");
}

#[test]
fn comments_literals_and_tests_do_not_count() {
    fine(
        "token.rs",
        "/// See [`Config`](crate::Config).\n// crate::store::X\n/* crate::store::X */",
    );
    fine("token.rs", "const X: &str = \"crate::store::X // \\\" tokio\"; const C: char = '\"';");
    fine("token.rs", "const X: &[u8] = br#\"crate::engine::X \" tokio\"#;");
    fine("token.rs", "#[cfg(test)]\nmod tests { use crate::store::X; fn f() { tokio::run(); } }");
    fine("token.rs", "#[cfg(test)]\n#[allow(x)]\nuse crate::store::X;\nstruct Y;");
    fine("record/tests/table.rs", "use crate::engine::X;");
    refused("token.rs", "#[cfg(test)]\nmod tests;\nuse crate::store::X;", "store");
    refused("token.rs", "fn f<'a>(x: &'a u8) {} use crate::store::X;", "store");
    refused("token.rs", "const C: char = '\\''; use crate::store::X;", "store");
}

#[test]
fn words_and_rules_that_read_a_clock_are_refused() {
    refused("record/mod.rs", "use std::time::Instant;", "Instant");
    refused("record/codec.rs", "fn f() { std::time::SystemTime::now(); }", "SystemTime");
    refused("fingerprint.rs", "use tokio::sync::Mutex;", "tokio");
    refused("config.rs", "use tokio::time::Duration;", "tokio");
    fine("record/mod.rs", "use std::time::Duration;");
}

#[test]
fn an_engine_that_knows_its_carrier_or_its_store_is_refused() {
    refused("engine/mod.rs", "use axum::body::Body;", "axum");
    refused("engine/wait.rs", "use tower::ServiceExt;", "tower");
    refused("engine/mod.rs", "fn f(s: &dyn Any) { s.is::<RedisStore>(); }", "RedisStore");
    refused("middleware/layer.rs", "fn f(s: MemoryStore) {}", "MemoryStore");
    fine("engine/mod.rs", "/// A [`MemoryStore`](crate::MemoryStore) will do.\nstruct Engine;");
}

#[test]
fn a_status_code_outside_of_the_edge_is_refused() {
    refused("engine/mod.rs", "fn f() { StatusCode::CONFLICT; }", "status code");
    refused("middleware/service.rs", "fn f() { StatusCode::CONFLICT; }", "status code");
    fine("middleware/problem.rs", "fn f() { StatusCode::CONFLICT; }");
    fine("response.rs", "fn f() { StatusCode::from_u16(200); }");
}

#[test]
fn a_file_that_is_too_long_or_has_no_floor_is_refused() {
    let long = "fn f() {}\n".repeat(MOST_LINES);
    refused("engine/mod.rs", &long, "600 lines");
    fine("engine/mod.rs", &long.replacen("fn f() {}\n", "// a comment\n\n", 1));
    refused("helpers.rs", "", "no floor");
}
