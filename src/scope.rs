//! Scope: whose keys these are, so that equal keys of two callers never meet.
//!
//! A key alone names nothing: clients choose short ones, and one caller must neither see nor block
//! another's (IETF draft, section 5). So a [`Scope`] is a required choice, and where it finds no
//! identity the request is refused instead of falling into a bucket shared by everybody unknown.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::{Arc, LazyLock};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::request::Parts;
use sha2::{Digest, Sha256};

use crate::key::IdempotencyKey;

/// Who is calling, as one or more parts that are never glued together.
///
/// Parts are hashed with their lengths, so `("a:b", "c")` and `("a", "b:c")` are two identities.
#[derive(Clone, Eq, Hash, PartialEq)]
pub struct Identity(Vec<Box<str>>);

impl Identity {
    /// An identity of several parts, for example a platform account and a connected account.
    #[must_use]
    pub fn of_parts<I>(parts: I) -> Self
    where
        I: IntoIterator,
        I::Item: Into<Box<str>>,
    {
        Self(parts.into_iter().map(Into::into).collect())
    }

    /// Its parts, as the scope made them; with [`Scope::per_endpoint`] method and path come last.
    pub fn parts(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|part| &**part)
    }

    /// True if there is no part with anything in it: such an identity is no identity.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|part| part.is_empty())
    }
}

impl Identity {
    /// The caller alone, in a form of fixed size, for counting.
    pub(crate) fn caller_id(&self) -> CallerId {
        let mut hasher = Sha256::new();
        hasher.update(b"tower-idempotency caller 1");
        for part in &self.0 {
            hasher.update((part.len() as u64).to_be_bytes());
            hasher.update(part.as_bytes());
        }
        let digest: [u8; 32] = hasher.finalize().into();
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&digest[..16]);
        CallerId(bytes)
    }
}

/// A caller as it is counted: 16 bytes of a SHA-256, no text of it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct CallerId([u8; 16]);

/// Eight bytes of what is a digest already say as much as all of them.
impl Hash for CallerId {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write(&self.0[..8]);
    }
}

impl CallerId {
    /// The same caller, counted apart: what is only watched takes no place from what runs.
    pub(crate) fn in_shadow(self) -> Self {
        Self(self.0.map(|byte| !byte))
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Identity({} parts)", self.0.len())
    }
}

impl From<String> for Identity {
    fn from(part: String) -> Self {
        Self(vec![part.into()])
    }
}

impl From<&str> for Identity {
    fn from(part: &str) -> Self {
        Self(vec![part.into()])
    }
}

macro_rules! identity_from_number {
    ($($number:ty),+) => {$(
        impl From<$number> for Identity {
            fn from(number: $number) -> Self {
                Self::from(number.to_string())
            }
        }
    )+};
}

identity_from_number!(u32, u64, u128, i32, i64);

impl<A: Into<Box<str>>, B: Into<Box<str>>> From<(A, B)> for Identity {
    fn from((first, second): (A, B)) -> Self {
        Self(vec![first.into(), second.into()])
    }
}

/// The one caller of a global scope.
static EVERYBODY: LazyLock<CallerId> = LazyLock::new(|| Identity(Vec::new()).caller_id());

type Extract = dyn Fn(&Parts) -> Option<Identity> + Send + Sync;

/// How the caller of a request is found.
///
/// # Example
/// ```
/// use http::request::Parts;
/// use tower_idempotency::Scope;
///
/// #[derive(Clone)]
/// struct Account(String); // put into the request's extensions by your auth layer
///
/// fn account_of(parts: &Parts) -> Option<String> {
///     parts.extensions.get::<Account>().map(|account| account.0.clone())
/// }
///
/// let scope = Scope::principal(account_of);
/// # let _ = scope;
/// ```
#[derive(Clone)]
pub struct Scope {
    extract: Option<Arc<Extract>>,
    endpoint: EndpointIdentity,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum EndpointIdentity {
    /// The endpoint is in the fingerprint: one key on two routes is a mistake that must be seen.
    Compared,
    /// Method and path are part of the identity: one key on two routes is two operations.
    Separate,
}

impl Scope {
    /// One name space per caller. `caller` looks at the request's head, best at something that an
    /// authentication layer outside put into the extensions, never at a header anybody can set.
    ///
    /// Where it answers `None`, or an identity with nothing in it, the request is refused with
    /// 401 `idempotency_scope_missing`.
    pub fn principal<F, I>(caller: F) -> Self
    where
        F: Fn(&Parts) -> Option<I> + Send + Sync + 'static,
        I: Into<Identity>,
    {
        let extract = move |parts: &Parts| caller(parts).map(Into::into);
        Self { extract: Some(Arc::new(extract)), endpoint: EndpointIdentity::Compared }
    }

    /// One name space for everybody: right for a service with a single caller, and only there.
    #[must_use]
    pub fn global() -> Self {
        Self { extract: None, endpoint: EndpointIdentity::Compared }
    }

    /// Makes method and path part of the identity, so that one key on two endpoints names two
    /// operations (Solidgate and Telnyx do this). Without it that is refused with 422, as at Stripe.
    #[must_use]
    pub fn per_endpoint(mut self) -> Self {
        self.endpoint = EndpointIdentity::Separate;
        self
    }

    /// Finds the caller of a request; `path` gives the whole path, also inside a nested router, where endpoints are apart.
    ///
    /// The caller is counted without the endpoint: else a caller of many endpoints would be many callers.
    /// `None` means that the request has no identity and must be refused.
    pub(crate) fn identify<'a>(
        &self,
        parts: &'a Parts,
        path: impl FnOnce(&'a Parts) -> &'a str,
    ) -> Option<(Identity, CallerId)> {
        let mut identity = match &self.extract {
            Some(extract) => extract(parts).filter(|identity| !identity.is_empty())?,
            None => Identity(Vec::new()),
        };
        let caller = match &self.extract {
            Some(_) => identity.caller_id(),
            None => *EVERYBODY,
        };
        if self.endpoint == EndpointIdentity::Separate {
            identity.0.push(parts.method.as_str().into());
            identity.0.push(path(parts).into());
        }
        Some((identity, caller))
    }

    /// True if there is one name space for everybody.
    pub(crate) fn is_global(&self) -> bool {
        self.extract.is_none()
    }
}

impl fmt::Debug for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scope")
            .field("principal", &self.extract.is_some())
            .field("endpoint", &self.endpoint)
            .finish()
    }
}

/// Scope and key in the form a store sees: 24 bytes of a SHA-256, so a fixed length, no text of
/// the caller, and spread evenly over the slots of a cluster.
#[derive(Clone, Copy, Eq, Ord, PartialEq, PartialOrd)]
pub struct StorageKey([u8; 24]);

/// Eight bytes of what is a digest already say as much as all of them.
impl Hash for StorageKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write(&self.0[..8]);
    }
}

impl StorageKey {
    /// The storage key of `key` for this caller.
    #[must_use]
    pub fn new(identity: &Identity, key: &IdempotencyKey) -> Self {
        Self::in_domain(b"tower-idempotency storage key 1", identity, key)
    }

    /// The storage key of the same in shadow mode: another, so that what was only watched never
    /// binds what is enforced later.
    pub(crate) fn in_shadow(identity: &Identity, key: &IdempotencyKey) -> Self {
        Self::in_domain(b"tower-idempotency shadow key 1", identity, key)
    }

    fn in_domain(domain: &[u8], identity: &Identity, key: &IdempotencyKey) -> Self {
        let digest = hash_parts(domain, identity, key);
        let mut bytes = [0; 24];
        bytes.copy_from_slice(&digest[..24]);
        Self(bytes)
    }

    /// A storage key from bytes: for tests, and for tools that read keys back from a store.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 24]) -> Self {
        Self(bytes)
    }

    /// The 24 bytes.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 24] {
        &self.0
    }

    /// The name in a text store: 32 characters of base64url.
    #[must_use]
    pub fn to_text(&self) -> String {
        URL_SAFE_NO_PAD.encode(self.0)
    }

    /// Reads what [`to_text`](Self::to_text) wrote.
    #[must_use]
    pub fn from_text(text: &str) -> Option<Self> {
        let bytes = URL_SAFE_NO_PAD.decode(text).ok()?;
        bytes.try_into().ok().map(Self)
    }

    /// How long that name is.
    #[cfg(feature = "redis")]
    pub(crate) const TEXT_LENGTH: usize = 32;

    /// That name, without an allocation.
    #[cfg(feature = "redis")]
    pub(crate) fn text(self) -> [u8; Self::TEXT_LENGTH] {
        let mut text = [0; Self::TEXT_LENGTH];
        let written = URL_SAFE_NO_PAD.encode_slice(self.0, &mut text);
        written.expect("there is room for 32 characters");
        text
    }

    /// Twelve hex digits for logs and spans: enough to find a record, too few to find the key.
    #[must_use]
    pub fn log_id(&self) -> String {
        self.in_logs().to_string()
    }

    /// The same, written only where somebody listens.
    pub(crate) fn in_logs(self) -> LogId {
        LogId(self)
    }
}

/// The name of a storage key in logs.
#[derive(Clone, Copy)]
pub(crate) struct LogId(StorageKey);

impl fmt::Display for LogId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.0[..6].iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for StorageKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StorageKey({}..)", self.log_id())
    }
}

/// What downstream keys of one operation are made from: scope and key, and nothing that differs
/// between two runs of the handler.
///
/// Whoever has both can make the key by which a provider is asked what became of the operation, without the handler
/// and without a store.
///
/// # Example
/// ```
/// use tower_idempotency::{DownstreamSeed, IdempotencyKey, Identity};
///
/// # fn main() -> Result<(), tower_idempotency::KeyError> {
/// let (account, key) = (Identity::from("acme"), IdempotencyKey::new("order-17")?);
/// // What `Execution::downstream_key("charge")` gives to the handler of this request, in every run.
/// let charge = DownstreamSeed::new(&account, &key).key_for("charge");
/// assert_eq!(charge, "904781c1-cfaa-852b-b6c8-6dfcd9ec5dc6");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy)]
pub struct DownstreamSeed([u8; 32]);

impl DownstreamSeed {
    /// The seed of `key` for this caller.
    #[must_use]
    pub fn new(identity: &Identity, key: &IdempotencyKey) -> Self {
        Self(hash_parts(b"tower-idempotency downstream seed 1", identity, key))
    }

    /// The key to hand to a provider for the effect called `effect`, as
    /// [`Execution::downstream_key`](crate::Execution::downstream_key) gives it, in the form of a UUID
    /// (version 8, RFC 9562 section 5.8), which is what most providers accept.
    #[must_use]
    pub fn key_for(&self, effect: &str) -> String {
        let mut hasher = Sha256::new();
        hasher.update(b"tower-idempotency downstream key 1");
        hasher.update(self.0);
        hasher.update(effect.as_bytes());
        let digest: [u8; 32] = hasher.finalize().into();
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&digest[..16]);
        bytes[6] = (bytes[6] & 0x0f) | 0x80;
        bytes[8] = (bytes[8] & 0x3f) | 0x80;
        let n = u128::from_be_bytes(bytes);
        format!(
            "{:08x}-{:04x}-{:04x}-{:04x}-{:012x}",
            n >> 96,
            (n >> 80) & 0xffff,
            (n >> 64) & 0xffff,
            (n >> 48) & 0xffff,
            n & 0xffff_ffff_ffff
        )
    }
}

impl fmt::Debug for DownstreamSeed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DownstreamSeed(..)")
    }
}

fn hash_parts(domain: &[u8], identity: &Identity, key: &IdempotencyKey) -> [u8; 32] {
    let mut hasher = Sha256::new();
    hasher.update(domain);
    hasher.update((identity.0.len() as u64).to_be_bytes());
    for part in identity.0.iter().map(|part| part.as_bytes()).chain([key.as_bytes()]) {
        hasher.update((part.len() as u64).to_be_bytes());
        hasher.update(part);
    }
    hasher.finalize().into()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::key::KeySyntax;

    fn key(text: &str) -> IdempotencyKey {
        IdempotencyKey::parse(text.as_bytes(), KeySyntax::BareOrQuoted).unwrap()
    }

    fn parts(uri: &str) -> Parts {
        http::Request::post(uri).body(()).unwrap().into_parts().0
    }

    #[test]
    fn parts_are_never_glued_together() {
        let first = StorageKey::new(&Identity::from("a:b"), &key("c"));
        let second = StorageKey::new(&Identity::from("a"), &key("b:c"));
        let third = StorageKey::new(&Identity::from(("a", "b")), &key("c"));
        assert_ne!(first, second);
        assert_ne!(second, third);
    }

    #[test]
    fn an_identity_with_nothing_in_it_is_none() {
        let scope = Scope::principal(|_: &Parts| Some(""));
        assert_eq!(scope.identify(&parts("/p"), |_| "/p"), None);
        let scope = Scope::principal(|_: &Parts| Some(Identity::of_parts(["", ""])));
        assert_eq!(scope.identify(&parts("/p"), |_| "/p"), None);
        let scope = Scope::principal(|_: &Parts| None::<String>);
        assert_eq!(scope.identify(&parts("/p"), |_| "/p"), None);
        assert!(Scope::global().identify(&parts("/p"), |_| "/p").is_some());
        assert!(Scope::global().is_global() && !scope.is_global());
    }

    #[test]
    fn per_endpoint_separates_paths() {
        let scope = Scope::principal(|_: &Parts| Some("acme")).per_endpoint();
        let one = scope.identify(&parts("/a"), |_| "/a").unwrap();
        let two = scope.identify(&parts("/b"), |_| "/b").unwrap();
        assert_ne!(one.0, two.0);
        assert_eq!(one.1, two.1, "it is one caller all the same");
    }

    #[test]
    fn a_downstream_key_is_a_uuid_that_depends_on_scope_key_and_effect_only() {
        let seed = DownstreamSeed::new(&Identity::from("acme"), &key("k"));
        let again = DownstreamSeed::new(&Identity::from("acme"), &key("k"));
        assert_eq!(seed.key_for("charge"), again.key_for("charge"));
        assert_ne!(seed.key_for("charge"), seed.key_for("mail"));
        assert_ne!(
            seed.key_for("charge"),
            DownstreamSeed::new(&Identity::from("other"), &key("k")).key_for("charge")
        );
        let text = seed.key_for("charge");
        assert_eq!(text.len(), 36);
        assert_eq!(text.as_bytes()[14], b'8');
    }

    #[test]
    fn a_storage_key_is_pinned_because_records_outlive_a_release() {
        let key = StorageKey::new(&Identity::from("acme"), &key("pay-1"));
        assert_eq!(key.to_text(), PINNED);
        assert_eq!(key.to_text().len(), 32);
        assert_eq!(StorageKey::from_text(PINNED), Some(key));
        assert_eq!(StorageKey::from_text(&PINNED[1..]), None);
        assert_eq!(key.log_id().len(), 12);
    }
    const PINNED: &str = "WZKOOi7bPYzTVUniJGC3aL3UHiGvVOrX";

    proptest! {
        #[test]
        fn different_tuples_give_different_storage_keys(
            a in prop::collection::vec("[a-c:{}]{0,3}", 0..4), ka in "[a-c:{}]{1,3}",
            b in prop::collection::vec("[a-c:{}]{0,3}", 0..4), kb in "[a-c:{}]{1,3}",
        ) {
            let left = StorageKey::new(&Identity::of_parts(a.clone()), &key(&ka));
            let right = StorageKey::new(&Identity::of_parts(b.clone()), &key(&kb));
            prop_assert_eq!(left == right, (a, ka) == (b, kb));
        }
    }
}
