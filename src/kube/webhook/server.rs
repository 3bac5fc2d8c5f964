//! The reviews' own port: TLS, HTTP/1.1, one path.
//!
//! Everything has a bound: connections at once, the time for a handshake, for a head and for a body, and a body's
//! size. What breaks one ends a connection or is told with a status and a message, and concerns nobody else.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls::ServerConfig;
use serde_json::json;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::TlsAcceptor;

use super::Shared;
use super::metrics::Outcome;
use crate::kube::inject::Verdict;
use crate::kube::inject::review::{Reviewed, review};

/// Connections at once; an API server keeps a few.
const CONNECTIONS: usize = 512;
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// For a head to arrive; an API server leaves a connection idle for longer and makes another one then.
const HEADER_TIMEOUT: Duration = Duration::from_secs(120);
/// For a body: an API server waits ten seconds for all of it by default.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);
/// The largest body, in bytes. An API server takes objects of up to 3 MiB, and adds a head of its own.
const LARGEST: usize = 4 << 20;

/// Where pods are reviewed.
const PATH: &str = "/inject";

/// Accepts connections and answers what comes over them.
pub(super) struct Server {
    shared: Arc<Shared>,
    tls: TlsAcceptor,
    places: Arc<Semaphore>,
    /// Closed when connections are to end with what is under way.
    finish: watch::Sender<()>,
}

impl Server {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        let mut tls =
            ServerConfig::builder().with_no_client_auth().with_cert_resolver(shared.certificate.clone());
        tls.alpn_protocols = vec![b"http/1.1".to_vec()];
        Self {
            shared,
            tls: TlsAcceptor::from(Arc::new(tls)),
            places: Arc::new(Semaphore::new(CONNECTIONS)),
            finish: watch::Sender::new(()),
        }
    }

    /// Accepts until the future is dropped.
    pub(super) async fn accept(&self, listener: TcpListener) {
        loop {
            let Ok(place) = self.places.clone().acquire_owned().await else { return };
            let stream = match listener.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept connections; trying again");
                    sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            let connection = serve(stream, self.tls.clone(), self.shared.clone(), self.finish.subscribe());
            tokio::spawn(async move {
                let _place = place;
                if let Err(error) = connection.await {
                    tracing::debug!(%error, "connection ended early");
                }
            });
        }
    }

    /// Has connections end with what is under way, and waits until they have.
    pub(super) async fn finish(self) {
        drop(self.finish);
        let _ = self.places.acquire_many(CONNECTIONS as u32).await;
    }
}

async fn serve(
    stream: TcpStream,
    tls: TlsAcceptor,
    shared: Arc<Shared>,
    mut finish: watch::Receiver<()>,
) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let stream = timeout(HANDSHAKE_TIMEOUT, tls.accept(stream)).await??;
    let service = service_fn(move |request| {
        let shared = shared.clone();
        async move { Ok::<_, Infallible>(answer(&shared, request).await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    let served = tokio::select! {
        served = &mut connection => served,
        _ = finish.changed() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    served.map_err(io::Error::other)
}

/// Why a request is not answered with a review.
struct Refusal(StatusCode, String);

async fn answer(shared: &Shared, request: Request<Incoming>) -> Response<Full<Bytes>> {
    let reviewed = async {
        check(&request)?;
        let body = body(request.into_body()).await?;
        let began = Instant::now();
        let reviewed = review(&body, &shared.settings)
            .map_err(|error| Refusal(StatusCode::BAD_REQUEST, error.to_string()))?;
        let outcome = match &reviewed.verdict {
            Verdict::Injected { .. } => Outcome::Injected,
            Verdict::Skipped(_) => Outcome::Skipped,
            Verdict::Denied(_) => Outcome::Denied,
        };
        shared.metrics.review(outcome, began.elapsed());
        log(&reviewed, outcome);
        Ok(reviewed.response)
    };
    let (status, body) = match reviewed.await {
        Ok(response) => (StatusCode::OK, response),
        Err(Refusal(status, message)) => {
            shared.metrics.review(Outcome::Invalid, Duration::ZERO);
            tracing::warn!(status = status.as_u16(), message, "a request is not answered with a review");
            (status, json!({ "message": message }))
        }
    };
    let mut response = Response::new(Full::new(Bytes::from(body.to_string())));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    if status == StatusCode::METHOD_NOT_ALLOWED {
        headers.insert(header::ALLOW, HeaderValue::from_static("POST"));
    }
    response
}

/// What can be told before the body has come.
fn check(request: &Request<Incoming>) -> Result<(), Refusal> {
    let refuse = |status, message: String| Err(Refusal(status, message));
    let path = request.uri().path();
    if path != PATH {
        return refuse(StatusCode::NOT_FOUND, format!("there is nothing at {path}; reviews go to {PATH}"));
    }
    if request.method() != Method::POST {
        return refuse(StatusCode::METHOD_NOT_ALLOWED, format!("expected POST; found {}", request.method()));
    }
    if !is_json(request.headers()) {
        let message = "expected a body of the type application/json".to_owned();
        return refuse(StatusCode::UNSUPPORTED_MEDIA_TYPE, message);
    }
    Ok(())
}

fn is_json(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let kind = kind.and_then(|kind| kind.split(';').next()).map(str::trim);
    kind.is_some_and(|kind| kind.eq_ignore_ascii_case("application/json"))
}

async fn body(body: Incoming) -> Result<Bytes, Refusal> {
    match timeout(BODY_TIMEOUT, Limited::new(body, LARGEST).collect()).await {
        Err(_) => {
            let message = format!("the body has not come within {BODY_TIMEOUT:?}");
            Err(Refusal(StatusCode::REQUEST_TIMEOUT, message))
        }
        Ok(Err(error)) if error.is::<LengthLimitError>() => {
            let message = format!("the body is larger than {} MiB", LARGEST >> 20);
            Err(Refusal(StatusCode::PAYLOAD_TOO_LARGE, message))
        }
        Ok(Err(error)) => Err(Refusal(StatusCode::BAD_REQUEST, format!("the body broke off: {error}"))),
        Ok(Ok(body)) => Ok(body.to_bytes()),
    }
}

fn log(reviewed: &Reviewed, outcome: Outcome) {
    let Reviewed { pod, verdict, .. } = reviewed;
    let verdict_word = outcome.word();
    match verdict {
        Verdict::Injected { warnings, .. } => {
            tracing::info!(pod, verdict = verdict_word, ?warnings, "pod reviewed");
        }
        Verdict::Skipped(reason) => tracing::info!(pod, verdict = verdict_word, %reason, "pod reviewed"),
        Verdict::Denied(reason) => tracing::warn!(pod, verdict = verdict_word, reason, "pod reviewed"),
    }
}
