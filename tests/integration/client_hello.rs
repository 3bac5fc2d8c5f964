//! What agents, and what is none, may send where interception expects a ClientHello.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::Instant;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;

use crate::support::client::{Agent, End};
use crate::support::footprint::Footprint;
use crate::support::hedgerow::HedgerowProcess;
use crate::support::intercept::{HOST, Rig, inside, intercepting, trusting};
use crate::support::socket::Socket;
use crate::support::soon;
use crate::support::upstream::Reply;

const GREASE: u16 = 0x1a1a;
const AES_128_GCM: u16 = 0x1301;
const RC4: u16 = 0x0005;
const TLS_1_0: u16 = 0x0301;
const TLS_1_1: u16 = 0x0302;
const TLS_1_2: u16 = 0x0303;
const TLS_1_3: u16 = 0x0304;

/// The two kinds of CONNECT: by name, and by address, where the hello is looked at ahead for its name.
const AUTHORITIES: [&str; 2] = ["a.test:443", "127.0.0.1:443"];

/// A tunnel whose inside is expected to be TLS.
async fn tunnel(hedgerow: &HedgerowProcess, authority: &str) -> Agent {
    let mut agent = hedgerow.agent().await;
    assert_eq!(agent.open_tunnel(authority).await.status, 200);
    agent
}

fn prefixed(width: usize, content: &[u8]) -> Vec<u8> {
    let length = (content.len() as u32).to_be_bytes();
    [&length[4 - width..], content].concat()
}

fn numbers(values: &[u16]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_be_bytes()).collect()
}

fn extension(kind: u16, content: &[u8]) -> Vec<u8> {
    [&kind.to_be_bytes()[..], &prefixed(2, content)].concat()
}

/// A ClientHello in one record (RFC 8446 section 4.1.2).
fn hello(legacy_version: u16, suites: &[u16], extensions: &[Vec<u8>]) -> Vec<u8> {
    let body = [
        &legacy_version.to_be_bytes()[..],
        &[7; 32],
        &prefixed(1, &[9; 32]),
        &prefixed(2, &numbers(suites)),
        &prefixed(1, &[0]),
        &prefixed(2, &extensions.concat()),
    ]
    .concat();
    let message = [&[1][..], &prefixed(3, &body)].concat();
    [&[0x16, 3, 1][..], &prefixed(2, &message)].concat()
}

/// What a client of today says beside its versions.
fn usual() -> Vec<Vec<u8>> {
    let name = prefixed(2, &[&[0][..], &prefixed(2, HOST.as_bytes())].concat());
    vec![
        extension(0, &name),
        extension(10, &prefixed(2, &numbers(&[GREASE, 29, 23]))),
        extension(13, &prefixed(2, &numbers(&[0x0403, 0x0804]))),
        extension(
            51,
            &prefixed(
                2,
                &[numbers(&[GREASE]), prefixed(2, &[0]), numbers(&[29]), prefixed(2, &[5; 32])].concat(),
            ),
        ),
        extension(
            16,
            &prefixed(
                2,
                &[prefixed(1, &[0x1a, 0x1a]), prefixed(1, b"h2"), prefixed(1, b"http/1.1")].concat(),
            ),
        ),
    ]
}

fn versions(of: &[u16]) -> Vec<u8> {
    extension(43, &prefixed(1, &numbers(of)))
}

/// The record that begins an answer: its kind, and the first byte of its content.
async fn first_record(agent: &mut Agent) -> (u8, u8) {
    let head = agent.read_exactly(6).await;
    (head[0], head[5])
}

const SERVER_HELLO: (u8, u8) = (0x16, 2);

/// The fatal alert that a bad hello was refused with; `None` when there was only an end.
async fn refusal(agent: Agent) -> Option<u8> {
    let said = agent.all_that_comes().await;
    if said.is_empty() {
        return None;
    }
    let [0x15, 3, _, 0, 2, 2, alert] = said[..] else { panic!("no alert: {said:?}") };
    Some(alert)
}

/// A connection that writes single bytes.
struct OneByOne(TcpStream);

impl AsyncRead for OneByOne {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl AsyncWrite for OneByOne {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let first = bytes.len().min(1);
        Pin::new(&mut self.0).poll_write(cx, &bytes[..first])
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

async fn get_through(connector: &TlsConnector, tunnel: Agent, authority: &str) -> String {
    let Socket::Plain(tcp) = tunnel.into_socket() else { panic!("TLS already") };
    let name = ServerName::try_from(HOST).expect("a valid name");
    let mut tls = soon(connector.connect(name, OneByOne(tcp))).await.expect("a handshake byte by byte");
    let request = format!("GET / HTTP/1.1\r\nHost: {authority}\r\nConnection: close\r\n\r\n");
    tls.write_all(request.as_bytes()).await.expect("the connection carries bytes");
    tls.flush().await.expect("the connection carries bytes");
    let mut answer = String::new();
    soon(tls.read_to_string(&mut answer)).await.expect("the connection carries bytes");
    answer
}

#[tokio::test]
async fn a_hello_may_come_byte_by_byte_and_in_many_records() {
    let rig = Rig::answering("hedge: off", |_| Reply::ok("in pieces")).await;
    for fragment in [None, Some(32)] {
        let connector = trusting(&rig.hedgerow).in_fragments(fragment).connector();
        let agent = tunnel(&rig.hedgerow, &rig.authority()).await;
        let answer = get_through(&connector, agent, &rig.authority()).await;
        assert!(answer.ends_with("in pieces"), "{answer}");
    }
}

#[tokio::test]
async fn a_hello_larger_than_a_record_is_read() {
    let rig = Rig::answering("hedge: off", |_| Reply::ok("large")).await;
    let mut protocols: Vec<String> = (0..2500).map(|i| format!("proto-{i:04}")).collect();
    protocols.push("http/1.1".into());
    let protocols: Vec<&str> = protocols.iter().map(String::as_str).collect();
    let tls = trusting(&rig.hedgerow).offering(&protocols);
    let mut agent = inside(&rig.hedgerow, &rig.authority(), HOST, tls).await;
    assert_eq!(agent.protocol().as_deref(), Some("http/1.1"));
    assert_eq!(agent.get_at(&rig.authority(), "/").await.text(), "large");
}

#[tokio::test]
async fn values_that_mean_nothing_are_passed_over() {
    let hedgerow = intercepting("").await;
    for authority in AUTHORITIES {
        let mut extensions = usual();
        extensions.insert(0, extension(GREASE, &[]));
        extensions.push(versions(&[GREASE, TLS_1_3, TLS_1_2]));
        // As browsers pad (RFC 7685).
        extensions.push(extension(21, &[0; 600]));
        extensions.push(extension(0x2a2a, &[0]));
        let mut agent = tunnel(&hedgerow, authority).await;
        agent.send(hello(TLS_1_2, &[GREASE, AES_128_GCM, 0xc02b], &extensions)).await;
        assert_eq!(first_record(&mut agent).await, SERVER_HELLO, "{authority}");
    }
}

#[tokio::test]
async fn c021_a_hello_may_come_in_one_packet_with_its_connect() {
    let hedgerow = intercepting("").await;
    for authority in AUTHORITIES {
        let connect = format!("CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n");
        let hello = hello(TLS_1_2, &[AES_128_GCM], &[usual(), vec![versions(&[TLS_1_3])]].concat());
        let mut agent = hedgerow.agent().await;
        agent.send([connect.as_bytes(), &hello].concat()).await;
        assert_eq!(agent.read_response_to("CONNECT").await.status, 200);
        assert_eq!(first_record(&mut agent).await, SERVER_HELLO, "{authority}");
    }
}

#[tokio::test]
async fn what_we_share_nothing_with_is_told_so() {
    const HANDSHAKE_FAILURE: u8 = 40;
    const PROTOCOL_VERSION: u8 = 70;
    let hedgerow = intercepting("").await;
    let modern = |with: &[u16]| [usual(), vec![versions(with)]].concat();
    for authority in AUTHORITIES {
        for (what, bytes, alert) in [
            ("no common suite in 1.3", hello(TLS_1_2, &[RC4], &modern(&[TLS_1_3])), HANDSHAKE_FAILURE),
            ("no common suite in 1.2", hello(TLS_1_2, &[RC4], &usual()), HANDSHAKE_FAILURE),
            ("TLS 1.0", hello(TLS_1_0, &[RC4, 0x002f, 0xc013], &usual()), PROTOCOL_VERSION),
            ("TLS 1.1", hello(TLS_1_1, &[0x002f, 0xc013], &usual()), PROTOCOL_VERSION),
            ("1.1 by extension", hello(TLS_1_2, &[0xc013], &modern(&[TLS_1_1, TLS_1_0])), PROTOCOL_VERSION),
        ] {
            let mut agent = tunnel(&hedgerow, authority).await;
            agent.send(bytes).await;
            assert_eq!(refusal(agent).await, Some(alert), "{what} to {authority}");
        }
    }
    // A refusal for another reason than the certificate steps nobody down.
    assert_eq!(hedgerow.metrics().await.value("hedgerow_intercept_declined_total", &[]), 0.0);
    inside(&hedgerow, "a.test:443", HOST, trusting(&hedgerow)).await;
}

/// Hellos that are none, in the shapes that parsers trip over.
fn malformed() -> Vec<(&'static str, Vec<u8>)> {
    let good = hello(TLS_1_2, &[AES_128_GCM], &[usual(), vec![versions(&[TLS_1_3])]].concat());
    let changed = |at: usize, to: u8| {
        let mut bytes = good.clone();
        bytes[at] = to;
        bytes
    };
    let mut endless = Vec::new();
    for i in 0..64 {
        let part = if i == 0 { [&[1, 0x0f, 0xff, 0xff][..], &[0; 16_000]].concat() } else { vec![0; 16_000] };
        endless.extend([&[0x16, 3, 1][..], &prefixed(2, &part)].concat());
    }
    vec![
        ("garbage in a record", [&[0x16, 3, 1][..], &prefixed(2, &[0xa5; 300])].concat()),
        ("an empty record", [&[0x16, 3, 1, 0, 0][..], &[0; 64]].concat()),
        ("a record over its limit", [&[0x16, 3, 1, 0xff, 0xff][..], &[1; 70_000]].concat()),
        ("a message of a megabyte", endless),
        ("a server's hello", changed(5, 2)),
        ("a length that lies", changed(8, 0x01)),
        ("a session too long", changed(43, 0xff)),
        ("no suites", hello(TLS_1_2, &[], &usual())),
        ("an extension cut short", hello(TLS_1_2, &[AES_128_GCM], &[vec![0, 0, 0, 50, 0]])),
        ("an extension twice", hello(TLS_1_2, &[AES_128_GCM], &[usual(), usual()].concat())),
        ("data before the handshake", [&[0x16, 3, 3, 0, 1, 1][..], &[0x17, 3, 3, 0, 1, 0]].concat()),
    ]
}

#[tokio::test]
async fn what_is_no_hello_is_refused_by_an_alert_or_an_end() {
    let hedgerow = intercepting("limits: { header_timeout: 1m }").await;
    for (what, bytes) in malformed() {
        for authority in AUTHORITIES {
            let mut agent = tunnel(&hedgerow, authority).await;
            let begin = Instant::now();
            soon(agent.send(&bytes)).await;
            // Nobody waits for what is missing: the client has closed.
            refusal(agent).await;
            assert!(
                begin.elapsed() < Duration::from_secs(15),
                "{what} to {authority}: {:?}",
                begin.elapsed()
            );
        }
    }
    assert!(!hedgerow.stderr.text().contains("panicked"), "{}", hedgerow.stderr.text());
    inside(&hedgerow, "a.test:443", HOST, trusting(&hedgerow)).await;
}

#[tokio::test]
async fn a_client_that_stops_within_its_hello_is_closed_in_time() {
    const LIMIT: Duration = Duration::from_secs(1);
    // The usual limit, which would hold if the policy's did not.
    const USUAL: Duration = Duration::from_secs(10);
    let hedgerow = intercepting("limits: { header_timeout: 1s }").await;
    let good = hello(TLS_1_2, &[AES_128_GCM], &[usual(), vec![versions(&[TLS_1_3])]].concat());
    let stops = async |authority: &str, said: usize| {
        let begin = Instant::now();
        let mut agent = tunnel(&hedgerow, authority).await;
        agent.send(&good[..said]).await;
        if said == good.len() {
            assert_eq!(first_record(&mut agent).await, SERVER_HELLO);
            agent.all_that_comes_without_closing().await;
        } else {
            assert_eq!(agent.ended().await, End::Closed, "{said} bytes to {authority}");
        }
        let waited = begin.elapsed();
        assert!((LIMIT..USUAL).contains(&waited), "{said} bytes to {authority}: {waited:?}");
    };
    for authority in AUTHORITIES {
        // The last is a whole one, behind which nothing comes.
        let all = [3, 5, 6, 100, good.len() - 1, good.len()].map(|said| stops(authority, said));
        futures_util::future::join_all(all).await;
    }
}

#[tokio::test]
async fn hundreds_of_bad_hellos_leave_nothing_behind() {
    let hedgerow = Arc::new(intercepting("").await);
    let round = async || {
        let bad = malformed();
        for chunk in 0..10 {
            let calls = (0..20).map(|i| {
                let (hedgerow, bytes) = (hedgerow.clone(), bad[(chunk * 20 + i) % bad.len()].1.clone());
                async move {
                    let mut agent = tunnel(&hedgerow, AUTHORITIES[i % 2]).await;
                    soon(agent.send(bytes)).await;
                    refusal(agent).await;
                }
            });
            futures_util::future::join_all(calls).await;
        }
        hedgerow.until_status(|status| status["connections"] == 0).await;
        Footprint::of(hedgerow.pid())
    };
    let first = round().await;
    let second = round().await;
    // The admin port's own connections come and go.
    assert!(second.descriptors < first.descriptors + 10, "{first:?} {second:?}");
    assert!(second.resident_kib < first.resident_kib + 4096, "{first:?} {second:?}");
    // Whoever is well-behaved is served, here with the refusal of a name that leads nowhere.
    let mut agent = inside(&hedgerow, "a.invalid:443", "a.invalid", trusting(&hedgerow)).await;
    assert_eq!(agent.get_at("a.invalid", "/").await.json()["error"], "dns_failed");
}
