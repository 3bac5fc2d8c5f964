//! The policies: each decides one thing about a call, and none knows another.
//!
//! They come in three shapes, all plain structs:
//!
//! - a **decider** is told what happened and says what to do: the hedge's delay, the retry, the extra-load
//!   budget;
//! - a **gate** returns a guard whose `Drop` gives back what was taken: the bulkhead's permit, the
//!   breaker's admission. There is no way to leave a call, panic and cancellation included, that keeps
//!   a permit or a probe's place. A rate token is taken for good, so the rate limit gives no guard;
//! - a **recorder** is fed outcomes and answers questions: the breaker's window, the latency window.
//!
//! Two rules hold for all of them. Time is an argument (`now`), so tests run hours in microseconds and
//! no jump of the wall clock matters. Settings are an argument as well and never stored: a reload swaps
//! the settings and the state lives on, whatever changed.
//!
//! The pipeline owns every loop, `select!` and sleep, but for the wait for a rate token: who is next in
//! line changes meanwhile. The alternative, stacked wrappers that take an async closure, hides the order
//! of the stages in types and doubles the size of the request's future.

pub mod breaker;
pub mod budget;
pub mod bulkhead;
pub mod cache;
pub mod deadline;
pub mod hedge;
pub mod identity;
pub mod rate_limit;
pub mod retry;
pub mod singleflight;

#[cfg(test)]
mod hedge_simulation;
