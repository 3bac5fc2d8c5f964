//! An agent behind an intercepting hedgerow: CONNECT, then TLS that ends in the proxy.

use std::fs;

use super::client::{Agent, Response};
use super::dns::{Answer, Dns};
use super::hedgerow::{HedgerowProcess, Ports};
use super::pki::{AgentTls, Pki};
use super::upstream::{Reply, Seen, Upstream};

/// The upstream's name.
pub const HOST: &str = "a.test";

/// A hedgerow that intercepts `a.test` (and `b.test`, where the test wants another), and its upstream.
pub struct Rig {
    /// Whom hedgerow trusts at the upstream.
    pub pki: Pki,
    /// Leads `a.test` and `b.test` to 127.0.0.1.
    pub dns: Dns,
    /// Shows a certificate for `a.test`.
    pub upstream: Upstream,
    /// The process.
    pub hedgerow: HedgerowProcess,
}

impl Rig {
    /// An upstream that is driven step by step, called `tool`, under these stages of its policy.
    pub async fn start(stages: &str) -> Self {
        let (pki, dns) = (Pki::new(), names().await);
        let upstream = Upstream::on([127, 0, 0, 1]).tls(pki.server(&[HOST])).start().await;
        let hedgerow = HedgerowProcess::start(&policy(&pki, &dns, stages)).await;
        Self { pki, dns, upstream, hedgerow }
    }

    /// The same with an upstream that answers by itself.
    pub async fn answering(stages: &str, script: impl Fn(&Seen) -> Reply + Send + Sync + 'static) -> Self {
        let (pki, dns) = (Pki::new(), names().await);
        let upstream = Upstream::on([127, 0, 0, 1]).tls(pki.server(&[HOST])).answering(script).await;
        let hedgerow = HedgerowProcess::start(&policy(&pki, &dns, stages)).await;
        Self { pki, dns, upstream, hedgerow }
    }

    /// `a.test` at the upstream's port.
    pub fn authority(&self) -> String {
        format!("{HOST}:{}", self.upstream.address().port())
    }

    /// An agent inside the TLS that hedgerow ends, speaking HTTP/1.1.
    pub async fn agent(&self) -> Agent {
        inside(&self.hedgerow, &self.authority(), HOST, trusting(&self.hedgerow)).await
    }

    /// GET inside, on a connection of its own.
    pub async fn get(&self, path: &str) -> Response {
        self.agent().await.get_at(&self.authority(), path).await
    }
}

/// A name server that leads `a.test` and `b.test` to 127.0.0.1.
pub async fn names() -> Dns {
    let here = || Answer::addresses(&["127.0.0.1"]);
    Dns::start(&[(HOST, here()), ("b.test", here())]).await
}

/// The policy of a [`Rig`]: `a.test` is called `tool` and intercepted.
pub fn policy(pki: &Pki, dns: &Dns, stages: &str) -> String {
    let upstream = format!("upstreams: {{ tool: {{ hosts: [{HOST}], intercept: true, {stages} }} }}");
    format!("{}\n{upstream}", base(pki, dns))
}

/// Name server, CA folder and roots; what a policy with other upstreams begins with.
pub fn base(pki: &Pki, dns: &Dns) -> String {
    let (server, roots) = (dns.address(), pki.ca_file());
    format!("dns: {{ servers: [\"{server}\"] }}\ntls: {{ ca_dir: ca, ca_file: \"{}\" }}", roots.display())
}

/// What an agent trusts that reads `ca.pem`.
pub fn trusting(hedgerow: &HedgerowProcess) -> AgentTls {
    AgentTls::trusting_pem(&ca_pem(hedgerow))
}

/// `ca.pem` as it lies in the folder.
pub fn ca_pem(hedgerow: &HedgerowProcess) -> Vec<u8> {
    fs::read(hedgerow.policy.folder().join("ca/ca.pem")).expect("the CA's certificate is there")
}

/// CONNECT to `authority`, and TLS with whoever shows a certificate for `name`.
pub async fn inside(ports: &Ports, authority: &str, name: &str, tls: AgentTls) -> Agent {
    let mut agent = ports.agent().await;
    assert_eq!(agent.open_tunnel(authority).await.status, 200);
    agent.tls(&tls.connector(), name).await.unwrap_or_else(|error| panic!("{authority} as {name}: {error}"))
}

/// A hedgerow that intercepts everything, with no upstream of its own.
pub async fn intercepting(rest: &str) -> HedgerowProcess {
    HedgerowProcess::start(&format!("tls: {{ ca_dir: ca }}\ndefaults: {{ intercept: true }}\n{rest}")).await
}

/// The problem that an inner request is answered with.
pub fn problem(answer: &Response) -> (u16, String) {
    assert_eq!(answer.header("content-type"), Some("application/problem+json"), "{answer:?}");
    (answer.status, answer.json()["error"].as_str().expect("a problem names its error").to_owned())
}
