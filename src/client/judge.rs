//! What an answer means for the operation: final, to be asked for again, or the end.

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, StatusCode, response};
use serde_json::Value;

use super::after::retry_after;
use super::error::ClientErrorKind;
use crate::config::{IDEMPOTENT_REPLAYED, STRIPE_SHOULD_RETRY};

/// Longer than any reference of ours, which has twelve hex digits.
const LONGEST_REFERENCE: usize = 64;

/// What to do about an answer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Judgement {
    /// Return it.
    Final,
    /// Send the same again.
    Again(Again),
    /// The operation cannot get an answer.
    Stop(ClientErrorKind),
}

/// A try that is to be followed by another one.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Again {
    pub(super) reason: &'static str,
    /// How long the server asks to wait.
    pub(super) after: Option<Duration>,
    /// Waiting for a running operation is what the server wants, and costs no budget.
    pub(super) free: bool,
}

/// An answer and what the problem document in it says.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Judged {
    pub(super) judgement: Judgement,
    pub(super) safe_new_key: Option<bool>,
}

/// What the code of a problem document means; more exact than any status.
fn by_code(code: &str) -> Option<Meaning> {
    let meaning = match code {
        "idempotency_key_in_use" => Meaning::Again { reason: "in_use", free: true },
        "idempotency_too_many_waiting" | "idempotency_too_many_in_flight" => {
            Meaning::Again { reason: "too_many", free: false }
        }
        "idempotency_store_unavailable"
        | "idempotency_record_unreadable"
        | "idempotency_rolled_back" => Meaning::Again { reason: "unavailable", free: false },
        // Nothing was executed, so the whole request can be sent again.
        "idempotency_request_incomplete" => {
            Meaning::Again { reason: "request_incomplete", free: false }
        }
        "idempotency_key_reused" => Meaning::Stop(ClientErrorKind::KeyReused),
        "idempotency_outcome_unknown" => Meaning::Stop(ClientErrorKind::OutcomeUnknown),
        "idempotency_result_unavailable" => Meaning::Stop(ClientErrorKind::ResultUnavailable),
        "idempotency_key_missing"
        | "idempotency_key_invalid"
        | "idempotency_scope_missing"
        | "idempotency_replay_forbidden"
        | "idempotency_request_too_large" => Meaning::Final,
        _ => return None,
    };
    Some(meaning)
}

enum Meaning {
    Final,
    Again { reason: &'static str, free: bool },
    Stop(ClientErrorKind),
}

/// Judges an answer to a request that may be repeated.
///
/// In this order: a known `code` (of an unknown outcome with what the server says of a retry: it may be one that runs
/// interrupted operations again, or finds out about them); a replay, which will not change; `Stripe-Should-Retry`; Stripe's type
/// for a key that was reused; the status.
pub(super) fn judge(head: &response::Parts, body: Option<&Bytes>) -> Judged {
    let said = body.map_or_else(Said::default, |body| Said::read(head, body));
    let retry_settles = should_retry(&head.headers) == Some(true);
    let known = said.code.as_deref().and_then(|code| match code {
        "idempotency_outcome_unknown" if retry_settles => {
            Some(Meaning::Again { reason: "outcome_unknown", free: false })
        }
        code => by_code(code),
    });
    let meaning = known.unwrap_or_else(|| {
        let again = by_status(head.status);
        match should_retry(&head.headers) {
            _ if is_replay(&head.headers) => Meaning::Final,
            Some(true) => again.unwrap_or(Meaning::Again { reason: "asked", free: false }),
            Some(false) => Meaning::Final,
            None if said.is_idempotency_error => Meaning::Stop(ClientErrorKind::KeyReused),
            None => again.unwrap_or(Meaning::Final),
        }
    });
    let judgement = match meaning {
        Meaning::Final => Judgement::Final,
        Meaning::Stop(kind) => Judgement::Stop(kind),
        Meaning::Again { reason, free } => {
            let after = retry_after(&head.headers, SystemTime::now());
            Judgement::Again(Again { reason, after, free })
        }
    };
    Judged { judgement, safe_new_key: said.safe_new_key }
}

/// True if the answer is that of an earlier try, or of an earlier operation under this key.
pub(super) fn is_replay(headers: &HeaderMap) -> bool {
    headers
        .get(IDEMPOTENT_REPLAYED)
        .is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"true"))
}

fn by_status(status: StatusCode) -> Option<Meaning> {
    let reason = match status {
        StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_EARLY => "asked",
        // Running, or locked; with every provider whose SDK retries it.
        StatusCode::CONFLICT => "in_use",
        StatusCode::TOO_MANY_REQUESTS => "too_many",
        StatusCode::SERVICE_UNAVAILABLE => "unavailable",
        // They will not change.
        StatusCode::NOT_IMPLEMENTED | StatusCode::HTTP_VERSION_NOT_SUPPORTED => return None,
        status if status.is_server_error() => "server_error",
        _ => return None,
    };
    Some(Meaning::Again { reason, free: false })
}

fn should_retry(headers: &HeaderMap) -> Option<bool> {
    match headers.get(STRIPE_SHOULD_RETRY)?.as_bytes() {
        b"true" => Some(true),
        b"false" => Some(false),
        _ => None,
    }
}

/// What the body of an error says that matters here.
#[derive(Default)]
struct Said {
    code: Option<String>,
    safe_new_key: Option<bool>,
    is_idempotency_error: bool,
}

impl Said {
    fn read(head: &response::Parts, body: &Bytes) -> Self {
        let is_json = head.headers.get(CONTENT_TYPE).is_some_and(|media| {
            let essence = media.as_bytes().split(|byte| *byte == b';').next().unwrap_or_default();
            essence.trim_ascii().to_ascii_lowercase().ends_with(b"json")
        });
        if !is_json || !(head.status.is_client_error() || head.status.is_server_error()) {
            return Self::default();
        }
        let Ok(document) = serde_json::from_slice::<Value>(body) else { return Self::default() };
        let error = &document["error"];
        let code = document["code"].as_str().or_else(|| error["code"].as_str());
        Self {
            code: code.map(str::to_owned),
            // In a problem document beside the code, in a Stripe-shaped error with it.
            safe_new_key: document["safe_new_key"].as_bool().or(error["safe_new_key"].as_bool()),
            is_idempotency_error: error["type"] == "idempotency_error",
        }
    }
}

/// The reference in a problem document, or in an error of Stripe's shape.
pub(super) fn reference(body: &Bytes) -> Option<String> {
    let document = serde_json::from_slice::<Value>(body).ok()?;
    let reference =
        document["reference"].as_str().or_else(|| document["error"]["reference"].as_str())?;
    // It goes into errors and logs, so whatever else it may be stays out of them.
    let digits = reference.len() <= LONGEST_REFERENCE
        && reference.bytes().all(|byte| byte.is_ascii_alphanumeric());
    digits.then(|| reference.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(status: u16, headers: &[(&'static str, &'static str)], body: &str) -> Judged {
        let mut response = http::Response::builder().status(status);
        for (name, value) in headers {
            response = response.header(*name, *value);
        }
        let (head, body) = response.body(Bytes::from(body.to_owned())).unwrap().into_parts();
        judge(&head, Some(&body))
    }

    fn said(judged: Judged) -> String {
        match judged.judgement {
            Judgement::Final => "final".to_owned(),
            Judgement::Again(again) => {
                format!("{}{}", again.reason, if again.free { " (free)" } else { "" })
            }
            Judgement::Stop(kind) => format!("{kind:?}"),
        }
    }

    const JSON: (&str, &str) = ("content-type", "application/problem+json; charset=utf-8");
    const YES: (&str, &str) = ("stripe-should-retry", "true");
    const NO: (&str, &str) = ("stripe-should-retry", "false");

    #[test]
    fn statuses_are_judged_as_by_the_official_sdks_and_better() {
        for (status, headers, expect) in [
            (200, &[][..], "final"),
            (201, &[], "final"),
            (302, &[], "final"),
            (400, &[], "final"),
            (402, &[], "final"),
            (408, &[], "asked"),
            (409, &[], "in_use"),
            (409, &[NO], "final"),
            (422, &[], "final"),
            (422, &[YES], "asked"),
            (425, &[], "asked"),
            (429, &[], "too_many"),
            (429, &[NO], "final"),
            (500, &[], "server_error"),
            (500, &[NO], "final"),
            (500, &[("idempotent-replayed", "true")], "final"),
            (501, &[], "final"),
            (502, &[], "server_error"),
            (503, &[], "unavailable"),
            (503, &[("stripe-should-retry", "perhaps")], "unavailable"),
            (504, &[], "server_error"),
        ] {
            assert_eq!(said(judged(status, headers, "")), expect, "{status} {headers:?}");
        }
    }

    #[test]
    fn a_known_code_wins_over_status_and_header() {
        for (status, header, code, expect) in [
            (409, YES, "key_in_use", "in_use (free)"),
            (409, NO, "outcome_unknown", "OutcomeUnknown"),
            (500, NO, "outcome_unknown", "OutcomeUnknown"),
            (500, JSON, "outcome_unknown", "OutcomeUnknown"),
            // The server runs interrupted operations again, or finds out about them.
            (500, YES, "outcome_unknown", "outcome_unknown"),
            (409, NO, "result_unavailable", "ResultUnavailable"),
            (409, NO, "too_many_waiting", "too_many"),
            (429, YES, "too_many_in_flight", "too_many"),
            (422, NO, "key_reused", "KeyReused"),
            (400, NO, "key_reused", "KeyReused"),
            (408, NO, "request_incomplete", "request_incomplete"),
            (503, YES, "store_unavailable", "unavailable"),
            (503, YES, "record_unreadable", "unavailable"),
            (500, YES, "rolled_back", "unavailable"),
            (401, NO, "scope_missing", "final"),
            (403, NO, "replay_forbidden", "final"),
        ] {
            let body = format!(r#"{{"code":"idempotency_{code}","safe_new_key":false}}"#);
            assert_eq!(said(judged(status, &[JSON, header], &body)), expect, "{code}");
            let nested = format!(r#"{{"error":{{"code":"idempotency_{code}"}}}}"#);
            assert_eq!(said(judged(status, &[JSON, header], &nested)), expect, "{code}");
        }
    }

    #[test]
    fn stripes_own_error_for_a_reused_key_stops() {
        let body = r#"{"error":{"type":"idempotency_error","message":"Keys..."}}"#;
        assert_eq!(said(judged(400, &[JSON], body)), "KeyReused");
    }

    #[test]
    fn bodies_that_are_no_problem_documents_are_left_alone() {
        for body in ["", "{", "[]", r#"{"error":"oauth"}"#, r#"{"code":7}"#, "<html>"] {
            assert_eq!(said(judged(503, &[JSON], body)), "unavailable", "{body}");
        }
        let body = r#"{"code":"idempotency_outcome_unknown"}"#;
        assert_eq!(said(judged(200, &[JSON], body)), "final");
        assert_eq!(said(judged(500, &[("content-type", "text/html")], body)), "server_error");
    }

    #[test]
    fn whether_a_new_key_is_safe_is_what_the_server_says() {
        let body = r#"{"code":"idempotency_key_invalid","safe_new_key":true}"#;
        assert_eq!(judged(400, &[JSON], body).safe_new_key, Some(true));
        assert_eq!(judged(400, &[JSON], "{}").safe_new_key, None);
    }
}
