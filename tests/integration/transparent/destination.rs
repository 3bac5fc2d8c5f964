//! The address is where the client goes, the name is whose rules it meets.

use std::net::Ipv6Addr;

use tokio::process::Command;

use super::{OTHER, TOOL, TOOL6, agent, get, get_at, in_pod, launch, start, with_dns};
use crate::support::dns::{Answer, Dns};
use crate::support::hedgerow::HedgerowProcess;
use crate::support::netns::{Neighbour, rules};
use crate::support::soon;
use crate::support::upstream::{Reply, Upstream};

#[test]
fn the_original_address_is_dialled_and_the_host_field_selects_policy_and_label() {
    in_pod(async || {
        let tool = Upstream::on(TOOL).answering(|_| Reply::ok("meant")).await;
        let at = tool.address();
        let named = Upstream::on(OTHER).port(at.port()).answering(|_| Reply::ok("named")).await;
        let dns = Dns::start(&[("elsewhere.test", Answer::addresses(&["10.78.0.2"]))]).await;
        let policy = "upstreams: { quotes: { hosts: [elsewhere.test] }, news: { hosts: [nowhere.test] } }";
        let hedgerow = start(&with_dns(&dns, policy)).await;
        let mut agent = agent(at).await;
        // Ports in `Host` are the client's own notion as well.
        for host in ["elsewhere.test", "ELSEWHERE.test.", "nowhere.test", "nowhere.test:9", "unknown.test"] {
            agent.send(get(host, "/a%2Fb?q")).await;
            let answer = agent.read_response().await;
            assert_eq!((answer.status, answer.text()), (200, "meant"), "{host}");
            let seen = tool.requests().pop().unwrap();
            assert_eq!((seen.head.target.as_str(), seen.header("host")), ("/a%2Fb?q", Some(host)));
            assert_eq!(seen.header("via"), None, "the client does not know that there is a proxy");
        }
        assert_eq!(named.connections(), 0);
        for (upstream, count) in [("quotes", 2.0), ("news", 2.0), ("default", 1.0)] {
            let labels = [("upstream", upstream), ("code", "200")];
            hedgerow.until_metrics(|m| m.value("hedgerow_requests_total", &labels) == count).await;
        }
        let open = [("listener", "transparent")];
        assert_eq!(hedgerow.metrics().await.value("hedgerow_connections_open", &open), 1.0);
        drop(agent);
        hedgerow.until_metrics(|m| m.value("hedgerow_connections_open", &open) == 0.0).await;
    });
}

#[test]
fn an_ipv6_destination_is_dialled() {
    in_pod(async || {
        let tool = Upstream::on(TOOL6).answering(|_| Reply::ok("six")).await;
        let _hedgerow = launch(HedgerowProcess::with("{}").transparent_on(Ipv6Addr::LOCALHOST)).await;
        assert_eq!(get_at(tool.address(), "nowhere.test").await.text(), "six");
        assert_eq!(tool.requests()[0].header("host"), Some("nowhere.test"));
    });
}

#[test]
fn a_port_that_is_open_to_both_families_serves_both() {
    // IPv4 clients come in mapped form there, and their destination is asked for in another way.
    in_pod(async || {
        let four = Upstream::on(TOOL).answering(|_| Reply::ok("four")).await;
        let six = Upstream::on(TOOL6).answering(|_| Reply::ok("six")).await;
        let open = HedgerowProcess::with("egress: { deny: [10.78.0.2] }").clients(&["192.0.2.0/24"]);
        let _hedgerow = launch(open.transparent_on(Ipv6Addr::UNSPECIFIED)).await;
        assert_eq!(get_at(four.address(), "a.test").await.text(), "four");
        assert_eq!(get_at(six.address(), "a.test").await.text(), "six");
        let denied = (OTHER, four.address().port()).into();
        assert_eq!(get_at(denied, "a.test").await.json()["error"], "egress_denied");
    });
}

#[test]
fn a_request_that_names_no_host_goes_to_the_address() {
    in_pod(async || {
        let tool = Upstream::on(TOOL).answering(|_| Reply::ok("old")).await;
        let at = tool.address();
        let hedgerow = start(&format!("upstreams: {{ old: {{ hosts: [\"{}\"] }} }}", at.ip())).await;
        let mut agent = agent(at).await;
        agent.send("GET /x HTTP/1.0\r\n\r\n").await;
        let answer = agent.read_response().await;
        assert_eq!((answer.status, answer.text()), (200, "old"));
        agent.ended().await;
        let labels = [("upstream", "old"), ("code", "200")];
        hedgerow.until_metrics(|m| m.value("hedgerow_requests_total", &labels) == 1.0).await;
    });
}

#[test]
fn a_client_that_hesitates_meets_the_policy_of_its_host_all_the_same() {
    // After a moment of silence it is connected, in case that the server speaks first.
    in_pod(async || {
        let tool = Upstream::on(TOOL).answering(|_| Reply::ok("served")).await;
        let hedgerow = start("upstreams: { quotes: { hosts: [quotes.test] } }").await;
        for said in ["", "G", "GET"] {
            let connections = tool.connections();
            let mut agent = agent(tool.address()).await;
            agent.send(said).await;
            tool.until(|tally| tally.connections > connections).await;
            agent.send(&get("quotes.test", "/")[said.len()..]).await;
            assert_eq!(agent.read_response().await.text(), "served");
        }
        let labels = [("upstream", "quotes"), ("outcome", "answered")];
        hedgerow.until_metrics(|m| m.value("hedgerow_requests_total", &labels) == 3.0).await;
        assert_eq!(hedgerow.metrics().await.value("hedgerow_requests_total", &[]), 3.0);
    });
}

#[test]
fn an_endpoint_is_dialled_instead_of_the_address() {
    in_pod(async || {
        let endpoint = Upstream::answering(|_| Reply::ok("endpoint")).await;
        let tool = Upstream::on(TOOL).answering(|_| Reply::ok("meant")).await;
        let to = endpoint.address();
        let _hedgerow =
            start(&format!("upstreams: {{ a: {{ hosts: [a.test], endpoint: \"http://{to}\" }} }}")).await;
        assert_eq!(get_at(tool.address(), "a.test").await.text(), "endpoint");
        assert_eq!(endpoint.requests()[0].header("host"), Some(to.to_string().as_str()));
        assert_eq!(get_at(tool.address(), "b.test").await.text(), "meant");
    });
}

#[test]
fn a_hedge_to_a_backup_goes_where_the_backup_is() {
    in_pod(async || {
        let mut tool = Upstream::on(TOOL).start().await;
        let backup = Upstream::on(OTHER).answering(|_| Reply::ok("backup")).await;
        let to = backup.address();
        let policy = format!(
            "upstreams:
               a: {{ hosts: [a.test], hedge: {{ after: 20ms, to: b }} }}
               b: {{ endpoint: \"http://{to}\" }}"
        );
        let _hedgerow = start(&policy).await;
        let at = tool.address();
        let (answer, primary) = tokio::join!(get_at(at, "a.test"), tool.next());
        assert_eq!(answer.text(), "backup");
        assert_eq!(backup.requests()[0].header("host"), Some(to.to_string().as_str()));
        primary.gone().await;
    });
}

#[test]
fn a_hedge_stays_at_the_address() {
    in_pod(async || {
        let mut tool = Upstream::on(TOOL).start().await;
        let dns = Dns::start(&[("a.test", Answer::addresses(&["10.78.0.2", "10.78.0.1"]))]).await;
        let _hedgerow = start(&with_dns(&dns, "defaults: { hedge: { after: 20ms } }")).await;
        let to = tool.address();
        let calls = async {
            let primary = tool.next().await;
            let hedge = tool.next().await;
            assert_ne!(primary.connection, hedge.connection);
            hedge.respond(200, &[], "hedge").await;
            primary.gone().await;
        };
        assert_eq!(tokio::join!(get_at(to, "a.test"), calls).0.text(), "hedge");
    });
}

#[test]
fn a_neighbour_is_served_if_listen_clients_lets_it_in() {
    // Connections from outside that are redirected as they arrive.
    in_pod(async || {
        let neighbour = Neighbour::new(["10.90.0.1/24", "fd90::1/64"], ["10.90.0.2/24", "fd90::2/64"]);
        let fetch = async |url: String| {
            let mut curl = Command::from(neighbour.command("curl"));
            curl.args(["-sS", "--noproxy", "*", "--max-time", "5", "-w", "|%{http_code}", &url]);
            let output = soon(curl.output()).await.expect("curl can be started");
            String::from_utf8_lossy(&output.stdout).into_owned()
        };
        for (clients, is_let_in) in [("10.90.0.0/24", true), ("192.0.2.0/24", false)] {
            let open = HedgerowProcess::with("{}").clients(&[clients, "fd90::/64"]);
            let hedgerow = launch(open.transparent_on(Ipv6Addr::UNSPECIFIED)).await;
            let port = hedgerow.transparent.port();
            let four = Upstream::on(TOOL).answering(|_| Reply::ok("four")).await;
            let six = Upstream::on(TOOL6).answering(|_| Reply::ok("six")).await;
            rules(&format!(
                "table inet gate {{}}
                 delete table inet gate
                 table inet gate {{
                   chain input {{
                     type nat hook prerouting priority -100; policy accept;
                     iifname cable ip daddr {TOOL} meta l4proto tcp redirect to :{port}
                     iifname cable ip6 daddr {TOOL6} meta l4proto tcp redirect to :{port}
                   }}
                 }}"
            ));
            let answer = fetch(four.url("/")).await;
            assert_eq!(answer, if is_let_in { "four|200" } else { "|000" });
            assert_eq!(fetch(six.url("/")).await, "six|200");
            // The port itself, without a redirect, is no way in for anybody.
            assert_eq!(fetch(format!("http://10.90.0.1:{port}/")).await, "|000");
        }
    });
}
