//! The protocol of Redis on the wire (RESP2): commands as they go out, replies as they come in.
//!
//! <https://redis.io/docs/latest/develop/reference/protocol-spec/>

use ::redis::{Cmd, Value, parse_redis_value};

use crate::store::redis::words::{Commands, Words, line};

/// The longest string a server sends: what `proto-max-bulk-len` is unless somebody changes it.
const LONGEST: usize = 512 * 1024 * 1024;

/// The longest line: an error with its text, or a number.
const LINE_MAX: usize = 64 * 1024;

/// How deep replies may be nested. CLUSTER SLOTS has four floors.
const DEEPEST: usize = 8;

/// Commands behind each other, and how many they are.
pub(super) struct Out<'a> {
    bytes: &'a mut Vec<u8>,
    count: usize,
    time: Option<usize>,
}

impl<'a> Out<'a> {
    pub(super) fn new(bytes: &'a mut Vec<u8>) -> Self {
        Self { bytes, count: 0, time: None }
    }

    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Which of the replies is the time.
    pub(super) fn time_at(&self) -> Option<usize> {
        self.time
    }
}

impl Commands for Out<'_> {
    fn command(&mut self, command: &Words) {
        line(self.bytes, b'*', command.count() as u64);
        self.bytes.extend_from_slice(command.as_bytes());
        self.count += 1;
    }

    fn foreign(&mut self, command: &Cmd) {
        command.write_packed_command(self.bytes);
        self.count += 1;
    }

    fn words(&mut self, words: &[&[&[u8]]]) {
        line(self.bytes, b'*', words.len() as u64);
        for pieces in words {
            line(self.bytes, b'$', pieces.iter().map(|piece| piece.len() as u64).sum());
            for piece in *pieces {
                self.bytes.extend_from_slice(piece);
            }
            self.bytes.extend_from_slice(b"\r\n");
        }
        self.count += 1;
    }

    fn time(&mut self) {
        self.time = Some(self.count);
        self.bytes.extend_from_slice(b"*1\r\n$4\r\nTIME\r\n");
        self.count += 1;
    }

    fn expiry(&mut self, key: &[u8]) {
        self.bytes.extend_from_slice(b"*2\r\n$11\r\nPEXPIRETIME\r\n");
        line(self.bytes, b'$', key.len() as u64);
        self.bytes.extend_from_slice(key);
        self.bytes.extend_from_slice(b"\r\n");
        self.count += 1;
    }
}

/// What came is no reply.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("what the server sent is no reply in the protocol of Redis")]
pub(super) struct Malformed;

/// The first reply in these bytes and its length; `None` if it is not whole yet.
pub(super) fn reply(bytes: &[u8]) -> Result<Option<(Value, usize)>, Malformed> {
    let mut reading = Reading { bytes, at: 0 };
    let value = reading.value(DEEPEST)?;
    Ok(value.map(|value| (value, reading.at)))
}

/// The same of an answer to TIME, as a number in milliseconds: a list of two strings is a lot for one. What looks unlike the
/// time of a server is what it is, for its caller to judge, but for a number, which would look like one.
pub(super) fn time(bytes: &[u8]) -> Result<Option<(Value, usize)>, Malformed> {
    if let Some((millis, length)) = millis(bytes) {
        return Ok(Some((Value::Int(millis), length)));
    }
    Ok(reply(bytes)?.map(|(value, length)| {
        let looks_like_one = matches!(value, Value::Int(_));
        (if looks_like_one { Value::Nil } else { value }, length)
    }))
}

/// Seconds of ten digits, as they will have until the year 2286, and microseconds.
fn millis(bytes: &[u8]) -> Option<(i64, usize)> {
    let seconds = bytes.strip_prefix(b"*2\r\n$10\r\n")?;
    let (seconds, 12) = digits(seconds)? else { return None };
    let [b'$', length @ b'1'..=b'6', b'\r', b'\n', micros @ ..] = &bytes[21..] else { return None };
    let (micros, read) = digits(micros)?;
    let length = usize::from(length - b'0') + 2;
    (read == length).then_some((seconds * 1_000 + micros / 1_000, 25 + length))
}

/// What most replies are or end in, read at sight: nothing, and a number that is not long. `None`: it takes a closer look.
fn short(bytes: &[u8]) -> Option<(Value, usize)> {
    match bytes {
        [b':', rest @ ..] => digits(rest).map(|(number, length)| (Value::Int(number), 1 + length)),
        [b'$', b'-', b'1', b'\r', b'\n', ..] => Some((Value::Nil, 5)),
        _ => None,
    }
}

/// As many digits as fit into a number whatever they are.
const DIGITS_MAX: usize = 18;

/// A number and the end of its line, and how long the two are.
fn digits(bytes: &[u8]) -> Option<(i64, usize)> {
    let (mut number, mut length) = (0, 0);
    for &byte in bytes.iter().take(DIGITS_MAX) {
        let digit = byte.wrapping_sub(b'0');
        if digit > 9 {
            break;
        }
        number = number * 10 + i64::from(digit);
        length += 1;
    }
    let ends = length > 0 && bytes.get(length..length + 2) == Some(b"\r\n");
    ends.then_some((number, length + 2))
}

struct Reading<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reading<'a> {
    fn value(&mut self, depth: usize) -> Result<Option<Value>, Malformed> {
        let start = self.at;
        if let Some((value, length)) = short(&self.bytes[start..]) {
            self.at += length;
            return Ok(Some(value));
        }
        let Some((&mark, line)) = self.line()?.and_then(<[u8]>::split_first) else {
            return if self.at > start { Err(Malformed) } else { Ok(None) };
        };
        Ok(Some(match mark {
            b':' => Value::Int(integer(line)?),
            b'+' if line == b"OK" => Value::Okay,
            b'+' => Value::SimpleString(String::from_utf8_lossy(line).into_owned()),
            b'-' => refusal(&self.bytes[start..self.at])?,
            b'$' => match length(line, LONGEST)? {
                None => Value::Nil,
                Some(length) => match self.string(length)? {
                    Some(string) => Value::BulkString(string.to_vec()),
                    None => return Ok(None),
                },
            },
            b'*' => match length(line, LONGEST)? {
                None => Value::Nil,
                Some(_) if depth == 0 => return Err(Malformed),
                Some(length) => {
                    // As many as can be here: a number is soon written.
                    let mut values = Vec::with_capacity(length.min(self.bytes.len() - self.at));
                    for _ in 0..length {
                        match self.value(depth - 1)? {
                            Some(value) => values.push(value),
                            None => return Ok(None),
                        }
                    }
                    Value::Array(values)
                }
            },
            _ => return Err(Malformed),
        }))
    }

    /// The next line, without its end.
    fn line(&mut self) -> Result<Option<&'a [u8]>, Malformed> {
        let rest = &self.bytes[self.at..];
        let Some(end) = rest.iter().take(LINE_MAX).position(|&byte| byte == b'\r') else {
            return if rest.len() < LINE_MAX { Ok(None) } else { Err(Malformed) };
        };
        match rest.get(end + 1) {
            None => Ok(None),
            Some(b'\n') => {
                self.at += end + 2;
                Ok(Some(&rest[..end]))
            }
            Some(_) => Err(Malformed),
        }
    }

    fn string(&mut self, length: usize) -> Result<Option<&'a [u8]>, Malformed> {
        let rest = &self.bytes[self.at..];
        match rest.get(length..length + 2) {
            None => Ok(None),
            Some(b"\r\n") => {
                self.at += length + 2;
                Ok(Some(&rest[..length]))
            }
            Some(_) => Err(Malformed),
        }
    }
}

/// An error in the words of the library, which knows their kinds.
fn refusal(line: &[u8]) -> Result<Value, Malformed> {
    match parse_redis_value(line) {
        Ok(value @ Value::ServerError(_)) => Ok(value),
        Ok(_) | Err(_) => Err(Malformed),
    }
}

fn integer(digits: &[u8]) -> Result<i64, Malformed> {
    let (negative, digits) = match digits {
        [b'-', digits @ ..] => (true, digits),
        digits => (false, digits),
    };
    if digits.is_empty() {
        return Err(Malformed);
    }
    let mut number: i64 = 0;
    for &digit in digits {
        if !digit.is_ascii_digit() {
            return Err(Malformed);
        }
        let digit = i64::from(digit - b'0');
        let digit = if negative { -digit } else { digit };
        number = number.checked_mul(10).and_then(|ten| ten.checked_add(digit)).ok_or(Malformed)?;
    }
    Ok(number)
}

/// A length; `None` if there is nothing.
fn length(digits: &[u8], longest: usize) -> Result<Option<usize>, Malformed> {
    match integer(digits)? {
        -1 => Ok(None),
        length => match usize::try_from(length) {
            Ok(length) if length <= longest => Ok(Some(length)),
            Ok(_) | Err(_) => Err(Malformed),
        },
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any_reply() -> impl Strategy<Value = Vec<u8>> {
        let line = "[ -~]{0,20}";
        let leaf = prop_oneof![
            any::<i64>().prop_map(|number| format!(":{number}\r\n").into_bytes()),
            line.prop_map(|line| format!("+{line}\r\n").into_bytes()),
            "[A-Z]{1,8}( [ -~]{0,20})?".prop_map(|line| format!("-{line}\r\n").into_bytes()),
            proptest::collection::vec(any::<u8>(), 0..300).prop_map(|bytes| {
                let mut reply = format!("${}\r\n", bytes.len()).into_bytes();
                reply.extend(bytes);
                reply.extend(b"\r\n");
                reply
            }),
            Just(b"$-1\r\n".to_vec()),
            Just(b"*-1\r\n".to_vec()),
        ];
        leaf.prop_recursive(4, 30, 6, |inner| {
            proptest::collection::vec(inner, 0..6).prop_map(|parts| {
                let mut reply = format!("*{}\r\n", parts.len()).into_bytes();
                reply.extend(parts.concat());
                reply
            })
        })
    }

    proptest! {
        #[test]
        fn a_reply_is_what_the_library_reads(bytes in any_reply(), more in any::<[u8; 3]>()) {
            let expected = parse_redis_value(&bytes).unwrap();
            let with_more = [&bytes[..], &more].concat();
            prop_assert_eq!(reply(&with_more), Ok(Some((expected, bytes.len()))));
        }

        #[test]
        fn a_reply_that_is_cut_anywhere_is_waited_for(bytes in any_reply(), cut in any::<prop::sample::Index>()) {
            prop_assert_eq!(reply(&bytes[..cut.index(bytes.len())]), Ok(None));
        }

        #[test]
        fn whatever_comes_is_a_reply_or_refused_or_waited_for(bytes in any::<Vec<u8>>()) {
            if let Ok(Some((_, length))) = reply(&bytes) {
                prop_assert!(length <= bytes.len());
            }
        }

        #[test]
        fn words_go_out_as_the_library_sends_them(words in proptest::collection::vec(any::<Vec<u8>>(), 1..5)) {
            let mut bytes = Vec::new();
            let mut out = Out::new(&mut bytes);
            let halves = words.iter().map(|word| word.split_at(word.len() / 2));
            let halves: Vec<_> = halves.map(|(one, other)| [one, other]).collect();
            out.words(&halves.iter().map(|halves| &halves[..]).collect::<Vec<_>>());
            prop_assert_eq!(out.count(), 1);
            let mut command = Cmd::new();
            for word in &words {
                command.arg(word);
            }
            prop_assert_eq!(&bytes, &command.get_packed_command());
            let mut again = Vec::new();
            Out::new(&mut again).command(&Words::of(&command).0);
            prop_assert_eq!(again, bytes);
        }
    }

    #[test]
    fn the_time_and_an_expiry_are_asked_for_as_by_the_library() {
        let mut bytes = Vec::new();
        let mut out = Out::new(&mut bytes);
        out.expiry(b"idem:{k}");
        out.time();
        assert_eq!((out.count(), out.time_at()), (2, Some(1)));
        let mut expected = ::redis::cmd("PEXPIRETIME").arg("idem:{k}").get_packed_command();
        expected.extend(::redis::cmd("TIME").get_packed_command());
        assert_eq!(bytes, expected);
    }

    #[test]
    fn the_time_is_one_number_and_a_refusal_is_what_it_was() {
        let said = b"*2\r\n$10\r\n1764457200\r\n$6\r\n012999\r\n";
        assert_eq!(time(said), Ok(Some((Value::Int(1_764_457_200_012), said.len()))));
        for cut in 0..said.len() {
            assert_eq!(time(&said[..cut]), Ok(None), "{cut}");
        }
        // One caller gets what it can make nothing of; the connection is all right.
        for other in [
            "-NOPERM no time for you\r\n",
            "*1\r\n:7\r\n",
            "$-1\r\n",
            "*2\r\n:1\r\n:2\r\n",
            "*2\r\n$-1\r\n$1\r\n1\r\n",
            "*2\r\n$1\r\nx\r\n$1\r\n1\r\n",
            "*2\r\n$2\r\n-1\r\n$1\r\n1\r\n",
            "*2\r\n$19\r\n9223372036854775807\r\n$1\r\n1\r\n",
            // Of another year, and longer or shorter than they say.
            "*2\r\n$11\r\n10000000000\r\n$1\r\n1\r\n",
            "*2\r\n$10\r\n1764457200\r\n$7\r\n0000001\r\n",
        ] {
            assert_eq!(time(other.as_bytes()), reply(other.as_bytes()), "{other:?}");
            assert!(matches!(time(other.as_bytes()), Ok(Some(_))), "{other:?}");
        }
        assert_eq!(time(b":7\r\n"), Ok(Some((Value::Nil, 4))));
        for malformed in [
            "*2\r\n\r\n",
            "*2\r\n$10\r\n1764457200\r\n$3\r\n12\r\n",
            "*2\r\n$10\r\n17644572000\r\n$1\r\n1\r\n",
        ] {
            let padded = format!("{malformed}........");
            assert_eq!(time(padded.as_bytes()), Err(Malformed), "{malformed:?}");
        }
    }

    #[test]
    fn what_no_server_sends_is_refused() {
        let nested = "*1\r\n".repeat(DEEPEST + 1);
        let endless = "+".repeat(LINE_MAX);
        for bytes in [
            "\r\n",
            "hello\r\n",
            ":\r\n",
            ":-\r\n",
            ":1a\r\n",
            ":9223372036854775808\r\n",
            "$-2\r\n",
            "$536870913\r\n",
            "$1\r\nab\r\n",
            "*-2\r\n",
            ":1\rx",
            &nested,
            &endless,
        ] {
            assert_eq!(reply(bytes.as_bytes()), Err(Malformed), "{bytes:?}");
        }
        assert_eq!(reply(b":-9223372036854775808\r\n"), Ok(Some((Value::Int(i64::MIN), 23))));
    }
}
