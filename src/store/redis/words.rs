//! A command as it goes out: its words, each behind its length.
//!
//! Written once, where the command is made, and copied from there to the connection. The library's
//! commands keep their words apart and put the lengths in when they are sent.

use std::cell::RefCell;
use std::ops::Range;

use ::redis::Cmd;

/// Commands that go out in one piece.
pub(super) trait Commands {
    /// Adds a command.
    fn command(&mut self, command: &Words);

    /// Adds a command of the library.
    fn foreign(&mut self, command: &Cmd);

    /// Adds a command of a few words, each in pieces.
    fn words(&mut self, words: &[&[&[u8]]]);

    /// Adds TIME. Its answer may come as a number, in milliseconds.
    fn time(&mut self) {
        self.words(&[&[b"TIME"]]);
    }

    /// Adds PEXPIRETIME of this key.
    fn expiry(&mut self, key: &[u8]) {
        self.words(&[&[b"PEXPIRETIME"], &[key]]);
    }
}

/// The words of a command.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(super) struct Words {
    bytes: Vec<u8>,
    count: usize,
}

/// The size of buffers that are kept, in bytes: that of a command with a small answer in it.
const KEPT_BYTES: usize = 1_024;

/// How many of them a thread keeps at most: as many as a busy one has under way.
const KEPT: usize = 64;

thread_local! {
    /// Buffers of commands that are done. Every request makes two, and has them until it has its reply: of what lives as long
    /// as that, an allocator's own caches hold too few.
    static KEPT_BUFFERS: RefCell<Vec<Vec<u8>>> = const { RefCell::new(Vec::new()) };
}

impl Drop for Words {
    fn drop(&mut self) {
        if self.bytes.capacity() != KEPT_BYTES {
            return;
        }
        let mut buffer = std::mem::take(&mut self.bytes);
        buffer.clear();
        // A thread that ends keeps nothing any more.
        let _ = KEPT_BUFFERS.try_with(|kept| {
            let mut kept = kept.borrow_mut();
            if kept.len() < KEPT {
                kept.push(buffer);
            }
        });
    }
}

impl Words {
    /// Room for so many bytes, lengths included.
    pub(super) fn with_room(bytes: usize) -> Self {
        if bytes > KEPT_BYTES {
            return Self { bytes: Vec::with_capacity(bytes), count: 0 };
        }
        let kept = KEPT_BUFFERS.try_with(|kept| kept.borrow_mut().pop()).ok().flatten();
        Self { bytes: kept.unwrap_or_else(|| Vec::with_capacity(KEPT_BYTES)), count: 0 }
    }

    /// The words of a command of the library, and where its first argument stands.
    pub(super) fn of(command: &Cmd) -> (Self, Range<usize>) {
        let (mut words, mut first) = (Self::default(), 0..0);
        for word in command.args_iter() {
            // The other kind stands for the cursor of a scan, and no call here has one.
            if let ::redis::Arg::Simple(word) = word {
                let place = words.placed(word);
                if words.count == 2 {
                    first = place;
                }
            }
        }
        (words, first)
    }

    pub(super) fn word(&mut self, word: &[u8]) -> &mut Self {
        line(&mut self.bytes, b'$', word.len() as u64);
        self.bytes.extend_from_slice(word);
        self.bytes.extend_from_slice(b"\r\n");
        self.count += 1;
        self
    }

    /// Words that are written already.
    pub(super) fn all(&mut self, words: &Self) -> &mut Self {
        self.bytes.extend_from_slice(&words.bytes);
        self.count += words.count;
        self
    }

    /// A word, and where it stands among the bytes.
    pub(super) fn placed(&mut self, word: &[u8]) -> Range<usize> {
        self.word(word);
        let end = self.bytes.len() - 2;
        end - word.len()..end
    }

    /// One word of several pieces.
    pub(super) fn pieces(&mut self, pieces: &[&[u8]]) -> &mut Self {
        line(&mut self.bytes, b'$', pieces.iter().map(|piece| piece.len() as u64).sum());
        for piece in pieces {
            self.bytes.extend_from_slice(piece);
        }
        self.bytes.extend_from_slice(b"\r\n");
        self.count += 1;
        self
    }

    /// A number in decimal.
    pub(super) fn number(&mut self, number: u64) -> &mut Self {
        let mut digits = [0; DIGITS];
        self.word(decimal(number, &mut digits))
    }

    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// All of them as they go out.
    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// What stands there.
    pub(super) fn at(&self, place: Range<usize>) -> &[u8] {
        &self.bytes[place]
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &[u8]> {
        let mut rest = &self.bytes[..];
        std::iter::from_fn(move || {
            let end = rest.iter().position(|&byte| byte == b'\r')?;
            let digits = &rest[1..end];
            let length =
                digits.iter().fold(0, |length, digit| length * 10 + usize::from(digit - b'0'));
            let (word, behind) = rest[end + 2..].split_at(length);
            rest = &behind[2..];
            Some(word)
        })
    }
}

/// The digits of the greatest number.
const DIGITS: usize = 20;

/// Adds a line that consists of a mark and a number.
pub(super) fn line(bytes: &mut Vec<u8>, mark: u8, number: u64) {
    // Nearly all are this short, and each goes in as one piece.
    let digit = |value: u64| b'0' + u8::try_from(value % 10).unwrap_or_default();
    match number {
        0..10 => bytes.extend_from_slice(&[mark, digit(number), b'\r', b'\n']),
        10..100 => {
            bytes.extend_from_slice(&[mark, digit(number / 10), digit(number), b'\r', b'\n']);
        }
        100..1000 => {
            let (hundreds, tens) = (digit(number / 100), digit(number / 10));
            bytes.extend_from_slice(&[mark, hundreds, tens, digit(number), b'\r', b'\n']);
        }
        _ => {
            let mut digits = [0; DIGITS];
            bytes.push(mark);
            bytes.extend_from_slice(decimal(number, &mut digits));
            bytes.extend_from_slice(b"\r\n");
        }
    }
}

fn decimal(mut number: u64, digits: &mut [u8; DIGITS]) -> &[u8] {
    let mut first = DIGITS;
    loop {
        first -= 1;
        // One digit fits into a byte.
        digits[first] = b'0' + u8::try_from(number % 10).unwrap_or_default();
        number /= 10;
        if number == 0 {
            return &digits[first..];
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn words_are_read_again_as_they_were_written(words in proptest::collection::vec(any::<Vec<u8>>(), 0..9)) {
            let mut command = Words::default();
            let (mut of_the_library, mut again) = (Cmd::new(), Words::default());
            for word in &words {
                let (one, other) = word.split_at(word.len() / 2);
                command.pieces(&[one, other]);
                of_the_library.arg(word);
                let place = again.placed(word);
                prop_assert_eq!(again.at(place), &word[..]);
            }
            prop_assert_eq!(command.count(), words.len());
            let (of_the_library, first) = Words::of(&of_the_library);
            prop_assert_eq!(&of_the_library, &command);
            prop_assert_eq!(of_the_library.at(first), words.get(1).map_or(&[][..], |word| word));
            prop_assert_eq!(command.iter().collect::<Vec<_>>(), words);
            prop_assert_eq!(&again, &command);
            let mut copied = Words::default();
            prop_assert_eq!(copied.all(&again), &command);
        }
    }

    #[test]
    fn buffers_are_used_again_clean_and_a_thread_keeps_neither_large_ones_nor_many() {
        let kept = || KEPT_BUFFERS.with_borrow(Vec::len);
        let mut command = Words::with_room(9);
        command.word(b"secret");
        drop(command);
        assert_eq!(kept(), 1);
        let again = Words::with_room(KEPT_BYTES);
        assert_eq!((kept(), again.as_bytes(), again.count()), (0, &b""[..], 0));
        let mut grown = Words::with_room(9);
        grown.word(&[7; KEPT_BYTES]);
        drop((grown, Words::with_room(KEPT_BYTES + 1), Words::default()));
        assert_eq!(kept(), 0);
        drop((0..2 * KEPT).map(|_| Words::with_room(9)).collect::<Vec<_>>());
        assert_eq!(kept(), KEPT);
    }

    #[test]
    fn numbers_are_decimal() {
        let mut words = Words::default();
        words.number(0).number(9).number(10).number(u64::MAX);
        let expected: [&[u8]; 4] = [b"0", b"9", b"10", b"18446744073709551615"];
        assert_eq!(words.iter().collect::<Vec<_>>(), expected);
    }
}
