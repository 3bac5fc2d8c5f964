//! What was measured, and the table made of it.

use std::fmt::Write;
use std::time::Duration;

use crate::process::Cores;

/// One turn of one contestant.
#[derive(Debug)]
pub struct Sample {
    /// Good answers per second at saturation.
    pub per_second: f64,
    /// CPU seconds of the proxy for 100,000 requests at saturation; `None` without a proxy.
    pub cpu_per_100k: Option<f64>,
    /// Median latency at the fixed rate.
    pub p50: Duration,
    /// 99th percentile of it.
    pub p99: Duration,
    /// Requests that failed, of both runs.
    pub failed: u64,
}

/// Everything about one contestant.
#[derive(Debug, Default)]
pub struct Row {
    /// A sample of each round.
    pub samples: Vec<Sample>,
    /// Resident bytes: fresh, and with idle connections.
    pub memory: Option<(u64, u64)>,
}

impl Row {
    /// Failed requests of all rounds.
    pub fn failed(&self) -> u64 {
        self.samples.iter().map(|sample| sample.failed).sum()
    }

    fn median(&self, of: impl Fn(&Sample) -> f64) -> f64 {
        median(self.samples.iter().map(of).collect())
    }

    fn cpu(&self) -> Option<f64> {
        let all: Option<Vec<f64>> = self.samples.iter().map(|sample| sample.cpu_per_100k).collect();
        all.map(median)
    }

    /// The median over the rounds of what was added to `direct` in the same round, microseconds.
    fn added(&self, direct: &Self, of: impl Fn(&Sample) -> Duration) -> f64 {
        let pairs = self.samples.iter().zip(&direct.samples);
        median(pairs.map(|(own, line)| (of(own).as_secs_f64() - of(line).as_secs_f64()) * 1e6).collect())
    }
}

/// The smallest value that at least this share of the (sorted) values does not exceed; zero of none.
pub fn quantile(sorted: &[Duration], share: f64) -> Duration {
    let rank = (sorted.len() as f64 * share).ceil() as usize;
    sorted.get(rank.max(1) - 1).copied().unwrap_or_default()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[middle],
        _ => f64::midpoint(values[middle - 1], values[middle]),
    }
}

/// The table as text. The first row is the direct line, the second the floor.
pub fn print(rows: &[(&'static str, Row)], rate: u32, idle: usize, cores: Cores) -> String {
    let mut text = String::new();
    let rounds = rows.first().map_or(0, |(_, row)| row.samples.len());
    let pinned = match cores {
        Cores { proxy: Some(proxy), load: Some(load) } => {
            format!("proxy on core {proxy}, load on core {load}")
        }
        _ => "not pinned".to_owned(),
    };
    // Writing to a string does not fail.
    let _ = writeln!(text, "medians of {rounds} rounds; {pinned}; latency at {rate}/s; one proxy thread\n");
    let _ = writeln!(
        text,
        "{:<14} {:>9} {:>8} {:>10} {:>8} {:>10} {:>10} {:>9} {:>9} {:>7}",
        "",
        "req/s",
        "x floor",
        "CPU s/100k",
        "x floor",
        "added p50",
        "added p99",
        "RSS",
        format!("+{idle}"),
        "failed"
    );
    let (direct, floor) = (&rows[0].1, &rows[1].1);
    for (name, row) in rows {
        let rate_ratio = row.median(|sample| sample.per_second) / floor.median(|sample| sample.per_second);
        let cpu_ratio = row.cpu().zip(floor.cpu()).map(|(own, floor)| own / floor);
        let (p50, p99) = (row.added(direct, |sample| sample.p50), row.added(direct, |sample| sample.p99));
        let _ = writeln!(
            text,
            "{name:<14} {:>9.0} {rate_ratio:>8.2} {:>10} {:>8} {:>7.0} us {:>7.0} us {:>9} {:>9} {:>7}",
            row.median(|sample| sample.per_second),
            or_dash(row.cpu(), |cpu| format!("{cpu:.2}")),
            or_dash(cpu_ratio, |ratio| format!("{ratio:.2}")),
            p50,
            p99,
            or_dash(row.memory, |(fresh, _)| mebibytes(fresh)),
            or_dash(row.memory, |(_, crowded)| mebibytes(crowded)),
            row.failed(),
        );
    }
    let line = |of: fn(&Sample) -> Duration| direct.median(|sample| of(sample).as_secs_f64() * 1e6);
    let (p50, p99) = (line(|sample| sample.p50), line(|sample| sample.p99));
    let _ = writeln!(text, "\nthe direct line itself: p50 {p50:.0} us, p99 {p99:.0} us");
    text
}

fn or_dash<T>(value: Option<T>, show: impl Fn(T) -> String) -> String {
    value.map_or_else(|| "-".to_owned(), show)
}

fn mebibytes(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_values_that_were_measured() {
        let hundred: Vec<_> = (1..=100).map(Duration::from_micros).collect();
        assert_eq!(quantile(&hundred, 0.50), Duration::from_micros(50));
        assert_eq!(quantile(&hundred, 0.99), Duration::from_micros(99));
        assert_eq!(quantile(&hundred[..1], 0.99), Duration::from_micros(1));
        assert_eq!(quantile(&[], 0.99), Duration::ZERO);
    }

    #[test]
    fn the_median_of_an_even_number_lies_between_the_middle_two() {
        assert_eq!(median(vec![9.0, 1.0, 3.0]), 3.0);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 9.0]), 3.0);
    }
}
