//! The webhook's own health and numbers, in clear text: a kubelet and a Prometheus come for them.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use http::header::{self, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::time::{interval, sleep};

use super::Shared;

const CONNECTIONS: usize = 64;
const HEADER_TIMEOUT: Duration = Duration::from_secs(5);
const UPKEEP: Duration = Duration::from_secs(5);

/// Serves until the future is dropped.
pub(super) async fn run(listener: TcpListener, shared: Arc<Shared>) {
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    let mut upkeep = interval(UPKEEP);
    loop {
        let accepted = tokio::select! {
            accepted = accept(&listener, &places) => accepted,
            _ = upkeep.tick() => {
                shared.metrics.upkeep();
                continue;
            }
        };
        let Some((place, stream)) = accepted else { continue };
        let shared = shared.clone();
        tokio::spawn(async move {
            let _place = place;
            let service = service_fn(move |request| {
                let response = answer(&shared, &request);
                async move { Ok::<_, Infallible>(response) }
            });
            let served = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEADER_TIMEOUT)
                .serve_connection(TokioIo::new(stream), service)
                .await;
            if let Err(error) = served {
                tracing::debug!(%error, "admin connection ended early");
            }
        });
    }
}

async fn accept(
    listener: &TcpListener,
    places: &Arc<Semaphore>,
) -> Option<(tokio::sync::OwnedSemaphorePermit, tokio::net::TcpStream)> {
    let place = places.clone().acquire_owned().await.ok()?;
    match listener.accept().await {
        Ok((stream, _)) => Some((place, stream)),
        Err(_) => {
            sleep(Duration::from_millis(100)).await;
            None
        }
    }
}

fn answer(shared: &Shared, request: &Request<Incoming>) -> Response<Full<Bytes>> {
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        let mut response = text(StatusCode::METHOD_NOT_ALLOWED, "GET, HEAD\n".into());
        response.headers_mut().insert(header::ALLOW, HeaderValue::from_static("GET, HEAD"));
        return response;
    }
    match request.uri().path() {
        "/livez" => text(StatusCode::OK, "ok\n".into()),
        "/readyz" if shared.is_leaving.load(Ordering::Relaxed) => {
            text(StatusCode::SERVICE_UNAVAILABLE, "leaving\n".into())
        }
        "/readyz" => text(StatusCode::OK, "ok\n".into()),
        "/metrics" => {
            let mut response = text(StatusCode::OK, shared.metrics.render(shared.certificate.expires()));
            let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
            response.headers_mut().insert(header::CONTENT_TYPE, kind);
            response
        }
        _ => text(StatusCode::NOT_FOUND, "no such page: /livez /readyz /metrics\n".into()),
    }
}

fn text(status: StatusCode, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    let kind = HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}
