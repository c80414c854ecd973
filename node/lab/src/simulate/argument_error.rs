//! Error about the arguments of `quorate simulate`.

/// Message about conflicting arguments or an unreadable trace. The exit code is 2.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct SimulateArgsError(String);

impl SimulateArgsError {
    /// Creates an error with the message `words`.
    pub(super) fn new(words: impl Into<String>) -> Self {
        Self(words.into())
    }
}
