//! What the fan-out promises, under load: its deadline, what it costs, what it holds, and how soon its stream begins.
//!
//! **Deadline.** Many fan-outs of fifteen calls, some hundred at a time, of which three tools never answer. Each
//! must be answered by its deadline, to 15 ms at the 99th percentile, and the tools that hang must see their requests
//! cancelled by then, to 10 ms: nothing runs on. Both are measured from here, on a core that has the load and the tools
//! to carry as well, so what they are late themselves is in the figure.
//!
//! **Cost.** Processor time of the proxy for each call inside a fan-out, beside the same call sent through the proxy by
//! itself: at most 1.3 of it.
//!
//! **Memory.** Fan-outs of fifteen answers of 1 MiB: as many at a time as there is room for, which must all be whole,
//! and then all at once, which cannot be. The proxy may hold what all fan-outs may hold together, 256 MiB, and as much
//! again for what is on its way in and out of it. Every answer is whole or says that it is not.
//!
//! **First event.** From the moment at which the first tool has answered to the first event of the stream: 3 ms at the
//! 99th percentile.
//!
//! `cargo bench --bench fanout -- --help` tells the settings. The exit code is 1 when a bar was missed.

mod rig;

use std::io;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use clap::Parser;
use http::header::{self, HeaderValue};
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use rig::{Agent, Cores, Line, Others, Proxy, Times, conclude, serve};

const POLICY: &str = "
threads: 1
listen: { proxy: 127.0.0.1:@PROXY@, admin: 127.0.0.1:@ADMIN@ }
telemetry: { access_log: off }
defaults: { hedge: off, breaker: off, bulkhead: { max_concurrent: 10000 } }
";

/// Calls of a fan-out.
const CALLS: usize = 15;
/// Of which so many are to tools that never answer.
const HUNG: usize = 3;
/// What all fan-outs may hold together.
const HELD: f64 = 256.0;

/// Measures the fan-out.
#[derive(Parser)]
struct Arguments {
    /// Fan-outs whose deadline is watched.
    #[arg(long, env = "FANOUT_COUNT", default_value_t = 1000)]
    count: usize,
    /// Of those, at a time.
    #[arg(long, env = "FANOUT_AT_ONCE", default_value_t = 200)]
    at_once: usize,
    /// Their deadline, in milliseconds.
    #[arg(long, env = "FANOUT_DEADLINE", default_value_t = 1000)]
    deadline: u64,
    /// Fan-outs of large answers.
    #[arg(long, env = "FANOUT_LARGE", default_value_t = 500)]
    large: usize,
    /// Seconds in which the cost is measured, for each of the two.
    #[arg(long, env = "FANOUT_SECS", default_value_t = 3.0)]
    secs: f64,
    /// What cargo says to every benchmark.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> ExitCode {
    let (arguments, cores) = (Arguments::parse(), Cores::choose());
    rig::run(cores, measure(&arguments, cores))
}

async fn measure(arguments: &Arguments, cores: Cores) -> io::Result<ExitCode> {
    let tools = Tools::default();
    let tool = serve({
        let tools = tools.clone();
        move |path| tools.clone().answer(path)
    })
    .await?;
    let proxy = Proxy::start(POLICY, cores).await?;
    let others = Others::watch(&proxy)?;
    let mut lines = deadline(arguments, &proxy, tool, &tools).await?;
    lines.push(cost(arguments, &proxy, tool).await?);
    lines.push(first_event(&proxy, tool, &tools).await?);
    lines.extend(memory(arguments, &proxy, tool, 12).await?);
    lines.extend(memory(arguments, &proxy, tool, arguments.large).await?);
    lines.push(others.tell(&proxy)?);
    let title = format!(
        "{} fan-outs of {CALLS} calls, {} at a time, {HUNG} of each hung, deadline {} ms",
        arguments.count, arguments.at_once, arguments.deadline
    );
    Ok(conclude(&title, cores, &lines))
}

/// What the tools saw.
#[derive(Clone, Default)]
struct Tools {
    /// When requests that were never answered were cancelled.
    cancelled: Arc<Mutex<Vec<Instant>>>,
    /// When the one tool that streams are timed by last answered.
    answered: Arc<Mutex<Option<Instant>>>,
}

impl Tools {
    async fn answer(self, path: String) -> Response<Full<Bytes>> {
        match path.rsplit('/').next() {
            Some("hung") => {
                let _watch = Cancelled(self.cancelled);
                std::future::pending::<()>().await;
            }
            Some("timed") => {
                sleep(Duration::from_millis(20)).await;
                *self.answered.lock() = Some(Instant::now());
            }
            Some("late") => sleep(Duration::from_millis(200)).await,
            Some("large") => return large(),
            _ => {}
        }
        let mut answer = Response::new(Full::new(Bytes::from_static(br#"{"price":189.4,"currency":"USD"}"#)));
        answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        answer
    }
}

/// 1 MiB.
fn large() -> Response<Full<Bytes>> {
    static BODY: [u8; 1 << 20] = [b'x'; 1 << 20];
    let mut answer = Response::new(Full::new(Bytes::from_static(&BODY)));
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain"));
    answer
}

/// Notes when it is dropped.
struct Cancelled(Arc<Mutex<Vec<Instant>>>);

impl Drop for Cancelled {
    fn drop(&mut self) {
        self.0.lock().push(Instant::now());
    }
}

/// A connection that fan-outs are sent on.
struct Client {
    proxy: SocketAddr,
    sender: SendRequest<Full<Bytes>>,
}

impl Client {
    async fn connect(proxy: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect(proxy).await?;
        stream.set_nodelay(true)?;
        let (sender, connection) = handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
        tokio::spawn(connection);
        Ok(Self { proxy, sender })
    }

    async fn send(&mut self, list: &Value, accept: &str) -> io::Result<Response<Incoming>> {
        let request = Request::post("/v1/fanout")
            .header(header::HOST, self.proxy.to_string())
            .header(header::ACCEPT, accept)
            .body(Full::from(list.to_string()))
            .map_err(io::Error::other)?;
        self.sender.ready().await.map_err(io::Error::other)?;
        self.sender.send_request(request).await.map_err(io::Error::other)
    }

    /// The whole answer; `None` when there was no room for it.
    async fn try_ask(&mut self, list: &Value) -> io::Result<Option<Bytes>> {
        let answer = self.send(list, "application/json").await?;
        let status = answer.status();
        let body = answer.into_body().collect().await.map_err(io::Error::other)?.to_bytes();
        match status {
            StatusCode::OK => Ok(Some(body)),
            StatusCode::SERVICE_UNAVAILABLE => Ok(None),
            _ => Err(io::Error::other(format!("{status}: {}", String::from_utf8_lossy(&body)))),
        }
    }

    async fn ask(&mut self, list: &Value) -> io::Result<Bytes> {
        self.try_ask(list).await?.ok_or_else(|| io::Error::other("no room for a small answer"))
    }
}

/// A list of calls to these paths.
fn list(tool: SocketAddr, paths: &[&str], deadline: u64) -> Value {
    let call = |(at, path)| json!({ "id": format!("{at}"), "url": format!("http://{tool}/{path}") });
    json!({ "deadline_ms": deadline, "calls": paths.iter().enumerate().map(call).collect::<Vec<_>>() })
}

/// Runs `work` so often, on so many connections at a time.
async fn many<T: Send + 'static, F>(
    proxy: SocketAddr,
    count: usize,
    at_once: usize,
    work: impl Fn(Client) -> F,
) -> io::Result<Vec<T>>
where
    F: Future<Output = io::Result<(T, Client)>> + Send + 'static,
{
    let (mut running, mut results) = (JoinSet::new(), Vec::with_capacity(count));
    for _ in 0..at_once.min(count) {
        running.spawn(work(Client::connect(proxy).await?));
    }
    let mut begun = running.len();
    while let Some(done) = running.join_next().await {
        let (result, client) = done.map_err(io::Error::other)??;
        results.push(result);
        if begun < count {
            begun += 1;
            running.spawn(work(client));
        }
    }
    Ok(results)
}

async fn deadline(
    arguments: &Arguments,
    proxy: &Proxy,
    tool: SocketAddr,
    tools: &Tools,
) -> io::Result<Vec<Line>> {
    let mut paths = vec!["quick"; CALLS - HUNG];
    paths.extend([["hung"; HUNG]].concat());
    let (list, end) =
        (Arc::new(list(tool, &paths, arguments.deadline)), Duration::from_millis(arguments.deadline));
    let times = many(proxy.address(), arguments.count, arguments.at_once, |mut client| {
        let list = list.clone();
        async move {
            // Not all at the same moment, which is nobody's day.
            sleep(Duration::from_millis(fastrand::u64(..1000))).await;
            let sent = Instant::now();
            let answer: Value = serde_json::from_slice(&client.ask(&list).await?)?;
            let is_right = answer["counts"]["results"] == CALLS - HUNG;
            Ok(((sent, sent.elapsed(), is_right), client))
        }
    })
    .await?;
    let wrong = times.iter().filter(|(_, _, is_right)| !is_right).count();
    let took = Times::of(times.iter().map(|(_, took, _)| *took));
    let late = took.quantile(0.99).saturating_sub(end);
    // The last fan-out's cancellations are on their way.
    sleep(Duration::from_millis(50)).await;
    let cancelled = tools.cancelled.lock();
    let mut ends: Vec<_> = times.iter().map(|(sent, _, _)| *sent + end).collect();
    ends.sort_unstable();
    let mut cancels = cancelled.clone();
    cancels.sort_unstable();
    // In order of time the nth triple belongs to the nth deadline, give or take what both are late.
    let after = Times::of(
        cancels
            .chunks(HUNG)
            .zip(&ends)
            .flat_map(|(three, end)| three.iter().map(|at| at.saturating_duration_since(*end))),
    );
    Ok(vec![
        Line::tell("answered after", took.to_string())
            .must("p99 15 ms past the deadline at most", late <= Duration::from_millis(15)),
        Line::tell("fan-outs with another number of results", wrong.to_string()).must("0", wrong == 0),
        Line::tell(
            "hung calls cancelled",
            format!("{} of {}, past the deadline {after}", cancelled.len(), arguments.count * HUNG),
        )
        .must(
            "all, p99 10 ms at most",
            cancelled.len() == arguments.count * HUNG && after.quantile(0.99) <= Duration::from_millis(10),
        ),
    ])
}

/// In turns, since a machine is not the same all the time.
async fn cost(arguments: &Arguments, proxy: &Proxy, tool: SocketAddr) -> io::Result<Line> {
    const TURNS: u32 = 5;
    let (list, turn) =
        (list(tool, &["quick"; CALLS], 10_000), Duration::from_secs_f64(arguments.secs) / TURNS);
    let (mut client, mut ratios, mut costs) =
        (Client::connect(proxy.address()).await?, Vec::new(), Vec::new());
    let mut agents = Vec::new();
    for _ in 0..CALLS {
        agents.push(Agent::connect(proxy.address()).await?);
    }
    for _ in 0..TURNS {
        let (before, end, mut inside) = (proxy.cpu()?, Instant::now() + turn, 0);
        while Instant::now() < end {
            client.ask(&list).await?;
            inside += CALLS;
        }
        let inside = (proxy.cpu()? - before).as_secs_f64() / inside as f64;
        let (before, end, mut alone) = (proxy.cpu()?, Instant::now() + turn, 0);
        while Instant::now() < end {
            futures_util::future::try_join_all(agents.iter_mut().map(|agent| agent.get(tool, "/quick")))
                .await?;
            alone += CALLS;
        }
        let alone = (proxy.cpu()? - before).as_secs_f64() / alone as f64;
        ratios.push(inside / alone);
        costs.push(inside * 1e6);
    }
    ratios.sort_unstable_by(f64::total_cmp);
    costs.sort_unstable_by(f64::total_cmp);
    let (ratio, cost) = (ratios[ratios.len() / 2], costs[costs.len() / 2]);
    let text = format!("{cost:.1} us a call, {ratio:.2} of the same through the proxy");
    Ok(Line::tell("processor time", text).must("1.30 at most", ratio <= 1.3))
}

async fn first_event(proxy: &Proxy, tool: SocketAddr, tools: &Tools) -> io::Result<Line> {
    let mut paths = vec!["late"; CALLS - 1];
    paths.push("timed");
    let list = list(tool, &paths, 10_000);
    let (mut client, mut times) = (Client::connect(proxy.address()).await?, Vec::new());
    for _ in 0..200 {
        let mut body = client.send(&list, "text/event-stream").await?.into_body();
        let mut seen = None;
        while let Some(frame) = body.frame().await {
            let text = frame.map_err(io::Error::other)?.into_data().unwrap_or_default();
            if text.windows(13).any(|part| part == b"event: result") {
                seen.get_or_insert_with(Instant::now);
            }
        }
        let answered = tools.answered.lock().take();
        let (Some(seen), Some(answered)) = (seen, answered) else {
            return Err(io::Error::other("a stream without a result"));
        };
        times.push(seen.saturating_duration_since(answered));
    }
    let times = Times::of(times.into_iter());
    Ok(Line::tell("first event after the first answer", times.to_string())
        .must("p99 3 ms at most", times.quantile(0.99) <= Duration::from_millis(3)))
}

async fn memory(
    arguments: &Arguments,
    proxy: &Proxy,
    tool: SocketAddr,
    at_once: usize,
) -> io::Result<Vec<Line>> {
    let (before, mut peak) = (proxy.resident()?, 0.0_f64);
    let list = Arc::new(list(tool, &["large"; CALLS], 30_000));
    let began = Instant::now();
    let asked = many(proxy.address(), arguments.large, at_once, |mut client| {
        let list = list.clone();
        async move {
            let answer = client.try_ask(&list).await?;
            Ok((answer.map(|body| Results::of(&body)).transpose()?, client))
        }
    });
    let all = tokio::select! {
        all = asked => all?,
        error = async {
            loop {
                match proxy.resident() {
                    Ok(now) => peak = peak.max(now),
                    Err(error) => break error,
                }
                sleep(Duration::from_millis(20)).await;
            }
        } => return Err(error),
    };
    let took = began.elapsed().as_secs_f64();
    let refused = all.iter().filter(|results| results.is_none()).count();
    let sum = all.into_iter().flatten().fold(Results::default(), Results::and);
    let most = before + 2.0 * HELD;
    let has_room = (at_once * CALLS) as f64 <= HELD;
    let is_right = sum.silent == 0 && (!has_room || sum.whole == arguments.large * CALLS);
    Ok(vec![
        Line::tell(
            format!("{} fan-outs of {CALLS} x 1 MiB, {at_once} at a time", arguments.large),
            format!("{before:.0} MiB before, {peak:.0} MiB at most, {took:.1} s"),
        )
        .must(format!("{most:.0} MiB at most"), peak <= most),
        Line::tell(
            "their results",
            format!(
                "{} whole, {} cut off, {} missing, {refused} fan-outs refused",
                sum.whole, sum.cut, sum.missing
            ),
        )
        .must(if has_room { "all whole" } else { "each as it says" }, is_right),
    ])
}

/// What came of some calls for 1 MiB.
#[derive(Default, Clone, Copy)]
struct Results {
    whole: usize,
    cut: usize,
    missing: usize,
    /// Not whole, and not said to be cut off.
    silent: usize,
}

impl Results {
    fn of(body: &[u8]) -> io::Result<Self> {
        let answer: Value = serde_json::from_slice(body)?;
        let mut results = Self::default();
        for result in answer["results"].as_object().into_iter().flat_map(|results| results.values()) {
            let is_whole = result["body"].as_str().is_some_and(|body| body.len() == 1 << 20);
            match (is_whole, result["truncated"] == true) {
                (true, false) => results.whole += 1,
                (false, true) => results.cut += 1,
                (true, true) | (false, false) => results.silent += 1,
            }
        }
        results.missing = answer["missing"].as_object().map_or(0, serde_json::Map::len);
        Ok(results)
    }

    fn and(self, other: Self) -> Self {
        Self {
            whole: self.whole + other.whole,
            cut: self.cut + other.cut,
            missing: self.missing + other.missing,
            silent: self.silent + other.silent,
        }
    }
}
