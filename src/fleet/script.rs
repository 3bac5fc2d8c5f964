//! A script that Redis runs, and what it answers.

use redis::{Cmd, Value};

/// A script in Lua. Its keys are of one slot, so that it runs in a cluster as well. Redis knows it by its hash and has
/// to be told the text only once.
pub struct Script {
    text: &'static str,
    hash: String,
}

impl Script {
    /// From its text.
    pub fn new(text: &'static str) -> Self {
        Self { text, hash: redis::Script::new(text).get_hash().to_owned() }
    }

    /// The call by hash, which a server that does not know it refuses with NOSCRIPT.
    pub(super) fn by_hash(&self, keys: &[&str], arguments: &[&[u8]]) -> Cmd {
        call("EVALSHA", &self.hash, keys, arguments)
    }

    /// The call with the text, which the server then knows.
    pub(super) fn by_text(&self, keys: &[&str], arguments: &[&[u8]]) -> Cmd {
        call("EVAL", self.text, keys, arguments)
    }
}

fn call(command: &str, script: &str, keys: &[&str], arguments: &[&[u8]]) -> Cmd {
    let mut cmd = redis::cmd(command);
    cmd.arg(script).arg(keys.len()).arg(keys).arg(arguments);
    cmd
}

/// The elements of a script's answer. Whatever is missing or of another type reads as nothing: the script may
/// have met what another version left behind.
#[derive(Debug)]
pub struct Reply(Vec<Value>);

impl Reply {
    pub(crate) fn new(value: Value) -> Self {
        match value {
            Value::Array(elements) => Self(elements),
            one => Self(vec![one]),
        }
    }

    /// Whether it has so many elements, as the script that was asked gives.
    pub fn has(&self, count: usize) -> bool {
        self.0.len() == count
    }

    /// The text at `index`.
    pub fn text(&self, index: usize) -> &str {
        match self.0.get(index) {
            Some(Value::BulkString(bytes)) => std::str::from_utf8(bytes).unwrap_or_default(),
            Some(Value::SimpleString(text)) => text,
            _ => "",
        }
    }

    /// The number at `index`. Scripts answer with texts where a number may have a fraction, since Redis
    /// would cut it off.
    pub fn number(&self, index: usize) -> f64 {
        match self.0.get(index) {
            Some(Value::Int(number)) => *number as f64,
            Some(Value::Double(number)) => *number,
            _ => self.text(index).parse().ok().filter(|number: &f64| number.is_finite()).unwrap_or(0.0),
        }
    }

    /// The bytes at `index`.
    pub fn bytes(&self, index: usize) -> Option<&[u8]> {
        match self.0.get(index)? {
            Value::BulkString(bytes) => Some(bytes),
            _ => None,
        }
    }
}
