//! Tools for operators: look a key up, list what nobody has settled, settle it, forget a key. Feature `admin`.
//!
//! [`Operator`] has the functions, over any store that can be [inspected](crate::store::Inspect): all of this
//! crate can. `router` is the same over HTTP (with the feature `axum`), and the program `idempotency` (feature
//! `cli`) on a command line. None of it is there unless you ask for it: the layer adds no route.
//!
//! ```
//! use std::time::Duration;
//! use tower_idempotency::MemoryStore;
//! use tower_idempotency::admin::{By, Operator, Settlement, Who, Why};
//! use tower_idempotency::store::{Survey, Wanted};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let operator = Operator::new(MemoryStore::new()); // the store that your layer has
//! let wanted = Wanted { survey: Survey::Unknown, at_most: 50, after: None };
//! for entry in operator.list(&wanted).await?.entries {
//!     let shown = operator.show(entry.key).await?;
//!     let by = By { who: Who::new("ana")?, why: Why::new("T-117: the provider knows no such charge")? };
//!     operator.settle(entry.key, shown.version(), Settlement::NotApplied, by).await?;
//! }
//! # Ok(())
//! # }
//! ```
//!
//! Before it settles anything, whoever asks the provider needs the key that the handler gave to it. No record holds that
//! key, and none is needed for it: [`DownstreamSeed`](crate::DownstreamSeed) makes it from the client's key and its scope.
//!
//! # What is promised
//! * **A change is made to what was seen, or not at all.** It names the [`Version`] that was shown; a record that
//!   moved on meanwhile is left alone ([`OperatorError::Changed`]). A handler that runs is never touched.
//! * **No change without a trace.** Who and why are required. An entry of the trail is kept in the store before
//!   the change (if that cannot be written, nothing is changed) and completed after it; and there is an event of
//!   [`tracing`] under the target [`AUDIT_TARGET`] for each of the two. Neither holds a client's key or a body.
//! * **Looking is cheap.** A look and a change go to one key. A listing reads an index: in a database an index of
//!   the table, always right; in Redis one that an [`Auditor`] makes anew from time to time, at a rate that you
//!   set, with SCAN. Every listing says how old its index is, and shows each record as it stands now.

mod answer;
mod auditor;
mod by;
mod known;
mod operator;
#[cfg(feature = "axum")]
mod router;
mod surely;
mod time;
mod view;

pub use answer::{AnswerError, LONGEST_BODY};
pub use auditor::{Auditor, AuditorTask};
pub use by::{By, ByError, Who, Why, misleads};
pub use known::Known;
pub use operator::{
    AUDIT_TARGET, ChangeId, Made, Operator, OperatorError, Settlement, Shown, Version, VersionError,
};
#[cfg(feature = "axum")]
pub use router::router;
pub use time::{brief, rfc3339};
pub use view::{
    Detail, IndexView, ListingView, MadeView, RecordView, ResponseView, TrailView, state_of,
};
