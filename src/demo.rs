//! Placeholder until the demo lands.

/// Runs the demo.
pub fn run() -> Result<(), String> {
    Err("not yet".into())
}
