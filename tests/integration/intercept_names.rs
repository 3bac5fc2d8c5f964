//! Interception and names: what our certificate says, and how CONNECT, SNI, `Host` and the upstream's certificate
//! are held together.

use time::OffsetDateTime;
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::{GeneralName, ParsedExtension};
use x509_parser::prelude::FromDer;

use crate::support::dns::Answer;
use crate::support::hedgerow::HedgerowProcess;
use crate::support::intercept::{
    HOST, Rig, base, ca_pem, inside, intercepting, names, policy, problem, trusting,
};
use crate::support::pki::Pki;
use crate::support::upstream::{Reply, Upstream};

/// What a client that checks everything looks at.
fn check_leaf(leaf: &[u8], ca: &[u8], name: &GeneralName<'_>) {
    let (_, leaf) = X509Certificate::from_der(leaf).expect("DER");
    let (_, ca) = x509_parser::pem::parse_x509_pem(ca).expect("PEM");
    let ca = ca.parse_x509().expect("DER");
    assert_eq!(leaf.issuer().as_raw(), ca.subject().as_raw());
    leaf.verify_signature(Some(ca.public_key())).expect("signed by the CA");

    let san = leaf.subject_alternative_name().expect("DER").expect("a SAN");
    assert_eq!(san.value.general_names.as_slice(), std::slice::from_ref(name), "exactly one name");
    let usage = leaf.extended_key_usage().expect("DER").expect("EKU").value;
    assert!(usage.server_auth && !usage.client_auth && !usage.any, "{usage:?}");
    let constraints = leaf.basic_constraints().expect("DER").expect("basicConstraints");
    assert!(!constraints.value.ca);

    let identifier = |certificate: &X509Certificate<'_>, own: bool| {
        certificate.extensions().iter().find_map(|extension| match extension.parsed_extension() {
            ParsedExtension::SubjectKeyIdentifier(id) if own => Some(id.0.to_vec()),
            ParsedExtension::AuthorityKeyIdentifier(id) if !own => {
                Some(id.key_identifier.as_ref()?.0.to_vec())
            }
            _ => None,
        })
    };
    assert!(identifier(&leaf, true).is_some(), "a SKI");
    assert_eq!(identifier(&leaf, false).expect("an AKI"), identifier(&ca, true).expect("a SKI"));

    let now = OffsetDateTime::now_utc();
    let (start, end) = (leaf.validity().not_before.to_datetime(), leaf.validity().not_after.to_datetime());
    let minute = time::Duration::MINUTE;
    assert!((now - start - time::Duration::hours(2)).abs() < minute, "{start}");
    assert!((end - now - time::Duration::hours(24)).abs() < minute, "{end}");
    assert!(leaf.raw_serial().len() <= 20 && leaf.raw_serial()[0] < 0x80);
}

#[tokio::test]
async fn a_leaf_has_what_the_strictest_clients_ask_for() {
    // More than a common name may have.
    let long = format!("{}.{}.test", "a".repeat(40), "b".repeat(40));
    let hedgerow = intercepting("").await;
    let ca = ca_pem(&hedgerow);
    for (authority, host, name) in [
        ("a.test:443", HOST, GeneralName::DNSName(HOST)),
        ("a.test:8443", HOST, GeneralName::DNSName(HOST)),
        ("A.Test.:443", HOST, GeneralName::DNSName(HOST)),
        ("127.0.0.1:443", "127.0.0.1", GeneralName::IPAddress(&[127, 0, 0, 1])),
        ("[::1]:443", "::1", GeneralName::IPAddress(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1])),
        (&format!("{long}:443"), &long, GeneralName::DNSName(&long)),
        ("xn--bcher-kva.test:443", "xn--bcher-kva.test", GeneralName::DNSName("xn--bcher-kva.test")),
    ] {
        let agent = inside(&hedgerow, authority, host, trusting(&hedgerow)).await;
        check_leaf(&agent.peer_certificate().expect("TLS"), &ca, &name);
    }
}

#[tokio::test]
async fn clients_that_come_at_once_get_one_leaf_and_others_another() {
    let hedgerow = intercepting("").await;
    let agents = (0..30).map(|_| inside(&hedgerow, "a.test:443", HOST, trusting(&hedgerow)));
    let mut leaves: Vec<_> =
        futures_util::future::join_all(agents).await.iter().map(|agent| agent.peer_certificate()).collect();
    leaves.dedup();
    assert_eq!(leaves.len(), 1);
    let other = inside(&hedgerow, "b.test:443", "b.test", trusting(&hedgerow)).await;
    assert_ne!(other.peer_certificate(), leaves[0]);
}

#[tokio::test]
async fn alpn_gives_each_client_what_it_asks_for() {
    let hedgerow = intercepting("").await;
    for (offered, agreed) in [
        (&[][..], None),
        (&["http/1.1"][..], Some("http/1.1")),
        (&["h2"][..], Some("h2")),
        (&["http/1.1", "h2"][..], Some("h2")),
        (&["h2", "http/1.1"][..], Some("h2")),
    ] {
        let tls = trusting(&hedgerow).offering(offered);
        let agent = inside(&hedgerow, "a.test:443", HOST, tls).await;
        assert_eq!(agent.protocol().as_deref(), agreed, "{offered:?}");
    }
    let mut agent = hedgerow.agent().await;
    assert_eq!(agent.open_tunnel("a.test:443").await.status, 200);
    let refused = agent.tls(&trusting(&hedgerow).offering(&["imap"]).connector(), HOST).await.unwrap_err();
    assert!(refused.to_string().contains("NoApplicationProtocol"), "{refused}");
}

#[tokio::test]
async fn c043_without_sni_the_connect_names_the_host() {
    // The upstream could not be verified without a name, and users turned the verification off.
    let rig = Rig::answering("hedge: off", |_| Reply::ok("named")).await;
    let tls = trusting(&rig.hedgerow).without_sni();
    let mut agent = inside(&rig.hedgerow, &rig.authority(), HOST, tls).await;
    assert_eq!(agent.get_at(&rig.authority(), "/").await.text(), "named");
    assert_eq!(rig.upstream.handshakes()[0].server_name.as_deref(), Some(HOST));
}

#[tokio::test]
async fn c043_a_certificate_for_another_name_is_refused_with_or_without_sni() {
    let (pki, dns) = (Pki::new(), names().await);
    let upstream =
        Upstream::on([127, 0, 0, 1]).tls(pki.server(&["b.test"])).answering(|_| Reply::ok("stranger")).await;
    let hedgerow = HedgerowProcess::start(&policy(&pki, &dns, "hedge: off, breaker: off")).await;
    let authority = format!("{HOST}:{}", upstream.address().port());
    for tls in [trusting(&hedgerow), trusting(&hedgerow).without_sni()] {
        let mut agent = inside(&hedgerow, &authority, HOST, tls).await;
        let answer = agent.get_at(&authority, "/").await;
        assert_eq!(problem(&answer), (502, "certificate_invalid".into()));
        assert!(answer.json()["detail"].as_str().unwrap().contains("issued for another name"), "{answer:?}");
    }
    assert_eq!(upstream.count(), 0);
}

#[tokio::test]
async fn c043_an_address_is_verified_as_the_address_it_is() {
    let pki = Pki::new();
    let hedgerow = HedgerowProcess::start(&format!(
        "tls: {{ ca_dir: ca, ca_file: \"{}\" }}\ndefaults: {{ intercept: true, hedge: off, breaker: off }}",
        pki.ca_file().display()
    ))
    .await;
    let right =
        Upstream::on([127, 0, 0, 1]).tls(pki.server(&["127.0.0.1"])).answering(|_| Reply::ok("it")).await;
    let wrong =
        Upstream::on([127, 0, 0, 1]).tls(pki.server(&["127.0.0.2"])).answering(|_| Reply::ok("not it")).await;
    for (upstream, status) in [(&right, 200), (&wrong, 502)] {
        let authority = upstream.address().to_string();
        let mut agent = inside(&hedgerow, &authority, "127.0.0.1", trusting(&hedgerow)).await;
        assert_eq!(agent.get_at(&authority, "/").await.status, status);
    }
    assert_eq!((right.count(), wrong.count()), (1, 0));
    assert_eq!(right.handshakes()[0].server_name, None, "an address is no SNI");
}

#[tokio::test]
async fn sni_says_what_the_client_verifies_and_connect_where_it_goes() {
    let rig = Rig::answering("hedge: off", |_| Reply::ok("the tunnel's")).await;
    let mut agent = inside(&rig.hedgerow, &rig.authority(), "b.test", trusting(&rig.hedgerow)).await;
    assert_eq!(agent.get_at("b.test", "/").await.status, 421);
    assert_eq!(agent.get_at(&rig.authority(), "/").await.text(), "the tunnel's");
    assert_eq!(rig.upstream.handshakes()[0].server_name.as_deref(), Some(HOST));
}

#[tokio::test]
async fn a_name_inside_a_tunnel_to_an_address_selects_the_policy_and_the_address_is_dialled() {
    let (pki, dns) = (Pki::new(), names().await);
    // Where the name leads, nobody listens; the client knows better.
    dns.set(HOST, Answer::addresses(&["127.0.0.9"]));
    let upstream =
        Upstream::on([127, 0, 0, 1]).tls(pki.server(&[HOST])).answering(|_| Reply::ok("dialled")).await;
    let rest = format!(
        "{}\ndefaults: {{ intercept: true, hedge: off }}\nupstreams: {{ tool: {{ hosts: [{HOST}] }} }}",
        base(&pki, &dns)
    );
    let hedgerow = HedgerowProcess::start(&rest).await;
    let port = upstream.address().port();
    let mut agent = inside(&hedgerow, &upstream.address().to_string(), HOST, trusting(&hedgerow)).await;
    let answer = agent.get_at(&format!("{HOST}:{port}"), "/").await;
    assert_eq!(answer.text(), "dialled");
    let line = hedgerow.access_log(|line| line["path"] == "/").await;
    assert_eq!(line["upstream"], "tool");
}

#[tokio::test]
async fn c042_a_final_dot_never_gets_into_sni() {
    // A dot in SNI makes servers refuse the handshake (RFC 6066 section 3).
    let rig = Rig::answering("hedge: off", |_| Reply::ok("undotted")).await;
    let port = rig.upstream.address().port();
    let dotted = format!("{HOST}.:{port}");
    let mut agent = inside(&rig.hedgerow, &dotted, HOST, trusting(&rig.hedgerow)).await;
    assert_eq!(agent.get_at(&dotted, "/").await.text(), "undotted");
    // And as TLS origination.
    assert_eq!(rig.hedgerow.get(&format!("https://{dotted}/")).await.text(), "undotted");
    let names: Vec<_> = rig.upstream.handshakes().into_iter().map(|own| own.server_name).collect();
    assert!(!names.is_empty() && names.iter().all(|name| name.as_deref() == Some(HOST)), "{names:?}");
}

#[tokio::test]
async fn c044_each_side_agrees_on_its_own_protocol() {
    // HTTP/2 was agreed with the client and then spoken to an upstream that knew none of it.
    let (pki, dns) = (Pki::new(), names().await);
    for (spoken, expected) in [(&[][..], None), (&["http/1.1"][..], Some("http/1.1"))] {
        let acceptor = pki.server_speaking(&[HOST], spoken);
        let upstream = Upstream::on([127, 0, 0, 1]).tls(acceptor).answering(|_| Reply::ok("turned")).await;
        let hedgerow = HedgerowProcess::start(&policy(&pki, &dns, "hedge: off")).await;
        let authority = format!("{HOST}:{}", upstream.address().port());
        let tls = trusting(&hedgerow).offering(&["h2", "http/1.1"]);
        let agent = inside(&hedgerow, &authority, HOST, tls).await;
        assert_eq!(agent.protocol().as_deref(), Some("h2"));
        let (sender, connection) = h2::client::handshake(agent.into_socket()).await.unwrap();
        tokio::spawn(connection);
        let request = http::Request::get(format!("https://{authority}/x")).body(()).unwrap();
        let (response, _) = sender.ready().await.unwrap().send_request(request, true).unwrap();
        assert_eq!(response.await.unwrap().status(), 200);
        assert_eq!(upstream.handshakes()[0].protocol.as_deref(), expected);
        assert_eq!(upstream.requests()[0].header("host"), Some(authority.as_str()));
    }
}

#[tokio::test]
async fn c045_another_host_inside_is_misdirected_and_reaches_nobody() {
    // An allowed name was used to reach other hosts behind the same front.
    let rig = Rig::answering("hedge: off", |_| Reply::ok("right")).await;
    let (authority, port) = (rig.authority(), rig.upstream.address().port());
    for request in [
        format!("GET / HTTP/1.1\r\nHost: b.test:{port}\r\n\r\n"),
        "GET / HTTP/1.1\r\nHost: b.test\r\n\r\n".to_owned(),
        format!("GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n"),
        "GET / HTTP/1.1\r\nHost: a.test:1\r\n\r\n".to_owned(),
        // Absolute form wins over `Host`.
        format!("GET https://b.test:{port}/ HTTP/1.1\r\nHost: {authority}\r\n\r\n"),
        format!("CONNECT b.test:{port} HTTP/1.1\r\nHost: b.test:{port}\r\n\r\n"),
    ] {
        let mut agent = rig.agent().await;
        agent.send(&request).await;
        let answer = agent.read_response().await;
        assert_eq!(problem(&answer), (421, "misdirected".into()), "{request}");
    }
    assert_eq!((rig.upstream.count(), rig.upstream.connections()), (0, 0));
    let mut agent = rig.agent().await;
    agent.send(format!("GET https://{authority}/ HTTP/1.1\r\nHost: b.test\r\n\r\n")).await;
    assert_eq!(agent.read_response().await.text(), "right");
    assert_eq!(rig.upstream.requests()[0].header("host"), Some(authority.as_str()));
}

#[tokio::test]
async fn c048_hosts_at_one_address_have_connections_of_their_own() {
    let (pki, dns) = (Pki::new(), names().await);
    let upstream = Upstream::on([127, 0, 0, 1])
        .tls(pki.server(&[HOST, "b.test"]))
        .answering(|seen| Reply::ok(seen.header("host").unwrap().to_owned()))
        .await;
    let rest = format!("{}\ndefaults: {{ intercept: true, hedge: off }}", base(&pki, &dns));
    let hedgerow = HedgerowProcess::start(&rest).await;
    let port = upstream.address().port();
    for _ in 0..3 {
        for host in [HOST, "b.test"] {
            let authority = format!("{host}:{port}");
            let mut agent = inside(&hedgerow, &authority, host, trusting(&hedgerow)).await;
            assert_eq!(agent.get_at(&authority, "/").await.text(), authority);
        }
    }
    let handshakes = upstream.handshakes();
    assert_eq!(handshakes.len(), 2);
    for seen in upstream.requests() {
        let named = handshakes[seen.connection - 1].server_name.as_deref().unwrap();
        assert!(seen.header("host").unwrap().starts_with(named), "{seen:?} on the connection of {named}");
    }
}
