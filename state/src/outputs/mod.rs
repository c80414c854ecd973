//! Output lengths: how many tokens requests of a user to a model are expected to produce, and the
//! resulting bins.
//!
//! Replicas report the lengths of finished requests. `apply` keeps a fading histogram per model and
//! the last few lengths per user and model. Bins follow from the histogram. The digest and
//! snapshots contain all of it, so every replica predicts the same at the same log index.
//!
//! - [`histogram`]: a model's lengths, and the expectation of their tail.
//! - [`boundaries`]: bins of equal mass (Algorithm 6) and the bin of a request (Algorithm 4).
//! - [`batch`]: selection of the next bin and of its requests (Algorithms 5 and 3).
//! - [`theory`]: the benefit of bins where the requests of a batch end together.
//!
//! The algorithms are numbered as in docs/adr/0031, which also explains where and why this
//! implementation departs from the originals.

pub mod batch;
pub mod boundaries;
pub mod histogram;
#[cfg(test)]
mod literal;
mod model;
mod recent;
#[cfg(test)]
mod tests;
pub mod theory;

use std::collections::BTreeMap;
use std::sync::Arc;

use bincode::de::{BorrowDecoder, Decoder};
use bincode::enc::Encoder;
use bincode::error::{DecodeError, EncodeError};
use bincode::{BorrowDecode, Decode, Encode};
use serde::Serialize;

use crate::bounds::OUTPUTS_PER_ITEM_MAX;
use crate::encoding;
use crate::ids::{ModelKey, UserKey};
pub use boundaries::Boundaries;
pub use histogram::{Histogram, OUTPUT_TOKENS_MAX};
pub use model::ModelOutputs;
use recent::{Pairs, Recents};

/// Maximum number of models with lengths. Beyond it, the model observed longest ago is forgotten.
pub const MODELS_MAX: usize = 64;
/// Maximum number of pairs of user and model with lengths. Beyond it, the pair observed longest ago
/// is forgotten.
pub const PAIRS_MAX: usize = 16_384;
/// Maximum number of observations that is valid in a snapshot. No real count reaches it.
const CLOCK_MAX: u64 = u64::MAX / 2;
/// Predicted number of tokens if no length was seen and the request has no bound.
pub const TOKENS_UNKNOWN: u32 = 256;

/// Replicated state of output lengths.
#[derive(Debug, Clone, Default)]
pub(crate) struct Outputs {
    /// Number of observations, which orders models and pairs by their last one.
    clock: u64,
    models: BTreeMap<ModelKey, Arc<ModelOutputs>>,
    recents: Recents,
}

/// Published output lengths as of one log index.
#[derive(Debug, Clone, Default)]
pub struct OutputsView {
    models: BTreeMap<ModelKey, Arc<ModelOutputs>>,
    pairs: Pairs,
    /// Digest of `pairs`.
    pairs_digest: u128,
}

/// Expected length of a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Prediction {
    /// Expected number of output tokens, at least 1.
    pub tokens: u32,
    /// Basis of the prediction.
    pub basis: Basis,
}

/// Basis of a prediction, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Basis {
    /// Mean of the last five outputs of the user and model.
    User,
    /// Median of all outputs of the model.
    Model,
    /// Bound that the request itself sets.
    Bound,
    /// The default [`TOKENS_UNKNOWN`], because nothing is known.
    Unknown,
}

impl Outputs {
    /// Adds lengths of finished requests in the order in which they ended. `bins` is the configured
    /// number of bins. Returns whether the number of lengths was within its bounds.
    pub(crate) fn observe(
        &mut self,
        user: UserKey,
        model: ModelKey,
        tokens: &[u32],
        bins: u16,
    ) -> bool {
        if !(1..=OUTPUTS_PER_ITEM_MAX).contains(&tokens.len()) {
            return false;
        }
        self.clock += 1;
        if !self.models.contains_key(&model) && self.models.len() >= MODELS_MAX {
            self.forget_a_model();
        }
        let outputs = Arc::make_mut(self.models.entry(model).or_default());
        outputs.observe(tokens, bins, self.clock);
        self.recents.observe(user, model, tokens, self.clock);
        true
    }

    /// Recomputes the bins of every model, after their configured number changed to `bins`.
    pub(crate) fn rebin(&mut self, bins: u16) {
        for outputs in self.models.values_mut() {
            Arc::make_mut(outputs).rebin(bins);
        }
    }

    /// Returns the view to publish. Clones only references.
    pub(crate) fn view(&self) -> OutputsView {
        OutputsView {
            models: self.models.clone(),
            pairs: self.recents.pairs().clone(),
            pairs_digest: self.recents.digest(),
        }
    }

    /// Appends the output lengths to the digest input.
    pub(crate) fn append_digest(&self, bytes: &mut Vec<u8>) {
        let image = (self.clock, &self.models, self.recents.digest());
        encoding::append_bytes(&image, bytes);
    }

    /// Checks I20: bounds, bins, and order and digest of the pairs. An error describes the fault.
    pub(crate) fn check(&self) -> Result<(), String> {
        if self.clock > CLOCK_MAX {
            return Err(format!("{} observations were counted", self.clock));
        }
        if self.models.len() > MODELS_MAX {
            return Err(format!("{} models are kept", self.models.len()));
        }
        for (model, outputs) in &self.models {
            let is_sound = outputs.is_sound() && outputs.heard_at() <= self.clock;
            is_sound
                .then_some(())
                .ok_or_else(|| format!("the outputs of model {model} are not sound"))?;
        }
        self.recents.check(self.clock)
    }

    fn forget_a_model(&mut self) {
        let oldest = self.models.iter().map(|(key, it)| (it.heard_at(), *key));
        if let Some((_, model)) = oldest.min() {
            self.models.remove(&model);
        }
    }
}

impl OutputsView {
    /// Predicts the output tokens of the next request of `user` to `model`. `tokens_max` is the
    /// request's own bound, if any.
    #[must_use]
    pub fn predict(&self, user: UserKey, model: ModelKey, tokens_max: Option<u32>) -> Prediction {
        let bound = tokens_max.unwrap_or(OUTPUT_TOKENS_MAX).max(1);
        let by = |basis, tokens: u32| Prediction {
            tokens: tokens.clamp(1, bound),
            basis,
        };
        let of_user = || self.pairs.mean(user, model);
        let of_model = || self.models.get(&model)?.histogram().median();
        of_user()
            .map(|tokens| by(Basis::User, tokens))
            .or_else(|| of_model().map(|tokens| by(Basis::Model, tokens)))
            .or_else(|| tokens_max.map(|tokens| by(Basis::Bound, tokens)))
            .unwrap_or_else(|| by(Basis::Unknown, TOKENS_UNKNOWN))
    }

    /// Returns `predicted`, corrected by the output so far. A response that is as long as predicted
    /// is expected to reach the mean length of the model's outputs longer than `produced`.
    /// `tokens_max` is the request's own bound, if any. All lengths are in tokens.
    #[must_use]
    pub fn correct(
        &self,
        model: ModelKey,
        predicted: u32,
        produced: u32,
        tokens_max: Option<u32>,
    ) -> u32 {
        if produced < predicted {
            return predicted;
        }
        let outputs = self.models.get(&model);
        let beyond = outputs.and_then(|it| it.histogram().mean_beyond(produced));
        let bound = tokens_max.unwrap_or(u32::MAX).max(produced);
        beyond.unwrap_or(produced.saturating_add(1)).min(bound)
    }

    /// Returns the bins of `model`; a single bin if none have been computed.
    #[must_use]
    pub fn bins(&self, model: ModelKey) -> Boundaries {
        let outputs = self.models.get(&model);
        outputs.map_or_else(Boundaries::default, |it| it.boundaries().clone())
    }

    /// Returns the bin of an output of `tokens` tokens from `model`.
    #[must_use]
    pub fn bin_of(&self, model: ModelKey, tokens: u32) -> u16 {
        let outputs = self.models.get(&model);
        outputs.map_or(0, |it| it.boundaries().bin_of(tokens))
    }

    /// Returns the output lengths of `model`, if any were observed.
    #[must_use]
    pub fn model(&self, model: ModelKey) -> Option<&ModelOutputs> {
        self.models.get(&model).map(Arc::as_ref)
    }

    /// Iterates over the models with lengths, in ascending order of keys.
    pub fn models(&self) -> impl Iterator<Item = (ModelKey, &ModelOutputs)> {
        self.models.iter().map(|(key, it)| (*key, &**it))
    }

    /// Whether this view shows exactly `outputs`.
    pub(crate) fn is_of(&self, outputs: &Outputs) -> bool {
        self.models == outputs.models && self.pairs_digest == outputs.recents.digest()
    }

    /// Returns the number of pairs of user and model with lengths.
    #[must_use]
    pub fn pairs(&self) -> usize {
        self.pairs.len()
    }
}

impl Encode for Outputs {
    fn encode<E: Encoder>(&self, encoder: &mut E) -> Result<(), EncodeError> {
        self.clock.encode(encoder)?;
        self.models.encode(encoder)?;
        self.recents.encode(encoder)
    }
}

impl<C> Decode<C> for Outputs {
    fn decode<D: Decoder<Context = C>>(decoder: &mut D) -> Result<Self, DecodeError> {
        let outputs = Self {
            clock: Decode::decode(decoder)?,
            models: Decode::decode(decoder)?,
            recents: Decode::decode(decoder)?,
        };
        outputs.check().map_err(DecodeError::OtherString)?;
        Ok(outputs)
    }
}

impl<'de, C> BorrowDecode<'de, C> for Outputs {
    fn borrow_decode<D: BorrowDecoder<'de, Context = C>>(
        decoder: &mut D,
    ) -> Result<Self, DecodeError> {
        Decode::decode(decoder)
    }
}
