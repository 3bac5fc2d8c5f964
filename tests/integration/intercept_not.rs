//! When interception keeps its hands off: exempted hosts, clients that decline, and what is no TLS.

use std::time::Duration;

use crate::support::at_best_within;
use crate::support::client::End;
use crate::support::hedgerow::{HedgerowProcess, Metrics};
use crate::support::intercept::{HOST, Rig, base, inside, intercepting, names, policy, problem, trusting};
use crate::support::pki::{self, Pki};
use crate::support::raw::RawPort;
use crate::support::upstream::{Reply, Upstream};

#[tokio::test]
async fn a_client_that_hesitates_before_its_handshake_leaves_no_permit_behind() {
    // The tunnel that was opened meanwhile held the only place, and the requests inside waited for it.
    let rig =
        Rig::answering("hedge: off, bulkhead: { max_concurrent: 1, max_queue: 0 }", |_| Reply::ok("in"))
            .await;
    let mut agent = rig.hedgerow.agent().await;
    assert_eq!(agent.open_tunnel(&rig.authority()).await.status, 200);
    rig.upstream.until(|tally| tally.connections == 1).await;
    let mut agent = agent.tls(&trusting(&rig.hedgerow).connector(), HOST).await.unwrap();
    for _ in 0..2 {
        assert_eq!(agent.get_at(&rig.authority(), "/").await.status, 200);
    }
}

#[tokio::test]
async fn a_client_that_hesitates_reads_inside_why_its_upstream_is_not_there() {
    // The upstream was dialled meanwhile, in vain, and the client's connection reset for it.
    let (dead, _held) = Upstream::dead();
    let hedgerow = intercepting("").await;
    let mut agent = hedgerow.agent().await;
    assert_eq!(agent.open_tunnel(&dead.to_string()).await.status, 200);
    let refused = [("code", "502")];
    hedgerow.until_metrics(|m| m.value("hedgerow_requests_total", &refused) == 1.0).await;
    let mut agent = agent.tls(&trusting(&hedgerow).connector(), "127.0.0.1").await.unwrap();
    let answer = agent.get_at(&dead.to_string(), "/").await;
    assert_eq!(problem(&answer), (502, "connect_failed".into()));
    // One that stays silent has nothing to be told.
    let mut silent = hedgerow.agent().await;
    assert_eq!(silent.open_tunnel(&dead.to_string()).await.status, 200);
    assert_eq!(silent.ended().await, End::Reset);
}

#[tokio::test]
async fn intercept_false_shows_the_origins_own_certificate() {
    let (pki, dns) = (Pki::new(), names().await);
    let leaf = pki.leaf(&[HOST, "b.test"]);
    let upstream =
        Upstream::on([127, 0, 0, 1]).tls(pki::acceptor(&leaf)).answering(|_| Reply::ok("own")).await;
    let rest = format!(
        "{}\ndefaults: {{ intercept: true, hedge: off }}\n\
         upstreams: {{ pinned: {{ hosts: [b.test], intercept: false }} }}",
        base(&pki, &dns)
    );
    let hedgerow = HedgerowProcess::start(&rest).await;
    let port = upstream.address().port();
    let mut exempt = inside(&hedgerow, &format!("b.test:{port}"), "b.test", pki.agent_tls()).await;
    assert_eq!(exempt.peer_certificate().unwrap(), leaf.der());
    assert_eq!(exempt.get_at("b.test", "/").await.text(), "own");
    let agent = inside(&hedgerow, &format!("{HOST}:{port}"), HOST, trusting(&hedgerow)).await;
    assert_ne!(agent.peer_certificate().unwrap(), leaf.der());
    // By its address the client names it inside the handshake only.
    let by_address = inside(&hedgerow, &upstream.address().to_string(), "b.test", pki.agent_tls()).await;
    assert_eq!(by_address.peer_certificate().unwrap(), leaf.der());
}

#[tokio::test]
async fn c025_plain_http_in_a_tunnel_to_an_intercepted_host_is_served() {
    // TLS was forced on a plain stream.
    let (pki, dns) = (Pki::new(), names().await);
    let upstream = Upstream::answering(|seen| Reply::ok(seen.path().to_owned())).await;
    let hedgerow = HedgerowProcess::start(&policy(&pki, &dns, "hedge: off")).await;
    let authority = format!("{HOST}:{}", upstream.address().port());
    let mut agent = hedgerow.agent().await;
    assert_eq!(agent.open_tunnel(&authority).await.status, 200);
    for path in ["/1", "/2"] {
        let answer = agent.get_at(&authority, path).await;
        assert_eq!((answer.text(), answer.header("x-hedgerow-attempts")), (path, Some("1")));
    }
    assert_eq!(upstream.requests()[0].header("host"), Some(authority.as_str()));
}

#[tokio::test]
async fn a_client_that_leaves_without_a_word_is_not_connected() {
    let rig = Rig::answering("hedge: off", |_| Reply::ok("in")).await;
    let mut agent = rig.hedgerow.agent().await;
    assert_eq!(agent.open_tunnel(&rig.authority()).await.status, 200);
    drop(agent);
    rig.hedgerow.until_status(|status| status["connections"] == 0).await;
    assert_eq!(rig.get("/").await.text(), "in");
    assert_eq!(rig.upstream.connections(), 1, "none but the one of the call");
}

#[tokio::test]
async fn c025_a_server_that_speaks_first_is_heard_within_a_second() {
    let port = RawPort::bind().await;
    let hedgerow = intercepting("").await;
    // The client is listened to for 300 ms before its server is dialled, and for a second more if that is silent.
    at_best_within(Duration::from_secs(1), async || {
        let mut agent = hedgerow.agent().await;
        assert_eq!(agent.open_tunnel(&port.address().to_string()).await.status, 200);
        let mut upstream = port.accept().await;
        upstream.send("220 mail.test ready\r\n").await;
        agent.expect(b"220 mail.test ready\r\n").await;
        agent.send("EHLO agent.test\r\n").await;
        upstream.expect(b"EHLO agent.test\r\n").await;
        // What looks like TLS or HTTP from now on is neither.
        agent.send("\x16\x03\x01").await;
        upstream.expect(b"\x16\x03\x01").await;
    })
    .await;
}

#[tokio::test]
async fn what_is_neither_tls_nor_http_is_copied_both_ways() {
    let port = RawPort::bind().await;
    let hedgerow = intercepting("").await;
    for first in [&b"SSH-2.0-agent\r\n"[..], b"\x16\x02\x00\x00", b"\x00", b"GETX / HTTP/1.1\r\n\r\n"] {
        let mut agent = hedgerow.agent().await;
        assert_eq!(agent.open_tunnel(&port.address().to_string()).await.status, 200);
        agent.send(first).await;
        let mut upstream = port.accept().await;
        upstream.expect(first).await;
        upstream.send("SSH-2.0-server\r\n").await;
        agent.expect(b"SSH-2.0-server\r\n").await;
        agent.half_close().await;
        assert_eq!(upstream.ended().await, End::Closed);
        upstream.send("bye").await;
        drop(upstream);
        agent.expect(b"bye").await;
        assert_eq!(agent.ended().await, End::Closed);
    }
}

/// A handshake with a client that trusts somebody else.
async fn decline(hedgerow: &HedgerowProcess, authority: &str, name: &str) {
    let mut agent = hedgerow.agent().await;
    assert_eq!(agent.open_tunnel(authority).await.status, 200);
    let stranger = Pki::new();
    let refused = agent.tls(&stranger.connector(), name).await.expect_err("a stranger's certificate");
    assert!(refused.to_string().contains("invalid peer certificate"), "{refused}");
}

#[tokio::test]
async fn a_client_that_declines_our_certificate_gets_the_origins_from_then_on() {
    let (pki, dns) = (Pki::new(), names().await);
    let leaf = pki.leaf(&[HOST, "b.test"]);
    let upstream =
        Upstream::on([127, 0, 0, 1]).tls(pki::acceptor(&leaf)).answering(|_| Reply::ok("own")).await;
    let rest = format!(
        "{}\ndefaults: {{ intercept: true, hedge: off }}\nupstreams: {{ tool: {{ hosts: [{HOST}] }} }}",
        base(&pki, &dns)
    );
    let hedgerow = HedgerowProcess::start(&rest).await;
    let port = upstream.address().port();
    let (stepped_down, other) = (format!("{HOST}:{port}"), format!("b.test:{port}"));
    // Two of them at once, before either has said no.
    tokio::join!(decline(&hedgerow, &stepped_down, HOST), decline(&hedgerow, &stepped_down, HOST));
    let warned = hedgerow.stderr.until(|line| line.contains("does not trust the pod's CA")).await;
    assert!(warned.contains("tool"), "{warned}");
    let declined = [("upstream", "tool")];
    let counted = |metrics: &Metrics| metrics.value("hedgerow_intercept_declined_total", &declined);
    hedgerow.until_metrics(|metrics| counted(metrics) >= 1.0).await;

    let mut agent = inside(&hedgerow, &stepped_down, HOST, pki.agent_tls()).await;
    assert_eq!(agent.peer_certificate().unwrap(), leaf.der());
    assert_eq!(agent.get_at(HOST, "/").await.text(), "own");
    let agent = inside(&hedgerow, &other, "b.test", trusting(&hedgerow)).await;
    assert_ne!(agent.peer_certificate().unwrap(), leaf.der(), "others stay intercepted");

    let all = hedgerow.stderr.all();
    assert_eq!(all.iter().filter(|line| line.contains("does not trust")).count(), 1, "{all:?}");
    drop(agent);
}

#[tokio::test]
async fn a_client_that_only_goes_away_changes_nothing() {
    let hedgerow = intercepting("").await;
    for _ in 0..3 {
        let mut agent = hedgerow.agent().await;
        assert_eq!(agent.open_tunnel("a.test:443").await.status, 200);
        agent.send("\x16\x03\x01").await;
    }
    let mut config_less = hedgerow.agent().await;
    assert_eq!(config_less.open_tunnel("a.test:443").await.status, 200);
    config_less.reset();
    inside(&hedgerow, "a.test:443", HOST, trusting(&hedgerow)).await;
    assert_eq!(hedgerow.metrics().await.value("hedgerow_intercept_declined_total", &[]), 0.0);
}
