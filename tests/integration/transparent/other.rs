//! What is neither HTTP nor TLS: bytes that pass, whoever begins.

use std::time::Duration;

use super::{TOOL, agent, get, in_pod, start};
use crate::support::client::End;
use crate::support::raw::RawPort;
use crate::support::upstream::Upstream;

#[test]
fn a_server_that_speaks_first_is_heard_although_its_client_is_silent() {
    in_pod(async || {
        let port = RawPort::on(TOOL).await;
        for policy in ["", "tls: { ca_dir: ca }\ndefaults: { intercept: true }"] {
            // The other time that a silent client has is out of reach, so that nothing but its silence brings
            // the connection.
            let hedgerow = start(&format!("limits: {{ header_timeout: 10m }}\n{policy}")).await;
            let mut agent = agent(port.address()).await;
            let mut server = port.accept().await;
            server.send("220 mail.test ESMTP\r\n").await;
            agent.expect(b"220 mail.test ESMTP\r\n").await;
            agent.send("EHLO agent\r\n").await;
            server.expect(b"EHLO agent\r\n").await;
            drop(hedgerow);
        }
    });
}

#[test]
fn an_unknown_protocol_is_copied_both_ways_and_half_closed() {
    in_pod(async || {
        let port = RawPort::on(TOOL).await;
        for policy in ["{}", "tls: { ca_dir: ca }\ndefaults: { intercept: true }"] {
            let hedgerow = start(policy).await;
            for hello in [
                "\x00\x01garbage",
                "EHLO agent\r\n",
                "GETX / HTTP/1.1\r\n\r\n",
                "\x16\x02no TLS",
                "CONNECT a.test:443 HTTP/1.1\r\n\r\n",
            ] {
                let mut agent = agent(port.address()).await;
                agent.send(hello).await;
                let mut server = port.accept().await;
                server.expect(hello.as_bytes()).await;
                agent.half_close().await;
                assert_eq!(server.ended().await, End::Closed);
                server.send("the answer comes after the end").await;
                server.half_close().await;
                agent.expect(b"the answer comes after the end").await;
                assert_eq!(agent.ended().await, End::Closed);
            }
            let labels = [("outcome", "tunnel")];
            hedgerow.until_metrics(|m| m.value("hedgerow_requests_total", &labels) == 5.0).await;
        }
    });
}

#[test]
fn a_server_that_greets_after_a_long_silence_has_a_tunnel_and_keeps_it() {
    in_pod(async || {
        let port = RawPort::on(TOOL).await;
        let _hedgerow = start("{}").await;
        let mut agent = agent(port.address()).await;
        let mut server = port.accept().await;
        // Well past the times in which clients begin. Nothing tells when those are over.
        tokio::time::sleep(Duration::from_secs(3)).await;
        server.send("220 late.test ready").await;
        agent.expect(b"220 late.test ready").await;
        let request = get("late.test", "/");
        agent.send(&request).await;
        server.expect(request.as_bytes()).await;
    });
}

#[test]
fn a_client_that_closes_without_a_word_is_connected_and_ends_cleanly() {
    in_pod(async || {
        let port = RawPort::on(TOOL).await;
        let hedgerow = start("{}").await;
        let probe = agent(port.address()).await;
        drop(probe);
        assert_eq!(port.accept().await.ended().await, End::Closed);
        // One that has nothing to say may still want to hear.
        let mut listener = agent(port.address()).await;
        listener.half_close().await;
        let mut server = port.accept().await;
        assert_eq!(server.ended().await, End::Closed);
        server.send("the time is now").await;
        drop(server);
        listener.expect(b"the time is now").await;
        listener.ended().await;
        let reset = agent(port.address()).await;
        reset.reset();
        let open = [("listener", "transparent")];
        hedgerow.until_metrics(|m| m.value("hedgerow_connections_open", &open) == 0.0).await;
    });
}

#[test]
fn what_cannot_be_reached_is_a_reset_as_it_nearly_is_without_a_proxy() {
    in_pod(async || {
        let (dead, _held) = Upstream::dead();
        let _hedgerow = start("{}").await;
        let to = (TOOL, dead.port());
        for hello in ["", "EHLO agent\r\n", "\x16\x03\x01\x00\x05hello"] {
            let mut agent = agent(to).await;
            agent.send(hello).await;
            assert_eq!(agent.ended().await, End::Reset, "{hello:?}");
        }
        assert_eq!(super::get_at(to.into(), "a.test").await.json()["error"], "connect_failed");
    });
}
