//! Names of sources: kept as long as a row has them, and a bounded number of others.
//!
//! A source gets its name just before its first charge. So every row can have a name, however many
//! API keys and models there are: the bound on rows is the only one that matters.

use std::collections::{BTreeMap, BTreeSet};

use xxhash_rust::xxh3::xxh3_128;

use super::UsageSource;
use crate::cow::{CowMap, PathKey};
use crate::encoding;
use crate::ids::SourceKey;

/// The names of sources, as readers get them.
pub(super) type NamedSources = CowMap<SourceKey, UsageSource>;

impl PathKey for SourceKey {
    fn path(&self) -> u64 {
        self.0
    }
}

/// Names of sources, and how many rows each source has.
pub(super) struct Sources {
    named: NamedSources,
    /// Number of rows of each source that has any, with a name or not.
    rows: BTreeMap<SourceKey, usize>,
    /// Sources with a name and no rows.
    unused: BTreeSet<SourceKey>,
    unused_max: usize,
    /// Wrapping sum of the hashes of all names.
    digest: u128,
}

impl Sources {
    pub(super) fn with_bound(unused_max: usize) -> Self {
        Self {
            named: CowMap::new(),
            rows: BTreeMap::new(),
            unused: BTreeSet::new(),
            unused_max,
            digest: 0,
        }
    }

    pub(super) fn named(&self) -> &NamedSources {
        &self.named
    }

    pub(super) fn digest(&self) -> u128 {
        self.digest
    }

    /// Names a source. Forgets the name of another one if too many have no rows.
    pub(super) fn define(&mut self, key: SourceKey, source: UsageSource) {
        if self.named.get(&key).is_none() {
            self.forget_unused(self.unused_max.saturating_sub(1));
            self.insert(key, source);
        }
    }

    /// Adds a name that is not there.
    pub(super) fn insert(&mut self, key: SourceKey, source: UsageSource) {
        self.digest = self.digest.wrapping_add(hash(key, &source));
        self.named.insert_new(key, source);
        if !self.rows.contains_key(&key) {
            self.unused.insert(key);
        }
    }

    /// Counts a row that the source gains.
    pub(super) fn gains_row(&mut self, key: SourceKey) {
        *self.rows.entry(key).or_default() += 1;
        self.unused.remove(&key);
    }

    /// Counts a row that the source loses.
    pub(super) fn loses_row(&mut self, key: SourceKey) {
        let Some(rows) = self.rows.get_mut(&key) else {
            return;
        };
        *rows -= 1;
        if *rows == 0 {
            self.rows.remove(&key);
            if self.named.get(&key).is_some() {
                self.unused.insert(key);
                self.forget_unused(self.unused_max);
            }
        }
    }

    /// Forgets names without rows until at most `most` are left.
    fn forget_unused(&mut self, most: usize) {
        while self.unused.len() > most
            && let Some(key) = self.unused.pop_first()
        {
            if let Some(source) = self.named.remove(&key) {
                self.digest = self.digest.wrapping_sub(hash(key, &source));
            }
        }
    }

    /// Checks I173: `rebuilt`, made of the rows and names, counts the same rows, and the names
    /// without rows are within their bound.
    pub(super) fn check(&self, rebuilt: &Self) -> Result<(), String> {
        let is_same = rebuilt.rows == self.rows
            && rebuilt.unused == self.unused
            && rebuilt.digest == self.digest;
        if !is_same {
            return Err("counts or digest of sources differ from rows and names".to_owned());
        }
        if self.unused.len() > self.unused_max {
            return Err(format!("{} sources have no rows", self.unused.len()));
        }
        Ok(())
    }
}

fn hash(key: SourceKey, source: &UsageSource) -> u128 {
    xxh3_128(&encoding::to_bytes(&(key, source)))
}
