//! B81 of the faults that people met, with a count of the calls that were really dropped half way.
//!
//! All that a request does at the store is done in a task of its own, so a client that leaves cancels none of it. What
//! does drop calls is a time limit, and whoever asks the store in the future of a connection, as `/readyz` does. Here
//! both happen on the connections that payments are claimed and recorded on, and no reply goes to the wrong call.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::extract::State;
use axum::routing::{get, post};
use axum::{Json, Router};
use http::StatusCode;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;
use tower_idempotency::record::{
    Claim, ClaimOutcome, CompleteOutcome, Completion, Release, ReleaseOutcome, RenewOutcome,
    Renewal, Resolution, ResolveOutcome,
};
use tower_idempotency::store::StoreFuture;
use tower_idempotency::store::redis::deadpool_redis::{Manager, Pool};
use tower_idempotency::{
    Config, Execution, IdempotencyKey, IdempotencyLayer, Lease, RedisStore, Scope, StorageKey,
    Store,
};

use crate::history::{History, assert_holds, storage_key};
use crate::invariants::{Charge, Finish, Promise, Run, key_id};
use crate::line::{Loss, Proxy, Way};
use crate::load::{leave, number, seed};
use crate::redis::RedisServer;
use crate::sandbox::{Call, Connection};
use crate::site::{USUAL, is_paid, ms, sleep};

/// What became of calls: how many began, were dropped before they had ended, or ended when the client of their
/// request was gone.
#[derive(Debug, Default)]
struct Calls {
    begun: AtomicUsize,
    dropped: AtomicUsize,
    outlived: AtomicUsize,
}

/// A store that counts. It promises no time limit of its own, so the engine's drops calls.
struct Counting {
    inner: RedisStore,
    history: History,
    calls: Mutex<HashMap<&'static str, Arc<Calls>>>,
}

impl std::fmt::Debug for Counting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.inner.fmt(f)
    }
}

/// A call that goes on.
struct Going(Arc<Calls>, bool);

impl Drop for Going {
    fn drop(&mut self) {
        if !self.1 {
            self.0.dropped.fetch_add(1, Ordering::SeqCst);
        }
    }
}

impl Counting {
    fn calls(&self, verb: &'static str) -> Arc<Calls> {
        Arc::clone(self.calls.lock().unwrap().entry(verb).or_default())
    }

    fn count(&self, what: impl Fn(&Calls) -> &AtomicUsize) -> HashMap<&'static str, usize> {
        let calls = self.calls.lock().unwrap();
        calls.iter().map(|(verb, calls)| (*verb, what(calls).load(Ordering::SeqCst))).collect()
    }

    fn counted<'a, T: 'a>(
        &'a self,
        verb: &'static str,
        key: Option<StorageKey>,
        call: StoreFuture<'a, T>,
    ) -> StoreFuture<'a, T> {
        let calls = self.calls(verb);
        Box::pin(async move {
            calls.begun.fetch_add(1, Ordering::SeqCst);
            let mut going = Going(Arc::clone(&calls), false);
            let result = call.await;
            going.1 = true;
            if key.is_some_and(|key| !self.history.waits_for(|name| storage_key(name) == key)) {
                calls.outlived.fetch_add(1, Ordering::SeqCst);
            }
            result
        })
    }
}

impl Store for Counting {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn claim<'a>(
        &'a self,
        key: StorageKey,
        claim: &'a Claim,
    ) -> StoreFuture<'a, ClaimOutcome<Lease>> {
        self.counted("claim", Some(key), self.inner.claim(key, claim))
    }

    fn renew<'a>(
        &'a self,
        lease: &'a Lease,
        renewal: &'a Renewal,
    ) -> StoreFuture<'a, RenewOutcome> {
        self.counted("renew", Some(lease.key()), self.inner.renew(lease, renewal))
    }

    fn complete<'a>(
        &'a self,
        lease: &'a Lease,
        completion: &'a Completion,
    ) -> StoreFuture<'a, CompleteOutcome> {
        self.counted("complete", Some(lease.key()), self.inner.complete(lease, completion))
    }

    fn release<'a>(
        &'a self,
        lease: &'a Lease,
        release: &'a Release,
    ) -> StoreFuture<'a, ReleaseOutcome> {
        self.counted("release", Some(lease.key()), self.inner.release(lease, release))
    }

    fn resolve<'a>(
        &'a self,
        key: StorageKey,
        resolution: &'a Resolution,
    ) -> StoreFuture<'a, ResolveOutcome> {
        self.counted("resolve", Some(key), self.inner.resolve(key, resolution))
    }

    fn ready(&self) -> StoreFuture<'_, ()> {
        self.counted("ready", None, self.inner.ready())
    }
}

#[derive(Clone, Debug, Deserialize, Serialize)]
struct Payment {
    amount: u64,
    source: String,
}

/// What the handlers did.
#[derive(Debug, Default)]
struct Done {
    runs: Mutex<Vec<Run>>,
    charges: Mutex<Vec<Charge>>,
}

fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    u64::try_from(since.as_micros()).unwrap()
}

async fn pay(
    State(done): State<Arc<Done>>,
    key: IdempotencyKey,
    execution: Execution,
    Json(payment): Json<Payment>,
) -> (StatusCode, Json<Payment>) {
    let (key_id, attempt) = (key_id(key.as_str()), execution.attempt().number());
    let (fence, amount) = (execution.fence().number(), payment.amount);
    let (began, request) = (now(), (amount, payment.source.clone()));
    done.charges.lock().unwrap().push(Charge { key_id: key_id.clone(), attempt, amount });
    let ended = Some((now(), Finish::Answers));
    done.runs.lock().unwrap().push(Run { key_id, attempt, fence, request, began, ended });
    (StatusCode::CREATED, Json(payment))
}

struct Shop {
    redis: RedisServer,
    proxy: Proxy,
    store: Arc<Counting>,
    address: SocketAddr,
    done: Arc<Done>,
    history: History,
}

impl Shop {
    /// Over a shared connection, or a pool of so many; and with a limit for a call.
    async fn start(pooled: Option<usize>, limit: Duration) -> Self {
        let redis = RedisServer::start();
        let proxy = Proxy::to(redis.port()).await;
        // The store is more patient: what is over the limit is dropped.
        let builder = RedisStore::builder().call_timeout(ms(20_000));
        let inner = match pooled {
            Some(connections) => {
                let manager = Manager::new(proxy.redis_url()).unwrap();
                builder.pool(Pool::builder(manager).max_size(connections).build().unwrap()).unwrap()
            }
            None => RedisStore::connect(&proxy.redis_url()).await.unwrap(),
        };
        let lease = Duration::from_secs(30);
        let history = History::with_lease(lease);
        let store = Arc::new(Counting { inner, history: history.clone(), calls: Mutex::default() });
        let scope = Scope::principal(|_: &http::request::Parts| Some("acme"));
        let config = Config::builder().scope(scope).lease(lease).store_call_timeout(limit);
        // Long enough that every call ends well in the end.
        let config = config.claim_within(ms(20_000)).complete_within(ms(20_000)).build().unwrap();
        let layer = IdempotencyLayer::new(config, Arc::clone(&store));
        let (done, ready) = (Arc::new(Done::default()), Arc::clone(&store));
        let readyz = get(async move || {
            ready.ready().await.map_or(StatusCode::SERVICE_UNAVAILABLE, |()| StatusCode::OK)
        });
        let routes = Router::new()
            .route("/v1/payments", post(pay).layer(layer))
            .route("/readyz", readyz)
            .with_state(Arc::clone(&done));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(axum::serve(listener, routes).into_future());
        Self { redis, proxy, store, address, done, history }
    }

    fn dropped(&self) -> HashMap<&'static str, usize> {
        let mut dropped = self.store.count(|calls| &calls.dropped);
        dropped.retain(|_, count| *count > 0);
        dropped
    }

    /// Clients that pay, of whom some leave, beside some that ask for readiness and leave; with what goes wrong
    /// meanwhile. Every answer is the one to its own request.
    async fn pay_and_leave(&self, may_be_refused: bool, trouble: impl Future<Output = ()>) {
        let requests = number("FAULTS_REQUESTS", 3_000) / 2;
        let stop = AtomicBool::new(false);
        let seed = seed();
        let paying = async {
            let left = leave(&self.history, self.address, requests, seed, may_be_refused).await;
            stop.store(true, Ordering::SeqCst);
            left
        };
        let asking = async {
            let mut random = StdRng::seed_from_u64(seed ^ 0x4ead);
            while !stop.load(Ordering::SeqCst) {
                let patience = Duration::from_micros(random.random_range(0..8_000));
                let mut connection = Connection::open(self.address).await.unwrap();
                let asked = connection.send(Call::get("/readyz"));
                let _ = tokio::time::timeout(patience, asked).await;
            }
        };
        let (answered, left) = tokio::select! {
            (of_it, ()) = async { tokio::join!(paying, asking) } => of_it,
            () = trouble => unreachable!("it does not end"),
        };
        self.proxy.heal();
        let (runs, charges) =
            (self.done.runs.lock().unwrap().clone(), self.done.charges.lock().unwrap().clone());
        assert_eq!(charges.len(), answered + left);
        let store = RedisStore::connect(&self.redis.url()).await.unwrap();
        let evidence = self.history.evidence_of(charges, runs, &store).await;
        assert_holds(&evidence.broken(Promise::AtMostOnce));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b81_a_client_that_leaves_drops_no_call_of_its_request_and_one_that_does_disturbs_nobody() {
    for pooled in [None, Some(4)] {
        // No limit that is ever met: whatever is dropped was dropped by a client.
        let shop = Shop::start(pooled, ms(20_000)).await;
        // So that a client leaves while its call is on the way.
        shop.proxy.delay(Way::Down, ms(3));
        shop.pay_and_leave(false, std::future::pending()).await;
        let outlived = shop.store.count(|calls| &calls.outlived);
        println!("pooled {pooled:?}: dropped {:?}, outlived {outlived:?}", shop.dropped());
        // Calls of requests whose clients had left went on to their end…
        assert!(outlived["claim"] > 0 && outlived["complete"] > 0, "{outlived:?}");
        // … and all that was dropped are questions for readiness, on the same connections.
        let dropped = shop.dropped();
        assert_eq!(dropped.keys().collect::<Vec<_>>(), [&"ready"], "{dropped:?}");
        assert!(dropped["ready"] > 20, "{dropped:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b81_calls_that_a_time_limit_drops_half_way_never_give_their_replies_to_the_next_caller() {
    for pooled in [None, Some(4)] {
        // Much longer than a call takes on a busy machine.
        let shop = Shop::start(pooled, ms(150)).await;
        // Replies come too late, again and again; and then all at once.
        let trouble = async {
            loop {
                shop.proxy.delay(Way::Down, ms(0));
                sleep(300).await;
                shop.proxy.delay(Way::Down, ms(250));
                sleep(400).await;
            }
        };
        shop.pay_and_leave(true, trouble).await;
        let (dropped, begun) = (shop.dropped(), shop.store.count(|calls| &calls.begun));
        println!("pooled {pooled:?}: dropped {dropped:?} of {begun:?}");
        for verb in ["claim", "complete"] {
            assert!(dropped.get(verb).is_some_and(|count| *count > 5), "{verb}: {dropped:?}");
        }
    }
}

/// The driver gives each call on a connection the reply in its turn, so nobody is given another's. But whoever was lent
/// a connection on which one is outstanding would wait behind it, and this one never comes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b81_a_connection_of_a_pool_whose_call_was_dropped_half_way_is_lent_to_nobody() {
    let shop = Shop::start(Some(1), ms(300)).await;
    // So that all scripts are known, and the only connection is made.
    let pay = async |key: &str| {
        let end = shop.history.pay_surely(&[shop.address], key, "tok_visa", USUAL).await;
        is_paid(&end);
    };
    pay("first").await;
    shop.store.ready().await.unwrap();
    // What is in a claim, in the completion of a payment, and in a question for readiness.
    for (verb, word) in [("claim", "\r\nNX\r\n"), ("complete", "tok_visa"), ("ready", "{ready}")] {
        for round in 0..5 {
            let dropped = || shop.dropped().get(verb).copied().unwrap_or_default();
            let before = dropped();
            shop.proxy.lose_replies(Loss::Silence, word, 1);
            if verb == "ready" {
                let mut connection = Connection::open(shop.address).await.unwrap();
                let asking =
                    tokio::spawn(async move { connection.send(Call::get("/readyz")).await });
                until("nobody asks", || shop.proxy.hits() == 1).await;
                asking.abort();
                until("it is not dropped", || dropped() > before).await;
            } else {
                // The limit drops the call, and the payment goes on over another connection.
                pay(&format!("{verb}-{round}")).await;
                assert_eq!(shop.proxy.hits(), 1, "{verb}");
            }
            assert!(dropped() > before, "{verb}: no call was dropped half way");
            pay(&format!("after-{verb}-{round}")).await;
            let behind = shop.proxy.sent_behind_lost_replies();
            assert_eq!(behind, 0, "{verb}: lent again, with a reply outstanding");
        }
    }
    let (runs, charges) =
        (shop.done.runs.lock().unwrap().clone(), shop.done.charges.lock().unwrap().clone());
    assert_eq!(charges.len(), 26);
    let store = RedisStore::connect(&shop.redis.url()).await.unwrap();
    let evidence = shop.history.evidence_of(charges, runs, &store).await;
    assert_holds(&evidence.broken(Promise::AtMostOnce));
}

async fn until(what: &str, done: impl Fn() -> bool) {
    let end = Instant::now() + ms(20_000);
    while !done() {
        assert!(Instant::now() < end, "{what}");
        sleep(1).await;
    }
}
