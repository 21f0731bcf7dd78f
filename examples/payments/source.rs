//! Test sources: what test cards are to a card sandbox. Each one fails in its own way.

use std::time::Duration;

/// What a source makes the sandbox do.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Source {
    Visa,
    Declined,
    Slow(Duration),
    ChargeThenSlow(Duration),
    ChargeThen500,
    Unavailable,
    /// Says so after that long.
    UnavailableOnce(Duration),
    RateLimited,
    Panic(When),
    Crash(When),
    /// How many bytes of padding the answer carries, and how long after the charge it comes.
    Large(usize, Duration),
    Stream,
    Empty,
}

/// Before or after the charge; or between the two steps of a payment whose money is set aside first.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum When {
    Before,
    Between,
    After,
}

/// Ten minutes: longer than any client waits.
const SLOWEST_MS: u32 = 600_000;
/// 16 MiB: many of them at once fit into memory.
const LARGEST_KIB: u32 = 16 * 1024;

impl Source {
    /// The source of this name, if there is one.
    pub(crate) fn parse(name: &str) -> Option<Self> {
        let source = match name.strip_prefix("tok_")? {
            "visa" => Self::Visa,
            "declined" => Self::Declined,
            "charge_then_500" => Self::ChargeThen500,
            "unavailable" => Self::Unavailable,
            "unavailable_once" => Self::UnavailableOnce(Duration::ZERO),
            "rate_limited" => Self::RateLimited,
            "panic_before" => Self::Panic(When::Before),
            "panic_after" => Self::Panic(When::After),
            "crash_before" => Self::Crash(When::Before),
            "crash_between" => Self::Crash(When::Between),
            "crash_after" => Self::Crash(When::After),
            "stream" => Self::Stream,
            "empty" => Self::Empty,
            name => {
                if let Some(ms) = name.strip_prefix("slow_") {
                    Self::Slow(millis(ms)?)
                } else if let Some(ms) = name.strip_prefix("charge_then_slow_") {
                    Self::ChargeThenSlow(millis(ms)?)
                } else if let Some(ms) = name.strip_prefix("unavailable_once_after_") {
                    Self::UnavailableOnce(millis(ms)?)
                } else {
                    let name = name.strip_prefix("large_")?;
                    let (kib, ms) = name.split_once("_after_").unwrap_or((name, "0"));
                    Self::Large(number(kib, LARGEST_KIB)? as usize * 1024, millis(ms)?)
                }
            }
        };
        Some(source)
    }
}

fn millis(text: &str) -> Option<Duration> {
    number(text, SLOWEST_MS).map(|ms| Duration::from_millis(ms.into()))
}

fn number(text: &str, at_most: u32) -> Option<u32> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|&number| digits && number <= at_most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_known_by_name_and_absurd_ones_are_not() {
        assert_eq!(Source::parse("tok_visa"), Some(Source::Visa));
        assert_eq!(Source::parse("tok_slow_5"), Some(Source::Slow(Duration::from_millis(5))));
        assert_eq!(
            Source::parse("tok_charge_then_slow_600000"),
            Some(Source::ChargeThenSlow(Duration::from_secs(600)))
        );
        assert_eq!(Source::parse("tok_large_2"), Some(Source::Large(2048, Duration::ZERO)));
        assert_eq!(
            Source::parse("tok_large_2_after_5"),
            Some(Source::Large(2048, Duration::from_millis(5)))
        );
        assert_eq!(
            Source::parse("tok_unavailable_once_after_5"),
            Some(Source::UnavailableOnce(Duration::from_millis(5)))
        );
        assert_eq!(Source::parse("tok_crash_between"), Some(Source::Crash(When::Between)));
        assert_eq!(Source::parse("tok_panic_after"), Some(Source::Panic(When::After)));
        for name in [
            "",
            "visa",
            "tok_",
            "tok_amex",
            "tok_slow_",
            "tok_slow_-1",
            "tok_slow_+1",
            "tok_slow_600001",
            "tok_large_16385",
            "tok_large_2_after_",
            "tok_large_99999999999999999999",
            "tok_VISA",
        ] {
            assert_eq!(Source::parse(name), None, "{name}");
        }
    }
}
