//! Why a request to an engine got no response.

use std::io;

use super::informational::INFORMATIONAL_MAX;
use super::local_failure::is_local;
use super::url::EngineUrlError;

/// Reason why an engine gave no response.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// The backend's URL cannot be used.
    #[error("backend url {0:?}: {1}")]
    Url(String, EngineUrlError),
    /// No connection could be established, so nothing reached the engine.
    #[error("connect: {0}")]
    Connect(#[source] io::Error),
    /// The engine did not read all of the request, and this process lacked resources for another
    /// connection.
    #[error("connect again: {0}")]
    NotRepeated(#[source] io::Error),
    /// The connection broke, or its content was not HTTP. The engine may have started the request.
    #[error("exchange: {0}")]
    Broke(#[source] hyper::Error),
    /// The backend was removed or replaced after it was chosen.
    #[error("backend is gone")]
    Gone,
    /// The connection ended without a response or an error.
    #[error("exchange: connection ended")]
    Ended,
    /// The engine sent too many informational responses (1xx).
    #[error("exchange: more than {INFORMATIONAL_MAX} informational responses")]
    Informational,
    /// This engine depends for its response on another engine, which failed.
    #[error("exchange: the engine that computes the prompt failed")]
    WithoutPrompt,
}

impl SendError {
    /// Whether this process lacked resources for a connection, so that the engine did not get the
    /// request, or not all of it.
    #[must_use]
    pub fn is_local(&self) -> bool {
        match self {
            Self::Connect(error) => is_local(error),
            Self::NotRepeated(_) => true,
            _ => false,
        }
    }
}
