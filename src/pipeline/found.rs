//! What a call is answered with, wherever it comes from, on its way from the stage that found it to the
//! client.

use std::future::poll_fn;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Response, StatusCode};
use tokio::time::Instant;

use super::attempt::Head;
use super::feed::LeaderBody;
use super::judge::is_stream;
use super::race::Outcome;
use super::record::Recorder;
use super::tail::Tail;
use crate::policy::deadline::Deadline;
use crate::respond::headers::{CacheStatus, HedgeEnd};
use crate::telemetry::metrics::{Source, StandIn};
use crate::wire::hop_by_hop;

/// An answer that is not on its way to the client yet.
pub enum Found {
    /// An upstream's, whose body is still to come.
    Live(Live),
    /// An upstream's, whose body others wait for too.
    Led(Box<Led>),
    /// One that is all here.
    Whole(Box<Whole>),
}

/// An upstream's head, with what holds until the body behind it ends.
pub struct Live {
    /// The head.
    pub head: Box<Head>,
    /// How its hedge ended.
    pub hedge: Option<HedgeEnd>,
    /// How it was come by.
    pub note: Note,
    /// Keeps the body as it passes.
    pub recorder: Option<Box<Recorder>>,
}

/// A head whose body is read by a flight, as fast as it comes.
pub struct Led {
    /// The head, without its hop-by-hop fields.
    pub response: Response<()>,
    /// The body.
    pub body: LeaderBody,
    /// Whether it is good enough not to look for a better one.
    pub is_acceptable: bool,
    /// How its hedge ended.
    pub hedge: Option<HedgeEnd>,
    /// From passing the gates to the head.
    pub elapsed: Duration,
    /// When the head came.
    pub at: Instant,
    /// How it was come by.
    pub note: Note,
}

/// An answer with its body.
#[derive(Clone)]
pub struct Whole {
    /// Without hop-by-hop fields.
    pub response: Response<Bytes>,
    /// Whether it is good enough not to look for a better one.
    pub is_acceptable: bool,
    /// From passing the gates to the head, where an attempt of this call brought it.
    pub elapsed: Option<Duration>,
    /// How its hedge ended.
    pub hedge: Option<HedgeEnd>,
    /// How it was come by.
    pub note: Note,
}

/// How an answer was come by, as its fields and the log tell it.
#[derive(Debug, Clone, Copy, Default)]
pub struct Note {
    /// What the cache has to do with it.
    pub cache: Option<CacheStatus>,
    /// It stands in for one that could not be had.
    pub stand_in: Option<StandIn>,
    /// It stands in for what another call might well have had.
    pub is_for_one: bool,
}

impl Note {
    /// Where the answer comes from.
    pub fn source(self, hedge: Option<HedgeEnd>) -> Source {
        match (self.stand_in, self.cache) {
            (Some(stand_in), _) => stand_in.into(),
            (None, Some(CacheStatus::Hit { .. })) => Source::Cache,
            (None, Some(CacheStatus::Forwarded { collapsed: true, .. })) => Source::Collapsed,
            (None, _) if hedge == Some(HedgeEnd::Won) => Source::Hedge,
            (None, _) => Source::Primary,
        }
    }
}

impl From<Outcome> for Found {
    fn from(outcome: Outcome) -> Self {
        let Outcome { head, hedge } = outcome;
        Self::Live(Live { head, hedge, note: Note::default(), recorder: None })
    }
}

impl Found {
    /// An answer that is all here.
    pub fn whole(whole: Whole) -> Self {
        Self::Whole(Box::new(whole))
    }

    /// The answer with all of its body, when that has at most `limit` bytes; else it is given up.
    pub async fn read(self, deadline: Option<&Deadline>, limit: usize) -> Option<Whole> {
        let is_acceptable = self.is_acceptable();
        match self {
            Self::Whole(whole) => Some(*whole),
            Self::Led(_) => None,
            Self::Live(live) => {
                let Opened { response, tail, hedge, elapsed, note, .. } = live.open(deadline);
                let body = tail.read(limit).await?;
                let response = response.map(|()| body);
                Some(Whole { response, is_acceptable, elapsed: Some(elapsed), hedge, note })
            }
        }
    }

    /// Reads the answer to its end for the sake of the cache alone.
    pub async fn read_out(self, deadline: Option<&Deadline>) {
        match self {
            Self::Whole(_) => {}
            Self::Led(mut led) => while let Some(Ok(_)) = poll_fn(|cx| led.body.poll_frame(cx)).await {},
            Self::Live(live) => {
                let Opened { mut tail, recorder, .. } = live.open(deadline);
                let Some(mut recorder) = recorder else { return };
                while let Some(frame) = tail.frame().await {
                    let is_kept =
                        frame.is_ok_and(|frame| frame.data_ref().is_some_and(|data| recorder.keep(data)));
                    if !is_kept {
                        return;
                    }
                }
                recorder.complete();
            }
        }
    }

    /// Whether it is good enough not to look for a better one.
    pub fn is_acceptable(&self) -> bool {
        match self {
            Self::Live(live) => live.head.is_acceptable(),
            Self::Led(led) => led.is_acceptable,
            Self::Whole(whole) => whole.is_acceptable,
        }
    }

    /// Its status.
    pub fn status(&self) -> StatusCode {
        match self {
            Self::Live(live) => live.head.response.status(),
            Self::Led(led) => led.response.status(),
            Self::Whole(whole) => whole.response.status(),
        }
    }

    /// Its fields.
    pub fn headers(&self) -> &HeaderMap {
        match self {
            Self::Live(live) => live.head.response.headers(),
            Self::Led(led) => led.response.headers(),
            Self::Whole(whole) => whole.response.headers(),
        }
    }

    /// Where it comes from.
    pub fn source(&self) -> Source {
        match self {
            Self::Live(live) => live.note.source(live.hedge),
            Self::Led(led) => led.note.source(led.hedge),
            Self::Whole(whole) => whole.note.source(whole.hedge),
        }
    }

    /// How it was come by.
    pub fn note_mut(&mut self) -> &mut Note {
        match self {
            Self::Live(live) => &mut live.note,
            Self::Led(led) => &mut led.note,
            Self::Whole(whole) => &mut whole.note,
        }
    }
}

impl Live {
    /// Whether the connection changes its protocol.
    pub fn is_upgrade(&self) -> bool {
        self.head.response.status() == StatusCode::SWITCHING_PROTOCOLS
    }

    /// When the head came.
    pub fn at(&self) -> Instant {
        self.head.judge.started() + self.head.elapsed
    }

    /// Parts the head from what follows it under `deadline`.
    pub fn open(self, deadline: Option<&Deadline>) -> Opened {
        let at = self.at();
        let Self { head, hedge, note, recorder } = self;
        let Head { mut response, exchange, judge, permit, lane, elapsed, .. } = *head;
        let is_stream = is_stream(response.headers());
        let policy = lane.stages().deadline.as_ref();
        let end = deadline.and_then(|deadline| deadline.of_body(policy, is_stream));
        hop_by_hop::strip(response.headers_mut());
        let tail = Tail::new(exchange, judge, permit, lane, end, at);
        Opened { response, tail, hedge, elapsed, at, note, recorder }
    }
}

/// An upstream's answer, its head apart from its body.
pub struct Opened {
    /// The head, without its hop-by-hop fields.
    pub response: Response<()>,
    /// The body, with all that is held until it ends.
    pub tail: Tail,
    /// How its hedge ended.
    pub hedge: Option<HedgeEnd>,
    /// From passing the gates to the head.
    pub elapsed: Duration,
    /// When the head came.
    pub at: Instant,
    /// How it was come by.
    pub note: Note,
    /// Keeps the body as it passes.
    pub recorder: Option<Box<Recorder>>,
}
