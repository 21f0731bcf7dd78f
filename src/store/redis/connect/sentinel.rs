//! Finding the primary of a group that Sentinels watch.
//!
//! They are asked each time a connection is made, all at once, so that a dead one costs nothing and
//! one that has not heard of a failover is outvoted. What they name is asked for its role: between a
//! failover and the news of it, it may be a replica.

use std::time::Duration;

use ::redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionInfo, ErrorKind, RedisError, RedisResult, Value,
};
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio::time::timeout;

use super::address;
use super::link::Line;
use super::{Failure, Message, stream};

type Place = (String, u16);

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

    pub(super) async fn dial(
        &self,
        config: &AsyncConnectionConfig,
        within: Duration,
    ) -> RedisResult<Line> {
        let (places, mut failure) = self.places(config).await;
        for (host, port) in places {
            match self.dial_primary(&host, port, config, within).await {
                Ok(line) => return Ok(line),
                Err(error) => failure = error,
            }
        }
        Err(failure)
    }

    /// Where the primary may be, the place that most Sentinels name first.
    async fn places(&self, config: &AsyncConnectionConfig) -> (Vec<Place>, RedisError) {
        let mut votes: Vec<(usize, Place)> = Vec::new();
        let mut failure = RedisError::from((
            ErrorKind::MasterNameNotFoundBySentinel,
            "no Sentinel knows a master of this name",
        ));
        let mut answers: FuturesUnordered<_> =
            self.clients.iter().map(|client| self.ask(client, config)).collect();
        while let Some(answer) = answers.next().await {
            match answer {
                Ok(Some(place)) => {
                    match votes.iter_mut().find(|(_, known)| *known == place) {
                        Some((count, _)) => *count += 1,
                        None => votes.push((1, place)),
                    }
                    if votes.iter().any(|(count, _)| count * 2 > self.clients.len()) {
                        break;
                    }
                }
                Ok(None) => {}
                Err(error) => failure = error,
            }
        }
        votes.sort_by_key(|(count, _)| std::cmp::Reverse(*count));
        (votes.into_iter().map(|(_, place)| place).collect(), failure)
    }

    async fn ask(
        &self,
        client: &Client,
        config: &AsyncConnectionConfig,
    ) -> RedisResult<Option<Place>> {
        let mut question = Cmd::new();
        question.arg("SENTINEL").arg("GET-MASTER-ADDR-BY-NAME").arg(&*self.name);
        let asking = async {
            let mut sentinel = client.get_multiplexed_async_connection_with_config(config).await?;
            question.query_async(&mut sentinel).await
        };
        timeout(self.step, asking).await.unwrap_or_else(|_| Err(too_slow("a Sentinel")))
    }

    async fn dial_primary(
        &self,
        host: &str,
        port: u16,
        config: &AsyncConnectionConfig,
        within: Duration,
    ) -> RedisResult<Line> {
        let client = Client::open(address::moved(&self.primary, host, port))?;
        let mut line = stream::open(&client, config, within).await?;
        let mut question = Cmd::new();
        question.arg("ROLE");
        let asking = Message::Question(&question);
        let role = timeout(self.step, asking.send(&mut line)).await;
        match role.unwrap_or_else(|_| Err(Failure::NoAnswer(too_slow("the primary").into()))) {
            Ok(role) if is_primary(&role.value) => Ok(line),
            Ok(_) => {
                Err((ErrorKind::Client, "the Sentinels still name a server that is a replica")
                    .into())
            }
            // A user without the right to ask. A replica will refuse the first write.
            Err(Failure::Refused(error)) if error.code() == Some("NOPERM") => Ok(line),
            Err(Failure::Refused(error)) => Err(error),
            Err(Failure::NotSent(cause) | Failure::NoAnswer(cause)) => {
                Err(std::io::Error::other(cause).into())
            }
        }
    }
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
