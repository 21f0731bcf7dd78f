//! What all tasks of a run share: the servers, what they keep their records in, and the clients.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::sync::Mutex as Turn;
use tokio::task::JoinHandle;

use super::ground::Ground;
use super::reached::{Reached, series};
use super::schedule::{Fault, Kind, Schedule};
use super::seat::Seat;
use crate::history::History;
use crate::invariants::{End, Promise};
use crate::line::Proxy;
use crate::sandbox::{Call, Connection};
use crate::site::{USUAL, sleep};

const SOURCES: [&str; 8] = [
    "tok_visa",
    "tok_slow_60",
    "tok_charge_then_slow_60",
    "tok_slow_200",
    "tok_charge_then_slow_400",
    "tok_charge_then_slow_700",
    "tok_unavailable_once",
    // Its answer is written beside its record.
    "tok_large_8",
];

/// Of another request under the same key.
const OTHER: u32 = 7;
/// A run that has not met all that it claims by then is red.
const LONGEST: Duration = Duration::from_secs(90);

/// A call that timed out, or what too few replicas have.
const UNKNOWN_FATE: &str = "calls of unknown fate";

/// What servers count: our name for it, their series, and a label.
const COUNTERS: [(&str, &str, &str); 10] = [
    ("takeovers", "idempotency_takeovers", ""),
    ("refused zombies", "idempotency_completions_refused", ""),
    ("healed completions", "idempotency_completions_healed", ""),
    ("leases lost", "idempotency_leases_lost", ""),
    ("calls sent again", "idempotency_store_retries", ""),
    (UNKNOWN_FATE, "idempotency_store_errors", "kind=\"outcome_unknown\""),
    ("twins that waited", "idempotency_wait_duration_count", ""),
    ("answers not stored", "idempotency_requests", "outcome=\"not_stored\""),
    ("effects found by the hook", "idempotency_reconciliations", "found=\"happened\""),
    ("none found by the hook", "idempotency_reconciliations", "found=\"nothing_happened\""),
];

/// What the servers of the store answered: our name for it, and the code.
const ERRORS: [(&str, &str); 4] = [
    ("scripts sent again", "NOSCRIPT"),
    ("sent after a slot that moved", "MOVED"),
    ("sent after a key that moved", "ASK"),
    ("sent again as a slot was open", "TRYAGAIN"),
];

/// What all tasks of a run share.
pub(super) struct Stage {
    pub(super) ground: Ground,
    pub(super) seats: [Seat; 2],
    pub(super) history: History,
    promise: Promise,
    claimed: BTreeSet<&'static str>,
    reached: Mutex<Reached>,
    /// The last page of metrics of each server, by seat and life.
    pages: Mutex<BTreeMap<(usize, u64), String>>,
    /// Held by each fault of a server, and by one that has to be told from those.
    turn: Turn<()>,
    pub(super) stop: AtomicBool,
    pub(super) began: Instant,
}

impl Stage {
    pub(super) async fn new(
        ground: Ground,
        recovery: &str,
        promise: Promise,
        claimed: BTreeSet<&'static str>,
        folder: &Path,
    ) -> Self {
        // A server that is told to stop gives its handlers longer than the slowest one takes.
        let args = ["--lease", "0.5", "--wait", "0.3", "--drain", "2", "--recovery", recovery];
        let mut seats = Vec::new();
        for _ in 0..2 {
            let proxy = match ground.port() {
                Some(port) => Some(Proxy::to(port).await),
                None => None,
            };
            let args = args.map(str::to_owned).to_vec();
            let ledger = folder.join("ledger.db");
            seats.push(Seat::new(proxy, ground.url_of_servers(), ledger, args));
        }
        Self {
            ground,
            seats: seats.try_into().ok().expect("two"),
            history: History::with_lease(Duration::from_millis(500)),
            promise,
            claimed,
            reached: Mutex::default(),
            pages: Mutex::default(),
            turn: Turn::default(),
            stop: AtomicBool::new(false),
            began: Instant::now(),
        }
    }

    fn met(&self, name: &'static str, times: u64) {
        self.reached.lock().unwrap().add(name, times);
    }

    /// Pays until there is a final answer, now here and now there.
    async fn settle(&self, random: &mut StdRng, key: &str, source: &str, amount: u32) {
        let began = Instant::now();
        loop {
            let to = self.seats[random.random_range(0..2)].address();
            let end = self.history.pay(to, key, source, amount).await;
            // Where it is settled by somebody or something, a client asks again.
            let wait = end == End::Unknown && self.promise != Promise::AtMostOnce;
            if end.is_final() && !wait {
                return;
            }
            assert!(began.elapsed() < Duration::from_secs(60), "{key}: {end:?}");
            sleep(20).await;
        }
    }

    /// One client, that pays under new keys.
    pub(super) async fn client(self: Arc<Self>, number: usize, seed: u64) {
        let mut random = StdRng::seed_from_u64(seed * 1_000 + number as u64);
        for payment in 0.. {
            if self.stop.load(Ordering::SeqCst) {
                return;
            }
            let key = self.ground.key(format!("c{number}-{payment}"), payment % 2 == 0);
            let source = SOURCES[random.random_range(0..SOURCES.len())];
            // A twin at the same time, another request under the key, and a late duplicate.
            let twin = random.random_bool(0.4).then(|| StdRng::from_rng(&mut random));
            let other = random.random_bool(0.15).then(|| StdRng::from_rng(&mut random));
            tokio::join!(
                self.settle(&mut random, &key, source, USUAL),
                async {
                    let Some(mut random) = twin else { return };
                    sleep(random.random_range(0..200)).await;
                    self.settle(&mut random, &key, source, USUAL).await;
                },
                async {
                    let Some(mut random) = other else { return };
                    sleep(random.random_range(0..200)).await;
                    self.settle(&mut random, &key, source, OTHER).await;
                },
            );
            if random.random_bool(0.2) {
                self.settle(&mut random, &key, source, USUAL).await;
            }
        }
    }

    /// Reads the metrics of a server, if it answers.
    pub(super) async fn read_metrics(&self, seat: usize) {
        let life = self.seats[seat].life.load(Ordering::SeqCst);
        let address = self.seats[seat].address();
        let asked = async {
            let mut connection = Connection::open(address).await.ok()?;
            connection.send(Call::get("/metrics")).await.ok()
        };
        let answer = tokio::time::timeout(Duration::from_millis(300), asked).await;
        if let Ok(Some(answer)) = answer {
            let page = String::from_utf8_lossy(&answer.body).into_owned();
            self.pages.lock().unwrap().insert((seat, life), page);
        }
    }

    /// All that was met so far: by the faults, by the clients, and by the servers' own count.
    pub(super) fn reached(&self) -> Reached {
        let mut reached = self.reached.lock().unwrap().clone();
        for (name, times) in self.history.ends() {
            reached.add(name, times as u64);
        }
        for page in self.pages.lock().unwrap().values() {
            for (name, counter, label) in COUNTERS {
                reached.add(name, series(page, counter, label));
            }
        }
        for (name, code) in ERRORS {
            reached.add(name, self.ground.errors(code));
        }
        reached
    }

    /// One place, in which one fault follows the other until all that is claimed was met. It gives the number of
    /// faults.
    pub(super) async fn faults(self: Arc<Self>, mut schedule: Schedule, until: Duration) -> usize {
        let mut count = 0;
        loop {
            for fault in schedule.deal() {
                let wait = fault.at.saturating_sub(self.began.elapsed());
                tokio::time::sleep(wait).await;
                println!("{fault}");
                // A fault that hits nobody is none.
                let busy = self.history.in_flight() > 0;
                if self.strike(fault).await && busy {
                    self.met(fault.kind.name(), 1);
                }
                count += 1;
                if self.stop.load(Ordering::SeqCst) {
                    return count;
                }
            }
            let missing = self.missing();
            let late = self.began.elapsed() > LONGEST.max(until);
            if late || (missing.is_empty() && self.began.elapsed() >= until) {
                self.stop.store(true, Ordering::SeqCst);
                return count;
            }
        }
    }

    /// What is claimed and was not met so far.
    pub(super) fn missing(&self) -> Vec<&'static str> {
        self.reached().missing(&self.claimed)
    }

    /// Makes a fault, and takes it back. False if it certainly hit nobody.
    async fn strike(self: &Arc<Self>, Fault { kind, lasts, .. }: Fault) -> bool {
        let _turn = match kind {
            Kind::Kill(_) | Kind::Terminate(_) | Kind::Stop(_) | Kind::StopReplica(_) => {
                Some(self.turn.lock().await)
            }
            _ => None,
        };
        match kind {
            Kind::Kill(number) | Kind::Terminate(number) => {
                self.read_metrics(number).await;
                let is_asked = matches!(kind, Kind::Terminate(_));
                let signal = if is_asked { "TERM" } else { "KILL" };
                tokio::task::block_in_place(|| {
                    self.seats[number].replace(signal, |server, status| {
                        assert!(status.success() || !is_asked, "{status}: {}", server.said().1);
                        self.history.keep_runs_of(server);
                    });
                });
                true
            }
            Kind::Stop(number) => {
                self.stop_over_a_payment(number, lasts).await;
                true
            }
            Kind::Cut(number, ..)
            | Kind::Swallow(number, _)
            | Kind::Slow(number, ..)
            | Kind::Refuse(number) => {
                let proxy = self.seats[number].proxy.as_ref().expect("there is one");
                self.disturb(proxy, kind, lasts).await
            }
            Kind::StopReplica(_) => {
                // A server that was paused, or has to do without one that is gone, has its calls behind it.
                sleep(100).await;
                let before = self.calls_of_unknown_fate().await;
                let waited = self.ground.strike(kind, lasts).await;
                waited && self.calls_of_unknown_fate().await > before
            }
            Kind::MoveSlots(_) => {
                let payments = self.pay_while_slots_move().await;
                let hit = self.ground.strike(kind, lasts).await;
                for payment in payments {
                    payment.await.unwrap();
                }
                hit
            }
            _ => self.ground.strike(kind, lasts).await,
        }
    }

    /// Payments that are claimed before their slot opens, and whose answers take a second key while it is open: one
    /// of the two is here then, and the other one there. By chance alone that is rare.
    async fn pay_while_slots_move(self: &Arc<Self>) -> Vec<JoinHandle<()>> {
        const LARGE: [&str; 4] = [
            "tok_large_8_after_400",
            "tok_large_8_after_700",
            "tok_large_8_after_1000",
            "tok_large_8_after_1400",
        ];
        let at = u64::try_from(self.began.elapsed().as_millis()).expect("a short time");
        let payments = LARGE.map(|source| {
            let (stage, key) = (Arc::clone(self), self.ground.key_of_last_slot(source, at));
            tokio::spawn(async move {
                let mut random = StdRng::seed_from_u64(at);
                stage.settle(&mut random, &key, source, USUAL).await;
            })
        });
        sleep(150).await;
        payments.into()
    }

    /// Pauses a server while it runs a handler, past the end of its lease, and asks the other one for the same
    /// meanwhile. By chance alone that is rare: the two have to meet.
    async fn stop_over_a_payment(&self, number: usize, lasts: Duration) {
        const SLOW: &str = "tok_charge_then_slow_400";
        let at = u64::try_from(self.began.elapsed().as_millis()).expect("a short time");
        let (key, mut random) = (format!("paused-{at}"), StdRng::seed_from_u64(at));
        let [paused, other] = [number, 1 - number].map(|seat| self.seats[seat].address());
        tokio::join!(
            self.history.pay(paused, &key, SLOW, USUAL),
            async {
                sleep(80).await;
                self.seats[number].signal("STOP");
                tokio::time::sleep(lasts).await;
                self.seats[number].signal("CONT");
            },
            async {
                let end = Instant::now() + lasts;
                sleep(150).await;
                while Instant::now() < end {
                    if self.history.pay(other, &key, SLOW, USUAL).await.is_final() {
                        return;
                    }
                    sleep(50).await;
                }
            },
        );
        self.settle(&mut random, &key, SLOW, USUAL).await;
    }

    async fn calls_of_unknown_fate(&self) -> u64 {
        self.read_metrics(0).await;
        self.read_metrics(1).await;
        self.reached().times(UNKNOWN_FATE)
    }

    /// A fault on the way between a server and Redis.
    async fn disturb(&self, proxy: &Proxy, kind: Kind, lasts: Duration) -> bool {
        proxy.hits();
        match kind {
            Kind::Cut(_, way, bytes) => proxy.cut_after(way, bytes),
            Kind::Swallow(_, way) => proxy.swallow(way),
            Kind::Slow(_, way, by) => proxy.delay(way, by),
            _ => proxy.refuse(),
        }
        tokio::time::sleep(lasts).await;
        proxy.heal();
        proxy.hits() > 0
    }
}
