//! Addresses: one server, a group watched by Sentinels, or a cluster.

use ::redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisError};

use super::reasons::ENCODED;

/// Where Sentinels listen unless their address says otherwise.
const SENTINEL_PORT: u16 = 26_379;

/// The certificates of a TLS connection.
#[cfg(feature = "redis-tls")]
pub(in crate::store::redis) type Certificates = ::redis::TlsCertificates;
/// Nothing can be set without the feature.
#[cfg(not(feature = "redis-tls"))]
pub(in crate::store::redis) type Certificates = std::convert::Infallible;

/// What an address leads to.
#[derive(Clone, Debug)]
pub(in crate::store::redis) enum Address {
    One(ConnectionInfo),
    Sentinel {
        sentinels: Vec<ConnectionInfo>,
        name: Box<str>,
        /// How to connect to the primary; the place is what the Sentinels say.
        primary: ConnectionInfo,
    },
    Cluster(Vec<ConnectionInfo>),
}

/// What is wrong with an address. Never shows it: it may hold a password.
#[derive(Debug, thiserror::Error)]
pub(in crate::store::redis) enum AddressError {
    #[error("{0}; an address looks like redis://user:password@host:6379/0")]
    Unreadable(RedisError),
    #[error(
        "the address {0:?} has a blank or a line end at its {1}: take it away, also where it comes from (a \
         file of settings, a secret)"
    )]
    Blank(Box<str>, &'static str),
    #[error(
        "the address {0:?} has a blank or a line end in it: take it away; in a password a blank is written %20"
    )]
    BlankInside(Box<str>),
    #[error(
        "an address begins with a scheme: redis://localhost:6379, or rediss://localhost:6379 for TLS"
    )]
    NoScheme,
    #[error("the address names no host: redis://localhost:6379")]
    NoHost,
    #[error(
        "an address has one host; several are redis+sentinel://host:port,host:port/master-name or \
             redis+cluster://host:port,host:port"
    )]
    SeveralHosts,
    #[error(
        "the port is no number from 1 to 65535; an address looks like redis://localhost:6379, with IPv6 \
         redis://[::1]:6379, with a password redis://user:password@localhost:6379"
    )]
    Port,
    #[error("the database is no number: redis://localhost:6379/0")]
    Database,
    #[error("the password in the address has a mark in it that ends it there: write it {ENCODED}")]
    NotEncoded,
    #[error(
        "an address has no parameter {0:?}; known are wait and protocol, and db, user and pass for a \
         socket"
    )]
    UnknownParameter(Box<str>),
    #[error(
        "no address of Redis begins with {0:?}; known are redis, rediss, unix, redis+sentinel, \
         rediss+sentinel, redis+cluster and rediss+cluster, each with :// behind it"
    )]
    UnknownScheme(Box<str>),
    #[error("wait= takes a number of replicas, and once: ?wait=2")]
    Wait,
    #[error("no master name: redis+sentinel://host:port,host:port/NAME")]
    NoMasterName,
    #[error("a cluster has no numbered databases; leave /{0} out")]
    ClusterDatabase(i64),
    #[error(
        "{0}:// asks for TLS, and this program was built without it: switch the feature `redis-tls` of \
         tower-idempotency on"
    )]
    TlsFeature(&'static str),
    #[cfg(feature = "redis-tls")]
    #[error(
        "TLS needs a crypto provider, and the program has not chosen one: at its start, call \
         `rustls::crypto::ring::default_provider().install_default()`, or the same of `aws_lc_rs`"
    )]
    NoCryptoProvider,
    #[cfg(feature = "redis-tls")]
    #[error("the certificates cannot be read, they have to be in PEM: {0}")]
    Certificates(RedisError),
    #[cfg(feature = "redis-tls")]
    #[error("no certificate is in root_cert: in PEM, one begins with -----BEGIN CERTIFICATE-----")]
    NoCertificate,
    #[cfg(feature = "redis-tls")]
    #[error("certificates are set, and the address does not ask for TLS; use rediss://")]
    CertificatesWithoutTls,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Kind {
    One,
    Sentinel,
    Cluster,
}

/// What may stand behind the question mark for redis-rs. The last three are for sockets; elsewhere they have
/// a place of their own.
const PARAMETERS: [&str; 4] = ["protocol", "db", "user", "pass"];

/// How many replicas have to confirm; redis-rs knows nothing of it.
const WAIT: &str = "wait";

/// Scheme, the scheme for each server, and what it leads to.
const SCHEMES: [(&str, &str, Kind); 11] = [
    ("redis", "redis", Kind::One),
    ("rediss", "rediss", Kind::One),
    ("valkey", "valkey", Kind::One),
    ("valkeys", "valkeys", Kind::One),
    ("unix", "unix", Kind::One),
    ("redis+unix", "redis+unix", Kind::One),
    ("valkey+unix", "valkey+unix", Kind::One),
    ("redis+sentinel", "redis", Kind::Sentinel),
    ("rediss+sentinel", "rediss", Kind::Sentinel),
    ("redis+cluster", "redis", Kind::Cluster),
    ("rediss+cluster", "rediss", Kind::Cluster),
];

/// A scheme as it stands there, also if it was written in capitals.
pub(super) fn known(scheme: &str) -> Option<(&'static str, &'static str, Kind)> {
    SCHEMES.into_iter().find(|known| known.0.eq_ignore_ascii_case(scheme))
}

/// Takes `wait=N` out of an address.
pub(in crate::store::redis) fn take_wait(url: &str) -> Result<(String, Option<u32>), AddressError> {
    let (url, fragment) = url.split_at(url.find('#').unwrap_or(url.len()));
    let Some((place, query)) = url.split_once('?') else {
        return Ok((format!("{url}{fragment}"), None));
    };
    let (mut wait, mut rest) = (None, Vec::new());
    for parameter in query.split('&') {
        match parameter.split_once('=').unwrap_or((parameter, "")) {
            // Digits only: Rust would read a sign too.
            (WAIT, number) if number.bytes().all(|digit| digit.is_ascii_digit()) => {
                let number = number.parse().map_err(|_| AddressError::Wait)?;
                if wait.replace(number).is_some() {
                    return Err(AddressError::Wait);
                }
            }
            (WAIT, _) => return Err(AddressError::Wait),
            _ => rest.push(parameter),
        }
    }
    let mark = if rest.is_empty() { "" } else { "?" };
    Ok((format!("{place}{mark}{}{fragment}", rest.join("&")), wait))
}

/// An address as it may be shown: without user, password and parameters.
pub(in crate::store::redis) fn shown(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return String::new() };
    // A password that is not percent-encoded may have any of these marks in it.
    let place = rest.rsplit_once('@').map_or(rest, |(_, place)| place);
    let place = place.split(['?', '#']).next().unwrap_or_default();
    format!("{scheme}://{place}")
}

impl Address {
    /// Where a connection is made first.
    pub(in crate::store::redis) fn places(&self) -> impl Iterator<Item = &ConnectionInfo> {
        match self {
            Self::One(info) => std::slice::from_ref(info),
            Self::Sentinel { sentinels, .. } => sentinels,
            Self::Cluster(seeds) => seeds,
        }
        .iter()
    }

    /// Who we are there.
    pub(in crate::store::redis) fn user(&self) -> &str {
        let info = match self {
            Self::One(info) | Self::Sentinel { primary: info, .. } => Some(info),
            Self::Cluster(seeds) => seeds.first(),
        };
        info.and_then(|info| info.redis_settings().username()).unwrap_or("default")
    }

    /// Reads an address without `wait`. Says nothing about TLS.
    pub(in crate::store::redis) fn parse(
        url: &str,
        certificates: Option<&Certificates>,
    ) -> Result<Self, AddressError> {
        let (scheme, rest) = url.split_once("://").unwrap_or_default();
        let Some((_, server, kind)) = known(scheme) else {
            return Err(AddressError::UnknownScheme(scheme.into()));
        };
        // One that is misspelt would be passed over in silence, and with it what it was to protect from.
        let query = rest.split_once('?').map_or("", |(_, query)| query);
        let query = query.split('#').next().unwrap_or_default();
        let names = query.split('&').filter_map(|pair| pair.split('=').next());
        if let Some(unknown) =
            names.filter(|name| !name.is_empty()).find(|name| !PARAMETERS.contains(name))
        {
            // It may be the rest of a password with an ampersand in it.
            if query.contains("pass=") {
                return Err(AddressError::NotEncoded);
            }
            return Err(AddressError::UnknownParameter(unknown.into()));
        }
        if kind == Kind::One {
            return Ok(Self::One(secured(read(url)?, certificates)?));
        }
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (user, hosts) = authority.rsplit_once('@').unwrap_or(("", authority));
        let user = if user.is_empty() { String::new() } else { format!("{user}@") };
        let info = |user: &str, host: &str, database: &str| -> Result<_, AddressError> {
            let url = format!("{server}://{user}{host}/{database}?{query}");
            secured(read(&url)?, certificates)
        };
        if kind == Kind::Cluster {
            let seeds: Vec<_> =
                hosts.split(',').map(|host| info(&user, host, path)).collect::<Result<_, _>>()?;
            match seeds.iter().map(|seed| seed.redis_settings().db()).find(|&db| db != 0) {
                Some(database) => return Err(AddressError::ClusterDatabase(database)),
                None => return Ok(Self::Cluster(seeds)),
            }
        }
        let (name, database) = path.split_once('/').unwrap_or((path, ""));
        if name.is_empty() {
            return Err(AddressError::NoMasterName);
        }
        let first = hosts.split(',').next().unwrap_or_default();
        let primary = info(&user, first, database)?;
        let sentinels = hosts.split(',').map(|host| info("", &with_port(host), ""));
        let sentinels = sentinels.collect::<Result<_, _>>()?;
        Ok(Self::Sentinel { sentinels, name: name.into(), primary })
    }
}

/// Looks if TLS is possible, if an address asks for it.
pub(in crate::store::redis) fn tls_is_possible_for(url: &str) -> Result<(), AddressError> {
    let scheme = url.split_once("://").unwrap_or_default().0;
    match known(scheme) {
        Some((_, "rediss" | "valkeys", _)) => tls_is_possible(),
        Some(_) | None => Ok(()),
    }
}

fn read(url: &str) -> Result<ConnectionInfo, AddressError> {
    url.into_connection_info().map_err(|error| match error.to_string().contains("UTF-8") {
        true => AddressError::NotEncoded,
        false => AddressError::Unreadable(error),
    })
}

fn with_port(host: &str) -> String {
    // The colons of an IPv6 address stand in brackets.
    match host.rsplit(']').next() {
        Some(tail) if !tail.contains(':') => format!("{host}:{SENTINEL_PORT}"),
        Some(_) | None => host.to_owned(),
    }
}

/// Host and port of an address; a socket has neither.
pub(super) fn place_of(info: &ConnectionInfo) -> Option<(&str, u16)> {
    match info.addr() {
        ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => {
            Some((host, *port))
        }
        ConnectionAddr::Unix(_) => None,
        // A kind that redis-rs may add.
        _ => None,
    }
}

/// The same way to connect, to another place.
pub(super) fn moved(info: &ConnectionInfo, host: &str, port: u16) -> ConnectionInfo {
    let host = host.to_owned();
    let address = if let ConnectionAddr::TcpTls { insecure, tls_params, .. } = info.addr() {
        let (insecure, tls_params) = (*insecure, tls_params.clone());
        ConnectionAddr::TcpTls { host, port, insecure, tls_params }
    } else {
        ConnectionAddr::Tcp(host, port)
    };
    info.clone().set_addr(address)
}

#[cfg(feature = "redis-tls")]
fn tls_is_possible() -> Result<(), AddressError> {
    // Without one, rustls panics when it connects. The choice is the program's.
    match ::rustls::crypto::CryptoProvider::get_default() {
        Some(_) => Ok(()),
        None => Err(AddressError::NoCryptoProvider),
    }
}

#[cfg(not(feature = "redis-tls"))]
fn tls_is_possible() -> Result<(), AddressError> {
    // An address that asks for it is refused before.
    Ok(())
}

#[cfg(feature = "redis-tls")]
fn secured(
    info: ConnectionInfo,
    certificates: Option<&Certificates>,
) -> Result<ConnectionInfo, AddressError> {
    let Some(certificates) = certificates else { return Ok(info) };
    if !matches!(info.addr(), ConnectionAddr::TcpTls { .. }) {
        return Err(AddressError::CertificatesWithoutTls);
    }
    // Without a complaint it would be taken for an empty list, and every server for a stranger.
    let begin = b"-----BEGIN CERTIFICATE-----";
    if let Some(root) = &certificates.root_cert
        && !root.windows(begin.len()).any(|part| part == begin)
    {
        return Err(AddressError::NoCertificate);
    }
    let client = ::redis::Client::build_with_tls(info, certificates.clone());
    let client = client.map_err(AddressError::Certificates)?;
    Ok(client.get_connection_info().clone())
}

#[cfg(not(feature = "redis-tls"))]
fn secured(
    info: ConnectionInfo,
    _certificates: Option<&Certificates>,
) -> Result<ConnectionInfo, AddressError> {
    Ok(info)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(infos: &[ConnectionInfo]) -> Vec<(&str, u16)> {
        infos.iter().filter_map(place_of).collect()
    }

    #[test]
    fn the_hosts_of_a_cluster_share_user_and_password() {
        let Ok(Address::Cluster(seeds)) =
            Address::parse("redis+cluster://pay:pa%40ss@a:7001,[::1]:7002,c", None)
        else {
            panic!("a cluster")
        };
        assert_eq!(places(&seeds), [("a", 7001), ("::1", 7002), ("c", 6379)]);
        assert!(seeds.iter().all(|seed| seed.redis_settings().username() == Some("pay")));
        assert!(Address::parse("redis+cluster://a:1/3", None).is_err());
        assert!(Address::parse("redis+cluster://", None).is_err());
    }

    #[test]
    fn sentinels_do_not_get_the_password_of_the_primary() {
        let Ok(Address::Sentinel { sentinels, name, primary }) =
            Address::parse("redis+sentinel://u:p@a,b:7,[::1]/pay/4", None)
        else {
            panic!("Sentinels")
        };
        assert_eq!(places(&sentinels), [("a", 26_379), ("b", 7), ("::1", 26_379)]);
        assert!(sentinels.iter().all(|sentinel| sentinel.redis_settings().username().is_none()));
        assert_eq!((&*name, primary.redis_settings().db()), ("pay", 4));
        assert_eq!(primary.redis_settings().username(), Some("u"));
        for bad in ["redis+sentinel://a:1", "redis+sentinel://a:1/", "redis+sentinel:///m"] {
            assert!(Address::parse(bad, None).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_replicas_to_wait_for_are_taken_out_of_an_address() {
        let taken = |url: &str| take_wait(url).map_err(|error| error.to_string());
        for (url, rest, wait) in [
            ("redis://h:1", "redis://h:1", None),
            ("redis://h:1?wait=2", "redis://h:1", Some(2)),
            ("redis://h:1/3?wait=0#x", "redis://h:1/3#x", Some(0)),
            ("redis://h:1/3#?wait=1", "redis://h:1/3#?wait=1", None),
            ("unix:///s?db=1&wait=1&pass=a", "unix:///s?db=1&pass=a", Some(1)),
        ] {
            assert_eq!(taken(url), Ok((rest.to_owned(), wait)), "{url}");
        }
        for bad in ["wait", "wait=", "wait=x", "wait=-1", "wait=+1", "wait=99999999999"] {
            assert!(taken(&format!("redis://h?{bad}")).is_err(), "{bad}");
        }
        assert!(taken("redis://h?wait=1&wait=1").is_err());
        assert!(Address::parse("redis://h?wiat=1", None).is_err(), "a slip is not passed over");
    }

    #[test]
    fn an_address_in_another_place_keeps_everything_else() {
        let info = "redis://u:p@a:1/2".into_connection_info().unwrap();
        let info = moved(&info, "b", 3);
        assert_eq!(place_of(&info), Some(("b", 3)));
        assert_eq!((info.redis_settings().db(), info.redis_settings().username()), (2, Some("u")));
    }
}
