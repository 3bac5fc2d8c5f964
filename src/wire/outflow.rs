//! Sending a body on an HTTP/2 stream, no faster than its reader takes it.
//!
//! One chunk at most waits here for the peer's window: the next one is asked for only when it has gone.
//! So a slow reader holds back its own sender and nobody else, and memory is bounded by the number of
//! streams. Whoever owns the stream polls this; there is no task of its own.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use h2::{Reason, SendStream};
use http::HeaderMap;
use http_body::Body;
use tokio::time::{Sleep, sleep};

/// A reset takes what is not yet written of its stream along, so one that ends a broken body waits for
/// this: the head and the last words before it shall arrive. A peer that does not read loses them.
const LAST_WORDS: Duration = Duration::from_millis(10);

/// A body on its way out.
pub struct Outflow<B: Body> {
    body: B,
    stream: SendStream<Bytes>,
    chunk: Bytes,
    is_last: bool,
    is_blocked: bool,
    broken: Option<(B::Error, Pin<Box<Sleep>>)>,
}

/// Why a body did not go out whole.
#[derive(Debug)]
pub enum Stopped<E> {
    /// The body itself failed, and the stream was reset.
    Body(E),
    /// The peer wants no more of it, or the connection has gone.
    Peer(h2::Error),
}

impl<B> Outflow<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Unpin,
{
    /// Sends `body` behind a head that left the stream open.
    pub fn new(body: B, stream: SendStream<Bytes>) -> Self {
        Self { body, stream, chunk: Bytes::new(), is_last: false, is_blocked: false, broken: None }
    }

    /// Whether the peer's window is what it waits for.
    pub fn is_blocked(&self) -> bool {
        self.is_blocked
    }

    /// The body, or what has not been read of it.
    pub fn into_body(self) -> B {
        self.body
    }

    /// Ends the stream before the body does.
    pub fn reset(&mut self, reason: Reason) {
        self.stream.send_reset(reason);
    }

    /// Sends what can be sent; ready when all of it is with the connection.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Stopped<B::Error>>> {
        loop {
            if let Some((_, last_words)) = &mut self.broken {
                ready!(last_words.as_mut().poll(cx));
                self.stream.send_reset(Reason::INTERNAL_ERROR);
                return match self.broken.take() {
                    Some((error, _)) => Poll::Ready(Err(Stopped::Body(error))),
                    None => Poll::Ready(Ok(())),
                };
            }
            if !self.chunk.is_empty() || self.is_last {
                ready!(self.poll_chunk(cx)).map_err(Stopped::Peer)?;
                if self.is_last {
                    return Poll::Ready(Ok(()));
                }
            }
            if let Poll::Ready(stopped) = self.stream.poll_reset(cx) {
                let error = stopped.map_or_else(|error| error, h2::Error::from);
                return Poll::Ready(Err(Stopped::Peer(error)));
            }
            match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => {
                        self.is_last = self.body.is_end_stream();
                        self.chunk = data;
                    }
                    Err(frame) => {
                        let trailers = frame.into_trailers().unwrap_or_else(|_| HeaderMap::new());
                        return Poll::Ready(self.stream.send_trailers(trailers).map_err(Stopped::Peer));
                    }
                },
                Some(Err(error)) => self.broken = Some((error, Box::pin(sleep(LAST_WORDS)))),
                None => self.is_last = true,
            }
        }
    }

    fn poll_chunk(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), h2::Error>> {
        while !self.chunk.is_empty() {
            self.stream.reserve_capacity(self.chunk.len());
            let mut room = self.stream.capacity();
            if room == 0 {
                self.is_blocked = true;
                room = match ready!(self.stream.poll_capacity(cx)) {
                    Some(room) => room?,
                    // The stream has been closed by the peer.
                    None => return Poll::Ready(Err(Reason::CANCEL.into())),
                };
            }
            let part = self.chunk.split_to(room.min(self.chunk.len()));
            let is_last = self.is_last && self.chunk.is_empty();
            self.stream.send_data(part, is_last)?;
            if is_last {
                self.is_blocked = false;
                return Poll::Ready(Ok(()));
            }
        }
        self.is_blocked = false;
        match self.is_last {
            true => Poll::Ready(self.stream.send_data(Bytes::new(), true)),
            false => Poll::Ready(Ok(())),
        }
    }
}
