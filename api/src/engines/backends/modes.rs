//! Engines' reports of the stage that they compute: prefill, decode or both.

use serde::{Deserialize, Serialize};

/// Maximum length of a mode's name to keep, in bytes.
const MODE_BYTES_MAX: usize = 64;

/// Facts from an engine's `/server_info` about the stage that it computes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DisaggregationFacts {
    /// `prefill`, `decode`, or `null` if it computes whole requests.
    #[serde(rename(deserialize = "disaggregation_mode"))]
    pub mode: String,
    /// Port of the engine's bootstrap server; `None` if it reports none.
    #[serde(default, rename(deserialize = "disaggregation_bootstrap_port"))]
    pub bootstrap_port: Option<u16>,
}

impl DisaggregationFacts {
    /// Parses a response to `GET /server_info`; `None` if it contains no mode.
    pub(super) fn read(answer: &[u8]) -> Option<Self> {
        let facts: Self = serde_json::from_slice(answer).ok()?;
        (facts.mode.len() <= MODE_BYTES_MAX).then_some(facts)
    }

    /// Whether the engine computes only one stage.
    pub(super) fn is_apart(&self) -> bool {
        self.mode != "null"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disaggregation_mode_and_port_are_read() {
        let read = |answer: &str| {
            let facts = DisaggregationFacts::read(answer.as_bytes())?;
            Some((facts.is_apart(), facts.bootstrap_port))
        };
        let answer = r#"{"model_path":"m","disaggregation_mode":"prefill","disaggregation_bootstrap_port":9001}"#;
        assert_eq!(read(answer), Some((true, Some(9001))));
        let whole = r#"{"disaggregation_mode":"null","disaggregation_bootstrap_port":8998}"#;
        assert_eq!(read(whole), Some((false, Some(8998))));
        assert_eq!(
            read(r#"{"disaggregation_mode":"decode"}"#),
            Some((true, None))
        );
        for none in ["{}", "no JSON", r#"{"disaggregation_mode":null}"#] {
            assert_eq!(read(none), None, "{none}");
        }
    }
}
