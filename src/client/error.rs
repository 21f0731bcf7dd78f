//! How an operation ends without an answer that could be returned.

use std::error::Error as StdError;
use std::fmt;

use bytes::Bytes;
use http::Response;

use super::judge::reference;
use crate::key::{IdempotencyKey, KeyError};

pub(super) type BoxError = Box<dyn StdError + Send + Sync>;

/// Why an operation has no answer. One word wide.
///
/// Neither `Display` nor `Debug` shows the key or a body.
pub struct ClientError(Box<Inner>);

struct Inner {
    kind: ClientErrorKind,
    key: Option<IdempotencyKey>,
    tries: u32,
    safe_new_key: bool,
    response: Option<Response<Bytes>>,
    source: Option<BoxError>,
}

/// What came of an operation that has no answer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum ClientErrorKind {
    /// The body can be read only once, so it could not be sent again. Nothing was sent.
    StreamedBody,
    /// The request's own body could not be read. Nothing was sent.
    BodyFailed,
    /// The given key breaks a rule. Nothing was sent.
    BadKey(KeyError),
    /// The server has seen this key with another request. Nothing ran now. A new key may pay twice: find out
    /// first what the other request was.
    KeyReused,
    /// The server says that the operation may have happened and that nobody can know. Nothing runs under this key until
    /// it is settled; a new key may pay twice.
    OutcomeUnknown,
    /// The operation was carried out, and its answer was not kept.
    ResultUnavailable,
    /// There was no final answer within the bounds. The operation may have happened: go on later, under the same key.
    GaveUp(GaveUp),
    /// The request failed and must not be sent again: it has no key and may have been received, or it
    /// could never be sent.
    Failed,
}

/// Which bound ended the tries.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum GaveUp {
    /// [`max_tries`](super::RetryPolicy::max_tries).
    Tries,
    /// [`within`](super::RetryPolicy::within).
    Deadline,
    /// The [budget](super::RetryBudget).
    Budget,
}

impl ClientError {
    /// An error before anything was sent. `given` is the key that the caller brought along: it may have been
    /// used before, so nothing is said of another one.
    pub(super) fn before_sending(
        kind: ClientErrorKind,
        given: Option<IdempotencyKey>,
        source: Option<BoxError>,
    ) -> Self {
        let safe_new_key = given.is_none();
        Self(Box::new(Inner { kind, key: given, tries: 0, safe_new_key, response: None, source }))
    }

    pub(super) fn after(
        kind: ClientErrorKind,
        key: Option<IdempotencyKey>,
        tries: u32,
        last: Last,
    ) -> Self {
        let (response, safe_new_key, source) = match last {
            Last::Answer { response, safe_new_key } => (Some(*response), safe_new_key, None),
            Last::Error(source) => (None, false, Some(source)),
        };
        Self(Box::new(Inner { kind, key, tries, safe_new_key, response, source }))
    }

    /// What came of the operation.
    #[must_use]
    pub fn kind(&self) -> &ClientErrorKind {
        &self.0.kind
    }

    /// The operation's key, if it had one: what to come back with.
    #[must_use]
    pub fn key(&self) -> Option<&IdempotencyKey> {
        self.0.key.as_ref()
    }

    /// How often it was sent.
    #[must_use]
    pub fn tries(&self) -> u32 {
        self.0.tries
    }

    /// True only if nothing was sent, or the server said that a new key cannot repeat an effect.
    #[must_use]
    pub fn is_safe_new_key(&self) -> bool {
        self.0.safe_new_key
    }

    /// The last answer, if the last try got one.
    #[must_use]
    pub fn response(&self) -> Option<&Response<Bytes>> {
        self.0.response.as_ref()
    }

    /// What the operator of the server finds the operation by, where its outcome is unknown. No secret.
    #[must_use]
    pub fn reference(&self) -> Option<String> {
        self.0.response.as_ref().and_then(|response| reference(response.body()))
    }

    /// This error inside the error of a client with middleware.
    #[cfg(feature = "client-reqwest")]
    #[must_use]
    pub fn in_middleware(error: &reqwest_middleware::Error) -> Option<&Self> {
        match error {
            reqwest_middleware::Error::Middleware(error) => error.downcast_ref(),
            reqwest_middleware::Error::Reqwest(_) => None,
        }
    }
}

/// What the last try came to.
pub(super) enum Last {
    Answer { response: Box<Response<Bytes>>, safe_new_key: bool },
    Error(BoxError),
}

impl fmt::Display for ClientError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { kind, tries, response, .. } = &*self.0;
        match kind {
            ClientErrorKind::StreamedBody => {
                f.write_str("the body can be read only once, so nothing was sent; give it as bytes")
            }
            ClientErrorKind::BodyFailed => f.write_str("the body cannot be read; nothing was sent"),
            ClientErrorKind::BadKey(error) => write!(f, "nothing was sent: {error}"),
            ClientErrorKind::KeyReused => {
                f.write_str("the idempotency key was used before, with a different request")
            }
            ClientErrorKind::OutcomeUnknown => {
                f.write_str("the operation may have happened, and the server cannot know")?;
                match self.reference() {
                    Some(reference) => write!(f, " (its operator knows it as {reference})"),
                    None => Ok(()),
                }
            }
            ClientErrorKind::ResultUnavailable => {
                f.write_str("the operation was carried out; its answer was not kept")
            }
            ClientErrorKind::GaveUp(bound) => {
                let bound = match bound {
                    GaveUp::Tries => "all tries are used up",
                    GaveUp::Deadline => "the time is up",
                    GaveUp::Budget => "the retry budget is empty",
                };
                write!(f, "no final answer after {tries} tries, {bound}")?;
                match response {
                    Some(response) => write!(f, "; the last one was {}", response.status()),
                    None => Ok(()),
                }
            }
            ClientErrorKind::Failed => f.write_str("the request failed and must not be repeated"),
        }
    }
}

impl fmt::Debug for ClientError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { kind, key, tries, safe_new_key, response, source } = &*self.0;
        f.debug_struct("ClientError")
            .field("kind", kind)
            .field("key", key)
            .field("tries", tries)
            .field("safe_new_key", safe_new_key)
            .field("status", &response.as_ref().map(Response::status))
            .field("source", source)
            .finish()
    }
}

impl StdError for ClientError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_deref().map(|source| source as _)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_error_is_one_word_wide_and_shows_neither_key_nor_body() {
        assert_eq!(size_of::<ClientError>(), size_of::<usize>());
        let key = IdempotencyKey::random();
        let response = Box::new(Response::new(Bytes::from_static(b"4242 4242")));
        let last = Last::Answer { response, safe_new_key: false };
        let kind = ClientErrorKind::GaveUp(GaveUp::Tries);
        let error = ClientError::after(kind, Some(key.clone()), 3, last);
        let shown = format!("{error} {error:?}");
        assert!(shown.contains("after 3 tries") && shown.contains("200"), "{shown}");
        assert!(!shown.contains("4242") && !shown.contains(key.as_str()), "{shown}");
    }

    #[test]
    fn an_unknown_outcome_says_what_the_operator_finds_it_by() {
        let error = |body: &'static str| {
            let response = Box::new(Response::new(Bytes::from_static(body.as_bytes())));
            let last = Last::Answer { response, safe_new_key: false };
            ClientError::after(ClientErrorKind::OutcomeUnknown, None, 1, last)
        };
        for body in [
            r#"{"code":"idempotency_outcome_unknown","reference":"3f62c1a05b9e"}"#,
            r#"{"error":{"code":"idempotency_outcome_unknown","reference":"3f62c1a05b9e"}}"#,
        ] {
            assert_eq!(error(body).reference().as_deref(), Some("3f62c1a05b9e"), "{body}");
            assert!(error(body).to_string().ends_with("(its operator knows it as 3f62c1a05b9e)"));
        }
        // No server of ours says this; what is no reference is not passed on into logs.
        for body in [r#"{"reference":"4242 4242 4242"}"#, r#"{"reference":7}"#, "{}", "["] {
            assert_eq!(error(body).reference(), None, "{body}");
            assert!(error(body).to_string().ends_with("cannot know"), "{body}");
        }
    }
}
