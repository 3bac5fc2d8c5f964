//! The fan-out's JSON, on its way in and out.

use std::collections::HashSet;
use std::sync::LazyLock;

use hedgerow::config::{self, Limits};
use hedgerow::fanout::content::Content;
use hedgerow::fanout::plan::{Ask, MOST_CALLS, Place, Plan};
use hedgerow::wire::authority::Authority;
use http::header::{self, HeaderMap, HeaderValue};

use crate::Target;

/// The body of a fan-out: a fault names its place, a plan that is read can be run, and as a result's body it
/// comes back in one line with nothing of it lost.
pub const FANOUT: Target = Target {
    check,
    inputs: 60_000,
    seeds: &[
        r#"{"deadline_ms":1500,"max_concurrent":20,"min_results":1,"grace_ms":0,"system_prompt":true,
            "calls":[{"id":"AAPL","url":"https://a.example/v1/q?s=AAPL"},{"id":"b","url":"http://b.example:81/"}]}"#,
        r#"{"calls":[{"id":"a","url":"http://127.0.0.1/a b?x=\u00fc#z","method":"post","headers":{"X-Key":["1","2"],
            "Content-Length":"9"},"body":{"n":1e400,"s":"\ud83d\\\"\r\n"},"timeout_ms":0.5,"optional":false}]}"#,
        r#"{"calls":[{"id":"a","url":"http:\\[2001:DB8::1]\\x","backup":"http://127.1:80/127.0.0.1","body":"text"}]}"#,
        r#"{"calls":[{"id":"a","url":"http://2130706433/","body_base64":"AAEC/w==","max_body_bytes":16777216}]}"#,
        r#"{"calls":[["a","http://a.example/"]],"deadline_ms":-0.0}"#,
        r#"[1500,null,null,null,null,[{"id":"a","id":"a","url":null,"ur":"x"}]]"#,
        r#"{"deadline_ms":1e10,"grace_ms":1e300,"calls":[{"id":"\u0000","url":"file:///etc/passwd"}]}"#,
        r#"{"calls":[{"id":"a","url":"http://xn--bcher-kva.example./","method":"TRACE","headers":{"a\r\nb":"c\r\nd"}}]}"#,
        "{\"calls\": [\r\n  {\"id\": \"a\",\n \"url\": \"http://me:pw@a.example\", \"body\": [[[[[[[[[]]]]]]]]]}\r]}",
        "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[",
    ],
};

static LIMITS: LazyLock<Limits> = LazyLock::new(|| config::embedded().limits);

fn check(data: &[u8]) {
    match Plan::read(data, &LIMITS) {
        Ok(plan) => check_plan(&plan),
        Err(fault) => check_fault(&fault),
    }
    check_content(data);
}

/// The keys of a list, which begin the place of a fault in it; a key that it does not have is named first too.
const KEYS: [&str; 6] =
    ["deadline_ms", "max_concurrent", "min_results", "grace_ms", "system_prompt", "calls"];

fn check_fault(fault: &str) {
    let names_a_key = KEYS.iter().any(|key| fault.starts_with(key));
    let is_whole = fault.starts_with("the body is no fan-out: ");
    assert!(is_whole || names_a_key || fault.contains("unknown field"), "no place in {fault:?}");
    assert!(fault.chars().count() <= 401, "{} characters", fault.chars().count());
}

fn check_plan(plan: &Plan) {
    let count = plan.calls.len();
    assert!((1..=MOST_CALLS).contains(&count), "{count} calls");
    assert!((1..=MOST_CALLS).contains(&plan.max_concurrent), "{} at once", plan.max_concurrent);
    assert!(plan.min_results.is_none_or(|least| (1..=count).contains(&least)), "{:?}", plan.min_results);
    let mut ids = HashSet::new();
    for (at, call) in plan.calls.iter().enumerate() {
        assert!(ids.insert(&call.id), "{:?} twice", call.id);
        assert!(!call.id.is_empty() && !call.id.contains(char::is_control), "{:?}", call.id);
        match &call.ask {
            Ok(ask) => check_ask(ask),
            Err(fault) => assert!(fault.starts_with(&format!("calls[{at}].")), "no place in {fault:?}"),
        }
    }
}

fn check_ask(ask: &Ask) {
    check_place(&ask.place);
    ask.backup.iter().for_each(|(place, _)| check_place(place));
    assert!(ask.method != http::Method::CONNECT && ask.method != http::Method::TRACE, "{}", ask.method);
    assert!(ask.max_body <= 16 << 20, "{}", ask.max_body);
    let lengths: Vec<_> = ask.headers.get_all(header::CONTENT_LENGTH).iter().collect();
    let is_told = match &lengths[..] {
        [] => ask.body.is_empty(),
        [length] => length.as_bytes() == ask.body.len().to_string().as_bytes(),
        _ => false,
    };
    assert!(is_told, "{lengths:?} for {} bytes", ask.body.len());
    for name in [header::HOST, header::CONNECTION, header::TRANSFER_ENCODING, header::UPGRADE, header::TE] {
        assert!(!ask.headers.contains_key(&name), "{name}");
    }
    assert_eq!(ask.headers.get_all(header::ACCEPT_ENCODING).iter().collect::<Vec<_>>(), ["identity"]);
}

fn check_place(place: &Place) {
    // What the registry does not take is told as a fault of the call; what it takes is in normal form.
    if let Ok(authority) = Authority::parse(&place.authority, None) {
        assert_eq!(authority.key(), place.authority, "not the normal form");
    }
    assert!(place.target.as_str().starts_with('/'), "{}", place.target);
}

fn check_content(data: &[u8]) {
    for (kind, is_cut) in [("application/json", false), ("text/plain", true), ("", false)] {
        let headers = HeaderMap::from_iter([(header::CONTENT_TYPE, HeaderValue::from_static(kind))]);
        match Content::of(data.to_vec(), is_cut, &headers) {
            Content::Empty => assert!(data.is_empty()),
            Content::Json(json) => {
                let told = |text: &[u8]| {
                    text.iter().filter(|b| !b.is_ascii_whitespace()).copied().collect::<Vec<_>>()
                };
                assert!(!json.contains(['\n', '\r']), "{} has line ends", json);
                assert_eq!(told(json.as_bytes()), told(data), "another text");
            }
            Content::Text(text) => {
                assert!(data.starts_with(text.as_bytes()), "another text: {text:?}");
                // A cut costs no more than the character that it went through.
                assert!(
                    text.len() == data.len() || (is_cut && data.len() - text.len() < 4),
                    "lost: {text:?}"
                );
            }
            Content::Binary(bytes) => assert_eq!(bytes, data, "other bytes"),
        }
    }
}
