//! `hedgerow demo`: one question to fifteen tools, asked again and again, with and without hedgerow.
//!
//! Only the tools are simulated. They are servers on loopback, the proxy is the one that `run` starts,
//! and every number printed is measured in the run that prints it. Fifteen at once with a short timeout
//! is a row of its own, since anybody would ask what hedgerow does that a timeout does not.
//!
//! Latencies are about a tenth of real ones, and several users ask at once, because a plain gather of
//! twenty questions with a hung tool among them would take minutes otherwise.

mod agent;
mod table;
mod tools;

use std::error::Error;
use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use self::agent::{Question, Way};
use self::table::{Paint, Row};
use self::tools::Tools;
use crate::app::{self, Running};
use crate::config;

/// How often the question is asked each way.
const QUESTIONS: usize = 20;
/// Who ask at once, each one question after the other.
const USERS: usize = 5;
/// What an agent usually waits for a tool, on the demo's scale.
const PATIENT: Duration = Duration::from_secs(2);
/// The one deadline of a question through hedgerow.
const DEADLINE: Duration = Duration::from_millis(600);

/// The defaults but for what the scale asks for: a first hedge delay and a fair chance that fit into
/// the deadline, and a breaker that makes up its mind within twenty calls.
const POLICY: &str = "
listen: { proxy: 127.0.0.1:0, admin: 127.0.0.1:0 }
telemetry: { access_log: off }
defaults:
  hedge: { after: auto, initial: 250ms }
  breaker: { consecutive_failures: 3, fair_chance: 400ms }
";

const CONCLUSION: &str = "
What misses the deadline is missing from the answer; after three misses in a row
the tool's breaker opens, and questions no longer wait for it.
";

/// Runs the demo and prints its findings to standard output.
///
/// # Errors
/// What kept it from running, in words for the terminal.
pub fn run() -> Result<(), String> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|error| format!("cannot start the runtime: {error}"))?;
    let outcome = runtime.block_on(story(&mut io::stdout()));
    // The hung tool never ends by itself.
    runtime.shutdown_background();
    match outcome {
        Ok(()) => Ok(()),
        // A reader that has gone, as `head` does, has had enough: no failure.
        Err(error) if is_reader_gone(error.as_ref()) => Ok(()),
        Err(error) => Err(error.to_string()),
    }
}

fn is_reader_gone(error: &(dyn Error + 'static)) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

async fn story(out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    let tools = Tools::start().await.map_err(|error| format!("cannot start the tools: {error}"))?;
    let hedgerow = start_hedgerow().await?;
    tell(out, format_args!("{}\n", introduction()))?;

    let mut rows = Vec::new();
    let plain = measure(out, &tools, "gather", Way::Plain { timeout: PATIENT }).await?;
    rows.push(Row::sequential(&plain));
    rows.push(plain);
    rows.push(measure(out, &tools, "gather, 600 ms", Way::Plain { timeout: DEADLINE }).await?);
    let proxy: SocketAddr = hedgerow.proxy_address;
    rows.push(measure(out, &tools, "hedgerow", Way::Hedgerow { proxy, deadline: DEADLINE }).await?);

    let paint = Paint { is_on: io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none() };
    tell(out, format_args!("\n{}", table::summary(&rows)))?;
    let (plain, hedged) = (&rows[1].questions, &rows[3].questions);
    tell(out, format_args!("\n{}{CONCLUSION}", table::bars(tools.names(), plain, hedged, paint)))?;
    Ok(())
}

async fn start_hedgerow() -> Result<Running, String> {
    let loaded = config::parse(POLICY, Path::new("")).map_err(|problems| problems.to_string())?;
    app::start_with(loaded.config).await.map_err(|error| error.to_string())
}

/// Asks all questions one way. The tools begin their sequence of latencies anew for it.
async fn measure(out: &mut impl Write, tools: &Tools, name: &'static str, way: Way) -> io::Result<Row> {
    tell(out, format_args!("asking: {name} ...\n"))?;
    tools.start_over();
    let questions: Vec<Question> = agent::ask_all(tools, way, QUESTIONS, USERS).await;
    Ok(Row { name, questions, upstream_requests: tools.arrived() })
}

fn introduction() -> String {
    format!(
        "Simulated: 15 tools on loopback, about ten times as fast as real ones. 13 are\n\
         well ({} ms, one answer in {} takes {} times as long), `{}` takes {} ms,\n\
         `{}` never answers. All else is real and measured: sockets, proxy, times.\n\
         {QUESTIONS} questions go to all 15 tools, from {USERS} users at once. A plain call waits\n\
         {} s; a question through hedgerow has one deadline of {} ms for all its calls.\n",
        tools::MEDIAN.as_millis(),
        tools::ONE_IN,
        tools::TIMES,
        tools::SLOW_NAME,
        tools::SLOW.as_millis(),
        tools::HUNG_NAME,
        PATIENT.as_secs(),
        DEADLINE.as_millis(),
    )
}

/// Prints at once.
fn tell(out: &mut impl Write, text: fmt::Arguments<'_>) -> io::Result<()> {
    out.write_fmt(text)?;
    out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_policy_of_the_demo_loads_without_a_warning() {
        let loaded = config::parse(POLICY, Path::new("")).unwrap();
        assert!(loaded.warnings.is_empty(), "{}", loaded.warnings);
        assert_eq!(loaded.config.listen.proxy.port(), 0);
        assert_eq!(loaded.config.telemetry.access_log, config::AccessLog::Off);
    }

    #[test]
    fn the_introduction_fits_a_terminal() {
        let text = introduction();
        assert!(text.lines().all(|line| line.chars().count() <= table::WIDTH), "{text}");
    }
}
