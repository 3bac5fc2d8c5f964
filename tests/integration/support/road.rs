//! One call, whichever way it takes through hedgerow: what must hold in every mode is written once.

use std::future::poll_fn;

use bytes::Bytes;
use h2::client::{ResponseFuture, SendRequest};
use h2::ext::Protocol;
use h2::{RecvStream, SendStream};
use http::{HeaderMap, Request, Version};
use tokio::io::AsyncReadExt;
use tokio::task::JoinHandle;

use super::client::Agent;
use super::dns::Dns;
use super::h1::{self, Framing};
use super::hedgerow::HedgerowProcess;
use super::intercept::{self, HOST, names, trusting};
use super::pki::Pki;
use super::soon;
use super::upstream::{Exchange, Upstream};

/// How calls come to hedgerow and leave it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Absolute-form to the proxy port.
    Forward,
    /// Clear text through a CONNECT.
    PlainTunnel,
    /// Absolute-form, and TLS to the upstream.
    Originated,
    /// TLS that hedgerow ends, HTTP/1.1 inside.
    Intercepted,
    /// TLS that hedgerow ends, HTTP/2 inside.
    InterceptedHttp2,
    /// HTTP/2 by prior knowledge.
    ForwardHttp2,
}

impl Mode {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::Forward,
        Self::PlainTunnel,
        Self::Originated,
        Self::Intercepted,
        Self::InterceptedHttp2,
        Self::ForwardHttp2,
    ];

    /// Whether the agent speaks HTTP/2.
    pub fn is_http2(self) -> bool {
        matches!(self, Self::InterceptedHttp2 | Self::ForwardHttp2)
    }

    fn is_tls_upstream(self) -> bool {
        matches!(self, Self::Originated | Self::Intercepted | Self::InterceptedHttp2)
    }

    fn policy(self) -> &'static str {
        match self {
            Self::Intercepted | Self::InterceptedHttp2 => "intercept: true",
            Self::Originated => "origin: https",
            Self::Forward | Self::PlainTunnel | Self::ForwardHttp2 => "intercept: false",
        }
    }
}

/// A hedgerow, and behind it an upstream of HTTP/1.1.
pub struct Road {
    /// How calls go.
    pub mode: Mode,
    /// The upstream, driven step by step.
    pub upstream: Upstream,
    /// The process.
    pub hedgerow: HedgerowProcess,
    authority: String,
    _kept: (Pki, Dns),
}

impl Road {
    /// With these stages of the upstream's policy.
    pub async fn start(mode: Mode, stages: &str) -> Self {
        Self::start_with(mode, stages, "").await
    }

    /// The same with further keys at the policy's top.
    pub async fn start_with(mode: Mode, stages: &str, keys: &str) -> Self {
        Self::open(mode, stages, keys, "").await
    }

    /// The same with other upstreams beside it.
    pub async fn start_beside(mode: Mode, stages: &str, others: &str) -> Self {
        Self::open(mode, stages, "", others).await
    }

    async fn open(mode: Mode, stages: &str, keys: &str, others: &str) -> Self {
        let (pki, dns) = (Pki::new(), names().await);
        let setup = Upstream::on([127, 0, 0, 1]);
        let upstream = match mode.is_tls_upstream() {
            true => setup.tls(pki.server(&[HOST])).start().await,
            false => setup.start().await,
        };
        let tool = format!("tool: {{ hosts: [{HOST}], {}, {stages} }}", mode.policy());
        let upstreams = format!("upstreams: {{ {tool}, {others} }}");
        let policy = format!("{}\n{keys}\n{upstreams}", intercept::base(&pki, &dns));
        let hedgerow = HedgerowProcess::start(&policy).await;
        let authority = format!("{HOST}:{}", upstream.address().port());
        Self { mode, upstream, hedgerow, authority, _kept: (pki, dns) }
    }

    /// The upstream's `host:port`.
    pub fn authority(&self) -> &str {
        &self.authority
    }

    /// Sends a request's head, on a connection of its own. A body follows where the fields announce one.
    pub async fn call(&self, method: &str, path: &str, fields: &[(&str, &str)]) -> Call {
        match self.mode.is_http2() {
            true => self.call_http2(method, path, fields).await,
            false => self.call_http1(method, path, fields).await,
        }
    }

    /// Asks for a WebSocket, in the way of the agent's version of HTTP (RFC 6455, RFC 8441).
    pub async fn upgrade(&self, path: &str) -> Call {
        if self.mode.is_http2() {
            return self.call("CONNECT", path, &[("sec-websocket-version", "13")]).await;
        }
        let fields = [
            ("Connection", "Upgrade"),
            ("Upgrade", "websocket"),
            ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="),
            ("Sec-WebSocket-Version", "13"),
        ];
        self.call("GET", path, &fields).await
    }

    /// A GET and the upstream's end of it.
    pub async fn exchange(&mut self, fields: &[(&str, &str)]) -> (Call, Exchange) {
        let call = self.call("GET", "/", fields).await;
        (call, self.upstream.next().await)
    }

    async fn connect(&self, protocol: &str) -> Agent {
        let tls = || trusting(&self.hedgerow).offering(&[protocol]);
        match self.mode {
            Mode::Forward | Mode::Originated | Mode::ForwardHttp2 => self.hedgerow.agent().await,
            Mode::PlainTunnel => {
                let mut agent = self.hedgerow.agent().await;
                assert_eq!(agent.open_tunnel(&self.authority).await.status, 200);
                agent
            }
            Mode::Intercepted | Mode::InterceptedHttp2 => {
                intercept::inside(&self.hedgerow, &self.authority, HOST, tls()).await
            }
        }
    }

    async fn call_http1(&self, method: &str, path: &str, fields: &[(&str, &str)]) -> Call {
        let mut agent = self.connect("http/1.1").await;
        let authority = &self.authority;
        let prefix = match self.mode {
            Mode::Forward | Mode::Originated => format!("http://{authority}"),
            _ => String::new(),
        };
        let mut head = format!("{method} {prefix}{path} HTTP/1.1\r\nHost: {authority}\r\n");
        for (name, value) in fields {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        agent.send(head + "\r\n").await;
        let sends_chunks = fields.iter().any(|(name, _)| name.eq_ignore_ascii_case("transfer-encoding"));
        Call { line: Line::Http1 { agent, sends_chunks, framing: None }, ahead: Vec::new() }
    }

    async fn call_http2(&self, method: &str, path: &str, fields: &[(&str, &str)]) -> Call {
        let socket = self.connect("h2").await.into_socket();
        let (sender, connection) = soon(h2::client::handshake(socket)).await.expect("hedgerow speaks HTTP/2");
        let driver = tokio::spawn(async move { drop(connection.await) });
        let mut sender = soon(sender.ready()).await.expect("a stream may be opened");
        let scheme = if self.mode == Mode::InterceptedHttp2 { "https" } else { "http" };
        let mut request = Request::builder()
            .version(Version::HTTP_2)
            .method(method)
            .uri(format!("{scheme}://{}{path}", self.authority));
        let has_body = fields.iter().any(|(name, _)| is_framing(name));
        for (name, value) in fields.iter().filter(|(name, _)| !is_for_http1(name)) {
            request = request.header(*name, *value);
        }
        if method == "CONNECT" {
            // Allowed once the server's settings have said so.
            while !sender.is_extended_connect_protocol_enabled() {
                tokio::task::yield_now().await;
            }
            request = request.extension(Protocol::from_static("websocket"));
        }
        let is_over = !has_body && method != "CONNECT";
        let request = request.body(()).expect("a valid head");
        let (response, outgoing) = sender.send_request(request, is_over).expect("the head can be sent");
        let exchange = Http2 { response, outgoing, incoming: None, driver, _sender: sender, trailers: None };
        Call { line: Line::Http2(Box::new(exchange)), ahead: Vec::new() }
    }
}

fn is_framing(name: &str) -> bool {
    ["content-length", "transfer-encoding"].iter().any(|framing| name.eq_ignore_ascii_case(framing))
}

/// What HTTP/2 has no place for (RFC 9113 section 8.2.2).
fn is_for_http1(name: &str) -> bool {
    ["connection", "transfer-encoding"].iter().any(|hop| name.eq_ignore_ascii_case(hop))
}

/// One call in the agent's hands. Dropping it closes its connection.
pub struct Call {
    line: Line,
    /// Body bytes that came along with the ones that were waited for.
    ahead: Vec<u8>,
}

enum Line {
    Http1 { agent: Agent, sends_chunks: bool, framing: Option<Framing> },
    Http2(Box<Http2>),
}

struct Http2 {
    response: ResponseFuture,
    outgoing: SendStream<Bytes>,
    incoming: Option<RecvStream>,
    trailers: Option<HeaderMap>,
    driver: JoinHandle<()>,
    _sender: SendRequest<Bytes>,
}

impl Drop for Http2 {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

/// What stands before the body, of either version.
#[derive(Debug)]
pub struct Head {
    /// The status; 200 for a WebSocket in HTTP/2, where HTTP/1.1 has 101.
    pub status: u16,
    fields: Vec<(String, String)>,
}

impl Head {
    /// The value of the first field of this name.
    pub fn get(&self, name: &str) -> Option<&str> {
        let field = self.fields.iter().find(|(own, _)| own.eq_ignore_ascii_case(name));
        field.map(|(_, value)| value.as_str())
    }

    fn http1(head: &h1::ResponseHead) -> Self {
        Self { status: head.status, fields: head.headers.lines().to_vec() }
    }

    fn http2<T>(head: &http::Response<T>) -> Self {
        let text = |value: &http::HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
        let fields = head.headers().iter().map(|(name, value)| (name.to_string(), text(value))).collect();
        Self { status: head.status().as_u16(), fields }
    }
}

impl Call {
    /// The next interim answer.
    pub async fn interim(&mut self) -> Head {
        match &mut self.line {
            Line::Http1 { agent, .. } => {
                let head = agent.read_head().await;
                assert!((100..200).contains(&head.status), "{head:?}");
                Head::http1(&head)
            }
            Line::Http2(http2) => {
                let early = soon(poll_fn(|cx| http2.response.poll_informational(cx))).await;
                Head::http2(&early.expect("an interim answer").expect("the stream lives"))
            }
        }
    }

    /// The answer's head.
    pub async fn head(&mut self) -> Head {
        match &mut self.line {
            Line::Http1 { agent, framing, .. } => {
                let head = agent.read_head().await;
                if head.status != 101 {
                    *framing = Some(head.framing("GET").expect("a well-framed answer"));
                }
                Head::http1(&head)
            }
            Line::Http2(http2) => {
                let response = soon(&mut http2.response).await.expect("an answer");
                let head = Head::http2(&response);
                http2.incoming = Some(response.into_body());
                head
            }
        }
    }

    /// The next bytes of the body or tunnel as they come; `Ok(None)` at its end, an error where it is cut.
    pub async fn try_piece(&mut self) -> Result<Option<Vec<u8>>, String> {
        if !self.ahead.is_empty() {
            return Ok(Some(std::mem::take(&mut self.ahead)));
        }
        match &mut self.line {
            Line::Http1 { agent, framing, .. } => match framing {
                Some(Framing::Chunked) => match agent.read_chunk().await {
                    Some(chunk) => Ok(Some(chunk).filter(|chunk| !chunk.is_empty())),
                    None => Err("the connection ended before the last chunk".into()),
                },
                Some(Framing::Length(0) | Framing::Empty) => Ok(None),
                Some(Framing::Length(left)) => {
                    let bytes = read(agent, *left).await?.ok_or("the connection ended in the body")?;
                    *left -= bytes.len() as u64;
                    Ok(Some(bytes))
                }
                Some(Framing::UntilClose) | None => read(agent, u64::MAX).await,
            },
            Line::Http2(http2) => {
                let incoming = http2.incoming.as_mut().expect("the head was read");
                while let Some(data) = soon(incoming.data()).await {
                    let data = data.map_err(|error| error.to_string())?;
                    incoming.flow_control().release_capacity(data.len()).expect("what came is given back");
                    // The frame that ends a stream may be empty.
                    if !data.is_empty() {
                        return Ok(Some(data.to_vec()));
                    }
                }
                http2.trailers = soon(incoming.trailers()).await.map_err(|error| error.to_string())?;
                Ok(None)
            }
        }
    }

    /// Waits for exactly these bytes of the body or tunnel.
    pub async fn expect(&mut self, bytes: impl AsRef<[u8]>) {
        let bytes = bytes.as_ref();
        let mut arrived = Vec::new();
        while arrived.len() < bytes.len() {
            let piece = self.try_piece().await.expect("the body is not cut");
            arrived.extend(piece.expect("the body goes on"));
        }
        self.ahead = arrived.split_off(bytes.len());
        assert_eq!(String::from_utf8_lossy(&arrived), String::from_utf8_lossy(bytes));
    }

    /// All that is left of the body, which has to end well.
    pub async fn rest(&mut self) -> Vec<u8> {
        let mut rest = Vec::new();
        while let Some(piece) = self.try_piece().await.expect("the body is not cut") {
            rest.extend(piece);
        }
        rest
    }

    /// A trailer field; the body was read to its end.
    pub async fn trailer(&mut self, name: &str) -> Option<String> {
        match &mut self.line {
            Line::Http1 { agent, .. } => {
                let raw = soon(h1::read_head(&mut agent.stream)).await.expect("a trailer section")?;
                let text = String::from_utf8(raw).expect("text");
                text.lines().find_map(|line| {
                    let (own, value) = line.split_once(": ")?;
                    own.eq_ignore_ascii_case(name).then(|| value.to_owned())
                })
            }
            Line::Http2(http2) => {
                let value = http2.trailers.as_ref()?.get(name)?;
                Some(String::from_utf8_lossy(value.as_bytes()).into_owned())
            }
        }
    }

    /// Sends some of the request's body, or into the tunnel.
    pub async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        let bytes = bytes.as_ref();
        match &mut self.line {
            Line::Http1 { agent, sends_chunks: false, .. } => agent.send(bytes).await,
            Line::Http1 { agent, .. } => {
                agent.send([format!("{:x}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat()).await;
            }
            Line::Http2(http2) => {
                let mut left = Bytes::copy_from_slice(bytes);
                while !left.is_empty() {
                    http2.outgoing.reserve_capacity(left.len());
                    let room = poll_fn(|cx| http2.outgoing.poll_capacity(cx)).await;
                    let room = room.expect("the stream takes data").expect("the stream lives");
                    let part = left.split_to(room.min(left.len()));
                    http2.outgoing.send_data(part, false).expect("the stream takes data");
                }
            }
        }
    }

    /// The end of the request's body.
    pub async fn finish(&mut self) {
        match &mut self.line {
            Line::Http1 { sends_chunks: false, .. } => {}
            Line::Http1 { agent, .. } => agent.send("0\r\n\r\n").await,
            Line::Http2(http2) => {
                http2.outgoing.send_data(Bytes::new(), true).expect("the stream takes data")
            }
        }
    }

    /// The end of this direction of a tunnel.
    pub async fn half_close(&mut self) {
        match &mut self.line {
            Line::Http1 { agent, .. } => agent.half_close().await,
            Line::Http2(_) => self.finish().await,
        }
    }
}

/// Some bytes, at most so many; `None` at the end.
async fn read(agent: &mut Agent, most: u64) -> Result<Option<Vec<u8>>, String> {
    let mut bytes = vec![0; most.min(64 << 10) as usize];
    let count = soon(agent.stream.read(&mut bytes)).await.map_err(|error| error.to_string())?;
    bytes.truncate(count);
    Ok(Some(bytes).filter(|bytes| !bytes.is_empty()))
}
