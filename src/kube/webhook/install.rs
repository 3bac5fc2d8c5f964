//! `hedgerow install`: all objects of a cluster-wide installation, with a certificate of their own.
//!
//! They are the manifests of `k8s/base`, which this program carries along, with three additions: the image that it
//! is told, a Secret with a new certificate, and the authority of that certificate in the webhooks' `caBundle`.
//! So nothing in the cluster needs a right to change the webhooks, as it would to make a certificate there. The
//! authority's key signs that one certificate and is gone.

use std::io::{self, Write};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use clap::Args;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose,
};
use ring::digest::{SHA256, digest};
use serde_json::{Value, json};
use time::{Duration, OffsetDateTime};

use crate::kube::inject::Settings;
use crate::kube::inject::manifest::{Format, Manifest, render};

/// What `kubectl kustomize k8s/base` is made of, in the order in which it is to be applied.
const BASE: [&str; 7] = [
    include_str!("../../../k8s/base/namespace.yaml"),
    include_str!("../../../k8s/base/serviceaccount.yaml"),
    include_str!("../../../k8s/base/deployment.yaml"),
    include_str!("../../../k8s/base/pdb.yaml"),
    include_str!("../../../k8s/base/service.yaml"),
    include_str!("../../../k8s/base/networkpolicy.yaml"),
    include_str!("../../../k8s/base/webhook.yaml"),
];

const NAMESPACE: &str = "hedgerow-system";
const SERVICE: &str = "hedgerow-injector";
const SECRET: &str = "hedgerow-injector-tls";
/// On the pods of the injector: a new certificate replaces them, so that none serves an old one.
const DIGEST: &str = "hedgerow.dev/certificate";
/// For clocks that are behind.
const BACKDATED: Duration = Duration::hours(2);

/// What `hedgerow install` is told.
#[derive(Debug, Args)]
pub struct Arguments {
    #[command(flatten)]
    settings: Settings,
    /// For how long the certificate is good, in days. Install again before it ends; the metric
    /// hedgerow_webhook_certificate_expiry_timestamp_seconds tells when that is.
    #[arg(long, value_name = "DAYS", default_value_t = 3650, value_parser = clap::value_parser!(u16).range(1..=7300))]
    valid_for: u16,
}

/// Writes the objects to standard output.
///
/// # Errors
/// There are no random numbers for a key, or nobody reads.
pub fn run(arguments: &Arguments) -> Result<(), String> {
    let certificate = Identity::new(Duration::days(arguments.valid_for.into()))
        .map_err(|error| format!("cannot make a certificate: {error}"))?;
    let objects = objects(&arguments.settings, &certificate)?;
    let text = render(objects.iter(), Format::Yaml);
    io::stdout().lock().write_all(text.as_bytes()).map_err(|error| format!("cannot write: {error}"))
}

fn objects(settings: &Settings, identity: &Identity) -> Result<Vec<Value>, String> {
    let mut objects = Vec::with_capacity(BASE.len() + 1);
    for text in BASE {
        let manifest = Manifest::read(text.to_owned()).map_err(|fault| fault.to_string())?;
        for (_, object) in manifest.documents() {
            let mut object = object.clone();
            match object["kind"].as_str() {
                Some("Deployment") => run_with(&mut object, settings, identity),
                Some("MutatingWebhookConfiguration") => trust(&mut object, identity),
                _ => {}
            }
            let is_namespace = object["kind"] == "Namespace";
            objects.push(object);
            if is_namespace {
                objects.push(secret(identity));
            }
        }
    }
    Ok(objects)
}

/// The injector runs from the image that it injects, and is told what differs from what it would do by itself.
fn run_with(deployment: &mut Value, settings: &Settings, identity: &Identity) {
    let template = &mut deployment["spec"]["template"];
    template["metadata"]["annotations"][DIGEST] = identity.digest().into();
    let container = &mut template["spec"]["containers"][0];
    container["image"] = settings.image.clone().into();
    let variables: Vec<Value> = settings
        .differing()
        .into_iter()
        .map(|(name, value)| json!({ "name": name, "value": value }))
        .collect();
    if !variables.is_empty() {
        container["env"] = variables.into();
    }
}

fn trust(configuration: &mut Value, identity: &Identity) {
    let webhooks = configuration["webhooks"].as_array_mut();
    for webhook in webhooks.into_iter().flatten() {
        webhook["clientConfig"]["caBundle"] = STANDARD.encode(&identity.authority).into();
    }
}

fn secret(identity: &Identity) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": SECRET,
            "namespace": NAMESPACE,
            "labels": { "app.kubernetes.io/name": "hedgerow", "app.kubernetes.io/component": "injector" },
        },
        "type": "kubernetes.io/tls",
        "data": {
            "tls.crt": STANDARD.encode(&identity.certificate),
            "tls.key": STANDARD.encode(&identity.key),
        },
    })
}

/// A server's certificate and its authority, as PEM. Has no `Debug`, so that nothing prints the key.
struct Identity {
    authority: String,
    certificate: String,
    key: String,
}

impl Identity {
    fn new(life: Duration) -> Result<Self, rcgen::Error> {
        let now = OffsetDateTime::now_utc();
        let params = |name: &str| {
            let mut params = CertificateParams::default();
            params.distinguished_name = DistinguishedName::new();
            params.distinguished_name.push(DnType::CommonName, name);
            params.not_before = now - BACKDATED;
            params.not_after = now + life;
            params
        };
        let mut authority = params("hedgerow injector CA");
        authority.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let authority_key = KeyPair::generate()?;
        let authority_certificate = authority.self_signed(&authority_key)?;
        let issuer = Issuer::new(authority, authority_key);

        let names = ["", ".cluster.local"].map(|domain| format!("{SERVICE}.{NAMESPACE}.svc{domain}"));
        let mut server = params(&names[0]);
        server.subject_alt_names = CertificateParams::new(names.to_vec())?.subject_alt_names;
        server.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        server.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        server.use_authority_key_identifier_extension = true;
        let key = KeyPair::generate()?;
        let certificate = server.signed_by(&key, &issuer)?;
        Ok(Self {
            authority: authority_certificate.pem(),
            certificate: certificate.pem(),
            key: key.serialize_pem(),
        })
    }

    /// By which one tells that it is another one.
    fn digest(&self) -> String {
        let digest = digest(&SHA256, self.certificate.as_bytes());
        digest.as_ref()[..8].iter().map(|byte| format!("{byte:02x}")).collect()
    }
}
