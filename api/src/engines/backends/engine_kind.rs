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

/// First release of SGLang that was seen to separate cached blocks by `cache_salt`.
const SGLANG_WITH_SALTS: [u32; 3] = [0, 5, 23];

/// Returns the release number at the start of a Python package's `version`; 0 for what is missing.
fn release(version: &str) -> [u32; 3] {
    let digits = |part: &str| {
        let end = part.find(|c: char| !c.is_ascii_digit());
        part[..end.unwrap_or(part.len())].parse().unwrap_or(0)
    };
    let mut parts = version.split('.').map(digits);
    std::array::from_fn(|_| parts.next().unwrap_or(0))
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

    /// Whether the engine separates cached blocks by `cache_salt`. vLLM does in all supported
    /// versions. `version` is the one that the engine reports, if any.
    #[must_use]
    pub fn knows_salts(self, version: Option<&str>) -> bool {
        match self {
            Self::Vllm => true,
            Self::Sglang => version.is_some_and(|it| release(it) >= SGLANG_WITH_SALTS),
            Self::LlamaCpp | Self::Dynamo => false,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn salts_separate_since_a_release() {
        let knows = |version| EngineKind::Sglang.knows_salts(version);
        for version in ["0.5.23", "0.5.23.post1", "0.5.100", "0.6.0rc1", "1.0"] {
            assert!(knows(Some(version)), "{version}");
        }
        for version in ["0.5.22.post3", "0.5.9", "0.4.30", "dev", ""] {
            assert!(!knows(Some(version)), "{version}");
        }
        assert!(!knows(None));
        assert!(EngineKind::Vllm.knows_salts(None));
        assert!(!EngineKind::LlamaCpp.knows_salts(Some("99.0")));
    }
}
