//! One multiplexed connection for the whole process, watched and replaced.
//!
//! A connection that stays open and answers nothing, and one to a demoted primary, look healthy for ever. So this counts time-outs, reads refusals, and makes a new connection: in the
//! background, one at a time, with pauses between attempts, so that a server that comes back is not
//! met by a storm.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use ::redis::Value;
use futures_util::future::BoxFuture;
use tokio::sync::watch;
use tokio::time::{Instant, timeout, timeout_at};

use super::link::{Line, next_way};
use super::restart::Process;
use super::wire::{self, Unheard, Wire};
use super::{DialError, Dialer, Failure, Message, NoConnection, TooLong, is_readonly};
use crate::store::redis::call::{Answer, Call, Places, Way};
use crate::store::redis::check::text;

/// How many calls in a row may go unanswered before the connection counts as silent. One is an
/// accident and two are bad luck; and a needless replacement costs only a handshake.
const SILENT_AFTER: u32 = 3;

/// How long a call must have gone unanswered to count: far beyond what a healthy server takes.
const SILENCE: Duration = Duration::from_millis(50);

/// The pause after the first failed attempt to connect; it doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// The longest pause: a server that is back is found within a second.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// The shared connection. Clones share it.
#[derive(Clone)]
pub(super) struct Shared(Arc<Inner>);

struct Inner {
    dialer: Arc<Dialer>,
    call_timeout: Duration,
    /// `None` if somebody else on the way to the same server looks.
    process: Option<Process>,
    state: Mutex<State>,
}

struct State {
    line: Option<Arc<Watched>>,
    /// Closed when the attempt that is under way ends.
    dialing: Option<watch::Receiver<()>>,
    failed: u32,
    not_before: Instant,
    last_failure: Option<Arc<DialError>>,
}

/// A connection and how long it has been silent.
struct Watched {
    line: Line,
    /// Of its dialer.
    era: u64,
    unanswered: AtomicU32,
}

impl Watched {
    fn new((line, era): (Line, u64)) -> Arc<Self> {
        Arc::new(Self { line, era, unanswered: AtomicU32::new(0) })
    }
}

impl Shared {
    /// A connection that is made when there is something to send.
    pub(super) fn lazy(dialer: Arc<Dialer>, call_timeout: Duration) -> Self {
        Self::new(dialer, call_timeout, None)
    }

    /// The same, and it warns when the server comes back without what it had.
    pub(super) fn lazy_and_watching(dialer: Arc<Dialer>, call_timeout: Duration) -> Self {
        Self::new(dialer, call_timeout, Some(Process::default()))
    }

    fn new(dialer: Arc<Dialer>, call_timeout: Duration, process: Option<Process>) -> Self {
        let state = State {
            line: None,
            dialing: None,
            failed: 0,
            not_before: Instant::now(),
            last_failure: None,
        };
        Self(Arc::new(Inner { dialer, call_timeout, process, state: Mutex::new(state) }))
    }

    pub(super) fn call_timeout(&self) -> Duration {
        self.0.call_timeout
    }

    /// Connects now.
    pub(super) async fn begin(&self) -> Result<(), DialError> {
        let line = Watched::new(self.0.dialer.dial().await?);
        self.look_who_it_is(&line).await;
        self.lock().line = Some(line);
        Ok(())
    }

    /// Sends a message, now if there is a connection, and waits for its reply.
    ///
    /// # Cancel safety
    /// Replies are matched with calls in order, and the reply of a dropped call is thrown away.
    pub(super) fn run<'a>(&'a self, message: Message<'a>) -> Asked<'a> {
        self.run_from(message, Instant::now())
    }

    /// The same where the caller has looked at the clock.
    pub(super) fn run_from<'a>(&'a self, message: Message<'a>, now: Instant) -> Asked<'a> {
        let line = match self.line_at_once() {
            Ok(Ok(line)) => line,
            Ok(Err(dialing)) => {
                return Asked::boxed(async move {
                    let line = self.next_line(dialing).await?;
                    self.run_on_or_again(line, message).await
                });
            }
            Err(failure) => return Asked::Failed(Some(failure)),
        };
        if let (Line::Own(wire), Message::Script { call, asking }) = (&line.line, message) {
            let (since, way) = (now, call.first_way(asking));
            return match send(call, way, wire, since + self.0.call_timeout) {
                Ok((answer, places)) => {
                    let waiting = Waiting { shared: self, line, since, heard: false };
                    Asked::Sent(Some(Sent { waiting, call, way, places, answer }))
                }
                Err(_) if wire.has_ended() => Asked::boxed(self.run_again(line, message)),
                Err(not_sent) => Asked::Failed(Some(not_sent)),
            };
        }
        Asked::boxed(self.run_on_or_again(line, message))
    }

    async fn run_on_or_again(
        &self,
        line: Arc<Watched>,
        message: Message<'_>,
    ) -> Result<Answer, Failure> {
        match self.run_on(Arc::clone(&line), message).await {
            Err(Failure::NotSent(_)) if line.line.has_ended() => {
                self.run_again(line, message).await
            }
            result => result,
        }
    }

    /// The connection had ended before anything was sent, as after a restart of the server.
    async fn run_again(
        &self,
        ended: Arc<Watched>,
        message: Message<'_>,
    ) -> Result<Answer, Failure> {
        self.replace(&ended, "it has ended");
        let line = match self.line_at_once()? {
            Ok(line) => line,
            Err(dialing) => self.next_line(dialing).await?,
        };
        self.run_on(line, message).await
    }

    async fn run_on(&self, line: Arc<Watched>, message: Message<'_>) -> Result<Answer, Failure> {
        let limit = self.0.call_timeout;
        let waiting = Waiting { shared: self, line, since: Instant::now(), heard: false };
        let until = waiting.since + limit;
        let reply = match (&waiting.line.line, message) {
            (Line::Own(wire), Message::Script { call, asking }) => {
                send_on(call, call.first_way(asking), wire, until).await
            }
            (line, message) => {
                let mut line = line.clone();
                let sent =
                    Box::pin(timeout_at(until, async move { message.send(&mut line).await }));
                sent.await.map_err(|_| Late)
            }
        };
        waiting.conclude(reply, message)
    }

    /// Asks the server who it is, ahead of all calls on this connection, whose writes would make one that came back
    /// empty look as if it were not; and warns if it is one without what it had. Waits for nothing.
    async fn look_who_it_is(&self, line: &Arc<Watched>) {
        if self.0.process.is_none() {
            return;
        }
        let (this, mut line) = (self.clone(), line.line.clone());
        let mut asks = Box::pin(async move {
            let question = Process::question();
            let asking = Message::Question(&question);
            let said = timeout(this.0.call_timeout, asking.send(&mut line)).await;
            let process = this.0.process.as_ref();
            if let (Ok(Ok(info)), Some(process)) = (said, process)
                && let Some(warning) = process.learn(&text(&info.value))
            {
                tracing::warn!("{warning}");
            }
        });
        // The first poll sends the question.
        let pending = poll_fn(|context| Poll::Ready(asks.as_mut().poll(context).is_pending()));
        if pending.await {
            // Nobody joins it: it ends within the time of a call.
            tokio::spawn(asks);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code that can panic runs while the state is half changed.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The connection, or word of the next one if it is on its way.
    fn line_at_once(&self) -> Result<Result<Arc<Watched>, watch::Receiver<()>>, Failure> {
        let mut state = self.lock();
        match &state.line {
            Some(line) if line.era == self.0.dialer.era() => return Ok(Ok(Arc::clone(line))),
            // It leads to a server that is the primary no more, however well that one answers.
            Some(_) => state.line = None,
            None => {}
        }
        self.dial(&mut state).map(Err).ok_or_else(|| state.no_connection())
    }

    /// The connection that is on its way.
    async fn next_line(&self, mut dialing: watch::Receiver<()>) -> Result<Arc<Watched>, Failure> {
        let limit = self.0.call_timeout;
        // Nothing is ever sent on this channel: it closes when the attempt has ended.
        if timeout_at(Instant::now() + limit, dialing.changed()).await.is_err() {
            return Err(Failure::NotSent(TooLong::Connection(limit).into()));
        }
        let state = self.lock();
        match &state.line {
            Some(line) => Ok(Arc::clone(line)),
            None => Err(state.no_connection()),
        }
    }

    /// Drops a connection that is of no use any more, and begins to make the next one.
    fn replace(&self, line: &Arc<Watched>, reason: &'static str) {
        let mut state = self.lock();
        // Many calls fail with one connection; the first to say so is enough.
        if state.line.as_ref().is_some_and(|current| Arc::ptr_eq(current, line)) {
            tracing::warn!(reason, "the connection to Redis is replaced");
            state.line = None;
            self.dial(&mut state);
        }
    }

    /// Makes a new connection beside one that reaches a replica. That one stays until then: it still
    /// answers, and answers fast.
    fn look_for_primary(&self, line: &Arc<Watched>) {
        let mut state = self.lock();
        if state.line.as_ref().is_some_and(|current| Arc::ptr_eq(current, line))
            && self.dial(&mut state).is_some()
        {
            // The next connection may reach the same replica; not more than one attempt a second.
            state.not_before = Instant::now() + LONGEST_PAUSE;
        }
    }

    /// Begins an attempt to connect, or joins the one that is under way. `None` in the pause after
    /// a failed one.
    fn dial(&self, state: &mut State) -> Option<watch::Receiver<()>> {
        if let Some(dialing) = &state.dialing
            && dialing.has_changed().is_ok()
        {
            return Some(dialing.clone());
        }
        if Instant::now() < state.not_before {
            return None;
        }
        let (done, dialing) = watch::channel(());
        state.dialing = Some(dialing.clone());
        let this = self.clone();
        // A task of its own, since the call that began it may be dropped while others wait for it.
        // Nobody joins it: it ends within the time limit for connecting.
        tokio::spawn(async move {
            let made = this.0.dialer.dial().await.map(Watched::new);
            if let Ok(line) = &made {
                this.look_who_it_is(line).await;
            }
            let mut state = this.lock();
            match made {
                // The primary has moved again: whoever waits is told that there is no connection, and comes again.
                Ok(line) if line.era != this.0.dialer.era() => {}
                Ok(line) => {
                    state.line = Some(line);
                    state.failed = 0;
                    state.last_failure = None;
                }
                Err(error) => {
                    state.not_before = Instant::now() + pause_after(state.failed);
                    state.failed = state.failed.saturating_add(1);
                    state.last_failure = Some(Arc::new(error));
                }
            }
            state.dialing = None;
            drop(state);
            drop(done);
        });
        Some(dialing)
    }
}

/// A message on its way.
///
/// Nearly all calls go over a connection that is there, and every request has two of them. So that way is no future of
/// futures, and whatever else may happen is in a box.
#[must_use = "futures do nothing unless polled"]
pub(in crate::store::redis) enum Asked<'a> {
    Sent(Option<Sent<'a>>),
    Else(BoxFuture<'a, Result<Answer, Failure>>),
    Failed(Option<Failure>),
}

/// A call that was sent over a connection of our own.
pub(in crate::store::redis) struct Sent<'a> {
    waiting: Waiting<'a>,
    call: &'a Call,
    way: Way,
    places: Places,
    answer: wire::Answer,
}

impl<'a> Asked<'a> {
    pub(super) fn boxed(asked: impl Future<Output = Result<Answer, Failure>> + Send + 'a) -> Self {
        Self::Else(Box::pin(asked))
    }
}

const DONE: &str = "a future is not polled after it is done";

impl Future for Asked<'_> {
    type Output = Result<Answer, Failure>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let sent = match this {
            Self::Sent(sent) => sent,
            Self::Else(asked) => return asked.as_mut().poll(cx),
            Self::Failed(failure) => return Poll::Ready(Err(failure.take().expect(DONE))),
        };
        let reply = ready!(Pin::new(&mut sent.as_mut().expect(DONE).answer).poll(cx));
        let Sent { waiting, call, way, places, .. } = sent.take().expect(DONE);
        let message = Message::Script { call, asking: way.asking };
        let reply = heard(reply, places);
        let Some(next) = reply.as_ref().ok().and_then(|result| next_way(call, way, result)) else {
            return Poll::Ready(waiting.conclude(reply, message));
        };
        *this = Self::boxed(async move {
            let (shared, line) = (waiting.shared, Arc::clone(&waiting.line));
            let until = waiting.since + shared.0.call_timeout;
            let reply = match &line.line {
                Line::Own(wire) => send_on(call, next, wire, until).await,
                Line::Library(_) => reply,
            };
            match waiting.conclude(reply, message) {
                // It ended behind the reply that asked for another way.
                Err(Failure::NotSent(_)) if line.line.has_ended() => {
                    shared.run_again(line, message).await
                }
                result => result,
            }
        });
        Pin::new(this).poll(cx)
    }
}

/// There was no reply in time.
struct Late;

/// Sends a call over a connection of our own.
fn send(
    call: &Call,
    way: Way,
    wire: &Wire,
    until: Instant,
) -> Result<(wire::Answer, Places), Failure> {
    let mut places = Places::default();
    let answer = wire.ask(Some(until), |out| places = call.write(way, out));
    let answer = answer.map_err(|not_taken| Failure::NotSent(not_taken.into()))?;
    Ok((answer, places))
}

fn heard(reply: Result<Value, Unheard>, places: Places) -> Result<Result<Answer, Failure>, Late> {
    match reply {
        Ok(reply) => Ok(places.answer(reply).map_err(Failure::Refused)),
        Err(Unheard::Late) => Err(Late),
        Err(Unheard::Lost(error)) => Ok(Err(Failure::of_reply(error))),
    }
}

/// Sends it in this way, and in others if it has to be.
async fn send_on(
    call: &Call,
    mut way: Way,
    wire: &Wire,
    until: Instant,
) -> Result<Result<Answer, Failure>, Late> {
    loop {
        let (answer, places) = match send(call, way, wire, until) {
            Ok(sent) => sent,
            Err(not_sent) => return Ok(Err(not_sent)),
        };
        let result = heard(answer.await, places)?;
        match next_way(call, way, &result) {
            Some(next) => way = next,
            None => return Ok(result),
        }
    }
}

/// A call without its reply yet. If it is dropped like that, by our time limit or by a shorter one
/// of the caller's, the connection has been silent once more.
struct Waiting<'a> {
    shared: &'a Shared,
    line: Arc<Watched>,
    since: Instant,
    heard: bool,
}

impl Waiting<'_> {
    /// What a reply says of its connection, and whether the message was done.
    fn conclude(
        mut self,
        reply: Result<Result<Answer, Failure>, Late>,
        message: Message<'_>,
    ) -> Result<Answer, Failure> {
        self.heard = reply.is_ok();
        let (shared, line) = (self.shared, &self.line);
        let failure = match reply {
            Ok(Ok(answer)) => {
                line.answered();
                // A primary that lost its replicas may be one that its Sentinels have given up.
                if message.fell_short(&answer) && shared.0.dialer.follows() {
                    shared.look_for_primary(line);
                }
                return Ok(answer);
            }
            Ok(Err(failure)) => failure,
            Err(Late) => {
                return Err(Failure::NoAnswer(TooLong::Reply(shared.0.call_timeout).into()));
            }
        };
        match &failure {
            Failure::Refused(error) => {
                line.answered();
                if is_readonly(error) {
                    shared.look_for_primary(line);
                }
            }
            Failure::NoAnswer(_) => shared.replace(line, "it broke"),
            Failure::NotSent(_) => {}
        }
        Err(failure)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        // A call that was dropped sooner says nothing about the connection.
        if !self.heard
            && self.since.elapsed() >= SILENCE
            && self.line.unanswered.fetch_add(1, Ordering::Relaxed) + 1 >= SILENT_AFTER
        {
            self.shared.replace(&self.line, "it does not answer");
        }
    }
}

impl Watched {
    fn answered(&self) {
        // A plain look first: a store would take the cache line from the other cores each time.
        if self.unanswered.load(Ordering::Relaxed) != 0 {
            self.unanswered.store(0, Ordering::Relaxed);
        }
    }
}

impl State {
    fn no_connection(&self) -> Failure {
        Failure::NotSent(Box::new(NoConnection(self.last_failure.clone())))
    }
}

fn pause_after(failed: u32) -> Duration {
    FIRST_PAUSE.saturating_mul(1 << failed.min(10)).min(LONGEST_PAUSE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pause_between_attempts_grows_and_is_bounded() {
        let pauses: Vec<_> = (0..8).map(|failed| pause_after(failed).as_millis()).collect();
        assert_eq!(pauses, [50, 100, 200, 400, 800, 1000, 1000, 1000]);
        assert_eq!(pause_after(u32::MAX), LONGEST_PAUSE);
    }
}
