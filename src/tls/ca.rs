//! The certificate authority that intercepted agents trust: made by this process, or given by files.
//!
//! The own one is made at start and never stored. Whoever could read a stored key could speak to the
//! agents for every host on earth; a key that dies with its process is worth little. So each sidecar has
//! its own CA, under a name of its own: clients look an issuer up by name, and two keys under one name
//! confuse them.
//!
//! Certificates have what the strictest client asks for, CPython 3.13 with `VERIFY_X509_STRICT`: critical
//! basicConstraints and keyUsage, key identifiers on both sides.

use std::fmt;
use std::fs;

use rcgen::{BasicConstraints, CertificateParams, DistinguishedName, DnType, IsCa, Issuer, KeyUsagePurpose};
use ring::rand::{SecureRandom, SystemRandom};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use time::{Duration, OffsetDateTime};
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer;

use super::key::Key;
use crate::error::{Cause, Error};

/// How long before now a certificate starts: for agents whose clock is behind.
pub(super) const BACKDATED: Duration = Duration::hours(2);

/// The key dies with the process, so the dates protect nothing; a short life would only break the agents
/// of a process that outlives it.
const LIFE: Duration = Duration::days(3653);

/// Signs the leaves, and says what agents have to trust.
pub struct CertificateAuthority {
    issuer: Issuer<'static, Key>,
    /// What a server sends after its leaf.
    intermediates: Vec<CertificateDer<'static>>,
    pem: String,
    not_after: OffsetDateTime,
}

impl CertificateAuthority {
    /// A new authority with a key of its own, good for ten years.
    ///
    /// # Errors
    /// [`Error::Internal`] when the system has no random numbers.
    pub fn generate() -> Result<Self, Error> {
        let key = Key::generate()?;
        let certificate = own(OffsetDateTime::now_utc())?.self_signed(&key).map_err(failed)?;
        Self::new(vec![certificate.into()], key)
    }

    /// The authority of `cert_pem`, whose first certificate is the CA's own and whose others lead from it to a
    /// root, with its key in `key_pem`: PKCS#8, SEC1 or PKCS#1, not encrypted. Whatever else the texts
    /// hold is passed over.
    ///
    /// Of the certificate's validity and purposes nothing is asked here.
    ///
    /// # Errors
    /// [`Error::Internal`] when either cannot be read or they do not belong together, and for a subject
    /// that has an attribute twice or a part of several attributes, which leaves could not repeat exactly as
    /// their issuer.
    pub fn from_pem(cert_pem: &[u8], key_pem: &[u8]) -> Result<Self, Error> {
        let chain = CertificateDer::pem_slice_iter(cert_pem)
            .collect::<Result<Vec<_>, _>>()
            .map_err(|error| unusable(format!("its certificate cannot be read: {error}")))?;
        let key = PrivateKeyDer::from_pem_slice(key_pem)
            .map_err(|error| unusable(format!("its key cannot be read: {error}")))?;
        Self::new(chain, Key::from_der(&key)?)
    }

    fn new(chain: Vec<CertificateDer<'static>>, key: Key) -> Result<Self, Error> {
        let own = chain.first().ok_or_else(|| unusable("there is no certificate".into()))?;
        let parsed = parse(own)?;
        if rcgen::PublicKeyData::subject_public_key_info(&key) != parsed.public_key().raw {
            return Err(unusable("the key is not the certificate's".into()));
        }
        // Asked first: rcgen panics on a part without any attribute.
        if parsed.subject().iter().any(|part| part.iter().count() != 1) {
            return Err(unusable("a part of its subject is not one attribute".into()));
        }
        let issuer = Issuer::from_ca_cert_der(own, key).map_err(failed)?;
        if !names_itself(&issuer, &parsed)? {
            return Err(unusable("its subject has an attribute twice".into()));
        }
        let not_after = parsed.validity().not_after.to_datetime();
        let pem = chain.iter().map(|certificate| to_pem(certificate)).collect();
        Ok(Self { not_after, pem, intermediates: without_roots(&chain)?, issuer })
    }

    /// The certificates in PEM: the authority's, and for one given by files those that were given with it.
    /// Nothing else of those files, whatever they held.
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// When the authority's certificate ends.
    pub(super) fn not_after(&self) -> OffsetDateTime {
        self.not_after
    }

    /// A certificate of `params` for `key`, and what a server has to send after it.
    pub(super) fn sign(
        &self,
        params: &CertificateParams,
        key: &Key,
    ) -> Result<Vec<CertificateDer<'static>>, Error> {
        let leaf = params.signed_by(key, &self.issuer).map_err(failed)?;
        Ok(std::iter::once(leaf.into()).chain(self.intermediates.iter().cloned()).collect())
    }
}

impl fmt::Debug for CertificateAuthority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CertificateAuthority")
    }
}

/// A random serial number of 16 bytes; positive, as RFC 5280 section 4.1.2.2 asks.
pub(super) fn serial() -> Result<rcgen::SerialNumber, Error> {
    let mut bytes = [0; 16];
    SystemRandom::new().fill(&mut bytes).map_err(|_| Error::Internal("no random numbers".into()))?;
    // The sign bit is off, and the one below is on, so that no leading zero shortens it.
    bytes[0] = bytes[0] & 0x3f | 0x40;
    Ok(rcgen::SerialNumber::from_slice(&bytes))
}

/// `certificate` in PEM.
pub(super) fn to_pem(certificate: &CertificateDer<'_>) -> String {
    let config = pem::EncodeConfig::new().set_line_ending(pem::LineEnding::LF);
    pem::encode_config(&pem::Pem::new("CERTIFICATE", certificate.to_vec()), config)
}

fn own(now: OffsetDateTime) -> Result<CertificateParams, Error> {
    let mut params = CertificateParams::default();
    params.serial_number = Some(serial()?);
    params.not_before = now - BACKDATED;
    params.not_after = now + LIFE;
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, own_name());
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    Ok(params)
}

/// In Kubernetes the host's name is the pod's, which helps whoever reads a certificate. The word makes it
/// another name after each start.
fn own_name() -> String {
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    // A common name has at most 64 characters (RFC 5280 appendix A.1), and eight go to the word.
    let host: String = host.chars().filter(char::is_ascii_graphic).take(43).collect();
    let word = format!("{:08x}", fastrand::u32(..));
    let parts = ["hedgerow CA", &host, &word];
    parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(" ")
}

/// Whether what `issuer` signs names exactly the subject of `certificate`. rcgen keeps a name as a map.
fn names_itself(issuer: &Issuer<'_, Key>, certificate: &X509Certificate<'_>) -> Result<bool, Error> {
    let trial = CertificateParams::default().signed_by(issuer.key(), issuer).map_err(failed)?;
    Ok(parse(trial.der())?.issuer().as_raw() == certificate.subject().as_raw())
}

/// A root is of no use in a handshake: the client has it, or does not trust it.
fn without_roots(chain: &[CertificateDer<'static>]) -> Result<Vec<CertificateDer<'static>>, Error> {
    let mut kept = Vec::with_capacity(chain.len());
    for certificate in chain {
        let parsed = parse(certificate)?;
        if parsed.subject().as_raw() != parsed.issuer().as_raw() {
            kept.push(certificate.clone());
        }
    }
    Ok(kept)
}

fn parse<'a>(certificate: &'a CertificateDer<'_>) -> Result<X509Certificate<'a>, Error> {
    match X509Certificate::from_der(certificate) {
        Ok((_, parsed)) => Ok(parsed),
        Err(error) => Err(unusable(format!("a certificate cannot be parsed: {error}"))),
    }
}

fn unusable(reason: String) -> Error {
    Error::Internal(format!("the certificate authority is unusable: {reason}").into())
}

fn failed(error: rcgen::Error) -> Error {
    Error::Internal(Cause::chain(&error))
}
