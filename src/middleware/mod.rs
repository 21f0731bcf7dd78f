//! The tower layer: reads the key, runs the handler at most once, replays its answer.
//!
//! Works around any [`Service`](tower_service::Service) of HTTP requests whose request body can be made from
//! [`Bytes`](bytes::Bytes), such as axum's routes and routers.
//!
//! # What happens to a request
//!
//! 1. *Covered?* Only the [methods](crate::ConfigBuilder::methods) of the configuration are, POST and PATCH by
//!    default. Others pass through untouched; nothing is boxed or buffered for them.
//! 2. *The key.* One header line, bare or quoted. None: 400, or passed through untouched where keys are
//!    [optional](crate::MissingKey). Malformed: always 400.
//! 3. *The scope.* Who is calling? Nobody: 401.
//! 4. *The body* is read whole, within a limit. A client that leaves now leaves no trace.
//! 5. *The fingerprint* is made from method, whole path, query, media type and body.
//! 6. *The claim.* The rest runs in a task of its own, which no client that leaves can interrupt.
//! 7. *The handler* finds its [`Execution`](crate::Execution), which knows the key, in the request's extensions (with axum
//!    it and the [`IdempotencyKey`](crate::IdempotencyKey) are extractors).
//! 8. *The answer* is read whole, stored, and only then sent.
//!
//! # The error type
//! The layer never changes `S::Error`. A refusal is a response: a problem document, with the typed reason, a
//! [`Rejection`](crate::Rejection), in its extensions. A replay has [`Replayed`] there.
//!
//! An error of the inner service passes through as it is; its outcome is recorded as unknown.
//!
//! # Readiness
//! `poll_ready` is that of the inner service, and the instance that was polled ready is the one that is
//! called. A request that waits for its running twin holds what `poll_ready` has reserved.
//!
//! # Cancel safety
//! Dropping the response future before the body is read leaves no trace. After that the handler runs to its
//! end and is recorded, and a retry gets its answer. Call [`IdempotencyLayer::drain`] before the
//! runtime ends.
//!
//! # Example
//! ```
//! use http::{Request, Response, StatusCode};
//! use http_body_util::{BodyExt as _, Full};
//! use bytes::Bytes;
//! use tower::{Layer as _, ServiceExt as _, service_fn};
//! use tower_idempotency::{Config, IdempotencyLayer, MemoryStore, Scope};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // A service that is not axum's, to show that any will do.
//! let pay = service_fn(async |request: Request<Full<Bytes>>| {
//!     let body = request.into_body().collect().await?.to_bytes();
//!     Ok::<_, std::convert::Infallible>(Response::new(Full::new(body)))
//! });
//! let config = Config::builder().scope(Scope::global()).build()?;
//! let pay = IdempotencyLayer::new(config, MemoryStore::new()).layer(pay);
//!
//! let request = |amount: &'static str| {
//!     Request::post("/pay").header("idempotency-key", "k1").body(Full::from(amount))
//! };
//! let first = pay.clone().oneshot(request("19.99")?).await?;
//! assert!(!first.headers().contains_key("idempotent-replayed"));
//!
//! let retry = pay.clone().oneshot(request("19.99")?).await?;
//! assert_eq!(retry.headers()["idempotent-replayed"], "true");
//! assert_eq!(retry.into_body().collect().await?.to_bytes(), "19.99");
//!
//! let other = pay.oneshot(request("1999.00")?).await?;
//! assert_eq!(other.status(), StatusCode::UNPROCESSABLE_ENTITY);
//! # Ok(())
//! # }
//! ```

mod answer;
mod body;
mod extension;
mod future;
mod keys;
mod layer;
mod problem;
mod service;
mod shadow;

#[cfg(feature = "client")]
pub(crate) use answer::is_stream;
#[cfg(feature = "admin")]
pub(crate) use answer::{is_bodiless, is_never_stored};
pub use body::ResponseBody;
#[cfg(feature = "client")]
pub(crate) use body::{Read, read};
#[cfg(feature = "axum")]
pub use extension::NotIdempotent;
pub use extension::{Outcome, Replayed};
pub use future::ResponseFuture;
pub use layer::IdempotencyLayer;
#[cfg(feature = "admin")]
pub(crate) use problem::mark_final;
pub use service::Idempotency;
