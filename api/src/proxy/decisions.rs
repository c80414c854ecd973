//! The last decisions of this replica, for `GET /admin/v1/decisions`.
//!
//! A request is kept from when it is understood, with the decision of every attempt and how each
//! ended. What is kept is bounded by number and by bytes; the oldest goes first. The data plane
//! adds to it without formatting anything: a record holds numbers and the names that the request
//! had anyway. It never holds a prompt, a key or an answer.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use http::HeaderValue;
use state::ids::ReplicaId;
use tokio::time::Instant;
use xxhash_rust::xxh3::xxh3_64;

use super::identify::UserSource;
use super::reading::ClientRequest;
use crate::clock::Clock;
use crate::prompt::BlockUnit;
use crate::routing::{Decision, DecisionRecord, Labels, UserName};

/// Most bytes that finished and running requests take up together, but for those that are added to
/// while they run.
const BYTES_MAX: usize = 64 * 1024 * 1024;
/// How many records are looked at while new ones have to wait.
const LOOK_AT: usize = 256;

/// The last requests that this replica decided, the newest last.
pub struct DecisionLog {
    replica: ReplicaId,
    clock: Clock,
    entries_max: usize,
    /// Whether requests have a record though none is kept.
    is_always_made: bool,
    kept: Mutex<KeptRequests>,
}

#[derive(Default)]
struct KeptRequests {
    /// Ascending by number, without gaps.
    entries: VecDeque<KeptRequest>,
    next_number: u64,
    bytes: usize,
}

struct KeptRequest {
    id_hash: u64,
    record: Arc<RequestRecord>,
    /// As counted in `KeptRequests::bytes`.
    bytes: usize,
}

/// What is kept of one request.
#[derive(Debug)]
pub struct RequestRecord {
    /// Its place among all that this replica has kept since its start, from 0.
    pub(crate) number: u64,
    /// A text of its own: a header's value would keep the 16 KiB that its connection read at once.
    pub(crate) id: Box<str>,
    pub(crate) path: Box<str>,
    pub(crate) model: Box<str>,
    pub(crate) user: UserName,
    pub(crate) user_source: UserSource,
    pub(crate) labels: Labels,
    pub(crate) priority: i16,
    pub(crate) deadline: Option<Duration>,
    pub(crate) tokens_max: Option<u32>,
    pub(crate) is_stream: bool,
    pub(crate) unit: BlockUnit,
    /// Prompt tokens, as far as they were known.
    pub(crate) tokens: u32,
    /// Full blocks of the prompt.
    pub(crate) blocks: u32,
    /// Unix time when it was understood, in milliseconds.
    pub(crate) at_ms: u64,
    since: Instant,
    attempts: Mutex<Vec<DecidedAttempt>>,
    end: OnceLock<RequestEnd>,
}

/// One attempt of a request.
#[derive(Debug, Clone)]
pub(crate) struct DecidedAttempt {
    /// From when the request was understood to the dispatch.
    pub(crate) after: Duration,
    /// Of that, how long this attempt waited for its turn and a backend.
    pub(crate) waited: Duration,
    pub(crate) decision: Arc<DecisionRecord>,
}

/// How a request ended.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RequestEnd {
    /// As `quorate_proxy_requests_total` counts it.
    pub(crate) outcome: &'static str,
    /// Status its client was told; 0: none.
    pub(crate) status: u16,
    /// Code of the error it was told.
    pub(crate) code: Option<&'static str>,
    /// From when it was understood.
    pub(crate) after: Duration,
}

/// What the log holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DecisionLogSize {
    pub(crate) entries: usize,
    pub(crate) entries_max: usize,
    pub(crate) bytes: usize,
    /// When the oldest request was understood, in Unix milliseconds.
    pub(crate) oldest_ms: Option<u64>,
}

impl DecisionLog {
    /// An empty log of at most `entries_max` requests; 0 keeps none.
    #[must_use]
    pub fn new(replica: ReplicaId, clock: Clock, entries_max: usize) -> Self {
        Self {
            replica,
            clock,
            entries_max,
            is_always_made: false,
            kept: Mutex::default(),
        }
    }

    /// Makes records for the access log, also where none is kept.
    #[must_use]
    pub(super) fn for_access_log(self, is_always_made: bool) -> Self {
        Self {
            is_always_made,
            ..self
        }
    }

    /// Makes a request's record and keeps it; `None` where nobody would read it.
    pub(super) fn open(
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
        kept.push(id_hash, Arc::clone(&record));
        kept.shrink(self.entries_max);
        Some(record)
    }

    /// Notes the decision of the next attempt, made after it `waited`.
    pub(super) fn decided(&self, record: &RequestRecord, decision: &Decision, waited: Duration) {
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
    }

    /// This replica.
    pub(crate) fn replica(&self) -> ReplicaId {
        self.replica
    }

    /// What it holds.
    pub(crate) fn size(&self) -> DecisionLogSize {
        let kept = self.lock();
        DecisionLogSize {
            entries: kept.entries.len(),
            entries_max: self.entries_max,
            bytes: kept.bytes,
            oldest_ms: kept.entries.front().map(|oldest| oldest.record.at_ms),
        }
    }

    /// The newest request with this id.
    pub(crate) fn find(&self, id: &[u8]) -> Option<Arc<RequestRecord>> {
        let id_hash = xxh3_64(id);
        let kept = self.lock();
        let mut newest = kept.entries.iter().rev();
        let found = newest.find(|it| it.id_hash == id_hash && it.record.id.as_bytes() == id);
        found.map(|it| Arc::clone(&it.record))
    }

    /// The newest requests below the number `before` that are `wanted`, at most `limit`.
    pub(crate) fn newest(
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

    /// A request takes up more.
    fn grow(&mut self, number: u64, bytes: usize) {
        let Some(first) = self.entries.front().map(|first| first.record.number) else {
            return;
        };
        // Forgotten meanwhile if it stands before the first.
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
        }
    }

    /// Some of the newest records below the number `before`, the newest first.
    fn below(&self, before: u64) -> Vec<Arc<RequestRecord>> {
        let first = self.entries.front().map_or(0, |first| first.record.number);
        let end = usize::try_from(before.saturating_sub(first)).unwrap_or(usize::MAX);
        let end = end.min(self.entries.len());
        let some = self.entries.range(end.saturating_sub(LOOK_AT)..end);
        some.rev().map(|it| Arc::clone(&it.record)).collect()
    }
}

impl RequestRecord {
    /// The request is over.
    pub(super) fn ends(&self, outcome: &'static str, status: u16, code: Option<&'static str>) {
        self.end.get_or_init(|| RequestEnd {
            outcome,
            status,
            code,
            after: self.since.elapsed(),
        });
    }

    /// How it ended; `None`: it is under way.
    pub(crate) fn end(&self) -> Option<&RequestEnd> {
        self.end.get()
    }

    /// Its attempts so far, in order.
    pub(crate) fn attempts(&self) -> MutexGuard<'_, Vec<DecidedAttempt>> {
        self.attempts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn bytes(&self) -> usize {
        let labels = self.labels.iter();
        let labels =
            labels.map(|(key, value)| size_of::<(String, String)>() + key.len() + value.len());
        let texts = self.id.len() + self.path.len() + self.model.len() + self.user.as_str().len();
        size_of::<Self>() + texts + labels.sum::<usize>()
    }
}

impl std::fmt::Debug for DecisionLog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DecisionLog({:?})", self.size())
    }
}
