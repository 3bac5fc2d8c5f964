//! The simulated tools: servers on loopback that answer late, each in its own way.
//!
//! How long a tool's n-th answer takes follows from the tool and n alone, so that every way of asking
//! meets the same weather, and every run of the demo too.

use std::convert::Infallible;
use std::f64::consts::TAU;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::Response;
use http_body_util::Full;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;

/// The median of a tool that is well.
pub(super) const MEDIAN: Duration = Duration::from_millis(120);
/// How much its usual answers differ: the standard deviation of the latency's logarithm.
const SPREAD: f64 = 0.3;
/// One answer in so many is slow: a lost packet, a cold cache, a pause of a garbage collector.
pub(super) const ONE_IN: usize = 20;
/// Such an answer takes so many times as long.
pub(super) const TIMES: u32 = 6;
/// The median of the tool that is slow.
pub(super) const SLOW: Duration = Duration::from_millis(1400);
/// The tool that is slow.
pub(super) const SLOW_NAME: &str = "archive";
/// The tool that takes requests and never answers.
pub(super) const HUNG_NAME: &str = "ledger";

const NAMES: [&str; 15] = [
    "quotes", "news", "filings", "weather", "maps", "search", "calendar", "mail", "crm", "tickets", "docs",
    "rates", "flights", SLOW_NAME, HUNG_NAME,
];

/// Any number; another one makes other weather.
const SEED: u64 = 15_300;

/// All of them, listening. They end with the runtime.
pub(super) struct Tools {
    tools: Vec<Arc<Tool>>,
}

struct Tool {
    index: u64,
    health: Health,
    address: SocketAddr,
    arrived: AtomicU64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Health {
    Well,
    Slow,
    Hung,
}

impl Tools {
    /// Binds them to free ports and starts them.
    ///
    /// # Errors
    /// When loopback cannot be bound.
    pub(super) async fn start() -> io::Result<Self> {
        let mut tools = Vec::new();
        for (index, name) in (0..).zip(NAMES) {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
            let health = match name {
                SLOW_NAME => Health::Slow,
                HUNG_NAME => Health::Hung,
                _ => Health::Well,
            };
            let (address, arrived) = (listener.local_addr()?, AtomicU64::new(0));
            let tool = Arc::new(Tool { index, health, address, arrived });
            tokio::spawn(serve(listener, tool.clone()));
            tools.push(tool);
        }
        Ok(Self { tools })
    }

    /// Their names, in the order of [`addresses`](Self::addresses).
    pub(super) fn names(&self) -> &'static [&'static str] {
        &NAMES
    }

    /// Where they listen.
    pub(super) fn addresses(&self) -> Vec<SocketAddr> {
        self.tools.iter().map(|tool| tool.address).collect()
    }

    /// Requests that have come to them since the last [`start_over`](Self::start_over).
    pub(super) fn arrived(&self) -> u64 {
        self.tools.iter().map(|tool| tool.arrived.load(Ordering::Relaxed)).sum()
    }

    /// The next answer of each is its first again.
    pub(super) fn start_over(&self) {
        for tool in &self.tools {
            tool.arrived.store(0, Ordering::Relaxed);
        }
    }
}

async fn serve(listener: TcpListener, tool: Arc<Tool>) {
    while let Ok((stream, _)) = listener.accept().await {
        let tool = tool.clone();
        let service = service_fn(move |_| {
            let nth = tool.arrived.fetch_add(1, Ordering::Relaxed);
            answer(latency(tool.health, tool.index, nth))
        });
        // A caller that leaves ends its connection, and with it the wait for the answer.
        tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
    }
}

async fn answer(latency: Option<Duration>) -> Result<Response<Full<Bytes>>, Infallible> {
    match latency {
        Some(latency) => tokio::time::sleep(latency).await,
        None => std::future::pending().await,
    }
    Ok(Response::new(Full::new(Bytes::from_static(b"{\"ok\":true}\n"))))
}

/// How long the `nth` answer takes; `None`: for ever. Log-normal, as response times are, and for a tool
/// that is well now and then [`TIMES`] as long.
fn latency(health: Health, tool: u64, nth: u64) -> Option<Duration> {
    let mut dice = fastrand::Rng::with_seed(SEED ^ (tool << 32) ^ nth);
    let factor = (SPREAD * standard_normal(&mut dice)).exp();
    match health {
        Health::Well if dice.usize(..ONE_IN) == 0 => Some(MEDIAN.mul_f64(factor) * TIMES),
        Health::Well => Some(MEDIAN.mul_f64(factor)),
        Health::Slow => Some(SLOW.mul_f64(factor.sqrt())),
        Health::Hung => None,
    }
}

/// Box and Muller's transform of two uniform numbers.
fn standard_normal(dice: &mut fastrand::Rng) -> f64 {
    let radius = (-2.0 * (1.0 - dice.f64()).ln()).sqrt();
    radius * (TAU * dice.f64()).cos()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_well_tool_answers_as_the_introduction_says() {
        let mut millis: Vec<u128> = (0..13)
            .flat_map(|tool| (0..1000).filter_map(move |nth| latency(Health::Well, tool, nth)))
            .map(|latency| latency.as_millis())
            .collect();
        millis.sort_unstable();
        let median = millis[millis.len() / 2];
        assert!((115..=130).contains(&median), "{median}");
        // Three times the median is far outside the usual spread.
        let slow = millis.iter().filter(|ms| **ms > 360).count();
        let expected = millis.len() / ONE_IN;
        assert!(slow.abs_diff(expected) < expected / 4, "{slow} of {}", millis.len());
    }

    #[test]
    fn the_weather_is_the_same_each_time_and_differs_between_tools() {
        assert_eq!(latency(Health::Well, 3, 7), latency(Health::Well, 3, 7));
        assert_ne!(latency(Health::Well, 3, 7), latency(Health::Well, 4, 7));
        assert_eq!(latency(Health::Hung, 14, 0), None);
    }
}
