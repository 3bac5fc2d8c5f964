//! The last words of a `text/event-stream` that is cut (WHATWG HTML, "Server-sent events").
//!
//! A stream that is cut is visibly incomplete as a message, but several clients read it line by line
//! and take any end for the end: to them half an answer is the answer. So the cut is told in the
//! stream's own words first, as an event called `error`.
//!
//! [`EventStream`] follows the bytes as they pass and keeps none of them. At an event boundary the last
//! event stands for itself. Within an event there is no way to take back what has passed: a blank line
//! would hand the client half an event as a whole one, and holding each event back until it is complete
//! would delay the stream for the sake of its rare end. Our fields therefore join the event that was
//! broken off. The last `event` field wins, so it is dispatched as `error`, and never as what it was
//! going to be; its data is what had come of it, and then our line.
//!
//! One event must not be ended in this way: one that carries an `id`. Dispatching it would move the
//! client's place beyond an event that it never got, and resuming from `Last-Event-ID` would skip that
//! event for good. Nothing is said then; a client that resumes does so at any end of the stream.

use bytes::Bytes;
use http::header::{self, HeaderMap};
use http::{Response, StatusCode};

use super::media_type;

/// Whether a message holds an event stream.
pub fn is_event_stream(headers: &HeaderMap) -> bool {
    media_type::of(headers).eq_ignore_ascii_case(b"text/event-stream")
}

/// Where a stream of events stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EventStream {
    place: Place,
    /// A line feed that comes now belongs to the carriage return before it.
    after_return: bool,
    /// The event that has begun has an `id` field, maybe not all of it.
    has_id: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Nothing has come since the last blank line.
    Boundary,
    /// Within an event, at the start of a line.
    LineStart,
    /// The line so far is `i`.
    I,
    /// The line so far is `id`.
    Id,
    /// Further on in any line. A byte order mark counts as a part of the first one.
    Line,
}

impl EventStream {
    const BEGIN: Self = Self { place: Place::Boundary, after_return: false, has_id: false };

    /// Follows the body of an answer with this head, if words of ours can be added to it: an event
    /// stream as it is, not compressed, and with no length that they would exceed.
    pub fn of<T>(answer: &Response<T>) -> Option<Self> {
        let headers = answer.headers();
        let is_open = answer.status() == StatusCode::OK
            && is_event_stream(headers)
            && !headers.contains_key(header::CONTENT_LENGTH)
            && headers
                .get_all(header::CONTENT_ENCODING)
                .iter()
                .all(|coding| coding.as_bytes().eq_ignore_ascii_case(b"identity"));
        is_open.then_some(Self::BEGIN)
    }

    /// These bytes have passed. How a stream is split into pieces makes no difference.
    pub fn pass(&mut self, bytes: &[u8]) {
        for byte in bytes {
            match byte {
                b'\n' if self.after_return => self.after_return = false,
                b'\r' | b'\n' => {
                    self.end_line();
                    self.after_return = *byte == b'\r';
                }
                _ => {
                    self.go_on(*byte);
                    self.after_return = false;
                }
            }
        }
    }

    fn end_line(&mut self) {
        match self.place {
            Place::Boundary | Place::LineStart => *self = Self::BEGIN,
            Place::I | Place::Line => self.place = Place::LineStart,
            Place::Id => {
                // A name alone is a field with an empty value.
                self.has_id = true;
                self.place = Place::LineStart;
            }
        }
    }

    fn go_on(&mut self, byte: u8) {
        self.place = match (self.place, byte) {
            (Place::Boundary | Place::LineStart, b'i') => Place::I,
            (Place::I, b'd') => Place::Id,
            (Place::Id, b':') => {
                self.has_id = true;
                Place::Line
            }
            _ => Place::Line,
        };
    }

    /// What ends the stream here with an `error` event of this data, which must be one line; `None`
    /// where it would end an event with an `id`.
    pub fn last_words(&self, data: &[u8]) -> Option<Bytes> {
        if self.has_id || self.place == Place::Id {
            return None;
        }
        let line_end: &[u8] = match self.place {
            Place::Boundary | Place::LineStart => b"",
            Place::I | Place::Id | Place::Line => b"\n",
        };
        Some([line_end, b"event: error\ndata: ", data, b"\n\n"].concat().into())
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use proptest::prelude::*;

    use super::*;

    const PROBLEM: &str = r#"{"error":"x"}"#;

    fn after(bytes: &[u8]) -> EventStream {
        let mut stream = EventStream::BEGIN;
        stream.pass(bytes);
        stream
    }

    fn words(bytes: &str) -> Option<String> {
        let words = after(bytes.as_bytes()).last_words(PROBLEM.as_bytes())?;
        Some(String::from_utf8(words.to_vec()).unwrap())
    }

    /// What a client has dispatched: type and data of each event, and the last id.
    #[derive(Debug, Default, PartialEq)]
    struct Dispatched {
        events: Vec<(String, String)>,
        last_id: String,
    }

    /// A client that has read `text`, by the letter of the specification; also whether the event that it
    /// has begun has an id, whose line may be unfinished.
    fn client(text: &str) -> (Dispatched, bool) {
        let text = text.replace("\r\n", "\n").replace('\r', "\n");
        let mut lines: Vec<&str> = text.split('\n').collect();
        let unfinished = lines.pop().unwrap_or_default();
        let mut seen = Dispatched::default();
        let (mut kind, mut data, mut id, mut has_id) = (String::new(), String::new(), String::new(), false);
        for line in lines {
            if line.is_empty() {
                seen.last_id.clone_from(&id);
                has_id = false;
                let (kind, data) = (std::mem::take(&mut kind), std::mem::take(&mut data));
                if let Some(data) = data.strip_suffix('\n') {
                    seen.events.push((kind, data.into()));
                }
                continue;
            }
            let (name, value) = line.split_once(':').unwrap_or((line, ""));
            let value = value.strip_prefix(' ').unwrap_or(value);
            match name {
                "event" => kind = value.into(),
                "data" => data = data + value + "\n",
                "id" => (id, has_id) = (value.into(), true),
                _ => {}
            }
        }
        (seen, has_id || unfinished == "id" || unfinished.starts_with("id:"))
    }

    #[test]
    fn at_a_boundary_the_error_is_an_event_of_its_own() {
        let own = format!("event: error\ndata: {PROBLEM}\n\n");
        for stream in ["", "data: 1\n\n", "data: 1\r\n\r\n", "data: 1\r\n\r", "id: 7\r\r", "\n", ": hi\n\n\n"]
        {
            assert_eq!(words(stream).as_ref(), Some(&own), "{stream:?}");
        }
    }

    #[test]
    fn half_an_event_becomes_the_error_and_never_a_message() {
        for (stream, data) in [
            ("event: delta\ndata: {\"a\":", "{\"a\":\n"),
            ("event: delta\ndata: {}\n", "{}\n"),
            ("event: del", ""),
            ("data: 1\r\n", "1\n"),
            (": a comm", ""),
        ] {
            let whole = format!("{stream}{}", words(stream).unwrap());
            let (seen, _) = client(&whole);
            assert_eq!(seen.events, [("error".into(), format!("{data}{PROBLEM}"))], "{stream:?}");
        }
    }

    #[test]
    fn an_event_that_has_an_id_is_not_ended() {
        for stream in ["id: 8\ndata: ha", "data: ha\nid", "id: 8", "id\n", "data: 7\n\nid: 8\r\n"] {
            assert_eq!(words(stream), None, "{stream:?}");
        }
        for stream in ["id: 8\n\n", "i", "idx: 8\n", "data: id: 8\n", " id: 8"] {
            assert!(words(stream).is_some(), "{stream:?}");
        }
    }

    #[test]
    fn only_a_stream_that_can_take_more_words_is_followed() {
        let follows = |status: u16, fields: &[(&'static str, &'static str)]| {
            let mut answer = Response::new(());
            *answer.status_mut() = StatusCode::from_u16(status).unwrap();
            for (name, value) in fields {
                answer.headers_mut().append(*name, HeaderValue::from_static(value));
            }
            EventStream::of(&answer).is_some()
        };
        let kind = ("content-type", "TEXT/event-stream; charset=utf-8");
        assert!(follows(200, &[kind]));
        assert!(follows(200, &[kind, ("content-encoding", "Identity")]));
        assert!(!follows(200, &[kind, ("content-encoding", "gzip")]));
        assert!(!follows(200, &[kind, ("content-encoding", "identity"), ("content-encoding", "br")]));
        assert!(!follows(200, &[kind, ("content-length", "9")]));
        assert!(!follows(500, &[kind]));
        assert!(!follows(200, &[("content-type", "text/event-streams")]));
        assert!(!follows(200, &[]));
    }

    proptest! {
        #[test]
        fn the_pieces_make_no_difference(text in "[id:x\r\n]{0,24}", cuts in prop::collection::vec(0..24_usize, 0..4)) {
            let mut rest = text.as_bytes();
            let mut stream = EventStream::BEGIN;
            for cut in cuts {
                let (piece, after) = rest.split_at(cut.min(rest.len()));
                stream.pass(piece);
                rest = after;
            }
            stream.pass(rest);
            prop_assert_eq!(stream, after(text.as_bytes()));
        }

        /// Cut anywhere, a client gets the whole events, then at most the error, and keeps its place.
        #[test]
        fn a_client_gets_whole_events_and_then_the_error(
            text in "((id|data|event|x):? ?[i1]{0,2}(\r|\n|\r\n){1,2}){0,6}",
            cut in 0..60_usize,
        ) {
            let text = &text[..cut.min(text.len())];
            let (mut expected, has_id) = client(text);
            let words = words(text);
            prop_assert_eq!(words.is_none(), has_id);
            if let Some(words) = words {
                let (seen, _) = client(&format!("{text}{words}"));
                let (kind, data) = seen.events.last().unwrap().clone();
                prop_assert!(kind == "error" && data.ends_with(PROBLEM), "{} {}", kind, data);
                expected.events.push((kind, data));
                prop_assert_eq!(seen, expected);
            }
        }
    }
}
