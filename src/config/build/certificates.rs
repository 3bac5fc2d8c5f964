//! The certificates and keys that a policy names, judged by what they are named for.
//!
//! A CA that has expired, a key of another certificate, a server's certificate among the roots: at a
//! handshake each of them is a failed call with a reason that points elsewhere, often hours after the
//! file was changed. Here it is told with the line that names the file.
//!
//! What certainly fails is an error. What a handshake may still get along with, as roots of which some
//! have expired or vouch for themselves alone, is a warning at most: such bundles are common.

use std::sync::Arc;

use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use x509_parser::parse_x509_certificate;
use x509_parser::prelude::X509Certificate;
use x509_parser::time::ASN1Time;

use super::Builder;
use crate::config::notation::{Flag, Switch};
use crate::config::problem::Path;
use crate::config::{ClientIdentity, OwnCa, SecretBytes, Tls, raw};

/// A key of the policy that names a file, with what it says.
type Setting<'a> = (&'static str, Option<&'a Switch<String>>);

impl Builder<'_> {
    pub(super) fn tls(&self, keys: &raw::Tls, path: &Path) -> Tls {
        Tls {
            ca_pem: self.ca_file(keys.ca_file.as_ref(), path),
            ca_dir: keys.ca_dir.as_ref().and_then(Switch::on).map(|dir| self.sources.directory(dir)),
            own_ca: self.own_ca(keys, path),
        }
    }

    /// Roots beside the system's.
    pub(super) fn ca_file(&self, file: Option<&String>, section: &Path) -> Option<Arc<[u8]>> {
        let (file, path) = (file?, section.key("ca_file"));
        let pem = self.report.check(&path, self.sources.certificates(file))?;
        for doubt in doubts_of_roots(&pem, ASN1Time::now()) {
            self.report.warning(&path, format!("{file}: {doubt}"));
        }
        Some(pem)
    }

    fn own_ca(&self, keys: &raw::Tls, section: &Path) -> Option<OwnCa> {
        let (cert, key) = (("ca_cert", keys.ca_cert.as_ref()), ("ca_key", keys.ca_key.as_ref()));
        let (cert_pem, key_pem) = self.pair(cert, key, section)?;
        for problem in problems_of_ca(&cert_pem, ASN1Time::now()) {
            self.report.error(&section.key("ca_cert"), problem);
        }
        Some(OwnCa { cert_pem, key_pem })
    }

    pub(super) fn client_identity(&self, keys: &raw::UpstreamTls, section: &Path) -> Option<ClientIdentity> {
        let cert = ("client_cert", keys.client_cert.as_ref());
        let key = ("client_key", keys.client_key.as_ref());
        let (cert_pem, key_pem) = self.pair(cert, key, section)?;
        // A warning: what an upstream takes is for it to say.
        if let Some(doubt) = doubt_of_validity(&cert_pem, ASN1Time::now()) {
            self.report.warning(&section.key("client_cert"), doubt);
        }
        Some(ClientIdentity { cert_pem, key_pem })
    }

    /// A certificate's file and its key's, if both are there and belong together.
    fn pair(&self, cert: Setting<'_>, key: Setting<'_>, section: &Path) -> Option<(Arc<[u8]>, SecretBytes)> {
        for ((own, own_value), (other, other_value)) in [(cert, key), (key, cert)] {
            if self.is_on(own_value, &section.key(own)) && !self.is_on(other_value, &section.key(other)) {
                self.report.error(&section.key(own), format!("expected `{other}` beside it"));
            }
        }
        let (cert_path, key_path) = (section.key(cert.0), section.key(key.0));
        let file = |(_, value): Setting<'_>| value.and_then(Switch::on).cloned();
        let cert_pem =
            file(cert).and_then(|file| self.report.check(&cert_path, self.sources.certificates(&file)));
        let key_pem =
            file(key).and_then(|file| self.report.check(&key_path, self.sources.private_key(&file)));
        // Both are read before either is missed, so that both are told.
        let (cert_pem, key_pem) = (cert_pem?, key_pem?);
        match belong_together(&cert_pem, &key_pem) {
            Ok(()) => Some((cert_pem, key_pem)),
            Err(rustls::Error::InconsistentKeys(_)) => {
                self.report.error(&key_path, format!("not the key of the first certificate in `{}`", cert.0));
                None
            }
            Err(rustls::Error::InvalidCertificate(_)) => {
                self.report.error(&cert_path, "the first certificate in the file cannot be read");
                None
            }
            Err(_) => {
                self.report.error(&key_path, "expected an RSA, ECDSA (P-256, P-384) or Ed25519 key");
                None
            }
        }
    }

    /// Interception without a CA that the agent can trust breaks every call.
    pub(super) fn judge_interception(
        &self,
        tls: &raw::Tls,
        defaults: &raw::Defaults,
        named: &[(String, raw::Upstream)],
    ) {
        let section = Path::of(["tls"]);
        let is_on = |key: &str, value: &Option<Switch<String>>| self.is_on(value.as_ref(), &section.key(key));
        if is_on("ca_dir", &tls.ca_dir) || is_on("ca_cert", &tls.ca_cert) || is_on("ca_key", &tls.ca_key) {
            return;
        }
        let judge = |intercept: Option<Flag>, section: Path| {
            if intercept == Some(Flag(true)) {
                let message = "clients could not trust the certificates: set tls.ca_dir, or tls.ca_cert and \
                               tls.ca_key";
                self.report.error(&section.key("intercept"), message);
            }
        };
        judge(defaults.intercept, Path::of(["defaults"]));
        for (name, keys) in named {
            judge(keys.intercept, Path::of(["upstreams", name]));
        }
    }

    /// Whether the file sets the key to something but `off`, be it wrong: then that has been told.
    fn is_on(&self, value: Option<&Switch<String>>, path: &Path) -> bool {
        value.map_or_else(|| self.report.is_written(path), |switch| switch.on().is_some())
    }
}

/// Checks the key against the first certificate, as every TLS stack will.
fn belong_together(cert_pem: &[u8], key_pem: &SecretBytes) -> Result<(), rustls::Error> {
    let chain = certificates(cert_pem).collect();
    let key = PrivateKeyDer::from_pem_slice(key_pem.as_bytes())
        .map_err(|error| rustls::Error::General(error.to_string()))?;
    CertifiedKey::from_der(chain, key, &ring::default_provider()).map(drop)
}

/// Why the first certificate cannot sign others now.
fn problems_of_ca(pem: &[u8], now: ASN1Time) -> Vec<String> {
    let Some(der) = certificates(pem).next() else { return Vec::new() };
    let Ok((_, certificate)) = parse_x509_certificate(&der) else {
        return vec!["the first certificate in the file cannot be read".into()];
    };
    let mut problems = Vec::new();
    if !certificate.is_ca() {
        problems.push("expected the certificate of a CA (basicConstraints with CA:TRUE)".to_owned());
    }
    let may_sign = match certificate.key_usage() {
        Ok(usage) => usage.is_none_or(|usage| usage.value.key_cert_sign()),
        Err(_) => false,
    };
    if !may_sign {
        problems.push("expected a CA that may sign certificates: its keyUsage lacks keyCertSign".into());
    }
    let validity = certificate.validity();
    if validity.not_after < now {
        problems.push(format!("expected a valid CA; it expired on {}", date(validity.not_after)));
    }
    if validity.not_before > now {
        problems.push(format!("expected a valid CA; it begins on {}", date(validity.not_before)));
    }
    problems
}

/// Why most upstreams will not take the first certificate now.
fn doubt_of_validity(pem: &[u8], now: ASN1Time) -> Option<String> {
    let der = certificates(pem).next()?;
    let (_, certificate) = parse_x509_certificate(&der).ok()?;
    let validity = certificate.validity();
    if validity.not_after < now {
        return Some(format!("the certificate expired on {}", date(validity.not_after)));
    }
    (validity.not_before > now).then(|| format!("the certificate begins on {}", date(validity.not_before)))
}

/// What looks wrong with a file of roots.
fn doubts_of_roots(pem: &[u8], now: ASN1Time) -> Vec<String> {
    let ders: Vec<_> = certificates(pem).collect();
    let parsed: Vec<X509Certificate<'_>> =
        ders.iter().filter_map(|der| parse_x509_certificate(der).ok()).map(|(_, parsed)| parsed).collect();
    let mut doubts = Vec::new();
    if parsed.len() < ders.len() {
        doubts.push("a certificate in it cannot be read".to_owned());
    }
    if !parsed.is_empty() && parsed.iter().all(|root| root.validity().not_after < now) {
        doubts.push("every certificate in it has expired".into());
    }
    if let Some(leaf) = parsed.iter().find(|root| !root.is_ca()) {
        doubts.push(format!("a certificate in it is no CA: {}", leaf.subject()));
    }
    doubts
}

/// The certificates of a file that was found to be valid PEM.
fn certificates(pem: &[u8]) -> impl Iterator<Item = CertificateDer<'static>> {
    CertificateDer::pem_slice_iter(pem).filter_map(Result::ok)
}

fn date(time: ASN1Time) -> time::Date {
    time.to_datetime().date()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, KeyPair, KeyUsagePurpose, date_time_ymd};
    use tempfile::TempDir;

    use crate::config::{Config, parse};

    const IDENTITIES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/config/identities");

    /// A folder with `NAME.pem` and `NAME-key.pem` for each of `names`, all CAs that `change` may spoil.
    fn folder(names: &[&str], change: impl Fn(&str, &mut CertificateParams)) -> TempDir {
        let dir = tempfile::tempdir().unwrap();
        for name in names {
            let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
            params.distinguished_name.push(DnType::CommonName, format!("the {name} one"));
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            change(name, &mut params);
            let key = KeyPair::generate().unwrap();
            let certificate = params.self_signed(&key).unwrap();
            fs::write(dir.path().join(format!("{name}.pem")), certificate.pem()).unwrap();
            fs::write(dir.path().join(format!("{name}-key.pem")), key.serialize_pem()).unwrap();
        }
        dir
    }

    fn config(dir: &std::path::Path, text: &str) -> Config {
        let loaded = parse(text, dir).unwrap_or_else(|problems| panic!("{problems}"));
        assert_eq!(loaded.warnings.to_string(), "");
        loaded.config
    }

    fn refused(dir: &TempDir, text: &str) -> Vec<String> {
        parse(text, dir.path()).unwrap_err().iter().map(ToString::to_string).collect()
    }

    #[test]
    fn an_own_ca_is_taken_and_its_key_never_shown() {
        let dir = folder(&["ca"], |_, params| params.key_usages = vec![KeyUsagePurpose::KeyCertSign]);
        let config =
            config(dir.path(), "tls: { ca_cert: ca.pem, ca_key: ca-key.pem }\ndefaults: { intercept: true }");
        let own = config.tls.own_ca.as_ref().unwrap();
        assert_eq!(*own.cert_pem, *fs::read(dir.path().join("ca.pem")).unwrap());
        assert_eq!(own.key_pem.as_bytes(), fs::read(dir.path().join("ca-key.pem")).unwrap());
        assert_eq!(format!("{:?}", own.key_pem), "[secret]");
        let shown = config.effective();
        assert_eq!(shown["tls"], serde_json::json!({ "ca_cert": "[certificates]", "ca_key": "[secret]" }));
    }

    #[test]
    fn what_keeps_an_own_ca_from_signing_is_told() {
        let dir = folder(&["good", "leaf", "mute", "old", "new"], |name, params| match name {
            "leaf" => params.is_ca = IsCa::ExplicitNoCa,
            "mute" => params.key_usages = vec![KeyUsagePurpose::CrlSign],
            "old" => params.not_after = date_time_ymd(2002, 3, 4),
            "new" => params.not_before = date_time_ymd(4000, 1, 2),
            _ => {}
        });
        let problems = |cert: &str, key: &str| {
            refused(&dir, &format!("tls:\n  ca_key: {key}-key.pem\n  ca_cert: {cert}.pem\n"))
        };
        let of_cert = |message: &str| vec![format!("3:12: tls.ca_cert: {message}")];
        assert_eq!(
            problems("leaf", "leaf"),
            of_cert("expected the certificate of a CA (basicConstraints with CA:TRUE)")
        );
        assert_eq!(
            problems("mute", "mute"),
            of_cert("expected a CA that may sign certificates: its keyUsage lacks keyCertSign")
        );
        assert_eq!(problems("old", "old"), of_cert("expected a valid CA; it expired on 2002-03-04"));
        assert_eq!(problems("new", "new"), of_cert("expected a valid CA; it begins on 4000-01-02"));
        assert_eq!(
            problems("good", "old"),
            ["2:11: tls.ca_key: not the key of the first certificate in `ca_cert`"]
        );
    }

    #[test]
    fn a_client_certificate_is_taken_with_each_form_of_key() {
        for file in ["sec1.pem", "pkcs1.pem"] {
            let text = format!(
                "upstreams: {{ a: {{ hosts: [a], tls: {{ client_cert: {file}, client_key: {file} }} }} }}"
            );
            assert!(config(IDENTITIES.as_ref(), &text).upstreams[0].tls.client.is_some(), "{file}");
        }
        let dir = folder(&["a"], |_, params| params.is_ca = IsCa::NoCa);
        let text = "upstreams: { a: { hosts: [a], tls: { client_cert: a.pem, client_key: a-key.pem } } }";
        assert!(config(dir.path(), text).upstreams[0].tls.client.is_some());
    }

    #[test]
    fn a_client_certificate_that_is_not_valid_now_is_a_warning() {
        let dir = folder(&["good", "old", "new"], |name, params| match name {
            "old" => params.not_after = date_time_ymd(2002, 3, 4),
            "new" => params.not_before = date_time_ymd(4000, 1, 2),
            _ => {}
        });
        for (name, expected) in [
            ("good", ""),
            ("old", "4:25: warning: upstreams.a.tls.client_cert: the certificate expired on 2002-03-04"),
            ("new", "4:25: warning: upstreams.a.tls.client_cert: the certificate begins on 4000-01-02"),
        ] {
            let tls = format!("{{ client_cert: {name}.pem, client_key: {name}-key.pem }}");
            let text = format!("upstreams:\n  a:\n    hosts: [a]\n    tls: {tls}\n");
            let loaded = parse(&text, dir.path()).unwrap_or_else(|problems| panic!("{problems}"));
            let told: Vec<String> = loaded.warnings.iter().map(ToString::to_string).collect();
            assert_eq!(told.concat(), expected);
        }
    }

    #[test]
    fn a_client_certificate_without_its_own_key_is_refused() {
        let dir = folder(&["a", "b"], |_, _| {});
        fs::write(
            dir.path().join("broken.pem"),
            "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
        )
        .unwrap();
        let problems =
            |tls: &str| refused(&dir, &format!("upstreams:\n  a:\n    hosts: [a]\n    tls: {tls}\n"));
        let path = "upstreams.a.tls";
        for (tls, expected) in [
            ("{ client_cert: a.pem }", format!("4:25: {path}.client_cert: expected `client_key` beside it")),
            (
                "{ client_key: a-key.pem }",
                format!("4:24: {path}.client_key: expected `client_cert` beside it"),
            ),
            (
                "{ client_cert: a.pem, client_key: b-key.pem }",
                format!("4:44: {path}.client_key: not the key of the first certificate in `client_cert`"),
            ),
            (
                "{ client_cert: a.pem, client_key: broken.pem }",
                format!("4:44: {path}.client_key: expected an RSA, ECDSA (P-256, P-384) or Ed25519 key"),
            ),
            (
                "{ client_cert: a.pem, client_key: a.pem }",
                format!(
                    "4:44: {path}.client_key: the file holds no unencrypted PEM private key (PKCS#8, SEC1 or PKCS#1)"
                ),
            ),
        ] {
            assert_eq!(problems(tls), [expected]);
        }
    }

    #[test]
    fn a_key_beside_its_certificate_in_one_file_is_neither_shown_nor_hashed() {
        let dir = folder(&["a"], |_, _| {});
        let read = |name: &str| fs::read_to_string(dir.path().join(name)).unwrap();
        let (cert, key) = (read("a.pem"), read("a-key.pem"));
        let text = "upstreams: { a: { hosts: [a], tls: { client_cert: both.pem, client_key: both.pem } } }";
        let with = |both: String| {
            fs::write(dir.path().join("both.pem"), both).unwrap();
            config(dir.path(), text)
        };
        let first = with(format!("{key}{cert}"));
        assert_eq!(*first.upstreams[0].tls.client.as_ref().unwrap().cert_pem, *cert.as_bytes());
        // The same key in other words.
        let second = with(format!("{cert}one more line\n{key}"));
        assert_eq!(second.hash, first.hash);
    }

    #[test]
    fn roots_that_look_wrong_are_warned_of_and_used() {
        let dir = folder(&["old", "good", "leaf"], |name, params| match name {
            "old" => params.not_after = date_time_ymd(2002, 1, 1),
            "leaf" => params.is_ca = IsCa::ExplicitNoCa,
            _ => {}
        });
        let read = |name: &str| fs::read_to_string(dir.path().join(name)).unwrap();
        fs::write(dir.path().join("mixed.pem"), read("old.pem") + &read("good.pem")).unwrap();
        let text = "tls: { ca_file: old.pem }
upstreams:
  a: { hosts: [a], tls: { ca_file: leaf.pem } }
  b: { hosts: [b], tls: { ca_file: mixed.pem } }";
        let loaded = parse(text, dir.path()).unwrap();
        let warnings: Vec<_> = loaded.warnings.iter().map(ToString::to_string).collect();
        assert_eq!(
            warnings,
            [
                "1:17: warning: tls.ca_file: old.pem: every certificate in it has expired",
                "3:36: warning: upstreams.a.tls.ca_file: leaf.pem: a certificate in it is no CA: CN=the leaf one",
            ]
        );
        assert!(loaded.config.tls.ca_pem.is_some() && loaded.config.upstreams[0].tls.ca_pem.is_some());
    }
}
