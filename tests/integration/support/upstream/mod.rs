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

mod exchange;
mod record;
mod script;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncWriteExt, BufReader, copy, sink};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{mpsc, oneshot};
use tokio::task::{JoinHandle, JoinSet};
use tokio_rustls::TlsAcceptor;

use super::socket::Socket;
use super::soon;

use exchange::Connection;
use record::{Open, Record};
use script::{Script, play};

pub use exchange::{Exchange, is_pattern, pattern};
pub use record::{Handshake, Seen, Tally};
pub use script::{Reply, by_path, statuses};

/// A fake upstream; dropping it closes its port and every connection.
pub struct Upstream {
    address: SocketAddr,
    record: Arc<Record>,
    exchanges: mpsc::UnboundedReceiver<Exchange>,
    accepting: JoinHandle<()>,
    connections: Arc<Mutex<JoinSet<()>>>,
    /// Keeps the port from being given to another test when nobody listens there any more.
    held: Option<TcpSocket>,
}

/// How an [`Upstream`] shall listen; made by [`Upstream::on`].
pub struct Setup {
    address: SocketAddr,
    listener: Option<std::net::TcpListener>,
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
        let listener = match self.listener {
            Some(listener) => TcpListener::from_std(listener).expect("a socket that does not block"),
            None => TcpListener::bind(self.address).await.expect("a loopback address can be bound"),
        };
        let address = listener.local_addr().expect("a bound listener has an address");
        let record = Arc::new(Record::default());
        let (sender, exchanges) = mpsc::unbounded_channel();
        let host = Arc::new(Host { record: Arc::clone(&record), tls: self.tls, script, exchanges: sender });
        let connections = Arc::new(Mutex::new(JoinSet::new()));
        let accepting = tokio::spawn(host.accept(listener, Arc::clone(&connections)));
        Upstream { address, record, exchanges, accepting, connections, held: None }
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
        Setup { address: SocketAddr::new(ip.into(), 0), listener: None, tls: None }
    }

    /// On a socket that listens already and does not block, as one of another network namespace.
    pub fn at(listener: std::net::TcpListener) -> Setup {
        let address = listener.local_addr().expect("a bound listener has an address");
        Setup { address, listener: Some(listener), tls: None }
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

    /// Panics when, in the `quiet` time that follows, another request arrives.
    ///
    /// There is no event for "nothing happens". A wait that is too short can miss a violation, never invent one;
    /// better is to wait for something that would come later, and then to look at [`Self::count`].
    pub async fn gets_nothing_more(&self, quiet: Duration) {
        let before = self.count();
        let mut tally = self.record.tally.subscribe();
        let more = tokio::time::timeout(quiet, tally.wait_for(|tally| tally.requests > before)).await;
        assert!(more.is_err(), "another request arrived: {:?}", self.requests().last());
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

    /// How TLS began on each connection that got through it, in order.
    pub fn handshakes(&self) -> Vec<Handshake> {
        self.record.handshakes.lock().clone()
    }

    /// Stops listening; open connections live on. Later connections are refused: the port stays this upstream's, or
    /// the next one to ask for a port might get it, and the requests that are to fail.
    pub async fn stop_listening(&mut self) {
        self.accepting.abort();
        let _ = (&mut self.accepting).await;
        let socket = if self.address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() };
        let socket = socket.expect("a socket");
        socket.set_reuseaddr(true).expect("a socket takes the option");
        socket.bind(self.address).expect("the port has just been left");
        self.held = Some(socket);
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

    /// A handshake has failed. What the client says is read to its end: closing at once would reset the
    /// connection, and the alert might be lost.
    async fn refuse(&self, mut tcp: TcpStream) {
        self.record.tally.send_modify(|tally| tally.handshakes_failed += 1);
        let _ = tcp.shutdown().await;
        let _ = copy(&mut tcp, &mut sink()).await;
    }

    async fn serve(self: Arc<Self>, tcp: TcpStream, open: Open, number: usize) {
        let _ = tcp.set_nodelay(true);
        let socket = match &self.tls {
            None => Socket::Plain(tcp),
            Some(acceptor) => match acceptor.accept(tcp).into_fallible().await {
                Ok(tls) => {
                    self.record.handshakes.lock().push(Handshake::of(tls.get_ref().1));
                    Socket::Tls(Box::new(tls.into()))
                }
                Err((_, tcp)) => return self.refuse(tcp).await,
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
