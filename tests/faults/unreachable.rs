//! C1: Redis cannot be reached. Its port refuses; or it takes connections and says nothing; or there is nobody
//! to take them, and nobody to say so.

use std::time::Instant;

use crate::invariants::Promise;
use crate::line::{Proxy, Way};
use crate::redis::RedisServer;
use crate::site::{Pair, Site, USUAL, is, is_paid, ms};

/// Two requests, of which the first may find a connection that was there and the second has to make one: both
/// are refused within bounds. When it is over, the first server pays, without a restart.
async fn refuses_until_healed(pair: &Pair, proxy: &Proxy) {
    for key in ["first", "second"] {
        let asked = Instant::now();
        let answer = pair.ask_one(key, "tok_visa").await;
        is(&answer, 503, "idempotency_store_unavailable");
        assert!(answer.header("retry-after").is_some(), "{answer:?}");
        // As long as a claim is tried, and what a busy machine takes.
        assert!(asked.elapsed() < ms(6_000), "{:?}", asked.elapsed());
    }
    assert_eq!(pair.two.charges().await, 0, "nothing runs");
    // Who reaches it is not disturbed.
    is_paid(&pair.settled_without_one("another", "tok_visa").await);
    proxy.heal();
    for key in ["first", "second"] {
        let end = pair.history.pay_surely(&[pair.one.address], key, "tok_visa", USUAL).await;
        is_paid(&end);
    }
    assert_eq!(pair.two.charges().await, 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c1_a_redis_that_refuses_connections_runs_nothing() {
    let site = Site::start(&[]).await;
    site.proxy.refuse();
    refuses_until_healed(&site, &site.proxy).await;
    site.assert_hit();
    site.check(Promise::AtMostOnce).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c1_a_redis_that_takes_connections_and_says_nothing_runs_nothing() {
    let site = Site::start(&[]).await;
    site.proxy.swallow(Way::Up);
    site.proxy.swallow(Way::Down);
    // Those that are made from now on carry nothing from their beginning.
    site.proxy.cut();
    refuses_until_healed(&site, &site.proxy).await;
    site.assert_hit();
    site.check(Promise::AtMostOnce).await;
}

#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c1_a_link_that_vanishes_runs_nothing() {
    let redis = RedisServer::start();
    let proxy = Proxy::narrow(redis.port()).await;
    let pair = Pair::start((&proxy.redis_url(), &[]), (&redis.url(), &[]));
    proxy.vanish().await;
    refuses_until_healed(&pair, &proxy).await;
    assert!(proxy.hits() > 0, "the fault was never hit");
    pair.check_at(&redis.url(), Promise::AtMostOnce).await;
}
