//! The response body: passed through, buffered, or begun in a buffer and passed through after it.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use futures_util::poll;
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt as _;
use tokio::time::sleep;

pin_project_lite::pin_project! {
    /// The body of a response that went through the layer.
    ///
    /// A body that is passed through keeps its frames, trailers and errors.
    #[derive(Debug)]
    pub struct ResponseBody<B> {
        // What was read while it was open whether the body can be kept: nothing, a piece, or more.
        read: Bytes,
        more: VecDeque<Bytes>,
        #[pin]
        rest: Rest<B>,
    }
}

pin_project_lite::pin_project! {
    #[project = RestProj]
    #[derive(Debug)]
    enum Rest<B> {
        None,
        Body { #[pin] body: B },
        // Frames of it have been read already.
        Begun { body: Pin<Box<B>> },
    }
}

impl<B> ResponseBody<B> {
    pub(crate) fn passed(body: B) -> Self {
        Self { read: Bytes::new(), more: VecDeque::new(), rest: Rest::Body { body } }
    }

    pub(crate) fn full(bytes: Bytes) -> Self {
        Self { read: bytes, more: VecDeque::new(), rest: Rest::None }
    }

    pub(crate) fn begun(more: VecDeque<Bytes>, body: Pin<Box<B>>) -> Self {
        Self { read: Bytes::new(), more, rest: Rest::Begun { body } }
    }
}

impl<B: Body> Body for ResponseBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let this = self.project();
        if !this.read.is_empty() {
            return Poll::Ready(Some(Ok(Frame::data(std::mem::take(this.read)))));
        }
        if let Some(bytes) = this.more.pop_front() {
            return Poll::Ready(Some(Ok(Frame::data(bytes))));
        }
        let frame = match this.rest.project() {
            RestProj::None => return Poll::Ready(None),
            RestProj::Body { body } => ready!(body.poll_frame(cx)),
            RestProj::Begun { body } => ready!(body.as_mut().poll_frame(cx)),
        };
        // Bytes give themselves away here without a copy.
        let to_bytes = |mut data: B::Data| data.copy_to_bytes(data.remaining());
        Poll::Ready(frame.map(|frame| frame.map(|frame| frame.map_data(to_bytes))))
    }

    fn is_end_stream(&self) -> bool {
        self.read.is_empty()
            && self.more.is_empty()
            && match &self.rest {
                Rest::None => true,
                Rest::Body { body } => body.is_end_stream(),
                Rest::Begun { body } => body.is_end_stream(),
            }
    }

    fn size_hint(&self) -> SizeHint {
        let more: u64 = self.more.iter().map(|bytes| bytes.len() as u64).sum();
        let read = self.read.len() as u64 + more;
        let rest = match &self.rest {
            Rest::None => SizeHint::with_exact(0),
            Rest::Body { body } => body.size_hint(),
            Rest::Begun { body } => body.size_hint(),
        };
        let mut hint = SizeHint::new();
        hint.set_lower(rest.lower().saturating_add(read));
        if let Some(upper) = rest.upper() {
            hint.set_upper(upper.saturating_add(read));
        }
        hint
    }
}

/// What was read of a body.
pub(crate) enum Read<B: Body> {
    Whole(Bytes),
    /// Too long, or too slow: what was read, and the rest.
    Part(VecDeque<Bytes>, Pin<Box<B>>),
    Broken(B::Error),
}

/// Reads a body, at most so many bytes and for so long.
pub(crate) async fn read<B: Body>(body: B, limit: usize, within: Duration) -> Read<B> {
    if body.size_hint().lower() > limit as u64 {
        return Read::Part(VecDeque::new(), Box::pin(body));
    }
    let mut body = Box::pin(body);
    let mut slow = None;
    // Most bodies are one frame, which needs no queue.
    let (mut first, mut frames, mut length) = (Bytes::new(), VecDeque::new(), 0_usize);
    loop {
        // Most answers are there as soon as they are asked for: no clock is needed for them.
        let frame = match poll!(body.frame()) {
            Poll::Ready(frame) => frame,
            Poll::Pending => {
                let slow = slow.get_or_insert_with(|| Box::pin(sleep(within)));
                tokio::select! {
                    biased;
                    frame = body.frame() => frame,
                    () = slow => return Read::Part(queued(first, frames), body),
                }
            }
        };
        match frame {
            None if frames.is_empty() => return Read::Whole(first),
            None => return Read::Whole(concat(queued(first, frames), length)),
            Some(Err(error)) => return Read::Broken(error),
            Some(Ok(frame)) => {
                // Trailers are not kept, neither here nor in replays.
                let Ok(mut data) = frame.into_data() else { continue };
                let data = data.copy_to_bytes(data.remaining());
                length = length.saturating_add(data.len());
                if first.is_empty() && frames.is_empty() {
                    first = data;
                } else {
                    frames.push_back(data);
                }
                if length > limit {
                    return Read::Part(queued(first, frames), body);
                }
            }
        }
    }
}

fn queued(first: Bytes, mut frames: VecDeque<Bytes>) -> VecDeque<Bytes> {
    if !first.is_empty() {
        frames.push_front(first);
    }
    frames
}

fn concat(mut frames: VecDeque<Bytes>, length: usize) -> Bytes {
    if frames.len() <= 1 {
        return frames.pop_front().unwrap_or_default();
    }
    let mut whole = BytesMut::with_capacity(length);
    frames.iter().for_each(|frame| whole.extend_from_slice(frame));
    whole.freeze()
}
