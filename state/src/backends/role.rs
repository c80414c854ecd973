//! The stage of a request that a backend computes: prefill, decode, or both.

use bincode::{Decode, Encode};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Stage of a request that a backend computes.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Default, Encode, Decode, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum BackendRole {
    /// Whole requests.
    #[default]
    Both,
    /// Prompts. Their KV cache goes to a backend that decodes.
    Prefill,
    /// Responses, to prompts computed elsewhere or here.
    Decode,
}

impl BackendRole {
    /// All roles.
    pub const ALL: [Self; 3] = [Self::Both, Self::Prefill, Self::Decode];

    /// Returns the name used in config and admin API.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Both => "both",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}
