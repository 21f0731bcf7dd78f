//! The handler's answer: what is recorded of it, and what goes out.

use std::collections::VecDeque;
use std::pin::{Pin, pin};

use bytes::{Buf, Bytes, BytesMut};
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, TRAILER, TRANSFER_ENCODING};
use http::{HeaderMap, Response, StatusCode, response};
use http_body::Body;
use http_body_util::BodyExt as _;
use tokio::time::sleep;

use super::body::ResponseBody;
use super::extension::Outcome;
use super::problem;
use super::service::referenced;
use crate::config::{Config, IDEMPOTENCY_KEY, IDEMPOTENCY_STATUS, IDEMPOTENT_REPLAYED};
use crate::engine::{Ran, Settle};
use crate::error::{Rejection, RejectionKind};
use crate::mistakes::{Mistake, made};
use crate::record::Verdict;
use crate::response::StoredResponse;
use crate::scope::StorageKey;

/// What a handler's run gives to whoever asked.
#[derive(Debug)]
pub(super) enum Answer<B, E> {
    /// Its response.
    Response(Box<Response<ResponseBody<B>>>),
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
            Self::Response(response) => Ok(*response),
            Self::Broken => {
                Ok(referenced(Rejection::new(RejectionKind::HandlerFailed), key, config))
            }
            Self::Error(error) => Err(error),
        }
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

/// Media types of bodies that may never end.
const STREAMS: [&[u8]; 4] = [
    b"text/event-stream",
    b"application/x-ndjson",
    b"application/ndjson",
    b"multipart/x-mixed-replace",
];

/// Decides what is recorded of a response, and reads its body if that is kept.
pub(super) async fn judge<B, E>(response: Response<B>, config: &Config) -> Ran<Answer<B, E>>
where
    B: Body,
{
    let (mut head, body) = response.into_parts();
    let verdict = verdict(&mut head);
    clean(&mut head.headers);
    match verdict {
        Judgement::Release(verdict) => {
            ran(Settle::Release(verdict), head, ResponseBody::passed(body))
        }
        Judgement::KeepHead => keep_head(head, ResponseBody::passed(body)),
        Judgement::Keep => {
            problem::mark_final(head.status, &mut head.headers);
            match read(body, config).await {
                Read::Whole(bytes) => {
                    // How the body is framed is made anew from the bytes, here and in every
                    // replay; and no trailers are left that could be announced.
                    for framing in [CONTENT_LENGTH, TRANSFER_ENCODING, TRAILER] {
                        head.headers.remove(framing);
                    }
                    let stored = StoredResponse::new(&head, bytes.clone(), &config.header_rules);
                    ran(Settle::Complete(stored.encode()), head, ResponseBody::full(bytes))
                }
                Read::Part(read, rest) => keep_head(head, ResponseBody::begun(read, rest)),
                Read::Broken => {
                    Ran { settle: Settle::Release(Verdict::Unknown), reply: Answer::Broken }
                }
            }
        }
    }
}

enum Judgement {
    Release(Verdict),
    /// Done, but the body is not kept.
    KeepHead,
    Keep,
}

fn verdict(head: &mut response::Parts) -> Judgement {
    if let Some(outcome) = head.extensions.remove::<Outcome>() {
        return match outcome {
            Outcome::NoEffect => Judgement::Release(Verdict::NoEffect),
            Outcome::Unknown => Judgement::Release(Verdict::Unknown),
            Outcome::DoneBodyNotKept => Judgement::KeepHead,
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
        StatusCode::SWITCHING_PROTOCOLS => Judgement::KeepHead,
        _ if is_stream(&head.headers) => Judgement::KeepHead,
        _ => Judgement::Keep,
    }
}

fn is_stream(headers: &HeaderMap) -> bool {
    headers.get(CONTENT_TYPE).is_some_and(|value| {
        let essence = value.as_bytes().split(|byte| *byte == b';').next().unwrap_or_default();
        STREAMS.iter().any(|stream| essence.trim_ascii().eq_ignore_ascii_case(stream))
    })
}

/// First answers never carry the marks of this layer, whoever else may have set them.
fn clean(headers: &mut HeaderMap) {
    headers.remove(IDEMPOTENT_REPLAYED);
    headers.remove(IDEMPOTENCY_STATUS);
    headers.remove(IDEMPOTENCY_KEY);
}

fn ran<B, E>(settle: Settle, head: response::Parts, body: ResponseBody<B>) -> Ran<Answer<B, E>> {
    let response = Response::from_parts(head, body);
    Ran { settle, reply: Answer::Response(Box::new(response)) }
}

fn keep_head<B, E>(mut head: response::Parts, body: ResponseBody<B>) -> Ran<Answer<B, E>> {
    problem::mark_final(head.status, &mut head.headers);
    let stored = StoredResponse::without_body(&head);
    ran(Settle::Complete(stored.encode()), head, body)
}

/// What was read of a body.
enum Read<B> {
    Whole(Bytes),
    /// Too long, or too slow: what was read, and the rest.
    Part(VecDeque<Bytes>, Pin<Box<B>>),
    Broken,
}

/// Reads a body up to the limit of what is kept.
async fn read<B: Body>(body: B, config: &Config) -> Read<B> {
    let limit = config.response_limit;
    if body.size_hint().lower() > limit as u64 {
        return Read::Part(VecDeque::new(), Box::pin(body));
    }
    let mut body = Box::pin(body);
    let mut slow = pin!(sleep(config.response_timeout));
    let (mut frames, mut length) = (VecDeque::new(), 0_usize);
    loop {
        let frame = tokio::select! {
            biased;
            frame = body.frame() => frame,
            () = &mut slow => return Read::Part(frames, body),
        };
        match frame {
            None => return Read::Whole(concat(frames, length)),
            Some(Err(_)) => return Read::Broken,
            Some(Ok(frame)) => {
                // Trailers are not kept, neither here nor in replays.
                let Ok(mut data) = frame.into_data() else { continue };
                let data = data.copy_to_bytes(data.remaining());
                length = length.saturating_add(data.len());
                frames.push_back(data);
                if length > limit {
                    return Read::Part(frames, body);
                }
            }
        }
    }
}

fn concat(mut frames: VecDeque<Bytes>, length: usize) -> Bytes {
    if frames.len() <= 1 {
        return frames.pop_front().unwrap_or_default();
    }
    let mut whole = BytesMut::with_capacity(length);
    frames.iter().for_each(|frame| whole.extend_from_slice(frame));
    whole.freeze()
}
