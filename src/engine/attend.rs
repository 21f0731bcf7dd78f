//! A request's work, in a task of its own, and whoever waits for what it comes to.
//!
//! Servers drop the future of a request when its client leaves. Its work must not end with that, and must not hang
//! on how anybody polls it: leases have to be renewed, and handlers find no more or less around them when the client is gone.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio_util::task::TaskTracker;

use super::reuse::Reused;
use crate::mistakes::{Mistake, made};

/// Where one who waits leaves word that he left.
pub(super) trait Watched {
    /// Told once, when nobody waits any more.
    fn departure(&self) -> &Notify;
}

/// Waits for work. Dropped before its end, it leaves word and lets the work go on.
pub(super) struct Attendance<W: Watched, T> {
    watched: W,
    work: Option<Work<T>>,
}

enum Work<T> {
    Task(JoinHandle<T>),
    /// As it must not be: it ends with whoever waits for it.
    Here(Pin<Box<dyn Future<Output = T> + Send>>),
}

impl<W: Watched + Unpin, T: Send + 'static> Attendance<W, T> {
    /// Begins the work in a task that is counted by `tracker`.
    pub(super) fn begin(
        tracker: &TaskTracker,
        watched: W,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Self {
        // In a place of its own, since it is handed on a few times before it runs, and it is large.
        let work = Reused::new(work);
        let work = match made(Mistake::RunsInConnection) {
            true => Work::Here(Box::pin(work)),
            false => Work::Task(tracker.spawn(work)),
        };
        Self { watched, work: Some(work) }
    }
}

impl<W: Watched + Unpin, T> Future for Attendance<W, T> {
    /// `None` if the work panicked, or the runtime ended under it.
    type Output = Option<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<T>> {
        let polled = match &mut self.work {
            Some(Work::Task(task)) => Pin::new(task).poll(context).map(Result::ok),
            Some(Work::Here(work)) => work.as_mut().poll(context).map(Some),
            None => Poll::Ready(None),
        };
        if polled.is_ready() {
            self.work = None;
        }
        polled
    }
}

impl<W: Watched, T> Drop for Attendance<W, T> {
    fn drop(&mut self) {
        if self.work.is_some() {
            self.watched.departure().notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use futures_util::poll;
    use tokio::sync::oneshot;

    use super::*;

    impl Watched for Arc<Notify> {
        fn departure(&self) -> &Notify {
            self
        }
    }

    #[tokio::test]
    async fn work_that_is_waited_for_gives_what_it_came_to() {
        let (tracker, watched) = (TaskTracker::new(), Arc::new(Notify::new()));
        assert_eq!(Attendance::begin(&tracker, watched, async { 7 }).await, Some(7));
    }

    #[tokio::test]
    async fn work_that_nobody_waits_for_any_more_goes_on_and_is_told_so() {
        let (tracker, watched) = (TaskTracker::new(), Arc::new(Notify::new()));
        let (tell, told) = oneshot::channel();
        let left = Arc::clone(&watched);
        let mut attendance = Box::pin(Attendance::begin(&tracker, watched, async move {
            left.notified().await;
            tell.send(()).unwrap();
        }));
        assert!(poll!(attendance.as_mut()).is_pending());
        drop(attendance);
        told.await.unwrap();
    }

    #[tokio::test]
    async fn a_panic_ends_the_work_and_not_who_waits_for_it() {
        let (tracker, watched) = (TaskTracker::new(), Arc::new(Notify::new()));
        let panics = async { panic!("as it is meant to be") };
        assert_eq!(Attendance::begin(&tracker, watched, panics).await, None::<()>);
    }
}
