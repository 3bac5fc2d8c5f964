//! The head that one attempt sends: built from the call each time, so that every attempt of a call
//! sends the same and none has to give its head back.

use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::uri::PathAndQuery;
use http::{Method, Request, Uri, Version};
use tokio::time::Instant;

use super::attempt::Try;
use crate::call::{Call, CallBody, expects_continue};
use crate::error::{Cause, Error};
use crate::policy::deadline::{Deadline, GRPC_TIMEOUT, X_REQUEST_DEADLINE};
use crate::respond::headers::small_number;
use crate::upstream::registry::Lane;
use crate::upstream::rewrite;
use crate::wire::body::{Continue, RequestBody};
use crate::wire::deadline_header::format_grpc_timeout;
use crate::wire::hop_by_hop::{self, Forwarded};
use crate::wire::retry_mark::{self, X_HEDGEROW_ATTEMPT};
use crate::wire::target::Scheme;

static ENVOY_EXPECTED_TIMEOUT: HeaderName = HeaderName::from_static("x-envoy-expected-rq-timeout-ms");

/// Fields that an attempt adds at most.
const OWN_FIELDS: usize = 8;

/// What is sent, and the gate of its body where the client waits for `100 Continue`.
pub struct Outgoing {
    /// The request.
    pub request: Request<RequestBody>,
    /// Opens the body's gate.
    pub gate: Option<Continue>,
}

/// The request of attempt `number` of the call on `lane`.
///
/// # Errors
/// [`Error::Internal`] when the body has gone with another attempt, or the policy's rewrite makes
/// something that is no path.
pub fn request(this: Try<'_>, lane: &Lane, number: u32, version: Version) -> Result<Outgoing, Error> {
    let Try { call, deadline, .. } = this;
    let (body, gate) = body(call)?;
    let has_unknown_length = http_body::Body::size_hint(&body).exact().is_none();
    let mut request = Request::new(body);
    *request.method_mut() = call.method.clone();
    *request.version_mut() = version;
    let is_http2 = version == Version::HTTP_2;

    let mut headers = HeaderMap::with_capacity(call.headers.len() + OWN_FIELDS);
    let host = host(call, lane, is_http2)?;
    let authority = match is_http2 {
        true => Some(host),
        false => {
            *request.extensions_mut() = call.spelling.clone();
            headers.insert(header::HOST, host);
            None
        }
    };
    let forwarded = Forwarded::of(&call.headers);
    for (name, value) in forwarded.iter() {
        if name != header::HOST && !(deadline.is_some() && is_deadline_field(name)) {
            headers.append(name, value.clone());
        }
    }
    if has_unknown_length && !is_http2 {
        headers.insert(header::TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
    }
    if !call.is_unaware {
        headers.append(header::VIA, this.proxy.identity().clone());
    }
    headers.insert(X_HEDGEROW_ATTEMPT.clone(), small_number(retry_mark::number(&call.headers, number)));
    if let Some(deadline) = deadline {
        tell_deadline(&mut headers, deadline, lane);
    }
    if let Some(upgrade) = &call.upgrade {
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(header::UPGRADE, upgrade.clone());
    } else if hop_by_hop::wants_trailers(&call.headers) {
        if !is_http2 {
            headers.insert(header::CONNECTION, HeaderValue::from_static("te"));
        }
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
    }
    if matches!(call.method, Method::OPTIONS | Method::TRACE) {
        count_down_forwards(&mut headers);
    }

    match lane.is_stand_in() {
        true => forget_conditions(&mut headers),
        false => make_conditional(&mut headers, this.validators),
    }

    let mut target = call.target.clone();
    if let Some(rules) = &lane.policy().rewrite {
        target = rewrite::target(rules, &target)?;
        rewrite::fields(rules, &mut headers);
    }
    *request.uri_mut() = match authority {
        None => Uri::from(target),
        Some(host) => absolute(lane.speech(call.scheme, call.needs).scheme(), &host, target)?,
    };
    *request.headers_mut() = headers;
    Ok(Outgoing { request, gate })
}

fn body(call: &Call) -> Result<(RequestBody, Option<Continue>), Error> {
    let body = match &call.body {
        CallBody::Empty => return Ok((RequestBody::empty(), None)),
        CallBody::Replay(replay) => RequestBody::replayed(replay.reader()),
        CallBody::Once(place) => match place.lock().take() {
            Some(body) => RequestBody::once(body),
            None => return Err(Error::Internal(Cause::from("the body has gone with another attempt"))),
        },
    };
    if expects_continue(&call.headers) {
        let (body, gate) = body.after_continue();
        return Ok((body, Some(gate)));
    }
    Ok((body, None))
}

/// What `Host` says, or `:authority`, which unlike it is never empty.
fn host(call: &Call, lane: &Lane, is_http2: bool) -> Result<HeaderValue, Error> {
    if call.is_unaware
        && !lane.is_elsewhere()
        && let Some(own) = call.headers.get(header::HOST)
        && !(is_http2 && own.is_empty())
    {
        return Ok(own.clone());
    }
    let scheme = lane.speech(call.scheme, call.needs).scheme();
    HeaderValue::from_str(lane.dialled().host_field(scheme.default_port()))
        .map_err(|error| Error::Internal(Cause::chain(&error)))
}

/// The parts that HTTP/2 sends as `:scheme`, `:authority` and `:path` (RFC 9113 section 8.3.1).
fn absolute(scheme: Scheme, host: &HeaderValue, target: PathAndQuery) -> Result<Uri, Error> {
    Uri::builder()
        .scheme(match scheme {
            Scheme::Http => "http",
            Scheme::Https => "https",
        })
        .authority(host.as_bytes())
        .path_and_query(target)
        .build()
        .map_err(|error| Error::Internal(Cause::chain(&error)))
}

fn is_deadline_field(name: &HeaderName) -> bool {
    *name == X_REQUEST_DEADLINE || *name == GRPC_TIMEOUT
}

fn tell_deadline(headers: &mut HeaderMap, deadline: &Deadline, lane: &Lane) {
    headers.insert(X_REQUEST_DEADLINE.clone(), deadline.told());
    if let Some(end) = deadline.grpc_end {
        let left = format_grpc_timeout(end.saturating_duration_since(Instant::now()));
        if let Ok(value) = HeaderValue::try_from(left) {
            headers.insert(GRPC_TIMEOUT.clone(), value);
        }
    }
    if lane.stages().deadline.as_ref().is_some_and(|policy| policy.tell_envoy) {
        let left = deadline.at.saturating_duration_since(Instant::now()).as_millis() as u64;
        headers.insert(ENVOY_EXPECTED_TIMEOUT.clone(), HeaderValue::from(left));
    }
}

/// Sets the cache's conditions in the place of the caller's, which the cache judges itself. `If-Range` stays:
/// it is about the part that is wanted if the answer is not what is kept.
fn make_conditional(headers: &mut HeaderMap, validators: &[(HeaderName, HeaderValue)]) {
    if !validators.is_empty() {
        headers.remove(header::IF_NONE_MATCH);
        headers.remove(header::IF_MODIFIED_SINCE);
        headers.extend(validators.iter().cloned());
    }
}

/// What the caller has is its own upstream's, and says nothing to another one. Nor can a part of another
/// one's answer complete it.
fn forget_conditions(headers: &mut HeaderMap) {
    for name in [header::IF_NONE_MATCH, header::IF_MODIFIED_SINCE] {
        headers.remove(name);
    }
    if headers.remove(header::IF_RANGE).is_some() {
        headers.remove(header::RANGE);
    }
}

/// RFC 9110 section 7.6.2; what arrives with 0 never comes this far.
fn count_down_forwards(headers: &mut HeaderMap) {
    let left = headers
        .get(header::MAX_FORWARDS)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| value.parse::<u64>().ok());
    if let Some(left) = left {
        headers.insert(header::MAX_FORWARDS, HeaderValue::from(left.saturating_sub(1)));
    }
}
