//! `--recovery reconcile`: the processor is asked what became of an interrupted attempt.

use axum::body::to_bytes;
use axum::response::{IntoResponse as _, Response};
use http::StatusCode;
use tower_idempotency::{Found, Interrupted, Recovery};

use crate::books::Books;
use crate::ledger::{Done, Ledger, LedgerError};
use crate::payments::receipt;
use crate::source::Source;

/// Larger than any answer of the sandbox.
const LONGEST_ANSWER: usize = 32 << 20;

/// Asks this processor.
///
/// Fence first, then look: a paused handler may still charge after the look. Here the processor
/// itself is the fence, as it does one provider key only once in this mode: such a charge finds
/// that of the retry, or the other way round.
pub(crate) fn by_asking(ledger: Ledger) -> Recovery {
    Recovery::reconcile(move |interrupted| {
        let ledger = ledger.clone();
        async move {
            match find(&ledger, &interrupted).await {
                Ok(found) => found,
                Err(error) => {
                    tracing::error!(%error, "the processor does not say what happened");
                    Found::StillUnknown
                }
            }
        }
    })
}

async fn find(ledger: &Ledger, interrupted: &Interrupted) -> Result<Found, LedgerError> {
    let provider_keys =
        ["charge", "refund", "void"].map(|effect| interrupted.downstream_key(effect));
    // The attempt that answers is the one that asked.
    let attempt = interrupted.attempt().next().number();
    Ok(match Books::done(ledger, provider_keys, attempt).await? {
        None => Found::NothingHappened,
        Some(Done::Charge(payment)) => {
            let source = Source::parse(payment.source()).unwrap_or(Source::Visa);
            whole(receipt(source, payment)).await
        }
        Some(Done::Refund(refund)) => {
            whole((StatusCode::CREATED, axum::Json(refund)).into_response()).await
        }
        Some(Done::Void(payment)) => whole(axum::Json(payment).into_response()).await,
    })
}

async fn whole(response: Response) -> Found {
    let (head, body) = response.into_parts();
    match to_bytes(body, LONGEST_ANSWER).await {
        Ok(body) => Found::happened(Response::from_parts(head, body)),
        Err(_) => Found::StillUnknown,
    }
}
