//! Looking where the primary is between connections.
//!
//! A server that Sentinels have given up may go on serving whoever is connected to it: they tell it so when they get
//! to it, which takes ten seconds and more, and never if they cannot. What it is told until then is lost. So they
//! are asked all the time, and its connections are left as soon as one of them knows better.

use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::sleep;

use super::sentinel::Kept;

/// How often they are asked: two small questions each, and no more of a failover is lost than this.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// How long a look may take: far beyond what a healthy Sentinel takes, and one that hangs delays the next look
/// no further.
pub(super) const LOOK_WITHIN: Duration = Duration::from_millis(500);

/// An older decision than one heard of before is believed when most Sentinels have told it so often in a row. They
/// hear of each other's decisions within two seconds; later than that the one with the higher number has gone,
/// as when all of them are set up anew.
const LOOKS_AT_OLDER: u32 = 10;

/// Who can look.
pub(super) trait Follows: Send + Sync + 'static {
    /// True while somebody looks.
    fn following(&self) -> &AtomicBool;

    /// Looks once.
    fn look(&self, sight: &mut Sight) -> impl Future<Output = ()> + Send;
}

/// What is kept from one look to the next.
#[derive(Default)]
pub(super) struct Sight {
    pub(super) kept: Kept,
    older: u32,
}

impl Sight {
    /// Whether to believe what was seen: as late a decision as the one known before, or a later one; and whether most
    /// Sentinels have answered.
    pub(super) fn believes(&mut self, later: bool, most: bool) -> bool {
        self.older = if later || !most { 0 } else { self.older + 1 };
        later || self.older >= LOOKS_AT_OLDER
    }
}

/// Looks as long as somebody else has `follower` as well, unless that is done already.
pub(super) fn begin<F: Follows>(follower: &Arc<F>) {
    if follower.following().swap(true, Ordering::Relaxed) {
        return;
    }
    let looking = Looking(Arc::downgrade(follower));
    // Nobody joins it: it ends with its follower or with the runtime, and then the next connection begins it anew.
    tokio::spawn(async move {
        let mut sight = Sight::default();
        loop {
            sleep(LOOK_EVERY).await;
            let Some(follower) = looking.0.upgrade() else { return };
            follower.look(&mut sight).await;
        }
    });
}

struct Looking<F: Follows>(Weak<F>);

impl<F: Follows> Drop for Looking<F> {
    fn drop(&mut self) {
        if let Some(follower) = self.0.upgrade() {
            follower.following().store(false, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[derive(Default)]
    struct Lookout {
        following: AtomicBool,
        looks: AtomicUsize,
    }

    impl Follows for Lookout {
        fn following(&self) -> &AtomicBool {
            &self.following
        }

        async fn look(&self, _: &mut Sight) {
            self.looks.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn one_looks_however_many_connections_are_made_and_nobody_when_none_is_left() {
        let lookout = Arc::new(Lookout::default());
        (0..3).for_each(|_| begin(&lookout));
        sleep(LOOK_EVERY * 10 + LOOK_EVERY / 2).await;
        assert_eq!(lookout.looks.load(Ordering::Relaxed), 10);
        let left = Arc::downgrade(&lookout);
        drop(lookout);
        sleep(LOOK_EVERY).await;
        assert!(left.upgrade().is_none(), "it is not kept alive for its own sake");
    }

    #[test]
    fn a_later_decision_is_believed_at_once_and_an_older_one_when_most_keep_to_it() {
        let mut sight = Sight::default();
        assert!(sight.believes(true, false), "whoever knows it has it from most of them");
        for _ in 1..LOOKS_AT_OLDER {
            assert!(!sight.believes(false, true));
        }
        assert!(sight.believes(false, true));
        let mut sight = Sight::default();
        for _ in 0..3 * LOOKS_AT_OLDER {
            assert!(!sight.believes(false, false), "few are no reason");
        }
    }
}
