//! The fixed upstream: one answer of 1 KiB to everything, as fast as hyper gives it.

use std::convert::Infallible;
use std::net::Ipv4Addr;

use http_body_util::Full;
use hyper::Response;
use hyper::body::Bytes;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;

static ANSWER: [u8; 1024] = [b'x'; 1024];

#[tokio::main(flavor = "current_thread")]
async fn main() -> std::io::Result<()> {
    let port = std::env::args().nth(1).and_then(|port| port.parse().ok()).unwrap_or_else(|| {
        eprintln!("usage: upstream PORT");
        std::process::exit(2);
    });
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await?;
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        let service =
            service_fn(async |_| Ok::<_, Infallible>(Response::new(Full::new(Bytes::from_static(&ANSWER)))));
        let connection = hyper::server::conn::http1::Builder::new()
            .timer(TokioTimer::new())
            .serve_connection(TokioIo::new(stream), service);
        tokio::spawn(connection);
    }
}
