//! The handler's answer: what is recorded of it, and what goes out.

use http::header::{CONTENT_LENGTH, CONTENT_TYPE, TRAILER, TRANSFER_ENCODING};
use http::{HeaderMap, HeaderName, Response, StatusCode, response};
use http_body::Body;

use super::body::{Read, ResponseBody, read};
use super::extension::Outcome;
use super::problem;
use crate::config::{
    Config, IDEMPOTENCY_KEY, IDEMPOTENCY_STATUS, IDEMPOTENT_REPLAYED, STRIPE_SHOULD_RETRY,
    StoredBodies,
};
use crate::engine::{Ran, Settle, observe};
use crate::error::{Rejection, RejectionKind};
use crate::mistakes::{Mistake, made};
use crate::record::{Verdict, Writes};
use crate::response::StoredResponse;
use crate::scope::StorageKey;

/// What a handler's run gives to whoever asked.
#[derive(Debug)]
pub(super) enum Answer<B, E> {
    /// Its response.
    Response {
        response: Box<Response<ResponseBody<B>>>,
        /// True if the handler itself said whether a retry makes sense.
        advised: bool,
    },
    /// Nothing: its response broke off.
    Broken,
    /// The inner service's error.
    Error(E),
}

impl<B, E> Answer<B, E> {
    pub(super) fn into_response(
        self,
        config: &Config,
        key: StorageKey,
    ) -> Result<Response<ResponseBody<B>>, E> {
        match self {
            Self::Response { response, .. } => Ok(*response),
            Self::Broken => {
                Ok(referenced(Rejection::new(RejectionKind::HandlerFailed), key, config))
            }
            Self::Error(error) => Err(error),
        }
    }

    /// The response of a run of which the store undid everything: a failure may be tried again.
    pub(super) fn into_undone(self, config: &Config) -> Result<Response<ResponseBody<B>>, E> {
        match self {
            Self::Response { mut response, advised } => {
                if !advised {
                    problem::mark_retry(response.status(), response.headers_mut());
                }
                Ok(*response)
            }
            Self::Broken => Ok(refusal(Rejection::new(RejectionKind::RolledBack), config)),
            Self::Error(error) => Err(error),
        }
    }
}

/// The answer to a request that is refused, with the typed reason in its extensions.
pub(super) fn refusal<B>(rejection: Rejection, config: &Config) -> Response<ResponseBody<B>> {
    let response = problem::response(&rejection, config);
    let mut response = response.map(ResponseBody::full);
    response.extensions_mut().insert(rejection);
    response
}

/// A refusal, with what an operator finds the record by if somebody has to find out what happened.
pub(super) fn referenced<B>(
    rejection: Rejection,
    key: StorageKey,
    config: &Config,
) -> Response<ResponseBody<B>> {
    match observe::is_unknown(rejection.kind()) {
        true => refusal(rejection.with_reference(key.log_id()), config),
        false => refusal(rejection, config),
    }
}

/// Statuses that a handler answers before it does anything.
const NO_EFFECT: [StatusCode; 5] = [
    StatusCode::UNAUTHORIZED,
    StatusCode::FORBIDDEN,
    StatusCode::PROXY_AUTHENTICATION_REQUIRED,
    StatusCode::TOO_EARLY,
    StatusCode::TOO_MANY_REQUESTS,
];

/// True for what is not stored of any answer: it says that nothing was done, or nothing at all.
#[cfg(feature = "admin")]
pub(crate) fn is_never_stored(status: StatusCode) -> bool {
    NO_EFFECT.contains(&status) || status == StatusCode::REQUEST_TIMEOUT
}

/// True for answers that have no body (RFC 9110, 15.3.5, 15.3.6, 15.4.5).
#[cfg(feature = "admin")]
pub(crate) fn is_bodiless(status: StatusCode) -> bool {
    [StatusCode::NO_CONTENT, StatusCode::RESET_CONTENT, StatusCode::NOT_MODIFIED].contains(&status)
}

/// Media types of bodies that may never end.
const STREAMS: [&[u8]; 4] = [
    b"text/event-stream",
    b"application/x-ndjson",
    b"application/ndjson",
    b"multipart/x-mixed-replace",
];

/// `application/grpc`, `application/grpc+proto`: the status of a call is in the trailers, which only a
/// body that is passed through keeps.
const GRPC: &[u8] = b"application/grpc";

/// Decides what is recorded of a response, and reads its body if that is kept.
pub(super) async fn judge<B, E>(response: Response<B>, config: &Config) -> Ran<Answer<B, E>>
where
    B: Body,
{
    let (mut head, body) = response.into_parts();
    let advised = has(&head.headers, &STRIPE_SHOULD_RETRY);
    let verdict = verdict(&mut head);
    clean(&mut head.headers);
    match verdict {
        Judgement::Release(verdict) => {
            ran(Settle::Release(verdict), head, ResponseBody::passed(body), advised)
        }
        Judgement::KeepHead(writes) => keep_head(head, ResponseBody::passed(body), writes),
        Judgement::Keep(writes) if config.stored_bodies == StoredBodies::Never => {
            answer_once(head, ResponseBody::passed(body), writes, advised)
        }
        Judgement::Keep(writes) => {
            problem::mark_final(head.status, &mut head.headers);
            match read(body, config.response_limit, config.response_timeout).await {
                Read::Whole(bytes) => {
                    // How the body is framed is made anew from the bytes, here and in every
                    // replay; and no trailers are left that could be announced.
                    remove(&mut head.headers, &[CONTENT_LENGTH, TRANSFER_ENCODING, TRAILER]);
                    let response = StoredResponse::encoded(&head, &bytes, &config.header_rules);
                    let settle = Settle::Complete { response, writes };
                    ran(settle, head, ResponseBody::full(bytes), advised)
                }
                Read::Part(read, rest) => {
                    answer_once(head, ResponseBody::begun(read, rest), writes, advised)
                }
                Read::Broken(_) => {
                    Ran { settle: Settle::Release(Verdict::Unknown), reply: Answer::Broken }
                }
            }
        }
    }
}

/// Passes the answer on and records that it was given; `advised`: the handler itself said whether to retry.
fn answer_once<B, E>(
    head: response::Parts,
    body: ResponseBody<B>,
    writes: Writes,
    advised: bool,
) -> Ran<Answer<B, E>> {
    let mut ran = keep_head(head, body, writes);
    if let Answer::Response { advised: known, .. } = &mut ran.reply {
        *known = advised;
    }
    ran
}

/// What would be recorded of a response that is handed on untouched. Its body is not kept.
pub(super) fn shadowed(head: &mut response::Parts) -> Settle {
    let marked = head.extensions.get::<Outcome>().copied();
    let judgement = verdict(head);
    if let Some(marked) = marked {
        head.extensions.insert(marked);
    }
    match judgement {
        Judgement::Release(verdict) => Settle::Release(verdict),
        Judgement::KeepHead(writes) | Judgement::Keep(writes) => {
            Settle::Complete { response: StoredResponse::without_body(head).encode(), writes }
        }
    }
}

enum Judgement {
    Release(Verdict),
    /// Done, but the body is not kept.
    KeepHead(Writes),
    Keep(Writes),
}

/// What a status means for the handler's writes, where the store can undo them.
fn writes(status: StatusCode) -> Writes {
    if status.is_client_error() {
        Writes::Undo
    } else if status.is_server_error() {
        Writes::RollBack
    } else {
        Writes::Keep
    }
}

fn verdict(head: &mut response::Parts) -> Judgement {
    if let Some(outcome) = head.extensions.remove::<Outcome>() {
        return match outcome {
            Outcome::NoEffect => Judgement::Release(Verdict::NoEffect),
            Outcome::Unknown => Judgement::Release(Verdict::Unknown),
            Outcome::DoneBodyNotKept => Judgement::KeepHead(Writes::Keep),
            Outcome::KeepWrites if is_stream(&head.headers) => Judgement::KeepHead(Writes::Keep),
            Outcome::KeepWrites => Judgement::Keep(Writes::Keep),
        };
    }
    if let Some(refusal) = head.extensions.get::<Rejection>() {
        // A refusal by a layer like this one further in, whose own record is what counts. Unless
        // its handler was started, perhaps under another key than the next one will get there.
        let unknown =
            matches!(refusal.kind(), RejectionKind::HandlerFailed | RejectionKind::OutcomeUnknown);
        return Judgement::Release(if unknown { Verdict::Unknown } else { Verdict::NoEffect });
    }
    if NO_EFFECT.contains(&head.status) {
        return Judgement::Release(Verdict::NoEffect);
    }
    if made(Mistake::ErrorsFreeTheKey) && head.status.is_server_error() {
        return Judgement::Release(Verdict::NoEffect);
    }
    match head.status {
        // A time limit further in may have answered after the effect.
        StatusCode::REQUEST_TIMEOUT => Judgement::Release(Verdict::Unknown),
        StatusCode::SWITCHING_PROTOCOLS => Judgement::KeepHead(Writes::Keep),
        status if is_stream(&head.headers) => Judgement::KeepHead(writes(status)),
        status => Judgement::Keep(writes(status)),
    }
}

/// True for media types of bodies that may never end.
pub(crate) fn is_stream(headers: &HeaderMap) -> bool {
    headers.get(CONTENT_TYPE).is_some_and(|value| {
        let essence = value.as_bytes().split(|byte| *byte == b';').next().unwrap_or_default();
        let essence = essence.trim_ascii();
        let grpc = essence.get(..GRPC.len()).is_some_and(|start| start.eq_ignore_ascii_case(GRPC));
        grpc || STREAMS.iter().any(|stream| essence.eq_ignore_ascii_case(stream))
    })
}

/// First answers never carry the marks of this layer, whoever else may have set them.
fn clean(headers: &mut HeaderMap) {
    remove(headers, &[IDEMPOTENT_REPLAYED, IDEMPOTENCY_STATUS, IDEMPOTENCY_KEY]);
}

/// Most answers have few headers, and to look at those few costs less than a hash of a name.
fn has(headers: &HeaderMap, name: &HeaderName) -> bool {
    headers.keys().any(|present| present == name)
}

fn remove(headers: &mut HeaderMap, names: &[HeaderName]) {
    for name in names {
        if has(headers, name) {
            headers.remove(name);
        }
    }
}

fn ran<B, E>(
    settle: Settle,
    head: response::Parts,
    body: ResponseBody<B>,
    advised: bool,
) -> Ran<Answer<B, E>> {
    let response = Box::new(Response::from_parts(head, body));
    Ran { settle, reply: Answer::Response { response, advised } }
}

fn keep_head<B, E>(
    mut head: response::Parts,
    body: ResponseBody<B>,
    writes: Writes,
) -> Ran<Answer<B, E>> {
    let advised = !problem::mark_final(head.status, &mut head.headers);
    let stored = StoredResponse::without_body(&head);
    ran(Settle::Complete { response: stored.encode(), writes }, head, body, advised)
}
