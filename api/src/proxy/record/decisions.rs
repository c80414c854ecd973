//! Log of this replica's latest decisions, for `GET /admin/v1/decisions`.
//!
//! A request enters the log when it has been parsed. Its record holds the decision of every attempt
//! and how each ended. The log is bounded by number and by bytes; the oldest requests go first. The
//! data plane formats nothing for it: a record holds numbers, and names that the request had
//! anyway. It never holds a prompt, a key or a response.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use http::HeaderValue;
use state::ids::{BlockHash, ReplicaId};
use tokio::time::Instant;
use xxhash_rust::xxh3::xxh3_64;

use super::recorder::{Recorder, TakenRequest};
use super::request_record::{DecidedAttempt, RequestRecord};
use crate::base::clock::Clock;
use crate::proxy::request::client_request::ClientRequest;
use crate::routing::Decision;

/// Maximum total size of all kept requests, in bytes, except for what running ones have added since
/// the last trim.
const BYTES_MAX: usize = 64 * 1024 * 1024;
/// Maximum total size of the newest requests' blocks, in bytes, in addition to `BYTES_MAX`. A
/// prompt of 100,000 tokens has 50 KB of blocks.
const CHAIN_BYTES_MAX: usize = 32 * 1024 * 1024;
/// Maximum number of records examined under one lock, so that new ones do not wait for long.
const LOOK_AT: usize = 256;

/// The latest requests that this replica routed, the newest last.
pub struct DecisionLog {
    replica: ReplicaId,
    clock: Clock,
    entries_max: usize,
    /// Whether requests get a record even if none is kept.
    is_always_made: bool,
    kept: Mutex<KeptRequests>,
    recorder: Recorder,
}

#[derive(Default)]
struct KeptRequests {
    /// Kept requests in ascending order of their numbers, without gaps.
    entries: VecDeque<KeptRequest>,
    next_number: u64,
    bytes: usize,
    /// Numbers of the newest requests with the blocks of their prompts, ascending and without gaps.
    chains: VecDeque<(u64, Arc<[BlockHash]>)>,
    chain_bytes: usize,
}

struct KeptRequest {
    id_hash: u64,
    record: Arc<RequestRecord>,
    /// Size as counted in `KeptRequests::bytes`.
    bytes: usize,
}

/// Size and limit of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecisionLogSize {
    /// Number of requests in the log.
    pub entries: usize,
    /// Maximum number of requests; 0 keeps none.
    pub entries_max: usize,
    /// Size in memory, in bytes.
    pub bytes: usize,
    /// Time at which the oldest request was parsed, in Unix milliseconds; `None` if the log is
    /// empty.
    pub oldest_ms: Option<u64>,
}

impl DecisionLog {
    /// Creates an empty log of at most `entries_max` requests; 0 keeps none.
    #[must_use]
    pub fn new(replica: ReplicaId, clock: Clock, entries_max: usize) -> Self {
        Self {
            replica,
            clock,
            entries_max,
            is_always_made: false,
            kept: Mutex::default(),
            recorder: Recorder::default(),
        }
    }

    /// Sets whether requests get a record for the access log even if the log keeps none.
    #[must_use]
    pub(in crate::proxy) fn for_access_log(self, is_always_made: bool) -> Self {
        Self {
            is_always_made,
            ..self
        }
    }

    /// Creates a request's record. If the log keeps any, keeps this one and passes it to a running
    /// recording. Returns `None` if nothing would read it.
    pub(in crate::proxy) fn open(
        &self,
        request: &ClientRequest,
        id: &HeaderValue,
        path: &str,
    ) -> Option<Arc<RequestRecord>> {
        if self.entries_max == 0 && !self.is_always_made {
            return None;
        }
        let (at_ms, since) = (self.clock.unix_ms(), Instant::now());
        let blocks = request.identity.chain.len();
        let id_hash = xxh3_64(id.as_bytes());
        let record = |number| RequestRecord {
            number,
            id: String::from_utf8_lossy(id.as_bytes()).into(),
            path: path.into(),
            model: request.parsed.model.as_str().into(),
            user: request.user.clone(),
            user_source: request.user_source.clone(),
            labels: request.preferences.labels.clone(),
            priority: request.priority,
            deadline: request.deadline,
            tokens_max: request.parsed.max_tokens,
            is_stream: request.parsed.stream,
            unit: request.identity.unit,
            tokens: request.identity.tokens,
            blocks: u32::try_from(blocks).unwrap_or(u32::MAX),
            matchable: request.identity.matchable,
            tokens_per_block: request.identity.tail.tokens_per_block,
            marks: marks(&request.identity.chain),
            at_ms,
            since,
            attempts: Mutex::default(),
            end: OnceLock::new(),
        };
        if self.entries_max == 0 {
            return Some(Arc::new(record(0)));
        }
        let mut kept = self.lock();
        let record = Arc::new(record(kept.next_number));
        kept.next_number += 1;
        let chain = &request.identity.chain;
        kept.push(id_hash, Arc::clone(&record));
        kept.push_chain(record.number, Arc::clone(chain));
        kept.shrink(self.entries_max);
        drop(kept);
        if self.recorder.is_on() {
            let bytes = record.bytes() + size_of_val(&**chain);
            let (record, chain) = (Arc::clone(&record), Arc::clone(chain));
            self.recorder.take(TakenRequest { record, chain }, bytes);
        }
        Some(record)
    }

    /// Adds the decision of the next attempt to `record`. The attempt `waited` this long for it.
    pub(in crate::proxy) fn decided(
        &self,
        record: &RequestRecord,
        decision: &Decision,
        waited: Duration,
    ) {
        let Some(decision) = &decision.record else {
            return;
        };
        record.attempts().push(DecidedAttempt {
            after: record.since.elapsed(),
            waited,
            decision: Arc::clone(decision),
        });
        let bytes = size_of::<DecidedAttempt>() + decision.bytes();
        self.lock().grow(record.number, bytes);
        if self.recorder.is_on() {
            self.recorder.grow(record, bytes, self.clock.unix_ms());
        }
    }

    /// Returns the recorder of requests.
    pub fn recorder(&self) -> &Recorder {
        &self.recorder
    }

    /// Returns at most `limit` of the newest requests whose blocks are kept, the oldest first.
    pub fn with_blocks(&self, limit: usize) -> Vec<TakenRequest> {
        let kept = self.lock();
        let first = kept.entries.front().map_or(0, |first| first.record.number);
        let skipped = kept.chains.len().saturating_sub(limit);
        let newest = kept.chains.iter().skip(skipped);
        let taken = newest.filter_map(|(number, chain)| {
            let at = usize::try_from(number.checked_sub(first)?).ok()?;
            let record = Arc::clone(&kept.entries.get(at)?.record);
            let chain = Arc::clone(chain);
            Some(TakenRequest { record, chain })
        });
        taken.collect()
    }

    /// Returns the id of this replica.
    pub fn replica(&self) -> ReplicaId {
        self.replica
    }

    /// Returns the log's present size.
    pub fn size(&self) -> DecisionLogSize {
        let kept = self.lock();
        DecisionLogSize {
            entries: kept.entries.len(),
            entries_max: self.entries_max,
            bytes: kept.bytes + kept.chain_bytes,
            oldest_ms: kept.entries.front().map(|oldest| oldest.record.at_ms),
        }
    }

    /// Returns the newest kept request with this id, if there is one.
    pub fn find(&self, id: &[u8]) -> Option<Arc<RequestRecord>> {
        let id_hash = xxh3_64(id);
        let kept = self.lock();
        let mut newest = kept.entries.iter().rev();
        let found = newest.find(|it| it.id_hash == id_hash && it.record.id.as_bytes() == id);
        found.map(|it| Arc::clone(&it.record))
    }

    /// Returns at most `limit` of the newest `wanted` requests with numbers below `before`, the
    /// newest first.
    pub fn newest(
        &self,
        mut before: u64,
        limit: usize,
        wanted: impl Fn(&RequestRecord) -> bool,
    ) -> Vec<Arc<RequestRecord>> {
        let mut found = Vec::new();
        loop {
            let some = self.lock().below(before);
            let Some(last) = some.last() else {
                return found;
            };
            before = last.number;
            let wanted = some.into_iter().filter(|record| wanted(record));
            found.extend(wanted.take(limit - found.len()));
            if found.len() == limit {
                return found;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, KeptRequests> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl KeptRequests {
    fn push(&mut self, id_hash: u64, record: Arc<RequestRecord>) {
        let bytes = size_of::<KeptRequest>() + record.bytes();
        self.bytes += bytes;
        self.entries.push_back(KeptRequest {
            id_hash,
            record,
            bytes,
        });
    }

    fn push_chain(&mut self, number: u64, chain: Arc<[BlockHash]>) {
        self.chain_bytes += chain_bytes(&chain);
        self.chains.push_back((number, chain));
        while self.chain_bytes > CHAIN_BYTES_MAX {
            self.drop_chain();
        }
    }

    /// Drops the blocks of the oldest request that still has them.
    fn drop_chain(&mut self) {
        if let Some((_, chain)) = self.chains.pop_front() {
            self.chain_bytes -= chain_bytes(&chain);
        }
    }

    /// Adds `bytes` to the size of a request, if it is still kept.
    fn grow(&mut self, number: u64, bytes: usize) {
        let Some(first) = self.entries.front().map(|first| first.record.number) else {
            return;
        };
        // A number below the first means that the request was dropped meanwhile.
        let at = number
            .checked_sub(first)
            .and_then(|at| usize::try_from(at).ok());
        if let Some(entry) = at.and_then(|at| self.entries.get_mut(at)) {
            entry.bytes += bytes;
            self.bytes += bytes;
        }
    }

    fn shrink(&mut self, entries_max: usize) {
        while self.entries.len() > entries_max || self.bytes > BYTES_MAX {
            let Some(oldest) = self.entries.pop_front() else {
                return;
            };
            self.bytes -= oldest.bytes;
            let number = oldest.record.number;
            if self.chains.front().is_some_and(|chain| chain.0 <= number) {
                self.drop_chain();
            }
        }
    }

    /// Returns at most [`LOOK_AT`] of the newest records numbered below `before`, the newest first.
    fn below(&self, before: u64) -> Vec<Arc<RequestRecord>> {
        let first = self.entries.front().map_or(0, |first| first.record.number);
        let end = usize::try_from(before.saturating_sub(first)).unwrap_or(usize::MAX);
        let end = end.min(self.entries.len());
        let some = self.entries.range(end.saturating_sub(LOOK_AT)..end);
        some.rev().map(|it| Arc::clone(&it.record)).collect()
    }
}

/// Returns the size of a prompt's blocks in the log, in bytes.
fn chain_bytes(chain: &[BlockHash]) -> usize {
    size_of::<(u64, Arc<[BlockHash]>)>() + size_of_val(chain)
}

/// Returns the blocks at depths that are powers of two.
fn marks(chain: &[BlockHash]) -> Box<[BlockHash]> {
    let places = std::iter::successors(Some(1_usize), |depth| depth.checked_mul(2));
    let marks = places.map_while(|depth| chain.get(depth - 1).copied());
    marks.collect()
}

impl std::fmt::Debug for DecisionLog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DecisionLog({:?})", self.size())
    }
}
