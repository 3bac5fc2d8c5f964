//! The webhook's certificate, from two files that are followed.
//!
//! A Secret's volume changes by a swap of links, a person writes one file after the other; either way the two may
//! not belong together for a moment. So a pair that cannot be used changes nothing, and is told of only when it is the
//! same one second later. The files are compared each second: they are small, and a watch that can go deaf
//! would have to be compared anyway.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use rustls::crypto::ring::sign::any_supported_type;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::{Error as TlsError, InconsistentKeys};
use tokio::task::spawn_blocking;
use tokio::time::{MissedTickBehavior, interval};
use x509_parser::prelude::{FromDer, X509Certificate};

use super::metrics::{Metrics, Renewal};

/// How often the files are compared.
const EVERY: Duration = Duration::from_secs(1);
/// More is no certificate.
const LARGEST: u64 = 1 << 20;

/// What is served, and where it comes from. Its `Debug` shows no key.
pub(super) struct Certificate {
    files: Arc<Files>,
    /// What the files held at the start.
    first: Contents,
    current: ArcSwap<Served>,
}

#[derive(Debug)]
struct Files {
    cert: PathBuf,
    key: PathBuf,
}

/// A usable pair.
struct Served {
    key: Arc<CertifiedKey>,
    /// The end of its life, in seconds since 1970.
    expires: i64,
}

/// What the files hold.
type Contents = (Vec<u8>, Vec<u8>);

impl Certificate {
    /// Reads the files. Blocks on them.
    ///
    /// # Errors
    /// They cannot be used, and why.
    pub(super) fn load(cert: PathBuf, key: PathBuf) -> Result<Self, String> {
        let files = Files { cert, key };
        let first = files.read()?;
        let current = ArcSwap::from_pointee(files.parse(&first)?);
        Ok(Self { files: Arc::new(files), first, current })
    }

    /// When the certificate ends, in seconds since 1970.
    pub(super) fn expires(&self) -> i64 {
        self.current.load().expires
    }

    /// Takes over what the files say next, for as long as it is polled.
    pub(super) async fn follow(&self, metrics: &Metrics) {
        // What was looked at last, and whether that was told of.
        let (mut seen, mut is_told) = (Ok(self.first.clone()), true);
        let mut ticks = interval(EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let files = self.files.clone();
            let Ok(contents) = spawn_blocking(move || files.read()).await else { continue };
            let is_same = seen == contents;
            if is_same && is_told {
                continue;
            }
            match contents.as_ref().map_err(Clone::clone).and_then(|contents| self.files.parse(contents)) {
                Ok(served) => {
                    is_told = true;
                    self.current.store(Arc::new(served));
                    metrics.renewal(Renewal::Applied);
                    tracing::info!("the webhook serves a new certificate");
                }
                Err(reason) => {
                    is_told = is_same;
                    if is_told {
                        metrics.renewal(Renewal::Rejected);
                        tracing::error!(
                            reason,
                            "the new certificate cannot be used: the old one is served on"
                        );
                    }
                }
            }
            seen = contents;
        }
    }
}

impl fmt::Debug for Certificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Certificate").field("files", &self.files).finish_non_exhaustive()
    }
}

impl ResolvesServerCert for Certificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.current.load().key.clone())
    }
}

impl Files {
    fn read(&self) -> Result<Contents, String> {
        Ok((read(&self.cert)?, read(&self.key)?))
    }

    fn parse(&self, (cert, key): &Contents) -> Result<Served, String> {
        let (cert_file, key_file) = (self.cert.display(), self.key.display());
        let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(cert).collect();
        let chain = chain.map_err(|error| format!("{cert_file}: {error}"))?;
        let Some(own) = chain.first() else {
            return Err(format!("{cert_file}: expected a certificate in PEM, found none"));
        };
        let (_, own) = X509Certificate::from_der(own)
            .map_err(|error| format!("{cert_file}: the first certificate cannot be read: {error}"))?;
        let expires = own.validity().not_after.timestamp();
        let key = PrivateKeyDer::from_pem_slice(key)
            .map_err(|error| format!("{key_file}: expected a private key in PEM: {error}"))?;
        let signer = any_supported_type(&key).map_err(|error| format!("{key_file}: {error}"))?;
        let key = CertifiedKey::new(chain.clone(), signer);
        match key.keys_match() {
            Err(TlsError::InconsistentKeys(InconsistentKeys::KeyMismatch)) => {
                Err(format!("{key_file} is not the key of the first certificate in {cert_file}"))
            }
            _ => Ok(Served { key: Arc::new(key), expires }),
        }
    }
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    let mut contents = Vec::new();
    let file = File::open(path).and_then(|file| file.take(LARGEST + 1).read_to_end(&mut contents));
    match file {
        Err(error) => Err(format!("{}: {error}", path.display())),
        Ok(length) if length as u64 > LARGEST => Err(format!("{}: larger than 1 MiB", path.display())),
        Ok(_) => Ok(contents),
    }
}
