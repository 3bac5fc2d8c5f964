//! The stages of the journey hold here as they do everywhere.

use std::time::Duration;

use rustix::process::Signal;
use tokio::time::Instant;

use super::{OTHER, TOOL, agent, get, get_at, in_pod, start, with_dns};
use crate::support::client::End;
use crate::support::dns::{Answer, Dns};
use crate::support::policy::{TOOL as LABEL, tool};
use crate::support::raw::RawPort;
use crate::support::upstream::{Reply, Upstream, statuses};

#[test]
fn the_deadline_of_the_host_ends_a_call() {
    in_pod(async || {
        let _hedgerow = start(&tool("a.test", "deadline: { default: 1500ms }, hedge: off")).await;
        let mut tool = Upstream::on(TOOL).start().await;
        let began = Instant::now();
        let to = tool.address();
        let (answer, exchange) = tokio::join!(get_at(to, "a.test"), tool.next());
        assert_eq!((answer.status, &answer.json()["error"]), (504, &"deadline_exceeded".into()));
        // Less a reserve of 50 ms.
        assert!(began.elapsed() >= Duration::from_millis(1400), "{:?}", began.elapsed());
        exchange.gone().await;
    });
}

#[test]
fn the_bulkhead_of_the_host_refuses_calls_and_tunnels() {
    in_pod(async || {
        let policy = "defaults: { hedge: off, bulkhead: { max_concurrent: 1, max_queue: 0 } }";
        let hedgerow = start(policy).await;
        let mut tool = Upstream::on(TOOL).start().await;
        let mut first = agent(tool.address()).await;
        first.send(get("a.test", "/")).await;
        let held = tool.next().await;
        let refused = get_at(tool.address(), "a.test").await;
        assert_eq!((refused.status, &refused.json()["error"]), (503, &"bulkhead_full".into()));
        held.respond(200, &[], "").await;
        assert_eq!(first.read_response().await.status, 200);

        let port = RawPort::on(OTHER).await;
        let mut open = agent(port.address()).await;
        open.send("EHLO agent\r\n").await;
        let mut server = port.accept().await;
        let mut refused = agent(port.address()).await;
        refused.send("EHLO agent\r\n").await;
        assert_eq!(refused.ended().await, End::Reset);
        // Its place is free again once the first is over.
        open.half_close().await;
        server.expect(b"EHLO agent\r\n").await;
        server.half_close().await;
        open.ended().await;
        hedgerow.until_metrics(|m| m.value("hedgerow_bulkhead_in_flight", &[]) == 0.0).await;
        let mut next = agent(port.address()).await;
        next.send("EHLO next\r\n").await;
        port.accept().await.expect(b"EHLO next\r\n").await;
    });
}

#[test]
fn the_breaker_of_the_host_opens() {
    in_pod(async || {
        let hedgerow = start(&tool("a.test", "breaker: { consecutive_failures: 2 }")).await;
        let tool = Upstream::on(TOOL).answering(statuses(&[500])).await;
        for _ in 0..2 {
            assert_eq!(get_at(tool.address(), "a.test").await.text(), "500");
        }
        let refused = get_at(tool.address(), "a.test").await;
        assert_eq!((refused.status, &refused.json()["error"]), (503, &"circuit_open".into()));
        assert_eq!(tool.count(), 2);
        assert_eq!(get_at(tool.address(), "b.test").await.status, 500, "another host at the same address");
        let open = [LABEL, ("state", "open")];
        assert_eq!(hedgerow.metrics().await.value("hedgerow_breaker_state", &open), 1.0);
    });
}

#[test]
fn sigterm_serves_what_comes_and_cuts_what_does_not_end() {
    in_pod(async || {
        let mut hedgerow = start("defaults: { hedge: off }\ndrain: { quiet: 100ms, max: 3s }").await;
        let mut tool = Upstream::on(TOOL).start().await;
        let port = RawPort::on(OTHER).await;
        let mut tunnel = agent(port.address()).await;
        tunnel.send("EHLO agent\r\n").await;
        let mut server = port.accept().await;
        server.expect(b"EHLO agent\r\n").await;
        let mut calling = agent(tool.address()).await;
        calling.send(get("a.test", "/")).await;
        let held = tool.next().await;

        hedgerow.signal(Signal::TERM);
        hedgerow.until_status(|status| status["draining"] == true).await;
        held.respond(200, &[], "finished").await;
        let answer = calling.read_response().await;
        assert_eq!((answer.text(), answer.header("connection")), ("finished", Some("close")));
        let to = tool.address();
        let (late, ()) = tokio::join!(get_at(to, "a.test"), async {
            tool.next().await.respond(200, &[], "late").await;
        });
        assert_eq!((late.text(), late.header("connection")), ("late", Some("close")));
        tunnel.ended().await;
        server.ended().await;
        assert_eq!(hedgerow.wait().await, 0);
    });
}

/// The address that the client brings along is the primary's: the backup was looked for there.
#[test]
fn a_backup_is_dialled_at_its_own_address_and_told_its_own_name() {
    in_pod(async || {
        let tool = Upstream::on(TOOL).answering(|_| Reply::status(503)).await;
        let spare = Upstream::on(OTHER).port(tool.address().port()).answering(|_| Reply::ok("spare")).await;
        let dns = Dns::start(&[("spare.test", Answer::addresses(&["10.78.0.2"]))]).await;
        let host = format!("spare.test:{}", spare.address().port());
        let policy = format!(
            "defaults: {{ hedge: off }}\nupstreams: {{ \
             tool: {{ hosts: [a.test], fallback: [{{ upstream: spare }}] }}, spare: {{ hosts: [\"{host}\"] }} }}"
        );
        let _hedgerow = start(&with_dns(&dns, &policy)).await;
        let answer = get_at(tool.address(), "a.test").await;
        assert_eq!((answer.text(), answer.header("x-hedgerow-degraded")), ("spare", Some("backup")));
        assert_eq!(spare.requests()[0].header("host"), Some(&*host));
        assert_eq!(tool.count(), 1);
    });
}

/// A range is for clients that name an address, or nothing at all.
#[test]
fn what_is_redirected_may_be_direct_by_its_address() {
    in_pod(async || {
        let policy = "direct: [10.78.0.0/16]\n\
                      defaults: { hedge: off, bulkhead: { max_concurrent: 1, max_queue: 0 } }";
        let hedgerow = start(policy).await;
        let tool = Upstream::on(TOOL).answering(|_| Reply::ok("")).await;
        for (host, label) in [("10.78.0.1", "direct"), ("a.test", "default")] {
            assert_eq!(get_at(tool.address(), host).await.status, 200);
            let labels = [("upstream", label), ("code", "200"), ("outcome", "answered")];
            hedgerow.until_metrics(|m| m.value("hedgerow_requests_total", &labels) == 1.0).await;
        }
        // Both at once, for which there is one permit.
        let port = RawPort::on(OTHER).await;
        let mut open = Vec::new();
        for _ in 0..2 {
            let mut client = agent(port.address()).await;
            client.send("EHLO agent\r\n").await;
            let mut server = port.accept().await;
            server.expect(b"EHLO agent\r\n").await;
            open.push((client, server));
        }
        drop(open);
        let tunnels = [("upstream", "direct"), ("outcome", "tunnel")];
        hedgerow.until_metrics(|m| m.value("hedgerow_requests_total", &tunnels) == 2.0).await;
    });
}
