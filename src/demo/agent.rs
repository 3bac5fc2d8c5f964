//! The agents: each question goes to all tools at once, straight or through hedgerow.

use std::error::Error;
use std::net::SocketAddr;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use futures_util::future::join_all;
use http::{Request, StatusCode, header};
use http_body_util::{BodyExt, Empty};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use super::PATIENT;
use super::tools::Tools;
use crate::policy::deadline::X_REQUEST_DEADLINE;
use crate::wire::deadline_header::format_rfc3339_millis;

/// How tools are called.
#[derive(Debug, Clone, Copy)]
pub(super) enum Way {
    /// Straight, as agents do without a proxy: a timeout for each call.
    Plain {
        /// For one call, from connecting to its last byte.
        timeout: Duration,
    },
    /// Through hedgerow, with one deadline for the whole question.
    Hedgerow {
        /// Where it listens.
        proxy: SocketAddr,
        /// From the question's start.
        deadline: Duration,
    },
}

/// One call, as its agent saw it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Called {
    /// From connecting to the answer's last byte, or to giving up.
    pub(super) took: Duration,
    /// Whether the tool's answer came.
    pub(super) is_answered: bool,
}

/// One question.
#[derive(Debug, Clone)]
pub(super) struct Question {
    /// Until its last call had ended.
    pub(super) took: Duration,
    /// Its calls, in the order of the tools.
    pub(super) calls: Vec<Called>,
}

/// Asks `count` questions, `users` at once.
pub(super) async fn ask_all(tools: &Tools, way: Way, count: usize, users: usize) -> Vec<Question> {
    let mut asking = JoinSet::new();
    for user in 0..users {
        let tools = tools.addresses();
        let own = (user..count).step_by(users).len();
        asking.spawn(async move {
            let mut questions = Vec::new();
            for _ in 0..own {
                questions.push(ask(&tools, way).await);
            }
            questions
        });
    }
    asking.join_all().await.into_iter().flatten().collect()
}

async fn ask(tools: &[SocketAddr], way: Way) -> Question {
    let started = Instant::now();
    let (proxy, deadline, patience) = match way {
        Way::Plain { timeout } => (None, None, timeout),
        Way::Hedgerow { proxy, deadline } => (Some(proxy), Some(SystemTime::now() + deadline), PATIENT),
    };
    let deadline = deadline.map(format_rfc3339_millis);
    let calls = tools.iter().map(|tool| {
        let mut request =
            Request::get(format!("http://{tool}/v1/answer")).header(header::HOST, tool.to_string());
        if let Some(deadline) = &deadline {
            request = request.header(&X_REQUEST_DEADLINE, deadline);
        }
        call(proxy.unwrap_or(*tool), request.body(Empty::new()), patience)
    });
    let calls = join_all(calls).await;
    Question { took: started.elapsed(), calls }
}

async fn call(to: SocketAddr, request: http::Result<Request<Empty<Bytes>>>, patience: Duration) -> Called {
    let started = Instant::now();
    let status = timeout(patience, async { exchange(to, request?).await }).await;
    let is_answered = matches!(status, Ok(Ok(status)) if status.is_success());
    Called { took: started.elapsed(), is_answered }
}

/// One request on a connection of its own. Dropping it closes the connection.
async fn exchange(
    to: SocketAddr,
    request: Request<Empty<Bytes>>,
) -> Result<StatusCode, Box<dyn Error + Send + Sync>> {
    let stream = TcpStream::connect(to).await?;
    stream.set_nodelay(true)?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    // Takes the sender with it, whose end is the connection's.
    let answer = async move {
        let answer = sender.send_request(request).await?;
        let status = answer.status();
        answer.into_body().collect().await?;
        Ok::<_, hyper::Error>(status)
    };
    let (status, _) = tokio::join!(answer, connection);
    Ok(status?)
}
