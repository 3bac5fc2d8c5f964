//! How the Rust programs of the suite hear what to do and tell what they saw; the same as `python/talk.py`.

use std::error::Error;
use std::io::{BufRead, stdin};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::Instant;

/// No case lets a client wait so long on purpose.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// The body of a POST.
pub const ASKED: &str = r#"{"ask": "hello"}"#;

/// What a library's error is turned to.
pub type Failure = Box<dyn Error>;

/// One case.
pub struct Case<'a> {
    /// What to do: `get`, `post`, `stream` or `twice`.
    pub verb: &'a str,
    /// Where.
    pub url: &'a str,
    /// Header fields to send.
    pub headers: Vec<(&'a str, &'a str)>,
}

/// An answer, as far as a case tells about it.
pub struct Seen {
    /// The status code.
    pub status: u16,
    /// HTTP's version, as `1.1` or `2`.
    pub version: &'static str,
    /// The content.
    pub body: String,
    /// When the events of a stream came.
    pub events: Stopwatch,
}

/// When the events of a stream came, in milliseconds after the call began.
pub struct Stopwatch {
    began: Instant,
    events: Vec<u128>,
}

impl Stopwatch {
    /// The call begins.
    pub fn start() -> Self {
        Self { began: Instant::now(), events: Vec::new() }
    }

    /// Counts the events in a piece of a stream.
    pub fn piece(&mut self, text: &str) {
        let events = text.lines().filter(|line| line.starts_with("data:"));
        self.events.extend(events.map(|_| self.began.elapsed().as_millis()));
    }
}

/// Carries out case after case, until the runner closes the line.
pub fn serve(carry_out: impl Fn(&Case<'_>) -> Result<Seen, Failure>) {
    for line in stdin().lock().lines().map_while(Result::ok) {
        println!("{}", report(&line, &carry_out));
    }
}

fn report(line: &str, carry_out: impl Fn(&Case<'_>) -> Result<Seen, Failure>) -> Value {
    let mut words = line.split('\t');
    let (Some(verb), Some(url)) = (words.next(), words.next()) else {
        return json!({ "failure": format!("no case: {line:?}") });
    };
    let case = Case { verb, url, headers: words.filter_map(|field| field.split_once(": ")).collect() };
    match carry_out(&case) {
        Ok(Seen { status, version, body, events }) => {
            json!({ "status": status, "http": version, "body": body, "events_ms": events.events })
        }
        Err(error) => json!({ "failure": causes(&*error).join(" < ") }),
    }
}

fn causes(error: &(dyn Error + 'static)) -> Vec<String> {
    let mut told = vec![error.to_string()];
    let mut at = error;
    while let Some(cause) = at.source() {
        told.push(cause.to_string());
        at = cause;
    }
    told
}
