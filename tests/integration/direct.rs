//! What `direct` lists passes with no policy at all, and the egress guard still looks at it.

use std::net::Ipv6Addr;
use std::time::Duration;

use serde_json::json;

use crate::support::client::{Response, absolute};
use crate::support::dns::{Answer, Dns};
use crate::support::hedgerow::HedgerowProcess;
use crate::support::intercept::{HOST, base, inside, names, trusting};
use crate::support::pki::Pki;
use crate::support::upstream::{Reply, Upstream};

/// Everything that a policy can do to a call.
const STRICT: &str = "deadline: { default: 1s, max: 1s, tell_envoy: true }, attempt_timeout: 300ms, \
     hedge: { after: 50ms }, extra_load: { ratio: 100%, floor: 100/s }, \
     bulkhead: { max_concurrent: 1, max_queue: 0 }, breaker: { consecutive_failures: 1, open_for: 1m }, \
     retry: { backoff: 1ms }, rate_limit: { rate: 1/h, burst: 1 }, coalesce: true, cache: { ttl: 1h }, \
     fallback: [{ degraded: { status: 200 } }]";
const DIRECT: (&str, &str) = ("upstream", "direct");

async fn get(hedgerow: &HedgerowProcess, url: &str, fields: &[(&str, &str)]) -> Response {
    hedgerow.agent().await.request("GET", url, fields, b"").await
}

/// None of what the defaults say happens to it.
#[tokio::test]
async fn what_is_direct_passes_without_any_stage() {
    let mut upstream = Upstream::start().await;
    let policy = format!("direct: [127.0.0.1]\ndefaults: {{ {STRICT} }}");
    let hedgerow = HedgerowProcess::start(&policy).await;
    let url = upstream.url("/a?b=c");
    let mut agents = Vec::new();
    for _ in 0..2 {
        let mut agent = hedgerow.agent().await;
        agent.send(absolute("GET", &url, &[], b"")).await;
        agents.push(agent);
    }
    // Both at once, though they are equal, and there is one permit and one token.
    let (one, other) = (upstream.next().await, upstream.next().await);
    assert_eq!(one.header("x-request-deadline"), None);
    assert_eq!(one.header("x-envoy-expected-rq-timeout-ms"), None);
    assert_eq!(one.head.target, "/a?b=c");
    // No hedge, and neither deadline nor timeout: longer than any of these.
    upstream.gets_nothing_more(Duration::from_millis(1300)).await;
    one.respond(200, &[("Cache-Control", "max-age=600")], "one").await;
    other.respond(200, &[("Cache-Control", "max-age=600")], "other").await;
    for agent in &mut agents {
        let answer = agent.read_response().await;
        assert_eq!((answer.status, answer.header("cache-status")), (200, None));
        assert_eq!(answer.header("x-hedgerow-attempts"), Some("1"));
    }
    // What it says is passed on as it is, failures too, and nothing is remembered of either.
    for status in [503, 500, 200] {
        let call = async { get(&hedgerow, &url, &[]).await };
        let serve = async { upstream.next().await.respond(status, &[("Retry-After", "60")], "own").await };
        let (answer, ()) = tokio::join!(call, serve);
        assert_eq!(
            (answer.status, answer.text(), answer.header("x-hedgerow-degraded")),
            (status, "own", None)
        );
        assert_eq!((answer.header("x-hedgerow-tried"), answer.header("x-should-retry")), (None, None));
    }
    assert_eq!(upstream.count(), 5);
    let metrics = hedgerow.until_metrics(|m| m.value("hedgerow_requests_total", &[DIRECT]) == 5.0).await;
    assert_eq!(metrics.value("hedgerow_upstream_attempts_total", &[DIRECT, ("kind", "primary")]), 5.0);
    assert_eq!(metrics.value("hedgerow_upstream_attempts_total", &[]), 5.0);
    assert_eq!(metrics.value("hedgerow_requests_total", &[("upstream", "default")]), 0.0);
    let line = hedgerow.access_log(|line| line["status"] == 503).await;
    assert_eq!((&line["upstream"], &line["deadline_ms"]), (&json!("direct"), &json!(null)));
}

/// Whose deadline it is the upstream knows; hedgerow does not even look whether it can be read.
#[tokio::test]
async fn the_callers_deadline_is_left_to_the_upstream() {
    let upstream = Upstream::answering(|seen| {
        let field = |name| seen.header(name).unwrap_or("none").to_owned();
        Reply::ok(format!("{} {}", field("x-request-deadline"), field("grpc-timeout")))
    })
    .await;
    let hedgerow = HedgerowProcess::start("direct: [loopback]").await;
    let url = upstream.url("/");
    for (deadline, timeout) in
        [("1000000000", "1x"), ("tomorrow", "5S"), ("2999-11-29T10:00:30.250+02:00", "1m")]
    {
        let answer =
            get(&hedgerow, &url, &[("x-request-deadline", deadline), ("grpc-timeout", timeout)]).await;
        assert_eq!((answer.status, answer.text()), (200, &*format!("{deadline} {timeout}")));
    }
}

/// Each form that an entry can have, and what it does not cover.
#[tokio::test]
async fn names_suffixes_ports_ranges_and_loopback_are_direct_and_their_neighbours_are_not() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let port = upstream.address().port();
    let other = Upstream::answering(|_| Reply::ok("")).await;
    let six = Upstream::on(Ipv6Addr::LOCALHOST).answering(|_| Reply::ok("")).await;
    let ranged = Upstream::on([127, 0, 7, 7]).answering(|_| Reply::ok("")).await;
    let here = || Answer::addresses(&["127.0.0.1"]);
    let names = [
        "exact.test",
        "a.exact.test",
        "a.suffix.test",
        "b.a.suffix.test",
        "suffix.test",
        "xsuffix.test",
        "port.test",
        "named.test",
    ];
    let zone: Vec<_> = names
        .iter()
        .map(|name| (*name, here()))
        .chain([("ranged.test", Answer::addresses(&["127.0.7.7"]))])
        .collect();
    let dns = Dns::start(&zone).await;
    let servers = format!("dns: {{ servers: [\"{}\"] }}", dns.address());
    let list = format!(
        "direct: [exact.test, \"*.suffix.test\", \"port.test:{port}\", 127.0.7.0/24, \"*.named.test\", Named.Test]"
    );
    let policy = format!("{servers}\n{list}\nupstreams: {{ own: {{ hosts: [named.test] }} }}");
    let hedgerow = HedgerowProcess::start(&policy).await;
    let cases = [
        (format!("exact.test:{port}"), "direct"),
        (format!("EXACT.test.:{port}"), "direct"),
        (format!("a.exact.test:{port}"), "default"),
        (format!("a.suffix.test:{port}"), "direct"),
        (format!("b.a.suffix.test:{port}"), "direct"),
        (format!("suffix.test:{port}"), "default"),
        (format!("xsuffix.test:{port}"), "default"),
        (format!("port.test:{port}"), "direct"),
        (format!("port.test:{}", other.address().port()), "default"),
        (ranged.address().to_string(), "direct"),
        (format!("[::ffff:127.0.7.7]:{}", ranged.address().port()), "direct"),
        (upstream.address().to_string(), "default"),
        // A range is for addresses that are written; a name is not looked up for this.
        (format!("ranged.test:{}", ranged.address().port()), "default"),
        // An upstream that names the host knows better.
        (format!("named.test:{port}"), "own"),
    ];
    assert_policies(&hedgerow, &cases).await;
    let hedgerow = HedgerowProcess::start(&format!("{servers}\ndirect: [loopback]")).await;
    let cases = [
        (upstream.address().to_string(), "direct"),
        (six.address().to_string(), "direct"),
        (ranged.address().to_string(), "direct"),
        (format!("localhost:{port}"), "direct"),
        (format!("exact.test:{port}"), "default"),
    ];
    assert_policies(&hedgerow, &cases).await;
}

async fn assert_policies(hedgerow: &HedgerowProcess, cases: &[(String, &str)]) {
    for (nth, (authority, policy)) in cases.iter().enumerate() {
        let id = format!("call-{nth}");
        let answer = get(hedgerow, &format!("http://{authority}/"), &[("x-request-id", &id)]).await;
        assert_eq!(answer.status, 200, "{authority}: {answer:?}");
        let line = hedgerow.access_log(|line| line["request_id"] == *id).await;
        assert_eq!(line["upstream"], *policy, "{authority}");
    }
}

/// A tunnel is one too, for which neither breaker nor permit is asked.
#[tokio::test]
async fn a_direct_tunnel_meets_no_guard() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let (dead, _keeps_it_dead) = Upstream::dead();
    let policy = format!("direct: [loopback]\ndefaults: {{ {STRICT} }}");
    let hedgerow = HedgerowProcess::start(&policy).await;
    for _ in 0..3 {
        let answer = hedgerow.agent().await.open_tunnel(&dead.to_string()).await;
        assert_eq!((answer.status, answer.reason.as_str()), (502, "connect_failed"));
    }
    // A server that speaks first, so that nobody takes it for HTTP.
    let mut tunnels = Vec::new();
    for _ in 0..3 {
        let mut agent = hedgerow.agent().await;
        let past = "x-request-deadline: 1000000000";
        let to = upstream.address();
        agent.send(format!("CONNECT {to} HTTP/1.1\r\nHost: {to}\r\n{past}\r\n\r\n")).await;
        assert_eq!(agent.read_response_to("CONNECT").await.status, 200);
        tunnels.push(agent);
    }
    upstream.until(|tally| tally.open == 3).await;
    // Clear text inside is read, and as direct as the tunnel.
    let host = upstream.address().to_string();
    for tunnel in &mut tunnels {
        assert_eq!(tunnel.get_at(&host, "/").await.status, 200);
    }
    let requests = [DIRECT, ("code", "200"), ("outcome", "answered")];
    hedgerow.until_metrics(|m| m.value("hedgerow_requests_total", &requests) == 3.0).await;
}

/// `intercept: true` for everybody is not for what nobody is to touch.
#[tokio::test]
async fn a_direct_tunnel_is_never_intercepted() {
    let (pki, dns) = (Pki::new(), names().await);
    let leaf = pki.leaf(&[HOST, "b.test"]);
    let upstream = Upstream::on([127, 0, 0, 1])
        .tls(crate::support::pki::acceptor(&leaf))
        .answering(|_| Reply::ok("own"))
        .await;
    let policy =
        format!("{}\ndirect: [b.test, 127.0.0.1]\ndefaults: {{ intercept: true }}", base(&pki, &dns));
    let hedgerow = HedgerowProcess::start(&policy).await;
    let port = upstream.address().port();
    for host in ["b.test", "127.0.0.1"] {
        let mut agent = inside(&hedgerow, &format!("{host}:{port}"), "b.test", pki.agent_tls()).await;
        assert_eq!(agent.peer_certificate().unwrap(), leaf.der(), "{host}");
        assert_eq!(agent.get_at("b.test", "/").await.text(), "own");
    }
    let agent = inside(&hedgerow, &format!("{HOST}:{port}"), HOST, trusting(&hedgerow)).await;
    assert_ne!(agent.peer_certificate().unwrap(), leaf.der());
    let tunnels = [DIRECT, ("outcome", "tunnel")];
    hedgerow.until_metrics(|m| m.value("hedgerow_requests_total", &tunnels) == 2.0).await;
}

/// No policy, but still no way to where nobody may go: the list says what is left alone, not what is allowed.
#[tokio::test]
async fn the_egress_guard_looks_at_what_is_direct_too() {
    let forbidden = Upstream::on([127, 0, 0, 3]).answering(|_| Reply::ok("inside")).await;
    let port = forbidden.address().port();
    let dns = Dns::start(&[
        ("a.test", Answer::addresses(&["127.0.0.3"])),
        ("metadata.test", Answer::addresses(&["169.254.169.254"])),
        ("own.test", Answer::addresses(&["127.0.0.1"])),
    ])
    .await;
    let policy = format!(
        "dns: {{ servers: [\"{}\"] }}\ndirect: [loopback, \"*.test\", 169.254.0.0/16]\negress: {{ deny: [127.0.0.3] }}",
        dns.address()
    );
    let hedgerow = HedgerowProcess::start(&policy).await;
    for host in ["127.0.0.3", "a.test", "metadata.test", "169.254.169.254"] {
        let answer = get(&hedgerow, &format!("http://{host}:{port}/"), &[]).await;
        assert_eq!((answer.status, &answer.json()["error"]), (403, &json!("egress_denied")), "{host}");
        assert_eq!(hedgerow.agent().await.open_tunnel(&format!("{host}:{port}")).await.status, 403, "{host}");
    }
    // Nor to hedgerow's own ports, by a name that only looking up shows for what it is.
    let own = get(&hedgerow, &format!("http://own.test:{}/status", hedgerow.admin.port()), &[]).await;
    assert_eq!((own.status, &own.json()["error"]), (403, &json!("egress_denied")));
    assert_eq!(forbidden.connections(), 0);
    let denied = [DIRECT, ("code", "403")];
    hedgerow.until_metrics(|m| m.value("hedgerow_requests_total", &denied) == 9.0).await;
}

/// The list is part of the policy, and a new one counts for the next request.
#[tokio::test]
async fn the_list_changes_with_the_policy() {
    let upstream = Upstream::answering(|_| Reply::status(503)).await;
    let defaults = "defaults: { breaker: { consecutive_failures: 1, open_for: 1m }, hedge: off }";
    let mut hedgerow = HedgerowProcess::start(defaults).await;
    let url = upstream.url("/");
    for error in [None, Some("circuit_open")] {
        let answer = get(&hedgerow, &url, &[]).await;
        let own = answer
            .header("proxy-status")
            .is_some()
            .then(|| answer.json()["error"].as_str().unwrap().to_owned());
        assert_eq!((answer.status, own.as_deref()), (503, error));
    }
    hedgerow.policy.replace(&format!("direct: [127.0.0.0/8]\n{defaults}"));
    hedgerow
        .until_metrics(|m| m.value("hedgerow_config_reloads_total", &[("result", "applied")]) == 1.0)
        .await;
    for _ in 0..2 {
        let answer = get(&hedgerow, &url, &[]).await;
        assert_eq!((answer.status, answer.header("proxy-status")), (503, None));
    }
    assert_eq!(upstream.count(), 3);
}
