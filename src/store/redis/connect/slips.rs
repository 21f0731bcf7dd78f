//! What people get wrong in an address, found before anything reads it: a password that is not encoded makes
//! another address of it, and what is told of that one would show a part of the password.

use super::address::{AddressError, Kind, known, shown};

/// Looks for slips. `has_tls`: whether this program can speak TLS.
pub(in crate::store::redis) fn find_slip(url: &str, has_tls: bool) -> Result<(), AddressError> {
    let end = match url.trim_start().len() == url.len() {
        false => Some("beginning"),
        true if url.trim_end().len() < url.len() => Some("end"),
        true => None,
    };
    if let Some(end) = end {
        return Err(AddressError::Blank(shown(url).into(), end));
    }
    let Some((scheme, rest)) = url.split_once("://") else { return Err(AddressError::NoScheme) };
    // The path of a socket may have one.
    if !scheme.to_ascii_lowercase().ends_with("unix") && url.contains(char::is_whitespace) {
        return Err(AddressError::BlankInside(shown(url).into()));
    }
    let Some((scheme, server, kind)) = known(scheme) else {
        return Err(AddressError::UnknownScheme(sayable(scheme).into()));
    };
    if !has_tls && matches!(server, "rediss" | "valkeys") {
        return Err(AddressError::TlsFeature(scheme));
    }
    if server.ends_with("unix") {
        // Of what stands in `pass`, this mark cuts the rest off, and nothing would say so.
        let cut = rest.split_once("pass=").is_some_and(|(_, behind)| behind.contains('#'));
        return if cut { Err(AddressError::NotEncoded) } else { Ok(()) };
    }
    let (authority, tail) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    if tail.contains('@') {
        return Err(AddressError::NotEncoded);
    }
    let hosts = authority.rsplit_once('@').map_or(authority, |(_, hosts)| hosts);
    if kind == Kind::One && hosts.contains(',') {
        return Err(AddressError::SeveralHosts);
    }
    hosts.split(',').try_for_each(place)?;
    let path = tail.split(['?', '#']).next().unwrap_or_default().trim_matches('/');
    let database = match kind {
        Kind::One | Kind::Cluster => path,
        Kind::Sentinel => path.split_once('/').map_or("", |(_, database)| database),
    };
    if database.bytes().all(|digit| digit.is_ascii_digit()) {
        Ok(())
    } else {
        Err(AddressError::Database)
    }
}

/// Looks at a host and its port. The port is not told: it may be a password, with the host left out.
fn place(place: &str) -> Result<(), AddressError> {
    // The colons of an IPv6 address stand in brackets.
    let bracket = place.rfind(']').map_or(0, |at| at + 1);
    let (host, port) = match place[bracket..].find(':') {
        Some(at) => (&place[..bracket + at], Some(&place[bracket + at + 1..])),
        None => (place, None),
    };
    let port_is_sound = port.is_none_or(|port| {
        let digits = port.bytes().all(|digit| digit.is_ascii_digit());
        digits && (port.is_empty() || port.parse::<u16>().is_ok_and(|port| port != 0))
    });
    match (host.is_empty(), port_is_sound) {
        (_, false) => Err(AddressError::Port),
        (true, true) => Err(AddressError::NoHost),
        (false, true) => Ok(()),
    }
}

/// A scheme, unless it is something else.
fn sayable(scheme: &str) -> &str {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte);
    if scheme.bytes().all(fits) { scheme } else { "" }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(url: &str) -> String {
        find_slip(url, true).map_or_else(|slip| slip.to_string(), |()| String::new())
    }

    #[test]
    fn tls_without_its_feature_is_refused_by_the_name_of_the_feature() {
        for scheme in ["rediss", "rediss+sentinel", "rediss+cluster", "valkeys", "REDISS"] {
            let url = format!("{scheme}://u:s3cret@h:1/");
            let slip = find_slip(&url, false).unwrap_err().to_string();
            assert!(slip.contains("`redis-tls`"), "{slip}");
            assert!(slip.contains(&scheme.to_lowercase()) && !slip.contains("s3cret"), "{slip}");
            assert_eq!(said(&url), "", "with the feature nothing is wrong with it");
        }
        assert!(find_slip("redis://h:1", false).is_ok());
    }

    #[test]
    fn a_blank_at_either_end_is_told_and_shown() {
        for (url, shown) in [
            (
                " redis://u:s3cret@h:1/",
                r#"" redis://h:1/" has a blank or a line end at its beginning"#,
            ),
            (
                "redis://u:s3cret@h:1\r\n",
                r#""redis://h:1\r\n" has a blank or a line end at its end"#,
            ),
            ("redis://h:1/\t", r#""redis://h:1/\t" has"#),
            ("\u{a0}redis+cluster://a:1,b:2", r#"" redis+cluster://a:1,b:2" has"#),
            ("redis://h?wait=1 ", "at its end"),
        ] {
            let said = said(url);
            assert!(said.replace("\\u{a0}", " ").contains(shown), "{url:?}: {said}");
            assert!(!said.contains("s3cret"), "{said}");
        }
    }

    #[test]
    fn a_blank_in_the_middle_is_told_and_no_password_is_shown() {
        for url in [
            "redis://u:s3cret@local host",
            "redis://u:s3 cret@h:1",
            "redis://h:1/0 redis://u:s3cret@h:1",
            "redis+sentinel://u:s3cret@a, b/m",
            "redis://u:s3cret@h:1?wait= 1",
        ] {
            let said = said(url);
            assert!(said.contains("a blank or a line end in it: take it away"), "{url:?}: {said}");
            assert!(!said.contains("s3"), "{said}");
        }
    }

    #[test]
    fn what_is_right_is_no_slip() {
        for url in [
            "unix:///run/my sockets/redis.sock",
            "redis://localhost",
            "redis://h:1/",
            "redis://u:p@ss:w@rd@h:1/2?protocol=resp3&wait=1",
            "redis://:p%2Fa%23@[::1]:6379/0",
            "redis://[::1]",
            "rediss://h:1#insecure",
            "unix:///run/r@dis.sock?pass=a%23b",
            "redis+sentinel://u:p@a,b:7,[::1]/pay/4",
            "redis+cluster://u:p@a:1,b:2",
        ] {
            assert_eq!(said(url), "", "{url}");
        }
    }
}
