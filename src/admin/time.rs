//! Moments and lengths of time, for people and for scripts.

use std::time::Duration;

use crate::record::Millis;

/// A moment as RFC 3339 writes it, in UTC and with milliseconds.
#[must_use]
pub fn rfc3339(moment: Millis) -> String {
    let (seconds, millis) = (moment.0 / 1_000, moment.0 % 1_000);
    let (day, second) = (seconds / 86_400, seconds % 86_400);
    let (year, month, date) = civil(day);
    let (hour, minute, second) = (second / 3_600, second % 3_600 / 60, second % 60);
    format!("{year:04}-{month:02}-{date:02}T{hour:02}:{minute:02}:{second:02}.{millis:03}Z")
}

/// Year, month and day of a day since 1970, in the Gregorian calendar. Eras of 400 years begin in March, so
/// that the leap day comes last.
fn civil(day: u64) -> (u64, u64, u64) {
    let shifted = day + 719_468;
    let (era, of_era) = (shifted / 146_097, shifted % 146_097);
    let year = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let date = of_year - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    (era * 400 + year + next, month, date)
}

/// A length of time in the one or two largest units, for example `3m 20s`.
#[must_use]
pub fn brief(length: Duration) -> String {
    let seconds = length.as_secs();
    let two = |large: u64, name: char, small: u64, small_name: char| match small {
        0 => format!("{large}{name}"),
        _ => format!("{large}{name} {small}{small_name}"),
    };
    match seconds {
        0 => format!("{}ms", length.as_millis()),
        1..60 => format!("{seconds}s"),
        60..3_600 => two(seconds / 60, 'm', seconds % 60, 's'),
        3_600..86_400 => two(seconds / 3_600, 'h', seconds % 3_600 / 60, 'm'),
        _ => two(seconds / 86_400, 'd', seconds % 86_400 / 3_600, 'h'),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_those_of_the_calendar() {
        for (moment, text) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_399_999, "2000-02-28T23:59:59.999Z"),
            (951_782_400_000, "2000-02-29T00:00:00.000Z"),
            (951_868_800_001, "2000-03-01T00:00:00.001Z"),
            (1_764_403_200_000, "2025-11-29T08:00:00.000Z"),
            (4_107_542_400_000, "2100-03-01T00:00:00.000Z"),
        ] {
            assert_eq!(rfc3339(Millis(moment)), text);
        }
    }

    #[test]
    fn lengths_are_brief() {
        for (seconds, text) in [
            (0.25, "250ms"),
            (59.9, "59s"),
            (60.0, "1m"),
            (200.0, "3m 20s"),
            (7_260.0, "2h 1m"),
            (180_000.0, "2d 2h"),
        ] {
            assert_eq!(brief(Duration::from_secs_f64(seconds)), text);
        }
    }
}
