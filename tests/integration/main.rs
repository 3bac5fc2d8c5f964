//! What hedgerow does on the wire, told by an agent on one side and fake upstreams on the other.
//!
//! One binary, so that the support is compiled and linked once; a module for each thing an operator would
//! name. Tests share nothing: each has its own hedgerow, upstreams and ports, and they run in parallel.

#![allow(
    unreachable_pub,
    reason = "a test binary exports nothing; `pub` marks what the support offers to the suites"
)]

mod demo;

// Suites come one by one; each part of the support is written once and used by several of them.
#[allow(dead_code, reason = "the proxy's suites are the users of what the self-test does not need")]
mod support;

mod accept;
mod access_log;
mod admin;
mod cli;
mod docs;
mod inject;

mod drain;
mod garbage;
mod metrics;
mod reload;
mod sidecar;
mod start;
mod support_itself;
mod support_redis;

mod breaker;
mod bulk;
mod bulkhead;
mod ca;
mod cache;
mod cache_shared;
mod cancel;
mod client_hello;
mod coalesce;
mod deadline;
mod direct;
mod dns;
mod egress;
mod event_stream;
mod fallback;
mod fallback_backups;
mod fanout;
mod fanout_events;
mod fanout_input;
mod fleet;
mod fleet_faults;
mod forward;
mod framing;
mod grpc;
mod hedge;
mod http2_abuse;
mod http2_grpc;
mod http2_in;
mod http2_out;
mod intercept;
mod intercept_names;
mod intercept_not;
mod isolation;
mod limits;
mod rate_limit;
mod redirect;
mod retry;
mod reuse;
mod routes;
mod secrets;
mod sharing;
mod stream;
mod tls_origination;
mod transparent;
mod tunnel;
mod upgrade;
mod upstream_tls;
mod webhook;
mod websocket;
