//! Log output of simulated processes, prefixed with simulated time and replica.

use std::cell::Cell;
use std::fmt;

use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::FormatTime;

thread_local! {
    static NOW: Cell<(u8, u64)> = const { Cell::new((0, 0)) };
}

/// Attributes log lines to `replica` from now on.
pub(super) fn on(replica: u8, now_us: u64) {
    NOW.set((replica, now_us));
}

/// Attributes log lines to the world from now on.
pub(super) fn off() {
    NOW.set((0, NOW.get().1));
}

struct SimLogPort;

impl FormatTime for SimLogPort {
    fn format_time(&self, writer: &mut Writer<'_>) -> fmt::Result {
        let (replica, now_us) = NOW.get();
        write!(writer, "{:>10.3} n{replica}", now_us as f64 / 1000.0)
    }
}

/// Prints log lines that match `filter` to standard error.
///
/// # Errors
/// If the filter is invalid, or another subscriber is set.
pub fn print(filter: &str) -> anyhow::Result<()> {
    tracing_subscriber::fmt()
        .with_timer(SimLogPort)
        .with_env_filter(tracing_subscriber::EnvFilter::try_new(filter)?)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .try_init()
        .map_err(|error| anyhow::anyhow!("{error}"))
}
