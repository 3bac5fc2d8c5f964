//! The command line: arguments and what each subcommand does.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};
use tokio::signal::unix::{SignalKind, signal};

use crate::config;
use crate::{app, demo, telemetry};

/// Bounded, hedged, isolated and cut off: a sidecar proxy for the tool calls of LLM agents.
#[derive(Debug, Parser)]
#[command(name = "hedgerow", version, arg_required_else_help = true)]
pub struct Arguments {
    /// What operational messages to show: error, warn, info (default; for the demo error), debug or trace.
    #[arg(long, global = true, env = "HEDGEROW_LOG_LEVEL", value_name = "LEVEL")]
    log_level: Option<String>,

    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the proxy.
    Run {
        /// The policy file, followed while running; without it the embedded default policy.
        #[arg(long, short, env = "HEDGEROW_CONFIG", value_name = "FILE")]
        config: Option<PathBuf>,
    },
    /// Check a policy file and print every problem with its place.
    Check {
        /// The policy file.
        file: PathBuf,
    },
    /// Show the upstream, route and values that a request would get, and from which line each comes.
    Explain {
        /// The policy file.
        file: PathBuf,
        /// What the agent would call.
        url: String,
        /// The method.
        #[arg(short = 'X', long, default_value = "GET", value_name = "METHOD")]
        method: http::Method,
    },
    /// Print the JSON Schema of the policy, for editors.
    Schema,
    /// Show on 15 simulated tools what hedgerow does.
    Demo,
}

/// Failed: `check` found problems, or the proxy could not start.
const FAILED: u8 = 1;
const WRONG_USAGE: u8 = 2;

/// Does what the arguments say. The exit code is 0 when all went well and 1 when not; wrong usage
/// ends with 2 before it comes to this.
pub fn run(arguments: Arguments) -> ExitCode {
    let log_level = match (&arguments.log_level, &arguments.command) {
        (Some(level), _) => level.as_str(),
        // What its simulated tools do wrong is the demo's own story to tell.
        (None, Command::Demo) => "error",
        (None, _) => "info",
    };
    if let Err(error) = telemetry::log::init_tracing(log_level) {
        eprintln!("{error}");
        return ExitCode::from(WRONG_USAGE);
    }
    let done = match arguments.command {
        Command::Run { config } => run_proxy(config),
        Command::Check { file } => check(&file),
        Command::Explain { file, url, method } => explain(&file, &url, &method),
        Command::Schema => {
            println!("{:#}", config::schema());
            Ok(())
        }
        Command::Demo => demo::run(),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::from(FAILED)
        }
    }
}

fn check(file: &std::path::Path) -> Result<(), String> {
    let loaded = config::load(file).map_err(|problems| problems.to_string())?;
    if !loaded.warnings.is_empty() {
        eprintln!("{}", loaded.warnings);
    }
    println!("{}: ok", file.display());
    Ok(())
}

fn explain(file: &std::path::Path, url: &str, method: &http::Method) -> Result<(), String> {
    let loaded = config::load(file).map_err(|problems| problems.to_string())?;
    print!("{}", loaded.explain(url, method)?);
    Ok(())
}

fn run_proxy(path: Option<PathBuf>) -> Result<(), String> {
    // Read once for the threads; the watcher reads it again when it starts to follow it.
    let threads = match &path {
        Some(path) => config::load(path).map_err(|problems| problems.to_string())?.config.threads,
        None => config::embedded().threads,
    };
    let runtime = runtime(threads).map_err(|error| format!("cannot start the runtime: {error}"))?;
    let outcome = runtime.block_on(async {
        let running = app::start(path.as_deref()).await.map_err(|error| error.to_string())?;
        follow_signals(running).await.map_err(|error| format!("cannot follow signals: {error}"))
    });
    // What still runs after the drain is cut, not waited for.
    runtime.shutdown_timeout(Duration::from_millis(100));
    outcome
}

/// One thread runs without the costs of several.
fn runtime(threads: usize) -> std::io::Result<tokio::runtime::Runtime> {
    match threads {
        1 => tokio::runtime::Builder::new_current_thread().enable_all().build(),
        n => tokio::runtime::Builder::new_multi_thread().worker_threads(n).enable_all().build(),
    }
}

/// SIGTERM and the first SIGINT drain, a second SIGINT leaves at once, SIGHUP reloads.
async fn follow_signals(running: app::Running) -> std::io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hangup = signal(SignalKind::hangup())?;
    loop {
        tokio::select! {
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
            _ = hangup.recv() => running.reload(),
        }
    }
    tokio::select! {
        () = running.drain() => {}
        _ = interrupt.recv() => {}
    }
    Ok(())
}
