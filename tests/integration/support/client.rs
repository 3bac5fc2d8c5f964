//! The agent: a client that writes raw bytes and reads answers strictly.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpSocket, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::HandshakeKind;
use tokio_rustls::rustls::pki_types::ServerName;

use super::h1::{self, Framing, Headers, ResponseHead};
use super::socket::Socket;
use super::soon;

/// One connection to the proxy (or to anything that speaks HTTP/1).
#[derive(Debug)]
pub struct Agent {
    pub(super) stream: BufReader<Socket>,
}

/// An answer with its body, as far as it came.
#[derive(Debug)]
pub struct Response {
    /// The status code.
    pub status: u16,
    /// The reason phrase.
    pub reason: String,
    /// The minor version.
    pub version: u8,
    /// The fields, in order and as spelled.
    pub headers: Headers,
    /// How the body's end was told.
    pub framing: Framing,
    /// The content.
    pub body: Vec<u8>,
    /// Whether the body ended as promised; false for one that was cut.
    pub complete: bool,
    /// Trailer fields.
    pub trailers: Headers,
    /// The 1xx answers that came before.
    pub interims: Vec<ResponseHead>,
}

impl Response {
    /// The value of the only field of this name.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)
    }

    /// The body as text.
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("the body is text")
    }

    /// The body as JSON.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error} in {:?}", self.text()))
    }
}

/// How the other side ended a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// FIN, or a TLS close.
    Closed,
    /// RST, or TLS cut without a close.
    Reset,
}

impl Agent {
    /// A connection to `to`.
    pub async fn connect(to: SocketAddr) -> Self {
        soon(Self::try_connect(to)).await.unwrap_or_else(|error| panic!("{to}: {error}"))
    }

    /// The same, where it may be refused.
    pub async fn try_connect(to: SocketAddr) -> io::Result<Self> {
        TcpStream::connect(to).await.map(Self::over)
    }

    /// A connection from another address of this machine, such as `127.0.0.7`.
    pub async fn connect_from(from: SocketAddr, to: SocketAddr) -> Self {
        let socket = if to.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }.expect("a socket");
        socket.bind(from).expect("a local address can be bound");
        Self::over(soon(socket.connect(to)).await.unwrap_or_else(|error| panic!("{to}: {error}")))
    }

    pub fn over(tcp: TcpStream) -> Self {
        tcp.set_nodelay(true).expect("an open socket takes the option");
        Self { stream: BufReader::new(Socket::Plain(tcp)) }
    }

    /// TLS inside this connection, to a server that shows a certificate for `name`.
    pub async fn tls(self, connector: &TlsConnector, name: &str) -> io::Result<Self> {
        assert!(self.stream.buffer().is_empty(), "bytes came before the handshake");
        let Socket::Plain(tcp) = self.stream.into_inner() else { panic!("TLS inside TLS") };
        let name = ServerName::try_from(name.to_owned()).expect("a valid server name");
        let tls = soon(connector.connect(name, tcp)).await?;
        Ok(Self { stream: BufReader::new(Socket::Tls(Box::new(tls.into()))) })
    }

    /// The certificate that the server showed, DER; `None` without TLS.
    pub fn peer_certificate(&self) -> Option<Vec<u8>> {
        let Socket::Tls(tls) = self.stream.get_ref() else { return None };
        Some(tls.get_ref().1.peer_certificates()?.first()?.to_vec())
    }

    /// What ALPN agreed on (RFC 7301).
    pub fn protocol(&self) -> Option<String> {
        let Socket::Tls(tls) = self.stream.get_ref() else { return None };
        tls.get_ref().1.alpn_protocol().map(|protocol| String::from_utf8_lossy(protocol).into_owned())
    }

    /// Whether the handshake took up an earlier session.
    pub fn is_resumed(&self) -> bool {
        let Socket::Tls(tls) = self.stream.get_ref() else { return false };
        tls.get_ref().1.handshake_kind() == Some(HandshakeKind::Resumed)
    }

    /// The bare connection, for what is no HTTP/1.
    pub fn into_socket(self) -> Socket {
        assert!(self.stream.buffer().is_empty(), "bytes came that nobody read");
        self.stream.into_inner()
    }

    /// This side's address.
    pub fn local_address(&self) -> SocketAddr {
        self.stream.get_ref().tcp().local_addr().expect("a connected socket has an address")
    }

    /// Writes the bytes as they are. A peer that closed already is not an error here: the answer tells more.
    pub async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        let _ = self.stream.write_all(bytes.as_ref()).await;
        let _ = self.stream.flush().await;
    }

    /// The answer to a request that was not HEAD or CONNECT.
    #[track_caller]
    pub fn read_response(&mut self) -> impl Future<Output = Response> {
        self.read_response_to("GET")
    }

    /// The answer to a request with this method.
    #[track_caller]
    pub fn read_response_to(&mut self, method: &str) -> impl Future<Output = Response> {
        let response = soon(self.try_response(method));
        async { response.await.expect("a well-formed answer") }
    }

    /// The same, with what is not well-formed as an error, and no answer at all as `UnexpectedEof`.
    pub async fn try_response(&mut self, method: &str) -> io::Result<Response> {
        let mut interims = Vec::new();
        let head = loop {
            let head = self.try_head().await?;
            if !(100..200).contains(&head.status) || head.status == 101 {
                break head;
            }
            interims.push(head);
        };
        let framing = head.framing(method)?;
        let body = h1::read_body(&mut self.stream, framing).await?;
        Ok(Response {
            status: head.status,
            reason: head.reason,
            version: head.version,
            headers: head.headers,
            framing,
            body: body.bytes,
            complete: body.complete,
            trailers: body.trailers,
            interims,
        })
    }

    async fn try_head(&mut self) -> io::Result<ResponseHead> {
        let raw = h1::read_head(&mut self.stream).await?.ok_or(io::ErrorKind::UnexpectedEof)?;
        h1::parse_response(raw)
    }

    /// An answer's head alone, for tests about what comes before or in the middle of a body.
    #[track_caller]
    pub fn read_head(&mut self) -> impl Future<Output = ResponseHead> {
        let head = soon(self.try_head());
        async { head.await.expect("a well-formed head") }
    }

    /// The next chunk of a chunked body; empty for the last, `None` when the connection ends first.
    #[track_caller]
    pub fn read_chunk(&mut self) -> impl Future<Output = Option<Vec<u8>>> {
        let chunk = soon(h1::read_chunk(&mut self.stream));
        async { chunk.await.expect("a well-formed chunk") }
    }

    /// Waits for exactly these bytes.
    pub async fn expect(&mut self, bytes: &[u8]) {
        let mut arrived = vec![0; bytes.len()];
        soon(self.stream.read_exact(&mut arrived)).await.expect("the connection carries bytes");
        assert_eq!(String::from_utf8_lossy(&arrived), String::from_utf8_lossy(bytes));
    }

    /// The rest of a body that ends as `framing` says.
    #[track_caller]
    pub fn read_body(&mut self, framing: Framing) -> impl Future<Output = h1::Body> {
        let body = soon(h1::read_body(&mut self.stream, framing));
        async { body.await.expect("a well-framed body") }
    }

    /// GET in absolute-form, as a client with `HTTP_PROXY` sends it.
    pub async fn get(&mut self, url: &str) -> Response {
        self.request("GET", url, &[], b"").await
    }

    /// Any request in absolute-form; a body gets its `Content-Length`.
    pub async fn request(
        &mut self,
        method: &str,
        url: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Response {
        self.send(absolute(method, url, headers, body)).await;
        self.read_response_to(method).await
    }

    /// GET in origin-form, as one sends it to a server rather than to a proxy.
    pub async fn get_at(&mut self, host: &str, path: &str) -> Response {
        self.send(format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n")).await;
        self.read_response().await
    }

    /// CONNECT; after a 2xx this connection is the tunnel.
    pub async fn open_tunnel(&mut self, authority: &str) -> Response {
        self.send(format!("CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n")).await;
        self.read_response_to("CONNECT").await
    }

    /// Waits for the other side to end the connection; panics when bytes come instead.
    #[track_caller]
    pub fn ended(&mut self) -> impl Future<Output = End> {
        let next = soon(self.stream.fill_buf());
        async {
            match next.await {
                Ok([]) => End::Closed,
                Ok(bytes) => panic!("bytes instead of an end: {:?}", String::from_utf8_lossy(bytes)),
                Err(_) => End::Reset,
            }
        }
    }

    /// Exactly so many bytes.
    #[track_caller]
    pub fn read_exactly(&mut self, count: usize) -> impl Future<Output = Vec<u8>> {
        let mut bytes = vec![0; count];
        soon(async move {
            self.stream.read_exact(&mut bytes).await.expect("the connection carries bytes");
            bytes
        })
    }

    /// FIN towards the other side; answers can still be read.
    pub async fn half_close(&mut self) {
        self.stream.shutdown().await.expect("an open connection can be half closed");
    }

    /// FIN where the other side still takes one, and then whatever comes until its end, FIN or RST.
    pub async fn all_that_comes(mut self) -> Vec<u8> {
        let _ = self.stream.shutdown().await;
        let mut bytes = Vec::new();
        let _ = soon(self.stream.read_to_end(&mut bytes)).await;
        bytes
    }

    /// Whatever comes until the other side ends the connection, while this side stays open.
    pub async fn all_that_comes_without_closing(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let _ = soon(self.stream.read_to_end(&mut bytes)).await;
        bytes
    }

    /// RST. Dropping the agent sends FIN (RST when bytes are unread).
    pub fn reset(self) {
        self.stream.into_inner().reset();
    }
}

/// The bytes of a request in absolute-form.
pub fn absolute(method: &str, url: &str, headers: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let authority = url.split('/').nth(2).expect("an absolute URL");
    let mut head = format!("{method} {url} HTTP/1.1\r\nHost: {authority}\r\n");
    for (name, value) in headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    if !body.is_empty() {
        head.push_str(&format!("Content-Length: {}\r\n", body.len()));
    }
    [head.as_bytes(), b"\r\n", body].concat()
}

/// What `x-request-deadline` says for a moment so far from now: Unix seconds with a fraction.
pub fn deadline_in(left: Duration) -> String {
    let at = (SystemTime::now() + left).duration_since(UNIX_EPOCH).expect("after 1970");
    format!("{}.{:03}", at.as_secs(), at.subsec_millis())
}

/// GETs all at once, each on a connection of its own; the answers in the order of the URLs.
pub async fn get_all(proxy: SocketAddr, urls: &[String]) -> Vec<Response> {
    let calls = urls.iter().map(async |url| Agent::connect(proxy).await.get(url).await);
    futures_util::future::join_all(calls).await
}

/// So many connections, all open.
pub async fn crowd(proxy: SocketAddr, size: usize) -> Vec<Agent> {
    futures_util::future::join_all((0..size).map(|_| Agent::connect(proxy))).await
}
