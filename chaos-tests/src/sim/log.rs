//! The log of simulated processes, prefixed with simulated time and replica.

use std::cell::Cell;
use std::fmt;

use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::FormatTime;

thread_local! {
    static NOW: Cell<(u8, u64)> = const { Cell::new((0, 0)) };
}

/// From now on `replica` logs.
pub(super) fn on(replica: u8, now_us: u64) {
    NOW.set((replica, now_us));
}

/// Nobody logs but the world.
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

/// Prints what is logged to the standard error, as `filter` says.
///
/// # Errors
/// When the filter is none, or something is logged elsewhere already.
pub fn print(filter: &str) -> anyhow::Result<()> {
    tracing_subscriber::fmt()
        .with_timer(SimLogPort)
        .with_env_filter(tracing_subscriber::EnvFilter::try_new(filter)?)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .try_init()
        .map_err(|error| anyhow::anyhow!("{error}"))
}
