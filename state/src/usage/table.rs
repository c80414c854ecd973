//! The table of usage: the changes that the log orders, and its image in snapshots.

use std::collections::BTreeSet;

use bincode::{Decode, Encode};
use xxhash_rust::xxh3::xxh3_128;

use super::sources::{NamedSources, Sources};
use super::{Detail, NOBODY, RowKey, USAGE_ROWS_MAX, UsageSource, source_key};
use crate::budgets::{BACK_MS_MAX, BudgetPeriod};
use crate::cow::CowMap;
use crate::encoding;
use crate::ids::{SourceKey, UserKey};
use crate::users::UserUsage;

/// Maximum number of rows that one command drops by age, so that none takes long.
const DROPS_PER_COMMAND: usize = 64;
/// Number of rows that a charge folds step by step for room. A full table of users with one row each
/// then folds the oldest row into its day at once.
const FOLDS_PER_ROW: usize = 16;
/// Maximum number of rows or sources in one section of a snapshot.
const ROWS_PER_PIECE: usize = 4096;
/// Maximum number of names of sources without rows, such as those that are named and not charged yet.
const UNUSED_SOURCES_MAX: usize = 4096;

type RowMap = CowMap<RowKey, UserUsage>;

/// What is kept in addition to the rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Encode, Decode)]
struct UsageTotals {
    /// Day of the last charge, since 1970.
    day: u32,
    /// All usage ever charged.
    charged: UserUsage,
    /// Usage of rows that were dropped by age.
    dropped: UserUsage,
}

/// Usage by day, user and source.
pub(crate) struct UsageTable {
    rows: RowMap,
    /// Rows in the order in which they fold and age.
    order: BTreeSet<(u32, Detail, RowKey)>,
    sources: Sources,
    totals: UsageTotals,
    /// Wrapping sum of the hashes of all rows.
    digest: u128,
    rows_max: usize,
    is_changed: bool,
}

impl Default for UsageTable {
    fn default() -> Self {
        Self::with_bounds(USAGE_ROWS_MAX, UNUSED_SOURCES_MAX)
    }
}

impl UsageTable {
    pub(super) fn with_bounds(rows_max: usize, unused_sources_max: usize) -> Self {
        Self {
            rows: RowMap::new(),
            order: BTreeSet::new(),
            sources: Sources::with_bound(unused_sources_max),
            totals: UsageTotals::default(),
            digest: 0,
            rows_max,
            is_changed: false,
        }
    }

    /// Names a source.
    pub(crate) fn define(&mut self, hash_seed: u64, source: UsageSource) {
        let key = source_key(hash_seed, source.key, &source.model);
        self.sources.define(key, source);
        self.is_changed = true;
    }

    /// Adds usage of a user at the Unix time `unix_ms` to the row of the day and source.
    pub(crate) fn charge(
        &mut self,
        user: UserKey,
        source: SourceKey,
        usage: &UserUsage,
        unix_ms: u64,
    ) {
        if *usage == UserUsage::default() {
            return;
        }
        let day = self.follow_day(unix_ms);
        self.totals.charged.add(usage);
        let key = RowKey { day, user, source };
        self.add(key, usage);
        self.fold_surplus();
    }

    /// Returns the day for which a stamp of this Unix time counts.
    fn follow_day(&mut self, unix_ms: u64) -> u32 {
        let (known, number) = (self.totals.day, BudgetPeriod::Day.number(unix_ms));
        let begins_ms = BudgetPeriod::Day.begins_ms(known);
        let is_slightly_back = number < known && unix_ms.saturating_add(BACK_MS_MAX) >= begins_ms;
        if !is_slightly_back {
            self.totals.day = number;
        }
        self.totals.day
    }

    /// Drops rows older than `days` at the Unix time `unix_ms`, a bounded number.
    pub(crate) fn forget_some(&mut self, unix_ms: u64, days: u16) {
        let today = BudgetPeriod::Day.number(unix_ms);
        for _ in 0..DROPS_PER_COMMAND {
            match self.order.first() {
                Some((day, _, key)) if day.saturating_add(u32::from(days)) <= today => {
                    let dropped = self.set(*key, None);
                    self.totals.dropped.add(&dropped);
                }
                _ => return,
            }
        }
    }

    /// Moves the rows of a user that is deleted to nobody. They keep day and model.
    pub(crate) fn forget_user(&mut self, hash_seed: u64, user: UserKey) {
        let theirs = self.order.iter().map(|(.., key)| *key);
        let theirs: Vec<RowKey> = theirs.filter(|key| key.user == user).collect();
        for key in theirs {
            let named = self.sources.named().get(&key.source);
            let model = named.map(|source| source.model.clone());
            let source = model.map_or(SourceKey::OTHER, |model| {
                let keyless = source_key(hash_seed, None, &model);
                self.define(hash_seed, UsageSource { key: None, model });
                keyless
            });
            let moved = RowKey {
                user: NOBODY,
                source,
                ..key
            };
            self.merge(key, moved);
        }
    }

    /// Folds rows until they are within their bound.
    fn fold_surplus(&mut self) {
        for folds in 0.. {
            if self.rows.len() <= self.rows_max {
                return;
            }
            let mut oldest = self.order.iter();
            let Some((.., key)) = oldest.find(|(_, detail, _)| *detail != Detail::Day) else {
                return;
            };
            let key = *key;
            let is_step = folds < FOLDS_PER_ROW;
            self.merge(key, if is_step { key.folded() } else { key.of_day() });
        }
    }

    fn merge(&mut self, from: RowKey, into: RowKey) {
        if from == into {
            return;
        }
        // First added, so that a source that both have keeps its name.
        let usage = self.rows.get(&from).copied().unwrap_or_default();
        self.add(into, &usage);
        self.set(from, None);
    }

    fn add(&mut self, key: RowKey, usage: &UserUsage) {
        let mut row = self.rows.get(&key).copied().unwrap_or_default();
        row.add(usage);
        self.set(key, Some(row));
    }

    /// Adds, replaces or removes a row. Returns the former row.
    fn set(&mut self, key: RowKey, row: Option<UserUsage>) -> UserUsage {
        let before = self.rows.remove(&key);
        if let Some(before) = &before {
            self.digest = self.digest.wrapping_sub(hash(&(key, before)));
        }
        let place = (key.day, key.detail(), key);
        match row {
            Some(row) => {
                self.digest = self.digest.wrapping_add(hash(&(key, row)));
                self.rows.insert_new(key, row);
                if before.is_none() {
                    self.order.insert(place);
                    self.sources.gains_row(key.source);
                }
            }
            None => {
                self.order.remove(&place);
                self.sources.loses_row(key.source);
            }
        }
        self.is_changed = true;
        before.unwrap_or_default()
    }

    /// Returns the usage for readers on other threads, or `None` if nothing changed since the last
    /// call.
    pub(crate) fn publish(&mut self) -> Option<UsageView> {
        std::mem::take(&mut self.is_changed).then(|| self.published())
    }

    pub(crate) fn published(&self) -> UsageView {
        UsageView {
            rows: self.rows.clone(),
            sources: self.sources.named().clone(),
            totals: self.totals,
        }
    }

    /// Marks the table as changed, so that the next command publishes it.
    pub(crate) fn replaced(&mut self) {
        self.is_changed = true;
    }

    /// Returns the wrapping sums of the hashes of rows and sources, and the hash of the totals.
    pub(crate) fn digest(&self) -> [u128; 3] {
        [self.digest, self.sources.digest(), hash(&self.totals)]
    }

    pub(crate) fn restore_totals(&mut self, bytes: &[u8]) -> Result<(), String> {
        self.totals = encoding::from_bytes::<_, { encoding::SECTION_BYTES_MAX }>(bytes)?;
        Ok(())
    }

    /// Adds the sources encoded in one piece. An error describes the first fault.
    pub(crate) fn restore_sources(&mut self, bytes: &[u8]) -> Result<(), String> {
        type Piece = Vec<(SourceKey, UsageSource)>;
        for (key, source) in encoding::from_bytes::<Piece, { encoding::SECTION_BYTES_MAX }>(bytes)?
        {
            let is_full = self.sources.named().len() >= self.rows_max + UNUSED_SOURCES_MAX;
            if self.sources.named().get(&key).is_some() || is_full {
                return Err(format!("source {key} stands twice or has no room"));
            }
            self.sources.insert(key, source);
        }
        self.is_changed = true;
        Ok(())
    }

    /// Adds the rows encoded in one piece. An error describes the first fault.
    pub(crate) fn restore_piece(&mut self, bytes: &[u8]) -> Result<(), String> {
        type Piece = Vec<(RowKey, UserUsage)>;
        for (key, row) in encoding::from_bytes::<Piece, { encoding::SECTION_BYTES_MAX }>(bytes)? {
            if self.rows.get(&key).is_some() || self.rows.len() >= self.rows_max {
                return Err(format!("usage {key:?} stands twice or has no room"));
            }
            self.set(key, Some(row));
        }
        Ok(())
    }

    /// Checks I172: rows and dropped usage add up to what was charged, and order and digest follow
    /// from the rows, which are within their bound.
    ///
    /// # Errors
    /// Describes the first broken rule.
    pub(crate) fn check(&self) -> Result<(), String> {
        let rebuilt = self.rebuilt()?;
        if rebuilt.digest != self.digest || rebuilt.order != self.order {
            return Err("order or digest of usage differ from its rows".to_owned());
        }
        let mut sum = self.totals.dropped;
        self.rows.iter().for_each(|(_, row)| sum.add(row));
        if sum != self.totals.charged {
            let charged = self.totals.charged;
            return Err(format!("rows add up to {sum:?}, charged were {charged:?}"));
        }
        Ok(())
    }

    /// Checks I173: rows and names of sources go together, and names without rows are bounded.
    ///
    /// # Errors
    /// Describes the first broken rule.
    pub(crate) fn check_sources(&self) -> Result<(), String> {
        self.sources.check(&self.rebuilt()?.sources)
    }

    /// Returns the table that a snapshot of this one restores.
    fn rebuilt(&self) -> Result<Self, String> {
        let view = self.published();
        let mut rebuilt = Self::with_bounds(self.rows_max, UNUSED_SOURCES_MAX);
        for piece in view.source_pieces() {
            rebuilt.restore_sources(&piece)?;
        }
        for piece in view.row_pieces() {
            rebuilt.restore_piece(&piece)?;
        }
        Ok(rebuilt)
    }
}

fn hash<T: Encode>(value: &T) -> u128 {
    xxh3_128(&encoding::to_bytes(value))
}

/// Frozen image of the usage, as of one applied index.
#[derive(Debug)]
pub struct UsageView {
    rows: RowMap,
    sources: NamedSources,
    totals: UsageTotals,
}

/// Usage of one user with one source on one day.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UsageRow<'a> {
    /// Day in UTC, counted from 1970-01-01.
    pub day: u32,
    /// User; `None` for users who were deleted or whose rows had no room.
    pub user: Option<UserKey>,
    /// Hash of API key and model.
    pub source_key: SourceKey,
    /// API key and model; `None` if the row is folded, or its source has no name yet.
    pub source: Option<&'a UsageSource>,
    /// Tokens and requests.
    pub usage: UserUsage,
}

impl Default for UsageView {
    fn default() -> Self {
        UsageTable::default().published()
    }
}

impl UsageView {
    /// Iterates over all rows, in no particular order.
    pub fn rows(&self) -> impl Iterator<Item = UsageRow<'_>> {
        self.rows.iter().map(|(key, usage)| UsageRow {
            day: key.day,
            user: (key.user != NOBODY).then_some(key.user),
            source_key: key.source,
            source: self.sources.get(&key.source),
            usage: *usage,
        })
    }

    /// Whether the source has a name.
    #[must_use]
    pub fn knows(&self, source: SourceKey) -> bool {
        self.sources.get(&source).is_some()
    }

    /// Returns all usage ever charged, also that of rows dropped by age.
    #[must_use]
    pub fn charged(&self) -> UserUsage {
        self.totals.charged
    }

    pub(crate) fn totals(&self) -> Vec<u8> {
        encoding::to_bytes(&self.totals)
    }

    /// Encodes all sources in pieces of bounded size.
    pub(crate) fn source_pieces(&self) -> impl Iterator<Item = Vec<u8>> {
        encoding::pieces(self.sources.iter(), ROWS_PER_PIECE)
    }

    /// Encodes all rows in pieces of bounded size.
    pub(crate) fn row_pieces(&self) -> impl Iterator<Item = Vec<u8>> {
        encoding::pieces(self.rows.iter(), ROWS_PER_PIECE)
    }
}
