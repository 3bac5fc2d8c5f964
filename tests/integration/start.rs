//! What keeps the process from starting, and how it says so.

use std::fs;
use std::net::TcpListener;

use tempfile::TempDir;

use crate::support::command::{Finished, hedgerow};
use crate::support::hedgerow::HedgerowProcess;

/// Starts on a file with this content.
async fn start_on(content: impl AsRef<[u8]>) -> Finished {
    let folder = TempDir::new().expect("a temporary folder");
    fs::write(folder.path().join("policy.yaml"), content).expect("a file can be written");
    hedgerow(folder.path(), &["run", "--config", "policy.yaml"]).await
}

#[tokio::test]
async fn a_port_in_use_is_named_with_its_key() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    for (key, other) in [("proxy", "admin"), ("admin", "proxy")] {
        let refused = start_on(format!("listen: {{ {key}: \"{address}\", {other}: 127.0.0.1:0 }}")).await;
        assert_eq!(refused.code, 1);
        assert!(
            refused.stderr.contains(&format!("cannot listen on {address} (listen.{key})")),
            "{}",
            refused.stderr
        );
        assert!(refused.stderr.contains("in use"), "{}", refused.stderr);
        assert_eq!(refused.stdout, "");
    }
}

// Without a file the built-in policy holds, its ports included.
#[tokio::test]
async fn the_default_ports_are_15300_and_15302() {
    let folder = TempDir::new().unwrap();
    // Whoever else has the port now may let go of it before we look.
    let _taken = loop {
        match TcpListener::bind("127.0.0.1:15300") {
            Ok(listener) => break listener,
            Err(_) => tokio::time::sleep(std::time::Duration::from_millis(20)).await,
        }
    };
    let refused = hedgerow(folder.path(), &["run"]).await;
    assert_eq!(refused.code, 1);
    assert!(refused.stderr.contains("cannot listen on 127.0.0.1:15300 (listen.proxy)"), "{}", refused.stderr);
}

#[tokio::test]
async fn a_file_that_is_no_policy_keeps_the_process_from_starting() {
    for (content, message) in [
        (&b""[..], "policy.yaml:1:1: the file is empty"),
        (b"# nothing but a comment\n", "policy.yaml:1:1: the file is empty"),
        (b"defaults: { bulkhead: { max_conc", "policy.yaml:1:"),
        (b"drain: { max: 1s }\ndrain: { max: 2s }\n", "policy.yaml:2:1: drain: duplicate key"),
        (b"- a list\n", "policy.yaml:1:1: expected a mapping"),
        (b"\xff\xfe\x00", "policy.yaml:1:1: the file is not UTF-8"),
        (b"drain: { max: -1s }\n", "policy.yaml:1:15: drain.max: expected a duration"),
        (b"drian: { max: 1s }\n", "did you mean `drain`?"),
    ] {
        let refused = start_on(content).await;
        assert_eq!(refused.code, 1, "{message}");
        assert!(refused.stderr.contains(message), "{message} not in\n{}", refused.stderr);
        assert_eq!(refused.stdout, "");
    }
}

#[tokio::test]
async fn every_problem_is_told_at_once() {
    let refused =
        start_on("drain: { max: never }\nlimits: { head: lots }\ndefaults: { hedge: { after: p0 } }\n").await;
    assert_eq!(refused.code, 1);
    for place in [
        "policy.yaml:1:15: drain.max",
        "policy.yaml:2:17: limits.head",
        "policy.yaml:3:29: defaults.hedge.after",
    ] {
        assert!(refused.stderr.contains(place), "{place} not in\n{}", refused.stderr);
    }
}

#[tokio::test]
async fn a_file_that_is_not_there_and_a_folder_are_refused() {
    let folder = TempDir::new().unwrap();
    let absent = hedgerow(folder.path(), &["run", "--config", "policy.yaml"]).await;
    assert_eq!(absent.code, 1);
    assert!(absent.stderr.contains("cannot read policy.yaml: No such file"), "{}", absent.stderr);
    let directory = hedgerow(folder.path(), &["run", "--config", "."]).await;
    assert_eq!(directory.code, 1);
    assert!(directory.stderr.contains("is no regular file"), "{}", directory.stderr);
    std::os::unix::fs::symlink("loop", folder.path().join("loop")).unwrap();
    let endless = hedgerow(folder.path(), &["run", "--config", "loop"]).await;
    assert_eq!(endless.code, 1);
    assert!(endless.stderr.contains("cannot read loop"), "{}", endless.stderr);
}

// A proxy that anyone can reach is a weapon.
#[tokio::test]
async fn a_port_beyond_loopback_needs_to_say_for_whom() {
    for address in ["0.0.0.0:0", "[::]:0"] {
        let refused = start_on(format!("listen: {{ proxy: \"{address}\", admin: 127.0.0.1:0 }}")).await;
        assert_eq!(refused.code, 1, "{address}");
        assert!(refused.stderr.contains("listen.proxy: not a loopback address"), "{}", refused.stderr);
        assert!(refused.stderr.contains("`listen.clients`"), "{}", refused.stderr);
    }
}

#[tokio::test]
async fn a_secret_that_is_not_there_is_named_and_never_shown() {
    let set = "upstreams: { a: { hosts: [a.example], rewrite: { headers: { set: { x-key: '${env:NOT_SET}' } } } } }";
    let refused = start_on(set).await;
    assert_eq!(refused.code, 1);
    assert!(refused.stderr.contains("NOT_SET"), "{}", refused.stderr);

    let broken =
        HedgerowProcess::with(&format!("{set}\ndrain: {{ max: never }}")).env("NOT_SET", "sesame-4711");
    let (code, stderr) = broken.refused().await;
    assert_eq!(code, 1);
    assert!(!stderr.contains("sesame"), "{stderr}");
}
