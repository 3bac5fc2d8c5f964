//! TLS towards the upstream in depth: what is said of a bad certificate, who we say we are, and which
//! connections outlive a change of the policy.

use std::fs;

use rcgen::date_time_ymd;

use crate::support::client::Response;
use crate::support::dns::Dns;
use crate::support::hedgerow::HedgerowProcess;
use crate::support::intercept::{HOST, inside, names, policy, trusting};
use crate::support::pki::{self, Leaf, Pki};
use crate::support::raw::RawPort;
use crate::support::upstream::{Reply, Upstream};

/// `a.test` as `tool`, with plain calls to it leaving in TLS.
fn origination(dns: &Dns, keys: &str) -> String {
    let tool = format!("tool: {{ hosts: [{HOST}], origin: https, hedge: off, {keys} }}");
    format!("dns: {{ servers: [\"{}\"] }}\nupstreams: {{ {tool} }}", dns.address())
}

async fn serving(leaf: &Leaf) -> Upstream {
    Upstream::on([127, 0, 0, 1]).tls(pki::acceptor(leaf)).answering(|_| Reply::ok("in TLS")).await
}

fn problem(answer: &Response) -> (u16, String, String) {
    let problem = answer.json();
    let text = |key: &str| problem[key].as_str().expect("a string").to_owned();
    (answer.status, text("error"), text("detail"))
}

#[tokio::test]
async fn the_detail_says_what_is_wrong_with_a_certificate() {
    let (pki, stranger, dns) = (Pki::new(), Pki::new(), names().await);
    let leaves = [
        (
            pki.leaf_with(&[HOST], |params| {
                params.not_before = date_time_ymd(2020, 1, 1);
                params.not_after = date_time_ymd(2021, 1, 1);
            }),
            "expired",
        ),
        (
            pki.leaf_with(&[HOST], |params| {
                params.not_before = date_time_ymd(2090, 1, 1);
                params.not_after = date_time_ymd(2091, 1, 1);
            }),
            "not yet valid",
        ),
        (pki.leaf(&["b.test"]), "issued for another name"),
        (Leaf::self_signed(&[HOST]), "signed by an unknown issuer"),
        (stranger.leaf(&[HOST]), "signed by an unknown issuer"),
        (pki.leaf_of_intermediate(&[HOST]).without_chain(), "signed by an unknown issuer"),
    ];
    // Both roads to the same handshake: originated, and inside interception.
    let hedgerow = HedgerowProcess::start(&policy(&pki, &dns, "hedge: off, breaker: off")).await;
    for (leaf, what) in leaves {
        let upstream = serving(&leaf).await;
        let authority = format!("{HOST}:{}", upstream.address().port());
        let expected = (502, "certificate_invalid".to_owned(), format!("the certificate of tool is {what}"));
        assert_eq!(problem(&hedgerow.get(&format!("https://{authority}/")).await), expected);
        let mut agent = inside(&hedgerow, &authority, HOST, trusting(&hedgerow)).await;
        assert_eq!(problem(&agent.get_at(&authority, "/").await), expected);
        assert_eq!(upstream.count(), 0, "{what}");
    }
    let results = [("upstream", "tool"), ("result", "tls")];
    assert_eq!(hedgerow.metrics().await.value("hedgerow_upstream_attempts_total", &results), 12.0);
}

#[tokio::test]
async fn a_chain_that_the_upstream_sends_is_followed() {
    let (pki, dns) = (Pki::new(), names().await);
    let upstream = serving(&pki.leaf_of_intermediate(&[HOST])).await;
    let keys = format!("tls: {{ ca_file: \"{}\" }}", pki.ca_file().display());
    let hedgerow = HedgerowProcess::start(&origination(&dns, &keys)).await;
    let url = format!("http://{HOST}:{}/", upstream.address().port());
    assert_eq!(hedgerow.get(&url).await.text(), "in TLS");
}

#[tokio::test]
async fn bad_certificates_open_the_breaker_like_any_failure() {
    let (pki, dns) = (Pki::new(), names().await);
    let upstream = serving(&Leaf::self_signed(&[HOST])).await;
    let keys = format!(
        "breaker: {{ consecutive_failures: 2 }}, tls: {{ ca_file: \"{}\" }}",
        pki.ca_file().display()
    );
    let hedgerow = HedgerowProcess::start(&origination(&dns, &keys)).await;
    let url = format!("http://{HOST}:{}/", upstream.address().port());
    for error in ["certificate_invalid", "certificate_invalid", "circuit_open"] {
        assert_eq!(hedgerow.get(&url).await.json()["error"], error);
    }
    assert_eq!(upstream.connections(), 2);
}

/// A ServerHello of TLS 1.1, and an alert that refuses the client's versions: what is left of such servers.
const TLS_1_1_HELLO: &[u8] = &{
    let mut hello = [0; 47];
    let head = [0x16, 3, 2, 0, 42, 2, 0, 0, 38, 3, 2];
    let mut i = 0;
    while i < head.len() {
        hello[i] = head[i];
        i += 1;
    }
    // Random bytes, an empty session, TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA, no compression, no extensions.
    hello[44] = 0xc0;
    hello[45] = 0x13;
    hello
};
const PROTOCOL_VERSION_ALERT: &[u8] = &[0x15, 3, 1, 0, 2, 2, 70];

#[tokio::test]
async fn upstreams_that_know_only_old_versions_of_tls_are_refused() {
    let (dns, port) = (names().await, RawPort::bind().await);
    let hedgerow = HedgerowProcess::start(&origination(&dns, "breaker: off")).await;
    let url = format!("http://{HOST}:{}/", port.address().port());
    for said in [TLS_1_1_HELLO, PROTOCOL_VERSION_ALERT] {
        let (answer, _upstream) = tokio::join!(hedgerow.get(&url), async {
            let mut upstream = port.accept().await;
            upstream.read_exactly(5).await;
            upstream.send(said).await;
            upstream
        });
        let (status, error, detail) = problem(&answer);
        assert_eq!((status, error.as_str()), (502, "tls_failed"));
        assert_eq!(detail, "the TLS handshake with tool failed");
        assert!(answer.header("proxy-status").unwrap().contains("error=tls_protocol_error"));
        // Why is for the operator.
        let id = answer.json()["request_id"].as_str().unwrap().to_owned();
        let line = hedgerow.access_log(|line| line["request_id"] == id.as_str()).await;
        let cause = line["cause"].as_str().expect("a cause");
        assert!(cause.contains("Tls12") || cause.contains("ProtocolVersion"), "{cause}");
    }
}

#[tokio::test]
async fn a_client_certificate_is_shown_to_those_who_ask() {
    let (pki, dns) = (Pki::new(), names().await);
    let identity = pki.leaf(&["agent.test"]);
    let (cert, key) = pki.files("agent", &identity);
    let keys = format!(
        "tls: {{ ca_file: \"{}\", client_cert: \"{}\", client_key: \"{}\" }}",
        pki.ca_file().display(),
        cert.display(),
        key.display()
    );
    let hedgerow = HedgerowProcess::start(&origination(&dns, &keys)).await;
    let asking = Upstream::on([127, 0, 0, 1])
        .tls(pki.server_demanding_client(&[HOST]))
        .answering(|_| Reply::ok("who you are"))
        .await;
    let silent = serving(&pki.leaf(&[HOST])).await;
    for upstream in [&asking, &silent] {
        let url = format!("http://{HOST}:{}/", upstream.address().port());
        assert_eq!(hedgerow.get(&url).await.status, 200);
    }
    assert_eq!(asking.handshakes()[0].client_certificate.as_deref(), Some(identity.der()));
    assert_eq!(silent.handshakes()[0].client_certificate, None);
}

#[tokio::test]
async fn an_upstream_that_asks_in_vain_refuses_us_and_no_request_reaches_it() {
    let (pki, stranger, dns) = (Pki::new(), Pki::new(), names().await);
    let (cert, key) = stranger.files("agent", &stranger.leaf(&["agent.test"]));
    let identities =
        [String::new(), format!(", client_cert: \"{}\", client_key: \"{}\"", cert.display(), key.display())];
    for protocol in ["http/1.1", "h2"] {
        let upstream = Upstream::on([127, 0, 0, 1])
            .tls(pki.server_demanding_client_in(&[HOST], protocol))
            .answering(|_| Reply::ok("who are you"))
            .await;
        let url = format!("http://{HOST}:{}/", upstream.address().port());
        for identity in &identities {
            let keys = format!("breaker: off, tls: {{ ca_file: \"{}\"{identity} }}", pki.ca_file().display());
            let hedgerow = HedgerowProcess::start(&origination(&dns, &keys)).await;
            for _ in 0..2 {
                let (status, error, _) = problem(&hedgerow.get(&url).await);
                assert_eq!(
                    (status, error.as_str()),
                    (502, "tls_failed"),
                    "{protocol}, identity {identity:?}"
                );
            }
        }
        assert_eq!(upstream.count(), 0);
    }
}

#[tokio::test]
async fn server_name_is_what_is_sent_and_verified_and_the_host_stays() {
    let (pki, dns) = (Pki::new(), names().await);
    let upstream = serving(&pki.leaf(&["inner.test"])).await;
    let roots = pki.ca_file();
    let keys = format!("tls: {{ ca_file: \"{}\", server_name: inner.test }}", roots.display());
    let hedgerow = HedgerowProcess::start(&origination(&dns, &keys)).await;
    let authority = format!("{HOST}:{}", upstream.address().port());
    assert_eq!(hedgerow.get(&format!("http://{authority}/")).await.text(), "in TLS");
    assert_eq!(upstream.handshakes()[0].server_name.as_deref(), Some("inner.test"));
    assert_eq!(upstream.requests()[0].header("host"), Some(authority.as_str()));
    // What the host's own name would have matched does not count any more.
    let other = serving(&pki.leaf(&[HOST])).await;
    let answer = hedgerow.get(&format!("http://{HOST}:{}/", other.address().port())).await;
    assert_eq!(problem(&answer).1, "certificate_invalid");
}

#[tokio::test]
async fn later_connections_take_up_the_session_of_earlier_ones() {
    let (pki, dns) = (Pki::new(), names().await);
    let upstream = Upstream::on([127, 0, 0, 1])
        .tls(pki.server(&[HOST]))
        .answering(|_| Reply::ok("bye").header("Connection", "close"))
        .await;
    let keys = format!("tls: {{ ca_file: \"{}\" }}", pki.ca_file().display());
    let hedgerow = HedgerowProcess::start(&origination(&dns, &keys)).await;
    let url = format!("http://{HOST}:{}/", upstream.address().port());
    for _ in 0..4 {
        assert_eq!(hedgerow.get(&url).await.text(), "bye");
    }
    let resumed: Vec<_> = upstream.handshakes().iter().map(|own| own.is_resumed).collect();
    assert_eq!(resumed, [false, true, true, true]);
}

/// Waits until so many versions of the policy have been taken up.
async fn applied(hedgerow: &HedgerowProcess, versions: f64) {
    let labels = [("result", "applied")];
    hedgerow
        .until_metrics(|metrics| metrics.value("hedgerow_config_reloads_total", &labels) == versions)
        .await;
}

#[tokio::test]
async fn a_renewed_client_certificate_is_shown_on_a_connection_and_in_a_session_of_its_own() {
    let (pki, dns) = (Pki::new(), names().await);
    let identities = [pki.leaf(&["first.test"]), pki.leaf(&["second.test"])];
    // Renewed in place, as a secret's volume does it.
    let (cert, key) = pki.files("agent", &identities[0]);
    let upstream = Upstream::on([127, 0, 0, 1])
        .tls(pki.server_demanding_client(&[HOST]))
        .answering(|_| Reply::ok("known"))
        .await;
    let keys = format!(
        "tls: {{ ca_file: \"{}\", client_cert: \"{}\", client_key: \"{}\" }}",
        pki.ca_file().display(),
        cert.display(),
        key.display()
    );
    let hedgerow = HedgerowProcess::start(&origination(&dns, &keys)).await;
    let url = format!("http://{HOST}:{}/", upstream.address().port());
    for _ in 0..2 {
        assert_eq!(hedgerow.get(&url).await.text(), "known");
    }
    assert_eq!(upstream.connections(), 1, "kept");
    let renewed = |path: &std::path::Path, text: &str| {
        let new = path.with_extension("new");
        fs::write(&new, text).unwrap();
        fs::rename(new, path).unwrap();
    };
    renewed(&key, &identities[1].key_pem());
    renewed(&cert, identities[1].pem());
    hedgerow
        .until_metrics(|m| m.value("hedgerow_config_reloads_total", &[("result", "applied")]) >= 1.0)
        .await;
    // The two files may have been seen one by one, and until both are in, they do not belong together.
    let last = identities[1].der();
    crate::support::soon(async {
        while upstream.handshakes().last().unwrap().client_certificate.as_deref() != Some(last) {
            hedgerow.get(&url).await;
        }
    })
    .await;
    let handshakes = upstream.handshakes();
    assert!(handshakes.iter().all(|own| !own.is_resumed), "{handshakes:?}");
    let connections = upstream.connections();
    assert_eq!(hedgerow.get(&url).await.text(), "known");
    assert_eq!(upstream.connections(), connections, "kept as well");
}

#[tokio::test]
async fn connections_of_roots_that_are_no_longer_trusted_are_not_used_again() {
    let (pki, stranger, dns) = (Pki::new(), Pki::new(), names().await);
    let upstream = serving(&pki.leaf(&[HOST])).await;
    let policy = |pki: &Pki| {
        origination(&dns, &format!("breaker: off, tls: {{ ca_file: \"{}\" }}", pki.ca_file().display()))
    };
    let mut hedgerow = HedgerowProcess::start(&policy(&pki)).await;
    let url = format!("http://{HOST}:{}/", upstream.address().port());
    assert_eq!(hedgerow.get(&url).await.text(), "in TLS");
    hedgerow.policy.replace(&policy(&stranger));
    applied(&hedgerow, 1.0).await;
    assert_eq!(problem(&hedgerow.get(&url).await).1, "certificate_invalid");
    assert_eq!(upstream.count(), 1);
    hedgerow.policy.replace(&policy(&pki));
    applied(&hedgerow, 2.0).await;
    assert_eq!(hedgerow.get(&url).await.text(), "in TLS");
}
