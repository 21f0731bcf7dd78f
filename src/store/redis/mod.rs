//! The Redis store: one string per record, one Lua script per verb, exactly one key per script.
//!
//! ```no_run
//! # async fn start() -> Result<(), tower_idempotency::StoreError> {
//! use tower_idempotency::RedisStore;
//!
//! let store = RedisStore::connect("redis://127.0.0.1/").await?;
//! # drop(store);
//! # Ok(())
//! # }
//! ```
//!
//! # What Redis has to be
//! Version 7.0 or later, with `maxmemory-policy noeviction` and the append-only file on. Losing a
//! record, be it by eviction, FLUSHALL, or a failover before replication, makes its key new again;
//! nothing on this side can see that.
//!
//! # Connections
//! [`RedisStore::connect`] shares one multiplexed connection, watches it, and replaces it when it
//! breaks, goes silent, or turns out to lead to a replica. [`RedisStore::from_pool`] is for
//! programs that run a [`deadpool_redis`] pool already; a check-out costs a round trip of its own.
//! Both keep the same promises.
//!
//! # Errors
//! No call is repeated here. What a [`StoreError`] says is decided by one rule: a server that
//! answered with an error did nothing, a call that was never sent did nothing, and everything else
//! is [`OutcomeUnknown`](StoreErrorKind::OutcomeUnknown).
//!
//! # Limits
//! A verb takes at most twice the call timeout: once for a connection, once for the reply.

mod connect;
mod script;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

pub use ::{deadpool_redis, redis};

use connect::{CALL_TIMEOUT, CONNECT_TIMEOUT, Cause, Connections, Dialer, Pooled, Shared, Urgency};
use script::{BadReply, Call, Readiness, Reply};

use super::{Lease, Store, StoreFuture};
use crate::error::{StoreError, StoreErrorKind};
use crate::record::{
    Claim, ClaimOutcome, CompleteOutcome, Completion, Release, ReleaseOutcome, RenewOutcome,
    Renewal, Resolution, ResolveOutcome,
};
use crate::scope::StorageKey;

const NAME: &str = "redis";

/// What the keys of all records begin with, unless told otherwise.
const PREFIX: &str = "idem";

/// The longest prefix. Every record carries it, so it should be short.
const MAX_PREFIX: usize = 64;

/// Records in Redis. See the [module](self).
///
/// # Clone
/// Clones share the connection.
///
/// # Defaults
/// Keys are `idem:{..}`; 600 ms per call, two seconds to connect, see [`RedisStoreBuilder`].
#[derive(Clone)]
pub struct RedisStore(Arc<Inner>);

struct Inner {
    connections: Connections,
    prefix: Box<str>,
}

/// Why a store could not be set up. The source of the error that is returned.
#[derive(Debug, thiserror::Error)]
enum SetupError {
    #[error("{url_scheme}:// asks for TLS, which this store does not do yet; use redis://")]
    Tls { url_scheme: &'static str },
    #[error("the key prefix is empty")]
    PrefixEmpty,
    #[error("the key prefix has {0} bytes; at most {MAX_PREFIX} are allowed")]
    PrefixTooLong(usize),
    #[error("the key prefix {0:?} has a brace or a control character in it")]
    PrefixCharacter(Box<str>),
    #[error("{0} must be greater than zero")]
    Zero(&'static str),
    #[error(
        "the server is older than Redis 7.0, the first whose scripts can do what this store needs"
    )]
    TooOld,
}

impl SetupError {
    fn into_store_error(self, operation: &'static str) -> StoreError {
        StoreError::new(StoreErrorKind::Backend, NAME, operation).with_source(self)
    }
}

/// Sets up a [`RedisStore`].
#[derive(Clone, Debug)]
#[must_use]
pub struct RedisStoreBuilder {
    prefix: String,
    call_timeout: Duration,
    connect_timeout: Duration,
}

impl RedisStoreBuilder {
    /// What all keys begin with; for several services, or several environments, in one Redis.
    ///
    /// One to 64 bytes without braces (the part in braces decides about the slot in a cluster) and
    /// without control characters. Default: `idem`.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// How long a verb waits for a connection, and then again for the reply.
    ///
    /// Default: 600 ms. A healthy Redis needs milliseconds, and the engine calls again while a claim
    /// or a completion is not confirmed. Twice this should not be above
    /// [`store_call_timeout`](crate::ConfigBuilder::store_call_timeout).
    pub fn call_timeout(mut self, call_timeout: Duration) -> Self {
        self.call_timeout = call_timeout;
        self
    }

    /// How long it may take to make a connection. A pool has a limit of its own instead.
    ///
    /// Default: two seconds, so that one lost packet does not count as an absent server.
    pub fn connect_timeout(mut self, connect_timeout: Duration) -> Self {
        self.connect_timeout = connect_timeout;
        self
    }

    /// Connects to `redis://[user:password@]host[:port][/db]`.
    ///
    /// # Errors
    /// See [`RedisStore::connect`]; also if a setting of this builder is out of its bounds.
    pub async fn connect(self, url: &str) -> Result<RedisStore, StoreError> {
        let prefix = self.check("connect")?;
        for scheme in ["rediss", "valkeys"] {
            if url.strip_prefix(scheme).is_some_and(|rest| rest.starts_with("://")) {
                return Err(SetupError::Tls { url_scheme: scheme }.into_store_error("connect"));
            }
        }
        let failed = |kind| {
            move |error: redis::RedisError| {
                StoreError::new(kind, NAME, "connect").with_source(error)
            }
        };
        let dialer =
            Dialer::new(url, self.connect_timeout).map_err(failed(StoreErrorKind::Backend))?;
        let shared = Shared::connect(dialer, self.call_timeout)
            .await
            .map_err(failed(StoreErrorKind::Unavailable))?;
        let store = RedisStore::new(Connections::Shared(shared), prefix);
        match store.check_server("connect").await {
            Ok(()) => Ok(store),
            // A full server can still replay what it has, and end what runs.
            Err(error) if error.kind() == StoreErrorKind::Full => Ok(store),
            // Whether the mark was written makes no difference: the server is not there.
            Err(error) if error.kind() == StoreErrorKind::OutcomeUnknown => {
                Err(StoreError::new(StoreErrorKind::Unavailable, NAME, "connect")
                    .with_source(error))
            }
            Err(error) => Err(error),
        }
    }

    /// Uses a pool. Nothing is sent yet: ask [`Store::ready`] whether there is a server, and whether
    /// it is recent enough.
    ///
    /// # Errors
    /// [`Backend`](StoreErrorKind::Backend) if a setting of this builder is out of its bounds.
    pub fn pool(self, pool: deadpool_redis::Pool) -> Result<RedisStore, StoreError> {
        let prefix = self.check("setup")?;
        let pool = Pooled::new(pool, self.call_timeout);
        Ok(RedisStore::new(Connections::Pool(pool), prefix))
    }

    fn check(&self, operation: &'static str) -> Result<Box<str>, StoreError> {
        check_prefix(&self.prefix)
            .and_then(|()| match () {
                () if self.call_timeout.is_zero() => Err(SetupError::Zero("call_timeout")),
                () if self.connect_timeout.is_zero() => Err(SetupError::Zero("connect_timeout")),
                () => Ok(self.prefix.as_str().into()),
            })
            .map_err(|error| error.into_store_error(operation))
    }
}

fn check_prefix(prefix: &str) -> Result<(), SetupError> {
    if prefix.is_empty() {
        return Err(SetupError::PrefixEmpty);
    }
    if prefix.len() > MAX_PREFIX {
        return Err(SetupError::PrefixTooLong(prefix.len()));
    }
    if prefix.contains(|c: char| c == '{' || c == '}' || c.is_control()) {
        return Err(SetupError::PrefixCharacter(prefix.into()));
    }
    Ok(())
}

impl RedisStore {
    /// Connects to `redis://[user:password@]host[:port][/db]` and looks at the server.
    ///
    /// # Errors
    /// The cause is the error's [`source`](std::error::Error::source):
    /// - [`Unavailable`](StoreErrorKind::Unavailable) if there is no server, if it does not answer
    ///   (after three seconds at the latest), or if it is a replica or still loading;
    /// - [`Backend`](StoreErrorKind::Backend) if the address cannot be read, asks for TLS, or the
    ///   server is older than 7.0 or refuses scripts.
    pub async fn connect(url: &str) -> Result<Self, StoreError> {
        Self::builder().connect(url).await
    }

    /// A store over a pool that the program runs already.
    ///
    /// Claims use at most all slots but one, so that a renewal or a completion does not wait for
    /// them; so give the pool two slots at least. A connection that timed out, broke, or
    /// reached a replica leaves the pool. Whoever lends connections of this pool out elsewhere
    /// shares its slots with the store.
    #[must_use]
    pub fn from_pool(pool: deadpool_redis::Pool) -> Self {
        Self::new(Connections::Pool(Pooled::new(pool, CALL_TIMEOUT)), PREFIX.into())
    }

    /// A store with other settings.
    pub fn builder() -> RedisStoreBuilder {
        RedisStoreBuilder {
            prefix: PREFIX.to_owned(),
            call_timeout: CALL_TIMEOUT,
            connect_timeout: CONNECT_TIMEOUT,
        }
    }

    fn new(connections: Connections, prefix: Box<str>) -> Self {
        Self(Arc::new(Inner { connections, prefix }))
    }

    /// The key's name in Redis. The braces make the whole of it a hash tag.
    fn key(&self, key: StorageKey) -> String {
        format!("{}:{{{}}}", self.0.prefix, key.to_text())
    }

    async fn run<T>(
        &self,
        operation: &'static str,
        urgency: Urgency,
        call: &Call,
        unreadable: T,
        read: impl FnOnce(&mut Reply) -> Result<T, BadReply>,
    ) -> Result<T, StoreError> {
        let fail = |kind, cause: Cause| StoreError::new(kind, NAME, operation).with_source(cause);
        let reply = match self.0.connections.run(call, urgency).await {
            Ok(value) => Ok(value),
            Err(connect::Failure::Refused(error)) => Err(error),
            Err(failure) => return Err(fail(failure.kind(), failure.into_cause())),
        };
        match script::outcome(reply, unreadable, read) {
            Ok(Ok(outcome)) => Ok(outcome),
            Ok(Err(bad_reply)) => Err(fail(StoreErrorKind::OutcomeUnknown, bad_reply.into())),
            Err(error) => {
                let failure = connect::Failure::Refused(error);
                Err(fail(failure.kind(), failure.into_cause()))
            }
        }
    }

    async fn check_server(&self, operation: &'static str) -> Result<(), StoreError> {
        let call = script::ready(&format!("{}:{{ready}}", self.0.prefix));
        // It overwrites whatever is under its key, so nothing there can be unreadable.
        let nothing = Readiness::Ready;
        match self.run(operation, Urgency::Urgent, &call, nothing, script::readiness).await? {
            Readiness::Ready => Ok(()),
            Readiness::TooOld => Err(SetupError::TooOld.into_store_error(operation)),
        }
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore")
            .field("connections", &self.0.connections)
            .field("prefix", &self.0.prefix)
            .finish()
    }
}

impl Store for RedisStore {
    fn name(&self) -> &'static str {
        NAME
    }

    fn claim<'a>(
        &'a self,
        key: StorageKey,
        claim: &'a Claim,
    ) -> StoreFuture<'a, ClaimOutcome<Lease>> {
        Box::pin(async move {
            let call = script::claim(&self.key(key), claim);
            let unreadable = ClaimOutcome::Unreadable;
            let outcome =
                self.run("claim", Urgency::Ordinary, &call, unreadable, script::claimed).await?;
            Ok(outcome.map(|grant| Lease::new(key, claim, grant)))
        })
    }

    fn renew<'a>(
        &'a self,
        lease: &'a Lease,
        renewal: &'a Renewal,
    ) -> StoreFuture<'a, RenewOutcome> {
        Box::pin(async move {
            let call = script::renew(&self.key(lease.key()), lease.owner(), renewal);
            let unreadable = RenewOutcome::Unreadable;
            self.run("renew", Urgency::Urgent, &call, unreadable, script::renewed).await
        })
    }

    fn complete<'a>(
        &'a self,
        lease: &'a Lease,
        completion: &'a Completion,
    ) -> StoreFuture<'a, CompleteOutcome> {
        Box::pin(async move {
            let call = script::complete(&self.key(lease.key()), lease.owner(), completion);
            let unreadable = CompleteOutcome::Unreadable;
            self.run("complete", Urgency::Urgent, &call, unreadable, script::completed).await
        })
    }

    fn release<'a>(
        &'a self,
        lease: &'a Lease,
        release: &'a Release,
    ) -> StoreFuture<'a, ReleaseOutcome> {
        Box::pin(async move {
            let call = script::release(&self.key(lease.key()), lease.owner(), release);
            let unreadable = ReleaseOutcome::Unreadable;
            self.run("release", Urgency::Urgent, &call, unreadable, script::released).await
        })
    }

    fn resolve<'a>(
        &'a self,
        key: StorageKey,
        resolution: &'a Resolution,
    ) -> StoreFuture<'a, ResolveOutcome> {
        Box::pin(async move {
            let call = script::resolve(&self.key(key), resolution);
            let unreadable = ResolveOutcome::Unreadable;
            self.run("resolve", Urgency::Ordinary, &call, unreadable, script::resolved).await
        })
    }

    /// Runs a script that writes. Fails with [`Full`](StoreErrorKind::Full) when there is no room
    /// for new keys: what is stored can still be replayed then, and what runs can still end.
    fn ready(&self) -> StoreFuture<'_, ()> {
        Box::pin(self.check_server("ready"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_has_neither_braces_nor_control_characters_and_is_short() {
        assert!(check_prefix("idem").is_ok());
        assert!(check_prefix("pay-prod:idem").is_ok());
        let long = "x".repeat(MAX_PREFIX + 1);
        for bad in ["", "a{b", "a}b", "a\nb", "\0", long.as_str()] {
            assert!(check_prefix(bad).is_err(), "{bad:?}");
        }
    }

    #[tokio::test]
    async fn an_address_that_asks_for_tls_is_refused_clearly() {
        let error = RedisStore::connect("rediss://127.0.0.1/").await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Backend);
        let cause = std::error::Error::source(&error).unwrap().to_string();
        assert!(cause.contains("TLS"), "{cause}");
    }

    #[test]
    fn the_whole_name_of_a_key_hangs_on_its_hash_tag() {
        let manager = deadpool_redis::Manager::new("redis://127.0.0.1:1/").unwrap();
        let pool = deadpool_redis::Pool::builder(manager).build().unwrap();
        let store = RedisStore::from_pool(pool);
        let key = StorageKey::from_bytes([0; 24]);
        assert_eq!(store.key(key), "idem:{AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA}");
        assert!(!format!("{store:?}").contains("127.0.0.1"));
    }
}
