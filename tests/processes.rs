//! Several server processes on one real Redis: what a payments team relies on, from outside.
//! Effects are counted in the ledger of the card processor, which has no unique constraint.
#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http_body_util::Full;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::Barrier;

#[path = "support/redis.rs"]
#[allow(dead_code, unreachable_pub, reason = "each test program uses a part of it")]
mod redis;
#[path = "support/sandbox.rs"]
mod sandbox;

use redis::RedisServer;
use sandbox::{Answer, Call, Connection, Sandbox};

/// Two servers on one Redis and one ledger.
struct Pair {
    redis: RedisServer,
    one: Sandbox,
    two: Sandbox,
    folder: tempfile::TempDir,
}

impl Pair {
    fn start(args: &[&str]) -> Self {
        let redis = RedisServer::start();
        let folder = tempfile::tempdir().unwrap();
        let one = server(&redis, folder.path(), args);
        let two = server(&redis, folder.path(), args);
        Self { redis, one, two, folder }
    }
}

fn server(redis: &RedisServer, folder: &Path, args: &[&str]) -> Sandbox {
    let url = redis.url();
    let args = [&["--store", &url], args].concat();
    Sandbox::start_on(&folder.join("ledger.db"), &args)
}

#[track_caller]
fn is(answer: &Answer, status: u16, code: &str) {
    assert_eq!((answer.status.as_u16(), answer.code().as_str()), (status, code), "{answer:?}");
}

/// How many of the rounds of the barrier test are run; the promise is for a hundred.
const ROUNDS: usize = 100;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_simultaneous_requests_over_two_processes_charge_once_in_each_of_a_hundred_rounds() {
    let pair = Pair::start(&["--wait", "0.2"]);
    let (mut replays, mut conflicts) = (0, 0);
    for round in 0..ROUNDS {
        let key = format!("round-{round}");
        let barrier = Arc::new(Barrier::new(50));
        let mut requests = Vec::new();
        for n in 0..50 {
            let address = if n % 2 == 0 { pair.one.address } else { pair.two.address };
            let (barrier, key) = (Arc::clone(&barrier), key.clone());
            requests.push(tokio::spawn(async move {
                let mut connection = Connection::open(address).await.unwrap();
                barrier.wait().await;
                connection.send(Call::pay(&key, "tok_slow_30")).await.unwrap()
            }));
        }
        let mut first = 0;
        for request in requests {
            let answer = request.await.unwrap();
            match answer.status.as_u16() {
                201 if answer.is_replay() => replays += 1,
                201 => first += 1,
                409 => {
                    is(&answer, 409, "idempotency_key_in_use");
                    conflicts += 1;
                }
                _ => panic!("round {round}: {answer:?}"),
            }
        }
        assert_eq!(first, 1, "round {round}");
    }
    assert_eq!(pair.one.charges().await, ROUNDS as u64);
    println!("{ROUNDS} rounds: {replays} replays, {conflicts} conflicts");
    assert_eq!(replays + conflicts, ROUNDS * 49);
    // The wait is longer than the handler, so nobody should have had to come back.
    assert!(replays > conflicts, "{replays} replays, {conflicts} conflicts");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_closes_its_connection_is_charged_once_and_finds_its_receipt() {
    let pair = Pair::start(&[]);
    let body = r#"{"amount":1999,"currency":"usd","source":"tok_slow_800"}"#;
    let request = format!(
        "POST /v1/payments HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk_test_acme\r\n\
         idempotency-key: gone\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut stream = TcpStream::connect(pair.one.address).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let early = tokio::time::timeout(Duration::from_millis(300), stream.read_u8()).await;
    assert!(early.is_err(), "the handler is still running");
    drop(stream);
    let retry = pair.two.send(Call::pay("gone", "tok_slow_800")).await;
    assert_eq!(retry.status, 201, "{retry:?}");
    assert!(retry.is_replay());
    assert_eq!(pair.one.charges().await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_resets_its_stream_is_charged_once_and_finds_its_receipt() {
    let pair = Pair::start(&[]);
    let stream = TcpStream::connect(pair.one.address).await.unwrap();
    let io = TokioIo::new(stream);
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), io).await.unwrap();
    tokio::spawn(connection);
    let request = || {
        http::Request::post(format!("http://{}/v1/payments", pair.one.address))
            .header("authorization", "Bearer sk_test_acme")
            .header("idempotency-key", "reset")
            .header("content-type", "application/json")
            .body(Full::<bytes::Bytes>::from(
                r#"{"amount":1999,"currency":"usd","source":"tok_slow_800"}"#,
            ))
            .unwrap()
    };
    let answer = sender.send_request(request());
    // Dropping the future of the answer resets its stream; the connection stays.
    assert!(tokio::time::timeout(Duration::from_millis(300), answer).await.is_err());
    let retry = sender.send_request(request()).await.unwrap();
    assert_eq!(retry.status(), 201);
    assert_eq!(retry.headers()["idempotent-replayed"], "true");
    assert_eq!(pair.one.charges().await, 1);
}

/// Starts a payment on the first server and kills the server in the middle of it.
async fn kill_while_running(pair: &mut Pair, key: &str, source: &str) {
    let address = pair.one.address;
    let call = Call::pay(key, source);
    let request =
        tokio::spawn(async move { Connection::open(address).await.unwrap().send(call).await });
    // The charge is made at once, so the ledger tells when the handler is in the middle.
    let end = Instant::now() + Duration::from_secs(10);
    while pair.two.charges().await == 0 {
        assert!(Instant::now() < end, "the handler does not start");
    }
    pair.one.signal("KILL");
    assert!(request.await.unwrap().is_err(), "the connection is cut");
    pair.one.ended();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_server_leaves_its_key_in_use_then_unknown_and_nothing_runs_again() {
    let mut pair = Pair::start(&["--lease", "2", "--wait", "0"]);
    kill_while_running(&mut pair, "killed", "tok_charge_then_slow_60000").await;
    let retry = || Call::pay("killed", "tok_charge_then_slow_60000");
    let answer = pair.two.send(retry()).await;
    is(&answer, 409, "idempotency_key_in_use");
    let seconds: u64 = answer.header("retry-after").unwrap().parse().unwrap();
    assert!((1..=2).contains(&seconds), "{seconds}");
    tokio::time::sleep(Duration::from_secs(seconds)).await;
    for _ in 0..3 {
        let answer = pair.two.send(retry()).await;
        is(&answer, 409, "idempotency_outcome_unknown");
        assert_eq!(answer.json()["safe_new_key"], false);
        assert_eq!(answer.header("stripe-should-retry"), Some("false"));
    }
    // A server that starts later knows it as well.
    let three = server(&pair.redis, pair.folder.path(), &["--lease", "2"]);
    is(&three.send(retry()).await, 409, "idempotency_outcome_unknown");
    assert_eq!(pair.two.charges().await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn at_least_once_a_second_attempt_finds_the_charge_of_the_first() {
    let mut pair = Pair::start(&["--lease", "1", "--wait", "0", "--recovery", "at-least-once"]);
    kill_while_running(&mut pair, "killed", "tok_charge_then_slow_1500").await;
    let retry = || Call::pay("killed", "tok_charge_then_slow_1500");
    is(&pair.two.send(retry()).await, 409, "idempotency_key_in_use");
    tokio::time::sleep(Duration::from_millis(1100)).await;
    let answer = pair.two.send(retry()).await;
    assert_eq!(answer.status, 201, "{answer:?}");
    assert_eq!(answer.json()["attempt"], 2);
    assert!(!answer.is_replay());
    assert!(pair.two.send(retry()).await.is_replay());
    assert_eq!(pair.two.charges().await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reconciling_finds_the_charge_of_a_dead_server_and_answers_as_attempt_two() {
    let mut pair = Pair::start(&["--lease", "1", "--wait", "0", "--recovery", "reconcile"]);
    kill_while_running(&mut pair, "killed", "tok_charge_then_slow_1500").await;
    let retry = || Call::pay("killed", "tok_charge_then_slow_1500");
    is(&pair.two.send(retry()).await, 409, "idempotency_key_in_use");
    tokio::time::sleep(Duration::from_millis(1100)).await;
    let began = Instant::now();
    let answer = pair.two.send(retry()).await;
    assert_eq!(answer.status, 201, "{answer:?}");
    assert!(began.elapsed() < Duration::from_millis(1000), "found, not made again");
    assert_eq!(answer.json()["attempt"], 2);
    assert!(answer.header("location").unwrap().ends_with(&answer.id()));
    assert!(!answer.is_replay(), "nobody was given it before");
    let replay = pair.two.send(retry()).await;
    assert!(replay.is_replay());
    assert_eq!(replay.body, answer.body);
    assert_eq!(pair.two.charges().await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reconciling_runs_again_what_died_before_its_charge() {
    let mut pair = Pair::start(&["--lease", "0.5", "--wait", "2", "--recovery", "reconcile"]);
    let address = pair.one.address;
    let call = Call::pay("crashed", "tok_crash_before");
    let first = Connection::open(address).await.unwrap().send(call).await;
    assert!(first.is_err(), "the process is gone");
    pair.one.ended();
    // It waits for the end of the lease, asks, and runs: all in one request.
    let answer = pair.two.send(Call::pay("crashed", "tok_crash_before")).await;
    assert_eq!(answer.status, 201, "{answer:?}");
    assert_eq!(answer.json()["attempt"], 2);
    assert_eq!(pair.two.charges().await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_paused_past_its_lease_heals_the_record_when_it_wakes() {
    let pair = Pair::start(&["--lease", "0.5", "--wait", "0"]);
    let address = pair.one.address;
    let call = Call::pay("paused", "tok_charge_then_slow_700");
    let first =
        tokio::spawn(
            async move { Connection::open(address).await.unwrap().send(call).await.unwrap() },
        );
    let end = Instant::now() + Duration::from_secs(10);
    while pair.two.charges().await == 0 {
        assert!(Instant::now() < end, "the handler does not start");
    }
    pair.one.signal("STOP");
    tokio::time::sleep(Duration::from_millis(600)).await;
    let retry = || Call::pay("paused", "tok_charge_then_slow_700");
    is(&pair.two.send(retry()).await, 409, "idempotency_outcome_unknown");
    pair.one.signal("CONT");
    assert_eq!(first.await.unwrap().status, 201);
    assert!(pair.two.send(retry()).await.is_replay());
    assert_eq!(pair.two.charges().await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_redis_refuses_within_bounds_and_a_thawed_one_charges_once() {
    let pair = Pair::start(&[]);
    pair.redis.stop();
    let began = Instant::now();
    let mut requests = Vec::new();
    for n in 0..20 {
        let address = pair.one.address;
        requests.push(tokio::spawn(async move {
            let call = Call::pay(&format!("frozen-{n}"), "tok_visa");
            Connection::open(address).await.unwrap().send(call).await.unwrap()
        }));
    }
    for request in requests {
        let answer = request.await.unwrap();
        is(&answer, 503, "idempotency_store_unavailable");
        assert!(answer.header("retry-after").is_some());
    }
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    pair.redis.cont();
    for n in 0..20 {
        let call = || Call::pay(&format!("frozen-{n}"), "tok_visa");
        let end = Instant::now() + Duration::from_secs(10);
        loop {
            let answer = pair.two.send(call()).await;
            if answer.status == 201 {
                break;
            }
            // A claim that was sent before the thaw may arrive after it, with nobody behind it,
            // until its release arrives as well.
            assert!(answer.header("retry-after").is_some(), "{answer:?}");
            assert!(Instant::now() < end, "{answer:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
    assert_eq!(pair.one.charges().await, 20);
}
