//! TLS towards upstreams: who is trusted, and what is told when a handshake fails.
//!
//! The upstream's certificate is always verified; there is no switch that skips it. The roots are the
//! machine's own (a company's proxy or private CA is found there), the compiled-in set of Mozilla where
//! the machine has none, as in a scratch image, and the policy's extra ones.
//!
//! A policy's client is built at its first handshake: the roots take some hundred kilobytes and some
//! milliseconds, which a pod that only speaks plain HTTP should not pay. Those without extra roots share
//! one store.

use std::sync::{Arc, OnceLock};

use rustls::client::{Resumption, WantsClientCert};
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{CertificateError, ClientConfig, ConfigBuilder, RootCertStore};
use tokio::net::TcpStream;
use tokio::sync::OnceCell;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::config::ClientIdentity;
use crate::error::{Cause, Error};

/// Sessions remembered for resumption, per policy. One is a few kilobytes at most.
const SESSIONS: usize = 256;

/// The roots of the machine, or the compiled-in ones where there are none. Read once, when first needed.
#[derive(Debug, Default)]
pub struct SystemRoots(OnceLock<Arc<RootCertStore>>);

impl SystemRoots {
    /// Blocks on files the first time. `SSL_CERT_FILE` and `SSL_CERT_DIR` count.
    fn get(&self) -> Arc<RootCertStore> {
        self.0.get_or_init(|| Arc::new(load())).clone()
    }
}

fn load() -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(public_roots());
    roots
}

/// The machine's root certificates, or the compiled-in ones where it has none that can be used. Blocks on
/// files; `SSL_CERT_FILE` and `SSL_CERT_DIR` count.
pub fn public_roots() -> Vec<CertificateDer<'static>> {
    let found = rustls_native_certs::load_native_certs();
    for error in &found.errors {
        tracing::debug!(%error, "a file with root certificates was passed over");
    }
    let all = found.certs.len();
    let mut roots = found.certs;
    roots.retain(|root| RootCertStore::empty().add(root.clone()).is_ok());
    if roots.is_empty() {
        tracing::info!(
            passed_over = all,
            "this machine has no root certificates: taking the compiled-in ones"
        );
        roots = webpki_root_certs::TLS_SERVER_ROOT_CERTS.to_vec();
    }
    roots
}

/// The TLS client of one upstream policy. Sessions are resumed among its connections.
#[derive(Debug)]
pub struct ClientTls {
    system: Arc<SystemRoots>,
    ca_pems: Vec<Arc<[u8]>>,
    server_name: Option<String>,
    identity: Option<ClientIdentity>,
    connector: OnceCell<Connector>,
}

/// The versions of HTTP that a handshake offers (RFC 7301).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Offer {
    /// HTTP/1.1 alone: for what needs a connection to itself, as an upgrade does.
    Http1,
    /// HTTP/2, or else HTTP/1.1.
    Both,
}

/// Hides what rustls and its sessions would print.
#[derive(Clone)]
struct Connector {
    http1: TlsConnector,
    both: TlsConnector,
}

impl std::fmt::Debug for Connector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Connector")
    }
}

impl ClientTls {
    /// A client that trusts `system` and the certificates in `ca_pems`, and that verifies, and sends as
    /// SNI, `server_name` instead of the host where that is given. To an upstream that asks who it is it
    /// shows `identity`. Reads nothing yet.
    pub fn new(
        system: Arc<SystemRoots>,
        ca_pems: impl IntoIterator<Item = Arc<[u8]>>,
        server_name: Option<String>,
        identity: Option<ClientIdentity>,
    ) -> Self {
        let ca_pems = ca_pems.into_iter().collect();
        Self { system, ca_pems, server_name, identity, connector: OnceCell::new() }
    }

    /// Speaks TLS on `tcp` with `host`: a name or address in normal form, IPv6 with or without brackets.
    /// The time is the caller's to bound. Dropping the future closes the connection.
    ///
    /// # Errors
    /// [`Error::CertificateInvalid`] when the certificate is at fault, else [`Error::TlsFailed`].
    pub async fn handshake(
        &self,
        tcp: TcpStream,
        host: &str,
        offer: Offer,
    ) -> Result<TlsStream<TcpStream>, Error> {
        let name = server_name(self.server_name.as_deref().unwrap_or(host))?;
        let connector = self.connector.get_or_try_init(|| self.build()).await?;
        let connector = match offer {
            Offer::Http1 => &connector.http1,
            Offer::Both => &connector.both,
        };
        connector.connect(name, tcp).await.map_err(|error| handshake_error(&error))
    }

    async fn build(&self) -> Result<Connector, Error> {
        let (system, ca_pems, identity) = (self.system.clone(), self.ca_pems.clone(), self.identity.clone());
        // Files are read and hundreds of certificates parsed: not on a worker.
        tokio::task::spawn_blocking(move || connector(&system, &ca_pems, identity.as_ref()))
            .await
            .map_err(|error| Error::Internal(Cause::chain(&error)))?
    }
}

fn connector(
    system: &SystemRoots,
    ca_pems: &[Arc<[u8]>],
    identity: Option<&ClientIdentity>,
) -> Result<Connector, Error> {
    let mut roots = system.get();
    for pem in ca_pems {
        add_pem(Arc::make_mut(&mut roots), pem)?;
    }
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::Internal(Cause::chain(&error)))?
        .with_root_certificates(roots);
    let mut config = match identity {
        None => builder.with_no_client_auth(),
        Some(identity) => with_identity(builder, identity)?,
    };
    config.resumption = Resumption::in_memory_sessions(SESSIONS);
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    let http1 = TlsConnector::from(Arc::new(config.clone()));
    config.alpn_protocols.insert(0, b"h2".to_vec());
    Ok(Connector { http1, both: TlsConnector::from(Arc::new(config)) })
}

fn with_identity(
    builder: ConfigBuilder<ClientConfig, WantsClientCert>,
    identity: &ClientIdentity,
) -> Result<ClientConfig, Error> {
    let unusable =
        |reason: String| Error::TlsFailed(format!("the client certificate is unusable: {reason}").into());
    let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(&identity.cert_pem)
        .collect::<Result<_, _>>()
        .map_err(|error| unusable(error.to_string()))?;
    let key = PrivateKeyDer::from_pem_slice(identity.key_pem.as_bytes())
        .map_err(|error| unusable(error.to_string()))?;
    builder.with_client_auth_cert(chain, key).map_err(|error| unusable(error.to_string()))
}

fn add_pem(roots: &mut RootCertStore, pem: &[u8]) -> Result<(), Error> {
    let failed = |reason: String| Error::TlsFailed(format!("an extra root is unusable: {reason}").into());
    for certificate in CertificateDer::pem_slice_iter(pem) {
        let certificate = certificate.map_err(|error| failed(error.to_string()))?;
        roots.add(certificate).map_err(|error| failed(error.to_string()))?;
    }
    Ok(())
}

/// What is verified and sent as SNI (RFC 6066 section 3: no trailing dot, and no SNI for an address).
fn server_name(host: &str) -> Result<ServerName<'static>, Error> {
    let bare = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
    let bare = bare.strip_suffix('.').unwrap_or(bare);
    ServerName::try_from(bare.to_owned())
        .map_err(|_| Error::TlsFailed(format!("{host} is no name that a certificate can be for").into()))
}

fn handshake_error(error: &std::io::Error) -> Error {
    let cause = Cause::chain(error);
    match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
        Some(rustls::Error::InvalidCertificate(problem)) => {
            Error::CertificateInvalid { what: what_is_wrong(problem), cause }
        }
        _ => Error::TlsFailed(cause),
    }
}

fn what_is_wrong(problem: &CertificateError) -> &'static str {
    match problem {
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => "expired",
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => "not yet valid",
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
            "issued for another name"
        }
        // A CA that was made anew under its old name: the name is known, the key is not.
        CertificateError::UnknownIssuer | CertificateError::BadSignature => "signed by an unknown issuer",
        CertificateError::Revoked => "revoked",
        _ => "not acceptable",
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, date_time_ymd};
    use rustls::{HandshakeKind, ProtocolVersion, ServerConfig, SupportedProtocolVersion};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;
    use tokio_rustls::TlsAcceptor;

    use super::*;

    /// A throw-away CA.
    struct Ca(CertifiedIssuer<'static, KeyPair>);

    impl Ca {
        fn new() -> Self {
            Self::named("a throw-away CA")
        }

        fn named(name: &str) -> Self {
            let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
            params.distinguished_name.push(DnType::CommonName, name);
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
        }

        fn pem(&self) -> Arc<[u8]> {
            self.0.pem().into_bytes().into()
        }

        /// A server with a certificate for `names`, changed by `change` before it is signed.
        fn config(&self, names: &[&str], change: impl FnOnce(&mut CertificateParams)) -> ServerConfig {
            self.config_for(rustls::DEFAULT_VERSIONS, names, change)
        }

        fn config_for(
            &self,
            versions: &[&'static SupportedProtocolVersion],
            names: &[&str],
            change: impl FnOnce(&mut CertificateParams),
        ) -> ServerConfig {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            let mut params = CertificateParams::new(names).unwrap();
            change(&mut params);
            let key = KeyPair::generate().unwrap();
            let leaf = params.signed_by(&key, &self.0).unwrap();
            let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
            let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
                .with_protocol_versions(versions)
                .unwrap()
                .with_no_client_auth()
                .with_single_cert(vec![leaf.der().clone()], key)
                .unwrap();
            config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
            config
        }
    }

    /// Accepts for ever; says `hi` on each connection, and the SNI that it was sent.
    async fn serve(config: ServerConfig) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let acceptor = TlsAcceptor::from(Arc::new(config));
        tokio::spawn(async move {
            while let Ok((tcp, _)) = listener.accept().await {
                let acceptor = acceptor.clone();
                tokio::spawn(async move {
                    if let Ok(mut stream) = acceptor.accept(tcp).await {
                        let sni = stream.get_ref().1.server_name().unwrap_or("none").to_owned();
                        let _ = stream.write_all(format!("hi {sni}").as_bytes()).await;
                        let _ = stream.shutdown().await;
                    }
                });
            }
        });
        address
    }

    fn client(ca: &Ca) -> ClientTls {
        ClientTls::new(Arc::new(SystemRoots::default()), [ca.pem()], None, None)
    }

    async fn handshake(
        client: &ClientTls,
        address: SocketAddr,
        host: &str,
    ) -> Result<TlsStream<TcpStream>, Error> {
        client.handshake(TcpStream::connect(address).await.unwrap(), host, Offer::Http1).await
    }

    async fn text(mut stream: TlsStream<TcpStream>) -> String {
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        text
    }

    fn what(result: Result<TlsStream<TcpStream>, Error>) -> &'static str {
        match result.unwrap_err() {
            Error::CertificateInvalid { what, cause } => {
                assert!(cause.as_str().is_some());
                what
            }
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn an_extra_root_is_trusted_and_sni_has_no_trailing_dot() {
        let ca = Ca::new();
        let address = serve(ca.config(&["tool.example"], |_| {})).await;
        let stream = handshake(&client(&ca), address, "tool.example.").await.unwrap();
        assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"http/1.1"[..]));
        assert_eq!(stream.get_ref().1.protocol_version(), Some(ProtocolVersion::TLSv1_3));
        assert_eq!(text(stream).await, "hi tool.example");
    }

    #[tokio::test]
    async fn a_server_of_tls_1_2_is_spoken_to() {
        let ca = Ca::new();
        let address = serve(ca.config_for(&[&rustls::version::TLS12], &["tool.example"], |_| {})).await;
        let stream = handshake(&client(&ca), address, "tool.example").await.unwrap();
        assert_eq!(stream.get_ref().1.protocol_version(), Some(ProtocolVersion::TLSv1_2));
    }

    #[tokio::test]
    async fn an_address_is_verified_by_its_own_san_and_sends_no_sni() {
        let ca = Ca::new();
        let address = serve(ca.config(&["127.0.0.1", "::1"], |_| {})).await;
        let client = client(&ca);
        assert_eq!(text(handshake(&client, address, "127.0.0.1").await.unwrap()).await, "hi none");
        assert_eq!(text(handshake(&client, address, "[::1]").await.unwrap()).await, "hi none");
        assert_eq!(what(handshake(&client, address, "127.0.0.2").await), "issued for another name");
    }

    #[tokio::test]
    async fn the_policys_server_name_stands_in_for_the_host() {
        let ca = Ca::new();
        let address = serve(ca.config(&["internal.example"], |_| {})).await;
        let system = Arc::new(SystemRoots::default());
        let client = ClientTls::new(system, [ca.pem()], Some("internal.example".into()), None);
        let stream = handshake(&client, address, "public.example").await.unwrap();
        assert_eq!(text(stream).await, "hi internal.example");
    }

    #[tokio::test]
    async fn what_is_wrong_with_a_certificate_is_said() {
        let ca = Ca::new();
        let client = client(&ca);
        let expired = serve(ca.config(&["tool.example"], |params| {
            params.not_before = date_time_ymd(2001, 1, 1);
            params.not_after = date_time_ymd(2002, 1, 1);
        }))
        .await;
        assert_eq!(what(handshake(&client, expired, "tool.example").await), "expired");
        let future = serve(ca.config(&["tool.example"], |params| {
            params.not_before = date_time_ymd(4000, 1, 1);
        }))
        .await;
        assert_eq!(what(handshake(&client, future, "tool.example").await), "not yet valid");
        let good = serve(ca.config(&["tool.example"], |_| {})).await;
        assert_eq!(what(handshake(&client, good, "other.example").await), "issued for another name");
        for stranger in [Ca::named("another CA"), Ca::new()] {
            let address = serve(stranger.config(&["tool.example"], |_| {})).await;
            assert_eq!(
                what(handshake(&client, address, "tool.example").await),
                "signed by an unknown issuer"
            );
        }
    }

    #[tokio::test]
    async fn the_second_handshake_resumes_the_session() {
        let ca = Ca::new();
        let address = serve(ca.config(&["tool.example"], |_| {})).await;
        let client = client(&ca);
        let mut kinds = Vec::new();
        for _ in 0..2 {
            let stream = handshake(&client, address, "tool.example").await.unwrap();
            kinds.push(stream.get_ref().1.handshake_kind());
            // The ticket comes after the handshake, with the first bytes.
            text(stream).await;
        }
        assert_eq!(kinds, [Some(HandshakeKind::Full), Some(HandshakeKind::Resumed)]);
    }

    #[tokio::test]
    async fn a_server_without_tls_fails_the_handshake() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            let (mut tcp, _) = listener.accept().await.unwrap();
            let _ = tcp.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
            let _ = tcp.read(&mut [0; 1024]).await;
        });
        let error = handshake(&client(&Ca::new()), address, "tool.example").await.unwrap_err();
        assert!(matches!(error, Error::TlsFailed(_)), "{error:?}");
    }

    #[tokio::test]
    async fn a_server_that_hangs_up_fails_the_handshake() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move { drop(listener.accept().await) });
        let error = handshake(&client(&Ca::new()), address, "tool.example").await.unwrap_err();
        assert!(matches!(error, Error::TlsFailed(_)), "{error:?}");
    }

    #[tokio::test]
    async fn an_unusable_extra_root_fails_the_handshake_and_says_so() {
        let ca = Ca::new();
        let address = serve(ca.config(&["tool.example"], |_| {})).await;
        let pem = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        let client = ClientTls::new(Arc::new(SystemRoots::default()), [Arc::from(&pem[..])], None, None);
        let Error::TlsFailed(cause) = handshake(&client, address, "tool.example").await.unwrap_err() else {
            panic!("another error")
        };
        assert!(cause.as_str().unwrap().starts_with("an extra root is unusable"), "{cause:?}");
    }

    #[test]
    fn there_are_roots_on_every_machine() {
        assert!(!SystemRoots::default().get().is_empty());
    }
}
