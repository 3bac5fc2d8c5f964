//! The policy is edited while the process runs (theme 22).

use std::collections::BTreeSet;
use std::fs;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::process::Signal;
use tokio::task::JoinHandle;
use tokio::time::{interval, sleep};

use crate::support::client::Agent;
use crate::support::command::hedgerow;
use crate::support::footprint::Footprint;
use crate::support::hedgerow::{HedgerowProcess, Layout, Ports};
use crate::support::soon;
use crate::support::upstream::{Reply, Upstream};

/// A policy whose version every answer of [`telling`] names.
fn version(n: usize) -> String {
    format!(
        "upstreams: {{ u: {{ hosts: [127.0.0.1], rewrite: {{ headers: {{ set: {{ x-version: v{n} }} }} }} }} }}"
    )
}

/// An upstream that answers with the version of the policy that its request came through.
async fn telling() -> Upstream {
    Upstream::answering(|seen| Reply::ok(seen.header("x-version").unwrap_or("no policy"))).await
}

/// Calls until an answer names this version.
async fn until_version(ports: &Ports, upstream: &Upstream, n: usize) {
    let wanted = format!("v{n}");
    soon(async {
        while ports.get(&upstream.url("/")).await.text() != wanted {
            sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

async fn reloads(ports: &Ports, result: &str) -> f64 {
    ports.metrics().await.value("hedgerow_config_reloads_total", &[("result", result)])
}

// The watch of a file dies with the inode that the first swap removes.
#[tokio::test]
async fn c108_every_swap_of_a_config_map_takes_effect() {
    let upstream = telling().await;
    let mut hedgerow = HedgerowProcess::with(&version(0)).layout(Layout::ConfigMap).start().await;
    until_version(&hedgerow, &upstream, 0).await;
    let mut hashes = hedgerow.metrics().await.label_values("hedgerow_config_info", "hash");
    for n in 1..=3 {
        hedgerow.policy.swap_config_map(&version(n));
        until_version(&hedgerow, &upstream, n).await;
        let metrics =
            hedgerow.until_metrics(|m| m.value("hedgerow_config_reloads_total", &[]) == n as f64).await;
        assert_eq!(metrics.value("hedgerow_config_reloads_total", &[("result", "applied")]), n as f64);
        // One series, with the hash of the policy in force.
        let hash = metrics.label_values("hedgerow_config_info", "hash");
        assert_eq!(hash.len(), 1, "{hash:?}");
        assert!(!hashes.contains(&hash[0]), "the hash stayed {hash:?}");
        let status = hedgerow.status().await;
        assert_eq!(
            (&status["policy"]["hash"], &status["policy"]["last_reload"]),
            (&hash[0].clone().into(), &"applied".into())
        );
        hashes.extend(hash);
    }
}

#[tokio::test]
async fn c109_a_write_a_rename_and_a_new_file_are_seen_and_a_neighbour_is_not() {
    let upstream = telling().await;
    let mut hedgerow = HedgerowProcess::start(&version(0)).await;
    hedgerow.policy.write_in_place(&version(1));
    until_version(&hedgerow, &upstream, 1).await;
    hedgerow.policy.replace(&version(2));
    until_version(&hedgerow, &upstream, 2).await;
    fs::remove_file(hedgerow.policy.path()).unwrap();
    hedgerow.policy.write_in_place(&version(3));
    until_version(&hedgerow, &upstream, 3).await;
    assert_eq!(reloads(&hedgerow, "applied").await, 3.0);

    fs::write(hedgerow.policy.folder().join("neighbour.yaml"), "x: 1\n").unwrap();
    fs::write(hedgerow.policy.path(), hedgerow.policy.text(&version(3))).unwrap();
    // The reload that is asked for comes after whatever the neighbour caused.
    hedgerow.signal(Signal::HUP);
    hedgerow
        .until_metrics(|m| m.value("hedgerow_config_reloads_total", &[("result", "unchanged")]) == 1.0)
        .await;
    assert_eq!(reloads(&hedgerow, "applied").await, 3.0);
}

// An empty file was taken for an empty policy, so that defaults held for a moment.
#[tokio::test]
async fn c110_a_file_written_in_pieces_never_shows_the_defaults() {
    let upstream = telling().await;
    let hedgerow = HedgerowProcess::start(&version(1)).await;
    let load = Load::start(hedgerow.proxy, upstream.url("/"), 2, None);
    let whole = hedgerow.policy.text(&version(2));
    let path = hedgerow.policy.path();
    fs::write(&path, "").unwrap();
    hedgerow
        .until_metrics(|m| m.value("hedgerow_config_reloads_total", &[("result", "rejected")]) == 1.0)
        .await;
    fs::write(&path, &whole[..whole.len() - 20]).unwrap();
    hedgerow
        .until_metrics(|m| m.value("hedgerow_config_reloads_total", &[("result", "rejected")]) >= 2.0)
        .await;
    fs::write(&path, &whole).unwrap();
    until_version(&hedgerow, &upstream, 2).await;
    let bodies = load.stop().await;
    assert!(
        bodies.iter().all(|body| body == "v1" || body == "v2"),
        "{:?}",
        bodies.iter().find(|b| *b != "v1")
    );
    assert!(bodies.contains(&"v1".to_owned()));
}

// The later of two equal keys won without a word.
#[tokio::test]
async fn c111_an_upstream_named_twice_is_refused_with_its_line() {
    let upstream = telling().await;
    let mut hedgerow = HedgerowProcess::start(&version(1)).await;
    hedgerow.policy.replace(
        "
        upstreams:
          u: { hosts: [127.0.0.1], bulkhead: { max_concurrent: 1 } }
          u: { hosts: [127.0.0.1], bulkhead: { max_concurrent: 2 } }
        ",
    );
    hedgerow
        .until_metrics(|m| m.value("hedgerow_config_reloads_total", &[("result", "rejected")]) == 1.0)
        .await;
    let status = hedgerow.status().await;
    let error = status["policy"]["error"].as_str().unwrap();
    assert!(error.contains("policy.yaml:4:3: upstreams.u: duplicate key"), "{error}");
    assert_eq!(status["policy"]["last_reload"], "rejected");
    assert_eq!(hedgerow.get(&upstream.url("/")).await.text(), "v1");
    let log = hedgerow.stderr.until(|line| line.contains("policy refused")).await;
    assert!(log.contains("policy.yaml:4:3"), "{log}");

    let check = self::hedgerow(hedgerow.policy.folder(), &["check", "policy.yaml"]).await;
    assert_eq!(check.code, 1);
    assert!(check.stderr.contains("policy.yaml:4:3: upstreams.u: duplicate key"), "{}", check.stderr);
}

// After a bad version the good one seemed to be nothing new, and the process stayed unhealthy.
#[tokio::test]
async fn c112_going_back_from_a_broken_file_to_the_same_policy_is_healthy_again() {
    let upstream = telling().await;
    let mut hedgerow = HedgerowProcess::start(&version(1)).await;
    let before = hedgerow.status().await["policy"].clone();
    assert_eq!((&before["last_reload"], &before["error"]), (&().into(), &().into()));

    hedgerow.policy.replace("defaults: { hedge: 5 }");
    let broken = hedgerow.until_status(|s| !s["policy"]["error"].is_null()).await["policy"].clone();
    assert_eq!((&broken["last_reload"], &broken["hash"]), (&"rejected".into(), &before["hash"]));
    assert_eq!(broken["applied_at"], before["applied_at"]);

    hedgerow.policy.replace(&version(1));
    let healed = hedgerow.until_status(|s| s["policy"]["error"].is_null()).await["policy"].clone();
    assert_eq!((&healed["last_reload"], &healed["hash"]), (&"applied".into(), &before["hash"]));
    assert!(healed["applied_at"].as_str() > before["applied_at"].as_str());
    assert_eq!(hedgerow.get(&upstream.url("/")).await.text(), "v1");
    assert_eq!((reloads(&hedgerow, "rejected").await, reloads(&hedgerow, "applied").await), (1.0, 1.0));
}

// A debounce that begins anew with each event never ends.
#[tokio::test]
async fn c113_a_file_that_is_rewritten_without_pause_takes_effect_meanwhile() {
    const VERSIONS: usize = 8;
    let upstream = telling().await;
    let mut hedgerow = HedgerowProcess::start(&version(0)).await;
    let (ports, url) = (*hedgerow, upstream.url("/"));
    let mut n = 0;
    let seen = Mutex::new(BTreeSet::new());
    let rewrite = async {
        // Far less than the pause that ends a burst, which a loaded machine makes now and then.
        let mut ticks = interval(Duration::from_millis(10));
        while seen.lock().len() < VERSIONS {
            ticks.tick().await;
            n += 1;
            hedgerow.policy.replace(&version(n));
        }
    };
    let ask = async {
        while seen.lock().len() < VERSIONS {
            let body = ports.get(&url).await.text().to_owned();
            seen.lock().insert(body);
        }
    };
    // In the midst of the burst, which goes on until this has happened.
    soon(async { tokio::join!(rewrite, ask) }).await;
    until_version(&hedgerow, &upstream, n).await;
}

// A reload for one upstream made the others forget what they had learnt.
#[tokio::test]
async fn c114_breaker_budget_times_and_connections_outlive_a_reload_of_another_upstream() {
    let policy = |y: usize| {
        format!(
            "
            defaults: {{ extra_load: {{ ratio: 10%, floor: 1/m }} }}
            upstreams:
              failing: {{ hosts: [127.0.0.2], breaker: {{ consecutive_failures: 1, open_for: 1m }} }}
              steady: {{ hosts: [127.0.0.1] }}
              other: {{ hosts: [other.example], bulkhead: {{ max_concurrent: {y} }} }}
            "
        )
    };
    let steady = Upstream::answering(|_| Reply::ok("")).await;
    let failing = Upstream::on([127, 0, 0, 2]).answering(|_| Reply::status(503)).await;
    let mut hedgerow = HedgerowProcess::start(&policy(1)).await;
    assert_eq!(hedgerow.get(&failing.url("/")).await.status, 503);
    let mut agent = hedgerow.agent().await;
    for _ in 0..15 {
        assert_eq!(agent.get(&steady.url("/")).await.status, 200);
    }
    let learnt = async |hedgerow: &HedgerowProcess| {
        let mut steady_now =
            hedgerow.status().await["upstreams"]["steady"][steady.address().to_string()].take();
        // It grows by the floor, a sixtieth of a token in a second.
        let tokens = steady_now["extra_load_tokens"].take().as_f64().unwrap();
        (steady_now, tokens)
    };
    let (before, tokens) = learnt(&hedgerow).await;
    assert_eq!(before["hedge"]["samples"], 15);

    hedgerow.policy.replace(&policy(2));
    hedgerow
        .until_metrics(|m| m.value("hedgerow_config_reloads_total", &[("result", "applied")]) == 1.0)
        .await;
    let (after, tokens_after) = learnt(&hedgerow).await;
    assert_eq!(after["hedge"]["samples"], before["hedge"]["samples"]);
    assert_eq!(after["breaker"]["requests"], 15);
    assert_eq!(after["idle_connections"], 1);
    assert!(tokens > 1.0 && (tokens_after - tokens).abs() < 0.2, "{tokens} {tokens_after}");

    let refused = hedgerow.get(&failing.url("/")).await;
    assert_eq!((refused.status, &refused.json()["error"]), (503, &"circuit_open".into()));
    assert_eq!(failing.count(), 1);
    assert_eq!(agent.get(&steady.url("/")).await.status, 200);
    assert_eq!(steady.connections(), 1);
}

/// Agents on kept connections that call without end; every answer must be a whole 200.
struct Load {
    stop: Arc<AtomicBool>,
    calls: Arc<AtomicUsize>,
    agents: Vec<JoinHandle<Vec<String>>>,
}

impl Load {
    /// `pause` between the calls of one agent; `None`: full speed.
    fn start(proxy: SocketAddr, url: String, agents: usize, pause: Option<Duration>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let calls = Arc::new(AtomicUsize::new(0));
        let agents = (0..agents).map(|_| {
            let (stop, calls, url) = (stop.clone(), calls.clone(), url.clone());
            tokio::spawn(async move {
                let mut agent = Agent::connect(proxy).await;
                let mut bodies = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    let answer = agent.get(&url).await;
                    assert_eq!((answer.status, answer.complete), (200, true), "{}", answer.text());
                    assert_eq!(answer.header("connection"), None);
                    bodies.push(answer.text().to_owned());
                    calls.fetch_add(1, Ordering::Relaxed);
                    if let Some(pause) = pause {
                        sleep(pause).await;
                    }
                }
                bodies
            })
        });
        let agents = agents.collect();
        Self { stop, calls, agents }
    }

    fn calls(&self) -> usize {
        self.calls.load(Ordering::Relaxed)
    }

    /// The bodies of all answers. Panics when a call failed.
    async fn stop(self) -> Vec<String> {
        self.stop.store(true, Ordering::Relaxed);
        let mut bodies = Vec::new();
        for agent in self.agents {
            bodies.extend(agent.await.expect("every call was answered"));
        }
        bodies
    }
}

// Idle connections were closed in the face of their next request.
#[tokio::test]
async fn c115_twenty_reloads_close_no_client_connection() {
    let upstream = telling().await;
    let mut hedgerow = HedgerowProcess::start(&version(0)).await;
    let load = Load::start(hedgerow.proxy, upstream.url("/"), 10, Some(Duration::from_millis(20)));
    for n in 1..=20 {
        hedgerow.policy.replace(&version(n));
        hedgerow.signal(Signal::HUP);
        until_version(&hedgerow, &upstream, n).await;
    }
    let calls = load.calls();
    assert!(!load.stop().await.is_empty() && calls > 20);
}

#[tokio::test]
async fn a_hundred_reloads_at_full_speed_lose_no_call_and_leak_nothing() {
    let upstream = telling().await;
    let mut hedgerow = HedgerowProcess::start(&version(0)).await;
    let load = Load::start(hedgerow.proxy, upstream.url("/"), 4, None);
    let mut after_warm_up = None;
    for n in 1..=130 {
        hedgerow.policy.replace(&version(n));
        hedgerow.signal(Signal::HUP);
        hedgerow
            .until_metrics(|m| m.value("hedgerow_config_reloads_total", &[("result", "applied")]) == n as f64)
            .await;
        if n == 30 {
            after_warm_up = Some(Footprint::of(hedgerow.pid()));
        }
    }
    let (before, after) = (after_warm_up.unwrap(), Footprint::of(hedgerow.pid()));
    let calls = load.calls();
    let bodies = load.stop().await;
    assert!(calls >= 130, "{calls}");
    assert_eq!(bodies.iter().filter(|body| *body == "no policy").count(), 0);
    assert!(after.descriptors <= before.descriptors + 4, "{before:?} {after:?}");
    assert_eq!(after.threads, before.threads);
    assert!(after.resident_kib < before.resident_kib + 4 * 1024, "{before:?} {after:?}");
}

fn applied(status: &serde_json::Value) -> bool {
    status["policy"]["last_reload"] == "applied"
}

#[tokio::test]
async fn a_call_under_way_ends_on_the_policy_it_began_with() {
    let mut upstream = Upstream::start().await;
    let mut hedgerow = HedgerowProcess::start("defaults: { deadline: { default: 1m }, hedge: off }").await;
    let mut early = hedgerow.agent().await;
    early.send(format!("GET {} HTTP/1.1\r\nHost: x\r\n\r\n", upstream.url("/early"))).await;
    let exchange = upstream.next().await;

    hedgerow.policy.replace("defaults: { deadline: { default: 100ms }, hedge: off }");
    hedgerow.until_status(applied).await;
    let late = hedgerow.get(&upstream.url("/late")).await;
    assert_eq!((late.status, &late.json()["error"]), (504, &"deadline_exceeded".into()));
    exchange.respond(200, &[], "in time").await;
    assert_eq!(early.read_response().await.text(), "in time");
    // The next call of the same connection has the new policy.
    assert_eq!(early.get(&upstream.url("/later")).await.status, 504);
}

#[tokio::test]
async fn other_ports_are_reported_as_waiting_for_a_restart() {
    let upstream = telling().await;
    let hedgerow = HedgerowProcess::start(&version(1)).await;
    let elsewhere =
        format!("listen: {{ proxy: 127.0.0.1:1, admin: \"{}\" }}\n{}\n", hedgerow.admin, version(2));
    fs::write(hedgerow.policy.path(), elsewhere).unwrap();
    until_version(&hedgerow, &upstream, 2).await;
    let status = hedgerow.status().await;
    assert_eq!(status["policy"]["needs_restart"], serde_json::json!(["listen"]));
    hedgerow.stderr.until(|line| line.contains("next start") && line.contains("listen")).await;

    fs::write(hedgerow.policy.path(), hedgerow.policy.text(&version(3))).unwrap();
    until_version(&hedgerow, &upstream, 3).await;
    assert_eq!(hedgerow.status().await["policy"]["needs_restart"], serde_json::json!([]));
}

#[tokio::test]
async fn sighup_reads_the_file_at_once_and_tells_when_nothing_is_new() {
    let upstream = telling().await;
    let mut hedgerow = HedgerowProcess::start(&version(1)).await;
    hedgerow.signal(Signal::HUP);
    hedgerow
        .until_metrics(|m| m.value("hedgerow_config_reloads_total", &[("result", "unchanged")]) == 1.0)
        .await;
    assert_eq!(hedgerow.status().await["policy"]["last_reload"], "unchanged");
    hedgerow.policy.replace("[]");
    hedgerow.signal(Signal::HUP);
    hedgerow
        .until_metrics(|m| m.value("hedgerow_config_reloads_total", &[("result", "rejected")]) >= 1.0)
        .await;
    assert_eq!(hedgerow.get(&upstream.url("/")).await.text(), "v1");
}

#[tokio::test]
async fn a_policy_folder_that_vanishes_changes_nothing_until_it_is_back() {
    let upstream = telling().await;
    let mut hedgerow = HedgerowProcess::start(&version(1)).await;
    let folder = hedgerow.policy.folder().to_owned();
    let aside = folder.with_extension("aside");
    fs::rename(&folder, &aside).unwrap();
    let broken = hedgerow.until_status(|status| !status["policy"]["error"].is_null()).await;
    assert!(broken["policy"]["error"].as_str().unwrap().contains("cannot read"), "{broken}");
    assert_eq!(hedgerow.get(&upstream.url("/")).await.text(), "v1");

    fs::rename(&aside, &folder).unwrap();
    hedgerow.until_status(|status| status["policy"]["error"].is_null()).await;
    // Removed and made anew it is another folder, whose events must be followed too.
    fs::remove_dir_all(&folder).unwrap();
    hedgerow.until_status(|status| !status["policy"]["error"].is_null()).await;
    fs::create_dir(&folder).unwrap();
    for n in 2..=3 {
        hedgerow.policy.replace(&version(n));
        until_version(&hedgerow, &upstream, n).await;
    }
}
