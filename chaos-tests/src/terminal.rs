//! Helpers of this crate's programs: running until a signal, and printing tables.

use std::io::{self, Write as _};
use std::process::ExitCode;

use comfy_table::{Table, presets::ASCII_MARKDOWN};
use tokio::signal::unix::{SignalKind, signal};

/// Runs a program until it ends or a signal stops it. Dropping it removes processes, hosts and
/// folders.
///
/// # Errors
/// The program's error, or that no runtime can be built.
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

/// Returns the exit code of a program that found everything as it must be, or not.
#[must_use]
pub fn exit_code(is_clean: bool) -> ExitCode {
    if is_clean {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Returns a table without rows.
#[must_use]
pub fn table(heads: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(ASCII_MARKDOWN).set_header(heads);
    table
}

/// Prints a line.
///
/// # Errors
/// When standard output is closed.
pub fn say(what: impl std::fmt::Display) -> anyhow::Result<()> {
    Ok(writeln!(io::stdout().lock(), "{what}")?)
}
