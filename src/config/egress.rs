//! The egress guard: may this host, and may this address, be dialled.
//!
//! An agent calls what a model tells it to call, so the proxy is where a forged URL that points at the
//! cloud's metadata service or at a neighbour on loopback has to end. A name alone proves nothing (anyone
//! can publish a record for 127.0.0.1), so there are two questions: [`check_name`] before the look-up, to
//! spare it where the answer is clear, and [`check_address`] for every address that is about to be
//! dialled. The caller dials the very address that was checked; a second look-up would open the door to
//! DNS rebinding.
//!
//! In both, `egress.deny` comes first, then `egress.allow`, which also opens what the built-in rules
//! close, then `egress.default`, the guard on link-local and metadata addresses, and `deny_private`.
//!
//! An IPv6 address that embeds an IPv4 address is judged as both: translators and relays deliver it
//! there, and a rule on 10.0.0.0/8 that `64:ff9b::a00:1` walks around is none.
//!
//! Nothing here looks anything up, so that the policy can be asked before there is a call: `check` tells of
//! upstreams that its own rules refuse.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::{Egress, EgressRule, HostPattern};
use crate::error::Error;
use crate::wire::authority::Authority;

/// What the policy says about a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NameVerdict {
    /// A rule of `egress.allow` names the host: its addresses are fine unless `egress.deny` has them.
    Allowed,
    /// No rule names the host: its addresses decide.
    Unnamed,
}

/// Judges the host and port of a request, before any look-up.
///
/// # Errors
/// [`Error::EgressDenied`] with the rule that refuses the name.
pub fn check_name(egress: &Egress, authority: &Authority) -> Result<NameVerdict, Error> {
    let (host, port) = (authority.host(), authority.port());
    if let Some(pattern) = hosts(&egress.deny).find(|pattern| pattern.matches(host, port)) {
        return Err(denied(format!("egress.deny ({pattern})"), false));
    }
    if hosts(&egress.allow).any(|pattern| pattern.matches(host, port)) {
        return Ok(NameVerdict::Allowed);
    }
    if egress.deny_by_default && !egress.allow.iter().any(can_match_address) {
        return Err(denied("egress.default: deny", false));
    }
    if METADATA_NAMES.contains(&host) && !has_range_for(&egress.allow, METADATA_V4.into()) {
        return Err(denied(format!("the guard on metadata services ({host})"), false));
    }
    Ok(NameVerdict::Unnamed)
}

/// Judges an address that `authority` leads to, given what [`check_name`] said. For a host that is an
/// address itself, both are to be asked as well.
///
/// # Errors
/// [`Error::EgressDenied`] with the rule that refuses the address.
pub fn check_address(
    egress: &Egress,
    authority: &Authority,
    verdict: NameVerdict,
    address: IpAddr,
) -> Result<(), Error> {
    let forms = Forms::of(address);
    let port = authority.port();
    if let Some(rule) = egress.deny.iter().find(|rule| covers(rule, &forms, port)) {
        let rule = match rule {
            EgressRule::Host(pattern) => format!("egress.deny ({pattern})"),
            EgressRule::Range(range) => format!("egress.deny ({range})"),
        };
        return Err(denied(rule, true));
    }
    if verdict == NameVerdict::Allowed || egress.allow.iter().any(|rule| covers(rule, &forms, port)) {
        return Ok(());
    }
    if egress.deny_by_default {
        return Err(denied("egress.default: deny", true));
    }
    if let Some(range) = forms.first_in(&METADATA_RANGES) {
        return Err(denied(format!("the guard on link-local and metadata addresses ({range})"), true));
    }
    if egress.deny_private
        && let Some(range) = forms.first_in(&PRIVATE_RANGES)
    {
        return Err(denied(format!("egress.deny_private ({range})"), true));
    }
    Ok(())
}

/// Judges an address that comes without a name.
///
/// # Errors
/// [`Error::EgressDenied`] with the rule that refuses it.
pub fn check_bare(egress: &Egress, address: SocketAddr) -> Result<(), Error> {
    let authority = Authority::from_ip(address.ip(), address.port());
    let verdict = check_name(egress, &authority)?;
    check_address(egress, &authority, verdict, address.ip())
}

fn denied(rule: impl Into<std::sync::Arc<str>>, by_address: bool) -> Error {
    Error::EgressDenied { rule: rule.into(), by_address }
}

fn hosts(rules: &[EgressRule]) -> impl Iterator<Item = &HostPattern> {
    rules.iter().filter_map(|rule| match rule {
        EgressRule::Host(pattern) => Some(pattern),
        EgressRule::Range(_) => None,
    })
}

/// A pattern that is an address is a range of one: names that lead there are meant as well.
fn pattern_ip(pattern: &HostPattern) -> Option<IpAddr> {
    let text = pattern.name.trim_start_matches('[').trim_end_matches(']');
    if pattern.is_suffix { None } else { text.parse().ok() }
}

fn can_match_address(rule: &EgressRule) -> bool {
    match rule {
        EgressRule::Range(_) => true,
        EgressRule::Host(pattern) => pattern_ip(pattern).is_some(),
    }
}

fn covers(rule: &EgressRule, forms: &Forms, port: u16) -> bool {
    match rule {
        EgressRule::Range(range) => forms.iter().any(|form| range.contains(&form)),
        EgressRule::Host(pattern) => {
            pattern.port.is_none_or(|own| own == port)
                && pattern_ip(pattern).is_some_and(|ip| forms.iter().any(|form| form == ip))
        }
    }
}

fn has_range_for(rules: &[EgressRule], address: IpAddr) -> bool {
    rules.iter().any(|rule| matches!(rule, EgressRule::Range(range) if range.contains(&address)))
}

/// All that an address amounts to: itself, and the IPv4 addresses inside it.
struct Forms([Option<IpAddr>; 3]);

impl Forms {
    fn of(address: IpAddr) -> Self {
        let IpAddr::V6(v6) = address else { return Self([Some(address), None, None]) };
        let [first, second] = embedded(v6).map(|form| form.map(IpAddr::V4));
        // A mapped address is its IPv4 address (RFC 4291 section 2.5.5.2): the socket speaks IPv4. Its
        // own form stays, since a rule may be written that way.
        Self([Some(address), first, second])
    }

    fn iter(&self) -> impl Iterator<Item = IpAddr> + '_ {
        self.0.iter().copied().flatten()
    }

    fn first_in<'a>(&self, ranges: &'a [IpNet]) -> Option<&'a IpNet> {
        ranges.iter().find(|range| self.iter().any(|form| range.contains(&form)))
    }
}

/// The IPv4 addresses that an IPv6 address embeds, by the well-known prefixes. Two where the prefix
/// leaves two readings open, or holds two addresses.
fn embedded(v6: Ipv6Addr) -> [Option<Ipv4Addr>; 2] {
    let o = v6.octets();
    let at = |i: usize| Ipv4Addr::new(o[i], o[i + 1], o[i + 2], o[i + 3]);
    match v6.segments() {
        // Unspecified and loopback: not IPv4-compatible addresses (RFC 4291 section 2.5.5.1).
        [0, 0, 0, 0, 0, 0, 0, 0 | 1] => [None, None],
        // IPv4-compatible and IPv4-mapped (RFC 4291 section 2.5.5); IPv4-translated (RFC 2765 section 2.1).
        [0, 0, 0, 0, 0, 0 | 0xffff, ..] | [0, 0, 0, 0, 0xffff, 0, ..] => [Some(at(12)), None],
        // NAT64, the well-known prefix (RFC 6052 section 2.1).
        [0x64, 0xff9b, 0, 0, 0, 0, ..] => [Some(at(12)), None],
        // NAT64, the local-use prefix (RFC 8215): an operator may embed at /48 or at a /96 inside it.
        [0x64, 0xff9b, 1, ..] => [Some(at(12)), Some(Ipv4Addr::new(o[6], o[7], o[9], o[10]))],
        // 6to4 (RFC 3056 section 2).
        [0x2002, ..] => [Some(at(2)), None],
        // Teredo: the client's address with all bits inverted, and its server's (RFC 4380 section 4).
        [0x2001, 0, ..] => [Some(Ipv4Addr::from_bits(!at(12).to_bits())), Some(at(4))],
        _ => [None, None],
    }
}

/// Where the metadata services of AWS, Azure, Google, DigitalOcean, OpenStack and others listen.
const METADATA_V4: Ipv4Addr = Ipv4Addr::new(169, 254, 169, 254);

/// Names that lead to a metadata service from inside a cloud, in case a resolver hides the address.
const METADATA_NAMES: [&str; 6] = [
    "metadata.google.internal",
    "metadata.goog",
    "metadata.azure.internal",
    "metadata.platformequinix.com",
    "instance-data",
    "instance-data.ec2.internal",
];

/// Closed unless `egress.allow` opens it, whatever else the policy says: no tool of an agent lives here.
const METADATA_RANGES: [IpNet; 9] = [
    v4(169, 254, 0, 0, 16), // link-local (RFC 3927), with most clouds' metadata services
    v6([0xfe80, 0, 0, 0, 0, 0, 0, 0], 10), // link-local (RFC 4291 section 2.5.6)
    v6([0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254], 128), // AWS
    v6([0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254], 128), // Google
    v6([0xfd00, 0x42, 0, 0, 0, 0, 0, 0x42], 128), // Scaleway
    v6([0xfd00, 0xa9fe, 0xa9fe, 0, 0, 0, 0, 1], 128), // Akamai
    v4(100, 100, 100, 200, 32), // Alibaba
    v4(192, 0, 0, 192, 32), // Oracle, the older generation
    v4(168, 63, 129, 16, 32), // Azure's wire server, a public address only by its number
];

/// What `deny_private` refuses: all that the IANA special-purpose registries do not call globally
/// reachable, and multicast.
const PRIVATE_RANGES: [IpNet; 29] = [
    v4(0, 0, 0, 0, 8), // this network (RFC 1122 section 3.2.1.3); Linux takes 0.0.0.0 for loopback
    v4(10, 0, 0, 0, 8), // private (RFC 1918)
    v4(100, 64, 0, 0, 10), // shared by carriers (RFC 6598); many clusters number their pods from it
    v4(127, 0, 0, 0, 8), // loopback (RFC 1122)
    v4(169, 254, 0, 0, 16), // link-local (RFC 3927)
    v4(172, 16, 0, 0, 12), // private (RFC 1918)
    v4(192, 0, 0, 0, 24), // protocol assignments (RFC 6890)
    v4(192, 0, 2, 0, 24), // documentation (RFC 5737)
    v4(192, 88, 99, 0, 24), // 6to4 relays, given up (RFC 7526)
    v4(192, 168, 0, 0, 16), // private (RFC 1918)
    v4(198, 18, 0, 0, 15), // benchmarking (RFC 2544)
    v4(198, 51, 100, 0, 24), // documentation (RFC 5737)
    v4(203, 0, 113, 0, 24), // documentation (RFC 5737)
    v4(224, 0, 0, 0, 4), // multicast (RFC 5771)
    v4(255, 255, 255, 255, 32), // broadcast (RFC 919)
    v4(240, 0, 0, 0, 4), // reserved (RFC 1112)
    v6([0; 8], 128),   // unspecified (RFC 4291 section 2.5.2)
    v6([0, 0, 0, 0, 0, 0, 0, 1], 128), // loopback (RFC 4291 section 2.5.3)
    v6([0x64, 0xff9b, 1, 0, 0, 0, 0, 0], 48), // local-use NAT64 (RFC 8215)
    v6([0x100, 0, 0, 0, 0, 0, 0, 0], 64), // discard-only (RFC 6666)
    v6([0x2001, 2, 0, 0, 0, 0, 0, 0], 48), // benchmarking (RFC 5180)
    v6([0x2001, 0x10, 0, 0, 0, 0, 0, 0], 28), // ORCHID, given up (RFC 4843)
    v6([0x2001, 0xdb8, 0, 0, 0, 0, 0, 0], 32), // documentation (RFC 3849)
    v6([0x3fff, 0, 0, 0, 0, 0, 0, 0], 20), // documentation (RFC 9637)
    v6([0x5f00, 0, 0, 0, 0, 0, 0, 0], 16), // segment routing (RFC 9602)
    v6([0xfc00, 0, 0, 0, 0, 0, 0, 0], 7), // unique local (RFC 4193)
    v6([0xfe80, 0, 0, 0, 0, 0, 0, 0], 10), // link-local (RFC 4291 section 2.5.6)
    v6([0xfec0, 0, 0, 0, 0, 0, 0, 0], 10), // site-local, given up (RFC 3879)
    v6([0xff00, 0, 0, 0, 0, 0, 0, 0], 8), // multicast (RFC 4291 section 2.7)
];

const fn v4(a: u8, b: u8, c: u8, d: u8, prefix: u8) -> IpNet {
    IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::new(a, b, c, d), prefix))
}

const fn v6(s: [u16; 8], prefix: u8) -> IpNet {
    IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::new(s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7]), prefix))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rule(text: &str) -> EgressRule {
        if text.contains('/') {
            return EgressRule::Range(text.parse().unwrap());
        }
        let (name, is_suffix) = text.strip_prefix("*.").map_or((text, false), |name| (name, true));
        let (name, port) = match name.rsplit_once(':') {
            Some((name, port)) if !port.ends_with(']') => (name, Some(port.parse().unwrap())),
            _ => (name, None),
        };
        EgressRule::Host(HostPattern { name: name.into(), is_suffix, port })
    }

    fn egress(default: &str, private: &str, allow: &[&str], deny: &[&str]) -> Egress {
        Egress {
            deny_by_default: default == "deny",
            deny_private: private == "deny_private",
            allow: allow.iter().map(|text| rule(text)).collect(),
            deny: deny.iter().map(|text| rule(text)).collect(),
        }
    }

    fn authority(text: &str) -> Authority {
        Authority::parse(text, Some(443)).unwrap()
    }

    /// Both questions in a row, as a dial asks them.
    fn check(egress: &Egress, host: &str, address: &str) -> Result<(), String> {
        let authority = authority(host);
        let answer = check_name(egress, &authority)
            .and_then(|verdict| check_address(egress, &authority, verdict, address.parse().unwrap()));
        answer.map_err(|error| match error {
            Error::EgressDenied { rule, .. } => rule.to_string(),
            other => panic!("{other:?}"),
        })
    }

    const PUBLIC: &str = "93.184.215.14";

    #[test]
    fn deny_beats_allow_and_is_named() {
        let policy = egress("allow", "", &["a.example"], &["a.example", "*.evil.example:443", "8.8.0.0/16"]);
        assert_eq!(check(&policy, "a.example", PUBLIC), Err("egress.deny (a.example)".into()));
        assert_eq!(check(&policy, "x.evil.example", PUBLIC), Err("egress.deny (*.evil.example:443)".into()));
        assert_eq!(check(&policy, "x.evil.example:80", PUBLIC), Ok(()));
        assert_eq!(check(&policy, "b.example", "8.8.8.8"), Err("egress.deny (8.8.0.0/16)".into()));
        assert_eq!(check(&policy, "b.example", "64:ff9b::808:808"), Err("egress.deny (8.8.0.0/16)".into()));
        assert_eq!(check(&policy, "b.example", PUBLIC), Ok(()));
    }

    #[test]
    fn default_deny_lets_through_by_name_or_by_range_alone() {
        let policy = egress("deny", "", &["a.example", "*.b.example:8443", "93.184.0.0/16", "10.1.2.3"], &[]);
        for (host, address, expected) in [
            ("a.example", PUBLIC, true),
            ("a.example", "10.0.0.1", true),
            ("x.b.example:8443", "1.1.1.1", true),
            ("x.b.example", "1.1.1.1", false),
            ("b.example:8443", "1.1.1.1", false),
            ("other.example", PUBLIC, true),
            ("other.example", "10.1.2.3", true),
            ("other.example", "::ffff:10.1.2.3", true),
            ("other.example", "10.1.2.4", false),
            ("other.example", "2606:4700::1", false),
        ] {
            let answer = check(&policy, host, address);
            assert_eq!(answer.is_ok(), expected, "{host} at {address}: {answer:?}");
        }
        assert_eq!(check(&policy, "other.example", "1.1.1.1"), Err("egress.default: deny".into()));
    }

    #[test]
    fn an_address_without_a_name_is_opened_by_ranges_and_closed_without() {
        let at = |address: &str| SocketAddr::new(address.parse().unwrap(), 443);
        let policy = egress("deny", "", &["a.example", "10.1.0.0/16"], &[]);
        assert_eq!(check_bare(&policy, at("10.1.2.3")), Ok(()));
        assert!(check_bare(&policy, at("10.2.2.3")).is_err());
        let names = egress("deny", "", &["a.example"], &[]);
        assert!(check_bare(&names, at(PUBLIC)).is_err());
        let open = egress("allow", "deny_private", &[], &[]);
        assert_eq!(check_bare(&open, at(PUBLIC)), Ok(()));
        assert!(check_bare(&open, at("10.1.2.3")).is_err());
        assert!(check_bare(&open, at("169.254.169.254")).is_err());
    }

    #[test]
    fn default_deny_without_ranges_refuses_the_name_before_any_look_up() {
        let policy = egress("deny", "", &["a.example"], &[]);
        assert_eq!(
            check_name(&policy, &authority("b.example")),
            Err(Error::EgressDenied { rule: "egress.default: deny".into(), by_address: false })
        );
        let with_range = egress("deny", "", &["10.0.0.0/8"], &[]);
        assert_eq!(check_name(&with_range, &authority("b.example")), Ok(NameVerdict::Unnamed));
    }

    #[test]
    fn link_local_and_metadata_are_closed_until_allowed() {
        let open = egress("allow", "", &[], &[]);
        for address in [
            "169.254.169.254",
            "169.254.170.2",
            "::ffff:169.254.169.254",
            "64:ff9b::a9fe:a9fe",
            "2002:a9fe:a9fe::1",
            "::169.254.169.254",
            "fe80::1",
            "fd00:ec2::254",
            "fd20:ce::254",
            "100.100.100.200",
            "168.63.129.16",
        ] {
            let rule = check(&open, "a.example", address).unwrap_err();
            assert!(
                rule.starts_with("the guard on link-local and metadata addresses ("),
                "{address}: {rule}"
            );
        }
        let by_range = egress("allow", "deny_private", &["169.254.0.0/16"], &[]);
        assert_eq!(check(&by_range, "169.254.169.254", "169.254.169.254"), Ok(()));
        assert_eq!(check(&by_range, "metadata.google.internal", "169.254.169.254"), Ok(()));
        let by_name = egress("allow", "", &["metadata.google.internal"], &[]);
        assert_eq!(check(&by_name, "metadata.google.internal", "169.254.169.254"), Ok(()));
        assert!(check(&by_name, "a.example", "169.254.169.254").is_err());
    }

    #[test]
    fn metadata_names_are_refused_without_a_look_up() {
        let open = egress("allow", "", &[], &[]);
        for host in ["metadata.google.internal", "METADATA.google.internal.:80", "instance-data"] {
            assert!(check_name(&open, &authority(host)).is_err(), "{host}");
        }
        assert_eq!(check_name(&open, &authority("google.internal")), Ok(NameVerdict::Unnamed));
    }

    #[test]
    fn deny_private_refuses_every_special_range_and_form() {
        let policy = egress("allow", "deny_private", &[], &[]);
        for address in [
            "0.0.0.0",
            "0.1.2.3",
            "10.0.0.1",
            "100.64.0.1",
            "100.127.255.255",
            "127.0.0.1",
            "127.255.255.254",
            "172.16.0.1",
            "172.31.255.255",
            "192.0.0.1",
            "192.0.2.1",
            "192.88.99.1",
            "192.168.1.1",
            "198.18.0.1",
            "198.19.255.255",
            "198.51.100.1",
            "203.0.113.1",
            "224.0.0.1",
            "239.255.255.255",
            "240.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::ffff:127.0.0.1",
            "::ffff:10.0.0.1",
            "::127.0.0.1",
            "::10.0.0.1",
            "::ffff:0:10.0.0.1",
            "64:ff9b::10.0.0.1",
            "64:ff9b::7f00:1",
            "64:ff9b:1::1",
            "64:ff9b:1:a00:0:100::",
            "2002:a00:1::1",
            "2002:7f00:1::",
            "2001:0:5db8:d822::80ff:fffe",
            "2001:0:a00:1::1",
            "100::1",
            "2001:2::1",
            "2001:10::1",
            "2001:db8::1",
            "3fff::1",
            "fc00::1",
            "fdff::1",
            "fec0::1",
            "ff02::1",
        ] {
            assert!(check(&policy, "a.example", address).is_err(), "{address} passed");
        }
        for address in [
            PUBLIC,
            "1.1.1.1",
            "100.63.255.255",
            "100.128.0.1",
            "172.15.0.1",
            "172.32.0.1",
            "192.167.1.1",
            "11.0.0.1",
            "198.17.0.1",
            "223.255.255.255",
            "2606:4700:4700::1111",
            "2a00:1450::1",
            "64:ff9b::5db8:d70e",
            "2002:5db8:d70e::1",
            "::ffff:93.184.215.14",
        ] {
            assert_eq!(check(&policy, "a.example", address), Ok(()), "{address}");
        }
        let rule = check(&policy, "a.example", "::ffff:127.0.0.1");
        assert_eq!(rule, Err("egress.deny_private (127.0.0.0/8)".into()));
    }

    #[test]
    fn deny_private_yields_to_allow() {
        let policy = egress("allow", "deny_private", &["tools.internal", "10.1.0.0/16"], &[]);
        assert_eq!(check(&policy, "tools.internal", "10.9.9.9"), Ok(()));
        assert_eq!(check(&policy, "a.example", "10.1.9.9"), Ok(()));
        assert!(check(&policy, "a.example", "10.2.9.9").is_err());
    }

    proptest! {
        #[test]
        fn every_embedding_form_is_judged_as_its_v4_address(bits in any::<u32>()) {
            let policy = egress("allow", "deny_private", &["10.1.0.0/16"], &["8.8.0.0/16"]);
            let v4 = Ipv4Addr::from_bits(bits);
            let [a, b, c, d] = v4.octets();
            let expected = check(&policy, "a.example", &v4.to_string()).is_ok();
            let mapped = v4.to_ipv6_mapped().to_string();
            prop_assert_eq!(check(&policy, "a.example", &mapped).is_ok(), expected);
            let nat64 = format!("64:ff9b::{a:x}{b:02x}:{c:x}{d:02x}");
            prop_assert_eq!(check(&policy, "a.example", &nat64).is_ok(), expected);
            let six_to_four = format!("2002:{a:x}{b:02x}:{c:x}{d:02x}::1");
            prop_assert_eq!(check(&policy, "a.example", &six_to_four).is_ok(), expected);
        }
    }
}
