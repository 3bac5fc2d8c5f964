//! README.md is true: its policies load, its commands run, its keys and metrics are those that there are.
//!
//! Blocks marked `sh` are run, line by line as one script that ends at the first failure, beside a hedgerow and a
//! tool that answers; the ports and `api.example.com` stand for theirs. Blocks marked `yaml` are policies. The quick
//! start has no mark: what runs this test is one of its two commands.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use serde_json::Value;
use tempfile::TempDir;
use tokio::process::Command;

use crate::support::command::{finished, hedgerow};
use crate::support::hedgerow::HedgerowProcess;
use crate::support::upstream::{Reply, Upstream};

const README: &str = include_str!("../../README.md");
const EXAMPLE: &str = include_str!("../../config.example.yaml");

/// The contents of the blocks that begin with three backticks and this mark.
fn blocks(mark: &str) -> Vec<&'static str> {
    let mut parts = README.split("\n```");
    let mut found = Vec::new();
    // What stands before the first fence, then by turns a block and what stands between two.
    parts.next();
    while let Some(block) = parts.next() {
        let (found_mark, content) = block.split_once('\n').expect("a block has a first line");
        if found_mark == mark {
            found.push(content);
        }
        parts.next();
    }
    assert!(!found.is_empty(), "no {mark} block");
    found
}

/// The text under this heading, up to the next of any depth.
fn section(heading: &str) -> &'static str {
    let start =
        README.find(&format!("\n{heading}\n")).unwrap_or_else(|| panic!("no {heading}")) + heading.len() + 2;
    let end = README[start..].find("\n#").map_or(README.len(), |end| start + end);
    &README[start..end]
}

/// The first column of the tables that begin with this head.
fn first_column(text: &'static str, head: &str) -> Vec<&'static str> {
    let mut cells = Vec::new();
    let mut is_inside = false;
    for line in text.lines() {
        is_inside = line.starts_with(&format!("| {head} |")) || is_inside && line.starts_with('|');
        if is_inside && line.starts_with("| `") {
            cells.push(line[3..].split('`').next().expect("a quoted cell"));
        }
    }
    cells
}

#[test]
fn the_quick_start_is_two_commands() {
    let block = section("## Quick start").split("```").nth(1).unwrap();
    assert_eq!(block.trim(), "cargo run --release -- demo\nmake test");
}

#[tokio::test]
async fn every_policy_of_the_readme_is_one() {
    let folder = TempDir::new().unwrap();
    for policy in blocks("yaml") {
        fs::write(folder.path().join("policy.yaml"), policy).unwrap();
        let check = hedgerow(folder.path(), &["check", "policy.yaml"]).await;
        assert_eq!((check.code, check.stderr.as_str()), (0, ""), "{policy}");
    }
}

/// Whether all that `part` says stands in `whole` too. Lists are values.
fn is_part(part: &Value, whole: &Value) -> bool {
    match (part, whole) {
        (Value::Object(part), Value::Object(whole)) => {
            part.iter().all(|(key, value)| whole.get(key).is_some_and(|there| is_part(value, there)))
        }
        // The routes of an upstream may be told in part, one after the other.
        (Value::Array(part), Value::Array(whole)) if part.iter().all(Value::is_object) => {
            part.len() <= whole.len() && part.iter().zip(whole).all(|(part, whole)| is_part(part, whole))
        }
        _ => part == whole,
    }
}

#[test]
fn every_policy_of_the_readme_is_part_of_the_example_file() {
    let parse = |text: &str| serde_yaml::from_str::<Value>(text).unwrap();
    let example = parse(EXAMPLE);
    for policy in blocks("yaml") {
        assert!(is_part(&parse(policy), &example), "not in config.example.yaml:\n{policy}");
    }
}

#[tokio::test]
async fn the_keys_of_each_stage_are_those_of_the_schema() {
    let schema: Value = serde_json::from_str(&hedgerow(Path::new("/"), &["schema"]).await.stdout).unwrap();
    for (heading, stages) in [
        ("### Deadline", &["Deadline"][..]),
        ("### Hedge", &["Hedge", "ExtraLoad"]),
        ("### Bulkhead", &["Bulkhead"]),
        ("### Breaker", &["Breaker"]),
        ("### Retry", &["Retry"]),
        ("### Rate limit", &["RateLimit"]),
        ("### Coalesce", &["Coalesce"]),
        ("### Cache", &["Cache"]),
        ("### Fallback", &["FallbackStep", "Degraded"]),
        ("### Egress", &["Egress"]),
        ("## Many pods", &["SharedState"]),
    ] {
        let keys =
            stages.iter().flat_map(|stage| schema["$defs"][stage]["properties"].as_object().unwrap().keys());
        let keys: Vec<&str> = keys.map(String::as_str).collect();
        assert_eq!(first_column(section(heading), "key"), keys, "{heading}");
    }
}

#[test]
fn the_keys_of_a_fan_out_are_those_of_its_description() {
    let document: Value = serde_json::from_str(include_str!("../../src/fanout/openapi.json")).unwrap();
    let keys = |schema: &str| -> Vec<String> {
        document["components"]["schemas"][schema]["properties"].as_object().unwrap().keys().cloned().collect()
    };
    assert_eq!(first_column(section("## Fan-out"), "list key"), keys("FanOut"));
    assert_eq!(first_column(section("## Fan-out"), "call key"), keys("Call"));
    for answer in blocks("json") {
        let answer: Value = serde_json::from_str(answer).unwrap();
        let told = answer.as_object().unwrap().keys().filter(|key| *key != "results");
        assert!(told.eq(keys("Summary").iter().filter(|key| *key != "system_prompt")), "{answer}");
    }
}

#[tokio::test]
async fn the_metrics_of_the_readme_are_those_of_a_running_process() {
    let upstream = Upstream::answering(|_| Reply::ok("")).await;
    // That nobody is there to share it with is no matter.
    let (nowhere, _held) = Upstream::dead();
    let policy = format!("shared_state: {{ redis: \"redis://{nowhere}\" }}");
    let hedgerow = HedgerowProcess::start(&policy).await;
    hedgerow.get(&upstream.url("/")).await;
    hedgerow.until_metrics(|metrics| metrics.value("hedgerow_requests_total", &[]) == 1.0).await;
    let scrape = hedgerow.ask_admin("GET", "/metrics").await;
    let names = scrape.text().lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
    let told = first_column(README, "metric").into_iter().map(|series| series.split('{').next().unwrap());
    assert_eq!(told.collect::<BTreeSet<_>>(), names.collect::<BTreeSet<_>>());
}

#[tokio::test]
async fn every_command_of_the_readme_is_one_of_the_binary() {
    let help = hedgerow(Path::new("/"), &["--help"]).await.stdout;
    let (_, commands) = help.split_once("Commands:\n").unwrap();
    let names = commands.lines().take_while(|line| !line.is_empty());
    // Continued descriptions are indented further.
    let names =
        names.filter(|line| !line.starts_with("   ")).filter_map(|line| line.split_whitespace().next());
    let told =
        first_column(section("## Running it"), "command").into_iter().map(|c| c.split(' ').nth(1).unwrap());
    assert_eq!(told.collect::<Vec<_>>(), names.filter(|name| *name != "help").collect::<Vec<_>>());
}

#[tokio::test]
async fn every_command_block_of_the_readme_runs() {
    let tool = Upstream::answering(|seen| Reply::ok(format!("{}\n", seen.path()))).await;
    let hedgerow = HedgerowProcess::start("{}").await;
    let folder = hedgerow.policy.folder();
    // A status of 400 and above is a failure.
    fs::write(folder.join(".curlrc"), "fail\nsilent\nshow-error\nmax-time = 10\n").unwrap();
    let binaries = Path::new(env!("CARGO_BIN_EXE_hedgerow")).parent().unwrap();
    let path = format!("{}:{}", binaries.display(), std::env::var("PATH").unwrap());
    let (proxy, admin) = (hedgerow.proxy.to_string(), hedgerow.admin.to_string());
    for block in blocks("sh") {
        let script = block
            .replace("127.0.0.1:15300", &proxy)
            .replace("127.0.0.1:15302", &admin)
            .replace("api.example.com", &tool.address().to_string());
        let mut bash = Command::new("bash");
        bash.args(["-euo", "pipefail", "-c", &script]).current_dir(folder);
        bash.env_clear().env("PATH", &path).env("HOME", folder);
        let ran = finished(bash).await;
        assert_eq!(ran.code, 0, "{script}\n{}\n{}", ran.stdout, ran.stderr);
    }
    for ticker in ["AAPL", "MSFT", "NVDA", "TSLA"] {
        assert_eq!(tool.count_of(&format!("/v1/quote/{ticker}")), 1, "{ticker}");
    }
    // Only what talks to the running process stands under a fixed port.
    assert!(!README.contains("localhost:"), "addresses are written as 127.0.0.1");
}
