//! The egress guard of a dial: the policy's rules, and the addresses of this process.
//!
//! The rules judge what the policy knows ([`config::egress`](crate::config::egress)). That a destination is
//! hedgerow itself only the running process can tell, from its listeners and this machine's addresses.

use std::net::{IpAddr, SocketAddr, UdpSocket};

pub use crate::config::egress::{NameVerdict, check_address, check_bare, check_name};

/// The process's own listening ports, which nobody may reach through the proxy: the admin port takes
/// orders, and the proxy port would make a loop.
#[derive(Debug, Clone, Default)]
pub struct OwnAddresses {
    ports: Vec<u16>,
}

impl OwnAddresses {
    /// The ports of all listeners, as bound.
    pub fn new(ports: Vec<u16>) -> Self {
        Self { ports }
    }

    /// Whether a listener has this port.
    pub fn has_port(&self, port: u16) -> bool {
        self.ports.contains(&port)
    }

    /// Whether dialling `address` would reach one of the listeners, by whatever alias: a port of ours on
    /// loopback, on the unspecified address (which the kernel takes for loopback) or on any address of
    /// this machine. A listener on loopback alone is not reachable by the latter; refusing that as well
    /// costs nobody anything.
    pub fn is_own(&self, address: SocketAddr) -> bool {
        if !self.ports.contains(&address.port()) {
            return false;
        }
        let ip = address.ip().to_canonical();
        ip.is_loopback() || ip.is_unspecified() || is_local(ip)
    }
}

/// Whether this machine has the address. Binding asks the kernel at the moment it matters, where a list
/// of interfaces read at start would grow old; a UDP socket takes no port that anyone could miss.
pub fn is_local(ip: IpAddr) -> bool {
    UdpSocket::bind((ip, 0)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_ports_are_found_under_every_alias() {
        let own = OwnAddresses::new(vec![15300, 15302]);
        for address in [
            "127.0.0.1:15302",
            "127.9.9.9:15300",
            "0.0.0.0:15302",
            "[::1]:15302",
            "[::]:15300",
            "[::ffff:127.0.0.1]:15302",
            "[::ffff:0.0.0.0]:15302",
        ] {
            assert!(own.is_own(address.parse().unwrap()), "{address}");
        }
        for address in ["127.0.0.1:15303", "192.0.2.1:15302", "[2001:db8::1]:15302", "1.1.1.1:15300"] {
            assert!(!own.is_own(address.parse().unwrap()), "{address}");
        }
    }

    #[test]
    fn every_address_of_this_machine_counts_as_own() {
        // The kernel's choice of source towards a documentation address; there may be no route at all.
        let probe = UdpSocket::bind("0.0.0.0:0").unwrap();
        if probe.connect("192.0.2.1:9").is_ok() {
            let ip = probe.local_addr().unwrap().ip();
            assert!(OwnAddresses::new(vec![15300]).is_own((ip, 15300).into()), "{ip}");
        }
    }
}
