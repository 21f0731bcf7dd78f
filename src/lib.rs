// The first definition of a link wins: on this page links to the guide lead to its modules, and in a
// README that is read by itself to the guide's files.
#![cfg_attr(
    all(feature = "axum", feature = "redis"),
    doc = "[layers]: guide::layers\n[operations]: guide::operations\n[requests]: guide::requests\n\
           [transactions]: guide::transactions\n\n"
)]
#![cfg_attr(all(feature = "axum", feature = "redis"), doc = include_str!("../README.md"))]
#![cfg_attr(
    not(all(feature = "axum", feature = "redis")),
    doc = "The idempotency-key layer for tower and axum: retries of a payment made safe."
)]
#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(feature = "admin")]
pub mod admin;
mod by_digest;
mod checkpoint;
#[cfg(feature = "client")]
pub mod client;
mod config;
mod engine;
mod error;
mod fingerprint;
mod guard;
pub mod guide;
mod key;
pub mod middleware;
mod mistakes;
pub mod record;
mod response;
mod scope;
pub mod store;
mod token;

pub use config::{
    Config, ConfigBuilder, EXPOSED_HEADERS, Enforcement, ErrorFlavour, Found, IDEMPOTENCY_KEY,
    IDEMPOTENCY_STATUS, IDEMPOTENT_REPLAYED, Interrupted, MissingKey, Reconciler, Recovery,
    STRIPE_SHOULD_RETRY, StoreDown, StoredBodies,
};
pub use engine::{Drained, Engine, Execution, WaitLimits};
pub use error::{
    CheckpointError, ConfigError, Rejection, RejectionKind, StoreError, StoreErrorKind,
};
#[cfg(feature = "json")]
pub use fingerprint::canonical_json;
pub use fingerprint::{
    Comparison, Fingerprint, Fingerprints, JsonPointer, JsonPointerError, QueryOrder, Recipe,
    RecipeId,
};
pub use guard::{ReplayDecision, ReplayRequest};
pub use key::{BodyDoubt, IdempotencyKey, KeyError, KeySyntax};
pub use middleware::{Idempotency, IdempotencyLayer, Outcome, Replayed};
pub use record::Effects;
pub use response::{CodecError, HeaderRules, StoredBody, StoredResponse};
pub use scope::{DownstreamSeed, Identity, Scope, StorageKey};
#[cfg(feature = "redis")]
pub use store::redis::RedisStore;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub use store::sql::Tx;
#[cfg(feature = "postgres")]
pub use store::sql::{PostgresLeaseStore, PostgresStore};
#[cfg(feature = "sqlite")]
pub use store::sql::{SqliteLeaseStore, SqliteStore};
pub use store::{Lease, MemoryStore, Store};
pub use token::{Attempt, Fence, HolderId};
