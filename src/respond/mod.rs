//! What hedgerow says by itself, and what it adds to what an upstream says.

pub mod degraded;
pub mod error;
pub mod headers;
pub mod rate_limit;
