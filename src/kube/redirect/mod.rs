//! The rules of transparent mode: they send what agents in this network namespace connect to outside to hedgerow's
//! transparent port. Here is what is wanted; [`nft`] and [`iptables`] say it in the kernel's two languages, and
//! [`apply`] has a program that speaks one of them do it.
//!
//! The rules stand in the output path alone, in this order:
//!
//! 1. hedgerow's own connections, known by their user, go out untouched: anything else would be a loop;
//! 2. so does what stays on loopback, and with it all that goes to the pod's own addresses;
//! 3. and what goes to the ranges and ports that are left out;
//! 4. TCP to the wanted ports goes to the transparent port.
//!
//! What comes in from outside is not touched, so that probes and callers of the agent notice nothing. On request
//! UDP to port 443 is refused at once: a client of HTTP/3 then takes TCP, which is redirected.
//!
//! The programs are run, rather than the kernel's netlink spoken: what `nft list ruleset` shows is then what an
//! operator can write by himself, and nobody has to keep an own encoder of two rule languages true.

pub mod apply;
mod arguments;
pub mod iptables;
pub mod nft;
mod program;

pub use arguments::Arguments;

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;

/// HTTP/3, by the port that its TCP twin has.
const QUIC_PORT: u16 = 443;

/// What is to be redirected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The TCP ports that are redirected.
    pub ports: Ports,
    /// TCP ports that are not, whatever `ports` says. Ascending, each once.
    pub exclude_ports: Vec<u16>,
    /// Destinations that are left alone. None overlaps another.
    pub exclude_cidrs: Vec<IpNet>,
    /// Hedgerow's user. Never 0: agents that run as root would not be redirected.
    pub proxy_uid: u32,
    /// The transparent port.
    pub port: u16,
    /// Whether UDP to port 443 is refused.
    pub reject_quic: bool,
}

/// TCP ports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ports {
    /// Every port.
    All,
    /// These, ascending, each once, at least one.
    These(Vec<u16>),
}

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("all ports"),
            Self::These(ports) => {
                write!(f, "port{} {}", if ports.len() == 1 { "" } else { "s" }, listed(ports))
            }
        }
    }
}

/// What the kernel keeps apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        })
    }
}

impl Plan {
    /// The ranges of one family that are left alone.
    fn excluded_in(&self, family: Family) -> Vec<IpNet> {
        let is_of = |range: &&IpNet| matches!(range.addr(), IpAddr::V4(_)) == (family == Family::V4);
        self.exclude_cidrs.iter().filter(is_of).copied().collect()
    }
}

/// Values in one line.
fn listed<T: ToString>(values: &[T]) -> String {
    values.iter().map(T::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two kinds of everything.
    pub(super) fn plan() -> Plan {
        Plan {
            ports: Ports::These(vec![80, 443]),
            exclude_ports: vec![443, 5432],
            exclude_cidrs: ["10.0.0.0/8", "192.0.2.7/32", "fd00::/8"].map(|r| r.parse().unwrap()).to_vec(),
            proxy_uid: 2747,
            port: 15301,
            reject_quic: true,
        }
    }

    #[test]
    fn ports_are_told_in_words() {
        assert_eq!(plan().ports.to_string(), "ports 80, 443");
        assert_eq!(Ports::These(vec![80]).to_string(), "port 80");
        assert_eq!(Ports::All.to_string(), "all ports");
    }
}
