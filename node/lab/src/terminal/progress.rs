//! Progress displays: a bar on a terminal, a line every few seconds elsewhere.

use std::io::{self, IsTerminal, Write};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle, TermLike};

/// Style of a progress bar that counts items.
pub const COUNT: &str = "{prefix}{elapsed_precise} {wide_bar} {pos}/{len} {msg}";
/// Style of a progress bar that counts bytes.
pub const BYTES: &str = "{prefix}{elapsed_precise} {wide_bar} {bytes}/{total_bytes}";

/// Part of a style that log lines omit.
const BAR: &str = "{wide_bar} ";
/// Minimum time between two log lines.
const LINE_INTERVAL: Duration = Duration::from_secs(5);
/// Maximum width of a log line, in characters.
const LINE_COLUMNS: u16 = 200;

/// Returns a bar that shows progress up to `length` on stderr. Without a terminal, it prints a line
/// every few seconds.
pub fn progress_bar(length: u64, style: &str) -> anyhow::Result<ProgressBar> {
    let (target, style) = if io::stderr().is_terminal() {
        (ProgressDrawTarget::stderr(), style.to_owned())
    } else {
        let lines = Box::new(ProgressLines::new(io::stderr()));
        (ProgressDrawTarget::term_like(lines), style.replace(BAR, ""))
    };
    let bar = ProgressBar::with_draw_target(Some(length), target);
    Ok(bar.with_style(ProgressStyle::with_template(&style)?))
}

/// A terminal that prints a drawing as a log line, or drops it if the previous line is less than
/// [`LINE_INTERVAL`] old.
#[derive(Debug)]
struct ProgressLines<W> {
    state: Mutex<LinesState<W>>,
}

#[derive(Debug)]
struct LinesState<W> {
    out: W,
    drawn: Option<String>,
    last: Instant,
}

impl<W> ProgressLines<W> {
    fn new(out: W) -> Self {
        let state = LinesState {
            out,
            drawn: None,
            last: Instant::now(),
        };
        Self {
            state: Mutex::new(state),
        }
    }
}

impl<W: Write> LinesState<W> {
    fn flush(&mut self, now: Instant) -> io::Result<()> {
        let drawn = self.drawn.take();
        match drawn.filter(|_| now.duration_since(self.last) >= LINE_INTERVAL) {
            Some(line) => {
                self.last = now;
                writeln!(self.out, "{line}")
            }
            None => Ok(()),
        }
    }
}

impl<W: Write + std::fmt::Debug + Send> TermLike for ProgressLines<W> {
    fn width(&self) -> u16 {
        LINE_COLUMNS
    }

    fn move_cursor_up(&self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn move_cursor_down(&self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn move_cursor_right(&self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn move_cursor_left(&self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn write_line(&self, text: &str) -> io::Result<()> {
        self.write_str(text)
    }

    fn write_str(&self, text: &str) -> io::Result<()> {
        let text = text.trim();
        // A bar fills the rest of its line with blanks.
        if !text.is_empty() {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            state.drawn = Some(text.to_owned());
        }
        Ok(())
    }

    fn clear_line(&self) -> io::Result<()> {
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.flush(Instant::now())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_lines_are_rate_limited() {
        let lines = ProgressLines::new(Vec::new());
        let started = lines.state.lock().unwrap().last;
        for second in 0..12 {
            lines.write_str(&format!("  {second} of 12")).unwrap();
            lines.write_str("      ").unwrap();
            let mut state = lines.state.lock().unwrap();
            state.flush(started + Duration::from_secs(second)).unwrap();
        }
        let mut state = lines.state.lock().unwrap();
        // A removed bar is drawn as an empty line.
        state.flush(started + Duration::from_secs(60)).unwrap();
        assert_eq!(String::from_utf8_lossy(&state.out), "5 of 12\n10 of 12\n");
    }
}
