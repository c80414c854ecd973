//! The model's usage: sums by day, user and source, each found by looking at all.

use std::collections::BTreeMap;

use state::command::Charge;
use state::ids::{SourceKey, UserKey};
use state::usage::{NOBODY, UsageSource, source_key};
use state::users::UserUsage;

use super::users::TOKENS_MAX;

const DAY_MS: u64 = 24 * 3600 * 1000;
/// Maximum number of rows that are dropped with one command.
const DROPS: usize = 64;

/// Day, user and source of a row.
pub type UsageKey = (u32, UserKey, SourceKey);

/// Usage by day, user and source. Random logs are too short to fill the table.
#[derive(Debug, Clone, Default)]
pub struct ModelUsage {
    /// Rows that are not too old.
    pub rows: BTreeMap<UsageKey, UserUsage>,
    sources: BTreeMap<SourceKey, UsageSource>,
    hash_seed: u64,
    /// Day of the last charge, since 1970.
    day: u32,
    /// Number of days for which rows are kept.
    pub(super) days: u16,
}

impl ModelUsage {
    pub(super) fn begin(&mut self, hash_seed: u64) {
        self.hash_seed = hash_seed;
    }

    pub(super) fn define(&mut self, source: &UsageSource) {
        let key = source_key(self.hash_seed, source.key, &source.model);
        self.sources.insert(key, source.clone());
    }

    pub(super) fn charge(&mut self, stamp_ms: u64, charge: &Charge) {
        let usage = UserUsage {
            input_uncached: charge.input_uncached.min(TOKENS_MAX),
            input_cached: charge.input_cached.min(TOKENS_MAX),
            output: charge.output.min(TOKENS_MAX),
            requests: u64::from(charge.started),
        };
        if usage == UserUsage::default() {
            return;
        }
        let stamped = stamp_ms / DAY_MS;
        let begins_ms = u64::from(self.day) * DAY_MS;
        if stamped >= u64::from(self.day) || stamp_ms + DAY_MS / 24 < begins_ms {
            self.day = u32::try_from(stamped).unwrap_or(u32::MAX);
        }
        self.add((self.day, charge.user, charge.source), usage);
    }

    fn add(&mut self, key: UsageKey, usage: UserUsage) {
        let row = self.rows.entry(key).or_default();
        row.input_uncached += usage.input_uncached;
        row.input_cached += usage.input_cached;
        row.output += usage.output;
        row.requests += usage.requests;
    }

    /// Drops the oldest rows.
    pub(super) fn drop_old(&mut self, calendar_ms: u64) {
        let today = calendar_ms / DAY_MS;
        let old = |(day, ..): &&UsageKey| u64::from(*day) + u64::from(self.days) <= today;
        let old: Vec<UsageKey> = self.rows.keys().filter(old).take(DROPS).copied().collect();
        for key in old {
            self.rows.remove(&key);
        }
    }

    /// Gives the rows of a deleted user to nobody, without their API keys.
    pub(super) fn forget(&mut self, user: UserKey) {
        let theirs = self.rows.keys().filter(|key| key.1 == user).copied();
        for key in theirs.collect::<Vec<_>>() {
            let usage = self.rows.remove(&key).unwrap_or_default();
            let model = self.sources.get(&key.2).map(|source| source.model.clone());
            let source = model.map_or(SourceKey::OTHER, |model| {
                let keyless = UsageSource { key: None, model };
                self.define(&keyless);
                source_key(self.hash_seed, None, &keyless.model)
            });
            self.add((key.0, NOBODY, source), usage);
        }
    }
}
