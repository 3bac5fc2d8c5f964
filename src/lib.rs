//! Hedgerow: a sidecar proxy for the outbound tool calls of LLM agents.

pub mod config;
pub mod error;
pub mod policy;
pub mod telemetry;
pub mod tls;
pub mod units;
pub mod upstream;
pub mod wire;
