//! CONNECT: what a client is told, and what becomes of the bytes.

use std::time::Duration;

use tokio::time::Instant;

use crate::support::at_best_within;
use crate::support::client::{Agent, End, Response};
use crate::support::dns::{Answer, Dns};
use crate::support::hedgerow::HedgerowProcess;
use crate::support::pki::Pki;
use crate::support::policy::tool;
use crate::support::raw::RawPort;
use crate::support::upstream::{Reply, Upstream};

/// A tunnel to `port` through a connection of its own, with both of its ends.
async fn tunnel(hedgerow: &HedgerowProcess, port: &RawPort) -> (Agent, Agent) {
    let mut agent = hedgerow.agent().await;
    let authority = port.address().to_string();
    let (answer, upstream) = tokio::join!(agent.open_tunnel(&authority), port.accept());
    assert_eq!(answer.status, 200);
    (agent, upstream)
}

/// What every refused CONNECT looks like: the phrase is all that Go's client shows its user.
async fn refused(agent: &mut Agent, status: u16, error: &str) -> Response {
    let answer = agent.read_response_to("CONNECT").await;
    assert_eq!((answer.status, answer.reason.as_str()), (status, error));
    assert_eq!(answer.json()["error"], error);
    assert_eq!(answer.header("connection"), Some("close"));
    assert_eq!(answer.header("content-length"), Some(answer.body.len().to_string().as_str()));
    agent.ended().await;
    answer
}

/// The first byte of a TLS record: nothing that could be taken for HTTP.
const NO_HTTP: &[u8] = b"\x16\x03\x01 then what only the two ends understand";

#[tokio::test]
async fn c013_an_ipv6_authority_needs_its_brackets() {
    // Without them the parsers guessed different hosts and ports.
    let upstream = Upstream::on(std::net::Ipv6Addr::LOCALHOST).answering(|_| Reply::ok("")).await;
    let port = upstream.address().port();
    let hedgerow = HedgerowProcess::start("{}").await;
    for authority in ["2001:db8::1:443", &format!("::1:{port}")] {
        let mut agent = hedgerow.agent().await;
        agent.send(format!("CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n")).await;
        assert_eq!(agent.read_response_to("CONNECT").await.status, 400, "{authority}");
    }
    assert_eq!(upstream.connections(), 0);
    assert_eq!(hedgerow.agent().await.open_tunnel(&format!("[::1]:{port}")).await.status, 200);
    upstream.until(|tally| tally.connections == 1).await;
}

#[tokio::test]
async fn a_connect_target_is_a_host_with_a_port_and_nothing_else() {
    let hedgerow = HedgerowProcess::start("{}").await;
    for target in
        ["a.test", "a.test:", "http://a.test:443/", "/x", "*", "a.test:0", "a.test:99999", "127.1:443"]
    {
        let mut agent = hedgerow.agent().await;
        agent.send(format!("CONNECT {target} HTTP/1.1\r\nHost: a.test\r\n\r\n")).await;
        let answer = agent.read_response_to("CONNECT").await;
        assert_eq!((answer.status, answer.header("connection")), (400, Some("close")), "{target}");
        agent.ended().await;
    }
}

#[tokio::test]
async fn c021_bytes_sent_along_with_the_connect_go_first_and_once() {
    // They arrived in the same read as the head, and the proxy choked on them.
    let port = RawPort::bind().await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let mut agent = hedgerow.agent().await;
    let authority = port.address();
    let head = format!("CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n");
    agent.send([head.as_bytes(), NO_HTTP].concat()).await;
    assert_eq!(agent.read_response_to("CONNECT").await.status, 200);
    agent.send(b" and more").await;
    let mut upstream = port.accept().await;
    upstream.expect(NO_HTTP).await;
    upstream.expect(b" and more").await;
    agent.half_close().await;
    assert_eq!(upstream.ended().await, End::Closed);
}

#[tokio::test]
async fn c021_bytes_sent_along_with_a_refused_connect_are_no_request() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let (dead, _held) = Upstream::dead();
    let mut agent = hedgerow.agent().await;
    let address = upstream.address();
    agent
        .send(format!(
            "CONNECT {dead} HTTP/1.1\r\nHost: {dead}\r\n\r\nGET http://{address}/ HTTP/1.1\r\nHost: {address}\r\n\r\n"
        ))
        .await;
    refused(&mut agent, 502, "connect_failed").await;
    assert_eq!(upstream.count(), 0);
}

#[tokio::test]
async fn c022_a_2xx_to_connect_has_no_framing_fields() {
    // `Content-Length: 0` on it made clients take the tunnel for an empty answer.
    let port = RawPort::bind().await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let mut agent = hedgerow.agent().await;
    let answer = agent.open_tunnel(&port.address().to_string()).await;
    assert_eq!(answer.status, 200);
    for name in ["content-length", "transfer-encoding", "connection"] {
        assert_eq!(answer.header(name), None, "{name}");
    }
}

#[tokio::test]
async fn c023_a_half_closed_tunnel_still_carries_the_answer() {
    // Both sides were closed at the first FIN, and the reply was lost.
    let port = RawPort::bind().await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let (mut agent, mut upstream) = tunnel(&hedgerow, &port).await;
    agent.send(b"\x16 request!").await;
    agent.half_close().await;
    upstream.expect(b"\x16 request!").await;
    assert_eq!(upstream.ended().await, End::Closed);
    let reply: Vec<u8> = (0..1 << 20).map(|i: u32| (i * 7 % 253) as u8).collect();
    let (arrived, ()) = tokio::join!(agent.read_exactly(reply.len()), async {
        upstream.send(&reply).await;
        upstream.half_close().await;
    });
    assert!(arrived == reply);
    assert_eq!(agent.ended().await, End::Closed);
    hedgerow.until_status(|status| status["in_flight"] == 0 && status["connections"] == 0).await;
}

#[tokio::test]
async fn c024_a_refused_connect_names_its_reason_and_is_no_tunnel() {
    let dns = Dns::start(&[]).await;
    let (dead, _held) = Upstream::dead();
    let policy = format!(
        "dns: {{ servers: [\"{}\"] }}\nupstreams: {{ bad: {{ hosts: [\"{dead}\"], breaker: {{ consecutive_failures: 2 }} }} }}",
        dns.address()
    );
    let hedgerow = HedgerowProcess::start(&policy).await;
    let calls = [
        (dead.to_string(), 502, "connect_failed"),
        ("unknown.test:443".to_owned(), 502, "dns_failed"),
        (dead.to_string(), 502, "connect_failed"),
        (dead.to_string(), 503, "circuit_open"),
        ("169.254.169.254:80".to_owned(), 403, "egress_denied"),
    ];
    for (authority, status, error) in calls {
        let begin = Instant::now();
        let mut agent = hedgerow.agent().await;
        agent.send(format!("CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n")).await;
        refused(&mut agent, status, error).await;
        // And not at the deadline of half a minute.
        assert!(begin.elapsed() < Duration::from_secs(10), "{authority}: {:?}", begin.elapsed());
    }
}

#[tokio::test]
async fn a_connect_meets_its_deadline_with_a_status_line() {
    let dns = Dns::start(&[("mute.test", Answer::Mute)]).await;
    let policy = format!("dns: {{ servers: [\"{}\"], timeout: 1m }}", dns.address());
    let hedgerow = HedgerowProcess::start(&policy).await;
    let mut agent = hedgerow.agent().await;
    let deadline =
        (time::OffsetDateTime::now_utc() + Duration::from_millis(1500)).unix_timestamp_nanos() / 1_000_000;
    agent
        .send(format!(
            "CONNECT mute.test:443 HTTP/1.1\r\nHost: mute.test\r\nx-request-deadline: {deadline}\r\n\r\n"
        ))
        .await;
    let answer = refused(&mut agent, 504, "deadline_exceeded").await;
    assert!(answer.header("proxy-status").unwrap().contains("error=connection_timeout"));
}

#[tokio::test]
async fn c025_plain_http_in_a_tunnel_takes_the_journey_of_any_request() {
    // Node's fetch and WebSocket libraries open a tunnel even for http://; taken for TLS the stream broke, and
    // copied blindly it would escape every policy.
    let upstream = Upstream::answering(|seen| match seen.path() {
        "/bad" => Reply::status(500),
        _ => Reply::ok(seen.path().to_owned()),
    })
    .await;
    let address = upstream.address();
    let policy =
        format!("upstreams: {{ u: {{ hosts: [\"{address}\"], breaker: {{ consecutive_failures: 1 }} }} }}");
    let hedgerow = HedgerowProcess::start(&policy).await;
    let mut agent = hedgerow.agent().await;
    assert_eq!(agent.open_tunnel(&address.to_string()).await.status, 200);
    for path in ["/one", "/two?q", "/bad"] {
        agent.send(format!("GET {path} HTTP/1.1\r\nhOst: {address}\r\nX-Case: 1\r\n\r\n")).await;
        let answer = agent.read_response().await;
        assert_eq!(answer.header("x-hedgerow-attempts"), Some("1"), "{path}");
    }
    agent.send(format!("GET /three HTTP/1.1\r\nHost: {address}\r\n\r\n")).await;
    assert_eq!(agent.read_response().await.json()["error"], "circuit_open");

    let seen = upstream.requests();
    assert_eq!(
        seen.iter().map(|seen| seen.head.target.as_str()).collect::<Vec<_>>(),
        ["/one", "/two?q", "/bad"]
    );
    assert!(seen.iter().all(|seen| seen.header("via").is_none()), "the client knows of no proxy in a tunnel");
    assert!(seen[0].head.headers.names().contains(&"X-Case"));
    assert_eq!(upstream.connections(), 1, "the connection that the CONNECT made is the one that is used");
    let metrics =
        hedgerow.until_metrics(|m| m.value("hedgerow_requests_total", &[("code", "503")]) == 1.0).await;
    assert_eq!(metrics.value("hedgerow_requests_total", &[("upstream", "u"), ("code", "200")]), 2.0);
}

#[tokio::test]
async fn requests_in_a_tunnel_stay_at_its_name_whatever_they_say() {
    let upstream = Upstream::answering(|_| Reply::ok("tunnel's")).await;
    let other = Upstream::answering(|_| Reply::ok("other")).await;
    let (address, elsewhere) = (upstream.address(), other.address());
    let hedgerow = HedgerowProcess::start("{}").await;
    for target in ["/", &other.url("/")] {
        let mut agent = hedgerow.agent().await;
        assert_eq!(agent.open_tunnel(&address.to_string()).await.status, 200);
        agent.send(format!("GET {target} HTTP/1.1\r\nHost: {elsewhere}\r\n\r\n")).await;
        assert!(agent.read_response().await.text() != "other", "{target}");
    }
    assert_eq!(other.connections(), 0);
}

#[tokio::test]
async fn requests_in_a_tunnel_go_to_the_policys_endpoint_and_not_to_the_host_that_was_connected() {
    // The connection that the CONNECT had made was taken for one to the endpoint, and so the host saw what the
    // policy adds for the endpoint alone.
    let host = Upstream::answering(|_| Reply::ok("host")).await;
    let endpoint =
        Upstream::answering(|seen| Reply::ok(seen.header("x-key").unwrap_or("none").to_owned())).await;
    let policy = format!(
        "upstreams: {{ u: {{ hosts: [\"{}\"], endpoint: \"http://{}\", \
         rewrite: {{ headers: {{ set: {{ x-key: secret }} }} }} }} }}",
        host.address(),
        endpoint.address()
    );
    let hedgerow = HedgerowProcess::start(&policy).await;
    let authority = host.address().to_string();
    let mut agent = hedgerow.agent().await;
    assert_eq!(agent.open_tunnel(&authority).await.status, 200);
    assert_eq!(agent.get_at(&authority, "/").await.text(), "secret");
    assert_eq!((host.count(), endpoint.count()), (0, 1));
}

#[tokio::test]
async fn c025_a_server_that_speaks_first_is_heard_at_once() {
    let port = RawPort::bind().await;
    let hedgerow = HedgerowProcess::start("{}").await;
    // And not after the second that a client has to say what it speaks.
    at_best_within(Duration::from_secs(1), async || {
        let (mut agent, mut upstream) = tunnel(&hedgerow, &port).await;
        upstream.send(b"220 mail.example ready\r\n").await;
        agent.expect(b"220 mail.example ready\r\n").await;
        agent.send(b"EHLO a\r\n").await;
        upstream.expect(b"EHLO a\r\n").await;
    })
    .await;
}

/// A pod that gets no processor for a while is no reason to pass its calls by every policy.
#[tokio::test]
async fn a_client_that_is_slow_to_begin_is_heard_all_the_same() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let mut agent = hedgerow.agent().await;
    let address = upstream.address();
    assert_eq!(agent.open_tunnel(&address.to_string()).await.status, 200);
    // There is no event for silence: well past the times in which clients begin.
    tokio::time::sleep(Duration::from_secs(3)).await;
    agent.send(format!("GET /late HTTP/1.1\r\nHost: {address}\r\n\r\n")).await;
    upstream.next().await.respond(200, &[], "ok").await;
    assert_eq!(agent.read_response().await.header("x-hedgerow-attempts"), Some("1"));

    // What begins like a request and goes no further in a second is passed on as it is.
    let port = RawPort::bind().await;
    let (mut agent, mut upstream) = tunnel(&hedgerow, &port).await;
    agent.send(b"PO").await;
    upstream.expect(b"PO").await;
    agent.send(b"ST / HTTP/1.1\r\n\r\n").await;
    upstream.expect(b"ST / HTTP/1.1\r\n\r\n").await;
}

#[tokio::test]
async fn the_first_bytes_may_come_one_by_one() {
    let port = RawPort::bind().await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let (mut agent, mut upstream) = tunnel(&hedgerow, &port).await;
    for byte in b"GETX" {
        agent.send([*byte]).await;
        tokio::task::yield_now().await;
    }
    upstream.expect(b"GETX").await;

    let mut upstream = Upstream::start().await;
    let mut agent = hedgerow.agent().await;
    let address = upstream.address();
    assert_eq!(agent.open_tunnel(&address.to_string()).await.status, 200);
    for byte in format!("GET /slow HTTP/1.1\r\nHost: {address}\r\n\r\n").bytes() {
        agent.send([byte]).await;
        tokio::task::yield_now().await;
    }
    upstream.next().await.respond(200, &[], "ok").await;
    assert_eq!(agent.read_response().await.header("x-hedgerow-attempts"), Some("1"));
}

#[tokio::test]
async fn c026_content_of_a_connect_is_tunnel_data_or_refused_and_never_swallowed() {
    // Five announced bytes were taken for a body, and the tunnel began in the middle of a record.
    let port = RawPort::bind().await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let mut agent = hedgerow.agent().await;
    let authority = port.address();
    let head = format!("CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\nContent-Length: 5\r\n\r\n");
    agent.send([head.as_bytes(), NO_HTTP].concat()).await;
    let answer = agent.read_response_to("CONNECT").await;
    if answer.status == 200 {
        port.accept().await.expect(NO_HTTP).await;
    } else {
        assert_eq!((answer.status, answer.header("connection")), (400, Some("close")));
        agent.ended().await;
    }
}

#[tokio::test]
async fn connect_in_http_1_0_and_without_host_opens_a_tunnel() {
    let hedgerow = HedgerowProcess::start("{}").await;
    for version in ["1.0", "1.1"] {
        let port = RawPort::bind().await;
        let mut agent = hedgerow.agent().await;
        agent.send(format!("CONNECT {} HTTP/{version}\r\n\r\n", port.address())).await;
        assert_eq!(agent.read_response_to("CONNECT").await.status, 200, "{version}");
        let mut upstream = port.accept().await;
        agent.send(NO_HTTP).await;
        upstream.expect(NO_HTTP).await;
    }
}

#[tokio::test]
async fn tls_passes_a_tunnel_untouched() {
    let pki = Pki::new();
    let upstream =
        Upstream::on([127, 0, 0, 1]).tls(pki.server(&["localhost"])).answering(|_| Reply::ok("in TLS")).await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let mut agent = hedgerow.agent().await;
    assert_eq!(agent.open_tunnel(&upstream.address().to_string()).await.status, 200);
    let mut agent = agent.tls(&pki.connector(), "localhost").await.unwrap();
    assert_eq!(agent.get("http://localhost/").await.text(), "in TLS");
    drop(agent);
    let line = hedgerow.access_log(|line| line["method"] == "CONNECT").await;
    assert_eq!(line["outcome"], "tunnel");
}

#[tokio::test]
async fn the_end_of_either_side_ends_the_tunnel_and_gives_its_place_back() {
    let port = RawPort::bind().await;
    let address = port.address();
    let policy = format!(
        "upstreams: {{ u: {{ hosts: [\"{address}\"], bulkhead: {{ max_concurrent: 1, max_queue: 0 }} }} }}"
    );
    let hedgerow = HedgerowProcess::start(&policy).await;
    for side in ["client", "upstream"] {
        for reset in [false, true] {
            let (mut agent, mut upstream) = tunnel(&hedgerow, &port).await;
            agent.send(NO_HTTP).await;
            upstream.expect(NO_HTTP).await;
            let full = hedgerow.agent().await.open_tunnel(&address.to_string()).await;
            assert_eq!(
                (full.status, full.reason.as_str()),
                (503, "bulkhead_full"),
                "a tunnel holds its permit"
            );
            let (gone, mut left) = if side == "client" { (agent, upstream) } else { (upstream, agent) };
            if reset {
                gone.reset()
            } else {
                drop(gone)
            }
            left.ended().await;
            drop(left);
            hedgerow.until_status(|status| status["in_flight"] == 0).await;
        }
    }
}

#[tokio::test]
async fn a_reset_in_the_middle_of_an_upload_that_was_held_back_gives_the_place_back_at_once() {
    // The write failed before the reader had seen why, nothing woke it again, and the tunnel held its permit until
    // it had been idle for `stream_idle`.
    let port = RawPort::bind().await;
    let policy = tool(port.address(), "bulkhead: { max_concurrent: 1, max_queue: 0 }");
    let hedgerow = HedgerowProcess::start(&policy).await;
    let (mut agent, mut upstream) = tunnel(&hedgerow, &port).await;
    agent.send(NO_HTTP).await;
    upstream.expect(NO_HTTP).await;
    // Until nothing more is taken: all buffers on the way are full.
    let chunk = vec![b'x'; 1 << 20];
    while tokio::time::timeout(Duration::from_millis(300), agent.send(&chunk)).await.is_ok() {}
    upstream.reset();
    // `stream_idle` is five minutes.
    hedgerow.until_status(|status| status["in_flight"] == 0).await;
}
