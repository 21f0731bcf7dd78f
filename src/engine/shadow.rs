//! Shadow mode: the record is kept and judged as if the layer were in force, and nobody waits for it.

use std::sync::Arc;

use tokio::sync::oneshot;
use tracing::Instrument as _;

use super::{Call, Engine, Ran, Run, Settle};
use crate::record::Verdict;

impl Engine {
    /// Judges a request whose handler runs elsewhere, unprotected; `outcome` brings what it came to.
    /// If it brings nothing, the handler was dropped with its client.
    pub(crate) fn watch(&self, call: Call, outcome: oneshot::Receiver<Settle>) {
        let engine = self.clone();
        let mut outcome = Some(outcome);
        let task = async move {
            let run = move |_: Run| {
                let outcome = outcome.take();
                async move {
                    let brought = match outcome {
                        Some(outcome) => outcome.await.ok(),
                        None => None,
                    };
                    let settle = brought.unwrap_or(Settle::Release(Verdict::NoEffect));
                    Ran { settle, reply: () }
                }
            };
            // What it concludes is counted on the way, and concerns nobody else.
            let _ = engine.execute(Arc::new(call), run).await;
        };
        self.0.tracker.spawn(task.in_current_span());
    }
}
