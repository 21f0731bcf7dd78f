//! What the program says to who meets it for the first time: what is missing, where it looked, what is wrong.
#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]
#![allow(clippy::wildcard_enum_match_arm, reason = "every other outcome fails the test")]

#[path = "support/program.rs"]
mod program;
mod support;

use program::{Cli, Ran, TERMS, claimed, completed, key, unknown};
use support::postgres::PostgresServer;
use support::redis::RedisServer;
use support::tls::Papers;
use tower_idempotency::admin::rfc3339;
use tower_idempotency::record::{Millis, Release, Verdict};
use tower_idempotency::store::redis::{RedisStoreBuilder, StartupChecks};
use tower_idempotency::{PostgresLeaseStore, RedisStore, SqliteLeaseStore, Store};

/// Checks leave records, for two seconds.
fn unchecked_builder() -> RedisStoreBuilder {
    RedisStore::builder().startup_checks(StartupChecks::Skip)
}

async fn unchecked(url: &str) -> RedisStore {
    unchecked_builder().connect(url).await.unwrap()
}

/// Runs a command as a user who may do nothing, grants what the message says, and runs it again: that is to be
/// enough.
fn is_told_at_once(server: &RedisServer, command: &[&str], code: i32) -> Ran {
    let user = ["acl", "setuser", "ana", "reset", "on", ">secret", "~idem:*"];
    assert_eq!(server.cli(&user), "OK");
    let cli = Cli::new(format!("redis://ana:secret@127.0.0.1:{}/", server.port()));
    // But for the mark of a check that stopped for want of a right, which goes by itself at some moment.
    let records = || {
        let keys = server.cli(&["keys", "*"]);
        let mut keys: Vec<_> =
            keys.lines().filter(|key| !key.contains("{ready}")).map(str::to_owned).collect();
        keys.sort();
        keys
    };
    let before = records();
    let refused = cli.run(command).failed(1);
    assert_eq!(records(), before, "asking changed something");
    let (_, remedy) = refused.errors.split_once("`ACL SETUSER ana ").expect(&refused.errors);
    let rights: Vec<_> = remedy.split_once('`').unwrap().0.split(' ').collect();
    for right in &rights {
        assert!(refused.errors.contains(&format!("`{}`", &right[1..])), "{refused:?}");
    }
    assert_eq!(server.cli(&[&["acl", "setuser", "ana"], &rights[..]].concat()), "OK");
    let ran = cli.run(command);
    assert_eq!(ran.code, code, "{command:?} with {rights:?}: {ran:?}");
    // And no more than that: each of them is asked for by name.
    for right in rights {
        assert_eq!(server.cli(&["acl", "setuser", "ana", &format!("-{}", &right[1..])]), "OK");
        let lacking = cli.run(command).failed(1);
        let told = format!("`ACL SETUSER ana {right}`");
        assert!(lacking.errors.contains(&told), "{command:?} without {right}: {lacking:?}");
        assert_eq!(server.cli(&["acl", "setuser", "ana", right]), "OK");
    }
    ran
}

#[tokio::test]
async fn all_rights_that_a_command_lacks_are_told_at_once_and_granting_them_is_enough() {
    let server = RedisServer::start();
    let store = unchecked(&server.url()).await;
    for name in ["done", "not", "old"] {
        unknown(&store, name).await;
    }
    let of = |name: &'static str| [name, "--account", "acme", "--why", "T-1", "--yes"];
    is_told_at_once(&server, &["show", "done", "--account", "acme"], 0);
    is_told_at_once(&server, &["audit"], 0);
    let listed = is_told_at_once(&server, &["list"], 0);
    assert_eq!(listed.out.matches("outcome unknown").count(), 3, "{listed:?}");
    let reference = key("done").log_id();
    is_told_at_once(&server, &["show", "--reference", &reference], 0);
    is_told_at_once(&server, &[&["settle", "not-applied"], &of("not")[..]].concat(), 0);
    let done = ["settle", "done", "--status", "201"];
    is_told_at_once(&server, &[&done, &of("done")[..]].concat(), 0);
    is_told_at_once(&server, &[&["forget"], &of("old")[..]].concat(), 0);
    is_told_at_once(&server, &["trail"], 0);
    // Where nothing is found, the look around takes no further right.
    is_told_at_once(&server, &["show", "none", "--account", "acme"], 3);
}

#[tokio::test]
async fn looking_writes_nothing() {
    let server = RedisServer::start();
    let store = unchecked(&server.url()).await;
    unknown(&store, "k").await;
    let cli = Cli::new(server.url());
    cli.run(&["audit"]).ok();
    // A service's check of its readiness is under way, and what it needs for it is left alone too.
    server.cli(&["set", "idem:{ready}", "mark", "px", "600000"]);
    let state = || {
        let stats = server.cli(&["info", "persistence"]);
        let changes = stats.lines().find(|line| line.starts_with("rdb_changes_since_last_save"));
        let mark = ["get", "pexpiretime"].map(|command| server.cli(&[command, "idem:{ready}"]));
        (changes.unwrap().to_owned(), mark, server.cli(&["keys", "*"]).lines().count())
    };
    let reference = key("k").log_id();
    for command in [
        &["show", "k", "--account", "acme"][..],
        &["show", "--reference", &reference],
        &["list"],
        &["trail"],
    ] {
        let before = state();
        cli.run(command).ok();
        assert_eq!(state(), before, "{command:?}");
    }
    let before = state();
    cli.run(&["show", "none", "--account", "acme"]).failed(3);
    assert_eq!(state(), before, "where there is nothing");
}

#[tokio::test]
async fn a_replica_is_refused_although_a_look_would_write_nothing() {
    let primary = RedisServer::start();
    let store = unchecked(&primary.url()).await;
    unknown(&store, "k").await;
    let replica = RedisServer::start();
    let port = primary.port().to_string();
    assert_eq!(replica.cli(&["replicaof", "127.0.0.1", &port]), "OK");
    let refused = Cli::new(replica.url()).run(&["show", "k", "--account", "acme"]).failed(1);
    assert!(refused.errors.contains("read-only replica"), "{refused:?}");
}

#[tokio::test]
async fn the_age_of_an_unknown_outcome_counts_from_its_claim() {
    let server = RedisServer::start();
    let store = unchecked(&server.url()).await;
    let lease = claimed(&store, "k").await;
    // Its fence, or by the server's clock if that is later: what the store thought that it would say may be a
    // millisecond off.
    let claimed_at = lease.owner().fence.number().max(lease.grant().created.0);
    // The outcome is found to be unknown in a later millisecond of the server's clock.
    let passed = || {
        let time = server.cli(&["time"]);
        let mut parts = time.lines().map(|part| part.parse::<u64>().unwrap());
        parts.next().unwrap() * 1_000 + parts.next().unwrap() / 1_000
    };
    while passed() <= claimed_at + 1 {}
    let release = Release { terms: TERMS, verdict: Verdict::Unknown };
    store.release(&lease, &release).await.unwrap();
    let cli = Cli::new(server.url());
    cli.run(&["audit"]).ok();
    let listed = cli.run(&["list", "--json"]).ok().json();
    let shown = cli.run(&["show", "k", "--account", "acme", "--json"]).ok().json();
    for record in [&listed["records"][0], &shown] {
        assert_eq!(record["since"], rfc3339(Millis(claimed_at)), "{record}");
        assert_eq!(record["state"], "indeterminate");
    }
    let shown = cli.run(&["show", "k", "--account", "acme"]).ok().out;
    assert!(shown.contains("unknown since"), "{shown}");
}

#[tokio::test]
async fn an_audit_counts_what_is_unknown_apart_from_what_is_in_flight() {
    let server = RedisServer::start();
    let store = unchecked(&server.url()).await;
    for name in ["a", "b"] {
        unknown(&store, name).await;
    }
    for name in ["c", "d", "e"] {
        drop(claimed(&store, name).await);
    }
    completed(&store, "f", "x").await;
    let cli = Cli::new(server.url());
    // In steps of a single key or so, too: what a step says of those before it is carried on.
    for rate in ["5000", "20"] {
        let audit = ["audit", "--keys-per-second", rate];
        let told = cli.run(&audit).ok().out;
        assert!(told.starts_with("6 keys read, 2 of unknown outcome, 3 in flight, in "), "{told}");
        let told = cli.run(&[&audit[..], &["--json"]].concat()).ok().json();
        let counts = ["scanned", "found", "unknown", "in_flight"].map(|name| &told[name]);
        assert_eq!(counts.map(|count| count.as_u64().unwrap()), [6, 5, 2, 3]);
    }
}

#[tokio::test]
async fn an_answer_that_may_not_be_stored_is_told_once() {
    let server = RedisServer::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    unknown(&store, "k").await;
    let cli = Cli::new(server.url());
    let settle = ["settle", "done", "k", "--account", "acme", "--why", "T-1", "--yes", "--status"];
    let refused = cli.run(&[&settle[..], &["401"]].concat()).failed(2);
    assert_eq!(refused.errors.matches("401").count(), 1, "{refused:?}");
    assert!(refused.errors.trim_end().ends_with("nothing was changed"), "{refused:?}");
}

#[tokio::test]
async fn what_is_not_unknown_any_more_is_told_with_where_it_stands() {
    let server = RedisServer::start();
    let store = unchecked(&server.url()).await;
    let cli = Cli::new(server.url());
    let settle = |how: &[&str], name: &str| {
        cli.run(&[&["settle"], how, &[name, "--account", "acme", "--why", "T-1", "--yes"]].concat())
    };
    let (done, not_applied) = (&["done", "--status", "201"][..], &["not-applied"][..]);
    let refused = |name: &str, stands: &str| {
        for how in [done, not_applied] {
            let refused = settle(how, name).failed(4);
            assert!(refused.errors.contains(stands), "no {stands:?} in {refused:?}");
            assert!(refused.errors.trim_end().ends_with("nothing was changed"), "{refused:?}");
        }
    };
    unknown(&store, "done").await;
    settle(done, "done").ok();
    refused("done", "not unknown: it is completed with 201");
    unknown(&store, "not").await;
    settle(not_applied, "not").ok();
    refused("not", "not unknown: it is free (not applied)");
    refused("not", "the next retry runs the operation as attempt 2");
    let retry = claimed(&store, "not").await;
    assert_eq!(retry.grant().attempt.number(), 2);
    refused("not", "running as attempt 2, and its lease holds");
}

#[tokio::test]
async fn a_body_without_its_content_type_is_warned_of_before_anybody_is_asked() {
    let server = RedisServer::start();
    let store = unchecked(&server.url()).await;
    let cli = Cli::new(server.url());
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("answer.txt");
    std::fs::write(&file, "paid").unwrap();
    let file = file.to_str().unwrap();
    let settle = ["settle", "done", "--status", "201", "--account", "acme", "--why", "T-1"];
    let settled = |name: &str, more: &[&str]| {
        let ran = cli.run(&[&settle[..], &[name, "--yes", "--json"], more].concat()).ok();
        assert!(ran.json()["change"].is_string(), "{ran:?}");
        let show = ["show", name, "--account", "acme", "--contents", "--json"];
        let shown = cli.run(&show).ok().json();
        let headers = shown["response"]["headers"].as_array().unwrap().clone();
        let mut headers = headers.iter().filter(|header| header[0] == "content-type");
        let media_type = headers.next().map(|header| header[1].as_str().unwrap().to_owned());
        (ran.errors.contains("warning: there is no content-type"), media_type)
    };
    let header = ["--header", "Content-Type: text/plain", "--body", "paid"];
    for (name, more, warned, media_type) in [
        ("text", &["--body", "paid"][..], true, None),
        ("file", &["--body-file", file], true, None),
        ("typed", &header, false, Some("text/plain")),
        ("json", &["--body", r#"{"id":"pay_9"}"#], false, Some("application/json")),
        ("empty", &["--body", ""], false, None),
        ("none", &[], false, None),
    ] {
        unknown(&store, name).await;
        assert_eq!(settled(name, more), (warned, media_type.map(str::to_owned)), "{name}");
    }
    unknown(&store, "asked").await;
    let asked = [&settle[..], &["asked", "--body", "paid"]].concat();
    let (code, seen) = cli.on_terminal(&asked, "n\n", &[]);
    let (warning, question) = (seen.find("--header 'content-type: TYPE'"), seen.find("Go on?"));
    assert!(code == 1 && warning.is_some() && warning < question, "{code} {seen}");
}

#[test]
fn a_blank_around_an_address_is_told_with_the_address_in_quotes() {
    for (address, shown) in [
        (" redis://u:s3cret@h:1/", r#""" redis://h:1/""#),
        ("redis://u:s3cret@h:1/\r", r#""redis://h:1/\r""#),
        (" postgres://u:s3cret@h/d", r#"" postgres://h/d""#),
        ("postgres://u:s3cret@h/d\n", r#""postgres://h/d\n""#),
        ("sqlite:payments.db ", r#""sqlite:payments.db ""#),
    ] {
        let refused = Cli::new(address).run(&["trail"]).failed(2);
        let shown = shown.replace(r#""""#, r#"""#);
        assert!(refused.errors.contains(&shown), "no {shown} in {refused:?}");
        assert!(refused.errors.contains("blank or a line end"), "{refused:?}");
        assert!(!refused.errors.contains("s3cret"), "{refused:?}");
    }
}

async fn says_where_it_looked(store: &dyn Store, cli: &Cli, place: &str) {
    let nothing = cli.run(&["show", "k", "--account", "acme"]).failed(3);
    assert!(nothing.errors.contains("no records there at all"), "{nothing:?}");
    completed(store, "k", "x").await;
    let wrong = ["k", "--account", "acmee"];
    let change = ["--why", "T-1", "--yes"];
    for command in [&["show"][..], &["forget"], &["settle", "not-applied"]] {
        let more = if command == ["show"] { &[][..] } else { &change };
        let missed = cli.run(&[command, &wrong, more].concat()).failed(3);
        for words in ["account \"acmee\"", place, "there is 1 record there", "another --account"] {
            assert!(missed.errors.contains(words), "no {words:?} in {missed:?}");
        }
    }
    let missed = cli.run(&["show", "k", "--account", "a", "--account", "b", "--json"]).failed(3);
    let error: serde_json::Value = serde_json::from_str(&missed.errors).unwrap();
    assert_eq!(error["error"]["code"], "not_found");
    let message = error["error"]["message"].as_str().unwrap();
    assert!(message.contains(r#"parts ["a", "b"]"#), "{message}");
}

#[tokio::test]
async fn who_finds_nothing_is_told_where_it_was_looked_for_and_what_is_there() {
    let server = RedisServer::start();
    let url = server.url();
    let store = unchecked(&url).await;
    let cli = Cli::new(&url);
    let place = format!("{url}, prefix \"idem\"");
    says_where_it_looked(&store, &cli, &place).await;

    // Another prefix, another database, and what is no record.
    server.cli(&["set", "idem:{operators}", "x"]);
    let other = || unchecked_builder().prefix("pay");
    completed(&other().connect(&url).await.unwrap(), "k", "x").await;
    let third = format!("{}/3", url.trim_end_matches('/'));
    completed(&other().connect(&third).await.unwrap(), "k", "x").await;
    let missed = cli.run(&["show", "none", "--account", "acme"]).failed(3);
    assert!(missed.errors.contains("there is 1 record there"), "{missed:?}");
    assert!(missed.errors.contains("under the prefix \"pay\""), "{missed:?}");
    assert!(missed.errors.contains("in the database 3"), "{missed:?}");
    assert!(!missed.errors.contains("database 0"), "{missed:?}");
    let missed = cli.run(&["show", "k", "--account", "acme", "--prefix", "idme"]).failed(3);
    assert!(missed.errors.contains("prefix \"idme\""), "{missed:?}");
    assert!(missed.errors.contains("prefix \"idem\", under the prefix \"pay\""), "{missed:?}");
}

#[tokio::test]
async fn who_finds_nothing_in_a_table_is_told_as_well() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("test.db");
    let store = SqliteLeaseStore::open(&file).await.unwrap();
    store.migrate().await.unwrap();
    let url = format!("sqlite:{}", file.display());
    says_where_it_looked(&store, &Cli::new(&url), &url).await;

    let (_server, url) = PostgresServer::shared();
    let store = PostgresLeaseStore::connect(&url).await.unwrap();
    store.migrate().await.unwrap();
    says_where_it_looked(&store, &Cli::new(&url), "postgres://").await;
}

#[test]
fn the_help_of_a_command_shows_only_what_applies_to_it() {
    let cli = Cli::new("redis://h");
    let helps = [
        (&["show"][..], "--protection-key"),
        (&["list"], ""),
        (&["settle", "done"], "--protection-key --no-seal-check --yes --why"),
        (&["settle", "not-applied"], "--yes --why"),
        (&["forget"], "--yes --why"),
        (&["audit"], ""),
        (&["trail"], ""),
    ];
    for (command, applies) in helps {
        let help = cli.run(&[command, &["--help"]].concat()).ok().out;
        for flag in ["--protection-key", "--no-seal-check", "--yes", "--why"] {
            let shown = help.contains(&format!("{flag} ")) || help.contains(&format!("{flag}\n"));
            assert_eq!(shown, applies.contains(flag), "{command:?}, {flag}: {help}");
        }
    }
}

#[tokio::test]
async fn a_server_behind_tls_is_reached_with_certificates_of_ones_own() {
    let papers = Papers::new();
    let (strict, port) = papers.serve("yes");
    let plain = RedisStore::connect(&strict.url()).await.unwrap();
    completed(&plain, "k", "x").await;
    let cli = Cli::new(format!("rediss://127.0.0.1:{port}/"));
    let show = ["show", "k", "--account", "acme"];
    let (ca, cert, key) =
        (papers.path("ca.crt"), papers.path("client.crt"), papers.path("client.key"));
    let with = |more: &[&str]| cli.run(&[&show[..], more].concat());

    with(&["--tls-ca", &ca, "--tls-cert", &cert, "--tls-key", &key]).ok();
    let mut by_environment = cli.command();
    by_environment.env("IDEMPOTENCY_TLS_CA", &ca).env("IDEMPOTENCY_TLS_CERT", &cert);
    let shown = by_environment.env("IDEMPOTENCY_TLS_KEY", &key).args(show).output().unwrap();
    assert!(shown.status.success(), "{shown:?}");

    // What is missing is told in flags.
    let refused = with(&[]).failed(1);
    assert!(refused.errors.contains("--tls-ca FILE"), "{refused:?}");
    let refused = with(&["--tls-ca", &ca]).failed(1);
    assert!(refused.errors.contains("--tls-cert FILE --tls-key FILE"), "{refused:?}");
    assert!(!refused.errors.contains("RedisStore::"), "{refused:?}");
    let refused = with(&["--tls-ca", &ca, "--tls-cert", &cert]).failed(1);
    assert!(refused.errors.contains("go together"), "{refused:?}");
    let refused = with(&["--tls-ca", "/nowhere/ca.crt"]).failed(1);
    assert!(refused.errors.contains("cannot read /nowhere/ca.crt"), "{refused:?}");
    let unused = Cli::new(strict.url()).run(&[&show[..], &["--tls-ca", &ca]].concat()).failed(1);
    assert!(unused.errors.contains("use rediss://"), "{unused:?}");
    let unused = Cli::new("postgres://h/d").run(&["trail", "--tls-ca", &ca]).failed(1);
    assert!(unused.errors.contains("are for rediss://"), "{unused:?}");
}
