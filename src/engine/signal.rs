//! A word that is given once, to whoever waits for it now or later.

use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Notify;

/// Every run has some of these, and nearly none is ever given or waited for: it takes no lock to make, look at or drop one.
#[derive(Debug, Default)]
pub(super) struct Signal {
    is_given: AtomicBool,
    waiting: Notify,
}

impl Signal {
    pub(super) fn give(&self) {
        self.is_given.store(true, Ordering::Release);
        self.waiting.notify_waiters();
    }

    pub(super) fn is_given(&self) -> bool {
        self.is_given.load(Ordering::Acquire)
    }

    /// Completes when it is given, at once if it was. Dropping this stops the waiting only.
    pub(super) async fn given(&self) {
        // Made before the look: a word that is given in between reaches it, though it was not polled yet.
        let told = self.waiting.notified();
        if !self.is_given() {
            told.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures_util::poll;

    use super::*;

    #[tokio::test]
    async fn it_reaches_all_who_wait_and_all_who_come_later() {
        let signal = Signal::default();
        let (mut one, mut other) = (pin!(signal.given()), pin!(signal.given()));
        assert!(poll!(one.as_mut()).is_pending() && poll!(other.as_mut()).is_pending());
        assert!(!signal.is_given());
        signal.give();
        one.await;
        other.await;
        assert!(signal.is_given());
        signal.given().await;
    }

    #[tokio::test]
    async fn no_word_is_lost_that_is_given_while_one_begins_to_wait() {
        for _ in 0..2_000 {
            let signal = std::sync::Arc::new(Signal::default());
            let giver = std::sync::Arc::clone(&signal);
            let gives = std::thread::spawn(move || giver.give());
            signal.given().await;
            gives.join().unwrap();
        }
    }
}
