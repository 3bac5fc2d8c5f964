//! What the surroundings of the process fix, whatever the policy says.
//!
//! Where hedgerow runs as a sidecar, other parts of the pod rely on its ports and on the CA's folder: variables
//! of the agent, probes, redirect rules. They are set together with the arguments of the process. The policy is written
//! by others, for many pods, and changes while all of that stays.

use std::net::SocketAddr;

use clap::Args;

use super::notation::{Flag, Socket, Switch};
use super::raw;

/// What wins over the policy. The default leaves all to it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args)]
pub struct Surroundings {
    /// Start on the built-in policy while the policy file is not there, and follow the file once it is.
    #[arg(long, env = "HEDGEROW_CONFIG_OPTIONAL", requires = "config")]
    pub config_optional: bool,
    /// Where the proxy listens, before listen.proxy of the policy.
    #[arg(long, env = "HEDGEROW_PROXY", value_name = "ADDRESS")]
    pub proxy: Option<SocketAddr>,
    /// Where redirected connections arrive, before listen.transparent.
    #[arg(long, env = "HEDGEROW_TRANSPARENT", value_name = "ADDRESS")]
    pub transparent: Option<SocketAddr>,
    /// Where the admin port is, before listen.admin. Peers beyond loopback get /livez, /readyz and /metrics alone.
    #[arg(long, env = "HEDGEROW_ADMIN", value_name = "ADDRESS")]
    pub admin: Option<SocketAddr>,
    /// Where the files that agents must trust are written, before tls.ca_dir.
    #[arg(long, env = "HEDGEROW_CA_DIR", value_name = "FOLDER")]
    pub ca_dir: Option<String>,
    /// Intercept TLS where the policy does not say whether to.
    #[arg(long, env = "HEDGEROW_INTERCEPT", requires = "ca_dir")]
    pub intercept: bool,
}

impl Surroundings {
    /// Puts into `policy` what stands before it.
    pub(super) fn settle(&self, policy: &mut raw::Policy) {
        if self.proxy.is_some() || self.transparent.is_some() || self.admin.is_some() {
            let listen = policy.listen.get_or_insert_default();
            listen.proxy = self.proxy.map(Socket).or(listen.proxy);
            listen.admin = self.admin.map(Socket).or(listen.admin);
            if let Some(address) = self.transparent {
                listen.transparent = Some(Switch::On(Socket(address)));
            }
        }
        if let Some(folder) = &self.ca_dir {
            // The policy's own are relative to its file.
            let folder =
                std::path::absolute(folder).map_or(folder.clone(), |path| path.display().to_string());
            policy.tls.get_or_insert_default().ca_dir = Some(Switch::On(folder));
        }
        if self.intercept {
            policy.defaults.get_or_insert_default().intercept.get_or_insert(Flag(true));
        }
    }
}
