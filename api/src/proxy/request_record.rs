//! What is kept of a request: numbers, the names that it had, and what became of it.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use state::ids::BlockHash;
use tokio::time::Instant;

use super::identify::UserSource;
use crate::prompt::BlockUnit;
use crate::routing::{DecisionRecord, Labels, UserName};

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
    /// Of these, how many an engine can have.
    pub(crate) matchable: u32,
    /// Tokens of one block, estimated where blocks are of bytes.
    pub(crate) tokens_per_block: u32,
    /// Hashes of its blocks at depths 1, 2, 4 and so on.
    pub(crate) marks: Box<[BlockHash]>,
    /// Unix time when it was understood, in milliseconds.
    pub(crate) at_ms: u64,
    pub(super) since: Instant,
    pub(super) attempts: Mutex<Vec<DecidedAttempt>>,
    pub(super) end: OnceLock<RequestEnd>,
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

    /// What it takes up, but for its attempts.
    pub(super) fn bytes(&self) -> usize {
        let labels = self.labels.iter();
        let labels =
            labels.map(|(key, value)| size_of::<(String, String)>() + key.len() + value.len());
        let texts = self.id.len() + self.path.len() + self.model.len() + self.user.as_str().len();
        let marks = size_of_val(&*self.marks);
        size_of::<Self>() + texts + labels.sum::<usize>() + marks
    }
}
