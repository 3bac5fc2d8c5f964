//! An upstream that speaks HTTP/2: over TLS where ALPN agrees on it, or at once (prior knowledge).
//!
//! Driven stream by stream with [`Http2Upstream::next`], or by itself with [`Setup::serving`].

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use h2::server::{Builder, SendResponse};
use h2::{Reason, RecvStream, SendStream};
use http::{HeaderMap, Request, Response, request};
use parking_lot::Mutex;
use socket2::SockRef;
use tokio::io::BufReader;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;

use super::super::client::Agent;
use super::super::socket::Socket;
use super::super::soon;
use super::agent::End;
use super::wire::Wire;
use super::{PATIENT, fields, piece};

/// A fake upstream; dropping it closes its port and every connection.
pub struct Http2Upstream {
    address: SocketAddr,
    record: Arc<Record>,
    streams: mpsc::UnboundedReceiver<Stream>,
    others: mpsc::UnboundedReceiver<Agent>,
    accepting: JoinHandle<()>,
    connections: Arc<Mutex<JoinSet<()>>>,
}

/// How it shall listen and what it says in its settings.
pub struct Setup {
    address: SocketAddr,
    tls: Option<TlsAcceptor>,
    builder: Builder,
}

/// One request as it arrived.
#[derive(Debug, Clone)]
pub struct Seen {
    /// Which connection carried it, counted from 1.
    pub connection: usize,
    /// `:method`.
    pub method: http::Method,
    /// `:scheme`, `:authority` and `:path`.
    pub uri: http::Uri,
    /// The fields.
    pub headers: HeaderMap,
}

/// The numbers a test may wait for.
#[derive(Debug, Clone, Default)]
pub struct Tally {
    /// Requests that the library handed over.
    pub requests: usize,
    /// Connections ever accepted.
    pub connections: usize,
    /// Connections open now.
    pub open: usize,
    /// The most streams that were open on one connection at once, as the frames say.
    pub max_streams: usize,
    /// RST_STREAM frames of the peer.
    pub resets: Vec<Reset>,
    /// GOAWAY frames of the peer.
    pub goodbyes: Vec<Reason>,
}

/// A RST_STREAM that came.
#[derive(Debug, Clone, Copy)]
pub struct Reset {
    /// On which connection, counted from 1.
    pub connection: usize,
    /// Of which stream.
    pub stream: u32,
    /// Why.
    pub reason: Reason,
    /// When it was read.
    pub at: Instant,
}

#[derive(Default)]
pub(super) struct Record {
    seen: Mutex<Vec<Seen>>,
    tally: watch::Sender<Tally>,
}

impl Record {
    pub(super) fn streams_open(&self, count: usize) {
        self.tally.send_modify(|tally| tally.max_streams = tally.max_streams.max(count));
    }

    pub(super) fn was_reset(&self, connection: usize, stream: u32, reason: Reason) {
        let reset = Reset { connection, stream, reason, at: Instant::now() };
        self.tally.send_modify(|tally| tally.resets.push(reset));
    }

    pub(super) fn said_goodbye(&self, reason: Reason) {
        self.tally.send_modify(|tally| tally.goodbyes.push(reason));
    }
}

/// Counts a connection as open while it lives.
struct Open(Arc<Record>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.tally.send_modify(|tally| tally.open -= 1);
    }
}

type Script = Arc<dyn Fn(Stream) -> BoxFuture<'static, ()> + Send + Sync>;

impl Setup {
    /// Speaks TLS; the acceptor has to agree on `h2` ([`super::super::pki::speaking`]).
    pub fn tls(self, acceptor: TlsAcceptor) -> Self {
        Self { tls: Some(acceptor), ..self }
    }

    /// On this port instead of a free one.
    pub fn port(mut self, port: u16) -> Self {
        self.address.set_port(port);
        self
    }

    /// Takes so many streams at once.
    pub fn max_streams(mut self, count: u32) -> Self {
        self.builder.max_concurrent_streams(count);
        self
    }

    /// Takes so many bytes of a request's body before it reads them.
    pub fn window(mut self, bytes: u32) -> Self {
        self.builder.initial_window_size(bytes).initial_connection_window_size(bytes.max(65_535));
        self
    }

    /// Driven stream by stream with [`Http2Upstream::next`].
    pub async fn start(self) -> Http2Upstream {
        self.listen(None).await
    }

    /// Answers by itself, each stream in a task of its own that ends when the upstream does.
    pub async fn serving<F>(self, script: impl Fn(Stream) -> F + Send + Sync + 'static) -> Http2Upstream
    where
        F: Future<Output = ()> + Send + 'static,
    {
        self.listen(Some(Arc::new(move |stream| Box::pin(script(stream))))).await
    }

    async fn listen(self, script: Option<Script>) -> Http2Upstream {
        let listener = TcpListener::bind(self.address).await.expect("a loopback address can be bound");
        let address = listener.local_addr().expect("a bound listener has an address");
        let record = Arc::new(Record::default());
        let (sender, streams) = mpsc::unbounded_channel();
        let (other, others) = mpsc::unbounded_channel();
        let Self { tls, builder, .. } = self;
        let host = Arc::new(Host { record: record.clone(), tls, builder, script, streams: sender, other });
        let connections = Arc::new(Mutex::new(JoinSet::new()));
        let accepting = tokio::spawn(host.accept(listener, connections.clone()));
        Http2Upstream { address, record, streams, others, accepting, connections }
    }
}

impl Http2Upstream {
    /// On 127.0.0.1 by prior knowledge, driven stream by stream.
    pub async fn start() -> Self {
        Self::on(Ipv4Addr::LOCALHOST).start().await
    }

    /// The same, answering by itself.
    pub async fn serving<F>(script: impl Fn(Stream) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        Self::on(Ipv4Addr::LOCALHOST).serving(script).await
    }

    /// On a free port of this address.
    pub fn on(ip: impl Into<IpAddr>) -> Setup {
        let mut builder = Builder::new();
        builder.data_frame_budget(PATIENT);
        Setup { address: SocketAddr::new(ip.into(), 0), tls: None, builder }
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// An absolute `http` URL of the given path here.
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// The next request.
    #[track_caller]
    pub fn next(&mut self) -> impl Future<Output = Stream> {
        let stream = soon(self.streams.recv());
        async { stream.await.expect("the accept loop runs as long as the upstream lives") }
    }

    /// The next connection that did not agree on HTTP/2, to be spoken on by hand.
    #[track_caller]
    pub fn next_http1(&mut self) -> impl Future<Output = Agent> {
        let other = soon(self.others.recv());
        async { other.await.expect("the accept loop runs as long as the upstream lives") }
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

    /// The requests so far.
    pub fn requests(&self) -> Vec<Seen> {
        self.record.seen.lock().clone()
    }

    /// How many requests with this path came.
    pub fn count_of(&self, path: &str) -> usize {
        self.record.seen.lock().iter().filter(|seen| seen.uri.path() == path).count()
    }
}

impl Drop for Http2Upstream {
    fn drop(&mut self) {
        self.accepting.abort();
        self.connections.lock().abort_all();
    }
}

/// What its connections have in common.
struct Host {
    record: Arc<Record>,
    tls: Option<TlsAcceptor>,
    builder: Builder,
    script: Option<Script>,
    streams: mpsc::UnboundedSender<Stream>,
    other: mpsc::UnboundedSender<Agent>,
}

/// What a test has a connection do.
#[derive(Clone, Copy)]
enum Order {
    GoAway,
    Abort(Reason),
    Close,
    Cut,
}

impl Host {
    async fn accept(self: Arc<Self>, listener: TcpListener, connections: Arc<Mutex<JoinSet<()>>>) {
        for number in 1.. {
            let Ok((tcp, _)) = listener.accept().await else { return };
            self.record.tally.send_modify(|tally| {
                tally.connections += 1;
                tally.open += 1;
            });
            let open = Open(self.record.clone());
            connections.lock().spawn(self.clone().serve(tcp, number, open));
        }
    }

    async fn serve(self: Arc<Self>, tcp: TcpStream, number: usize, _open: Open) {
        tcp.set_nodelay(true).expect("an open socket takes the option");
        let twin = SockRef::from(&tcp).try_clone().expect("a socket can be cloned");
        let socket = match &self.tls {
            None => Socket::Plain(tcp),
            Some(acceptor) => match acceptor.accept(tcp).await {
                Ok(tls) if tls.get_ref().1.alpn_protocol() != Some(b"h2") => {
                    let stream = BufReader::new(Socket::Tls(Box::new(tls.into())));
                    return drop(self.other.send(Agent { stream }));
                }
                Ok(tls) => Socket::Tls(Box::new(tls.into())),
                Err(_) => return,
            },
        };
        let wire = Wire::new(socket, number, self.record.clone());
        let Ok(mut http) = self.builder.handshake::<_, Bytes>(wire).await else { return };
        let (orders, mut ordered) = mpsc::unbounded_channel();
        let mut tasks = JoinSet::new();
        loop {
            tokio::select! {
                biased;
                accepted = http.accept() => match accepted {
                    Some(Ok((request, respond))) => {
                        let stream = self.stream(request, respond, number, orders.clone());
                        match &self.script {
                            Some(script) => drop(tasks.spawn(script(stream))),
                            None => drop(self.streams.send(stream)),
                        }
                    }
                    _ => return,
                },
                Some(order) = ordered.recv() => match order {
                    Order::GoAway => http.graceful_shutdown(),
                    Order::Abort(reason) => http.abrupt_shutdown(reason),
                    Order::Close => return,
                    Order::Cut => {
                        twin.set_linger(Some(std::time::Duration::ZERO)).expect("an open socket takes it");
                        return;
                    }
                },
                Some(_) = tasks.join_next() => {}
            }
        }
    }

    fn stream(
        &self,
        request: Request<RecvStream>,
        respond: SendResponse<Bytes>,
        connection: usize,
        orders: mpsc::UnboundedSender<Order>,
    ) -> Stream {
        let (head, body) = request.into_parts();
        let request::Parts { method, uri, headers, .. } = head;
        let seen = Seen { connection, method, uri, headers };
        self.record.seen.lock().push(seen.clone());
        self.record.tally.send_modify(|tally| tally.requests += 1);
        Stream { seen, body, respond, sending: None, orders }
    }
}

/// One request in the test's hands. Dropping it unanswered resets the stream.
pub struct Stream {
    seen: Seen,
    body: RecvStream,
    respond: SendResponse<Bytes>,
    sending: Option<SendStream<Bytes>>,
    orders: mpsc::UnboundedSender<Order>,
}

impl std::ops::Deref for Stream {
    type Target = Seen;

    fn deref(&self) -> &Seen {
        &self.seen
    }
}

impl Stream {
    /// The values of all request fields of this name.
    pub fn values(&self, name: &str) -> Vec<&str> {
        super::values(&self.seen.headers, name)
    }

    /// The next piece of the request's body; `None` at its end. Panics when the stream is reset.
    #[track_caller]
    pub fn chunk(&mut self) -> impl Future<Output = Option<Bytes>> {
        let chunk = soon(piece(&mut self.body));
        async { chunk.await.map(|chunk| chunk.expect("the body goes on")) }
    }

    /// How the request's body ends: `None` when it ends whole.
    #[track_caller]
    pub fn body_end(&mut self) -> impl Future<Output = Option<End>> {
        soon(async {
            loop {
                match piece(&mut self.body).await {
                    Some(Ok(_)) => {}
                    Some(Err(error)) => return Some(End::from(&error)),
                    None => return None,
                }
            }
        })
    }

    /// The request's body, and its trailers.
    pub async fn body(&mut self) -> (Vec<u8>, Option<HeaderMap>) {
        let mut bytes = Vec::new();
        while let Some(chunk) = self.chunk().await {
            bytes.extend_from_slice(&chunk);
        }
        let trailers = soon(self.body.trailers()).await.expect("the body came whole");
        (bytes, trailers)
    }

    /// The request's body without making room for more, so that its window fills up.
    pub async fn chunk_kept(&mut self) -> Option<Bytes> {
        soon(self.body.data()).await.map(|chunk| chunk.expect("the body goes on"))
    }

    /// Gives room for so many bytes of the request's body.
    pub fn make_room(&mut self, bytes: usize) {
        self.body.flow_control().release_capacity(bytes).expect("the stream is open");
    }

    /// An interim answer.
    pub fn interim(&mut self, status: u16, headers: &[(&str, &str)]) {
        let mut response = Response::builder().status(status).body(()).expect("a status");
        *response.headers_mut() = fields(headers);
        self.respond.send_informational(response).expect("the stream takes an interim answer");
    }

    /// The head of an answer that has a body. A peer that has left is noticed elsewhere.
    pub fn head(&mut self, status: u16, headers: &[(&str, &str)]) {
        self.begin(status, headers, false);
    }

    fn begin(&mut self, status: u16, headers: &[(&str, &str)], is_all: bool) {
        let mut response = Response::builder().status(status).body(()).expect("a status");
        *response.headers_mut() = fields(headers);
        self.sending = self.respond.send_response(response, is_all).ok();
    }

    /// Bytes of the answer's body, as fast as the peer's window takes them; false when it has reset the
    /// stream.
    pub async fn data(&mut self, bytes: impl Into<Bytes>) -> bool {
        let mut bytes = bytes.into();
        let Some(sending) = &mut self.sending else { return false };
        while !bytes.is_empty() {
            sending.reserve_capacity(bytes.len());
            let room = std::future::poll_fn(|cx| sending.poll_capacity(cx)).await;
            let Some(Ok(room)) = room else { return false };
            if sending.send_data(bytes.split_to(room.min(bytes.len())), false).is_err() {
                return false;
            }
        }
        true
    }

    /// The end of the answer.
    pub fn end(mut self) {
        if let Some(mut sending) = self.sending.take() {
            let _ = sending.send_data(Bytes::new(), true);
        }
    }

    /// The end of the answer, with trailers.
    pub fn trailers(mut self, trailers: &[(&str, &str)]) {
        if let Some(mut sending) = self.sending.take() {
            let _ = sending.send_trailers(fields(trailers));
        }
    }

    /// A whole answer.
    pub async fn respond(mut self, status: u16, headers: &[(&str, &str)], body: impl Into<Bytes>) {
        let body = body.into();
        self.begin(status, headers, body.is_empty());
        if !body.is_empty() {
            self.data(body).await;
            self.end();
        }
    }

    /// RST_STREAM.
    pub fn reset(mut self, reason: Reason) {
        match &mut self.sending {
            Some(sending) => sending.send_reset(reason),
            None => self.respond.send_reset(reason),
        }
    }

    /// Waits for the peer to reset the stream, or for the connection's end (`None`).
    #[track_caller]
    pub fn cancelled(mut self) -> impl Future<Output = (Option<Reason>, Instant)> {
        soon(async move {
            let reset = match &mut self.sending {
                Some(sending) => std::future::poll_fn(|cx| sending.poll_reset(cx)).await,
                None => std::future::poll_fn(|cx| self.respond.poll_reset(cx)).await,
            };
            (reset.ok(), Instant::now())
        })
    }

    /// The connection below, to be ended.
    pub fn connection_below(&self) -> Below {
        Below(self.orders.clone())
    }

    /// Has the connection say GOAWAY and finish what is on it.
    pub fn go_away(&self) {
        let _ = self.orders.send(Order::GoAway);
    }

    /// Has the connection say GOAWAY for a fault and end.
    pub fn abort(&self, reason: Reason) {
        let _ = self.orders.send(Order::Abort(reason));
    }

    /// Ends the TCP connection with RST, all its streams with it.
    pub fn cut(&self) {
        let _ = self.orders.send(Order::Cut);
    }
}

/// What a stream runs on; outlives it.
pub struct Below(mpsc::UnboundedSender<Order>);

impl Below {
    /// Ends the TCP connection with FIN and without a GOAWAY.
    pub fn close(&self) {
        let _ = self.0.send(Order::Close);
    }
}
