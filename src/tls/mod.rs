//! TLS on the upstream side. rustls with ring, chosen explicitly: no provider of the process is consulted.

pub mod client;
pub mod interceptor;
