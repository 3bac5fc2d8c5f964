//! Whether a call that failed is tried again, and after what wait.
//!
//! A retry helps where a failure is a matter of luck, and hurts where it is one of load: then it adds to
//! what it suffers from. So three things bound it, and each is there for what the others cannot do.
//!
//! - **A budget** rather than a count alone. "At most two tries" doubles the load of an upstream that fails
//!   every call; a tenth of the calls is a tenth, however bad it gets. The budget is the upstream's and paid
//!   for hedges as well ([`super::budget`]); the pipeline withdraws from it once this module says
//!   [`Next::After`], so that back-off does not hide what has been decided.
//! - **Full jitter.** Exponential back-off alone has all callers that failed together come back together,
//!   only ever more rarely. A wait drawn evenly from nought to the bound spreads them over all of it; of the
//!   variants compared in "Exponential Backoff And Jitter" (AWS Architecture Blog, 2015) it made among the
//!   fewest calls. Half of the waits are short, which the budget makes harmless. gRPC draws from the same
//!   range (gRFC A6).
//! - **One layer.** Retries of several layers multiply, and no layer sees the product. A request that says
//!   of itself that it is a retry is left to whoever retries it ([`crate::wire::retry_mark`]).
//!
//! A proxy must not repeat what may have had an effect unless twice is the same as once (RFC 9110 section
//! 9.2.2): the method, the caller's key or the route have to say so. What never reached the upstream has
//! had no effect, whatever it is.
//!
//! When the upstream says how long to wait, the wait begins there: never sooner than told (RFC 9110 section
//! 10.2.3). The jitter of the back-off is added on top, since all who were refused together were told the
//! same second; it is cut to half of the time that then remains, so that a wait that fits is not lost to
//! its jitter. A told zero is thereby plain back-off, and cannot make a loop that spins. gRPC's push-back
//! is meant to be exact (gRFC A6), but later is always allowed and a fleet is a fleet there as well.
//!
//! A wait that leaves no time for an answer is not begun: a tenth of what is left has to remain behind it, up
//! to a second. The caller gets at once what the upstream said, its field included, rather than a timeout
//! later.
//!
//! A decider: no clock, no dice, no state. The loop is the pipeline's.

use std::time::Duration;

use crate::config::Retry;
use crate::wire::push_back;

/// What has come of a call so far, as far as it matters here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tried {
    /// Tries made, the first included: at least 1.
    pub tries: u32,
    /// Nothing of the request can have had an effect: it was not sent, or was refused unread.
    pub never_reached: bool,
    /// Twice does no more than once, as method, key or route tell.
    pub is_idempotent: bool,
    /// The request is itself a retry of the layer above.
    pub is_callers_retry: bool,
    /// The whole body is at hand for another try.
    pub can_be_sent: bool,
    /// The answer asked for no other try.
    pub is_final: bool,
    /// How long the answer asked to wait ([`push_back::wait`]); `None` without such a wish or an answer.
    pub told: Option<Duration>,
}

/// What to do about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Try again after this wait.
    After(Duration),
    /// Let it be.
    Stop(Stop),
}

/// Why a call is not tried again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// The policy allows no more tries.
    Attempts,
    /// The upstream asked for no other try, or for a wait that leaves no time.
    PushBack,
    /// The request is a retry of the layer above, whose business it is.
    CallersRetry,
    /// The upstream may have acted on it, and twice may be more than once.
    NotIdempotent,
    /// The body has gone by and was not kept.
    Body,
    /// The back-off leaves no time.
    Deadline,
    /// There was no token for extra load; said by the pipeline, which withdraws it.
    Budget,
}

/// The longest wait that an upstream can ask for where a call has no deadline: a caller that would wait
/// longer than this is better told, and its connection and body freed. As long as the default of
/// `rate_limit.max_pause`.
const LONGEST_WITHOUT_DEADLINE: Duration = Duration::from_secs(60);

/// The most that has to remain for the answer behind a wait. With a second an upstream has had its fair chance,
/// as the breaker measures it by default. A tenth of a long deadline would be more than most answers take, and
/// throw away waits that fit.
const ANSWER: Duration = Duration::from_secs(1);

/// Decides about a call that got no acceptable answer. `left` is the time until its deadline, `None`
/// without one; `random` is drawn evenly from 0 to 1. A wait that is returned leaves time for an answer,
/// and is not shorter than what the answer told.
///
/// Of several reasons to stop, the one that the call itself has comes before the clock's: it would hold
/// for any other try as well.
pub fn decide(cfg: &Retry, tried: &Tried, left: Option<Duration>, random: f64) -> Next {
    if tried.is_final {
        return Next::Stop(Stop::PushBack);
    }
    if tried.is_callers_retry {
        return Next::Stop(Stop::CallersRetry);
    }
    if !tried.never_reached && !tried.is_idempotent {
        return Next::Stop(Stop::NotIdempotent);
    }
    if !tried.can_be_sent {
        return Next::Stop(Stop::Body);
    }
    if tried.tries >= cfg.max_attempts {
        return Next::Stop(Stop::Attempts);
    }
    let wait = backoff(cfg, tried.tries, random);
    let room = left.map(|left| left - (left / 10).min(ANSWER));
    match tried.told {
        Some(told) => after_told(told, wait, room),
        None if room.is_some_and(|room| wait >= room) => Next::Stop(Stop::Deadline),
        None => Next::After(wait),
    }
}

/// Waits as long as told, and the jitter as far as there is room for it.
fn after_told(told: Duration, jitter: Duration, room: Option<Duration>) -> Next {
    // A wait of the longest that is believed may stand for a longer one: it fits nowhere.
    let most = room.unwrap_or(LONGEST_WITHOUT_DEADLINE).min(push_back::LONGEST);
    if told >= most {
        return Next::Stop(Stop::PushBack);
    }
    Next::After(told + jitter.min((most - told) / 2))
}

/// The wait after so many `tries`, by full jitter: `random`, from 0 to 1, of `backoff` doubled for each
/// try after the first, at most `max_backoff`. Never panics, whatever the numbers.
pub fn backoff(cfg: &Retry, tries: u32, random: f64) -> Duration {
    // So often doubled, a nanosecond exceeds any duration; more would leave the range of floats.
    const MOST_DOUBLINGS: u32 = 128;
    let doublings = tries.saturating_sub(1).min(MOST_DOUBLINGS);
    let grown = cfg.backoff.as_secs_f64() * 2_f64.powi(doublings as i32);
    let bound = grown.min(cfg.max_backoff.as_secs_f64());
    Duration::try_from_secs_f64(bound * random).unwrap_or_default().min(cfg.max_backoff)
}

#[cfg(test)]
mod tests {
    use http::Method;
    use proptest::prelude::*;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn config(max_attempts: u32, backoff: Duration, max_backoff: Duration) -> Retry {
        Retry { max_attempts, backoff, max_backoff, methods: vec![Method::GET] }
    }

    /// As the policy has it where `retry` is on and nothing more is said.
    fn usual() -> Retry {
        config(2, 100 * MS, 2000 * MS)
    }

    /// A GET that got a bad status, once.
    fn failed() -> Tried {
        Tried {
            tries: 1,
            never_reached: false,
            is_idempotent: true,
            is_callers_retry: false,
            can_be_sent: true,
            is_final: false,
            told: None,
        }
    }

    fn told(wait: Duration) -> Tried {
        Tried { told: Some(wait), ..failed() }
    }

    const LEFT: Option<Duration> = Some(Duration::from_secs(30));

    #[test]
    fn an_idempotent_call_is_tried_again_after_back_off() {
        assert_eq!(decide(&usual(), &failed(), LEFT, 0.5), Next::After(50 * MS));
        assert_eq!(decide(&usual(), &failed(), None, 0.5), Next::After(50 * MS));
    }

    #[test]
    fn each_reason_to_stop_is_told() {
        for (tried, stop) in [
            (Tried { tries: 2, ..failed() }, Stop::Attempts),
            (Tried { is_final: true, ..failed() }, Stop::PushBack),
            (Tried { is_callers_retry: true, ..failed() }, Stop::CallersRetry),
            (Tried { is_callers_retry: true, never_reached: true, ..failed() }, Stop::CallersRetry),
            (Tried { is_idempotent: false, ..failed() }, Stop::NotIdempotent),
            (Tried { can_be_sent: false, ..failed() }, Stop::Body),
            (Tried { can_be_sent: false, never_reached: true, ..failed() }, Stop::Body),
        ] {
            assert_eq!(decide(&usual(), &tried, LEFT, 0.5), Next::Stop(stop), "{tried:?}");
        }
        assert_eq!(decide(&usual(), &failed(), Some(50 * MS), 0.5), Next::Stop(Stop::Deadline));
        assert_eq!(decide(&usual(), &failed(), Some(Duration::ZERO), 0.0), Next::Stop(Stop::Deadline));
    }

    #[test]
    fn what_never_reached_the_upstream_may_be_sent_again_whatever_it_is() {
        let tried = Tried { never_reached: true, is_idempotent: false, ..failed() };
        assert_eq!(decide(&usual(), &tried, LEFT, 0.5), Next::After(50 * MS));
    }

    #[test]
    fn back_off_doubles_up_to_its_bound() {
        let cfg = config(10, 100 * MS, 1000 * MS);
        for (tries, bound) in [(1, 100), (2, 200), (3, 400), (4, 800), (5, 1000), (6, 1000), (u32::MAX, 1000)]
        {
            assert_eq!(backoff(&cfg, tries, 1.0), bound * MS, "{tries}");
            assert_eq!(backoff(&cfg, tries, 0.25), bound * MS / 4, "{tries}");
            assert_eq!(backoff(&cfg, tries, 0.0), Duration::ZERO, "{tries}");
        }
        let cfg = config(10, 5000 * MS, 1000 * MS);
        assert_eq!(backoff(&cfg, 1, 1.0), 1000 * MS, "the bound holds for the first wait too");
    }

    #[test]
    fn c063_a_wait_beyond_the_deadline_is_not_begun() {
        let ninety = Duration::from_secs(90);
        assert_eq!(decide(&usual(), &told(ninety), LEFT, 0.5), Next::Stop(Stop::PushBack));
        assert_eq!(decide(&usual(), &told(ninety), Some(ninety), 0.0), Next::Stop(Stop::PushBack));
        assert_eq!(decide(&usual(), &told(ninety), None, 0.5), Next::Stop(Stop::PushBack));
        assert_eq!(decide(&usual(), &told(ninety), Some(2 * ninety), 0.0), Next::After(ninety));
        // It is capped when it is read: who knows how long it really is.
        let year = Some(Duration::from_secs(365 * 24 * 3600));
        assert_eq!(decide(&usual(), &told(push_back::LONGEST), year, 0.5), Next::Stop(Stop::PushBack));
    }

    #[test]
    fn those_who_were_told_the_same_wait_come_back_spread() {
        let second = Duration::from_secs(1);
        assert_eq!(decide(&usual(), &told(second), LEFT, 0.0), Next::After(second));
        assert_eq!(decide(&usual(), &told(second), LEFT, 0.5), Next::After(second + 50 * MS));
        // The wait fits and its jitter does not: it is cut.
        assert_eq!(decide(&usual(), &told(second), Some(1200 * MS), 0.9), Next::After(second + 40 * MS));
        assert_eq!(decide(&usual(), &told(second), None, 0.5), Next::After(second + 50 * MS));
    }

    /// A wait that left a tenth of a second of thirty was begun, and ended in a timeout with nothing said.
    #[test]
    fn a_wait_that_leaves_no_time_for_an_answer_is_not_begun() {
        let second = Duration::from_secs(1);
        for (left, fits) in [
            (100 * MS, 89 * MS),
            (10 * second, 8999 * MS),
            (30 * second, 28_999 * MS),
            (3600 * second, 3_598_999 * MS),
        ] {
            let left = Some(left);
            let cfg = |wait: Duration| config(2, 2 * wait, 2 * wait);
            assert!(matches!(decide(&usual(), &told(fits), left, 0.5), Next::After(_)), "{left:?}");
            assert_eq!(decide(&cfg(fits), &failed(), left, 0.5), Next::After(fits), "{left:?}");
            let late = fits + MS;
            assert_eq!(decide(&usual(), &told(late), left, 0.5), Next::Stop(Stop::PushBack), "{left:?}");
            assert_eq!(decide(&cfg(late), &failed(), left, 0.5), Next::Stop(Stop::Deadline), "{left:?}");
        }
    }

    #[test]
    fn a_told_zero_is_plain_back_off() {
        assert_eq!(decide(&usual(), &told(Duration::ZERO), LEFT, 0.5), Next::After(50 * MS));
    }

    fn spans() -> impl Strategy<Value = Duration> {
        prop_oneof![
            (0_u64..5_000).prop_map(Duration::from_millis),
            (0_u64..400_000).prop_map(Duration::from_secs),
            any::<(u64, u32)>().prop_map(|(s, n)| Duration::new(s / 2, n % 1_000_000_000)),
        ]
    }

    fn any_tried() -> impl Strategy<Value = Tried> {
        let flags = any::<[bool; 5]>();
        (0_u32..6, flags, prop::option::of(spans())).prop_map(|(tries, flags, told)| {
            let [never_reached, is_idempotent, is_callers_retry, can_be_sent, is_final] = flags;
            Tried { tries, never_reached, is_idempotent, is_callers_retry, can_be_sent, is_final, told }
        })
    }

    proptest! {
        #[test]
        fn back_off_stays_within_its_bounds(
            first in spans(), most in spans(), tries in any::<u32>(), random in 0.0..1.0,
        ) {
            let cfg = config(2, first, most);
            let wait = backoff(&cfg, tries, random);
            prop_assert!(wait <= most);
            let doubled = first.as_secs_f64() * 2_f64.powf(f64::from(tries.saturating_sub(1)).min(200.0));
            let expected = doubled.min(most.as_secs_f64()) * random;
            let error = (wait.as_secs_f64() - expected).abs();
            prop_assert!(error <= 1e-9 + expected * 1e-9, "{wait:?}, not {expected} s");
            prop_assert!(backoff(&cfg, tries, random) <= backoff(&cfg, tries.saturating_add(1), random));
        }

        #[test]
        fn no_number_makes_back_off_panic(
            first in spans(), most in spans(), tries in any::<u32>(), random in any::<f64>(),
        ) {
            prop_assert!(backoff(&config(2, first, most), tries, random) <= most);
        }

        #[test]
        fn a_wait_fits_and_is_never_sooner_than_told(
            tried in any_tried(), first in spans(), most in spans(),
            left in prop::option::of(spans()), random in 0.0..1.0,
        ) {
            let cfg = config(4, first, most);
            if let Next::After(wait) = decide(&cfg, &tried, left, random) {
                prop_assert!(left.is_none_or(|left| wait + left / 10 <= left || wait + ANSWER <= left));
                prop_assert!(left.is_none_or(|left| wait < left), "{wait:?} of {left:?}");
                prop_assert!(tried.told.is_none_or(|told| wait >= told), "{wait:?} for {:?}", tried.told);
                prop_assert!(tried.tries < cfg.max_attempts);
                prop_assert!(tried.never_reached || tried.is_idempotent);
                prop_assert!(tried.can_be_sent && !tried.is_callers_retry && !tried.is_final);
            }
        }

        #[test]
        fn a_wait_that_was_told_and_fits_is_always_taken(
            told_ms in 0_u64..60_000, more_ms in 1_u64..60_000, random in 0.0..1.0,
        ) {
            let wait = Duration::from_millis(told_ms);
            let left = wait + (wait / 9 + MS).min(ANSWER) + Duration::from_millis(more_ms);
            let next = decide(&usual(), &told(wait), Some(left), random);
            prop_assert!(matches!(next, Next::After(_)), "{next:?}");
        }
    }
}
