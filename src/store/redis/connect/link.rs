//! What a call is sent over, and in which way: by a script's hash first, a large answer beside its record
//! first.

use ::redis::aio::MultiplexedConnection;
use ::redis::{Cmd, Pipeline, Value};

use super::wire::{Unheard, Wire};
use super::{Failure, Message};
use crate::store::redis::call::{Answer, Call, Name, Places, Route, Way, accepted};
use crate::store::redis::script;
use crate::store::redis::words::{Commands, Words};

/// Something that takes commands and gives their replies.
pub(super) trait Link: Send {
    /// Sends what is written in one piece. The reply is an array if there are several.
    fn ask(
        &mut self,
        write: impl FnOnce(&mut dyn Commands) + Send,
    ) -> impl Future<Output = Result<Value, Failure>> + Send;
}

/// A connection that is shared.
#[derive(Clone)]
pub(super) enum Line {
    Own(Wire),
    /// Through TLS, or in the newer protocol.
    Library(MultiplexedConnection),
}

impl Link for Line {
    async fn ask(
        &mut self,
        write: impl FnOnce(&mut dyn Commands) + Send,
    ) -> Result<Value, Failure> {
        match self {
            Self::Own(wire) => match wire.ask(None, |out| write(out)) {
                Ok(answer) => answer.await.map_err(|unheard| match unheard {
                    // Nobody watches the time of these but who asks.
                    Unheard::Late => Failure::NoAnswer("no reply in time".into()),
                    Unheard::Lost(error) => Failure::of_reply(error),
                }),
                Err(not_taken) => Err(Failure::NotSent(not_taken.into())),
            },
            Self::Library(connection) => connection.ask(write).await,
        }
    }
}

impl Line {
    /// True if it is known that nothing can be sent any more.
    pub(super) fn has_ended(&self) -> bool {
        match self {
            Self::Own(wire) => wire.has_ended(),
            Self::Library(_) => false,
        }
    }
}

impl Link for MultiplexedConnection {
    async fn ask(
        &mut self,
        write: impl FnOnce(&mut dyn Commands) + Send,
    ) -> Result<Value, Failure> {
        let mut pipeline = Pipeline::new();
        write(&mut pipeline);
        let count = pipeline.len();
        let replies = self.send_packed_commands(&pipeline, 0, count).await;
        let mut replies = replies.map_err(Failure::of_reply)?;
        Ok(if count == 1 { replies.pop().unwrap_or(Value::Nil) } else { Value::Array(replies) })
    }
}

impl Commands for Pipeline {
    fn command(&mut self, command: &Words) {
        let mut of_the_library = Cmd::new();
        for word in command.iter() {
            of_the_library.arg(word);
        }
        self.add_command(of_the_library);
    }

    fn foreign(&mut self, command: &Cmd) {
        self.add_command(command.clone());
    }

    fn words(&mut self, words: &[&[&[u8]]]) {
        let mut command = Cmd::new();
        for pieces in words {
            match pieces {
                [word] => command.arg(word),
                pieces => command.arg(pieces.concat()),
            };
        }
        self.add_command(command);
    }
}

impl Message<'_> {
    pub(super) async fn send(&self, link: &mut impl Link) -> Result<Answer, Failure> {
        let reply = match self {
            Self::Script { call, asking } => return send_call(call, *asking, link).await,
            Self::Question(cmd) => link.ask(|out| out.foreign(cmd)).await?,
            Self::Questions(questions) => {
                let ask = |out: &mut dyn Commands| {
                    for question in questions.cmd_iter() {
                        out.foreign(question);
                    }
                };
                let reply = link.ask(ask).await?;
                if questions.len() == 1 { Value::Array(vec![reply]) } else { reply }
            }
        };
        let value = accepted(reply).map_err(Failure::Refused)?;
        Ok(Answer { value, replicas: None })
    }
}

async fn send_call(call: &Call, asking: bool, link: &mut impl Link) -> Result<Answer, Failure> {
    let mut way = call.first_way(asking);
    loop {
        let mut places = Places::default();
        let reply = link.ask(|out| places = call.write(way, out)).await?;
        let result = places.answer(reply).map_err(Failure::Refused);
        match next_way(call, way, &result) {
            Some(next) => way = next,
            None => return result,
        }
    }
}

/// Another way to send a call that the server did not do.
pub(super) fn next_way(call: &Call, way: Way, result: &Result<Answer, Failure>) -> Option<Way> {
    let code = match result {
        Err(Failure::Refused(error)) => error.code(),
        Ok(answer) if !script::found_nothing_beside(&answer.value) => return None,
        Ok(_) => None,
        Err(_) => return None,
    };
    match (code, way) {
        // The text, on the same connection and to the same key. `SCRIPT LOAD` would go to every
        // node of a cluster.
        (Some("NOSCRIPT"), Way { name: Name::Hash, .. }) => Some(Way { name: Name::Text, ..way }),
        // A cluster moves the slot, and has one of the two keys here and the other one there; or there was
        // no room for it, or it was gone already.
        (Some("TRYAGAIN") | None, Way { route: Route::Beside, asking, .. }) => {
            Some(Way { route: Route::Through, ..call.first_way(asking) })
        }
        _ => None,
    }
}
