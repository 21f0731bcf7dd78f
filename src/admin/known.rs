//! Where a record stands that nobody has to settle.

use std::fmt;

use http::StatusCode;

use super::operator::Shown;
use crate::record::State;
use crate::token::Attempt;

/// Where a record stands whose outcome is known, as [`OperatorError::NotUnknown`](super::OperatorError::NotUnknown)
/// tells it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum Known {
    /// There is an answer, of this status; none if the answer cannot be read here.
    Completed(Option<StatusCode>),
    /// This attempt was not applied, as its handler or an operator said: the next retry runs.
    Free(Attempt),
}

impl Known {
    /// None if it is unknown, or not known yet.
    pub(super) fn of(shown: &Shown) -> Option<Self> {
        let record = shown.record()?;
        match &record.state {
            State::Completed { .. } => {
                let response = shown.response().ok().flatten();
                Some(Self::Completed(response.map(|response| response.status())))
            }
            State::Open { .. } => Some(Self::Free(record.attempt)),
            State::InFlight { .. } | State::Indeterminate { .. } => None,
        }
    }
}

impl fmt::Display for Known {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Completed(Some(status)) => write!(f, "completed with {}", status.as_u16()),
            Self::Completed(None) => {
                f.write_str("completed, with an answer that cannot be read here")
            }
            Self::Free(attempt) => {
                let next = attempt.next().number();
                write!(
                    f,
                    "free (not applied), and the next retry runs the operation as attempt {next}"
                )
            }
        }
    }
}
