//! The command line.

use std::convert::Infallible;
use std::ffi::OsString;
use std::io::{self, Read as _};
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use clap::builder::NonEmptyStringValueParser;
use clap::{Args, Parser, Subcommand};
use tower_idempotency::admin::Version;
use tower_idempotency::store::LogId;
#[cfg(feature = "redis")]
use tower_idempotency::store::redis::Errand;
use tower_idempotency::{IdempotencyKey, Identity, KeySyntax, StorageKey};

use crate::store::StoreUrl;

/// Looks idempotency records up, lists what nobody has settled, and settles it.
///
/// Clients' keys and bodies are never printed unless you ask for contents. Every change needs a reason, and is kept
/// in the store's trail.
#[derive(Debug, Parser)]
#[command(name = "idempotency", version)]
#[command(after_help = "Exit codes: 0 done, 1 failed, 2 wrong use, 3 there is no such record, \
                        4 the record is not (any more) what the change was for: nothing was changed.")]
pub struct Flags {
    /// Where the records are: `redis://HOST:PORT`, `rediss://…`, `redis+sentinel://HOST:PORT,…/MASTER`,
    /// `redis+cluster://HOST:PORT,…`, `postgres://…` or `sqlite:PATH`; Redis with `?wait=N` for N replicas that
    /// have to confirm a change.
    #[arg(long, global = true, env = "IDEMPOTENCY_STORE", value_name = "URL")]
    #[arg(hide_env_values = true, value_parser = store)]
    pub store: Option<Result<StoreUrl, String>>,

    /// What the keys begin with in Redis.
    #[arg(long, global = true, env = "IDEMPOTENCY_PREFIX", default_value = "idem")]
    pub prefix: String,

    #[command(flatten)]
    pub tls: Tls,

    /// JSON on standard output, for scripts.
    #[arg(long, global = true)]
    pub json: bool,

    #[command(subcommand)]
    pub command: Command,
}

/// Certificates for `rediss://`, `rediss+sentinel://` and `rediss+cluster://`.
#[derive(Args, Debug)]
#[group(skip)]
pub struct Tls {
    /// For rediss://: who signs the server's certificate, a file in PEM [default: whom this machine trusts].
    #[arg(long, global = true, value_name = "FILE", env = "IDEMPOTENCY_TLS_CA")]
    tls_ca: Option<OsString>,
    /// For a server that asks for one: the certificate of this program, a file in PEM; with --tls-key.
    #[arg(long, global = true, value_name = "FILE", env = "IDEMPOTENCY_TLS_CERT")]
    tls_cert: Option<OsString>,
    /// The private key of --tls-cert, a file in PEM.
    #[arg(long, global = true, value_name = "FILE", env = "IDEMPOTENCY_TLS_KEY")]
    tls_key: Option<OsString>,
}

impl Tls {
    pub fn ca(&self) -> Option<PathBuf> {
        file(self.tls_ca.as_ref())
    }

    pub fn cert(&self) -> Option<PathBuf> {
        file(self.tls_cert.as_ref())
    }

    pub fn key(&self) -> Option<PathBuf> {
        file(self.tls_key.as_ref())
    }
}

/// A variable that is set to nothing is not set.
fn file(name: Option<&OsString>) -> Option<PathBuf> {
    name.filter(|name| !name.is_empty()).map(PathBuf::from)
}

/// Keys of a store that is protected.
#[derive(Args, Debug)]
#[group(skip)]
pub struct Protection {
    /// Opens and seals records with this key, of a store that is protected: its number, and a file with its 32
    /// bytes or their 64 hex digits. The first one seals.
    #[arg(long, value_name = "ID=FILE", env = "IDEMPOTENCY_PROTECTION_KEY")]
    #[arg(value_parser = protection_key, value_delimiter = ',')]
    pub protection_key: Vec<(u32, PathBuf)>,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Shows one record.
    Show {
        #[command(flatten)]
        which: Which,
        #[command(flatten)]
        protection: Protection,
        /// Prints headers and body of the stored answer as well.
        #[arg(long)]
        contents: bool,
        /// Prints the key by which the provider can be asked about this effect as well: the one that the handler gets
        /// from `downstream_key(EFFECT)`. Again for each further effect. It is made from the client's key and its
        /// scope, so it is told without a record too. EFFECT is the name in the service's code, letter for letter:
        /// another name gives another key, which the provider does not know.
        #[arg(long, value_name = "EFFECT", value_parser = NonEmptyStringValueParser::new())]
        downstream: Vec<String>,
    },
    /// Lists what nobody has settled, the oldest first.
    ///
    /// AGE and SINCE count from the claim of the last attempt, also where its outcome was found to be unknown later. The
    /// state `no effect yet` is of a route whose handlers mark their effects, and this one has marked none.
    ///
    /// In Redis this reads an index that `idempotency audit` or the service itself makes, and says how old it is.
    List {
        /// What nobody knows the outcome of (the default).
        #[arg(long, conflicts_with = "in_flight_older_than")]
        unknown: bool,
        /// What is in flight by an attempt that is at least so old, for example `5m`.
        #[arg(long, value_name = "TIME", value_parser = length)]
        in_flight_older_than: Option<Duration>,
        /// How many at most.
        #[arg(long, default_value = "50", value_parser = clap::value_parser!(u32).range(1..=100_000))]
        limit: u32,
        /// Where the last listing ended.
        #[arg(long)]
        page: Option<String>,
    },
    /// Settles an outcome that is unknown.
    #[command(subcommand)]
    Settle(Settle),
    /// Forgets a record: its key is new, and the next retry runs the operation.
    Forget {
        #[command(flatten)]
        which: Which,
        #[command(flatten)]
        change: Change,
        /// Also if the record is completed: the next retry runs the operation again, and pays again.
        #[arg(long)]
        completed: bool,
        /// Also if this release cannot read the record. It may be a payment.
        #[arg(long)]
        unreadable: bool,
    },
    /// Makes the index of `list` anew: one slow pass over all keys, safe to interrupt.
    Audit {
        /// How many keys are read in a second, at most.
        #[arg(long, default_value = "5000")]
        keys_per_second: NonZeroU32,
    },
    /// Shows who changed what, and why; the latest first.
    Trail {
        /// How many at most.
        #[arg(long, default_value = "20", value_parser = clap::value_parser!(u32).range(1..=10_000))]
        limit: u32,
    },
}

#[derive(Debug, Subcommand)]
pub enum Settle {
    /// It was done: the client's next retry gets this answer.
    Done {
        #[command(flatten)]
        which: Which,
        /// The answer's status.
        #[arg(long, value_parser = clap::value_parser!(u16).range(200..=599))]
        status: u16,
        /// A header of the answer, `Name: value`; any number of them.
        #[arg(long, value_name = "NAME: VALUE", value_parser = header)]
        header: Vec<(String, String)>,
        /// The answer's body.
        #[arg(long, conflicts_with = "body_file")]
        body: Option<String>,
        /// The file of the answer's body; `-` is standard input.
        #[arg(long, value_name = "FILE")]
        body_file: Option<PathBuf>,
        /// Also if it is completed, with an answer that cannot be read here: for who knows that the service cannot
        /// read it either.
        #[arg(long)]
        replace_unreadable: bool,
        #[command(flatten)]
        protection: Protection,
        /// Settles although the answer would not be sealed as the record's service seals its own, for who knows
        /// that the service can read it all the same.
        #[arg(long)]
        no_seal_check: bool,
        /// How long the record is kept at least, for example `30d` [default: 24h]. What is left of its time is never
        /// shortened.
        #[arg(long, value_name = "TIME", value_parser = length)]
        retention: Option<Duration>,
        #[command(flatten)]
        change: Change,
    },
    /// It was not done, and the old attempt cannot act any more: the next retry runs the operation.
    NotApplied {
        #[command(flatten)]
        which: Which,
        /// How long the record is kept at least, for example `30d` [default: 24h]. What is left of its time is never
        /// shortened.
        #[arg(long, value_name = "TIME", value_parser = length)]
        retention: Option<Duration>,
        #[command(flatten)]
        change: Change,
    },
}

/// Which record: by account and key, by reference, or by storage key.
#[derive(Args, Debug)]
#[group(skip)]
pub struct Which {
    /// The client's idempotency key; with --account or --global.
    #[arg(value_parser = key)]
    #[arg(required_unless_present_any = ["key_file", "reference", "storage_key"])]
    #[arg(conflicts_with_all = ["key_file", "reference", "storage_key"])]
    pub key: Option<IdempotencyKey>,
    /// The file of the client's idempotency key; `-` is standard input. Arguments can be seen by every user of this
    /// machine, and stay in the shell's history.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["reference", "storage_key"])]
    pub key_file: Option<PathBuf>,
    /// Whose key it is, as the service's scope names them; again for each further part.
    #[arg(long, value_name = "PART", conflicts_with_all = ["global", "reference", "storage_key"])]
    pub account: Vec<String>,
    /// The service has one name space for all (`Scope::global`).
    #[arg(long, conflicts_with_all = ["reference", "storage_key"])]
    pub global: bool,
    /// Method and path, if the service keeps keys apart by them (`per_endpoint`): `POST /v1/payments`.
    #[arg(long, value_name = "METHOD PATH", value_parser = endpoint)]
    #[arg(conflicts_with_all = ["reference", "storage_key"])]
    pub endpoint: Option<(String, String)>,
    /// The reference of an *outcome unknown* answer: 12 hex digits, as in logs. Redis knows those of its index.
    #[arg(long, value_name = "HEX", value_parser = reference, conflicts_with = "storage_key")]
    pub reference: Option<LogId>,
    /// The storage key: 32 characters.
    #[arg(long, value_name = "TEXT", value_parser = storage_key)]
    pub storage_key: Option<StorageKey>,
    /// What the file of the key had in it: it may be standard input, which can be read once.
    #[arg(skip)]
    read: OnceLock<IdempotencyKey>,
}

/// What every change needs.
#[derive(Args, Debug)]
#[group(skip)]
pub struct Change {
    /// Why: a ticket, and what the provider said. No keys, no bodies: it is kept.
    #[arg(long)]
    pub why: String,
    /// Who makes the change [default: the system's user].
    #[arg(long, env = "IDEMPOTENCY_WHO")]
    pub who: Option<String>,
    /// Changes nothing unless the record is still of this version, as `show` prints it.
    #[arg(long, value_name = "VERSION")]
    pub if_version: Option<Version>,
    /// Does not ask.
    #[arg(long, short)]
    pub yes: bool,
}

impl Which {
    /// Checks what the parser cannot.
    pub fn check(&self) -> Result<(), String> {
        match self.key.is_some() || self.key_file.is_some() {
            true if self.account.is_empty() && !self.global => {
                Err("a key needs --account (once for each part of the scope), or --global".into())
            }
            true | false => Ok(()),
        }
    }

    /// True if it is a client's key that is looked for.
    pub fn key_is_given(&self) -> bool {
        self.key.is_some() || self.key_file.is_some()
    }

    /// What is looked for, without the client's key.
    pub fn in_words(&self) -> String {
        let endpoint =
            self.endpoint.iter().map(|(method, path)| format!(", endpoint {method} {path}"));
        let endpoint: String = endpoint.collect();
        match self.account.as_slice() {
            _ if !self.key_is_given() => "this storage key".to_owned(),
            [] => format!("this key, --global{endpoint},"),
            [account] => format!("this key of the account {account:?}{endpoint}"),
            parts => format!("this key of the account with the parts {parts:?}{endpoint}"),
        }
    }

    /// The storage key of the same key where there is one name space for all; none if that is what was asked for.
    pub fn without_account(&self) -> Option<StorageKey> {
        match &self.key {
            Some(key) if !self.account.is_empty() => {
                let nobody = Identity::of_parts::<[&str; 0]>([]);
                Some(StorageKey::new(&nobody, key))
            }
            Some(_) | None => None,
        }
    }

    /// Whose key it is, and the client's key, if that is how the record is named.
    pub fn scope_and_key(&self) -> Result<Option<(Identity, &IdempotencyKey)>, String> {
        let key = match (&self.key, &self.key_file, self.read.get()) {
            (Some(key), _, _) | (None, Some(_), Some(key)) => key,
            (None, Some(file), None) => {
                let text = String::from_utf8(read_file(file, LONGEST_KEY_FILE)?)
                    .map_err(|_| "the file of the key is no text".to_owned())?;
                let read = key(text.trim_end_matches(['\r', '\n']))?;
                self.read.get_or_init(|| read)
            }
            (None, None, _) => return Ok(None),
        };
        let endpoint = self.endpoint.iter().flat_map(|(method, path)| [method, path]);
        let identity = Identity::of_parts(self.account.iter().chain(endpoint).map(String::as_str));
        Ok(Some((identity, key)))
    }

    /// The storage key, if it can be told without the store.
    pub fn storage_key(&self) -> Result<Option<StorageKey>, String> {
        let named = self.scope_and_key()?;
        Ok(named.map_or(self.storage_key, |(identity, key)| Some(StorageKey::new(&identity, key))))
    }
}

/// Far longer than any key.
const LONGEST_KEY_FILE: usize = 4_096;

/// Reads a file, or standard input by the name `-`, up to so many bytes.
pub fn read_file(file: &Path, longest: usize) -> Result<Vec<u8>, String> {
    let most = longest as u64 + 1;
    let mut bytes = Vec::new();
    let read = match file.as_os_str() == "-" {
        true => io::stdin().lock().take(most).read_to_end(&mut bytes),
        false => std::fs::File::open(file).and_then(|file| file.take(most).read_to_end(&mut bytes)),
    };
    match read {
        Ok(_) if bytes.len() > longest => {
            Err(format!("{} has more than {longest} bytes", file.display()))
        }
        Ok(_) => Ok(bytes),
        Err(error) => Err(format!("cannot read {}: {error}", file.display())),
    }
}

impl Command {
    /// The record that it is about.
    pub fn which(&self) -> Option<&Which> {
        match self {
            Self::Show { which, .. }
            | Self::Settle(Settle::Done { which, .. } | Settle::NotApplied { which, .. })
            | Self::Forget { which, .. } => Some(which),
            Self::List { .. } | Self::Audit { .. } | Self::Trail { .. } => None,
        }
    }

    /// How long a record is kept that is settled.
    pub fn retention(&self) -> Option<Duration> {
        match self {
            Self::Settle(Settle::Done { retention, .. } | Settle::NotApplied { retention, .. }) => {
                *retention
            }
            Self::Show { .. }
            | Self::List { .. }
            | Self::Forget { .. }
            | Self::Audit { .. }
            | Self::Trail { .. } => None,
        }
    }

    /// The keys of a store that is protected, where contents are read or written.
    pub fn protection_keys(&self) -> &[(u32, PathBuf)] {
        match self {
            Self::Show { protection, .. } | Self::Settle(Settle::Done { protection, .. }) => {
                &protection.protection_key
            }
            Self::Settle(Settle::NotApplied { .. })
            | Self::List { .. }
            | Self::Forget { .. }
            | Self::Audit { .. }
            | Self::Trail { .. } => &[],
        }
    }

    /// What it does to the store, so that all rights for it are looked at before.
    #[cfg(feature = "redis")]
    pub fn errands(&self) -> Vec<Errand> {
        let mut errands = vec![match self {
            Self::Show { .. } => Errand::Look,
            Self::Settle(_) => Errand::Settle,
            Self::Forget { .. } => Errand::Forget,
            Self::List { .. } => Errand::List,
            Self::Audit { .. } => Errand::Audit,
            Self::Trail { .. } => Errand::Trail,
        }];
        if self.which().is_some_and(|which| which.reference.is_some()) {
            errands.push(Errand::List);
        }
        errands
    }
}

/// What is wrong with a URL is said later: a parser's error would repeat it, with its password.
#[expect(clippy::unnecessary_wraps, reason = "clap wants a parser that may fail")]
fn store(url: &str) -> Result<Result<StoreUrl, String>, Infallible> {
    Ok(url.parse())
}

fn key(text: &str) -> Result<IdempotencyKey, String> {
    IdempotencyKey::parse(text.as_bytes(), KeySyntax::BareOrQuoted)
        .or_else(|_| IdempotencyKey::new(text))
        .map_err(|error| error.to_string())
}

fn reference(text: &str) -> Result<LogId, String> {
    LogId::parse(text).ok_or_else(|| "a reference is 12 hex digits".to_owned())
}

fn storage_key(text: &str) -> Result<StorageKey, String> {
    StorageKey::from_text(text).ok_or_else(|| "a storage key is 32 characters".to_owned())
}

fn header(line: &str) -> Result<(String, String), String> {
    let (name, value) = line.split_once(':').ok_or("a header is `Name: value`")?;
    let (name, value) = (name.trim(), value.trim());
    http::HeaderName::try_from(name).map_err(|_| "the name is none".to_owned())?;
    http::HeaderValue::try_from(value).map_err(|_| "the value is none".to_owned())?;
    Ok((name.to_owned(), value.to_owned()))
}

fn endpoint(text: &str) -> Result<(String, String), String> {
    match text.split_once(' ') {
        Some((method, path)) if !method.is_empty() && path.starts_with('/') => {
            Ok((method.to_owned(), path.to_owned()))
        }
        Some(_) | None => Err("an endpoint is method and path: `POST /v1/payments`".to_owned()),
    }
}

fn protection_key(text: &str) -> Result<(u32, PathBuf), String> {
    let (id, file) = text.split_once('=').ok_or("a protection key is NUMBER=FILE")?;
    let id = id.parse().map_err(|_| "the id of a protection key is a number")?;
    Ok((id, file.into()))
}

/// A number with a unit: `ms`, `s`, `m`, `h` or `d`.
fn length(text: &str) -> Result<Duration, String> {
    let split = text.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let number: u64 = number.parse().map_err(|_| "a time is a number and a unit: 5m")?;
    let milliseconds = match unit {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return Err("the units of time are ms, s, m, h and d".to_owned()),
    };
    number
        .checked_mul(milliseconds)
        .map(Duration::from_millis)
        .ok_or_else(|| "that is too long".to_owned())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

    use clap::CommandFactory as _;

    use super::*;

    fn which(args: &[&str]) -> Result<Which, String> {
        let args = ["idempotency", "show"].iter().chain(args);
        let flags = Flags::try_parse_from(args).map_err(|error| error.to_string())?;
        let Command::Show { which, .. } = flags.command else { panic!("show") };
        which.check().map(|()| which)
    }

    #[test]
    fn the_flags_fit_together() {
        Flags::command().debug_assert();
    }

    #[test]
    fn account_and_key_give_the_storage_key_of_the_scope() {
        let key = IdempotencyKey::new("pay-1").unwrap();
        for (args, identity) in [
            (vec!["pay-1", "--account", "acme"], Identity::from("acme")),
            (vec!["\"pay-1\"", "--account", "acme"], Identity::from("acme")),
            (vec!["pay-1", "--account", "a", "--account", "b"], Identity::from(("a", "b"))),
            (vec!["pay-1", "--global"], Identity::of_parts::<[&str; 0]>([])),
            (
                vec!["pay-1", "--account", "a", "--endpoint", "POST /p"],
                Identity::of_parts(["a", "POST", "/p"]),
            ),
        ] {
            let storage_key = which(&args).unwrap().storage_key();
            assert_eq!(storage_key, Ok(Some(StorageKey::new(&identity, &key))), "{args:?}");
        }
    }

    #[test]
    fn a_record_is_named_in_one_way() {
        for args in [
            vec![],
            vec!["pay-1"],
            vec!["--account", "acme"],
            vec!["pay-1", "--account", "acme", "--global"],
            vec!["pay-1", "--account", "acme", "--reference", "0123456789ab"],
            vec!["--reference", "0123456789a"],
            vec!["pay-1", "--account", "acme", "--key-file", "f"],
            vec!["--key-file", "f"],
            vec!["--key-file", "f", "--account", "acme", "--reference", "0123456789ab"],
            vec![
                "--reference",
                "0123456789ab",
                "--storage-key",
                "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA",
            ],
        ] {
            assert!(which(&args).is_err(), "{args:?}");
        }
        assert!(which(&["--reference", "0123456789ab"]).unwrap().storage_key().unwrap().is_none());
    }

    #[test]
    fn times_have_a_unit() {
        assert_eq!(length("5m"), Ok(Duration::from_secs(300)));
        assert_eq!(length("250ms"), Ok(Duration::from_millis(250)));
        for bad in ["", "5", "m", "-1m", "1.5h", "99999999999999999999d", "5 m"] {
            assert!(length(bad).is_err(), "{bad}");
        }
    }
}
