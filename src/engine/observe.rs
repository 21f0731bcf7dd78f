//! What the engine tells of its work: one event and one count per outcome. Never a key, never a body.

use std::borrow::Cow;
use std::time::Duration;

use metrics::{Key, Label, Level, Metadata};
use tokio::time::Instant;
use tracing::Span;
use tracing::field::Empty;

use super::behind::Unrecorded;
use crate::error::{RejectionKind, StoreErrorKind};
use crate::record::{ClaimOutcome, Grant, Verdict};
use crate::scope::StorageKey;
use crate::store::Lease;

static METADATA: Metadata<'static> =
    Metadata::new(module_path!(), Level::INFO, Some(module_path!()));

/// The name of a series that every request has to do with, made once and not each time.
macro_rules! named {
    ($series:expr) => {{
        static KEY: Key = Key::from_static_name($series);
        &KEY
    }};
    ($series:expr, $outcome:literal) => {{
        static LABELS: [Label; 1] = [Label::from_static_parts("outcome", $outcome)];
        static KEY: Key = Key::from_static_parts($series, &LABELS);
        &KEY
    }};
}

/// The name of a series of one outcome; of these it is made once.
macro_rules! of_outcome {
    ($series:expr, $outcome:expr, [$($known:literal)+]) => {
        match $outcome {
            $($known => Cow::Borrowed(named!($series, $known)),)+
            other => Cow::Owned(Key::from_parts($series, vec![Label::new("outcome", other)])),
        }
    };
}

fn counter(key: &Key) -> metrics::Counter {
    metrics::with_recorder(|recorder| recorder.register_counter(key, &METADATA))
}

fn gauge(key: &Key) -> metrics::Gauge {
    metrics::with_recorder(|recorder| recorder.register_gauge(key, &METADATA))
}

fn histogram(key: &Key) -> metrics::Histogram {
    metrics::with_recorder(|recorder| recorder.register_histogram(key, &METADATA))
}

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

const REQUESTS: &str = "idempotency.requests";
const REQUEST_DURATION: &str = "idempotency.request.duration";
const CLAIMS: &str = "idempotency.claims";
const IN_FLIGHT: &str = "idempotency.in_flight";
const OLDEST_IN_FLIGHT: &str = "idempotency.in_flight.oldest_age";
const WAITING: &str = "idempotency.waiting";
const WAIT_DURATION: &str = "idempotency.wait.duration";
const LEASES_LOST: &str = "idempotency.leases.lost";
const TAKEOVERS: &str = "idempotency.takeovers";
const COMPLETIONS_REFUSED: &str = "idempotency.completions.refused";
const COMPLETIONS_HEALED: &str = "idempotency.completions.healed";
const RECONCILIATIONS: &str = "idempotency.reconciliations";
const SHADOW_REQUESTS: &str = "idempotency.shadow.requests";
const SHADOW_WAITS: &str = "idempotency.shadow.waits";
const STORE_DURATION: &str = "idempotency.store.duration";
const STORE_ERRORS: &str = "idempotency.store.errors";
const STORE_RETRIES: &str = "idempotency.store.retries";

const COUNTERS: [(&str, &str); 11] = [
    (REQUESTS, "Requests by what became of them"),
    (CLAIMS, "Answers of the store to claims"),
    (LEASES_LOST, "Leases lost while the handler ran"),
    (TAKEOVERS, "Runs that followed one of unknown outcome"),
    (COMPLETIONS_REFUSED, "Answers that came too late to be stored: somebody else holds the key"),
    (COMPLETIONS_HEALED, "Late answers that settled a key"),
    (RECONCILIATIONS, "Questions to a reconcile hook, by what it found"),
    (SHADOW_REQUESTS, "Requests in shadow mode by what would have become of them"),
    (SHADOW_WAITS, "Requests in shadow mode that would have waited for a running twin"),
    (STORE_ERRORS, "Calls to the store that failed"),
    (STORE_RETRIES, "Calls to the store that were sent again"),
];
const GAUGES: [(&str, &str); 2] = [
    (IN_FLIGHT, "Handlers that run under a key now"),
    (WAITING, "Requests that wait for a running twin now"),
];
const DURATIONS: [(&str, &str); 3] = [
    (REQUEST_DURATION, "From the whole request to its outcome"),
    (WAIT_DURATION, "How long requests waited for a running twin"),
    (STORE_DURATION, "Calls to the store"),
];

/// Says what every series means, and starts those whose alarm is "more than none", so that one that
/// never moved can be told from one that does not exist.
pub(super) fn describe() {
    for (name, meaning) in COUNTERS {
        metrics::describe_counter!(name, meaning);
    }
    for (name, meaning) in GAUGES {
        metrics::describe_gauge!(name, meaning);
    }
    for (name, meaning) in DURATIONS {
        metrics::describe_histogram!(name, metrics::Unit::Seconds, meaning);
    }
    metrics::describe_gauge!(
        OLDEST_IN_FLIGHT,
        metrics::Unit::Seconds,
        "For how long the oldest handler under a key has been running"
    );
    for outcome in [Seen::Unprotected, Seen::NotStored, Seen::Unknown] {
        metrics::counter!(REQUESTS, "outcome" => outcome.name()).increment(0);
    }
    for kind in [
        RejectionKind::OutcomeUnknown,
        RejectionKind::HandlerFailed,
        RejectionKind::StoreUnavailable,
        RejectionKind::RecordUnreadable,
        RejectionKind::TooManyWaiting,
        RejectionKind::TooManyInFlight,
    ] {
        metrics::counter!(REQUESTS, "outcome" => refusal(&kind)).increment(0);
    }
    metrics::counter!(RECONCILIATIONS, "found" => "still_unknown").increment(0);
    metrics::counter!(SHADOW_REQUESTS, "outcome" => Seen::Replayed.name()).increment(0);
    for name in [LEASES_LOST, TAKEOVERS, COMPLETIONS_REFUSED, COMPLETIONS_HEALED, SHADOW_WAITS] {
        metrics::counter!(name).increment(0);
    }
    oldest(None);
}

/// The span of a covered request, from its claim to its conclusion, within the one it came in. The handler runs
/// in that one, as it would without this layer.
pub(super) fn span(key: StorageKey, came_in: &Span) -> Span {
    tracing::info_span!(
        parent: came_in,
        "idempotent_request",
        key = %key.in_logs(),
        outcome = Empty,
        attempt = Empty,
        takeover = Empty,
    )
}

/// Adds to the span which run this is.
pub(super) fn granted(grant: &Grant) {
    let span = Span::current();
    span.record("attempt", grant.attempt.number());
    span.record("takeover", grant.takeover);
}

/// Counts and logs an outcome of a request whose key was claimed.
pub(crate) fn seen(seen: Seen, key: StorageKey, elapsed: Duration) {
    ended(seen.name(), elapsed);
    match seen {
        Seen::Executed | Seen::Released | Seen::RolledBack | Seen::Replayed | Seen::Reconciled => {
            tracing::debug!(
                key = %key.in_logs(), outcome = seen.name(), elapsed_ms = elapsed_ms(elapsed), "idempotent request"
            )
        }
        // Its client is told the same reference by the answer to its next retry.
        Seen::Unknown => tracing::warn!(
            reference = %key.in_logs(), outcome = seen.name(), elapsed_ms = elapsed_ms(elapsed),
            "the outcome of a request is unknown: its handler said so"
        ),
        Seen::NotStored | Seen::Unprotected => tracing::warn!(
            key = %key.in_logs(), outcome = seen.name(), elapsed_ms = elapsed_ms(elapsed), "idempotent request"
        ),
    }
}

/// Counts and logs the refusal of a request whose key was claimed, or could not be.
pub(super) fn concluded(kind: &RejectionKind, key: StorageKey, elapsed: Duration) {
    let outcome = refusal(kind);
    ended(outcome, elapsed);
    let (key, elapsed_ms) = (key.log_id(), elapsed_ms(elapsed));
    match kind {
        // The client is told the same reference.
        RejectionKind::OutcomeUnknown | RejectionKind::HandlerFailed => {
            tracing::warn!(
                reference = key,
                outcome,
                elapsed_ms,
                "the outcome of a request is unknown"
            );
        }
        RejectionKind::StoreUnavailable | RejectionKind::RecordUnreadable => {
            tracing::warn!(key, outcome, elapsed_ms, "idempotent request refused");
        }
        RejectionKind::KeyMissing
        | RejectionKind::KeyInvalid(_)
        | RejectionKind::KeyReused
        | RejectionKind::KeyInUse
        | RejectionKind::ResultUnavailable { .. }
        | RejectionKind::RequestTooLarge { .. }
        | RejectionKind::RequestIncomplete
        | RejectionKind::ScopeMissing
        | RejectionKind::ReplayForbidden
        | RejectionKind::TooManyWaiting
        | RejectionKind::TooManyInFlight
        | RejectionKind::HandlerFailedUntouched
        | RejectionKind::RolledBack => {
            tracing::debug!(key, outcome, elapsed_ms, "idempotent request refused");
        }
    }
}

fn ended(outcome: &'static str, elapsed: Duration) {
    Span::current().record("outcome", outcome);
    let requests = of_outcome!(REQUESTS, outcome, ["executed" "replayed" "in_use" "mismatch"]);
    counter(&requests).increment(1);
    let duration = of_outcome!(REQUEST_DURATION, outcome, ["executed" "replayed" "in_use"]);
    histogram(&duration).record(elapsed.as_secs_f64());
}

/// Counts and logs the refusal of a request that did not come as far as its claim.
pub(crate) fn refused(kind: &RejectionKind, key: Option<StorageKey>) {
    let outcome = refusal(kind);
    metrics::counter!(REQUESTS, "outcome" => outcome).increment(1);
    let key = key.map(|key| key.log_id());
    if is_unknown(kind) {
        // The client is told the same reference.
        tracing::warn!(reference = key, outcome, "the outcome of a request is unknown");
    } else {
        tracing::debug!(key, outcome, "idempotent request refused");
    }
}

/// How many keys a shutdown names in the log of each kind; of all it says how many they are.
pub(super) const TOLD_AT_MOST: usize = 100;

/// Logs a run that a shutdown has given up while it goes on.
pub(super) fn abandoned(key: StorageKey, verdict: Verdict) {
    match verdict {
        // Retries are told the same reference.
        Verdict::Unknown => tracing::warn!(
            reference = %key.in_logs(), "the outcome of a request is unknown: its handler was running when the grace of a shutdown was over"
        ),
        Verdict::NoEffect => tracing::warn!(
            key = %key.in_logs(), "a handler without an effect so far was running when the grace of a shutdown was over: its key is free"
        ),
    }
}

/// Logs what a shutdown could not wait for until the store had it.
pub(super) fn unrecorded(key: StorageKey, what: Unrecorded) {
    let reference = key.in_logs();
    match what {
        Unrecorded::Answer => tracing::warn!(
            %reference, "an answer was made, and the store had not confirmed it when the grace of a shutdown was over: if it never got it, retries will be told that the outcome is unknown, or run again"
        ),
        Unrecorded::End => tracing::warn!(
            %reference, "a key was not given back when the grace of a shutdown was over: retries may be told that its outcome is unknown"
        ),
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
    metrics::counter!(SHADOW_REQUESTS, "outcome" => outcome).increment(1);
    tracing::debug!(outcome, "what would have become of a request in shadow mode");
}

/// Counts a request that would have waited for its running twin.
pub(super) fn shadow_waits() {
    metrics::counter!(SHADOW_WAITS).increment(1);
}

/// Counts a request that the layer let pass untouched although it looked at it.
pub(crate) fn passed_through() {
    metrics::counter!(REQUESTS, "outcome" => "passed_through").increment(1);
}

pub(super) fn lease_lost() {
    metrics::counter!(LEASES_LOST).increment(1);
}

pub(super) fn takeover() {
    metrics::counter!(TAKEOVERS).increment(1);
}

pub(super) fn completion_refused() {
    metrics::counter!(COMPLETIONS_REFUSED).increment(1);
}

pub(super) fn completion_healed() {
    metrics::counter!(COMPLETIONS_HEALED).increment(1);
}

pub(super) fn reconciled(found: &'static str) {
    metrics::counter!(RECONCILIATIONS, "found" => found).increment(1);
}

pub(super) fn call_again(verb: &'static str) {
    metrics::counter!(STORE_RETRIES, "verb" => verb).increment(1);
}

/// The series of one store, named once.
#[derive(Debug)]
pub(super) struct StoreSeries {
    store: &'static str,
    durations: [(&'static str, Key); VERBS.len()],
}

/// What the engine asks of a store.
const VERBS: [&str; 6] = ["claim", "complete", "renew", "checkpoint", "release", "resolve"];

impl StoreSeries {
    pub(super) fn of(store: &'static str) -> Self {
        let named = |verb| {
            let labels = vec![Label::new("store", store), Label::new("verb", verb)];
            (verb, Key::from_parts(STORE_DURATION, labels))
        };
        Self { store, durations: VERBS.map(named) }
    }

    /// One call to the store: how long it took, and why it failed if it did.
    pub(super) fn called(
        &self,
        verb: &'static str,
        elapsed: Duration,
        error: Option<StoreErrorKind>,
    ) {
        let duration = self.durations.iter().find(|(name, _)| *name == verb);
        debug_assert!(duration.is_some(), "{verb} is not among the verbs");
        if let Some((_, key)) = duration {
            histogram(key).record(elapsed.as_secs_f64());
        }
        self.failed(verb, error);
    }

    fn failed(&self, verb: &'static str, error: Option<StoreErrorKind>) {
        let Some(kind) = error else { return };

        let kind = match kind {
            StoreErrorKind::Unavailable => "unavailable",
            StoreErrorKind::OutcomeUnknown => "outcome_unknown",
            StoreErrorKind::Full => "full",
            StoreErrorKind::Backend => "backend",
            StoreErrorKind::RolledBack => "rolled_back",
        };
        metrics::counter!(STORE_ERRORS, "store" => self.store, "verb" => verb, "kind" => kind)
            .increment(1);
    }
}

/// What the store made of a claim.
pub(super) fn claimed(outcome: &ClaimOutcome<Lease>) {
    let outcome = match outcome {
        ClaimOutcome::Acquired(_) => "acquired",
        ClaimOutcome::InFlight { .. } => "in_flight",
        ClaimOutcome::Completed(_) => "completed",
        ClaimOutcome::Mismatch => "mismatch",
        ClaimOutcome::Indeterminate(_) => "indeterminate",
        ClaimOutcome::Unreadable => "unreadable",
    };
    let claims = of_outcome!(CLAIMS, outcome, ["acquired" "in_flight" "completed" "mismatch"]);
    counter(&claims).increment(1);
}

/// For how long the oldest handler has been running, if there is one.
pub(super) fn oldest(age: Option<Duration>) {
    gauge(named!(OLDEST_IN_FLIGHT)).set(age.unwrap_or_default().as_secs_f64());
}

/// Counts one up while it lives.
#[derive(Debug)]
pub(super) struct Gauge(&'static Key);

impl Gauge {
    pub(super) fn in_flight() -> Self {
        Self::up(named!(IN_FLIGHT))
    }

    fn up(name: &'static Key) -> Self {
        gauge(name).increment(1.0);
        Self(name)
    }
}

impl Drop for Gauge {
    fn drop(&mut self) {
        gauge(self.0).decrement(1.0);
    }
}

/// A request that waits for a running twin, while it lives.
#[derive(Debug)]
pub(super) struct Waiting {
    _gauge: Gauge,
    since: Instant,
}

impl Waiting {
    pub(super) fn begin() -> Self {
        Self { _gauge: Gauge::up(named!(WAITING)), since: Instant::now() }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        metrics::histogram!(WAIT_DURATION).record(self.since.elapsed().as_secs_f64());
    }
}

fn elapsed_ms(elapsed: Duration) -> u64 {
    u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX)
}
