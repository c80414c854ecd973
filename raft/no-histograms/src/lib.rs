//! Nothing, in place of openraft's histograms.
//!
//! openraft records how many messages and entries it processes at once, for a report that only its feature
//! `runtime-stats` can ask for. The real crate makes tables for sixteen scales at the first record: 26 MB of
//! memory in every replica. All counts here are 0.

use std::fmt;

/// Takes values and keeps none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Histogram<T = ()>(std::marker::PhantomData<T>);

impl<T> Histogram<T> {
    /// Returns a histogram.
    #[must_use]
    pub fn new() -> Self {
        Self(std::marker::PhantomData)
    }

    /// Does nothing.
    pub fn record(&mut self, _value: u64) {}

    /// Does nothing.
    pub fn record_n(&mut self, _value: u64, _count: u64) {}

    /// Returns the percentiles of no values.
    #[must_use]
    pub fn percentile_stats(&self) -> PercentileStats {
        PercentileStats::default()
    }
}

/// Percentiles of a histogram.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PercentileStats {
    /// Number of values.
    pub samples: u64,
    /// Median.
    pub p50: u64,
    /// 90th percentile.
    pub p90: u64,
    /// 99th percentile.
    pub p99: u64,
    /// 99.9th percentile.
    pub p99_9: u64,
}

impl fmt::Display for PercentileStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("not recorded")
    }
}

/// An empty chart.
#[derive(Debug, Default)]
pub struct AsciiChart;

impl AsciiChart {
    /// Returns a chart.
    #[must_use]
    pub fn new() -> Self {
        Self
    }

    /// Leaves the chart empty.
    #[must_use]
    pub fn add<T>(self, _name: &str, _values: Histogram<T>) -> Self {
        self
    }
}

impl fmt::Display for AsciiChart {
    fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        Ok(())
    }
}
