//! The Redis store: one string per record, plain commands for a claim, one Lua script per verb for the rest, one key for each. (Large answers
//! alone take a second key, for the moment in which they are stored; see the [guide](crate::guide::redis).)
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
//! [`RedisStore::connect`] shares one multiplexed connection per server, watches it, and replaces it
//! when it breaks, goes silent, or turns out to lead to a replica. It follows the failovers of a group
//! that Sentinels watch, and finds each key's node in a cluster. [`RedisStore::from_pool`] is for
//! programs that run a [`deadpool_redis`] pool already; a check-out costs a round trip of its own.
//! All keep the same promises.
//!
//! # Errors
//! No call is repeated here. What a [`StoreError`] says is decided by one rule: a server that
//! answered with an error did nothing, a call that was never sent did nothing, and everything else
//! is [`OutcomeUnknown`](StoreErrorKind::OutcomeUnknown).
//!
//! # Limits
//! A verb takes at most twice the call timeout: once for a connection, once for the reply.

mod advice;
mod builder;
mod call;
mod check;
mod claim;
mod connect;
mod errand;
mod glance;
mod inspect;
mod mistaken;
mod place;
mod replicas;
mod script;
mod setup;
mod words;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

pub use ::{deadpool_redis, redis};
pub use builder::RedisStoreBuilder;
pub use check::{Concern, StartupChecks};
pub use errand::Errand;
pub use place::RedisAddress;

use builder::PREFIX;
use call::{Call, Wait};
use claim::{Clock, Seen};
use connect::{CALL_TIMEOUT, Cause, Connections, Pooled, Urgency};
use replicas::Replicas;
use script::{BadReply, Readiness, Work};
use setup::SetupError;

use ::redis::Value;
use tokio::time::{Instant, timeout_at};

use super::{Lease, Store, StoreFuture};
use crate::error::{NoAnswer, StoreError, StoreErrorKind};
use crate::mistakes::{Mistake, made};
use crate::record::{
    Claim, ClaimOutcome, CompleteOutcome, Completion, Grant, Release, ReleaseOutcome, RenewOutcome,
    Renewal, Resolution, ResolveOutcome,
};
use crate::scope::StorageKey;
use crate::token::{Fence, HolderId};

const NAME: &str = "redis";

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
    /// For claims, completions and checkpoints.
    wait: Option<Wait>,
    /// Who we are to the server, for advice; a pool does not say.
    user: Option<Box<str>>,
    clock: Clock,
    replicas: Replicas,
    /// The user was refused a right since everything was tried last. Then no key is claimed before it was tried
    /// again: what a claim starts could not be recorded.
    rights_refused: AtomicBool,
}

/// A verb: how it is sent, and how its reply is read.
struct Verb<T> {
    operation: &'static str,
    urgency: Urgency,
    unreadable: T,
    read: fn(Value) -> Result<T, BadReply>,
    /// True of an outcome that holds only if enough replicas have what was written.
    hangs_on_replicas: fn(&T) -> bool,
}

impl<T> Verb<T> {
    fn new(
        operation: &'static str,
        urgency: Urgency,
        unreadable: T,
        read: fn(Value) -> Result<T, BadReply>,
    ) -> Self {
        Self { operation, urgency, unreadable, read, hangs_on_replicas: |_| false }
    }

    fn holding_if(mut self, hangs_on_replicas: fn(&T) -> bool) -> Self {
        self.hangs_on_replicas = hangs_on_replicas;
        self
    }
}

impl RedisStore {
    /// Connects and looks at the server.
    ///
    /// | address | leads to |
    /// |---|---|
    /// | `redis://[user:password@]host[:port][/db]` | a server |
    /// | `rediss://…` | the same through TLS, with the feature `redis-tls` |
    /// | `unix:///path[?db=…&user=…&pass=…]` | a server on this machine, by its socket |
    /// | `redis+sentinel://[user:password@]host[:port],…/master-name[/db]` | the primary that these Sentinels name |
    /// | `redis+cluster://[user:password@]host[:port],…` | a cluster that these nodes belong to |
    ///
    /// `rediss+sentinel` and `rediss+cluster` speak TLS to each server. User and password are those of
    /// the servers with the records; see also
    /// [`sentinel_password`](RedisStoreBuilder::sentinel_password). Each may have `?wait=N` behind it, which is
    /// [`wait(N)`](RedisStoreBuilder::wait). [`RedisAddress`] reads an address without connecting.
    ///
    /// # Errors
    /// Printed with `{error}`, it says what to change:
    /// - [`Unavailable`](StoreErrorKind::Unavailable) for what may pass: there is no server, or it does not
    ///   answer (after a few seconds at the latest), it is a replica or still loading, the cluster is down;
    /// - [`Backend`](StoreErrorKind::Backend) for what does not: an address that cannot be read or that leads
    ///   to another kind of server than it says (a Sentinel, one node of a cluster, one that speaks TLS or
    ///   does not), a wrong user or password, a certificate that is refused, a right that is missing, a server
    ///   older than 7.0.
    pub async fn connect(url: &str) -> Result<Self, StoreError> {
        Self::builder().connect(url).await
    }

    /// A store over a pool that the program runs already.
    ///
    /// Claims use at most all slots but one, so that a renewal or a completion does not wait for
    /// them; so give the pool two slots at least. A connection that timed out, broke, or
    /// reached a replica leaves the pool. Whoever lends connections of this pool out elsewhere
    /// shares its slots with the store, which uses no more than there are now: a pool that grows
    /// later serves others.
    #[must_use]
    pub fn from_pool(pool: deadpool_redis::Pool) -> Self {
        Self::new(Connections::Pool(Pooled::new(pool, CALL_TIMEOUT)), PREFIX.into(), None, None)
    }

    /// A store with other settings.
    pub fn builder() -> RedisStoreBuilder {
        RedisStoreBuilder::new()
    }

    fn new(
        connections: Connections,
        prefix: Box<str>,
        wait: Option<Wait>,
        user: Option<Box<str>>,
    ) -> Self {
        let (clock, replicas, rights_refused) =
            (Clock::new(), Replicas::new(), AtomicBool::new(false));
        Self(Arc::new(Inner { connections, prefix, wait, user, clock, replicas, rights_refused }))
    }

    /// The key's name in Redis. The braces make the whole of it a hash tag.
    fn name(&self, key: StorageKey) -> Name {
        self.name_of(&key.text())
    }

    /// The same of a key whose text was made before.
    fn name_of(&self, text: &[u8; StorageKey::TEXT_LENGTH]) -> Name {
        let mut name = Name { bytes: [0; Name::MAX], length: 0 };
        name.push(self.0.prefix.as_bytes());
        name.push(b":{");
        name.push(text);
        name.push(b"}");
        name
    }

    #[expect(
        clippy::manual_async_fn,
        reason = "an async fn keeps all it is given twice, and every request has two of these"
    )]
    fn run<'a, T: Send + 'a>(
        &'a self,
        verb: Verb<T>,
        call: &'a Call,
        now: Instant,
    ) -> impl Future<Output = Result<T, StoreError>> + Send + 'a {
        async move {
            let fail =
                |kind, cause: Cause| StoreError::new(kind, NAME, verb.operation).with_source(cause);
            let mut shortfall = None;
            let reply = match self.0.connections.run(call, verb.urgency, now).await {
                Ok(answer) => {
                    shortfall = call.shortfall(&answer);
                    self.0.replicas.heard(&answer, shortfall.as_ref());
                    Ok(answer.value)
                }
                Err(connect::Failure::Refused(error)) => {
                    if connect::is_about_rights(&error) {
                        self.0.rights_refused.store(true, Ordering::Relaxed);
                    }
                    Err(error)
                }
                Err(failure) => return Err(self.failed(verb.operation, failure)),
            };
            match script::outcome(reply, verb.unreadable, verb.read) {
                Ok(Ok(outcome)) => match shortfall {
                    // The write stays where it is, and may or may not survive.
                    Some(shortfall) if (verb.hangs_on_replicas)(&outcome) => {
                        Err(fail(StoreErrorKind::OutcomeUnknown, shortfall.into()))
                    }
                    Some(_) | None => Ok(outcome),
                },
                Ok(Err(bad_reply)) => Err(fail(StoreErrorKind::OutcomeUnknown, bad_reply.into())),
                Err(error) => Err(self.failed(verb.operation, connect::Failure::Refused(error))),
            }
        }
    }

    /// The error of a call, in words that say what to change.
    fn failed(&self, operation: &'static str, failure: connect::Failure) -> StoreError {
        let kind = failure.kind();
        let cause = failure.into_cause_for(self.0.user.as_deref());
        StoreError::new(kind, NAME, operation).with_source(cause)
    }

    /// Goes on with a claim by a plain command that the server refused: for the moment it takes no writes, and what is there
    /// can be replayed all the same. `None` if it takes the script.
    async fn claimed_nothing(
        &self,
        name: &[u8],
        claim: &Claim,
        fence: Fence,
        refusal: StoreError,
    ) -> Result<Option<ClaimOutcome<Grant>>, StoreError> {
        let seen = self.look_plainly(&claim::look(name), Instant::now()).await?;
        if seen.is_new() { Err(refusal) } else { Ok(seen.judge(claim, fence, &self.0.clock).0) }
    }

    /// Looks before it claims, while replicas are away: to claim takes as long as they are waited for. `None` if the key is
    /// new.
    async fn look_first(
        &self,
        name: &[u8],
        claim: &Claim,
        fence: Fence,
    ) -> Result<Option<Option<ClaimOutcome<Grant>>>, StoreError> {
        let seen = self.look_plainly(&claim::look(name), Instant::now()).await?;
        if seen.is_new() {
            return Ok(None);
        }
        // What may be ours is for the script to say, which waits.
        let (seen, _) = seen.judge(claim, fence, &self.0.clock);
        Ok(Some(seen.filter(|outcome| !matches!(outcome, ClaimOutcome::Acquired(_)))))
    }

    /// Claims by a plain command, and by the script if that takes one.
    async fn claim_now(
        &self,
        key: StorageKey,
        claim: &Claim,
    ) -> Result<ClaimOutcome<Lease>, StoreError> {
        let mut now = Instant::now();
        let until = now + self.0.connections.answer_within();
        if self.0.rights_refused.load(Ordering::Relaxed) {
            if let Some(outcome) = in_time(until, self.try_rights(key, claim)).await? {
                return Ok(outcome.map(|grant| Lease::new(key, claim, grant)));
            }
            // The claim has its own time, from when it is sent.
            now = Instant::now();
        }
        let (name, fence) = (self.name(key), self.0.clock.fence(now));
        let outcome = match claim::plain(&name, claim, fence) {
            None => None,
            Some(call) => {
                let looked = match self.0.wait.is_some() && self.0.replicas.are_away(now) {
                    true => in_time(until, self.look_first(&name, claim, fence)).await?,
                    false => None,
                };
                match looked {
                    Some(seen) => seen,
                    None => match self.look_plainly(&call.waiting(self.0.wait), now).await {
                        Ok(seen) => {
                            let (outcome, heard) = seen.judge(claim, fence, &self.0.clock);
                            if let Some(outcome) = outcome {
                                let text = name.text();
                                return Ok(outcome
                                    .map(|grant| Lease::named(key, text, claim, grant, heard)));
                            }
                            None
                        }
                        Err(error) if claim::writes_are_refused(&error) => {
                            in_time(until, self.claimed_nothing(&name, claim, fence, error)).await?
                        }
                        Err(error) => return Err(error),
                    },
                }
            }
        };
        let outcome = match outcome {
            Some(outcome) => outcome,
            None if made(Mistake::RedisFreshHolder) => {
                return self.claim_as_another(key, *claim).await;
            }
            // The plain command may have written something, whatever becomes of the script.
            None => in_time(until, self.claim_by_script(key, claim)).await.map_err(in_doubt)?,
        };
        Ok(outcome.map(|grant| Lease::new(key, claim, grant)))
    }

    async fn claim_by_script(
        &self,
        key: StorageKey,
        claim: &Claim,
    ) -> Result<ClaimOutcome<Grant>, StoreError> {
        let call = script::claim(&self.name(key), claim).waiting(self.0.wait);
        let verb = Verb::new("claim", Urgency::Ordinary, ClaimOutcome::Unreadable, script::claimed)
            .holding_if(|outcome| matches!(outcome, ClaimOutcome::Acquired(_)));
        self.run(verb, &call, Instant::now()).await
    }

    /// A mistake: under another holder than the claim before it.
    fn claim_as_another(
        &self,
        key: StorageKey,
        claim: Claim,
    ) -> StoreFuture<'_, ClaimOutcome<Lease>> {
        Box::pin(async move {
            let claim = Claim { holder: HolderId::random(), ..claim };
            let outcome = self.claim_by_script(key, &claim).await?;
            Ok(outcome.map(|grant| Lease::new(key, &claim, grant)))
        })
    }

    fn look_plainly<'a>(
        &'a self,
        call: &'a Call,
        now: Instant,
    ) -> impl Future<Output = Result<Seen, StoreError>> + Send + 'a {
        let verb = Verb::new("claim", Urgency::Ordinary, Seen::foreign(), claim::seen);
        self.run(verb.holding_if(Seen::is_new), call, now)
    }

    /// Tries every command again, after one was refused. `None` if all are allowed; else what is there can be replayed
    /// all the same, and nothing is claimed.
    async fn try_rights(
        &self,
        key: StorageKey,
        claim: &Claim,
    ) -> Result<Option<ClaimOutcome<Grant>>, StoreError> {
        let refusal = match self.check_server("claim", Work::Everything, |call| call).await {
            Ok(()) => {
                self.0.rights_refused.store(false, Ordering::Relaxed);
                return Ok(None);
            }
            Err(refusal) => refusal,
        };
        let seen = self.look_plainly(&claim::look(&self.name(key)), Instant::now()).await;
        let seen = seen.ok().filter(|seen| !seen.is_new());
        let outcome = seen.and_then(|seen| seen.judge(claim, claim::ANY_FENCE, &self.0.clock).0);
        outcome.map(Some).ok_or(refusal)
    }

    /// Every command that requests need, on the server that has this key, with the scripts in full and by their names.
    async fn ready_at(&self, mark: &str) -> Result<(), StoreError> {
        let work = Work::Everything;
        self.check_server_at(mark, "ready", work, Call::in_full).await?;
        self.check_server_at(mark, "ready", work, |call| call.waiting(self.0.wait)).await
    }

    /// A key that nobody ever writes.
    fn no_mark(&self) -> String {
        format!("{}:{{ready}}:none", self.0.prefix)
    }

    async fn check_server(
        &self,
        operation: &'static str,
        work: Work,
        adapt: impl FnOnce(Call) -> Call,
    ) -> Result<(), StoreError> {
        let mark = match work {
            Work::Nothing => self.no_mark(),
            Work::Write | Work::Everything => format!("{}:{{ready}}", self.0.prefix),
        };
        self.check_server_at(&mark, operation, work, adapt).await
    }

    /// The same with this key, which leads to one of the servers.
    async fn check_server_at(
        &self,
        mark: &str,
        operation: &'static str,
        work: Work,
        adapt: impl FnOnce(Call) -> Call,
    ) -> Result<(), StoreError> {
        let call = adapt(script::ready(mark.as_bytes(), work));
        // It overwrites whatever is under its key, so nothing there can be unreadable.
        let verb = Verb::new(operation, Urgency::Urgent, Readiness::Ready, script::readiness)
            .holding_if(|readiness| *readiness == Readiness::Ready);
        match self.run(verb, &call, Instant::now()).await? {
            Readiness::Ready => Ok(()),
            Readiness::TooOld => Err(SetupError::TooOld.into_store_error(operation)),
        }
    }
}

/// How many servers of a cluster are asked at once whether they are ready.
const ASKED_AT_ONCE: usize = 32;

/// A further call of a claim, which as a whole takes no longer than any other verb. Boxed: what is rare must not
/// make the future of every claim larger.
fn in_time<'a, T: 'a>(
    until: Instant,
    call: impl Future<Output = Result<T, StoreError>> + Send + 'a,
) -> StoreFuture<'a, T> {
    Box::pin(async move {
        let since = Instant::now();
        timeout_at(until, call).await.unwrap_or_else(|_| {
            let unknown = StoreError::new(StoreErrorKind::OutcomeUnknown, NAME, "claim");
            // A millisecond more than was left, without its fractions.
            let within = until.saturating_duration_since(since).as_millis() + 1;
            let within = Duration::from_millis(u64::try_from(within).unwrap_or(u64::MAX));
            let limit = "at most twice the store's call_timeout";
            Err(unknown.with_source(NoAnswer { within, limit, holdup: None }))
        })
    })
}

/// What a claim is of which one command was answered and the next was not sent: that certainly changed nothing, but
/// the one before may have.
fn in_doubt(error: StoreError) -> StoreError {
    match error.kind() {
        StoreErrorKind::Unavailable => {
            StoreError::new(StoreErrorKind::OutcomeUnknown, NAME, "claim").with_source(error)
        }
        StoreErrorKind::OutcomeUnknown
        | StoreErrorKind::Full
        | StoreErrorKind::Backend
        | StoreErrorKind::RolledBack => error,
    }
}

/// The name of a key, without an allocation: it is made for every call.
struct Name {
    bytes: [u8; Self::MAX],
    length: usize,
}

impl Name {
    /// The longest prefix, three marks, and a storage key in base64url.
    const MAX: usize = builder::MAX_PREFIX + 3 + StorageKey::TEXT_LENGTH;

    /// The storage key in it.
    fn text(&self) -> [u8; StorageKey::TEXT_LENGTH] {
        let mut text = [0; StorageKey::TEXT_LENGTH];
        let from = self.length - 1 - text.len();
        text.copy_from_slice(&self.bytes[from..self.length - 1]);
        text
    }

    fn push(&mut self, bytes: &[u8]) {
        self.bytes[self.length..self.length + bytes.len()].copy_from_slice(bytes);
        self.length += bytes.len();
    }
}

impl std::ops::Deref for Name {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.length]
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

    /// Twice the call timeout: once for a connection, once for the reply.
    fn answers_within(&self) -> Option<Duration> {
        Some(self.0.connections.answer_within())
    }

    fn claim<'a>(
        &'a self,
        key: StorageKey,
        claim: &'a Claim,
    ) -> StoreFuture<'a, ClaimOutcome<Lease>> {
        Box::pin(self.claim_now(key, claim))
    }

    fn renew<'a>(
        &'a self,
        lease: &'a Lease,
        renewal: &'a Renewal,
    ) -> StoreFuture<'a, RenewOutcome> {
        Box::pin(async move {
            // A lost renewal ends the lease early, which is safe. A lost checkpoint is not: without
            // one, a route that marks its effects takes the key for untouched.
            let wait = renewal.checkpoint.as_ref().and(self.0.wait);
            let call = script::renew(&self.name(lease.key()), lease.owner(), renewal).waiting(wait);
            let unreadable = RenewOutcome::Unreadable;
            let verb = Verb::new("renew", Urgency::Urgent, unreadable, script::renewed).holding_if(
                |outcome| matches!(outcome, RenewOutcome::Renewed | RenewOutcome::Restored),
            );
            self.run(verb, &call, Instant::now()).await
        })
    }

    fn complete<'a>(
        &'a self,
        lease: &'a Lease,
        completion: &'a Completion,
    ) -> StoreFuture<'a, CompleteOutcome> {
        Box::pin(async move {
            let now = Instant::now();
            let call = {
                let name = match lease.text() {
                    Some(text) => self.name_of(text),
                    None => self.name(lease.key()),
                };
                let (by, at) = (lease.owner(), lease.about_now(now));
                script::complete(&name, by, at, completion).waiting(self.0.wait)
            };
            let unreadable = CompleteOutcome::Unreadable;
            let read = if call.is_beside() { script::completed_large } else { script::completed };
            let verb =
                Verb::new("complete", Urgency::Urgent, unreadable, read).holding_if(|outcome| {
                    use CompleteOutcome::{Healed, Restored, Stored};
                    matches!(outcome, Stored | Healed | Restored)
                });
            self.run(verb, &call, now).await
        })
    }

    fn release<'a>(
        &'a self,
        lease: &'a Lease,
        release: &'a Release,
    ) -> StoreFuture<'a, ReleaseOutcome> {
        Box::pin(async move {
            let call = script::release(&self.name(lease.key()), lease.owner(), release);
            let unreadable = ReleaseOutcome::Unreadable;
            let verb = Verb::new("release", Urgency::Urgent, unreadable, script::released);
            self.run(verb, &call, Instant::now()).await
        })
    }

    fn resolve<'a>(
        &'a self,
        key: StorageKey,
        resolution: &'a Resolution,
    ) -> StoreFuture<'a, ResolveOutcome> {
        Box::pin(async move {
            let call = script::resolve(&self.name(key), resolution);
            let unreadable = ResolveOutcome::Unreadable;
            let verb = Verb::new("resolve", Urgency::Ordinary, unreadable, script::resolved);
            self.run(verb, &call, Instant::now()).await
        })
    }

    /// Runs a script that uses every command that requests need, on a key that is gone afterwards: in full,
    /// and by its name. Fails with [`Backend`](StoreErrorKind::Backend) and the command's name when the
    /// user may not run one of them any more. Fails with [`Full`](StoreErrorKind::Full) when there is no room
    /// for new keys: what is stored can still be replayed then, and what runs can still end. With
    /// [`wait`](RedisStoreBuilder::wait) it fails while replicas are missing. Of a cluster every master is asked,
    /// all at once, and the one that fails is named.
    fn ready(&self) -> StoreFuture<'_, ()> {
        Box::pin(async move {
            let marks = self.0.connections.marks(&self.0.prefix);
            let mut failed: Option<(Option<&str>, StoreError)> = None;
            for some in marks.chunks(ASKED_AT_ONCE) {
                let asked = some.iter().map(|(_, mark)| self.ready_at(mark));
                let answers = futures_util::future::join_all(asked).await;
                for ((name, _), answer) in some.iter().zip(answers) {
                    let Err(error) = answer else { continue };
                    // One that is away counts for more than the others, who only say that the cluster is down.
                    let is_worse = failed.as_ref().is_none_or(|(_, known)| {
                        connect::is_told(known) && !connect::is_told(&error)
                    });
                    if is_worse {
                        failed = Some((name.as_deref(), error));
                    }
                }
            }
            match failed {
                None => Ok(()),
                Some((name, error)) => {
                    let error = self.explain(error, "ready").await;
                    Err(match name {
                        Some(name) => setup::of_master(name, &error),
                        None => error,
                    })
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_whole_name_of_a_key_hangs_on_its_hash_tag() {
        let manager = deadpool_redis::Manager::new("redis://127.0.0.1:1/").unwrap();
        let pool = deadpool_redis::Pool::builder(manager).build().unwrap();
        let store = RedisStore::from_pool(pool);
        let key = StorageKey::from_bytes([0; 24]);
        assert_eq!(&*store.name(key), b"idem:{AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA}");
        assert!(!format!("{store:?}").contains("127.0.0.1"));
    }
}
