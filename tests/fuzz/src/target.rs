//! Where a request says it wants to go.

use hedgerow::wire::authority::{Authority, bracket_ipv6};
use hedgerow::wire::target::{self, asks_whole_server};
use http::{Uri, Version};
use tokio::io::ReadBuf;

use crate::Target;
use crate::fields::fields;

/// A request target, and header fields in the lines after it: what is taken has one normal form, which
/// no parser can read in another way, and mending a request line adds brackets alone.
pub const TARGET: Target = Target {
    check,
    inputs: 60_000,
    seeds: &[
        "http://A.Example.:080/x?y#z\nhost: a.example",
        "https://[2001:DB8::0001]:443/\nhost: [2001:db8::1]",
        "http://u:p@a.example/\nhost: a.example",
        "http://a.example\nhost: b.example:8080",
        "a.example:443\nhost: a.example:443",
        "/v1/search\nhost: my_tool.svc:80",
        "*\nhost: 127.0.0.1",
        "2130706433:80",
        "0x7f.1",
        "127.1",
        "[::ffff:1.2.3.4]:65535",
        "xn--bcher-kva.example:1",
        "GET http://fd77::1/x HTTP/1.1",
        "OPTIONS http://a.example HTTP/1.1",
        "OPTIONS https://a.example?x HTTP/1.1",
    ],
};

fn check(data: &[u8]) {
    let line = data.split(|byte| *byte == b'\n').next().unwrap_or_default();
    check_brackets(line);
    check_whole_server(line);
    let Ok(text) = std::str::from_utf8(line) else { return };
    for default_port in [Some(80), None] {
        if let Ok(authority) = Authority::parse(text, default_port) {
            check_normal(&authority);
        }
    }
    let Ok(uri) = text.parse::<Uri>() else { return };
    if let Ok(authority) = target::read_connect(&uri) {
        check_normal(&authority);
    }
    let headers = fields(&data[line.len()..]);
    let Ok(target) = target::read(&uri, &headers, Version::HTTP_11, None) else { return };
    assert_eq!(headers.get_all("host").iter().count(), 1, "a request has one Host");
    if let Ok(authority) = Authority::parse(target.authority, Some(target.scheme.default_port())) {
        check_normal(&authority);
    }
}

fn check_normal(authority: &Authority) {
    assert_eq!(Authority::parse(authority.key(), None).as_ref(), Ok(authority), "not its own normal form");
    let is_plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-._:[]".contains(&b);
    assert!(authority.key().bytes().all(is_plain), "{authority}");
    match authority.ip() {
        Some(ip) => assert_eq!(&Authority::from_ip(ip, authority.port()), authority),
        // What a resolver or a URL library might take for an address all the same.
        None => assert!(!authority.host().ends_with(|c: char| c.is_ascii_digit()) || has_letter(authority)),
    }
}

fn has_letter(authority: &Authority) -> bool {
    let last = authority.host().rsplit('.').next().unwrap_or_default();
    last.bytes().any(|b| !b.is_ascii_digit())
}

fn check_brackets(line: &[u8]) {
    const BEFORE: &[u8] = b"earlier bytes";
    let mut space = vec![0; BEFORE.len() + line.len() + 2];
    let mut buf = ReadBuf::new(&mut space);
    buf.put_slice(BEFORE);
    buf.put_slice(line);
    bracket_ipv6(&mut buf, BEFORE.len());
    let (before, after) = buf.filled().split_at(BEFORE.len());
    assert_eq!(before, BEFORE);
    if after != line {
        assert_eq!(after.len(), line.len() + 2);
        let open = after.iter().zip(line).position(|(new, old)| new != old).unwrap_or(line.len());
        let close = open + after[open..].iter().position(|b| *b == b']').expect("a closing bracket");
        assert_eq!(after[open], b'[');
        assert_eq!([&after[..open], &after[open + 1..close], &after[close + 1..]].concat(), line);
    }
}

fn check_whole_server(line: &[u8]) {
    if !asks_whole_server(line) {
        return;
    }
    let target = line.split(|b| *b == b' ').nth(1).and_then(|target| std::str::from_utf8(target).ok());
    if let Some(uri) = target.and_then(|target| target.parse::<Uri>().ok()) {
        assert!(matches!(uri.path(), "" | "/") && uri.query().is_none(), "{uri} asks for a part of it");
    }
}
