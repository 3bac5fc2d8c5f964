//! One absolute deadline for a call: how it is read, what it bounds, and how its end looks.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use time::format_description::well_known::Rfc3339;
use time::{OffsetDateTime, UtcOffset};
use tokio::time::{Instant, sleep_until};

use crate::support::client::{Agent, Response, absolute};
use crate::support::dns::{Answer, Dns};
use crate::support::h1::Framing;
use crate::support::hedgerow::HedgerowProcess;
use crate::support::policy::{TOOL, named, tool};
use crate::support::soon;
use crate::support::upstream::{Reply, Upstream};

const FIELD: &str = "x-request-deadline";

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Unix seconds with a fraction.
fn unix(at: SystemTime) -> String {
    let since_epoch = at.duration_since(UNIX_EPOCH).expect("after 1970");
    format!("{}.{:03}", since_epoch.as_secs(), since_epoch.subsec_millis())
}

/// Unix seconds with a fraction, so far from now.
fn in_time(left: Duration) -> String {
    unix(SystemTime::now() + left)
}

/// A whole second at least `left` from now.
fn whole_second(left: Duration) -> SystemTime {
    let at = (SystemTime::now() + left).duration_since(UNIX_EPOCH).expect("after 1970");
    UNIX_EPOCH + Duration::from_secs(at.as_secs() + 1)
}

async fn call(proxy: &HedgerowProcess, url: &str, headers: &[(&str, &str)]) -> Response {
    proxy.agent().await.request("GET", url, headers, b"").await
}

fn detail(response: &Response) -> String {
    response.json()["detail"].as_str().expect("a problem has a detail").to_owned()
}

/// What cannot be read is refused and never clamped, wrapped or ignored; the process lives on.
#[tokio::test]
async fn c081_every_wrong_form_of_the_field_is_a_400_and_nothing_is_sent() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), "")).await;
    let too_long = format!("1796119230.{}", "0".repeat(60));
    for wrong in [
        "",
        "soon",
        "null",
        "NaN",
        "-1",
        "-1796119230",
        "+1796119230",
        "1e9",
        "0x6af0d33e",
        "1796119230,5",
        "1796119230.",
        ".5",
        "1796119230.1234567890",
        "17961192301.5.2",
        "179611923012.5",
        "1 796 119 230",
        "99999999999999999999",
        "18446744073709551616",
        "18446744073709551615",
        "9223372036854775808",
        "99999999999999",
        "9999-12-31T23:59:59Z",
        "Sun, 29 Nov 2026 10:00:30 GMT",
        "2026-11-29",
        "2026-11-29T10:00:30",
        "2026-11-29 10:00:30Z",
        "2026-02-30T10:00:30Z",
        "2026-11-29T25:00:30Z",
        "2026-11-29T10:00:30+0200",
        "20261129T100030Z",
        "P1D",
        too_long.as_str(),
    ] {
        let answer = call(&proxy, &upstream.url("/"), &[(FIELD, wrong)]).await;
        assert_eq!(
            (answer.status, answer.json()["error"].as_str()),
            (400, Some("invalid_deadline")),
            "{wrong:?}"
        );
        assert_eq!(answer.header("retry-after"), None);
    }
    let mut agent = proxy.agent().await;
    let host = upstream.address();
    agent
        .send(
            [format!("GET http://{host}/ HTTP/1.1\r\nHost: {host}\r\n{FIELD}: ").as_bytes(), b"\xff\r\n\r\n"]
                .concat(),
        )
        .await;
    assert_eq!(agent.read_response().await.json()["error"], "invalid_deadline");

    let (one, other) = (in_time(ms(5000)), in_time(ms(6000)));
    let answer = call(&proxy, &upstream.url("/"), &[(FIELD, &one), (FIELD, &other)]).await;
    assert_eq!((answer.status, answer.json()["error"].as_str()), (400, Some("invalid_deadline")));
    let answer = call(&proxy, &upstream.url("/"), &[("grpc-timeout", "123456789S")]).await;
    assert_eq!((answer.status, answer.json()["error"].as_str()), (400, Some("invalid_deadline")));
    assert_eq!(upstream.count(), 0);

    let answer = call(&proxy, &upstream.url("/"), &[(FIELD, &one), (FIELD, &one)]).await;
    assert_eq!(answer.status, 200);
}

/// One instant written in five ways ends five calls at the same time: no unit is mistaken for another.
#[tokio::test]
async fn c083_all_accepted_forms_of_one_instant_end_a_call_at_that_instant() {
    let upstream = Upstream::answering(|_| Reply::hang()).await;
    let proxy =
        HedgerowProcess::start(&tool(upstream.address(), "hedge: off, deadline: { reserve: 0s }")).await;
    let at = whole_second(ms(1500));
    let seconds = at.duration_since(UNIX_EPOCH).unwrap().as_secs();
    let utc = OffsetDateTime::from(at);
    let offset = UtcOffset::from_hms(2, 0, 0).unwrap();
    let forms = [
        seconds.to_string(),
        format!("{seconds}.000"),
        (seconds * 1000).to_string(),
        utc.format(&Rfc3339).unwrap(),
        utc.to_offset(offset).format(&Rfc3339).unwrap(),
    ];
    let ends = forms.iter().map(async |form| {
        let answer = call(&proxy, &upstream.url("/"), &[(FIELD, form)]).await;
        assert_eq!(
            (answer.status, answer.json()["error"].as_str()),
            (504, Some("deadline_exceeded")),
            "{form}"
        );
        SystemTime::now()
    });
    for (form, end) in forms.iter().zip(futures_util::future::join_all(ends).await) {
        // A unit mistaken for another is off by years, and a form that is not read by half a minute.
        assert!(end >= at && end < at + ms(15_000), "{form} ended at {end:?} instead of {at:?}");
    }
    assert_eq!(upstream.count(), forms.len());
}

/// What had passed before it came costs nobody anything, and the answer says by how much.
#[tokio::test]
async fn c082_a_deadline_in_the_past_is_a_504_at_once_and_the_upstream_sees_nothing() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let policy =
        tool(upstream.address(), "breaker: { consecutive_failures: 1 }, bulkhead: { max_concurrent: 1 }");
    let proxy = HedgerowProcess::start(&policy).await;
    let now = SystemTime::now();
    let answer = call(&proxy, &upstream.url("/"), &[(FIELD, &unix(now - ms(2000)))]).await;
    let took = now.elapsed().expect("the clock goes on").as_millis() as u64;
    assert_eq!((answer.status, answer.header("x-should-retry")), (504, Some("false")));
    let problem = answer.json();
    assert_eq!(problem["error"], "deadline_exceeded");
    let skew = problem["skew_ms"].as_u64().expect("the skew is told");
    assert!((2000..=2001 + took).contains(&skew), "{skew} after {took}");
    assert!(detail(&answer).contains("clocks"), "{}", detail(&answer));
    assert!(answer.header("proxy-status").unwrap().contains("error=http_response_timeout"));
    assert_eq!(upstream.connections(), 0);

    assert_eq!(call(&proxy, &upstream.url("/"), &[]).await.status, 200);
    let metrics = proxy.metrics().await;
    assert_eq!(metrics.value("hedgerow_deadline_exceeded_total", &[TOOL, ("stage", "arrival")]), 1.0);
    assert_eq!(metrics.value("hedgerow_upstream_attempts_total", &[TOOL]), 1.0);
}

/// A caller's clock that is slow looks like a deadline in the past, and one that is fast is bounded by the
/// policy's own maximum.
#[tokio::test]
async fn c080_a_skewed_clock_is_named_or_bounded_by_the_maximum() {
    let upstream = Upstream::answering(|_| Reply::hang()).await;
    let proxy =
        HedgerowProcess::start(&tool(upstream.address(), "hedge: off, deadline: { default: 1s, max: 1s }"))
            .await;
    let now = SystemTime::now();
    let answer = call(&proxy, &upstream.url("/"), &[(FIELD, &unix(now - ms(20_000)))]).await;
    let took = now.elapsed().expect("the clock goes on").as_millis() as u64;
    let skew = answer.json()["skew_ms"].as_u64().expect("the skew is told");
    assert!((20_000..=20_001 + took).contains(&skew), "{skew} after {took}");
    assert!(detail(&answer).contains("clocks"), "{}", detail(&answer));
    assert_eq!(upstream.count(), 0);

    let ahead = in_time(ms(40_000));
    let answer = call(&proxy, &upstream.url("/"), &[(FIELD, &ahead)]).await;
    assert_eq!(detail(&answer), "upstreams.tool.deadline.max struck before the response head");
    assert_eq!(answer.json().get("skew_ms"), None);
}

/// The upstream is told the same instant in the caller's own spelling.
#[tokio::test]
async fn a_deadline_that_was_not_shortened_is_sent_on_byte_for_byte() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), "")).await;
    let at = whole_second(ms(20_000));
    let seconds = at.duration_since(UNIX_EPOCH).unwrap().as_secs();
    let east = OffsetDateTime::from(at).to_offset(UtcOffset::from_hms(5, 30, 0).unwrap());
    for spelling in [
        seconds.to_string(),
        format!("{seconds}.250000000"),
        format!("{}", seconds * 1000 + 7),
        east.format(&Rfc3339).unwrap(),
        OffsetDateTime::from(at).format(&Rfc3339).unwrap().to_lowercase(),
    ] {
        assert_eq!(call(&proxy, &upstream.url("/"), &[(FIELD, &spelling)]).await.status, 200, "{spelling}");
        assert_eq!(upstream.requests().last().unwrap().header(FIELD), Some(spelling.as_str()));
    }
}

/// Without a field of the caller's, or with one beyond the maximum, the upstream reads when hedgerow will stop.
#[tokio::test]
async fn a_deadline_that_hedgerow_sets_is_sent_on_as_rfc_3339() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let policy = tool(upstream.address(), "deadline: { default: 5s, max: 20s }");
    let proxy = HedgerowProcess::start(&policy).await;
    let far = in_time(ms(60_000));
    for (headers, left) in [(&[][..], ms(5000)), (&[(FIELD, far.as_str())][..], ms(20_000))] {
        let before = SystemTime::now();
        assert_eq!(call(&proxy, &upstream.url("/"), headers).await.status, 200);
        let told = upstream.requests().last().unwrap().header(FIELD).unwrap().to_owned();
        assert!(told.ends_with('Z') && told.len() == "2026-11-29T10:00:30.250Z".len(), "{told}");
        let told = SystemTime::from(OffsetDateTime::parse(&told, &Rfc3339).unwrap());
        assert!(told >= before + left - ms(1) && told <= SystemTime::now() + left, "{told:?}");
    }
}

/// gRPC's timeout is relative, so each hop passes on what is left of it.
#[tokio::test]
async fn a_grpc_timeout_arrives_shrunk_and_bounds_the_call() {
    let mut upstream = Upstream::start().await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), "hedge: off")).await;
    let url = upstream.url("/");
    let calling = call(&proxy, &url, &[("grpc-timeout", "1500m")]);
    let serving = async {
        let exchange = upstream.next().await;
        let left = exchange.header("grpc-timeout").unwrap().to_owned();
        let (digits, unit) = left.split_at(left.len() - 1);
        assert_eq!(unit, "u", "{left}");
        assert!((1..1_500_000).contains(&digits.parse::<u64>().unwrap()), "{left}");
        exchange.gone().await;
    };
    let (answer, ()) = tokio::join!(calling, serving);
    assert_eq!(
        (answer.status, detail(&answer).as_str()),
        (504, "grpc-timeout struck before the response head")
    );
}

/// Of several bounds the earliest counts, whichever it is.
#[tokio::test]
async fn the_earliest_bound_strikes_and_is_named() {
    let upstream = Upstream::answering(|_| Reply::hang()).await;
    let policy = tool(upstream.address(), "hedge: off, deadline: { default: 1500ms }");
    let proxy = HedgerowProcess::start(&policy).await;
    let (soon, late) = (in_time(ms(2000)), in_time(ms(19_000)));
    let ttl = whole_second(ms(1500));
    let ttl = OffsetDateTime::from(ttl)
        .format(time::macros::format_description!("[year][month][day]T[hour][minute][second]Z"))
        .unwrap();
    let ttl = format!("ttl={ttl}; attempt=1; max=3");
    let sdk = "the SDK's own timeout header struck before the response head";
    let cases: &[(&[(&str, &str)], &str)] = &[
        (&[], "upstreams.tool.deadline.default struck before the response head"),
        (&[(FIELD, &soon), ("grpc-timeout", "9S")], "x-request-deadline struck before the response head"),
        (&[(FIELD, &late), ("grpc-timeout", "1500m")], "grpc-timeout struck before the response head"),
        (&[(FIELD, &late), ("x-stainless-read-timeout", "1.5")], sdk),
        (&[(FIELD, &late), ("x-stainless-timeout", "1.5")], sdk),
        (&[(FIELD, &late), ("amz-sdk-request", &ttl)], sdk),
        // A hint that cannot be read is none.
        (
            &[("x-stainless-timeout", "NOT_GIVEN")],
            "upstreams.tool.deadline.default struck before the response head",
        ),
    ];
    let answers = cases.iter().map(async |(headers, _)| call(&proxy, &upstream.url("/"), headers).await);
    for ((headers, named), answer) in cases.iter().zip(futures_util::future::join_all(answers).await) {
        assert_eq!((answer.status, detail(&answer).as_str()), (504, *named), "{headers:?}");
    }
}

/// An operator may want the SDKs' own budgets out of it; what is no deadline then is passed on untouched.
#[tokio::test]
async fn hints_can_be_turned_off_and_so_can_the_whole_stage() {
    let (hung, open) =
        (Upstream::answering(|_| Reply::hang()).await, Upstream::answering(|_| Reply::ok("")).await);
    let policy = format!(
        "upstreams: {{ {}, {} }}",
        named("deaf", hung.address(), "hedge: off, deadline: { default: 1s, hints: off }"),
        named("lax", open.address(), "deadline: off"),
    );
    let proxy = HedgerowProcess::start(&policy).await;
    let answer = call(&proxy, &hung.url("/"), &[("x-stainless-timeout", "0.05")]).await;
    assert_eq!(detail(&answer), "upstreams.deaf.deadline.default struck before the response head");

    for value in ["Sun, 29 Nov 2026 10:00:30 GMT", "1"] {
        let answer = call(&proxy, &open.url("/"), &[(FIELD, value), ("grpc-timeout", "1n")]).await;
        assert_eq!(answer.status, 200);
        let seen = open.requests().pop().unwrap();
        assert_eq!((seen.header(FIELD), seen.header("grpc-timeout")), (Some(value), Some("1n")));
    }
    assert_eq!(call(&proxy, &open.url("/"), &[]).await.status, 200);
    assert_eq!(open.requests().pop().unwrap().header(FIELD), None);
}

/// The head is no end of the wait: a body that stalls is cut at the caller's deadline, and in no framing does what
/// came look whole.
#[tokio::test]
async fn c079_a_callers_deadline_covers_the_body_and_cuts_it_visibly() {
    let mut upstream = Upstream::start().await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), "hedge: off")).await;
    for framing in [Framing::Chunked, Framing::Length(10), Framing::UntilClose] {
        let began = Instant::now();
        let deadline = in_time(ms(1200));
        let mut agent = proxy.agent().await;
        let version = if framing == Framing::UntilClose { "1.0" } else { "1.1" };
        let host = upstream.address();
        agent
            .send(format!("GET http://{host}/ HTTP/{version}\r\nHost: {host}\r\n{FIELD}: {deadline}\r\n\r\n"))
            .await;
        let mut exchange = upstream.next().await;
        match framing {
            Framing::Length(_) => exchange.head_only(200, &[("Content-Length", "10")]).await,
            _ => exchange.start_chunks(200, &[]).await,
        }
        match framing {
            Framing::Length(_) => exchange.raw(b"H").await,
            _ => exchange.chunk("H").await,
        }
        let (answer, gone) = tokio::join!(agent.read_response(), exchange.gone());
        assert_eq!(
            (answer.status, answer.framing, answer.text(), answer.complete),
            (200, framing, "H", false)
        );
        let took = gone - began;
        // Less a reserve of 50 ms, and long before a stream has been idle for five minutes.
        assert!(took >= ms(1100) && took < ms(15_000), "{framing:?}: {took:?}");
    }
    let metrics = proxy.metrics().await;
    assert_eq!(metrics.value("hedgerow_deadline_exceeded_total", &[TOOL, ("stage", "body")]), 3.0);
    assert_eq!(
        metrics.value("hedgerow_requests_total", &[TOOL, ("code", "200"), ("outcome", "incomplete")]),
        3.0
    );
    assert_eq!(metrics.value("hedgerow_bulkhead_in_flight", &[TOOL]), 0.0);
}

/// Work that nobody waits for any more ends with the wait. The promise is 10 ms; the bound here is for loaded
/// machines. What is looked for once a second has a median of half of one.
#[tokio::test]
async fn the_upstream_sees_its_connection_closed_when_the_deadline_strikes() {
    let mut upstream = Upstream::start().await;
    let policy = tool(upstream.address(), "hedge: off, deadline: { reserve: 0s }, breaker: off");
    let proxy = HedgerowProcess::start(&policy).await;
    let begin = SystemTime::now();
    let mut calls = Vec::new();
    for nth in 0..9 {
        // One after the other, so that a moment in which the machine is held up is not that of all.
        let at = begin + ms(1500 + nth * 130);
        let mut agent = proxy.agent().await;
        // The field is exact to the nanosecond, and one clock serves both processes.
        let since_epoch = at.duration_since(UNIX_EPOCH).unwrap();
        let field = format!("{}.{:09}", since_epoch.as_secs(), since_epoch.subsec_nanos());
        agent.send(absolute("GET", &upstream.url("/"), &[(FIELD, &field)], b"")).await;
        calls.push((agent, upstream.next().await, at));
    }
    let delays = calls.into_iter().map(async |(mut agent, exchange, at)| {
        exchange.gone().await;
        let delay = SystemTime::now().duration_since(at).expect("not before the deadline");
        assert_eq!(agent.read_response().await.status, 504);
        delay
    });
    let mut delays = futures_util::future::join_all(delays).await;
    delays.sort();
    assert!(delays[4] < ms(300), "{delays:?}");
}

/// A stream has no end that the policy's default could know; it is bounded by silence instead.
#[tokio::test]
async fn the_policys_default_ends_at_the_head_of_a_stream_which_then_has_stream_idle() {
    let mut upstream = Upstream::start().await;
    let policy = tool(upstream.address(), "hedge: off, stream_idle: 1500ms, deadline: { default: 1s }");
    let proxy = HedgerowProcess::start(&policy).await;
    let mut agent = proxy.agent().await;
    agent.send(absolute("GET", &upstream.url("/"), &[], b"")).await;
    let began = Instant::now();
    let mut exchange = upstream.next().await;
    exchange.start_chunks(200, &[("Content-Type", "text/event-stream")]).await;
    assert_eq!(agent.read_head().await.status, 200);
    // Longer than either bound, but never silent for long.
    while began.elapsed() < ms(2000) {
        exchange.chunk("data: 1\n\n").await;
        assert_eq!(agent.read_chunk().await.as_deref(), Some(&b"data: 1\n\n"[..]));
        sleep_until(Instant::now() + ms(100)).await;
    }
    exchange.gone().await;
    // However the end is told, it is no last chunk.
    while let Some(chunk) = agent.read_chunk().await {
        assert!(!chunk.is_empty(), "the cut stream ended like a whole one");
    }
    let line = proxy.access_log(|line| line["outcome"] == "incomplete").await;
    assert_eq!(line["error"], "deadline_exceeded");
}

/// `covers` decides where the rule for streams does not fit.
#[tokio::test]
async fn covers_says_whether_a_deadline_bounds_the_body() {
    let routes = "hedge: off, deadline: { default: 1s }, routes: [\
         { path: \"/head\", deadline: { covers: head } }, { path: \"/body\", deadline: { covers: body } }]";
    // At once, since all that each of them does is to wait.
    let cases = [
        ("/auto", "text/plain", None, true),
        ("/auto", "application/grpc", None, false),
        ("/auto", "Text/Event-Stream; charset=utf-8", None, false),
        ("/auto", "text/event-stream", Some(1000), true),
        ("/head", "text/plain", Some(1000), false),
        ("/body", "text/event-stream", None, true),
    ]
    .map(async |(path, kind, header, is_cut)| {
        let mut upstream = Upstream::start().await;
        let proxy = HedgerowProcess::start(&tool(upstream.address(), routes)).await;
        let mut agent = proxy.agent().await;
        let field = header.map(|left| in_time(ms(left)));
        let fields: Vec<_> = field.iter().map(|value| (FIELD, value.as_str())).collect();
        agent.send(absolute("GET", &upstream.url(path), &fields, b"")).await;
        let began = Instant::now();
        let mut exchange = upstream.next().await;
        exchange.start_chunks(200, &[("Content-Type", kind)]).await;
        exchange.chunk("a").await;
        assert_eq!(agent.read_head().await.status, 200);
        if is_cut {
            exchange.gone().await;
        } else {
            sleep_until(began + ms(1150)).await;
            exchange.chunk("b").await;
            exchange.end().await;
        }
        let body = agent.read_body(Framing::Chunked).await;
        assert_eq!(body.complete, !is_cut, "{path} {kind} {header:?}");
    });
    futures_util::future::join_all(cases).await;
}

/// Name servers that do not answer are inside the bound too.
#[tokio::test]
async fn resolving_is_bounded_by_the_deadline() {
    let dns = Dns::start(&[("mute.test", Answer::Mute)]).await;
    let policy = format!("dns: {{ servers: [\"{}\"], timeout: 1m }}", dns.address());
    let proxy = HedgerowProcess::start(&policy).await;
    let began = Instant::now();
    let answer = call(&proxy, "http://mute.test/", &[(FIELD, &in_time(ms(1200)))]).await;
    assert_eq!((answer.status, answer.json()["error"].as_str()), (504, Some("deadline_exceeded")));
    assert_eq!(detail(&answer), "x-request-deadline struck while resolving the name");
    assert!(answer.header("proxy-status").unwrap().contains("error=connection_timeout"));
    assert!(began.elapsed() < ms(15_000), "{:?}", began.elapsed());
}

/// On CONNECT the field bounds the way to the tunnel, and not what is said in it.
#[tokio::test]
async fn a_connect_is_bounded_by_its_proxy_header_and_its_tunnel_is_not() {
    let dns = Dns::start(&[("mute.test", Answer::Mute)]).await;
    let proxy = HedgerowProcess::start(&format!("dns: {{ servers: [\"{}\"] }}", dns.address())).await;
    let mut agent = proxy.agent().await;
    let deadline = in_time(ms(1200));
    agent
        .send(format!("CONNECT mute.test:443 HTTP/1.1\r\nHost: mute.test:443\r\n{FIELD}: {deadline}\r\n\r\n"))
        .await;
    let refused = agent.read_response_to("CONNECT").await;
    assert_eq!((refused.status, refused.json()["error"].as_str()), (504, Some("deadline_exceeded")));
    assert_eq!(refused.header("connection"), Some("close"));
    assert!(refused.reason.contains("deadline"), "{}", refused.reason);

    let far_end = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let to = far_end.local_addr().unwrap();
    let mut agent = proxy.agent().await;
    let field = in_time(ms(1500));
    let deadline = Instant::now() + ms(1500);
    agent.send(format!("CONNECT {to} HTTP/1.1\r\nHost: {to}\r\n{FIELD}: {field}\r\n\r\n")).await;
    assert_eq!(agent.read_response_to("CONNECT").await.status, 200);
    let (far_end, _) = soon(far_end.accept()).await.unwrap();
    sleep_until(deadline + ms(100)).await;
    agent.send(b"\x16\x03\x01 not really TLS").await;
    let mut heard = [0; 3];
    let mut far_end = far_end;
    soon(tokio::io::AsyncReadExt::read_exact(&mut far_end, &mut heard)).await.unwrap();
    assert_eq!(heard, *b"\x16\x03\x01");
}

/// A call that was sent once with an effect is not sent again because its head was late.
#[tokio::test]
async fn c059_a_post_whose_head_is_late_is_not_sent_a_second_time() {
    let upstream = Upstream::answering(|_| Reply::hang()).await;
    let policy = tool(upstream.address(), "attempt_timeout: 1s, hedge: { after: 50ms }");
    let proxy = HedgerowProcess::start(&policy).await;
    let answer = proxy.agent().await.request("POST", &upstream.url("/"), &[], b"order").await;
    assert_eq!((answer.status, answer.json()["error"].as_str()), (504, Some("deadline_exceeded")));
    assert_eq!(detail(&answer), "upstreams.tool.attempt_timeout struck before the response head");
    upstream.until(|tally| tally.aborted == 1).await;
    assert_eq!((upstream.count(), upstream.requests()[0].body.as_slice()), (1, &b"order"[..]));
}

/// `attempt_timeout` is about the head; a body may take as long as the deadline lets it.
#[tokio::test]
async fn an_attempt_timeout_ends_at_the_head() {
    let upstream = Upstream::answering(|_| Reply::ok("slowly").drip(3, ms(500))).await;
    let policy = tool(upstream.address(), "attempt_timeout: 1s, hedge: off");
    let proxy = HedgerowProcess::start(&policy).await;
    let answer = call(&proxy, &upstream.url("/"), &[]).await;
    assert_eq!((answer.status, answer.text(), answer.complete), (200, "slowly", true));
}

/// Envoy and its like read a field of their own, where the policy wants it.
#[tokio::test]
async fn envoys_field_tells_what_is_left_where_the_policy_says_so() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let policy = tool(
        upstream.address(),
        "deadline: { default: 5s }, routes: [{ path: \"/told\", deadline: { tell_envoy: true } }]",
    );
    let proxy = HedgerowProcess::start(&policy).await;
    for path in ["/told", "/untold"] {
        assert_eq!(call(&proxy, &upstream.url(path), &[]).await.status, 200);
    }
    let left =
        |at: usize| upstream.requests()[at].header("x-envoy-expected-rq-timeout-ms").map(str::to_owned);
    let told: u64 = left(0).expect("the route tells it").parse().unwrap();
    assert!((1..=5000).contains(&told), "{told}");
    assert_eq!(left(1), None);
}

/// An agent that speaks on a kept connection gets each call's own deadline.
#[tokio::test]
async fn the_next_call_on_a_connection_has_a_deadline_of_its_own() {
    let upstream = Upstream::answering(|seen| match seen.path() {
        "/hang" => Reply::hang(),
        _ => Reply::ok("in time").after(ms(300)),
    })
    .await;
    let proxy = HedgerowProcess::start(&tool(upstream.address(), "hedge: off")).await;
    let mut agent: Agent = proxy.agent().await;
    let answer = agent.request("GET", &upstream.url("/hang"), &[(FIELD, &in_time(ms(200)))], b"").await;
    assert_eq!(answer.status, 504);
    assert_eq!(agent.get(&upstream.url("/")).await.text(), "in time");
}
