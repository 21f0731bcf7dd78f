//! The keeper: renews a lease for as long as its handler runs.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::time::{Instant, sleep_until};

use super::Engine;
use super::signal::Signal;
use super::wait::Owning;
use crate::config::Policy;
use crate::record::{RenewOutcome, Renewal};
use crate::store::Lease;

/// Renewed at a third: two renewals may be lost before the lease is.
const RENEWALS_PER_LEASE: u32 = 3;
/// A failed renewal is sent again this often within a lease.
const RETRIES_PER_LEASE: u32 = 12;
/// But not more often than this, however short the lease is.
const RETRY_MIN: Duration = Duration::from_millis(10);

/// A lease as this process sees it.
#[derive(Debug)]
pub(super) struct Kept<'a> {
    pub(super) engine: &'a Engine,
    pub(super) lease: &'a Lease,
    pub(super) policy: &'a Policy,
    /// From before the claim was sent, on the monotonic clock: the lease cannot end earlier than
    /// its length after this.
    pub(super) since: Instant,
    pub(super) lost: &'a Signal,
    pub(super) owning: &'a Owning,
    /// The run is being recorded: that the key is settled is what is wanted then.
    pub(super) settling: &'a AtomicBool,
}

impl Kept<'_> {
    /// Runs `work` and renews the lease meanwhile.
    ///
    /// A lease that is lost does not stop the work: only the handler knows where it can stop, and
    /// its signal is [`Execution::lease_lost`](crate::Execution::lease_lost).
    pub(super) async fn during<F: Future>(&self, mut work: Pin<&mut F>) -> F::Output {
        // A panic here (a subscriber's, a recorder's) must not take the handler with it.
        let keep = AssertUnwindSafe(self.keep()).catch_unwind();
        tokio::select! {
            biased;
            output = &mut work => return output,
            kept = keep => if kept.is_err() { self.lost.give() },
        }
        work.await
    }

    /// Renews until the lease belongs to somebody else.
    async fn keep(&self) {
        let length = self.policy.terms.lease;
        let renewal = Renewal { terms: self.policy.terms, checkpoint: None };
        let retry = (length / RETRIES_PER_LEASE).max(RETRY_MIN);
        let mut since = self.since;
        let mut next = since + length / RENEWALS_PER_LEASE;
        loop {
            sleep_until(next).await;
            self.engine.refresh_gauges();
            let sent = Instant::now();
            // In a box: most runs are over before, and it must not make the future of each larger.
            match Box::pin(self.engine.renew(self.lease, &renewal, self.policy)).await {
                Ok(RenewOutcome::Renewed) => {
                    since = sent;
                    self.owning.holds_until(since + length);
                    next = since + length / RENEWALS_PER_LEASE;
                }
                Ok(RenewOutcome::Restored) => {
                    tracing::warn!(
                        key = %self.lease.key().in_logs(),
                        "the store had lost a record in flight; it is restored"
                    );
                    since = sent;
                    self.owning.holds_until(since + length);
                    next = since + length / RENEWALS_PER_LEASE;
                }
                Ok(RenewOutcome::Lost | RenewOutcome::Unreadable) => {
                    if self.settling.load(Ordering::Relaxed) {
                        // Whether it was this run that settled it is for its recording to say.
                        return;
                    }
                    self.signal_lost("the lease is held by somebody else, or settled");
                    return;
                }
                Err(_) => {
                    if since.elapsed() >= length {
                        // Nobody may have taken it over yet, so renewing goes on.
                        self.signal_lost("the lease could not be renewed in time");
                    }
                    next = Instant::now() + retry;
                }
            }
        }
    }

    fn signal_lost(&self, reason: &'static str) {
        if !self.lost.is_given() {
            self.lost.give();
            super::observe::lease_lost();
            tracing::warn!(key = %self.lease.key().in_logs(), reason, "lease lost");
        }
    }
}
