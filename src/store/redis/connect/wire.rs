//! A connection that many calls share: each adds its commands to what goes out next, and gets its replies.
//!
//! The library's own connection passes every command through a channel to a task that writes it by itself, and
//! that is more than the rest of a request costs. Here a call writes into one buffer. What is written
//! within one turn of the runtime goes out in one piece: the task that sends lets the others that are ready go first,
//! and with nothing else to do a turn is over at once.
//!
//! # Cancel safety
//! A call that is dropped has been sent or will be, and its replies are thrown away.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, ready};

use ::redis::{RedisError, RedisResult, Value};
use futures_util::task::AtomicWaker;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::oneshot;
use tokio_util::task::AbortOnDropHandle;

use super::resp::{self, Out};

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
    _driver: Arc<AbortOnDropHandle<()>>,
}

#[derive(Default)]
struct Queue {
    next: Mutex<Next>,
    waker: AtomicWaker,
}

/// What goes out with the next write.
#[derive(Default)]
struct Next {
    bytes: Vec<u8>,
    calls: Vec<Waiting>,
    /// The calls of earlier writes that had no reply when the last one began.
    earlier: usize,
    ended: bool,
}

/// A call that waits for its replies.
struct Waiting {
    missing: usize,
    values: Vec<Value>,
    caller: oneshot::Sender<RedisResult<Value>>,
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
        Self { queue, _driver: Arc::new(driver) }
    }

    pub(super) fn has_ended(&self) -> bool {
        self.queue.lock().ended
    }

    /// Sends what is written. [`Answer::come`] gives its reply; several replies as an array.
    ///
    /// # Errors
    /// [`NotTaken`], and nothing was sent.
    pub(super) fn ask(&self, write: impl FnOnce(&mut Out<'_>)) -> Result<Answer, NotTaken> {
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
        let missing = out.count();
        next.calls.push(Waiting { missing, values: Vec::new(), caller });
        drop(next);
        if first {
            self.queue.waker.wake();
        }
        Ok(Answer(answer))
    }
}

/// A reply on its way.
pub(super) struct Answer(oneshot::Receiver<RedisResult<Value>>);

impl Answer {
    /// # Errors
    /// What became of the connection. What the server refuses is a value.
    pub(super) async fn come(self) -> RedisResult<Value> {
        self.0.await.unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::BrokenPipe).into()))
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
    /// The others had their turn since there was something to write.
    turned: bool,
    waiting: VecDeque<Waiting>,
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
            turned: false,
            waiting: VecDeque::new(),
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
        while let Some((value, length)) = resp::reply(&self.reading[self.from..self.to])? {
            self.from += length;
            // A reply that nobody asked for.
            let call = self.waiting.front_mut().ok_or(resp::Malformed)?;
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
            if let Some(call) = self.waiting.pop_front() {
                // A caller that is gone does not want it any more.
                let _ = call.caller.send(Ok(all));
            }
        }
        Ok(())
    }

    /// Writes what calls have left, a turn after the first of them.
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
            if next.bytes.is_empty() {
                self.turned = false;
                return Poll::Pending;
            }
            if !self.turned {
                self.turned = true;
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            self.turned = false;
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
        this.queue.waker.register(cx.waker());
        let error = match this.read(cx) {
            Poll::Ready(error) => error,
            Poll::Pending => ready!(this.write(cx)),
        };
        for call in this.waiting.drain(..).chain(this.queue.end()) {
            let error = io::Error::new(error.kind(), error.to_string());
            let _ = call.caller.send(Err(RedisError::from(error)));
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
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures_util::future::join_all;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};

    use super::*;
    use crate::store::redis::call::Commands as _;

    /// A server that answers each command `*1 $n word` with its word.
    async fn echo(mut stream: DuplexStream, pieces: usize) {
        let (mut seen, mut buffer) = (Vec::new(), [0; 4096]);
        while let Ok(read @ 1..) = stream.read(&mut buffer).await {
            seen.extend_from_slice(&buffer[..read]);
            while let Ok(Some((Value::Array(words), length))) = resp::reply(&seen) {
                let Some(Value::BulkString(word)) = words.into_iter().next() else { return };
                let mut reply = format!("${}\r\n", word.len()).into_bytes();
                reply.extend_from_slice(&word);
                reply.extend_from_slice(b"\r\n");
                // In pieces that cut through everything.
                for piece in reply.chunks(pieces) {
                    if stream.write_all(piece).await.is_err() {
                        return;
                    }
                }
                seen.drain(..length);
            }
        }
    }

    fn say(wire: &Wire, words: &[&[u8]]) -> Result<Answer, NotTaken> {
        wire.ask(|out| {
            for word in words {
                out.words(&[&[word]]);
            }
        })
    }

    fn word(bytes: &[u8]) -> Value {
        Value::BulkString(bytes.to_vec())
    }

    #[tokio::test]
    async fn every_call_gets_its_own_replies_however_they_are_cut() {
        let (here, there) = duplex(1_000);
        tokio::spawn(echo(there, 7));
        let wire = Wire::over(here);
        let calls = (0..500_usize).map(|number| {
            let (wire, name) = (wire.clone(), number.to_string().into_bytes());
            async move {
                let large = name.repeat(if number % 50 == 0 { 10_000 } else { 1 });
                if number % 3 == 0 {
                    let reply = say(&wire, &[&name, &large, b""]).unwrap().come().await.unwrap();
                    let expected = vec![word(&name), word(&large), word(b"")];
                    assert_eq!(reply, Value::Array(expected));
                } else {
                    assert_eq!(say(&wire, &[&large]).unwrap().come().await.unwrap(), word(&large));
                }
            }
        });
        join_all(calls).await;
    }

    #[tokio::test]
    async fn the_reply_of_a_call_that_was_dropped_goes_to_nobody() {
        let (here, there) = duplex(1_000);
        tokio::spawn(echo(there, 100));
        let wire = Wire::over(here);
        for _ in 0..100 {
            drop(say(&wire, &[b"dropped", b"too"]).unwrap());
            let kept = say(&wire, &[b"kept"]).unwrap();
            drop(say(&wire, &[b"dropped"]).unwrap());
            assert_eq!(kept.come().await.unwrap(), word(b"kept"));
        }
    }

    /// Counts the writes that reach it.
    struct Counting<S>(S, Arc<AtomicUsize>);

    impl<S: AsyncRead + Unpin> AsyncRead for Counting<S> {
        fn poll_read(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            buffer: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            Pin::new(&mut self.0).poll_read(cx, buffer)
        }
    }

    impl<S: AsyncWrite + Unpin> AsyncWrite for Counting<S> {
        fn poll_write(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<io::Result<usize>> {
            self.1.fetch_add(1, Ordering::Relaxed);
            Pin::new(&mut self.0).poll_write(cx, bytes)
        }

        fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.0).poll_flush(cx)
        }

        fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.0).poll_shutdown(cx)
        }
    }

    #[tokio::test]
    async fn what_is_said_within_one_turn_goes_out_in_one_piece() {
        let (here, there) = duplex(1 << 20);
        tokio::spawn(echo(there, 100));
        let writes = Arc::new(AtomicUsize::new(0));
        let wire = Wire::over(Counting(here, Arc::clone(&writes)));
        // Tasks that are ready together, the last of which is behind the one that writes.
        let calls = (0..50).map(|_| {
            let wire = wire.clone();
            tokio::spawn(async move { say(&wire, &[b"word"]).unwrap().come().await.unwrap() })
        });
        for reply in join_all(calls).await {
            assert_eq!(reply.unwrap(), word(b"word"));
        }
        assert_eq!(writes.load(Ordering::Relaxed), 1);
    }

    #[tokio::test]
    async fn a_connection_that_ends_fails_those_who_wait_and_takes_no_more() {
        let (here, mut there) = duplex(1_000);
        let wire = Wire::over(here);
        let waiting = say(&wire, &[b"a"]).unwrap();
        let mut buffer = [0; 100];
        let _ = there.read(&mut buffer).await.unwrap();
        drop(there);
        let error = waiting.come().await.unwrap_err();
        assert!(error.is_io_error(), "{error:?}");
        assert!(wire.has_ended());
        assert!(matches!(say(&wire, &[b"b"]), Err(NotTaken::Ended)));
    }

    #[tokio::test]
    async fn what_is_no_reply_or_was_not_asked_for_ends_the_connection() {
        for nonsense in [&b"HTTP/1.1 400 Bad Request\r\n"[..], b":1\r\n:2\r\n", b"*9\r\n:1\r:2"] {
            let (here, mut there) = duplex(1_000);
            let wire = Wire::over(here);
            let waiting = say(&wire, &[b"a"]).unwrap();
            there.write_all(nonsense).await.unwrap();
            let reply = waiting.come().await;
            let later = say(&wire, &[b"b"]);
            let later = match later {
                Ok(answer) => answer.come().await.is_err(),
                Err(_) => true,
            };
            assert!(later, "{nonsense:?}: {reply:?}");
        }
    }

    #[tokio::test]
    async fn a_connection_takes_so_many_calls_and_no_more() {
        let (here, _there) = duplex(1_000);
        let wire = Wire::over(here);
        let waiting: Vec<_> = (0..CALLS_MAX).map(|_| say(&wire, &[b"a"]).unwrap()).collect();
        assert!(matches!(say(&wire, &[b"b"]), Err(NotTaken::TooMany)));
        drop(waiting);
        // And so many bytes, while the other side reads nothing.
        let (here, _there) = duplex(1_000);
        let wire = Wire::over(here);
        let large = vec![0; UNSENT_MAX];
        let _first = say(&wire, &[&large]).unwrap();
        assert!(matches!(say(&wire, &[b"b"]), Err(NotTaken::TooMany)));
    }
}
