//! Why TLS cannot be set up, as an operator needs it: setting, file, fault, what was expected.

/// A setting of which no TLS config can be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{problem}; expected {expected}")]
pub struct TlsSetupError {
    /// The key of the config, such as `tls.data.cert_file`.
    pub key: String,
    /// What is wrong, with the key and the file.
    pub problem: String,
    /// What would be right.
    pub expected: String,
}
