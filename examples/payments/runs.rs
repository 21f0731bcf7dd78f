//! When the handler of a payment runs, for whoever asks: `RUST_LOG=payments::runs=debug`.
//!
//! What a process did with a key cannot be told from its answers: those get lost. Tests of faults read
//! these lines, and hold them against the ledger and the store.

use tower_idempotency::Fence;

use crate::ledger::{Cause, NewPayment};
use crate::payments::Answer;

/// A run that goes on. Dropped without a word it was cut off, by a panic for example.
#[derive(Debug)]
pub(crate) struct Run<'a> {
    cause: &'a Cause,
    fence: Fence,
    end: &'static str,
}

impl<'a> Run<'a> {
    pub(crate) fn begins(cause: &'a Cause, fence: Fence, new: &NewPayment) -> Self {
        let Cause { key_id, attempt, .. } = cause;
        let NewPayment { amount, source, .. } = new;
        tracing::debug!(%key_id, attempt, fence = fence.number(), amount, %source, "begins");
        Self { cause, fence, end: "is cut off" }
    }

    /// The charge is made; in a transaction nobody else sees it yet.
    pub(crate) fn has_charged(&self) {
        let Cause { key_id, attempt, .. } = self.cause;
        tracing::debug!(%key_id, attempt, fence = self.fence.number(), "has charged");
    }

    pub(crate) fn answers(mut self, answer: &Answer) {
        let nothing = answer.as_ref().is_err_and(|error| error.frees_the_key());
        self.end = if nothing { "did nothing" } else { "answers" };
    }
}

impl Drop for Run<'_> {
    fn drop(&mut self) {
        let Cause { key_id, attempt, .. } = self.cause;
        tracing::debug!(%key_id, attempt, fence = self.fence.number(), "{}", self.end);
    }
}
