//! A turn of the runtime: how long a call that could be written waits for others to go out with it.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::Queue;

/// So many calls go out before the turn is over. Redis begins on them while the others are being made: were all of one turn
/// in one piece, the program and Redis would wait for each other in turns instead of working side by side (a tenth of the
/// throughput of 64 connections).
pub(super) const ENOUGH: usize = 16;

/// A task that lets the others which are ready go first, once, when something waits to be written; then it has it written.
///
/// The task that writes cannot do that itself: while it waited for its turn, nobody could call it earlier.
pub(super) struct Turn {
    queue: Arc<Queue>,
    /// The others had their turn since there was something to write.
    over: bool,
}

impl Turn {
    pub(super) fn of(queue: Arc<Queue>) -> Self {
        Self { queue, over: false }
    }
}

impl Future for Turn {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        self.queue.begun.register(context.waker());
        let next = self.queue.lock();
        let (ended, nothing) = (next.ended, next.bytes.is_empty());
        drop(next);
        if ended {
            return Poll::Ready(());
        }
        if nothing {
            // It has gone out already.
            self.over = false;
        } else if self.over {
            self.over = false;
            self.queue.due.wake();
        } else {
            self.over = true;
            context.waker().wake_by_ref();
        }
        Poll::Pending
    }
}
