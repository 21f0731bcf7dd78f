//! Mistakes that others have made, as switches: the suite must go red for each of them.
//!
//! Without the feature `mistakes` this is a constant `false`. With it, which only `tests/mistakes`
//! asks for, the one mistake is made that the environment variable `IDEMPOTENCY_MISTAKE` names.
//!
//! The first ones are made in Rust: in the rules, which the memory store follows and a plain claim of Redis, or above any
//! store. Those that begin with `Script` are made in the text of a Lua script (`store/redis/mistaken.rs`) and
//! those with `Redis` around the scripts; the rules, and with them the memory store, stay right.
//!
//! The model has two more, which are mistakes of an application. To rely downstream on a fence instead of
//! deduplication (r8) is [`FenceDownstream`](Mistake::FenceDownstream) here. To look and then open the key (r9) is to
//! settle it without asking whether it is still the one that was judged,
//! [`ResolveAnything`](Mistake::ResolveAnything) and its script; that a handler which sleeps meanwhile still acts
//! downstream, no store can help.

/// A mistake that can be switched on.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[cfg_attr(
    not(all(feature = "mistakes", feature = "redis")),
    allow(dead_code, reason = "what replaces a piece of a script is not there")
)]
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
    /// `resolve` leaves the holder: whoever completes late is not told what was found.
    ResolveUnfenced,
    /// `forget` removes whatever it finds.
    ForgetAnything,
    /// A run that takes over counts as untouched.
    TakeoverIsUntouched,
    /// The handler runs in the connection's future, and dies with it.
    RunsInConnection,
    /// The downstream key is that of a run and not of the operation: late runs are kept out, and the next one
    /// repeats the effect.
    FenceDownstream,
    /// claim.lua compares the request only when nothing is in flight.
    ScriptStateBeforeRequest,
    /// claim.lua takes a record of another version for none, and what is seen before it does not object.
    ScriptUnreadableIsAbsent,
    /// claim.lua runs again what may have acted, although the route refuses that.
    ScriptRunsWhatExpired,
    /// claim.lua lets a run that takes over count as untouched.
    ScriptTakeoverIsUntouched,
    /// renew.lua does not look who holds the key.
    ScriptRenewsForAnybody,
    /// complete.lua does not look who holds the key, nor whether there is an answer.
    ScriptCompletesForAnybody,
    /// complete.lua gives the loser an answer without a comparison of the requests.
    ScriptLoserComparesNothing,
    /// complete.lua writes nothing where the same answer is stored: then a WAIT waits for nothing.
    ScriptStoredAgainIsNotWritten,
    /// complete_large.lua does not look who holds the key, nor whether there is an answer.
    ScriptCompletesLargeForAnybody,
    /// complete_large.lua gives the loser an answer without a comparison of the requests.
    ScriptLoserOfLargeComparesNothing,
    /// release.lua does not look who holds the key.
    ScriptReleasesForAnybody,
    /// resolve.lua settles whatever it finds.
    ScriptResolvesAnything,
    /// resolve.lua leaves the holder: whoever completes late is not told what was found.
    ScriptResolvesUnfenced,
    /// amend.lua puts its answer in the place of any other.
    ScriptAmendsAnything,
    /// forget.lua removes whatever it finds.
    ScriptForgetsAnything,
    /// A record dies with its lease, from its first claim and from each renewal on.
    RedisOneTime,
    /// The script that follows a plain claim names another holder.
    RedisFreshHolder,
    /// What too few replicas have is believed.
    RedisWaitIsNotCounted,
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
