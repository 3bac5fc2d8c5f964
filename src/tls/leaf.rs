//! A server certificate for each host that is intercepted, minted when first asked for.
//!
//! All leaves share one key, made at start: making one costs as much as signing, and whoever reads one
//! key of this process reads them all. They live a day and are minted anew at half of it, so that a
//! connection that was just accepted has hours left. The cache is bounded, and threads that ask for one
//! host at the same time mint once; the others wait the fraction of a millisecond that this takes.
//!
//! Validity goes by the wall clock, since it is the clients' measure: an entry's age in the cache would
//! not see a clock that was set, or a machine that slept.
//!
//! Tickets are good at the host that gave them and while its leaf lives. One ticket key for all hosts
//! would rest on rustls comparing SNI, and a client that dials an address sends none.
//!
//! Each names its host exactly: a wildcard would let one leaf stand for hosts of another policy.

use std::fmt;
use std::net::IpAddr;
use std::ops::Range;
use std::sync::Arc;

use moka::policy::EvictionPolicy;
use moka::sync::Cache;
use rcgen::{
    CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, KeyUsagePurpose, SanType,
};
use rustls::ServerConfig;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::NoServerSessionStorage;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use time::{Duration, OffsetDateTime};

use super::ca::{BACKDATED, CertificateAuthority, serial};
use super::key::Key;
use crate::error::{Cause, Error};

/// Hosts whose leaf is kept, at some kilobytes each. An agent with more of them mints again.
const HOSTS: u64 = 1000;

/// Short, since there is no revocation; long beside any clock's error.
const LIFE: Duration = Duration::hours(24);

/// Protocols offered inside interception. A client that names none is served HTTP/1.1; one that names
/// only others is refused by rustls with the alert `no_application_protocol` (RFC 7301 section 3.2).
const PROTOCOLS: [&[u8]; 2] = [b"h2", b"http/1.1"];

/// The TLS configurations of intercepted hosts. One for the process.
pub struct Leaves {
    ca: CertificateAuthority,
    key: Key,
    provider: Arc<CryptoProvider>,
    life: Duration,
    /// A failure stands in the cache until the next call, which tries again.
    minted: Cache<String, Result<Leaf, Error>>,
}

#[derive(Clone)]
struct Leaf {
    config: Arc<ServerConfig>,
    /// From its start, so that a clock set back does not leave it unborn, to when it is minted anew.
    serves: Range<OffsetDateTime>,
}

impl Leaves {
    /// Leaves signed by `ca`. Makes their key.
    ///
    /// # Errors
    /// [`Error::Internal`] when the system has no random numbers.
    pub fn new(ca: CertificateAuthority) -> Result<Self, Error> {
        Self::living(ca, LIFE)
    }

    fn living(ca: CertificateAuthority, life: Duration) -> Result<Self, Error> {
        Ok(Self {
            ca,
            key: Key::generate()?,
            provider: Arc::new(ring::default_provider()),
            life,
            // By age of use alone: moka's own policy keeps newcomers out of a full cache.
            minted: Cache::builder().max_capacity(HOSTS).eviction_policy(EvictionPolicy::lru()).build(),
        })
    }

    /// How to serve as `host`: a name in normal form (lower case, no trailing dot) or an address, IPv6
    /// with or without brackets. Minting takes a fraction of a millisecond, and is done on this thread.
    ///
    /// # Errors
    /// [`Error::InvalidRequest`] when no certificate can be for `host`; [`Error::Internal`] when signing
    /// fails or the authority's own certificate has expired.
    pub fn config_for(&self, host: &str) -> Result<Arc<ServerConfig>, Error> {
        self.config_at(host, OffsetDateTime::now_utc())
    }

    fn config_at(&self, host: &str, now: OffsetDateTime) -> Result<Arc<ServerConfig>, Error> {
        let host = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
        let stale =
            |minted: &Result<Leaf, Error>| minted.as_ref().map_or(true, |leaf| !leaf.serves.contains(&now));
        let entry = self.minted.entry_by_ref(host).or_insert_with_if(|| self.mint(host, now), stale);
        entry.into_value().map(|leaf| leaf.config)
    }

    /// The authority's certificates in PEM.
    pub fn ca_pem(&self) -> &str {
        self.ca.pem()
    }

    /// How many hosts have a leaf.
    pub fn len(&self) -> u64 {
        self.minted.run_pending_tasks();
        self.minted.entry_count()
    }

    /// Whether no host has a leaf.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn mint(&self, host: &str, now: OffsetDateTime) -> Result<Leaf, Error> {
        let end = self.ca.not_after().min(now + self.life);
        if end <= now {
            return Err(Error::Internal("the certificate authority has expired".into()));
        }
        let params = params(host, now - BACKDATED..end)?;
        let chain = self.ca.sign(&params, &self.key)?;
        let serves = params.not_before..end.min(now + self.life / 2);
        Ok(Leaf { config: Arc::new(self.config(chain)?), serves })
    }

    fn config(&self, chain: Vec<CertificateDer<'static>>) -> Result<ServerConfig, Error> {
        let failed = |error: rustls::Error| Error::Internal(Cause::chain(&error));
        let leaf = CertifiedKey::new(chain, self.key.signer());
        let mut config = ServerConfig::builder_with_provider(self.provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(failed)?
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(SingleCertAndKey::from(leaf)));
        config.alpn_protocols = PROTOCOLS.map(<[u8]>::to_vec).into();
        config.ticketer = ring::Ticketer::new().map_err(failed)?;
        // The tickets hold the sessions; a store beside them would take its full size for each host.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        Ok(config)
    }
}

impl fmt::Debug for Leaves {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Leaves").field("minted", &self.minted.entry_count()).finish_non_exhaustive()
    }
}

/// What rcgen leaves out by default is set: key identifiers, basicConstraints, purposes, an exact name.
fn params(host: &str, validity: Range<OffsetDateTime>) -> Result<CertificateParams, Error> {
    let mut params = CertificateParams::default();
    params.serial_number = Some(serial()?);
    params.not_before = validity.start;
    params.not_after = validity.end;
    params.subject_alt_names = vec![alternative_name(host)?];
    params.distinguished_name = DistinguishedName::new();
    // A common name has at most 64 characters (RFC 5280 appendix A.1). With an empty subject rcgen makes
    // the alternative name critical, as section 4.2.1.6 asks.
    if host.len() <= 64 {
        params.distinguished_name.push(DnType::CommonName, host);
    }
    params.is_ca = IsCa::ExplicitNoCa;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    params.use_authority_key_identifier_extension = true;
    Ok(params)
}

fn alternative_name(host: &str) -> Result<SanType, Error> {
    const NO_NAME: Error = Error::InvalidRequest("no certificate can be for this host");
    match ServerName::try_from(host).map_err(|_| NO_NAME)? {
        ServerName::IpAddress(address) => Ok(SanType::IpAddress(IpAddr::from(address))),
        ServerName::DnsName(name) => name.as_ref().try_into().map(SanType::DnsName).map_err(|_| NO_NAME),
        _ => Err(NO_NAME),
    }
}
