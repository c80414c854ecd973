//! Kinds of engines, by the names that they give themselves.

use std::fmt;

use schemars::JsonSchema;
use serde::Serialize;

/// Server software that runs a backend's model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum EngineKind {
    /// vLLM.
    Vllm,
    /// SGLang.
    Sglang,
    /// llama.cpp.
    #[serde(rename = "llama.cpp")]
    LlamaCpp,
    /// A frontend of Dynamo, together with the workers behind it.
    Dynamo,
}

impl EngineKind {
    /// Returns the engine called `name`, as the owner of its models or the prefix of its metrics;
    /// `None` if no engine is.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "vllm" => Some(Self::Vllm),
            "sglang" => Some(Self::Sglang),
            "llamacpp" => Some(Self::LlamaCpp),
            _ => None,
        }
    }

    /// Returns the metric label with a sample's data-parallel rank; `None` if the engine has none.
    pub(super) fn rank_label(self) -> Option<&'static str> {
        match self {
            Self::Vllm => Some("engine"),
            Self::Sglang => Some("dp_rank"),
            Self::LlamaCpp | Self::Dynamo => None,
        }
    }

    /// Returns the engine that exports `metric`, according to the prefix of its name; `None` if
    /// unknown.
    pub(super) fn of(metric: &str) -> Option<Self> {
        match metric.split_once(':') {
            Some((name, _)) => Self::named(name),
            None => metric
                .starts_with("dynamo_frontend_")
                .then_some(Self::Dynamo),
        }
    }

    /// Whether the engine separates cached blocks by `cache_salt` in all supported versions.
    #[must_use]
    pub fn knows_salts(self) -> bool {
        match self {
            Self::Vllm => true,
            Self::Sglang | Self::LlamaCpp | Self::Dynamo => false,
        }
    }
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Vllm => "vllm",
            Self::Sglang => "sglang",
            Self::LlamaCpp => "llama.cpp",
            Self::Dynamo => "dynamo",
        })
    }
}
