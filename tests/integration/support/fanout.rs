//! Fan-outs: how they are asked for, and the two forms in which they are answered.

use std::collections::VecDeque;
use std::net::SocketAddr;

use serde_json::{Value, json};

use super::client::{Agent, Response};
use super::h1::{Framing, ResponseHead};
use super::hedgerow::Ports;
use super::upstream::{Exchange, Upstream};

/// Where the fan-out is.
pub const PATH: &str = "/v1/fanout";

/// The bytes of a request for a fan-out, as one sends them to a server.
pub fn request(to: SocketAddr, headers: &[(&str, &str)], body: impl AsRef<[u8]>) -> Vec<u8> {
    let body = body.as_ref();
    let mut head = format!("POST {PATH} HTTP/1.1\r\nHost: {to}\r\nContent-Length: {}\r\n", body.len());
    for (name, value) in headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    [head.as_bytes(), b"\r\n", body].concat()
}

/// A call that is nothing but a GET.
pub fn get(id: &str, url: impl Into<String>) -> Value {
    json!({ "id": id, "url": url.into() })
}

/// The requests for these paths, which come in whatever order.
pub async fn take<const COUNT: usize>(upstream: &mut Upstream, paths: [&str; COUNT]) -> [Exchange; COUNT] {
    let mut taken = Vec::new();
    for _ in paths {
        taken.push(upstream.next().await);
    }
    paths.map(|path| {
        let at = taken.iter().position(|exchange| exchange.path() == path);
        taken.swap_remove(at.unwrap_or_else(|| panic!("no request for {path}")))
    })
}

impl Ports {
    /// Asks for a fan-out and takes its answer, on a connection of its own.
    pub async fn fan_out(&self, body: &Value) -> Response {
        self.fan_out_with(&[], body.to_string()).await
    }

    /// The same with fields, and a body that need not be JSON.
    pub async fn fan_out_with(&self, headers: &[(&str, &str)], body: impl AsRef<[u8]>) -> Response {
        self.ask_fan_out(headers, body).await.read_response_to("POST").await
    }

    /// Asks for a fan-out. Its answer is read when the test wants to, or never.
    pub async fn ask_fan_out(&self, headers: &[(&str, &str)], body: impl AsRef<[u8]>) -> Agent {
        let mut agent = self.agent().await;
        agent.send(request(self.proxy, headers, body)).await;
        agent
    }

    /// Asks for a fan-out whose results are told one by one.
    pub async fn fan_out_events(&self, headers: &[(&str, &str)], body: &Value) -> EventStream {
        let headers = [&[("Accept", "text/event-stream")], headers].concat();
        EventStream::begin(self.ask_fan_out(&headers, body.to_string()).await).await
    }
}

/// What came of a fan-out that was carried out.
#[derive(Debug)]
pub struct Report(pub Value);

impl Report {
    /// From an answer, which has to be a 200 of JSON.
    #[track_caller]
    pub fn of(answer: &Response) -> Self {
        assert_eq!(
            (answer.status, answer.header("content-type"), answer.complete),
            (200, Some("application/json"), true),
            "{}",
            String::from_utf8_lossy(&answer.body)
        );
        Self(answer.json())
    }

    /// The ids of the results, in their order.
    pub fn results(&self) -> Vec<&str> {
        keys(&self.0["results"])
    }

    /// The ids of the calls that are missing, in their order.
    pub fn missing(&self) -> Vec<&str> {
        keys(&self.0["missing"])
    }

    /// The result of this call.
    #[track_caller]
    pub fn result(&self, id: &str) -> &Value {
        let result = self.0["results"].get(id);
        result.unwrap_or_else(|| panic!("no result of {id} in {}", self.0))
    }

    /// The word that says why this call is missing.
    #[track_caller]
    pub fn why(&self, id: &str) -> &str {
        let missing =
            self.0["missing"].get(id).unwrap_or_else(|| panic!("{id} is not missing in {}", self.0));
        assert!(missing["message"].as_str().is_some_and(|message| !message.is_empty()), "{missing}");
        missing["error"].as_str().expect("a word")
    }

    /// Whether every call that has to has a result.
    pub fn is_complete(&self) -> bool {
        self.0["complete"].as_bool().expect("true or false")
    }

    /// The sentence for the model; empty where there is none.
    pub fn warning(&self) -> &str {
        match &self.0["warning"] {
            Value::Null => "",
            warning => warning.as_str().expect("a sentence"),
        }
    }
}

fn keys(object: &Value) -> Vec<&str> {
    object.as_object().expect("an object").keys().map(String::as_str).collect()
}

/// A part of an event stream.
#[derive(Debug, PartialEq)]
pub enum Told {
    /// An event.
    Event(Event),
    /// A comment.
    Comment(String),
    /// `data: [DONE]`.
    Done,
}

/// An event with all that it has.
#[derive(Debug, PartialEq)]
pub struct Event {
    /// `id`.
    pub id: u64,
    /// `event`.
    pub name: String,
    /// `data`.
    pub data: Value,
}

/// What the parts of a stream's text say, read as strictly as the fan-out writes.
pub fn told(text: &str) -> Vec<Told> {
    let text = text.strip_suffix("\n\n").unwrap_or_else(|| panic!("half a part at the end of {text:?}"));
    text.split("\n\n").map(part).collect()
}

fn part(text: &str) -> Told {
    if text == "data: [DONE]" {
        return Told::Done;
    }
    if let Some(comment) = text.strip_prefix(": ") {
        return Told::Comment(comment.to_owned());
    }
    let fields: Vec<_> = text.split('\n').map(|line| line.split_once(": ").unwrap_or((line, ""))).collect();
    let [("id", id), ("event", name), ("data", data)] = fields[..] else { panic!("no event: {text:?}") };
    Told::Event(Event {
        id: id.parse().unwrap_or_else(|error| panic!("{error} in {text:?}")),
        name: name.to_owned(),
        data: serde_json::from_str(data).unwrap_or_else(|error| panic!("{error} in {text:?}")),
    })
}

/// A fan-out's event stream, as it comes.
pub struct EventStream {
    /// The connection.
    pub agent: Agent,
    /// The answer's head.
    pub head: ResponseHead,
    text: Vec<u8>,
    parts: VecDeque<Told>,
}

impl EventStream {
    /// Of an answer whose head is still to come.
    pub async fn begin(mut agent: Agent) -> Self {
        let head = agent.read_head().await;
        let kind = head.headers.get("content-type");
        assert_eq!((head.status, kind), (200, Some("text/event-stream; charset=utf-8")));
        assert_eq!(head.framing("POST").expect("a well-framed answer"), Framing::Chunked);
        Self { agent, head, text: Vec::new(), parts: VecDeque::new() }
    }

    /// The next part; `None` at the end of a stream that is whole.
    pub async fn next(&mut self) -> Option<Told> {
        while self.parts.is_empty() {
            let chunk = self.agent.read_chunk().await.expect("the stream is not cut");
            if chunk.is_empty() {
                self.agent.expect(b"\r\n").await;
                assert!(self.text.is_empty(), "half a part: {:?}", String::from_utf8_lossy(&self.text));
                return None;
            }
            self.text.extend(chunk);
            if self.text.ends_with(b"\n\n") {
                let text = std::mem::take(&mut self.text);
                self.parts = told(std::str::from_utf8(&text).expect("the stream is text")).into();
            }
        }
        self.parts.pop_front()
    }

    /// The next event, which nothing but comments comes before.
    pub async fn event(&mut self) -> Event {
        loop {
            match self.next().await {
                Some(Told::Event(event)) => return event,
                Some(Told::Comment(_)) => {}
                other => panic!("{other:?} instead of an event"),
            }
        }
    }

    /// All events that are still to come, of a stream that ends as it should.
    pub async fn rest(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        loop {
            match self.next().await {
                Some(Told::Event(event)) => events.push(event),
                Some(Told::Comment(_)) => {}
                Some(Told::Done) => {
                    assert_eq!(self.next().await, None, "a part behind the last");
                    return events;
                }
                None => panic!("no [DONE] behind {events:?}"),
            }
        }
    }
}
