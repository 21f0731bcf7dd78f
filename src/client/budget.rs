//! The retry budget: retries that do not help come to an end, however many operations there are.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What all operations of a client may spend on retries.
///
/// A retry takes a token. An operation that ends with an answer gives back what its retries took, and one
/// more. So retries that help cost nothing for long, and when a server is down the budget is soon empty:
/// from then on operations are tried once each, until they succeed again. Waiting for an operation that is running
/// (409 *in use*) is free, since the server asked for it.
///
/// # Clone
/// Clones share the tokens.
#[derive(Clone, Debug)]
pub struct RetryBudget {
    tokens: Arc<Mutex<u32>>,
    most: u32,
}

/// As much as the retries of some tens of operations in the air: enough for a restart of the server, too few
/// to double its load for long.
const TOKENS: u32 = 100;

impl Default for RetryBudget {
    /// 100 tokens.
    fn default() -> Self {
        Self::of(TOKENS)
    }
}

impl RetryBudget {
    /// A budget of at most, and at first, this many retries.
    #[must_use]
    pub fn of(tokens: u32) -> Self {
        Self { tokens: Arc::new(Mutex::new(tokens)), most: tokens }
    }

    /// How many retries are left now.
    #[must_use]
    pub fn left(&self) -> u32 {
        *self.lock()
    }

    /// Takes a token; false if there is none.
    pub(super) fn take(&self) -> bool {
        let mut tokens = self.lock();
        let left = tokens.checked_sub(1);
        *tokens = left.unwrap_or(0);
        left.is_some()
    }

    /// An operation that took so many tokens has got its answer.
    pub(super) fn give_back(&self, taken: u32) {
        let mut tokens = self.lock();
        *tokens = tokens.saturating_add(taken).saturating_add(1).min(self.most);
    }

    fn lock(&self) -> MutexGuard<'_, u32> {
        // A number is never half changed.
        self.tokens.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retries_that_help_come_back_and_others_run_out() {
        let budget = RetryBudget::of(3);
        assert!(budget.take() && budget.take());
        budget.give_back(2);
        assert_eq!(budget.left(), 3);
        assert!(budget.take() && budget.take() && budget.take());
        assert!(!budget.take());
        budget.give_back(0);
        assert!(budget.take());
        assert!(!budget.take());
    }
}
