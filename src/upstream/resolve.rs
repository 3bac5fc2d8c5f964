//! From a host name to its addresses.
//!
//! hickory asks the servers and keeps the answers for their TTL; this module decides what is asked. The
//! system's own `getaddrinfo` was rejected: it blocks a thread for each look-up, cannot be given up, and
//! tells no TTL. What hickory's own dual-stack look-up does not give, and is done here:
//!
//! - Both families are asked at once, and a server that stays silent on one of them holds the other up for
//!   50 ms, not for the whole timeout (RFC 8305 section 3).
//! - A name of the hosts file is answered from it alone. Asking the servers for the family that the file
//!   lacks would make such a name depend on the network.
//! - The search list is walked name by name with both families, so that one answer never mixes the
//!   addresses of two names.
//! - Look-ups of one name at one time share a single walk: a fan-out of twenty calls to a new host is one
//!   question, not twenty. hickory's cache helps only once the first answer is there.
//!
//! An answer with TTL 0 serves those who waited for it. "No such name" is remembered for five seconds at
//! most: long enough for a burst, short enough for a service that is just being created. Where servers and
//! resolv.conf are missing, names of the hosts file and `localhost` still resolve.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Either, Shared, WeakShared, select};
use hickory_resolver::config::{
    ConnectionConfig, NameServerConfig, ResolveHosts, ResolverConfig, ResolverOpts,
};
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::net::{DnsError, NetError, NoRecords};
use hickory_resolver::proto::op::{Query, ResponseCode};
use hickory_resolver::proto::rr::{Name, RecordType};
use hickory_resolver::{Hosts, TokioResolver, system_conf};
use parking_lot::Mutex;
use tokio::time::timeout;

use crate::config::Dns;
use crate::error::{Cause, Error};

/// How long the other family is waited for once one has answered (RFC 8305 section 3).
const RESOLUTION_DELAY: Duration = Duration::from_millis(50);

/// The longest that "no such name" is remembered.
const NEGATIVE_TTL: Duration = Duration::from_secs(5);

/// Answers kept. One is some hundred bytes, and an agent's tools have tens of names.
const CACHE_ANSWERS: u64 = 4096;

/// Questions at once on one TCP connection to a server, for answers that UDP does not carry.
const QUESTIONS_PER_CONNECTION: usize = 256;

type Answer = Result<Vec<IpAddr>, Error>;
type Flight = BoxFuture<'static, Answer>;

/// Resolves names, with a cache. Cheap to clone; clones share everything.
#[derive(Clone)]
pub struct Resolver(Arc<Inner>);

struct Inner {
    servers: TokioResolver,
    hosts: Hosts,
    search: Vec<Name>,
    ndots: usize,
    timeout: Duration,
    /// Look-ups under way, by name. Weak, so that a look-up ends with the last caller who waits for it.
    flights: Mutex<HashMap<Box<str>, WeakShared<Flight>>>,
}

impl Resolver {
    /// Reads resolv.conf and the hosts file; asks `dns.servers` instead of resolv.conf's where there are
    /// any, with the search list still resolv.conf's. A resolv.conf that is missing, unreadable or
    /// without servers is logged and leaves the hosts file.
    ///
    /// # Errors
    /// [`Error::Internal`] when hickory cannot be set up.
    pub fn new(dns: &Dns) -> Result<Self, Error> {
        let (config, options) = system_conf::read_system_conf().unwrap_or_else(|error| {
            if dns.servers.is_empty() {
                tracing::warn!(%error, "resolv.conf gives no name server: only the hosts file resolves names");
            }
            (ResolverConfig::default(), ResolverOpts::default())
        });
        let (_, search, system_servers) = config.into_parts();
        let servers =
            if dns.servers.is_empty() { system_servers } else { dns.servers.iter().map(server).collect() };
        let hosts = Hosts::from_system().unwrap_or_default();
        Self::from_parts(servers, search, options, hosts, dns.timeout)
    }

    fn from_parts(
        servers: Vec<NameServerConfig>,
        search: Vec<Name>,
        mut options: ResolverOpts,
        hosts: Hosts,
        timeout: Duration,
    ) -> Result<Self, Error> {
        let ndots = options.ndots;
        // A lost packet is sent again at half time, so that one loss does not cost the look-up.
        options.timeout = options.timeout.min(timeout / 2);
        options.attempts = options.attempts.max(1);
        options.use_hosts_file = ResolveHosts::Never; // it is asked here
        options.cache_size = CACHE_ANSWERS;
        options.negative_max_ttl = Some(NEGATIVE_TTL);
        options.max_active_requests = QUESTIONS_PER_CONNECTION;
        // The names that come here are complete: the search list is walked here, too.
        let config = ResolverConfig::from_parts(None, Vec::new(), servers);
        let servers = TokioResolver::builder_with_config(config, TokioRuntimeProvider::default())
            .with_options(options)
            .build()
            .map_err(|error| Error::Internal(Cause::chain(&error)))?;
        Ok(Self(Arc::new(Inner { servers, hosts, search, ndots, timeout, flights: Mutex::default() })))
    }

    /// The addresses of `host`, a name in normal form; never empty. IPv6 comes first, except for a
    /// `localhost` that the hosts file lacks. Takes `dns.timeout` at most.
    ///
    /// Dropping the future gives up the look-up unless another caller waits for the same name.
    ///
    /// # Errors
    /// [`Error::DnsFailed`] when there is no such name, it has no address, or no server could tell;
    /// [`Error::DnsTimeout`] when the servers stayed silent.
    pub async fn lookup(&self, host: &str) -> Answer {
        self.flight(host).await
    }

    /// Whether `host` has this address. [`Self::lookup`] does not wait for a family that is late, so an
    /// address that is not among its answer is asked for by its own family.
    ///
    /// # Errors
    /// As [`Self::lookup`].
    pub async fn leads_to(&self, host: &str, ip: IpAddr) -> Result<bool, Error> {
        if self.lookup(host).await?.contains(&ip) {
            return Ok(true);
        }
        Ok(timeout(self.0.timeout, self.0.has(host, ip)).await.unwrap_or(false))
    }

    fn flight(&self, host: &str) -> Shared<Flight> {
        let mut flights = self.0.flights.lock();
        if let Some(flight) = flights.get(host).and_then(WeakShared::upgrade) {
            return flight;
        }
        // The entry goes with the future, whether that ends or is dropped by its last waiter. Should a
        // successor have taken its place, that one merely stays unshared.
        let entry = Entry { inner: self.0.clone(), host: host.into() };
        let flight = async move {
            let bound = entry.inner.timeout;
            let answer = timeout(bound, entry.inner.resolve(&entry.host)).await;
            answer.unwrap_or(Err(Error::DnsTimeout))
        }
        .boxed()
        .shared();
        if let Some(weak) = flight.downgrade() {
            flights.insert(host.into(), weak);
        }
        flight
    }
}

/// A look-up's place among those under way.
struct Entry {
    inner: Arc<Inner>,
    host: Box<str>,
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.inner.flights.lock().remove(&self.host);
    }
}

impl Inner {
    async fn resolve(&self, host: &str) -> Answer {
        let name = Name::from_ascii(host).map_err(|error| Error::DnsFailed(Cause::chain(&error)))?;
        let listed = self.hosts_file(&name);
        if !listed.is_empty() {
            return Ok(listed);
        }
        if host == "localhost" || host.ends_with(".localhost") {
            // RFC 6761 section 6.3. IPv4 first: what listens on "localhost" mostly does so there.
            return Ok(vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()]);
        }
        // The first failure that says more than "not here": a search list's misses are no news.
        let mut failure = None;
        for candidate in self.candidates(name) {
            match self.ask_both(candidate).await {
                Ok(addresses) => return Ok(addresses),
                Err(NetError::Dns(DnsError::NoRecordsFound(_))) => {}
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        Err(match failure {
            None => Error::DnsFailed(format!("{host} does not exist or has no address").into()),
            Some(NetError::Timeout) => Error::DnsTimeout,
            Some(error) => Error::DnsFailed(format!("{host}: {error}").into()),
        })
    }

    async fn has(&self, host: &str, ip: IpAddr) -> bool {
        let family = if ip.is_ipv6() { RecordType::AAAA } else { RecordType::A };
        let Ok(name) = Name::from_ascii(host) else { return false };
        if !self.hosts_file(&name).is_empty() {
            // The file is all that counts for a name that it lists.
            return false;
        }
        for candidate in self.candidates(name) {
            if let Ok(addresses) = ask(self.servers.clone(), candidate, family).await {
                return addresses.contains(&ip);
            }
        }
        false
    }

    fn hosts_file(&self, name: &Name) -> Vec<IpAddr> {
        [RecordType::AAAA, RecordType::A]
            .into_iter()
            .filter_map(|family| self.hosts.lookup_static_host(&Query::query(name.clone(), family)))
            .flat_map(|lookup| lookup.answers().iter().filter_map(|r| r.data.ip_addr()).collect::<Vec<_>>())
            .collect()
    }

    /// The complete names that `name` may stand for, in the order of resolv.conf(5): as it is first when
    /// it has `ndots` dots, else last.
    fn candidates(&self, name: Name) -> Vec<Name> {
        let is_first = usize::from(name.num_labels()) > self.ndots;
        let mut complete = name.clone();
        complete.set_fqdn(true);
        // A name that grows too long for DNS falls out.
        let mut names: Vec<Name> =
            self.search.iter().filter_map(|domain| name.clone().append_domain(domain).ok()).collect();
        for searched in &mut names {
            searched.set_fqdn(true);
        }
        let at = if is_first { 0 } else { names.len() };
        names.insert(at, complete);
        names
    }

    /// Asks for both families. An error is the one of the family that failed with more to say.
    async fn ask_both(&self, name: Name) -> Result<Vec<IpAddr>, NetError> {
        let v6 = ask(self.servers.clone(), name.clone(), RecordType::AAAA).boxed();
        let v4 = ask(self.servers.clone(), name, RecordType::A).boxed();
        let (first, mut straggler, is_v6_first) = match select(v6, v4).await {
            Either::Left((first, v4)) => (first, v4, true),
            Either::Right((first, v6)) => (first, v6, false),
        };
        let second = if first.is_ok() {
            match timeout(RESOLUTION_DELAY, &mut straggler).await {
                Ok(second) => Some(second),
                Err(_) => {
                    // Its answer goes to the cache, so that the next look-up does not wait for it again.
                    // hickory's timeouts bound the task.
                    tokio::spawn(straggler);
                    None
                }
            }
        } else {
            Some(straggler.await)
        };
        let (v6, v4) = if is_v6_first { (Some(first), second) } else { (second, Some(first)) };
        let mut addresses = Vec::new();
        let mut failure = None;
        for answer in [v6, v4].into_iter().flatten() {
            match answer {
                Ok(found) => addresses.extend(found),
                Err(error) if says_more(&error, failure.as_ref()) => failure = Some(error),
                Err(_) => {}
            }
        }
        match failure {
            Some(error) if addresses.is_empty() => Err(error),
            _ => Ok(addresses),
        }
    }
}

/// "No records" of one family must not hide that the other one could not be asked.
fn says_more(error: &NetError, than: Option<&NetError>) -> bool {
    let is_miss = |error: &NetError| matches!(error, NetError::Dns(DnsError::NoRecordsFound(_)));
    than.is_none_or(|other| is_miss(other) && !is_miss(error))
}

/// Asks for one family. No address is an error, whether the server says so or only sends none.
async fn ask(servers: TokioResolver, name: Name, family: RecordType) -> Result<Vec<IpAddr>, NetError> {
    let lookup = servers.lookup(name, family).await?;
    let addresses: Vec<IpAddr> = lookup.answers().iter().filter_map(|record| record.data.ip_addr()).collect();
    if addresses.is_empty() {
        return Err(NoRecords::new(lookup.query().clone(), ResponseCode::NoError).into());
    }
    Ok(addresses)
}

fn server(address: &SocketAddr) -> NameServerConfig {
    let connections = [ConnectionConfig::udp(), ConnectionConfig::tcp()].map(|mut connection| {
        connection.port = address.port();
        connection
    });
    NameServerConfig::new(address.ip(), true, connections.into())
}

impl std::fmt::Debug for Resolver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Resolver").field("timeout", &self.0.timeout).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use tokio::net::UdpSocket;
    use tokio::time::Instant;

    use super::*;

    const A: u16 = 1;
    const AAAA: u16 = 28;

    /// What the stub says to one question.
    enum Reply {
        Records(u32, Vec<IpAddr>),
        NoSuchName,
        ServerFailure,
        Silence,
    }
    use Reply::{NoSuchName, Records, ServerFailure, Silence};

    /// A name server on loopback, answering by `script` and remembering what it was asked.
    struct Stub {
        address: SocketAddr,
        asked: Arc<Mutex<Vec<(String, u16)>>>,
    }

    impl Stub {
        async fn start(script: impl Fn(&str, u16) -> Reply + Send + 'static) -> Self {
            let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
            let address = socket.local_addr().unwrap();
            let asked = Arc::new(Mutex::new(Vec::new()));
            let log = asked.clone();
            tokio::spawn(async move {
                let mut packet = [0; 1500];
                while let Ok((len, peer)) = socket.recv_from(&mut packet).await {
                    let (name, family, end) = question(&packet[..len]);
                    let reply = script(&name, family);
                    log.lock().push((name, family));
                    if let Some(bytes) = answer(&packet[..end], family, reply) {
                        let _ = socket.send_to(&bytes, peer).await;
                    }
                }
            });
            Self { address, asked }
        }

        /// How often `name` was asked for in `family`.
        fn count(&self, name: &str, family: u16) -> usize {
            self.asked.lock().iter().filter(|(n, f)| n == name && *f == family).count()
        }

        fn resolver(&self, timeout_ms: u64, hosts: &str) -> Resolver {
            self.searching(timeout_ms, hosts, &[], 1)
        }

        fn searching(&self, timeout_ms: u64, hosts: &str, search: &[&str], ndots: usize) -> Resolver {
            let mut table = Hosts::default();
            table.read_hosts_conf(hosts.as_bytes()).unwrap();
            let search = search.iter().map(|domain| Name::from_ascii(domain).unwrap()).collect();
            let mut options = ResolverOpts::default();
            options.ndots = ndots;
            let timeout = Duration::from_millis(timeout_ms);
            Resolver::from_parts(vec![server(&self.address)], search, options, table, timeout).unwrap()
        }
    }

    /// The question's name and type, and where it ends (RFC 1035 section 4.1).
    fn question(packet: &[u8]) -> (String, u16, usize) {
        let (mut labels, mut at) = (Vec::new(), 12);
        while packet[at] != 0 {
            let end = at + 1 + usize::from(packet[at]);
            labels.push(String::from_utf8_lossy(&packet[at + 1..end]).to_lowercase());
            at = end;
        }
        (labels.join("."), u16::from_be_bytes([packet[at + 1], packet[at + 2]]), at + 5)
    }

    fn answer(query: &[u8], family: u16, reply: Reply) -> Option<Vec<u8>> {
        let (code, ttl, addresses) = match reply {
            Records(ttl, addresses) => (0, ttl, addresses),
            NoSuchName => (3, 0, vec![]),
            ServerFailure => (2, 0, vec![]),
            Silence => return None,
        };
        let records: Vec<Vec<u8>> = addresses
            .iter()
            .filter(|ip| ip.is_ipv6() == (family == AAAA))
            .map(|ip| match ip {
                IpAddr::V4(ip) => ip.octets().to_vec(),
                IpAddr::V6(ip) => ip.octets().to_vec(),
            })
            .collect();
        let mut packet = query.to_vec();
        packet[2..4].copy_from_slice(&[0x81, 0x80 | code]); // an answer, recursion done
        packet[4..12].copy_from_slice(&[0, 1, 0, records.len() as u8, 0, 0, 0, 0]);
        for data in records {
            packet.extend([0xc0, 12]); // the question's name
            packet.extend(family.to_be_bytes());
            packet.extend([0, 1]);
            packet.extend(ttl.to_be_bytes());
            packet.extend((data.len() as u16).to_be_bytes());
            packet.extend(data);
        }
        Some(packet)
    }

    fn ips(texts: &[&str]) -> Vec<IpAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[tokio::test]
    async fn both_families_are_asked_and_cached() {
        let addresses = ips(&["192.0.2.1", "192.0.2.2", "2001:db8::1"]);
        let stub = Stub::start(move |_, _| Records(300, addresses.clone())).await;
        let resolver = stub.resolver(5000, "");
        for _ in 0..3 {
            let mut found = resolver.lookup("tool.example").await.unwrap();
            found[1..].sort();
            assert_eq!(found, ips(&["2001:db8::1", "192.0.2.1", "192.0.2.2"]));
        }
        assert_eq!((stub.count("tool.example", A), stub.count("tool.example", AAAA)), (1, 1));
    }

    #[tokio::test]
    async fn an_answer_is_asked_for_again_when_its_ttl_is_over() {
        let stub = Stub::start(|_, _| Records(1, ips(&["192.0.2.1"]))).await;
        let resolver = stub.resolver(5000, "");
        resolver.lookup("tool.example").await.unwrap();
        tokio::time::sleep(Duration::from_millis(1200)).await;
        resolver.lookup("tool.example").await.unwrap();
        assert_eq!(stub.count("tool.example", A), 2);
    }

    #[tokio::test]
    async fn a_ttl_of_zero_serves_those_who_wait_and_nobody_else() {
        let stub = Stub::start(|_, _| Records(0, ips(&["192.0.2.1"]))).await;
        let resolver = stub.resolver(5000, "");
        assert_eq!(resolver.lookup("tool.example").await, Ok(ips(&["192.0.2.1"])));
        assert_eq!(resolver.lookup("tool.example").await, Ok(ips(&["192.0.2.1"])));
        assert_eq!(stub.count("tool.example", A), 2);
    }

    #[tokio::test]
    async fn a_name_that_does_not_exist_fails_with_its_cause() {
        let stub = Stub::start(|_, _| NoSuchName).await;
        let error = stub.resolver(5000, "").lookup("gone.example").await.unwrap_err();
        assert_eq!(error, Error::DnsFailed("gone.example does not exist or has no address".into()));
    }

    #[tokio::test]
    async fn a_name_without_addresses_fails() {
        let stub = Stub::start(|_, _| Records(60, vec![])).await;
        let error = stub.resolver(5000, "").lookup("empty.example").await.unwrap_err();
        assert!(matches!(error, Error::DnsFailed(_)), "{error:?}");
    }

    #[tokio::test]
    async fn a_failing_server_is_told_apart_from_a_missing_name() {
        let stub = Stub::start(|_, family| if family == A { ServerFailure } else { NoSuchName }).await;
        let error = stub.resolver(5000, "").lookup("a.example").await.unwrap_err();
        let Error::DnsFailed(cause) = error else { panic!("{error:?}") };
        assert!(!cause.as_str().unwrap().contains("does not exist"), "{cause:?}");
    }

    #[tokio::test]
    async fn a_silent_server_ends_at_the_timeout() {
        let stub = Stub::start(|_, _| Silence).await;
        let resolver = stub.searching(200, "", &["svc.example"], 1);
        let begin = Instant::now();
        assert_eq!(resolver.lookup("a.example").await, Err(Error::DnsTimeout));
        let elapsed = begin.elapsed();
        assert!(elapsed >= Duration::from_millis(195) && elapsed < Duration::from_secs(2), "{elapsed:?}");
        assert!(resolver.0.flights.lock().is_empty());
    }

    #[tokio::test]
    async fn a_lost_question_is_asked_again_within_the_timeout() {
        let lost = Mutex::new(2); // the first packet of each family
        let stub = Stub::start(move |_, _| {
            let mut left = lost.lock();
            if *left > 0 {
                *left -= 1;
                return Silence;
            }
            Records(60, ips(&["192.0.2.1"]))
        })
        .await;
        assert_eq!(stub.resolver(3000, "").lookup("a.example").await, Ok(ips(&["192.0.2.1"])));
    }

    #[tokio::test]
    async fn names_that_only_machines_use_are_asked_for() {
        let stub = Stub::start(|_, _| Records(60, ips(&["192.0.2.1"]))).await;
        let resolver = stub.resolver(5000, "");
        for name in ["my_tool.svc.example", "_x.example", "xn--bcher-kva.example", "1a.example"] {
            assert_eq!(resolver.lookup(name).await, Ok(ips(&["192.0.2.1"])), "{name}");
        }
    }

    #[tokio::test]
    async fn silence_on_one_family_does_not_hold_up_the_other() {
        let stub =
            Stub::start(|_, family| if family == AAAA { Silence } else { Records(60, ips(&["192.0.2.1"])) })
                .await;
        let resolver = stub.resolver(20_000, "");
        let begin = Instant::now();
        assert_eq!(resolver.lookup("a.example").await, Ok(ips(&["192.0.2.1"])));
        assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    }

    #[tokio::test]
    async fn an_address_of_the_family_that_is_late_is_one_all_the_same() {
        let asked = AtomicUsize::new(0);
        let stub = Stub::start(move |_, family| match family {
            AAAA => Records(0, ips(&["2001:db8::1"])),
            _ if asked.fetch_add(1, Ordering::Relaxed) == 0 => Silence,
            _ => Records(0, ips(&["192.0.2.1"])),
        })
        .await;
        let resolver = stub.resolver(20_000, "");
        assert_eq!(resolver.leads_to("a.example", "192.0.2.1".parse().unwrap()).await, Ok(true));
        assert_eq!(resolver.leads_to("a.example", "2001:db8::1".parse().unwrap()).await, Ok(true));
        assert_eq!(resolver.leads_to("a.example", "192.0.2.2".parse().unwrap()).await, Ok(false));
    }

    #[tokio::test]
    async fn callers_at_one_time_share_one_question() {
        let stub = Stub::start(|_, _| Records(0, ips(&["192.0.2.1"]))).await;
        let resolver = stub.resolver(5000, "");
        let all = futures_util::future::join_all((0..20).map(|_| resolver.lookup("tool.example"))).await;
        assert!(all.iter().all(|answer| *answer == Ok(ips(&["192.0.2.1"]))), "{all:?}");
        assert_eq!(stub.count("tool.example", A), 1);
        assert!(resolver.0.flights.lock().is_empty());
    }

    #[tokio::test]
    async fn a_caller_that_leaves_ends_neither_the_others_look_up_nor_leaks_its_own() {
        let stub = Stub::start(|_, _| Silence).await;
        let resolver = stub.resolver(400, "");
        let mut leaves = Box::pin(resolver.lookup("a.example"));
        let mut stays = Box::pin(resolver.lookup("a.example"));
        assert!(timeout(Duration::from_millis(20), &mut leaves).await.is_err());
        assert!(timeout(Duration::from_millis(20), &mut stays).await.is_err());
        drop(leaves);
        assert_eq!(resolver.0.flights.lock().len(), 1);
        assert_eq!(stays.as_mut().await, Err(Error::DnsTimeout));
        let mut alone = Box::pin(resolver.lookup("b.example"));
        assert!(timeout(Duration::from_millis(20), &mut alone).await.is_err());
        drop(alone);
        assert!(resolver.0.flights.lock().is_empty());
    }

    #[tokio::test]
    async fn short_names_walk_the_search_list_in_order() {
        let stub = Stub::start(|name, _| match name {
            "tool.ns.svc.cluster.local" => Records(60, ips(&["10.1.2.3"])),
            "api.example.com" => Records(60, ips(&["192.0.2.1"])),
            _ => NoSuchName,
        })
        .await;
        let search = ["own.svc.cluster.local", "svc.cluster.local", "cluster.local"];
        let kubernetes = stub.searching(5000, "", &search, 5);
        assert_eq!(kubernetes.lookup("tool.ns").await, Ok(ips(&["10.1.2.3"])));
        assert_eq!(stub.count("tool.ns.own.svc.cluster.local", A), 1);
        assert_eq!(stub.count("tool.ns", A), 0);
        assert_eq!(kubernetes.lookup("api.example.com").await, Ok(ips(&["192.0.2.1"])));
        assert_eq!(stub.count("api.example.com.cluster.local", A), 1);
        let plain = stub.searching(5000, "", &search, 1);
        assert_eq!(plain.lookup("api.example.com").await, Ok(ips(&["192.0.2.1"])));
        assert_eq!(stub.count("api.example.com.cluster.local", A), 1);
    }

    #[tokio::test]
    async fn the_hosts_file_and_localhost_need_no_server() {
        let stub = Stub::start(|_, _| NoSuchName).await;
        let hosts = "127.0.0.9 tool.local tool # a comment\n::9 six.local\n";
        let resolver = stub.resolver(5000, hosts);
        assert_eq!(resolver.lookup("tool").await, Ok(ips(&["127.0.0.9"])));
        assert_eq!(resolver.lookup("six.local").await, Ok(ips(&["::9"])));
        assert_eq!(resolver.lookup("localhost").await, Ok(ips(&["127.0.0.1", "::1"])));
        assert!(stub.asked.lock().is_empty());
        let overridden = stub.resolver(5000, "127.0.0.7 localhost");
        assert_eq!(overridden.lookup("localhost").await, Ok(ips(&["127.0.0.7"])));
    }

    #[tokio::test]
    async fn without_servers_names_fail_and_the_hosts_file_still_works() {
        let mut hosts = Hosts::default();
        hosts.read_hosts_conf("127.0.0.9 tool".as_bytes()).unwrap();
        let resolver =
            Resolver::from_parts(vec![], vec![], ResolverOpts::default(), hosts, Duration::from_secs(5))
                .unwrap();
        assert_eq!(resolver.lookup("tool").await, Ok(ips(&["127.0.0.9"])));
        let error = resolver.lookup("a.example").await.unwrap_err();
        assert!(matches!(error, Error::DnsFailed(_)), "{error:?}");
    }

    #[test]
    fn the_systems_own_files_never_stop_the_start() {
        let dns = Dns { servers: vec![], timeout: Duration::from_secs(2) };
        assert!(Resolver::new(&dns).is_ok());
    }
}
