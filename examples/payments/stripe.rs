//! The same payments in Stripe's shape, enough for its official clients: forms in, status 200 out,
//! ids with `pi_`, `ch_` and `re_`. The idempotency key is optional here, as it is there.

use axum::Json;
use axum::extract::{Extension, Path, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use serde_json::{Value, json};
use tower_idempotency::{Execution, IdempotencyKey};

use crate::account::Account;
use crate::answer::ApiError;
use crate::app::App;
use crate::books::Books;
use crate::form::Form;
use crate::ledger::{Cause, NewPayment, Payment, Refund};
use crate::payments::{
    Answer, Id, after_the_charge, before_the_charge, cause_of, checked_amount, hold_first,
    new_payment,
};
use crate::source::Source;
use crate::stream;

/// What a payment is called here: an intent and its charge are two views of one.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum View {
    Intent,
    Charge,
}

/// What a refund is called when its provider key is derived.
pub(crate) const REFUND: &str = "stripe_refund";

/// Those who say nothing else pay with a card that works.
const DEFAULT_SOURCE: &str = "tok_visa";

/// `POST /v1/payment_intents`.
pub(crate) async fn create_intent(
    mut books: Books,
    Extension(account): Extension<Account>,
    key: Option<IdempotencyKey>,
    execution: Option<Execution>,
    headers: HeaderMap,
    body: Bytes,
) -> Answer {
    let form = Form::parse(&headers, &body)?;
    let cause = cause_of(&account, key.as_ref(), execution.as_ref(), View::Intent.effect());
    let hold = cause_of(&account, key.as_ref(), execution.as_ref(), "hold");
    create(View::Intent, &mut books, &hold, &cause, &form).await
}

/// `POST /v1/charges`.
pub(crate) async fn create_charge(
    mut books: Books,
    Extension(account): Extension<Account>,
    key: Option<IdempotencyKey>,
    execution: Option<Execution>,
    headers: HeaderMap,
    body: Bytes,
) -> Answer {
    let form = Form::parse(&headers, &body)?;
    let cause = cause_of(&account, key.as_ref(), execution.as_ref(), View::Charge.effect());
    let hold = cause_of(&account, key.as_ref(), execution.as_ref(), "hold");
    create(View::Charge, &mut books, &hold, &cause, &form).await
}

async fn create(view: View, books: &mut Books, hold: &Cause, cause: &Cause, form: &Form) -> Answer {
    let (source, new) = read_payment(form)?;
    before_the_charge(source, cause.attempt).await?;
    hold_first(books, source, hold, &new).await?;
    let payment = books.charge(cause, &new).await?;
    after_the_charge(source, cause.attempt).await?;
    if source == Source::Stream {
        return Ok(stream::events(payment).into_response());
    }
    Ok(receipt(view, source, payment))
}

/// The answer to a payment that was made.
pub(crate) fn receipt(view: View, source: Source, mut payment: Payment) -> Response {
    if source == Source::Empty {
        return StatusCode::NO_CONTENT.into_response();
    }
    if let Source::Large(bytes, _) = source {
        payment.padding = Some("x".repeat(bytes));
    }
    Json(view.of(&payment)).into_response()
}

/// The answer to a refund that was made.
pub(crate) fn refund_receipt(refund: &Refund) -> Response {
    Json(refund_view(refund)).into_response()
}

fn read_payment(form: &Form) -> Result<(Source, NewPayment), ApiError> {
    let missing = |name: &str| {
        ApiError::invalid("parameter_missing", format!("missing required parameter: {name}"))
    };
    let amount = form.number("amount")?.ok_or_else(|| missing("amount"))?;
    let currency = form.text("currency")?.ok_or_else(|| missing("currency"))?;
    let source = form.text("source")?.unwrap_or(DEFAULT_SOURCE);
    let description = form.text("description")?.map(str::to_owned);
    new_payment(amount, currency, source, description)
}

/// `POST /v1/refunds`.
pub(crate) async fn create_refund(
    mut books: Books,
    Extension(account): Extension<Account>,
    key: Option<IdempotencyKey>,
    execution: Option<Execution>,
    headers: HeaderMap,
    body: Bytes,
) -> Answer {
    let form = Form::parse(&headers, &body)?;
    let amount = form.number("amount")?.map(checked_amount).transpose()?;
    let id = match (form.text("payment_intent")?, form.text("charge")?) {
        (Some(id), None) => View::Intent.payment_id(id),
        (None, Some(id)) => View::Charge.payment_id(id),
        (None, None) => {
            let message = "one of these parameters is required: charge, payment_intent";
            return Err(ApiError::invalid("parameter_missing", message));
        }
        (Some(_), Some(_)) => {
            let message = "You may only specify one of these parameters: charge, payment_intent.";
            return Err(ApiError::invalid("parameters_exclusive", message));
        }
    };
    let id = id.ok_or_else(|| ApiError::not_found("payment"))?;
    let cause = cause_of(&account, key.as_ref(), execution.as_ref(), REFUND);
    if let Some(refund) = books.refund(&cause, &id, amount).await? {
        return Ok(refund_receipt(&refund));
    }
    match books.payment(&cause.account, &id).await? {
        None => Err(ApiError::not_found("payment")),
        Some(_) => Err(ApiError::conflict("refund_too_large", "less than that is left to refund")),
    }
}

/// `GET /v1/payment_intents/{id}`.
pub(crate) async fn show_intent(
    State(app): State<App>,
    Extension(account): Extension<Account>,
    id: Id,
) -> Answer {
    show(View::Intent, &app, &account, id).await
}

/// `GET /v1/charges/{id}`.
pub(crate) async fn show_charge(
    State(app): State<App>,
    Extension(account): Extension<Account>,
    id: Id,
) -> Answer {
    show(View::Charge, &app, &account, id).await
}

async fn show(view: View, app: &App, account: &Account, id: Id) -> Answer {
    let not_found = || ApiError::not_found("payment");
    let Path(id) = id.map_err(|_| not_found())?;
    let id = view.payment_id(&id).ok_or_else(not_found)?;
    let payment = app.ledger.payment(&account.to_string(), &id).await?.ok_or_else(not_found)?;
    Ok(Json(view.of(&payment)).into_response())
}

/// `GET /v1/refunds/{id}`.
pub(crate) async fn show_refund(
    State(app): State<App>,
    Extension(account): Extension<Account>,
    id: Id,
) -> Answer {
    let not_found = || ApiError::not_found("refund");
    let Path(id) = id.map_err(|_| not_found())?;
    let refund = app.ledger.refund_of(&account.to_string(), &id).await?.ok_or_else(not_found)?;
    Ok(Json(refund_view(&refund)).into_response())
}

impl View {
    /// What the effect is called when its provider key is derived: each shape has a name of its own,
    /// so that whoever finds the effect knows what its answer looks like.
    pub(crate) const fn effect(self) -> &'static str {
        match self {
            Self::Intent => "payment_intent",
            Self::Charge => "stripe_charge",
        }
    }

    fn prefix(self) -> &'static str {
        match self {
            Self::Intent => "pi_",
            Self::Charge => "ch_",
        }
    }

    /// `pi_12ab` and `ch_12ab` are `pay_12ab`.
    fn payment_id(self, id: &str) -> Option<String> {
        id.strip_prefix(self.prefix()).map(|rest| format!("pay_{rest}"))
    }

    fn id(self, payment_id: &str) -> String {
        let rest = payment_id.strip_prefix("pay_").unwrap_or(payment_id);
        format!("{}{rest}", self.prefix())
    }

    fn of(self, payment: &Payment) -> Value {
        let mut view = json!(payment);
        let (intent, charge) = (Self::Intent.id(&payment.id), Self::Charge.id(&payment.id));
        let amount = view["amount"].clone();
        let more = match self {
            Self::Intent => json!({
                "id": intent,
                "object": "payment_intent",
                "status": if payment.is_voided() { "canceled" } else { "succeeded" },
                "amount_received": amount,
                "latest_charge": charge,
            }),
            Self::Charge => json!({
                "id": charge,
                "object": "charge",
                "status": "succeeded",
                "paid": true,
                "captured": true,
                "refunded": payment.is_refunded(),
                "payment_intent": intent,
            }),
        };
        merge(&mut view, more);
        view
    }
}

fn refund_view(refund: &Refund) -> Value {
    let mut view = json!(refund);
    let payment = view["payment"].as_str().unwrap_or_default();
    let more = json!({
        "charge": View::Charge.id(payment),
        "payment_intent": View::Intent.id(payment),
    });
    merge(&mut view, more);
    if let Value::Object(fields) = &mut view {
        fields.remove("payment");
    }
    view
}

/// Sets the fields of one object in another, with those that every object of Stripe's has.
fn merge(into: &mut Value, from: Value) {
    if let (Value::Object(into), Value::Object(from)) = (into, from) {
        into.extend(from);
        into.insert("livemode".to_owned(), false.into());
        into.insert("metadata".to_owned(), json!({}));
    }
}
