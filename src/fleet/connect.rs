//! From the policy's words about a Redis to a connection with one.

use std::time::Duration;

use pem::Pem;
use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::cluster::ClusterClientBuilder;
use redis::cluster_async::ClusterConnection;
use redis::sentinel::{SentinelClientBuilder, SentinelServerType};
use redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, ProtocolVersion,
    PushInfo, RedisConnectionInfo, RedisResult, TlsCertificates, TlsMode, Value,
};

use crate::config::{Redis, RedisKind};
use crate::tls::client::public_roots;

/// Calls that are under way at once at most.
const MOST_AT_ONCE: usize = 1024;

/// A connection that many use at once; a clone is the same one.
#[derive(Clone)]
pub(super) enum Connection {
    Single(MultiplexedConnection),
    Cluster(ClusterConnection),
}

impl Connection {
    pub(super) async fn send(&mut self, cmd: &Cmd) -> RedisResult<Value> {
        match self {
            Self::Single(connection) => connection.req_packed_command(cmd).await,
            Self::Cluster(connection) => connection.req_packed_command(cmd).await,
        }
    }

    pub(super) async fn subscribe(&mut self, channel: &str) -> RedisResult<()> {
        match self {
            Self::Single(connection) => connection.subscribe(channel).await,
            Self::Cluster(connection) => connection.subscribe(channel).await,
        }
    }
}

/// Connects, and asks Sentinels first where there are any. What the servers say unasked goes to `on_push`. The
/// protocol is RESP3 (Redis 6 and later), in which published words come over the same connection.
pub(super) async fn connect(
    redis: &Redis,
    timeout: Duration,
    on_push: impl Fn(PushInfo) + Send + Sync + 'static,
) -> RedisResult<Connection> {
    let on_push = move |push| {
        on_push(push);
        Ok::<_, redis::aio::SendError>(())
    };
    // Who calls has a bound of his own; this one frees the place of what will never be answered.
    let within = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(timeout))
        .set_response_timeout(Some(2 * timeout))
        .set_concurrency_limit(MOST_AT_ONCE);
    match &redis.kind {
        RedisKind::Single => {
            let config = within.set_push_sender(on_push);
            let client = single(redis)?;
            client.get_multiplexed_async_connection_with_config(&config).await.map(Connection::Single)
        }
        RedisKind::Sentinel { service, .. } => {
            let config = within.set_push_sender(on_push);
            let mut client = sentinel(redis, service)?.build()?;
            client.get_async_connection_with_config(&config).await.map(Connection::Single)
        }
        RedisKind::Cluster => {
            let client = cluster(redis, timeout)?.push_sender(on_push).build()?;
            client.get_async_connection().await.map(Connection::Cluster)
        }
    }
}

fn single(redis: &Redis) -> RedisResult<Client> {
    let [address, ..] = &addresses(redis)[..] else {
        return Err((redis::ErrorKind::InvalidClientConfig, "no server is named").into());
    };
    let info = address.clone().into_connection_info()?.set_redis_settings(settings(redis));
    match certificates(redis) {
        None => Client::open(info),
        Some(certificates) => Client::build_with_tls(info, certificates),
    }
}

fn sentinel(redis: &Redis, service: &str) -> RedisResult<SentinelClientBuilder> {
    let mut builder = SentinelClientBuilder::new(addresses(redis), service, SentinelServerType::Master)?
        .set_client_to_redis_db(redis.database.into())
        .set_client_to_redis_protocol(ProtocolVersion::RESP3);
    if let Some(user) = &redis.login.user {
        builder = builder.set_client_to_redis_username(user);
    }
    if let Some(password) = &redis.login.password {
        builder = builder.set_client_to_redis_password(password);
    }
    if let RedisKind::Sentinel { login, .. } = &redis.kind {
        if let Some(user) = &login.user {
            builder = builder.set_client_to_sentinel_username(user);
        }
        if let Some(password) = &login.password {
            builder = builder.set_client_to_sentinel_password(password);
        }
    }
    if let Some(certificates) = certificates(redis) {
        builder = builder
            .set_client_to_redis_tls_mode(TlsMode::Secure)
            .set_client_to_redis_certificates(certificates.clone())
            .set_client_to_sentinel_tls_mode(TlsMode::Secure)
            .set_client_to_sentinel_certificates(certificates);
    }
    Ok(builder)
}

fn cluster(redis: &Redis, timeout: Duration) -> RedisResult<ClusterClientBuilder> {
    let nodes: Vec<ConnectionInfo> = addresses(redis)
        .into_iter()
        .map(IntoConnectionInfo::into_connection_info)
        .collect::<Result<_, _>>()?;
    let mut builder = ClusterClientBuilder::new(nodes)
        .use_protocol(ProtocolVersion::RESP3)
        .connection_timeout(timeout)
        .response_timeout(2 * timeout)
        // A moved slot is worth another try; who asks has no time for many.
        .retries(2)
        .min_retry_wait(10)
        .max_retry_wait(100);
    if let Some(user) = &redis.login.user {
        builder = builder.username(user);
    }
    if let Some(password) = &redis.login.password {
        builder = builder.password(password);
    }
    if let Some(certificates) = certificates(redis) {
        builder = builder.tls(TlsMode::Secure).certs(certificates);
    }
    Ok(builder)
}

fn settings(redis: &Redis) -> RedisConnectionInfo {
    let mut settings = RedisConnectionInfo::default()
        .set_protocol(ProtocolVersion::RESP3)
        .set_db(redis.database.into())
        .set_lib_name("hedgerow", env!("CARGO_PKG_VERSION"));
    if let Some(user) = &redis.login.user {
        settings = settings.set_username(user);
    }
    if let Some(password) = &redis.login.password {
        settings = settings.set_password(password);
    }
    settings
}

fn addresses(redis: &Redis) -> Vec<ConnectionAddr> {
    let address = |(host, port): &(String, u16)| match redis.is_tls {
        false => ConnectionAddr::Tcp(host.clone(), *port),
        true => ConnectionAddr::TcpTls { host: host.clone(), port: *port, insecure: false, tls_params: None },
    };
    redis.servers.iter().map(address).collect()
}

/// What is trusted: the policy's own roots and the machine's.
fn certificates(redis: &Redis) -> Option<TlsCertificates> {
    if !redis.is_tls {
        return None;
    }
    let roots = public_roots().into_iter().map(|root| Pem::new("CERTIFICATE", root.as_ref()));
    let mut root_cert = pem::encode_many(&roots.collect::<Vec<_>>()).into_bytes();
    root_cert.extend_from_slice(redis.ca_pem.as_deref().unwrap_or_default());
    Some(TlsCertificates { client_tls: None, root_cert: Some(root_cert) })
}
