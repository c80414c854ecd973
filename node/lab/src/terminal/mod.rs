//! Output of commands on a terminal: results and tables on stdout, progress on stderr.

mod progress;
mod screen;
mod table;

use std::fmt::Display;
use std::io::Write;

use api::base::printable::escaped_lines;

pub use progress::{BYTES, COUNT, progress_bar};
pub use screen::{columns_of, is_coloured, show_all_columns};
pub use table::{Column, FittedTable, column, indented};

/// Exit status of a command that a signal interrupted: 128 plus the number of SIGINT.
pub const INTERRUPTED: u8 = 130;

/// Writes a result to stdout. Escapes control characters, because names may come from untrusted
/// sources and a terminal must not interpret them.
///
/// # Errors
/// If stdout cannot be written to, for example because its reader has closed the pipe. `println!`
/// would panic then.
pub fn print(result: impl Display) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", escaped_lines(&result.to_string()))?;
    Ok(out.flush()?)
}

/// Clears the screen, so that the next output starts at the top.
pub fn clear() -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(b"\x1b[H\x1b[2J")?;
    Ok(out.flush()?)
}

/// Creates an empty table with the columns `heads`, all of which are always shown.
#[must_use]
pub fn table(heads: &[&'static str]) -> FittedTable {
    let columns: Vec<Column> = heads.iter().map(|head| column(head)).collect();
    FittedTable::new(&columns)
}
