//! `--store`: where idempotency records are kept.

use std::error::Error;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use tower_idempotency::{MemoryStore, RedisStore, Store, StoreError};

/// A store URL that this build can open.
#[derive(Clone)]
pub(crate) enum StoreUrl {
    /// This process's memory.
    Memory,
    /// A Redis server.
    Redis(String),
}

/// Long enough for a slow network, short enough that nobody believes the sandbox hangs.
const OPEN_WITHIN: Duration = Duration::from_secs(8);

/// Schemes that are spoken for, so that a typing error and a missing part look different.
const LATER: [&str; 6] =
    ["rediss", "redis+cluster", "redis+sentinel", "sqlite", "postgres", "postgresql"];

impl StoreUrl {
    /// Opens the store and asks it to do real work once.
    pub(crate) async fn open(&self) -> Result<Arc<dyn Store>, String> {
        match tokio::time::timeout(OPEN_WITHIN, self.connect()).await {
            Ok(Ok(store)) => Ok(store),
            Ok(Err(error)) => Err(format!("cannot open the store {self}: {}", chain(&error))),
            Err(_) => Err(format!("the store {self} did not answer within {OPEN_WITHIN:?}")),
        }
    }

    async fn connect(&self) -> Result<Arc<dyn Store>, StoreError> {
        let store: Arc<dyn Store> = match self {
            Self::Memory => Arc::new(MemoryStore::new()),
            Self::Redis(url) => Arc::new(RedisStore::connect(url).await?),
        };
        store.ready().await?;
        Ok(store)
    }
}

impl FromStr for StoreUrl {
    type Err = String;

    fn from_str(url: &str) -> Result<Self, String> {
        let Some((scheme, rest)) = url.split_once(':') else {
            return Err("not a URL; try memory: or redis://127.0.0.1:6379".to_owned());
        };
        match scheme {
            "memory" if rest.is_empty() => Ok(Self::Memory),
            "memory" => Err("memory: takes nothing after the colon".to_owned()),
            "redis" if rest.len() > 2 && rest.starts_with("//") => Ok(Self::Redis(url.to_owned())),
            "redis" => Err("a Redis URL looks like redis://127.0.0.1:6379".to_owned()),
            scheme if LATER.contains(&scheme) => {
                Err(format!("{scheme}: is not supported by this build yet"))
            }
            _ => Err(format!("unknown store {scheme:?}; try memory: or redis://127.0.0.1:6379")),
        }
    }
}

/// Shows the address and never the password.
impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory => f.write_str("memory: (gone when this process ends)"),
            Self::Redis(url) => match url.rsplit_once('@') {
                Some((_, host)) => write!(f, "redis://{host}"),
                None => f.write_str(url),
            },
        }
    }
}

impl fmt::Debug for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StoreUrl({self})")
    }
}

/// An error with its causes on one line.
fn chain(error: &dyn Error) -> String {
    let mut line = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        line = format!("{line}: {cause}");
        next = cause.source();
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_opened_is_refused_by_name() {
        for url in ["memory:", "redis://h:1", "redis://u:p@h:1/2"] {
            assert!(url.parse::<StoreUrl>().is_ok(), "{url}");
        }
        for url in [
            "rediss://h:1",
            "redis+cluster://a:1,b:2",
            "redis+sentinel://a:1/m",
            "sqlite:x.db",
            "postgres://h/db",
        ] {
            let refused = url.parse::<StoreUrl>().unwrap_err();
            assert!(refused.contains("not supported by this build yet"), "{refused}");
        }
        for url in ["", "memory", "redis:", "redis://", "memory:x", "mongodb://h", "REDIS://h"] {
            assert!(url.parse::<StoreUrl>().is_err(), "{url}");
        }
    }

    #[test]
    fn a_password_is_never_shown() {
        let url: StoreUrl = "redis://u:s3cr@t@h:1/2".parse().unwrap();
        assert_eq!(url.to_string(), "redis://h:1/2");
        assert_eq!(format!("{url:?}"), "StoreUrl(redis://h:1/2)");
    }
}
