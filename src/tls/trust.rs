//! What agents read in order to trust the process's certificate authority.
//!
//! Most variables by which a program is given roots replace those it has, so the bundle holds the public
//! ones too: a host that is tunnelled must still verify. Java wants a store of its own kind, and wget a
//! file that names the bundle.
//!
//! Each file is replaced by a rename, so that a reader finds the old one or the new one, whole. There is
//! no sync: after a crash of the machine the process writes them again before it serves.

use std::fs::{self, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer;

use super::ca::to_pem;
use super::truststore::pkcs12;

/// Writes `ca.pem`, `bundle.pem`, `truststore.p12` (password `changeit`) and `wgetrc` into `dir`, readable
/// for all and writable for none. `dir` is made if it is missing. Blocks on files.
///
/// # Errors
/// The first failure, with the file and what to do. Files before it are already the new ones.
pub fn publish(dir: &Path, ca_pem: &str, roots: &[CertificateDer<'_>]) -> io::Result<()> {
    make(dir).map_err(|error| explained(dir, &error))?;
    let ca = CertificateDer::pem_slice_iter(ca_pem.as_bytes())
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
    let aliased = roots.iter().enumerate().map(|(number, root)| (format!("public-root-{number}"), root));
    let aliased =
        aliased.chain(ca.iter().enumerate().map(|(number, ca)| (format!("hedgerow-ca-{number}"), ca)));
    let bundle = dir.join("bundle.pem");
    replace(&dir.join("ca.pem"), ca_pem.as_bytes())?;
    replace(&bundle, roots.iter().map(titled).chain([ca_pem.to_owned()]).collect::<String>().as_bytes())?;
    replace(&dir.join("truststore.p12"), &pkcs12(aliased))?;
    replace(&dir.join("wgetrc"), &wgetrc(&bundle)?)
}

fn make(dir: &Path) -> io::Result<()> {
    if dir.is_dir() {
        return Ok(());
    }
    fs::create_dir_all(dir)?;
    // Whatever the umask says: agents run as other users.
    fs::set_permissions(dir, Permissions::from_mode(0o755))
}

fn wgetrc(bundle: &Path) -> io::Result<Vec<u8>> {
    let bundle = std::path::absolute(bundle)?;
    Ok([b"ca_certificate = ", bundle.as_os_str().as_bytes(), b"\n"].concat())
}

/// `root` in PEM under a line with its subject, for people. In ASCII, since some programs read a bundle so.
fn titled(root: &CertificateDer<'_>) -> String {
    let subject = X509Certificate::from_der(root).map(|(_, root)| root.subject().to_string());
    let subject = subject.unwrap_or_default().replace(|c: char| !matches!(c, ' '..='~'), "?");
    format!("# {subject}\n{}", to_pem(root))
}

/// Puts `content` in the place of `path`.
fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let new = path.with_added_extension("new");
    write_new(&new, content).and_then(|()| fs::rename(&new, path)).map_err(|error| explained(path, &error))
}

fn write_new(path: &Path, content: &[u8]) -> io::Result<()> {
    // A crash may have left one, and it is read-only.
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o444).open(path)?;
    file.write_all(content)?;
    file.set_permissions(Permissions::from_mode(0o444))
}

fn explained(path: &Path, error: &io::Error) -> io::Error {
    let path = path.display();
    let text = format!(
        "cannot write {path}: {error}; tls.ca_dir must be a directory that hedgerow may write and agents may read"
    );
    io::Error::new(error.kind(), text)
}
