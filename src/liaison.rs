//! Between this pod's guards and the fleet's: tells what they have to tell, and takes in what others say.
//!
//! All of it happens beside the requests, in one task of four loops that do not wait for each other: words of other pods
//! and the sign that the process is alive; news of breakers; leases of rates; and from time to time what may have been
//! missed. Each loop asks one thing after another or a bounded number at once, and each question has an end in
//! time ([`crate::fleet`]), so a server that hangs holds up none but the loop that found out.

use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{self, StreamExt};
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};

use crate::config::RateLimit;
use crate::fleet::{Id, Link};
use crate::pipeline::Proxy;
use crate::policy::breaker::BreakerCell;
use crate::policy::breaker::shared::{News, Word, quorum};
use crate::policy::rate_limit::RateLimiter;
use crate::upstream::registry::Upstream;

/// How often leases are looked at.
pub(crate) const TICK: Duration = Duration::from_millis(250);
/// How often leave to probe is prolonged: it lasts for ten seconds.
pub(crate) const PROLONG: Duration = Duration::from_secs(3);
/// How often breakers are read again that were in use, by a few pods and by many thousands.
pub(crate) const RECONCILE: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(120));
/// Questions at once.
const AT_ONCE: usize = 32;
/// For a pod that leaves to say so.
const FAREWELL: Duration = Duration::from_millis(200);

/// A breaker that pods share, with its upstream.
type SharedBreaker = (Arc<Upstream>, Arc<BreakerCell>);

/// Does the work until the future is dropped, while the policy has something shared.
pub async fn run(proxy: Arc<Proxy>) {
    let fleet = proxy.registry().fleet();
    let Some(mut ears) = fleet.ears() else { return };
    loop {
        fleet.follow(proxy.snapshot().shared_state.as_ref());
        if fleet.link().is_none() {
            fleet.rung().await;
            continue;
        }
        tokio::select! {
            () = pass_on(&proxy) => {}
            () = async { tokio::join!(listen(&proxy, &mut ears), lease(&proxy), look_again(&proxy)); } => {}
        }
    }
}

/// Gives back what others can use. Takes a fifth of a second at most.
pub async fn leave(proxy: &Proxy) {
    let Some(link) = proxy.registry().fleet().up() else { return };
    let goodbye = async {
        stream::iter(shared_rates(proxy))
            .for_each_concurrent(AT_ONCE, |(cfg, rate)| {
                let link = &link;
                async move { rate.give_back(link, &cfg).await }
            })
            .await;
        // What this pod has seen fail counts no more.
        let breakers = shared_breakers(proxy, Duration::MAX);
        breakers.iter().for_each(|(_, breaker)| breaker.recant());
        tell(&link, proxy.registry().fleet().pod(), breakers).await;
        link.leave(proxy.registry().fleet().pod()).await
    };
    if timeout(FAREWELL, goodbye).await.is_err() {
        tracing::debug!("the other pods were not told that this one leaves; they will notice");
    }
}

/// Takes in the words of others.
async fn listen(proxy: &Proxy, ears: &mut mpsc::Receiver<String>) {
    let fleet = proxy.registry().fleet();
    let mut ticks = interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            now = ticks.tick() => fleet.tick(now),
            Some(word) = ears.recv() => take_in(proxy, &word),
        }
    }
}

fn take_in(proxy: &Proxy, text: &str) {
    if let Some(id) = text.strip_prefix("rate ").map(Id::from_words) {
        let upstreams = proxy.registry().at(&proxy.snapshot(), &id.authority);
        let rates = upstreams.iter().flat_map(|upstream| upstream.shared_rates());
        return rates.for_each(|(_, rate)| rate.is_called_on(Instant::now()));
    }
    let Some((_, id, word)) = Word::parse(text) else {
        return tracing::debug!(text, "another pod said something that this version does not know");
    };
    // This pod's own as well: a host that is another one's backup has two breakers here.
    for (upstream, breaker) in breakers_of(proxy, &id) {
        hear(&upstream, &breaker, word);
    }
}

fn hear(upstream: &Upstream, breaker: &BreakerCell, word: Word) {
    if let Some(state) = breaker.hear(word, Instant::now()) {
        upstream.breaker_moved(state, "fleet");
    }
}

/// Passes on what breakers have to tell, and when words may have been lost, asks how things are. Follows the policy
/// to another server, and ends when there is none any more.
async fn pass_on(proxy: &Proxy) {
    let fleet = proxy.registry().fleet();
    let mut turn = 0;
    loop {
        fleet.rung().await;
        fleet.follow(proxy.snapshot().shared_state.as_ref());
        if fleet.link().is_none() {
            return;
        }
        let Some(link) = fleet.up() else { continue };
        let news = fleet.answer().into_iter().flat_map(|id| breakers_of(proxy, &id));
        tell(&link, fleet.pod(), news.collect()).await;
        let now_turn = fleet.turn(Instant::now());
        if turn != now_turn {
            turn = now_turn;
            // The others are read when they are called.
            read(&link, &shared_breakers(proxy, RECONCILE.0)).await;
            let all = shared_breakers(proxy, Duration::MAX);
            all.iter().for_each(|(_, breaker)| breaker.accuse_again());
            tell(&link, fleet.pod(), all).await;
        }
    }
}

async fn tell(link: &Link, pod: &str, breakers: Vec<SharedBreaker>) {
    stream::iter(breakers)
        .for_each_concurrent(AT_ONCE, |(upstream, breaker)| async move {
            let Some(news) = breaker.take_news() else { return };
            let (least, mut pods) = (link.settings().quorum, link.pods());
            // One of many that have just started must not take itself for all of them.
            if matches!(news, News::Tripped { .. }) && pods < least {
                pods = link.count(pod).await.unwrap_or(least);
            }
            match breaker.tell(link, news, quorum(least, pods)).await {
                Ok(word) => hear(&upstream, &breaker, word),
                Err(fault) => {
                    breaker.put_back(news);
                    upstream.is_refused_by_fleet(&fault);
                }
            }
        })
        .await;
}

async fn read(link: &Link, breakers: &[SharedBreaker]) {
    stream::iter(breakers)
        .for_each_concurrent(AT_ONCE, |(upstream, breaker)| async move {
            match breaker.read(link).await {
                Ok(word) => hear(upstream, breaker, word),
                Err(fault) => upstream.is_refused_by_fleet(&fault),
            }
        })
        .await;
}

/// Keeps the leases of rates as large as the calls need.
async fn lease(proxy: &Proxy) {
    let fleet = proxy.registry().fleet();
    loop {
        sleep(TICK).await;
        let now = Instant::now();
        // Those whose lease has ended go by another pace, and those who wait for it must hear that: also while
        // nobody is there to ask.
        let due: Vec<_> = upstreams_with(proxy, Upstream::shared_rates)
            .filter(|(_, (cfg, rate))| rate.is_due(cfg, now))
            .collect();
        let Some(link) = fleet.up() else { continue };
        stream::iter(due)
            .for_each_concurrent(AT_ONCE, |(upstream, (cfg, rate))| {
                let link = &link;
                async move {
                    if let Err(fault) = rate.renew(link, &cfg).await {
                        upstream.is_refused_by_fleet(&fault);
                    }
                }
            })
            .await;
    }
}

/// Prolongs the leave to probe, and reads breakers again whose words may have been lost on the way.
async fn look_again(proxy: &Proxy) {
    let fleet = proxy.registry().fleet();
    let mut last = Instant::now();
    loop {
        // Pods that were started together need not ask together.
        sleep(PROLONG.mul_f64(0.8 + 0.2 * fastrand::f64())).await;
        let Some(link) = fleet.up() else { continue };
        stream::iter(shared_breakers(proxy, Duration::MAX))
            .for_each_concurrent(AT_ONCE, |(upstream, breaker)| {
                let link = &link;
                async move {
                    match breaker.prolong(link).await {
                        Ok(Some(word)) => hear(&upstream, &breaker, word),
                        Ok(None) => {}
                        Err(fault) => upstream.is_refused_by_fleet(&fault),
                    }
                }
            })
            .await;
        let every = (Duration::from_millis(6) * fleet.pods()).clamp(RECONCILE.0, RECONCILE.1);
        if last.elapsed() >= every {
            last = Instant::now();
            read(&link, &shared_breakers(proxy, every)).await;
        }
    }
}

/// The breakers that the fleet calls `id`: a host may be an upstream in its own right and another one's backup.
fn breakers_of(proxy: &Proxy, id: &Id) -> Vec<SharedBreaker> {
    let config = proxy.snapshot();
    let upstreams = proxy.registry().at(&config, &id.authority).into_iter();
    upstreams
        .flat_map(|upstream| {
            upstream.shared_breakers().into_iter().map(move |found| (upstream.clone(), found))
        })
        .filter(|(_, (route, _))| *route == id.route)
        .map(|(upstream, (_, breaker))| (upstream, breaker))
        .collect()
}

/// All breakers that are shared, of upstreams that were used within `recently`.
fn shared_breakers(proxy: &Proxy, recently: Duration) -> Vec<SharedBreaker> {
    let now = Instant::now();
    let registry = proxy.registry();
    upstreams_with(proxy, Upstream::shared_breakers)
        .filter(|(upstream, _)| registry.idle_time(upstream, now) <= recently)
        .map(|(upstream, (_, breaker))| (upstream, breaker))
        .collect()
}

fn shared_rates(proxy: &Proxy) -> Vec<(RateLimit, Arc<RateLimiter>)> {
    upstreams_with(proxy, Upstream::shared_rates).map(|(_, rate)| rate).collect()
}

fn upstreams_with<T>(
    proxy: &Proxy,
    parts: impl Fn(&Upstream) -> Vec<T>,
) -> impl Iterator<Item = (Arc<Upstream>, T)> {
    let all = proxy.registry().all().into_iter();
    all.flat_map(move |upstream| parts(&upstream).into_iter().map(move |part| (upstream.clone(), part)))
}
