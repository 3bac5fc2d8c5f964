//! Hedgerow into a pod: what a pod gets, and how it is told apart from what it had.
//!
//! [`inject`] is one pure function from a pod to a [`Verdict`]. The command line calls it for each pod template
//! of a manifest ([`manifest`], [`workload`]), the admission webhook for each pod that is made ([`review`]);
//! so both come to the same pod. It works on raw JSON and answers with a patch that only adds
//! ([`patch`]): a typed round trip would drop each field that this version does not know.
//!
//! A pod gets a native sidecar, as the first of its init containers, so that what comes after it has the proxy
//! already and a Job ends when its own containers do; a volume with the policy; and the variables that lead its
//! programs there. In transparent mode redirect rules do that instead. The pod's own values win throughout: hedgerow
//! adds beside them, or leaves out and warns.
//!
//! An annotation says what was done, and which variables were the pod's own before, so that [`uninject()`] can
//! take away exactly the rest.

mod annotations;
mod clash;
pub mod command;
mod env;
pub mod manifest;
pub mod patch;
mod quantity;
pub mod review;
mod sidecar;
mod status;
mod uninject;
pub mod workload;

use std::fmt;

use clap::{Args, ValueEnum};
use serde_json::{Map, Value};

pub use annotations::Mode;
pub use uninject::uninject;

use super::names::{self, SIDECAR};
use annotations::Wishes;
use env::{Environment, NoProxy};
use patch::{Patch, Pointer, list_at, map_at, text_at};
use status::Status;

/// What whoever runs the injection fixes for all pods.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct Settings {
    /// The image of the sidecar, where a pod names no other.
    #[arg(long, env = "HEDGEROW_IMAGE", value_name = "IMAGE", default_value = DEFAULT_IMAGE)]
    pub image: String,
    /// The image that sets up the redirect rules of transparent mode.
    #[arg(long, env = "HEDGEROW_INIT_IMAGE", value_name = "IMAGE", default_value = DEFAULT_INIT_IMAGE)]
    pub init_image: String,
    /// How the sidecar runs: `native` needs Kubernetes 1.29 or later.
    #[arg(
        long = "sidecar-mode",
        env = "HEDGEROW_SIDECAR_MODE",
        value_name = "MODE",
        value_enum,
        default_value_t
    )]
    pub sidecar: SidecarMode,
    /// The ConfigMap with the policy, under the key policy.yaml, where a pod names no other.
    #[arg(long, env = "HEDGEROW_POLICY_CONFIGMAP", value_name = "NAME", value_parser = configmap,
          default_value = names::POLICY_CONFIGMAP)]
    pub policy_configmap: String,
}

/// Of this version.
const DEFAULT_IMAGE: &str = concat!("ghcr.io/hedgerow/hedgerow:v", env!("CARGO_PKG_VERSION"));
const DEFAULT_INIT_IMAGE: &str = concat!("ghcr.io/hedgerow/hedgerow-init:v", env!("CARGO_PKG_VERSION"));

impl Default for Settings {
    fn default() -> Self {
        Self {
            image: DEFAULT_IMAGE.into(),
            init_image: DEFAULT_INIT_IMAGE.into(),
            sidecar: SidecarMode::default(),
            policy_configmap: names::POLICY_CONFIGMAP.into(),
        }
    }
}

impl Settings {
    /// The variables that say to another process what differs from [`Settings::default`].
    pub fn differing(&self) -> Vec<(&'static str, &str)> {
        let usual = Self::default();
        let all = [
            ("HEDGEROW_IMAGE", self.image.as_str(), usual.image.as_str()),
            ("HEDGEROW_INIT_IMAGE", &self.init_image, &usual.init_image),
            ("HEDGEROW_SIDECAR_MODE", self.sidecar.word(), usual.sidecar.word()),
            ("HEDGEROW_POLICY_CONFIGMAP", &self.policy_configmap, &usual.policy_configmap),
        ];
        all.into_iter().filter(|(_, own, usual)| own != usual).map(|(name, own, _)| (name, own)).collect()
    }
}

fn configmap(text: &str) -> Result<String, String> {
    annotations::object_name(text).ok_or_else(|| "expected the name of a ConfigMap".into())
}

/// How the sidecar runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum SidecarMode {
    /// As an init container that goes on running. An API server before 1.29 drops the field that says so without a
    /// word, and the pod waits for its end for ever.
    #[default]
    Native,
    /// As the first of the containers: for older clusters. Init containers then have no proxy, and a Job does not end.
    Container,
}

impl SidecarMode {
    fn word(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Container => "container",
        }
    }
}

/// What becomes of a pod.
#[derive(Debug, Clone, PartialEq)]
pub enum Verdict {
    /// It gets a sidecar.
    Injected {
        /// What makes it so.
        patch: Patch,
        /// What may not be as its author thinks.
        warnings: Vec<String>,
    },
    /// It stays as it is.
    Skipped(Skip),
    /// It asks for something that cannot be had. The text says all of it.
    Denied(String),
}

/// Why a pod stays as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Skip {
    /// It has its sidecar.
    AlreadyInjected,
    /// It says so, by annotation or label.
    Disabled,
    /// It is on the node's network: the variables of many such pods would lead to one port.
    HostNetwork,
    /// There is no image for its system.
    Windows,
    /// The kubelet made it from a file, and changes to it are without effect.
    StaticPod,
    /// It is in a namespace on which the cluster itself depends.
    SystemNamespace,
    /// There are none in it, or all are excluded.
    NoContainers,
    /// The request is not about a pod that is being made.
    NotANewPod,
}

impl fmt::Display for Skip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AlreadyInjected => "it is injected already",
            Self::Disabled => "hedgerow.dev/inject says disabled",
            Self::HostNetwork => "it uses the node's network (hostNetwork)",
            Self::Windows => "it runs on Windows, for which there is no image",
            Self::StaticPod => "it is a static pod",
            Self::SystemNamespace => "its namespace belongs to the cluster itself",
            Self::NoContainers => "it has no containers that could use the sidecar",
            Self::NotANewPod => "it is not a new pod",
        })
    }
}

/// Namespaces on whose pods the nodes depend: what holds them up holds up everything.
const SYSTEM_NAMESPACES: [&str; 3] = ["kube-system", "kube-public", "kube-node-lease"];

/// kubectl's choice among several containers, which would be the first one.
const DEFAULT_CONTAINER: &str = "kubectl.kubernetes.io/default-container";

/// Judges a pod, which is an object with `metadata` and `spec`: a Pod, or the template of another kind.
/// Whether it was selected is for the caller to know; here only a pod's own no counts.
pub fn inject(pod: &Value, namespace: Option<&str>, settings: &Settings) -> Verdict {
    if let Some(skip) = skip(pod, namespace) {
        return Verdict::Skipped(skip);
    }
    let (wishes, mut warnings) = match annotations::read(pod) {
        Ok((Wishes { inject: Some(false), .. }, _)) => return Verdict::Skipped(Skip::Disabled),
        Ok(read) => read,
        Err(problems) => return Verdict::Denied(problems),
    };
    let mut clashes = clash::clashes(pod, &wishes);
    clashes.extend(sidecar::contradiction(&wishes));
    if !clashes.is_empty() {
        return Verdict::Denied(clashes.join("; "));
    }
    let (no_proxy, left_out) = NoProxy::new(&wishes.no_proxy);
    warnings.extend(left_out);
    let environment = Environment::new(wishes.mode, wishes.intercept, &no_proxy);
    let mut injection = Injection { pod, settings, wishes, environment, patch: Patch::default(), warnings };
    if !injection.lead_containers() {
        return Verdict::Skipped(Skip::NoContainers);
    }
    injection.add_sidecar();
    injection.add_status();
    Verdict::Injected { patch: injection.patch, warnings: injection.warnings }
}

fn skip(pod: &Value, namespace: Option<&str>) -> Option<Skip> {
    let spec = map_at(pod, &["spec"])?;
    let is_windows = text_at(pod, &["spec", "os", "name"]) == Some("windows")
        || ["kubernetes.io/os", "beta.kubernetes.io/os"]
            .iter()
            .any(|key| text_at(pod, &["spec", "nodeSelector", key]) == Some("windows"));
    let own = text_at(pod, &["metadata", "namespace"]);
    if is_injected(pod) {
        Some(Skip::AlreadyInjected)
    } else if spec.get("hostNetwork") == Some(&Value::Bool(true)) {
        Some(Skip::HostNetwork)
    } else if is_windows {
        Some(Skip::Windows)
    } else if text_at(pod, &["metadata", "annotations", "kubernetes.io/config.mirror"]).is_some() {
        Some(Skip::StaticPod)
    } else if namespace.or(own).is_some_and(|namespace| SYSTEM_NAMESPACES.contains(&namespace)) {
        Some(Skip::SystemNamespace)
    } else {
        None
    }
}

/// Whether the pod has a sidecar of ours: the container, and the annotation that says whose it is.
fn is_injected(pod: &Value) -> bool {
    let has_sidecar = ["containers", "initContainers"].iter().any(|list| {
        list_at(pod, &["spec", list]).iter().any(|container| text_at(container, &["name"]) == Some(SIDECAR))
    });
    has_sidecar && text_at(pod, &["metadata", "annotations", status::ANNOTATION]).is_some()
}

/// A pod's patch as it comes together.
struct Injection<'a> {
    pod: &'a Value,
    settings: &'a Settings,
    wishes: Wishes,
    environment: Environment,
    patch: Patch,
    warnings: Vec<String>,
}

impl Injection<'_> {
    /// Has the containers use the sidecar; false when there are none that could.
    fn lead_containers(&mut self) -> bool {
        let pod = self.pod;
        let named = |name: &String| {
            let lists = ["containers", "initContainers"];
            lists
                .iter()
                .any(|list| list_at(pod, &["spec", list]).iter().any(|container| container["name"] == **name))
        };
        let unknown: Vec<&String> =
            self.wishes.exclude_containers.iter().filter(|name| !named(name)).collect();
        self.warnings
            .extend(unknown.iter().map(|name| format!("exclude-containers: there is no container {name}")));

        let mut lists = vec!["containers"];
        // Without a native sidecar the proxy starts after them, so that variables would lead nowhere.
        if self.settings.sidecar == SidecarMode::Native {
            lists.push("initContainers");
        }
        let mut led = 0;
        for list in lists {
            for (index, container) in list_at(pod, &["spec", list]).iter().enumerate() {
                if self.is_led(container) {
                    led += usize::from(list == "containers");
                    self.lead(container, &Pointer::from_iter(["spec", list]).child(index));
                }
            }
        }
        led > 0
    }

    /// Other sidecars are not the agent, and may be proxies themselves.
    fn is_led(&self, container: &Value) -> bool {
        let name = text_at(container, &["name"]);
        container.is_object()
            && text_at(container, &["restartPolicy"]) != Some("Always")
            && !self.wishes.exclude_containers.iter().any(|excluded| Some(excluded.as_str()) == name)
    }

    fn lead(&mut self, container: &Value, place: &Pointer) {
        let name = text_at(container, &["name"]).unwrap_or("?");
        let additions = self.environment.for_container(container);
        if !additions.kept.is_empty() {
            let kept = additions.kept.join(", ");
            self.warnings.push(format!("container {name} sets {kept} itself, which stays as it is"));
        }
        if !list_at(container, &["envFrom"]).is_empty() && !additions.variables.is_empty() {
            self.warnings.push(format!(
                "container {name}: variables of its envFrom give way to those of hedgerow with the same names"
            ));
        }
        self.patch.append(self.pod, &place.child("env"), additions.variables);
        if self.wishes.intercept {
            self.patch.append(self.pod, &place.child("volumeMounts"), vec![sidecar::trust_mount()]);
        }
    }

    /// The new containers come last in the patch, as they move those that are counted in it.
    fn add_sidecar(&mut self) {
        let list = |name: &str| Pointer::from_iter(["spec", name]);
        let sidecar = sidecar::sidecar(self.settings, &self.wishes);
        let init = match self.wishes.mode {
            Mode::Env => Vec::new(),
            Mode::Transparent => vec![sidecar::init(self.settings, &self.wishes)],
        };
        self.patch.append(self.pod, &list("volumes"), sidecar::volumes(self.settings, &self.wishes));
        match self.settings.sidecar {
            SidecarMode::Native => {
                let first = init.into_iter().chain([sidecar]).collect();
                self.patch.prepend(self.pod, &list("initContainers"), first);
            }
            SidecarMode::Container => {
                // Last, so that the other init containers still have a network.
                self.patch.append(self.pod, &list("initContainers"), init);
                self.patch.prepend(self.pod, &list("containers"), vec![sidecar]);
            }
        }
    }

    fn add_status(&mut self) {
        let mut added = Map::new();
        if self.settings.sidecar == SidecarMode::Container
            && let Some(name) =
                list_at(self.pod, &["spec", "containers"]).first().and_then(|c| text_at(c, &["name"]))
            && text_at(self.pod, &["metadata", "annotations", DEFAULT_CONTAINER]).is_none()
        {
            added.insert(DEFAULT_CONTAINER.into(), name.into());
        }
        let status = Status::of(self.pod, self.wishes.mode, self.settings.sidecar, &self.patch, &added);
        added.insert(status::ANNOTATION.into(), status.to_string().into());

        let metadata = Pointer::from_iter(["metadata"]);
        let annotations = metadata.child("annotations");
        if map_at(self.pod, &["metadata"]).is_none() {
            self.patch
                .set(metadata, Value::Object(Map::from_iter([("annotations".to_owned(), added.into())])));
        } else if map_at(self.pod, &["metadata", "annotations"]).is_none_or(Map::is_empty) {
            self.patch.set(annotations, added.into());
        } else {
            for (key, value) in added {
                self.patch.set(annotations.child(key), value);
            }
        }
    }
}

#[cfg(test)]
mod tests;
