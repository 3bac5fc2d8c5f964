//! Cache and coalescing together, over random interleavings: nobody ever sees what was answered to another.
//!
//! Each caller has a word that only its own credential brings, and the upstream writes the word of whoever asks into
//! all that it answers: head, body, errors, parts. Whatever an agent gets may hold its own word and no other's.

use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::time::timeout;

use crate::support::client::{Agent, Response, absolute, deadline_in};
use crate::support::hedgerow::{HedgerowProcess, Ports};
use crate::support::policy::{TOOL, tool};
use crate::support::upstream::{Reply, Seen, Upstream};
use crate::support::within;

const AGENTS: usize = 14;
const CALLS: usize = 60;

/// Who asks: the field that says so, and the word that stands for it.
const CALLERS: [(&str, &str, &str); 9] = [
    ("", "", "word-of-nobody"),
    ("Authorization", "Bearer a", "word-of-bearer-a"),
    ("Authorization", "Bearer b", "word-of-bearer-b"),
    ("Cookie", "sid=a", "word-of-cookie-a"),
    ("Cookie", "sid=b", "word-of-cookie-b"),
    ("X-Api-Key", "a", "word-of-key-a"),
    ("X-Api-Key", "b", "word-of-key-b"),
    ("Api-Key", "a", "word-of-other-key-a"),
    ("X-Goog-Api-Key", "a", "word-of-google-key-a"),
];
/// What the answers at `/varied` differ by beside that.
const PLANS: [&str; 2] = ["plan-gold", "plan-iron"];
/// What POSTs ask.
const QUESTIONS: [&str; 2] = ["question-one", "question-two"];
const PATHS: [&str; 4] = ["/a", "/a?q=1", "/b", "/varied"];

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn caller_of(seen: &Seen) -> &'static str {
    let shown = |(name, value, _): &&(&str, &str, &str)| !name.is_empty() && seen.header(name) == Some(value);
    CALLERS.iter().find(shown).unwrap_or(&CALLERS[0]).2
}

/// Something that an origin might say, with the caller's word all over it.
fn reply(seen: &Seen, rng: &mut Rng) -> Reply {
    let word = caller_of(seen);
    let plan = seen.header("x-plan").unwrap_or("no plan");
    let asked = String::from_utf8_lossy(&seen.body);
    // Longer than what is shared at times.
    let padding = "x".repeat(rng.usize(..3000));
    let body = format!("{word} {plan} {asked} {padding}");
    let is_confirmed = seen.header("if-none-match").is_some() && rng.bool();
    let mut reply = match rng.u8(..100) {
        0..4 => return Reply::reset(),
        4..8 => return Reply::ok(body.clone()).header("X-Word", word).cut(body.len() / 2),
        8..14 => Reply::status(503).body(body),
        14..18 => Reply::status(404).body(body),
        _ if is_confirmed => Reply::status(304),
        18..30 => Reply::ok(body).drip(3, ms(2)),
        _ => Reply::ok(body),
    };
    let controls = [
        "max-age=60",
        "public, max-age=60",
        "private, max-age=60",
        "s-maxage=60",
        "max-age=60, stale-while-revalidate=60",
        "max-age=60, stale-if-error=60",
        "no-cache",
        "no-store",
        "max-age=0",
    ];
    if rng.u8(..10) > 0 {
        reply = reply.header("Cache-Control", controls[rng.usize(..controls.len())]);
    }
    if rng.u8(..3) == 0 {
        reply = reply.header("Age", "100");
    }
    if rng.u8(..8) == 0 {
        reply = reply.header("Set-Cookie", &format!("own={word}"));
    }
    if seen.path() == "/varied" {
        reply = reply.header("Vary", "X-Plan");
    }
    // The same tag for all: it says which version, not whose.
    reply.header("ETag", "\"v1\"").header("X-Word", word).after(ms(rng.u64(..25)))
}

/// One call as an agent makes it.
struct Question {
    caller: &'static (&'static str, &'static str, &'static str),
    plan: &'static str,
    body: &'static str,
    method: &'static str,
    path: &'static str,
    headers: Vec<(&'static str, String)>,
}

impl Question {
    fn random(rng: &mut Rng) -> Self {
        let caller = &CALLERS[rng.usize(..CALLERS.len())];
        let plan = PLANS[rng.usize(..2)];
        let (method, path, body) = match rng.u8(..20) {
            0 => ("POST", "/a", ""),
            1..4 => ("POST", "/search", QUESTIONS[rng.usize(..2)]),
            4..6 => ("HEAD", PATHS[rng.usize(..4)], ""),
            _ => ("GET", PATHS[rng.usize(..4)], ""),
        };
        let mut headers = vec![("X-Plan", plan.to_owned())];
        if !caller.0.is_empty() {
            headers.push((caller.0, caller.1.to_owned()));
        }
        match rng.u8(..20) {
            0 => headers.push(("Range", "bytes=0-30".to_owned())),
            1 => headers.push(("If-None-Match", "\"v1\"".to_owned())),
            2 => headers.push(("Cache-Control", "no-cache".to_owned())),
            3 => headers.push(("Cache-Control", "max-stale".to_owned())),
            4 => headers.push(("x-request-deadline", deadline_in(ms(rng.u64(5..60))))),
            _ => {}
        }
        Self { caller, plan, body, method, path, headers }
    }

    fn bytes(&self, upstream: &str) -> Vec<u8> {
        let headers: Vec<_> = self.headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
        absolute(self.method, &format!("http://{upstream}{}", self.path), &headers, self.body.as_bytes())
    }

    /// Panics when the answer has anything of somebody else's.
    fn judge(&self, answer: &Response) {
        let mut text = String::from_utf8_lossy(&answer.body).into_owned();
        for (name, value) in answer.headers.lines() {
            text += &format!("\n{name}: {value}");
        }
        let own = self.caller.2;
        let told = || {
            format!("{} {} of {own} ({}): {} {text:.300}", self.method, self.path, self.plan, answer.status)
        };
        let foreign = CALLERS.iter().find(|(_, _, word)| *word != own && holds(&text, word));
        assert!(foreign.is_none(), "{foreign:?} in {}", told());
        if self.path == "/varied" {
            let other = PLANS.iter().find(|plan| **plan != self.plan).expect("there are several plans");
            assert!(!text.contains(other), "{other} in {}", told());
        }
        let other = QUESTIONS.iter().find(|question| **question != self.body && text.contains(**question));
        assert!(other.is_none(), "{other:?} in {}", told());
        // And what the upstream has said is the caller's in so many words.
        let is_own = answer.header("content-type") != Some("application/problem+json");
        if is_own && answer.status == 200 {
            assert_eq!(answer.header("x-word"), Some(own), "{}", told());
            if answer.complete && self.method != "HEAD" {
                assert!(text.starts_with(own), "{}", told());
            }
        }
    }
}

/// Whether the word stands there, and not only as the beginning of another one.
fn holds(text: &str, word: &str) -> bool {
    text.match_indices(word).any(|(at, _)| {
        let next = text[at + word.len()..].chars().next();
        next.is_none_or(|next| !next.is_ascii_alphanumeric() && next != '-')
    })
}

/// Calls one after the other, on connections that are kept while they last; some are left in their middle.
async fn run(ports: Ports, upstream: String, mut rng: Rng) {
    let mut kept: Option<Agent> = None;
    for _ in 0..CALLS {
        let question = Question::random(&mut rng);
        let mut agent = match kept.take() {
            Some(agent) => agent,
            None => ports.agent().await,
        };
        agent.send(question.bytes(&upstream)).await;
        let answer = agent.try_response(question.method);
        if rng.u8(..8) == 0 {
            // Gone by then, unless the answer was sooner.
            if let Ok(Ok(answer)) = timeout(ms(rng.u64(..20)), answer).await {
                question.judge(&answer);
            }
            continue;
        }
        // A connection that was ended between two calls is opened anew.
        let Ok(answer) = within(Duration::from_secs(60), answer).await else { continue };
        question.judge(&answer);
        if answer.complete && answer.header("connection") != Some("close") && rng.u8(..4) > 0 {
            kept = Some(agent);
        }
        if rng.u8(..3) == 0 {
            tokio::time::sleep(ms(rng.u64(..15))).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_agent_ever_sees_what_was_answered_to_another() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut rng = Rng::with_seed(seed);
    let for_replies = Arc::new(Mutex::new(rng.fork()));
    let upstream = Upstream::answering(move |seen| reply(seen, &mut for_replies.lock())).await;
    let stages = "hedge: { after: 15ms }, retry: { max_attempts: 2, backoff: 1ms }, breaker: off, \
                  extra_load: { ratio: 100%, floor: 100/s }, coalesce: { max_body: 2KiB }, \
                  cache: { ttl: 50ms, stale_while_revalidate: 1m, stale_if_error: 1m }, \
                  routes: [{ path: /search, methods: [POST], idempotent: true }]";
    let proxy = HedgerowProcess::start(&tool(upstream.address(), stages)).await;
    let address = upstream.address().to_string();
    let agents = (0..AGENTS).map(|_| tokio::spawn(run(*proxy, address.clone(), rng.fork())));
    for ended in join_all(agents.collect::<Vec<_>>()).await {
        ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()));
    }
    // It was about something: answers have been shared and kept, confirmed and renewed.
    let metrics = proxy.metrics().await;
    assert!(metrics.value("hedgerow_coalesced_total", &[TOOL]) > 5.0);
    for result in ["hit", "stale", "revalidated", "miss", "bypass"] {
        let count = metrics.value("hedgerow_cache_requests_total", &[TOOL, ("result", result)]);
        assert!(count > 0.0, "no {result}");
    }
    proxy.until_status(|status| status["in_flight"] == 0).await;
    proxy.until_metrics(|metrics| metrics.value("hedgerow_bulkhead_in_flight", &[TOOL]) == 0.0).await;
}
