//! What the client may do, for how long, and how it spaces its tries.

use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use http::HeaderName;

use super::budget::RetryBudget;
use super::key::Keys;
use crate::config::IDEMPOTENCY_KEY;

type Proof = dyn Fn(&(dyn StdError + 'static)) -> bool + Send + Sync;

/// The rules of a retrying client.
///
/// # Defaults
/// 8 tries · 30 s for one, 2 min in all · pauses drawn from zero to 0.2 s, doubled up to 5 s · `Retry-After` up to
/// 60 s · answers up to 1 MiB read whole · a key for every POST and PATCH, in `Idempotency-Key` · a
/// [budget](RetryBudget) of 100 retries.
///
/// # Clone
/// Clones share the budget.
#[derive(Clone)]
#[must_use]
pub struct RetryPolicy {
    pub(super) max_tries: u32,
    pub(super) try_timeout: Duration,
    pub(super) within: Duration,
    pause_first: Duration,
    pause_max: Duration,
    retry_after_max: Duration,
    pub(super) answer_limit: usize,
    pub(super) key_header: HeaderName,
    pub(super) keys: Keys,
    pub(super) budget: RetryBudget,
    pub(super) nothing_sent: Arc<Proof>,
}

/// Official SDKs send three times and give up within 2 s of a restart; with full jitter, eight tries
/// last about 10 s.
const MAX_TRIES: u32 = 8;
/// Longer than a payment takes; shorter than the 80 s of official SDKs, since a retry is safe.
const TRY_TIMEOUT: Duration = Duration::from_secs(30);
/// A person who waits has gone by then.
const WITHIN: Duration = Duration::from_secs(120);
/// About one slow round trip.
const PAUSE_FIRST: Duration = Duration::from_millis(200);
/// As in official SDKs.
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// No pause is shorter: a server that asks for zero, or a draw near it, must not make a hot loop.
const PAUSE_MIN: Duration = Duration::from_millis(20);
/// What older Stripe SDKs honoured. A longer wait is the caller's business.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(60);
/// As the layer's own default for what it stores.
const ANSWER_LIMIT: usize = 1 << 20;

impl Default for RetryPolicy {
    fn default() -> Self {
        Self::new()
    }
}

impl RetryPolicy {
    /// The defaults.
    pub fn new() -> Self {
        Self {
            max_tries: MAX_TRIES,
            try_timeout: TRY_TIMEOUT,
            within: WITHIN,
            pause_first: PAUSE_FIRST,
            pause_max: PAUSE_MAX,
            retry_after_max: RETRY_AFTER_MAX,
            answer_limit: ANSWER_LIMIT,
            key_header: IDEMPOTENCY_KEY,
            keys: Keys::default(),
            budget: RetryBudget::default(),
            nothing_sent: Arc::new(was_refused),
        }
    }

    /// How often an operation is sent at most, the first time included; at least once.
    pub fn max_tries(mut self, tries: u32) -> Self {
        self.max_tries = tries.max(1);
        self
    }

    /// How long one try may take, from connecting to the end of its answer.
    pub fn try_timeout(mut self, timeout: Duration) -> Self {
        self.try_timeout = timeout;
        self
    }

    /// How long an operation may take in all, its pauses included.
    pub fn within(mut self, bound: Duration) -> Self {
        self.within = bound;
        self
    }

    /// The range that the first pause is drawn from: zero to this. It doubles each time.
    pub fn first_pause(mut self, pause: Duration) -> Self {
        self.pause_first = pause;
        self
    }

    /// The longest range that a pause is drawn from.
    pub fn longest_pause(mut self, pause: Duration) -> Self {
        self.pause_max = pause;
        self
    }

    /// How long a wait the server may ask for with `Retry-After`; a longer one is cut to this.
    pub fn longest_retry_after(mut self, wait: Duration) -> Self {
        self.retry_after_max = wait;
        self
    }

    /// How many bytes of an answer under a key are read before it is returned. An answer that breaks off
    /// within them is asked for again; a longer one is passed on as it comes.
    pub fn answer_limit(mut self, bytes: usize) -> Self {
        self.answer_limit = bytes;
        self
    }

    /// The header that carries the key.
    pub fn key_header(mut self, name: HeaderName) -> Self {
        self.key_header = name;
        self
    }

    /// Where keys come from.
    pub fn keys(mut self, keys: Keys) -> Self {
        self.keys = keys;
        self
    }

    /// The budget, to share one between clients of one server.
    pub fn budget(mut self, budget: RetryBudget) -> Self {
        self.budget = budget;
        self
    }

    /// Which errors of the inner service prove that nothing was sent, beside refused connections: only these are
    /// tried again where there is no key. The error and each of its sources are shown to `proof`.
    pub fn nothing_sent_if(
        mut self,
        proof: impl Fn(&(dyn StdError + 'static)) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.nothing_sent = Arc::new(move |error| was_refused(error) || proof(error));
        self
    }

    /// The pause before the next try, after so many.
    pub(super) fn pause(&self, tries: u32, asked: Option<Duration>) -> Duration {
        let drawn = self.backoff(tries, random_fraction());
        match asked {
            // The draw on top spreads those who were all told the same.
            Some(asked) => asked.min(self.retry_after_max) + drawn.min(self.pause_first),
            None => drawn,
        }
    }

    /// Full jitter: anything from (almost) zero to the range, which doubles with each try.
    fn backoff(&self, tries: u32, fraction: f64) -> Duration {
        let doublings = tries.saturating_sub(1).min(16);
        let range = self.pause_first.saturating_mul(1 << doublings).min(self.pause_max);
        range.mul_f64(fraction).max(PAUSE_MIN)
    }
}

/// A refused connection: the only failure of sockets that proves by itself that nothing was sent.
fn was_refused(error: &(dyn StdError + 'static)) -> bool {
    error
        .downcast_ref::<io::Error>()
        .is_some_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
}

/// From zero to below one.
fn random_fraction() -> f64 {
    let mut bytes = [0; 4];
    // Without randomness the pauses are shortest, which is no reason to fail.
    let _ = getrandom::fill(&mut bytes);
    f64::from(u32::from_be_bytes(bytes)) / (f64::from(u32::MAX) + 1.0)
}

impl fmt::Debug for RetryPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RetryPolicy")
            .field("max_tries", &self.max_tries)
            .field("try_timeout", &self.try_timeout)
            .field("within", &self.within)
            .field("keys", &self.keys)
            .field("budget", &self.budget)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_double_up_to_the_longest_and_no_pause_is_zero() {
        let policy = RetryPolicy::new();
        let longest = |tries| policy.backoff(tries, 0.999_999);
        assert!(longest(1) < Duration::from_millis(200));
        assert!(longest(2) > Duration::from_millis(399));
        assert!(longest(40) > Duration::from_millis(4999) && longest(40) < PAUSE_MAX);
        assert_eq!(policy.backoff(1, 0.0), PAUSE_MIN);
        assert_eq!(policy.backoff(u32::MAX, 0.0), PAUSE_MIN);
    }

    #[test]
    fn what_the_server_asks_for_is_waited_but_capped_and_never_zero() {
        let policy = RetryPolicy::new();
        let asked = |seconds| policy.pause(1, Some(Duration::from_secs(seconds)));
        assert!((2.0..2.3).contains(&asked(2).as_secs_f64()));
        assert!((60.0..60.3).contains(&asked(u64::MAX).as_secs_f64()));
        assert!(asked(0) >= PAUSE_MIN);
    }

    #[test]
    fn pauses_differ_from_each_other() {
        let policy = RetryPolicy::new();
        let drawn: std::collections::HashSet<_> = (0..50).map(|_| policy.pause(5, None)).collect();
        assert!(drawn.len() > 40, "{drawn:?}");
    }
}
