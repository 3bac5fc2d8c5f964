//! The policies: each decides one thing about a call, and none knows another.
//!
//! They come in three shapes, all plain structs, and the larger ones are two of them:
//!
//! - a **decider** is told what happened and says what to do: the hedge's delay, the retry, the extra-load
//!   budget, what may be done with a kept answer;
//! - a **gate** returns a guard whose `Drop` gives back what was taken: the bulkhead's permit, the
//!   breaker's admission, the place in a flight. There is no way to leave a call, panic and cancellation
//!   included, that keeps a permit or a probe's place. A rate token is taken for good, so the rate limit
//!   gives no guard;
//! - a **recorder** is fed outcomes and answers questions: the breaker's window, the latency window, the
//!   store of kept answers.
//!
//! Two rules hold for all of them. Time is an argument (`now`), so tests run hours in microseconds and
//! no jump of the wall clock matters. Settings are an argument as well, and state outlives them: a reload
//! swaps the settings and the state lives on, whatever changed. Where state has to go by a setting between
//! two questions, as a bucket that fills does, it goes by the last that it was asked with. Only the store's
//! bound on memory is its own for life: with another one there is another store.
//!
//! [`identity`] is no policy: it says which two calls may share an answer, and both who keeps answers and who
//! shares them ask it.
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
pub mod room;
pub mod singleflight;

#[cfg(test)]
mod hedge_simulation;
