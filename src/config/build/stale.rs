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
            stages.cache.is_some()
                || pairs().any(|(upstream, keys)| keys.fallback.is_none() && keeps_any(upstream, keys))
        });
        for (upstream, keys) in pairs() {
            let section = Path::of(["upstreams", &*upstream.name]);
            self.doubt_stale_of(&keys.stages(), &section, || keeps_any(upstream, keys));
            for (index, (route, keys)) in upstream.routes.iter().zip(keys.routes.iter().flatten()).enumerate()
            {
                let section = section.key("routes").index(index);
                self.doubt_stale_of(&keys.stages(), &section, || route.stages.cache.is_some());
            }
        }
    }

    fn doubt_stale_of(&self, own: &raw::Stages, section: &Path, keeps_any: impl Fn() -> bool) {
        let is_stale = |(_, step): &(usize, &raw::FallbackStep)| step.stale.is_some();
        let stale: Vec<usize> =
            steps(own).iter().enumerate().filter(is_stale).map(|(index, _)| index).collect();
        if stale.is_empty() || keeps_any() {
            return;
        }
        for index in stale {
            let path = section.key("fallback").index(index).key("stale");
            self.report.warning(&path, "no `cache` keeps answers here, so there is never one to give");
        }
    }
}

/// Whether a call to the upstream that falls back as the upstream says may find a kept answer.
fn keeps_any(upstream: &UpstreamPolicy, keys: &raw::Upstream) -> bool {
    let inherits = |own: &raw::Route| own.fallback.is_none();
    let mut routes = upstream.routes.iter().zip(keys.routes.iter().flatten());
    upstream.stages.cache.is_some()
        || routes.any(|(route, own)| inherits(own) && route.stages.cache.is_some())
}
