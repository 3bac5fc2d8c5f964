//! A server certificate for each host that is intercepted, minted when first asked for.
//!
//! All leaves share one key, made at start: making one costs as much as signing, and whoever reads one
//! key of this process reads them all. They live a day and are minted anew at half of it, so that a
//! connection that was just accepted has hours left. The cache is bounded, and threads that ask for one
//! host at the same time mint once; the others wait the fraction of a millisecond that this takes. Each leaf
//! names its host exactly: a wildcard would stand for hosts of another policy too.
//!
//! Validity goes by the wall clock, since it is the clients' measure: an entry's age in the cache would
//! not see a clock that was set, or a machine that slept.
//!
//! Tickets are good at the host that gave them and while its leaf lives. One ticket key for all hosts
//! would rest on rustls comparing SNI, and a client that dials an address sends none.

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
        let name = alternative_name(host)?;
        let entry = self.minted.entry_by_ref(host).or_insert_with_if(|| self.mint(host, name, now), stale);
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

    fn mint(&self, host: &str, name: SanType, now: OffsetDateTime) -> Result<Leaf, Error> {
        let end = self.ca.not_after().min(now + self.life);
        if end <= now {
            return Err(Error::Internal("the certificate authority has expired".into()));
        }
        let params = params(host, name, now - BACKDATED..end)?;
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
fn params(host: &str, name: SanType, validity: Range<OffsetDateTime>) -> Result<CertificateParams, Error> {
    let mut params = CertificateParams::default();
    params.serial_number = Some(serial()?);
    params.not_before = validity.start;
    params.not_after = validity.end;
    params.subject_alt_names = vec![name];
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

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::process::Command;
    use std::sync::Barrier;
    use std::thread;

    use rcgen::{BasicConstraints, KeyPair};
    use rustls::pki_types::pem::PemObject;
    use rustls::server::ServerConnection;
    use rustls::{CertificateError, ClientConfig, ClientConnection, HandshakeKind, RootCertStore};
    use x509_parser::extensions::GeneralName;
    use x509_parser::prelude::{FromDer, ParsedExtension, X509Certificate};

    use super::*;
    use crate::tls::ca::to_pem;

    /// 80 characters.
    const LONG: &str = "a-name-that-is-longer-than-a-common-name-may-be.and-still-is-a.good-name.example";

    fn leaves() -> Leaves {
        Leaves::new(CertificateAuthority::generate().unwrap()).unwrap()
    }

    /// An authority as files give it, changed by `change` before it signs itself.
    fn given(change: impl FnOnce(&mut CertificateParams)) -> CertificateAuthority {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        change(&mut params);
        let key = KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap();
        CertificateAuthority::from_pem(certificate.pem().as_bytes(), key.serialize_pem().as_bytes()).unwrap()
    }

    /// A client that trusts the authority alone and offers `protocols`.
    fn client(leaves: &Leaves, protocols: &[&str]) -> Arc<ClientConfig> {
        client_of(rustls::DEFAULT_VERSIONS, leaves, protocols)
    }

    fn client_of(
        versions: &[&'static rustls::SupportedProtocolVersion],
        leaves: &Leaves,
        protocols: &[&str],
    ) -> Arc<ClientConfig> {
        let mut roots = RootCertStore::empty();
        for root in CertificateDer::pem_slice_iter(leaves.ca_pem().as_bytes()) {
            roots.add(root.unwrap()).unwrap();
        }
        let mut config = ClientConfig::builder_with_provider(leaves.provider.clone())
            .with_protocol_versions(versions)
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = protocols.iter().map(|protocol| protocol.as_bytes().to_vec()).collect();
        Arc::new(config)
    }

    /// Both ends after their handshake and the tickets, without a socket.
    fn handshake(
        client: &Arc<ClientConfig>,
        server: Arc<ServerConfig>,
        host: &str,
    ) -> Result<(ClientConnection, ServerConnection), rustls::Error> {
        let name = ServerName::try_from(host.to_owned()).unwrap();
        let mut client = ClientConnection::new(client.clone(), name).unwrap();
        let mut server = ServerConnection::new(server).unwrap();
        while client.wants_write() || server.wants_write() {
            let mut bytes = Vec::new();
            while client.wants_write() {
                client.write_tls(&mut bytes).unwrap();
            }
            let mut rest = &bytes[..];
            while !rest.is_empty() {
                server.read_tls(&mut rest).unwrap();
                server.process_new_packets()?;
            }
            bytes.clear();
            while server.wants_write() {
                server.write_tls(&mut bytes).unwrap();
            }
            let mut rest = &bytes[..];
            while !rest.is_empty() {
                client.read_tls(&mut rest).unwrap();
                client.process_new_packets()?;
            }
        }
        Ok((client, server))
    }

    /// The chain that a client gets and accepts for `host`.
    fn served(leaves: &Leaves, host: &str) -> Vec<CertificateDer<'static>> {
        let (client, _) = handshake(&client(leaves, &[]), leaves.config_for(host).unwrap(), host).unwrap();
        client.peer_certificates().unwrap().to_vec()
    }

    fn parse<'a>(certificate: &'a CertificateDer<'_>) -> X509Certificate<'a> {
        X509Certificate::from_der(certificate).unwrap().1
    }

    /// The subject's and the authority's key identifier.
    fn key_identifiers(certificate: &X509Certificate<'_>) -> (Option<Vec<u8>>, Option<Vec<u8>>) {
        let mut found = (None, None);
        for extension in certificate.extensions() {
            match extension.parsed_extension() {
                ParsedExtension::SubjectKeyIdentifier(id) => found.0 = Some(id.0.to_vec()),
                ParsedExtension::AuthorityKeyIdentifier(id) => {
                    found.1 = id.key_identifier.as_ref().map(|id| id.0.to_vec());
                }
                _ => {}
            }
        }
        found
    }

    #[test]
    fn a_leaf_has_what_the_strictest_clients_ask_for() {
        let leaves = leaves();
        let before = OffsetDateTime::now_utc() - Duration::seconds(1);
        let chain = served(&leaves, "tool.example");
        let after = OffsetDateTime::now_utc();
        assert_eq!(chain.len(), 1, "a root is not sent");
        let leaf = parse(&chain[0]);
        let ca = CertificateDer::from_pem_slice(leaves.ca_pem().as_bytes()).unwrap();
        let ca = parse(&ca);

        assert_eq!(leaf.subject().to_string(), "CN=tool.example");
        let names = leaf.subject_alternative_name().unwrap().unwrap();
        assert!(!names.critical);
        assert_eq!(names.value.general_names, [GeneralName::DNSName("tool.example")]);

        let (subject, authority) = key_identifiers(&leaf);
        assert_eq!(subject.unwrap().len(), 20);
        assert_eq!(authority, key_identifiers(&ca).0);
        assert!(authority.is_some());
        assert_ne!(leaf.public_key().raw, ca.public_key().raw);
        assert_eq!(leaf.public_key().parsed().unwrap().key_size(), 256);

        let constraints = leaf.basic_constraints().unwrap().unwrap();
        assert!(!constraints.value.ca && constraints.value.path_len_constraint.is_none());
        let usage = leaf.key_usage().unwrap().unwrap();
        assert!(usage.critical);
        assert_eq!(usage.value.to_string(), "Digital Signature");
        let extended = leaf.extended_key_usage().unwrap().unwrap().value;
        assert!(extended.server_auth && !extended.client_auth && !extended.any && extended.other.is_empty());

        assert_eq!(leaf.raw_serial().len(), 16);
        assert_eq!(leaf.raw_serial()[0] & 0xc0, 0x40);
        let (start, end) =
            (leaf.validity().not_before.to_datetime(), leaf.validity().not_after.to_datetime());
        assert!((before - Duration::hours(2)..after - Duration::hours(2)).contains(&start), "{start}");
        assert!((before + Duration::hours(24)..after + Duration::hours(24)).contains(&end), "{end}");
    }

    #[test]
    fn a_name_too_long_for_a_subject_stands_in_a_critical_alternative_name_alone() {
        let leaves = leaves();
        let chain = served(&leaves, LONG);
        let leaf = parse(&chain[0]);
        assert_eq!(leaf.subject().iter().count(), 0);
        let names = leaf.subject_alternative_name().unwrap().unwrap();
        assert!(names.critical);
        assert_eq!(names.value.general_names, [GeneralName::DNSName(LONG)]);

        let longest = &LONG[LONG.len() - 64..];
        assert_eq!(parse(&served(&leaves, longest)[0]).subject().to_string(), format!("CN={longest}"));
        let too_long = &LONG[LONG.len() - 65..];
        assert_eq!(parse(&served(&leaves, too_long)[0]).subject().to_string(), "");
    }

    #[test]
    fn an_address_is_named_as_an_address() {
        let leaves = leaves();
        for (host, octets) in
            [("127.0.0.1", &[127, 0, 0, 1][..]), ("::1", &[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1])]
        {
            let chain = served(&leaves, host);
            let leaf = parse(&chain[0]);
            assert_eq!(leaf.subject().to_string(), format!("CN={host}"));
            let names = leaf.subject_alternative_name().unwrap().unwrap();
            assert_eq!(names.value.general_names, [GeneralName::IPAddress(octets)]);
        }
        let with_brackets = leaves.config_for("[::1]").unwrap();
        assert!(Arc::ptr_eq(&with_brackets, &leaves.config_for("::1").unwrap()));
    }

    #[test]
    fn what_is_no_name_gets_no_certificate_and_no_place() {
        let leaves = leaves();
        for host in
            ["", "a b", "*.example", "a..b", "fe80::1%eth0", "[tool.example", "1.2.3", &"x".repeat(64)]
        {
            let refused = leaves.config_for(host).unwrap_err();
            assert_eq!(refused, Error::InvalidRequest("no certificate can be for this host"), "{host}");
        }
        assert!(leaves.is_empty());
    }

    #[test]
    fn a_leaf_is_kept_for_half_its_life() {
        // C046: leaves of three seconds, asked for at 0 s and 4 s.
        let leaves = Leaves::living(CertificateAuthority::generate().unwrap(), Duration::seconds(3)).unwrap();
        let start = OffsetDateTime::now_utc();
        let at = |seconds| leaves.config_at("tool.example", start + Duration::seconds(seconds)).unwrap();
        let first = at(0);
        assert!(Arc::ptr_eq(&first, &at(1)));
        let second = at(2);
        assert!(!Arc::ptr_eq(&first, &second));
        assert!(!Arc::ptr_eq(&second, &at(4)));
        assert_eq!(leaves.len(), 1);
    }

    #[test]
    fn a_new_leaf_outlives_the_one_it_replaces() {
        let leaves =
            Leaves::living(CertificateAuthority::generate().unwrap(), Duration::seconds(30)).unwrap();
        let now = OffsetDateTime::now_utc();
        let ends = [0, 40].map(|seconds| {
            let server = leaves.config_at("tool.example", now + Duration::seconds(seconds)).unwrap();
            let (client, _) = handshake(&client(&leaves, &[]), server, "tool.example").unwrap();
            parse(&client.peer_certificates().unwrap()[0]).validity().not_after.to_datetime()
        });
        assert_eq!(ends[1] - ends[0], Duration::seconds(40));
    }

    #[test]
    fn a_clock_that_is_set_back_gets_a_leaf_that_has_begun() {
        let leaves = leaves();
        let now = OffsetDateTime::now_utc();
        let first = leaves.config_at("tool.example", now).unwrap();
        let soon_before = leaves.config_at("tool.example", now - Duration::HOUR).unwrap();
        assert!(Arc::ptr_eq(&first, &soon_before));
        let long_before = leaves.config_at("tool.example", now - Duration::DAY).unwrap();
        assert!(!Arc::ptr_eq(&first, &long_before));
    }

    #[test]
    fn a_leaf_never_outlives_its_authority() {
        let now = OffsetDateTime::now_utc().replace_nanosecond(0).unwrap();
        let end = now + Duration::HOUR;
        let leaves = Leaves::new(given(|params| params.not_after = end)).unwrap();
        let chain = served(&leaves, "tool.example");
        assert_eq!(parse(&chain[0]).validity().not_after.to_datetime(), end);

        let last = end - Duration::SECOND;
        assert!(Arc::ptr_eq(
            &leaves.config_for("tool.example").unwrap(),
            &leaves.config_at("tool.example", last).unwrap()
        ));
        let expired = leaves.config_at("tool.example", end).unwrap_err();
        assert_eq!(expired.cause(), Some("the certificate authority has expired"));
    }

    #[test]
    fn threads_that_ask_for_one_host_get_one_leaf() {
        let leaves = leaves();
        for round in 0..20 {
            let host = format!("{round}.example");
            let start = Barrier::new(4);
            let ask = || {
                start.wait();
                leaves.config_for(&host).unwrap()
            };
            let configs = thread::scope(|scope| {
                let threads = [(); 4].map(|()| scope.spawn(ask));
                threads.map(|thread| thread.join().unwrap())
            });
            assert!(configs.iter().all(|config| Arc::ptr_eq(config, &configs[0])));
        }
        assert_eq!(leaves.len(), 20);
    }

    #[test]
    fn the_number_of_leaves_is_bounded_and_the_newest_stay() {
        let leaves = leaves();
        let config = |number: u64| leaves.config_for(&format!("{number}.example")).unwrap();
        for number in 0..HOSTS {
            config(number);
        }
        let newest = config(HOSTS);
        assert_eq!(leaves.len(), HOSTS);
        assert!(Arc::ptr_eq(&newest, &config(HOSTS)));
    }

    #[test]
    fn the_protocol_is_h2_where_the_client_knows_it() {
        let leaves = leaves();
        let chosen = |protocols: &[&str]| {
            let server = leaves.config_for("tool.example").unwrap();
            let (client, _) = handshake(&client(&leaves, protocols), server, "tool.example")?;
            Ok(client.alpn_protocol().map(|protocol| String::from_utf8(protocol.to_vec()).unwrap()))
        };
        assert_eq!(chosen(&["http/1.1", "h2"]), Ok(Some("h2".into())));
        assert_eq!(chosen(&["http/1.1"]), Ok(Some("http/1.1".into())));
        assert_eq!(chosen(&[]), Ok(None));
        assert_eq!(chosen(&["spdy/3"]), Err(rustls::Error::NoApplicationProtocol));
    }

    #[test]
    fn both_versions_are_spoken_and_resumed() {
        let leaves = leaves();
        for version in [&rustls::version::TLS12, &rustls::version::TLS13] {
            let client = client_of(&[version], &leaves, &[]);
            let kinds = [(); 2].map(|()| {
                let server = leaves.config_for("tool.example").unwrap();
                let (client, server) = handshake(&client, server, "tool.example").unwrap();
                assert_eq!(client.protocol_version(), Some(version.version));
                server.handshake_kind()
            });
            assert_eq!(kinds, [Some(HandshakeKind::Full), Some(HandshakeKind::Resumed)]);
        }
    }

    #[test]
    fn a_ticket_is_no_good_at_another_address() {
        let leaves = leaves();
        let client = client(&leaves, &[]);
        let [one, other] = ["127.0.0.1", "127.0.0.2"].map(|host| leaves.config_for(host).unwrap());
        handshake(&client, one, "127.0.0.1").unwrap();
        // The client takes the other for the one and shows its ticket.
        let refused = handshake(&client, other, "127.0.0.1").unwrap_err();
        assert!(
            matches!(
                refused,
                rustls::Error::InvalidCertificate(CertificateError::NotValidForNameContext { .. })
            ),
            "{refused:?}"
        );
    }

    fn openssl(directory: &Path, arguments: &[&str]) -> String {
        let output = Command::new("openssl").current_dir(directory).args(arguments).output().unwrap();
        let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        assert!(output.status.success(), "openssl {arguments:?}: {text}");
        text
    }

    /// Has `openssl verify` judge what `leaves` serves for `host`.
    fn verify(directory: &Path, leaves: &Leaves, host: &str) {
        let chain: Vec<String> = served(leaves, host).iter().map(to_pem).collect();
        // OpenSSL wants a certificate in each file that it is told of.
        std::fs::write(directory.join("chain.pem"), chain.concat()).unwrap();
        std::fs::write(directory.join("trusted.pem"), leaves.ca_pem()).unwrap();
        let kind = if host.parse::<IpAddr>().is_ok() { "-verify_ip" } else { "-verify_hostname" };
        let arguments = ["verify", "-x509_strict", "-purpose", "sslserver", kind, host];
        let files = ["-CAfile", "trusted.pem", "-untrusted", "chain.pem", "chain.pem"];
        assert_eq!(openssl(directory, &[&arguments[..], &files].concat()), "chain.pem: OK\n");
    }

    #[test]
    fn openssl_verifies_strictly_what_the_own_authority_signs() {
        let directory = tempfile::tempdir().unwrap();
        let leaves = leaves();
        for host in ["tool.example", LONG, "127.0.0.1", "2001:db8::1"] {
            verify(directory.path(), &leaves, host);
        }
    }

    #[test]
    fn openssl_verifies_strictly_what_each_kind_of_given_authority_signs() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        for key in [
            &["ecparam", "-genkey", "-noout", "-name", "prime256v1"][..],
            &["ecparam", "-genkey", "-noout", "-name", "secp384r1"],
            &["genpkey", "-algorithm", "ed25519"],
            &["genrsa", "-traditional", "2048"],
            &["genrsa", "2048"],
        ] {
            openssl(directory, &[&key[..1], &["-out", "key.pem"], &key[1..]].concat());
            let request = ["req", "-x509", "-key", "key.pem", "-out", "ca.pem", "-days", "2"];
            let subject = ["-subj", "/C=DE/O=A company/OU=Proxies/CN=Company CA"];
            let usage = ["-addext", "keyUsage=critical,keyCertSign"];
            openssl(directory, &[&request[..], &subject, &usage].concat());
            let [cert, key] = ["ca.pem", "key.pem"].map(|file| std::fs::read(directory.join(file)).unwrap());
            let leaves = Leaves::new(CertificateAuthority::from_pem(&cert, &key).unwrap()).unwrap();
            verify(directory, &leaves, "tool.example");
        }
    }
}
