//! What hedgerow calls its things in a pod, and which numbers it has there.
//!
//! The image, the redirect rules and the manifests have the same; a change here is a change there.

/// Of every annotation and label.
pub const PREFIX: &str = "hedgerow.dev/";
/// The sidecar.
pub const SIDECAR: &str = "hedgerow";
/// The init container of transparent mode.
pub const INIT: &str = "hedgerow-init";
/// The volume with the policy.
pub const POLICY_VOLUME: &str = "hedgerow-policy";
/// The volume with what agents trust under interception.
pub const CA_VOLUME: &str = "hedgerow-ca";
/// The ConfigMap that is looked for where nothing names another one.
pub const POLICY_CONFIGMAP: &str = "hedgerow-policy";
/// Where the sidecar has the policy's ConfigMap, as a directory.
pub const POLICY_DIR: &str = "/etc/hedgerow/policy";
/// The ConfigMap's key.
pub const POLICY_KEY: &str = "policy.yaml";
/// Where sidecar and agents have the CA's files.
pub const CA_DIR: &str = "/var/run/hedgerow/ca";
/// The sidecar's user and group, whose connections redirect rules leave alone.
pub const UID: u32 = 2747;
/// The proxy, on loopback.
pub const PROXY_PORT: u16 = 15300;
/// Where redirected connections arrive, on loopback.
pub const REDIRECT_PORT: u16 = 15301;
/// Health and metrics, on all of the pod's addresses.
pub const ADMIN_PORT: u16 = 15302;
/// The admin port's name, by which a PodMonitor finds it.
pub const ADMIN_PORT_NAME: &str = "hedgerow-admin";
