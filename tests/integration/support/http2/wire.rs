//! The upstream's socket, with an eye on the frames that pass.

use std::collections::HashMap;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::super::socket::Socket;
use super::frames::{Frame, PREFACE, kind, parse};
use super::upstream::Record;

/// A socket below the library.
pub(super) struct Wire {
    socket: Socket,
    connection: usize,
    record: Arc<Record>,
    incoming: Frames,
    outgoing: Frames,
    open: HashMap<u32, Sides>,
}

/// Which sides of a stream have ended.
#[derive(Default)]
struct Sides {
    client: bool,
    server: bool,
}

/// Bytes of one direction, cut into frames.
struct Frames {
    /// Of the preface.
    skip: usize,
    pending: Vec<u8>,
}

impl Frames {
    fn after(skip: usize) -> Self {
        Self { skip, pending: Vec::new() }
    }

    fn feed(&mut self, mut bytes: &[u8]) -> Vec<Frame> {
        let skipped = self.skip.min(bytes.len());
        self.skip -= skipped;
        bytes = &bytes[skipped..];
        self.pending.extend_from_slice(bytes);
        let mut frames = Vec::new();
        let mut rest = &self.pending[..];
        while let Some((start, behind)) = rest.split_first_chunk::<9>() {
            let (length, flags, stream) = parse(start);
            if behind.len() < length {
                break;
            }
            // Only small frames are ever asked for their content.
            let payload = behind[..length.min(64)].to_vec();
            frames.push(Frame { kind: start[3], flags, stream, payload });
            rest = &behind[length..];
        }
        self.pending = rest.to_vec();
        frames
    }
}

impl Wire {
    pub(super) fn new(socket: Socket, connection: usize, record: Arc<Record>) -> Self {
        let (incoming, outgoing) = (Frames::after(PREFACE.len()), Frames::after(0));
        Self { socket, connection, record, incoming, outgoing, open: HashMap::new() }
    }

    fn note(&mut self, frame: &Frame, is_from_client: bool) {
        match frame.kind {
            kind::HEADERS if is_from_client => {
                self.open.entry(frame.stream).or_default();
                self.record.streams_open(self.open.len());
            }
            kind::RST_STREAM => {
                if is_from_client {
                    self.record.was_reset(self.connection, frame.stream, frame.reason());
                }
                self.open.remove(&frame.stream);
            }
            kind::GOAWAY if is_from_client => self.record.said_goodbye(frame.reason()),
            _ => {}
        }
        if frame.ends_stream()
            && let Some(sides) = self.open.get_mut(&frame.stream)
        {
            let side = if is_from_client { &mut sides.client } else { &mut sides.server };
            *side = true;
            if sides.client && sides.server {
                self.open.remove(&frame.stream);
            }
        }
    }
}

impl AsyncRead for Wire {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.socket).poll_read(cx, buf))?;
        for frame in self.incoming.feed(&buf.filled()[before..]) {
            self.note(&frame, true);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Wire {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let taken = ready!(Pin::new(&mut self.socket).poll_write(cx, bytes))?;
        for frame in self.outgoing.feed(&bytes[..taken]) {
            self.note(&frame, false);
        }
        Poll::Ready(Ok(taken))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }
}
