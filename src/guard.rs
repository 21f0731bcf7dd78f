//! The replay guard: may whoever asks now see what was answered then?
//!
//! Authentication outside of the layer refuses a caller that lost its access altogether. It cannot
//! know what a stored answer holds: an account may still call and have lost the right to see this one.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use http::StatusCode;
use http::request::Parts;

use crate::key::IdempotencyKey;

/// Whether a stored answer is given.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum ReplayDecision {
    /// It is.
    Allow,
    /// It is not: 403 `idempotency_replay_forbidden`. The record stays as it is.
    Refuse,
}

/// A stored answer that is about to be given, and who asks for it.
#[derive(Debug)]
pub struct ReplayRequest {
    head: Parts,
    key: IdempotencyKey,
    status: StatusCode,
}

impl ReplayRequest {
    pub(crate) fn new(head: Parts, key: IdempotencyKey, status: StatusCode) -> Self {
        Self { head, key, status }
    }

    /// The head of the request that asks: what authentication found is in its extensions.
    #[must_use]
    pub fn head(&self) -> &Parts {
        &self.head
    }

    /// The key.
    #[must_use]
    pub fn key(&self) -> &IdempotencyKey {
        &self.key
    }

    /// The status of the stored answer.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        self.status
    }
}

type Answer = Pin<Box<dyn Future<Output = ReplayDecision> + Send>>;

/// A hook that is asked before each replay.
#[derive(Clone)]
pub(crate) struct ReplayGuard(Arc<dyn Fn(ReplayRequest) -> Answer + Send + Sync>);

impl ReplayGuard {
    pub(crate) fn new<F, A>(ask: F) -> Self
    where
        F: Fn(ReplayRequest) -> A + Send + Sync + 'static,
        A: Future<Output = ReplayDecision> + Send + 'static,
    {
        Self(Arc::new(move |request| Box::pin(ask(request))))
    }

    pub(crate) fn ask(&self, request: ReplayRequest) -> Answer {
        (self.0)(request)
    }
}

impl fmt::Debug for ReplayGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReplayGuard(..)")
    }
}
