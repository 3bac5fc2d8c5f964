//! A bad line: TCP to a server by way of something that delays, cuts, refuses or falls silent, as the test says.
//!
//! A line that is silent loses nothing. That is what TCP makes of lost packets: what was written is there, in order,
//! as soon as they come through again, unless somebody has given the connection up. A forwarder that threw bytes
//! away would show what no network does, half a command or an answer that belongs to another question.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use socket2::SockRef;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

use super::port::HeldPort;
use super::soon;

/// Pieces that one direction holds, beside what the kernel does. Enough for whatever a delay of some hundred
/// milliseconds keeps back.
const HELD: usize = 1024;

/// Forwards to a server; dropping it ends all that goes through it.
pub struct Forwarder {
    port: HeldPort,
    line: Arc<Line>,
    /// `None` while connections are refused.
    accepting: Option<JoinHandle<()>>,
}

struct Line {
    to: SocketAddr,
    state: watch::Sender<State>,
    tally: watch::Sender<Tally>,
}

/// How the line is now.
#[derive(Debug, Clone, Copy, Default)]
struct State {
    to_server: Way,
    to_client: Way,
    /// Cuts so far; a connection ends when there is one more.
    cuts: usize,
}

/// How one direction is now.
#[derive(Debug, Clone, Copy, Default)]
struct Way {
    delay: Duration,
    is_silent: bool,
}

/// What went through so far.
#[derive(Debug, Clone, Default)]
pub struct Tally {
    /// Connections ever taken.
    pub connections: usize,
    /// Connections that are there now.
    pub open: usize,
    /// Bytes that the server was given.
    pub to_server: usize,
    /// Bytes that clients were given.
    pub to_client: usize,
}

impl Forwarder {
    /// To this server, which need not be there: a connection is taken all the same, and then reset.
    pub async fn start(to: SocketAddr) -> Self {
        let line = Line { to, state: watch::Sender::default(), tally: watch::Sender::default() };
        let mut this = Self { port: HeldPort::find(), line: Arc::new(line), accepting: None };
        this.listen();
        this
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.port.address()
    }

    /// From now on every byte is under way for so long, in either direction; bytes that are under way already too.
    pub fn delay(&self, to_server: Duration, to_client: Duration) {
        self.change(|state| {
            state.to_server.delay = to_server;
            state.to_client.delay = to_client;
        });
    }

    /// From now on nothing comes through. Connections are taken, and what is said waits.
    pub fn mute(&self) {
        self.change(|state| {
            state.to_server.is_silent = true;
            state.to_client.is_silent = true;
        });
    }

    /// From now on the server hears everything and its answers do not come.
    pub fn mute_answers(&self) {
        self.change(|state| state.to_client.is_silent = true);
    }

    /// Resets every connection, on both sides. What was under way is lost; later connections are as before.
    pub fn cut(&self) {
        self.change(|state| state.cuts += 1);
    }

    /// From now on connections are refused; those that are there go on.
    pub async fn refuse(&mut self) {
        if let Some(accepting) = self.accepting.take() {
            accepting.abort();
            let _ = accepting.await;
        }
    }

    /// A good line again. What waited comes through.
    pub fn restore(&mut self) {
        self.change(|state| (state.to_server, state.to_client) = Default::default());
        if self.accepting.is_none() {
            self.listen();
        }
    }

    /// The numbers now.
    pub fn tally(&self) -> Tally {
        self.line.tally.borrow().clone()
    }

    /// Waits until the numbers are as wanted, and returns them.
    #[track_caller]
    pub fn until(&self, wanted: impl Fn(&Tally) -> bool) -> impl Future<Output = Tally> {
        let mut tally = self.line.tally.subscribe();
        soon(async move { tally.wait_for(|tally| wanted(tally)).await.expect("the line lives").clone() })
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        self.line.state.send_modify(change);
    }

    fn listen(&mut self) {
        let (listener, line) = (self.port.listen(), Arc::clone(&self.line));
        self.accepting = Some(tokio::spawn(async move {
            loop {
                let Ok((client, _)) = listener.accept().await else { continue };
                tokio::spawn(Arc::clone(&line).connect(client));
            }
        }));
    }
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        if let Some(accepting) = self.accepting.take() {
            accepting.abort();
        }
        self.cut();
    }
}

impl Line {
    async fn connect(self: Arc<Self>, mut client: TcpStream) {
        let mut state = self.state.subscribe();
        let cuts = state.borrow_and_update().cuts;
        self.tally.send_modify(|tally| {
            tally.connections += 1;
            tally.open += 1;
        });
        // A server that is not there ends the client's connection, too.
        let mut server = TcpStream::connect(self.to).await.ok();
        let is_over = match &mut server {
            Some(server) => tokio::select! {
                carried = self.carry_both(&mut client, server) => carried.is_ok(),
                _ = state.wait_for(|state| state.cuts > cuts) => false,
            },
            None => false,
        };
        if !is_over {
            for socket in [Some(client), server].into_iter().flatten() {
                let _ = SockRef::from(&socket).set_linger(Some(Duration::ZERO));
            }
        }
        self.tally.send_modify(|tally| tally.open -= 1);
    }

    async fn carry_both(&self, client: &mut TcpStream, server: &mut TcpStream) -> io::Result<()> {
        for socket in [&*client, &*server] {
            socket.set_nodelay(true)?;
        }
        let (from_client, to_client) = client.split();
        let (from_server, to_server) = server.split();
        let up = self.carry(from_client, to_server, |state| state.to_server, |tally| &mut tally.to_server);
        let down = self.carry(from_server, to_client, |state| state.to_client, |tally| &mut tally.to_client);
        tokio::try_join!(up, down).map(drop)
    }

    /// Carries one direction to its end, and closes it there.
    async fn carry(
        &self,
        mut from: ReadHalf<'_>,
        mut to: WriteHalf<'_>,
        way: fn(&State) -> Way,
        count: fn(&mut Tally) -> &mut usize,
    ) -> io::Result<()> {
        let (held, mut pieces) = mpsc::channel::<(Instant, Vec<u8>)>(HELD);
        let reading = async move {
            loop {
                let mut piece = Vec::with_capacity(64 << 10);
                // The end travels as long as the bytes before it.
                let is_end = from.read_buf(&mut piece).await? == 0;
                if held.send((Instant::now(), piece)).await.is_err() || is_end {
                    return Ok::<_, io::Error>(());
                }
            }
        };
        let writing = async move {
            while let Some((came, piece)) = pieces.recv().await {
                self.until_due(came, way).await;
                if piece.is_empty() {
                    return to.shutdown().await;
                }
                to.write_all(&piece).await?;
                self.tally.send_modify(|tally| *count(tally) += piece.len());
            }
            Ok(())
        };
        tokio::try_join!(reading, writing).map(drop)
    }

    /// Waits until what came then has been under way for long enough, as the line is at the end.
    async fn until_due(&self, came: Instant, way: fn(&State) -> Way) {
        let mut state = self.state.subscribe();
        loop {
            let now = way(&state.borrow_and_update());
            let due = sleep_until(came + now.delay);
            tokio::select! {
                () = due, if !now.is_silent => return,
                // It cannot be gone: the line has it.
                _ = state.changed() => {}
            }
        }
    }
}
