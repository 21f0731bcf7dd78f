//! One server: a shared connection for most calls, and lanes for those that wait for replicas.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::lanes::Lanes;
use super::shared::{Asked, Shared};
use super::{DialError, Dialer, Message, Urgency};

pub(in crate::store::redis) struct Node {
    shared: Shared,
    lanes: Lanes,
}

impl Node {
    /// Connects, so that an address where nobody is shows at the start of the program. `waits`: there will be calls that
    /// wait for replicas.
    pub(in crate::store::redis) async fn connect(
        dialer: Dialer,
        call_timeout: Duration,
        waits: bool,
    ) -> Result<Self, DialError> {
        let node = Self::lazy(dialer, call_timeout);
        node.shared.begin().await?;
        if waits {
            // Silent Sentinels hold a connection up for longer than a call has time for.
            node.lanes.begin().await?;
        }
        Ok(node)
    }

    /// Connects when there is something to send.
    pub(super) fn lazy(dialer: Dialer, call_timeout: Duration) -> Self {
        let dialer = Arc::new(dialer);
        Self {
            shared: Shared::lazy_and_watching(Arc::clone(&dialer), call_timeout),
            lanes: Lanes::new(dialer, call_timeout),
        }
    }

    pub(super) fn call_timeout(&self) -> Duration {
        self.shared.call_timeout()
    }

    pub(super) fn run<'a>(&'a self, message: Message<'a>, urgency: Urgency) -> Asked<'a> {
        self.run_from(message, urgency, Instant::now())
    }

    /// The same for a message that is sent now, as the caller knows.
    pub(super) fn run_from<'a>(
        &'a self,
        message: Message<'a>,
        urgency: Urgency,
        now: Instant,
    ) -> Asked<'a> {
        match message.waits() {
            true => Asked::boxed(self.lanes.run(message, urgency)),
            false => self.shared.run_from(message, now),
        }
    }
}
