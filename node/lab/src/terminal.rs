//! What commands write to a terminal: results on stdout, tables of one look, progress on stderr.

use std::fmt::Display;
use std::io::{IsTerminal, Write};

use api::shown::escaped_lines;
use comfy_table::{ContentArrangement, Table, presets};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Style of a progress bar that counts things.
pub const COUNT: &str = "{prefix}{elapsed_precise} {wide_bar} {pos}/{len} {msg}";
/// Style of a progress bar that counts bytes.
pub const BYTES: &str = "{prefix}{elapsed_precise} {wide_bar} {bytes}/{total_bytes}";

/// Exit status of a command that a signal ended early: 128 and the number of SIGINT.
pub const INTERRUPTED: u8 = 130;

/// Writes a result to stdout. Control characters in it are escaped: names come from others, and a
/// terminal must not obey them.
///
/// # Errors
/// When stdout cannot be written to, as after its reader has gone; `println!` would panic.
pub fn print(result: impl Display) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", escaped_lines(&result.to_string()))?;
    Ok(out.flush()?)
}

/// An empty table with these column heads, plain when stdout is no terminal.
#[must_use]
pub fn table(heads: &[&str]) -> Table {
    let mut table = Table::new();
    let is_terminal = std::io::stdout().is_terminal();
    table.load_preset(if is_terminal {
        presets::UTF8_HORIZONTAL_ONLY
    } else {
        presets::NOTHING
    });
    if is_terminal {
        table.set_content_arrangement(ContentArrangement::Dynamic);
    }
    table.set_header(heads);
    table
}

/// A progress bar up to `length`, drawn only if stderr is a terminal.
///
/// # Errors
/// When `style` is no template.
pub fn progress_bar(length: u64, style: &str) -> anyhow::Result<ProgressBar> {
    let target = if std::io::stderr().is_terminal() {
        ProgressDrawTarget::stderr()
    } else {
        ProgressDrawTarget::hidden()
    };
    let bar = ProgressBar::with_draw_target(Some(length), target);
    Ok(bar.with_style(ProgressStyle::with_template(style)?))
}
