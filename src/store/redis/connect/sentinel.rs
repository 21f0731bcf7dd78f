//! Finding the primary of a group that Sentinels watch.
//!
//! They are asked each time a connection is made, all at once, so that a dead one costs nothing and
//! one that has not heard of a failover is outvoted. What they name is asked for its role: between a
//! failover and the news of it, it may be a replica.
//!
//! Each decision of the Sentinels has a number that grows, the configuration epoch, and is one that most of them
//! agreed to. So of two answers the one with the higher number is right, even if one Sentinel alone gives it: the
//! others hear of it within two seconds.

use std::collections::HashMap;
use std::time::Duration;

use ::redis::aio::MultiplexedConnection;
use ::redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionInfo, ErrorKind, RedisError, RedisResult, Value,
};
use futures_util::StreamExt as _;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use tokio::time::timeout;

use super::address;
use super::link::Line;
use super::{DialError, Failure, Message, dial, is_about_login, is_unknown_command, reasons};

/// Host and port, as the Sentinels say it.
pub(super) type Place = (String, u16);

/// What Sentinels say: where the primary is, by which of their decisions.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Named {
    /// 0 of one that does not tell.
    pub(super) epoch: u64,
    pub(super) place: Place,
}

/// Connections to Sentinels that are asked again and again.
#[derive(Default)]
pub(super) struct Kept(Vec<Option<MultiplexedConnection>>);

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

    /// Connects to the primary. What was `known` before counts as long as nobody tells of a later decision.
    pub(super) async fn dial(
        &self,
        known: Option<Named>,
        config: &AsyncConnectionConfig,
        within: Duration,
    ) -> Result<(Line, Named), DialError> {
        let (named, mut failure) = self.named(known, config).await;
        for named in named {
            let (host, port) = &named.place;
            match self.dial_primary(host, *port, config, within).await {
                Ok(line) => return Ok((line, named)),
                Err(error) => failure = error,
            }
        }
        Err(failure)
    }

    /// Where the primary may be by the latest decision, the place that most Sentinels name first.
    async fn named(
        &self,
        known: Option<Named>,
        config: &AsyncConnectionConfig,
    ) -> (Vec<Named>, DialError) {
        let mut votes: Vec<(usize, Named)> = known.map(|known| (0, known)).into_iter().collect();
        let mut failure = DialError::UnknownMaster { name: self.name.clone(), known: Vec::new() };
        let mut answers: FuturesUnordered<_> =
            self.clients.iter().map(|client| self.ask(client, config)).collect();
        let mut anybody = false;
        while let Some(answer) = answers.next().await {
            match answer {
                Ok(named) => {
                    anybody = true;
                    count(&mut votes, named);
                    if votes.iter().any(|(count, _)| count * 2 > self.clients.len()) {
                        break;
                    }
                }
                // One that is away may know what the others do not: that may pass.
                Err(error) if error.may_pass() || !failure.may_pass() => failure = error,
                Err(_) => {}
            }
        }
        if !anybody {
            return (Vec::new(), failure);
        }
        (latest(votes).into_iter().map(|(_, named)| named).collect(), failure)
    }

    /// What the Sentinels say now, over connections that are kept: the latest decision of which any of those tell
    /// that answer within this time, and whether they are most of all.
    pub(super) async fn look(
        &self,
        kept: &mut Kept,
        config: &AsyncConnectionConfig,
        within: Duration,
    ) -> Option<(Named, bool)> {
        kept.0.resize(self.clients.len(), None);
        let looks = self.clients.iter().zip(&mut kept.0).map(async |(client, line)| {
            let asked = timeout(within, async {
                let mut sentinel = match line.take() {
                    Some(sentinel) => sentinel,
                    None => client.get_multiplexed_async_connection_with_config(config).await?,
                };
                let named = self.question(&mut sentinel).await?;
                *line = Some(sentinel);
                RedisResult::Ok(named)
            });
            asked.await.ok()?.ok()?
        });
        let answers: Vec<_> = join_all(looks).await.into_iter().flatten().collect();
        let most = answers.len() * 2 > self.clients.len();
        let mut votes = Vec::new();
        answers.into_iter().for_each(|named| count(&mut votes, named));
        latest(votes).into_iter().next().map(|(_, named)| (named, most))
    }

    /// Asks one for the primary's place and for the decision by which it is there. `None`: it knows no such primary.
    async fn question(&self, sentinel: &mut MultiplexedConnection) -> RedisResult<Option<Named>> {
        let (mut place, mut master) = (Cmd::new(), Cmd::new());
        place.arg("SENTINEL").arg("GET-MASTER-ADDR-BY-NAME").arg(&*self.name);
        master.arg("SENTINEL").arg("MASTER").arg(&*self.name);
        let mut beside = sentinel.clone();
        let asked = async { place.query_async::<Option<Place>>(sentinel).await };
        let told = async { master.query_async::<HashMap<String, String>>(&mut beside).await };
        let (asked, told) = tokio::join!(asked, told);
        // A user may have the right to the first question alone.
        let epoch = told.ok().and_then(|told| told.get("config-epoch")?.parse().ok()).unwrap_or(0);
        Ok(asked?.map(|place| Named { epoch, place }))
    }

    async fn ask(
        &self,
        client: &Client,
        config: &AsyncConnectionConfig,
    ) -> Result<Named, DialError> {
        let asking = async {
            let mut sentinel = client.get_multiplexed_async_connection_with_config(config).await?;
            if let Some(named) = self.question(&mut sentinel).await? {
                return Ok(Ok(named));
            }
            let mut question = Cmd::new();
            question.arg("ROLE");
            // Only to say it: one that does not let us ask watches somebody all the same.
            let role = question.query_async::<(String, Vec<String>)>(&mut sentinel).await;
            Ok(Err(role.map(|(_, names)| names).unwrap_or_default()))
        };
        let place = || reasons::place(client.get_connection_info());
        match timeout(self.step, asking).await.unwrap_or_else(|_| Err(too_slow("a Sentinel"))) {
            Ok(Ok(named)) => Ok(named),
            Ok(Err(known)) => Err(DialError::UnknownMaster { name: self.name.clone(), known }),
            Err(error) if is_about_login(&error) => {
                Err(DialError::SentinelLogin { place: place(), reason: error.to_string().into() })
            }
            Err(error) if is_unknown_command(&error) => {
                Err(DialError::NotASentinel { place: place() })
            }
            Err(error) => Err(reasons::of_no_line(client.get_connection_info(), error)),
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
            Err(Failure::Refused(error)) => Err(error.into()),
            Err(Failure::NotSent(cause) | Failure::NoAnswer(cause)) => {
                Err(RedisError::from(std::io::Error::other(cause)).into())
            }
        }
    }
}

fn count(votes: &mut Vec<(usize, Named)>, said: Named) {
    match votes.iter_mut().find(|(_, named)| *named == said) {
        Some((count, _)) => *count += 1,
        None => votes.push((1, said)),
    }
}

/// Those of the latest decision, the place with most votes first.
fn latest(mut votes: Vec<(usize, Named)>) -> Vec<(usize, Named)> {
    let last = votes.iter().map(|(_, named)| named.epoch).max();
    votes.retain(|(_, named)| Some(named.epoch) == last);
    votes.sort_by_key(|(count, _)| std::cmp::Reverse(*count));
    votes
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

#[cfg(test)]
mod tests {
    use super::*;

    fn said(epoch: u64, port: u16) -> Named {
        Named { epoch, place: ("host".to_owned(), port) }
    }

    fn chosen(all: &[(u64, u16)]) -> Vec<u16> {
        let mut votes = Vec::new();
        all.iter().for_each(|&(epoch, port)| count(&mut votes, said(epoch, port)));
        latest(votes).into_iter().map(|(_, named)| named.place.1).collect()
    }

    #[test]
    fn the_latest_decision_counts_and_then_the_number_of_those_who_tell_it() {
        assert_eq!(chosen(&[(4, 1), (4, 1), (5, 2)]), [2], "two have not heard of it yet");
        assert_eq!(chosen(&[(0, 1), (0, 2), (0, 2)]), [2, 1], "they do not tell");
        assert_eq!(chosen(&[]), [0; 0]);
    }
}
