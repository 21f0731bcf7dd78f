//! Whether a server belongs to the cluster that the program is connected to.
//!
//! An address outlives the server that it led to: another Redis may listen there when a master is dead, and would run
//! what was done long ago. But nodes of one cluster know each other, by ids that no other cluster has.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ::redis::{Client, Cmd, Value};
use tokio::time::timeout;

use super::address::place_of;
use super::link::Line;
use super::{DialError, Failure, Message};

/// The ids of the cluster's nodes, as one of them told last. Nothing at first: then anybody is believed.
#[derive(Debug, Default)]
pub(super) struct Kin(Mutex<HashSet<Box<str>>>);

/// Who has which slots. Any user of ours may ask it.
pub(super) fn slots() -> Cmd {
    let mut question = Cmd::new();
    question.arg("CLUSTER").arg("SLOTS");
    question
}

impl Kin {
    /// True if whoever gave this answer to [`slots`] knows one of the cluster's nodes, or none is known yet. Nodes come and
    /// go one by one.
    pub(super) fn know(&self, slots: &Value) -> bool {
        let known = self.lock();
        known.is_empty() || ids(slots).any(|id| known.contains(id))
    }

    /// Believes this answer to [`slots`].
    pub(super) fn are(&self, slots: &Value) {
        *self.lock() = ids(slots).map(Box::from).collect();
    }

    /// Makes sure that a new connection leads to one of them.
    pub(super) async fn recognise(
        &self,
        line: &mut Line,
        client: &Client,
        within: Duration,
    ) -> Result<(), DialError> {
        if self.lock().is_empty() {
            return Ok(());
        }
        let (host, port) = place_of(client.get_connection_info()).unwrap_or_default();
        let stranger = |said: &str| DialError::Stranger {
            place: format!("{host}:{port}").into(),
            reason: said.into(),
        };
        let question = slots();
        let failed = |cause: super::Cause| DialError::Failed(std::io::Error::other(cause).into());
        match timeout(within, Message::Question(&question).send(line)).await {
            Ok(Ok(answer)) if self.know(&answer.value) => Ok(()),
            Ok(Ok(_)) => Err(stranger("it knows none of the cluster's nodes")),
            // It may be one of them: what is to be changed is the user's rights there.
            Ok(Err(Failure::Refused(error))) if error.code() == Some("NOPERM") => Err(error.into()),
            // As a server that is in no cluster does; whatever it refuses, it is not known.
            Ok(Err(Failure::Refused(error))) => Err(stranger(&error.to_string())),
            Ok(Err(Failure::NotSent(cause) | Failure::NoAnswer(cause))) => Err(failed(cause)),
            Err(_) => Err(failed("it does not say to which cluster it belongs".into())),
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashSet<Box<str>>> {
        // Nothing that can panic runs while it is locked.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The ids of all nodes in an answer: the owner of each range and its replicas, as host, port and id.
fn ids(slots: &Value) -> impl Iterator<Item = &str> {
    parts(slots).iter().flat_map(|range| parts(range).iter().skip(2)).filter_map(|node| {
        let Some(Value::BulkString(id)) = parts(node).get(2) else { return None };
        std::str::from_utf8(id).ok().filter(|id| !id.is_empty())
    })
}

fn parts(value: &Value) -> &[Value] {
    if let Value::Array(parts) = value { parts } else { &[] }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(nodes: &[&str]) -> Value {
        let text = |text: &str| Value::BulkString(text.as_bytes().to_vec());
        let node = |id: &&str| Value::Array(vec![text("h"), Value::Int(7), text(id)]);
        let range = [Value::Int(0), Value::Int(5)].into_iter().chain(nodes.iter().map(node));
        Value::Array(vec![Value::Array(range.collect())])
    }

    #[test]
    fn a_node_is_known_by_any_of_those_that_it_knows() {
        let kin = Kin::default();
        assert!(kin.know(&map(&["a"])), "nobody is known yet");
        kin.are(&map(&["a", "b"]));
        for ours in [&["b"][..], &["c", "a"]] {
            assert!(kin.know(&map(ours)), "{ours:?}");
        }
        for other in [map(&["c", "d"]), map(&[""]), Value::Array(Vec::new()), Value::Nil] {
            assert!(!kin.know(&other), "{other:?}");
        }
        // One by one they may all be replaced.
        kin.are(&map(&["b", "c"]));
        assert!(kin.know(&map(&["c", "d"])));
        assert!(!kin.know(&map(&["a"])));
    }
}
