//! What can be seen of hedgerow from outside: numbers, a line for each request, and operational messages.

pub mod log;
pub mod metrics;
