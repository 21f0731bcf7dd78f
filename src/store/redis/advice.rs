//! What is wrong with a server that does not do what it should: asked once something has failed, so that an
//! operator reads what to change and not what a library thought of it.

use std::time::Duration;

use ::redis::{Cmd, ConnectionAddr, ConnectionInfo, Pipeline, RedisError, Value};
use futures_util::future::join_all;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::check::text;
use super::connect::{Address, Failure, is_about_rights, redis_error};
use super::errand::Errand;
use super::setup::{SetupError, pattern};
use super::{NAME, RedisStore, connect};
use crate::error::{StoreError, StoreErrorKind};

/// How long somebody may take to say whether they speak TLS.
const PROBED_WITHIN: Duration = Duration::from_secs(1);

/// Names that lie all over the slots of a cluster: a node with two thirds of them is taken for one with all
/// of them once in 10^11 starts.
const SPREAD: usize = 64;

impl RedisStore {
    /// Says what to change, if that is known, and else what has happened.
    pub(super) async fn explain(&self, error: StoreError, operation: &'static str) -> StoreError {
        self.advise(error, operation).await.saying_why()
    }

    async fn advise(&self, error: StoreError, operation: &'static str) -> StoreError {
        let is_cluster = self.0.connections.are_a_cluster();
        let cause = redis_error(&error).filter(|cause| connect::is_answer(cause));
        let Some(cause) = cause else {
            // The node that has the key is away, and the others may know more.
            let state = if is_cluster { self.failing().await } else { None };
            return match state {
                Some(state) => SetupError::ClusterDown(state).into_store_error(operation),
                None => error,
            };
        };
        let said = || Box::from(cause.to_string());
        let known = match cause.code() {
            Some("READONLY") => SetupError::Replica(self.primary().await),
            Some("NOAUTH") => SetupError::PasswordMissing(said()),
            Some("CLUSTERDOWN") if is_cluster => SetupError::ClusterDown(said()),
            Some("CLUSTERDOWN" | "MOVED" | "ASK") => SetupError::OneNodeOfCluster,
            _ if is_about_rights(cause) => {
                let (lack, keys) = (self.lacking(&SERVING).await, pattern(&self.0.prefix));
                let reason = said();
                match lack.commands.is_empty() && is_about_keys(&reason) {
                    true => {
                        let user = self.0.user.clone().unwrap_or_else(|| "USER".into());
                        SetupError::Keys { user, keys, reason }
                    }
                    false => SetupError::Rights { lack, keys, reason },
                }
            }
            _ if is_unknown_command(cause) => match self.watched().await {
                Some(name) => SetupError::Sentinel(name),
                None => return error,
            },
            _ => return error,
        };
        known.into_store_error(operation)
    }

    /// A part of the keys is elsewhere.
    pub(super) async fn is_one_node_of_a_cluster(&self) -> bool {
        if self.0.connections.are_a_cluster() {
            return false;
        }
        let mut questions = ::redis::pipe();
        for number in 0..SPREAD {
            questions.cmd("EXISTS").arg(format!("{}:{{ready:{number}}}", self.0.prefix));
        }
        let answers = self.0.connections.ask_one("", &questions).await.unwrap_or_default();
        let elsewhere = |answer: &Value| {
            let Value::ServerError(error) = answer else { return false };
            matches!(error.code(), "MOVED" | "ASK" | "CLUSTERDOWN")
        };
        answers.iter().any(elsewhere)
    }

    /// What a node of a cluster says of its state, if that is bad.
    async fn failing(&self) -> Option<Box<str>> {
        let mut question = Cmd::new();
        question.arg("CLUSTER").arg("INFO");
        let answers = self.0.connections.ask(&question).await;
        answers.into_iter().flatten().map(|answer| text(&answer)).find_map(|said| {
            let lines: Vec<_> = said.lines().take(5).map(str::trim).collect();
            lines.contains(&"cluster_state:fail").then(|| lines.join(", ").into())
        })
    }

    /// Whose replica the server is.
    async fn primary(&self) -> Option<Box<str>> {
        let mut question = Cmd::new();
        question.arg("ROLE");
        let Some(Ok(Value::Array(role))) = self.0.connections.ask(&question).await.pop() else {
            return None;
        };
        let [_, Value::BulkString(host), Value::Int(port), ..] = role.as_slice() else {
            return None;
        };
        Some(format!("{}:{port}", String::from_utf8_lossy(host)).into())
    }

    /// The name of a group that the server watches, if it is a Sentinel. The inner `None`: it watches
    /// nobody.
    async fn watched(&self) -> Option<Option<Box<str>>> {
        let mut question = Cmd::new();
        question.arg("ROLE");
        let Some(Ok(Value::Array(role))) = self.0.connections.ask(&question).await.pop() else {
            return None;
        };
        match role.as_slice() {
            [Value::BulkString(what), Value::Array(names)] if what == b"sentinel" => {
                let Some(Value::BulkString(name)) = names.first() else { return Some(None) };
                Some(Some(String::from_utf8_lossy(name).into()))
            }
            _ => None,
        }
    }

    /// Which of these commands the user may not run. A script that is refused one of them does not say which;
    /// outside of a script each is answered by itself.
    async fn lacking(&self, names: &[&'static str]) -> Lack {
        let questions = harmless(names, &self.no_mark());
        let mut lack = Lack { commands: Vec::new(), user: self.0.user.clone() };
        for primary in self.0.connections.primaries() {
            // What the user may do is looked at before where the key is.
            let answers = self.0.connections.ask_one(&primary, &questions).await;
            for (name, answer) in names.iter().zip(&answers.unwrap_or_default()) {
                let Value::ServerError(error) = answer else { continue };
                // And not that it may not touch the key.
                let of_command = error.details().is_some_and(|reason| reason.contains("to run"));
                if error.code() == "NOPERM" && of_command {
                    lack.commands.push(name);
                }
            }
        }
        lack.commands.sort_unstable();
        lack.commands.dedup();
        lack
    }

    /// Refuses a user who lacks a right for one of these errands, and names all that are missing.
    pub(super) async fn may(
        &self,
        errands: &[Errand],
        operation: &'static str,
    ) -> Result<(), StoreError> {
        let mut names = CONNECTING.to_vec();
        names.extend(errands.iter().flat_map(|errand| errand.commands()));
        names.sort_unstable();
        names.dedup();
        let lack = self.lacking(&names).await;
        match lack.commands.is_empty() {
            true => Ok(()),
            false => Err(SetupError::ErrandRights(lack).into_store_error(operation)),
        }
    }
}

/// What a user may not run.
#[derive(Debug)]
pub(super) struct Lack {
    pub(super) commands: Vec<&'static str>,
    user: Option<Box<str>>,
}

impl Lack {
    /// As `ACL SETUSER` takes it.
    pub(super) fn remedy(&self) -> String {
        let user = self.user.as_deref().unwrap_or("USER");
        format!("`ACL SETUSER {user} +{}`", self.commands.join(" +"))
    }
}

/// Every command that a request needs.
const SERVING: [&str; 13] = [
    "eval",
    "evalsha",
    "time",
    "get",
    "set",
    "getrange",
    "setrange",
    "strlen",
    "exists",
    "rename",
    "unlink",
    "pexpire",
    "pexpiretime",
];

/// What the first look at a server needs.
const CONNECTING: [&str; 4] = ["eval", "evalsha", "set", "time"];

/// The commands, so that they change nothing, with a key that is not there.
fn harmless(names: &[&'static str], key: &str) -> Pipeline {
    let no_script = "0".repeat(40);
    let mut pipeline = ::redis::pipe();
    for &name in names {
        let arguments: &[&str] = match name {
            "eval" => &["return 1", "1", key],
            "evalsha" => &[&no_script, "1", key],
            "time" | "dbsize" => &[],
            "set" => &[key, "1", "XX", "PX", "1"],
            "getrange" | "zrange" | "zremrangebyrank" => &[key, "0", "0"],
            "setrange" => &[key, "0", ""],
            "rename" => &[key, key],
            "pexpire" | "expire" => &[key, "1"],
            "scan" => &["0", "COUNT", "1"],
            "zadd" => &[key, "XX", "0", "mark"],
            // Nothing is written: a value is missing.
            "hset" => &[key, "field", "1", "field"],
            "xadd" => &[key, "NOMKSTREAM", "*", "field", "1"],
            "xrevrange" => &[key, "+", "-", "COUNT", "1"],
            _ => &[key],
        };
        pipeline.cmd(name).arg(arguments);
    }
    pipeline
}

/// The words for it differ between versions, and in scripts.
fn is_about_keys(reason: &str) -> bool {
    reason.contains("access") && reason.contains("key")
}

fn is_unknown_command(error: &RedisError) -> bool {
    connect::is_unknown_command(error)
}

/// What it means that nobody could be connected to.
pub(super) async fn of_no_connection(failure: Failure, address: &Address) -> StoreError {
    let known = match &failure {
        Failure::Refused(error) if matches!(address, Address::Cluster(_)) => of_no_map(error),
        Failure::NotSent(cause) if connect::may_be_the_protocol(&**cause) => {
            let places: Vec<_> = address.places().collect();
            join_all(places.iter().map(|info| misunderstood(info)))
                .await
                .into_iter()
                .flatten()
                .next()
        }
        Failure::NotSent(_) | Failure::NoAnswer(_) | Failure::Refused(_) => None,
    };
    if let Some(known) = known {
        return known.into_store_error("connect");
    }
    // Nothing of ours has been sent, so an outcome cannot be unknown.
    let mut kind = failure.kind();
    if kind == StoreErrorKind::OutcomeUnknown {
        kind = StoreErrorKind::Unavailable;
    }
    StoreError::new(kind, NAME, "connect").with_source(failure.into_cause()).saying_why()
}

/// Why a server does not say where the keys of a cluster are.
fn of_no_map(error: &RedisError) -> Option<SetupError> {
    let said = Box::from(error.to_string());
    match error.code() {
        Some("NOAUTH") => Some(SetupError::PasswordMissing(said)),
        Some("NOPERM") => Some(SetupError::ClusterRights(said)),
        _ if is_unknown_command(error) || said.contains("cluster support disabled") => {
            Some(SetupError::NotACluster(said))
        }
        _ => None,
    }
}

/// Whether a server speaks TLS and we do not, or the other way round. Nothing secret is sent.
async fn misunderstood(info: &ConnectionInfo) -> Option<SetupError> {
    let (host, port, tls) = match info.addr() {
        ConnectionAddr::Tcp(host, port) => (host, *port, false),
        ConnectionAddr::TcpTls { host, port, .. } => (host, *port, true),
        ConnectionAddr::Unix(_) => return None,
        // A kind that redis-rs may add.
        _ => return None,
    };
    let said = async {
        let mut stream = TcpStream::connect((host.as_str(), port)).await.ok()?;
        let word = if tls { &b"PING\r\n"[..] } else { &HELLO[..] };
        stream.write_all(word).await.ok()?;
        let mut said = [0; 2];
        stream.read_exact(&mut said).await.ok()?;
        Some(said)
    };
    let said = timeout(PROBED_WITHIN, said).await.ok()??;
    let place = format!("{host}:{port}").into();
    match (tls, said) {
        // `+PONG`, or an error.
        (true, [b'+' | b'-', _]) => Some(SetupError::SpeaksPlain(place)),
        // A handshake, or an alert because nothing in our hello pleases.
        (false, [0x16 | 0x15, 0x03]) => Some(SetupError::SpeaksTls(place)),
        _ => None,
    }
}

/// The shortest hello of TLS 1.2: whoever speaks TLS answers it with a handshake or an alert.
const HELLO: [u8; 52] = {
    let mut hello = [0; 52];
    // A record with a handshake, of 47 bytes; in it a hello, of 43 bytes; TLS 1.2.
    let head = [0x16, 3, 1, 0, 47, 1, 0, 0, 43, 3, 3];
    // After 32 bytes that ought to be random: no session, two suites, no compression.
    let tail = [0, 0, 4, 0xC0, 0x2F, 0xC0, 0x30, 1, 0];
    let mut at = 0;
    while at < head.len() {
        hello[at] = head[at];
        at += 1;
    }
    at = 0;
    while at < tail.len() {
        hello[head.len() + 32 + at] = tail[at];
        at += 1;
    }
    hello
};
