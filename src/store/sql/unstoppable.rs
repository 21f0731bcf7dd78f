//! Work that is done even if nobody waits for it any more.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures_util::future::BoxFuture;

/// Runs where it is awaited, which costs no task; dropped on its way, it goes on in a task of its own. A
/// statement that is dropped half way leaves a connection of which nobody knows what it will say next.
pub(super) struct Unstoppable<T, G: FnOnce(BoxFuture<'static, T>) + Unpin> {
    /// None when it is done, and while it is polled: what panics does not go on.
    work: Option<BoxFuture<'static, T>>,
    go_on: Option<G>,
}

impl<T, G: FnOnce(BoxFuture<'static, T>) + Unpin> Unstoppable<T, G> {
    /// `go_on` makes a task of what is left; it is called within a runtime.
    pub(super) fn new(work: impl Future<Output = T> + Send + 'static, go_on: G) -> Self {
        Self { work: Some(Box::pin(work)), go_on: Some(go_on) }
    }
}

impl<T, G: FnOnce(BoxFuture<'static, T>) + Unpin> Future for Unstoppable<T, G> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let Some(mut work) = self.work.take() else { return Poll::Pending };
        let polled = work.as_mut().poll(context);
        if polled.is_pending() {
            self.work = Some(work);
        }
        polled
    }
}

impl<T, G: FnOnce(BoxFuture<'static, T>) + Unpin> Drop for Unstoppable<T, G> {
    fn drop(&mut self) {
        if let (Some(work), Some(go_on)) = (self.work.take(), self.go_on.take())
            && tokio::runtime::Handle::try_current().is_ok()
        {
            go_on(work);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use futures_util::FutureExt as _;
    use tokio::sync::{Notify, oneshot};

    use super::*;

    #[tokio::test]
    async fn what_is_dropped_on_its_way_goes_on() {
        let (tell, told) = oneshot::channel();
        let wait = Arc::new(Notify::new());
        let go = Arc::clone(&wait);
        let work = async move {
            wait.notified().await;
            let _ = tell.send(7);
        };
        let mut work = Unstoppable::new(work, |work| drop(tokio::spawn(work)));
        assert!((&mut work).now_or_never().is_none());
        drop(work);
        go.notify_one();
        assert_eq!(told.await, Ok(7));
    }

    #[tokio::test]
    async fn what_is_done_or_has_panicked_does_not_go_on() {
        let go_on = |_: BoxFuture<'static, i32>| panic!("there is nothing left");
        assert_eq!(Unstoppable::new(async { 7 }, go_on).await, 7);
        let panics = Unstoppable::new(async { panic!("on its way") }, go_on);
        let panicked = tokio::spawn(tokio::time::timeout(Duration::from_secs(5), panics)).await;
        assert!(panicked.unwrap_err().is_panic());
    }
}
