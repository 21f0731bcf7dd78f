//! The response future: an enum, so that requests that are not covered box nothing.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use http::Response;

use super::body::ResponseBody;

type Boxed<B, E> =
    Pin<Box<dyn Future<Output = Result<Response<ResponseBody<B>>, E>> + Send + 'static>>;

pin_project_lite::pin_project! {
    /// The future of [`Idempotency`](super::Idempotency).
    ///
    /// Dropping it, as a server does when the client leaves, does not stop a handler that was
    /// started under a key.
    pub struct ResponseFuture<F, B, E> {
        #[pin]
        kind: Kind<F, B, E>,
    }
}

pin_project_lite::pin_project! {
    #[project = KindProj]
    enum Kind<F, B, E> {
        PassedThrough { #[pin] future: F },
        Answered { response: Option<Response<ResponseBody<B>>> },
        Covered { future: Boxed<B, E> },
    }
}

impl<F, B, E> ResponseFuture<F, B, E> {
    pub(super) fn passed_through(future: F) -> Self {
        Self { kind: Kind::PassedThrough { future } }
    }

    pub(super) fn answered(response: Response<ResponseBody<B>>) -> Self {
        Self { kind: Kind::Answered { response: Some(response) } }
    }

    pub(super) fn covered(
        future: impl Future<Output = Result<Response<ResponseBody<B>>, E>> + Send + 'static,
    ) -> Self {
        Self { kind: Kind::Covered { future: Box::pin(future) } }
    }
}

impl<F, B, E> Future for ResponseFuture<F, B, E>
where
    F: Future<Output = Result<Response<B>, E>>,
{
    type Output = Result<Response<ResponseBody<B>>, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project().kind.project() {
            KindProj::PassedThrough { future } => {
                let response = ready!(future.poll(cx))?;
                Poll::Ready(Ok(response.map(ResponseBody::passed)))
            }
            KindProj::Answered { response } => {
                Poll::Ready(Ok(response.take().expect("a future is not polled after it is done")))
            }
            KindProj::Covered { future } => future.as_mut().poll(cx),
        }
    }
}

impl<F, B, E> fmt::Debug for ResponseFuture<F, B, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match &self.kind {
            Kind::PassedThrough { .. } => "passed through",
            Kind::Answered { .. } => "answered",
            Kind::Covered { .. } => "covered",
        };
        f.debug_struct("ResponseFuture").field("kind", &kind).finish_non_exhaustive()
    }
}
