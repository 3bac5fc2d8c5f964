//! TLS: the name in the hello selects the policy, and what becomes of the bytes is the policy's to say.

use std::fs;

use super::{OTHER, TOOL, agent, get, in_pod, start, with_dns};
use crate::support::dns::{Answer, Dns};
use crate::support::hedgerow::HedgerowProcess;
use crate::support::pki::{Pki, connector_trusting_pem};
use crate::support::raw::RawPort;
use crate::support::upstream::{Reply, Upstream};
use tokio_rustls::TlsConnector;

/// What an agent trusts that knows of the pod's CA.
fn trusting_the_pod(hedgerow: &HedgerowProcess) -> TlsConnector {
    let ca =
        fs::read(hedgerow.policy.folder().join("ca/ca.pem")).expect("the CA is there before the port is");
    connector_trusting_pem(&ca)
}

fn intercepting(pki: &Pki, rest: &str) -> String {
    format!("tls: {{ ca_dir: ca, ca_file: \"{}\" }}\n{rest}", pki.ca_file().display())
}

#[test]
fn tls_is_tunnelled_untouched_to_the_address_under_the_policy_of_its_name() {
    in_pod(async || {
        let pki = Pki::new();
        let leaf = pki.leaf(&["tool.test"]);
        let tool = Upstream::on(TOOL)
            .tls(crate::support::pki::acceptor(&leaf))
            .answering(|_| Reply::ok("in TLS"))
            .await;
        let dns = Dns::start(&[("tool.test", Answer::addresses(&["10.78.0.2"]))]).await;
        let hedgerow = start(&with_dns(&dns, "upstreams: { quotes: { hosts: [tool.test] } }")).await;
        let mut agent = agent(tool.address()).await.tls(&pki.connector(), "tool.test").await.unwrap();
        assert_eq!(agent.peer_certificate(), Some(leaf.der().to_vec()), "the upstream's own certificate");
        for _ in 0..3 {
            agent.send(get("tool.test", "/")).await;
            assert_eq!(agent.read_response().await.text(), "in TLS");
        }
        assert_eq!(tool.connections(), 1);
        drop(agent);
        let labels = [("upstream", "quotes"), ("outcome", "tunnel")];
        hedgerow.until_metrics(|m| m.value("hedgerow_requests_total", &labels) == 1.0).await;
    });
}

#[test]
fn tls_of_an_intercepted_host_ends_here_and_the_address_must_prove_to_be_that_host() {
    in_pod(async || {
        let pki = Pki::new();
        let tool =
            Upstream::on(TOOL).tls(pki.server(&["tool.test"])).answering(|_| Reply::ok("in TLS")).await;
        let at = tool.address();
        let evil = Upstream::on(OTHER)
            .port(at.port())
            .tls(pki.server(&["evil.test"]))
            .answering(|_| Reply::ok("evil"))
            .await;
        let dns = Dns::start(&[]).await;
        let policy = intercepting(&pki, "upstreams: { quotes: { hosts: [tool.test], intercept: true } }");
        let hedgerow = start(&with_dns(&dns, &policy)).await;
        let trust = trusting_the_pod(&hedgerow);

        let mut inside = agent(at).await.tls(&trust, "tool.test").await.expect("a leaf for the name");
        for _ in 0..3 {
            inside.send(get(&format!("tool.test:{}", at.port()), "/x")).await;
            assert_eq!(inside.read_response().await.text(), "in TLS");
        }
        assert_eq!((tool.count_of("/x"), tool.connections()), (3, 1));
        inside.send(get("other.test", "/")).await;
        assert_eq!(inside.read_response().await.status, 421);

        let mut inside =
            agent(evil.address()).await.tls(&trust, "tool.test").await.expect("a leaf for the name");
        inside.send(get(&format!("tool.test:{}", at.port()), "/")).await;
        assert_eq!(inside.read_response().await.json()["error"], "certificate_invalid");
        assert_eq!(evil.count(), 0);
        let labels = [("upstream", "quotes"), ("code", "200")];
        hedgerow.until_metrics(|m| m.value("hedgerow_requests_total", &labels) == 3.0).await;
    });
}

#[test]
fn tls_without_a_name_is_for_the_address() {
    in_pod(async || {
        let pki = Pki::new();
        let server = || pki.server(&["10.78.0.1"]);
        let tool = Upstream::on(TOOL).tls(server()).answering(|_| Reply::ok("in TLS")).await;
        let at = tool.address();
        for intercept in [false, true] {
            let policy = intercepting(&pki, &format!("defaults: {{ intercept: {intercept} }}"));
            let hedgerow = start(&policy).await;
            let trust = if intercept { trusting_the_pod(&hedgerow) } else { pki.connector() };
            // An address is never sent as a server name (RFC 6066 section 3).
            let mut agent =
                agent(at).await.tls(&trust, "10.78.0.1").await.expect("a certificate for the address");
            agent.send(get(&at.to_string(), "/")).await;
            assert_eq!(agent.read_response().await.text(), "in TLS", "intercept: {intercept}");
        }
    });
}

#[test]
fn a_client_that_does_not_trust_the_pod_gets_through_to_the_address_the_next_time() {
    in_pod(async || {
        let pki = Pki::new();
        let tool =
            Upstream::on(TOOL).tls(pki.server(&["tool.test"])).answering(|_| Reply::ok("in TLS")).await;
        let policy = intercepting(&pki, "upstreams: { quotes: { hosts: [tool.test], intercept: true } }");
        let hedgerow = start(&policy).await;
        let declined = agent(tool.address()).await.tls(&pki.connector(), "tool.test").await;
        assert!(declined.is_err(), "the pod's CA is none of the client's");
        hedgerow.stderr.until(|line| line.contains("does not trust")).await;
        let mut agent = agent(tool.address()).await.tls(&pki.connector(), "tool.test").await.unwrap();
        agent.send(get("tool.test", "/")).await;
        assert_eq!(agent.read_response().await.text(), "in TLS");
    });
}

#[test]
fn a_hello_that_hesitates_is_intercepted_all_the_same() {
    in_pod(async || {
        let pki = Pki::new();
        let tool =
            Upstream::on(TOOL).tls(pki.server(&["tool.test"])).answering(|_| Reply::ok("in TLS")).await;
        let policy = intercepting(&pki, "upstreams: { quotes: { hosts: [tool.test], intercept: true } }");
        let hedgerow = start(&policy).await;
        let silent = agent(tool.address()).await;
        tool.until(|tally| tally.connections == 1).await;
        let mut agent =
            silent.tls(&trusting_the_pod(&hedgerow), "tool.test").await.expect("a leaf for the name");
        agent.send(get(&format!("tool.test:{}", tool.address().port()), "/")).await;
        assert_eq!(agent.read_response().await.text(), "in TLS");
    });
}

#[test]
fn half_a_hello_ends_cleanly() {
    in_pod(async || {
        let port = RawPort::on(TOOL).await;
        let hedgerow = start("limits: { header_timeout: 1500ms }").await;
        let half = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 and no more";
        // One that waits is dropped at the limit of a head; one that closes is the upstream's to judge.
        let mut waits = agent(port.address()).await;
        waits.send(half).await;
        waits.ended().await;
        let mut closes = agent(port.address()).await;
        closes.send(half).await;
        closes.half_close().await;
        let mut upstream = port.accept().await;
        upstream.expect(half).await;
        upstream.ended().await;
        drop(upstream);
        closes.ended().await;
        let open = [("listener", "transparent")];
        hedgerow.until_metrics(|m| m.value("hedgerow_connections_open", &open) == 0.0).await;
    });
}
