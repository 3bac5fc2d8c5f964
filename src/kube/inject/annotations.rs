//! What a pod asks of its sidecar, by its `hedgerow.dev/…` annotations.
//!
//! A value that cannot be read denies the pod: an agent that starts without the protection that its author
//! asked for looks well until the day it is needed. All of them are told at once.

use std::str::FromStr;

use ipnet::IpNet;
use serde_json::{Map, Value};

use super::patch::map_at;
use super::quantity::{self, Quantity};
use crate::kube::names::PREFIX;

/// How an agent's traffic gets to the sidecar.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// By proxy variables. It needs no rights, and reaches programs that read them.
    #[default]
    Env,
    /// By redirect rules in the pod's network namespace. It reaches all programs, and needs `NET_ADMIN` once.
    Transparent,
}

impl Mode {
    /// As annotations have it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Env => "env",
            Self::Transparent => "transparent",
        }
    }
}

/// What the annotations of a pod say; what they leave open is as `Default` has it.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Wishes {
    pub(super) inject: Option<bool>,
    pub(super) mode: Mode,
    pub(super) policy_configmap: Option<String>,
    pub(super) exclude_containers: Vec<String>,
    pub(super) no_proxy: Vec<String>,
    pub(super) intercept: bool,
    pub(super) image: Option<String>,
    pub(super) cpu_request: Option<Quantity>,
    pub(super) cpu_limit: Option<Quantity>,
    pub(super) memory_request: Option<Quantity>,
    pub(super) memory_limit: Option<Quantity>,
    pub(super) log_level: Option<String>,
    pub(super) redirect_ports: Vec<u16>,
    pub(super) exclude_outbound_ports: Vec<u16>,
    pub(super) exclude_outbound_cidrs: Vec<IpNet>,
}

/// What is read here, and `status`, which is written.
const KNOWN: [&str; 17] = [
    "inject",
    "mode",
    "policy-configmap",
    "exclude-containers",
    "no-proxy",
    "intercept",
    "tls-intercept",
    "image",
    "cpu-request",
    "cpu-limit",
    "memory-request",
    "memory-limit",
    "log-level",
    "redirect-ports",
    "exclude-outbound-ports",
    "exclude-outbound-cidrs",
    "status",
];

/// Reads the annotations and the label of `pod`, with warnings of what is not understood and does no harm.
///
/// # Errors
/// Each annotation that cannot be read, its value and what was expected.
pub(super) fn read(pod: &Value) -> Result<(Wishes, Vec<String>), String> {
    let none = Map::new();
    let annotations = map_at(pod, &["metadata", "annotations"]).unwrap_or(&none);
    let mut reader = Reader { annotations, problems: Vec::new() };
    let flag = "`true` or `false`";
    let wishes = Wishes {
        inject: reader.inject(pod),
        mode: reader.one("mode", "`env` or `transparent`", mode).unwrap_or_default(),
        policy_configmap: reader.one("policy-configmap", "the name of a ConfigMap", object_name),
        exclude_containers: reader.list("exclude-containers", "names of containers", container_name),
        // What of them clients choke on is for the variable to say.
        no_proxy: reader.list("no-proxy", "names and addresses", |text| Some(text.to_owned())),
        intercept: reader
            .one("intercept", flag, parsed::<bool>)
            .or_else(|| reader.one("tls-intercept", flag, parsed::<bool>))
            .unwrap_or_default(),
        image: reader.one("image", "the name of an image", image),
        cpu_request: reader.one("cpu-request", quantity::EXPECTED, parsed),
        cpu_limit: reader.one("cpu-limit", quantity::EXPECTED, parsed),
        memory_request: reader.one("memory-request", quantity::EXPECTED, parsed),
        memory_limit: reader.one("memory-limit", quantity::EXPECTED, parsed),
        log_level: reader.one("log-level", "error, warn, info, debug or trace", log_level),
        redirect_ports: reader.list("redirect-ports", "ports such as 80,443", port),
        exclude_outbound_ports: reader.list("exclude-outbound-ports", "ports such as 5432,6379", port),
        exclude_outbound_cidrs: reader.list("exclude-outbound-cidrs", "ranges such as 10.0.0.0/8", range),
    };
    // Who wants nothing need not say it well.
    if reader.problems.is_empty() || wishes.inject == Some(false) {
        Ok((wishes, unknown(annotations)))
    } else {
        Err(reader.problems.join("; "))
    }
}

struct Reader<'a> {
    annotations: &'a Map<String, Value>,
    problems: Vec<String>,
}

impl Reader<'_> {
    /// The label selects in a cluster, so it counts as well; who says no anywhere is not overruled.
    fn inject(&mut self, pod: &Value) -> Option<bool> {
        let expected = "`enabled` or `disabled`";
        let annotation = self.one("inject", expected, switch);
        let key = format!("{PREFIX}inject");
        let label = map_at(pod, &["metadata", "labels"]).and_then(|labels| labels.get(&key));
        let label = label.and_then(|value| self.read_value(&format!("label {key}"), value, expected, switch));
        match (annotation, label) {
            (Some(false), _) | (_, Some(false)) => Some(false),
            (annotation, label) => annotation.or(label),
        }
    }

    fn one<T>(&mut self, name: &str, expected: &str, read: impl Fn(&str) -> Option<T>) -> Option<T> {
        let key = format!("{PREFIX}{name}");
        let value = self.annotations.get(&key)?;
        self.read_value(&format!("annotation {key}"), value, expected, read)
    }

    fn list<T>(&mut self, name: &str, expected: &str, read: impl Fn(&str) -> Option<T>) -> Vec<T> {
        let items = |text: &str| {
            text.split(',')
                .map(str::trim)
                .filter(|item| !item.is_empty())
                .map(&read)
                .collect::<Option<Vec<T>>>()
        };
        self.one(name, &format!("{expected}, with commas between"), items).unwrap_or_default()
    }

    fn read_value<T>(
        &mut self,
        name: &str,
        value: &Value,
        expected: &str,
        read: impl Fn(&str) -> Option<T>,
    ) -> Option<T> {
        let Some(text) = value.as_str() else {
            self.problems.push(format!("{name}: expected text, found {value}: put it into quotes"));
            return None;
        };
        let result = read(text.trim());
        if result.is_none() {
            self.problems.push(format!("{name}: expected {expected}, found {text:?}"));
        }
        result
    }
}

/// A misspelt annotation does nothing, which is seen too late.
fn unknown(annotations: &Map<String, Value>) -> Vec<String> {
    let ours = annotations.keys().filter_map(|key| key.strip_prefix(PREFIX));
    let unknown = ours.filter(|name| !KNOWN.contains(name)).map(|name| {
        let nearest = KNOWN
            .into_iter()
            .max_by(|a, b| strsim::jaro_winkler(a, name).total_cmp(&strsim::jaro_winkler(b, name)));
        let hint = nearest.filter(|known| strsim::jaro_winkler(known, name) > 0.8);
        let hint = hint.map_or(String::new(), |known| format!("; did you mean {PREFIX}{known}?"));
        format!("annotation {PREFIX}{name} means nothing{hint}")
    });
    unknown.collect()
}

fn parsed<T: FromStr>(text: &str) -> Option<T> {
    text.parse().ok()
}

fn switch(text: &str) -> Option<bool> {
    match text {
        "enabled" | "true" => Some(true),
        "disabled" | "false" => Some(false),
        _ => None,
    }
}

fn mode(text: &str) -> Option<Mode> {
    [Mode::Env, Mode::Transparent].into_iter().find(|mode| mode.word() == text)
}

fn log_level(text: &str) -> Option<String> {
    ["error", "warn", "info", "debug", "trace"].contains(&text).then(|| text.to_owned())
}

fn port(text: &str) -> Option<u16> {
    text.parse().ok().filter(|port| *port != 0)
}

/// An address alone is the range of itself.
fn range(text: &str) -> Option<IpNet> {
    text.parse().ok().or_else(|| text.parse().ok().map(|ip: std::net::IpAddr| ip.into()))
}

/// A DNS subdomain of RFC 1123, as names of objects are.
pub(super) fn object_name(text: &str) -> Option<String> {
    (text.len() <= 253 && text.split('.').all(is_label)).then(|| text.to_owned())
}

fn container_name(text: &str) -> Option<String> {
    is_label(text).then(|| text.to_owned())
}

fn is_label(text: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=63).contains(&text.len())
        && text.bytes().all(is_inner)
        && !text.starts_with('-')
        && !text.ends_with('-')
}

fn image(text: &str) -> Option<String> {
    let is_plain = !text.is_empty() && text.chars().all(|c| c.is_ascii_graphic());
    is_plain.then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read_one(name: &str, value: &str) -> Result<(Wishes, Vec<String>), String> {
        read(&json!({ "metadata": { "annotations": { format!("{PREFIX}{name}"): value } } }))
    }

    #[test]
    fn every_annotation_is_read() {
        let pod = json!({ "metadata": { "annotations": {
            "hedgerow.dev/inject": "enabled",
            "hedgerow.dev/mode": "transparent",
            "hedgerow.dev/policy-configmap": "a.policy",
            "hedgerow.dev/exclude-containers": "one, two,",
            "hedgerow.dev/no-proxy": "a.example,10.0.0.0/8",
            "hedgerow.dev/intercept": "true",
            "hedgerow.dev/image": "registry.example/hedgerow:2@sha256:00",
            "hedgerow.dev/cpu-request": "50m",
            "hedgerow.dev/cpu-limit": "1",
            "hedgerow.dev/memory-request": "64Mi",
            "hedgerow.dev/memory-limit": "256Mi",
            "hedgerow.dev/log-level": "debug",
            "hedgerow.dev/redirect-ports": "80,443",
            "hedgerow.dev/exclude-outbound-ports": "5432",
            "hedgerow.dev/exclude-outbound-cidrs": "10.96.0.0/12,fd00::/8,10.0.0.1",
            "other.example/mode": "nonsense",
        } } });
        let (wishes, warnings) = read(&pod).unwrap();
        assert_eq!(warnings, [""; 0]);
        let expected = Wishes {
            inject: Some(true),
            mode: Mode::Transparent,
            policy_configmap: Some("a.policy".into()),
            exclude_containers: vec!["one".into(), "two".into()],
            no_proxy: vec!["a.example".into(), "10.0.0.0/8".into()],
            intercept: true,
            image: Some("registry.example/hedgerow:2@sha256:00".into()),
            cpu_request: "50m".parse().ok(),
            cpu_limit: "1".parse().ok(),
            memory_request: "64Mi".parse().ok(),
            memory_limit: "256Mi".parse().ok(),
            log_level: Some("debug".into()),
            redirect_ports: vec![80, 443],
            exclude_outbound_ports: vec![5432],
            exclude_outbound_cidrs: ["10.96.0.0/12", "fd00::/8", "10.0.0.1/32"]
                .map(|range| range.parse().unwrap())
                .into(),
        };
        assert_eq!(wishes, expected);
    }

    #[test]
    fn a_value_that_cannot_be_read_is_told_with_its_annotation_and_what_was_expected() {
        for (name, value, expected) in [
            ("inject", "yes please", "`enabled` or `disabled`"),
            ("mode", "sidecar", "`env` or `transparent`"),
            ("policy-configmap", "Not_A_Name", "the name of a ConfigMap"),
            ("exclude-containers", "a b", "names of containers, with commas between"),
            ("intercept", "yes", "`true` or `false`"),
            ("tls-intercept", "1", "`true` or `false`"),
            ("image", "a b", "the name of an image"),
            ("image", "", "the name of an image"),
            ("cpu-request", "lots", "an amount such as 250m"),
            ("memory-limit", "1gb", "an amount such as 250m"),
            ("log-level", "loud", "error, warn, info, debug or trace"),
            ("redirect-ports", "80,http", "ports such as 80,443"),
            ("redirect-ports", "0", "ports such as 80,443"),
            ("exclude-outbound-ports", "65536", "ports such as 5432,6379"),
            ("exclude-outbound-cidrs", "10.0.0.0/33", "ranges such as 10.0.0.0/8"),
        ] {
            let error = read_one(name, value).unwrap_err();
            let told = format!("annotation hedgerow.dev/{name}: expected {expected}");
            assert!(error.starts_with(&told) && error.ends_with(&format!("{value:?}")), "{error}");
        }
    }

    #[test]
    fn all_of_them_are_told_at_once() {
        let pod = json!({ "metadata": { "annotations": { "hedgerow.dev/mode": "x", "hedgerow.dev/intercept": true } } });
        let expected = "annotation hedgerow.dev/mode: expected `env` or `transparent`, found \"x\"; \
                        annotation hedgerow.dev/intercept: expected text, found true: put it into quotes";
        assert_eq!(read(&pod).unwrap_err(), expected);
    }

    #[test]
    fn whoever_says_no_is_heard() {
        let pod = |annotation: &str, label: &str| {
            json!({ "metadata": {
                "annotations": { "hedgerow.dev/inject": annotation }, "labels": { "hedgerow.dev/inject": label },
            } })
        };
        let inject = |pod: Value| read(&pod).unwrap().0.inject;
        assert_eq!(inject(pod("enabled", "disabled")), Some(false));
        assert_eq!(inject(pod("false", "enabled")), Some(false));
        assert_eq!(inject(pod("true", "enabled")), Some(true));
        assert_eq!(inject(json!({})), None);
        let error = read(&pod("enabled", "perhaps")).unwrap_err();
        assert!(error.starts_with("label hedgerow.dev/inject"), "{error}");
    }

    #[test]
    fn a_slip_in_a_name_is_told() {
        let (_, warnings) = read_one("intercpet", "true").unwrap();
        assert_eq!(
            warnings,
            ["annotation hedgerow.dev/intercpet means nothing; did you mean hedgerow.dev/intercept?"]
        );
        let (_, warnings) = read_one("zzz", "true").unwrap();
        assert_eq!(warnings, ["annotation hedgerow.dev/zzz means nothing"]);
    }
}
