//! What went wrong, and what that means for the caller.

use std::borrow::Cow;
use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use ::redis::{ErrorKind, RedisError};

use super::Cause;
use super::reasons::{self, ENCODED, PASSWORD_MISSING};
use crate::error::{StoreErrorKind, untold};

/// Why there is no reply that a script gave.
#[derive(Debug)]
pub(in crate::store::redis) enum Failure {
    /// Nothing was sent.
    NotSent(Cause),
    /// The server refused: it answered with an error, and nothing was done.
    Refused(RedisError),
    /// It was sent, or may have been, and there is no answer.
    NoAnswer(Cause),
}

impl Failure {
    pub(super) fn of_reply(error: RedisError) -> Self {
        if is_answer(&error) { Self::Refused(error) } else { Self::NoAnswer(error.into()) }
    }

    /// What it means for the caller.
    pub(in crate::store::redis) fn kind(&self) -> StoreErrorKind {
        match self {
            Self::NotSent(cause) => match causes(&**cause).find_map(|it| it.downcast_ref()) {
                Some(dial_error) => DialError::kind(dial_error),
                None => StoreErrorKind::Unavailable,
            },
            Self::NoAnswer(_) => StoreErrorKind::OutcomeUnknown,
            // Made on this side, of what went through in part.
            Self::Refused(error) if !is_answer(error) => StoreErrorKind::OutcomeUnknown,
            Self::Refused(error) => refusal(error),
        }
    }

    pub(in crate::store::redis) fn into_cause(self) -> Cause {
        self.into_cause_for(None)
    }

    /// The same, with advice for this user.
    pub(in crate::store::redis) fn into_cause_for(self, user: Option<&str>) -> Cause {
        match self {
            Self::NotSent(cause) => Box::new(Told(cause)),
            Self::NoAnswer(cause) => Box::new(Told(match cause.downcast::<RedisError>() {
                Ok(error) => Box::new(Explained { words: BROKE.into(), error: *error }),
                Err(cause) => cause,
            })),
            Self::Refused(error) => Box::new(Told(match reasons::of_refusal(&error, user) {
                Some(words) => Box::new(Explained { words, error }),
                None => error.into(),
            })),
        }
    }
}

/// What the library says of a line that ends is the system's word for it.
const BROKE: &str = "the connection broke before the answer came";

/// An error in the words of who has to do something about it, and as it was told here.
#[derive(Debug, thiserror::Error)]
#[error("{words} ({error})")]
struct Explained {
    words: Cow<'static, str>,
    #[source]
    error: RedisError,
}

/// Why no connection could be made.
#[derive(thiserror::Error)]
pub(in crate::store::redis) enum DialError {
    #[error(transparent)]
    Failed(#[from] RedisError),
    #[error(
        "the server does not let the user {user:?} in ({reason}): user or password in the address is \
         wrong, or the user is off; `ACL LIST` on the server shows the users; a password in an address \
         is {ENCODED}"
    )]
    Login { user: Box<str>, reason: Box<str> },
    #[error("no entry at {place} ({reason}): {PASSWORD_MISSING}")]
    PasswordMissing { place: Box<str>, reason: Box<str> },
    #[error(
        "the Sentinel {place} does not let us in ({reason}): its password is set by \
         `RedisStore::builder().sentinel_password(..)`; the one in the address is for the servers"
    )]
    SentinelLogin { place: Box<str>, reason: Box<str> },
    #[error(
        "{place} is no Sentinel, it does not know the command SENTINEL: name the Sentinels, whose usual \
         port is 26379; or, if it is a server with records and no group is watched, write \
         redis://{place}"
    )]
    NotASentinel { place: Box<str> },
    #[error("no Sentinel watches a master named {name:?}; {}", watched(.known))]
    UnknownMaster { name: Box<str>, known: Vec<String> },
    #[error("{}", reasons::unreached(.place, .error))]
    Unreached { place: Box<str>, error: RedisError },
    #[error(
        "the server at {place} is not of the cluster that this program is connected to ({reason}): another one has its \
         address now; if the cluster was made anew, start the program again"
    )]
    Stranger { place: Box<str>, reason: Box<str> },
    #[error("no TLS with {place} ({reason}): {advice}")]
    Certificate { place: Box<str>, reason: Box<str>, advice: &'static str },
    #[error("{place} refuses database {database} ({reason}): {advice}")]
    Select { place: Box<str>, database: i64, reason: Box<str>, advice: &'static str },
    #[error("the pool's server refuses the database ({reason}): {advice}")]
    PoolSelect { reason: Box<str>, advice: &'static str },
    #[error(
        "the server does not let the pool in ({reason}): user or password in the address that the pool \
         was made with is wrong, or the user is off; `ACL LIST` on the server shows the users; a password \
         in an address is {ENCODED}"
    )]
    PoolLogin { reason: Box<str> },
}

/// As it is displayed: programs whose `main` returns an error print it like this.
impl fmt::Debug for DialError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl DialError {
    /// Whether it may pass by itself.
    fn kind(&self) -> StoreErrorKind {
        match self.redis() {
            Some(error) if is_answer(error) => refusal(error),
            Some(_) => StoreErrorKind::Unavailable,
            // Another node takes its slots over, or it gets its address back.
            None if matches!(self, Self::Stranger { .. }) => StoreErrorKind::Unavailable,
            None => StoreErrorKind::Backend,
        }
    }

    /// What redis-rs said, if nobody has said it better.
    fn redis(&self) -> Option<&RedisError> {
        match self {
            Self::Failed(error) | Self::Unreached { error, .. } => Some(error),
            Self::Login { .. }
            | Self::PasswordMissing { .. }
            | Self::PoolLogin { .. }
            | Self::Select { .. }
            | Self::PoolSelect { .. }
            | Self::Certificate { .. }
            | Self::Stranger { .. }
            | Self::SentinelLogin { .. }
            | Self::NotASentinel { .. }
            | Self::UnknownMaster { .. } => None,
        }
    }

    pub(super) fn may_pass(&self) -> bool {
        self.kind() == StoreErrorKind::Unavailable
    }
}

fn watched(known: &[String]) -> String {
    if known.is_empty() {
        return "they watch none".to_owned();
    }
    format!("they watch {}: redis+sentinel://…/{}", known.join(", "), known[0])
}

/// True if the server said it, false if the connection failed under us.
pub(in crate::store::redis) fn is_answer(error: &RedisError) -> bool {
    // An extension is a code that redis-rs has no name for. All other kinds are made on this side.
    matches!(error.kind(), ErrorKind::Server(_) | ErrorKind::Extension)
}

/// What the server's refusal means. A script writes to the record once, as the last thing it does, so a
/// refusal always means that nothing was done to it.
fn refusal(error: &RedisError) -> StoreErrorKind {
    match error.code() {
        Some("OOM") => StoreErrorKind::Full,
        Some(
            "READONLY" | "LOADING" | "MASTERDOWN" | "BUSY" | "CLUSTERDOWN" | "TRYAGAIN" | "MISCONF"
            | "NOREPLICAS",
        ) => StoreErrorKind::Unavailable,
        // NOPERM, NOAUTH, an error in a script: it does not pass by waiting.
        Some(_) | None => StoreErrorKind::Backend,
    }
}

/// The error of a command that went through while a question beside it was refused. If that refusal passes, it would
/// say that nothing was done; the others say what to change.
pub(in crate::store::redis) fn in_part(error: RedisError) -> RedisError {
    if refusal(&error) != StoreErrorKind::Unavailable {
        return error;
    }
    let words = "the command went through, and the server refused a question beside it";
    RedisError::from((ErrorKind::Client, words, error.to_string()))
}

/// True if the server is a replica. It will refuse every write on this connection for ever, while a
/// new connection, by name or through a proxy, may lead to the primary.
pub(super) fn is_readonly(error: &RedisError) -> bool {
    error.code() == Some("READONLY")
}

/// True if it is user or password that is refused.
pub(super) fn is_about_login(error: &RedisError) -> bool {
    error.kind() == ErrorKind::AuthenticationFailed
        || matches!(error.code(), Some("WRONGPASS" | "NOAUTH"))
}

pub(in crate::store::redis) fn is_unknown_command(error: &RedisError) -> bool {
    is_answer(error) && error.to_string().contains("unknown command")
}

/// True if nobody knows why there is no connection: it broke, or nobody answered, or what came made no
/// sense.
pub(in crate::store::redis) fn may_be_the_protocol(cause: &(dyn StdError + 'static)) -> bool {
    match causes(cause).find_map(|it| it.downcast_ref()) {
        Some(error) => DialError::redis(error).is_some_and(|error| !is_answer(error)),
        None => true,
    }
}

/// True if a server said it, and not one that could not be asked.
pub(in crate::store::redis) fn is_told(error: &(dyn StdError + 'static)) -> bool {
    redis_error(error).is_some_and(is_answer)
}

/// What redis-rs said, if that is what an error comes from.
pub(in crate::store::redis) fn redis_error<'a>(
    error: &'a (dyn StdError + 'static),
) -> Option<&'a RedisError> {
    causes(error).find_map(|cause| match cause.downcast_ref() {
        Some(error) => DialError::redis(error),
        None => cause.downcast_ref(),
    })
}

/// An error and where it comes from, also what is left out when it is told.
fn causes<'a>(
    error: &'a (dyn StdError + 'static),
) -> impl Iterator<Item = &'a (dyn StdError + 'static)> {
    std::iter::successors(Some(error), |&error| match error.downcast_ref() {
        Some(Told(inner)) => Some(&**inner as _),
        None => error.source(),
    })
}

/// An error whose causes say something new; those of redis-rs repeat theirs.
struct Told(Cause);

impl fmt::Debug for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl fmt::Display for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl StdError for Told {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        untold(&self.0.to_string(), &*self.0)
    }
}

/// Why there is no connection: what the last attempt said.
pub(super) struct NoConnection(pub(super) Option<Arc<DialError>>);

impl fmt::Debug for NoConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for NoConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Some(error) => write!(f, "no connection: {error}"),
            None => f.write_str("no connection"),
        }
    }
}

impl StdError for NoConnection {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.as_deref().map(|error| error as _)
    }
}

/// A step that took too long.
#[derive(Clone, Copy, Debug, thiserror::Error)]
pub(super) enum TooLong {
    #[error("no connection within {0:?} (the store's call_timeout)")]
    Connection(Duration),
    #[error("no free slot in the pool within {0:?} (the store's call_timeout)")]
    Slot(Duration),
    #[error("no free slot in the pool within {0:?} (three quarters of the store's call_timeout)")]
    Seat(Duration),
    #[error(
        "no connection was free to wait for replicas on within {0:?} (the store's call_timeout)"
    )]
    Lane(Duration),
    #[error("no answer within {0:?} (the store's call_timeout)")]
    Reply(Duration),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(code: &str) -> Failure {
        Failure::of_reply(::redis::make_extension_error(code.to_owned(), None))
    }

    #[test]
    fn what_the_server_refuses_was_not_done() {
        let kinds = [
            ("OOM", StoreErrorKind::Full),
            ("READONLY", StoreErrorKind::Unavailable),
            ("BUSY", StoreErrorKind::Unavailable),
            ("LOADING", StoreErrorKind::Unavailable),
            ("MASTERDOWN", StoreErrorKind::Unavailable),
            ("MISCONF", StoreErrorKind::Unavailable),
            ("NOPERM", StoreErrorKind::Backend),
            ("ERR", StoreErrorKind::Backend),
        ];
        for (code, kind) in kinds {
            assert_eq!(answer(code).kind(), kind, "{code}");
        }
    }

    #[test]
    fn a_connection_that_breaks_leaves_the_outcome_unknown() {
        use std::io::{Error, ErrorKind};
        for kind in [ErrorKind::BrokenPipe, ErrorKind::ConnectionReset, ErrorKind::TimedOut] {
            let failure = Failure::of_reply(Error::from(kind).into());
            assert_eq!(failure.kind(), StoreErrorKind::OutcomeUnknown, "{kind:?}");
        }
    }

    #[test]
    fn no_cause_is_told_twice_and_redis_is_found_behind_all_of_them() {
        let refused = || RedisError::from(std::io::Error::from_raw_os_error(111));
        let words = refused().to_string();
        let dialed = NoConnection(Some(Arc::new(refused().into())));
        for cause in [refused().into(), Cause::from(dialed)] {
            let told = Failure::NotSent(cause).into_cause();
            assert_eq!(told.to_string().matches(&words).count(), 1, "{told}");
            assert!(told.source().is_none(), "{told} has been said");
            assert!(redis_error(&*told).is_some_and(RedisError::is_connection_refusal), "{told}");
        }
    }
}
