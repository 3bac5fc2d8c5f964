//! One attempt: one request sent to one upstream, up to the head of its answer.

use std::net::IpAddr;
use std::time::Duration;

use http::{HeaderName, HeaderValue, Response};
use tokio::time::{Instant, timeout_at};

use super::gate::Pass;
use super::judge::Judge;
use super::{Proxy, gate, outgoing};
use crate::call::Call;
use crate::error::{Bound, Cause, Error, Stage};
use crate::policy::bulkhead::Permit;
use crate::policy::deadline::Deadline;
use crate::telemetry::metrics::AttemptKind;
use crate::tls::client::Offer;
use crate::upstream::connection::{Connection, Exchange, Interim, Origin, SendFailure, Wanted};
use crate::upstream::dial::Destination;
use crate::upstream::egress::{self, NameVerdict};
use crate::upstream::http1::Idle;
use crate::upstream::http2::Shared;
use crate::upstream::registry::{Lane, Speech};
use crate::upstream::shared::{Claim, Dialing};
use crate::wire::body::Continue;
use crate::wire::framing;

/// The head of an answer, with all that stays held until its body ends.
pub struct Head {
    /// The response; its body is in `exchange`.
    pub response: Response<()>,
    /// Where the rest of it comes from.
    pub exchange: Exchange,
    /// Owes the verdict.
    pub judge: Judge,
    /// The place among the calls at once.
    pub permit: Option<Permit>,
    /// Where it comes from.
    pub lane: Lane,
    /// From passing the gates to the head.
    pub elapsed: Duration,
}

/// An attempt that got no answer.
#[derive(Debug)]
pub struct Failure {
    /// What to tell the caller.
    pub error: Error,
    /// The upstream has done nothing with the request: none of it left, or the upstream refused to look at it.
    pub is_unsent: bool,
}

impl From<Error> for Failure {
    /// Of a request that was not sent.
    fn from(error: Error) -> Self {
        Self { error, is_unsent: true }
    }
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
    /// What makes its requests conditional, for a kept answer that is to be validated.
    pub validators: &'a [(HeaderName, HeaderValue)],
}

/// Sends the call to `lane` and waits for the head. Dropping the future closes the connection and
/// settles the attempt as the call's fate says.
///
/// # Errors
/// What went wrong, with the verdict already given.
pub async fn run(this: Try<'_>, lane: Lane, pass: Pass, kind: AttemptKind) -> Result<Box<Head>, Failure> {
    let Pass { mut permit, admission, at } = pass;
    if let Some(permit) = &mut permit {
        permit.begins(at);
    }
    let role = kind;
    let kind = if admission.as_ref().is_some_and(|a| a.is_probe()) { AttemptKind::Probe } else { kind };
    let mut judge = Judge::new(lane.clone(), this.call.progress.clone(), admission, kind, at);
    let sent = match lane.stages().attempt_timeout {
        None => send(this, &lane, role, &mut judge).await,
        Some(limit) => match timeout_at(at + limit, send(this, &lane, role, &mut judge)).await {
            Ok(sent) => sent,
            Err(_) => {
                let stage = this.call.progress.stage();
                let error = Error::DeadlineExceeded { stage, bound: Bound::AttemptTimeout, skew: None };
                Err(Failure { error, is_unsent: !judge.is_sent() })
            }
        },
    };
    let now = Instant::now();
    match sent {
        Ok((response, exchange)) => {
            judge.head(response.status(), response.headers(), now);
            gate::heed(&lane, this.call, &response, now);
            let elapsed = now.saturating_duration_since(at);
            // Boxed: it passes through many hands.
            Ok(Box::new(Head { response, exchange, judge, permit, lane, elapsed }))
        }
        Err(failure) => {
            judge.fail(&failure.error, now);
            Err(failure)
        }
    }
}

/// How often one attempt sends a request that upstreams refuse to look at.
const MAX_SENDS: u32 = 3;

/// Sends the request. Where nothing can have come of it, it goes out again: once when the connection was
/// a reused one and turns out to be dead, on one that was opened since; up to [`MAX_SENDS`] times in all
/// when the upstream refuses to look at it.
async fn send(
    this: Try<'_>,
    lane: &Lane,
    kind: AttemptKind,
    judge: &mut Judge,
) -> Result<(Response<()>, Exchange), Failure> {
    let number = this.call.progress.count_attempt();
    let mut since = None;
    let mut sends = 0;
    loop {
        // What went out before has come to nothing, or this would not be the place.
        let connection = connection(this, lane, kind, since, judge.started()).await?;
        let may_be_stale = connection.is_reused() && since.is_none();
        if kind != AttemptKind::Hedge {
            note_first(this, &connection);
        }
        let version = connection.version();
        let mut outgoing = outgoing::request(this, lane, number, version)?;
        if kind == AttemptKind::Hedge {
            outgoing.request.body_mut().yields();
        }
        let gate = outgoing.gate.clone();
        let interim = interim(this.call, outgoing.gate, kind);
        this.call.progress.enter(Stage::Head);
        judge.sent();
        sends += 1;
        match connection.send(outgoing.request, interim).await {
            Ok((response, exchange)) => {
                if let Some(gate) = gate {
                    gate.shut();
                }
                return checked(this.call, response, exchange)
                    .map_err(|error| Failure { error, is_unsent: false });
            }
            Err(mut failure) => {
                if let Some(body) = failure.body.take() {
                    this.call.body.give_back(body);
                }
                if failure.wants_http1 {
                    lane.upstream.pool.shared.give_up(Instant::now());
                }
                // Asked again in the version that was refused, it would be refused again.
                let is_in_vain = failure.wants_http1 && !may_be_http1(this.call, lane);
                if is_in_vain || sends == MAX_SENDS || !may_resend(this.call, may_be_stale, &failure) {
                    if failure.is_refused {
                        judge.refused();
                    }
                    let is_unsent = failure.is_unsent || failure.is_refused;
                    return Err(Failure { error: failure.error, is_unsent });
                }
                if !failure.is_refused {
                    since = Some(Instant::now());
                }
            }
        }
    }
}

/// A request may go out again when no byte of it left, or when no byte of an answer came and sending
/// it twice does no more than once (RFC 9110 section 9.2.2, RFC 9112 section 9.3.1). What the upstream
/// has refused to look at may in any case (RFC 9113 section 8.7).
fn may_resend(call: &Call, may_be_stale: bool, failure: &SendFailure) -> bool {
    let is_harmless = failure.is_unsent || (failure.is_unanswered && call.method.is_idempotent());
    (may_be_stale || failure.is_refused) && is_harmless && call.body.can_be_sent_again()
}

/// Whether the call could do with HTTP/1.1 at an upstream that knows both versions.
fn may_be_http1(call: &Call, lane: &Lane) -> bool {
    !lane.must_be_http2(call.needs) && lane.speech(call.scheme, call.needs).may_be_http1()
}

/// What a hedge of the same try keeps away from.
fn note_first(this: Try<'_>, connection: &Connection) {
    let shared = match connection {
        Connection::Http1(_) => None,
        Connection::Http2(slot) => Some(slot.shared().id()),
    };
    this.call.progress.went_to(connection.origin().peer.ip(), shared);
}

/// A connection with room if there is one that will do, else a new one. A hedge goes to another
/// connection than the first attempt, and to another address where there is one, as does another try.
async fn connection(
    this: Try<'_>,
    lane: &Lane,
    kind: AttemptKind,
    since: Option<Instant>,
    now: Instant,
) -> Result<Connection, Error> {
    let Try { call, .. } = this;
    let speech = lane.speech(call.scheme, call.needs);
    let verdict = egress::check_name(&lane.config().egress, lane.dialled())?;
    let is_hedge = kind == AttemptKind::Hedge;
    let avoid = match kind {
        AttemptKind::Hedge | AttemptKind::Retry => Box::pin(other_address(this, lane)).await,
        AttemptKind::Primary | AttemptKind::Probe => None,
    };
    let pinned = call.pinned.filter(|_| !lane.is_elsewhere());
    // Boxed: the room would be part of every request.
    let verdict = match pinned {
        None => verdict,
        Some(ip) => Box::pin(verdict_on_pinned(this, lane, speech, verdict, ip)).await?,
    };
    // Read last: the first attempt may have got its connection just now.
    let beside = call.progress.connection().filter(|_| is_hedge);
    let wanted = Wanted { to: lane.dialled(), tls: speech.tls(), pinned, avoid, beside, since, is_hedge };
    // A reload can have closed a door that was open when a connection was made.
    let is_allowed = |origin: &Origin| {
        egress::check_address(&lane.config().egress, lane.dialled(), verdict, origin.peer.ip()).is_ok()
    };
    let shared = &lane.upstream.pool.shared;
    // A connection of HTTP/1.1, as a refused WebSocket leaves one, is no good to who needs HTTP/2 and can
    // have it.
    let may_be_idle = speech.may_be_http1() && !(lane.must_be_http2(call.needs) && shared.speaks_http2());
    if since.is_none() && may_be_idle {
        while let Some(idle) = lane.upstream.pool.take(wanted, now) {
            if is_allowed(idle.origin()) {
                return idle.prepare(true).await.map(Connection::Http1);
            }
        }
    }
    // Boxed, as is the rest that few attempts come to: the room would be part of every request.
    Box::pin(async {
        if !speech.may_be_http2() || (may_be_http1(call, lane) && shared.is_given_up(now)) {
            return dial(this, lane, speech, wanted, None).await;
        }
        call.progress.enter(Stage::Connect);
        loop {
            match shared.claim(wanted, now, lane.stages().connect_timeout).await? {
                Claim::Slot(slot) if is_allowed(slot.shared().origin()) => {
                    return Ok(Connection::Http2(slot));
                }
                Claim::Slot(slot) => slot.shared().retire(),
                Claim::Dial(dialing) => return dial(this, lane, speech, wanted, Some(dialing)).await,
            }
        }
    })
    .await
}

/// A name that led to the client's address when a connection was made need not lead there now.
///
/// In clear text nothing proves that the address is the name's, and the name may be the client's invention:
/// what the policy adds for that name, such as a key, goes only where it leads.
async fn verdict_on_pinned(
    this: Try<'_>,
    lane: &Lane,
    speech: Speech<'_>,
    verdict: NameVerdict,
    ip: IpAddr,
) -> Result<NameVerdict, Error> {
    let (dialer, progress) = (this.proxy.registry().dialer(), &this.call.progress);
    let adds_fields = lane.policy().rewrite.as_ref().is_some_and(|rules| !rules.set.is_empty());
    if adds_fields && speech.tls().is_none() && !dialer.leads_to(lane.dialled(), ip, progress).await? {
        let rule = "rewrite.headers.set, which is for the host's own addresses";
        return Err(Error::EgressDenied { rule: rule.into(), by_address: true });
    }
    Ok(dialer.verdict_on_pinned(lane.dialled(), verdict, ip, progress).await)
}

/// A new connection, told to those who wait for it.
async fn dial(
    this: Try<'_>,
    lane: &Lane,
    speech: Speech<'_>,
    wanted: Wanted<'_>,
    mut dialing: Option<Dialing<'_>>,
) -> Result<Connection, Error> {
    let dialled = dial_for(this, lane, speech, wanted, &mut dialing).await;
    // What the dial brings has taken it.
    if let Some(dialing) = dialing {
        dialing.failed();
    }
    dialled
}

async fn dial_for(
    this: Try<'_>,
    lane: &Lane,
    speech: Speech<'_>,
    wanted: Wanted<'_>,
    dialing: &mut Option<Dialing<'_>>,
) -> Result<Connection, Error> {
    let to = Destination {
        authority: lane.dialled(),
        pinned: wanted.pinned,
        tls: wanted.tls,
        offer: if dialing.is_some() { Offer::Both } else { Offer::Http1 },
        egress: &lane.config().egress,
        timeout: lane.stages().connect_timeout,
        avoid: wanted.avoid,
    };
    let end = Instant::now() + to.timeout;
    let socket = this.proxy.registry().dialer().socket(to, &this.call.progress).await?;
    let (peer, is_pinned) = (socket.peer(), wanted.pinned.is_some());
    let origin = Origin { to: wanted.to.clone(), peer, tls: wanted.tls.cloned(), is_pinned };
    if dialing.is_none() || !speech.is_http2(&socket) {
        if let Some(dialing) = dialing.take() {
            dialing.was_for_one();
        }
        return Idle::new(socket, origin).prepare(false).await.map(Connection::Http1);
    }
    let start = Shared::start(socket, origin, lane.upstream.pool.shared.changed());
    let shared = timeout_at(end, start).await.unwrap_or(Err(Error::ConnectTimeout))?;
    // A new connection has room for one at least, unless it has gone already.
    let slot = dialing.take().and_then(|dialing| dialing.succeeded(&shared));
    slot.map(Connection::Http2).ok_or(Error::UpstreamReset(Cause::NONE))
}

/// The address that the attempt before went to, when the name has another one to go to instead.
async fn other_address(this: Try<'_>, lane: &Lane) -> Option<IpAddr> {
    let last = this.call.progress.peer()?;
    if lane.dialled().ip().is_some() || this.call.pinned.is_some() {
        return None;
    }
    let dialer = this.proxy.registry().dialer();
    let addresses = dialer.addresses(lane.dialled(), &this.call.progress).await.ok()?;
    addresses.iter().any(|other| *other != last).then_some(last)
}

/// Lets the client see interim answers of the first attempt, and opens the body's gate on a 100.
fn interim(call: &Call, gate: Option<Continue>, kind: AttemptKind) -> Option<Interim> {
    let sink = call.interim.clone().filter(|_| kind != AttemptKind::Hedge);
    (gate.is_some() || sink.is_some()).then_some(Interim { gate, sink })
}

/// Refuses an answer that two readers could read in two ways.
fn checked(
    call: &Call,
    response: Response<()>,
    exchange: Exchange,
) -> Result<(Response<()>, Exchange), Error> {
    framing::check_response(response.headers()).map_err(|what| Error::UpstreamInvalid(what.into()))?;
    if response.status() == http::StatusCode::SWITCHING_PROTOCOLS && call.upgrade.is_none() {
        return Err(Error::UpstreamInvalid("a 101 that nobody asked for".into()));
    }
    if response.status().is_success() && call.is_extended_connect {
        return Err(Error::UpstreamInvalid("an answer that the client would take for its tunnel".into()));
    }
    Ok((response, exchange))
}
