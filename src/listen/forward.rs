//! One request: what any proxy must look at before it goes on its way, and the way it goes.

use std::sync::Arc;

use http::header::{self, HeaderValue};
use http::{Method, Request, Response, Version};
use http_body::Body;
use hyper::body::Incoming;
use hyper::ext::ReasonPhrase;
use tokio::time::Instant;

use super::connect;
use super::connection::{Inbound, Takeover};
use crate::call::{InterimSink, RequestId, has_body};
use crate::config::Config;
use crate::error::Error;
use crate::pipeline::answer::{self, Answer, AnswerBody};
use crate::pipeline::ledger::Ledger;
use crate::pipeline::{Arrived, Intake, journey};
use crate::policy::deadline::Arrival;
use crate::respond::error::ends_connection;
use crate::wire::authority::Authority;
use crate::wire::target::{self, Scheme};
use crate::wire::{framing, grpc};

/// Answers one request of a connection.
pub async fn answer(inbound: &Arc<Inbound>, request: Request<Incoming>) -> Response<AnswerBody> {
    let arrival = Arrival::now();
    let config = inbound.proxy.snapshot();
    let id = RequestId::of(request.headers());
    let mut ledger = Ledger::open(&inbound.proxy, arrival, id, Some(request.method().clone()));
    if grpc::is_call(request.method(), request.headers()) {
        ledger.speaks_grpc();
    }
    let version = request.version();
    let is_connect = request.method() == Method::CONNECT;

    let arrived = match check(inbound, &config, &request) {
        Err(error) => Arrived::Answer(answer::refuse(error, ledger, None)),
        Ok(Checked::Own(status)) => Arrived::Answer(own(&request, status, ledger)),
        Ok(Checked::Tunnel(authority)) => {
            let opening = connect::open(inbound, config, request.headers(), authority, arrival, ledger);
            match Box::pin(opening).await {
                Ok(opened) => {
                    *inbound.takeover.lock() = Some(Takeover::Tunnel(Box::new(opened)));
                    return Response::new(AnswerBody::empty());
                }
                Err(refused) => Arrived::Answer(refused),
            }
        }
        Ok(Checked::Forward(authority, scheme)) => {
            let (head, body) = request.into_parts();
            let interim =
                (version == Version::HTTP_11).then(|| inbound.shared.clone() as Arc<dyn InterimSink>);
            let intake = Intake {
                head,
                body,
                authority,
                scheme,
                is_for_server: inbound.shared.take_is_for_server(),
                is_tunnelled: inbound.tunnel.is_some(),
                config,
                arrival,
                interim,
            };
            journey(&inbound.proxy, intake, ledger).await
        }
    };
    match arrived {
        Arrived::Answer(answer) => finish(inbound, answer, version, is_connect),
        Arrived::Upgraded(mut upgraded) => {
            let response = std::mem::replace(&mut upgraded.response, Response::new(AnswerBody::empty()));
            *inbound.takeover.lock() = Some(Takeover::Upgraded(upgraded));
            response
        }
    }
}

enum Checked {
    /// To an upstream.
    Forward(String, Scheme),
    /// A CONNECT.
    Tunnel(Authority),
    /// The proxy itself is asked (RFC 9110 section 7.6.2).
    Own(http::StatusCode),
}

fn check(inbound: &Inbound, config: &Config, request: &Request<Incoming>) -> Result<Checked, Error> {
    let headers = request.headers();
    framing::check_request(headers).map_err(Error::InvalidRequest)?;
    let length = request.uri().path_and_query().map_or(0, |path| path.as_str().len());
    if length > config.limits.target {
        return Err(Error::UriTooLong);
    }
    if inbound.proxy.has_passed(headers) {
        return Err(Error::Loop);
    }
    let dialer = inbound.proxy.registry().dialer();
    if request.method() == Method::CONNECT {
        let authority = target::read_connect(request.uri()).map_err(Error::InvalidRequest)?;
        // To the client they are the tunnel's first bytes, to the library a body (RFC 9110 section 9.3.6).
        if has_body(headers) {
            return Err(Error::InvalidRequest("a CONNECT has no content"));
        }
        if inbound.tunnel.is_some() {
            return Err(Error::Misdirected);
        }
        return match dialer.is_own_authority(&authority) {
            true => Err(Error::NotFound),
            false => Ok(Checked::Tunnel(authority)),
        };
    }
    let target = target::read(request.uri(), headers, request.version()).map_err(Error::InvalidRequest)?;
    if is_last_hop(request) {
        return Ok(Checked::Own(http::StatusCode::OK));
    }
    if let Some(tunnel) = &inbound.tunnel {
        // The tunnel's name is what was checked and what is dialled, whatever `Host` says.
        return Ok(Checked::Forward(tunnel.key().to_owned(), Scheme::Http));
    }
    if dialer.is_named_own(target.authority, target.scheme.default_port()) {
        return Err(Error::NotFound);
    }
    Ok(Checked::Forward(target.authority.to_owned(), target.scheme))
}

/// OPTIONS and TRACE with `Max-Forwards: 0` end here.
fn is_last_hop(request: &Request<Incoming>) -> bool {
    matches!(*request.method(), Method::OPTIONS | Method::TRACE)
        && request.headers().get(header::MAX_FORWARDS).is_some_and(|left| left == "0")
}

fn own(request: &Request<Incoming>, status: http::StatusCode, mut ledger: Ledger) -> Answer {
    ledger.answers(status, None, Instant::now());
    ledger.complete();
    let mut response = Response::new(AnswerBody::empty());
    *response.status_mut() = status;
    response.headers_mut().insert(header::VIA, crate::respond::headers::VIA);
    if request.method() == Method::OPTIONS {
        let methods = HeaderValue::from_static("GET, HEAD, POST, PUT, DELETE, PATCH, OPTIONS, CONNECT");
        response.headers_mut().insert(header::ALLOW, methods);
    }
    Answer::own(response, None)
}

/// The last touches that depend on the connection.
fn finish(inbound: &Inbound, answer: Answer, version: Version, is_connect: bool) -> Response<AnswerBody> {
    let Answer { mut response, end, stall, refusal } = answer;
    inbound.shared.bound(end, stall);
    if let Some(refusal) = refusal.filter(|_| is_connect) {
        // The one part of a refused CONNECT that every client shows its user.
        response.extensions_mut().insert(ReasonPhrase::from_static(refusal.word.as_bytes()));
    }
    let is_broken = refusal.is_some_and(|refusal| ends_connection(refusal.status));
    if is_connect || is_broken || inbound.proxy.is_draining() {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    let is_close_delimited = version == Version::HTTP_10 && response.body().size_hint().exact().is_none();
    inbound.shared.set_close_delimited(is_close_delimited);
    response
}
