//! A throw-away certificate authority for upstreams, and TLS for both sides.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, ExtendedKeyUsagePurpose,
    IsCa, KeyPair, KeyUsagePurpose,
};
use tempfile::TempDir;
use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::version::TLS12;
use tokio_rustls::rustls::{
    ClientConfig, DEFAULT_VERSIONS, RootCertStore, ServerConfig, SupportedProtocolVersion,
};
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// An authority that nobody but the test trusts. Its files live as long as it does.
pub struct Pki {
    issuer: CertifiedIssuer<'static, KeyPair>,
    folder: TempDir,
}

/// A certificate and its key.
pub struct Leaf {
    certificate: CertificateDer<'static>,
    certificate_pem: String,
    key: KeyPair,
    /// What a server sends along.
    chain: Vec<CertificateDer<'static>>,
}

impl Pki {
    /// A fresh authority.
    pub fn new() -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "test authority");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let issuer = CertifiedIssuer::self_signed(params, new_key()).expect("a CA can be made");
        let folder = TempDir::new().expect("a temporary folder");
        fs::write(folder.path().join("ca.pem"), issuer.pem()).expect("a temporary file");
        Self { issuer, folder }
    }

    /// Where `tls.ca_file` may point.
    pub fn ca_file(&self) -> PathBuf {
        self.folder.path().join("ca.pem")
    }

    /// A certificate for these DNS names or addresses, for server or client.
    pub fn leaf(&self, names: &[&str]) -> Leaf {
        self.leaf_with(names, |_| {})
    }

    /// The same with something changed: an end in the past, no server usage.
    pub fn leaf_with(&self, names: &[&str], change: impl FnOnce(&mut CertificateParams)) -> Leaf {
        let names: Vec<_> = names.iter().map(|&name| name.to_owned()).collect();
        let mut params = CertificateParams::new(names).expect("valid names");
        params.use_authority_key_identifier_extension = true;
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        change(&mut params);
        let key = new_key();
        let certificate = params.signed_by(&key, &self.issuer).expect("a leaf can be signed");
        Leaf {
            certificate_pem: certificate.pem(),
            certificate: certificate.der().clone(),
            key,
            chain: Vec::new(),
        }
    }

    /// A certificate by an authority below this one, whose own certificate the server sends along.
    pub fn leaf_of_intermediate(&self, names: &[&str]) -> Leaf {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, "test intermediate");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let issuer = CertifiedIssuer::signed_by(params, new_key(), &self.issuer).expect("a CA can be signed");
        let names: Vec<_> = names.iter().map(|&name| name.to_owned()).collect();
        let key = new_key();
        let certificate = CertificateParams::new(names).expect("valid names").signed_by(&key, &issuer);
        let certificate = certificate.expect("a leaf can be signed");
        let chain = vec![issuer.der().clone()];
        Leaf { certificate_pem: certificate.pem(), certificate: certificate.der().clone(), key, chain }
    }

    /// The certificate and key as files for `tls.client_cert` and `tls.client_key`.
    pub fn files(&self, name: &str, leaf: &Leaf) -> (PathBuf, PathBuf) {
        let at = |end: &str| self.folder.path().join(format!("{name}-{end}.pem"));
        fs::write(at("cert"), &leaf.certificate_pem).expect("a temporary file");
        fs::write(at("key"), leaf.key.serialize_pem()).expect("a temporary file");
        (at("cert"), at("key"))
    }

    /// TLS of an upstream that is called by one of these names.
    pub fn server(&self, names: &[&str]) -> TlsAcceptor {
        acceptor(&self.leaf(names))
    }

    /// TLS of an upstream that demands a certificate of this authority from its client.
    pub fn server_demanding_client(&self, names: &[&str]) -> TlsAcceptor {
        self.server_demanding_client_in(names, "http/1.1")
    }

    /// The same, for an upstream that speaks this protocol.
    pub fn server_demanding_client_in(&self, names: &[&str], protocol: &str) -> TlsAcceptor {
        let roots = Arc::new(roots_of(self.issuer.der().clone()));
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider()).build().expect("roots");
        let leaf = self.leaf(names);
        let config = server_builder().with_client_cert_verifier(verifier);
        let mut config = config.with_single_cert(leaf.sent(), leaf.private_key()).expect("a valid pair");
        config.alpn_protocols = vec![protocol.as_bytes().to_vec()];
        TlsAcceptor::from(Arc::new(config))
    }

    /// TLS of an upstream that speaks these protocols (RFC 7301), or knows of none.
    pub fn server_speaking(&self, names: &[&str], protocols: &[&str]) -> TlsAcceptor {
        let leaf = self.leaf(names);
        let config = server_builder().with_no_client_auth();
        let mut config = config.with_single_cert(leaf.sent(), leaf.private_key()).expect("a valid pair");
        config.alpn_protocols = protocols.iter().map(|protocol| protocol.as_bytes().to_vec()).collect();
        TlsAcceptor::from(Arc::new(config))
    }

    /// The authority's certificate.
    pub fn pem(&self) -> String {
        self.issuer.pem()
    }

    /// TLS of an agent that trusts this authority alone, to be refined.
    pub fn agent_tls(&self) -> AgentTls {
        AgentTls::trusting(roots_of(self.issuer.der().clone()), DEFAULT_VERSIONS)
    }

    /// TLS of an agent that trusts this authority alone.
    pub fn connector(&self) -> TlsConnector {
        self.agent_tls().connector()
    }
}

impl Leaf {
    /// A certificate that vouches for itself.
    pub fn self_signed(names: &[&str]) -> Self {
        Self::self_signed_with(names, |_| {})
    }

    /// The same with something changed, such as to an authority's.
    pub fn self_signed_with(names: &[&str], change: impl FnOnce(&mut CertificateParams)) -> Self {
        let names: Vec<_> = names.iter().map(|&name| name.to_owned()).collect();
        let mut params = CertificateParams::new(names).expect("valid names");
        change(&mut params);
        let key = new_key();
        let certificate = params.self_signed(&key).expect("a certificate can sign itself");
        Self {
            certificate_pem: certificate.pem(),
            certificate: certificate.der().clone(),
            key,
            chain: Vec::new(),
        }
    }

    /// Without what should be sent along.
    pub fn without_chain(mut self) -> Self {
        self.chain.clear();
        self
    }

    /// The certificate, PEM.
    pub fn pem(&self) -> &str {
        &self.certificate_pem
    }

    /// The key, PEM.
    pub fn key_pem(&self) -> String {
        self.key.serialize_pem()
    }

    /// The certificate, DER.
    pub fn der(&self) -> &[u8] {
        &self.certificate
    }

    fn sent(&self) -> Vec<CertificateDer<'static>> {
        std::iter::once(&self.certificate).chain(&self.chain).cloned().collect()
    }

    fn private_key(&self) -> PrivateKeyDer<'static> {
        PrivatePkcs8KeyDer::from(self.key.serialize_der()).into()
    }
}

/// TLS of an upstream that shows this certificate.
pub fn acceptor(leaf: &Leaf) -> TlsAcceptor {
    let config = server_builder().with_no_client_auth();
    served(config.with_single_cert(leaf.sent(), leaf.private_key()).expect("a valid pair"))
}

/// TLS of an agent that trusts what a PEM file holds, such as the CA that an intercepting proxy wrote.
pub fn connector_trusting_pem(pem: &[u8]) -> TlsConnector {
    AgentTls::trusting_pem(pem).connector()
}

/// How an agent's TLS begins: whom it trusts and what it offers. HTTP/1.1 unless told otherwise.
pub struct AgentTls(ClientConfig);

impl AgentTls {
    /// Trusts the certificates of a PEM text and nothing else.
    pub fn trusting_pem(pem: &[u8]) -> Self {
        Self::trusting(roots_of_pem(pem), DEFAULT_VERSIONS)
    }

    /// The same, and speaks nothing newer than TLS 1.2.
    pub fn trusting_pem_in_tls_1_2(pem: &[u8]) -> Self {
        Self::trusting(roots_of_pem(pem), &[&TLS12])
    }

    fn trusting(roots: RootCertStore, versions: &[&'static SupportedProtocolVersion]) -> Self {
        let builder = ClientConfig::builder_with_provider(provider()).with_protocol_versions(versions);
        let builder = builder.expect("ring speaks TLS 1.2 and 1.3").with_root_certificates(roots);
        let mut config = builder.with_no_client_auth();
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Self(config)
    }

    /// Offers these protocols (RFC 7301), or none.
    pub fn offering(mut self, protocols: &[&str]) -> Self {
        self.0.alpn_protocols = protocols.iter().map(|protocol| protocol.as_bytes().to_vec()).collect();
        self
    }

    /// Does not say which host it means.
    pub fn without_sni(mut self) -> Self {
        self.0.enable_sni = false;
        self
    }

    /// Splits what it says into records of at most so many bytes.
    pub fn in_fragments(mut self, size: Option<usize>) -> Self {
        self.0.max_fragment_size = size;
        self
    }

    /// Ready to connect.
    pub fn connector(self) -> TlsConnector {
        TlsConnector::from(Arc::new(self.0))
    }
}

fn server_builder() -> tokio_rustls::rustls::ConfigBuilder<ServerConfig, tokio_rustls::rustls::WantsVerifier>
{
    let builder = ServerConfig::builder_with_provider(provider());
    builder.with_safe_default_protocol_versions().expect("ring speaks TLS 1.2 and 1.3")
}

fn served(mut config: ServerConfig) -> TlsAcceptor {
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    TlsAcceptor::from(Arc::new(config))
}

/// Named, not the process's default: a test must not depend on which module installed one first.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

fn roots_of_pem(pem: &[u8]) -> RootCertStore {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(pem) {
        roots.add(certificate.expect("a PEM certificate")).expect("a usable root");
    }
    roots
}

fn roots_of(certificate: CertificateDer<'static>) -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add(certificate).expect("a usable root");
    roots
}

fn new_key() -> KeyPair {
    KeyPair::generate().expect("a key can be made")
}
