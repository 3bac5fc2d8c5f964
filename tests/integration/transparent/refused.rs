//! What is no redirected connection of an agent, or leads back to hedgerow itself.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use futures_util::future::join_all;
use tokio::net::TcpStream;

use super::{CAUGHT, CAUGHT6, POD, POD6, TOOL, agent, get, in_pod, launch, start};
use crate::support::client::Agent;
use crate::support::hedgerow::HedgerowProcess;

/// Waits until hedgerow has no client left.
async fn until_alone(hedgerow: &HedgerowProcess) {
    let open = |listener| [("listener", listener)];
    hedgerow
        .until_metrics(|m| {
            m.value("hedgerow_connections_open", &open("transparent")) == 0.0
                && m.value("hedgerow_connections_open", &open("proxy")) == 0.0
        })
        .await;
}

// The original destination of a direct dial is the port itself, which was dialled without end.
#[test]
fn c125_a_direct_dial_of_the_transparent_port_is_closed() {
    in_pod(async || {
        let open = HedgerowProcess::with("{}").clients(&["10.77.0.0/24", "fd77::/64"]);
        let hedgerow = launch(open.transparent_on(Ipv6Addr::UNSPECIFIED)).await;
        let port = hedgerow.transparent.port();
        let before = hedgerow.open_files();
        for round in 0..100 {
            for ip in ["127.0.0.1", "127.0.0.9", "::1", "10.77.0.2", "fd77::2"] {
                let mut agent = Agent::connect((ip.parse::<IpAddr>().unwrap(), port).into()).await;
                if round % 2 == 0 {
                    agent.send(get("a.test", "/")).await;
                }
                agent.ended().await;
            }
        }
        until_alone(&hedgerow).await;
        let after = hedgerow.open_files();
        assert!(after <= before + 2, "{before} files before, {after} after");
        let metrics = hedgerow.metrics().await;
        assert_eq!(metrics.value("hedgerow_upstream_attempts_total", &[]), 0.0);
        assert_eq!(metrics.value("hedgerow_requests_total", &[]), 0.0);
        assert!(hedgerow.stderr.text().contains("not redirected"), "{}", hedgerow.stderr.text());
    });
}

#[test]
fn the_ports_of_the_process_are_no_destination() {
    in_pod(async || {
        let hedgerow = start("{}").await;
        let ports = [hedgerow.admin.port(), hedgerow.proxy.port(), hedgerow.transparent.port()];
        for port in ports {
            let mut agent = agent((TOOL, port)).await;
            agent.send(get("a.test", "/metrics")).await;
            agent.ended().await;
        }
        until_alone(&hedgerow).await;
        assert_eq!(hedgerow.metrics().await.value("hedgerow_upstream_attempts_total", &[]), 0.0);
    });
}

// A rule that forgets to leave hedgerow out sends its own connections back to it.
#[test]
fn own_connections_that_a_rule_catches_are_closed_as_a_loop() {
    in_pod(async || {
        for (ip, caught) in [
            (IpAddr::from([127, 0, 0, 1]), IpAddr::from(CAUGHT)),
            (Ipv6Addr::UNSPECIFIED.into(), CAUGHT.into()),
            (Ipv6Addr::UNSPECIFIED.into(), CAUGHT6.into()),
        ] {
            let open = HedgerowProcess::with("threads: 2\ndefaults: { breaker: off, hedge: off }");
            let hedgerow = launch(open.transparent_on(ip).clients(&["192.0.2.0/24"])).await;
            let caught = SocketAddr::from((caught, 80));
            let url = format!("http://{caught}/");
            let before = hedgerow.open_files();
            // Whether the dial is known when it is accepted is a race, hence many at once.
            const TIMES: usize = 50;
            let calls = join_all((0..TIMES).map(async |_| hedgerow.get(&url).await.status)).await;
            assert!(calls.iter().all(|status| *status == 502), "{calls:?}");
            let calls = (0..TIMES).map(async |_| super::get_at(caught, "a.test").await.status);
            assert!(join_all(calls).await.iter().all(|status| *status == 502));
            let tunnels = (0..TIMES).map(async |_| {
                let mut agent = agent(caught).await;
                agent.send("EHLO agent\r\n").await;
                agent.ended().await
            });
            join_all(tunnels).await;
            until_alone(&hedgerow).await;

            let dials = 3 * TIMES;
            let metrics = hedgerow.metrics().await;
            assert_eq!(
                metrics.value("hedgerow_upstream_attempts_total", &[]),
                dials as f64,
                "{caught} by {ip}"
            );
            let log = hedgerow.stderr.text();
            assert_eq!(
                log.matches("loop: a connection of our own").count(),
                dials,
                "{caught} by {ip}:\n{log}"
            );
            let after = hedgerow.open_files();
            assert!(after <= before + 2, "{before} files before, {after} after");
        }
    });
}

#[test]
fn an_agent_comes_from_the_pods_address_and_is_let_in() {
    // That is not loopback, where the port is.
    in_pod(async || {
        let hedgerow = start("{}").await;
        for ip in [IpAddr::from(POD), POD6.into()] {
            let direct = TcpStream::connect((ip, hedgerow.transparent.port())).await;
            assert!(direct.is_err(), "{ip}: the port is on loopback alone");
        }
        let mut agent = agent((TOOL, 9)).await;
        agent.send(get("a.test", "/")).await;
        assert_eq!(agent.read_response().await.json()["error"], "connect_failed");
    });
}
