//! Which tests a source file has: what the tables of cases and faults may name.

use std::collections::BTreeSet;

/// The names of all test functions in a text: those with `#[test]` or `#[tokio::test]` among their own
/// attributes and without `#[ignore]`, and those in a list `both! { … }`, which makes a test on each of two
/// databases of every name in it, or `suite! { … }`, which every store runs.
///
/// It reads lines, as rustfmt writes them.
pub(crate) fn tests_in(text: &str) -> BTreeSet<String> {
    let mut tests = BTreeSet::new();
    // Whether the attributes since the last item say that the next function is a test.
    let (mut is_test, mut ignored) = (false, false);
    let mut listed = false;
    for line in text.lines() {
        if listed {
            listed = line != "}";
            let item = line.strip_prefix("    ").and_then(|item| item.split_once(['(', ',']));
            tests.extend(item.filter(|(name, _)| is_name(name)).map(|(name, _)| name.to_owned()));
            continue;
        }
        let line = match line {
            "both! {" | "suite! {" => {
                listed = true;
                continue;
            }
            line => line.trim(),
        };
        if line == "#[test]" || line == "#[tokio::test]" || line.starts_with("#[tokio::test(") {
            is_test = true;
        } else if line.starts_with("#[ignore") {
            ignored = true;
        } else if !line.starts_with("#[") && !line.starts_with("//") && !line.is_empty() {
            let function = line.trim_start_matches("async ").strip_prefix("fn ");
            let name = function.and_then(|function| function.split(['(', '<']).next());
            if is_test && !ignored {
                tests.extend(name.map(str::to_owned));
            }
            (is_test, ignored) = (false, false);
        }
    }
    tests
}

fn is_name(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_')
        && !text.is_empty()
}
