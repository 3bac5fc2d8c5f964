//! What an upstream does that answers by itself.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::exchange::{Exchange, head};
use super::record::Seen;

/// What decides the answers of an upstream that runs by itself.
pub(super) type Script = Arc<dyn Fn(&Seen) -> Reply + Send + Sync>;

/// What a scripted upstream does with a request.
#[derive(Debug, Clone)]
pub struct Reply {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
    delay: Duration,
    manner: Manner,
}

#[derive(Debug, Clone, Copy)]
enum Manner {
    Whole,
    Drip { pieces: usize, pause: Duration },
    Cut { after: usize },
    Hang,
    Reset,
    Close,
}

impl Reply {
    /// 200 with this body.
    pub fn ok(body: impl Into<Vec<u8>>) -> Self {
        Self { body: body.into(), ..Self::status(200) }
    }

    /// This status without a body.
    pub fn status(status: u16) -> Self {
        let (headers, body, delay) = (Vec::new(), Vec::new(), Duration::ZERO);
        Self { status, headers, body, delay, manner: Manner::Whole }
    }

    /// Never answers.
    pub fn hang() -> Self {
        Self { manner: Manner::Hang, ..Self::status(200) }
    }

    /// RST instead of an answer.
    pub fn reset() -> Self {
        Self { manner: Manner::Reset, ..Self::status(200) }
    }

    /// FIN instead of an answer.
    pub fn close() -> Self {
        Self { manner: Manner::Close, ..Self::status(200) }
    }

    /// One more field.
    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    /// This body.
    pub fn body(self, body: impl Into<Vec<u8>>) -> Self {
        Self { body: body.into(), ..self }
    }

    /// Nothing happens for so long first.
    pub fn after(self, delay: Duration) -> Self {
        Self { delay, ..self }
    }

    /// The body in so many chunks, with a pause before each.
    pub fn drip(self, pieces: usize, pause: Duration) -> Self {
        Self { manner: Manner::Drip { pieces, pause }, ..self }
    }

    /// Promises the whole body and closes after so many bytes of it.
    pub fn cut(self, after: usize) -> Self {
        Self { manner: Manner::Cut { after }, ..self }
    }

    fn lines(&self) -> Vec<(&str, &str)> {
        self.headers.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect()
    }
}

/// A script that goes through these statuses for each path; the last one stays.
pub fn statuses(sequence: &'static [u16]) -> impl Fn(&Seen) -> Reply + Send + Sync + 'static {
    move |seen| {
        let status = sequence.get(seen.nth - 1).or(sequence.last()).expect("a sequence has a status");
        Reply::status(*status).body(status.to_string())
    }
}

/// A script that has a reply for each path, and 404 for others.
pub fn by_path(replies: &[(&str, Reply)]) -> impl Fn(&Seen) -> Reply + Send + Sync + 'static {
    let replies: HashMap<_, _> =
        replies.iter().map(|(path, reply)| ((*path).to_owned(), reply.clone())).collect();
    move |seen| replies.get(seen.path()).cloned().unwrap_or_else(|| Reply::status(404))
}

/// Plays a reply on an exchange, unless the peer leaves first.
pub(super) async fn play(mut exchange: Exchange, script: &Script) {
    match exchange.try_body().await {
        Ok(body) if body.complete => {}
        _ => return exchange.flight.abort(),
    }
    let reply = script(&exchange.seen);
    tokio::select! {
        () = tokio::time::sleep(reply.delay) => {}
        _ = exchange.peer_left() => return,
    }
    match reply.manner {
        Manner::Whole => exchange.respond(reply.status, &reply.lines(), &reply.body).await,
        Manner::Drip { pieces, pause } => drip(exchange, &reply, pieces, pause).await,
        Manner::Cut { after } => {
            exchange.raw(&head(reply.status, &reply.lines(), Some(reply.body.len()))).await;
            exchange.raw(&reply.body[..after]).await;
            exchange.close().await;
        }
        Manner::Hang => drop(exchange.peer_left().await),
        Manner::Reset => exchange.reset(),
        Manner::Close => exchange.close().await,
    }
}

async fn drip(mut exchange: Exchange, reply: &Reply, pieces: usize, pause: Duration) {
    exchange.start_chunks(reply.status, &reply.lines()).await;
    for piece in reply.body.chunks(reply.body.len().div_ceil(pieces).max(1)) {
        tokio::select! {
            () = tokio::time::sleep(pause) => exchange.chunk(piece).await,
            _ = exchange.peer_left() => return,
        }
    }
    exchange.end().await;
}
