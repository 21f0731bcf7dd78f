//! What is drawn at random: operations, records, and their parts.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use rand::Rng as _;
use rand::seq::IndexedRandom as _;
use tower_idempotency::record::{
    Claim, Completion, Effects, Finding, Forget, Grant, Millis, OnExpired, Progress, Record,
    Release, Renewal, Resolution, Seen, State, Terms, Verdict, Writes,
};
use tower_idempotency::{Attempt, Fence, Fingerprint, Fingerprints, HolderId, Lease, RecipeId};

use super::{MINUTE, Sequence, TINY, now};

/// One operation; leases are named by their place in [`Sequence::leases`].
pub(super) enum Operation {
    Claim(Claim),
    Renew(usize, Renewal),
    Complete(usize, Completion),
    Release(usize, Release),
    Resolve(Resolution),
    Forget(Forget),
}

impl fmt::Debug for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Claim(claim) => claim.fmt(f),
            Self::Renew(of, renewal) => write!(f, "lease {of}, {renewal:?}"),
            Self::Complete(of, completion) => write!(f, "lease {of}, {completion:?}"),
            Self::Release(of, release) => write!(f, "lease {of}, {release:?}"),
            Self::Resolve(resolution) => resolution.fmt(f),
            Self::Forget(forget) => forget.fmt(f),
        }
    }
}

impl Sequence {
    pub(super) fn draw_record(&mut self) -> Record {
        let now = now().0;
        let minutes = |count: u64| count * MINUTE * 1_000;
        // Far from now, so that no two readings of the clock disagree about it.
        let moments = [0, now - minutes(90), now + minutes(90), now + minutes(5_000_000)];
        let leases = [TINY, Duration::from_secs(10 * MINUTE), Duration::from_secs(80 * MINUTE)];
        let at = Millis(*moments.choose(&mut self.random).unwrap());
        let state = match self.random.random_range(0..4) {
            0 => State::InFlight {
                until: at,
                lease: *leases.choose(&mut self.random).unwrap(),
                progress: *[Progress::MayHaveActed, Progress::Untouched]
                    .choose(&mut self.random)
                    .unwrap(),
            },
            1 => State::Open { since: at },
            2 => State::Indeterminate { since: at },
            _ => State::Completed { at, response: self.draw_bytes(1) },
        };
        let fences = [0, 1, now + minutes(90), (1 << 48) - 1];
        Record {
            fingerprint: *self.draw_fingerprints().as_slice().last().unwrap(),
            holder: self.draw_holder(),
            attempt: Attempt::from_number(*[1, 2, 255, u32::MAX].choose(&mut self.random).unwrap()),
            fence: Fence::from_number(*fences.choose(&mut self.random).unwrap()),
            created: Millis(*moments.choose(&mut self.random).unwrap()),
            checkpoint: self.draw_bytes(0),
            state,
        }
    }

    pub(super) fn make_up_a_lease(&mut self) {
        let claim = self.draw_claim();
        let grant = Grant {
            // A completion of a first claim, as it was granted, takes fence and moment from its lease; those of
            // this one are lies.
            attempt: Attempt::from_number(self.random.random_range(2..5)),
            fence: Fence::from_number(self.random.random_range(0..1 << 48)),
            created: Millis(self.random.random_range(0..1 << 48)),
            takeover: false,
            checkpoint: Bytes::new(),
        };
        let lease = Lease::new(self.key, &claim, grant);
        self.leases.push((lease.clone(), lease));
    }

    pub(super) fn draw_operation(&mut self) -> Operation {
        let of = self.draw_lease();
        match self.random.random_range(0..21) {
            20 => Operation::Forget(self.draw_forget()),
            0..8 => Operation::Claim(self.draw_claim()),
            8..10 => {
                let checkpoint = self.random.random_bool(0.5).then(|| self.draw_bytes(0));
                Operation::Renew(of, Renewal { terms: self.draw_terms(), checkpoint })
            }
            10..14 => {
                let response = self.draw_bytes(1);
                Operation::Complete(
                    of,
                    Completion { terms: self.draw_terms(), response, writes: Writes::Keep },
                )
            }
            14..16 => {
                let verdict =
                    *[Verdict::NoEffect, Verdict::Unknown].choose(&mut self.random).unwrap();
                Operation::Release(of, Release { terms: self.draw_terms(), verdict })
            }
            _ => {
                let owner = *self.leases[of].0.owner();
                let happened = self.random.random_bool(0.5);
                let right = self.random.random_bool(0.8);
                Operation::Resolve(Resolution {
                    holder: if right { owner.holder } else { self.draw_holder() },
                    attempt: if right {
                        owner.attempt
                    } else {
                        Attempt::from_number(self.random.random_range(1..4))
                    },
                    finding: match happened {
                        true => Finding::Happened(self.draw_bytes(1)),
                        false => Finding::NothingHappened,
                    },
                    terms: self.draw_terms(),
                })
            }
        }
    }

    /// What stands there now, most of the time; or something that never did.
    fn draw_forget(&mut self) -> Forget {
        let record = match self.record_held(now()) {
            Some(record) if self.random.random_bool(0.8) => record,
            _ => self.draw_record(),
        };
        let seen = match self.random.random_bool(0.2) {
            true => Seen::Unreadable,
            false => Seen::Record(record.sighting()),
        };
        Forget { seen }
    }

    /// The latest lease most of the time.
    fn draw_lease(&mut self) -> usize {
        let last = self.leases.len() - 1;
        if self.random.random_bool(0.6) { last } else { self.random.random_range(0..=last) }
    }

    fn draw_claim(&mut self) -> Claim {
        Claim {
            holder: self.draw_holder(),
            fingerprints: self.draw_fingerprints(),
            terms: self.draw_terms(),
            on_expired: *[OnExpired::Refuse, OnExpired::Reexecute]
                .choose(&mut self.random)
                .unwrap(),
            effects: *[Effects::Anywhere, Effects::Marked].choose(&mut self.random).unwrap(),
        }
    }

    fn draw_holder(&mut self) -> HolderId {
        if self.random.random_bool(0.05) {
            return HolderId::NOBODY;
        }
        *self.holders.choose(&mut self.random).unwrap()
    }

    fn draw_terms(&mut self) -> Terms {
        let mut draw = |tiny: f64, minutes: &[u64]| {
            if self.random.random_bool(tiny) {
                return TINY;
            }
            Duration::from_secs(minutes.choose(&mut self.random).unwrap() * MINUTE)
        };
        Terms {
            lease: draw(0.5, &[10, 15]),
            retention: draw(0.1, &[20, 40]),
            // The last one is more than a plain claim of Redis can say: then its script alone judges.
            unknown_retention: draw(0.1, &[60, 90, 60, 90, 1_200 * 365 * 24 * 60]),
        }
    }

    /// One to four recipes, mostly with the usual body.
    fn draw_fingerprints(&mut self) -> Fingerprints {
        let body = if self.random.random_bool(0.9) { 1 } else { 2 };
        let recipes: Vec<u8> = match self.random.random_range(0..20) {
            0 => vec![9],
            1 => vec![2],
            2 => vec![2, 1],
            3 => vec![5, 4, 3, 1],
            4 => vec![1, 1, 2],
            5..8 => vec![1, 2],
            _ => vec![1],
        };
        let print = |recipe, body| {
            Fingerprint::from_stored(RecipeId::from_bytes([recipe, 0, 255, 0]), [body; 32])
        };
        let mut fingerprints = Fingerprints::one(print(recipes[0], body));
        for &recipe in &recipes[1..] {
            // Of two by one recipe the first counts; nobody sends that, and all agree on it.
            let body = if recipe == recipes[0] { body + 1 } else { body };
            assert!(fingerprints.push(print(recipe, body)));
        }
        fingerprints
    }

    fn draw_bytes(&mut self, at_least: usize) -> Bytes {
        // The last two of a size that Redis keeps out of its scripts.
        let choices: [&[u8]; 7] =
            [b"", b"a", b"\0\0", b"\xff\r\n$1\r\n", &[b'x'; 300], &[b'y'; 5_000], &[b'z'; 5_000]];
        Bytes::copy_from_slice(choices[at_least..].choose(&mut self.random).unwrap())
    }
}
