//! Helpers of this crate's programs: runs until a signal, exit codes, and tables.

use std::io::{self, Write as _};
use std::process::ExitCode;

use comfy_table::{Table, presets::ASCII_MARKDOWN};
use tokio::signal::unix::{SignalKind, signal};

/// Runs a program until it ends or a signal stops it. A signal drops the program, which removes its
/// processes, hosts and folders.
///
/// # Errors
/// The program's error, or if the runtime or the signal handlers cannot be set up.
pub fn run(program: impl Future<Output = anyhow::Result<ExitCode>>) -> anyhow::Result<ExitCode> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?
        .block_on(async {
            let mut terminate = signal(SignalKind::terminate())?;
            tokio::select! {
                biased;
                _ = terminate.recv() => Ok(ExitCode::from(143)),
                _ = tokio::signal::ctrl_c() => Ok(ExitCode::from(130)),
                outcome = program => outcome,
            }
        })
}

/// Returns the exit code of a program: success if `is_clean`, otherwise failure.
#[must_use]
pub fn exit_code(is_clean: bool) -> ExitCode {
    if is_clean {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Returns an empty table with the headers `heads`.
#[must_use]
pub fn table(heads: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(ASCII_MARKDOWN).set_header(heads);
    table
}

/// Prints a line to standard output.
///
/// # Errors
/// If standard output is closed.
pub fn say(what: impl std::fmt::Display) -> anyhow::Result<()> {
    Ok(writeln!(io::stdout().lock(), "{what}")?)
}
