//! Three errors for three readers: the operator who configures, the code that calls a store, the
//! HTTP client that is refused.

use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

use http::{HeaderValue, StatusCode};

use crate::key::KeyError;

/// A configuration that could not keep its promises. Names the offending values.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// No scope was chosen.
    #[error(
        "no scope: choose Scope::principal(..), or say Scope::global() if there is one caller only"
    )]
    ScopeMissing,
    /// A duration is outside of its bounds.
    #[error("{name} is {value:?}; it must be between {min:?} and {max:?}")]
    OutOfBounds {
        /// The setting.
        name: &'static str,
        /// What it was set to.
        value: Duration,
        /// The least that is allowed.
        min: Duration,
        /// The most that is allowed.
        max: Duration,
    },
    /// One duration must not be shorter than another.
    #[error("{shorter} ({shorter_value:?}) must not be shorter than {longer} ({longer_value:?})")]
    ShorterThan {
        /// The setting that is too short.
        shorter: &'static str,
        /// Its value.
        shorter_value: Duration,
        /// The setting it is measured by.
        longer: &'static str,
        /// Its value.
        longer_value: Duration,
    },
    /// A limit of zero would refuse everything.
    #[error("{0} must be greater than zero")]
    Zero(&'static str),
    /// No method is covered, so the layer would do nothing.
    #[error("no method is covered")]
    NoMethods,
    /// A method that HTTP defines as safe is covered; such requests must stay untouched.
    #[error("{0} is a safe method and must not be covered")]
    SafeMethod(http::Method),
    /// No header is looked at.
    #[error("no key header is given")]
    NoKeyHeaders,
    /// More recipes than a claim can carry.
    #[error("{given} fingerprint recipes are accepted; at most {max} can be")]
    TooManyRecipes {
        /// How many there are, the current one included.
        given: usize,
        /// [`Fingerprints::MAX`](crate::Fingerprints::MAX).
        max: usize,
    },
    /// Keys are derived from a content that is not looked at.
    #[error("keys are derived from the content, and the fingerprint ignores it: all would be one")]
    ContentIgnored,
    /// Fields are excluded from fingerprints of bodies that no recipe reads.
    #[error(
        "fields are excluded from a fingerprint that compares raw bytes: choose canonical_json or \
         canonical_form as well"
    )]
    NothingToExcludeFrom,
    /// The base of problem types is no absolute URI.
    #[error("the base of problem types, {0:?}, is no absolute URI")]
    ProblemBase(String),
}

/// A store could not do what it was asked. One word wide; the cause is its [`reason`](Self::reason).
///
/// An error of setting a store up, of a check or of [`ready`](crate::Store::ready) says its cause in its
/// `Display`, since whoever prints it wants to know what to change: `{error}` is enough, and its
/// [`source`](StdError::source) is what that leaves out. All others leave the cause to their source.
///
/// Neither `Display` nor `Debug` shows a key or a body.
pub struct StoreError(Box<Inner>);

struct Inner {
    kind: StoreErrorKind,
    store: &'static str,
    operation: &'static str,
    source: Option<Box<dyn StdError + Send + Sync>>,
    /// `Display` says the cause, and `source` what comes behind it.
    says_why: bool,
}

/// What a store error means for the caller.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum StoreErrorKind {
    /// The operation was certainly not done.
    Unavailable,
    /// The operation may have been done, may still be done later, or not at all.
    OutcomeUnknown,
    /// There is no room for a new record. The operation was not done.
    Full,
    /// The store answered with an error. The operation was not done.
    Backend,
    /// The store rolled back everything that the handler did through it (a serialization failure,
    /// a deadlock). The whole unit may run again.
    RolledBack,
}

impl StoreError {
    /// An error of `store` while doing `operation`.
    #[must_use]
    pub fn new(kind: StoreErrorKind, store: &'static str, operation: &'static str) -> Self {
        Self(Box::new(Inner { kind, store, operation, source: None, says_why: false }))
    }

    /// Adds the cause.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.0.source = Some(source.into());
        self
    }

    /// Says the cause itself, for readers who want to know what to change.
    #[cfg(any(feature = "redis", feature = "postgres", feature = "sqlite"))]
    #[must_use]
    pub(crate) fn saying_why(mut self) -> Self {
        self.0.says_why = true;
        self
    }

    /// The same, and it means something else.
    #[cfg(feature = "redis")]
    #[must_use]
    pub(crate) fn of_kind(mut self, kind: StoreErrorKind) -> Self {
        self.0.kind = kind;
        self
    }

    /// The cause, whether it is told by `Display` already or not.
    #[must_use]
    pub fn reason(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_deref().map(|source| source as _)
    }

    /// It with all its causes on one line, each told once: for logs.
    pub(crate) fn in_full(&self) -> InFull<'_> {
        InFull(self)
    }

    /// What it means.
    #[must_use]
    pub fn kind(&self) -> StoreErrorKind {
        self.0.kind
    }

    /// The store's name, for example `redis`.
    #[must_use]
    pub fn store(&self) -> &'static str {
        self.0.store
    }

    /// The verb, for example `claim`.
    #[must_use]
    pub fn operation(&self) -> &'static str {
        self.0.operation
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { kind, store, operation, source, says_why } = &*self.0;
        if let (Some(cause), true) = (source, says_why) {
            return write!(f, "{store} store, {operation}: {cause}");
        }
        let meaning = match kind {
            StoreErrorKind::Unavailable => "is unavailable",
            StoreErrorKind::OutcomeUnknown => "did not say whether it was done",
            StoreErrorKind::Full => "has no room",
            StoreErrorKind::Backend => "answered with an error",
            StoreErrorKind::RolledBack => "rolled the unit back",
        };
        write!(f, "{store} store, {operation}: {meaning}")
    }
}

impl fmt::Debug for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { kind, store, operation, source, says_why: _ } = &*self.0;
        f.debug_struct("StoreError")
            .field("kind", kind)
            .field("store", store)
            .field("operation", operation)
            .field("source", source)
            .finish()
    }
}

impl StdError for StoreError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        let cause = self.reason()?;
        if self.0.says_why { untold(&cause.to_string(), cause) } else { Some(cause) }
    }
}

/// An error with all its causes.
pub(crate) struct InFull<'a>(&'a StoreError);

impl fmt::Display for InFull<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut told = self.0.to_string();
        let mut next: Option<&(dyn StdError + 'static)> = self.0.source();
        while let Some(cause) = next {
            let words = cause.to_string();
            if !told.contains(&words) {
                told = format!("{told}: {words}");
            }
            next = cause.source();
        }
        f.write_str(&told)
    }
}

/// Nothing was heard in time. Names the limit, so that who reads it knows what to set.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("no answer within {within:?} ({limit}){}{}", .holdup.map_or("", |_| ": "), .holdup.unwrap_or_default())]
pub(crate) struct NoAnswer {
    pub(crate) within: Duration,
    pub(crate) limit: &'static str,
    /// What it waited for, if the store knows.
    pub(crate) holdup: Option<&'static str>,
}

/// The first cause that has not been told: some errors say with their own words what their cause says again, and whoever
/// prints a chain of causes would print it twice.
pub(crate) fn untold<'a>(
    told: &str,
    error: &'a (dyn StdError + 'static),
) -> Option<&'a (dyn StdError + 'static)> {
    std::iter::successors(error.source(), |&cause| cause.source())
        .find(|cause| !told.contains(&cause.to_string()))
}

/// A checkpoint was not made, or cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// Somebody else holds the key, or its outcome is settled. The handler must stop.
    #[error("the lease is lost: another attempt holds the key, or it is settled")]
    LeaseLost,
    /// The store did not confirm it in time. It may have been made all the same.
    #[error("the checkpoint is not confirmed")]
    Unconfirmed(#[source] StoreError),
    /// It is too long to be kept in a record.
    #[error("a checkpoint of {length} bytes; at most {max} are kept")]
    TooLarge {
        /// How long it is.
        length: usize,
        /// How long it may be.
        max: usize,
    },
    /// The state cannot be written as JSON.
    #[error("the state of a checkpoint cannot be written")]
    Encode(#[source] serde_json::Error),
    /// What is there is no such state.
    #[error("a checkpoint holds something else")]
    Decode(#[source] serde_json::Error),
    /// It was written by a later release.
    #[error("a checkpoint of an unknown version")]
    Version,
}

/// Why the layer answered a request itself. Stands in the extensions of every such response, so that
/// a layer outside can count or log it. Carries no status code: that is the edge's decision.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Rejection {
    kind: RejectionKind,
    retry_after: Option<Duration>,
    reference: Option<String>,
}

/// Why a request was refused.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum RejectionKind {
    /// The route requires a key and the request has none.
    KeyMissing,
    /// The key breaks a rule.
    KeyInvalid(KeyError),
    /// The key was used with another request.
    KeyReused,
    /// The operation is running.
    KeyInUse,
    /// The operation may have happened, and nobody can know.
    OutcomeUnknown,
    /// The handler panicked, or its answer broke off, in this very request.
    HandlerFailed,
    /// The handler failed in this very request, and the store undid everything that it wrote: the
    /// key is free, and the same request may be sent again.
    RolledBack,
    /// The handler panicked in this very request, before it did anything: its effects are
    /// [marked](crate::Effects::Marked), and none was.
    HandlerFailedUntouched,
    /// The operation is done, and its answer was not kept.
    ResultUnavailable {
        /// The status of the original answer.
        status: StatusCode,
        /// Where the result is, if the original said so.
        location: Option<HeaderValue>,
    },
    /// The body is longer than the limit, in bytes.
    RequestTooLarge {
        /// The limit.
        limit: usize,
    },
    /// The body ended early, or did not come in time.
    RequestIncomplete,
    /// The store cannot be asked, or the server is shutting down.
    StoreUnavailable,
    /// The key's record cannot be read by this release or configuration.
    RecordUnreadable,
    /// The request has no identity to keep its keys apart by.
    ScopeMissing,
    /// The caller may not see the stored answer any more.
    ReplayForbidden,
    /// Too many requests wait for running operations already.
    TooManyWaiting,
    /// The caller has too many operations in flight in this process already.
    TooManyInFlight,
}

impl Rejection {
    /// A refusal of this kind.
    #[must_use]
    pub fn new(kind: RejectionKind) -> Self {
        Self { kind, retry_after: None, reference: None }
    }

    /// Adds when it makes sense to ask again.
    #[must_use]
    pub fn with_retry_after(mut self, retry_after: Duration) -> Self {
        self.retry_after = Some(retry_after);
        self
    }

    /// Adds what an operator finds the record by.
    #[must_use]
    pub fn with_reference(mut self, reference: String) -> Self {
        self.reference = Some(reference);
        self
    }

    /// What an operator finds the record by: the short name of its storage key, as in logs. There is
    /// one where the outcome is unknown.
    #[must_use]
    pub fn reference(&self) -> Option<&str> {
        self.reference.as_deref()
    }

    /// Why.
    #[must_use]
    pub fn kind(&self) -> &RejectionKind {
        &self.kind
    }

    /// When it makes sense to ask again.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        self.retry_after
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_error_is_one_word_wide_and_keeps_its_source() {
        assert_eq!(size_of::<StoreError>(), size_of::<usize>());
        let error = StoreError::new(StoreErrorKind::Unavailable, "redis", "claim")
            .with_source(std::io::Error::other("refused"));
        assert_eq!(error.to_string(), "redis store, claim: is unavailable");
        assert_eq!(StdError::source(&error).unwrap().to_string(), "refused");
        assert_eq!(error.in_full().to_string(), "redis store, claim: is unavailable: refused");
    }

    #[cfg(any(feature = "redis", feature = "postgres", feature = "sqlite"))]
    #[test]
    fn an_error_that_says_why_says_it_once() {
        #[derive(Debug, thiserror::Error)]
        #[error("nobody listens ({0})")]
        struct Repeating(#[source] std::io::Error);

        #[derive(Debug, thiserror::Error)]
        #[error("no connection")]
        struct Silent(#[source] std::io::Error);

        let refused = || std::io::Error::other("refused");
        let error = StoreError::new(StoreErrorKind::Unavailable, "redis", "connect");
        assert_eq!(error.to_string(), "redis store, connect: is unavailable");
        let error = error.with_source(Repeating(refused())).saying_why();
        assert_eq!(error.to_string(), "redis store, connect: nobody listens (refused)");
        assert_eq!(error.in_full().to_string(), error.to_string(), "and here as well");
        assert!(StdError::source(&error).is_none(), "it has been said");
        assert!(error.reason().unwrap().is::<Repeating>());
        let error = error.with_source(Silent(refused()));
        assert_eq!(error.to_string(), "redis store, connect: no connection");
        assert_eq!(StdError::source(&error).unwrap().to_string(), "refused");
    }
}
