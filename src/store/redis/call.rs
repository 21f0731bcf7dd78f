//! One run of a script: what is sent, and in which order.
//!
//! A response of some size does not go through Lua, which would copy it twice. It is written beside
//! the record by a plain SET, and the script that follows on the same connection renames its key. A
//! replay reads it by a plain GET behind the script that judged the request.

use std::borrow::Cow;
use std::sync::LazyLock;

use ::redis::aio::MultiplexedConnection;
use ::redis::{Cmd, Pipeline, RedisResult, RedisWrite, ToRedisArgs, ToSingleRedisArg, Value};
use bytes::Bytes;

use super::script;
use crate::record::HEADER_LENGTH;

/// A Lua script and the name that Redis caches it under.
#[derive(Debug)]
pub(super) struct Script {
    text: &'static str,
    sha: LazyLock<String>,
}

macro_rules! scripts {
    ($($name:ident $file:literal),+ $(,)?) => {$(
        pub(super) static $name: Script = {
            const TEXT: &str = include_str!(concat!("../../../lua/", $file));
            Script {
                text: TEXT,
                sha: LazyLock::new(|| ::redis::Script::new(TEXT).get_hash().to_owned()),
            }
        };
    )+};
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

/// One run of a script: everything that has to be sent, ready to be sent more than once.
pub(super) struct Call {
    script: &'static Script,
    /// The whole command, by the script's hash; without the response if that is put beside.
    by_hash: Cmd,
    key_at: usize,
    beside: Option<Beside>,
    wait: Option<Wait>,
    in_full: bool,
}

/// A response that is written beside its record first, and the script that fetches it from there.
struct Beside {
    script: &'static Script,
    key: String,
    response: Bytes,
}

/// Where a response goes.
#[derive(Clone, Copy)]
enum Route {
    /// Into the script, as its last argument.
    Through,
    /// Beside the record.
    Beside,
}

/// How a script is named: by its hash, or by its whole text for a server that does not know the hash.
#[derive(Clone, Copy, Eq, PartialEq)]
enum Name {
    Hash,
    Text,
}

/// How long what was written beside a record stays if no script fetches it, in milliseconds. The script is
/// in the same write, so this is for a connection that breaks between the two.
const BESIDE_KEPT: u64 = 10_000;

/// Where the script puts the head of the record.
const HEAD: [u8; HEADER_LENGTH] = [0; HEADER_LENGTH];

/// Where the record's key stands among the arguments of a command.
const KEY_AT: usize = 3;

/// As many as a call has at most: name, hash, number of keys, key, and five for the script.
const ARGUMENTS: usize = 9;
/// The bytes of the first three, and of a few numbers.
const HEADS: usize = 96;

pub(super) const MAX_EXPIRY: u64 = 1 << 48;

impl Call {
    /// A run on this key, whose arguments take about so many bytes.
    pub(super) fn new(script: &'static Script, key: &str, room: usize) -> Self {
        let mut by_hash = Cmd::with_capacity(ARGUMENTS, HEADS + key.len() + room);
        by_hash.arg("EVALSHA").arg(script.sha.as_str()).arg("1").arg(key);
        Self { script, by_hash, key_at: KEY_AT, beside: None, wait: None, in_full: false }
    }

    /// A command on one key, its first argument. It goes the way that scripts go.
    pub(super) fn plain(command: Cmd) -> Self {
        // Nobody answers a plain command with NOSCRIPT, so the script is never sent.
        Self {
            script: &READY,
            by_hash: command,
            key_at: 1,
            beside: None,
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

    /// Puts a response beside the record, under a name that nobody else uses, for `script` to fetch. If
    /// that is not possible, it becomes the last argument of the call's own script.
    pub(super) fn beside(mut self, script: &'static Script, name: &str, response: Bytes) -> Self {
        let key = format!("{}:{name}", self.key());
        self.beside = Some(Beside { script, key, response });
        self
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
        (confirmed < needed).then_some(Shortfall::TooFew { confirmed, needed })
    }

    /// The key of the record.
    pub(super) fn key(&self) -> &str {
        let key = self.by_hash.args_iter().nth(self.key_at);
        match key {
            Some(::redis::Arg::Simple(key)) => std::str::from_utf8(key).unwrap_or_default(),
            // The other kind stands for the cursor of a scan.
            Some(_) | None => "",
        }
    }

    pub(super) fn arg(mut self, bytes: &[u8]) -> Self {
        self.by_hash.arg(bytes);
        self
    }

    pub(super) fn number(mut self, number: u64) -> Self {
        self.by_hash.arg(number);
        self
    }

    pub(super) fn lasting(self, milliseconds: u64) -> Self {
        // SET refuses an expiry of zero and one that overflows; ten thousand years are for ever.
        self.number(milliseconds.clamp(1, MAX_EXPIRY))
    }

    /// Runs the script, and reads a large answer that it left where it is.
    ///
    /// `asking` is for a node that takes a slot over and has been named by the one that gives it.
    pub(super) async fn send(
        &self,
        connection: &mut MultiplexedConnection,
        asking: bool,
    ) -> RedisResult<Answer> {
        if self.beside.is_some() {
            match self.send_by(Route::Beside, connection, asking).await {
                // No room for it, or it was gone already.
                Ok(answer) if script::found_nothing_beside(&answer.value) => {}
                // A cluster moves the slot, and has one of the two keys here and the other one there.
                Err(error) if error.code() == Some("TRYAGAIN") => {}
                reply => return reply,
            }
        }
        let mut answer = self.send_by(Route::Through, connection, asking).await?;
        if let Value::Array(values) = &mut answer.value
            && script::is_large(values)
        {
            values.push(self.read(connection, asking).await?);
        }
        Ok(answer)
    }

    /// By its hash first; a server that does not know the hash gets the text, on the same connection and
    /// to the same key. `SCRIPT LOAD` would go to every node of a cluster.
    async fn send_by(
        &self,
        route: Route,
        connection: &mut MultiplexedConnection,
        asking: bool,
    ) -> RedisResult<Answer> {
        if !self.in_full {
            match self.send_once(route, Name::Hash, connection, asking).await {
                Err(error) if error.code() == Some("NOSCRIPT") => {}
                reply => return reply,
            }
        }
        self.send_once(route, Name::Text, connection, asking).await
    }

    async fn send_once(
        &self,
        route: Route,
        name: Name,
        connection: &mut MultiplexedConnection,
        asking: bool,
    ) -> RedisResult<Answer> {
        let script = self.command(route, name);
        let beside = self.beside.as_ref().filter(|_| matches!(route, Route::Beside));
        if self.wait.is_none() && !asking && beside.is_none() {
            let value = script.query_async(connection).await?;
            return Ok(Answer { value, replicas: None });
        }
        // One pipeline is one write on one connection. WAIT counts what its own connection wrote: on
        // another one it would be content at once.
        let mut pipeline = ::redis::pipe();
        if let Some(beside) = beside {
            beside.write(&mut pipeline, asking);
        }
        if asking {
            pipeline.cmd("ASKING");
        }
        pipeline.add_command(script.into_owned());
        let before = pipeline.len() - 1;
        if let Some(wait) = self.wait {
            pipeline.cmd("WAIT").arg(wait.replicas).arg(wait.milliseconds);
        }
        let count = pipeline.len();
        let replies = connection.send_packed_commands(&pipeline, 0, count).await?;
        // What came of the write beside, the script finds out by itself.
        let mut replies = replies.into_iter().skip(before);
        let value = match replies.next() {
            Some(Value::ServerError(error)) => return Err(error.into()),
            Some(value) => value,
            None => Value::Nil,
        };
        let replicas = self.wait.map(|_| match replies.next() {
            Some(Value::Int(replicas)) => {
                Waited::Confirmed(u32::try_from(replicas).unwrap_or(u32::MAX))
            }
            Some(Value::ServerError(error)) => Waited::Refused(error.to_string().into()),
            _ => Waited::Confirmed(0),
        });
        Ok(Answer { value, replicas })
    }

    /// Reads the record as it is.
    async fn read(
        &self,
        connection: &mut MultiplexedConnection,
        asking: bool,
    ) -> RedisResult<Value> {
        let mut pipeline = ::redis::pipe();
        if asking {
            pipeline.cmd("ASKING");
        }
        pipeline.cmd("GET").arg(self.key());
        let count = pipeline.len();
        let replies = connection.send_packed_commands(&pipeline, count - 1, 1).await?;
        match replies.into_iter().next() {
            Some(Value::ServerError(error)) => Err(error.into()),
            Some(value) => Ok(value),
            None => Ok(Value::Nil),
        }
    }

    /// The script with its arguments.
    fn command(&self, route: Route, name: Name) -> Cow<'_, Cmd> {
        let (script, last) = match (&self.beside, route) {
            (None, _) if name == Name::Hash => return Cow::Borrowed(&self.by_hash),
            (None, _) => (self.script, None),
            (Some(beside), Route::Through) => (self.script, Some(&beside.response)),
            (Some(beside), Route::Beside) => (beside.script, None),
        };
        let mut cmd = Cmd::new();
        match name {
            Name::Hash => cmd.arg("EVALSHA").arg(script.sha.as_str()),
            Name::Text => cmd.arg("EVAL").arg(script.text),
        };
        match (&self.beside, route) {
            (Some(beside), Route::Beside) => cmd.arg(2).arg(self.key()).arg(&beside.key),
            (_, _) => cmd.arg(1).arg(self.key()),
        };
        for argument in self.by_hash.args_iter().skip(KEY_AT + 1) {
            // The other kind stands for the cursor of a scan, and no script call has one.
            if let ::redis::Arg::Simple(bytes) = argument {
                cmd.arg(bytes);
            }
        }
        if let Some(response) = last {
            cmd.arg(&response[..]);
        }
        Cow::Owned(cmd)
    }
}

impl Beside {
    fn write(&self, pipeline: &mut Pipeline, asking: bool) {
        if asking {
            pipeline.cmd("ASKING");
        }
        let mut set =
            Cmd::with_capacity(5, HEADS + self.key.len() + HEAD.len() + self.response.len());
        set.arg("SET").arg(&self.key).arg(Parts([&HEAD, &self.response]));
        set.arg("PX").arg(BESIDE_KEPT);
        pipeline.add_command(set);
    }
}

/// Bytes that follow each other in one argument.
struct Parts<'a>([&'a [u8]; 2]);

impl ToRedisArgs for Parts<'_> {
    fn write_redis_args<W: ?Sized + RedisWrite>(&self, out: &mut W) {
        // Writing to memory cannot fail.
        let mut argument = out.writer_for_next_arg();
        for part in self.0 {
            let _ = std::io::Write::write_all(&mut argument, part);
        }
    }
}

impl ToSingleRedisArg for Parts<'_> {}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed(cmd: &Cmd) -> Vec<u8> {
        cmd.get_packed_command()
    }

    #[test]
    fn the_text_is_sent_with_the_same_key_and_arguments() {
        let call = Call::new(&RELEASE, "idem:{k}", 0).arg(&[0, 255]).lasting(0).number(2);
        let mut expected = Cmd::new();
        expected.arg("EVAL").arg(RELEASE.text).arg(1).arg("idem:{k}").arg(&[0_u8, 255]);
        expected.arg(1).arg(2);
        assert_eq!(packed(&call.command(Route::Through, Name::Text)), packed(&expected));
    }

    #[test]
    fn a_response_goes_beside_the_record_or_through_its_script() {
        let response = Bytes::from_static(b"answer");
        let call =
            Call::new(&COMPLETE, "idem:{k}", 0).arg(b"a").beside(&COMPLETE_LARGE, "b", response);
        let mut through = Cmd::new();
        through.arg("EVALSHA").arg(&*COMPLETE.sha).arg(1).arg("idem:{k}").arg("a").arg("answer");
        assert_eq!(packed(&call.command(Route::Through, Name::Hash)), packed(&through));
        let mut beside = Cmd::new();
        beside.arg("EVALSHA").arg(&*COMPLETE_LARGE.sha).arg(2).arg("idem:{k}").arg("idem:{k}:b");
        beside.arg("a");
        assert_eq!(packed(&call.command(Route::Beside, Name::Hash)), packed(&beside));
    }
}
