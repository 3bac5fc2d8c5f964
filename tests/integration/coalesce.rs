//! Equal calls that are under way share one request: which are equal, what is shared, and who waits for whom.

use std::time::Duration;

use rustix::process::Signal;
use tokio::time::Instant;

use crate::support::client::{Agent, Response, deadline_in};
use crate::support::h1::Framing;
use crate::support::hedgerow::{HedgerowProcess, Metrics};
use crate::support::http2::Http2Upstream;
use crate::support::policy::{TOOL, named, tool};
use crate::support::road::{Mode, Road};
use crate::support::soon;
use crate::support::upstream::{Exchange, Reply, Upstream, is_pattern, pattern};

const SHARE: &str = "hedge: off, coalesce: true";
const DEADLINE: &str = "x-request-deadline";
/// What an answer says that was made for another call too.
const COLLAPSED: Option<&str> = Some("hedgerow; fwd=miss; collapsed");
/// Search, which is a POST that may be done twice.
const SEARCH: &str = "hedge: off, coalesce: true, replay_limit: 64KiB, \
                      routes: [{ path: /search, methods: [POST], idempotent: true }]";

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// With one thread, so that calls can be waited for until they wait themselves.
async fn start(upstream: &Upstream, stages: &str) -> HedgerowProcess {
    HedgerowProcess::start(&format!("threads: 1\n{}", tool(upstream.address(), stages))).await
}

async fn get(proxy: &HedgerowProcess, upstream: &Upstream) -> Agent {
    proxy.ask("GET", &upstream.url("/"), &[], b"").await
}

/// A call that leads with its request at the upstream, and so many that follow it.
async fn flight(
    proxy: &HedgerowProcess,
    upstream: &mut Upstream,
    headers: &[(&str, &str)],
    followers: usize,
) -> (Agent, Vec<Agent>, Exchange) {
    let url = upstream.url("/");
    let leader = proxy.ask("GET", &url, headers, b"").await;
    let exchange = upstream.next().await;
    let mut others = Vec::new();
    for _ in 0..followers {
        others.push(proxy.ask("GET", &url, headers, b"").await);
    }
    proxy.until_in_flight(1 + followers).await;
    (leader, others, exchange)
}

fn coalesced(metrics: &Metrics) -> f64 {
    metrics.value("hedgerow_coalesced_total", &[TOOL])
}

fn attempts(metrics: &Metrics) -> f64 {
    metrics.value("hedgerow_upstream_attempts_total", &[TOOL])
}

/// The word of hedgerow's own error.
fn error_of(response: &Response) -> String {
    assert_eq!(response.header("content-type"), Some("application/problem+json"), "{response:?}");
    response.json()["error"].as_str().expect("a problem names its error").to_owned()
}

/// All that is promised of the plain case, at once.
#[tokio::test]
async fn equal_calls_share_one_request_and_the_followers_say_so() {
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, SHARE).await;
    let (mut leader, followers, exchange) = flight(&proxy, &mut upstream, &[], 5).await;
    exchange.respond(200, &[("X-From", "tool"), ("Content-Type", "text/plain")], "shared").await;

    let first = leader.read_response().await;
    assert_eq!((first.status, first.text(), first.header("cache-status")), (200, "shared", None));
    assert_eq!(first.header("x-hedgerow-attempts"), Some("1"));
    for mut follower in followers {
        let answer = follower.read_response().await;
        assert_eq!((answer.status, answer.text(), answer.header("cache-status")), (200, "shared", COLLAPSED));
        assert_eq!((answer.header("x-from"), answer.header("content-length")), (Some("tool"), Some("6")));
        // What was sent for it is nothing.
        assert_eq!(answer.header("x-hedgerow-attempts"), Some("0"));
        assert!(!answer.header("server-timing").unwrap().contains("upstream"));
        // Its connection is as good as before.
        follower.send(format!("HEAD http://{}/next HTTP/1.1\r\n\r\n", proxy.admin)).await;
        assert_eq!(follower.read_response_to("HEAD").await.status, 400);
    }
    assert_eq!(upstream.count(), 1);
    let is_settled = |metrics: &Metrics| {
        let answered = [TOOL, ("code", "200"), ("outcome", "answered")];
        metrics.value("hedgerow_requests_total", &answered) == 6.0
    };
    let metrics = proxy.until_metrics(is_settled).await;
    assert_eq!((coalesced(&metrics), attempts(&metrics)), (5.0, 1.0));
    let line = proxy.access_log(|line| line["source"] == "collapsed").await;
    assert_eq!((&line["attempts"], &line["status"], &line["bytes_out"]), (&0.into(), &200.into(), &6.into()));
}

/// Who did not ask for it sends every call.
#[tokio::test]
async fn without_the_stage_or_on_a_route_that_turns_it_off_every_call_is_sent() {
    let mut upstream = Upstream::start().await;
    for stages in ["hedge: off", "hedge: off, coalesce: true, routes: [{ path: /, coalesce: off }]"] {
        let proxy = start(&upstream, stages).await;
        let mut agents = [get(&proxy, &upstream).await, get(&proxy, &upstream).await];
        let both = [upstream.next().await, upstream.next().await];
        for exchange in both {
            exchange.respond(200, &[], "own").await;
        }
        for agent in &mut agents {
            assert_eq!(agent.read_response().await.header("cache-status"), None);
        }
    }
}

/// The same on every road that a call can take.
#[tokio::test]
async fn calls_are_shared_on_every_road() {
    for mode in Mode::ALL {
        let mut road = Road::start_with(mode, SHARE, "threads: 1").await;
        let (mut leader, mut exchange) = road.exchange(&[]).await;
        let mut follower = road.call("GET", "/", &[]).await;
        road.hedgerow.until_in_flight(2).await;
        exchange.start_chunks(200, &[]).await;
        exchange.chunk("sha").await;
        assert_eq!(leader.head().await.status, 200, "{mode:?}");
        leader.expect("sha").await;
        exchange.chunk("red").await;
        exchange.end().await;
        leader.expect("red").await;
        assert_eq!(leader.rest().await, b"", "{mode:?}");
        let head = follower.head().await;
        assert_eq!((head.status, head.get("cache-status")), (200, COLLAPSED), "{mode:?}");
        assert_eq!(follower.rest().await, b"shared", "{mode:?}");
        assert_eq!(road.upstream.count(), 1, "{mode:?}");
    }
}

/// Whatever can change an answer tells two calls apart, credentials first.
#[tokio::test]
async fn calls_that_differ_in_what_can_change_the_answer_are_each_sent() {
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, "hedge: off, coalesce: { vary: [x-tenant] }").await;
    let one = |name, value| ("GET", "/x?q=1", vec![(name, value)]);
    let cases = [
        ("HEAD", "/x?q=1", vec![]),
        ("GET", "/y?q=1", vec![]),
        ("GET", "/x?q=2", vec![]),
        ("GET", "/x?q=1&", vec![]),
        ("GET", "/%78?q=1", vec![]),
        one("Authorization", "Bearer b"),
        one("Cookie", "sid=b"),
        one("Accept", "text/csv"),
        one("Accept-Encoding", "gzip"),
        one("Range", "bytes=0-3"),
        one("X-Api-Key", "b"),
        one("Api-Key", "b"),
        one("X-Goog-Api-Key", "b"),
        one("X-Tenant", "b"),
        // What makes an answer out of what the client has: a 304 or a 412 is for nobody else.
        one("If-None-Match", "\"1\""),
        one("If-Modified-Since", "Sun, 29 Nov 2026 10:00:30 GMT"),
        one("If-Match", "\"1\""),
        one("If-Unmodified-Since", "Sun, 29 Nov 2026 10:00:30 GMT"),
        // And who wants to be told by the origin itself is not told what somebody was told before.
        one("Cache-Control", "no-cache"),
        one("Pragma", "no-cache"),
    ];
    for (method, path, headers) in cases {
        let mut plain = proxy.ask("GET", &upstream.url("/x?q=1"), &[], b"").await;
        let for_plain = upstream.next().await;
        let mut other = proxy.ask(method, &upstream.url(path), &headers, b"").await;
        let for_other = upstream.next().await;
        for_plain.respond(200, &[], "plain").await;
        for_other.respond(200, &[], "other").await;
        assert_eq!(plain.read_response().await.text(), "plain");
        let answer = other.read_response_to(method).await;
        let expected = if method == "HEAD" { "" } else { "other" };
        assert_eq!((answer.text(), answer.header("cache-status")), (expected, None), "{path} {headers:?}");
    }
    // Two that differ in their values, one of them with a comma.
    let pairs = [
        [vec![("Authorization", "Bearer a")], vec![("Authorization", "Bearer b")]],
        [vec![("Cookie", "a=1; b=2")], vec![("Cookie", "a=1")]],
        [vec![("Accept", "a/b"), ("Accept", "c/d")], vec![("Accept", "a/b, c/d")]],
        [vec![("Authorization", "k")], vec![("X-Api-Key", "k")]],
    ];
    for [first, second] in pairs {
        let mut one = proxy.ask("GET", &upstream.url("/"), &first, b"").await;
        let for_one = upstream.next().await;
        let mut other = proxy.ask("GET", &upstream.url("/"), &second, b"").await;
        upstream.next().await.respond(200, &[], "other").await;
        for_one.respond(200, &[], "one").await;
        assert_eq!((one.read_response().await.text(), other.read_response().await.text()), ("one", "other"));
    }
}

/// What tells the call apart, not what it does, would make every call its own.
#[tokio::test]
async fn calls_that_differ_in_nothing_that_matters_are_equal() {
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, SHARE).await;
    let url = upstream.url("/");
    let soon_over = deadline_in(ms(60_000));
    let mut leader = proxy.ask("GET", &url, &[("Authorization", "a"), ("X-Request-Id", "1")], b"").await;
    let exchange = upstream.next().await;
    let others = [
        vec![("authorization", "a"), ("X-Request-Id", "2"), ("traceparent", "00-1-2-01")],
        vec![("User-Agent", "other"), ("Authorization", "a")],
        vec![("Authorization", "a"), (DEADLINE, &soon_over)],
        vec![("Authorization", "a"), ("X-Stainless-Retry-Count", "1"), ("Connection", "close")],
    ];
    let mut followers = Vec::new();
    for headers in &others {
        followers.push(proxy.ask("GET", &url, headers, b"").await);
    }
    proxy.until_in_flight(5).await;
    exchange.respond(200, &[], "shared").await;
    assert_eq!(leader.read_response().await.text(), "shared");
    for mut follower in followers {
        let answer = follower.read_response().await;
        assert_eq!((answer.text(), answer.header("cache-status")), ("shared", COLLAPSED));
    }
    assert_eq!(upstream.count(), 1);
}

/// One place, called by two names, is two upstreams to those who ask.
#[tokio::test]
async fn calls_to_two_hosts_are_two_although_both_are_sent_to_one_place() {
    let mut upstream = Upstream::start().await;
    let endpoint = upstream.url("");
    let policy = format!(
        "threads: 1\nupstreams: {{ tool: {{ hosts: [a.example, b.example], endpoint: \"{endpoint}\", {SHARE} }} }}"
    );
    let proxy = HedgerowProcess::start(&policy).await;
    let mut agents = Vec::new();
    for host in ["a.example", "b.example", "a.example:8080"] {
        agents.push(proxy.ask("GET", &format!("http://{host}/"), &[], b"").await);
        let exchange = upstream.next().await;
        agents.push(proxy.ask("GET", &format!("http://{}:80/", host.to_uppercase()), &[], b"").await);
        if host.contains(':') {
            agents.pop();
        }
        proxy.until_in_flight(agents.len()).await;
        exchange.respond(200, &[], host).await;
        for mut agent in agents.drain(..) {
            assert_eq!(agent.read_response().await.text(), host);
        }
    }
    assert_eq!(upstream.count(), 3);
}

/// The first to ask has no more to say than the others.
#[tokio::test]
async fn c086_the_leader_leaves_before_the_head_and_fails_nobody() {
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, SHARE).await;
    for is_reset in [false, true] {
        let (leader, followers, exchange) = flight(&proxy, &mut upstream, &[], 5).await;
        match is_reset {
            true => leader.reset(),
            false => drop(leader),
        }
        proxy.until_in_flight(5).await;
        exchange.respond(200, &[], "whole").await;
        for mut follower in followers {
            let answer = follower.read_response().await;
            assert_eq!((answer.status, answer.text()), (200, "whole"));
        }
    }
    assert_eq!(upstream.count(), 2);
    let left = [TOOL, ("code", "499"), ("outcome", "client_left")];
    proxy.until_metrics(|metrics| metrics.value("hedgerow_requests_total", &left) == 2.0).await;
}

#[tokio::test]
async fn c087_a_follower_leaves_at_its_own_deadline_and_the_flight_goes_on() {
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, SHARE).await;
    let (mut leader, others, exchange) = flight(&proxy, &mut upstream, &[], 1).await;
    let began = Instant::now();
    let headers = [(DEADLINE, &*deadline_in(ms(400)))];
    let mut hurried = proxy.ask("GET", &upstream.url("/"), &headers, b"").await;
    let answer = hurried.read_response().await;
    assert_eq!((answer.status, &*error_of(&answer)), (504, "deadline_exceeded"));
    // The reserve is a tenth of what was left.
    assert!((ms(350)..ms(15_000)).contains(&began.elapsed()), "{:?}", began.elapsed());
    exchange.respond(200, &[], "late").await;
    assert_eq!(leader.read_response().await.text(), "late");
    for mut other in others {
        assert_eq!(other.read_response().await.text(), "late");
    }
    assert_eq!(upstream.count(), 1);
    let metrics = proxy.metrics().await;
    assert_eq!(metrics.value("hedgerow_deadline_exceeded_total", &[TOOL]), 1.0);
    // Waiting for another one's call says nothing of the upstream.
    assert_eq!(metrics.value("hedgerow_breaker_transitions_total", &[TOOL]), 0.0);
}

/// Where everyone is given a session of his own, everyone asks.
#[tokio::test]
async fn c088_an_answer_that_sets_a_cookie_is_its_callers_alone() {
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, SHARE).await;
    let (leader, followers, exchange) = flight(&proxy, &mut upstream, &[], 4).await;
    exchange.respond(200, &[("Set-Cookie", "sid=0"), ("Cache-Control", "max-age=60")], "").await;
    for n in 1..=4 {
        let cookie = format!("sid={n}");
        upstream.next().await.respond(200, &[("Set-Cookie", &cookie)], "").await;
    }
    let mut cookies = Vec::new();
    for mut agent in std::iter::once(leader).chain(followers) {
        let answer = agent.read_response().await;
        assert_eq!(answer.header("cache-status"), None);
        cookies.push(answer.header("set-cookie").unwrap().to_owned());
    }
    cookies.sort();
    assert_eq!(cookies, ["sid=0", "sid=1", "sid=2", "sid=3", "sid=4"]);
    assert_eq!(upstream.count(), 5);
    assert_eq!(coalesced(&proxy.metrics().await), 0.0);
}

/// Who leaves takes nothing away.
#[tokio::test]
async fn c089_a_follower_leaves_and_the_next_call_joins_the_same_flight() {
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, SHARE).await;
    let (leader, mut followers, exchange) = flight(&proxy, &mut upstream, &[], 4).await;
    followers.pop().unwrap().reset();
    proxy.until_in_flight(4).await;
    followers.push(get(&proxy, &upstream).await);
    proxy.until_in_flight(5).await;
    exchange.respond(200, &[], "one").await;
    for mut agent in std::iter::once(leader).chain(followers) {
        assert_eq!(agent.read_response().await.text(), "one");
    }
    assert_eq!(upstream.count(), 1);
}

const LARGE: usize = 5 << 20;
const SHARE_LARGE: &str = "hedge: off, coalesce: { max_body: 8MiB }";

/// An answer is read as fast as it comes, whoever waits for it.
#[tokio::test]
async fn c090_a_leader_that_reads_nothing_holds_no_follower_up() {
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, SHARE_LARGE).await;
    let (mut leader, followers, mut exchange) = flight(&proxy, &mut upstream, &[], 2).await;
    exchange.head_only(200, &[("Content-Length", &LARGE.to_string())]).await;
    exchange.raw(&pattern(0, LARGE)).await;
    exchange.finish().await;
    for mut follower in followers {
        let answer = follower.read_response().await;
        assert_eq!((answer.complete, answer.body.len()), (true, LARGE));
        assert!(is_pattern(&answer.body, 0));
    }
    let answer = leader.read_response().await;
    assert!(answer.complete && answer.body.len() == LARGE && is_pattern(&answer.body, 0));
    assert_eq!(upstream.count(), 1);
}

#[tokio::test]
async fn c090_a_leader_that_leaves_in_mid_body_leaves_the_followers_the_whole_answer() {
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, SHARE_LARGE).await;
    for is_reset in [false, true] {
        let (mut leader, followers, mut exchange) = flight(&proxy, &mut upstream, &[], 2).await;
        exchange.head_only(200, &[("Content-Length", &LARGE.to_string())]).await;
        exchange.raw(&pattern(0, LARGE / 2)).await;
        leader.read_head().await;
        assert!(is_pattern(&leader.read_exactly(1000).await, 0));
        match is_reset {
            true => leader.reset(),
            false => drop(leader),
        }
        proxy.until_in_flight(2).await;
        exchange.raw(&pattern(LARGE as u64 / 2, LARGE / 2)).await;
        exchange.finish().await;
        for mut follower in followers {
            let answer = follower.read_response().await;
            assert_eq!((answer.status, answer.complete, answer.body.len()), (200, true, LARGE));
            assert!(is_pattern(&answer.body, 0));
        }
    }
    assert_eq!((upstream.count(), upstream.aborted()), (2, 0));
}

/// What nobody waits for is not done.
#[tokio::test]
async fn the_last_to_leave_cancels_the_request() {
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, SHARE).await;
    // The leader alone, before the head and in the middle of the body.
    let (leader, _, exchange) = flight(&proxy, &mut upstream, &[], 0).await;
    drop(leader);
    exchange.gone().await;
    let (mut leader, _, mut exchange) = flight(&proxy, &mut upstream, &[], 0).await;
    exchange.head_only(200, &[("Content-Length", "10")]).await;
    exchange.raw(b"01234").await;
    leader.read_head().await;
    leader.expect(b"01234").await;
    drop(leader);
    exchange.gone().await;
    // A follower, when the leader has left already.
    for is_in_body in [false, true] {
        let (leader, mut followers, mut exchange) = flight(&proxy, &mut upstream, &[], 2).await;
        drop(leader);
        proxy.until_in_flight(2).await;
        if is_in_body {
            exchange.head_only(200, &[("Content-Length", "10")]).await;
            exchange.raw(b"01234").await;
        }
        drop(followers.pop());
        proxy.until_in_flight(1).await;
        assert_eq!(upstream.tally().in_flight, 1);
        drop(followers.pop());
        exchange.gone().await;
    }
    // And nothing of it is left behind: the next call is a request of its own.
    let (mut leader, _, exchange) = flight(&proxy, &mut upstream, &[], 0).await;
    exchange.respond(200, &[], "new").await;
    assert_eq!(leader.read_response().await.text(), "new");
    let metrics =
        proxy.until_metrics(|metrics| metrics.value("hedgerow_bulkhead_in_flight", &[TOOL]) == 0.0).await;
    assert_eq!(metrics.value("hedgerow_breaker_transitions_total", &[TOOL]), 0.0);
}

#[tokio::test]
async fn the_leaders_deadline_is_not_the_followers_before_the_head() {
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, SHARE).await;
    let url = upstream.url("/");
    let mut leader = proxy.ask("GET", &url, &[(DEADLINE, &deadline_in(ms(1200)))], b"").await;
    let first = upstream.next().await;
    let mut followers = Vec::new();
    for _ in 0..3 {
        followers.push(get(&proxy, &upstream).await);
    }
    let answer = leader.read_response().await;
    assert_eq!((answer.status, &*error_of(&answer)), (504, "deadline_exceeded"));
    first.gone().await;
    // One of them leads the others now.
    let second = upstream.next().await;
    proxy.until_in_flight(3).await;
    second.respond(200, &[], "whole").await;
    let mut marks = Vec::new();
    for follower in &mut followers {
        let answer = follower.read_response().await;
        assert_eq!((answer.status, answer.text()), (200, "whole"));
        marks.push(answer.header("cache-status").is_some());
    }
    marks.sort();
    assert_eq!(marks, [false, true, true]);
    assert_eq!(upstream.count(), 2);
}

#[tokio::test]
async fn the_leaders_deadline_is_not_the_followers_in_mid_body() {
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, SHARE).await;
    let url = upstream.url("/");
    let mut leader = proxy.ask("GET", &url, &[(DEADLINE, &deadline_in(ms(1200)))], b"").await;
    let mut first = upstream.next().await;
    let mut followers = [get(&proxy, &upstream).await, get(&proxy, &upstream).await];
    proxy.until_in_flight(3).await;
    first.start_chunks(200, &[]).await;
    first.chunk("half").await;
    leader.read_head().await;
    assert_eq!(leader.read_chunk().await.unwrap(), b"half");
    assert_eq!(leader.read_chunk().await, None, "the leader's answer is cut where its deadline strikes");
    first.gone().await;
    upstream.next().await.respond(200, &[], "whole").await;
    for follower in &mut followers {
        let answer = follower.read_response().await;
        assert_eq!((answer.status, answer.text()), (200, "whole"));
    }
    assert_eq!(upstream.count(), 2);
}

/// `Vary` tells only with the answer by what it differs.
#[tokio::test]
async fn a_follower_that_differs_in_what_vary_names_makes_its_own_call() {
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, SHARE).await;
    let url = upstream.url("/");
    let of = |language| [("Accept-Language", language), ("X-Other", "1")];
    let mut leader = proxy.ask("GET", &url, &of("de"), b"").await;
    let exchange = upstream.next().await;
    let mut equal = proxy.ask("GET", &url, &of("de"), b"").await;
    let mut other = proxy.ask("GET", &url, &of("fr"), b"").await;
    let mut none = get(&proxy, &upstream).await;
    proxy.until_in_flight(4).await;
    exchange.respond(200, &[("Vary", "Accept-Language, X-Other")], "de").await;
    for own in [upstream.next().await, upstream.next().await] {
        let language = own.header("accept-language").unwrap_or("none").to_owned();
        own.respond(200, &[("Vary", "accept-language")], language).await;
    }
    assert_eq!(leader.read_response().await.text(), "de");
    let shared = equal.read_response().await;
    assert_eq!((shared.text(), shared.header("cache-status")), ("de", COLLAPSED));
    for (agent, own) in [(&mut other, "fr"), (&mut none, "none")] {
        let answer = agent.read_response().await;
        assert_eq!((answer.text(), answer.header("cache-status")), (own, None));
    }
    assert_eq!((upstream.count(), coalesced(&proxy.metrics().await)), (3, 1.0));
}

/// Which answers are for one pair of eyes, by what their heads say.
#[tokio::test]
async fn an_answer_that_is_not_for_others_sends_the_followers_on_their_own_ways() {
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, SHARE).await;
    let with_key = &[("Authorization", "Bearer a")][..];
    let cases = [
        (&[][..], ("Vary", "*"), false),
        (&[], ("Vary", "Accept, *"), false),
        (&[], ("Cache-Control", "no-store"), false),
        (&[], ("Cache-Control", "max-age=60, No-Store"), false),
        (&[], ("Cache-Control", "private"), false),
        (&[], ("Cache-Control", "max-age=60,PRIVATE=\"x-session\""), false),
        (&[], ("Set-Cookie", "a=1"), false),
        (&[], ("Content-Type", "text/event-stream"), false),
        (&[], ("Content-Type", "application/grpc-web"), false),
        (with_key, ("Set-Cookie", "a=1"), false),
        (with_key, ("Cache-Control", "no-store"), false),
        // The same credential is the same person.
        (with_key, ("Cache-Control", "private"), true),
        (&[], ("Cache-Control", "no-cache"), true),
        (&[], ("Cache-Control", "public, max-age=0"), true),
    ];
    for (headers, field, is_shared) in cases {
        let before = upstream.count();
        let (mut leader, mut followers, exchange) = flight(&proxy, &mut upstream, headers, 2).await;
        exchange.respond(200, &[field], "leader's").await;
        let answer = leader.read_response().await;
        assert_eq!((answer.text(), answer.header("cache-status")), ("leader's", None), "{field:?}");
        if !is_shared {
            for exchange in [upstream.next().await, upstream.next().await] {
                exchange.respond(200, &[field], "own").await;
            }
        }
        for follower in &mut followers {
            let answer = follower.read_response().await;
            let expected = if is_shared { ("leader's", COLLAPSED) } else { ("own", None) };
            assert_eq!((answer.text(), answer.header("cache-status")), expected, "{field:?}");
        }
        assert_eq!(upstream.count() - before, if is_shared { 1 } else { 3 }, "{field:?}");
    }
}

/// A stream belongs to whom it was opened for.
#[tokio::test]
async fn an_event_stream_reaches_the_leader_at_once_and_the_followers_by_calls_of_their_own() {
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, SHARE).await;
    let (mut leader, mut followers, mut first) = flight(&proxy, &mut upstream, &[], 1).await;
    first.start_chunks(200, &[("Content-Type", "text/event-stream")]).await;
    first.chunk("data: 1\n\n").await;
    leader.read_head().await;
    assert_eq!(leader.read_chunk().await.unwrap(), b"data: 1\n\n");
    let mut second = upstream.next().await;
    second.start_chunks(200, &[("Content-Type", "text/event-stream")]).await;
    second.chunk("data: 2\n\n").await;
    followers[0].read_head().await;
    assert_eq!(followers[0].read_chunk().await.unwrap(), b"data: 2\n\n");
    first.chunk("data: 3\n\n").await;
    assert_eq!(leader.read_chunk().await.unwrap(), b"data: 3\n\n");
    drop(followers);
    second.gone().await;
    first.end().await;
    assert_eq!(leader.read_chunk().await.unwrap(), b"");
}

/// At the bound exactly, by its length and without one.
#[tokio::test]
async fn answers_up_to_max_body_are_shared_and_larger_ones_are_not() {
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, "hedge: off, coalesce: { max_body: 1KiB }").await;
    for (length, is_chunked) in [(1024, false), (1025, false), (1024, true), (1025, true)] {
        let (mut leader, mut followers, mut exchange) = flight(&proxy, &mut upstream, &[], 1).await;
        let body = pattern(0, length);
        if is_chunked {
            exchange.start_chunks(200, &[]).await;
            exchange.chunk(&body[..1000]).await;
            leader.read_head().await;
            // The leader has what has come, whatever follows.
            assert_eq!(leader.read_chunk().await.unwrap(), &body[..1000]);
            exchange.chunk(&body[1000..]).await;
            exchange.end().await;
            assert_eq!(leader.read_chunk().await.unwrap(), &body[1000..]);
            assert_eq!(leader.read_chunk().await.unwrap(), b"");
        } else {
            exchange.respond(200, &[], &body).await;
            assert_eq!(leader.read_response().await.body, body);
        }
        if length > 1024 {
            upstream.next().await.respond(200, &[], "own").await;
        }
        let answer = followers[0].read_response().await;
        match length > 1024 {
            true => assert_eq!((answer.text(), answer.header("cache-status")), ("own", None)),
            false => assert_eq!((answer.body.as_slice(), answer.header("cache-status")), (&*body, COLLAPSED)),
        }
    }
}

/// An upstream may promise any length, and send without end: what a flight holds is bounded, and the followers are
/// let go as soon as that is known.
#[tokio::test]
async fn an_answer_without_end_takes_no_memory_and_lets_the_followers_go() {
    const SENT: usize = 96 << 20;
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, SHARE).await;
    for length in [Some(10u64 << 30), None] {
        let (mut leader, mut followers, mut exchange) = flight(&proxy, &mut upstream, &[], 3).await;
        let before = proxy.resident_kib();
        match length {
            Some(length) => exchange.head_only(200, &[("Content-Length", &length.to_string())]).await,
            None => exchange.start_chunks(200, &[]).await,
        }
        let head = leader.read_head().await;
        let pump = tokio::spawn(async move {
            let piece = vec![b'x'; 1 << 20];
            for _ in 0..SENT / piece.len() {
                match length {
                    Some(_) => exchange.raw(&piece).await,
                    None => exchange.chunk(&piece).await,
                }
            }
            exchange
        });
        // Nobody has read anything, and the followers have answers of their own already.
        for follower in &mut followers {
            upstream.next().await.respond(200, &[], "own").await;
            let _ = &follower;
        }
        for follower in &mut followers {
            assert_eq!(follower.read_response().await.text(), "own");
        }
        let mut read = 0;
        let mut most = proxy.resident_kib();
        while read < SENT - (4 << 20) {
            read += match head.framing("GET").unwrap() {
                Framing::Length(_) => leader.read_exactly(1 << 20).await.len(),
                _ => leader.read_chunk().await.expect("the answer goes on").len(),
            };
            most = most.max(proxy.resident_kib());
        }
        assert!(most < before + (24 << 10), "{before} KiB became {most} KiB");
        drop(leader);
        pump.await.unwrap().gone().await;
    }
}

/// A part is never taken for the whole.
#[tokio::test]
async fn a_body_that_breaks_is_a_cut_to_the_leader_and_one_clear_error_to_the_followers() {
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, "hedge: off, breaker: off, coalesce: true").await;
    for (is_chunked, is_reset) in [(false, false), (false, true), (true, false), (true, true)] {
        let (mut leader, followers, mut exchange) = flight(&proxy, &mut upstream, &[], 3).await;
        match is_chunked {
            true => {
                exchange.start_chunks(200, &[("X-From", "tool")]).await;
                exchange.chunk("01234").await;
            }
            false => {
                exchange.head_only(200, &[("Content-Length", "10"), ("X-From", "tool")]).await;
                exchange.raw(b"01234").await;
            }
        }
        let head = leader.read_head().await;
        if is_chunked {
            assert_eq!(leader.read_chunk().await.unwrap(), b"01234");
        } else {
            leader.expect(b"01234").await;
        }
        match is_reset {
            true => exchange.reset(),
            false => exchange.close().await,
        }
        let rest = match head.framing("GET").unwrap() {
            Framing::Length(length) => leader.read_body(Framing::Length(length - 5)).await,
            framing => leader.read_body(framing).await,
        };
        assert!(!rest.complete && rest.bytes.is_empty(), "{rest:?}");
        for mut follower in followers {
            let answer = follower.read_response().await;
            assert_eq!((answer.status, answer.complete, answer.header("x-from")), (502, true, None));
            assert!(["upstream_incomplete", "upstream_reset"].contains(&&*error_of(&answer)));
        }
    }
    assert_eq!(upstream.count(), 4);
}

/// An error is news only to those who have waited for it.
#[tokio::test]
async fn an_error_is_shared_with_those_who_wait_and_with_nobody_after_them() {
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, "hedge: off, breaker: off, coalesce: true").await;
    let (leader, followers, exchange) = flight(&proxy, &mut upstream, &[], 3).await;
    exchange.reset();
    let mut ids = Vec::new();
    for mut agent in std::iter::once(leader).chain(followers) {
        let answer = agent.read_response().await;
        assert_eq!((answer.status, &*error_of(&answer)), (502, "upstream_reset"));
        ids.push(answer.json()["request_id"].as_str().unwrap().to_owned());
    }
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 4, "each refusal has the id of its own request");
    assert_eq!(upstream.count(), 1);
    let (mut next, _, exchange) = flight(&proxy, &mut upstream, &[], 0).await;
    exchange.respond(200, &[], "well").await;
    assert_eq!(next.read_response().await.text(), "well");
}

/// A hundred calls for what is not there, or not well, are one.
#[tokio::test]
async fn statuses_of_all_kinds_are_shared() {
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, "hedge: off, breaker: off, coalesce: true").await;
    for status in [203, 204, 301, 400, 401, 404, 429, 500, 503, 599] {
        let before = upstream.count();
        let (leader, followers, exchange) = flight(&proxy, &mut upstream, &[], 3).await;
        let body = if status == 204 { "" } else { "said" };
        exchange.respond(status, &[("Retry-After", "7")], body).await;
        for (n, mut agent) in std::iter::once(leader).chain(followers).enumerate() {
            let answer = agent.read_response().await;
            assert_eq!(
                (answer.status, answer.text(), answer.header("retry-after")),
                (status, body, Some("7"))
            );
            assert_eq!(answer.header("cache-status"), COLLAPSED.filter(|_| n > 0), "{status}");
        }
        assert_eq!(upstream.count() - before, 1, "{status}");
    }
}

/// C003 for those who wait: what HEAD is told is the length of what it does not get.
#[tokio::test]
async fn c003_heads_are_shared_with_their_length_and_not_with_gets() {
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, SHARE).await;
    let url = upstream.url("/");
    let mut leader = proxy.ask("HEAD", &url, &[], b"").await;
    let mut head = upstream.next().await;
    let mut follower = proxy.ask("HEAD", &url, &[], b"").await;
    let mut get = proxy.ask("GET", &url, &[], b"").await;
    let for_get = upstream.next().await;
    proxy.until_in_flight(3).await;
    head.head_only(200, &[("Content-Length", "1488324")]).await;
    head.finish().await;
    for agent in [&mut leader, &mut follower] {
        let answer = agent.read_response_to("HEAD").await;
        assert_eq!((answer.status, answer.header("content-length")), (200, Some("1488324")));
        // No body is waited for, and none comes.
        agent.send(format!("GET {} HTTP/1.1\r\nHost: x\r\n\r\n", upstream.url("/next"))).await;
        upstream.next().await.respond(200, &[], "next").await;
        assert_eq!(agent.read_response().await.text(), "next");
    }
    for_get.respond(200, &[], "body").await;
    assert_eq!(get.read_response().await.text(), "body");
    assert_eq!(upstream.count(), 4);
}

/// The body is a part of the question.
#[tokio::test]
async fn posts_of_an_idempotent_route_are_shared_when_their_bodies_are_equal() {
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, SEARCH).await;
    let url = upstream.url("/search");
    let host = upstream.address();
    let json = [("Content-Type", "application/json")];
    let mut leader = proxy.ask("POST", &url, &json, b"{\"q\":1}").await;
    let mut first = upstream.next().await;
    assert_eq!(first.body().await, b"{\"q\":1}");
    let mut equal = proxy.ask("POST", &url, &json, b"{\"q\":1}").await;
    // However it is cut on its way.
    let mut chunked = proxy.agent().await;
    let head = format!("POST {url} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n");
    chunked.send(format!("{head}Transfer-Encoding: chunked\r\n\r\n3\r\n{{\"q\r\n")).await;
    proxy.until_in_flight(3).await;
    chunked.send("4\r\n\":1}\r\n0\r\n\r\n").await;
    let mut other = proxy.ask("POST", &url, &json, b"{\"q\":2}").await;
    let mut for_other = upstream.next().await;
    assert_eq!(for_other.body().await, b"{\"q\":2}");
    // The same bytes, to be read as something else.
    let mut form = proxy.ask("POST", &url, &[("Content-Type", "text/plain")], b"{\"q\":1}").await;
    let mut for_form = upstream.next().await;
    assert_eq!(for_form.body().await, b"{\"q\":1}");
    proxy.until_in_flight(5).await;
    first.respond(200, &[], "one").await;
    for_other.respond(200, &[], "two").await;
    for_form.respond(200, &[], "form").await;
    let leaders = leader.read_response().await;
    assert_eq!((leaders.text(), leaders.header("cache-status")), ("one", None));
    for agent in [&mut equal, &mut chunked] {
        let answer = agent.read_response().await;
        assert_eq!((answer.text(), answer.header("cache-status")), ("one", COLLAPSED));
    }
    assert_eq!(other.read_response().await.text(), "two");
    assert_eq!(form.read_response().await.text(), "form");
    assert_eq!(upstream.count(), 3);
}

#[tokio::test]
async fn calls_that_may_not_be_done_twice_are_each_done() {
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, SEARCH).await;
    let key = [("Idempotency-Key", "8e03978e")];
    for (method, path, headers) in [
        ("POST", "/order", &[][..]),
        // Names one operation, which its first call does; whether the route may be shared is the policy's to say.
        ("POST", "/order", &key),
        ("PUT", "/search", &[]),
        ("DELETE", "/search", &[]),
        ("OPTIONS", "/search", &[]),
    ] {
        let mut agents = Vec::new();
        for _ in 0..2 {
            agents.push(proxy.ask(method, &upstream.url(path), headers, b"x").await);
        }
        for _ in 0..2 {
            upstream.next().await.respond(200, &[], "done").await;
        }
        for agent in &mut agents {
            assert_eq!(agent.read_response().await.header("cache-status"), None, "{method} {path}");
        }
    }
}

/// What is too large to be kept is too large to be compared, and is not held up for it.
#[tokio::test]
async fn a_post_beyond_replay_limit_goes_its_own_way_with_all_of_its_body() {
    const BODY: usize = 300 << 10;
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, SEARCH).await;
    let (url, host, body) = (upstream.url("/search"), upstream.address(), pattern(0, BODY));
    for is_chunked in [false, true] {
        let mut agents = Vec::new();
        let mut exchanges = Vec::new();
        for _ in 0..2 {
            let mut agent = proxy.agent().await;
            let head = format!("POST {url} HTTP/1.1\r\nHost: {host}\r\n");
            if is_chunked {
                agent.send(format!("{head}Transfer-Encoding: chunked\r\n\r\n")).await;
                let sending = async {
                    for piece in body.chunks(10_000) {
                        agent.send(format!("{:x}\r\n", piece.len())).await;
                        agent.send(piece).await;
                        agent.send("\r\n").await;
                    }
                    agent.send("0\r\n\r\n").await;
                };
                let receiving = async {
                    let mut exchange = upstream.next().await;
                    assert_eq!(exchange.body().await, body);
                    exchange
                };
                exchanges.push(tokio::join!(sending, receiving).1);
            } else {
                agent.send(format!("{head}Content-Length: {BODY}\r\n\r\n")).await;
                // It is sent on before it is all there.
                let mut exchange = upstream.next().await;
                let receiving = exchange.count_body();
                assert_eq!(tokio::join!(agent.send(&body), receiving).1, (BODY as u64, true));
                exchanges.push(exchange);
            }
            agents.push(agent);
        }
        for exchange in exchanges {
            exchange.respond(200, &[], "own").await;
        }
        for agent in &mut agents {
            let answer = agent.read_response().await;
            assert_eq!((answer.text(), answer.header("cache-status")), ("own", None));
        }
    }
    assert_eq!(upstream.count(), 4);
}

/// A question that was not asked to its end is none.
#[tokio::test]
async fn a_post_whose_client_breaks_its_body_off_is_never_sent_and_harms_nobody() {
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, SEARCH).await;
    let (url, host) = (upstream.url("/search"), upstream.address());
    let mut whole = proxy.ask("POST", &url, &[], b"0123456789").await;
    let exchange = upstream.next().await;
    let head = format!("POST {url} HTTP/1.1\r\nHost: {host}\r\n");
    for part in ["Content-Length: 10\r\n\r\n01234", "Transfer-Encoding: chunked\r\n\r\n5\r\n01234\r\n"] {
        let mut agent = proxy.agent().await;
        agent.send(format!("{head}{part}")).await;
        proxy.until_in_flight(2).await;
        agent.reset();
        proxy.until_in_flight(1).await;
    }
    let mut garbled = proxy.agent().await;
    garbled.send(format!("{head}Transfer-Encoding: chunked\r\n\r\n5\r\n01234\r\nzz\r\n")).await;
    let answer = garbled.read_response().await;
    assert_eq!((answer.status, &*error_of(&answer)), (400, "invalid_request"));
    exchange.respond(200, &[], "found").await;
    assert_eq!(whole.read_response().await.text(), "found");
    assert_eq!(upstream.count(), 1);
    let left = [TOOL, ("code", "499"), ("outcome", "client_left")];
    proxy.until_metrics(|metrics| metrics.value("hedgerow_requests_total", &left) == 2.0).await;
}

/// Both wait for the upstream's word before they send anything, so there is nothing to compare.
#[tokio::test]
async fn posts_that_expect_a_100_go_their_own_ways() {
    let mut upstream = Upstream::start().await;
    let proxy = start(&upstream, SEARCH).await;
    let (url, host) = (upstream.url("/search"), upstream.address());
    let mut agents = Vec::new();
    for _ in 0..2 {
        let mut agent = proxy.agent().await;
        agent
            .send(format!(
                "POST {url} HTTP/1.1\r\nHost: {host}\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n"
            ))
            .await;
        let mut exchange = upstream.next().await;
        exchange.raw(b"HTTP/1.1 100 Continue\r\n\r\n").await;
        assert_eq!(agent.read_head().await.status, 100);
        agents.push((agent, exchange));
    }
    for (mut agent, mut exchange) in agents {
        agent.send("body").await;
        assert_eq!(exchange.body().await, b"body");
        exchange.respond(200, &[], "own").await;
        assert_eq!(agent.read_response().await.text(), "own");
    }
}

/// Two that open a WebSocket have nothing in common but the address.
#[tokio::test]
async fn upgrades_are_never_shared() {
    let mut road = Road::start_with(Mode::Forward, SHARE, "threads: 1").await;
    for word in ["one", "two"] {
        let mut call = road.upgrade("/").await;
        let mut exchange = road.upstream.next().await;
        exchange.accept_web_socket(&[]).await;
        assert_eq!(call.head().await.status, 101);
        let mut tunnel = exchange.tunnel();
        call.send(word).await;
        tunnel.expect(word.as_bytes()).await;
    }
}

/// The followers wait through the leader's tries and hedges, and none of them adds one.
#[tokio::test]
async fn one_flight_is_retried_and_hedged_as_one_call() {
    let mut upstream = Upstream::start().await;
    let plenty = "coalesce: true, breaker: off, extra_load: { ratio: 0%, floor: 1/s }";
    let retrying =
        start(&upstream, &format!("hedge: off, retry: {{ max_attempts: 2, backoff: 1ms }}, {plenty}")).await;
    let (leader, followers, first) = flight(&retrying, &mut upstream, &[], 3).await;
    first.respond(503, &[("Connection", "close")], "no").await;
    upstream.next().await.respond(200, &[], "yes").await;
    for (n, mut agent) in std::iter::once(leader).chain(followers).enumerate() {
        let answer = agent.read_response().await;
        assert_eq!((answer.status, answer.text()), (200, "yes"));
        assert_eq!(answer.header("x-hedgerow-attempts"), Some(if n == 0 { "2" } else { "0" }));
    }
    assert_eq!(attempts(&retrying.metrics().await), 2.0);

    let hedging = start(&upstream, &format!("hedge: {{ after: 1s }}, {plenty}")).await;
    let (leader, followers, primary) = flight(&hedging, &mut upstream, &[], 3).await;
    let hedge = upstream.next().await;
    hedge.respond(200, &[], "hedge").await;
    primary.gone().await;
    for mut agent in std::iter::once(leader).chain(followers) {
        assert_eq!(agent.read_response().await.text(), "hedge");
    }
    let metrics = hedging.metrics().await;
    assert_eq!((attempts(&metrics), metrics.value("hedgerow_hedges_total", &[TOOL])), (2.0, 1.0));
    assert_eq!(upstream.count(), 4);
}

/// An answer that was kept while another was looked for is as much its callers own as any.
#[tokio::test]
async fn what_is_kept_from_an_earlier_try_is_shared_no_more_than_it_would_be_at_once() {
    let mut upstream = Upstream::start().await;
    let stages = "hedge: off, breaker: off, coalesce: true, retry: { max_attempts: 2, backoff: 1ms }, \
                  extra_load: { ratio: 100%, floor: 100/s }";
    let proxy = start(&upstream, stages).await;
    let fields = [
        ("Set-Cookie", "sid=leader"),
        ("Cache-Control", "private"),
        ("Cache-Control", "no-store"),
        ("Vary", "*"),
    ];
    for field in fields {
        let (mut leader, mut followers, first) = flight(&proxy, &mut upstream, &[], 1).await;
        first.respond(503, &[field, ("Connection", "close")], "leader's").await;
        upstream.next().await.reset();
        let answer = leader.read_response().await;
        assert_eq!((answer.status, answer.text()), (503, "leader's"));
        // The follower asks for itself.
        upstream.next().await.respond(200, &[], "own").await;
        let answer = followers[0].read_response().await;
        assert_eq!((answer.status, answer.text(), answer.header(field.0)), (200, "own", None), "{field:?}");
    }
    // One that is for all is given to all.
    let (leader, followers, first) = flight(&proxy, &mut upstream, &[], 2).await;
    first.respond(503, &[("Connection", "close")], "everyone's").await;
    upstream.next().await.reset();
    for mut agent in std::iter::once(leader).chain(followers) {
        let answer = agent.read_response().await;
        assert_eq!((answer.status, answer.text()), (503, "everyone's"));
    }
}

/// Followers hold nothing of the upstream's.
#[tokio::test]
async fn followers_take_no_permit_and_a_failure_of_theirs_counts_once() {
    let mut upstream = Upstream::start().await;
    let stages = "hedge: off, coalesce: true, bulkhead: { max_concurrent: 1, max_queue: 0 }, \
                  breaker: { consecutive_failures: 2, open_for: 5m }";
    let proxy = start(&upstream, stages).await;
    let (leader, followers, exchange) = flight(&proxy, &mut upstream, &[], 5).await;
    assert_eq!(proxy.metrics().await.value("hedgerow_bulkhead_in_flight", &[TOOL]), 1.0);
    // Another call finds the one place taken.
    let other = proxy.get(&upstream.url("/other")).await;
    assert_eq!((other.status, &*error_of(&other)), (503, "bulkhead_full"));
    exchange.respond(500, &[], "no").await;
    for mut agent in std::iter::once(leader).chain(followers) {
        assert_eq!(agent.read_response().await.status, 500);
    }
    let host = upstream.address().to_string();
    let state = |status: &serde_json::Value| status["upstreams"]["tool"][&host]["breaker"]["state"].clone();
    assert_eq!(state(&proxy.status().await), "closed");
    let (leader, followers, exchange) = flight(&proxy, &mut upstream, &[], 5).await;
    exchange.respond(500, &[], "no").await;
    for mut agent in std::iter::once(leader).chain(followers) {
        assert_eq!(agent.read_response().await.status, 500);
    }
    assert_eq!(state(&proxy.status().await), "open");
    let refused = proxy.get(&upstream.url("/")).await;
    assert_eq!((refused.status, &*error_of(&refused)), (503, "circuit_open"));
    assert_eq!(upstream.count(), 2);
    assert_eq!(proxy.metrics().await.value("hedgerow_bulkhead_in_flight", &[TOOL]), 0.0);
}

/// A hundred followers of a failed flight must not meet at the backup.
#[tokio::test]
async fn what_stands_in_for_a_failed_flight_is_found_once_for_all() {
    let mut upstream = Upstream::start().await;
    let mut backup = Upstream::start().await;
    let degraded = "{ degraded: { status: 200 } }";
    for fallback in ["{ upstream: backup }", degraded] {
        let stages = format!("hedge: off, breaker: off, coalesce: true, fallback: [{fallback}]");
        let policy = format!(
            "threads: 1\nupstreams: {{ {}, backup: {{ endpoint: \"{}\" }} }}",
            named("tool", upstream.address(), &stages),
            backup.url("")
        );
        let proxy = HedgerowProcess::start(&policy).await;
        let (leader, followers, exchange) = flight(&proxy, &mut upstream, &[], 3).await;
        exchange.respond(503, &[], "no").await;
        let expected = match fallback == degraded {
            true => "static",
            false => {
                backup.next().await.respond(200, &[], "backup's").await;
                "backup"
            }
        };
        let mut bodies = Vec::new();
        for (n, mut agent) in std::iter::once(leader).chain(followers).enumerate() {
            let answer = agent.read_response().await;
            assert_eq!((answer.status, answer.header("x-hedgerow-degraded")), (200, Some(expected)));
            assert_eq!(answer.header("x-hedgerow-tried"), Some("tool=503"));
            if expected == "backup" {
                assert_eq!(answer.header("cache-status"), COLLAPSED.filter(|_| n > 0));
            }
            bodies.push(answer.body);
        }
        bodies.dedup();
        assert_eq!(bodies.len(), 1);
        let metrics = proxy.metrics().await;
        assert_eq!(metrics.value("hedgerow_fallbacks_total", &[TOOL, ("kind", expected)]), 1.0);
        assert_eq!(coalesced(&metrics), 3.0);
    }
    assert_eq!((upstream.count(), backup.count()), (2, 1));
}

/// An answer is no less whole for being told in more pieces than it needs.
#[tokio::test]
async fn an_answer_of_http2_is_shared_and_trailers_are_the_leaders() {
    let mut upstream = Http2Upstream::start().await;
    let policy =
        tool(upstream.address(), &format!("origin: h2c, breaker: {{ consecutive_failures: 1 }}, {SHARE}"));
    let proxy = HedgerowProcess::start(&format!("threads: 1\n{policy}")).await;
    let url = upstream.url("/");
    let ask = async || proxy.ask("GET", &url, &[("TE", "trailers")], b"").await;
    // The end comes apart from the last byte, when the leader has all of it.
    let mut leader = ask().await;
    let mut stream = upstream.next().await;
    let mut follower = ask().await;
    proxy.until_in_flight(2).await;
    stream.head(200, &[("content-length", "5")]);
    assert!(stream.data("whole").await);
    assert_eq!(leader.read_response().await.text(), "whole");
    stream.end();
    let answer = follower.read_response().await;
    assert_eq!((answer.text(), answer.header("cache-status")), ("whole", COLLAPSED));
    // What stands behind the body belongs to who asked first.
    let mut leader = ask().await;
    let mut stream = upstream.next().await;
    let mut follower = ask().await;
    proxy.until_in_flight(2).await;
    stream.head(200, &[("trailer", "x-sum")]);
    assert!(stream.data("whole").await);
    stream.trailers(&[("x-sum", "1")]);
    let answer = leader.read_response().await;
    assert_eq!((answer.text(), answer.complete, answer.trailers.get("x-sum")), ("whole", true, Some("1")));
    upstream.next().await.respond(200, &[], "own").await;
    assert_eq!(follower.read_response().await.text(), "own");
    assert!(upstream.tally().resets.is_empty(), "{:?}", upstream.tally().resets);
}

async fn until_draining(proxy: &HedgerowProcess) {
    proxy.until_status(|status| status["draining"] == true).await;
}

#[tokio::test]
async fn sigterm_during_a_flight_loses_none_of_its_calls() {
    let mut upstream = Upstream::start().await;
    let policy =
        format!("threads: 1\ndrain: {{ quiet: 50ms, max: 20s }}\n{}", tool(upstream.address(), SHARE));
    let mut proxy = HedgerowProcess::start(&policy).await;
    let (leader, mut followers, exchange) = flight(&proxy, &mut upstream, &[], 3).await;
    proxy.signal(Signal::TERM);
    until_draining(&proxy).await;
    // One leaves, one comes.
    drop(leader);
    proxy.until_in_flight(3).await;
    followers.push(get(&proxy, &upstream).await);
    proxy.until_in_flight(4).await;
    exchange.respond(200, &[], "whole").await;
    for mut agent in followers {
        let answer = agent.read_response().await;
        assert_eq!(
            (answer.status, answer.text(), answer.header("connection")),
            (200, "whole", Some("close"))
        );
    }
    assert_eq!(upstream.count(), 1);
    assert_eq!(proxy.wait().await, 0);
}

#[tokio::test]
async fn at_drain_max_all_of_a_flight_are_told() {
    let mut upstream = Upstream::start().await;
    let policy =
        format!("threads: 1\ndrain: {{ quiet: 50ms, max: 800ms }}\n{}", tool(upstream.address(), SHARE));
    let mut proxy = HedgerowProcess::start(&policy).await;
    let (leader, followers, exchange) = flight(&proxy, &mut upstream, &[], 3).await;
    proxy.signal(Signal::TERM);
    for mut agent in std::iter::once(leader).chain(followers) {
        let answer = agent.read_response().await;
        assert_eq!((answer.status, &*error_of(&answer)), (503, "shutting_down"));
    }
    exchange.gone().await;
    assert_eq!((proxy.wait().await, upstream.count()), (0, 1));
}

/// Calls finish on the policy they began with; those that come later do not wait for calls that cannot be shared.
#[tokio::test]
async fn a_reload_that_turns_it_off_leaves_the_flight_to_those_who_are_in_it() {
    let mut upstream = Upstream::start().await;
    let mut proxy = start(&upstream, SHARE).await;
    let (leader, followers, exchange) = flight(&proxy, &mut upstream, &[], 2).await;
    proxy.policy.replace(&format!("threads: 1\n{}", tool(upstream.address(), "hedge: off")));
    proxy.until_metrics(|m| m.value("hedgerow_config_reloads_total", &[("result", "applied")]) == 1.0).await;
    let mut later = get(&proxy, &upstream).await;
    upstream.next().await.respond(200, &[], "own").await;
    assert_eq!(later.read_response().await.text(), "own");
    exchange.respond(200, &[], "shared").await;
    for mut agent in std::iter::once(leader).chain(followers) {
        assert_eq!(agent.read_response().await.text(), "shared");
    }
    assert_eq!(upstream.count(), 2);
}

/// Hundreds at once, on all threads.
#[tokio::test]
async fn a_burst_of_equal_calls_is_one_request() {
    let mut upstream = Upstream::start().await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), SHARE)).await;
    let mut agents = Vec::new();
    for _ in 0..300 {
        agents.push(get(&proxy, &upstream).await);
    }
    let exchange = upstream.next().await;
    proxy.until_in_flight(300).await;
    exchange.respond(200, &[], "one").await;
    // With several threads a call may be counted and not have looked for a flight yet: one that comes to look when it
    // has landed leads the next.
    let late = async {
        loop {
            upstream.next().await.respond(200, &[], "one").await;
        }
    };
    let answers = soon(futures_util::future::join_all(agents.iter_mut().map(Agent::read_response)));
    let answers = tokio::select! {
        answers = answers => answers,
        () = late => unreachable!("it serves for ever"),
    };
    assert!(answers.iter().all(|answer| answer.status == 200 && answer.text() == "one"));
    assert!(upstream.count() <= 3, "{} requests", upstream.count());
}

/// A flight that cannot be shared costs one request for each, however many wait.
#[tokio::test]
async fn a_hundred_that_are_let_go_make_a_hundred_calls_and_not_more() {
    let upstream = Upstream::answering(|seen| {
        Reply::ok(seen.header("x-me").unwrap_or("nobody")).header("Set-Cookie", "a=1").after(ms(50))
    })
    .await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), SHARE)).await;
    let calls = (0..100).map(async |n: usize| {
        let me = n.to_string();
        let answer = proxy.agent().await.request("GET", &upstream.url("/"), &[("X-Me", &me)], b"").await;
        assert_eq!((answer.status, answer.text()), (200, &*me));
    });
    soon(futures_util::future::join_all(calls)).await;
    assert_eq!(upstream.count(), 100);
}
