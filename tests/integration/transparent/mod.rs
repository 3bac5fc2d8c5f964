//! The transparent port: agents that know of no proxy, and rules of the kernel that redirect them.
//!
//! Each test runs in a network namespace of its own, where the rules are real. As in a pod, agent and hedgerow
//! share the namespace, and the rule takes what leaves an agent. A pod's rule knows agents by their user; here
//! it is by their source address, since a user namespace that anybody may make has one user only. Everything
//! else is the same: the redirect in the output chain, the kernel's memory of where the connection was meant to
//! go, an agent that comes from the pod's address. Tools have addresses beside that, all on loopback. One test
//! has its agent in a second namespace, whose connections are redirected as they arrive.

mod destination;
mod egress;
mod guards;
mod http2;
mod kept;
mod other;
mod pool;
mod refused;
mod tls;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use tokio::net::{TcpSocket, TcpStream};

use crate::support::client::{Agent, Response};
use crate::support::dns::Dns;
use crate::support::hedgerow::{HedgerowProcess, Launch};
use crate::support::netns::{in_namespace, ip, rules};
use crate::support::soon;

/// The pod's addresses, from which agents come.
const POD: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);
const POD6: Ipv6Addr = Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, 2);
/// Where tools are.
const TOOL: Ipv4Addr = Ipv4Addr::new(10, 78, 0, 1);
const OTHER: Ipv4Addr = Ipv4Addr::new(10, 78, 0, 2);
const TOOL6: Ipv6Addr = Ipv6Addr::new(0xfd78, 0, 0, 0, 0, 0, 0, 1);
/// What a rule catches that does not look whose connection it is.
const CAUGHT: Ipv4Addr = Ipv4Addr::new(10, 79, 0, 1);
const CAUGHT6: Ipv6Addr = Ipv6Addr::new(0xfd79, 0, 0, 0, 0, 0, 0, 1);

/// Runs a test in a namespace whose loopback has all these addresses.
fn in_pod<T: AsyncFnOnce()>(test: T) {
    let set_up = || {
        for address in [POD, TOOL, OTHER, CAUGHT] {
            ip(&format!("addr add {address}/32 dev lo"));
        }
        for address in [POD6, TOOL6, CAUGHT6] {
            ip(&format!("-6 addr add {address}/128 dev lo nodad"));
        }
    };
    in_namespace(set_up, test);
}

/// Redirects what agents send outside to `port`.
fn redirect_to(port: u16) {
    rules(&format!(
        "table inet pod {{}}
         delete table inet pod
         table inet pod {{
           chain output {{
             type nat hook output priority -100; policy accept;
             ip daddr {CAUGHT} meta l4proto tcp redirect to :{port}
             ip6 daddr {CAUGHT6} meta l4proto tcp redirect to :{port}
             ip daddr {{ 127.0.0.0/8, {POD} }} return
             ip saddr {POD} meta l4proto tcp redirect to :{port}
             ip6 daddr {{ ::1, {POD6} }} return
             ip6 saddr {POD6} meta l4proto tcp redirect to :{port}
           }}
         }}"
    ));
}

/// A hedgerow with this policy, and the rules that send agents to it.
async fn start(policy: &str) -> HedgerowProcess {
    launch(HedgerowProcess::with(policy).transparent()).await
}

async fn launch(launch: Launch) -> HedgerowProcess {
    let hedgerow = launch.start().await;
    redirect_to(hedgerow.transparent.port());
    hedgerow
}

/// A policy whose names are resolved by `dns`.
fn with_dns(dns: &Dns, rest: &str) -> String {
    format!("dns: {{ servers: [\"{}\"] }}\n{rest}", dns.address())
}

/// An agent that believes to be connected to `to`.
async fn agent(to: impl Into<SocketAddr>) -> Agent {
    let to = to.into();
    let from: IpAddr = if to.is_ipv4() { POD.into() } else { POD6.into() };
    Agent::connect_from((from, 0).into(), to).await
}

/// The same as a bare socket.
async fn connection(to: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.bind((POD, 0).into()).expect("the pod's address can be bound");
    soon(socket.connect(to)).await.expect("the transparent port takes it")
}

/// What an agent without a proxy sends for a GET.
fn get(host: &str, path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n")
}

/// GET on a connection of its own.
async fn get_at(to: SocketAddr, host: &str) -> Response {
    let mut agent = agent(to).await;
    agent.send(get(host, "/")).await;
    agent.read_response().await
}
