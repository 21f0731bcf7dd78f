//! The fault matrix with real processes: two servers, a Redis, a proxy between them, a ledger of its
//! own without a unique constraint. Every row has an id; `rows.md` says which test shows it. What clients were
//! told, handlers did and the store held is a history (`history.rs`), and is held against what is promised
//! (`invariants.rs`, and `invariants_refuse.rs` with a bad history for each).
//!
//! `FAULTS_SOAK` sets for how many minutes the random part (`random/`) goes on with new seeds, `FAULTS_SEED`
//! repeats a run, `FAULTS_KILLS` sets how many servers `load.rs` kills.
#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]
#![allow(unreachable_pub, reason = "a test program exports nothing")]
#![allow(clippy::wildcard_enum_match_arm, reason = "one kind is told from all others")]

mod checkpoint;
mod clients;
#[cfg(target_os = "linux")]
mod clock;
mod cluster;
mod crowd;
mod dropped;
mod exhausted;
mod failover;
mod frozen;
mod history;
mod invariants;
mod invariants_refuse;
mod laggard;
mod load;
mod pool;
mod ports;
mod process;
mod random;
mod rows;
mod site;
mod store;
mod unreachable;
mod versions;

#[path = "../support/groups.rs"]
#[allow(dead_code, reason = "each test program uses a part of it")]
mod groups;
#[path = "../support/line.rs"]
#[allow(dead_code, reason = "each test program uses a part of it")]
mod line;
#[path = "../support/named.rs"]
mod named;
#[path = "../support/postgres.rs"]
#[allow(dead_code, reason = "each test program uses a part of it")]
mod postgres;
#[path = "../support/redis.rs"]
#[allow(dead_code, reason = "each test program uses a part of it")]
mod redis;
#[path = "../support/relay.rs"]
#[allow(dead_code, reason = "each test program uses a part of it")]
mod relay;
#[path = "../support/sandbox.rs"]
mod sandbox;
