//! The way to an upstream: resolve its name, check where that leads, connect, and fit the request to it.

pub mod connect;
pub mod egress;
pub mod resolve;
pub mod rewrite;
