//! Opening a TCP connection to one of several addresses: happy eyeballs (RFC 8305 section 5).
//!
//! A name with a dead address, or with IPv6 addresses on a network that drops IPv6, must not cost a
//! connect timeout. The addresses are tried in order; the next one starts when one fails, or 250 ms after
//! the last start, and all that were started run on until one of them connects. Trying one after the
//! other instead makes a dead first address cost the whole timeout; starting all at once opens
//! connections that most upstreams would see closed unused.
//!
//! [`order`] decides, [`connect`] dials. They are apart so that the egress guard can look at the list in
//! between.

use std::fmt::Write as _;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep_until};

use crate::error::{Cause, Error};

/// From one start to the next while nothing fails (RFC 8305 section 8).
const ATTEMPT_DELAY: Duration = Duration::from_millis(250);

/// The order in which to dial: families alternate, beginning with the first one's, and `avoid` is last.
/// A hedge or retry avoids the address that the call has met already. Duplicates fall away.
pub fn order(addresses: &[IpAddr], avoid: Option<IpAddr>) -> Vec<IpAddr> {
    let is_first_family =
        |ip: &&IpAddr| addresses.first().is_some_and(|first| first.is_ipv6() == ip.is_ipv6());
    let (first, second): (Vec<&IpAddr>, Vec<&IpAddr>) = addresses.iter().partition(is_first_family);
    let mut ordered = Vec::with_capacity(addresses.len());
    let mut push = |ip: Option<&&IpAddr>| {
        if let Some(&&ip) = ip
            && !ordered.contains(&ip)
        {
            ordered.push(ip);
        }
    };
    for i in 0..first.len().max(second.len()) {
        push(first.get(i));
        push(second.get(i));
    }
    if let Some(at) = ordered.iter().position(|ip| Some(*ip) == avoid) {
        let avoided = ordered.remove(at);
        ordered.push(avoided);
    }
    ordered
}

/// Connects to the first of `addresses` (as [`order`] gave them) that answers, within `timeout`. The
/// stream has `TCP_NODELAY` set; its `peer_addr` tells which address it was.
///
/// Dropping the future closes all that it has begun.
///
/// # Errors
/// [`Error::ConnectFailed`] as soon as all have failed, its cause naming each address with its error;
/// [`Error::ConnectTimeout`] when `timeout` is over before.
pub async fn connect(addresses: &[IpAddr], port: u16, timeout: Duration) -> Result<TcpStream, Error> {
    race(addresses, timeout, |ip| async move {
        let stream = TcpStream::connect(SocketAddr::new(ip, port)).await?;
        // Heads and bodies are written separately: Nagle would hold the second for the peer's ACK.
        stream.set_nodelay(true)?;
        // A dial of a closed local port may be given that very port as its own, and so meet itself (RFC
        // 9293 section 3.5, simultaneous open). Nobody is there.
        if stream.local_addr()? == stream.peer_addr()? {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        Ok(stream)
    })
    .await
}

/// The race itself, over any way of dialling.
async fn race<T, F>(addresses: &[IpAddr], timeout: Duration, dial: impl Fn(IpAddr) -> F) -> Result<T, Error>
where
    F: Future<Output = io::Result<T>>,
{
    let deadline = Instant::now() + timeout;
    let mut waiting = addresses.iter().copied();
    let mut running = FuturesUnordered::new();
    let mut failures = String::new();
    loop {
        if let Some(ip) = waiting.next() {
            let attempt = dial(ip);
            running.push(async move { (ip, attempt.await) });
        } else if running.is_empty() {
            return Err(Error::ConnectFailed(failure(failures)));
        }
        let next_start = Instant::now() + ATTEMPT_DELAY;
        tokio::select! {
            biased;
            Some((ip, result)) = running.next() => match result {
                Ok(connected) => return Ok(connected),
                Err(error) => {
                    let separator = if failures.is_empty() { "" } else { "; " };
                    // Writing to a String cannot fail.
                    let _ = write!(failures, "{separator}{ip}: {error}");
                }
            },
            () = sleep_until(deadline) => return Err(Error::ConnectTimeout),
            () = sleep_until(next_start), if waiting.len() > 0 => {}
        }
    }
}

fn failure(failures: String) -> Cause {
    if failures.is_empty() { "there is no address to dial".into() } else { failures.into() }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parking_lot::Mutex;
    use tokio::net::TcpListener;
    use tokio::time::sleep;

    use super::*;

    fn ips(texts: &[&str]) -> Vec<IpAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn families_alternate_from_the_first_ones() {
        let given = ips(&["2001:db8::1", "2001:db8::2", "192.0.2.1", "2001:db8::3", "192.0.2.2"]);
        let expected = ips(&["2001:db8::1", "192.0.2.1", "2001:db8::2", "192.0.2.2", "2001:db8::3"]);
        assert_eq!(order(&given, None), expected);
        let v4_first = ips(&["192.0.2.1", "192.0.2.2", "2001:db8::1"]);
        assert_eq!(order(&v4_first, None), ips(&["192.0.2.1", "2001:db8::1", "192.0.2.2"]));
    }

    #[test]
    fn the_avoided_address_is_last_and_never_lost() {
        let given = ips(&["192.0.2.1", "192.0.2.2", "192.0.2.1"]);
        assert_eq!(order(&given, given.first().copied()), ips(&["192.0.2.2", "192.0.2.1"]));
        assert_eq!(order(&given[..1], given.first().copied()), ips(&["192.0.2.1"]));
        assert_eq!(order(&given, Some("192.0.2.9".parse().unwrap())), ips(&["192.0.2.1", "192.0.2.2"]));
        assert!(order(&[], None).is_empty());
    }

    /// Dials by script: `192.0.2.N` behaves as entry N says; `None` never answers.
    type Script = Vec<Option<(u64, io::Result<()>)>>;

    async fn play(script: Script, timeout_ms: u64) -> (Result<IpAddr, Error>, Vec<u64>, u64) {
        let addresses: Vec<IpAddr> = (0..script.len()).map(|i| IpAddr::from([192, 0, 2, i as u8])).collect();
        let script = Mutex::new(script);
        let starts = Mutex::new(Vec::new());
        let begin = Instant::now();
        let result = race(&addresses, Duration::from_millis(timeout_ms), |ip| {
            starts.lock().push(begin.elapsed().as_millis() as u64);
            let IpAddr::V4(v4) = ip else { unreachable!("the script has IPv4 addresses") };
            let part = script.lock()[usize::from(v4.octets()[3])].take();
            async move {
                match part {
                    None => std::future::pending().await,
                    Some((after, result)) => {
                        sleep(Duration::from_millis(after)).await;
                        result.map(|()| ip)
                    }
                }
            }
        })
        .await;
        (result, starts.into_inner(), begin.elapsed().as_millis() as u64)
    }

    fn refused() -> io::Result<()> {
        Err(io::ErrorKind::ConnectionRefused.into())
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_address_costs_one_delay() {
        let (result, starts, elapsed) = play(vec![None, Some((10, Ok(()))), None], 2000).await;
        assert_eq!(result, Ok("192.0.2.1".parse().unwrap()));
        assert_eq!(starts, [0, 250]);
        assert_eq!(elapsed, 260);
    }

    #[tokio::test(start_paused = true)]
    async fn a_failure_starts_the_next_at_once() {
        let (result, starts, _) =
            play(vec![Some((5, refused())), Some((5, refused())), Some((5, Ok(())))], 2000).await;
        assert_eq!(result, Ok("192.0.2.2".parse().unwrap()));
        assert_eq!(starts, [0, 5, 10]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_first_address_still_wins_when_it_connects_first() {
        let (result, starts, elapsed) = play(vec![Some((300, Ok(()))), Some((100, Ok(())))], 2000).await;
        assert_eq!(result, Ok("192.0.2.0".parse().unwrap()));
        assert_eq!(starts, [0, 250]);
        assert_eq!(elapsed, 300);
    }

    #[tokio::test(start_paused = true)]
    async fn the_last_running_attempt_is_awaited_after_the_others_failed() {
        let (result, _, elapsed) = play(vec![Some((900, Ok(()))), Some((1, refused()))], 2000).await;
        assert_eq!(result, Ok("192.0.2.0".parse().unwrap()));
        assert_eq!(elapsed, 900);
    }

    #[tokio::test(start_paused = true)]
    async fn silence_everywhere_ends_at_the_timeout() {
        let (result, starts, elapsed) = play(vec![None, None, None, None], 600).await;
        assert_eq!(result, Err(Error::ConnectTimeout));
        assert_eq!(starts, [0, 250, 500]);
        assert_eq!(elapsed, 600);
    }

    #[tokio::test(start_paused = true)]
    async fn all_refused_is_known_at_once_and_names_each_address() {
        let (result, _, elapsed) = play(vec![Some((1, refused())), Some((1, refused()))], 2000).await;
        let Err(Error::ConnectFailed(cause)) = result else { panic!("{result:?}") };
        assert_eq!(cause.as_str(), Some("192.0.2.0: connection refused; 192.0.2.1: connection refused"));
        assert_eq!(elapsed, 2);
        let (none, ..) = play(vec![], 2000).await;
        assert_eq!(none, Err(Error::ConnectFailed("there is no address to dial".into())));
    }

    #[tokio::test(start_paused = true)]
    async fn dropping_the_race_drops_every_attempt() {
        let alive = Arc::new(());
        let addresses = ips(&["192.0.2.1", "192.0.2.2"]);
        let attempt = race(&addresses, Duration::from_secs(9), |_| {
            let alive = alive.clone();
            async move {
                let _alive = alive;
                std::future::pending::<io::Result<()>>().await
            }
        });
        let _ = tokio::time::timeout(Duration::from_millis(300), attempt).await;
        assert_eq!(Arc::strong_count(&alive), 1);
    }

    #[tokio::test]
    async fn a_closed_address_gives_way_to_a_listening_one() {
        // On the same port, 127.0.0.2 has nobody listening.
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let addresses = ips(&["127.0.0.2", "127.0.0.1"]);
        let stream = connect(&addresses, port, Duration::from_secs(5)).await.unwrap();
        assert_eq!(stream.peer_addr().unwrap(), listener.local_addr().unwrap());
        assert!(stream.nodelay().unwrap());
    }

    #[tokio::test]
    async fn nobody_listening_is_a_failure_that_names_the_address() {
        let port = {
            let listener = TcpListener::bind("127.0.0.3:0").await.unwrap();
            listener.local_addr().unwrap().port()
        };
        let error = connect(&ips(&["127.0.0.3"]), port, Duration::from_secs(5)).await.unwrap_err();
        let Error::ConnectFailed(cause) = error else { panic!("{error:?}") };
        assert!(cause.as_str().unwrap().starts_with("127.0.0.3: "), "{cause:?}");
    }
}
