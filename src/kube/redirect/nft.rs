//! The rules in the language of nft: a table of our own for each family, replaced as a whole.
//!
//! One file is one transaction, so that a table is never there in part. A table for each family, not one `inet`
//! table for both: kernels before 5.2 have no nat there, and IPv6 can be missing.

use super::{Family, Plan, Ports, QUIC_PORT, listed};

/// The table's name. Nobody else's rules are in it.
const TABLE: &str = "hedgerow";

/// Puts the rules of one family in the place of those that are there.
pub fn apply(plan: &Plan, family: Family) -> String {
    let (word, port) = (word(family), plan.port);
    let mut ours = format!("    meta skuid {} return\n    oifname \"lo\" return\n", plan.proxy_uid);
    let excluded = plan.excluded_in(family);
    if !excluded.is_empty() {
        ours += &format!("    {word} daddr {{ {} }} return\n", listed(&excluded));
    }
    let mut wanted = String::new();
    if !plan.exclude_ports.is_empty() {
        wanted += &format!("    tcp dport {{ {} }} return\n", listed(&plan.exclude_ports));
    }
    wanted += &match &plan.ports {
        Ports::All => format!("    meta l4proto tcp redirect to :{port}\n"),
        Ports::These(ports) => format!("    tcp dport {{ {} }} redirect to :{port}\n", listed(ports)),
    };
    // Where `nat` in the output hook has its place.
    let mut chains = format!(
        "  chain output_nat {{\n    type nat hook output priority -100; policy accept;\n{ours}{wanted}  }}\n"
    );
    if plan.reject_quic {
        chains += &format!(
            "  chain output_filter {{\n    type filter hook output priority 0; policy accept;\n{ours}    udp dport {QUIC_PORT} reject\n  }}\n"
        );
    }
    format!("{}table {word} {TABLE} {{\n{chains}}}\n", remove(family))
}

/// Takes the table of one family away. One that is not there is made first: deleting nothing is an error.
pub fn remove(family: Family) -> String {
    let word = word(family);
    format!("table {word} {TABLE} {{}}\ndelete table {word} {TABLE}\n")
}

fn word(family: Family) -> &'static str {
    match family {
        Family::V4 => "ip",
        Family::V6 => "ip6",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kube::redirect::tests::plan;

    #[test]
    fn a_table_replaces_the_one_before() {
        let expected = "\
table ip hedgerow {}
delete table ip hedgerow
table ip hedgerow {
  chain output_nat {
    type nat hook output priority -100; policy accept;
    meta skuid 2747 return
    oifname \"lo\" return
    ip daddr { 10.0.0.0/8, 192.0.2.7/32 } return
    tcp dport { 443, 5432 } return
    tcp dport { 80, 443 } redirect to :15301
  }
  chain output_filter {
    type filter hook output priority 0; policy accept;
    meta skuid 2747 return
    oifname \"lo\" return
    ip daddr { 10.0.0.0/8, 192.0.2.7/32 } return
    udp dport 443 reject
  }
}
";
        assert_eq!(apply(&plan(), Family::V4), expected);
    }

    #[test]
    fn what_is_not_wanted_has_no_rule() {
        let plan = Plan {
            ports: Ports::All,
            exclude_ports: vec![],
            exclude_cidrs: vec!["10.0.0.0/8".parse().unwrap()],
            reject_quic: false,
            ..plan()
        };
        let expected = "\
table ip6 hedgerow {}
delete table ip6 hedgerow
table ip6 hedgerow {
  chain output_nat {
    type nat hook output priority -100; policy accept;
    meta skuid 2747 return
    oifname \"lo\" return
    meta l4proto tcp redirect to :15301
  }
}
";
        assert_eq!(apply(&plan, Family::V6), expected);
    }
}
