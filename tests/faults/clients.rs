//! A. Clients.

use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

use crate::invariants::Promise;
use crate::sandbox::{Call, Connection};
use crate::site::{Site, USUAL, is, is_paid, is_unknown, sleep};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a2_a_broken_upload_leaves_no_trace() {
    let site = Site::start(&[]).await;
    let head = "POST /v1/payments HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk_test_acme\r\n\
                idempotency-key: broken\r\ncontent-type: application/json\r\n\
                content-length: 500\r\n\r\n{\"amount\":";
    let mut stream = TcpStream::connect(site.one.address).await.unwrap();
    stream.write_all(head.as_bytes()).await.unwrap();
    sleep(200).await;
    assert_eq!(site.records(), Vec::<String>::new(), "nothing is claimed before the whole body");
    drop(stream);
    is_paid(&site.settled("broken", "tok_visa").await);
    assert_eq!(site.two.ledger().await["entries"][0]["attempt"], 1);
    site.check(Promise::AtMostOnce).await;
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
async fn a6_before_its_retention_a_key_is_replayed_and_after_it_new() {
    let site = Site::start(&["--retention", "2", "--lease", "0.5"]).await;
    let first = site.ask_one("k", "tok_visa").await;
    sleep(1200).await;
    assert!(site.ask_two("k", "tok_visa").await.is_replay());
    sleep(1000).await; // a replay extends nothing
    let fresh = site.ask_two("k", "tok_visa").await;
    assert!(!fresh.is_replay());
    assert_ne!(first.id(), fresh.id());
    assert_eq!(site.two.charges().await, 2);
    // With the retention ends what it is for: one effect, and one answer to it.
    site.check_breaks(Promise::AtMostOnce, &["I1", "I2"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a7_a_storm_on_one_key_is_capped_and_charges_once() {
    let site = Site::start(&["--wait", "3"]).await;
    let running = site.pay("storm", "tok_slow_1500");
    site.claimed().await;
    let mut storm = Vec::new();
    for _ in 0..300 {
        let (address, history) = (site.two.address, site.history.clone());
        storm.push(tokio::spawn(async move {
            history.ask(address, "storm", "tok_slow_1500", USUAL).await.unwrap()
        }));
    }
    let (mut replays, mut refused) = (0, 0);
    for request in storm {
        let answer = request.await.unwrap();
        match answer.status.as_u16() {
            201 => replays += usize::from(answer.is_replay()),
            _ => {
                is(&answer, 409, "idempotency_too_many_waiting");
                refused += 1;
            }
        }
    }
    assert_eq!(running.await.unwrap().unwrap().status, 201);
    // 256 may wait for one key.
    assert!(replays >= 256 && refused > 0, "{replays} replays, {refused} refused");
    is_paid(&site.settled("storm", "tok_slow_1500").await);
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
    let site = Site::start(&["--retention", "0.4", "--lease", "0.2"]).await;
    let hammers: Vec<_> = (0..8)
        .map(|n| {
            let address = if n % 2 == 0 { site.one.address } else { site.two.address };
            tokio::spawn(async move {
                let mut connection = Connection::open(address).await.unwrap();
                let mut told = std::collections::BTreeSet::new();
                for _ in 0..250 {
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
    assert!(at.windows(2).all(|pair| pair[1] - pair[0] >= 390), "two for one retention: {at:?}");
}
