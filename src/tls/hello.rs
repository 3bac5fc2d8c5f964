//! A look at a ClientHello: which host it names, without answering it.

use std::io;

use rustls::server::{Acceptor, ClientHello};

/// More than any ClientHello has: with post-quantum key shares they come to some two KiB, and a TLS
/// handshake message has 64 KiB at most in the library.
const MAX_HELLO: usize = 80 * 1024;

/// A hello as it comes, however small the pieces: each byte is looked at once.
#[derive(Default)]
pub struct HelloReader {
    acceptor: Acceptor,
    read: usize,
}

impl HelloReader {
    /// Looks at all that has come so far, what was there at the last look included: the host that the hello
    /// names (RFC 6066 section 3), if it names one, once all of it is there. Not to be asked again then.
    ///
    /// # Errors
    /// When what comes is no ClientHello.
    pub fn look(&mut self, so_far: &[u8]) -> io::Result<Option<Option<String>>> {
        let mut fresh = so_far.get(self.read..).unwrap_or_default();
        while !fresh.is_empty() {
            self.read += self.acceptor.read_tls(&mut fresh)?;
            match self.acceptor.accept() {
                Ok(Some(accepted)) => return Ok(Some(named(&accepted.client_hello()))),
                Ok(None) => {}
                Err((error, _)) => return Err(io::Error::new(io::ErrorKind::InvalidData, error)),
            }
        }
        match self.read > MAX_HELLO {
            true => Err(io::ErrorKind::InvalidData.into()),
            false => Ok(None),
        }
    }
}

/// The host that a hello names, in lower case as hosts are compared.
pub fn named(hello: &ClientHello<'_>) -> Option<String> {
    hello.server_name().map(str::to_ascii_lowercase)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rustls::pki_types::ServerName;
    use rustls::{ClientConfig, ClientConnection, RootCertStore};

    use super::*;

    fn hello(host: &str) -> Vec<u8> {
        let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(RootCertStore::empty())
            .with_no_client_auth();
        let name = ServerName::try_from(host.to_owned()).unwrap();
        let mut client = ClientConnection::new(Arc::new(config), name).unwrap();
        let mut bytes = Vec::new();
        client.write_tls(&mut bytes).unwrap();
        bytes
    }

    fn look(bytes: &[u8]) -> io::Result<Option<Option<String>>> {
        HelloReader::default().look(bytes)
    }

    #[test]
    fn the_name_is_read_once_the_hello_is_whole() {
        let bytes = hello("Tool.Example");
        assert_eq!(look(&bytes).unwrap(), Some(Some("tool.example".into())));
        for cut in [0, 1, 4, 5, 6, 40, bytes.len() - 1] {
            assert_eq!(look(&bytes[..cut]).unwrap(), None, "{cut} bytes");
        }
        assert_eq!(look(&hello("192.0.2.1")).unwrap(), Some(None));
    }

    #[test]
    fn a_hello_may_come_byte_by_byte() {
        let bytes = hello("tool.example");
        let mut reader = HelloReader::default();
        for end in 0..bytes.len() {
            assert_eq!(reader.look(&bytes[..end]).unwrap(), None, "{end} bytes");
        }
        assert_eq!(reader.look(&bytes).unwrap(), Some(Some("tool.example".into())));
    }

    #[test]
    fn what_is_no_hello_is_an_error() {
        assert!(look(b"\x16\x03\x01\x00\x05hello").is_err());
        assert!(look(b"\x16\x03\x01\xff\xffx").is_err());
    }

    #[test]
    fn a_hello_that_does_not_end_is_given_up() {
        // Records of one byte each, of a message that says it is long.
        let begin = [0x16, 3, 1, 0, 4, 1, 0, 0xff, 0xff];
        let endless = [&begin[..], &[0x16, 3, 1, 0, 1, 0].repeat(MAX_HELLO / 6 + 1)].concat();
        assert!(look(&endless[..100]).unwrap().is_none());
        assert!(look(&endless).is_err());
    }
}
