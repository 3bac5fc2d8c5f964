//! Parts of an upstream with rules and guards of their own.

use crate::support::client::Response;
use crate::support::hedgerow::HedgerowProcess;
use crate::support::policy::{TOOL, tool};
use crate::support::upstream::{Reply, Upstream};

async fn call(proxy: &HedgerowProcess, method: &str, url: &str) -> Response {
    proxy.agent().await.request(method, url, &[], b"").await
}

fn is_open(response: &Response) -> bool {
    response.status == 503 && response.json()["error"] == "circuit_open"
}

/// One bad endpoint does not take the whole provider away.
#[tokio::test]
async fn a_route_with_a_breaker_of_its_own_opens_alone() {
    let upstream = Upstream::answering(|seen| match seen.path() {
        "/search/a" => Reply::status(500),
        _ => Reply::ok(""),
    })
    .await;
    let stages = "hedge: off, breaker: { consecutive_failures: 3 }, \
         routes: [{ name: search, path: \"/search/**\", breaker: { consecutive_failures: 2 } }]";
    let proxy = HedgerowProcess::start(&tool(upstream.address(), stages)).await;
    for _ in 0..2 {
        assert_eq!(call(&proxy, "GET", &upstream.url("/search/a")).await.status, 500);
    }
    assert!(is_open(&call(&proxy, "GET", &upstream.url("/search/b")).await));
    assert_eq!(call(&proxy, "GET", &upstream.url("/quote")).await.status, 200);
    let status = proxy.status().await;
    let host = &status["upstreams"]["tool"][upstream.address().to_string()];
    assert_eq!(
        (&host["breaker"]["state"], &host["routes"]["search"]["breaker"]["state"]),
        (&"closed".into(), &"open".into())
    );
    let metrics = proxy.metrics().await;
    let in_state = |state| metrics.value("hedgerow_breaker_state", &[TOOL, ("state", state)]);
    assert_eq!((in_state("open"), in_state("closed")), (1.0, 1.0));
}

/// A route without a breaker of its own shares the upstream's.
#[tokio::test]
async fn a_route_without_a_breaker_of_its_own_counts_with_the_upstream() {
    let upstream = Upstream::answering(|_| Reply::status(500)).await;
    let stages =
        "hedge: off, breaker: { consecutive_failures: 2 }, routes: [{ name: search, path: \"/search\" }]";
    let proxy = HedgerowProcess::start(&tool(upstream.address(), stages)).await;
    for path in ["/search", "/quote"] {
        assert_eq!(call(&proxy, "GET", &upstream.url(path)).await.status, 500);
    }
    for path in ["/search", "/quote"] {
        assert!(is_open(&call(&proxy, "GET", &upstream.url(path)).await));
    }
}

/// `*` stands for one segment, `**` for any rest; the first route that fits decides; the query is not part of it.
#[tokio::test]
async fn a_route_is_found_by_its_glob_and_its_methods_and_the_first_wins() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let stages = "hedge: off, routes: [\
         { name: exact, path: \"/v1/quote\" },\
         { name: one, path: \"/v1/*/price\" },\
         { name: posted, path: \"/v1/**\", methods: [POST, PUT] },\
         { name: rest, path: \"/v1/**\" }]";
    let proxy = HedgerowProcess::start(&tool(upstream.address(), stages)).await;
    for (nth, (method, target, route)) in [
        ("GET", "/v1/quote", Some("exact")),
        ("GET", "/v1/quote?t=/v1/x/price", Some("exact")),
        ("POST", "/v1/quote", Some("exact")),
        ("GET", "/v1/quote/", Some("rest")),
        ("GET", "/v1/TSLA/price", Some("one")),
        ("POST", "/v1/TSLA/price", Some("one")),
        ("GET", "/v1/a/b/price", Some("rest")),
        ("POST", "/v1/a/b", Some("posted")),
        ("PUT", "/v1/a", Some("posted")),
        ("DELETE", "/v1/a", Some("rest")),
        ("GET", "/V1/quote", None),
        ("GET", "/", None),
        ("GET", "/v2/v1/quote", None),
    ]
    .into_iter()
    .enumerate()
    {
        let id = format!("call-{nth}");
        let headers = [("x-request-id", id.as_str())];
        let answer = proxy.agent().await.request(method, &upstream.url(target), &headers, b"").await;
        assert_eq!(answer.status, 200);
        let line = proxy.access_log(move |line| line["request_id"] == id.as_str()).await;
        assert_eq!(line["route"].as_str(), route, "{method} {target}");
    }
}

/// What a route does not say it has from its upstream, and that from the defaults, key by key.
#[tokio::test]
async fn a_route_inherits_key_by_key() {
    let upstream = Upstream::answering(|_| Reply::status(500)).await;
    let policy = format!(
        "defaults: {{ hedge: off, breaker: {{ consecutive_failures: 4, open_for: 7s }} }}\n{}",
        tool(
            upstream.address(),
            "breaker: { consecutive_failures: 3 }, routes: [\
                 { name: brittle, path: \"/brittle\", breaker: { consecutive_failures: 1 } },\
                 { name: bold, path: \"/bold\", breaker: off }]"
        )
    );
    let proxy = HedgerowProcess::start(&policy).await;
    assert_eq!(call(&proxy, "GET", &upstream.url("/brittle")).await.status, 500);
    let refused = call(&proxy, "GET", &upstream.url("/brittle")).await;
    assert!(is_open(&refused));
    let wait = refused.json()["retry_after_ms"].as_u64().unwrap();
    // Seven seconds, spread by a tenth, less what the answer took.
    assert!((4000..=7700).contains(&wait), "{wait}");
    for _ in 0..3 {
        assert_eq!(call(&proxy, "GET", &upstream.url("/")).await.status, 500);
    }
    assert!(is_open(&call(&proxy, "GET", &upstream.url("/")).await));
    for _ in 0..6 {
        assert_eq!(call(&proxy, "GET", &upstream.url("/bold")).await.status, 500);
    }
}
