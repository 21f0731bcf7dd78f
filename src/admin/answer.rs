//! What an operation may be settled with: nothing that the layer would not have stored itself.

use crate::config::BODY_LIMIT;
use crate::middleware::{is_bodiless, is_never_stored, mark_final};
use crate::response::{StoredBody, StoredResponse};

/// The longest body that an operation is settled with: what the layer keeps unless told otherwise
/// ([`ConfigBuilder::response_limit`](crate::ConfigBuilder::response_limit)).
pub const LONGEST_BODY: usize = BODY_LIMIT;

/// Why an operation cannot be settled with an answer.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum AnswerError {
    /// It is not the status of a final answer.
    #[error("{0} is no status of an answer: those are 200 to 599")]
    Status(u16),
    /// Handlers answer so before they do anything, or without knowing what they did: never stored.
    #[error(
        "an answer with status {0} is never stored: it says that nothing was done, or nothing at all"
    )]
    NeverStored(u16),
    /// There is a body, and this status has none.
    #[error("an answer with status {0} has no body")]
    BodyNotAllowed(u16),
    /// The body is too long.
    #[error("the body has {length} bytes, and at most {max} are kept")]
    TooLong {
        /// How long it is.
        length: usize,
        /// How long it may be.
        max: usize,
    },
}

/// The answer as it is stored, if it can be.
pub(super) fn checked(mut response: StoredResponse) -> Result<StoredResponse, AnswerError> {
    let status = response.status();
    let number = status.as_u16();
    if !(200..600).contains(&number) {
        return Err(AnswerError::Status(number));
    }
    if is_never_stored(status) {
        return Err(AnswerError::NeverStored(number));
    }
    let length = match response.body() {
        StoredBody::Kept(body) => body.len(),
        StoredBody::NotKept => 0,
    };
    if length > 0 && is_bodiless(status) {
        return Err(AnswerError::BodyNotAllowed(number));
    }
    if length > LONGEST_BODY {
        return Err(AnswerError::TooLong { length, max: LONGEST_BODY });
    }
    mark_final(status, response.headers_mut());
    Ok(response)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http::StatusCode;

    use super::*;
    use crate::response::HeaderRules;

    fn judged(status: u16, length: usize) -> Result<Option<String>, AnswerError> {
        let (mut head, ()) = http::Response::new(()).into_parts();
        head.status = StatusCode::from_u16(status).unwrap();
        let body = Bytes::from(vec![b'x'; length]);
        let response = checked(StoredResponse::new(&head, body, &HeaderRules::default()))?;
        let mark = response.headers().get("stripe-should-retry");
        Ok(mark.map(|mark| mark.to_str().unwrap().to_owned()))
    }

    #[test]
    fn only_what_the_layer_would_store_is_settled_with() {
        for status in [200, 201, 302, 400, 402, 409, 422] {
            assert_eq!(judged(status, LONGEST_BODY), Ok(None), "{status}");
        }
        for status in [204, 205, 304] {
            assert_eq!(judged(status, 0), Ok(None), "{status}");
            assert_eq!(judged(status, 1), Err(AnswerError::BodyNotAllowed(status)));
        }
        for status in [500, 503] {
            assert_eq!(judged(status, 1), Ok(Some("false".to_owned())), "{status}");
        }
        for status in [100, 101, 199, 600, 999] {
            assert_eq!(judged(status, 0), Err(AnswerError::Status(status)));
        }
        for status in [401, 403, 407, 408, 425, 429] {
            assert_eq!(judged(status, 0), Err(AnswerError::NeverStored(status)));
        }
        let (length, max) = (LONGEST_BODY + 1, LONGEST_BODY);
        assert_eq!(judged(200, length), Err(AnswerError::TooLong { length, max }));
    }
}
