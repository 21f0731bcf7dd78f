//! One run of a script: what is sent, and in which order.
//!
//! A response of some size does not go through Lua, which would copy it twice. It is written beside
//! the record by a plain SET, and the script that follows on the same connection renames its key.
//!
//! A claim is a plain command first, which costs the server half of what a script does, with the server's clock
//! in the same write; see [`claim`](super::claim).

use std::borrow::Cow;
use std::ops::Range;
use std::sync::LazyLock;

use ::redis::{RedisResult, Value};
use bytes::Bytes;

use super::connect::in_part;
use super::mistaken;
use super::words::{Commands, Words};
use crate::mistakes::{Mistake, made};

/// A Lua script and the name that Redis caches it under.
#[derive(Debug)]
pub(super) struct Script {
    file: &'static str,
    text: &'static str,
    sha: LazyLock<String>,
    /// The words in front of the key, for a script that has one.
    by_hash: LazyLock<Words>,
}

impl Script {
    fn text(&self) -> Cow<'static, str> {
        mistaken::as_sent(self.file, self.text)
    }
}

macro_rules! scripts {
    ($($name:ident $file:literal),+ $(,)?) => {$(
        pub(super) static $name: Script = {
            const TEXT: &str = include_str!(concat!("../../../lua/", $file));
            Script {
                file: $file,
                text: TEXT,
                sha: LazyLock::new(|| {
                    let text = mistaken::as_sent($file, TEXT);
                    ::redis::Script::new(&text).get_hash().to_owned()
                }),
                by_hash: LazyLock::new(|| {
                    let mut words = Words::default();
                    words.word(b"EVALSHA").word($name.sha.as_bytes()).word(b"1");
                    words
                }),
            }
        };
    )+

        #[cfg(all(test, feature = "mistakes"))]
        pub(super) fn text_of(file: &str) -> &'static str {
            let scripts = [$(&$name),+];
            scripts.iter().find(|script| script.file == file).expect("a script").text
        }
    };
}

scripts! {
    CLAIM "claim.lua",
    RENEW "renew.lua",
    COMPLETE "complete.lua",
    COMPLETE_LARGE "complete_large.lua",
    RELEASE "release.lua",
    RESOLVE "resolve.lua",
    READY "ready.lua",
    LOOK "look.lua",
    FORGET "forget.lua",
    AMEND "amend.lua",
    NOTE "note.lua",
}

/// How many replicas have to have a write before it is believed, and how long it waits for them.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Wait {
    pub(super) replicas: u32,
    /// At least a millisecond: zero would be for ever.
    pub(super) milliseconds: u64,
}

/// A write may not survive a failover.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub(super) enum Shortfall {
    #[error("{confirmed} of the {needed} replicas it takes confirmed the write in time")]
    TooFew { confirmed: u32, needed: u32 },
    /// From a user without the right to WAIT, or a server without the command. Nobody was counted.
    #[error("the server refused WAIT ({0}): grant the user `+wait`")]
    Refused(Box<str>),
}

/// What WAIT said.
#[derive(Debug)]
pub(super) enum Waited {
    Confirmed(u32),
    Refused(Box<str>),
}

/// What came back of a call that the server answered.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) value: Value,
    /// How many replicas had the write when the wait was over. `None` if nobody asked.
    pub(super) replicas: Option<Waited>,
}

struct Counted<'a> {
    out: &'a mut dyn Commands,
    count: usize,
}

impl Counted<'_> {
    /// Which reply will be its.
    fn command(&mut self, command: &Words) -> usize {
        self.out.command(command);
        self.count += 1;
        self.count - 1
    }

    fn words(&mut self, words: &[&[&[u8]]]) -> usize {
        self.out.words(words);
        self.count += 1;
        self.count - 1
    }

    fn time(&mut self) -> usize {
        self.out.time();
        self.count += 1;
        self.count - 1
    }

    fn expiry(&mut self, key: &[u8]) -> usize {
        self.out.expiry(key);
        self.count += 1;
        self.count - 1
    }
}

/// Which reply is which.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Places {
    time: Option<usize>,
    value: usize,
    expiry: Option<usize>,
    replicas: Option<usize>,
    count: usize,
}

impl Places {
    /// Three replies in the order in which they are wanted, as of most claims.
    fn is_timed_alone(&self) -> bool {
        (self.count, self.time, self.value, self.expiry) == (3, Some(0), 1, Some(2))
    }

    /// What to make of the reply: of an array if there are several.
    pub(super) fn answer(&self, reply: Value) -> RedisResult<Answer> {
        if self.count == 1 {
            return Ok(Answer { value: accepted(reply)?, replicas: None });
        }
        if self.is_timed_alone() && matches!(&reply, Value::Array(said) if is_accepted(said)) {
            return Ok(Answer { value: reply, replicas: None });
        }
        let mut replies = if let Value::Array(replies) = reply { replies } else { Vec::new() };
        let value = accepted(take(&mut replies, self.value))?;
        let value = match (self.time, self.expiry) {
            (Some(time), Some(expiry)) => {
                // If the time is refused, the command went through all the same. Whoever sent it gives up what it
                // did, as nothing can be said about it.
                let said = accepted(take(&mut replies, time)).map_err(in_part)?;
                Value::Array(vec![said, value, take(&mut replies, expiry)])
            }
            (None, _) | (_, None) => value,
        };
        let replicas = self.replicas.map(|at| {
            let said = take(&mut replies, at);
            if let Value::ServerError(error) = said {
                return Waited::Refused(error.to_string().into());
            }
            let confirmed = if let Value::Int(confirmed) = said { confirmed } else { 0 };
            Waited::Confirmed(u32::try_from(confirmed).unwrap_or(u32::MAX))
        });
        Ok(Answer { value, replicas })
    }
}

fn take(replies: &mut [Value], at: usize) -> Value {
    replies.get_mut(at).map_or(Value::Nil, |reply| std::mem::replace(reply, Value::Nil))
}

/// Neither the time nor the command behind it was refused.
fn is_accepted(said: &[Value]) -> bool {
    let is_refused = |reply: &Value| matches!(reply, Value::ServerError(_));
    matches!(said, [time, value, _] if !is_refused(time) && !is_refused(value))
}

/// What the server refuses is an error.
pub(super) fn accepted(value: Value) -> RedisResult<Value> {
    if let Value::ServerError(error) = value { Err(error.into()) } else { Ok(value) }
}

/// One run of a script: everything that has to be sent, ready to be sent more than once.
pub(super) struct Call {
    script: &'static Script,
    /// The whole command, by the script's hash; without the response if that is put beside.
    by_hash: Words,
    key_at: usize,
    /// The key among their bytes.
    key: Range<usize>,
    /// Boxed, as few have one.
    beside: Option<Box<Beside>>,
    timed: bool,
    wait: Option<Wait>,
    in_full: bool,
}

/// A response that is written beside its record first, for the call's script to fetch, and the script
/// that takes it as an argument if that is not possible.
struct Beside {
    through: &'static Script,
    key: Vec<u8>,
    response: Bytes,
}

/// One way to send a call.
#[derive(Clone, Copy)]
pub(super) struct Way {
    pub(super) route: Route,
    pub(super) name: Name,
    /// For a node that takes a slot over and has been named by the one that gives it.
    pub(super) asking: bool,
}

/// Where a response goes.
#[derive(Clone, Copy, Eq, PartialEq)]
pub(super) enum Route {
    /// Into the other script, behind the head in its first argument.
    Through,
    /// Beside the record.
    Beside,
}

/// How a script is named: by its hash, or by its whole text for a server that does not know the hash.
#[derive(Clone, Copy, Eq, PartialEq)]
pub(super) enum Name {
    Hash,
    Text,
}

/// How long what was written beside a record stays if no script fetches it, in milliseconds. The script is
/// in the same write, so this is for a connection that breaks between the two.
const BESIDE_KEPT: &[u8] = b"10000";

/// Where the record's key stands among the arguments of a command.
const KEY_AT: usize = 3;

/// The bytes of the first three, of a few numbers, and of all lengths.
const HEADS: usize = 160;

pub(super) const MAX_EXPIRY: u64 = 1 << 48;

impl Call {
    /// A run on this key, whose arguments take about so many bytes.
    pub(super) fn new(script: &'static Script, key: &[u8], room: usize) -> Self {
        let mut by_hash = Words::with_room(HEADS + key.len() + room);
        let key = by_hash.all(&script.by_hash).placed(key);
        Self {
            script,
            by_hash,
            key_at: KEY_AT,
            key,
            beside: None,
            timed: false,
            wait: None,
            in_full: false,
        }
    }

    /// A command on one key, its first argument, which stands there. It goes the way that scripts go.
    pub(super) fn plain(command: Words, key: Range<usize>) -> Self {
        // Nobody answers a plain command with NOSCRIPT, so the script is never sent.
        Self {
            script: &READY,
            by_hash: command,
            key_at: 1,
            key,
            beside: None,
            timed: false,
            wait: None,
            in_full: false,
        }
    }

    /// Asks how many replicas have what the script wrote.
    pub(super) fn waiting(mut self, wait: Option<Wait>) -> Self {
        self.wait = wait;
        self
    }

    /// Sends the text at once, as after every restart of the server.
    pub(super) fn in_full(mut self) -> Self {
        self.in_full = true;
        self
    }

    /// Puts a response beside the record, under a name that nobody else uses and behind the head that is the
    /// first argument. If that is not possible, head and response become the first argument of `through`.
    pub(super) fn beside(mut self, through: &'static Script, name: &str, response: Bytes) -> Self {
        let key = [self.key(), b":", name.as_bytes()].concat();
        self.beside = Some(Box::new(Beside { through, key, response }));
        self
    }

    /// Asks for the time before the command, and for the key's expiry behind it. The answer is these three.
    pub(super) fn timed(mut self) -> Self {
        self.timed = true;
        self
    }

    /// How it is sent first.
    pub(super) fn first_way(&self, asking: bool) -> Way {
        let route = if self.beside.is_some() { Route::Beside } else { Route::Through };
        Way { route, name: if self.in_full { Name::Text } else { Name::Hash }, asking }
    }

    pub(super) fn is_beside(&self) -> bool {
        self.beside.is_some()
    }

    pub(super) fn waits(&self) -> bool {
        self.wait.is_some()
    }

    /// How far the replicas fell short of what was asked for.
    pub(super) fn shortfall(&self, answer: &Answer) -> Option<Shortfall> {
        let needed = self.wait?.replicas;
        let confirmed = match &answer.replicas {
            Some(Waited::Refused(reason)) => return Some(Shortfall::Refused(reason.clone())),
            Some(Waited::Confirmed(confirmed)) => *confirmed,
            None => 0,
        };
        let believed = confirmed >= needed || made(Mistake::RedisWaitIsNotCounted);
        (!believed).then_some(Shortfall::TooFew { confirmed, needed })
    }

    /// The key of the record.
    pub(super) fn key(&self) -> &[u8] {
        self.by_hash.at(self.key.clone())
    }

    pub(super) fn arg(mut self, bytes: &[u8]) -> Self {
        self.by_hash.word(bytes);
        self
    }

    /// One argument of several pieces.
    pub(super) fn parts(mut self, parts: [&[u8]; 2]) -> Self {
        self.by_hash.pieces(&parts);
        self
    }

    pub(super) fn number(mut self, number: u64) -> Self {
        self.by_hash.number(number);
        self
    }

    pub(super) fn lasting(self, milliseconds: u64) -> Self {
        // SET refuses an expiry of zero and one that overflows; ten thousand years are for ever.
        self.number(milliseconds.clamp(1, MAX_EXPIRY))
    }

    /// Writes what has to be sent in one piece, and says which replies are which.
    ///
    /// WAIT counts what its own connection wrote: on another one it would be content at once.
    pub(super) fn write(&self, way: Way, out: &mut dyn Commands) -> Places {
        let mut out = Counted { out, count: 0 };
        let ask = |out: &mut Counted<'_>| {
            if way.asking {
                out.words(&[&[b"ASKING"]]);
            }
        };
        if let (Some(beside), Route::Beside) = (&self.beside, way.route) {
            ask(&mut out);
            // What comes of it, the script finds out by itself.
            let (key, record) = (&beside.key[..], [self.argument(0), &beside.response]);
            out.words(&[&[b"SET"], &[key], &record, &[b"PX"], &[BESIDE_KEPT]]);
        }
        let time = self.timed.then(|| out.time());
        ask(&mut out);
        let value = out.command(&self.command(way.route, way.name));
        let expiry = self.timed.then(|| {
            ask(&mut out);
            out.expiry(self.key())
        });
        let replicas = self.wait.map(|wait| {
            let (replicas, limit) = (wait.replicas.to_string(), wait.milliseconds.to_string());
            out.words(&[&[b"WAIT"], &[replicas.as_bytes()], &[limit.as_bytes()]])
        });
        Places { time, value, expiry, replicas, count: out.count }
    }

    /// An argument of the script.
    fn argument(&self, at: usize) -> &[u8] {
        self.by_hash.iter().nth(self.key_at + 1 + at).unwrap_or_default()
    }

    /// The script with its arguments.
    fn command(&self, route: Route, name: Name) -> Cow<'_, Words> {
        let (script, response) = match (&self.beside, route) {
            (None, _) if name == Name::Hash => return Cow::Borrowed(&self.by_hash),
            (None, _) | (Some(_), Route::Beside) => (self.script, &[][..]),
            (Some(beside), Route::Through) => (beside.through, &beside.response[..]),
        };
        let mut words = Words::default();
        match name {
            Name::Hash => words.word(b"EVALSHA").word(script.sha.as_bytes()),
            Name::Text => words.word(b"EVAL").word(script.text().as_bytes()),
        };
        match (&self.beside, route) {
            (Some(beside), Route::Beside) => words.number(2).word(self.key()).word(&beside.key),
            (_, _) => words.number(1).word(self.key()),
        };
        for (at, argument) in self.by_hash.iter().skip(self.key_at + 1).enumerate() {
            words.pieces(&[argument, if at == 0 { response } else { &[] }]);
        }
        Cow::Owned(words)
    }
}

#[cfg(test)]
mod tests {
    use super::super::connect::Failure;
    use super::*;
    use crate::error::StoreErrorKind;

    struct Nowhere;

    impl Commands for Nowhere {
        fn command(&mut self, _: &Words) {}
        fn foreign(&mut self, _: &::redis::Cmd) {}
        fn words(&mut self, _: &[&[&[u8]]]) {}
    }

    fn words(words: &[&[u8]]) -> Words {
        let mut all = Words::default();
        for word in words {
            all.word(word);
        }
        all
    }

    #[test]
    fn a_claim_whose_time_is_refused_for_the_moment_may_have_been_made() {
        let mut set = Words::default();
        let key = set.word(b"SET").placed(b"idem:{k}");
        let call = Call::plain(set, key).timed();
        let places = call.write(call.first_way(false), &mut Nowhere);
        let refused = |words: &str| {
            let error = ::redis::parse_redis_value(format!("-{words}\r\n").as_bytes()).unwrap();
            let reply = Value::Array(vec![error, Value::Nil, Value::Int(1)]);
            Failure::Refused(places.answer(reply).unwrap_err()).kind()
        };
        assert_eq!(refused("BUSY a script runs"), StoreErrorKind::OutcomeUnknown);
        assert_eq!(refused("NOPERM no TIME for you"), StoreErrorKind::Backend);
    }

    #[test]
    fn the_text_is_sent_with_the_same_key_and_arguments() {
        let call = Call::new(&RELEASE, b"idem:{k}", 0).arg(&[0, 255]).lasting(0).number(2);
        let text = RELEASE.text.as_bytes();
        let expected = words(&[b"EVAL", text, b"1", b"idem:{k}", &[0, 255], b"1", b"2"]);
        assert_eq!(*call.command(Route::Through, Name::Text), expected);
    }

    #[test]
    fn a_response_goes_beside_the_record_or_through_its_script() {
        let response = Bytes::from_static(b"answer");
        let call = Call::new(&COMPLETE_LARGE, b"idem:{k}", 0).arg(b"head").number(9);
        let call = call.beside(&COMPLETE, "b", response);
        let sha = COMPLETE.sha.as_bytes();
        let through = words(&[b"EVALSHA", sha, b"1", b"idem:{k}", b"headanswer", b"9"]);
        assert_eq!(*call.command(Route::Through, Name::Hash), through);
        let sha = COMPLETE_LARGE.sha.as_bytes();
        let beside = words(&[b"EVALSHA", sha, b"2", b"idem:{k}", b"idem:{k}:b", b"head", b"9"]);
        assert_eq!(*call.command(Route::Beside, Name::Hash), beside);
    }
}
