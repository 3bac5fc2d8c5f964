//! What a fleet asks of Redis on a quiet day.

use std::time::Duration;

use super::breaker;
use super::table::{Table, number};
use super::world::{Setting, World};
use crate::config::RateLimit;
use crate::units::Rate;

const BEGIN: f64 = 120.0;
const LENGTH: f64 = 60.0;

/// Commands a second of pods that call each of `upstreams` so often.
pub(super) fn steady(sizes: &[usize], upstreams: usize) -> Table {
    let title =
        format!("A quiet day: {upstreams} upstreams for each pod; rates of 10,000/s where there are any");
    let columns = [
        "pods",
        "calls/s each",
        "shared",
        "beat/s",
        "read/s",
        "rate/s",
        "ops/s",
        "busy %",
        "rollout: worst s",
    ];
    let mut table = Table::new(&title, columns);
    let rate = RateLimit {
        rate: Rate::per_second(10_000.0),
        burst: 1_000,
        max_pause: Duration::from_secs(60),
        is_shared: true,
    };
    for pods in sizes {
        for calls in [0.01, 0.1] {
            for rate in [None, Some(rate)] {
                let setting = Setting { upstreams, rate, ..breaker::setting(*pods, calls, 1) };
                let mut world = World::new(setting);
                world.run_until(BEGIN + LENGTH);
                let (begin, end) = (world.at(BEGIN), world.now);
                let rates = world.traffic.rates(begin, end);
                let of = |op: &str| number(rates.get(op).copied().unwrap_or(0.0));
                let shared = if rate.is_some() { "breaker, rate" } else { "breaker" };
                let worst = world.traffic.peak(world.start, begin, Duration::from_secs(1));
                table.row([
                    pods.to_string(),
                    number(calls),
                    shared.to_owned(),
                    of("beat"),
                    of("read"),
                    of("rate"),
                    number(world.traffic.rate(begin, end)),
                    number(100.0 * world.traffic.busy(begin, end)),
                    worst.to_string(),
                ]);
            }
        }
    }
    table
}
