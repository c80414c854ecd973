//! What commands know of the terminal they write to: its width, and whether it wants colours.

use std::ffi::OsStr;
use std::io::{IsTerminal, stdout};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::termios::tcgetwinsize;

/// Width of a terminal that does not tell.
const COLUMNS_DEFAULT: usize = 80;

/// Whether tables are shown whole; once set it stays, as a flag of the command line does.
static IS_WIDE: AtomicBool = AtomicBool::new(false);

/// Shows every column of every table of this process from here on, however narrow the terminal.
pub fn show_all_columns() {
    IS_WIDE.store(true, Ordering::Relaxed);
}

/// Returns how wide tables may be. `None`: as wide as they are.
pub(super) fn columns() -> Option<usize> {
    match IS_WIDE.load(Ordering::Relaxed) {
        true => None,
        false => columns_of(&stdout()),
    }
}

/// Returns how wide a line of `stream` may be: as `COLUMNS` says, else as the terminal does. `None`:
/// it is for a file or another program.
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

/// Whether `stream` takes colours: it is a terminal that knows them, and `NO_COLOR` is not set.
pub fn is_coloured(stream: &impl IsTerminal) -> bool {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    let is_dumb = set("TERM").is_some_and(|term| term == OsStr::new("dumb"));
    stream.is_terminal() && set("NO_COLOR").is_none() && !is_dumb
}
