//! The client, a hostile path and the sandbox: every payment exactly once, every call with its answer.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::StreamExt as _;
use http::Request;
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpListener, TcpStream};
use tower::{Layer as _, ServiceExt as _};
use tower_idempotency::IdempotencyKey;
use tower_idempotency::client::{Answered, ClientErrorKind, RetryBudget, RetryLayer, RetryPolicy};

use super::cutting::{Cut, CuttingProxy};
use super::redis::RedisServer;
use super::sandbox::Sandbox;
use super::wire::{Wire, created};
use super::{BOTH, Call, Kind, policy, send};

/// How many payments go through the cutting proxy, unless `CUT_PAYMENTS` says otherwise.
/// The promise is for 10,000.
const PAYMENTS: usize = 500;
/// How many of them are in the air at once.
const AT_ONCE: usize = 64;

/// The ledger's name of a key.
fn key_id(key: &str) -> String {
    Sha256::digest(key).iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

fn pay(address: SocketAddr, source: &str) -> Call {
    let body = format!(r#"{{"amount":1999,"currency":"usd","source":"{source}"}}"#);
    Call::post(format!("http://{address}/v1/payments"))
        .header("authorization", "Bearer sk_test_acme")
        .header("content-type", "application/json")
        .body(body)
}

/// One payment: its key, the id on its receipt, how often it was sent, whether the receipt is a replay.
struct Paid {
    key: IdempotencyKey,
    id: String,
    tries: u32,
    replay: bool,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_a_fifth_of_the_connections_cut_every_payment_is_made_once_and_has_its_receipt() {
    let payments = std::env::var("CUT_PAYMENTS").map_or(PAYMENTS, |number| number.parse().unwrap());
    let redis = RedisServer::start();
    let sandbox = Sandbox::start(&["--store", &redis.url()]);
    let proxy = CuttingProxy::start(sandbox.address, 0.2, 7).await;
    // A connection for each try, so that a fifth of the tries is cut.
    let client =
        Client::builder(TokioExecutor::new()).pool_max_idle_per_host(0).build_http::<Full<Bytes>>();
    // One in five fails, so one in 5^16 fails sixteen times.
    let policy = RetryPolicy::new()
        .max_tries(16)
        .first_pause(Duration::from_millis(20))
        .budget(RetryBudget::of(1000));
    let client = RetryLayer::new(policy).layer(client);
    let began = Instant::now();
    let address = proxy.address;
    let paid: Vec<Paid> = futures_util::stream::iter(0..payments)
        .map(|_| {
            let client = client.clone();
            tokio::spawn(async move {
                let call = pay(address, "tok_visa");
                let mut request = Request::builder().method(call.method).uri(call.url);
                *request.headers_mut().unwrap() = call.headers;
                let request = request.body(Full::new(call.body)).unwrap();
                let response = client.oneshot(request).await.unwrap();
                assert_eq!(response.status(), 201);
                let answered = response.extensions().get::<Answered>().unwrap().clone();
                let body = response.into_body().collect().await.unwrap().to_bytes();
                let receipt: Value = serde_json::from_slice(&body).unwrap();
                Paid {
                    key: answered.key().unwrap().clone(),
                    id: receipt["id"].as_str().unwrap().to_owned(),
                    tries: answered.tries(),
                    replay: answered.is_replay(),
                }
            })
        })
        .buffer_unordered(AT_ONCE)
        .map(|joined| joined.unwrap())
        .collect()
        .await;
    let took = began.elapsed();

    let ledger = sandbox.ledger().await;
    let entries = ledger["entries"].as_array().unwrap();
    let charged: Vec<&str> =
        entries.iter().map(|entry| entry["key_id"].as_str().unwrap()).collect();
    let distinct: BTreeSet<&str> = charged.iter().copied().collect();
    let keys: BTreeSet<String> = paid.iter().map(|paid| key_id(paid.key.as_str())).collect();
    let ids: BTreeSet<&str> = paid.iter().map(|paid| paid.id.as_str()).collect();
    let sent: u32 = paid.iter().map(|paid| paid.tries).sum();
    let most = paid.iter().map(|paid| paid.tries).max().unwrap();
    let replays = paid.iter().filter(|paid| paid.replay).count();
    let count = |counter: &std::sync::atomic::AtomicUsize| counter.load(Ordering::Relaxed);
    let counts = &proxy.counts;
    println!(
        "{payments} payments in {took:.1?}: {} ledger rows, {} doubled, {} receipts; {sent} tries (at most \
         {most} for one), {replays} receipts replayed; connections: {} whole, cut {} before, {} in the request, \
         {} in the answer",
        charged.len(),
        charged.len() - distinct.len(),
        ids.len(),
        count(&counts.whole),
        count(&counts.before),
        count(&counts.in_request),
        count(&counts.in_answer),
    );
    assert_eq!((charged.len(), distinct.len(), ids.len()), (payments, payments, payments));
    assert_eq!(keys.iter().map(String::as_str).collect::<BTreeSet<_>>(), distinct);
    for counter in [&counts.before, &counts.in_request, &counts.in_answer] {
        assert!(count(counter) * 40 > payments, "each kind of cut happens");
    }
    assert!(replays > 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b110_an_effect_whose_answer_was_cut_is_found_again_under_its_key() {
    let sandbox = Sandbox::start(&[]);
    for (n, kind) in (1..).zip(BOTH) {
        // The request arrives whole, and not a byte of the answer does.
        let proxy = CuttingProxy::with(sandbox.address, |number| match number {
            0 | 1 => Cut::InAnswer(0),
            _ => Cut::Nowhere,
        })
        .await;
        let done = send(kind, policy(), pay(proxy.address, "tok_visa")).await.unwrap();
        assert_eq!((done.status.as_u16(), done.answered.tries()), (201, 3), "{kind:?}");
        assert!(done.answered.is_replay());
        assert_eq!(sandbox.charges().await, n);
    }
}

/// A proxy that loses patience: what is not answered in time it sends to the second server too, and
/// passes on whichever answers first.
async fn impatient_proxy(one: SocketAddr, two: SocketAddr, patience: Duration) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            tokio::spawn(async move {
                let request = read_request(&mut client).await;
                let first = exchange(one, &request);
                let second = async {
                    tokio::time::sleep(patience).await;
                    exchange(two, &request).await
                };
                let answer = tokio::select! { answer = first => answer, answer = second => answer };
                let _ = client.write_all(&answer).await;
            });
        }
    });
    address
}

async fn read_request(client: &mut TcpStream) -> Vec<u8> {
    use tokio::io::AsyncReadExt as _;
    let mut request = Vec::new();
    // The body is JSON, so it ends with a brace.
    while !request.ends_with(b"}") {
        assert!(client.read_buf(&mut request).await.unwrap() > 0);
    }
    let text = String::from_utf8(request).unwrap();
    text.replacen("\r\n", "\r\nconnection: close\r\n", 1).into_bytes()
}

async fn exchange(address: SocketAddr, request: &[u8]) -> Vec<u8> {
    use tokio::io::AsyncReadExt as _;
    let mut server = TcpStream::connect(address).await.unwrap();
    server.write_all(request).await.unwrap();
    let mut answer = Vec::new();
    server.read_to_end(&mut answer).await.unwrap();
    answer
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b113_a_proxy_that_repeats_the_request_by_itself_leads_to_one_effect_and_its_answer() {
    let redis = RedisServer::start();
    let folder = tempfile::tempdir().unwrap();
    let ledger = folder.path().join("ledger.db");
    let url = redis.url();
    let server = || Sandbox::start_on(&ledger, &["--store", &url, "--wait", "0.1", "--lease", "2"]);
    let (one, two) = (server(), server());
    let patience = Duration::from_millis(300);
    let proxy = impatient_proxy(one.address, two.address, patience).await;
    for (n, kind) in (1..).zip(BOTH) {
        let done = send(kind, policy(), pay(proxy, "tok_slow_1500")).await.unwrap();
        assert_eq!(done.status, 201, "{kind:?}");
        assert!(done.answered.tries() > 1 && done.answered.is_replay(), "{:?}", done.answered);
        assert_eq!(one.charges().await, n);
    }
}

#[tokio::test]
async fn clones_of_a_client_in_many_tasks_never_share_a_key() {
    let wire = Arc::new(Wire::start([created()]).await);
    let sends = (0..50).map(|_| send(Kind::Hyper, policy(), Call::post(wire.url("/pay"))));
    futures_util::future::join_all(sends).await.into_iter().for_each(|done| drop(done.unwrap()));
    let keys: BTreeSet<_> = wire.received().iter().map(|one| one.key()).collect();
    assert_eq!(keys.len(), 50);
}

/// A panic behind the charge: where interrupted operations run again, the server asks for the try that settles it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_payment_whose_handler_panicked_has_its_receipt_by_the_next_try_where_that_settles_it() {
    let redis = RedisServer::start();
    for recovery in ["at-least-once", "reconcile"] {
        for kind in BOTH {
            let sandbox = Sandbox::start(&["--store", &redis.url(), "--recovery", recovery]);
            let done = send(kind, policy(), pay(sandbox.address, "tok_panic_after")).await.unwrap();
            assert_eq!((done.status.as_u16(), done.answered.tries()), (201, 2), "{recovery}");
            let ledger = sandbox.ledger().await;
            assert_eq!(ledger["entries"].as_array().unwrap().len(), 1, "{recovery}: {ledger}");
        }
    }
    // Where nothing runs again, another try would say the same.
    let sandbox = Sandbox::start(&["--store", &redis.url()]);
    let failed = send(Kind::Hyper, policy(), pay(sandbox.address, "tok_panic_after")).await;
    let failed = failed.unwrap_err();
    assert_eq!((failed.kind, failed.tries), (ClientErrorKind::OutcomeUnknown, 1));
}
