//! Goes on with a stream whose engine has failed, at another engine, without a seam.
//!
//! The router keeps the text that the client has received ([`RelayedText`]). When the engine fails,
//! it asks another one to continue that text ([`continued_body`]), and rewrites its events into ones
//! of the first stream ([`Seam`]): the client sees one id, one beginning and the usage of one answer.
//!
//! That is done only where the second engine goes on exactly where the first one stopped. An
//! [`ContinueRejection`] says what is in the way; the stream then ends with an error event. The idea is that of
//! Dynamo's request migration (its guide to fault tolerance), which continues by
//! token ids.

mod body;
mod claim;
mod event_id;
mod relayed;
mod seam;

use std::future::Future;
use std::pin::Pin;

use bytes::Bytes;
use state::ids::Slot;

pub(in crate::proxy) use self::body::{
    COMPLETION_TOKENS, ContinuedBody, continued_body, may_continue,
};
pub(in crate::proxy) use self::claim::{ResumeClaim, is_resumable, take_claim};
pub(in crate::proxy) use self::event_id::{EventId, EventIdKey, EventIdSignature, EventIds};
pub(in crate::proxy) use self::relayed::{ReceivedAnswer, RelayedText};
pub(in crate::proxy) use self::seam::Seam;
use crate::engines::backends::pool::EngineBody;
use crate::proxy::limits::poison_requests::WatchedRequest;
use crate::proxy::record::broken_streams::BreakResult;
use crate::routing::{Attempt, AttemptEnd};

/// Reason why a stream does not go on at another engine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(in crate::proxy) enum ContinueRejection {
    /// The request has a field with which an answer cannot be continued exactly.
    #[error("an answer with the field {0:?} cannot be continued")]
    Field(String),
    /// The prompt is not text.
    #[error("only the answer to a prompt of text can be continued")]
    TokenPrompt,
    /// The client has received output other than text: a tool call, reasoning, a further choice.
    #[error("only text can be continued")]
    OtherOutput,
    /// The client has received more than `streams.resume_max_tokens`.
    #[error("the answer is longer than streams.resume_max_tokens")]
    TooLong,
    /// Chat templates may change the text when it is sent back.
    #[error("chat templates may change such a text")]
    Template,
    /// The engine does not report usage while it streams, so that nothing would show whether another
    /// one continues the message.
    #[error("the backend reports no usage while it streams")]
    NoUsage,
    /// All tokens that the request allows were generated.
    #[error("the answer had reached its maximum length")]
    AtLimit,
    /// The client has received the beginning of an event.
    #[error("an event was incomplete")]
    IncompleteEvent,
    /// The request has broken two engines.
    #[error("the request has broken two backends")]
    BreaksBackends,
    /// The request was tried on `retry.attempts` backends, or the retry budget is used up.
    #[error("no further attempt is allowed")]
    NoAttempts,
    /// Too many streams move at once.
    #[error("too many streams move at once")]
    TooManyMoves,
    /// No other backend took the request.
    #[error("no other backend took the request")]
    NoBackend,
    /// The next engine refused the request with this status.
    #[error("the next backend refused to go on with status {0}")]
    Refused(u16),
    /// The next engine began a new answer.
    #[error("the next backend did not continue the answer")]
    NotContinued,
}

impl From<&ContinueRejection> for BreakResult {
    fn from(obstacle: &ContinueRejection) -> Self {
        match obstacle {
            ContinueRejection::Field(_) => Self::FIELD,
            ContinueRejection::TokenPrompt => Self::TOKEN_PROMPT,
            ContinueRejection::OtherOutput => Self::OTHER_OUTPUT,
            ContinueRejection::TooLong => Self::TOO_LONG,
            ContinueRejection::Template => Self::TEMPLATE,
            ContinueRejection::NoUsage => Self::NO_USAGE,
            ContinueRejection::AtLimit => Self::AT_LIMIT,
            ContinueRejection::IncompleteEvent => Self::INCOMPLETE_EVENT,
            ContinueRejection::BreaksBackends => Self::BREAKS_BACKENDS,
            ContinueRejection::NoAttempts => Self::NO_ATTEMPTS,
            ContinueRejection::TooManyMoves => Self::TOO_MANY_MOVES,
            ContinueRejection::NoBackend => Self::NO_BACKEND,
            ContinueRejection::Refused(_) => Self::REFUSED,
            ContinueRejection::NotContinued => Self::NOT_CONTINUED,
        }
    }
}

/// An answer that goes on.
pub(in crate::proxy) struct ContinuedAnswer {
    /// The next engine's stream.
    pub(in crate::proxy) body: EngineBody,
    pub(in crate::proxy) attempt: Attempt,
    /// Slot of the next backend.
    pub(in crate::proxy) slot: Slot,
    pub(in crate::proxy) watched: WatchedRequest,
    /// Seam of the stream; `None` if the client has received nothing.
    pub(in crate::proxy) seam: Option<Seam>,
    /// First events of the next engine, which continue the stream.
    pub(in crate::proxy) first: Bytes,
}

/// The attempt at an answer that is to go on elsewhere.
pub(in crate::proxy) enum PresentAttempt<'a> {
    /// The backend has failed. The attempt ends thus.
    Failed(Attempt, AttemptEnd),
    /// The backend pauses, and may go on.
    Pausing(&'a Attempt),
    /// The backend drains, and goes on until another one does.
    Moving(&'a Attempt),
}

/// Future of an answer that goes on.
pub(in crate::proxy) type PendingContinuation =
    Pin<Box<dyn Future<Output = Result<ContinuedAnswer, ContinueRejection>> + Send>>;

/// Sends requests that continue an answer.
pub(in crate::proxy) trait Continuer: Send {
    /// Returns the body of the request that continues what was `relayed` from the backend in `slot`.
    /// A stream that `moves` has not failed, so its attempts do not count.
    fn body(
        &self,
        relayed: &RelayedText,
        slot: Slot,
        moves: bool,
    ) -> Result<ContinuedBody, ContinueRejection>;

    /// Sends `body` to another backend than that in `slot`.
    fn go_on(
        &mut self,
        from: (PresentAttempt<'_>, Slot),
        body: ContinuedBody,
        relayed: &RelayedText,
    ) -> Result<PendingContinuation, ContinueRejection>;

    /// Whether the streams of the backend in `slot` are to move, and one more may do so now.
    fn is_moving(&self, slot: Slot) -> bool;
}
