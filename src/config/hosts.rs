//! The policy's notations for places: hosts, endpoints, rules on destinations and path globs.
//!
//! A host is brought into the same normal form as a request's, by the same function, so that both meet.
//! Only here may it be written in Unicode: a person writes the policy, and what a client sends is taken
//! literally.

use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Net};
use regex::Regex;

use super::{DirectRule, EgressRule, Endpoint, HostPattern, PathPattern};
use crate::wire::authority::{Authority, normal_host};

/// Longest path glob; longer ones are a mistake, and the compiled form grows with it.
const MAX_GLOB: usize = 1024;

/// `a.example`, `a.example:8443`, `*.example`, `10.0.0.1`, `[::1]:80`.
pub(super) fn host_pattern(text: &str) -> Result<HostPattern, String> {
    if text.is_empty() || text.contains('/') {
        return Err("expected a host such as api.example.com, without scheme and path".into());
    }
    if text == "*" {
        return Err("`*` covers every host, as `defaults` does; expected a name or `*.suffix`".into());
    }
    let (is_suffix, rest) = match text.strip_prefix("*.") {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    if rest.contains('*') {
        return Err("`*` can only stand for the first labels, as in *.example.com".into());
    }
    let ascii = to_ascii(rest)?;
    // The port is optional here; the one that is put in its place is not used.
    let has_port = split_host(&ascii).1.is_some();
    let authority = Authority::parse(&ascii, Some(80))?;
    if is_suffix && authority.ip().is_some() {
        return Err("an address has no suffix".into());
    }
    let port = has_port.then(|| authority.port());
    Ok(HostPattern { name: authority.host().to_owned(), is_suffix, port })
}

/// `https://api.other.example`, with or without a port.
pub(super) fn endpoint(text: &str) -> Result<Endpoint, String> {
    const EXPECTED: &str = "expected a URL such as https://api.example.com or http://10.0.0.1:8080";
    let (scheme, rest) = text.split_once("://").ok_or(EXPECTED)?;
    let (is_https, default_port) = match scheme.to_ascii_lowercase().as_str() {
        "https" => (true, 443),
        "http" => (false, 80),
        _ => return Err(EXPECTED.into()),
    };
    let rest = rest.strip_suffix('/').unwrap_or(rest);
    if rest.contains(['/', '?', '#']) {
        return Err("an endpoint has no path; `rewrite.path` changes the request's".into());
    }
    let authority = Authority::parse(&to_ascii(rest)?, Some(default_port))?;
    Ok(Endpoint { is_https, authority })
}

/// A name, `*.suffix`, address or range (CIDR).
pub(super) fn egress_rule(text: &str) -> Result<EgressRule, String> {
    if text.contains('/') && !text.contains("://") {
        return range(text).map(EgressRule::Range);
    }
    // A bare address covers what a name resolves to as well, so it is a range of one.
    let bare = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
    match bare.parse::<IpAddr>() {
        Ok(ip) => Ok(EgressRule::Range(ip.to_canonical().into())),
        Err(_) => host_pattern(text).map(EgressRule::Host),
    }
}

/// `loopback`, a name, `*.suffix`, address or range (CIDR).
pub(super) fn direct_rule(text: &str) -> Result<DirectRule, String> {
    if text.eq_ignore_ascii_case("loopback") {
        return Ok(DirectRule::Loopback);
    }
    // As NO_PROXY is often written.
    if text.starts_with('.') {
        return Err(format!("expected a name or `*.suffix` (did you mean `*{text}`?)"));
    }
    Ok(match egress_rule(text)? {
        EgressRule::Host(host) => DirectRule::Host(host),
        EgressRule::Range(range) => DirectRule::Range(range),
    })
}

/// A range of addresses (CIDR), or one address. Of IPv4 addresses that are mapped into IPv6 it is the IPv4 range,
/// since whoever is compared with it comes in that form.
///
/// # Errors
/// What was expected instead, for the person who wrote it.
pub fn range(text: &str) -> Result<IpNet, String> {
    if let Ok(ip) = text.parse::<IpAddr>() {
        return Ok(ip.to_canonical().into());
    }
    let net: IpNet = text
        .parse()
        .map_err(|_| "expected a range of addresses such as 10.0.0.0/8 or fd00::/8".to_owned())?;
    match net.trunc() {
        trunc if trunc == net => Ok(canonical(net)),
        trunc => Err(format!("the address has bits beyond its prefix (did you mean `{trunc}`?)")),
    }
}

/// `10.0.0.0/8` for `::ffff:10.0.0.0/104` (RFC 4291 section 2.5.5.2).
fn canonical(net: IpNet) -> IpNet {
    let IpNet::V6(range) = net else { return net };
    let mapped = range.addr().to_ipv4_mapped().zip(range.prefix_len().checked_sub(96));
    let range = mapped.and_then(|(ip, prefix)| Ipv4Net::new(ip, prefix).ok());
    range.map_or(net, IpNet::V4)
}

/// A glob over paths: `*` within one segment, `**` for any rest.
pub(super) fn path_pattern(glob: &str) -> Result<PathPattern, String> {
    if !glob.starts_with('/') && !glob.starts_with("**") {
        return Err("expected a path such as /v1/search/**, beginning with `/`".into());
    }
    if glob.contains(['?', '#']) {
        return Err("the query is no part of what a route's path is compared with".into());
    }
    if glob.len() > MAX_GLOB {
        return Err(format!("longer than {MAX_GLOB} bytes"));
    }
    let parts =
        glob.split("**").map(|part| part.split('*').map(regex::escape).collect::<Vec<_>>().join("[^/]*"));
    let source = format!("(?s)^{}$", parts.collect::<Vec<_>>().join(".*"));
    let regex = Regex::new(&source).map_err(|_| "too many wildcards".to_owned())?;
    Ok(PathPattern { glob: glob.to_owned(), regex })
}

/// The name to verify in an upstream's certificate.
pub(super) fn server_name(text: &str) -> Result<String, String> {
    let name = normal_host(&to_ascii(text)?)?;
    let bare = name.trim_start_matches('[').trim_end_matches(']');
    match rustls::pki_types::ServerName::try_from(bare) {
        Ok(_) => Ok(bare.to_owned()),
        Err(_) => Err("expected a host name".into()),
    }
}

/// `host[:port]` with the host's labels in ASCII.
pub(super) fn to_ascii(text: &str) -> Result<String, String> {
    if text.is_ascii() {
        return Ok(text.to_owned());
    }
    let (host, port) = split_host(text);
    let host =
        idna::domain_to_ascii(host).map_err(|_| "the host is no valid international name".to_owned())?;
    Ok(match port {
        Some(port) => format!("{host}:{port}"),
        None => host,
    })
}

fn split_host(text: &str) -> (&str, Option<&str>) {
    match text.rsplit_once(':') {
        Some((host, port)) if !port.contains(']') => (host, Some(port).filter(|port| !port.is_empty())),
        _ => (text, None),
    }
}
