//! The rules in the language of `iptables-restore`: a chain of our own in each table, and one jump to it.
//!
//! A table is changed in one transaction. Declaring a chain empties one that is there, but a jump is added to those
//! that are there, and there is no way to say "once": so what is there is looked at first, and old jumps are taken
//! out in the same transaction. The new one comes last, when its chain is whole.

use super::{Family, Plan, Ports, QUIC_PORT};

/// The chain's name, in both tables.
const CHAIN: &str = "HEDGEROW_OUTPUT";
/// The tables that can have one.
pub const TABLES: [&str; 2] = ["nat", "filter"];
/// What one `multiport` match takes.
const PORTS_IN_A_RULE: usize = 15;

/// What of ours is in one table.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Present {
    has_chain: bool,
    jumps: usize,
}

impl Present {
    /// What a set-up leaves.
    pub const WHOLE: Self = Self { has_chain: true, jumps: 1 };

    /// Reads it from what `iptables -S` prints.
    pub fn read(listing: &str) -> Self {
        let jump = jump('A');
        Self {
            has_chain: listing.lines().any(|line| line == format!("-N {CHAIN}")),
            jumps: listing.lines().filter(|line| *line == jump).count(),
        }
    }

    /// The lines that take the jumps out.
    fn without_jumps(self) -> String {
        format!("{}\n", jump('D')).repeat(self.jumps)
    }
}

/// Puts the rules of one family in the place of those that are there, which is what `present` tells in the order of
/// [`TABLES`].
pub fn apply(plan: &Plan, family: Family, present: [Present; 2]) -> String {
    let [nat, filter] = present;
    let mut ours =
        format!("-A {CHAIN} -m owner --uid-owner {} -j RETURN\n-A {CHAIN} -o lo -j RETURN\n", plan.proxy_uid);
    for range in plan.excluded_in(family) {
        ours += &format!("-A {CHAIN} -d {range} -j RETURN\n");
    }
    let mut wanted: String = to_ports(&plan.exclude_ports, "RETURN");
    let redirect = format!("REDIRECT --to-ports {}", plan.port);
    wanted += &match &plan.ports {
        Ports::All => format!("-A {CHAIN} -p tcp -j {redirect}\n"),
        Ports::These(ports) => to_ports(ports, &redirect),
    };
    let quic = match plan.reject_quic {
        true => replace(
            "filter",
            filter,
            &format!("{ours}-A {CHAIN} -p udp -m udp --dport {QUIC_PORT} -j REJECT\n"),
        ),
        false => take_away("filter", filter),
    };
    replace("nat", nat, &(ours + &wanted)) + &quic
}

/// Takes away what is there; empty when that is nothing.
pub fn remove(present: [Present; 2]) -> String {
    TABLES.into_iter().zip(present).map(|(table, present)| take_away(table, present)).collect()
}

fn replace(table: &str, present: Present, rules: &str) -> String {
    let old = present.without_jumps();
    format!("*{table}\n:{CHAIN} - [0:0]\n{rules}{old}{}\nCOMMIT\n", jump('A'))
}

fn take_away(table: &str, present: Present) -> String {
    if present == Present::default() {
        return String::new();
    }
    let chain = if present.has_chain { format!("-F {CHAIN}\n-X {CHAIN}\n") } else { String::new() };
    format!("*{table}\n{}{chain}COMMIT\n", present.without_jumps())
}

fn jump(action: char) -> String {
    format!("-{action} OUTPUT -j {CHAIN}")
}

fn to_ports(ports: &[u16], target: &str) -> String {
    let rule = |ports: &[u16]| {
        let ports: Vec<_> = ports.iter().map(u16::to_string).collect();
        format!("-A {CHAIN} -p tcp -m multiport --dports {} -j {target}\n", ports.join(","))
    };
    ports.chunks(PORTS_IN_A_RULE).map(rule).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kube::redirect::tests::plan;

    const NONE: [Present; 2] = [Present { has_chain: false, jumps: 0 }; 2];

    #[test]
    fn the_jump_comes_when_its_chain_is_whole() {
        let expected = "\
*nat
:HEDGEROW_OUTPUT - [0:0]
-A HEDGEROW_OUTPUT -m owner --uid-owner 2747 -j RETURN
-A HEDGEROW_OUTPUT -o lo -j RETURN
-A HEDGEROW_OUTPUT -d fd00::/8 -j RETURN
-A HEDGEROW_OUTPUT -p tcp -m multiport --dports 443,5432 -j RETURN
-A HEDGEROW_OUTPUT -p tcp -m multiport --dports 80,443 -j REDIRECT --to-ports 15301
-A OUTPUT -j HEDGEROW_OUTPUT
COMMIT
*filter
:HEDGEROW_OUTPUT - [0:0]
-A HEDGEROW_OUTPUT -m owner --uid-owner 2747 -j RETURN
-A HEDGEROW_OUTPUT -o lo -j RETURN
-A HEDGEROW_OUTPUT -d fd00::/8 -j RETURN
-A HEDGEROW_OUTPUT -p udp -m udp --dport 443 -j REJECT
-A OUTPUT -j HEDGEROW_OUTPUT
COMMIT
";
        assert_eq!(apply(&plan(), Family::V6, NONE), expected);
    }

    #[test]
    fn old_jumps_and_what_is_no_longer_wanted_are_taken_out() {
        let plan = Plan {
            ports: Ports::All,
            exclude_ports: vec![],
            exclude_cidrs: vec![],
            reject_quic: false,
            ..plan()
        };
        let present = [Present { has_chain: true, jumps: 2 }, Present::WHOLE];
        let expected = "\
*nat
:HEDGEROW_OUTPUT - [0:0]
-A HEDGEROW_OUTPUT -m owner --uid-owner 2747 -j RETURN
-A HEDGEROW_OUTPUT -o lo -j RETURN
-A HEDGEROW_OUTPUT -p tcp -j REDIRECT --to-ports 15301
-D OUTPUT -j HEDGEROW_OUTPUT
-D OUTPUT -j HEDGEROW_OUTPUT
-A OUTPUT -j HEDGEROW_OUTPUT
COMMIT
*filter
-D OUTPUT -j HEDGEROW_OUTPUT
-F HEDGEROW_OUTPUT
-X HEDGEROW_OUTPUT
COMMIT
";
        assert_eq!(apply(&plan, Family::V4, present), expected);
    }

    #[test]
    fn a_rule_takes_fifteen_ports() {
        let ports: Vec<u16> = (1..=31).collect();
        let rules = to_ports(&ports, "RETURN");
        let counts: Vec<_> = rules.lines().map(|rule| rule.matches(',').count() + 1).collect();
        assert_eq!(counts, [15, 15, 1]);
        assert!(rules.contains("--dports 16,17,"), "{rules}");
        assert_eq!(to_ports(&[], "RETURN"), "");
    }

    #[test]
    fn what_is_there_is_read_from_a_listing() {
        let listing = "-P OUTPUT ACCEPT\n-N HEDGEROW_OUTPUT\n-N HEDGEROW_OUTPUT2\n-A OUTPUT -j HEDGEROW_OUTPUT\n\
                       -A OUTPUT -j HEDGEROW_OUTPUT2\n-A HEDGEROW_OUTPUT -o lo -j RETURN\n";
        assert_eq!(Present::read(listing), Present::WHOLE);
        assert_eq!(Present::read("-P OUTPUT ACCEPT\n"), Present::default());
        assert_eq!(remove([Present::default(); 2]), "");
    }
}
