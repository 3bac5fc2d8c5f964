//! `shared_state` and what is shared, as a policy says it.

use std::fs;
use std::path::Path as FilePath;
use std::time::Duration;

use super::{config, load, loaded, parse, refused};
use crate::config::files::Sources;
use crate::config::{Config, Loaded, Login, Method, Problems, RedisKind, SharedState, Stages, Surroundings};

/// Passwords with all that is special in a URL, and a whole URL.
fn variable(name: &str) -> Option<String> {
    match name {
        "PASSWORD" => Some("env@/#%:?secret".to_owned()),
        "HOST" => Some("redis.example".to_owned()),
        "EMPTY" => Some(String::new()),
        "NODES" => Some("a.example:7000,b.example".to_owned()),
        "URL" => Some("redis-cluster://user:env%2Fsecret@a.example\n".to_owned()),
        "BROKEN" => Some("redis://user:env-secret@a.example:port".to_owned()),
        _ => None,
    }
}

/// A policy that shares breakers through the Redis of this URL.
fn sharing(redis: &str) -> String {
    format!("shared_state: {{ redis: '{redis}' }}\ndefaults: {{ breaker: {{ shared: true }} }}\n")
}

fn load_with(text: &str, dir: &FilePath) -> Result<Loaded, Problems> {
    load::load_text("p", text, &Sources::with_variables(dir, variable))
}

fn shared_state(loaded: Loaded) -> SharedState {
    loaded.config.shared_state.expect("it is on")
}

fn warnings(loaded: &Loaded) -> Vec<String> {
    loaded.warnings.iter().map(|problem| problem.message.clone()).collect()
}

#[test]
fn without_keys_of_its_own_the_defaults_hold() {
    let shared = shared_state(loaded(&sharing("redis://a.example")));
    assert_eq!((shared.timeout, shared.quorum), (Duration::from_millis(25), 2));
    assert_eq!(&*shared.prefix, "hedgerow");
    for off in ["", "shared_state: off", "shared_state: false", "shared_state:"] {
        assert_eq!(config(&format!("{off}\ndrain: {{}}\n")).shared_state, None, "{off}");
    }
}

#[test]
fn a_substitution_beside_other_text_is_one_part_of_the_url_and_alone_all_of_it() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("password"), "file@/#%:?secret\r\n").unwrap();
    fs::write(dir.path().join("url"), "rediss://:p%40ss@a.example/3\n").unwrap();
    let read = |url: &str| {
        let loaded =
            load_with(&sharing(url), dir.path()).unwrap_or_else(|problems| panic!("{url}: {problems}"));
        assert_eq!(warnings(&loaded), [""; 0], "{url}");
        shared_state(loaded).redis
    };
    let login = |user: Option<&str>, password: &str| Login {
        user: user.map(str::to_owned),
        password: Some(password.to_owned()),
    };
    let single = read("redis://:${env:PASSWORD}@a.example");
    assert_eq!((single.kind, single.login), (RedisKind::Single, login(None, "env@/#%:?secret")));
    let both = read("redis://${env:PASSWORD}:${file:password}@a.example");
    assert_eq!(both.login, login(Some("env@/#%:?secret"), "file@/#%:?secret"));
    let cluster = read(" ${env:URL} ");
    assert_eq!((cluster.kind, cluster.login), (RedisKind::Cluster, login(Some("user"), "env/secret")));
    let of_file = read("${file:url}");
    assert_eq!((of_file.is_tls, of_file.database, of_file.login), (true, 3, login(None, "p@ss")));
    let sentinel =
        read("redis-sentinel://${env:NODES},[::1]/main?sentinel_user=s&sentinel_password=${file:password}");
    let servers = [("a.example", 7000), ("b.example", 26379), ("::1", 26379)];
    assert_eq!(sentinel.servers, servers.map(|(host, port)| (host.to_owned(), port)));
    let RedisKind::Sentinel { login: own, .. } = sentinel.kind else { panic!("{:?}", sentinel.kind) };
    assert_eq!(own, login(Some("s"), "file@/#%:?secret"));
}

#[test]
fn a_file_with_the_password_is_one_of_the_policy_s_own() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("policy.yaml");
    fs::write(&path, sharing("redis://:${file:password}@a.example")).unwrap();
    fs::write(dir.path().join("password"), "one").unwrap();
    let (first, loaded) = load::read(&path, &Surroundings::default());
    assert_eq!(first.files, [dir.path().join("password")]);
    fs::write(dir.path().join("password"), "two").unwrap();
    assert_ne!(load::glance(&path, &first.files), first.fingerprint);
    // The hash that is shown knows nothing of it.
    assert_eq!(
        load::read(&path, &Surroundings::default()).1.unwrap().config.hash,
        loaded.unwrap().config.hash
    );
}

#[test]
fn users_and_passwords_are_never_shown_and_hosts_are() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("password"), "file-secret").unwrap();
    for (url, shown) in [
        ("redis://:${env:PASSWORD}@redis.example", "redis://:[secret]@redis.example:6379"),
        (
            "redis://user-secret:${file:password}@redis.example/1",
            "redis://[secret]:[secret]@redis.example:6379/1",
        ),
        ("redis://:literal-secret@redis.example", "redis://:[secret]@redis.example:6379"),
        ("redis://literal-secret@redis.example", "redis://[secret]@redis.example:6379"),
        ("${env:URL}", "redis-cluster://[secret]:[secret]@a.example:6379"),
        (
            "redis-sentinel://redis.example/main?sentinel_user=user-secret&sentinel_password=${env:PASSWORD}",
            "redis-sentinel://redis.example:26379/main?sentinel_user=[secret]&sentinel_password=[secret]",
        ),
    ] {
        let loaded = load_with(&sharing(url), dir.path()).unwrap();
        let effective = loaded.config.effective();
        assert_eq!(effective["shared_state"]["redis"], shown);
        let explained = loaded.explain("http://a/", &Method::GET).unwrap();
        let (debug, warnings) = (format!("{loaded:?}"), &loaded.warnings);
        for told in [effective.to_string(), debug, explained.to_string(), warnings.to_string()] {
            for secret in ["-secret", "env@", "env%", "env/"] {
                assert!(!told.contains(secret), "{url}: {told}");
            }
        }
    }
}

/// Slips of people who write a password into the policy itself.
#[test]
fn a_password_is_not_shown_in_what_is_wrong() {
    for wrong in [
        "shared_state: { redis: 'redis://user:canary@ss@redis.example' }",
        "shared_state: { redis: 'redis//:canary@redis.example' }",
        "shared_state: { redis: 'redis://:canary' }",
        "shared_state: { redis: 'redis://:can/canary@redis.example' }",
        "shared_state: { redis: 'redis://:canary@redis.example/canary' }",
        "shared_state: { redis: 'redis://:%canary@redis.example' }",
        "shared_state: { redis: 'redis-sentinel://redis.example/main?password=canary' }",
        "shared_state: { redis: canary }",
        "shared_state: { redis: [ 'redis://:canary@redis.example' ] }",
        "shared_state: { redis: { url: canary } }",
        "shared_state: { redis: 'redis://:canary${env:MISSING}@redis.example' }",
        "shared_state: { redis: 'redis://:canary${@redis.example' }",
        "shared_state: { redis: 'redis://:${canary}@redis.example' }",
        "shared_state: { redis: ['${env:canary}'] }",
        "shared_state: { redis: 'redis://:canary@redis.example', timeout: 25 }",
        "shared_state: { redis: 'redis://:canary@redis.example', prefix: '' }; defaults: { hegde: off }",
        "shared_state: { url: 'redis://:canary@redis.example' }",
        "shared_state: { redis: redis://a, password: canary }",
        "shared_state: { 'redis: redis://:canary@redis.example' }",
        "shared_state: { redis:redis://:canary@redis.example }",
        "shared_state: 'redis://:canary@redis.example'",
        "shared_state: redis://canary",
        "shared_state: ['redis://:canary@redis.example']",
        "shared_state: '${env:canary}'",
        "shared_state: { redis: \"redis://:canary@redis.example }",
        "shared_state:; redis: \"redis://:canary@redis.example",
        "redis: 'redis://:canary@redis.example'",
        "defaults: { shared_state: { redis: 'redis://:canary' } }",
    ] {
        let text = format!("{}\n", wrong.replace("; ", "\n  ").replace("\n  defaults", "\ndefaults"));
        let Err(problems) = parse(&text, FilePath::new("/nonexistent")) else { panic!("{text}") };
        let shown = format!("{problems}\n{problems:?}\n{}", problems.summary());
        assert!(!shown.contains("canary"), "{text}\n{shown}");
    }
}

#[test]
fn what_is_wrong_with_a_substitution_is_told() {
    let told = |url: &str| -> Vec<String> {
        let problems = load_with(&sharing(url), FilePath::new("/nonexistent")).expect_err(url);
        assert!(!problems.to_string().contains("-secret"), "{problems}");
        problems.iter().map(ToString::to_string).collect()
    };
    for (url, expected) in [
        ("redis://:${env:MISSING}@a", "the environment variable MISSING is not set"),
        ("${env:MISSING}", "the environment variable MISSING is not set"),
        ("${file:none}", "cannot read /nonexistent/none: No such file or directory (os error 2)"),
        ("${vault:x}", "expected `${env:NAME}` or `${file:PATH}`"),
        ("redis://:${env:PASSWORD@a", "`${` lacks its `}`"),
        ("${env:BROKEN}", "the port is no number"),
        (
            "redis://a/${env:NODES}",
            "expected the number of a database at the end; a `/` in a password is written `%2F`; what is put in \
             for `${…}` beside other text is percent-encoded",
        ),
    ] {
        assert_eq!(told(url), [format!("1:24: shared_state.redis: {expected}")]);
    }
    // Its place is not any.
    let problems = refused(
        "defaults: { breaker: { shared: true } }\nshared_state: { redis: redis://a, prefix: '${env:X}' }",
    );
    let expected = "2:43: shared_state.prefix: `${…}` is only replaced in shared_state.redis and in the values of \
                    rewrite.headers.set and degraded.headers";
    assert_eq!(problems, [expected]);
}

#[test]
fn a_password_in_clear_and_a_login_that_is_none_are_told() {
    let in_clear =
        "a password in clear; `${env:NAME}` or `${file:PATH}` in its place keeps it out of the file";
    let alone =
        "nobody logs in: a user without a password; a password alone is written `redis://:PASSWORD@HOST`";
    let at_sentinels = "nobody logs in at the Sentinels: `sentinel_user` without `sentinel_password`";
    for (url, expected) in [
        ("redis://:p@a", &[in_clear][..]),
        ("redis://:p${env:PASSWORD}@a", &[in_clear]),
        ("redis://user:p@${env:HOST}:7000", &[in_clear]),
        ("redis-sentinel://${env:NODES}/main?sentinel_password=p", &[in_clear]),
        ("redis-sentinel://a/main?sentinel_user=p", &[at_sentinels]),
        ("redis://user@a", &[alone]),
        ("redis://:${env:EMPTY}@a", &["nobody logs in: the password is empty"]),
        ("redis://user:${env:EMPTY}@a", &[]),
        ("redis://user:${env:PASSWORD}@a", &[]),
        ("redis://a", &[]),
    ] {
        let loaded = load_with(&sharing(url), FilePath::new("")).unwrap();
        assert_eq!(warnings(&loaded), expected, "{url}");
    }
    let empty = load_with(&sharing("redis://:${env:EMPTY}@a"), FilePath::new("")).unwrap();
    assert_eq!(shared_state(empty).redis.login, Login::default());
    let nopass = load_with(&sharing("redis://user:@a"), FilePath::new("")).unwrap();
    assert_eq!(shared_state(nopass).redis.login.password.as_deref(), Some(""));
}

#[test]
fn bounds_hold_at_their_ends() {
    let problems = |keys: &str| -> Vec<String> {
        let text = format!(
            "shared_state: {{ redis: redis://a, {keys} }}\ndefaults: {{ cache: {{ shared: true }} }}"
        );
        match parse(&text, FilePath::new("")) {
            Ok(loaded) => warnings(&loaded),
            Err(problems) => problems.iter().map(|problem| problem.message.clone()).collect(),
        }
    };
    let long = format!("prefix: {}", "x".repeat(64));
    for fine in
        ["timeout: 1ms", "timeout: 1s", "quorum: 2", "quorum: 1000", "prefix: '{a}:b'", "prefix: 1", &long]
    {
        assert_eq!(problems(fine), [""; 0], "{fine}");
    }
    let timeout = "expected 1ms to 1s: a request may wait that long";
    let quorum = "expected 1 to 1000";
    let prefix = "expected 1 to 64 visible ASCII characters without blanks";
    let colon = "expected no `:` at its end: one is put between it and the rest of a key";
    let alone = "one pod that sees failures, be it for its own network, opens a breaker for all";
    for (keys, expected) in [
        ("timeout: 999us", timeout),
        ("timeout: 1.001s", timeout),
        ("timeout: 0s", timeout),
        ("quorum: 0", quorum),
        ("quorum: 1001", quorum),
        ("quorum: 1", alone),
        ("prefix: ''", prefix),
        ("prefix: 'a b'", prefix),
        ("prefix: ä", prefix),
        ("prefix: \"a\\tb\"", prefix),
        (&format!("{long}x"), prefix),
        ("prefix: 'a:'", colon),
    ] {
        assert_eq!(problems(keys), [expected], "{keys}");
    }
}

#[test]
fn roots_of_the_policy_are_those_of_a_redis_over_tls() {
    let dir = tempfile::tempdir().unwrap();
    let pem = rcgen::generate_simple_self_signed(vec!["a.example".to_owned()]).unwrap().cert.pem();
    fs::write(dir.path().join("ca.pem"), pem).unwrap();
    let roots = |url: &str| {
        let text = format!("tls: {{ ca_file: ca.pem }}\n{}", sharing(url));
        let Config { shared_state, tls, .. } = parse(&text, dir.path()).unwrap().config;
        (shared_state.unwrap().redis.ca_pem, tls.ca_pem)
    };
    for url in ["rediss://a", "rediss-cluster://a", "rediss-sentinel://a/main"] {
        let (of_redis, of_all) = roots(url);
        assert!(of_redis.is_some() && of_redis == of_all, "{url}");
    }
    assert_eq!(roots("redis://a").0, None);
}

/// Whether breaker, rate limit and cache are shared.
fn shared(stages: &Stages) -> [Option<bool>; 3] {
    [
        stages.breaker.as_ref().map(|breaker| breaker.is_shared),
        stages.rate_limit.map(|limit| limit.is_shared),
        stages.cache.as_ref().map(|cache| cache.is_shared),
    ]
}

#[test]
fn what_is_shared_is_inherited_key_by_key() {
    let config = config(
        "shared_state: { redis: redis://a }
defaults: { breaker: { shared: true }, cache: { shared: on } }
upstreams:
  a:
    hosts: [a.example]
    breaker: { open_for: 1s }
    rate_limit: { rate: 1/s, shared: true }
    cache: off
    routes:
      - { name: plain, path: /plain }
      - { name: own, path: /own, breaker: { shared: false }, rate_limit: { burst: 2 }, cache: true }
  b: { hosts: [b.example], breaker: { shared: off }, cache: { shared: false } }",
    );
    let [a, b] = &config.upstreams[..] else { panic!("two upstreams") };
    assert_eq!(shared(&config.defaults.stages), [Some(true), None, Some(true)]);
    assert_eq!(shared(&a.stages), [Some(true), Some(true), None]);
    assert_eq!(shared(&a.routes[0].stages), [Some(true), Some(true), None]);
    assert_eq!(shared(&a.routes[1].stages), [Some(false), Some(true), Some(true)]);
    assert_eq!(shared(&b.stages), [Some(false), None, Some(false)]);
    assert_eq!(shared(&config.untouched.stages), [None; 3]);
}

#[test]
fn a_route_without_a_name_shares_its_state_as_the_upstream_does() {
    let config = config(
        "shared_state: { redis: redis://a }
upstreams:
  a:
    hosts: [a.example]
    breaker: { shared: true }
    rate_limit: { rate: 1/s }
    routes:
      - { path: /nameless, breaker: { shared: false }, rate_limit: { rate: 2/s, shared: true }, cache: { shared: true } }
      - { path: /named, name: named, breaker: { shared: false }, rate_limit: { rate: 2/s, shared: true } }
  b: { hosts: [b.example], routes: [{ path: /alone, rate_limit: { rate: 2/s, shared: true } }] }",
    );
    let [a, b] = &config.upstreams[..] else { panic!("two upstreams") };
    assert_eq!(shared(&a.routes[0].stages), [Some(true), Some(false), Some(true)]);
    assert_eq!(shared(&a.routes[1].stages), [Some(false), Some(true), None]);
    // Its tokens are the upstream's, which nobody else takes.
    assert_eq!(shared(&b.routes[0].stages), [Some(false), Some(true), None]);
}

#[test]
fn sharing_in_vain_is_told_by_each_side() {
    let error = "needs shared_state.redis, the URL of a Redis that all pods have in common";
    for text in ["", "shared_state: off", "shared_state: false", "shared_state:"] {
        let problems = refused(&format!("{text}\ndefaults: {{ breaker: {{ shared: true }} }}"));
        assert_eq!(problems, [format!("2:32: defaults.breaker.shared: {error}")]);
    }
    // A place that is written wrong is one.
    for text in ["shared_state: on", "shared_state: { redis: x }", "shared_state: {}", "shared_state: []"] {
        let problems = refused(&format!("{text}\ndefaults: {{ breaker: {{ shared: true }} }}"));
        assert!(problems.len() == 1 && problems[0].starts_with("1:"), "{problems:?}");
    }
    let nothing = "nothing is shared: that takes `shared: true` in a breaker, rate_limit or cache";
    let told = |rest: &str| warnings(&loaded(&format!("shared_state: {{ redis: redis://a }}\n{rest}")));
    assert_eq!(told(""), [nothing]);
    assert_eq!(told("defaults: { breaker: { shared: false }, cache: true }"), [nothing]);
    for stage in
        ["breaker: { shared: true }", "rate_limit: { rate: 1/s, shared: true }", "cache: { shared: true }"]
    {
        assert_eq!(told(&format!("defaults: {{ {stage} }}")), [""; 0]);
        assert_eq!(told(&format!("upstreams: {{ a: {{ hosts: [a], {stage} }} }}")), [""; 0]);
        assert_eq!(
            told(&format!("upstreams: {{ a: {{ hosts: [a], routes: [{{ name: r, {stage} }}] }} }}")),
            [""; 0]
        );
    }
}

#[test]
fn explain_says_what_is_shared_and_where() {
    let loaded = loaded(
        "shared_state: { redis: redis://a }
defaults:
  breaker: { shared: true }
upstreams:
  a: { hosts: [a], rate_limit: { rate: 1/s, shared: true } }",
    );
    let explained = loaded.explain("http://a/", &Method::GET).unwrap();
    let row = |key: &str| {
        let found = explained.values.iter().find(|value| value.key == key).unwrap();
        format!("{} | {}", found.value, found.source)
    };
    assert_eq!(row("breaker.shared"), "true | line 3, defaults");
    assert_eq!(row("rate_limit.shared"), "true | line 5, upstreams.a");
}
