//! The one normal form of an upstream's name: `host:port`.
//!
//! It is made once, at the edge, and used for policy, breaker, pool, SNI and metrics, so that no two
//! parts can disagree about where a request goes. Lower case, no trailing dot, A-labels, IPv6 in
//! brackets, the port always there. What only some parsers read as an address (`2130706433`,
//! `0x7f.1`, `127.1`, `%31`) is refused rather than guessed at.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use tokio::io::ReadBuf;

/// A host and port in normal form. Cheap to clone.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Authority {
    key: Arc<str>,
    host_len: u16,
    port: u16,
}

impl Authority {
    /// Reads `host`, `host:port`, `[v6]` or `[v6]:port`. Without a port, or with an empty one
    /// (RFC 3986 section 3.2.3), `default_port` counts; with `None` the port must be there.
    ///
    /// # Errors
    /// What is wrong, in words for the caller.
    pub fn parse(text: &str, default_port: Option<u16>) -> Result<Self, &'static str> {
        if text.contains('@') {
            return Err("user information in the target is refused");
        }
        let (host, port) = split_port(text)?;
        let port = match (port, default_port) {
            (Some(""), None) | (None, None) => return Err("the target has no port"),
            (None | Some(""), Some(port)) => port,
            (Some(digits), _) => parse_port(digits)?,
        };
        let host = normal_host(host)?;
        Ok(Self::from_normal(&host, port))
    }

    /// The authority of an address.
    pub fn from_ip(ip: IpAddr, port: u16) -> Self {
        match ip {
            IpAddr::V4(ip) => Self::from_normal(&ip.to_string(), port),
            IpAddr::V6(ip) => Self::from_normal(&format!("[{ip}]"), port),
        }
    }

    fn from_normal(host: &str, port: u16) -> Self {
        Self { key: format!("{host}:{port}").into(), host_len: host.len() as u16, port }
    }

    /// `host:port`.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// The host alone; IPv6 in brackets.
    pub fn host(&self) -> &str {
        &self.key[..usize::from(self.host_len)]
    }

    /// The port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The address, when the host is one.
    pub fn ip(&self) -> Option<IpAddr> {
        let host = self.host();
        match host.strip_prefix('[') {
            Some(rest) => rest.trim_end_matches(']').parse::<Ipv6Addr>().ok().map(IpAddr::V6),
            None => host.parse::<Ipv4Addr>().ok().map(IpAddr::V4),
        }
    }

    /// The same host at another port.
    pub fn at_port(self, port: u16) -> Self {
        if self.port == port { self } else { Self::from_normal(self.host(), port) }
    }

    /// Whether `text`, a host with or without port, means this authority.
    pub fn is_named_by(&self, text: &str, default_port: u16) -> bool {
        text == self.host_field(default_port)
            || Self::parse(text, Some(default_port)).is_ok_and(|named| named == *self)
    }

    /// What a `Host` field says: without the port where that is the scheme's own.
    pub fn host_field(&self, default_port: u16) -> &str {
        if self.port == default_port { self.host() } else { self.key() }
    }
}

impl fmt::Display for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.key)
    }
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.key)
    }
}

/// Brings a host into normal form: see the module. Takes IPv6 with its brackets only.
///
/// # Errors
/// What is wrong, in words for the caller.
pub fn normal_host(host: &str) -> Result<String, &'static str> {
    if let Some(rest) = host.strip_prefix('[') {
        let inner = rest.strip_suffix(']').ok_or("an IPv6 address lacks its closing bracket")?;
        let ip: Ipv6Addr = inner.parse().map_err(|_| "the bracketed host is no IPv6 address")?;
        return Ok(format!("[{ip}]"));
    }
    if !host.is_ascii() {
        return Err("the host has non-ASCII characters: send its A-label (xn--) form");
    }
    let host = host.strip_suffix('.').unwrap_or(host);
    if host.is_empty() {
        return Err("the target has no host");
    }
    if host.len() > 253 {
        return Err("the host is longer than 253 characters");
    }
    for label in host.split('.') {
        if label.is_empty() || label.len() > 63 {
            return Err("the host has a label that is empty or longer than 63 characters");
        }
        if !label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_') {
            return Err("the host has characters that no host name has");
        }
    }
    let last = host.rsplit('.').next().unwrap_or(host);
    if looks_numeric(last) {
        // WHATWG URL section 3.5: a host that ends in a number is an address or nothing.
        let ip: Ipv4Addr = host.parse().map_err(|_| "the host is a number but no dotted-quad address")?;
        return Ok(ip.to_string());
    }
    Ok(host.to_ascii_lowercase())
}

fn looks_numeric(label: &str) -> bool {
    let hex = label.strip_prefix("0x").or_else(|| label.strip_prefix("0X"));
    label.bytes().all(|b| b.is_ascii_digit())
        || hex.is_some_and(|digits| digits.bytes().all(|b| b.is_ascii_hexdigit()))
}

fn split_port(text: &str) -> Result<(&str, Option<&str>), &'static str> {
    if text.starts_with('[') {
        let end = text.find(']').ok_or("an IPv6 address lacks its closing bracket")?;
        let (host, rest) = text.split_at(end + 1);
        return match rest.strip_prefix(':') {
            Some(port) => Ok((host, Some(port))),
            None if rest.is_empty() => Ok((host, None)),
            None => Err("there is something between the IPv6 address and its port"),
        };
    }
    match text.split_once(':') {
        None => Ok((text, None)),
        Some((_, port)) if port.contains(':') => Err("an IPv6 address needs brackets"),
        Some((host, port)) => Ok((host, Some(port))),
    }
}

fn parse_port(digits: &str) -> Result<u16, &'static str> {
    if !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err("the port is no number");
    }
    match digits.parse::<u16>() {
        Ok(0) | Err(_) => Err("the port is not between 1 and 65535"),
        Ok(port) => Ok(port),
    }
}

/// Puts the brackets around an IPv6 address in the request line that starts at `start`, as in
/// `GET http://fd77::1/ HTTP/1.1`. httpx leaves them out, though its `Host` has them; the HTTP library
/// refuses the line without them. With an address that has no port there is one way to read it.
pub fn bracket_ipv6(buf: &mut ReadBuf<'_>, start: usize) {
    let line = &buf.filled()[start..];
    let Some(host) = bare_ipv6(line) else { return };
    if buf.remaining() < 2 {
        return;
    }
    let (open, close) = (start + host.start, start + host.end);
    let tail = buf.filled()[open..].to_vec();
    let address = close - open;
    buf.set_filled(open);
    buf.put_slice(b"[");
    buf.put_slice(&tail[..address]);
    buf.put_slice(b"]");
    buf.put_slice(&tail[address..]);
}

/// Where a request line has an IPv6 address without brackets as its whole authority.
fn bare_ipv6(line: &[u8]) -> Option<std::ops::Range<usize>> {
    const LONGEST_METHOD: usize = 24;
    let space = line.iter().take(LONGEST_METHOD).position(|b| *b == b' ')?;
    let after_scheme = [&b"http://"[..], b"https://"].into_iter().find_map(|scheme| {
        let start = line.get(space + 1..space + 1 + scheme.len())?;
        start.eq_ignore_ascii_case(scheme).then_some(space + 1 + scheme.len())
    })?;
    let rest = &line[after_scheme..];
    let length = rest.iter().position(|b| matches!(b, b'/' | b'?' | b'#' | b' '))?;
    let host = &rest[..length];
    if host.iter().filter(|b| **b == b':').count() < 2 {
        return None;
    }
    std::str::from_utf8(host).ok()?.parse::<Ipv6Addr>().ok()?;
    Some(after_scheme..after_scheme + length)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key(text: &str) -> Result<String, &'static str> {
        Authority::parse(text, Some(80)).map(|a| a.key().to_owned())
    }

    #[test]
    fn spellings_of_one_host_have_one_key() {
        for text in ["a.example", "A.Example", "a.example.", "a.example:80", "a.example:", "a.EXAMPLE.:080"] {
            assert_eq!(key(text).as_deref(), Ok("a.example:80"), "{text}");
        }
        for text in ["[::1]", "[0:0::1]:80", "[::0001]"] {
            assert_eq!(key(text).as_deref(), Ok("[::1]:80"), "{text}");
        }
        assert_eq!(key("127.0.0.1.").as_deref(), Ok("127.0.0.1:80"));
        assert_eq!(key("my_tool.svc").as_deref(), Ok("my_tool.svc:80"));
    }

    #[test]
    fn what_parsers_disagree_about_is_refused() {
        for text in [
            "",
            ":80",
            ".",
            "a..b",
            "2130706433",
            "0x7f.1",
            "0x7f000001",
            "127.1",
            "0177.0.0.1",
            "1.2.3.4.5",
            "256.0.0.1",
            "%31.example",
            "ä.example",
            "a b",
            "a@b",
            "u:p@h",
            "2001:db8::1:443",
            "[::1",
            "[::1]x",
            "[fe80::1%25lo]",
            "[1.2.3.4]",
            "h:0",
            "h:65536",
            "h:12ab",
            "h:-1",
            "h:+80",
            "a/b",
            "h:80:80",
        ] {
            assert!(key(text).is_err(), "{text:?} became {:?}", key(text));
        }
        assert!(Authority::parse("h", None).is_err());
        assert!(Authority::parse("h:", None).is_err());
    }

    #[test]
    fn parts_are_what_they_say() {
        let v6 = Authority::parse("[::FFFF:127.0.0.1]:8443", None).unwrap();
        assert_eq!((v6.host(), v6.port()), ("[::ffff:127.0.0.1]", 8443));
        assert_eq!(v6.ip(), Some("::ffff:127.0.0.1".parse().unwrap()));
        let named = Authority::parse("a.example:443", None).unwrap();
        assert_eq!(named.host_field(443), "a.example");
        assert_eq!(named.host_field(80), "a.example:443");
        assert_eq!(named.ip(), None);
    }

    #[test]
    fn an_ipv6_target_without_brackets_gets_them() {
        let bracketed = |line: &str| {
            let mut space = [0; 128];
            let mut buf = ReadBuf::new(&mut space);
            buf.put_slice(b"before ");
            buf.put_slice(line.as_bytes());
            bracket_ipv6(&mut buf, 7);
            String::from_utf8(buf.filled()[7..].to_vec()).unwrap()
        };
        assert_eq!(bracketed("GET http://fd77::1/x HTTP/1.1\r\n"), "GET http://[fd77::1]/x HTTP/1.1\r\n");
        for line in ["GET http://[::1]/ HTTP/1.1", "GET http://a:80/ HTTP/1.1", "GET /a::1/ HTTP/1.1", "::1"]
        {
            assert_eq!(bracketed(line), line);
        }
    }

    proptest! {
        #[test]
        fn a_normal_form_is_its_own_normal_form(text in "\\PC{0,40}") {
            if let Ok(authority) = Authority::parse(&text, Some(80)) {
                let again = Authority::parse(authority.key(), None);
                prop_assert_eq!(again.as_ref(), Ok(&authority));
            }
        }
    }
}
