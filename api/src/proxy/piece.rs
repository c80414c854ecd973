//! Pieces of an answer's body, as they pass from the engine to the client.

use bytes::Bytes;

use crate::backends::pool::SendError;

/// A piece of an answer, or why there is no more of it.
pub(super) type AnswerPiece = Result<Bytes, ResponseBodyError>;

/// Why an answer is cut short. The connection to the client is closed then, so that the client does
/// not take the part for the whole.
#[derive(Debug, thiserror::Error)]
pub enum ResponseBodyError {
    /// The engine's connection broke.
    #[error("backend broke off: {0}")]
    Engine(#[from] SendError),
    /// The engine sent nothing for too long.
    #[error("backend fell silent")]
    Silent,
    /// The engine's connection ended in a way that leaves open whether the answer was complete, and
    /// the answer does not look complete.
    #[error("answer ended before its end")]
    Unfinished,
    /// The client read nothing for too long.
    #[error("client does not take the answer")]
    Untaken,
    /// An error answer exceeded its size limit.
    #[error("error answer is too long")]
    TooLong,
}
