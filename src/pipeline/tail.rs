//! The rest of an upstream's answer behind its head, with all that is held until it ends.
//!
//! The permit, the deadline and the verdict live here, whoever reads: the client's connection, a flight
//! that several calls wait for, the cache that renews what it keeps. A body that cannot be completed
//! ends in an error. Dropping a tail before its end cancels the rest on the wire.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body::{Frame, SizeHint};
use tokio::time::{Instant, Sleep, sleep_until};

use super::judge::Judge;
use crate::error::{Bound, Error, Stage};
use crate::policy::bulkhead::Permit;
use crate::policy::deadline::Deadline;
use crate::upstream::connection::Exchange;
use crate::upstream::registry::Lane;

/// An upstream's body with all that is held until it ends.
pub struct Tail {
    /// Taken when the body has ended.
    exchange: Option<Exchange>,
    judge: Judge,
    permit: Option<Permit>,
    lane: Lane,
    end: Option<Deadline>,
    /// When the last byte came.
    moved: Instant,
    /// Made only when the body has to be waited for.
    timer: Option<Pin<Box<Sleep>>>,
}

impl Tail {
    /// What follows a head that came at `moved`. `end` is the deadline, where it covers the body.
    pub fn new(
        exchange: Exchange,
        judge: Judge,
        permit: Option<Permit>,
        lane: Lane,
        end: Option<Deadline>,
        moved: Instant,
    ) -> Self {
        Self { exchange: Some(exchange), judge, permit, lane, end, moved, timer: None }
    }

    /// When the body must have come and gone out.
    pub fn end(&self) -> Option<Instant> {
        self.end.as_ref().map(|deadline| deadline.at)
    }

    /// The longest silence of a body that no deadline covers.
    pub fn stream_idle(&self) -> Duration {
        self.lane.stages().stream_idle
    }

    /// Reads on. After the end, and after an error, there is no more.
    pub fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let Some(exchange) = &mut self.exchange else { return Poll::Ready(None) };
        match exchange.poll_frame(cx) {
            Poll::Ready(Some(Ok(frame))) => {
                self.moved = Instant::now();
                // Nothing follows trailers, and whoever gets them does not ask again.
                let is_last = frame.is_trailers() || exchange.is_end_stream();
                // A body that never has to be waited for does not get to the timer.
                if let Some(deadline) = self.end.as_ref().filter(|end| !is_last && self.moved >= end.at) {
                    let error = deadline.exceeded(Stage::Body);
                    self.judge.expire(self.moved);
                    return Poll::Ready(Some(Err(self.cut(error))));
                }
                if let Some(trailers) = frame.trailers_ref() {
                    self.judge.trailers(trailers, self.moved);
                }
                if is_last {
                    self.complete();
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(None) => {
                self.complete();
                Poll::Ready(None)
            }
            Poll::Ready(Some(Err(error))) => {
                self.judge.fail(&error, Instant::now());
                Poll::Ready(Some(Err(self.cut(error))))
            }
            Poll::Pending => self.poll_timer(cx).map(|error| {
                self.judge.expire(Instant::now());
                Some(Err(self.cut(error)))
            }),
        }
    }

    /// The next frame. Cancel-safe.
    pub async fn frame(&mut self) -> Option<Result<Frame<Bytes>, Error>> {
        poll_fn(|cx| self.poll_frame(cx)).await
    }

    /// The whole body, when it has at most `limit` bytes and no trailers; else the rest is given up.
    pub async fn read(mut self, limit: usize) -> Option<Bytes> {
        let mut body = BytesMut::new();
        while let Some(frame) = self.frame().await {
            let data = frame.ok()?.into_data().ok()?;
            if body.len() + data.len() > limit {
                return None;
            }
            body.extend_from_slice(&data);
        }
        Some(body.freeze())
    }

    /// Strikes at the deadline, or where none covers the body when nothing has come for too long.
    fn poll_timer(&mut self, cx: &mut Context<'_>) -> Poll<Error> {
        loop {
            let end = match &self.end {
                Some(deadline) => deadline.at,
                None => self.moved + self.lane.stages().stream_idle,
            };
            let settles_at = self.judge.settles_at().filter(|at| *at < end);
            let due = settles_at.unwrap_or(end);
            let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(due)));
            if timer.deadline() < due && timer.is_elapsed() {
                timer.as_mut().reset(due);
            }
            std::task::ready!(timer.as_mut().poll(cx));
            let now = Instant::now();
            if settles_at.is_some_and(|at| now >= at) {
                self.judge.settle(now);
            } else if now >= end {
                return Poll::Ready(match &self.end {
                    Some(deadline) => deadline.exceeded(Stage::Body),
                    None => {
                        Error::DeadlineExceeded { stage: Stage::Body, bound: Bound::StreamIdle, skew: None }
                    }
                });
            }
        }
    }

    /// The body has come whole: gives back what is held.
    pub fn complete(&mut self) {
        let now = Instant::now();
        self.judge.complete(now);
        self.permit = None;
        if let Some(exchange) = self.exchange.take() {
            exchange.finish(&self.lane.upstream.pool, now);
        }
    }

    /// Whether nothing is left to read.
    pub fn is_end_stream(&self) -> bool {
        self.exchange.as_ref().is_none_or(Exchange::is_end_stream)
    }

    /// How much is to come.
    pub fn size_hint(&self) -> SizeHint {
        self.exchange.as_ref().map_or_else(|| SizeHint::with_exact(0), Exchange::size_hint)
    }

    /// Lets go of all that is held.
    fn cut(&mut self, error: Error) -> Error {
        self.permit = None;
        self.exchange = None;
        error
    }
}

impl std::fmt::Debug for Tail {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tail").finish_non_exhaustive()
    }
}
