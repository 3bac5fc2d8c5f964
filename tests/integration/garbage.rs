//! Bytes that are no HTTP, on both ports: the process lives, says nothing it should not, and lets go of it all.

use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::timeout;

use crate::support::client::Agent;
use crate::support::footprint::Footprint;
use crate::support::hedgerow::HedgerowProcess;
use crate::support::upstream::{Reply, Upstream};

/// The same bytes in each run, so that a failure comes again.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn bytes(&mut self, length: usize) -> Vec<u8> {
        (0..length).map(|_| self.next() as u8).collect()
    }
}

/// Random bytes, and requests that are damaged in one place.
fn messages() -> Vec<Vec<u8>> {
    let mut noise = Noise(0x9E37_79B9_7F4A_7C15);
    let mut all: Vec<Vec<u8>> = (0..40).map(|n| noise.bytes(1 + n * 37)).collect();
    let whole = b"POST http://127.0.0.1:9/a?b HTTP/1.1\r\nHost: 127.0.0.1:9\r\nX-Request-Deadline: 2026-11-29T10:00:30Z\r\n\
                  Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n";
    for _ in 0..120 {
        let mut damaged = whole.to_vec();
        for _ in 0..=noise.next() % 3 {
            let at = noise.next() as usize % damaged.len();
            match noise.next() % 3 {
                0 => damaged[at] = noise.next() as u8,
                1 => damaged.truncate(at + 1),
                _ => damaged.insert(at, noise.next() as u8),
            }
        }
        all.push(damaged);
    }
    all.push(b"CONNECT  HTTP/1.1\r\n\r\n".to_vec());
    all.push(b"GET / HTTP/9.9\r\nHost: x\r\n\r\n".to_vec());
    all.push(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec());
    all.push([&b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"[..], &noise.bytes(300)].concat());
    all.push(vec![0; 100_000]);
    all.push(vec![b'A'; 100_000]);
    all
}

#[tokio::test]
async fn random_bytes_on_both_ports_harm_nobody() {
    let upstream = Upstream::answering(|_| Reply::ok("served")).await;
    let hedgerow = HedgerowProcess::start(
        "limits: { header_timeout: 300ms }\ndefaults: { deadline: { default: 500ms } }",
    )
    .await;
    assert_eq!(hedgerow.get(&upstream.url("/")).await.status, 200);
    let before = Footprint::of(hedgerow.pid());
    for port in [hedgerow.proxy, hedgerow.admin] {
        let sent = messages().into_iter().map(async |message| {
            let mut agent = Agent::connect(port).await;
            // The other side may stop reading in the midst.
            let _ = timeout(Duration::from_secs(5), agent.send(&message)).await;
            agent.all_that_comes().await
        });
        for answer in join_all(sent).await {
            let is_http1 = answer.is_empty() || answer.starts_with(b"HTTP/1.");
            // A SETTINGS frame, to the one that begins as HTTP/2 does.
            let is_http = is_http1 || answer.get(3..9) == Some(&[4, 0, 0, 0, 0, 0]);
            assert!(is_http, "{:?}", String::from_utf8_lossy(&answer));
        }
    }
    assert_eq!(hedgerow.get(&upstream.url("/")).await.text(), "served");
    assert_eq!(hedgerow.ask_admin("GET", "/livez").await.status, 200);
    let log = hedgerow.stderr.text();
    assert!(!log.contains("panicked") && !log.contains("internal error"), "{log}");
    assert!(!hedgerow.stdout.text().contains("\"internal\""));
    hedgerow.until_status(|status| status["connections"] == 0 && status["in_flight"] == 0).await;
    let after = Footprint::of(hedgerow.pid());
    assert!(after.descriptors <= before.descriptors + 4, "{before:?} {after:?}");
}
