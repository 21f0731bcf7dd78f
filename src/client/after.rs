//! `Retry-After`: when the server wants to be asked again.

use std::time::{Duration, SystemTime};

use http::header::{DATE, RETRY_AFTER};
use http::{HeaderMap, HeaderValue};

/// How long the server asks to wait, as far as it says so in a form that can be read.
///
/// Both forms are read: seconds, and a date. A date is compared with the answer's own `Date`, so that a
/// local clock that is off does not matter; `now` stands in where there is none. What cannot be read (negative,
/// fractions, words) counts as not said; of several lines the longest wait counts.
pub(super) fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let now = headers.get(DATE).and_then(date).unwrap_or(now);
    headers.get_all(RETRY_AFTER).iter().filter_map(|value| wait(value, now)).max()
}

fn wait(value: &HeaderValue, now: SystemTime) -> Option<Duration> {
    let text = value.to_str().ok()?.trim();
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        // More digits than fit mean "very long", which the caller caps.
        return Some(Duration::from_secs(text.parse().unwrap_or(u64::MAX)));
    }
    let at = httpdate::parse_http_date(text).ok()?;
    Some(at.duration_since(now).unwrap_or_default())
}

fn date(value: &HeaderValue) -> Option<SystemTime> {
    httpdate::parse_http_date(value.to_str().ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(lines: &[&str], date: Option<&str>) -> Option<u64> {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append(RETRY_AFTER, HeaderValue::from_str(line).unwrap());
        }
        if let Some(date) = date {
            headers.insert(DATE, HeaderValue::from_str(date).unwrap());
        }
        retry_after(&headers, now).map(|wait| wait.as_secs())
    }

    fn in_seconds(n: u64) -> String {
        httpdate::fmt_http_date(SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000 + n))
    }

    #[test]
    fn seconds_and_dates_are_read_and_everything_else_counts_as_not_said() {
        for (line, expect) in [
            ("2", Some(2)),
            ("0", Some(0)),
            (" 7 ", Some(7)),
            ("99999999999999999999", Some(u64::MAX)),
            (&in_seconds(3), Some(3)),
            ("Sun, 06 Nov 1994 08:49:37 GMT", Some(0)),
            ("-5", None),
            ("1.5", None),
            ("+3", None),
            ("", None),
            ("soon", None),
            ("2 s", None),
        ] {
            assert_eq!(asked(&[line], None), expect, "{line:?}");
        }
        assert_eq!(asked(&[], None), None);
    }

    #[test]
    fn a_date_is_measured_by_the_servers_clock_if_it_shows_one() {
        // The local clock is an hour behind the server's.
        assert_eq!(asked(&[&in_seconds(3603)], Some(&in_seconds(3600))), Some(3));
        assert_eq!(asked(&[&in_seconds(3)], Some("yesterday")), Some(3));
    }

    #[test]
    fn of_several_lines_the_longest_wait_counts() {
        assert_eq!(asked(&["2", "9", "-1"], None), Some(9));
    }
}
