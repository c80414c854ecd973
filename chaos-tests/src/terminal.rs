//! What the programs of this crate share: to run until a signal, and to print tables.

use std::io::{self, Write as _};
use std::process::ExitCode;

use comfy_table::{Table, presets::ASCII_MARKDOWN};
use tokio::signal::unix::{SignalKind, signal};

/// Runs a program to its end, or until it is told to stop. Dropping what runs takes processes,
/// hosts and folders away.
///
/// # Errors
/// The program's; or there is no runtime.
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

/// Returns what a program ends with that found all as it must be, or something else.
#[must_use]
pub fn exit_code(is_clean: bool) -> ExitCode {
    if is_clean {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// A table without rows.
#[must_use]
pub fn table(heads: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(ASCII_MARKDOWN).set_header(heads);
    table
}

/// Prints a line.
///
/// # Errors
/// Nobody reads it.
pub fn say(what: impl std::fmt::Display) -> anyhow::Result<()> {
    Ok(writeln!(io::stdout().lock(), "{what}")?)
}
