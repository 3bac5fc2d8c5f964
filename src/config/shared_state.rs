//! `shared_state`: where pods keep what they know together.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::secret::MASK;

/// Beyond it a number of pods is a slip, and more than one look at what they have seen may take in.
pub const LARGEST_QUORUM: u32 = 1_000;

/// The state that pods share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedState {
    /// Where it is.
    pub redis: Redis,
    /// The longest that a request waits for it.
    pub timeout: Duration,
    /// The least number of pods that must have seen an upstream fail before all of them open its breaker; 1 to
    /// [`LARGEST_QUORUM`].
    pub quorum: u32,
    /// The first part of every key.
    pub prefix: Arc<str>,
}

/// A Redis or Valkey, and how to get in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Redis {
    /// What the servers are.
    pub kind: RedisKind,
    /// Whether TLS is spoken to them, Sentinels included.
    pub is_tls: bool,
    /// PEM of roots that are trusted beside the system's: `tls.ca_file`.
    pub ca_pem: Option<Arc<[u8]>>,
    /// Hosts, IPv6 without brackets, and ports; at least one. Of a cluster and of Sentinels some will do.
    pub servers: Vec<(String, u16)>,
    /// Who asks; without a password nobody.
    pub login: Login,
    /// The number of the database; always 0 in a cluster.
    pub database: u32,
}

/// A user and a password, either of which may be missing. Both are hidden in Debug: who writes
/// `redis://hunter2@host` means a password and names a user.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Login {
    /// Of Redis 6 and later; never empty.
    pub user: Option<String>,
    /// Empty for a user that needs none.
    pub password: Option<String>,
}

/// What the servers of a [`Redis`] are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RedisKind {
    /// One server.
    Single,
    /// Sentinels, which know the master.
    Sentinel {
        /// Its name with them.
        service: String,
        /// For the Sentinels themselves.
        login: Login,
    },
    /// Nodes of a cluster.
    Cluster,
}

impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let masked = |text: &Option<String>| text.as_ref().map(|_| MASK);
        let (user, password) = (masked(&self.user), masked(&self.password));
        f.debug_struct("Login").field("user", &user).field("password", &password).finish()
    }
}
