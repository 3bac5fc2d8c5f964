//! The memory that all caches of a policy may take together.
//!
//! `max_bytes` holds for each upstream by itself, so that one with many answers cannot push out those of another.
//! Written in the defaults it holds as many times as there are upstreams, which is seldom what a container's
//! limit was chosen for.

use super::Builder;
use crate::config::problem::Path;
use crate::config::{Stages, UpstreamPolicy};
use crate::units::ByteSize;

/// Beyond it the sum is told: more than most sidecars are given in all.
const MUCH: u64 = 1 << 30;

impl Builder<'_> {
    /// Warns, where the caches begin, of a sum that is large.
    pub(super) fn doubt_caches(&self, defaults: &Stages, upstreams: &[UpstreamPolicy]) {
        let of_defaults = defaults.cache.as_ref().map(|cache| (Path::of(["defaults"]), cache.max_bytes));
        // What no host leads to keeps nothing.
        let called = upstreams.iter().filter(|upstream| !upstream.hosts.is_empty());
        let of_upstreams = called.flat_map(|upstream| {
            let mut sizes: Vec<u64> = upstream.cache_sizes().collect();
            // Routes of one size share a store.
            sizes.sort_unstable();
            sizes.dedup();
            sizes.into_iter().map(|size| (Path::of(["upstreams", &*upstream.name]), size))
        });
        let all: Vec<(Path, u64)> = of_defaults.into_iter().chain(of_upstreams).collect();
        let sum = all.iter().fold(0, |sum: u64, (_, size)| sum.saturating_add(*size));
        let Some((first, _)) = all.first().filter(|_| sum > MUCH) else { return };
        // In whole MiB: the figure is for a container's limit.
        let sum = usize::try_from(sum & !((1 << 20) - 1)).unwrap_or(usize::MAX);
        let message = format!(
            "{} caches may take {} together: each upstream has `max_bytes` for itself",
            all.len(),
            ByteSize(sum)
        );
        self.report.warning(
            &self.report.setter(std::slice::from_ref(first), &["cache.max_bytes", "cache"]),
            message,
        );
    }
}
