//! The breaker that pods share: a provider that dies and comes back, a pod that is sick, failures by chance.

use std::time::Duration;

use tokio::time::Instant;

use super::table::{Table, number};
use super::world::{ANSWER, Provider, Setting, World};
use crate::config::{Breaker, StatusSet};
use crate::policy::breaker::State;

/// The provider dies when the fleet has found its rhythm.
const DEATH: f64 = 60.0;
/// What is waited for at most until the fleet's breaker opens.
const LONGEST: f64 = 4_000.0;

/// What a probe takes to fail where nobody answers.
pub(super) const HANG: Duration = Duration::from_secs(30);

fn config() -> Breaker {
    Breaker {
        consecutive_failures: Some(5),
        failure_rate: None,
        slow_rate: None,
        slow_after: Duration::from_secs(5),
        window: Duration::from_secs(60),
        min_requests: 20,
        open_for: Duration::from_secs(30),
        max_open_for: Duration::from_secs(300),
        half_open_probes: 1,
        failure_statuses: StatusSet::new([500, 502, 503, 504]),
        fair_chance: Duration::from_secs(1),
        is_shared: true,
    }
}

pub(super) fn setting(pods: usize, calls: f64, seed: u64) -> Setting {
    Setting { pods, seed, upstreams: 1, calls, breaker: Some(config()), rate: None, quorum: 2 }
}

/// A provider that is dead, until the fleet's breaker is open for a while.
fn death(setting: Setting) -> World {
    let mut world = World::new(setting);
    world.run_until(DEATH);
    world.provider.is_dead = true;
    let end = world.at(DEATH + LONGEST);
    world.run_while(end, |world| world.tally.fleet.is_empty());
    world
}

fn seconds(from: Instant, to: Instant) -> f64 {
    to.saturating_duration_since(from).as_secs_f64()
}

/// The median of what may be missing, which counts as longest.
fn median(mut times: Vec<f64>) -> f64 {
    times.sort_unstable_by(f64::total_cmp);
    times[times.len() / 2]
}

/// How often a small fleet is simulated; a large one is its own average.
fn runs(pods: usize) -> u64 {
    if pods >= 1_000 { 1 } else { 15 }
}

/// From the provider's death to the last pod that has heard.
pub(super) fn opening(sizes: &[usize], rates: &[f64], quorums: &[u32]) -> Table {
    let mut table = Table::new(
        "The provider dies: from the first failure to the fleet's breaker open, and to the pods' (median of 15 fleets, one from 1,000 pods on)",
        [
            "pods",
            "calls/s each",
            "quorum",
            "to quorum s",
            "to pod p50 ms",
            "to pod max ms",
            "failed/pod",
            "ops/s before",
            "ops in worst s",
            "deliveries",
            "busy in worst s %",
            "queue ms",
        ],
    );
    for quorum in quorums {
        for pods in sizes {
            for calls in rates {
                table.row(opening_row(*pods, *calls, *quorum));
            }
        }
    }
    table
}

fn opening_row(pods: usize, calls: f64, quorum: u32) -> [String; 12] {
    let second = Duration::from_secs(1);
    let mut columns: [Vec<f64>; 9] = Default::default();
    for seed in 0..runs(pods) {
        let mut world = death(Setting { quorum, ..setting(pods, calls, seed) });
        let (begin, death) = (world.at(DEATH - 20.0), world.at(DEATH));
        let first = world.tally.first_failure.unwrap_or(world.now);
        let open = world.tally.fleet.first().map_or(world.now, |(at, _)| *at);
        world.run_until(seconds(world.start, open) + 5.0);
        let now = world.now;
        let mut heard: Vec<_> =
            world.lanes().map(|lane| lane.opened.map_or(f64::INFINITY, |at| seconds(open, at))).collect();
        heard.sort_unstable_by(f64::total_cmp);
        let worst = world.traffic.busy(open, open + second);
        let row = [
            if world.tally.fleet.is_empty() { f64::INFINITY } else { seconds(first, open) },
            heard[heard.len() / 2] * 1e3,
            heard[heard.len() - 1] * 1e3,
            world.tally.failed as f64 / pods as f64,
            world.traffic.rate(begin, death),
            world.traffic.peak(death, now, second) as f64,
            world.tally.deliveries as f64,
            100.0 * worst,
            world.tally.longest_queue.as_secs_f64() * 1e3,
        ];
        for (column, value) in columns.iter_mut().zip(row) {
            column.push(value);
        }
    }
    let [a, b, c, d, e, f, g, h, i] = columns.map(|column| number(median(column)));
    [pods.to_string(), number(calls), quorum.to_string(), a, b, c, d, e, f, g, h, i]
}

/// From the provider's return to the last pod whose breaker is closed.
pub(super) fn returning(sizes: &[usize], rates: &[f64]) -> Table {
    let mut table = Table::new(
        "The provider returns, 20 or 40 s after the fleet's breaker has opened (the first wait is 30 s, the second 60 s)",
        [
            "pods",
            "calls/s each",
            "returns after s",
            "probe fails after s",
            "to closed s",
            "to last pod s",
            "probes",
            "without leave",
            "asked in vain",
            "probe ops",
            "of these in worst 0.1 s",
            "queue ms",
            "failed/pod after open",
        ],
    );
    for pods in sizes {
        for calls in rates {
            for (after, probe) in [(20.0, ANSWER), (40.0, ANSWER), (40.0, HANG)] {
                let row = Return::simulate(setting(*pods, *calls, 1), after, probe);
                table.row(row.cells(*pods, *calls, after, probe));
            }
        }
    }
    table
}

/// What came of a return.
pub(super) struct Return {
    closed: f64,
    pub(super) last: f64,
    pub(super) probes: u64,
    pub(super) unleased: u64,
    unanswered: u64,
    asks: u64,
    herd: u64,
    queue: Duration,
    failed: f64,
}

impl Return {
    pub(super) fn simulate(setting: Setting, after: f64, probe: Duration) -> Self {
        let mut world = death(setting);
        world.provider.fails_after = probe;
        let open = world.tally.fleet.first().map_or(world.now, |(at, _)| *at);
        let opened = seconds(world.start, open);
        world.run_until(opened + 1.0);
        let failed = world.tally.failed;
        world.tally.longest_queue = Duration::ZERO;
        world.run_until(opened + after);
        world.provider.is_dead = false;
        let back = world.now;
        let end = world.at(opened + after + 1_000.0);
        world.run_while(end, |world| world.lanes().next().is_some_and(|_| !is_over(world)));
        let closed = world.tally.fleet.iter().rev().find(|(_, state)| *state == State::Closed);
        let last = world.lanes().map(|lane| lane.closed.map_or(f64::INFINITY, |at| seconds(back, at)));
        let last = last.fold(0.0, f64::max);
        let tenth = Duration::from_millis(100);
        Self {
            closed: closed.map_or(f64::INFINITY, |(at, _)| seconds(back, *at)),
            last,
            probes: world.tally.probes,
            unleased: world.tally.unleased,
            unanswered: world.tally.unanswered,
            asks: world.traffic.count_of("probe", open, world.now),
            herd: world.traffic.peak_of("probe", open, world.now, tenth),
            queue: world.tally.longest_queue,
            failed: (world.tally.failed - failed) as f64 / world.pods.len() as f64,
        }
    }

    fn cells(&self, pods: usize, calls: f64, after: f64, probe: Duration) -> [String; 13] {
        [
            pods.to_string(),
            number(calls),
            number(after),
            number(probe.as_secs_f64()),
            number(self.closed),
            number(self.last),
            self.probes.to_string(),
            self.unleased.to_string(),
            self.unanswered.to_string(),
            self.asks.to_string(),
            self.herd.to_string(),
            number(self.queue.as_secs_f64() * 1e3),
            number(self.failed),
        ]
    }
}

/// The fleet's breaker has closed, and five seconds have passed.
fn is_over(world: &World) -> bool {
    let last = world.tally.fleet.last();
    last.is_some_and(|(at, state)| *state == State::Closed && world.now > *at + Duration::from_secs(5))
}

/// What came of a fleet whose provider is well.
pub(super) struct Health {
    pub(super) opened: u64,
    /// Pods that have opened.
    pub(super) pods: usize,
    pub(super) fleet: usize,
    failed: f64,
    ops: f64,
    reads: f64,
}

impl Health {
    pub(super) fn simulate(setting: Setting, provider: Provider, minutes: f64) -> Self {
        let mut world = World::new(setting);
        world.provider = provider;
        let end = DEATH + 60.0 * minutes;
        world.run_until(end);
        let opened = world.tally.fleet.iter().filter(|(_, state)| *state == State::Open).count();
        let (from, to) = (world.at(DEATH), world.at(end));
        Self {
            opened: world.tally.opened,
            pods: world.lanes().filter(|lane| lane.opened.is_some()).count(),
            fleet: opened,
            failed: 100.0 * world.tally.failed as f64 / world.tally.calls as f64,
            ops: world.traffic.rate(from, to),
            reads: world.traffic.count_of("read", from, to) as f64 / (60.0 * minutes),
        }
    }
}

/// Failures that are no reason for the fleet's breaker to open.
pub(super) fn health(sizes: &[usize], calls: f64, minutes: f64, quorums: &[u32]) -> Table {
    let title = format!(
        "The provider is well, {minutes} minutes at {calls} calls/s of each pod: how often breakers open"
    );
    let mut table = Table::new(
        &title,
        [
            "pods",
            "what fails",
            "quorum",
            "calls failed %",
            "pods' openings",
            "fleet's openings",
            "ops/s",
            "of these reads",
        ],
    );
    for quorum in quorums {
        for pods in sizes {
            let faults = [
                ("one pod".to_owned(), Provider { sick: 1, ..Provider::default() }),
                ("two pods".to_owned(), Provider { sick: 2, ..Provider::default() }),
                ("1 % of calls".to_owned(), Provider { failing: 0.01, ..Provider::default() }),
                ("5 % of calls".to_owned(), Provider { failing: 0.05, ..Provider::default() }),
                ("10 % of calls".to_owned(), Provider { failing: 0.1, ..Provider::default() }),
            ];
            for (name, provider) in faults {
                let health = Health::simulate(
                    Setting { quorum: *quorum, ..setting(*pods, calls, 1) },
                    provider,
                    minutes,
                );
                table.row([
                    pods.to_string(),
                    name,
                    quorum.to_string(),
                    number(health.failed),
                    health.opened.to_string(),
                    health.fleet.to_string(),
                    number(health.ops),
                    number(health.reads),
                ]);
            }
        }
    }
    table
}
