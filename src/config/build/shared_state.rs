//! `shared_state`, and what says `shared: true`.
//!
//! Neither does anything without the other. To share without a place for it is an error: it would look like one
//! limit for all pods and be one for each. A place where nothing is kept is a warning.

use std::time::Duration;

use super::Builder;
use crate::config::files::{in_clear, is_one_substitution};
use crate::config::notation::{Flag, Switch, Unit};
use crate::config::problem::{Path, Severity};
use crate::config::redis_url;
use crate::config::{LARGEST_QUORUM, Login, Redis, RedisKind, SharedState, Stages, Tls, UpstreamPolicy, raw};
use crate::units::Span;

const TIMEOUT: Duration = Duration::from_millis(25);
const SHORTEST_TIMEOUT: Duration = Duration::from_millis(1);
const LONGEST_TIMEOUT: Duration = Duration::from_secs(1);
const QUORUM: u32 = 2;
const PREFIX: &str = "hedgerow";
const LONGEST_PREFIX: usize = 64;

impl Builder<'_> {
    /// `None` where it is off, or its URL is wrong.
    pub(super) fn shared_state(&self, keys: Option<&raw::SharedState>, tls: &Tls) -> Option<SharedState> {
        let (keys, path) = (keys?, Path::of(["shared_state"]));
        let timeout = keys.timeout.map_or(TIMEOUT, |Unit(Span(timeout))| timeout);
        if !(SHORTEST_TIMEOUT..=LONGEST_TIMEOUT).contains(&timeout) {
            self.report.error(&path.key("timeout"), "expected 1ms to 1s: a request may wait that long");
        }
        let quorum = keys.quorum.unwrap_or(QUORUM);
        match quorum {
            1 => {
                let message =
                    "one pod that sees failures, be it for its own network, opens a breaker for all";
                self.report.warning(&path.key("quorum"), message);
            }
            2..=LARGEST_QUORUM => {}
            _ => self.report.error(&path.key("quorum"), format!("expected 1 to {LARGEST_QUORUM}")),
        }
        let prefix = keys.prefix.as_deref().unwrap_or(PREFIX);
        self.report.check(&path.key("prefix"), prefix_is_fine(prefix));
        let redis = self.redis(keys.redis.as_deref(), &path)?;
        let ca_pem = redis.is_tls.then(|| tls.ca_pem.clone()).flatten();
        Some(SharedState { redis: Redis { ca_pem, ..redis }, timeout, quorum, prefix: prefix.into() })
    }

    fn redis(&self, written: Option<&str>, section: &Path) -> Option<Redis> {
        let path = section.key("redis");
        let Some(written) = written.map(str::trim) else {
            if !self.report.is_written(&path) {
                self.report.error(section, "expected `redis`, a URL such as redis://redis.example:6379");
            }
            return None;
        };
        let url = self.report.check(&path, self.sources.substitute_in_url(written))?;
        if redis_url::has_password(&in_clear(written)) {
            let message =
                "a password in clear; `${env:NAME}` or `${file:PATH}` in its place keeps it out of the file";
            self.report.warning(&path, message);
        }
        let is_in_parts = written.contains("${") && !is_one_substitution(written);
        let read = redis_url::parse(url.trim()).map_err(|message| match is_in_parts {
            true => format!("{message}; what is put in for `${{…}}` beside other text is percent-encoded"),
            false => message.to_owned(),
        });
        let mut redis = self.report.check(&path, read)?;
        self.doubt_logins(&mut redis, &path);
        Some(redis)
    }

    /// Logins that are none.
    fn doubt_logins(&self, redis: &mut Redis, path: &Path) {
        let Login { user, password } = &mut redis.login;
        // Without a user it would be sent all the same, and refused.
        if user.is_none() && password.take_if(|password| password.is_empty()).is_some() {
            self.report.warning(path, "nobody logs in: the password is empty");
        }
        if is_user_alone(&redis.login) {
            let message = "nobody logs in: a user without a password; a password alone is written \
                           `redis://:PASSWORD@HOST`";
            self.report.warning(path, message);
        }
        if matches!(&redis.kind, RedisKind::Sentinel { login, .. } if is_user_alone(login)) {
            let message = "nobody logs in at the Sentinels: `sentinel_user` without `sentinel_password`";
            self.report.warning(path, message);
        }
    }

    /// What is shared, and where.
    pub(super) fn judge_sharing(
        &self,
        written: Option<&Switch<raw::SharedState>>,
        (defaults, stages): (&raw::Defaults, &Stages),
        upstreams: &[UpstreamPolicy],
        named: &[(String, raw::Upstream)],
    ) {
        let path = Path::of(["shared_state"]);
        // What is there and wrong has been told.
        let is_on = written.map_or_else(|| self.report.is_written(&path), |switch| switch.on().is_some());
        if !is_on {
            self.refuse_to_share(&defaults.stages(), &Path::of(["defaults"]));
            for (name, keys) in named {
                let section = Path::of(["upstreams", name]);
                self.refuse_to_share(&keys.stages(), &section);
                for (index, route) in keys.routes.iter().flatten().enumerate() {
                    self.refuse_to_share(&route.stages(), &section.key("routes").index(index));
                }
            }
        } else if !is_shared(stages) && !upstreams.iter().any(shares_any) {
            let message = "nothing is shared: that takes `shared: true` in a breaker, rate_limit or cache";
            self.report.warning(&path, message);
        }
    }

    /// Told where it is written, so once however many sections inherit it.
    fn refuse_to_share(&self, own: &raw::Stages, section: &Path) {
        for (stage, flag) in shared_keys(own) {
            if flag == Some(Flag(true)) && self.report.has_room(Severity::Error) {
                let message = "needs shared_state.redis, the URL of a Redis that all pods have in common";
                self.report.error(&section.key(stage).key("shared"), message);
            }
        }
    }
}

fn is_user_alone(login: &Login) -> bool {
    login.user.is_some() && login.password.is_none()
}

/// What a section itself says of sharing.
fn shared_keys(own: &raw::Stages) -> [(&'static str, Option<Flag>); 3] {
    [
        ("breaker", own.breaker.as_ref().and_then(Switch::on).and_then(|keys| keys.shared)),
        ("rate_limit", own.rate_limit.as_ref().and_then(Switch::on).and_then(|keys| keys.shared)),
        ("cache", own.cache.as_ref().and_then(|toggle| toggle.0.on()).and_then(|keys| keys.shared)),
    ]
}

fn shares_any(upstream: &UpstreamPolicy) -> bool {
    is_shared(&upstream.stages) || upstream.routes.iter().any(|route| is_shared(&route.stages))
}

fn is_shared(stages: &Stages) -> bool {
    stages.breaker.as_ref().is_some_and(|breaker| breaker.is_shared)
        || stages.rate_limit.as_ref().is_some_and(|limit| limit.is_shared)
        || stages.cache.as_ref().is_some_and(|cache| cache.is_shared)
}

/// Keys are read by people and by `redis-cli --scan --pattern`.
fn prefix_is_fine(prefix: &str) -> Result<(), &'static str> {
    if !(1..=LONGEST_PREFIX).contains(&prefix.len()) || !prefix.bytes().all(|b| b.is_ascii_graphic()) {
        return Err("expected 1 to 64 visible ASCII characters without blanks");
    }
    if prefix.ends_with(':') {
        return Err("expected no `:` at its end: one is put between it and the rest of a key");
    }
    Ok(())
}
