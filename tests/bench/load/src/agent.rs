//! The load: keep-alive connections that ask for the same thing again and again.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::Instant;

/// A kept-alive connection and the request it sends.
pub struct Agent {
    stream: TcpStream,
    request: Vec<u8>,
    buffer: Vec<u8>,
}

impl Agent {
    /// Connects to the proxy and will ask it for `upstream`, in absolute-form as a client of a proxy does.
    pub async fn connect(proxy: SocketAddr, upstream: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect(proxy).await?;
        stream.set_nodelay(true)?;
        let request =
            format!("GET http://{upstream}/ HTTP/1.1\r\nHost: {upstream}\r\nUser-Agent: load\r\n\r\n");
        Ok(Self { stream, request: request.into_bytes(), buffer: Vec::with_capacity(16 * 1024) })
    }

    /// One request and its whole answer, which must be a 200 with a length.
    pub async fn exchange(&mut self) -> io::Result<()> {
        self.stream.write_all(&self.request).await?;
        self.buffer.clear();
        loop {
            if self.stream.read_buf(&mut self.buffer).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            if let Some(whole) = message_length(&self.buffer)?
                && self.buffer.len() >= whole
            {
                return Ok(());
            }
        }
    }
}

/// The length of head and body together; `None` while the head is not complete.
fn message_length(bytes: &[u8]) -> io::Result<Option<usize>> {
    let mut fields = [httparse::EMPTY_HEADER; 64];
    let mut response = httparse::Response::new(&mut fields);
    let head = match response.parse(bytes) {
        Ok(httparse::Status::Complete(head)) => head,
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(error) => return Err(io::Error::new(io::ErrorKind::InvalidData, error)),
    };
    let length = response.headers.iter().find(|field| field.name.eq_ignore_ascii_case("content-length"));
    let length = length.and_then(|field| std::str::from_utf8(field.value).ok()?.parse::<usize>().ok());
    match (response.code, length) {
        (Some(200), Some(length)) => Ok(Some(head + length)),
        (code, _) => Err(io::Error::other(format!("answer {code:?} with length {length:?}"))),
    }
}

/// What a run counted.
#[derive(Debug, Default)]
pub struct Count {
    /// Answers as expected.
    pub good: u64,
    /// Everything else.
    pub failed: u64,
}

/// Closed loop: so many connections, each asking again as soon as it was answered. For throughput and CPU.
pub async fn saturate(proxy: SocketAddr, upstream: SocketAddr, connections: usize, span: Duration) -> Count {
    let end = Instant::now() + span;
    let mut running = JoinSet::new();
    for _ in 0..connections {
        running.spawn(async move {
            let mut count = Count::default();
            while Instant::now() < end {
                let Ok(mut agent) = Agent::connect(proxy, upstream).await else {
                    count.failed += 1;
                    return count;
                };
                while Instant::now() < end && agent.exchange().await.is_ok() {
                    count.good += 1;
                }
                // A connection that ended before its time is one failure, and is opened again.
                count.failed += u64::from(Instant::now() < end);
            }
            count
        });
    }
    let mut total = Count::default();
    while let Some(count) = running.join_next().await {
        let count = count.expect("a load task does not panic");
        total.good += count.good;
        total.failed += count.failed;
    }
    total
}

/// Open loop: requests are due at a fixed rate whatever happens to earlier ones, and a latency counts from the
/// moment a request was due, so that a stall is felt by all that it delayed.
///
/// Paced by a timerfd: the runtime's own timer counts milliseconds, which is longer than the latency measured.
/// The sorted latencies, and how many requests failed.
pub async fn pace(
    proxy: SocketAddr,
    upstream: SocketAddr,
    rate: u32,
    connections: usize,
    span: Duration,
) -> io::Result<(Vec<Duration>, u64)> {
    let mut idle = Vec::new();
    for _ in 0..connections {
        let mut agent = Agent::connect(proxy, upstream).await?;
        agent.exchange().await?;
        idle.push(agent);
    }
    let interval = Duration::from_secs(1) / rate;
    let total = (span.as_secs_f64() * f64::from(rate)) as u32;
    let ticks = Ticks::every(interval)?;
    let start = Instant::now();
    let (mut due, mut sent) = (0_u32, 0_u32);
    let (mut latencies, mut failed) = (Vec::with_capacity(total as usize), 0);
    let mut running = JoinSet::new();
    while latencies.len() + failed < total as usize {
        tokio::select! {
            ticked = ticks.next(), if due < total => due = total.min(due + ticked? as u32),
            Some(done) = running.join_next() => match done.expect("a load task does not panic") {
                (agent, Ok(latency)) => { latencies.push(latency); idle.push(agent) }
                // A broken connection would fail for ever: replace it.
                (_, Err(_)) => { failed += 1; idle.push(Agent::connect(proxy, upstream).await?) }
            }
        }
        while sent < due
            && let Some(mut agent) = idle.pop()
        {
            sent += 1;
            let was_due = start + interval * sent;
            running.spawn(async move {
                let done = agent.exchange().await;
                (agent, done.map(|()| was_due.elapsed()))
            });
        }
    }
    latencies.sort_unstable();
    Ok((latencies, failed as u64))
}

/// A clock that ticks exactly.
struct Ticks(AsyncFd<rustix::fd::OwnedFd>);

impl Ticks {
    fn every(interval: Duration) -> io::Result<Self> {
        let timer =
            timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC)?;
        let interval = Timespec::try_from(interval).expect("an interval is short");
        let setting = Itimerspec { it_interval: interval, it_value: interval };
        timerfd_settime(&timer, TimerfdTimerFlags::empty(), &setting)?;
        #[expect(
            deprecated,
            reason = "its successor is unsafe; an owned descriptor that nobody replaces needs no proof"
        )]
        Ok(Self(AsyncFd::new(timer)?))
    }

    /// How many ticks there were since the last call; waits for the first. Cancel safe: the count is taken in
    /// the same poll that returns it.
    async fn next(&self) -> io::Result<u64> {
        loop {
            let mut ready = self.0.readable().await?;
            let mut count = [0; 8];
            match ready.try_io(|timer| Ok(rustix::io::read(timer.get_ref(), &mut count)?)) {
                Ok(read) => return read.map(|_| u64::from_ne_bytes(count)),
                Err(_would_block) => {}
            }
        }
    }
}
