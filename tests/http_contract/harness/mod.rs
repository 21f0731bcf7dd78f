//! What all sections share: a shop that is called, a ledger of its effects, a store that is watched
//! and can be made to fail, and ways to ask and to look at answers.
//!
//! Effects are counted in the ledger, never only in answers.

mod ask;
mod shop;
mod store;
mod wire;

pub(crate) use ask::{Ask, Seen, delete, get, method, patch, post, put};
pub(crate) use shop::{Builder, Gate, Ledger, Shop, defaults, no_wait};
pub(crate) use store::{Fault, Verb, WatchedStore};
pub(crate) use wire::{Raw, Server, Wire};

use std::time::Duration;

pub(crate) const fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

pub(crate) const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Lets everything run that can run without time going on.
pub(crate) async fn settle_down() {
    for _ in 0..200 {
        tokio::task::yield_now().await;
    }
}
