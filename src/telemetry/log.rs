//! The access log, one line a request on standard output, and operational messages on standard error.
//!
//! A request never waits for its line. Records go through a bounded channel to one thread that formats
//! and writes them; when whoever reads standard output has stopped, the channel fills up, and lines are
//! lost and counted rather than requests delayed or memory eaten. `tracing` was not taken for these
//! lines: its layers format on the request's own thread, and its writers either block or have no bound
//! on what waits.
//!
//! A record has no place for header values, query strings or bodies, so that no line can leak them.

use std::io::{self, IsTerminal, Write};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use metrics::Counter;
use serde_json::Value;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::config::AccessLog as Form;
use crate::telemetry::metrics::{HedgeOutcome, Outcome};
use crate::wire::authority::Authority;
use crate::wire::deadline_header::format_rfc3339_millis;

/// Lines that may wait for the writer: some megabytes at the longest paths.
const WAITING: usize = 4096;

/// Bytes of a path that are shown. A target may be 16 KiB, and nobody reads that.
const PATH_SHOWN: usize = 1024;

/// How long leaving waits for the last lines to be taken.
const FLUSH: Duration = Duration::from_secs(1);

/// What is told about one request. Absent values are left out of the line.
#[derive(Debug, Clone, Default)]
pub struct AccessRecord {
    /// When the request's head had arrived.
    pub at: Option<SystemTime>,
    /// The id that the caller sees in problems.
    pub request_id: Option<Arc<str>>,
    /// The policy's name.
    pub upstream: Option<Arc<str>>,
    /// The route's name, where it has one.
    pub route: Option<Arc<str>>,
    /// The request's method.
    pub method: Option<http::Method>,
    /// Where it was to go, in normal form.
    pub authority: Option<Authority>,
    /// The path as it was sent, never with a query: [`path_of`] cuts that off.
    pub path: Option<String>,
    /// The status that the client got; 499 when it had left.
    pub status: Option<u16>,
    /// How the request ended.
    pub outcome: Option<Outcome>,
    /// The word of hedgerow's own error.
    pub error: Option<&'static str>,
    /// What only the log may tell about the error, such as addresses.
    pub cause: Option<Arc<str>>,
    /// From the head's arrival to the answer's last byte.
    pub duration: Option<Duration>,
    /// In queues: for a permit, and for a rate token.
    pub queue: Option<Duration>,
    /// From sending to the head of the answer that was passed on.
    pub upstream_time: Option<Duration>,
    /// How long the upstream had on arrival: the deadline less the reserve.
    pub deadline: Option<Duration>,
    /// Attempts that were sent.
    pub attempts: Option<u32>,
    /// Where the answer comes from: an attempt, the cache, an equal call, or what stands in.
    pub source: Option<&'static str>,
    /// What came of the hedge, where one was due.
    pub hedge: Option<HedgeOutcome>,
    /// The address that answered.
    pub peer: Option<IpAddr>,
    /// Bytes of the answer's body that were passed on.
    pub bytes_out: Option<u64>,
}

/// The part of a request target that may be logged: the path, cut short where it is very long.
pub fn path_of(target: &str) -> String {
    let path = target.split(['?', '#']).next().unwrap_or(target);
    if path.len() <= PATH_SHOWN {
        return path.to_owned();
    }
    let end = (0..=PATH_SHOWN).rev().find(|at| path.is_char_boundary(*at)).unwrap_or(0);
    format!("{}...", &path[..end])
}

/// A field's name in the line, and its value.
type Field = (&'static str, Value);

impl AccessRecord {
    /// What there is to tell, in the order in which a person reads it.
    fn fields(&self) -> impl Iterator<Item = Field> {
        let millis = |time: Duration| Value::from((time.as_secs_f64() * 1e6).round() / 1e3);
        let word = |text: &Arc<str>| Value::from(&**text);
        [
            ("ts", self.at.map(|at| Value::from(format_rfc3339_millis(at)))),
            ("request_id", self.request_id.as_ref().map(word)),
            ("upstream", self.upstream.as_ref().map(word)),
            ("route", self.route.as_ref().map(word)),
            ("method", self.method.as_ref().map(|method| Value::from(method.as_str()))),
            ("host", self.authority.as_ref().map(|authority| Value::from(authority.key()))),
            ("path", self.path.as_deref().map(Value::from)),
            ("status", self.status.map(Value::from)),
            ("outcome", self.outcome.map(|outcome| Value::from(outcome.word()))),
            ("error", self.error.map(Value::from)),
            ("cause", self.cause.as_ref().map(word)),
            ("duration_ms", self.duration.map(millis)),
            ("queue_ms", self.queue.map(millis)),
            ("upstream_ms", self.upstream_time.map(millis)),
            ("deadline_ms", self.deadline.map(millis)),
            ("attempts", self.attempts.map(Value::from)),
            ("source", self.source.map(Value::from)),
            ("hedge", self.hedge.map(|hedge| Value::from(hedge.word()))),
            ("peer", self.peer.map(|ip| Value::from(ip.to_string()))),
            ("bytes_out", self.bytes_out.map(Value::from)),
        ]
        .into_iter()
        .filter_map(|(name, value)| Some((name, value?)))
    }

    fn write_json(&self, out: &mut impl Write) -> io::Result<()> {
        let object: serde_json::Map<String, Value> =
            self.fields().map(|(name, value)| (name.to_owned(), value)).collect();
        serde_json::to_writer(&mut *out, &object)?;
        out.write_all(b"\n")
    }

    /// The time, then `name=value`; values that are more than a word in quotes.
    fn write_text(&self, out: &mut impl Write) -> io::Result<()> {
        for (at, (name, value)) in self.fields().enumerate() {
            let separator = if at == 0 { "" } else { " " };
            match value.as_str() {
                Some(text) if is_word(text) => write!(out, "{separator}{name}={text}")?,
                // Debug escapes what JSON would let through to a terminal, such as U+009B.
                Some(text) => write!(out, "{separator}{name}={text:?}")?,
                None => write!(out, "{separator}{name}={value}")?,
            }
        }
        out.write_all(b"\n")
    }
}

/// Whether a text stands for itself without quotes. What a caller sent must not make a line look like
/// two, or like a terminal's commands.
fn is_word(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_graphic() && b != b'"' && b != b'\\')
}

/// The way to the writer. Dropping it writes what waits, for a second at most.
#[derive(Debug)]
pub struct AccessLog {
    /// `None` only while it is being dropped.
    lines: Option<SyncSender<(Form, AccessRecord)>>,
    /// Says nothing; closes when the writer has written the last line.
    done: parking_lot::Mutex<Receiver<()>>,
    writer: Option<JoinHandle<()>>,
    dropped: Counter,
}

impl AccessLog {
    /// Starts the thread that writes to `out`, which may block. `dropped` counts the lines that are lost.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn new(out: impl Write + Send + 'static, dropped: Counter) -> io::Result<Self> {
        let (lines, waiting) = sync_channel(WAITING);
        let (alive, done) = sync_channel(0);
        let lost = dropped.clone();
        let writer = std::thread::Builder::new().name("access-log".into()).spawn(move || {
            write_all(&waiting, out, &lost);
            drop(alive);
        })?;
        Ok(Self { lines: Some(lines), done: done.into(), writer: Some(writer), dropped })
    }

    /// Hands a record over to be written in `form`, which the policy in force says. Never blocks.
    pub fn record(&self, form: Form, record: AccessRecord) {
        let Some(lines) = self.lines.as_ref().filter(|_| form != Form::Off) else { return };
        match lines.try_send((form, record)) {
            Ok(()) => {}
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => self.dropped.increment(1),
        }
    }
}

impl Drop for AccessLog {
    fn drop(&mut self) {
        self.lines = None;
        // A reader that has stopped must not keep the process from leaving.
        let ended = self.done.get_mut().recv_timeout(FLUSH);
        if ended == Err(std::sync::mpsc::RecvTimeoutError::Disconnected)
            && let Some(writer) = self.writer.take()
        {
            // It panicked or it ended: there is nobody to tell.
            let _ = writer.join();
        }
    }
}

/// Writes until the last sender is gone. Flushes when nothing waits, so that a line is seen at once on a
/// quiet proxy and many share one write on a busy one.
fn write_all(waiting: &Receiver<(Form, AccessRecord)>, out: impl Write, lost: &Counter) {
    let mut out = io::BufWriter::with_capacity(64 * 1024, out);
    let mut is_failing = false;
    while let Ok(first) = waiting.recv() {
        let mut batch = 0;
        let mut result = Ok(());
        for (form, record) in std::iter::once(first).chain(waiting.try_iter().take(WAITING)) {
            batch += 1;
            result = result.and_then(|()| match form {
                Form::Json => record.write_json(&mut out),
                Form::Text => record.write_text(&mut out),
                Form::Off => Ok(()),
            });
        }
        match result.and_then(|()| out.flush()) {
            Ok(()) => is_failing = false,
            Err(error) => {
                lost.increment(batch);
                if !std::mem::replace(&mut is_failing, true) {
                    tracing::warn!(%error, "the access log cannot be written");
                }
            }
        }
    }
}

/// Sends operational messages from `level` on (`error`, `warn`, `info`, `debug`, `trace`, or targets with
/// levels, as in `warn,hedgerow=debug`) to standard error: as text on a terminal, else as JSON. A plain
/// level is hedgerow's; libraries stay at `warn`, or at the level where that is lower.
///
/// # Errors
/// When the filter cannot be read, or messages go somewhere already.
pub fn init_tracing(level: &str) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let lines = tracing_subscriber::fmt::layer().with_writer(io::stderr).with_target(false);
    let subscriber = tracing_subscriber::registry().with(filter(level)?);
    if io::stderr().is_terminal() {
        subscriber.with(lines).try_init()?;
    } else {
        subscriber.with(lines.json().flatten_event(true)).try_init()?;
    }
    Ok(())
}

/// Targets and levels suffice; the filter by spans and fields costs a regex engine.
fn filter(level: &str) -> Result<Targets, tracing_subscriber::filter::ParseError> {
    match level.to_ascii_lowercase().as_str() {
        plain @ ("off" | "error") => plain.parse(),
        plain @ ("warn" | "info" | "debug" | "trace") => format!("warn,hedgerow={plain}").parse(),
        _ => level.parse(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::UNIX_EPOCH;

    use super::*;
    use crate::telemetry::metrics::Metrics;

    /// What was written, to be looked at after the log is dropped.
    #[derive(Clone, Default)]
    struct Page(Arc<parking_lot::Mutex<Vec<u8>>>);

    impl Page {
        fn text(&self) -> String {
            String::from_utf8(self.0.lock().clone()).unwrap()
        }
    }

    impl Write for Page {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Says when it is written to, and goes on when told or when nobody can tell any more.
    struct Gate {
        reached: mpsc::Sender<()>,
        go: mpsc::Receiver<()>,
        page: Page,
    }

    impl Write for Gate {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let _ = self.reached.send(());
            let _ = self.go.recv();
            self.page.write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    struct Broken;

    impl Write for Broken {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::BrokenPipe.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn record() -> AccessRecord {
        AccessRecord {
            at: Some(UNIX_EPOCH + Duration::from_millis(1_795_946_430_250)),
            request_id: Some("7f3a".into()),
            upstream: Some("quotes".into()),
            method: Some(http::Method::GET),
            authority: Authority::parse("Quotes.Example", Some(443)).ok(),
            path: Some(path_of("/v1/quote/AAPL?token=secret#also")),
            status: Some(502),
            outcome: Some(Outcome::Error),
            error: Some("connect_failed"),
            cause: Some("192.0.2.1: connection refused".into()),
            duration: Some(Duration::from_micros(12_345)),
            attempts: Some(2),
            hedge: Some(HedgeOutcome::Failed),
            ..AccessRecord::default()
        }
    }

    /// The page after `records` were written to it.
    fn written(form: Form, records: Vec<AccessRecord>) -> String {
        let page = Page::default();
        let log = AccessLog::new(page.clone(), Counter::noop()).unwrap();
        for record in records {
            log.record(form, record);
        }
        drop(log);
        page.text()
    }

    fn lost(metrics: &Metrics) -> u64 {
        let text = metrics.render();
        let value = text.lines().find_map(|line| line.strip_prefix("hedgerow_access_log_dropped_total "));
        value.unwrap().parse().unwrap()
    }

    #[test]
    fn a_json_line_tells_what_there_is_and_no_query() {
        assert_eq!(
            written(Form::Json, vec![record()]),
            concat!(
                r#"{"ts":"2026-11-29T10:00:30.250Z","request_id":"7f3a","upstream":"quotes","method":"GET","#,
                r#""host":"quotes.example:443","path":"/v1/quote/AAPL","status":502,"outcome":"error","#,
                r#""error":"connect_failed","cause":"192.0.2.1: connection refused","duration_ms":12.345,"#,
                r#""attempts":2,"hedge":"failed"}"#,
                "\n"
            )
        );
    }

    #[test]
    fn a_text_line_is_one_line_whatever_a_caller_sent() {
        let hostile = AccessRecord {
            path: Some("/a b\"\n\u{1b}[2J\u{9b}2J".into()),
            upstream: Some("quotes".into()),
            status: Some(200),
            ..AccessRecord::default()
        };
        let expected = concat!("upstream=quotes path=\"/a b\\\"\\n\\u{1b}[2J\\u{9b}2J\" status=200", "\n");
        assert_eq!(written(Form::Text, vec![hostile]), expected);
    }

    #[test]
    fn dropping_the_log_writes_all_that_waits() {
        assert_eq!(written(Form::Json, vec![record(); WAITING]).lines().count(), WAITING);
        assert_eq!(written(Form::Off, vec![record()]), "");
    }

    #[test]
    fn a_reader_that_stops_costs_lines_and_never_time() {
        let (reached, writing) = mpsc::channel();
        let (go, gate) = mpsc::channel();
        let page = Page::default();
        let metrics = Metrics::new();
        let out = Gate { reached, go: gate, page: page.clone() };
        let log = AccessLog::new(out, metrics.access_log_dropped()).unwrap();
        log.record(Form::Json, record());
        // The writer is stuck with the first line; then the channel holds so many, and no more.
        writing.recv().unwrap();
        for _ in 0..WAITING + 10 {
            log.record(Form::Json, record());
        }
        assert_eq!(lost(&metrics), 10);
        drop(go);
        drop(log);
        assert_eq!(page.text().lines().count(), WAITING + 1);
    }

    #[test]
    fn lines_that_cannot_be_written_are_counted() {
        let metrics = Metrics::new();
        let log = AccessLog::new(Broken, metrics.access_log_dropped()).unwrap();
        for _ in 0..3 {
            log.record(Form::Json, record());
        }
        drop(log);
        assert_eq!(lost(&metrics), 3);
    }

    #[test]
    fn very_long_paths_are_cut_short() {
        let path = path_of(&format!("/{}?q", "é".repeat(2000)));
        assert!(path.len() <= PATH_SHOWN + 3 && path.ends_with("é..."), "{path}");
        assert_eq!(path_of("/short"), "/short");
        assert_eq!(path_of("*"), "*");
    }

    #[test]
    fn a_plain_level_is_hedgerows_and_nonsense_is_refused() {
        assert_eq!(filter("DEBUG").unwrap().to_string(), "hedgerow=debug,warn");
        assert_eq!(filter("error").unwrap().to_string(), "error");
        assert_eq!(filter("hyper=trace").unwrap().to_string(), "hyper=trace");
        assert!(filter("a=b=c").is_err());
    }
}
