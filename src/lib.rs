//! Hedgerow: a sidecar proxy for the outbound tool calls of LLM agents.

pub mod units;
pub mod error;
pub mod wire;
pub mod config;
pub mod telemetry;
pub mod call;
pub mod policy;
pub mod tls;
pub mod upstream;
pub mod respond;
pub mod pipeline;
pub mod listen;
pub mod admin;
pub mod app;
pub mod cli;
pub mod demo;
