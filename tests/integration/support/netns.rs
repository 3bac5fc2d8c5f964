//! A network of a test's own, in which it is root: addresses, redirect rules and ports as it likes.
//!
//! The test binary runs the test once more in new namespaces, under `unshare`. A user namespace gives the rights
//! for that to everybody, so that it works the same for root in a CI container and for a developer; where there
//! are none, root's own rights do. To enter namespaces from within the process instead would need a process with
//! one thread, which a test binary never is.

use std::any::type_name;
use std::env;
use std::ffi::OsStr;
use std::io::Write;
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

/// Set in the run that is inside.
const INSIDE: &str = "HEDGEROW_TEST_NETNS";

/// Runs a test in a network namespace that has nothing but loopback, which is up, and what `set_up` adds. `test`
/// must be the closure that is all of a `#[test]`, since the name of that is taken from it. Panics where there can be no namespace,
/// with the reason: a test that skips itself is taken for one that passes.
pub fn in_namespace<T: AsyncFnOnce()>(set_up: fn(), test: T) {
    if env::var_os(INSIDE).is_some() {
        ip("link set lo up");
        set_up();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        return runtime.expect("a runtime can be made").block_on(test());
    }
    let path = type_name::<T>();
    let name = path.split_once("::").map_or(path, |(_, inside)| inside);
    let name = name.split("::{{").next().expect("a split has a first part");
    let kind = namespaces().as_ref().unwrap_or_else(|why| panic!("{why}"));
    let itself = env::current_exe().expect("a test runs from a file");
    let output = command("unshare")
        .args(*kind)
        .arg(itself)
        .args(["--exact", name, "--nocapture", "--test-threads=1"])
        .env(INSIDE, "yes")
        .output()
        .expect("unshare was there a moment ago");
    let (stdout, stderr) = (lossy(&output.stdout), lossy(&output.stderr));
    // A name that matches no test would be a success as well.
    assert!(
        output.status.success() && stdout.contains("1 passed"),
        "inside the namespace:\n{stdout}\n{stderr}"
    );
}

/// What makes namespaces here, or why nothing does.
fn namespaces() -> &'static Result<&'static [&'static str], String> {
    static KIND: OnceLock<Result<&[&str], String>> = OnceLock::new();
    KIND.get_or_init(|| {
        let mut why = String::new();
        for kind in [&["--user", "--map-root-user", "--net"][..], &["--net"]] {
            // Rules are what this is for, so those are tried as well.
            let trial = "ip link set lo up && nft add table inet trial";
            match command("unshare").args(kind).args(["sh", "-c", trial]).output() {
                Ok(output) if output.status.success() => return Ok(kind),
                Ok(output) => why += &format!("\n  unshare {}: {}", kind.join(" "), lossy(&output.stderr).trim()),
                Err(error) => why += &format!("\n  unshare: {error}"),
            }
        }
        Err(format!(
            "no network namespace with redirect rules can be made here. It takes either root with CAP_SYS_ADMIN \
             (in Docker: --cap-add SYS_ADMIN --cap-add NET_ADMIN) or user namespaces \
             (kernel.unprivileged_userns_clone, user.max_user_namespaces, AppArmor's userns restriction), and the \
             commands unshare (util-linux), ip (iproute2) and nft (nftables). What was tried:{why}"
        ))
    })
}

/// `ip`, which must succeed.
#[track_caller]
pub fn ip(arguments: &str) {
    run("ip", arguments.split(' '));
}

/// Loads a rule set, in the language of nft.
#[track_caller]
pub fn rules(text: &str) {
    let mut nft = command("nft")
        .args(["-f", "-"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("nft can be started");
    nft.stdin.take().expect("stdin is piped").write_all(text.as_bytes()).expect("nft reads its rules");
    succeeded(text, &nft.wait_with_output().expect("nft ends"));
}

#[track_caller]
fn run<'a>(program: &str, arguments: impl Iterator<Item = &'a str>) {
    let arguments: Vec<_> = arguments.collect();
    let output = command(program).args(&arguments).output().expect("the tools of `make setup` are there");
    succeeded(&format!("{program} {}", arguments.join(" ")), &output);
}

#[track_caller]
fn succeeded(what: &str, output: &Output) {
    assert!(output.status.success(), "{what}: {}", lossy(&output.stderr));
}

/// A command, also one that is where only root looks.
fn command(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    let path = env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{path}:/usr/sbin:/sbin"));
    command
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Another machine on the same network: a namespace at the other end of a cable. Lives as long as the value.
pub struct Neighbour {
    holder: std::process::Child,
}

impl Neighbour {
    /// Its end of the cable has these addresses, ours the others (with their prefix length), and what it sends
    /// anywhere else it sends to us.
    pub fn new(ours: [&str; 2], theirs: [&str; 2]) -> Self {
        // Says when it is there, and stays until its stdin ends.
        let mut holder = command("unshare")
            .args(["--net", "sh", "-c", "echo; cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("unshare can be started");
        let mut ready = [0];
        let stdout = holder.stdout.as_mut().expect("stdout is piped");
        std::io::Read::read_exact(stdout, &mut ready).expect("the namespace comes to be");
        let this = Self { holder };
        ip(&format!("link add cable type veth peer name eth0 netns {}", this.holder.id()));
        ip("link set cable up");
        this.run("ip", &["link", "set", "eth0", "up"]);
        for (ours, theirs) in ours.into_iter().zip(theirs) {
            let family = if ours.contains(':') { "-6" } else { "-4" };
            let nodad = if ours.contains(':') { &["nodad"][..] } else { &[] };
            let (gateway, _) = ours.split_once('/').expect("an address with its prefix");
            run("ip", [&[family, "addr", "add", ours, "dev", "cable"][..], nodad].concat().into_iter());
            this.run("ip", &[&[family, "addr", "add", theirs, "dev", "eth0"][..], nodad].concat());
            this.run("ip", &[family, "route", "add", "default", "via", gateway]);
        }
        this
    }

    #[track_caller]
    fn run(&self, program: &str, arguments: &[&str]) {
        let output = self.command(program).args(arguments).output().expect("nsenter can be started");
        succeeded(&format!("{program} {}", arguments.join(" ")), &output);
    }

    /// A command that runs there.
    pub fn command(&self, program: &str) -> Command {
        let mut there = command("nsenter");
        there.arg(format!("--net=/proc/{}/ns/net", self.holder.id())).arg(program);
        there
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        // Its namespace goes with it. It may have gone by itself.
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}
