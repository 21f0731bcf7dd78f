//! Finding the primary of a group that Sentinels watch.
//!
//! They are asked each time a connection is made, all at once, so that a dead one costs nothing and
//! one that has not heard of a failover is outvoted. What they name is asked for its role: between a
//! failover and the news of it, it may be a replica.

use std::collections::HashMap;
use std::time::Duration;

use ::redis::aio::MultiplexedConnection;
use ::redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionInfo, ErrorKind, RedisError, RedisResult, Value,
};
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio::time::timeout;

use super::address;
use super::link::Line;
use super::votes::{Named, Place, Votes};
use super::{DialError, Failure, Message, dial, is_about_login, is_unknown_command, reasons};

pub(super) struct Sentinels {
    clients: Vec<Client>,
    name: Box<str>,
    primary: ConnectionInfo,
    /// For each step: an answer of a Sentinel, and the role of what they name.
    step: Duration,
}

impl Sentinels {
    pub(super) fn new(
        sentinels: Vec<ConnectionInfo>,
        name: Box<str>,
        primary: ConnectionInfo,
        step: Duration,
    ) -> RedisResult<Self> {
        let clients = sentinels.into_iter().map(Client::open).collect::<RedisResult<_>>()?;
        Ok(Self { clients, name, primary, step })
    }

    /// Connects to the primary. What is `known` counts until there is reason to believe something else.
    pub(super) async fn dial(
        &self,
        known: Option<Named>,
        config: &AsyncConnectionConfig,
        within: Duration,
    ) -> Result<(Line, Named), DialError> {
        let (places, mut failure) = self.places(known, config).await;
        for named in places {
            let (host, port) = &named.place;
            match self.dial_primary(host, *port, config, within).await {
                Ok(line) => return Ok((line, named)),
                Err(error) => failure = error,
            }
        }
        Err(failure)
    }

    /// Where the primary may be.
    async fn places(
        &self,
        known: Option<Named>,
        config: &AsyncConnectionConfig,
    ) -> (Vec<Named>, DialError) {
        let mut votes = Votes::of(self.clients.len());
        let mut failure = DialError::UnknownMaster { name: self.name.clone(), known: Vec::new() };
        let mut answers: FuturesUnordered<_> =
            self.clients.iter().map(|client| self.ask(client, config)).collect();
        while let Some(answer) = answers.next().await {
            match answer {
                Ok(named) => {
                    votes.add(named);
                    if votes.majority().is_some() {
                        break;
                    }
                }
                // One that is away may know what the others do not: that may pass.
                Err(error) if error.may_pass() || !failure.may_pass() => failure = error,
                Err(_) => {}
            }
        }
        let places = match known {
            _ if votes.is_empty() => Vec::new(),
            Some(known) => vec![votes.at_once(&known).unwrap_or(known)],
            None => votes.places(),
        };
        (places, failure)
    }

    /// Those who can be asked again and again, each by itself.
    pub(super) fn watchers(&self, config: &AsyncConnectionConfig) -> Vec<Watcher> {
        let watcher = |client: &Client| Watcher {
            client: client.clone(),
            name: self.name.clone(),
            config: config.clone(),
            connecting: self.step,
            line: None,
        };
        self.clients.iter().map(watcher).collect()
    }

    async fn ask(
        &self,
        client: &Client,
        config: &AsyncConnectionConfig,
    ) -> Result<Named, DialError> {
        let asking = async {
            let mut sentinel = client.get_multiplexed_async_connection_with_config(config).await?;
            if let Some(named) = named(&self.name, &mut sentinel).await? {
                return Ok(Ok(named));
            }
            let mut question = Cmd::new();
            question.arg("ROLE");
            // Only to say it: one that does not let us ask watches somebody all the same.
            let role = question.query_async::<(String, Vec<String>)>(&mut sentinel).await;
            Ok(Err(role.map(|(_, names)| names).unwrap_or_default()))
        };
        match timeout(self.step, asking).await.unwrap_or_else(|_| Err(too_slow("a Sentinel"))) {
            Ok(Ok(named)) => Ok(named),
            Ok(Err(known)) => Err(DialError::UnknownMaster { name: self.name.clone(), known }),
            Err(error) => Err(of_no_answer(client.get_connection_info(), error)),
        }
    }

    async fn dial_primary(
        &self,
        host: &str,
        port: u16,
        config: &AsyncConnectionConfig,
        within: Duration,
    ) -> Result<Line, DialError> {
        let client = Client::open(address::moved(&self.primary, host, port))?;
        let mut line = dial::open(&client, config, within).await?;
        let mut question = Cmd::new();
        question.arg("ROLE");
        let asking = Message::Question(&question);
        let role = timeout(self.step, asking.send(&mut line)).await;
        match role.unwrap_or_else(|_| Err(Failure::NoAnswer(too_slow("the primary").into()))) {
            Ok(role) if is_primary(&role.value) => Ok(line),
            Ok(_) => {
                let still = "the Sentinels still name a server that is a replica";
                Err(RedisError::from((ErrorKind::Client, still)).into())
            }
            // A user without the right to ask. A replica will refuse the first write.
            Err(Failure::Refused(error)) if error.code() == Some("NOPERM") => Ok(line),
            Err(Failure::Refused(error)) => {
                let missing = reasons::of_no_password(client.get_connection_info(), &error);
                Err(missing.unwrap_or_else(|| error.into()))
            }
            Err(Failure::NotSent(cause) | Failure::NoAnswer(cause)) => {
                Err(RedisError::from(std::io::Error::other(cause)).into())
            }
        }
    }
}

/// A Sentinel that is asked again and again, over a connection that is kept.
pub(super) struct Watcher {
    client: Client,
    name: Box<str>,
    config: AsyncConnectionConfig,
    /// How long it may take to connect.
    connecting: Duration,
    line: Option<MultiplexedConnection>,
}

impl Watcher {
    /// Which one it is.
    pub(super) fn place(&self) -> Box<str> {
        reasons::place(self.client.get_connection_info())
    }

    /// Asks it; gives the reason if it names no primary.
    pub(super) async fn ask(&mut self, within: Duration) -> Result<Named, String> {
        let info = self.client.get_connection_info().clone();
        match self.named(within).await {
            Ok(Some(named)) => Ok(named),
            Ok(None) => {
                let place = self.place();
                Err(format!("{place} answers, and watches no master named {:?}", self.name))
            }
            Err(error) => Err(of_no_answer(&info, error).to_string()),
        }
    }

    /// Asks it. A connection that fails is not used again.
    async fn named(&mut self, within: Duration) -> RedisResult<Option<Named>> {
        let slow = |_| Err(too_slow("a Sentinel"));
        let mut line = match self.line.take() {
            Some(line) => line,
            None => {
                let opening =
                    self.client.get_multiplexed_async_connection_with_config(&self.config);
                timeout(self.connecting, opening).await.unwrap_or_else(slow)?
            }
        };
        let asked = timeout(within, named(&self.name, &mut line)).await;
        let named = asked.unwrap_or_else(|_| Err(too_slow("a Sentinel")))?;
        self.line = Some(line);
        Ok(named)
    }
}

/// Why a Sentinel did not answer what it was asked.
fn of_no_answer(info: &ConnectionInfo, error: RedisError) -> DialError {
    let place = || reasons::place(info);
    if is_about_login(&error) {
        DialError::SentinelLogin { place: place(), reason: error.to_string().into() }
    } else if is_unknown_command(&error) {
        DialError::NotASentinel { place: place() }
    } else {
        reasons::of_no_line(info, error)
    }
}

/// Asks a Sentinel for the primary's place and for the decision by which it is there. `None`: it knows no such primary.
async fn named(name: &str, sentinel: &mut MultiplexedConnection) -> RedisResult<Option<Named>> {
    let (mut place, mut master) = (Cmd::new(), Cmd::new());
    place.arg("SENTINEL").arg("GET-MASTER-ADDR-BY-NAME").arg(name);
    master.arg("SENTINEL").arg("MASTER").arg(name);
    let mut beside = sentinel.clone();
    let asked = async { place.query_async::<Option<Place>>(sentinel).await };
    let told = async { master.query_async::<HashMap<String, String>>(&mut beside).await };
    let (asked, told) = tokio::join!(asked, told);
    // A user may have the right to the first question alone.
    let epoch = told.ok().and_then(|told| told.get("config-epoch")?.parse().ok());
    Ok(asked?.map(|place| Named { place, epoch }))
}

fn is_primary(role: &Value) -> bool {
    let Value::Array(parts) = role else { return false };
    match parts.first() {
        Some(Value::BulkString(name)) => name == b"master",
        Some(Value::SimpleString(name)) => name == "master",
        Some(_) | None => false,
    }
}

fn too_slow(who: &str) -> RedisError {
    std::io::Error::new(std::io::ErrorKind::TimedOut, format!("{who} does not answer")).into()
}
