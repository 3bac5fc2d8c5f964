//! CONNECT: through the guards to a connection, before the client is told that it has one.
//!
//! The upstream is dialled first, so that a refusal can be told apart from a tunnel. The breaker
//! judges the connect alone, the permit is held until the tunnel closes, and the deadline bounds the
//! connecting but not the tunnel.

use std::net::IpAddr;
use std::pin::pin;
use std::sync::{Arc, LazyLock};

use http::{HeaderMap, Method};
use tokio::time::{Instant, sleep_until};

use super::connection::Takeover;
use super::intercept::{self, Inside};
use super::tunnel::Opened;
use crate::call::{Fate, RequestId};
use crate::config::Config;
use crate::error::Error;
use crate::pipeline::Proxy;
use crate::pipeline::answer::{self, Answer, Held};
use crate::pipeline::gate::{self, Pass};
use crate::pipeline::judge::Judge;
use crate::pipeline::ledger::Ledger;
use crate::policy::deadline::{Arrival, Deadline, end_of};
use crate::telemetry::metrics::AttemptKind;
use crate::tls::client::Offer;
use crate::upstream::dial::Destination;
use crate::upstream::egress;
use crate::upstream::registry::{Lane, Registry};
use crate::upstream::socket::Socket;
use crate::wire::authority::Authority;
use crate::wire::target::Scheme;

/// A tunnel that is asked for.
pub struct Asked<'a> {
    /// The CONNECT's fields.
    pub headers: &'a HeaderMap,
    /// Where it shall lead, and whose policy it meets.
    pub authority: Authority,
    /// The address to dial, where the client brings it along.
    pub pinned: Option<IpAddr>,
    /// When it was asked for.
    pub arrival: Arrival,
}

impl Asked<'static> {
    /// A tunnel that nobody has asked for in so many words, and its account: the client was redirected here,
    /// or believes that it has one.
    pub fn tacitly(
        proxy: &Arc<Proxy>,
        authority: Authority,
        pinned: Option<IpAddr>,
        arrival: Arrival,
    ) -> (Self, Ledger) {
        static NO_FIELDS: LazyLock<HeaderMap> = LazyLock::new(HeaderMap::new);
        let id = RequestId::Ours(fastrand::u64(..));
        let ledger = Ledger::open(proxy, arrival, id, Some(Method::CONNECT));
        (Self { headers: &NO_FIELDS, authority, pinned, arrival }, ledger)
    }
}

/// Answers a CONNECT: with a connection to its upstream; or at once, where the policy has the TLS inside
/// end here, since a client can read an error in there but not one that refuses its CONNECT.
///
/// # Errors
/// The refusal to answer with.
pub async fn open(
    proxy: &Arc<Proxy>,
    config: Arc<Config>,
    asked: Asked<'_>,
    ledger: Ledger,
) -> Result<Takeover, Answer> {
    let lane = lane(proxy.registry(), &config, &asked.authority, asked.arrival.now);
    if let Some(lane) = lane.ok().filter(|lane| intercept::applies(proxy, lane)) {
        ledger.void();
        let Asked { authority, pinned, arrival, .. } = asked;
        return Ok(Takeover::Intercept(Box::new(Inside { authority, pinned, lane, config, arrival })));
    }
    connect(proxy, &config, asked, ledger).await.map(|opened| Takeover::Tunnel(Box::new(opened)))
}

/// What a tunnel to `authority` meets.
///
/// # Errors
/// What is wrong with the authority.
pub fn lane(
    registry: &Registry,
    config: &Arc<Config>,
    authority: &Authority,
    now: Instant,
) -> Result<Lane, Error> {
    let upstream =
        registry.by_authority(config, authority.key(), Scheme::Https).map_err(Error::InvalidRequest)?;
    registry.touch(&upstream, now);
    Ok(Lane::find(registry, config, upstream, &Method::CONNECT, ""))
}

/// Connects for a tunnel that nobody looks into.
///
/// # Errors
/// The refusal to answer with.
pub async fn connect(
    proxy: &Proxy,
    config: &Arc<Config>,
    asked: Asked<'_>,
    mut ledger: Ledger,
) -> Result<Opened, Answer> {
    let mut end = None;
    let connecting = async {
        let lane = lane(proxy.registry(), config, &asked.authority, asked.arrival.now)?;
        ledger.goes_to(&lane, "");
        egress::check_name(&config.egress, &asked.authority)?;
        let deadline = Deadline::of(lane.stages().deadline.as_ref(), asked.headers, asked.arrival, None)?;
        end = deadline.as_ref().map(|deadline| deadline.at);
        dial(proxy, &lane, &asked, deadline.as_ref(), &ledger).await.map(|dialled| (dialled, lane))
    };
    let connected = proxy.until_ending(pin!(connecting)).await;
    ledger.bounded_by(end);
    match connected {
        Ok(((socket, pass), lane)) => {
            ledger.tunnels();
            let Asked { authority, pinned, .. } = asked;
            Ok(Opened { socket, authority, pinned, held: Held { ledger, permit: pass.permit, lane } })
        }
        Err(error) => Err(answer::refuse(error, ledger, end)),
    }
}

async fn dial(
    proxy: &Proxy,
    lane: &Lane,
    asked: &Asked<'_>,
    deadline: Option<&Deadline>,
    ledger: &Ledger,
) -> Result<(Socket, Pass), Error> {
    let progress = ledger.progress();
    let dial = async {
        let mut pass = gate::enter(lane, progress, None, deadline.map(|deadline| deadline.at)).await?;
        if let Some(permit) = &mut pass.permit {
            permit.begins(pass.at);
        }
        let admission = pass.admission.take();
        let mut judge = Judge::new(lane.clone(), progress.clone(), admission, AttemptKind::Primary, pass.at);
        judge.sent();
        progress.count_attempt();
        let to = Destination {
            authority: &asked.authority,
            pinned: asked.pinned,
            tls: None,
            offer: Offer::Http1,
            egress: &lane.config().egress,
            timeout: lane.stages().connect_timeout,
            avoid: None,
        };
        let socket = proxy.registry().dialer().socket(to, progress).await;
        match socket {
            Ok(socket) => {
                judge.complete(Instant::now());
                Ok((socket, pass))
            }
            Err(error) => {
                judge.fail(&error, Instant::now());
                Err(error)
            }
        }
    };
    tokio::select! {
        biased;
        socket = dial => socket,
        () = sleep_until(end_of(deadline)) => {
            progress.decide(Fate::Expired);
            Err(deadline.map_or(Error::ConnectTimeout, |deadline| deadline.exceeded(progress.stage())))
        }
    }
}
