//! The routes under `/v1/payments`: what happens once, behind the idempotency layer.

use axum::Json;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Extension, Path, Query, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::header::{CONTENT_TYPE, LOCATION};
use http::{HeaderMap, StatusCode};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tower_idempotency::{Execution, IdempotencyKey};

use crate::account::Account;
use crate::answer::ApiError;
use crate::app::App;
use crate::books::Books;
use crate::ledger::{Cause, NewPayment, Payment};
use crate::runs::Run;
use crate::source::{Source, When};
use crate::stream;

pub(crate) type Answer = Result<Response, ApiError>;
/// An id that is no UTF-8 names nothing; so the handler looks at the rejection itself.
pub(crate) type Id = Result<Path<String>, PathRejection>;

/// The body of `POST /v1/payments`.
#[derive(Debug, Deserialize)]
struct CreateBody {
    amount: u32,
    currency: String,
    source: String,
    description: Option<String>,
}

/// The body of `POST /v1/payments/{id}/refunds`.
#[derive(Debug, Default, Deserialize)]
struct RefundBody {
    amount: Option<u32>,
}

/// The query of `GET /v1/payments`.
#[derive(Debug, Deserialize)]
pub(crate) struct ListQuery {
    limit: Option<u32>,
}

const LARGEST_AMOUNT: u32 = 99_999_999;

/// `POST /v1/payments`. The layer lets one of all the retries in; what it answers is what all get.
pub(crate) async fn create(
    mut books: Books,
    Extension(account): Extension<Account>,
    key: IdempotencyKey,
    execution: Execution,
    headers: HeaderMap,
    body: Bytes,
) -> Answer {
    let (source, new) = parse_payment(&headers, &body)?;
    let cause = cause_of(&account, Some(&key), Some(&execution), "charge");
    let run = Run::begins(&cause, execution.fence(), &new);
    let hold = cause_of(&account, Some(&key), Some(&execution), "hold");
    let answer = pay(&mut books, source, &hold, &cause, &new, &run).await;
    run.answers(&answer);
    answer
}

async fn pay(
    books: &mut Books,
    source: Source,
    hold: &Cause,
    cause: &Cause,
    new: &NewPayment,
    run: &Run<'_>,
) -> Answer {
    before_the_charge(source, cause.attempt).await?;
    hold_first(books, source, hold, new).await?;
    let payment = books.charge(cause, new).await?;
    run.has_charged();
    after_the_charge(source, cause.attempt).await?;

    if source == Source::Stream {
        let location = [(LOCATION, format!("/v1/payments/{}", payment.id))];
        return Ok((location, stream::events(payment)).into_response());
    }
    Ok(receipt(source, payment))
}

/// The answer to a payment that was made.
pub(crate) fn receipt(source: Source, mut payment: Payment) -> Response {
    let location = [(LOCATION, format!("/v1/payments/{}", payment.id))];
    if source == Source::Empty {
        return (StatusCode::NO_CONTENT, location).into_response();
    }
    if let Source::Large(bytes, _) = source {
        payment.padding = Some("x".repeat(bytes));
    }
    (StatusCode::CREATED, location, Json(payment)).into_response()
}

/// The ways to fail while certainly nothing has happened.
pub(crate) async fn before_the_charge(source: Source, attempt: u32) -> Result<(), ApiError> {
    let first = attempt == 1;
    match source {
        Source::Declined => return Err(ApiError::declined()),
        Source::RateLimited => return Err(ApiError::rate_limited()),
        Source::Unavailable => return Err(ApiError::unavailable("the processor is down")),
        Source::UnavailableOnce(time) if first => {
            tokio::time::sleep(time).await;
            return Err(ApiError::unavailable("the processor is down"));
        }
        Source::Slow(time) => tokio::time::sleep(time).await,
        Source::Panic(When::Before) if first => panic!("tok_panic_before"),
        Source::Crash(When::Before) if first => std::process::abort(),
        Source::Visa
        | Source::UnavailableOnce(_)
        | Source::ChargeThenSlow(_)
        | Source::ChargeThen500
        | Source::Panic(_)
        | Source::Crash(_)
        | Source::Large(..)
        | Source::Stream
        | Source::Empty => {}
    }
    Ok(())
}

/// Two steps, and the process dies between them. Each has a key of its own for the processor, so that a
/// later attempt does neither of them twice.
pub(crate) async fn hold_first(
    books: &mut Books,
    source: Source,
    cause: &Cause,
    new: &NewPayment,
) -> Result<(), ApiError> {
    if source == Source::Crash(When::Between) {
        books.hold(cause, new).await?;
        if cause.attempt == 1 {
            std::process::abort();
        }
    }
    Ok(())
}

/// The ways to fail when the money has moved.
pub(crate) async fn after_the_charge(source: Source, attempt: u32) -> Result<(), ApiError> {
    let first = attempt == 1;
    match source {
        Source::ChargeThen500 => return Err(ApiError::broken()),
        Source::ChargeThenSlow(time) | Source::Large(_, time) => tokio::time::sleep(time).await,
        Source::Panic(When::After) if first => panic!("tok_panic_after"),
        Source::Crash(When::After) if first => std::process::abort(),
        Source::Visa
        | Source::Declined
        | Source::Slow(_)
        | Source::Unavailable
        | Source::UnavailableOnce(_)
        | Source::RateLimited
        | Source::Panic(_)
        | Source::Crash(_)
        | Source::Stream
        | Source::Empty => {}
    }
    Ok(())
}

/// `POST /v1/payments/{id}/refunds`.
pub(crate) async fn refund(
    mut books: Books,
    Extension(account): Extension<Account>,
    id: Id,
    key: IdempotencyKey,
    execution: Execution,
    headers: HeaderMap,
    body: Bytes,
) -> Answer {
    let RefundBody { amount } = match body.is_empty() {
        true => RefundBody::default(),
        false => parse_json(&headers, &body)?,
    };
    let amount = amount.map(checked_amount).transpose()?;
    let id = known(id)?;
    let cause = cause_of(&account, Some(&key), Some(&execution), "refund");
    if let Some(refund) = books.refund(&cause, &id, amount).await? {
        return Ok((StatusCode::CREATED, Json(refund)).into_response());
    }
    match books.payment(&cause.account, &id).await? {
        None => Err(ApiError::not_found("payment")),
        Some(_) => Err(ApiError::conflict("refund_too_large", "less than that is left to refund")),
    }
}

/// `DELETE /v1/payments/{id}`. Without a key the layer stays out of it, and so do its extractors.
pub(crate) async fn void(
    mut books: Books,
    Extension(account): Extension<Account>,
    id: Id,
    key: Option<IdempotencyKey>,
    execution: Option<Execution>,
) -> Answer {
    let id = known(id)?;
    let cause = cause_of(&account, key.as_ref(), execution.as_ref(), "void");
    if let Some(payment) = books.void(&cause, &id).await? {
        return Ok(Json(payment).into_response());
    }
    match books.payment(&cause.account, &id).await? {
        None => Err(ApiError::not_found("payment")),
        Some(_) => Err(ApiError::conflict(
            "payment_not_voidable",
            "only a payment that was neither voided nor refunded can be voided",
        )),
    }
}

/// `GET /v1/payments/{id}`.
pub(crate) async fn show(
    State(app): State<App>,
    Extension(account): Extension<Account>,
    id: Id,
) -> Answer {
    let payment = app.ledger.payment(&account.to_string(), &known(id)?).await?;
    let payment = payment.ok_or_else(|| ApiError::not_found("payment"))?;
    Ok(Json(payment).into_response())
}

/// `GET /v1/payments`.
pub(crate) async fn list(
    State(app): State<App>,
    Extension(account): Extension<Account>,
    query: Result<Query<ListQuery>, QueryRejection>,
) -> Answer {
    let limit = query.ok().map(|Query(ListQuery { limit })| limit.unwrap_or(10));
    let limit = limit
        .filter(|limit| (1..=100).contains(limit))
        .ok_or_else(|| ApiError::invalid("limit_invalid", "limit must be 1 to 100"))?;
    let (payments, total) = app.ledger.payments(&account.to_string(), limit).await?;
    let has_more = total > i64::from(limit);
    let list =
        json!({ "object": "list", "data": payments, "has_more": has_more, "total_count": total });
    Ok(Json(list).into_response())
}

/// `GET /v1/ledger`: for tests that count effects.
pub(crate) async fn ledger(State(app): State<App>) -> Answer {
    let entries = app.ledger.entries().await?;
    let count = |action| entries.iter().filter(|entry| entry.action == action).count();
    let (charges, refunds) = (count("charge"), count("refund"));
    Ok(Json(json!({ "charges": charges, "refunds": refunds, "entries": entries })).into_response())
}

/// Who causes an effect. Without a key the layer stays out of it, and every request is the first.
pub(crate) fn cause_of(
    account: &Account,
    key: Option<&IdempotencyKey>,
    execution: Option<&Execution>,
    effect: &str,
) -> Cause {
    Cause {
        account: account.to_string(),
        key_id: key.map(key_id).unwrap_or_default(),
        // The same for every attempt: it lets the processor recognise what it has done already.
        provider_key: execution.map(|execution| execution.downstream_key(effect)),
        attempt: execution.map_or(1, |execution| execution.attempt().number()),
    }
}

/// A key as the ledger shows it: enough to find it, too little to use it.
fn key_id(key: &IdempotencyKey) -> String {
    let digest = Sha256::digest(key.as_str());
    digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

fn known(id: Id) -> Result<String, ApiError> {
    id.map(|Path(id)| id).map_err(|_| ApiError::not_found("payment"))
}

fn parse_payment(headers: &HeaderMap, body: &[u8]) -> Result<(Source, NewPayment), ApiError> {
    let CreateBody { amount, currency, source, description } = parse_json(headers, body)?;
    new_payment(amount, &currency, &source, description)
}

pub(crate) fn new_payment(
    amount: u32,
    currency: &str,
    source: &str,
    description: Option<String>,
) -> Result<(Source, NewPayment), ApiError> {
    let amount = checked_amount(amount)?;
    if currency.len() != 3 || !currency.bytes().all(|byte| byte.is_ascii_alphabetic()) {
        return Err(ApiError::invalid("currency_invalid", "currency must be three letters"));
    }
    let what = Source::parse(source)
        .ok_or_else(|| ApiError::invalid("source_invalid", "there is no such test source"))?;
    let (currency, source) = (currency.to_ascii_lowercase(), source.to_owned());
    Ok((what, NewPayment { amount, currency, source, description }))
}

pub(crate) fn checked_amount(amount: u32) -> Result<u32, ApiError> {
    match amount {
        1..=LARGEST_AMOUNT => Ok(amount),
        _ => Err(ApiError::invalid("amount_invalid", "amount must be 1 to 99999999")),
    }
}

/// The type of a body in lower case, without parameters.
pub(crate) fn media_type(headers: &HeaderMap) -> String {
    let media_type = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or("");
    media_type.split(';').next().unwrap_or("").trim().to_ascii_lowercase()
}

/// By hand and not by axum's `Json`: an extractor that refuses does so inside the handler, and the
/// layer would store that answer. Here every refusal says that it had no effect.
fn parse_json<T: DeserializeOwned>(headers: &HeaderMap, body: &[u8]) -> Result<T, ApiError> {
    if media_type(headers) != "application/json" {
        let message = "the body must be application/json";
        return Err(ApiError::invalid("unsupported_media_type", message));
    }
    let refused = |error: serde_json::Error| ApiError::invalid("body_invalid", error.to_string());
    // serde would also take an array for a struct.
    if !body.trim_ascii_start().starts_with(b"{") {
        let error = serde_json::from_slice::<Value>(body).err().map(|error| error.to_string());
        let message = error.unwrap_or_else(|| "the body must be a JSON object".to_owned());
        return Err(ApiError::invalid("body_invalid", message));
    }
    serde_json::from_slice(body).map_err(refused)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(body: &str) -> Result<NewPayment, ApiError> {
        let headers = HeaderMap::from_iter([(
            CONTENT_TYPE,
            "application/json; charset=utf-8".parse().unwrap(),
        )]);
        parse_payment(&headers, body.as_bytes()).map(|(_, new)| new)
    }

    #[test]
    fn a_payment_is_a_whole_positive_amount() {
        let body = |amount: &str| {
            format!(r#"{{"amount":{amount},"currency":"USD","source":"tok_visa","more":[1]}}"#)
        };
        assert_eq!(parse(&body("99999999")).unwrap().amount, LARGEST_AMOUNT);
        assert_eq!(parse(&body("1")).unwrap().currency, "usd");
        for bad in ["0", "-1", "100000000", "5000000000", "1.0", "1e2", "\"1\"", "true", "null", ""]
        {
            assert!(parse(&body(bad)).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_is_no_payment_is_refused() {
        for bad in [
            "",
            "[]",
            r#"[1,"usd","tok_visa",null]"#,
            r#"{"amount":1,"currency":"usd"}"#,
            r#"{"amount":1,"currency":"us","source":"tok_visa"}"#,
            r#"{"amount":1,"currency":"u5d","source":"tok_visa"}"#,
            r#"{"amount":1,"currency":"usd","source":"visa"}"#,
            r#"{"amount":1,"amount":2,"currency":"usd","source":"tok_visa"}"#,
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        assert!(parse_payment(&HeaderMap::new(), b"{}").is_err());
    }
}
