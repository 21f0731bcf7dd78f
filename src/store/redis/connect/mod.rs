//! Where connections come from, and what becomes of them when something goes wrong.
//!
//! Two providers: connections of our own that are watched and replaced, and a pool that the program
//! runs already. Neither repeats a call: a script that may have run is reported as such, and
//! whoever knows the claim decides.

mod address;
mod cluster;
mod dial;
mod lanes;
mod link;
mod node;
mod pool;
mod resp;
mod sentinel;
mod shared;
mod stream;
mod wire;

use std::fmt;
use std::time::Duration;

use ::redis::{Cmd, ErrorKind, Pipeline, RedisError, Value};

pub(super) use address::{Address, AddressError, Certificates};
pub(super) use cluster::Cluster;
pub(super) use dial::Dialer;
pub(super) use node::Node;
pub(super) use pool::Pooled;

use super::call::{Answer, Call};
use crate::error::StoreErrorKind;

pub(super) type Cause = Box<dyn std::error::Error + Send + Sync>;

/// How long a call waits for a connection, and then again for its reply.
///
/// A healthy Redis answers within a few milliseconds. Six tenths of a second ride over most pauses,
/// and let the engine send a claim several times before its client runs out of patience.
pub(super) const CALL_TIMEOUT: Duration = Duration::from_millis(600);

/// How long it may take to make a connection: name, TCP, authentication.
///
/// One lost SYN is sent again after a second, so two seconds survive one; and a start against a
/// frozen server fails within three, the version check included.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Which calls may wait for which.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Urgency {
    /// A claim may wait: nothing runs yet.
    Ordinary,
    /// A handler runs, or has run: its renewal and its completion must not queue behind claims.
    Urgent,
}

/// Why there is no reply that a script gave.
#[derive(Debug)]
pub(super) enum Failure {
    /// Nothing was sent.
    NotSent(Cause),
    /// The server refused: it answered with an error, and nothing was done.
    Refused(RedisError),
    /// It was sent, or may have been, and there is no answer.
    NoAnswer(Cause),
}

impl Failure {
    fn of_reply(error: RedisError) -> Self {
        if is_answer(&error) { Self::Refused(error) } else { Self::NoAnswer(error.into()) }
    }

    /// What it means for the caller.
    pub(super) fn kind(&self) -> StoreErrorKind {
        match self {
            Self::NotSent(_) => StoreErrorKind::Unavailable,
            Self::NoAnswer(_) => StoreErrorKind::OutcomeUnknown,
            Self::Refused(error) => refusal(error),
        }
    }

    pub(super) fn into_cause(self) -> Cause {
        match self {
            Self::NotSent(cause) | Self::NoAnswer(cause) => cause,
            Self::Refused(error) => error.into(),
        }
    }
}

/// True if the server said it, false if the connection failed under us.
fn is_answer(error: &RedisError) -> bool {
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

/// True if the server is a replica. It will refuse every write on this connection for ever, while a
/// new connection, by name or through a proxy, may lead to the primary.
fn is_readonly(error: &RedisError) -> bool {
    error.code() == Some("READONLY")
}

/// A step that took too long.
#[derive(Clone, Copy, Debug, thiserror::Error)]
pub(super) enum TooLong {
    #[error("no connection within {0:?}")]
    Connection(Duration),
    #[error("no free slot in the pool within {0:?}")]
    Slot(Duration),
    #[error("no connection was free to wait for replicas on within {0:?}")]
    Lane(Duration),
    #[error("no reply within {0:?}")]
    Reply(Duration),
}

/// What is sent.
#[derive(Clone, Copy)]
pub(super) enum Message<'a> {
    /// A script. `asking` is for a node that takes a slot over and has been named by its owner.
    Script { call: &'a Call, asking: bool },
    /// A command that changes nothing.
    Question(&'a Cmd),
    /// Several of them.
    Questions(&'a Pipeline),
}

impl Message<'_> {
    fn waits(&self) -> bool {
        matches!(self, Self::Script { call, .. } if call.waits())
    }

    fn fell_short(&self, answer: &Answer) -> bool {
        matches!(self, Self::Script { call, .. } if call.shortfall(answer).is_some())
    }
}

/// Where connections come from.
pub(super) enum Connections {
    Node(Node),
    Pool(Pooled),
    Cluster(Cluster),
}

impl Connections {
    /// Runs a script. Takes at most twice the call timeout: once for a connection, once for a reply.
    pub(super) async fn run(&self, call: &Call, urgency: Urgency) -> Result<Answer, Failure> {
        let message = Message::Script { call, asking: false };
        match self {
            Self::Node(node) => node.run(message, urgency).await,
            // Their futures are several times as large, and would make that of every call as large.
            Self::Pool(pool) => Box::pin(pool.run(message, urgency)).await,
            Self::Cluster(cluster) => Box::pin(cluster.run(call, urgency)).await,
        }
    }

    /// How long a script takes at most.
    pub(super) fn answer_within(&self) -> Duration {
        let call_timeout = match self {
            Self::Node(node) => node.call_timeout(),
            Self::Pool(pool) => pool.call_timeout(),
            Self::Cluster(cluster) => cluster.call_timeout(),
        };
        call_timeout.saturating_mul(2)
    }

    pub(super) fn are_a_cluster(&self) -> bool {
        matches!(self, Self::Cluster(_))
    }

    /// The servers that take writes, by name.
    pub(super) fn primaries(&self) -> Vec<String> {
        match self {
            Self::Node(_) | Self::Pool(_) => vec![String::new()],
            Self::Cluster(cluster) => cluster.primaries(),
        }
    }

    /// Asks one of them; each question is answered or refused by itself.
    pub(super) async fn ask_one(
        &self,
        primary: &str,
        questions: &Pipeline,
    ) -> Result<Vec<Value>, Failure> {
        let message = Message::Questions(questions);
        let answer = match self {
            Self::Node(node) => node.run(message, Urgency::Ordinary).await,
            Self::Pool(pool) => pool.run(message, Urgency::Ordinary).await,
            Self::Cluster(cluster) => cluster.ask_one(primary, message).await,
        };
        let value = answer?.value;
        // What was asked was several things.
        Ok(if let Value::Array(values) = value { values } else { Vec::new() })
    }

    /// Asks every server that takes writes.
    pub(super) async fn ask(&self, question: &Cmd) -> Vec<Result<Value, Failure>> {
        let message = Message::Question(question);
        let answer = match self {
            Self::Node(node) => node.run(message, Urgency::Urgent).await,
            Self::Pool(pool) => pool.run(message, Urgency::Urgent).await,
            Self::Cluster(cluster) => return cluster.ask(question).await,
        };
        vec![answer.map(|answer| answer.value)]
    }
}

impl fmt::Debug for Connections {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Never the client: it holds the password.
        f.write_str(match self {
            Self::Node(_) => "shared connection",
            Self::Pool(_) => "pool",
            Self::Cluster(_) => "cluster",
        })
    }
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
}
