//! Waiting for a running twin, bounded, without holding anything of the store.
//!
//! A waiter never runs because "the key looks free": it is woken, and claims again.
//!
//! * The twin runs in this process: its end wakes all waiters at once, with the response that it stored. Whoever
//!   comes while it runs does not ask the store before that; nor does who comes while it asks for the key, since
//!   retries that arrive together would all be told the same.
//! * It runs elsewhere: one waiter per key polls, every few milliseconds at first and tens of
//!   milliseconds later, and wakes the others. So a storm on one key costs one poll at a time.

use std::collections::hash_map::Entry::Occupied;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{Notify, Semaphore};
use tokio::time::{Instant, sleep, sleep_until};

use super::signal::Signal;
use crate::by_digest::DigestMap;
use crate::fingerprint::{Comparison, Fingerprint, Fingerprints};
use crate::scope::StorageKey;

/// How many requests may wait for running twins.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct WaitLimits {
    /// For one key. A client with more retries than this in the air is in a loop.
    pub per_key: usize,
    /// In all. Each waiting request holds its body in memory.
    pub total: usize,
}

impl Default for WaitLimits {
    /// 256 for one key, 4,096 in all.
    fn default() -> Self {
        Self { per_key: 256, total: 4096 }
    }
}

/// Who runs and who waits in this process. Entries live as long as somebody is in them.
#[derive(Debug)]
pub(super) struct Room {
    limits: WaitLimits,
    keys: Mutex<Keys>,
}

#[derive(Debug, Default)]
struct Keys {
    by_key: DigestMap<StorageKey, Entry>,
    waiting: usize,
}

#[derive(Debug, Default)]
struct Entry {
    /// For whom the key is being claimed, if others wait for what comes of that.
    claiming: Option<Fingerprint>,
    owners: usize,
    /// Whom the owner runs for; none once there was a second owner, as one of them has lost the key then.
    running: Option<Running>,
    waiting: usize,
    /// The end of an owner of this process; made by the first waiter that wants it.
    settled: Option<Arc<Settlement>>,
    elsewhere: Option<Arc<Elsewhere>>,
}

/// A run of this process.
#[derive(Debug)]
struct Running {
    fingerprint: Fingerprint,
    /// Its lease is lost: by now the store may know of another one.
    lost: Arc<Signal>,
    /// Until then it has its lease, by the clock of this process.
    until: Instant,
}

/// The end of a twin in this process, or of its claim if that gave it nothing to run.
#[derive(Debug, Default)]
struct Settlement {
    ended: Signal,
    /// What came of it, so that those who wait for just that need not ask the store again. Unset: they have to.
    end: OnceLock<Woken>,
}

/// A response that is in the store, and the fingerprint of the request that it answers.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Stored {
    pub(super) fingerprint: Fingerprint,
    pub(super) response: Bytes,
}

/// What the waiters for a twin in another process share.
#[derive(Debug)]
struct Elsewhere {
    /// The right to poll.
    poll: Semaphore,
    /// The pause before the next poll, whoever makes it.
    pause: Mutex<Duration>,
    changed: Notify,
}

impl Elsewhere {
    fn new() -> Self {
        let (poll, pause) = (Semaphore::new(1), Mutex::new(POLL_FIRST));
        Self { poll, pause, changed: Notify::new() }
    }

    fn next_pause(&self) -> Duration {
        // Nothing that can panic runs while it is locked.
        let mut next = self.pause.lock().unwrap_or_else(PoisonError::into_inner);
        let pause = *next;
        *next = (pause * 3 / 2).min(POLL_MAX);
        pause
    }
}

/// What a request meets that comes for a key.
#[derive(Debug)]
pub(super) enum Met {
    /// The same request runs in this process or claims the key: a seat beside it.
    Twin(Seat),
    /// Nobody: the others may wait for what comes of its claim.
    Nobody(Claiming),
    /// Somebody that says nothing of this request, or no seat is left.
    Stranger,
}

/// Marks a key as being claimed by this process until it is dropped.
#[derive(Debug)]
pub(super) struct Claiming {
    /// None once the key is run.
    room: Option<Arc<Room>>,
    key: StorageKey,
    end: Option<Woken>,
}

/// Marks a key as run by this process until it is dropped.
#[derive(Debug)]
pub(super) struct Owning {
    room: Arc<Room>,
    key: StorageKey,
    stored: Option<Stored>,
}

/// A place among those who wait for a key.
#[derive(Debug)]
pub(super) struct Seat {
    room: Arc<Room>,
    key: StorageKey,
    /// Beside whom it was taken, until the first wait is over.
    beside: Option<Beside>,
}

/// A twin of this process that was met on entering.
#[derive(Clone, Debug)]
struct Beside {
    settled: Arc<Settlement>,
    /// It was claiming the key then, and may run by now.
    claiming: bool,
}

/// Why a wait ended.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) enum Woken {
    /// The twin stored its response. It answers whoever sent the same request; nobody else.
    Stored(Stored),
    /// The twin of this process has ended without one.
    Ended,
    /// The store said that the same request runs elsewhere.
    Elsewhere,
    /// It is time to claim again.
    ClaimAgain,
    /// The time is up.
    TimedOut,
}

/// So long a request waits for the claim of another one. A store that takes longer is in trouble, and each request
/// has a time of its own for that.
const CLAIM_TOGETHER: Duration = Duration::from_millis(250);
/// The first poll comes soon, for a twin that settled just before the wait began.
const POLL_FIRST: Duration = Duration::from_millis(5);
/// Later polls: a waiter learns of an answer within tens of milliseconds.
const POLL_MAX: Duration = Duration::from_millis(40);

impl Room {
    pub(super) fn new(limits: WaitLimits) -> Arc<Self> {
        Arc::new(Self { limits, keys: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, Keys> {
        // Nothing that can panic runs while entries are half changed.
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whom a request meets that comes for a key. A twin is one for the same request that is being claimed or
    /// holds its lease.
    pub(super) fn enter(self: &Arc<Self>, key: StorageKey, fingerprints: &Fingerprints) -> Met {
        let mut keys = self.lock();
        let entry = keys.by_key.entry(key).or_default();
        let same = |print| fingerprints.compare(print) == Comparison::Same;
        let holds = |run: &Running| !run.lost.is_given() && Instant::now() < run.until;
        let twin = match (&entry.running, entry.claiming) {
            (Some(running), _) => same(running.fingerprint) && holds(running),
            (None, Some(claiming)) => same(claiming),
            (None, None) if entry.owners == 0 => {
                entry.claiming = Some(fingerprints.current());
                let room = Some(Arc::clone(self));
                return Met::Nobody(Claiming { room, key, end: None });
            }
            (None, None) => false,
        };
        let seat = if twin {
            let claiming = entry.owners == 0;
            let settled = Arc::clone(entry.settled.get_or_insert_default());
            self.seat(keys, key, Some(Beside { settled, claiming }))
        } else {
            None
        };
        seat.map_or(Met::Stranger, Met::Twin)
    }

    /// Marks the key as run, by who claimed it.
    pub(super) fn own(
        self: &Arc<Self>,
        key: StorageKey,
        fingerprint: Fingerprint,
        lost: Arc<Signal>,
        until: Instant,
        claiming: Option<Claiming>,
    ) -> Owning {
        let mut keys = self.lock();
        let entry = keys.by_key.entry(key).or_default();
        entry.owners += 1;
        entry.running = (entry.owners == 1).then_some(Running { fingerprint, lost, until });
        if let Some(mut claiming) = claiming {
            // Whoever waits for the claim waits for the run from now on.
            entry.claiming = None;
            claiming.room = None;
        }
        drop(keys);
        Owning { room: Arc::clone(self), key, stored: None }
    }

    /// A seat, or `None` if too many wait already.
    pub(super) fn take_seat(self: &Arc<Self>, key: StorageKey) -> Option<Seat> {
        self.seat(self.lock(), key, None)
    }

    fn seat(
        self: &Arc<Self>,
        mut keys: MutexGuard<'_, Keys>,
        key: StorageKey,
        beside: Option<Beside>,
    ) -> Option<Seat> {
        let waiting = keys.by_key.get(&key).map_or(0, |entry| entry.waiting);
        if keys.waiting >= self.limits.total || waiting >= self.limits.per_key {
            return None;
        }
        keys.by_key.entry(key).or_default().waiting += 1;
        keys.waiting += 1;
        Some(Seat { room: Arc::clone(self), key, beside })
    }

    fn runs(&self, key: StorageKey) -> bool {
        self.lock().by_key.get(&key).is_some_and(|entry| entry.owners > 0)
    }

    /// Leaves a key's entry by `leave`, and removes the entry once nobody is in it.
    fn leave(&self, key: StorageKey, leave: impl FnOnce(&mut Entry, &mut usize)) {
        let mut keys = self.lock();
        let Keys { by_key, waiting } = &mut *keys;
        if let Occupied(mut entry) = by_key.entry(key) {
            leave(entry.get_mut(), waiting);
            let left = entry.get();
            if left.owners == 0 && left.waiting == 0 && left.claiming.is_none() {
                entry.remove();
            }
        }
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        let keys = self.lock();
        keys.by_key.is_empty() && keys.waiting == 0
    }
}

impl Owning {
    /// Says that the lease was renewed.
    pub(super) fn holds_until(&self, until: Instant) {
        let mut keys = self.room.lock();
        let entry = keys.by_key.get_mut(&self.key);
        if let Some(running) = entry.and_then(|entry| entry.running.as_mut()) {
            running.until = until;
        }
    }

    /// Ends it with what it stored.
    pub(super) fn stored(mut self, stored: Stored) {
        self.stored = Some(stored);
    }
}

impl Settlement {
    async fn end(&self) -> Woken {
        self.ended.given().await;
        self.end.get().cloned().unwrap_or(Woken::ClaimAgain)
    }
}

impl Claiming {
    /// Ends it with what the store has for this request.
    pub(super) fn stored(mut self, stored: Stored) {
        self.end = Some(Woken::Stored(stored));
    }

    /// Ends it with word of a twin in another process.
    pub(super) fn elsewhere(mut self) {
        self.end = Some(Woken::Elsewhere);
    }
}

impl Drop for Claiming {
    fn drop(&mut self) {
        if let Some(room) = self.room.take() {
            let end = self.end.take();
            room.leave(self.key, |entry, _| {
                entry.claiming = None;
                entry.settle(end);
            });
        }
    }
}

impl Entry {
    /// Wakes those who wait for a twin of this process.
    fn settle(&mut self, end: Option<Woken>) {
        if let Some(settled) = self.settled.take() {
            if let Some(end) = end {
                // It is made by waiters and taken by the first end after that, so nothing is in it.
                let _ = settled.end.set(end);
            }
            settled.ended.give();
        }
    }
}

impl Drop for Owning {
    fn drop(&mut self) {
        let end = self.stored.take().map_or(Woken::Ended, Woken::Stored);
        self.room.leave(self.key, |entry, _| {
            entry.owners -= 1;
            entry.running = None;
            entry.settle(Some(end));
            if let Some(elsewhere) = &entry.elsewhere {
                elsewhere.changed.notify_waiters();
            }
        });
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.room.leave(self.key, |entry, waiting| {
            entry.waiting -= 1;
            *waiting -= 1;
        });
    }
}

/// Whom a waiter waits for.
enum Twin {
    Here(Arc<Settlement>),
    Elsewhere(Arc<Elsewhere>),
}

impl Seat {
    /// Waits until it is worth claiming again, at most until `deadline`.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the seat as it was.
    pub(super) async fn wait(&mut self, deadline: Instant) -> Woken {
        if let Some(Beside { settled, claiming }) = self.beside.clone() {
            let patience =
                if claiming { deadline.min(Instant::now() + CLAIM_TOGETHER) } else { deadline };
            let woken = tokio::select! {
                biased;
                woken = settled.end() => Some(woken),
                () = sleep_until(patience) => None,
            };
            self.beside = None;
            match woken {
                Some(woken) => return woken,
                None if patience == deadline => return Woken::TimedOut,
                // What was claimed then may run by now.
                None if self.room.runs(self.key) => {}
                None => return Woken::ClaimAgain,
            }
        }
        let twin = self.twin();
        tokio::select! {
            biased;
            woken = self.woken(twin) => woken,
            () = sleep_until(deadline) => Woken::TimedOut,
        }
    }

    /// Tells the others that the key has changed.
    pub(super) fn wake_others(&self) {
        let keys = self.room.lock();
        if let Some(elsewhere) =
            keys.by_key.get(&self.key).and_then(|entry| entry.elsewhere.as_ref())
        {
            elsewhere.changed.notify_waiters();
        }
    }

    fn twin(&self) -> Twin {
        let mut keys = self.room.lock();
        let entry = keys.by_key.entry(self.key).or_default();
        if entry.owners > 0 {
            Twin::Here(Arc::clone(entry.settled.get_or_insert_default()))
        } else {
            let elsewhere = entry.elsewhere.get_or_insert_with(|| Arc::new(Elsewhere::new()));
            Twin::Elsewhere(Arc::clone(elsewhere))
        }
    }

    async fn woken(&self, twin: Twin) -> Woken {
        match twin {
            Twin::Here(settled) => settled.end().await,
            Twin::Elsewhere(elsewhere) => {
                let poll = async {
                    // Held for the pause only: whoever claims next does not keep the others from
                    // polling, and a closed semaphore does not exist here.
                    let _right = elsewhere.poll.acquire().await;
                    sleep(elsewhere.next_pause()).await;
                };
                tokio::select! {
                    biased;
                    () = elsewhere.changed.notified() => {}
                    () = poll => {}
                }
                Woken::ClaimAgain
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: StorageKey = StorageKey::from_bytes([7; 24]);

    fn print() -> Fingerprint {
        Fingerprint::from_stored(crate::fingerprint::RecipeId::from_bytes([1; 4]), [7; 32])
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(2)
    }

    #[tokio::test(start_paused = true)]
    async fn the_end_of_a_twin_in_this_process_wakes_all_waiters_at_once() {
        let room = Room::new(WaitLimits::default());
        let owning = room.own(KEY, print(), Arc::default(), soon(), None);
        let start = Instant::now();
        let waiters: Vec<_> = (0..50)
            .map(|_| {
                let mut seat = room.take_seat(KEY).unwrap();
                tokio::spawn(async move { seat.wait(soon()).await })
            })
            .collect();
        tokio::task::yield_now().await;
        drop(owning);
        for waiter in waiters {
            assert_eq!(waiter.await.unwrap(), Woken::Ended);
        }
        assert_eq!(start.elapsed(), Duration::ZERO);
        assert!(room.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_claim_that_gave_nothing_to_run_wakes_who_waits_for_it_and_leaves_nothing_behind() {
        let room = Room::new(WaitLimits::default());
        let prints = Fingerprints::one(print());
        for stored in [None, Some(Stored { fingerprint: print(), response: Bytes::from("paid") })] {
            let Met::Nobody(claiming) = room.enter(KEY, &prints) else { panic!("there is nobody") };
            let Met::Twin(mut seat) = room.enter(KEY, &prints) else { panic!("it is a twin") };
            let other =
                Fingerprint::from_stored(crate::fingerprint::RecipeId::from_bytes([1; 4]), [8; 32]);
            assert!(matches!(room.enter(KEY, &Fingerprints::one(other)), Met::Stranger));
            // Ended before the wait begins, which is no reason to wait.
            match stored.clone() {
                Some(stored) => claiming.stored(stored),
                None => drop(claiming),
            }
            let began = Instant::now();
            let woken = seat.wait(soon()).await;
            assert_eq!(woken, stored.map_or(Woken::ClaimAgain, Woken::Stored));
            assert_eq!(began.elapsed(), Duration::ZERO);
            drop(seat);
            assert!(room.is_empty());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn one_waiter_at_a_time_polls_for_a_twin_elsewhere() {
        let room = Room::new(WaitLimits::default());
        let polls = Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let deadline = Instant::now() + Duration::from_secs(1);
        let waiters: Vec<_> = (0..50)
            .map(|_| {
                let mut seat = room.take_seat(KEY).unwrap();
                let polls = Arc::clone(&polls);
                tokio::spawn(async move {
                    while seat.wait(deadline).await == Woken::ClaimAgain {
                        polls.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    }
                })
            })
            .collect();
        for waiter in waiters {
            waiter.await.unwrap();
        }
        // 50 independent pollers would make more than 50 * 1000 / 40 = 1250 polls.
        let polls = polls.load(std::sync::atomic::Ordering::Relaxed);
        assert!((25..=35).contains(&polls), "{polls} polls");
        assert!(room.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn who_sees_a_change_wakes_the_others() {
        let room = Room::new(WaitLimits::default());
        let mut first = room.take_seat(KEY).unwrap();
        let mut second = room.take_seat(KEY).unwrap();
        let began = Instant::now();
        let second = tokio::spawn(async move { second.wait(soon()).await });
        tokio::task::yield_now().await;
        first.wake_others();
        assert_eq!(second.await.unwrap(), Woken::ClaimAgain);
        assert_eq!(began.elapsed(), Duration::ZERO, "and not by its own poll");
        assert_eq!(first.wait(Instant::now()).await, Woken::TimedOut);
    }

    #[tokio::test(start_paused = true)]
    async fn seats_are_limited_per_key_and_in_all_and_come_back() {
        let room = Room::new(WaitLimits { per_key: 2, total: 3 });
        let other = StorageKey::from_bytes([8; 24]);
        let seats = [room.take_seat(KEY).unwrap(), room.take_seat(KEY).unwrap()];
        assert!(room.take_seat(KEY).is_none());
        let third = room.take_seat(other).unwrap();
        assert!(room.take_seat(other).is_none());
        drop(seats);
        assert!(room.take_seat(KEY).is_some());
        drop(third);
        assert!(room.is_empty());
    }
}
