//! What became of a COMMIT: sent once, and asked after until it is known.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use super::session::{ANSWER_WITHIN, ASK_PAUSE_MAX, COMMIT_SILENT, Session, bounded};
use super::transactional::{Core, Ended};
use super::tx::Open;
use super::{Backend, Lock, Row, Weight, step, weigh};
use crate::record::{
    self, Claim, ClaimOutcome, CompleteOutcome, Completion, Effects, OnExpired, Owner,
};
use crate::scope::StorageKey;
use crate::token::HolderId;

/// The first pause between two questions, when the line is closed.
const FIRST_PAUSE: Duration = Duration::from_millis(100);

impl<DB: Backend> Core<DB> {
    /// Sends the COMMIT. While it is not answered, it is asked on other connections what became of it,
    /// for as long as that takes: an answer that nobody heard is no answer, and a line that is silent may
    /// stay so for ever.
    pub(super) async fn commit(
        &self,
        open: Open<DB>,
        key: StorageKey,
        owner: &Owner,
        completion: &Completion,
    ) -> Ended {
        // The seat and the turn are held until it is known. A backend that goes on with a COMMIT of which
        // the line is closed is one more at the server, and so there are never more than turns.
        let Some((mut session, _held)) = open.into_parts() else { return Ended::Again };
        let mut pause = COMMIT_SILENT;
        let answered = {
            let mut committing = std::pin::pin!(session.commit());
            let began = Instant::now();
            loop {
                let Some(patience) = self.shared().texts.patience else {
                    break Ok(committing.await);
                };
                if let Ok(done) = timeout(pause, committing.as_mut()).await {
                    break Ok(done);
                }
                let found = Box::pin(self.find_out(key, owner, completion)).await;
                if found.is_some() || began.elapsed() > patience {
                    break Err(found);
                }
                pause = (pause * 2).min(ASK_PAUSE_MAX);
            }
        };
        match answered {
            Ok(Ok(())) => {
                self.shared().line.hand_on(session);
                return Ended::Told(CompleteOutcome::Stored);
            }
            Ok(Err(error)) => match weigh::<DB>(&error) {
                Weight::Lost => {
                    tracing::warn!(key = %key.in_logs(), %error, "COMMIT was not answered")
                }
                // A deferred constraint: who runs again may find that the other one was there first.
                Weight::Constraint => return Ended::Again,
                Weight::Conflict
                | Weight::Locked
                | Weight::Unreached
                | Weight::Full
                | Weight::Refused => return self.undone_by(key, &error),
            },
            Err(found) => {
                tracing::warn!(key = %key.in_logs(), "COMMIT was not answered");
                session.close();
                if let Some(ended) = found {
                    return ended;
                }
            }
        }
        let _adrift = Adrift::of(&self.shared().adrift);
        let mut pause = FIRST_PAUSE;
        loop {
            if let Some(ended) = Box::pin(self.find_out(key, owner, completion)).await {
                return ended;
            }
            sleep(pause).await;
            pause = (pause * 2).min(ASK_PAUSE_MAX);
        }
    }

    /// COMMIT was sent and not answered: claims again, on another connection. The row is the witness:
    /// it is there, or the claim gets the key, or it waits for a COMMIT that is still going on. None if
    /// that cannot be said yet.
    async fn find_out(
        &self,
        key: StorageKey,
        owner: &Owner,
        completion: &Completion,
    ) -> Option<Ended> {
        match self.ask(key, owner, completion).await {
            Ok(ended) => Some(ended),
            Err(error) => {
                tracing::debug!(key = %key.in_logs(), %error, "it is not known yet whether a COMMIT was done");
                None
            }
        }
    }

    async fn ask(
        &self,
        key: StorageKey,
        owner: &Owner,
        completion: &Completion,
    ) -> sqlx::Result<Ended> {
        let probe = Claim {
            holder: HolderId::random(),
            fingerprints: owner.fingerprints,
            terms: completion.terms,
            on_expired: OnExpired::Refuse,
            effects: Effects::Anywhere,
        };
        let mut session = Session::begin(self.pool(), self.shared().texts.begin.clone()).await?;
        let verb = |current, now| record::claim(current, now, &probe);
        let found = step::<DB, _>(session.connection()?, key, &verb);
        let found = bounded::<DB, _>(ANSWER_WITHIN, found).await;
        let ended = match session.seen(found)? {
            ClaimOutcome::Completed(found) => {
                confirm(&mut session, key).await?;
                return Ok(Ended::Told(match found == completion.response {
                    true => CompleteOutcome::Stored,
                    false => CompleteOutcome::Superseded(found),
                }));
            }
            ClaimOutcome::Acquired(_) => Ended::Again,
            ClaimOutcome::Mismatch => Ended::Told(CompleteOutcome::Mismatch),
            ClaimOutcome::Unreadable => Ended::Told(CompleteOutcome::Unreadable),
            ClaimOutcome::InFlight { .. } | ClaimOutcome::Indeterminate(_) => {
                Ended::Told(CompleteOutcome::Lost)
            }
        };
        session.rollback().await;
        Ok(ended)
    }
}

/// Makes sure that what was read is where a COMMIT has to bring it. A record may be visible whose COMMIT
/// was kept from waiting for its standby; a later COMMIT that has waited has waited for that one too.
async fn confirm<DB: Backend>(session: &mut Session<DB>, key: StorageKey) -> sqlx::Result<()> {
    if !DB::REMOTE {
        session.rollback().await;
        return Ok(());
    }
    let written = async {
        let connection = session.connection()?;
        let row = DB::look(connection, key, Lock::None).await?.row;
        let (record, _) = row.ok_or(sqlx::Error::RowNotFound)?;
        let state = record.get(1).copied().map_or(0, i16::from);
        let row = Row { key, state, record, expires: None };
        DB::update(connection, row).await?;
        session.commit().await
    };
    let written = bounded::<DB, _>(ANSWER_WITHIN, written).await;
    session.seen(written)
}

/// A COMMIT of which nobody knows.
struct Adrift<'a>(&'a AtomicUsize);

impl<'a> Adrift<'a> {
    fn of(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::AcqRel);
        Self(count)
    }
}

impl Drop for Adrift<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}
