//! The back door of a store: what stands under a key, and a way to put something there.

use std::time::Duration;

use bytes::Bytes;
use tower_idempotency::StorageKey;
use tower_idempotency::record::Millis;
use tower_idempotency::store::redis::redis::aio::MultiplexedConnection;
use tower_idempotency::store::redis::redis::{self, Value};
use tower_idempotency::store::sql::sqlx;

/// How to get behind a store.
#[derive(Clone)]
pub(super) enum Door {
    Redis(MultiplexedConnection),
    Postgres(sqlx::PgPool),
    Sqlite(sqlx::SqlitePool),
}

/// What stands under a key.
pub(super) struct Stored {
    /// In Redis's words.
    pub(super) kind: String,
    /// The bytes, and for how many milliseconds more; `-1` is for ever.
    pub(super) bytes: Option<(Bytes, i64)>,
}

const LOOK: &str = "SELECT record, expires_at FROM idempotency_records WHERE storage_key = $1";
const PUT: &str = "INSERT INTO idempotency_records (storage_key, state, record, expires_at)
                   VALUES ($1, $2, $3, $4)
                   ON CONFLICT (storage_key) DO UPDATE SET state = excluded.state,
                       record = excluded.record, expires_at = excluded.expires_at";

fn name(key: StorageKey) -> String {
    format!("idem:{{{}}}", key.to_text())
}

impl Door {
    pub(super) async fn look(&mut self, key: StorageKey, now: Millis) -> Stored {
        let id = &key.as_bytes()[..];
        let row: Option<(Vec<u8>, i64)> = match self {
            Self::Redis(connection) => return look_in_redis(connection, &name(key)).await,
            Self::Postgres(pool) => {
                sqlx::query_as(LOOK).bind(id).fetch_optional(&*pool).await.unwrap()
            }
            Self::Sqlite(pool) => {
                sqlx::query_as(LOOK).bind(id).fetch_optional(&*pool).await.unwrap()
            }
        };
        // A row that is over counts as none, swept or not.
        let left = |expires: i64| expires - i64::try_from(now.0).unwrap();
        let bytes = row
            .map(|(bytes, expires)| (Bytes::from(bytes), left(expires)))
            .filter(|(_, left)| *left > 0);
        let kind = if bytes.is_some() { "string" } else { "none" };
        Stored { kind: kind.to_owned(), bytes }
    }

    /// True if what is no record of any kind can be put there.
    pub(super) fn has_types(&self) -> bool {
        matches!(self, Self::Redis(_))
    }

    /// True if these bytes can stand there: tables check the first two.
    pub(super) fn takes(&self, bytes: &[u8]) -> bool {
        match self {
            Self::Redis(_) => true,
            Self::Postgres(_) | Self::Sqlite(_) => match bytes {
                [] => false,
                [1, state, ..] => bytes.len() >= 84 && (1..=5).contains(state),
                [1] => false,
                _ => true,
            },
        }
    }

    pub(super) async fn put(
        &mut self,
        key: StorageKey,
        bytes: &[u8],
        lasts: Duration,
        now: Millis,
    ) {
        let expires = i64::try_from(now.after(lasts).0).unwrap();
        let state = match bytes {
            [1, state, ..] => i16::from(*state),
            _ => 1,
        };
        let id = &key.as_bytes()[..];
        match self {
            Self::Redis(connection) => {
                let mut set = redis::cmd("SET");
                set.arg(name(key)).arg(bytes).arg("PX").arg(lasts.as_millis() as u64);
                let _: () = set.query_async(connection).await.unwrap();
            }
            Self::Postgres(pool) => {
                let put = sqlx::query(PUT).bind(id).bind(state).bind(bytes).bind(expires);
                put.execute(&*pool).await.unwrap();
            }
            Self::Sqlite(pool) => {
                let put = sqlx::query(PUT).bind(id).bind(state).bind(bytes).bind(expires);
                put.execute(&*pool).await.unwrap();
            }
        }
    }

    /// Puts something that is no string of bytes at all.
    pub(super) async fn put_foreign_type(&mut self, key: StorageKey, lasts: Duration) {
        let Self::Redis(connection) = self else { panic!("only Redis has types") };
        let name = name(key);
        let mut put = redis::pipe();
        put.cmd("DEL").arg(&name).cmd("RPUSH").arg(&name).arg("foreign");
        put.cmd("PEXPIRE").arg(&name).arg(lasts.as_millis() as u64);
        let _: () = put.query_async(connection).await.unwrap();
    }
}

/// A record of a first claim, whose times follow from its expiry, with its times. As the layout in
/// `src/record/codec.rs` says it, and not by the code that the store has for it.
fn written_out(mut bytes: Vec<u8>, expires: i64) -> Bytes {
    if let [1, state @ (6 | 7), ..] = bytes[..]
        && bytes.len() >= 84
    {
        let number = |range: std::ops::Range<usize>| {
            bytes[range].iter().fold(0, |number, &byte| number << 8 | i64::from(byte))
        };
        let until = expires - number(70..76);
        let made = (until - number(76..80)).max(0);
        let fence = number(58..64);
        let fence = if fence + 1_000 < made { made } else { fence };
        if until > 0 {
            bytes[1] = if state == 6 { 1 } else { 5 };
            for (at, time) in [(58, fence), (64, made), (70, until)] {
                bytes[at..at + 6].copy_from_slice(&time.to_be_bytes()[2..]);
            }
        }
    }
    bytes.into()
}

async fn look_in_redis(connection: &mut MultiplexedConnection, name: &str) -> Stored {
    let kind: String = redis::cmd("TYPE").arg(name).query_async(connection).await.unwrap();
    if kind != "string" {
        return Stored { kind, bytes: None };
    }
    let mut look = redis::pipe();
    look.cmd("GET").arg(name).cmd("PTTL").arg(name).cmd("PEXPIRETIME").arg(name);
    let (stored, left, expires): (Value, i64, i64) = look.query_async(connection).await.unwrap();
    let bytes = match stored {
        Value::BulkString(bytes) => Some((written_out(bytes, expires), left)),
        Value::Nil => None,
        other => panic!("{other:?}"),
    };
    Stored { kind, bytes: bytes.filter(|(_, left)| *left != -2) }
}
