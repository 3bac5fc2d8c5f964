use serde_json::json;

use super::*;

/// A pod with these annotations, whose one container has these other keys.
fn pod(annotations: Value, container: Value) -> Value {
    let mut own = json!({ "name": "agent", "image": "registry.example/agent:1" });
    own.as_object_mut().unwrap().extend(container.as_object().cloned().unwrap_or_default());
    json!({ "metadata": { "name": "p", "annotations": annotations }, "spec": { "containers": [own] } })
}

fn injected(pod: &Value, settings: &Settings) -> (Value, Vec<String>) {
    match inject(pod, None, settings) {
        Verdict::Injected { patch, warnings } => {
            let mut patched = pod.clone();
            patch.apply(&mut patched).unwrap();
            (patched, warnings)
        }
        other => panic!("{other:?}"),
    }
}

fn names<'a>(pod: &'a Value, list: &str) -> Vec<&'a str> {
    list_at(pod, &["spec", list]).iter().map(|item| item["name"].as_str().unwrap()).collect()
}

fn variables(container: &Value) -> Vec<&str> {
    list_at(container, &["env"]).iter().map(|item| item["name"].as_str().unwrap()).collect()
}

#[test]
fn a_pod_without_anything_gets_all_of_it() {
    let bare = json!({ "spec": { "containers": [{ "name": "agent" }] } });
    let (patched, warnings) = injected(&bare, &Settings::default());
    assert_eq!(warnings, [""; 0]);
    assert_eq!(names(&patched, "initContainers"), ["hedgerow"]);
    assert_eq!(names(&patched, "volumes"), ["hedgerow-policy"]);
    assert_eq!(patched["spec"]["initContainers"][0]["restartPolicy"], "Always");
    assert!(variables(&patched["spec"]["containers"][0]).contains(&"https_proxy"));
    assert!(patched["metadata"]["annotations"][status::ANNOTATION].is_string());
}

#[test]
fn the_sidecar_comes_before_what_needs_it_and_others_keep_their_order() {
    let mut pod = pod(json!({ "hedgerow.dev/mode": "transparent" }), json!({}));
    pod["spec"]["initContainers"] =
        json!([{ "name": "vault", "restartPolicy": "Always" }, { "name": "fetch" }]);
    let (patched, _) = injected(&pod, &Settings::default());
    assert_eq!(names(&patched, "initContainers"), ["hedgerow-init", "hedgerow", "vault", "fetch"]);
    let [init, sidecar] = [0, 1].map(|at| &patched["spec"]["initContainers"][at]);
    let capabilities = |container: &Value| container["securityContext"]["capabilities"].clone();
    assert_eq!(capabilities(init), json!({ "drop": ["ALL"], "add": ["NET_ADMIN", "NET_RAW"] }));
    assert_eq!(capabilities(sidecar), json!({ "drop": ["ALL"] }));
    assert_eq!(variables(&patched["spec"]["containers"][0]), [""; 0]);
}

#[test]
fn other_sidecars_and_excluded_containers_are_left_alone() {
    let annotations =
        json!({ "hedgerow.dev/exclude-containers": "exporter,nobody", "hedgerow.dev/intercept": "true" });
    let mut pod = pod(annotations, json!({}));
    let exporter = json!({ "name": "exporter" });
    let vault = json!({ "name": "vault", "restartPolicy": "Always" });
    pod["spec"]["containers"].as_array_mut().unwrap().push(exporter.clone());
    pod["spec"]["initContainers"] = json!([vault, { "name": "fetch" }]);
    let (patched, warnings) = injected(&pod, &Settings::default());
    assert_eq!(warnings, ["exclude-containers: there is no container nobody"]);
    assert_eq!(patched["spec"]["containers"][1], exporter);
    assert_eq!(patched["spec"]["initContainers"][1], vault);
    assert!(variables(&patched["spec"]["initContainers"][2]).contains(&"SSL_CERT_FILE"));
}

#[test]
fn all_that_interception_needs_is_there_only_with_it() {
    for (annotation, is_on) in [("intercept", true), ("tls-intercept", true), ("inject", false)] {
        let (patched, _) = injected(
            &pod(json!({ format!("hedgerow.dev/{annotation}"): "true" }), json!({})),
            &Settings::default(),
        );
        let [sidecar, agent] = [&patched["spec"]["initContainers"][0], &patched["spec"]["containers"][0]];
        assert_eq!(sidecar["args"].to_string().contains("--intercept"), is_on);
        assert_eq!(names(&patched, "volumes").contains(&"hedgerow-ca"), is_on);
        assert_eq!(variables(agent).contains(&"NODE_EXTRA_CA_CERTS"), is_on);
        let mount = json!({ "name": "hedgerow-ca", "mountPath": "/var/run/hedgerow/ca", "readOnly": true });
        assert_eq!(agent["volumeMounts"] == json!([mount]), is_on);
    }
}

#[test]
fn annotations_and_settings_reach_the_containers() {
    let annotations = json!({
        "hedgerow.dev/mode": "transparent", "hedgerow.dev/image": "registry.example/own:2",
        "hedgerow.dev/policy-configmap": "agent-policy", "hedgerow.dev/log-level": "debug",
        "hedgerow.dev/cpu-limit": "1", "hedgerow.dev/redirect-ports": "443,8443",
        "hedgerow.dev/exclude-outbound-ports": "5432", "hedgerow.dev/exclude-outbound-cidrs": "10.0.0.0/8,fd00::/8",
    });
    let settings = Settings { init_image: "registry.example/init:3".into(), ..Settings::default() };
    let (patched, _) = injected(&pod(annotations, json!({})), &settings);
    let [init, sidecar] = [0, 1].map(|at| &patched["spec"]["initContainers"][at]);
    assert_eq!(
        (&init["image"], &sidecar["image"]),
        (&json!("registry.example/init:3"), &json!("registry.example/own:2"))
    );
    assert_eq!(
        patched["spec"]["volumes"][0]["configMap"],
        json!({ "name": "agent-policy", "optional": true })
    );
    assert_eq!(sidecar["resources"]["limits"]["cpu"], "1");
    let arguments = |container: &Value| container["args"].to_string();
    assert!(arguments(sidecar).contains("--transparent=127.0.0.1:15301"), "{}", arguments(sidecar));
    assert!(arguments(sidecar).contains("--log-level=debug"));
    for argument in [
        "--proxy-uid=2747",
        "--port=15301",
        "--ports=443,8443",
        "--exclude-ports=5432",
        "--exclude-cidrs=10.0.0.0/8,fd00::/8",
    ] {
        assert!(arguments(init).contains(argument), "{argument} not in {}", arguments(init));
    }
}

#[test]
fn older_clusters_get_a_container_before_the_others() {
    let settings = Settings { sidecar: SidecarMode::Container, ..Settings::default() };
    let mut pod = pod(json!({ "hedgerow.dev/mode": "transparent" }), json!({}));
    pod["spec"]["initContainers"] = json!([{ "name": "fetch" }]);
    let (patched, _) = injected(&pod, &settings);
    assert_eq!(names(&patched, "containers"), ["hedgerow", "agent"]);
    // Before the rules are there, and without variables: the proxy does not run yet.
    assert_eq!(names(&patched, "initContainers"), ["fetch", "hedgerow-init"]);
    assert_eq!(patched["spec"]["initContainers"][0], json!({ "name": "fetch" }));
    assert_eq!(patched["spec"]["containers"][0]["restartPolicy"], Value::Null);
    assert_eq!(patched["metadata"]["annotations"][DEFAULT_CONTAINER], "agent");
    assert_eq!(taken_out(&patched), pod);
}

#[test]
fn the_pods_own_variables_win_and_envfrom_is_warned_of() {
    let container = json!({ "env": [{ "name": "HTTPS_PROXY", "value": "http://corp:1" }], "envFrom": [{ "secretRef": { "name": "s" } }] });
    let (patched, warnings) = injected(&pod(json!({}), container), &Settings::default());
    assert_eq!(
        warnings,
        [
            "container agent sets HTTPS_PROXY itself, which stays as it is",
            "container agent: variables of its envFrom give way to those of hedgerow with the same names",
        ]
    );
    let own = variables(&patched["spec"]["containers"][0]);
    assert_eq!(
        (own[0], own.contains(&"https_proxy"), own.contains(&"http_proxy")),
        ("HTTPS_PROXY", false, true)
    );
}

#[test]
fn what_cannot_be_injected_is_skipped_with_the_reason() {
    let spec = |more: Value| {
        let mut pod = pod(json!({}), json!({}));
        pod["spec"].as_object_mut().unwrap().extend(more.as_object().cloned().unwrap());
        pod
    };
    for (pod, skip) in [
        (spec(json!({ "hostNetwork": true })), Skip::HostNetwork),
        (spec(json!({ "os": { "name": "windows" } })), Skip::Windows),
        (spec(json!({ "nodeSelector": { "kubernetes.io/os": "windows" } })), Skip::Windows),
        (
            pod(json!({ "hedgerow.dev/inject": "disabled", "hedgerow.dev/mode": "nonsense" }), json!({})),
            Skip::Disabled,
        ),
        (pod(json!({ "kubernetes.io/config.mirror": "x" }), json!({})), Skip::StaticPod),
        (pod(json!({ "hedgerow.dev/exclude-containers": "agent" }), json!({})), Skip::NoContainers),
        (json!({ "spec": { "containers": [] } }), Skip::NoContainers),
        (json!({ "metadata": { "namespace": "kube-system" }, "spec": {} }), Skip::SystemNamespace),
        (json!({}), Skip::NoContainers),
        (json!(null), Skip::NoContainers),
    ] {
        assert_eq!(inject(&pod, None, &Settings::default()), Verdict::Skipped(skip), "{pod}");
    }
    let system = inject(&pod(json!({}), json!({})), Some("kube-system"), &Settings::default());
    assert_eq!(system, Verdict::Skipped(Skip::SystemNamespace));
}

#[test]
fn a_clash_is_denied() {
    let clash = pod(json!({}), json!({ "ports": [{ "containerPort": 15302 }] }));
    let Verdict::Denied(reason) = inject(&clash, None, &Settings::default()) else { panic!("not denied") };
    assert_eq!(reason, "container agent listens on port 15302, which hedgerow needs in the same pod");
}

#[test]
fn the_second_time_there_is_nothing_to_do() {
    let (patched, _) = injected(&pod(json!({}), json!({})), &Settings::default());
    assert_eq!(inject(&patched, None, &Settings::default()), Verdict::Skipped(Skip::AlreadyInjected));
    // A status that was copied from elsewhere is no sidecar.
    let copied = pod(json!({ status::ANNOTATION: "{}" }), json!({}));
    let (patched, _) = injected(&copied, &Settings::default());
    assert_ne!(patched["metadata"]["annotations"][status::ANNOTATION], "{}");
}

fn taken_out(pod: &Value) -> Value {
    let mut left = pod.clone();
    uninject(pod).unwrap().expect("an injected pod").apply(&mut left).unwrap();
    left
}

#[test]
fn twenty_containers_are_injected_and_come_back_as_they_were() {
    let containers: Vec<Value> = (0..20)
        .map(|n| match n % 4 {
            0 => json!({ "name": format!("c{n}") }),
            1 => json!({ "name": format!("c{n}"), "env": [{ "name": "A", "value": "1" }, { "name": "NODE_USE_ENV_PROXY", "value": "1" }] }),
            2 => json!({ "name": format!("c{n}"), "volumeMounts": [{ "name": "w", "mountPath": "/w" }] }),
            _ => json!({ "name": format!("c{n}"), "futureField": { "keep": n } }),
        })
        .collect();
    let pod = json!({
        "metadata": { "annotations": { "hedgerow.dev/intercept": "true", "a/b~c": "x" } },
        "spec": { "containers": containers, "initContainers": [{ "name": "i" }], "volumes": [{ "name": "w" }], "future": 1 },
    });
    let (patched, _) = injected(&pod, &Settings::default());
    assert_eq!(names(&patched, "containers"), names(&pod, "containers"));
    for container in list_at(&patched, &["spec", "containers"]) {
        let mut own = variables(container);
        assert!(own.contains(&"SSL_CERT_FILE") && own.contains(&"NODE_USE_ENV_PROXY"));
        own.sort_unstable();
        assert!(own.windows(2).all(|pair| pair[0] != pair[1]), "{own:?}");
    }
    assert_eq!(taken_out(&patched), pod);
}

#[test]
fn only_what_was_added_is_taken_out() {
    let container = json!({ "env": [{ "name": "HTTP_PROXY", "value": "http://127.0.0.1:15300" }] });
    let own = pod(json!({ "hedgerow.dev/mode": "env" }), container);
    let (mut patched, _) = injected(&own, &Settings::default());
    let late = json!({ "name": "LATE", "value": "1" });
    patched["spec"]["containers"][0]["env"].as_array_mut().unwrap().push(late.clone());
    let mut expected = own.clone();
    expected["spec"]["containers"][0]["env"].as_array_mut().unwrap().push(late);
    assert_eq!(taken_out(&patched), expected);
    assert_eq!(uninject(&own), Ok(None));
    patched["metadata"]["annotations"][status::ANNOTATION] = "nonsense".into();
    assert!(uninject(&patched).unwrap_err().starts_with("annotation hedgerow.dev/status cannot be read"));
}

mod reviews {
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;

    use super::super::review::review;
    use super::*;

    fn request(pod: Value) -> Value {
        json!({
            "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
            "request": {
                "uid": "u-1", "kind": { "group": "", "version": "v1", "kind": "Pod" }, "namespace": "agents",
                "operation": "CREATE", "object": pod,
            },
        })
    }

    fn response(review_of: &Value) -> Value {
        let reviewed = review(review_of.to_string().as_bytes(), &Settings::default()).unwrap();
        assert_eq!(reviewed.response["apiVersion"], "admission.k8s.io/v1");
        assert_eq!(reviewed.response["kind"], "AdmissionReview");
        reviewed.response["response"].clone()
    }

    #[test]
    fn a_new_pod_is_answered_with_the_patch() {
        let pod = pod(json!({ "hedgerow.dev/no-proxy": "fd00::/8" }), json!({}));
        let answer = response(&request(pod.clone()));
        assert_eq!(
            (&answer["uid"], &answer["allowed"], &answer["patchType"]),
            (&json!("u-1"), &json!(true), &json!("JSONPatch"))
        );
        let patch: Value =
            serde_json::from_slice(&STANDARD.decode(answer["patch"].as_str().unwrap()).unwrap()).unwrap();
        let Verdict::Injected { patch: expected, .. } = inject(&pod, Some("agents"), &Settings::default())
        else {
            panic!()
        };
        assert_eq!(patch, expected.to_json());
        assert!(patch.as_array().unwrap().iter().all(|operation| operation["op"] == "add"));
        let warning = answer["warnings"][0].as_str().unwrap();
        assert!(warning.starts_with("hedgerow: no-proxy: fd00::/8 is left out"), "{warning}");
        // A dry run is the same.
        let mut dry = request(pod);
        dry["request"]["dryRun"] = true.into();
        assert_eq!(response(&dry), answer);
    }

    #[test]
    fn a_denied_pod_is_told_why() {
        let answer = response(&request(pod(json!({ "hedgerow.dev/mode": "x" }), json!({}))));
        assert_eq!(answer["allowed"], false);
        assert_eq!(answer["status"]["code"], 422);
        let message = answer["status"]["message"].as_str().unwrap();
        assert_eq!(
            message,
            "hedgerow: annotation hedgerow.dev/mode: expected `env` or `transparent`, found \"x\""
        );
    }

    #[test]
    fn what_is_not_a_new_pod_is_let_through_without_a_word() {
        let allowed = json!({ "uid": "u-1", "allowed": true });
        for (key, value) in [
            ("operation", json!("UPDATE")),
            ("operation", json!("DELETE")),
            ("subResource", json!("ephemeralcontainers")),
            ("kind", json!({ "group": "apps", "version": "v1", "kind": "Deployment" })),
        ] {
            let mut review = request(pod(json!({}), json!({})));
            review["request"][key] = value;
            assert_eq!(response(&review), allowed);
        }
        let (injected, _) = injected(&pod(json!({}), json!({})), &Settings::default());
        assert_eq!(response(&request(injected)), allowed);
    }

    #[test]
    fn a_skipped_pod_comes_with_a_warning() {
        let mut pod = pod(json!({}), json!({}));
        pod["spec"]["hostNetwork"] = true.into();
        let answer = response(&request(pod));
        let warning = "hedgerow: the pod is not injected: it uses the node's network (hostNetwork)";
        assert_eq!(answer, json!({ "uid": "u-1", "allowed": true, "warnings": [warning] }));
    }

    #[test]
    fn what_is_no_review_is_refused() {
        let whole = request(pod(json!({}), json!({})));
        let without = |change: fn(&mut Value)| {
            let mut review = whole.clone();
            change(&mut review);
            review.to_string()
        };
        for (body, message) in [
            (String::new(), "the body is not JSON"),
            (whole.to_string()[..40].to_owned(), "the body is not JSON"),
            ("[]".into(), "expected an AdmissionReview of admission.k8s.io/v1; found none of none"),
            (
                without(|r| r["apiVersion"] = "admission.k8s.io/v1beta1".into()),
                "found AdmissionReview of admission.k8s.io/v1beta1",
            ),
            (without(|r| r["request"] = Value::Null), "the review has no request"),
            (without(|r| r["request"]["uid"] = "".into()), "the request has no uid"),
            (without(|r| r["request"]["object"] = Value::Null), "to make a pod, and has none"),
        ] {
            let error = review(body.as_bytes(), &Settings::default()).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
    }

    #[test]
    fn warnings_are_bounded() {
        let many: Vec<String> = (0..500).map(|n| format!("[{n}]")).collect();
        let answer = response(&request(pod(json!({ "hedgerow.dev/no-proxy": many.join(",") }), json!({}))));
        let warnings = answer["warnings"].as_array().unwrap();
        let total: usize = warnings.iter().map(|warning| warning.as_str().unwrap().len()).sum();
        assert!(warnings.len() > 1 && total < 4_000, "{total}");
    }
}
