//! Interception: calls in TLS that ends in the proxy meet the whole policy and look untouched to both ends.

use std::time::Duration;

use time::OffsetDateTime;
use tokio::time::Instant;

use crate::support::client::End;
use crate::support::dns::Dns;
use crate::support::hedgerow::HedgerowProcess;
use crate::support::intercept::{HOST, Rig, ca_pem, inside, intercepting, names, policy, problem, trusting};
use crate::support::pki::{AgentTls, Pki};
use crate::support::raw::RawPort;
use crate::support::upstream::{Reply, Upstream};

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

/// A pod that gets no processor for a while is no reason to pass its calls by every policy.
#[tokio::test]
async fn a_client_that_is_slow_to_begin_is_intercepted_all_the_same() {
    let rig = Rig::answering("hedge: off", |_| Reply::ok("late")).await;
    let mut agent = rig.hedgerow.agent().await;
    assert_eq!(agent.open_tunnel(&rig.authority()).await.status, 200);
    // There is no event for silence: well past the times in which clients begin.
    tokio::time::sleep(Duration::from_secs(3)).await;
    let mut agent = agent.tls(&trusting(&rig.hedgerow).connector(), HOST).await.unwrap();
    let answer = agent.get_at(&rig.authority(), "/").await;
    assert_eq!((answer.text(), answer.header("x-hedgerow-attempts")), ("late", Some("1")));
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
    let dns = Dns::start(&[]).await;
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
async fn a_deadline_inside_bounds_the_call_and_is_passed_on() {
    let mut rig = Rig::start("hedge: off").await;
    let mut agent = rig.agent().await;
    let begin = Instant::now();
    let at = OffsetDateTime::now_utc() + Duration::from_millis(1500);
    let told = format!("{}", at.unix_timestamp_nanos() / 1_000_000);
    agent
        .send(format!("GET / HTTP/1.1\r\nHost: {}\r\nx-request-deadline: {told}\r\n\r\n", rig.authority()))
        .await;
    let exchange = rig.upstream.next().await;
    assert_eq!(exchange.header("x-request-deadline"), Some(told.as_str()));
    let answer = agent.read_response().await;
    assert_eq!(problem(&answer), (504, "deadline_exceeded".into()));
    // Less a reserve of 50 ms, and long before the policy's half a minute.
    assert!((1400..15_000).contains(&begin.elapsed().as_millis()), "{:?}", begin.elapsed());
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
    const ROUNDS: usize = 10;
    let mut rig = Rig::start("hedge: off, breaker: { consecutive_failures: 1 }").await;
    let mut delays = Vec::new();
    for round in 0..ROUNDS {
        let mut agent = rig.agent().await;
        agent.send(format!("GET / HTTP/1.1\r\nHost: {}\r\n\r\n", rig.authority())).await;
        let mut exchange = rig.upstream.next().await;
        exchange.start_chunks(200, &[]).await;
        exchange.chunk("first").await;
        assert_eq!(agent.read_head().await.status, 200);
        let left_at = Instant::now();
        if round % 2 == 0 {
            agent.reset()
        } else {
            drop(agent)
        }
        delays.push(exchange.gone().await.duration_since(left_at));
        let left = [("outcome", "client_left"), ("code", "499")];
        let times = (round + 1) as f64;
        rig.hedgerow.until_metrics(|m| m.value("hedgerow_requests_total", &left) == times).await;
    }
    delays.sort();
    // What is looked for once a second has a median of half of one.
    assert!(delays[ROUNDS / 2] < Duration::from_millis(300), "{delays:?}");
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
    let hedgerow = intercepting("limits: { header_timeout: 1500ms }").await;
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
