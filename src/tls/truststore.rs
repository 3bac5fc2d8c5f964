//! A PKCS#12 file of trusted certificates, as Java reads it (RFC 7292).
//!
//! Java trusts a certificate bag only when it bears Oracle's attribute `trustedKeyUsage`, else the file opens
//! as an empty store; `openssl pkcs12` cannot write it. The bags are not encrypted: they are public, and the
//! password serves the integrity check alone. That leaves some nested sequences and one hash. The crate for
//! such files, `p12-keystore`, would bring some forty others, two of them pre-releases, for the ciphers
//! that this file does without.

use ring::digest::{self, SHA256, SHA256_OUTPUT_LEN};
use ring::hmac;
use ring::rand::{SecureRandom, SystemRandom};
use rustls::pki_types::CertificateDer;
use yasna::models::ObjectIdentifier;
use yasna::{DERWriter, Tag, construct_der};

/// What Java's own stores have, and what everybody tries first.
const PASSWORD: &str = "changeit";

/// Each certificate in `entries` under its alias. Java folds aliases to lower case; they must differ.
pub(super) fn pkcs12<'a>(entries: impl Iterator<Item = (String, &'a CertificateDer<'a>)>) -> Vec<u8> {
    let bags = construct_der(|writer| {
        writer.write_sequence_of(|writer| {
            for (alias, certificate) in entries {
                bag(writer.next(), &alias, certificate);
            }
        });
    });
    let safes = construct_der(|writer| writer.write_sequence_of(|writer| data(writer.next(), &bags)));
    construct_der(|writer| {
        writer.write_sequence(|writer| {
            writer.next().write_u8(3);
            data(writer.next(), &safes);
            mac(writer.next(), &safes);
        });
    })
}

/// `ContentInfo` of the type `data`: RFC 5652 sections 3 and 4.
fn data(writer: DERWriter<'_>, content: &[u8]) {
    writer.write_sequence(|writer| {
        writer.next().write_oid(&oid(&[1, 2, 840, 113549, 1, 7, 1]));
        writer.next().write_tagged(Tag::context(0), |writer| writer.write_bytes(content));
    });
}

/// `SafeBag` with an X.509 certificate: RFC 7292 section 4.2.3.
fn bag(writer: DERWriter<'_>, alias: &str, certificate: &CertificateDer<'_>) {
    writer.write_sequence(|writer| {
        writer.next().write_oid(&oid(&[1, 2, 840, 113549, 1, 12, 10, 1, 3]));
        writer.next().write_tagged(Tag::context(0), |writer| {
            writer.write_sequence(|writer| {
                writer.next().write_oid(&oid(&[1, 2, 840, 113549, 1, 9, 22, 1]));
                writer.next().write_tagged(Tag::context(0), |writer| writer.write_bytes(certificate));
            });
        });
        writer.next().write_set_of(|writer| {
            // friendlyName
            attribute(writer.next(), &[1, 2, 840, 113549, 1, 9, 20], |value| value.write_bmp_string(alias));
            // trustedKeyUsage: anyExtendedKeyUsage
            attribute(writer.next(), &[2, 16, 840, 1, 113894, 746875, 1, 1], |value| {
                value.write_oid(&oid(&[2, 5, 29, 37, 0]));
            });
        });
    });
}

fn attribute(writer: DERWriter<'_>, name: &[u64], value: impl FnOnce(DERWriter<'_>)) {
    writer.write_sequence(|writer| {
        writer.next().write_oid(&oid(name));
        writer.next().write_set_of(|writer| value(writer.next()));
    });
}

/// `MacData`: RFC 7292 section 4. Readers can do without, but BouncyCastle then refuses the password.
fn mac(writer: DERWriter<'_>, content: &[u8]) {
    let mut salt = [0; 16];
    // It need not be secret, nor even new, where the password is public.
    let _ = SystemRandom::new().fill(&mut salt);
    let key = hmac::Key::new(hmac::HMAC_SHA256, &mac_key(PASSWORD, &salt));
    writer.write_sequence(|writer| {
        writer.next().write_sequence(|writer| {
            writer.next().write_sequence(|writer| {
                writer.next().write_oid(&oid(&[2, 16, 840, 1, 101, 3, 4, 2, 1]));
                writer.next().write_null();
            });
            writer.next().write_bytes(hmac::sign(&key, content).as_ref());
        });
        writer.next().write_bytes(&salt);
    });
}

/// RFC 7292 appendix B.2 with SHA-256, for a key of one hash's length, where steps 6 B and C fall away. One
/// iteration, the default that DER leaves out: more would slow down a search for a password that is known.
fn mac_key(password: &str, salt: &[u8]) -> [u8; SHA256_OUTPUT_LEN] {
    /// The hash's block, `v` in bytes.
    const BLOCK: usize = 64;
    /// The diversifier of a MAC's key, appendix B.3.
    const MAC: [u8; BLOCK] = [3; BLOCK];
    let password: Vec<u8> = password.encode_utf16().chain([0]).flat_map(u16::to_be_bytes).collect();
    let filled = |part: &[u8]| {
        part.iter().copied().cycle().take(part.len().next_multiple_of(BLOCK)).collect::<Vec<_>>()
    };
    let seed = [&MAC[..], &filled(salt), &filled(&password)].concat();
    let hash = digest::digest(&SHA256, &seed);
    hash.as_ref().try_into().expect("SHA-256 gives 32 bytes")
}

fn oid(numbers: &[u64]) -> ObjectIdentifier {
    ObjectIdentifier::from_slice(numbers)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::tls::ca::{self, CertificateAuthority};
    use rustls::pki_types::pem::PemObject;

    /// What `openssl pkcs12` with the password makes of `file`: its output, or its complaint.
    fn openssl(file: &[u8], password: &str) -> Result<String, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store.p12");
        std::fs::write(&path, file).unwrap();
        let arguments = ["pkcs12", "-info", "-nokeys", "-passin", password, "-in"];
        let output = Command::new("openssl").args(arguments).arg(path).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        if output.status.success() {
            Ok(String::from_utf8(output.stdout).unwrap() + &stderr)
        } else {
            Err(stderr)
        }
    }

    #[test]
    fn openssl_reads_the_store_and_verifies_its_password() {
        let pem = [CertificateAuthority::generate().unwrap(), CertificateAuthority::generate().unwrap()]
            .map(|ca| ca.pem().to_owned());
        let certificates = pem.clone().map(|pem| CertificateDer::from_pem_slice(pem.as_bytes()).unwrap());
        let store = pkcs12(["first".to_owned(), "second".to_owned()].into_iter().zip(&certificates));
        let text = openssl(&store, "pass:changeit").unwrap();
        for (alias, certificate) in ["first", "second"].into_iter().zip(&certificates) {
            assert!(text.contains(&format!("friendlyName: {alias}\n")), "{text}");
            assert!(text.contains(&ca::to_pem(certificate)), "{text}");
        }
        assert_eq!(text.matches("2.16.840.1.113894.746875.1.1: ").count(), 2, "{text}");
        assert!(text.contains("MAC: sha256, Iteration 1\n"), "{text}");
        let complaint = openssl(&store, "pass:another").unwrap_err();
        assert!(complaint.contains("invalid password"), "{complaint}");
    }
}
