//! The ledger as one request writes it: in the store's transaction where there is one, so that its
//! effect and its answer have one fate; else by statements of their own.

use axum::extract::FromRequestParts;
use http::request::Parts;
use sqlx::sqlite::SqlitePool;
use sqlx::{Postgres, Sqlite, Transaction};
use tower_idempotency::store::sql::{NoTx, Tx, sqlx};

use crate::answer::ApiError;
use crate::app::App;
use crate::ledger::{
    Cause, Database, Deduplicate, LedgerError, NewPayment, Payment, PaymentRow, Refund, RefundRow,
    Result, answered, begin, new_id, now_ms, payment, payment_columns, refund, refund_columns,
};

/// What a handler writes in.
#[derive(Debug)]
pub(crate) struct Books {
    way: Way,
    deduplicate: Deduplicate,
}

#[derive(Debug)]
enum Way {
    /// Each write is one statement, so a future dropped at any point leaves no transaction half open,
    /// and several processes can share the file.
    Sqlite(SqlitePool),
    SqliteTx(Tx<Sqlite>),
    PostgresTx(Tx<Postgres>),
    /// A request without a key.
    Postgres(Option<Transaction<'static, Postgres>>),
}

impl FromRequestParts<App> for Books {
    type Rejection = ApiError;

    async fn from_request_parts(
        parts: &mut Parts,
        app: &App,
    ) -> std::result::Result<Self, ApiError> {
        let deduplicate = app.ledger.deduplicate;
        let way = match &app.ledger.database {
            Database::Sqlite(pool) => match Tx::take(&parts.extensions) {
                Ok(tx) => Way::SqliteTx(tx),
                Err(NoTx::Missing) => Way::Sqlite(pool.clone()),
                Err(error) => return Err(ApiError::from(LedgerError::other(error))),
            },
            Database::Postgres(pool) => match Tx::take(&parts.extensions) {
                Ok(tx) => Way::PostgresTx(tx),
                Err(NoTx::Missing) => {
                    Way::Postgres(Some(begin(pool).await.map_err(LedgerError::from)?))
                }
                Err(error) => return Err(ApiError::from(LedgerError::other(error))),
            },
        };
        Ok(Self { way, deduplicate })
    }
}

/// Runs one query on whatever the request writes in.
macro_rules! write {
    ($books:expr, |$on:ident| $query:expr) => {
        match &mut $books.way {
            Way::Sqlite(pool) => {
                let $on = &*pool;
                $query.await?
            }
            Way::SqliteTx(tx) => {
                let $on = &mut *tx;
                $query.await?
            }
            Way::PostgresTx(tx) => {
                let $on = &mut *tx;
                $query.await?
            }
            Way::Postgres(Some(transaction)) => {
                let $on = &mut **transaction;
                answered($query).await?
            }
            Way::Postgres(None) => return Err(sqlx::Error::PoolClosed.into()),
        }
    };
}

impl Books {
    /// Sets the money aside that is charged next; or, where the processor deduplicates, leaves it at what an
    /// earlier attempt has set aside.
    pub(crate) async fn hold(&mut self, cause: &Cause, new: &NewPayment) -> Result<()> {
        self.enter("hold", &new_id("hold"), cause, new).await.map(drop)
    }

    /// Charges; or, where the processor deduplicates, finds what an earlier attempt charged.
    pub(crate) async fn charge(&mut self, cause: &Cause, new: &NewPayment) -> Result<Payment> {
        let id = new_id("pay");
        let row = if self.enter("charge", &id, cause, new).await? {
            self.payment_row(&cause.account, &id).await?
        } else {
            self.answer_again(cause).await?;
            let text =
                concat!("SELECT ", payment_columns!(), " FROM payments WHERE provider_key = $1");
            let key = &cause.provider_key;
            write!(self, |on| sqlx::query_as(text).bind(key).fetch_optional(on))
        };
        self.commit().await?;
        row.map(payment).ok_or_else(|| sqlx::Error::RowNotFound.into())
    }

    /// Enters what is done for the first time. False: the processor has done it already.
    async fn enter(
        &mut self,
        action: &str,
        id: &str,
        cause: &Cause,
        new: &NewPayment,
    ) -> Result<bool> {
        let (now, attempt) = (now_ms(), i64::from(cause.attempt));
        let deduplicate = self.deduplicate == Deduplicate::Yes;
        let text = "INSERT INTO ledger (at, action, account, key_id, provider_key, attempt,
                                        answered, payment, amount, currency, source, description)
                    SELECT $1, $12, $2, $3, $4, $5, $5, $6, $7, $8, $9, $10
                     WHERE NOT ($11 AND EXISTS (SELECT 1 FROM ledger WHERE provider_key = $4))";
        let entered = write!(self, |on| sqlx::query(text)
            .bind(now)
            .bind(&cause.account)
            .bind(&cause.key_id)
            .bind(&cause.provider_key)
            .bind(attempt)
            .bind(id)
            .bind(i64::from(new.amount))
            .bind(&new.currency)
            .bind(&new.source)
            .bind(&new.description)
            .bind(deduplicate)
            .bind(action)
            .execute(on)
            .map_ok_rows());
        Ok(entered == 1)
    }

    /// Refunds `amount`, or all that is left. `None`: there is no such payment, or less is left.
    pub(crate) async fn refund(
        &mut self,
        cause: &Cause,
        id: &str,
        amount: Option<u32>,
    ) -> Result<Option<Refund>> {
        self.lock(id).await?;
        let (now, attempt) = (now_ms(), i64::from(cause.attempt));
        let deduplicate = self.deduplicate == Deduplicate::Yes;
        let (refund_id, amount) = (new_id("re"), amount.map(i64::from));
        let text = concat!(
            "INSERT INTO ledger (at, action, account, key_id, provider_key, attempt, answered,
                                 payment, refund, amount, currency)
             SELECT $1, 'refund', account, $3, $4, $5, $5,
                    payment, $7, COALESCE($8, amount - refunded), currency
               FROM payments
              WHERE payment = $6 AND account = $2 AND NOT voided
                AND COALESCE($8, amount - refunded) BETWEEN 1 AND amount - refunded
                AND NOT ($9 AND EXISTS (SELECT 1 FROM ledger WHERE provider_key = $4))
             RETURNING ",
            refund_columns!()
        );
        let rows: Vec<RefundRow> = write!(self, |on| sqlx::query_as(text)
            .bind(now)
            .bind(&cause.account)
            .bind(&cause.key_id)
            .bind(&cause.provider_key)
            .bind(attempt)
            .bind(id)
            .bind(&refund_id)
            .bind(amount)
            .bind(deduplicate)
            .fetch_all(on));
        let row = match rows.into_iter().next() {
            Some(row) => Some(row),
            None if self.answer_again(cause).await? => {
                let text = concat!(
                    "SELECT ",
                    refund_columns!(),
                    " FROM ledger WHERE provider_key = $1 AND action = 'refund'"
                );
                let key = &cause.provider_key;
                write!(self, |on| sqlx::query_as(text).bind(key).fetch_optional(on))
            }
            None => None,
        };
        if row.is_some() {
            self.commit().await?;
        }
        Ok(row.map(refund))
    }

    /// Voids a payment of which nothing was refunded. `None`: there is none that can be voided.
    pub(crate) async fn void(&mut self, cause: &Cause, id: &str) -> Result<Option<Payment>> {
        self.lock(id).await?;
        let (now, attempt) = (now_ms(), i64::from(cause.attempt));
        let text = "INSERT INTO ledger (at, action, account, key_id, provider_key, attempt,
                                        answered, payment, amount, currency)
                    SELECT $1, 'void', account, $3, $4, $5, $5, payment, amount, currency
                      FROM payments
                     WHERE payment = $6 AND account = $2 AND NOT voided AND refunded = 0";
        let voided = write!(self, |on| sqlx::query(text)
            .bind(now)
            .bind(&cause.account)
            .bind(&cause.key_id)
            .bind(&cause.provider_key)
            .bind(attempt)
            .bind(id)
            .execute(on)
            .map_ok_rows());
        let row = if voided == 1 {
            self.payment_row(&cause.account, id).await?
        } else if self.answer_again(cause).await? {
            let text = concat!(
                "SELECT ",
                payment_columns!(),
                " FROM payments WHERE payment IN
                    (SELECT payment FROM ledger WHERE provider_key = $1 AND action = 'void')"
            );
            let key = &cause.provider_key;
            write!(self, |on| sqlx::query_as(text).bind(key).fetch_optional(on))
        } else {
            None
        };
        if row.is_some() {
            self.commit().await?;
        }
        Ok(row.map(payment))
    }

    /// A payment of this account, as this request sees it.
    pub(crate) async fn payment(&mut self, account: &str, id: &str) -> Result<Option<Payment>> {
        Ok(self.payment_row(account, id).await?.map(payment))
    }

    /// Keeps others from refunding or voiding the same payment meanwhile. SQLite has one writer anyway.
    async fn lock(&mut self, id: &str) -> Result<()> {
        let text = "SELECT seq FROM ledger WHERE payment = $1 AND action = 'charge' FOR UPDATE";
        match &mut self.way {
            Way::Sqlite(_) | Way::SqliteTx(_) | Way::Postgres(None) => {}
            Way::PostgresTx(tx) => {
                sqlx::query(text).bind(id).fetch_optional(&mut *tx).await?;
            }
            Way::Postgres(Some(transaction)) => {
                answered(sqlx::query(text).bind(id).fetch_optional(&mut **transaction)).await?;
            }
        }
        Ok(())
    }

    /// Notes that this attempt answers with what an earlier one did under the same provider key. False
    /// if the processor does not look for that.
    async fn answer_again(&mut self, cause: &Cause) -> Result<bool> {
        if self.deduplicate == Deduplicate::No || cause.provider_key.is_none() {
            return Ok(false);
        }
        let (key, attempt) = (&cause.provider_key, i64::from(cause.attempt));
        let text = "UPDATE ledger SET answered = $2 WHERE provider_key = $1";
        write!(self, |on| sqlx::query(text).bind(key).bind(attempt).execute(on).map_ok_rows());
        Ok(true)
    }

    async fn payment_row(&mut self, account: &str, id: &str) -> Result<Option<PaymentRow>> {
        let text = concat!(
            "SELECT ",
            payment_columns!(),
            " FROM payments WHERE payment = $1 AND account = $2"
        );
        Ok(write!(self, |on| sqlx::query_as(text).bind(id).bind(account).fetch_optional(on)))
    }

    /// Where nobody else commits.
    async fn commit(&mut self) -> Result<()> {
        if let Way::Postgres(transaction) = &mut self.way
            && let Some(transaction) = transaction.take()
        {
            answered(transaction.commit()).await?;
        }
        Ok(())
    }
}

/// How many rows a statement wrote, of either database.
trait Rows {
    fn rows(&self) -> u64;
}

impl Rows for sqlx::sqlite::SqliteQueryResult {
    fn rows(&self) -> u64 {
        self.rows_affected()
    }
}

impl Rows for sqlx::postgres::PgQueryResult {
    fn rows(&self) -> u64 {
        self.rows_affected()
    }
}

trait RowsLater<R>: Sized {
    async fn map_ok_rows(self) -> sqlx::Result<u64>;
}

impl<R: Rows, F: Future<Output = sqlx::Result<R>>> RowsLater<R> for F {
    async fn map_ok_rows(self) -> sqlx::Result<u64> {
        Ok(self.await?.rows())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::Ledger;

    /// The books of one request after the other.
    fn books(ledger: &Ledger) -> Books {
        let Database::Sqlite(pool) = &ledger.database else { panic!("a file") };
        Books { way: Way::Sqlite(pool.clone()), deduplicate: ledger.deduplicate }
    }

    fn cause(account: &str, provider_key: &str, attempt: u32) -> Cause {
        let provider_key = Some(provider_key.to_owned());
        Cause { account: account.to_owned(), key_id: String::new(), provider_key, attempt }
    }

    fn new(amount: u32) -> NewPayment {
        let (currency, source) = ("usd".to_owned(), "tok_visa".to_owned());
        NewPayment { amount, currency, source, description: None }
    }

    async fn actions(ledger: &Ledger) -> Vec<String> {
        ledger.entries().await.unwrap().into_iter().map(|entry| entry.action).collect()
    }

    #[tokio::test]
    async fn a_ledger_that_does_not_deduplicate_shows_both_charges() {
        let dir = tempfile::tempdir().unwrap();
        let ledger = Ledger::open(&dir.path().join("l.db"), Deduplicate::No).await.unwrap();
        let first = books(&ledger).charge(&cause("acme", "p", 1), &new(5)).await.unwrap();
        let second = books(&ledger).charge(&cause("acme", "p", 2), &new(5)).await.unwrap();
        assert_ne!(first.id, second.id);
        assert_eq!(actions(&ledger).await, ["charge", "charge"]);
        assert_eq!(ledger.payments("acme", 1).await.unwrap().1, 2);
        assert_eq!(ledger.payments("other", 1).await.unwrap().1, 0);
    }

    #[tokio::test]
    async fn a_processor_that_deduplicates_finds_the_earlier_effect() {
        let dir = tempfile::tempdir().unwrap();
        let ledger = Ledger::open(&dir.path().join("l.db"), Deduplicate::Yes).await.unwrap();
        let first = books(&ledger).charge(&cause("acme", "c", 1), &new(5)).await.unwrap();
        let again = books(&ledger).charge(&cause("acme", "c", 2), &new(5)).await.unwrap();
        assert_eq!((first.id.as_str(), again.attempt), (again.id.as_str(), 2));
        for attempt in [1, 2] {
            let cause = cause("acme", "r", attempt);
            let refund = books(&ledger).refund(&cause, &first.id, None).await.unwrap().unwrap();
            assert_eq!((refund.amount, refund.attempt), (5, attempt));
        }
        for attempt in [1, 2] {
            books(&ledger).hold(&cause("acme", "h", attempt), &new(5)).await.unwrap();
        }
        let other = books(&ledger).charge(&cause("acme", "d", 1), &new(5)).await.unwrap();
        for attempt in [1, 2] {
            let voided =
                books(&ledger).void(&cause("acme", "v", attempt), &other.id).await.unwrap();
            assert_eq!(voided.unwrap().status, "voided");
        }
        assert_eq!(actions(&ledger).await, ["charge", "refund", "hold", "charge", "void"]);
    }

    #[tokio::test]
    async fn no_more_than_the_payment_is_refunded_and_never_by_another_account() {
        let dir = tempfile::tempdir().unwrap();
        let ledger = Ledger::open(&dir.path().join("l.db"), Deduplicate::No).await.unwrap();
        let id = books(&ledger).charge(&cause("acme", "c", 1), &new(5)).await.unwrap().id;
        let refund = async |account, amount| {
            books(&ledger)
                .refund(&cause(account, "r", 1), &id, amount)
                .await
                .unwrap()
                .map(|r| r.amount)
        };
        assert_eq!(refund("other", None).await, None);
        assert_eq!(refund("acme", Some(6)).await, None);
        assert_eq!(refund("acme", Some(2)).await, Some(2));
        assert_eq!(refund("acme", Some(4)).await, None);
        assert!(books(&ledger).void(&cause("acme", "v", 1), &id).await.unwrap().is_none());
        assert_eq!(refund("acme", None).await, Some(3));
        assert_eq!(refund("acme", None).await, None);
        assert_eq!(ledger.payment("acme", &id).await.unwrap().unwrap().status, "refunded");
        assert!(ledger.payment("other", &id).await.unwrap().is_none());
    }
}
