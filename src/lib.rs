//! Hedgerow: a sidecar proxy for the outbound tool calls of LLM agents.

pub mod admin;
pub mod app;
pub mod call;
pub mod cli;
pub mod config;
pub mod demo;
pub mod error;
pub mod listen;
pub mod pipeline;
pub mod policy;
pub mod respond;
pub mod telemetry;
pub mod tls;
pub mod units;
pub mod upstream;
pub mod wire;
