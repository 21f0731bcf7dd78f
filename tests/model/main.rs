//! The stores agree with the protocol.
//!
//! Thousands of random sequences of operations run against three worlds at once: the protocol as a
//! pure function over encoded bytes, the memory store, and Redis, PostgreSQL or SQLite. Every outcome
//! is compared, and for the servers the stored bytes and the time to live as well.
//!
//! Real time passes, and still nothing depends on it: every lease and every retention is either a
//! millisecond, and over by the next round, or many minutes. Only the numbers that are times
//! (fences, moments, what is left of a lease) are compared with a tolerance, and then taken over
//! from the server, so that the model goes on from what is really stored.
//!
//! `TOWER_IDEMPOTENCY_SEED` repeats a run; `TOWER_IDEMPOTENCY_SEQUENCES` makes it longer.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]
#![allow(clippy::wildcard_enum_match_arm, reason = "what was not expected is printed")]

mod door;
mod draw;
#[path = "../support/mod.rs"]
mod support;

use std::env;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use door::{Door, Stored};
use draw::Operation;
use futures_util::future::join_all;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use support::postgres::PostgresServer;
use support::redis::RedisServer;
use tower_idempotency::record::{
    self, Change, ClaimOutcome, CompleteOutcome, Current, Expires, ForgetOutcome, Grant, Millis,
    Progress, Record, Seen, State, Step, Unsettled,
};
use tower_idempotency::store::Inspect;
use tower_idempotency::store::redis::redis;
use tower_idempotency::store::sql::sqlx;
use tower_idempotency::{
    Fence, HolderId, Lease, MemoryStore, PostgresLeaseStore, RedisStore, SqliteLeaseStore,
    StorageKey, Store,
};

const SEQUENCES: usize = 2_000;
/// Fewer: each verb is a transaction there, and the rules are the same code.
const SEQUENCES_IN_TABLES: usize = 400;
const ROUNDS: usize = 14;

/// Long enough for a millisecond to be over on any of the clocks.
const BETWEEN_ROUNDS: Duration = Duration::from_millis(8);

/// A lease or a retention that is over by the next round.
const TINY: Duration = Duration::from_millis(1);

/// How far two readings of the clock may be apart that belong to one operation. Every length of
/// time that is not tiny differs from every other by more.
const TOLERANCE: u64 = 20_000;

const MINUTE: u64 = 60;

/// How long the records last that the test itself puts there.
const PUT_FOR: Duration = Duration::from_secs(200 * MINUTE);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_and_memory_agree_with_the_protocol() {
    agree(RedisServer::start()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_scripts_agree_with_the_protocol_on_valkey() {
    agree(RedisServer::start_valkey(&[])).await;
}

async fn agree(server: RedisServer) {
    // Thousands of calls at once on a busy machine are not what the usual limit is for.
    let patient = RedisStore::builder().call_timeout(Duration::from_secs(60));
    let store = patient.connect(&server.url()).await.unwrap();
    let client = redis::Client::open(server.url()).unwrap();
    let config = redis::AsyncConnectionConfig::new().set_response_timeout(None);
    let door = client.get_multiplexed_async_connection_with_config(&config).await.unwrap();
    let sequences = run(&store, Door::Redis(door), SEQUENCES).await;
    println!("{sequences} sequences");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_agrees_with_the_protocol() {
    let (_server, url) = PostgresServer::shared();
    let store = PostgresLeaseStore::connect(&url).await.unwrap();
    store.migrate().await.unwrap();
    run(&store, Door::Postgres(store.pool().clone()), SEQUENCES_IN_TABLES).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sqlite_agrees_with_the_protocol() {
    let folder = tempfile::tempdir().unwrap();
    // One connection: all of them would only queue for the one lock.
    let options = sqlx::sqlite::SqliteConnectOptions::new()
        .filename(folder.path().join("test.db"))
        .create_if_missing(true)
        .journal_mode(sqlx::sqlite::SqliteJournalMode::Wal);
    let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1);
    let pool = pool.connect_with(options).await.unwrap();
    let store = SqliteLeaseStore::from_pool(pool.clone()).await.unwrap();
    store.migrate().await.unwrap();
    run(&store, Door::Sqlite(pool), SEQUENCES_IN_TABLES).await;
}

/// Runs so many sequences, unless the environment asks for others.
async fn run(store: &dyn Inspect, door: Door, usual: usize) -> usize {
    let seed = env::var("TOWER_IDEMPOTENCY_SEED")
        .map_or_else(|_| rand::random(), |seed| seed.parse().expect("a seed is a number"));
    let sequences = env::var("TOWER_IDEMPOTENCY_SEQUENCES")
        .map_or(usual, |count| count.parse().expect("a count is a number"));
    println!("TOWER_IDEMPOTENCY_SEED={seed}");

    let memory = MemoryStore::builder().max_records(sequences + 1).build().unwrap();

    let mut worlds: Vec<Sequence> =
        (0..sequences).map(|number| Sequence::new(seed, number)).collect();
    let mut reached = Reached::default();
    for round in 0..ROUNDS {
        let steps = worlds.iter_mut().map(|sequence| {
            let mut door = door.clone();
            let memory = &memory;
            async move {
                let named = format!("seed {seed}, sequence {}, round {round}", sequence.number);
                sequence.step(store, memory, &mut door, &named).await
            }
        });
        for outcome in join_all(steps).await {
            reached.add(&outcome);
        }
        tokio::time::sleep(BETWEEN_ROUNDS).await;
    }
    if sequences >= usual {
        reached.assert_everything_was_reached();
    }
    sequences
}

/// Which outcomes came up: a test that never gets somewhere proves nothing about it.
#[derive(Default)]
struct Reached(std::collections::BTreeMap<String, usize>);

impl Reached {
    fn add(&mut self, outcome: &str) {
        *self.0.entry(outcome.to_owned()).or_default() += 1;
    }

    fn assert_everything_was_reached(&self) {
        for expected in [
            "claim Acquired takeover=false",
            "claim Acquired takeover=true",
            "claim Acquired untouched",
            "claim InFlight",
            "claim Completed",
            "claim Mismatch",
            "claim Indeterminate",
            "claim Unreadable",
            "renew Renewed",
            "renew Restored",
            "renew Lost",
            "renew Unreadable",
            "complete Stored",
            "complete Healed",
            "complete Restored",
            "complete Superseded",
            "complete Mismatch",
            "complete Lost",
            "complete Unreadable",
            "release Released",
            "release NotHeld",
            "release Unreadable",
            "resolve Resolved",
            "resolve Changed",
            "resolve Unreadable",
            "forget Forgotten",
            "forget Absent",
            "forget InFlight",
            "forget Changed",
            "forget Unreadable",
        ] {
            assert!(self.0.contains_key(expected), "{expected} was never reached: {:?}", self.0);
        }
        println!("{:?}", self.0);
    }
}

/// What the model holds under the key.
#[derive(Clone, Debug)]
enum Held {
    Nothing,
    Bytes { bytes: Bytes, expires: Millis },
    ForeignType,
}

/// One key, its history, and its players.
struct Sequence {
    number: usize,
    random: StdRng,
    key: StorageKey,
    held: Held,
    /// In half of the sequences the test puts records and garbage under the key. The memory store
    /// has no back door for that, so it plays in the other half.
    with_garbage: bool,
    holders: Vec<HolderId>,
    /// What was granted, or made up: as Redis and as the memory store see it.
    leases: Vec<(Lease, Lease)>,
}

impl Sequence {
    fn new(seed: u64, number: usize) -> Self {
        let mut random = StdRng::seed_from_u64(seed.wrapping_add(number as u64));
        let mut key = [0; 24];
        key[..8].copy_from_slice(&(number as u64).to_be_bytes());
        let holders = (0..3).map(|_| HolderId::from_bytes(random.random())).collect();
        Self {
            number,
            random,
            key: StorageKey::from_bytes(key),
            held: Held::Nothing,
            with_garbage: number % 2 == 1,
            holders,
            leases: Vec::new(),
        }
    }

    async fn step(
        &mut self,
        store: &dyn Inspect,
        memory: &MemoryStore,
        door: &mut Door,
        named: &str,
    ) -> String {
        if self.with_garbage && self.random.random_bool(0.3) {
            self.put_something(door).await;
        }
        if self.leases.is_empty() || self.random.random_bool(0.1) {
            self.make_up_a_lease();
        }
        let operation = self.draw_operation();
        let now = now();
        let before = self.held.clone();
        let name = store.name();
        let context = format!("{named}, before: {}, operation: {operation:?}", show(&before));

        let (change, outcome) = match &operation {
            Operation::Claim(claim) => {
                let Step { change, outcome } = record::claim(self.current(now), now, claim);
                let told = store.claim(self.key, claim).await.expect(&context);
                let previous = self.record_held(now).map(|record| record.fence);
                let freed =
                    self.record_held(now).is_some_and(|record| is_freed_by(&record, &outcome));
                assert_claims_agree(name, &outcome, &told, Some(previous), now, &context);
                let memory = match self.with_garbage {
                    true => None,
                    false => Some(memory.claim(self.key, claim).await.expect(&context)),
                };
                if let Some(memory) = &memory {
                    // Its fences are its own, and about as great.
                    assert_claims_agree("memory", &outcome, memory, None, now, &context);
                }
                if let ClaimOutcome::Acquired(lease) = told {
                    let twin = match memory {
                        Some(ClaimOutcome::Acquired(twin)) => twin,
                        _ => lease.clone(),
                    };
                    self.leases.push((lease, twin));
                }
                (change, name_of_claim(&outcome, freed))
            }
            Operation::Renew(of, renewal) => {
                let (lease, twin) = &self.leases[*of];
                let step = record::renew(self.current(now), now, lease.owner(), renewal);
                let told = store.renew(lease, renewal).await.expect(&context);
                assert_eq!(told, step.outcome, "{name}, {context}");
                if !self.with_garbage {
                    let memory = memory.renew(twin, renewal).await.expect(&context);
                    assert_eq!(memory, step.outcome, "memory, {context}");
                }
                (step.change, format!("renew {:?}", step.outcome))
            }
            Operation::Complete(of, completion) => {
                let (lease, twin) = &self.leases[*of];
                let step = record::complete(self.current(now), now, lease.owner(), completion);
                let told = store.complete(lease, completion).await.expect(&context);
                assert_eq!(told, step.outcome, "{name}, {context}");
                if !self.with_garbage {
                    let memory = memory.complete(twin, completion).await.expect(&context);
                    assert_eq!(memory, step.outcome, "memory, {context}");
                }
                let name = match step.outcome {
                    CompleteOutcome::Superseded(_) => "complete Superseded".to_owned(),
                    other => format!("complete {other:?}"),
                };
                (step.change, name)
            }
            Operation::Release(of, release) => {
                let (lease, twin) = &self.leases[*of];
                let step = record::release(self.current(now), now, lease.owner(), release);
                let told = store.release(lease, release).await.expect(&context);
                assert_eq!(told, step.outcome, "{name}, {context}");
                if !self.with_garbage {
                    let memory = memory.release(twin, release).await.expect(&context);
                    assert_eq!(memory, step.outcome, "memory, {context}");
                }
                (step.change, format!("release {:?}", step.outcome))
            }
            Operation::Resolve(resolution) => {
                let step = record::resolve(self.current(now), now, resolution);
                let told = store.resolve(self.key, resolution).await.expect(&context);
                assert_eq!(told, step.outcome, "{name}, {context}");
                if !self.with_garbage {
                    let memory = memory.resolve(self.key, resolution).await.expect(&context);
                    assert_eq!(memory, step.outcome, "memory, {context}");
                }
                (step.change, format!("resolve {:?}", step.outcome))
            }
            Operation::Forget(forget) => {
                let mut step = record::forget(&self.current(now), now, forget);
                if matches!((&self.held, forget.seen), (Held::ForeignType, Seen::Unreadable)) {
                    // What is no string of bytes is not even forgotten.
                    step = Step { change: Change::Keep, outcome: ForgetOutcome::Unreadable };
                }
                let told = store.forget(self.key, forget).await.expect(&context);
                assert_forgets_agree(name, &step.outcome, &told, &context);
                if !self.with_garbage {
                    // Its moments are its own, and about as great.
                    let own = memory.look(self.key).await.expect(&context);
                    let mut forget = *forget;
                    if let (Seen::Record(seen), Some(held), Some(own)) =
                        (&mut forget.seen, self.record_held(now), own.record())
                        && seen.mark() == held.sighting().mark()
                    {
                        *seen = own.sighting();
                    }
                    let memory = memory.forget(self.key, &forget).await.expect(&context);
                    assert_forgets_agree("memory", &step.outcome, &memory, &context);
                }
                let name = match step.outcome {
                    ForgetOutcome::InFlight { .. } => "forget InFlight".to_owned(),
                    other => format!("forget {other:?}"),
                };
                (step.change, name)
            }
        };
        self.apply(change, now);
        self.compare_what_is_stored(door, now, &context).await;
        outcome
    }

    fn current(&self, now: Millis) -> Current {
        match &self.held {
            Held::Bytes { bytes, expires } if *expires > now => {
                Current::from_stored(Some(bytes.clone()))
            }
            Held::Nothing | Held::Bytes { .. } => Current::Absent,
            Held::ForeignType => Current::from_stored(Some(Bytes::new())),
        }
    }

    fn record_held(&self, now: Millis) -> Option<Record> {
        match self.current(now) {
            Current::Present(record) => Some(record),
            Current::Absent | Current::Unreadable(_) => None,
        }
    }

    fn apply(&mut self, change: Change, now: Millis) {
        let (record, expires) = match change {
            Change::Keep => return,
            Change::Remove => return self.held = Held::Nothing,
            Change::Write { record, expires } => (record, expires),
        };
        let before = match &self.held {
            Held::Bytes { expires, .. } => *expires,
            Held::Nothing | Held::ForeignType => now,
        };
        let expires = match expires {
            Expires::At(at) => at,
            Expires::AsBefore => before,
        };
        self.held = Held::Bytes { bytes: record.encode(), expires };
    }

    /// Compares the store with the model, and takes the times over that the store wrote.
    async fn compare_what_is_stored(&mut self, door: &mut Door, now: Millis, context: &str) {
        let Stored { kind, bytes: stored } = door.look(self.key, now).await;
        let Held::Bytes { bytes, expires } = &self.held else {
            let expected = if matches!(self.held, Held::ForeignType) { "list" } else { "none" };
            return assert_eq!(kind, expected, "{context}");
        };
        let (bytes, expires) = (bytes.clone(), *expires);
        let is_brief = expires.since(now) <= Duration::from_millis(TOLERANCE);
        let Some((stored, left)) = stored else {
            assert!(is_brief, "{kind}, {context}");
            return; // its millisecond is over already
        };
        let expected_left = i64::try_from(expires.0.saturating_sub(now.0)).unwrap();
        let apart = left.abs_diff(expected_left);
        // `-1` would be a key without an expiry, which no script may ever leave.
        assert!(left >= 0 && apart < TOLERANCE, "lives {left} ms, not {expected_left}, {context}");
        match (Record::decode(stored.clone()), Record::decode(bytes.clone())) {
            (Ok(stored_record), Ok(record)) => {
                let expected = with_times_of(&stored_record, record, now);
                assert_eq!(stored_record, expected, "the stored record, {context}");
                // What the test put there may carry a lease that its state does not use.
                let canonical = stored_record.encode();
                assert!(stored == canonical || stored == bytes, "{stored:?}, {context}");
            }
            _ => assert_eq!(stored, bytes, "the stored bytes, {context}"),
        }
        self.held = Held::Bytes { bytes: stored, expires };
    }

    /// Puts garbage, a damaged record, a record of another version, or any record under the key.
    async fn put_something(&mut self, door: &mut Door) {
        if door.has_types() && self.random.random_bool(0.05) {
            door.put_foreign_type(self.key, PUT_FOR).await;
            self.held = Held::ForeignType;
            return;
        }
        let whole = self.draw_record().encode().to_vec();
        let mut bytes = whole.clone();
        match self.random.random_range(0..10) {
            0 => {
                let length = self.random.random_range(0..200);
                bytes = (0..length).map(|_| self.random.random()).collect();
            }
            1 => bytes.truncate(self.random.random_range(0..=bytes.len())),
            2 => bytes.extend((0..self.random.random_range(1..4)).map(|_| 7)),
            3 => bytes[0] = self.random.random(),
            4 => bytes[1] = [0, 1, 2, 3, 4, 5, 8, 255][self.random.random_range(0..8)],
            5 => bytes[80..84].copy_from_slice(&self.random.random::<[u8; 4]>()),
            6 => bytes[83] = self.random.random_range(0..8),
            // Of a first claim: its lease ends with its expiry less this.
            7 | 8 if matches!(bytes[1], 1 | 5) => {
                bytes[1] = if bytes[1] == 1 { 6 } else { 7 };
                let beyond = [10, 110, 290][self.random.random_range(0..3)] * MINUTE * 1_000;
                // Of nobody here: who completes a claim brings its fence along, and made-up leases lie.
                bytes[38..54].copy_from_slice(&self.random.random::<[u8; 16]>());
                bytes[58..70].fill(0);
                bytes[70..76].copy_from_slice(&beyond.to_be_bytes()[2..]);
            }
            _ => {}
        }
        if !door.takes(&bytes) {
            bytes = whole;
        }
        door.put(self.key, &bytes, PUT_FOR, now()).await;
        let stored = door.look(self.key, now()).await.bytes;
        let (bytes, _) = stored.expect("it is there for hours");
        self.held = Held::Bytes { bytes, expires: now().after(PUT_FOR) };
    }
}

fn show(held: &Held) -> String {
    match held {
        Held::Nothing => "nothing".to_owned(),
        Held::ForeignType => "a foreign type".to_owned(),
        Held::Bytes { bytes, expires } => {
            format!("{:?} until {expires:?}", Current::from_stored(Some(bytes.clone())))
        }
    }
}

fn now() -> Millis {
    Millis(0).after(SystemTime::now().duration_since(UNIX_EPOCH).unwrap())
}

fn close(one: u64, other: u64) -> bool {
    one.abs_diff(other) < TOLERANCE
}

/// True if a claim after `previous` may give `got` where the model gives `expected`: the greater of
/// one more and the clock, which only the clock makes inexact.
fn fence_fits(got: Fence, expected: Fence, previous: Option<Fence>, now: Millis) -> bool {
    let from_clock = close(expected.number(), now.0) && previous.is_none_or(|fence| got > fence);
    got == expected || from_clock && close(got.number(), expected.number())
}

/// True if the claim went on from an attempt that died before its first checkpoint.
fn is_freed_by(record: &Record, outcome: &ClaimOutcome<Grant>) -> bool {
    matches!(record.state, State::InFlight { progress: Progress::Untouched, .. })
        && matches!(outcome, ClaimOutcome::Acquired(grant) if grant.attempt > record.attempt)
}

fn name_of_claim(outcome: &ClaimOutcome<Grant>, freed: bool) -> String {
    match outcome {
        ClaimOutcome::Acquired(_) if freed => "claim Acquired untouched".to_owned(),
        ClaimOutcome::Acquired(grant) => format!("claim Acquired takeover={}", grant.takeover),
        ClaimOutcome::InFlight { .. } => "claim InFlight".to_owned(),
        ClaimOutcome::Completed(_) => "claim Completed".to_owned(),
        ClaimOutcome::Mismatch => "claim Mismatch".to_owned(),
        ClaimOutcome::Indeterminate(_) => "claim Indeterminate".to_owned(),
        ClaimOutcome::Unreadable => "claim Unreadable".to_owned(),
    }
}

#[track_caller]
fn assert_claims_agree(
    store: &str,
    expected: &ClaimOutcome<Grant>,
    got: &ClaimOutcome<Lease>,
    // The fence before, if there was one; `None` for a store that makes fences of its own.
    previous: Option<Option<Fence>>,
    now: Millis,
    context: &str,
) {
    let got = got.clone().map(|lease| lease.grant().clone());
    let agree = match (expected, &got) {
        (ClaimOutcome::Acquired(expected), ClaimOutcome::Acquired(got)) => {
            let fence_fits = match previous {
                Some(previous) => fence_fits(got.fence, expected.fence, previous, now),
                None => close(got.fence.number(), expected.fence.number()),
            };
            let created_fits = close(got.created.0, expected.created.0);
            let rest = Grant { fence: got.fence, created: got.created, ..expected.clone() };
            fence_fits && created_fits && rest == *got
        }
        (
            ClaimOutcome::InFlight { remaining: expected },
            ClaimOutcome::InFlight { remaining: got },
        ) => close(expected.as_millis() as u64, got.as_millis() as u64),
        (ClaimOutcome::Indeterminate(expected), ClaimOutcome::Indeterminate(got)) => {
            close(expected.fence.number(), got.fence.number())
                && Unsettled { fence: got.fence, ..expected.clone() } == *got
        }
        (expected, got) => expected == got,
    };
    assert!(agree, "{store} says {got:?}, not {expected:?}, {context}");
}

#[track_caller]
fn assert_forgets_agree(store: &str, expected: &ForgetOutcome, got: &ForgetOutcome, context: &str) {
    let agree = match (expected, got) {
        (
            ForgetOutcome::InFlight { remaining: expected },
            ForgetOutcome::InFlight { remaining: got },
        ) => close(expected.as_millis() as u64, got.as_millis() as u64),
        (expected, got) => expected == got,
    };
    assert!(agree, "{store} says {got:?}, not {expected:?}, {context}");
}

/// The expected record with the times that were really written, where they are about right.
fn with_times_of(stored: &Record, mut record: Record, now: Millis) -> Record {
    let adopt = |expected: &mut Millis, got: Millis| {
        if close(expected.0, got.0) {
            *expected = got;
        }
    };
    adopt(&mut record.created, stored.created);
    // A fence that this operation made is the clock's; one that was there is exact.
    if close(record.fence.number(), now.0) && close(stored.fence.number(), now.0) {
        record.fence = stored.fence;
    }
    match (&mut record.state, &stored.state) {
        (State::InFlight { until, .. }, State::InFlight { until: got, .. }) => adopt(until, *got),
        (State::Open { since }, State::Open { since: got })
        | (State::Indeterminate { since }, State::Indeterminate { since: got })
        | (State::Completed { at: since, .. }, State::Completed { at: got, .. }) => {
            adopt(since, *got);
        }
        _ => {}
    }
    record
}
