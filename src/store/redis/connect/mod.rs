//! Where connections come from, and what becomes of them when something goes wrong.
//!
//! Two providers: connections of our own that are watched and replaced, and a pool that the program
//! runs already. Neither repeats a call: a script that may have run is reported as such, and
//! whoever knows the claim decides.

mod address;
mod cluster;
mod dial;
mod failure;
mod follow;
mod kin;
mod lanes;
mod link;
mod node;
mod pool;
mod reasons;
mod resp;
mod restart;
mod sentinel;
mod shared;
mod slips;
mod stream;
mod votes;
mod wire;

use std::fmt;
use std::time::Duration;

use ::redis::{Cmd, Pipeline, Value};
use tokio::time::Instant;

pub(super) use address::{
    Address, AddressError, Certificates, shown, take_wait, tls_is_possible_for,
};
pub(super) use cluster::Cluster;
pub(super) use dial::Dialer;
pub(super) use failure::{
    DialError, Failure, in_part, is_answer, is_told, is_unknown_command, may_be_the_protocol,
    redis_error,
};
pub(super) use node::Node;
pub(super) use pool::Pooled;
pub(super) use reasons::{PASSWORD_MISSING, is_about_rights};
pub(super) use shared::Asked;
pub(super) use slips::find_slip;

use failure::{NoConnection, TooLong, is_about_login, is_readonly};

use super::call::{Answer, Call};

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
    /// Runs a script now. Takes at most twice the call timeout: once for a connection, once for a reply.
    pub(super) fn run<'a>(&'a self, call: &'a Call, urgency: Urgency, now: Instant) -> Asked<'a> {
        let message = Message::Script { call, asking: false };
        match self {
            Self::Node(node) => node.run_from(message, urgency, now),
            Self::Pool(pool) => Asked::boxed(pool.run(message, urgency)),
            Self::Cluster(cluster) => Asked::boxed(cluster.run(call, urgency)),
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

    /// How many slots of a cluster are assigned to nobody: their keys are refused.
    pub(super) fn slots_of_nobody(&self) -> usize {
        match self {
            Self::Node(_) | Self::Pool(_) => 0,
            Self::Cluster(cluster) => cluster.slots_of_nobody(),
        }
    }

    /// The servers that take writes, by name.
    pub(super) fn primaries(&self) -> Vec<String> {
        match self {
            Self::Node(_) | Self::Pool(_) => vec![String::new()],
            Self::Cluster(cluster) => cluster.primaries(),
        }
    }

    /// A key for a check on each server that takes writes, with the server's name if there are several.
    pub(super) fn marks(&self, prefix: &str) -> Vec<(Option<String>, String)> {
        let marks = match self {
            Self::Node(_) | Self::Pool(_) => Vec::new(),
            Self::Cluster(cluster) => cluster.marks(prefix),
        };
        if marks.is_empty() {
            return vec![(None, format!("{prefix}:{{ready}}"))];
        }
        marks.into_iter().map(|(name, mark)| (Some(name), mark)).collect()
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
