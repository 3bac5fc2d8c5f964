//! What a tunnel's first bytes are.

use hedgerow::listen::sniff::{Sniff, sniff};

use crate::Target;

/// A tunnel's first bytes: more of them never change a decision, and the sixteenth brings one at the latest.
pub const SNIFF: Target = Target {
    check,
    inputs: 100_000,
    seeds: &[
        "GET / HTTP/1.1\r\n",
        "OPTIONS * HTTP/1.1\r\n",
        "DELETE /x HTTP/1.0\r\n",
        "PATCH /x",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "\u{16}\u{3}\u{1}\u{2}",
        "EHLO a.example\r\n",
    ],
};

/// The first line of HTTP/2's preface: the longest that has to be seen.
const LONGEST: usize = 16;

fn check(data: &[u8]) {
    let mut before = Sniff::Undecided;
    for length in 0..=data.len().min(2 * LONGEST) {
        let now = sniff(&data[..length]);
        assert!(before == Sniff::Undecided || now == before, "{before:?} became {now:?} at {length}");
        assert!(now != Sniff::Undecided || length < LONGEST, "undecided after {length} bytes");
        before = now;
    }
    assert_eq!(sniff(data), before, "the rest does not matter");
    if before == Sniff::Http {
        let method = data.split(|byte| *byte == b' ').next().unwrap_or_default();
        assert!(method.iter().all(u8::is_ascii_uppercase));
    }
}
