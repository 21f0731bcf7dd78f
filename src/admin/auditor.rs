//! The slow audit: what makes a listing cheap where a store has no index of its own.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use crate::error::StoreError;
use crate::store::{AuditCursor, AuditStep, Inspect, Source, Survey, Wanted};

/// Keys per second: a million in less than four minutes, and not one part in ten of what a small Redis does.
const KEYS_PER_SECOND: NonZeroU32 = NonZeroU32::new(5_000).unwrap();

/// How old an index gets.
const INTERVAL: Duration = Duration::from_secs(60);

/// How many steps there are in a second, so that no step holds the store up for long.
const STEPS_PER_SECOND: u32 = 10;
const LARGEST_STEP: u32 = 1_000;

/// How often a step is tried that fails.
const TRIES: u32 = 5;
const FIRST_PAUSE: Duration = Duration::from_millis(200);

/// Makes the index anew that [`Operator::list`](super::Operator::list) reads: it walks through all records,
/// at a rate that you set. Stores in a database have an index that is always right, and nothing to do here.
///
/// ```
/// use std::num::NonZeroU32;
/// use std::time::Duration;
/// use tower_idempotency::MemoryStore;
/// use tower_idempotency::admin::Auditor;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// let auditor = Auditor::new(MemoryStore::new()) // the store that your layer has
///     .keys_per_second(NonZeroU32::new(2_000).unwrap())
///     .interval(Duration::from_secs(300));
/// let task = auditor.spawn(); // ends when it is dropped
/// # drop(task);
/// # }
/// ```
///
/// Of several processes one does the work: whoever finds an index younger than the interval waits.
///
/// # Defaults
/// 5,000 keys per second, a minute between passes.
#[derive(Clone, Debug)]
pub struct Auditor {
    store: Arc<dyn Inspect>,
    keys_per_second: NonZeroU32,
    interval: Duration,
}

/// A spawned [`Auditor`]. Dropping it ends the task, between two steps or within one: a pass that is not complete
/// changes nothing.
#[derive(Debug)]
#[must_use = "dropping it ends the task"]
pub struct AuditorTask(JoinHandle<()>);

impl Drop for AuditorTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl AuditorTask {
    /// True if it ended by itself, which it does only if it panicked.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.0.is_finished()
    }
}

impl Auditor {
    /// For the records of this store.
    #[must_use]
    pub fn new(store: impl Inspect) -> Self {
        Self { store: Arc::new(store), keys_per_second: KEYS_PER_SECOND, interval: INTERVAL }
    }

    /// How many keys are read in a second, at most.
    #[must_use]
    pub fn keys_per_second(mut self, keys_per_second: NonZeroU32) -> Self {
        self.keys_per_second = keys_per_second;
        self
    }

    /// How long after a pass the next one begins; ten milliseconds at least.
    #[must_use]
    pub fn interval(mut self, interval: Duration) -> Self {
        self.interval = interval.max(Duration::from_millis(10));
        self
    }

    /// Makes one pass, and tells after each step how far it is.
    ///
    /// # Errors
    /// [`StoreError`] if a step fails several times in a row.
    ///
    /// # Cancel safety
    /// A pass that is dropped changes nothing: the last complete one stays.
    pub async fn pass(
        &self,
        mut progress: impl FnMut(&AuditStep) + Send,
    ) -> Result<AuditStep, StoreError> {
        let keys_per_second = self.keys_per_second.get();
        let at_most = (keys_per_second / STEPS_PER_SECOND).clamp(1, LARGEST_STEP);
        let begun = Instant::now();
        let mut cursor: Option<AuditCursor> = None;
        loop {
            let step = self.step(cursor.as_ref(), at_most).await?;
            progress(&step);
            let due = step.scanned as f64 / f64::from(keys_per_second);
            cursor = match step.next {
                None => return Ok(step),
                Some(next) => Some(next),
            };
            let ahead = Duration::from_secs_f64(due).saturating_sub(begun.elapsed());
            if !ahead.is_zero() {
                sleep(ahead).await;
            }
        }
    }

    async fn step(
        &self,
        cursor: Option<&AuditCursor>,
        at_most: u32,
    ) -> Result<AuditStep, StoreError> {
        let mut tries = 1;
        loop {
            match self.store.audit(cursor, at_most).await {
                Ok(step) => return Ok(step),
                Err(error) if tries >= TRIES => return Err(error),
                Err(_) => sleep(FIRST_PAUSE * (1 << (tries - 1))).await,
            }
            tries += 1;
        }
    }

    /// Makes passes until the task is dropped. A pass that fails is logged, and the next one begins after the
    /// interval.
    pub fn spawn(self) -> AuditorTask {
        AuditorTask(tokio::spawn(async move {
            loop {
                sleep(self.until_due().await).await;
                match self.pass(|_| {}).await {
                    Ok(step) => tracing::debug!(
                        scanned = step.scanned,
                        found = step.found,
                        "the index of unsettled records is new"
                    ),
                    Err(error) => {
                        tracing::warn!(error = %error.in_full(), "the index of unsettled records is not made anew");
                        sleep(self.interval).await;
                    }
                }
            }
        }))
    }

    /// How long it is until somebody has to make a pass.
    async fn until_due(&self) -> Duration {
        let wanted = Wanted { survey: Survey::Unsettled, at_most: 1, after: None };
        match self.store.list(&wanted).await {
            Ok(listing) => match listing.source {
                Source::Index(pass) => {
                    let age = listing.now.since(pass.ended);
                    self.interval.saturating_sub(age)
                }
                Source::NoIndex => Duration::ZERO,
                Source::Direct => self.interval,
            },
            Err(_) => self.interval,
        }
    }
}
