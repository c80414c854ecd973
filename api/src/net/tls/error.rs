//! Errors in the TLS setup for operators: the setting, the file, the fault and the expectation.

/// Error in a setting from which no TLS config can be built.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{problem}; expected {expected}")]
pub struct TlsSetupError {
    /// Key of the config, such as `tls.data.cert_file`.
    pub key: String,
    /// Description of the fault, with the key and the file.
    pub problem: String,
    /// Description of a valid value or file.
    pub expected: String,
}
