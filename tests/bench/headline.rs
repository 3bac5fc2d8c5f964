//! What the README claims first: a question that needs fifteen tools, asked in eight ways of three kinds of provider.
//!
//! The tools are simulated, each a server in this process whose latencies come from a seed: one draw for each
//! request, so that a second attempt has luck of its own, and the same sequence for every row. All else is real:
//! sockets, proxy, times. **Everything is ten times as fast as what it stands for**, so 150 ms in the table are 1.5 s:
//! latencies, deadline, the client's patience, and in the policy the bounds on the hedge's delay, the reserve and
//! the breaker's times. Questions come at even times, whatever happens to earlier ones.
//!
//! | row | what is done |
//! |---|---|
//! | sequential | straight to the tools, one after the other, each given 15 s |
//! | gather | straight to the tools, all at once, each given 15 s |
//! | deadline | through hedgerow's fan-out, as all that follow: the answer is what has come after 1.5 s |
//! | hedge p75 | a second attempt for the slowest quarter, which `ratio: 30%` pays for |
//! | hedge auto | the same as hedgerow chooses by itself, with the built-in `ratio: 10%` |
//! | breaker | three tools never answer, and hedgerow has found out |
//! | warm cache | the question was asked before, when all tools were well |
//! | first result | the answer is a stream of events; the time is that to the first result |
//!
//! Guards that a row is not about are off or wide, so that each shows what one of them does. The hedges' windows
//! have seen each tool 240 times before, under a deadline of 5 s, which shows nearly all of its latencies. `floor`
//! is 0, so that what hedges add is the ratio's alone. What nobody can set is not scaled: the windows look back on
//! 30 s, the budgets on 10 s. Timers count milliseconds, so a latency is up to one longer than drawn, which stands
//! for 10. The fan-out's calls end 50 ms before its deadline (`reserve`), and what would have come in between is
//! missing.
//!
//! **What it shows, and what not.** A deadline bounds the wait for any provider and costs answers; a client's own
//! timeout of 1.5 s would do as much. Hedging gives the answers back where slowness is luck (`stuck`, `heavy`).
//! Where all calls take about the same time and the deadline is shorter than that (`thin`), one in twenty makes it,
//! one in thirty with the reserve. A second attempt would come later still, so hedgerow sends none, and only a
//! longer deadline helps. A breaker beside such a deadline makes it worse: a miss counts as a failure where the tool
//! had a fair chance (1 s), so tools that are well are cut off. And no hedge helps with a tool that is stuck; the
//! breaker does, by not waiting for it.
//!
//! `cargo bench --bench headline -- --help` tells the settings. The exit code is 1 when a bar was missed. But for the
//! 8 ms after the deadline, the bars lie far from what chance and a busy machine do to 300 questions.

mod rig;

use std::io;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use clap::Parser;
use fastrand::Rng;
use futures_util::future::join_all;
use http::header::{self, HeaderValue};
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use rig::{Agent, Cores, Line, Others, Proxy, Times, conclude, serve};

/// How much faster all is than what it stands for. The policies below are scaled already.
const SCALE: f64 = 10.0;
/// Stands for 1.5 s.
const DEADLINE: Duration = Duration::from_millis(150);
/// What an answer may come after its deadline, on a machine that has nothing else to do.
const LATE: Duration = Duration::from_millis(8);
/// How long a client waits for a tool that it asks itself. Stands for 15 s.
const PATIENCE: Duration = Duration::from_millis(1500);
const TOOLS: usize = 15;
/// Tools that never answer, where some are.
const DEAD: usize = 3;
/// Shares of the calls that hedges may add.
const RATIO: f64 = 0.30;
const AUTO_RATIO: f64 = 0.10;

/// The start of the policy, whose upstreams are the rows that go through hedgerow.
const POLICY: &str = "
threads: 1
listen: { proxy: 127.0.0.1:@PROXY@, admin: 127.0.0.1:@ADMIN@ }
telemetry: { access_log: off }
defaults:
  connect_timeout: 200ms
  deadline: { default: 3s, reserve: 5ms }
  hedge: off
  extra_load: { floor: 0/s }
  bulkhead: { max_concurrent: 1000 }
  breaker: off
upstreams:
";

/// A way to ask.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Row {
    Sequential,
    Gather,
    Deadline,
    Percentile,
    Auto,
    Breaker,
    Cache,
    First,
}

impl Row {
    /// In their order.
    const ALL: [Self; 8] = [
        Self::Sequential,
        Self::Gather,
        Self::Deadline,
        Self::Percentile,
        Self::Auto,
        Self::Breaker,
        Self::Cache,
        Self::First,
    ];

    fn what(self) -> &'static str {
        match self {
            Self::Sequential => "sequential",
            Self::Gather => "gather",
            Self::Deadline => "deadline 1.5 s",
            Self::Percentile => "deadline, hedge p75",
            Self::Auto => "deadline, hedge auto",
            Self::Breaker => "deadline, breaker, 3 tools dead",
            Self::Cache => "deadline, warm cache",
            Self::First => "deadline, first result",
        }
    }

    /// The upstream's name in the policy and what it sets; `None` where the tools are asked straight.
    fn policy(self) -> Option<(&'static str, &'static str)> {
        match self {
            Self::Sequential | Self::Gather => None,
            Self::Deadline => Some(("deadline", "")),
            Self::Percentile => Some((
                "p75",
                "hedge: { after: p75, initial: 80ms, min: 2ms, max: 120ms }, extra_load: { ratio: 30% }",
            )),
            Self::Auto => Some(("auto", "hedge: { after: auto, initial: 80ms, min: 2ms, max: 120ms }")),
            Self::Breaker => Some((
                "breaker",
                "breaker: { slow_after: 500ms, open_for: 3s, max_open_for: 30s, fair_chance: 100ms }",
            )),
            Self::Cache => Some(("cache", "cache: true")),
            Self::First => Some(("first", "")),
        }
    }

    /// Questions that are not measured, and their deadline: for connections, kept answers and breakers that open at
    /// the fifth failure; hedges need 200 samples to know what they are about.
    fn warm_up(self) -> (u32, Duration) {
        match self {
            Self::Percentile | Self::Auto => (240, Duration::from_millis(500)),
            _ => (20, DEADLINE),
        }
    }
}

/// A kind of provider.
struct Provider {
    name: &'static str,
    what: &'static str,
    /// A latency in what it stands for, ms; `None` for a call that hangs.
    draw: fn(&mut Rng) -> Option<f64>,
    dead: usize,
    /// What must be true of it beside what must be true of all.
    check: fn(&Table) -> Vec<Line>,
}

const PROVIDERS: [Provider; 3] = [
    Provider {
        name: "stuck",
        what: "P50 300 ms, P90 600 ms, P95 1 s, and 3 of 15 tools stuck for 15 s",
        draw: skewed,
        dead: DEAD,
        check: check_stuck,
    },
    Provider {
        name: "thin",
        what: "lognormal, P50 2 s, P99 3 s",
        draw: |random| Some(lognormal(random, 2000.0, THIN)),
        dead: 0,
        check: check_thin,
    },
    Provider {
        name: "heavy",
        what: "lognormal, P50 300 ms, P99 600 ms, of which 5 % ten times slower and 1 % hung",
        draw: heavy,
        dead: 0,
        check: check_heavy,
    },
];

/// The deviation of the logarithm: ln(3/2) is 2.326 of it.
const THIN: f64 = 0.1743;
/// As above for ln(600/300).
const BODY: f64 = 0.2980;

/// Between the quantiles that are given, and beyond the last, the logarithm of the time is linear in that of the share
/// left, as in a Pareto tail: 3 % take longer than 1.45 s, 0.1 % longer than 15 s.
fn skewed(random: &mut Rng) -> Option<f64> {
    const KNOTS: [(f64, f64); 4] = [(1.0, 150.0), (0.5, 300.0), (0.1, 600.0), (0.05, 1000.0)];
    let left = 1.0 - random.f64();
    let after = KNOTS[1..KNOTS.len() - 1].iter().filter(|(share, _)| left < *share).count();
    let ((share, time), (next_share, next_time)) = (KNOTS[after], KNOTS[after + 1]);
    let part = (left / share).ln() / (next_share / share).ln();
    Some(time * (next_time / time).powf(part))
}

fn heavy(random: &mut Rng) -> Option<f64> {
    let fate = random.f64();
    let time = lognormal(random, 300.0, BODY) * if fate < 0.05 { 10.0 } else { 1.0 };
    (fate < 0.99).then_some(time)
}

fn lognormal(random: &mut Rng, median: f64, deviation: f64) -> f64 {
    // Box and Muller's normal variate.
    let radius = (-2.0 * (1.0 - random.f64()).ln()).sqrt();
    let normal = radius * (std::f64::consts::TAU * random.f64()).cos();
    median * (deviation * normal).exp()
}

/// Measures a question to fifteen tools, with and without hedgerow.
#[derive(Parser)]
struct Arguments {
    /// Questions in each row.
    #[arg(long, env = "HEADLINE_QUESTIONS", default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..))]
    questions: u32,
    /// Milliseconds from one question to the next.
    #[arg(long, env = "HEADLINE_EVERY", default_value_t = 25)]
    every: u64,
    /// What the latencies are drawn from.
    #[arg(long, env = "HEADLINE_SEED", default_value_t = 1)]
    seed: u64,
    /// Only these providers, with commas.
    #[arg(long, env = "HEADLINE_ONLY", value_delimiter = ',', value_parser = PROVIDERS.map(|provider| provider.name))]
    only: Vec<String>,
    /// What cargo says to every benchmark.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> ExitCode {
    let (arguments, cores) = (Arguments::parse(), Cores::choose());
    rig::run(cores, measure(&arguments, cores))
}

async fn measure(arguments: &Arguments, cores: Cores) -> io::Result<ExitCode> {
    let only = &arguments.only;
    let is_wanted = |provider: &&Provider| only.is_empty() || only.iter().any(|only| only == provider.name);
    let mut code = ExitCode::SUCCESS;
    for provider in PROVIDERS.iter().filter(is_wanted) {
        let (table, others) = measure_provider(provider, arguments, cores).await?;
        let mut lines = table.lines();
        lines.extend(table.check());
        lines.extend((provider.check)(&table));
        lines.push(others);
        let title = format!(
            "{}: {}\n{} questions to {TOOLS} tools, one each {} ms, seed {}; times are a tenth of what they stand for",
            provider.name, provider.what, arguments.questions, arguments.every, arguments.seed
        );
        if conclude(&title, cores, &lines) == ExitCode::FAILURE {
            code = ExitCode::FAILURE;
        }
    }
    Ok(code)
}

async fn measure_provider(
    provider: &Provider,
    arguments: &Arguments,
    cores: Cores,
) -> io::Result<(Table, Line)> {
    let (mut policy, mut rows) = (POLICY.to_owned(), Vec::new());
    for row in Row::ALL {
        let dead = if row == Row::Breaker { DEAD } else { provider.dead };
        let tools = Tools::start(provider.draw, dead, arguments.seed).await?;
        if let Some((name, stages)) = row.policy() {
            let hosts: Vec<_> = tools.addresses().map(|tool| format!("\"{tool}\"")).collect();
            policy += &format!("  {name}: {{ hosts: [{}], {stages} }}\n", hosts.join(", "));
        }
        rows.push((row, tools));
    }
    let proxy = Proxy::start(&policy, cores).await?;
    let others = Others::watch(&proxy)?;
    let mut table = Table { alive: TOOLS - provider.dead, rows: Vec::new() };
    for (row, tools) in rows {
        table.rows.push(measure_row(row, tools, proxy.address(), arguments).await?);
    }
    Ok((table, others.tell(&proxy)?))
}

async fn measure_row(
    row: Row,
    tools: Tools,
    proxy: SocketAddr,
    arguments: &Arguments,
) -> io::Result<Measured> {
    let (count, every) = (arguments.questions, Duration::from_millis(arguments.every));
    let (mut warm_up, mut warm) = (0, Seen::default());
    let asked = match row {
        Row::Sequential => open_loop(count, every, || in_turn(tools.clone())).await?,
        Row::Gather => open_loop(count, every, || at_once(tools.clone())).await?,
        _ => {
            let agents = Arc::new(Agents { proxy, idle: Mutex::default() });
            let ask = |deadline| {
                let fan_out = Arc::new(FanOut::new(&tools, deadline, row == Row::First));
                let agents = agents.clone();
                move || agents.clone().ask(fan_out.clone())
            };
            let (many, deadline) = row.warm_up();
            tools.are_well(row == Row::Cache);
            open_loop(many, every / 2, ask(deadline)).await?;
            tools.are_well(false);
            (warm_up, warm) = (many, tools.seen());
            open_loop(count, every, ask(DEADLINE)).await?
        }
    };
    let seen = tools.seen();
    let calls = |questions| f64::from(questions) * TOOLS as f64;
    let mut answered: Vec<_> = asked.iter().map(|asked| asked.answered).collect();
    answered.sort_unstable();
    Ok(Measured {
        row,
        took: Times::of(asked.iter().map(|asked| asked.took)),
        answered,
        seen: Seen { all: seen.all - warm.all, dead: seen.dead - warm.dead },
        of_all_calls: seen.all as f64 / calls(warm_up + count),
    })
}

/// The tools of a row. What hedgerow knows of a tool it knows by the address, so each row has its own.
#[derive(Clone)]
struct Tools(Arc<[(SocketAddr, Arc<Tool>)]>);

/// Requests that the tools saw.
#[derive(Clone, Copy, Default)]
struct Seen {
    all: u64,
    /// By those that never answer.
    dead: u64,
}

impl Tools {
    async fn start(draw: fn(&mut Rng) -> Option<f64>, dead: usize, seed: u64) -> io::Result<Self> {
        let (mut seeds, mut tools) = (Rng::with_seed(seed), Vec::new());
        for place in 0..TOOLS {
            let tool = Arc::new(Tool {
                draw,
                random: Mutex::new(Rng::with_seed(seeds.u64(..))),
                is_dead: place < dead,
                is_well: AtomicBool::new(false),
                seen: AtomicU64::new(0),
            });
            let address = serve({
                let tool = tool.clone();
                move |_path| {
                    let tool = tool.clone();
                    async move { tool.answer().await }
                }
            })
            .await?;
            tools.push((address, tool));
        }
        Ok(Self(tools.into()))
    }

    fn addresses(&self) -> impl Iterator<Item = SocketAddr> {
        self.0.iter().map(|(address, _)| *address)
    }

    fn are_well(&self, are_well: bool) {
        self.0.iter().for_each(|(_, tool)| tool.is_well.store(are_well, Ordering::Relaxed));
    }

    fn seen(&self) -> Seen {
        self.0.iter().fold(Seen::default(), |sum, (_, tool)| {
            let seen = tool.seen.load(Ordering::Relaxed);
            Seen { all: sum.all + seen, dead: sum.dead + if tool.is_dead { seen } else { 0 } }
        })
    }
}

struct Tool {
    draw: fn(&mut Rng) -> Option<f64>,
    random: Mutex<Rng>,
    is_dead: bool,
    /// Answers at once, whatever else it does.
    is_well: AtomicBool,
    seen: AtomicU64,
}

impl Tool {
    async fn answer(&self) -> Response<Full<Bytes>> {
        self.seen.fetch_add(1, Ordering::Relaxed);
        if !self.is_well.load(Ordering::Relaxed) {
            let latency = (self.draw)(&mut self.random.lock()).filter(|_| !self.is_dead);
            match latency {
                Some(millis) => sleep(Duration::from_secs_f64(millis / 1e3 / SCALE)).await,
                // Ends with the connection.
                None => std::future::pending().await,
            }
        }
        answer()
    }
}

fn answer() -> Response<Full<Bytes>> {
    const BODY: &[u8] = br#"{"symbol":"AAPL","price":189.84,"currency":"USD"}"#;
    let mut answer = Response::new(Full::new(Bytes::from_static(BODY)));
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    answer.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("max-age=3600"));
    answer
}

/// A question that was asked.
struct Asked {
    took: Duration,
    /// Tools whose answers came.
    answered: usize,
}

/// Asks at even times.
async fn open_loop<A>(count: u32, every: Duration, ask: impl Fn() -> A) -> io::Result<Vec<Asked>>
where
    A: Future<Output = io::Result<Asked>> + Send + 'static,
{
    let (start, mut running) = (Instant::now(), JoinSet::new());
    for number in 0..count {
        sleep_until(start + every * number).await;
        running.spawn(ask());
    }
    running.join_all().await.into_iter().collect()
}

async fn in_turn(tools: Tools) -> io::Result<Asked> {
    let (started, mut answered) = (Instant::now(), 0);
    for tool in tools.addresses() {
        answered += usize::from(is_answered(tool).await?);
    }
    Ok(Asked { took: started.elapsed(), answered })
}

async fn at_once(tools: Tools) -> io::Result<Asked> {
    let (started, mut answered) = (Instant::now(), 0);
    for is_answered in join_all(tools.addresses().map(is_answered)).await {
        answered += usize::from(is_answered?);
    }
    Ok(Asked { took: started.elapsed(), answered })
}

/// Asks a tool on a connection of its own, which ends with the client's patience.
async fn is_answered(tool: SocketAddr) -> io::Result<bool> {
    let answer = timeout(PATIENCE, async {
        Agent::connect(tool).await?.get(tool, "/v1/quote").await?;
        Ok(())
    });
    answer.await.map_or(Ok(false), |answer: io::Result<()>| answer.map(|()| true))
}

/// A question as hedgerow is asked it.
struct FanOut {
    body: Bytes,
    /// The time is that to the first of them.
    wants_events: bool,
}

impl FanOut {
    fn new(tools: &Tools, deadline: Duration, wants_events: bool) -> Self {
        let call = |(place, tool): (usize, SocketAddr)| {
            let url = format!("http://{tool}/v1/quote");
            json!({ "id": format!("tool-{place}"), "url": url })
        };
        let calls: Vec<_> = tools.addresses().enumerate().map(call).collect();
        let body = json!({ "deadline_ms": deadline.as_millis() as u64, "calls": calls });
        Self { body: body.to_string().into(), wants_events }
    }

    fn request(&self, proxy: SocketAddr) -> io::Result<Request<Full<Bytes>>> {
        let accept = if self.wants_events { "text/event-stream" } else { "application/json" };
        Request::post("/v1/fanout")
            .header(header::HOST, proxy.to_string())
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::ACCEPT, accept)
            .body(Full::new(self.body.clone()))
            .map_err(io::Error::other)
    }

    /// How many tools have answered, by what stands in the whole answer.
    fn answered(&self, text: &[u8]) -> io::Result<usize> {
        let text = std::str::from_utf8(text).map_err(io::Error::other)?;
        let summary = match self.wants_events {
            true => text.split_once("event: complete\ndata: ").and_then(|(_, data)| data.lines().next()),
            false => Some(text),
        };
        let summary: Value = serde_json::from_str(summary.unwrap_or_default())?;
        let results = summary["counts"]["results"].as_u64();
        results.map(|results| results as usize).ok_or_else(|| io::Error::other("an answer without counts"))
    }
}

/// Agents with connections that are kept alive.
struct Agents {
    proxy: SocketAddr,
    idle: Mutex<Vec<SendRequest<Full<Bytes>>>>,
}

impl Agents {
    async fn ask(self: Arc<Self>, fan_out: Arc<FanOut>) -> io::Result<Asked> {
        let idle = self.idle.lock().pop();
        let mut sender = match idle {
            Some(sender) => sender,
            None => self.connect().await?,
        };
        sender.ready().await.map_err(io::Error::other)?;
        let request = fan_out.request(self.proxy)?;
        let started = Instant::now();
        let answer = sender.send_request(request).await.map_err(io::Error::other)?;
        if answer.status() != StatusCode::OK {
            return Err(io::Error::other(format!("a fan-out was answered {}", answer.status())));
        }
        let (mut body, mut text, mut first) = (answer.into_body(), Vec::new(), None);
        while let Some(frame) = body.frame().await {
            let Ok(data) = frame.map_err(io::Error::other)?.into_data() else { continue };
            text.extend_from_slice(&data);
            if first.is_none() && has_result(&text) {
                first = Some(started.elapsed());
            }
        }
        let whole = started.elapsed();
        self.idle.lock().push(sender);
        // Without a result there is nothing to have until the stream ends.
        Ok(Asked { took: first.unwrap_or(whole), answered: fan_out.answered(&text)? })
    }

    async fn connect(&self) -> io::Result<SendRequest<Full<Bytes>>> {
        let stream = TcpStream::connect(self.proxy).await?;
        stream.set_nodelay(true)?;
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
        tokio::spawn(connection);
        Ok(sender)
    }
}

/// Whether there is a result among these events.
fn has_result(events: &[u8]) -> bool {
    const RESULT: &[u8] = b"event: result\n";
    events.windows(RESULT.len()).any(|window| window == RESULT)
}

/// A row's figures.
struct Measured {
    row: Row,
    took: Times,
    /// Tools that answered, question by question, in order.
    answered: Vec<usize>,
    seen: Seen,
    /// Requests for each call, warm-up included.
    of_all_calls: f64,
}

impl Measured {
    fn answered_in_all(&self) -> usize {
        self.answered.iter().sum()
    }

    fn questions(&self) -> usize {
        self.answered.len()
    }

    /// Requests beyond one for each call, as a share of the calls.
    fn extra(&self) -> f64 {
        self.seen.all as f64 / (self.questions() * TOOLS) as f64 - 1.0
    }

    fn line(&self) -> Line {
        let [p50, p99] = [0.50, 0.99].map(|share| millis(self.took.quantile(share)));
        let mean = self.answered_in_all() as f64 / self.questions() as f64;
        let measured = format!(
            "{p50:8.1} {p99:8.1} {mean:15.2} {:6} {:15} {:+8.1}",
            self.answered[0],
            self.seen.all,
            self.extra() * 100.0
        );
        Line::tell(self.row.what(), measured)
    }
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Rows that differ in their hedges alone.
const HEDGING: [Row; 3] = [Row::Deadline, Row::Percentile, Row::Auto];

/// All rows of a provider.
struct Table {
    /// Tools that answer.
    alive: usize,
    rows: Vec<Measured>,
}

impl Table {
    fn of(&self, row: Row) -> &Measured {
        &self.rows[row as usize]
    }

    fn lines(&self) -> Vec<Line> {
        let head = format!(
            "{:>8} {:>8} {:>15} {:>6} {:>15} {:>8}",
            "p50 ms", "p99 ms", "answered of 15", "least", "upstream calls", "extra %"
        );
        std::iter::once(Line::tell("", head)).chain(self.rows.iter().map(Measured::line)).collect()
    }

    /// Calls of tools that answer, but not in time, as a share.
    fn missed(&self, row: Row) -> f64 {
        let row = self.of(row);
        1.0 - row.answered_in_all() as f64 / (row.questions() * self.alive) as f64
    }

    /// What must be true whatever the provider does.
    fn check(&self) -> Vec<Line> {
        let bounded = [Row::Deadline, Row::Percentile, Row::Auto, Row::Breaker, Row::Cache];
        let latest =
            bounded.map(|row| self.of(row).took.quantile(0.99)).into_iter().max().unwrap_or_default();
        let [hedges, auto] = [Row::Percentile, Row::Auto].map(|row| self.of(row).of_all_calls - 1.0);
        let breaker = self.of(Row::Breaker);
        let tried = breaker.seen.dead as f64 / (breaker.questions() * DEAD) as f64;
        let cache = self.of(Row::Cache);
        let kept = cache.answered[0];
        vec![
            Line::tell("the slowest p99 by a deadline", format!("{:.1} ms", millis(latest)))
                .must("150 ms + 8 ms at most", latest <= DEADLINE + LATE),
            Line::tell(
                "hedges, warm-up included",
                format!("{:.1} % of the calls with p75, {:.1} % with auto", hedges * 100.0, auto * 100.0),
            )
            .must("30 % and 10 % at most", hedges <= RATIO && auto <= AUTO_RATIO),
            Line::tell("calls that still try a dead tool", format!("{:.1} %", tried * 100.0))
                .must("5 % at most", tried <= 0.05),
            Line::tell(
                "from the warm cache",
                format!("{kept} of {TOOLS} at least, {} upstream calls", cache.seen.all),
            )
            .must("all, 0", kept == TOOLS && cache.seen.all == 0),
        ]
    }

    fn told_missed(&self) -> String {
        let [alone, hedged, auto] = HEDGING.map(|row| self.missed(row) * 100.0);
        format!("{alone:.1} %, with p75 {hedged:.1} %, with auto {auto:.1} %")
    }
}

fn check_stuck(table: &Table) -> Vec<Line> {
    let gather = table.of(Row::Gather).took.quantile(0.50);
    let deadline = table.of(Row::Deadline);
    let median = deadline.answered[deadline.questions() / 2];
    let [alone, hedged, auto] = HEDGING.map(|row| table.missed(row));
    let [waits, spared] = [Row::Deadline, Row::Breaker].map(|row| table.of(row).took.quantile(0.50));
    vec![
        Line::tell("gather waits for those that are stuck", format!("p50 {:.1} ms", millis(gather)))
            .must("1500 ms, within 3 %", (millis(gather) / millis(PATIENCE) - 1.0).abs() <= 0.03),
        Line::tell("answers by the deadline", format!("{median} of {TOOLS}, median"))
            .must("12", median == TOOLS - DEAD),
        Line::tell("missed by tools that are well", table.told_missed())
            .must("less than half with hedges", hedged < alone / 2.0 && auto < alone / 2.0),
        Line::tell(
            "p50 without and with a breaker",
            format!("{:.1} ms, {:.1} ms", millis(waits), millis(spared)),
        )
        .must("20 ms less", spared + Duration::from_millis(20) <= waits),
    ]
}

fn check_thin(table: &Table) -> Vec<Line> {
    let [alone, hedged, auto] = HEDGING.map(|row| 1.0 - table.missed(row));
    let [extra, auto_extra] = [Row::Percentile, Row::Auto].map(|row| table.of(row).extra() * 100.0);
    vec![
        Line::tell("answers by the deadline", format!("{:.1} %", alone * 100.0))
            .must("2 to 7 %", (0.02..=0.07).contains(&alone)),
        Line::tell(
            "hedging gains nothing",
            format!("with p75 {:.1} %, with auto {:.1} %", hedged * 100.0, auto * 100.0),
        )
        .must("within 1.5 points", (hedged - alone).abs() <= 0.015 && (auto - alone).abs() <= 0.015),
        Line::tell("and costs nothing", format!("with p75 {extra:+.1} %, with auto {auto_extra:+.1} %"))
            .must("1 % at most", extra <= 1.0 && auto_extra <= 1.0),
    ]
}

fn check_heavy(table: &Table) -> Vec<Line> {
    let [alone, hedged, auto] = HEDGING.map(|row| table.missed(row));
    let [waits, spared] = [Row::Deadline, Row::Percentile].map(|row| table.of(row).took.quantile(0.50));
    vec![
        Line::tell("missed", table.told_missed())
            .must("less than a third with p75, half with auto", hedged < alone / 3.0 && auto < alone / 2.0),
        Line::tell(
            "p50 without and with hedges",
            format!("{:.1} ms, {:.1} ms", millis(waits), millis(spared)),
        )
        .must("30 ms less", spared + Duration::from_millis(30) <= waits),
    ]
}
