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
use x509_parser::x509::RelativeDistinguishedName;

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
        // Asked first: on either of these rcgen panics.
        if !parsed.subject().iter().all(is_one_attribute) {
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

/// Whether `part` is one attribute, and its type begins with 0, 1 or 2, which share the byte as 40 each
/// (X.690 section 8.19.4).
fn is_one_attribute(part: &RelativeDistinguishedName<'_>) -> bool {
    let mut attributes = part.iter().map(|attribute| attribute.attr_type().as_bytes().first());
    matches!((attributes.next(), attributes.next()), (Some(Some(0..120)), None))
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

#[cfg(test)]
mod tests {
    use rcgen::{DnValue, KeyPair};
    use x509_parser::prelude::ParsedExtension;

    use super::*;

    fn first(pem: &str) -> CertificateDer<'static> {
        CertificateDer::from_pem_slice(pem.as_bytes()).unwrap()
    }

    fn authority(name: &str) -> CertificateParams {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, name);
        params
    }

    fn refusal(cert_pem: &str, key_pem: &str) -> String {
        let error = CertificateAuthority::from_pem(cert_pem.as_bytes(), key_pem.as_bytes()).unwrap_err();
        error.cause().unwrap().to_owned()
    }

    #[test]
    fn the_own_certificate_has_what_the_strictest_clients_ask_for() {
        let before = OffsetDateTime::now_utc() - Duration::SECOND;
        let ca = CertificateAuthority::generate().unwrap();
        let after = OffsetDateTime::now_utc();
        let der = first(ca.pem());
        let parsed = parse(&der).unwrap();
        let constraints = parsed.basic_constraints().unwrap().unwrap();
        assert!(constraints.critical && constraints.value.ca);
        assert_eq!(constraints.value.path_len_constraint, Some(0));
        let usage = parsed.key_usage().unwrap().unwrap();
        assert!(usage.critical);
        assert_eq!(usage.value.to_string(), "Key Cert Sign, CRL Sign");
        let identifiers = parsed.extensions().iter().filter(
            |e| matches!(e.parsed_extension(), ParsedExtension::SubjectKeyIdentifier(id) if id.0.len() == 20),
        );
        assert_eq!(identifiers.count(), 1);
        assert_eq!(parsed.raw_serial().len(), 16);
        assert_eq!(parsed.public_key().parsed().unwrap().key_size(), 256);
        let start = parsed.validity().not_before.to_datetime();
        assert!((before - BACKDATED..after - BACKDATED).contains(&start), "{start}");
        let end = parsed.validity().not_after.to_datetime();
        assert!((before + LIFE..after + LIFE).contains(&end), "{end}");
        assert_eq!(end, ca.not_after());
        parsed.verify_signature(None).unwrap();
    }

    #[test]
    fn two_processes_have_authorities_of_different_names() {
        let names = [(); 2].map(|()| {
            let ca = CertificateAuthority::generate().unwrap();
            parse(&first(ca.pem())).unwrap().subject().to_string()
        });
        assert_ne!(names[0], names[1]);
        for name in names {
            assert!(name.starts_with("CN=hedgerow CA ") && name.len() <= "CN=".len() + 64, "{name}");
        }
    }

    #[test]
    fn a_given_chain_is_published_and_all_but_its_root_is_sent() {
        let [root_key, key] = [(); 2].map(|()| KeyPair::generate().unwrap());
        let root = rcgen::CertifiedIssuer::self_signed(authority("root"), root_key).unwrap();
        let own = authority("own").signed_by(&key, &root).unwrap();
        let chain = own.pem() + &root.pem();
        let ca = CertificateAuthority::from_pem(chain.as_bytes(), key.serialize_pem().as_bytes()).unwrap();
        assert_eq!(ca.pem(), chain);
        let leaf_key = Key::generate().unwrap();
        let sent = ca.sign(&CertificateParams::default(), &leaf_key).unwrap();
        assert_eq!(sent.len(), 2);
        assert_eq!(parse(&sent[0]).unwrap().issuer().to_string(), "CN=own");
        assert_eq!(&sent[1], own.der());
    }

    #[test]
    fn a_key_beside_the_certificate_is_not_published() {
        let key = KeyPair::generate().unwrap();
        let cert = authority("own").self_signed(&key).unwrap().pem();
        let both = format!("a remark\n{}{cert}", key.serialize_pem());
        let ca = CertificateAuthority::from_pem(both.as_bytes(), both.as_bytes()).unwrap();
        assert_eq!(ca.pem(), cert);
        assert_eq!(format!("{ca:?}"), "CertificateAuthority");
    }

    #[test]
    fn what_is_wrong_with_given_files_is_said() {
        let [key, other] = [(); 2].map(|()| KeyPair::generate().unwrap());
        let cert = authority("own").self_signed(&key).unwrap().pem();
        let key = key.serialize_pem();
        assert!(refusal("", &key).ends_with("there is no certificate"));
        assert!(refusal(&cert, "").contains("its key cannot be read"));
        assert!(refusal(&cert, &other.serialize_pem()).ends_with("the key is not the certificate's"));
        let garbage = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        assert!(refusal(garbage, &key).contains("a certificate cannot be parsed"));
        assert!(refusal("-----BEGIN CERTIFICATE-----\n!", &key).contains("its certificate cannot be read"));
        let garbage = "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n";
        assert!(refusal(&cert, garbage).contains("failed to parse private key"));
    }

    /// `certificate` of `key` with its subject `from` replaced by `to`, which has the same length.
    fn renamed(certificate: &CertificateDer<'_>, from: &[u8], to: &[u8]) -> String {
        let mut der = certificate.to_vec();
        let at = der.windows(from.len()).rposition(|part| part == from).unwrap();
        der[at..at + from.len()].copy_from_slice(to);
        to_pem(&der.into())
    }

    #[test]
    fn a_name_that_leaves_cannot_repeat_is_refused() {
        let key = KeyPair::generate().unwrap();
        let mut params = authority("own");
        // Like DC=corp, DC=example.
        let [unit, place] = [DnType::OrganizationalUnitName, DnType::LocalityName];
        params.distinguished_name.push(unit, DnValue::PrintableString("corp".try_into().unwrap()));
        params.distinguished_name.push(place, DnValue::PrintableString("corp".try_into().unwrap()));
        let cert = params.self_signed(&key).unwrap();
        let twice = renamed(cert.der(), &[0x55, 0x04, 0x07], &[0x55, 0x04, 0x0b]);
        assert!(refusal(&twice, &key.serialize_pem()).ends_with("its subject has an attribute twice"));
    }

    #[test]
    fn no_change_of_one_byte_makes_it_panic() {
        let key = KeyPair::generate().unwrap();
        let cert = authority("own").self_signed(&key).unwrap();
        let key = key.serialize_pem();
        let mut accepted = 0;
        for at in 0..cert.der().len() {
            for change in [0x01, 0x80, 0xff] {
                let mut der = cert.der().to_vec();
                der[at] ^= change;
                let pem = to_pem(&der.into());
                accepted += u32::from(CertificateAuthority::from_pem(pem.as_bytes(), key.as_bytes()).is_ok());
            }
        }
        assert_ne!(accepted, 0, "some bytes, as those of the signature, are not looked at");
    }
}
