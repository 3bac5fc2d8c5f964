//! One bad upstream is its own callers' trouble and nobody else's.

use std::time::Duration;

use tokio::time::Instant;

use crate::support::client::{self, absolute};
use crate::support::hedgerow::HedgerowProcess;
use crate::support::policy::named;
use crate::support::upstream::{Reply, Upstream};

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

async fn times(proxy: &HedgerowProcess, upstream: &Upstream, calls: usize) -> Vec<Duration> {
    let mut agent = proxy.agent().await;
    let mut times = Vec::with_capacity(calls);
    for _ in 0..calls {
        let began = Instant::now();
        assert_eq!(agent.get(&upstream.url("/")).await.status, 200);
        times.push(began.elapsed());
    }
    times.sort();
    times
}

/// An upstream that hangs with its limit and its queue full costs its neighbours no time, and its own further
/// callers only a refusal.
#[tokio::test]
async fn c077_a_hung_upstream_does_not_slow_another() {
    let hung = Upstream::answering(|_| Reply::hang()).await;
    let well = Upstream::answering(|_| Reply::ok("")).await;
    let policy = format!(
        "upstreams: {{ {}, {} }}",
        named(
            "hung",
            hung.address(),
            "hedge: off, breaker: off, bulkhead: { max_concurrent: 50, max_queue: 50 }"
        ),
        named("well", well.address(), "hedge: off"),
    );
    let proxy = HedgerowProcess::start(&policy).await;
    times(&proxy, &well, 50).await;
    let before = times(&proxy, &well, 300).await;

    let mut crowd = client::crowd(proxy.proxy, 100).await;
    for agent in &mut crowd {
        agent.send(absolute("GET", &hung.url("/"), &[], b"")).await;
    }
    let queued = |metrics: &crate::support::hedgerow::Metrics| {
        metrics.value("hedgerow_bulkhead_queued", &[("upstream", "hung")]) == 50.0
    };
    proxy.until_metrics(queued).await;
    let began = Instant::now();
    for _ in 0..20 {
        assert_eq!(proxy.get(&hung.url("/")).await.json()["error"], "bulkhead_full");
    }
    // Each that waited would do so for half a minute.
    assert!(began.elapsed() < ms(15_000), "{:?}", began.elapsed());

    let after = times(&proxy, &well, 300).await;
    // The medians: on a loaded machine the tails are the machine's. Waiting for the neighbour would cost seconds.
    assert!(after[150] < before[150] * 3 + ms(250), "{:?} became {:?}", before[150], after[150]);
    assert_eq!((hung.count(), hung.aborted()), (50, 0));
}

/// A name that does not resolve, and an address that does not answer, keep nobody else waiting.
#[tokio::test]
async fn a_mute_name_server_for_one_name_does_not_hold_up_another() {
    use crate::support::dns::{Answer, Dns};
    let well = Upstream::answering(|_| Reply::ok("")).await;
    let dns =
        Dns::start(&[("mute.test", Answer::Mute), ("well.test", Answer::addresses(&["127.0.0.1"]))]).await;
    let policy = format!("dns: {{ servers: [\"{}\"], timeout: 25s }}", dns.address());
    let proxy = HedgerowProcess::start(&policy).await;
    let mut crowd = client::crowd(proxy.proxy, 50).await;
    for agent in &mut crowd {
        agent.send(absolute("GET", "http://mute.test/", &[], b"")).await;
    }
    dns.until_asked("mute.test", 1).await;
    let began = Instant::now();
    let answer = proxy.get(&format!("http://well.test:{}/", well.address().port())).await;
    assert_eq!(answer.status, 200);
    assert!(began.elapsed() < ms(15_000), "{:?}", began.elapsed());
}
