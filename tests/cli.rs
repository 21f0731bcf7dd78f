//! The program `idempotency`, on real stores and on what crashed payments leave in them.
#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]
#![allow(clippy::wildcard_enum_match_arm, reason = "every other outcome fails the test")]

#[path = "support/program.rs"]
mod program;
#[path = "support/sandbox.rs"]
mod sandbox;
mod support;

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use bytes::Bytes;
use program::{Cli, TERMS, claimed, completed, key, print, unknown};
use sandbox::{Call, Sandbox};
use serde_json::Value;
use support::groups::RedisCluster;
use support::postgres::PostgresServer;
use support::redis::RedisServer;
use tower_idempotency::record::{Claim, ClaimOutcome, Effects, Millis, OnExpired, Record, State};
use tower_idempotency::store::redis::redis;
use tower_idempotency::store::sql::sqlx;
use tower_idempotency::store::sql::sqlx::ConnectOptions as _;
use tower_idempotency::store::sql::sqlx::sqlite::SqliteConnectOptions;
use tower_idempotency::store::{Protected, ProtectionKeyId, ProtectionKeys};
use tower_idempotency::{
    Attempt, Fence, Fingerprints, HeaderRules, HolderId, PostgresLeaseStore, RedisStore,
    SqliteLeaseStore, Store, StoredResponse,
};

/// Short, so that a test need not wait; long enough for a process that is alive.
const LEASE: &str = "1";
const LEASE_IS_OVER: Duration = Duration::from_millis(1300);

/// Pays in a process that dies of it, and starts another one.
async fn crash(store: &str, key: &str, source: &str) -> Sandbox {
    let args = ["--store", store, "--lease", LEASE, "--wait", "0"];
    let mut first = Sandbox::start(&args);
    let mut connection = first.connect().await;
    assert!(connection.send(Call::pay(key, source)).await.is_err(), "{source} is no crash");
    assert!(!first.ended().success());
    let second = Sandbox::start_again(first, &args);
    tokio::time::sleep(LEASE_IS_OVER).await;
    second
}

async fn settled_as_done(store: &str) {
    let sandbox = crash(store, "order-17", "tok_crash_after").await;
    let charges = sandbox.charges().await;
    assert_eq!(charges, 1, "the charge went through");
    let unknown = sandbox.send(Call::pay("order-17", "tok_crash_after")).await;
    assert_eq!(unknown.code(), "idempotency_outcome_unknown");
    let reference = unknown.json()["reference"].as_str().unwrap().to_owned();

    let cli = Cli::new(store);
    cli.run(&["audit"]).ok();
    let listed = cli.run(&["list"]).ok();
    assert!(
        listed.out.contains(&reference) && listed.out.contains("outcome unknown"),
        "{listed:?}"
    );
    assert!(listed.errors.contains("1 record; the index is"), "{listed:?}");
    let by_key = cli.run(&["show", "order-17", "--account", "acme", "--json"]).ok().json();
    let by_reference = cli.run(&["show", "--reference", &reference, "--json"]).ok().json();
    assert_eq!(by_key["version"], by_reference["version"]);
    assert_eq!((&by_key["reference"], &by_key["attempt"]), (&reference.into(), &1.into()));

    let settle = [
        "settle",
        "done",
        "order-17",
        "--account",
        "acme",
        "--status",
        "201",
        "--header",
        "location: /v1/payments/pay_17",
        "--body",
        r#"{"id":"pay_17"}"#,
        "--why",
        "T-17: the processor has the charge",
        "--who",
        "ana",
        "--yes",
    ];
    cli.run(&settle).ok();
    // The same again: it is settled.
    cli.run(&settle).failed(4);
    let replayed = sandbox.send(Call::pay("order-17", "tok_crash_after")).await;
    assert!(replayed.is_replay(), "{replayed:?}");
    assert_eq!((replayed.status.as_u16(), replayed.id().as_str()), (201, "pay_17"));
    assert_eq!(replayed.header("location"), Some("/v1/payments/pay_17"));
    assert_eq!(replayed.header("content-type"), Some("application/json"));
    assert_eq!(sandbox.charges().await, charges, "nothing ran");
    let listed = cli.run(&["list"]).ok();
    assert_eq!(listed.out, "", "what is settled is not listed, though the index has it still");

    let trail = cli.run(&["trail", "--json"]).ok().json();
    assert_eq!(trail.as_array().unwrap().len(), 1, "{trail}");
    assert_eq!((&trail[0]["who"], &trail[0]["outcome"]), (&"ana".into(), &"done".into()));
}

#[tokio::test]
async fn an_operator_finds_an_unknown_outcome_and_the_next_retry_gets_the_answer() {
    let redis = RedisServer::start();
    settled_as_done(&redis.url()).await;
}

#[tokio::test]
async fn an_operator_finds_an_unknown_outcome_in_a_cluster() {
    let cluster = RedisCluster::start(3, 0);
    settled_as_done(&cluster.url()).await;
}

#[tokio::test]
async fn what_is_settled_as_not_applied_runs_at_the_next_retry() {
    let redis = RedisServer::start();
    let sandbox = crash(&redis.url(), "order-18", "tok_crash_before").await;
    assert_eq!(sandbox.charges().await, 0);
    // Nobody has retried yet: it is in flight, and its lease is over.
    let cli = Cli::new(redis.url());
    let shown = cli.run(&["show", "order-18", "--account", "acme"]).ok();
    assert!(shown.out.contains("unknown, lease over"), "{shown:?}");
    let not_applied = ["settle", "not-applied", "order-18", "--account", "acme", "--yes", "--why"];
    cli.run(&[&not_applied[..], &["T-18"]].concat()).ok();
    let paid = sandbox.send(Call::pay("order-18", "tok_crash_before")).await;
    assert!(paid.status == 201 && !paid.is_replay(), "{paid:?}");
    assert_eq!(paid.json()["attempt"], 2);
    assert_eq!(sandbox.charges().await, 1);
}

/// The key of a charge in the ledger of the sandbox's processor, which is another system than the store.
async fn key_in_the_ledger(sandbox: &Sandbox, account: &str) -> String {
    let options = SqliteConnectOptions::new().filename(&sandbox.ledger).read_only(true);
    let mut ledger = options.connect().await.unwrap();
    let text = "SELECT provider_key FROM ledger WHERE action = 'charge' AND account = $1";
    let keys: Vec<String> =
        sqlx::query_scalar(text).bind(account).fetch_all(&mut ledger).await.unwrap();
    assert_eq!(keys.len(), 1, "one charge of {account}");
    keys[0].clone()
}

#[tokio::test]
async fn the_provider_is_asked_by_the_key_that_its_ledger_has() {
    let redis = RedisServer::start();
    let sandbox = crash(&redis.url(), "order-20", "tok_crash_after").await;
    let connected = Call::pay("order-20", "tok_visa").header("stripe-account", "acct_1");
    assert_eq!(sandbox.send(connected).await.status, 201);
    let charged = key_in_the_ledger(&sandbox, "acme").await;
    let cli = Cli::new(redis.url());
    let show = ["show", "order-20", "--account", "acme", "--downstream", "charge"];
    let shown = cli.run(&show).ok();
    assert!(shown.out.contains("unknown, lease over"), "{shown:?}");
    let line = format!("downstream charge  {charged}\n");
    assert!(shown.out.contains(&line), "no {line:?} in {shown:?}");
    let both = cli.run(&[&show[..], &["--downstream", "refund", "--json"]].concat()).ok().json();
    assert_eq!(both["downstream_keys"]["charge"], *charged);
    assert_eq!(both["downstream_keys"].as_object().unwrap().len(), 2, "{both}");
    assert_ne!(both["downstream_keys"]["refund"], *charged);
    let unasked = cli.run(&["show", "order-20", "--account", "acme", "--json"]).ok().json();
    assert_eq!(unasked.get("downstream_keys"), None);
    // A scope of two parts, and a key that does not stand on the command line.
    let other = key_in_the_ledger(&sandbox, "acme/acct_1").await;
    let parts = ["show", "--key-file", "-", "--account", "acme", "--account", "acct_1"];
    let parts = [&parts[..], &["--downstream", "charge"]].concat();
    let shown = cli.run_with(&parts, "order-20\n").ok();
    assert!(other != charged && shown.out.contains(&other), "no {other} in {shown:?}");

    // A record is not what it is made from, nor is a store.
    let forget = ["forget", "order-20", "--account", "acme", "--why", "T-20", "--yes"];
    cli.run(&forget).ok();
    for (cli, code) in [(&cli, 3), (&Cli::new("redis://127.0.0.1:1"), 1)] {
        let missed = cli.run(&show).failed(code);
        assert_eq!(missed.out, line);
        assert!(missed.errors.contains("no record confirms"), "{missed:?}");
        let missed = cli.run(&[&show[..], &["--json"]].concat()).failed(code);
        assert_eq!(missed.json()["downstream_keys"]["charge"], *charged);
        let error: Value = serde_json::from_str(&missed.errors).unwrap();
        assert!(error["error"]["message"].is_string(), "{error}");
    }
    // What does not tell the client's key and its scope is not enough.
    let (reference, storage_key) = (key("order-20").log_id(), key("order-20").to_text());
    for which in [["--reference", &reference], ["--storage-key", &storage_key]] {
        let refused = cli.run(&[&["show", "--downstream", "charge"], &which[..]].concat());
        let refused = refused.failed(2);
        assert!(refused.errors.contains("--account") && refused.out.is_empty(), "{refused:?}");
    }
    cli.run(&["show", "order-20", "--account", "acme", "--downstream", ""]).failed(2);
}

#[tokio::test]
async fn a_key_that_is_forgotten_is_new() {
    let redis = RedisServer::start();
    let sandbox = Sandbox::start(&["--store", &redis.url()]);
    let first = sandbox.send(Call::pay("order-19", "tok_visa")).await;
    let cli = Cli::new(redis.url());
    let forget = ["forget", "order-19", "--account", "acme", "--why", "a test order", "--yes"];
    // It is paid: who only says yes to whatever comes is told so.
    let version = cli.run(&["show", "order-19", "--account", "acme", "--json"]).ok().json();
    let version = version["version"].as_str().unwrap().to_owned();
    for more in [&[][..], &["--if-version", &version]] {
        let refused = cli.run(&[&forget[..], more].concat()).failed(2);
        assert!(refused.errors.contains("pays again"), "{refused:?}");
        assert!(refused.errors.contains("--completed"), "{refused:?}");
    }
    assert!(sandbox.send(Call::pay("order-19", "tok_visa")).await.is_replay());
    let forget = [&forget[..], &["--completed"]].concat();
    cli.run(&forget).ok();
    cli.run(&forget).failed(3);
    let second = sandbox.send(Call::pay("order-19", "tok_visa")).await;
    assert!(!second.is_replay() && second.id() != first.id());
    assert_eq!(sandbox.charges().await, 2);
}

#[tokio::test]
async fn what_changed_meanwhile_or_runs_is_left_alone() {
    let redis = RedisServer::start();
    let store = RedisStore::connect(&redis.url()).await.unwrap();
    let cli = Cli::new(redis.url());
    unknown(&store, "k").await;
    let version = cli.run(&["show", "k", "--account", "acme", "--json"]).ok().json()["version"]
        .as_str()
        .unwrap()
        .to_owned();
    let change = ["k", "--account", "acme", "--why", "x", "--yes", "--if-version", &version];
    cli.run(&[&["settle", "not-applied"], &change[..]].concat()).ok();
    for command in [&["settle", "not-applied"][..], &["forget"]] {
        let refused = cli.run(&[command, &change].concat()).failed(4);
        assert!(refused.errors.contains("changed since"), "{refused:?}");
    }
    let refused = cli.run(&[&["forget", "--json"], &change[..]].concat()).failed(4);
    let error: Value = serde_json::from_str(&refused.errors).unwrap();
    assert_eq!(error["error"]["code"], "changed");

    let running = claimed(&store, "runs").await;
    let change = ["runs", "--account", "acme", "--why", "x", "--yes"];
    cli.run(&[&["settle", "not-applied"], &change[..]].concat()).failed(4);
    cli.run(&[&["forget"], &change[..]].concat()).failed(4);
    assert_eq!(running.owner().attempt.number(), 1);

    redis.cli(&["set", &format!("idem:{{{}}}", key("odd").to_text()), "?", "ex", "600"]);
    let change = ["odd", "--account", "acme", "--why", "x", "--yes"];
    let refused = cli.run(&[&["forget"], &change[..]].concat()).failed(4);
    assert!(refused.errors.contains("--unreadable"), "{refused:?}");
    cli.run(&[&["forget", "--unreadable"], &change[..]].concat()).ok();
}

#[tokio::test]
async fn wrong_use_and_failures_have_codes_of_their_own() {
    let redis = RedisServer::start();
    let cli = Cli::new(redis.url());
    let which = ["k", "--account", "acme"];
    for args in [
        vec!["show"],
        vec!["show", "k"],
        vec!["list", "--in-flight-older-than", "5"],
        vec!["list", "--unknown", "--in-flight-older-than", "5m"],
        [&["forget", "--yes"], &which[..]].concat(),
        [&["forget", "--yes", "--why", " "], &which[..]].concat(),
        [&["settle", "done", "--yes", "--why", "x"], &which[..]].concat(),
        [&["settle", "done", "--yes", "--why", "x", "--status", "99"], &which[..]].concat(),
    ] {
        cli.run(&args).failed(2);
    }
    let mut bare = cli.command();
    let bare = bare.env_remove("IDEMPOTENCY_STORE").arg("trail").output().unwrap();
    assert_eq!(bare.status.code(), Some(2));

    cli.run(&[&["show"], &which[..]].concat()).failed(3);
    cli.run(&["show", "--reference", "0123456789ab"]).failed(3);
    let listed = cli.run(&["list"]).failed(1);
    assert!(listed.errors.contains("idempotency audit"), "{listed:?}");

    let store = RedisStore::connect(&redis.url()).await.unwrap();
    unknown(&store, "k").await;
    // Nobody can be asked here.
    let refused = cli.run_with(&[&["forget", "--why", "x"], &which[..]].concat(), "y\n").failed(2);
    assert!(refused.errors.contains("--yes"), "{refused:?}");
    cli.run(&[&["show"], &which[..]].concat()).ok();
}

#[test]
fn a_password_is_repeated_neither_in_errors_nor_in_help() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("none.db");
    for url in [
        "redis://u:s3cr3t@127.0.0.1:1/",
        "redis+cluster://:s3cr3t@127.0.0.1:1",
        "postgres://u:s3cr3t@127.0.0.1:1/d",
        "mongodb://u:s3cr3t@h",
        "redis://u:s3cr3t@127.0.0.1:port/",
    ] {
        let cli = Cli::new(url);
        for args in [&["trail"][..], &["trail", "--help"], &["trail", "--store", url]] {
            let ran = cli.run(args);
            assert!(!ran.out.contains("s3cr3t") && !ran.errors.contains("s3cr3t"), "{ran:?}");
        }
        assert_ne!(cli.run(&["trail"]).code, 0);
    }
    let ran = Cli::new(format!("sqlite:{}", file.display())).run(&["trail"]).failed(1);
    assert!(ran.errors.contains("no such file") && !file.exists(), "{ran:?}");
}

#[tokio::test]
async fn keys_and_bodies_are_not_shown_unless_asked_for() {
    let redis = RedisServer::start();
    let store = RedisStore::connect(&redis.url()).await.unwrap();
    completed(&store, "planted-key-4242", "planted-body-4242").await;
    unknown(&store, "planted-other-4242").await;
    let cli = Cli::new(redis.url());
    let done = ["planted-key-4242", "--account", "acme"];
    let lost = ["planted-other-4242", "--account", "acme", "--why", "T-1", "--yes"];
    let mut all = vec![
        cli.run(&["audit"]).ok(),
        cli.run(&["list", "--json"]).ok(),
        cli.run(&["list"]).ok(),
        cli.run(&[&["show"], &done[..]].concat()).ok(),
        cli.run(&[&["show", "--json"], &done[..]].concat()).ok(),
        cli.run(&[&["settle", "done", "--status", "200", "--body", "planted"], &lost[..]].concat())
            .ok(),
        cli.run(&[&["forget", "--completed"], &lost[..]].concat()).ok(),
        cli.run(&["trail"]).ok(),
        cli.run(&["trail", "--json"]).ok(),
    ];
    all.push(cli.run(&[&["forget"], &lost[..]].concat()).failed(3));
    for ran in &all {
        assert!(!ran.out.contains("planted") && !ran.errors.contains("planted"), "{ran:?}");
    }
    let asked = cli.run(&[&["show", "--contents"], &done[..]].concat()).ok();
    assert!(asked.out.contains("planted-body-4242") && asked.out.contains("x-note: kept"));
    let asked = cli.run(&[&["show", "--contents", "--json"], &done[..]].concat()).ok();
    assert_eq!(asked.json()["response"]["body"], "planted-body-4242");
    let keys = redis.cli(&["xrange", "idem:{operators}:trail", "-", "+"]);
    assert!(keys.contains("T-1") && !keys.contains("planted"), "{keys}");
}

#[tokio::test]
async fn colours_and_questions_are_for_terminals() {
    let redis = RedisServer::start();
    let store = RedisStore::connect(&redis.url()).await.unwrap();
    unknown(&store, "k").await;
    let cli = Cli::new(redis.url());
    cli.run(&["audit"]).ok();
    assert!(!cli.run(&["list"]).ok().out.contains('\u{1b}'));
    let (_, seen) = cli.on_terminal(&["list"], "", &[]);
    assert!(seen.contains("\u{1b}[31;1moutcome unknown"), "{seen:?}");
    let (_, seen) = cli.on_terminal(&["list"], "", &[("NO_COLOR", "1")]);
    assert!(seen.contains("outcome unknown") && !seen.contains('\u{1b}'), "{seen:?}");

    let forget = ["forget", "k", "--account", "acme", "--why", "x"];
    let (code, seen) = cli.on_terminal(&forget, "n\n", &[]);
    assert!(code == 1 && seen.contains("Go on? [y/N]"), "{code} {seen}");
    cli.run(&["show", "k", "--account", "acme"]).ok();
    let (code, seen) = cli.on_terminal(&forget, "y\n", &[]);
    assert!(code == 0 && seen.contains("is forgotten"), "{code} {seen}");
    cli.run(&["show", "k", "--account", "acme"]).failed(3);
}

async fn in_a_table(store: &dyn Store, cli: &Cli) {
    unknown(store, "lost").await;
    completed(store, "done", "x").await;
    let audit = cli.run(&["audit"]).ok();
    assert!(audit.out.contains("nothing to do"), "{audit:?}");
    let listed = cli.run(&["list", "--json"]).ok().json();
    assert_eq!(listed["index"]["kind"], "direct");
    let reference = listed["records"][0]["reference"].as_str().unwrap();
    assert_eq!(
        (listed["records"].as_array().unwrap().len(), reference),
        (1, &*key("lost").log_id())
    );
    cli.run(&["settle", "not-applied", "--reference", reference, "--why", "x", "--yes"]).ok();
    let storage_key = key("done").to_text();
    let forget = ["forget", "--storage-key", &storage_key, "--why", "y", "--yes", "--completed"];
    cli.run(&forget).ok();
    let trail = cli.run(&["trail", "--json"]).ok().json();
    let whys: Vec<_> = trail.as_array().unwrap().iter().map(|entry| &entry["why"]).collect();
    assert_eq!(whys, ["y", "x"]);
    assert_eq!(cli.run(&["list"]).ok().out, "");
}

#[tokio::test]
async fn an_sqlite_file_is_looked_after_as_well() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("test.db");
    let store = SqliteLeaseStore::open(&file).await.unwrap();
    store.migrate().await.unwrap();
    in_a_table(&store, &Cli::new(format!("sqlite:{}", file.display()))).await;
}

#[tokio::test]
async fn a_database_of_an_earlier_release_is_read_and_not_changed() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("test.db");
    let store = SqliteLeaseStore::open(&file).await.unwrap();
    store.migrate().await.unwrap();
    let older = "DROP TABLE idempotency_trail; DROP INDEX idempotency_records_unsettled";
    sqlx::raw_sql(older).execute(store.pool()).await.unwrap();
    unknown(&store, "lost").await;
    let cli = Cli::new(format!("sqlite:{}", file.display()));
    assert!(cli.run(&["list"]).ok().out.contains("outcome unknown"));
    let settle = ["settle", "not-applied", "lost", "--account", "acme", "--why", "x", "--yes"];
    let refused = cli.run(&settle).failed(1);
    assert!(refused.errors.contains("migrate()"), "{refused:?}");
    assert!(cli.run(&["list"]).ok().out.contains("outcome unknown"), "something was changed");
}

#[tokio::test]
async fn a_postgres_database_is_looked_after_as_well() {
    let (_server, url) = PostgresServer::shared();
    let store = PostgresLeaseStore::connect(&url).await.unwrap();
    store.migrate().await.unwrap();
    in_a_table(&store, &Cli::new(url)).await;
}

#[tokio::test]
async fn a_protected_store_is_opened_and_sealed_with_its_key() {
    let redis = RedisServer::start();
    let secret = [0xAB; 32];
    let keys = ProtectionKeys::new(ProtectionKeyId::from_number(3), &secret);
    let store = RedisStore::connect(&redis.url()).await.unwrap();
    let store = Protected::new(store, keys);
    completed(&store, "done", "sealed body").await;
    unknown(&store, "lost").await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("key");
    std::fs::write(&file, "ab".repeat(32) + "\n").unwrap();
    let protection = format!("3={}", file.display());
    let cli = Cli::new(redis.url());
    let show = ["show", "done", "--account", "acme", "--contents"];
    // Without the key it is bytes that are no answer.
    let blind = cli.run(&show);
    assert!(!blind.out.contains("sealed body"), "{blind:?}");
    let with_key = ["--protection-key", &protection];
    let shown = cli.run(&[&show[..], &with_key].concat()).ok();
    assert!(shown.out.contains("sealed body"), "{shown:?}");
    let settle =
        ["settle", "done", "lost", "--account", "acme", "--status", "201", "--body", "paid"];
    let settle = [&settle[..], &["--why", "x", "--yes"], &with_key].concat();
    cli.run(&settle).ok();
    let claim = Claim {
        holder: HolderId::random(),
        fingerprints: Fingerprints::one(print()),
        terms: TERMS,
        on_expired: OnExpired::Refuse,
        effects: Effects::Anywhere,
    };
    let ClaimOutcome::Completed(replay) = store.claim(key("lost"), &claim).await.unwrap() else {
        panic!("the service can open what was settled")
    };
    assert_eq!(StoredResponse::decode(replay).unwrap().status(), 201);
}

/// Puts so many answered records into a server.
async fn fill(server: &RedisServer, count: usize) {
    let client = redis::Client::open(server.url()).unwrap();
    let config = redis::AsyncConnectionConfig::new().set_response_timeout(None);
    let mut connection =
        client.get_multiplexed_async_connection_with_config(&config).await.unwrap();
    let (head, ()) = http::Response::builder().status(201).body(()).unwrap().into_parts();
    let body = Bytes::from_static(&[b'x'; 200]);
    let response = StoredResponse::new(&head, body, &HeaderRules::default()).encode();
    let record = Record {
        fingerprint: print(),
        holder: HolderId::random(),
        attempt: Attempt::FIRST,
        fence: Fence::from_number(1_764_403_200_000),
        created: Millis(1_764_403_200_000),
        checkpoint: Bytes::new(),
        state: State::Completed { at: Millis(1_764_403_200_000), response },
    };
    let record = record.encode();
    for chunk in (0..count).collect::<Vec<_>>().chunks(2_000) {
        let mut sets = redis::pipe();
        for number in chunk {
            let name = format!("idem:{{{}}}", key(&format!("n-{number}")).to_text());
            sets.cmd("SET").arg(name).arg(&record[..]).arg("PX").arg(3_600_000).ignore();
        }
        let () = sets.query_async(&mut connection).await.unwrap();
    }
}

/// `CLI_KEYS=1000000` makes it as many as are promised.
#[tokio::test]
async fn among_a_million_keys_an_unknown_outcome_is_found_and_settled_in_a_second() {
    let count = std::env::var("CLI_KEYS").map_or(20_000, |count| count.parse().unwrap());
    let redis = RedisServer::start();
    fill(&redis, count).await;
    let sandbox = crash(&redis.url(), "order-1", "tok_crash_after").await;
    let cli = Cli::new(redis.url());
    let rate = (count * 2).to_string();
    let audit = cli.run(&["audit", "--keys-per-second", &rate]).ok();
    let listed = cli.run(&["list"]).ok();
    let reference = key("order-1").log_id();
    assert!(listed.out.contains(&reference), "{listed:?}");
    let settled = cli
        .run(&[
            "settle",
            "done",
            "--reference",
            &reference,
            "--status",
            "201",
            "--body",
            r#"{"id":"pay_1"}"#,
            "--why",
            "T-1",
            "--yes",
        ])
        .ok();
    println!(
        "{count} keys: audit {:?}, list {:?}, settle {:?}; {}",
        audit.took,
        listed.took,
        settled.took,
        audit.out.trim()
    );
    assert!(listed.took + settled.took < Duration::from_secs(1), "{listed:?} {settled:?}");
    let replayed = sandbox.send(Call::pay("order-1", "tok_crash_after")).await;
    assert!(replayed.is_replay() && replayed.id() == "pay_1", "{replayed:?}");
    assert_eq!(sandbox.charges().await, 1);
}

#[tokio::test]
async fn a_pass_that_is_interrupted_leaves_the_last_listing_and_shows_its_progress() {
    let redis = RedisServer::start();
    let store = RedisStore::connect(&redis.url()).await.unwrap();
    unknown(&store, "lost").await;
    fill(&redis, 3_000).await;
    let cli = Cli::new(redis.url());
    cli.run(&["audit", "--keys-per-second", "100000"]).ok();
    let before = cli.run(&["list", "--json"]).ok().json();
    let mut slow = cli.command();
    slow.args(["audit", "--keys-per-second", "200"]).stdin(Stdio::null());
    let mut slow = slow.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(5_600));
    let pid = slow.id().to_string();
    // As by Ctrl-C, which is ignored by whatever a shell has started in the background.
    assert!(Command::new("kill").args(["-s", "TERM", &pid]).status().unwrap().success());
    let ended = slow.wait().unwrap();
    assert!(!ended.success());
    let mut said = String::new();
    std::io::Read::read_to_string(&mut slow.stderr.take().unwrap(), &mut said).unwrap();
    assert!(said.contains("of about 300") && said.contains("left"), "{said:?}");
    let after = cli.run(&["list", "--json"]).ok().json();
    assert_eq!(after["index"]["started"], before["index"]["started"]);
    assert_eq!(after["records"][0]["reference"], before["records"][0]["reference"]);
}

#[test]
fn the_help_says_what_exit_codes_mean() {
    let help = Cli::new("redis://h").run(&["--help"]).ok();
    for part in ["Exit codes", "IDEMPOTENCY_STORE", "audit", "trail", "settle"] {
        assert!(help.out.contains(part), "{part}");
    }
    assert!(Path::new(env!("CARGO_BIN_EXE_idempotency")).exists());
}
