//! The command line: what it prints, where, and with which exit code.

use std::fs;
use std::path::Path;
use std::process::Stdio;

use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;
use tokio::process::Command;

use crate::support::command::{Finished, finished, hedgerow, hedgerow_with};
use crate::support::hedgerow::HedgerowProcess;

fn folder_with(policy: &str) -> TempDir {
    let folder = TempDir::new().expect("a temporary folder");
    fs::write(folder.path().join("policy.yaml"), policy).expect("a file can be written");
    folder
}

async fn check(policy: &str) -> Finished {
    let folder = folder_with(policy);
    hedgerow(folder.path(), &["check", "policy.yaml"]).await
}

#[tokio::test]
async fn check_says_ok_and_nothing_else_about_a_good_policy() {
    for policy in ["{}", include_str!("../../config.example.yaml")] {
        let good = check(policy).await;
        assert_eq!((good.code, good.stdout.as_str(), good.stderr.as_str()), (0, "policy.yaml: ok\n", ""));
    }
}

#[tokio::test]
async fn check_points_at_every_problem_and_fails() {
    let bad = check(
        "defaults:\n  hedg: off\n  deadline: { max: -3s }\nupstreams:\n  quotes: { hosts: [a.example], hosts: [b.example] }\n",
    )
    .await;
    assert_eq!((bad.code, bad.stdout.as_str()), (1, ""));
    let expected = "\
policy.yaml:2:3: defaults.hedg: unknown key; did you mean `hedge`?
  2 |   hedg: off
    |   ^
policy.yaml:3:20: defaults.deadline.max: expected a duration such as 250ms, 1.5s, 2m or 1h; found `-3s`
  3 |   deadline: { max: -3s }
    |                    ^
policy.yaml:5:33: upstreams.quotes.hosts: duplicate key; it is already set in line 5
  5 |   quotes: { hosts: [a.example], hosts: [b.example] }
    |                                 ^
";
    assert_eq!(bad.stderr, expected);
}

#[tokio::test]
async fn check_warns_where_percentile_and_budget_disagree_and_passes() {
    let warned = check("defaults: { hedge: { after: p75 } }\n").await;
    assert_eq!((warned.code, warned.stdout.as_str()), (0, "policy.yaml: ok\n"));
    assert!(
        warned.stderr.starts_with("policy.yaml:1:29: warning: defaults.hedge.after: "),
        "{}",
        warned.stderr
    );
    assert!(warned.stderr.contains("25%") && !warned.stderr.ends_with("\n\n"), "{}", warned.stderr);
}

#[tokio::test]
async fn check_of_a_file_that_is_not_there_fails() {
    let absent = hedgerow(Path::new("/"), &["check", "no/such/policy.yaml"]).await;
    assert_eq!((absent.code, absent.stdout.as_str()), (1, ""));
    assert!(absent.stderr.contains("cannot read no/such/policy.yaml"), "{}", absent.stderr);
}

const QUOTES: &str = "\
defaults: { hedge: off }
upstreams:
  quotes:
    hosts: [quotes.example, '*.quotes.example:8443']
    bulkhead: { max_concurrent: 20 }
    routes:
      - name: search
        path: /v1/search/**
        methods: [POST]
        bulkhead: { max_concurrent: 5 }
";

#[tokio::test]
async fn explain_tells_upstream_route_and_the_line_of_each_value() {
    let folder = folder_with(QUOTES);
    let explain = ["explain", "policy.yaml", "http://quotes.example/v1/search/x?q=1", "-X", "POST"];
    let told = hedgerow(folder.path(), &explain).await;
    assert_eq!((told.code, told.stderr.as_str()), (0, ""));
    let (head, values) = told.stdout.split_once("\n\n").unwrap();
    assert_eq!(
        head,
        "to         quotes.example:80\nupstream   quotes (host quotes.example, line 4)\nroute      search (line 7)",
    );
    let value = |key: &str| {
        let line = values.lines().find(|line| line.split_whitespace().next() == Some(key));
        line.unwrap_or_else(|| panic!("{key} in\n{values}"))
            .split("  ")
            .filter(|part| !part.is_empty())
            .map(str::trim)
            .collect::<Vec<_>>()
    };
    assert_eq!(
        value("bulkhead.max_concurrent"),
        ["bulkhead.max_concurrent", "5", "line 10, upstreams.quotes.routes[0]"]
    );
    assert_eq!(value("bulkhead.max_queue"), ["bulkhead.max_queue", "100", "built in"]);
    assert_eq!(value("hedge"), ["hedge", "off", "line 1, defaults"]);

    // Another method takes no route, another host no upstream.
    let get =
        hedgerow(folder.path(), &["explain", "policy.yaml", "https://a.quotes.example:8443/v1/search/x"])
            .await;
    assert!(get.stdout.starts_with("to         a.quotes.example:8443\nupstream   quotes (host *.quotes.example:8443, line 4)\nroute      none\n"), "{}", get.stdout);
    let other = hedgerow(folder.path(), &["explain", "policy.yaml", "https://other.example/"]).await;
    assert!(other.stdout.contains("upstream   default (no upstream names the host)\n"), "{}", other.stdout);
}

#[tokio::test]
async fn explain_refuses_what_is_no_url_and_a_broken_policy() {
    let folder = folder_with(QUOTES);
    for url in ["quotes.example/v1", "ftp://quotes.example/", "http://", "http://a b/"] {
        let refused = hedgerow(folder.path(), &["explain", "policy.yaml", url]).await;
        assert_eq!((refused.code, refused.stdout.as_str()), (1, ""), "{url}");
        assert!(!refused.stderr.is_empty());
    }
    fs::write(folder.path().join("policy.yaml"), "[]").unwrap();
    let broken = hedgerow(folder.path(), &["explain", "policy.yaml", "http://quotes.example/"]).await;
    assert_eq!(broken.code, 1);
    assert!(broken.stderr.starts_with("policy.yaml:1:1: "), "{}", broken.stderr);
}

#[tokio::test]
async fn schema_is_json_and_refuses_unknown_keys() {
    let printed = hedgerow(Path::new("/"), &["schema"]).await;
    assert_eq!((printed.code, printed.stderr.as_str()), (0, ""));
    let schema: Value = serde_json::from_str(&printed.stdout).unwrap();
    assert_eq!((&schema["type"], &schema["additionalProperties"]), (&"object".into(), &false.into()));
    for key in ["listen", "limits", "dns", "egress", "tls", "drain", "telemetry", "defaults", "upstreams"] {
        assert!(schema["properties"][key]["description"].is_string(), "{key}");
    }
}

#[tokio::test]
async fn wrong_usage_ends_with_2_and_help_with_0() {
    for arguments in [
        &[][..],
        &["serve"],
        &["check"],
        &["check", "a", "b"],
        &["run", "--port", "1"],
        &["run", "--config"],
        &["explain", "policy.yaml"],
        &["explain", "policy.yaml", "http://a/", "-X", "GE T"],
        &["--log-level", "a=b=c", "schema"],
        &["redirect", "--ports", "80,65536"],
        &["redirect", "--exclude-cidrs", "10.0.0.0/33"],
        &["redirect", "--proxy-uid", "0"],
    ] {
        let wrong = hedgerow(Path::new("/"), arguments).await;
        assert_eq!((wrong.code, wrong.stdout.as_str()), (2, ""), "{arguments:?}");
        assert!(!wrong.stderr.is_empty(), "{arguments:?}");
    }
    let help = hedgerow(Path::new("/"), &["--help"]).await;
    assert_eq!(help.code, 0);
    for command in ["run", "check", "explain", "schema", "demo", "redirect"] {
        assert!(help.stdout.contains(&format!("\n  {command} ")), "{}", help.stdout);
    }
    let version = hedgerow(Path::new("/"), &["--version"]).await;
    assert_eq!((version.code, version.stdout), (0, format!("hedgerow {}\n", env!("CARGO_PKG_VERSION"))));
}

// `hedgerow schema | head -1` ended in a panic.
#[tokio::test]
async fn a_reader_that_has_gone_is_no_failure() {
    let folder = folder_with(QUOTES);
    for arguments in
        [&["schema"][..], &["check", "policy.yaml"], &["explain", "policy.yaml", "http://quotes.example/"]]
    {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = Command::new(env!("CARGO_BIN_EXE_hedgerow"));
        command.args(arguments).current_dir(folder.path()).stdout(Stdio::from(writer));
        let ended = finished(command).await;
        assert_eq!((ended.code, ended.stderr.as_str()), (0, ""), "{arguments:?}");
    }
}

#[tokio::test]
async fn every_flag_has_a_variable() {
    let folder = folder_with("[]");
    let from_variable = hedgerow_with(folder.path(), &["run"], &[("HEDGEROW_CONFIG", "policy.yaml")]).await;
    assert_eq!(from_variable.code, 1);
    assert!(from_variable.stderr.contains("policy.yaml:1:1: "), "{}", from_variable.stderr);
    // The flag is nearer than the variable.
    let other = hedgerow_with(
        folder.path(),
        &["run", "--config", "absent.yaml"],
        &[("HEDGEROW_CONFIG", "policy.yaml")],
    )
    .await;
    assert!(other.stderr.contains("cannot read absent.yaml"), "{}", other.stderr);
    let level = hedgerow_with(folder.path(), &["schema"], &[("HEDGEROW_LOG_LEVEL", "a=b=c")]).await;
    assert_eq!(level.code, 2);
}

#[tokio::test]
async fn the_log_level_decides_what_is_told() {
    let told = async |level: &str| {
        let mut hedgerow =
            HedgerowProcess::with("drain: { quiet: 1ms }").env("HEDGEROW_LOG_LEVEL", level).start().await;
        hedgerow.signal(Signal::TERM);
        assert_eq!(hedgerow.wait().await, 0);
        hedgerow.stderr.text()
    };
    assert_eq!(told("error").await, "");
    let info = told("info").await;
    // A line of JSON for each message, since nobody sits at a terminal.
    let messages: Vec<Value> = info.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let texts: Vec<&str> = messages.iter().map(|message| message["message"].as_str().unwrap()).collect();
    assert_eq!(texts, ["hedgerow listens", "draining", "leaving"]);
    assert_eq!(messages[0]["level"], "INFO");
    assert!(messages[0]["proxy"].as_str().unwrap().starts_with("127.0.0.1:"));
}
