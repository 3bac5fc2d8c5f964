//! Sets the rules and takes them away, by whichever program can.
//!
//! A family's rules are there as a whole or not at all: each program changes a table in one transaction, and where it
//! takes two and the second fails, the first is taken back. The same holds between the families where both are asked
//! for. Where IPv6 is only taken along, a pod gets its IPv4 rules without it: a node that cannot redirect IPv6 mostly
//! has none.

use std::path::Path;
use std::{fmt, fs};

use clap::ValueEnum;

use super::iptables::{self, Present};
use super::program::{Refused, Why, is_found, run};
use super::{Family, Plan, nft};

/// Which program is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Choice {
    /// The first that can.
    Auto,
    /// nft.
    Nft,
    /// Whatever is called `iptables` and `ip6tables`.
    Iptables,
    /// The iptables that sets the rules of nft.
    IptablesNft,
    /// The iptables with the kernel's older tables.
    IptablesLegacy,
}

/// Whether IPv6 is redirected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Ipv6 {
    /// Where it can be; where not, that is said and no failure.
    Auto,
    /// Or nothing is.
    On,
    /// It is left alone.
    Off,
}

/// What was done, in a sentence each.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Done {
    /// What is so now.
    pub told: String,
    /// What is not as one might expect.
    pub notes: Vec<String>,
}

/// Sets the rules, in the place of those that an earlier run set.
///
/// # Errors
/// What keeps the programs from it. The rules are then none, or those from before.
pub fn set_up(plan: &Plan, choice: Choice, ipv6: Ipv6) -> Result<Done, String> {
    let mut done = Done::default();
    let mut refusals = Vec::new();
    for backend in choice.installed()? {
        match set_up_with(backend, plan, ipv6, &mut done.notes) {
            Ok(families) => {
                let (ports, port) = (&plan.ports, plan.port);
                done.told = format!("{families}: TCP to {ports} is redirected to port {port}, by {backend}");
                return Ok(done);
            }
            // No other program may do more.
            Err(refused) if refused.why == Why::Rights => return Err(refused.to_string()),
            Err(refused) => refusals.push(refused.to_string()),
        }
    }
    Err(refusals.join("\n"))
}

fn set_up_with(
    backend: Backend,
    plan: &Plan,
    ipv6: Ipv6,
    notes: &mut Vec<String>,
) -> Result<&'static str, Refused> {
    const BOTH: &str = "IPv4 and IPv6";
    const ONE: &str = "IPv4";
    if ipv6 == Ipv6::On && !has_ipv6() {
        return Err(Refused::no_ipv6());
    }
    backend.apply(plan, Family::V4)?;
    match ipv6 {
        Ipv6::Off => Ok(ONE),
        Ipv6::Auto if !has_ipv6() => {
            notes.push("there is no IPv6 here, so only IPv4 is redirected".into());
            Ok(ONE)
        }
        Ipv6::Auto => match backend.apply(plan, Family::V6) {
            Ok(()) => Ok(BOTH),
            Err(refused) => {
                notes.push(format!("IPv6 is not redirected and goes past hedgerow: {refused}"));
                Ok(ONE)
            }
        },
        Ipv6::On => match backend.apply(plan, Family::V6) {
            Ok(()) => Ok(BOTH),
            Err(refused) => {
                Err(refused.and_then(backend.remove(Family::V4), "the rules for IPv4 are still there"))
            }
        },
    }
}

/// Takes the rules away, of every program that could have set them. Nothing there is no failure.
///
/// # Errors
/// What keeps the programs from it.
pub fn remove(choice: Choice, ipv6: Ipv6) -> Result<Done, String> {
    let mut names = Vec::new();
    let families = families(ipv6);
    for backend in choice.installed()? {
        // Looking into the old tables brings them to life, and they are in the way of the new ones.
        if choice == Choice::Auto && backend == Backend::Iptables("-legacy") && !has_legacy_tables() {
            continue;
        }
        for &family in &families {
            match backend.remove(family) {
                Ok(()) => {}
                // What cannot be there is not there.
                Err(refused) if choice == Choice::Auto && refused.why == Why::Kernel => {}
                Err(refused) if ipv6 == Ipv6::Auto && family == Family::V6 && refused.why != Why::Rights => {}
                Err(refused) => return Err(refused.to_string()),
            }
        }
        names.push(backend.to_string());
    }
    Ok(Done { told: format!("no redirect is left ({})", names.join(", ")), notes: Vec::new() })
}

/// The shell script that does what [`set_up`] or [`remove`] do by the first program that is there, or would be asked
/// for. It needs no rights and looks at no rules: it takes for granted that there are none before a set-up, and all of
/// them before a removal.
pub fn script(plan: &Plan, choice: Choice, ipv6: Ipv6, is_removal: bool) -> String {
    let backend = match choice.installed() {
        Ok(backends) => backends[0],
        Err(_) => choice.candidates()[0],
    };
    let mut script = String::from("#!/bin/sh\nset -e\n");
    for family in families(ipv6) {
        let input = match backend {
            Backend::Nft if is_removal => nft::remove(family),
            Backend::Nft => nft::apply(plan, family),
            Backend::Iptables(_) if is_removal => {
                let filter = if plan.reject_quic { Present::WHOLE } else { Present::default() };
                iptables::remove([Present::WHOLE, filter])
            }
            Backend::Iptables(_) => iptables::apply(plan, family, [Present::default(); 2]),
        };
        let command = [&[backend.loader(family).as_str()], backend.loader_arguments()].concat().join(" ");
        script += &format!("# {family}\n{command} <<'END'\n{input}END\n");
    }
    script
}

fn families(ipv6: Ipv6) -> Vec<Family> {
    match ipv6 {
        Ipv6::Off => vec![Family::V4],
        Ipv6::Auto if !has_ipv6() => vec![Family::V4],
        Ipv6::Auto | Ipv6::On => vec![Family::V4, Family::V6],
    }
}

/// Whether the kernel speaks IPv6; the file is missing where it was built or started without.
fn has_ipv6() -> bool {
    Path::new("/proc/self/net/if_inet6").exists()
}

/// Whether anything has used the kernel's older tables in this network namespace.
fn has_legacy_tables() -> bool {
    let is_used = |name| fs::read_to_string(name).is_ok_and(|tables| !tables.trim().is_empty());
    ["/proc/self/net/ip_tables_names", "/proc/self/net/ip6_tables_names"].into_iter().any(is_used)
}

impl Choice {
    fn candidates(self) -> &'static [Backend] {
        match self {
            Self::Auto => &[Backend::Nft, Backend::Iptables(""), Backend::Iptables("-legacy")],
            Self::Nft => &[Backend::Nft],
            Self::Iptables => &[Backend::Iptables("")],
            Self::IptablesNft => &[Backend::Iptables("-nft")],
            Self::IptablesLegacy => &[Backend::Iptables("-legacy")],
        }
    }

    /// Those that are on this machine, at least one.
    fn installed(self) -> Result<Vec<Backend>, String> {
        let is_installed = |backend: &&Backend| is_found(&backend.loader(Family::V4));
        let installed: Vec<_> = self.candidates().iter().filter(is_installed).copied().collect();
        match (self, installed.as_slice()) {
            (Self::Auto, []) => {
                Err("neither nft nor iptables is installed: one of the packages nftables and \
                                     iptables is needed"
                    .into())
            }
            (_, []) => {
                let backend = self.candidates()[0];
                Err(Refused::absent(&backend.loader(Family::V4)).to_string())
            }
            _ => Ok(installed),
        }
    }
}

/// A program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Backend {
    Nft,
    /// With what its name ends in.
    Iptables(&'static str),
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nft => f.write_str("nft"),
            Self::Iptables(flavour) => write!(f, "iptables{flavour}"),
        }
    }
}

impl Backend {
    fn apply(self, plan: &Plan, family: Family) -> Result<(), Refused> {
        match self {
            Self::Nft => self.load(family, &nft::apply(plan, family)),
            Self::Iptables(_) => {
                let present = self.present(family, plan.reject_quic)?;
                let input = iptables::apply(plan, family, present);
                // Its tables are changed one after the other.
                self.load(family, &input).map_err(|refused| {
                    refused.and_then(self.remove(family), &format!("rules for {family} may still be there"))
                })
            }
        }
    }

    fn remove(self, family: Family) -> Result<(), Refused> {
        let input = match self {
            Self::Nft => nft::remove(family),
            Self::Iptables(_) => iptables::remove(self.present(family, false)?),
        };
        if input.is_empty() { Ok(()) } else { self.load(family, &input) }
    }

    /// What of ours is in the tables. One that the kernel lacks holds nothing, unless it is needed.
    fn present(self, family: Family, needs_filter: bool) -> Result<[Present; 2], Refused> {
        let [nat, filter] = iptables::TABLES;
        let look = |table| {
            let listing = run(&self.lister(family), &["-w", "10", "-t", table, "-S"], "")?;
            Ok(Present::read(&listing))
        };
        match look(filter) {
            Err(Refused { why: Why::Kernel, .. }) if !needs_filter => Ok([look(nat)?, Present::default()]),
            filter => Ok([look(nat)?, filter?]),
        }
    }

    fn load(self, family: Family, input: &str) -> Result<(), Refused> {
        run(&self.loader(family), self.loader_arguments(), input).map(drop)
    }

    fn loader(self, family: Family) -> String {
        match self {
            Self::Nft => "nft".into(),
            Self::Iptables(_) => format!("{}-restore", self.lister(family)),
        }
    }

    /// With iptables, somebody else's change is waited for as many seconds.
    fn loader_arguments(self) -> &'static [&'static str] {
        match self {
            Self::Nft => &["-f", "-"],
            Self::Iptables(_) => &["--noflush", "-w", "10"],
        }
    }

    fn lister(self, family: Family) -> String {
        let flavour = match self {
            Self::Nft => return "nft".into(),
            Self::Iptables(flavour) => flavour,
        };
        match family {
            Family::V4 => format!("iptables{flavour}"),
            Family::V6 => format!("ip6tables{flavour}"),
        }
    }
}
