//! CONNECT: through the guards to a connection, before the client is told that it has one.
//!
//! The upstream is dialled first, so that a refusal can be told apart from a tunnel. The breaker
//! judges the connect alone, the permit is held until the tunnel closes, and the deadline bounds the
//! connecting but not the tunnel.

use std::sync::Arc;

use http::{HeaderMap, Method};
use tokio::time::{Instant, sleep_until};

use super::connection::Inbound;
use super::tunnel::Opened;
use crate::call::Fate;
use crate::config::Config;
use crate::error::Error;
use crate::pipeline::answer::{self, Answer, Held};
use crate::pipeline::gate::{self, Pass};
use crate::pipeline::judge::Judge;
use crate::pipeline::ledger::Ledger;
use crate::policy::deadline::{Arrival, Deadline, end_of};
use crate::telemetry::metrics::AttemptKind;
use crate::upstream::dial::Destination;
use crate::upstream::egress;
use crate::upstream::registry::Lane;
use crate::upstream::socket::Socket;
use crate::wire::authority::Authority;
use crate::wire::target::Scheme;

/// Connects to `authority` for a tunnel.
///
/// # Errors
/// The refusal to answer with.
pub async fn open(
    inbound: &Inbound,
    config: Arc<Config>,
    headers: &HeaderMap,
    authority: Authority,
    arrival: Arrival,
    mut ledger: Ledger,
) -> Result<Opened, Answer> {
    let mut end = None;
    let connecting = async {
        let registry = inbound.proxy.registry();
        let upstream =
            registry.by_authority(&config, authority.key(), Scheme::Https).map_err(Error::InvalidRequest)?;
        registry.touch(&upstream, arrival.now);
        let lane = Lane::find(registry, &config, upstream, &Method::CONNECT, "");
        ledger.goes_to(&lane, "");
        egress::check_name(&config.egress, &authority)?;
        let deadline = Deadline::of(lane.stages().deadline.as_ref(), headers, arrival)?;
        end = deadline.as_ref().map(|deadline| deadline.at);
        connect(inbound, &lane, &authority, deadline.as_ref(), &ledger).await.map(|opened| (opened, lane))
    };
    let connected = inbound.proxy.until_ending(connecting).await;
    ledger.bounded_by(end);
    match connected {
        Ok(((socket, pass), lane)) => {
            ledger.tunnels();
            Ok(Opened { socket, authority, held: Held { ledger, permit: pass.permit, lane } })
        }
        Err(error) => Err(answer::refuse(error, ledger, end)),
    }
}

async fn connect(
    inbound: &Inbound,
    lane: &Lane,
    authority: &Authority,
    deadline: Option<&Deadline>,
    ledger: &Ledger,
) -> Result<(Socket, Pass), Error> {
    let progress = ledger.progress();
    let dial = async {
        let mut pass = gate::enter(lane, progress, deadline.map(|deadline| deadline.at)).await?;
        let admission = pass.admission.take();
        let mut judge = Judge::new(lane.clone(), progress.clone(), admission, AttemptKind::Primary, pass.at);
        judge.sent();
        progress.count_attempt();
        let to = Destination {
            authority,
            tls: None,
            egress: &lane.config().egress,
            timeout: lane.stages().connect_timeout,
            avoid: None,
        };
        let socket = inbound.proxy.registry().dialer().socket(to, progress).await;
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
