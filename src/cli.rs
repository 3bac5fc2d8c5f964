//! The command line: arguments and what each subcommand does.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::config::{self, Surroundings};
use crate::kube::inject::command::{InjectArguments, UninjectArguments};
use crate::kube::{inject, redirect, webhook};
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
        #[command(flatten)]
        surroundings: Surroundings,
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
    /// Put hedgerow into the workloads of Kubernetes manifests.
    Inject(InjectArguments),
    /// Take out what inject has put in.
    Uninject(UninjectArguments),
    /// Serve the admission webhook that injects hedgerow into the pods of a cluster.
    Webhook(webhook::Arguments),
    /// Print all objects of a cluster-wide installation, with a new certificate for the webhook.
    Install(webhook::install::Arguments),
    /// Set up, or take away, the rules that send this network namespace's connections to the transparent port.
    Redirect(redirect::Arguments),
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
        Command::Run { config, surroundings } => run_proxy(config.as_deref(), &surroundings),
        Command::Check { file } => check(&file),
        Command::Explain { file, url, method } => explain(&file, &url, &method),
        Command::Schema => print(format_args!("{:#}\n", config::schema())),
        Command::Demo => demo::run(),
        Command::Inject(arguments) => inject::command::inject_manifests(&arguments),
        Command::Uninject(arguments) => inject::command::uninject_manifests(&arguments),
        Command::Webhook(arguments) => serve_webhook(arguments),
        Command::Install(arguments) => webhook::install::run(&arguments),
        Command::Redirect(arguments) => redirect(&arguments),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{}", message.trim_end());
            ExitCode::from(FAILED)
        }
    }
}

fn check(file: &Path) -> Result<(), String> {
    let loaded = config::load(file).map_err(|problems| problems.to_string())?;
    if !loaded.warnings.is_empty() {
        eprint!("{}", loaded.warnings);
    }
    print(format_args!("{}: ok\n", file.display()))
}

fn explain(file: &Path, url: &str, method: &http::Method) -> Result<(), String> {
    let loaded = config::load(file).map_err(|problems| problems.to_string())?;
    print(format_args!("{}", loaded.explain(url, method)?))
}

fn redirect(arguments: &redirect::Arguments) -> Result<(), String> {
    let (plan, backend, ipv6) = (arguments.plan(), arguments.backend, arguments.ipv6);
    if arguments.dry_run {
        return print(format_args!("{}", redirect::apply::script(&plan, backend, ipv6, arguments.remove)));
    }
    let done = match arguments.remove {
        true => redirect::apply::remove(backend, ipv6)?,
        false => redirect::apply::set_up(&plan, backend, ipv6)?,
    };
    done.notes.iter().for_each(|note| eprintln!("{note}"));
    print(format_args!("{}\n", done.told))
}

/// Writes to standard output. A reader that has gone, as `head` does, has had enough: no failure.
fn print(text: std::fmt::Arguments<'_>) -> Result<(), String> {
    match io::stdout().lock().write_fmt(text) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(format!("cannot write: {error}")),
        _ => Ok(()),
    }
}

fn run_proxy(path: Option<&Path>, surroundings: &Surroundings) -> Result<(), String> {
    // Read once for the threads; the watcher reads it again when it starts to follow it.
    let loaded = config::at_start(path, surroundings).map_err(|problems| problems.to_string())?;
    let runtime =
        runtime(loaded.config.threads).map_err(|error| format!("cannot start the runtime: {error}"))?;
    let outcome = runtime.block_on(async {
        // Before anybody can see that the process is ready: until then a signal ends it the hard way.
        let signals = Signals::new().map_err(|error| format!("cannot follow signals: {error}"))?;
        let running = app::start(path, surroundings).await.map_err(|error| error.to_string())?;
        signals.follow(running).await;
        Ok(())
    });
    // What still runs after the drain is cut, not waited for.
    runtime.shutdown_timeout(Duration::from_millis(100));
    outcome
}

/// Two threads, so that a large review holds up no small one.
fn serve_webhook(arguments: webhook::Arguments) -> Result<(), String> {
    let runtime = runtime(2).map_err(|error| format!("cannot start the runtime: {error}"))?;
    runtime.block_on(webhook::run(arguments))
}

/// One thread runs without the costs of several.
fn runtime(threads: usize) -> io::Result<tokio::runtime::Runtime> {
    match threads {
        1 => tokio::runtime::Builder::new_current_thread().enable_all().build(),
        n => tokio::runtime::Builder::new_multi_thread().worker_threads(n).enable_all().build(),
    }
}

/// The signals that the process answers to.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// SIGTERM and the first SIGINT drain, a second SIGINT leaves at once, SIGHUP reloads.
    async fn follow(mut self, running: app::Running) {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => break,
                _ = self.interrupt.recv() => break,
                _ = self.hangup.recv() => running.reload(),
            }
        }
        tokio::select! {
            () = running.drain() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
