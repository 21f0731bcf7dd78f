//! What really happened, as the card processor saw it: one table, one row per effect.
//!
//! Nothing in it is unique by idempotency key, on purpose: if a payment were ever made twice, both
//! would stand here. A payment is a charge and the refunds and voids that name it.
//!
//! With a Redis or memory store the ledger is a file of its own, another system than the store, as a
//! card network is. With an SQL store it is in the store's own database, and what a request writes
//! commits together with its answer. This file reads; `books.rs` writes.

use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::Serialize;
use sqlx::postgres::PgPool;
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteJournalMode, SqlitePool, SqlitePoolOptions, SqliteSynchronous,
};
use sqlx::{Postgres, Transaction};
use tower_idempotency::store::sql::sqlx;

/// The ledger of the processor. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Ledger {
    pub(crate) database: Database,
    pub(crate) deduplicate: Deduplicate,
}

/// Where it is.
#[derive(Clone, Debug)]
pub(crate) enum Database {
    Sqlite(SqlitePool),
    Postgres(PgPool),
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
    pub(crate) amount: u32,
    currency: String,
    pub(crate) status: &'static str,
    source: String,
    /// Unix seconds.
    created: i64,
    /// The attempt that answered.
    pub(crate) attempt: u32,
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
    pub(crate) amount: u32,
    currency: String,
    pub(crate) status: &'static str,
    created: i64,
    pub(crate) attempt: u32,
}

/// What was done under a provider key.
#[derive(Debug)]
pub(crate) enum Done {
    /// A charge, or the void of one.
    Payment(Payment),
    Refund(Refund),
}

impl Payment {
    pub(crate) fn source(&self) -> &str {
        &self.source
    }
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

pub(crate) type Result<T> = std::result::Result<T, LedgerError>;

/// A row of the view `payments`.
pub(crate) type PaymentRow =
    (String, String, i64, String, String, i64, i64, Option<String>, i64, bool);
/// A row of the table that is a refund.
pub(crate) type RefundRow = (String, String, String, i64, String, i64, i64);

macro_rules! payment_columns {
    () => {
        "payment, account, amount, currency, source, at, answered, description, refunded, voided"
    };
}
macro_rules! refund_columns {
    () => {
        "refund, payment, account, amount, currency, at, answered"
    };
}
pub(crate) use {payment_columns, refund_columns};

const SQLITE: &str = "
    CREATE TABLE IF NOT EXISTS ledger (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        at INTEGER NOT NULL,
        action TEXT NOT NULL CHECK (action IN ('hold', 'charge', 'refund', 'void')),
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
    CREATE UNIQUE INDEX IF NOT EXISTS ledger_charge ON ledger (payment) WHERE action = 'charge';
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

const POSTGRES: &str = "
    SELECT pg_advisory_xact_lock(4711);
    CREATE TABLE IF NOT EXISTS ledger (
        seq BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        at BIGINT NOT NULL,
        action TEXT NOT NULL CHECK (action IN ('hold', 'charge', 'refund', 'void')),
        account TEXT NOT NULL,
        key_id TEXT NOT NULL,
        provider_key TEXT,
        attempt BIGINT NOT NULL,
        answered BIGINT NOT NULL,
        payment TEXT NOT NULL,
        refund TEXT,
        amount BIGINT NOT NULL,
        currency TEXT NOT NULL,
        source TEXT,
        description TEXT
    );
    CREATE INDEX IF NOT EXISTS ledger_by_payment ON ledger (payment, action);
    CREATE UNIQUE INDEX IF NOT EXISTS ledger_charge ON ledger (payment) WHERE action = 'charge';
    CREATE INDEX IF NOT EXISTS ledger_by_account ON ledger (account, action, seq);
    CREATE INDEX IF NOT EXISTS ledger_by_provider_key ON ledger (provider_key);
    CREATE OR REPLACE VIEW payments AS
        SELECT charge.*,
               (SELECT CAST(COALESCE(SUM(r.amount), 0) AS BIGINT) FROM ledger r
                 WHERE r.payment = charge.payment AND r.action = 'refund') AS refunded,
               EXISTS (SELECT 1 FROM ledger v
                        WHERE v.payment = charge.payment AND v.action = 'void') AS voided
          FROM ledger charge WHERE charge.action = 'charge';
";

/// How long a write waits for the writers of other processes.
const BUSY: Duration = Duration::from_secs(5);

/// Runs one expression on whichever database it is.
macro_rules! read {
    ($ledger:expr, |$on:ident| $query:expr) => {
        match &$ledger.database {
            Database::Sqlite($on) => $query.await?,
            Database::Postgres(pool) => {
                let mut transaction = begin(pool).await?;
                let $on = &mut *transaction;
                let found = answered($query).await?;
                answered(transaction.commit()).await?;
                found
            }
        }
    };
}

/// What is not the layer's transaction sets limits of its own: a table that somebody has locked must not
/// hold a request, and its connection, for as long as that takes.
const BEGIN: &str = "BEGIN; SET LOCAL lock_timeout = 4000; SET LOCAL statement_timeout = 4000";
/// A little longer: a server that is frozen or cut off does not keep its limits.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

pub(crate) async fn begin(pool: &PgPool) -> sqlx::Result<Transaction<'static, Postgres>> {
    answered(pool.begin_with(BEGIN)).await
}

/// Waits for PostgreSQL, and not for ever.
pub(crate) async fn answered<T>(work: impl Future<Output = sqlx::Result<T>>) -> sqlx::Result<T> {
    let late = |_| Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into());
    tokio::time::timeout(ANSWER_WITHIN, work).await.unwrap_or_else(late)
}

impl Ledger {
    /// Opens a file of its own, and makes it if there is none.
    pub(crate) async fn open(path: &Path, deduplicate: Deduplicate) -> Result<Self> {
        let options = SqliteConnectOptions::new()
            .filename(path)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            // Survives the death of any process. A real ledger would survive a power cut: Full.
            .synchronous(SqliteSynchronous::Normal)
            .busy_timeout(BUSY);
        let mut tries = 0;
        let pool = loop {
            // Several processes may make the file at the same time; SQLite lets one do it.
            let pool = SqlitePoolOptions::new().max_connections(5).acquire_timeout(2 * BUSY);
            match pool.connect_with(options.clone()).await.map_err(LedgerError) {
                Err(error) if error.untouched() && tries < 20 => tries += 1,
                opened => break opened?,
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        };
        Self::on(Database::Sqlite(pool), deduplicate).await
    }

    /// In a database that is open already.
    pub(crate) async fn on(database: Database, deduplicate: Deduplicate) -> Result<Self> {
        match &database {
            Database::Sqlite(pool) => sqlx::raw_sql(SQLITE).execute(pool).await.map(drop)?,
            Database::Postgres(pool) => {
                // Saying that an index exists takes a lock, and payments would wait for each start.
                let present = sqlx::query_scalar(
                    "SELECT to_regclass('payments') IS NOT NULL AND to_regclass('ledger_charge') IS NOT NULL",
                );
                if !answered(present.fetch_one(pool)).await? {
                    let mut transaction = begin(pool).await?;
                    answered(sqlx::raw_sql(POSTGRES).execute(&mut *transaction)).await?;
                    answered(transaction.commit()).await?;
                }
            }
        }
        Ok(Self { database, deduplicate })
    }

    /// Closes the database.
    pub(crate) async fn close(&self) {
        match &self.database {
            Database::Sqlite(pool) => pool.close().await,
            Database::Postgres(pool) => pool.close().await,
        }
    }

    /// A payment of this account.
    pub(crate) async fn payment(&self, account: &str, id: &str) -> Result<Option<Payment>> {
        let text = concat!(
            "SELECT ",
            payment_columns!(),
            " FROM payments WHERE payment = $1 AND account = $2"
        );
        let row =
            read!(self, |pool| sqlx::query_as(text).bind(id).bind(account).fetch_optional(pool));
        Ok(row.map(payment))
    }

    /// A refund of this account.
    pub(crate) async fn refund_of(&self, account: &str, id: &str) -> Result<Option<Refund>> {
        let text = concat!(
            "SELECT ",
            refund_columns!(),
            " FROM ledger WHERE refund = $1 AND account = $2"
        );
        let row =
            read!(self, |pool| sqlx::query_as(text).bind(id).bind(account).fetch_optional(pool));
        Ok(row.map(refund))
    }

    /// This account's newest payments, and how many it has in all.
    pub(crate) async fn payments(&self, account: &str, limit: u32) -> Result<(Vec<Payment>, i64)> {
        let text = concat!(
            "SELECT ",
            payment_columns!(),
            " FROM payments WHERE account = $1 ORDER BY seq DESC LIMIT $2"
        );
        let rows: Vec<PaymentRow> = read!(self, |pool| sqlx::query_as(text)
            .bind(account)
            .bind(i64::from(limit))
            .fetch_all(pool));
        let text = "SELECT COUNT(*) FROM ledger WHERE account = $1 AND action = 'charge'";
        let total = read!(self, |pool| sqlx::query_scalar(text).bind(account).fetch_one(pool));
        Ok((rows.into_iter().map(payment).collect(), total))
    }

    /// What was done under this provider key, from now on answered by this attempt. Only a processor
    /// that does one provider key once can say.
    pub(crate) async fn done(&self, provider_key: &str, attempt: u32) -> Result<Option<Done>> {
        let attempt = i64::from(attempt);
        let text = "UPDATE ledger SET answered = $2 WHERE provider_key = $1 RETURNING action";
        let action: Option<String> = read!(self, |pool| sqlx::query_scalar(text)
            .bind(provider_key)
            .bind(attempt)
            .fetch_optional(pool));
        if action.as_deref() == Some("refund") {
            let text =
                concat!("SELECT ", refund_columns!(), " FROM ledger WHERE provider_key = $1");
            let row =
                read!(self, |pool| sqlx::query_as(text).bind(provider_key).fetch_optional(pool));
            return Ok(row.map(|row| Done::Refund(refund(row))));
        }
        let text = concat!(
            "SELECT ",
            payment_columns!(),
            " FROM payments WHERE payment IN (SELECT payment FROM ledger WHERE provider_key = $1)"
        );
        let row = read!(self, |pool| sqlx::query_as(text).bind(provider_key).fetch_optional(pool));
        Ok(row.map(|row| Done::Payment(payment(row))))
    }

    /// Everything that happened, oldest first.
    pub(crate) async fn entries(&self) -> Result<Vec<Entry>> {
        let text = "SELECT account, key_id, action, amount, attempt, at FROM ledger ORDER BY seq";
        let rows: Vec<(String, String, String, i64, i64, i64)> =
            read!(self, |pool| sqlx::query_as(text).fetch_all(pool));
        let entry = |(account, key_id, action, amount, attempt, at)| Entry {
            account,
            key_id,
            action,
            amount: small(amount),
            attempt: small(attempt),
            at,
        };
        Ok(rows.into_iter().map(entry).collect())
    }
}

pub(crate) fn payment(row: PaymentRow) -> Payment {
    let (id, account, amount, currency, source, at, answered, description, refunded, voided) = row;
    let status = match (voided, refunded) {
        (true, _) => "voided",
        (false, 0) => "succeeded",
        (false, refunded) if refunded < amount => "partially_refunded",
        (false, _) => "refunded",
    };
    Payment {
        id,
        object: "payment",
        account,
        amount: small(amount),
        currency,
        status,
        source,
        created: at / 1000,
        attempt: small(answered),
        description,
        padding: None,
    }
}

pub(crate) fn refund(row: RefundRow) -> Refund {
    let (id, payment, account, amount, currency, at, answered) = row;
    Refund {
        id,
        object: "refund",
        payment,
        account,
        amount: small(amount),
        currency,
        status: "succeeded",
        created: at / 1000,
        attempt: small(answered),
    }
}

/// Amounts and attempts fit, since they were made from this type.
fn small(number: i64) -> u32 {
    u32::try_from(number).unwrap_or_default()
}

pub(crate) fn new_id(prefix: &str) -> String {
    format!("{prefix}_{:032x}", rand::random::<u128>())
}

pub(crate) fn now_ms() -> i64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since_epoch.as_millis()).unwrap_or(i64::MAX)
}

impl LedgerError {
    /// True if certainly nothing was written, and the same may succeed later.
    pub(crate) fn untouched(&self) -> bool {
        let sqlx::Error::Database(error) = &self.0 else {
            return matches!(&self.0, sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed);
        };
        match error.code().as_deref() {
            // PostgreSQL: a limit of a statement or a lock, a full disk, a server that only reads, that
            // stops or has no connection left. The statement did nothing, and its transaction is undone.
            Some("57014" | "55P03" | "53100" | "25006" | "53300" | "57P03") => true,
            // SQLite: the low byte is the primary code, SQLITE_BUSY, SQLITE_LOCKED and SQLITE_FULL.
            Some(code) if code.len() < 5 => {
                code.parse::<u32>().is_ok_and(|code| matches!(code & 0xff, 5 | 6 | 13))
            }
            Some(_) | None => false,
        }
    }
}

impl LedgerError {
    pub(crate) fn other(error: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self(sqlx::Error::Io(std::io::Error::other(error)))
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
