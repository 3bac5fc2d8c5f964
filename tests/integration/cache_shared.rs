//! Answers that pods keep for each other: what another pod may have of them, how old they are, what ends them, and what a
//! Redis in trouble costs.

use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::Instant;

use crate::support::client::{Response, deadline_in};
use crate::support::hedgerow::HedgerowProcess;
use crate::support::policy::{TOOL, tool};
use crate::support::redis::{RedisCluster, RedisServer, Reply as Said};
use crate::support::upstream::{Reply, Upstream};

const FRESH: (&str, &str) = ("Cache-Control", "max-age=60");
/// The keys of answers, and all of them.
const ANSWERS: &str = "hedgerow:cache:{*}:*";
const ALL: &str = "hedgerow:cache:*";

type Fields<'a> = &'a [(&'a str, &'a str)];

/// Far more than a server on the same machine needs, so that no test depends on how busy it is.
const TIMEOUT: &str = "1s";

async fn pod_with(redis: &str, upstream: &Upstream, timeout: &str, stages: &str) -> HedgerowProcess {
    let shared = format!("shared_state: {{ redis: \"{redis}\", timeout: {timeout} }}");
    let policy = tool(upstream.address(), &format!("hedge: off, breaker: off, {stages}"));
    let pod = HedgerowProcess::start(&format!("{shared}\n{policy}")).await;
    pod.until_status(|status| status["shared_state"]["up"] == true).await;
    pod
}

async fn pod(redis: &RedisServer, upstream: &Upstream, cache: &str) -> HedgerowProcess {
    pod_with(&redis.url(), upstream, TIMEOUT, &format!("cache: {{ shared: true{cache} }}")).await
}

/// Two pods under the same policy.
async fn pods(redis: &RedisServer, upstream: &Upstream, cache: &str) -> (HedgerowProcess, HedgerowProcess) {
    tokio::join!(pod(redis, upstream, cache), pod(redis, upstream, cache))
}

async fn ask(pod: &HedgerowProcess, upstream: &Upstream, call: (&str, &str, Fields<'_>)) -> Response {
    let (method, path, headers) = call;
    pod.agent().await.request(method, &upstream.url(path), headers, b"").await
}

async fn get(pod: &HedgerowProcess, upstream: &Upstream, path: &str) -> Response {
    ask(pod, upstream, ("GET", path, &[])).await
}

fn status_of(response: &Response) -> &str {
    response.header("cache-status").unwrap_or_else(|| panic!("no Cache-Status in {response:?}"))
}

/// Whether it was another pod's.
fn is_shared(response: &Response) -> bool {
    let status = status_of(response);
    status.starts_with("hedgerow; hit; ttl=") && status.ends_with("; detail=shared")
}

fn is_own(response: &Response) -> bool {
    status_of(response).starts_with("hedgerow; hit; ttl=") && !is_shared(response)
}

fn ttl(response: &Response) -> i64 {
    let text = status_of(response).strip_prefix("hedgerow; hit; ttl=").expect("a hit");
    text.split(';').next().expect("a first part").parse().expect("a number of seconds")
}

fn age(response: &Response) -> i64 {
    response.header("age").expect("an answer from the cache has an age").parse().expect("a number")
}

/// Waits until so many answers are shared.
async fn until_shared(redis: &RedisServer, count: usize) {
    redis.until(|redis| redis.keys(ANSWERS).len() == count).await;
}

/// The only key that there is.
fn only_key(redis: &RedisServer) -> String {
    let keys = redis.keys(ALL);
    let [key] = &keys[..] else { panic!("{keys:?} is not one key") };
    key.clone()
}

/// All that is promised of the plain case, at once.
#[tokio::test]
async fn a_pod_answers_with_what_another_has_fetched() {
    let redis = RedisServer::start().await;
    let upstream = Upstream::answering(|_| {
        Reply::ok("a,b")
            .header("Cache-Control", "max-age=60")
            .header("Age", "7")
            .header("ETag", "\"v1\"")
            .header("Content-Type", "text/csv")
            .header("Link", "</a>")
            .header("Link", "</b>")
    })
    .await;
    let (first, second) = pods(&redis, &upstream, "").await;
    let fetched = get(&first, &upstream, "/").await;
    assert_eq!(status_of(&fetched), "hedgerow; fwd=uri-miss; stored");
    until_shared(&redis, 1).await;
    let left = redis.command(&["PTTL", &only_key(&redis)]).integer();
    assert!((1..=53_000).contains(&left), "{left} ms");

    let again = get(&second, &upstream, "/").await;
    assert!(is_shared(&again), "{again:?}");
    assert_eq!((again.status, again.text(), again.header("content-length")), (200, "a,b", Some("3")));
    assert_eq!(ttl(&again) + age(&again), 60);
    assert!((7..27).contains(&age(&again)), "{}", age(&again));
    for name in ["etag", "content-type", "date"] {
        assert_eq!(again.header(name), fetched.header(name), "{name}");
    }
    assert_eq!(again.headers.all("link"), ["</a>", "</b>"]);
    assert_eq!(again.header("x-hedgerow-attempts"), Some("0"));
    let line = second.access_log(|line| line["source"] == "cache").await;
    assert_eq!((&line["status"], &line["attempts"]), (&200.into(), &0.into()));

    // From now on it is its own, for conditions and HEAD too.
    let asked = redis.calls("evalsha");
    let known = ask(&second, &upstream, ("GET", "/", &[("If-None-Match", "\"v1\"")])).await;
    assert!(known.status == 304 && is_own(&known), "{known:?}");
    assert!(is_own(&ask(&second, &upstream, ("HEAD", "/", &[])).await));
    assert!(redis.calls("evalsha") <= asked + 2, "a kept answer was asked for");
    let metrics = second.metrics().await;
    let results = |result| metrics.value("hedgerow_cache_requests_total", &[TOOL, ("result", result)]);
    assert_eq!((results("hit"), results("miss")), (3.0, 0.0));
    assert_eq!(second.status().await["caches"]["tool"][0]["from_other_pods"], 1);
    assert_eq!(upstream.count(), 1);
}

#[tokio::test]
async fn without_shared_nothing_is_written_and_nothing_is_asked() {
    let (redis, upstream) =
        (RedisServer::start().await, Upstream::answering(|_| Reply::ok("x").header(FRESH.0, FRESH.1)).await);
    let stages = "cache: true, routes: [{ path: \"/shared\", cache: { shared: true } }]";
    let first = pod_with(&redis.url(), &upstream, TIMEOUT, stages).await;
    let second = pod_with(&redis.url(), &upstream, TIMEOUT, stages).await;
    get(&first, &upstream, "/own").await;
    get(&first, &upstream, "/shared").await;
    until_shared(&redis, 1).await;
    assert!(!is_shared(&get(&second, &upstream, "/own").await));
    assert!(is_shared(&get(&second, &upstream, "/shared").await));
    assert_eq!((redis.keys(ALL).len(), upstream.count()), (1, 3));
}

#[tokio::test]
async fn nobody_gets_what_was_answered_to_another() {
    let redis = RedisServer::start().await;
    let upstream = Upstream::answering(|seen| {
        let all: Vec<_> = ["authorization", "x-api-key", "cookie", "x-plan", "accept"]
            .iter()
            .filter_map(|name| seen.header(name).map(|value| format!("{name}={value}")))
            .collect();
        let reply = Reply::ok(all.join(" ")).header("Cache-Control", "public, max-age=60");
        if seen.path() == "/varied" { reply.header("Vary", "X-Plan, Authorization") } else { reply }
    })
    .await;
    let (first, second) = pods(&redis, &upstream, "").await;
    let callers: [Fields<'_>; 6] = [
        &[],
        &[("Authorization", "Bearer word-of-a")],
        &[("Authorization", "Bearer word-of-b")],
        &[("X-Api-Key", "word-of-a")],
        &[("Cookie", "sid=word-of-a")],
        &[("Accept", "text/html")],
    ];
    for (number, caller) in callers.into_iter().enumerate() {
        // Nobody else's, whoever came before.
        let own = ask(&second, &upstream, ("GET", "/", caller)).await;
        assert_eq!(status_of(&own), "hedgerow; fwd=uri-miss; stored", "{caller:?}");
        until_shared(&redis, number + 1).await;
        let shared = ask(&first, &upstream, ("GET", "/", caller)).await;
        assert!(is_shared(&shared), "{caller:?}: {shared:?}");
        assert_eq!(shared.text(), own.text());
    }
    assert_eq!(upstream.count(), callers.len());

    // What an answer varies by has no key of its own, so that the last one is there.
    let plan = |plan| [("X-Plan", plan), ("Authorization", "Bearer word-of-a")];
    ask(&first, &upstream, ("GET", "/varied", &plan("gold"))).await;
    until_shared(&redis, callers.len() + 1).await;
    let other = ask(&second, &upstream, ("GET", "/varied", &plan("iron"))).await;
    assert_eq!(
        (status_of(&other), other.text()),
        ("hedgerow; fwd=uri-miss; stored", "authorization=Bearer word-of-a x-plan=iron",)
    );
    let third = pod(&redis, &upstream, "").await;
    let seen = upstream.count();
    third_gets_the_last_of(&third, &upstream, &plan("iron")).await;
    assert_eq!(upstream.count(), seen);

    // Who asks cannot be read there, in no key and no value but where the upstream itself says it in its body.
    for key in redis.keys("*") {
        let Said::Text(value) = redis.try_command(&["GET", &key]) else { continue };
        let value = String::from_utf8_lossy(&value);
        let says = value.matches("word-of-").count();
        let in_body = value.matches("authorization=Bearer word-of-").count()
            + value.matches("x-api-key=word-of-").count()
            + value.matches("cookie=sid=word-of-").count();
        assert!(says == in_body && !key.contains("word-of"), "{key}: {value}");
    }
}

/// It is written beside the call, so it may be there a little later.
async fn third_gets_the_last_of(pod: &HedgerowProcess, upstream: &Upstream, fields: Fields<'_>) {
    let only = [fields, &[("Cache-Control", "only-if-cached")]].concat();
    loop {
        let answer = ask(pod, upstream, ("GET", "/varied", &only)).await;
        if answer.status == 200 {
            return assert!(is_shared(&answer));
        }
        assert_eq!(answer.status, 504, "{answer:?}");
    }
}

/// One key has one answer, and an answer comes in as many codings as there are kinds of agents.
#[tokio::test]
async fn each_coding_has_a_place_of_its_own() {
    let redis = RedisServer::start().await;
    let upstream = Upstream::answering(|seen| {
        let coding = seen.header("accept-encoding").expect("a coding is asked for");
        let reply = Reply::ok(format!("in {coding}")).header("Cache-Control", "max-age=60");
        reply.header("Vary", "Accept-Encoding").header("Content-Encoding", coding)
    })
    .await;
    let (first, second) = pods(&redis, &upstream, "").await;
    let codings = ["gzip", "br", "zstd"];
    for (number, coding) in codings.into_iter().enumerate() {
        ask(&first, &upstream, ("GET", "/", &[("Accept-Encoding", coding)])).await;
        until_shared(&redis, number + 1).await;
    }
    for coding in codings {
        let answer = ask(&second, &upstream, ("GET", "/", &[("Accept-Encoding", coding)])).await;
        assert!(is_shared(&answer) && answer.header("content-encoding") == Some(coding), "{answer:?}");
        assert_eq!(answer.text(), format!("in {coding}"));
    }
    assert_eq!(upstream.count(), codings.len());
}

#[tokio::test]
async fn what_a_pod_would_not_keep_or_is_too_large_is_not_shared() {
    let redis = RedisServer::start().await;
    let upstream = Upstream::answering(|seen| match seen.path() {
        "/no-store" => Reply::ok("x").header("Cache-Control", "no-store"),
        "/private" => Reply::ok("x").header("Cache-Control", "private, max-age=60"),
        "/cookie" => Reply::ok("x").header("Cache-Control", "max-age=60").header("Set-Cookie", "a=b"),
        "/any" => Reply::ok("x").header("Cache-Control", "max-age=60").header("Vary", "*"),
        "/failed" => Reply::status(503).header("Cache-Control", "max-age=60"),
        "/cut" => Reply::ok("12345").header("Cache-Control", "max-age=60").cut(3),
        // These a pod keeps, and has to ask before each use.
        "/stale" => Reply::ok("x").header("Cache-Control", "max-age=60").header("Age", "100"),
        "/no-cache" => Reply::ok("x").header("Cache-Control", "no-cache").header("ETag", "\"a\""),
        "/large" => Reply::ok("x".repeat(1001)).header("Cache-Control", "max-age=60"),
        "/large-by-and-by" => {
            Reply::ok("x".repeat(1001)).header("Cache-Control", "max-age=60").drip(4, Duration::ZERO)
        }
        _ => Reply::ok("x".repeat(1000)).header("Cache-Control", "max-age=60"),
    })
    .await;
    let (first, second) = pods(&redis, &upstream, ", max_body: 1000B").await;
    let paths = [
        "/no-store",
        "/private",
        "/cookie",
        "/any",
        "/failed",
        "/cut",
        "/stale",
        "/no-cache",
        "/large",
        "/large-by-and-by",
    ];
    for path in paths {
        let url = upstream.url(path);
        let mut agent = first.ask("GET", &url, &[], b"").await;
        let _ = agent.try_response("GET").await;
    }
    // What is written later is there, so what was to be written before would be as well.
    get(&first, &upstream, "/small").await;
    until_shared(&redis, 1).await;
    let before = upstream.count();
    for path in paths {
        let mut agent = second.ask("GET", &upstream.url(path), &[], b"").await;
        let _ = agent.try_response("GET").await;
    }
    assert_eq!(upstream.count(), before + paths.len());
    assert!(is_shared(&get(&second, &upstream, "/small").await));

    // In the partition of one caller the cache is its own.
    let mine: Fields<'_> = &[("Authorization", "Bearer a")];
    ask(&first, &upstream, ("GET", "/private", mine)).await;
    until_shared(&redis, 2).await;
    assert!(is_shared(&ask(&second, &upstream, ("GET", "/private", mine)).await));
}

#[tokio::test]
async fn what_a_request_says_of_caches_holds_for_those_of_others_too() {
    let redis = RedisServer::start().await;
    let upstream =
        Upstream::answering(|_| Reply::ok("x").header("Cache-Control", "max-age=60").header("Age", "10"))
            .await;
    let first = pod(&redis, &upstream, "").await;
    get(&first, &upstream, "/").await;
    until_shared(&redis, 1).await;
    for (control, is_taken) in [
        ("no-cache", false),
        ("no-store", false),
        ("max-age=5", false),
        ("min-fresh=55", false),
        ("max-age=40", true),
        ("min-fresh=20", true),
        ("only-if-cached", true),
    ] {
        // One that knows nothing yet.
        let other = pod(&redis, &upstream, "").await;
        let before = upstream.count();
        let answer = ask(&other, &upstream, ("GET", "/", &[("Cache-Control", control)])).await;
        assert_eq!((answer.status, is_shared(&answer)), (200, is_taken), "{control}");
        assert_eq!(upstream.count(), before + usize::from(!is_taken), "{control}");
    }
    let nothing = ask(&first, &upstream, ("GET", "/other", &[("Cache-Control", "only-if-cached")])).await;
    assert_eq!((nothing.status, nothing.json()["error"].as_str()), (504, Some("not_cached")));
}

/// Pods that all have the same answer, and for which it has become stale, ask once.
#[tokio::test]
async fn what_one_pod_has_renewed_the_others_need_not() {
    let redis = RedisServer::start().await;
    // Stale as it comes, and fresh when it is confirmed.
    let upstream = Upstream::answering(|seen| {
        let reply = match seen.header("if-none-match") {
            None => Reply::ok("x").header("Age", "100"),
            Some(_) => Reply::status(304),
        };
        reply.header("ETag", "\"a\"").header("Cache-Control", "max-age=60")
    })
    .await;
    let (first, second) = pods(&redis, &upstream, "").await;
    for pod in [&first, &second] {
        get(pod, &upstream, "/").await;
    }
    assert_eq!((upstream.count(), redis.keys(ALL).len()), (2, 0));
    let renewed = get(&first, &upstream, "/").await;
    assert_eq!(status_of(&renewed), "hedgerow; fwd=stale; fwd-status=304; stored");
    until_shared(&redis, 1).await;
    let taken = get(&second, &upstream, "/").await;
    assert!(is_shared(&taken) && taken.text() == "x", "{taken:?}");
    assert_eq!(upstream.count(), 3);
}

#[tokio::test]
async fn what_is_renewed_aside_is_asked_of_the_others_first() {
    let redis = RedisServer::start().await;
    let upstream = Upstream::answering(|seen| {
        let reply = Reply::ok("x").header("Cache-Control", "max-age=60, stale-while-revalidate=600");
        if seen.header("x-old").is_some() { reply.header("Age", "100") } else { reply }
    })
    .await;
    let (first, second) = pods(&redis, &upstream, "").await;
    ask(&second, &upstream, ("GET", "/", &[("X-Old", "1")])).await;
    get(&first, &upstream, "/").await;
    until_shared(&redis, 1).await;
    // What is at hand is given at once, and what the other has takes its place.
    let stale = get(&second, &upstream, "/").await;
    assert!(is_own(&stale) && ttl(&stale) < 0, "{stale:?}");
    while ttl(&get(&second, &upstream, "/").await) < 0 {}
    assert_eq!(upstream.count(), 2);
}

#[tokio::test]
async fn what_another_pod_had_stands_in_for_a_failure() {
    let redis = RedisServer::start().await;
    let upstream = Upstream::answering(|seen| match seen.header("x-well") {
        Some(_) => Reply::ok("well"),
        None => Reply::status(503),
    })
    .await;
    let (first, second) = pods(&redis, &upstream, ", ttl: 300ms, stale_if_error: 10m").await;
    ask(&first, &upstream, ("GET", "/", &[("X-Well", "1")])).await;
    until_shared(&redis, 1).await;
    // When it is stale for the one it is for the other.
    while get(&first, &upstream, "/").await.header("x-hedgerow-degraded").is_none() {}
    let stands_in = get(&second, &upstream, "/").await;
    assert_eq!((stands_in.status, stands_in.text()), (200, "well"));
    assert_eq!(stands_in.header("x-hedgerow-degraded"), Some("stale"));
}

/// Of a resource that was changed nothing is given that was asked for before, whoever asked and in whichever form.
#[tokio::test]
async fn a_change_reaches_what_pods_share_in_every_partition() {
    let redis = RedisServer::start().await;
    let mut upstream = Upstream::start().await;
    let (first, second) = pods(&redis, &upstream, "").await;
    let callers: [Fields<'_>; 3] =
        [&[], &[("Authorization", "Bearer a")], &[("Accept-Encoding", "gzip"), ("X-Api-Key", "k")]];
    for (number, caller) in callers.into_iter().enumerate() {
        let mut agent = first.ask("GET", &upstream.url("/"), caller, b"").await;
        upstream.next().await.respond(200, &[FRESH], "old").await;
        agent.read_response().await;
        until_shared(&redis, number + 1).await;
    }
    // One more is under way when the change is made, and is written after it.
    let late: Fields<'_> = &[("X-Api-Key", "late")];
    let mut slow = first.ask("GET", &upstream.url("/"), late, b"").await;
    let under_way = upstream.next().await;
    let mut change = second.ask("DELETE", &upstream.url("/"), &[], b"").await;
    upstream.next().await.respond(204, &[], "").await;
    change.read_response_to("DELETE").await;
    redis.until(|redis| redis.keys(ALL).len() == callers.len() + 1).await;
    under_way.respond(200, &[FRESH], "old").await;
    slow.read_response().await;
    until_shared(&redis, callers.len() + 1).await;

    let third = pod(&redis, &upstream, "").await;
    for caller in callers.into_iter().chain([late]) {
        let mut agent = third.ask("GET", &upstream.url("/"), caller, b"").await;
        upstream.next().await.respond(200, &[FRESH], "new").await;
        assert_eq!(agent.read_response().await.text(), "new");
    }
    // And what is written since is taken again, by the pod that said so as well.
    let seen = upstream.count();
    for caller in callers {
        redis.until(|redis| redis.calls("set") as usize >= 2 * callers.len() + 3).await;
        let answer = ask(&second, &upstream, ("GET", "/", caller)).await;
        assert!(is_shared(&answer) && answer.text() == "new", "{answer:?}");
    }
    assert_eq!(upstream.count(), seen);
}

#[tokio::test]
async fn what_the_upstream_will_not_have_kept_any_more_is_taken_away() {
    let redis = RedisServer::start().await;
    let upstream = Upstream::answering(|seen| match seen.header("x-what") {
        Some("forbid") => Reply::ok("x").header("Cache-Control", "no-store"),
        Some("forbid-by-304") if seen.header("if-none-match").is_some() => {
            Reply::status(304).header("Cache-Control", "no-store")
        }
        _ => Reply::ok("x").header("Cache-Control", "max-age=60").header("ETag", "\"a\""),
    })
    .await;
    let first = pod(&redis, &upstream, "").await;
    for what in ["forbid", "forbid-by-304"] {
        get(&first, &upstream, "/").await;
        until_shared(&redis, 1).await;
        ask(&first, &upstream, ("GET", "/", &[("X-What", what), ("Cache-Control", "no-cache")])).await;
        until_shared(&redis, 0).await;
    }
}

/// Whatever lies where an answer should, calls go on as if nothing did, and the next answer takes its place.
#[tokio::test]
async fn what_others_left_behind_is_a_miss() {
    let redis = RedisServer::start().await;
    let upstream = Upstream::answering(|_| Reply::ok("x").header("Cache-Control", "max-age=60")).await;
    let first = pod(&redis, &upstream, "").await;
    get(&first, &upstream, "/").await;
    until_shared(&redis, 1).await;
    let key = only_key(&redis);
    let mark = key.rsplit_once(':').expect("the answer's part").0.to_owned();
    let Said::Text(good) = redis.command(&["GET", &key]) else { panic!("no value") };
    let is_good =
        |redis: &RedisServer| redis.try_command(&["STRLEN", &key]) == Said::Integer(good.len() as i64);

    let leave: [(&str, &dyn Fn()); 10] = [
        ("a list", &|| drop((redis.command(&["DEL", &key]), redis.command(&["LPUSH", &key, "x"])))),
        ("a hash", &|| drop((redis.command(&["DEL", &key]), redis.command(&["HSET", &key, "x", "y"])))),
        ("another program's", &|| drop(redis.command(&["SET", &key, "{\"version\":1}"]))),
        ("nothing", &|| drop(redis.command(&["SET", &key, ""]))),
        ("another version's", &|| drop(redis.command(&["SETRANGE", &key, "0", "\u{2}"]))),
        ("one that is too large", &|| drop(redis.command(&["SETRANGE", &key, "9000000", "x"]))),
        ("one with something after it", &|| drop(redis.command(&["APPEND", &key, "x"]))),
        ("one without an end", &|| drop(redis.command(&["PERSIST", &key]))),
        ("one that lasts longer than it was to", &|| drop(redis.command(&["PEXPIRE", &key, "99999999"]))),
        ("a mark of another kind", &|| drop(redis.command(&["SET", &mark, "x"]))),
    ];
    for (what, leave) in leave {
        leave();
        let other = pod(&redis, &upstream, "").await;
        let before = upstream.count();
        let answer = get(&other, &upstream, "/").await;
        assert_eq!((answer.status, status_of(&answer)), (200, "hedgerow; fwd=uri-miss; stored"), "{what}");
        assert_eq!(upstream.count(), before + 1, "{what}");
        // What was there for it to take the place of.
        redis.until(|redis| is_good(redis) && redis.command(&["PTTL", &key]).integer() <= 60_000).await;
        assert_eq!(other.status().await["shared_state"]["up"], true, "{what}");
    }
    redis.command(&["DEL", &mark]);
    let other = pod(&redis, &upstream, "").await;
    assert!(is_shared(&get(&other, &upstream, "/").await));
}

/// The first calls find it out, each for no longer than it may, and then nobody waits.
#[tokio::test]
async fn a_mute_server_costs_its_timeout_and_only_the_first_calls() {
    const WAIT: Duration = Duration::from_millis(400);
    let redis = RedisServer::start().await;
    let upstream = Upstream::answering(|_| Reply::ok("x").header("Cache-Control", "max-age=60")).await;
    let stages = "cache: { shared: true }";
    let pod = pod_with(&redis.url(), &upstream, "400ms", stages).await;
    redis.pause();
    let mut waited = Vec::new();
    for number in 0..12 {
        let began = Instant::now();
        assert_eq!(get(&pod, &upstream, &format!("/{number}")).await.text(), "x");
        waited.push(began.elapsed());
    }
    let long = waited.iter().filter(|took| **took >= WAIT).count();
    assert!((1..=3).contains(&long), "{waited:?}");
    assert!(waited.iter().all(|took| *took < 3 * WAIT), "{waited:?}");
    assert_eq!(upstream.count(), 12);

    // Back again it is of use again. What came to it meanwhile is done late, and harms nothing.
    redis.resume();
    pod.until_status(|status| {
        status["shared_state"]["up"] == true && status["shared_state"]["slow"] == false
    })
    .await;
    let other = pod_with(&redis.url(), &upstream, TIMEOUT, stages).await;
    get(&other, &upstream, "/after").await;
    redis.until(|redis| !redis.keys(ANSWERS).is_empty()).await;
    assert_eq!(get(&pod, &upstream, "/0").await.text(), "x");
}

#[tokio::test]
async fn a_call_keeps_half_of_its_time_for_the_upstream() {
    let (redis, upstream) = (RedisServer::start().await, Upstream::answering(|_| Reply::ok("x")).await);
    let pod = pod(&redis, &upstream, "").await;
    redis.pause();
    let deadline = deadline_in(Duration::from_millis(1500));
    let answer = ask(&pod, &upstream, ("GET", "/", &[("X-Request-Deadline", &deadline)])).await;
    assert_eq!((answer.status, answer.text()), (200, "x"));
    assert_eq!(upstream.count(), 1);
}

#[tokio::test]
async fn a_server_that_goes_comes_back_or_is_emptied_fails_no_call() {
    let mut redis = RedisServer::start().await;
    let upstream = Upstream::answering(|_| Reply::ok("x").header("Cache-Control", "max-age=60")).await;
    let (first, second) = pods(&redis, &upstream, "").await;
    get(&first, &upstream, "/1").await;
    until_shared(&redis, 1).await;
    redis.command(&["FLUSHALL"]);
    assert_eq!(status_of(&get(&second, &upstream, "/1").await), "hedgerow; fwd=uri-miss; stored");
    until_shared(&redis, 1).await;
    redis.kill();
    for pod in [&first, &second] {
        assert_eq!(get(pod, &upstream, "/2").await.text(), "x");
        assert!(is_own(&get(pod, &upstream, "/1").await));
    }
    assert_eq!(upstream.count(), 4);
    redis.restart().await;
    for pod in [&first, &second] {
        pod.until_status(|status| status["shared_state"]["up"] == true).await;
    }
    get(&first, &upstream, "/3").await;
    until_shared(&redis, 1).await;
    assert!(is_shared(&get(&second, &upstream, "/3").await));
}

#[tokio::test]
async fn a_server_without_memory_left_fails_no_call() {
    let redis = RedisServer::with().max_memory("3mb").start().await;
    let body = "x".repeat(900_000);
    let upstream =
        Upstream::answering(move |_| Reply::ok(body.clone()).header("Cache-Control", "max-age=60")).await;
    let pod = pod(&redis, &upstream, "").await;
    for number in 0..6 {
        assert_eq!(get(&pod, &upstream, &format!("/{number}")).await.body.len(), 900_000);
    }
    assert_eq!(upstream.count(), 6);
    assert!(is_own(&get(&pod, &upstream, "/0").await));
}

/// As a batch has it: what all may bring together is more than is under way at once, and each still has its turn.
#[tokio::test]
async fn a_crowd_of_calls_is_answered_from_what_pods_share() {
    const CALLS: usize = 60;
    let redis = RedisServer::start().await;
    let body = "x".repeat(40_000);
    let upstream =
        Upstream::answering(move |_| Reply::ok(body.clone()).header("Cache-Control", "max-age=60")).await;
    let (first, second) = pods(&redis, &upstream, "").await;
    for number in 0..CALLS {
        get(&first, &upstream, &format!("/{number}")).await;
    }
    until_shared(&redis, CALLS).await;
    let paths: Vec<_> = (0..CALLS).map(|number| format!("/{number}")).collect();
    let answers = join_all(paths.iter().map(|path| get(&second, &upstream, path))).await;
    for answer in &answers {
        assert!(is_shared(answer) && answer.body.len() == 40_000, "{}", status_of(answer));
    }
    assert_eq!(upstream.count(), CALLS);
}

/// An answer and its mark are asked for together, so they must lie together.
#[tokio::test]
async fn a_cluster_shares_and_forgets_as_well() {
    let cluster = RedisCluster::start().await;
    let url = format!("redis-cluster://{}", cluster.nodes[0].address());
    let upstream = Upstream::answering(|_| Reply::ok("x").header("Cache-Control", "max-age=60")).await;
    let stages = "cache: { shared: true }";
    let first = pod_with(&url, &upstream, TIMEOUT, stages).await;
    let second = pod_with(&url, &upstream, TIMEOUT, stages).await;
    let until_keys = async |count: usize| {
        cluster.nodes[0].until(|_| cluster.keys(ALL).len() == count).await;
    };
    for number in 0..8 {
        get(&first, &upstream, &format!("/{number}")).await;
    }
    until_keys(8).await;
    for number in 0..4 {
        assert!(is_shared(&get(&second, &upstream, &format!("/{number}")).await), "{number}");
        ask(&second, &upstream, ("DELETE", &format!("/{number}"), &[])).await;
    }
    until_keys(12).await;
    let third = pod_with(&url, &upstream, TIMEOUT, stages).await;
    for number in 0..8 {
        let answer = get(&third, &upstream, &format!("/{number}")).await;
        assert_eq!(is_shared(&answer), number >= 4, "{number}: {answer:?}");
    }
}
