//! The charge: usage of one user, as the log carries it and as every area adds it up.

use crate::ids::{SourceKey, UserKey};

/// Usage of one user at one replica during one flush interval. All counts are additive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Charge {
    /// User to whom the usage is charged.
    pub user: UserKey,
    /// API key and model of the requests. Says in which row of [`crate::usage`] tokens and starts count.
    pub source: SourceKey,
    /// Number of prompt tokens that the engine computed.
    pub input_uncached: u64,
    /// Number of prompt tokens that the engine found in its prefix cache.
    pub input_cached: u64,
    /// Number of output tokens.
    pub output: u64,
    /// Number of requests that started.
    pub started: u32,
    /// Number of requests that ended, for any reason.
    pub ended: u32,
    /// Number of requests that joined an admission queue.
    pub queued: u32,
    /// Number of requests that left an admission queue, for any reason.
    pub dequeued: u32,
    /// Number of priced tokens charged in advance, before usage is known.
    pub advance: u64,
    /// Number of priced tokens of this charge's usage that an earlier advance has paid for.
    pub settled: u64,
}

impl Charge {
    /// Adds the counts of another charge of the same user and source, saturating.
    pub fn add(&mut self, other: &Self) {
        self.user = other.user;
        self.source = other.source;
        self.input_uncached = self.input_uncached.saturating_add(other.input_uncached);
        self.input_cached = self.input_cached.saturating_add(other.input_cached);
        self.output = self.output.saturating_add(other.output);
        self.started = self.started.saturating_add(other.started);
        self.ended = self.ended.saturating_add(other.ended);
        self.queued = self.queued.saturating_add(other.queued);
        self.dequeued = self.dequeued.saturating_add(other.dequeued);
        self.advance = self.advance.saturating_add(other.advance);
        self.settled = self.settled.saturating_add(other.settled);
    }
}
