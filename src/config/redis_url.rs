//! The URLs by which a policy names a Redis or Valkey.
//!
//! | URL | what it names |
//! |---|---|
//! | `redis://[[user]:password@]host[:6379][/database]` | one server; `rediss://` speaks TLS to it |
//! | `redis-sentinel://[[user]:password@]host[:26379][,…]/service[/database]` | Sentinels and the master that they know as `service`; `rediss-sentinel://` |
//! | `redis-cluster://[[user]:password@]host[:6379][,…]` | nodes of a cluster; `rediss-cluster://` |
//!
//! `valkey://` and `valkeys://` are `redis://` and `rediss://`. The login is for the servers; Sentinels that ask for
//! one themselves have theirs in the query, `?sentinel_user=…&sentinel_password=…`. Users, passwords, the service and
//! the query are percent-encoded, and so may be the hosts.
//!
//! A URL has one host for RFC 3986 and for the `url` crate, so a list of them is cut by hand here. Lists have schemes
//! of their own, since one server and a cluster of one node are asked differently and look alike.
//!
//! No error quotes the URL: whatever is wrong with it, the wrong part may be the half of a password. Each is a
//! fixed text, so that none ever can.

use std::borrow::Cow;
use std::net::Ipv6Addr;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

use super::hosts::to_ascii;
use super::{Login, Redis, RedisKind};
use crate::wire::authority::Authority;

/// Why a URL is refused; never a word of the URL itself.
type Refusal = &'static str;

const REDIS_PORT: u16 = 6379;
const SENTINEL_PORT: u16 = 26379;
/// The user of the Sentinels themselves.
const SENTINEL_USER: &str = "sentinel_user";
/// And their password.
const SENTINEL_PASSWORD: &str = "sentinel_password";

/// What has no meaning of its own in any part of a URL (RFC 3986 section 2.3) stays as it is.
const RESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// A text as one part of a URL, whatever is in it.
pub(super) fn encoded(text: &str) -> Cow<'_, str> {
    utf8_percent_encode(text, RESERVED).into()
}

/// Reads a URL; its roots are for the caller to add.
pub(super) fn parse(url: &str) -> Result<Redis, Refusal> {
    if url.contains(|c: char| c.is_whitespace() || c.is_control()) {
        return Err("expected a URL without blanks and line ends; a blank in a password is written `%20`");
    }
    let parts = Parts::of(url)?;
    let (form, is_tls) = Form::of(parts.scheme)?;
    let login = login(parts.login)?;
    if parts.fragment.is_some() {
        return Err("a `#` means nothing here; in a password it is written `%23`");
    }
    let servers = servers(parts.hosts, form.default_port())?;
    let (kind, database) = match form {
        Form::Single if servers.len() > 1 => {
            return Err(
                "expected one server; several are `redis-cluster://…` or `redis-sentinel://…/SERVICE`",
            );
        }
        Form::Single => (RedisKind::Single, database(parts.path)?),
        Form::Sentinel => {
            let (service, number) = parts.path.split_once('/').unwrap_or((parts.path, ""));
            let service = decoded(service)?;
            if service.is_empty() {
                return Err(
                    "expected the name that the Sentinels have for the master behind the hosts, as in \
                            redis-sentinel://HOST/SERVICE",
                );
            }
            (RedisKind::Sentinel { service, login: sentinel_login(parts.query)? }, database(number)?)
        }
        Form::Cluster if !parts.path.is_empty() => {
            return Err("a cluster has one database; expected nothing behind the hosts");
        }
        Form::Cluster => (RedisKind::Cluster, 0),
    };
    if parts.query.is_some() && form != Form::Sentinel {
        return Err("a `?` means nothing here; in a password it is written `%3F`");
    }
    Ok(Redis { kind, is_tls, ca_pem: None, servers, login, database })
}

/// Whether a URL, be it wrong, has a password in it.
pub(super) fn has_password(url: &str) -> bool {
    let Ok(parts) = Parts::of(url) else { return false };
    let is_password = |pair: &str| {
        pair.split_once('=').is_some_and(|(key, value)| key == SENTINEL_PASSWORD && !value.is_empty())
    };
    parts.login.split_once(':').is_some_and(|(_, password)| !password.is_empty())
        || parts.query.is_some_and(|query| query.split('&').any(is_password))
}

impl Redis {
    /// The URL that [`parse`] reads, with `shown` in the place of each user and password.
    pub(super) fn url<'a>(&'a self, shown: impl Fn(&'a str) -> Cow<'a, str>) -> String {
        let scheme = match self.kind {
            RedisKind::Single => "",
            RedisKind::Sentinel { .. } => "-sentinel",
            RedisKind::Cluster => "-cluster",
        };
        let mut url = format!("redis{}{scheme}://", if self.is_tls { "s" } else { "" });
        if let Login { user, password: Some(password) } = &self.login {
            url += &user.as_deref().map(&shown).unwrap_or_default();
            url += &format!(":{}@", shown(password));
        } else if let Some(user) = &self.login.user {
            url += &format!("{}@", shown(user));
        }
        let server = |(host, port): &(String, u16)| match host.parse::<Ipv6Addr>() {
            Ok(ip) => format!("[{ip}]:{port}"),
            Err(_) => format!("{host}:{port}"),
        };
        url += &self.servers.iter().map(server).collect::<Vec<_>>().join(",");
        if let RedisKind::Sentinel { service, .. } = &self.kind {
            url += &format!("/{}", encoded(service));
        }
        if self.database > 0 {
            url += &format!("/{}", self.database);
        }
        if let RedisKind::Sentinel { login, .. } = &self.kind {
            let pairs = [(SENTINEL_USER, &login.user), (SENTINEL_PASSWORD, &login.password)];
            let pairs = pairs.into_iter().filter_map(|(key, value)| Some((key, value.as_deref()?)));
            for ((key, value), mark) in pairs.zip(['?', '&']) {
                url += &format!("{mark}{key}={}", shown(value));
            }
        }
        url
    }
}

/// A URL cut at its delimiters (RFC 3986 section 3); nothing is decoded yet.
struct Parts<'a> {
    scheme: &'a str,
    /// What stands before the `@`.
    login: &'a str,
    hosts: &'a str,
    /// Without its first slash.
    path: &'a str,
    query: Option<&'a str>,
    fragment: Option<&'a str>,
}

impl<'a> Parts<'a> {
    fn of(url: &'a str) -> Result<Self, Refusal> {
        let (scheme, rest) = url.split_once("://").ok_or(EXPECTED)?;
        let (rest, fragment) = cut(rest, '#');
        let (rest, query) = cut(rest, '?');
        let (authority, path) = cut(rest, '/');
        let path = path.unwrap_or_default();
        let (login, hosts) = authority.split_once('@').unwrap_or(("", authority));
        if hosts.contains('@') {
            return Err(
                "expected one `@`, in front of the first host; in a user or password it is written `%40`",
            );
        }
        if path.contains('@') || fragment.is_some_and(|fragment| fragment.contains('@')) {
            return Err(
                "expected the `@` in front of the first host; `/`, `?` and `#` in a user or password are \
                        written `%2F`, `%3F` and `%23`",
            );
        }
        Ok(Self { scheme, login, hosts, path, query, fragment })
    }
}

fn cut(text: &str, mark: char) -> (&str, Option<&str>) {
    text.split_once(mark).map_or((text, None), |(before, after)| (before, Some(after)))
}

/// What a scheme says of the servers.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    Single,
    Sentinel,
    Cluster,
}

const EXPECTED: Refusal = "expected a URL such as redis://:password@redis.example:6379; its scheme is redis, \
                           redis-sentinel or redis-cluster, with TLS rediss, rediss-sentinel or rediss-cluster";

impl Form {
    /// With whether TLS is spoken.
    fn of(scheme: &str) -> Result<(Self, bool), Refusal> {
        Ok(match scheme.to_ascii_lowercase().as_str() {
            "redis" | "valkey" => (Self::Single, false),
            "rediss" | "valkeys" => (Self::Single, true),
            "redis-sentinel" => (Self::Sentinel, false),
            "rediss-sentinel" => (Self::Sentinel, true),
            "redis-cluster" => (Self::Cluster, false),
            "rediss-cluster" => (Self::Cluster, true),
            _ => return Err(EXPECTED),
        })
    }

    fn default_port(self) -> u16 {
        match self {
            Self::Single | Self::Cluster => REDIS_PORT,
            Self::Sentinel => SENTINEL_PORT,
        }
    }
}

fn login(text: &str) -> Result<Login, Refusal> {
    let (user, password) = cut(text, ':');
    let user = Some(decoded(user)?).filter(|user| !user.is_empty());
    Ok(Login { user, password: password.map(decoded).transpose()? })
}

fn sentinel_login(query: Option<&str>) -> Result<Login, Refusal> {
    const KEYS: Refusal = "expected no other parameters than `sentinel_user` and `sentinel_password`, each once and with \
                           a value; `&` in a value is written `%26`";
    let mut login = Login::default();
    for pair in query.into_iter().flat_map(|query| query.split('&')).filter(|pair| !pair.is_empty()) {
        let (key, value) = pair.split_once('=').ok_or(KEYS)?;
        let place = match key {
            SENTINEL_USER => &mut login.user,
            SENTINEL_PASSWORD => &mut login.password,
            _ => return Err(KEYS),
        };
        if value.is_empty() || place.replace(decoded(value)?).is_some() {
            return Err(KEYS);
        }
    }
    Ok(login)
}

/// Decoded before the list is taken apart, as no user's or password's is: so `${env:NODES}` may be a host with its
/// port, or several.
fn servers(list: &str, default_port: u16) -> Result<Vec<(String, u16)>, Refusal> {
    decoded(list)?.split(',').map(|text| server(text, default_port)).collect()
}

fn server(text: &str, default_port: u16) -> Result<(String, u16), Refusal> {
    if text.is_empty() || text.starts_with(':') {
        return Err("expected a host behind `://` or `@`, and behind each comma");
    }
    if text.contains(['/', '@']) {
        return Err("expected a host, with or without a port and no more");
    }
    let text = to_ascii(text).map_err(|_| "the host is no valid international name")?;
    let authority = Authority::parse(&text, Some(default_port))?;
    // Where a server listens; the client refuses to connect there.
    if authority.ip().is_some_and(|ip| ip.is_unspecified()) {
        return Err("the host is the address that stands for all of a machine's own; expected one of them");
    }
    let host = authority.host().trim_start_matches('[').trim_end_matches(']');
    Ok((host.to_owned(), authority.port()))
}

fn database(text: &str) -> Result<u32, Refusal> {
    const NUMBER: Refusal =
        "expected the number of a database at the end; a `/` in a password is written `%2F`";
    match text {
        "" => Ok(0),
        // Else a sign would be taken too.
        digits if digits.bytes().all(|b| b.is_ascii_digit()) => digits.parse().map_err(|_| NUMBER),
        _ => Err(NUMBER),
    }
}

fn decoded(text: &str) -> Result<String, Refusal> {
    let is_hex = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_hexdigit);
    let mut escapes = text.split('%').skip(1).map(str::as_bytes);
    // The library would leave it as it is, and so log in with another password than `%41` was meant for.
    if !escapes.all(|escape| is_hex(escape.first()) && is_hex(escape.get(1))) {
        return Err("a `%` that stands for itself is written `%25`");
    }
    match percent_decode_str(text).decode_utf8() {
        Ok(text) => Ok(text.into_owned()),
        Err(_) => Err("what is percent-encoded is not UTF-8"),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn redis(servers: &[(&str, u16)]) -> Redis {
        let servers = servers.iter().map(|(host, port)| ((*host).to_owned(), *port)).collect();
        Redis {
            kind: RedisKind::Single,
            is_tls: false,
            ca_pem: None,
            servers,
            login: Login::default(),
            database: 0,
        }
    }

    fn login(user: &str, password: Option<&str>) -> Login {
        let user = Some(user.to_owned()).filter(|user| !user.is_empty());
        Login { user, password: password.map(str::to_owned) }
    }

    #[test]
    fn one_server_has_a_port_a_login_and_a_database() {
        for (url, expected) in [
            ("redis://a.example", redis(&[("a.example", 6379)])),
            ("REDIS://A.example.:7000/", redis(&[("a.example", 7000)])),
            ("valkey://10.0.0.1:", redis(&[("10.0.0.1", 6379)])),
            ("redis://[2001:DB8::1]:1/15", Redis { database: 15, ..redis(&[("2001:db8::1", 1)]) }),
            ("redis://[::1]", redis(&[("::1", 6379)])),
            ("redis://bücher.example", redis(&[("xn--bcher-kva.example", 6379)])),
            ("redis://my_redis.svc%3A7000", redis(&[("my_redis.svc", 7000)])),
            ("rediss://a", Redis { is_tls: true, ..redis(&[("a", 6379)]) }),
            ("valkeys://a", Redis { is_tls: true, ..redis(&[("a", 6379)]) }),
            ("redis://:p@a", Redis { login: login("", Some("p")), ..redis(&[("a", 6379)]) }),
            ("redis://u:p@a", Redis { login: login("u", Some("p")), ..redis(&[("a", 6379)]) }),
            ("redis://u:@a", Redis { login: login("u", Some("")), ..redis(&[("a", 6379)]) }),
            ("redis://u@a", Redis { login: login("u", None), ..redis(&[("a", 6379)]) }),
            ("redis://@a", redis(&[("a", 6379)])),
            (
                "redis://%75:%40%2F%23%25%3A%c3%a4:+ä@a",
                Redis { login: login("u", Some("@/#%:ä:+ä")), ..redis(&[("a", 6379)]) },
            ),
        ] {
            assert_eq!(parse(url), Ok(expected), "{url}");
        }
    }

    #[test]
    fn sentinels_have_a_service_and_a_login_of_their_own() {
        let kind = |service: &str, login| RedisKind::Sentinel { service: service.into(), login };
        let servers = [("a", 26379), ("b.example", 1), ("::1", 26379)];
        let expected =
            Redis { kind: kind("main", Login::default()), login: login("u", Some("p")), ..redis(&servers) };
        assert_eq!(parse("redis-sentinel://u:p@a,b.example:1,[::1]/main"), Ok(expected.clone()));
        assert_eq!(parse("redis-sentinel://u:p@a%2Cb.example%3A1,[::1]/main/"), Ok(expected.clone()));
        let expected = Redis {
            kind: kind("my main/1", login("s", Some("p&+@?"))),
            is_tls: true,
            login: Login::default(),
            database: 3,
            ..expected
        };
        let url = "rediss-sentinel://a,b.example:1,[::1]/my%20main%2F1/3?sentinel_user=s&&sentinel_password=p%26+@?";
        assert_eq!(parse(url), Ok(expected));
    }

    #[test]
    fn a_cluster_has_nodes_and_no_database() {
        let expected = Redis {
            kind: RedisKind::Cluster,
            login: login("", Some("p")),
            ..redis(&[("a", 6379), ("b", 7001)])
        };
        assert_eq!(parse("redis-cluster://:p@a,b:7001"), Ok(expected.clone()));
        let tls = Redis { is_tls: true, ..expected };
        assert_eq!(parse("rediss-cluster://:p@a,b:7001/"), Ok(tls));
    }

    #[test]
    fn what_is_wrong_with_a_url_is_told() {
        for (url, expected) in [
            ("", "expected a URL such as"),
            ("redis", "expected a URL such as"),
            ("redis//:canary@a", "expected a URL such as"),
            ("redis:/a", "expected a URL such as"),
            ("localhost:6379", "expected a URL such as"),
            ("http://a", "its scheme is redis, redis-sentinel or redis-cluster"),
            ("redis+unix:///run/redis.sock", "its scheme is redis"),
            ("://a", "its scheme is redis"),
            ("redis://", "expected a host"),
            ("redis://:canary@", "expected a host"),
            ("redis://:canary@:6379", "expected a host"),
            ("redis://u:canary", "the port is no number"),
            ("redis://u:can@ary@a", "expected one `@`"),
            ("redis-cluster://u:canary@a,u:canary@b", "expected one `@`"),
            ("redis://:can/ary@a", "expected the `@` in front of the first host"),
            ("redis://:can#ary@a", "expected the `@` in front of the first host"),
            ("redis://:can?ary@a", "expected a host"),
            ("redis://a/0#insecure", "a `#` means nothing here"),
            ("redis://a?protocol=resp3", "a `?` means nothing here"),
            ("redis-cluster://a?sentinel_user=x", "a `?` means nothing here"),
            ("redis://a:port", "the port is no number"),
            ("redis://a:0", "the port is not between 1 and 65535"),
            ("redis://a:65536", "the port is not between 1 and 65535"),
            ("redis://fd00::1", "an IPv6 address needs brackets"),
            ("redis://[::1", "an IPv6 address lacks its closing bracket"),
            ("redis://127.1", "the host is a number but no dotted-quad address"),
            ("redis://0.0.0.0", "stands for all of a machine's own"),
            ("redis://[::]:6379", "stands for all of a machine's own"),
            ("redis://a b", "without blanks"),
            ("redis://:ca\nnary@a", "without blanks"),
            ("redis://redis%3A%2F%2Fa", "expected a host, with or without a port and no more"),
            ("redis://%3Acanary%40a", "expected a host"),
            ("redis://a/canary", "expected the number of a database"),
            ("redis://a/-1", "expected the number of a database"),
            ("redis://a/+1", "expected the number of a database"),
            ("redis://a/0/", "expected the number of a database"),
            ("redis://a/4294967296", "expected the number of a database"),
            ("redis://:can%ary@a", "a `%` that stands for itself is written `%25`"),
            ("redis://:can%2@a", "a `%` that stands for itself is written `%25`"),
            ("redis://:can%+1ary@a", "a `%` that stands for itself is written `%25`"),
            ("redis://:canary%ff@a", "what is percent-encoded is not UTF-8"),
            ("redis://a,b", "expected one server"),
            ("redis-sentinel://a,,b/main", "expected a host"),
            ("redis-sentinel://a", "expected the name that the Sentinels have for the master"),
            ("redis-sentinel://a//1", "expected the name that the Sentinels have for the master"),
            ("redis-sentinel://a/main/x", "expected the number of a database"),
            ("redis-sentinel://a/main?canary=x", "expected no other parameters"),
            ("redis-sentinel://a/main?sentinel_password=can&ary", "expected no other parameters"),
            ("redis-sentinel://a/main?sentinel_password=", "expected no other parameters"),
            ("redis-sentinel://a/main?sentinel_user=a&sentinel_user=b", "expected no other parameters"),
            ("redis-cluster://a/0", "a cluster has one database"),
        ] {
            let refusal = parse(url).expect_err(url);
            assert!(refusal.contains(expected), "{url}: {refusal}");
        }
    }

    #[test]
    fn a_password_in_clear_is_found_in_each_of_its_places() {
        for (url, expected) in [
            ("redis://:p@a", true),
            ("redis://u:p@", true),
            ("redis-sentinel://a/main?sentinel_user=u&sentinel_password=p", true),
            ("redis://:@a", false),
            ("redis://u@a:1", false),
            ("redis-sentinel://a/main?sentinel_user=u&sentinel_password=", false),
            ("://", false),
            ("p", false),
        ] {
            assert_eq!(has_password(url), expected, "{url}");
        }
    }

    #[test]
    fn the_shown_form_has_the_servers_and_a_mask_for_each_secret() {
        let shown = |url: &str| parse(url).unwrap().url(|_| "[secret]".into());
        for (url, expected) in [
            ("valkeys://A.example", "rediss://a.example:6379"),
            ("redis://:canary@[::1]/2", "redis://:[secret]@[::1]:6379/2"),
            ("redis://canary@a:1", "redis://[secret]@a:1"),
            ("redis-cluster://canary:canary@a,b", "redis-cluster://[secret]:[secret]@a:6379,b:6379"),
            (
                "rediss-sentinel://a/main?sentinel_password=canary",
                "rediss-sentinel://a:26379/main?sentinel_password=[secret]",
            ),
            (
                "redis-sentinel://u:p@a/main/1?sentinel_password=canary&sentinel_user=canary",
                "redis-sentinel://[secret]:[secret]@a:26379/main/1?sentinel_user=[secret]&sentinel_password=[secret]",
            ),
        ] {
            assert_eq!(shown(url), expected);
            // It is a URL of the same kind again.
            assert_eq!(shown(expected), expected);
        }
    }

    fn any_login() -> impl Strategy<Value = Login> {
        (proptest::option::of("\\PC{1,8}"), proptest::option::of("(?s).{1,8}"))
            .prop_map(|(user, password)| Login { user, password })
    }

    fn any_redis() -> impl Strategy<Value = Redis> {
        let host = prop_oneof![
            "[a-z][a-z0-9_-]{0,8}(\\.[a-z]{1,5}){0,3}",
            (1u32..).prop_map(|bits| std::net::Ipv4Addr::from(bits).to_string()),
            (1u128..).prop_map(|bits| Ipv6Addr::from(bits).to_string()),
        ];
        let servers = proptest::collection::vec((host, 1u16..), 1..4);
        let kind = prop_oneof![
            Just(RedisKind::Single),
            Just(RedisKind::Cluster),
            ("(?s).{1,8}", any_login()).prop_map(|(service, login)| RedisKind::Sentinel { service, login }),
        ];
        (kind, any::<bool>(), servers, any_login(), any::<u32>()).prop_map(
            |(kind, is_tls, mut servers, login, mut database)| {
                match kind {
                    RedisKind::Single => servers.truncate(1),
                    RedisKind::Cluster => database = 0,
                    RedisKind::Sentinel { .. } => {}
                }
                Redis { kind, is_tls, ca_pem: None, servers, login, database }
            },
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn a_url_that_is_written_is_read_as_the_same(redis in any_redis()) {
            let url = redis.url(encoded);
            prop_assert_eq!(parse(&url), Ok(redis), "{}", url);
        }

        #[test]
        fn any_text_is_a_url_or_is_refused(
            text in "\\PC{0,60}|(redis|rediss|redis-sentinel|redis-cluster)://[a-c0-9:@/?#,%\\[\\].=&ä]{0,40}",
        ) {
            has_password(&text);
            if let Ok(redis) = parse(&text) {
                prop_assert!(!redis.servers.is_empty());
                let written = redis.url(encoded);
                prop_assert_eq!(parse(&written), Ok(redis), "{}", written);
            }
        }
    }
}
