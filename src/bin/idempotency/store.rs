//! `--store`: opening the store that a service has.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use tower_idempotency::store::Inspect;
#[cfg(feature = "redis")]
use tower_idempotency::store::redis::{RedisAddress, RedisStoreBuilder};

use crate::flags::Flags;
#[cfg(feature = "redis")]
use crate::flags::Tls;
#[cfg(feature = "redis-tls")]
use crate::flags::read_file;

/// A store that records can be in.
#[derive(Clone, Eq, PartialEq)]
pub enum StoreUrl {
    /// Redis.
    #[cfg(feature = "redis")]
    Redis(RedisAddress),
    /// A file.
    Sqlite(PathBuf),
    /// A PostgreSQL server.
    Postgres(String),
}

/// Long enough for a slow network, short enough that nobody believes the program hangs.
const OPEN_WITHIN: Duration = Duration::from_secs(10);

/// An operator waits longer for a busy server than a request does.
#[cfg(feature = "redis")]
const CALL_TIMEOUT: Duration = Duration::from_secs(3);

/// Longer than all authorities of a system together.
#[cfg(feature = "redis-tls")]
const LONGEST_CERTIFICATES: usize = 16 << 20;

impl StoreUrl {
    /// True if several services may share it, each under a prefix of its own.
    pub fn has_prefix(&self) -> bool {
        match self {
            #[cfg(feature = "redis")]
            Self::Redis(_) => true,
            Self::Sqlite(_) | Self::Postgres(_) => false,
        }
    }

    /// Opens the store. Nothing is made that is not there.
    pub async fn open(&self, flags: &Flags) -> Result<Arc<dyn Inspect>, String> {
        match tokio::time::timeout(OPEN_WITHIN, self.connect(flags)).await {
            Ok(Ok(store)) => Ok(store),
            Ok(Err(error)) => Err(format!("cannot open the store {self}: {error}")),
            Err(_) => Err(format!("the store {self} did not answer within {OPEN_WITHIN:?}")),
        }
    }

    async fn connect(&self, flags: &Flags) -> Result<Arc<dyn Inspect>, String> {
        let tls = &flags.tls;
        match self {
            #[cfg(feature = "redis")]
            Self::Redis(address) => redis(address, flags).await,
            _ if tls.ca().is_some() || tls.cert().is_some() || tls.key().is_some() => {
                Err("--tls-ca, --tls-cert and --tls-key are for rediss://".to_owned())
            }
            Self::Sqlite(path) => sqlite(path).await,
            Self::Postgres(url) => postgres(url).await,
        }
    }
}

#[cfg(feature = "redis")]
async fn redis(address: &RedisAddress, flags: &Flags) -> Result<Arc<dyn Inspect>, String> {
    use tower_idempotency::RedisStore;
    use tower_idempotency::store::redis::StartupChecks;

    // TLS needs a provider, which is the program's choice. Fails if there is one already.
    #[cfg(feature = "redis-tls")]
    let _ = rustls::crypto::ring::default_provider().install_default();
    let builder = RedisStore::builder().prefix(&flags.prefix).call_timeout(CALL_TIMEOUT);
    let builder = with_certificates(builder, &flags.tls)?;
    // What the server should be like is for the service to say.
    let builder = builder.startup_checks(StartupChecks::Skip).errands(flags.command.errands());
    let store = builder.connect_to(address).await;
    Ok(Arc::new(store.map_err(|error| in_flags(&chain(&error)))?))
}

#[cfg(feature = "redis-tls")]
fn with_certificates(builder: RedisStoreBuilder, tls: &Tls) -> Result<RedisStoreBuilder, String> {
    use tower_idempotency::store::redis::redis::{ClientTlsConfig, TlsCertificates};

    let read = |file: PathBuf| read_file(&file, LONGEST_CERTIFICATES);
    let root_cert = tls.ca().map(read).transpose()?;
    let client_tls = match (tls.cert(), tls.key()) {
        (Some(cert), Some(key)) => {
            Some(ClientTlsConfig { client_cert: read(cert)?, client_key: read(key)? })
        }
        (None, None) => None,
        (Some(_), None) | (None, Some(_)) => {
            return Err("--tls-cert and --tls-key go together".to_owned());
        }
    };
    Ok(match root_cert.is_some() || client_tls.is_some() {
        true => builder.tls(TlsCertificates { client_tls, root_cert }),
        false => builder,
    })
}

#[cfg(all(feature = "redis", not(feature = "redis-tls")))]
fn with_certificates(builder: RedisStoreBuilder, tls: &Tls) -> Result<RedisStoreBuilder, String> {
    match (tls.ca(), tls.cert(), tls.key()) {
        (None, None, None) => Ok(builder),
        _ => Err("this program was built without the feature `redis-tls`".to_owned()),
    }
}

/// What the library says to programmers, said to who has a command line.
#[cfg(feature = "redis")]
fn in_flags(told: &str) -> String {
    told.replace("`RedisStore::builder().tls(TlsCertificates { root_cert, .. })`", "--tls-ca FILE")
        .replace(
            "`RedisStore::builder().tls(TlsCertificates { client_tls, .. })`",
            "--tls-cert FILE --tls-key FILE",
        )
}

#[cfg(feature = "redis")]
fn redis_url(url: &str) -> Result<StoreUrl, String> {
    url.parse::<RedisAddress>().map(StoreUrl::Redis).map_err(|error| match error.reason() {
        Some(reason) => reason.to_string(),
        None => error.to_string(),
    })
}

#[cfg(not(feature = "redis"))]
fn redis_url(_: &str) -> Result<StoreUrl, String> {
    Err("this program was built without the feature `redis`".to_owned())
}

#[cfg(feature = "sqlite")]
async fn sqlite(path: &Path) -> Result<Arc<dyn Inspect>, String> {
    if path.is_dir() {
        let file = path.join("payments.db");
        return Err(format!(
            "it is a directory: name the file in it, as in sqlite:{}",
            file.display()
        ));
    }
    // SQLite would make one.
    if !path.is_file() {
        return Err("there is no such file".to_owned());
    }
    let store = tower_idempotency::SqliteLeaseStore::open_existing(path).await;
    Ok(Arc::new(store.map_err(|error| chain(&error))?))
}

#[cfg(not(feature = "sqlite"))]
async fn sqlite(_: &Path) -> Result<Arc<dyn Inspect>, String> {
    Err("this program was built without the feature `sqlite`".to_owned())
}

#[cfg(feature = "postgres")]
async fn postgres(url: &str) -> Result<Arc<dyn Inspect>, String> {
    let store = tower_idempotency::PostgresLeaseStore::connect(url).await;
    Ok(Arc::new(store.map_err(|error| chain(&error))?))
}

#[cfg(not(feature = "postgres"))]
async fn postgres(_: &str) -> Result<Arc<dyn Inspect>, String> {
    Err("this program was built without the feature `postgres`".to_owned())
}

/// Puts protection around a store.
#[cfg(feature = "protect")]
pub fn protected(
    store: Arc<dyn Inspect>,
    keys: &[(u32, PathBuf)],
) -> Result<Arc<dyn Inspect>, String> {
    use tower_idempotency::store::{Protected, ProtectionKeyId, ProtectionKeys};

    let mut all: Option<ProtectionKeys> = None;
    for (id, file) in keys {
        let (id, key) = (ProtectionKeyId::from_number(*id), read_key(file)?);
        all = Some(match all {
            None => ProtectionKeys::new(id, &key),
            Some(keys) => keys.also_open(id, &key),
        });
    }
    Ok(match all {
        None => store,
        Some(keys) => Arc::new(Protected::new(store, keys)),
    })
}

/// Puts protection around a store.
#[cfg(not(feature = "protect"))]
pub fn protected(
    store: Arc<dyn Inspect>,
    keys: &[(u32, PathBuf)],
) -> Result<Arc<dyn Inspect>, String> {
    match keys {
        [] => Ok(store),
        _ => Err("this program was built without the feature `protect`".to_owned()),
    }
}

#[cfg(feature = "protect")]
fn read_key(file: &Path) -> Result<[u8; 32], String> {
    let shown = file.display();
    let bytes = std::fs::read(file).map_err(|error| format!("cannot read {shown}: {error}"))?;
    if let Ok(key) = <[u8; 32]>::try_from(&bytes[..]) {
        return Ok(key);
    }
    let digits = std::str::from_utf8(&bytes).map(str::trim).unwrap_or_default();
    let mut key = [0; 32];
    if digits.len() == 64 && digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        for (byte, pair) in key.iter_mut().zip(digits.as_bytes().chunks(2)) {
            let pair = std::str::from_utf8(pair).unwrap_or_default();
            *byte = u8::from_str_radix(pair, 16).unwrap_or_default();
        }
        return Ok(key);
    }
    Err(format!("{shown} holds neither 32 bytes nor 64 hex digits"))
}

impl FromStr for StoreUrl {
    type Err = String;

    fn from_str(url: &str) -> Result<Self, String> {
        // The library says it of its own addresses, in the same words.
        if url.trim() != url && !url.trim().starts_with("redis") {
            return Err(format!(
                "the address {:?} begins or ends with a blank or a line end: take it away, also where it \
                 comes from (a file of settings, a secret)",
                without_password(url)
            ));
        }
        let (scheme, rest) = url.trim_start().split_once(':').unwrap_or_default();
        let is_the_librarys = scheme.starts_with("redis") && rest.starts_with("//");
        if !is_the_librarys && has_blank_inside(url) {
            return Err(format!(
                "the address {:?} has a blank or a line end in it: take it away; in a password a blank is \
                 written %20",
                without_password(url)
            ));
        }
        match scheme {
            "memory" => Err("a store in memory belongs to its process: ask its router".to_owned()),
            // Which names beginning so there are, the library knows.
            _ if (scheme.starts_with("redis") || scheme == "unix")
                && rest.len() > 2
                && rest.starts_with("//") =>
            {
                redis_url(url)
            }
            "sqlite" if rest.starts_with("//") => Err(no_host(rest)),
            "sqlite" if !rest.is_empty() => Ok(Self::Sqlite(rest.into())),
            "postgres" | "postgresql" if rest.len() > 2 && rest.starts_with("//") => {
                Ok(Self::Postgres(url.to_owned()))
            }
            _ => Err("not the URL of a store; try redis://127.0.0.1:6379, sqlite:payments.db or \
                      postgres://user@127.0.0.1/database"
                .to_owned()),
        }
    }
}

/// Behind the question mark, and in the name of a file, a blank may be meant.
fn has_blank_inside(url: &str) -> bool {
    match url.split_once(':') {
        Some(("sqlite", file)) => file.starts_with(char::is_whitespace),
        Some(("unix", _)) => false,
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
            Self::Sqlite(path) => write!(f, "sqlite:{}", path.display()),
            #[cfg(feature = "redis")]
            Self::Redis(address) => write!(f, "{address}"),
            Self::Postgres(url) => f.write_str(&without_password(url)),
        }
    }
}

fn without_password(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return url.to_owned() };
    // A password may stand behind the question mark too.
    let place = rest.rsplit_once('@').map_or(rest, |(_, place)| place);
    format!("{scheme}://{}", place.split('?').next().unwrap_or_default())
}

impl fmt::Debug for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StoreUrl({self})")
    }
}

/// True if the database has no such table or column, and not if something else is wrong with it.
pub fn lacks_schema(error: &dyn std::error::Error) -> bool {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.into_iter().any(is_missing)
}

#[cfg(any(feature = "postgres", feature = "sqlite"))]
fn is_missing(cause: &(dyn std::error::Error + 'static)) -> bool {
    use tower_idempotency::store::sql::sqlx;
    let error = cause.downcast_ref::<sqlx::Error>().and_then(sqlx::Error::as_database_error);
    error.is_some_and(|error| match error.code().as_deref() {
        // undefined_table, undefined_column
        Some("42P01" | "42703") => true,
        // SQLITE_ERROR, which may be anything; its text is the same in every language.
        Some("1") => error.message().starts_with("no such "),
        Some(_) | None => false,
    })
}

#[cfg(not(any(feature = "postgres", feature = "sqlite")))]
fn is_missing(_: &(dyn std::error::Error + 'static)) -> bool {
    false
}

/// An error with its causes on one line.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut line = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let text = cause.to_string();
        if !line.contains(&text) {
            line = format!("{line}: {text}");
        }
        next = cause.source();
    }
    line
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

    use super::*;

    #[test]
    fn the_password_of_a_store_is_never_shown() {
        for (url, shown) in [
            ("redis://u:s3cr@t@h:1/2", "redis://h:1/2"),
            ("redis+unix:///run/redis.sock?pass=s3cret", "redis+unix:///run/redis.sock"),
            ("redis+sentinel://:s3cret@a:1,b:2/m?wait=2", "redis+sentinel://a:1,b:2/m"),
            ("postgres://u:s3cr@t@h:1/d?password=s3cret", "postgres://h:1/d"),
            ("sqlite:a.db", "sqlite:a.db"),
        ] {
            let url: StoreUrl = url.parse().unwrap();
            assert_eq!(url.to_string(), shown);
            assert_eq!(format!("{url:?}"), format!("StoreUrl({shown})"));
        }
        for bad in ["", "memory:", "redis:", "redis://", "mongodb://h", "sqlite:", "sqlite://x"] {
            assert!(bad.parse::<StoreUrl>().is_err(), "{bad}");
        }
    }
}
