//! Pieces of a response body on their way from the engine to the client.

use bytes::Bytes;

use crate::engines::backends::pool::SendError;

/// A piece of a response, or the reason why no more follows.
pub(super) type AnswerPiece = Result<Bytes, ResponseBodyError>;

/// Reason why a response is cut short. The connection to the client is then closed, so that the
/// client does not mistake the part for the whole.
#[derive(Debug, thiserror::Error)]
pub enum ResponseBodyError {
    /// The engine's connection broke.
    #[error("the backend closed the connection: {0}")]
    Engine(#[from] SendError),
    /// The engine sent nothing for too long.
    #[error("the backend stopped sending")]
    Silent,
    /// The engine's connection ended without showing whether the response was complete, and the
    /// response does not look complete.
    #[error("the response ended prematurely")]
    Unfinished,
    /// The engine reported an error in its stream. The stream may go on at another engine.
    #[error("the backend reported an error")]
    Reported,
    /// The backend drains, and its streams go on elsewhere.
    #[error("the streams of the backend move")]
    Moved,
    /// The engine that was to continue the response began another one.
    #[error("the next backend did not continue the response")]
    NotContinued,
    /// Another request carries the stream on.
    #[error("another request has taken the stream over")]
    TakenOver,
    /// The client read nothing for too long.
    #[error("the client does not read the response")]
    Untaken,
}
