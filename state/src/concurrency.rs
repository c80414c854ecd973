//! [`Concurrency`]: how many requests a backend may run at once, as an operator sets it.

use bincode::{Decode, Encode};
use serde::{Deserialize, Serialize};

/// Limit on the requests that a backend runs at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Concurrency {
    /// The limit is learned per backend from memory and service level.
    Adaptive,
    /// The number of requests is unlimited.
    Unlimited,
    /// The limit is this number of requests.
    Fixed(u32),
}
