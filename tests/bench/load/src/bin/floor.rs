//! The floor: a forward proxy that does nothing but forward.
//!
//! hyper's server in front, hyper-util's pooled client behind, no policy, no log, no limits. What hedgerow costs
//! above it is what its guards cost; what it costs above nothing is what HTTP costs. Never to be used as a proxy:
//! it lets anybody reach anything and, in its TLS mode, believes any certificate, since it is only ever pointed
//! at a backend of the same benchmark.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Empty};
use hyper::body::{Bytes, Incoming};
use hyper::header::{CONNECTION, HeaderName, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode, Uri};
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls::ClientConfig;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio::net::{TcpListener, TcpStream};

const USAGE: &str = "usage: floor http|tls PORT THREADS | floor tcp PORT THREADS HOST:PORT";

type Body = BoxBody<Bytes, hyper::Error>;
type Forwarder = Client<HttpsConnector<HttpConnector>, Incoming>;

/// What is done with an accepted connection.
#[derive(Clone)]
enum Mode {
    /// Forwarded request by request, towards the upstream in clear or in TLS.
    Http { client: Forwarder, tls: bool },
    /// Copied byte by byte to one place.
    Tcp { to: SocketAddr },
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (mode, port, threads) = parse(&arguments).unwrap_or_else(|| {
        eprintln!("{USAGE}");
        std::process::exit(2);
    });
    let mut runtime = match threads {
        1 => tokio::runtime::Builder::new_current_thread(),
        _ => tokio::runtime::Builder::new_multi_thread(),
    };
    let runtime = runtime.worker_threads(threads).enable_all().build().expect("a runtime can be made");
    if let Err(error) = runtime.block_on(serve(mode, port)) {
        eprintln!("floor: port {port}: {error}");
        std::process::exit(1);
    }
}

fn parse(arguments: &[String]) -> Option<(Mode, u16, usize)> {
    let (mode, port, threads) =
        (arguments.first()?, arguments.get(1)?.parse().ok()?, arguments.get(2)?.parse().ok()?);
    let mode = match mode.as_str() {
        "http" => Mode::Http { client: client(), tls: false },
        "tls" => Mode::Http { client: client(), tls: true },
        "tcp" => Mode::Tcp { to: arguments.get(3)?.parse().ok()? },
        _ => return None,
    };
    (threads > 0).then_some((mode, port, threads))
}

async fn serve(mode: Mode, port: u16) -> std::io::Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await?;
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        tokio::spawn(handle(mode.clone(), stream));
    }
}

async fn handle(mode: Mode, mut stream: TcpStream) {
    match mode {
        Mode::Tcp { to } => {
            let Ok(mut upstream) = TcpStream::connect(to).await else { return };
            let _ = upstream.set_nodelay(true);
            let _ = tokio::io::copy_bidirectional(&mut stream, &mut upstream).await;
        }
        Mode::Http { client, tls } => {
            let service = service_fn(move |request| forward(client.clone(), tls, request));
            let connection = hyper::server::conn::http1::Builder::new()
                .timer(TokioTimer::new())
                .serve_connection(TokioIo::new(stream), service);
            let _ = connection.with_upgrades().await;
        }
    }
}

async fn forward(
    client: Forwarder,
    tls: bool,
    mut request: Request<Incoming>,
) -> Result<Response<Body>, hyper::Error> {
    if request.method() == Method::CONNECT {
        return Ok(tunnel(request).await);
    }
    if tls && upgrade_scheme(&mut request).is_none() {
        return Ok(empty(StatusCode::BAD_REQUEST));
    }
    request.headers_mut().remove(CONNECTION);
    request.headers_mut().remove("proxy-connection");
    Ok(match client.request(request).await {
        Ok(mut response) => {
            response.headers_mut().remove(CONNECTION);
            response
                .headers_mut()
                .insert(HeaderName::from_static("via"), HeaderValue::from_static("1.1 floor"));
            response.map(BodyExt::boxed)
        }
        Err(_) => empty(StatusCode::BAD_GATEWAY),
    })
}

/// `http://a/b`, or `/b` with `Host: a`, becomes `https://a/b`.
fn upgrade_scheme(request: &mut Request<Incoming>) -> Option<()> {
    let host = request.headers().get("host").and_then(|host| host.to_str().ok());
    let authority = request.uri().authority().map(|authority| authority.as_str()).or(host)?;
    let path = request.uri().path_and_query()?.clone();
    *request.uri_mut() =
        Uri::builder().scheme("https").authority(authority).path_and_query(path).build().ok()?;
    Some(())
}

async fn tunnel(request: Request<Incoming>) -> Response<Body> {
    let Some(authority) = request.uri().authority().cloned() else { return empty(StatusCode::BAD_REQUEST) };
    let Ok(mut upstream) = TcpStream::connect(authority.as_str()).await else {
        return empty(StatusCode::BAD_GATEWAY);
    };
    let _ = upstream.set_nodelay(true);
    tokio::spawn(async move {
        let Ok(upgraded) = hyper::upgrade::on(request).await else { return };
        let _ = tokio::io::copy_bidirectional(&mut TokioIo::new(upgraded), &mut upstream).await;
    });
    empty(StatusCode::OK)
}

fn empty(status: StatusCode) -> Response<Body> {
    let mut response = Response::new(Empty::new().map_err(|never| match never {}).boxed());
    *response.status_mut() = status;
    response
}

fn client() -> Forwarder {
    let mut tcp = HttpConnector::new();
    tcp.set_nodelay(true);
    tcp.enforce_http(false);
    let provider = Arc::new(ring::default_provider());
    let config = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .expect("ring speaks TLS 1.2 and 1.3")
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Credulous(provider)))
        .with_no_client_auth();
    let connector = hyper_rustls::HttpsConnectorBuilder::new()
        .with_tls_config(config)
        .https_or_http()
        .enable_http1()
        .wrap_connector(tcp);
    Client::builder(TokioExecutor::new()).pool_timer(TokioTimer::new()).build(connector)
}

/// Believes any certificate; see the head of this file.
#[derive(Debug)]
struct Credulous(Arc<CryptoProvider>);

impl ServerCertVerifier for Credulous {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &rustls::DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls12_signature(
            message,
            cert,
            signature,
            &self.0.signature_verification_algorithms,
        )
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &rustls::DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls13_signature(
            message,
            cert,
            signature,
            &self.0.signature_verification_algorithms,
        )
    }

    fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
