//! The command line. Every flag is an environment variable too (`PAYMENTS_` and its name).

use std::convert::Infallible;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::BoolishValueParser;
use clap::error::ErrorKind;
use clap::{CommandFactory as _, Parser, ValueEnum};
use http::Method;
use tower_idempotency::{
    Config, ConfigBuilder, ConfigError, ErrorFlavour, MissingKey, Recipe, Recovery,
};

use crate::account;
use crate::store::StoreUrl;

/// A small payment API with an idempotency layer around its routes.
#[derive(Debug, Parser)]
#[command(name = "payments", version)]
pub(crate) struct Flags {
    /// Where to listen; port 0 picks a free one.
    #[arg(long, env = "PAYMENTS_LISTEN", value_name = "ADDR", default_value = "127.0.0.1:8080")]
    #[arg(value_parser = address)]
    pub(crate) listen: SocketAddr,

    /// Where idempotency records are kept: `sqlite:PATH`, `postgres://…`, `redis://HOST:PORT`,
    /// `redis+sentinel://HOST:PORT,…/MASTER`, `redis+cluster://HOST:PORT,…` or `memory:`; Redis with
    /// `?wait=N` for N replicas that have to confirm, `redis://` with `?pool=N` through a pool [default: in the file of the ledger].
    #[arg(long, env = "PAYMENTS_STORE", value_name = "URL", hide_env_values = true)]
    #[arg(value_parser = store)]
    store: Option<Result<StoreUrl, String>>,

    /// The SQLite file of what really happened. Several processes may share one. With an SQL store
    /// that is the store's own database [default: payments.db].
    #[arg(long, env = "PAYMENTS_LEDGER", value_name = "PATH")]
    ledger: Option<PathBuf>,

    /// How long a claim holds without being renewed [default: 30, or half of a shorter retention].
    #[arg(long, env = "PAYMENTS_LEASE", value_name = "SECONDS", value_parser = seconds)]
    lease: Option<Duration>,

    /// How long an answer is kept, from completion.
    #[arg(long, env = "PAYMENTS_RETENTION", value_name = "SECONDS", default_value = "86400")]
    #[arg(value_parser = seconds)]
    retention: Duration,

    /// How long a duplicate waits for its running twin before it is answered 409; 0: at once.
    #[arg(long, env = "PAYMENTS_WAIT", value_name = "SECONDS", default_value = "2")]
    #[arg(value_parser = seconds)]
    wait: Duration,

    /// What happens to a key whose process died.
    #[arg(long, env = "PAYMENTS_RECOVERY", value_name = "MODE", default_value = "at-most-once")]
    pub(crate) recovery: RecoveryMode,

    /// The longest request body; over it: 413.
    #[arg(long, env = "PAYMENTS_BODY_LIMIT", value_name = "BYTES", default_value_t = 1 << 20)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=MAX_BODY))]
    body_limit: u32,

    /// The longest answer that is kept; over it: delivered once, recorded as "body not kept".
    #[arg(long, env = "PAYMENTS_RESPONSE_LIMIT", value_name = "BYTES", default_value_t = 1 << 20)]
    #[arg(value_parser = clap::value_parser!(u32).range(..=MAX_BODY))]
    response_limit: u32,

    /// How two requests are compared: byte by byte, or as JSON by what they say. More than one, after
    /// commas: the first is used, the others are understood in records that were made with them.
    #[arg(long, env = "PAYMENTS_FINGERPRINT", value_name = "RECIPE,…", default_value = "bytes")]
    #[arg(value_delimiter = ',')]
    fingerprint: Vec<Compared>,

    /// Stripe-shaped errors throughout.
    #[arg(long, env = "PAYMENTS_STRIPE_ERRORS", value_parser = BoolishValueParser::new())]
    stripe_errors: bool,

    /// How long running payments may take to finish at shutdown.
    #[arg(long, env = "PAYMENTS_DRAIN", value_name = "SECONDS", default_value = "10")]
    #[arg(value_parser = grace)]
    pub(crate) drain: Duration,
}

/// `--recovery`.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum RecoveryMode {
    /// Retries are told that the outcome is unknown; nothing runs.
    AtMostOnce,
    /// The handler runs again; the processor deduplicates on the key it is given.
    AtLeastOnce,
    /// The processor is asked what happened.
    Reconcile,
}

/// `--fingerprint`.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
enum Compared {
    Bytes,
    Json,
}

impl Compared {
    fn recipe(self) -> Recipe {
        match self {
            Self::Bytes => Recipe::new(),
            Self::Json => Recipe::new().canonical_json(),
        }
    }
}

/// 256 MiB: bodies are held in memory.
const MAX_BODY: i64 = 256 << 20;

/// The rules of the routes, and what the person who started the sandbox should know about them.
#[derive(Debug)]
pub(crate) struct Rules {
    /// For routes that need a key.
    pub(crate) required: Config,
    /// For voids: DELETE, with a key or without.
    pub(crate) optional: Config,
    /// For the routes in Stripe's shape: POST, with a key or without.
    pub(crate) stripe: Config,
    pub(crate) flavour: ErrorFlavour,
    pub(crate) body_limit: usize,
    pub(crate) note: Option<String>,
}

impl Flags {
    /// Reads command line and environment; what is wrong with them ends the process with code 2.
    pub(crate) fn read() -> Self {
        let flags = Self::parse();
        match flags.rules(&Recovery::AtMostOnce) {
            Ok(_) => flags,
            Err(message) => Self::command().error(ErrorKind::ValueValidation, message).exit(),
        }
    }

    /// The store: without a flag it is the ledger's own file.
    pub(crate) fn store(&self) -> StoreUrl {
        self.store.clone().and_then(Result::ok).unwrap_or_else(|| StoreUrl::Sqlite(self.ledger()))
    }

    /// The file of the ledger, where the store's database does not hold it.
    pub(crate) fn ledger(&self) -> PathBuf {
        self.ledger.clone().unwrap_or_else(|| LEDGER.into())
    }

    /// The rules of the routes, with this recovery.
    pub(crate) fn rules(&self, recovery: &Recovery) -> Result<Rules, String> {
        match (&self.store, &self.ledger) {
            (Some(Err(error)), _) => return Err(format!("--store: {error}")),
            (Some(Ok(StoreUrl::Sqlite(store))), Some(ledger)) if store != ledger => {
                return Err(
                    "--ledger: with an sqlite: store the ledger is in the store's file".into()
                );
            }
            (Some(Ok(StoreUrl::Postgres(_))), Some(_)) => {
                return Err(
                    "--ledger: with a postgres: store the ledger is in the store's database".into(),
                );
            }
            _ => {}
        }
        let (lease, short) = self.lease();
        let notes: Vec<_> = short.into_iter().chain(self.pointless_recovery()).collect();
        let note = (!notes.is_empty()).then(|| notes.join("\n"));
        let body_limit = self.body_limit as usize;
        let flavour = match self.stripe_errors {
            true => ErrorFlavour::Stripe,
            false => ErrorFlavour::Problem,
        };
        let patience = match self.store() {
            StoreUrl::Sqlite(_) => |builder: ConfigBuilder| {
                builder
                    .store_call_timeout(QUEUE_WITHIN)
                    .claim_within(QUEUE_WITHIN)
                    .complete_within(QUEUE_WITHIN)
            },
            StoreUrl::Memory
            | StoreUrl::Redis(_)
            | StoreUrl::Pool { .. }
            | StoreUrl::Postgres(_) => |builder: ConfigBuilder| builder,
        };
        let common = || {
            patience(Config::builder())
                .scope(account::scope())
                .lease(lease)
                .retention(self.retention)
                .wait(self.wait)
                .recovery(recovery.clone())
                .reconcile_within(ASK_WITHIN)
                .error_flavour(flavour)
                .request_limit(body_limit)
                .response_limit(self.response_limit as usize)
        };
        // A space is `+` from one of Stripe's clients and `%20` from another.
        let same_meaning = || Recipe::new().canonical_form();
        let accepting = |builder: ConfigBuilder, recipes: &[Compared]| {
            recipes.iter().fold(builder, |builder, recipe| builder.also_accept(recipe.recipe()))
        };
        let compared = || {
            let first = common().fingerprint(self.fingerprint[0].recipe());
            accepting(first, &self.fingerprint[1..])
        };
        let build =
            |builder: ConfigBuilder| builder.build().map_err(|e: ConfigError| e.to_string());
        Ok(Rules {
            // One account, one set of keys: each route knows the other routes' fingerprints, so that a
            // key that is used on both is a mismatch.
            required: build(compared().methods([Method::POST]).also_accept(same_meaning()))?,
            optional: build(
                compared()
                    .methods([Method::DELETE])
                    .missing_key(MissingKey::PassThrough)
                    .also_accept(same_meaning()),
            )?,
            stripe: build(
                accepting(common().fingerprint(same_meaning()), &self.fingerprint)
                    .methods([Method::POST])
                    .missing_key(MissingKey::PassThrough),
            )?,
            flavour,
            body_limit,
            note,
        })
    }

    /// A store that holds everything in one transaction leaves nothing to recover.
    fn pointless_recovery(&self) -> Option<String> {
        let transactional = matches!(self.store(), StoreUrl::Sqlite(_) | StoreUrl::Postgres(_));
        (transactional && self.recovery != RecoveryMode::AtMostOnce).then(|| {
            "note: --recovery has nothing to do here: with an SQL store a payment and its record commit \
             together, and of a process that died nothing is left"
                .to_owned()
        })
    }

    /// A retention below the lease makes no sense; so a lease that nobody asked for gives way.
    fn lease(&self) -> (Duration, Option<String>) {
        match self.lease {
            Some(lease) => (lease, None),
            None if self.retention < DEFAULT_LEASE => {
                let lease = (self.retention / 2).max(SHORTEST_LEASE);
                let note = format!(
                    "note: --retention {:?} is shorter than the default lease of {DEFAULT_LEASE:?}; \
                     the lease is {lease:?} (set it with --lease)",
                    self.retention
                );
                (lease, Some(note))
            }
            None => (DEFAULT_LEASE, None),
        }
    }
}

const LEDGER: &str = "payments.db";
/// SQLite has one writer at a time, and some test cards are slow: so requests queue for longer than a
/// service would let them.
const QUEUE_WITHIN: Duration = Duration::from_secs(8);
/// The processor is a file beside us; and all of a request takes less than ten seconds.
const ASK_WITHIN: Duration = Duration::from_secs(1);
const DEFAULT_LEASE: Duration = Duration::from_secs(30);
/// The library's own bound.
const SHORTEST_LEASE: Duration = Duration::from_millis(50);

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number of seconds".to_owned())?;
    // Refuses negative numbers, NaN and infinity. Upper bounds are the configuration's business.
    Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())
}

/// An hour: whoever stops a server does not wait for longer than that.
fn grace(text: &str) -> Result<Duration, String> {
    seconds(text).and_then(|grace| match grace <= Duration::from_secs(3600) {
        true => Ok(grace),
        false => Err("must not be longer than 3600 seconds".to_owned()),
    })
}

/// What is wrong with a URL is said later: a parser's error would repeat it, with its password.
#[expect(clippy::unnecessary_wraps, reason = "clap wants a parser that may fail")]
fn store(url: &str) -> Result<Result<StoreUrl, String>, Infallible> {
    Ok(url.parse())
}

fn address(text: &str) -> Result<SocketAddr, String> {
    let mut found = text.to_socket_addrs().map_err(|_| "not an ADDRESS:PORT".to_owned())?;
    found.next().ok_or_else(|| "names no address".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(args: &[&str]) -> Result<Rules, String> {
        let args = ["payments"].iter().chain(args);
        let flags = Flags::try_parse_from(args).map_err(|error| error.to_string())?;
        flags.rules(&Recovery::AtMostOnce)
    }

    #[test]
    fn the_defaults_are_valid() {
        Flags::command().debug_assert();
        assert_eq!(rules(&[]).unwrap().note, None);
        assert_eq!(rules(&[]).unwrap().flavour, ErrorFlavour::Problem);
        assert_eq!(rules(&["--stripe-errors"]).unwrap().flavour, ErrorFlavour::Stripe);
    }

    #[test]
    fn a_short_retention_lowers_only_a_lease_that_nobody_asked_for() {
        assert!(rules(&["--retention", "1"]).unwrap().note.unwrap().contains("500ms"));
        assert!(rules(&["--retention", "0.06"]).unwrap().note.unwrap().contains("50ms"));
        assert_eq!(rules(&["--retention", "1", "--lease", "0.5"]).unwrap().note, None);
        let refused = rules(&["--retention", "1", "--lease", "2"]).unwrap_err();
        assert!(
            refused.contains("retention (1s) must not be shorter than lease (2s)"),
            "{refused}"
        );
    }

    #[test]
    fn a_recovery_that_has_nothing_to_do_is_noted() {
        let note = |args: &[&str]| rules(args).unwrap().note.unwrap_or_default();
        for store in ["sqlite:payments.db", "postgres://h/d"] {
            let told = note(&["--recovery", "reconcile", "--store", store]);
            assert!(told.contains("--recovery has nothing to do"), "{store}: {told}");
        }
        assert_eq!(note(&["--recovery", "reconcile", "--store", "memory:"]), "");
    }

    #[test]
    fn numbers_that_mean_nothing_are_refused() {
        for flag in ["--lease", "--retention", "--wait", "--drain"] {
            for value in ["-1", "NaN", "inf", "1e300", "soon", "", "99999999"] {
                assert!(rules(&[&format!("{flag}={value}")]).is_err(), "{flag}={value}");
            }
        }
        assert!(rules(&["--body-limit", "0"]).is_err());
        assert!(rules(&["--body-limit", "1.5"]).is_err());
        assert!(rules(&["--response-limit", "4294967295"]).is_err());
        assert!(rules(&["--listen", "nowhere"]).is_err());
    }

    #[test]
    fn recipes_are_named_and_there_are_not_more_than_a_record_is_compared_with() {
        for recipes in ["bytes", "json", "json,bytes", "bytes,json"] {
            assert!(rules(&["--fingerprint", recipes]).is_ok(), "{recipes}");
        }
        for recipes in ["", "xml", "json,", "json,bytes,json,bytes"] {
            assert!(rules(&["--fingerprint", recipes]).is_err(), "{recipes}");
        }
    }

    #[test]
    fn what_is_not_built_yet_is_refused_by_name() {
        assert!(rules(&["--recovery", "maybe"]).is_err());
    }
}
