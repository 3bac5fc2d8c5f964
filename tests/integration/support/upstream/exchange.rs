//! One request in the test's hands, and the connection it came on.

use std::io;
use std::sync::{Arc, LazyLock};

use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::super::h1::{self, Framing};
use super::super::socket::Socket;
use super::super::soon;
use super::record::{InFlight, Open, Record, Seen};

/// An accepted connection with what was read ahead.
pub(super) struct Connection {
    pub(super) stream: BufReader<Socket>,
    pub(super) _open: Open,
}

/// A request whose head was read, not yet tied to its connection.
pub(super) struct Arrival {
    seen: Seen,
    framing: Framing,
    flight: InFlight,
}

impl Arrival {
    pub(super) fn on(self, connection: Connection, give_back: oneshot::Sender<Connection>) -> Exchange {
        let Self { seen, framing, flight } = self;
        Exchange { seen, unread: framing, flight, connection, give_back }
    }
}

impl Connection {
    /// The next request; `None` when the peer is done. What is no HTTP is answered with 400, so that a proxy
    /// that garbles requests fails loudly.
    pub(super) async fn read_request(&mut self, record: &Arc<Record>, number: usize) -> Option<Arrival> {
        let raw = match h1::read_head(&mut self.stream).await {
            Ok(Some(raw)) => raw,
            Ok(None) => return None,
            Err(error) => return self.refuse(error).await,
        };
        let parsed = h1::parse_request(raw).and_then(|head| Ok((head.framing()?, head)));
        match parsed {
            Ok((framing, head)) => {
                let (index, seen) = record.arrived(number, head);
                Some(Arrival { seen, framing, flight: InFlight::begin(record, index) })
            }
            Err(error) => self.refuse(error).await,
        }
    }

    async fn refuse(&mut self, error: io::Error) -> Option<Arrival> {
        let why = error.to_string();
        let answer = format!(
            "HTTP/1.1 400 Not HTTP\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{why}",
            why.len()
        );
        let _ = self.stream.write_all(answer.as_bytes()).await;
        let _ = self.stream.shutdown().await;
        None
    }
}

/// One request and the connection it came on, in the test's hands.
///
/// Dropping it closes the connection. Writing to a peer that has left is not an error, since whether the kernel
/// still takes the bytes is chance: it counts as aborted, and [`Self::gone`] waits for it.
pub struct Exchange {
    pub(super) seen: Seen,
    unread: Framing,
    pub(super) flight: InFlight,
    connection: Connection,
    give_back: oneshot::Sender<Connection>,
}

impl std::ops::Deref for Exchange {
    type Target = Seen;

    fn deref(&self) -> &Seen {
        &self.seen
    }
}

impl Exchange {
    /// The request's body. Panics when it is cut or badly framed; [`Self::try_body`] is for those.
    #[track_caller]
    pub fn body(&mut self) -> impl Future<Output = Vec<u8>> {
        let body = soon(self.try_body());
        async {
            let body = body.await.expect("the request's body is well framed");
            assert!(body.complete, "the request's body was cut after {} bytes", body.bytes.len());
            body.bytes
        }
    }

    /// The request's body as far as it comes.
    pub async fn try_body(&mut self) -> io::Result<h1::Body> {
        let framing = std::mem::replace(&mut self.unread, Framing::Empty);
        let body = h1::read_body(&mut self.connection.stream, framing).await?;
        if framing != Framing::Empty {
            self.seen.body.clone_from(&body.bytes);
            self.flight.record.seen.lock()[self.flight.index].body.clone_from(&body.bytes);
        }
        Ok(body)
    }

    /// The next chunk of a chunked body; empty for the last, with its trailer section.
    pub async fn next_chunk(&mut self) -> Vec<u8> {
        let stream = &mut self.connection.stream;
        let chunk = soon(h1::read_chunk(stream)).await.expect("a well-formed chunk").expect("another chunk");
        if chunk.is_empty() {
            soon(h1::read_head(stream)).await.expect("a trailer section");
            self.unread = Framing::Empty;
        }
        chunk
    }

    /// Reads a body of a known length and throws it away: how many bytes came, and whether each was
    /// [`pattern`]'s.
    pub async fn count_body(&mut self) -> (u64, bool) {
        let Framing::Length(length) = std::mem::replace(&mut self.unread, Framing::Empty) else {
            panic!("a body without a length")
        };
        let mut body = (&mut self.connection.stream).take(length);
        let (mut space, mut count, mut is_right) = (vec![0; 64 << 10], 0, true);
        while let Ok(read @ 1..) = soon(body.read(&mut space)).await {
            is_right &= is_pattern(&space[..read], count);
            count += read as u64;
        }
        (count, is_right)
    }

    /// A whole answer with a `Content-Length`; the connection stays open for the next request.
    pub async fn respond(mut self, status: u16, headers: &[(&str, &str)], body: impl AsRef<[u8]>) {
        let body = body.as_ref();
        let mut message = head(status, headers, Some(body.len()));
        if self.seen.head.method != "HEAD" {
            message.extend_from_slice(body);
        }
        self.raw(&message).await;
        self.finish().await;
    }

    /// An answer's head, framed by exactly these fields.
    pub async fn head_only(&mut self, status: u16, headers: &[(&str, &str)]) {
        self.raw(&head(status, headers, None)).await;
    }

    /// Takes the WebSocket that is asked for, with these fields beside those of the handshake.
    pub async fn accept_web_socket(&mut self, headers: &[(&str, &str)]) {
        let accept = self.web_socket_accept();
        let own = [("Connection", "Upgrade"), ("Upgrade", "websocket"), ("Sec-WebSocket-Accept", &*accept)];
        self.head_only(101, &[&own, headers].concat()).await;
    }

    /// The proof that the request's key was read (RFC 6455 section 4.2.2).
    pub fn web_socket_accept(&self) -> String {
        let key = self.header("sec-websocket-key").expect("a WebSocket's handshake has a key");
        let text = format!("{key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11");
        let digest = ring::digest::digest(&ring::digest::SHA1_FOR_LEGACY_USE_ONLY, text.as_bytes());
        // Twenty bytes are one line of base64.
        let lines = pem::encode(&pem::Pem::new("SHA1", digest.as_ref()));
        lines.lines().nth(1).expect("a line between begin and end").to_owned()
    }

    /// An answer's head that announces chunks.
    pub async fn start_chunks(&mut self, status: u16, headers: &[(&str, &str)]) {
        let mut all = headers.to_vec();
        all.push(("Transfer-Encoding", "chunked"));
        self.head_only(status, &all).await;
    }

    /// One chunk of the body.
    pub async fn chunk(&mut self, bytes: impl AsRef<[u8]>) {
        let bytes = bytes.as_ref();
        self.raw(&[format!("{:x}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat()).await;
    }

    /// The last chunk; the connection stays open for the next request.
    pub async fn end(mut self) {
        self.raw(b"0\r\n\r\n").await;
        self.finish().await;
    }

    /// Bytes as they are.
    pub async fn raw(&mut self, bytes: &[u8]) {
        let stream = &mut self.connection.stream;
        let sent = async {
            stream.write_all(bytes).await?;
            stream.flush().await
        };
        if sent.await.is_err() {
            self.flight.abort();
        }
    }

    /// The answer is complete as written; the connection waits for its next request.
    pub async fn finish(mut self) {
        if self.unread != Framing::Empty && self.try_body().await.is_err() {
            return;
        }
        // The answer was written to the end, so what follows is no longer this request's.
        drop(self.flight);
        let _ = self.give_back.send(self.connection);
    }

    /// Says nothing more and keeps the connection open until the peer leaves. Counted as aborted when it does.
    pub fn hold(self) {
        tokio::spawn(self.leave());
    }

    /// RST.
    pub fn reset(self) {
        self.connection.stream.into_inner().reset();
    }

    /// FIN, after whatever was written.
    pub async fn close(mut self) {
        let _ = self.connection.stream.shutdown().await;
    }

    /// Waits until the peer has closed or reset the connection, and says when that was seen.
    #[track_caller]
    pub fn gone(self) -> impl Future<Output = Instant> {
        soon(self.leave())
    }

    async fn leave(mut self) -> Instant {
        self.peer_left().await
    }

    /// Cancel safe: what is read meanwhile is request body that nobody wanted.
    pub(super) async fn peer_left(&mut self) -> Instant {
        let mut rest = [0; 4096];
        while matches!(self.connection.stream.read(&mut rest).await, Ok(1..)) {}
        self.flight.abort();
        Instant::now()
    }

    /// The connection itself, after an answer that made it a tunnel (101, or 200 to CONNECT).
    pub fn tunnel(self) -> Tunnel {
        let Self { connection, flight, .. } = self;
        Tunnel { connection, _flight: flight }
    }
}

pub(super) fn head(status: u16, headers: &[(&str, &str)], length: Option<usize>) -> Vec<u8> {
    let mut head = format!("HTTP/1.1 {status} {}\r\n", reason(status));
    for (name, value) in headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    match length {
        Some(length) if !matches!(status, 100..200 | 204 | 304) => {
            head.push_str(&format!("Content-Length: {length}\r\n"));
        }
        _ => {}
    }
    head.push_str("\r\n");
    head.into_bytes()
}

fn reason(status: u16) -> &'static str {
    http::StatusCode::from_u16(status).ok().and_then(|status| status.canonical_reason()).unwrap_or("Unnamed")
}

/// A connection that carries bytes of another protocol; counted as in flight until it is dropped.
pub struct Tunnel {
    connection: Connection,
    _flight: InFlight,
}

impl Tunnel {
    /// Writes the bytes.
    pub async fn send(&mut self, bytes: &[u8]) {
        self.connection.stream.write_all(bytes).await.expect("the tunnel takes bytes");
        self.connection.stream.flush().await.expect("the tunnel takes bytes");
    }

    /// Waits for exactly these bytes.
    pub async fn expect(&mut self, bytes: &[u8]) {
        let mut arrived = vec![0; bytes.len()];
        soon(self.connection.stream.read_exact(&mut arrived)).await.expect("the tunnel carries bytes");
        assert_eq!(String::from_utf8_lossy(&arrived), String::from_utf8_lossy(bytes));
    }

    /// FIN in this direction; the other stays open.
    pub async fn half_close(&mut self) {
        let _ = self.connection.stream.shutdown().await;
    }

    /// Waits for the peer's FIN (`Ok`, with what came before it) or RST.
    pub async fn rest(&mut self) -> io::Result<Vec<u8>> {
        let mut rest = Vec::new();
        soon(self.connection.stream.read_to_end(&mut rest)).await.map(|_| rest)
    }
}

/// So many bytes of a body that tells lost, doubled and swapped ones, from this place on.
pub fn pattern(from: u64, count: usize) -> Vec<u8> {
    (from..from + count as u64).map(|at| (at % PERIOD) as u8).collect()
}

/// Whether these are the bytes of [`pattern`] at this place.
pub fn is_pattern(bytes: &[u8], from: u64) -> bool {
    // By large slices: byte by byte takes longer than all else in a debug build.
    static PATTERN: LazyLock<Vec<u8>> = LazyLock::new(|| pattern(0, PERIOD as usize * 512));
    let mut at = (from % PERIOD) as usize;
    bytes.chunks(PERIOD as usize * 256).all(|part| {
        let is_right = part == &PATTERN[at..at + part.len()];
        at = (at + part.len()) % PERIOD as usize;
        is_right
    })
}

/// Prime to all powers of two.
const PERIOD: u64 = 251;
