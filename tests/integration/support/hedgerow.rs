//! Starts hedgerow as a user does: the binary, a policy file, free ports.
//!
//! A process for each test. It costs some milliseconds and buys isolation that one process cannot give:
//! environment, signals, exit code, standard output, and metrics that are counted for the process.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::watch;

use super::client::{Agent, Response, absolute};
use super::port::{STARTS, Taken};
use super::{netns, soon};

/// Where a running hedgerow listens, and what can be asked there. The same for every way to start one.
#[derive(Debug, Clone, Copy)]
pub struct Ports {
    /// `listen.proxy`.
    pub proxy: SocketAddr,
    /// `listen.admin`.
    pub admin: SocketAddr,
    /// `listen.transparent`, bound only when the launch asked for it.
    pub transparent: SocketAddr,
}

/// Ports of one hedgerow. They can be had again once it has ended.
struct Given {
    ports: Ports,
    _taken: Taken,
}

impl Given {
    /// Free when asked. Three listeners at once, so that the three differ.
    fn find() -> Self {
        loop {
            let listeners =
                [(); 3].map(|()| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("loopback can be bound"));
            let found = listeners.map(|l| l.local_addr().expect("a bound listener has an address"));
            if let Some(taken) = Taken::all(found.map(|address| address.port())) {
                let [proxy, admin, transparent] = found;
                return Self { ports: Ports { proxy, admin, transparent }, _taken: taken };
            }
        }
    }
}

impl Ports {
    /// An agent's connection to the proxy port.
    pub async fn agent(&self) -> Agent {
        Agent::connect(self.proxy).await
    }

    /// GET of an absolute URL through the proxy, on a connection of its own.
    pub async fn get(&self, url: &str) -> Response {
        self.agent().await.get(url).await
    }

    /// Sends a request on a connection of its own. Its answer is read when the test wants to, or never.
    pub async fn ask(&self, method: &str, url: &str, headers: &[(&str, &str)], body: &[u8]) -> Agent {
        let mut agent = self.agent().await;
        agent.send(absolute(method, url, headers, body)).await;
        agent
    }

    /// Waits until so many calls are under way. In a process with one thread (`threads: 1`) they have then come
    /// as far as they get without an upstream's word: between two of its answers everything has its turn.
    #[track_caller]
    pub fn until_in_flight(&self, count: usize) -> impl Future<Output = ()> {
        let ports = *self;
        let counted = self.until_status(move |status| status["in_flight"] == count);
        async move {
            counted.await;
            ports.status().await;
        }
    }

    /// A request to the admin port.
    pub async fn ask_admin(&self, method: &str, path: &str) -> Response {
        let mut agent = Agent::connect(self.admin).await;
        let host = self.admin;
        agent.send(format!("{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")).await;
        agent.read_response_to(method).await
    }

    /// `/status`.
    pub async fn status(&self) -> serde_json::Value {
        self.ask_admin("GET", "/status").await.json()
    }

    /// `/metrics`.
    pub async fn metrics(&self) -> Metrics {
        Metrics::parse(self.ask_admin("GET", "/metrics").await.text())
    }

    /// Asks for the metrics until they are as wanted. They have no event to wait on.
    #[track_caller]
    pub fn until_metrics(&self, wanted: impl Fn(&Metrics) -> bool) -> impl Future<Output = Metrics> {
        let ports = *self;
        soon(async move { again_until(async || Some(ports.metrics().await).filter(&wanted)).await })
    }

    /// Asks for `/status` until it is as wanted.
    #[track_caller]
    pub fn until_status(
        &self,
        wanted: impl Fn(&serde_json::Value) -> bool,
    ) -> impl Future<Output = serde_json::Value> {
        let ports = *self;
        soon(async move { again_until(async || Some(ports.status().await).filter(&wanted)).await })
    }
}

/// Polls something that lives in another process and can only be asked.
pub(super) async fn again_until<T>(mut ask: impl AsyncFnMut() -> Option<T>) -> T {
    loop {
        if let Some(answer) = ask().await {
            return answer;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// The text of `/metrics`, taken apart.
#[derive(Debug, Clone)]
pub struct Metrics {
    series: Vec<Series>,
}

#[derive(Debug, Clone)]
struct Series {
    name: String,
    labels: Vec<(String, String)>,
    value: f64,
}

impl Metrics {
    fn parse(text: &str) -> Self {
        let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
        Self { series: lines.map(Series::parse).collect() }
    }

    /// The sum over the series of this name that have these labels; 0 without any, as Prometheus' `sum` of
    /// counters that did not count yet.
    pub fn value(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let has = |series: &Series, (key, value): &(&str, &str)| {
            series.labels.iter().any(|(k, v)| k == key && v == value)
        };
        let matching = self.series.iter().filter(|series| series.name == name);
        matching
            .filter(|series| labels.iter().all(|label| has(series, label)))
            .map(|series| series.value)
            .sum()
    }

    /// Whether there is any series of this name.
    pub fn has(&self, name: &str) -> bool {
        self.series.iter().any(|series| series.name == name)
    }

    /// The values of this label over all series of this name, sorted, each once.
    pub fn label_values(&self, name: &str, label: &str) -> Vec<String> {
        let named = self.series.iter().filter(|series| series.name == name);
        let values = named.flat_map(|series| series.labels.iter().filter(|(key, _)| key == label));
        let mut values: Vec<_> = values.map(|(_, value)| value.clone()).collect();
        values.sort();
        values.dedup();
        values
    }
}

impl Series {
    fn parse(line: &str) -> Self {
        let (series, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("metrics line {line:?}"));
        let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
        let labels = labels.strip_suffix('}').unwrap_or_else(|| panic!("metrics line {line:?}"));
        Self {
            name: name.to_owned(),
            labels: labels.split_terminator("\",").map(|label| label_of(label, line)).collect(),
            value: value.parse().unwrap_or_else(|_| panic!("metrics line {line:?}")),
        }
    }
}

/// `key="value` with or without its last quote. Our label values hold no quotes and no commas.
fn label_of(text: &str, line: &str) -> (String, String) {
    let (key, value) = text.split_once("=\"").unwrap_or_else(|| panic!("metrics line {line:?}"));
    (key.to_owned(), value.trim_end_matches('"').to_owned())
}

/// How the policy file lies in its folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// A file.
    Plain,
    /// There is none yet.
    Absent,
    /// As the kubelet mounts a ConfigMap: the file is a link into `..data`, a link to a folder of one version.
    ConfigMap,
}

/// What to start; made by [`HedgerowProcess::with`].
pub struct Launch {
    policy: String,
    layout: Layout,
    transparent: Option<IpAddr>,
    user: Option<u32>,
    clients: Vec<String>,
    environment: Vec<(String, String)>,
    arguments: Vec<String>,
    is_sidecar: bool,
}

/// What a policy says of ports that its pod has settled otherwise.
const CONTRARY: &str = "proxy: 127.0.0.1:1, admin: 127.0.0.1:2, transparent: 127.0.0.1:3";

impl Launch {
    /// Has the ports from arguments, as a pod's sidecar has them, while the policy names others.
    pub fn sidecar(self) -> Self {
        Self { is_sidecar: true, ..self }
    }

    /// Mounts the policy as a ConfigMap.
    pub fn layout(self, layout: Layout) -> Self {
        Self { layout, ..self }
    }

    /// Opens the transparent port too.
    pub fn transparent(self) -> Self {
        self.transparent_on(Ipv4Addr::LOCALHOST)
    }

    /// The same on another address than 127.0.0.1.
    pub fn transparent_on(self, ip: impl Into<IpAddr>) -> Self {
        Self { transparent: Some(ip.into()), ..self }
    }

    /// Puts these ranges into `listen.clients`, which a port needs that is not on loopback.
    pub fn clients(self, ranges: &[&str]) -> Self {
        Self { clients: ranges.iter().map(|&range| range.to_owned()).collect(), ..self }
    }

    /// Runs as this user, where there are several.
    pub fn user(self, user: u32) -> Self {
        Self { user: Some(user), ..self }
    }

    /// Sets a variable of the process's environment.
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// One more argument after `run --config FILE`.
    pub fn argument(mut self, argument: &str) -> Self {
        self.arguments.push(argument.to_owned());
        self
    }

    /// Starts it and waits until it is ready. Panics with its standard error when it refuses.
    pub async fn start(self) -> HedgerowProcess {
        for _ in 0..STARTS {
            let mut process = self.spawn();
            if soon(process.ready()).await {
                return process;
            }
            process.wait().await;
            assert!(process.stderr.text().contains("in use"), "hedgerow ended:\n{}", process.stderr.text());
        }
        panic!("no free ports in {STARTS} tries");
    }

    /// Starts it and expects that it ends by itself: its exit code and standard error.
    pub async fn refused(self) -> (i32, String) {
        let mut process = self.spawn();
        let code = process.wait().await;
        (code, process.stderr.text())
    }

    fn spawn(&self) -> HedgerowProcess {
        let mut given = Given::find();
        if let Some(ip) = self.transparent {
            given.ports.transparent.set_ip(ip);
        }
        let ports = given.ports;
        let mut listen = format!("proxy: \"{}\", admin: \"{}\"", ports.proxy, ports.admin);
        if self.transparent.is_some() {
            listen += &format!(", transparent: \"{}\"", ports.transparent);
        }
        if !self.clients.is_empty() {
            listen += &format!(", clients: {:?}", self.clients);
        }
        let mut settled = Vec::new();
        if self.is_sidecar {
            CONTRARY.clone_into(&mut listen);
            settled.push("--config-optional".to_owned());
            settled.push(format!("--proxy={}", ports.proxy));
            settled.push(format!("--admin={}", ports.admin));
            settled.push(format!("--transparent={}", ports.transparent));
        }
        let policy = PolicyFile::create(self.layout, &listen, &self.policy);
        let mut command = match self.user {
            Some(user) => {
                chown(policy.folder(), Some(user), Some(user)).expect("root may give a folder away");
                Command::from(as_user(user, env!("CARGO_BIN_EXE_hedgerow")))
            }
            None => Command::new(env!("CARGO_BIN_EXE_hedgerow")),
        };
        let mut child = command
            .arg("run")
            .arg("--config")
            .arg(policy.path())
            .args(settled)
            .args(&self.arguments)
            .env_clear()
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .current_dir(policy.folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("the binary under test can be started");
        let stdout = Lines::of(child.stdout.take().expect("stdout is piped"));
        let stderr = Lines::of(child.stderr.take().expect("stderr is piped"));
        HedgerowProcess { policy, stdout, stderr, child, given }
    }
}

/// A program as another user, who may read what root may: the binary under test can lie in root's home.
pub fn as_user(user: u32, program: &str) -> std::process::Command {
    let mut command = netns::command("setpriv");
    command.args([&format!("--reuid={user}"), &format!("--regid={user}"), "--clear-groups"]);
    command.args(["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search", program]);
    command
}

/// A hedgerow of its own process, killed when dropped.
pub struct HedgerowProcess {
    /// The policy file, to be rewritten.
    pub policy: PolicyFile,
    /// Standard output: the access log.
    pub stdout: Lines,
    /// Standard error: the log.
    pub stderr: Lines,
    child: Child,
    /// Given back when the process has been killed.
    given: Given,
}

impl std::ops::Deref for HedgerowProcess {
    type Target = Ports;

    fn deref(&self) -> &Ports {
        &self.given.ports
    }
}

impl HedgerowProcess {
    /// Running and ready, with this policy (without `listen`, which is put in front).
    pub async fn start(policy: &str) -> Self {
        Self::with(policy).start().await
    }

    /// A launch to be refined.
    pub fn with(policy: &str) -> Launch {
        let (environment, arguments) = (Vec::new(), Vec::new());
        Launch {
            policy: policy.to_owned(),
            layout: Layout::Plain,
            transparent: None,
            user: None,
            clients: Vec::new(),
            environment,
            arguments,
            is_sidecar: false,
        }
    }

    /// Waits for `/readyz`; false when the process ended before.
    async fn ready(&mut self) -> bool {
        let admin = self.admin;
        tokio::select! {
            _ = self.child.wait() => false,
            () = again_until(async || readiness(admin).await.filter(|status| *status == 200).map(drop)) => true,
        }
    }

    /// The process's id.
    pub fn pid(&self) -> Pid {
        let id = self.child.id().expect("the process was not waited for yet");
        Pid::from_raw(id.try_into().expect("an id is positive")).expect("an id is not zero")
    }

    /// A file of `/proc` about the process.
    fn proc(&self, name: &str) -> PathBuf {
        Path::new("/proc").join(self.pid().as_raw_nonzero().to_string()).join(name)
    }

    /// Memory that the process has in use.
    pub fn resident_kib(&self) -> usize {
        let status = fs::read_to_string(self.proc("status")).expect("a running process has a status");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("VmRSS");
        line.trim().trim_end_matches(" kB").parse().expect("a number of kB")
    }

    /// Files and sockets that the process has open.
    pub fn open_files(&self) -> usize {
        fs::read_dir(self.proc("fd")).expect("our own child's files can be listed").count()
    }

    /// Processor time that the process has used, in hundredths of a second.
    pub fn processor_ticks(&self) -> u64 {
        let stat = fs::read_to_string(self.proc("stat")).expect("a running process has a stat");
        // User and system time are fields 14 and 15; the second, the command's name, may hold blanks.
        let (_, fields) = stat.rsplit_once(')').expect("the name is in parentheses");
        fields.split_whitespace().skip(11).take(2).map(|ticks| ticks.parse::<u64>().expect("ticks")).sum()
    }

    /// Sends a signal: `Signal::TERM`, `Signal::HUP`, `Signal::INT`.
    pub fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).expect("our own child takes signals");
    }

    /// Waits for its end: the exit code. Panics when a signal ended it. What it printed is complete then.
    pub async fn wait(&mut self) -> i32 {
        let status = soon(self.child.wait()).await.expect("a child can be waited for");
        soon(self.stdout.ended()).await;
        soon(self.stderr.ended()).await;
        status.code().unwrap_or_else(|| panic!("ended by {status}:\n{}", self.stderr.text()))
    }

    /// The first access-log line, already there or to come, that is as wanted.
    #[track_caller]
    pub fn access_log(
        &self,
        wanted: impl Fn(&serde_json::Value) -> bool,
    ) -> impl Future<Output = serde_json::Value> {
        let parse =
            |line: &str| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error} in {line:?}"));
        let line = self.stdout.until(move |line| wanted(&parse(line)));
        async move { parse(&line.await) }
    }
}

/// What `/readyz` says; `None` while nobody listens.
async fn readiness(admin: SocketAddr) -> Option<u16> {
    let mut agent = Agent::try_connect(admin).await.ok()?;
    agent.send("GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").await;
    agent.try_response("GET").await.ok().map(|answer| answer.status)
}

/// What a process prints, line by line, as it comes.
#[derive(Clone)]
pub struct Lines {
    lines: Arc<watch::Sender<Vec<String>>>,
    open: watch::Receiver<bool>,
}

impl Lines {
    /// Of a process's pipe.
    pub fn of(pipe: impl AsyncRead + Unpin + Send + 'static) -> Self {
        let lines = Arc::new(watch::Sender::new(Vec::new()));
        let (closing, open) = watch::channel(true);
        let collected = Arc::clone(&lines);
        tokio::spawn(async move {
            let mut read = BufReader::new(pipe).lines();
            while let Ok(Some(line)) = read.next_line().await {
                collected.send_modify(|lines: &mut Vec<String>| lines.push(line));
            }
            closing.send_replace(false);
        });
        Self { lines, open }
    }

    /// Everything so far.
    pub fn all(&self) -> Vec<String> {
        self.lines.borrow().clone()
    }

    /// Everything so far, joined.
    pub fn text(&self) -> String {
        self.all().join("\n")
    }

    /// The first line, already there or to come, that is as wanted.
    #[track_caller]
    pub fn until(&self, wanted: impl Fn(&str) -> bool) -> impl Future<Output = String> {
        let mut lines = self.lines.subscribe();
        soon(async move {
            let found = lines.wait_for(|lines| lines.iter().any(|line| wanted(line))).await;
            let lines = found.expect("the lines outlive the wait");
            lines.iter().find(|line| wanted(line)).expect("one was just found").clone()
        })
    }

    async fn ended(&mut self) {
        // An error means that the reader is gone, which is an end too.
        let _ = self.open.wait_for(|open| !open).await;
    }
}

/// The policy file of a running hedgerow, and the ways in which it is changed in the wild.
pub struct PolicyFile {
    folder: TempDir,
    layout: Layout,
    listen: String,
    version: usize,
}

impl PolicyFile {
    fn create(layout: Layout, listen: &str, policy: &str) -> Self {
        let listen = format!("listen: {{ {listen} }}\n");
        let folder = TempDir::new().expect("a temporary folder");
        let mut file = Self { folder, layout, listen, version: 0 };
        match layout {
            Layout::Plain => file.write_in_place(policy),
            Layout::Absent => {}
            Layout::ConfigMap => {
                file.swap_config_map(policy);
                std::os::unix::fs::symlink("..data/policy.yaml", file.path()).expect("a link can be made");
            }
        }
        file
    }

    /// What `--config` names.
    pub fn path(&self) -> PathBuf {
        self.folder.path().join("policy.yaml")
    }

    /// A folder of this hedgerow alone, for `tls.ca_dir` and the like; it is the process's working directory.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Opens the same file and writes it, as `cat >` does: there is a moment when it is empty.
    pub fn write_in_place(&mut self, policy: &str) {
        fs::write(self.path(), self.text(policy)).expect("the policy can be written");
    }

    /// Writes another file and renames it over this one, as editors do.
    pub fn replace(&mut self, policy: &str) {
        let other = self.folder.path().join("policy.yaml.new");
        fs::write(&other, self.text(policy)).expect("a file can be written");
        fs::rename(other, self.path()).expect("a file can be renamed");
    }

    /// Lays down a new folder and swaps the link `..data` to it by rename, as the kubelet does. The file's own
    /// link does not change at all.
    pub fn swap_config_map(&mut self, policy: &str) {
        assert_eq!(self.layout, Layout::ConfigMap, "the policy was not mounted as a ConfigMap");
        let root = self.folder.path();
        let old = format!("..version-{}", self.version);
        self.version += 1;
        let new = format!("..version-{}", self.version);
        fs::create_dir(root.join(&new)).expect("a folder can be made");
        fs::write(root.join(&new).join("policy.yaml"), self.text(policy)).expect("a file can be written");
        std::os::unix::fs::symlink(&new, root.join("..data_tmp")).expect("a link can be made");
        fs::rename(root.join("..data_tmp"), root.join("..data")).expect("a link can be renamed");
        if root.join(&old).exists() {
            fs::remove_dir_all(root.join(&old)).expect("the old version can be removed");
        }
    }

    /// What stands in the file for this policy: `listen` in front.
    pub fn text(&self, policy: &str) -> String {
        // `{}` is a policy of its own and cannot stand behind `listen`.
        let policy = dedent(policy);
        let policy = if policy.trim() == "{}" { "" } else { &policy };
        format!("{}{policy}\n", self.listen)
    }
}

/// Takes the indentation of the first line from every line, so that policies can stand indented in a test.
fn dedent(text: &str) -> String {
    let text = text.trim_start_matches('\n');
    let indent = text.len() - text.trim_start_matches(' ').len();
    let shorten =
        |line: &str| line.get(indent.min(line.len() - line.trim_start().len())..).map(str::to_owned);
    text.lines().filter_map(shorten).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_summed_over_the_series_that_have_the_labels() {
        let metrics = Metrics::parse(
            "# TYPE calls counter\ncalls{upstream=\"a\",code=\"200\"} 3\ncalls{upstream=\"a\",code=\"503\"} 4\n\
             calls{upstream=\"b\",code=\"200\"} 8\nup 1\n",
        );
        assert_eq!(metrics.value("calls", &[("upstream", "a")]), 7.0);
        assert_eq!(metrics.value("calls", &[("upstream", "a"), ("code", "503")]), 4.0);
        assert_eq!(metrics.value("calls", &[]), 15.0);
        assert_eq!(metrics.value("up", &[]), 1.0);
        assert_eq!(metrics.label_values("calls", "upstream"), ["a", "b"]);
        assert!(!metrics.has("downs"));
    }

    #[test]
    fn an_indented_policy_moves_to_the_left_edge_and_keeps_its_shape() {
        assert_eq!(dedent("\n    a:\n      b: 1\n\n    c: 2\n"), "a:\n  b: 1\n\nc: 2");
    }

    #[test]
    fn a_config_map_swap_changes_what_the_path_reads_and_not_the_link_itself() {
        let mut file = PolicyFile::create(Layout::ConfigMap, "admin: \"127.0.0.1:0\"", "threads: 1");
        let link = fs::read_link(file.path()).unwrap();
        file.swap_config_map("threads: 2");
        assert!(fs::read_to_string(file.path()).unwrap().ends_with("threads: 2\n"));
        assert_eq!(fs::read_link(file.path()).unwrap(), link);
    }
}
