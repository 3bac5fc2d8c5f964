//! A message body as it comes off a connection, of whichever version of HTTP.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use h2::RecvStream;
use http_body::{Body, Frame, SizeHint};

/// A body that is being received.
#[derive(Debug)]
pub enum IncomingBody {
    /// There is none.
    Empty,
    /// All here, and not passed on yet.
    Whole(Bytes),
    /// On an HTTP/1 connection.
    Http1(hyper::body::Incoming),
    /// On an HTTP/2 stream.
    Http2(StreamBody),
}

/// The body of one HTTP/2 stream. Dropping it before its end cancels the stream (RFC 9113 section 5.4.2).
#[derive(Debug)]
pub struct StreamBody {
    stream: RecvStream,
    /// From `Content-Length`; the library holds the peer to it.
    left: Option<u64>,
    is_data_over: bool,
    ask: Option<Ask>,
}

/// Tells the sender to go on.
struct Ask(Box<dyn FnOnce() + Send>);

impl std::fmt::Debug for Ask {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Ask")
    }
}

impl StreamBody {
    /// The body behind a head with these `headers`.
    pub fn new(stream: RecvStream, headers: &http::HeaderMap) -> Self {
        let left = headers
            .get(http::header::CONTENT_LENGTH)
            .and_then(|length| length.to_str().ok())
            .and_then(|length| length.parse().ok());
        Self { stream, left, is_data_over: false, ask: None }
    }

    /// The same body of a sender that waits for `100 Continue`: `ask` is called when the first byte is
    /// wanted, as the library does on an HTTP/1 connection.
    pub fn asked_for(self, ask: impl FnOnce() + Send + 'static) -> Self {
        Self { ask: Some(Ask(Box::new(ask))), ..self }
    }

    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, h2::Error>>> {
        if let Some(Ask(ask)) = self.ask.take() {
            ask();
        }
        while !self.is_data_over {
            match ready!(self.stream.poll_data(cx)) {
                Some(Ok(data)) => {
                    // The window opens again as bytes are taken, so a reader that stops stops its sender.
                    self.stream.flow_control().release_capacity(data.len())?;
                    if data.is_empty() && !self.stream.is_end_stream() {
                        continue;
                    }
                    self.left = self.left.map(|left| left.saturating_sub(data.len() as u64));
                    return Poll::Ready(Some(Ok(Frame::data(data))));
                }
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => self.is_data_over = true,
            }
        }
        let trailers = ready!(self.stream.poll_trailers(cx)?);
        Poll::Ready(trailers.map(|trailers| Ok(Frame::trailers(trailers))))
    }
}

impl Body for IncomingBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match &mut *self {
            Self::Empty => Poll::Ready(None),
            Self::Whole(bytes) => {
                let bytes = std::mem::take(bytes);
                Poll::Ready(Some(bytes).filter(|bytes| !bytes.is_empty()).map(|bytes| Ok(Frame::data(bytes))))
            }
            Self::Http1(body) => Pin::new(body).poll_frame(cx).map_err(BodyError::Http1),
            Self::Http2(body) => body.poll_frame(cx).map_err(BodyError::Http2),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Empty => true,
            Self::Whole(bytes) => bytes.is_empty(),
            Self::Http1(body) => body.is_end_stream(),
            Self::Http2(body) => body.stream.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Empty => SizeHint::with_exact(0),
            Self::Whole(bytes) => SizeHint::with_exact(bytes.len() as u64),
            Self::Http1(body) => body.size_hint(),
            Self::Http2(body) if body.stream.is_end_stream() => SizeHint::with_exact(0),
            Self::Http2(body) => body.left.map_or_else(SizeHint::default, SizeHint::with_exact),
        }
    }
}

/// A body that did not come whole.
#[derive(Debug, thiserror::Error)]
pub enum BodyError {
    /// What the HTTP/1 library says.
    #[error(transparent)]
    Http1(hyper::Error),
    /// What the HTTP/2 library says.
    #[error(transparent)]
    Http2(h2::Error),
}

impl BodyError {
    /// Whether bytes came that are no body, rather than none any more.
    pub fn is_framing(&self) -> bool {
        use std::io::{Error, ErrorKind};
        match self {
            Self::Http1(error) => std::error::Error::source(error)
                .and_then(|source| source.downcast_ref::<Error>())
                .is_some_and(|error| {
                    matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::InvalidData)
                }),
            Self::Http2(error) => error.is_library(),
        }
    }
}
