//! What the command line, or the environment, says about redirects.

use std::str::FromStr;

use clap::builder::BoolishValueParser;
use clap::{ArgAction, Args};
use ipnet::IpNet;

use super::apply::{Choice, Ipv6};
use super::{Plan, Ports};
use crate::config;
use crate::kube::names::{REDIRECT_PORT, UID};

/// The flags of `hedgerow redirect`.
#[derive(Debug, Clone, Args)]
pub struct Arguments {
    /// Take the rules away. That there are none is no failure.
    #[arg(long, env = "HEDGEROW_REDIRECT_REMOVE", action = ArgAction::SetTrue, value_parser = BoolishValueParser::new())]
    pub remove: bool,
    /// Print as a shell script what would be run, and run nothing.
    #[arg(long, env = "HEDGEROW_REDIRECT_DRY_RUN", action = ArgAction::SetTrue, value_parser = BoolishValueParser::new())]
    pub dry_run: bool,
    /// The program that sets the rules; auto: the first of nft, iptables and iptables-legacy that can.
    #[arg(long, env = "HEDGEROW_REDIRECT_BACKEND", value_enum, default_value_t = Choice::Auto, hide_possible_values = false)]
    pub backend: Choice,
    /// TCP ports to redirect, or `all`.
    #[arg(long, env = "HEDGEROW_REDIRECT_PORTS", default_value = "80,443", value_name = "PORT,…")]
    ports: WantedPorts,
    /// TCP ports to leave alone.
    #[arg(
        long,
        env = "HEDGEROW_REDIRECT_EXCLUDE_PORTS",
        default_value = "",
        hide_default_value = true,
        value_name = "PORT,…"
    )]
    exclude_ports: PortList,
    /// Destinations to leave alone, IPv4 and IPv6: addresses and ranges.
    #[arg(
        long,
        env = "HEDGEROW_REDIRECT_EXCLUDE_CIDRS",
        default_value = "",
        hide_default_value = true,
        value_name = "CIDR,…"
    )]
    exclude_cidrs: Ranges,
    /// The user that hedgerow runs as, whose connections are never redirected.
    #[arg(long, env = "HEDGEROW_REDIRECT_PROXY_UID", default_value_t = UID, value_name = "UID",
          value_parser = clap::value_parser!(u32).range(1..))]
    proxy_uid: u32,
    /// Hedgerow's transparent port.
    #[arg(long, env = "HEDGEROW_REDIRECT_PORT", default_value_t = REDIRECT_PORT, value_name = "PORT",
          value_parser = clap::value_parser!(u16).range(1..))]
    port: u16,
    /// Refuse UDP to port 443, so that clients of HTTP/3 take TCP.
    #[arg(long, env = "HEDGEROW_REDIRECT_REJECT_QUIC", action = ArgAction::SetTrue, value_parser = BoolishValueParser::new())]
    reject_quic: bool,
    /// Whether IPv6 is redirected too; auto: where that works.
    #[arg(long, env = "HEDGEROW_REDIRECT_IPV6", value_enum, default_value_t = Ipv6::Auto)]
    pub ipv6: Ipv6,
}

impl Arguments {
    /// What is to be redirected.
    pub fn plan(&self) -> Plan {
        Plan {
            ports: self.ports.0.clone(),
            exclude_ports: self.exclude_ports.0.clone(),
            exclude_cidrs: self.exclude_cidrs.0.clone(),
            proxy_uid: self.proxy_uid,
            port: self.port,
            reject_quic: self.reject_quic,
        }
    }
}

/// Ports separated by commas, or none.
#[derive(Debug, Clone, PartialEq, Eq)]
struct PortList(Vec<u16>);

impl FromStr for PortList {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let port = |text: &str| match text.parse() {
            Ok(0) | Err(_) => Err(format!("`{text}` is not a port from 1 to 65535")),
            Ok(port) => Ok(port),
        };
        let mut ports: Vec<u16> = parts(text).map(port).collect::<Result<_, _>>()?;
        ports.sort_unstable();
        ports.dedup();
        Ok(Self(ports))
    }
}

/// The same, at least one, or all.
#[derive(Debug, Clone)]
struct WantedPorts(Ports);

impl FromStr for WantedPorts {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.trim() == "all" {
            return Ok(Self(Ports::All));
        }
        match PortList::from_str(text)? {
            PortList(ports) if ports.is_empty() => Err("expected ports such as 80,443, or `all`".into()),
            PortList(ports) => Ok(Self(Ports::These(ports))),
        }
    }
}

/// Ranges separated by commas, or none.
#[derive(Debug, Clone)]
struct Ranges(Vec<IpNet>);

impl FromStr for Ranges {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let range = |text: &str| config::range(text).map_err(|problem| format!("`{text}`: {problem}"));
        let ranges: Vec<IpNet> = parts(text).map(range).collect::<Result<_, _>>()?;
        // nft refuses a set whose ranges overlap.
        Ok(Self(IpNet::aggregate(&ranges)))
    }
}

/// What stands between commas; nothing in an empty text, which is how an unset annotation arrives.
fn parts(text: &str) -> impl Iterator<Item = &str> {
    let text = text.trim();
    text.split(',').map(str::trim).filter(move |_| !text.is_empty())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Arguments,
    }

    fn plan(arguments: &[&str]) -> Result<Plan, String> {
        let line = Line::try_parse_from([&["redirect"], arguments].concat());
        line.map(|line| line.arguments.plan()).map_err(|error| error.to_string())
    }

    #[test]
    fn what_is_not_said_is_the_pods_way() {
        let usual = Plan {
            ports: Ports::These(vec![80, 443]),
            exclude_ports: vec![],
            exclude_cidrs: vec![],
            proxy_uid: 2747,
            port: 15301,
            reject_quic: false,
        };
        assert_eq!(plan(&[]), Ok(usual.clone()));
        assert_eq!(plan(&["--exclude-ports", "", "--exclude-cidrs", " "]), Ok(usual));
    }

    #[test]
    fn lists_are_put_in_order() {
        let plan = plan(&[
            "--ports",
            "all",
            "--exclude-ports",
            "5432, 22,5432",
            "--exclude-cidrs",
            "10.1.0.0/16,fd00::/8,10.0.0.0/8,192.0.2.7",
        ])
        .unwrap();
        assert_eq!((plan.ports, plan.exclude_ports), (Ports::All, vec![22, 5432]));
        let ranges = ["10.0.0.0/8", "192.0.2.7/32", "fd00::/8"].map(|range| range.parse().unwrap());
        assert_eq!(plan.exclude_cidrs, ranges);
    }

    #[test]
    fn a_wrong_value_is_named_with_its_flag() {
        for (flag, value, told) in [
            ("--ports", "80,99999", "`99999` is not a port from 1 to 65535"),
            ("--ports", "0", "`0` is not a port"),
            ("--ports", "80,", "`` is not a port"),
            ("--ports", "", "expected ports"),
            ("--exclude-ports", "http", "`http` is not a port"),
            ("--exclude-ports", "all", "`all` is not a port"),
            ("--exclude-cidrs", "10.0.0.0/33", "`10.0.0.0/33`: expected a range"),
            ("--exclude-cidrs", "10.1.0.0/8", "did you mean `10.0.0.0/8`"),
            ("--exclude-cidrs", "localhost", "`localhost`: expected a range"),
            ("--proxy-uid", "0", "0 is not in 1.."),
            ("--proxy-uid", "hedgerow", "invalid digit"),
            ("--proxy-uid", "4294967296", "is not in 1.."),
            ("--port", "0", "0 is not in 1.."),
            ("--port", "65536", "is not in 1.."),
            ("--backend", "pf", "possible values: auto, nft, iptables"),
            ("--ipv6", "maybe", "possible values: auto, on, off"),
        ] {
            let error = plan(&[flag, value]).unwrap_err();
            assert!(error.contains(flag) && error.contains(told), "{flag} {value}: {error}");
        }
    }
}
