//! What a policy draws from outside itself: files and, for secrets, environment variables.
//!
//! Each file is read once for a policy, however often it is named, and what was read goes into the
//! fingerprint, so that the watcher notices a renewed certificate or key. The fingerprint stays inside
//! the process: with a short secret in it, it would give that secret away to whoever can guess. The
//! hash that is shown covers the policy and its certificates alone.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use super::redis_url::encoded;
use super::secret::{SecretBytes, is_file_name};

/// Largest file that a policy may name: the public roots of a system are a quarter of it.
const MAX_FILE: u64 = 1 << 20;

/// A file's bytes, or why they cannot be had.
type Content = Result<Arc<[u8]>, String>;

/// Where files and variables come from.
pub(super) struct Sources {
    dir: PathBuf,
    variable: fn(&str) -> Option<String>,
    read: Mutex<BTreeMap<PathBuf, Content>>,
    certificates: Mutex<BTreeMap<PathBuf, Content>>,
}

impl Sources {
    /// Paths are relative to `dir`; variables are the process's.
    pub(super) fn new(dir: &FilePath) -> Self {
        Self::with_variables(dir, |name| std::env::var(name).ok())
    }

    /// The same with other variables.
    pub(super) fn with_variables(dir: &FilePath, variable: fn(&str) -> Option<String>) -> Self {
        let (read, certificates) = (Mutex::default(), Mutex::default());
        Self { dir: dir.to_owned(), variable, read, certificates }
    }

    /// The files that have been asked for, whether they could be read or not, in the order of their
    /// names.
    pub(super) fn files(&self) -> Vec<PathBuf> {
        self.read.lock().keys().cloned().collect()
    }

    /// As [`fingerprint`], of exactly what was read here: a file that changes meanwhile shows up as a
    /// difference at the next look.
    pub(super) fn fingerprint(&self, text: &[u8]) -> u64 {
        fingerprint_of(text, self.read.lock().values().map(|content| content.as_deref()))
    }

    /// The certificates of a PEM file, at least one. Whatever else is in it, such as their key, is left
    /// out: what is returned is neither hidden nor kept from the hash.
    pub(super) fn certificates(&self, path: &str) -> Content {
        let pem = self.pem_file(path)?;
        let mut certificates = self.certificates.lock();
        certificates.entry(self.dir.join(path)).or_insert_with(|| only_certificates(&pem)).clone()
    }

    /// A PEM file with a private key. Its first key is looked at for its form alone.
    pub(super) fn private_key(&self, path: &str) -> Result<SecretBytes, String> {
        let pem = self.pem_file(path)?;
        match PrivateKeyDer::from_pem_slice(&pem) {
            Ok(_) => Ok(SecretBytes::new(pem)),
            Err(rustls::pki_types::pem::Error::NoItemsFound) => {
                Err("the file holds no unencrypted PEM private key (PKCS#8, SEC1 or PKCS#1)".into())
            }
            Err(_) => Err("the file is no valid PEM".into()),
        }
    }

    /// The path of a directory, which need not exist.
    pub(super) fn directory(&self, path: &str) -> PathBuf {
        self.dir.join(path)
    }

    fn pem_file(&self, path: &str) -> Content {
        // As a path it would stand in the error, and it may be a key.
        if path.contains("-----BEGIN") {
            return Err("expected the path of a PEM file; found what should be in it".into());
        }
        self.file(path).map_err(|message| match is_file_name(path) {
            true => message,
            // The same, in one line and without its frame.
            false => {
                "expected the path of a PEM file; what is written here is none, or cannot be read".into()
            }
        })
    }

    /// `text` with `${env:NAME}` and `${file:PATH}` replaced. The error never shows a value.
    pub(super) fn substitute(&self, text: &str) -> Result<String, String> {
        replaced(text, |what| self.substitution(what))
    }

    /// The same in a URL. A substitution that is all of it is the URL itself; any other is one part, whatever
    /// characters it has, and so percent-encoded.
    pub(super) fn substitute_in_url(&self, text: &str) -> Result<String, String> {
        match is_one_substitution(text) {
            true => self.substitute(text),
            false => replaced(text, |what| Ok(encoded(&self.substitution(what)?).into_owned())),
        }
    }

    fn substitution(&self, what: &str) -> Result<String, String> {
        match what.split_once(':') {
            Some(("env", name)) => (self.variable)(name).ok_or_else(|| match is_variable(name) {
                true => format!("the environment variable {name} is not set"),
                false => "expected the name of an environment variable in `${env:NAME}`".into(),
            }),
            Some(("file", path)) => {
                let bytes = self.file(path)?;
                let text = std::str::from_utf8(&bytes).map_err(|_| format!("{path} is not UTF-8"))?;
                // Editors and `echo` end a file with a line feed that is no part of the secret.
                let text = text.strip_suffix('\n').unwrap_or(text);
                Ok(text.strip_suffix('\r').unwrap_or(text).to_owned())
            }
            _ => Err("expected `${env:NAME}` or `${file:PATH}`".into()),
        }
    }

    fn file(&self, path: &str) -> Content {
        let full = self.dir.join(path);
        let mut read = self.read.lock();
        read.entry(full.clone()).or_insert_with(|| read_bounded(&full, MAX_FILE).map(Arc::from)).clone()
    }

    /// Of the policy's text and the certificates it names.
    pub(super) fn hash(&self, text: &[u8]) -> String {
        let mut hash = Fnv::default();
        hash.write(text);
        for pem in self.certificates.lock().values().flatten() {
            hash.write(pem);
        }
        format!("{:016x}", hash.0)
    }
}

/// `text` with each `${…}` replaced by what `with` makes of its inner part.
fn replaced(text: &str, with: impl Fn(&str) -> Result<String, String>) -> Result<String, String> {
    let mut result = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("${") {
        result.push_str(before);
        let (what, after) = after.split_once('}').ok_or("`${` lacks its `}`")?;
        result.push_str(&with(what)?);
        rest = after;
    }
    result.push_str(rest);
    Ok(result)
}

/// Whether a text is a single `${…}` with nothing beside it.
pub(super) fn is_one_substitution(text: &str) -> bool {
    text.strip_prefix("${").and_then(|rest| rest.strip_suffix('}')).is_some_and(|what| !what.contains('}'))
}

/// What of a text is written in clear: all but its substitutions.
pub(super) fn in_clear(text: &str) -> String {
    replaced(text, |_| Ok(String::new())).unwrap_or_default()
}

/// Whether a name is one that variables have; anything else may be the secret itself.
fn is_variable(name: &str) -> bool {
    name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
}

fn only_certificates(pem: &[u8]) -> Content {
    let mut is_inside = false;
    let mut kept = Vec::new();
    for line in pem.split_inclusive(|byte| matches!(byte, b'\n' | b'\r')) {
        is_inside |= line.starts_with(b"-----BEGIN CERTIFICATE-----");
        if is_inside {
            kept.extend_from_slice(line);
        }
        is_inside &= !line.starts_with(b"-----END");
    }
    let mut found = 0;
    for certificate in CertificateDer::pem_slice_iter(&kept) {
        certificate.map_err(|_| "the file is no valid PEM".to_owned())?;
        found += 1;
    }
    if found == 0 { Err("the file holds no PEM certificate".into()) } else { Ok(kept.into()) }
}

/// A fingerprint of the policy's text and of the present content of `files`.
pub(super) fn fingerprint(text: &[u8], files: &[PathBuf]) -> u64 {
    let contents: Vec<_> = files.iter().map(|path| read_bounded(path, MAX_FILE)).collect();
    fingerprint_of(text, contents.iter().map(|content| content.as_deref()))
}

fn fingerprint_of<'a>(text: &[u8], files: impl Iterator<Item = Result<&'a [u8], &'a String>>) -> u64 {
    let mut hash = Fnv::default();
    hash.write(text);
    for content in files {
        let bytes = content.unwrap_or_else(|error| error.as_bytes());
        hash.write(&bytes.len().to_be_bytes());
        hash.write(bytes);
    }
    hash.0
}

/// A whole file, unless it is larger than `most`. A device or pipe that never ends is not read on.
pub(super) fn read_bounded(path: &FilePath, most: u64) -> Result<Vec<u8>, String> {
    let describe = |error: std::io::Error| format!("cannot read {}: {error}", path.display());
    // Looked at before it is opened, since opening a pipe waits for its writer.
    if !std::fs::metadata(path).map_err(describe)?.is_file() {
        return Err(format!("{} is no regular file", path.display()));
    }
    let file = std::fs::File::open(path).map_err(describe)?;
    let mut bytes = Vec::new();
    file.take(most + 1).read_to_end(&mut bytes).map_err(describe)?;
    if bytes.len() as u64 > most {
        return Err(format!("{} is larger than {most} bytes", path.display()));
    }
    Ok(bytes)
}

/// FNV-1a of 64 bits: tells versions of a file apart and is the same on every machine. It is no
/// protection against someone who builds collisions, who could edit the policy just as well.
struct Fnv(u64);

impl Default for Fnv {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Fnv {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
}
