//! The mutating admission webhook: each pod that a cluster makes is shown here, and gets its sidecar.
//!
//! What becomes of a pod is decided by [`crate::kube::inject::review`]; here is the server around it. It keeps nothing, asks the
//! API server nothing and needs no right in the cluster: all that it knows is in the review. So any number of
//! replicas may run, and each answers alike.
//!
//! A webhook that is not there costs pods their sidecars, or where the configuration says `failurePolicy: Fail` their
//! existence. So it serves on for a while after SIGTERM, until no API server knows the way to it any more, and a
//! certificate is taken from its files again whenever these change.

mod admin;
mod certificate;
pub mod install;
mod metrics;
mod server;

use std::future::pending;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use clap::Args;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{sleep, timeout};

use crate::kube::inject::Settings;
use certificate::Certificate;
use metrics::Metrics;
use server::Server;

/// For how long it is still served after SIGTERM: a Service's way here is taken back meanwhile.
const LINGER: Duration = Duration::from_secs(5);
/// For what is under way then.
const FAREWELL: Duration = Duration::from_secs(5);

/// What `hedgerow webhook` is told.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Where the API server asks, over TLS; the path is /inject.
    #[arg(long, env = "HEDGEROW_WEBHOOK_LISTEN", value_name = "ADDRESS", default_value = "0.0.0.0:9443")]
    listen: SocketAddr,
    /// The certificate with its chain, PEM; followed while running.
    #[arg(long, env = "HEDGEROW_WEBHOOK_TLS_CERT", value_name = "FILE")]
    tls_cert: PathBuf,
    /// Its private key, PEM.
    #[arg(long, env = "HEDGEROW_WEBHOOK_TLS_KEY", value_name = "FILE")]
    tls_key: PathBuf,
    /// Where /livez, /readyz and /metrics are.
    #[arg(long, env = "HEDGEROW_WEBHOOK_ADMIN", value_name = "ADDRESS", default_value = "127.0.0.1:15302")]
    admin: SocketAddr,
    #[command(flatten)]
    settings: Settings,
}

/// What the parts share.
struct Shared {
    settings: Settings,
    certificate: Arc<Certificate>,
    metrics: Metrics,
    is_leaving: AtomicBool,
}

/// Serves until SIGTERM or SIGINT, and for a few seconds more.
///
/// # Errors
/// The certificate cannot be used, or an address not be bound. The text says which.
pub async fn run(arguments: Arguments) -> Result<(), String> {
    let Arguments { listen, tls_cert, tls_key, admin, settings } = arguments;
    let metrics = Metrics::new();
    let certificate = Certificate::load(tls_cert, tls_key).map(Arc::new)?;
    let bind = async |address: SocketAddr| {
        TcpListener::bind(address).await.map_err(|error| format!("cannot listen on {address}: {error}"))
    };
    let (reviews, health) = (bind(listen).await?, bind(admin).await?);
    let (mut terminate, mut interrupt) =
        signals().map_err(|error| format!("cannot follow signals: {error}"))?;

    let shared = Arc::new(Shared { settings, certificate, metrics, is_leaving: AtomicBool::new(false) });
    let server = Server::new(shared.clone());
    let told = |listener: &TcpListener, address| listener.local_addr().unwrap_or(address);
    tracing::info!(reviews = %told(&reviews, listen), admin = %told(&health, admin), "the webhook is ready");
    let work = async {
        tokio::join!(
            server.accept(reviews),
            admin::run(health, shared.clone()),
            shared.certificate.follow(&shared.metrics)
        );
    };
    let leave = async {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => return,
        }
        shared.is_leaving.store(true, Ordering::Relaxed);
        tracing::info!(?LINGER, "the webhook leaves");
        tokio::select! {
            () = sleep(LINGER) => {}
            _ = interrupt.recv() => {}
        }
    };
    tokio::select! {
        () = work => pending().await,
        () = leave => {}
    }
    // Whoever came in time is answered.
    if timeout(FAREWELL, server.finish()).await.is_err() {
        tracing::warn!("reviews are cut off that have not come to an end");
    }
    Ok(())
}

fn signals() -> io::Result<(tokio::signal::unix::Signal, tokio::signal::unix::Signal)> {
    Ok((signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?))
}
