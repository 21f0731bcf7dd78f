//! The steps: which are possible, and what each does. Each is one atomic action of one party.

use std::collections::BTreeSet;
use std::sync::Mutex;

use stateright::{Model, Property};
use tower_idempotency::Effects;
use tower_idempotency::record::{self, RenewOutcome, Renewal, State};

use crate::world::*;

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) enum Act {
    Send {
        client: u8,
        server: u8,
    },
    ClientLeaves(u8),
    Claim(u8),
    /// Done, the reply is lost: sent again.
    ClaimReplyLost(u8),
    /// Done, the reply is lost: given up, and released.
    ClaimReplyLostAndGivenUp(u8),
    /// Stuck on its way: given up, and released.
    ClaimDelayedAndGivenUp(u8),
    ClaimDelayedAndRepeated(u8),
    Checkpoint(u8),
    CheckpointReplyLost(u8),
    TakeEffect(u8),
    FailsWithoutEffect(u8),
    ReleaseDelayed(u8),
    Panics(u8),
    FailsAfterEffect(u8),
    Complete(u8),
    CompleteReplyLost(u8),
    CompleteGivenUp(u8),
    CompleteDelayed(u8),
    Renew(u8),
    Look(u8),
    Settle(u8),
    Deliver(u8),
    AnswerLost(u8),
    Crash(u8),
    LeaseEnds,
    LateCommandRuns,
    RetentionEnds,
    Wipe,
}

/// One scenario as a model, and what was reached in it.
pub(crate) struct Protocol {
    pub(crate) rules: Rules,
    /// Check this invariant alone.
    pub(crate) only: Option<&'static str>,
    pub(crate) reached: Mutex<BTreeSet<&'static str>>,
}

impl Protocol {
    fn server_actions(&self, world: &World, server: u8, acts: &mut Vec<Act>) {
        let me = &world.servers[usize::from(server)];
        let Rules { late_commands, .. } = self.rules;
        let lossy = world.budget.lost > 0;
        let may_delay = lossy && late_commands && world.late.is_none();
        let fails = world.budget.handler_fails > 0;
        let mut may = |possible: bool, act: fn(u8) -> Act| {
            if possible {
                acts.push(act(server));
            }
        };
        may(me.at != At::Idle && world.budget.crash > 0, Act::Crash);
        may(me.runs() && self.would_renewal_help(world, me), Act::Renew);
        match me.at {
            At::Idle => {}
            At::Claiming => {
                let waits = !self.rules.twins_conflict && is_busy(world, me);
                may(!waits, Act::Claim);
                may(!waits && lossy, Act::ClaimReplyLost);
                may(!waits && lossy, Act::ClaimReplyLostAndGivenUp);
                may(!waits && may_delay, Act::ClaimDelayedAndGivenUp);
                may(!waits && may_delay, Act::ClaimDelayedAndRepeated);
            }
            At::Running => {
                let marks = self.rules.effects == Effects::Marked && !self.rules.acts_unmarked;
                may(marks, Act::Checkpoint);
                may(marks && lossy, Act::CheckpointReplyLost);
                may(!marks, Act::TakeEffect);
                may(fails, Act::FailsWithoutEffect);
                may(fails && self.rules.effects == Effects::Marked, Act::Panics);
                may(fails && may_delay, Act::ReleaseDelayed);
            }
            At::Marked => {
                may(true, Act::TakeEffect);
                may(fails, Act::Panics);
            }
            At::Acted(_) => {
                may(true, Act::Complete);
                may(lossy, Act::CompleteReplyLost);
                may(lossy, Act::CompleteGivenUp);
                may(may_delay, Act::CompleteDelayed);
                may(fails && self.rules.on_error != OnError::NotModelled, Act::FailsAfterEffect);
            }
            At::Asking { .. } => may(true, Act::Look),
            At::Settling { .. } => may(true, Act::Settle),
            At::Answering(_) => {
                may(true, Act::Deliver);
                may(lossy, Act::AnswerLost);
            }
        }
    }

    /// A renewal that only keeps what is there would be a step without a trace.
    fn would_renewal_help(&self, world: &World, me: &Server) -> bool {
        match world.record() {
            None => true,
            Some(record) => match record.state {
                State::InFlight { until, .. } => {
                    until == NOW && record.holder == holder_id(me.holder)
                }
                State::Open { .. } | State::Indeterminate { .. } | State::Completed { .. } => false,
            },
        }
    }
}

/// True if a twin of this request runs under a lease.
fn is_busy(world: &World, me: &Server) -> bool {
    world.record().is_some_and(|record| {
        let same = fingerprints(me.request).current() == record.fingerprint;
        let foreign = record.holder != holder_id(me.holder);
        same && foreign && matches!(record.state, State::InFlight { until, .. } if until > NOW)
    })
}

impl Model for Protocol {
    type State = World;
    type Action = Act;

    fn init_states(&self) -> Vec<World> {
        let second: &[u8] = if self.rules.mixed_requests { &[0, 1] } else { &[0] };
        second.iter().map(|&request| World::new(&self.rules, request)).collect()
    }

    fn actions(&self, world: &World, acts: &mut Vec<Act>) {
        for client in 0..CLIENTS {
            let number = u8::try_from(client).expect("two clients");
            if world.clients[client] == Client::Ready && world.tries[client] > 0 {
                for (server, me) in (0..).zip(&world.servers) {
                    if me.at == At::Idle {
                        acts.push(Act::Send { client: number, server });
                    }
                }
            }
            let waits = matches!(world.clients[client], Client::Waiting(_));
            if waits && world.budget.client_leaves > 0 {
                acts.push(Act::ClientLeaves(number));
            }
        }
        for server in 0..u8::try_from(SERVERS).expect("two servers") {
            self.server_actions(world, server, acts);
        }
        if world.late.is_some() {
            acts.push(Act::LateCommandRuns);
        }
        let Some(record) = world.record() else { return };
        match record.state {
            State::InFlight { until, .. } if until > NOW => {
                // A dead server's lease always ends; a living one's only by a pause.
                if !world.is_alive(record.holder) || world.budget.pause > 0 {
                    acts.push(Act::LeaseEnds);
                }
            }
            State::Completed { .. } if world.budget.retention > 0 => acts.push(Act::RetentionEnds),
            State::InFlight { .. }
            | State::Open { .. }
            | State::Indeterminate { .. }
            | State::Completed { .. } => {}
        }
        if world.budget.wipe > 0 {
            acts.push(Act::Wipe);
        }
    }

    fn next_state(&self, before: &World, act: Act) -> Option<World> {
        let mut after = before.clone();
        self.step(&mut after, act);
        Some(after)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut all = crate::invariants::all();
        all.retain(|property| self.only.is_none_or(|only| property.name == only));
        all
    }
}

impl Protocol {
    fn step(&self, world: &mut World, act: Act) {
        match act {
            Act::Send { client, server } => {
                let client_at = usize::from(client);
                world.tries[client_at] -= 1;
                world.clients[client_at] = Client::Waiting(server);
                let (holder, request) = (world.next_holder, world.requests[client_at]);
                world.next_holder += 1;
                world.servers[usize::from(server)] =
                    Server { at: At::Claiming, client, holder, request, ..IDLE };
            }
            Act::ClientLeaves(client) => {
                world.budget.client_leaves -= 1;
                world.clients[usize::from(client)] = Client::Ready;
            }
            Act::Wipe => {
                world.budget.wipe -= 1;
                world.stored = None;
            }
            Act::RetentionEnds => {
                world.budget.retention -= 1;
                world.stored = None;
            }
            Act::LeaseEnds => self.lease_ends(world),
            Act::LateCommandRuns => self.run_late(world),
            Act::Claim(server)
            | Act::ClaimReplyLost(server)
            | Act::ClaimReplyLostAndGivenUp(server)
            | Act::ClaimDelayedAndGivenUp(server)
            | Act::ClaimDelayedAndRepeated(server) => {
                self.claim_step(world, usize::from(server), act);
            }
            Act::Checkpoint(server)
            | Act::CheckpointReplyLost(server)
            | Act::TakeEffect(server)
            | Act::FailsWithoutEffect(server)
            | Act::ReleaseDelayed(server)
            | Act::Panics(server)
            | Act::FailsAfterEffect(server)
            | Act::Renew(server) => self.handler_step(world, usize::from(server), act),
            Act::Complete(server)
            | Act::CompleteReplyLost(server)
            | Act::CompleteGivenUp(server)
            | Act::CompleteDelayed(server)
            | Act::Look(server)
            | Act::Settle(server)
            | Act::Deliver(server)
            | Act::AnswerLost(server)
            | Act::Crash(server) => self.end_step(world, usize::from(server), act),
        }
    }

    fn claim_step(&self, world: &mut World, server: usize, act: Act) {
        if !matches!(act, Act::Claim(_)) {
            world.budget.lost -= 1;
        }
        match act {
            Act::ClaimReplyLost(_) => {
                self.claim(world, server);
                let fresh = world.next_holder;
                let me = &mut world.servers[server];
                me.at = At::Claiming;
                if self.rules.fresh_holder {
                    me.holder = fresh;
                    world.next_holder += 1;
                }
            }
            Act::ClaimReplyLostAndGivenUp(_) => {
                let me = world.servers[server];
                self.claim(world, server);
                self.give_up(world, &me);
                self.answer(world, server, Told::ComeBack);
            }
            Act::ClaimDelayedAndGivenUp(_) => {
                let me = world.servers[server];
                world.late = Some(Late::Claim(me));
                self.give_up(world, &me);
                self.answer(world, server, Told::ComeBack);
            }
            Act::ClaimDelayedAndRepeated(_) => {
                world.late = Some(Late::Claim(world.servers[server]));
            }
            _ => {
                self.claim(world, server);
            }
        }
    }

    fn handler_step(&self, world: &mut World, server: usize, act: Act) {
        let me = world.servers[server];
        match act {
            Act::Checkpoint(_) => match self.checkpoint(world, server) {
                RenewOutcome::Renewed | RenewOutcome::Restored => {
                    world.servers[server].at = At::Marked;
                    world.servers[server].leased = true;
                }
                RenewOutcome::Lost | RenewOutcome::Unreadable => {
                    // It stops, and says that nothing happened.
                    self.reached("stopped at its mark");
                    self.give_up(world, &me);
                    self.answer(world, server, Told::ComeBack);
                }
            },
            Act::CheckpointReplyLost(_) => {
                world.budget.lost -= 1;
                self.checkpoint(world, server);
            }
            Act::TakeEffect(_) => match self.act(world, server) {
                Some(answer) => world.servers[server].at = At::Acted(answer),
                None => {
                    self.give_up(world, &me);
                    self.answer(world, server, Told::ComeBack);
                }
            },
            Act::FailsWithoutEffect(_) => {
                world.budget.handler_fails -= 1;
                self.give_up(world, &me);
                self.answer(world, server, Told::ComeBack);
            }
            Act::ReleaseDelayed(_) => {
                world.budget.handler_fails -= 1;
                world.budget.lost -= 1;
                world.late = Some(Late::Release(me));
                self.answer(world, server, Told::ComeBack);
            }
            Act::Panics(_) => {
                world.budget.handler_fails -= 1;
                self.panics(world, server);
            }
            Act::FailsAfterEffect(_) => {
                world.budget.handler_fails -= 1;
                self.fails_after_effect(world, server);
            }
            _ => {
                let renewal = Renewal { terms: TERMS, checkpoint: None };
                let step = record::renew(world.current(), NOW, &me.owner(), &renewal);
                if self.apply(world, step) == RenewOutcome::Restored {
                    self.reached("restored by renewal");
                }
                world.servers[server].leased = true;
            }
        }
    }

    fn end_step(&self, world: &mut World, server: usize, act: Act) {
        let me = world.servers[server];
        match (act, me.at) {
            (Act::Complete(_), At::Acted(answer)) => {
                let told = self.complete(world, &me, answer);
                self.answer(world, server, told);
            }
            (Act::CompleteReplyLost(_), At::Acted(answer)) => {
                world.budget.lost -= 1;
                self.complete(world, &me, answer); // and sent again
            }
            (Act::CompleteGivenUp(_) | Act::CompleteDelayed(_), At::Acted(answer)) => {
                world.budget.lost -= 1;
                if matches!(act, Act::CompleteDelayed(_)) {
                    world.late = Some(Late::Complete(me, answer));
                }
                let told = match self.rules.answers_unstored {
                    true => Told::Success(answer),
                    false => Told::ComeBack,
                };
                self.answer(world, server, told);
            }
            (Act::Look(_), _) => self.look(world, server),
            (Act::Settle(_), _) => self.settle(world, server),
            (Act::Deliver(_), At::Answering(told)) => self.deliver(world, server, told),
            (Act::AnswerLost(_), _) => {
                world.budget.lost -= 1;
                self.gone(world, server);
            }
            _ => {
                world.budget.crash -= 1;
                self.gone(world, server);
            }
        }
    }

    /// The client learns nothing, and asks again.
    fn gone(&self, world: &mut World, server: usize) {
        let client = usize::from(world.servers[server].client);
        world.servers[server] = IDLE;
        if world.clients[client] == Client::Waiting(u8::try_from(server).expect("two servers")) {
            world.clients[client] = Client::Ready;
        }
    }
}
