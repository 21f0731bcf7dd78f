//! The loop: send, judge, pause, send again; one policy for every kind of client.

use std::error::Error as StdError;
use std::future::Future;

use bytes::Bytes;
use http::{Method, Response};
use http_body::Body;
use http_body_util::BodyExt as _;
use tokio::time::{Instant, sleep, timeout_at};

use super::error::{BoxError, ClientError, ClientErrorKind, GaveUp, Last};
use super::judge::{Again, Judged, Judgement, is_replay, judge};
use super::observe;
use super::policy::RetryPolicy;
use crate::key::IdempotencyKey;
use crate::middleware::{Read, ResponseBody, is_stream, read};

/// Stands in the extensions of every response that the client returns.
#[derive(Clone, Debug)]
pub struct Answered {
    key: Option<IdempotencyKey>,
    tries: u32,
    replay: bool,
    safe_new_key: Option<bool>,
}

impl Answered {
    /// The operation's key, if it had one.
    #[must_use]
    pub fn key(&self) -> Option<&IdempotencyKey> {
        self.key.as_ref()
    }

    /// How often the operation was sent.
    #[must_use]
    pub fn tries(&self) -> u32 {
        self.tries
    }

    /// True if the server says that this is the answer of an earlier try, or of an earlier operation under
    /// this key.
    #[must_use]
    pub fn is_replay(&self) -> bool {
        self.replay
    }

    /// True only if the server said that a new key cannot repeat an effect.
    #[must_use]
    pub fn is_safe_new_key(&self) -> bool {
        self.safe_new_key == Some(true)
    }
}

/// One logical operation: what stays the same over its tries.
#[derive(Clone, Debug)]
pub(super) struct Operation {
    pub(super) key: Option<IdempotencyKey>,
    pub(super) method: Method,
}

impl Operation {
    /// True if sending it twice cannot do it twice.
    fn is_repeatable(&self) -> bool {
        self.key.is_some() || self.method.is_idempotent()
    }
}

/// Something that sends the same request as often as it is asked to.
pub(super) trait Sender {
    type Body: Body<Data: Send, Error: Into<BoxError> + Send> + Send;

    fn send(&mut self) -> impl Future<Output = Result<Response<Self::Body>, SendError>> + Send;
}

/// A try without an answer.
pub(super) struct SendError {
    pub(super) sent: Sent,
    pub(super) source: BoxError,
}

/// How much of a request the server can have seen.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Sent {
    /// Certainly nothing.
    Nothing,
    /// Nobody knows.
    Perhaps,
    /// Nothing, and trying again is useless: the request itself is wrong.
    #[cfg_attr(
        not(feature = "client-reqwest"),
        expect(dead_code, reason = "only reqwest tells wrong requests from failed ones")
    )]
    Never,
}

impl SendError {
    /// Judges an error of the inner service by the policy's proofs.
    pub(super) fn judged(source: BoxError, policy: &RetryPolicy) -> Self {
        let mut cause: Option<&(dyn StdError + 'static)> = Some(&*source);
        let mut sent = Sent::Perhaps;
        while let Some(error) = cause {
            if (policy.nothing_sent)(error) {
                sent = Sent::Nothing;
            }
            cause = error.source();
        }
        Self { sent, source }
    }
}

/// What came of a try.
enum Heard<B> {
    /// An answer that is not looked into: there is no key, or it is a stream.
    Passed(Response<ResponseBody<B>>),
    /// A whole answer.
    Whole(Response<Bytes>),
    Failed(SendError),
}

/// Takes an operation to its answer.
///
/// # Cancel safety
/// Dropping the future leaves the operation done or not done; the same key finds out.
pub(super) async fn run<S: Sender>(
    policy: &RetryPolicy,
    operation: Operation,
    mut sender: S,
) -> Result<Response<ResponseBody<S::Body>>, ClientError> {
    let deadline = Instant::now() + policy.within;
    let (mut tries, mut taken) = (0, 0);
    loop {
        tries += 1;
        let bound = deadline.min(Instant::now() + policy.try_timeout);
        let heard = match timeout_at(bound, hear(&mut sender, policy, &operation)).await {
            Ok(heard) => heard,
            Err(late) => Heard::Failed(SendError { sent: Sent::Perhaps, source: late.into() }),
        };
        let (again, last) = match heard {
            Heard::Passed(response) => {
                policy.budget.give_back(taken);
                return Ok(answered(response, &operation, tries, None));
            }
            Heard::Whole(response) => {
                let (head, body) = response.into_parts();
                let Judged { judgement, safe_new_key } = judge(&head, Some(&body));
                let response = Response::from_parts(head, body);
                match judgement {
                    Judgement::Final => {
                        policy.budget.give_back(taken);
                        let response = response.map(ResponseBody::full);
                        return Ok(answered(response, &operation, tries, safe_new_key));
                    }
                    Judgement::Stop(kind) => {
                        policy.budget.give_back(taken);
                        let last = whole(response, safe_new_key);
                        return Err(failed(kind, &operation, tries, last));
                    }
                    Judgement::Again(again) => (again, whole(response, safe_new_key)),
                }
            }
            Heard::Failed(SendError { sent, source }) => {
                let repeat = match sent {
                    Sent::Nothing => true,
                    Sent::Perhaps => operation.is_repeatable(),
                    Sent::Never => false,
                };
                let last = Last::Error(source);
                if !repeat {
                    return Err(failed(ClientErrorKind::Failed, &operation, tries, last));
                }
                (Again { reason: "connection", after: None, free: false }, last)
            }
        };
        let pause = policy.pause(tries, again.after);
        let gave_up = if tries >= policy.max_tries {
            Some(GaveUp::Tries)
        } else if Instant::now() + pause >= deadline {
            // Waiting for a try that there is no time for helps nobody.
            Some(GaveUp::Deadline)
        } else if !again.free && !policy.budget.take() {
            Some(GaveUp::Budget)
        } else {
            None
        };
        if let Some(bound) = gave_up {
            return Err(failed(ClientErrorKind::GaveUp(bound), &operation, tries, last));
        }
        taken += u32::from(!again.free);
        observe::again(again.reason, tries, pause);
        sleep(pause).await;
    }
}

/// Sends once, and reads the answer as far as it can matter for another try.
async fn hear<S: Sender>(
    sender: &mut S,
    policy: &RetryPolicy,
    operation: &Operation,
) -> Heard<S::Body> {
    let response = match sender.send().await {
        Ok(response) => response,
        Err(error) => return Heard::Failed(error),
    };
    if operation.key.is_none() || is_stream(response.headers()) {
        return Heard::Passed(response.map(ResponseBody::passed));
    }
    let (head, body) = response.into_parts();
    match read(body, policy.answer_limit, policy.try_timeout).await {
        Read::Whole(bytes) => Heard::Whole(Response::from_parts(head, bytes)),
        Read::Part(read, rest) => {
            Heard::Passed(Response::from_parts(head, ResponseBody::begun(read, rest)))
        }
        Read::Broken(error) => {
            Heard::Failed(SendError { sent: Sent::Perhaps, source: error.into() })
        }
    }
}

fn whole(response: Response<Bytes>, safe_new_key: Option<bool>) -> Last {
    Last::Answer { response: Box::new(response), safe_new_key: safe_new_key == Some(true) }
}

fn answered<B>(
    mut response: Response<B>,
    operation: &Operation,
    tries: u32,
    safe_new_key: Option<bool>,
) -> Response<B> {
    let replay = is_replay(response.headers());
    observe::ended(if replay { "replayed" } else { "answered" });
    let key = operation.key.clone();
    response.extensions_mut().insert(Answered { key, tries, replay, safe_new_key });
    response
}

fn failed(kind: ClientErrorKind, operation: &Operation, tries: u32, last: Last) -> ClientError {
    observe::ended(match kind {
        ClientErrorKind::StreamedBody
        | ClientErrorKind::BodyFailed
        | ClientErrorKind::BadKey(_) => "not_sent",
        ClientErrorKind::KeyReused => "mismatch",
        ClientErrorKind::OutcomeUnknown => "outcome_unknown",
        ClientErrorKind::ResultUnavailable => "result_unavailable",
        ClientErrorKind::GaveUp(_) => "gave_up",
        ClientErrorKind::Failed => "failed",
    });
    ClientError::after(kind, operation.key.clone(), tries, last)
}

/// A body in one piece, as long as its length is known from the start.
pub(super) async fn whole_body<B>(
    body: B,
    given: Option<&IdempotencyKey>,
) -> Result<Bytes, ClientError>
where
    B: Body<Error: Into<BoxError>>,
{
    if body.size_hint().exact().is_none() {
        let kind = ClientErrorKind::StreamedBody;
        return Err(ClientError::before_sending(kind, given.cloned(), None));
    }
    match body.collect().await {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(error) => {
            let kind = ClientErrorKind::BodyFailed;
            Err(ClientError::before_sending(kind, given.cloned(), Some(error.into())))
        }
    }
}
