//! Configuration: every choice of a route, its default, and the rules between them.

mod recovery;

use std::sync::Arc;
use std::time::Duration;

use http::header::{LOCATION, RETRY_AFTER};
use http::{HeaderName, Method};

pub use recovery::{Found, Interrupted, Reconciler, Recovery};

use crate::error::ConfigError;
use crate::fingerprint::{Fingerprints, JsonPointer, Recipe};
use crate::guard::{ReplayDecision, ReplayGuard, ReplayRequest};
use crate::key::KeySyntax;
use crate::record::{Effects, Terms};
use crate::response::HeaderRules;
use crate::scope::Scope;

/// The header that carries the key, in the IETF draft and at Stripe.
pub const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
/// The header that marks a replay, as at Stripe: `true`, and absent from first answers.
pub const IDEMPOTENT_REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");
/// The header that says when an answer is less safe than others: `not-stored` or `unprotected`.
pub const IDEMPOTENCY_STATUS: HeaderName = HeaderName::from_static("idempotency-status");
/// The header that payment SDKs obey before they look at a status.
pub const STRIPE_SHOULD_RETRY: HeaderName = HeaderName::from_static("stripe-should-retry");

/// The response headers of this layer that scripts in browsers want to read, with those that it
/// gives a meaning to: for `CorsLayer::expose_headers`. (For requests, allow [`IDEMPOTENCY_KEY`].)
pub const EXPOSED_HEADERS: [HeaderName; 6] = [
    IDEMPOTENCY_KEY,
    IDEMPOTENT_REPLAYED,
    IDEMPOTENCY_STATUS,
    STRIPE_SHOULD_RETRY,
    RETRY_AFTER,
    LOCATION,
];

/// What happens to a request without a key.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub enum MissingKey {
    /// It is refused with 400 `idempotency_key_missing`.
    #[default]
    Reject,
    /// It runs, unprotected and untouched, as if the layer were not there.
    PassThrough,
}

/// Whether the bodies of answers rest in the store.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub enum StoredBodies {
    /// They do, within the limit, and retries get them.
    #[default]
    Keep,
    /// They never do: every answer is recorded as "done, body not kept", with its status and `Location` alone.
    /// Retries get 409 `idempotency_result_unavailable` and nothing runs. For answers with secrets in them.
    Never,
}

/// What happens when the store cannot be asked.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub enum StoreDown {
    /// The request is refused with 503 and the handler does not run (fail closed).
    #[default]
    Reject,
    /// The handler runs without protection and the answer carries `Idempotency-Status: unprotected`
    /// (fail open). **A retry may then run it again.**
    RunUnprotected,
}

/// Whether the layer acts on what it finds.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub enum Enforcement {
    /// It does.
    #[default]
    Enforce,
    /// It only watches: every request runs, unprotected and as if the layer were not there, and
    /// `idempotency.shadow.requests` counts what would have become of it. For bringing the layer
    /// into an API that is in use. Handlers find neither a key nor an
    /// [`Execution`](crate::Execution).
    Shadow,
}

/// Where a key may come from, if no header carries one.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum KeySource {
    /// From nowhere else.
    Headers,
    /// From this place in a JSON body.
    Body(JsonPointer),
    /// From what the request says.
    Content,
}

/// What refusals look like. The handler's own errors are its own business.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub enum ErrorFlavour {
    /// Problem documents (RFC 9457), with an `error` object for payment SDKs. A key that was used
    /// with another request is 422, as in the IETF draft.
    #[default]
    Problem,
    /// `{"error": {"type", "code", "message", ..}}` as `application/json`, as at Stripe. A key that
    /// was used with another request is 400 with the type `idempotency_error`, which is what
    /// Stripe's clients make their idempotency error of; at 422 they do not.
    Stripe,
}

/// The rules of a route, checked and unchangeable. Made by [`Config::builder`].
#[derive(Clone, Debug)]
pub struct Config {
    pub(crate) scope: Scope,
    pub(crate) methods: Vec<Method>,
    pub(crate) key_headers: Vec<HeaderName>,
    pub(crate) key_source: KeySource,
    pub(crate) key_syntax: KeySyntax,
    pub(crate) missing_key: MissingKey,
    pub(crate) recipes: Vec<Recipe>,
    pub(crate) header_rules: HeaderRules,
    pub(crate) request_limit: usize,
    pub(crate) request_timeout: Duration,
    pub(crate) stored_bodies: StoredBodies,
    pub(crate) response_limit: usize,
    pub(crate) response_timeout: Duration,
    pub(crate) problem_base: String,
    pub(crate) error_flavour: ErrorFlavour,
    pub(crate) replay_guard: Option<ReplayGuard>,
    pub(crate) policy: Arc<Policy>,
}

/// The part of a configuration that the engine needs.
#[derive(Clone, Debug)]
pub(crate) struct Policy {
    pub(crate) terms: Terms,
    pub(crate) recovery: Recovery,
    pub(crate) effects: Effects,
    pub(crate) reconcile_within: Duration,
    pub(crate) store_down: StoreDown,
    pub(crate) wait: Duration,
    pub(crate) store_call: Duration,
    pub(crate) claim_within: Duration,
    pub(crate) complete_within: Duration,
    pub(crate) in_flight_per_caller: usize,
    pub(crate) enforcement: Enforcement,
}

/// Builds a [`Config`]. Every setting but the scope has a default.
///
/// # Example
/// ```
/// use std::time::Duration;
/// use tower_idempotency::{Config, Scope};
///
/// let config = Config::builder()
///     .scope(Scope::global())
///     .lease(Duration::from_secs(10))
///     .retention(Duration::from_secs(7 * 24 * 3600))
///     .build()?;
/// # let _ = config;
/// # Ok::<(), tower_idempotency::ConfigError>(())
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct ConfigBuilder {
    scope: Option<Scope>,
    unknown_retention: Option<Duration>,
    also_accepted: Vec<Recipe>,
    in_flight_per_caller: Option<usize>,
    config: Config,
}

/// Long enough that two lost renewals do not end it, short enough that a crash is known soon.
const LEASE: Duration = Duration::from_secs(30);
/// Below this, scheduling delays alone would end leases of living handlers.
const LEASE_MIN: Duration = Duration::from_millis(50);
/// A crash is only known when the lease is over, and no client waits for longer than this.
const LEASE_MAX: Duration = Duration::from_secs(3600);
/// Stripe prunes keys after a day; official SDKs stop retrying after seconds.
pub(crate) const RETENTION: Duration = Duration::from_secs(24 * 3600);
/// A record says 400 days at most: nothing that is retried is older.
pub(crate) const RETENTION_MAX: Duration = Duration::from_secs(400 * 24 * 3600);
/// An unknown outcome waits for a person, and a person may be away for a week.
const UNKNOWN_RETENTION: Duration = Duration::from_secs(7 * 24 * 3600);
/// Official SDKs give up about 1.5 s after their first 409, so a twin is worth waiting for.
const WAIT: Duration = Duration::from_secs(2);
/// Longer than proxies in front of a service usually wait.
const WAIT_MAX: Duration = Duration::from_secs(60);
/// As axum's own default for bodies, halved: payments are small, and bodies are held in memory.
pub(crate) const BODY_LIMIT: usize = 1 << 20;
/// How long a body may take to arrive.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a body may trickle before it is taken for a stream: no client waits longer for its
/// first byte.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);
/// One call to the store, above what the store itself allows for connecting and asking: only a store
/// without limits of its own ever gets this far.
const STORE_CALL: Duration = Duration::from_millis(1500);
/// All sendings of one claim: several calls, within the patience of any client.
const CLAIM_WITHIN: Duration = Duration::from_millis(2500);
/// All sendings of one completion before the client is answered without it.
const COMPLETE_WITHIN: Duration = Duration::from_secs(4);
/// One question to a reconcile hook: an answer of a provider, within the patience of the client.
const RECONCILE_WITHIN: Duration = Duration::from_secs(3);
const STORE_BUDGET_MIN: Duration = Duration::from_millis(10);
const STORE_BUDGET_MAX: Duration = Duration::from_secs(60);
/// Far more than a caller with a healthy server has, and few enough that one caller alone does not hold all
/// memory: at the body limit they are 1 GB.
const IN_FLIGHT_PER_CALLER: usize = 1000;
/// Where the problem documents are explained.
const PROBLEM_BASE: &str =
    "https://docs.rs/tower-idempotency/latest/tower_idempotency/guide/problems/index.html#";

impl Config {
    /// Starts with the defaults.
    ///
    /// # Defaults
    /// POST and PATCH covered · key required, in `Idempotency-Key`, bare or quoted · lease 30 s ·
    /// retention 24 h · unknown outcomes 7 days · wait 2 s · at most once · fail closed · bodies up
    /// to 1 MiB each way · 1,000 keys in flight per caller.
    pub fn builder() -> ConfigBuilder {
        ConfigBuilder {
            scope: None,
            unknown_retention: None,
            also_accepted: Vec::new(),
            in_flight_per_caller: None,
            config: Self {
                scope: Scope::global(),
                methods: vec![Method::POST, Method::PATCH],
                key_headers: vec![IDEMPOTENCY_KEY],
                key_source: KeySource::Headers,
                key_syntax: KeySyntax::default(),
                missing_key: MissingKey::default(),
                recipes: vec![Recipe::new()],
                header_rules: HeaderRules::default(),
                request_limit: BODY_LIMIT,
                request_timeout: REQUEST_TIMEOUT,
                stored_bodies: StoredBodies::default(),
                response_limit: BODY_LIMIT,
                response_timeout: RESPONSE_TIMEOUT,
                problem_base: PROBLEM_BASE.to_owned(),
                error_flavour: ErrorFlavour::default(),
                replay_guard: None,
                policy: Arc::new(Policy {
                    terms: Terms {
                        lease: LEASE,
                        retention: RETENTION,
                        unknown_retention: UNKNOWN_RETENTION,
                    },
                    recovery: Recovery::default(),
                    effects: Effects::default(),
                    reconcile_within: RECONCILE_WITHIN,
                    store_down: StoreDown::default(),
                    wait: WAIT,
                    store_call: STORE_CALL,
                    claim_within: CLAIM_WITHIN,
                    complete_within: COMPLETE_WITHIN,
                    in_flight_per_caller: IN_FLIGHT_PER_CALLER,
                    enforcement: Enforcement::default(),
                }),
            },
        }
    }
}

impl ConfigBuilder {
    fn policy(&mut self) -> &mut Policy {
        Arc::make_mut(&mut self.config.policy)
    }

    /// Whose keys these are. Required.
    pub fn scope(mut self, scope: Scope) -> Self {
        self.scope = Some(scope);
        self
    }

    /// Covers exactly these methods instead of POST and PATCH. Others pass through untouched.
    pub fn methods(mut self, methods: impl IntoIterator<Item = Method>) -> Self {
        self.config.methods = methods.into_iter().collect();
        self
    }

    /// Looks for the key in exactly these headers instead of `Idempotency-Key`. A request may
    /// carry several of them only if they name the same key.
    pub fn key_headers(mut self, names: impl IntoIterator<Item = HeaderName>) -> Self {
        self.config.key_headers = names.into_iter().collect();
        self
    }

    /// Also looks for the key at this place in JSON bodies, as in Square's API
    /// (`/idempotency_key`). The key is a string there, and stands for itself, without quotes of
    /// its own. A request may carry it in a header as well, if both are the same.
    ///
    /// Only bodies of type `application/json` or `…+json` are looked into; a `null` is no key. A body on
    /// which readers may disagree is refused (400).
    ///
    /// To look nowhere else: `key_headers([])` ([`key_headers`](Self::key_headers)).
    pub fn key_from_body(mut self, pointer: JsonPointer) -> Self {
        self.config.key_source = KeySource::Body(pointer);
        self
    }

    /// Derives the key of a request that carries none from what it says, as SQS FIFO queues do:
    /// equal requests of one caller within `window` are one. **Two payments that are meant and
    /// happen to be equal are one too**; a client that sends a key of its own is not concerned.
    ///
    /// Equal is what the [fingerprint](Self::fingerprint) says. `window` is the
    /// [retention](Self::retention), so it begins when the first of them is answered.
    pub fn key_from_content(mut self, window: Duration) -> Self {
        self.config.key_source = KeySource::Content;
        self.policy().terms.retention = window;
        self
    }

    /// Which notations of a key are accepted.
    pub fn key_syntax(mut self, syntax: KeySyntax) -> Self {
        self.config.key_syntax = syntax;
        self
    }

    /// What happens to a request without a key. A malformed one is refused in any case.
    pub fn missing_key(mut self, missing_key: MissingKey) -> Self {
        self.config.missing_key = missing_key;
        self
    }

    /// How fingerprints are made.
    pub fn fingerprint(mut self, recipe: Recipe) -> Self {
        self.config.recipes = vec![recipe];
        self
    }

    /// Also accepts records whose fingerprint was made by this older recipe: for the retention
    /// after a deploy that changes it, and on routes with different recipes that share their keys, so
    /// that a key used on both is a mismatch and not an unreadable record. Up to three.
    pub fn also_accept(mut self, older: Recipe) -> Self {
        self.also_accepted.push(older);
        self
    }

    /// Which response headers are kept.
    pub fn response_headers(mut self, rules: HeaderRules) -> Self {
        self.config.header_rules = rules;
        self
    }

    /// How long a claim holds without being renewed; it is renewed after each third. 50 ms to 1 h.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.policy().terms.lease = lease;
        self
    }

    /// How long an answer is kept, from completion. After that the key is new again. At most 400 days,
    /// and not below the lease.
    pub fn retention(mut self, retention: Duration) -> Self {
        self.policy().terms.retention = retention;
        self
    }

    /// How long an unknown outcome is kept, from the end of its lease. Not below the retention,
    /// which it follows where this is not set.
    pub fn unknown_retention(mut self, unknown_retention: Duration) -> Self {
        self.unknown_retention = Some(unknown_retention);
        self
    }

    /// How long a request waits for its running twin before it is answered 409. Zero: at once; at most
    /// a minute.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.policy().wait = wait;
        self
    }

    /// What happens to a key whose handler died.
    pub fn recovery(mut self, recovery: Recovery) -> Self {
        self.policy().recovery = recovery;
        self
    }

    /// Where in the handler effects may happen. With [`Effects::Marked`] an attempt that dies before
    /// its first [`checkpoint`](crate::Execution::checkpoint) frees its key, whatever the recovery.
    pub fn effects(mut self, effects: Effects) -> Self {
        self.policy().effects = effects;
        self
    }

    /// How long the hook of [`Recovery::reconcile`] may take; after that it is dropped, and the
    /// outcome is still unknown.
    pub fn reconcile_within(mut self, bound: Duration) -> Self {
        self.policy().reconcile_within = bound;
        self
    }

    /// What happens when the store cannot be asked.
    pub fn store_down(mut self, store_down: StoreDown) -> Self {
        self.policy().store_down = store_down;
        self
    }

    /// The longest request body, in bytes; a longer one is refused with 413.
    pub fn request_limit(mut self, bytes: usize) -> Self {
        self.config.request_limit = bytes;
        self
    }

    /// How long a request body may take to arrive; after that the request is refused with 408.
    pub fn request_timeout(mut self, timeout: Duration) -> Self {
        self.config.request_timeout = timeout;
        self
    }

    /// Whether bodies of answers rest in the store.
    pub fn stored_bodies(mut self, bodies: StoredBodies) -> Self {
        self.config.stored_bodies = bodies;
        self
    }

    /// The longest answer that is kept, in bytes of its body. A longer one is delivered once and
    /// recorded as "body not kept".
    pub fn response_limit(mut self, bytes: usize) -> Self {
        self.config.response_limit = bytes;
        self
    }

    /// How long an answer's body may take to arrive from the handler. A slower one is taken for a
    /// stream: passed on as it comes, and recorded as "body not kept".
    pub fn response_timeout(mut self, timeout: Duration) -> Self {
        self.config.response_timeout = timeout;
        self
    }

    /// How long one call to the store may take.
    pub fn store_call_timeout(mut self, timeout: Duration) -> Self {
        self.policy().store_call = timeout;
        self
    }

    /// How long claiming may take in all, before the request is answered 503.
    pub fn claim_within(mut self, bound: Duration) -> Self {
        self.policy().claim_within = bound;
        self
    }

    /// How long storing the answer may take in all, before the client is answered without it.
    pub fn complete_within(mut self, bound: Duration) -> Self {
        self.policy().complete_within = bound;
        self
    }

    /// How many keys one caller may have in flight in this process; a request with one more is refused with 429
    /// before its key is claimed, also if there is a stored answer under it: the store is not asked. Requests with one key count once. Layers of one engine count together, and
    /// handlers count to their end, also when their clients have left. Without a limit where the scope is
    /// [global](Scope::global), unless it is set.
    pub fn in_flight_per_caller(mut self, keys: usize) -> Self {
        self.in_flight_per_caller = Some(keys);
        self
    }

    /// What problem types start with; the code follows. For APIs that document them themselves.
    pub fn problem_base(mut self, base: impl Into<String>) -> Self {
        self.config.problem_base = base.into();
        self
    }

    /// What refusals look like.
    pub fn error_flavour(mut self, flavour: ErrorFlavour) -> Self {
        self.config.error_flavour = flavour;
        self
    }

    /// Whether the layer acts on what it finds, or only watches.
    pub fn enforcement(mut self, enforcement: Enforcement) -> Self {
        self.policy().enforcement = enforcement;
        self
    }

    /// Asks `guard` before each replay whether the caller may still see the stored answer, and
    /// before the news that it was not kept. Where it refuses, panics, or takes longer than five
    /// seconds, the answer is 403 `idempotency_replay_forbidden`.
    pub fn authorize_replay<F, A>(mut self, guard: F) -> Self
    where
        F: Fn(ReplayRequest) -> A + Send + Sync + 'static,
        A: Future<Output = ReplayDecision> + Send + 'static,
    {
        self.config.replay_guard = Some(ReplayGuard::new(guard));
        self
    }

    /// Checks everything and makes the configuration.
    ///
    /// # Errors
    /// [`ConfigError`] names the values that are out of bounds or do not fit together.
    pub fn build(self) -> Result<Config, ConfigError> {
        let Self { scope, unknown_retention, also_accepted, in_flight_per_caller, mut config } =
            self;
        config.scope = scope.ok_or(ConfigError::ScopeMissing)?;
        // Where everybody is one caller there is nobody to protect from the others.
        let per_caller = if config.scope.is_global() { usize::MAX } else { IN_FLIGHT_PER_CALLER };
        config.recipes.extend(also_accepted);
        let policy = Arc::make_mut(&mut config.policy);
        policy.in_flight_per_caller = in_flight_per_caller.unwrap_or(per_caller);
        policy.terms.unknown_retention =
            unknown_retention.unwrap_or_else(|| UNKNOWN_RETENTION.max(policy.terms.retention));
        let Policy { terms, wait, store_call, claim_within, complete_within, .. } = *policy;
        let reconcile_within = policy.reconcile_within;

        bounded("lease", terms.lease, LEASE_MIN, LEASE_MAX)?;
        bounded("retention", terms.retention, LEASE_MIN, RETENTION_MAX)?;
        bounded("unknown_retention", terms.unknown_retention, LEASE_MIN, RETENTION_MAX)?;
        bounded("wait", wait, Duration::ZERO, WAIT_MAX)?;
        bounded("store_call_timeout", store_call, STORE_BUDGET_MIN, STORE_BUDGET_MAX)?;
        bounded("claim_within", claim_within, STORE_BUDGET_MIN, STORE_BUDGET_MAX)?;
        bounded("complete_within", complete_within, STORE_BUDGET_MIN, STORE_BUDGET_MAX)?;
        bounded("reconcile_within", reconcile_within, STORE_BUDGET_MIN, STORE_BUDGET_MAX)?;
        bounded("request_timeout", config.request_timeout, LEASE_MIN, LEASE_MAX)?;
        bounded("response_timeout", config.response_timeout, LEASE_MIN, LEASE_MAX)?;
        not_shorter(("retention", terms.retention), ("lease", terms.lease))?;
        not_shorter(
            ("unknown_retention", terms.unknown_retention),
            ("retention", terms.retention),
        )?;
        not_shorter(("claim_within", claim_within), ("store_call_timeout", store_call))?;
        not_shorter(("complete_within", complete_within), ("store_call_timeout", store_call))?;

        if config.request_limit == 0 {
            return Err(ConfigError::Zero("request_limit"));
        }
        if config.policy.in_flight_per_caller == 0 {
            return Err(ConfigError::Zero("in_flight_per_caller"));
        }
        if config.methods.is_empty() {
            return Err(ConfigError::NoMethods);
        }
        if let Some(safe) = config.methods.iter().find(|method| method.is_safe()) {
            return Err(ConfigError::SafeMethod(safe.clone()));
        }
        if config.key_source == KeySource::Content && config.recipes[0].ignores_content() {
            return Err(ConfigError::ContentIgnored);
        }
        if config.key_headers.is_empty() && config.key_source == KeySource::Headers {
            return Err(ConfigError::NoKeyHeaders);
        }
        let given = config.recipes.len();
        if given > Fingerprints::MAX {
            return Err(ConfigError::TooManyRecipes { given, max: Fingerprints::MAX });
        }
        if config.recipes.iter().any(Recipe::excludes_in_vain) {
            return Err(ConfigError::NothingToExcludeFrom);
        }
        if !is_absolute(&config.problem_base) {
            return Err(ConfigError::ProblemBase(config.problem_base));
        }
        Ok(config)
    }
}

/// True if there is a scheme (RFC 3986, 3.1) in front.
fn is_absolute(uri: &str) -> bool {
    uri.split_once(':').is_some_and(|(scheme, rest)| {
        !rest.is_empty()
            && scheme.starts_with(|c: char| c.is_ascii_alphabetic())
            && scheme.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.'))
    })
}

fn bounded(
    name: &'static str,
    value: Duration,
    min: Duration,
    max: Duration,
) -> Result<(), ConfigError> {
    if value < min || value > max {
        return Err(ConfigError::OutOfBounds { name, value, min, max });
    }
    Ok(())
}

fn not_shorter(
    (shorter, shorter_value): (&'static str, Duration),
    (longer, longer_value): (&'static str, Duration),
) -> Result<(), ConfigError> {
    if shorter_value < longer_value {
        return Err(ConfigError::ShorterThan { shorter, shorter_value, longer, longer_value });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn builder() -> ConfigBuilder {
        Config::builder().scope(Scope::global())
    }

    #[test]
    fn the_defaults_are_valid_and_the_scope_must_be_chosen() {
        assert!(builder().build().is_ok());
        assert_eq!(Config::builder().build().unwrap_err(), ConfigError::ScopeMissing);
    }

    #[test]
    fn a_retention_shorter_than_the_lease_is_refused_and_both_are_named() {
        let error = builder().retention(Duration::from_secs(5)).build().unwrap_err();
        assert_eq!(error.to_string(), "retention (5s) must not be shorter than lease (30s)");
    }

    #[test]
    fn unknown_outcomes_are_kept_at_least_as_long_as_answers() {
        let month = Duration::from_secs(30 * 24 * 3600);
        let config = builder().retention(month).build().unwrap();
        assert_eq!(config.policy.terms.unknown_retention, month);
        let hour = Duration::from_secs(3600);
        assert!(builder().unknown_retention(hour).build().is_err());
    }

    #[test]
    fn values_out_of_bounds_are_named() {
        for (builder, name) in [
            (builder().lease(Duration::ZERO), "lease"),
            (builder().lease(Duration::from_secs(3601)), "lease"),
            (builder().wait(Duration::from_secs(61)), "wait"),
            (builder().store_call_timeout(Duration::ZERO), "store_call_timeout"),
        ] {
            let error = builder.build().unwrap_err();
            assert!(
                matches!(error, ConfigError::OutOfBounds { name: n, .. } if n == name),
                "{error}"
            );
        }
    }

    #[test]
    fn callers_are_limited_but_not_where_there_is_only_one() {
        let most = |builder: ConfigBuilder| builder.build().unwrap().policy.in_flight_per_caller;
        assert_eq!(most(builder()), usize::MAX);
        assert_eq!(most(builder().in_flight_per_caller(5)), 5);
        let principal = || Config::builder().scope(Scope::principal(|_: &_| Some("acme")));
        assert_eq!(most(principal()), 1000);
        let error = principal().in_flight_per_caller(0).build().unwrap_err();
        assert_eq!(error, ConfigError::Zero("in_flight_per_caller"));
    }

    #[test]
    fn safe_methods_cannot_be_covered() {
        let error = builder().methods([Method::POST, Method::GET]).build().unwrap_err();
        assert_eq!(error, ConfigError::SafeMethod(Method::GET));
        assert_eq!(builder().methods([]).build().unwrap_err(), ConfigError::NoMethods);
    }

    #[test]
    fn at_most_four_recipes_are_accepted() {
        let four = (0..3).fold(builder(), |b, _| b.also_accept(Recipe::new()));
        assert!(four.clone().build().is_ok());
        let error = four.also_accept(Recipe::new()).build().unwrap_err();
        assert_eq!(error, ConfigError::TooManyRecipes { given: 5, max: 4 });
    }

    #[test]
    fn keys_come_from_somewhere_and_never_from_a_content_that_is_ignored() {
        assert_eq!(builder().key_headers([]).build().unwrap_err(), ConfigError::NoKeyHeaders);
        let pointer = JsonPointer::from_static("/idempotency_key");
        assert!(builder().key_headers([]).key_from_body(pointer).build().is_ok());
        let minutes = Duration::from_secs(300);
        let derived = || builder().key_headers([]).key_from_content(minutes);
        assert_eq!(derived().build().unwrap().policy.terms.retention, minutes);
        let error = derived().fingerprint(Recipe::ignoring_content()).build().unwrap_err();
        assert_eq!(error, ConfigError::ContentIgnored);
    }

    #[test]
    fn fields_can_only_be_excluded_from_bodies_that_are_read() {
        let excluding = |recipe: Recipe| recipe.exclude(JsonPointer::from_static("/sent_at"));
        let error = builder().fingerprint(excluding(Recipe::new())).build().unwrap_err();
        assert_eq!(error, ConfigError::NothingToExcludeFrom);
        let read = excluding(Recipe::new().canonical_form());
        assert!(builder().fingerprint(read).build().is_ok());
    }

    #[test]
    fn problem_types_must_be_absolute() {
        assert!(builder().problem_base("/problems/").build().is_err());
        assert!(builder().problem_base("https://api.example/problems/").build().is_ok());
    }
}
