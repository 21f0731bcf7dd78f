//! What the client tells of its work. Never a key, never a body.

use std::time::Duration;

/// Makes the series known; called when a client is made.
pub(super) fn describe() {
    metrics::describe_counter!(
        "idempotency.client.operations",
        "Operations of the retrying client by how they ended"
    );
    metrics::describe_counter!(
        "idempotency.client.retries",
        "Tries after the first one, by what made them necessary"
    );
}

pub(super) fn ended(outcome: &'static str) {
    metrics::counter!("idempotency.client.operations", "outcome" => outcome).increment(1);
}

pub(super) fn again(reason: &'static str, tries: u32, pause: Duration) {
    metrics::counter!("idempotency.client.retries", "reason" => reason).increment(1);
    let pause_ms = u64::try_from(pause.as_millis()).unwrap_or(u64::MAX);
    tracing::debug!(reason, tries, pause_ms, "operation is tried again");
}
