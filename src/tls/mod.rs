//! TLS on both sides. rustls with ring, chosen explicitly: no provider of the process is consulted.

pub mod ca;
pub mod client;
pub mod hello;
pub mod interceptor;
mod key;
pub mod leaf;
pub mod trust;
mod truststore;
