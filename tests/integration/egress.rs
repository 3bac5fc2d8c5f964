//! The egress guard on the wire: whatever the name says, the address that is dialled decides.

use crate::support::client::Response;
use crate::support::dns::{Answer, Dns};
use crate::support::hedgerow::HedgerowProcess;
use crate::support::upstream::{Reply, Upstream};

fn with_dns(dns: &Dns, rest: &str) -> String {
    format!("dns: {{ servers: [\"{}\"] }}\n{rest}", dns.address())
}

#[track_caller]
fn assert_denied(answer: &Response, proxy_status: &str) {
    assert_eq!((answer.status, &answer.json()["error"]), (403, &"egress_denied".into()), "{answer:?}");
    assert!(answer.header("proxy-status").is_some_and(|value| value.contains(proxy_status)), "{answer:?}");
    assert_eq!(answer.header("x-should-retry"), Some("false"));
}

#[tokio::test]
async fn c019_the_address_that_is_dialled_is_checked_in_every_form() {
    // Only hosts written as addresses were checked, and a name could point inside.
    let forbidden = Upstream::on([127, 0, 0, 3]).answering(|_| Reply::ok("inside")).await;
    let port = forbidden.address().port();
    let dns = Dns::start(&[
        ("plain.test", Answer::Addresses(vec!["127.0.0.3".parse().unwrap()], 0)),
        ("mapped.test", Answer::Addresses(vec!["::ffff:127.0.0.3".parse().unwrap()], 0)),
        ("metadata.test", Answer::addresses(&["169.254.169.254"])),
        ("linklocal.test", Answer::addresses(&["fe80::1"])),
        // Nobody listens at the first, which is allowed: the race must not go on to the second.
        ("mixed.test", Answer::addresses(&["127.0.0.2", "127.0.0.3"])),
    ])
    .await;
    let hedgerow = HedgerowProcess::start(&with_dns(&dns, "egress: { deny: [127.0.0.3/32] }")).await;
    for host in [
        "127.0.0.3",
        "[::ffff:127.0.0.3]",
        "[64:ff9b::7f00:3]",
        "plain.test",
        "mapped.test",
        "metadata.test",
        "linklocal.test",
    ] {
        let answer = hedgerow.get(&format!("http://{host}:{port}/")).await;
        assert_denied(&answer, "error=destination_ip_prohibited");
        let answer = hedgerow.agent().await.open_tunnel(&format!("{host}:{port}")).await;
        assert_eq!((answer.status, answer.reason.as_str()), (403, "egress_denied"), "{host}");
    }
    let answer = hedgerow.get(&format!("http://mixed.test:{port}/")).await;
    assert_eq!((answer.status, &answer.json()["error"]), (502, &"connect_failed".into()));
    assert_eq!(forbidden.connections(), 0);
    let denied = [("code", "403"), ("outcome", "error")];
    hedgerow.until_metrics(|m| m.value("hedgerow_requests_total", &denied) == 14.0).await;
}

#[tokio::test]
async fn c019_a_name_that_changes_its_mind_gains_nothing() {
    let good =
        Upstream::on([127, 0, 0, 2]).answering(|_| Reply::ok("good").header("Connection", "close")).await;
    let port = good.address().port();
    let inside = Upstream::on([127, 0, 0, 3]).port(port).answering(|_| Reply::ok("inside")).await;
    let dns = Dns::start(&[("a.test", Answer::Addresses(vec!["127.0.0.2".parse().unwrap()], 0))]).await;
    let policy = with_dns(&dns, "egress: { deny: [127.0.0.3] }\ndefaults: { hedge: { after: 20ms } }");
    let hedgerow = HedgerowProcess::start(&policy).await;
    let url = format!("http://a.test:{port}/");
    assert_eq!(hedgerow.get(&url).await.text(), "good");
    dns.set("a.test", Answer::Addresses(vec!["127.0.0.3".parse().unwrap()], 0));
    assert_denied(&hedgerow.get(&url).await, "error=destination_ip_prohibited");
    assert_eq!(inside.connections(), 0);
}

#[tokio::test]
async fn c020_the_unspecified_address_is_loopback() {
    // The kernel delivers it to local services, whatever the list says about 127.0.0.0/8.
    let local = Upstream::answering(|_| Reply::ok("local")).await;
    let local6 = Upstream::on(std::net::Ipv6Addr::LOCALHOST).answering(|_| Reply::ok("local")).await;
    let dns = Dns::start(&[
        ("zero.test", Answer::addresses(&["0.0.0.0"])),
        ("zero6.test", Answer::addresses(&["::"])),
        ("loop.test", Answer::addresses(&["127.0.0.1", "::1"])),
    ])
    .await;
    let hedgerow = HedgerowProcess::start(&with_dns(&dns, "egress: { deny_private: true }")).await;
    let hosts = [
        "127.0.0.1",
        "[::1]",
        "[::]",
        "0.0.0.0",
        "[::ffff:127.0.0.1]",
        "[::ffff:0.0.0.0]",
        "[::127.0.0.1]",
        "localhost",
        "zero.test",
        "zero6.test",
        "loop.test",
    ];
    for port in [local.address().port(), local6.address().port()] {
        for host in hosts {
            assert_denied(
                &hedgerow.get(&format!("http://{host}:{port}/")).await,
                "destination_ip_prohibited",
            );
            let answer = hedgerow.agent().await.open_tunnel(&format!("{host}:{port}")).await;
            assert_eq!(answer.status, 403, "{host}");
        }
    }
    assert_eq!((local.connections(), local6.connections()), (0, 0));
}

#[tokio::test]
async fn an_allow_list_lets_out_what_it_names_and_nothing_else() {
    let upstream = Upstream::answering(|_| Reply::ok("out")).await;
    let port = upstream.address().port();
    let dns = Dns::start(&[
        ("a.test", Answer::addresses(&["127.0.0.1"])),
        ("x.sub.test", Answer::addresses(&["127.0.0.1"])),
        ("b.test", Answer::addresses(&["127.0.0.1"])),
    ])
    .await;
    let policy =
        with_dns(&dns, "egress: { default: deny, allow: [a.test, \"*.sub.test\"], deny: [y.sub.test] }");
    let hedgerow = HedgerowProcess::start(&policy).await;
    for host in ["a.test", "A.TEST", "x.sub.test"] {
        assert_eq!(hedgerow.get(&format!("http://{host}:{port}/")).await.text(), "out", "{host}");
    }
    for host in ["b.test", "sub.test", "y.sub.test", "127.0.0.1", "a.test.evil.test"] {
        assert_denied(&hedgerow.get(&format!("http://{host}:{port}/")).await, "error=http_request_denied");
    }
    assert_eq!(upstream.count(), 3);
    assert_eq!(dns.queries("b.test"), 0, "what its name already refuses is not even looked up");
}

#[tokio::test]
async fn a_door_closed_by_a_reload_is_closed_for_kept_connections_too() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let mut hedgerow = HedgerowProcess::start("{}").await;
    assert_eq!(hedgerow.get(&upstream.url("/")).await.status, 200);
    hedgerow.policy.write_in_place("egress: { deny: [127.0.0.0/8] }");
    hedgerow
        .until_metrics(|m| m.value("hedgerow_config_reloads_total", &[("result", "applied")]) >= 1.0)
        .await;
    assert_denied(&hedgerow.get(&upstream.url("/")).await, "error=destination_ip_prohibited");
    assert_eq!(upstream.count(), 1);
}
