//! The sandbox's own errors: `{"error":{"type","code","message"}}`, and what each one says about
//! its effect.

use axum::Json;
use axum::response::{IntoResponse, Response};
use http::header::RETRY_AFTER;
use http::{HeaderName, StatusCode};
use serde_json::json;
use tower_idempotency::Outcome;

use crate::ledger::LedgerError;

/// An answer that is not a success.
#[derive(Debug)]
pub(crate) struct ApiError {
    status: StatusCode,
    kind: &'static str,
    code: &'static str,
    message: String,
    /// The handler's own word about its effect. Without one the layer stores the answer, since
    /// only the handler can know that nothing happened.
    outcome: Option<Outcome>,
    retry_after: Option<(HeaderName, &'static str)>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, code: &'static str, message: String) -> Self {
        Self { status, kind, code, message, outcome: None, retry_after: None }
    }

    fn no_effect(mut self) -> Self {
        self.outcome = Some(Outcome::NoEffect);
        self
    }

    /// True if the layer frees the key after it: by the handler's own word, or by the status.
    pub(crate) fn frees_the_key(&self) -> bool {
        matches!(self.outcome, Some(Outcome::NoEffect))
            || self.status == StatusCode::TOO_MANY_REQUESTS
    }

    fn try_again(mut self) -> Self {
        self.retry_after = Some((RETRY_AFTER, "1"));
        self
    }

    /// The request makes no sense. Nothing happened, so the corrected one may use the same key.
    pub(crate) fn invalid(code: &'static str, message: impl Into<String>) -> Self {
        let status = match code {
            "unsupported_media_type" => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            _ => StatusCode::BAD_REQUEST,
        };
        Self::new(status, "invalid_request_error", code, message.into()).no_effect()
    }

    /// Not here, or not yours.
    pub(crate) fn not_found(what: &str) -> Self {
        let message = format!("no such {what}");
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", "resource_missing", message)
    }

    pub(crate) fn method_not_allowed() -> Self {
        let message = "this route does not know the method".to_owned();
        let status = StatusCode::METHOD_NOT_ALLOWED;
        Self::new(status, "invalid_request_error", "method_not_allowed", message)
    }

    /// The payment is not in a state for this.
    pub(crate) fn conflict(code: &'static str, message: &str) -> Self {
        Self::new(StatusCode::CONFLICT, "invalid_request_error", code, message.to_owned())
    }

    /// The card was declined: an answer like any other, and a new try needs a new key.
    pub(crate) fn declined() -> Self {
        let message = "the card was declined".to_owned();
        Self::new(StatusCode::PAYMENT_REQUIRED, "card_error", "card_declined", message)
    }

    /// Too many requests: the layer frees the key after a 429 by itself.
    pub(crate) fn rate_limited() -> Self {
        let message = "too many requests".to_owned();
        Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", "rate_limited", message)
            .try_again()
    }

    /// The processor was not reached, or this server is stopping. Certainly nothing happened.
    pub(crate) fn unavailable(message: &str) -> Self {
        let status = StatusCode::SERVICE_UNAVAILABLE;
        Self::new(status, "api_error", "unavailable", message.to_owned()).no_effect().try_again()
    }

    /// Something broke, and nobody knows where.
    pub(crate) fn panicked() -> Self {
        let message = "something broke; the request may have taken effect".to_owned();
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "api_error", "internal_error", message)
    }

    /// Something broke after the charge.
    pub(crate) fn broken() -> Self {
        let message = "something broke after the charge".to_owned();
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "api_error", "internal_error", message)
    }
}

impl From<LedgerError> for ApiError {
    fn from(error: LedgerError) -> Self {
        tracing::error!(%error, "the ledger failed");
        if error.untouched() {
            return Self::unavailable("the ledger is busy");
        }
        let message = "the ledger did not say whether it was done".to_owned();
        let status = StatusCode::INTERNAL_SERVER_ERROR;
        let mut unknown = Self::new(status, "api_error", "ledger_failed", message);
        unknown.outcome = Some(Outcome::Unknown);
        unknown
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let Self { status, kind, code, message, outcome, retry_after } = self;
        let body = json!({ "error": { "type": kind, "code": code, "message": message } });
        let mut response = (status, outcome, Json(body)).into_response();
        response
            .headers_mut()
            .extend(retry_after.map(|(name, value)| (name, http::HeaderValue::from_static(value))));
        response
    }
}
