//! Fallbacks that lead back to where they began.
//!
//! Two upstreams may well back each other up, and a call to either then tries the other. But a backup's own
//! fallback is not followed when it stands in, or calls would go round in circles: whoever writes one may count
//! on more steps than are taken. Only what upstreams and routes write themselves is looked at; a fallback in
//! the defaults that names several upstreams has circles in it, and nobody has written one.

use std::collections::{HashMap, HashSet};

use super::Builder;
use super::backups::{has_no_hosts, steps};
use crate::config::problem::{Path, Severity};
use crate::config::raw;

/// The most upstreams of a circle that are named.
const MOST_NAMES: usize = 8;

/// Whether an upstream has been looked at.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mark {
    New,
    /// It leads to the one that is looked at now.
    OnTheWay,
    Done,
}

impl Builder<'_> {
    /// One warning for each circle, at the step that closes it.
    pub(super) fn doubt_circles(&self, named: &[(String, raw::Upstream)]) {
        let backups = backups(named);
        let mut marks = vec![Mark::New; named.len()];
        for start in 0..named.len() {
            if marks[start] != Mark::New {
                continue;
            }
            // In the file's order and without recursion: a chain may be as long as the file.
            let mut way = vec![(start, backups[start].iter())];
            marks[start] = Mark::OnTheWay;
            while let Some((at, rest)) = way.last_mut() {
                let Some((to, path)) = rest.next() else {
                    marks[*at] = Mark::Done;
                    way.pop();
                    continue;
                };
                match marks[*to] {
                    Mark::Done => {}
                    Mark::New => {
                        marks[*to] = Mark::OnTheWay;
                        way.push((*to, backups[*to].iter()));
                    }
                    Mark::OnTheWay if self.report.has_room(Severity::Warning) => {
                        let circle = way.iter().map(|(at, _)| *at).skip_while(|at| at != to).chain([*to]);
                        let names: Vec<&str> = circle.map(|at| named[at].0.as_str()).collect();
                        let message = format!(
                            "a circle ({}): when a backup stands in for another upstream, its own fallback \
                             is not followed",
                            in_short(&names)
                        );
                        self.report.warning(path, message);
                    }
                    Mark::OnTheWay => return,
                }
            }
        }
    }
}

/// To which upstreams each one falls back, by their places in the file, with the first step that says so.
fn backups(named: &[(String, raw::Upstream)]) -> Vec<Vec<(usize, Path)>> {
    let places: HashMap<&str, usize> =
        named.iter().enumerate().map(|(at, (name, _))| (name.as_str(), at)).collect();
    let of = |(at, (name, keys)): (usize, &(String, raw::Upstream))| {
        // That one's fallback is never followed has been told.
        if has_no_hosts(keys) {
            return Vec::new();
        }
        let section = Path::of(["upstreams", name.as_str()]);
        let routes = keys.routes.iter().flatten().enumerate();
        let routes = routes.map(|(nth, route)| (route.stages(), section.key("routes").index(nth)));
        let mut known = HashSet::from([at]);
        let mut found = Vec::new();
        for (own, section) in [(keys.stages(), section.clone())].into_iter().chain(routes) {
            for (nth, step) in steps(&own).iter().enumerate() {
                if let Some(to) = step.upstream.as_deref().and_then(|to| places.get(to))
                    && known.insert(*to)
                {
                    found.push((*to, section.key("fallback").index(nth).key("upstream")));
                }
            }
        }
        found
    };
    named.iter().enumerate().map(of).collect()
}

/// A long circle without its middle.
fn in_short(names: &[&str]) -> String {
    match names.len() {
        0..=MOST_NAMES => names.join(", "),
        count => {
            let half = MOST_NAMES / 2;
            format!("{}, …, {}", names[..half].join(", "), names[count - half..].join(", "))
        }
    }
}
