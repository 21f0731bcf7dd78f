//! The memory of work that is done, for the work of the next request.
//!
//! A request's work is one future of a few kilobytes, which is more than allocators keep at hand: to ask for that much and give it
//! back took one in fifty of all instructions of a request.

use std::any::Any;
use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

/// How much memory for futures of one type a thread keeps at most: as many as a busy one has under way.
const KEPT: usize = 64;

/// How many types of futures a thread keeps memory for: a service has one or two.
const TYPES: usize = 8;

type Place<F> = Pin<Box<Option<F>>>;
type Shelf<F> = Vec<Place<F>>;

thread_local! {
    /// A [`Shelf`] of empty places for each type.
    static SHELVES: RefCell<Vec<Box<dyn Any>>> = const { RefCell::new(Vec::new()) };
}

/// A future in memory that may have been another one's.
#[derive(Debug)]
pub(super) struct Reused<F: Future + 'static>(Option<Place<F>>);

impl<F: Future + 'static> Reused<F> {
    pub(super) fn new(future: F) -> Self {
        match on_shelf(Shelf::<F>::pop).flatten() {
            Some(mut place) => {
                place.as_mut().set(Some(future));
                Self(Some(place))
            }
            None => Self(Some(Box::pin(Some(future)))),
        }
    }
}

impl<F: Future + 'static> Future for Reused<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let future = self.0.as_mut().and_then(|place| place.as_mut().as_pin_mut());
        future.expect("it is there until it is dropped").poll(context)
    }
}

impl<F: Future + 'static> Drop for Reused<F> {
    fn drop(&mut self) {
        let Some(mut place) = self.0.take() else { return };
        // Before the shelf is touched: what is in there may do anything when it is dropped.
        place.as_mut().set(None);
        on_shelf(|shelf| {
            if shelf.len() < KEPT {
                shelf.push(place);
            }
        });
    }
}

/// Does something with this thread's shelf for futures of this type. `None`: it has none, as it ends or has too many others.
fn on_shelf<F: 'static, R>(act: impl FnOnce(&mut Shelf<F>) -> R) -> Option<R> {
    let acted = SHELVES.try_with(|shelves| {
        let mut shelves = shelves.borrow_mut();
        let known = shelves.iter().position(|shelf| shelf.is::<Shelf<F>>());
        let at = known.unwrap_or(shelves.len());
        if at == TYPES {
            return None;
        }
        if known.is_none() {
            shelves.push(Box::new(Shelf::<F>::new()));
        }
        shelves[at].downcast_mut().map(act)
    });
    acted.ok().flatten()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::task::Waker;

    use super::*;

    async fn work(held: Arc<()>) -> usize {
        std::future::pending::<()>().await;
        Arc::strong_count(&held)
    }

    fn kept<F: 'static>(_: impl FnOnce(Arc<()>) -> F) -> Option<usize> {
        on_shelf(|shelf: &mut Shelf<F>| shelf.len())
    }

    fn poll<F: Future>(future: &mut Reused<F>) -> Poll<F::Output> {
        Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn what_is_dropped_is_gone_at_once_and_its_memory_is_used_again() {
        let held = Arc::new(());
        let mut first = Reused::new(work(Arc::clone(&held)));
        assert!(poll(&mut first).is_pending());
        assert_eq!((Arc::strong_count(&held), kept(work)), (2, Some(0)));
        drop(first);
        assert_eq!((Arc::strong_count(&held), kept(work)), (1, Some(1)));
        let mut second = Reused::new(work(Arc::clone(&held)));
        assert_eq!(kept(work), Some(0));
        assert!(poll(&mut second).is_pending(), "it begins anew");
    }

    #[test]
    fn each_type_has_its_own_and_a_thread_keeps_neither_many_nor_of_many_types() {
        let held = Arc::new(());
        let many: Vec<_> = (0..2 * KEPT).map(|_| Reused::new(work(Arc::clone(&held)))).collect();
        drop(many);
        assert_eq!((kept(work), Arc::strong_count(&held)), (Some(KEPT), 1));
        let other = |held: Arc<()>| async move { drop(held) };
        assert_eq!(poll(&mut Reused::new(other(Arc::clone(&held)))), Poll::Ready(()));
        assert_eq!((kept(other), kept(work)), (Some(1), Some(KEPT)));
        macro_rules! types {
            ($($number:literal)+) => {$(
                drop(Reused::new(std::future::ready([0_u8; $number])));
            )+};
        }
        types!(1 2 3 4 5 6 7 8 9);
        assert_eq!(SHELVES.with_borrow(Vec::len), TYPES);
    }
}
