//! HTTP/2 by prior knowledge on the way in, and upstreams that speak it.

use std::net::{IpAddr, SocketAddr};

use super::{TOOL, connection, in_pod, start};
use crate::support::client::Agent;
use crate::support::http2::{Http2Agent, Http2Upstream};

/// An upstream that speaks HTTP/2 in clear text and answers every request with the same word.
pub async fn upstream(ip: impl Into<IpAddr>, port: u16, word: &'static str) -> Http2Upstream {
    Http2Upstream::on(ip).port(port).serving(move |stream| stream.respond(200, &[], word)).await
}

/// An agent that speaks HTTP/2 at once, and believes to be connected to `to`.
pub async fn client(to: SocketAddr) -> Http2Agent {
    Http2Agent::over(Agent::over(connection(to).await)).await
}

#[test]
fn requests_over_http2_go_to_the_address_under_the_policies_of_their_names() {
    in_pod(async || {
        // Its client knows that it speaks HTTP/2, or would not.
        let tool = Http2Upstream::on(TOOL)
            .serving(async |stream| {
                let host = stream.uri.authority().expect("an authority").to_string();
                stream.respond(200, &[], host).await;
            })
            .await;
        let hedgerow = start("upstreams: { a: { hosts: [a.test] }, b: { hosts: [b.test] } }").await;
        let client = client(tool.address()).await;
        for host in ["a.test", "b.test", "a.test"] {
            let answer = client.get(&format!("http://{host}/")).await;
            assert_eq!((answer.status, answer.text()), (200, host));
        }
        for (upstream, count) in [("a", 2.0), ("b", 1.0)] {
            let labels = [("upstream", upstream), ("code", "200")];
            hedgerow.until_metrics(|m| m.value("hedgerow_requests_total", &labels) == count).await;
        }
        let open = [("listener", "transparent")];
        assert_eq!(hedgerow.metrics().await.value("hedgerow_connections_open", &open), 1.0);
    });
}
