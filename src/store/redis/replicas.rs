//! Whether the replicas that writes wait for were all there lately.
//!
//! WAIT holds its connection for its whole time while one is away, whatever was written before it, and a claim that finds
//! an answer writes nothing. So while replicas are away, claims look first: what is found is answered at once, and
//! only new keys wait.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use super::call::{Answer, Shortfall};
use crate::record::millis;

/// For how long a write that too few replicas confirmed is taken for a sign: long next to the time that one waits, so
/// that few do in vain; and when the replicas are back, the first write that is confirmed ends it.
const AWAY_FOR: Duration = Duration::from_secs(5);

/// Milliseconds since the start until which replicas are taken to be away; zero if they are there.
pub(super) struct Replicas {
    start: Instant,
    away_until: AtomicU64,
}

impl Replicas {
    pub(super) fn new() -> Self {
        Self { start: Instant::now(), away_until: AtomicU64::new(0) }
    }

    /// Notes what came of a write that waited.
    pub(super) fn heard(&self, answer: &Answer, shortfall: Option<&Shortfall>) {
        if shortfall.is_some() {
            let until = millis(self.start.elapsed() + AWAY_FOR);
            self.away_until.store(until, Ordering::Relaxed);
        } else if answer.replicas.is_some() && self.away_until.load(Ordering::Relaxed) > 0 {
            self.away_until.store(0, Ordering::Relaxed);
        }
    }

    pub(super) fn are_away(&self, now: Instant) -> bool {
        match self.away_until.load(Ordering::Relaxed) {
            0 => false,
            until => millis(now.duration_since(self.start)) < until,
        }
    }
}

#[cfg(test)]
mod tests {
    use ::redis::Value;

    use super::super::call::Waited;
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn replicas_are_away_for_a_while_after_a_shortfall_or_until_a_write_is_confirmed() {
        let replicas = Replicas::new();
        let away = || replicas.are_away(Instant::now());
        let answer = |waited| Answer { value: Value::Okay, replicas: waited };
        let short = Shortfall::TooFew { confirmed: 0, needed: 1 };
        assert!(!away());
        replicas.heard(&answer(Some(Waited::Confirmed(0))), Some(&short));
        // What waited for nobody says nothing.
        replicas.heard(&answer(None), None);
        assert!(away());
        tokio::time::advance(AWAY_FOR + Duration::from_millis(1)).await;
        assert!(!away());
        replicas.heard(&answer(Some(Waited::Confirmed(0))), Some(&short));
        replicas.heard(&answer(Some(Waited::Confirmed(1))), None);
        assert!(!away());
    }
}
