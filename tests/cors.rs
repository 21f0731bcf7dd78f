//! The page of `examples/cors.rs` in a real browser: its script can send the key, and read the mark
//! of a replay and `Retry-After`, from another origin.
#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use axum::Router;
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::process::Command;

#[path = "../examples/cors.rs"]
#[allow(dead_code, reason = "the test serves what its main function would")]
mod example;

/// Starting a browser takes seconds where nothing is cached.
const PATIENCE: Duration = Duration::from_secs(90);

/// Chromium, by any of its names.
fn browser() -> PathBuf {
    let names = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path)
        .flat_map(|folder| names.map(|name| folder.join(name)))
        .find(|candidate| candidate.is_file());
    found.expect("a Chromium is missing: `tests/run` installs it and runs everything")
}

async fn listen() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    (listener, url)
}

fn serve(listener: TcpListener, router: Router) {
    tokio::spawn(async move { axum::serve(listener, router).await });
}

/// What the script of the page wrote, as the browser shows it.
async fn seen_at(page: &str) -> Value {
    let profile = tempfile::tempdir().unwrap();
    let mut chromium = Command::new(browser());
    chromium
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"])
        .args(["--no-first-run", "--disable-extensions", "--disable-background-networking"])
        .args(["--dump-dom", "--virtual-time-budget=30000"])
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .arg(page)
        .stdin(Stdio::null())
        .kill_on_drop(true);
    let output = tokio::time::timeout(PATIENCE, chromium.output()).await;
    let output = output.expect("the browser ends in time").unwrap();
    let dom = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    let seen = dom.split("<pre id=\"seen\">").nth(1).and_then(|rest| rest.split("</pre>").next());
    let seen = seen.unwrap_or_else(|| panic!("no page: {dom} {errors}"));
    serde_json::from_str(seen).unwrap_or_else(|error| panic!("{error}: {seen} {errors}"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_script_from_another_origin_sends_the_key_and_reads_mark_and_retry_after() {
    let ((api_at, api), (page_at, page)) = (listen().await, listen().await);
    serve(api_at, example::api(page.parse().unwrap()).unwrap());
    serve(page_at, example::page(&api));
    let seen = seen_at(&page).await;

    let (paid, busy, afterwards) = (&seen["paid"], &seen["busy"], &seen["afterwards"]);
    assert_eq!(paid["status"], 201, "{seen}");
    assert_eq!(paid["replayed"], Value::Null);
    assert_eq!(busy["status"], 409);
    assert_eq!(busy["body"]["code"], "idempotency_key_in_use");
    let seconds: u32 = busy["retryAfter"].as_str().unwrap().parse().unwrap();
    assert!((1..=30).contains(&seconds), "{seen}");
    assert_eq!(busy["shouldRetry"], "true");
    assert_eq!((&afterwards["status"], &afterwards["replayed"]), (&201.into(), &"true".into()));
    assert_eq!(afterwards["body"], paid["body"]);
    for answer in [paid, busy, afterwards] {
        assert_eq!(answer["key"], "order-4711");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_page_of_an_origin_that_is_not_allowed_sees_nothing() {
    let ((api_at, api), (page_at, page)) = (listen().await, listen().await);
    serve(api_at, example::api("https://shop.example".parse().unwrap()).unwrap());
    serve(page_at, example::page(&api));
    let seen = seen_at(&page).await;
    assert!(
        seen["error"].as_str().is_some_and(|error| error.contains("Failed to fetch")),
        "{seen}"
    );
}
