//! The rules themselves: the same however often they are set, gone when they are removed, all or none.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use tempfile::TempDir;
use tokio::process::Command;

use super::{BACKENDS, all_rules, in_pod, output, redirect, redirected};
use crate::support::command::{Finished, finished, hedgerow_with};
use crate::support::hedgerow::as_user;
use crate::support::netns::{command, rules};

/// Everything that can be asked for, and more ports than one rule of iptables takes.
const EVERYTHING: [&str; 8] = [
    "--ports",
    "80,443,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16",
    "--exclude-ports",
    "5432,22",
    "--exclude-cidrs",
    "10.0.0.0/8,10.1.0.0/16,192.0.2.0/24,192.0.3.0/25,fd00::/8,2001:db8::/32",
    "--reject-quic",
    "--ipv6=on",
];

/// Somebody else's rules, which are to stay.
const OTHERS: &str =
    "table ip other { chain output { type filter hook output priority 0; tcp dport 9 counter drop; }; }";

#[test]
fn a_second_run_leaves_the_same_rules_and_a_removal_none() {
    in_pod(async |_| {
        rules(OTHERS);
        for backend in BACKENDS {
            let with = |arguments: &[&'static str]| [&["--backend", backend], arguments].concat();
            // Programs leave tables and chains of the system behind that they looked into.
            redirected(&with(&EVERYTHING)).await;
            redirected(&with(&["--remove"])).await;
            let before = all_rules().await;
            assert!(!before.to_lowercase().contains("hedgerow"), "{backend}: {before}");

            assert_eq!(
                redirected(&with(&["--reject-quic"])).await,
                format!("IPv4 and IPv6: TCP to ports 80, 443 is redirected to port 15301, by {backend}\n")
            );
            let few = all_rules().await;
            redirected(&with(&EVERYTHING)).await;
            let all = all_rules().await;
            assert!(all.contains("5432") && all.contains("2001:db8::/32"), "{backend}: {all}");
            redirected(&with(&EVERYTHING)).await;
            assert_eq!(all_rules().await, all, "{backend}: a second run");
            redirected(&with(&["--reject-quic"])).await;
            assert_eq!(all_rules().await, few, "{backend}: with other arguments");
            redirected(&with(&[])).await;
            let without_quic = all_rules().await;
            assert!(!without_quic.contains("reject") && !without_quic.contains("REJECT"), "{without_quic}");

            let removed = redirected(&with(&["--remove"])).await;
            assert_eq!(removed, format!("no redirect is left ({backend})\n"));
            assert_eq!(all_rules().await, before, "{backend}");
            redirected(&with(&["--remove"])).await;
            assert_eq!(all_rules().await, before, "{backend}: a second removal");
        }
    });
}

#[test]
fn a_removal_finds_the_rules_of_every_program() {
    in_pod(async |_| {
        redirected(&["--remove"]).await;
        assert_eq!(all_rules().await, "", "nothing there, and nothing left");
        for backend in BACKENDS {
            redirected(&["--backend", backend, "--reject-quic"]).await;
        }
        redirected(&["--remove"]).await;
        let left = all_rules().await;
        assert!(!left.to_lowercase().contains("hedgerow"), "{left}");
    });
}

#[test]
fn the_script_of_a_dry_run_does_the_same() {
    in_pod(async |_| {
        for backend in BACKENDS {
            let with = |arguments: &[&'static str]| [&["--backend", backend], arguments].concat();
            // Twice: a program's chains stand in another order the first time.
            for _ in 0..2 {
                redirected(&with(&["--remove"])).await;
                redirected(&with(&EVERYTHING)).await;
            }
            let by_command = all_rules().await;
            redirected(&with(&["--remove"])).await;
            let none = all_rules().await;
            let script = redirected(&with(&[&EVERYTHING[..], &["--dry-run"]].concat())).await;
            assert_eq!(all_rules().await, none, "{backend}: it sets nothing");
            output("sh", &["-c", &script]).await;
            assert_eq!(all_rules().await, by_command, "{backend}");
            let script = redirected(&with(&["--remove", "--dry-run", "--reject-quic"])).await;
            assert_eq!(all_rules().await, by_command, "{backend}: it removes nothing");
            output("sh", &["-c", &script]).await;
            assert_eq!(all_rules().await, none, "{backend}");
        }
    });
}

#[test]
fn variables_say_the_same_as_flags() {
    in_pod(async |_| {
        let flags =
            [&EVERYTHING[..], &["--backend", "iptables", "--proxy-uid", "7", "--port", "9", "--dry-run"]];
        let by_flags = redirected(&flags.concat()).await;
        let variables = [
            ("HEDGEROW_REDIRECT_PORTS", EVERYTHING[1]),
            ("HEDGEROW_REDIRECT_EXCLUDE_PORTS", EVERYTHING[3]),
            ("HEDGEROW_REDIRECT_EXCLUDE_CIDRS", EVERYTHING[5]),
            ("HEDGEROW_REDIRECT_REJECT_QUIC", "1"),
            ("HEDGEROW_REDIRECT_IPV6", "on"),
            ("HEDGEROW_REDIRECT_BACKEND", "iptables"),
            ("HEDGEROW_REDIRECT_PROXY_UID", "7"),
            ("HEDGEROW_REDIRECT_PORT", "9"),
            ("HEDGEROW_REDIRECT_DRY_RUN", "true"),
        ];
        let folder = TempDir::new().unwrap();
        let by_variables = hedgerow_with(folder.path(), &["redirect"], &variables).await;
        assert_eq!((by_variables.code, by_variables.stdout), (0, by_flags));
        redirected(&["--reject-quic"]).await;
        let removal =
            hedgerow_with(folder.path(), &["redirect"], &[("HEDGEROW_REDIRECT_REMOVE", "yes")]).await;
        assert_eq!((removal.code, removal.stderr.as_str()), (0, ""));
        assert!(!all_rules().await.contains("hedgerow"));
    });
}

/// `hedgerow redirect` by somebody without rights.
async fn redirect_as_nobody(arguments: &[&str]) -> Finished {
    let mut redirect = as_user(1000, env!("CARGO_BIN_EXE_hedgerow"));
    redirect.arg("redirect").args(arguments);
    finished(Command::from(redirect)).await
}

#[test]
fn without_rights_it_says_which_are_needed() {
    in_pod(async |_| {
        for backend in BACKENDS {
            for more in [&[][..], &["--remove"]] {
                let refused = redirect_as_nobody(&[&["--backend", backend], more].concat()).await;
                assert_eq!((refused.code, refused.stdout.as_str()), (1, ""), "{backend} {more:?}");
                let told = &refused.stderr;
                assert!(told.contains("NET_ADMIN") && !told.contains("panicked"), "{backend}: {told}");
            }
            let dry = redirect_as_nobody(&["--backend", backend, "--dry-run"]).await;
            assert_eq!((dry.code, dry.stderr.as_str()), (0, ""), "a dry run needs no rights");
        }
    });
}

/// `hedgerow redirect` where this program does nothing but fail with these words. The kernel here has all that the
/// rules need, so that others have to say what they would of one that has not.
async fn redirect_without(program: &str, told: &str, arguments: &[&str]) -> Finished {
    let folder = TempDir::new().expect("a temporary folder");
    let file = folder.path().join(program);
    fs::write(&file, format!("#!/bin/sh\necho \"{told}\" >&2\nexit 3\n")).expect("a file can be written");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).expect("one's own file");
    let mut redirect = Command::new(env!("CARGO_BIN_EXE_hedgerow"));
    let path = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap_or_default());
    redirect.arg("redirect").args(arguments).env("PATH", path);
    finished(redirect).await
}

const NO_NAT: &str = "can't initialize ip6tables table 'nat': Table does not exist (do you need to insmod?)";

#[test]
fn ipv4_is_taken_back_where_ipv6_is_asked_for_and_fails() {
    in_pod(async |_| {
        let backend = ["--backend", "iptables-nft", "--reject-quic", "--ipv6"];
        let with = |ipv6| [&backend[..], &[ipv6]].concat();
        redirected(&with("on")).await;
        redirected(&["--remove"]).await;
        let none = all_rules().await;
        for program in ["ip6tables-nft", "ip6tables-nft-restore"] {
            let refused = redirect_without(program, NO_NAT, &with("on")).await;
            assert_eq!((refused.code, refused.stdout.as_str()), (1, ""), "{program}");
            assert!(refused.stderr.contains("the kernel lacks"), "{}", refused.stderr);
            assert!(
                refused.stderr.contains(NO_NAT) && !refused.stderr.contains("still"),
                "{}",
                refused.stderr
            );
            assert_eq!(all_rules().await, none, "{program}");

            let taken_along = redirect_without(program, NO_NAT, &with("auto")).await;
            assert_eq!(taken_along.code, 0, "{program}");
            assert!(taken_along.stdout.starts_with("IPv4: "), "{}", taken_along.stdout);
            assert!(taken_along.stderr.contains("IPv6 is not redirected"), "{}", taken_along.stderr);
            redirected(&with("off")).await;
            redirected(&["--remove"]).await;
            assert_eq!(all_rules().await, none, "{program}");
        }
    });
}

#[test]
fn iptables_stands_in_for_an_nft_that_the_kernel_does_not_know() {
    in_pod(async |_| {
        let told = "cache initialization failed: Protocol not supported";
        let set_up = redirect_without("nft", told, &[]).await;
        assert_eq!((set_up.code, set_up.stderr.as_str()), (0, ""));
        assert!(set_up.stdout.ends_with("by iptables\n"), "{}", set_up.stdout);
        assert!(all_rules().await.contains("HEDGEROW_OUTPUT"));
        let removal = redirect_without("nft", told, &["--remove"]).await;
        assert_eq!((removal.code, removal.stderr.as_str()), (0, ""));
        assert!(!all_rules().await.contains("HEDGEROW_OUTPUT"));
        let alone = redirect_without("nft", told, &["--backend", "nft"]).await;
        assert_eq!(alone.code, 1);
        assert!(alone.stderr.starts_with("nft failed: the kernel lacks"), "{}", alone.stderr);
    });
}

#[test]
fn a_program_that_is_not_there_is_told_with_its_package() {
    in_pod(async |_| {
        for (arguments, told) in [
            ("--backend nft", "nft is not installed: it comes with the package nftables\n"),
            ("--backend iptables", "iptables-restore is not installed: it comes with the package iptables\n"),
            ("--remove", "neither nft nor iptables is installed"),
            ("", "neither nft nor iptables is installed"),
        ] {
            // Where the system keeps them there is an empty folder, for this one process.
            let binary = env!("CARGO_BIN_EXE_hedgerow");
            let script = format!(
                "for d in /usr/sbin /sbin /usr/bin /usr/local/sbin; do \
                   [ -e $d/nft ] || [ -e $d/iptables ] || continue; mount -t tmpfs none $d; \
                 done; exec {binary} redirect {arguments}"
            );
            let mut unshare = command("unshare");
            unshare.args(["--mount", "sh", "-c", &script]);
            let absent = finished(Command::from(unshare)).await;
            assert_eq!((absent.code, absent.stdout.as_str()), (1, ""), "{arguments}");
            assert!(absent.stderr.starts_with(told), "{arguments}: {}", absent.stderr);
        }
        let dry = redirect(&["--dry-run"]).await;
        assert_eq!(dry.code, 0);
    });
}
