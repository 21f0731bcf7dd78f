//! The tower layer.

mod answer;
mod body;
mod extension;
mod future;
mod layer;
mod problem;
mod service;

pub use body::ResponseBody;
#[cfg(feature = "axum")]
pub use extension::NotIdempotent;
pub use extension::{Outcome, Replayed};
pub use future::ResponseFuture;
pub use layer::IdempotencyLayer;
pub use service::Idempotency;
