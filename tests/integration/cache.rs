//! Answers that are kept for later: whose they are, how long they are good, and what asks the upstream again.
//!
//! What is stale need not be waited for: an answer that comes with an `Age` beyond its `max-age` is stale as it comes.

use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::Instant;

use crate::support::client::{Agent, Response, deadline_in};
use crate::support::h1::Framing;
use crate::support::hedgerow::{HedgerowProcess, Metrics};
use crate::support::http2::Http2Upstream;
use crate::support::policy::{TOOL, named, tool};
use crate::support::road::{Mode, Road};
use crate::support::soon;
use crate::support::upstream::{Reply, Seen, Upstream, pattern};

const KEEP: &str = "hedge: off, breaker: off, cache: true";
const FRESH: (&str, &str) = ("Cache-Control", "max-age=60");
/// Forty seconds too old as it comes.
const OLD: (&str, &str) = ("Age", "100");

type Fields<'a> = &'a [(&'a str, &'a str)];

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

async fn start(upstream: &Upstream, stages: &str) -> HedgerowProcess {
    HedgerowProcess::start(&tool(upstream.address(), stages)).await
}

/// A GET that is answered without anybody's help.
async fn get(proxy: &HedgerowProcess, upstream: &Upstream, path: &str, headers: Fields<'_>) -> Response {
    proxy.agent().await.request("GET", &upstream.url(path), headers, b"").await
}

/// A request that goes on to the upstream, which answers like this; and what it saw.
async fn send(
    proxy: &HedgerowProcess,
    upstream: &mut Upstream,
    (method, path, headers): (&str, &str, Fields<'_>),
    (status, fields, body): (u16, Fields<'_>, &str),
) -> (Response, Seen) {
    let url = upstream.url(path);
    let mut agent = proxy.ask(method, &url, headers, b"").await;
    let exchange = upstream.next().await;
    let seen = (*exchange).clone();
    exchange.respond(status, fields, body).await;
    (agent.read_response_to(method).await, seen)
}

/// Has a GET of `/` answered by the upstream, so that something is kept.
async fn keep(proxy: &HedgerowProcess, upstream: &mut Upstream, fields: Fields<'_>, body: &str) -> Response {
    send(proxy, upstream, ("GET", "/", &[]), (200, fields, body)).await.0
}

fn status_of(response: &Response) -> &str {
    response.header("cache-status").unwrap_or_else(|| panic!("no Cache-Status in {response:?}"))
}

fn is_hit(response: &Response) -> bool {
    status_of(response).starts_with("hedgerow; hit; ttl=")
}

/// Seconds that are left, from `Cache-Status`.
fn ttl(response: &Response) -> i64 {
    let text = status_of(response).strip_prefix("hedgerow; hit; ttl=").expect("a hit");
    text.parse().unwrap_or_else(|error| panic!("{error} in {text:?}"))
}

fn age(response: &Response) -> i64 {
    response.header("age").expect("an answer from the cache has an age").parse().expect("a number")
}

fn results(metrics: &Metrics, result: &str) -> f64 {
    metrics.value("hedgerow_cache_requests_total", &[TOOL, ("result", result)])
}

fn error_of(response: &Response) -> String {
    assert_eq!(response.header("content-type"), Some("application/problem+json"), "{response:?}");
    response.json()["error"].as_str().expect("a problem names its error").to_owned()
}

/// All that is promised of the plain case, at once.
#[tokio::test]
async fn a_fresh_answer_is_given_again_with_its_age_and_without_the_upstream() {
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, KEEP).await;
    let fields = [
        FRESH,
        ("ETag", "\"v1\""),
        ("Content-Type", "text/csv"),
        ("X-Own", "1"),
        ("Link", "</a>"),
        ("Link", "</b>"),
        ("Connection", "X-Hop"),
        ("X-Hop", "1"),
    ];
    let first = keep(&proxy, &mut upstream, &fields, "a,b").await;
    assert_eq!(
        (first.status, first.text(), status_of(&first)),
        (200, "a,b", "hedgerow; fwd=uri-miss; stored")
    );
    assert_eq!((first.header("age"), first.header("x-hedgerow-attempts")), (None, Some("1")));
    for _ in 0..3 {
        let again = get(&proxy, &upstream, "/", &[]).await;
        assert_eq!((again.status, again.text(), again.header("content-length")), (200, "a,b", Some("3")));
        assert_eq!(ttl(&again) + age(&again), 60);
        assert!((0..20).contains(&age(&again)), "{}", age(&again));
        for name in ["etag", "content-type", "x-own"] {
            assert_eq!(again.header(name), first.header(name));
        }
        assert_eq!((again.headers.all("link"), again.header("x-hop")), (vec!["</a>", "</b>"], None));
        assert_eq!(
            (again.header("via"), again.header("x-hedgerow-attempts")),
            (Some("1.1 hedgerow"), Some("0"))
        );
        assert_eq!(again.header("x-hedgerow-degraded"), None);
        assert!(!again.header("server-timing").unwrap().contains("upstream"));
        assert!(again.header("date").is_some());
    }
    assert_eq!(upstream.count(), 1);
    let metrics = proxy.metrics().await;
    assert_eq!((results(&metrics, "hit"), results(&metrics, "miss")), (3.0, 1.0));
    let line = proxy.access_log(|line| line["source"] == "cache").await;
    assert_eq!((&line["status"], &line["attempts"], &line["bytes_out"]), (&200.into(), &0.into(), &3.into()));
}

#[tokio::test]
async fn without_the_stage_nothing_is_kept_and_nothing_is_said() {
    let upstream = Upstream::answering(|_| Reply::ok("x").header("Cache-Control", "max-age=60")).await;
    for stages in ["hedge: off", "hedge: off, cache: true, routes: [{ path: /, cache: off }]"] {
        let proxy = start(&upstream, stages).await;
        for _ in 0..2 {
            assert_eq!(get(&proxy, &upstream, "/", &[]).await.header("cache-status"), None);
        }
    }
    assert_eq!(upstream.count(), 4);
}

#[tokio::test]
async fn answers_are_kept_on_every_road() {
    for mode in Mode::ALL {
        let mut road = Road::start(mode, KEEP).await;
        let (mut first, mut exchange) = road.exchange(&[]).await;
        exchange.start_chunks(200, &[FRESH]).await;
        exchange.chunk("kept ").await;
        assert_eq!(
            first.head().await.get("cache-status"),
            Some("hedgerow; fwd=uri-miss; stored"),
            "{mode:?}"
        );
        first.expect("kept ").await;
        exchange.chunk("answer").await;
        exchange.end().await;
        assert_eq!(first.rest().await, b"answer", "{mode:?}");
        let mut again = road.call("GET", "/", &[]).await;
        let head = again.head().await;
        assert!(head.get("cache-status").unwrap().starts_with("hedgerow; hit; ttl="), "{mode:?} {head:?}");
        assert!(head.get("age").is_some() && head.get("content-length") == Some("11"), "{mode:?} {head:?}");
        assert_eq!(again.rest().await, b"kept answer", "{mode:?}");
        assert_eq!(road.upstream.count(), 1, "{mode:?}");
    }
}

/// Where the origin is silent the policy speaks, and only there.
#[tokio::test]
async fn ttl_is_for_origins_that_say_nothing() {
    let mut upstream = Upstream::start().await;
    let with_ttl = start(&upstream, "hedge: off, cache: { ttl: 30s }").await;
    let without = start(&upstream, KEEP).await;
    let week_ago = "Sun, 22 Nov 2020 10:00:30 GMT";
    let cases: [(Fields<'_>, i64); 7] = [
        (&[], 30),
        (&[("Last-Modified", week_ago)], 30),
        (&[("Cache-Control", "public")], 30),
        (&[("Cache-Control", "max-age=10")], 10),
        (&[("Cache-Control", "max-age=0")], 0),
        (&[("Cache-Control", "no-cache")], 0),
        (&[("Expires", "0")], 0),
    ];
    for (fields, lifetime) in cases {
        keep(&with_ttl, &mut upstream, &[fields, &[("X-Case", "1")]].concat(), "x").await;
        if lifetime > 0 {
            let again = get(&with_ttl, &upstream, "/", &[]).await;
            assert_eq!(ttl(&again) + age(&again), lifetime, "{fields:?}");
        }
        // What is there would be a hit for the next case.
        send(&with_ttl, &mut upstream, ("PUT", "/", &[]), (204, &[], "")).await;
    }
    // Nothing is guessed of an answer that gives no reason to.
    keep(&without, &mut upstream, &[], "one").await;
    let again = keep(&without, &mut upstream, &[], "two").await;
    assert_eq!((again.text(), status_of(&again)), ("two", "hedgerow; fwd=stale; stored"));

    let short = start(&upstream, "hedge: off, cache: { ttl: 300ms }").await;
    let began = Instant::now();
    keep(&short, &mut upstream, &[], "old").await;
    let old = async {
        while upstream.waiting().is_none() {
            let mut agent = short.ask("GET", &upstream.url("/"), &[], b"").await;
            tokio::select! {
                answer = agent.read_response() => assert!(is_hit(&answer)),
                exchange = upstream.next() => {
                    exchange.respond(200, &[], "new").await;
                    assert_eq!(agent.read_response().await.text(), "new");
                    return;
                }
            }
        }
    };
    soon(old).await;
    assert!(began.elapsed() >= ms(300));
}

/// What the origin says of keeping.
#[tokio::test]
async fn the_origins_word_decides_what_is_kept_and_for_how_long() {
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, KEEP).await;
    let year = "Thu, 29 Nov 2125 10:00:30 GMT";
    // Whether it is kept, and whether it is given again unasked.
    let cases: [(Fields<'_>, bool, bool); 24] = [
        (&[("Cache-Control", "max-age=60")], true, true),
        (&[("Cache-Control", "Max-Age=\"60\"")], true, true),
        (&[("Cache-Control", "s-maxage=60")], true, true),
        (&[("Cache-Control", "s-maxage=60, max-age=0")], true, true),
        (&[("Cache-Control", "s-maxage=0, max-age=60")], true, false),
        (&[("Cache-Control", "max-age=60, must-revalidate")], true, true),
        (&[("Cache-Control", "public"), ("Expires", year)], true, true),
        (&[("Expires", year)], true, true),
        (&[("Expires", "Sun, 06 Nov 1994 08:49:37 GMT")], true, false),
        (&[("Expires", "0"), ("Cache-Control", "max-age=60")], true, true),
        (&[("Cache-Control", "max-age=0")], true, false),
        (&[("Cache-Control", "max-age=60"), ("Age", "59")], true, true),
        (&[("Cache-Control", "max-age=60"), ("Age", "60")], true, false),
        (&[("Cache-Control", "max-age=60, no-cache"), ("ETag", "\"a\"")], true, false),
        (&[("Pragma", "no-cache"), ("Expires", year), ("ETag", "\"a\"")], true, false),
        // What cannot be validated is of no use where it must be.
        (&[("Cache-Control", "max-age=60, no-cache")], false, false),
        (&[("Cache-Control", "max-age=0, must-revalidate")], false, false),
        (&[("Cache-Control", "max-age=60"), ("Cache-Control", "no-store")], false, false),
        (&[("Cache-Control", "max-age=60, No-Store")], false, false),
        (&[("Cache-Control", "max-age=60, private")], false, false),
        (&[("Cache-Control", "max-age=60, private=\"x\"")], true, true),
        (&[("Cache-Control", "max-age=60"), ("Vary", "*")], false, false),
        (&[("Cache-Control", "max-age=60"), ("Set-Cookie", "a=1")], false, false),
        (&[("Cache-Control", "max-age=60"), ("Content-Type", "text/event-stream")], false, false),
    ];
    for (n, (fields, is_kept, is_given)) in cases.into_iter().enumerate() {
        let path = format!("/{n}");
        let (first, _) = send(&proxy, &mut upstream, ("GET", &path, &[]), (200, fields, "one")).await;
        let stored = if is_kept { "; stored" } else { "" };

        assert_eq!(status_of(&first), format!("hedgerow; fwd=uri-miss{stored}"), "{fields:?}");
        if is_given {
            let again = get(&proxy, &upstream, &path, &[]).await;
            assert_eq!((again.text(), is_hit(&again)), ("one", true), "{fields:?}");
        } else {
            let (again, _) = send(&proxy, &mut upstream, ("GET", &path, &[]), (200, &[], "two")).await;
            let why = if is_kept { "stale" } else { "uri-miss" };
            assert_eq!((again.text(), status_of(&again)), ("two", &*format!("hedgerow; fwd={why}; stored")));
        }
    }
}

/// What says something of the resource, and nothing else.
#[tokio::test]
async fn statuses_are_kept_by_what_they_say() {
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, KEEP).await;
    for status in [200, 203, 204, 300, 301, 302, 307, 308, 400, 403, 404, 405, 410, 414, 501] {
        let path = format!("/{status}");
        let body = if status == 204 { "" } else { "said" };
        send(&proxy, &mut upstream, ("GET", &path, &[]), (status, &[FRESH, ("Location", "/x")], body)).await;
        let again = get(&proxy, &upstream, &path, &[]).await;
        assert_eq!((again.status, again.text(), is_hit(&again)), (status, body, true));
        assert_eq!(again.header("location"), Some("/x"));
    }
    // The last ones say nothing that holds for long, or what could stand in for them must not give way to them.
    for status in [206, 408, 412, 416, 425, 429, 431, 500, 502, 503, 504] {
        let path = format!("/{status}");
        let fields = [FRESH, ("Content-Range", "bytes 0-3/10"), ("Connection", "close")];
        for _ in 0..2 {
            let (answer, _) =
                send(&proxy, &mut upstream, ("GET", &path, &[]), (status, &fields, "said")).await;
            assert_eq!((answer.status, status_of(&answer)), (status, "hedgerow; fwd=uri-miss"));
        }
    }
}

/// One's answers are not another's, whatever the origin says of the public.
#[tokio::test]
async fn c091_each_credential_has_a_cache_of_its_own() {
    for control in [
        "max-age=60",
        "public, max-age=60",
        "s-maxage=60",
        "max-age=60, must-revalidate",
        "private, max-age=60",
    ] {
        let mut upstream = Upstream::start().await;
        let proxy = start(&upstream, KEEP).await;
        let credentials: [Fields<'_>; 8] = [
            &[("Authorization", "Bearer a")],
            &[],
            &[("Authorization", "Bearer b")],
            &[("Cookie", "sid=a")],
            &[("Cookie", "sid=b")],
            &[("X-Api-Key", "a")],
            &[("X-Api-Key", "b"), ("Authorization", "Bearer a")],
            &[("Proxy-Authorization", "Basic eDp5")],
        ];
        for (n, who) in credentials.iter().enumerate() {
            // The last one is hedgerow's to read: the upstream never sees it.
            if n == 7 {
                break;
            }
            let body = format!("for {n}");
            let (answer, _) =
                send(&proxy, &mut upstream, ("GET", "/", who), (200, &[("Cache-Control", control)], &body))
                    .await;
            assert_eq!(answer.text(), body, "{control} {who:?}");
        }
        for (n, who) in credentials.iter().enumerate() {
            let is_private = control.starts_with("private");
            if is_private && (who.is_empty() || n == 7) {
                continue;
            }
            let answer = get(&proxy, &upstream, "/", who).await;
            let expected = format!("for {}", if n == 7 { 1 } else { n });
            assert_eq!((answer.text(), is_hit(&answer)), (&*expected, true), "{control} {who:?}");
        }
        assert_eq!(upstream.count(), 7);
    }
}

/// By what `Vary` names, and coded ones by what was accepted in any case: an origin that forgets to say so is common.
#[tokio::test]
async fn c092_variants_are_chosen_by_the_fields_that_vary_names() {
    for vary in [&[("Vary", "Accept-Encoding")][..], &[]] {
        let mut upstream = Upstream::start().await;
        let proxy = start(&upstream, KEEP).await;
        let gzip = [("Accept-Encoding", "gzip")];
        let coded = [&[FRESH, ("Content-Encoding", "gzip")], vary].concat();
        send(&proxy, &mut upstream, ("GET", "/", &gzip), (200, &coded, "GZIP")).await;
        let plain = [&[FRESH], vary].concat();
        let (answer, _) = send(&proxy, &mut upstream, ("GET", "/", &[]), (200, &plain, "plain")).await;
        assert_eq!((answer.text(), answer.header("content-encoding")), ("plain", None));
        let again = get(&proxy, &upstream, "/", &[]).await;
        assert_eq!((again.text(), is_hit(&again), again.header("content-encoding")), ("plain", true, None));
        // Where the origin says that it matters the first one has its own; else it may have either.
        let again = get(&proxy, &upstream, "/", &gzip).await;
        let coding = Some("gzip").filter(|_| again.text() == "GZIP");
        assert_eq!((again.header("content-encoding"), is_hit(&again)), (coding, true));
        assert!(again.text() == "GZIP" || vary.is_empty());
        assert_eq!(upstream.count(), 2);
    }
    // What is not coded is for everyone: `fetch` accepts no coding where it asks for a part.
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, KEEP).await;
    let all = [("Accept-Encoding", "gzip, br")];
    send(&proxy, &mut upstream, ("GET", "/", &all), (200, &[FRESH], "0123456789")).await;
    let part = [("Accept-Encoding", "identity"), ("Range", "bytes=0-3")];
    let answer = get(&proxy, &upstream, "/", &part).await;
    assert_eq!((answer.status, answer.text(), is_hit(&answer)), (206, "0123", true));
    // A field of any name. Space and case of a list do not matter where they cannot.
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, "hedge: off, cache: { vary: [x-tenant] }").await;
    let varied = [FRESH, ("Vary", "accept-language, X-Plan")];
    let (german, french) = ([("Accept-Language", "de, en")], [("Accept-Language", "fr")]);
    send(&proxy, &mut upstream, ("GET", "/", &german), (200, &varied, "de")).await;
    let (answer, _) = send(&proxy, &mut upstream, ("GET", "/", &french), (200, &varied, "fr")).await;
    assert_eq!(status_of(&answer), "hedgerow; fwd=vary-miss; stored");
    assert_eq!(get(&proxy, &upstream, "/", &[("Accept-Language", "DE,en")]).await.text(), "de");
    assert_eq!(get(&proxy, &upstream, "/", &french).await.text(), "fr");
    let planned = [french[0], ("X-Plan", "gold")];
    send(&proxy, &mut upstream, ("GET", "/", &planned), (200, &varied, "gold")).await;
    // The policy's own fields tell apart what the origin does not.
    let tenant = [french[0], ("X-Tenant", "1")];
    let (answer, _) = send(&proxy, &mut upstream, ("GET", "/", &tenant), (200, &varied, "theirs")).await;
    assert_eq!(status_of(&answer), "hedgerow; fwd=uri-miss; stored");
    assert_eq!(get(&proxy, &upstream, "/", &french).await.text(), "fr");
}

#[tokio::test]
async fn c093_a_part_is_never_given_for_the_whole() {
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, KEEP).await;
    let range = [("Range", "bytes=0-3")];
    let part = [FRESH, ("Content-Range", "bytes 0-3/10"), ("ETag", "\"v1\"")];
    let (answer, seen) = send(&proxy, &mut upstream, ("GET", "/", &range), (206, &part, "0123")).await;
    assert_eq!((answer.status, answer.text(), seen.header("range")), (206, "0123", Some("bytes=0-3")));
    let whole = keep(&proxy, &mut upstream, &[FRESH, ("ETag", "\"v1\"")], "0123456789").await;
    assert_eq!((whole.status, whole.text()), (200, "0123456789"));
    // And of the whole any part can be given.
    let again = get(&proxy, &upstream, "/", &range).await;
    assert_eq!((again.status, again.text(), is_hit(&again)), (206, "0123", true));
    assert_eq!(upstream.count(), 2);
}

/// The clock that the reader of `Age` sees runs as the one on the wall.
#[tokio::test]
async fn c094_age_counts_from_what_the_origin_says_it_was() {
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, KEEP).await;
    let began = Instant::now();
    send(&proxy, &mut upstream, ("GET", "/new", &[]), (200, &[FRESH], "x")).await;
    send(&proxy, &mut upstream, ("GET", "/ten", &[]), (200, &[FRESH, ("Age", "10")], "x")).await;
    let stored = Instant::now();
    soon(async {
        loop {
            for (path, from) in [("/new", 0), ("/ten", 10)] {
                let at_least = stored.elapsed().as_secs() as i64;
                let answer = get(&proxy, &upstream, path, &[]).await;
                let at_most = began.elapsed().as_secs() as i64 + 1;
                assert!((from + at_least..=from + at_most).contains(&age(&answer)), "{}", age(&answer));
                assert_eq!(ttl(&answer) + age(&answer), 60);
                if path == "/ten" && age(&answer) >= 13 {
                    return;
                }
            }
            tokio::time::sleep(ms(50)).await;
        }
    })
    .await;
    // An age that an old date shows counts as well (RFC 9111 section 4.2.3).
    let dated = [FRESH, ("Date", "Sun, 06 Nov 1994 08:49:37 GMT")];
    send(&proxy, &mut upstream, ("GET", "/dated", &[]), (200, &dated, "x")).await;
    let (again, _) = send(&proxy, &mut upstream, ("GET", "/dated", &[]), (200, &dated, "y")).await;
    assert_eq!(status_of(&again), "hedgerow; fwd=stale; stored");
}

/// How a call to the upstream can fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Failure {
    Refused,
    Reset,
    Closed,
    Deadline,
    CallersDeadline,
    AttemptTimeout,
    Broken,
    OpenBreaker,
    FullBulkhead,
    Status(u16),
}

const FAILURES: [Failure; 14] = [
    Failure::Refused,
    Failure::Reset,
    Failure::Closed,
    Failure::Deadline,
    Failure::CallersDeadline,
    Failure::AttemptTimeout,
    Failure::OpenBreaker,
    Failure::FullBulkhead,
    Failure::Status(500),
    Failure::Status(502),
    Failure::Status(503),
    Failure::Status(504),
    Failure::Status(429),
    Failure::Broken,
];

/// Keeps a stale answer with these fields, and asks for it again in vain: what comes, and what was asked for.
async fn fail(failure: Failure, cache: &str, fields: Fields<'_>, asks: Fields<'_>) -> Response {
    let mut upstream = Upstream::start().await;
    let own = match failure {
        Failure::Deadline => "deadline: { default: 1500ms }",
        Failure::AttemptTimeout => "attempt_timeout: 1500ms",
        Failure::OpenBreaker => "breaker: { consecutive_failures: 1, open_for: 5m }",
        Failure::FullBulkhead => "bulkhead: { max_concurrent: 1, max_queue: 0 }",
        _ => "breaker: off",
    };
    let proxy = start(&upstream, &format!("hedge: off, cache: {{ {cache} }}, {own}")).await;
    // Not kept: a reset on a reused connection is sent again.
    keep(&proxy, &mut upstream, &[fields, &[("Connection", "close")]].concat(), "kept").await;
    let url = upstream.url("/");
    let deadline = deadline_in(ms(1500));
    let with_deadline = [asks, &[("x-request-deadline", &deadline)]].concat();
    let before = upstream.count();
    let mut busy = None;
    match failure {
        Failure::OpenBreaker => {
            send(&proxy, &mut upstream, ("GET", "/other", &[]), (500, &[("Connection", "close")], "")).await;
        }
        Failure::FullBulkhead => {
            let agent = proxy.ask("GET", &upstream.url("/other"), &[], b"").await;
            busy = Some((agent, upstream.next().await));
        }
        Failure::Refused => {
            upstream.until(|tally| tally.open == 0).await;
            upstream.stop_listening().await;
        }
        _ => {}
    }
    let is_callers = failure == Failure::CallersDeadline;
    let mut agent = proxy.ask("GET", &url, if is_callers { &with_deadline } else { asks }, b"").await;
    let is_sent = !matches!(failure, Failure::OpenBreaker | Failure::FullBulkhead | Failure::Refused);
    let mut held = None;
    if is_sent {
        let mut exchange = upstream.next().await;
        match failure {
            Failure::Reset => exchange.reset(),
            Failure::Closed => exchange.close().await,
            Failure::Status(status) => exchange.respond(status, &[], "no").await,
            Failure::Broken => {
                exchange.raw(b"HTTP/1.1 200 OK\r\nContent-Length: 5, 6\r\n\r\n").await;
                held = Some(exchange);
            }
            _ => held = Some(exchange),
        }
    }
    let answer = agent.read_response().await;
    let sent = upstream.count() - before;
    let expected = usize::from(is_sent || matches!(failure, Failure::OpenBreaker | Failure::FullBulkhead));
    assert_eq!(sent, expected, "{failure:?}");
    drop((busy, held));
    if answer.header("x-hedgerow-degraded").is_some() {
        let metrics = proxy.metrics().await;
        assert_eq!(metrics.value("hedgerow_fallbacks_total", &[TOOL, ("kind", "stale")]), 1.0);
        let line = proxy.access_log(|line| line["source"] == "stale").await;
        assert_eq!(line["outcome"], "degraded");
    }
    answer
}

#[tokio::test]
async fn c095_a_stale_answer_stands_in_for_every_kind_of_failure() {
    let allowed = [("Cache-Control", "max-age=60, stale-if-error=60"), OLD];
    let answers = join_all(FAILURES.map(|failure| fail(failure, "", &allowed, &[]))).await;
    for (failure, answer) in FAILURES.into_iter().zip(answers) {
        assert_eq!((answer.status, answer.text()), (200, "kept"), "{failure:?}");
        assert_eq!(answer.header("x-hedgerow-degraded"), Some("stale"), "{failure:?}");
        assert_eq!(age(&answer) + ttl(&answer), 60, "{failure:?}");
        assert!(ttl(&answer) <= -40 && age(&answer) >= 100, "{failure:?}: {answer:?}");
        let tried = match failure {
            Failure::Refused => "connect_failed",
            Failure::Reset | Failure::Closed => "upstream_reset",
            Failure::Deadline | Failure::CallersDeadline | Failure::AttemptTimeout => "deadline_exceeded",
            Failure::Broken => "upstream_invalid",
            Failure::OpenBreaker => "circuit_open",
            Failure::FullBulkhead => "bulkhead_full",
            Failure::Status(status) => &status.to_string(),
        };
        assert_eq!(answer.header("x-hedgerow-tried"), Some(&*format!("tool={tried}")));
    }
}

/// Who allows it: the origin, the policy or the caller; and who does not.
#[tokio::test]
async fn a_stale_answer_stands_in_only_where_it_may() {
    let policys = "stale_if_error: 1m";
    let fields = |control| [("Cache-Control", control), OLD];
    let plain = fields("max-age=60");
    let cases: [(&str, Fields<'_>, Fields<'_>, bool); 16] = [
        (policys, &plain, &[], true),
        ("", &plain, &[], false),
        ("", &plain, &[("Cache-Control", "stale-if-error=60")], true),
        ("stale_if_error: 10s", &plain, &[], false),
        ("stale_if_error: 10s", &fields("max-age=60, stale-if-error=60"), &[], true),
        ("", &fields("max-age=60, stale-if-error=10"), &[], false),
        (policys, &[], &[], true),
        (policys, &fields("max-age=60, must-revalidate"), &[], false),
        (policys, &fields("max-age=60, must-revalidate, stale-if-error=600"), &[], false),
        (policys, &fields("max-age=60, proxy-revalidate"), &[], false),
        (policys, &fields("max-age=60, no-cache"), &[], false),
        (policys, &fields("s-maxage=60"), &[], false),
        (policys, &fields("s-maxage=60, stale-if-error=60"), &[], true),
        (policys, &plain, &[("Cache-Control", "no-cache")], false),
        (policys, &plain, &[("Pragma", "no-cache")], false),
        (policys, &plain, &[("Cache-Control", "max-age=50")], false),
    ];
    let answers = cases.map(async |(cache, fields, asks, is_given)| {
        let answer = fail(Failure::Status(503), cache, fields, asks).await;
        let expected = if is_given { (200, "kept", Some("stale")) } else { (503, "no", None) };
        let got = (answer.status, answer.text(), answer.header("x-hedgerow-degraded"));
        assert_eq!(got, expected, "{cache:?} {fields:?} {asks:?}");
        if !is_given {
            assert!(!status_of(&answer).contains("stored"), "{answer:?}");
        }
    });
    join_all(answers).await;
    // And an error of hedgerow's own is the plain error then.
    let answer = fail(Failure::Reset, policys, &fields("max-age=60, must-revalidate"), &[]).await;
    assert_eq!((answer.status, &*error_of(&answer)), (502, "upstream_reset"));
}

/// A caller's own condition on what is stale and stands in is judged like any.
#[tokio::test]
async fn what_stands_in_answers_conditions_and_ranges_too() {
    let fields = [FRESH, OLD, ("ETag", "\"v1\"")];
    let answer =
        fail(Failure::Status(503), "stale_if_error: 1m", &fields, &[("If-None-Match", "\"v1\"")]).await;
    assert_eq!((answer.status, answer.header("x-hedgerow-degraded")), (304, Some("stale")));
    let answer = fail(Failure::Status(503), "stale_if_error: 1m", &fields, &[("Range", "bytes=-2")]).await;
    assert_eq!((answer.status, answer.text()), (206, "pt"));
}

#[tokio::test]
async fn c096_an_answer_with_a_cookie_is_not_kept() {
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, "hedge: off, cache: { ttl: 1m }").await;
    for n in 1..=2 {
        let cookie = format!("sid={n}");
        let answer = keep(&proxy, &mut upstream, &[FRESH, ("Set-Cookie", &cookie)], "x").await;
        assert_eq!(
            (answer.header("set-cookie"), status_of(&answer)),
            (Some(&*cookie), "hedgerow; fwd=uri-miss")
        );
    }
    // One that comes with the confirmation of what is kept ends its being kept.
    keep(&proxy, &mut upstream, &[("Cache-Control", "max-age=0"), ("ETag", "\"v1\"")], "kept").await;
    let confirmed = [("Set-Cookie", "sid=3"), ("ETag", "\"v1\"")];
    let (answer, _) = send(&proxy, &mut upstream, ("GET", "/", &[]), (304, &confirmed, "")).await;
    assert_eq!((answer.status, answer.text()), (200, "kept"));
    let other = keep(&proxy, &mut upstream, &[FRESH], "new").await;
    assert_eq!((other.text(), other.header("set-cookie")), ("new", None));
}

/// HEAD is answered from what GET brought, and brings nothing itself.
#[tokio::test]
async fn c003_a_head_does_not_poison_the_get() {
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, KEEP).await;
    let url = upstream.url("/");
    let mut agent = proxy.ask("HEAD", &url, &[], b"").await;
    let mut exchange = upstream.next().await;
    exchange.head_only(200, &[FRESH, ("Content-Length", "1488324")]).await;
    exchange.finish().await;
    let head = agent.read_response_to("HEAD").await;
    assert_eq!(
        (head.header("content-length"), status_of(&head)),
        (Some("1488324"), "hedgerow; fwd=uri-miss")
    );
    agent.send(format!("GET {url} HTTP/1.1\r\nHost: x\r\n\r\n")).await;
    upstream.next().await.respond(200, &[FRESH, ("ETag", "\"v1\"")], "whole").await;
    assert_eq!(agent.read_response().await.text(), "whole");

    let head = agent.request("HEAD", &url, &[], b"").await;
    assert_eq!((head.status, head.header("content-length"), is_hit(&head)), (200, Some("5"), true));
    assert!(head.header("age").is_some());
    // The connection is where it should be.
    assert_eq!(agent.get(&url).await.text(), "whole");
    let head = agent.request("HEAD", &url, &[("If-None-Match", "\"v1\"")], b"").await;
    assert_eq!((head.status, is_hit(&head)), (304, true));
    assert_eq!(agent.get(&url).await.text(), "whole");
    assert_eq!(upstream.count(), 2);
}

/// What has not changed is not sent again.
#[tokio::test]
async fn a_stale_answer_is_confirmed_by_its_tag_or_its_date() {
    let date = "Sun, 06 Nov 1994 08:49:37 GMT";
    let cases: [Fields<'_>; 4] = [
        &[("ETag", "\"v1\"")],
        &[("ETag", "W/\"v1\"")],
        &[("Last-Modified", date)],
        &[("ETag", "\"v1\""), ("Last-Modified", date)],
    ];
    for validators in cases {
        let mut upstream = Upstream::start().await;
        let proxy = start(&upstream, KEEP).await;
        let fields = [&[FRESH, OLD, ("X-Version", "1"), ("Content-Type", "text/csv")], validators].concat();
        keep(&proxy, &mut upstream, &fields, "kept").await;
        // Its new fields count, and what it does not say stays.
        let answer = (304, &[&[FRESH, ("X-Version", "2")], validators].concat()[..], "");
        let (again, seen) = send(&proxy, &mut upstream, ("GET", "/", &[]), answer).await;
        let sent = |name: &str| validators.iter().find(|(own, _)| *own == name).map(|(_, value)| *value);
        assert_eq!(seen.header("if-none-match"), sent("ETag"));
        assert_eq!(seen.header("if-modified-since"), sent("Last-Modified"));
        assert_eq!((again.status, again.text(), again.header("content-length")), (200, "kept", Some("4")));
        assert_eq!(status_of(&again), "hedgerow; fwd=stale; fwd-status=304; stored");
        assert_eq!((again.header("x-version"), again.header("content-type")), (Some("2"), Some("text/csv")));
        assert_eq!(again.header("x-hedgerow-attempts"), Some("1"));
        let third = get(&proxy, &upstream, "/", &[]).await;
        assert_eq!((third.text(), third.header("x-version"), is_hit(&third)), ("kept", Some("2"), true));
        assert_eq!(upstream.count(), 2);
        let metrics = proxy.metrics().await;
        let counts = ["miss", "revalidated", "hit"].map(|result| results(&metrics, result));
        assert_eq!(counts, [1.0, 1.0, 1.0]);
    }
}

#[tokio::test]
async fn an_answer_that_has_changed_takes_the_place_of_what_was_kept() {
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, KEEP).await;
    keep(&proxy, &mut upstream, &[FRESH, OLD, ("ETag", "\"v1\"")], "one").await;
    let (again, seen) =
        send(&proxy, &mut upstream, ("GET", "/", &[]), (200, &[FRESH, ("ETag", "\"v2\"")], "two")).await;
    assert_eq!(seen.header("if-none-match"), Some("\"v1\""));
    assert_eq!((again.text(), status_of(&again)), ("two", "hedgerow; fwd=stale; stored"));
    let third = get(&proxy, &upstream, "/", &[]).await;
    assert_eq!((third.text(), third.header("etag"), is_hit(&third)), ("two", Some("\"v2\""), true));
    // One that may not be kept takes it away as well.
    send(&proxy, &mut upstream, ("GET", "/", &[("Cache-Control", "no-cache")]), (404, &[FRESH], "gone"))
        .await;
    let after = get(&proxy, &upstream, "/", &[]).await;
    assert_eq!((after.status, after.text(), is_hit(&after)), (404, "gone", true));
}

/// The caller has something of its own, which the cache's conditions are not about.
#[tokio::test]
async fn a_callers_own_condition_is_answered_by_what_is_kept_then() {
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, KEEP).await;
    let v1 = ("ETag", "\"v1\"");
    keep(&proxy, &mut upstream, &[FRESH, OLD, v1], "kept").await;
    // It has what is kept: 304 after one at the upstream.
    let own = [("If-None-Match", "\"v0\", \"v1\"")];
    let (answer, seen) = send(&proxy, &mut upstream, ("GET", "/", &own), (304, &[FRESH, OLD, v1], "")).await;
    assert_eq!((seen.header("if-none-match"), answer.status, answer.text()), (Some("\"v1\""), 304, ""));
    assert_eq!(answer.header("etag"), Some("\"v1\""));
    // It has something else: the body, although the upstream has sent none.
    let other = [("If-None-Match", "\"v0\"")];
    let (answer, seen) = send(&proxy, &mut upstream, ("GET", "/", &other), (304, &[FRESH, v1], "")).await;
    assert_eq!((seen.header("if-none-match"), answer.status, answer.text()), (Some("\"v1\""), 200, "kept"));
    // While it is fresh nobody is asked.
    let answer = get(&proxy, &upstream, "/", &own).await;
    assert_eq!((answer.status, answer.text(), is_hit(&answer)), (304, "", true));
    assert_eq!(answer.header("content-type"), None);
    assert_eq!(get(&proxy, &upstream, "/", &other).await.text(), "kept");
    assert_eq!(get(&proxy, &upstream, "/", &[("If-None-Match", "*")]).await.status, 304);
    assert_eq!(get(&proxy, &upstream, "/", &[("If-None-Match", "W/\"v1\"")]).await.status, 304);
    assert_eq!(upstream.count(), 3);
    // Nothing kept: the condition is the upstream's to judge, and its 304 is not the answer to anybody else.
    let (answer, seen) = send(&proxy, &mut upstream, ("GET", "/new", &own), (304, &[FRESH, v1], "")).await;
    assert_eq!((seen.header("if-none-match"), answer.status), (Some(own[0].1), 304));
    assert_eq!(status_of(&answer), "hedgerow; fwd=uri-miss");
    let (answer, _) = send(&proxy, &mut upstream, ("GET", "/new", &[]), (200, &[FRESH, v1], "new")).await;
    assert_eq!(answer.text(), "new");
    // What demands a state of the resource is for the origin alone.
    for condition in [("If-Match", "\"v1\""), ("If-Unmodified-Since", "Sun, 06 Nov 1994 08:49:37 GMT")] {
        let asks = [condition];
        let (answer, seen) = send(&proxy, &mut upstream, ("GET", "/new", &asks), (412, &[], "")).await;
        assert_eq!(seen.header(condition.0), Some(condition.1));
        assert_eq!((answer.status, status_of(&answer)), (412, "hedgerow; fwd=bypass"));
    }
}

/// A 304 about something else than what is kept must not put the old body under a new name.
#[tokio::test]
async fn a_confirmation_of_something_else_is_asked_again_without_conditions() {
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, KEEP).await;
    keep(&proxy, &mut upstream, &[FRESH, OLD, ("ETag", "\"v1\"")], "one").await;
    let mut agent = proxy.ask("GET", &upstream.url("/"), &[], b"").await;
    upstream.next().await.respond(304, &[FRESH, ("ETag", "\"v2\"")], "").await;
    let plain = upstream.next().await;
    assert_eq!((plain.header("if-none-match"), plain.header("if-modified-since")), (None, None));
    plain.respond(200, &[FRESH, ("ETag", "\"v2\"")], "two").await;
    let answer = agent.read_response().await;
    assert_eq!((answer.status, answer.text(), answer.header("x-hedgerow-attempts")), (200, "two", Some("2")));
    assert_eq!(get(&proxy, &upstream, "/", &[]).await.text(), "two");
}

/// Stale at once, fresh soon, and one request for it.
#[tokio::test]
async fn stale_while_revalidate_answers_at_once_and_renews_once() {
    for (cache, control) in [
        ("cache: true", "max-age=60, stale-while-revalidate=60"),
        ("cache: { stale_while_revalidate: 1m }", "max-age=60"),
    ] {
        let mut upstream = Upstream::start().await;
        let proxy = start(&upstream, &format!("hedge: off, breaker: off, {cache}")).await;
        let fields = [("Cache-Control", control), OLD, ("ETag", "\"v1\"")];
        keep(&proxy, &mut upstream, &fields, "old").await;
        // Many at once, who are gone before it is renewed; one of them wants a part.
        let asks: [Fields<'_>; 3] = [&[], &[("Range", "bytes=0-0")], &[("If-None-Match", "\"v1\"")]];
        let calls = (0..30).map(|n| get(&proxy, &upstream, "/", asks[n % 3]));
        for (n, answer) in join_all(calls).await.into_iter().enumerate() {
            let expected = [(200, "old"), (206, "o"), (304, "")][n % 3];
            assert_eq!((answer.status, answer.text()), expected);
            assert_eq!(age(&answer) + ttl(&answer), 60);
            assert!(age(&answer) >= 100);
            assert_eq!(answer.header("x-hedgerow-degraded"), None);
            assert_eq!(answer.header("x-hedgerow-attempts"), Some("0"));
        }
        proxy.until_status(|status| status["in_flight"] == 0).await;
        let renewal = upstream.next().await;
        assert_eq!((renewal.header("if-none-match"), renewal.header("range")), (Some("\"v1\""), None));
        assert_eq!(upstream.count(), 2);
        renewal.respond(200, &[FRESH, ("ETag", "\"v2\"")], "new").await;
        let fresh = soon(async {
            loop {
                let answer = get(&proxy, &upstream, "/", &[]).await;
                if answer.text() == "new" {
                    return answer;
                }
                assert_eq!(answer.text(), "old");
            }
        })
        .await;
        assert!(is_hit(&fresh) && ttl(&fresh) > 0);
        assert_eq!(upstream.count(), 2);
        assert!(results(&proxy.metrics().await, "stale") >= 30.0);
    }
}

/// What is renewed for its own sake takes the usual gates, and its failure is nobody's.
#[tokio::test]
async fn a_renewal_that_fails_leaves_the_stale_answer_and_the_next_call_tries_again() {
    let mut upstream = Upstream::start().await;
    let backup = Upstream::answering(|_| Reply::ok("backup")).await;
    let stages = "hedge: off, cache: { stale_while_revalidate: 1m }, fallback: [{ upstream: backup }], \
                  breaker: { consecutive_failures: 3, open_for: 5m }";
    let policy = format!(
        "upstreams: {{ {}, backup: {{ endpoint: \"{}\" }} }}",
        named("tool", upstream.address(), stages),
        backup.url("")
    );
    let proxy = HedgerowProcess::start(&policy).await;
    keep(&proxy, &mut upstream, &[FRESH, OLD, ("Connection", "close")], "old").await;
    for _ in 0..3 {
        assert_eq!(get(&proxy, &upstream, "/", &[]).await.text(), "old");
        upstream.next().await.reset();
        // It is over when the next may begin.
        let attempts = |metrics: &Metrics| {
            let failed = [TOOL, ("result", "reset")];
            metrics.value("hedgerow_upstream_attempts_total", &failed)
        };
        let sent = upstream.count() as f64 - 1.0;
        proxy.until_metrics(|metrics| attempts(metrics) == sent).await;
    }
    // The breaker is open now, for renewals too.
    let host = upstream.address().to_string();
    proxy.until_status(|status| status["upstreams"]["tool"][&host]["breaker"]["state"] == "open").await;
    let answer = get(&proxy, &upstream, "/", &[]).await;
    assert_eq!((answer.text(), answer.header("x-hedgerow-degraded")), ("old", None));
    assert_eq!(upstream.count(), 4);
    // Nobody waits for what a backup would say, and it would not be kept.
    assert_eq!(backup.count(), 0);
    assert_eq!(proxy.metrics().await.value("hedgerow_fallbacks_total", &[TOOL]), 0.0);
}

/// The renewal is asked for with the credential of who got the stale answer, and is for that partition.
#[tokio::test]
async fn a_renewal_stays_in_its_partition() {
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, "hedge: off, cache: { stale_while_revalidate: 1m }").await;
    let (a, b) = ([("Authorization", "Bearer a")], [("Authorization", "Bearer b")]);
    for (who, body) in [(&a, "a1"), (&b, "b1")] {
        send(&proxy, &mut upstream, ("GET", "/", who), (200, &[FRESH, OLD], body)).await;
    }
    assert_eq!(get(&proxy, &upstream, "/", &a).await.text(), "a1");
    let renewal_of_a = upstream.next().await;
    assert_eq!(get(&proxy, &upstream, "/", &b).await.text(), "b1");
    let renewal_of_b = upstream.next().await;
    assert_eq!(renewal_of_a.header("authorization"), Some("Bearer a"));
    assert_eq!(renewal_of_b.header("authorization"), Some("Bearer b"));
    renewal_of_b.respond(200, &[FRESH], "b2").await;
    renewal_of_a.respond(200, &[FRESH], "a2").await;
    for (who, old, new) in [(&a, "a1", "a2"), (&b, "b1", "b2")] {
        soon(async {
            loop {
                match get(&proxy, &upstream, "/", who).await.text() {
                    text if text == new => return,
                    text => assert_eq!(text, old),
                }
            }
        })
        .await;
    }
}

#[tokio::test]
async fn who_wants_only_what_is_kept_is_told_when_there_is_nothing() {
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, KEEP).await;
    let only = [("Cache-Control", "only-if-cached")];
    let answer = get(&proxy, &upstream, "/", &only).await;
    assert_eq!((answer.status, &*error_of(&answer)), (504, "not_cached"));
    keep(&proxy, &mut upstream, &[FRESH], "kept").await;
    let answer = get(&proxy, &upstream, "/", &only).await;
    assert_eq!((answer.status, answer.text(), is_hit(&answer)), (200, "kept", true));
    // One that would have to be validated is none.
    send(&proxy, &mut upstream, ("GET", "/old", &[]), (200, &[FRESH, OLD], "old")).await;
    assert_eq!(get(&proxy, &upstream, "/old", &only).await.status, 504);
    let any = [("Cache-Control", "only-if-cached, max-stale")];
    assert_eq!(get(&proxy, &upstream, "/old", &any).await.text(), "old");
    assert_eq!(upstream.count(), 2);
    let counted = [TOOL, ("code", "504"), ("outcome", "error")];
    proxy.until_metrics(|metrics| metrics.value("hedgerow_requests_total", &counted) == 2.0).await;
}

/// What the caller says of caches.
#[tokio::test]
async fn a_caller_can_ask_for_newer_or_older_answers_than_the_origin_says() {
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, KEEP).await;
    let asks: [(&str, &str, bool); 9] = [
        ("Cache-Control", "no-cache", false),
        ("Cache-Control", "max-age=0", false),
        ("Cache-Control", "max-age=10", false),
        ("Cache-Control", "min-fresh=45", false),
        ("Cache-Control", "no-store", false),
        ("Pragma", "no-cache", false),
        ("Cache-Control", "max-age=50", true),
        ("Cache-Control", "min-fresh=5", true),
        ("Cache-Control", "max-stale=5", true),
    ];
    // Twenty seconds old, forty to live.
    let fields = [FRESH, ("Age", "20"), ("ETag", "\"v1\"")];
    for (n, (name, value, is_given)) in asks.into_iter().enumerate() {
        let (path, asks) = (format!("/{n}"), [(name, value)]);
        send(&proxy, &mut upstream, ("GET", &path, &[]), (200, &fields, "one")).await;
        if is_given {
            assert!(is_hit(&get(&proxy, &upstream, &path, &asks).await), "{value}");
            continue;
        }
        let (answer, seen) = send(&proxy, &mut upstream, ("GET", &path, &asks), (200, &fields, "two")).await;
        let stored = if value == "no-store" { "" } else { "; stored" };
        assert_eq!((answer.text(), status_of(&answer)), ("two", &*format!("hedgerow; fwd=request{stored}")));
        let condition = Some("\"v1\"").filter(|_| value != "no-store");
        assert_eq!(seen.header("if-none-match"), condition, "{value}");
        // What somebody asked for anew is new for all, unless it was for nobody to keep.
        let kept = if value == "no-store" { "one" } else { "two" };
        assert_eq!(get(&proxy, &upstream, &path, &[]).await.text(), kept, "{value}");
    }
    // And what is stale is given to who takes it.
    send(&proxy, &mut upstream, ("GET", "/old", &[]), (200, &[FRESH, OLD], "old")).await;
    let takes = [("Cache-Control", "max-stale=50")];
    let answer = get(&proxy, &upstream, "/old", &takes).await;
    assert_eq!((answer.text(), ttl(&answer) <= -40), ("old", true));
    let takes = [("Cache-Control", "max-stale=20")];
    let (answer, _) = send(&proxy, &mut upstream, ("GET", "/old", &takes), (200, &[FRESH], "new")).await;
    assert_eq!(answer.text(), "new");
}

#[tokio::test]
async fn parts_are_given_of_what_is_kept() {
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, KEEP).await;
    let date = "Sun, 06 Nov 1994 08:49:37 GMT";
    let fields = [FRESH, ("ETag", "\"v1\""), ("Last-Modified", date), ("Content-Type", "text/plain")];
    keep(&proxy, &mut upstream, &fields, "0123456789").await;
    let cases: [(Fields<'_>, u16, &str, Option<&str>); 12] = [
        (&[("Range", "bytes=2-5")], 206, "2345", Some("bytes 2-5/10")),
        (&[("Range", "bytes=7-")], 206, "789", Some("bytes 7-9/10")),
        (&[("Range", "bytes=-3")], 206, "789", Some("bytes 7-9/10")),
        (&[("Range", "bytes=-30")], 206, "0123456789", Some("bytes 0-9/10")),
        (&[("Range", "bytes=8-100")], 206, "89", Some("bytes 8-9/10")),
        (&[("Range", "bytes=10-")], 416, "", Some("bytes */10")),
        (&[("Range", "bytes=0-1, 4-5")], 200, "0123456789", None),
        (&[("Range", "lines=1-2")], 200, "0123456789", None),
        (&[("Range", "bytes=2-5"), ("If-Range", "\"v1\"")], 206, "2345", Some("bytes 2-5/10")),
        (&[("Range", "bytes=2-5"), ("If-Range", "\"v0\"")], 200, "0123456789", None),
        (&[("Range", "bytes=2-5"), ("If-Range", date)], 206, "2345", Some("bytes 2-5/10")),
        (&[("Range", "bytes=2-5"), ("If-None-Match", "\"v1\"")], 304, "", None),
    ];
    let mut agent = proxy.agent().await;
    for (asks, status, body, range) in cases {
        let answer = agent.request("GET", &upstream.url("/"), asks, b"").await;
        assert_eq!(
            (answer.status, answer.text(), answer.header("content-range")),
            (status, body, range),
            "{asks:?}"
        );
        assert!(is_hit(&answer) && answer.header("age").is_some(), "{asks:?} {answer:?}");
        if status != 304 {
            assert_eq!(answer.header("content-length"), Some(&*body.len().to_string()), "{asks:?}");
        }
        assert_eq!(answer.header("etag"), Some("\"v1\""), "{asks:?}");
    }
    let head = agent.request("HEAD", &upstream.url("/"), &[("Range", "bytes=2-5")], b"").await;
    assert_eq!((head.status, head.header("content-length")), (200, Some("10")));
    assert_eq!(upstream.count(), 1);
    // A stale one is renewed as a whole, of which the part is given then.
    send(&proxy, &mut upstream, ("GET", "/old", &[]), (200, &[FRESH, OLD, ("ETag", "\"v1\"")], "0123456789"))
        .await;
    let range = [("Range", "bytes=2-5"), ("If-Range", "\"v1\"")];
    let confirmed = (304, &[FRESH, ("ETag", "\"v1\"")][..], "");
    let (answer, seen) = send(&proxy, &mut upstream, ("GET", "/old", &range), confirmed).await;
    // If it is not what is kept, only the whole of it would do.
    assert_eq!((seen.header("if-none-match"), seen.header("if-range")), (Some("\"v1\""), Some("\"v1\"")));
    assert_eq!((answer.status, answer.text()), (206, "2345"));
}

/// What is written is read anew, by everyone.
#[tokio::test]
async fn an_unsafe_method_makes_what_is_kept_invalid_in_every_partition() {
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, "hedge: off, breaker: off, cache: { stale_while_revalidate: 1h }").await;
    let partitions: [Fields<'_>; 3] = [&[], &[("Authorization", "Bearer a")], &[("Cookie", "sid=a")]];
    let fill = async |upstream: &mut Upstream| {
        for path in ["/item", "/list", "/other"] {
            for who in partitions {
                send(&proxy, upstream, ("GET", path, who), (200, &[FRESH, ("ETag", "\"v1\"")], "old")).await;
            }
        }
    };
    let changes: [(&str, u16, Fields<'_>, &[&str]); 10] = [
        ("POST", 200, &[], &["/item"]),
        ("PUT", 204, &[], &["/item"]),
        ("PATCH", 200, &[], &["/item"]),
        ("DELETE", 204, &[], &["/item"]),
        ("PURGE", 200, &[], &["/item"]),
        ("POST", 303, &[("Location", "/list")], &["/item", "/list"]),
        ("POST", 201, &[("Content-Location", "list")], &["/item", "/list"]),
        ("POST", 201, &[("Location", "http://elsewhere.example/list")], &["/item"]),
        ("POST", 500, &[("Location", "/list")], &[]),
        ("OPTIONS", 200, &[("Location", "/list")], &[]),
    ];
    for (n, (method, status, fields, touched)) in changes.into_iter().enumerate() {
        // From the second on what was touched has to be brought back.
        if n == 0 {
            fill(&mut upstream).await;
        }
        let (answer, _) = send(&proxy, &mut upstream, (method, "/item", &[]), (status, fields, "")).await;
        assert_eq!(status_of(&answer), "hedgerow; fwd=method");
        for path in ["/item", "/list", "/other"] {
            for who in partitions {
                if touched.contains(&path) {
                    let fresh = (200, &[FRESH, ("ETag", "\"v1\"")][..], "new");
                    let (answer, seen) = send(&proxy, &mut upstream, ("GET", path, who), fresh).await;
                    // It may be the same after all, which the upstream can say; until then it is not given.
                    assert_eq!((answer.text(), seen.header("if-none-match")), ("new", Some("\"v1\"")));
                } else {
                    assert!(
                        is_hit(&get(&proxy, &upstream, path, who).await),
                        "{method} {status} {path} {who:?}"
                    );
                }
            }
        }
    }
}

/// Where the policy keeps only some calls' answers, others still change what they are about.
#[tokio::test]
async fn a_change_is_heeded_whichever_route_it_takes() {
    for stages in [
        "hedge: off, routes: [{ path: \"/**\", methods: [GET], cache: true }]",
        "hedge: off, cache: { max_bytes: 1MiB }, routes: [{ path: \"/**\", methods: [GET], cache: { max_bytes: 2MiB } }]",
        "hedge: off, cache: true, routes: [{ path: \"/**\", methods: [PUT], cache: off }]",
    ] {
        let mut upstream = Upstream::start().await;
        let proxy = start(&upstream, stages).await;
        keep(&proxy, &mut upstream, &[FRESH], "old").await;
        assert!(is_hit(&get(&proxy, &upstream, "/", &[]).await));
        send(&proxy, &mut upstream, ("PUT", "/", &[]), (204, &[], "")).await;
        let answer = keep(&proxy, &mut upstream, &[FRESH], "new").await;
        assert_eq!(answer.text(), "new", "{stages}");
    }
}

/// What was on its way while it was changed is old when it comes.
#[tokio::test]
async fn an_answer_that_a_change_overtakes_is_not_taken_for_new() {
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, KEEP).await;
    let mut slow = proxy.ask("GET", &upstream.url("/"), &[], b"").await;
    let exchange = upstream.next().await;
    send(&proxy, &mut upstream, ("PUT", "/", &[]), (204, &[], "")).await;
    exchange.respond(200, &[FRESH], "old").await;
    assert_eq!(slow.read_response().await.text(), "old");
    let answer = keep(&proxy, &mut upstream, &[FRESH], "new").await;
    assert_eq!(answer.text(), "new");
    assert!(is_hit(&get(&proxy, &upstream, "/", &[]).await));
}

/// At the bound exactly, by its length and without one.
#[tokio::test]
async fn answers_up_to_max_body_are_kept() {
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, "hedge: off, cache: { max_body: 1KiB }").await;
    for (n, (length, is_chunked)) in
        [(1024, false), (1025, false), (1024, true), (1025, true)].into_iter().enumerate()
    {
        let url = upstream.url(&format!("/{n}"));
        let body = pattern(0, length);
        for round in 0..2 {
            let mut agent = proxy.ask("GET", &url, &[], b"").await;
            if round == 0 || length > 1024 {
                let mut exchange = upstream.next().await;
                if is_chunked {
                    exchange.start_chunks(200, &[FRESH]).await;
                    exchange.chunk(&body[..1000]).await;
                    exchange.chunk(&body[1000..]).await;
                    exchange.end().await;
                } else {
                    exchange.respond(200, &[FRESH], &body).await;
                }
            }
            let answer = agent.read_response().await;
            assert_eq!((answer.body.as_slice(), answer.complete), (&*body, true));
            assert_eq!(is_hit(&answer), round == 1 && length == 1024, "{length} {is_chunked}");
        }
    }
}

/// However much is asked for, and however it is spread.
#[tokio::test]
async fn memory_is_bounded_by_max_bytes() {
    const BODY: usize = 256 << 10;
    let upstream = Upstream::answering(|seen| {
        let mut body = vec![b'x'; BODY];
        body[..seen.path().len()].copy_from_slice(seen.path().as_bytes());
        Reply::ok(body).header("Cache-Control", "max-age=600")
    })
    .await;
    let proxy = start(&upstream, "hedge: off, cache: { max_bytes: 4MiB }").await;
    let mut agent = proxy.agent().await;
    let fetch = async |agent: &mut Agent, n: usize| {
        let path = format!("/{n}");
        let answer = agent.get(&upstream.url(&path)).await;
        assert!(answer.body.starts_with(path.as_bytes()) && answer.body.len() == BODY);
        is_hit(&answer)
    };
    for n in 0..16 {
        fetch(&mut agent, n).await;
    }
    let before = proxy.resident_kib();
    for n in 16..240 {
        fetch(&mut agent, n).await;
    }
    // Sixty times what may be kept has passed.
    let after = proxy.resident_kib();
    assert!(after < before + (16 << 10), "{before} KiB became {after} KiB");
    let mut hits = 0;
    for n in 0..240 {
        hits += usize::from(fetch(&mut agent, n).await);
    }
    // Sixteen would be the bound without heads; the look-ups themselves may push all of them out.
    assert!(hits <= 16, "{hits} hits");
    // What is asked for again and again finds a place.
    soon(async { while !fetch(&mut agent, 7).await {} }).await;
}

/// One that is too large by itself pushes nothing out.
#[tokio::test]
async fn each_policy_has_its_own_store() {
    let mut upstream = Upstream::start().await;
    let mut other = Upstream::start().await;
    let policy = format!(
        "upstreams: {{ {}, {} }}",
        named("tool", upstream.address(), KEEP),
        named("other", other.address(), "hedge: off, cache: { max_bytes: 2KiB }")
    );
    let proxy = HedgerowProcess::start(&policy).await;
    keep(&proxy, &mut upstream, &[FRESH], "kept").await;
    for n in 0..20 {
        let body = "x".repeat(1500);
        send(&proxy, &mut other, ("GET", &format!("/{n}"), &[]), (200, &[FRESH], &body)).await;
    }
    assert!(is_hit(&get(&proxy, &upstream, "/", &[]).await));
}

/// Many ask for the same at once: one request, and kept for those after them.
#[tokio::test]
async fn what_a_flight_brings_is_kept() {
    let mut upstream = Upstream::start().await;
    let stages = format!("{KEEP}, coalesce: true");
    let proxy = HedgerowProcess::start(&format!("threads: 1\n{}", tool(upstream.address(), &stages))).await;
    let url = upstream.url("/");
    let mut agents = Vec::new();
    for _ in 0..6 {
        agents.push(proxy.ask("GET", &url, &[], b"").await);
    }
    let exchange = upstream.next().await;
    proxy.until_in_flight(6).await;
    exchange.respond(200, &[FRESH, OLD, ("ETag", "\"v1\"")], "kept").await;
    let mut marks = Vec::new();
    for agent in &mut agents {
        let answer = agent.read_response().await;
        assert_eq!(answer.text(), "kept");
        marks.push(status_of(&answer).to_owned());
    }
    marks.sort();
    assert_eq!(marks[..5], [(); 5].map(|()| "hedgerow; fwd=miss; stored; collapsed".to_owned()));
    assert_eq!(marks[5], "hedgerow; fwd=uri-miss; stored");
    // Confirmed for all of them at once.
    let mut agents = Vec::new();
    for _ in 0..4 {
        agents.push(proxy.ask("GET", &url, &[], b"").await);
    }
    let exchange = upstream.next().await;
    assert_eq!(exchange.header("if-none-match"), Some("\"v1\""));
    proxy.until_in_flight(4).await;
    exchange.respond(304, &[FRESH, ("ETag", "\"v1\"")], "").await;
    for agent in &mut agents {
        let answer = agent.read_response().await;
        assert_eq!((answer.status, answer.text()), (200, "kept"));
    }
    assert!(is_hit(&get(&proxy, &upstream, "/", &[]).await));
    assert_eq!(upstream.count(), 2);
    // A leader that leaves takes nothing away from what the others wait for.
    let other = upstream.url("/other");
    let leader = proxy.ask("GET", &other, &[], b"").await;
    let mut exchange = upstream.next().await;
    let mut follower = proxy.ask("GET", &other, &[], b"").await;
    proxy.until_in_flight(2).await;
    exchange.head_only(200, &[FRESH, ("Content-Length", "10")]).await;
    exchange.raw(b"01234").await;
    drop(leader);
    proxy.until_in_flight(1).await;
    exchange.raw(b"56789").await;
    exchange.finish().await;
    assert_eq!(follower.read_response().await.text(), "0123456789");
    assert!(is_hit(&get(&proxy, &upstream, "/other", &[]).await));
    // One that is too large to be shared is kept all the same.
    let large = "x".repeat(300 << 10);
    let stages = "hedge: off, coalesce: { max_body: 1KiB }, cache: true";
    let proxy = HedgerowProcess::start(&format!("threads: 1\n{}", tool(upstream.address(), stages))).await;
    for is_chunked in [false, true] {
        let path = format!("/large/{is_chunked}");
        let mut agent = proxy.ask("GET", &upstream.url(&path), &[], b"").await;
        let mut exchange = upstream.next().await;
        if is_chunked {
            exchange.start_chunks(200, &[FRESH]).await;
            exchange.chunk(&large[..500]).await;
            exchange.chunk(&large[500..]).await;
            exchange.end().await;
        } else {
            exchange.respond(200, &[FRESH], &large).await;
        }
        assert_eq!(agent.read_response().await.body.len(), large.len());
        let again = get(&proxy, &upstream, &path, &[]).await;
        assert!(is_hit(&again) && again.text() == large, "{is_chunked}");
    }
}

/// Two attempts are one answer.
#[tokio::test]
async fn hedges_and_retries_keep_the_answer_that_was_given() {
    let mut upstream = Upstream::start().await;
    let budget = "breaker: off, cache: true, extra_load: { ratio: 0%, floor: 1/s }";
    let retrying =
        start(&upstream, &format!("hedge: off, retry: {{ max_attempts: 2, backoff: 1ms }}, {budget}")).await;
    let mut agent = retrying.ask("GET", &upstream.url("/retry"), &[], b"").await;
    upstream.next().await.respond(503, &[FRESH], "no").await;
    upstream.next().await.respond(200, &[FRESH], "yes").await;
    assert_eq!(agent.read_response().await.text(), "yes");
    let again = get(&retrying, &upstream, "/retry", &[]).await;
    assert_eq!((again.text(), is_hit(&again)), ("yes", true));

    let hedging = start(&upstream, &format!("hedge: {{ after: 500ms }}, {budget}")).await;
    let mut agent = hedging.ask("GET", &upstream.url("/hedge"), &[], b"").await;
    let primary = upstream.next().await;
    let hedge = upstream.next().await;
    hedge.respond(200, &[FRESH], "hedge").await;
    primary.gone().await;
    assert_eq!(agent.read_response().await.text(), "hedge");
    let again = get(&hedging, &upstream, "/hedge", &[]).await;
    assert_eq!((again.text(), is_hit(&again)), ("hedge", true));
    assert_eq!(upstream.count(), 4);
    // Conditions go with every attempt.
    let mut agent = hedging.ask("GET", &upstream.url("/old"), &[], b"").await;
    upstream.next().await.respond(200, &[FRESH, OLD, ("ETag", "\"v1\"")], "old").await;
    agent.read_response().await;
    // The budget has its token back by then.
    tokio::time::sleep(ms(1100)).await;
    agent.send(format!("GET {} HTTP/1.1\r\nHost: x\r\n\r\n", upstream.url("/old"))).await;
    let (primary, hedge) = (upstream.next().await, upstream.next().await);
    for attempt in [&primary, &hedge] {
        assert_eq!(attempt.header("if-none-match"), Some("\"v1\""));
    }
    hedge.respond(304, &[FRESH, ("ETag", "\"v1\"")], "").await;
    primary.gone().await;
    assert_eq!(agent.read_response().await.text(), "old");
}

/// Another upstream's answer stands in for one, and is not that one's.
#[tokio::test]
async fn what_a_backup_says_is_not_kept_as_the_upstreams_own() {
    let mut upstream = Upstream::start().await;
    let mut backup = Upstream::start().await;
    let with = |stages: &str| {
        format!(
            "upstreams: {{ {}, backup: {{ endpoint: \"{}\" }} }}",
            named("tool", upstream.address(), stages),
            backup.url("")
        )
    };
    let falling = with("hedge: off, breaker: off, cache: true, fallback: [{ upstream: backup }]");
    let hedging = with(
        "hedge: { after: 300ms, to: backup }, breaker: off, cache: true, extra_load: { ratio: 100%, floor: 100/s }",
    );
    for policy in [falling, hedging] {
        let proxy = HedgerowProcess::start(&policy).await;
        // Something is kept, to be confirmed by its own upstream alone.
        keep(&proxy, &mut upstream, &[FRESH, OLD, ("ETag", "\"v1\"")], "own").await;
        let mut agent = proxy.ask("GET", &upstream.url("/"), &[], b"").await;
        let primary = upstream.next().await;
        assert_eq!(primary.header("if-none-match"), Some("\"v1\""));
        if policy.contains("fallback") {
            primary.respond(503, &[], "no").await;
        } else {
            primary.hold();
        }
        let stand_in = backup.next().await;
        assert_eq!(stand_in.header("if-none-match"), None);
        stand_in.respond(200, &[FRESH, ("ETag", "\"v1\"")], "backup's").await;
        assert_eq!(agent.read_response().await.text(), "backup's");
        let again = keep(&proxy, &mut upstream, &[FRESH, ("ETag", "\"v2\"")], "own again").await;
        assert_eq!(again.text(), "own again", "{policy}");
    }
}

/// A part of an answer is no answer.
#[tokio::test]
async fn nothing_is_kept_of_an_answer_that_did_not_come_whole() {
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, KEEP).await;
    for (n, (is_chunked, is_clients)) in
        [(false, false), (true, false), (false, true), (true, true)].into_iter().enumerate()
    {
        let path = format!("/{n}");
        let mut agent = proxy.ask("GET", &upstream.url(&path), &[], b"").await;
        let mut exchange = upstream.next().await;
        match is_chunked {
            true => {
                exchange.start_chunks(200, &[FRESH]).await;
                exchange.chunk("01234").await;
            }
            false => {
                exchange.head_only(200, &[FRESH, ("Content-Length", "10")]).await;
                exchange.raw(b"01234").await;
            }
        }
        agent.read_head().await;
        match is_chunked {
            true => assert_eq!(agent.read_chunk().await.unwrap(), b"01234"),
            false => agent.expect(b"01234").await,
        }
        if is_clients {
            drop(agent);
            exchange.gone().await;
        } else {
            exchange.close().await;
            agent.ended().await;
        }
        let (answer, _) = send(&proxy, &mut upstream, ("GET", &path, &[]), (200, &[FRESH], "whole")).await;
        assert_eq!((answer.text(), status_of(&answer)), ("whole", "hedgerow; fwd=uri-miss; stored"));
    }
    // The deadline cuts it as well.
    let headers = [("x-request-deadline", &*deadline_in(ms(1500)))];
    let mut agent = proxy.ask("GET", &upstream.url("/late"), &headers, b"").await;
    let mut exchange = upstream.next().await;
    exchange.start_chunks(200, &[FRESH]).await;
    exchange.chunk("01234").await;
    agent.read_head().await;
    exchange.gone().await;
    let (answer, _) = send(&proxy, &mut upstream, ("GET", "/late", &[]), (200, &[FRESH], "whole")).await;
    assert_eq!(answer.text(), "whole");
}

/// The end of an answer is the upstream's to tell, in its own way.
#[tokio::test]
async fn what_http2_brings_is_kept_when_its_end_has_come() {
    let mut upstream = Http2Upstream::start().await;
    for extra in ["", ", coalesce: true"] {
        let policy = tool(upstream.address(), &format!("origin: h2c, {KEEP}{extra}"));
        let proxy = HedgerowProcess::start(&format!("threads: 1\n{policy}")).await;
        let ended = async |result: &str, count: f64| {
            let counted = [TOOL, ("result", result)];
            let is_over =
                |metrics: &Metrics| metrics.value("hedgerow_upstream_attempts_total", &counted) == count;
            proxy.until_metrics(is_over).await;
        };
        // With the end apart from the last byte, whose number was told or not, and with trailers.
        let length = ("content-length", "5");
        let cases: [(&str, Fields<'_>); 3] =
            [("/length", &[FRESH, length]), ("/open", &[FRESH]), ("/trailers", &[FRESH])];
        for (n, (path, fields)) in cases.into_iter().enumerate() {
            let url = upstream.url(path);
            let mut agent = proxy.ask("GET", &url, &[], b"").await;
            let mut stream = upstream.next().await;
            stream.head(200, fields);
            assert!(stream.data("whole").await);
            let head = agent.read_head().await;
            match head.framing("GET").unwrap() {
                Framing::Chunked => assert_eq!(agent.read_chunk().await.unwrap(), b"whole"),
                _ => agent.expect(b"whole").await,
            }
            match path {
                "/trailers" => stream.trailers(&[("x-sum", "1")]),
                _ => stream.end(),
            }
            ended("ok", (n + 1) as f64).await;
            let again = proxy.get(&url).await;
            assert_eq!((again.text(), is_hit(&again)), ("whole", true), "{path} {extra}");
        }
        // Broken off in the middle.
        let url = upstream.url("/cut");
        let mut agent = proxy.ask("GET", &url, &[], b"").await;
        let mut stream = upstream.next().await;
        stream.head(200, &[FRESH]);
        assert!(stream.data("whole").await);
        agent.read_head().await;
        stream.reset(h2::Reason::INTERNAL_ERROR);
        agent.all_that_comes_without_closing().await;
        let mut agent = proxy.ask("GET", &url, &[], b"").await;
        upstream.next().await.respond(200, &[FRESH], "again").await;
        assert_eq!(agent.read_response().await.text(), "again");
        let left = [TOOL, ("outcome", "client_left")];
        assert_eq!(proxy.metrics().await.value("hedgerow_requests_total", &left), 0.0);
    }
}

/// What was asked of another place says nothing of this one.
#[tokio::test]
async fn an_endpoint_that_moves_takes_what_is_kept_out_of_use() {
    let mut one = Upstream::start().await;
    let mut two = Upstream::start().await;
    let policy = |endpoint: &Upstream, more: &str| {
        format!(
            "upstreams: {{ tool: {{ hosts: [a.example], endpoint: \"{}\", {KEEP}{more} }} }}",
            endpoint.url("")
        )
    };
    let mut proxy = HedgerowProcess::start(&policy(&one, "")).await;
    let url = "http://a.example/";
    let mut agent = proxy.ask("GET", url, &[], b"").await;
    one.next().await.respond(200, &[FRESH], "one").await;
    assert_eq!(agent.read_response().await.text(), "one");
    let applied = async |proxy: &HedgerowProcess, n: f64| {
        let is_applied = move |metrics: &Metrics| {
            metrics.value("hedgerow_config_reloads_total", &[("result", "applied")]) == n
        };
        proxy.until_metrics(is_applied).await;
    };
    // A change of something else changes nothing here.
    proxy.policy.replace(&policy(&one, ", stream_idle: 1m"));
    applied(&proxy, 1.0).await;
    let answer = proxy.get(url).await;
    assert_eq!((answer.text(), is_hit(&answer)), ("one", true));

    proxy.policy.replace(&policy(&two, ""));
    applied(&proxy, 2.0).await;
    let mut agent = proxy.ask("GET", url, &[], b"").await;
    two.next().await.respond(200, &[FRESH], "two").await;
    assert_eq!(agent.read_response().await.text(), "two");
    assert_eq!(proxy.get(url).await.text(), "two");
    // And back: what is kept of the first is fresh still.
    proxy.policy.replace(&policy(&one, ""));
    applied(&proxy, 3.0).await;
    assert_eq!(proxy.get(url).await.text(), "one");
    assert_eq!((one.count(), two.count()), (1, 1));
}

/// Without any policy there is no cache, unless an upstream names the host.
#[tokio::test]
async fn direct_hosts_are_not_cached_and_named_ones_are() {
    let upstream = Upstream::answering(|_| Reply::ok("x").header("Cache-Control", "max-age=60")).await;
    let defaults = "direct: [loopback]\ndefaults: { hedge: off, cache: true, coalesce: true }";
    let proxy = HedgerowProcess::start(defaults).await;
    for _ in 0..2 {
        assert_eq!(get(&proxy, &upstream, "/", &[]).await.header("cache-status"), None);
    }
    assert_eq!(upstream.count(), 2);
    let named = format!("{defaults}\n{}", tool(upstream.address(), "bulkhead: off"));
    let proxy = HedgerowProcess::start(&named).await;
    get(&proxy, &upstream, "/", &[]).await;
    assert!(is_hit(&get(&proxy, &upstream, "/", &[]).await));
}

/// Each call that the stage sees is counted once, by what came of it.
#[tokio::test]
async fn every_result_is_counted() {
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, "hedge: off, breaker: off, cache: { stale_while_revalidate: 1m }").await;
    let validated = [("Cache-Control", "no-cache"), ("ETag", "\"v1\"")];
    keep(&proxy, &mut upstream, &[FRESH], "x").await;
    get(&proxy, &upstream, "/", &[]).await;
    get(&proxy, &upstream, "/", &[]).await;
    send(&proxy, &mut upstream, ("GET", "/v", &[]), (200, &validated, "x")).await;
    send(&proxy, &mut upstream, ("GET", "/v", &[]), (304, &validated, "")).await;
    send(&proxy, &mut upstream, ("GET", "/v", &[]), (200, &validated, "y")).await;
    send(&proxy, &mut upstream, ("POST", "/v", &[]), (200, &[], "")).await;
    send(&proxy, &mut upstream, ("GET", "/if", &[("If-Match", "\"1\"")]), (200, &[], "")).await;
    send(&proxy, &mut upstream, ("GET", "/old", &[]), (200, &[FRESH, OLD], "x")).await;
    get(&proxy, &upstream, "/old", &[]).await;
    upstream.next().await.respond(200, &[FRESH], "x").await;
    let wanted = [("hit", 2.0), ("stale", 1.0), ("revalidated", 1.0), ("miss", 4.0), ("bypass", 2.0)];
    // The renewal is no call of anybody's.
    let metrics = proxy.until_metrics(|metrics| results(metrics, "stale") == 1.0).await;
    for (result, count) in wanted {
        assert_eq!(results(&metrics, result), count, "{result}");
    }
}

/// Nothing of it is to be found where secrets must not be.
#[tokio::test]
async fn a_get_with_a_body_passes_by() {
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, KEEP).await;
    keep(&proxy, &mut upstream, &[FRESH], "plain").await;
    let mut agent = proxy.ask("GET", &upstream.url("/"), &[], b"{}").await;
    let mut exchange = upstream.next().await;
    assert_eq!(exchange.body().await, b"{}");
    exchange.respond(200, &[FRESH], "searched").await;
    let answer = agent.read_response().await;
    assert_eq!((answer.text(), status_of(&answer)), ("searched", "hedgerow; fwd=bypass"));
    assert_eq!(get(&proxy, &upstream, "/", &[]).await.text(), "plain");
}
