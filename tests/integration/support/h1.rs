//! HTTP/1 framing, read strictly: what is not exactly right is an error, so that a test sees it.

use std::io;

use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt};

/// Heads above this are a test gone wrong.
const MAX_HEAD: usize = 256 * 1024;

/// Field lines in the order and with the case they had on the wire.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Headers(Vec<(String, String)>);

impl Headers {
    /// The value of the only field of this name, in any case; `None` without one.
    ///
    /// Panics when there are several: a test that means several asks [`Self::all`].
    pub fn get(&self, name: &str) -> Option<&str> {
        let values = self.all(name);
        assert!(values.len() <= 1, "{name} came {} times: {values:?}", values.len());
        values.first().copied()
    }

    /// The values of all fields of this name, in order.
    pub fn all(&self, name: &str) -> Vec<&str> {
        self.0.iter().filter(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, v)| v.as_str()).collect()
    }

    /// The names, as spelled on the wire.
    pub fn names(&self) -> Vec<&str> {
        self.0.iter().map(|(name, _)| name.as_str()).collect()
    }

    /// Every field line.
    pub fn lines(&self) -> &[(String, String)] {
        &self.0
    }

    fn from_parsed(parsed: &[httparse::Header<'_>]) -> Self {
        let text = |value: &[u8]| String::from_utf8_lossy(value).into_owned();
        Self(parsed.iter().map(|header| (header.name.to_owned(), text(header.value))).collect())
    }
}

/// The first line and fields of a request.
#[derive(Debug, Clone)]
pub struct RequestHead {
    /// Every byte up to and with the empty line.
    pub raw: Vec<u8>,
    /// As written.
    pub method: String,
    /// As written: origin-form, absolute-form, authority-form.
    pub target: String,
    /// The minor version: 0 or 1.
    pub version: u8,
    /// The fields.
    pub headers: Headers,
}

/// The first line and fields of a response.
#[derive(Debug, Clone)]
pub struct ResponseHead {
    /// Every byte up to and with the empty line.
    pub raw: Vec<u8>,
    /// The status code.
    pub status: u16,
    /// What stands after the code.
    pub reason: String,
    /// The minor version: 0 or 1.
    pub version: u8,
    /// The fields.
    pub headers: Headers,
}

/// How the end of a body is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Framing {
    /// There is none: a request without length, an answer to HEAD, 1xx, 204, 304.
    Empty,
    /// That many bytes.
    Length(u64),
    /// `Transfer-Encoding: chunked`.
    Chunked,
    /// The connection's end is the body's end.
    UntilClose,
}

/// A body as far as it came.
#[derive(Debug, Default)]
pub struct Body {
    /// The content, without chunk framing.
    pub bytes: Vec<u8>,
    /// Whether it ended as its framing promised. `UntilClose` counts as complete after FIN, not after RST.
    pub complete: bool,
    /// Trailer fields of a chunked body.
    pub trailers: Headers,
}

fn invalid(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

/// Reads up to and with the empty line. `None` when the peer ended the connection before the first byte.
pub async fn read_head(from: &mut (impl AsyncBufRead + Unpin)) -> io::Result<Option<Vec<u8>>> {
    let mut head = Vec::new();
    loop {
        let line = head.len();
        if from.read_until(b'\n', &mut head).await? == 0 {
            return if head.is_empty() { Ok(None) } else { Err(io::ErrorKind::UnexpectedEof.into()) };
        }
        if !head.ends_with(b"\r\n") {
            return Err(invalid(format!(
                "a line without CRLF: {:?}",
                String::from_utf8_lossy(&head[line..])
            )));
        }
        if &head[line..] == b"\r\n" {
            return Ok(Some(head));
        }
        if head.len() > MAX_HEAD {
            return Err(invalid("an endless head"));
        }
    }
}

/// Takes a request's head apart.
pub fn parse_request(raw: Vec<u8>) -> io::Result<RequestHead> {
    let mut fields = vec![httparse::EMPTY_HEADER; 512];
    let mut request = httparse::Request::new(&mut fields);
    match request.parse(&raw) {
        Ok(httparse::Status::Complete(length)) if length == raw.len() => {}
        other => return Err(invalid(format!("{other:?} for request {:?}", String::from_utf8_lossy(&raw)))),
    }
    Ok(RequestHead {
        method: request.method.expect("a complete head has a method").to_owned(),
        target: request.path.expect("a complete head has a target").to_owned(),
        version: request.version.expect("a complete head has a version"),
        headers: Headers::from_parsed(request.headers),
        raw,
    })
}

/// Takes a response's head apart.
pub fn parse_response(raw: Vec<u8>) -> io::Result<ResponseHead> {
    let mut fields = vec![httparse::EMPTY_HEADER; 512];
    let mut response = httparse::Response::new(&mut fields);
    match response.parse(&raw) {
        Ok(httparse::Status::Complete(length)) if length == raw.len() => {}
        other => return Err(invalid(format!("{other:?} for response {:?}", String::from_utf8_lossy(&raw)))),
    }
    Ok(ResponseHead {
        status: response.code.expect("a complete head has a code"),
        reason: response.reason.unwrap_or_default().to_owned(),
        version: response.version.expect("a complete head has a version"),
        headers: Headers::from_parsed(response.headers),
        raw,
    })
}

impl RequestHead {
    /// How this request's body ends.
    pub fn framing(&self) -> io::Result<Framing> {
        Ok(declared(&self.headers)?.unwrap_or(Framing::Empty))
    }
}

impl ResponseHead {
    /// How the body ends, which also depends on the method that was asked (RFC 9112 section 6.3).
    pub fn framing(&self, method: &str) -> io::Result<Framing> {
        let tunnel = method == "CONNECT" && (200..300).contains(&self.status);
        if method == "HEAD" || tunnel || matches!(self.status, 100..200 | 204 | 304) {
            return Ok(Framing::Empty);
        }
        Ok(declared(&self.headers)?.unwrap_or(Framing::UntilClose))
    }
}

/// What the fields say; both framings at once, or a length said twice, is an error here.
fn declared(headers: &Headers) -> io::Result<Option<Framing>> {
    match (headers.all("transfer-encoding").as_slice(), headers.all("content-length").as_slice()) {
        ([], []) => Ok(None),
        ([coding], []) if coding.eq_ignore_ascii_case("chunked") => Ok(Some(Framing::Chunked)),
        ([], [length]) if length.bytes().all(|b| b.is_ascii_digit()) => length
            .parse()
            .map(|n| Some(Framing::Length(n)))
            .map_err(|_| invalid(format!("length {length:?}"))),
        (codings, lengths) => Err(invalid(format!("framing by {codings:?} and {lengths:?}"))),
    }
}

/// Reads a body to its end, or as far as the connection carries it.
///
/// Only wrong framing is an error. A body that is cut is a result, since cutting is what a proxy does at a deadline.
pub async fn read_body(from: &mut (impl AsyncBufRead + Unpin), framing: Framing) -> io::Result<Body> {
    match framing {
        Framing::Empty => Ok(Body { complete: true, ..Body::default() }),
        Framing::Length(length) => Ok(read_counted(from, length).await),
        Framing::UntilClose => {
            let mut bytes = Vec::new();
            let complete = from.read_to_end(&mut bytes).await.is_ok();
            Ok(Body { bytes, complete, ..Body::default() })
        }
        Framing::Chunked => read_chunked(from).await,
    }
}

async fn read_counted(from: &mut (impl AsyncBufRead + Unpin), length: u64) -> Body {
    let mut bytes = Vec::new();
    let arrived = from.take(length).read_to_end(&mut bytes).await.is_ok();
    Body { complete: arrived && bytes.len() as u64 == length, bytes, ..Body::default() }
}

async fn read_chunked(from: &mut (impl AsyncBufRead + Unpin)) -> io::Result<Body> {
    let mut body = Body::default();
    loop {
        match read_chunk(from).await? {
            Some(chunk) if chunk.is_empty() => break,
            Some(chunk) => body.bytes.extend(chunk),
            None => return Ok(body),
        }
    }
    // The trailer section has the shape of a head without its first line.
    let Ok(Some(raw)) = read_head(from).await else { return Ok(body) };
    let mut fields = vec![httparse::EMPTY_HEADER; 64];
    match httparse::parse_headers(&raw, &mut fields) {
        Ok(httparse::Status::Complete((_, parsed))) => body.trailers = Headers::from_parsed(parsed),
        other => return Err(invalid(format!("trailers: {other:?}"))),
    }
    body.complete = true;
    Ok(body)
}

/// One chunk's content, empty for the last chunk; `None` when the connection ends first. The trailer section
/// that follows a last chunk is left unread.
pub async fn read_chunk(from: &mut (impl AsyncBufRead + Unpin)) -> io::Result<Option<Vec<u8>>> {
    let mut line = Vec::new();
    if from.read_until(b'\n', &mut line).await.is_err() || !line.ends_with(b"\n") {
        return Ok(None);
    }
    let text = String::from_utf8_lossy(&line).into_owned();
    let digits = text.strip_suffix("\r\n").and_then(|size| size.split(';').next());
    let length = digits
        .and_then(|digits| u64::from_str_radix(digits, 16).ok())
        .ok_or_else(|| invalid(format!("chunk size {text:?}")))?;
    if length == 0 {
        return Ok(Some(Vec::new()));
    }
    let body = read_counted(from, length).await;
    let mut end = [0; 2];
    if !body.complete || from.read_exact(&mut end).await.is_err() {
        return Ok(None);
    }
    if &end != b"\r\n" {
        return Err(invalid(format!("a chunk of {length} ends in {end:?}")));
    }
    Ok(Some(body.bytes))
}
