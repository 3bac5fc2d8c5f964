//! The support proves itself first: servers of Redis, in all the forms they come in, and the bad line before them.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

use crate::support::client::{Agent, End};
use crate::support::forwarder::Forwarder;
use crate::support::pki::Pki;
use crate::support::redis::{RedisCluster, RedisServer, Reply, Sentinels};
use crate::support::upstream::Upstream;

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Says PING over TCP, in the short form that Redis takes from people.
async fn ping(address: SocketAddr) -> Agent {
    let mut agent = Agent::connect(address).await;
    agent.send("PING\r\n").await;
    agent
}

async fn is_refused(address: SocketAddr) -> bool {
    TcpStream::connect(address).await.is_err()
}

/// Whether nothing comes for a while. There is no event for that.
async fn is_mute(agent: &mut Agent) -> bool {
    timeout(ms(50), agent.expect(b"+PONG\r\n")).await.is_err()
}

fn error_of(reply: &Reply) -> &str {
    let Reply::Error(error) = reply else { panic!("{reply:?} is no refusal") };
    error.split(' ').next().expect("a split has a first part")
}

#[tokio::test]
async fn a_server_answers_is_killed_and_comes_back_empty_on_its_port() {
    let mut redis = RedisServer::start().await;
    ping(redis.address()).await.expect(b"+PONG\r\n").await;
    assert_eq!(redis.url(), format!("redis://127.0.0.1:{}", redis.port()));
    redis.command(&["SET", "b", "1"]);
    redis.command(&["SET", "a", "two words\r\n"]);
    assert_eq!(redis.command(&["GET", "a"]).text(), "two words\r\n");
    assert_eq!(redis.command(&["INCR", "b"]), Reply::Integer(2));
    assert_eq!((redis.keys("*"), redis.keys("b*")), (vec!["a".into(), "b".into()], vec!["b".to_owned()]));
    assert_eq!((redis.calls("set"), redis.calls("get"), redis.calls("del")), (2, 1, 0));
    let before = redis.commands();
    assert!(before > 5 && redis.commands() > before);
    assert_eq!(redis.info("replication", "role"), "master");

    let mut before = ping(redis.address()).await;
    before.expect(b"+PONG\r\n").await;
    redis.kill();
    before.ended().await;
    assert!(is_refused(redis.address()).await);
    // The port is not given to anybody else.
    let others: Vec<_> = (0..20).map(|_| std::net::TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    assert!(others.iter().all(|other| other.local_addr().unwrap() != redis.address()));
    redis.restart().await;
    ping(redis.address()).await.expect(b"+PONG\r\n").await;
    assert_eq!(redis.keys("*"), Vec::<String>::new());
    // At once, too.
    redis.command(&["SET", "a", "1"]);
    redis.restart().await;
    assert_eq!(redis.command(&["GET", "a"]), Reply::Nil);
}

#[tokio::test]
async fn a_paused_server_is_mute_and_answers_when_it_goes_on() {
    let redis = RedisServer::start().await;
    redis.pause();
    let mut agent = ping(redis.address()).await;
    assert!(is_mute(&mut agent).await);
    redis.resume();
    agent.expect(b"+PONG\r\n").await;
    // And one that is dropped in that state leaves nothing behind.
    let address = redis.address();
    redis.pause();
    drop(redis);
    assert!(is_refused(address).await);
}

#[tokio::test]
async fn until_waits_for_what_others_do() {
    let redis = RedisServer::start().await;
    let mut agent = Agent::connect(redis.address()).await;
    let has_key = redis.until(|redis| redis.keys("k") == ["k"]);
    let ((), ()) = tokio::join!(has_key, agent.send("SET k v\r\n"));
    agent.expect(b"+OK\r\n").await;
}

#[tokio::test]
async fn a_password_and_a_user_are_asked_for() {
    let redis = RedisServer::with().password("secret").start().await;
    assert_eq!(redis.url(), format!("redis://:secret@{}", redis.address()));
    let mut agent = ping(redis.address()).await;
    agent.expect(b"-NOAUTH Authentication required.\r\n").await;
    agent.send("AUTH secret\r\nPING\r\n").await;
    agent.expect(b"+OK\r\n+PONG\r\n").await;

    let redis = RedisServer::with().user("hedge", "secret", "~mine:* +@all").start().await;
    assert_eq!(redis.url(), format!("redis://hedge:secret@{}", redis.address()));
    let mut agent = ping(redis.address()).await;
    agent.expect(b"-NOAUTH Authentication required.\r\n").await;
    agent.send("AUTH hedge secret\r\nSET mine:1 a\r\nSET theirs a\r\n").await;
    agent.expect(b"+OK\r\n+OK\r\n-NOPERM ").await;
    assert_eq!(redis.keys("*"), ["mine:1"]);
}

#[tokio::test]
async fn tls_is_spoken_alone_to_those_who_trust_the_authority() {
    let pki = Pki::new();
    let mut redis = RedisServer::with().tls(&pki).start().await;
    for name in ["localhost", "127.0.0.1"] {
        let agent = Agent::connect(redis.address()).await;
        let mut agent = agent.tls(&pki.connector(), name).await.unwrap();
        agent.send("PING\r\n").await;
        agent.expect(b"+PONG\r\n").await;
        redis.restart().await;
    }
    assert_eq!(redis.url(), format!("rediss://{}", redis.address()));
    ping(redis.address()).await.ended().await;
    let stranger = Pki::new().connector();
    assert!(Agent::connect(redis.address()).await.tls(&stranger, "localhost").await.is_err());
    let other = RedisServer::with().tls_called(&pki, &["redis.test"]).start().await;
    assert!(Agent::connect(other.address()).await.tls(&pki.connector(), "localhost").await.is_err());
}

#[tokio::test]
async fn a_full_server_and_a_replica_read_and_do_not_write() {
    let full = RedisServer::with().max_memory("1").databases(1).start().await;
    assert_eq!(error_of(&full.try_command(&["SET", "a", "1"])), "OOM");
    assert_eq!(full.command(&["GET", "a"]), Reply::Nil);
    assert_eq!(error_of(&full.try_command(&["SELECT", "1"])), "ERR");

    let master = RedisServer::start().await;
    master.command(&["SET", "a", "1"]);
    let replica = RedisServer::with().replica_of(&master).start().await;
    replica.until(|replica| replica.info("replication", "master_link_status") == "up").await;
    assert_eq!(replica.command(&["GET", "a"]).integer(), 1);
    assert_eq!(error_of(&replica.try_command(&["SET", "a", "2"])), "READONLY");
    let mut connection = replica.connect();
    connection.command(&["SELECT", "1"]);
    assert_eq!(connection.command(&["GET", "a"]), Reply::Nil);
}

#[tokio::test]
async fn sentinels_name_another_master_when_theirs_is_killed() {
    let mut sentinels = Sentinels::start().await;
    let before = sentinels.master_port();
    sentinels.master().command(&["SET", "a", "1"]);
    sentinels.replica().until(|replica| replica.command(&["GET", "a"]) != Reply::Nil).await;
    sentinels.fail_over().await;
    assert_ne!(sentinels.master_port(), before);
    sentinels.master().command(&["INCR", "a"]);
    sentinels.bring_back().await;
    assert_eq!(sentinels.replica().port(), before);
    assert_eq!(sentinels.replica().command(&["GET", "a"]).integer(), 2);
    assert_eq!(sentinels.addresses().len(), 3);
}

#[tokio::test]
async fn sentinels_and_their_servers_ask_for_passwords_of_their_own() {
    let mut sentinels = Sentinels::start_with_passwords("for-servers", "for-sentinels").await;
    for (address, password) in
        [(sentinels.addresses()[0], "for-sentinels"), (sentinels.master().address(), "for-servers")]
    {
        let mut agent = ping(address).await;
        agent.expect(b"-NOAUTH Authentication required.\r\n").await;
        agent.send(format!("AUTH {password}\r\n")).await;
        agent.expect(b"+OK\r\n").await;
    }
    sentinels.fail_over().await;
}

#[tokio::test]
async fn a_cluster_serves_every_slot_at_one_node_alone() {
    let mut cluster = RedisCluster::start().await;
    for nth in 0..20 {
        let key = format!("key-{nth}");
        let home = cluster.node_of(&key);
        home.command(&["SET", &key, "1"]);
        for other in cluster.nodes.iter().filter(|node| node.port() != home.port()) {
            assert_eq!(error_of(&other.try_command(&["GET", &key])), "MOVED");
        }
    }
    assert_eq!(cluster.keys("key-*").len(), 20);
    assert!(cluster.nodes.iter().all(|node| !node.keys("key-*").is_empty()));

    cluster.nodes[2].kill();
    cluster.nodes[0].until(|node| error_of_get(node) == Some("CLUSTERDOWN".to_owned())).await;
    cluster.nodes[2].restart().await;
    cluster.until_complete().await;
}

fn error_of_get(node: &RedisServer) -> Option<String> {
    let reply = node.try_command(&["GET", "{key-of-slot-}1"]);
    matches!(reply, Reply::Error(_)).then(|| error_of(&reply).to_owned())
}

#[tokio::test]
async fn a_line_delays_each_direction_by_its_own_time() {
    let redis = RedisServer::start().await;
    let line = Forwarder::start(redis.address()).await;
    let mut agent = ping(line.address()).await;
    agent.expect(b"+PONG\r\n").await;
    for (to_server, to_client) in [(80, 0), (0, 80), (50, 40)] {
        line.delay(ms(to_server), ms(to_client));
        let before = redis.calls("ping");
        let began = Instant::now();
        agent.send("PING\r\n").await;
        redis.until(|redis| redis.calls("ping") > before).await;
        assert!(began.elapsed() >= ms(to_server));
        agent.expect(b"+PONG\r\n").await;
        assert!(began.elapsed() >= ms(to_server + to_client));
    }
    // Bytes that come together are under way together.
    line.delay(Duration::ZERO, ms(100));
    let began = Instant::now();
    for _ in 0..50 {
        agent.send("PING\r\n").await;
    }
    agent.expect(&b"+PONG\r\n".repeat(50)).await;
    assert!((ms(100)..ms(3000)).contains(&began.elapsed()), "{:?}", began.elapsed());
    // What is under way arrives at once when the line is good again.
    let mut line = line;
    line.delay(Duration::from_secs(600), Duration::ZERO);
    agent.send("PING\r\n").await;
    line.restore();
    agent.expect(b"+PONG\r\n").await;
    drop(agent);
    let tally = line.until(|tally| tally.open == 0).await;
    assert_eq!((tally.connections, tally.to_server, tally.to_client), (1, 55 * 6, 55 * 7));
}

#[tokio::test]
async fn a_silent_line_loses_nothing() {
    let redis = RedisServer::start().await;
    let mut line = Forwarder::start(redis.address()).await;
    let mut before = ping(line.address()).await;
    before.expect(b"+PONG\r\n").await;
    line.mute();
    before.send("PING\r\n").await;
    let mut later = ping(line.address()).await;
    assert!(is_mute(&mut before).await && is_mute(&mut later).await);
    assert_eq!(redis.calls("ping"), 2, "one of them is the start's");
    line.restore();
    before.expect(b"+PONG\r\n").await;
    later.expect(b"+PONG\r\n").await;

    line.mute_answers();
    before.send("SET k v\r\n").await;
    redis.until(|redis| redis.keys("k") == ["k"]).await;
    assert!(is_mute(&mut before).await);
    line.restore();
    before.expect(b"+OK\r\n").await;
}

#[tokio::test]
async fn a_line_is_cut_and_refuses_and_takes_again() {
    let redis = RedisServer::start().await;
    let mut line = Forwarder::start(redis.address()).await;
    let mut before = ping(line.address()).await;
    before.expect(b"+PONG\r\n").await;
    line.cut();
    assert_eq!(before.ended().await, End::Reset);

    let mut kept = ping(line.address()).await;
    kept.expect(b"+PONG\r\n").await;
    line.refuse().await;
    assert!(is_refused(line.address()).await);
    kept.send("PING\r\n").await;
    kept.expect(b"+PONG\r\n").await;
    line.restore();
    ping(line.address()).await.expect(b"+PONG\r\n").await;
    assert_eq!(line.tally().connections, 3);

    // Its end is everybody's.
    let address = line.address();
    drop(line);
    assert_eq!(kept.ended().await, End::Reset);
    assert!(is_refused(address).await);
}

#[tokio::test]
async fn a_line_passes_ends_on_and_resets_where_there_is_no_server() {
    let redis = RedisServer::start().await;
    let line = Forwarder::start(redis.address()).await;
    let mut agent = ping(line.address()).await;
    agent.send("QUIT\r\n").await;
    agent.expect(b"+PONG\r\n+OK\r\n").await;
    assert_eq!(agent.ended().await, End::Closed);
    let clients = || redis.command(&["CLIENT", "LIST", "TYPE", "normal"]).text().lines().count();
    drop(agent);
    drop(ping(line.address()).await);
    line.until(|tally| tally.connections == 2 && tally.open == 0).await;
    redis.until(|_| clients() == 1).await;

    let (dead, _held) = Upstream::dead();
    let line = Forwarder::start(dead).await;
    assert_eq!(Agent::connect(line.address()).await.ended().await, End::Reset);
}
