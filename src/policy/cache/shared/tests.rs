//! What pods make of what another one wrote.

use std::time::{Duration, SystemTime};

use http::Method;
use proptest::prelude::*;
use tokio::time::Instant;

use super::super::tests::{CFG, Request, entry, entry_of, secs, wall};
use super::super::{Store, Verdict, Why};
use super::{Found, LONGEST, Moment, Spot, most_bytes, written};
use crate::config::Cache;
use crate::policy::cache::Entry;
use crate::policy::identity::resource;

/// For how long it is written.
const LIFE: Duration = secs(100);

fn spot(request: &Request) -> Spot {
    Spot::of(request.asked(), &CFG)
}

/// The value of `entry`, written at `at` by a clock on which that is `wall`.
fn value_of(request: &Request, entry: &Entry, at: Instant, wall: SystemTime) -> Vec<u8> {
    written(&spot(request), entry, LIFE, at, wall).expect("it can be written")
}

/// The value of a 200 with these fields, asked for at `at` and written `after` that.
fn value(request: &Request, answer: &str, at: Instant, after: Duration) -> Vec<u8> {
    let entry = entry_of(request, 200, answer, "hello", at).expect("it is kept");
    value_of(request, &entry, at + after, wall() + after)
}

/// A time at which Redis was asked, and which it is by the reader's clock.
fn moment(at: Instant, wall: SystemTime) -> Moment {
    Moment { began: at, ended: at, wall }
}

/// What is read of a value that was kept for `kept` and has no mark.
fn read(request: &Request, value: &[u8], kept: Duration, moment: Moment) -> Option<Entry> {
    Found { value, left: LIFE - kept, marked: None }.entry(&spot(request), request.asked(), moment)
}

#[test]
fn another_pod_has_the_answer_as_the_first_one_had_it() {
    let (at, request) = (Instant::now(), Request::get(""));
    let answer = "cache-control: max-age=60\netag: \"a\"\nlink: <1>\nlink: <2>\nage: 7";
    let own = entry_of(&request, 200, answer, "hello", at).unwrap();
    let value = value_of(&request, &own, at + secs(2), wall() + secs(2));
    let later = at + secs(5);
    let read = read(&request, &value, secs(3), moment(later, wall() + secs(5))).unwrap();
    assert_eq!((read.status(), read.headers(), read.body()), (own.status(), own.headers(), own.body()));
    assert_eq!((read.age(later), own.age(later)), (secs(12), secs(12)));
    assert_eq!(read.ttl(&CFG, later), own.ttl(&CFG, later));
    assert_eq!(read.judge(request.asked(), &CFG, at + secs(52)), Verdict::Fresh);
    assert_eq!(read.judge(request.asked(), &CFG, at + secs(53)), Verdict::Validate(Why::Stale));
}

/// Of three clocks the one counts by which the answer is oldest.
#[test]
fn no_clock_makes_an_answer_younger() {
    let (at, request) = (Instant::now(), Request::get(""));
    let value = value(&request, "cache-control: max-age=60", at, Duration::ZERO);
    let later = at + secs(500);
    let age = |kept: Duration, wall: SystemTime| {
        read(&request, &value, kept, moment(later, wall)).map(|entry| entry.age(later))
    };
    assert_eq!(age(secs(30), wall() + secs(30)), Some(secs(30)));
    // The reader's clock is behind; that of Redis counts alone.
    assert_eq!(age(secs(30), wall() - secs(400)), Some(secs(30)));
    // It is ahead, or the command came late.
    assert_eq!(age(secs(30), wall() + secs(300)), Some(secs(300)));
    // That of Redis went back while the key was there.
    let longer = Found { value: &value, left: LIFE + secs(1), marked: None };
    assert!(longer.entry(&spot(&request), request.asked(), moment(later, wall())).is_none());
}

#[test]
fn the_time_that_the_question_takes_counts_as_age() {
    let (at, request) = (Instant::now(), Request::get(""));
    let value = value(&request, "cache-control: max-age=60", at, Duration::ZERO);
    let moment = Moment { began: at + secs(10), ended: at + secs(14), wall: wall() + secs(10) };
    let entry = read(&request, &value, secs(10), moment).unwrap();
    assert_eq!((entry.age(moment.ended), entry.sent()), (secs(14), at));
}

#[test]
fn what_was_asked_for_before_a_mark_is_nothing() {
    let (at, request) = (Instant::now(), Request::get(""));
    // Asked for at 0, written at 20, as a slow answer is; looked for at 30.
    let value = value(&request, "cache-control: max-age=60", at, secs(20));
    let found = |marked: Option<Duration>| {
        let found = Found { value: &value, left: LIFE - secs(10), marked };
        found.entry(&spot(&request), request.asked(), moment(at + secs(30), wall() + secs(30))).is_some()
    };
    assert!(found(None));
    assert!(found(Some(secs(31))), "a mark before the request");
    for since in [30, 25, 15, 5, 0] {
        assert!(!found(Some(secs(since))), "a mark {since} s ago");
    }
}

/// Where the word of the mark was lost, the pod that has said it still knows.
#[test]
fn a_pods_own_marks_hold_for_what_others_had() {
    let (at, request) = (Instant::now() + secs(1), Request::get(""));
    let value = value(&request, "cache-control: max-age=60", at, Duration::ZERO);
    let verdict = |marked: Option<Instant>| {
        let store = Store::new(1 << 20);
        if let Some(marked) = marked {
            store.forget(&resource(request.asked().place), marked);
        }
        let entry = read(&request, &value, secs(2), moment(at + secs(2), wall() + secs(2))).unwrap();
        let adopted = store.adopt(request.key(), entry);
        let kept = store.find(&request.key(), &request.headers).unwrap();
        let judge = |entry: &Entry| entry.judge(request.asked(), &CFG, at + secs(3));
        assert_eq!(judge(&adopted), judge(&kept));
        judge(&kept)
    };
    assert_eq!(verdict(None), Verdict::Fresh);
    assert_eq!(verdict(Some(at - Duration::from_millis(1))), Verdict::Fresh);
    assert_eq!(verdict(Some(at + Duration::from_millis(1))), Verdict::Validate(Why::Stale));
}

#[test]
fn requests_that_are_not_the_same_have_spots_of_their_own() {
    let requests = [
        Request::get(""),
        Request::new(Method::GET, "/b", ""),
        Request::new(Method::GET, "/a?", ""),
        Request::get("accept: text/html"),
        Request::get("accept-encoding: gzip"),
        Request::get("authorization: A"),
        Request::get("authorization: B"),
        Request::get("x-api-key: A"),
        Request::get("cookie: A"),
    ];
    let names: Vec<_> = requests.iter().map(|request| *spot(request).key.as_bytes()).collect();
    for (at, name) in names.iter().enumerate() {
        assert!(!names[..at].contains(name), "{at}");
    }
    // What HEAD gets is what GET has brought.
    assert_eq!(*spot(&Request::new(Method::HEAD, "/a", "")).key.as_bytes(), names[0]);
    let vary = Cache { vary: vec!["foo".parse().unwrap()], ..CFG };
    let with_foo = |value: &str| Spot::of(Request::get(&format!("foo: {value}")).asked(), &vary).key;
    assert_ne!(with_foo("1"), with_foo("2"));
}

#[test]
fn what_a_request_varies_by_is_looked_at_and_cannot_be_read() {
    let at = Instant::now();
    let request = Request::get("x-who: me\nauthorization: Bearer secret");
    let value = value(&request, "vary: x-who, authorization\ncache-control: max-age=60", at, secs(0));
    let holds = |text: &str| value.windows(text.len()).any(|part| part == text.as_bytes());
    assert!(holds("x-who, authorization") && !holds("me") && !holds("secret"));
    let now = moment(at, wall());
    assert!(read(&request, &value, secs(0), now).is_some());
    // It has the same key.
    let other = Request::get("x-who: you\nauthorization: Bearer secret");
    assert_eq!(spot(&other).key, spot(&request).key);
    assert!(read(&other, &value, secs(0), now).is_none());
    // Under another key, as where somebody has renamed one, it is nothing either.
    let elsewhere = Request::new(Method::GET, "/b", "x-who: me\nauthorization: Bearer secret");
    assert!(read(&elsewhere, &value, secs(0), now).is_none());
}

/// Whoever wrote it: what this pod would not have kept itself it does not take.
#[test]
fn what_may_not_be_kept_is_nothing() {
    let (at, request) = (Instant::now(), Request::get(""));
    let own = entry("cache-control: max-age=60", at);
    for (status, name, text, is_taken) in [
        (200, "x-a", "1", true),
        (200, "cache-control", "no-store", false),
        (200, "cache-control", "private", false),
        (200, "set-cookie", "a=b", false),
        (206, "x-a", "1", false),
        (200, "vary", "*", false),
    ] {
        let mut headers = own.headers().clone();
        headers.insert(name, text.parse().unwrap());
        let label = super::value::read(&value_of(&request, &own, at, wall())).unwrap().label;
        let status = http::StatusCode::from_u16(status).unwrap();
        let value = super::value::write(&label, status, &headers, b"hello").unwrap();
        let read = read(&request, &value, secs(0), moment(at, wall()));
        assert_eq!(read.is_some(), is_taken, "{status} {name}: {text}");
    }
}

#[test]
fn an_answer_is_kept_for_as_long_as_it_is_of_use() {
    let at = Instant::now();
    let policy = Cache { stale_if_error: secs(20), stale_while_revalidate: secs(10), ..CFG };
    for (answer, after, cfg, allowance, seconds) in [
        ("cache-control: max-age=60", 0, &CFG, 0, 60),
        ("cache-control: max-age=60", 15, &CFG, 0, 45),
        ("cache-control: max-age=60\nage: 50", 0, &CFG, 0, 10),
        ("cache-control: max-age=60", 0, &policy, 0, 80),
        ("cache-control: max-age=60", 0, &policy, 30, 90),
        ("cache-control: max-age=60, stale-if-error=300", 0, &policy, 30, 360),
        ("cache-control: max-age=60, stale-while-revalidate=40", 0, &policy, 30, 100),
        ("cache-control: max-age=60, must-revalidate", 0, &policy, 30, 60),
        ("cache-control: s-maxage=60", 0, &policy, 30, 60),
        // Stale, it is for the pod that has it.
        ("cache-control: max-age=60", 60, &policy, 30, 0),
        ("cache-control: max-age=0", 0, &policy, 30, 0),
        ("cache-control: no-cache\netag: \"a\"", 0, &policy, 30, 0),
        ("", 0, &policy, 30, 0),
        ("cache-control: max-age=31536000", 0, &CFG, 0, LONGEST.as_secs()),
        ("cache-control: max-age=31536000", 600, &CFG, 0, LONGEST.as_secs() - 600),
    ] {
        let life = entry(answer, at).shared_life(secs(allowance), cfg, at + secs(after));
        assert_eq!(life, secs(seconds), "{answer} after {after}");
    }
}

#[test]
fn a_value_has_a_bound_whatever_the_policy_allows() {
    assert_eq!(most_bytes(&CFG), (64 << 10) + CFG.max_body);
    assert_eq!(most_bytes(&Cache { max_body: 1 << 30, ..CFG }), 4 << 20);
    let own = entry("cache-control: max-age=60", Instant::now());
    let value = value_of(&Request::get(""), &own, Instant::now(), wall());
    assert_eq!(value.len(), own.shared_size());
}

proptest! {
    /// As found, by whoever may write there.
    #[test]
    fn no_value_and_no_time_does_harm(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        left in prop_oneof![any::<u32>().prop_map(u64::from), any::<u64>()],
        marked in prop::option::of(any::<u64>()),
    ) {
        let (at, request) = (Instant::now(), Request::get(""));
        let mut value = value(&request, "cache-control: max-age=60\nvary: foo\netag: \"a\"", at, secs(1));
        for (index, byte) in changes {
            let index = index.index(value.len());
            value[index] = byte;
        }
        let found = Found {
            value: &value,
            left: Duration::from_millis(left),
            marked: marked.map(Duration::from_millis),
        };
        let entry = found.entry(&spot(&request), request.asked(), moment(at + secs(1), wall() + secs(1)));
        if let Some(entry) = entry {
            entry.judge(request.asked(), &CFG, at + secs(2));
            entry.answer(request.asked(), at + secs(2));
            prop_assert!(entry.sent() <= at + secs(1));
        }
    }
}
