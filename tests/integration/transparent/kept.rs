//! Answers that are kept or shared under a name, where clients choose the addresses themselves.

use super::{OTHER, TOOL, agent, get, get_at, in_pod, start, with_dns};
use crate::support::dns::{Answer, Dns};
use crate::support::upstream::{Reply, Upstream};

/// The name leads to [`OTHER`]; what is at [`TOOL`] only pretends.
async fn names() -> Dns {
    Dns::start(&[("good.test", Answer::addresses(&["10.78.0.2"]))]).await
}

#[test]
fn an_answer_of_an_address_that_a_client_chose_is_kept_for_that_address_alone() {
    in_pod(async || {
        let keep = |word: &'static str| move |_: &_| Reply::ok(word).header("Cache-Control", "max-age=60");
        let evil = Upstream::on(TOOL).answering(keep("evil")).await;
        let port = evil.address().port();
        let good = Upstream::on(OTHER).port(port).answering(keep("good")).await;
        let dns = names().await;
        let policy = with_dns(&dns, "upstreams: { good: { hosts: [good.test], hedge: off, cache: true } }");
        let hedgerow = start(&policy).await;
        let host = format!("good.test:{port}");
        for is_kept in [false, true] {
            let answers = [
                (get_at(evil.address(), &host).await, "evil"),
                (hedgerow.get(&format!("http://{host}/")).await, "good"),
                (get_at(good.address(), &host).await, "good"),
            ];
            for (answer, word) in answers {
                let status = answer.header("cache-status").unwrap();
                assert_eq!((answer.text(), status.starts_with("hedgerow; hit")), (word, is_kept), "{status}");
            }
        }
        assert_eq!((evil.count(), good.count()), (1, 2));
    });
}

#[test]
fn calls_to_different_addresses_of_a_name_are_not_shared() {
    in_pod(async || {
        let mut evil = Upstream::on(TOOL).start().await;
        let port = evil.address().port();
        let mut good = Upstream::on(OTHER).port(port).start().await;
        let dns = names().await;
        let policy =
            with_dns(&dns, "upstreams: { good: { hosts: [good.test], hedge: off, coalesce: true } }");
        let hedgerow = start(&policy).await;
        let host = format!("good.test:{port}");
        let mut to_evil = agent(evil.address()).await;
        to_evil.send(get(&host, "/")).await;
        let from_evil = evil.next().await;
        let mut to_good = agent(good.address()).await;
        to_good.send(get(&host, "/")).await;
        let from_good = good.next().await;
        let mut by_name = hedgerow.ask("GET", &format!("http://{host}/"), &[], b"").await;
        let from_name = good.next().await;
        from_evil.respond(200, &[], "evil").await;
        from_good.respond(200, &[], "good").await;
        from_name.respond(200, &[], "named").await;
        assert_eq!(to_evil.read_response().await.text(), "evil");
        assert_eq!(to_good.read_response().await.text(), "good");
        assert_eq!(by_name.read_response().await.text(), "named");
    });
}
