//! The certificate authority of interception: what agents find on disk, an own one by files, and that its
//! key shows nowhere.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, KeyUsagePurpose, date_time_ymd};
use tempfile::TempDir;
use x509_parser::pem::Pem;

use crate::support::command::hedgerow;
use crate::support::hedgerow::HedgerowProcess;
use crate::support::intercept::{HOST, Rig, base, ca_pem, inside, names, trusting};
use crate::support::pki::{self, AgentTls, Leaf, Pki};
use crate::support::upstream::{Reply, Upstream};

const FILES: [&str; 4] = ["bundle.pem", "ca.pem", "truststore.p12", "wgetrc"];

fn certificates(pem: &[u8]) -> Vec<Vec<u8>> {
    Pem::iter_from_buffer(pem).map(|found| found.expect("PEM").contents).collect()
}

#[tokio::test]
async fn agents_find_all_they_may_be_told_to_trust() {
    let hedgerow = HedgerowProcess::start("tls: { ca_dir: run/ca }").await;
    let folder = hedgerow.policy.folder().join("run/ca");
    let mut found: Vec<_> = fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    found.sort();
    assert_eq!(found, FILES);
    for name in FILES {
        let mode = fs::metadata(folder.join(name)).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o444, "{name}");
    }
    let ca = certificates(&fs::read(folder.join("ca.pem")).unwrap());
    assert_eq!(ca.len(), 1);
    let bundle = certificates(&fs::read(folder.join("bundle.pem")).unwrap());
    assert!(bundle.len() > 50 && bundle.contains(&ca[0]), "{} certificates", bundle.len());
    let store = fs::read(folder.join("truststore.p12")).unwrap();
    assert!(store.starts_with(&[0x30, 0x82]) || store.starts_with(&[0x30, 0x83]), "DER");
    assert!(store.windows(ca[0].len()).any(|part| part == ca[0]));
    let wgetrc = fs::read_to_string(folder.join("wgetrc")).unwrap();
    assert_eq!(wgetrc, format!("ca_certificate = {}\n", folder.join("bundle.pem").display()));
}

// An agent that starts as soon as the port answers must find what to trust.
#[tokio::test]
async fn the_files_are_there_when_the_port_answers() {
    for _ in 0..10 {
        let hedgerow = HedgerowProcess::start("tls: { ca_dir: ca }").await;
        for name in FILES {
            assert!(hedgerow.policy.folder().join("ca").join(name).is_file(), "{name}");
        }
    }
}

// It put its own CA in the place of the one that agents were being shown.
#[tokio::test]
async fn a_second_process_that_finds_its_port_taken_leaves_the_files_of_the_first() {
    let first = HedgerowProcess::start("tls: { ca_dir: ca }").await;
    let folder = first.policy.folder();
    let read = || FILES.map(|name| fs::read(folder.join("ca").join(name)).unwrap());
    let before = read();
    let second = hedgerow(folder, &["run", "--config", first.policy.path().to_str().unwrap()]).await;
    assert!(second.code == 1 && second.stderr.contains("cannot listen on"), "{second:?}");
    assert!(read() == before);
}

#[tokio::test]
async fn a_ca_dir_that_cannot_be_written_stops_a_process_that_shall_intercept() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("a-file");
    fs::write(&file, "in the way").unwrap();
    // A directory in the place of one of the files, and a place below a file.
    let blocked = folder.path().join("blocked");
    fs::create_dir_all(blocked.join("bundle.pem")).unwrap();
    for dir in [file.clone(), file.join("below"), blocked, "/proc/self/ca".into()] {
        let tls = format!("tls: {{ ca_dir: \"{}\" }}", dir.display());
        for intercept in
            ["defaults: { intercept: true }", "upstreams: { a: { hosts: [a.test], intercept: true } }"]
        {
            let (code, told) = HedgerowProcess::with(&format!("{tls}\n{intercept}")).refused().await;
            assert_eq!(code, 1, "{told}");
            assert!(
                told.contains("cannot intercept: cannot write ") && told.contains(dir.to_str().unwrap()),
                "{told}"
            );
            assert!(told.contains("tls.ca_dir must be a directory that hedgerow may write"), "{told}");
        }
        let hedgerow = HedgerowProcess::start(&tls).await;
        hedgerow.stderr.until(|line| line.contains("tls.ca_dir cannot be written")).await;
    }
    assert_eq!(fs::read_to_string(file).unwrap(), "in the way");
}

/// An own authority in a folder, as `ca.crt` and `ca.key`.
fn own_ca(folder: &Path, change: impl FnOnce(&mut CertificateParams)) -> Leaf {
    let ca = Leaf::self_signed_with(&[], |params| {
        params.distinguished_name.push(DnType::CommonName, "company CA");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        change(params);
    });
    fs::write(folder.join("ca.crt"), ca.pem()).expect("a temporary file");
    fs::write(folder.join("ca.key"), ca.key_pem()).expect("a temporary file");
    ca
}

fn own_policy(folder: &Path) -> String {
    let at = |name: &str| folder.join(name).display().to_string();
    format!("tls: {{ ca_dir: ca, ca_cert: \"{}\", ca_key: \"{}\" }}", at("ca.crt"), at("ca.key"))
}

#[tokio::test]
async fn leaves_are_by_the_own_authority_where_one_is_given() {
    let folder = TempDir::new().unwrap();
    let ca = own_ca(folder.path(), |_| {});
    let policy = format!("{}\ndefaults: {{ intercept: true }}", own_policy(folder.path()));
    let hedgerow = HedgerowProcess::start(&policy).await;
    assert_eq!(certificates(&ca_pem(&hedgerow)), [ca.der()]);
    inside(&hedgerow, "a.test:443", HOST, AgentTls::trusting_pem(ca.pem().as_bytes())).await;
}

#[tokio::test]
async fn an_own_authority_needs_no_folder() {
    let folder = TempDir::new().unwrap();
    let ca = own_ca(folder.path(), |_| {});
    let policy = own_policy(folder.path()).replace("ca_dir: ca, ", "");
    let hedgerow = HedgerowProcess::start(&format!("{policy}\ndefaults: {{ intercept: true }}")).await;
    inside(&hedgerow, "a.test:443", HOST, AgentTls::trusting_pem(ca.pem().as_bytes())).await;
    assert!(!hedgerow.policy.folder().join("ca").exists());
}

#[tokio::test]
async fn c046_an_authority_that_no_client_would_accept_keeps_the_process_from_starting() {
    // An expired one was used in silence, and every client failed for a reason that nobody saw.
    type Change = fn(&mut CertificateParams);
    let changes: [(&str, Change, &str); 4] = [
        (
            "expired",
            |params| params.not_after = date_time_ymd(2021, 1, 1),
            "expected a valid CA; it expired on 2021-01-01",
        ),
        (
            "not yet valid",
            |params| params.not_before = date_time_ymd(2090, 1, 1),
            "expected a valid CA; it begins on 2090-01-01",
        ),
        ("no CA", |params| params.is_ca = IsCa::ExplicitNoCa, "expected the certificate of a CA"),
        ("may not sign", |params| params.key_usages = vec![KeyUsagePurpose::CrlSign], "lacks keyCertSign"),
    ];
    for (what, change, message) in changes {
        let folder = TempDir::new().unwrap();
        own_ca(folder.path(), change);
        let (code, told) = HedgerowProcess::with(&own_policy(folder.path())).refused().await;
        assert_eq!(code, 1, "{what}: {told}");
        assert!(told.contains("tls.ca_cert: ") && told.contains(message), "{what}: {told}");
    }
}

#[tokio::test]
async fn files_that_do_not_belong_together_keep_the_process_from_starting() {
    let folder = TempDir::new().unwrap();
    let ca = own_ca(folder.path(), |_| {});
    let other = Leaf::self_signed(&["other.test"]);
    let encrypted = "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n";
    for (cert, key, message) in [
        (ca.pem(), other.key_pem().as_str(), "tls.ca_key: not the key of the first certificate in `ca_cert`"),
        (ca.pem(), encrypted, "no unencrypted PEM private key"),
        (ca.pem(), "", "no unencrypted PEM private key"),
        ("", &ca.key_pem(), "the file holds no PEM certificate"),
        ("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", &ca.key_pem(), "tls.ca_cert: "),
    ] {
        fs::write(folder.path().join("ca.crt"), cert).unwrap();
        fs::write(folder.path().join("ca.key"), key).unwrap();
        let (code, told) = HedgerowProcess::with(&own_policy(folder.path())).refused().await;
        assert!(code == 1 && told.contains(message), "{message} not in\n{told}");
    }
}

#[tokio::test]
async fn no_key_shows_in_files_logs_or_on_the_admin_port() {
    let folder = TempDir::new().unwrap();
    let ca = own_ca(folder.path(), |_| {});
    let key = ca.key_pem();
    let secret: Vec<&str> = key.lines().filter(|line| !line.starts_with("-----")).collect();
    let generated = "tls: { ca_dir: ca }".to_owned();
    for tls in [own_policy(folder.path()), generated] {
        let policy = format!("{tls}\ndefaults: {{ intercept: true }}");
        let hedgerow = HedgerowProcess::with(&policy).argument("--log-level=trace").start().await;
        let mut agent = inside(&hedgerow, "unknown.test:443", "unknown.test", trusting(&hedgerow)).await;
        assert_eq!(agent.get_at("unknown.test", "/").await.status, 502);
        hedgerow.access_log(|line| line["host"].as_str().is_some_and(|host| host.contains("unknown"))).await;
        let mut told = vec![hedgerow.stderr.text(), hedgerow.stdout.text()];
        for page in ["/config", "/status", "/metrics", "/"] {
            told.push(hedgerow.ask_admin("GET", page).await.text().to_owned());
        }
        let mut entries = vec![hedgerow.policy.folder().to_owned()];
        while let Some(entry) = entries.pop() {
            if entry.is_dir() {
                entries.extend(fs::read_dir(entry).unwrap().map(|entry| entry.unwrap().path()));
            } else {
                told.push(String::from_utf8_lossy(&fs::read(entry).unwrap()).into_owned());
            }
        }
        for text in told {
            assert!(
                !text.contains("PRIVATE KEY") && !secret.iter().any(|line| text.contains(line)),
                "{text}"
            );
        }
    }
}

async fn reload(hedgerow: &mut HedgerowProcess, policy: &str) {
    hedgerow.policy.replace(policy);
    let applied = [("result", "applied")];
    hedgerow.until_metrics(|metrics| metrics.value("hedgerow_config_reloads_total", &applied) == 1.0).await;
}

#[tokio::test]
async fn interception_is_turned_on_and_off_by_a_reload() {
    let (pki, dns) = (Pki::new(), names().await);
    let leaf = pki.leaf(&[HOST]);
    let upstream =
        Upstream::on([127, 0, 0, 1]).tls(pki::acceptor(&leaf)).answering(|_| Reply::ok("here")).await;
    let authority = format!("{HOST}:{}", upstream.address().port());
    let policy = |intercept: bool| {
        format!("{}\nupstreams: {{ a: {{ hosts: [{HOST}], intercept: {intercept} }} }}", base(&pki, &dns))
    };
    for turns_on in [true, false] {
        let mut hedgerow = HedgerowProcess::start(&policy(!turns_on)).await;
        reload(&mut hedgerow, &policy(turns_on)).await;
        let tls = if turns_on { trusting(&hedgerow) } else { pki.agent_tls() };
        let mut agent = inside(&hedgerow, &authority, HOST, tls).await;
        assert_eq!(agent.peer_certificate().unwrap() == leaf.der(), !turns_on);
        assert_eq!(agent.get_at(&authority, "/").await.text(), "here");
    }
}

#[tokio::test]
async fn calls_of_a_process_without_an_authority_still_pass_when_a_reload_wants_one() {
    let (pki, dns) = (Pki::new(), names().await);
    let leaf = pki.leaf(&[HOST]);
    let upstream =
        Upstream::on([127, 0, 0, 1]).tls(pki::acceptor(&leaf)).answering(|_| Reply::ok("here")).await;
    let authority = format!("{HOST}:{}", upstream.address().port());
    let start = format!("dns: {{ servers: [\"{}\"] }}", dns.address());
    let mut hedgerow = HedgerowProcess::start(&start).await;
    reload(&mut hedgerow, &format!("{start}\ntls: {{ ca_dir: ca }}\ndefaults: {{ intercept: true }}")).await;
    let mut agent = inside(&hedgerow, &authority, HOST, pki.agent_tls()).await;
    assert_eq!(agent.peer_certificate().unwrap(), leaf.der());
    assert_eq!(agent.get_at(&authority, "/").await.text(), "here");
    hedgerow.stderr.until(|line| line.contains("tls.ca_dir") && line.contains("next start only")).await;
    hedgerow.stderr.until(|line| line.contains("tunnelled past their policies")).await;
    let status = hedgerow.status().await;
    assert_eq!(status["policy"]["needs_restart"], serde_json::json!(["tls.ca_dir", "intercept"]));
}

#[tokio::test]
async fn a_reload_that_wants_to_intercept_is_told_when_the_folder_could_not_be_written() {
    // That was a warning at the start, when nothing was to be intercepted yet.
    let start = "tls: { ca_dir: /proc/self/ca }";
    let mut hedgerow = HedgerowProcess::start(start).await;
    assert_eq!(hedgerow.status().await["policy"]["needs_restart"], serde_json::json!([]));
    reload(&mut hedgerow, &format!("{start}\ndefaults: {{ intercept: true }}")).await;
    hedgerow.stderr.until(|line| line.contains("tunnelled past their policies")).await;
    assert_eq!(hedgerow.status().await["policy"]["needs_restart"], serde_json::json!(["intercept"]));
}

#[tokio::test]
async fn a_restart_brings_a_new_authority_under_another_name() {
    let [first, second] = [Rig::start("").await, Rig::start("").await];
    let parsed = |rig: &Rig| certificates(&ca_pem(&rig.hedgerow)).remove(0);
    assert_ne!(parsed(&first), parsed(&second));
    // What trusts the one does not trust the other.
    let mut agent = second.hedgerow.agent().await;
    assert_eq!(agent.open_tunnel(&second.authority()).await.status, 200);
    assert!(agent.tls(&trusting(&first.hedgerow).connector(), HOST).await.is_err());
}
