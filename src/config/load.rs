//! From a file or text to a [`Loaded`] policy: the steps in order.

use std::fmt;
use std::path::{Path as FilePath, PathBuf};

use super::files::{self, Sources, read_bounded};
use super::problem::{Path, Place, Problem, Problems, Severity};
use super::report::Report;
use super::tree::{self, Node, Value};
use super::{Config, Surroundings, build, de, raw, sections, unsupported};

/// A policy with what is worth telling about it.
pub struct Loaded {
    /// The policy.
    pub config: Config,
    /// What probably does not do what its author thinks.
    pub warnings: Problems,
    /// The file as it was written, for [`explain`](super::explain).
    pub(super) tree: Node,
}

/// Without the file's own words: they may be secrets.
impl fmt::Debug for Loaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { config, warnings, tree: _ } = self;
        f.debug_struct("Loaded").field("config", config).field("warnings", warnings).finish_non_exhaustive()
    }
}

/// What the watcher compares: the policy's and its files' content, and which files those are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Version {
    pub(super) fingerprint: u64,
    pub(super) files: Vec<PathBuf>,
}

/// Loads the policy in `path`, with the files and variables that it names. Blocks.
///
/// # Errors
/// Every problem that keeps it from being used, in the file's order.
pub fn load(path: &FilePath) -> Result<Loaded, Problems> {
    read(path, &Surroundings::default()).1
}

/// The policy on which a process starts: that in `path` or the embedded one, in these surroundings. Blocks.
///
/// # Errors
/// As [`load`].
pub fn at_start(path: Option<&FilePath>, surroundings: &Surroundings) -> Result<Loaded, Problems> {
    match path {
        Some(path) => read_at_start(path, surroundings).1,
        None => built_in(surroundings),
    }
}

/// As [`read`], but for a file that may come later.
pub(super) fn read_at_start(
    path: &FilePath,
    surroundings: &Surroundings,
) -> (Version, Result<Loaded, Problems>) {
    let (version, loaded) = read(path, surroundings);
    match loaded {
        Err(_) if surroundings.config_optional && !path.exists() => (version, built_in(surroundings)),
        loaded => (version, loaded),
    }
}

/// The same, with the version that was looked at even if it is no good.
pub(super) fn read(path: &FilePath, surroundings: &Surroundings) -> (Version, Result<Loaded, Problems>) {
    let name = path.display().to_string();
    let bytes = match read_bounded(path, tree::MAX_FILE as u64) {
        Ok(bytes) => bytes,
        Err(message) => {
            let version =
                Version { fingerprint: files::fingerprint(message.as_bytes(), &[]), files: Vec::new() };
            let problem = Problem::error(Place::START, Path::root(), message);
            return (version, Err(Problems::new(&name, "", vec![problem])));
        }
    };
    let dir = path.parent().unwrap_or(FilePath::new(""));
    let sources = Sources::new(dir);
    let result = match std::str::from_utf8(&bytes) {
        Ok(text) => load_text_in(&name, text, &sources, surroundings),
        Err(error) => {
            let line = 1 + bytes[..error.valid_up_to()].iter().filter(|byte| **byte == b'\n').count();
            let problem = Problem::error(Place { line, column: 1 }, Path::root(), "the file is not UTF-8");
            Err(Problems::new(&name, "", vec![problem]))
        }
    };
    (Version { fingerprint: sources.fingerprint(&bytes), files: sources.files() }, result)
}

/// The fingerprint that [`read`] would find now, if the policy still names `files`.
pub(super) fn glance(path: &FilePath, files: &[PathBuf]) -> u64 {
    match read_bounded(path, tree::MAX_FILE as u64) {
        Ok(bytes) => files::fingerprint(&bytes, files),
        Err(message) => files::fingerprint(message.as_bytes(), &[]),
    }
}

/// Loads a policy from text; the files that it names are relative to `dir`.
///
/// # Errors
/// As [`load`].
pub fn parse(text: &str, dir: &FilePath) -> Result<Loaded, Problems> {
    load_text("policy", text, &Sources::new(dir))
}

/// The policy that holds without a file.
pub fn embedded() -> Config {
    built_in(&Surroundings::default()).expect("a test loads the embedded policy").config
}

/// The same in these surroundings.
///
/// # Errors
/// They contradict each other.
pub fn embedded_in(surroundings: &Surroundings) -> Result<Config, Problems> {
    built_in(surroundings).map(|loaded| loaded.config)
}

fn built_in(surroundings: &Surroundings) -> Result<Loaded, Problems> {
    load_text_in("policy", include_str!("default.yaml"), &Sources::new(FilePath::new("")), surroundings)
}

/// The policy in `text`, with nothing around it.
pub(super) fn load_text(name: &str, text: &str, sources: &Sources) -> Result<Loaded, Problems> {
    load_text_in(name, text, sources, &Surroundings::default())
}

fn load_text_in(
    name: &str,
    text: &str,
    sources: &Sources,
    surroundings: &Surroundings,
) -> Result<Loaded, Problems> {
    let mut tree = tree::parse(text).map_err(|problem| Problems::new(name, text, vec![problem]))?;
    let mut problems = Vec::new();
    if text.contains("${") {
        refuse_stray_substitutions(&mut tree, &mut problems);
    }
    unsupported::refuse(&mut tree, &mut problems);
    let mut doubts = sections::doubts_of_empty_stages(&mut tree);
    let mut policy: raw::Policy = de::from_tree(&mut tree, &mut problems);
    surroundings.settle(&mut policy);
    let report = Report::new(&tree);
    let mut config = build::build(&policy, &report, sources);
    config.hash = sources.hash(text.as_bytes());
    problems.append(&mut report.into_problems());
    if surroundings.admin.is_some() {
        config.listen.is_admin_reserved = true;
        // Nobody beyond loopback reads or sets anything there.
        let is_doubt_of_admin = |problem: &Problem| {
            problem.severity == Severity::Warning && problem.path == Path::of(["listen", "admin"])
        };
        problems.retain(|problem| !is_doubt_of_admin(problem));
    }
    problems.append(&mut doubts);
    if problems.iter().any(|problem| problem.severity == Severity::Error) {
        return Err(Problems::new(name, text, problems));
    }
    Ok(Loaded { config, warnings: Problems::new(name, text, problems), tree })
}

/// `${` means something where secrets stand and in a path's replacement. Elsewhere a person hopes in
/// vain that it does.
fn refuse_stray_substitutions(tree: &mut Node, problems: &mut Vec<Problem>) {
    let mut stray = Vec::new();
    tree.for_each(&mut |path: &Path, place, value| {
        if let Value::Text(text) = value
            && text.contains("${")
            && !path.is_header_value()
            && !path.is_redis_url()
            && !path.is_rewrite_path()
        {
            stray.push((path.clone(), place));
        }
    });
    for (path, place) in stray {
        tree.cut(&path);
        let message = "`${…}` is only replaced in shared_state.redis and in the values of rewrite.headers.set and \
                       degraded.headers";
        problems.push(Problem::error(place, path, message));
    }
}
