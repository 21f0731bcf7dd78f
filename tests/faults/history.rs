//! What clients saw, and what of it is allowed.
//!
//! Each request is invoked, and ends as *ok* (a final answer), *fail* (certainly nothing came of this
//! one: come back), or *info*: its answer was lost, and both outcomes are allowed.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use crate::sandbox::{Answer, Call, Connection};

/// How a request ended, for its client.
#[derive(Clone, Debug)]
pub(crate) enum End {
    /// Ok: a payment.
    Paid { amount: u64, body: Bytes, replay: bool },
    /// Ok: nobody knows.
    Unknown,
    /// Ok: the key is another request's.
    Mismatch,
    /// Ok: the handler's own answer, which is not a payment.
    Other,
    /// Fail: in use, or the store is down.
    ComeBack,
    /// Info: no answer came.
    Lost,
}

impl End {
    pub(crate) fn of(answer: &Answer) -> Self {
        let code = if answer.body.is_empty() { String::new() } else { answer.code() };
        match (answer.status.as_u16(), code.as_str()) {
            (201, _) => Self::Paid {
                amount: answer.json()["amount"].as_u64().expect("an amount"),
                body: answer.body.clone(),
                replay: answer.is_replay(),
            },
            (409 | 500, "idempotency_outcome_unknown") => Self::Unknown,
            (422, _) => Self::Mismatch,
            (409, "idempotency_key_in_use" | "idempotency_too_many_waiting")
            | (503, "idempotency_store_unavailable" | "unavailable") => Self::ComeBack,
            _ => Self::Other,
        }
    }

    fn is_final(&self) -> bool {
        !matches!(self, Self::ComeBack | Self::Lost)
    }
}

struct Operation {
    key: String,
    amount: u64,
    end: End,
}

/// What is promised about a second effect.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Promise {
    /// One effect; the outcome may stay unknown.
    AtMostOnce,
    /// One effect, by the provider; every client ends with a success.
    Deduplicated,
}

/// What all clients saw. Clones are the same history.
#[derive(Clone, Default)]
pub(crate) struct History(Arc<Mutex<Vec<Operation>>>);

/// How long a client goes on asking: longer than any fault lasts.
const PATIENCE: Duration = Duration::from_secs(90);

impl History {
    /// Sends one payment, and notes how it ended.
    pub(crate) async fn pay(&self, to: SocketAddr, key: &str, source: &str, amount: u32) -> End {
        let call = Call::pay_amount(key, source, amount);
        let answer = match Connection::open(to).await {
            Ok(mut connection) => connection.send(call).await.ok(),
            Err(_) => None,
        };
        let end = answer.as_ref().map_or(End::Lost, End::of);
        self.note(key, amount, end.clone());
        end
    }

    fn note(&self, key: &str, amount: u32, end: End) {
        let operation = Operation { key: key.to_owned(), amount: amount.into(), end };
        self.0.lock().expect("no holder panics").push(operation);
    }

    /// Goes on asking, now here and now there, until there is a final answer.
    pub(crate) async fn pay_surely(
        &self,
        to: &[SocketAddr],
        key: &str,
        source: &str,
        amount: u32,
    ) -> End {
        let began = Instant::now();
        for address in to.iter().cycle() {
            let end = self.pay(*address, key, source, amount).await;
            if end.is_final() {
                return end;
            }
            assert!(began.elapsed() < PATIENCE, "{key} ends with no answer: {end:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        unreachable!("a cycle does not end")
    }

    /// Compares everything with what really happened, and counts the ends by name.
    pub(crate) fn check(&self, ledger: &Value, promise: Promise) -> BTreeMap<&'static str, usize> {
        let operations = self.0.lock().expect("no holder panics");
        let mut by_key: BTreeMap<&str, Vec<&Operation>> = BTreeMap::new();
        let mut ends = BTreeMap::new();
        for operation in operations.iter() {
            by_key.entry(&operation.key).or_default().push(operation);
            let name = match operation.end {
                End::Paid { replay: false, .. } => "paid",
                End::Paid { replay: true, .. } => "replayed",
                End::Unknown => "unknown",
                End::Mismatch => "mismatch",
                End::Other => "other",
                End::ComeBack => "come back",
                End::Lost => "lost",
            };
            *ends.entry(name).or_default() += 1;
        }
        let mut charges: BTreeMap<&str, Vec<&Value>> = BTreeMap::new();
        for entry in ledger["entries"].as_array().expect("entries") {
            if entry["action"] == "charge" {
                let key_id = entry["key_id"].as_str().expect("a key id");
                charges.entry(key_id).or_default().push(entry);
            }
        }
        for (key, operations) in by_key {
            let found = charges.get(key_id(key).as_str()).map_or(&[][..], |found| &found[..]);
            check_key(key, &operations, found, promise);
        }
        ends
    }
}

fn check_key(key: &str, operations: &[&Operation], charges: &[&Value], promise: Promise) {
    assert!(charges.len() <= 1, "I1: {key} was charged {} times: {charges:?}", charges.len());
    let mut told: Option<&Bytes> = None;
    for operation in operations {
        let End::Paid { amount, body, .. } = &operation.end else { continue };
        assert!(told.is_none_or(|told| told == body), "I2, I3: {key} has two answers");
        told = Some(body);
        assert_eq!(*amount, operation.amount, "I9: {key} was answered with another's payment");
        let charge = charges.first().unwrap_or_else(|| panic!("I7: {key} is paid and not charged"));
        assert_eq!(charge["amount"], *amount, "I6: {key} was charged for another request");
    }
    let last = operations.last().expect("at least one");
    let ends_well = match last.end {
        End::Paid { .. } | End::Mismatch | End::Other => true,
        End::Unknown => promise == Promise::AtMostOnce,
        End::ComeBack | End::Lost => false,
    };
    assert!(ends_well, "L1: {key} ends with {:?}", last.end);
}

/// As the ledger shows a key.
fn key_id(key: &str) -> String {
    Sha256::digest(key).iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

/// A checker that accepts everything shows nothing.
mod tests {
    use serde_json::json;

    use super::*;

    fn paid(amount: u64, body: &'static str) -> End {
        End::Paid { amount, body: Bytes::from_static(body.as_bytes()), replay: false }
    }

    fn checks(ends: &[(u32, End)], charged: &[u64], promise: Promise) -> bool {
        let history = History::default();
        for (amount, end) in ends {
            history.note("k", *amount, end.clone());
        }
        let entries: Vec<_> = charged
            .iter()
            .map(|amount| json!({"action": "charge", "key_id": key_id("k"), "amount": amount}))
            .collect();
        let check = || history.check(&json!({ "entries": entries }), promise);
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(check)).is_ok()
    }

    #[test]
    fn the_checker_refuses_each_broken_promise_and_allows_both_outcomes_of_a_lost_answer() {
        use Promise::{AtMostOnce, Deduplicated};
        let lost = || (1, End::Lost);
        assert!(checks(&[lost(), (1, paid(1, "a"))], &[1], AtMostOnce));
        assert!(checks(&[lost(), (1, End::Unknown)], &[], AtMostOnce));
        assert!(checks(&[lost(), (1, End::Unknown)], &[1], AtMostOnce));
        assert!(!checks(&[(1, paid(1, "a"))], &[1, 1], AtMostOnce), "I1");
        assert!(!checks(&[(1, paid(1, "a")), (1, paid(1, "b"))], &[1], AtMostOnce), "I2");
        assert!(!checks(&[(1, paid(1, "a"))], &[2], AtMostOnce), "I6");
        assert!(!checks(&[(1, paid(1, "a"))], &[], AtMostOnce), "I7");
        assert!(!checks(&[(2, paid(1, "a"))], &[1], AtMostOnce), "I9");
        assert!(!checks(&[lost()], &[1], AtMostOnce), "L1");
        assert!(!checks(&[(1, End::Unknown)], &[1], Deduplicated), "L1");
    }
}
