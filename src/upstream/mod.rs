//! The way to an upstream: resolve its name, check where that leads, connect, and fit the request to it.

pub mod connect;
pub mod connection;
pub mod dial;
pub mod egress;
pub mod http1;
pub mod http2;
pub mod pool;
pub mod registry;
pub mod resolve;
pub mod rewrite;
pub mod shared;
pub mod socket;
