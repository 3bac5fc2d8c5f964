//! What ends the TLS of clients: the minted leaves, and for which hosts there are none for a while.
//!
//! Some clients trust compiled-in roots alone, or one certificate alone. They say so with an alert, and
//! then their host is tunnelled untouched for ten minutes, since a call without a policy is better than
//! none. For good they are exempted in the policy.

use std::sync::Arc;
use std::time::Duration;

use moka::sync::Cache;
use rustls::{AlertDescription, ServerConfig};

use super::leaf::Leaves;
use crate::error::Error;

/// How long a host is left alone after a client of it has declined our certificate.
const STEP_DOWN: Duration = Duration::from_secs(10 * 60);
/// Hosts that are left alone at once; beyond, the oldest are tried again.
const MAX_STEPPED_DOWN: u64 = 10_000;

/// The leaves of the process, and who does not want them.
pub struct Interceptor {
    leaves: Leaves,
    stepped_down: Cache<String, ()>,
}

impl Interceptor {
    /// An interceptor whose certificates are `leaves`.
    pub fn new(leaves: Leaves) -> Self {
        let stepped_down = Cache::builder().max_capacity(MAX_STEPPED_DOWN).time_to_live(STEP_DOWN).build();
        Self { leaves, stepped_down }
    }

    /// How to end the TLS of a client that means `host`.
    ///
    /// # Errors
    /// [`Error::Internal`] when no certificate can be made for it.
    pub fn config_for(&self, host: &str) -> Result<Arc<ServerConfig>, Error> {
        self.leaves.config_for(host)
    }

    /// Whether the TLS of `host` is ended, rather than left alone for a while.
    pub fn serves(&self, host: &str) -> bool {
        !self.stepped_down.contains_key(host)
    }

    /// Leaves the TLS of `host` alone for a while; true when that is news.
    pub fn step_down(&self, host: &str) -> bool {
        let entry = self.stepped_down.entry_by_ref(host).or_insert(());
        entry.is_fresh()
    }

    /// The hosts that are left alone now.
    pub fn stepped_down(&self) -> Vec<String> {
        let mut hosts: Vec<String> = self.stepped_down.iter().map(|(host, ())| host.to_string()).collect();
        hosts.sort_unstable();
        hosts
    }
}

/// Whether a handshake failed because the client does not accept our certificate (RFC 8446 section 6.2).
pub fn is_declined(error: &std::io::Error) -> bool {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    matches!(
        inner,
        Some(rustls::Error::AlertReceived(
            AlertDescription::BadCertificate
                | AlertDescription::UnsupportedCertificate
                | AlertDescription::CertificateRevoked
                | AlertDescription::CertificateExpired
                | AlertDescription::CertificateUnknown
                | AlertDescription::UnknownCA
        ))
    )
}
