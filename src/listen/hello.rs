//! Which host a client's TLS means, without taking a byte of its hello away.

use std::io;

use super::socket::ClientSocket;
use crate::tls::hello::HelloReader;

/// The host that the client's hello names, in lower case; `None` when it names none. What is read stays
/// ahead in the socket, and a wait that is given up goes on with the same `reader`. The time is the
/// caller's to bound. Cancel-safe.
///
/// # Errors
/// When what comes is no ClientHello, or the client leaves within it.
pub async fn server_name(client: &mut ClientSocket, reader: &mut HelloReader) -> io::Result<Option<String>> {
    loop {
        if let Some(found) = reader.look(client.ahead())? {
            return Ok(found);
        }
        if client.hear().await?.is_none() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
}
