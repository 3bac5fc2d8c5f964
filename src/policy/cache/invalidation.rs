//! What an unsafe request makes invalid (RFC 9111 section 4.4).

use std::borrow::Cow;

use http::header::{self, HeaderMap, HeaderValue};
use http::uri::PathAndQuery;
use http::{Method, StatusCode};

use super::Asked;
use crate::policy::identity::{Place, resource};
use crate::wire::authority::Authority;
use crate::wire::target::Scheme;

/// The resources that were changed, as far as one can tell, when a request got this answer: its own, and
/// those of the same origin that `Location` and `Content-Location` name. None for a safe method, or when
/// nothing came of it. For [`Store::forget`](super::Store::forget).
pub fn touched(asked: Asked<'_>, status: StatusCode, answer: &HeaderMap) -> Vec<[u8; 32]> {
    if is_safe(asked.method) || !(status.is_success() || status.is_redirection()) {
        return Vec::new();
    }
    let named = [header::LOCATION, header::CONTENT_LOCATION].into_iter().filter_map(|name| {
        let target = resolve(asked.place, answer.get(name)?)?;
        Some(resource(Place { target: &target, ..asked.place }))
    });
    std::iter::once(resource(asked.place)).chain(named).collect()
}

/// A method that is not known may do anything.
fn is_safe(method: &Method) -> bool {
    matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS | Method::TRACE)
}

/// Where a reference leads (RFC 3986 section 5.2); `None` for the resource itself, and for another origin,
/// which one may not speak for.
fn resolve(base: Place<'_>, reference: &HeaderValue) -> Option<PathAndQuery> {
    let reference = reference.to_str().ok()?.trim();
    let reference = reference.split_once('#').map_or(reference, |(before, _)| before);
    if reference.is_empty() {
        return None;
    }
    let path = match of_authority(reference, base.scheme) {
        Some((authority, path)) => {
            let authority = Authority::parse(authority, Some(base.scheme.default_port())).ok()?;
            if authority.key() != base.authority {
                return None;
            }
            if path.starts_with('/') { Cow::Borrowed(path) } else { Cow::Owned(format!("/{path}")) }
        }
        None if has_scheme(reference) => return None,
        None => Cow::Borrowed(reference),
    };
    let (path, query) = match path.split_once('?') {
        Some((path, query)) => (path, Some(query)),
        None => (&*path, None),
    };
    let merged = match path {
        "" => Cow::Borrowed(base.target.path()),
        _ if path.starts_with('/') => Cow::Borrowed(path),
        _ => {
            let folder = base.target.path().rsplit_once('/').map_or("", |(folder, _)| folder);
            Cow::Owned(format!("{folder}/{path}"))
        }
    };
    let mut target = without_dots(&merged);
    if let Some(query) = query {
        target.push('?');
        target.push_str(query);
    }
    target.parse().ok()
}

/// The authority and what follows it, of a reference with the same scheme or none.
fn of_authority(reference: &str, scheme: Scheme) -> Option<(&str, &str)> {
    let scheme = match scheme {
        Scheme::Http => "http:",
        Scheme::Https => "https:",
    };
    let start = reference.get(..scheme.len()).filter(|start| start.eq_ignore_ascii_case(scheme));
    let rest = start.map_or(reference, |start| &reference[start.len()..]).strip_prefix("//")?;
    Some(rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len())))
}

fn has_scheme(reference: &str) -> bool {
    let end = reference.find(['/', '?', ':']);
    end.is_some_and(|end| reference[end..].starts_with(':'))
}

/// RFC 3986 section 5.2.4.
fn without_dots(path: &str) -> String {
    let mut kept: Vec<&str> = Vec::new();
    let mut segments = path.split('/').skip(1).peekable();
    while let Some(segment) = segments.next() {
        let is_last = segments.peek().is_none();
        match segment {
            "." | ".." => {
                if segment == ".." {
                    kept.pop();
                }
                if is_last {
                    kept.push("");
                }
            }
            _ => kept.push(segment),
        }
    }
    format!("/{}", kept.join("/"))
}
