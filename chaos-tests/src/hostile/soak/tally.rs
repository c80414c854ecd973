//! Counts of outcomes per kind of client.

use std::collections::BTreeMap;
use std::time::Duration;

/// Maximum number of failures whose descriptions are kept.
const WORDS_MAX: usize = 5;

/// Counts of the outcomes of one kind of client.
#[derive(Debug, Clone, Default, serde::Serialize)]
pub struct KindCounts {
    /// Number of requests, connections or tricks that were started.
    pub asked: u64,
    /// Number of complete responses received while counting was on.
    pub whole: u64,
    /// Number of tokens in the counted complete responses.
    pub tokens: u64,
    /// Numbers of requests started and of complete responses while counting was on, by user.
    pub by_user: BTreeMap<String, [u64; 2]>,
    /// Number of requests, connections or tricks without a complete response, by how they ended.
    pub ends: BTreeMap<String, u64>,
    /// Descriptions of the first failures.
    pub words: Vec<String>,
    /// Number of harmful events, which must not happen, by description.
    pub harm: BTreeMap<String, u64>,
    /// Number of requests that were rejected with 503 while counting was on.
    #[serde(skip)]
    pub(super) counted_refusals: u64,
    #[serde(skip)]
    first: Vec<Duration>,
    #[serde(skip)]
    is_counted: bool,
}

impl KindCounts {
    pub(super) fn begin(&mut self) {
        self.is_counted = true;
    }

    pub(super) fn end(&mut self) {
        self.is_counted = false;
    }

    pub(super) fn count(&mut self, how: &str) {
        if self.is_counted && how == "503" {
            self.counted_refusals += 1;
        }
        *self.ends.entry(how.to_owned()).or_default() += 1;
    }

    pub(super) fn asks(&mut self, user: &str) {
        self.asked += 1;
        if self.is_counted {
            self.by_user.entry(user.to_owned()).or_default()[0] += 1;
        }
    }

    pub(super) fn whole(&mut self, user: &str, first: Duration, tokens: u64) {
        if self.is_counted {
            self.whole += 1;
            self.tokens += tokens;
            self.by_user.entry(user.to_owned()).or_default()[1] += 1;
            self.first.push(first);
        }
    }

    pub(super) fn say(&mut self, words: String) {
        if self.words.len() < WORDS_MAX {
            self.words.push(words);
        }
    }

    pub(super) fn harm(&mut self, what: String) {
        *self.harm.entry(what).or_default() += 1;
    }

    /// Returns the times to the first byte of responses, in the order in which they ended.
    pub(super) fn firsts(&self) -> &[Duration] {
        &self.first
    }

    /// Returns the time to the first byte at the quantile `permille`; `None` without responses.
    #[must_use]
    pub fn first(&self, permille: usize) -> Option<Duration> {
        let mut all = self.first.clone();
        all.sort_unstable();
        let last = all.len().checked_sub(1)?;
        Some(all[last * permille / 1000])
    }
}
