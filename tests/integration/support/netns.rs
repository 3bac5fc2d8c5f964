//! A network of a test's own, in which it is root: addresses, redirect rules and ports as it likes.
//!
//! The test binary runs the test once more in new namespaces, under `unshare`. A user namespace gives the rights
//! for that to everybody, so that it works the same for root in a CI container and for a developer; where there
//! are none, root's own rights do. To enter namespaces from within the process instead would need a process with
//! one thread, which a test binary never is.

use std::any::type_name;
use std::env;
use std::ffi::OsStr;
use std::fs::File;
use std::io::Write;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::os::fd::AsFd;
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::thread;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// Set in the run that is inside.
const INSIDE: &str = "HEDGEROW_TEST_NETNS";

/// Runs a test in a network namespace that has nothing but loopback, which is up, and what `set_up` adds. `test`
/// must be the closure that is all of a `#[test]`, since the name of that is taken from it. Panics where there can be no namespace,
/// with the reason: a test that skips itself is taken for one that passes.
pub fn in_namespace<T: AsyncFnOnce()>(set_up: fn(), test: T) {
    in_namespace_of(Users::Root, type_name::<T>(), async || {
        set_up();
        test().await;
    });
}

/// The same with all users, so that processes of the test can be somebody else, which takes more rights. The test gets
/// what `set_up` makes.
pub fn in_namespace_of_all_users<W, T: AsyncFnOnce(W)>(set_up: fn() -> W, test: T) {
    in_namespace_of(Users::All, type_name::<T>(), async || test(set_up()).await);
}

fn in_namespace_of(users: Users, path: &str, test: impl AsyncFnOnce()) {
    if env::var_os(INSIDE).is_some() {
        ip("link set lo up");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        return runtime.expect("a runtime can be made").block_on(test());
    }
    let name = path.split_once("::").map_or(path, |(_, inside)| inside);
    let name = name.split("::{{").next().expect("a split has a first part");
    let maker = users.namespaces().as_ref().unwrap_or_else(|why| panic!("{why}"));
    let itself = env::current_exe().expect("a test runs from a file");
    let output = command(maker[0])
        .args(&maker[1..])
        // sudo passes no variables on.
        .args(["env", &format!("{INSIDE}=yes"), &format!("PATH={}", path_with_sbin())])
        .arg(itself)
        .args(["--exact", name, "--nocapture", "--test-threads=1"])
        .output()
        .expect("unshare was there a moment ago");
    let (stdout, stderr) = (lossy(&output.stdout), lossy(&output.stderr));
    // A name that matches no test would be a success as well.
    assert!(
        output.status.success() && stdout.contains("1 passed"),
        "inside the namespace:\n{stdout}\n{stderr}"
    );
}

/// Who there is in a namespace.
#[derive(Clone, Copy)]
enum Users {
    /// Root alone.
    Root,
    /// Everybody.
    All,
}

impl Users {
    /// What may make such namespaces, the first choice first.
    fn makers(self) -> &'static [&'static [&'static str]] {
        match self {
            Self::Root => &[&["unshare", "--user", "--map-root-user", "--net"], &["unshare", "--net"]],
            Self::All => &[
                &["unshare", "--net"],
                &["sudo", "-n", "unshare", "--net"],
                &["unshare", "--user", "--map-root-user", "--map-auto", "--net"],
            ],
        }
    }

    /// Rules, and being somebody else, are what this is for, so those are tried as well.
    fn trial(self) -> &'static str {
        match self {
            Self::Root => "ip link set lo up && nft add table inet trial",
            Self::All => {
                "ip link set lo up && nft add table inet trial && setpriv --reuid=2747 --clear-groups true"
            }
        }
    }

    /// What makes namespaces here, or why nothing does.
    fn namespaces(self) -> &'static Result<&'static [&'static str], String> {
        static ROOT: OnceLock<Result<&[&str], String>> = OnceLock::new();
        static ALL: OnceLock<Result<&[&str], String>> = OnceLock::new();
        let found = match self {
            Self::Root => &ROOT,
            Self::All => &ALL,
        };
        found.get_or_init(|| {
            let mut why = String::new();
            for maker in self.makers() {
                match command(maker[0]).args(&maker[1..]).args(["sh", "-c", self.trial()]).output() {
                    Ok(output) if output.status.success() => return Ok(maker),
                    Ok(output) => {
                        why += &format!("\n  {}: {}", maker.join(" "), lossy(&output.stderr).trim());
                    }
                    Err(error) => why += &format!("\n  {}: {error}", maker[0]),
                }
            }
            let otherwise = match self {
                Self::Root => {
                    "user namespaces (kernel.unprivileged_userns_clone, user.max_user_namespaces, AppArmor's \
                     userns restriction)"
                }
                Self::All => {
                    "sudo without a password, or user namespaces and a range in /etc/subuid and /etc/subgid"
                }
            };
            Err(format!(
                "no network namespace with redirect rules can be made here. It takes either root with \
                 CAP_SYS_ADMIN (in Docker: --cap-add SYS_ADMIN --cap-add NET_ADMIN) or {otherwise}, and the \
                 commands unshare and setpriv (util-linux), ip (iproute2) and nft (nftables). What was \
                 tried:{why}"
            ))
        })
    }
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
pub fn command(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command.env("PATH", path_with_sbin());
    command
}

fn path_with_sbin() -> String {
    let path = env::var("PATH").unwrap_or_default();
    format!("{path}:/usr/sbin:/sbin")
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
    pub fn run(&self, program: &str, arguments: &[&str]) {
        let output = self.command(program).args(arguments).output().expect("nsenter can be started");
        succeeded(&format!("{program} {}", arguments.join(" ")), &output);
    }

    /// A socket that listens there, for a server that lives here.
    pub fn listener(&self, address: SocketAddr) -> TcpListener {
        let listener = self.there(move || TcpListener::bind(address)).expect("a port there is free");
        listener.set_nonblocking(true).expect("a socket takes the option");
        listener
    }

    /// The same for datagrams.
    pub fn datagrams(&self, address: SocketAddr) -> UdpSocket {
        let socket = self.there(move || UdpSocket::bind(address)).expect("a port there is free");
        socket.set_nonblocking(true).expect("a socket takes the option");
        socket
    }

    /// Does something there. A socket stays in the namespace that it was made in, whoever uses it, and a thread can
    /// change its own.
    fn there<T: Send + 'static>(&self, make: impl FnOnce() -> T + Send + 'static) -> T {
        let namespace = File::open(format!("/proc/{}/ns/net", self.holder.id())).expect("the holder lives");
        let inside = move || {
            let kind = Some(LinkNameSpaceType::Network);
            move_into_link_name_space(namespace.as_fd(), kind).expect("its owner may enter a namespace");
            make()
        };
        thread::spawn(inside).join().expect("a short thread")
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
