//! What the model knows: the record as a store keeps it, two servers, two clients, the world outside.

use bytes::Bytes;
use std::time::Duration;
use tower_idempotency::record::{Current, Millis, OnExpired, Owner, Record, State, Terms};
use tower_idempotency::{Attempt, Effects, Fence, Fingerprint, Fingerprints, HolderId, RecipeId};

pub(crate) const SERVERS: usize = 2;
pub(crate) const CLIENTS: usize = 2;

/// Time stands still: the end of a lease is an event that moves its deadline into the past.
pub(crate) const NOW: Millis = Millis(1_000_000);

pub(crate) const TERMS: Terms = Terms {
    lease: Duration::from_secs(30),
    retention: Duration::from_secs(3_600),
    unknown_retention: Duration::from_secs(7_200),
};

/// What the thing called by the handler does about a second call.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Downstream {
    Plain,
    /// Answers a second call under the same key with the result of the first.
    Deduplicates,
    /// Refuses a fence below the greatest it has seen.
    Fences,
}

/// The order of a reconcile hook.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Reconcile {
    Never,
    /// Looks for the effect, and opens the key if there is none.
    Looks,
    /// Raises the fence at the resource first.
    FencesThenLooks,
}

/// What becomes of a handler's error after its effect.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum OnError {
    NotModelled,
    /// The mistake that frees the key.
    Release,
    MarkUnknown,
    Store,
}

/// How often each thing may go wrong.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub(crate) struct Budget {
    pub(crate) crash: u8,
    /// Leases of living servers that end: a pause.
    pub(crate) pause: u8,
    pub(crate) lost: u8,
    pub(crate) client_leaves: u8,
    pub(crate) handler_fails: u8,
    pub(crate) wipe: u8,
    pub(crate) retention: u8,
}

/// The rules of one scenario.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    pub(crate) on_expired: OnExpired,
    pub(crate) effects: Effects,
    pub(crate) downstream: Downstream,
    pub(crate) reconcile: Reconcile,
    pub(crate) on_error: OnError,
    /// Commands may be delayed in the network and run later.
    pub(crate) late_commands: bool,
    /// A twin is told "in use" at once instead of waiting.
    pub(crate) twins_conflict: bool,
    /// An answer that could not be stored is given all the same.
    pub(crate) answers_unstored: bool,
    /// Mistake: a claim that is sent again names another holder.
    pub(crate) fresh_holder: bool,
    /// Mistake: a handler that promised to mark its effects acts before its mark.
    pub(crate) acts_unmarked: bool,
    /// Judge L1; makes sense where clients have more tries than faults can eat.
    pub(crate) judges_liveness: bool,
    pub(crate) tries: [u8; CLIENTS],
    /// The second client may send another request.
    pub(crate) mixed_requests: bool,
    pub(crate) budget: Budget,
}

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) enum Told {
    Success(u8),
    Mismatch,
    Unknown,
    /// In use, or 503.
    ComeBack,
}

/// What a hook found out, on its way to the store.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) enum Finding {
    Happened(u8),
    Nothing,
}

/// Where a server is with its request.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) enum At {
    Idle,
    /// Nothing claimed yet, or the claim has to be sent again.
    Claiming,
    /// The handler runs; where effects are marked, before its mark.
    Running,
    /// The handler runs behind its mark.
    Marked,
    /// The effect has happened, and there is an answer.
    Acted(u8),
    /// The hook is about to look.
    Asking {
        holder: u8,
        attempt: u8,
        fence: u8,
    },
    Settling {
        holder: u8,
        attempt: u8,
        finding: Finding,
    },
    Answering(Told),
}

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) struct Server {
    pub(crate) at: At,
    pub(crate) client: u8,
    pub(crate) holder: u8,
    pub(crate) request: u8,
    pub(crate) attempt: u8,
    pub(crate) fence: u8,
    pub(crate) takeover: bool,
    /// Granted and not over, as the store sees it.
    pub(crate) leased: bool,
}

pub(crate) const IDLE: Server = Server {
    at: At::Idle,
    client: 0,
    holder: 0,
    request: 0,
    attempt: 0,
    fence: 0,
    takeover: false,
    leased: false,
};

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) enum Client {
    Ready,
    Waiting(u8),
    Done(Told),
}

/// A command stuck in the network, run later on behalf of nobody.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) enum Late {
    Claim(Server),
    Complete(Server, u8),
    Release(Server),
}

/// What really happened.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub(crate) struct Ledger {
    /// By request.
    pub(crate) effects: [u8; 2],
    pub(crate) fence: u8,
    /// The answer of the first effect.
    pub(crate) first: u8,
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(crate) struct World {
    /// The bytes that the store keeps.
    pub(crate) stored: Option<Bytes>,
    pub(crate) servers: [Server; SERVERS],
    pub(crate) clients: [Client; CLIENTS],
    pub(crate) requests: [u8; CLIENTS],
    pub(crate) tries: [u8; CLIENTS],
    /// The first success that each client was told.
    pub(crate) told: [Option<u8>; CLIENTS],
    pub(crate) ledger: Ledger,
    pub(crate) late: Option<Late>,
    pub(crate) next_holder: u8,
    pub(crate) next_answer: u8,
    pub(crate) first_stored: Option<u8>,
    pub(crate) broken: Broken,
    pub(crate) budget: Budget,
}

/// What was broken on the way here, where the state alone does not show it.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub(crate) struct Broken {
    pub(crate) told_otherwise: bool,
    pub(crate) rewritten: bool,
    pub(crate) answered_another: bool,
}

impl World {
    pub(crate) fn new(rules: &Rules, second_request: u8) -> Self {
        Self {
            stored: None,
            servers: [IDLE; SERVERS],
            clients: [Client::Ready; CLIENTS],
            requests: [0, second_request],
            tries: rules.tries,
            told: [None; CLIENTS],
            ledger: Ledger::default(),
            late: None,
            next_holder: 1,
            next_answer: 1,
            first_stored: None,
            broken: Broken::default(),
            budget: rules.budget,
        }
    }

    pub(crate) fn current(&self) -> Current {
        Current::from_stored(self.stored.clone())
    }

    pub(crate) fn record(&self) -> Option<Record> {
        match self.current() {
            Current::Present(record) => Some(record),
            Current::Absent => None,
            Current::Unreadable(why) => panic!("the model wrote something unreadable: {why}"),
        }
    }

    pub(crate) fn effects(&self) -> u8 {
        self.ledger.effects.iter().sum()
    }

    /// True if the holder's server still works on its request.
    pub(crate) fn is_alive(&self, holder: HolderId) -> bool {
        self.servers.iter().any(|server| {
            let working = match server.at {
                At::Claiming | At::Running | At::Marked | At::Acted(_) => true,
                At::Idle | At::Asking { .. } | At::Settling { .. } | At::Answering(_) => false,
            };
            working && holder_id(server.holder) == holder
        })
    }
}

impl Server {
    pub(crate) fn owner(&self) -> Owner {
        Owner {
            holder: holder_id(self.holder),
            fingerprints: fingerprints(self.request),
            attempt: Attempt::from_number(self.attempt.into()),
            fence: fence(self.fence),
            created: NOW,
        }
    }

    /// True while its handler may act.
    pub(crate) fn runs(&self) -> bool {
        matches!(self.at, At::Running | At::Marked | At::Acted(_))
    }
}

pub(crate) fn holder_id(number: u8) -> HolderId {
    HolderId::from_bytes([number; 16])
}

pub(crate) fn holder_number(holder: HolderId) -> u8 {
    holder.as_bytes()[0]
}

pub(crate) fn fingerprints(request: u8) -> Fingerprints {
    Fingerprints::one(Fingerprint::from_stored(RecipeId::from_bytes([1; 4]), [request; 32]))
}

/// Fences are counted from the standing clock.
pub(crate) fn fence(number: u8) -> Fence {
    Fence::from_number(NOW.0 + u64::from(number))
}

pub(crate) fn fence_number(fence: Fence) -> u8 {
    u8::try_from(fence.number() - NOW.0).expect("few claims")
}

/// An answer names the request that it is about in its lowest bit.
pub(crate) fn answer(number: u8, request: u8) -> u8 {
    number * 2 + request
}

pub(crate) fn is_answer_to(answer: u8, request: u8) -> bool {
    answer % 2 == request
}

/// The answer of a handler that fails after its effect; the same however often it fails.
pub(crate) const ERROR: u8 = 100;

pub(crate) fn encoded(answer: u8) -> Bytes {
    Bytes::from(vec![1, answer])
}

pub(crate) fn decoded(response: &Bytes) -> u8 {
    response[1]
}

pub(crate) fn is_completed(record: &Record) -> Option<u8> {
    match &record.state {
        State::Completed { response, .. } => Some(decoded(response)),
        State::InFlight { .. } | State::Open { .. } | State::Indeterminate { .. } => None,
    }
}
