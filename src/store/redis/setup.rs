//! Why a store cannot be set up, in words that say what to change.

use std::fmt;

use super::NAME;
use super::advice::Lack;
use super::builder::MAX_PREFIX;
use super::check::Concern;
use super::connect::{AddressError, PASSWORD_MISSING};
use crate::error::{StoreError, StoreErrorKind};

/// The commands that the store runs, in scripts and by itself.
pub(super) const RIGHTS: &str = "+eval +evalsha +time +get +set +getrange +setrange +strlen +exists \
                                 +rename +unlink +pexpire +pexpiretime";

/// Why a store could not be set up. The error that is returned says it.
#[derive(thiserror::Error)]
pub(super) enum SetupError {
    #[error(transparent)]
    Address(#[from] AddressError),
    #[error(
        "the address says wait={address}, and the program wait({builder}): leave one of them out"
    )]
    TwoWaits { address: u32, builder: u32 },
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
    #[error("the server could lose records: {}", list(.0))]
    Unsafe(Vec<Concern>),
    #[error("{}; all that it needs is `{RIGHTS}` on the keys of the prefix, `{keys}`", lacking(.lack, .reason))]
    Rights { lack: Lack, keys: Box<str>, reason: Box<str> },
    #[error("the user may not run {}, which this takes: {}", quoted(.0), .0.remedy())]
    ErrandRights(Lack),
    #[error(
        "the user may not read and write the keys of the store ({reason}); grant it all with the prefix, \
         `ACL SETUSER {user} {keys}`: records, and large answers for the moment beside them"
    )]
    Keys { user: Box<str>, keys: Box<str>, reason: Box<str> },
    #[error("no entry ({0}): {PASSWORD_MISSING}")]
    PasswordMissing(Box<str>),
    #[error(
        "the server is a read-only replica{}; connect to its primary, or let Sentinels name it: \
         redis+sentinel://host:port,host:port/master-name",
        of(.0)
    )]
    Replica(Option<Box<str>>),
    #[error(
        "the server is a Sentinel, which has no records; connect to the primary that it names: \
         redis+sentinel://host:port,host:port/{}",
        .0.as_deref().unwrap_or("master-name")
    )]
    Sentinel(Option<Box<str>>),
    #[error("{}", Concern::OneNodeOfCluster)]
    OneNodeOfCluster,
    #[error(
        "the server is no node of a cluster ({0}): one server is redis://host:port, and a group under \
         Sentinels redis+sentinel://host:port,host:port/master-name"
    )]
    NotACluster(Box<str>),
    #[error(
        "the user may not ask where the keys of the cluster are ({0}): grant it `+cluster|slots`"
    )]
    ClusterRights(Box<str>),
    #[error(
        "the cluster is down ({0}): `CLUSTER INFO` on a node says which slots fail; start the nodes \
         that are missing, or see what `redis-cli --cluster check` proposes"
    )]
    ClusterDown(Box<str>),
    #[error(
        "{0} speaks TLS, and the address asks for plain text: write rediss:// (or rediss+sentinel://, \
         rediss+cluster://), or the port that is set as `port` on the server"
    )]
    SpeaksTls(Box<str>),
    #[error(
        "{0} does not speak TLS, and the address asks for it: write the port that is set as \
         `tls-port` on the server; or, for plain text, a scheme that begins with redis instead of \
         rediss"
    )]
    SpeaksPlain(Box<str>),
}

/// As it is displayed: programs whose `main` returns an error print it like this.
impl fmt::Debug for SetupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl SetupError {
    /// Whether it may pass by itself.
    fn kind(&self) -> StoreErrorKind {
        match self {
            // A failover may make it the primary, or a name lead to another server; nodes come back.
            Self::Replica(_) | Self::ClusterDown(_) => StoreErrorKind::Unavailable,
            Self::Address(_)
            | Self::TwoWaits { .. }
            | Self::PrefixEmpty
            | Self::PrefixTooLong(_)
            | Self::PrefixCharacter(_)
            | Self::Zero(_)
            | Self::TooOld
            | Self::Unsafe(_)
            | Self::Rights { .. }
            | Self::ErrandRights(_)
            | Self::Keys { .. }
            | Self::PasswordMissing(_)
            | Self::Sentinel(_)
            | Self::OneNodeOfCluster
            | Self::NotACluster(_)
            | Self::ClusterRights(_)
            | Self::SpeaksTls(_)
            | Self::SpeaksPlain(_) => StoreErrorKind::Backend,
        }
    }

    pub(super) fn into_store_error(self, operation: &'static str) -> StoreError {
        StoreError::new(self.kind(), NAME, operation).with_source(self).saying_why()
    }
}

/// Says which one of several servers it was.
pub(super) fn of_master(name: &str, error: &StoreError) -> StoreError {
    let told = error.reason().map_or_else(|| error.to_string(), ToString::to_string);
    let named = OfMaster { name: name.into(), told };
    StoreError::new(error.kind(), NAME, error.operation()).with_source(named).saying_why()
}

/// What is wrong with one of the masters of a cluster.
#[derive(thiserror::Error)]
#[error("the master {name} of the cluster is not ready: {told}")]
struct OfMaster {
    name: Box<str>,
    told: String,
}

/// As it is displayed, like the others.
impl fmt::Debug for OfMaster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

fn list(concerns: &[Concern]) -> String {
    concerns.iter().map(Concern::to_string).collect::<Vec<_>>().join("; ")
}

fn lacking(lack: &Lack, reason: &str) -> String {
    if lack.commands.is_empty() {
        return format!("the user may not do what the scripts need ({reason})");
    }
    let (missing, remedy) = (quoted(lack), lack.remedy());
    format!("the user may not run {missing}, which the store needs ({reason}): {remedy}")
}

fn quoted(lack: &Lack) -> String {
    let commands: Vec<_> = lack.commands.iter().map(|command| format!("`{command}`")).collect();
    commands.join(", ")
}

/// The pattern of all keys with a prefix, for an ACL; what has a meaning in patterns is taken as it stands.
pub(super) fn pattern(prefix: &str) -> Box<str> {
    let mut pattern = "~".to_owned();
    for mark in prefix.chars() {
        if "*?[]\\".contains(mark) {
            pattern.push('\\');
        }
        pattern.push(mark);
    }
    pattern.push_str(":*");
    pattern.into()
}

fn of(primary: &Option<Box<str>>) -> String {
    primary.as_ref().map_or_else(String::new, |primary| format!(" of {primary}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documents_list_the_rights_that_a_message_asks_for() {
        for page in [include_str!("../../../README.md"), include_str!("../../guide/redis.md")] {
            for right in [RIGHTS, "`+select`", "`+wait`", &*pattern("idem")] {
                assert!(page.contains(right), "{right}");
            }
        }
    }

    #[test]
    fn what_has_a_meaning_in_patterns_is_taken_as_it_stands() {
        assert_eq!(&*pattern("pay-prod:idem"), "~pay-prod:idem:*");
        assert_eq!(&*pattern(r"a*b?c[d]\e"), r"~a\*b\?c\[d\]\\e:*");
    }
}
