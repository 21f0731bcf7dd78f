//! What must hold in every state.

use stateright::{Model as _, Property};
use tower_idempotency::record::OnExpired;

use crate::step::Protocol;
use crate::world::{Client, Server, Told, World};

/// The invariants, by their numbers. I8 (record and effect exist together) is not offered by a store
/// that holds no transaction.
pub(crate) const NAMES: [&str; 9] = [
    "I1", // at most one effect
    "I2", // every success told is the first stored answer
    "I3", // a stored answer never changes
    "I4", // no two owners with a running lease
    "I5", // no two handlers at once
    "I6", // one request executes per key
    "I7", // a success that was told has its effect
    "I9", // a success answers the request that was sent
    "L1", // every client ends with a final answer
];

pub(crate) fn all() -> Vec<Property<Protocol>> {
    let [i1, i2, i3, i4, i5, i6, i7, i9, l1] = NAMES;
    vec![
        Property::always(i1, |_, world: &World| world.effects() <= 1),
        Property::always(i2, |_, world: &World| !world.broken.told_otherwise),
        Property::always(i3, |_, world: &World| !world.broken.rewritten),
        Property::always(i4, |_, world: &World| {
            world.servers.iter().filter(|server| server.leased && server.runs()).count() <= 1
        }),
        Property::always(i5, |_, world: &World| {
            world.servers.iter().filter(|server| Server::runs(server)).count() <= 1
        }),
        Property::always(i6, |_, world: &World| world.ledger.effects.contains(&0)),
        Property::always(i7, |_, world: &World| {
            world.effects() >= 1 || world.told.iter().all(Option::is_none)
        }),
        Property::always(i9, |_, world: &World| !world.broken.answered_another),
        Property::always(l1, ends_well),
        // With one property left undecided the checker explores everything.
        Property::always("everything", |_, _| true),
    ]
}

fn ends_well(protocol: &Protocol, world: &World) -> bool {
    if !protocol.rules.judges_liveness {
        return true;
    }
    let mut acts = Vec::new();
    protocol.actions(world, &mut acts);
    if !acts.is_empty() {
        return true;
    }
    world.clients.iter().zip(world.told).all(|(client, told)| match client {
        Client::Done(Told::Success(_) | Told::Mismatch) => true,
        Client::Done(Told::Unknown) => protocol.rules.on_expired == OnExpired::Refuse,
        Client::Done(Told::ComeBack) | Client::Ready => told.is_some(),
        Client::Waiting(_) => false,
    })
}
