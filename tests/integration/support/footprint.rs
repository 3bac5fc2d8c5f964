//! What a process takes from its machine, read from `/proc`.

use std::fs;

use rustix::process::Pid;

/// Memory and descriptors of a process at one moment.
#[derive(Debug, Clone, Copy)]
pub struct Footprint {
    /// Resident memory in KiB.
    pub resident_kib: u64,
    /// Open descriptors.
    pub descriptors: usize,
    /// Threads.
    pub threads: u64,
}

impl Footprint {
    /// Of a process that runs.
    pub fn of(pid: Pid) -> Self {
        let proc = format!("/proc/{}", pid.as_raw_nonzero());
        let status = fs::read_to_string(format!("{proc}/status")).expect("the process runs");
        let number = |key: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(key)).expect("a known key");
            line.trim().trim_end_matches(" kB").parse().expect("a number")
        };
        Self {
            resident_kib: number("VmRSS:"),
            threads: number("Threads:"),
            descriptors: fs::read_dir(format!("{proc}/fd")).expect("the process runs").count(),
        }
    }
}
