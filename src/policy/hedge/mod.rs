//! When a second attempt starts, and whether it is worth one.
//!
//! A hedge pays where slowness is luck: a lost packet, a busy worker, a pause for garbage. Then a
//! second attempt has good odds, and sending it only to the slowest calls costs little. Where slowness
//! is shared, or all calls take much the same time, it is load for nothing.
//!
//! So `auto` does two things that a fixed delay cannot. It waits for the percentile that the extra-load
//! ratio pays for, which follows the upstream through the day. And it predicts from the times seen
//! what hedging would do to the p99; with too little to gain, or when hedges are seen not to win, it
//! holds back for 30 s and looks again.
//!
//! The prediction must not fool itself: once hedging works, slow calls are cancelled and never show how
//! slow they were. The window keeps cancelled attempts apart and the curve treats them as what they
//! are, observations cut short.
//!
//! The budget, the free permit and the closed breaker that a hedge needs are other policies; this one
//! says *when*, the pipeline asks the others.

mod curve;
mod delay;
mod window;
mod wins;

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use self::curve::Curve;
use self::delay::{ENOUGH_FOR_A_PERCENTILE, ENOUGH_FOR_A_PREDICTION};
use self::wins::Wins;
use crate::config::{Hedge, HedgeAfter};
use crate::units::Percent;

pub use self::window::LatencyWindow;

/// How long `auto` holds back before it looks again.
const HOLD: Duration = Duration::from_secs(30);
/// Share of wins below which slowness is taken for shared.
const LEAST_WINS: f64 = 0.05;
/// How long a plan serves before the percentile is looked up again.
const PLAN_AGE: Duration = Duration::from_millis(100);

/// What to do about one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plan {
    /// Start a second attempt when there is no response head by then.
    After(Duration),
    /// Start none, though there was no response head by then: it would not help.
    NoGain(Duration),
}

/// What `/status` shows for one route.
#[derive(Debug, Clone, PartialEq)]
pub struct HedgeReport {
    /// What calls are told now.
    pub plan: Plan,
    /// Samples in the window.
    pub samples: usize,
    /// Times to the response head; `None` without samples.
    pub quantiles: Option<Quantiles>,
    /// What hedging would do at other ratios; empty without samples.
    pub predictions: Vec<Prediction>,
    /// Share of wins among the last hundred hedges; `None` before the first.
    pub win_share: Option<Percent>,
    /// Until when `auto` holds back.
    pub held_until: Option<Instant>,
}

/// Times to the response head of a single attempt. Where cancelled attempts leave one unknown, it is
/// the longest time seen, a lower bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quantiles {
    /// The median.
    pub p50: Duration,
    /// Nine in ten.
    pub p90: Duration,
    /// Ninety-nine in a hundred: the predicted p99 of calls without hedging.
    pub p99: Duration,
}

/// What a hedge at the percentile that a ratio pays for is expected to do.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prediction {
    /// The extra-load ratio.
    pub ratio: Percent,
    /// The delay that it pays for.
    pub delay: Duration,
    /// The p99 with such hedges; as uncertain as [`Quantiles`].
    pub p99: Duration,
}

/// One route's memory for hedging, shared by its calls.
#[derive(Debug, Default)]
pub struct HedgeState {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    window: LatencyWindow,
    wins: Wins,
    cache: Option<Cached>,
    /// Samples since the cached plan was made.
    fresh: usize,
    hold: Option<Held>,
}

#[derive(Debug)]
struct Cached {
    plan: Plan,
    made: Instant,
    settings: Settings,
    /// Samples that it rests on.
    samples: usize,
}

/// What a plan depends on besides the samples.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Settings {
    after: HedgeAfter,
    initial: Duration,
    min: Duration,
    max: Duration,
    ratio: Percent,
}

#[derive(Debug, Clone, Copy)]
struct Held {
    until: Instant,
    ground: Ground,
}

/// Why `auto` holds back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ground {
    Prediction,
    FewWins,
}

impl HedgeState {
    /// Nothing seen yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Counts a response head that came `elapsed` after its attempt was sent. Failures that come faster
    /// than answers are for the caller to leave out: they would make the upstream look quick.
    pub fn record(&self, elapsed: Duration, now: Instant) {
        let mut inner = self.inner.lock();
        inner.window.record(elapsed, now);
        inner.fresh += 1;
    }

    /// Counts an attempt that was cancelled at the age of `elapsed` before its head: the loser of a
    /// pair, or one that ran into its deadline.
    pub fn record_cancelled(&self, elapsed: Duration, now: Instant) {
        let mut inner = self.inner.lock();
        inner.window.record_cancelled(elapsed, now);
        inner.fresh += 1;
    }

    /// Counts a hedge that won its race or did not.
    pub fn record_outcome(&self, won: bool) {
        self.inner.lock().wins.record(won);
    }

    /// Whether and when a call gets its second attempt. Asked for every call, so the answer is kept for
    /// up to 100 ms, or until there are a quarter more samples.
    pub fn plan(&self, cfg: &Hedge, ratio: Percent, now: Instant) -> Plan {
        match cfg.after {
            HedgeAfter::Fixed(delay) => Plan::After(delay),
            HedgeAfter::Percentile(_) | HedgeAfter::Auto => self.inner.lock().plan(cfg, ratio, now),
        }
    }

    /// What there is to see at `now`.
    pub fn report(&self, cfg: &Hedge, ratio: Percent, now: Instant) -> HedgeReport {
        let plan = self.plan(cfg, ratio, now);
        let mut inner = self.inner.lock();
        let curve = inner.window.curve(now);
        let predict = |curve: &Curve, hundredths| {
            let ratio = Percent::new(hundredths);
            let delay = delay::delay(&Hedge { after: HedgeAfter::Auto, ..cfg.clone() }, ratio, Some(curve));
            let p99 = curve.hedged_quantile(0.99, delay).unwrap_or_else(|| curve.longest());
            Prediction { ratio, delay, p99 }
        };
        HedgeReport {
            plan,
            samples: inner.window.len(now),
            quantiles: curve.as_ref().map(Quantiles::of),
            predictions: curve
                .iter()
                .flat_map(|curve| [5.0, 10.0, 25.0].map(|r| predict(curve, r)))
                .collect(),
            win_share: inner.wins.share(),
            held_until: inner.hold.map(|held| held.until).filter(|_| matches!(plan, Plan::NoGain(_))),
        }
    }
}

impl Inner {
    fn plan(&mut self, cfg: &Hedge, ratio: Percent, now: Instant) -> Plan {
        let settings = Settings { after: cfg.after, initial: cfg.initial, min: cfg.min, max: cfg.max, ratio };
        match &self.cache {
            Some(cached) if cached.settings != settings => self.hold = None,
            Some(cached) if cached.still_serves(self.fresh, now) => return cached.plan,
            Some(_) | None => {}
        }
        let samples = self.window.len(now);
        let plan = self.make_plan(cfg, ratio, samples, now);
        self.fresh = 0;
        self.cache = Some(Cached { plan, made: now, settings, samples });
        plan
    }

    fn make_plan(&mut self, cfg: &Hedge, ratio: Percent, samples: usize, now: Instant) -> Plan {
        let curve = if samples >= ENOUGH_FOR_A_PERCENTILE { self.window.curve(now) } else { None };
        let delay = delay::delay(cfg, ratio, curve.as_ref());
        if self.is_held(now) {
            return Plan::NoGain(delay);
        }
        if cfg.after == HedgeAfter::Auto {
            let judged = curve.as_ref().filter(|_| samples >= ENOUGH_FOR_A_PREDICTION);
            if let Some(ground) = self.ground_to_hold(judged, delay) {
                self.hold = Some(Held { until: now + HOLD, ground });
                return Plan::NoGain(delay);
            }
        }
        Plan::After(delay)
    }

    fn ground_to_hold(&self, curve: Option<&Curve>, delay: Duration) -> Option<Ground> {
        if self.wins.settled_share().is_some_and(|share| share.fraction() < LEAST_WINS) {
            return Some(Ground::FewWins);
        }
        curve.filter(|curve| delay::is_pointless(curve, delay)).map(|_| Ground::Prediction)
    }

    /// Whether a hold is on. When one ends that had few wins for its ground, the next hundred hedges
    /// are let through to see whether that has changed; what lost before would end the trial at once.
    fn is_held(&mut self, now: Instant) -> bool {
        match self.hold {
            Some(held) if held.until > now => true,
            Some(held) => {
                if held.ground == Ground::FewWins {
                    self.wins.clear();
                }
                self.hold = None;
                false
            }
            None => false,
        }
    }
}

impl Cached {
    fn still_serves(&self, fresh: usize, now: Instant) -> bool {
        fresh < ENOUGH_FOR_A_PERCENTILE.max(self.samples / 4)
            && now.saturating_duration_since(self.made) < PLAN_AGE
    }
}

impl Quantiles {
    fn of(curve: &Curve) -> Self {
        let at = |q| curve.quantile(q).unwrap_or_else(|| curve.longest());
        Self { p50: at(0.5), p90: at(0.9), p99: at(0.99) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(after: HedgeAfter) -> Hedge {
        Hedge {
            after,
            initial: Duration::from_millis(800),
            min: Duration::from_millis(5),
            max: Duration::from_millis(1_200),
            max_extra: 1,
            methods: Vec::new(),
            to: None,
        }
    }

    fn tenth() -> Percent {
        Percent::new(10.0)
    }

    fn delay_of(plan: Plan) -> f64 {
        match plan {
            Plan::After(delay) => delay.as_secs_f64() * 1e3,
            Plan::NoGain(_) => panic!("it holds back"),
        }
    }

    fn is_near(found: f64, expected: f64) -> bool {
        (found / expected - 1.0).abs() < 0.033
    }

    /// Times of 10, 20, … 1000 ms, over and over.
    fn even_spread(state: &HedgeState, samples: u64, now: Instant) {
        for n in 0..samples {
            state.record(Duration::from_millis((n % 100 + 1) * 10), now);
        }
    }

    /// One in twenty takes fifty times as long: worth a hedge.
    fn heavy_tail(state: &HedgeState, samples: u64, now: Instant) {
        for n in 0..samples {
            state.record(Duration::from_millis(if n % 20 == 19 { 1_000 } else { 20 }), now);
        }
    }

    fn same_time(state: &HedgeState, samples: u64, now: Instant) {
        for n in 0..samples {
            state.record(Duration::from_millis(100 + n % 10), now);
        }
    }

    #[test]
    fn the_initial_delay_holds_until_there_are_twenty_samples() {
        let (state, now) = (HedgeState::new(), Instant::now());
        let cfg = config(HedgeAfter::Percentile(Percent::new(75.0)));
        assert_eq!(state.plan(&cfg, tenth(), now), Plan::After(Duration::from_millis(800)));
        for _ in 0..19 {
            state.record(Duration::from_millis(50), now);
        }
        assert_eq!(state.plan(&cfg, tenth(), now), Plan::After(Duration::from_millis(800)));
        state.record(Duration::from_millis(50), now);
        assert!(is_near(delay_of(state.plan(&cfg, tenth(), now)), 50.0));
    }

    #[test]
    fn a_percentile_is_kept_within_its_bounds() {
        let (state, now) = (HedgeState::new(), Instant::now());
        even_spread(&state, 100, now);
        let at = |percent, min, max| {
            let mut cfg = config(HedgeAfter::Percentile(Percent::new(percent)));
            (cfg.min, cfg.max) = (Duration::from_millis(min), Duration::from_millis(max));
            delay_of(state.plan(&cfg, tenth(), now))
        };
        assert!(is_near(at(75.0, 1, 5_000), 750.0));
        assert!(is_near(at(99.0, 1, 5_000), 990.0));
        assert_eq!(at(75.0, 1, 100), 100.0);
        assert_eq!(at(1.0, 60, 100), 60.0);
    }

    #[test]
    fn auto_waits_for_the_percentile_that_the_ratio_pays_for() {
        let (state, now) = (HedgeState::new(), Instant::now());
        even_spread(&state, 100, now);
        let cfg = config(HedgeAfter::Auto);
        for (ratio, millis) in [(10.0, 900.0), (25.0, 750.0), (5.0, 950.0)] {
            let delay = delay_of(state.plan(&cfg, Percent::new(ratio), now));
            assert!(is_near(delay, millis), "{delay} at {ratio} %");
        }
    }

    #[test]
    fn a_fixed_delay_is_just_that() {
        let (state, now) = (HedgeState::new(), Instant::now());
        same_time(&state, 1_000, now);
        let fixed = config(HedgeAfter::Fixed(Duration::from_secs(7)));
        assert_eq!(state.plan(&fixed, tenth(), now), Plan::After(Duration::from_secs(7)));
    }

    #[test]
    fn auto_holds_back_where_a_second_try_takes_as_long_as_the_rest_of_the_first() {
        let (state, start) = (HedgeState::new(), Instant::now());
        let auto = config(HedgeAfter::Auto);
        same_time(&state, 199, start);
        assert!(matches!(state.plan(&auto, tenth(), start), Plan::After(_)), "199 samples prove nothing");
        same_time(&state, 100, start);
        assert!(matches!(state.plan(&auto, tenth(), start), Plan::NoGain(_)));
        let percentile = config(HedgeAfter::Percentile(Percent::new(90.0)));
        assert!(matches!(state.plan(&percentile, tenth(), start), Plan::After(_)), "who says when is obeyed");
    }

    #[test]
    fn a_hold_lasts_thirty_seconds_whatever_comes() {
        let (state, start) = (HedgeState::new(), Instant::now());
        let auto = config(HedgeAfter::Auto);
        same_time(&state, 300, start);
        assert!(matches!(state.plan(&auto, tenth(), start), Plan::NoGain(_)));
        let report = state.report(&auto, tenth(), start);
        assert_eq!(report.held_until, Some(start + HOLD));

        let later = start + Duration::from_secs(29);
        heavy_tail(&state, 3_000, later);
        assert!(matches!(state.plan(&auto, tenth(), later), Plan::NoGain(_)));
        assert!(matches!(state.plan(&auto, tenth(), start + HOLD), Plan::After(_)), "the tail has grown");
        assert_eq!(state.report(&auto, tenth(), start + HOLD).held_until, None);
    }

    #[test]
    fn auto_holds_back_when_hedges_do_not_win_and_then_tries_again() {
        let (state, start) = (HedgeState::new(), Instant::now());
        let auto = config(HedgeAfter::Auto);
        heavy_tail(&state, 1_000, start);
        for n in 0..99 {
            state.record_outcome(n % 33 == 0);
        }
        assert!(matches!(state.plan(&auto, tenth(), start), Plan::After(_)), "99 hedges prove nothing");
        state.record_outcome(true);
        let soon = start + PLAN_AGE;
        assert!(matches!(state.plan(&auto, tenth(), soon), Plan::NoGain(_)), "four of a hundred won");
        assert_eq!(state.report(&auto, tenth(), soon).win_share, Some(Percent::new(4.0)));

        let again = soon + HOLD;
        heavy_tail(&state, 1_000, again);
        for _ in 0..99 {
            assert!(matches!(state.plan(&auto, tenth(), again), Plan::After(_)), "the trial");
            state.record_outcome(false);
        }
        state.record_outcome(false);
        assert!(matches!(state.plan(&auto, tenth(), again + PLAN_AGE), Plan::NoGain(_)));
    }

    #[test]
    fn a_tail_that_winners_hide_is_no_ground_to_stop_them() {
        let (state, now) = (HedgeState::new(), Instant::now());
        let auto = config(HedgeAfter::Auto);
        for n in 0..1_000u64 {
            if n % 20 == 19 {
                // The slow primary, cancelled when its hedge answered at 25 + 20 ms.
                state.record_cancelled(Duration::from_millis(45), now);
            }
            state.record(Duration::from_millis(20 + n % 5), now);
        }
        assert!(matches!(state.plan(&auto, tenth(), now), Plan::After(_)));
    }

    #[test]
    fn changed_settings_hold_at_once() {
        let (state, now) = (HedgeState::new(), Instant::now());
        even_spread(&state, 100, now);
        let mut cfg = config(HedgeAfter::Percentile(Percent::new(50.0)));
        assert!(is_near(delay_of(state.plan(&cfg, tenth(), now)), 500.0));
        cfg.max = Duration::from_millis(300);
        assert_eq!(delay_of(state.plan(&cfg, tenth(), now)), 300.0);
    }

    #[test]
    fn the_report_tells_what_each_ratio_would_buy() {
        let (state, now) = (HedgeState::new(), Instant::now());
        let auto = config(HedgeAfter::Auto);
        assert_eq!(state.report(&auto, tenth(), now).quantiles, None);
        heavy_tail(&state, 1_000, now);
        let report = state.report(&auto, tenth(), now);
        let millis = |time: Duration| time.as_secs_f64() * 1e3;
        let quantiles = report.quantiles.unwrap();
        assert_eq!(report.samples, 1_000);
        assert!(is_near(millis(quantiles.p50), 20.0));
        assert!(is_near(millis(quantiles.p99), 1_000.0));
        let ratios: Vec<f64> = report.predictions.iter().map(|p| p.ratio.hundredths()).collect();
        assert_eq!(ratios, [5.0, 10.0, 25.0]);
        for prediction in &report.predictions {
            assert!(is_near(millis(prediction.p99), millis(prediction.delay) + 20.0), "{prediction:?}");
        }
        assert_eq!(report.win_share, None);
    }
}
