//! Mistakes that others have made, as switches: the suite must go red for each of them.
//!
//! Without the feature `mistakes` this is a constant `false`. With it, which only `tests/mistakes`
//! asks for, the one mistake is made that the environment variable `IDEMPOTENCY_MISTAKE` names.

/// A mistake that can be switched on.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Mistake {
    /// `complete` does not look who holds the key.
    CompleteByAnybody,
    /// `release` does not look who holds the key.
    ReleaseByAnybody,
    /// The record dies with its lease: one time where two are needed.
    OneTime,
    /// An answer that was not stored is given although the handler may run again.
    AnswerUnstored,
    /// A claim that is sent again names another holder.
    FreshHolder,
    /// A server error or a panic frees the key.
    ErrorsFreeTheKey,
    /// The loser of a completion is given an answer without a comparison of the requests.
    LoserComparesNothing,
    /// The request is compared only when nothing is in flight.
    StateBeforeRequest,
    /// A record that cannot be read is taken for none.
    UnreadableIsAbsent,
    /// `resolve` settles whatever it finds.
    ResolveAnything,
    /// `forget` removes whatever it finds.
    ForgetAnything,
    /// A run that takes over counts as untouched.
    TakeoverIsUntouched,
    /// The handler runs in the connection's future, and dies with it.
    RunsInConnection,
}

/// True if the mistake is switched on.
#[cfg(not(feature = "mistakes"))]
#[inline]
pub(crate) const fn made(_: Mistake) -> bool {
    false
}

/// True if the mistake is switched on.
#[cfg(feature = "mistakes")]
pub(crate) fn made(mistake: Mistake) -> bool {
    static SWITCHED_ON: std::sync::OnceLock<Option<String>> = std::sync::OnceLock::new();
    let on = SWITCHED_ON.get_or_init(|| std::env::var("IDEMPOTENCY_MISTAKE").ok());
    on.as_deref().is_some_and(|on| on == format!("{mistake:?}"))
}
