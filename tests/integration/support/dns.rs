//! A stub name server on loopback: UDP, and TCP on the same port for resolvers that fall back to it.
//!
//! Written by hand on the wire format, since what it must do, staying mute or lying, no server library offers.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::soon;

const A: u16 = 1;
const AAAA: u16 = 28;
const NO_ERROR: u8 = 0;
const SERVER_FAILURE: u8 = 2;
const NAME_ERROR: u8 = 3;

/// What the server says about a name.
#[derive(Debug, Clone)]
pub enum Answer {
    /// Addresses of both families; a question gets those of its own. TTL in seconds.
    Addresses(Vec<IpAddr>, u32),
    /// NXDOMAIN.
    Unknown,
    /// SERVFAIL.
    Failure,
    /// Nothing at all.
    Mute,
}

impl Answer {
    /// These addresses, good for a minute.
    pub fn addresses(addresses: &[&str]) -> Self {
        let parse = |address: &&str| address.parse().expect("an IP address");
        Self::Addresses(addresses.iter().map(parse).collect(), 60)
    }
}

/// A name server; names it was not told of are unknown.
pub struct Dns {
    address: SocketAddr,
    zone: Arc<Zone>,
    serving: [JoinHandle<()>; 2],
}

#[derive(Default)]
struct Zone {
    answers: Mutex<HashMap<String, Answer>>,
    queries: watch::Sender<Vec<(String, u16)>>,
}

impl Dns {
    /// On a free port of 127.0.0.1, with these names.
    pub async fn start(answers: &[(&str, Answer)]) -> Self {
        let (udp, tcp) = both_on_one_port().await;
        let address = udp.local_addr().expect("a bound socket has an address");
        let zone = Arc::new(Zone::default());
        let serving = [
            tokio::spawn(serve_udp(udp, Arc::clone(&zone))),
            tokio::spawn(serve_tcp(tcp, Arc::clone(&zone))),
        ];
        let dns = Self { address, zone, serving };
        for (name, answer) in answers {
            dns.set(name, answer.clone());
        }
        dns
    }

    /// What `dns.servers` shall name.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// From now on this name has this answer.
    pub fn set(&self, name: &str, answer: Answer) {
        self.zone.answers.lock().insert(name.to_ascii_lowercase(), answer);
    }

    /// Questions for this name so far, whatever the type.
    pub fn queries(&self, name: &str) -> usize {
        self.zone.queries.borrow().iter().filter(|(asked, _)| asked.eq_ignore_ascii_case(name)).count()
    }

    /// Waits until this name was asked for so many times.
    #[track_caller]
    pub fn until_asked(&self, name: &str, times: usize) -> impl Future<Output = ()> {
        let mut queries = self.zone.queries.subscribe();
        let name = name.to_owned();
        soon(async move {
            let enough =
                |all: &Vec<(String, u16)>| all.iter().filter(|(asked, _)| *asked == name).count() >= times;
            queries.wait_for(enough).await.expect("the zone outlives the wait");
        })
    }
}

impl Drop for Dns {
    fn drop(&mut self) {
        self.serving.iter().for_each(JoinHandle::abort);
    }
}

async fn both_on_one_port() -> (UdpSocket, TcpListener) {
    loop {
        let udp = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("loopback can be bound");
        let port = udp.local_addr().expect("a bound socket has an address").port();
        if let Ok(tcp) = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await {
            return (udp, tcp);
        }
    }
}

async fn serve_udp(socket: UdpSocket, zone: Arc<Zone>) {
    let mut packet = [0; 1500];
    while let Ok((length, from)) = socket.recv_from(&mut packet).await {
        if let Some(answer) = zone.answer(&packet[..length]) {
            let _ = socket.send_to(&answer, from).await;
        }
    }
}

async fn serve_tcp(listener: TcpListener, zone: Arc<Zone>) {
    while let Ok((mut stream, _)) = listener.accept().await {
        let _ = answer_one(&mut stream, &zone).await;
    }
}

async fn answer_one(stream: &mut TcpStream, zone: &Zone) -> std::io::Result<()> {
    let mut query = vec![0; usize::from(stream.read_u16().await?)];
    stream.read_exact(&mut query).await?;
    let Some(answer) = zone.answer(&query) else { return Ok(()) };
    stream.write_u16(u16::try_from(answer.len()).expect("answers are short")).await?;
    stream.write_all(&answer).await
}

impl Zone {
    /// The reply to a query with one question, or `None` for staying mute (garbage gets that too).
    fn answer(&self, query: &[u8]) -> Option<Vec<u8>> {
        let question = Question::parse(query)?;
        self.queries.send_modify(|all| all.push((question.name.clone(), question.kind)));
        let answer = self.answers.lock().get(&question.name).cloned().unwrap_or(Answer::Unknown);
        match answer {
            Answer::Addresses(addresses, ttl) => Some(question.reply(NO_ERROR, &addresses, ttl)),
            Answer::Unknown => Some(question.reply(NAME_ERROR, &[], 0)),
            Answer::Failure => Some(question.reply(SERVER_FAILURE, &[], 0)),
            Answer::Mute => None,
        }
    }
}

struct Question<'a> {
    id: [u8; 2],
    name: String,
    kind: u16,
    /// The question as it came, to be repeated in the reply.
    raw: &'a [u8],
}

impl<'a> Question<'a> {
    fn parse(query: &'a [u8]) -> Option<Self> {
        let mut labels = Vec::new();
        let mut at = 12;
        loop {
            let length = usize::from(*query.get(at)?);
            at += 1;
            if length == 0 {
                break;
            }
            labels.push(String::from_utf8_lossy(query.get(at..at + length)?).to_ascii_lowercase());
            at += length;
        }
        let kind = u16::from_be_bytes([*query.get(at)?, *query.get(at + 1)?]);
        Some(Self { id: [query[0], query[1]], name: labels.join("."), kind, raw: query.get(12..at + 4)? })
    }

    fn reply(&self, code: u8, addresses: &[IpAddr], ttl: u32) -> Vec<u8> {
        let fitting: Vec<_> = addresses.iter().filter(|address| self.kind == kind_of(**address)).collect();
        let count = u16::try_from(fitting.len()).expect("a test has few addresses").to_be_bytes();
        // A response, recursion desired and available; one question, the answers, nothing else.
        let mut reply = vec![self.id[0], self.id[1], 0x81, 0x80 | code, 0, 1, count[0], count[1], 0, 0, 0, 0];
        reply.extend_from_slice(self.raw);
        for address in fitting {
            // The name is a pointer to the question's.
            reply.extend_from_slice(&[0xc0, 12]);
            reply.extend_from_slice(&self.kind.to_be_bytes());
            reply.extend_from_slice(&1_u16.to_be_bytes());
            reply.extend_from_slice(&ttl.to_be_bytes());
            match address {
                IpAddr::V4(v4) => reply.extend([&[0, 4][..], &v4.octets()].concat()),
                IpAddr::V6(v6) => reply.extend([&[0, 16][..], &v6.octets()].concat()),
            }
        }
        reply
    }
}

fn kind_of(address: IpAddr) -> u16 {
    match address {
        IpAddr::V4(_) => A,
        IpAddr::V6(_) => AAAA,
    }
}
