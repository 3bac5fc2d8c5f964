//! `POST /v1/fanout`: a list of calls, and one answer with whatever of it has come by one deadline.
//!
//! An agent that asks fifteen tools one by one, or waits for the slowest of fifteen, hands the whole list over
//! instead. The request is read and checked as a [`plan`]; a [`batch`] runs the calls, each on the same
//! [`journey`](crate::pipeline) as any other request, with the same guards ([`item`]); what came and what did
//! not is summed up in numbers and in one sentence for the model ([`summary`]), and goes out as one JSON object
//! ([`json`]) or as a stream of events, each result as it comes ([`events`]).
//!
//! **One deadline.** Every call gets the fan-out's own instant to end by, so that a call that is late fails in the
//! way of any late call: its upstream's breaker learns of it, its request is cancelled on the wire. The fan-out
//! drops by itself only what nobody waits for any more.
//!
//! **What is wrong with one call fails that call**: a URL that is none, a refused destination. Only what leaves it
//! open what was meant is an error of the whole.
//!
//! **No more memory than is said.** A request is bounded by `limits.fanout_body`, each result by its call's
//! `max_body_bytes`, and all that fan-outs hold at a time by one allowance, heads included; a result that finds no
//! room is cut short and says so. What is written of a result, which JSON may make some times longer, is made
//! when the client takes it, one at a time on a connection.

pub mod batch;
pub mod content;
pub mod events;
pub mod item;
pub mod json;
pub mod openapi;
pub mod plan;
pub mod summary;

use std::sync::Arc;
use std::time::Duration;

use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{Method, Request, Response, request};
use http_body_util::BodyExt as _;
use tokio::time::{Instant, timeout_at};

use self::batch::Batch;
use self::plan::Plan;
use self::summary::Language;
use crate::config::{self, Config};
use crate::error::{Bound, Error, Stage};
use crate::pipeline::Proxy;
use crate::pipeline::answer::{self, Answer, AnswerBody};
use crate::pipeline::ledger::Ledger;
use crate::policy::deadline::{Arrival, Deadline};
use crate::policy::room::{Gathered, Room};
use crate::respond::headers::VIA;
use crate::telemetry::metrics::{FanoutOutcome, Metrics};
use crate::wire::incoming::{BodyError, IncomingBody};
use crate::wire::preference;

/// Where the fan-out is.
pub const PATH: &str = "/v1/fanout";

static LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");

/// Whether a request for hedgerow itself is for this module.
pub fn serves(path: &str) -> bool {
    matches!(path, PATH | openapi::PATH)
}

/// Answers a request for one of the endpoints. Dropping the future cancels all calls that are under way.
pub async fn answer(
    proxy: &Arc<Proxy>,
    config: Arc<Config>,
    request: Request<IncomingBody>,
    arrival: Arrival,
    mut ledger: Ledger,
) -> Answer {
    ledger.is_served_here(request.uri().path());
    if request.uri().path() == openapi::PATH {
        return openapi::answer(request.method(), ledger);
    }
    let (head, body) = request.into_parts();
    let wants_events = preference::best(&head.headers, &header::ACCEPT, &[JSON, EVENTS]) == EVENTS;
    let language = Language::of(&head.headers);
    let mut account =
        Account { metrics: proxy.metrics().clone(), arrival, outcome: FanoutOutcome::ClientLeft };
    match read(proxy, &config, head, body, arrival).await {
        Ok(read) => {
            ledger.bounded_by(Some(read.deadline.at));
            let request_id = ledger.id().to_string();
            let batch = Batch::new(proxy, config, read, account, &request_id, language);
            match wants_events {
                true => events::answer(batch, ledger),
                false => json::answer(batch, ledger).await,
            }
        }
        Err(error) => {
            if error != Error::BodyBrokenOff {
                account.outcome = FanoutOutcome::Refused;
            }
            answer::refuse(error, ledger, None)
        }
    }
}

/// The fan-out in the metrics, however it ends.
pub struct Account {
    metrics: Arc<Metrics>,
    /// When it arrived.
    pub arrival: Arrival,
    /// What came of it: until something else is known, its client has left.
    pub outcome: FanoutOutcome,
}

impl Drop for Account {
    fn drop(&mut self) {
        self.metrics.fanout(self.outcome, self.arrival.now.elapsed());
    }
}

const JSON: &str = "application/json";
const EVENTS: &str = "text/event-stream";

/// A fan-out that can begin.
pub struct Ready {
    /// What to do.
    pub plan: Plan,
    /// By when.
    pub deadline: Deadline,
    /// What all of its calls send on.
    pub trace: HeaderMap,
    /// Memory for the request.
    pub room: Room,
}

async fn read(
    proxy: &Proxy,
    config: &Config,
    head: request::Parts,
    body: IncomingBody,
    arrival: Arrival,
) -> Result<Ready, Error> {
    check_head(&head)?;
    // A fan-out is nothing without a deadline, whatever the policy wants for its calls.
    let policy = config.defaults.stages.deadline.as_ref().unwrap_or(&config::Deadline::BUILT_IN);
    let own = Deadline::by(policy, &head.headers, arrival)?;

    let reading = whole(body, config.limits.fanout_body, proxy.fan_out_memory().share());
    let read = timeout_at(own.at, reading).await.unwrap_or_else(|_| Err(own.exceeded(Stage::Body)));
    let (body, mut room) = read?;
    let plan = Plan::read(&body, &config.limits).map_err(|fault| Error::InvalidFanOut(fault.into()))?;
    if !room.take(plan.weight()) {
        return Err(Error::FanOutsFull);
    }

    let asked = plan.deadline.map(|asked| Deadline::after(arrival, asked, policy.reserve, Bound::FanOut));
    let deadline = match asked {
        Some(asked) => own.within(asked, policy, arrival),
        None => own,
    };
    let is_callers = deadline.bound != Bound::Default;
    let deadline = Deadline { bound: Bound::FanOut, is_callers, grpc_end: None, ..deadline };
    Ok(Ready { plan, deadline, trace: trace(&head.headers), room })
}

fn check_head(head: &request::Parts) -> Result<(), Error> {
    if head.method != Method::POST {
        return Err(Error::MethodNotAllowed { allow: "POST" });
    }
    // A page in a browser beside the agent can send a POST here without asking, and its calls would be made.
    if head.headers.contains_key(header::ORIGIN) {
        return Err(Error::InvalidRequest(
            "a fan-out does not serve web pages: the request has an Origin field",
        ));
    }
    if head.headers.contains_key(&LAST_EVENT_ID) {
        return Err(Error::InvalidRequest(
            "a fan-out cannot be resumed: Last-Event-ID is not supported, and all calls would be made again",
        ));
    }
    Ok(())
}

/// The body, of at most `limit` bytes, and its memory.
async fn whole(mut body: IncomingBody, limit: usize, room: Room) -> Result<(Box<[u8]>, Room), Error> {
    /// Memory is made ready for so much on a client's word alone.
    const PREPARED: usize = 64 << 10;
    let length = usize::try_from(http_body::Body::size_hint(&body).lower()).unwrap_or(usize::MAX);
    if length > limit {
        return Err(Error::BodyTooLarge);
    }
    let mut read = Gathered::new(limit, length.min(PREPARED), room).ok_or(Error::FanOutsFull)?;
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(|error| broken(&error))?.into_data() else { break };
        if data.len() > read.left() {
            return Err(Error::BodyTooLarge);
        }
        if !read.push(&data) {
            return Err(Error::FanOutsFull);
        }
    }
    Ok(read.finish())
}

fn broken(error: &BodyError) -> Error {
    match error.is_framing() {
        true => Error::InvalidRequest("the request body breaks HTTP"),
        false => Error::BodyBrokenOff,
    }
}

/// The calls join the trace that the fan-out is part of (W3C Trace Context).
fn trace(headers: &HeaderMap) -> HeaderMap {
    ["traceparent", "tracestate"]
        .into_iter()
        .flat_map(|name| {
            headers.get_all(name).iter().map(move |value| (HeaderName::from_static(name), value))
        })
        .map(|(name, value)| (name, value.clone()))
        .collect()
}

/// After its deadline a fan-out's answer has this long to be taken: till then it holds memory.
const DELIVERY: Duration = Duration::from_secs(10);

/// A 200 of ours with this body, for a fan-out that ends at `end`.
fn ok(content_type: &'static str, body: AnswerBody, batch: (Language, Instant)) -> Answer {
    let (language, end) = batch;
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header::VIA, VIA);
    headers.insert(header::CONTENT_LANGUAGE, HeaderValue::from_static(language.tag()));
    headers.insert(header::VARY, HeaderValue::from_static("accept, accept-language"));
    Answer { end: Some(end + DELIVERY), ..Answer::own(response, None) }
}

/// How long ago, in whole milliseconds.
fn millis_since(then: Instant) -> u64 {
    millis(then.elapsed())
}

fn millis(time: Duration) -> u64 {
    u64::try_from((time + Duration::from_micros(500)).as_millis()).unwrap_or(u64::MAX)
}
