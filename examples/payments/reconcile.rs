//! `--recovery reconcile`: the processor is asked what became of an interrupted attempt.

use axum::body::to_bytes;
use axum::response::{IntoResponse as _, Response};
use http::StatusCode;
use tower_idempotency::{Found, Interrupted, Recovery};

use crate::ledger::{Done, Ledger, LedgerError};
use crate::payments::receipt;
use crate::source::Source;
use crate::stripe::{self, View};

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

/// What may have been done under a key, by the name of the effect.
const EFFECTS: [&str; 6] = ["charge", "refund", "void", INTENT, CHARGE, stripe::REFUND];
const INTENT: &str = View::Intent.effect();
const CHARGE: &str = View::Charge.effect();

async fn find(ledger: &Ledger, interrupted: &Interrupted) -> Result<Found, LedgerError> {
    // The attempt that answers is the one that asked.
    let attempt = interrupted.attempt().next().number();
    for effect in EFFECTS {
        if let Some(done) = ledger.done(&interrupted.downstream_key(effect), attempt).await? {
            return Ok(whole(answer(effect, done)).await);
        }
    }
    Ok(Found::NothingHappened)
}

/// What the interrupted handler would have answered.
fn answer(effect: &str, done: Done) -> Response {
    match (effect, done) {
        (stripe::REFUND, Done::Refund(refund)) => stripe::refund_receipt(&refund),
        (_, Done::Refund(refund)) => (StatusCode::CREATED, axum::Json(refund)).into_response(),
        ("void", Done::Payment(payment)) => axum::Json(payment).into_response(),
        (effect, Done::Payment(payment)) => {
            let source = Source::parse(payment.source()).unwrap_or(Source::Visa);
            match effect {
                INTENT => stripe::receipt(View::Intent, source, payment),
                CHARGE => stripe::receipt(View::Charge, source, payment),
                _ => receipt(source, payment),
            }
        }
    }
}

async fn whole(response: Response) -> Found {
    let (head, body) = response.into_parts();
    match to_bytes(body, LONGEST_ANSWER).await {
        Ok(body) => Found::happened(Response::from_parts(head, body)),
        Err(_) => Found::StillUnknown,
    }
}
