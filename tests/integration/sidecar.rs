//! `hedgerow run` as a pod runs it: what the pod settles wins over the policy, which may come later.

use crate::support::hedgerow::{HedgerowProcess, Layout};
use crate::support::intercept::{HOST, inside, names, policy, trusting};
use crate::support::pki::Pki;
use crate::support::soon;
use crate::support::upstream::{Reply, Upstream};

/// A policy that can be told from the built-in one by what it gives instead of an answer.
const OWN: &str = "defaults: { fallback: [{ degraded: { status: 234 } }] }";

#[tokio::test]
async fn without_its_policy_it_starts_on_the_built_in_one_and_takes_up_the_file_when_it_comes() {
    let (nowhere, _held) = Upstream::dead();
    let url = format!("http://{nowhere}/");
    let mut hedgerow = HedgerowProcess::with("{}").layout(Layout::Absent).sidecar().start().await;
    assert_eq!(hedgerow.get(&url).await.status, 502);
    hedgerow.policy.write_in_place(OWN);
    hedgerow
        .until_metrics(|m| m.value("hedgerow_config_reloads_total", &[("result", "applied")]) == 1.0)
        .await;
    assert_eq!(hedgerow.get(&url).await.status, 234);
    // What was in force stays, as with any file that cannot be read.
    std::fs::remove_file(hedgerow.policy.path()).unwrap();
    hedgerow
        .until_metrics(|m| m.value("hedgerow_config_reloads_total", &[("result", "rejected")]) == 1.0)
        .await;
    assert_eq!(hedgerow.get(&url).await.status, 234);
}

#[tokio::test]
async fn a_policy_that_is_there_and_broken_is_refused_all_the_same() {
    let (code, stderr) = HedgerowProcess::with("drain: { max: never }").sidecar().refused().await;
    assert_eq!(code, 1);
    assert!(stderr.contains("drain.max"), "{stderr}");
}

// The policy names ports that nobody may bind, at the start and at each change.
#[tokio::test]
async fn the_pods_ports_win_over_the_policys() {
    let mut hedgerow = HedgerowProcess::with(OWN).layout(Layout::ConfigMap).sidecar().start().await;
    let (nowhere, _held) = Upstream::dead();
    assert_eq!(hedgerow.get(&format!("http://{nowhere}/")).await.status, 234);
    let config = hedgerow.ask_admin("GET", "/config").await.json();
    let listen = &config["listen"];
    assert_eq!(listen["proxy"], hedgerow.proxy.to_string());
    assert_eq!(listen["transparent"], hedgerow.transparent.to_string());
    hedgerow.policy.swap_config_map("{}");
    hedgerow
        .until_metrics(|m| m.value("hedgerow_config_reloads_total", &[("result", "applied")]) == 1.0)
        .await;
    assert_eq!(hedgerow.status().await["policy"]["needs_restart"], serde_json::json!([]));
    assert_eq!(hedgerow.get(&format!("http://{nowhere}/")).await.status, 502);
}

#[tokio::test]
async fn the_pod_can_ask_for_interception_where_the_policy_does_not_speak_of_it() {
    let (pki, dns) = (Pki::new(), names().await);
    let upstream =
        Upstream::on([127, 0, 0, 1]).tls(pki.server(&[HOST])).answering(|_| Reply::ok("inside")).await;
    let own = policy(&pki, &dns, "").replace("intercept: true", "attempt_timeout: 20s");
    assert!(!own.contains("intercept"), "{own}");
    let launch = HedgerowProcess::with(&own.replace("ca_dir: ca", "ca_dir: elsewhere"));
    let hedgerow = launch.sidecar().argument("--ca-dir=ca").argument("--intercept").start().await;
    let authority = format!("{HOST}:{}", upstream.address().port());
    let mut agent = inside(&hedgerow, &authority, HOST, trusting(&hedgerow)).await;
    let answer = soon(agent.get_at(&authority, "/")).await;
    assert_eq!((answer.status, answer.text()), (200, "inside"));
    for file in ["ca.pem", "bundle.pem", "truststore.p12", "wgetrc"] {
        assert!(hedgerow.policy.folder().join("ca").join(file).is_file(), "{file}");
    }
    assert!(!hedgerow.policy.folder().join("elsewhere").exists());
}
