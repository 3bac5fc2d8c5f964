//! Frames as bytes (RFC 9113 section 4.1), written and read without a library, for peers that break the rules.

use std::io;

use tokio::io::AsyncReadExt;

use super::super::client::Agent;
use super::super::soon;

/// What a client says first (RFC 9113 section 3.4).
pub const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// The kinds of frames (RFC 9113 section 6).
pub mod kind {
    pub const DATA: u8 = 0;
    pub const HEADERS: u8 = 1;
    pub const RST_STREAM: u8 = 3;
    pub const SETTINGS: u8 = 4;
    pub const PING: u8 = 6;
    pub const GOAWAY: u8 = 7;
    pub const WINDOW_UPDATE: u8 = 8;
    pub const CONTINUATION: u8 = 9;
}

/// END_STREAM; on SETTINGS and PING the same bit is ACK.
pub const END_STREAM: u8 = 0x1;
/// ACK of SETTINGS and PING.
pub const ACK: u8 = 0x1;
/// END_HEADERS.
pub const END_HEADERS: u8 = 0x4;

/// SETTINGS_MAX_CONCURRENT_STREAMS.
pub const MAX_CONCURRENT_STREAMS: u16 = 3;
/// SETTINGS_INITIAL_WINDOW_SIZE.
pub const INITIAL_WINDOW_SIZE: u16 = 4;

/// `:status: 200` from the static table (RFC 7541 appendix A).
pub const STATUS_200: &[u8] = &[0x88];

/// One frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// Of [`kind`].
    pub kind: u8,
    /// Whatever the kind makes of them.
    pub flags: u8,
    /// 0 for the connection.
    pub stream: u32,
    /// What follows the nine bytes.
    pub payload: Vec<u8>,
}

impl Frame {
    /// A frame whose length is right.
    pub fn new(kind: u8, flags: u8, stream: u32, payload: impl Into<Vec<u8>>) -> Self {
        Self { kind, flags, stream, payload: payload.into() }
    }

    /// GOAWAY: streams above `last` were not looked at.
    pub fn go_away(last: u32, reason: h2::Reason) -> Self {
        let payload = [last.to_be_bytes(), u32::from(reason).to_be_bytes()].concat();
        Self::new(kind::GOAWAY, 0, 0, payload)
    }

    /// RST_STREAM.
    pub fn reset(stream: u32, reason: h2::Reason) -> Self {
        Self::new(kind::RST_STREAM, 0, stream, u32::from(reason).to_be_bytes())
    }

    /// SETTINGS.
    pub fn settings(settings: &[(u16, u32)]) -> Self {
        let pair = |(id, value): &(u16, u32)| [&id.to_be_bytes()[..], &value.to_be_bytes()].concat();
        Self::new(kind::SETTINGS, 0, 0, settings.iter().flat_map(pair).collect::<Vec<_>>())
    }

    /// HEADERS that hold all of a head.
    pub fn headers(stream: u32, block: impl Into<Vec<u8>>, ends: bool) -> Self {
        let flags = END_HEADERS | if ends { END_STREAM } else { 0 };
        Self::new(kind::HEADERS, flags, stream, block)
    }

    /// The bytes on the wire.
    pub fn encode(&self) -> Vec<u8> {
        let length = u32::try_from(self.payload.len()).expect("a payload is small").to_be_bytes();
        let start = [&length[1..], &[self.kind, self.flags], &self.stream.to_be_bytes()].concat();
        [&start, &self.payload[..]].concat()
    }

    /// The whole frames that these bytes begin with.
    pub fn all_in(mut bytes: &[u8]) -> Vec<Self> {
        let mut frames = Vec::new();
        while let Some((start, behind)) = bytes.split_first_chunk::<9>() {
            let (length, flags, stream) = parse(start);
            let Some((payload, rest)) = behind.split_at_checked(length) else { break };
            frames.push(Self::new(start[3], flags, stream, payload));
            bytes = rest;
        }
        frames
    }

    /// The reason of a RST_STREAM or a GOAWAY.
    pub fn reason(&self) -> h2::Reason {
        let at = if self.kind == kind::GOAWAY { 4 } else { 0 };
        let code = self.payload[at..at + 4].try_into().expect("four bytes");
        u32::from_be_bytes(code).into()
    }

    /// Whether the sender's side of the stream ends here.
    pub fn ends_stream(&self) -> bool {
        matches!(self.kind, kind::DATA | kind::HEADERS) && self.flags & END_STREAM != 0
    }
}

/// The head of a GET without a table (RFC 7541 section 6.2.2): literal, not indexed, not compressed.
pub fn get(authority: &str, path: &str) -> Vec<u8> {
    let mut block = vec![0x82, 0x86];
    block.extend(literal(":authority", authority));
    block.extend(literal(":path", path));
    block
}

/// One field as a literal. Neither part is longer than 126 bytes.
pub fn literal(name: &str, value: &str) -> Vec<u8> {
    let text = |text: &str| {
        let length = u8::try_from(text.len()).ok().filter(|length| *length < 127).expect("a short text");
        [&[length], text.as_bytes()].concat()
    };
    [vec![0], text(name), text(value)].concat()
}

/// One end of a connection, spoken frame by frame.
pub struct FramePeer(pub Agent);

impl FramePeer {
    /// The client's end, with its preface and empty settings sent.
    pub async fn client(mut agent: Agent) -> Self {
        agent.send([PREFACE, &Frame::settings(&[]).encode()].concat()).await;
        Self(agent)
    }

    /// The server's end: has read the preface and says these settings.
    pub async fn server(mut agent: Agent, settings: &[(u16, u32)]) -> Self {
        agent.expect(PREFACE).await;
        agent.send(Frame::settings(settings).encode()).await;
        Self(agent)
    }

    /// Sends a frame.
    pub async fn send(&mut self, frame: Frame) {
        self.0.send(frame.encode()).await;
    }

    /// The next frame, settings and pings answered; `None` at the connection's end, of whichever kind.
    pub async fn try_next(&mut self) -> Option<Frame> {
        let frame = self.read().await.ok()?;
        if matches!(frame.kind, kind::SETTINGS | kind::PING) && frame.flags & ACK == 0 {
            let echo = if frame.kind == kind::PING { frame.payload.clone() } else { Vec::new() };
            self.send(Frame::new(frame.kind, ACK, 0, echo)).await;
        }
        Some(frame)
    }

    /// The next frame of this kind. Panics when the connection ends first.
    #[track_caller]
    pub fn next(&mut self, kind: u8) -> impl Future<Output = Frame> {
        soon(async move {
            loop {
                let frame = self.try_next().await;
                let frame = frame.unwrap_or_else(|| panic!("the connection ended before a frame {kind}"));
                if frame.kind == kind {
                    return frame;
                }
            }
        })
    }

    /// All frames up to the connection's end.
    #[track_caller]
    pub fn rest(&mut self) -> impl Future<Output = Vec<Frame>> {
        soon(async move {
            let mut frames = Vec::new();
            while let Some(frame) = self.try_next().await {
                frames.push(frame);
            }
            frames
        })
    }

    async fn read(&mut self) -> io::Result<Frame> {
        let mut start = [0; 9];
        self.0.stream.read_exact(&mut start).await?;
        let (length, flags, stream) = parse(&start);
        let mut payload = vec![0; length];
        self.0.stream.read_exact(&mut payload).await?;
        Ok(Frame { kind: start[3], flags, stream, payload })
    }
}

/// Length, flags and stream of a frame's first nine bytes.
pub(super) fn parse(start: &[u8; 9]) -> (usize, u8, u32) {
    let [a, b, c, _, flags, e, f, g, h] = *start;
    let length = u32::from_be_bytes([0, a, b, c]);
    (length as usize, flags, u32::from_be_bytes([e, f, g, h]) & 0x7fff_ffff)
}
