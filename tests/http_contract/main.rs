//! The HTTP contract, case by case. `cases.md` says which test stands for which case, and why some
//! are not tested here.

#![allow(
    clippy::unwrap_used,
    reason = "a test fails by panicking, and its helpers stand outside of test functions"
)]

mod activation;
mod backpressure;
mod concurrency;
mod crash;
mod extractors;
mod fingerprint;
mod harness;
mod key_syntax;
#[allow(dead_code, unreachable_pub, reason = "each test program uses a part of it")]
#[path = "../support/log.rs"]
mod log;
#[path = "../support/named.rs"]
mod named;
mod outcomes;
mod replay;
mod retention;
mod scope;
mod store_failure;
mod table;
mod tower_contract;
mod unwinding;
mod wire_answers;
mod wire_requests;
mod wire_streams;
