//! Refusals as HTTP: the only place that knows status codes, problem types and retry advice.
//!
//! Problem documents (RFC 9457) carry an `error` object as well, because stripe-node reads a document
//! without one as success. In Stripe's flavour there is nothing but that object.

use std::time::Duration;

use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, LINK, LOCATION, RETRY_AFTER};
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};
use serde::Serialize;

use crate::config::{Config, ErrorFlavour, KeySource, Recovery, STRIPE_SHOULD_RETRY};
use crate::error::{Rejection, RejectionKind};

/// What a client is told about one kind of refusal.
struct Advice {
    status: StatusCode,
    code: &'static str,
    title: &'static str,
    detail: String,
    /// True if a new key cannot repeat an effect.
    safe_new_key: bool,
    /// True if the same request under the same key may succeed later.
    retry: bool,
    error_type: &'static str,
}

impl Advice {
    /// Where an interrupted operation is not left to a person, the next retry settles it.
    fn of_failure(&mut self, recovery: &Recovery) {
        let then = match recovery {
            Recovery::AtMostOnce => return,
            Recovery::AtLeastOnce => "it is processed again",
            Recovery::Reconcile(_) => "it is found out first what became of this one",
        };
        self.detail = format!(
            "The request failed while it was processed. It may have taken effect. Send the same request again with the same key: {then}."
        );
        self.retry = true;
    }
}

#[derive(Serialize)]
struct Problem<'a> {
    r#type: &'a str,
    title: &'a str,
    status: u16,
    detail: &'a str,
    code: &'a str,
    safe_new_key: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    original_status: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    original_location: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reference: Option<&'a str>,
    error: ErrorObject<'a>,
}

#[derive(Serialize)]
struct ErrorObject<'a> {
    r#type: &'a str,
    code: &'a str,
    message: &'a str,
}

/// What Stripe's clients know: `{"error": {..}}`, with what they do not know added inside.
#[derive(Serialize)]
struct StripeDocument<'a> {
    error: StripeError<'a>,
}

#[derive(Serialize)]
struct StripeError<'a> {
    #[serde(flatten)]
    object: ErrorObject<'a>,
    doc_url: &'a str,
    safe_new_key: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    original_status: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    original_location: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reference: Option<&'a str>,
}

const INVALID_REQUEST: &str = "invalid_request_error";
const IDEMPOTENCY: &str = "idempotency_error";
const API: &str = "api_error";

/// The response for a refusal.
pub(super) fn response(rejection: &Rejection, config: &Config) -> Response<Bytes> {
    let (base, flavour) = (&config.problem_base, config.error_flavour);
    let mut advice = advice(rejection.kind());
    if flavour == ErrorFlavour::Stripe && *rejection.kind() == RejectionKind::KeyReused {
        // Stripe's clients make an idempotency error of this type only at 400 and 404.
        advice.status = StatusCode::BAD_REQUEST;
    }
    if *rejection.kind() == RejectionKind::KeyMissing {
        advice.detail += &looked_for(config);
    }
    if *rejection.kind() == RejectionKind::HandlerFailed {
        advice.of_failure(&config.policy.recovery);
    }
    let (original_status, original_location) = original(rejection.kind());
    let r#type = format!("{base}{}", advice.code);
    let error =
        ErrorObject { r#type: advice.error_type, code: advice.code, message: &advice.detail };
    let original_text = original_location.and_then(|location| location.to_str().ok());
    let (media_type, body) = match flavour {
        ErrorFlavour::Problem => {
            let problem = Problem {
                r#type: &r#type,
                title: advice.title,
                status: advice.status.as_u16(),
                detail: &advice.detail,
                code: advice.code,
                safe_new_key: advice.safe_new_key,
                original_status,
                original_location: original_text,
                reference: rejection.reference(),
                error,
            };
            ("application/problem+json", serde_json::to_vec(&problem))
        }
        ErrorFlavour::Stripe => {
            let error = StripeError {
                object: error,
                doc_url: &r#type,
                safe_new_key: advice.safe_new_key,
                original_status,
                original_location: original_text,
                reference: rejection.reference(),
            };
            ("application/json", serde_json::to_vec(&StripeDocument { error }))
        }
    };
    let body = body.expect("a problem is text and numbers");
    let mut response = Response::new(Bytes::from(body));
    *response.status_mut() = advice.status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(media_type));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(STRIPE_SHOULD_RETRY, flag(advice.retry));
    if let Some(location) = original_location {
        headers.insert(LOCATION, location.clone());
    }
    match rejection.kind() {
        RejectionKind::KeyMissing | RejectionKind::KeyInvalid(_) => {
            // Where the rules for keys are written (IETF draft, 2.7).
            let link = HeaderValue::try_from(format!("<{}>; rel=\"describedby\"", r#type));
            if let Ok(link) = link {
                headers.insert(LINK, link);
            }
        }
        RejectionKind::KeyInUse
        | RejectionKind::StoreUnavailable
        | RejectionKind::RecordUnreadable
        | RejectionKind::TooManyWaiting
        | RejectionKind::TooManyInFlight => retry_after(headers, rejection.retry_after()),
        RejectionKind::KeyReused
        | RejectionKind::OutcomeUnknown
        | RejectionKind::HandlerFailed
        | RejectionKind::HandlerFailedUntouched
        | RejectionKind::RolledBack
        | RejectionKind::ResultUnavailable { .. }
        | RejectionKind::RequestTooLarge { .. }
        | RejectionKind::RequestIncomplete
        | RejectionKind::ScopeMissing
        | RejectionKind::ReplayForbidden => {}
    }
    response
}

/// Where a key was looked for, for whoever sent one somewhere else.
fn looked_for(config: &Config) -> String {
    let headers: Vec<&str> = config.key_headers.iter().map(HeaderName::as_str).collect();
    let headers = match headers.as_slice() {
        [] => None,
        [name] => Some(format!("in the header {name}")),
        names => Some(format!("in the headers {}", names.join(" and "))),
    };
    let body = match &config.key_source {
        KeySource::Body(pointer) => Some(format!(
            "at {} in a body that is JSON, by its type too (application/json or one that ends in \
             +json)",
            pointer.as_str()
        )),
        KeySource::Headers | KeySource::Content => None,
    };
    let places: Vec<String> = headers.into_iter().chain(body).collect();
    format!(" It was looked for {}.", places.join(" and "))
}

/// Status and place of an answer that was not kept.
fn original(kind: &RejectionKind) -> (Option<u16>, Option<&HeaderValue>) {
    match kind {
        RejectionKind::ResultUnavailable { status, location } => {
            (Some(status.as_u16()), location.as_ref())
        }
        RejectionKind::KeyMissing
        | RejectionKind::KeyInvalid(_)
        | RejectionKind::KeyReused
        | RejectionKind::KeyInUse
        | RejectionKind::OutcomeUnknown
        | RejectionKind::HandlerFailed
        | RejectionKind::RolledBack
        | RejectionKind::HandlerFailedUntouched
        | RejectionKind::RequestTooLarge { .. }
        | RejectionKind::RequestIncomplete
        | RejectionKind::StoreUnavailable
        | RejectionKind::RecordUnreadable
        | RejectionKind::ScopeMissing
        | RejectionKind::TooManyWaiting
        | RejectionKind::TooManyInFlight
        | RejectionKind::ReplayForbidden => (None, None),
    }
}

/// Marks a stored server error as final, whatever the handler says: SDKs must not retry what will
/// only be replayed. True if it was marked.
pub(crate) fn mark_final(status: StatusCode, headers: &mut HeaderMap) -> bool {
    let mark = status.is_server_error();
    if mark {
        headers.insert(STRIPE_SHOULD_RETRY, flag(false));
    }
    mark
}

/// Marks a server error as worth a retry: nothing of it is left.
pub(super) fn mark_retry(status: StatusCode, headers: &mut HeaderMap) {
    if status.is_server_error() {
        headers.insert(STRIPE_SHOULD_RETRY, flag(true));
    }
}

fn flag(value: bool) -> HeaderValue {
    HeaderValue::from_static(if value { "true" } else { "false" })
}

/// Whole seconds, rounded up, at least one (RFC 9110, 10.2.3; zero would invite a hot loop).
fn retry_after(headers: &mut HeaderMap, after: Option<Duration>) {
    let after = after.unwrap_or_default();
    let seconds = after.as_secs() + u64::from(after.subsec_nanos() > 0);
    headers.insert(RETRY_AFTER, HeaderValue::from(seconds.max(1)));
}

fn advice(kind: &RejectionKind) -> Advice {
    let text = String::from;
    match kind {
        RejectionKind::KeyMissing => Advice {
            status: StatusCode::BAD_REQUEST,
            code: "idempotency_key_missing",
            title: "Idempotency key missing",
            detail: text(
                "This operation requires an idempotency key. Send one that is unique to it, and keep it for retries.",
            ),
            safe_new_key: true,
            retry: false,
            error_type: INVALID_REQUEST,
        },
        RejectionKind::KeyInvalid(error) => Advice {
            status: StatusCode::BAD_REQUEST,
            code: "idempotency_key_invalid",
            title: "Idempotency key invalid",
            detail: format!("The idempotency key was refused: {}.", error),
            safe_new_key: true,
            retry: false,
            error_type: INVALID_REQUEST,
        },
        RejectionKind::KeyReused => Advice {
            status: StatusCode::UNPROCESSABLE_ENTITY,
            code: "idempotency_key_reused",
            title: "Idempotency key reused with a different request",
            detail: text(
                "This idempotency key was used before, with a different request. Send the original request again, or find out whether it succeeded before you use a new key.",
            ),
            safe_new_key: false,
            retry: false,
            error_type: IDEMPOTENCY,
        },
        RejectionKind::KeyInUse => Advice {
            status: StatusCode::CONFLICT,
            code: "idempotency_key_in_use",
            title: "Operation in progress",
            detail: text(
                "A request with this idempotency key is being processed. Send the same request again later.",
            ),
            safe_new_key: false,
            retry: true,
            error_type: INVALID_REQUEST,
        },
        RejectionKind::OutcomeUnknown => Advice {
            status: StatusCode::CONFLICT,
            code: "idempotency_outcome_unknown",
            title: "Outcome unknown",
            detail: text(
                "An earlier request with this idempotency key was interrupted. It may have taken effect. Nothing will be executed for this key until the outcome is settled: keep the key, do not use a new one, and ask the operator of this service, with the reference if there is one.",
            ),
            safe_new_key: false,
            retry: false,
            error_type: IDEMPOTENCY,
        },
        RejectionKind::HandlerFailed => Advice {
            status: StatusCode::INTERNAL_SERVER_ERROR,
            code: "idempotency_outcome_unknown",
            title: "Outcome unknown",
            detail: text(
                "The request failed while it was processed. It may have taken effect. Nothing will be executed for this key until the outcome is settled.",
            ),
            safe_new_key: false,
            retry: false,
            error_type: API,
        },
        RejectionKind::RolledBack => Advice {
            status: StatusCode::INTERNAL_SERVER_ERROR,
            code: "idempotency_rolled_back",
            title: "Rolled back",
            detail: text(
                "The request failed while it was processed, and everything it had done in the database was undone. Send the same request again later with the same key.",
            ),
            safe_new_key: false,
            retry: true,
            error_type: API,
        },
        RejectionKind::HandlerFailedUntouched => Advice {
            status: StatusCode::INTERNAL_SERVER_ERROR,
            code: "idempotency_not_executed",
            title: "Not executed",
            detail: text(
                "The request failed before it took effect. Nothing was executed. Send the same request again.",
            ),
            safe_new_key: true,
            retry: true,
            error_type: API,
        },
        RejectionKind::ResultUnavailable { .. } => Advice {
            status: StatusCode::CONFLICT,
            code: "idempotency_result_unavailable",
            title: "Result unavailable",
            detail: text(
                "The operation was carried out, and its answer was not kept. Nothing was executed again.",
            ),
            safe_new_key: false,
            retry: false,
            error_type: IDEMPOTENCY,
        },
        RejectionKind::RequestTooLarge { limit } => Advice {
            status: StatusCode::PAYLOAD_TOO_LARGE,
            code: "idempotency_request_too_large",
            title: "Request too large",
            detail: format!("The request body is longer than {limit} bytes. Nothing was executed."),
            safe_new_key: true,
            retry: false,
            error_type: INVALID_REQUEST,
        },
        RejectionKind::RequestIncomplete => Advice {
            status: StatusCode::REQUEST_TIMEOUT,
            code: "idempotency_request_incomplete",
            title: "Request incomplete",
            detail: text(
                "The request body ended early or did not arrive in time. Nothing was executed.",
            ),
            safe_new_key: true,
            retry: false,
            error_type: INVALID_REQUEST,
        },
        RejectionKind::StoreUnavailable => Advice {
            status: StatusCode::SERVICE_UNAVAILABLE,
            code: "idempotency_store_unavailable",
            title: "Idempotency store unavailable",
            detail: text(
                "What is known of this idempotency key cannot be read or written at the moment. Send the same request again later with the same key.",
            ),
            safe_new_key: false,
            retry: true,
            error_type: API,
        },
        RejectionKind::RecordUnreadable => Advice {
            status: StatusCode::SERVICE_UNAVAILABLE,
            code: "idempotency_record_unreadable",
            title: "Idempotency record unreadable",
            detail: text(
                "What is known of this idempotency key cannot be read by this server, so nothing was executed. Send the request again later with the same key.",
            ),
            safe_new_key: false,
            retry: true,
            error_type: API,
        },
        RejectionKind::ScopeMissing => Advice {
            status: StatusCode::UNAUTHORIZED,
            code: "idempotency_scope_missing",
            title: "Caller unknown",
            detail: text(
                "The request does not say who is calling, so its idempotency key cannot be told from those of others. Nothing was executed.",
            ),
            safe_new_key: true,
            retry: false,
            error_type: INVALID_REQUEST,
        },
        RejectionKind::ReplayForbidden => Advice {
            status: StatusCode::FORBIDDEN,
            code: "idempotency_replay_forbidden",
            title: "Replay forbidden",
            detail: text(
                "The operation was carried out, and this caller may not see its answer any more. Nothing was executed again.",
            ),
            safe_new_key: false,
            retry: false,
            error_type: INVALID_REQUEST,
        },
        RejectionKind::TooManyWaiting => Advice {
            status: StatusCode::CONFLICT,
            code: "idempotency_too_many_waiting",
            title: "Too many requests wait",
            detail: text(
                "The operation is being processed, and too many requests wait for it already. Send the same request again later.",
            ),
            safe_new_key: false,
            retry: false,
            error_type: INVALID_REQUEST,
        },
        RejectionKind::TooManyInFlight => Advice {
            status: StatusCode::TOO_MANY_REQUESTS,
            code: "idempotency_too_many_in_flight",
            title: "Too many operations in flight",
            detail: text(
                "This caller has too many operations in flight. Nothing was started by this request, and it was not looked up whether an earlier one with this key ran. Send it again later with the same key.",
            ),
            // An earlier request under this key may have had its effect.
            safe_new_key: false,
            retry: true,
            error_type: INVALID_REQUEST,
        },
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::Value;

    use super::*;
    use crate::config::ConfigBuilder;
    use crate::fingerprint::JsonPointer;
    use crate::key::KeyError;
    use crate::scope::Scope;

    fn kinds() -> Vec<RejectionKind> {
        vec![
            RejectionKind::KeyMissing,
            RejectionKind::KeyInvalid(KeyError::Repeated),
            RejectionKind::KeyReused,
            RejectionKind::KeyInUse,
            RejectionKind::OutcomeUnknown,
            RejectionKind::HandlerFailed,
            RejectionKind::ResultUnavailable {
                status: StatusCode::CREATED,
                location: Some(HeaderValue::from_static("/p/1")),
            },
            RejectionKind::HandlerFailedUntouched,
            RejectionKind::RequestTooLarge { limit: 7 },
            RejectionKind::RequestIncomplete,
            RejectionKind::StoreUnavailable,
            RejectionKind::RecordUnreadable,
            RejectionKind::ScopeMissing,
            RejectionKind::ReplayForbidden,
            RejectionKind::TooManyWaiting,
            RejectionKind::RolledBack,
            RejectionKind::TooManyInFlight,
        ]
    }

    fn config(flavour: ErrorFlavour) -> Config {
        let builder = Config::builder().scope(Scope::global()).error_flavour(flavour);
        builder.problem_base("https://api.example/problems/").build().unwrap()
    }

    fn read_as(flavour: ErrorFlavour, kind: RejectionKind) -> (Response<Bytes>, Value) {
        let response = response(&Rejection::new(kind), &config(flavour));
        let body = serde_json::from_slice(response.body()).unwrap();
        (response, body)
    }

    fn read(kind: RejectionKind) -> (Response<Bytes>, Value) {
        read_as(ErrorFlavour::Problem, kind)
    }

    #[test]
    fn every_refusal_is_a_whole_problem_document_with_an_error_object() {
        for kind in kinds() {
            let (response, body) = read(kind);
            assert_eq!(response.headers()[CONTENT_TYPE], "application/problem+json");
            assert_eq!(response.headers()[CACHE_CONTROL], "no-store");
            assert!(response.headers().contains_key(STRIPE_SHOULD_RETRY));
            assert_eq!(body["status"], response.status().as_u16());
            let code = body["code"].as_str().unwrap();
            assert_eq!(body["type"], format!("https://api.example/problems/{code}"));
            assert_eq!(body["error"]["code"], code);
            for text in
                [&body["title"], &body["detail"], &body["error"]["message"], &body["error"]["type"]]
            {
                assert!(!text.as_str().unwrap().is_empty());
            }
            assert!(body["safe_new_key"].is_boolean());
        }
    }

    #[test]
    fn statuses_codes_and_advice_are_the_published_ones() {
        let mut table: Vec<_> = kinds()
            .into_iter()
            .map(|kind| {
                let (response, body) = read(kind);
                let retry = response.headers()[STRIPE_SHOULD_RETRY].to_str().unwrap().to_owned();
                let code = body["code"].as_str().unwrap().to_owned();
                (response.status().as_u16(), code, body["safe_new_key"].as_bool().unwrap(), retry)
            })
            .collect();
        table.sort();
        let row = |status, code: &str, safe, retry: &str| {
            (status, format!("idempotency_{code}"), safe, retry.to_owned())
        };
        assert_eq!(
            table,
            [
                row(400, "key_invalid", true, "false"),
                row(400, "key_missing", true, "false"),
                row(401, "scope_missing", true, "false"),
                row(403, "replay_forbidden", false, "false"),
                row(408, "request_incomplete", true, "false"),
                row(409, "key_in_use", false, "true"),
                row(409, "outcome_unknown", false, "false"),
                row(409, "result_unavailable", false, "false"),
                row(409, "too_many_waiting", false, "false"),
                row(413, "request_too_large", true, "false"),
                row(422, "key_reused", false, "false"),
                row(429, "too_many_in_flight", false, "true"),
                row(500, "not_executed", true, "true"),
                row(500, "outcome_unknown", false, "false"),
                row(500, "rolled_back", false, "true"),
                row(503, "record_unreadable", false, "true"),
                row(503, "store_unavailable", false, "true"),
            ]
        );
    }

    #[test]
    fn a_missing_key_says_where_it_was_looked_for() {
        let rules = || Config::builder().scope(Scope::global());
        let detail = |config: ConfigBuilder| {
            let missing = Rejection::new(RejectionKind::KeyMissing);
            let response = response(&missing, &config.build().unwrap());
            let body: Value = serde_json::from_slice(response.body()).unwrap();
            assert_eq!(body["detail"], body["error"]["message"]);
            body["detail"].as_str().unwrap().to_owned()
        };
        let headers = ["idempotency-key", "paypal-request-id"].map(HeaderName::from_static);
        let pointer = || JsonPointer::from_static("/meta/key");
        for (config, place) in [
            (rules(), "looked for in the header idempotency-key."),
            (
                rules().key_headers(headers),
                "looked for in the headers idempotency-key and paypal-request-id.",
            ),
            (
                rules().key_from_body(pointer()),
                "looked for in the header idempotency-key and at /meta/key in a body that is JSON",
            ),
            (
                rules().key_headers([]).key_from_body(pointer()),
                "looked for at /meta/key in a body that is JSON",
            ),
        ] {
            let detail = detail(config);
            assert!(detail.contains(place), "{detail}");
        }
    }

    #[test]
    fn a_failure_asks_for_a_retry_where_the_retry_settles_it() {
        let of = |recovery: Recovery| {
            let config = Config::builder().scope(Scope::global()).recovery(recovery);
            let failed = Rejection::new(RejectionKind::HandlerFailed);
            let response = response(&failed, &config.build().unwrap());
            let body: Value = serde_json::from_slice(response.body()).unwrap();
            assert_eq!((response.status().as_u16(), &body["safe_new_key"]), (500, &false.into()));
            assert_eq!(body["code"], "idempotency_outcome_unknown");
            assert_eq!(body["detail"], body["error"]["message"]);
            let retry = response.headers()[STRIPE_SHOULD_RETRY].to_str().unwrap().to_owned();
            (retry, body["detail"].as_str().unwrap().to_owned())
        };
        let (retry, detail) = of(Recovery::AtMostOnce);
        assert!(retry == "false" && detail.contains("Nothing will be executed"), "{detail}");
        let (retry, detail) = of(Recovery::AtLeastOnce);
        assert!(
            retry == "true" && detail.ends_with("same key: it is processed again."),
            "{detail}"
        );
        let (retry, detail) = of(Recovery::reconcile(async |_| crate::Found::StillUnknown));
        assert!(retry == "true" && detail.contains("it is found out first"), "{detail}");
        assert!(!detail.contains("Nothing will be executed"), "{detail}");
    }

    #[test]
    fn retry_after_is_whole_seconds_rounded_up_and_at_least_one() {
        let header = |after| {
            let rejection = Rejection::new(RejectionKind::KeyInUse).with_retry_after(after);
            let config = config(ErrorFlavour::Problem);
            response(&rejection, &config).headers()[RETRY_AFTER].to_str().unwrap().to_owned()
        };
        assert_eq!(header(Duration::ZERO), "1");
        assert_eq!(header(Duration::from_millis(1)), "1");
        assert_eq!(header(Duration::from_millis(29_001)), "30");
        assert_eq!(header(Duration::from_secs(30)), "30");
    }

    #[test]
    fn a_result_that_was_not_kept_names_status_and_location_of_the_original() {
        let (response, body) = read(kinds().remove(6));
        assert_eq!(body["original_status"], 201);
        assert_eq!(body["original_location"], "/p/1");
        assert_eq!(response.headers()[LOCATION], "/p/1");
    }

    #[test]
    fn in_stripes_flavour_only_the_shape_and_the_status_of_a_reused_key_differ() {
        for kind in kinds() {
            let (plain, problem) = read(kind.clone());
            let (response, body) = read_as(ErrorFlavour::Stripe, kind.clone());
            let reused = kind == RejectionKind::KeyReused;
            let status = if reused { StatusCode::BAD_REQUEST } else { plain.status() };
            assert_eq!(response.status(), status);
            assert_eq!(response.headers()[CONTENT_TYPE], "application/json");
            for name in [CACHE_CONTROL, LINK, LOCATION, RETRY_AFTER, STRIPE_SHOULD_RETRY] {
                assert_eq!(response.headers().get(&name), plain.headers().get(&name), "{name}");
            }
            assert_eq!(body.as_object().unwrap().len(), 1, "nothing but the error: {body}");
            let error = &body["error"];
            for name in ["type", "code", "message"] {
                assert_eq!(error[name], problem["error"][name]);
            }
            assert_eq!(error["doc_url"], problem["type"]);
            for name in ["safe_new_key", "original_status", "original_location"] {
                assert_eq!(error[name], problem[name]);
            }
            assert_eq!(
                error["type"] == "idempotency_error",
                problem["error"]["type"] == IDEMPOTENCY
            );
        }
    }

    /// Status and code of every refusal.
    fn answered() -> BTreeSet<(u16, String)> {
        let pair = |kind| {
            let (response, body) = read(kind);
            (response.status().as_u16(), body["code"].as_str().unwrap().to_owned())
        };
        kinds().into_iter().map(pair).collect()
    }

    /// The codes in the first `enum` under `code`, wherever it stands.
    fn codes(value: &Value) -> Vec<String> {
        match value {
            Value::Object(object) => match object.get("code").and_then(|code| code.get("enum")) {
                Some(codes) => {
                    let codes = codes.as_array().unwrap().iter();
                    codes.map(|code| code.as_str().unwrap().to_owned()).collect()
                }
                None => object.values().flat_map(codes).collect(),
            },
            Value::Array(values) => values.iter().flat_map(codes).collect(),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => Vec::new(),
        }
    }

    fn described<'a>(
        responses: impl Iterator<Item = (&'a str, &'a Value)>,
    ) -> BTreeSet<(u16, String)> {
        let of_this_layer = |code: &String| code.starts_with("idempotency_");
        let pairs = |(status, response): (&str, &Value)| {
            let status: u16 = status.parse().unwrap();
            codes(response)
                .into_iter()
                .filter(of_this_layer)
                .map(move |code| (status, code))
                .collect()
        };
        responses.flat_map::<Vec<_>, _>(pairs).collect()
    }

    fn yaml(text: &str) -> Value {
        serde_yaml_ng::from_str(text).unwrap()
    }

    #[test]
    fn the_sandboxs_openapi_document_has_every_code_at_its_status_and_no_other() {
        let document = yaml(include_str!("../../openapi.yaml"));
        let resolve = |response: &Value| match response["$ref"].as_str() {
            Some(path) => document.pointer(path.trim_start_matches('#')).unwrap().clone(),
            None => response.clone(),
        };
        for (path, item) in document["paths"].as_object().unwrap() {
            for method in ["post", "delete"] {
                let Some(operation) = item.get(method) else { continue };
                let responses = operation["responses"].as_object().unwrap();
                let responses: Vec<_> =
                    responses.iter().map(|(status, it)| (status.as_str(), resolve(it))).collect();
                let responses = responses.iter().map(|(status, response)| (*status, response));
                assert_eq!(described(responses), answered(), "{method} {path}");
            }
        }
    }

    #[test]
    fn the_fragment_for_other_documents_has_every_code_at_its_status_and_no_other() {
        let fragment = yaml(include_str!("../../openapi/idempotency.yaml"));
        let responses = fragment["components"]["responses"].as_object().unwrap().iter();
        let responses =
            responses.map(|(name, response)| (name.strip_prefix("Idempotency").unwrap(), response));
        assert_eq!(described(responses), answered());
    }

    #[test]
    fn the_guide_and_the_readme_explain_every_code() {
        let guide = include_str!("../guide/problems.md");
        let readme = include_str!("../../README.md");
        let headings: BTreeSet<&str> =
            guide.lines().filter_map(|line| line.strip_prefix("## ")).collect();
        let answered = answered();
        let all: BTreeSet<&str> = answered.iter().map(|(_, code)| code.as_str()).collect();
        assert_eq!(headings, all);
        for (status, code) in &answered {
            assert!(readme.contains(&format!("| {status} | `{code}` |")), "{status} {code}");
        }
    }
}
