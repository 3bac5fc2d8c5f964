//! Inputs that are nearly right, made from seeds: blind, but near the seeds is where parsers err.

use std::ops::Range;

use fastrand::Rng;

/// Bytes that mean something to one parser or another.
const TELLING: &[u8] = b"\0\t\r\n ,:;@[]{}/%*#?&!|>'\"\\-+._~$09azAZ\x7f\x80\xff";
/// Longer inputs cost time and find nothing more.
const LONGEST: usize = 16 * 1024;

/// One of the seeds, changed in one to six places, mostly few.
pub fn mutate(seeds: &[&str], dice: &mut Rng) -> Vec<u8> {
    let mut data = dice.choice(seeds).map_or_else(Vec::new, |seed| seed.as_bytes().to_vec());
    for _ in 0..=dice.usize(..6) * dice.usize(..2) {
        change(&mut data, seeds, dice);
    }
    data.truncate(LONGEST);
    data
}

fn change(data: &mut Vec<u8>, seeds: &[&str], dice: &mut Rng) {
    let at = dice.usize(..=data.len());
    let telling = TELLING[dice.usize(..TELLING.len())];
    match dice.u8(..12) {
        0 => data.insert(at, telling),
        1 => data.insert(at, dice.u8(..)),
        2 if at < data.len() => data[at] = telling,
        3 if at < data.len() => data[at] ^= 1 << dice.u8(..8),
        4 => drop(data.drain(at..(at + short(dice)).min(data.len()))),
        5 => {
            let again = data[at..(at + short(dice)).min(data.len())].to_vec();
            data.splice(at..at, again);
        }
        // A part of another seed.
        6 => {
            let other = dice.choice(seeds).map_or(&[][..], |seed| seed.as_bytes());
            let from = dice.usize(..=other.len());
            let part = &other[from..(from + short(dice)).min(other.len())];
            data.splice(at..at, part.iter().copied());
        }
        // A word for a word: what passes the first look and is to fail the second.
        _ => {
            let other = dice.choice(seeds).map_or(&[][..], |seed| seed.as_bytes());
            let (old, new) = (word(data, at), word(other, dice.usize(..=other.len())));
            data.splice(old, other[new].iter().copied());
        }
    }
}

/// The word around `at`.
fn word(data: &[u8], at: usize) -> Range<usize> {
    let is_part = |byte: &&u8| byte.is_ascii_alphanumeric() || b"-_.%/*".contains(byte);
    let before = data[..at].iter().rev().take_while(is_part).count();
    let after = data[at..].iter().take_while(is_part).count();
    at - before..at + after
}

/// A length: mostly of a word, now and then of a passage.
fn short(dice: &mut Rng) -> usize {
    let most = if dice.u8(..8) == 0 { 512 } else { 12 };
    dice.usize(1..=most)
}
