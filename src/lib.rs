//! Hedgerow: a sidecar proxy for the outbound tool calls of LLM agents. It makes every call bounded by
//! one absolute deadline, hedged when slow, isolated by bulkheads and cut off by breakers, and finds
//! another answer where there is none.
//!
//! # The life of a request
//!
//! A listener accepts the connection ([`listen::accept`]) and waits for the first bytes
//! ([`listen::connection`]), which tell HTTP/1 ([`listen::http1`]) from HTTP/2 ([`listen::http2`]). The
//! library reads a head; what any proxy must refuse is refused ([`listen::forward`]): odd framing, bad
//! authorities, loops, the process's own ports. A CONNECT is dialled and becomes a tunnel, unless what
//! comes through it turns out to be HTTP ([`listen::tunnel`]), or is TLS that the policy has end here
//! ([`listen::intercept`]). A redirected connection ([`listen::transparent`]) goes the same ways.
//!
//! The request takes one snapshot of the policy ([`config`]) and goes on its journey
//! ([`pipeline::journey`]):
//!
//! 1. the upstream, its policy and route ([`upstream::registry`]), made on first use and kept over
//!    reloads;
//! 2. one deadline ([`policy::deadline`]) for all that follows;
//! 3. a kept answer, when it is fresh ([`pipeline::recall`], [`policy::cache`]);
//! 4. an equal call that is under way, whose answer will do ([`pipeline::flight`], [`policy::singleflight`]);
//! 5. tries ([`pipeline::tries`], [`policy::retry`]) of one attempt each: breaker, permit, rate token, breaker
//!    again ([`pipeline::gate`]), a connection with room or a new one ([`upstream::pool`], [`upstream::dial`]),
//!    the request, the head ([`pipeline::attempt`]). When the head is late, a second attempt starts; the first
//!    acceptable head wins ([`pipeline::race`]) and the other is dropped, which cancels it on the wire;
//! 6. something instead, when nothing acceptable has come ([`pipeline::fallback`]): a backup's answer, a stale one, a
//!    fixed one;
//! 7. the answer ([`pipeline::answer`]): the head at once, the body as it comes. The permit, the verdict
//!    for the breaker ([`pipeline::judge`]) and the account for metrics and log ([`pipeline::ledger`])
//!    live in the body until it ends, however it ends. What may be kept is kept on its way ([`pipeline::record`]).
//!
//! A fan-out ([`fanout`]) is asked of the process itself: a list of calls, each of which goes on this journey,
//! and one answer with what has come of them by one deadline.
//!
//! How all this comes into a pod is apart from it ([`kube`]).
//!
//! What goes wrong is an [`error::Error`], and [`respond`] gives each the one shape that callers know.
//!
//! # Who may use whom
//!
//! The list below is in reading order, and imports point upwards in it only: a policy knows no other
//! policy, the pipeline owns every loop and every wait, and only the demo and the command line use [`app`].

#![forbid(unsafe_code)]

pub mod units;

pub mod error;

pub mod wire;

pub mod config;

pub mod telemetry;

pub mod tls;

pub mod fleet;

pub mod call;

pub mod policy;

pub mod upstream;

pub mod respond;

pub mod pipeline;

pub mod fanout;

pub mod listen;

pub mod liaison;

pub mod admin;

pub mod app;

pub mod demo;

pub mod kube;

pub mod cli;

#[cfg(test)]
mod fleet_simulation;
