//! One request: what any proxy must look at before it goes on its way, and the way it goes.

use std::sync::Arc;

use http::header::{self, HeaderValue};
use http::{Method, Request, Response, request};
use tokio::time::Instant;

use super::connect::{self, Asked};
use super::connection::{Inbound, Reply, Takeover, Way};
use crate::call::{InterimSink, RequestId, has_body};
use crate::config::Config;
use crate::error::Error;
use crate::fanout;
use crate::pipeline::answer::{self, Answer, AnswerBody};
use crate::pipeline::found::Note;
use crate::pipeline::ledger::Ledger;
use crate::pipeline::{Arrived, Intake, journey};
use crate::policy::deadline::Arrival;
use crate::wire::authority::Authority;
use crate::wire::incoming::IncomingBody;
use crate::wire::target::{self, Scheme};
use crate::wire::{framing, grpc};

/// Answers one request of a connection. Dropping the future cancels all that the request alone was
/// waiting for.
pub async fn answer(
    inbound: &Inbound,
    request: Request<IncomingBody>,
    interim: Option<Arc<dyn InterimSink>>,
    is_for_server: bool,
) -> Reply {
    let arrival = Arrival::now();
    let config = inbound.proxy.snapshot();
    let id = RequestId::of(request.headers());
    let mut ledger = Ledger::open(&inbound.proxy, arrival, id, Some(request.method().clone()));
    if grpc::is_call(request.method(), request.headers()) {
        ledger.speaks_grpc();
    }

    let (authority, scheme) = match check(inbound, &config, &request) {
        Ok(Checked::Forward(authority, scheme)) => (authority, scheme),
        Ok(Checked::Tunnel(authority)) => {
            let asked = Asked { headers: request.headers(), authority, pinned: None, arrival };
            return match Box::pin(connect::open(&inbound.proxy, config, asked, ledger)).await {
                Ok(next) => Reply::Takeover(Response::new(AnswerBody::empty()), next),
                Err(refused) => Reply::Answer(refused),
            };
        }
        Ok(Checked::FanOut) => {
            let answered = fanout::answer(&inbound.proxy, config, request, arrival, ledger);
            return Reply::Answer(Box::pin(answered).await);
        }
        Ok(Checked::Own) => return Reply::Answer(own(&request, ledger)),
        Err(error) => return Reply::Answer(answer::refuse(error, ledger, None)),
    };
    let (mut head, body) = request.into_parts();
    if inbound.way.is_unaware() {
        name_target(&mut head);
    }
    let intake = Intake {
        head,
        body,
        authority,
        scheme,
        is_for_server,
        is_unaware: inbound.way.is_unaware(),
        pinned: inbound.way.pinned(),
        config,
        arrival,
        within: None,
        interim,
    };
    match journey(&inbound.proxy, intake, ledger).await {
        Arrived::Answer(answer) => Reply::Answer(answer),
        Arrived::Upgraded(mut upgraded) => {
            let response = std::mem::replace(&mut upgraded.response, Response::new(AnswerBody::empty()));
            Reply::Takeover(response, Takeover::Upgraded(upgraded))
        }
    }
}

/// Absolute-form wins over `Host`, and what was checked is what is sent (RFC 9112 section 3.2.2). Where the
/// client knows of no proxy the field goes on as it came, so this is the place.
fn name_target(head: &mut request::Parts) {
    let Some(named) = head.uri.authority().map(http::uri::Authority::as_str) else { return };
    if head.headers.get(header::HOST).is_none_or(|host| host != named)
        && let Ok(host) = HeaderValue::from_str(named)
    {
        head.headers.insert(header::HOST, host);
    }
}

enum Checked {
    /// To an upstream.
    Forward(String, Scheme),
    /// A CONNECT.
    Tunnel(Authority),
    /// An endpoint of the proxy's own.
    FanOut,
    /// The proxy itself is asked (RFC 9110 section 7.6.2).
    Own,
}

fn check(inbound: &Inbound, config: &Config, request: &Request<IncomingBody>) -> Result<Checked, Error> {
    let headers = request.headers();
    // HTTP/1 has been held to it by its library.
    if headers.len() > config.limits.fields {
        return Err(Error::HeadersTooLarge);
    }
    framing::check_request(headers).map_err(Error::InvalidRequest)?;
    let length = request.uri().path_and_query().map_or(0, |path| path.as_str().len());
    if length > config.limits.target {
        return Err(Error::UriTooLong);
    }
    if inbound.proxy.has_passed(headers) {
        return Err(Error::Loop);
    }
    if request.method() == Method::CONNECT {
        return check_connect(inbound, request).map(Checked::Tunnel);
    }
    let target = target::read(request.uri(), headers, request.version(), inbound.way.leads_to())
        .map_err(Error::InvalidRequest)?;
    if is_last_hop(request) {
        return Ok(Checked::Own);
    }
    match &inbound.way {
        Way::Proxy => {
            let dialer = inbound.proxy.registry().dialer();
            if dialer.is_named_own(target.authority, target.scheme.default_port()) {
                return match fanout::serves(request.uri().path()) {
                    true => Ok(Checked::FanOut),
                    false => Err(Error::NotFound),
                };
            }
            Ok(Checked::Forward(target.authority.to_owned(), target.scheme))
        }
        // The tunnel's name is what was checked and what is dialled, whatever `Host` says. Under an allow-list
        // it must not say anything else: it would reach other hosts behind the same front, as in TLS.
        Way::Tunnel(authority) => {
            if !authority.is_named_by(target.authority, 80) {
                let named = Authority::parse(target.authority, Some(80)).map_err(Error::InvalidRequest)?;
                let is_bound = config.egress.deny_by_default && authority.ip().is_none();
                if is_bound && named.host() != authority.host() {
                    return Err(Error::Misdirected);
                }
            }
            Ok(Checked::Forward(authority.key().to_owned(), Scheme::Http))
        }
        // In TLS, other names would reach other hosts behind the same front (RFC 9110 section 7.4).
        Way::Intercepted { authority, .. } => match authority.is_named_by(target.authority, 443) {
            true => Ok(Checked::Forward(authority.key().to_owned(), Scheme::Https)),
            // What is no host at all is not another one.
            false => Authority::parse(target.authority, Some(443))
                .map_err(Error::InvalidRequest)
                .and(Err(Error::Misdirected)),
        },
        // The name selects the policy; the address says where, port included.
        Way::Redirected(to) => {
            let named = Authority::parse(target.authority, Some(80)).map_err(Error::InvalidRequest)?;
            Ok(Checked::Forward(named.at_port(to.port()).key().to_owned(), Scheme::Http))
        }
    }
}

fn check_connect(inbound: &Inbound, request: &Request<IncomingBody>) -> Result<Authority, Error> {
    let authority = target::read_connect(request.uri()).map_err(Error::InvalidRequest)?;
    // To the client they are the tunnel's first bytes, to the library a body (RFC 9110 section 9.3.6).
    if has_body(request.headers()) {
        return Err(Error::InvalidRequest("a CONNECT has no content"));
    }
    if inbound.way.is_unaware() {
        return Err(Error::Misdirected);
    }
    match inbound.proxy.registry().dialer().is_own_authority(&authority) {
        true => Err(Error::NotFound),
        false => Ok(authority),
    }
}

/// OPTIONS and TRACE with `Max-Forwards: 0` end here.
fn is_last_hop(request: &Request<IncomingBody>) -> bool {
    matches!(*request.method(), Method::OPTIONS | Method::TRACE)
        && request.headers().get(header::MAX_FORWARDS).is_some_and(|left| left == "0")
}

fn own(request: &Request<IncomingBody>, mut ledger: Ledger) -> Answer {
    let mut response = Response::new(AnswerBody::empty());
    ledger.answers(response.status(), None, Note::default(), Instant::now());
    ledger.complete();
    response.headers_mut().insert(header::VIA, crate::respond::headers::VIA);
    if request.method() == Method::OPTIONS {
        let methods = HeaderValue::from_static("GET, HEAD, POST, PUT, DELETE, PATCH, OPTIONS, CONNECT");
        response.headers_mut().insert(header::ALLOW, methods);
    }
    Answer::own(response, None)
}
