//! `hedgerow inject` and `hedgerow uninject`: manifests in, manifests out.
//!
//! All is read and judged before anything is written, so that a fault in the last file does not leave half of
//! the others on their way to a cluster.

use std::fs;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use similar::TextDiff;

use super::manifest::{self, Format, Manifest};
use super::patch::{Patch, text_at};
use super::workload::{self, Workload};
use super::{Settings, Skip, Verdict, inject, uninject};

/// What `hedgerow inject` is told.
#[derive(Debug, Args)]
pub struct InjectArguments {
    #[command(flatten)]
    texts: Texts,
    #[command(flatten)]
    settings: Settings,
}

/// What `hedgerow uninject` is told.
#[derive(Debug, Args)]
pub struct UninjectArguments {
    #[command(flatten)]
    texts: Texts,
}

/// What to read, and how to write it.
#[derive(Debug, Args)]
struct Texts {
    /// Files, folders (their *.yaml, *.yml and *.json) or - for standard input, which is read when there are none.
    #[arg(value_name = "FILE")]
    files: Vec<PathBuf>,
    /// The same, as kubectl has it.
    #[arg(short, long = "filename", value_name = "FILE")]
    filename: Vec<PathBuf>,
    /// What to write; without it each text in its own format, with its comments.
    #[arg(short, long, value_name = "FORMAT", value_enum)]
    output: Option<Output>,
    /// Write what would change instead.
    #[arg(long, conflicts_with = "output")]
    diff: bool,
}

/// What to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Output {
    /// YAML; texts in YAML keep their comments.
    Yaml,
    /// JSON, one document after the other.
    Json,
    /// For each workload a line of JSON with its JSON Patch.
    Patch,
}

/// Injects what can be injected, writes it to standard output and what was done to standard error.
///
/// # Errors
/// A text cannot be read, a workload is denied (nothing is written then), or none could be injected.
pub fn inject_manifests(arguments: &InjectArguments) -> Result<(), String> {
    let mut told = Told::default();
    let run = Run::over(&arguments.texts, |workload, pod| {
        let verdict = inject(pod, workload.namespace.as_deref(), &arguments.settings);
        told.count(&verdict);
        match verdict {
            Verdict::Injected { patch, warnings } => ("injected".to_owned(), warnings, Some(patch)),
            Verdict::Skipped(skip) => (format!("skipped: {skip}"), Vec::new(), None),
            Verdict::Denied(reason) => (format!("denied: {reason}"), Vec::new(), None),
        }
    })?;
    run.report();
    if told.denied > 0 {
        return Err("nothing is written, since a workload is denied".into());
    }
    run.write(&arguments.texts)?;
    if told.injected == 0 { Err("no workload was injected".into()) } else { Ok(()) }
}

/// Takes away what injection added.
///
/// # Errors
/// A text cannot be read, or a workload's status cannot.
pub fn uninject_manifests(arguments: &UninjectArguments) -> Result<(), String> {
    let mut is_refused = false;
    let run = Run::over(&arguments.texts, |_, pod| match uninject(pod) {
        Ok(Some(patch)) => ("uninjected".to_owned(), Vec::new(), Some(patch)),
        Ok(None) => ("skipped: it is not injected".to_owned(), Vec::new(), None),
        Err(reason) => {
            is_refused = true;
            (format!("refused: {reason}"), Vec::new(), None)
        }
    })?;
    run.report();
    if is_refused {
        return Err("nothing is written, since a workload is refused".into());
    }
    run.write(&arguments.texts)
}

#[derive(Debug, Default)]
struct Told {
    /// Now or before.
    injected: usize,
    denied: usize,
}

impl Told {
    fn count(&mut self, verdict: &Verdict) {
        match verdict {
            Verdict::Injected { .. } | Verdict::Skipped(Skip::AlreadyInjected) => self.injected += 1,
            Verdict::Denied(_) => self.denied += 1,
            Verdict::Skipped(_) => {}
        }
    }
}

/// All texts with what becomes of them.
struct Run {
    results: Vec<Done>,
    /// For standard error.
    lines: Vec<String>,
    /// A line of JSON for each workload that changes.
    patches: Vec<Value>,
}

/// A text with what became of it.
struct Done {
    name: String,
    manifest: Manifest,
    text: String,
    values: Vec<Value>,
}

impl Run {
    fn over(
        texts: &Texts,
        mut judge: impl FnMut(&Workload, &Value) -> (String, Vec<String>, Option<Patch>),
    ) -> Result<Self, String> {
        let mut run = Self { results: Vec::new(), lines: Vec::new(), patches: Vec::new() };
        for (name, text) in read_all(texts)? {
            let manifest = Manifest::read(text).map_err(|fault| format!("{name}:{fault}"))?;
            let mut patches = Vec::new();
            for (line, document) in manifest.documents() {
                patches.push(run.document(&name, line, document, &mut judge));
            }
            let patched = manifest.patched(&patches).map_err(|error| format!("{name}: {error}"))?;
            for (document, reason) in patched.rewritten {
                let line = manifest.documents().nth(document).map_or(1, |(line, _)| line);
                run.lines.push(format!(
                    "{name}:{line}: warning: the document is written anew, without its comments: {reason}"
                ));
            }
            let mut values: Vec<Value> = manifest.documents().map(|(_, value)| value.clone()).collect();
            for (value, patch) in values.iter_mut().zip(&patches) {
                patch.apply(value)?;
            }
            run.results.push(Done { name, text: patched.text, values, manifest });
        }
        Ok(run)
    }

    fn document(
        &mut self,
        name: &str,
        line: usize,
        document: &Value,
        judge: &mut impl FnMut(&Workload, &Value) -> (String, Vec<String>, Option<Patch>),
    ) -> Patch {
        let workloads = workload::find(document);
        if workloads.is_empty() && !document.is_null() {
            self.lines.push(format!("{name}:{line}: {}: not a workload", titled(document)));
        }
        let mut all = Patch::default();
        for workload in &workloads {
            let Some(pod) = workload.pod.find(document) else { continue };
            let (told, warnings, patch) = judge(workload, pod);
            let Workload { kind, name: own, namespace, .. } = workload;
            let place = namespace.as_ref().map_or(String::new(), |namespace| format!("{namespace}/"));
            self.lines.push(format!("{name}:{line}: {kind} {place}{own}: {told}"));
            self.lines.extend(warnings.iter().map(|warning| format!("  warning: {warning}")));
            if let Some(patch) = patch {
                let patch = patch.below(&workload.pod);
                self.patches.push(json!({
                    "file": name, "line": line, "kind": kind, "namespace": namespace, "name": own,
                    "patch": patch.to_json(),
                }));
                all.extend(patch);
            }
        }
        all
    }

    fn report(&self) {
        for line in &self.lines {
            eprintln!("{line}");
        }
    }

    fn write(&self, texts: &Texts) -> Result<(), String> {
        let text = match texts.output {
            _ if texts.diff => self.results.iter().map(Done::diff).collect(),
            Some(Output::Patch) => self.patches.iter().map(|patch| format!("{patch}\n")).collect(),
            Some(Output::Json) => self.joined(Some(Format::Json)),
            Some(Output::Yaml) => self.joined(Some(Format::Yaml)),
            None => self.joined(None),
        };
        match io::stdout().lock().write_all(text.as_bytes()) {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(format!("cannot write: {error}")),
            _ => Ok(()),
        }
    }

    /// One text is itself; several are parted as documents are.
    fn joined(&self, format: Option<Format>) -> String {
        let mut all = String::new();
        for done in &self.results {
            let own = done.manifest.format();
            let format = format.unwrap_or(own);
            let text = match format == own {
                true => done.text.clone(),
                false => manifest::render(done.values.iter(), format),
            };
            if !all.is_empty() {
                if !all.ends_with('\n') {
                    all.push('\n');
                }
                if format == Format::Yaml && !text.starts_with("---") {
                    all.push_str("---\n");
                }
            }
            all.push_str(&text);
        }
        all
    }
}

impl Done {
    fn diff(&self) -> String {
        let diff = TextDiff::from_lines(self.manifest.text(), self.text.as_str());
        diff.unified_diff().header(&self.name, &self.name).to_string()
    }
}

/// What a document calls itself.
fn titled(document: &Value) -> String {
    let kind = text_at(document, &["kind"]).unwrap_or("a document without a kind");
    match text_at(document, &["metadata", "name"]) {
        Some(name) => format!("{kind} {name}"),
        None => kind.to_owned(),
    }
}

/// All texts with their names.
fn read_all(texts: &Texts) -> Result<Vec<(String, String)>, String> {
    let mut paths: Vec<PathBuf> = texts.files.iter().chain(&texts.filename).cloned().collect();
    if paths.is_empty() {
        paths.push("-".into());
    }
    let mut all = Vec::new();
    for path in paths {
        if path.as_os_str() == "-" {
            all.push(("stdin".to_owned(), read(io::stdin().lock(), "stdin")?));
        } else if path.is_dir() {
            for file in files_of(&path)? {
                all.push(read_file(&file)?);
            }
        } else {
            all.push(read_file(&path)?);
        }
    }
    Ok(all)
}

/// The manifests right in a folder, in the order of their names.
fn files_of(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let told = |error: io::Error| format!("cannot read {}: {error}", folder.display());
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).map_err(told)? {
        let path = entry.map_err(told)?.path();
        let is_manifest = path
            .extension()
            .is_some_and(|extension| ["yaml", "yml", "json"].iter().any(|own| extension == *own));
        if is_manifest && path.is_file() {
            files.push(path);
        }
    }
    if files.is_empty() {
        return Err(format!("{} has no *.yaml, *.yml or *.json in it", folder.display()));
    }
    files.sort();
    Ok(files)
}

fn read_file(path: &Path) -> Result<(String, String), String> {
    let name = path.display().to_string();
    let file = fs::File::open(path).map_err(|error| format!("cannot read {name}: {error}"))?;
    Ok((name.clone(), read(file, &name)?))
}

fn read(from: impl Read, name: &str) -> Result<String, String> {
    let mut bytes = Vec::new();
    let limit = manifest::MAX_TEXT as u64 + 1;
    from.take(limit).read_to_end(&mut bytes).map_err(|error| format!("cannot read {name}: {error}"))?;
    if bytes.len() > manifest::MAX_TEXT {
        return Err(format!("{name} has more than {} MiB", manifest::MAX_TEXT >> 20));
    }
    String::from_utf8(bytes).map_err(|error| {
        let valid = &error.as_bytes()[..error.utf8_error().valid_up_to()];
        let line = 1 + valid.iter().filter(|byte| **byte == b'\n').count();
        format!("{name}:{line}: the text is not UTF-8")
    })
}
