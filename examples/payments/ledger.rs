//! What really happened, as the card processor saw it: one table in SQLite, one row per effect.
//!
//! Nothing in it is unique by idempotency key, on purpose: if a payment were ever made twice, both
//! would stand here. A payment is a charge and the refunds and voids that name it. Every write is
//! **one statement**, so a future dropped at any point leaves no transaction half open, and
//! several processes can share the file.

use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::Serialize;
use sqlx::Row as _;
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteJournalMode, SqlitePool, SqlitePoolOptions, SqliteRow,
    SqliteSynchronous,
};

/// The ledger of the processor. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Ledger {
    /// SQLite has one writer at a time; within this process writers queue here and not at the file.
    writer: SqlitePool,
    reader: SqlitePool,
    deduplicate: Deduplicate,
}

/// Does the processor refuse to do one provider key twice?
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Deduplicate {
    Yes,
    No,
}

/// Who causes an effect, and on which attempt.
#[derive(Debug)]
pub(crate) struct Cause {
    pub(crate) account: String,
    /// Empty without an idempotency key.
    pub(crate) key_id: String,
    /// What the processor deduplicates by: the same for every attempt.
    pub(crate) provider_key: Option<String>,
    pub(crate) attempt: u32,
}

/// A payment to be made.
#[derive(Debug)]
pub(crate) struct NewPayment {
    pub(crate) amount: u32,
    pub(crate) currency: String,
    pub(crate) source: String,
    pub(crate) description: Option<String>,
}

/// A payment as the API shows it.
#[derive(Debug, Serialize)]
pub(crate) struct Payment {
    pub(crate) id: String,
    object: &'static str,
    account: String,
    amount: u32,
    currency: String,
    status: &'static str,
    source: String,
    /// Unix seconds.
    created: i64,
    /// The attempt that answered.
    attempt: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    description: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) padding: Option<String>,
}

impl Payment {
    pub(crate) fn is_refunded(&self) -> bool {
        self.status == "refunded"
    }

    pub(crate) fn is_voided(&self) -> bool {
        self.status == "voided"
    }
}

/// A refund as the API shows it.
#[derive(Debug, Serialize)]
pub(crate) struct Refund {
    id: String,
    object: &'static str,
    payment: String,
    account: String,
    amount: u32,
    currency: String,
    status: &'static str,
    created: i64,
    attempt: u32,
}

/// One effect, for tests that count.
#[derive(Debug, Serialize)]
pub(crate) struct Entry {
    account: String,
    key_id: String,
    pub(crate) action: String,
    amount: u32,
    attempt: u32,
    /// Unix milliseconds.
    at: i64,
}

/// The ledger could not be asked.
#[derive(Debug)]
pub(crate) struct LedgerError(sqlx::Error);

type Result<T> = std::result::Result<T, LedgerError>;

const SCHEMA: &str = "
    CREATE TABLE IF NOT EXISTS ledger (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        at INTEGER NOT NULL,
        action TEXT NOT NULL CHECK (action IN ('charge', 'refund', 'void')),
        account TEXT NOT NULL,
        key_id TEXT NOT NULL,
        provider_key TEXT,
        attempt INTEGER NOT NULL,       -- the attempt that did it
        answered INTEGER NOT NULL,      -- the last attempt that answered with it
        payment TEXT NOT NULL,
        refund TEXT,
        amount INTEGER NOT NULL,
        currency TEXT NOT NULL,
        source TEXT,
        description TEXT
    );
    CREATE INDEX IF NOT EXISTS ledger_by_payment ON ledger (payment, action);
    CREATE INDEX IF NOT EXISTS ledger_by_account ON ledger (account, action, seq);
    CREATE INDEX IF NOT EXISTS ledger_by_refund ON ledger (refund) WHERE refund IS NOT NULL;
    CREATE INDEX IF NOT EXISTS ledger_by_provider_key ON ledger (provider_key);
    CREATE VIEW IF NOT EXISTS payments AS
        SELECT charge.*,
               (SELECT COALESCE(SUM(r.amount), 0) FROM ledger r
                 WHERE r.payment = charge.payment AND r.action = 'refund') AS refunded,
               EXISTS (SELECT 1 FROM ledger v
                        WHERE v.payment = charge.payment AND v.action = 'void') AS voided
          FROM ledger charge WHERE charge.action = 'charge';
";

/// How long a write waits for the writers of other processes.
const BUSY: Duration = Duration::from_secs(5);

impl Ledger {
    /// Opens the file, and makes it if there is none.
    pub(crate) async fn open(path: &Path, deduplicate: Deduplicate) -> Result<Self> {
        let options = SqliteConnectOptions::new()
            .filename(path)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            // Survives the death of any process. A real ledger would survive a power cut: Full.
            .synchronous(SqliteSynchronous::Normal)
            .busy_timeout(BUSY);
        let pool = |connections| {
            SqlitePoolOptions::new().max_connections(connections).acquire_timeout(2 * BUSY)
        };
        let mut tries = 0;
        let writer = loop {
            // Several processes may make the file at the same time; SQLite lets one do it.
            match pool(1).connect_with(options.clone()).await.map_err(LedgerError) {
                Err(error) if error.untouched() && tries < 20 => tries += 1,
                opened => break opened?,
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        };
        sqlx::raw_sql(SCHEMA).execute(&writer).await?;
        let reader = pool(4).connect_with(options).await?;
        Ok(Self { writer, reader, deduplicate })
    }

    /// Closes the file.
    pub(crate) async fn close(&self) {
        self.reader.close().await;
        self.writer.close().await;
    }

    /// Charges; or, where the processor deduplicates, finds what an earlier attempt charged.
    pub(crate) async fn charge(&self, cause: &Cause, new: &NewPayment) -> Result<Payment> {
        let id = new_id("pay");
        let charged = sqlx::query(
            "INSERT INTO ledger (at, action, account, key_id, provider_key, attempt, answered,
                                 payment, amount, currency, source, description)
             SELECT ?1, 'charge', ?2, ?3, ?4, ?5, ?5, ?6, ?7, ?8, ?9, ?10
              WHERE NOT (?11 AND EXISTS (SELECT 1 FROM ledger WHERE provider_key = ?4))",
        )
        .bind(now_ms())
        .bind(&cause.account)
        .bind(&cause.key_id)
        .bind(&cause.provider_key)
        .bind(cause.attempt)
        .bind(&id)
        .bind(new.amount)
        .bind(&new.currency)
        .bind(&new.source)
        .bind(&new.description)
        .bind(self.deduplicate == Deduplicate::Yes)
        .execute(&self.writer)
        .await?;
        let row = if charged.rows_affected() == 1 {
            self.payment_row(&cause.account, &id).await?
        } else {
            self.answer_again(cause, "SELECT * FROM payments WHERE provider_key = ?1").await?
        };
        payment(&row.ok_or(sqlx::Error::RowNotFound)?)
    }

    /// Refunds `amount`, or all that is left. `None`: there is no such payment, or less is left.
    pub(crate) async fn refund(
        &self,
        cause: &Cause,
        id: &str,
        amount: Option<u32>,
    ) -> Result<Option<Refund>> {
        let refunded = sqlx::query(
            "INSERT INTO ledger (at, action, account, key_id, provider_key, attempt, answered,
                                 payment, refund, amount, currency)
             SELECT ?1, 'refund', account, ?3, ?4, ?5, ?5,
                    payment, ?7, COALESCE(?8, amount - refunded), currency
               FROM payments
              WHERE payment = ?6 AND account = ?2 AND NOT voided
                AND COALESCE(?8, amount - refunded) BETWEEN 1 AND amount - refunded
                AND NOT (?9 AND EXISTS (SELECT 1 FROM ledger WHERE provider_key = ?4))
             RETURNING *",
        )
        .bind(now_ms())
        .bind(&cause.account)
        .bind(&cause.key_id)
        .bind(&cause.provider_key)
        .bind(cause.attempt)
        .bind(id)
        .bind(new_id("re"))
        .bind(amount)
        .bind(self.deduplicate == Deduplicate::Yes)
        .fetch_all(&self.writer)
        .await?;
        let row = match refunded.into_iter().next() {
            Some(row) => Some(row),
            None => {
                let earlier = "SELECT * FROM ledger WHERE provider_key = ?1 AND action = 'refund'";
                self.answer_again(cause, earlier).await?
            }
        };
        row.as_ref().map(refund).transpose()
    }

    /// Voids a payment of which nothing was refunded. `None`: there is none that can be voided.
    pub(crate) async fn void(&self, cause: &Cause, id: &str) -> Result<Option<Payment>> {
        let voided = sqlx::query(
            "INSERT INTO ledger (at, action, account, key_id, provider_key, attempt, answered,
                                 payment, amount, currency)
             SELECT ?1, 'void', account, ?3, ?4, ?5, ?5, payment, amount, currency
               FROM payments
              WHERE payment = ?6 AND account = ?2 AND NOT voided AND refunded = 0",
        )
        .bind(now_ms())
        .bind(&cause.account)
        .bind(&cause.key_id)
        .bind(&cause.provider_key)
        .bind(cause.attempt)
        .bind(id)
        .execute(&self.writer)
        .await?;
        let row = if voided.rows_affected() == 1 {
            self.payment_row(&cause.account, id).await?
        } else {
            let earlier = "SELECT payments.* FROM payments JOIN ledger void USING (payment)
                            WHERE void.provider_key = ?1 AND void.action = 'void'";
            self.answer_again(cause, earlier).await?
        };
        row.as_ref().map(payment).transpose()
    }

    /// What an earlier attempt did under the same provider key, now answered by this attempt.
    async fn answer_again(
        &self,
        cause: &Cause,
        earlier: &'static str,
    ) -> Result<Option<SqliteRow>> {
        if self.deduplicate == Deduplicate::No || cause.provider_key.is_none() {
            return Ok(None);
        }
        sqlx::query("UPDATE ledger SET answered = ?2 WHERE provider_key = ?1")
            .bind(&cause.provider_key)
            .bind(cause.attempt)
            .execute(&self.writer)
            .await?;
        let row = sqlx::query(earlier).bind(&cause.provider_key).fetch_optional(&self.writer);
        Ok(row.await?)
    }

    async fn payment_row(&self, account: &str, id: &str) -> Result<Option<SqliteRow>> {
        let query = sqlx::query("SELECT * FROM payments WHERE payment = ?1 AND account = ?2");
        Ok(query.bind(id).bind(account).fetch_optional(&self.reader).await?)
    }

    /// A payment of this account.
    pub(crate) async fn payment(&self, account: &str, id: &str) -> Result<Option<Payment>> {
        self.payment_row(account, id).await?.as_ref().map(payment).transpose()
    }

    /// A refund of this account.
    pub(crate) async fn refund_of(&self, account: &str, id: &str) -> Result<Option<Refund>> {
        let query = "SELECT * FROM ledger WHERE refund = ?1 AND account = ?2";
        let row = sqlx::query(query).bind(id).bind(account).fetch_optional(&self.reader).await?;
        row.as_ref().map(refund).transpose()
    }

    /// This account's newest payments, and how many it has in all.
    pub(crate) async fn payments(&self, account: &str, limit: u32) -> Result<(Vec<Payment>, i64)> {
        let rows = sqlx::query(
            "SELECT *, (SELECT COUNT(*) FROM ledger
                         WHERE account = ?1 AND action = 'charge') AS total
               FROM payments WHERE account = ?1 ORDER BY seq DESC LIMIT ?2",
        )
        .bind(account)
        .bind(limit)
        .fetch_all(&self.reader)
        .await?;
        let total = rows.first().map_or(Ok(0), |row| row.try_get("total"))?;
        Ok((rows.iter().map(payment).collect::<Result<_>>()?, total))
    }

    /// Everything that happened, oldest first.
    pub(crate) async fn entries(&self) -> Result<Vec<Entry>> {
        let rows = sqlx::query("SELECT * FROM ledger ORDER BY seq").fetch_all(&self.reader).await?;
        rows.iter().map(entry).collect()
    }
}

fn payment(row: &SqliteRow) -> Result<Payment> {
    let amount: u32 = row.try_get("amount")?;
    let refunded: i64 = row.try_get("refunded")?;
    let status = match (row.try_get("voided")?, refunded) {
        (true, _) => "voided",
        (false, 0) => "succeeded",
        (false, refunded) if refunded < i64::from(amount) => "partially_refunded",
        (false, _) => "refunded",
    };
    Ok(Payment {
        id: row.try_get("payment")?,
        object: "payment",
        account: row.try_get("account")?,
        amount,
        currency: row.try_get("currency")?,
        status,
        source: row.try_get("source")?,
        created: row.try_get::<i64, _>("at")? / 1000,
        attempt: row.try_get("answered")?,
        description: row.try_get("description")?,
        padding: None,
    })
}

fn refund(row: &SqliteRow) -> Result<Refund> {
    Ok(Refund {
        id: row.try_get("refund")?,
        object: "refund",
        payment: row.try_get("payment")?,
        account: row.try_get("account")?,
        amount: row.try_get("amount")?,
        currency: row.try_get("currency")?,
        status: "succeeded",
        created: row.try_get::<i64, _>("at")? / 1000,
        attempt: row.try_get("answered")?,
    })
}

fn entry(row: &SqliteRow) -> Result<Entry> {
    Ok(Entry {
        account: row.try_get("account")?,
        key_id: row.try_get("key_id")?,
        action: row.try_get("action")?,
        amount: row.try_get("amount")?,
        attempt: row.try_get("attempt")?,
        at: row.try_get("at")?,
    })
}

fn new_id(prefix: &str) -> String {
    format!("{prefix}_{:032x}", rand::random::<u128>())
}

fn now_ms() -> i64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since_epoch.as_millis()).unwrap_or(i64::MAX)
}

impl LedgerError {
    /// True if certainly nothing was written: the statement never got its turn.
    pub(crate) fn untouched(&self) -> bool {
        if let sqlx::Error::Database(error) = &self.0 {
            // The low byte is the primary code: SQLITE_BUSY and SQLITE_LOCKED.
            let code = error.code().and_then(|code| code.parse::<u32>().ok());
            return code.is_some_and(|code| matches!(code & 0xff, 5 | 6));
        }
        matches!(&self.0, sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed)
    }
}

impl From<sqlx::Error> for LedgerError {
    fn from(error: sqlx::Error) -> Self {
        Self(error)
    }
}

impl std::fmt::Display for LedgerError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for LedgerError {}

#[cfg(test)]
mod tests {
    use super::*;

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
        let first = ledger.charge(&cause("acme", "p", 1), &new(5)).await.unwrap();
        let second = ledger.charge(&cause("acme", "p", 2), &new(5)).await.unwrap();
        assert_ne!(first.id, second.id);
        assert_eq!(actions(&ledger).await, ["charge", "charge"]);
        assert_eq!(ledger.payments("acme", 1).await.unwrap().1, 2);
        assert_eq!(ledger.payments("other", 1).await.unwrap().1, 0);
    }

    #[tokio::test]
    async fn a_processor_that_deduplicates_finds_the_earlier_effect() {
        let dir = tempfile::tempdir().unwrap();
        let ledger = Ledger::open(&dir.path().join("l.db"), Deduplicate::Yes).await.unwrap();
        let first = ledger.charge(&cause("acme", "c", 1), &new(5)).await.unwrap();
        let again = ledger.charge(&cause("acme", "c", 2), &new(5)).await.unwrap();
        assert_eq!((first.id.as_str(), again.attempt), (again.id.as_str(), 2));
        for attempt in [1, 2] {
            let cause = cause("acme", "r", attempt);
            let refund = ledger.refund(&cause, &first.id, None).await.unwrap().unwrap();
            assert_eq!((refund.amount, refund.attempt), (5, attempt));
        }
        let other = ledger.charge(&cause("acme", "d", 1), &new(5)).await.unwrap();
        for attempt in [1, 2] {
            let voided = ledger.void(&cause("acme", "v", attempt), &other.id).await.unwrap();
            assert_eq!(voided.unwrap().status, "voided");
        }
        assert_eq!(actions(&ledger).await, ["charge", "refund", "charge", "void"]);
    }

    #[tokio::test]
    async fn no_more_than_the_payment_is_refunded_and_never_by_another_account() {
        let dir = tempfile::tempdir().unwrap();
        let ledger = Ledger::open(&dir.path().join("l.db"), Deduplicate::No).await.unwrap();
        let id = ledger.charge(&cause("acme", "c", 1), &new(5)).await.unwrap().id;
        let refund = async |account, amount| {
            ledger.refund(&cause(account, "r", 1), &id, amount).await.unwrap().map(|r| r.amount)
        };
        assert_eq!(refund("other", None).await, None);
        assert_eq!(refund("acme", Some(6)).await, None);
        assert_eq!(refund("acme", Some(2)).await, Some(2));
        assert_eq!(refund("acme", Some(4)).await, None);
        assert!(ledger.void(&cause("acme", "v", 1), &id).await.unwrap().is_none());
        assert_eq!(refund("acme", None).await, Some(3));
        assert_eq!(refund("acme", None).await, None);
        assert_eq!(ledger.payment("acme", &id).await.unwrap().unwrap().status, "refunded");
        assert!(ledger.payment("other", &id).await.unwrap().is_none());
    }
}
