//! hedgerow as a command that comes to its end: arguments in, output and exit code out.

use std::path::Path;
use std::process::Stdio;

use tokio::process::Command;

use super::soon;

/// What a finished command left.
#[derive(Debug)]
pub struct Finished {
    /// The exit code.
    pub code: i32,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

/// Runs `hedgerow` with these arguments in `folder` and waits for its end. The environment is empty.
pub async fn hedgerow(folder: &Path, arguments: &[&str]) -> Finished {
    hedgerow_with(folder, arguments, &[]).await
}

/// The same with variables of the environment.
pub async fn hedgerow_with(folder: &Path, arguments: &[&str], environment: &[(&str, &str)]) -> Finished {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hedgerow"));
    command.args(arguments).env_clear().envs(environment.iter().copied()).current_dir(folder);
    finished(command).await
}

/// Runs a command to its end.
pub async fn finished(mut command: Command) -> Finished {
    let child = command.stdin(Stdio::null()).kill_on_drop(true).output();
    let output = soon(child).await.expect("the command can be started");
    let text = |bytes| String::from_utf8(bytes).expect("output is text");
    Finished {
        code: output.status.code().unwrap_or_else(|| panic!("ended by {}", output.status)),
        stdout: text(output.stdout),
        stderr: text(output.stderr),
    }
}
