//! Records of requests: numbers, names and outcomes.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use bincode::{Decode, Encode};
use state::ids::{BlockHash, ReplicaId};
use tokio::time::Instant;

use super::outcome::RequestOutcome;
use crate::prompt::BlockUnit;
use crate::proxy::request::identify::UserSource;
use crate::routing::{DecisionRecord, Labels, UserName};
use crate::sessions::NamedSession;

/// Record of one request and its attempts.
#[derive(Debug)]
pub struct RequestRecord {
    /// Number of the record among all since the replica's start, from 0.
    pub number: u64,
    /// Replica that received the request.
    pub replica: ReplicaId,
    /// Request id. It is copied, because a header value would keep alive the 16 KiB that its
    /// connection read at once.
    pub id: Box<str>,
    /// Path of the request.
    pub path: Box<str>,
    /// Model that serves the request.
    pub model: Box<str>,
    /// Name that the request gives; `None` if it is the model's own.
    pub requested: Option<Box<str>>,
    /// User who pays.
    pub user: UserName,
    /// Source of the user's name.
    pub user_source: UserSource,
    /// Session of which the request is a turn; `None` if it names none.
    pub session: Option<NamedSession>,
    /// Labels that backends must have.
    pub labels: Labels,
    /// Priority among waiting requests.
    pub priority: i16,
    /// Time by which the client wants its first token; `None` for no limit.
    pub deadline: Option<Duration>,
    /// Maximum number of output tokens; `None` if the request sets none.
    pub tokens_max: Option<u32>,
    /// Whether the response is streamed.
    pub is_stream: bool,
    /// Whether the request goes on with a stream of another replica.
    pub is_resumed: bool,
    /// Unit of the prompt's blocks.
    pub unit: BlockUnit,
    /// Number of prompt tokens; an estimate unless `unit` is [`BlockUnit::Tokens`].
    pub tokens: u32,
    /// Number of full blocks of the prompt.
    pub blocks: u32,
    /// Number of full blocks that an engine can have cached.
    pub matchable: u32,
    /// Tokens per block, estimated if blocks consist of bytes.
    pub tokens_per_block: u32,
    /// Hashes of the blocks at depths 1, 2, 4 and so on; none if the record was stored.
    pub marks: Box<[BlockHash]>,
    /// Unix time at which the request was parsed, in milliseconds.
    pub at_ms: u64,
    pub(in crate::proxy) since: Instant,
    pub(in crate::proxy) attempts: Mutex<Vec<DecidedAttempt>>,
    pub(in crate::proxy) end: OnceLock<RequestEnd>,
    /// Whether the record is in the archive too.
    pub(in crate::proxy) is_archived: AtomicBool,
}

/// One attempt of a request, with its decision.
#[derive(Debug, Clone, Encode, Decode)]
pub struct DecidedAttempt {
    /// Time from parsing the request to the dispatch.
    pub after: Duration,
    /// Part of `after` for which this attempt waited for its turn and a backend.
    pub waited: Duration,
    /// Inputs and result of the decision.
    pub decision: Arc<DecisionRecord>,
}

/// End of a request, as its record shows it.
#[derive(Debug, Clone, Copy)]
pub struct RequestEnd {
    /// Outcome as counted by `quorate_proxy_requests_total`.
    pub outcome: &'static str,
    /// Status sent to the client; 0 if none was sent.
    pub status: u16,
    /// Code of the error sent to the client, if any.
    pub code: Option<&'static str>,
    /// Time from parsing the request to its end.
    pub after: Duration,
}

impl RequestEnd {
    /// Whether the request failed, other than by a refusal or because the client left.
    #[must_use]
    pub fn is_failure(&self) -> bool {
        let all = RequestOutcome::ALL;
        all.iter()
            .any(|it| it.is_failure() && it.label() == self.outcome)
    }
}

impl RequestRecord {
    /// Records the end of the request, with the code of the error sent to the client, if any.
    pub(in crate::proxy) fn ends(
        &self,
        outcome: &'static str,
        status: u16,
        code: Option<&'static str>,
    ) {
        self.end.get_or_init(|| RequestEnd {
            outcome,
            status,
            code,
            after: self.since.elapsed(),
        });
    }

    /// Returns the end of the request; `None` while it is in flight.
    pub fn end(&self) -> Option<&RequestEnd> {
        self.end.get()
    }

    /// Returns the time from parsing the request to its end, or until now while it is in flight.
    #[must_use]
    pub fn took(&self) -> Duration {
        self.end()
            .map_or_else(|| self.since.elapsed(), |end| end.after)
    }

    /// Returns the attempts so far, in order.
    pub fn attempts(&self) -> MutexGuard<'_, Vec<DecidedAttempt>> {
        self.attempts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the size of the record without its attempts, in bytes.
    pub(in crate::proxy) fn bytes(&self) -> usize {
        let labels = self.labels.iter();
        let labels =
            labels.map(|(key, value)| size_of::<(String, String)>() + key.len() + value.len());
        let texts = self.id.len() + self.path.len() + self.model.len() + self.user.as_str().len();
        let requested = self.requested.as_ref().map_or(0, |name| name.len());
        let marks = size_of_val(&*self.marks);
        size_of::<Self>() + texts + labels.sum::<usize>() + marks + requested
    }
}
