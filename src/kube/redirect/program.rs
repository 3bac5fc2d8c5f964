//! Runs a program that changes rules, and tells from its words what keeps it from that, and what would help.

use std::env;
use std::io::{self, ErrorKind, Write};
use std::process::{Command, Output, Stdio};

use thiserror::Error;

/// Why a program did not do it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Why {
    Absent,
    Rights,
    Kernel,
    Other,
}

/// A program that did not do it. The message says what would help.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{message}")]
pub(super) struct Refused {
    pub(super) why: Why,
    message: String,
}

impl Refused {
    /// A program that is not on this machine.
    pub(super) fn absent(program: &str) -> Self {
        let package = if program == "nft" { "nftables" } else { "iptables" };
        let message = format!("{program} is not installed: it comes with the package {package}");
        Self { why: Why::Absent, message }
    }

    /// Where IPv6 was asked for and the kernel has none.
    pub(super) fn no_ipv6() -> Self {
        Self { why: Why::Kernel, message: "IPv6 is to be redirected, but there is none here".into() }
    }

    /// From what the program printed as it failed.
    fn told(program: &str, told: &str) -> Self {
        let told = told.trim();
        let why = judge(told);
        let help = match why {
            Why::Rights if program.contains("legacy") || told.contains("(legacy)") => {
                "it takes the capabilities NET_ADMIN and NET_RAW"
            }
            Why::Rights => "it takes the capability NET_ADMIN",
            Why::Kernel => "the kernel lacks what the rules need: nat, or a module for it that is not loaded",
            Why::Absent | Why::Other if told.contains("lock file") => {
                "its lock file cannot be written: run it as root with NET_ADMIN and NET_RAW, and where the folder \
                 is read-only, name another file with XTABLES_LOCKFILE"
            }
            Why::Absent | Why::Other => "the rules were refused",
        };
        Self { why, message: format!("{program} failed: {help}. It says: {told}") }
    }

    /// With what came of taking back.
    pub(super) fn and_then(mut self, taken_back: Result<(), Self>, otherwise: &str) -> Self {
        if let Err(refused) = taken_back {
            self.message += &format!("\n{otherwise}: {}", refused.message);
        }
        self
    }
}

/// What kind of failure the words of nft, iptables and iptables-legacy mean. Their exit codes do not tell.
fn judge(told: &str) -> Why {
    const RIGHTS: [&str; 3] = ["Operation not permitted", "Permission denied", "you must be root"];
    const KERNEL: [&str; 6] = [
        "Table does not exist",
        "Protocol not supported",
        "Operation not supported",
        "No such file or directory",
        "No chain/target/match by that name",
        "Address family not supported",
    ];
    let says = |words: &[&str]| words.iter().any(|word| told.contains(word));
    match () {
        () if told.contains("lock file") => Why::Other,
        () if says(&RIGHTS) => Why::Rights,
        () if says(&KERNEL) => Why::Kernel,
        () => Why::Other,
    }
}

/// Runs a program with this on its standard input: what it printed.
pub(super) fn run(program: &str, arguments: &[&str], input: &str) -> Result<String, Refused> {
    let output = feed(program, arguments, input).map_err(|error| match error.kind() {
        ErrorKind::NotFound => Refused::absent(program),
        _ => Refused { why: Why::Other, message: format!("{program} cannot be run: {error}") },
    })?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(Refused::told(program, &String::from_utf8_lossy(&output.stderr))),
    }
}

fn feed(program: &str, arguments: &[&str], input: &str) -> io::Result<Output> {
    let mut child = Command::new(program)
        .args(arguments)
        .env("PATH", search_path())
        // What it says is read here.
        .env("LC_ALL", "C")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        match stdin.write_all(input.as_bytes()) {
            // It failed before it had read all: why, it tells itself.
            Err(error) if error.kind() != ErrorKind::BrokenPipe => return Err(error),
            _ => {}
        }
    }
    child.wait_with_output()
}

/// Whether the program is on this machine.
pub(super) fn is_found(program: &str) -> bool {
    env::split_paths(&search_path()).any(|folder| folder.join(program).is_file())
}

/// Where programs are, those of the system included, which are not in everybody's `PATH`.
fn search_path() -> String {
    const SYSTEM: &str = "/usr/sbin:/sbin:/usr/bin:/bin";
    match env::var("PATH") {
        Ok(path) if !path.is_empty() => format!("{path}:{SYSTEM}"),
        // An empty part would be the current folder.
        _ => SYSTEM.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_tell_what_would_help() {
        let legacy = "iptables v1.8.9 (legacy): can't initialize iptables table `nat': ";
        for (program, told, why, help) in [
            (
                "nft",
                "Error: Could not process rule: Operation not permitted",
                Why::Rights,
                "capability NET_ADMIN.",
            ),
            (
                "iptables",
                "iptables v1.8.9 (nf_tables): Could not fetch rule set generation id: Permission denied (you must be root)",
                Why::Rights,
                "capability NET_ADMIN.",
            ),
            ("iptables", &format!("{legacy}Permission denied (you must be root)"), Why::Rights, "NET_RAW"),
            (
                "iptables",
                &format!("{legacy}Table does not exist (do you need to insmod?)"),
                Why::Kernel,
                "kernel lacks",
            ),
            ("nft", "Error: Could not process rule: No such file or directory", Why::Kernel, "kernel lacks"),
            (
                "iptables-restore",
                "Fatal: can't open lock file /run/xtables.lock: Read-only file system",
                Why::Other,
                "XTABLES_LOCKFILE",
            ),
            (
                "iptables-restore",
                "Fatal: can't open lock file /run/xtables.lock: Permission denied",
                Why::Other,
                "XTABLES_LOCKFILE",
            ),
            ("nft", "Error: syntax error", Why::Other, "refused"),
        ] {
            let refused = Refused::told(program, told);
            assert_eq!(refused.why, why, "{told}");
            assert!(refused.message.contains(help) && refused.message.ends_with(told), "{}", refused.message);
        }
    }

    #[test]
    fn an_absent_program_is_told_with_its_package() {
        assert_eq!(
            Refused::absent("nft").message,
            "nft is not installed: it comes with the package nftables"
        );
        assert!(Refused::absent("ip6tables-restore").message.ends_with("the package iptables"));
    }
}
