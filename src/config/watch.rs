//! Hot reload: the policy file is watched, and what it says next is published for new requests.
//!
//! What is watched is the *directory*. Editors replace a file by renaming another over it, and a
//! ConfigMap volume swaps a `..data` link beside it: a watch on the file's inode sees its end and
//! nothing after. Event names are not looked at either, since the swap reports only `..data`. Any event
//! is a reason to compare content, and content alone decides; a neighbour's change ends there.
//!
//! Events can fail to come: on network file systems, when the kernel's watches are used up, when the
//! directory itself is replaced. So the content is compared every second anyway, which costs one read
//! of a small file, and the watches are set anew when a directory is another one than before.
//!
//! A burst of writes is waited out until it pauses, but not for long: a file that is rewritten without
//! end still takes effect in the midst. A version that cannot be used changes nothing and is told once.
//!
//! All this blocks on files and has its own thread, which ends when the [`Watch`] is dropped.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use notify::event::{AccessKind, AccessMode};
use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use parking_lot::{Condvar, Mutex};
use tokio::time::Instant;
use tracing::{error, info, warn};

use super::load::{self, Loaded, Version};
use super::{Config, Problems, Surroundings};

/// A burst is over when nothing happens for so long.
const QUIET: Duration = Duration::from_millis(100);
/// A burst is not waited out for longer than this.
const LONGEST_BURST: Duration = Duration::from_millis(500);
/// How often content is compared without any event.
const POLL: Duration = Duration::from_secs(1);

/// What became of a new version, or of a request to reload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReloadResult {
    /// It is in force.
    Applied,
    /// It cannot be used; the one before stays in force.
    Rejected,
    /// A reload was asked for, and there was nothing new.
    Unchanged,
}

impl ReloadResult {
    /// All of them, for registering metrics.
    pub const ALL: [Self; 3] = [Self::Applied, Self::Rejected, Self::Unchanged];

    /// The label value.
    pub fn word(self) -> &'static str {
        match self {
            Self::Applied => "applied",
            Self::Rejected => "rejected",
            Self::Unchanged => "unchanged",
        }
    }
}

/// How reloading has gone, for `/status`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReloadStatus {
    /// The last result; `None` before anything has changed.
    pub last: Option<ReloadResult>,
    /// When that was; the start before anything has changed.
    pub at: SystemTime,
    /// When the policy in force was loaded.
    pub applied_at: SystemTime,
    /// Why the file as it is now is not in force. `None`: it is.
    pub error: Option<Arc<str>>,
    /// Keys whose new values wait for a restart.
    pub needs_restart: Vec<&'static str>,
}

/// A policy that follows its file. Dropping it ends the watching, not the policy.
#[derive(Debug)]
pub struct Watch {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    policy: Arc<ArcSwap<Config>>,
    status: Mutex<ReloadStatus>,
    signal: Signal,
}

impl Watch {
    /// Loads the policy in `path` and follows it from then on. `on_result` is called from the watching
    /// thread after each version that was applied or rejected and each [`reload`](Self::reload); it must
    /// not block. Blocks itself while the file is read.
    ///
    /// # Errors
    /// Every problem of the file as it is now: a start on a broken policy is refused. One that is not there yet is
    /// no problem where the surroundings say so; one that goes later leaves in force what was.
    pub fn start(
        path: &Path,
        surroundings: &Surroundings,
        on_result: impl Fn(ReloadResult) + Send + 'static,
    ) -> Result<Self, Problems> {
        Self::start_with(path, surroundings, Box::new(on_result), true)
    }

    fn start_with(
        path: &Path,
        surroundings: &Surroundings,
        on_result: OnResult,
        with_events: bool,
    ) -> Result<Self, Problems> {
        let (version, loaded) = load::read_at_start(path, surroundings);
        let Loaded { config, warnings, .. } = loaded?;
        log_warnings(&warnings);
        let now = SystemTime::now();
        let shared = Arc::new(Shared {
            policy: Arc::new(ArcSwap::from_pointee(config)),
            status: Mutex::new(ReloadStatus {
                last: None,
                at: now,
                applied_at: now,
                error: None,
                needs_restart: Vec::new(),
            }),
            signal: Signal::default(),
        });
        // The file may change before the first watch is set.
        shared.signal.set(|pending| pending.changed = true);
        let follower = Follower {
            path: path.to_owned(),
            surroundings: surroundings.clone(),
            directories: Directories::new(with_events.then(|| shared.clone())),
            shared: shared.clone(),
            seen: version,
            on_result,
        };
        let spawned = thread::Builder::new().name("policy-watch".into()).spawn(move || follower.run());
        if let Err(error) = spawned {
            error!(%error, "no thread to watch the policy: changes are not followed");
        }
        Ok(Self { shared })
    }

    /// The policy in force; each request takes one snapshot.
    pub fn policy(&self) -> &Arc<ArcSwap<Config>> {
        &self.shared.policy
    }

    /// How reloading has gone.
    pub fn status(&self) -> ReloadStatus {
        self.shared.status.lock().clone()
    }

    /// Looks at the file at once, as on SIGHUP. Returns before that has happened.
    pub fn reload(&self) {
        self.shared.signal.set(|pending| pending.asked = true);
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.signal.set(|pending| pending.stopped = true);
    }
}

type OnResult = Box<dyn Fn(ReloadResult) + Send>;

/// What waits for the thread. Flags, not a queue: however much happens while it reads, one more look
/// afterwards is enough, and that one is never lost.
#[derive(Debug, Default)]
struct Signal {
    pending: Mutex<Pending>,
    woken: Condvar,
}

#[derive(Debug, Default, Clone, Copy)]
struct Pending {
    changed: bool,
    asked: bool,
    stopped: bool,
}

impl Pending {
    fn merge(&mut self, later: Self) {
        self.changed |= later.changed;
        self.asked |= later.asked;
        self.stopped |= later.stopped;
    }
}

impl Signal {
    fn set(&self, change: impl FnOnce(&mut Pending)) {
        change(&mut self.pending.lock());
        self.woken.notify_one();
    }

    /// Waits until something is pending or `timeout` has passed, and takes it.
    fn wait(&self, timeout: Duration) -> Pending {
        let mut pending = self.pending.lock();
        self.woken.wait_while_for(&mut pending, |p| !p.changed && !p.asked && !p.stopped, timeout);
        let taken = *pending;
        (pending.changed, pending.asked) = (false, false);
        taken
    }
}

/// The watching thread.
struct Follower {
    path: PathBuf,
    surroundings: Surroundings,
    shared: Arc<Shared>,
    directories: Directories,
    /// The version that was looked at last, in force or not.
    seen: Version,
    on_result: OnResult,
}

impl Follower {
    fn run(mut self) {
        loop {
            // Watches first, content after: what changes in between is an event, not a gap.
            self.directories.follow(std::iter::once(&self.path).chain(&self.seen.files));
            let mut pending = self.shared.signal.wait(POLL);
            if pending.changed {
                pending.merge(self.settle());
            } else if !pending.asked && self.is_new() {
                // No event told of it, so it may still be under way.
                pending.merge(self.settle());
                pending.changed = true;
            }
            match pending {
                Pending { stopped: true, .. } => return,
                Pending { asked: true, .. } => self.reload(),
                Pending { changed: true, .. } if self.is_new() => self.look(),
                _ => {}
            }
        }
    }

    fn is_new(&self) -> bool {
        load::glance(&self.path, &self.seen.files) != self.seen.fingerprint
    }

    /// Waits for the end of a burst: half a file may be a policy too. Ends early for whatever else is
    /// asked, which it returns.
    fn settle(&self) -> Pending {
        let end = Instant::now() + LONGEST_BURST;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let pending = self.shared.signal.wait(QUIET.min(left));
            if !pending.changed || pending.asked || pending.stopped || left.is_zero() {
                return pending;
            }
        }
    }

    fn look(&mut self) {
        let (version, loaded) = load::read(&self.path, &self.surroundings);
        // The burst may have led back to what was there before.
        if version != self.seen {
            self.seen = version;
            self.take(loaded);
            // It may name files that are not watched yet: one more look once they are.
            self.shared.signal.set(|pending| pending.changed = true);
        }
    }

    fn reload(&mut self) {
        let is_refused = self.shared.status.lock().error.is_some();
        let (version, loaded) = load::read(&self.path, &self.surroundings);
        if version != self.seen || is_refused {
            self.seen = version;
            self.take(loaded);
        } else {
            info!("policy unchanged");
            self.tell(ReloadResult::Unchanged, |_| {});
        }
    }

    fn take(&self, loaded: Result<Loaded, Problems>) {
        match loaded {
            Ok(Loaded { config, warnings, .. }) => {
                log_warnings(&warnings);
                let needs_restart = self.publish(config);
                self.tell(ReloadResult::Applied, |status| {
                    status.applied_at = status.at;
                    status.error = None;
                    status.needs_restart = needs_restart;
                });
            }
            Err(problems) => {
                let summary = problems.summary();
                error!(problems = %summary, "policy refused; the one before stays in force");
                self.tell(ReloadResult::Rejected, |status| status.error = Some(summary.into()));
            }
        }
    }

    /// Puts the policy in force, but for what is read at start only.
    fn publish(&self, mut config: Config) -> Vec<&'static str> {
        let current = self.shared.policy.load();
        let mut needs_restart = Vec::new();
        if config.listen != current.listen {
            needs_restart.push("listen");
            config.listen = current.listen.clone();
        }
        if config.tls.ca_dir != current.tls.ca_dir {
            needs_restart.push("tls.ca_dir");
            config.tls.ca_dir = current.tls.ca_dir.clone();
        }
        if config.tls.own_ca != current.tls.own_ca {
            needs_restart.push("tls.ca_cert");
            config.tls.own_ca = current.tls.own_ca.clone();
        }
        if config.threads != current.threads {
            needs_restart.push("threads");
            config.threads = current.threads;
        }
        for key in &needs_restart {
            warn!(key, "changed in the policy, but takes effect at the next start only");
        }
        info!(hash = config.hash, "policy applied");
        self.shared.policy.store(Arc::new(config));
        needs_restart
    }

    fn tell(&self, result: ReloadResult, change: impl FnOnce(&mut ReloadStatus)) {
        {
            let mut status = self.shared.status.lock();
            status.last = Some(result);
            status.at = SystemTime::now();
            change(&mut status);
        }
        (self.on_result)(result);
    }
}

fn log_warnings(warnings: &Problems) {
    for warning in warnings.iter() {
        warn!(%warning, "policy");
    }
}

/// The directories whose events wake the thread.
struct Directories {
    /// `None` where there are no events: polling alone has to do.
    watcher: Option<RecommendedWatcher>,
    /// With device and inode, since a directory that was replaced keeps its name and loses its watch.
    watched: HashMap<PathBuf, (u64, u64)>,
}

impl Directories {
    fn new(shared: Option<Arc<Shared>>) -> Self {
        let watcher = shared.and_then(|shared| {
            let on_event = move |event: notify::Result<notify::Event>| {
                if event.is_ok_and(|event| is_change(event.kind)) {
                    shared.signal.set(|pending| pending.changed = true);
                }
            };
            notify::recommended_watcher(on_event)
                .inspect_err(|error| warn!(%error, "no file events: the policy is looked at every second"))
                .ok()
        });
        Self { watcher, watched: HashMap::new() }
    }

    /// Watches where `files` are: the directory of each name, and of what its links lead to.
    fn follow<'a>(&mut self, files: impl Iterator<Item = &'a PathBuf>) {
        let Some(watcher) = &mut self.watcher else { return };
        let mut wanted = HashMap::new();
        for file in files {
            for name in [Some(file.clone()), file.canonicalize().ok()].into_iter().flatten() {
                let dir = match name.parent() {
                    Some(dir) if !dir.as_os_str().is_empty() => dir,
                    _ => Path::new("."),
                };
                if let Ok(metadata) = dir.metadata() {
                    wanted.insert(dir.to_owned(), (metadata.dev(), metadata.ino()));
                }
            }
        }
        self.watched.retain(|dir, inode| {
            let stays = wanted.get(dir) == Some(inode);
            if !stays {
                // Fails where the directory is gone, and the watch with it.
                let _ = watcher.unwatch(dir);
            }
            stays
        });
        for (dir, inode) in wanted {
            if !self.watched.contains_key(&dir) && watcher.watch(&dir, RecursiveMode::NonRecursive).is_ok() {
                self.watched.insert(dir, inode);
            }
        }
    }
}

/// Reading is no change; without this each look would be the reason for the next.
fn is_change(kind: EventKind) -> bool {
    match kind {
        EventKind::Access(AccessKind::Close(AccessMode::Write)) => true,
        EventKind::Access(_) => false,
        EventKind::Any
        | EventKind::Create(_)
        | EventKind::Modify(_)
        | EventKind::Remove(_)
        | EventKind::Other => true,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};

    use tempfile::TempDir;

    use super::*;

    /// A policy in a directory of its own, and the results of its watch.
    struct Rig {
        dir: TempDir,
        watch: Watch,
        results: Receiver<ReloadResult>,
    }

    const PATIENCE: Duration = Duration::from_secs(20);

    fn policy(max_concurrent: usize) -> String {
        format!("defaults: {{ bulkhead: {{ max_concurrent: {max_concurrent} }} }}\n")
    }

    impl Rig {
        fn new() -> Self {
            Self::laid(|dir| fs::write(dir.join("policy.yaml"), policy(1)).unwrap(), true)
        }

        fn laid(lay: impl FnOnce(&Path), with_events: bool) -> Self {
            let dir = TempDir::new().unwrap();
            lay(dir.path());
            let (sender, results) = channel();
            let on_result = Box::new(move |result| {
                let _ = sender.send(result);
            });
            let watch = Watch::start_with(
                &dir.path().join("policy.yaml"),
                &Surroundings::default(),
                on_result,
                with_events,
            )
            .unwrap();
            Self { dir, watch, results }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.dir.path().join(name)
        }

        /// Replaces a file in one step, so that no look can see half of it.
        fn replace(&self, name: &str, text: &str) {
            let aside = TempDir::new_in(self.dir.path()).unwrap();
            fs::write(aside.path().join("new"), text).unwrap();
            fs::rename(aside.path().join("new"), self.path(name)).unwrap();
        }

        fn max_concurrent(&self) -> usize {
            self.watch.policy().load().defaults.stages.bulkhead.unwrap().max_concurrent
        }

        /// The next result and the value that is in force then.
        fn next(&self) -> (ReloadResult, usize) {
            let result = self.results.recv_timeout(PATIENCE).expect("a result within the time allowed");
            (result, self.max_concurrent())
        }

        /// The value that is in force once a version has been applied; others may be refused before, as
        /// happens when a look falls between truncating and writing.
        fn next_applied(&self) -> usize {
            loop {
                if let (Applied, value) = self.next() {
                    return value;
                }
            }
        }

        /// Asks for a reload and expects that nothing has happened before.
        fn expect_nothing_new(&self) {
            self.watch.reload();
            assert_eq!(self.next().0, ReloadResult::Unchanged);
        }
    }

    use ReloadResult::{Applied, Rejected};

    #[test]
    fn a_write_in_place_takes_effect() {
        let rig = Rig::new();
        fs::write(rig.path("policy.yaml"), policy(2)).unwrap();
        assert_eq!(rig.next_applied(), 2);
    }

    #[test]
    fn a_rename_over_the_file_takes_effect() {
        let rig = Rig::new();
        for n in [2, 3] {
            rig.replace("policy.yaml", &policy(n));
            assert_eq!(rig.next(), (Applied, n));
        }
    }

    #[test]
    fn a_file_that_vanishes_is_refused_once_and_found_when_it_is_back() {
        let rig = Rig::new();
        fs::remove_file(rig.path("policy.yaml")).unwrap();
        assert_eq!(rig.next(), (Rejected, 1));
        assert!(rig.watch.status().error.unwrap().contains("cannot read"));
        rig.replace("policy.yaml", &policy(2));
        assert_eq!(rig.next(), (Applied, 2));
        assert_eq!(rig.watch.status().error, None);
    }

    #[test]
    fn every_swap_of_a_configmap_is_seen() {
        let publish = |dir: &Path, n: usize| {
            let data = format!("..data_{n}");
            fs::create_dir(dir.join(&data)).unwrap();
            fs::write(dir.join(&data).join("policy.yaml"), policy(n)).unwrap();
            symlink(&data, dir.join("..data_tmp")).unwrap();
            fs::rename(dir.join("..data_tmp"), dir.join("..data")).unwrap();
            let _ = fs::remove_dir_all(dir.join(format!("..data_{}", n - 1)));
        };
        let rig = Rig::laid(
            |dir| {
                publish(dir, 1);
                symlink("..data/policy.yaml", dir.join("policy.yaml")).unwrap();
            },
            true,
        );
        for n in 2..=4 {
            publish(rig.dir.path(), n);
            assert_eq!(rig.next(), (Applied, n));
        }
    }

    #[test]
    fn a_directory_that_is_replaced_is_followed() {
        let outer = TempDir::new().unwrap();
        let inner = outer.path().join("inner");
        fs::create_dir(&inner).unwrap();
        fs::write(inner.join("policy.yaml"), policy(1)).unwrap();
        let (sender, results) = channel();
        let watch = Watch::start(&inner.join("policy.yaml"), &Surroundings::default(), move |result| {
            let _ = sender.send(result);
        })
        .unwrap();
        fs::remove_dir_all(&inner).unwrap();
        assert_eq!(results.recv_timeout(PATIENCE), Ok(Rejected));
        fs::create_dir(&inner).unwrap();
        for n in [2, 3] {
            fs::write(outer.path().join("new"), policy(n)).unwrap();
            fs::rename(outer.path().join("new"), inner.join("policy.yaml")).unwrap();
            assert_eq!(results.recv_timeout(PATIENCE), Ok(Applied));
            assert_eq!(watch.policy().load().defaults.stages.bulkhead.unwrap().max_concurrent, n);
        }
    }

    // C110: an empty file was once taken for an empty policy, so that defaults held for a moment.
    #[test]
    fn a_file_that_is_truncated_and_written_in_halves_never_shows_defaults() {
        let rig = Rig::new();
        let text = policy(2);
        let (first, second) = text.split_at(text.len() / 2);
        fs::write(rig.path("policy.yaml"), "").unwrap();
        assert_eq!(rig.next(), (Rejected, 1));
        fs::write(rig.path("policy.yaml"), first).unwrap();
        assert_eq!(rig.next(), (Rejected, 1));
        fs::write(rig.path("policy.yaml"), [first, second].concat()).unwrap();
        assert_eq!(rig.next_applied(), 2);
    }

    // C112: after a bad version the good one seemed to be nothing new.
    #[test]
    fn going_back_to_the_version_before_a_bad_one_is_healthy_again() {
        let rig = Rig::new();
        rig.replace("policy.yaml", "defaults: { hedge: 5 }");
        assert_eq!(rig.next(), (Rejected, 1));
        let error = rig.watch.status().error.unwrap();
        assert!(error.contains("policy.yaml:1:20: defaults.hedge: expected a mapping"), "{error}");
        rig.replace("policy.yaml", &policy(1));
        assert_eq!(rig.next(), (Applied, 1));
        let status = rig.watch.status();
        assert_eq!((status.error, status.last), (None, Some(Applied)));
    }

    // C113: a debounce that starts anew with each event never ends.
    #[test]
    fn a_burst_takes_effect_before_it_ends() {
        let rig = Rig::new();
        let started = Instant::now();
        let mut n = 1;
        let mut seen = 0;
        while started.elapsed() < Duration::from_secs(2) {
            n += 1;
            rig.replace("policy.yaml", &policy(n));
            match rig.results.recv_timeout(Duration::from_millis(50)) {
                Ok(result) => {
                    assert_eq!(result, Applied);
                    seen += 1;
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => panic!("the watch has ended"),
            }
        }
        assert!(seen >= 1, "nothing took effect during the burst");
        while rig.max_concurrent() != n {
            assert_eq!(rig.next().0, Applied);
        }
    }

    #[test]
    fn a_neighbour_is_no_reason_to_reload() {
        let rig = Rig::new();
        fs::write(rig.path("neighbour"), "x").unwrap();
        rig.replace("policy.yaml", &policy(1));
        rig.expect_nothing_new();
    }

    #[test]
    fn a_named_file_that_changes_is_a_change_of_the_policy() {
        let text = |n| {
            let set = "{ set: { x-key: '${file:key}' } }";
            format!(
                "{}upstreams: {{ a: {{ hosts: [a.example], rewrite: {{ headers: {set} }} }} }}\n",
                policy(n)
            )
        };
        let rig = Rig::laid(
            |dir| {
                fs::write(dir.join("key"), "one\n").unwrap();
                fs::write(dir.join("policy.yaml"), text(1)).unwrap();
            },
            true,
        );
        let key = || {
            let policy = rig.watch.policy().load_full();
            policy.upstreams[0].rewrite.as_ref().unwrap().set[0].1.to_str().unwrap().to_owned()
        };
        assert_eq!(key(), "one");
        let hash = rig.watch.policy().load().hash.clone();
        rig.replace("key", "two\n");
        assert_eq!(rig.next().0, Applied);
        assert_eq!(key(), "two");
        assert_eq!(rig.watch.policy().load().hash, hash, "the hash gave the secret away");
    }

    #[test]
    fn changes_are_found_without_any_event() {
        let rig = Rig::laid(|dir| fs::write(dir.join("policy.yaml"), policy(1)).unwrap(), false);
        rig.replace("policy.yaml", &policy(2));
        assert_eq!(rig.next(), (Applied, 2));
    }

    #[test]
    fn ports_and_threads_wait_for_a_restart() {
        let rig = Rig::new();
        let before = rig.watch.policy().load_full();
        let text = format!("threads: 77\nlisten: {{ proxy: 127.0.0.1:1 }}\n{}", policy(2));
        rig.replace("policy.yaml", &text);
        assert_eq!(rig.next(), (Applied, 2));
        let now = rig.watch.policy().load_full();
        assert_eq!((now.threads, &now.listen), (before.threads, &before.listen));
        assert_eq!(rig.watch.status().needs_restart, ["listen", "threads"]);
    }

    #[test]
    fn another_ca_of_interception_waits_for_a_restart() {
        let rig = Rig::new();
        let key = rcgen::KeyPair::generate().unwrap();
        let mut params = rcgen::CertificateParams::new(Vec::<String>::new()).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        fs::write(rig.path("ca.pem"), params.self_signed(&key).unwrap().pem()).unwrap();
        fs::write(rig.path("key.pem"), key.serialize_pem()).unwrap();
        let tls = "tls: { ca_dir: ca, ca_cert: ca.pem, ca_key: key.pem, ca_file: ca.pem }";
        rig.replace("policy.yaml", &format!("{tls}\n{}", policy(2)));
        assert_eq!(rig.next(), (Applied, 2));
        assert_eq!(rig.watch.status().needs_restart, ["tls.ca_dir", "tls.ca_cert"]);
        let now = rig.watch.policy().load_full();
        assert_eq!((&now.tls.ca_dir, &now.tls.own_ca), (&None, &None));
        assert!(now.tls.ca_pem.is_some(), "roots need no restart");
    }

    #[test]
    fn a_reload_on_a_bad_file_is_refused_each_time() {
        let rig = Rig::new();
        rig.replace("policy.yaml", "[]");
        assert_eq!(rig.next(), (Rejected, 1));
        rig.watch.reload();
        assert_eq!(rig.next(), (Rejected, 1));
    }

    #[test]
    fn dropping_the_watch_ends_its_thread() {
        let rig = Rig::new();
        drop(rig.watch);
        assert_eq!(rig.results.recv_timeout(PATIENCE), Err(RecvTimeoutError::Disconnected));
    }
}
