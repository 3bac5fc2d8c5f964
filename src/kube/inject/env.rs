//! The variables that lead an agent's programs to the sidecar, and have them trust it.
//!
//! No two clients agree. curl ignores `HTTP_PROXY` in capitals, gRPC `https_proxy` in anything else; so both
//! cases, alike. Node listens to neither until `NODE_USE_ENV_PROXY` is set, aiohttp wants to be told by its
//! program, for which several read `AIOHTTP_TRUST_ENV`; Java has properties instead. `ALL_PROXY` is left
//! alone, since some take it for SOCKS.
//!
//! `NO_PROXY` has no common grammar either, and httpx raises at construction over a range of IPv6 or a
//! bracket, which ends the agent at its start. It holds names and addresses alone; ranges that have to pass
//! by the policy belong into its `direct`.
//!
//! Nearly every trust variable replaces the program's roots, so it names the bundle with the public ones.
//! `SSL_CERT_DIR` is left alone: with it set too, several clients would lose the system's directory.

use serde_json::{Value, json};

use super::annotations::Mode;
use super::patch::list_at;
use crate::kube::names::{CA_DIR, PROXY_PORT};

/// A variable, and what to write into it.
type Variable = (&'static str, String);

/// What one pod's containers get.
#[derive(Debug)]
pub(super) struct Environment {
    /// Names that are one thing to their readers: who sets one of them has set all.
    groups: Vec<Vec<Variable>>,
}

/// Every name that [`Environment`] may set, for taking them away again.
pub(super) fn is_ours(name: &str) -> bool {
    let every = Environment::new(Mode::Env, true, &NoProxy::default());
    every.groups.iter().flatten().any(|(own, _)| *own == name)
}

impl Environment {
    pub(super) fn new(mode: Mode, intercepts: bool, no_proxy: &NoProxy) -> Self {
        let mut groups = Vec::new();
        if mode == Mode::Env {
            let proxy = format!("http://127.0.0.1:{PROXY_PORT}");
            let both = |upper, lower, value: &str| vec![(upper, value.to_owned()), (lower, value.to_owned())];
            groups.push(both("HTTP_PROXY", "http_proxy", &proxy));
            groups.push(both("HTTPS_PROXY", "https_proxy", &proxy));
            groups.push(both("NO_PROXY", "no_proxy", &no_proxy.value()));
            groups.push(vec![("NODE_USE_ENV_PROXY", "1".into())]);
            groups.push(vec![("AIOHTTP_TRUST_ENV", "True".into())]);
        }
        if intercepts {
            groups.extend(BUNDLE.map(|name| vec![(name, format!("{CA_DIR}/bundle.pem"))]));
            groups.extend(ADDED.map(|name| vec![(name, format!("{CA_DIR}/ca.pem"))]));
            groups.push(vec![("WGETRC", format!("{CA_DIR}/wgetrc"))]);
        }
        if let Some(options) = java(mode, intercepts, no_proxy) {
            groups.push(vec![("JAVA_TOOL_OPTIONS", options)]);
        }
        Self { groups }
    }

    /// What to add to the variables of `container`, and what is not added since it is set.
    pub(super) fn for_container(&self, container: &Value) -> Additions {
        let env = list_at(container, &["env"]);
        let has = |name: &str| env.iter().any(|variable| variable["name"] == name);
        let mut additions = Additions::default();
        for group in &self.groups {
            let kept: Vec<&str> = group.iter().map(|(name, _)| *name).filter(|name| has(name)).collect();
            if kept.is_empty() {
                let new = group.iter().map(|(name, value)| json!({ "name": name, "value": value }));
                additions.variables.extend(new);
            }
            additions.kept.extend(kept);
        }
        additions
    }
}

/// What a container gets.
#[derive(Debug, Default)]
pub(super) struct Additions {
    pub(super) variables: Vec<Value>,
    /// Names that the container sets itself; they stay as they are.
    pub(super) kept: Vec<&'static str>,
}

/// They replace the roots, so they name the bundle with the public ones.
const BUNDLE: [&str; 13] = [
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "PIP_CERT",
    "AWS_CA_BUNDLE",
    "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
    "GIT_SSL_CAINFO",
    "npm_config_cafile",
    "CARGO_HTTP_CAINFO",
    "HTTPLIB2_CA_CERTS",
    "WEBSOCKET_CLIENT_CA_BUNDLE",
    "CLOUDSDK_CORE_CUSTOM_CA_CERTS_FILE",
    "NIX_SSL_CERT_FILE",
];
/// They add to the roots.
const ADDED: [&str; 2] = ["NODE_EXTRA_CA_CERTS", "DENO_CERT"];

/// Java reads no variables but this one. It splits at blanks, of which no part here has any.
fn java(mode: Mode, intercepts: bool, no_proxy: &NoProxy) -> Option<String> {
    let mut options = Vec::new();
    if mode == Mode::Env {
        for scheme in ["http", "https"] {
            options.push(format!("-D{scheme}.proxyHost=127.0.0.1"));
            options.push(format!("-D{scheme}.proxyPort={PROXY_PORT}"));
        }
        options.push(format!("-Dhttp.nonProxyHosts={}", no_proxy.java()));
    }
    if intercepts {
        options.push(format!("-Djavax.net.ssl.trustStore={CA_DIR}/truststore.p12"));
        options.push("-Djavax.net.ssl.trustStorePassword=changeit".into());
        options.push("-Djavax.net.ssl.trustStoreType=PKCS12".into());
    }
    (!options.is_empty()).then(|| options.join(" "))
}

/// What is called without the proxy: the pod itself, the cluster's services, and what the pod asks for.
#[derive(Debug, Default)]
pub(super) struct NoProxy {
    asked: Vec<String>,
}

/// The last one becomes the API server's address: the kubelet expands it.
const ALWAYS: [&str; 6] =
    ["localhost", "127.0.0.1", "::1", ".svc", ".cluster.local", "$(KUBERNETES_SERVICE_HOST)"];

impl NoProxy {
    /// What can be asked for, with warnings of what is left out or written another way.
    pub(super) fn new(asked: &[String]) -> (Self, Vec<String>) {
        let mut own = Self::default();
        let mut warnings = Vec::new();
        for item in asked {
            match for_every_client(item) {
                Ok(text) => {
                    if text != *item {
                        warnings
                            .push(format!("no-proxy: {item} is written as {text}: few clients know stars"));
                    }
                    if !ALWAYS.contains(&text) && !own.asked.iter().any(|known| known == text) {
                        own.asked.push(text.to_owned());
                    }
                }
                Err(reason) => warnings.push(format!("no-proxy: {item} is left out: {reason}")),
            }
        }
        (own, warnings)
    }

    fn value(&self) -> String {
        let items = ALWAYS.into_iter().chain(self.asked.iter().map(String::as_str));
        items.collect::<Vec<_>>().join(",")
    }

    /// The same for Java, which has `|` and stars, and knows no ranges.
    fn java(&self) -> String {
        let items = ALWAYS.into_iter().chain(self.asked.iter().map(String::as_str));
        let items = items.filter(|item| !item.contains('/')).map(|item| match item {
            _ if item.starts_with('.') => format!("*{item}"),
            _ if item.contains(':') => format!("[{item}]"),
            _ => item.to_owned(),
        });
        items.collect::<Vec<_>>().join("|")
    }
}

/// `item` in a form that no client chokes on.
fn for_every_client(item: &str) -> Result<&str, &'static str> {
    let plain = if item.starts_with("*.") { &item[1..] } else { item };
    if item == "*" {
        return Err("nothing would go through hedgerow");
    }
    if plain.contains('*') {
        return Err("few clients know stars");
    }
    if plain.contains(['[', ']']) {
        return Err("brackets keep httpx clients from starting; write the address without them");
    }
    if plain.contains(':') && plain.contains('/') {
        // A range of IPv6 raises InvalidURL when httpx makes its client.
        return Err("a range of IPv6 keeps httpx clients from starting; write it into the policy's `direct`");
    }
    if !plain.chars().all(|c| c.is_ascii_alphanumeric() || "-._:/".contains(c)) {
        return Err("it is neither a name nor an address");
    }
    Ok(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(variables: &[Value]) -> Vec<&str> {
        variables.iter().map(|variable| variable["name"].as_str().unwrap()).collect()
    }

    fn value<'a>(variables: &'a [Value], name: &str) -> &'a str {
        let found = variables.iter().find(|variable| variable["name"] == name);
        found.unwrap_or_else(|| panic!("no {name}"))["value"].as_str().unwrap()
    }

    #[test]
    fn both_cases_of_each_proxy_variable_say_the_same() {
        let added =
            Environment::new(Mode::Env, false, &NoProxy::default()).for_container(&json!({})).variables;
        let expected = [
            "HTTP_PROXY",
            "http_proxy",
            "HTTPS_PROXY",
            "https_proxy",
            "NO_PROXY",
            "no_proxy",
            "NODE_USE_ENV_PROXY",
            "AIOHTTP_TRUST_ENV",
            "JAVA_TOOL_OPTIONS",
        ];
        assert_eq!(names(&added), expected);
        for name in ["HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy"] {
            assert_eq!(value(&added, name), "http://127.0.0.1:15300");
        }
        let no_proxy = "localhost,127.0.0.1,::1,.svc,.cluster.local,$(KUBERNETES_SERVICE_HOST)";
        assert_eq!((value(&added, "NO_PROXY"), value(&added, "no_proxy")), (no_proxy, no_proxy));
    }

    #[test]
    fn one_case_that_the_container_sets_keeps_the_other_out_too() {
        let container = json!({ "env": [
            { "name": "https_proxy", "valueFrom": { "secretKeyRef": { "name": "s", "key": "k" } } },
            { "name": "NO_PROXY", "value": "" },
            { "name": "SSL_CERT_FILE", "value": "/etc/own.pem" },
        ] });
        let added = Environment::new(Mode::Env, true, &NoProxy::default()).for_container(&container);
        assert_eq!(added.kept, ["https_proxy", "NO_PROXY", "SSL_CERT_FILE"]);
        for name in ["HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy", "SSL_CERT_FILE"] {
            assert!(!names(&added.variables).contains(&name), "{name}");
        }
        assert_eq!(value(&added.variables, "CURL_CA_BUNDLE"), "/var/run/hedgerow/ca/bundle.pem");
        assert_eq!(value(&added.variables, "NODE_EXTRA_CA_CERTS"), "/var/run/hedgerow/ca/ca.pem");
        assert_eq!(value(&added.variables, "WGETRC"), "/var/run/hedgerow/ca/wgetrc");
    }

    #[test]
    fn redirected_pods_get_no_proxy_variable() {
        let none = Environment::new(Mode::Transparent, false, &NoProxy::default());
        assert_eq!(none.for_container(&json!({})).variables, [Value::Null; 0]);
        let trust = Environment::new(Mode::Transparent, true, &NoProxy::default()).for_container(&json!({}));
        assert!(!names(&trust.variables).iter().any(|name| name.to_ascii_lowercase().contains("proxy")));
        let java = value(&trust.variables, "JAVA_TOOL_OPTIONS");
        assert!(
            java.contains("trustStore=/var/run/hedgerow/ca/truststore.p12") && !java.contains("roxy"),
            "{java}"
        );
    }

    #[test]
    fn what_a_client_chokes_on_is_left_out_of_no_proxy_and_told() {
        let asked = [
            "fd00::/8",
            "[::1]",
            "*",
            "10.*",
            "a b",
            "*.corp.example",
            "vault.example",
            "10.20.0.0/16",
            "::2",
            "localhost",
        ];
        let (no_proxy, warnings) = NoProxy::new(&asked.map(String::from));
        assert_eq!(
            no_proxy.value(),
            "localhost,127.0.0.1,::1,.svc,.cluster.local,$(KUBERNETES_SERVICE_HOST),\
             .corp.example,vault.example,10.20.0.0/16,::2"
        );
        let told: Vec<&str> = warnings.iter().map(|warning| warning.split(": ").nth(1).unwrap()).collect();
        assert_eq!(
            told,
            [
                "fd00::/8 is left out",
                "[::1] is left out",
                "* is left out",
                "10.* is left out",
                "a b is left out",
                "*.corp.example is written as .corp.example",
            ]
        );
    }

    #[test]
    fn java_has_its_own_grammar() {
        let (no_proxy, _) = NoProxy::new(&["vault.example".into(), "10.20.0.0/16".into()]);
        let options = java(Mode::Env, false, &no_proxy).unwrap();
        assert_eq!(
            options,
            "-Dhttp.proxyHost=127.0.0.1 -Dhttp.proxyPort=15300 -Dhttps.proxyHost=127.0.0.1 -Dhttps.proxyPort=15300 \
             -Dhttp.nonProxyHosts=localhost|127.0.0.1|[::1]|*.svc|*.cluster.local|$(KUBERNETES_SERVICE_HOST)|vault.example"
        );
    }

    #[test]
    fn every_name_that_is_set_is_known_as_ours() {
        for group in Environment::new(Mode::Env, true, &NoProxy::default()).groups {
            assert!(group.iter().all(|(name, _)| is_ours(name)));
        }
        assert!(!is_ours("PATH") && !is_ours("ALL_PROXY"));
    }
}
