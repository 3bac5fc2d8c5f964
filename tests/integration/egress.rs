//! The egress guard on the wire: whatever the name says, the address that is dialled decides.

use crate::support::client::{End, Response};
use crate::support::dns::{Answer, Dns};
use crate::support::hedgerow::HedgerowProcess;
use crate::support::http2::Http2Agent;
use crate::support::pki::Pki;
use crate::support::raw::RawPort;
use crate::support::upstream::{Reply, Upstream};

fn with_dns(dns: &Dns, rest: &str) -> String {
    format!("dns: {{ servers: [\"{}\"] }}\n{rest}", dns.address())
}

#[track_caller]
fn assert_denied(answer: &Response, proxy_status: &str) {
    assert_eq!((answer.status, &answer.json()["error"]), (403, &"egress_denied".into()), "{answer:?}");
    assert!(answer.header("proxy-status").is_some_and(|value| value.contains(proxy_status)), "{answer:?}");
    assert_eq!(answer.header("x-should-retry"), Some("false"));
}

#[tokio::test]
async fn c019_the_address_that_is_dialled_is_checked_in_every_form() {
    // Only hosts written as addresses were checked, and a name could point inside.
    let forbidden = Upstream::on([127, 0, 0, 3]).answering(|_| Reply::ok("inside")).await;
    let port = forbidden.address().port();
    let dns = Dns::start(&[
        ("plain.test", Answer::Addresses(vec!["127.0.0.3".parse().unwrap()], 0)),
        ("mapped.test", Answer::Addresses(vec!["::ffff:127.0.0.3".parse().unwrap()], 0)),
        ("metadata.test", Answer::addresses(&["169.254.169.254"])),
        ("linklocal.test", Answer::addresses(&["fe80::1"])),
        // Nobody listens at the first, which is allowed: the race must not go on to the second.
        ("mixed.test", Answer::addresses(&["127.0.0.2", "127.0.0.3"])),
    ])
    .await;
    let hedgerow = HedgerowProcess::start(&with_dns(&dns, "egress: { deny: [127.0.0.3/32] }")).await;
    for host in [
        "127.0.0.3",
        "[::ffff:127.0.0.3]",
        "[64:ff9b::7f00:3]",
        "plain.test",
        "mapped.test",
        "metadata.test",
        "linklocal.test",
    ] {
        let answer = hedgerow.get(&format!("http://{host}:{port}/")).await;
        assert_denied(&answer, "error=destination_ip_prohibited");
        let answer = hedgerow.agent().await.open_tunnel(&format!("{host}:{port}")).await;
        assert_eq!((answer.status, answer.reason.as_str()), (403, "egress_denied"), "{host}");
    }
    let answer = hedgerow.get(&format!("http://mixed.test:{port}/")).await;
    assert_eq!((answer.status, &answer.json()["error"]), (502, &"connect_failed".into()));
    assert_eq!(forbidden.connections(), 0);
    let denied = [("code", "403"), ("outcome", "error")];
    hedgerow.until_metrics(|m| m.value("hedgerow_requests_total", &denied) == 14.0).await;
}

#[tokio::test]
async fn c019_a_name_that_changes_its_mind_gains_nothing() {
    let good =
        Upstream::on([127, 0, 0, 2]).answering(|_| Reply::ok("good").header("Connection", "close")).await;
    let port = good.address().port();
    let inside = Upstream::on([127, 0, 0, 3]).port(port).answering(|_| Reply::ok("inside")).await;
    let dns = Dns::start(&[("a.test", Answer::Addresses(vec!["127.0.0.2".parse().unwrap()], 0))]).await;
    let policy = with_dns(&dns, "egress: { deny: [127.0.0.3] }\ndefaults: { hedge: { after: 20ms } }");
    let hedgerow = HedgerowProcess::start(&policy).await;
    let url = format!("http://a.test:{port}/");
    assert_eq!(hedgerow.get(&url).await.text(), "good");
    dns.set("a.test", Answer::Addresses(vec!["127.0.0.3".parse().unwrap()], 0));
    assert_denied(&hedgerow.get(&url).await, "error=destination_ip_prohibited");
    assert_eq!(inside.connections(), 0);
}

/// A second attempt goes to another address where there is one, and the one that is left is forbidden.
#[tokio::test]
async fn c019_hedges_and_retries_are_checked_like_the_first_attempt() {
    let mut good = Upstream::on([127, 0, 0, 2]).start().await;
    let port = good.address().port();
    let forbidden = Upstream::on([127, 0, 0, 3]).port(port).answering(|_| Reply::ok("inside")).await;
    let dns = Dns::start(&[("two.test", Answer::addresses(&["127.0.0.2", "127.0.0.3"]))]).await;
    let plenty = "extra_load: { ratio: 100%, floor: 100/s }, breaker: off";
    let url = format!("http://two.test:{port}/");
    for stages in ["hedge: { after: 80ms }", "hedge: off, retry: { backoff: 1ms }"] {
        let policy = format!("egress: {{ deny: [127.0.0.3] }}\ndefaults: {{ {stages}, {plenty} }}");
        let hedgerow = HedgerowProcess::start(&with_dns(&dns, &policy)).await;
        let serve = async {
            let first = good.next().await;
            if stages.contains("retry") {
                first.respond(503, &[], "").await;
                return good.next().await.respond(200, &[], "second").await;
            }
            good.next().await.respond(200, &[], "second").await;
            first.gone().await;
        };
        let (answer, ()) = tokio::join!(hedgerow.get(&url), serve);
        assert_eq!((answer.status, answer.text()), (200, "second"), "{stages}");
    }
    // A hedge to another upstream is no way around either.
    let policy = format!(
        "egress: {{ deny: [127.0.0.3] }}\nupstreams: {{ \
         tool: {{ hosts: [two.test], hedge: {{ after: 80ms, to: inside }}, {plenty} }}, \
         inside: {{ endpoint: \"http://127.0.0.3:{port}\" }} }}"
    );
    let hedgerow = HedgerowProcess::start(&with_dns(&dns, &policy)).await;
    let failed = [("upstream", "tool"), ("outcome", "failed")];
    let serve = async {
        let first = good.next().await;
        hedgerow.until_metrics(|m| m.value("hedgerow_hedges_total", &failed) == 1.0).await;
        first.respond(200, &[], "first").await;
    };
    let (answer, ()) = tokio::join!(hedgerow.get(&url), serve);
    assert_eq!((answer.status, answer.text()), (200, "first"));
    assert_eq!(forbidden.connections(), 0);
}

#[tokio::test]
async fn c020_the_unspecified_address_is_loopback() {
    // The kernel delivers it to local services, whatever the list says about 127.0.0.0/8.
    let local = Upstream::answering(|_| Reply::ok("local")).await;
    let local6 = Upstream::on(std::net::Ipv6Addr::LOCALHOST).answering(|_| Reply::ok("local")).await;
    let dns = Dns::start(&[
        ("zero.test", Answer::addresses(&["0.0.0.0"])),
        ("zero6.test", Answer::addresses(&["::"])),
        ("loop.test", Answer::addresses(&["127.0.0.1", "::1"])),
    ])
    .await;
    let hedgerow = HedgerowProcess::start(&with_dns(&dns, "egress: { deny_private: true }")).await;
    let hosts = [
        "127.0.0.1",
        "[::1]",
        "[::]",
        "0.0.0.0",
        "[::ffff:127.0.0.1]",
        "[::ffff:0.0.0.0]",
        "[::127.0.0.1]",
        "localhost",
        "zero.test",
        "zero6.test",
        "loop.test",
    ];
    for port in [local.address().port(), local6.address().port()] {
        for host in hosts {
            assert_denied(
                &hedgerow.get(&format!("http://{host}:{port}/")).await,
                "destination_ip_prohibited",
            );
            let answer = hedgerow.agent().await.open_tunnel(&format!("{host}:{port}")).await;
            assert_eq!(answer.status, 403, "{host}");
        }
    }
    assert_eq!((local.connections(), local6.connections()), (0, 0));
}

#[tokio::test]
async fn an_allow_list_lets_out_what_it_names_and_nothing_else() {
    let upstream = Upstream::answering(|_| Reply::ok("out")).await;
    let port = upstream.address().port();
    let dns = Dns::start(&[
        ("a.test", Answer::addresses(&["127.0.0.1"])),
        ("x.sub.test", Answer::addresses(&["127.0.0.1"])),
        ("b.test", Answer::addresses(&["127.0.0.1"])),
    ])
    .await;
    let policy =
        with_dns(&dns, "egress: { default: deny, allow: [a.test, \"*.sub.test\"], deny: [y.sub.test] }");
    let hedgerow = HedgerowProcess::start(&policy).await;
    for host in ["a.test", "A.TEST", "x.sub.test"] {
        assert_eq!(hedgerow.get(&format!("http://{host}:{port}/")).await.text(), "out", "{host}");
    }
    for host in ["b.test", "sub.test", "y.sub.test", "127.0.0.1", "a.test.evil.test"] {
        assert_denied(&hedgerow.get(&format!("http://{host}:{port}/")).await, "error=http_request_denied");
    }
    assert_eq!(upstream.count(), 3);
    assert_eq!(dns.queries("b.test"), 0, "what its name already refuses is not even looked up");
}

#[tokio::test]
async fn a_door_closed_by_a_reload_is_closed_for_kept_connections_too() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let mut hedgerow = HedgerowProcess::start("{}").await;
    assert_eq!(hedgerow.get(&upstream.url("/")).await.status, 200);
    hedgerow.policy.write_in_place("egress: { deny: [127.0.0.0/8] }");
    hedgerow
        .until_metrics(|m| m.value("hedgerow_config_reloads_total", &[("result", "applied")]) >= 1.0)
        .await;
    assert_denied(&hedgerow.get(&upstream.url("/")).await, "error=destination_ip_prohibited");
    assert_eq!(upstream.count(), 1);
}

/// A name server and a policy that lets out `a.test` alone, which is here as `b.test` is.
async fn a_test_alone(limits: &str) -> (Dns, String) {
    let here = || Answer::addresses(&["127.0.0.1"]);
    let dns = Dns::start(&[("a.test", here()), ("b.test", here())]).await;
    let policy = with_dns(&dns, &format!("egress: {{ default: deny, allow: [a.test] }}\n{limits}"));
    (dns, policy)
}

#[tokio::test]
async fn under_an_allow_list_the_tls_in_a_tunnel_names_its_host_however_late_it_comes() {
    // Whoever waited until the look at the first bytes was over reached other hosts behind the same front.
    let (_dns, policy) = a_test_alone("").await;
    let (port, pki) = (RawPort::bind().await, Pki::new());
    let hedgerow = HedgerowProcess::start(&policy).await;
    let authority = format!("a.test:{}", port.address().port());
    for is_late in [false, true] {
        for name in ["b.test", "a.test"] {
            let mut agent = hedgerow.agent().await;
            let (answer, mut upstream) = tokio::join!(agent.open_tunnel(&authority), port.accept());
            assert_eq!(answer.status, 200);
            if is_late {
                // A server that speaks first ends the look at once.
                upstream.send("220 ready\r\n").await;
                agent.expect(b"220 ready\r\n").await;
            }
            let connector = pki.connector();
            let handshake = tokio::spawn(async move { agent.tls(&connector, name).await.map(drop) });
            if name == "a.test" {
                upstream.expect(&[0x16, 0x03]).await;
                drop(upstream);
            } else {
                assert_eq!(upstream.all_that_comes().await, b"", "late: {is_late}");
            }
            assert!(handshake.await.unwrap().is_err(), "nobody answers the handshake");
        }
    }
    let warning = "a tunnel's TLS names another host under an allow-list";
    hedgerow.stderr.until(|line| line.contains(warning) && line.contains("b.test")).await;
}

#[tokio::test]
async fn under_an_allow_list_what_is_no_tls_passes_a_tunnel_late_or_not() {
    let (_dns, policy) = a_test_alone("").await;
    let port = RawPort::bind().await;
    let hedgerow = HedgerowProcess::start(&policy).await;
    let authority = format!("a.test:{}", port.address().port());
    for is_late in [false, true] {
        let mut agent = hedgerow.agent().await;
        let (answer, mut upstream) = tokio::join!(agent.open_tunnel(&authority), port.accept());
        assert_eq!(answer.status, 200);
        if is_late {
            upstream.send("220 ready\r\n").await;
            agent.expect(b"220 ready\r\n").await;
        }
        agent.send("EHLO").await;
        upstream.expect(b"EHLO").await;
        agent.send(" b.test\r\n").await;
        upstream.expect(b" b.test\r\n").await;
        agent.half_close().await;
        assert_eq!(upstream.ended().await, End::Closed);
        upstream.send("221 bye\r\n").await;
        agent.expect(b"221 bye\r\n").await;
    }
}

#[tokio::test]
async fn under_an_allow_list_a_hello_that_does_not_come_to_its_end_is_given_up() {
    // It held the tunnel's permit for as long as the client liked.
    let (_dns, policy) = a_test_alone("limits: { header_timeout: 1500ms }").await;
    let port = RawPort::bind().await;
    let hedgerow = HedgerowProcess::start(&policy).await;
    let mut agent = hedgerow.agent().await;
    let authority = format!("a.test:{}", port.address().port());
    let (answer, upstream) = tokio::join!(agent.open_tunnel(&authority), port.accept());
    assert_eq!(answer.status, 200);
    agent.send(b"\x16\x03\x01\x02\x00").await;
    assert_eq!(upstream.all_that_comes().await, b"");
    agent.ended().await;
}

#[tokio::test]
async fn a_tunnel_to_an_allowed_address_may_carry_tls_and_requests_for_any_name() {
    // The list has the address; the handshake's name was held against it, and the tunnel closed.
    let pki = Pki::new();
    let upstream =
        Upstream::on([127, 0, 0, 1]).tls(pki.server(&["a.test"])).answering(|_| Reply::ok("in TLS")).await;
    let plain = Upstream::answering(|_| Reply::ok("plain")).await;
    let policy = "egress: { default: deny, allow: [127.0.0.1] }";
    let hedgerow = HedgerowProcess::start(policy).await;
    let mut agent = hedgerow.agent().await;
    assert_eq!(agent.open_tunnel(&upstream.address().to_string()).await.status, 200);
    let mut agent = agent.tls(&pki.connector(), "a.test").await.unwrap();
    assert_eq!(agent.get_at("a.test", "/").await.text(), "in TLS");
    let mut agent = hedgerow.agent().await;
    assert_eq!(agent.open_tunnel(&plain.address().to_string()).await.status, 200);
    assert_eq!(agent.get_at("a.test", "/").await.text(), "plain");
}

#[tokio::test]
async fn under_an_allow_list_a_request_in_a_tunnel_names_its_host() {
    // As the name in TLS does, `Host` chooses among what lies behind one front.
    let (_dns, policy) = a_test_alone("").await;
    let upstream = Upstream::answering(|_| Reply::ok("a")).await;
    let hedgerow = HedgerowProcess::start(&policy).await;
    let port = upstream.address().port();
    let authority = format!("a.test:{port}");
    for (request, status) in [
        (format!("GET / HTTP/1.1\r\nHost: {authority}\r\n\r\n"), 200),
        ("GET / HTTP/1.1\r\nHost: A.TEST.\r\n\r\n".to_owned(), 200),
        ("GET / HTTP/1.0\r\n\r\n".to_owned(), 200),
        (format!("GET / HTTP/1.1\r\nHost: b.test:{port}\r\n\r\n"), 421),
        (format!("GET http://b.test:{port}/ HTTP/1.1\r\nHost: {authority}\r\n\r\n"), 421),
    ] {
        let mut agent = hedgerow.agent().await;
        assert_eq!(agent.open_tunnel(&authority).await.status, 200);
        agent.send(&request).await;
        assert_eq!(agent.read_response().await.status, status, "{request}");
    }
    let mut agent = hedgerow.agent().await;
    assert_eq!(agent.open_tunnel(&authority).await.status, 200);
    let agent = Http2Agent::over(agent).await;
    assert_eq!(agent.get(&format!("http://b.test:{port}/")).await.status, 421);
    assert_eq!(upstream.count(), 3);
    // It goes there, though this upstream does not speak HTTP/2.
    assert_eq!(agent.get(&format!("http://{authority}/")).await.status, 502);
}
