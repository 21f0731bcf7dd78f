//! The payments sandbox on a real Redis: what several processes, crashes and a store that is away
//! make of the promises. Effects are counted in the ledger.
#![cfg(unix)]

use std::time::{Duration, Instant};

#[path = "support/sandbox.rs"]
mod sandbox;
mod support;

use sandbox::{Answer, Call, Sandbox, refused};
use support::groups::{RedisCluster, SentinelGroup};
use support::redis::RedisServer;
use support::tls::Papers;

/// Short, so that a test need not wait; long enough for a process that is alive.
const LEASE: &str = "1";
const LEASE_IS_OVER: Duration = Duration::from_millis(1300);

/// Pays in a process that dies of it, and starts another one.
async fn crash(redis: &RedisServer, source: &str, recovery: &str) -> Sandbox {
    let url = redis.url();
    let args = ["--store", &url, "--lease", LEASE, "--wait", "0", "--recovery", recovery];
    let mut first = Sandbox::start(&args);
    let mut connection = first.connect().await;
    assert!(connection.send(Call::pay(source, source)).await.is_err(), "{source} is no crash");
    assert!(!first.ended().success());
    let second = Sandbox::start_again(first, &args);
    let early = second.send(Call::pay(source, source)).await;
    assert_eq!((early.status.as_u16(), early.code().as_str()), (409, "idempotency_key_in_use"));
    tokio::time::sleep(LEASE_IS_OVER).await;
    second
}

#[tokio::test]
async fn at_most_once_a_crash_leaves_the_outcome_unknown() {
    let redis = RedisServer::start();
    for (source, charged) in [("tok_crash_before", 0), ("tok_crash_after", 1)] {
        let sandbox = crash(&redis, source, "at-most-once").await;
        for _ in 0..2 {
            let answer = sandbox.send(Call::pay(source, source)).await;
            assert_eq!(answer.code(), "idempotency_outcome_unknown", "{source}");
            assert_eq!(answer.status, 409);
        }
        let changed = sandbox.send(Call::pay_amount(source, source, 1)).await;
        assert_eq!(changed.status, 422, "{source}");
        assert_eq!(sandbox.charges().await, charged, "{source}");
    }
}

#[tokio::test]
async fn at_least_once_a_retry_finds_the_charge_of_the_crashed_attempt() {
    let redis = RedisServer::start();
    for (source, first_attempt) in [("tok_crash_before", 2), ("tok_crash_after", 1)] {
        let sandbox = crash(&redis, source, "at-least-once").await;
        let second = sandbox.send(Call::pay(source, source)).await;
        assert_eq!(second.status, 201, "{second:?}");
        assert_eq!(second.json()["attempt"], 2);
        let third = sandbox.send(Call::pay(source, source)).await;
        assert!(third.is_replay());
        assert_eq!(second.body, third.body);
        let ledger = sandbox.ledger().await;
        assert_eq!(ledger["charges"], 1, "{source}");
        assert_eq!(ledger["entries"][0]["attempt"], first_attempt, "{source}");
        let shown = sandbox.send(Call::get(second.header("location").unwrap_or_default())).await;
        assert_eq!(shown.body, second.body);
    }
}

#[tokio::test]
async fn two_processes_pay_once() {
    let redis = RedisServer::start();
    let url = redis.url();
    let one = Sandbox::start(&["--store", &url]);
    let two = Sandbox::start_on(&one.ledger, &["--store", &url]);
    let pay = || Call::pay("k", "tok_slow_300");
    let (a, b, c, d) =
        tokio::join!(one.send(pay()), two.send(pay()), one.send(pay()), two.send(pay()));
    let answers = [a, b, c, d];
    assert!(answers.iter().all(|answer| answer.status == 201 && answer.body == answers[0].body));
    assert_eq!(answers.iter().filter(|answer| !answer.is_replay()).count(), 1);
    assert_eq!(one.charges().await, 1);
}

#[tokio::test]
async fn answers_outlive_the_process() {
    let redis = RedisServer::start();
    let url = redis.url();
    let mut first = Sandbox::start(&["--store", &url]);
    let paid = first.send(Call::pay("k", "tok_visa")).await;
    let panicked = first.send(Call::pay("p", "tok_panic_after")).await;
    assert_eq!((paid.status.as_u16(), panicked.status.as_u16()), (201, 500));
    first.signal("KILL");
    first.ended();
    let second = Sandbox::start_again(first, &["--store", &url]);
    let again = second.send(Call::pay("k", "tok_visa")).await;
    assert!(again.is_replay());
    assert_eq!(again.body, paid.body);
    let unknown = second.send(Call::pay("p", "tok_panic_after")).await;
    assert_eq!(unknown.code(), "idempotency_outcome_unknown");
    assert_eq!(second.charges().await, 2);
}

#[tokio::test]
async fn a_stop_in_the_middle_leaves_the_outcome_unknown_at_once() {
    let redis = RedisServer::start();
    let url = redis.url();
    let mut first = Sandbox::start(&["--store", &url, "--drain", "0.2"]);
    let mut running = first.connect().await;
    tokio::spawn(async move { running.send(Call::pay("k", "tok_slow_60000")).await });
    tokio::time::sleep(Duration::from_millis(300)).await;
    first.signal("TERM");
    assert_eq!(first.ended().code(), Some(0));
    let second = Sandbox::start_again(first, &["--store", &url, "--wait", "0"]);
    let retried = second.send(Call::pay("k", "tok_slow_60000")).await;
    assert_eq!(retried.code(), "idempotency_outcome_unknown");
    assert_eq!(second.charges().await, 0);
}

/// Asks until the answer is another one than 503, which has to be soon.
async fn once_it_is_back(sandbox: &Sandbox, call: impl Fn() -> Call) -> Answer {
    let end = Instant::now() + Duration::from_secs(10);
    loop {
        let answer = sandbox.send(call()).await;
        if answer.status != 503 {
            return answer;
        }
        assert!(Instant::now() < end, "the store is back, and still: {answer:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn a_frozen_store_is_a_503_within_bounds() {
    let redis = RedisServer::start();
    let url = redis.url();
    let sandbox = Sandbox::start(&["--store", &url]);
    let paid = sandbox.send(Call::pay("paid", "tok_visa")).await;
    redis.stop();
    let started = Instant::now();
    for key in ["new", "paid"] {
        let answer = sandbox.send(Call::pay(key, "tok_visa")).await;
        assert_eq!(answer.code(), "idempotency_store_unavailable");
        assert_eq!(answer.status, 503);
        assert!(answer.header("retry-after").is_some());
    }
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
    assert_eq!(sandbox.send(Call::get("/readyz")).await.status, 503);
    assert_eq!(sandbox.send(Call::get("/healthz")).await.status, 200);
    // Without a key the store is not needed.
    let path = paid.header("location").unwrap_or_default();
    let void = Call::new(http::Method::DELETE, path).account("acme");
    assert_eq!(sandbox.send(void).await.status, 200);

    let started = Instant::now();
    let (code, said) = refused(&["--store", &url], &[]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains(url.trim_end_matches('/')), "{said}");
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());

    redis.cont();
    // What it did not answer in its sleep, it answers first.
    assert_eq!(once_it_is_back(&sandbox, || Call::pay("new", "tok_visa")).await.status, 201);
    let again = once_it_is_back(&sandbox, || Call::pay("paid", "tok_visa")).await;
    assert!(again.is_replay() && again.body == paid.body, "{again:?}");
    assert_eq!(sandbox.charges().await, 2);
    assert_eq!(once_it_is_back(&sandbox, || Call::get("/readyz")).await.status, 200);
}

async fn pays_once(sandbox: &Sandbox) {
    let paid = sandbox.send(Call::pay("k", "tok_visa")).await;
    assert_eq!(paid.status, 201, "{paid:?}");
    let again = sandbox.send(Call::pay("k", "tok_visa")).await;
    assert!(again.is_replay() && again.body == paid.body, "{again:?}");
    assert_eq!(sandbox.charges().await, 1);
    assert_eq!(sandbox.send(Call::get("/readyz")).await.status, 200);
}

#[tokio::test]
async fn a_group_under_sentinels_and_a_cluster_are_opened_by_their_addresses() {
    let group = SentinelGroup::start(1);
    let url = format!("{}?wait=1", group.url());
    pays_once(&Sandbox::start(&["--store", &url])).await;
    let cluster = RedisCluster::start(3, 0);
    pays_once(&Sandbox::start(&["--store", &cluster.url()])).await;
}

/// As in a restart after a failover: the old primary is not back yet.
#[tokio::test]
async fn a_process_that_starts_while_a_replica_is_away_replays_and_pays_when_it_is_back() {
    let redis = RedisServer::start();
    let replica = redis.start_replica(redis.port());
    redis.wait_for_replicas(1);
    let url = format!("{}?wait=1", redis.url());
    let first = Sandbox::start(&["--store", &url]);
    let paid = first.send(Call::pay("done", "tok_visa")).await;
    assert_eq!(paid.status, 201, "{paid:?}");
    replica.stop();
    let second = Sandbox::start_again(first, &["--store", &url]);
    let ready = second.send(Call::get("/readyz")).await;
    assert_eq!(ready.status, 503, "{ready:?}");
    let reason = ready.json()["reason"].as_str().unwrap().to_owned();
    assert!(reason.contains("0 of the 1 replicas"), "{reason}");
    let replay = second.send(Call::pay("done", "tok_visa")).await;
    assert!(replay.is_replay() && replay.body == paid.body, "{replay:?}");
    let refused = second.send(Call::pay("new", "tok_visa")).await;
    assert_eq!(refused.code(), "idempotency_store_unavailable", "{refused:?}");
    replica.cont();
    let paid = once_it_is_back(&second, || Call::pay("new", "tok_visa")).await;
    assert_eq!(paid.status, 201, "{paid:?}");
    assert_eq!(second.charges().await, 2);
}

#[tokio::test]
async fn a_tls_server_is_opened_by_its_address() {
    let papers = Papers::new();
    let (_server, port) = papers.serve("no");
    let url = format!("rediss://127.0.0.1:{port}");
    // As every program that reads the system's certificates, it lets itself be told others.
    let authority = papers.path("ca.crt");
    pays_once(&Sandbox::start_knowing("SSL_CERT_FILE", &authority, &["--store", &url])).await;
    let (code, said) = refused(&["--store", &url], &[]);
    assert_eq!(code, Some(1), "an authority that nobody knows: {said}");
}

#[tokio::test]
async fn a_right_that_is_taken_away_is_named_by_readyz_until_it_is_given_back() {
    let redis = RedisServer::start();
    let rights = [
        "eval",
        "evalsha",
        "time",
        "get",
        "set",
        "getrange",
        "setrange",
        "strlen",
        "exists",
        "rename",
        "unlink",
        "pexpire",
        "pexpiretime",
    ];
    redis.cli(&["acl", "setuser", "pay", "on", ">right", "~idem:*", "+info", "+config|get"]);
    let grant = |sign: &str, right: &str| {
        let said = redis.cli(&["acl", "setuser", "pay", &format!("{sign}{right}")]);
        assert_eq!(said, "OK", "{sign}{right}");
    };
    rights.iter().for_each(|right| grant("+", right));
    let url = format!("redis://pay:right@127.0.0.1:{}/", redis.port());
    let sandbox = Sandbox::start(&["--store", &url]);
    pays_once(&sandbox).await;
    for right in rights {
        grant("-", right);
        let answer = sandbox.send(Call::get("/readyz")).await;
        assert_eq!(answer.status, 503, "without {right}: {answer:?}");
        let body = answer.json();
        assert_eq!(body["status"], "unavailable", "without {right}: {body}");
        let reason = body["reason"].as_str().unwrap_or_default();
        assert!(reason.contains(&format!("may not run `{right}`,")), "without {right}: {reason}");
        let grants = format!("`ACL SETUSER pay +{right}`");
        assert!(reason.contains(&grants) && !reason.contains(":right"), "{reason}");
        grant("+", right);
        let answer = sandbox.send(Call::get("/readyz")).await;
        assert_eq!(answer.status, 200, "with {right} again: {answer:?}");
    }
    // All at once, and the keys themselves.
    rights[2..].iter().for_each(|right| grant("-", right));
    let reason = sandbox.send(Call::get("/readyz")).await.json()["reason"].to_string();
    assert!(rights[2..].iter().all(|right| reason.contains(&format!("`{right}`"))), "{reason}");
    rights[2..].iter().for_each(|right| grant("+", right));
    redis.cli(&["acl", "setuser", "pay", "resetkeys", "~other:*"]);
    let reason = sandbox.send(Call::get("/readyz")).await.json()["reason"].to_string();
    assert!(reason.contains("ACL SETUSER pay ~idem:*"), "{reason}");
    redis.cli(&["acl", "setuser", "pay", "~idem:*"]);
    assert_eq!(sandbox.send(Call::get("/readyz")).await.status, 200);
}

#[tokio::test]
async fn a_redis_that_comes_back_empty_is_warned_of_once() {
    let mut empty = RedisServer::start();
    let mut lasting = RedisServer::start_with(&["--appendonly", "yes", "--appendfsync", "always"]);
    let kept = Sandbox::start(&["--store", &lasting.url()]);
    let lost = Sandbox::start(&["--store", &empty.url()]);
    let warnings = |sandbox: &Sandbox| {
        let (output, errors) = sandbox.said();
        (output + &errors).matches("another process than before, and holds nothing").count()
    };
    pays_once(&kept).await;
    pays_once(&lost).await;
    // A connection that breaks is no restart.
    empty.cli(&["client", "kill", "type", "normal"]);
    once_it_is_back(&lost, || Call::get("/readyz")).await;
    lasting.restart();
    empty.restart();
    for sandbox in [&kept, &lost] {
        once_it_is_back(sandbox, || Call::get("/readyz")).await;
    }
    let end = Instant::now() + Duration::from_secs(10);
    while warnings(&lost) == 0 {
        assert!(Instant::now() < end, "{:?}", lost.said());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // The next connection finds the same process.
    empty.cli(&["client", "kill", "type", "normal"]);
    once_it_is_back(&lost, || Call::get("/readyz")).await;
    assert!(once_it_is_back(&kept, || Call::pay("k", "tok_visa")).await.is_replay());
    assert_eq!((warnings(&lost), warnings(&kept)), (1, 0));
}

#[tokio::test]
async fn processes_live_through_a_failover_and_charge_nobody_twice() {
    let mut group = SentinelGroup::start(2);
    let url = format!("{}?wait=2", group.url());
    let one = Sandbox::start(&["--store", &url]);
    let two = Sandbox::start_on(&one.ledger, &["--store", &url]);
    let first = group.servers[0].port();
    let mut paid = 0;
    for number in 0..40 {
        if number == 20 {
            group.servers[0].kill();
            group.wait_for_failover_from(first);
            group.servers[0].restart();
        }
        let key = format!("k{number}");
        let end = Instant::now() + Duration::from_secs(30);
        loop {
            let (a, b) = tokio::join!(
                one.send(Call::pay(&key, "tok_visa")),
                two.send(Call::pay(&key, "tok_visa"))
            );
            if a.status == 201 && b.status == 201 {
                assert_eq!(a.body, b.body, "{key}");
                paid += 1;
                break;
            }
            // What could not be claimed in time may be left as claimed by nobody who runs.
            if [&a, &b].iter().any(|answer| answer.code() == "idempotency_outcome_unknown") {
                break;
            }
            assert!(Instant::now() < end, "{key}: {a:?} {b:?}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
    let ledger = one.ledger().await;
    let entries = ledger["entries"].as_array().map_or(&[][..], Vec::as_slice);
    let keys: std::collections::BTreeSet<_> =
        entries.iter().map(|entry| entry["key_id"].to_string()).collect();
    assert_eq!(keys.len(), entries.len(), "no key twice: {ledger}");
    assert!(paid >= 30 && entries.len() >= paid, "{paid} paid of {}", entries.len());
}

/// Waits until the log says this, and gives the line.
fn logged(sandbox: &Sandbox, words: &str) -> String {
    let end = Instant::now() + Duration::from_secs(10);
    loop {
        let (output, errors) = sandbox.said();
        let said = output + &errors;
        if let Some(line) = said.lines().find(|line| line.contains(words)) {
            return line.to_owned();
        }
        assert!(Instant::now() < end, "no {words:?} in {said}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[tokio::test]
async fn the_running_log_says_in_words_what_failed_and_what_to_change() {
    let redis = RedisServer::start();
    redis.cli(&["acl", "setuser", "pay", "on", ">secret", "~*", "+@all"]);
    let url = format!("redis://pay:secret@127.0.0.1:{}/", redis.port());
    let sandbox = Sandbox::start(&["--store", &url]);
    assert_eq!(sandbox.send(Call::pay("before", "tok_visa")).await.status, 201);

    redis.cli(&["acl", "setuser", "pay", "-set"]);
    assert_eq!(sandbox.send(Call::pay("k1", "tok_visa")).await.status, 503);
    let line = logged(&sandbox, "the store does not do what it is asked");
    assert!(line.contains("`ACL SETUSER pay +set`"), "{line}");
    redis.cli(&["acl", "setuser", "pay", "+set"]);

    redis.cli(&["config", "set", "maxmemory", "1"]);
    assert_eq!(sandbox.send(Call::pay("k2", "tok_visa")).await.status, 503);
    logged(&sandbox, "Redis is full: raise maxmemory");
    redis.cli(&["config", "set", "maxmemory", "0"]);

    redis.stop();
    assert_eq!(sandbox.send(Call::pay("k3", "tok_visa")).await.status, 503);
    let line = logged(&sandbox, "the store's call_timeout)");
    assert!(line.contains("within 600ms (") || line.contains("within 1.2s ("), "{line}");
    redis.cont();

    let (output, errors) = sandbox.said();
    for raw in ["StoreError", "Elapsed(", "Custom {", "source: Some"] {
        assert!(!(output.clone() + &errors).contains(raw), "{raw} in {output}{errors}");
    }
}
