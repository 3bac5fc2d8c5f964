//! The rate that pods share: how near the sum of what they let through is to it, and what that costs.

use std::time::Duration;

use tokio::time::Instant;

use super::table::{Table, number};
use super::world::{At, Setting, World};
use crate::config::RateLimit;
use crate::units::Rate;

const RATE: f64 = 200.0;
const BURST: u32 = 50;
/// When the measuring begins, and how long it lasts.
const BEGIN: f64 = 60.0;
const LENGTH: f64 = 120.0;
const WINDOW: Duration = Duration::from_secs(20);

/// Who has the demand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Demand {
    /// All, the same.
    Even,
    /// One pod.
    One,
    /// One pod, and half-way another.
    Moves,
    /// The same, as the first dies without a word.
    Dies,
    /// All, and half-way only one is left; the others have died without a word.
    Survives,
    /// All, half of the rate and half-way ten times the rate.
    Surges,
}

impl Demand {
    fn word(self) -> &'static str {
        match self {
            Self::Even => "even",
            Self::One => "one pod",
            Self::Moves => "moves",
            Self::Dies => "dies",
            Self::Survives => "survives",
            Self::Surges => "surges",
        }
    }
}

/// What came of a demand.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) admitted: f64,
    /// In windows of 20 s.
    pub(super) least: f64,
    pub(super) most: f64,
    /// Tokens beyond what the bucket of one pod alone would have had, at the worst moment.
    pub(super) excess: f64,
    /// The most tokens within a second.
    second: usize,
    /// Seconds from half-way until nine tenths are let through again.
    regained: f64,
    asked: f64,
    ops_per_thousand: f64,
    ops: f64,
    busy: f64,
}

pub(super) fn setting(pods: usize, seed: u64) -> Setting {
    let rate = RateLimit {
        rate: Rate::per_second(RATE),
        burst: BURST,
        max_pause: Duration::from_secs(60),
        is_shared: true,
    };
    Setting { pods, seed, upstreams: 1, calls: 0.0, breaker: None, rate: Some(rate), quorum: 2 }
}

impl Outcome {
    /// `offered` calls a second in all.
    pub(super) fn simulate(setting: Setting, demand: Demand, offered: f64) -> Self {
        let pods = setting.pods;
        let first = At { pod: 0, lane: 0 };
        let each = match demand {
            Demand::Even | Demand::Survives => offered / pods as f64,
            Demand::Surges => RATE / 2.0 / pods as f64,
            Demand::One | Demand::Moves | Demand::Dies => 0.0,
        };
        let mut world = World::new(Setting { calls: each, ..setting });
        if each == 0.0 {
            world.demand(first, offered);
        }
        world.run_until(BEGIN);
        let (calls, asked) = (world.tally.calls, world.tally.asked);
        let half = BEGIN + LENGTH / 2.0;
        world.run_until(half);
        match demand {
            Demand::Even | Demand::One => {}
            Demand::Surges => {
                (0..pods).for_each(|pod| world.demand(At { pod, lane: 0 }, 10.0 * RATE / pods as f64));
            }
            Demand::Survives => {
                for pod in 1..pods {
                    world.pods[pod].is_alive = false;
                    world.demand(At { pod, lane: 0 }, 0.0);
                }
                world.demand(first, offered);
            }
            Demand::Moves | Demand::Dies => {
                world.pods[0].is_alive = demand == Demand::Moves;
                world.demand(first, 0.0);
                world.demand(At { pod: 1, lane: 0 }, offered);
            }
        }
        world.run_until(BEGIN + LENGTH);
        Self::of(&world, offered, calls, asked, half)
    }

    fn of(world: &World, offered: f64, calls: u64, asked: u64, half: f64) -> Self {
        let (begin, end) = (world.at(BEGIN), world.now);
        let tokens = &world.tally.tokens;
        let tokens = &tokens[tokens.partition_point(|at| *at < begin)..];
        let count = |from: Instant, to: Instant| {
            tokens.partition_point(|at| *at < to) - tokens.partition_point(|at| *at < from)
        };
        let windows = |length: Duration, step: Duration| {
            let starts = std::iter::successors(Some(begin), move |at| Some(*at + step));
            starts.take_while(move |at| *at + length <= end).map(move |at| count(at, at + length))
        };
        let tenth = Duration::from_millis(100);
        let in_windows: Vec<_> = windows(WINDOW, tenth).collect();
        let per_second = |count: Option<&usize>| *count.unwrap_or(&0) as f64 / WINDOW.as_secs_f64();
        let new_calls = (world.tally.calls - calls).max(1) as f64;
        let due = 0.9 * offered.min(RATE);
        let half = world.at(half);
        let two = Duration::from_secs(2);
        let regained = std::iter::successors(Some(half), |at| Some(*at + tenth))
            .take_while(|at| *at + two <= end)
            .find(|at| count(*at, *at + two) as f64 / 2.0 >= due);
        Self {
            admitted: tokens.len() as f64 / LENGTH,
            least: per_second(in_windows.iter().min()),
            most: per_second(in_windows.iter().max()),
            excess: excess(tokens),
            second: windows(Duration::from_secs(1), tenth).max().unwrap_or(0),
            regained: regained.map_or(f64::INFINITY, |at| (at - half).as_secs_f64()),
            asked: 100.0 * (world.tally.asked - asked) as f64 / new_calls,
            ops_per_thousand: 1e3 * world.traffic.count_of("rate", begin, end) as f64 / new_calls,
            ops: world.traffic.rate(begin, end),
            busy: 100.0 * world.traffic.busy(begin, end),
        }
    }
}

/// By how many tokens the worst moment is beyond the burst and what the rate has brought.
fn excess(tokens: &[Instant]) -> f64 {
    let (mut debt, mut worst) = (0.0_f64, 0.0_f64);
    let mut last = None;
    for at in tokens {
        let passed = last.map_or(0.0, |last: Instant| (*at - last).as_secs_f64());
        debt = (debt - RATE * passed).max(0.0) + 1.0;
        worst = worst.max(debt);
        last = Some(*at);
    }
    (worst - f64::from(BURST)).max(0.0)
}

pub(super) fn rates(sizes: &[usize]) -> Table {
    let title = "A shared rate of 200/s, burst 50; calls wait for up to a second; 120 s, in any 20 s of them, and after half of them";
    let mut table = Table::new(
        title,
        [
            "pods",
            "demand",
            "offered/s",
            "admitted/s",
            "least 20 s",
            "most 20 s",
            "most 1 s",
            "excess tokens",
            "regained s",
            "asked %",
            "rate ops/1000",
            "ops/s",
            "busy %",
        ],
    );
    let cases = [
        (Demand::Even, 0.5),
        (Demand::Even, 1.0),
        (Demand::Even, 10.0),
        (Demand::One, 0.5),
        (Demand::One, 1.0),
        (Demand::One, 10.0),
        (Demand::Moves, 1.0),
        (Demand::Dies, 1.0),
        (Demand::Survives, 1.0),
        (Demand::Surges, 10.0),
    ];
    for pods in sizes {
        for (demand, times) in cases {
            let offered = times * RATE;
            let it = Outcome::simulate(setting(*pods, 1), demand, offered);
            let has_half = !matches!(demand, Demand::Even | Demand::One);
            table.row([
                pods.to_string(),
                demand.word().to_owned(),
                number(offered),
                number(it.admitted),
                number(it.least),
                number(it.most),
                it.second.to_string(),
                number(it.excess),
                if has_half { number(it.regained) } else { String::new() },
                number(it.asked),
                number(it.ops_per_thousand),
                number(it.ops),
                number(it.busy),
            ]);
        }
    }
    table
}
