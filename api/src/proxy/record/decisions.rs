//! Log of decisions, for `GET /admin/v1/decisions`.
//!
//! A request enters the log when it has been parsed. Its record holds the decision of every attempt
//! and how each ended. The latest records of this replica are in memory, bounded by number and by
//! bytes; the oldest requests go first. Records of ended requests, also of other replicas, are in
//! the [archive](super::archive). The data plane formats nothing for it: a record holds numbers, and
//! names that the request had anyway. It never holds a prompt, a key or a response.

use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use http::HeaderValue;
use state::ids::{BlockHash, ReplicaId};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use xxhash_rust::xxh3::xxh3_64;

use super::archive::{self, ArchiveSize, DecisionArchive, LostRecords};
use super::decision_filter::DecisionFilter;
use super::peer_question::PeerQuestion;
use super::recorder::{Recorder, TakenRequest};
use super::request_record::{DecidedAttempt, RequestRecord};
use crate::base::clock::Clock;
use crate::files::ring::{RingPosition, RingSettings};
use crate::ports::{Cluster, QuestionTopic};
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

/// The latest requests that this replica routed, and an archive of all replicas'.
pub struct DecisionLog {
    replica: ReplicaId,
    clock: Clock,
    entries_max: usize,
    /// Whether requests get a record even if none is kept.
    is_always_made: bool,
    kept: Mutex<KeptRequests>,
    recorder: Recorder,
    archive: Option<Arc<DecisionArchive>>,
}

/// Place in the list of all decisions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DecisionCursor {
    /// After the request with this number, which is in memory only.
    Memory(u64),
    /// After this place in the archive.
    Archive(RingPosition),
}

/// Part of the list of all decisions.
#[derive(Debug)]
pub struct DecisionPage {
    /// The newest first.
    pub records: Vec<Arc<RequestRecord>>,
    /// Place after the last record; `None` at the end of the list.
    pub next: Option<DecisionCursor>,
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
            archive: None,
        }
    }

    /// Adds an archive, which works while [`DecisionLog::run_archive`] does. Without records in
    /// memory, there is none.
    #[must_use]
    pub fn archived(mut self, settings: Option<RingSettings>, lost: LostRecords) -> Self {
        let settings = settings.filter(|_| self.entries_max > 0);
        self.archive = settings.map(|settings| {
            let archive = DecisionArchive::new(self.replica, self.clock.clone(), settings, lost);
            Arc::new(archive)
        });
        self
    }

    /// Writes records of ended requests to the archive, if there is one, and sends them to the
    /// peers, until `stop`.
    pub async fn run_archive(&self, cluster: Arc<dyn Cluster>, stop: CancellationToken) {
        if let Some(archive) = &self.archive {
            Arc::clone(archive).run(cluster, stop).await;
        }
    }

    /// Passes the record of an ended request to the archive, if there is one.
    pub(super) fn ended(&self, record: &Arc<RequestRecord>) {
        if let Some(archive) = &self.archive {
            archive.offer(record);
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
            replica: self.replica,
            id: String::from_utf8_lossy(id.as_bytes()).into(),
            path: path.into(),
            model: request.parsed.model.as_str().into(),
            requested: (request.resolved.as_ref()).map(|it| it.requested.as_str().into()),
            user: request.user.clone(),
            user_source: request.user_source.clone(),
            session: request.session,
            labels: request.preferences.labels.clone(),
            priority: request.priority,
            deadline: request.deadline,
            tokens_max: request.parsed.max_tokens,
            is_stream: request.parsed.stream,
            is_resumed: request.is_resumed,
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
            is_archived: AtomicBool::new(false),
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

    /// Returns the size of the archive; `None` if there is none. Blocks.
    pub fn archive_size(&self) -> Option<ArchiveSize> {
        Some(self.archive.as_ref()?.size())
    }

    /// Returns the newest request with this id that this replica knows, if there is one. Blocks.
    pub fn find(&self, id: &[u8]) -> Option<Arc<RequestRecord>> {
        let archived = || self.archive.as_ref()?.find(id).map(Arc::new);
        self.in_memory(id).or_else(archived)
    }

    fn in_memory(&self, id: &[u8]) -> Option<Arc<RequestRecord>> {
        let id_hash = xxh3_64(id);
        let kept = self.lock();
        let mut newest = kept.entries.iter().rev();
        let found = newest.find(|it| it.id_hash == id_hash && it.record.id.as_bytes() == id);
        found.map(|it| Arc::clone(&it.record))
    }

    /// Returns the answer to a question of the peer `from`; `None` if there is none. Blocks.
    #[must_use]
    pub fn answer(&self, from: ReplicaId, question: &[u8]) -> Option<Vec<u8>> {
        match PeerQuestion::read(question)? {
            PeerQuestion::Store { start, end, frames } => {
                let archive = self.archive.as_ref()?;
                let reached = archive.receive(from, (start, end), frames)?;
                Some(reached.0.to_le_bytes().into())
            }
            PeerQuestion::Find { id } => {
                let found = self.find(id);
                Some(found.map_or_else(Vec::new, |record| archive::to_bytes(&record)))
            }
        }
    }

    /// Returns the newest request with this id, after asking the peers if this replica has none: it
    /// may be in flight there, or this replica was away when it ended.
    ///
    /// # Errors
    /// Returns the peers that could not be asked, and why, if no replica has such a request.
    pub async fn find_anywhere(
        self: &Arc<Self>,
        id: &str,
        cluster: &dyn Cluster,
    ) -> Result<Arc<RequestRecord>, Vec<(ReplicaId, String)>> {
        let (log, wanted) = (Arc::clone(self), id.to_owned());
        let here = tokio::task::spawn_blocking(move || log.find(wanted.as_bytes()));
        if let Ok(Some(found)) = here.await {
            return Ok(found);
        }
        let question = Bytes::from(PeerQuestion::Find { id: id.as_bytes() }.write());
        let ask = |peer| {
            let answer = cluster.ask(peer, QuestionTopic::Decisions, question.clone());
            async move { (peer, answer.await) }
        };
        let answers = join_all(cluster.peers().into_iter().map(ask)).await;
        let (mut found, mut failures) = (Vec::new(), Vec::new());
        for (peer, answer) in answers {
            match answer {
                Ok(bytes) => found.extend(archive::from_bytes(&bytes)),
                Err(why) => failures.push((peer, why)),
            }
        }
        let newest = found.into_iter().max_by_key(|record| record.at_ms);
        newest.map(Arc::new).ok_or(failures)
    }

    /// Returns at most `limit` of the requests that `filter` admits after `from`, or from the newest
    /// on: first those of this replica that are not in the archive, then the archive in the reverse
    /// order of their ends. Blocks.
    pub fn page(
        &self,
        from: Option<DecisionCursor>,
        limit: usize,
        filter: &DecisionFilter,
    ) -> DecisionPage {
        let (number, place) = match from {
            None => (u64::MAX, RingPosition::MAX),
            Some(DecisionCursor::Memory(number)) => (number, RingPosition::MAX),
            Some(DecisionCursor::Archive(place)) => (0, place),
        };
        let is_wanted = |it: &RequestRecord| !it.is_archived.load(Relaxed) && filter.admits(it);
        // One more than requested shows whether there are more.
        let mut records = self.newest(number, limit + 1, is_wanted);
        if records.len() > limit {
            records.truncate(limit);
            let next = records.last().map(|it| DecisionCursor::Memory(it.number));
            return DecisionPage { records, next };
        }
        let Some(archive) = &self.archive else {
            return DecisionPage {
                records,
                next: None,
            };
        };
        // The archive may have got some of them meanwhile.
        let key = |it: &RequestRecord| (it.replica, it.at_ms, it.number);
        let shown: BTreeSet<_> = records.iter().map(|it| key(it)).collect();
        let room = limit - records.len();
        let is_wanted = |it: &RequestRecord| filter.admits(it) && !shown.contains(&key(it));
        let mut archived = archive.newest(place, room + 1, is_wanted);
        let is_more = archived.len() > room;
        archived.truncate(room);
        let last = archived.last().map_or(place, |(at, _)| *at);
        records.extend(archived.into_iter().map(|(_, record)| Arc::new(record)));
        DecisionPage {
            records,
            next: is_more.then_some(DecisionCursor::Archive(last)),
        }
    }

    /// Returns at most `limit` of this replica's newest `wanted` requests in memory with numbers
    /// below `before`, the newest first.
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
