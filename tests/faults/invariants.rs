//! What is promised about a history, as invariants: I1 to I9, and L1.
//!
//! A history is what every client asked and was told, what every handler did, what the ledger has, and what
//! the store held. An answer that was lost is *unknown*: it allows both outcomes.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bytes::Bytes;
use sha2::{Digest as _, Sha256};

/// What a payment is of and from where: two requests with another one are two.
pub(crate) type Request = (u64, String);

/// How a request ended, for its client.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum End {
    /// Ok: a payment, and what was asked for according to it.
    Paid { request: Request, body: Bytes, replay: bool },
    /// Ok: the handler's own answer, which is not a payment.
    Answered { status: u16, body: Bytes, replay: bool },
    /// Ok: it is done, and its answer was not kept.
    NotKept,
    /// Ok: nobody knows.
    Unknown,
    /// Ok: the key is another request's.
    Mismatch,
    /// Fail: another one runs under the key.
    InUse,
    /// Fail: the handler says that nothing happened.
    DidNothing,
    /// Fail: the store is down, or its record cannot be read.
    ComeBack,
    /// Info: no answer came.
    Lost,
}

impl End {
    pub(crate) fn is_final(&self) -> bool {
        !matches!(self, Self::InUse | Self::DidNothing | Self::ComeBack | Self::Lost)
    }

    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Paid { replay: true, .. } | Self::Answered { replay: true, .. } => "replayed",
            Self::Paid { .. } => "paid",
            Self::Answered { .. } => "answered",
            Self::NotKept => "not kept",
            Self::Unknown => "unknown",
            Self::Mismatch => "mismatch",
            Self::InUse => "in use",
            Self::DidNothing => "did nothing",
            Self::ComeBack => "come back",
            Self::Lost => "lost",
        }
    }

    /// The handler's own answer: its body, and whether it is a stored one that is given again.
    fn own(&self) -> Option<(&Bytes, bool)> {
        match self {
            Self::Paid { body, replay, .. } | Self::Answered { body, replay, .. } => {
                Some((body, *replay))
            }
            _ => None,
        }
    }

    fn is_success(&self) -> bool {
        match self {
            Self::Paid { .. } | Self::NotKept => true,
            Self::Answered { status, .. } => (200..300).contains(status),
            _ => false,
        }
    }
}

/// A request. They stand in the order in which they were sent.
#[derive(Clone, Debug)]
pub(crate) struct Operation {
    pub(crate) key: String,
    pub(crate) request: Request,
    pub(crate) end: End,
}

/// How a handler ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Finish {
    Answers,
    DidNothing,
    CutOff,
}

/// What a handler did, by the word of its process. Times are microseconds of the clock on the wall.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    pub(crate) key_id: String,
    pub(crate) attempt: u32,
    pub(crate) fence: u64,
    pub(crate) request: Request,
    pub(crate) began: u64,
    /// None: its process died first.
    pub(crate) ended: Option<(u64, Finish)>,
}

impl Run {
    /// What was told by a clock that is so many seconds ahead, by the true time.
    pub(crate) fn put_back(&mut self, seconds: i64) {
        let truly = |at: u64| at.saturating_add_signed(-seconds * 1_000_000);
        self.began = truly(self.began);
        self.ended = self.ended.map(|(at, finish)| (truly(at), finish));
    }
}

/// A row of the ledger.
#[derive(Clone, Debug)]
pub(crate) struct Charge {
    pub(crate) key_id: String,
    pub(crate) attempt: u32,
    pub(crate) amount: u64,
}

/// What the store holds under a key.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Held {
    pub(crate) attempt: u32,
    pub(crate) fence: u64,
    pub(crate) state: State,
}

/// Where a record stands.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum State {
    Absent,
    Unreadable,
    /// Until when, in milliseconds of the store's clock.
    InFlight {
        until: u64,
    },
    Open,
    Indeterminate,
    /// No body: it was not kept.
    Completed {
        status: u16,
        body: Option<Bytes>,
    },
}

/// All that is known.
#[derive(Clone, Debug, Default)]
pub(crate) struct Evidence {
    pub(crate) operations: Vec<Operation>,
    pub(crate) runs: Vec<Run>,
    pub(crate) charges: Vec<Charge>,
    /// What was seen in the store on the way, in order.
    pub(crate) sights: Vec<(String, Held)>,
    /// What the store holds at the end, by key.
    pub(crate) held: BTreeMap<String, Held>,
    pub(crate) lease: Duration,
}

/// What is promised.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Promise {
    /// One effect; the outcome may stay unknown.
    AtMostOnce,
    /// One effect, by the provider; every client ends with a success.
    Deduplicated,
    /// Effect, record and answer are one.
    Transactional,
}

/// An invariant that does not hold.
#[derive(Clone, Debug)]
pub(crate) struct Broken {
    pub(crate) invariant: &'static str,
    pub(crate) what: String,
}

/// As the ledger shows a key.
pub(crate) fn key_id(key: &str) -> String {
    Sha256::digest(key).iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

impl Evidence {
    /// Every invariant that this promise has, and that does not hold.
    pub(crate) fn broken(&self, promise: Promise) -> Vec<Broken> {
        let keys: BTreeSet<&str> = self.operations.iter().map(|sent| sent.key.as_str()).collect();
        let mut broken = Vec::new();
        let mut by_id: BTreeMap<String, OfKey<'_>> = keys
            .into_iter()
            .map(|key| (key_id(key), OfKey { key, lease: self.lease, ..OfKey::default() }))
            .collect();
        for sent in &self.operations {
            of(&mut by_id, &key_id(&sent.key)).operations.push(sent);
        }
        for charge in &self.charges {
            let Some(of_key) = by_id.get_mut(&charge.key_id) else {
                let what = format!("{charge:?}, and nobody asked for it");
                broken.push(Broken { invariant: "I1", what });
                continue;
            };
            of_key.charges.push(charge);
        }
        for run in &self.runs {
            if let Some(of_key) = by_id.get_mut(&run.key_id) {
                of_key.runs.push(run);
            }
        }
        for (key, held) in &self.sights {
            if let Some(of_key) = by_id.get_mut(&key_id(key)) {
                of_key.sights.push(held);
            }
        }
        for (key, held) in &self.held {
            if let Some(of_key) = by_id.get_mut(&key_id(key)) {
                of_key.sights.push(held);
                of_key.held = Some(held);
            }
        }
        for of_key in by_id.values_mut() {
            of_key.runs.sort_by_key(|run| run.began);
            of_key.check(promise, &mut broken);
        }
        broken
    }
}

fn of<'a, 'b>(by_id: &'b mut BTreeMap<String, OfKey<'a>>, id: &str) -> &'b mut OfKey<'a> {
    by_id.get_mut(id).expect("each key that was asked for")
}

/// A claim that was granted.
#[derive(Debug)]
struct Grant {
    /// The end of its lease, as far as it is known.
    until: u64,
    /// Its handler started, and when it ended.
    run: Option<Option<u64>>,
}

/// A fence is a whole millisecond of the store's clock, and the handler's end is told by another process.
const SLACK: u64 = 2;

/// The fence of a first claim is chosen before the store says its time: two roundings may put it ahead by this, in
/// milliseconds. What is seen in the store is exact.
const AHEAD: u64 = 1;

#[derive(Default)]
struct OfKey<'a> {
    key: &'a str,
    lease: Duration,
    operations: Vec<&'a Operation>,
    /// In the order in which they began.
    runs: Vec<&'a Run>,
    charges: Vec<&'a Charge>,
    /// The last is what is held at the end.
    sights: Vec<&'a Held>,
    held: Option<&'a Held>,
}

impl OfKey<'_> {
    fn check(&self, promise: Promise, broken: &mut Vec<Broken>) {
        let mut no = |invariant, what: String| {
            broken.push(Broken { invariant, what: format!("{}: {what}", self.key) });
        };
        let charges = &self.charges;
        for charge in charges {
            let of_it = |run: &&Run| run.attempt == charge.attempt;
            if !self.runs.iter().copied().any(|run| of_it(&run)) {
                no("evidence", format!("{charge:?}, and no handler has told of it"));
            }
        }
        if charges.len() > 1 {
            no("I1", format!("charged {} times: {charges:?}", charges.len()));
        }
        self.answers(&mut no);
        if promise != Promise::Transactional {
            self.owners(&mut no);
        }
        // A run that follows an unknown outcome may meet the one before it: only `AtMostOnce` excludes it.
        if promise == Promise::AtMostOnce {
            for pair in self.runs.windows(2) {
                let over = pair[0].ended.is_some_and(|(at, _)| at <= pair[1].began);
                if !over {
                    no("I5", format!("two handlers at once: {:?}, {:?}", pair[0], pair[1]));
                }
            }
        }
        self.requests(promise, &mut no);
        self.effects(promise, &mut no);
        self.liveness(promise, &mut no);
    }

    /// I2 and I3: there is one answer, and it is what the store has.
    fn answers(&self, no: &mut impl FnMut(&'static str, String)) {
        let mut stored = None;
        for held in &self.sights {
            match (&held.state, stored) {
                (State::Completed { .. }, None) => stored = Some(*held),
                (State::Completed { .. }, Some(first)) if first.state == held.state => {}
                (_, None) | (State::Unreadable, _) => {}
                (_, Some(first)) => no("I3", format!("first {first:?}, then {held:?}")),
            }
        }
        let stored = stored.and_then(|held| match &held.state {
            State::Completed { body, .. } => body.as_ref(),
            _ => None,
        });
        let (mut first, mut replayed) = (stored, None);
        for sent in &self.operations {
            let Some((body, replay)) = sent.end.own() else { continue };
            if *first.get_or_insert(body) != body {
                no("I2", format!("two answers: {first:?}, {body:?}"));
            }
            if replay && *replayed.get_or_insert(body) != body {
                no("I3", format!("replayed as {replayed:?}, then as {body:?}"));
            }
        }
    }

    /// I4: nobody gets the key before the lease of the one before is over, or its handler at its end. A claim
    /// whose handler never started was given up by its own server.
    fn owners(&self, no: &mut impl FnMut(&'static str, String)) {
        let lease = u64::try_from(self.lease.as_millis()).expect("a short time");
        let mut grants: BTreeMap<u64, Grant> = BTreeMap::new();
        for run in &self.runs {
            let grant = Grant { until: run.fence + lease - AHEAD, run: None };
            let grant = grants.entry(run.fence).or_insert(grant);
            grant.run = Some(run.ended.map(|(at, _)| at));
        }
        for held in self.sights.iter().filter(|held| held.fence > 0) {
            let grant = Grant { until: held.fence + lease - AHEAD, run: None };
            let grant = grants.entry(held.fence).or_insert(grant);
            if let State::InFlight { until } = held.state {
                grant.until = grant.until.max(until);
            }
        }
        let grants: Vec<_> = grants.into_iter().collect();
        for (index, (fence, grant)) in grants.iter().enumerate() {
            let Some(ended) = grant.run else { continue };
            for (later, _) in &grants[index + 1..] {
                let over = ended.is_some_and(|at| at / 1000 <= later + SLACK);
                if *later < grant.until && !over {
                    let until = grant.until;
                    let what =
                        format!("{fence} holds it until {until}, ended {ended:?}; {later} too");
                    no("I4", what);
                }
            }
        }
    }

    /// I6 and I9: it is one request that acts, and the one that is answered.
    fn requests(&self, promise: Promise, no: &mut impl FnMut(&'static str, String)) {
        // Of a transaction that was not committed nothing is left.
        let acts = |run: &&&Run| {
            promise != Promise::Transactional && !matches!(run.ended, Some((_, Finish::DidNothing)))
        };
        let runs = self.runs.iter().filter(acts).map(|run| &run.request);
        let told = self.operations.iter().filter_map(|sent| match &sent.end {
            End::Paid { request, .. } => Some(request),
            _ => None,
        });
        let acted: BTreeSet<&Request> = runs.chain(told).collect();
        let charged = self.charges.iter().map(|charge| charge.amount);
        let amounts: BTreeSet<u64> = charged.chain(acted.iter().map(|acted| acted.0)).collect();
        if acted.len() > 1 || amounts.len() > 1 {
            no("I6", format!("requests {acted:?} have run; amounts {amounts:?}"));
        }
        for sent in &self.operations {
            if let End::Paid { request, .. } = &sent.end
                && *request != sent.request
            {
                no("I9", format!("asked for {:?}, answered with {request:?}", sent.request));
            }
        }
    }

    /// I7 and I8: what is told has happened, and what has happened is on record.
    fn effects(&self, promise: Promise, no: &mut impl FnMut(&'static str, String)) {
        let charged = !self.charges.is_empty();
        if let Some(told) = self.operations.iter().find(|sent| sent.end.is_success())
            && !charged
        {
            no("I7", format!("told {:?}, and never charged", told.end));
        }
        let Some(held) = self.held else { return };
        let fits = match (&held.state, promise) {
            (State::Completed { status, .. }, _) if (200..300).contains(status) => charged,
            (State::Unreadable, _) => true,
            // With leases the effect is elsewhere: it may be there before its answer, but never without a
            // record that says that it may.
            (
                State::Completed { .. } | State::InFlight { .. } | State::Indeterminate,
                Promise::AtMostOnce | Promise::Deduplicated,
            ) => true,
            _ => !charged,
        };
        if !fits {
            no("I8", format!("{} charges, and the record is {held:?}", self.charges.len()));
        }
    }

    /// L1: every client has a final answer to what it asked last.
    fn liveness(&self, promise: Promise, no: &mut impl FnMut(&'static str, String)) {
        let mut last: BTreeMap<&Request, &End> = BTreeMap::new();
        for sent in &self.operations {
            last.insert(&sent.request, &sent.end);
        }
        for (request, end) in last {
            let ends_well = match end {
                End::Unknown => promise == Promise::AtMostOnce,
                end => end.is_final(),
            };
            if !ends_well {
                no("L1", format!("{request:?} ends with {end:?}"));
            }
        }
    }
}
