//! `hedgerow redirect`: the rules that a pod's init container sets, and the whole path through them.
//!
//! Each test has a pod of its own: a network namespace with a cable to another one, where the tools are. As in a pod
//! hedgerow runs as user 2747, and agents, the test among them, as somebody else. All of them are there for real,
//! which takes the rights of root.

mod path;
mod rules;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use tokio::process::Command;

use crate::support::command::{Finished, finished};
use crate::support::hedgerow::as_user;
use crate::support::netns::{Neighbour, command, in_namespace_of_all_users, ip};

/// The user that hedgerow runs as.
const PROXY: u32 = 2747;
/// Every program that can set the rules.
const BACKENDS: [&str; 3] = ["nft", "iptables-nft", "iptables-legacy"];

/// The pod's addresses.
const POD: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);
const POD6: Ipv6Addr = Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, 2);
/// The machine where tools are.
const TOOL: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
const TOOL6: Ipv6Addr = Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, 1);
const TOOLS: [IpAddr; 2] = [IpAddr::V4(TOOL), IpAddr::V6(TOOL6)];

/// Runs a test in a pod, with the machine at the other end of its cable.
fn in_pod<T: AsyncFnOnce(Neighbour)>(test: T) {
    let cable = || {
        let tools = Neighbour::new(["10.77.0.2/24", "fd77::2/64"], ["10.77.0.1/24", "fd77::1/64"]);
        // An address that nobody has is to be dialled as well.
        ip("route add default via 10.77.0.1");
        ip("-6 route add default via fd77::1");
        tools
    };
    in_namespace_of_all_users(cable, test);
}

/// `hedgerow redirect` with these arguments.
async fn redirect(arguments: &[&str]) -> Finished {
    let mut redirect = Command::new(env!("CARGO_BIN_EXE_hedgerow"));
    redirect.arg("redirect").args(arguments);
    finished(redirect).await
}

/// The same, which must succeed: what it says.
#[track_caller]
fn redirected(arguments: &[&str]) -> impl Future<Output = String> {
    let arguments = arguments.iter().map(|&argument| argument.to_owned()).collect::<Vec<_>>();
    async move {
        let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
        let done = redirect(&arguments).await;
        assert_eq!((done.code, done.stderr.as_str()), (0, ""), "{arguments:?}");
        done.stdout
    }
}

/// A program that must succeed: what it prints.
async fn output(program: &str, arguments: &[&str]) -> String {
    let mut program = command(program);
    program.args(arguments);
    let done = finished(Command::from(program)).await;
    assert_eq!(done.code, 0, "{arguments:?}: {}", done.stderr);
    done.stdout
}

/// All rules that this namespace has, of every kind, without counters.
async fn all_rules() -> String {
    let mut all = output("nft", &["--stateless", "list", "ruleset"]).await;
    for program in ["iptables-legacy-save", "ip6tables-legacy-save"] {
        all += &output(program, &[]).await;
    }
    // Times, and the counters of chains.
    let lines = all.lines().filter(|line| !line.starts_with('#'));
    lines.map(|line| line.split_once('[').map_or(line, |(rule, _)| rule).to_owned() + "\n").collect()
}

/// curl as this user: the body and the status.
async fn curl(user: u32, url: &str, options: &[&str]) -> String {
    let mut curl = as_user(user, "curl");
    curl.args(["-sS", "--noproxy", "*", "--max-time", "10", "-w", "|%{http_code}", url]).args(options);
    finished(Command::from(curl)).await.stdout
}
