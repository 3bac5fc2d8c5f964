//! The `hedgerow` binary: see [`hedgerow::cli`].

use std::process::ExitCode;

use clap::Parser;

/// Gives memory back to the system when connections go, which the system's allocator does not.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    hedgerow::cli::run(hedgerow::cli::Arguments::parse())
}
