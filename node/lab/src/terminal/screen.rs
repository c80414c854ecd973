//! Properties of the terminal that commands write to: width and colour support.

use std::ffi::OsStr;
use std::io::{IsTerminal, stdout};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::termios::tcgetwinsize;

/// Assumed width of a terminal that does not report its width.
const COLUMNS_DEFAULT: usize = 80;

/// Whether tables show all columns. Never reset, like a flag of the command line.
static IS_WIDE: AtomicBool = AtomicBool::new(false);

/// Makes all tables of this process show every column, however narrow the terminal.
pub fn show_all_columns() {
    IS_WIDE.store(true, Ordering::Relaxed);
}

/// Returns the maximum width of tables; `None` if it is unlimited.
pub(super) fn columns() -> Option<usize> {
    match IS_WIDE.load(Ordering::Relaxed) {
        true => None,
        false => columns_of(&stdout()),
    }
}

/// Returns the maximum width of lines on `stream`: from `COLUMNS`, or from the terminal; `None` if
/// it is a file or a pipe.
pub fn columns_of(stream: &(impl IsTerminal + AsFd)) -> Option<usize> {
    if !stream.is_terminal() {
        return None;
    }
    let named = std::env::var("COLUMNS").ok();
    let named = named.and_then(|columns| columns.parse().ok());
    let told = || tcgetwinsize(stream).ok().map(|size| size.ws_col.into());
    let usable = |columns: &usize| *columns > 0;
    let columns = named.filter(usable).or_else(|| told().filter(usable));
    Some(columns.unwrap_or(COLUMNS_DEFAULT))
}

/// Returns whether `stream` is a terminal that supports colours, and `NO_COLOR` is not set.
pub fn is_coloured(stream: &impl IsTerminal) -> bool {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    let is_dumb = set("TERM").is_some_and(|term| term == OsStr::new("dumb"));
    stream.is_terminal() && set("NO_COLOR").is_none() && !is_dumb
}
