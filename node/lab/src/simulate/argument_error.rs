//! What is wrong with arguments.

/// Arguments that do not fit together, or a trace that cannot be read: exit code 2.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct SimulateArgsError(String);

impl SimulateArgsError {
    /// With these words.
    pub(super) fn new(words: impl Into<String>) -> Self {
        Self(words.into())
    }
}
