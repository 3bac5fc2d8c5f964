//! Manifests as people keep them: files of YAML or JSON with several documents, comments, and a hand of their own.
//!
//! What a patch does not touch stays byte for byte: documents that are not ours are read and never written, and in
//! those that are the patch is made in the text. The result is read again and has to say exactly what the patch makes
//! of the value. Where that fails (an alias shares what would change, or someone's style is too much
//! for an insertion), the one document is written anew from its value, with a warning that its comments are lost.

mod edit;
mod tree;
mod write;

use std::fmt;
use std::ops::Range;

use serde_json::Value;

pub use tree::Fault;

use super::patch::Patch;
use edit::{Edit, Style};
use tree::Document;
use write::Quotes;

/// The largest text that is read.
pub const MAX_TEXT: usize = 64 << 20;

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.line, self.column, self.message)
    }
}

/// How documents are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Documents with `---` between.
    Yaml,
    /// Documents one after the other.
    Json,
}

/// A text and the documents in it.
#[derive(Debug)]
pub struct Manifest {
    text: String,
    format: Format,
    style: Style,
    documents: Vec<Document>,
}

/// A text with its patches made.
#[derive(Debug, PartialEq, Eq)]
pub struct Patched {
    /// The text.
    pub text: String,
    /// The documents, by number, that had to be written anew, and why.
    pub rewritten: Vec<(usize, String)>,
}

impl Manifest {
    /// Reads a text.
    ///
    /// # Errors
    /// The first thing that is wrong with it.
    pub fn read(text: String) -> Result<Self, Fault> {
        // Each of several documents in JSON can follow the one before without a mark, which YAML does not know.
        let json = json_documents(&text);
        let format = if json.is_some() { Format::Json } else { Format::Yaml };
        let documents = match (tree::parse(&text), json) {
            (Ok(documents), _) => documents,
            (Err(_), Some(documents)) => documents,
            (Err(fault), None) => return Err(fault),
        };
        let style = Style {
            line_end: if text.contains("\r\n") { "\r\n" } else { "\n" },
            quotes: if format == Format::Json { Quotes::All } else { Quotes::Needed },
        };
        Ok(Self { text, format, style, documents })
    }

    /// The text as it was read.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// What the text is written in.
    pub fn format(&self) -> Format {
        self.format
    }

    /// The documents with the lines on which they begin. An empty one is null.
    pub fn documents(&self) -> impl Iterator<Item = (usize, &Value)> {
        self.documents.iter().map(|document| (document.line, &document.value))
    }

    /// The text with these patches made in its documents; `patches` has one for each, in their order.
    ///
    /// # Errors
    /// A patch fits nowhere, or a document can neither be edited nor be written anew, with its line and why.
    pub fn patched(&self, patches: &[Patch]) -> Result<Patched, String> {
        let mut wanted = Vec::with_capacity(self.documents.len());
        for (document, patch) in self.documents.iter().zip(patches) {
            let mut value = document.value.clone();
            patch.apply(&mut value)?;
            wanted.push(value);
        }
        let plans: Vec<Plan> =
            self.documents.iter().zip(patches).map(|(document, patch)| self.plan(document, patch)).collect();
        let edits = plans.iter().flat_map(|plan| plan.iter().flatten().map(Edit::clone)).collect();
        let text = edit::apply(&self.text, edits);
        let values = text.as_deref().map_err(Clone::clone).and_then(values);
        let is_right = |at: usize| {
            values.as_ref().is_ok_and(|values| values.len() == wanted.len() && values[at] == wanted[at])
        };
        let mut rewritten = Vec::new();
        for (at, plan) in plans.iter().enumerate() {
            match plan {
                Err(reason) => rewritten.push((at, reason.clone())),
                Ok(edits) if !edits.is_empty() && !is_right(at) => {
                    rewritten.push((at, "what would change is used in other places too".to_owned()));
                }
                Ok(_) => {}
            }
        }
        match text {
            Ok(text) if rewritten.is_empty() => Ok(Patched { text, rewritten }),
            _ => self.rewritten(plans, &wanted, rewritten),
        }
    }

    fn plan(&self, document: &Document, patch: &Patch) -> Plan {
        match &document.root {
            _ if patch.operations().is_empty() => Ok(Vec::new()),
            Some(root) => edit::edits(&self.text, root, self.style, patch),
            None => Err("it is not laid out as YAML is".to_owned()),
        }
    }

    fn rewritten(
        &self,
        mut plans: Vec<Plan>,
        wanted: &[Value],
        rewritten: Vec<(usize, String)>,
    ) -> Result<Patched, String> {
        for (at, reason) in &rewritten {
            let document = &self.documents[*at];
            if document.has_own_tags {
                let line = document.line;
                return Err(format!(
                    "line {line}: the document cannot be changed: {reason}, and written anew it would lose its tags"
                ));
            }
            plans[*at] =
                Ok(vec![Edit { range: document.span.clone(), text: self.written(document, &wanted[*at]) }]);
        }
        let text =
            edit::apply(&self.text, plans.into_iter().flat_map(|plan| plan.into_iter().flatten()).collect())?;
        match values(&text) {
            Ok(values) if values == wanted => Ok(Patched { text, rewritten }),
            _ => Err("the documents cannot be changed without changing what they say".to_owned()),
        }
    }

    fn written(&self, document: &Document, value: &Value) -> String {
        let line_end = self.style.line_end;
        let own = &self.text[document.span.clone()];
        match self.format {
            Format::Json if !own.contains('\n') => write::flow(value, Quotes::All),
            Format::Json => {
                let second = own.lines().nth(1).unwrap_or_default();
                let step = &second[..second.len() - second.trim_start().len()];
                write::flow_lines(value, Quotes::All, "", if step.is_empty() { "  " } else { step }, line_end)
            }
            Format::Yaml => {
                let before = &self.text[..document.span.start];
                let is_first = before.is_empty() || before.ends_with(['\n', '\u{feff}']);
                // After `---` on the same line.
                let lead = if is_first { "" } else { line_end };
                format!("{lead}{}", write::block(value, 0, line_end))
            }
        }
    }
}

/// What becomes of a document: changes of the text, or why there can be none.
type Plan = Result<Vec<Edit>, String>;

/// `documents` as a text of their own.
pub fn render<'a>(documents: impl Iterator<Item = &'a Value>, format: Format) -> String {
    let mut text = String::new();
    for (nth, document) in documents.filter(|document| !document.is_null()).enumerate() {
        match format {
            Format::Yaml => {
                if nth > 0 {
                    text.push_str("---\n");
                }
                text.push_str(&write::block(document, 0, "\n"));
            }
            Format::Json => text.push_str(&write::flow_lines(document, Quotes::All, "", "  ", "\n")),
        }
        text.push('\n');
    }
    text
}

fn values(text: &str) -> Result<Vec<Value>, String> {
    let manifest = Manifest::read(text.to_owned()).map_err(|fault| fault.to_string())?;
    Ok(manifest.documents.into_iter().map(|document| document.value).collect())
}

/// The documents of a text that is JSON.
fn json_documents(text: &str) -> Option<Vec<Document>> {
    // Anything else that JSON could begin with is no object of the API.
    if !text.trim_start().starts_with(['{', '[']) {
        return None;
    }
    let mut documents = Vec::new();
    let mut stream = serde_json::Deserializer::from_str(text).into_iter::<Value>();
    let mut start = 0;
    while let Some(value) = stream.next() {
        let end = stream.byte_offset();
        start += text[start..end].len() - text[start..end].trim_start().len();
        documents.push(Document {
            root: None,
            value: value.ok()?,
            span: Range { start, end },
            line: text[..start].matches('\n').count() + 1,
            has_own_tags: false,
        });
        start = end;
    }
    Some(documents)
}

#[cfg(test)]
mod tests;
