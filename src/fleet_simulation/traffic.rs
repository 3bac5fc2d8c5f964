//! What went to Redis, and how busy it was.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use tokio::time::Instant;

/// A command that Redis has done.
struct Command {
    at: Instant,
    op: &'static str,
    /// How long it held up the others.
    took: Duration,
}

/// All commands, in their order.
#[derive(Default)]
pub(super) struct Traffic(Vec<Command>);

impl Traffic {
    pub(super) fn note(&mut self, at: Instant, op: &'static str, took: Duration) {
        self.0.push(Command { at, op, took });
    }

    fn between(&self, from: Instant, to: Instant) -> &[Command] {
        let begin = self.0.partition_point(|command| command.at < from);
        let end = self.0.partition_point(|command| command.at < to);
        &self.0[begin..end.max(begin)]
    }

    pub(super) fn count(&self, from: Instant, to: Instant) -> u64 {
        self.between(from, to).len() as u64
    }

    /// Commands a second.
    pub(super) fn rate(&self, from: Instant, to: Instant) -> f64 {
        self.count(from, to) as f64 / (to - from).as_secs_f64()
    }

    /// The same by op.
    pub(super) fn rates(&self, from: Instant, to: Instant) -> BTreeMap<&'static str, f64> {
        let mut rates = BTreeMap::new();
        for command in self.between(from, to) {
            *rates.entry(command.op).or_default() += 1.0 / (to - from).as_secs_f64();
        }
        rates
    }

    /// The most commands in any time of this `length`.
    pub(super) fn peak(&self, from: Instant, to: Instant, length: Duration) -> u64 {
        most(self.between(from, to).iter(), length)
    }

    /// The same of one op.
    pub(super) fn peak_of(&self, op: &str, from: Instant, to: Instant, length: Duration) -> u64 {
        most(self.between(from, to).iter().filter(|command| command.op == op), length)
    }

    pub(super) fn count_of(&self, op: &str, from: Instant, to: Instant) -> u64 {
        self.between(from, to).iter().filter(|command| command.op == op).count() as u64
    }

    /// The share of its time that Redis was busy.
    pub(super) fn busy(&self, from: Instant, to: Instant) -> f64 {
        let took: Duration = self.between(from, to).iter().map(|command| command.took).sum();
        took.as_secs_f64() / (to - from).as_secs_f64()
    }
}

fn most<'a>(commands: impl Iterator<Item = &'a Command>, length: Duration) -> u64 {
    let (mut recent, mut most) = (VecDeque::new(), 0);
    for command in commands {
        recent.push_back(command.at);
        while recent.front().is_some_and(|at| *at + length <= command.at) {
            recent.pop_front();
        }
        most = most.max(recent.len() as u64);
    }
    most
}
