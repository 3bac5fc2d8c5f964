//! An agent that speaks HTTP/2: to the proxy port at once (prior knowledge), or over a connection that a test
//! has prepared, such as a tunnel or the TLS in one.

use std::net::SocketAddr;

use bytes::Bytes;
use h2::client::{Builder, ResponseFuture, SendRequest};
use h2::{Reason, RecvStream, SendStream};
use http::{HeaderMap, Request, Response};
use tokio::task::JoinHandle;

use super::super::client::Agent;
use super::super::pki::AgentTls;
use super::super::soon;
use super::{PATIENT, fields, piece};

/// One connection. Dropping it closes it.
pub struct Http2Agent {
    sender: SendRequest<Bytes>,
    connection: JoinHandle<Result<(), h2::Error>>,
}

impl Drop for Http2Agent {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

/// How a body ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// With END_STREAM.
    Whole,
    /// By RST_STREAM.
    Reset(Reason),
    /// With the connection.
    Lost,
}

impl From<&h2::Error> for End {
    fn from(error: &h2::Error) -> Self {
        match error.reason().filter(|_| error.is_reset()) {
            Some(reason) => Self::Reset(reason),
            None => Self::Lost,
        }
    }
}

/// An answer, as far as it came.
#[derive(Debug)]
pub struct Answer {
    /// The status code.
    pub status: u16,
    /// The fields.
    pub headers: HeaderMap,
    /// The content.
    pub body: Vec<u8>,
    /// The trailer fields.
    pub trailers: HeaderMap,
    /// How it ended.
    pub end: End,
}

impl Answer {
    /// The value of the only field of this name.
    pub fn header(&self, name: &str) -> Option<&str> {
        let values = super::values(&self.headers, name);
        assert!(values.len() <= 1, "{name} came {} times: {values:?}", values.len());
        values.first().copied()
    }

    /// The value of this trailer field.
    pub fn trailer(&self, name: &str) -> Option<&str> {
        super::values(&self.trailers, name).first().copied()
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

/// The head of a request; `fields` may repeat a name.
pub fn head(method: &str, url: &str, headers: &[(&str, &str)]) -> Request<()> {
    let mut request = Request::builder().method(method).uri(url).body(()).expect("a valid request");
    *request.headers_mut() = fields(headers);
    *request.version_mut() = http::Version::HTTP_2;
    request
}

impl Http2Agent {
    /// To the proxy port, by prior knowledge.
    pub async fn connect(to: SocketAddr) -> Self {
        Self::over(Agent::connect(to).await).await
    }

    /// On a connection that is there.
    pub async fn over(agent: Agent) -> Self {
        Self::with(agent, &Builder::new()).await
    }

    /// The same with settings of the test's own.
    pub async fn with(agent: Agent, builder: &Builder) -> Self {
        let mut builder = builder.clone();
        let handshake = builder.enable_push(false).data_frame_budget(PATIENT).handshake(agent.into_socket());
        let (sender, connection) = soon(handshake).await.expect("the preface can be sent");
        Self { sender, connection: tokio::spawn(connection) }
    }

    /// Through a CONNECT to `authority`, in TLS that agrees on `h2`, trusting the CA in this PEM file.
    pub async fn intercepted(proxy: SocketAddr, authority: &str, ca_pem: &[u8]) -> Self {
        Self::over(tunnel_in_tls(proxy, authority, ca_pem).await).await
    }

    /// GET of an absolute URL.
    pub async fn get(&self, url: &str) -> Answer {
        self.request("GET", url, &[], "").await
    }

    /// Any request with a body that is there.
    pub async fn request(
        &self,
        method: &str,
        url: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> Answer {
        let body = body.into();
        let mut call = self.open(head(method, url, headers), body.is_empty()).await;
        if !body.is_empty() {
            call.send(body, true).await;
        }
        call.answer().await
    }

    /// Opens a stream; `is_all` when no body follows.
    pub async fn open(&self, request: Request<()>, is_all: bool) -> Call {
        let ready = soon(self.sender.clone().ready()).await;
        let mut sender = ready.expect("the connection takes a stream");
        let (answer, sending) = sender.send_request(request, is_all).expect("a valid request");
        Call { answer, sending }
    }

    /// Waits until the other side's settings allow an extended CONNECT.
    pub async fn until_websockets(&self) {
        soon(async {
            while !self.sender.is_extended_connect_protocol_enabled() {
                tokio::time::sleep(std::time::Duration::from_millis(1)).await;
            }
        })
        .await;
    }

    /// Whether the connection takes no more streams.
    pub async fn is_closed(&self) -> bool {
        self.sender.clone().ready().await.is_err()
    }

    /// How many streams the proxy takes at once, as it has said.
    pub fn max_streams(&self) -> usize {
        self.sender.current_max_send_streams()
    }

    /// Waits for the connection's end.
    pub async fn ended(mut self) -> Result<(), h2::Error> {
        soon(&mut self.connection).await.expect("the connection's task ends by itself")
    }
}

/// TLS inside a tunnel to `authority`, agreed on `h2`.
pub async fn tunnel_in_tls(proxy: SocketAddr, authority: &str, ca_pem: &[u8]) -> Agent {
    let mut agent = Agent::connect(proxy).await;
    assert_eq!(agent.open_tunnel(authority).await.status, 200);
    let connector = AgentTls::trusting_pem(ca_pem).offering(&["h2", "http/1.1"]).connector();
    let host = authority.rsplit_once(':').map_or(authority, |(host, _)| host);
    let agent = agent.tls(&connector, host).await.expect("the certificate is trusted");
    assert_eq!(agent.protocol().as_deref(), Some("h2"));
    agent
}

/// The head of an extended CONNECT (RFC 8441), which opens a WebSocket on a stream.
pub fn websocket(url: &str, headers: &[(&str, &str)]) -> Request<()> {
    let mut request = head("CONNECT", url, headers);
    request.extensions_mut().insert(h2::ext::Protocol::from_static("websocket"));
    request
}

/// A stream that was opened.
pub struct Call {
    answer: ResponseFuture,
    sending: SendStream<Bytes>,
}

impl Call {
    /// Sends bytes of the body as fast as they are taken; false when the stream was reset.
    pub async fn send(&mut self, bytes: impl Into<Bytes>, is_last: bool) -> bool {
        let mut bytes = bytes.into();
        while !bytes.is_empty() {
            self.sending.reserve_capacity(bytes.len());
            let room = soon(std::future::poll_fn(|cx| self.sending.poll_capacity(cx))).await;
            let Some(Ok(room)) = room else { return false };
            let piece = bytes.split_to(room.min(bytes.len()));
            if self.sending.send_data(piece, is_last && bytes.is_empty()).is_err() {
                return false;
            }
        }
        true
    }

    /// Ends the body.
    pub fn end(&mut self) {
        self.sending.send_data(Bytes::new(), true).expect("the stream is open");
    }

    /// Ends the body with trailers.
    pub fn trailers(&mut self, trailers: &[(&str, &str)]) {
        self.sending.send_trailers(fields(trailers)).expect("the stream is open");
    }

    /// RST_STREAM.
    pub fn reset(mut self, reason: Reason) {
        self.sending.send_reset(reason);
    }

    /// The next interim answer.
    #[track_caller]
    pub fn interim(&mut self) -> impl Future<Output = Response<()>> {
        let interim = soon(std::future::poll_fn(|cx| self.answer.poll_informational(cx)));
        async { interim.await.expect("an interim answer comes").expect("the stream goes on") }
    }

    /// The head of the answer; the stream's end otherwise.
    #[track_caller]
    pub fn try_head(self) -> impl Future<Output = Result<Incoming, End>> {
        soon(async move {
            let Self { answer, sending } = self;
            let (head, body) = answer.await.map_err(|error| End::from(&error))?.into_parts();
            Ok(Incoming { status: head.status.as_u16(), headers: head.headers, body, sending })
        })
    }

    /// The head of the answer.
    #[track_caller]
    pub fn head(self) -> impl Future<Output = Incoming> {
        let head = self.try_head();
        async { head.await.unwrap_or_else(|end| panic!("{end:?} instead of a head")) }
    }

    /// The whole answer.
    pub async fn answer(self) -> Answer {
        self.head().await.rest().await
    }
}

/// An answer whose head has come.
pub struct Incoming {
    /// The status code.
    pub status: u16,
    /// The fields.
    pub headers: HeaderMap,
    body: RecvStream,
    sending: SendStream<Bytes>,
}

impl Incoming {
    /// The next piece of the body; `None` at its end. Panics when it breaks.
    #[track_caller]
    pub fn chunk(&mut self) -> impl Future<Output = Option<Bytes>> {
        let chunk = soon(piece(&mut self.body));
        async { chunk.await.map(|chunk| chunk.expect("the body goes on")) }
    }

    /// More of the request's body, while its answer comes.
    pub fn send(&mut self, bytes: impl Into<Bytes>, is_last: bool) {
        self.sending.send_data(bytes.into(), is_last).expect("the stream is open");
    }

    /// RST_STREAM.
    pub fn reset(mut self, reason: Reason) {
        self.sending.send_reset(reason);
    }

    /// The rest of the answer.
    #[track_caller]
    pub fn rest(mut self) -> impl Future<Output = Answer> {
        soon(async move {
            let mut bytes = Vec::new();
            let mut end = End::Whole;
            while let Some(piece) = piece(&mut self.body).await {
                match piece {
                    Ok(piece) => bytes.extend_from_slice(&piece),
                    Err(error) => {
                        end = End::from(&error);
                        break;
                    }
                }
            }
            let mut trailers = HeaderMap::new();
            if end == End::Whole {
                match self.body.trailers().await {
                    Ok(came) => trailers = came.unwrap_or_default(),
                    Err(error) => end = End::from(&error),
                }
            }
            let Self { status, headers, .. } = self;
            Answer { status, headers, body: bytes, trailers, end }
        })
    }
}
