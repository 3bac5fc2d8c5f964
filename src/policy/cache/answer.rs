//! The answer that an entry gives to a request: whole, a part, or that nothing changed.
//!
//! The request's own conditions and range are judged here, in the order of RFC 9110 section 13.2.2, since
//! a fresh entry speaks for the origin. They apply to a kept 200; any other status is given as it is.

use std::ops::Range;
use std::time::Duration;

use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{Method, Response, StatusCode};
use tokio::time::Instant;

use super::Asked;
use super::directives::{Escapes, members};
use super::entry::{Entry, opaque};
use super::freshness::only_date;

impl Entry {
    /// The answer to a request, with its `Age` (RFC 9111 section 5.1). To HEAD it has the length of what
    /// GET would bring and no body.
    pub fn answer(&self, asked: Asked<'_>, now: Instant) -> Response<Bytes> {
        let mut answer = match self.part(asked) {
            Part::Whole => self.whole(),
            Part::NotModified => self.not_modified(),
            Part::Bytes(range) => self.bytes(range),
            Part::Unsatisfiable => self.unsatisfiable(),
        };
        answer.headers_mut().insert(header::AGE, HeaderValue::from(self.age(now).as_secs()));
        if *asked.method == Method::HEAD {
            answer.body_mut().clear();
        }
        answer
    }

    fn part(&self, asked: Asked<'_>) -> Part {
        if self.status() != StatusCode::OK {
            return Part::Whole;
        }
        if self.is_known_to(asked.headers) {
            return Part::NotModified;
        }
        // RFC 9110 section 14.2: Range is defined for GET alone.
        if *asked.method != Method::GET
            || !self.gives_ranges()
            || !self.is_what_the_range_is_of(asked.headers)
        {
            return Part::Whole;
        }
        range(asked.headers, self.body().len())
    }

    /// RFC 9110 sections 13.1.2 and 13.1.3: the tags decide where there are any, else the date.
    fn is_known_to(&self, request: &HeaderMap) -> bool {
        if request.contains_key(header::IF_NONE_MATCH) {
            let etag = self.headers().get(header::ETAG).map(|etag| opaque(etag.as_bytes()));
            return request
                .get_all(header::IF_NONE_MATCH)
                .iter()
                .flat_map(|line| members(line.as_bytes(), Escapes::No))
                .any(|known| known == b"*" || etag == Some(opaque(known)));
        }
        let Some(since) = only_date(request, &header::IF_MODIFIED_SINCE) else { return false };
        // RFC 9111 section 4.3.2: an answer without Last-Modified is as old as its Date.
        let changed = only_date(self.headers(), &header::LAST_MODIFIED)
            .or_else(|| only_date(self.headers(), &header::DATE));
        changed.is_some_and(|changed| changed <= since)
    }

    fn gives_ranges(&self) -> bool {
        let units = self.headers().get(header::ACCEPT_RANGES);
        units.is_none_or(|units| !units.as_bytes().eq_ignore_ascii_case(b"none"))
    }

    /// RFC 9110 section 13.1.5: a part is of use only for what the client has the rest of.
    fn is_what_the_range_is_of(&self, request: &HeaderMap) -> bool {
        let Some(condition) = request.get(header::IF_RANGE) else { return true };
        if condition.as_bytes().ends_with(b"\"") {
            let is_strong = condition.as_bytes().starts_with(b"\"");
            return is_strong && self.headers().get(header::ETAG) == Some(condition);
        }
        let modified = only_date(self.headers(), &header::LAST_MODIFIED);
        let date = only_date(self.headers(), &header::DATE);
        // Section 8.8.2.2: a date is strong when nothing can have changed again within its second.
        let is_strong = modified
            .zip(date)
            .and_then(|(modified, date)| date.duration_since(modified).ok())
            .is_some_and(|between| between >= Duration::from_secs(1));
        is_strong && modified == only_date(request, &header::IF_RANGE)
    }

    fn whole(&self) -> Response<Bytes> {
        let mut answer = with(self.status(), self.headers().clone(), self.body().clone());
        // RFC 9110 section 8.6: a 204 has no length.
        if self.status() != StatusCode::NO_CONTENT {
            answer.headers_mut().insert(header::CONTENT_LENGTH, HeaderValue::from(self.body().len()));
        }
        answer
    }

    /// RFC 9110 section 15.4.5, without what describes a body.
    fn not_modified(&self) -> Response<Bytes> {
        let mut headers = self.headers().clone();
        for name in &OF_A_BODY {
            headers.remove(name);
        }
        with(StatusCode::NOT_MODIFIED, headers, Bytes::new())
    }

    fn bytes(&self, range: Range<usize>) -> Response<Bytes> {
        let place = format!("bytes {}-{}/{}", range.start, range.end - 1, self.body().len());
        let mut headers = self.headers().clone();
        headers.insert(header::CONTENT_LENGTH, HeaderValue::from(range.len()));
        if let Ok(place) = HeaderValue::try_from(place) {
            headers.insert(header::CONTENT_RANGE, place);
        }
        with(StatusCode::PARTIAL_CONTENT, headers, self.body().slice(range))
    }

    fn unsatisfiable(&self) -> Response<Bytes> {
        let mut headers = self.headers().clone();
        for name in &OF_A_BODY {
            headers.remove(name);
        }
        headers.insert(header::CONTENT_LENGTH, HeaderValue::from(0));
        if let Ok(size) = HeaderValue::try_from(format!("bytes */{}", self.body().len())) {
            headers.insert(header::CONTENT_RANGE, size);
        }
        with(StatusCode::RANGE_NOT_SATISFIABLE, headers, Bytes::new())
    }
}

/// Of the kept answer.
#[derive(Debug, PartialEq, Eq)]
enum Part {
    Whole,
    NotModified,
    Bytes(Range<usize>),
    Unsatisfiable,
}

static OF_A_BODY: [HeaderName; 6] = [
    header::CONTENT_TYPE,
    header::CONTENT_ENCODING,
    header::CONTENT_LANGUAGE,
    header::CONTENT_RANGE,
    header::CONTENT_DISPOSITION,
    header::ACCEPT_RANGES,
];

/// The part that `Range` asks for (RFC 9110 section 14.1.2). Several ranges, other units and what is no range
/// at all are ignored, as section 14.2 allows: the whole is given.
fn range(request: &HeaderMap, length: usize) -> Part {
    let Some((first, last)) = request.get(header::RANGE).and_then(|value| bounds(value.as_bytes())) else {
        return Part::Whole;
    };
    match (first, last) {
        (None, Some(0)) => Part::Unsatisfiable,
        (None, Some(_)) if length == 0 => Part::Whole,
        (None, Some(suffix)) => Part::Bytes(length.saturating_sub(suffix)..length),
        (Some(first), Some(last)) if last < first => Part::Whole,
        (Some(first), _) if first >= length => Part::Unsatisfiable,
        (Some(first), last) => {
            Part::Bytes(first..last.map_or(length, |last| last.saturating_add(1).min(length)))
        }
        (None, None) => Part::Whole,
    }
}

/// What stands around the dash of a single range of bytes.
fn bounds(value: &[u8]) -> Option<(Option<usize>, Option<usize>)> {
    let text = std::str::from_utf8(value).ok()?;
    let (unit, set) = text.split_once('=')?;
    let (first, last) = set.trim().split_once('-')?;
    let is_bytes = unit.eq_ignore_ascii_case("bytes");
    is_bytes.then_some((bound(first)?, bound(last)?))
}

/// `None` for what is no number; what is too large is beyond any body.
fn bound(digits: &str) -> Option<Option<usize>> {
    if digits.is_empty() {
        return Some(None);
    }
    let is_number = digits.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| Some(digits.parse().unwrap_or(usize::MAX)))
}

fn with(status: StatusCode, headers: HeaderMap, body: Bytes) -> Response<Bytes> {
    let mut answer = Response::new(body);
    *answer.status_mut() = status;
    *answer.headers_mut() = headers;
    answer
}
