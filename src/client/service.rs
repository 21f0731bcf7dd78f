//! For hyper clients and any other tower service that sends requests.

use std::future::{Future, poll_fn};
use std::marker::PhantomData;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::request::Parts;
use http::{Request, Response};
use http_body::Body;
use tower_layer::Layer;
use tower_service::Service;

use super::error::{BoxError, ClientError};
use super::policy::RetryPolicy;
use super::retry::{Operation, SendError, Sender, Sent, run, whole_body};
use super::{key, observe};
use crate::middleware::ResponseBody;

/// Puts [`Retry`] around a client. See the [module](super) for what it does.
///
/// # Clone
/// Clones share the budget.
#[derive(Clone, Debug)]
pub struct RetryLayer {
    policy: RetryPolicy,
}

impl RetryLayer {
    /// A layer with these rules.
    #[must_use]
    pub fn new(policy: RetryPolicy) -> Self {
        observe::describe();
        Self { policy }
    }
}

impl<S> Layer<S> for RetryLayer {
    type Service = Retry<S>;

    fn layer(&self, inner: S) -> Retry<S> {
        Retry { inner, policy: self.policy.clone() }
    }
}

/// A client that sends one operation as often as needed, under one key. Made by [`RetryLayer`].
#[derive(Clone, Debug)]
pub struct Retry<S> {
    inner: S,
    policy: RetryPolicy,
}

impl<S, B, Answer> Service<Request<B>> for Retry<S>
where
    S: Service<Request<B>, Response = Response<Answer>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Into<BoxError>,
    B: Body<Data: Send, Error: Into<BoxError>> + From<Bytes> + Send + 'static,
    Answer: Body<Data: Send, Error: Into<BoxError> + Send> + Send + 'static,
{
    type Response = Response<ResponseBody<Answer>>;
    type Error = ClientError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, ClientError>> + Send>>;

    /// Always ready: each try waits for the inner service itself.
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), ClientError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let Self { inner, policy } = self.clone();
        Box::pin(async move {
            let (mut head, body) = request.into_parts();
            let is_given = head.headers.contains_key(&policy.key_header);
            let key =
                key::settle(&head.method, &mut head.headers, &policy.key_header, policy.keys)?;
            let body = whole_body(body, key.as_ref().filter(|_| is_given)).await?;
            let operation = Operation { key, method: head.method.clone() };
            let tries = Tries { inner, head, body, policy: &policy, as_body: PhantomData };
            run(&policy, operation, tries).await
        })
    }
}

/// The same request, as often as it is wanted.
struct Tries<'a, S, B> {
    inner: S,
    head: Parts,
    body: Bytes,
    policy: &'a RetryPolicy,
    as_body: PhantomData<fn() -> B>,
}

impl<S, B, Answer> Sender for Tries<'_, S, B>
where
    S: Service<Request<B>, Response = Response<Answer>> + Send,
    S::Future: Send,
    S::Error: Into<BoxError>,
    B: From<Bytes> + Send,
    Answer: Body<Data: Send, Error: Into<BoxError> + Send> + Send,
{
    type Body = Answer;

    async fn send(&mut self) -> Result<Response<Answer>, SendError> {
        if let Err(error) = poll_fn(|cx| self.inner.poll_ready(cx)).await {
            return Err(SendError { sent: Sent::Nothing, source: error.into() });
        }
        let request = Request::from_parts(self.head.clone(), B::from(self.body.clone()));
        let sent = self.inner.call(request).await;
        sent.map_err(|error| SendError::judged(error.into(), self.policy))
    }
}
