//! Tests of shares: the arithmetic, and clusters of ledgers.

mod model;
mod split;
