//! Looking at the server before it is trusted.

use std::collections::BTreeSet;
use std::time::Duration;

use ::redis::{Cmd, Value};
use bytes::Bytes;

use super::call::{Call, Shortfall};
use super::connect::Failure;
use super::script::{LARGE, Work};
use super::setup::SetupError;
use super::{NAME, RedisStore};
use crate::error::{StoreError, StoreErrorKind};
use crate::fingerprint::{Fingerprint, Fingerprints, RecipeId};
use crate::record::{
    Claim, ClaimOutcome, Completion, Effects, Finding, OnExpired, Release, Renewal, Resolution,
    Terms, Verdict, Writes,
};
use crate::scope::StorageKey;
use crate::store::{Lease, Store as _};
use crate::token::{Attempt, HolderId};

/// What to do with [`Concern`]s when a store connects.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub enum StartupChecks {
    /// Log each one as a warning.
    #[default]
    Warn,
    /// Do not connect. What could not be looked at is only logged.
    Refuse,
    /// Do not look.
    Skip,
}

/// A reason to fear that a server loses records, or refuses to keep them. As text it says what to
/// change.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd, thiserror::Error)]
#[non_exhaustive]
pub enum Concern {
    /// Memory pressure deletes records.
    #[error(
        "maxmemory-policy is {policy}: under memory pressure records are deleted, and a deleted \
         record is a duplicate payment; set `maxmemory-policy noeviction`"
    )]
    Evicts {
        /// `maxmemory-policy`.
        policy: String,
    },
    /// A restart forgets everything.
    #[error(
        "the append-only file is off: a restart forgets records, and a snapshot is minutes old; \
         set `appendonly yes`"
    )]
    NotPersistent,
    /// A power cut loses what the kernel had not written yet.
    #[error(
        "appendfsync is no: a power cut loses up to half a minute of records; set `appendfsync \
         everysec`, or `always`"
    )]
    NotSynced,
    /// The append-only file cannot be written at this moment.
    #[error("the server cannot write its append-only file; look at its disk and its log")]
    CannotPersist,
    /// Claims will be refused until more replicas are there.
    #[error(
        "{confirmed} of the {needed} replicas that wait({needed}) asks for confirmed a write: until \
         they do, new keys get 503; attach replicas, or lower wait(..)"
    )]
    TooFewReplicas {
        /// How many confirmed.
        confirmed: u32,
        /// [`wait`](super::RedisStoreBuilder::wait).
        needed: u32,
    },
    /// Claims will be refused until the server counts replicas for this user.
    #[error("{reason}: until then, new keys get 503, whatever replicas there are")]
    CannotWait {
        /// What the server said, and what to change.
        reason: String,
    },
    /// A failover to a replica that was not waited for forgets claims.
    #[error(
        "{replicas} replicas and wait({waited}): a failover to a replica that was not waited for \
         forgets claims; set wait({replicas}) if each of them could be promoted"
    )]
    ReplicasNotWaitedFor {
        /// How many replicas there are.
        replicas: u32,
        /// [`wait`](super::RedisStoreBuilder::wait).
        waited: u32,
    },
    /// Most keys will be refused.
    #[error(
        "the server is one node of a cluster, and has a part of the keys only; connect to \
         redis+cluster://host:port,host:port"
    )]
    OneNodeOfCluster,
    /// Some keys will be refused.
    #[error(
        "{slots} of the 16384 slots of the cluster are assigned to no node, and their keys get 503; \
         `redis-cli --cluster fix` assigns them"
    )]
    SlotsOfNobody {
        /// How many.
        slots: usize,
    },
    /// A question was not answered, so nothing is known.
    #[error(
        "{command} was refused ({reason}), so eviction, persistence and replicas could not be \
         looked at; grant the user `+info +config|get`, or look yourself: noeviction, appendonly yes"
    )]
    CannotLook {
        /// The command.
        command: &'static str,
        /// What the server said.
        reason: String,
    },
}

/// How long the records of a check are kept: no time at all, but enough for its few calls.
const KEPT: Duration = Duration::from_secs(2);

impl RedisStore {
    /// Looks at the server: runs every script on a key of its own that is gone after seconds, and
    /// reads the settings that decide about the loss of records. Empty if there is nothing to say.
    ///
    /// # Errors
    /// A script cannot be run: the server is not there, is a replica, has no room, or the user lacks
    /// a right that the cause names.
    pub async fn check(&self) -> Result<Vec<Concern>, StoreError> {
        self.concerns("check").await
    }

    /// Looks at the server, and does what the setting says.
    pub(super) async fn look(
        &self,
        operation: &'static str,
        checks: StartupChecks,
    ) -> Result<(), StoreError> {
        if checks == StartupChecks::Skip {
            return Ok(());
        }
        let concerns = self.concerns(operation).await?;
        for concern in &concerns {
            tracing::warn!("Redis: {concern}");
        }
        let known: Vec<_> = concerns
            .into_iter()
            .filter(|concern| !matches!(concern, Concern::CannotLook { .. }))
            .collect();
        if checks == StartupChecks::Refuse && !known.is_empty() {
            return Err(SetupError::Unsafe(known).into_store_error(operation));
        }
        Ok(())
    }

    async fn concerns(&self, operation: &'static str) -> Result<Vec<Concern>, StoreError> {
        // A set: the masters of a cluster are set up alike, and one message of a kind is enough.
        let mut concerns = BTreeSet::new();
        match self.try_every_script(operation).await? {
            Some(Shortfall::TooFew { confirmed, needed }) => {
                concerns.insert(Concern::TooFewReplicas { confirmed, needed });
            }
            Some(refused @ Shortfall::Refused(_)) => {
                concerns.insert(Concern::CannotWait { reason: refused.to_string() });
            }
            None => {}
        }
        if self.is_one_node_of_a_cluster().await {
            concerns.insert(Concern::OneNodeOfCluster);
        }
        match self.0.connections.slots_of_nobody() {
            0 => {}
            slots => {
                concerns.insert(Concern::SlotsOfNobody { slots });
            }
        }
        let mut info = Cmd::new();
        info.arg("INFO");
        let mut policy = Cmd::new();
        policy.arg("CONFIG").arg("GET").arg("appendfsync");
        for said in self.0.connections.ask(&info).await {
            match answered(said, operation)? {
                Ok(info) => concerns.extend(self.of_info(&info)),
                Err(reason) => {
                    concerns.insert(Concern::CannotLook { command: "INFO", reason });
                }
            }
        }
        for said in self.0.connections.ask(&policy).await {
            match answered(said, operation)? {
                Ok(said) if said.lines().any(|line| line == "no") => {
                    concerns.insert(Concern::NotSynced);
                }
                Ok(_) => {}
                Err(reason) => {
                    concerns.insert(Concern::CannotLook { command: "CONFIG GET", reason });
                }
            }
        }
        Ok(concerns.into_iter().collect())
    }

    fn of_info(&self, info: &str) -> Vec<Concern> {
        let field = |name: &str| {
            info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
        };
        let mut concerns = Vec::new();
        if let Some(policy) = field("maxmemory_policy").filter(|policy| *policy != "noeviction") {
            concerns.push(Concern::Evicts { policy: policy.to_owned() });
        }
        if field("aof_enabled") == Some("0") {
            concerns.push(Concern::NotPersistent);
        }
        if field("aof_last_write_status").is_some_and(|status| status != "ok") {
            concerns.push(Concern::CannotPersist);
        }
        let replicas = field("connected_slaves").and_then(|count| count.parse().ok()).unwrap_or(0);
        let waited = self.0.wait.map_or(0, |wait| wait.replicas);
        if replicas > waited {
            concerns.push(Concern::ReplicasNotWaitedFor { replicas, waited });
        }
        concerns
    }

    /// Runs every script once. What the user may not do shows here, and not in the first payment.
    async fn try_every_script(
        &self,
        operation: &'static str,
    ) -> Result<Option<Shortfall>, StoreError> {
        match self.try_them(operation).await {
            Ok(shortfall) => Ok(shortfall),
            // They cannot be tried for now. What is wrong with the settings shows all the same.
            Err(error) if error.kind() == StoreErrorKind::Full => Ok(None),
            Err(error) => Err(self.explain(error, operation).await),
        }
    }

    async fn try_them(&self, operation: &'static str) -> Result<Option<Shortfall>, StoreError> {
        let terms = Terms { lease: KEPT, retention: KEPT, unknown_retention: KEPT };
        let mut key = [0; 24];
        key[..16].copy_from_slice(HolderId::random().as_bytes());
        let key = StorageKey::from_bytes(key);
        let print = Fingerprint::from_stored(RecipeId::from_bytes([0; 4]), [0; 32]);
        let claim = Claim {
            holder: HolderId::random(),
            fingerprints: Fingerprints::one(print),
            terms,
            on_expired: OnExpired::Refuse,
            effects: Effects::Anywhere,
        };
        // A server that has the scripts is sent their hashes only, until it forgets them.
        self.check_server(operation, Work::Everything, Call::in_full).await?;
        let lease = match self.claim(key, &claim).await {
            Ok(ClaimOutcome::Acquired(lease)) => lease,
            Ok(_) => return Err(StoreError::new(StoreErrorKind::Backend, NAME, operation)),
            Err(error) => {
                let cause = error.reason().and_then(|cause| cause.downcast_ref::<Shortfall>());
                return match cause.cloned() {
                    Some(shortfall) => Ok(Some(shortfall)),
                    None => Err(error),
                };
            }
        };
        self.try_the_others(key, &lease, &claim).await?;
        // Once more, now that the server holds the scripts: they may have taken the last room.
        self.check_server(operation, Work::Everything, |call| call).await?;
        Ok(None)
    }

    async fn try_the_others(
        &self,
        key: StorageKey,
        lease: &Lease,
        claim: &Claim,
    ) -> Result<(), StoreError> {
        let terms = claim.terms;
        let holder = lease.owner().holder;
        let attempt = Attempt::from_number(1);
        let finding = Finding::NothingHappened;
        self.renew(lease, &Renewal { terms, checkpoint: None }).await?;
        self.release(lease, &Release { terms, verdict: Verdict::Unknown }).await?;
        self.resolve(key, &Resolution { holder, attempt, finding, terms }).await?;
        let response = Bytes::from_static(b"check");
        self.complete(lease, &Completion { terms, response, writes: Writes::Keep }).await?;
        // A large response takes other commands: where there is no record, where there is one, and when
        // it is read.
        let mut key = *key.as_bytes();
        key[0] ^= 1;
        let (key, response) = (StorageKey::from_bytes(key), Bytes::from_static(&[0; LARGE]));
        let lease = Lease::new(key, claim, lease.grant().clone());
        let completion = Completion { terms, response, writes: Writes::Keep };
        self.complete(&lease, &completion).await?;
        self.complete(&lease, &completion).await?;
        self.claim(key, &Claim { holder: HolderId::random(), ..*claim }).await?;
        Ok(())
    }
}

/// What was said, or why the server refused to say it.
fn answered(
    said: Result<Value, Failure>,
    operation: &'static str,
) -> Result<Result<String, String>, StoreError> {
    match said {
        Ok(value) => Ok(Ok(text(&value))),
        Err(Failure::Refused(error)) => Ok(Err(error.to_string())),
        Err(failure) => {
            let error = StoreError::new(failure.kind(), NAME, operation);
            Err(error.with_source(failure.into_cause()).saying_why())
        }
    }
}

/// The text of a reply; the parts of a list on lines of their own.
#[allow(clippy::wildcard_enum_match_arm, reason = "most kinds of values are never an answer")]
pub(super) fn text(value: &Value) -> String {
    match value {
        Value::BulkString(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        Value::SimpleString(text) | Value::VerbatimString { text, .. } => text.clone(),
        Value::Array(values) => values.iter().map(text).collect::<Vec<_>>().join("\n"),
        Value::Map(pairs) => {
            let lines =
                pairs.iter().map(|(name, value)| format!("{}\n{}", text(name), text(value)));
            lines.collect::<Vec<_>>().join("\n")
        }
        Value::Int(number) => number.to_string(),
        // Nothing that is asked here is answered with anything else.
        _ => String::new(),
    }
}
