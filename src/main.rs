//! The `hedgerow` binary.

fn main() {}
