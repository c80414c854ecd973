//! Small parts that every room may use: the clock, printable text, limits on log lines.

pub mod clock;
pub mod log_rate_limit;
pub mod printable;
