//! The loader as a whole: what `{}` means, inheritance, the fixtures of `tests/config`, properties.

mod shared_state;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path as FilePath, PathBuf};

use proptest::prelude::*;
use serde_json::{Value, json};

use super::files::Sources;
use super::*;

const EXAMPLE: &str = include_str!("../../config.example.yaml");

fn fixtures(kind: &str) -> Vec<PathBuf> {
    let dir = FilePath::new(env!("CARGO_MANIFEST_DIR")).join("tests/config").join(kind);
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> =
        entries.filter(|path| path.extension().is_some_and(|e| e == "yaml")).collect();
    files.sort();
    assert!(!files.is_empty());
    files
}

fn loaded(text: &str) -> Loaded {
    parse(text, FilePath::new("")).unwrap_or_else(|problems| panic!("{problems}"))
}

fn config(text: &str) -> Config {
    loaded(text).config
}

fn refused(text: &str) -> Vec<String> {
    let problems = parse(text, FilePath::new("")).expect_err("should be refused");
    problems.iter().map(ToString::to_string).collect()
}

#[test]
fn every_default_is_as_documented() {
    let config = config("{}");
    let stages = json!({
        "connect_timeout": "2s", "attempt_timeout": "off", "stream_idle": "5m", "tunnel_idle": "1h",
        "replay_limit": "256KiB", "unacceptable": [429, 500, 502, 503, 504],
        "deadline": { "default": "30s", "max": "15m", "reserve": "50ms", "covers": "auto", "hints": "on",
                      "tell_envoy": false },
        "hedge": { "after": "auto", "initial": "800ms", "min": "20ms", "max": "1.2s", "max_extra": 1,
                   "methods": ["GET", "HEAD", "OPTIONS"] },
        "extra_load": { "ratio": "10%", "floor": "1/s" },
        "bulkhead": { "max_concurrent": 100, "max_queue": 100 },
        "breaker": { "consecutive_failures": 5, "failure_rate": "off", "slow_rate": "off", "slow_after": "5s",
                     "window": "1m", "min_requests": 20, "open_for": "30s", "max_open_for": "5m",
                     "half_open_probes": 1, "failure_statuses": [500, 502, 503, 504], "fair_chance": "1s",
                     "shared": false },
        "retry": "off", "rate_limit": "off", "coalesce": "off", "cache": "off", "fallback": [],
    });
    let mut defaults = json!({ "intercept": false });
    defaults.as_object_mut().unwrap().extend(stages.as_object().unwrap().clone());
    let expected = json!({
        "threads": std::thread::available_parallelism().unwrap().get(),
        "listen": { "proxy": "127.0.0.1:15300", "admin": "127.0.0.1:15302", "clients": [], "transparent": "off" },
        "limits": { "connections": 10000, "head": "64KiB", "fields": 100, "target": "16KiB",
                    "header_timeout": "10s", "keep_alive": "2m", "streams": 100, "replay_total": "64MiB", "upstreams": 10000,
                    "fanout_body": "1MiB" },
        "dns": { "servers": [], "timeout": "2s" },
        "direct": [],
        "egress": { "default": "allow", "deny_private": false, "allow": [], "deny": [] },
        "tls": {},
        "drain": { "quiet": "1s", "max": "25s" },
        "shared_state": "off",
        "telemetry": { "access_log": "json" },
        "defaults": defaults,
        "upstreams": {},
    });
    assert_eq!(config.effective(), expected);
    assert_eq!(embedded().effective(), expected);
    let upstream = self::config("upstreams: { a: { hosts: [a.example] } }").upstreams[0].clone();
    assert_eq!(upstream.stages.effective(), stages);
    assert_eq!((upstream.origin, &upstream.tls), (Origin::Auto, &UpstreamTls::default()));
    assert!(!upstream.intercept);
    assert!(upstream.rewrite.is_none() && upstream.endpoint.is_none() && upstream.routes.is_empty());
}

#[test]
fn the_example_is_valid_and_says_the_defaults() {
    let example = loaded(EXAMPLE);
    assert_eq!(example.warnings.to_string(), "");
    let mut shown = example.config.effective();
    let mut defaults = config("{}").effective();
    for document in [&mut shown, &mut defaults] {
        // Those that the example says to differ.
        document["threads"] = Value::Null;
        document["direct"] = Value::Null;
        document["egress"] = Value::Null;
        document["tls"] = Value::Null;
        document["shared_state"] = Value::Null;
        document["upstreams"] = Value::Null;
    }
    assert_eq!(shown, defaults);
}

#[test]
fn every_valid_fixture_loads_and_its_effective_form_means_the_same() {
    for path in fixtures("valid") {
        let loaded = load(&path).unwrap_or_else(|problems| panic!("{problems}"));
        let effective = loaded.config.effective();
        let again = config(&effective.to_string());
        assert_eq!(again.effective(), effective, "{}", path.display());
        let routes = |config: &Config| -> Vec<_> {
            config.upstreams.iter().flat_map(|u| u.routes.iter().map(|route| route.own)).collect()
        };
        assert_eq!(routes(&again), routes(&loaded.config), "{}", path.display());
    }
}

#[test]
fn every_invalid_fixture_is_refused_with_its_message() {
    for path in fixtures("invalid") {
        let problems = load_fixture(&path).expect_err(&path.display().to_string());
        assert_is_expected(&path, &problems.to_string());
    }
}

#[test]
fn every_doubtful_fixture_loads_with_its_warnings() {
    for path in fixtures("doubtful") {
        let loaded = load_fixture(&path).unwrap_or_else(|problems| panic!("{problems}"));
        assert_is_expected(&path, &loaded.warnings.to_string());
    }
}

fn load_fixture(path: &FilePath) -> Result<Loaded, Problems> {
    let name = path.file_name().unwrap().to_str().unwrap();
    let text = fs::read_to_string(path).unwrap();
    // Relative, so that messages are the same wherever the repository lies.
    let sources = Sources::with_variables(FilePath::new("tests/config/invalid"), |_| None);
    load::load_text(name, &text, &sources)
}

/// `UPDATE_EXPECTED=1` writes what is printed now.
fn assert_is_expected(path: &FilePath, printed: &str) {
    let expected = path.with_extension("expected");
    if std::env::var_os("UPDATE_EXPECTED").is_some() {
        fs::write(&expected, printed).unwrap();
    }
    assert_eq!(printed, fs::read_to_string(&expected).unwrap_or_default(), "{}", path.display());
}

#[test]
fn the_narrower_section_wins_key_by_key() {
    let config = config(
        "defaults: { hedge: { min: 30ms, max: 2s }, breaker: off }
upstreams:
  a:
    hosts: [a.example]
    hedge: { min: 40ms }
    routes:
      - { path: /off, hedge: off }
      - { path: /narrow, hedge: { initial: 1s }, breaker: { open_for: 1s } }
      - { path: /plain }",
    );
    let policy = config.upstream("a").unwrap();
    let hedge =
        |stages: &Stages| stages.hedge.as_ref().map(|h| [h.initial, h.min, h.max].map(|d| d.as_millis()));
    assert_eq!(hedge(&policy.stages), Some([800, 40, 2000]));
    let routes: Vec<_> = policy.routes.iter().map(|route| hedge(&route.stages)).collect();
    assert_eq!(routes, [None, Some([1000, 40, 2000]), Some([800, 40, 2000])]);
    let own: Vec<_> = policy.routes.iter().map(|route| route.own.breaker).collect();
    assert_eq!(own, [false, true, false]);
    assert!(policy.stages.breaker.is_none());
}

#[test]
fn a_stage_that_is_on_again_keeps_the_keys_of_wider_sections() {
    let config = config(
        "defaults: { bulkhead: { max_concurrent: 7 } }
upstreams: { a: { hosts: [a], bulkhead: off, routes: [{ bulkhead: { max_queue: 3 } }] } }",
    );
    let policy = &config.upstreams[0];
    assert_eq!(policy.stages.bulkhead, None);
    assert_eq!(policy.routes[0].stages.bulkhead, Some(Bulkhead { max_concurrent: 7, max_queue: 3 }));
}

#[test]
fn stages_that_are_off_until_written_are_inherited_key_by_key_once_they_are() {
    let config = config(
        "defaults: { retry: { backoff: 50ms }, cache: off }
upstreams:
  a:
    hosts: [a.example]
    retry: { max_attempts: 4 }
    cache: { ttl: 9s, max_bytes: 512KiB }
    rate_limit: { rate: 2.5/s }
    routes:
      - { path: /off, retry: off, cache: off, rate_limit: off }
      - { path: /narrow, retry: { max_backoff: 3s }, cache: true, coalesce: true, rate_limit: { burst: 7 } }
      - { path: /plain }
  b: { hosts: [b.example], coalesce: on, rate_limit: { rate: 30/m } }",
    );
    let retry = |stages: &Stages| {
        stages.retry.as_ref().map(|r| (r.max_attempts, r.backoff.as_millis(), r.max_backoff.as_millis()))
    };
    let cache = |stages: &Stages| {
        stages.cache.as_ref().map(|c| (c.ttl.map(|t| t.as_secs()), c.max_bytes, c.max_body))
    };
    let burst = |stages: &Stages| stages.rate_limit.map(|limit| limit.burst);
    let seen = |stages: &Stages| (retry(stages), cache(stages), burst(stages), stages.coalesce.is_some());
    let kept = Some((Some(9), 512 << 10, 512 << 10));
    assert_eq!(seen(&config.defaults.stages), (Some((2, 50, 2000)), None, None, false));
    let [a, b] = &config.upstreams[..] else { panic!("two upstreams") };
    assert_eq!(seen(&a.stages), (Some((4, 50, 2000)), kept, Some(2), false));
    assert_eq!(seen(&a.routes[0].stages), (None, None, None, false));
    assert_eq!(seen(&a.routes[1].stages), (Some((4, 50, 3000)), kept, Some(7), true));
    assert_eq!(seen(&a.routes[2].stages), seen(&a.stages));
    assert_eq!(seen(&b.stages), (Some((2, 50, 2000)), None, Some(1), true));
    let own: Vec<_> = a.routes.iter().map(|route| route.own.rate_limit).collect();
    assert_eq!(own, [false, true, false]);
}

fn steps(stages: &Stages) -> Vec<String> {
    let step = |step: &FallbackStep| match step {
        FallbackStep::Upstream(name) => name.to_string(),
        FallbackStep::Stale(age) => format!("{age:?}"),
        FallbackStep::Degraded(answer) => answer.status.as_u16().to_string(),
    };
    stages.fallback.iter().map(step).collect()
}

#[test]
fn a_narrower_fallback_replaces_the_wider_one_as_a_whole() {
    let config = config(
        "defaults: { fallback: [{ upstream: b }, { degraded: {} }] }
upstreams:
  a:
    hosts: [a.example]
    routes:
      - { path: /none, fallback: [] }
      - { path: /off, fallback: off }
      - { path: /own, cache: true, fallback: [{ stale: 2s }] }
      - { path: /plain, hedge: off }
  b: { endpoint: http://b.svc, routes: [{ path: /x, hedge: off }] }
  c: { hosts: [c.example], fallback: [{ degraded: { status: 200 } }] }",
    );
    let [a, b, c] = &config.upstreams[..] else { panic!("three upstreams") };
    assert_eq!(steps(&config.defaults.stages), ["b", "503"]);
    assert_eq!(steps(&a.stages), ["b", "503"]);
    let routes: Vec<_> = a.routes.iter().map(|route| steps(&route.stages)).collect();
    assert_eq!(routes, [vec![], vec![], vec!["2s".to_owned()], vec!["b".into(), "503".into()]]);
    // It does not back itself up.
    assert_eq!(steps(&b.stages), ["503"]);
    assert_eq!(steps(&b.routes[0].stages), ["503"]);
    assert_eq!(steps(&c.stages), ["200"]);
    assert!(config.untouched.stages.fallback.is_empty());
}

#[test]
fn what_direct_lists_passes_untouched_unless_an_upstream_names_it() {
    let loaded = loaded(
        "direct: [loopback, '*.svc', 'Api.Example:8443', 10.0.0.0/8, 'fd00::/8', 192.0.2.7]
defaults: { stream_idle: 1s, connect_timeout: 10ms, tunnel_idle: 1s, retry: true, rate_limit: { rate: 9/s }, cache: true, coalesce: true, fallback: [{ degraded: {} }] }
upstreams: { named: { hosts: [tool.svc, 10.1.1.1] } }",
    );
    let name = |authority: &str| {
        let authority = Authority::parse(authority, None).unwrap();
        loaded.config.policy_for(&authority).name.to_string()
    };
    for (authority, expected) in [
        ("localhost:80", "direct"),
        ("127.9.9.9:1", "direct"),
        ("[::1]:1", "direct"),
        ("a.svc:80", "direct"),
        ("tool.svc:80", "named"),
        ("api.example:8443", "direct"),
        ("api.example:443", "default"),
        ("10.2.2.2:80", "direct"),
        ("10.1.1.1:80", "named"),
        ("[fd00::1]:80", "direct"),
        ("192.0.2.7:80", "direct"),
        ("192.0.2.8:80", "default"),
    ] {
        assert_eq!(name(authority), expected, "{authority}");
    }
    let stages = &loaded.config.untouched.stages;
    assert!(stages.retry.is_none() && stages.cache.is_none() && stages.fallback.is_empty());
    // Nor does a tight bound of the defaults cut them.
    assert_eq!(
        [stages.connect_timeout, stages.stream_idle, stages.tunnel_idle].map(|span| span.as_secs()),
        [2, 3600, 3600]
    );
    let explained = loaded.explain("http://a.svc/", &Method::GET).unwrap();
    assert_eq!((explained.upstream.as_str(), explained.host), ("direct", Some(("*.svc".into(), 1))));
    for (key, expected) in [("retry", "off | line 1, direct"), ("stream_idle", "1h | built in")] {
        let found = explained.values.iter().find(|value| value.key == key).unwrap();
        assert_eq!(format!("{} | {}", found.value, found.source), expected);
    }
}

#[test]
fn rules_on_addresses_mean_the_same_in_each_form() {
    let config = config(
        "direct: [Loopback, '::ffff:10.0.0.0/104', '::ffff:192.0.2.7']
egress: { deny: ['::ffff:10.9.0.0/112', '::ffff:192.0.2.9', '[::ffff:192.0.2.10]'] }
listen: { clients: ['::ffff:10.0.0.0/104', '::ffff:192.0.2.7', 'fd00::/8', '::/0'] }",
    );
    let ranges = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<IpNet>>();
    assert_eq!(config.listen.clients, ranges(&["10.0.0.0/8", "192.0.2.7/32", "fd00::/8", "::/0"]));
    let denied = ranges(&["10.9.0.0/16", "192.0.2.9/32", "192.0.2.10/32"]);
    assert_eq!(config.egress.deny, denied.into_iter().map(EgressRule::Range).collect::<Vec<_>>());
    for (authority, expected) in [
        ("10.1.2.3:80", "direct"),
        ("[::ffff:10.1.2.3]:80", "direct"),
        ("[::ffff:192.0.2.7]:80", "direct"),
        ("192.0.2.7:80", "direct"),
        ("192.0.2.8:80", "default"),
        ("11.0.0.1:80", "default"),
        ("localhost:80", "direct"),
        ("127.0.0.1:80", "direct"),
    ] {
        let policy = config.policy_for(&Authority::parse(authority, None).unwrap());
        assert_eq!(&*policy.name, expected, "{authority}");
    }
}

#[test]
fn stages_without_needs_can_be_switched_on_by_a_word() {
    for word in ["true", "on", "{}"] {
        let config = config(&format!("defaults: {{ retry: {word}, coalesce: {word}, cache: {word} }}"));
        let stages = &config.defaults.stages;
        assert!(stages.retry.is_some() && stages.coalesce.is_some() && stages.cache.is_some(), "{word}");
    }
    for word in ["false", "off", "~"] {
        let config = config(&format!("defaults: {{ retry: {word}, coalesce: {word}, cache: {word} }}"));
        let stages = &config.defaults.stages;
        assert!(stages.retry.is_none() && stages.coalesce.is_none() && stages.cache.is_none(), "{word}");
    }
    for word in ["yes", "1", "[]", "'true '"] {
        let problems = refused(&format!("defaults: {{ coalesce: {word} }}"));
        assert!(problems[0].contains("expected `true`, `off` or a mapping; found"), "{problems:?}");
    }
}

#[test]
fn interception_is_inherited_and_an_upstream_can_be_exempt() {
    let intercepts = |defaults: &str| -> Vec<bool> {
        let config = config(&format!(
            "tls: {{ ca_dir: /nonexistent }}
defaults: {{ {defaults} }}
upstreams:
  plain: {{ hosts: [a.example] }}
  exempt: {{ hosts: [b.example], intercept: off }}
  asked: {{ hosts: [c.example], intercept: on }}",
        ));
        config.policies().map(|policy| policy.intercept).collect()
    };
    assert_eq!(intercepts("intercept: true"), [true, false, true, true]);
    assert_eq!(intercepts(""), [false, false, true, false]);
}

#[test]
fn the_ca_s_directory_is_found_from_the_policy() {
    let dir = |text: &str| parse(text, FilePath::new("/etc/hedgerow")).unwrap().config.tls.ca_dir;
    assert_eq!(dir("tls: { ca_dir: ca }"), Some("/etc/hedgerow/ca".into()));
    assert_eq!(dir("tls: { ca_dir: /run/ca }"), Some("/run/ca".into()));
    assert_eq!(dir("tls: { ca_dir: off }"), None);
}

#[test]
fn a_backup_for_all_does_not_back_itself_up() {
    let config = config(
        "defaults: { hedge: { to: backup } }
upstreams:
  backup: { endpoint: http://b.example, routes: [{ path: /a }, { hedge: { min: 1ms } }] }
  other: { hosts: [a.example] }",
    );
    let to = |stages: &Stages| stages.hedge.as_ref().and_then(|hedge| hedge.to.as_deref().map(str::to_owned));
    let backup = config.upstream("backup").unwrap();
    assert_eq!(to(&backup.stages), None);
    assert!(backup.routes.iter().all(|route| to(&route.stages).is_none()));
    assert_eq!(to(&config.upstream("other").unwrap().stages).as_deref(), Some("backup"));
}

#[test]
fn off_has_two_spellings_and_other_words_have_none() {
    for off in ["off", "false", "'off'"] {
        assert!(config(&format!("defaults: {{ hedge: {off} }}")).defaults.stages.hedge.is_none(), "{off}");
    }
    for word in ["no", "on", "true", "none", "5", "[]"] {
        let problems = refused(&format!("defaults: {{ hedge: {word} }}"));
        assert!(problems[0].contains(": defaults.hedge: expected a mapping of after"), "{problems:?}");
    }
}

#[test]
fn a_section_without_keys_is_as_if_not_written() {
    let text = "defaults:\n  hedge:\n  # min: 1s\nupstreams:\n";
    assert_eq!(config(text).effective(), config("{}").effective());
}

#[test]
fn hosts_are_brought_into_the_form_that_requests_have() {
    let config = config(
        "upstreams:
  a: { hosts: [Bücher.Example., 'API.example:8443', '[0:0::1]:80', '*.SUB.example', 10.0.0.1] }
  b: { hosts: [api.example, '*.deep.sub.example', '*.sub.example:81'] }",
    );
    let name = |authority: &str| {
        let authority = Authority::parse(authority, None).unwrap();
        config.policy_for(&authority).name.to_string()
    };
    for (authority, expected) in [
        ("xn--bcher-kva.example:80", "a"),
        ("api.example:8443", "a"),
        ("api.example:443", "b"),
        ("[::1]:80", "a"),
        ("[::1]:81", "default"),
        ("x.sub.example:80", "a"),
        ("x.sub.example:81", "b"),
        ("x.deep.sub.example:80", "b"),
        ("sub.example:80", "default"),
        ("10.0.0.1:9", "a"),
    ] {
        assert_eq!(name(authority), expected, "{authority}");
    }
}

#[test]
fn globs_stop_at_segments_unless_doubled() {
    for (glob, path, expected) in [
        ("/v1/*", "/v1/a", true),
        ("/v1/*", "/v1/a/b", false),
        ("/v1/**", "/v1/a/b", true),
        ("/v1/**", "/v1", false),
        ("**/b", "/v1/a/b", true),
        ("/a.c", "/abc", false),
        ("/v1/*/x", "/v1/%2f/x", true),
        ("/v1/x*", "/v1/xyz", true),
    ] {
        let pattern = hosts::path_pattern(glob).unwrap();
        assert_eq!(pattern.regex.is_match(path), expected, "{glob} on {path}");
    }
}

#[test]
fn secrets_are_put_in_and_never_shown() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("key"), "file-secret\n").unwrap();
    let variable: fn(&str) -> Option<String> = |name| (name == "KEY").then(|| "env-secret".to_owned());
    let text = "upstreams: { a: { hosts: [a], rewrite: { headers: { set: {
        x-key: 'Bearer ${env:KEY}', x-file: '${file:key}', x-plain: 1.10 } } } } }";
    let loaded = load::load_text("p", text, &Sources::with_variables(dir.path(), variable)).unwrap();
    let set = &loaded.config.upstreams[0].rewrite.as_ref().unwrap().set;
    let values: Vec<_> = set.iter().map(|(_, value)| value.to_str().unwrap()).collect();
    assert_eq!(values, ["Bearer env-secret", "file-secret", "1.10"]);
    let shown = format!("{loaded:?} {}", loaded.config.effective());
    assert!(!shown.contains("env-secret") && !shown.contains("file-secret"), "{shown}");
}

#[test]
fn a_bad_secret_is_told_without_its_value() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("key"), "line\nhunter2\n").unwrap();
    let text = "upstreams: { a: { hosts: [a], rewrite: { headers: { set: { x-a: '${file:key}', x-b: \"p\\nhunter2\" } } } } }";
    let problems = load::load_text("p", text, &Sources::new(dir.path())).unwrap_err();
    assert_eq!(problems.len(), 2);
    assert!(!problems.to_string().contains("hunter2"), "{problems}");
    assert!(!format!("{problems:?} {}", problems.summary()).contains("hunter2"));
}

/// Slips of people who write a key into the policy itself.
#[test]
fn a_secret_that_stands_where_it_should_not_is_never_shown() {
    for wrong in [
        "rewrite: { headers: { set: 'x-api-key: canary' } }",
        "rewrite: { headers: { set: 'x-api-key: ${env:canary}' } }",
        "rewrite: { headers: { set: ['x-api-key: canary'] } }",
        "rewrite: { headers: { set: { 'x-api-key: canary' } } }",
        "rewrite: { headers: { set: { x-api-key: [canary], x-b: { a: canary } } } }",
        "rewrite: { headers: { set: { x-api-key: canary, X-Api-Key: canary, te: canary, 'b ad': canary } } }",
        "rewrite: { headers: { set: { y: '${env:ca-nary-canary}', z: '${canary}' }, remove: canary } }",
        "rewrite: { headers: { sett: { x-a: canary } } }",
        "rewrite: { header: { set: { x-a: canary } } }",
        "rewrite: { headers: { x-a: canary } }",
        "rewrite: [{ headers: { set: { x-a: canary } } }]",
        "rewrite: 'x-a: canary'",
        "headers: { x-a: canary }",
        "x-api-key: canary",
        "rewrite: { headers: { set: { x-a: canary } } }; bogus: 1",
        "rewrite: { headers: { set: { x-a: canary } } }; hedge: { to: nobody }",
        "rewrite: { headers: { set: { x-a: \"ca\\nnary canary\" } } }",
        "rewrite: { headers: { set: { x-a: \"canary } } }",
        "rewrite:\n      headers:\n        set:\n          x-a: \"canary",
        "rewrite:\n      headers:\n        set:\n          x-a: |\n            canary\n            canary",
        "fallback: [{ degraded: { headers: 'x-a: canary' } }]",
        "fallback: [{ degraded: { header: { x-a: canary } } }]",
        "fallback: [{ degraded: { headers: { x-a: [canary] } } }]",
        "endpoint: 'https://user:canary@a.example'",
        "endpoint: { url: 'https://canary:x@a.example' }",
        "hedge: 'https://user:canary@a.example'",
        "cache: { vary: 'https://user:canary@a.example' }",
        "tls: { client_cert: none.pem, client_key: MIIEcanarycanarycanary }",
    ] {
        let text = format!("upstreams:\n  a:\n    hosts: [a]\n    {}\n", wrong.replace("; ", "\n    "));
        let flow = format!("upstreams: {{ a: {{ hosts: [a], {} }} }}\n", wrong.replace("; ", ", "));
        for text in [text, flow] {
            let Err(problems) = parse(&text, FilePath::new("/nonexistent")) else { panic!("{text}") };
            let shown = format!("{problems}\n{problems:?}\n{}", problems.summary());
            assert!(!shown.contains("canary"), "{text}\n{shown}");
        }
    }
}

#[test]
fn secrets_of_degraded_answers_are_put_in_and_never_shown() {
    let variable: fn(&str) -> Option<String> = |name| (name == "KEY").then(|| "env-secret".to_owned());
    let answer = "fallback: [{ degraded: { headers: { x-key: '${env:KEY}', X-Plain: literal-secret } } }]";
    let text = format!(
        "defaults: {{ {answer} }}
upstreams:
  a: {{ hosts: [a], {answer}, routes: [{{ {answer} }}] }}"
    );
    let load = |text: &str| load::load_text("p", text, &Sources::with_variables(FilePath::new(""), variable));
    let loaded = load(&text).unwrap();
    let a = &loaded.config.upstreams[0];
    for stages in [&loaded.config.defaults.stages, &a.stages, &a.routes[0].stages] {
        let [FallbackStep::Degraded(answer)] = &*stages.fallback else { panic!("{stages:?}") };
        let values: Vec<_> = answer.headers.iter().map(|(_, value)| value.to_str().unwrap()).collect();
        assert_eq!(values, ["env-secret", "literal-secret"]);
    }
    let explained = loaded.explain("http://a/", &Method::GET).unwrap();
    let shown = format!("{loaded:?} {} {explained} {explained:?}", loaded.config.effective());
    assert!(!shown.contains("-secret"), "{shown}");
    // Nor in the line that is quoted for a mistake.
    let problems = load(&text.replace("X-Plain: literal", "X-Key: literal")).unwrap_err();
    assert_eq!(problems.len(), 3);
    assert!(!problems.to_string().contains("-secret"), "{problems}");
}

#[test]
fn certificates_are_read_beside_the_policy_and_count_in_the_hash() {
    let dir = tempfile::tempdir().unwrap();
    let pem = || rcgen::generate_simple_self_signed(vec!["a.example".to_owned()]).unwrap().cert.pem();
    let path = dir.path().join("policy.yaml");
    fs::write(&path, "tls: { ca_file: ca.pem }\nupstreams: { a: { hosts: [a], tls: { ca_file: ca.pem } } }")
        .unwrap();
    fs::write(dir.path().join("ca.pem"), pem()).unwrap();
    let first = load(&path).unwrap().config;
    assert!(first.tls.ca_pem.is_some() && first.upstreams[0].tls.ca_pem == first.tls.ca_pem);
    fs::write(dir.path().join("ca.pem"), pem()).unwrap();
    assert_ne!(load(&path).unwrap().config.hash, first.hash);
    fs::write(dir.path().join("ca.pem"), "no certificate").unwrap();
    let problems = load(&path).unwrap_err().to_string();
    assert!(problems.contains("1:17: tls.ca_file: the file holds no PEM certificate"), "{problems}");
}

#[test]
fn what_is_no_text_is_refused_with_its_line() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("policy.yaml");
    fs::write(&path, b"a: 1\nb: \xff\n").unwrap();
    assert!(load(&path).unwrap_err().to_string().contains("policy.yaml:2:1: the file is not UTF-8"));
    assert!(load(dir.path()).unwrap_err().to_string().contains("is no regular file"));
}

#[test]
fn problems_behind_the_hundredth_are_left_for_the_next_time() {
    let items: String = (0..500).map(|n| format!("  - [{n}]\n")).collect();
    assert_eq!(refused(&format!("dns:\n  servers:\n{items}")).len(), 100);
}

#[test]
fn the_sum_of_many_caches_is_told() {
    let told = |upstreams: usize, cache: &str, more: &str| {
        let upstreams: String =
            (0..upstreams).map(|n| format!("  u{n}: {{ hosts: [u{n}] {more} }}\n")).collect();
        let text =
            format!("defaults: {{ cache: {cache} }}\nupstreams:\n  b: {{ endpoint: http://b }}\n{upstreams}");
        loaded(&text).warnings.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    assert!(told(15, "true", "").is_empty());
    let warning = "1:20: warning: defaults.cache: 17 caches may take 1088MiB together: each upstream has `max_bytes` for itself";
    assert_eq!(told(16, "true", ""), [warning]);
    let warning = "1:33: warning: defaults.cache.max_bytes: 2 caches may take 1200MiB together: each upstream has `max_bytes` for itself";
    assert_eq!(told(1, "{ max_bytes: 600MiB }", ""), [warning]);
    // Routes with a size of their own have a store of their own.
    let routes = ", cache: { max_bytes: 600MiB }, routes: [{ path: /a, hedge: off }, { path: /b, cache: { max_bytes: 500MiB } }]";
    let warning = "4:43: warning: upstreams.u0.cache.max_bytes: 2 caches may take 1100MiB together: each upstream has `max_bytes` for itself";
    assert_eq!(told(1, "off", routes), [warning]);
}

#[test]
fn no_number_of_warnings_hides_an_error() {
    let doubtful: String = (0..200)
        .map(|n| format!("  u{n}: {{ hosts: [u{n}], hedge: {{ after: p75 }}, retry: , cache: }}\n"))
        .collect();
    assert_eq!(loaded(&format!("upstreams:\n{doubtful}")).warnings.len(), 200);
    for wrong in ["retry: { max_attempts: 0 }", "hegde: off", "fallback: [{}]", "breaker: { open_for: 0s }"] {
        let problems = refused(&format!("upstreams:\n{doubtful}  last: {{ hosts: [last], {wrong} }}\n"));
        assert!(problems.iter().any(|problem| problem.contains("upstreams.last.")), "{wrong}");
    }
}

#[test]
fn warnings_keep_no_policy_from_loading() {
    let loaded = loaded(
        "defaults: { hedge: { after: p75 }, deadline: { default: 1h } }
listen: { admin: 0.0.0.0:1 }
upstreams: { a: { hosts: [a], routes: [{ name: x }, { path: /y }], breaker: { consecutive_failures: off } } }",
    );
    let warnings: Vec<_> = loaded.warnings.iter().map(ToString::to_string).collect();
    assert_eq!(
        warnings,
        [
            "1:29: warning: defaults.hedge.after: p75 hedges 25% of the calls, but extra_load.ratio pays for 10%",
            "1:57: warning: defaults.deadline.default: default (1h) is cut to max (15m)",
            "2:18: warning: listen.admin: not a loopback address: whoever reaches it can read the policy and set breakers",
            "3:53: warning: upstreams.a.routes[1]: never reached: the route in line 3 takes every call",
            "3:101: warning: upstreams.a.breaker.consecutive_failures: all rules are off, so the breaker never opens",
        ]
    );
}

#[test]
fn explain_names_the_line_of_each_value() {
    let text = "tls: { ca_dir: /run/ca }
defaults: { intercept: true,
  hedge: { min: 30ms } }
upstreams:
  quotes:
    hosts: ['*.quotes.example', quotes.example]
    hedge: { after: 1s }
    tls: { server_name: quotes.internal }
    routes:
      - { path: /v1/*, name: one, bulkhead: { max_queue: 1 } }
";
    let loaded = loaded(text);
    let explanation = loaded.explain("https://Quotes.Example/v1/a?x=y", &Method::GET).unwrap();
    assert_eq!(explanation.authority.key(), "quotes.example:443");
    assert_eq!(explanation.upstream, "quotes");
    assert_eq!(explanation.host, Some(("quotes.example".to_owned(), 6)));
    assert_eq!(explanation.route, Some(("one".to_owned(), 10)));
    let source = |key: &str| {
        let found = explanation.values.iter().find(|value| value.key == key).unwrap();
        format!("{} | {}", found.value, found.source)
    };
    assert_eq!(source("hedge.after"), "1s | line 7, upstreams.quotes");
    assert_eq!(source("hedge.min"), "30ms | line 3, defaults");
    assert_eq!(source("hedge.max"), "1.2s | built in");
    assert_eq!(source("bulkhead.max_queue"), "1 | line 10, upstreams.quotes.routes[0]");
    assert_eq!(source("origin"), "auto | built in");
    assert_eq!(source("intercept"), "true | line 2, defaults");
    assert_eq!(source("tls.server_name"), "quotes.internal | line 8, upstreams.quotes");

    assert_eq!(source("retry"), "off | built in");
    assert_eq!(source("fallback"), "[] | built in");

    let other = loaded.explain("http://other.example/", &Method::GET).unwrap();
    assert_eq!((other.upstream.as_str(), other.host, other.route), ("default", None, None));
    for url in ["quotes.example", "/v1", "ftp://a", "http://u@a/", "http://127.1/", ""] {
        assert!(loaded.explain(url, &Method::GET).is_err(), "{url}");
    }
}

#[test]
fn explain_tells_what_turned_a_stage_on_and_counts_steps_as_the_file_does() {
    let loaded = loaded(
        "defaults:
  retry: { backoff: 50ms }
  fallback:
    - upstream: b
    - upstream: c
    - degraded: {}
upstreams:
  b: { hosts: [b.svc], cache: true, retry: { max_attempts: 3 } }
  c: { hosts: [c.svc], retry: off }",
    );
    let rows = |url: &str| -> Vec<String> {
        let explained = loaded.explain(url, &Method::GET).unwrap();
        let of_stage = |key: &str| ["retry", "cache", "fallback"].iter().any(|stage| key.starts_with(stage));
        let row = |Explained { key, value, source }: &Explained| format!("{key} {value} ({source})");
        explained.values.iter().filter(|value| of_stage(&value.key)).map(row).collect()
    };
    assert_eq!(
        rows("http://b.svc/"),
        [
            "retry on (line 8, upstreams.b)",
            "retry.max_attempts 3 (line 8, upstreams.b)",
            "retry.backoff 50ms (line 2, defaults)",
            "retry.max_backoff 2s (built in)",
            "retry.methods [GET, HEAD, OPTIONS] (built in)",
            "cache on (line 8, upstreams.b)",
            "cache.stale_if_error 0s (built in)",
            "cache.stale_while_revalidate 0s (built in)",
            "cache.max_bytes 64MiB (built in)",
            "cache.max_body 1MiB (built in)",
            "cache.vary [] (built in)",
            "cache.shared false (built in)",
            "fallback[1].upstream c (line 5, defaults)",
            "fallback[2].degraded on (line 6, defaults)",
            "fallback[2].degraded.status 503 (built in)",
        ]
    );
    let c = rows("http://c.svc/");
    assert_eq!(c[0], "retry off (line 9, upstreams.c)");
    assert_eq!(c[2], "fallback[0].upstream b (line 4, defaults)");
    assert_eq!(c[3], "fallback[2].degraded on (line 6, defaults)");
}

#[test]
fn ten_thousand_upstreams_load_and_one_more_does_not() {
    let text = |n: usize| -> String {
        let entries: String =
            (0..n).map(|i| format!("  u{i}: {{ hosts: [u{i}.example], hedge: off }}\n")).collect();
        format!("upstreams:\n{entries}")
    };
    assert_eq!(config(&text(10_000)).upstreams.len(), 10_000);
    assert_eq!(refused(&text(10_001)), ["1:1: upstreams: 10001 upstreams; at most 10000"]);
}

/// Walks the example along the schema and marks each key of each struct that it shows.
fn mark(schema: &Value, at: &Value, node: &tree::Node, shown: &mut BTreeMap<String, BTreeSet<String>>) {
    if let Some(options) = at.get("anyOf").and_then(Value::as_array) {
        options.iter().for_each(|option| mark(schema, option, node, shown));
        return;
    }
    if let Some(reference) = at.get("$ref").and_then(Value::as_str) {
        let name = reference.trim_start_matches("#/$defs/");
        let tree::Value::Map(entries) = &node.value else { return };
        shown.entry(name.to_owned()).or_default().extend(entries.iter().map(|entry| entry.key.clone()));
        mark(schema, &schema["$defs"][name], node, shown);
        return;
    }
    match &node.value {
        tree::Value::Map(entries) => {
            for entry in entries {
                let of_key = at.get("properties").and_then(|keys| keys.get(&entry.key));
                let any_key = || at.get("additionalProperties").filter(|any| any.is_object());
                match of_key.or_else(any_key) {
                    Some(next) => mark(schema, next, &entry.value, shown),
                    // Another of several forms, such as `off` for a stage.
                    None if at.get("properties").is_none() => {}
                    None => panic!("the schema lacks `{}`, line {}", entry.key, entry.place.line),
                }
            }
        }
        tree::Value::List(items) => {
            items.iter().for_each(|item| mark(schema, &at["items"], item, shown));
        }
        _ => {}
    }
}

#[test]
fn the_example_shows_every_key_of_the_schema_that_is_supported() {
    let schema = schema();
    // Files do not exist beside the example, so the lines that name them are comments there.
    let named = ["ca_dir", "ca_cert", "ca_key", "ca_file", "client_cert", "client_key"];
    let example = named
        .iter()
        .fold(EXAMPLE.to_owned(), |text, key| text.replace(&format!("# {key}:"), &format!("{key}:")));
    let tree = tree::parse(&example).unwrap();
    let mut shown = BTreeMap::new();
    mark(&schema, &schema, &tree, &mut shown);
    // A stage need not stand in all three kinds of section.
    let stages = shown["Defaults"].clone();
    for section in ["Upstream", "Route"] {
        shown.get_mut(section).unwrap().extend(stages.iter().cloned());
    }
    let to_come: BTreeSet<&str> = unsupported::keys().collect();
    for (name, keys) in &shown {
        for key in schema["$defs"][name]["properties"].as_object().unwrap().keys() {
            assert!(keys.contains(key) || to_come.contains(key.as_str()), "the example lacks {name}.{key}");
        }
    }
    assert!(shown.len() >= 17, "{shown:?}");
    assert!(
        schema["$defs"]
            .as_object()
            .unwrap()
            .values()
            .all(|object| { object.get("properties").is_none() || object["additionalProperties"] == false })
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_text_gives_a_policy_or_problems_with_places(text in "\\PC{0,80}|([a-z]{1,6}: ?[\\[{\"&*!|>~a-z0-9%]{0,4}\n? {0,3}){1,8}") {
        check_any(&text)?;
    }

    #[test]
    fn any_change_to_the_example_gives_a_policy_or_problems_with_places(
        line in 0usize..200,
        replacement in prop_oneof![
            Just("~".to_owned()), Just("off".to_owned()), Just("[]".to_owned()), Just("{}".to_owned()),
            Just("-1".to_owned()), Just("1e999".to_owned()), Just("${env:X}".to_owned()), Just("*".to_owned()),
            Just("'".to_owned()), "\\PC{0,10}", "[0-9]{1,25}(ms|s|%|/s|KiB)?",
        ],
        is_key in any::<bool>(),
    ) {
        let mut lines: Vec<String> = EXAMPLE.lines().map(str::to_owned).collect();
        let line = line % lines.len();
        if let Some((key, value)) = lines[line].clone().split_once(':') {
            lines[line] = if is_key {
                let indent = key.len() - key.trim_start().len();
                format!("{}{replacement}:{value}", &key[..indent])
            } else {
                format!("{key}: {replacement}")
            };
        }
        check_any(&lines.join("\n"))?;
    }
}

fn check_any(text: &str) -> Result<(), TestCaseError> {
    match parse(text, FilePath::new("/nonexistent")) {
        Ok(loaded) => {
            let effective = loaded.config.effective();
            prop_assert!(effective.is_object());
        }
        Err(problems) => {
            prop_assert!(!problems.is_empty());
            let lines = text.lines().count().max(1) + 1;
            for problem in problems.iter() {
                prop_assert!(problem.place.line <= lines, "{} of {}", problem, lines);
                prop_assert!(!problem.message.is_empty());
            }
            prop_assert!(!problems.to_string().is_empty());
        }
    }
    Ok(())
}
