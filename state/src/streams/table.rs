//! The table of resumable streams: the changes that the log orders, and its image in snapshots.

use std::collections::BTreeSet;

use xxhash_rust::xxh3::xxh3_128;

use super::{STREAM_IDLE_MS, STREAMS_MAX, StreamCharge, StreamKey, StreamRecord};
use crate::charge::Charge;
use crate::cow::CowMap;
use crate::encoding;
use crate::held::HeldCounts;
use crate::ids::{StreamCarrier, StreamId, UserKey};
use crate::trees::TurnUsage;

/// Maximum number of idle records that one command forgets, so that none takes long.
const IDLE_ENDS_PER_COMMAND: usize = 64;
/// Part of the table that a user may hold before it makes room for others, as a divisor.
const SHARE_DIVISOR: usize = 16;
/// Maximum number of records in one section of a snapshot.
const STREAMS_PER_PIECE: usize = 4096;

type StreamMap = CowMap<StreamKey, StreamRecord>;

/// What becomes of a charge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StreamVerdict {
    /// It counts. The session's turn has ended with this usage before, if it has.
    Counts { turn: Option<TurnUsage> },
    /// It is void, because another request has taken the stream over.
    Void,
}

/// The records in the orders in which they are searched. They follow from the records, so snapshots
/// leave them out.
#[derive(Debug, Default, PartialEq, Eq)]
struct StreamOrders {
    /// Records by time of last use.
    by_use: BTreeSet<(u64, StreamKey)>,
    /// Those of each user in the same order.
    by_user: BTreeSet<(UserKey, u64, StreamKey)>,
    held: HeldCounts,
}

impl StreamOrders {
    fn insert(&mut self, key: StreamKey, used_ms: u64) {
        self.by_use.insert((used_ms, key));
        self.by_user.insert((key.user, used_ms, key));
        self.held.add(key.user);
    }

    fn remove(&mut self, key: StreamKey, used_ms: u64) {
        self.by_use.remove(&(used_ms, key));
        self.by_user.remove(&(key.user, used_ms, key));
        self.held.remove(key.user);
    }

    /// Iterates over the streams of a user, the one unused for longest first.
    fn of_user(&self, user: UserKey) -> impl Iterator<Item = StreamKey> {
        let first = StreamKey {
            stream: StreamId(0),
            user: UserKey(0),
        };
        let from = self.by_user.range((user, 0, first)..);
        from.take_while(move |it| it.0 == user).map(|it| it.2)
    }
}

/// Table of all resumable streams.
pub(crate) struct StreamTable {
    records: StreamMap,
    orders: StreamOrders,
    /// Wrapping sum of the hashes of all records.
    digest: u128,
    records_max: usize,
    is_changed: bool,
}

impl Default for StreamTable {
    fn default() -> Self {
        Self::with_bound(STREAMS_MAX)
    }
}

impl StreamTable {
    pub(super) fn with_bound(records_max: usize) -> Self {
        Self {
            records: StreamMap::new(),
            orders: StreamOrders::default(),
            digest: 0,
            records_max,
            is_changed: false,
        }
    }

    /// Adds a charge to the record of its stream, unless it is void.
    pub(crate) fn charge(&mut self, item: &StreamCharge, now_ms: u64) -> StreamVerdict {
        let (key, carrier) = (item.key(), item.carried.carrier);
        let before = self.records.get(&key).copied();
        let mut record = before.unwrap_or(StreamRecord {
            carrier,
            epoch: item.takes_over.unwrap_or(0),
            charged: TurnUsage::default(),
            advance: 0,
            turn: None,
            used_ms: now_ms,
        });
        if record.carrier != carrier {
            let epoch = item.takes_over.filter(|epoch| *epoch > record.epoch);
            let Some(epoch) = epoch else {
                return StreamVerdict::Void;
            };
            (record.carrier, record.epoch) = (carrier, epoch);
        }
        let turn = record.turn;
        record.used_ms = record.used_ms.max(now_ms);
        let Charge {
            input_uncached,
            input_cached,
            output,
            ..
        } = item.charge;
        let usage = TurnUsage {
            input_uncached,
            input_cached,
            output,
        };
        record.charged.add(&usage.bounded());
        let ahead = record.advance.saturating_add(item.charge.advance);
        record.advance = match item.is_closed {
            true => 0,
            false => ahead.saturating_sub(item.charge.settled),
        };
        record.turn = item.turn.map(|turn| turn.usage).or(turn);
        if before.is_none() && self.records.len() >= self.records_max {
            self.make_room();
        }
        self.set(key, Some(record));
        StreamVerdict::Counts { turn }
    }

    /// Forgets streams unused for too long, a bounded number.
    pub(crate) fn forget_some(&mut self, now_ms: u64) {
        for _ in 0..IDLE_ENDS_PER_COMMAND {
            match self.orders.by_use.first() {
                Some((used_ms, _)) if used_ms.saturating_add(STREAM_IDLE_MS) <= now_ms => {
                    self.forget_idlest();
                }
                _ => return,
            }
        }
    }

    /// Forgets the streams of a user that is deleted.
    pub(crate) fn forget_user(&mut self, user: UserKey) {
        let theirs: Vec<StreamKey> = self.orders.of_user(user).collect();
        theirs.into_iter().for_each(|key| self.set(key, None));
    }

    /// Forgets a stream of a full table: the one unused for longest of the user with the most if that
    /// user holds a share of the table, else of all.
    fn make_room(&mut self) {
        let share = self.records_max / SHARE_DIVISOR;
        match self.orders.held.most(share) {
            Some(user) => {
                let key = self.orders.of_user(user).next();
                key.into_iter().for_each(|key| self.set(key, None));
            }
            None => self.forget_idlest(),
        }
    }

    fn forget_idlest(&mut self) {
        if let Some((_, key)) = self.orders.by_use.first().copied() {
            self.set(key, None);
        }
    }

    /// Adds, replaces or removes a record.
    fn set(&mut self, key: StreamKey, record: Option<StreamRecord>) {
        let hash = |record: &StreamRecord| xxh3_128(&encoding::to_bytes(&(key, record)));
        let before = self.records.remove(&key);
        if let Some(before) = &before {
            self.orders.remove(key, before.used_ms);
            self.digest = self.digest.wrapping_sub(hash(before));
        }
        if let Some(record) = record {
            self.orders.insert(key, record.used_ms);
            self.digest = self.digest.wrapping_add(hash(&record));
            self.records.insert_new(key, record);
        }
        self.is_changed = true;
    }

    /// Returns the records for readers on other threads, or `None` if nothing changed since the last
    /// call.
    pub(crate) fn publish(&mut self) -> Option<StreamsView> {
        std::mem::take(&mut self.is_changed).then(|| self.published())
    }

    pub(crate) fn published(&self) -> StreamsView {
        StreamsView(self.records.clone())
    }

    /// Marks the table as changed, so that the next command publishes it.
    pub(crate) fn replaced(&mut self) {
        self.is_changed = true;
    }

    pub(crate) fn digest(&self) -> u128 {
        self.digest
    }

    /// Adds the records encoded in one piece. An error describes the first fault.
    pub(crate) fn restore_piece(&mut self, bytes: &[u8]) -> Result<(), String> {
        type Piece = Vec<(StreamKey, StreamRecord)>;
        for (key, record) in encoding::from_bytes::<Piece, { encoding::SECTION_BYTES_MAX }>(bytes)?
        {
            if self.records.get(&key).is_some() || self.records.len() >= self.records_max {
                return Err(format!("stream {} stands twice or has no room", key.stream));
            }
            self.set(key, Some(record));
        }
        Ok(())
    }

    /// Checks I168: the order of use and the digest follow from the records, which are within their
    /// bound.
    ///
    /// # Errors
    /// Describes the first broken rule.
    pub(crate) fn check(&self) -> Result<(), String> {
        let mut rebuilt = Self::default();
        for piece in self.published().pieces() {
            rebuilt.restore_piece(&piece)?;
        }
        let same = rebuilt.digest == self.digest && rebuilt.orders == self.orders;
        let fault = || "order or digest of streams differ from the streams".to_owned();
        same.then_some(()).ok_or_else(fault)
    }
}

/// Frozen image of the resumable streams, as of one applied index.
#[derive(Debug)]
pub struct StreamsView(StreamMap);

impl Default for StreamsView {
    fn default() -> Self {
        Self(StreamMap::new())
    }
}

impl StreamsView {
    /// Returns the record of a stream; `None` if nothing was charged for it lately.
    #[must_use]
    pub fn record(&self, key: StreamKey) -> Option<&StreamRecord> {
        self.0.get(&key)
    }

    /// Whether another request than `carrier` carries the user's stream.
    #[must_use]
    pub fn is_taken_over(&self, key: StreamKey, carrier: StreamCarrier) -> bool {
        self.0.get(&key).is_some_and(|it| it.carrier != carrier)
    }

    /// Iterates over the streams of `user`.
    pub fn of_user(&self, user: UserKey) -> impl Iterator<Item = (StreamId, &StreamRecord)> {
        let theirs = self.0.iter().filter(move |(key, _)| key.user == user);
        theirs.map(|(key, record)| (key.stream, record))
    }

    /// Encodes all records in pieces of bounded size.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = Vec<u8>> {
        encoding::pieces(self.0.iter(), STREAMS_PER_PIECE)
    }
}
