//! The support proves itself first: agent and fake upstream speak without a proxy between them.

use std::time::Duration;

use hickory_resolver::TokioResolver;
use hickory_resolver::config::{NameServerConfig, ResolverConfig};
use hickory_resolver::net::runtime::TokioRuntimeProvider;

use crate::support::client::{self, Agent, End, absolute};
use crate::support::dns::{Answer, Dns};
use crate::support::h1::Framing;
use crate::support::pki::{self, Pki};
use crate::support::soon;
use crate::support::upstream::{Reply, Upstream, by_path, is_pattern, pattern, statuses};

#[tokio::test]
async fn a_request_is_recorded_byte_for_byte_and_answered_by_the_test() {
    let mut upstream = Upstream::start().await;
    let mut agent = Agent::connect(upstream.address()).await;
    agent
        .send("POST /a?b=%C3 HTTP/1.1\r\nhOsT: x\r\nX-Twice: 1\r\nx-twice: 2\r\nContent-Length: 3\r\n\r\nabc")
        .await;

    let mut exchange = upstream.next().await;
    assert_eq!((exchange.head.method.as_str(), exchange.head.target.as_str()), ("POST", "/a?b=%C3"));
    assert_eq!(exchange.head.headers.names(), ["hOsT", "X-Twice", "x-twice", "Content-Length"]);
    assert_eq!(exchange.head.headers.all("X-TWICE"), ["1", "2"]);
    assert_eq!(exchange.body().await, b"abc");
    exchange.respond(201, &[("X-Case", "Kept")], "made").await;

    let response = agent.read_response().await;
    assert_eq!((response.status, response.reason.as_str(), response.text()), (201, "Created", "made"));
    assert_eq!(response.headers.names(), ["X-Case", "Content-Length"]);
    assert!(response.complete);
    assert_eq!(upstream.requests()[0].body, b"abc");
}

#[tokio::test]
async fn a_kept_connection_carries_the_next_request_also_past_an_unread_body() {
    let mut upstream = Upstream::start().await;
    let mut agent = Agent::connect(upstream.address()).await;
    for _ in 0..2 {
        agent.send(absolute("PUT", "http://x/", &[], b"not read")).await;
        upstream.next().await.respond(204, &[], "").await;
        assert_eq!(agent.read_response().await.status, 204);
    }
    assert_eq!((upstream.count(), upstream.connections()), (2, 1));
    drop(agent);
    upstream.until(|tally| tally.open == 0).await;
    assert_eq!(upstream.aborted(), 0);
}

#[tokio::test]
async fn chunks_arrive_one_by_one_in_both_directions() {
    let mut upstream = Upstream::start().await;
    let mut agent = Agent::connect(upstream.address()).await;
    agent
        .send("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n0\r\nT: 1\r\n\r\n")
        .await;
    let mut exchange = upstream.next().await;
    let body = exchange.try_body().await.unwrap();
    assert_eq!((body.bytes.as_slice(), body.trailers.get("t")), (&b"abc"[..], Some("1")));

    exchange.start_chunks(200, &[]).await;
    assert_eq!(agent.read_head().await.status, 200);
    for chunk in ["one", "two"] {
        exchange.chunk(chunk).await;
        assert_eq!(agent.read_chunk().await.unwrap(), chunk.as_bytes());
    }
    exchange.end().await;
    assert_eq!(agent.read_chunk().await.unwrap(), b"");
}

#[tokio::test]
async fn a_cut_body_is_told_from_a_complete_one_in_every_framing() {
    let upstream = Upstream::answering(by_path(&[
        ("/length", Reply::ok("0123456789").cut(4)),
        ("/drip", Reply::ok("0123456789").drip(5, Duration::from_millis(1))),
    ]))
    .await;
    let cut = Agent::connect(upstream.address()).await.get("http://x/length").await;
    assert_eq!((cut.text(), cut.complete, cut.framing), ("0123", false, Framing::Length(10)));
    let dripped = Agent::connect(upstream.address()).await.get("http://x/drip").await;
    assert_eq!((dripped.text(), dripped.complete, dripped.framing), ("0123456789", true, Framing::Chunked));

    let mut upstream = Upstream::start().await;
    let mut agent = Agent::connect(upstream.address()).await;
    agent.send(absolute("GET", "http://x/", &[], b"")).await;
    let mut exchange = upstream.next().await;
    exchange.start_chunks(200, &[]).await;
    exchange.chunk("abc").await;
    exchange.close().await;
    let cut = agent.read_response().await;
    assert_eq!((cut.text(), cut.complete), ("abc", false));
}

#[tokio::test]
async fn fin_and_rst_are_told_apart_by_both_sides() {
    let mut upstream = Upstream::start().await;
    for reset in [false, true] {
        let mut agent = Agent::connect(upstream.address()).await;
        agent.send(absolute("GET", "http://x/", &[], b"")).await;
        let exchange = upstream.next().await;
        if reset {
            exchange.reset()
        } else {
            exchange.close().await
        }
        assert_eq!(agent.ended().await, if reset { End::Reset } else { End::Closed });
    }
}

#[tokio::test]
async fn a_peer_that_leaves_counts_as_aborted_however_it_goes() {
    let mut upstream = Upstream::start().await;
    for aborted in 1..=2 {
        let mut agent = Agent::connect(upstream.address()).await;
        agent.send(absolute("GET", "http://x/", &[], b"")).await;
        let exchange = upstream.next().await;
        assert_eq!(upstream.tally().in_flight, 1);
        if aborted == 1 {
            drop(agent)
        } else {
            agent.reset()
        }
        exchange.gone().await;
        upstream.until(|tally| tally.aborted == aborted && tally.in_flight == 0 && tally.open == 0).await;
    }
    let mut agent = Agent::connect(upstream.address()).await;
    agent.send(absolute("GET", "http://x/", &[], b"")).await;
    upstream.next().await.hold();
    drop(agent);
    upstream.until(|tally| tally.aborted == 3).await;
}

#[tokio::test]
async fn a_script_counts_requests_by_path_and_the_most_at_once() {
    let upstream = Upstream::answering(|seen| match seen.path() {
        "/slow" => Reply::ok("slow").after(Duration::from_secs(1)),
        _ => Reply::hang(),
    })
    .await;
    let urls = vec!["http://x/slow?q=1".to_owned(), "http://x/slow".to_owned(), "http://x/slow".to_owned()];
    let answers = client::get_all(upstream.address(), &urls).await;
    assert!(answers.iter().all(|answer| answer.text() == "slow"));
    assert_eq!((upstream.count_of("/slow"), upstream.max_in_flight(), upstream.aborted()), (3, 3, 0));

    let mut agent = Agent::connect(upstream.address()).await;
    agent.send(absolute("GET", "http://x/hang", &[], b"")).await;
    upstream.until(|tally| tally.requests == 4).await;
    drop(agent);
    upstream.until(|tally| tally.aborted == 1).await;
    upstream.gets_nothing_more(Duration::from_millis(20)).await;
}

#[tokio::test]
async fn a_sequence_of_statuses_stays_at_its_last() {
    let upstream = Upstream::answering(statuses(&[503, 200])).await;
    let mut agent = Agent::connect(upstream.address()).await;
    let mut got = Vec::new();
    for _ in 0..3 {
        got.push(agent.get("http://x/").await.status);
    }
    assert_eq!(got, [503, 200, 200]);
}

#[tokio::test]
async fn a_tunnel_carries_bytes_and_half_closes() {
    let mut upstream = Upstream::start().await;
    let mut agent = Agent::connect(upstream.address()).await;
    agent.send("CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\nearly").await;
    let mut exchange = upstream.next().await;
    exchange.head_only(200, &[]).await;
    let mut tunnel = exchange.tunnel();
    tunnel.expect(b"early").await;
    assert_eq!(agent.read_response_to("CONNECT").await.status, 200);
    tunnel.send(b"down").await;
    agent.expect(b"down").await;
    agent.half_close().await;
    assert_eq!(tunnel.rest().await.unwrap(), b"");
    tunnel.send(b"last").await;
    agent.expect(b"last").await;
    tunnel.half_close().await;
    assert_eq!(agent.ended().await, End::Closed);
}

#[tokio::test]
async fn interim_answers_come_before_the_final_one() {
    let mut upstream = Upstream::start().await;
    let mut agent = Agent::connect(upstream.address()).await;
    agent.send(absolute("GET", "http://x/", &[], b"")).await;
    let mut exchange = upstream.next().await;
    exchange.head_only(103, &[("Link", "</a>")]).await;
    exchange.respond(200, &[], "").await;
    let response = agent.read_response().await;
    assert_eq!(response.interims.iter().map(|head| head.status).collect::<Vec<_>>(), [103]);
    assert_eq!(response.status, 200);
}

#[tokio::test]
async fn wrong_framing_is_an_error_and_not_a_guess() {
    for head in [
        "GET / HTTP/1.1\nHost: x\n\n",
        "POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\nx",
        "POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "GET / HTTP/1.1\r\nbad name: x\r\n\r\n",
    ] {
        let upstream = Upstream::answering(|_| Reply::ok("taken")).await;
        let mut agent = Agent::connect(upstream.address()).await;
        agent.send(head).await;
        assert_eq!(agent.read_response().await.status, 400, "{head:?}");
        assert_eq!(upstream.count(), 0);
    }
}

#[tokio::test]
async fn tls_is_spoken_to_those_who_trust_the_authority_alone() {
    let pki = Pki::new();
    let upstream =
        Upstream::on([127, 0, 0, 1]).tls(pki.server(&["localhost"])).answering(|_| Reply::ok("in TLS")).await;

    let agent = Agent::connect(upstream.address()).await;
    let mut agent = agent.tls(&pki.connector(), "localhost").await.unwrap();
    assert_eq!(agent.get("http://localhost/").await.text(), "in TLS");
    assert!(agent.peer_certificate().is_some());

    let stranger = pki::connector_trusting_pem(&std::fs::read(Pki::new().ca_file()).unwrap());
    let refused = Agent::connect(upstream.address()).await.tls(&stranger, "localhost").await;
    assert!(refused.is_err());
    upstream.until(|tally| tally.handshakes_failed == 1).await;
}

#[tokio::test]
async fn a_client_certificate_is_demanded_where_the_test_says_so() {
    let pki = Pki::new();
    let acceptor = pki.server_demanding_client(&["localhost"]);
    let upstream = Upstream::on([127, 0, 0, 1]).tls(acceptor).answering(|_| Reply::ok("")).await;
    let agent = Agent::connect(upstream.address()).await;
    // In TLS 1.3 the client learns of it with its first read.
    if let Ok(mut agent) = agent.tls(&pki.connector(), "localhost").await {
        agent.send(absolute("GET", "http://localhost/", &[], b"")).await;
        assert!(soon(agent.try_response("GET")).await.is_err());
    }
    upstream.until(|tally| tally.handshakes_failed == 1).await;
}

#[tokio::test]
async fn nobody_listens_at_a_dead_address_and_a_stopped_upstream() {
    let (address, _keeps_it_dead) = Upstream::dead();
    assert!(tokio::net::TcpStream::connect(address).await.is_err());
    let mut upstream = Upstream::answering(|_| Reply::ok("")).await;
    let mut before = Agent::connect(upstream.address()).await;
    assert_eq!(before.get("http://x/").await.status, 200);
    upstream.stop_listening().await;
    assert!(tokio::net::TcpStream::connect(upstream.address()).await.is_err());
    assert_eq!(before.get("http://x/").await.status, 200);
}

#[tokio::test]
async fn the_name_server_answers_counts_and_stays_mute() {
    let dns = Dns::start(&[
        ("two.test", Answer::addresses(&["127.0.0.2", "127.0.0.3", "::1"])),
        ("mute.test", Answer::Mute),
    ])
    .await;
    let resolver = resolver(&dns);
    let mut found: Vec<_> =
        resolver.lookup_ip("two.test.").await.unwrap().iter().map(|ip| ip.to_string()).collect();
    found.sort();
    assert_eq!(found, ["127.0.0.2", "127.0.0.3"]);
    assert!(resolver.lookup_ip("unknown.test.").await.unwrap_err().is_nx_domain());

    let asking = tokio::spawn(async move { resolver.lookup_ip("mute.test.").await.is_err() });
    dns.until_asked("mute.test", 1).await;
    asking.abort();
    assert_eq!(dns.queries("two.test"), 1);
}

/// Asks for A alone, so that the count of queries is exact.
fn resolver(dns: &Dns) -> TokioResolver {
    let mut server = NameServerConfig::udp(dns.address().ip());
    server.connections[0].port = dns.address().port();
    let config = ResolverConfig::from_parts(None, vec![], vec![server]);
    let mut builder = TokioResolver::builder_with_config(config, TokioRuntimeProvider::default());
    builder.options_mut().ip_strategy = hickory_resolver::config::LookupIpStrategy::Ipv4Only;
    builder.build().expect("a valid configuration")
}

#[test]
fn a_pattern_tells_lost_and_doubled_bytes() {
    let bytes = pattern(1000, 200_000);
    assert!(is_pattern(&bytes, 1000));
    assert!(!is_pattern(&bytes, 1001));
    let mut lost = bytes.clone();
    lost.remove(150_000);
    assert!(!is_pattern(&lost, 1000));
}

#[tokio::test]
async fn an_upstream_tells_how_its_tls_began() {
    let pki = Pki::new();
    let upstream =
        Upstream::on([127, 0, 0, 1]).tls(pki.server(&["localhost"])).answering(|_| Reply::ok("")).await;
    let connectors = [pki.connector(), pki.agent_tls().without_sni().offering(&[]).connector()];
    for connector in [&connectors[0], &connectors[0], &connectors[1]] {
        let agent = Agent::connect(upstream.address()).await;
        let mut agent = agent.tls(connector, "localhost").await.unwrap();
        assert_eq!(agent.get_at("localhost", "/").await.status, 200);
    }
    let seen = upstream.handshakes();
    let text = |value: &Option<String>| value.clone().unwrap_or_default();
    let seen: Vec<_> =
        seen.iter().map(|own| (text(&own.server_name), text(&own.protocol), own.is_resumed)).collect();
    let named = |is_resumed| ("localhost".to_owned(), "http/1.1".to_owned(), is_resumed);
    assert_eq!(seen, [named(false), named(true), (String::new(), String::new(), false)]);
}
