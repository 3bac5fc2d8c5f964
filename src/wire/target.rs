//! Where a request wants to go: the four forms of a request target (RFC 9112 section 3.2).

use http::header::{self, HeaderMap};
use http::{Uri, Version};

use super::authority::Authority;

/// The scheme of the request, which decides the default port and whether TLS is spoken upstream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheme {
    /// Clear text.
    Http,
    /// TLS.
    Https,
}

impl Scheme {
    /// The port that needs no mention (RFC 9110 section 4.2).
    pub fn default_port(self) -> u16 {
        match self {
            Self::Http => 80,
            Self::Https => 443,
        }
    }
}

/// A request target, still as the client wrote it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target<'a> {
    /// From the absolute form; clear text in origin-form.
    pub scheme: Scheme,
    /// `host` or `host:port`, from the absolute form or else from `Host`.
    pub authority: &'a str,
}

/// Reads the target of a request that is no CONNECT. The absolute form wins over `Host`
/// (RFC 9112 section 3.2.2), which must all the same be there, once and in a form that is valid. A
/// request of HTTP/1.0 need not name a host: then it goes where the connection `leads_to`.
///
/// # Errors
/// What is wrong, in words for the caller.
pub fn read<'a>(
    uri: &'a Uri,
    headers: &'a HeaderMap,
    version: Version,
    leads_to: Option<&'a str>,
) -> Result<Target<'a>, &'static str> {
    let host = host_field(headers)?;
    match host {
        None if version == Version::HTTP_11 => return Err("an HTTP/1.1 request needs a Host field"),
        Some(host) if !is_named_by(uri, host) && !host.is_empty() => {
            Authority::parse(host, Some(80)).map_err(|_| "the Host field names no valid host")?;
        }
        _ => {}
    }
    match (uri.scheme_str(), uri.authority()) {
        (Some(scheme), Some(authority)) => {
            let scheme = match scheme {
                s if is_one_of(s, ["http", "ws"]) => Scheme::Http,
                s if is_one_of(s, ["https", "wss"]) => Scheme::Https,
                _ => return Err("the scheme of the target is neither http nor https"),
            };
            Ok(Target { scheme, authority: authority.as_str() })
        }
        (None, Some(_)) => Err("only CONNECT takes a bare host and port as its target"),
        _ => match host.filter(|host| !host.is_empty()).or(leads_to) {
            Some(authority) => Ok(Target { scheme: Scheme::Http, authority }),
            None => Err("neither the target nor a Host field names an upstream"),
        },
    }
}

/// aiohttp asks for a WebSocket with `GET ws://…`, which on the wire is HTTP (RFC 6455 section 3).
fn is_one_of(scheme: &str, names: [&str; 2]) -> bool {
    names.iter().any(|name| scheme.eq_ignore_ascii_case(name))
}

/// Reads the target of a CONNECT: host and port, nothing else (RFC 9110 section 9.3.6).
///
/// # Errors
/// What is wrong, in words for the caller.
pub fn read_connect(uri: &Uri) -> Result<Authority, &'static str> {
    if uri.scheme().is_some() || uri.path_and_query().is_some_and(|path| path.as_str() != "") {
        return Err("CONNECT takes host:port as its target");
    }
    let authority = uri.authority().ok_or("CONNECT takes host:port as its target")?;
    Authority::parse(authority.as_str(), None)
}

/// Whether a request line asks about the server as a whole: OPTIONS with neither path nor query in
/// its absolute form, which goes on as `OPTIONS *` (RFC 9112 section 3.2.4). The parsed target no
/// longer tells that from `/`, so the bytes are looked at.
pub fn asks_whole_server(line: &[u8]) -> bool {
    let Some(target) = line.strip_prefix(b"OPTIONS http") else { return false };
    let target = target.split(|b| *b == b' ').next().unwrap_or_default();
    let authority = target.strip_prefix(b"s").unwrap_or(target).strip_prefix(b"://");
    authority.is_some_and(|rest| !rest.iter().any(|b| matches!(b, b'/' | b'?')))
}

/// Whether the absolute form says the same as `host`: then one of them is checked, not both.
fn is_named_by(uri: &Uri, host: &str) -> bool {
    uri.authority().is_some_and(|authority| authority.as_str() == host)
}

fn host_field(headers: &HeaderMap) -> Result<Option<&str>, &'static str> {
    let mut fields = headers.get_all(header::HOST).iter();
    let Some(host) = fields.next() else { return Ok(None) };
    if fields.next().is_some() {
        return Err("more than one Host field");
    }
    host.to_str().map(Some).map_err(|_| "the Host field has characters that no host has")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(uri: &str, hosts: &[&'static str], version: Version) -> Result<(Scheme, String), &'static str> {
        let uri: Uri = uri.parse().unwrap();
        let mut headers = HeaderMap::new();
        for host in hosts {
            headers.append(header::HOST, host.parse().unwrap());
        }
        read(&uri, &headers, version, None).map(|target| (target.scheme, target.authority.to_owned()))
    }

    #[test]
    fn the_absolute_form_wins_over_host() {
        let got = target("http://a.example/x", &["b.example"], Version::HTTP_11);
        assert_eq!(got, Ok((Scheme::Http, "a.example".into())));
        let got = target("/x", &["b.example:8080"], Version::HTTP_11);
        assert_eq!(got, Ok((Scheme::Http, "b.example:8080".into())));
        assert_eq!(target("HTTPS://a/", &["a"], Version::HTTP_11), Ok((Scheme::Https, "a".into())));
        assert_eq!(target("ws://a/", &["a"], Version::HTTP_11), Ok((Scheme::Http, "a".into())));
        assert_eq!(target("wss://a/", &["a"], Version::HTTP_11), Ok((Scheme::Https, "a".into())));
    }

    #[test]
    fn a_host_field_that_is_missing_doubled_or_odd_is_refused() {
        assert!(target("http://a/", &[], Version::HTTP_11).is_err());
        assert!(target("http://a/", &["a", "a"], Version::HTTP_11).is_err());
        assert!(target("http://a/", &["a b"], Version::HTTP_11).is_err());
        assert!(target("/", &[""], Version::HTTP_11).is_err());
        assert!(target("http://a/", &[], Version::HTTP_10).is_ok());
        assert!(target("ftp://a/", &["a"], Version::HTTP_11).is_err());
    }

    #[test]
    fn only_options_without_any_path_asks_about_the_whole_server() {
        assert!(asks_whole_server(b"OPTIONS http://a.example HTTP/1.1\r\nHost: a.example"));
        assert!(asks_whole_server(b"OPTIONS https://a.example:443 HTTP/1.1"));
        for line in [
            "OPTIONS http://a/ HTTP/1.1",
            "OPTIONS http://a?q HTTP/1.1",
            "GET http://a HTTP/1.1",
            "OPTIONS *",
        ] {
            assert!(!asks_whole_server(line.as_bytes()), "{line}");
        }
    }

    #[test]
    fn connect_takes_a_host_and_a_port() {
        let connect = |uri: &str| read_connect(&uri.parse().unwrap()).map(|a| a.key().to_owned());
        assert_eq!(connect("A.example:443").as_deref(), Ok("a.example:443"));
        for uri in ["a.example", "http://a.example:443/", "/x", "u:p@a.example:443"] {
            assert!(connect(uri).is_err(), "{uri}");
        }
    }
}
