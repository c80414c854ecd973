//! Small parts that every room may use: the clock, labels, printable text, limits on log lines.

pub mod clock;
pub(crate) mod label;
pub mod log_rate_limit;
pub mod printable;
