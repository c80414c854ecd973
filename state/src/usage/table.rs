//! The table of usage: the changes that the log orders, and its image in snapshots.

use std::collections::BTreeSet;
use std::ops::Bound::{Excluded, Unbounded};

use bincode::{Decode, Encode};
use xxhash_rust::xxh3::xxh3_128;

use super::sources::{NamedSources, Sources};
use super::{Fold, NOBODY, RowKey, USAGE_ROWS_MAX, UsageSource, source_key};
use crate::budgets::{BACK_MS_MAX, BudgetPeriod};
use crate::cow::CowMap;
use crate::encoding;
use crate::ids::{SourceKey, UserKey};
use crate::users::UserUsage;

/// Maximum number of rows that one command drops by age, so that none takes long.
const DROPS_PER_COMMAND: usize = 64;
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
    /// Number of times that a row lost detail because the table was full.
    folded: u64,
    /// First day since which no row has lost detail so.
    whole_from: u32,
}

/// Usage by day, user and source.
pub(crate) struct UsageTable {
    rows: RowMap,
    /// Keys of all rows, in the order in which they age.
    keys: BTreeSet<RowKey>,
    /// Users with rows that can fold, by day, in the order in which they fold.
    foldable: BTreeSet<(u32, Fold, UserKey)>,
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
            keys: BTreeSet::new(),
            foldable: BTreeSet::new(),
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
            match self.keys.first() {
                Some(key) if key.day.saturating_add(u32::from(days)) <= today => self.drop(*key),
                _ => return,
            }
        }
    }

    fn drop(&mut self, key: RowKey) {
        let dropped = self.set(key, None);
        self.totals.dropped.add(&dropped);
    }

    /// Moves the rows of a user that is deleted to nobody. They keep day and model.
    pub(crate) fn forget_user(&mut self, hash_seed: u64, user: UserKey) {
        let mut theirs: Vec<RowKey> = Vec::new();
        let mut next = self.keys.first();
        while let Some(RowKey { day, .. }) = next {
            theirs.extend(self.keys.range(RowKey::of_user(*day, user)));
            let last = *RowKey::of_user(*day, UserKey(u64::MAX)).end();
            next = self.keys.range((Excluded(last), Unbounded)).next();
        }
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
        while self.rows.len() > self.rows_max {
            let Some(&(day, fold, user)) = self.foldable.first() else {
                // One row a day is left.
                let oldest = self.keys.first().copied();
                oldest.into_iter().for_each(|key| self.drop(key));
                continue;
            };
            // A row without a source would be the first one.
            let row = self.keys.range(RowKey::of_user(day, user)).next_back();
            let Some(row) = row.copied() else { return };
            self.merge(row, row.folded(fold));
            self.totals.folded = self.totals.folded.saturating_add(1);
            self.totals.whole_from = self.totals.whole_from.max(day.saturating_add(1));
        }
    }

    /// Returns how the user's rows of the day fold; `None` if they do not.
    fn fold_of(&self, day: u32, user: UserKey) -> Option<Fold> {
        let mut rows = self.keys.range(RowKey::of_user(day, user));
        match (rows.next(), rows.next()) {
            (Some(_), Some(_)) => Some(Fold::IntoUser),
            (Some(row), None) if *row != row.folded(Fold::IntoDay) => Some(Fold::IntoDay),
            _ => None,
        }
    }

    /// Adds or removes the key of a row.
    fn list(&mut self, key: RowKey, is_there: bool) {
        let (day, user) = (key.day, key.user);
        if let Some(fold) = self.fold_of(day, user) {
            self.foldable.remove(&(day, fold, user));
        }
        if is_there {
            self.keys.insert(key);
            self.sources.gains_row(key.source);
        } else {
            self.keys.remove(&key);
            self.sources.loses_row(key.source);
        }
        if let Some(fold) = self.fold_of(day, user) {
            self.foldable.insert((day, fold, user));
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
        if before.is_some() != row.is_some() {
            self.list(key, row.is_some());
        }
        if let Some(row) = row {
            self.digest = self.digest.wrapping_add(hash(&(key, row)));
            self.rows.insert_new(key, row);
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
        let is_same = rebuilt.digest == self.digest
            && rebuilt.keys == self.keys
            && rebuilt.foldable == self.foldable;
        if !is_same {
            return Err("order or digest of usage differ from its rows".to_owned());
        }
        if self.rows.len() > self.rows_max {
            return Err(format!("there are {} rows", self.rows.len()));
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

    /// Returns the number of rows.
    #[must_use]
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there are no rows.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns how many times a row lost detail because the table was full.
    #[must_use]
    pub fn folded(&self) -> u64 {
        self.totals.folded
    }

    /// Returns the first day whose rows, and those of all later days, have lost no detail for lack of
    /// room; `None` if that is the case of all rows.
    #[must_use]
    pub fn whole_from(&self) -> Option<u32> {
        let day = self.totals.whole_from;
        self.rows().any(|row| row.day < day).then_some(day)
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
