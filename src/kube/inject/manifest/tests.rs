use proptest::prelude::*;
use serde_json::json;

use super::super::patch::Pointer;
use super::super::{Settings, Verdict, inject, uninject, workload};
use super::*;

/// The text with all of its workloads injected.
fn injected(text: &str) -> Patched {
    changed(text, |pod| match inject(pod, None, &Settings::default()) {
        Verdict::Injected { patch, .. } => patch,
        _ => Patch::default(),
    })
}

fn uninjected(text: &str) -> Patched {
    changed(text, |pod| uninject(pod).unwrap().unwrap_or_default())
}

fn changed(text: &str, change: impl Fn(&Value) -> Patch) -> Patched {
    let manifest = Manifest::read(text.to_owned()).unwrap_or_else(|fault| panic!("{fault}\n{text}"));
    let mut patches = Vec::new();
    for (_, document) in manifest.documents() {
        let mut all = Patch::default();
        for workload in workload::find(document) {
            all.extend(change(workload.pod.find(document).unwrap()).below(&workload.pod));
        }
        patches.push(all);
    }
    manifest.patched(&patches).unwrap()
}

/// Injects, and finds the text again by the way back; returns what was injected.
#[track_caller]
fn there_and_back(text: &str) -> String {
    let patched = injected(text);
    assert_eq!(patched.rewritten, [], "{}", patched.text);
    assert_ne!(patched.text, text);
    assert_eq!(injected(&patched.text).text, patched.text, "the second run changes nothing");
    let back = uninjected(&patched.text);
    assert_eq!((back.text.as_str(), back.rewritten.as_slice()), (text, [].as_slice()));
    patched.text
}

/// Whether each line of `text` is still there, in order.
fn keeps_lines(text: &str, result: &str) -> bool {
    let mut lines = result.split('\n');
    text.split('\n').all(|line| lines.any(|other| other == line))
}

const DEPLOYMENT: &str = "\
# The agent.
apiVersion: apps/v1
kind: Deployment   # one
metadata:
    name: \"agent\"
    namespace: agents
spec:
    template:
        metadata:
            labels: {app: agent}   # flow
            annotations:
                # who
                owner: team   # us
        spec:
            # before all
            initContainers:
            # the first
            -   name: fetch
                image: 'registry.example/fetch:1'
            containers:
              - name: agent   # main
                image: registry.example/agent:1
                env:
                    - name: MODE
                      value: |
                        a

                        b
                    # last of env

              - image: registry.example/two:1
                name: two
                args: [ 'a' , \"b\" ]
            # after all
            dnsPolicy: ClusterFirst
";

#[test]
fn comments_and_layout_stay() {
    let text = there_and_back(DEPLOYMENT);
    assert!(keeps_lines(DEPLOYMENT, &text), "{text}");
    // At the depth of what is there.
    assert!(text.contains("\n            initContainers:\n            - name: hedgerow\n"), "{text}");
    assert!(text.contains("\n            # the first\n            -   name: fetch\n"), "{text}");
    assert!(
        text.contains("\n                    - name: HTTP_PROXY\n                      value: http"),
        "{text}"
    );
    assert!(
        text.contains("\n                owner: team   # us\n                hedgerow.dev/status: "),
        "{text}"
    );
}

#[test]
fn line_ends_byte_order_marks_and_missing_ends_stay() {
    there_and_back(&DEPLOYMENT.replace('\n', "\r\n"));
    let crlf = injected(&DEPLOYMENT.replace('\n', "\r\n")).text;
    assert_eq!(crlf.matches('\n').count(), crlf.matches("\r\n").count());
    there_and_back(&format!("\u{feff}{DEPLOYMENT}"));
    there_and_back(DEPLOYMENT.trim_end());
    there_and_back(DEPLOYMENT.replace('\n', "\r\n").trim_end());
}

#[test]
fn what_stands_around_stays() {
    let around = format!(
        "%YAML 1.2\n---\n# only a comment\n---\n---\nkind: Service\napiVersion: v1\nspec: {{ports: [{{port: 80}}]}}\n...\n# between\n---\n{DEPLOYMENT}---   # odd\n\napiVersion: example.dev/v1\nkind: Fleet\nspec: !own {{a: &x [1], b: *x}}\n"
    );
    let text = there_and_back(&around);
    let (before, after) = around.split_once(DEPLOYMENT).unwrap();
    assert!(text.starts_with(before) && text.ends_with(after), "{text}");
}

#[test]
fn flow_style_stays_flow_style() {
    let text = there_and_back(
        "{apiVersion: v1, kind: Pod, metadata: {name: p}, spec: {containers: [{name: a, image: b}]}}\n",
    );
    assert_eq!(text.lines().count(), 1);
    there_and_back(
        "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec: {containers: [{name: a, image: b}], volumes: [{name: v}], initContainers: [{name: i}, ]}\n",
    );
    there_and_back(
        "apiVersion: v1\nkind: Pod\nmetadata:\n  name: p\nspec:\n  containers: [\n    {name: a},  # one\n    {\n      name: b,\n      env: [{name: X, value: y}]\n    }\n  ]\n",
    );
}

#[test]
fn json_stays_json() {
    let pod = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "p" }, "spec": { "containers": [{ "name": "a", "env": [{ "name": "X" }] }] } });
    for text in [pod.to_string(), format!("{pod:#}\n"), format!("{pod:#}\n").replace("  ", "\t")] {
        let result = there_and_back(&text);
        let value: Value = serde_json::from_str(&result).unwrap_or_else(|error| panic!("{error}\n{result}"));
        assert_eq!(value["spec"]["initContainers"][0]["name"], "hedgerow");
        assert_eq!(result.lines().count() == 1, text.lines().count() == 1, "{result}");
    }
    // One after the other, as only JSON has it.
    let two = format!("{pod:#}\n{{\"kind\": \"Other\"}}\n{pod}\n");
    let patched = injected(&two);
    assert_eq!(patched.rewritten.len(), 2);
    assert!(patched.text.contains("\n{\"kind\": \"Other\"}\n"), "{}", patched.text);
    assert_eq!(json_documents(&patched.text).map(|documents| documents.len()), Some(3));
}

#[test]
fn empty_and_absent_values_are_filled() {
    for (spec, metadata) in [
        ("containers:\n  - name: a\n    env:\n    volumeMounts: # none\n", "name: p"),
        (
            "volumes: []\n  initContainers: []\n  containers:\n  - {name: a, env: []}\n",
            "name: p\n  annotations:",
        ),
        ("volumes: ~\n  containers:\n  - name: a\n    env: null # none\n", "annotations: {}"),
        ("containers:\n  - env:\n    name: a\n  initContainers:\n", "annotations: ~"),
    ] {
        let text = format!("apiVersion: v1\nkind: Pod\nmetadata:\n  {metadata}\nspec:\n  {spec}");
        let patched = injected(&text);
        assert_eq!(patched.rewritten, [], "{}", patched.text);
        assert_eq!(injected(&patched.text).text, patched.text);
        assert!(patched.text.contains("# none") || !text.contains("# none"));
        uninjected(&patched.text);
    }
}

#[test]
fn what_is_shared_by_aliases_is_written_anew_rightly() {
    let shared = "apiVersion: v1\nkind: Pod\nmetadata: {name: p}  # gone\nspec:\n  containers:\n  - name: a\n    env: &env\n    - {name: X, value: \"1\"}\n  - name: b\n    env: *env\n";
    let merged = "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec:\n  containers:\n  - &base\n    name: a\n    env: [{name: X}]\n  - <<: *base\n    name: b\n";
    for text in [shared, merged] {
        let other = "# kept\nkind: Other\n---\n";
        let patched = injected(&format!("{other}{text}"));
        assert_eq!(patched.rewritten.len(), 1, "{}", patched.text);
        assert_eq!(patched.rewritten[0].0, 1);
        assert!(patched.text.starts_with(other), "{}", patched.text);
        let value = &Manifest::read(patched.text).unwrap().documents.remove(1).value;
        for container in value["spec"]["containers"].as_array().unwrap() {
            let names: Vec<&Value> =
                container["env"].as_array().unwrap().iter().map(|variable| &variable["name"]).collect();
            assert_eq!(
                (names[0], names.iter().filter(|name| **name == "HTTP_PROXY").count()),
                (&json!("X"), 1)
            );
        }
    }
    // An anchor that only others' values hang on is no matter.
    there_and_back(
        "apiVersion: v1\nkind: Pod\nmetadata: {name: &n p}\nspec:\n  containers:\n  - name: *n\n    image: &i x\n    env:\n    - name: I\n      value: *i\n",
    );
}

#[test]
fn tags_that_would_be_lost_are_an_error() {
    let text = "apiVersion: v1\nkind: Pod\nspec:\n  x: !own 1\n  containers:\n  - &a {name: a}\n  - *a\n";
    let manifest = Manifest::read(text.into()).unwrap();
    let mut patch = Patch::default();
    patch.set(["spec", "containers", "1", "env"].iter().collect(), json!([]));
    let error = manifest.patched(&[patch]).unwrap_err();
    assert!(
        error.starts_with("line 1: the document cannot be changed: it is written by an alias"),
        "{error}"
    );
}

/// A pod with some of everything, in one of several hands.
fn manifests() -> impl Strategy<Value = String> {
    let hand = (any::<bool>(), any::<bool>(), 0..3usize, any::<bool>());
    let list =
        |item: fn(usize) -> Value| (0..4usize).prop_map(move |count| (0..count).map(item).collect::<Value>());
    let env = prop::option::of(list(|n| json!({ "name": format!("V{n}"), "value": format!("{n}: #\n") })));
    let mounts = prop::option::of(list(|n| json!({ "name": format!("m{n}"), "mountPath": "/x" })));
    let container = (env, mounts, any::<bool>()).prop_map(|(env, mounts, is_first)| {
        let mut container = json!({ "image": "i" });
        for (key, value) in [("env", env), ("volumeMounts", mounts)] {
            if let Some(value) = value {
                container[key] = value;
            }
        }
        if is_first {
            container["args"] = json!(["a b", "c\n\n"]);
        }
        container
    });
    let containers = prop::collection::vec(container, 1..4);
    let annotations = prop::option::of(prop::sample::select(vec![
        json!({}),
        json!({ "a": "1" }),
        json!({ "hedgerow.dev/intercept": "true" }),
        json!({ "hedgerow.dev/mode": "transparent", "z": "\n" }),
        json!(null),
    ]));
    let volumes = prop::option::of(list(|n| json!({ "name": format!("v{n}"), "emptyDir": {} })));
    (containers.clone(), prop::option::of(containers), annotations, volumes, any::<bool>(), hand).prop_map(
        |(containers, init, annotations, volumes, is_spec_first, hand)| {
            let named = |prefix: &str, mut list: Vec<Value>| {
                list.iter_mut()
                    .enumerate()
                    .for_each(|(n, item)| item["name"] = format!("{prefix}{n}").into());
                Value::Array(list)
            };
            let mut spec = json!({});
            if is_spec_first {
                spec["containers"] = named("c", containers.clone());
            }
            if let Some(init) = init {
                spec["initContainers"] = named("i", init);
            }
            if let Some(volumes) = volumes {
                spec["volumes"] = volumes;
            }
            spec["containers"] = named("c", containers);
            let mut template = json!({ "spec": spec });
            if let Some(annotations) = annotations {
                template["metadata"] = json!({ "annotations": annotations });
            }
            let document =
                json!({ "apiVersion": "apps/v1", "kind": "Deployment", "spec": { "template": template } });
            laid_out(&document, hand)
        },
    )
}

/// Writes `document` in a hand: flow from some depth on, lists indented or not, comments, Windows line ends.
fn laid_out(
    document: &Value,
    (is_indented, has_comments, flow_from, is_windows): (bool, bool, usize, bool),
) -> String {
    fn write(
        value: &Value,
        depth: usize,
        flow_from: usize,
        is_indented: bool,
        has_comments: bool,
        indent: usize,
        out: &mut String,
    ) {
        let note = if has_comments { "  # note" } else { "" };
        let pad = " ".repeat(indent);
        match value {
            Value::Object(map) if !map.is_empty() && depth < flow_from => {
                for (n, (key, value)) in map.iter().enumerate() {
                    if n > 0 || depth == 0 || !out.ends_with("- ") {
                        out.push_str(&pad);
                    }
                    out.push_str(&format!("{key}:"));
                    match value {
                        Value::Object(map) if !map.is_empty() && depth + 1 < flow_from => {
                            out.push_str(&format!("{note}\n"));
                            write(value, depth + 1, flow_from, is_indented, has_comments, indent + 2, out);
                        }
                        Value::Array(list) if !list.is_empty() && depth + 1 < flow_from => {
                            out.push_str(&format!("{note}\n"));
                            let indent = if is_indented { indent + 3 } else { indent };
                            for item in list {
                                if has_comments {
                                    out.push_str(&format!("{}# item\n\n", " ".repeat(indent)));
                                }
                                out.push_str(&format!("{}- ", " ".repeat(indent)));
                                write(item, depth + 2, flow_from, is_indented, has_comments, indent + 2, out);
                            }
                        }
                        Value::Null => out.push('\n'),
                        other => out.push_str(&format!(" {}{note}\n", write::flow(other, Quotes::Needed))),
                    }
                }
            }
            other => out.push_str(&format!("{}{note}\n", write::flow(other, Quotes::Needed))),
        }
    }
    let mut text = String::new();
    write(document, 0, [1, 7, 99][flow_from], is_indented, has_comments, 0, &mut text);
    if is_windows { text.replace('\n', "\r\n") } else { text }
}

proptest! {
    #[test]
    fn the_edited_text_says_what_the_patch_makes(text in manifests()) {
        let before = Manifest::read(text.clone()).map_err(|fault| TestCaseError::fail(format!("{fault}\n{text}")))?;
        let document = &before.documents[0].value;
        let place: Pointer = ["spec", "template"].iter().collect();
        let Verdict::Injected { patch, .. } = inject(place.find(document).unwrap(), None, &Settings::default()) else {
            return Err(TestCaseError::fail(text));
        };
        let mut expected = document.clone();
        patch.below(&place).apply(&mut expected).unwrap();
        let patched = injected(&text);
        prop_assert_eq!(&patched.rewritten, &[], "{}\n{}", text, &patched.text);
        let after = Manifest::read(patched.text.clone()).unwrap();
        prop_assert_eq!(&after.documents[0].value, &expected);
        let back = uninjected(&patched.text);
        prop_assert_eq!(&back.rewritten, &[], "{}\n{}", &patched.text, &back.text);
        prop_assert_eq!(&injected(&back.text).text.is_empty(), &false);
    }

    #[test]
    fn no_text_is_too_odd(text in "(- |a: |\\[|\\]|\\{|\\}|,|\n|  |&x |\\*x|<<: |!t |\\||#|---\n|\"|'|\t|kind: Pod\n|é|\r\n){0,30}") {
        if let Ok(manifest) = Manifest::read(text.clone()) {
            let none: Vec<Patch> = manifest.documents().map(|_| Patch::default()).collect();
            prop_assert_eq!(manifest.patched(&none).unwrap().text, text);
        }
    }

    #[test]
    fn any_place_is_changed_rightly_or_not_at_all(
        text in "(- |a: |b: |c: |\\[|\\]|\\{|\\}|, |\n|  |&x |\\*x|<<: |'1'|z|\\|\n|# n\n|\r\n){0,20}",
        steps in prop::collection::vec("(a|b|0|1|-|new)", 1..4),
        is_removed: bool,
    ) {
        if let Ok(manifest) = Manifest::read(text.clone()) {
            let mut patch = Patch::default();
            let place: Pointer = steps.iter().collect();
            match is_removed {
                true => patch.remove(place),
                false => patch.set(place, json!([{ "n": "v: #" }])),
            }
            let patches: Vec<Patch> = manifest.documents().map(|_| patch.clone()).collect();
            // It proves itself, or says why not.
            if let Ok(patched) = manifest.patched(&patches) {
                for ((_, before), after) in manifest.documents().zip(values(&patched.text).unwrap()) {
                    let mut expected = before.clone();
                    patch.apply(&mut expected).unwrap();
                    prop_assert_eq!(after, expected, "{}", &patched.text);
                }
            }
        }
    }
}
