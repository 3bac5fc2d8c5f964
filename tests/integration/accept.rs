//! Which connections are taken.

use futures_util::future::join_all;

use crate::support::client::Agent;
use crate::support::hedgerow::HedgerowProcess;
use crate::support::upstream::{Reply, Upstream};

// The kernel gives a port to several connections that lead to different places. A client with the port of one
// of hedgerow's own sockets was taken for a connection that a redirect rule had sent back, and closed.
#[tokio::test]
async fn a_client_may_have_the_port_of_one_of_hedgerows_own_sockets() {
    let upstream = Upstream::on([0, 0, 0, 0]).answering(|_| Reply::ok("")).await;
    let port = upstream.address().port();
    let hedgerow = HedgerowProcess::start("{}").await;
    // Hundreds of own sockets, idle in their pools, make it likely for hundreds of clients.
    let mut agent = hedgerow.agent().await;
    for n in 0..500 {
        let url = format!("http://127.2.{}.{}:{port}/", n / 250, 1 + n % 250);
        assert_eq!(agent.get(&url).await.status, 200);
    }
    let url = format!("http://127.2.0.1:{port}/");
    for _ in 0..10 {
        let clients = (0..50).map(async |_| Agent::connect(hedgerow.proxy).await.get(&url).await.status);
        assert!(join_all(clients).await.iter().all(|status| *status == 200));
    }
    assert!(!hedgerow.stderr.text().contains("loop"), "{}", hedgerow.stderr.text());
}
