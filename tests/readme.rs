//! The README as a newcomer reads it: as Markdown, where nothing is hidden.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

const README: &str = include_str!("../README.md");

/// Lines of Rust, without those of other languages and of prose.
fn snippets() -> Vec<(bool, Vec<&'static str>)> {
    let (mut snippets, mut open) = (Vec::new(), false);
    for line in README.lines() {
        match line.strip_prefix("```") {
            Some(info) if !open && info.starts_with("rust") => {
                snippets.push((info.contains("ignore"), Vec::new()));
                open = true;
            }
            Some(_) => open = false,
            None if open => snippets.last_mut().unwrap().1.push(line),
            None => {}
        }
    }
    snippets
}

#[test]
fn no_snippet_has_lines_that_only_rustdoc_hides() {
    let snippets = snippets();
    assert!(snippets.len() >= 7, "the snippets are found: {}", snippets.len());
    for line in snippets.iter().flat_map(|(_, lines)| lines) {
        let line = line.trim();
        assert!(line != "#" && !line.starts_with("# "), "{line}");
    }
}

/// Compiled here, as the feature that it needs is not on for all doctests. Word for word what the README says.
#[rustfmt::skip]
mod client {
use reqwest_middleware::ClientBuilder;
use tower_idempotency::{IdempotencyKey, client::{Answered, ClientError, RetryMiddleware, RetryPolicy}};

pub(super) async fn pay(url: &str, order: String) -> Result<bool, reqwest_middleware::Error> {
    let client = ClientBuilder::new(reqwest::Client::new()).with(RetryMiddleware::new(RetryPolicy::new())).build();
    let key = IdempotencyKey::random(); // keep it with the order, so that a restart goes on under it
    let response = match client.post(url).header("idempotency-key", key.as_str()).body(order).send().await {
        Ok(response) => response, // of any status: the operation has its answer
        Err(error) => {
            if let Some(error) = ClientError::in_middleware(&error) {
                let kind = error.kind(); // gave up, outcome unknown, key reused, ..: unless `is_safe_new_key()`, come back under the same key
                eprintln!("{error} ({kind:?}, reference {:?})", error.reference());
            }
            return Err(error);
        }
    };
    let replayed = response.extensions().get::<Answered>().is_some_and(Answered::is_replay);
    Ok(replayed)
}
}

#[test]
fn the_one_snippet_that_no_doctest_compiles_stands_here() {
    let here = include_str!("readme.rs").split_once("mod client {").unwrap().1;
    let ignored = snippets().into_iter().filter(|(ignored, _)| *ignored);
    let ignored: Vec<_> = ignored.map(|(_, lines)| lines.join("\n")).collect();
    assert_eq!(ignored.len(), 1, "{ignored:?}");
    assert!(
        here.contains(&ignored[0].replace("\nasync fn", "\npub(super) async fn")),
        "{ignored:?}"
    );
    let _ = client::pay;
}
