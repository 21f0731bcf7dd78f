//! What several test programs share.

#![allow(dead_code, reason = "each test program uses a part of it")]
#![allow(unreachable_pub, reason = "each test program has this as a module of its own")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]
#![allow(clippy::wildcard_enum_match_arm, reason = "every other outcome fails the test")]

pub mod breaking;
pub mod frontend;
pub mod groups;
pub mod load;
pub mod log;
pub mod postgres;
pub mod redis;
pub mod relay;
pub mod store;
#[cfg(feature = "redis-tls")]
pub mod tls;
