//! A look at a ClientHello: which host it names, without taking a byte of it away.

use std::io;

use rustls::server::Acceptor;

use super::socket::ClientSocket;

/// More than any ClientHello has: with post-quantum key shares they come to some two KiB, and a TLS
/// handshake message has 64 KiB at most in the library.
const MAX_HELLO: usize = 80 * 1024;

/// The host that the client's hello names (RFC 6066 section 3), in lower case; `None` when it names
/// none. What is read stays ahead in the socket. The time is the caller's to bound. Cancel-safe.
///
/// # Errors
/// When what comes is no ClientHello, or the client leaves within it.
pub async fn server_name(client: &mut ClientSocket) -> io::Result<Option<String>> {
    loop {
        if let Some(found) = read(client.ahead())? {
            return Ok(found);
        }
        if client.ahead().len() > MAX_HELLO {
            return Err(io::ErrorKind::InvalidData.into());
        }
        if client.hear().await?.is_none() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
}

/// The host that a hello names, once all of it is there.
fn read(mut bytes: &[u8]) -> io::Result<Option<Option<String>>> {
    let mut acceptor = Acceptor::default();
    while !bytes.is_empty() {
        acceptor.read_tls(&mut bytes)?;
        match acceptor.accept() {
            Ok(Some(accepted)) => {
                return Ok(Some(accepted.client_hello().server_name().map(str::to_ascii_lowercase)));
            }
            Ok(None) => {}
            Err((error, _)) => return Err(io::Error::new(io::ErrorKind::InvalidData, error)),
        }
    }
    Ok(None)
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

    #[test]
    fn the_name_is_read_once_the_hello_is_whole() {
        let bytes = hello("Tool.Example");
        assert_eq!(read(&bytes).unwrap(), Some(Some("tool.example".into())));
        for cut in [0, 1, 4, 5, 6, 40, bytes.len() - 1] {
            assert_eq!(read(&bytes[..cut]).unwrap(), None, "{cut} bytes");
        }
        assert_eq!(read(&hello("192.0.2.1")).unwrap(), Some(None));
    }

    #[test]
    fn what_is_no_hello_is_an_error() {
        assert!(read(b"\x16\x03\x01\x00\x05hello").is_err());
        assert!(read(b"\x16\x03\x01\xff\xffx").is_err());
    }
}
