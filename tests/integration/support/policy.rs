//! Policies as tests write them: one upstream, and the stages that the test is about.

use std::fmt::Display;

/// A policy with one upstream called `tool`, with these stages: `hedge: off, breaker: { open_for: 1s }`.
pub fn tool(host: impl Display, stages: &str) -> String {
    format!("upstreams: {{ {} }}", named("tool", host, stages))
}

/// An entry of `upstreams`, for policies with several.
pub fn named(name: &str, host: impl Display, stages: &str) -> String {
    format!("{name}: {{ hosts: [\"{host}\"], {stages} }}")
}

/// The label that selects the series of [`tool`].
pub const TOOL: (&str, &str) = ("upstream", "tool");
