//! The guide: what is decided, why, and what to do when something goes wrong.
//!
//! | chapter | for |
//! |---|---|
//! | [guarantees] | what is promised, in which mode, and what ends it |
//! | [states] | what a key goes through |
//! | [problems] | every refusal: what it means, what the client should do |
//! | [defaults] | every default and its reason, and where this crate departs from others |
//! | [layers] | where the layer goes among others |
//! | [transactions] | key, effect and answer in one transaction of PostgreSQL or SQLite |
//! | [operations] | running it: which numbers should wake someone up |
//! | [openapi] | what to add to an OpenAPI document, with the fragment to merge |
//! | [rollout] | how to bring the layer into an API that is in use, and who may see a replay |
//! | [requests] | where keys come from, and when two requests are the same |
//! | [redis](mod@redis) | what Redis must be like |
//! | [failures] | what can break, what happens then |
//! | [performance] | what it costs, next to a floor written by hand, and how to measure it |
//! | [stores] | which store, and what each can promise |
//! | [migration] | from doing it by hand, without a gap and without a double |
//! | [glossary] | the words, each with one meaning |
//! | [architecture] | the house: floors, invariants, where to change what |

#[doc = include_str!("architecture.md")]
pub mod architecture {}
#[doc = include_str!("defaults.md")]
pub mod defaults {}
#[doc = include_str!("failures.md")]
pub mod failures {}
#[doc = include_str!("glossary.md")]
pub mod glossary {}
#[doc = include_str!("guarantees.md")]
pub mod guarantees {}
#[doc = include_str!("layers.md")]
pub mod layers {}
#[doc = include_str!("operations.md")]
pub mod operations {}
#[doc = include_str!("migration.md")]
pub mod migration {}
#[doc = include_str!("openapi.md")]
pub mod openapi {
    /// The fragment: an OpenAPI 3.1 document in YAML with nothing but `components`. The same as
    /// `openapi/idempotency.yaml` in the sources.
    pub const FRAGMENT: &str = include_str!("../../openapi/idempotency.yaml");
}
#[doc = include_str!("performance.md")]
pub mod performance {}
#[doc = include_str!("problems.md")]
pub mod problems {}
#[doc = include_str!("redis.md")]
pub mod redis {}
#[doc = include_str!("requests.md")]
pub mod requests {}
#[doc = include_str!("rollout.md")]
pub mod rollout {}
#[doc = include_str!("states.md")]
pub mod states {}
#[doc = include_str!("stores.md")]
pub mod stores {}
#[cfg_attr(
    all(feature = "axum", feature = "sqlite", feature = "postgres"),
    doc = include_str!("transactions.md")
)]
#[cfg_attr(
    not(all(feature = "axum", feature = "sqlite", feature = "postgres")),
    doc = "Key, effect and answer in one transaction: see the features `sqlite` and `postgres`."
)]
pub mod transactions {}
