//! The model's bytes per token: sums of the reports, in which old reports lose weight.

use std::collections::BTreeMap;

use state::ids::ModelKey;
use state::ratios::TextSample;

/// Maximum number of tokens that count per model. `TOKENS_EACH` is the maximum per report.
const TOKENS: u64 = 65_536;
const TOKENS_EACH: u64 = 16_384;
/// Maximum number of remembered models.
const MODELS: usize = 256;

/// Sums of bytes and of tokens by model, the most recently reported model last.
#[derive(Debug, Clone, Default)]
pub struct ModelTexts(Vec<(ModelKey, u64, u64)>);

impl ModelTexts {
    pub(super) fn observe(&mut self, sample: &TextSample) {
        let (bytes, tokens) = (u128::from(sample.bytes), u128::from(sample.tokens));
        let is_text = tokens > 0 && 2 * bytes >= tokens && bytes <= 16 * tokens;
        if !is_text || bytes > 1 << 40 {
            return;
        }
        let known = self.0.iter().position(|(model, ..)| *model == sample.model);
        let (_, bytes, tokens) = match known {
            Some(at) => self.0.remove(at),
            None => (sample.model, 4096, 1024),
        };
        if self.0.len() == MODELS {
            self.0.remove(0);
        }
        let (more, more_tokens) = at_most(sample.bytes, sample.tokens, TOKENS_EACH);
        let (bytes, tokens) = at_most(bytes + more, tokens + more_tokens, TOKENS);
        self.0.push((sample.model, bytes, tokens));
    }

    /// Returns the number of bytes per token by model, in thousandths.
    #[must_use]
    pub fn ratios(&self) -> BTreeMap<ModelKey, u32> {
        let each = self.0.iter().map(|(model, bytes, tokens)| {
            let milli = (2000 * bytes + tokens) / (2 * tokens);
            (*model, u32::try_from(milli).unwrap_or(u32::MAX))
        });
        each.map(|(model, milli)| (model, milli.clamp(500, 16_000)))
            .collect()
    }
}

fn at_most(bytes: u64, tokens: u64, most: u64) -> (u64, u64) {
    if tokens <= most {
        return (bytes, tokens);
    }
    let kept = u128::from(bytes) * u128::from(most) / u128::from(tokens);
    (u64::try_from(kept).unwrap_or(u64::MAX), most)
}
