//! Ports of one test's own, for servers that are stopped and started again in the middle of it.

use std::net::{Ipv4Addr, SocketAddr};

use tokio::net::{TcpListener, TcpSocket};

/// A free port of 127.0.0.1 that nobody else is given while this lives, whether somebody listens there or not.
///
/// A socket is bound to it that never listens. Whoever asks for any free port gets another one, and whoever binds
/// this one by its number (with `SO_REUSEADDR`, as servers do) may listen on it.
pub struct HeldPort {
    address: SocketAddr,
    _socket: TcpSocket,
}

impl HeldPort {
    /// Free until now.
    pub fn find() -> Self {
        let socket = reusable(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
        Self { address: socket.local_addr().expect("a bound socket has an address"), _socket: socket }
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
