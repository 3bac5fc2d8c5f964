//! Step one of the journey: which upstream, under which rules, and the call that goes there.

use std::sync::Arc;

use http::Version;
use http::uri::PathAndQuery;
use http_body::Body;

use super::ledger::Ledger;
use super::{Intake, Proxy};
use crate::call::{Call, CallBody, ExtendedConnect, Needs};
use crate::config::FallbackStep;
use crate::error::Error;
use crate::upstream::registry::{Lane, Speech, Upstream};
use crate::wire::replay::Replay;
use crate::wire::{grpc, hop_by_hop};

/// The upstream, and the path and query to ask it for.
///
/// # Errors
/// [`Error::InvalidRequest`] for a host that is none.
pub fn find(proxy: &Proxy, intake: &Intake) -> Result<(Arc<Upstream>, PathAndQuery), Error> {
    let upstream = proxy
        .registry()
        .by_authority(&intake.config, &intake.authority, intake.scheme)
        .map_err(Error::InvalidRequest)?;
    let target = match intake.head.uri.path_and_query() {
        _ if intake.is_for_server => PathAndQuery::from_static("*"),
        Some(target) => target.clone(),
        None => PathAndQuery::from_static("/"),
    };
    Ok((upstream, target))
}

/// The rules and guards that the request meets there.
pub fn lane(proxy: &Proxy, intake: &Intake, upstream: Arc<Upstream>, target: &PathAndQuery) -> Lane {
    proxy.registry().touch(&upstream, intake.arrival.now);
    Lane::find(proxy.registry(), &intake.config, upstream, &intake.head.method, target.path())
}

/// The call, with its body kept for replay where it may be sent twice.
pub fn call(proxy: &Proxy, intake: Intake, lane: &Lane, target: PathAndQuery, ledger: &Ledger) -> Call {
    let Intake { head, body, scheme, is_unaware, pinned, config, interim, .. } = intake;
    let upgrade = hop_by_hop::upgrade(&head.headers).cloned();
    let needs = match head.version {
        _ if upgrade.is_some() => Needs::Http1,
        Version::HTTP_2 if grpc::is_call(&head.method, &head.headers) => Needs::Http2,
        Version::HTTP_2 if is_unaware => Needs::SpokenHttp2,
        _ => Needs::Either,
    };
    let mut call = Call {
        needs,
        upgrade,
        is_extended_connect: head.extensions.get::<ExtendedConnect>().is_some(),
        method: head.method,
        scheme,
        is_unaware,
        pinned,
        target,
        headers: head.headers,
        spelling: head.extensions,
        body: CallBody::Empty,
        interim,
        progress: ledger.progress().clone(),
    };
    if !body.is_end_stream() {
        let (stages, limit) = (lane.stages(), lane.stages().replay_limit);
        let hedged = stages.hedge.as_ref().map_or(&[][..], |hedge| &hedge.methods);
        let retried = stages.retry.as_ref().map_or(&[][..], |retry| &retry.methods);
        // An HTTP/2 upstream can say that it has not looked at a request: then any may go out again. As far
        // as it is known to speak it, since keeping bodies costs memory that hedges of others want.
        let may_be_refused = match lane.speech(call.scheme, call.needs) {
            Speech::Clear2 => true,
            Speech::Tls(_) => lane.upstream.pool.shared.speaks_http2(),
            Speech::Clear | Speech::Tls1(_) => false,
        };
        let has_backup = stages.fallback.iter().any(|step| matches!(step, FallbackStep::Upstream(_)));
        let may_repeat = may_be_refused
            || has_backup
            || call.method.is_idempotent()
            || call.is_idempotent(hedged, lane.route())
            || call.is_idempotent(retried, lane.route());
        call.body = if may_repeat && limit > 0 {
            let total = config.limits.replay_total;
            CallBody::Replay(Replay::new(body, limit, total, proxy.replay().clone()))
        } else {
            CallBody::Once(parking_lot::Mutex::new(Some(body)))
        };
    }
    call
}
