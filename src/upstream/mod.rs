//! The way to an upstream: resolve its name, check where that leads, connect, and fit the request to it.

pub mod connect;
pub mod connection;
pub mod dial;
pub mod egress;
pub mod pool;
pub mod registry;
pub mod resolve;
pub mod rewrite;
pub mod socket;
