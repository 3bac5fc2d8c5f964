//! Values as YAML or JSON text, to be put into a text that is there or in place of one.

use serde_json::{Map, Value};

/// `value` in block style, each line after the first indented by `indent` blanks: what stands after a key's or
/// an item's own mark at that depth. Ends without a line break.
pub(super) fn block(value: &Value, indent: usize, line_end: &str) -> String {
    let mut text = String::new();
    Writer { text: &mut text, line_end }.value(value, indent);
    text
}

/// `key: value` in block style, as an entry of a mapping at `indent`.
pub(super) fn entry(key: &str, value: &Value, indent: usize, line_end: &str) -> String {
    let mut text = String::new();
    Writer { text: &mut text, line_end }.entry(key, value, indent);
    text
}

/// How texts in brackets and braces are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Quotes {
    /// Around all of them, as JSON wants it; YAML reads that too.
    All,
    /// Where YAML needs them.
    Needed,
}

impl Quotes {
    pub(super) fn around(self, text: &str) -> String {
        match self {
            Self::All => quoted(text),
            Self::Needed => scalar(text),
        }
    }
}

/// `value` on one line.
pub(super) fn flow(value: &Value, quotes: Quotes) -> String {
    match value {
        Value::Object(map) => {
            let entries =
                map.iter().map(|(key, value)| format!("{}: {}", quotes.around(key), flow(value, quotes)));
            format!("{{{}}}", entries.collect::<Vec<_>>().join(", "))
        }
        Value::Array(list) => {
            format!("[{}]", list.iter().map(|item| flow(item, quotes)).collect::<Vec<_>>().join(", "))
        }
        Value::String(text) => quotes.around(text),
        other => other.to_string(),
    }
}

/// `value` over several lines; each line after the first begins with `lead`, and deeper ones with
/// `step` for each level more.
pub(super) fn flow_lines(value: &Value, quotes: Quotes, lead: &str, step: &str, line_end: &str) -> String {
    let inner = format!("{line_end}{lead}{step}");
    let deeper = format!("{lead}{step}");
    let lines = |open, parts: Vec<String>, close| {
        format!("{open}{inner}{}{line_end}{lead}{close}", parts.join(&format!(",{inner}")))
    };
    match value {
        Value::Object(map) if !map.is_empty() => {
            let entry = |(key, value): (&String, &Value)| {
                format!("{}: {}", quotes.around(key), flow_lines(value, quotes, &deeper, step, line_end))
            };
            lines("{", map.iter().map(entry).collect(), "}")
        }
        Value::Array(list) if !list.is_empty() => {
            let items = list.iter().map(|item| flow_lines(item, quotes, &deeper, step, line_end));
            lines("[", items.collect(), "]")
        }
        other => flow(other, quotes),
    }
}

/// In JSON's quotes, which YAML reads alike, but for what it takes for the end of a line or does not print.
fn quoted(text: &str) -> String {
    let mut quoted = String::new();
    for c in Value::String(text.to_owned()).to_string().chars() {
        let is_risky =
            matches!(c, '\u{7f}'..='\u{9f}' | '\u{2028}' | '\u{2029}' | '\u{feff}' | '\u{fffe}'..='\u{ffff}');
        if is_risky {
            quoted.push_str(&format!("\\u{:04x}", c as u32));
        } else {
            quoted.push(c);
        }
    }
    quoted
}

struct Writer<'a> {
    text: &'a mut String,
    line_end: &'a str,
}

impl Writer<'_> {
    fn value(&mut self, value: &Value, indent: usize) {
        match value {
            Value::Object(map) if !map.is_empty() => self.map(map, indent),
            Value::Array(list) if !list.is_empty() => {
                for (index, item) in list.iter().enumerate() {
                    self.next_line(index, indent);
                    self.text.push_str("- ");
                    self.value(item, indent + 2);
                }
            }
            Value::String(text) => self.text.push_str(&scalar(text)),
            other => self.text.push_str(&flow(other, Quotes::Needed)),
        }
    }

    fn map(&mut self, map: &Map<String, Value>, indent: usize) {
        for (index, (key, value)) in map.iter().enumerate() {
            self.next_line(index, indent);
            self.entry(key, value, indent);
        }
    }

    fn entry(&mut self, key: &str, value: &Value, indent: usize) {
        self.text.push_str(&scalar(key));
        self.text.push(':');
        let depth = match value {
            Value::Object(map) if !map.is_empty() => indent + 2,
            Value::Array(list) if !list.is_empty() => indent,
            _ => {
                self.text.push(' ');
                return self.value(value, indent);
            }
        };
        self.next_line(1, depth);
        self.value(value, depth);
    }

    fn next_line(&mut self, index: usize, indent: usize) {
        if index > 0 {
            self.text.push_str(self.line_end);
            self.text.push_str(&" ".repeat(indent));
        }
    }
}

/// Text without quotes where nobody can read anything else into it.
fn scalar(text: &str) -> String {
    let is_word = text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '/')
        || text.starts_with("--") && text[2..].starts_with(|c: char| c.is_ascii_alphabetic());
    let is_plain =
        text.chars().all(|c| c.is_ascii_alphanumeric() || "-_./:=+@".contains(c)) && !text.ends_with(':');
    const OTHERS: [&str; 9] = ["true", "false", "yes", "no", "on", "off", "null", "y", "n"];
    if is_word && is_plain && !OTHERS.contains(&text.to_ascii_lowercase().as_str()) {
        text.to_owned()
    } else {
        quoted(text)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::super::tree::parse;
    use super::*;

    #[test]
    fn a_container_looks_as_one_would_write_it() {
        let value = json!({
            "name": "a", "args": ["run", "--x=1"], "ports": [{ "containerPort": 80 }], "none": {}, "value": "$(A):1",
            "on": "off",
        });
        let text = "name: a\n  args:\n  - run\n  - --x=1\n  ports:\n  - containerPort: 80\n  none: {}\n  \
                    value: \"$(A):1\"\n  \"on\": \"off\"";
        assert_eq!(block(&value, 2, "\n"), text);
    }

    /// Any JSON, with texts that YAML could misread.
    pub(super) fn values() -> impl Strategy<Value = Value> {
        let texts = prop_oneof![
            "[ -~]{0,12}",
            "\\PC{0,6}",
            "[\\x00-\\x1f\\u{80}-\\u{a0}\\u{2028}\\u{feff}]{0,3}",
            "(yes|no|~|null|0x1f|0o7|1e3|-|---|\\.\\.\\.|<<|\\?|: |#|on:|- a|--a)",
        ];
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<u64>().prop_map(Value::from),
            texts.clone().prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 40, 5, move |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
                prop::collection::vec((texts.clone(), inner), 0..5).prop_map(|entries| {
                    Value::Object(entries.into_iter().filter(|(key, _)| key != "<<").collect())
                }),
            ]
        })
    }

    proptest! {
        #[test]
        fn whatever_is_written_reads_the_same(value in values()) {
            let (all, needed) = (Quotes::All, Quotes::Needed);
            for text in [
                block(&value, 0, "\n"), block(&value, 0, "\r\n"), flow(&value, all), flow(&value, needed),
                flow_lines(&value, all, "", "  ", "\n"), flow_lines(&value, needed, "  ", "  ", "\r\n"),
            ] {
                let documents = parse(&text).map_err(|fault| TestCaseError::fail(format!("{fault:?}\n{text}")))?;
                prop_assert_eq!(&documents[0].value, &value, "{}", text);
            }
            let json: Value = serde_json::from_str(&flow_lines(&value, all, "", "\t", "\n")).unwrap();
            prop_assert_eq!(json, value);
        }
    }
}
