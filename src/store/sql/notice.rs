//! What the server says beside its replies.
//!
//! A COMMIT waits for a synchronous standby. If somebody cancels the wait (`pg_cancel_backend`, a limit),
//! PostgreSQL commits on the primary alone and answers with success and a WARNING: a failover would lose
//! what was acknowledged. The driver keeps no notices; it only logs them. So its log is listened to while
//! a COMMIT is on its way, in whatever language the server speaks: the level is enough.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::pin;
use std::sync::LazyLock;

use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::Interest;
use tracing::{Dispatch, Event, Level, Metadata, Subscriber, dispatcher};

/// The target of the driver's events for notices.
const TARGET: &str = "sqlx::postgres::notice";

/// One for all: making one has every call site of the program asked anew.
///
/// And a second one that nobody uses. As long as a program has one subscriber, `tracing` asks only the one
/// of the thread that comes to a call site first, and where that has none the site is off for good.
static LISTENERS: LazyLock<[Dispatch; 2]> =
    LazyLock::new(|| [Dispatch::new(Listener), Dispatch::new(Listener)]);

thread_local! {
    /// A warning was heard on this thread.
    static HEARD: Cell<bool> = const { Cell::new(false) };
    /// Who listens otherwise, and is told everything.
    static OTHERS: RefCell<Option<Dispatch>> = const { RefCell::new(None) };
}

/// Asks for nothing but the driver's warnings.
struct Listener;

fn others<T>(tell: impl FnOnce(&Dispatch) -> T) -> Option<T> {
    OTHERS.with_borrow(|others| others.as_ref().map(tell))
}

fn is_warning(metadata: &Metadata<'_>) -> bool {
    metadata.target() == TARGET && *metadata.level() <= Level::WARN
}

impl Subscriber for Listener {
    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        match is_warning(metadata) {
            true => Interest::always(),
            false => Interest::never(),
        }
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        is_warning(metadata)
            || (metadata.is_event() && others(|others| others.enabled(metadata)) == Some(true))
    }

    fn max_level_hint(&self) -> Option<tracing::level_filters::LevelFilter> {
        Some(tracing::level_filters::LevelFilter::WARN)
    }

    fn event(&self, event: &Event<'_>) {
        if is_warning(event.metadata()) {
            HEARD.set(true);
        }
        others(|others| {
            if others.enabled(event.metadata()) {
                others.event(event);
            }
        });
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// Runs some work of the driver; true with its result if the server warned meanwhile.
pub(super) async fn watched<T>(work: impl Future<Output = T>) -> (T, bool) {
    let mut work = pin!(work);
    let [listener, _] = &*LISTENERS;
    let mut warned = false;
    let done = std::future::poll_fn(|context| {
        HEARD.set(false);
        OTHERS.set(Some(dispatcher::get_default(Dispatch::clone)));
        let polled = dispatcher::with_default(listener, || work.as_mut().poll(context));
        OTHERS.set(None);
        warned |= HEARD.replace(false);
        polled
    });
    let done = done.await;
    (done, warned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_warning_of_the_server_is_heard_and_nothing_else_is() {
        let say = async |warn: bool| {
            tokio::task::yield_now().await;
            tracing::info!(target: "sqlx::postgres::notice", "a notice");
            tracing::warn!(target: "sqlx::query", "slow");
            if warn {
                tracing::warn!(target: "sqlx::postgres::notice", "canceling wait");
            }
            tokio::task::yield_now().await;
        };
        assert!(!watched(say(false)).await.1);
        assert!(watched(say(true)).await.1);
        say(true).await;
        assert!(!watched(say(false)).await.1, "what was said before is not what was asked for");
    }

    #[tokio::test]
    async fn a_call_site_that_was_met_without_a_listener_is_heard_later() {
        let ((), _) = watched(async {}).await;
        let warn = || tracing::warn!(target: "sqlx::postgres::notice", "canceling wait");
        warn();
        assert!(watched(async { warn() }).await.1);
    }
}
