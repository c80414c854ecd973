//! The trace of a run: a running hash of all events and, on request, their text.
//!
//! If two runs of a seed differ anywhere, their hashes differ from there on. Comparing two hashes
//! thus compares two histories bit for bit.

use std::fmt::Write as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Maximum length of the text in bytes. Beyond that, the oldest half is dropped.
const TEXT_BYTES_MAX: usize = 512 << 20;

/// The trace of one run. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct Trace(Arc<Mutex<TraceInner>>);

#[derive(Debug, Default)]
struct TraceInner {
    hash: u64,
    events: u64,
    is_text_kept: bool,
    text: String,
    line: String,
}

impl Trace {
    /// Creates an empty trace that keeps text if `is_text_kept`.
    #[must_use]
    pub fn new(is_text_kept: bool) -> Self {
        let trace = Self::default();
        trace.lock().is_text_kept = is_text_kept;
        trace
    }

    /// Records an event. Runs are compared by its formatted text.
    pub fn event(&self, now_us: u64, what: std::fmt::Arguments<'_>) {
        let mut inner = self.lock();
        let mut line = std::mem::take(&mut inner.line);
        line.clear();
        // Writing into a string cannot fail.
        let _ = write!(line, "{now_us} {what}");
        inner.hash = xxh3_64_with_seed(line.as_bytes(), inner.hash);
        inner.events += 1;
        if inner.is_text_kept {
            if inner.text.len() > TEXT_BYTES_MAX {
                let half = inner.text.ceil_char_boundary(TEXT_BYTES_MAX / 2);
                inner.text.drain(..half);
            }
            inner.text.push_str(&line);
            inner.text.push('\n');
        }
        inner.line = line;
    }

    /// Returns the hash of all events so far.
    #[must_use]
    pub fn hash(&self) -> u64 {
        self.lock().hash
    }

    /// Returns the number of events so far.
    #[must_use]
    pub fn events(&self) -> u64 {
        self.lock().events
    }

    /// Removes and returns the text kept so far.
    #[must_use]
    pub fn take_text(&self) -> String {
        std::mem::take(&mut self.lock().text)
    }

    fn lock(&self) -> MutexGuard<'_, TraceInner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_trace_hash_depends_on_order() {
        let of = |events: [&str; 2]| {
            let trace = Trace::new(true);
            for event in events {
                trace.event(7, format_args!("{event}"));
            }
            assert_eq!(trace.events(), 2);
            assert_eq!(
                trace.take_text(),
                format!("7 {}\n7 {}\n", events[0], events[1])
            );
            trace.hash()
        };
        assert_eq!(of(["a", "b"]), of(["a", "b"]));
        assert_ne!(of(["a", "b"]), of(["b", "a"]));
    }
}
