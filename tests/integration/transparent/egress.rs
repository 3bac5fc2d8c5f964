//! The egress guard, for clients that bring address and name apart.

use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

use super::{OTHER, TOOL, agent, get, get_at, in_pod, launch, start, with_dns};
use crate::support::client::{End, Response};
use crate::support::dns::{Answer, Dns};
use crate::support::hedgerow::HedgerowProcess;
use crate::support::netns::ip;
use crate::support::pki::Pki;
use crate::support::upstream::{Reply, Upstream};

#[track_caller]
fn assert_denied(answer: &Response) {
    assert_eq!((answer.status, &answer.json()["error"]), (403, &"egress_denied".into()), "{answer:?}");
}

const GOOD_ALONE: &str = "egress: { default: deny, allow: [good.test] }";

#[test]
fn an_allowed_name_opens_only_addresses_that_it_leads_to() {
    in_pod(async || {
        let dns = Dns::start(&[
            ("good.test", Answer::addresses(&["10.78.0.9", "10.78.0.1"])),
            ("bad.test", Answer::addresses(&["10.78.0.1"])),
        ])
        .await;
        let policy = format!("{GOOD_ALONE}\nlimits: {{ header_timeout: 1500ms }}");
        let _hedgerow = start(&with_dns(&dns, &policy)).await;
        let good = Upstream::on(TOOL).answering(|_| Reply::ok("good")).await;
        let evil = Upstream::on(OTHER).port(good.address().port()).answering(|_| Reply::ok("evil")).await;

        assert_eq!(get_at(good.address(), "good.test").await.text(), "good");
        for (to, host) in [
            (&evil, "good.test"),
            (&evil, "10.78.0.1"),
            (&good, "bad.test"),
            (&good, "10.78.0.1"),
            (&good, "nowhere.test"),
        ] {
            assert_denied(&get_at(to.address(), host).await);
        }
        // What names no host, and what is no HTTP, is judged by its address.
        let mut old = agent(good.address()).await;
        old.send("GET / HTTP/1.0\r\n\r\n").await;
        assert_denied(&old.read_response().await);
        for hello in ["EHLO good.test\r\n", ""] {
            let mut other = agent(good.address()).await;
            other.send(hello).await;
            assert_eq!(other.ended().await, End::Reset);
        }
        assert_eq!((good.connections(), evil.connections()), (1, 0));
    });
}

#[test]
fn an_allowed_name_in_a_hello_opens_only_addresses_that_it_leads_to() {
    in_pod(async || {
        let pki = Pki::new();
        let dns = Dns::start(&[("good.test", Answer::addresses(&["10.78.0.1"]))]).await;
        let hedgerow = start(&with_dns(&dns, GOOD_ALONE)).await;
        let server = || pki.server(&["good.test", "bad.test", "10.78.0.1"]);
        let good = Upstream::on(TOOL).tls(server()).answering(|_| Reply::ok("good")).await;
        let port = good.address().port();
        let evil = Upstream::on(OTHER).port(port).tls(server()).answering(|_| Reply::ok("evil")).await;

        let inside = agent(good.address()).await.tls(&pki.connector(), "good.test").await;
        let told = || [hedgerow.stdout.text(), hedgerow.stderr.text()].concat();
        let mut inside = inside.unwrap_or_else(|error| panic!("{error}, and the proxy told: {}", told()));
        inside.send(get("good.test", "/")).await;
        assert_eq!(inside.read_response().await.text(), "good");
        for (to, name) in [(&evil, "good.test"), (&good, "bad.test"), (&good, "10.78.0.1")] {
            let refused = agent(to.address()).await.tls(&pki.connector(), name).await;
            assert!(refused.is_err(), "{name} at {}", to.address());
        }
        assert_eq!((good.connections(), evil.connections()), (1, 0));
    });
}

#[test]
fn a_client_that_hesitates_may_still_name_what_is_allowed() {
    // Where nothing but names is allowed, it was cut off before it had said its own.
    in_pod(async || {
        let pki = Pki::new();
        let dns = Dns::start(&[("good.test", Answer::addresses(&["10.78.0.1", "10.78.0.2"]))]).await;
        let _hedgerow = start(&with_dns(&dns, GOOD_ALONE)).await;
        let plain = Upstream::on(TOOL).answering(|_| Reply::ok("plain")).await;
        let tls = Upstream::on(OTHER).tls(pki.server(&["good.test"])).answering(|_| Reply::ok("TLS")).await;
        let mut to_plain = agent(plain.address()).await;
        let to_tls = agent(tls.address()).await;
        // Past the moment in which clients that speak first do so. Nothing tells when that is over.
        tokio::time::sleep(Duration::from_millis(400)).await;
        to_plain.send(get("good.test", "/")).await;
        assert_eq!(to_plain.read_response().await.text(), "plain");
        let mut to_tls = to_tls.tls(&pki.connector(), "good.test").await.unwrap();
        to_tls.send(get("good.test", "/")).await;
        assert_eq!(to_tls.read_response().await.text(), "TLS");
    });
}

#[test]
fn a_kept_connection_is_refused_once_the_name_leads_elsewhere() {
    in_pod(async || {
        let at = |address: &str| Answer::Addresses(vec![address.parse().unwrap()], 0);
        let dns = Dns::start(&[("good.test", at("10.78.0.1"))]).await;
        let _hedgerow = start(&with_dns(&dns, GOOD_ALONE)).await;
        let good = Upstream::on(TOOL).answering(|_| Reply::ok("good")).await;
        let mut agent = agent(good.address()).await;
        for _ in 0..2 {
            agent.send(get("good.test", "/")).await;
            assert_eq!(agent.read_response().await.text(), "good");
        }
        assert_eq!(good.connections(), 1);
        dns.set("good.test", at("10.78.0.2"));
        agent.send(get("good.test", "/")).await;
        assert_denied(&agent.read_response().await);
        assert_eq!(good.count(), 2);
    });
}

/// In clear text nothing proves whose address it is, so a client could have a key sent to a server of its own.
#[test]
fn what_a_policy_adds_for_a_name_goes_only_where_the_name_leads() {
    in_pod(async || {
        let dns = Dns::start(&[("good.test", Answer::addresses(&["10.78.0.1"]))]).await;
        for origin in ["http", "h2c"] {
            let stages =
                format!("origin: {origin}, rewrite: {{ headers: {{ set: {{ x-key: \"secret\" }} }} }}");
            let policy = format!("upstreams: {{ good: {{ hosts: [good.test], {stages} }} }}");
            let _hedgerow = start(&with_dns(&dns, &policy)).await;
            let evil = Upstream::on(OTHER).answering(|_| Reply::ok("evil")).await;
            assert_denied(&get_at(evil.address(), &format!("good.test:{}", evil.address().port())).await);
            assert_eq!(evil.connections(), 0);
            if origin == "http" {
                let good =
                    Upstream::on(TOOL).answering(|seen| Reply::ok(seen.header("x-key").unwrap())).await;
                let host = format!("good.test:{}", good.address().port());
                assert_eq!(get_at(good.address(), &host).await.text(), "secret");
            }
        }
    });
}

#[test]
fn private_and_metadata_addresses_are_refused_whatever_the_name() {
    in_pod(async || {
        let metadata = ["169.254.169.254", "fd00:ec2::254"].map(|ip| ip.parse::<IpAddr>().unwrap());
        ip("addr add 169.254.169.254/32 dev lo");
        ip("-6 addr add fd00:ec2::254/128 dev lo nodad");
        let dns = Dns::start(&[("public.test", Answer::addresses(&["93.184.215.14"]))]).await;
        for (policy, is_private_open) in [("", true), ("egress: { deny_private: true }", false)] {
            let open = HedgerowProcess::with(&with_dns(&dns, policy)).clients(&["192.0.2.0/24"]);
            let hedgerow = launch(open.transparent_on(Ipv6Addr::UNSPECIFIED)).await;
            for address in metadata.into_iter().chain([TOOL.into()]) {
                let tool = Upstream::on(address).answering(|_| Reply::ok("inside")).await;
                let mut other = agent(tool.address()).await;
                other.send("EHLO agent\r\n").await;
                let answer = get_at(tool.address(), "public.test").await;
                if address == TOOL && is_private_open {
                    assert_eq!(answer.text(), "inside");
                    continue;
                }
                assert_denied(&answer);
                assert_eq!(other.ended().await, End::Reset);
                assert_eq!(tool.connections(), 0, "{address}");
            }
            drop(hedgerow);
        }
    });
}
