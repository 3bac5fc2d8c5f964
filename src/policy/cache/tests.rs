//! The cache's rules, each by its clause, and what must hold of the store.

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::uri::PathAndQuery;
use http::{Method, Response, StatusCode, response};
use proptest::prelude::*;
use tokio::time::Instant;

use super::directives::{RequestControl, ResponseControl};
use super::{Asked, Candidate, Entry, Store, Times, Verdict, Why, is_only_if_cached, touched};
use crate::config::Cache;
use crate::policy::identity::{Key, Passage, Place, resource};
use crate::wire::target::Scheme;

pub(super) const CFG: Cache = Cache {
    ttl: None,
    stale_if_error: Duration::ZERO,
    stale_while_revalidate: Duration::ZERO,
    max_bytes: 1 << 20,
    max_body: 1 << 16,
    vary: Vec::new(),
    is_shared: false,
};

pub(super) const fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn cfg(ttl: u64, stale_while_revalidate: u64) -> Cache {
    Cache { ttl: Some(secs(ttl)), stale_while_revalidate: secs(stale_while_revalidate), ..CFG }
}

/// `name: value` in each line, bytes as they are.
fn fields(text: &str) -> HeaderMap {
    let line = |line: &str| {
        let (name, value) = line.split_once(':').unwrap();
        let name = HeaderName::from_bytes(name.trim().as_bytes()).unwrap();
        (name, HeaderValue::from_bytes(value.trim().as_bytes()).unwrap())
    };
    let mut headers = HeaderMap::new();
    for (name, value) in text.lines().filter(|line| !line.trim().is_empty()).map(line) {
        headers.append(name, value);
    }
    headers
}

/// What tests ask for.
pub(super) struct Request {
    method: Method,
    target: PathAndQuery,
    pub(super) headers: HeaderMap,
}

impl Request {
    pub(super) fn new(method: Method, target: &str, headers: &str) -> Self {
        Self { method, target: target.parse().unwrap(), headers: fields(headers) }
    }

    pub(super) fn get(headers: &str) -> Self {
        Self::new(Method::GET, "/a", headers)
    }

    pub(super) fn asked(&self) -> Asked<'_> {
        let place = Place {
            scheme: Scheme::Http,
            authority: "quotes.test:80",
            host: b"",
            passage: &Passage::NONE,
            pinned: None,
            target: &self.target,
        };
        Asked { method: &self.method, place, headers: &self.headers }
    }

    pub(super) fn key(&self) -> Key {
        Key::of(self.asked().place, &Method::GET, &self.headers, [], None)
    }
}

/// One moment for tests that have no use for the clock: 2026-01-01.
pub(super) fn wall() -> SystemTime {
    SystemTime::UNIX_EPOCH + secs(1_767_225_600)
}

fn date(at: SystemTime) -> String {
    httpdate::fmt_http_date(at)
}

fn times(sent: Instant) -> Times {
    Times { sent, received: sent, wall: wall() }
}

fn candidate(request: &Request, status: u16, answer: &str, is_private: bool, at: Times) -> Option<Candidate> {
    let status = StatusCode::from_u16(status).unwrap();
    let store = Store::new(CFG.max_bytes);
    Candidate::of(request.asked(), status, &fields(answer), &CFG, is_private, at, &store)
}

pub(super) fn entry_of(
    request: &Request,
    status: u16,
    answer: &str,
    body: &str,
    at: Instant,
) -> Option<Entry> {
    let mut candidate = candidate(request, status, answer, false, times(at))?;
    assert!(candidate.push(body.as_bytes()));
    Some(candidate.complete())
}

/// The entry of a 200, kept at `at`.
pub(super) fn entry(answer: &str, at: Instant) -> Entry {
    entry_of(&Request::get(""), 200, answer, "hello", at).expect("it is kept")
}

fn private_entry(answer: &str, at: Instant) -> Entry {
    candidate(&Request::get(""), 200, answer, true, times(at)).expect("it is kept").complete()
}

fn judge(entry: &Entry, request: &str, cfg: &Cache, now: Instant) -> Verdict {
    entry.judge(Request::get(request).asked(), cfg, now)
}

fn answer(entry: &Entry, request: &Request) -> Response<Bytes> {
    entry.answer(request.asked(), Instant::now())
}

fn not_modified(headers: &str) -> response::Parts {
    let mut response = Response::new(());
    *response.status_mut() = StatusCode::NOT_MODIFIED;
    *response.headers_mut() = fields(headers);
    response.into_parts().0
}

// Keeping: RFC 9111 section 3.

/// 65 fields.
const LONG_PRIVATE: &str = concat!(
    "cache-control: max-age=60, private=\"a0,a1,a2,a3,a4,a5,a6,a7,a8,a9,b0,b1,b2,b3,b4,b5,b6,b7,b8,b9,c0,c1,c2,",
    "c3,c4,c5,c6,c7,c8,c9,d0,d1,d2,d3,d4,d5,d6,d7,d8,d9,e0,e1,e2,e3,e4,e5,e6,e7,e8,e9,f0,f1,f2,f3,f4,f5,f6,f7,",
    "f8,f9,g0,g1,g2,g3,g4\", must-understand"
);

/// 33 fields.
const LONG_VARY: &str = "cache-control: max-age=60\nvary: a0,a1,a2,a3,a4,a5,a6,a7,a8,a9,b0,b1,b2,b3,b4,b5,b6,b7\n\
    vary: b8,b9,c0,c1,c2,c3,c4,c5,c6,c7,c8,c9,d0,d1,d2";

#[test]
fn what_may_be_kept_is_what_section_3_allows() {
    let get = Request::get("");
    for (status, answer, shared, private) in [
        (200, "", true, true),
        (404, "", true, true),
        (201, "", false, false),
        (403, "", false, false),
        (500, "", false, false),
        (201, "cache-control: max-age=1", true, true),
        (599, "cache-control: public", true, true),
        (201, "expires: 0", true, true),
        (201, "cache-control: s-maxage=1", true, false),
        (201, "cache-control: private", false, true),
        (200, "cache-control: no-store", false, false),
        (200, "cache-control: max-age=60, No-StOrE", false, false),
        (200, "cache-control: max-age=60\ncache-control: no-store", false, false),
        (200, "cache-control: private, max-age=60", false, true),
        (200, "cache-control: private=\"\", max-age=60", false, true),
        (200, "cache-control: private=\"x-a\", max-age=60", true, true),
        // What has to be validated each time and cannot be is of no use.
        (200, "cache-control: no-cache", false, false),
        (200, "pragma: no-cache", false, false),
        (200, "cache-control: no-cache\netag: \"a\"", true, true),
        (200, "cache-control: no-cache\nlast-modified: Wed, 31 Dec 2025 00:00:00 GMT", true, true),
        (200, "cache-control: max-age=0, must-revalidate", false, false),
        (200, "cache-control: max-age=0, must-revalidate\netag: \"a\"", true, true),
        (200, "cache-control: max-age=0, proxy-revalidate", false, true),
        (201, "cache-control: public, must-revalidate\nexpires: 0", false, false),
        (200, "cache-control: max-age=1, must-revalidate", true, true),
        // The policy's `ttl` may make it fresh, or its staleness stand in.
        (200, "cache-control: must-revalidate", true, true),
        (200, "cache-control: max-age=0", true, true),
        // Section 5.2.2.3.
        (200, "cache-control: no-store, must-understand, max-age=60", true, true),
        (200, "cache-control: no-store, must-understand=1, max-age=60", false, false),
        (599, "cache-control: must-understand, max-age=60", false, false),
        // What never ends may hide anything.
        (200, "cache-control: max-age=60, ext=\"no-store", false, false),
        // A list beyond what anyone means holds for the whole answer.
        (200, LONG_PRIVATE, false, true),
        (200, LONG_VARY, false, false),
        // Section 4.1: it would match no request.
        (200, "vary: *\ncache-control: max-age=60", false, false),
        (200, "vary: accept\nvary: , *\ncache-control: max-age=60", false, false),
        (200, "vary: what is this\ncache-control: max-age=60", false, false),
        // About one request and not the resource.
        (206, "cache-control: max-age=60\ncontent-range: bytes 0-1/5", false, false),
        (304, "cache-control: max-age=60", false, false),
        (412, "cache-control: max-age=60", false, false),
        (416, "cache-control: max-age=60", false, false),
        // RFC 6585.
        (429, "cache-control: max-age=60", false, false),
        (200, "content-type: text/event-stream\ncache-control: max-age=60", false, false),
        (200, "content-length: 65537\ncache-control: max-age=60", false, false),
        (200, "content-length: 65536\ncache-control: max-age=60", true, true),
    ] {
        let now = times(Instant::now());
        let kept = |is_private| candidate(&get, status, answer, is_private, now).is_some();
        assert_eq!((kept(false), kept(true)), (shared, private), "{status} {answer}");
    }
}

#[test]
fn c096_an_answer_with_a_cookie_is_not_kept() {
    let answer = "set-cookie: id=1\ncache-control: public, max-age=60";
    assert!(candidate(&Request::get(""), 200, answer, false, times(Instant::now())).is_none());
    assert!(candidate(&Request::get(""), 200, answer, true, times(Instant::now())).is_none());
}

#[test]
fn c003_head_and_other_methods_bring_nothing_to_keep() {
    for method in [Method::HEAD, Method::POST, Method::OPTIONS] {
        let request = Request::new(method, "/a", "");
        let answer = "content-length: 1488324\ncache-control: max-age=60";
        assert!(candidate(&request, 200, answer, false, times(Instant::now())).is_none());
    }
}

#[test]
fn requests_that_the_cache_cannot_speak_for_pass_by() {
    let at = Instant::now();
    let kept = entry("cache-control: max-age=60", at);
    for (request, why) in [
        (Request::new(Method::POST, "/a", ""), Why::Method),
        (Request::get("upgrade: websocket"), Why::Bypass),
        (Request::get("if-match: \"a\""), Why::Bypass),
        (Request::get("if-unmodified-since: Thu, 01 Jan 2026 00:00:00 GMT"), Why::Bypass),
        (Request::get("cache-control: no-store"), Why::Request),
        // The upstream is not sent what the key or the variant would be told by.
        (Request::get("connection: Accept-Language\naccept-language: de"), Why::Bypass),
        (Request::get("connection: close\nconnection: x-api-key\nx-api-key: a"), Why::Bypass),
    ] {
        assert_eq!(kept.judge(request.asked(), &CFG, at), Verdict::Miss(why));
        assert!(candidate(&request, 200, "cache-control: max-age=60", false, times(at)).is_none());
    }
    for fields in [
        "connection: keep-alive, TE\nte: trailers\nkeep-alive: 5",
        "connection: accept-language",
        "connection: host\nhost: a",
    ] {
        assert_eq!(judge(&kept, fields, &CFG, at), Verdict::Fresh, "{fields}");
    }
}

#[test]
fn a_body_beyond_the_most_is_given_up() {
    let mut candidate =
        candidate(&Request::get(""), 200, "cache-control: max-age=60", false, times(Instant::now())).unwrap();
    assert!(candidate.push(&[0; 65_535]));
    assert!(!candidate.push(&[0; 2]));
    assert!(candidate.push(&[0; 1]));
    assert_eq!(candidate.complete().body().len(), 65_536);
}

#[test]
fn fields_of_a_connection_and_named_ones_stay_out() {
    let answer = "proxy-authenticate: Basic\nproxy-authentication-info: x\nage: 3\ntrailer: x-t\n\
        content-length: 5\nx-a: 1\nx-b: 2\nx-c: 3\nlink: <1>\nlink: <2>\n\
        cache-control: no-cache=\"x-a, X-B\", max-age=60\ncache-control: private=x-c";
    let at = Instant::now();
    let names = |entry: &Entry| {
        let mut names: Vec<String> = entry.headers().iter().map(|(name, _)| name.to_string()).collect();
        names.sort();
        names
    };
    let shared = ["cache-control", "cache-control", "date", "link", "link"];
    assert_eq!(names(&entry(answer, at)), shared);
    let private = ["cache-control", "cache-control", "date", "link", "link", "x-c"];
    assert_eq!(names(&private_entry(answer, at)), private);
    assert_eq!(judge(&entry(answer, at), "", &CFG, at), Verdict::Fresh);
}

// Freshness: RFC 9111 section 4.2.

/// Seconds for which a 200 is fresh, the policy's `ttl` being 7.
fn lifetime(answer: &str, is_private: bool) -> i64 {
    let at = Instant::now();
    let entry = if is_private { private_entry(answer, at) } else { entry(answer, at) };
    entry.ttl(&cfg(7, 0), at)
}

#[test]
fn a_lifetime_is_the_first_that_is_said() {
    let later = format!("expires: {}", date(wall() + secs(300)));
    let both = |control: &str| format!("{control}\n{later}");
    for (answer, shared, private) in [
        ("cache-control: max-age=60", 60, 60),
        ("cache-control: MaX-aGe=60", 60, 60),
        ("cache-control: max-age=\"60\"", 60, 60),
        ("cache-control: max-age=0060", 60, 60),
        ("cache-control: s-maxage=60, max-age=1", 60, 1),
        ("cache-control: max-age=60\ncache-control: s-maxage=1", 1, 60),
        ("cache-control: s-maxage=60", 60, 60),
        ("cache-control: s-maxage=0", 0, 0),
        (&both("cache-control: max-age=60"), 60, 60),
        (&both("cache-control: max-age=0"), 0, 0),
        (&both("cache-control: public"), 300, 300),
        (&both("cache-control: s-maxage=60"), 60, 300),
        (&later, 300, 300),
        // In any case (section 4.2), and in each of the three forms (RFC 9110 section 5.6.7).
        ("expires: THU, 01 JAN 2026 00:05:00 gmt", 300, 300),
        ("expires: Thursday, 01-Jan-26 00:05:00 GMT", 300, 300),
        ("expires: Thu Jan  1 00:05:00 2026", 300, 300),
        // Wrong in itself: stale (section 4.2.1 and 5.3).
        ("expires: 0", 0, 0),
        ("expires: Thu, 01 Jan 2026 00:05:00 UTC", 0, 0),
        ("expires: Thu, 01 Jan 2026 00:05:00 GMT\nexpires: Thu, 01 Jan 2026 00:06:00 GMT", 0, 0),
        ("cache-control: max-age", 0, 0),
        ("cache-control: max-age=", 0, 0),
        ("cache-control: max-age=-60", 0, 0),
        ("cache-control: max-age=60.5", 0, 0),
        ("cache-control: max-age='60'", 0, 0),
        ("cache-control: max-age =60", 0, 0),
        ("cache-control: max-age= 60", 0, 0),
        ("cache-control: max-age=60, max-age=30", 30, 30),
        // Section 1.2.2.
        ("cache-control: max-age=99999999999999999999999999", 1 << 31, 1 << 31),
        // A quoted comma begins nothing.
        ("cache-control: ext=\"a, max-age=600\", max-age=1", 1, 1),
        ("cache-control: ext=\"a\\\", max-age=600\", max-age=1", 1, 1),
        // Nothing is said: the policy's word.
        ("", 7, 7),
        ("cache-control: ext=\"max-age=600\"", 7, 7),
        ("cache-control: immutable", 7, 7),
        ("last-modified: Wed, 31 Dec 2025 00:00:00 GMT", 7, 7),
    ] {
        assert_eq!((lifetime(answer, false), lifetime(answer, true)), (shared, private), "{answer}");
    }
}

#[test]
fn expiry_counts_from_the_answers_own_date() {
    let answer = |date_at: SystemTime, expires: SystemTime| {
        entry(&format!("date: {}\nexpires: {}", date(date_at), date(expires)), Instant::now())
    };
    let at = Instant::now();
    assert_eq!(answer(wall() + secs(400), wall() + secs(300)).ttl(&CFG, at), 0);
    assert_eq!(answer(wall() + secs(400), wall() + secs(500)).ttl(&CFG, at), 100);
    // Ten seconds old already.
    assert_eq!(answer(wall() - secs(10), wall() + secs(10)).ttl(&CFG, at), 10);
    // Nobody knows what it means by foo.
    let answer = format!("date: foo\nexpires: {}", date(wall() + secs(10)));
    assert_eq!(entry(&answer, at).ttl(&CFG, at), 10);
}

#[test]
fn without_a_word_and_a_ttl_a_tenth_of_the_unchanged_time_is_guessed() {
    let at = Instant::now();
    for (unchanged, guess) in [(1000, 100), (10, 1), (0, 0), (864_000_000, 86_400)] {
        let answer = format!("last-modified: {}", date(wall() - secs(unchanged)));
        assert_eq!(entry(&answer, at).ttl(&CFG, at), guess);
    }
    let in_the_future = format!("last-modified: {}", date(wall() + secs(1000)));
    assert_eq!(entry(&in_the_future, at).ttl(&CFG, at), 0);
    assert_eq!(entry("", at).ttl(&CFG, at), 0);
}

#[test]
fn a_ttl_is_not_for_statuses_of_which_nothing_may_be_guessed() {
    let at = Instant::now();
    let lifetime = |answer: &str| {
        entry_of(&Request::get(""), 599, answer, "", at).map(|entry| entry.ttl(&cfg(7, 0), at))
    };
    assert_eq!(lifetime("cache-control: max-age=60"), Some(60));
    assert_eq!(lifetime("cache-control: public"), Some(7));
    assert_eq!(lifetime(""), None);
}

#[tokio::test(start_paused = true)]
async fn c094_age_goes_on_from_the_age_that_came() {
    let at = Instant::now();
    let kept = entry("age: 10\ncache-control: max-age=60", at);
    tokio::time::advance(secs(3)).await;
    let answer = answer(&kept, &Request::get(""));
    assert_eq!(answer.headers()[header::AGE], "13");
    assert_eq!(kept.ttl(&CFG, Instant::now()), 47);
}

#[test]
fn the_age_at_first_is_the_greatest_that_is_known() {
    let age = |answer: &str, delay: u64| {
        let sent = Instant::now();
        let received = sent + secs(delay);
        let at = Times { sent, received, wall: wall() };
        let entry = candidate(&Request::get(""), 200, answer, false, at).unwrap().complete();
        (entry.age(received).as_secs(), entry.age(received + secs(5)).as_secs())
    };
    let late = format!("date: {}", date(wall() - secs(100)));
    for (answer, delay, expected) in [
        ("", 0, 0),
        ("", 2, 2),
        ("age: 10", 2, 12),
        (&late, 2, 100),
        (&format!("age: 200\n{late}"), 2, 202),
        (&format!("date: {}", date(wall() + secs(100))), 0, 0),
        // Section 5.1: the first member; what is no number is ignored.
        ("age: 0, 7200", 0, 0),
        ("age: 7200\nage: 0", 0, 7200),
        ("age: -5", 0, 0),
        ("age: 7200.0", 0, 0),
        ("age: abc", 0, 0),
        ("age: 18446744073709551615", 0, 1 << 31),
        ("age: 99999999999999999999999999", 0, 1 << 31),
    ] {
        assert_eq!(age(answer, delay), (expected, expected + 5), "{answer}");
    }
}

#[test]
fn a_jump_of_the_wall_clock_changes_no_age() {
    let sent = Instant::now();
    for wall in [SystemTime::UNIX_EPOCH, wall() + secs(1 << 32)] {
        let at = Times { sent, received: sent, wall };
        let kept =
            candidate(&Request::get(""), 200, "cache-control: max-age=60", false, at).unwrap().complete();
        assert_eq!(kept.age(sent + secs(59)), secs(59));
        assert_eq!(judge(&kept, "", &CFG, sent + secs(59)), Verdict::Fresh);
        assert_eq!(judge(&kept, "", &CFG, sent + secs(60)), Verdict::Validate(Why::Stale));
    }
}

// Use: RFC 9111 sections 4, 4.2.4 and 5.2.1, RFC 5861.

#[test]
fn a_request_may_ask_for_more_or_less_than_freshness() {
    let at = Instant::now();
    let kept = entry("cache-control: max-age=60", at);
    let strict = entry("cache-control: max-age=60, must-revalidate", at);
    let stale = Verdict::Validate(Why::Stale);
    let request = Verdict::Validate(Why::Request);
    for (headers, age, free, never_stale) in [
        ("", 30, Verdict::Fresh, Verdict::Fresh),
        ("cache-control: max-age=30", 30, Verdict::Fresh, Verdict::Fresh),
        ("cache-control: max-age=29", 30, request, request),
        ("cache-control: max-age=x", 30, request, request),
        ("cache-control: min-fresh=30", 30, Verdict::Fresh, Verdict::Fresh),
        ("cache-control: min-fresh=31", 30, request, request),
        ("cache-control: No-Cache", 30, request, request),
        ("pragma: no-cache", 30, request, request),
        ("pragma: no-cache\ncache-control: max-age=100", 30, Verdict::Fresh, Verdict::Fresh),
        ("cache-control: ext=\"", 30, request, request),
        ("", 90, stale, stale),
        ("cache-control: max-stale=30", 90, Verdict::Fresh, stale),
        ("cache-control: max-stale=29", 90, stale, stale),
        ("cache-control: max-stale", 9000, Verdict::Fresh, stale),
        ("cache-control: max-stale=x", 90, stale, stale),
        ("cache-control: max-stale, max-age=80", 90, stale, stale),
        ("cache-control: max-stale, no-cache", 90, stale, stale),
    ] {
        let now = at + secs(age);
        let verdicts = (judge(&kept, headers, &CFG, now), judge(&strict, headers, &CFG, now));
        assert_eq!(verdicts, (free, never_stale), "{headers} at {age}");
    }
    assert!(is_only_if_cached(&fields("cache-control: only-if-cached")));
    assert!(!is_only_if_cached(&fields("cache-control: max-age=1")));
}

#[test]
fn what_says_no_cache_is_validated_each_time() {
    let at = Instant::now();
    for answer in ["cache-control: no-cache, max-age=60", "cache-control: no-cache=\"\"", "pragma: no-cache"]
    {
        let kept = entry(&format!("{answer}\netag: \"abc\""), at);
        assert_eq!(judge(&kept, "", &cfg(60, 60), at), Verdict::Validate(Why::Stale), "{answer}");
        assert!(!kept.may_stand_in(secs(3600), &HeaderMap::new(), &cfg(60, 60), at), "{answer}");
    }
}

#[test]
fn a_stale_answer_is_given_while_it_is_refreshed_as_far_as_it_is_allowed() {
    let at = Instant::now();
    let usable = |answer: &str, policy: u64, is_private: bool| {
        let entry = if is_private { private_entry(answer, at) } else { entry(answer, at) };
        let is_usable =
            |age: &u64| judge(&entry, "", &cfg(0, policy), at + secs(*age)) == Verdict::StaleUsable;
        (10..100).filter(is_usable).count()
    };
    for (control, policy, shared, private) in [
        ("max-age=10", 0, 0, 0),
        ("max-age=10", 20, 20, 20),
        ("max-age=10, stale-while-revalidate=30", 0, 30, 30),
        ("max-age=10, stale-while-revalidate=30", 20, 30, 30),
        ("max-age=10, stale-while-revalidate", 0, 0, 0),
        ("max-age=10, must-revalidate, stale-while-revalidate=30", 20, 0, 0),
        ("max-age=10, proxy-revalidate, stale-while-revalidate=30", 20, 0, 30),
        // Its own word beats what s-maxage implies; the policy's does not.
        ("s-maxage=10, max-age=10, stale-while-revalidate=30", 40, 30, 40),
        ("s-maxage=10, max-age=10", 40, 0, 40),
        // It never was fresh, so the policy's time does not begin.
        ("max-age=0", 90, 0, 0),
    ] {
        let answer = format!("cache-control: {control}");
        let counts = (usable(&answer, policy, false), usable(&answer, policy, true));
        assert_eq!(counts, (shared, private), "{control}, policy {policy}");
    }
    let own = entry("cache-control: max-age=0, stale-while-revalidate=60", at);
    assert_eq!(judge(&own, "", &CFG, at), Verdict::StaleUsable);
    assert_eq!(judge(&own, "cache-control: no-cache", &CFG, at), Verdict::Validate(Why::Stale));
}

#[test]
fn c095_a_stale_answer_stands_in_as_far_as_anyone_allows() {
    let at = Instant::now();
    let stands_in = |control: &str, allowance: u64, request: &str, age: u64| {
        let kept = entry(&format!("cache-control: {control}"), at);
        kept.may_stand_in(secs(allowance), &fields(request), &CFG, at + secs(age))
    };
    for (control, allowance, request, longest) in [
        ("max-age=1", 0, "", 0),
        ("max-age=1", 10, "", 11),
        ("max-age=1, stale-if-error=60", 0, "", 61),
        ("max-age=1, stale-if-error=60", 10, "", 61),
        ("max-age=1, stale-if-error=60", 100, "", 101),
        ("max-age=1", 0, "cache-control: stale-if-error=20", 21),
        ("max-age=1", 50, "cache-control: max-age=30", 30),
        ("max-age=1", 50, "cache-control: max-age=3, stale-if-error=5", 51),
        ("max-age=5, must-revalidate, stale-if-error=60", 50, "", 4),
        ("max-age=5, proxy-revalidate, stale-if-error=60", 50, "", 4),
        ("s-maxage=5", 50, "", 5),
        ("s-maxage=5, stale-if-error=60", 50, "", 65),
    ] {
        assert!(stands_in(control, allowance, request, longest), "{control}, {allowance}, {request}");
        let longer = if longest == 0 { 2 } else { longest + 1 };
        assert!(!stands_in(control, allowance, request, longer), "{control}, {allowance}, {request}");
    }
    assert!(!stands_in("max-age=60", 60, "cache-control: no-cache", 0));
    let error = entry_of(&Request::get(""), 503, "cache-control: max-age=60", "", at).unwrap();
    assert!(!error.may_stand_in(secs(60), &HeaderMap::new(), &CFG, at));
}

// Answers: RFC 9110 sections 13 and 14.

const TAGGED: &str = "etag: \"abc\"\nlast-modified: Wed, 31 Dec 2025 00:00:00 GMT\n\
    date: Thu, 01 Jan 2026 00:00:00 GMT\ncache-control: max-age=60\ncontent-type: text/plain\nvary: accept";

#[test]
fn a_whole_answer_is_as_it_came_with_its_age() {
    let answer = answer(&entry(TAGGED, Instant::now()), &Request::get(""));
    let mut expected = fields(TAGGED);
    expected.insert(header::AGE, HeaderValue::from_static("0"));
    expected.insert(header::CONTENT_LENGTH, HeaderValue::from_static("5"));
    assert_eq!(
        (answer.status(), answer.headers(), &answer.body()[..]),
        (StatusCode::OK, &expected, &b"hello"[..])
    );
}

#[test]
fn c003_head_gets_the_length_of_what_a_get_brought() {
    let kept = entry(TAGGED, Instant::now());
    let head = answer(&kept, &Request::new(Method::HEAD, "/a", "range: bytes=0-1"));
    assert_eq!((head.status(), head.body().len()), (StatusCode::OK, 0));
    assert_eq!(head.headers()[header::CONTENT_LENGTH], "5");
    assert_eq!(answer(&kept, &Request::get("")).body(), "hello");
}

#[test]
fn a_client_that_has_the_answer_is_told_so() {
    let kept = entry(TAGGED, Instant::now());
    for (request, is_known) in [
        ("if-none-match: \"abc\"", true),
        ("if-none-match: W/\"abc\"", true),
        ("if-none-match: \"x\", \"abc\"", true),
        ("if-none-match: \"x\"\nif-none-match: \"a,b\", \"abc\"", true),
        ("if-none-match: *", true),
        ("if-none-match: \"x\\\", \"abc\"", true),
        ("if-none-match: \"ab\"", false),
        ("if-none-match: abc", false),
        ("if-modified-since: Wed, 31 Dec 2025 00:00:00 GMT", true),
        ("if-modified-since: Thu, 01 Jan 2026 00:00:00 GMT", true),
        ("if-modified-since: Tue, 30 Dec 2025 00:00:00 GMT", false),
        ("if-modified-since: yesterday", false),
        // Tags go before dates.
        ("if-none-match: \"x\"\nif-modified-since: Thu, 01 Jan 2026 00:00:00 GMT", false),
        ("if-none-match: \"abc\"\nif-modified-since: Tue, 30 Dec 2025 00:00:00 GMT", true),
        ("if-none-match: \"abc\"\nrange: bytes=0-1", true),
    ] {
        let answer = answer(&kept, &Request::get(request));
        let status = if is_known { StatusCode::NOT_MODIFIED } else { StatusCode::OK };
        assert_eq!(answer.status(), status, "{request}");
        for name in [header::ETAG, header::VARY, header::CACHE_CONTROL, header::DATE, header::AGE] {
            assert!(answer.headers().contains_key(&name), "{name}");
        }
        for name in [header::CONTENT_LENGTH, header::CONTENT_TYPE] {
            assert_eq!(answer.headers().contains_key(&name), !is_known, "{name}");
        }
        assert_eq!(answer.body().is_empty(), is_known);
    }
    let weak = entry("etag: W/\"\u{e9}\"\ncache-control: max-age=60", Instant::now());
    assert_eq!(answer(&weak, &Request::get("if-none-match: \"\u{e9}\"")).status(), StatusCode::NOT_MODIFIED);
    // Without Last-Modified the answer's date counts (RFC 9111 section 4.3.2).
    let dated = entry("date: Thu, 01 Jan 2026 00:00:00 GMT\ncache-control: max-age=60", Instant::now());
    for (since, status) in [("Thu, 01 Jan 2026 00:00:00 GMT", 304), ("Wed, 31 Dec 2025 23:59:59 GMT", 200)] {
        let request = Request::get(&format!("if-modified-since: {since}"));
        assert_eq!(answer(&dated, &request).status(), status);
    }
    let gone = entry_of(&Request::get(""), 404, TAGGED, "no", Instant::now()).unwrap();
    assert_eq!(answer(&gone, &Request::get("if-none-match: \"abc\"")).status(), StatusCode::NOT_FOUND);
}

#[test]
fn c093_a_part_is_cut_from_the_whole() {
    let kept = entry(TAGGED, Instant::now());
    let whole = (200, "hello", None);
    for (request, (status, body, range)) in [
        ("range: bytes=0-1", (206, "he", Some("bytes 0-1/5"))),
        ("range: bytes=1-", (206, "ello", Some("bytes 1-4/5"))),
        ("range: bytes=-2", (206, "lo", Some("bytes 3-4/5"))),
        ("range: BYTES=0-99", (206, "hello", Some("bytes 0-4/5"))),
        ("range: bytes=-99", (206, "hello", Some("bytes 0-4/5"))),
        ("range: bytes=0-99999999999999999999999", (206, "hello", Some("bytes 0-4/5"))),
        ("range: bytes=5-", (416, "", Some("bytes */5"))),
        ("range: bytes=99999999999999999999999-", (416, "", Some("bytes */5"))),
        ("range: bytes=-0", (416, "", Some("bytes */5"))),
        ("range: bytes=2-1", whole),
        ("range: bytes=0-1,3-4", whole),
        ("range: bytes=-", whole),
        ("range: bytes=a-1", whole),
        ("range: lines=0-1", whole),
        ("range: bytes", whole),
        ("range: bytes=0-1\nif-range: \"abc\"", (206, "he", Some("bytes 0-1/5"))),
        ("range: bytes=0-1\nif-range: \"abd\"", whole),
        ("range: bytes=0-1\nif-range: W/\"abc\"", whole),
        ("range: bytes=0-1\nif-range: Wed, 31 Dec 2025 00:00:00 GMT", (206, "he", Some("bytes 0-1/5"))),
        ("range: bytes=0-1\nif-range: Thu, 01 Jan 2026 00:00:00 GMT", whole),
        ("range: bytes=0-1\nif-range: x", whole),
    ] {
        let answer = answer(&kept, &Request::get(request));
        let named = answer.headers().get(header::CONTENT_RANGE).map(|range| range.to_str().unwrap());
        assert_eq!((answer.status().as_u16(), &answer.body()[..], named), (status, body.as_bytes(), range));
        assert_eq!(answer.headers()[header::CONTENT_LENGTH], body.len().to_string(), "{request}");
    }
    let none = entry("accept-ranges: none\ncache-control: max-age=60", Instant::now());
    assert_eq!(answer(&none, &Request::get("range: bytes=0-1")).status(), StatusCode::OK);
    let weak = entry("etag: W/\"abc\"\ncache-control: max-age=60", Instant::now());
    let request = Request::get("range: bytes=0-1\nif-range: W/\"abc\"");
    assert_eq!(answer(&weak, &request).status(), StatusCode::OK);
}

// Validation: RFC 9111 sections 3.2 and 4.3.

#[test]
fn validators_are_those_of_the_answer() {
    let conditions = |answer: &str| {
        let kept = entry(answer, Instant::now());
        let map: HeaderMap = kept.validators().collect();
        map
    };
    let both = "if-none-match: \"abc\"\nif-modified-since: Wed, 31 Dec 2025 00:00:00 GMT";
    assert_eq!(conditions(TAGGED), fields(both));
    assert!(conditions("cache-control: max-age=60").is_empty());
}

#[test]
fn a_304_brings_new_fields_and_a_new_age_and_leaves_the_body() {
    let sent = Instant::now();
    let kept = entry(&format!("{TAGGED}\nx-old: 1\nage: 50\nlink: <1>"), sent);
    let answer = not_modified(
        "etag: W/\"abc\"\ncache-control: max-age=90\nx-new: 1\nlink: <2>\nlink: <3>\ncontent-length: 0\n\
         content-encoding: gzip\nset-cookie: a=b\nage: 4",
    );
    let later = sent + secs(100);
    let refreshed = kept.refreshed(Request::get("").asked(), &answer, times(later)).unwrap();
    let expected = "etag: \"abc\"\nlast-modified: Wed, 31 Dec 2025 00:00:00 GMT\ncontent-type: text/plain\n\
        vary: accept\nx-old: 1\ndate: Thu, 01 Jan 2026 00:00:00 GMT\ncache-control: max-age=90\nx-new: 1\n\
        link: <2>\nlink: <3>";
    assert_eq!(refreshed.headers(), &fields(expected));
    assert_eq!((refreshed.age(later), refreshed.ttl(&CFG, later)), (secs(4), 86));
    assert_eq!(refreshed.body(), "hello");
    assert!(refreshed.may_be_kept(), "the cookie was for who asked");
}

#[test]
fn a_304_about_something_else_refreshes_nothing() {
    let tagged = entry(TAGGED, Instant::now());
    let dated = entry("last-modified: Wed, 31 Dec 2025 00:00:00 GMT", Instant::now());
    for (headers, by_tag, by_date) in [
        ("", true, true),
        ("etag: \"abc\"", true, true),
        ("etag: \"abd\"", false, true),
        ("last-modified: Wed, 31 Dec 2025 00:00:00 GMT", true, true),
        ("last-modified: Thu, 01 Jan 2026 00:00:00 GMT", true, false),
    ] {
        let (request, answer) = (Request::get(""), not_modified(headers));
        let fits = |entry: &Entry| entry.refreshed(request.asked(), &answer, times(Instant::now())).is_some();
        assert_eq!((fits(&tagged), fits(&dated)), (by_tag, by_date), "{headers}");
    }
}

#[test]
fn a_304_that_forbids_to_keep_takes_the_entry_away() {
    let at = Instant::now();
    let (store, request) = (Store::new(1 << 20), Request::get(""));
    store.put(request.key(), entry(TAGGED, at));
    let kept = store.find(&request.key(), &request.headers).unwrap();
    let answer = not_modified("cache-control: no-store");
    store.put(request.key(), kept.refreshed(request.asked(), &answer, times(at + secs(1))).unwrap());
    assert_eq!(store.find(&request.key(), &request.headers).unwrap_err(), Why::UriMiss);
}

// The store.

#[test]
fn c091_two_credentials_never_meet() {
    let store = Store::new(1 << 20);
    let at = Instant::now();
    let requests =
        ["authorization: A", "authorization: B", "cookie: A", "x-api-key: A", ""].map(Request::get);
    for (number, request) in requests.iter().enumerate() {
        assert_eq!(store.find(&request.key(), &request.headers).unwrap_err(), Why::UriMiss);
        let body = number.to_string();
        store.put(
            request.key(),
            entry_of(request, 200, "cache-control: public, max-age=60", &body, at).unwrap(),
        );
    }
    for (number, request) in requests.iter().enumerate() {
        let kept = store.find(&request.key(), &request.headers).unwrap();
        assert_eq!(kept.body(), number.to_string().as_bytes());
    }
}

#[test]
fn c092_vary_chooses_among_the_answers_of_a_key() {
    let store = Store::new(1 << 20);
    let at = Instant::now();
    let answer = "vary: Accept-Language, foo\ncache-control: max-age=60";
    let gzip = Request::get("accept-language: en, de\nfoo: 1, 2\nfoo: 3");
    store.put(gzip.key(), entry_of(&gzip, 200, answer, "gzip", at).unwrap());
    let found = |headers: &str| {
        let request = Request::get(headers);
        let found = store.find(&request.key(), &request.headers);
        found.map(|entry| String::from_utf8(entry.body().to_vec()).unwrap())
    };
    for same in [
        "accept-language: EN,de\nfoo: 1, 2\nfoo: 3\nother: 1",
        "foo: 1, 2\nfoo: 3\naccept-language: en\naccept-language:  , de",
    ] {
        assert_eq!(found(same).as_deref(), Ok("gzip"));
    }
    for other in [
        "",
        "accept-language: en, de",
        "foo: 1, 2",
        "accept-language: de\nfoo: 1, 2\nfoo: 3",
        // What is no list by the RFC may be anything, so that each byte counts.
        "accept-language: en, de\nfoo: 1,2\nfoo: 3",
        "accept-language: en, de\nfoo: 1,, 2\nfoo: 3",
        "accept-language: en, de\nfoo: 1, 2, 3",
        "accept-language: en, de\nfoo: 1, 2",
        "accept-language: en, de\nfoo: 3\nfoo: 1, 2",
        "accept-language: en, de, 1, 2\nfoo:",
    ] {
        assert_eq!(found(other), Err(Why::VaryMiss), "{other}");
    }
    let plain = Request::get("foo:");
    store.put(plain.key(), entry_of(&plain, 200, answer, "plain", at + secs(1)).unwrap());
    assert_eq!(found("foo: ").as_deref(), Ok("plain"));
    assert_eq!(found(""), Err(Why::VaryMiss));
    assert_eq!(found("accept-language: en, de\nfoo: 1, 2\nfoo: 3").as_deref(), Ok("gzip"));
    assert_eq!(store.len(), 1);
}

#[test]
fn a_key_holds_sixteen_variants_and_the_newest_of_each() {
    let store = Store::new(1 << 20);
    let at = Instant::now();
    let request = |number: u32| Request::get(&format!("foo: {number}"));
    let put = |number: u32, body: &str, at: Instant| {
        let request = request(number);
        store.put(request.key(), entry_of(&request, 200, "vary: foo", body, at).unwrap());
    };
    let found = |number: u32| {
        let request = request(number);
        store.find(&request.key(), &request.headers).ok().map(|entry| entry.body().clone())
    };
    for number in 0..20 {
        put(number, "first", at + secs(number.into()));
    }
    assert_eq!(
        (0..20).filter(|number| found(*number).is_some()).collect::<Vec<_>>(),
        (4..20).collect::<Vec<_>>()
    );
    put(7, "second", at + secs(100));
    assert_eq!(found(7).unwrap(), "second");
    // It was asked for before, and only took longer.
    put(7, "late", at + secs(99));
    assert_eq!(found(7).unwrap(), "second");
    assert_eq!((4..20).filter(|number| found(*number).is_some()).count(), 16);
}

#[test]
fn an_unsafe_request_makes_what_was_asked_before_it_invalid() {
    let store = Store::new(1 << 20);
    let at = Instant::now();
    let (request, mine) = (Request::get(""), Request::get("authorization: A"));
    let other = Request::new(Method::GET, "/b", "");
    for request in [&request, &mine, &other] {
        let answer = "cache-control: max-age=600, stale-if-error=600";
        store.put(request.key(), entry_of(request, 200, answer, "", at).unwrap());
    }
    let verdict = |request: &Request| {
        let kept = store.find(&request.key(), &request.headers).unwrap();
        let stands_in = kept.may_stand_in(secs(60), &request.headers, &CFG, at + secs(3));
        (kept.judge(request.asked(), &CFG, at + secs(3)), stands_in)
    };
    store.forget(&resource(request.asked().place), at + secs(2));
    assert_eq!(verdict(&request), (Verdict::Validate(Why::Stale), false));
    assert_eq!(verdict(&mine), (Verdict::Validate(Why::Stale), false));
    assert_eq!(verdict(&other), (Verdict::Fresh, true));
    // On its way when the other one came in.
    store
        .put(request.key(), entry_of(&request, 200, "cache-control: max-age=600", "", at + secs(1)).unwrap());
    assert_eq!(verdict(&request), (Verdict::Validate(Why::Stale), false));
    let kept = store.find(&request.key(), &request.headers).unwrap();
    let refreshed = kept.refreshed(request.asked(), &not_modified(""), times(at + secs(3))).unwrap();
    store.put(request.key(), refreshed);
    assert_eq!(verdict(&request), (Verdict::Fresh, true));
}

#[test]
fn marks_that_make_room_leave_no_old_answer_behind() {
    let store = Store::new(1 << 20);
    let at = Instant::now();
    let request = Request::get("");
    store.put(request.key(), entry_of(&request, 200, "cache-control: max-age=600", "", at).unwrap());
    let is_fresh = || {
        let kept = store.find(&request.key(), &request.headers).unwrap();
        kept.judge(request.asked(), &CFG, at) == Verdict::Fresh
    };
    let mark = |number: u32, at: Instant| {
        let target: PathAndQuery = format!("/other/{number}").parse().unwrap();
        store.forget(&resource(Place { target: &target, ..request.asked().place }), at);
    };
    for number in 0..500 {
        mark(number, at + secs(1));
    }
    assert!(is_fresh(), "nobody touched it");
    store.forget(&resource(request.asked().place), at + secs(1));
    for number in 0..100_000 {
        mark(number, at + secs(2));
    }
    assert!(!is_fresh());
}

#[test]
fn what_an_unsafe_request_touched_is_its_own_and_what_it_names_of_the_origin() {
    let targets = |method: Method, status: u16, answer: &str| {
        let request = Request::new(method, "/a/b?c", "");
        let status = StatusCode::from_u16(status).unwrap();
        let touched = touched(request.asked(), status, &fields(answer));
        let known = ["/a/b?c", "/a/d", "/d", "/a/d?e", "/", "/?q", "/a/b?q", "/a/", "/d/"];
        let name = |digest: &[u8; 32]| {
            let is_it = |target: &&&str| {
                let target: PathAndQuery = target.parse().unwrap();
                resource(Place { target: &target, ..request.asked().place }) == *digest
            };
            known.iter().find(is_it).map_or("?", |target| *target)
        };
        touched.iter().map(name).collect::<Vec<_>>()
    };
    for method in ["POST", "PUT", "DELETE", "PATCH", "M-SEARCH"] {
        assert_eq!(targets(method.parse().unwrap(), 204, ""), ["/a/b?c"]);
        assert_eq!(targets(method.parse().unwrap(), 500, ""), [""; 0]);
    }
    assert_eq!(targets(Method::GET, 200, "location: /d"), [""; 0]);
    assert_eq!(targets(Method::POST, 201, "location: d\ncontent-location: /d"), ["/a/b?c", "/a/d", "/d"]);
    for (location, target) in [
        ("http://quotes.test/d", Some("/d")),
        ("HTTP://QUOTES.test:80/d#x", Some("/d")),
        ("//quotes.test/d", Some("/d")),
        ("http://quotes.test", Some("/")),
        ("http://quotes.test?q", Some("/?q")),
        ("?q", Some("/a/b?q")),
        ("", None),
        ("#x", None),
        ("./d?e", Some("/a/d?e")),
        ("../d", Some("/d")),
        ("../../../d", Some("/d")),
        (".", Some("/a/")),
        ("../d/./x/..", Some("/d/")),
        ("https://quotes.test/d", None),
        ("http://quotes.test:81/d", None),
        ("http://other.test/d", None),
        ("mailto:a@quotes.test", None),
        ("http://[/d", None),
    ] {
        let expected: Vec<&str> = std::iter::once("/a/b?c").chain(target).collect();
        assert_eq!(targets(Method::POST, 201, &format!("location: {location}")), expected, "{location}");
    }
}

#[test]
fn an_entry_keeps_no_memory_but_its_own() {
    let buffer = Bytes::from(vec![b'x'; 1 << 16]);
    let mut head = fields("cache-control: max-age=60");
    head.insert("x-slice", HeaderValue::from_maybe_shared(buffer.slice(..10)).unwrap());
    let (request, store, now) = (Request::get(""), Store::new(CFG.max_bytes), times(Instant::now()));
    let mut candidate =
        Candidate::of(request.asked(), StatusCode::OK, &head, &CFG, false, now, &store).unwrap();
    assert!(candidate.push(&buffer.slice(..200)));
    let kept = candidate.complete();
    drop(head);
    assert!(buffer.is_unique(), "the entry holds the buffer that it was read into");
    assert_eq!((kept.body().len(), kept.headers()["x-slice"].len()), (200, 10));
}

/// What an answer says of itself is read once and counted as the text that it is: twenty thousand names in a
/// `private` would be many times that.
#[test]
fn a_list_of_fields_takes_no_memory_beside_its_text() {
    let of = |directive: &str| ResponseControl::of(&fields(&format!("cache-control: {directive}")));
    let once = of("private=\"te, X-A\", no-cache=\"te\"");
    let often = format!("private=\"{}X-A\", no-cache=\"{0}\", private=te", "te,".repeat(1000));
    assert_eq!(of(&often), once);
    assert_eq!((once.private_fields.len(), once.no_cache_fields.len()), (2, 1));
    let kept = entry(&format!("cache-control: max-age=60, {often}"), Instant::now());
    let names = kept.control().private_fields.capacity() + kept.control().no_cache_fields.capacity();
    assert_eq!(names, 0);
}

/// A store of 64 KiB once had three hundred bodies of 60 KB beside it.
#[test]
fn what_is_on_its_way_in_is_bounded_too() {
    const MOST: u64 = 1 << 16;
    let (store, request, now) = (Store::new(MOST), Request::get(""), times(Instant::now()));
    let start = |headers: &str| {
        Candidate::of(request.asked(), StatusCode::OK, &fields(headers), &CFG, false, now, &store)
    };
    let mut coming: Vec<Candidate> = (0..300).filter_map(|_| start("cache-control: max-age=60")).collect();
    assert!((10..100).contains(&coming.len()), "{}", coming.len());
    coming.truncate(10);
    let mut taken = 0;
    let mut refused = 0;
    for round in 0..40 {
        let gone: Vec<usize> = (0..coming.len()).filter(|index| !coming[*index].push(&[0; 1500])).collect();
        refused += gone.len();
        gone.iter().rev().for_each(|index| drop(coming.swap_remove(*index)));
        taken = taken.max(coming.len() * (round + 1) * 1500);
    }
    assert!(refused > 0 && taken > MOST as usize / 2 && taken <= MOST as usize, "{refused}, {taken}");
    // What has come or been given up leaves room for the next.
    drop(coming);
    let mut one = start("cache-control: max-age=60\ncontent-length: 60000").unwrap();
    assert!(one.push(&[0; 60_000]) && start("content-length: 60000").is_none());
    assert_eq!(one.complete().body().len(), 60_000);
    assert!(start("content-length: 60000").is_some());
}

/// Entries of several threads, many times as many as there is room for.
#[test]
fn the_bound_in_bytes_holds() {
    const MOST: u64 = 200_000;
    let store = Store::new(MOST);
    let request =
        |thread: usize, number: usize| Request::new(Method::GET, &format!("/{thread}/{number}"), "");
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let store = &store;
            scope.spawn(move || {
                for number in 0..500 {
                    let request = request(thread, number);
                    let body = "x".repeat(number * 7 % 5000);
                    store.put(request.key(), entry_of(&request, 200, TAGGED, &body, Instant::now()).unwrap());
                }
            });
        }
    });
    let bytes = store.bytes();
    let all = (0..4).flat_map(|thread| (0..500).map(move |number| request(thread, number)));
    let found = all.filter_map(|request| store.find(&request.key(), &request.headers).ok());
    let weight: u64 = found.map(|entry| entry.weight() as u64).sum();
    assert!((1..=MOST).contains(&weight), "{weight}");
    assert_eq!(weight, bytes);
}

#[test]
fn the_bound_in_bytes_holds_after_each_put_but_for_a_sixty_fourth() {
    for (most, body) in [(20_000, 4000), (128_000, 10)] {
        the_bound_holds_after_each_put(most, body);
    }
}

fn the_bound_holds_after_each_put(most: u64, body: usize) {
    let store = Store::new(most);
    let requests: Vec<Request> =
        (0..200).map(|number| Request::new(Method::GET, &format!("/{number}"), "")).collect();
    for request in &requests {
        store.put(request.key(), entry_of(request, 200, "", &"x".repeat(body), Instant::now()).unwrap());
        let found = requests.iter().filter_map(|request| store.find(&request.key(), &request.headers).ok());
        let weight: u64 = found.map(|entry| entry.weight() as u64).sum();
        assert!((1..=most + most / 64).contains(&weight), "{weight}");
    }
}

#[test]
fn what_is_larger_than_the_store_is_not_kept() {
    let (store, request) = (Store::new(1000), Request::get(""));
    store.put(request.key(), entry_of(&request, 200, "", &"x".repeat(900), Instant::now()).unwrap());
    assert!(store.is_empty());
    assert_eq!(store.bytes(), 0);
}

proptest! {
    #[test]
    fn any_cache_control_has_a_meaning(
        parts in prop::collection::vec(
            prop_oneof![
                Just("max-age".to_owned()), Just("s-maxage=".to_owned()), Just("no-store".to_owned()),
                Just("private".to_owned()), Just("=\"".to_owned()), Just("\"".to_owned()), Just(",".to_owned()),
                Just("\\".to_owned()), Just(" ".to_owned()), "[0-9]{1,30}", "[\\x20-\\x7e\u{e9}]{0,8}",
            ],
            0..20,
        ),
    ) {
        let text = parts.concat();
        let Ok(value) = HeaderValue::from_bytes(text.as_bytes()) else { return Ok(()) };
        let mut headers = HeaderMap::new();
        headers.insert(header::CACHE_CONTROL, value);
        let control = ResponseControl::of(&headers);
        RequestControl::of(&headers);
        prop_assert!(control.max_age.unwrap_or_default() <= secs(1 << 31));
        // One more line can only make it stricter or leave it.
        headers.append(header::CACHE_CONTROL, HeaderValue::from_static("no-store, max-age=0"));
        let stricter = ResponseControl::of(&headers);
        prop_assert!(stricter.no_store);
        prop_assert_eq!(stricter.max_age, Some(Duration::ZERO));
    }

    #[test]
    fn ranges_are_what_slices_are(length in 0usize..20, first in 0usize..25, last in 0usize..25) {
        let body: String = ('a'..).take(length).collect();
        let kept = entry_of(&Request::get(""), 200, "", &body, Instant::now()).unwrap();
        let answer = answer(&kept, &Request::get(&format!("range: bytes={first}-{last}")));
        let expected = match () {
            () if last < first => (200, body.as_str()),
            () if first >= length => (416, ""),
            () => (206, &body[first..length.min(last + 1)]),
        };
        prop_assert_eq!((answer.status().as_u16(), &answer.body()[..]), (expected.0, expected.1.as_bytes()));
    }
}
