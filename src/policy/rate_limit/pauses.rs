//! Who has been asked by the upstream to stay away, and until when.
//!
//! The answers of an upstream make the entries, so their number is bounded: a client that tries a
//! thousand keys must not cost memory for each. Entries that are over go first. When all are live the
//! one that ends soonest goes, since it has least left to protect: dropping a long one would send calls
//! into certain 429s for a minute, dropping this one sends them a little early.

use std::collections::HashMap;

use tokio::time::Instant;

use super::line::Line;
use crate::policy::identity::Credential;

/// Live pauses of single credentials.
pub(super) const MOST: usize = 1024;

/// Calls that show the same credentials; those that show none are a group of their own.
pub(super) type Group = Option<Credential>;

/// The pauses of single credentials, with the calls that wait for their end.
#[derive(Debug, Default)]
pub(super) struct Pauses {
    of: HashMap<Group, Pause>,
    /// When the last of them is over. A credential that was paused need not come back to end its pause, and until
    /// somebody does, every call would have to say whether it is the one.
    last: Option<Instant>,
}

/// A pause of one credential. It lasts until it is ended, which its time alone does not do: those who wait
/// for it have to be led back into line first.
#[derive(Debug)]
pub(super) struct Pause {
    pub(super) until: Instant,
    pub(super) held: Line,
}

impl Pauses {
    /// Whether there is none that anybody could be in. Forgets those that are over and that nobody waits for.
    pub(super) fn are_over(&mut self, now: Instant) -> bool {
        if !self.of.is_empty() && self.last.is_none_or(|last| last <= now) {
            self.of.retain(|_, pause| pause.held.len() > 0);
        }
        self.of.is_empty()
    }

    /// Lets the pause of a group that has one last until then at least; how many of those who wait for it are
    /// late through that, and leave.
    pub(super) fn extend(&mut self, group: &Group, until: Instant) -> Option<usize> {
        let pause = self.of.get_mut(group)?;
        if pause.until >= until {
            return Some(0);
        }
        pause.until = until;
        self.last = self.last.max(Some(until));
        Some(pause.held.dismiss_late(until))
    }

    pub(super) fn find(&mut self, group: &Group) -> Option<&mut Pause> {
        self.of.get_mut(group)
    }

    /// Ends the pause, when its time is over; returns those who waited for it.
    pub(super) fn end_if_over(&mut self, group: &Group, now: Instant) -> Option<Line> {
        if self.of.get(group)?.until > now {
            return None;
        }
        self.of.remove(group).map(|pause| pause.held)
    }

    /// Begins a pause for a group that has none; whether there is a place for it. The second value is
    /// what waited for those that made room.
    pub(super) fn begin(&mut self, group: Group, until: Instant, now: Instant) -> (bool, Vec<Line>) {
        let mut led_back = Vec::new();
        if self.of.len() >= MOST {
            led_back.extend(self.of.extract_if(|_, pause| pause.until <= now).map(|(_, pause)| pause.held));
        }
        if self.of.len() >= MOST {
            let soonest = self
                .of
                .iter()
                .min_by_key(|(_, pause)| pause.until)
                .map(|(group, pause)| (*group, pause.until));
            match soonest {
                Some((soonest, end)) if end < until => {
                    led_back.extend(self.of.remove(&soonest).map(|pause| pause.held));
                }
                // The new one has least left to protect.
                _ => return (false, led_back),
            }
        }
        self.of.insert(group, Pause { until, held: Line::default() });
        self.last = self.last.max(Some(until));
        (true, led_back)
    }

    /// Live pauses, and the end of the longest.
    pub(super) fn live(&self, now: Instant) -> (usize, Option<Instant>) {
        let ends = || self.of.values().map(|pause| pause.until).filter(|until| *until > now);
        (ends().count(), ends().max())
    }
}
