//! A request that is worked on where it is waited for, and in a task of its own once its client has left.
//!
//! Servers drop the future of a request when the client leaves. Its work must not end with that, and what waits for
//! nobody's sake has to know it.

use std::future::{Future, poll_fn};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;

use futures_util::FutureExt as _;

use crate::mistakes::{Mistake, made};
use crate::unstoppable::Unstoppable;

/// Says that whoever asked has left.
#[derive(Clone, Debug, Default)]
pub(super) struct Departure(Arc<AtomicBool>);

impl Departure {
    /// Completes once whoever asked has left. It needs no waker: the whole work is polled again at that moment,
    /// by its task.
    pub(super) async fn seen(&self) {
        let seen = || self.0.load(Ordering::Acquire);
        poll_fn(|_| if seen() { Poll::Ready(()) } else { Poll::Pending }).await;
    }

    fn happens(&self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Work that goes on when nobody waits for it any more, and is told so. It gives `None` if it panicked, as a task
/// does: that ends neither the connection nor what else it carries.
pub(super) fn attended<W, F>(work: W) -> impl Future<Output = Option<F::Output>> + Send + use<W, F>
where
    W: FnOnce(Departure) -> F,
    F: Future<Output: Send> + Send + 'static,
{
    let departure = Departure::default();
    let work = AssertUnwindSafe(work(departure.clone())).catch_unwind();
    let work = work.map(Result::ok);
    Unstoppable::new(work, move |work| {
        departure.happens();
        if !made(Mistake::RunsInConnection) {
            // Nobody joins it: it is counted among the running ones by what it carries.
            drop(tokio::spawn(work));
        }
    })
}

#[cfg(test)]
mod tests {
    use futures_util::poll;
    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn work_that_is_waited_for_gives_what_it_came_to() {
        assert_eq!(attended(|_| async { 7 }).await, Some(7));
    }

    #[tokio::test]
    async fn work_that_nobody_waits_for_any_more_goes_on_and_knows_it() {
        let (tell, told) = oneshot::channel();
        let mut work = Box::pin(attended(|departure| async move {
            departure.seen().await;
            tell.send(()).unwrap();
        }));
        assert!(poll!(work.as_mut()).is_pending());
        drop(work);
        told.await.unwrap();
    }

    #[tokio::test]
    async fn a_panic_ends_the_work_and_not_who_waits_for_it() {
        let panics = |_| async { panic!("as it is meant to be") };
        assert_eq!(attended(panics).await, None::<()>);
    }
}
