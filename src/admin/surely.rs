//! Changes whose replies may be lost.

use std::time::Duration;

use super::operator::OperatorError;
use crate::error::{StoreError, StoreErrorKind};

/// How often a change is sent again whose reply was lost. Each may run twice.
const SENDINGS: u32 = 4;
const BETWEEN_SENDINGS: Duration = Duration::from_millis(150);

/// Why there is no answer in the end.
pub(super) enum NotDone {
    Certainly(StoreError),
    Perhaps(StoreError),
}

impl NotDone {
    pub(super) fn into_cause(self) -> StoreError {
        match self {
            Self::Certainly(cause) | Self::Perhaps(cause) => cause,
        }
    }
}

impl From<NotDone> for OperatorError {
    fn from(not_done: NotDone) -> Self {
        match not_done {
            NotDone::Certainly(cause) => Self::Store(cause),
            NotDone::Perhaps(cause) => Self::Unconfirmed(cause),
        }
    }
}

/// Sends again what has no answer. True if it was sent more than once.
pub(super) async fn surely<'a, T, F>(send: F) -> Result<(T, bool), NotDone>
where
    F: Fn() -> crate::store::StoreFuture<'a, T>,
{
    let mut sent = 1;
    loop {
        match send().await {
            Ok(outcome) => return Ok((outcome, sent > 1)),
            Err(error) if error.kind() != StoreErrorKind::OutcomeUnknown && sent == 1 => {
                return Err(NotDone::Certainly(error));
            }
            Err(error) if sent >= SENDINGS => return Err(NotDone::Perhaps(error)),
            Err(_) => sent += 1,
        }
        tokio::time::sleep(BETWEEN_SENDINGS).await;
    }
}
