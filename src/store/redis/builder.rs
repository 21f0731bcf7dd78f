//! Setting up a store: what can be chosen, and connecting.

use std::fmt;
use std::time::Duration;

use ::{deadpool_redis, redis};

use super::RedisStore;
use super::advice;
use super::call::Wait;
#[cfg(doc)]
use super::check::Concern;
use super::check::StartupChecks;
use super::connect::{
    Address, CALL_TIMEOUT, CONNECT_TIMEOUT, Certificates, Cluster, Connections, Dialer, Failure,
    Node, Pooled,
};
use super::errand::Errand;
use super::place::RedisAddress;
use super::script::Work;
use super::setup::SetupError;
use crate::error::{StoreError, StoreErrorKind};
#[cfg(doc)]
use crate::store::Store;

/// What the keys of all records begin with, unless told otherwise.
pub(super) const PREFIX: &str = "idem";

/// The longest prefix. Every record carries it, so it should be short.
pub(super) const MAX_PREFIX: usize = 64;

/// The most milliseconds that WAIT takes as a number. Nobody waits that long.
const LONGEST_WAIT: u64 = 1 << 31;

/// Sets up a [`RedisStore`].
#[derive(Clone)]
#[must_use]
pub struct RedisStoreBuilder {
    prefix: String,
    call_timeout: Duration,
    connect_timeout: Duration,
    wait: u32,
    startup_checks: StartupChecks,
    errands: Vec<Errand>,
    sentinel_password: Option<String>,
    certificates: Option<Certificates>,
}

impl fmt::Debug for RedisStoreBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Neither passwords nor certificates.
        f.debug_struct("RedisStoreBuilder")
            .field("prefix", &self.prefix)
            .field("call_timeout", &self.call_timeout)
            .field("connect_timeout", &self.connect_timeout)
            .field("wait", &self.wait)
            .field("startup_checks", &self.startup_checks)
            .finish_non_exhaustive()
    }
}

impl RedisStoreBuilder {
    pub(super) fn new() -> Self {
        Self {
            prefix: PREFIX.to_owned(),
            call_timeout: CALL_TIMEOUT,
            connect_timeout: CONNECT_TIMEOUT,
            wait: 0,
            startup_checks: StartupChecks::default(),
            errands: Vec::new(),
            sentinel_password: None,
            certificates: None,
        }
    }

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

    /// How many replicas have to have a claim, a completion or a checkpoint before it is believed.
    ///
    /// Replication is asynchronous: without this, a failover may forget claims, and a forgotten key
    /// runs again. With it, a failover to a replica that was waited for forgets nothing; so this has
    /// to be the number of **all** replicas that could be promoted. The replicas have a quarter of
    /// the call timeout. If fewer than this many confirm, a claim is not held (503, nothing runs), and a
    /// completion is sent again. Replays need no replicas.
    ///
    /// Such calls use connections of their own, 32 at most. An address may say it instead: `?wait=2`; one
    /// that says another number than the program is refused. Default: 0, no waiting.
    pub fn wait(mut self, replicas: u32) -> Self {
        self.wait = replicas;
        self
    }

    /// What happens if the server has settings that could end the promises. See [`Concern`].
    ///
    /// Default: [`StartupChecks::Warn`]. A pool is not looked at: call [`RedisStore::check`].
    pub fn startup_checks(mut self, startup_checks: StartupChecks) -> Self {
        self.startup_checks = startup_checks;
        self
    }

    /// For a tool of operators: what it is about to do. All rights that the user lacks for that are named when it
    /// connects, at once and with what to change, and not one after the other.
    ///
    /// Default: none. A pool is not looked at.
    pub fn errands(mut self, errands: impl IntoIterator<Item = Errand>) -> Self {
        self.errands = errands.into_iter().collect();
        self
    }

    /// Whom the Sentinels of `redis+sentinel://` let in, if they ask for a password of their own.
    pub fn sentinel_password(mut self, password: impl Into<String>) -> Self {
        self.sentinel_password = Some(password.into());
        self
    }

    /// Certificates for `rediss://`, in PEM: the authority that signed the server's, unless the
    /// system knows it, and one of one's own if the server asks for it.
    #[cfg(feature = "redis-tls")]
    pub fn tls(mut self, certificates: redis::TlsCertificates) -> Self {
        self.certificates = Some(certificates);
        self
    }

    /// Connects to an address as [`RedisStore::connect`] takes it.
    ///
    /// # Errors
    /// See [`RedisStore::connect`]; also if a setting of this builder is out of its bounds.
    pub async fn connect(self, url: &str) -> Result<RedisStore, StoreError> {
        self.check("connect")?;
        let address = RedisAddress::read(url);
        let address =
            address.map_err(|error| SetupError::from(error).into_store_error("connect"))?;
        self.connect_to(&address).await
    }

    /// The same, to an address that was read before.
    ///
    /// # Errors
    /// See [`RedisStore::connect`]; also if a setting of this builder is out of its bounds.
    pub async fn connect_to(mut self, address: &RedisAddress) -> Result<RedisStore, StoreError> {
        let prefix = self.check("connect")?;
        self.wait = self.waits_by(address).map_err(|error| error.into_store_error("connect"))?;
        let address = address.resolve(self.certificates.as_ref());
        let address =
            address.map_err(|error| SetupError::from(error).into_store_error("connect"))?;
        let connections = match self.reach(address.clone()).await {
            Ok(connections) => connections,
            Err(failure) => return Err(advice::of_no_connection(failure, &address).await),
        };
        let user = Some(address.user().into());
        self.begin(RedisStore::new(connections, prefix, self.waiting(), user)).await
    }

    fn waits_by(&self, address: &RedisAddress) -> Result<u32, SetupError> {
        match address.wait() {
            Some(wait) if self.wait != 0 && self.wait != wait => {
                Err(SetupError::TwoWaits { address: wait, builder: self.wait })
            }
            Some(wait) => Ok(wait),
            None => Ok(self.wait),
        }
    }

    async fn reach(&self, address: Address) -> Result<Connections, Failure> {
        let connect_timeout = self.connect_timeout;
        let no_dialer = |error: redis::RedisError| Failure::NotSent(error.into());
        let dialer = match address {
            Address::One(info) => Dialer::new(info, connect_timeout),
            Address::Sentinel { sentinels, name, primary } => {
                let sentinels = sentinels.into_iter().map(|info| self.let_in(info)).collect();
                Dialer::through_sentinels(sentinels, name, primary, connect_timeout)
            }
            Address::Cluster(seeds) => {
                let cluster = Cluster::connect(seeds, connect_timeout, self.call_timeout).await?;
                return Ok(Connections::Cluster(cluster));
            }
        };
        let node = Node::connect(dialer.map_err(no_dialer)?, self.call_timeout, self.wait > 0);
        Ok(Connections::Node(node.await.map_err(|error| Failure::NotSent(error.into()))?))
    }

    fn let_in(&self, sentinel: redis::ConnectionInfo) -> redis::ConnectionInfo {
        let Some(password) = &self.sentinel_password else { return sentinel };
        let settings = sentinel.redis_settings().clone().set_password(password);
        sentinel.set_redis_settings(settings)
    }

    async fn begin(&self, store: RedisStore) -> Result<RedisStore, StoreError> {
        let begun = async {
            if !self.errands.is_empty() {
                store.may(&self.errands, "connect").await?;
            }
            // Who skips the checks may be an operator, who has other rights than a service. Who only looks writes
            // nothing, not even a mark that is gone after a second.
            let looks = self.startup_checks == StartupChecks::Skip && !self.errands.is_empty();
            let work = match looks && self.errands.iter().all(|errand| errand.only_looks()) {
                true => Work::Nothing,
                false => Work::Write,
            };
            match store.check_server("connect", work, |call| call).await {
                Ok(()) => {}
                // A full server can still replay what it has, and end what runs. What else is wrong with it
                // is to be said all the same.
                Err(error) if error.kind() == StoreErrorKind::Full => {
                    tracing::warn!(
                        "Redis is full: new keys are refused until there is room, raise maxmemory"
                    );
                }
                Err(error) => return Err(store.explain(error, "connect").await),
            }
            if store.is_one_node_of_a_cluster().await {
                return Err(SetupError::OneNodeOfCluster.into_store_error("connect"));
            }
            store.look("connect", self.startup_checks).await
        };
        match begun.await {
            Ok(()) => Ok(store),
            // Whether the mark was written makes no difference: the server is not there.
            Err(error) if error.kind() == StoreErrorKind::OutcomeUnknown => {
                Err(error.of_kind(StoreErrorKind::Unavailable))
            }
            Err(error) => Err(error),
        }
    }

    fn waiting(&self) -> Option<Wait> {
        // A quarter of the time of a reply: a server that has forgotten the script lets us wait
        // twice, up to 0.1 s too long each time (it looks at its clock that often), and still the
        // shortfall is told and not a time-out.
        let limit = self.call_timeout / 4;
        let milliseconds = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        let milliseconds = milliseconds.clamp(1, LONGEST_WAIT);
        (self.wait > 0).then_some(Wait { replicas: self.wait, milliseconds })
    }

    /// Uses a pool. Nothing is sent yet: ask [`Store::ready`] whether there is a server, and whether
    /// it is recent enough.
    ///
    /// # Errors
    /// [`Backend`](StoreErrorKind::Backend) if a setting of this builder is out of its bounds.
    pub fn pool(self, pool: deadpool_redis::Pool) -> Result<RedisStore, StoreError> {
        let prefix = self.check("setup")?;
        let pool = Pooled::new(pool, self.call_timeout);
        Ok(RedisStore::new(Connections::Pool(pool), prefix, self.waiting(), None))
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
}
