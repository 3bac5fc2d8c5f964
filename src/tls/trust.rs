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
    let bundle: String = roots.iter().map(titled).chain([ca_pem.to_owned()]).collect();
    replace(dir, "ca.pem", ca_pem.as_bytes())?;
    replace(dir, "bundle.pem", bundle.as_bytes())?;
    replace(dir, "truststore.p12", &pkcs12(aliased))?;
    replace(dir, "wgetrc", &wgetrc(&dir.join("bundle.pem"))?)
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

/// Puts `content` in the place of the file `name`.
fn replace(dir: &Path, name: &str, content: &[u8]) -> io::Result<()> {
    let (new, path) = (dir.join(format!(".{name}.new")), dir.join(name));
    write_new(&new, content).and_then(|()| fs::rename(&new, &path)).map_err(|error| explained(&path, &error))
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::tls::ca::CertificateAuthority;
    use crate::tls::client::public_roots;

    fn certificates(pem: &[u8]) -> Vec<CertificateDer<'static>> {
        CertificateDer::pem_slice_iter(pem).collect::<Result<_, _>>().unwrap()
    }

    fn names(dir: &Path) -> BTreeSet<String> {
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn each_file_holds_what_its_readers_need() {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("run/ca");
        let (ca, roots) = (CertificateAuthority::generate().unwrap(), public_roots());
        publish(&dir, ca.pem(), &roots).unwrap();

        assert_eq!(fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o755);
        let files = ["bundle.pem", "ca.pem", "truststore.p12", "wgetrc"];
        assert_eq!(names(&dir), files.map(String::from).into());
        for file in files {
            assert_eq!(fs::metadata(dir.join(file)).unwrap().permissions().mode() & 0o777, 0o444, "{file}");
        }
        assert_eq!(fs::read_to_string(dir.join("ca.pem")).unwrap(), ca.pem());
        let bundle = fs::read(dir.join("bundle.pem")).unwrap();
        assert!(bundle.is_ascii());
        let all: Vec<_> = roots.into_iter().chain(certificates(ca.pem().as_bytes())).collect();
        assert_eq!(certificates(&bundle), all);
        let store = fs::read(dir.join("truststore.p12")).unwrap();
        for certificate in &all {
            assert!(store.windows(certificate.len()).any(|part| part == certificate.as_ref()));
        }
        let wgetrc = fs::read_to_string(dir.join("wgetrc")).unwrap();
        assert_eq!(wgetrc, format!("ca_certificate = {}/bundle.pem\n", dir.display()));
    }

    #[test]
    fn a_root_stands_under_its_subject() {
        let ca = CertificateAuthority::generate().unwrap();
        let root = certificates(ca.pem().as_bytes()).remove(0);
        let titled = titled(&root);
        let (title, pem) = titled.split_once('\n').unwrap();
        assert!(title.starts_with("# CN=hedgerow CA "), "{title}");
        assert_eq!(pem, ca.pem());
    }

    #[test]
    fn a_restart_replaces_read_only_files_and_leftovers() {
        let dir = tempfile::tempdir().unwrap();
        let [old, new] = [(); 2].map(|()| CertificateAuthority::generate().unwrap());
        publish(dir.path(), old.pem(), &[]).unwrap();
        let before = names(dir.path());
        let leftover = dir.path().join(".ca.pem.new");
        fs::write(&leftover, "half a fi").unwrap();
        fs::set_permissions(&leftover, Permissions::from_mode(0o444)).unwrap();
        let reader = fs::File::open(dir.path().join("ca.pem")).unwrap();
        publish(dir.path(), new.pem(), &[]).unwrap();
        assert_eq!(fs::read_to_string(dir.path().join("ca.pem")).unwrap(), new.pem());
        assert_eq!(io::read_to_string(reader).unwrap(), old.pem());
        assert_eq!(names(dir.path()), before);
    }

    #[test]
    fn a_failure_names_the_file_and_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        let error = publish(&file.join("ca"), "", &[]).unwrap_err().to_string();
        assert!(error.starts_with(&format!("cannot write {}/ca: ", file.display())), "{error}");
        assert!(error.contains("tls.ca_dir must be a directory that hedgerow may write"), "{error}");

        fs::create_dir(dir.path().join("bundle.pem")).unwrap();
        let error = publish(dir.path(), "", &[]).unwrap_err().to_string();
        assert!(error.starts_with(&format!("cannot write {}/bundle.pem: ", dir.path().display())), "{error}");
    }
}
