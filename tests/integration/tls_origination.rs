//! TLS towards the upstream for clients that speak plain HTTP to us, with certificates that are always verified.

use rcgen::date_time_ymd;

use crate::support::client::absolute;
use crate::support::dns::{Answer, Dns};
use crate::support::hedgerow::HedgerowProcess;
use crate::support::pki::{self, Pki};
use crate::support::upstream::{Reply, Upstream};

/// `a.test` under this policy, on the upstream's port.
fn policy(dns: &Dns, keys: &str) -> String {
    format!("dns: {{ servers: [\"{}\"] }}\nupstreams: {{ a: {{ hosts: [a.test], {keys} }} }}", dns.address())
}

fn trusting(pki: &Pki) -> String {
    format!("tls: {{ ca_file: \"{}\" }}", pki.ca_file().display())
}

async fn names() -> Dns {
    let here = || Answer::addresses(&["127.0.0.1"]);
    Dns::start(&[("a.test", here()), ("b.test", here())]).await
}

#[tokio::test]
async fn a_plain_call_leaves_in_tls_where_the_policy_says_origin_https() {
    let (pki, dns) = (Pki::new(), names().await);
    let upstream =
        Upstream::on([127, 0, 0, 1]).tls(pki.server(&["a.test"])).answering(|_| Reply::ok("in TLS")).await;
    let port = upstream.address().port();
    let keys = format!("origin: https, {}", trusting(&pki));
    let hedgerow = HedgerowProcess::start(&policy(&dns, &keys)).await;
    for _ in 0..3 {
        assert_eq!(hedgerow.get(&format!("http://a.test:{port}/x")).await.text(), "in TLS");
    }
    let seen = &upstream.requests()[0];
    assert_eq!(
        (seen.head.target.as_str(), seen.header("host")),
        ("/x", Some(format!("a.test:{port}").as_str()))
    );
    assert_eq!(upstream.connections(), 1, "kept, like any other");
}

#[tokio::test]
async fn an_absolute_form_https_target_leaves_in_tls_without_any_policy_for_it() {
    let (pki, dns) = (Pki::new(), names().await);
    let upstream =
        Upstream::on([127, 0, 0, 1]).tls(pki.server(&["b.test"])).answering(|_| Reply::ok("in TLS")).await;
    let port = upstream.address().port();
    let policy = format!("dns: {{ servers: [\"{}\"] }}\n{}", dns.address(), trusting(&pki));
    let hedgerow = HedgerowProcess::start(&policy).await;
    let mut agent = hedgerow.agent().await;
    assert_eq!(agent.get(&format!("https://b.test:{port}/x")).await.text(), "in TLS");
    // The same host and port in clear text is another kind of connection, never the kept one.
    assert_eq!(agent.get(&format!("http://b.test:{port}/x")).await.status, 502);
    assert_eq!(upstream.count(), 1);
}

#[tokio::test]
async fn certificates_that_do_not_prove_the_host_are_refused_before_a_byte_of_the_request() {
    let (pki, stranger, dns) = (Pki::new(), Pki::new(), names().await);
    let expired = pki.leaf_with(&["a.test"], |params| {
        params.not_before = date_time_ymd(2020, 1, 1);
        params.not_after = date_time_ymd(2021, 1, 1);
    });
    let not_yet = pki.leaf_with(&["a.test"], |params| {
        params.not_before = date_time_ymd(2090, 1, 1);
        params.not_after = date_time_ymd(2091, 1, 1);
    });
    let client_only = pki.leaf_with(&["a.test"], |params| {
        params.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ClientAuth];
    });
    let leaves = [
        ("expired", expired),
        ("not yet valid", not_yet),
        ("for clients alone", client_only),
        ("of another host", pki.leaf(&["b.test"])),
        ("of an address", pki.leaf(&["127.0.0.1"])),
        ("of a wider wildcard", pki.leaf(&["*.a.test"])),
        ("by an unknown issuer", stranger.leaf(&["a.test"])),
    ];
    let keys = format!("origin: https, breaker: off, {}", trusting(&pki));
    let hedgerow = HedgerowProcess::start(&policy(&dns, &keys)).await;
    for (what, leaf) in leaves {
        let upstream =
            Upstream::on([127, 0, 0, 1]).tls(pki::acceptor(&leaf)).answering(|_| Reply::ok("")).await;
        let authority = format!("a.test:{}", upstream.address().port());
        for url in [format!("http://{authority}/"), format!("https://{authority}/")] {
            let mut agent = hedgerow.agent().await;
            agent.send(absolute("POST", &url, &[("Authorization", "secret")], b"secret")).await;
            let answer = agent.read_response().await;
            let error = answer.json()["error"].clone();
            assert_eq!((answer.status, error), (502, "certificate_invalid".into()), "{what}");
            assert!(answer.header("proxy-status").unwrap().contains("error=tls_certificate_error"), "{what}");
        }
        upstream.until(|tally| tally.handshakes_failed == 2).await;
        assert_eq!(upstream.count(), 0, "{what}");
    }
}

#[tokio::test]
async fn the_authority_of_one_upstream_is_not_trusted_for_another() {
    let (pki, dns) = (Pki::new(), names().await);
    let upstream = Upstream::on([127, 0, 0, 1])
        .tls(pki.server(&["a.test", "b.test"]))
        .answering(|_| Reply::ok("in TLS"))
        .await;
    let port = upstream.address().port();
    let hedgerow = HedgerowProcess::start(&policy(&dns, &trusting(&pki))).await;
    assert_eq!(hedgerow.get(&format!("https://a.test:{port}/")).await.text(), "in TLS");
    assert_eq!(hedgerow.get(&format!("https://b.test:{port}/")).await.json()["error"], "certificate_invalid");
    assert_eq!(upstream.count(), 1);
}

#[tokio::test]
async fn server_name_says_which_name_the_certificate_must_have() {
    let (pki, dns) = (Pki::new(), names().await);
    let upstream = Upstream::on([127, 0, 0, 1])
        .tls(pki.server(&["inner.test"]))
        .answering(|_| Reply::ok("in TLS"))
        .await;
    let port = upstream.address().port();
    let keys = format!(
        "origin: https, tls: {{ ca_file: \"{}\", server_name: inner.test }}",
        pki.ca_file().display()
    );
    let hedgerow = HedgerowProcess::start(&policy(&dns, &keys)).await;
    assert_eq!(hedgerow.get(&format!("http://a.test:{port}/")).await.text(), "in TLS");
}

#[tokio::test]
async fn addresses_are_verified_as_addresses() {
    let pki = Pki::new();
    let upstream =
        Upstream::on([127, 0, 0, 1]).tls(pki.server(&["127.0.0.1"])).answering(|_| Reply::ok("v4")).await;
    let hedgerow = HedgerowProcess::start(&trusting(&pki)).await;
    let port = upstream.address().port();
    assert_eq!(hedgerow.get(&format!("https://127.0.0.1:{port}/")).await.text(), "v4");
}

#[tokio::test]
async fn an_upstream_that_speaks_no_tls_is_told_apart_from_one_with_a_bad_certificate() {
    let upstream = Upstream::answering(|_| Reply::ok("plain")).await;
    let hedgerow = HedgerowProcess::start("defaults: { breaker: off }").await;
    let answer = hedgerow.get(&format!("https://{}/", upstream.address())).await;
    assert_eq!((answer.status, &answer.json()["error"]), (502, &"tls_failed".into()));
    assert!(answer.header("proxy-status").unwrap().contains("error=tls_protocol_error"));
    assert_eq!(upstream.count(), 0);
}

#[tokio::test]
async fn a_handshake_that_hangs_is_bounded_by_the_connect_timeout() {
    let port = crate::support::raw::RawPort::bind().await;
    let hedgerow = HedgerowProcess::start("defaults: { connect_timeout: 1s, hedge: off }").await;
    let (answer, _mute) =
        tokio::join!(async { hedgerow.get(&format!("https://{}/", port.address())).await }, async {
            port.accept().await
        });
    assert_eq!((answer.status, &answer.json()["error"]), (504, &"connect_timeout".into()));
}
