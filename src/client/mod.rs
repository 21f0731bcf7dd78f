//! The other end of the wire: a client that retries one operation under one key. Feature `client`.
//!
//! The layer makes retries safe; this makes them happen, and rightly:
//!
//! * **One key per operation.** Given in the request's `Idempotency-Key` header, or made (a random UUID) before
//!   the first send. Every try carries the same key and the same bytes; a body that can be read only once is
//!   refused before anything is sent.
//! * **What is tried again:** connections that fail or break, also in the middle of an answer; 409 while the operation runs; 429,
//!   503 and other server errors, unless the server says no (`Stripe-Should-Retry: false`, or the error is itself
//!   a replay). `Retry-After` is obeyed in both forms, up to a cap.
//! * **What is not:** a key that was used with another request, and an outcome that nobody knows. Both end in a
//!   typed [`ClientError`]; neither ever leads to a new key, which could pay twice.
//! * **Without a key** a POST is sent again only where nothing was sent: its connection was refused. (With `reqwest`
//!   it is not sent again at all: that client follows redirects within one try, and a refused connection may be the
//!   second one. For the same reason follow no redirects below the tower layer.)
//! * **Bounds:** tries, time for one try, time in all, a cap for what the server may ask, and a
//!   [budget](RetryBudget) that all operations share, so that retries do not finish off a server that is down.
//!
//! # The key outlives the process
//! A crash between two tries must not lose the key. Make it, keep it with the order, then send:
//!
//! ```
//! use http::Request;
//! use http_body_util::Full;
//! use bytes::Bytes;
//! use tower_idempotency::{IDEMPOTENCY_KEY, IdempotencyKey};
//!
//! let key = IdempotencyKey::random();
//! // orders.save(order_id, key.as_str())?; after a crash: IdempotencyKey::parse(saved.as_bytes(), ..)?
//! let request: Request<Full<Bytes>> = Request::post("https://api.example/v1/payments")
//!     .header(IDEMPOTENCY_KEY, key.to_header_value())
//!     .body(Full::from("{\"amount\": 1999}"))?;
//! # let _ = request;
//! # Ok::<(), http::Error>(())
//! ```
//!
//! # With hyper clients, or any tower service
//! ```no_run
//! # async fn pay(request: http::Request<http_body_util::Full<bytes::Bytes>>) -> Result<(), Box<dyn std::error::Error>> {
//! use hyper_util::{client::legacy::Client, rt::TokioExecutor};
//! use tower::{Layer as _, ServiceExt as _};
//! use tower_idempotency::client::{Answered, ClientErrorKind, RetryLayer, RetryPolicy};
//!
//! let client = RetryLayer::new(RetryPolicy::new())
//!     .layer(Client::builder(TokioExecutor::new()).build_http());
//! match client.oneshot(request).await {
//!     Ok(response) => {
//!         let replayed = response.extensions().get::<Answered>().is_some_and(Answered::is_replay);
//!         println!("{}, {}", response.status(), if replayed { "as before" } else { "done now" });
//!     }
//!     Err(error) if *error.kind() == ClientErrorKind::OutcomeUnknown => {
//!         println!("nobody knows: ask the operator about this key, and make no new one");
//!     }
//!     Err(error) => println!("keep the key and come back later: {error}"),
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # Redirects
//! This follows none; a client inside may. reqwest does by default, and its own policy decides what goes along: to another
//! host it drops `Authorization` and cookies, and keeps `Idempotency-Key`; a 303 (and most 301 and 302) makes a GET of a POST.
//! For payments switch it off (`redirect::Policy::none()`): a host that another one names should not get the key.
//!
//! # With reqwest
//! `RetryMiddleware` (feature `client-reqwest`) is the same for `reqwest-middleware`. Switch off other retry
//! middleware: two of them multiply. Multipart forms of reqwest are streams and are refused; encode them to
//! bytes first, which also fixes their boundary.
//!
//! # From a handler to a provider
//! Inside a handler the key for a call outward is not random: it is
//! [`Execution::downstream_key`](crate::Execution::downstream_key), the same over all runs. See
//! `examples/provider_call.rs`.

mod after;
mod budget;
mod error;
mod judge;
mod key;
#[cfg(feature = "client-reqwest")]
mod middleware;
mod observe;
mod policy;
mod retry;
mod service;

pub use budget::RetryBudget;
pub use error::{ClientError, ClientErrorKind, GaveUp};
pub use key::Keys;
#[cfg(feature = "client-reqwest")]
pub use middleware::RetryMiddleware;
pub use policy::RetryPolicy;
pub use retry::Answered;
pub use service::{Retry, RetryLayer};
