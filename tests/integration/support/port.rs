//! Ports for servers of other processes, which are told a number and bind it a little later.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr};

use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpSocket};

/// How often a start is tried anew when somebody took a port between finding and binding it.
pub const STARTS: usize = 5;

/// Ports that some test has. None is given to another: its server would answer in the place of one that could not
/// bind.
static TAKEN: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());

/// Ports that are a test's while this lives.
pub struct Taken(Vec<u16>);

impl Taken {
    /// Takes all of them, or none when some test has one.
    pub fn all(ports: impl IntoIterator<Item = u16>) -> Option<Self> {
        let ports: Vec<_> = ports.into_iter().collect();
        let mut taken = TAKEN.lock();
        if ports.iter().any(|port| taken.contains(port)) {
            return None;
        }
        taken.extend(&ports);
        Some(Self(ports))
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        let mut taken = TAKEN.lock();
        for port in &self.0 {
            taken.remove(port);
        }
    }
}

/// A free port of 127.0.0.1 that nobody else is given while this lives, whether somebody listens there or not: for
/// servers that are stopped and started again in the middle of a test.
///
/// A socket is bound to it that never listens. Whoever asks for any free port gets another one, and whoever binds
/// this one by its number (with `SO_REUSEADDR`, as servers do) may listen on it.
pub struct HeldPort {
    address: SocketAddr,
    _socket: TcpSocket,
    _taken: Taken,
}

impl HeldPort {
    /// Free until now.
    pub fn find() -> Self {
        loop {
            let socket = reusable(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
            let address = socket.local_addr().expect("a bound socket has an address");
            if let Some(taken) = Taken::all([address.port()]) {
                return Self { address, _socket: socket, _taken: taken };
            }
        }
    }

    /// The port's number.
    pub fn number(&self) -> u16 {
        self.address.port()
    }

    /// The port on 127.0.0.1.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Listens there. Once the listener is dropped, connections are refused.
    pub fn listen(&self) -> TcpListener {
        reusable(self.address).listen(1024).expect("nobody else listens on a held port")
    }
}

fn reusable(address: SocketAddr) -> TcpSocket {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.set_reuseaddr(true).expect("a socket takes the option");
    socket.bind(address).expect("loopback can be bound");
    socket
}
