//! Protection of what rests in a store: responses and checkpoints are sealed before any store sees them.
//!
//! AES-256-GCM-SIV (RFC 8452), bound to the storage key: a record that is copied to another key does not open,
//! nor does a response that is put in the place of a checkpoint. Sealing the same bytes for the same holder
//! gives the same bytes, since a completion that is sent again after a lost reply must be recognised; this cipher
//! is made for that: equal nonces with different texts reveal nothing but that they differ.
//!
//! ```text
//!  0   1  version (0xE1: no version of an unprotected response)
//!  1   4  key id, big-endian
//!  5  12  nonce, from storage key, holder and kind
//! 17   .  ciphertext and 16 bytes of tag
//! ```

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use aes_gcm_siv::aead::{Aead as _, Payload};
use aes_gcm_siv::{Aes256GcmSiv, KeyInit as _, Nonce};
use bytes::{BufMut as _, Bytes, BytesMut};
use sha2::{Digest as _, Sha256};

use super::{
    AuditCursor, AuditStep, Contents, Glance, Inspect, Lease, Listing, LogId, Sealing, Sight,
    Store, StoreFuture, TrailEntry, Wanted, seal,
};
use crate::record::{
    Amend, Claim, ClaimOutcome, CompleteOutcome, Completion, Current, Finding, Forget,
    ForgetOutcome, Release, ReleaseOutcome, RenewOutcome, Renewal, Resolution, ResolveOutcome,
    State,
};
use crate::scope::StorageKey;
use crate::token::HolderId;

const VERSION: u8 = seal::VERSION;
const NONCE_LENGTH: usize = 12;
const HEADER_LENGTH: usize = 1 + 4 + NONCE_LENGTH;

/// Names a key in a record, so that records of older keys can still be opened.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct ProtectionKeyId(u32);

impl ProtectionKeyId {
    /// The id with this number. It stands in records, readable; it is no secret.
    #[must_use]
    pub const fn from_number(number: u32) -> Self {
        Self(number)
    }
}

/// The keys that records are sealed with and opened by.
///
/// # Rotation
/// 1. Deploy the new key with [`also_open`](Self::also_open), the old one first in use: every process can read both.
/// 2. Deploy the new key as the current one, the old one with `also_open`.
/// 3. After the longest retention, leave the old one out.
///
/// A record whose key is not there is *unreadable*: refused with 503, never run over, never deleted.
#[derive(Clone)]
#[must_use]
pub struct ProtectionKeys {
    current: (ProtectionKeyId, Arc<Aes256GcmSiv>),
    older: Vec<(ProtectionKeyId, Arc<Aes256GcmSiv>)>,
    unprotected: Unprotected,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Unprotected {
    Refused,
    Opened,
}

impl ProtectionKeys {
    /// Seals with this key: 32 random bytes from a key management system.
    pub fn new(id: ProtectionKeyId, key: &[u8; 32]) -> Self {
        let current = (id, Arc::new(Aes256GcmSiv::new(key.into())));
        Self { current, older: Vec::new(), unprotected: Unprotected::Refused }
    }

    /// Also opens what was sealed with this key.
    pub fn also_open(mut self, id: ProtectionKeyId, key: &[u8; 32]) -> Self {
        self.older.push((id, Arc::new(Aes256GcmSiv::new(key.into()))));
        self
    }

    /// Also opens records that are not sealed: for one retention after protection is switched on. While it is
    /// on, whoever can write to the store can forge answers.
    pub fn also_open_unprotected(mut self) -> Self {
        self.unprotected = Unprotected::Opened;
        self
    }

    fn key(&self, id: ProtectionKeyId) -> Option<&Aes256GcmSiv> {
        let mut all = std::iter::once(&self.current).chain(&self.older);
        all.find(|(known, _)| *known == id).map(|(_, key)| &**key)
    }

    fn seal(&self, kind: Kind, key: StorageKey, holder: HolderId, text: &Bytes) -> Bytes {
        let (id, cipher) = &self.current;
        let nonce = nonce(kind, key, holder);
        let payload = Payload { msg: text, aad: &context(kind, key, *id) };
        let sealed = cipher
            .encrypt(&Nonce::from(nonce), payload)
            .expect("a response is far shorter than the 64 GiB that the cipher takes");
        let mut bytes = BytesMut::with_capacity(HEADER_LENGTH + sealed.len());
        bytes.put_u8(VERSION);
        bytes.put_u32(id.0);
        bytes.put_slice(&nonce);
        bytes.put_slice(&sealed);
        bytes.freeze()
    }

    /// The holder as it is named in the store: the mark of this key is part of it. The same for the same holder,
    /// and for one that has the mark.
    fn named(&self, key: StorageKey, holder: HolderId) -> HolderId {
        let (id, cipher) = &self.current;
        if seal::is_protected(key, holder) && has_mark(*id, cipher, key, holder) {
            return holder;
        }
        let random = nonce(Kind::Holder, key, holder);
        let mut bytes = [0; 16];
        bytes[..seal::RANDOM].copy_from_slice(&random[..seal::RANDOM]);
        bytes[seal::RANDOM..seal::OPEN]
            .copy_from_slice(&seal::public(key, &random[..seal::RANDOM]));
        let mark = mark(*id, cipher, key, &bytes[..seal::OPEN]);
        bytes[seal::OPEN..].copy_from_slice(&mark);
        HolderId::from_bytes(bytes)
    }

    /// Whether what is sealed with these keys can be read by who claimed with this holder.
    fn fit(&self, key: StorageKey, holder: HolderId) -> bool {
        let mut all = std::iter::once(&self.current).chain(&self.older);
        match seal::is_protected(key, holder) {
            true => all.any(|(id, cipher)| has_mark(*id, cipher, key, holder)),
            false => self.unprotected == Unprotected::Opened,
        }
    }

    /// The text, or `None` if it was not sealed here by a key that is known.
    fn open(&self, kind: Kind, key: StorageKey, sealed: &Bytes) -> Option<Bytes> {
        if sealed.first() != Some(&VERSION) {
            return (self.unprotected == Unprotected::Opened).then(|| sealed.clone());
        }
        let (header, text) = sealed.split_at_checked(HEADER_LENGTH)?;
        let id = ProtectionKeyId(u32::from_be_bytes(header[1..5].try_into().ok()?));
        let nonce: [u8; NONCE_LENGTH] = header[5..].try_into().ok()?;
        let payload = Payload { msg: text, aad: &context(kind, key, id) };
        self.key(id)?.decrypt(&Nonce::from(nonce), payload).ok().map(Bytes::from)
    }
}

impl fmt::Debug for ProtectionKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let older: Vec<_> = self.older.iter().map(|(id, _)| id.0).collect();
        f.debug_struct("ProtectionKeys")
            .field("current", &self.current.0.0)
            .field("older", &older)
            .field("unprotected", &self.unprotected)
            .finish()
    }
}

/// What is sealed; one cannot stand in the place of the other.
#[derive(Clone, Copy)]
enum Kind {
    Response = 1,
    Checkpoint = 2,
    Holder = 3,
}

/// The same for the same text, so that what is sent again is recognised.
fn digest(text: &[u8]) -> [u8; 16] {
    let digest: [u8; 32] = Sha256::digest(text).into();
    let mut short = [0; 16];
    short.copy_from_slice(&digest[..16]);
    short
}

/// The bytes of a holder that only who has the key can make.
fn mark(id: ProtectionKeyId, cipher: &Aes256GcmSiv, key: StorageKey, open: &[u8]) -> [u8; 4] {
    let mut aad = context(Kind::Holder, key, id);
    aad.extend(open);
    // Nothing is sealed but the tag, and this cipher's tags say nothing of the key under an equal nonce.
    let payload = Payload { msg: &[], aad: &aad };
    let tag = cipher.encrypt(&Nonce::from([0; NONCE_LENGTH]), payload);
    let tag = tag.expect("an empty text is not too long");
    [tag[0], tag[1], tag[2], tag[3]]
}

fn has_mark(id: ProtectionKeyId, cipher: &Aes256GcmSiv, key: StorageKey, holder: HolderId) -> bool {
    let (open, rest) = holder.as_bytes().split_at(seal::OPEN);
    rest == mark(id, cipher, key, open)
}

/// What a sealed text is bound to.
fn context(kind: Kind, key: StorageKey, id: ProtectionKeyId) -> Vec<u8> {
    let mut context = b"tower-idempotency protected 1".to_vec();
    context.push(VERSION);
    context.push(kind as u8);
    context.extend(id.0.to_be_bytes());
    context.extend(key.as_bytes());
    context
}

/// The same for the same holder, whose id is 128 random bits.
fn nonce(kind: Kind, key: StorageKey, holder: HolderId) -> [u8; NONCE_LENGTH] {
    let mut hasher = Sha256::new();
    hasher.update(b"tower-idempotency protection nonce 1");
    hasher.update([kind as u8]);
    hasher.update(key.as_bytes());
    hasher.update(holder.as_bytes());
    let digest: [u8; 32] = hasher.finalize().into();
    let mut nonce = [0; NONCE_LENGTH];
    nonce.copy_from_slice(&digest[..NONCE_LENGTH]);
    nonce
}

/// A store around another one that sees neither responses nor checkpoints. Feature `protect`.
///
/// What stays readable in the store: the hash of scope and key, the fingerprint (a SHA-256 of the request, so
/// give it a [secret](crate::Recipe::keyed) where bodies can be guessed), times, state, lengths.
///
/// # Example
/// ```
/// use tower_idempotency::store::{Protected, ProtectionKeyId, ProtectionKeys};
/// use tower_idempotency::{Config, IdempotencyLayer, MemoryStore, Scope};
///
/// # fn key_from_kms() -> [u8; 32] { [7; 32] }
/// let keys = ProtectionKeys::new(ProtectionKeyId::from_number(1), &key_from_kms());
/// let store = Protected::new(MemoryStore::new(), keys);
/// let layer = IdempotencyLayer::new(Config::builder().scope(Scope::global()).build()?, store);
/// # let _ = layer;
/// # Ok::<(), tower_idempotency::ConfigError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Protected<S> {
    store: S,
    keys: ProtectionKeys,
}

impl<S> Protected<S> {
    /// Protects what goes into this store.
    pub fn new(store: S, keys: ProtectionKeys) -> Self {
        Self { store, keys }
    }

    /// The store inside.
    pub fn get_ref(&self) -> &S {
        &self.store
    }
}

impl<S: Store> Store for Protected<S> {
    fn name(&self) -> &'static str {
        self.store.name()
    }

    fn answers_within(&self) -> Option<Duration> {
        self.store.answers_within()
    }

    fn holdup(&self) -> Option<&'static str> {
        self.store.holdup()
    }

    fn claim<'a>(
        &'a self,
        key: StorageKey,
        claim: &'a Claim,
    ) -> StoreFuture<'a, ClaimOutcome<Lease>> {
        Box::pin(async move {
            let claim = Claim { holder: self.keys.named(key, claim.holder), ..*claim };
            Ok(match self.store.claim(key, &claim).await? {
                ClaimOutcome::Completed(sealed) => {
                    match self.keys.open(Kind::Response, key, &sealed) {
                        Some(response) => ClaimOutcome::Completed(response),
                        None => ClaimOutcome::Unreadable,
                    }
                }
                ClaimOutcome::Acquired(mut lease) if !lease.grant().checkpoint.is_empty() => {
                    match self.keys.open(Kind::Checkpoint, key, &lease.grant().checkpoint) {
                        Some(checkpoint) => {
                            lease.held().grant.checkpoint = checkpoint;
                            ClaimOutcome::Acquired(lease)
                        }
                        // Granted, and cannot be run: its lease ends by itself, and nothing is lost.
                        None => ClaimOutcome::Unreadable,
                    }
                }
                ClaimOutcome::Indeterminate(mut unsettled) if !unsettled.checkpoint.is_empty() => {
                    match self.keys.open(Kind::Checkpoint, key, &unsettled.checkpoint) {
                        Some(checkpoint) => {
                            unsettled.checkpoint = checkpoint;
                            ClaimOutcome::Indeterminate(unsettled)
                        }
                        None => ClaimOutcome::Unreadable,
                    }
                }
                other @ (ClaimOutcome::Acquired(_)
                | ClaimOutcome::InFlight { .. }
                | ClaimOutcome::Mismatch
                | ClaimOutcome::Indeterminate(_)
                | ClaimOutcome::Unreadable) => other,
            })
        })
    }

    fn renew<'a>(
        &'a self,
        lease: &'a Lease,
        renewal: &'a Renewal,
    ) -> StoreFuture<'a, RenewOutcome> {
        let Some(checkpoint) = &renewal.checkpoint else { return self.store.renew(lease, renewal) };
        Box::pin(async move {
            let sealed =
                self.keys.seal(Kind::Checkpoint, lease.key(), lease.owner().holder, checkpoint);
            let renewal = Renewal { terms: renewal.terms, checkpoint: Some(sealed) };
            self.store.renew(lease, &renewal).await
        })
    }

    fn complete<'a>(
        &'a self,
        lease: &'a Lease,
        completion: &'a Completion,
    ) -> StoreFuture<'a, CompleteOutcome> {
        Box::pin(async move {
            let response = self.keys.seal(
                Kind::Response,
                lease.key(),
                lease.owner().holder,
                &completion.response,
            );
            let completion = Completion { response, ..completion.clone() };
            Ok(match self.store.complete(lease, &completion).await? {
                CompleteOutcome::Superseded(sealed) => {
                    match self.keys.open(Kind::Response, lease.key(), &sealed) {
                        Some(response) => CompleteOutcome::Superseded(response),
                        None => CompleteOutcome::Unreadable,
                    }
                }
                other @ (CompleteOutcome::Stored
                | CompleteOutcome::Healed
                | CompleteOutcome::Restored
                | CompleteOutcome::Mismatch
                | CompleteOutcome::Lost
                | CompleteOutcome::Unreadable
                | CompleteOutcome::RolledBack) => other,
            })
        })
    }

    fn release<'a>(
        &'a self,
        lease: &'a Lease,
        release: &'a Release,
    ) -> StoreFuture<'a, ReleaseOutcome> {
        let holder = self.keys.named(lease.key(), lease.owner().holder);
        if holder == lease.owner().holder {
            return self.store.release(lease, release);
        }
        // Of a claim that was never confirmed; its caller knows the holder as it was before.
        Box::pin(async move {
            let mut lease = lease.clone();
            lease.held().owner.holder = holder;
            self.store.release(&lease, release).await
        })
    }

    fn resolve<'a>(
        &'a self,
        key: StorageKey,
        resolution: &'a Resolution,
    ) -> StoreFuture<'a, ResolveOutcome> {
        let response = match &resolution.finding {
            Finding::NothingHappened => return self.store.resolve(key, resolution),
            Finding::Happened(response) => response,
        };
        Box::pin(async move {
            let sealed = self.keys.seal(Kind::Response, key, resolution.holder, response);
            let finding = Finding::Happened(sealed);
            self.store.resolve(key, &Resolution { finding, ..resolution.clone() }).await
        })
    }

    fn ready(&self) -> StoreFuture<'_, ()> {
        self.store.ready()
    }
}

/// Looking opens what was sealed; everything else goes by what the store inside can read itself.
impl<S: Inspect> Inspect for Protected<S> {
    fn look(&self, key: StorageKey) -> StoreFuture<'_, Sight> {
        Box::pin(async move {
            let mut sight = self.store.look(key).await?;
            if let Current::Present(record) = &mut sight.current {
                let mut open = |kind, sealed: &mut Bytes| match self.keys.open(kind, key, sealed) {
                    Some(text) => *sealed = text,
                    None => sight.contents = Contents::Sealed,
                };
                if !record.checkpoint.is_empty() {
                    open(Kind::Checkpoint, &mut record.checkpoint);
                }
                if let State::Completed { response, .. } = &mut record.state {
                    open(Kind::Response, response);
                }
            }
            Ok(sight)
        })
    }

    fn forget<'a>(&'a self, key: StorageKey, forget: &'a Forget) -> StoreFuture<'a, ForgetOutcome> {
        self.store.forget(key, forget)
    }

    fn amend<'a>(&'a self, key: StorageKey, amend: &'a Amend) -> StoreFuture<'a, ResolveOutcome> {
        Box::pin(async move {
            // Under a holder of its own: what was sealed for the last one may have been another text.
            let of = HolderId::from_bytes(digest(&amend.response));
            let response = self.keys.seal(Kind::Response, key, of, &amend.response);
            self.store.amend(key, &Amend { response, ..amend.clone() }).await
        })
    }

    fn list<'a>(&'a self, wanted: &'a Wanted) -> StoreFuture<'a, Listing> {
        self.store.list(wanted)
    }

    fn find(&self, id: LogId) -> StoreFuture<'_, Vec<StorageKey>> {
        self.store.find(id)
    }

    fn audit<'a>(
        &'a self,
        cursor: Option<&'a AuditCursor>,
        at_most: u32,
    ) -> StoreFuture<'a, AuditStep> {
        self.store.audit(cursor, at_most)
    }

    fn note<'a>(&'a self, entry: &'a TrailEntry) -> StoreFuture<'a, ()> {
        self.store.note(entry)
    }

    fn trail(&self, at_most: u32) -> StoreFuture<'_, Vec<TrailEntry>> {
        self.store.trail(at_most)
    }

    fn glance(&self) -> StoreFuture<'_, Option<Glance>> {
        self.store.glance()
    }

    fn sealing(&self, key: StorageKey, holder: HolderId) -> Sealing {
        if self.keys.fit(key, holder) { Sealing::Fits } else { Sealing::Foreign }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: StorageKey = StorageKey::from_bytes([7; 24]);
    const HOLDER: HolderId = HolderId::from_bytes([9; 16]);
    const TEXT: Bytes = Bytes::from_static(b"4242 4242 4242 4242");

    fn keys(number: u32) -> ProtectionKeys {
        ProtectionKeys::new(ProtectionKeyId::from_number(number), &[number as u8; 32])
    }

    #[test]
    fn what_is_sealed_opens_for_its_key_and_kind_and_nowhere_else() {
        let keys = keys(1);
        let sealed = keys.seal(Kind::Response, KEY, HOLDER, &TEXT);
        assert_eq!(keys.open(Kind::Response, KEY, &sealed), Some(TEXT));
        let other = StorageKey::from_bytes([8; 24]);
        assert_eq!(keys.open(Kind::Response, other, &sealed), None, "moved to another key");
        assert_eq!(keys.open(Kind::Checkpoint, KEY, &sealed), None, "as a checkpoint");
        assert_eq!(keys.open(Kind::Response, KEY, &TEXT), None, "not sealed");
        let open = keys.clone().also_open_unprotected();
        assert_eq!(open.open(Kind::Response, KEY, &TEXT), Some(TEXT));
    }

    #[test]
    fn every_byte_that_is_changed_or_missing_is_noticed() {
        let keys = keys(1);
        let sealed = keys.seal(Kind::Response, KEY, HOLDER, &TEXT);
        for at in 0..sealed.len() {
            let mut changed = sealed.to_vec();
            changed[at] ^= 1;
            assert_eq!(keys.open(Kind::Response, KEY, &changed.into()), None, "byte {at}");
            assert_eq!(keys.open(Kind::Response, KEY, &sealed.slice(..at)), None, "{at} bytes");
        }
    }

    #[test]
    fn sealing_again_gives_the_same_bytes_and_another_holder_others() {
        let keys = keys(1);
        let sealed = keys.seal(Kind::Response, KEY, HOLDER, &TEXT);
        assert_eq!(sealed, keys.seal(Kind::Response, KEY, HOLDER, &TEXT));
        let other = HolderId::from_bytes([8; 16]);
        assert_ne!(sealed, keys.seal(Kind::Response, KEY, other, &TEXT));
    }

    #[test]
    fn a_sealed_response_is_pinned_because_records_outlive_a_release() {
        let sealed = keys(1).seal(Kind::Response, KEY, HOLDER, &TEXT);
        let hex: String = sealed.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, PINNED);
    }
    const PINNED: &str = "e10000000182066d34320d98b3d769446061d791e1ab47a17c39fb7249443e286af501e3e5bb60ce9fdcd310278ef259e884abe4";

    #[test]
    fn a_holder_says_that_and_by_which_key_a_store_is_protected() {
        let (old, new) = (keys(1), keys(2));
        let named = old.named(KEY, HOLDER);
        assert_eq!((named, old.named(KEY, named)), (old.named(KEY, HOLDER), named), "as before");
        assert_ne!(named, old.named(KEY, HolderId::from_bytes([8; 16])));
        assert!(seal::is_protected(KEY, named) && !seal::is_protected(KEY, HOLDER));
        assert!(!seal::is_protected(StorageKey::from_bytes([8; 24]), named), "of another key");
        assert!(old.fit(KEY, named) && !new.fit(KEY, named), "of another protection key");
        let other = ProtectionKeys::new(ProtectionKeyId(1), &[9; 32]);
        assert!(!other.fit(KEY, named), "the number alone does not open it");
        let both = new.clone().also_open(ProtectionKeyId(1), &[1; 32]);
        assert!(both.fit(KEY, named), "during a rotation");
        assert!(!old.fit(KEY, HOLDER), "of a service that seals nothing");
        assert!(old.also_open_unprotected().fit(KEY, HOLDER), "while it is switched on");
    }

    #[test]
    fn keys_are_never_shown() {
        let shown = format!("{:?}", keys(0xAB).also_open(ProtectionKeyId(5), &[0xCD; 32]));
        assert_eq!(shown, "ProtectionKeys { current: 171, older: [5], unprotected: Refused }");
    }
}
