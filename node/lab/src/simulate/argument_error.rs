//! Errors in arguments.

/// Arguments that do not fit together, or a trace that cannot be read: exit code 2.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct SimulateArgsError(String);

impl SimulateArgsError {
    /// Creates an error with this message.
    pub(super) fn new(words: impl Into<String>) -> Self {
        Self(words.into())
    }
}
