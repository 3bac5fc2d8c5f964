//! A real Redis for each test that needs one: what hedgerow must live with, a server of one's own making would only
//! do as far as its author knew.
//!
//! The test's own questions come over a Unix socket and as a user of their own, so that they are answered whatever the
//! server makes of its port, passwords and TLS, and count among no connections over TCP.

mod cluster;
mod resp;
mod sentinels;

use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use super::hedgerow::again_until;
use super::pki::Pki;
use super::port::{HeldPort, STARTS};
use super::soon;

pub use cluster::RedisCluster;
pub use resp::{Connection, Reply};
pub use sentinels::Sentinels;

/// A `redis-server`, killed when dropped. It keeps nothing on disk.
pub struct RedisServer {
    setup: Setup,
    port: HeldPort,
    folder: TempDir,
    /// `None` while it is killed.
    child: Option<Child>,
}

/// How a [`RedisServer`] shall be; made by [`RedisServer::with`].
#[derive(Default)]
pub struct Setup {
    settings: Vec<String>,
    /// What stands before the `@` of its URL.
    login: Option<String>,
    is_tls: bool,
    is_sentinel: bool,
    /// Where the other nodes of a cluster come.
    bus: Option<HeldPort>,
}

impl Setup {
    /// Wants this password. It must need no escape in a URL.
    pub fn password(mut self, password: &str) -> Self {
        self.login = Some(format!(":{password}"));
        // The second for where it is a replica of its like.
        self.setting(&format!("requirepass {password}")).setting(&format!("masterauth {password}"))
    }

    /// Lets in nobody but this user, who may what the rules say: `~hedgerow:* +@all`.
    pub fn user(mut self, name: &str, password: &str, rules: &str) -> Self {
        self.login = Some(format!("{name}:{password}"));
        self.setting("user default off").setting(&format!("user {name} on >{password} {rules}"))
    }

    /// Speaks TLS alone, with a certificate by this authority for 127.0.0.1 and localhost. The authority has the files.
    pub fn tls(self, pki: &Pki) -> Self {
        self.tls_called(pki, &["127.0.0.1", "localhost"])
    }

    /// The same, with a certificate for other names.
    pub fn tls_called(mut self, pki: &Pki, names: &[&str]) -> Self {
        self.is_tls = true;
        let (certificate, key) = pki.files(&format!("redis-{}", names.join("-")), &pki.leaf(names));
        self.setting(&format!("tls-cert-file {}", certificate.display()))
            .setting(&format!("tls-key-file {}", key.display()))
            .setting(&format!("tls-ca-cert-file {}", pki.ca_file().display()))
            .setting("tls-auth-clients no")
    }

    /// Refuses to write once it has so much: `2mb`. An empty server has about one already.
    pub fn max_memory(self, most: &str) -> Self {
        self.setting(&format!("maxmemory {most}")).setting("maxmemory-policy noeviction")
    }

    /// So many databases instead of 16.
    pub fn databases(self, count: usize) -> Self {
        self.setting(&format!("databases {count}"))
    }

    /// Follows another server from the start, and refuses to write.
    pub fn replica_of(self, master: &RedisServer) -> Self {
        self.setting(&format!("replicaof 127.0.0.1 {}", master.port()))
    }

    /// A node of a cluster that does not know the others yet.
    fn node(mut self) -> Self {
        let bus = HeldPort::find();
        let line = format!("cluster-port {}", bus.number());
        self.bus = Some(bus);
        self.setting("cluster-enabled yes").setting("cluster-node-timeout 1000").setting(&line)
    }

    fn sentinel(self) -> Self {
        Self { is_sentinel: true, ..self }
    }

    /// One more line of its configuration: `rename-command HELLO ""`.
    pub fn setting(mut self, line: &str) -> Self {
        self.settings.push(line.to_owned());
        self
    }

    /// Starts it and waits until it answers. Panics with its log when it does not.
    pub async fn start(self) -> RedisServer {
        let folder = TempDir::new().expect("a temporary folder");
        let mut server = RedisServer { setup: self, port: HeldPort::find(), folder, child: None };
        for _ in 0..STARTS {
            server.write_configuration();
            let Err(log) = server.try_start().await else { return server };
            // Somebody in another process has it, who had found it before it was held.
            assert!(log.contains("in use"), "redis-server ended:\n{log}");
            server.port = HeldPort::find();
        }
        panic!("no free port in {STARTS} tries");
    }
}

impl RedisServer {
    /// On a free port of 127.0.0.1, open to all.
    pub async fn start() -> Self {
        Self::with().start().await
    }

    /// A server to be refined.
    pub fn with() -> Setup {
        Setup::default()
    }

    /// Its port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port.number()
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.port.address()
    }

    /// Its URL, with what it takes to be let in.
    pub fn url(&self) -> String {
        self.url_by(self.address())
    }

    /// The same by way of something that stands before it.
    pub fn url_by(&self, way: SocketAddr) -> String {
        let scheme = if self.setup.is_tls { "rediss" } else { "redis" };
        let login = self.setup.login.as_ref().map(|login| format!("{login}@")).unwrap_or_default();
        format!("{scheme}://{login}{way}")
    }

    /// Stops it in the middle of whatever it does. The kernel goes on to take connections and bytes for it, and nobody
    /// answers.
    pub fn pause(&self) {
        self.signal(Signal::STOP);
    }

    /// Lets it go on, with all that has come meanwhile.
    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        let id = self.child.as_ref().expect("a server that runs").id();
        let id = Pid::from_raw(id.try_into().expect("an id is positive")).expect("an id is not zero");
        kill_process(id, signal).expect("our own child takes signals");
    }

    /// Ends it at once. Its port refuses connections until [`Self::restart`].
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            // It may have ended by itself.
            let _ = child.kill();
            child.wait().expect("a child can be waited for");
        }
    }

    /// Starts it anew on the same port, knowing nothing, and waits until it answers. One that still runs is killed.
    pub async fn restart(&mut self) {
        self.try_start().await.unwrap_or_else(|log| panic!("redis-server ended:\n{log}"));
    }

    /// The same; where it ends by itself, its log.
    async fn try_start(&mut self) -> Result<(), String> {
        self.kill();
        let mut command = Command::new("redis-server");
        command.arg(self.file("redis.conf"));
        if self.setup.is_sentinel {
            command.arg("--sentinel");
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let (socket, log) = (self.file("redis.sock"), self.file("redis.log"));
        let child = command.spawn().expect("redis-server can be started; `make tools` installs it");
        let child = self.child.insert(child);
        let answers = async || {
            if child.try_wait().expect("a child can be asked").is_some() {
                return Some(Err(fs::read_to_string(&log).unwrap_or_default()));
            }
            let pong = Connection::open(&socket).and_then(|mut own| own.try_command(&["PING"]));
            // Nobody but `rig` may be let in: who is refused was answered too.
            pong.ok().map(|_| Ok(()))
        };
        soon(again_until(answers)).await
    }

    /// A connection of its own, for what is kept with it: a database, a transaction.
    #[track_caller]
    pub fn connect(&self) -> Connection {
        let mut connection = Connection::open(&self.file("redis.sock")).expect("a server that runs");
        connection.command(&["AUTH", "rig", "any"]);
        connection
    }

    /// Asks it something. Panics where it refuses, or is mute.
    #[track_caller]
    pub fn command(&self, words: &[&str]) -> Reply {
        self.connect().command(words)
    }

    /// The same, where a refusal is an answer.
    #[track_caller]
    pub fn try_command(&self, words: &[&str]) -> Reply {
        self.connect().try_command(words).unwrap_or_else(|error| panic!("{words:?}: {error}"))
    }

    /// A line of `INFO`: `info("replication", "role")`.
    #[track_caller]
    pub fn info(&self, section: &str, key: &str) -> String {
        let text = self.command(&["INFO", section]).text();
        let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
        line.unwrap_or_else(|| panic!("no {key} in {text}")).to_owned()
    }

    /// How often this command was carried out since the start, in lower case: `evalsha`, `config|set`. What scripts do
    /// counts too.
    #[track_caller]
    pub fn calls(&self, command: &str) -> u64 {
        let text = self.command(&["INFO", "commandstats"]).text();
        let begin = format!("cmdstat_{command}:calls=");
        let line = text.lines().find_map(|line| line.strip_prefix(&begin));
        line.map_or(0, |line| {
            line.split(',').next().and_then(|calls| calls.parse().ok()).expect("a number of calls")
        })
    }

    /// Commands carried out since the start, over TCP and not. This question is two of them.
    #[track_caller]
    pub fn commands(&self) -> u64 {
        self.info("stats", "total_commands_processed").parse().expect("a number of commands")
    }

    /// The keys of database 0 that match, sorted.
    #[track_caller]
    pub fn keys(&self, pattern: &str) -> Vec<String> {
        let mut keys = self.command(&["KEYS", pattern]).texts();
        keys.sort();
        keys
    }

    /// Asks it again and again until it is as wanted.
    #[track_caller]
    pub fn until(&self, wanted: impl Fn(&Self) -> bool) -> impl Future<Output = ()> {
        soon(async move { again_until(async || wanted(self).then_some(())).await })
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write_configuration(&self) {
        let port = match self.setup.is_tls {
            true => format!("port 0\ntls-port {}", self.port()),
            false => format!("port {}", self.port()),
        };
        let folder = self.folder.path().display();
        // A replica is given all at once, not after the seconds in which others might ask too.
        let data = "save \"\"\nappendonly no\nrepl-diskless-sync-delay 0\n";
        let text = format!(
            "bind 127.0.0.1\n{port}\nunixsocket {folder}/redis.sock\ndir {folder}\nlogfile {folder}/redis.log\n\
             user rig on nopass ~* &* +@all\n{}{}\n",
            if self.setup.is_sentinel { "" } else { data },
            self.setup.settings.join("\n"),
        );
        fs::write(self.file("redis.conf"), text).expect("a temporary file");
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        self.kill();
    }
}
