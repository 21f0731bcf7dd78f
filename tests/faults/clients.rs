//! A. Clients.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::Barrier;

use crate::invariants::{End, Promise};
use crate::sandbox::{Answer, Call, Connection};
use crate::site::{Site, USUAL, begins, is, is_paid, is_unknown, metric, ms, sleep};

/// How a client leaves.
#[derive(Clone, Copy, Debug)]
enum Leaves {
    Closes,
    Resets,
    /// It says that it sends no more, and goes on listening.
    HalfCloses,
}

/// Sends a payment of the usual amount to the first server by hand, and leaves when its handler runs.
async fn leave(site: &Site, key: &str, source: &str, leaves: Leaves) {
    let body = json!({ "amount": USUAL, "currency": "usd", "source": source }).to_string();
    let request = format!(
        "POST /v1/payments HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk_test_acme\r\n\
         idempotency-key: {key}\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut stream = TcpStream::connect(site.one.address).await.unwrap();
    site.history.lost(key, source, USUAL);
    stream.write_all(request.as_bytes()).await.unwrap();
    begins(&site.one, key).await;
    match leaves {
        Leaves::Closes => drop(stream),
        Leaves::Resets => {
            stream.set_zero_linger().unwrap();
            drop(stream);
        }
        Leaves::HalfCloses => {
            stream.shutdown().await.unwrap();
            let mut heard = Vec::new();
            stream.read_to_end(&mut heard).await.unwrap();
            assert_eq!(heard, b"", "the connection ends before its handler does");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a1_a_client_that_leaves_is_charged_once_and_finds_its_receipt() {
    let site = Site::start(&["--lease", "1", "--wait", "5"]).await;
    // Before its charge, and after it.
    for source in ["tok_slow_400", "tok_charge_then_slow_400"] {
        for leaves in [Leaves::Closes, Leaves::Resets, Leaves::HalfCloses] {
            let key = format!("{source}-{leaves:?}");
            leave(&site, &key, source, leaves).await;
            let end = site.settled(&key, source).await;
            assert!(matches!(end, End::Paid { replay: true, .. }), "{key}: {end:?}");
        }
    }
    assert_eq!(site.two.charges().await, 6);
    site.check(Promise::AtMostOnce).await;
}

/// All of the payment has come, so that it would be paid by whoever goes on without the end of the body.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a2_a_broken_upload_leaves_no_trace() {
    let site = Site::start(&[]).await;
    let payment = json!({ "amount": USUAL, "currency": "usd", "source": "tok_visa" }).to_string();
    let length = payment.len();
    let bodies = [
        format!("content-length: {}\r\n\r\n{payment}", length + 1),
        format!("transfer-encoding: chunked\r\n\r\n{length:x}\r\n{payment}\r\n"),
    ];
    let mut broken = 0;
    for body in &bodies {
        for leaves in [Leaves::Closes, Leaves::Resets, Leaves::HalfCloses] {
            let request = format!(
                "POST /v1/payments HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk_test_acme\r\n\
                 idempotency-key: broken\r\ncontent-type: application/json\r\n{body}"
            );
            let mut stream = TcpStream::connect(site.one.address).await.unwrap();
            stream.write_all(request.as_bytes()).await.unwrap();
            sleep(100).await;
            assert_eq!(site.records(), [""; 0], "nothing is claimed before the whole body");
            match leaves {
                Leaves::Closes => drop(stream),
                Leaves::Resets => {
                    stream.set_zero_linger().unwrap();
                    drop(stream);
                }
                Leaves::HalfCloses => {
                    stream.shutdown().await.unwrap();
                    let mut answer = String::new();
                    stream.read_to_string(&mut answer).await.unwrap();
                    assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
                    assert!(answer.contains("idempotency_request_incomplete"), "{answer}");
                }
            }
            broken += 1;
            // The server has found out, and is done with it.
            let end = Instant::now() + ms(20_000);
            let refused = async || metric(&site.one, "idempotency_requests", "incomplete").await;
            while refused().await < broken {
                assert_eq!(site.two.charges().await, 0, "{leaves:?}: a part was paid");
                assert!(Instant::now() < end, "{leaves:?}: it was not taken for a broken one");
                sleep(5).await;
            }
            assert_eq!(site.records(), [""; 0], "{leaves:?}");
            assert_eq!(site.two.charges().await, 0, "{leaves:?}");
        }
    }
    is_paid(&site.settled("broken", "tok_visa").await);
    assert_eq!(site.two.ledger().await["entries"][0]["attempt"], 1);
    site.check(Promise::AtMostOnce).await;
}

/// Sends an upload a few bytes at a time.
async fn trickle(stream: &mut TcpStream, bytes: &[u8]) {
    for few in bytes.chunks(9) {
        stream.write_all(few).await.unwrap();
        sleep(5).await;
    }
}

/// A payment that is slow to come: its head, its body but for the end, and the end.
fn upload(key: &str, source: &str, chunked: bool) -> [String; 3] {
    let payment = json!({ "amount": USUAL, "currency": "usd", "source": source }).to_string();
    let head = format!(
        "POST /v1/payments HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk_test_acme\r\n\
         idempotency-key: {key}\r\ncontent-type: application/json\r\n"
    );
    if chunked {
        // All of the payment has come, and nobody has said that this was all.
        let parts = payment
            .as_bytes()
            .chunks(7)
            .map(|few| format!("{:x}\r\n{}\r\n", few.len(), std::str::from_utf8(few).unwrap()));
        return [
            head + "transfer-encoding: chunked\r\n\r\n",
            parts.collect(),
            "0\r\n\r\n".to_owned(),
        ];
    }
    let (begin, end) = payment.split_at(payment.len() - 1);
    [format!("{head}content-length: {}\r\n\r\n", payment.len()), begin.into(), end.into()]
}

/// What is left of an HTTP/1.1 answer when its connection closes, or as far as it has come when its body has.
async fn answered(stream: &mut TcpStream) -> String {
    let mut answer = Vec::new();
    let whole = |answer: &[u8]| {
        let text = String::from_utf8_lossy(answer).to_ascii_lowercase();
        let (head, body) = text.split_once("\r\n\r\n")?;
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "))?;
        Some(body.len() >= length.parse().unwrap())
    };
    while whole(&answer) != Some(true) {
        if stream.read_buf(&mut answer).await.unwrap() == 0 {
            break;
        }
    }
    String::from_utf8(answer).unwrap()
}

/// The server waits for an upload for longer than a lease lasts, and holds no key meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a2_a_slow_upload_claims_nothing_before_it_has_come_to_its_end() {
    let site = Site::start(&["--lease", "0.3", "--wait", "0"]).await;
    let incomplete = async || metric(&site.one, "idempotency_requests", "incomplete").await;
    let (mut left, mut charged) = (0, 0);
    for chunked in [false, true] {
        for leaves in [Leaves::Closes, Leaves::Resets, Leaves::HalfCloses] {
            let key = format!("{chunked}-{leaves:?}");
            let [head, begin, end] = upload(&key, "tok_visa", chunked);
            let mut streams = Vec::new();
            // One that its client will leave, and one that will be finished when another has paid.
            for _ in 0..2 {
                let mut stream = TcpStream::connect(site.one.address).await.unwrap();
                stream.set_nodelay(true).unwrap();
                site.history.lost(&key, "tok_visa", USUAL);
                stream.write_all(head.as_bytes()).await.unwrap();
                trickle(&mut stream, begin.as_bytes()).await;
                streams.push(stream);
            }
            let [mut leaving, mut slow] = <[TcpStream; 2]>::try_from(streams).unwrap();
            // It stalls here, for more than two leases.
            let until = Instant::now() + ms(700);
            let records = site.records().len();
            while Instant::now() < until {
                assert_eq!(site.records().len(), records, "{key}: claimed by a part of a body");
                assert_eq!(site.two.charges().await, charged, "{key}: a part was paid");
                sleep(20).await;
            }
            match leaves {
                Leaves::Closes => drop(leaving),
                Leaves::Resets => {
                    leaving.set_zero_linger().unwrap();
                    drop(leaving);
                }
                Leaves::HalfCloses => {
                    leaving.shutdown().await.unwrap();
                    let answer = answered(&mut leaving).await;
                    assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
                }
            }
            left += 1;
            let patience = Instant::now() + ms(20_000);
            while incomplete().await < left {
                assert!(Instant::now() < patience, "{key}: it was not taken for a broken one");
                sleep(5).await;
            }
            assert_eq!(site.records().len(), records, "{key}");
            assert_eq!(site.handlers_of(&key), [0; 0], "{key}");
            if matches!(leaves, Leaves::Closes) {
                // Its client has lost patience and comes by another way; what is still on its way is a late twin.
                is_paid(&site.settled_without_one(&key, "tok_visa").await);
            }
            trickle(&mut slow, end.as_bytes()).await;
            let answer = answered(&mut slow).await;
            assert!(answer.starts_with("HTTP/1.1 201 "), "{key}: {answer}");
            let replay = answer.to_ascii_lowercase().contains("idempotent-replayed: true");
            assert_eq!(replay, matches!(leaves, Leaves::Closes), "{key}: {answer}");
            charged += 1;
            let end = site.settled_without_one(&key, "tok_visa").await;
            assert!(matches!(end, End::Paid { replay: true, .. }), "{key}: {end:?}");
            assert_eq!(site.handlers_of(&key), [1], "{key}");
            assert_eq!(site.two.charges().await, charged, "{key}");
        }
    }
    site.check(Promise::AtMostOnce).await;
}

/// A hundred requests at once, half of them to each server.
async fn hundred_twins(site: &Site, key: &str, source: &str) -> Vec<Answer> {
    let barrier = Arc::new(Barrier::new(100));
    let twins: Vec<_> = (0..100)
        .map(|n| {
            let address = if n % 2 == 0 { site.one.address } else { site.two.address };
            let (history, barrier) = (site.history.clone(), Arc::clone(&barrier));
            let (key, source) = (key.to_owned(), source.to_owned());
            tokio::spawn(async move {
                let mut connection = Connection::open(address).await.unwrap();
                barrier.wait().await;
                history.ask_on(&mut connection, &key, &source, USUAL).await.unwrap()
            })
        })
        .collect();
    let mut answers = Vec::new();
    for twin in twins {
        answers.push(twin.await.unwrap());
    }
    let fresh = answers.iter().filter(|answer| answer.status == 201 && !answer.is_replay());
    assert_eq!(fresh.count(), 1, "{answers:?}");
    answers
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a3_of_a_hundred_twins_at_once_one_is_fresh_and_the_rest_are_replays_or_in_use() {
    for (wait, source) in [("10", "tok_slow_200"), ("10", "tok_visa"), ("0", "tok_slow_500")] {
        let site = Site::start(&["--wait", wait]).await;
        let mut in_use = 0;
        for round in 0..3 {
            let key = format!("twins-{round}");
            for answer in hundred_twins(&site, &key, source).await {
                if answer.status != 201 {
                    is(&answer, 409, "idempotency_key_in_use");
                    in_use += 1;
                }
            }
            let end = site.settled(&key, source).await;
            assert!(matches!(end, End::Paid { replay: true, .. }), "{end:?}");
        }
        // Whoever waits for long enough gets the answer.
        assert_eq!(in_use > 0, wait == "0", "{in_use} in use");
        assert_eq!(site.two.charges().await, 3);
        site.check(Promise::AtMostOnce).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a4_another_request_is_a_mismatch_in_every_state_but_open() {
    let site = Site::start(&["--lease", "1", "--wait", "0"]).await;
    let other = async |key| {
        let answer = site.history.ask(site.two.address, key, "tok_visa", 7).await;
        answer.expect("an answer")
    };
    // In flight, and after the end of the lease, before and after somebody found that out.
    let running = site.pay("killed", "tok_slow_60000");
    site.claimed().await;
    is(&other("killed").await, 422, "idempotency_key_reused");
    site.one.signal("KILL");
    drop(running.await);
    sleep(1100).await;
    is(&other("killed").await, 422, "idempotency_key_reused");
    is_unknown(&site.settled_without_one("killed", "tok_slow_60000").await);
    is(&other("killed").await, 422, "idempotency_key_reused");
    // Completed.
    is_paid(&site.settled_without_one("done", "tok_visa").await);
    is(&other("done").await, 422, "idempotency_key_reused");
    // Open: a corrected request may use the key.
    site.ask_two("open", "tok_unavailable").await;
    assert_eq!(other("open").await.status, 201);
    is(&site.ask_two("open", "tok_unavailable").await, 422, "idempotency_key_reused");
    assert_eq!(site.two.charges().await, 2);
    site.check(Promise::AtMostOnce).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a5_a_retry_gets_the_stored_answer_byte_for_byte() {
    let site = Site::start(&[]).await;
    let first = site.ask_one("k", "tok_visa").await;
    let retry = site.ask_two("k", "tok_visa").await;
    assert!(!first.is_replay() && retry.is_replay());
    assert_eq!((first.status, &first.body), (retry.status, &retry.body));
    assert_eq!(first.header("location"), retry.header("location"));
    assert_eq!(site.two.charges().await, 1);
    site.check(Promise::AtMostOnce).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a7_five_thousand_requests_on_one_slow_key_are_capped_and_charge_once() {
    const SEATS: usize = 256;
    // As long as a server lets anybody wait: nobody's time is up meanwhile.
    let site = Site::start(&["--wait", "60", "--lease", "120"]).await;
    let running = site.pay("storm", "tok_slow_500");
    begins(&site.one, "storm").await;
    // As slow as it takes: it ends when all have asked.
    site.one.signal("STOP");
    // 256 of them may wait for one key; the others are refused, and come again at once.
    let left = Arc::new(AtomicUsize::new(5_000));
    let refused = Arc::new(AtomicUsize::new(0));
    let clients: Vec<_> = (0..SEATS + 64)
        .map(|_| {
            let (address, history) = (site.two.address, site.history.clone());
            let (left, refused) = (Arc::clone(&left), Arc::clone(&refused));
            let not_asked = Arc::clone(&left);
            let another = move || {
                let one_less = |left: usize| left.checked_sub(1);
                left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less).is_ok()
            };
            tokio::spawn(async move {
                let mut connection = Connection::open(address).await.unwrap();
                let mut replays = 0;
                while another() {
                    let answer = history.ask_on(&mut connection, "storm", "tok_slow_500", USUAL);
                    let answer = answer.await.unwrap();
                    if answer.status == 201 {
                        assert!(answer.is_replay());
                        replays += 1;
                    } else if answer.status == 503 {
                        // A machine so busy that Redis did not answer in time: it comes again.
                        is(&answer, 503, "idempotency_store_unavailable");
                        not_asked.fetch_add(1, Ordering::SeqCst);
                    } else {
                        is(&answer, 409, "idempotency_too_many_waiting");
                        assert!(answer.header("retry-after").is_some());
                        refused.fetch_add(1, Ordering::SeqCst);
                    }
                }
                replays
            })
        })
        .collect();
    // While it stands still nobody is woken: who is refused has waited for nothing.
    // (The clients of these tests give up after half a minute.)
    let end = Instant::now() + ms(20_000);
    while refused.load(Ordering::SeqCst) < 5_000 - SEATS && Instant::now() < end {
        sleep(5).await;
    }
    let met = refused.load(Ordering::SeqCst);
    assert!(met > 500, "{met} are refused");
    site.one.signal("CONT");
    let mut replays = 0;
    for client in clients {
        replays += client.await.unwrap();
    }
    assert_eq!(running.await.unwrap().unwrap().status, 201);
    assert_eq!(replays + refused.load(Ordering::SeqCst), 5_000);
    // Exactly so many could wait; unless the machine was so busy that not all had asked by then.
    assert!(replays >= SEATS && (replays == SEATS || met < 5_000 - SEATS), "{replays} replays");
    // Whoever was refused last asks again.
    is_paid(&site.settled("storm", "tok_slow_500").await);
    assert_eq!(site.two.charges().await, 1);
    site.check(Promise::AtMostOnce).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a8_a_client_that_forgot_its_key_makes_another_payment() {
    let site = Site::start(&[]).await;
    for key in ["before", "after"] {
        is_paid(&site.settled(key, "tok_visa").await);
    }
    assert_eq!(site.two.charges().await, 2, "as the README says");
    // To everybody but this client they are two payments.
    site.check(Promise::AtMostOnce).await;
}

/// B12 of the faults that people met: a record may vanish between two looks, and only a claim counts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_that_is_hammered_across_the_ends_of_its_records_is_charged_once_for_each() {
    // No handler takes as long as its lease, on however busy a machine.
    let site = Site::start(&["--retention", "0.9", "--lease", "0.9"]).await;
    let hammers: Vec<_> = (0..8)
        .map(|n| {
            let address = if n % 2 == 0 { site.one.address } else { site.two.address };
            tokio::spawn(async move {
                let mut connection = Connection::open(address).await.unwrap();
                let mut told = std::collections::BTreeSet::new();
                for _ in 0..500 {
                    let answer = connection.send(Call::pay("k", "tok_visa")).await.unwrap();
                    assert_eq!(answer.status, 201, "{answer:?}");
                    told.insert(answer.id());
                    sleep(8).await;
                }
                told
            })
        })
        .collect();
    let mut told = std::collections::BTreeSet::new();
    for hammer in hammers {
        told.extend(hammer.await.unwrap());
    }
    let ledger = site.two.ledger().await;
    let at: Vec<i64> = ledger["entries"]
        .as_array()
        .unwrap()
        .iter()
        .map(|entry| entry["at"].as_i64().unwrap())
        .collect();
    assert!(at.len() >= 4, "the fault was never hit");
    assert_eq!(at.len(), told.len(), "a charge that nobody was told of");
    assert!(at.windows(2).all(|pair| pair[1] - pair[0] >= 890), "two for one retention: {at:?}");
}
