//! Bytes per token of each model's prompts, learned from the token counts of engines.
//!
//! A text prompt whose tokens are unknown gets an estimated token count, which enters routing
//! scores. Replicas report sums over finished requests, and `apply` learns the ratio from them. All
//! replicas thus make the same estimate at the same log index, and a restart loses nothing.
//!
//! A ratio is the quotient of two decaying integer sums, so it adapts to a lasting change within
//! tens of thousands of tokens. One report counts for at most a quarter of the tokens kept.

use std::collections::BTreeMap;

use bincode::{Decode, Encode};
use serde::Serialize;

use crate::ids::ModelKey;

/// Number of bytes per token before any report.
pub const BYTES_PER_TOKEN: u32 = 4;
/// Maximum number of models with a learned ratio. Beyond it, the model reported longest ago is
/// forgotten.
pub const RATIOS_MAX: usize = 256;
/// Minimum and maximum plausible ratio, in thousandths. A ratio outside comes from an image, or
/// from a prompt of which only a part was measured.
pub const RATIO_MILLI_BYTES: (u64, u64) = (500, 16_000);
/// Maximum number of bytes in one report.
pub const TEXT_BYTES_MAX: u64 = 1 << 40;
/// Maximum sum of tokens. Beyond it, both sums are scaled down, so that older tokens decay.
const TOKENS_KEPT: u64 = 65_536;
/// Maximum number of tokens for which one report counts.
const TOKENS_PER_SAMPLE: u64 = TOKENS_KEPT / 4;
/// Weight of the default ratio, in tokens. It decays like the tokens of reports.
const TOKENS_PRIOR: u64 = 1024;
/// Maximum number of reports that is valid in a snapshot. No real count reaches it.
const CLOCK_MAX: u64 = u64::MAX / 2;

/// Bytes per token of one model's prompts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct TokenRatio {
    milli_bytes: u32,
}

impl Default for TokenRatio {
    fn default() -> Self {
        let milli_bytes = BYTES_PER_TOKEN * 1000;
        Self { milli_bytes }
    }
}

impl TokenRatio {
    /// Returns the bytes per token, in thousandths.
    #[must_use]
    pub fn milli_bytes(self) -> u32 {
        self.milli_bytes
    }

    /// Returns the number of tokens in `bytes` bytes, rounded up.
    #[must_use]
    pub fn tokens(self, bytes: usize) -> u32 {
        let tokens = (bytes as u128 * 1000).div_ceil(self.milli_bytes.into());
        u32::try_from(tokens).unwrap_or(u32::MAX)
    }

    /// Returns the number of tokens in one block of `bytes` bytes, rounded to nearest, at least 1.
    /// With rounding up, many blocks would add up to more than their prompt.
    #[must_use]
    pub fn block_tokens(self, bytes: usize) -> u32 {
        let half = u128::from(self.milli_bytes / 2);
        let tokens = (bytes as u128 * 1000 + half) / u128::from(self.milli_bytes);
        u32::try_from(tokens).unwrap_or(u32::MAX).max(1)
    }
}

/// Sums of one replica for one model over the requests finished since its last report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
pub struct TextSample {
    /// Model to which the prompts were sent.
    pub model: ModelKey,
    /// Number of bytes in the text of the prompts.
    pub bytes: u64,
    /// Number of tokens that engines counted in the prompts.
    pub tokens: u64,
}

impl TextSample {
    /// Whether the sums are within bounds and their ratio is plausible for text.
    #[must_use]
    pub fn is_plausible(&self) -> bool {
        let (least, most) = RATIO_MILLI_BYTES;
        let milli_bytes = u128::from(self.bytes) * 1000;
        let tokens = u128::from(self.tokens);
        self.tokens > 0
            && self.bytes <= TEXT_BYTES_MAX
            && (tokens * u128::from(least)..=tokens * u128::from(most)).contains(&milli_bytes)
    }
}

/// Decayed sums of one model, whose quotient is the ratio.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
struct LearntRatio {
    bytes: u64,
    tokens: u64,
    /// Value of the report count (`LearntRatios::clock`) at the model's last report.
    heard_at: u64,
}

impl LearntRatio {
    fn new() -> Self {
        Self {
            bytes: TOKENS_PRIOR * u64::from(BYTES_PER_TOKEN),
            tokens: TOKENS_PRIOR,
            heard_at: 0,
        }
    }

    fn observe(&mut self, sample: &TextSample) {
        let (bytes, tokens) = scaled(sample.bytes, sample.tokens, TOKENS_PER_SAMPLE);
        let (bytes, tokens) = (self.bytes + bytes, self.tokens + tokens);
        (self.bytes, self.tokens) = scaled(bytes, tokens, TOKENS_KEPT);
    }

    fn ratio(&self) -> TokenRatio {
        let (least, most) = RATIO_MILLI_BYTES;
        let milli_bytes = (self.bytes * 1000 + self.tokens / 2) / self.tokens.max(1);
        TokenRatio {
            // The bounds fit 32 bits.
            milli_bytes: milli_bytes.clamp(least, most) as u32,
        }
    }

    fn is_sound(&self) -> bool {
        let most = TOKENS_KEPT * (RATIO_MILLI_BYTES.1 / 1000);
        (1..=TOKENS_KEPT).contains(&self.tokens) && self.bytes <= most
    }
}

/// Scales both sums down by one factor, to at most `tokens_max` tokens.
fn scaled(bytes: u64, tokens: u64, tokens_max: u64) -> (u64, u64) {
    if tokens <= tokens_max {
        return (bytes, tokens);
    }
    let bytes = u128::from(bytes) * u128::from(tokens_max) / u128::from(tokens);
    (u64::try_from(bytes).unwrap_or(u64::MAX), tokens_max)
}

/// Learned ratios of all models.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
pub(crate) struct LearntRatios {
    /// Number of reports, which orders models by their last one.
    clock: u64,
    by_model: BTreeMap<ModelKey, LearntRatio>,
}

impl LearntRatios {
    /// Adds a report and returns whether it was plausible.
    pub(crate) fn observe(&mut self, sample: &TextSample) -> bool {
        if !sample.is_plausible() {
            return false;
        }
        self.clock += 1;
        let is_new = !self.by_model.contains_key(&sample.model);
        if is_new && self.by_model.len() >= RATIOS_MAX {
            let oldest = self.by_model.iter().min_by_key(|(_, it)| it.heard_at);
            if let Some(oldest) = oldest.map(|(model, _)| *model) {
                self.by_model.remove(&oldest);
            }
        }
        let learnt = self
            .by_model
            .entry(sample.model)
            .or_insert_with(LearntRatio::new);
        learnt.observe(sample);
        learnt.heard_at = self.clock;
        true
    }

    /// Returns the view to publish.
    pub(crate) fn view(&self) -> RatiosView {
        let ratios = self.by_model.iter().map(|(model, it)| (*model, it.ratio()));
        RatiosView(ratios.collect())
    }

    /// Checks I74: all values are within their bounds. An error describes the first violation.
    pub(crate) fn check(&self) -> Result<(), String> {
        if self.clock > CLOCK_MAX || self.by_model.len() > RATIOS_MAX {
            let models = self.by_model.len();
            return Err(format!("ratios of {models} models, {} reports", self.clock));
        }
        let is_sound = |it: &LearntRatio| it.is_sound() && it.heard_at <= self.clock;
        match self.by_model.iter().find(|(_, it)| !is_sound(it)) {
            Some((model, it)) => Err(format!("model {model} has {it:?}")),
            None => Ok(()),
        }
    }
}

/// Published ratios as of one log index.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RatiosView(BTreeMap<ModelKey, TokenRatio>);

impl RatiosView {
    /// Returns the ratio of `model`, or the default if none was learned.
    #[must_use]
    pub fn of(&self, model: ModelKey) -> TokenRatio {
        self.0.get(&model).copied().unwrap_or_default()
    }

    /// Iterates over the models with a learned ratio, in ascending order of keys.
    pub fn iter(&self) -> impl Iterator<Item = (ModelKey, TokenRatio)> {
        self.0.iter().map(|(model, ratio)| (*model, *ratio))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(model: u64, bytes: u64, tokens: u64) -> TextSample {
        let model = ModelKey(model);
        TextSample {
            model,
            bytes,
            tokens,
        }
    }

    #[test]
    fn token_estimates_round_up_or_down_by_use() {
        let ratio = TokenRatio { milli_bytes: 3500 };
        assert_eq!([0, 1, 7, 8].map(|bytes| ratio.tokens(bytes)), [0, 1, 2, 3]);
        let blocks = [0, 5, 6, 128].map(|bytes| ratio.block_tokens(bytes));
        assert_eq!(blocks, [1, 1, 2, 37]);
        assert_eq!(ratio.tokens(usize::MAX), u32::MAX);
        assert_eq!(TokenRatio::default().tokens(400), 100);
    }

    #[test]
    fn bytes_per_token_follow_engine_counts() {
        let mut ratios = LearntRatios::default();
        let learnt = |ratios: &LearntRatios| ratios.view().of(ModelKey(1)).milli_bytes();
        assert_eq!(learnt(&ratios), 4000);
        for _ in 0..40 {
            assert!(ratios.observe(&sample(1, 20_000, 10_000)));
        }
        assert!((2000..2020).contains(&learnt(&ratios)), "{ratios:?}");
        // A flood of tokens in one report counts for a quarter of the tokens kept.
        assert!(ratios.observe(&sample(1, 6 << 30, 1 << 30)));
        assert!((2700..2900).contains(&learnt(&ratios)), "{ratios:?}");
        for _ in 0..40 {
            ratios.observe(&sample(1, 6000, 1000));
        }
        assert!(learnt(&ratios) > 4000, "{ratios:?}");
        assert_eq!(ratios.view().of(ModelKey(2)), TokenRatio::default());
        assert_eq!(ratios.check(), Ok(()));
    }

    #[test]
    fn implausible_samples_teach_no_bytes_per_token() {
        let mut ratios = LearntRatios::default();
        for (bytes, tokens) in [(0, 0), (5, 0), (0, 5), (1000, 2001), (16_001, 1000)] {
            assert!(!ratios.observe(&sample(1, bytes, tokens)), "{bytes}");
        }
        assert!(!ratios.observe(&sample(1, u64::MAX, u64::MAX)));
        assert_eq!(ratios, LearntRatios::default());
    }

    #[test]
    fn the_least_recently_observed_model_is_forgotten() {
        let mut ratios = LearntRatios::default();
        for model in 0..RATIOS_MAX as u64 {
            ratios.observe(&sample(model, 2000, 1000));
        }
        ratios.observe(&sample(0, 2000, 1000));
        ratios.observe(&sample(1_000_000, 2000, 1000));
        let known: Vec<u64> = ratios.view().iter().map(|(model, _)| model.0).collect();
        assert_eq!(known.len(), RATIOS_MAX);
        assert!(known.contains(&0) && !known.contains(&1));
        assert_eq!(ratios.check(), Ok(()));
    }
}
