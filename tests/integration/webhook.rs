//! `hedgerow webhook` and `hedgerow install`: what an API server sees of them.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Stdio;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::process::{Child, Command};
use tokio_rustls::TlsConnector;

use crate::support::client::{Agent, Response};
use crate::support::command::hedgerow;
use crate::support::hedgerow::Lines;
use crate::support::pki::{Leaf, Pki, connector_trusting_pem};
use crate::support::soon;

const NAME: &str = "hedgerow-injector.hedgerow-system.svc";

/// A webhook in a process of its own, on ports that the kernel chose.
struct Webhook {
    child: Child,
    stderr: Lines,
    reviews: SocketAddr,
    admin: SocketAddr,
    tls: TlsConnector,
    secret: Secret,
    pki: Pki,
}

/// A Secret's volume: the files are links into `..data`, a link to a folder of one version.
struct Secret {
    folder: TempDir,
    version: u32,
}

impl Secret {
    fn new() -> Self {
        Self { folder: TempDir::new().expect("a temporary folder"), version: 0 }
    }

    /// Puts both in place at once, as the kubelet does.
    fn swap(&mut self, cert: &str, key: &str) {
        self.version += 1;
        let (folder, version) = (self.folder.path(), format!("..version-{}", self.version));
        fs::create_dir(folder.join(&version)).expect("a folder");
        fs::write(folder.join(&version).join("tls.crt"), cert).expect("a file");
        fs::write(folder.join(&version).join("tls.key"), key).expect("a file");
        symlink(&version, folder.join("..data_tmp")).expect("a link");
        fs::rename(folder.join("..data_tmp"), folder.join("..data")).expect("a swap");
        for name in ["tls.crt", "tls.key"] {
            let _ = symlink(Path::new("..data").join(name), folder.join(name));
        }
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().expect("a path in UTF-8").to_owned()
    }
}

impl Webhook {
    async fn start() -> Self {
        Self::start_with(&[]).await
    }

    async fn start_with(arguments: &[&str]) -> Self {
        let (pki, mut secret) = (Pki::new(), Secret::new());
        let leaf = pki.leaf(&[NAME]);
        secret.swap(leaf.pem(), &leaf.key_pem());
        let mut child = Command::new(env!("CARGO_BIN_EXE_hedgerow"))
            .args(["webhook", "--listen=127.0.0.1:0", "--admin=127.0.0.1:0"])
            .arg(format!("--tls-cert={}", secret.path("tls.crt")))
            .arg(format!("--tls-key={}", secret.path("tls.key")))
            .args(arguments)
            .env_clear()
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("the binary under test can be started");
        let stderr = Lines::of(child.stderr.take().expect("stderr is piped"));
        let line = stderr.until(|line| line.contains("the webhook is ready")).await;
        let line: Value = serde_json::from_str(&line).expect("the log is JSON");
        let address =
            |name: &str| line[name].as_str().and_then(|text| text.parse().ok()).expect("an address");
        let tls = pki.connector();
        Self { reviews: address("reviews"), admin: address("admin"), child, stderr, tls, secret, pki }
    }

    async fn connect(&self) -> Agent {
        let agent = Agent::connect(self.reviews).await;
        agent.tls(&self.tls, NAME).await.expect("the certificate is that of the service")
    }

    async fn review(&self, review: &Value) -> Value {
        let answer = post(&mut self.connect().await, "/inject", JSON, review.to_string().as_bytes()).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        answer.json()
    }

    async fn admin(&self, path: &str) -> Response {
        Agent::connect(self.admin).await.get_at("localhost", path).await
    }

    async fn counted(&self, verdict: &str) -> String {
        let metrics = self.admin("/metrics").await;
        let name = format!("hedgerow_webhook_reviews_total{{verdict=\"{verdict}\"}} ");
        let line = metrics.text().lines().find_map(|line| line.strip_prefix(&name).map(str::to_owned));
        line.expect("there from the start")
    }

    /// What it shows to a new connection.
    async fn certificate(&self) -> Vec<u8> {
        self.connect().await.peer_certificate().expect("TLS is spoken")
    }

    fn signal(&self, signal: Signal) {
        let pid = self.child.id().and_then(|pid| Pid::from_raw(pid as i32)).expect("it runs");
        kill_process(pid, signal).expect("it can be signalled");
    }
}

const JSON: &str = "application/json";

async fn post(agent: &mut Agent, path: &str, kind: &str, body: &[u8]) -> Response {
    let length = body.len();
    agent
        .send(format!(
            "POST {path} HTTP/1.1\r\nHost: {NAME}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\r\n"
        ))
        .await;
    agent.send(body).await;
    agent.read_response().await
}

fn review_of(pod: &Value) -> Value {
    json!({
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
            "kind": { "group": "", "version": "v1", "kind": "Pod" },
            "resource": { "group": "", "version": "v1", "resource": "pods" },
            "namespace": "agents",
            "operation": "CREATE",
            "object": pod,
            "dryRun": false,
        }
    })
}

fn pod(annotations: Value) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "generateName": "agent-", "annotations": annotations },
        "spec": { "containers": [{ "name": "agent", "image": "agent:1" }] },
    })
}

/// The patch of an answer, as text.
fn patch_of(answer: &Value) -> String {
    let patch = answer["response"]["patch"].as_str().unwrap_or_default();
    String::from_utf8(STANDARD.decode(patch).expect("base64")).expect("JSON")
}

#[tokio::test]
async fn a_pod_gets_its_sidecar_and_a_second_review_adds_nothing() {
    let webhook = Webhook::start_with(&["--image=registry.example/hedgerow:1"]).await;
    let review = review_of(&pod(json!({})));
    let answer = webhook.review(&review).await;
    assert_eq!(answer["response"]["uid"], review["request"]["uid"]);
    assert_eq!(answer["response"]["allowed"], true);
    assert_eq!(answer["response"]["patchType"], "JSONPatch");
    let patch: Value = serde_json::from_str(&patch_of(&answer)).expect("a JSON Patch");
    let operations = patch.as_array().expect("a list");
    assert!(operations.iter().all(|operation| operation["op"] == "add"), "{patch}");
    let image = "registry.example/hedgerow:1";
    assert!(operations.iter().any(|operation| operation["value"][0]["image"] == image), "{patch}");

    let mut dry = review.clone();
    dry["request"]["dryRun"] = true.into();
    assert_eq!(webhook.review(&dry).await, answer);
    let pod_log = webhook.stderr.until(|line| line.contains("agents/agent-")).await;
    assert!(pod_log.contains("injected"), "{pod_log}");
    assert_eq!(webhook.counted("injected").await, "2");
}

/// `patch`, all of whose operations add, applied to `document`.
fn patched(mut document: Value, patch: &str) -> Value {
    let patch: Vec<Value> = serde_json::from_str(patch).expect("a JSON Patch");
    for operation in patch {
        let (path, value) = (operation["path"].as_str().expect("a path"), operation["value"].clone());
        let (parent, last) = path.rsplit_once('/').expect("a path below the root");
        let last = last.replace("~1", "/").replace("~0", "~");
        match document.pointer_mut(parent).expect("parents come first") {
            Value::Object(map) => drop(map.insert(last, value)),
            Value::Array(list) if last == "-" => list.push(value),
            Value::Array(list) => list.insert(last.parse().expect("an index"), value),
            other => panic!("{other} has no parts"),
        }
    }
    document
}

/// A Job whose init container needs the network.
fn job() -> Value {
    json!({
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": { "name": "evaluation", "namespace": "agents" },
        "spec": { "template": {
            "metadata": { "labels": { "job": "evaluation" } },
            "spec": {
                "restartPolicy": "Never",
                "initContainers": [{ "name": "fetch", "image": "fetch:1" }],
                "containers": [{ "name": "agent", "image": "agent:1" }],
            },
        } },
    })
}

#[tokio::test]
async fn c122_a_job_gets_a_sidecar_that_does_not_outlive_it_in_either_way() {
    let template = job()["spec"]["template"].clone();
    let mut pod = template.clone();
    pod["apiVersion"] = "v1".into();
    pod["kind"] = "Pod".into();
    let answer = Webhook::start().await.review(&review_of(&pod)).await;
    let by_webhook = patched(template, &patch_of(&answer));

    let folder = TempDir::new().expect("a temporary folder");
    fs::write(folder.path().join("job.json"), job().to_string()).unwrap();
    let printed = hedgerow(folder.path(), &["inject", "job.json"]).await;
    let by_hand: Value = serde_json::from_str(&printed.stdout).expect("JSON");
    assert_eq!(by_hand["spec"]["template"], by_webhook);
    let spec = &by_webhook["spec"];
    assert_eq!(spec["initContainers"][0]["name"], "hedgerow");
    assert_eq!(spec["initContainers"][0]["restartPolicy"], "Always");
    assert_eq!(spec["restartPolicy"], "Never");
}

#[tokio::test]
async fn c123_the_rules_and_the_sidecar_are_there_before_what_needs_the_network() {
    let mut pod = pod(json!({ "hedgerow.dev/mode": "transparent" }));
    pod["spec"]["initContainers"] = json!([{ "name": "fetch", "image": "fetch:1" }]);
    let answer = Webhook::start().await.review(&review_of(&pod)).await;
    let spec = &patched(pod, &patch_of(&answer))["spec"];
    let names: Vec<_> =
        spec["initContainers"].as_array().expect("a list").iter().map(|c| &c["name"]).collect();
    assert_eq!(names, ["hedgerow-init", "hedgerow", "fetch"]);
    // What comes next waits for this one's success.
    assert_eq!(
        spec["initContainers"][1]["startupProbe"]["httpGet"],
        json!({ "path": "/readyz", "port": 15302 })
    );
}

#[tokio::test]
async fn each_of_twenty_containers_is_led_to_the_proxy_once() {
    let mut pod = pod(json!({}));
    let container = |n: usize| match n % 3 {
        0 => json!({ "name": format!("c{n}"), "image": "agent:1" }),
        1 => json!({ "name": format!("c{n}"), "image": "agent:1", "env": [] }),
        _ => json!({ "name": format!("c{n}"), "image": "agent:1", "env": [{ "name": "OWN", "value": "1" }] }),
    };
    pod["spec"]["containers"] = (0..20).map(container).collect();
    let answer = Webhook::start().await.review(&review_of(&pod)).await;
    let injected = patched(pod, &patch_of(&answer));
    let containers = injected["spec"]["containers"].as_array().expect("a list");
    assert_eq!(containers.len(), 20);
    for (n, container) in containers.iter().enumerate() {
        let env = container["env"].as_array().expect("a list");
        let count = |name: &str| env.iter().filter(|variable| variable["name"] == name).count();
        assert_eq!(container["name"], format!("c{n}"));
        let counts = (count("HTTP_PROXY"), count("https_proxy"), count("OWN"));
        assert_eq!(counts, (1, 1, usize::from(n % 3 == 2)), "{container}");
    }
}

#[tokio::test]
async fn pods_are_skipped_or_denied_with_the_reason() {
    let webhook = Webhook::start().await;
    let mut on_node = pod(json!({}));
    on_node["spec"]["hostNetwork"] = true.into();
    let skipped = webhook.review(&review_of(&on_node)).await;
    assert_eq!(skipped["response"]["allowed"], true);
    assert_eq!(patch_of(&skipped), "");
    let warning = skipped["response"]["warnings"][0].as_str().unwrap_or_default();
    assert!(warning.contains("hostNetwork"), "{skipped}");

    let denied = webhook.review(&review_of(&pod(json!({ "hedgerow.dev/mode": "sideways" })))).await;
    assert_eq!(denied["response"]["allowed"], false);
    let message = denied["response"]["status"]["message"].as_str().unwrap_or_default();
    assert!(message.contains("hedgerow.dev/mode") && message.contains("sideways"), "{denied}");
    assert_eq!((webhook.counted("skipped").await, webhook.counted("denied").await), ("1".into(), "1".into()));
}

#[tokio::test]
async fn what_is_no_review_gets_a_status_and_a_message_and_the_next_one_is_answered() {
    let webhook = Webhook::start().await;
    let good = review_of(&pod(json!({}))).to_string();
    let large = format!("{}{}", good, " ".repeat(5 << 20));
    for (path, kind, body, status, told) in [
        ("/inject", JSON, &good[..good.len() / 2], 400, "not JSON"),
        ("/inject", JSON, "{}", 400, "AdmissionReview"),
        ("/inject", JSON, "", 400, "not JSON"),
        ("/inject", "text/plain", &good, 415, "application/json"),
        ("/inject", JSON, &large, 413, "4 MiB"),
        ("/mutate", JSON, &good, 404, "/inject"),
    ] {
        let mut agent = webhook.connect().await;
        // A body that is too large is refused before all of it has come, so that the rest may not find its way.
        let answer = match status {
            413 => {
                let head = format!(
                    "POST {path} HTTP/1.1\r\nHost: {NAME}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n\r\n",
                    body.len()
                );
                agent.send(head).await;
                agent.send(&body.as_bytes()[..(4 << 20) + 1]).await;
                agent.read_response().await
            }
            _ => post(&mut agent, path, kind, body.as_bytes()).await,
        };
        assert_eq!(answer.status, status, "{}", answer.text());
        let message = answer.json()["message"].as_str().unwrap_or_default().to_owned();
        assert!(message.contains(told), "{message}");
    }
    let mut agent = webhook.connect().await;
    agent.send(format!("GET /inject HTTP/1.1\r\nHost: {NAME}\r\n\r\n")).await;
    let answer = agent.read_response().await;
    assert_eq!((answer.status, answer.header("allow")), (405, Some("POST")));
    assert_eq!(webhook.counted("invalid").await, "7");
    // A pod of nearly 3 MiB is a pod.
    let mut big = pod(json!({}));
    big["spec"]["containers"][0]["args"] = json!(["x".repeat(3 << 20)]);
    assert_eq!(webhook.review(&review_of(&big)).await["response"]["patchType"], "JSONPatch");
}

#[tokio::test]
async fn a_new_certificate_is_served_and_one_that_cannot_be_is_not() {
    let mut webhook = Webhook::start().await;
    let first = webhook.certificate().await;
    let second: Leaf = webhook.pki.leaf(&[NAME]);
    webhook.secret.swap(second.pem(), &second.key_pem());
    webhook.stderr.until(|line| line.contains("serves a new certificate")).await;
    assert_eq!(webhook.certificate().await, second.der());
    assert_ne!(first, second.der());

    let third = webhook.pki.leaf(&[NAME]);
    webhook.secret.swap(third.pem(), &second.key_pem());
    let told = webhook.stderr.until(|line| line.contains("cannot be used")).await;
    assert!(told.contains("tls.key is not the key of the first certificate in"), "{told}");
    assert_eq!(webhook.certificate().await, second.der());
    webhook.secret.swap(third.pem(), &third.key_pem());
    soon(async { while webhook.certificate().await != third.der() {} }).await;
    let metrics = webhook.admin("/metrics").await;
    for (result, count) in [("applied", 2), ("rejected", 1)] {
        let line = format!("hedgerow_webhook_certificate_reloads_total{{result=\"{result}\"}} {count}");
        assert!(metrics.text().lines().any(|found| found == line), "{}", metrics.text());
    }
}

#[tokio::test]
async fn it_is_not_ready_after_sigterm_and_answers_on() {
    let mut webhook = Webhook::start().await;
    assert_eq!(webhook.admin("/livez").await.status, 200);
    assert_eq!(webhook.admin("/readyz").await.status, 200);
    webhook.signal(Signal::TERM);
    webhook.stderr.until(|line| line.contains("the webhook leaves")).await;
    assert_eq!(webhook.admin("/readyz").await.status, 503);
    let answer = webhook.review(&review_of(&pod(json!({})))).await;
    assert_eq!(answer["response"]["patchType"], "JSONPatch");
    assert_eq!(soon(webhook.child.wait()).await.expect("it ends").code(), Some(0));
}

#[tokio::test]
async fn a_start_without_a_usable_certificate_is_refused_with_the_file() {
    let folder = TempDir::new().expect("a temporary folder");
    let leaf = Pki::new().leaf(&[NAME]);
    fs::write(folder.path().join("cert.pem"), leaf.pem()).unwrap();
    fs::write(folder.path().join("empty.pem"), "").unwrap();
    fs::write(folder.path().join("other.pem"), Pki::new().leaf(&[NAME]).key_pem()).unwrap();
    for (cert, key, told) in [
        ("none.pem", "other.pem", "none.pem: No such file"),
        ("empty.pem", "other.pem", "empty.pem: expected a certificate in PEM, found none"),
        ("cert.pem", "empty.pem", "empty.pem: expected a private key in PEM"),
        ("cert.pem", "other.pem", "other.pem is not the key of the first certificate in cert.pem"),
    ] {
        let (cert, key) = (format!("--tls-cert={cert}"), format!("--tls-key={key}"));
        let arguments = ["webhook", "--listen=127.0.0.1:0", "--admin=127.0.0.1:0", &cert, &key];
        let refused = hedgerow(folder.path(), &arguments).await;
        assert_eq!(refused.code, 1);
        assert!(refused.stderr.contains(told), "{told} not in {}", refused.stderr);
    }
}

/// The parts of what `install` prints.
async fn installed(arguments: &[&str]) -> Vec<Value> {
    let folder = TempDir::new().expect("a temporary folder");
    let arguments: Vec<_> = ["install"].into_iter().chain(arguments.iter().copied()).collect();
    let printed = hedgerow(folder.path(), &arguments).await;
    assert_eq!(printed.code, 0, "{}", printed.stderr);
    printed.stdout.split("---\n").map(|text| serde_yaml::from_str(text).expect("YAML")).collect()
}

fn of_kind<'a>(objects: &'a [Value], kind: &str) -> &'a Value {
    objects.iter().find(|object| object["kind"] == kind).unwrap_or_else(|| panic!("no {kind}"))
}

fn decoded(value: &Value) -> String {
    String::from_utf8(STANDARD.decode(value.as_str().expect("text")).expect("base64")).expect("PEM")
}

#[tokio::test]
async fn what_is_installed_serves_what_the_webhooks_trust() {
    let objects = installed(&[]).await;
    let data = &of_kind(&objects, "Secret")["data"];
    let mut webhook = Webhook::start().await;
    webhook.secret.swap(&decoded(&data["tls.crt"]), &decoded(&data["tls.key"]));
    webhook.stderr.until(|line| line.contains("serves a new certificate")).await;
    let configuration = of_kind(&objects, "MutatingWebhookConfiguration");
    let bundles: Vec<_> = configuration["webhooks"].as_array().expect("webhooks").iter().collect();
    assert_eq!(bundles.len(), 2);
    for bundle in bundles {
        webhook.tls = connector_trusting_pem(decoded(&bundle["clientConfig"]["caBundle"]).as_bytes());
        let answer = webhook.review(&review_of(&pod(json!({})))).await;
        assert_eq!(answer["response"]["patchType"], "JSONPatch");
    }
}

#[tokio::test]
async fn the_injector_injects_what_it_was_installed_with() {
    let image = "registry.example/mirror/hedgerow:2";
    let objects = installed(&["--image", image, "--sidecar-mode=container"]).await;
    let deployment = of_kind(&objects, "Deployment");
    let container = &deployment["spec"]["template"]["spec"]["containers"][0];
    assert_eq!(container["image"], image);
    let expected = json!([
        { "name": "HEDGEROW_IMAGE", "value": image },
        { "name": "HEDGEROW_SIDECAR_MODE", "value": "container" },
    ]);
    assert_eq!(container["env"], expected);
    let usual = installed(&[]).await;
    assert_eq!(
        of_kind(&usual, "Deployment")["spec"]["template"]["spec"]["containers"][0]["env"],
        Value::Null
    );
}
