//! The functions over HTTP.

use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, QueryRejection};
use axum::extract::{Extension, Path, Query, Request, State};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::header::{CACHE_CONTROL, CONTENT_TYPE};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::time::Duration;

use super::by::{By, ByError, Who, Why};
use super::operator::{Operator, OperatorError, Settlement, Version};
use super::view::{Detail, ListingView, MadeView, RecordView, TrailView};
use crate::key::{IdempotencyKey, KeySyntax};
use crate::response::{HeaderRules, StoredResponse};
use crate::scope::{DownstreamSeed, Identity, StorageKey};
use crate::store::{LogId, Page, Survey, Wanted};

/// What is listed in one page unless the request says how much.
const PAGE: u32 = 50;
const LONGEST_PAGE: u32 = 500;

/// A router with the functions of an [`Operator`]. Nest it where you like, **behind a layer of yours that
/// authenticates**, and that puts a [`Who`] into the request's extensions. Without one every request is
/// refused with 401 `operator_unknown`, also those that only read.
///
/// | | |
/// |---|---|
/// | `POST /lookup` | `{"account": ["acme"], "key": "…"}`, or `"global": true`; with a scope [per endpoint](crate::Scope::per_endpoint) also `"endpoint": ["POST", "/v1/x"]`. With `"downstream": ["charge"]` also `downstream_keys`, what the handler gives to its provider for these effects ([`DownstreamSeed`]). A POST, since keys do not belong into access logs |
/// | `GET /records/{which}` | a record, by its storage key or by the reference of an *outcome unknown* answer; `?contents=true` with headers and body |
/// | `GET /records` | what nobody has settled: `?list=unknown` (default) or `?list=in_flight&older_than_seconds=300`; `limit`, `page` |
/// | `POST /records/{which}/settle` | `{"version": "…", "why": "…", "outcome": "not_applied"}`, or `"outcome": "done", "response": {"status": 201, "headers": [["content-type", "application/json"], ["location", "/p/1"]], "body": "…"}` (or `body_base64`). Replays have these headers and no other: a body without its `content-type` has none |
/// | `POST /records/{which}/forget` | `{"version": "…", "why": "…"}`; the version `unreadable` for what cannot be read |
/// | `GET /trail` | the latest changes; `limit` |
///
/// Answers are JSON, errors problem documents (RFC 9457) whose `code` is that of [`OperatorError`] or
/// `operator_unknown`, `malformed`. Changes are POSTs of `application/json` (anything else: 415), which
/// no page of another origin can send without being asked. Nothing is cached.
///
/// See `examples/admin.rs`.
pub fn router(operator: Operator) -> Router {
    Router::new()
        .route("/lookup", post(lookup))
        .route("/records", get(list))
        .route("/records/{which}", get(show))
        .route("/records/{which}/settle", post(settle))
        .route("/records/{which}/forget", post(forget))
        .route("/trail", get(trail))
        .fallback(async || Problem::new(StatusCode::NOT_FOUND, "no_such_route", "no such route"))
        .layer(from_fn(known_operators))
        .with_state(operator)
}

async fn known_operators(request: Request, next: Next) -> Response {
    let mut response = match request.extensions().get::<Who>() {
        Some(_) => next.run(request).await,
        None => Problem::new(
            StatusCode::UNAUTHORIZED,
            "operator_unknown",
            "nobody says who is asking: a layer around this router has to authenticate, and to put a \
             tower_idempotency::admin::Who into the request's extensions",
        )
        .into_response(),
    };
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// An answer that is no success.
struct Problem {
    status: StatusCode,
    code: &'static str,
    detail: String,
}

impl Problem {
    fn new(status: StatusCode, code: &'static str, detail: impl Into<String>) -> Self {
        Self { status, code, detail: detail.into() }
    }

    fn malformed(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "malformed", detail)
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let Self { status, code, detail } = self;
        let title = status.canonical_reason().unwrap_or("Error");
        let body = json!({
            "type": "about:blank",
            "title": title,
            "status": status.as_u16(),
            "detail": detail,
            "code": code,
        });
        let media_type = [(CONTENT_TYPE, "application/problem+json")];
        (status, media_type, body.to_string()).into_response()
    }
}

impl From<OperatorError> for Problem {
    fn from(error: OperatorError) -> Self {
        let status = match &error {
            OperatorError::NotFound => StatusCode::NOT_FOUND,
            OperatorError::Answer(_) | OperatorError::NoPage => StatusCode::BAD_REQUEST,
            OperatorError::Sealed
            | OperatorError::Ambiguous(_)
            | OperatorError::InFlight { .. }
            | OperatorError::Changed
            | OperatorError::NotUnknown(_)
            | OperatorError::Unreadable => StatusCode::CONFLICT,
            OperatorError::NoTrail(source)
            | OperatorError::Unconfirmed(source)
            | OperatorError::Store(source) => {
                tracing::error!(error = %source.in_full(), "an operator's request failed");
                StatusCode::SERVICE_UNAVAILABLE
            }
        };
        Self::new(status, error.code(), error.to_string())
    }
}

impl From<ByError> for Problem {
    fn from(error: ByError) -> Self {
        Self::malformed(error.to_string())
    }
}

type Answer<T> = Result<Json<T>, Problem>;

/// Reads a JSON body. Nothing else is taken: a form can be sent from any page.
fn read<T: DeserializeOwned>(
    headers: &HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<T, Problem> {
    let media_type = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let essence = media_type.unwrap_or_default().split(';').next().unwrap_or_default().trim();
    if !essence.eq_ignore_ascii_case("application/json") {
        return Err(Problem::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "malformed",
            "send application/json",
        ));
    }
    let body = body.map_err(|rejection| {
        Problem::new(rejection.status(), "malformed", "the body cannot be read")
    })?;
    // The parser's message may repeat what was sent, so its place is told only.
    serde_json::from_slice(&body).map_err(|error| {
        let (line, column) = (error.line(), error.column());
        Problem::malformed(format!(
            "the body is not what is expected here (line {line}, column {column})"
        ))
    })
}

/// The storage key that a path names.
async fn storage_key(operator: &Operator, which: &str) -> Result<StorageKey, Problem> {
    if let Some(key) = StorageKey::from_text(which) {
        return Ok(key);
    }
    let id = LogId::parse(which).ok_or_else(|| {
        Problem::malformed("a record is named by its storage key or by its reference")
    })?;
    Ok(operator.find(id).await?)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Lookup {
    #[serde(default)]
    account: Vec<String>,
    #[serde(default)]
    global: bool,
    endpoint: Option<(String, String)>,
    key: String,
    #[serde(default)]
    contents: bool,
    #[serde(default)]
    downstream: Vec<String>,
}

async fn lookup(
    State(operator): State<Operator>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Answer<RecordView> {
    let Lookup { account, global, endpoint, key, contents, downstream } = read(&headers, body)?;
    if account.is_empty() != global {
        return Err(Problem::malformed("give either `account` or `\"global\": true`"));
    }
    // A variable that was not set: its key would be one that no provider knows.
    if downstream.iter().any(String::is_empty) {
        return Err(Problem::malformed("`downstream` has an effect without a name"));
    }
    let key = IdempotencyKey::parse(key.as_bytes(), KeySyntax::BareOrQuoted)
        .or_else(|_| IdempotencyKey::new(&key))
        .map_err(|error| Problem::malformed(error.to_string()))?;
    let endpoint = endpoint.into_iter().flat_map(|(method, path)| [method, path]);
    let identity = Identity::of_parts(account.into_iter().chain(endpoint));
    let shown = operator.show(StorageKey::new(&identity, &key)).await?;
    let mut view = RecordView::of(&shown, detail(contents));
    let seed = DownstreamSeed::new(&identity, &key);
    view.downstream_keys =
        downstream.iter().map(|effect| (effect.clone(), seed.key_for(effect))).collect();
    Ok(Json(view))
}

fn detail(contents: bool) -> Detail {
    if contents { Detail::Contents } else { Detail::Facts }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Showing {
    #[serde(default)]
    contents: bool,
}

async fn show(
    State(operator): State<Operator>,
    Path(which): Path<String>,
    query: Result<Query<Showing>, QueryRejection>,
) -> Answer<RecordView> {
    let Query(Showing { contents }) = query.map_err(bad_query)?;
    let key = storage_key(&operator, &which).await?;
    let shown = operator.show(key).await?;
    Ok(Json(RecordView::of(&shown, detail(contents))))
}

fn bad_query(_: QueryRejection) -> Problem {
    Problem::malformed("the query has something in it that is not known here")
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum List {
    Unknown,
    InFlight,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Listed {
    list: Option<List>,
    older_than_seconds: Option<u32>,
    limit: Option<u32>,
    page: Option<String>,
}

async fn list(
    State(operator): State<Operator>,
    query: Result<Query<Listed>, QueryRejection>,
) -> Answer<ListingView> {
    let Query(Listed { list, older_than_seconds, limit, page }) = query.map_err(bad_query)?;
    let survey = match (list, older_than_seconds) {
        (None | Some(List::Unknown), None) => Survey::Unknown,
        (Some(List::InFlight), age) => {
            Survey::InFlightFor(Duration::from_secs(age.unwrap_or(0).into()))
        }
        (None | Some(List::Unknown), Some(_)) => {
            return Err(Problem::malformed("`older_than_seconds` goes with `list=in_flight`"));
        }
    };
    let at_most = limit.unwrap_or(PAGE).clamp(1, LONGEST_PAGE);
    let wanted = Wanted { survey, at_most, after: page.as_deref().map(Page::from_text) };
    Ok(Json(ListingView::of(&operator.list(&wanted).await?)))
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Outcome {
    Done,
    NotApplied,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Settling {
    version: String,
    why: String,
    outcome: Outcome,
    response: Option<GivenResponse>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GivenResponse {
    status: u16,
    #[serde(default)]
    headers: Vec<(String, String)>,
    body: Option<String>,
    body_base64: Option<String>,
}

impl GivenResponse {
    fn stored(self) -> Result<StoredResponse, Problem> {
        let Self { status, headers, body, body_base64 } = self;
        let status = StatusCode::from_u16(status)
            .map_err(|_| Problem::malformed("`status` is a number from 200 to 599"))?;
        let (mut head, ()) = http::Response::new(()).into_parts();
        head.status = status;
        for (name, value) in headers {
            let name = HeaderName::try_from(name);
            let value = HeaderValue::try_from(value);
            let (Ok(name), Ok(value)) = (name, value) else {
                return Err(Problem::malformed("a header of the response is none"));
            };
            head.headers.append(name, value);
        }
        let body = match (body, body_base64) {
            (Some(_), Some(_)) => {
                return Err(Problem::malformed("either `body` or `body_base64`"));
            }
            (text, None) => text.unwrap_or_default().into_bytes(),
            (None, Some(text)) => STANDARD
                .decode(text)
                .map_err(|_| Problem::malformed("`body_base64` is not base64"))?,
        };
        Ok(StoredResponse::new(&head, body.into(), &HeaderRules::default()))
    }
}

fn version(text: &str) -> Result<Version, Problem> {
    text.parse().map_err(|_| Problem::malformed("`version` is what the record was shown with"))
}

async fn settle(
    State(operator): State<Operator>,
    Path(which): Path<String>,
    Extension(who): Extension<Who>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Answer<MadeView> {
    let Settling { version: seen, why, outcome, response } = read(&headers, body)?;
    let settlement = match (outcome, response) {
        (Outcome::Done, Some(response)) => Settlement::Done(response.stored()?),
        (Outcome::NotApplied, None) => Settlement::NotApplied,
        (Outcome::Done, None) => {
            return Err(Problem::malformed("`done` needs the `response` that retries get"));
        }
        (Outcome::NotApplied, Some(_)) => {
            return Err(Problem::malformed("`not_applied` has no `response`"));
        }
    };
    let by = By { who, why: Why::new(&why)? };
    let seen = version(&seen)?;
    let key = storage_key(&operator, &which).await?;
    Ok(Json(MadeView::of(&operator.settle(key, seen, settlement, by).await?)))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Forgetting {
    version: String,
    why: String,
}

async fn forget(
    State(operator): State<Operator>,
    Path(which): Path<String>,
    Extension(who): Extension<Who>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Answer<MadeView> {
    let Forgetting { version: seen, why } = read(&headers, body)?;
    let by = By { who, why: Why::new(&why)? };
    let seen = version(&seen)?;
    let key = storage_key(&operator, &which).await?;
    Ok(Json(MadeView::of(&operator.forget(key, seen, by).await?)))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Latest {
    limit: Option<u32>,
}

#[derive(Serialize)]
struct Trail {
    changes: Vec<TrailView>,
}

async fn trail(
    State(operator): State<Operator>,
    query: Result<Query<Latest>, QueryRejection>,
) -> Answer<Trail> {
    let Query(Latest { limit }) = query.map_err(bad_query)?;
    let trail = operator.trail(limit.unwrap_or(PAGE).clamp(1, LONGEST_PAGE)).await?;
    Ok(Json(Trail { changes: trail.iter().map(TrailView::of).collect() }))
}
