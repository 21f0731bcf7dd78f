//! What travels in extensions: the handler's word about its effect, the marks on answers, extractors.

/// What a handler says about its own effect, where the status alone would be misread.
///
/// It travels in the extensions of the handler's response. With axum it is a part of the response, and
/// stands after the status:
///
/// ```
/// # #[cfg(feature = "axum")] {
/// use axum::response::{IntoResponse, Response};
/// use http::StatusCode;
/// use tower_idempotency::Outcome;
///
/// async fn create_payment(body: String) -> Response {
///     if body.is_empty() {
///         // Nothing happened, so the client may correct the body and keep its key.
///         return (StatusCode::BAD_REQUEST, Outcome::NoEffect, "the body is empty").into_response();
///     }
///     StatusCode::CREATED.into_response()
/// }
/// # let _ = create_payment;
/// # }
/// ```
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum Outcome {
    /// Nothing happened: the answer is not stored, and the key is free again, also for another body.
    NoEffect,
    /// The effect may have happened: the answer is not stored, and retries are told that the
    /// outcome is unknown.
    Unknown,
    /// It happened, and the body must not be kept: retries are told that the operation is done.
    /// For streams, and for bodies that must not rest in a store.
    DoneBodyNotKept,
    /// The answer is a refusal or an error, and what the handler wrote through the store's
    /// transaction belongs to it: it is committed with the answer. For a row that says why a card
    /// was declined. Without this mark such writes are undone. Where the store holds no
    /// transaction of the handler's, nothing changes.
    KeepWrites,
}

/// Stands in the extensions of a response that is a replay.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct Replayed;

#[cfg(feature = "axum")]
mod axum_impl {
    use std::convert::Infallible;

    use axum::extract::{FromRequestParts, OptionalFromRequestParts};
    use axum::response::{IntoResponse, IntoResponseParts, Response, ResponseParts};
    use http::request::Parts;
    use http::{Extensions, StatusCode};

    use super::Outcome;
    use crate::engine::Execution;
    use crate::key::IdempotencyKey;

    impl IntoResponseParts for Outcome {
        type Error = Infallible;

        fn into_response_parts(
            self,
            mut parts: ResponseParts,
        ) -> Result<ResponseParts, Infallible> {
            parts.extensions_mut().insert(self);
            Ok(parts)
        }
    }

    /// The rejection of [`IdempotencyKey`] and [`Execution`] where a request has none.
    #[derive(Clone, Copy, Debug, thiserror::Error)]
    #[error(
        "no idempotency key was handled for this request: is `IdempotencyLayer` around this route, \
         does it cover this method, and is the key required here? (Where it is optional, extract an \
         `Option`.)"
    )]
    #[non_exhaustive]
    pub struct NotIdempotent;

    impl IntoResponse for NotIdempotent {
        fn into_response(self) -> Response {
            tracing::error!("{self}");
            (StatusCode::INTERNAL_SERVER_ERROR, Outcome::NoEffect, self.to_string()).into_response()
        }
    }

    macro_rules! extract_from_extensions {
        ($type:ty, $find:ident) => {
            impl<S: Sync> FromRequestParts<S> for $type {
                type Rejection = NotIdempotent;

                async fn from_request_parts(
                    parts: &mut Parts,
                    _state: &S,
                ) -> Result<Self, NotIdempotent> {
                    $find(&parts.extensions).ok_or(NotIdempotent)
                }
            }

            impl<S: Sync> OptionalFromRequestParts<S> for $type {
                type Rejection = Infallible;

                async fn from_request_parts(
                    parts: &mut Parts,
                    _state: &S,
                ) -> Result<Option<Self>, Infallible> {
                    Ok($find(&parts.extensions))
                }
            }
        };
    }

    extract_from_extensions!(IdempotencyKey, key);
    extract_from_extensions!(Execution, execution);

    fn execution(extensions: &Extensions) -> Option<Execution> {
        extensions.get().cloned()
    }

    /// A test of a handler without the layer has no execution to give, but may put a key there.
    fn key(extensions: &Extensions) -> Option<IdempotencyKey> {
        let execution = extensions.get::<Execution>();
        execution.map(Execution::key).or_else(|| extensions.get()).cloned()
    }

    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    mod tx {
        use axum::extract::FromRequestParts;
        use axum::response::{IntoResponse, Response};
        use http::StatusCode;
        use http::request::Parts;

        use super::super::Outcome;
        use crate::store::sql::{Backend, NoTx, Tx};

        impl<DB: Backend, S: Sync> FromRequestParts<S> for Tx<DB> {
            type Rejection = NoTx;

            async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, NoTx> {
                Self::take(&parts.extensions)
            }
        }

        impl IntoResponse for NoTx {
            fn into_response(self) -> Response {
                tracing::error!("{self}");
                (StatusCode::INTERNAL_SERVER_ERROR, Outcome::NoEffect, self.to_string())
                    .into_response()
            }
        }
    }

    #[cfg(test)]
    mod tests {
        use axum::RequestPartsExt as _;
        use http::Request;

        use super::*;

        #[tokio::test]
        async fn a_handler_without_the_layer_finds_the_key_that_a_test_gives_it_and_no_other() {
            let (mut parts, ()) = Request::new(()).into_parts();
            assert!(matches!(parts.extract::<IdempotencyKey>().await, Err(NotIdempotent)));
            let given = IdempotencyKey::new("a key").unwrap();
            parts.extensions.insert(given.clone());
            assert_eq!(parts.extract::<IdempotencyKey>().await.ok(), Some(given.clone()));
            assert_eq!(parts.extract::<Option<IdempotencyKey>>().await, Ok(Some(given)));
            assert!(parts.extract::<Execution>().await.is_err());
        }
    }
}

#[cfg(feature = "axum")]
pub use axum_impl::NotIdempotent;
