//! Interception: TLS that ends in the proxy, the requests inside it, and when it keeps its hands off.

use std::time::Duration;

use time::OffsetDateTime;
use tokio::time::Instant;
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::{GeneralName, ParsedExtension};
use x509_parser::prelude::FromDer;

use crate::support::client::{End, Response};
use crate::support::hedgerow::HedgerowProcess;
use crate::support::intercept::{HOST, Rig, base, ca_pem, inside, names, policy, trusting};
use crate::support::pki::{self, AgentTls, Pki};
use crate::support::raw::RawPort;
use crate::support::upstream::{Reply, Upstream};

/// A hedgerow that intercepts everything, with no upstream of its own.
async fn intercepting(rest: &str) -> HedgerowProcess {
    HedgerowProcess::start(&format!("tls: {{ ca_dir: ca }}\ndefaults: {{ intercept: true }}\n{rest}")).await
}

/// The problem that an inner request is answered with.
fn problem(answer: &Response) -> (u16, String) {
    assert_eq!(answer.header("content-type"), Some("application/problem+json"), "{answer:?}");
    (answer.status, answer.json()["error"].as_str().expect("a problem names its error").to_owned())
}

#[tokio::test]
async fn a_call_inside_has_the_whole_policy_and_looks_untouched_to_both_ends() {
    let rig = Rig::answering("hedge: off", |seen| Reply::ok(seen.path().to_owned())).await;
    let authority = rig.authority();
    let mut agent = rig.agent().await;
    agent
        .send(format!(
            "GET /v1/x?q=%7e&a=b HTTP/1.1\r\nhOsT: {}\r\nX-Case: 1\r\nProxy-Authorization: Basic c2VjcmV0\r\n\
             Connection: X-Hop\r\nX-Hop: 1\r\n\r\n",
            authority.to_uppercase()
        ))
        .await;
    let answer = agent.read_response().await;
    assert_eq!((answer.status, answer.text()), (200, "/v1/x"));
    assert_eq!(answer.header("x-hedgerow-attempts"), Some("1"));

    let seen = &rig.upstream.requests()[0];
    assert_eq!(seen.head.target, "/v1/x?q=%7e&a=b");
    assert_eq!(seen.header("host"), Some(authority.to_uppercase().as_str()), "byte for byte");
    assert!(seen.head.headers.names().contains(&"X-Case"));
    for name in ["via", "proxy-authorization", "x-hop", "connection"] {
        assert_eq!(seen.header(name), None, "{name}");
    }
    let handshake = &rig.upstream.handshakes()[0];
    assert_eq!(handshake.server_name.as_deref(), Some(HOST));
}

#[tokio::test]
async fn fifty_requests_on_one_connection_use_one_upstream_connection() {
    let rig = Rig::answering("hedge: off", |_| Reply::ok("kept")).await;
    let mut agent = rig.agent().await;
    for _ in 0..50 {
        assert_eq!(agent.get_at(&rig.authority(), "/").await.text(), "kept");
    }
    assert_eq!((rig.upstream.count(), rig.upstream.connections()), (50, 1));
}

#[tokio::test]
async fn http_1_0_inside_is_answered_and_closed() {
    let rig = Rig::answering("hedge: off", |_| Reply::ok("old")).await;
    for head in [
        format!("GET / HTTP/1.0\r\nHost: {}\r\n\r\n", rig.authority()),
        // The tunnel says which host is meant.
        "GET / HTTP/1.0\r\n\r\n".to_owned(),
    ] {
        let mut agent = rig.agent().await;
        agent.send(head).await;
        assert_eq!(agent.read_response().await.text(), "old");
        assert_eq!(agent.ended().await, End::Closed);
    }
    assert!(rig.upstream.requests().iter().all(|seen| seen.header("host") == Some(&rig.authority())));
}

#[tokio::test]
async fn connect_is_answered_before_anything_is_dialled() {
    let port = RawPort::bind().await;
    let hedgerow = intercepting("").await;
    let mut agent = hedgerow.agent().await;
    assert_eq!(agent.open_tunnel(&port.address().to_string()).await.status, 200);
    let _agent = agent.tls(&trusting(&hedgerow).connector(), "127.0.0.1").await.unwrap();
    assert!(
        tokio::time::timeout(Duration::from_millis(50), port.accept()).await.is_err(),
        "dialled without a request"
    );
}

#[tokio::test]
async fn what_goes_wrong_comes_inside_as_a_problem() {
    let (dead, _held) = Upstream::dead();
    let mute = RawPort::bind().await;
    let dns = crate::support::dns::Dns::start(&[]).await;
    let rest = format!(
        "dns: {{ servers: [\"{}\"] }}\negress: {{ deny: [denied.test] }}\n\
         upstreams: {{ bad: {{ hosts: [\"{dead}\"], hedge: off, breaker: {{ consecutive_failures: 1 }} }} }}",
        dns.address()
    );
    let hedgerow = intercepting(&rest).await;
    for (authority, host, status, error) in [
        (dead.to_string(), "127.0.0.1", 502, "connect_failed"),
        (dead.to_string(), "127.0.0.1", 503, "circuit_open"),
        ("unknown.test:443".to_owned(), "unknown.test", 502, "dns_failed"),
        ("denied.test:443".to_owned(), "denied.test", 403, "egress_denied"),
        ("169.254.169.254:443".to_owned(), "169.254.169.254", 403, "egress_denied"),
        (mute.address().to_string(), "127.0.0.1", 504, "deadline_exceeded"),
    ] {
        let mut agent = inside(&hedgerow, &authority, host, trusting(&hedgerow)).await;
        let left = Duration::from_millis(if error == "deadline_exceeded" { 300 } else { 20_000 });
        let deadline = (OffsetDateTime::now_utc() + left).unix_timestamp_nanos() / 1_000_000;
        agent
            .send(format!("GET /x HTTP/1.1\r\nHost: {authority}\r\nx-request-deadline: {deadline}\r\n\r\n"))
            .await;
        let answer = agent.read_response().await;
        assert_eq!(problem(&answer), (status, error.to_owned()), "{authority}");
        assert_eq!(answer.header("content-length"), Some(answer.body.len().to_string().as_str()));
        assert!(answer.header("proxy-status").unwrap().starts_with("hedgerow; error="));
    }
}

#[tokio::test]
async fn a_full_bulkhead_refuses_requests_inside_and_connections_hold_no_permit() {
    let mut rig = Rig::start("hedge: off, bulkhead: { max_concurrent: 1, max_queue: 0 }").await;
    let authority = rig.authority();
    let (mut first, mut second, mut third) = (rig.agent().await, rig.agent().await, rig.agent().await);
    first.send(format!("GET /1 HTTP/1.1\r\nHost: {authority}\r\n\r\n")).await;
    let held = rig.upstream.next().await;
    assert_eq!(problem(&second.get_at(&authority, "/2").await), (503, "bulkhead_full".into()));
    held.respond(200, &[], "1").await;
    assert_eq!(first.read_response().await.text(), "1");
    let (answer, ()) = tokio::join!(third.get_at(&authority, "/3"), async {
        rig.upstream.next().await.respond(200, &[], "3").await;
    });
    assert_eq!(answer.text(), "3");
}

#[tokio::test]
async fn a_client_that_hesitates_before_its_handshake_leaves_no_permit_behind() {
    // The tunnel that was opened meanwhile held the only place, and the requests inside waited for it.
    let rig =
        Rig::answering("hedge: off, bulkhead: { max_concurrent: 1, max_queue: 0 }", |_| Reply::ok("in"))
            .await;
    let mut agent = rig.hedgerow.agent().await;
    assert_eq!(agent.open_tunnel(&rig.authority()).await.status, 200);
    rig.upstream.until(|tally| tally.connections == 1).await;
    let mut agent = agent.tls(&trusting(&rig.hedgerow).connector(), HOST).await.unwrap();
    for _ in 0..2 {
        assert_eq!(agent.get_at(&rig.authority(), "/").await.status, 200);
    }
}

#[tokio::test]
async fn a_client_that_hesitates_reads_inside_why_its_upstream_is_not_there() {
    // The upstream was dialled meanwhile, in vain, and the client's connection reset for it.
    let (dead, _held) = Upstream::dead();
    let hedgerow = intercepting("").await;
    let mut agent = hedgerow.agent().await;
    assert_eq!(agent.open_tunnel(&dead.to_string()).await.status, 200);
    let refused = [("code", "502")];
    hedgerow.until_metrics(|m| m.value("hedgerow_requests_total", &refused) == 1.0).await;
    let mut agent = agent.tls(&trusting(&hedgerow).connector(), "127.0.0.1").await.unwrap();
    let answer = agent.get_at(&dead.to_string(), "/").await;
    assert_eq!(problem(&answer), (502, "connect_failed".into()));
    // One that stays silent has nothing to be told.
    let mut silent = hedgerow.agent().await;
    assert_eq!(silent.open_tunnel(&dead.to_string()).await.status, 200);
    assert_eq!(silent.ended().await, End::Reset);
}

#[tokio::test]
async fn a_deadline_inside_bounds_the_call_and_is_passed_on() {
    let mut rig = Rig::start("hedge: off").await;
    let mut agent = rig.agent().await;
    let at = OffsetDateTime::now_utc() + Duration::from_millis(400);
    let told = format!("{}", at.unix_timestamp_nanos() / 1_000_000);
    let begin = Instant::now();
    agent
        .send(format!("GET / HTTP/1.1\r\nHost: {}\r\nx-request-deadline: {told}\r\n\r\n", rig.authority()))
        .await;
    let exchange = rig.upstream.next().await;
    assert_eq!(exchange.header("x-request-deadline"), Some(told.as_str()));
    let answer = agent.read_response().await;
    assert_eq!(problem(&answer), (504, "deadline_exceeded".into()));
    assert!((300..1500).contains(&begin.elapsed().as_millis()), "{:?}", begin.elapsed());
    exchange.gone().await;
}

#[tokio::test]
async fn a_slow_call_inside_is_hedged_on_another_connection() {
    let mut rig = Rig::start("hedge: { after: 20ms }").await;
    let mut agent = rig.agent().await;
    agent.send(format!("GET / HTTP/1.1\r\nHost: {}\r\n\r\n", rig.authority())).await;
    let (primary, hedge) = (rig.upstream.next().await, rig.upstream.next().await);
    assert_ne!(primary.connection, hedge.connection);
    hedge.respond(200, &[], "won").await;
    let answer = agent.read_response().await;
    assert_eq!((answer.text(), answer.header("x-hedgerow-attempts")), ("won", Some("2")));
    primary.gone().await;
    assert!(rig.upstream.handshakes().iter().all(|own| own.server_name.as_deref() == Some(HOST)));
}

#[tokio::test]
async fn the_access_log_tells_requests_inside_and_not_the_connect() {
    let rig = Rig::answering("hedge: off", |_| Reply::ok("x")).await;
    let mut agent = rig.agent().await;
    for path in ["/one?token=hush", "/two"] {
        assert_eq!(agent.get_at(&rig.authority(), path).await.status, 200);
    }
    drop(agent);
    let line = rig.hedgerow.access_log(|line| line["path"] == "/two").await;
    assert_eq!((&line["host"], &line["method"]), (&rig.authority().into(), &"GET".into()));
    assert_eq!((&line["upstream"], &line["status"]), (&"tool".into(), &200.into()));
    let lines = rig.hedgerow.stdout.all();
    assert_eq!(lines.len(), 2, "{lines:?}");
    assert!(lines[0].contains("\"/one\"") && !lines[0].contains("hush"), "{lines:?}");
    let metrics = rig.hedgerow.metrics().await;
    assert_eq!(metrics.value("hedgerow_requests_total", &[]), 2.0);
    assert_eq!(metrics.value("hedgerow_requests_total", &[("outcome", "tunnel")]), 0.0);
}

/// What a client that checks everything looks at.
fn check_leaf(leaf: &[u8], ca: &[u8], name: &GeneralName<'_>) {
    let (_, leaf) = X509Certificate::from_der(leaf).expect("DER");
    let (_, ca) = x509_parser::pem::parse_x509_pem(ca).expect("PEM");
    let ca = ca.parse_x509().expect("DER");
    assert_eq!(leaf.issuer().as_raw(), ca.subject().as_raw());
    leaf.verify_signature(Some(ca.public_key())).expect("signed by the CA");

    let san = leaf.subject_alternative_name().expect("DER").expect("a SAN");
    assert_eq!(san.value.general_names.as_slice(), std::slice::from_ref(name), "exactly one name");
    let usage = leaf.extended_key_usage().expect("DER").expect("EKU").value;
    assert!(usage.server_auth && !usage.client_auth && !usage.any, "{usage:?}");
    let constraints = leaf.basic_constraints().expect("DER").expect("basicConstraints");
    assert!(!constraints.value.ca);

    let identifier = |certificate: &X509Certificate<'_>, own: bool| {
        certificate.extensions().iter().find_map(|extension| match extension.parsed_extension() {
            ParsedExtension::SubjectKeyIdentifier(id) if own => Some(id.0.to_vec()),
            ParsedExtension::AuthorityKeyIdentifier(id) if !own => {
                Some(id.key_identifier.as_ref()?.0.to_vec())
            }
            _ => None,
        })
    };
    assert!(identifier(&leaf, true).is_some(), "a SKI");
    assert_eq!(identifier(&leaf, false).expect("an AKI"), identifier(&ca, true).expect("a SKI"));

    let now = OffsetDateTime::now_utc();
    let (start, end) = (leaf.validity().not_before.to_datetime(), leaf.validity().not_after.to_datetime());
    let minute = time::Duration::MINUTE;
    assert!((now - start - time::Duration::hours(2)).abs() < minute, "{start}");
    assert!((end - now - time::Duration::hours(24)).abs() < minute, "{end}");
    assert!(leaf.raw_serial().len() <= 20 && leaf.raw_serial()[0] < 0x80);
}

#[tokio::test]
async fn a_leaf_has_what_the_strictest_clients_ask_for() {
    // More than a common name may have.
    let long = format!("{}.{}.test", "a".repeat(40), "b".repeat(40));
    let hedgerow = intercepting("").await;
    let ca = ca_pem(&hedgerow);
    for (authority, host, name) in [
        ("a.test:443", HOST, GeneralName::DNSName(HOST)),
        ("a.test:8443", HOST, GeneralName::DNSName(HOST)),
        ("A.Test.:443", HOST, GeneralName::DNSName(HOST)),
        ("127.0.0.1:443", "127.0.0.1", GeneralName::IPAddress(&[127, 0, 0, 1])),
        ("[::1]:443", "::1", GeneralName::IPAddress(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1])),
        (&format!("{long}:443"), &long, GeneralName::DNSName(&long)),
        ("xn--bcher-kva.test:443", "xn--bcher-kva.test", GeneralName::DNSName("xn--bcher-kva.test")),
    ] {
        let agent = inside(&hedgerow, authority, host, trusting(&hedgerow)).await;
        check_leaf(&agent.peer_certificate().expect("TLS"), &ca, &name);
    }
}

#[tokio::test]
async fn alpn_gives_each_client_what_it_asks_for() {
    let hedgerow = intercepting("").await;
    for (offered, agreed) in [
        (&[][..], None),
        (&["http/1.1"][..], Some("http/1.1")),
        (&["h2"][..], Some("h2")),
        (&["http/1.1", "h2"][..], Some("h2")),
        (&["h2", "http/1.1"][..], Some("h2")),
    ] {
        let tls = trusting(&hedgerow).offering(offered);
        let agent = inside(&hedgerow, "a.test:443", HOST, tls).await;
        assert_eq!(agent.protocol().as_deref(), agreed, "{offered:?}");
    }
    let mut agent = hedgerow.agent().await;
    assert_eq!(agent.open_tunnel("a.test:443").await.status, 200);
    let refused = agent.tls(&trusting(&hedgerow).offering(&["imap"]).connector(), HOST).await.unwrap_err();
    assert!(refused.to_string().contains("NoApplicationProtocol"), "{refused}");
}

#[tokio::test]
async fn c043_without_sni_the_connect_names_the_host() {
    // The upstream could not be verified without a name, and users turned the verification off.
    let rig = Rig::answering("hedge: off", |_| Reply::ok("named")).await;
    let tls = trusting(&rig.hedgerow).without_sni();
    let mut agent = inside(&rig.hedgerow, &rig.authority(), HOST, tls).await;
    assert_eq!(agent.get_at(&rig.authority(), "/").await.text(), "named");
    assert_eq!(rig.upstream.handshakes()[0].server_name.as_deref(), Some(HOST));
}

#[tokio::test]
async fn c043_a_certificate_for_another_name_is_refused_with_or_without_sni() {
    let (pki, dns) = (Pki::new(), names().await);
    let upstream =
        Upstream::on([127, 0, 0, 1]).tls(pki.server(&["b.test"])).answering(|_| Reply::ok("stranger")).await;
    let hedgerow = HedgerowProcess::start(&policy(&pki, &dns, "hedge: off, breaker: off")).await;
    let authority = format!("{HOST}:{}", upstream.address().port());
    for tls in [trusting(&hedgerow), trusting(&hedgerow).without_sni()] {
        let mut agent = inside(&hedgerow, &authority, HOST, tls).await;
        let answer = agent.get_at(&authority, "/").await;
        assert_eq!(problem(&answer), (502, "certificate_invalid".into()));
        assert!(answer.json()["detail"].as_str().unwrap().contains("issued for another name"), "{answer:?}");
    }
    assert_eq!(upstream.count(), 0);
}

#[tokio::test]
async fn c043_an_address_is_verified_as_the_address_it_is() {
    let pki = Pki::new();
    let hedgerow = HedgerowProcess::start(&format!(
        "tls: {{ ca_dir: ca, ca_file: \"{}\" }}\ndefaults: {{ intercept: true, hedge: off, breaker: off }}",
        pki.ca_file().display()
    ))
    .await;
    let right =
        Upstream::on([127, 0, 0, 1]).tls(pki.server(&["127.0.0.1"])).answering(|_| Reply::ok("it")).await;
    let wrong =
        Upstream::on([127, 0, 0, 1]).tls(pki.server(&["127.0.0.2"])).answering(|_| Reply::ok("not it")).await;
    for (upstream, status) in [(&right, 200), (&wrong, 502)] {
        let authority = upstream.address().to_string();
        let mut agent = inside(&hedgerow, &authority, "127.0.0.1", trusting(&hedgerow)).await;
        assert_eq!(agent.get_at(&authority, "/").await.status, status);
    }
    assert_eq!((right.count(), wrong.count()), (1, 0));
    assert_eq!(right.handshakes()[0].server_name, None, "an address is no SNI");
}

#[tokio::test]
async fn sni_says_what_the_client_verifies_and_connect_where_it_goes() {
    let rig = Rig::answering("hedge: off", |_| Reply::ok("the tunnel's")).await;
    let mut agent = inside(&rig.hedgerow, &rig.authority(), "b.test", trusting(&rig.hedgerow)).await;
    assert_eq!(agent.get_at("b.test", "/").await.status, 421);
    assert_eq!(agent.get_at(&rig.authority(), "/").await.text(), "the tunnel's");
    assert_eq!(rig.upstream.handshakes()[0].server_name.as_deref(), Some(HOST));
}

#[tokio::test]
async fn a_name_inside_a_tunnel_to_an_address_selects_the_policy_and_the_address_is_dialled() {
    let (pki, dns) = (Pki::new(), names().await);
    // Where the name leads, nobody listens; the client knows better.
    dns.set(HOST, crate::support::dns::Answer::addresses(&["127.0.0.9"]));
    let upstream =
        Upstream::on([127, 0, 0, 1]).tls(pki.server(&[HOST])).answering(|_| Reply::ok("dialled")).await;
    let rest = format!(
        "{}\ndefaults: {{ intercept: true, hedge: off }}\nupstreams: {{ tool: {{ hosts: [{HOST}] }} }}",
        base(&pki, &dns)
    );
    let hedgerow = HedgerowProcess::start(&rest).await;
    let port = upstream.address().port();
    let mut agent = inside(&hedgerow, &upstream.address().to_string(), HOST, trusting(&hedgerow)).await;
    let answer = agent.get_at(&format!("{HOST}:{port}"), "/").await;
    assert_eq!(answer.text(), "dialled");
    let line = hedgerow.access_log(|line| line["path"] == "/").await;
    assert_eq!(line["upstream"], "tool");
}

#[tokio::test]
async fn c042_a_final_dot_never_gets_into_sni() {
    // A dot in SNI makes servers refuse the handshake (RFC 6066 section 3).
    let rig = Rig::answering("hedge: off", |_| Reply::ok("undotted")).await;
    let port = rig.upstream.address().port();
    let dotted = format!("{HOST}.:{port}");
    let mut agent = inside(&rig.hedgerow, &dotted, HOST, trusting(&rig.hedgerow)).await;
    assert_eq!(agent.get_at(&dotted, "/").await.text(), "undotted");
    // And as TLS origination.
    assert_eq!(rig.hedgerow.get(&format!("https://{dotted}/")).await.text(), "undotted");
    let names: Vec<_> = rig.upstream.handshakes().into_iter().map(|own| own.server_name).collect();
    assert!(!names.is_empty() && names.iter().all(|name| name.as_deref() == Some(HOST)), "{names:?}");
}

#[tokio::test]
async fn c044_each_side_agrees_on_its_own_protocol() {
    // HTTP/2 was agreed with the client and then spoken to an upstream that knew none of it.
    let (pki, dns) = (Pki::new(), names().await);
    for (spoken, expected) in [(&[][..], None), (&["http/1.1"][..], Some("http/1.1"))] {
        let acceptor = pki.server_speaking(&[HOST], spoken);
        let upstream = Upstream::on([127, 0, 0, 1]).tls(acceptor).answering(|_| Reply::ok("turned")).await;
        let hedgerow = HedgerowProcess::start(&policy(&pki, &dns, "hedge: off")).await;
        let authority = format!("{HOST}:{}", upstream.address().port());
        let tls = trusting(&hedgerow).offering(&["h2", "http/1.1"]);
        let agent = inside(&hedgerow, &authority, HOST, tls).await;
        assert_eq!(agent.protocol().as_deref(), Some("h2"));
        let (sender, connection) = h2::client::handshake(agent.into_socket()).await.unwrap();
        tokio::spawn(connection);
        let request = http::Request::get(format!("https://{authority}/x")).body(()).unwrap();
        let (response, _) = sender.ready().await.unwrap().send_request(request, true).unwrap();
        assert_eq!(response.await.unwrap().status(), 200);
        assert_eq!(upstream.handshakes()[0].protocol.as_deref(), expected);
        assert_eq!(upstream.requests()[0].header("host"), Some(authority.as_str()));
    }
}

#[tokio::test]
async fn c045_another_host_inside_is_misdirected_and_reaches_nobody() {
    // An allowed name was used to reach other hosts behind the same front.
    let rig = Rig::answering("hedge: off", |_| Reply::ok("right")).await;
    let (authority, port) = (rig.authority(), rig.upstream.address().port());
    for request in [
        format!("GET / HTTP/1.1\r\nHost: b.test:{port}\r\n\r\n"),
        "GET / HTTP/1.1\r\nHost: b.test\r\n\r\n".to_owned(),
        format!("GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n"),
        "GET / HTTP/1.1\r\nHost: a.test:1\r\n\r\n".to_owned(),
        // Absolute form wins over `Host`.
        format!("GET https://b.test:{port}/ HTTP/1.1\r\nHost: {authority}\r\n\r\n"),
        format!("CONNECT b.test:{port} HTTP/1.1\r\nHost: b.test:{port}\r\n\r\n"),
    ] {
        let mut agent = rig.agent().await;
        agent.send(&request).await;
        let answer = agent.read_response().await;
        assert_eq!(problem(&answer), (421, "misdirected".into()), "{request}");
    }
    assert_eq!((rig.upstream.count(), rig.upstream.connections()), (0, 0));
    let mut agent = rig.agent().await;
    agent.send(format!("GET https://{authority}/ HTTP/1.1\r\nHost: b.test\r\n\r\n")).await;
    assert_eq!(agent.read_response().await.text(), "right");
    assert_eq!(rig.upstream.requests()[0].header("host"), Some(authority.as_str()));
}

/// Answers one request on the port in TLS with these bytes, and cuts TCP without a close_notify.
async fn answer_and_cut(pki: &Pki, port: &RawPort, bytes: &[u8]) {
    let mut upstream = port.accept().await.accept_tls(&pki.server(&[HOST])).await;
    upstream.read_request().await;
    upstream.send(bytes).await;
    upstream.cut().await;
}

#[tokio::test]
async fn c047_a_counted_answer_needs_no_close_notify() {
    let (pki, dns, port) = (Pki::new(), names().await, RawPort::bind().await);
    let stages = "hedge: off, breaker: { consecutive_failures: 1 }";
    let hedgerow = HedgerowProcess::start(&policy(&pki, &dns, stages)).await;
    let authority = format!("{HOST}:{}", port.address().port());
    for _ in 0..2 {
        let mut agent = inside(&hedgerow, &authority, HOST, trusting(&hedgerow)).await;
        let (answer, ()) = tokio::join!(
            agent.get_at(&authority, "/"),
            answer_and_cut(&pki, &port, b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwhole")
        );
        assert_eq!((answer.status, answer.text(), answer.complete), (200, "whole", true));
    }
    assert!(!hedgerow.stderr.text().contains("ERROR"), "{}", hedgerow.stderr.text());
}

#[tokio::test]
async fn c047_a_body_that_ends_with_the_connection_needs_one_to_look_whole() {
    // Whoever can cut a TCP connection could cut the answer short, unseen (RFC 9112 section 9.8).
    let (pki, dns, port) = (Pki::new(), names().await, RawPort::bind().await);
    let hedgerow = HedgerowProcess::start(&policy(&pki, &dns, "hedge: off, breaker: off")).await;
    let authority = format!("{HOST}:{}", port.address().port());
    for version in ["1.1", "1.0"] {
        let mut agent = inside(&hedgerow, &authority, HOST, trusting(&hedgerow)).await;
        agent.send(format!("GET / HTTP/{version}\r\nHost: {authority}\r\n\r\n")).await;
        let (answer, ()) = tokio::join!(
            agent.read_response(),
            answer_and_cut(&pki, &port, b"HTTP/1.1 200 OK\r\n\r\nhalf of i")
        );
        assert_eq!((answer.status, answer.complete), (200, false), "HTTP/{version}: {answer:?}");
    }
    let incomplete = [("outcome", "incomplete")];
    hedgerow.until_metrics(|m| m.value("hedgerow_requests_total", &incomplete) == 2.0).await;
}

#[tokio::test]
async fn c048_hosts_at_one_address_have_connections_of_their_own() {
    let (pki, dns) = (Pki::new(), names().await);
    let upstream = Upstream::on([127, 0, 0, 1])
        .tls(pki.server(&[HOST, "b.test"]))
        .answering(|seen| Reply::ok(seen.header("host").unwrap().to_owned()))
        .await;
    let rest = format!("{}\ndefaults: {{ intercept: true, hedge: off }}", base(&pki, &dns));
    let hedgerow = HedgerowProcess::start(&rest).await;
    let port = upstream.address().port();
    for _ in 0..3 {
        for host in [HOST, "b.test"] {
            let authority = format!("{host}:{port}");
            let mut agent = inside(&hedgerow, &authority, host, trusting(&hedgerow)).await;
            assert_eq!(agent.get_at(&authority, "/").await.text(), authority);
        }
    }
    let handshakes = upstream.handshakes();
    assert_eq!(handshakes.len(), 2);
    for seen in upstream.requests() {
        let named = handshakes[seen.connection - 1].server_name.as_deref().unwrap();
        assert!(seen.header("host").unwrap().starts_with(named), "{seen:?} on the connection of {named}");
    }
}

#[tokio::test]
async fn intercept_false_shows_the_origins_own_certificate() {
    let (pki, dns) = (Pki::new(), names().await);
    let leaf = pki.leaf(&[HOST, "b.test"]);
    let upstream =
        Upstream::on([127, 0, 0, 1]).tls(pki::acceptor(&leaf)).answering(|_| Reply::ok("own")).await;
    let rest = format!(
        "{}\ndefaults: {{ intercept: true, hedge: off }}\n\
         upstreams: {{ pinned: {{ hosts: [b.test], intercept: false }} }}",
        base(&pki, &dns)
    );
    let hedgerow = HedgerowProcess::start(&rest).await;
    let port = upstream.address().port();
    let mut exempt = inside(&hedgerow, &format!("b.test:{port}"), "b.test", pki.agent_tls()).await;
    assert_eq!(exempt.peer_certificate().unwrap(), leaf.der());
    assert_eq!(exempt.get_at("b.test", "/").await.text(), "own");
    let agent = inside(&hedgerow, &format!("{HOST}:{port}"), HOST, trusting(&hedgerow)).await;
    assert_ne!(agent.peer_certificate().unwrap(), leaf.der());
    // By its address the client names it inside the handshake only.
    let by_address = inside(&hedgerow, &upstream.address().to_string(), "b.test", pki.agent_tls()).await;
    assert_eq!(by_address.peer_certificate().unwrap(), leaf.der());
}

#[tokio::test]
async fn c025_plain_http_in_a_tunnel_to_an_intercepted_host_is_served() {
    // TLS was forced on a plain stream.
    let (pki, dns) = (Pki::new(), names().await);
    let upstream = Upstream::answering(|seen| Reply::ok(seen.path().to_owned())).await;
    let hedgerow = HedgerowProcess::start(&policy(&pki, &dns, "hedge: off")).await;
    let authority = format!("{HOST}:{}", upstream.address().port());
    let mut agent = hedgerow.agent().await;
    assert_eq!(agent.open_tunnel(&authority).await.status, 200);
    for path in ["/1", "/2"] {
        let answer = agent.get_at(&authority, path).await;
        assert_eq!((answer.text(), answer.header("x-hedgerow-attempts")), (path, Some("1")));
    }
    assert_eq!(upstream.requests()[0].header("host"), Some(authority.as_str()));
}

#[tokio::test]
async fn c025_a_server_that_speaks_first_is_heard_within_a_second() {
    let port = RawPort::bind().await;
    let hedgerow = intercepting("").await;
    let mut agent = hedgerow.agent().await;
    let begin = Instant::now();
    assert_eq!(agent.open_tunnel(&port.address().to_string()).await.status, 200);
    let mut upstream = port.accept().await;
    upstream.send("220 mail.test ready\r\n").await;
    agent.expect(b"220 mail.test ready\r\n").await;
    assert!(begin.elapsed() < Duration::from_secs(1), "{:?}", begin.elapsed());
    agent.send("EHLO agent.test\r\n").await;
    upstream.expect(b"EHLO agent.test\r\n").await;
    // What looks like TLS or HTTP from now on is neither.
    agent.send("\x16\x03\x01").await;
    upstream.expect(b"\x16\x03\x01").await;
}

#[tokio::test]
async fn what_is_neither_tls_nor_http_is_copied_both_ways() {
    let port = RawPort::bind().await;
    let hedgerow = intercepting("").await;
    for first in [&b"SSH-2.0-agent\r\n"[..], b"\x16\x02\x00\x00", b"\x00", b"GETX / HTTP/1.1\r\n\r\n"] {
        let mut agent = hedgerow.agent().await;
        assert_eq!(agent.open_tunnel(&port.address().to_string()).await.status, 200);
        agent.send(first).await;
        let mut upstream = port.accept().await;
        upstream.expect(first).await;
        upstream.send("SSH-2.0-server\r\n").await;
        agent.expect(b"SSH-2.0-server\r\n").await;
        agent.half_close().await;
        assert_eq!(upstream.ended().await, End::Closed);
        upstream.send("bye").await;
        drop(upstream);
        agent.expect(b"bye").await;
        assert_eq!(agent.ended().await, End::Closed);
    }
}

/// A handshake with a client that trusts somebody else.
async fn decline(hedgerow: &HedgerowProcess, authority: &str, name: &str) {
    let mut agent = hedgerow.agent().await;
    assert_eq!(agent.open_tunnel(authority).await.status, 200);
    let stranger = Pki::new();
    let refused = agent.tls(&stranger.connector(), name).await.expect_err("a stranger's certificate");
    assert!(refused.to_string().contains("invalid peer certificate"), "{refused}");
}

#[tokio::test]
async fn a_client_that_declines_our_certificate_gets_the_origins_from_then_on() {
    let (pki, dns) = (Pki::new(), names().await);
    let leaf = pki.leaf(&[HOST, "b.test"]);
    let upstream =
        Upstream::on([127, 0, 0, 1]).tls(pki::acceptor(&leaf)).answering(|_| Reply::ok("own")).await;
    let rest = format!(
        "{}\ndefaults: {{ intercept: true, hedge: off }}\nupstreams: {{ tool: {{ hosts: [{HOST}] }} }}",
        base(&pki, &dns)
    );
    let hedgerow = HedgerowProcess::start(&rest).await;
    let port = upstream.address().port();
    let (stepped_down, other) = (format!("{HOST}:{port}"), format!("b.test:{port}"));
    // Two of them at once, before either has said no.
    tokio::join!(decline(&hedgerow, &stepped_down, HOST), decline(&hedgerow, &stepped_down, HOST));
    let warned = hedgerow.stderr.until(|line| line.contains("does not trust the pod's CA")).await;
    assert!(warned.contains("tool"), "{warned}");
    let declined = [("upstream", "tool")];
    let counted = |metrics: &crate::support::hedgerow::Metrics| {
        metrics.value("hedgerow_intercept_declined_total", &declined)
    };
    hedgerow.until_metrics(|metrics| counted(metrics) >= 1.0).await;

    let mut agent = inside(&hedgerow, &stepped_down, HOST, pki.agent_tls()).await;
    assert_eq!(agent.peer_certificate().unwrap(), leaf.der());
    assert_eq!(agent.get_at(HOST, "/").await.text(), "own");
    let agent = inside(&hedgerow, &other, "b.test", trusting(&hedgerow)).await;
    assert_ne!(agent.peer_certificate().unwrap(), leaf.der(), "others stay intercepted");

    let all = hedgerow.stderr.all();
    assert_eq!(all.iter().filter(|line| line.contains("does not trust")).count(), 1, "{all:?}");
    drop(agent);
}

#[tokio::test]
async fn a_client_that_only_goes_away_changes_nothing() {
    let hedgerow = intercepting("").await;
    for _ in 0..3 {
        let mut agent = hedgerow.agent().await;
        assert_eq!(agent.open_tunnel("a.test:443").await.status, 200);
        agent.send("\x16\x03\x01").await;
    }
    let mut config_less = hedgerow.agent().await;
    assert_eq!(config_less.open_tunnel("a.test:443").await.status, 200);
    config_less.reset();
    inside(&hedgerow, "a.test:443", HOST, trusting(&hedgerow)).await;
    assert_eq!(hedgerow.metrics().await.value("hedgerow_intercept_declined_total", &[]), 0.0);
}

#[tokio::test]
async fn a_connection_that_lay_idle_goes_on_where_it_was() {
    let rig = Rig::answering("hedge: off", |_| Reply::ok("on")).await;
    let authority = rig.authority();
    let mut agent = rig.agent().await;
    for pause in [0, 250, 120] {
        // Idle connections are parked; there is no event for it.
        tokio::time::sleep(Duration::from_millis(pause)).await;
        for byte in format!("GET / HTTP/1.1\r\nHost: {authority}\r\n\r\n").bytes() {
            agent.send([byte]).await;
        }
        assert_eq!(agent.read_response().await.text(), "on");
    }
    assert_eq!(rig.hedgerow.status().await["connections"], 1);
}

#[tokio::test]
async fn a_client_that_leaves_takes_its_call_along() {
    let mut rig = Rig::start("hedge: off, breaker: { consecutive_failures: 1 }").await;
    for resets in [true, false] {
        let mut agent = rig.agent().await;
        agent.send(format!("GET / HTTP/1.1\r\nHost: {}\r\n\r\n", rig.authority())).await;
        let mut exchange = rig.upstream.next().await;
        exchange.start_chunks(200, &[]).await;
        exchange.chunk("first").await;
        assert_eq!(agent.read_head().await.status, 200);
        let left_at = Instant::now();
        if resets {
            agent.reset()
        } else {
            drop(agent)
        }
        let noticed = exchange.gone().await.duration_since(left_at);
        assert!(noticed < Duration::from_secs(1), "{noticed:?}");
        let left = [("outcome", "client_left"), ("code", "499")];
        rig.hedgerow
            .until_metrics(|m| m.value("hedgerow_requests_total", &left) == if resets { 1.0 } else { 2.0 })
            .await;
    }
    rig.hedgerow.until_status(|status| status["in_flight"] == 0 && status["connections"] == 0).await;
}

#[tokio::test]
async fn heads_that_any_proxy_refuses_are_refused_inside() {
    let rig = Rig::answering("hedge: off", |_| Reply::ok("through")).await;
    let authority = rig.authority();
    let long = "x".repeat(70_000);
    for (head, status) in [
        ("GET / HTTP/1.1\r\n\r\n".to_owned(), 400),
        (format!("GET / HTTP/1.1\r\nHost: {authority}\r\nHost: {authority}\r\n\r\n"), 400),
        (format!("GET / HTTP/1.1\r\nHost: {authority}\r\nHost: b.test\r\n\r\n"), 400),
        (format!("GET /\0 HTTP/1.1\r\nHost: {authority}\r\n\r\n"), 400),
        (format!("POST / HTTP/1.1\r\nHost: {authority}\r\nContent-Length: +5\r\n\r\nhello"), 400),
        (format!("POST / HTTP/1.1\r\nHost: {authority}\r\nTransfer-Encoding: gzip, chunked\r\n\r\n"), 400),
        (format!("GET /{} HTTP/1.1\r\nHost: {authority}\r\n\r\n", &long[..20_000]), 414),
        (format!("GET / HTTP/1.1\r\nHost: {authority}\r\nX-Long: {long}\r\n\r\n"), 431),
    ] {
        let mut agent = rig.agent().await;
        agent.send(&head).await;
        let answer = agent.read_response().await;
        assert_eq!(answer.status, status, "{:?}", head.get(..80));
        assert_eq!(answer.header("content-type"), Some("application/problem+json"));
        assert_eq!(agent.ended().await, End::Closed, "{:?}", head.get(..80));
    }
    assert_eq!(rig.upstream.count(), 0);
}

#[tokio::test]
async fn a_head_that_does_not_end_inside_is_answered_408() {
    let hedgerow = intercepting("limits: { header_timeout: 300ms }").await;
    let mut agent = inside(&hedgerow, "a.test:443", HOST, trusting(&hedgerow)).await;
    agent.send("GET / HTTP/1.1\r\nHost: a.te").await;
    let answer = agent.read_response().await;
    assert_eq!(problem(&answer), (408, "request_timeout".into()));
    // And one that never begins is only closed.
    let mut agent = inside(&hedgerow, "a.test:443", HOST, trusting(&hedgerow)).await;
    agent.ended().await;
}

#[tokio::test]
async fn a_client_that_comes_back_takes_up_its_session() {
    let hedgerow = intercepting("").await;
    let connector = trusting(&hedgerow).connector();
    let mut resumed = Vec::new();
    for host in [HOST, HOST, "b.test", HOST] {
        let authority = format!("{host}:443");
        let mut agent = hedgerow.agent().await;
        assert_eq!(agent.open_tunnel(&authority).await.status, 200);
        let mut agent = agent.tls(&connector, host).await.unwrap();
        resumed.push(agent.is_resumed());
        // The tickets come with the first answer.
        assert_eq!(agent.get_at("elsewhere.test", "/").await.status, 421);
    }
    assert_eq!(resumed, [false, true, false, true]);
}

#[tokio::test]
async fn tls_1_2_is_ended_as_well() {
    let rig = Rig::answering("hedge: off", |_| Reply::ok("older")).await;
    let tls = AgentTls::trusting_pem_in_tls_1_2(&ca_pem(&rig.hedgerow));
    let mut agent = inside(&rig.hedgerow, &rig.authority(), HOST, tls).await;
    assert_eq!(agent.get_at(&rig.authority(), "/").await.text(), "older");
}

#[tokio::test]
async fn a_process_that_drains_serves_inside_and_asks_for_another_connection() {
    let mut rig = Rig::start("hedge: off").await;
    let authority = rig.authority();
    let mut agent = rig.agent().await;
    agent.send(format!("GET /1 HTTP/1.1\r\nHost: {authority}\r\n\r\n")).await;
    let held = rig.upstream.next().await;
    rig.hedgerow.signal(rustix::process::Signal::TERM);
    rig.hedgerow.stderr.until(|line| line.contains("draining")).await;
    // The agent may be finishing too.
    let mut late = rig.agent().await;
    let (answer, ()) = tokio::join!(late.get_at(&authority, "/2"), async {
        rig.upstream.next().await.respond(200, &[], "2").await;
    });
    assert_eq!((answer.text(), answer.header("connection")), ("2", Some("close")));
    held.respond(200, &[], "1").await;
    assert_eq!(agent.read_response().await.text(), "1");
    assert_eq!(rig.hedgerow.wait().await, 0);
}

#[tokio::test]
async fn what_the_policy_adds_and_where_it_leads_holds_inside() {
    let (pki, dns) = (Pki::new(), names().await);
    let upstream =
        Upstream::on([127, 0, 0, 1]).tls(pki.server(&["b.test"])).answering(|_| Reply::ok("led")).await;
    let endpoint = format!("b.test:{}", upstream.address().port());
    let stages = format!(
        "hedge: off, endpoint: \"https://{endpoint}\", \
         rewrite: {{ headers: {{ set: {{ authorization: \"Bearer ${{env:KEY}}\" }}, remove: [cookie] }} }}"
    );
    let launch = HedgerowProcess::with(&policy(&pki, &dns, &stages)).env("KEY", "from-the-policy");
    let hedgerow = launch.start().await;
    let mut agent = inside(&hedgerow, "a.test:443", HOST, trusting(&hedgerow)).await;
    agent.send("GET /x HTTP/1.1\r\nHost: a.test\r\nAuthorization: none\r\nCookie: c=1\r\n\r\n").await;
    assert_eq!(agent.read_response().await.text(), "led");
    let seen = &upstream.requests()[0];
    assert_eq!((seen.header("host"), seen.header("cookie")), (Some(endpoint.as_str()), None));
    assert_eq!(seen.header("authorization"), Some("Bearer from-the-policy"));
    assert_eq!(upstream.handshakes()[0].server_name.as_deref(), Some("b.test"));
}

#[tokio::test]
async fn clients_that_come_at_once_get_one_leaf_and_others_another() {
    let hedgerow = intercepting("").await;
    let agents = (0..30).map(|_| inside(&hedgerow, "a.test:443", HOST, trusting(&hedgerow)));
    let mut leaves: Vec<_> =
        futures_util::future::join_all(agents).await.iter().map(|agent| agent.peer_certificate()).collect();
    leaves.dedup();
    assert_eq!(leaves.len(), 1);
    let other = inside(&hedgerow, "b.test:443", "b.test", trusting(&hedgerow)).await;
    assert_ne!(other.peer_certificate(), leaves[0]);
}
