//! Every target on its seeds and on some thousand mutations of them, new ones each time.
//!
//! `FUZZ_TIMES=100` makes it a hundred times as many.

use hedgerow_fuzz::{
    CACHE, DEADLINE, FANOUT, FRAMING, HELLO, HOP_BY_HOP, PATH_GLOB, POLICY, RETRY, SNIFF, TARGET, Target,
    mutate::mutate,
};

/// Shows the input when the check panics.
struct Shown<'a>(&'a [u8]);

impl Drop for Shown<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the input was b\"{}\"", self.0.escape_ascii());
        }
    }
}

fn smoke(target: &Target) {
    let times = std::env::var("FUZZ_TIMES").ok().and_then(|times| times.parse().ok()).unwrap_or(1);
    for seed in target.seeds {
        let _shown = Shown(seed.as_bytes());
        (target.check)(seed.as_bytes());
    }
    let mut dice = fastrand::Rng::new();
    for _ in 0..target.inputs * times {
        let input = mutate(target.seeds, &mut dice);
        let _shown = Shown(&input);
        (target.check)(&input);
    }
}

#[test]
fn deadlines_are_bounded_and_written_as_they_were_read() {
    smoke(&DEADLINE);
}

#[test]
fn targets_have_one_normal_form() {
    smoke(&TARGET);
}

#[test]
fn hop_by_hop_fields_stay_behind_in_both_ways() {
    smoke(&HOP_BY_HOP);
}

#[test]
fn framing_that_is_taken_has_one_meaning() {
    smoke(&FRAMING);
}

#[test]
fn a_hello_says_the_same_in_any_pieces() {
    smoke(&HELLO);
}

#[test]
fn sniffing_never_changes_its_mind() {
    smoke(&SNIFF);
}

#[test]
fn a_policy_is_usable_or_its_problems_have_a_place() {
    smoke(&POLICY);
}

#[test]
fn path_globs_match_as_a_simple_matcher_does() {
    smoke(&PATH_GLOB);
}

#[test]
fn a_cache_keeps_and_gives_what_it_may() {
    smoke(&CACHE);
}

#[test]
fn what_is_said_about_retries_is_bounded_and_goes_on() {
    smoke(&RETRY);
}

#[test]
fn a_fan_out_is_runnable_or_its_fault_has_a_place() {
    smoke(&FANOUT);
}
