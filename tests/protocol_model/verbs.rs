//! What the parties do. What a verb does to the record is not written here: it is the crate's own
//! `record`, on the bytes that a store keeps.

use tower_idempotency::record::{
    self, Change, Claim, ClaimOutcome, CompleteOutcome, Completion, OnExpired, Record, Release,
    ReleaseOutcome, RenewOutcome, Renewal, Resolution, ResolveOutcome, State, Step, Verdict,
    Writes,
};
use tower_idempotency::{Attempt, Effects};

use crate::step::Protocol;
use crate::world::*;

impl Protocol {
    pub(crate) fn reached(&self, what: &'static str) {
        let mut reached = self.reached.lock().expect("no holder panics");
        if !reached.contains(what) {
            reached.insert(what);
        }
    }

    /// Applies one verb to the bytes, and looks whether a stored answer was touched.
    pub(crate) fn apply<T>(&self, world: &mut World, step: Step<T>) -> T {
        if let Change::Write { record, .. } = step.change {
            let before = world.record().as_ref().and_then(is_completed);
            let after = is_completed(&record);
            if before.is_some() && before != after {
                world.broken.rewritten = true;
            }
            if let Some(answer) = after {
                let first = *world.first_stored.get_or_insert(answer);
                world.broken.rewritten |= first != answer;
            }
            world.stored = Some(record.encode());
        }
        step.outcome
    }

    pub(crate) fn claim(&self, world: &mut World, server: usize) -> Told {
        let Server { holder, request, .. } = world.servers[server];
        let claim = Claim {
            holder: holder_id(holder),
            fingerprints: fingerprints(request),
            terms: TERMS,
            on_expired: self.rules.on_expired,
            effects: self.rules.effects,
        };
        let step = record::claim(world.current(), NOW, &claim);
        match self.apply(world, step) {
            ClaimOutcome::Acquired(grant) => {
                if grant.takeover {
                    self.reached("takeover");
                }
                let me = &mut world.servers[server];
                me.attempt = u8::try_from(grant.attempt.number()).expect("few attempts");
                me.fence = fence_number(grant.fence);
                me.takeover = grant.takeover;
                me.leased = true;
                me.at = At::Running;
                Told::ComeBack
            }
            ClaimOutcome::InFlight { .. } => self.answer(world, server, Told::ComeBack),
            ClaimOutcome::Completed(response) => {
                self.reached("replay");
                self.answer(world, server, Told::Success(decoded(&response)))
            }
            ClaimOutcome::Mismatch => {
                self.reached("mismatch");
                self.answer(world, server, Told::Mismatch)
            }
            ClaimOutcome::Indeterminate(unsettled) if self.rules.reconcile != Reconcile::Never => {
                world.servers[server].at = At::Asking {
                    holder: holder_number(unsettled.holder),
                    attempt: u8::try_from(unsettled.attempt.number()).expect("few attempts"),
                    fence: fence_number(unsettled.fence),
                };
                Told::Unknown
            }
            ClaimOutcome::Indeterminate(_) => {
                self.reached("unknown");
                if world.effects() == 0 && !world.servers.iter().any(Server::runs) {
                    self.reached("unknown although nothing happened");
                }
                self.answer(world, server, Told::Unknown)
            }
            ClaimOutcome::Unreadable => panic!("nothing here is unreadable"),
        }
    }

    pub(crate) fn answer(&self, world: &mut World, server: usize, told: Told) -> Told {
        let me = &mut world.servers[server];
        me.at = At::Answering(told);
        me.leased = false;
        told
    }

    /// "Nothing happened", as far as the engine may say so: where runs may repeat, what an earlier one
    /// did is not this one's to deny.
    pub(crate) fn give_up(&self, world: &mut World, by: &Server) {
        let follows = by.takeover || by.attempt == 0;
        let verdict = match self.rules.on_expired {
            OnExpired::Reexecute if follows => Verdict::Unknown,
            _ => Verdict::NoEffect,
        };
        self.release(world, by, verdict);
    }

    pub(crate) fn release(
        &self,
        world: &mut World,
        by: &Server,
        verdict: Verdict,
    ) -> ReleaseOutcome {
        let release = Release { terms: TERMS, verdict };
        let step = record::release(world.current(), NOW, &by.owner(), &release);
        self.apply(world, step)
    }

    /// What the client is told after a completion, as the engine does it.
    pub(crate) fn complete(&self, world: &mut World, by: &Server, answer: u8) -> Told {
        let completion =
            Completion { terms: TERMS, response: encoded(answer), writes: Writes::Keep };
        let step = record::complete(world.current(), NOW, &by.owner(), &completion);
        match self.apply(world, step) {
            CompleteOutcome::Stored => Told::Success(answer),
            CompleteOutcome::Healed => {
                self.reached("healed");
                Told::Success(answer)
            }
            CompleteOutcome::Restored => {
                self.reached("restored");
                Told::Success(answer)
            }
            CompleteOutcome::Superseded(response) => {
                self.reached("superseded");
                Told::Success(decoded(&response))
            }
            CompleteOutcome::Mismatch | CompleteOutcome::Lost => {
                self.reached("refused completion");
                match (self.rules.on_expired, self.rules.reconcile) {
                    (OnExpired::Refuse, Reconcile::Never) => Told::Unknown,
                    _ => Told::ComeBack,
                }
            }
            CompleteOutcome::Unreadable | CompleteOutcome::RolledBack => {
                panic!("nothing here is unreadable, or in a transaction")
            }
        }
    }

    /// The effect; `None` if the resource refuses.
    pub(crate) fn act(&self, world: &mut World, server: usize) -> Option<u8> {
        let Server { request, fence, .. } = world.servers[server];
        let first = world.effects() == 0;
        match self.rules.downstream {
            Downstream::Deduplicates if !first => return Some(world.ledger.first),
            Downstream::Fences if fence < world.ledger.fence => {
                self.reached("fenced out");
                return None;
            }
            Downstream::Plain | Downstream::Deduplicates | Downstream::Fences => {}
        }
        world.ledger.fence = world.ledger.fence.max(fence);
        let answer = answer(world.next_answer, request);
        world.next_answer += 1;
        if first {
            world.ledger.first = answer;
        }
        world.ledger.effects[usize::from(request)] += 1;
        Some(answer)
    }

    pub(crate) fn checkpoint(&self, world: &mut World, server: usize) -> RenewOutcome {
        let note = bytes::Bytes::from_static(b"\x01\"mark\"");
        let renewal = Renewal { terms: TERMS, checkpoint: Some(note) };
        let owner = world.servers[server].owner();
        let step = record::renew(world.current(), NOW, &owner, &renewal);
        self.apply(world, step)
    }

    pub(crate) fn deliver(&self, world: &mut World, server: usize, told: Told) {
        let client = usize::from(world.servers[server].client);
        world.servers[server] = IDLE;
        let waiting = Client::Waiting(u8::try_from(server).expect("two servers"));
        if world.clients[client] != waiting {
            return; // it has left
        }
        let was_told = world.told[client].is_some();
        if let Told::Success(answer) = told {
            let first = world.told.iter().flatten().next().copied();
            let differs = |known: Option<u8>| known.is_some_and(|known| known != answer);
            world.broken.told_otherwise |= differs(first) || differs(world.first_stored);
            let request = world.requests[client];
            world.broken.answered_another |= !is_answer_to(answer, request);
            world.told[client].get_or_insert(answer);
        }
        let again = match told {
            // It repeats its request once after a success: a late duplicate.
            Told::Success(_) => !was_told,
            Told::Mismatch => false,
            Told::Unknown => !self.rules.judges_liveness,
            Told::ComeBack => true,
        };
        world.clients[client] =
            if again && world.tries[client] > 0 { Client::Ready } else { Client::Done(told) };
    }

    pub(crate) fn lease_ends(&self, world: &mut World) {
        let Some(Record { holder, state: State::InFlight { lease, progress, .. }, .. }) =
            world.record()
        else {
            return;
        };
        if world.is_alive(holder) {
            world.budget.pause -= 1;
        }
        for server in &mut world.servers {
            if holder_id(server.holder) == holder {
                server.leased = false;
            }
        }
        let record = world.record().expect("there is one");
        let state = State::InFlight { until: NOW, lease, progress };
        world.stored = Some(Record { state, ..record }.encode());
    }

    pub(crate) fn look(&self, world: &mut World, server: usize) {
        let At::Asking { holder, attempt, fence } = world.servers[server].at else { return };
        if self.rules.reconcile == Reconcile::FencesThenLooks {
            world.ledger.fence = world.ledger.fence.max(fence + 1);
        }
        let finding = match world.effects() {
            0 => Finding::Nothing,
            _ => Finding::Happened(world.ledger.first),
        };
        world.servers[server].at = At::Settling { holder, attempt, finding };
    }

    pub(crate) fn settle(&self, world: &mut World, server: usize) {
        let At::Settling { holder, attempt, finding } = world.servers[server].at else { return };
        let resolution = Resolution {
            holder: holder_id(holder),
            attempt: Attempt::from_number(attempt.into()),
            finding: match finding {
                Finding::Happened(answer) => record::Finding::Happened(encoded(answer)),
                Finding::Nothing => record::Finding::NothingHappened,
            },
            terms: TERMS,
        };
        let step = record::resolve(world.current(), NOW, &resolution);
        match self.apply(world, step) {
            ResolveOutcome::Resolved => self.reached("resolved"),
            ResolveOutcome::Changed => self.reached("changed before it was resolved"),
            ResolveOutcome::Unreadable => panic!("nothing here is unreadable"),
        }
        world.servers[server].at = At::Claiming;
    }

    pub(crate) fn panics(&self, world: &mut World, server: usize) {
        let me = world.servers[server];
        let untouched = self.rules.effects == Effects::Marked && me.at == At::Running;
        let verdict = if untouched && !me.takeover { Verdict::NoEffect } else { Verdict::Unknown };
        self.release(world, &me, verdict);
        let told = if verdict == Verdict::NoEffect { Told::ComeBack } else { Told::Unknown };
        self.answer(world, server, told);
    }

    pub(crate) fn fails_after_effect(&self, world: &mut World, server: usize) {
        let me = world.servers[server];
        let told = match self.rules.on_error {
            OnError::NotModelled => return,
            OnError::Release => {
                self.release(world, &me, Verdict::NoEffect);
                Told::ComeBack
            }
            OnError::MarkUnknown => {
                self.release(world, &me, Verdict::Unknown);
                Told::Unknown
            }
            OnError::Store => self.complete(world, &me, ERROR + me.request),
        };
        self.answer(world, server, told);
    }

    pub(crate) fn run_late(&self, world: &mut World) {
        self.reached("late command");
        match world.late.take() {
            None => {}
            Some(Late::Claim(mut from)) => {
                // Nobody waits for its reply.
                from.at = At::Claiming;
                let keep = std::mem::replace(&mut world.servers[0], from);
                self.claim(world, 0);
                world.servers[0] = keep;
            }
            Some(Late::Complete(from, answer)) => {
                self.complete(world, &from, answer);
            }
            Some(Late::Release(from)) => {
                self.give_up(world, &from);
            }
        }
    }
}
