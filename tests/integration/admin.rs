//! The admin port: health, metrics, status, the policy in force, the breakers' levers.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::support::client::{self, Agent, Response};
use crate::support::command::hedgerow;
use crate::support::hedgerow::{HedgerowProcess, Ports};
use crate::support::upstream::{Reply, Upstream, by_path, statuses};

fn is_plain_text(answer: &Response) -> bool {
    answer.header("content-type") == Some("text/plain; charset=utf-8")
}

#[tokio::test]
async fn health_is_two_words_for_probes() {
    let hedgerow = HedgerowProcess::start("{}").await;
    for page in ["/livez", "/readyz"] {
        let answer = hedgerow.ask_admin("GET", page).await;
        assert_eq!((answer.status, answer.text()), (200, "ok"));
        assert!(is_plain_text(&answer));
        let head = hedgerow.ask_admin("HEAD", page).await;
        assert_eq!((head.status, head.header("content-length")), (200, Some("2")));
    }
    assert_eq!(hedgerow.ask_admin("GET", "/livez?verbose").await.status, 200);
}

#[tokio::test]
async fn an_unknown_page_is_404_and_names_the_pages_there_are() {
    let hedgerow = HedgerowProcess::start("{}").await;
    for page in ["/healthz", "/livez/", "/Livez", "/breakers", "/debug/pprof", "//livez"] {
        let answer = hedgerow.ask_admin("GET", page).await;
        assert_eq!(answer.status, 404, "{page}");
        assert!(answer.text().contains("/livez /readyz /metrics /status /config"), "{}", answer.text());
    }
    let front = hedgerow.ask_admin("GET", "/").await;
    assert_eq!(front.status, 200);
    assert!(front.text().contains("/metrics"));
}

// Whoever reaches the port can look; nothing that looks changes anything, and nothing ends the process.
#[tokio::test]
async fn other_methods_are_405_and_say_which_are_allowed() {
    let hedgerow = HedgerowProcess::start("{}").await;
    for page in ["/livez", "/metrics", "/config", "/nowhere", "/quitquitquit"] {
        for method in ["POST", "PUT", "DELETE"] {
            let answer = hedgerow.ask_admin(method, page).await;
            assert_eq!((answer.status, answer.header("allow")), (405, Some("GET, HEAD")), "{method} {page}");
        }
    }
    let lever = hedgerow.ask_admin("GET", "/breakers/default/reset").await;
    assert_eq!((lever.status, lever.header("allow")), (405, Some("POST")));
    assert_eq!(hedgerow.ask_admin("GET", "/livez").await.status, 200);
}

/// The name, type, help and label names of each family in a text of Prometheus' format.
fn families(text: &str) -> BTreeMap<String, (String, String, Vec<Vec<String>>)> {
    let mut families: BTreeMap<String, (String, String, Vec<Vec<String>>)> = BTreeMap::new();
    for line in text.lines().filter(|line| !line.is_empty()) {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').expect("a name and its help");
            families.entry(name.to_owned()).or_default().1 = help.to_owned();
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').expect("a name and its type");
            families.entry(name.to_owned()).or_default().0 = kind.to_owned();
        } else {
            let series = line.split(' ').next().expect("a line has a first word");
            let (name, labels) = series.split_once('{').unwrap_or((series, ""));
            let base = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
            let base = base.filter(|base| families.get(*base).is_some_and(|family| family.0 == "histogram"));
            let labels = labels.trim_end_matches('}').split("\",").filter_map(|label| label.split_once('='));
            let mut names: Vec<String> =
                labels.map(|(name, _)| name.to_owned()).filter(|n| n != "le").collect();
            names.sort();
            let family = families.entry(base.unwrap_or(name).to_owned()).or_default();
            if !family.2.contains(&names) {
                family.2.push(names);
            }
        }
    }
    families
}

// Dashboards and alerts are written against these names; one that changes breaks them silently.
#[tokio::test]
async fn metrics_have_the_promised_names_types_and_labels_and_no_others() {
    let upstream = Upstream::answering(statuses(&[200, 503])).await;
    let hedgerow = HedgerowProcess::start("{}").await;
    for status in [200, 503] {
        assert_eq!(hedgerow.get(&upstream.url("/")).await.status, status);
    }
    // Counted when the answer's last byte is out, which its reader may be faster than.
    hedgerow.until_metrics(|m| m.value("hedgerow_requests_total", &[]) == 2.0).await;
    let answer = hedgerow.ask_admin("GET", "/metrics").await;
    assert_eq!(answer.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    let expected: &[(&str, &str, &[&str])] = &[
        ("hedgerow_access_log_dropped_total", "counter", &[]),
        ("hedgerow_breaker_state", "gauge", &["state", "upstream"]),
        ("hedgerow_breaker_transitions_total", "counter", &["to", "upstream"]),
        ("hedgerow_bulkhead_in_flight", "gauge", &["upstream"]),
        ("hedgerow_bulkhead_queued", "gauge", &["upstream"]),
        ("hedgerow_bulkhead_rejected_total", "counter", &["upstream"]),
        ("hedgerow_cache_requests_total", "counter", &["result", "upstream"]),
        ("hedgerow_coalesced_total", "counter", &["upstream"]),
        ("hedgerow_config_info", "gauge", &["hash"]),
        ("hedgerow_config_reloads_total", "counter", &["result"]),
        ("hedgerow_connections_open", "gauge", &["listener"]),
        ("hedgerow_deadline_exceeded_total", "counter", &["stage", "upstream"]),
        ("hedgerow_fallbacks_total", "counter", &["kind", "upstream"]),
        ("hedgerow_fanout_calls_total", "counter", &["result"]),
        ("hedgerow_fanout_duration_seconds", "histogram", &[]),
        ("hedgerow_fanout_requests_total", "counter", &["result"]),
        ("hedgerow_hedge_delay_seconds", "histogram", &["upstream"]),
        ("hedgerow_hedges_total", "counter", &["outcome", "upstream"]),
        ("hedgerow_intercept_declined_total", "counter", &["upstream"]),
        ("hedgerow_rate_limited_total", "counter", &["action", "upstream"]),
        ("hedgerow_request_duration_seconds", "histogram", &["upstream"]),
        ("hedgerow_requests_total", "counter", &["code", "outcome", "upstream"]),
        ("hedgerow_retries_total", "counter", &["result", "upstream"]),
        ("hedgerow_upstream_attempts_total", "counter", &["kind", "result", "upstream"]),
    ];
    let found = families(answer.text());
    let names: Vec<&str> = found.keys().map(String::as_str).collect();
    assert_eq!(names, expected.iter().map(|(name, ..)| *name).collect::<Vec<_>>());
    for (name, kind, labels) in expected {
        let (found_kind, help, found_labels) = &found[*name];
        assert_eq!(found_kind, kind, "{name}");
        assert!(help.ends_with('.'), "{name}: {help:?}");
        assert_eq!(*found_labels, [labels.to_vec()], "{name}");
    }
}

#[tokio::test]
async fn label_values_are_the_promised_closed_sets() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::start("{}").await;
    hedgerow.get(&upstream.url("/")).await;
    let metrics = hedgerow.until_metrics(|m| m.value("hedgerow_requests_total", &[]) == 1.0).await;
    for (name, label, values) in [
        ("hedgerow_requests_total", "upstream", &["default"][..]),
        ("hedgerow_requests_total", "code", &["200"]),
        ("hedgerow_requests_total", "outcome", &["answered"]),
        ("hedgerow_upstream_attempts_total", "kind", &["primary"]),
        ("hedgerow_upstream_attempts_total", "result", &["ok"]),
        ("hedgerow_breaker_state", "state", &["closed", "half_open", "open"]),
        ("hedgerow_cache_requests_total", "result", &["bypass", "hit", "miss", "revalidated", "stale"]),
        ("hedgerow_fallbacks_total", "kind", &["backup", "stale", "static"]),
        (
            "hedgerow_fanout_requests_total",
            "result",
            &["client_left", "complete", "empty", "partial", "refused"],
        ),
        (
            "hedgerow_fanout_calls_total",
            "result",
            &[
                "backup",
                "cache",
                "circuit_open",
                "collapsed",
                "deadline",
                "degraded",
                "error",
                "hedge",
                "not_awaited",
                "primary",
                "stale",
                "upstream_status",
            ],
        ),
        ("hedgerow_rate_limited_total", "action", &["paused", "refused", "waited"]),
        ("hedgerow_config_reloads_total", "result", &["applied", "rejected", "unchanged"]),
        ("hedgerow_connections_open", "listener", &["admin", "proxy", "transparent"]),
        (
            "hedgerow_deadline_exceeded_total",
            "stage",
            &["arrival", "body", "connect", "dns", "head", "queue"],
        ),
    ] {
        assert_eq!(metrics.label_values(name, label), values, "{name} {label}");
    }
    let outcomes = metrics.label_values("hedgerow_hedges_total", "outcome");
    assert!(
        ["won", "lost", "failed", "suppressed_budget"].iter().all(|word| outcomes.contains(&(*word).into()))
    );
    assert!(outcomes.iter().all(|word| ["won", "lost", "failed"].contains(&word.as_str()) || word.starts_with("suppressed_")));
    assert_eq!(metrics.value("hedgerow_breaker_state", &[("upstream", "default"), ("state", "closed")]), 1.0);
}

#[tokio::test]
async fn open_connections_are_counted_for_each_port() {
    let hedgerow = HedgerowProcess::start("{}").await;
    let open = |m: &crate::support::hedgerow::Metrics, listener| {
        m.value("hedgerow_connections_open", &[("listener", listener)])
    };
    let _one = hedgerow.agent().await;
    let two = hedgerow.agent().await;
    // The admin port has the one that asks, and for a moment the one that asked before.
    hedgerow.until_metrics(|m| open(m, "proxy") == 2.0 && open(m, "admin") == 1.0).await;
    drop(two);
    hedgerow.until_metrics(|m| open(m, "proxy") == 1.0).await;
}

#[tokio::test]
async fn status_tells_the_policy_and_each_host_of_each_upstream() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::start(
        "
        upstreams:
          tools:
            hosts: [127.0.0.1]
            routes:
              - { name: search, path: /search/**, bulkhead: { max_concurrent: 5 } }
          idle: { hosts: [idle.example] }
        ",
    )
    .await;
    hedgerow.get(&upstream.url("/search/x")).await;
    let status = hedgerow.until_status(|status| status["in_flight"] == 0).await;
    let keys: Vec<&String> = status.as_object().unwrap().keys().collect();
    assert_eq!(
        keys,
        [
            "version",
            "started",
            "draining",
            "policy",
            "in_flight",
            "flights",
            "connections",
            "replay_bytes",
            "caches",
            "shared_state",
            "intercept_stepped_down",
            "upstreams"
        ]
    );
    assert_eq!(status["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!((&status["draining"], &status["replay_bytes"]), (&json!(false), &json!(0)));
    assert_eq!((&status["flights"], &status["caches"]), (&json!(0), &json!({})));
    let policy: Vec<&String> = status["policy"].as_object().unwrap().keys().collect();
    assert_eq!(policy, ["hash", "applied_at", "last_reload", "last_reload_at", "error", "needs_restart"]);

    let names: Vec<&String> = status["upstreams"].as_object().unwrap().keys().collect();
    assert_eq!(names, ["tools", "idle", "default"]);
    assert_eq!(status["upstreams"]["idle"], json!({}));
    let host = &status["upstreams"]["tools"][upstream.address().to_string()];
    assert_eq!(
        host["breaker"],
        json!({ "state": "closed", "forced": false, "by_fleet": false, "failures_in_row": 0, "requests": 1,
                "failure_rate": "0%", "slow_rate": null, "retry_after_ms": null }),
    );
    assert_eq!(host["bulkhead"], json!({ "in_flight": 0, "queued": 0 }));
    // The route names its bulkhead, so it has one of its own; the breaker it shares.
    assert_eq!(host["routes"]["search"]["bulkhead"], json!({ "in_flight": 0, "queued": 0 }));
    let keys: Vec<&String> = host.as_object().unwrap().keys().collect();
    assert_eq!(
        keys,
        [
            "breaker",
            "bulkhead",
            "hedge",
            "idle_connections",
            "shared_connections",
            "extra_load_tokens",
            "routes"
        ]
    );
    let hedge = &host["hedge"];
    let keys: Vec<&String> = hedge.as_object().unwrap().keys().collect();
    assert_eq!(
        keys,
        ["after", "pays", "held_back_ms", "samples", "p50", "p90", "p99", "predicted", "win_share"]
    );
}

// A slow refill, so that what is taken has not come back when the test looks.
#[tokio::test]
async fn status_tells_the_tokens_of_a_rate_limit_and_the_pauses_that_its_upstream_asks_for() {
    let upstream = Upstream::answering(by_path(&[
        ("/ok", Reply::ok("")),
        ("/batch/x", Reply::ok("")),
        ("/enough", Reply::status(429).header("retry-after", "30")),
    ]))
    .await;
    let hedgerow = HedgerowProcess::start(
        "
        upstreams:
          tools:
            hosts: [127.0.0.1]
            hedge: off
            rate_limit: { rate: 1/h, burst: 10, max_pause: 20s }
            routes:
              - { name: batch, path: /batch/*, rate_limit: { rate: 1/h, burst: 3 } }
              - { name: shared, path: /enough }
        ",
    )
    .await;
    let host = async || hedgerow.status().await["upstreams"]["tools"][upstream.address().to_string()].clone();
    for path in ["/ok", "/batch/x"] {
        assert_eq!(hedgerow.get(&upstream.url(path)).await.status, 200);
    }
    let before = host().await;
    let keys: Vec<&String> = before["rate_limit"].as_object().unwrap().keys().collect();
    assert_eq!(keys, ["tokens", "full_after_ms", "queued", "held", "paused_credentials", "paused_ms"]);
    assert_eq!(before["rate_limit"]["tokens"], 9);
    let refill = before["rate_limit"]["full_after_ms"].as_u64().unwrap();
    assert!((3_500_000..=3_600_000).contains(&refill), "{refill}");
    assert_eq!(before["rate_limit"]["paused_ms"], Value::Null);
    assert_eq!(before["routes"]["batch"]["rate_limit"]["tokens"], 2);

    // The route without a limit of its own takes the upstream's tokens, and so pauses those.
    let answer = hedgerow.get(&upstream.url("/enough")).await;
    assert_eq!(answer.status, 429);
    let mut held = hedgerow.agent().await;
    held.send(client::absolute("GET", &upstream.url("/ok"), &[], b"")).await;
    let status = hedgerow
        .until_status(|status| {
            status["upstreams"]["tools"][upstream.address().to_string()]["rate_limit"]["held"] == 1
        })
        .await;
    let after = &status["upstreams"]["tools"][upstream.address().to_string()];
    let limit = &after["rate_limit"];
    assert_eq!((&limit["tokens"], &limit["queued"]), (&json!(8), &json!(0)));
    assert_eq!(limit["paused_credentials"], 1);
    let pause = limit["paused_ms"].as_u64().unwrap();
    assert!((1..=20_000).contains(&pause), "{pause}");
    assert!(after["routes"]["shared"].get("rate_limit").is_none());
    assert_eq!(after["routes"]["batch"]["rate_limit"]["paused_ms"], Value::Null);
}

#[tokio::test]
async fn status_tells_what_is_kept_of_each_upstream_and_how_many_flights_are_under_way() {
    let mut upstream = Upstream::start().await;
    let policy = "
        upstreams:
          tools:
            hosts: [127.0.0.1]
            hedge: off
            coalesce: on
            cache: { max_bytes: 2MiB }
            routes: [{ path: /small/*, cache: { max_bytes: 1MiB } }]
        ";
    let hedgerow = HedgerowProcess::start(policy).await;
    let mut agent = hedgerow.agent().await;
    agent.send(client::absolute("GET", &upstream.url("/small/x"), &[], b"")).await;
    let exchange = upstream.next().await;
    let status = hedgerow.status().await;
    assert_eq!(status["flights"], 1);
    assert_eq!(
        status["caches"],
        json!({ "tools": [{ "entries": 0, "bytes": 0, "max_bytes": 1 << 20, "from_other_pods": 0 },
                          { "entries": 0, "bytes": 0, "max_bytes": 2 << 20, "from_other_pods": 0 }] })
    );

    exchange.respond(200, &[("cache-control", "max-age=60")], &"x".repeat(5000)).await;
    assert_eq!(agent.read_response().await.status, 200);
    let status = hedgerow.until_status(|status| status["flights"] == 0).await;
    let [small, large] = [0, 1].map(|at| status["caches"]["tools"][at].clone());
    assert_eq!((&small["entries"], &large["entries"]), (&json!(1), &json!(0)));
    let bytes = small["bytes"].as_u64().unwrap();
    assert!((5_000..10_000).contains(&bytes), "{bytes}");
    assert_eq!(large["bytes"], 0);
}

#[tokio::test]
async fn status_shows_hosts_that_pass_directly_where_the_policy_has_any() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::start("direct: [loopback]").await;
    hedgerow.get(&upstream.url("/")).await;
    let address = upstream.address().to_string();
    let is_back = |status: &Value| status["upstreams"]["direct"][&address]["idle_connections"] == 1;
    let upstreams = hedgerow.until_status(is_back).await["upstreams"].clone();
    let names: Vec<&String> = upstreams.as_object().unwrap().keys().collect();
    assert_eq!(names, ["default", "direct"]);
    // No stage is at work, so nothing was counted.
    let host = &upstreams["direct"][&address];
    assert_eq!(host["breaker"]["requests"], 0);
    assert!(host.get("hedge").is_none(), "{host}");
}

#[tokio::test]
async fn the_policy_in_force_is_a_policy_and_holds_no_secret() {
    let policy = "
        upstreams:
          quotes:
            hosts: [quotes.example]
            rewrite: { headers: { set: { x-api-key: '${env:QUOTES_KEY}', x-plain: also-hidden } } }
            hedge: { after: p75 }
            extra_load: { ratio: 25% }
        ";
    let hedgerow = HedgerowProcess::with(policy).env("QUOTES_KEY", "sesame-4711").start().await;
    let answer = hedgerow.ask_admin("GET", "/config").await;
    assert_eq!((answer.status, answer.header("content-type")), (200, Some("application/json")));
    assert!(
        !answer.text().contains("sesame-4711") && !answer.text().contains("also-hidden"),
        "{}",
        answer.text()
    );
    let config = answer.json();
    let quotes = &config["upstreams"]["quotes"];
    assert_eq!(
        quotes["rewrite"]["headers"]["set"],
        json!({ "x-api-key": "[secret]", "x-plain": "[secret]" })
    );
    assert_eq!(
        (&quotes["hedge"]["after"], &quotes["bulkhead"]["max_concurrent"]),
        (&json!("p75"), &json!(100))
    );

    // What it shows can be checked as what it is, JSON being YAML.
    std::fs::write(hedgerow.policy.folder().join("shown.yaml"), answer.text()).unwrap();
    let check = self::hedgerow(hedgerow.policy.folder(), &["check", "shown.yaml"]).await;
    assert_eq!((check.code, check.stdout.as_str()), (0, "shown.yaml: ok\n"), "{}", check.stderr);
    for page in ["/status", "/metrics"] {
        assert!(!hedgerow.ask_admin("GET", page).await.text().contains("sesame"), "{page}");
    }
}

async fn pull(ports: &Ports, lever: &str) -> Value {
    let answer = ports.ask_admin("POST", &format!("/breakers/{lever}")).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()
}

#[tokio::test]
async fn an_operator_opens_closes_and_frees_breakers() {
    let one = Upstream::answering(|_| Reply::status(503)).await;
    let two = Upstream::on([127, 0, 0, 2]).answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::start(
        "upstreams: { tools: { hosts: [127.0.0.1, 127.0.0.2], breaker: { consecutive_failures: 2 } } }",
    )
    .await;
    let call = async |upstream: &Upstream| hedgerow.get(&upstream.url("/")).await.status;
    let (first, second) = (one.address().to_string(), two.address().to_string());
    assert_eq!((call(&one).await, call(&two).await), (503, 200));

    // All hosts of an upstream.
    assert_eq!(pull(&hedgerow, "tools/force_open").await, json!({ &first: "open", &second: "open" }));
    let refused = hedgerow.get(&two.url("/")).await;
    assert_eq!((refused.status, &refused.json()["error"]), (503, &json!("circuit_open")));
    assert_eq!((one.count(), two.count()), (1, 1));
    let metrics = hedgerow.metrics().await;
    let breakers =
        |state| metrics.value("hedgerow_breaker_state", &[("upstream", "tools"), ("state", state)]);
    assert_eq!((breakers("open"), breakers("closed")), (2.0, 0.0));
    assert_eq!(
        metrics.value("hedgerow_breaker_transitions_total", &[("upstream", "tools"), ("to", "open")]),
        2.0
    );
    assert_eq!(hedgerow.status().await["upstreams"]["tools"][&second]["breaker"]["forced"], true);

    // One host alone.
    assert_eq!(pull(&hedgerow, &format!("tools/{second}/reset")).await, json!({ &second: "closed" }));
    assert_eq!((call(&two).await, two.count()), (200, 2));

    // Held closed, no failure opens it; freed, the next ones do.
    pull(&hedgerow, &format!("tools/{first}/force_closed")).await;
    for _ in 0..4 {
        assert_eq!(call(&one).await, 503);
    }
    assert_eq!(one.count(), 5);
    pull(&hedgerow, "tools/reset").await;
    for _ in 0..4 {
        call(&one).await;
    }
    assert_eq!(one.count(), 7);
    hedgerow
        .stderr
        .until(|line| line.contains("breaker set by an operator") && line.contains("force_open"))
        .await;
}

#[tokio::test]
async fn a_lever_that_is_not_there_is_404_and_moves_nothing() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    let hedgerow = HedgerowProcess::start("{}").await;
    hedgerow.get(&upstream.url("/")).await;
    for lever in ["quotes/reset", "default/open", "default/127.0.0.1:1/reset", "default", "a/b/c/d", ""] {
        let answer = hedgerow.ask_admin("POST", &format!("/breakers/{lever}")).await;
        assert_eq!(answer.status, 404, "{lever}");
        assert!(is_plain_text(&answer) && !answer.text().is_empty());
    }
    let metrics = hedgerow.metrics().await;
    assert_eq!(metrics.value("hedgerow_breaker_transitions_total", &[]), 0.0);
    // A name that nobody knows leaves no series behind.
    assert_eq!(metrics.label_values("hedgerow_breaker_state", "upstream"), ["default"]);
}

#[tokio::test]
async fn a_kept_connection_can_ask_again() {
    let hedgerow = HedgerowProcess::start("{}").await;
    let mut scraper = Agent::connect(hedgerow.admin).await;
    for _ in 0..3 {
        scraper.send("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").await;
        assert_eq!(scraper.read_response().await.status, 200);
    }
}
