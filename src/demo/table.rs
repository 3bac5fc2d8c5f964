//! What was measured, as a table and as a bar for each tool. At most 80 columns wide, as the
//! narrowest usual terminal.

use std::fmt::Write;
use std::time::Duration;

use super::agent::Question;

/// Everything about one way of asking.
pub(super) struct Row {
    /// As the table calls it.
    pub(super) name: &'static str,
    /// As they were measured.
    pub(super) questions: Vec<Question>,
    /// How many requests the tools saw.
    pub(super) upstream_requests: u64,
}

impl Row {
    /// One call after the other: the sum of the calls of each question that `gather` measured. The tools
    /// do not slow each other down, so waiting for them in turn would show the same and take minutes.
    pub(super) fn sequential(gather: &Self) -> Self {
        let in_turn = |question: &Question| Question {
            took: question.calls.iter().map(|call| call.took).sum(),
            calls: question.calls.clone(),
        };
        Self {
            name: "sequential",
            questions: gather.questions.iter().map(in_turn).collect(),
            upstream_requests: gather.upstream_requests,
        }
    }
}

/// The table: a line for each way of asking.
pub(super) fn summary(rows: &[Row]) -> String {
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = writeln!(
        text,
        "{:<16} {:>9} {:>9} {:>15} {:>7} {:>18}",
        "", "p50", "p99", "answered of 15", "least", "upstream requests"
    );
    for Row { name, questions, upstream_requests } in rows {
        let took = sorted(questions.iter().map(|question| question.took));
        let answered = sorted(questions.iter().map(answered));
        let _ = writeln!(
            text,
            "{name:<16} {:>6} ms {:>6} ms {:>15} {:>7} {upstream_requests:>18}",
            quantile(&took, 0.50).as_millis(),
            quantile(&took, 0.99).as_millis(),
            quantile(&answered, 0.50),
            quantile(&answered, 0.0),
        );
    }
    text.push_str("sequential: the sum of the gather's calls. answered: the median and the least of all.\n");
    text
}

fn answered(question: &Question) -> usize {
    question.calls.iter().filter(|call| call.is_answered).count()
}

/// The smallest value that at least this share of the values does not exceed; the default of none.
fn quantile<T: Copy + Default>(sorted: &[T], share: f64) -> T {
    let rank = (sorted.len() as f64 * share).ceil() as usize;
    sorted.get(rank.max(1) - 1).copied().unwrap_or_default()
}

fn sorted<T: Ord>(values: impl Iterator<Item = T>) -> Vec<T> {
    let mut values: Vec<T> = values.collect();
    values.sort_unstable();
    values
}

/// Whether to use colours.
#[derive(Debug, Clone, Copy)]
pub(super) struct Paint {
    /// On a terminal.
    pub(super) is_on: bool,
}

const GREEN: &str = "32";
const YELLOW: &str = "33";
const RED: &str = "31";

impl Paint {
    fn dye(self, colour: &str, text: &str) -> String {
        match self.is_on && !text.is_empty() {
            true => format!("\x1b[{colour}m{text}\x1b[0m"),
            false => text.to_owned(),
        }
    }
}

/// Columns that nothing printed is wider than.
#[cfg(test)]
pub(super) const WIDTH: usize = 80;

/// Cells of the longest bar.
const BAR: usize = 40;

/// One tool's worst call both ways, and how often it answered.
#[derive(Debug, Clone, Copy, Default)]
struct Seen {
    worst: Duration,
    answered: usize,
}

impl Seen {
    fn of(questions: &[Question], tool: usize) -> Self {
        questions.iter().map(|question| question.calls[tool]).fold(Self::default(), |seen, call| Self {
            worst: seen.worst.max(call.took),
            answered: seen.answered + usize::from(call.is_answered),
        })
    }
}

/// A bar for each tool: its slowest call through hedgerow, and how much longer the plain gather waited.
pub(super) fn bars(names: &[&str], plain: &[Question], hedged: &[Question], paint: Paint) -> String {
    let seen: Vec<(Seen, Seen)> =
        (0..names.len()).map(|tool| (Seen::of(plain, tool), Seen::of(hedged, tool))).collect();
    let longest = seen.iter().map(|(plain, hedged)| plain.worst.max(hedged.worst)).max().unwrap_or_default();
    let mut text = String::new();
    let _ = writeln!(
        text,
        "slowest call: {} hedgerow, {} the plain gather beyond that{:>24}",
        paint.dye(GREEN, "█"),
        paint.dye(RED, "░"),
        "ms     answered"
    );
    for (name, (plain, hedged)) in names.iter().zip(seen) {
        let bar = bar(hedged.worst, plain.worst, longest, paint);
        let (before, after) = (plain.worst.as_millis(), hedged.worst.as_millis());
        let _ = writeln!(
            text,
            "{name:<9} {bar} {before:>5} → {after:<5}{:>6} → {}",
            plain.answered, hedged.answered
        );
    }
    text
}

/// [`BAR`] cells for `longest`. Where hedgerow was the slower one, the excess is shown as such.
fn bar(hedged: Duration, plain: Duration, longest: Duration, paint: Paint) -> String {
    let cells = |time: Duration| match longest.is_zero() {
        true => 0,
        false => (time.as_secs_f64() / longest.as_secs_f64() * BAR as f64).round() as usize,
    };
    let (hedged, plain) = (cells(hedged), cells(plain));
    let both = "█".repeat(hedged.min(plain));
    let saved = "░".repeat(plain.saturating_sub(hedged));
    let lost = "▓".repeat(hedged.saturating_sub(plain));
    let rest = " ".repeat(BAR.saturating_sub(hedged.max(plain)));
    [paint.dye(GREEN, &both), paint.dye(RED, &saved), paint.dye(YELLOW, &lost), rest].concat()
}

#[cfg(test)]
mod tests {
    use super::super::agent::Called;
    use super::*;

    const PLAIN: Paint = Paint { is_on: false };

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    /// A question whose calls took so long; those of 600 ms and more got no answer.
    fn question(calls: &[u64]) -> Question {
        let calls: Vec<Called> =
            calls.iter().map(|call| Called { took: ms(*call), is_answered: *call < 600 }).collect();
        let took = calls.iter().map(|call| call.took).max().unwrap_or_default();
        Question { took, calls }
    }

    #[test]
    fn quantiles_are_values_that_were_measured() {
        let twenty: Vec<u64> = (1..=20).collect();
        assert_eq!(quantile(&twenty, 0.50), 10);
        assert_eq!(quantile(&twenty, 0.99), 20);
        assert_eq!(quantile(&twenty, 0.0), 1);
        assert_eq!(quantile::<u64>(&[], 0.99), 0);
    }

    #[test]
    fn a_row_tells_median_tail_and_what_was_answered() {
        let questions = vec![question(&[100, 200]), question(&[300, 700]), question(&[150, 120])];
        let row = Row { name: "gather", questions, upstream_requests: 6 };
        let text = summary(&[Row::sequential(&row), row]);
        let words = |start: &str| -> Vec<String> {
            let line = text.lines().find(|line| line.starts_with(start)).unwrap();
            line.split_whitespace().map(str::to_owned).collect()
        };
        assert_eq!(words("gather"), ["gather", "200", "ms", "700", "ms", "2", "1", "6"]);
        assert_eq!(words("sequential "), ["sequential", "300", "ms", "1000", "ms", "2", "1", "6"]);
    }

    #[test]
    fn a_bar_shows_what_was_saved_and_admits_what_was_lost() {
        assert_eq!(bar(ms(100), ms(300), ms(400), PLAIN).trim_end(), "█".repeat(10) + &"░".repeat(20));
        assert_eq!(bar(ms(300), ms(100), ms(400), PLAIN).trim_end(), "█".repeat(10) + &"▓".repeat(20));
        assert_eq!(bar(ms(0), ms(0), ms(0), PLAIN), " ".repeat(BAR));
    }

    #[test]
    fn bars_fit_a_terminal_and_have_colours_only_there() {
        let (plain, hedged) = ([question(&[120, 2000])], [question(&[119, 551])]);
        let text = bars(&["quotes", "calendar"], &plain, &hedged, PLAIN);
        assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "{text}");
        assert!(text.contains("2000 → 551       0 → 1"), "{text}");
        assert!(!text.contains('\x1b'));
        assert!(bars(&["quotes"], &plain, &hedged, Paint { is_on: true }).contains("\x1b[32m█"));
    }
}
