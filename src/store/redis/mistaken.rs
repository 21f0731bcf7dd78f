//! Mistakes in the scripts, as switches: a piece of a script's text is replaced by a wrong one.
//!
//! Without the feature `mistakes` a script is sent as it is written.

use std::borrow::Cow;

/// The text of a script as it is sent.
#[cfg(not(feature = "mistakes"))]
#[inline]
pub(super) const fn as_sent(_file: &str, text: &'static str) -> Cow<'static, str> {
    Cow::Borrowed(text)
}

#[cfg(feature = "mistakes")]
pub(super) use switches::as_sent;

#[cfg(feature = "mistakes")]
mod switches {
    use super::Cow;
    use crate::mistakes::{Mistake, made};

    /// In this file stands the one piece, and with the mistake the other one.
    struct Switch {
        mistake: Mistake,
        file: &'static str,
        right: &'static str,
        wrong: &'static str,
    }

    macro_rules! switches {
        ($($mistake:ident $file:literal $right:literal => $wrong:literal),+ $(,)?) => {
            &[$(Switch {
                mistake: Mistake::$mistake,
                file: $file,
                right: $right,
                wrong: $wrong,
            }),+]
        };
    }

    const SWITCHES: &[Switch] = switches! {
        ScriptStateBeforeRequest "claim.lua"
            "if state ~= 2 and sub(record, 3, 38)"
            => "if state ~= 1 and state ~= 2 and state ~= 5 and sub(record, 3, 38)",
        ScriptUnreadableIsAbsent "claim.lua"
            "if not record then"
            => "if not record or string.byte(record, 1) ~= 1 then",
        ScriptRunsWhatExpired "claim.lua"
            "if state == 1 and not reexecute then"
            => "if false then",
        ScriptTakeoverIsUntouched "claim.lua"
            "if takeover == 1 then begun = '\\1\\1' end"
            => "",
        ScriptRenewsForAnybody "renew.lua"
            "if (state ~= 1 and state ~= 5) or sub(record, 39, 54) ~= sub(owner, 1, 16) then"
            => "if state ~= 1 and state ~= 5 then",
        ScriptCompletesForAnybody "complete.lua"
            "local mine = sub(record, 39, 54) == sub(ended, 39, 54)"
            => "local mine = true\nif state == 4 then state = 1 end",
        ScriptLoserComparesNothing "complete.lua"
            "return {5}"
            => "return {4, stored}",
        ScriptStoredAgainIsNotWritten "complete.lua"
            "redis.call('SET', key, record, 'KEEPTTL')"
            => "",
        ScriptCompletesLargeForAnybody "complete_large.lua"
            "local mine = sub(record, 39, 54) == sub(head, 39, 54)"
            => "local mine = true\n  if state == 4 then state = 1 end",
        ScriptLoserOfLargeComparesNothing "complete_large.lua"
            "same = sub(prints, i + 4, i + 35) == sub(record, 7, 38)"
            => "same = true",
        ScriptReleasesForAnybody "release.lua"
            "if sub(record, 39, 54) ~= holder or state == 4 then return {2} end"
            => "",
        ScriptResolvesAnything "resolve.lua"
            "if struct.unpack('>I4', record, 55) ~= judged then return {2} end"
            => "",
        ScriptResolvesAnything "resolve.lua"
            "if unknown and owner == holder then"
            => "if true then",
        ScriptResolvesUnfenced "resolve.lua"
            "sub(record, 3, 38) .. NOBODY .. sub(record, 55, 70)"
            => "sub(record, 3, 70)",
        ScriptAmendsAnything "amend.lua"
            "if sub(record, 2, 2) .. sub(record, 39, 58) .. sub(record, 71, 76) == seen then"
            => "if true then",
        ScriptForgetsAnything "forget.lua"
            "if held then return {3, at - now} end"
            => "",
        ScriptForgetsAnything "forget.lua"
            "if sub(record, 2, 2) .. sub(record, 39, 58) .. sub(record, 71, 76) ~= seen then return {4} end"
            => "",
    };

    pub(in super::super) fn as_sent(file: &str, text: &'static str) -> Cow<'static, str> {
        let switched_on =
            SWITCHES.iter().filter(|switch| switch.file == file && made(switch.mistake));
        switched_on.fold(Cow::Borrowed(text), |text, switch| match switch.applied_to(&text) {
            Ok(text) => Cow::Owned(text),
            Err(found) => {
                // A panic would make a test red, and nobody would see that the mistake was not made.
                eprintln!("{file} has {:?} {found} times: {:?}", switch.right, switch.mistake);
                std::process::abort()
            }
        })
    }

    impl Switch {
        /// The text with the mistake; how often the piece is there if that is not once.
        fn applied_to(&self, text: &str) -> Result<String, usize> {
            match text.matches(self.right).count() {
                1 => Ok(text.replacen(self.right, self.wrong, 1)),
                found => Err(found),
            }
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn each_piece_that_a_switch_replaces_stands_in_its_script_once() {
            for switch in SWITCHES {
                let text = super::super::super::call::text_of(switch.file);
                let mistaken = switch.applied_to(text);
                assert!(
                    mistaken.as_ref().is_ok_and(|mistaken| mistaken != text),
                    "{:?}, {}: {mistaken:?}",
                    switch.mistake,
                    switch.file
                );
            }
        }

        #[test]
        fn a_piece_that_is_missing_or_stands_there_twice_is_not_replaced() {
            let switch = &SWITCHES[0];
            assert_eq!(switch.applied_to(""), Err(0));
            assert_eq!(switch.applied_to(&switch.right.repeat(2)), Err(2));
        }
    }
}
