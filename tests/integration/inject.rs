//! `hedgerow inject` and `hedgerow uninject`: what goes in, what comes out, where, and with which exit code.

use std::fs;
use std::path::Path;
use std::process::Stdio;

use serde_json::Value;
use tempfile::TempDir;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

use crate::support::command::{Finished, hedgerow, hedgerow_with};
use crate::support::soon;

const AGENT: &str = include_str!("../k8s/manifests/agent.yaml");
const MIXED: &str = include_str!("../k8s/manifests/mixed.yaml");

fn folder(files: &[(&str, &str)]) -> TempDir {
    let folder = TempDir::new().expect("a temporary folder");
    for (name, text) in files {
        fs::write(folder.path().join(name), text).expect("a file can be written");
    }
    folder
}

/// Runs with `text` on standard input.
async fn piped(arguments: &[&str], text: &str) -> Finished {
    let mut child = Command::new(env!("CARGO_BIN_EXE_hedgerow"))
        .args(arguments)
        .env_clear()
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("the binary under test can be started");
    let mut stdin = child.stdin.take().expect("stdin is piped");
    stdin.write_all(text.as_bytes()).await.expect("the text is read");
    drop(stdin);
    let output = soon(child.wait_with_output()).await.expect("the command ends");
    let text = |bytes| String::from_utf8(bytes).expect("output is text");
    Finished {
        code: output.status.code().expect("it ends by itself"),
        stdout: text(output.stdout),
        stderr: text(output.stderr),
    }
}

#[tokio::test]
async fn a_manifest_comes_out_as_the_golden_one_and_goes_back_to_its_bytes() {
    for (text, golden) in [
        (AGENT, include_str!("../k8s/manifests/agent.injected.yaml")),
        (MIXED, include_str!("../k8s/manifests/mixed.injected.yaml")),
    ] {
        let injected = piped(&["inject", "--image=registry.example/hedgerow:1", "-"], text).await;
        assert_eq!((injected.code, injected.stdout.as_str()), (0, golden), "{}", injected.stderr);
        let again = piped(&["inject"], golden).await;
        assert_eq!((again.code, again.stdout.as_str()), (0, golden));
        let back = piped(&["uninject"], golden).await;
        assert_eq!((back.code, back.stdout.as_str()), (0, text), "{}", back.stderr);
    }
}

#[tokio::test]
async fn the_report_has_a_line_for_each_document() {
    let files = folder(&[("mixed.yaml", MIXED)]);
    let injected = hedgerow(files.path(), &["inject", "mixed.yaml"]).await;
    assert_eq!(injected.code, 0);
    let expected = "\
mixed.yaml:2: Service web: not a workload
mixed.yaml:12: Deployment agents/planner: injected
  warning: container planner sets HTTPS_PROXY itself, which stays as it is
mixed.yaml:12: DaemonSet agents/node-agent: skipped: it uses the node's network (hostNetwork)
mixed.yaml:41: Rollout agents/canary: injected
mixed.yaml:56: CronJob agents/digest: injected
mixed.yaml:70: Pod opted-out: skipped: hedgerow.dev/inject says disabled
";
    assert_eq!(injected.stderr, expected);
}

#[tokio::test]
async fn files_folders_and_standard_input_are_read() {
    let files = folder(&[("b.yml", AGENT), ("a.json", r#"{"kind": "Service"}"#), ("c.txt", "no: [manifest")]);
    let all = hedgerow(files.path(), &["inject", "."]).await;
    assert_eq!(all.code, 0, "{}", all.stderr);
    assert!(all.stdout.starts_with("{\"kind\": \"Service\"}\n---\n"), "{}", all.stdout);
    let named = hedgerow(files.path(), &["inject", "-f", "a.json", "-f", "b.yml"]).await;
    assert_eq!(named.stdout, all.stdout);
    let one = hedgerow(files.path(), &["inject", "b.yml"]).await;
    assert_eq!(piped(&["inject", "-f", "-"], AGENT).await.stdout, one.stdout);
    let missing = hedgerow(files.path(), &["inject", "nothing.yaml"]).await;
    assert_eq!((missing.code, missing.stdout.as_str()), (1, ""));
    assert!(missing.stderr.contains("cannot read nothing.yaml: No such file"), "{}", missing.stderr);
    fs::create_dir(files.path().join("empty")).unwrap();
    let empty = hedgerow(files.path(), &["inject", "empty"]).await;
    assert_eq!(empty.code, 1);
    assert!(empty.stderr.contains("empty has no *.yaml, *.yml or *.json in it"), "{}", empty.stderr);
}

#[tokio::test]
async fn what_is_broken_is_told_with_its_place_and_nothing_is_written() {
    for (text, told) in [
        ("a: 1\nb: 2\na: 3\n", "bad.yaml:3:1: the key \"a\" is there twice"),
        ("a:\n\tb: 1\n", "bad.yaml:2:2: tabs disallowed"),
        ("a: 1\nb: [\n", "bad.yaml:2:4: unclosed bracket"),
        ("a: *nobody\n", "bad.yaml:1:4: "),
        ("{{ if .Values.agent }}\nkind: Pod\n", "bad.yaml:"),
    ] {
        let files = folder(&[("a.yaml", AGENT), ("bad.yaml", text)]);
        let broken = hedgerow(files.path(), &["inject", "a.yaml", "bad.yaml"]).await;
        assert_eq!((broken.code, broken.stdout.as_str()), (1, ""), "{}", broken.stderr);
        assert!(broken.stderr.contains(told), "{told} not in {}", broken.stderr);
    }
    let files = folder(&[]);
    fs::write(files.path().join("bad.yaml"), b"a: 1\nb: \xff\n").unwrap();
    let binary = hedgerow(files.path(), &["inject", "bad.yaml"]).await;
    assert!(binary.stderr.contains("bad.yaml:2: the text is not UTF-8"), "{}", binary.stderr);
}

#[tokio::test]
async fn a_denied_workload_keeps_all_from_being_written() {
    let denied = AGENT.replace("hedgerow.dev/cpu-request: 50m", "hedgerow.dev/cpu-request: lots");
    let files = folder(&[("a.yaml", AGENT), ("b.yaml", &denied)]);
    let refused = hedgerow(files.path(), &["inject", "."]).await;
    assert_eq!((refused.code, refused.stdout.as_str()), (1, ""));
    let told =
        "b.yaml:2: Deployment agents/agent: denied: annotation hedgerow.dev/cpu-request: expected an amount";
    assert!(refused.stderr.contains(told), "{}", refused.stderr);
}

#[tokio::test]
async fn where_nothing_is_injected_the_text_passes_and_the_exit_code_tells() {
    let text = "# mine\r\nkind: Service\r\napiVersion: v1\r\n---\r\n---\r\n# end";
    let none = piped(&["inject"], text).await;
    assert_eq!((none.code, none.stdout.as_str()), (1, text));
    assert_eq!(none.stderr, "stdin:2: Service: not a workload\nno workload was injected\n");
    let back = piped(&["uninject"], text).await;
    assert_eq!((back.code, back.stdout.as_str()), (0, text));
}

#[tokio::test]
async fn formats_can_be_chosen() {
    let json = piped(&["inject", "-o", "json"], AGENT).await.stdout;
    let value: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(value["spec"]["template"]["spec"]["initContainers"][0]["name"], "hedgerow");
    // The same from JSON, in which it stays.
    let plain = serde_json::to_string_pretty(&serde_yaml::from_str::<Value>(AGENT).unwrap()).unwrap();
    let from_json = piped(&["inject"], &plain).await.stdout;
    assert_eq!(serde_json::from_str::<Value>(&from_json).unwrap(), value);
    let yaml = piped(&["inject", "-o", "yaml"], &plain).await.stdout;
    assert_eq!(serde_yaml::from_str::<Value>(&yaml).unwrap(), value);
    assert!(yaml.starts_with("apiVersion: apps/v1\nkind: Deployment\n"), "{yaml}");

    let patch = piped(&["inject", "-o", "patch"], AGENT).await.stdout;
    let line: Value = serde_json::from_str(&patch).unwrap();
    assert_eq!(
        (&line["kind"], &line["namespace"], &line["name"]),
        (&"Deployment".into(), &"agents".into(), &"agent".into())
    );
    let operations = line["patch"].as_array().unwrap();
    assert!(operations.iter().all(|operation| operation["op"] == "add"));
    assert!(
        operations.iter().all(|operation| operation["path"].as_str().unwrap().starts_with("/spec/template/"))
    );
}

#[tokio::test]
async fn a_diff_shows_only_what_is_added() {
    let files = folder(&[("a.yaml", AGENT)]);
    let diff = hedgerow(files.path(), &["inject", "--diff", "a.yaml"]).await;
    assert!(diff.stdout.starts_with("--- a.yaml\n+++ a.yaml\n@@ "), "{}", diff.stdout);
    let removed: Vec<&str> = diff.stdout.lines().skip(2).filter(|line| line.starts_with('-')).collect();
    // What is in brackets grows on its line.
    assert_eq!(removed, ["-          volumeMounts: [{name: work, mountPath: /work}]"]);
    assert!(diff.stdout.contains("\n+        - name: hedgerow\n"), "{}", diff.stdout);
    assert_eq!(fs::read_to_string(files.path().join("a.yaml")).unwrap(), AGENT);
}

#[tokio::test]
async fn flags_and_their_variables_set_what_is_injected() {
    let files =
        folder(&[("a.yaml", &AGENT.replace("hedgerow.dev/policy-configmap: agent-policy", "other: \"1\""))]);
    let flags =
        ["inject", "a.yaml", "--sidecar-mode=container", "--policy-configmap=other", "--init-image=x"];
    let by_flags = hedgerow(files.path(), &flags).await.stdout;
    let value: Value = serde_yaml::from_str(&by_flags).unwrap();
    let spec = &value["spec"]["template"]["spec"];
    let names = (&spec["containers"][0]["name"], &spec["initContainers"][0]["name"]);
    assert_eq!(names, (&"hedgerow".into(), &"fetch-tools".into()));
    assert_eq!(spec["volumes"][1]["configMap"]["name"], "other");
    let variables = [("HEDGEROW_SIDECAR_MODE", "container"), ("HEDGEROW_POLICY_CONFIGMAP", "other")];
    assert_eq!(hedgerow_with(files.path(), &["inject", "a.yaml"], &variables).await.stdout, by_flags);
    let wrong = hedgerow(Path::new("/"), &["inject", "--policy-configmap", "Not_A_Name"]).await;
    assert_eq!(wrong.code, 2);
    assert!(wrong.stderr.contains("expected the name of a ConfigMap"), "{}", wrong.stderr);
}

#[tokio::test]
async fn what_is_written_anew_is_warned_of() {
    let text = "# gone\napiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec:\n  containers:\n  - {name: a, env: &e [{name: X}]}  # gone\n  - {name: b, env: *e}\n";
    let files = folder(&[("a.yaml", &format!("# stays\nkind: Other\n---\n{text}"))]);
    let injected = hedgerow(files.path(), &["inject", "a.yaml"]).await;
    assert_eq!(injected.code, 0, "{}", injected.stderr);
    assert!(
        injected.stderr.contains("a.yaml:5: warning: the document is written anew"),
        "{}",
        injected.stderr
    );
    assert!(injected.stdout.starts_with("# stays\nkind: Other\n---\n"), "{}", injected.stdout);
}

/// The two meet in a cluster only.
#[tokio::test]
async fn what_the_injected_init_container_is_told_means_something_to_redirect() {
    let pod = "apiVersion: v1\nkind: Pod\nmetadata:\n  name: agent\n  annotations:\n    hedgerow.dev/mode: transparent\n    \
               hedgerow.dev/redirect-ports: 80,8443\n    hedgerow.dev/exclude-outbound-ports: '5432'\n    \
               hedgerow.dev/exclude-outbound-cidrs: 10.96.0.0/12,fd00::/8\nspec:\n  containers:\n  - name: agent\n    \
               image: agent:1\n";
    let files = folder(&[("pod.yaml", pod)]);
    let injected = hedgerow(files.path(), &["inject", "-o", "json", "pod.yaml"]).await;
    let pod: Value = serde_json::from_str(&injected.stdout).expect("JSON");
    let init = &pod["spec"]["initContainers"][0];
    assert_eq!(init["name"], "hedgerow-init");
    let arguments = init["args"].as_array().expect("a list").iter().filter_map(Value::as_str);
    let arguments: Vec<_> = arguments.chain(["--backend=nft", "--dry-run"]).collect();
    let rules = hedgerow(files.path(), &arguments).await;
    assert_eq!(rules.code, 0, "{}", rules.stderr);
    for told in ["2747", "15301", "8443", "5432", "10.96.0.0/12", "fd00::/8", "udp dport 443"] {
        assert!(rules.stdout.contains(told), "{told} not in {}", rules.stdout);
    }
}
