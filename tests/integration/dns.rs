//! Names: looked up within bounds, all their addresses used, followed when they move.

use std::net::IpAddr;
use std::time::Duration;

use tokio::time::Instant;

use crate::support::client::get_all;
use crate::support::dns::{Answer, Dns};
use crate::support::hedgerow::HedgerowProcess;
use crate::support::upstream::{Reply, Upstream};
use crate::support::{at_best_within, soon};

fn with_dns(dns: &Dns, rest: &str) -> String {
    format!("dns: {{ servers: [\"{}\"], timeout: 2s }}\n{rest}", dns.address())
}

/// Answers and closes, so that each request needs a new connection.
async fn closing(ip: [u8; 4], port: u16, word: &'static str) -> Upstream {
    Upstream::on(ip).port(port).answering(move |_| Reply::ok(word).header("Connection", "close")).await
}

fn addresses(ips: &[[u8; 4]], ttl: u32) -> Answer {
    Answer::Addresses(ips.iter().map(|ip| IpAddr::from(*ip)).collect(), ttl)
}

#[tokio::test]
async fn c049_a_ttl_of_zero_serves_its_connection_and_changes_no_state() {
    // A server that rounds the time left down says 0, and the target flapped between healthy and gone.
    let upstream = closing([127, 0, 0, 2], 0, "ok").await;
    let dns = Dns::start(&[("a.test", addresses(&[[127, 0, 0, 2]], 0))]).await;
    let policy = with_dns(&dns, "defaults: { hedge: off, breaker: { consecutive_failures: 1 } }");
    let hedgerow = HedgerowProcess::start(&policy).await;
    let url = format!("http://a.test:{}/", upstream.address().port());
    let mut agent = hedgerow.agent().await;
    for call in 0..100 {
        assert_eq!(agent.get(&url).await.text(), "ok", "call {call}");
    }
    assert_eq!(upstream.connections(), 100);
    // A question for each family.
    assert!(dns.queries("a.test") <= 2 * 100, "{} questions", dns.queries("a.test"));
    let metrics = hedgerow.metrics().await;
    assert_eq!(metrics.value("hedgerow_breaker_transitions_total", &[]), 0.0);
}

#[tokio::test]
async fn an_answer_is_kept_for_its_ttl_and_asked_for_once_by_many() {
    let upstream = closing([127, 0, 0, 2], 0, "ok").await;
    // An address of each family: a server that has none of one says so without a time for which that holds.
    let dns = Dns::start(&[("a.test", Answer::addresses(&["::1", "127.0.0.2"]))]).await;
    let hedgerow = HedgerowProcess::start(&with_dns(&dns, "defaults: { hedge: off }")).await;
    let urls = vec![format!("http://a.test:{}/", upstream.address().port()); 20];
    for _ in 0..2 {
        let answers = get_all(hedgerow.proxy, &urls).await;
        assert!(answers.iter().all(|answer| answer.text() == "ok"));
    }
    assert_eq!((upstream.count(), dns.queries("a.test")), (40, 2));
}

#[tokio::test]
async fn c050_a_silent_name_server_is_bounded_and_delays_nobody_else() {
    // One name's look-up had no bound of its own: every request of the chain became a 500.
    let upstream = Upstream::answering(|_| Reply::ok("ok")).await;
    let port = upstream.address().port();
    let dns = Dns::start(&[("mute.test", Answer::Mute), ("b.test", Answer::addresses(&["127.0.0.1"]))]).await;
    let hedgerow = HedgerowProcess::start(&with_dns(&dns, "")).await;
    let mute = format!("http://mute.test:{port}/");
    let begin = Instant::now();
    let others = async {
        dns.until_asked("mute.test", 1).await;
        let asked = Instant::now();
        assert_eq!(hedgerow.get(&format!("http://b.test:{port}/")).await.text(), "ok");
        asked.elapsed()
    };
    let (silent, other) = tokio::join!(hedgerow.get(&mute), others);
    let silence = begin.elapsed();
    assert_eq!((silent.status, &silent.json()["error"]), (504, &"dns_timeout".into()));
    assert!(silent.header("proxy-status").unwrap().contains("error=dns_timeout"));
    // Its own bound, and not the deadline of half a minute.
    assert!((Duration::from_secs(2)..Duration::from_secs(15)).contains(&silence), "{silence:?}");
    assert!(other < silence, "{other:?} beside {silence:?}");
}

#[tokio::test]
async fn a_look_up_ends_with_the_callers_deadline() {
    let dns = Dns::start(&[("mute.test", Answer::Mute)]).await;
    let policy = format!("dns: {{ servers: [\"{}\"], timeout: 1m }}", dns.address());
    let hedgerow = HedgerowProcess::start(&policy).await;
    let deadline =
        (time::OffsetDateTime::now_utc() + Duration::from_millis(300)).unix_timestamp_nanos() / 1_000_000;
    let begin = Instant::now();
    let answer = hedgerow
        .agent()
        .await
        .request("GET", "http://mute.test/", &[("x-request-deadline", &deadline.to_string())], b"")
        .await;
    assert_eq!((answer.status, &answer.json()["error"]), (504, &"deadline_exceeded".into()));
    assert!(begin.elapsed() < Duration::from_secs(15), "{:?}", begin.elapsed());
}

#[tokio::test]
async fn names_that_do_not_exist_and_servers_that_fail_are_told_as_dns_failed() {
    let dns = Dns::start(&[("broken.test", Answer::Failure), ("empty.test", Answer::addresses(&[]))]).await;
    let hedgerow = HedgerowProcess::start(&with_dns(&dns, "")).await;
    for host in ["unknown.test", "broken.test", "empty.test"] {
        let answer = hedgerow.get(&format!("http://{host}/")).await;
        assert_eq!((answer.status, &answer.json()["error"]), (502, &"dns_failed".into()), "{host}");
        assert!(answer.header("proxy-status").unwrap().contains("error=dns_error"));
    }
}

#[tokio::test]
async fn c051_dead_addresses_of_a_name_cost_little_and_are_no_failure_of_it() {
    // Only the first address, or only one family, was tried.
    let upstream = closing([127, 0, 0, 1], 0, "ok").await;
    let port = upstream.address().port();
    // Nobody listens on this port of the others.
    let dns = Dns::start(&[
        ("families.test", Answer::addresses(&["::1", "127.0.0.1"])),
        ("two.test", addresses(&[[127, 0, 0, 2], [127, 0, 0, 1]], 60)),
        ("many.test", addresses(&[[127, 0, 0, 2], [127, 0, 0, 3], [127, 0, 0, 4], [127, 0, 0, 1]], 60)),
    ])
    .await;
    let policy = with_dns(&dns, "defaults: { hedge: off, breaker: { consecutive_failures: 1 } }");
    let hedgerow = HedgerowProcess::start(&policy).await;
    for host in ["families.test", "two.test", "many.test"] {
        let url = format!("http://{host}:{port}/");
        // One that refuses is passed at once, and not after the quarter of a second that a silent one gets.
        at_best_within(Duration::from_millis(250), async || {
            assert_eq!(hedgerow.get(&url).await.text(), "ok", "{host}");
        })
        .await;
    }
    let metrics = hedgerow.metrics().await;
    assert_eq!(metrics.value("hedgerow_breaker_transitions_total", &[]), 0.0);
}

#[tokio::test]
async fn c051_an_address_that_stays_silent_costs_a_quarter_of_a_second() {
    let upstream = closing([127, 0, 0, 1], 0, "ok").await;
    let port = upstream.address().port();
    let _silent = Silent::at([127, 0, 0, 2], port).await;
    let dns = Dns::start(&[("a.test", addresses(&[[127, 0, 0, 2], [127, 0, 0, 1]], 60))]).await;
    // Were it waited for, it would cost the whole of `connect_timeout`.
    let hedgerow =
        HedgerowProcess::start(&with_dns(&dns, "defaults: { hedge: off, connect_timeout: 25s }")).await;
    at_best_within(Duration::from_secs(1), async || {
        assert_eq!(hedgerow.get(&format!("http://a.test:{port}/")).await.text(), "ok");
    })
    .await;
}

/// An address that answers no SYN: a listener whose backlog is full and that accepts nobody.
struct Silent {
    _listener: socket2::Socket,
    _backlog: Vec<tokio::task::JoinHandle<std::io::Result<tokio::net::TcpStream>>>,
}

impl Silent {
    async fn at(ip: [u8; 4], port: u16) -> Self {
        let address = std::net::SocketAddr::from((ip, port));
        let listener = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None);
        let listener = listener.expect("a socket");
        listener.bind(&address.into()).expect("a loopback address can be bound");
        listener.listen(0).expect("a bound socket can listen");
        let mut backlog = Vec::new();
        // The kernel takes one more than it was told; the first that it leaves waiting shows that it is full.
        loop {
            let mut connecting = tokio::spawn(tokio::net::TcpStream::connect(address));
            let is_full = tokio::time::timeout(Duration::from_secs(1), &mut connecting).await.is_err();
            backlog.push(tokio::spawn(async move { connecting.await.expect("connecting does not panic") }));
            if is_full {
                return Self { _listener: listener, _backlog: backlog };
            }
        }
    }
}

#[tokio::test]
async fn c052_new_connections_follow_a_name_that_moves_after_its_ttl() {
    // The old address was used for long after.
    let before = closing([127, 0, 0, 2], 0, "before").await;
    let port = before.address().port();
    let after = closing([127, 0, 0, 3], port, "after").await;
    let dns = Dns::start(&[("a.test", addresses(&[[127, 0, 0, 2]], 1))]).await;
    let hedgerow = HedgerowProcess::start(&with_dns(&dns, "")).await;
    let url = format!("http://a.test:{port}/");
    assert_eq!(hedgerow.get(&url).await.text(), "before");
    dns.set("a.test", addresses(&[[127, 0, 0, 3]], 1));
    soon(async {
        while hedgerow.get(&url).await.text() != "after" {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    let seen = before.count();
    for _ in 0..10 {
        assert_eq!(hedgerow.get(&url).await.text(), "after");
    }
    assert_eq!(before.count(), seen);
    assert!(after.count() >= 11);
}
