//! `hedgerow demo`, as a new user runs it.

use std::net::TcpListener;
use std::time::Duration;

use tokio::process::Command;

use super::support::within;

/// A line of the demo's table.
struct Row {
    p50: u64,
    p99: u64,
    answered: u64,
    upstream_requests: u64,
}

impl Row {
    fn of(report: &str, name: &str) -> Self {
        // Two spaces end a name: `gather` is no `gather, 600 ms`.
        let line = report.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix("  "));
        let line = line.unwrap_or_else(|| panic!("no row {name:?} in:\n{report}"));
        let numbers: Vec<u64> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        let [p50, p99, answered, _least, upstream_requests] = numbers[..] else { panic!("row {line:?}") };
        Self { p50, p99, answered, upstream_requests }
    }
}

#[tokio::test]
async fn the_demo_shows_a_shorter_tail_and_no_answer_lost_of_the_thirteen_tools_that_are_well() {
    // Whether we got the usual port or somebody else has it: it is taken.
    let _taken = TcpListener::bind("127.0.0.1:15300");

    let demo = Command::new(env!("CARGO_BIN_EXE_hedgerow")).arg("demo").kill_on_drop(true).output();
    let output = within(Duration::from_secs(60), demo).await.expect("the binary can be started");
    let (report, log) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}: {log}", output.status);
    assert_eq!(log, "", "the demo logs something");
    assert!(!report.contains('\x1b'), "colours in a pipe");

    let (sequential, gather) = (Row::of(&report, "sequential"), Row::of(&report, "gather"));
    let hedgerow = Row::of(&report, "hedgerow");
    assert!(hedgerow.p99 < gather.p99 && gather.p99 < sequential.p99, "{report}");
    assert!(hedgerow.p50 < gather.p50, "{report}");
    assert!(hedgerow.answered >= 13, "{report}");
    // Hedges add a tenth at most; what the breakers hold back comes off.
    assert_eq!(gather.upstream_requests, 300, "{report}");
    assert!(hedgerow.upstream_requests <= 330, "{report}");
    for tool in ["quotes", "archive", "ledger"] {
        assert!(report.lines().any(|line| line.starts_with(tool) && line.contains('█')), "{report}");
    }
}
