//! What the program must not do to payments: forget them early, answer for them unreadably, hang.
#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]
#![allow(clippy::wildcard_enum_match_arm, reason = "every other outcome fails the test")]

#[path = "support/program.rs"]
mod program;
mod support;

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use program::{Cli, Ran, TERMS, claimed_for, completed, key, print, unknown};
use support::postgres::PostgresServer;
use support::redis::RedisServer;
use tower_idempotency::record::{Claim, ClaimOutcome, Effects, OnExpired, Release, Terms, Verdict};
use tower_idempotency::store::sql::sqlx;
use tower_idempotency::store::{Protected, ProtectionKeyId, ProtectionKeys};
use tower_idempotency::{
    Fingerprints, HolderId, PostgresLeaseStore, RedisStore, SqliteLeaseStore, Store, StoredResponse,
};

const DAYS_30: Terms = Terms {
    lease: Duration::from_secs(600),
    retention: Duration::from_secs(30 * 86_400),
    unknown_retention: Duration::from_secs(30 * 86_400),
};

const DONE: [&str; 6] = ["settle", "done", "--status", "201", "--body", "paid"];
const NOT_APPLIED: [&str; 2] = ["settle", "not-applied"];

/// Runs a command for a key of acme's.
fn run(cli: &Cli, command: &[&str], key: &str, more: &[&str]) -> Ran {
    cli.run(&[command, &[key, "--account", "acme"], more].concat())
}

fn change(cli: &Cli, command: &[&str], key: &str, more: &[&str]) -> Ran {
    run(cli, command, key, &[&["--why", "T-1", "--yes"], more].concat())
}

async fn replay(store: &dyn Store, name: &str) -> StoredResponse {
    let claim = Claim {
        holder: HolderId::random(),
        fingerprints: Fingerprints::one(print()),
        terms: TERMS,
        on_expired: OnExpired::Refuse,
        effects: Effects::Anywhere,
    };
    match store.claim(key(name), &claim).await.unwrap() {
        ClaimOutcome::Completed(response) => StoredResponse::decode(response).unwrap(),
        other => panic!("{other:?}"),
    }
}

/// How long it is until the store forgets a record, in days.
fn days_left(cli: &Cli, key: &str) -> f64 {
    let shown = run(cli, &["show"], key, &[]).ok();
    let line = shown.out.lines().find(|line| line.starts_with("kept until")).unwrap();
    let left = line.split_once("(in ").unwrap().1.trim_end_matches(')');
    let words = left.split_whitespace().collect::<Vec<_>>();
    let days = words.first().unwrap().trim_end_matches(|letter: char| !letter.is_ascii_digit());
    assert!(left.contains('d'), "less than a day: {line}");
    days.parse().unwrap()
}

async fn a_settlement_keeps_the_time(store: &dyn Store, cli: &Cli) {
    for (name, command) in [("done", &DONE[..]), ("not", &NOT_APPLIED)] {
        let lease = claimed_for(store, name, DAYS_30).await;
        let release = Release { terms: DAYS_30, verdict: Verdict::Unknown };
        store.release(&lease, &release).await.unwrap();
        assert!(days_left(cli, name) >= 29.0);
        let settled = change(cli, command, name, &[]).ok();
        assert!(settled.out.contains("kept until 2"), "{settled:?}");
        assert!(days_left(cli, name) >= 29.0, "{name}: a late retry would pay again");
        let longer = format!("{name}-longer");
        unknown(store, &longer).await;
        let settled = change(cli, command, &longer, &["--retention", "60d", "--json"]).ok();
        assert!(settled.json()["kept_until"].is_string(), "{settled:?}");
        assert!(days_left(cli, &longer) >= 59.0, "{name}");
    }
}

#[tokio::test]
async fn a_settlement_never_shortens_the_life_of_its_record() {
    let redis = RedisServer::start();
    let store = RedisStore::connect(&redis.url()).await.unwrap();
    a_settlement_keeps_the_time(&store, &Cli::new(redis.url())).await;

    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("test.db");
    let store = SqliteLeaseStore::open(&file).await.unwrap();
    store.migrate().await.unwrap();
    a_settlement_keeps_the_time(&store, &Cli::new(format!("sqlite:{}", file.display()))).await;

    let (_server, url) = PostgresServer::shared();
    let store = PostgresLeaseStore::connect(&url).await.unwrap();
    store.migrate().await.unwrap();
    a_settlement_keeps_the_time(&store, &Cli::new(url)).await;
}

async fn refused_unless_sealed(store: Arc<dyn Store>, cli: &Cli, folder: &Path) {
    let protection = |id: u32, byte: u8| {
        let file = folder.join(format!("{id}-{byte}"));
        std::fs::write(&file, [byte; 32]).unwrap();
        format!("{id}={}", file.display())
    };
    let keys = ProtectionKeys::new(ProtectionKeyId::from_number(3), &[3; 32]);
    let service = Protected::new(Arc::clone(&store), keys);
    unknown(&service, "sealed").await;
    unknown(&service, "sealed too").await;
    unknown(&*store, "open").await;
    let (right, wrong_number, wrong) = (protection(3, 3), protection(4, 3), protection(3, 4));
    let with = |key: &'_ str| ["--protection-key".to_owned(), key.to_owned()];
    for (name, flags) in [
        ("sealed", vec![]),
        ("sealed", with(&wrong_number).to_vec()),
        ("sealed", with(&wrong).to_vec()),
        ("open", with(&right).to_vec()),
    ] {
        let flags: Vec<_> = flags.iter().map(String::as_str).collect();
        let refused = change(cli, &DONE, name, &flags).failed(1);
        assert!(refused.errors.contains("protection key"), "{refused:?}");
        let shown = run(cli, &["show"], name, &[]).ok();
        assert!(shown.out.contains("outcome unknown"), "{shown:?}");
    }
    let trail = cli.run(&["trail", "--json"]).ok().json();
    assert_eq!(trail.as_array().unwrap().len(), 0, "something was begun");

    change(cli, &DONE, "sealed", &["--protection-key", &right]).ok();
    assert_eq!(replay(&service, "sealed").await.status(), 201);
    change(cli, &DONE, "open", &[]).ok();
    assert_eq!(replay(&*store, "open").await.status(), 201);
    // There is no answer to seal.
    change(cli, &NOT_APPLIED, "sealed too", &[]).ok();
    unknown(&service, "sealed again").await;
    change(cli, &DONE, "sealed again", &["--no-seal-check"]).ok();
    // Which was a mistake, and can be put right.
    let right = ["--protection-key", &right];
    let refused = change(cli, &DONE, "sealed again", &right).failed(4);
    assert!(
        refused.errors.contains("completed, with an answer that cannot be read"),
        "{refused:?}"
    );
    change(cli, &DONE, "sealed again", &[&right[..], &["--replace-unreadable"]].concat()).ok();
    assert_eq!(replay(&service, "sealed again").await.status(), 201);
    change(cli, &DONE, "sealed again", &[&right[..], &["--replace-unreadable"]].concat()).failed(4);
}

#[tokio::test]
async fn nothing_is_settled_that_the_service_could_not_open() {
    let folder = tempfile::tempdir().unwrap();
    let redis = RedisServer::start();
    let store = RedisStore::connect(&redis.url()).await.unwrap();
    refused_unless_sealed(Arc::new(store), &Cli::new(redis.url()), folder.path()).await;

    let file = folder.path().join("test.db");
    let store = SqliteLeaseStore::open(&file).await.unwrap();
    store.migrate().await.unwrap();
    let cli = Cli::new(format!("sqlite:{}", file.display()));
    refused_unless_sealed(Arc::new(store), &cli, folder.path()).await;
}

#[tokio::test]
async fn what_is_settled_is_what_the_layer_would_have_stored() {
    let redis = RedisServer::start();
    let store = RedisStore::connect(&redis.url()).await.unwrap();
    let cli = Cli::new(redis.url());
    unknown(&store, "k").await;
    for status in ["100", "199", "401", "403", "407", "408", "425", "429", "600", "999"] {
        change(&cli, &["settle", "done", "--status", status], "k", &[]).failed(2);
    }
    for status in ["204", "205", "304"] {
        change(&cli, &["settle", "done", "--status", status, "--body", "x"], "k", &[]).failed(2);
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("body");
    std::fs::write(&file, vec![b'x'; (1 << 20) + 1]).unwrap();
    let too_long = ["settle", "done", "--status", "200", "--body-file", file.to_str().unwrap()];
    let refused = change(&cli, &too_long, "k", &[]).failed(2);
    assert!(refused.errors.contains("1048576"), "{refused:?}");
    let endless = ["settle", "done", "--status", "200", "--body-file", "/dev/zero"];
    change(&cli, &endless, "k", &[]).failed(2);
    assert!(run(&cli, &["show"], "k", &[]).ok().out.contains("outcome unknown"));

    change(&cli, &["settle", "done", "--status", "502", "--body", "x"], "k", &[]).ok();
    let stored = replay(&store, "k").await;
    assert_eq!(stored.headers()["stripe-should-retry"], "false", "clients would retry for ever");
}

#[tokio::test]
async fn nothing_waits_for_a_lock_that_is_not_given_back() {
    let (_server, url) = PostgresServer::shared();
    let store = PostgresLeaseStore::connect(&url).await.unwrap();
    store.migrate().await.unwrap();
    unknown(&store, "k").await;
    let cli = Cli::new(url);
    let mut maintenance = store.pool().acquire().await.unwrap();
    for (table, commands) in [
        ("idempotency_trail", vec!["trail", "settle"]),
        ("idempotency_records", vec!["list", "show", "settle", "find"]),
    ] {
        let lock = format!("BEGIN; LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE");
        sqlx::raw_sql(sqlx::AssertSqlSafe(lock)).execute(&mut *maintenance).await.unwrap();
        for command in commands {
            let ran = match command {
                "settle" => change(&cli, &NOT_APPLIED, "k", &[]),
                "show" => run(&cli, &["show"], "k", &[]),
                "find" => cli.run(&["show", "--reference", "0123456789ab"]),
                other => cli.run(&[other]),
            }
            .failed(1);
            assert!(ran.took < Duration::from_secs(10), "{ran:?}");
            assert!(ran.errors.contains("lock timeout"), "{ran:?}");
        }
        sqlx::raw_sql("ROLLBACK").execute(&mut *maintenance).await.unwrap();
    }
    assert!(run(&cli, &["show"], "k", &[]).ok().out.contains("outcome unknown"));
    change(&cli, &NOT_APPLIED, "k", &[]).ok();
}

#[tokio::test]
async fn a_file_of_somebody_else_is_left_as_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("theirs.db");
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(&file).create_if_missing(true);
    let pool = sqlx::SqlitePool::connect_with(options).await.unwrap();
    sqlx::raw_sql("CREATE TABLE theirs (x)").execute(&pool).await.unwrap();
    pool.close().await;
    let before = std::fs::read(&file).unwrap();
    let cli = Cli::new(format!("sqlite:{}", file.display()));
    for command in [&["list"][..], &["trail"], &["show", "k", "--global"]] {
        let refused = cli.run(command).failed(1);
        assert!(refused.errors.contains("migrate()"), "{refused:?}");
    }
    assert_eq!(std::fs::read(&file).unwrap(), before, "it was changed");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "something stands beside it");
}

#[tokio::test]
async fn the_hint_at_the_schema_is_for_a_missing_schema_only() {
    let (server, url) = PostgresServer::shared();
    let store = PostgresLeaseStore::connect(&url).await.unwrap();
    assert!(Cli::new(&url).run(&["list"]).failed(1).errors.contains("migrate()"));
    store.migrate().await.unwrap();
    server.psql("CREATE ROLE stranger LOGIN");
    let denied = Cli::new(url.replace("test@", "stranger@")).run(&["trail"]).failed(1);
    assert!(denied.errors.contains("permission denied"), "{denied:?}");
    assert!(!denied.errors.contains("migrate()"), "{denied:?}");
}

#[tokio::test]
async fn characters_that_cannot_be_seen_are_refused_and_shown() {
    let redis = RedisServer::start();
    let store = RedisStore::connect(&redis.url()).await.unwrap();
    let cli = Cli::new(redis.url());
    unknown(&store, "k").await;
    for why in ["pay\u{202e}001", "x\u{200b}", "a\u{2066}b", "a\u{2028}b", "\u{feff}a"] {
        for (flag, other) in [("--why", "--who"), ("--who", "--why")] {
            run(&cli, &["forget"], "k", &["--yes", flag, why, other, "ana"]).failed(2);
        }
    }
    completed(&store, "seen", "pay\u{202e}001\u{200b}").await;
    let shown = run(&cli, &["show", "--contents"], "seen", &[]).ok();
    assert!(shown.out.contains("pay\\u{202e}001\\u{200b}"), "{shown:?}");
    let shown = run(&cli, &["show", "--contents", "--json"], "seen", &[]).ok();
    assert!(shown.out.contains("pay\\u202e001\\u200b"), "{shown:?}");
    assert_eq!(shown.json()["response"]["body"], "pay\u{202e}001\u{200b}");
}

#[tokio::test]
async fn output_that_cannot_be_written_is_a_failure() {
    let redis = RedisServer::start();
    let store = RedisStore::connect(&redis.url()).await.unwrap();
    let cli = Cli::new(redis.url());
    unknown(&store, "k").await;
    cli.run(&["audit"]).ok();
    for args in [
        &["show", "k", "--account", "acme"][..],
        &["list"],
        &["list", "--json"],
        &["forget", "k", "--account", "acme", "--why", "x", "--yes"],
    ] {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let output = cli.command().args(args).stdout(full).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        let errors = String::from_utf8(output.stderr).unwrap();
        assert!(errors.contains("standard output"), "{errors}");
        assert_eq!(errors.contains("change was made"), args[0] == "forget", "{errors}");
    }
}

#[tokio::test]
async fn a_page_that_is_none_is_refused() {
    let redis = RedisServer::start();
    let store = RedisStore::connect(&redis.url()).await.unwrap();
    unknown(&store, "k").await;
    let cli = Cli::new(redis.url());
    cli.run(&["audit"]).ok();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("test.db");
    SqliteLeaseStore::open(&file).await.unwrap().migrate().await.unwrap();
    let sqlite = Cli::new(format!("sqlite:{}", file.display()));
    for page in ["x", "7", "1.x", "x.00"] {
        for cli in [&cli, &sqlite] {
            let refused = cli.run(&["list", "--page", page]).failed(2);
            assert!(refused.errors.contains("page"), "{refused:?}");
        }
    }
}

#[tokio::test]
async fn a_key_need_not_stand_on_the_command_line() {
    let redis = RedisServer::start();
    let store = RedisStore::connect(&redis.url()).await.unwrap();
    unknown(&store, "order-1").await;
    let cli = Cli::new(redis.url());
    let show = ["show", "--account", "acme", "--key-file"];
    cli.run_with(&[&show[..], &["-"]].concat(), "order-1\n").ok();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("key");
    std::fs::write(&file, "order-1").unwrap();
    cli.run(&[&show[..], &[file.to_str().unwrap()]].concat()).ok();
    cli.run_with(&[&show[..], &["-"]].concat(), "").failed(2);
    let both = ["settle", "done", "--status", "200", "--body-file", "-", "--account", "acme"];
    let both = [&both[..], &["--key-file", "-", "--why", "x", "--yes"]].concat();
    cli.run_with(&both, "order-1\n").failed(2);
}

#[tokio::test]
async fn what_is_no_string_in_redis_is_said_to_be_left_alone() {
    let redis = RedisServer::start();
    redis.cli(&["rpush", &format!("idem:{{{}}}", key("k").to_text()), "foreign"]);
    let refused = change(&Cli::new(redis.url()), &["forget", "--unreadable"], "k", &[]).failed(4);
    assert!(refused.errors.contains("no string"), "{refused:?}");
}
