//! What commands write to a terminal: results on stdout, and tables of one look.

use std::fmt::Display;
use std::io::{IsTerminal, Write};

use api::shown::escaped_lines;
use comfy_table::{ContentArrangement, Table, presets};

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
