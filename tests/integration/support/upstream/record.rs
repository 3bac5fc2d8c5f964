//! What an upstream saw: every request, and the numbers that a test may wait for.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_rustls::rustls::{HandshakeKind, ServerConnection};

use super::super::h1::RequestHead;

/// One request as it arrived.
#[derive(Debug, Clone)]
pub struct Seen {
    /// Which connection carried it, counted from 1.
    pub connection: usize,
    /// Which request with this path it is (the query aside), counted from 1.
    pub nth: usize,
    /// The first line and fields.
    pub head: RequestHead,
    /// The body, once it was read.
    pub body: Vec<u8>,
    /// When its head was complete.
    pub at: Instant,
}

impl Seen {
    /// The target's path: no authority, no query.
    pub fn path(&self) -> &str {
        path_of(&self.head.target)
    }

    /// The value of the only field of this name.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.headers.get(name)
    }
}

/// The path of an origin-form or absolute-form target.
fn path_of(target: &str) -> &str {
    let after_scheme = target.split_once("://").map_or(target, |(_, rest)| rest);
    let path = after_scheme.find('/').map_or(after_scheme, |slash| &after_scheme[slash..]);
    path.split('?').next().expect("a split has a first part")
}

/// How a connection's TLS began.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Handshake {
    /// SNI.
    pub server_name: Option<String>,
    /// What ALPN agreed on.
    pub protocol: Option<String>,
    /// Whether an earlier session was taken up.
    pub is_resumed: bool,
    /// The client's certificate, DER.
    pub client_certificate: Option<Vec<u8>>,
}

impl Handshake {
    pub(super) fn of(server: &ServerConnection) -> Self {
        let text = |protocol: &[u8]| String::from_utf8_lossy(protocol).into_owned();
        Self {
            server_name: server.server_name().map(str::to_owned),
            protocol: server.alpn_protocol().map(text),
            is_resumed: server.handshake_kind() == Some(HandshakeKind::Resumed),
            client_certificate: server.peer_certificates().map(|chain| chain[0].to_vec()),
        }
    }
}

/// The numbers a test may wait for.
#[derive(Debug, Clone, Default)]
pub struct Tally {
    /// Requests whose head arrived.
    pub requests: usize,
    /// Connections ever accepted.
    pub connections: usize,
    /// Connections open now.
    pub open: usize,
    /// Requests not yet answered to the end.
    pub in_flight: usize,
    /// The most there ever were of them.
    pub max_in_flight: usize,
    /// Requests whose peer left before the answer's end.
    pub aborted: usize,
    /// Connections that did not get through the TLS handshake.
    pub handshakes_failed: usize,
}

#[derive(Default)]
pub(super) struct Record {
    pub(super) seen: Mutex<Vec<Seen>>,
    pub(super) handshakes: Mutex<Vec<Handshake>>,
    pub(super) tally: watch::Sender<Tally>,
}

impl Record {
    /// Keeps the request; its place in the list.
    pub(super) fn arrived(&self, connection: usize, head: RequestHead) -> (usize, Seen) {
        let mut seen = self.seen.lock();
        let path = path_of(&head.target).to_owned();
        let nth = 1 + seen.iter().filter(|earlier| earlier.path() == path).count();
        let request = Seen { connection, nth, head, body: Vec::new(), at: Instant::now() };
        seen.push(request.clone());
        (seen.len() - 1, request)
    }
}

/// Counts a connection as open while it lives.
pub(super) struct Open(pub(super) Arc<Record>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.tally.send_modify(|tally| tally.open -= 1);
    }
}

/// Counts a request as in flight while it lives.
pub(super) struct InFlight {
    pub(super) record: Arc<Record>,
    pub(super) index: usize,
    aborted: bool,
}

impl InFlight {
    pub(super) fn begin(record: &Arc<Record>, index: usize) -> Self {
        record.tally.send_modify(|tally| {
            tally.requests += 1;
            tally.in_flight += 1;
            tally.max_in_flight = tally.max_in_flight.max(tally.in_flight);
        });
        Self { record: Arc::clone(record), index, aborted: false }
    }

    /// Counts once, however often it is noticed.
    pub(super) fn abort(&mut self) {
        if !std::mem::replace(&mut self.aborted, true) {
            self.record.tally.send_modify(|tally| tally.aborted += 1);
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.record.tally.send_modify(|tally| tally.in_flight -= 1);
    }
}
