//! HTTP/2 by prior knowledge on the way in, and upstreams that speak it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use h2::client::SendRequest;
use http::{Request, Response};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use super::{TOOL, connection, in_pod, start};
use crate::support::soon;
use crate::support::upstream::{Reply, Upstream};

/// An upstream that speaks HTTP/2 in clear text and answers every request with the same word.
pub struct Http2Upstream {
    address: SocketAddr,
    connections: Arc<AtomicUsize>,
    accepting: JoinHandle<()>,
}

impl Http2Upstream {
    /// Listens at this address.
    pub async fn start(at: SocketAddr, word: &'static str) -> Self {
        let listener = TcpListener::bind(at).await.expect("a local address can be bound");
        let address = listener.local_addr().expect("a bound listener has an address");
        let connections = Arc::new(AtomicUsize::new(0));
        let count = connections.clone();
        let accepting = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                count.fetch_add(1, Ordering::Relaxed);
                tokio::spawn(async move {
                    let mut http = h2::server::handshake(stream).await?;
                    while let Some(request) = http.accept().await {
                        let (_, mut respond) = request?;
                        let mut body = respond.send_response(Response::new(()), false)?;
                        body.send_data(Bytes::from_static(word.as_bytes()), true)?;
                    }
                    Ok::<_, h2::Error>(())
                });
            }
        });
        Self { address, connections, accepting }
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Connections ever accepted.
    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }
}

impl Drop for Http2Upstream {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

/// An agent that speaks HTTP/2 at once, and believes to be connected to `to`.
pub async fn client(to: SocketAddr) -> SendRequest<Bytes> {
    let handshake = h2::client::handshake(connection(to).await);
    let (sender, connection) = soon(handshake).await.expect("HTTP/2 is spoken");
    tokio::spawn(connection);
    sender
}

/// GET of this URL: its status and its body.
pub async fn ask(client: &mut SendRequest<Bytes>, url: &str) -> (u16, String) {
    let request = Request::get(url).body(()).expect("a valid request");
    soon(async {
        let (response, _) = client.clone().ready().await?.send_request(request, true)?;
        let (head, mut body) = response.await?.into_parts();
        let mut text = Vec::new();
        while let Some(data) = body.data().await {
            text.extend_from_slice(&data?);
        }
        Ok::<_, h2::Error>((head.status.as_u16(), String::from_utf8(text).expect("text")))
    })
    .await
    .expect("an answer")
}

#[test]
fn requests_over_http2_go_to_the_address_under_the_policies_of_their_names() {
    in_pod(async || {
        let tool = Upstream::on(TOOL).answering(|seen| Reply::ok(seen.header("host").unwrap())).await;
        let hedgerow = start("upstreams: { a: { hosts: [a.test] }, b: { hosts: [b.test] } }").await;
        let mut client = client(tool.address()).await;
        for host in ["a.test", "b.test", "a.test"] {
            assert_eq!(ask(&mut client, &format!("http://{host}/")).await, (200, host.into()));
        }
        for (upstream, count) in [("a", 2.0), ("b", 1.0)] {
            let labels = [("upstream", upstream), ("code", "200")];
            hedgerow.until_metrics(|m| m.value("hedgerow_requests_total", &labels) == count).await;
        }
        let open = [("listener", "transparent")];
        assert_eq!(hedgerow.metrics().await.value("hedgerow_connections_open", &open), 1.0);
    });
}
