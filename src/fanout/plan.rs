//! What a fan-out is asked to do: its JSON, checked and made ready to run.
//!
//! The list as a whole must be well formed, or nothing is done: no JSON, an unknown key or two calls of one name
//! leave it open what was meant. A call that cannot be made, with a URL that is none or a header that no request
//! can carry, is a fault of that call alone. Every fault names its place as `calls[3].url`.

use std::collections::HashSet;
use std::fmt;
use std::marker::PhantomData;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::Method;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::uri::PathAndQuery;
use serde::de::value::MapAccessDeserializer;
use serde::de::{self, MapAccess, Unexpected, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;
use serde_json::{Map, Value};
use url::{Host, Position, Url};

use super::content::is_too_deep;
use crate::config::Limits;
use crate::wire::authority::Authority;
use crate::wire::credentials::is_credential;
use crate::wire::target::Scheme;

/// Calls of one fan-out.
pub const MOST_CALLS: usize = 1000;
/// Calls at once, unless the request says otherwise.
const CONCURRENT: usize = 100;
/// Bytes of one result's body, unless the call says otherwise.
const MAX_BODY: usize = 1 << 20;
/// What a call may ask for.
const MOST_BODY: usize = 16 << 20;
/// Characters of an id.
const LONGEST_ID: usize = 200;
/// Longer times are mistakes in their unit.
const MOST_MILLIS: f64 = 1e9;

/// A fan-out to run.
#[derive(Debug)]
pub struct Plan {
    /// From the request's arrival.
    pub deadline: Option<Duration>,
    /// Calls at once; at least 1.
    pub max_concurrent: usize,
    /// With so many results the answer does not wait for the rest.
    pub min_results: Option<usize>,
    /// How long it waits for the rest all the same. Given without those, the answer waits so long for optional calls
    /// when all others have ended.
    pub grace: Option<Duration>,
    /// Whether the answer holds the paragraph for a model's system prompt.
    pub wants_prompt: bool,
    /// At least 1 and at most [`MOST_CALLS`].
    pub calls: Vec<Planned>,
}

/// One call of a plan.
#[derive(Debug)]
pub struct Planned {
    /// Its name among the others.
    pub id: String,
    /// The answer is complete without it.
    pub is_optional: bool,
    /// What to send, or why that cannot be sent.
    pub ask: Result<Ask, String>,
}

/// A request to make.
#[derive(Debug, Clone)]
pub struct Ask {
    /// Where it goes.
    pub place: Place,
    /// Where it goes when nothing acceptable comes from there, and with which fields.
    pub backup: Option<(Place, HeaderMap)>,
    /// As given, the usual ones in capitals.
    pub method: Method,
    /// Without those of the connection; with those that describe the body.
    pub headers: HeaderMap,
    /// All of it.
    pub body: Bytes,
    /// From the call's start.
    pub timeout: Option<Duration>,
    /// Bytes of the answer's body that are wanted at most.
    pub max_body: usize,
}

/// What a URL says.
#[derive(Debug, Clone)]
pub struct Place {
    /// Its scheme.
    pub scheme: Scheme,
    /// Host and port in normal form.
    pub authority: String,
    /// Path and query.
    pub target: PathAndQuery,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Wanted {
    deadline_ms: Option<Number>,
    max_concurrent: Option<Whole>,
    min_results: Option<Whole>,
    grace_ms: Option<Number>,
    system_prompt: Option<bool>,
    calls: Vec<Object<WantedCall>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WantedCall {
    id: String,
    url: String,
    method: Option<String>,
    headers: Option<Map<String, Value>>,
    body: Option<Box<RawValue>>,
    body_base64: Option<String>,
    timeout_ms: Option<Number>,
    backup: Option<String>,
    backup_headers: Option<Map<String, Value>>,
    optional: Option<bool>,
    max_body_bytes: Option<Whole>,
}

/// Any number.
struct Number(f64);

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl Visitor<'_> for Any {
            type Value = Number;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number")
            }

            fn visit_u64<E>(self, number: u64) -> Result<Number, E> {
                Ok(Number(number as f64))
            }

            fn visit_i64<E>(self, number: i64) -> Result<Number, E> {
                Ok(Number(number as f64))
            }

            fn visit_f64<E>(self, number: f64) -> Result<Number, E> {
                Ok(Number(number))
            }
        }
        deserializer.deserialize_f64(Any)
    }
}

/// A whole number, however it is written: `20.0` is one to JSON Schema, and some programs write no other. What is
/// beyond a `usize` becomes the largest of them, which is more than any key takes.
struct Whole(usize);

impl<'de> Deserialize<'de> for Whole {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Number;
        impl Visitor<'_> for Number {
            type Value = Whole;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a whole number from 0 on")
            }

            fn visit_u64<E: de::Error>(self, number: u64) -> Result<Whole, E> {
                Ok(Whole(usize::try_from(number).unwrap_or(usize::MAX)))
            }

            fn visit_f64<E: de::Error>(self, number: f64) -> Result<Whole, E> {
                // Long numbers are read a hair beside what is written.
                let is_whole = number.fract() == 0.0 || number > f64::from(u32::MAX);
                if number < 0.0 || !is_whole {
                    return Err(E::invalid_value(Unexpected::Float(number), &self));
                }
                Ok(Whole(number as usize))
            }
        }
        deserializer.deserialize_u64(Number)
    }
}

/// A struct that is written as an object, where serde would take a list of its values too.
struct Object<T>(T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Keys<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Keys<T> {
            type Value = T;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<T, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map))
            }
        }
        deserializer.deserialize_map(Keys(PhantomData)).map(Self)
    }
}

impl Plan {
    /// Reads a request's body.
    ///
    /// # Errors
    /// What leaves no list to work on, with its place.
    pub fn read(body: &[u8], limits: &Limits) -> Result<Self, String> {
        Self::parse(body, limits).map_err(shorten)
    }

    /// Bytes of memory, nearly, beside the bodies, which are as large as in the request.
    pub fn weight(&self) -> usize {
        const FIELD: usize = 128;
        let fields = |planned: &Planned| planned.ask.as_ref().map_or(0, |ask| ask.headers.len() * FIELD);
        self.calls.iter().map(|planned| size_of::<Planned>() + fields(planned)).sum()
    }

    fn parse(body: &[u8], limits: &Limits) -> Result<Self, String> {
        let mut json = serde_json::Deserializer::from_slice(body);
        let Object(wanted) =
            serde_path_to_error::deserialize::<_, Object<Wanted>>(&mut json).map_err(|error| {
                let path = error.path().to_string();
                let fault = error.into_inner();
                match path.as_str() {
                    "." | "?" => format!("the body is no fan-out: {fault}"),
                    _ => format!("{path}: {fault}"),
                }
            })?;
        json.end().map_err(|fault| format!("the body is no fan-out: {fault}"))?;

        if !(1..=MOST_CALLS).contains(&wanted.calls.len()) {
            return Err(format!("calls: expected 1 to {MOST_CALLS} of them; found {}", wanted.calls.len()));
        }
        check_ids(&wanted.calls)?;
        let (count, most) =
            (wanted.calls.len(), wanted.max_concurrent.map_or(CONCURRENT, |Whole(most)| most));
        if !(1..=MOST_CALLS).contains(&most) {
            return Err(format!("max_concurrent: expected 1 to {MOST_CALLS}; found {most}"));
        }
        let min_results = wanted.min_results.map(|Whole(least)| least);
        if let Some(least) = min_results.filter(|least| !(1..=count).contains(least)) {
            return Err(format!("min_results: expected 1 to the number of calls, {count}; found {least}"));
        }
        Ok(Self {
            deadline: wanted.deadline_ms.map(|millis| time("deadline_ms", millis, false)).transpose()?,
            max_concurrent: most,
            min_results,
            grace: wanted.grace_ms.map(|millis| time("grace_ms", millis, true)).transpose()?,
            wants_prompt: wanted.system_prompt.unwrap_or_default(),
            calls: wanted
                .calls
                .into_iter()
                .enumerate()
                .map(|(at, Object(call))| planned(at, call, limits))
                .collect(),
        })
    }
}

/// What is wrong is told with the words that are, which may be very long.
fn shorten(mut fault: String) -> String {
    const LONGEST: usize = 300;
    if fault.len() > LONGEST {
        let end = (0..=LONGEST).rev().find(|at| fault.is_char_boundary(*at)).unwrap_or(0);
        fault.truncate(end);
        fault.push_str("...");
    }
    fault
}

/// They name results, stand in a sentence and in lines of a stream.
fn check_ids(calls: &[Object<WantedCall>]) -> Result<(), String> {
    let mut seen = HashSet::with_capacity(calls.len());
    for (at, Object(WantedCall { id, .. })) in calls.iter().enumerate() {
        if id.is_empty() || id.chars().count() > LONGEST_ID || id.chars().any(is_unseen) {
            return Err(format!("calls[{at}].id: expected 1 to {LONGEST_ID} characters that can be seen"));
        }
        if !seen.insert(id.as_str()) {
            return Err(format!("calls[{at}].id: {id:?} is the id of an earlier call too"));
        }
    }
    Ok(())
}

/// Controls, line ends of all kinds, and what turns the direction of text or takes no place in it.
fn is_unseen(letter: char) -> bool {
    letter.is_control()
        || matches!(
            letter,
            '\u{ad}' | '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}'
        )
}

fn time(path: &str, Number(millis): Number, may_be_zero: bool) -> Result<Duration, String> {
    let is_enough = if may_be_zero { millis >= 0.0 } else { millis > 0.0 };
    if !is_enough || millis > MOST_MILLIS {
        let least = if may_be_zero { "0" } else { "more than 0" };
        return Err(format!("{path}: expected {least} to {MOST_MILLIS} milliseconds; found {millis}"));
    }
    Ok(Duration::from_secs_f64(millis / 1e3))
}

fn planned(at: usize, mut call: WantedCall, limits: &Limits) -> Planned {
    let (id, is_optional) = (std::mem::take(&mut call.id), call.optional.unwrap_or_default());
    let ask = ask(call, limits).map_err(|fault| shorten(format!("calls[{at}].{fault}")));
    Planned { id, is_optional, ask }
}

fn ask(call: WantedCall, limits: &Limits) -> Result<Ask, String> {
    let place = Place::of(&call.url, limits).map_err(|fault| format!("url: {fault}"))?;
    let method = method(call.method.as_deref().unwrap_or("GET"))?;
    let (body, kind) = body(call.body.as_deref(), call.body_base64.as_deref())?;
    let mut headers = self::headers("headers", call.headers.unwrap_or_default(), limits)?;
    describe(&mut headers, &method, &body, kind);
    let own = self::headers("backup_headers", call.backup_headers.unwrap_or_default(), limits)?;
    let backup = match call.backup {
        None if own.is_empty() => None,
        None => return Err("backup_headers: there is no backup that they could be for".into()),
        Some(url) => {
            let elsewhere = Place::of(&url, limits).map_err(|fault| format!("backup: {fault}"))?;
            let fields = fields_for(&elsewhere, &place, &headers, own);
            Some((elsewhere, fields))
        }
    };
    let max_body = call.max_body_bytes.map_or(MAX_BODY, |Whole(most)| most);
    if max_body > MOST_BODY {
        return Err(format!("max_body_bytes: expected at most {MOST_BODY}; found {max_body}"));
    }
    let timeout = call.timeout_ms.map(|millis| time("timeout_ms", millis, false)).transpose()?;
    Ok(Ask { place, backup, method, headers, body, timeout, max_body })
}

/// The fields for a call's backup: those of the call, but for its credentials where the backup is another host, which
/// they are none of the business of; and its `own` in their place.
fn fields_for(backup: &Place, place: &Place, headers: &HeaderMap, own: HeaderMap) -> HeaderMap {
    let is_foreign = backup.authority != place.authority || backup.scheme != place.scheme;
    let is_left = |name: &HeaderName| (is_foreign && is_credential(name)) || own.contains_key(name);
    let kept = headers.iter().filter(|(name, _)| !is_left(name));
    let mut fields: HeaderMap = kept.map(|(name, value)| (name.clone(), value.clone())).collect();
    fields.extend(own);
    fields
}

impl Place {
    /// Reads an absolute URL as HTTP clients do: what a path cannot hold is escaped, and the fragment stays here.
    fn of(text: &str, limits: &Limits) -> Result<Self, String> {
        const EXPECTED: &str = "expected an http or https URL";
        let url = Url::parse(text).map_err(|fault| format!("{EXPECTED}; {fault}"))?;
        let scheme = match url.scheme() {
            "http" => Scheme::Http,
            "https" => Scheme::Https,
            other => return Err(format!("{EXPECTED}; found {other}:")),
        };
        // What browsers mend in silence is more likely a mistake here.
        let host =
            raw_host(text).ok_or_else(|| format!("{EXPECTED} with // and a host behind its scheme"))?;
        if text.chars().any(char::is_control) {
            return Err("expected no control characters".into());
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err("expected no user name or password; send them in an Authorization header".into());
        }
        // Other ways to write an address are refused everywhere: filters read them differently than dialers.
        if let Some(Host::Ipv4(ip)) = url.host()
            && host != ip.to_string()
        {
            return Err(format!("expected a host name or a plain IPv4 address, such as {ip}"));
        }
        let host = url.host_str().ok_or("expected a host")?;
        let port = url.port_or_known_default().unwrap_or(scheme.default_port());
        let authority = Authority::parse(&format!("{host}:{port}"), None)?.key().to_owned();
        let target = &url[Position::BeforePath..Position::AfterQuery];
        if target.len() > limits.target {
            return Err("the path and query are longer than limits.target allows".into());
        }
        let target = PathAndQuery::try_from(target).map_err(|fault| fault.to_string())?;
        Ok(Self { scheme, authority, target })
    }
}

/// The host as it is written; `None` where there is none.
fn raw_host(url: &str) -> Option<&str> {
    let (_, rest) = url.split_once(':')?;
    let rest = rest.strip_prefix("//")?;
    let authority = rest.split(['/', '?', '#', '\\']).next()?;
    let host = authority.rsplit('@').next()?;
    let host = host
        .rsplit_once(':')
        .filter(|(_, port)| port.bytes().all(|b| b.is_ascii_digit()))
        .map_or(host, |(host, _)| host);
    Some(host.trim_end_matches('.')).filter(|host| !host.is_empty())
}

/// Methods are case-sensitive, but who writes `get` means GET; fetch takes it so too.
fn method(text: &str) -> Result<Method, String> {
    let known = [
        Method::GET,
        Method::HEAD,
        Method::POST,
        Method::PUT,
        Method::PATCH,
        Method::DELETE,
        Method::OPTIONS,
    ];
    if let Some(known) = known.into_iter().find(|known| known.as_str().eq_ignore_ascii_case(text)) {
        return Ok(known);
    }
    let is_refused = ["CONNECT", "TRACE"].iter().any(|refused| refused.eq_ignore_ascii_case(text));
    match Method::from_bytes(text.as_bytes()) {
        Ok(method) if !is_refused => Ok(method),
        _ => Err(format!("method: {text:?} is none that a fan-out can send")),
    }
}

/// The body, and what kind of content it is.
fn body(json: Option<&RawValue>, base64: Option<&str>) -> Result<(Bytes, Option<&'static str>), String> {
    match (json, base64) {
        (None, None) => Ok((Bytes::new(), None)),
        (Some(_), Some(_)) => Err("body_base64: there is a body already".into()),
        (None, Some(text)) => {
            let bytes = STANDARD.decode(text).map_err(|fault| format!("body_base64: {fault}"))?;
            Ok((bytes.into(), Some("application/octet-stream")))
        }
        (Some(json), None) => {
            let json = json.get();
            if is_too_deep(json) {
                return Err("body: nested too deeply".into());
            }
            // A text goes out as it is, anything else as JSON, byte for byte.
            if !json.starts_with('"') {
                return Ok((Bytes::copy_from_slice(json.as_bytes()), Some("application/json")));
            }
            let text: String = serde_json::from_str(json).map_err(|fault| format!("body: {fault}"))?;
            Ok((text.into(), Some("text/plain; charset=utf-8")))
        }
    }
}

/// Fields of the connection, which hedgerow sets. They are left out without a word, as fetch does: programs
/// copy whole sets of fields from elsewhere. So is `accept-encoding`, since results are to be read.
fn is_ours(name: &HeaderName) -> bool {
    matches!(
        name.as_str(),
        "host"
            | "content-length"
            | "transfer-encoding"
            | "connection"
            | "keep-alive"
            | "proxy-connection"
            | "te"
            | "trailer"
            | "upgrade"
            | "expect"
            | "via"
            | "accept-encoding"
    )
}

fn headers(key: &str, given: Map<String, Value>, limits: &Limits) -> Result<HeaderMap, String> {
    let count: usize = given.values().map(|value| value.as_array().map_or(1, Vec::len)).sum();
    if count > limits.fields {
        return Err(format!("{key}: expected at most {} (limits.fields); found {count}", limits.fields));
    }
    let mut headers = HeaderMap::with_capacity(count + 4);
    for (name, value) in &given {
        let path = || format!("{key}[{name:?}]");
        let field =
            HeaderName::try_from(name).map_err(|_| format!("{}: no header has such a name", path()))?;
        let values = match value {
            Value::Array(values) => values.as_slice(),
            value => std::slice::from_ref(value),
        };
        for value in values {
            let text =
                value.as_str().ok_or_else(|| format!("{}: expected text, or a list of texts", path()))?;
            let value = HeaderValue::from_bytes(text.as_bytes());
            let value = value.map_err(|_| format!("{}: no header can have this value", path()))?;
            if !is_ours(&field) {
                headers.append(field.clone(), value);
            }
        }
    }
    Ok(headers)
}

/// What any HTTP client would add.
fn describe(headers: &mut HeaderMap, method: &Method, body: &Bytes, kind: Option<&'static str>) {
    const USER_AGENT: HeaderValue = HeaderValue::from_static(concat!("hedgerow/", env!("CARGO_PKG_VERSION")));
    let is_content_usual = matches!(*method, Method::POST | Method::PUT | Method::PATCH);
    if !body.is_empty() || is_content_usual {
        headers.insert(header::CONTENT_LENGTH, body.len().into());
    }
    let mut add = |name: HeaderName, value: HeaderValue| {
        headers.entry(name).or_insert(value);
    };
    if let Some(kind) = kind {
        add(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    }
    add(header::USER_AGENT, USER_AGENT);
    add(header::ACCEPT, HeaderValue::from_static("*/*"));
    add(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::config;

    fn read(body: &str) -> Result<Plan, String> {
        Plan::read(body.as_bytes(), &config::embedded().limits)
    }

    /// The one call of a plan with these keys.
    fn call(keys: &str) -> Result<Ask, String> {
        let body = format!(r#"{{"calls": [{{"id": "a", {keys}}}]}}"#);
        read(&body).expect("a list").calls.remove(0).ask
    }

    fn place(url: &str) -> Result<Place, String> {
        Place::of(url, &config::embedded().limits)
    }

    #[test]
    fn what_a_list_does_not_say_has_a_default() {
        let plan = read(r#"{"calls": [{"id": "a", "url": "http://a.test"}]}"#).unwrap();
        assert_eq!((plan.deadline, plan.max_concurrent, plan.min_results), (None, 100, None));
        assert_eq!((plan.grace, plan.wants_prompt, plan.calls.len()), (None, false, 1));
        let call = &plan.calls[0];
        assert_eq!((&*call.id, call.is_optional), ("a", false));
        let ask = call.ask.as_ref().unwrap();
        assert_eq!((ask.method.as_str(), ask.timeout, ask.max_body), ("GET", None, 1 << 20));
        assert_eq!((ask.place.authority.as_str(), ask.place.target.as_str()), ("a.test:80", "/"));
        assert!(ask.backup.is_none() && ask.body.is_empty());
    }

    #[test]
    fn what_a_list_says_is_taken() {
        let plan = read(
            r#"{"deadline_ms": 1500.5, "max_concurrent": 7, "min_results": 1, "grace_ms": 0, "system_prompt": true,
                "calls": [{"id": "a", "url": "https://a.test/x", "optional": true, "timeout_ms": 0.5, "method": "put",
                           "max_body_bytes": 0, "backup": "http://b.test:81/y"}]}"#,
        )
        .unwrap();
        assert_eq!(plan.deadline, Some(Duration::from_micros(1_500_500)));
        assert_eq!((plan.max_concurrent, plan.min_results, plan.wants_prompt), (7, Some(1), true));
        let call = &plan.calls[0];
        let ask = call.ask.as_ref().unwrap();
        assert_eq!((call.is_optional, ask.method.as_str(), ask.max_body), (true, "PUT", 0));
        assert_eq!((ask.timeout, ask.place.scheme), (Some(Duration::from_micros(500)), Scheme::Https));
        let (backup, _) = ask.backup.as_ref().unwrap();
        assert_eq!((backup.authority.as_str(), backup.target.as_str()), ("b.test:81", "/y"));
    }

    /// What makes clients from the description makes them of these keys.
    #[test]
    fn the_description_has_the_keys_that_are_taken() {
        let told: Value = serde_json::from_str(include_str!("openapi.json")).unwrap();
        for (schema, body) in [("FanOut", r#"{"?": 1}"#), ("Call", r#"{"calls": [{"?": 1}]}"#)] {
            let fault = read(body).unwrap_err();
            let (_, listed) = fault.split_once("expected one of ").unwrap();
            let (listed, _) = listed.rsplit_once(" at line").unwrap();
            let taken: Vec<_> = listed.split(", ").map(|key| key.trim_matches('`')).collect();
            let described = told["components"]["schemas"][schema]["properties"].as_object().unwrap();
            assert_eq!(described.keys().collect::<Vec<_>>(), taken, "{schema}");
        }
    }

    #[test]
    fn a_place_is_in_normal_form() {
        for (url, authority, target) in [
            ("http://a.test", "a.test:80", "/"),
            ("HTTP://A.Test.:80/x?", "a.test:80", "/x?"),
            ("https://a.test?q", "a.test:443", "/?q"),
            ("https://a.test:80/#part", "a.test:80", "/"),
            ("http://bücher.test/", "xn--bcher-kva.test:80", "/"),
            ("http://127.0.0.1:81/a/../b", "127.0.0.1:81", "/b"),
            ("http://127.0.0.1./", "127.0.0.1:80", "/"),
            ("http://[2001:DB8::0:1]:8080/", "[2001:db8::1]:8080", "/"),
            (" http://a.test\\x ", "a.test:80", "/x"),
        ] {
            let place = place(url).unwrap_or_else(|fault| panic!("{url:?}: {fault}"));
            assert_eq!((place.authority.as_str(), place.target.as_str()), (authority, target), "{url:?}");
        }
    }

    /// As curl does on a redirect to another host.
    #[test]
    fn a_backup_elsewhere_gets_no_credentials_but_its_own() {
        let secret =
            r#""headers": { "Authorization": "Bearer a", "X-Api-Key": "b", "Cookie": "c", "X-Plain": "d" }"#;
        let fields = |backup: &str| {
            let ask = call(&format!(r#""url": "https://a.test/x", {secret}, {backup}"#)).unwrap();
            let (_, fields) = ask.backup.unwrap();
            ["authorization", "x-api-key", "cookie", "x-plain"]
                .map(|name| fields.get(name).map(|value| value.to_str().unwrap().to_owned()))
        };
        let all = ["Bearer a", "b", "c", "d"].map(|value| Some(value.to_owned()));
        assert_eq!(fields(r#""backup": "https://a.test/y""#), all);
        let plain = [None, None, None, Some("d".to_owned())];
        for elsewhere in ["https://b.test/", "http://a.test/", "https://a.test:8443/"] {
            assert_eq!(fields(&format!(r#""backup": "{elsewhere}""#)), plain);
        }
        let own = r#""backup": "https://b.test/", "backup_headers": { "authorization": "Bearer own" }"#;
        assert_eq!(fields(own), [Some("Bearer own".to_owned()), None, None, Some("d".to_owned())]);
        assert!(call(r#""url": "https://a.test", "backup_headers": { "a": "b" }"#).is_err());
    }

    /// Browsers mend these in silence.
    #[test]
    fn what_only_a_browser_takes_for_a_url_is_none() {
        for url in [
            "http:a.test",
            "http:/a.test",
            "http:///a.test",
            "http:\\\\a.test",
            "http://a.test/\n",
            "//a.test",
        ] {
            assert!(place(url).is_err(), "{url:?}");
        }
    }

    #[test]
    fn an_address_is_written_in_one_way() {
        for host in ["2130706433", "0x7f.1", "127.1", "0177.0.0.1", "127.0.0.01", "１２７.0.0.1", "%31.0.0.1"]
        {
            // Wherever else in the URL the plain form stands.
            let plain = place(&format!("http://{host}/")).map(|place| place.authority).unwrap_err();
            let ip = plain.rsplit_once(' ').unwrap().1;
            for url in [
                format!("http://{host}/{ip}"),
                format!("http://{host}:80/?{ip}"),
                format!("http://{host}#{ip}"),
                format!("http:{host}/://{ip}/"),
                format!("http:////{host}\\{ip}"),
            ] {
                assert!(place(&url).is_err(), "{url}");
            }
        }
    }

    #[test]
    fn a_call_that_cannot_be_made_leaves_the_others() {
        let body = json!({ "calls": [
            { "id": "good", "url": "http://a.test" },
            { "id": "bad", "url": "http://a.test", "headers": { "x y": "" } },
            { "id": "worse", "url": "data:," },
        ] });
        let plan = read(&body.to_string()).unwrap();
        assert_eq!(plan.calls.iter().map(|call| &*call.id).collect::<Vec<_>>(), ["good", "bad", "worse"]);
        let faults = plan.calls.into_iter().map(|call| call.ask.err()).collect::<Vec<_>>();
        assert_eq!(faults[0], None);
        assert!(faults[1].as_ref().unwrap().starts_with("calls[1].headers[\"x y\"]: "), "{faults:?}");
        assert!(faults[2].as_ref().unwrap().starts_with("calls[2].url: "), "{faults:?}");
    }

    #[test]
    fn what_describes_the_body_is_added_and_does_not_replace_the_callers_word() {
        let field =
            |ask: &Ask, name: &str| ask.headers.get(name).map(|value| value.to_str().unwrap().to_owned());
        for (keys, kind, length) in [
            ("", None, None),
            (r#", "method": "POST""#, None, Some("0")),
            (r#", "method": "POST", "body": {}"#, Some("application/json"), Some("2")),
            (r#", "body": "é""#, Some("text/plain; charset=utf-8"), Some("2")),
            (r#", "body_base64": "AAAA""#, Some("application/octet-stream"), Some("3")),
            (
                r#", "body": 1, "headers": {"Content-Type": "a/b", "Content-Length": "9"}"#,
                Some("a/b"),
                Some("1"),
            ),
        ] {
            let ask = call(&format!(r#""url": "http://a.test"{keys}"#)).unwrap();
            let expected = (kind.map(str::to_owned), length.map(str::to_owned));
            assert_eq!((field(&ask, "content-type"), field(&ask, "content-length")), expected, "{keys}");
            assert_eq!(field(&ask, "accept-encoding").as_deref(), Some("identity"));
        }
    }

    /// JSON as people and programs write it, blanks and all.
    fn json_text() -> impl Strategy<Value = String> {
        let blank = "[ \t\n\r]{0,2}";
        let leaf = prop_oneof![
            Just("null".to_owned()),
            Just("true".to_owned()),
            "-?(0|[1-9][0-9]{0,30})(\\.[0-9]{1,20})?([eE][+-]?[0-9]{1,3})?",
            any::<String>().prop_map(|text| Value::String(text).to_string()),
            Just(r#""\u0041\/\ud83d""#.to_owned()),
        ];
        leaf.prop_recursive(4, 32, 5, move |inner| {
            let item = (blank, inner, blank).prop_map(|(before, value, after)| before + &value + &after);
            let member = (blank, any::<String>(), item.clone())
                .prop_map(|(before, key, value)| format!("{before}{}:{value}", Value::String(key)));
            prop_oneof![
                prop::collection::vec(item, 1..5).prop_map(|items| format!("[{}]", items.join(","))),
                prop::collection::vec(member, 1..5).prop_map(|members| format!("{{{}}}", members.join(","))),
            ]
        })
    }

    proptest! {
        #[test]
        fn a_body_goes_out_byte_for_byte(json in json_text()) {
            let ask = call(&format!(r#""url": "http://a.test", "method": "POST", "body": {json}"#));
            let text = serde_json::from_str::<Option<String>>(&json);
            let expected = match &text {
                Ok(text) => text.as_deref().unwrap_or_default(),
                // Half a character has no bytes that could be sent.
                Err(_) if json.starts_with('"') => {
                    prop_assert!(ask.unwrap_err().starts_with("calls[0].body: "));
                    return Ok(());
                }
                Err(_) => &json,
            };
            let sent = ask.unwrap().body;
            prop_assert_eq!(std::str::from_utf8(&sent).unwrap(), expected);
        }

        #[test]
        fn calls_stay_in_their_order_under_their_names(ids in prop::collection::hash_set("\\PC{1,200}", 1..50)) {
            let ids: Vec<_> = ids.into_iter().filter(|id| !id.chars().any(is_unseen)).collect();
            prop_assume!(!ids.is_empty());
            let calls: Vec<_> = ids.iter().map(|id| json!({ "id": id, "url": "http://a.test" })).collect();
            let plan = read(&json!({ "calls": calls }).to_string()).unwrap();
            prop_assert_eq!(plan.calls.into_iter().map(|call| call.id).collect::<Vec<_>>(), ids);
        }

        #[test]
        fn no_header_carries_what_would_end_it(name in ".{0,8}", value in ".{0,16}") {
            let given = Map::from_iter([(name, Value::String(value))]);
            if let Ok(headers) = headers("headers", given, &config::embedded().limits) {
                for (name, value) in &headers {
                    prop_assert!(!value.as_bytes().iter().any(|byte| matches!(byte, b'\r' | b'\n' | 0)));
                    prop_assert!(!is_ours(name));
                }
            }
        }
    }
}
