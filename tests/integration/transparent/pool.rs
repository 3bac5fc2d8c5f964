//! A connection to an address that a client chose is not one to the host that it claimed to mean.

use super::http2::{client, upstream};
use super::{OTHER, TOOL, get_at, in_pod, start, with_dns};
use crate::support::dns::{Answer, Dns};
use crate::support::netns::{ip, rules};
use crate::support::upstream::{Reply, Upstream};

/// The name leads to [`OTHER`]; what is at [`TOOL`] only pretends.
async fn names() -> Dns {
    Dns::start(&[("good.test", Answer::addresses(&["10.78.0.2"]))]).await
}

#[test]
fn a_kept_connection_to_a_pretender_is_not_used_for_the_name() {
    in_pod(async || {
        let evil = Upstream::on(TOOL).answering(|_| Reply::ok("evil")).await;
        let port = evil.address().port();
        let good = Upstream::on(OTHER).port(port).answering(|_| Reply::ok("good")).await;
        let dns = names().await;
        let hedgerow = start(&with_dns(&dns, "")).await;
        let host = format!("good.test:{port}");
        let url = format!("http://{host}/");
        for _ in 0..3 {
            assert_eq!(get_at(evil.address(), &host).await.text(), "evil");
            assert_eq!(hedgerow.get(&url).await.text(), "good");
            assert_eq!(get_at(good.address(), &host).await.text(), "good");
        }
        // Each of the three ways kept its own.
        assert_eq!((evil.connections(), good.connections()), (1, 2));
    });
}

#[test]
fn a_shared_connection_to_a_pretender_is_not_used_for_the_name() {
    in_pod(async || {
        let evil = upstream(TOOL, 0, "evil").await;
        let port = evil.address().port();
        let good = upstream(OTHER, port, "good").await;
        let dns = names().await;
        let policy = with_dns(&dns, "upstreams: { good: { hosts: [good.test], origin: h2c } }");
        let hedgerow = start(&policy).await;
        let host = format!("good.test:{port}");
        let url = format!("http://{host}/");
        for _ in 0..3 {
            assert_eq!(get_at(evil.address(), &host).await.text(), "evil");
            assert_eq!(hedgerow.get(&url).await.text(), "good");
            assert_eq!(get_at(good.address(), &host).await.text(), "good");
            let answer = client(evil.address()).await.get(&url).await;
            assert_eq!((answer.status, answer.text()), (200, "evil"));
        }
        assert_eq!((evil.tally().connections, good.tally().connections), (1, 2));
    });
}

#[test]
fn nobody_waits_for_a_dial_to_an_address_that_another_client_chose() {
    // Requests of a host share its dials. One to where nobody answers was waited for by all.
    in_pod(async || {
        let evil = upstream(TOOL, 0, "evil").await;
        let port = evil.address().port();
        let _good = upstream(OTHER, port, "good").await;
        let dns = names().await;
        let stages = "origin: h2c, connect_timeout: 1m, hedge: off";
        let policy = with_dns(&dns, &format!("upstreams: {{ good: {{ hosts: [good.test], {stages} }} }}"));
        let hedgerow = start(&policy).await;
        ip("addr add 10.78.0.66/32 dev lo");
        rules(
            "table inet void { chain input { type filter hook input priority 0; ip daddr 10.78.0.66 counter drop; }; }",
        );
        let host = format!("good.test:{port}");
        // From here on the host is known to speak HTTP/2, so that dials are worth waiting for.
        assert_eq!(get_at(evil.address(), &host).await.text(), "evil");
        let lost = tokio::spawn({
            let (void, host) = (([10, 78, 0, 66], port).into(), host.clone());
            async move { get_at(void, &host).await }
        });
        let in_flight = [("upstream", "good")];
        hedgerow.until_metrics(|m| m.value("hedgerow_bulkhead_in_flight", &in_flight) == 1.0).await;
        let answer = hedgerow.get(&format!("http://{host}/")).await;
        assert_eq!(answer.text(), "good");
        lost.abort();
    });
}
