//! A master, its replica, and three Sentinels that put the one in the place of the other.

use std::net::SocketAddr;

use super::super::hedgerow::again_until;
use super::super::soon;
use super::{RedisServer, Reply, Setup};

/// Servers and Sentinels, all of which know each other.
pub struct Sentinels {
    servers: [RedisServer; 2],
    /// Which of them the Sentinels call the master.
    master: usize,
    sentinels: Vec<RedisServer>,
}

impl Sentinels {
    /// What the Sentinels call the servers together.
    pub const SERVICE: &str = "tools";

    /// Open to all.
    pub async fn start() -> Self {
        Self::launch(RedisServer::with, RedisServer::with, "").await
    }

    /// The servers want one password, the Sentinels another.
    pub async fn start_with_passwords(servers: &str, sentinels: &str) -> Self {
        let login = format!(
            "sentinel auth-pass {} {servers}\nsentinel sentinel-pass {sentinels}\nrequirepass {sentinels}",
            Self::SERVICE
        );
        Self::launch(|| RedisServer::with().password(servers), RedisServer::with, &login).await
    }

    async fn launch(server: impl Fn() -> Setup, sentinel: impl Fn() -> Setup, settings: &str) -> Self {
        let first = server().start().await;
        let second = server().replica_of(&first).start().await;
        let service = Self::SERVICE;
        let mut sentinels = Vec::new();
        for _ in 0..3 {
            let sentinel = sentinel()
                .sentinel()
                .setting(&format!("sentinel monitor {service} 127.0.0.1 {} 2", first.port()))
                .setting(&format!("sentinel down-after-milliseconds {service} 500"))
                .setting(&format!("sentinel failover-timeout {service} 3000"))
                .setting(settings)
                .start()
                .await;
            // They look around every ten seconds and call out every two; a test has no such time.
            sentinel.command(&["SENTINEL", "DEBUG", "INFO-PERIOD", "200", "PUBLISH-PERIOD", "200"]);
            sentinels.push(sentinel);
        }
        let this = Self { servers: [first, second], master: 0, sentinels };
        this.until_complete().await;
        this
    }

    /// Where the Sentinels are.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.sentinels.iter().map(RedisServer::address).collect()
    }

    /// The Sentinels, to be asked or killed.
    pub fn sentinels(&mut self) -> &mut [RedisServer] {
        &mut self.sentinels
    }

    /// The server that may be written to.
    pub fn master(&self) -> &RedisServer {
        &self.servers[self.master]
    }

    /// Its port.
    pub fn master_port(&self) -> u16 {
        self.master().port()
    }

    /// The other one.
    pub fn replica(&self) -> &RedisServer {
        &self.servers[1 - self.master]
    }

    /// Kills the master and waits until all Sentinels name the other, which is the master then.
    pub async fn fail_over(&mut self) {
        self.servers[self.master].kill();
        self.master = 1 - self.master;
        let (master, port) = (self.master(), self.master_port().to_string());
        let named = |sentinel: &RedisServer| {
            let asked = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", Self::SERVICE];
            sentinel.command(&asked).texts().last() == Some(&port)
        };
        let is_done =
            async || (self.sentinels.iter().all(named) && role_of(master) == "master").then_some(());
        soon(again_until(is_done)).await;
    }

    /// Starts the server that was killed, and waits until it follows the other.
    pub async fn bring_back(&mut self) {
        self.servers[1 - self.master].restart().await;
        self.until_complete().await;
    }

    /// Waits until every Sentinel knows a replica that could take over and both other Sentinels.
    async fn until_complete(&self) {
        let knows_all = |sentinel: &RedisServer| {
            let master = pairs(&sentinel.command(&["SENTINEL", "MASTER", Self::SERVICE]));
            let replicas = sentinel.command(&["SENTINEL", "REPLICAS", Self::SERVICE]);
            let has = |key: &str, value: &str| master.iter().any(|(k, v)| k == key && v == value);
            let is_linked = |replica: &Reply| {
                pairs(replica).contains(&("master-link-status".to_owned(), "ok".to_owned()))
            };
            has("flags", "master") && has("num-other-sentinels", "2") && replicas.list().iter().any(is_linked)
        };
        let follows = |server: &RedisServer| {
            role_of(server) == "slave" && server.info("replication", "master_link_status") == "up"
        };
        let is_done =
            async || (follows(self.replica()) && self.sentinels.iter().all(knows_all)).then_some(());
        soon(again_until(is_done)).await;
    }
}

fn role_of(server: &RedisServer) -> String {
    server.info("replication", "role")
}

/// A list of names, each followed by its value.
fn pairs(reply: &Reply) -> Vec<(String, String)> {
    let texts = reply.texts();
    texts.chunks_exact(2).map(|pair| (pair[0].clone(), pair[1].clone())).collect()
}
