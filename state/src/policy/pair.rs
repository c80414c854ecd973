//! Disaggregated prefill and decode: decides whether to use two backends for a request, and which.
//!
//! One backend computes the prompt; another receives its KV cache and answers. The policy for whole
//! requests chooses both, each by its own work. The prefill side computes what it does not hold.
//! The decode side fetches what it does not hold, which costs a small share of computing it, and
//! then runs the request. So prefix and pending prefill count on the prefill side, load and memory
//! on the decode side. A decode backend that holds the prefix only saves transfer.

use bincode::{Decode, Encode};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Candidate, Choice, PolicyConfig, PolicyRequest, choose};

/// Number of transferred tokens that cost as much as one computed token. At 100 KB per token, 200
/// Gbit/s transfer some 200,000 tokens per second; an engine computes some 10,000.
const TRANSFERRED_PER_COMPUTED: u32 = 16;
/// Maximum factor by which a prompt may take longer at a prefill backend than at the best single
/// backend. Up to it, decoding without interruption is worth the delay.
const PATIENCE: u64 = 2;

/// When prompts go through a prefill backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Disaggregate {
    /// Never.
    Off,
    /// If enough of the prompt is not cached.
    #[default]
    Auto,
    /// If any prefill backend can take them.
    Always,
}

/// How a decode backend gets the KV cache of a prompt from the prefill backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema, Encode, Decode)]
#[serde(rename_all = "kebab-case")]
pub enum Handover {
    /// The decode backend fetches it with the parameters in the prefill backend's response, as with
    /// vLLM. Each backend can also serve whole requests alone.
    Answer,
    /// Both receive the request at once and find each other by the bootstrap room that it names, as
    /// with SGLang. Neither can serve a request alone.
    Room,
}

/// Candidates for prefill and for decode that share one kind of handover.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PairSides<'a> {
    /// Kind of handover that all of the backends use.
    pub handover: Handover,
    /// Backends that may compute the prompt.
    pub prefill: &'a [Candidate],
    /// Backends that may decode.
    pub decode: &'a [Candidate],
}

/// Disaggregation settings of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PairSettings {
    /// When prompts go through a prefill backend.
    pub disaggregate: Disaggregate,
    /// Number of uncached prompt tokens above which [`Disaggregate::Auto`] uses two backends.
    pub above_tokens: u32,
}

impl PairSettings {
    /// Default of [`PairSettings::above_tokens`].
    pub const ABOVE_TOKENS_DEFAULT: u32 = 512;
}

impl Default for PairSettings {
    fn default() -> Self {
        Self {
            disaggregate: Disaggregate::default(),
            above_tokens: Self::ABOVE_TOKENS_DEFAULT,
        }
    }
}

/// Reason why a request goes to a single backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema, Encode, Decode)]
#[serde(rename_all = "kebab-case")]
pub enum WholeReason {
    /// Its stages cannot be separated: it is no completion, has several prompts or choices, or
    /// skips the prefix cache.
    NotSeparable,
    /// The model's settings disable it.
    Off,
    /// Too few of its prompt tokens are uncached.
    Short,
    /// No prefill backend can take it.
    NoPrefill,
    /// The prefill backends are so busy that the backend that responds computes the prompt sooner.
    PrefillBusy,
    /// No decode backend can take it.
    NoDecode,
}

/// Choice of two backends for one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BackendPair {
    /// Kind of handover that both backends use.
    pub handover: Handover,
    /// Choice of the backend that computes the prompt.
    pub prefill: Choice,
    /// Choice of the backend that decodes.
    pub decode: Choice,
}

/// Decides whether a request that would otherwise go to `whole` should use two backends.
///
/// # Errors
/// The reason for using a single backend.
pub fn is_worth_two(
    settings: &PairSettings,
    request: &PolicyRequest,
    whole: Choice,
) -> Result<(), WholeReason> {
    match settings.disaggregate {
        Disaggregate::Off => Err(WholeReason::Off),
        Disaggregate::Always => Ok(()),
        Disaggregate::Auto => {
            let uncached = request.uncached_tokens(whole.matched);
            match uncached > u64::from(settings.above_tokens) {
                true => Ok(()),
                false => Err(WholeReason::Short),
            }
        }
    }
}

/// Chooses a prefill and a decode backend, both from the same one of the `sides`, for a request
/// that would otherwise go to `whole` (`None` if no backend can do all of it). The order of
/// candidates does not matter.
///
/// # Errors
/// The reason why one backend is better, or why no pair is available.
pub fn choose_pair(
    policy: &PolicyConfig,
    request: &PolicyRequest,
    (settings, whole): (&PairSettings, Option<&Candidate>),
    sides: &[PairSides<'_>],
) -> Result<BackendPair, WholeReason> {
    let mut complete = sides.iter().filter(|side| !side.decode.is_empty());
    let computing = complete.clone().flat_map(|side| side.prefill);
    let computing: Vec<Candidate> = computing.copied().collect();
    let Some(prefill) = choose(policy, request, &computing) else {
        let is_any = sides.iter().any(|side| !side.prefill.is_empty());
        return Err(match is_any {
            true => WholeReason::NoDecode,
            false => WholeReason::NoPrefill,
        });
    };
    let is_chosen = |candidate: &&Candidate| candidate.slot == prefill.slot;
    let mut chosen = computing.iter().filter(is_chosen);
    let is_patient = settings.disaggregate == Disaggregate::Always;
    if let Some(whole) = whole.filter(|_| !is_patient)
        && chosen.any(|chosen| request.takes_too_long(chosen, whole))
    {
        return Err(WholeReason::PrefillBusy);
    }
    let side = complete.find(|side| side.prefill.iter().any(|it| is_chosen(&it)));
    let side = side.ok_or(WholeReason::NoPrefill)?;
    let decode = choose(policy, &request.fetched(), side.decode).ok_or(WholeReason::NoDecode)?;
    Ok(BackendPair {
        handover: side.handover,
        prefill,
        decode,
    })
}

impl PolicyRequest {
    /// Whether `prefill` would take more than [`PATIENCE`] times as long as `whole` to compute the
    /// prompt.
    fn takes_too_long(&self, prefill: &Candidate, whole: &Candidate) -> bool {
        let ahead = |candidate: &Candidate| {
            let own = self.uncached_tokens(candidate.matched);
            candidate.pending_prefill_tokens.saturating_add(own)
        };
        ahead(prefill) > ahead(whole).saturating_mul(PATIENCE)
    }

    /// Returns the request as the decode side sees it: missing tokens are fetched, not computed.
    #[must_use]
    pub fn fetched(&self) -> Self {
        let cheaper = |tokens: u32| tokens.div_ceil(TRANSFERRED_PER_COMPUTED);
        Self {
            tokens: cheaper(self.tokens),
            tokens_per_block: cheaper(self.tokens_per_block),
            ..*self
        }
    }
}
