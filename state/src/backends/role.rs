//! The stage of a request that a backend computes: prefill, decode, or both.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Stage of a request that a backend computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
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

/// Label that encodes the role. Builds without roles treat it as any other label (ADR 0028).
const ROLE_LABEL: &str = "quorate.role";

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

    /// Whether a label encodes a role.
    pub(super) fn is_label(name: &str, value: &str) -> bool {
        name == ROLE_LABEL && Self::of_label(value).is_some()
    }

    /// Adds the label of the role to encoded labels, except for `both`.
    pub(super) fn put_into(self, labels: &mut BTreeMap<String, String>) {
        if self != Self::Both {
            labels.insert(ROLE_LABEL.to_owned(), self.label().to_owned());
        }
    }

    /// Removes the role's label from encoded labels and returns the role. Keeps other values.
    pub(super) fn take_from(labels: &mut BTreeMap<String, String>) -> Self {
        let Some(role) = labels.get(ROLE_LABEL).and_then(|it| Self::of_label(it)) else {
            return Self::Both;
        };
        labels.remove(ROLE_LABEL);
        role
    }

    fn of_label(value: &str) -> Option<Self> {
        let roles = [Self::Prefill, Self::Decode];
        roles.into_iter().find(|role| role.label() == value)
    }
}
