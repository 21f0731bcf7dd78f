//! Words for why there is no connection: where to, and what to change.

use ::redis::{ConnectionAddr, ConnectionInfo, ErrorKind, RedisError};

use super::DialError;

/// How a password stands in an address.
pub(super) const ENCODED: &str = "percent-encoded: / as %2F, # as %23, ? as %3F, @ as %40, % as %25, & as %26, \
                                  + as %2B";

/// Where a connection leads to, never with user and password.
pub(super) fn place(info: &ConnectionInfo) -> Box<str> {
    match info.addr() {
        ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => {
            match host.contains(':') {
                true => format!("[{host}]:{port}").into(),
                false => format!("{host}:{port}").into(),
            }
        }
        ConnectionAddr::Unix(path) => path.display().to_string().into(),
        // A kind that redis-rs may add.
        _ => "the server".into(),
    }
}

/// Why a server was not reached, or did not let us in before it said anything about user and password.
pub(super) fn of_no_line(info: &ConnectionInfo, error: RedisError) -> DialError {
    let place = place(info);
    if let Some(advice) = of_certificates(&error) {
        return DialError::Certificate { place, reason: error.to_string().into(), advice };
    }
    match of_select(&error) {
        Some((reason, advice)) => {
            let database = info.redis_settings().db();
            DialError::Select { place, database, reason, advice }
        }
        None => DialError::Unreached { place, error },
    }
}

pub(super) fn unreached(place: &str, error: &RedisError) -> String {
    if error.is_connection_refusal() {
        return format!(
            "nobody listens at {place} ({error}): start Redis there, or correct the address"
        );
    }
    let said = error.to_string();
    if said.contains("lookup address") || said.contains("no address") {
        return format!(
            "the host of {place} has no address ({said}): correct the host, or look if this machine can \
             resolve it"
        );
    }
    if error.kind() == ErrorKind::Parse || said.contains("Parse error") {
        return format!(
            "what answers at {place} does not speak the protocol of Redis: correct the host or the port"
        );
    }
    if error.is_timeout() {
        return format!(
            "{place} does not answer in time ({said}): is that its host and port, and does every firewall \
             let us through?"
        );
    }
    format!("no connection to {place}: {said}")
}

/// What to change if it is a certificate that is refused, on either side.
fn of_certificates(error: &RedisError) -> Option<&'static str> {
    let said = error.to_string();
    let has = |words: &[&str]| words.iter().any(|word| said.contains(word));
    if said.contains("invalid peer certificate") {
        return Some(if has(&["NotValidForName", "not valid for name"]) {
            "it is not for the host in the address: write a name that the certificate has, or have one made \
             for this host (subjectAltName)"
        } else if has(&["NotValidYet", "not valid yet", "Expired", "expired"]) {
            "its time is over or not yet there: renew it on the server, or set the clock of this machine"
        } else if has(&["UnknownIssuer"]) {
            "nobody whom this program trusts has signed it: give it the certificate of the authority that \
             did, `RedisStore::builder().tls(TlsCertificates { root_cert, .. })`"
        } else {
            "have the server's certificate made anew, or give this program the authority that signed it, \
             `RedisStore::builder().tls(TlsCertificates { root_cert, .. })`"
        });
    }
    let refused = ["CertificateRequired", "certificate required", "BadCertificate", "UnknownCA"];
    said.contains("fatal alert").then_some(()).filter(|()| has(&refused)).map(|()| {
        "the server wants to see a certificate of ours that it trusts: give it one, \
         `RedisStore::builder().tls(TlsCertificates { client_tls, .. })`"
    })
}

/// The server's words, and what to change, if it is the database that is refused.
pub(super) fn of_select(error: &RedisError) -> Option<(Box<str>, &'static str)> {
    if !error.to_string().contains("refused to switch database") {
        return None;
    }
    let reason = error.detail().unwrap_or("it says no more");
    let advice = if reason.contains("permissions") {
        "grant the user `+select`, or leave the database out of the address"
    } else if reason.contains("out of range") {
        "write a smaller number, or raise `databases` in redis.conf"
    } else if reason.contains("cluster mode") {
        "a cluster has none but 0: write redis+cluster:// and no database"
    } else if reason.contains("Authentication required") {
        "the server asks for a password: write redis://user:password@host:port/database"
    } else {
        return None;
    };
    Some((reason.into(), advice))
}
