//! What must hold of hedgerow's parsers for any input: that they do not panic, and one thing more each.
//!
//! A [`Target`] is a function of bytes that panics when something does not hold. Two drivers run them:
//!
//! - `smoke.rs`, on any compiler: the seeds, and some thousand inputs that are mutated from them. It is
//!   part of `make test`, and has new inputs each time.
//! - cargo-fuzz, which is led by coverage, on a nightly one:
//!   `cargo +nightly fuzz run --fuzz-dir tests/fuzz --features libfuzzer policy`.
//!
//! An input that either finds becomes a seed here once its fault is mended.

#![forbid(unsafe_code)]

mod cache;
mod deadline;
mod fanout;
mod fields;
mod framing;
mod hello;
mod hop_by_hop;
pub mod mutate;
mod path_glob;
mod policy;
mod retry;
mod sniff;
mod target;

pub use cache::CACHE;
pub use deadline::DEADLINE;
pub use fanout::FANOUT;
pub use framing::FRAMING;
pub use hello::HELLO;
pub use hop_by_hop::HOP_BY_HOP;
pub use path_glob::PATH_GLOB;
pub use policy::POLICY;
pub use retry::RETRY;
pub use sniff::SNIFF;
pub use target::TARGET;

/// Something to be fuzzed.
pub struct Target {
    /// Panics when what must hold does not.
    pub check: fn(&[u8]),
    /// Where mutation starts.
    pub seeds: &'static [&'static str],
    /// How many inputs make a smoke test of about two seconds.
    pub inputs: usize,
}
