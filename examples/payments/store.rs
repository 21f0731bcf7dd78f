//! `--store`: where idempotency records are kept.

use std::error::Error;
use std::fmt;
use std::num::NonZeroU16;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use tower_idempotency::store::redis::RedisAddress;
use tower_idempotency::store::redis::deadpool_redis::{Manager, Pool};
use tower_idempotency::{
    MemoryStore, PostgresStore, RedisStore, SqliteStore, Store, StoreErrorKind,
};

use crate::ledger::{Database, Deduplicate, Ledger};

/// A store URL that this build can open.
#[derive(Clone, Eq, PartialEq)]
pub(crate) enum StoreUrl {
    /// This process's memory.
    Memory,
    /// Redis: one server, a group that Sentinels watch, or a cluster.
    Redis(RedisAddress),
    /// One Redis server through a pool, as a program has that runs one anyway.
    Pool { url: String, connections: usize },
    /// A file, which holds the ledger too.
    Sqlite(PathBuf),
    /// A PostgreSQL server, which holds the ledger too.
    Postgres(String),
}

/// Long enough for a slow network, short enough that nobody believes the sandbox hangs.
const OPEN_WITHIN: Duration = Duration::from_secs(8);
/// How long one statement may take, so that a request is answered in time whatever the database does.
const STATEMENT: Duration = Duration::from_secs(4);

impl StoreUrl {
    /// Opens the store, asks it to do real work once, and opens the ledger that goes with it.
    pub(crate) async fn open(
        &self,
        ledger: &Path,
        deduplicate: Deduplicate,
    ) -> Result<(Arc<dyn Store>, Ledger), String> {
        let opened = async {
            let (store, database) = self.connect().await.map_err(|error| chain(&*error))?;
            match store.ready().await {
                Ok(()) => {}
                // It answered, and replicas that `?wait=N` asks for are away, as after a failover: what is stored can
                // be replayed all the same, and /readyz says what is missing.
                Err(error)
                    if matches!(self, Self::Redis(_))
                        && error.kind() == StoreErrorKind::OutcomeUnknown =>
                {
                    tracing::warn!(reason = chain(&error), "not ready");
                }
                Err(error) => return Err(chain(&error)),
            }
            Ok::<_, String>((store, database))
        };
        let (store, database) = match tokio::time::timeout(OPEN_WITHIN, opened).await {
            Ok(Ok(opened)) => opened,
            Ok(Err(error)) => return Err(format!("cannot open the store {self}: {error}")),
            Err(_) => {
                return Err(format!("the store {self} did not answer within {OPEN_WITHIN:?}"));
            }
        };
        let books = match database {
            Some(database) => Ledger::on(database, deduplicate).await,
            None => Ledger::open(ledger, deduplicate).await,
        };
        let place = self.ledger(ledger);
        let books = books.map_err(|error| format!("cannot open the ledger {place}: {error}"))?;
        Ok((store, books))
    }

    async fn connect(&self) -> Result<(Arc<dyn Store>, Option<Database>), Box<dyn Error>> {
        Ok(match self {
            Self::Memory => (Arc::new(MemoryStore::new()), None),
            Self::Redis(address) => {
                // TLS needs a provider, which is the program's choice. Fails if there is one already.
                let _ = rustls::crypto::ring::default_provider().install_default();
                (Arc::new(RedisStore::builder().connect_to(address).await?), None)
            }
            Self::Pool { url, connections } => {
                let pool = Pool::builder(Manager::new(url.as_str())?).max_size(*connections);
                let store = RedisStore::from_pool(pool.build()?);
                // What a connection of the store's own says by itself.
                for concern in store.check().await? {
                    tracing::warn!("Redis: {concern}");
                }
                (Arc::new(store), None)
            }
            Self::Sqlite(path) if path.is_dir() => {
                let file = path.join("payments.db");
                let file = file.display();
                return Err(
                    format!("it is a directory: name the file in it, as in sqlite:{file}").into()
                );
            }
            Self::Sqlite(path) => {
                let store = SqliteStore::open(path).await?;
                store.migrate().await?;
                let database = Database::Sqlite(store.pool().clone());
                (Arc::new(store), Some(database))
            }
            Self::Postgres(url) => {
                let store = PostgresStore::connect(url).await?;
                store.migrate().await?;
                let pool = store.pool().clone();
                let store = PostgresStore::builder(pool.clone());
                let store = store.hand_on(true).statement_timeout(STATEMENT).build();
                (Arc::new(store), Some(Database::Postgres(pool)))
            }
        })
    }

    /// Where the ledger is, in words.
    pub(crate) fn ledger(&self, file: &Path) -> String {
        match self {
            Self::Memory | Self::Redis(_) | Self::Pool { .. } => file.display().to_string(),
            Self::Sqlite(path) => path.display().to_string(),
            Self::Postgres(_) => "in the store's database".to_owned(),
        }
    }
}

impl FromStr for StoreUrl {
    type Err = String;

    fn from_str(url: &str) -> Result<Self, String> {
        let Some((scheme, rest)) = url.split_once(':') else {
            return Err(
                "not a URL; try sqlite:payments.db, memory: or redis://127.0.0.1:6379".to_owned()
            );
        };
        let is_the_librarys = scheme.trim_start().starts_with("redis") && rest.starts_with("//");
        if !is_the_librarys && has_blank(url) {
            return Err(format!(
                "the address {:?} has a blank or a line end in it: take it away; in a password a blank is \
                 written %20",
                without_password(url)
            ));
        }
        match scheme.trim_start() {
            "memory" if rest.is_empty() => Ok(Self::Memory),
            "memory" => Err("memory: takes nothing after the colon".to_owned()),
            // `rediss`, `redis+cluster` and so on: which there are the library knows.
            scheme if scheme.starts_with("redis") => {
                if rest.len() > 2 && rest.starts_with("//") {
                    let (place, connections) = match url.split_once("?pool=") {
                        Some((place, number)) if scheme == "redis" => (place, Some(number)),
                        _ => (url, None),
                    };
                    let address = place.parse::<RedisAddress>().map_err(|error| {
                        error.reason().map_or_else(|| error.to_string(), ToString::to_string)
                    })?;
                    let Some(number) = connections else { return Ok(Self::Redis(address)) };
                    let number = number.parse::<NonZeroU16>();
                    let connections = number.map_err(|_| {
                        "pool= takes a number of connections, and stands alone: \
                         redis://127.0.0.1:6379?pool=16"
                    })?;
                    let (url, connections) = (place.to_owned(), connections.get().into());
                    return Ok(Self::Pool { url, connections });
                }
                let places = match scheme.split_once('+') {
                    Some((_, "sentinel")) => "host:26379,host:26379/master-name",
                    Some((_, "cluster")) => "host:7000,host:7001",
                    Some(_) => "/run/redis.sock",
                    None => "127.0.0.1:6379",
                };
                Err(format!("a Redis URL looks like {scheme}://{places}"))
            }
            "sqlite" if rest.starts_with("//") => Err(no_host(rest)),
            "sqlite" if !rest.is_empty() => Ok(Self::Sqlite(rest.into())),
            "sqlite" => Err("an SQLite URL looks like sqlite:payments.db".to_owned()),
            "postgres" | "postgresql" if rest.len() > 2 && rest.starts_with("//") => {
                Ok(Self::Postgres(url.to_owned()))
            }
            "postgres" | "postgresql" => {
                Err("a PostgreSQL URL looks like postgres://user@127.0.0.1/database".to_owned())
            }
            scheme => Err(format!(
                "unknown store {scheme:?}; try sqlite:payments.db, postgres://user@127.0.0.1/database, \
                 redis://127.0.0.1:6379 or memory:"
            )),
        }
    }
}

fn without_password(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return url.to_owned() };
    let place = rest.rsplit_once('@').map_or(rest, |(_, place)| place);
    // A password may stand behind the question mark too.
    format!("{scheme}://{}", place.split('?').next().unwrap_or_default())
}

/// Behind the question mark, and within the name of a file, a blank may be meant.
fn has_blank(url: &str) -> bool {
    url.trim() != url
        || match url.split_once(':') {
            Some(("sqlite", file)) => file.starts_with(char::is_whitespace),
            _ => url.split('?').next().unwrap_or_default().contains(char::is_whitespace),
        }
}

/// What is behind the colon looks like a host.
fn no_host(rest: &str) -> String {
    let file = rest.split('?').next().unwrap_or_default().trim_start_matches('/');
    let root = if rest.starts_with("///") { "/" } else { "" };
    let write = match file {
        "" => "sqlite:payments.db or sqlite:/path/payments.db".to_owned(),
        file => format!("sqlite:{root}{file}"),
    };
    format!("an SQLite address names a file and no host: write {write}")
}

/// Shows the address and never the password.
impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory => f.write_str("memory: (gone when this process ends)"),
            Self::Redis(address) => match address.wait() {
                None | Some(0) => write!(f, "{address}"),
                Some(wait) => write!(f, "{address} (waits for {wait} replicas)"),
            },
            Self::Pool { url, connections } => {
                // It was one when it was read.
                let place = url.parse::<RedisAddress>().map_err(|_| fmt::Error)?;
                write!(f, "{place} (a pool of {connections})")
            }
            Self::Sqlite(path) => write!(f, "sqlite:{}", path.display()),
            Self::Postgres(url) => f.write_str(&without_password(url)),
        }
    }
}

impl fmt::Debug for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StoreUrl({self})")
    }
}

/// An error with its causes on one line. Some errors say their cause themselves.
pub(crate) fn chain(error: &dyn Error) -> String {
    let mut line = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let told = cause.to_string();
        if !line.ends_with(&told) {
            line = format!("{line}: {told}");
        }
        next = cause.source();
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_opened_is_refused_by_name() {
        for url in
            ["memory:", "redis://h:1", "redis://u:p@h:1/2", "sqlite:x.db", "postgres://u:p@h/d"]
        {
            assert!(url.parse::<StoreUrl>().is_ok(), "{url}");
        }
        for url in [
            "rediss://h:1",
            "redis+unix:///run/redis.sock?db=1",
            "redis+cluster://a:1,b:2",
            "redis+sentinel://a:1/m?wait=2",
        ] {
            assert!(matches!(url.parse(), Ok(StoreUrl::Redis(_))), "{url}");
        }
        let pool: StoreUrl = "redis://h:1?pool=2".parse().unwrap();
        assert_eq!(pool, StoreUrl::Pool { url: "redis://h:1".to_owned(), connections: 2 });
        for url in [
            "",
            "memory",
            "redis:",
            "redis://",
            "memory:x",
            "mongodb://h",
            "REDIS://h",
            "sqlite:",
            "sqlite://x",
            "postgres:",
            "redis+cluster:",
            "redis+sentinel://",
            "redis://h?wait=many",
            "redis://h?pool=0",
            "redis://h?pool=2&wait=1",
            "redis://h?wait=1&pool=2",
            "redis+cluster://a:1,b:2?pool=2",
        ] {
            assert!(url.parse::<StoreUrl>().is_err(), "{url}");
        }
    }

    #[test]
    fn a_password_is_never_shown() {
        let url: StoreUrl = "redis://u:s3cr@t@h:1/2".parse().unwrap();
        assert_eq!(url.to_string(), "redis://h:1/2");
        assert_eq!(format!("{url:?}"), "StoreUrl(redis://h:1/2)");
        let url: StoreUrl = "redis://u:s3cr@t@h:1/2?pool=4".parse().unwrap();
        assert_eq!(url.to_string(), "redis://h:1/2 (a pool of 4)");
        assert_eq!(format!("{url:?}"), "StoreUrl(redis://h:1/2 (a pool of 4))");
        let url: StoreUrl =
            "redis+sentinel://:s3cret@a:1,b:2/m?wait=2&protocol=resp3".parse().unwrap();
        assert_eq!(url.to_string(), "redis+sentinel://a:1,b:2/m (waits for 2 replicas)");
        let url: StoreUrl = "redis+unix:///run/redis.sock?pass=s3cret".parse().unwrap();
        assert_eq!(url.to_string(), "redis+unix:///run/redis.sock");
        let url: StoreUrl = "postgres://u:s3cr@t@h:1/d?password=s3cret".parse().unwrap();
        assert_eq!(url.to_string(), "postgres://h:1/d");
    }
}
