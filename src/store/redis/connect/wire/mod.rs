//! A connection that many calls share: each adds its commands to what goes out next, and gets its replies.
//!
//! The library's own connection passes every command through a channel to a task that writes it by itself, and
//! that is more than the rest of a request costs. Here a call writes into one buffer. What is written
//! within one turn of the runtime goes out in one piece, or in a few if it is a lot: the others that are ready go first,
//! and with nothing else to do a turn is over at once.
//!
//! One timer serves all calls, since all wait equally long: a timer for each would cost more than sending it.
//!
//! # Cancel safety
//! A call that is dropped has been sent or will be, and its replies are thrown away.

mod turn;

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, ready};

use ::redis::{RedisError, Value};
use futures_util::task::AtomicWaker;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::oneshot;
use tokio::time::{Instant, Sleep, sleep_until};
use tokio_util::task::AbortOnDropHandle;

use super::resp::{self, Out};
use turn::{ENOUGH, Turn};

/// The most calls without their replies. A server that takes a millisecond for each would need a minute, and no
/// call waits that long.
const CALLS_MAX: usize = 65_536;

/// What waits to be written at most, in bytes: a thousand answers of 64 KiB.
const UNSENT_MAX: usize = 64 * 1024 * 1024;

/// What is read at a time, in bytes, and the size that buffers go back to.
const BUFFER: usize = 64 * 1024;

/// A buffer that grew beyond this for one large answer is given back, in bytes.
const KEPT_MAX: usize = 1024 * 1024;

/// The end that calls are made on. Clones share the connection, which ends with the last of them.
#[derive(Clone)]
pub(super) struct Wire {
    queue: Arc<Queue>,
    _tasks: Arc<[AbortOnDropHandle<()>; 2]>,
}

#[derive(Default)]
struct Queue {
    next: Mutex<Next>,
    /// Of the driver: what waits is to be written.
    due: AtomicWaker,
    /// Of the turn: something waits to be written.
    begun: AtomicWaker,
}

/// What goes out with the next write.
#[derive(Default)]
struct Next {
    bytes: Vec<u8>,
    calls: Vec<Waiting>,
    /// The calls of earlier writes that have no reply, when the connection last looked.
    earlier: usize,
    ended: bool,
}

/// A call that waits for its replies.
struct Waiting {
    missing: usize,
    /// Which of them is the time.
    time: Option<usize>,
    values: Vec<Value>,
    /// `None` for a question, whose caller watches its time.
    until: Option<Instant>,
    /// `None` once it has been told that its time is over. The replies are still to come.
    caller: Option<oneshot::Sender<Result<Value, Unheard>>>,
}

impl Waiting {
    /// True if it is still to be told that its time is over.
    fn is_watched(&self) -> bool {
        self.until.is_some() && self.caller.is_some()
    }

    fn is_late(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| until <= now)
    }

    fn tell_late(&mut self, now: Instant) {
        if self.is_late(now) {
            self.tell(Err(Unheard::Late));
        }
    }

    fn tell(&mut self, answer: Result<Value, Unheard>) {
        if let Some(caller) = self.caller.take() {
            // A caller that is gone does not want it any more.
            let _ = caller.send(answer);
        }
    }
}

/// Why there is no reply to what was sent.
#[derive(Debug)]
pub(super) enum Unheard {
    /// Its time was over.
    Late,
    /// The connection broke.
    Lost(RedisError),
}

/// Why nothing was sent.
#[derive(Clone, Copy, Debug, thiserror::Error)]
pub(super) enum NotTaken {
    #[error("too many calls wait for Redis on one connection")]
    TooMany,
    #[error("the connection has ended")]
    Ended,
}

impl Wire {
    /// Takes over a stream on which nobody waits for anything.
    pub(super) fn over<S>(stream: S) -> Self
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let queue = Arc::new(Queue::default());
        let driver = Driver::new(stream, Arc::clone(&queue));
        let driver = AbortOnDropHandle::new(tokio::spawn(driver));
        let turn = AbortOnDropHandle::new(tokio::spawn(Turn::of(Arc::clone(&queue))));
        Self { queue, _tasks: Arc::new([driver, turn]) }
    }

    pub(super) fn has_ended(&self) -> bool {
        self.queue.lock().ended
    }

    /// Sends what is written. The [`Answer`] gives its reply; several replies as an array. It waits until
    /// this moment, or until that of a call before if that is later: so all have to wait equally long, but for those
    /// without a moment, which wait for ever.
    ///
    /// # Errors
    /// [`NotTaken`], and nothing was sent.
    pub(super) fn ask(
        &self,
        until: Option<Instant>,
        write: impl FnOnce(&mut Out<'_>),
    ) -> Result<Answer, NotTaken> {
        let mut next = self.queue.lock();
        if next.ended {
            return Err(NotTaken::Ended);
        }
        if next.earlier + next.calls.len() >= CALLS_MAX || next.bytes.len() >= UNSENT_MAX {
            return Err(NotTaken::TooMany);
        }
        let (caller, answer) = oneshot::channel();
        let first = next.bytes.is_empty();
        let mut out = Out::new(&mut next.bytes);
        write(&mut out);
        let (missing, time, values) = (out.count(), out.time_at(), Vec::new());
        next.calls.push(Waiting { missing, time, values, until, caller: Some(caller) });
        let calls = next.calls.len();
        drop(next);
        if calls == ENOUGH {
            self.queue.due.wake();
        } else if first {
            self.queue.begun.wake();
        }
        Ok(Answer(answer))
    }
}

/// A reply on its way.
pub(super) struct Answer(oneshot::Receiver<Result<Value, Unheard>>);

impl Future for Answer {
    /// What the server refuses is a value.
    type Output = Result<Value, Unheard>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.0).poll(cx).map(|answer| {
            let broken = || Unheard::Lost(io::Error::from(io::ErrorKind::BrokenPipe).into());
            answer.unwrap_or_else(|_| Err(broken()))
        })
    }
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, Next> {
        self.next.lock().unwrap_or_else(|poisoned| {
            // Whoever panicked while it wrote has left half a command behind.
            let mut next = poisoned.into_inner();
            *next = Next { ended: true, ..Next::default() };
            next
        })
    }

    /// Until when the first call waits that has not been sent.
    fn first_until(&self) -> Option<Instant> {
        let next = self.lock();
        next.calls.iter().filter(|call| call.is_watched()).find_map(|call| call.until)
    }

    fn end(&self) -> Vec<Waiting> {
        let ended = Next { ended: true, ..Next::default() };
        std::mem::replace(&mut *self.lock(), ended).calls
    }
}

/// What moves the bytes. It ends when the connection does.
struct Driver<S> {
    stream: S,
    queue: Arc<Queue>,
    writing: Vec<u8>,
    written: usize,
    waiting: VecDeque<Waiting>,
    /// How many of those, from the first on, have been told that their time is over.
    late: usize,
    timer: Pin<Box<Sleep>>,
    /// The timer is set, for the first of those that wait or for one before it.
    ticking: bool,
    reading: Vec<u8>,
    /// Of `reading`, what has come and has not been understood.
    from: usize,
    to: usize,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Driver<S> {
    fn new(stream: S, queue: Arc<Queue>) -> Self {
        Self {
            stream,
            queue,
            writing: Vec::new(),
            written: 0,
            waiting: VecDeque::new(),
            late: 0,
            timer: Box::pin(sleep_until(Instant::now())),
            ticking: false,
            reading: vec![0; BUFFER],
            from: 0,
            to: 0,
        }
    }

    /// Reads what there is, and hands it to those who wait.
    fn read(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        loop {
            self.make_room();
            let mut buffer = ReadBuf::new(&mut self.reading[self.to..]);
            match ready!(Pin::new(&mut self.stream).poll_read(cx, &mut buffer)) {
                Ok(()) if buffer.filled().is_empty() => {
                    return Poll::Ready(io::ErrorKind::UnexpectedEof.into());
                }
                Ok(()) => self.to += buffer.filled().len(),
                Err(error) => return Poll::Ready(error),
            }
            if let Err(malformed) = self.hand_out() {
                return Poll::Ready(io::Error::new(io::ErrorKind::InvalidData, malformed));
            }
        }
    }

    /// Half the buffer at least is free for the next read.
    fn make_room(&mut self) {
        if self.from == self.to {
            (self.from, self.to) = (0, 0);
            if self.reading.len() > KEPT_MAX {
                self.reading = vec![0; BUFFER];
            }
        } else if self.from > 0 && self.reading.len() - self.to < BUFFER / 2 {
            self.reading.copy_within(self.from..self.to, 0);
            (self.from, self.to) = (0, self.to - self.from);
        }
        if self.reading.len() - self.to < BUFFER / 2 {
            self.reading.resize(self.reading.len() * 2, 0);
        }
    }

    fn hand_out(&mut self) -> Result<(), resp::Malformed> {
        while self.from < self.to {
            // Without a call it is a reply that nobody asked for.
            let call = self.waiting.front_mut().ok_or(resp::Malformed)?;
            let come = &self.reading[self.from..self.to];
            let reply = match call.time == Some(call.values.len()) {
                true => resp::time(come)?,
                false => resp::reply(come)?,
            };
            let Some((value, length)) = reply else { return Ok(()) };
            self.from += length;
            let all = if call.missing == 1 && call.values.is_empty() {
                value
            } else {
                if call.values.is_empty() {
                    call.values.reserve_exact(call.missing);
                }
                call.values.push(value);
                if call.values.len() < call.missing {
                    continue;
                }
                Value::Array(std::mem::take(&mut call.values))
            };
            if let Some(mut call) = self.waiting.pop_front() {
                call.tell(Ok(all));
                self.late = self.late.saturating_sub(1);
            }
        }
        Ok(())
    }

    /// Tells those whose time is over.
    fn tick(&mut self, cx: &mut Context<'_>) {
        loop {
            if !self.ticking {
                // Told already, or with nothing to tell.
                while self.waiting.get(self.late).is_some_and(|call| !call.is_watched()) {
                    self.late += 1;
                }
                let first = self.waiting.get(self.late).and_then(|call| call.until);
                let Some(until) = first.or_else(|| self.queue.first_until()) else { return };
                self.timer.as_mut().reset(until);
                self.ticking = true;
            }
            if self.timer.as_mut().poll(cx).is_pending() {
                return;
            }
            self.ticking = false;
            let now = Instant::now();
            while let Some(call) = self.waiting.get_mut(self.late)
                && (call.is_late(now) || !call.is_watched())
            {
                call.tell_late(now);
                self.late += 1;
            }
            if self.late == self.waiting.len() {
                // They go out all the same, when the other side reads again.
                for call in &mut self.queue.lock().calls {
                    call.tell_late(now);
                }
            }
        }
    }

    /// Writes what calls have left.
    fn write(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        loop {
            while self.written < self.writing.len() {
                let rest = &self.writing[self.written..];
                match ready!(Pin::new(&mut self.stream).poll_write(cx, rest)) {
                    Ok(0) => return Poll::Ready(io::ErrorKind::WriteZero.into()),
                    Ok(written) => self.written += written,
                    Err(error) => return Poll::Ready(error),
                }
            }
            if !self.writing.is_empty() {
                if let Err(error) = ready!(Pin::new(&mut self.stream).poll_flush(cx)) {
                    return Poll::Ready(error);
                }
                self.written = 0;
                if self.writing.capacity() > KEPT_MAX {
                    self.writing = Vec::new();
                } else {
                    self.writing.clear();
                }
            }
            let mut next = self.queue.lock();
            if next.ended {
                return Poll::Ready(io::ErrorKind::BrokenPipe.into());
            }
            next.earlier = self.waiting.len();
            if next.bytes.is_empty() {
                return Poll::Pending;
            }
            std::mem::swap(&mut self.writing, &mut next.bytes);
            self.waiting.extend(next.calls.drain(..));
            next.earlier = self.waiting.len();
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> Future for Driver<S> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.get_mut();
        this.queue.due.register(cx.waker());
        let ended = match this.read(cx) {
            Poll::Pending => this.write(cx),
            ended @ Poll::Ready(_) => ended,
        };
        let Poll::Ready(error) = ended else {
            this.tick(cx);
            return Poll::Pending;
        };
        for mut call in this.waiting.drain(..).chain(this.queue.end()) {
            let error = io::Error::new(error.kind(), error.to_string());
            call.tell(Err(Unheard::Lost(error.into())));
        }
        Poll::Ready(())
    }
}

impl<S> Drop for Driver<S> {
    fn drop(&mut self) {
        // Those who wait hear of it when their senders are dropped.
        self.queue.end();
    }
}

#[cfg(test)]
mod tests;
