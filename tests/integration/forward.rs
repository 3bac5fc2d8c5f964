//! The forward proxy as a client with `HTTP_PROXY` knows it: which upstream a request goes to, and what of it
//! arrives there.

use std::time::Duration;

use crate::support::client::{Agent, End, absolute};
use crate::support::dns::{Answer, Dns};
use crate::support::h1::Framing;
use crate::support::hedgerow::HedgerowProcess;
use crate::support::raw::RawPort;
use crate::support::upstream::{Reply, Upstream};

/// A policy whose names are resolved by `dns`.
fn with_dns(dns: &Dns, rest: &str) -> String {
    format!("dns: {{ servers: [\"{}\"] }}\n{rest}", dns.address())
}

#[tokio::test]
async fn absolute_form_leaves_as_origin_form_with_the_target_byte_for_byte() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let mut agent = hedgerow.agent().await;
    for target in ["/", "/a%2Fb/../c;p=1?q=%41&r=a+b%20", "//x//y", "/?", "/a?b?c=//d", "/%7euser/*'()!$"] {
        assert_eq!(agent.get(&upstream.url(target)).await.status, 200);
        let seen = upstream.requests().pop().unwrap();
        assert_eq!(seen.head.target, target);
        assert_eq!(seen.header("host"), Some(upstream.address().to_string().as_str()));
    }
    // Neither an empty path nor a fragment travels.
    for (url, target) in [("", "/"), ("?q", "/?q"), ("/a#part", "/a"), ("/a?b#part?x", "/a?b")] {
        let address = upstream.address();
        agent.send(format!("GET http://{address}{url} HTTP/1.1\r\nHost: {address}\r\n\r\n")).await;
        assert_eq!(agent.read_response().await.status, 200, "{url}");
        assert_eq!(upstream.requests().pop().unwrap().head.target, target);
    }
}

#[tokio::test]
async fn origin_form_goes_where_the_host_field_says() {
    let upstream = Upstream::answering(|_| Reply::ok("by host")).await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let mut agent = hedgerow.agent().await;
    agent.send(format!("GET /x?y HTTP/1.1\r\nHost: {}\r\n\r\n", upstream.address())).await;
    assert_eq!(agent.read_response().await.text(), "by host");
    assert_eq!(upstream.requests()[0].head.target, "/x?y");
}

#[tokio::test]
async fn targets_and_hosts_that_name_no_upstream_are_refused() {
    let hedgerow = HedgerowProcess::start("{}").await;
    for head in [
        "GET / HTTP/1.1\r\n\r\n",
        "GET / HTTP/1.1\r\nHost:\r\n\r\n",
        "GET / HTTP/1.0\r\n\r\n",
        "GET http://a.test/ HTTP/1.1\r\n\r\n",
        "GET http:///x HTTP/1.1\r\nHost: a.test\r\n\r\n",
        "GET ftp://a.test/ HTTP/1.1\r\nHost: a.test\r\n\r\n",
        "GET a.test:80 HTTP/1.1\r\nHost: a.test\r\n\r\n",
        "GET http://a.test/ HTTP/1.1\r\nHost: a test\r\n\r\n",
        "GET http://2130706433/ HTTP/1.1\r\nHost: 2130706433\r\n\r\n",
        "GET http://0x7f.1/ HTTP/1.1\r\nHost: 0x7f.1\r\n\r\n",
        "GET http://127.1/ HTTP/1.1\r\nHost: 127.1\r\n\r\n",
        "GET http://0177.0.0.1/ HTTP/1.1\r\nHost: 0177.0.0.1\r\n\r\n",
        "GET http://a.test:0/ HTTP/1.1\r\nHost: a.test:0\r\n\r\n",
        "GET http://a.test:65536/ HTTP/1.1\r\nHost: a.test\r\n\r\n",
        "GET http://b\u{fc}cher.test/ HTTP/1.1\r\nHost: b\u{fc}cher.test\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: b\u{fc}cher.test\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: user@a.test\r\n\r\n",
    ] {
        let mut agent = hedgerow.agent().await;
        agent.send(head).await;
        let answer = agent.read_response().await;
        assert_eq!((answer.status, &answer.json()["error"]), (400, &"invalid_request".into()), "{head:?}");
        agent.ended().await;
    }
}

#[tokio::test]
async fn what_real_clients_send_is_accepted() {
    let upstream = Upstream::answering(|_| Reply::ok("ok")).await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let (url, address) = (upstream.url("/"), upstream.address());
    for head in [
        // Go, when a body was set to empty.
        format!("GET {url} HTTP/1.1\r\nHost: {address}\r\nContent-Length: 0\r\n\r\n"),
        // Old Python clients leave the port out.
        format!("GET {url} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"),
        format!("GET {url} HTTP/1.1\r\nHost:\r\n\r\n"),
        format!("GET {url} HTTP/1.0\r\n\r\n"),
        format!("GET HTTP://{address}/ HTTP/1.1\r\nHost: {address}\r\n\r\n"),
        // An empty line left behind by the request before (RFC 9112 section 2.2).
        format!("\r\nGET {url} HTTP/1.1\r\nHost: {address}\r\n\r\n"),
    ] {
        let mut agent = hedgerow.agent().await;
        agent.send(&head).await;
        assert_eq!(agent.read_response().await.text(), "ok", "{head:?}");
    }
}

#[tokio::test]
async fn c007_connection_fields_end_at_each_hop() {
    // What `Connection` lists is between two neighbours; passed on, it reached origins and clients.
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let mut agent = hedgerow.agent().await;
    let fields = [
        ("Connection", "X-HOP, close"),
        ("X-Hop", "s3"),
        ("Keep-Alive", "5"),
        ("Proxy-Connection", "x"),
        ("TE", "gzip"),
        ("X-End", "kept"),
    ];
    agent.send(absolute("GET", &upstream.url("/"), &fields, b"")).await;
    let exchange = upstream.next().await;
    for name in ["connection", "x-hop", "keep-alive", "proxy-connection", "te"] {
        assert_eq!(exchange.header(name), None, "{name}");
    }
    assert_eq!(exchange.header("x-end"), Some("kept"));
    let fields = [
        ("Connection", "x-BACK"),
        ("X-Back", "s3"),
        ("Keep-Alive", "5"),
        ("Proxy-Connection", "x"),
        ("X-End", "kept"),
    ];
    exchange.respond(200, &fields, "").await;
    let answer = agent.read_response().await;
    for name in ["x-back", "keep-alive", "proxy-connection"] {
        assert_eq!(answer.header(name), None, "{name}");
    }
    assert_eq!(answer.header("x-end"), Some("kept"));
    // The client asked for the end of its own connection, and gets it.
    assert_eq!(answer.header("connection"), Some("close"));
    assert_eq!(agent.ended().await, End::Closed);
}

#[tokio::test]
async fn connection_cannot_name_away_what_the_message_needs() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let mut agent = hedgerow.agent().await;
    let fields = [("Connection", "Host, Content-Length, Content-Type"), ("Content-Type", "text/x")];
    agent.send(absolute("POST", &upstream.url("/"), &fields, b"body")).await;
    let mut exchange = upstream.next().await;
    assert_eq!(exchange.body().await, b"body");
    assert_eq!(exchange.header("content-type"), Some("text/x"));
    exchange.respond(200, &[], "").await;
    assert_eq!(agent.read_response().await.status, 200);
}

#[tokio::test]
async fn c008_expect_continue_is_asked_of_the_upstream_and_its_100_comes_back() {
    // The proxy swallowed the expectation and waited for the body, the client waited for the 100.
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start("defaults: { hedge: { after: 20ms, methods: [GET, PUT] } }").await;
    let mut agent = hedgerow.agent().await;
    let fields = [("Expect", "100-continue"), ("Content-Length", "4")];
    agent.send(absolute("PUT", &upstream.url("/"), &fields, b"")).await;
    let mut exchange = upstream.next().await;
    assert_eq!(exchange.header("expect"), Some("100-continue"));
    exchange.raw(b"HTTP/1.1 100 Continue\r\n\r\n").await;
    assert_eq!(agent.read_head().await.status, 100);
    agent.send("body").await;
    assert_eq!(exchange.body().await, b"body");
    exchange.respond(201, &[], "").await;
    let answer = agent.read_response().await;
    assert_eq!((answer.status, answer.interims.len()), (201, 0));
}

#[tokio::test]
async fn c008_upstream_that_ignores_the_expectation_holds_nobody_up() {
    let upstream = Upstream::answering(|seen| Reply::ok(seen.body.clone())).await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let mut agent = hedgerow.agent().await;
    let fields = [("Expect", "100-continue"), ("Content-Length", "4")];
    agent.send(absolute("POST", &upstream.url("/"), &fields, b"")).await;
    assert_eq!(agent.read_head().await.status, 100);
    agent.send("body").await;
    assert_eq!(agent.read_response().await.text(), "body");
    assert_eq!(upstream.count(), 1);
}

#[tokio::test]
async fn c008_refused_expectation_spares_the_body() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let mut agent = hedgerow.agent().await;
    let fields = [("Expect", "100-continue"), ("Content-Length", "4")];
    agent.send(absolute("POST", &upstream.url("/"), &fields, b"")).await;
    let mut exchange = upstream.next().await;
    exchange.head_only(417, &[("Content-Length", "0"), ("Connection", "close")]).await;
    exchange.close().await;
    let answer = agent.read_response().await;
    assert_eq!((answer.status, answer.interims.len()), (417, 0));
}

#[tokio::test]
async fn c009_proxy_credentials_stay_here() {
    // They were meant for the proxy, and went to whoever the agent called.
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::with("{}").argument("--log-level=trace").start().await;
    let secret = ("Proxy-Authorization", "Basic Y2FuYXJ5");
    let mut agent = hedgerow.agent().await;
    assert_eq!(agent.request("GET", &upstream.url("/"), &[secret], b"").await.status, 200);

    let address = upstream.address();
    agent
        .send(format!("CONNECT {address} HTTP/1.1\r\nHost: {address}\r\n{}: {}\r\n\r\n", secret.0, secret.1))
        .await;
    assert_eq!(agent.read_response_to("CONNECT").await.status, 200);
    agent.send(format!("GET / HTTP/1.1\r\nHost: {address}\r\n{}: {}\r\n\r\n", secret.0, secret.1)).await;
    assert_eq!(agent.read_response().await.status, 200);

    assert_eq!(upstream.count(), 2);
    for seen in upstream.requests() {
        assert!(!String::from_utf8_lossy(&seen.head.raw).contains("Y2FuYXJ5"));
    }
    assert!(!hedgerow.stderr.text().contains("Y2FuYXJ5") && !hedgerow.stdout.text().contains("Y2FuYXJ5"));
}

#[tokio::test]
async fn c010_interim_answers_pass_without_their_hop_by_hop_fields() {
    // The 200 was cleaned, the 103 before it was not.
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let mut agent = hedgerow.agent().await;
    agent.send(absolute("GET", &upstream.url("/"), &[], b"")).await;
    let mut exchange = upstream.next().await;
    let fields =
        [("Link", "</a>; rel=preload"), ("Connection", "X-Nom"), ("X-Nom", "1"), ("Keep-Alive", "5")];
    exchange.head_only(103, &fields).await;
    // It comes at once, not together with the final answer.
    let hints = agent.read_head().await;
    assert_eq!((hints.status, hints.headers.get("link")), (103, Some("</a>; rel=preload")));
    for name in ["connection", "x-nom", "keep-alive"] {
        assert_eq!(hints.headers.get(name), None, "{name}");
    }
    exchange.respond(200, &[], "final").await;
    let answer = agent.read_response().await;
    assert_eq!((answer.status, answer.text(), answer.interims.len()), (200, "final", 0));
}

#[tokio::test]
async fn an_http_1_0_client_gets_no_interim_answers_and_no_chunks() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let mut agent = hedgerow.agent().await;
    agent.send(format!("GET {} HTTP/1.0\r\n\r\n", upstream.url("/"))).await;
    let mut exchange = upstream.next().await;
    assert_eq!(exchange.head.version, 1, "our own hop speaks HTTP/1.1");
    assert_eq!(exchange.header("host"), Some(upstream.address().to_string().as_str()));
    exchange.head_only(103, &[("Link", "</a>")]).await;
    exchange.start_chunks(200, &[]).await;
    exchange.chunk("one").await;
    exchange.chunk("two").await;
    exchange.end().await;
    let answer = agent.read_response().await;
    assert_eq!((answer.status, answer.framing, answer.text()), (200, Framing::UntilClose, "onetwo"));
    assert!(answer.complete && answer.interims.is_empty());
}

#[tokio::test]
async fn c011_absolute_form_wins_over_the_host_field() {
    // The two disagreed and the wrong one decided: the request went to b under a's rules, or the other way.
    let a = Upstream::on([127, 0, 0, 2]).answering(|_| Reply::ok("a")).await;
    let port = a.address().port();
    let b = Upstream::on([127, 0, 0, 3]).port(port).answering(|_| Reply::ok("b")).await;
    let dns = Dns::start(&[
        ("a.test", Answer::addresses(&["127.0.0.2"])),
        ("b.test", Answer::addresses(&["127.0.0.3"])),
    ])
    .await;
    let policy = with_dns(&dns, "upstreams: { one: { hosts: [a.test] }, other: { hosts: [b.test] } }");
    let hedgerow = HedgerowProcess::start(&policy).await;
    let mut agent = hedgerow.agent().await;
    agent.send(format!("GET http://a.test:{port}/x HTTP/1.1\r\nHost: b.test:{port}\r\n\r\n")).await;
    assert_eq!(agent.read_response().await.text(), "a");
    assert_eq!((a.count(), b.count()), (1, 0));
    assert_eq!(a.requests()[0].header("host"), Some(format!("a.test:{port}").as_str()));
    hedgerow.until_metrics(|m| m.value("hedgerow_requests_total", &[("upstream", "one")]) == 1.0).await;
    assert_eq!(hedgerow.metrics().await.value("hedgerow_requests_total", &[("upstream", "other")]), 0.0);
}

#[tokio::test]
async fn c012_user_information_in_a_target_is_refused_and_told_to_nobody() {
    // It went out on the request line and into the access log.
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::with("{}").argument("--log-level=trace").start().await;
    let address = upstream.address();
    for head in [
        format!("GET http://user:canary@{address}/x HTTP/1.1\r\nHost: {address}\r\n\r\n"),
        format!("CONNECT user:canary@{address} HTTP/1.1\r\nHost: {address}\r\n\r\n"),
    ] {
        let mut agent = hedgerow.agent().await;
        agent.send(&head).await;
        let answer = agent.read_response().await;
        assert_eq!(answer.status, 400);
        assert!(!answer.text().contains("canary") && !answer.reason.contains("canary"));
    }
    assert_eq!(upstream.count(), 0);
    hedgerow.access_log(|line| line["status"] == 400 && line["method"] == "CONNECT").await;
    let told = [hedgerow.stdout.text(), hedgerow.stderr.text(), hedgerow.status().await.to_string()];
    assert!(told.iter().all(|text| !text.contains("canary")), "{told:?}");
}

#[tokio::test]
async fn c014_ipv6_addresses_are_dialled_without_their_brackets_and_keep_them_in_host() {
    // The brackets went to the resolver, which knew no such name.
    let upstream = Upstream::on(std::net::Ipv6Addr::LOCALHOST).answering(|_| Reply::ok("six")).await;
    let port = upstream.address().port();
    let hedgerow = HedgerowProcess::start("{}").await;
    assert_eq!(hedgerow.get(&format!("http://[::1]:{port}/")).await.text(), "six");
    assert_eq!(hedgerow.get(&format!("http://[0:0::0001]:{port}/")).await.text(), "six");
    for seen in upstream.requests() {
        assert_eq!(seen.header("host"), Some(format!("[::1]:{port}").as_str()));
    }
    assert_eq!(upstream.connections(), 1, "two spellings are one upstream with one pool");
}

/// One breaker that opens at the first failure, on an upstream whose hosts stand for `target`.
fn brittle(hosts: &str, target: &Upstream) -> String {
    format!(
        "upstreams: {{ brittle: {{ hosts: [{hosts}], endpoint: \"http://{}\", breaker: {{ consecutive_failures: 1 }} }} }}",
        target.address()
    )
}

#[tokio::test]
async fn c015_the_default_port_written_or_not_is_one_upstream() {
    // Written with its port a host missed the rule that was written without it.
    let upstream = Upstream::answering(|_| Reply::status(500)).await;
    let hedgerow = HedgerowProcess::start(&brittle("a.test", &upstream)).await;
    assert_eq!(hedgerow.get("http://a.test/").await.status, 500);
    for url in
        ["http://a.test:80/", "http://a.test/", "http://a.test.:80/", "http://a.test:/", "http://a.test:080/"]
    {
        let answer = hedgerow.get(url).await;
        assert_eq!((answer.status, &answer.json()["error"]), (503, &"circuit_open".into()), "{url}");
    }
    assert_eq!(upstream.count(), 1);
    let metrics =
        hedgerow.until_metrics(|m| m.value("hedgerow_requests_total", &[("upstream", "brittle")]) == 6.0);
    assert_eq!(
        metrics.await.value("hedgerow_breaker_state", &[("upstream", "brittle"), ("state", "open")]),
        1.0
    );
}

#[tokio::test]
async fn c016_hosts_compare_without_case_on_both_sides() {
    let upstream = Upstream::answering(|_| Reply::status(500)).await;
    for hosts in ["a.test", "A.TEST"] {
        let before = upstream.count();
        let hedgerow = HedgerowProcess::start(&brittle(hosts, &upstream)).await;
        assert_eq!(hedgerow.get("http://A.TesT/").await.status, 500);
        assert_eq!(hedgerow.get("http://a.test/").await.json()["upstream"], "brittle");
        assert_eq!(upstream.count(), before + 1);
        let metrics =
            hedgerow.until_metrics(|m| m.value("hedgerow_requests_total", &[("code", "503")]) == 1.0);
        assert_eq!(metrics.await.value("hedgerow_requests_total", &[("upstream", "brittle")]), 2.0);
    }
}

#[tokio::test]
async fn c017_a_host_written_in_unicode_is_met_by_its_a_label() {
    // The rule was dead without a word, since clients send the A-label.
    let upstream = Upstream::answering(|_| Reply::status(500)).await;
    let hedgerow = HedgerowProcess::start(&brittle("B\u{fc}cher.test", &upstream)).await;
    assert_eq!(hedgerow.get("http://xn--bcher-kva.test/").await.status, 500);
    assert_eq!(hedgerow.get("http://XN--BCHER-KVA.test/").await.json()["error"], "circuit_open");
    assert_eq!(upstream.count(), 1);

    let hedgerow = HedgerowProcess::start("egress: { deny: [b\u{fc}cher.test] }").await;
    assert_eq!(hedgerow.get("http://xn--bcher-kva.test/").await.json()["error"], "egress_denied");
}

#[tokio::test]
async fn c018_two_host_fields_are_refused_equal_or_not() {
    // The first was taken and the second, which others take, was ignored.
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let address = upstream.address();
    for target in ["/", &upstream.url("/")] {
        for second in [address.to_string(), "b.test".to_owned()] {
            let mut agent = hedgerow.agent().await;
            agent.send(format!("GET {target} HTTP/1.1\r\nHost: {address}\r\nHost: {second}\r\n\r\n")).await;
            assert_eq!(agent.read_response().await.status, 400, "{target} {second}");
        }
    }
    assert_eq!(upstream.count(), 0);
}

#[tokio::test]
async fn field_names_keep_their_spelling_and_repeated_fields_their_order_both_ways() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let mut agent = hedgerow.agent().await;
    let fields =
        [("X-API-Key", "1"), ("x-lower", "2"), ("ACCEPT", "a"), ("X-Two", "first"), ("X-Two", "second")];
    agent.send(absolute("GET", &upstream.url("/"), &fields, b"")).await;
    let exchange = upstream.next().await;
    for (name, _) in fields {
        assert!(exchange.head.headers.names().contains(&name), "{name}: {:?}", exchange.head.headers.names());
    }
    assert_eq!(exchange.head.headers.all("x-two"), ["first", "second"]);
    let fields =
        [("X-RateLimit-Limit", "1"), ("ETAG", "\"a\""), ("set-cookie", "a=1"), ("Set-Cookie", "b=2")];
    exchange.respond(200, &fields, "").await;
    let answer = agent.read_response().await;
    for (name, _) in fields {
        assert!(answer.headers.names().contains(&name), "{name}: {:?}", answer.headers.names());
    }
    assert_eq!(answer.headers.all("set-cookie"), ["a=1", "b=2"]);
}

#[tokio::test]
async fn via_grows_on_the_way_there_and_back() {
    let mut upstream = Upstream::start().await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let mut agent = hedgerow.agent().await;
    agent.send(absolute("GET", &upstream.url("/"), &[("Via", "1.0 before")], b"")).await;
    let exchange = upstream.next().await;
    let via = exchange.head.headers.all("via").join(", ");
    assert!(via.starts_with("1.0 before, 1.1 hedgerow-"), "{via}");
    exchange.respond(200, &[("Via", "1.1 far")], "").await;
    assert_eq!(agent.read_response().await.headers.all("via").join(", "), "1.1 far, 1.1 hedgerow");
}

#[tokio::test]
async fn pipelined_requests_are_answered_in_their_order() {
    let upstream = Upstream::answering(|seen| {
        let delay = if seen.path() == "/0" { 60 } else { 0 };
        Reply::ok(seen.path().to_owned()).after(Duration::from_millis(delay))
    })
    .await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let mut agent = hedgerow.agent().await;
    let requests: Vec<u8> =
        (0..10).flat_map(|i| absolute("GET", &upstream.url(&format!("/{i}")), &[], b"")).collect();
    agent.send(requests).await;
    for i in 0..10 {
        assert_eq!(agent.read_response().await.text(), format!("/{i}"));
    }
}

#[tokio::test]
async fn a_client_connection_outlives_the_time_after_which_it_is_parked() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let mut agent = hedgerow.agent().await;
    assert_eq!(agent.get(&upstream.url("/")).await.status, 200);
    // There is no event for being parked; its end after this pause would show as no answer.
    tokio::time::sleep(Duration::from_millis(1300)).await;
    assert_eq!(agent.get(&upstream.url("/")).await.status, 200);
}

#[tokio::test]
async fn an_idle_client_connection_is_closed_after_keep_alive_and_not_before() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::start("limits: { keep_alive: 1500ms }").await;
    let mut agent = hedgerow.agent().await;
    let asked = tokio::time::Instant::now();
    assert_eq!(agent.get(&upstream.url("/")).await.status, 200);
    assert_eq!(agent.ended().await, End::Closed);
    assert!(asked.elapsed() >= Duration::from_millis(1500), "{:?}", asked.elapsed());
}

#[tokio::test]
async fn http_1_0_keeps_a_connection_only_when_asked() {
    let upstream = Upstream::answering(|_| Reply::ok("ok")).await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let mut agent = hedgerow.agent().await;
    for _ in 0..2 {
        agent.send(format!("GET {} HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", upstream.url("/"))).await;
        let answer = agent.read_response().await;
        assert_eq!((answer.text(), answer.header("connection")), ("ok", Some("keep-alive")));
    }
    agent.send(format!("GET {} HTTP/1.0\r\n\r\n", upstream.url("/"))).await;
    assert_eq!(agent.read_response().await.text(), "ok");
    assert_eq!(agent.ended().await, End::Closed);
}

#[tokio::test]
async fn max_forwards_counts_down_and_ends_here_at_zero() {
    let upstream = Upstream::answering(|_| Reply::ok("upstream")).await;
    let hedgerow = HedgerowProcess::start("{}").await;
    for method in ["OPTIONS", "TRACE"] {
        let mut agent = hedgerow.agent().await;
        let before = upstream.count();
        let own = agent.request(method, &upstream.url("/"), &[("Max-Forwards", "0")], b"").await;
        assert_eq!((own.status, own.text(), upstream.count()), (200, "", before));
        let passed = agent.request(method, &upstream.url("/"), &[("Max-Forwards", "3")], b"").await;
        assert_eq!(passed.text(), "upstream");
        assert_eq!(upstream.requests().pop().unwrap().header("max-forwards"), Some("2"));
    }
    // Other methods have no use for it.
    hedgerow.agent().await.request("GET", &upstream.url("/"), &[("Max-Forwards", "0")], b"").await;
    assert_eq!(upstream.requests().pop().unwrap().header("max-forwards"), Some("0"));
}

#[tokio::test]
async fn options_of_a_whole_server_goes_on_as_asterisk_form() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let address = upstream.address();
    for target in [format!("http://{address}"), "*".to_owned()] {
        let mut agent = hedgerow.agent().await;
        agent.send(format!("OPTIONS {target} HTTP/1.1\r\nHost: {address}\r\n\r\n")).await;
        assert_eq!(agent.read_response().await.status, 200, "{target}");
        assert_eq!(upstream.requests().pop().unwrap().head.target, "*", "{target}");
    }
}

#[tokio::test]
async fn a_request_that_comes_back_is_answered_502_loop_and_another_hedgerow_is_no_loop() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::start("{}").await;
    hedgerow.get(&upstream.url("/")).await;
    let ours = upstream.requests()[0].header("via").unwrap().to_owned();

    let mut agent = hedgerow.agent().await;
    let looped = agent.request("GET", &upstream.url("/"), &[("Via", &format!("1.1 x, {ours}"))], b"").await;
    assert_eq!((looped.status, &looped.json()["error"]), (502, &"loop".into()));
    assert!(looped.header("proxy-status").unwrap().contains("error=proxy_loop_detected"));
    let others = agent.request("GET", &upstream.url("/"), &[("Via", "1.1 hedgerow-00000000")], b"").await;
    assert_eq!(others.status, 200);
    assert_eq!(upstream.count(), 2);
}

#[tokio::test]
async fn a_loop_through_another_relay_ends_after_one_round() {
    // Our own port is refused by its address; behind a relay only `Via` can tell.
    let relay = RawPort::bind().await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let round = async {
        let mut from = relay.accept().await;
        let head = from.read_request().await;
        let mut back = hedgerow.agent().await;
        back.send(&head.raw).await;
        let answer = back.read_response().await;
        assert_eq!(answer.status, 502);
        let body = answer.text();
        from.send(format!("HTTP/1.1 502 Bad Gateway\r\nContent-Length: {}\r\n\r\n{body}", body.len())).await;
        from
    };
    let url = relay.url("/");
    let (answer, _from) = tokio::join!(hedgerow.get(&url), round);
    assert_eq!(answer.json()["error"], "loop");
}

#[tokio::test]
async fn c124_hedgerows_own_ports_are_out_of_reach_by_every_alias() {
    // Asked for itself, a proxy dialled itself until memory ran out; and the admin port takes orders.
    let dns = Dns::start(&[
        ("me.test", Answer::addresses(&["127.0.0.1", "::1"])),
        ("mapped.test", Answer::addresses(&["::ffff:127.0.0.1"])),
    ])
    .await;
    let hedgerow = HedgerowProcess::start(&with_dns(&dns, "")).await;
    hedgerow.get("http://nowhere.test/").await;
    let before = hedgerow.open_files();
    let hosts = [
        "127.0.0.1",
        "127.0.0.2",
        "127.255.255.254",
        "localhost",
        "LOCALHOST.",
        "0.0.0.0",
        "[::1]",
        "[::]",
        "[::ffff:127.0.0.1]",
        "[::ffff:0.0.0.0]",
        "me.test",
        "mapped.test",
    ];
    for port in [hedgerow.proxy.port(), hedgerow.admin.port()] {
        for host in hosts {
            let answer = hedgerow.get(&format!("http://{host}:{port}/status")).await;
            assert!(matches!(answer.status, 403 | 404), "GET {host}:{port}: {}", answer.status);
            let answer = hedgerow.get(&format!("https://{host}:{port}/status")).await;
            assert!(matches!(answer.status, 403 | 404), "GET https {host}:{port}: {}", answer.status);
            let answer = hedgerow.agent().await.open_tunnel(&format!("{host}:{port}")).await;
            assert!(matches!(answer.status, 403 | 404), "CONNECT {host}:{port}: {}", answer.status);
            let mut agent = hedgerow.agent().await;
            agent.send(format!("GET /status HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n")).await;
            let answer = agent.read_response().await;
            assert!(matches!(answer.status, 403 | 404), "Host {host}:{port}: {}", answer.status);
        }
    }
    let admin = hedgerow.admin;
    let policy = format!("upstreams: {{ x: {{ hosts: [x.test], endpoint: \"http://{admin}\" }} }}");
    let mut hedgerow = hedgerow;
    hedgerow.policy.write_in_place(&with_dns(&dns, &policy));
    let reloaded = [("result", "applied")];
    hedgerow.until_metrics(|m| m.value("hedgerow_config_reloads_total", &reloaded) >= 1.0).await;
    let answer = hedgerow.get("http://x.test/status").await;
    assert_eq!((answer.status, &answer.json()["error"]), (403, &"egress_denied".into()));
    // Closing is not instant on our side of it.
    hedgerow.until_status(|status| status["connections"] == 0).await;
    assert!(hedgerow.open_files() <= before + 2, "{} descriptors, {before} before", hedgerow.open_files());
}

#[tokio::test]
async fn a_request_body_and_an_answer_pass_unchanged_in_both_framings() {
    let upstream = Upstream::answering(|seen| {
        let whole = Reply::ok(seen.body.clone());
        if seen.path() == "/chunked" { whole.drip(7, Duration::ZERO) } else { whole }
    })
    .await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let body: Vec<u8> = (0..300_000_u32).map(|i| (i * 31 % 251) as u8).collect();
    let mut agent: Agent = hedgerow.agent().await;
    for path in ["/length", "/chunked"] {
        let answer = agent.request("POST", &upstream.url(path), &[], &body).await;
        assert!(answer.complete && answer.body == body, "{path}: {} bytes", answer.body.len());
    }
    let mut chunked = absolute("POST", &upstream.url("/chunked"), &[("Transfer-Encoding", "chunked")], b"");
    for piece in body.chunks(9999) {
        chunked.extend([format!("{:x}\r\n", piece.len()).as_bytes(), piece, b"\r\n"].concat());
    }
    chunked.extend(b"0\r\n\r\n");
    agent.send(chunked).await;
    assert!(agent.read_response().await.body == body);
}
