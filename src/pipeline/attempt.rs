//! One attempt: one request sent to one upstream, up to the head of its answer.

use std::net::IpAddr;
use std::time::Duration;

use http::Response;
use hyper::body::Incoming;
use tokio::time::{Instant, timeout_at};

use super::gate::Pass;
use super::judge::Judge;
use super::{Proxy, outgoing};
use crate::call::Call;
use crate::error::{Bound, Error, Stage};
use crate::policy::bulkhead::Permit;
use crate::policy::deadline::Deadline;
use crate::telemetry::metrics::AttemptKind;
use crate::upstream::connection::{Connection, Exchange, SendFailure};
use crate::upstream::dial::Destination;
use crate::upstream::egress;
use crate::upstream::pool::Wanted;
use crate::upstream::registry::Lane;
use crate::wire::framing;

/// The head of an answer, with all that stays held until its body ends.
pub struct Head {
    /// The response; its body is read through `exchange`.
    pub response: Response<Incoming>,
    /// The connection it comes on.
    pub exchange: Exchange,
    /// Owes the verdict.
    pub judge: Judge,
    /// The place among the calls at once.
    pub permit: Option<Permit>,
    /// Where it comes from.
    pub lane: Lane,
    /// First or speculative.
    pub kind: AttemptKind,
    /// From passing the gates to the head.
    pub elapsed: Duration,
}

impl Head {
    /// Whether the answer is good enough not to look for a better one.
    pub fn is_acceptable(&self) -> bool {
        self.judge.is_acceptable()
    }
}

/// What all attempts of a call have in common.
#[derive(Clone, Copy)]
pub struct Try<'a> {
    /// The process.
    pub proxy: &'a Proxy,
    /// The call.
    pub call: &'a Call,
    /// When it ends.
    pub deadline: Option<&'a Deadline>,
}

/// Sends the call to `lane` and waits for the head. Dropping the future closes the connection and
/// settles the attempt as the call's fate says.
///
/// # Errors
/// What went wrong, with the verdict already given.
pub async fn run(this: Try<'_>, lane: Lane, pass: Pass, kind: AttemptKind) -> Result<Head, Error> {
    let Pass { permit, admission, at } = pass;
    let kind = if admission.as_ref().is_some_and(|a| a.is_probe()) { AttemptKind::Probe } else { kind };
    let mut judge = Judge::new(lane.clone(), this.call.progress.clone(), admission, kind, at);
    let sent = match lane.stages().attempt_timeout {
        None => send(this, &lane, kind, &mut judge).await,
        Some(limit) => match timeout_at(at + limit, send(this, &lane, kind, &mut judge)).await {
            Ok(sent) => sent,
            Err(_) => {
                let stage = this.call.progress.stage();
                Err(Error::DeadlineExceeded { stage, bound: Bound::AttemptTimeout, skew: None })
            }
        },
    };
    let now = Instant::now();
    match sent {
        Ok((response, exchange)) => {
            judge.head(response.status(), response.headers(), now);
            let elapsed = now.saturating_duration_since(at);
            Ok(Head { response, exchange, judge, permit, lane, kind, elapsed })
        }
        Err(error) => {
            judge.fail(&error, now);
            Err(error)
        }
    }
}

/// Sends the request; once more on a fresh connection when a reused one turns out to be dead, and
/// nothing can have come of it.
async fn send(
    this: Try<'_>,
    lane: &Lane,
    kind: AttemptKind,
    judge: &mut Judge,
) -> Result<(Response<Incoming>, Exchange), Error> {
    this.call.progress.count_attempt();
    let mut may_reuse = true;
    loop {
        let connection = connection(this, lane, kind, may_reuse, judge.started()).await?;
        let is_reused = connection.is_reused();
        if kind == AttemptKind::Primary {
            this.call.progress.went_to(connection.peer().ip());
        }
        let mut outgoing = outgoing::request(this.call, lane, this.deadline, this.proxy.identity())?;
        relay_interim(this.call, &mut outgoing, kind);
        this.call.progress.enter(Stage::Head);
        judge.sent();
        match connection.send(outgoing.request).await {
            Ok((response, exchange)) => return checked(this.call, response, exchange),
            Err(failure) if is_reused && may_resend(this.call, &failure) => may_reuse = false,
            Err(failure) => return Err(failure.error),
        }
    }
}

/// A request may go out again when no byte of it left, or when no byte of an answer came and sending
/// it twice does no more than once (RFC 9110 section 9.2.2, RFC 9112 section 9.3.1).
fn may_resend(call: &Call, failure: &SendFailure) -> bool {
    let is_harmless = failure.is_unsent || (failure.is_unanswered && call.method.is_idempotent());
    is_harmless && call.body.can_be_sent()
}

/// An idle connection if there is one that will do, else a new one. A hedge goes to another address
/// where there is one.
async fn connection(
    this: Try<'_>,
    lane: &Lane,
    kind: AttemptKind,
    may_reuse: bool,
    now: Instant,
) -> Result<Connection, Error> {
    let tls = lane.tls(this.call.scheme);
    let egress = &lane.config().egress;
    let verdict = egress::check_name(egress, lane.dialled())?;
    let avoid = match kind {
        AttemptKind::Hedge => Box::pin(other_address(this, lane)).await,
        _ => None,
    };
    if may_reuse {
        let wanted = Wanted { is_tls: tls.is_some(), avoid };
        while let Some(connection) = lane.upstream.pool.take(wanted, now) {
            // A reload can have closed a door that was open when the connection was made.
            if egress::check_address(egress, lane.dialled(), verdict, connection.peer().ip()).is_ok() {
                return connection.prepare(true).await;
            }
        }
    }
    let to =
        Destination { authority: lane.dialled(), tls, egress, timeout: lane.stages().connect_timeout, avoid };
    // Boxed, as is the rest that few attempts come to: the room would be part of every request.
    Box::pin(this.proxy.registry().dialer().connection(to, &this.call.progress)).await
}

/// The address that the first attempt went to, when the name has another one to go to instead.
async fn other_address(this: Try<'_>, lane: &Lane) -> Option<IpAddr> {
    let first = this.call.progress.first_peer()?;
    if lane.dialled().ip().is_some() {
        return None;
    }
    let dialer = this.proxy.registry().dialer();
    let addresses = dialer.addresses(lane.dialled(), &this.call.progress).await.ok()?;
    addresses.iter().any(|other| *other != first).then_some(first)
}

/// Lets the client see interim answers of the first attempt, and opens the body's gate on a 100.
fn relay_interim(call: &Call, outgoing: &mut outgoing::Outgoing, kind: AttemptKind) {
    let gate = outgoing.gate.take();
    let sink = call.interim.clone().filter(|_| kind != AttemptKind::Hedge);
    if gate.is_none() && sink.is_none() {
        return;
    }
    hyper::ext::on_informational(&mut outgoing.request, move |interim| {
        if interim.status() == http::StatusCode::CONTINUE {
            if let Some(gate) = &gate {
                gate.open();
            }
        } else if let Some(sink) = &sink {
            sink.interim(interim.status(), interim.headers());
        }
    });
}

/// Refuses an answer that two readers could read in two ways.
fn checked(
    call: &Call,
    response: Response<Incoming>,
    exchange: Exchange,
) -> Result<(Response<Incoming>, Exchange), Error> {
    framing::check_response(response.headers()).map_err(|what| Error::UpstreamInvalid(what.into()))?;
    if response.status() == http::StatusCode::SWITCHING_PROTOCOLS && call.upgrade.is_none() {
        return Err(Error::UpstreamInvalid("a 101 that nobody asked for".into()));
    }
    Ok((response, exchange))
}
