//! What the engine tells of its work: one event and one count per outcome. Never a key, never a body.

use std::time::Duration;

use crate::error::RejectionKind;
use crate::scope::StorageKey;
use crate::store::Store;

/// What became of a request that the layer looked at.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Seen {
    /// The handler ran and its answer is stored.
    Executed,
    /// The handler ran and said that nothing happened.
    Released,
    /// The handler ran and its outcome is unknown.
    Unknown,
    /// The handler ran and its answer could not be stored.
    NotStored,
    /// The handler ran, and the store undid everything that it wrote.
    RolledBack,
    /// The stored response was given again.
    Replayed,
    /// The outcome of an interrupted run was found out, and given for the first time.
    Reconciled,
    /// The handler ran without protection.
    Unprotected,
}

impl Seen {
    fn name(self) -> &'static str {
        match self {
            Self::Executed => "executed",
            Self::Released => "released",
            Self::Unknown => "unknown",
            Self::NotStored => "not_stored",
            Self::RolledBack => "rolled_back",
            Self::Replayed => "replayed",
            Self::Reconciled => "reconciled",
            Self::Unprotected => "unprotected",
        }
    }
}

/// The label of a refusal.
pub(crate) fn refusal(kind: &RejectionKind) -> &'static str {
    match kind {
        RejectionKind::KeyMissing => "missing_key",
        RejectionKind::KeyInvalid(_) => "invalid_key",
        RejectionKind::KeyReused => "mismatch",
        RejectionKind::KeyInUse => "in_use",
        RejectionKind::OutcomeUnknown => "outcome_unknown",
        RejectionKind::HandlerFailed => "handler_failed",
        RejectionKind::RolledBack => "rolled_back",
        RejectionKind::HandlerFailedUntouched => "handler_failed_untouched",
        RejectionKind::ResultUnavailable { .. } => "result_unavailable",
        RejectionKind::RequestTooLarge { .. } => "request_too_large",
        RejectionKind::RequestIncomplete => "request_incomplete",
        RejectionKind::StoreUnavailable => "store_unavailable",
        RejectionKind::RecordUnreadable => "record_unreadable",
        RejectionKind::ScopeMissing => "scope_missing",
        RejectionKind::ReplayForbidden => "replay_forbidden",
        RejectionKind::TooManyWaiting => "too_many_waiting",
        RejectionKind::TooManyInFlight => "too_many_in_flight",
    }
}

/// Makes every series visible from the start, so that an alert on one that never moved can be told
/// from one that does not exist.
pub(super) fn describe() {
    metrics::describe_counter!("idempotency.requests", "Requests by what became of them");
    metrics::describe_gauge!("idempotency.in_flight", "Handlers that run under a key now");
    metrics::describe_gauge!("idempotency.waiting", "Requests that wait for a running twin now");
    metrics::describe_counter!("idempotency.leases.lost", "Leases lost while the handler ran");
    metrics::describe_counter!(
        "idempotency.takeovers",
        "Runs that followed one of unknown outcome"
    );
    metrics::describe_counter!(
        "idempotency.completions.refused",
        "Answers that came too late to be stored: somebody else holds the key"
    );
    metrics::describe_counter!("idempotency.completions.healed", "Late answers that settled a key");
    metrics::describe_counter!(
        "idempotency.reconciliations",
        "Questions to a reconcile hook, by what it found"
    );
    metrics::describe_counter!("idempotency.store.retries", "Calls that were sent again");
    metrics::describe_counter!(
        "idempotency.shadow.requests",
        "Requests in shadow mode by what would have become of them"
    );
    metrics::describe_counter!(
        "idempotency.shadow.waits",
        "Requests in shadow mode that would have waited for a running twin"
    );
    metrics::describe_histogram!(
        "idempotency.store.duration",
        metrics::Unit::Seconds,
        "Calls to the store"
    );
    metrics::counter!("idempotency.requests", "outcome" => Seen::Unprotected.name()).increment(0);
    metrics::counter!("idempotency.leases.lost").increment(0);
    metrics::counter!("idempotency.completions.refused").increment(0);
}

/// Counts and logs an outcome of a request whose key was claimed.
pub(crate) fn seen(seen: Seen, key: StorageKey, elapsed: Duration) {
    metrics::counter!("idempotency.requests", "outcome" => seen.name()).increment(1);
    match seen {
        Seen::Executed | Seen::Released | Seen::RolledBack | Seen::Replayed | Seen::Reconciled => {
            tracing::debug!(
                key = %key.log_id(), outcome = seen.name(), elapsed_ms = elapsed_ms(elapsed), "idempotent request"
            )
        }
        Seen::Unknown | Seen::NotStored | Seen::Unprotected => tracing::warn!(
            key = %key.log_id(), outcome = seen.name(), elapsed_ms = elapsed_ms(elapsed), "idempotent request"
        ),
    }
}

/// Counts and logs a refusal.
pub(crate) fn refused(kind: &RejectionKind, key: Option<StorageKey>) {
    let outcome = refusal(kind);
    metrics::counter!("idempotency.requests", "outcome" => outcome).increment(1);
    let key = key.map(|key| key.log_id());
    if is_unknown(kind) {
        // The client is told the same reference.
        tracing::warn!(reference = key, outcome, "the outcome of a request is unknown");
    } else {
        tracing::debug!(key, outcome, "idempotent request refused");
    }
}

/// True if somebody has to find out what happened.
pub(crate) fn is_unknown(kind: &RejectionKind) -> bool {
    matches!(kind, RejectionKind::OutcomeUnknown | RejectionKind::HandlerFailed)
}

/// Counts what would have become of a request in shadow mode.
pub(super) fn shadow_seen(seen: Seen) {
    shadow(seen.name());
}

/// Counts a refusal that shadow mode did not make.
pub(crate) fn shadowed(kind: &RejectionKind) {
    shadow(refusal(kind));
}

/// Counts a request that shadow mode cannot judge: the length of its body is not known.
pub(crate) fn shadow_unjudged() {
    shadow("unjudged");
}

fn shadow(outcome: &'static str) {
    metrics::counter!("idempotency.shadow.requests", "outcome" => outcome).increment(1);
    tracing::debug!(outcome, "what would have become of a request in shadow mode");
}

/// Counts a request that would have waited for its running twin.
pub(super) fn shadow_waits() {
    metrics::counter!("idempotency.shadow.waits").increment(1);
}

/// Counts a request that the layer let pass untouched although it looked at it.
pub(crate) fn passed_through() {
    metrics::counter!("idempotency.requests", "outcome" => "passed_through").increment(1);
}

pub(super) fn lease_lost() {
    metrics::counter!("idempotency.leases.lost").increment(1);
}

pub(super) fn takeover() {
    metrics::counter!("idempotency.takeovers").increment(1);
}

pub(super) fn completion_refused() {
    metrics::counter!("idempotency.completions.refused").increment(1);
}

pub(super) fn completion_healed() {
    metrics::counter!("idempotency.completions.healed").increment(1);
}

pub(super) fn reconciled(found: &'static str) {
    metrics::counter!("idempotency.reconciliations", "found" => found).increment(1);
}

pub(super) fn call_again(verb: &'static str) {
    metrics::counter!("idempotency.store.retries", "verb" => verb).increment(1);
}

pub(super) fn store_call(store: &dyn Store, verb: &'static str, elapsed: Duration) {
    metrics::histogram!("idempotency.store.duration", "store" => store.name(), "verb" => verb)
        .record(elapsed.as_secs_f64());
}

/// Counts one up while it lives.
#[derive(Debug)]
pub(super) struct Gauge(&'static str);

impl Gauge {
    pub(super) fn in_flight() -> Self {
        Self::up("idempotency.in_flight")
    }

    pub(super) fn waiting() -> Self {
        Self::up("idempotency.waiting")
    }

    fn up(name: &'static str) -> Self {
        metrics::gauge!(name).increment(1.0);
        Self(name)
    }
}

impl Drop for Gauge {
    fn drop(&mut self) {
        metrics::gauge!(self.0).decrement(1.0);
    }
}

fn elapsed_ms(elapsed: Duration) -> u64 {
    u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX)
}
