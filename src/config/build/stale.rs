//! Steps of a fallback that look for a kept answer where none is ever kept.

use super::Builder;
use super::backups::steps;
use crate::config::problem::Path;
use crate::config::{Stages, UpstreamPolicy, raw};

impl Builder<'_> {
    /// A `stale` needs a `cache`, in the section that writes it or in a narrower one that inherits it: a
    /// fallback for all upstreams may well be for the one that has a cache.
    pub(super) fn doubt_stale(
        &self,
        defaults: (&raw::Defaults, &Stages),
        upstreams: &[UpstreamPolicy],
        named: &[(String, raw::Upstream)],
    ) {
        let (keys, stages) = defaults;
        let pairs = || upstreams.iter().zip(named.iter().map(|(_, keys)| keys));
        self.doubt_stale_of(&keys.stages(), &Path::of(["defaults"]), || {
            let inherits =
                |(upstream, keys): (_, &raw::Upstream)| keys.fallback.is_none() && keeps_any(upstream, keys);
            unless(stages.cache.is_some() || pairs().any(inherits), NONE_KEPT)
        });
        for (upstream, keys) in pairs() {
            let section = Path::of(["upstreams", &*upstream.name]);
            self.doubt_stale_of(&keys.stages(), &section, || unless(keeps_any(upstream, keys), NONE_KEPT));
            for (index, (route, keys)) in upstream.routes.iter().zip(keys.routes.iter().flatten()).enumerate()
            {
                let section = section.key("routes").index(index);
                self.doubt_stale_of(&keys.stages(), &section, || {
                    unless(route.stages.cache.is_some(), NONE_KEPT)
                        .or_else(|| unless(route.may_be_kept(), NONE_ANSWERED))
                });
            }
        }
    }

    /// `why_never` tells why there is never a kept answer, if so.
    fn doubt_stale_of(
        &self,
        own: &raw::Stages,
        section: &Path,
        why_never: impl Fn() -> Option<&'static str>,
    ) {
        let is_stale = |(_, step): &(usize, &raw::FallbackStep)| step.stale.is_some();
        let stale: Vec<usize> =
            steps(own).iter().enumerate().filter(is_stale).map(|(index, _)| index).collect();
        let Some(why) = (!stale.is_empty()).then(why_never).flatten() else { return };
        for index in stale {
            self.report.warning(&section.key("fallback").index(index).key("stale"), why);
        }
    }
}

const NONE_KEPT: &str = "no `cache` keeps answers here, so there is never one to give";
const NONE_ANSWERED: &str = "a cache answers GET and HEAD alone, and this route has neither";

fn unless(is_fine: bool, why: &'static str) -> Option<&'static str> {
    (!is_fine).then_some(why)
}

/// Whether a call to the upstream that falls back as the upstream says may find a kept answer.
fn keeps_any(upstream: &UpstreamPolicy, keys: &raw::Upstream) -> bool {
    let inherits = |own: &raw::Route| own.fallback.is_none();
    let mut routes = upstream.routes.iter().zip(keys.routes.iter().flatten());
    upstream.stages.cache.is_some()
        || routes.any(|(route, own)| inherits(own) && route.stages.cache.is_some() && route.may_be_kept())
}
