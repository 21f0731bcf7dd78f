//! C24: many more requests than connections.

use std::time::{Duration, Instant};

use futures_util::future::join_all;

use crate::invariants::End;
use crate::line::{Proxy, Way};
use crate::pool::{Seats, Shop};
use crate::redis::RedisServer;
use crate::site::{USUAL, is, metric, ms, sleep};

const REQUESTS: usize = 200;
const LEASE: f64 = 9.0;
const SOURCE: &str = "tok_charge_then_slow_1200";
/// The first ones run for so long that their leases are renewed, after a third, when claims wait still. If all did, their
/// renewals alone would be more than the one connection carries on a busy machine.
const RENEWED: usize = 20;
const RENEWED_SOURCE: &str = "tok_charge_then_slow_3500";

/// A server with one connection to its Redis, over a network of some milliseconds: so a claim takes what two
/// trips take, and two hundred do not get through.
async fn shop_with_one(lease: f64) -> (Shop, Proxy) {
    let redis = RedisServer::start();
    let proxy = Proxy::to(redis.port()).await;
    let url = proxy.redis_url();
    let shop = tokio::task::block_in_place(|| Shop::on(redis, &url, 1, lease));
    proxy.delay(Way::Down, ms(6));
    (shop, proxy)
}

/// Whoever is refused comes again, so that there are always claims that wait. How often that was, and how long
/// the longest request took.
async fn pay_surely(shop: &Shop, key: String, source: &str) -> (usize, Duration) {
    let (mut refused, mut longest) = (0, Duration::ZERO);
    loop {
        let asked = Instant::now();
        let answer = shop.history.ask(shop.server.address, &key, source, USUAL).await.unwrap();
        longest = longest.max(asked.elapsed());
        if answer.status == 201 {
            assert_eq!(answer.header("idempotency-status"), None, "charged and not stored");
            return (refused, longest);
        }
        is(&answer, 503, "idempotency_store_unavailable");
        assert!(answer.header("retry-after").is_some(), "{answer:?}");
        refused += 1;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c24_two_hundred_requests_on_a_pool_of_one_end_within_bounds_and_what_runs_is_stored() {
    let (shop, proxy) = shop_with_one(LEASE).await;
    let seats = Seats::watch(&shop.redis).await;
    let clients = (0..REQUESTS).map(|number| {
        let source = if number < RENEWED { RENEWED_SOURCE } else { SOURCE };
        pay_surely(&shop, format!("k{number}"), source)
    });
    let told = join_all(clients).await;
    let refused: usize = told.iter().map(|(refused, _)| refused).sum();
    let longest = told.iter().map(|(_, longest)| *longest).max().unwrap();
    assert!(seats.were_at_most(1) > 100, "nobody looked");
    let starved = shop.starved("claim");
    let renewed = metric(&shop.server, "idempotency_store_duration_count", "\"renew\"").await;
    println!(
        "C24: {} paid, {refused} refused, {starved} of them for want of a connection, the longest request \
         {longest:?}; {renewed} renewals",
        shop.begun()
    );
    assert!(longest < ms(10_000), "{longest:?}");
    assert!(starved > 0, "the fault was never hit: a pool of one was enough");
    // What runs finds a connection in time, however many claims wait for one.
    assert!(renewed >= RENEWED as u64, "{renewed} renewals");
    let count = async |name, label| metric(&shop.server, name, label).await;
    assert_eq!(count("idempotency_leases_lost", "").await, 0, "a renewal starved");
    assert_eq!(count("idempotency_requests", "\"not_stored\"").await, 0);
    proxy.heal();
    assert_eq!(shop.server.charges().await, REQUESTS as u64);
    shop.check(&[&shop.server]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c24_a_server_killed_while_requests_wait_for_its_one_connection_leaves_all_to_another() {
    let (mut shop, _proxy) = shop_with_one(1.0).await;
    let requests: Vec<_> = (0..REQUESTS).map(|n| shop.pay(&format!("k{n}"), SOURCE)).collect();
    let end = Instant::now() + ms(20_000);
    while shop.starved("claim") == 0 {
        assert!(Instant::now() < end, "the fault is not hit: nobody waits in vain");
        sleep(1).await;
    }
    shop.server.signal("KILL");
    shop.server.ended();
    let mut told = 0;
    for request in requests {
        told += usize::from(request.await.unwrap().is_some());
    }
    let second = shop.second();
    let (mut paid, mut unknown) = (0, 0);
    let settled = join_all((0..REQUESTS).map(|n| {
        let (history, address) = (shop.history.clone(), second.address);
        async move { history.pay_surely(&[address], &format!("k{n}"), SOURCE, USUAL).await }
    }));
    for end in settled.await {
        match end {
            End::Paid { .. } => paid += 1,
            End::Unknown => unknown += 1,
            end => panic!("{end:?}"),
        }
    }
    println!(
        "{told} of {REQUESTS} were answered before the kill; then {paid} paid, {unknown} unknown"
    );
    assert!(told < REQUESTS && unknown > 0 && paid > 0, "killed too early or too late");
    assert!(shop.held().len() <= 1, "{:?}", shop.held());
    shop.check(&[&second, &shop.server]).await;
}

/// How many connections this Redis was ever asked for.
fn connections_made(redis: &RedisServer) -> u64 {
    let stats = redis.cli(&["info", "stats"]);
    let made = stats.lines().find_map(|line| line.strip_prefix("total_connections_received:"));
    made.and_then(|made| made.trim().parse().ok()).expect("a number")
}

/// Completions do not wait for claims, but for each other. A call whose time is up while the pool looks at a connection
/// for it takes that connection along; so it has to wait for its turn before that, and the pool keeps what it has.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c24_completions_that_wait_in_vain_cost_a_pool_none_of_its_connections() {
    let (shop, proxy) = shop_with_one(30.0).await;
    proxy.delay(Way::Down, ms(0));
    let running: Vec<_> = (0..REQUESTS / 2)
        .map(|n| shop.pay(&format!("k{n}"), "tok_charge_then_slow_2000"))
        .collect();
    shop.begin(REQUESTS / 2).await;
    // A hundred end about now, and each takes two trips: what they wait for is more than the limit of a call.
    proxy.delay(Way::Down, ms(12));
    assert_eq!(shop.held().len(), 1);
    let before = connections_made(&shop.redis);
    for request in running {
        let answer = request.await.unwrap().unwrap();
        assert_eq!(answer.status, 201, "{answer:?}");
        assert_eq!(answer.header("idempotency-status"), None, "stored in time");
    }
    // One was made to ask this.
    let made = connections_made(&shop.redis) - before - 1;
    let starved = metric(&shop.server, "idempotency_store_retries", "\"settle\"").await;
    println!(
        "C24: {starved} times a completion waited in vain, and {made} connections were made anew"
    );
    assert!(starved > 20, "the fault was never hit");
    // On a busy machine one may be slow to answer the pool. Else each that waits in vain takes one along.
    assert!(made <= 5, "{made} connections were taken along");
    assert_eq!(shop.held().len(), 1);
    proxy.heal();
    assert_eq!(shop.server.charges().await, REQUESTS as u64 / 2);
    shop.check(&[&shop.server]).await;
}
