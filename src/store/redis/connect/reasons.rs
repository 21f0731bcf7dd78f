//! Words for why there is no connection: where to, and what to change.

use std::borrow::Cow;

use ::redis::{ConnectionAddr, ConnectionInfo, ErrorKind, RedisError};

use super::DialError;
use crate::store::redis::setup::RIGHTS;

/// How a password stands in an address.
pub(super) const ENCODED: &str = "percent-encoded: / as %2F, # as %23, ? as %3F, @ as %40, % as %25, & as %26, \
                                  + as %2B";

/// What to do about an address without a password.
pub(in crate::store::redis) const PASSWORD_MISSING: &str = "the server asks for a password, and the address has none: write redis://user:password@host, or \
     redis://:password@host for the user `default` (what stands before the @ without a colon is a user); where an \
     address has several hosts it stands before the first, redis+sentinel://user:password@host:port,host:port/master-name; \
     `ACL LIST` on the server shows whom it lets in";

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

/// The same of a server that asks for a password, if there is none in the address.
pub(super) fn of_no_password(info: &ConnectionInfo, error: &RedisError) -> Option<DialError> {
    let missing = error.code() == Some("NOAUTH") && info.redis_settings().password().is_none();
    missing.then(|| DialError::PasswordMissing {
        place: place(info),
        reason: error.to_string().into(),
    })
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
    let refused = [
        "CertificateRequired",
        "certificate required",
        "BadCertificate",
        "UnknownCA",
        "CertificateExpired",
        "CertificateRevoked",
        "CertificateUnknown",
        "UnsupportedCertificate",
    ];
    said.contains("fatal alert").then_some(()).filter(|()| has(&refused)).map(|()| {
        "the server wants to see a certificate of ours that it trusts and that is not over: give it one, \
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
        PASSWORD_MISSING
    } else {
        return None;
    };
    Some((reason.into(), advice))
}

/// What it means that a server refused a command, and what to change.
pub(super) fn of_refusal(error: &RedisError, user: Option<&str>) -> Option<Cow<'static, str>> {
    let words = match error.code() {
        Some("OOM") => {
            "Redis is full: raise maxmemory, or wait until records are past their retention"
        }
        Some("READONLY") => "the server is a read-only replica: its primary has to be reached",
        Some("LOADING") => "the server has just started and still reads its data: that passes",
        Some("MISCONF") => "the server cannot write to its disk: look at its disk and its log",
        Some("BUSY") => "a script of somebody's holds the server up: `SCRIPT KILL` ends it",
        Some("NOAUTH") => PASSWORD_MISSING,
        Some("NOREPLICAS") => {
            "the server misses replicas that its `min-replicas-to-write` asks for: attach them"
        }
        Some("CLUSTERDOWN") => {
            "the cluster is down: `CLUSTER INFO` on a node says which slots fail"
        }
        Some("MASTERDOWN") => "the server is a replica that has lost its primary",
        _ if is_about_rights(error) => return Some(of_rights(error, user).into()),
        _ => return None,
    };
    Some(words.into())
}

pub(in crate::store::redis) fn is_about_rights(error: &RedisError) -> bool {
    // Redis 7.0 gives the refusal of a command inside a script no code of its own.
    error.code() == Some("NOPERM")
        || error.to_string().contains("The user executing the script can't")
}

fn of_rights(error: &RedisError, user: Option<&str>) -> String {
    let (said, user) = (error.to_string(), user.unwrap_or("USER"));
    let behind = said.split_once("to run the '").map(|(_, behind)| behind);
    match behind.and_then(|behind| behind.split_once('\'')) {
        Some((command, _)) => {
            format!("the user lacks the right to `{command}`: `ACL SETUSER {user} +{command}`")
        }
        None if said.contains("access") && said.contains("key") => format!(
            "the user may not use this key: `ACL SETUSER {user} ~idem:*`, with the prefix of the store"
        ),
        None => format!(
            "the user lacks a right that a script needs: `ACL SETUSER {user} {RIGHTS}` grants all of them"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_says_what_to_change_in_the_words_of_every_version() {
        let words = |code: &str, detail: &str| {
            let error = ::redis::make_extension_error(code.to_owned(), Some(detail.to_owned()));
            of_refusal(&error, Some("pay")).unwrap_or_default().into_owned()
        };
        let of_command = "this user has no permissions to run the 'set' command";
        assert!(words("NOPERM", of_command).ends_with("`ACL SETUSER pay +set`"));
        let in_script =
            "ACL failure in script: User pay has no permissions to run the 'get' command";
        assert!(words("NOPERM", in_script).ends_with("`ACL SETUSER pay +get`"));
        for of_key in [
            "No permissions to access a key",
            "this user has no permissions to access one of the keys used as arguments",
        ] {
            assert!(words("NOPERM", of_key).contains("`ACL SETUSER pay ~idem:*`"));
        }
        let of_7_0 = "The user executing the script can't run this command or subcommand script";
        assert!(words("ERR", of_7_0).contains("+pexpiretime"), "{}", words("ERR", of_7_0));
        assert!(words("OOM", "command not allowed").contains("maxmemory"));
        assert!(words("NOAUTH", "Authentication required.").contains("user:password@host"));
        assert_eq!(words("ERR", "syntax error"), "");
    }
}
