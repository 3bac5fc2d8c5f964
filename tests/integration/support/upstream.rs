//! A fake upstream on a real socket: the test decides what each request gets, and everything is recorded.
//!
//! Two ways to drive it. Step by step, where the test takes one [`Exchange`] after another and says what
//! happens on it:
//!
//! ```ignore
//! let mut upstream = Upstream::start().await;
//! let primary = upstream.next().await;
//! let hedge = upstream.next().await;
//! hedge.respond(200, &[], "won").await;
//! primary.gone().await; // the loser was dropped
//! ```
//!
//! And by a script, for tests about counts and load, where [`Upstream::answering`] replies by itself.
//!
//! Either way the record is half of the test: a proxy that cancels losers and refuses early is told from one that
//! does not by what its upstream saw.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;

use super::h1::{self, Framing, RequestHead};
use super::socket::Socket;
use super::{soon, within};

/// What decides the answers of an upstream that runs by itself.
type Script = Arc<dyn Fn(&Seen) -> Reply + Send + Sync>;

/// A fake upstream; dropping it closes its port and every connection.
pub struct Upstream {
    address: SocketAddr,
    record: Arc<Record>,
    exchanges: mpsc::UnboundedReceiver<Exchange>,
    accepting: JoinHandle<()>,
    connections: Arc<Mutex<JoinSet<()>>>,
}

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
struct Record {
    seen: Mutex<Vec<Seen>>,
    tally: watch::Sender<Tally>,
}

impl Record {
    fn arrived(&self, connection: usize, head: RequestHead) -> (usize, Seen) {
        let mut seen = self.seen.lock();
        let path = path_of(&head.target).to_owned();
        let nth = 1 + seen.iter().filter(|earlier| earlier.path() == path).count();
        let request = Seen { connection, nth, head, body: Vec::new(), at: Instant::now() };
        seen.push(request.clone());
        (seen.len() - 1, request)
    }
}

/// How an [`Upstream`] shall listen; made by [`Upstream::on`].
pub struct Setup {
    address: SocketAddr,
    tls: Option<TlsAcceptor>,
}

impl Setup {
    /// Speaks TLS with this certificate instead of plain HTTP.
    pub fn tls(self, acceptor: TlsAcceptor) -> Self {
        Self { tls: Some(acceptor), ..self }
    }

    /// On this port instead of a free one. For two upstreams that share a port on different addresses.
    pub fn port(mut self, port: u16) -> Self {
        self.address.set_port(port);
        self
    }

    /// Driven step by step with [`Upstream::next`].
    pub async fn start(self) -> Upstream {
        self.listen(None).await
    }

    /// Answers by itself.
    pub async fn answering(self, script: impl Fn(&Seen) -> Reply + Send + Sync + 'static) -> Upstream {
        self.listen(Some(Arc::new(script))).await
    }

    async fn listen(self, script: Option<Script>) -> Upstream {
        let listener = TcpListener::bind(self.address).await.expect("a loopback address can be bound");
        let address = listener.local_addr().expect("a bound listener has an address");
        let record = Arc::new(Record::default());
        let (sender, exchanges) = mpsc::unbounded_channel();
        let host = Arc::new(Host { record: Arc::clone(&record), tls: self.tls, script, exchanges: sender });
        let connections = Arc::new(Mutex::new(JoinSet::new()));
        let accepting = tokio::spawn(host.accept(listener, Arc::clone(&connections)));
        Upstream { address, record, exchanges, accepting, connections }
    }
}

impl Upstream {
    /// On 127.0.0.1, driven step by step.
    pub async fn start() -> Self {
        Self::on(Ipv4Addr::LOCALHOST).start().await
    }

    /// On 127.0.0.1, answering by itself.
    pub async fn answering(script: impl Fn(&Seen) -> Reply + Send + Sync + 'static) -> Self {
        Self::on(Ipv4Addr::LOCALHOST).answering(script).await
    }

    /// On a free port of this address: `127.0.0.2`, `::1`.
    pub fn on(ip: impl Into<IpAddr>) -> Setup {
        Setup { address: SocketAddr::new(ip.into(), 0), tls: None }
    }

    /// A loopback address where nobody listens and nobody will: connections are refused as long as the returned
    /// socket lives.
    pub fn dead() -> (SocketAddr, std::net::TcpStream) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("loopback can be bound");
        let listening = listener.local_addr().expect("a bound listener has an address");
        // A connected socket keeps its own port from being given out again, without listening on it.
        let held = std::net::TcpStream::connect(listening).expect("the listener's backlog takes one");
        (held.local_addr().expect("a connected socket has an address"), held)
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// An absolute URL of the given path here; `https` must be written by hand.
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// The next request, as soon as its head is complete.
    #[track_caller]
    pub fn next(&mut self) -> impl Future<Output = Exchange> {
        let exchange = soon(self.exchanges.recv());
        async { exchange.await.expect("the upstream's accept loop runs as long as the upstream lives") }
    }

    /// A request that is already waiting to be taken, if there is one. To assert that none came, first wait for
    /// something that would come later.
    pub fn waiting(&mut self) -> Option<Exchange> {
        self.exchanges.try_recv().ok()
    }

    /// Waits until the numbers are as wanted, and returns them.
    #[track_caller]
    pub fn until(&self, wanted: impl Fn(&Tally) -> bool) -> impl Future<Output = Tally> {
        let mut tally = self.record.tally.subscribe();
        soon(async move { tally.wait_for(wanted).await.expect("the record outlives the wait").clone() })
    }

    /// The numbers now.
    pub fn tally(&self) -> Tally {
        self.record.tally.borrow().clone()
    }

    /// Requests so far.
    pub fn count(&self) -> usize {
        self.tally().requests
    }

    /// Requests for this path so far, whatever their query.
    pub fn count_of(&self, path: &str) -> usize {
        self.requests().iter().filter(|seen| seen.path() == path).count()
    }

    /// Connections ever accepted.
    pub fn connections(&self) -> usize {
        self.tally().connections
    }

    /// Connections open now.
    pub fn open_connections(&self) -> usize {
        self.tally().open
    }

    /// Requests whose peer left before the answer's end.
    pub fn aborted(&self) -> usize {
        self.tally().aborted
    }

    /// The most requests that were ever unanswered at once.
    pub fn max_in_flight(&self) -> usize {
        self.tally().max_in_flight
    }

    /// Everything that arrived, in order.
    pub fn requests(&self) -> Vec<Seen> {
        self.record.seen.lock().clone()
    }

    /// Stops listening; open connections live on. Later connections are refused.
    pub async fn stop_listening(&mut self) {
        self.accepting.abort();
        let _ = (&mut self.accepting).await;
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        self.accepting.abort();
        self.connections.lock().abort_all();
    }
}

/// What the accept loop and the connections share.
struct Host {
    record: Arc<Record>,
    tls: Option<TlsAcceptor>,
    script: Option<Script>,
    exchanges: mpsc::UnboundedSender<Exchange>,
}

impl Host {
    async fn accept(self: Arc<Self>, listener: TcpListener, connections: Arc<Mutex<JoinSet<()>>>) {
        loop {
            let Ok((tcp, _)) = listener.accept().await else { continue };
            self.record.tally.send_modify(|tally| {
                tally.connections += 1;
                tally.open += 1;
            });
            let open = Open(Arc::clone(&self.record));
            let number = self.record.tally.borrow().connections;
            connections.lock().spawn(Arc::clone(&self).serve(tcp, open, number));
        }
    }

    async fn serve(self: Arc<Self>, tcp: TcpStream, open: Open, number: usize) {
        let _ = tcp.set_nodelay(true);
        let socket = match &self.tls {
            None => Socket::Plain(tcp),
            Some(acceptor) => match acceptor.accept(tcp).await {
                Ok(tls) => Socket::Tls(Box::new(tls.into())),
                Err(_) => return self.record.tally.send_modify(|tally| tally.handshakes_failed += 1),
            },
        };
        let mut connection = Connection { stream: BufReader::new(socket), _open: open };
        while let Some(request) = connection.read_request(&self.record, number).await {
            let (give_back, next) = oneshot::channel();
            let exchange = request.on(connection, give_back);
            match &self.script {
                None => self.exchanges.send(exchange).unwrap_or_default(),
                Some(script) => play(exchange, script).await,
            }
            match next.await {
                Ok(used) => connection = used,
                Err(_) => return,
            }
        }
    }
}

/// Counts a connection as open while it lives.
struct Open(Arc<Record>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.tally.send_modify(|tally| tally.open -= 1);
    }
}

/// Counts a request as in flight while it lives.
struct InFlight {
    record: Arc<Record>,
    index: usize,
    aborted: bool,
}

impl InFlight {
    fn begin(record: &Arc<Record>, index: usize) -> Self {
        record.tally.send_modify(|tally| {
            tally.requests += 1;
            tally.in_flight += 1;
            tally.max_in_flight = tally.max_in_flight.max(tally.in_flight);
        });
        Self { record: Arc::clone(record), index, aborted: false }
    }

    fn abort(&mut self) {
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

/// An accepted connection with what was read ahead.
struct Connection {
    stream: BufReader<Socket>,
    _open: Open,
}

/// A request whose head was read, not yet tied to its connection.
struct Arrival {
    seen: Seen,
    framing: Framing,
    flight: InFlight,
}

impl Arrival {
    fn on(self, connection: Connection, give_back: oneshot::Sender<Connection>) -> Exchange {
        let Self { seen, framing, flight } = self;
        Exchange { seen, unread: framing, flight, connection, give_back }
    }
}

impl Connection {
    /// The next request; `None` when the peer is done. What is no HTTP is answered with 400, so that a proxy
    /// that garbles requests fails loudly.
    async fn read_request(&mut self, record: &Arc<Record>, number: usize) -> Option<Arrival> {
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
    seen: Seen,
    unread: Framing,
    flight: InFlight,
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
    async fn peer_left(&mut self) -> Instant {
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

fn head(status: u16, headers: &[(&str, &str)], length: Option<usize>) -> Vec<u8> {
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

/// What a scripted upstream does with a request.
#[derive(Debug, Clone)]
pub struct Reply {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
    delay: Duration,
    manner: Manner,
}

#[derive(Debug, Clone, Copy)]
enum Manner {
    Whole,
    Drip { pieces: usize, pause: Duration },
    Cut { after: usize },
    Hang,
    Reset,
    Close,
}

impl Reply {
    /// 200 with this body.
    pub fn ok(body: impl Into<Vec<u8>>) -> Self {
        Self { body: body.into(), ..Self::status(200) }
    }

    /// This status without a body.
    pub fn status(status: u16) -> Self {
        let (headers, body, delay) = (Vec::new(), Vec::new(), Duration::ZERO);
        Self { status, headers, body, delay, manner: Manner::Whole }
    }

    /// Never answers.
    pub fn hang() -> Self {
        Self { manner: Manner::Hang, ..Self::status(200) }
    }

    /// RST instead of an answer.
    pub fn reset() -> Self {
        Self { manner: Manner::Reset, ..Self::status(200) }
    }

    /// FIN instead of an answer.
    pub fn close() -> Self {
        Self { manner: Manner::Close, ..Self::status(200) }
    }

    /// One more field.
    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    /// This body.
    pub fn body(self, body: impl Into<Vec<u8>>) -> Self {
        Self { body: body.into(), ..self }
    }

    /// Nothing happens for so long first.
    pub fn after(self, delay: Duration) -> Self {
        Self { delay, ..self }
    }

    /// The body in so many chunks, with a pause before each.
    pub fn drip(self, pieces: usize, pause: Duration) -> Self {
        Self { manner: Manner::Drip { pieces, pause }, ..self }
    }

    /// Promises the whole body and closes after so many bytes of it.
    pub fn cut(self, after: usize) -> Self {
        Self { manner: Manner::Cut { after }, ..self }
    }

    fn lines(&self) -> Vec<(&str, &str)> {
        self.headers.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect()
    }
}

/// A script that goes through these statuses for each path; the last one stays.
pub fn statuses(sequence: &'static [u16]) -> impl Fn(&Seen) -> Reply + Send + Sync + 'static {
    move |seen| {
        let status = sequence.get(seen.nth - 1).or(sequence.last()).expect("a sequence has a status");
        Reply::status(*status).body(status.to_string())
    }
}

/// A script that has a reply for each path, and 404 for others.
pub fn by_path(replies: &[(&str, Reply)]) -> impl Fn(&Seen) -> Reply + Send + Sync + 'static {
    let replies: HashMap<_, _> =
        replies.iter().map(|(path, reply)| ((*path).to_owned(), reply.clone())).collect();
    move |seen| replies.get(seen.path()).cloned().unwrap_or_else(|| Reply::status(404))
}

/// Plays a reply on an exchange, unless the peer leaves first.
async fn play(mut exchange: Exchange, script: &Script) {
    match exchange.try_body().await {
        Ok(body) if body.complete => {}
        _ => return exchange.flight.abort(),
    }
    let reply = script(&exchange.seen);
    tokio::select! {
        () = tokio::time::sleep(reply.delay) => {}
        _ = exchange.peer_left() => return,
    }
    match reply.manner {
        Manner::Whole => exchange.respond(reply.status, &reply.lines(), &reply.body).await,
        Manner::Drip { pieces, pause } => drip(exchange, &reply, pieces, pause).await,
        Manner::Cut { after } => {
            exchange.raw(&head(reply.status, &reply.lines(), Some(reply.body.len()))).await;
            exchange.raw(&reply.body[..after]).await;
            exchange.close().await;
        }
        Manner::Hang => drop(exchange.peer_left().await),
        Manner::Reset => exchange.reset(),
        Manner::Close => exchange.close().await,
    }
}

async fn drip(mut exchange: Exchange, reply: &Reply, pieces: usize, pause: Duration) {
    exchange.start_chunks(reply.status, &reply.lines()).await;
    for piece in reply.body.chunks(reply.body.len().div_ceil(pieces).max(1)) {
        tokio::select! {
            () = tokio::time::sleep(pause) => exchange.chunk(piece).await,
            _ = exchange.peer_left() => return,
        }
    }
    exchange.end().await;
}

/// Waits a bounded while for a number to settle where a test says that nothing more may come.
///
/// There is no event for "nothing happens". This one waits `quiet` and then compares, so it can only miss a
/// violation, never invent one.
pub async fn stays(upstream: &Upstream, quiet: Duration, requests: usize) {
    let mut tally = upstream.record.tally.subscribe();
    let more = tokio::time::timeout(quiet, tally.wait_for(|tally| tally.requests > requests)).await;
    assert!(more.is_err(), "more than {requests} requests arrived: {:?}", upstream.tally());
    assert_eq!(upstream.count(), requests);
}

/// [`Upstream::until`] with a limit of its own, for promises such as "cancelled within 10 ms".
#[track_caller]
pub fn until_within(
    upstream: &Upstream,
    limit: Duration,
    wanted: impl Fn(&Tally) -> bool,
) -> impl Future<Output = Tally> {
    let mut tally = upstream.record.tally.subscribe();
    within(limit, async move { tally.wait_for(wanted).await.expect("the record outlives the wait").clone() })
}
