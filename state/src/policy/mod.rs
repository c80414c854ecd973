//! Routing policies: pure functions from (request, candidates) to a choice with its reasons.
//!
//! A policy sees only what stands in [`PolicyRequest`] and [`Candidate`]; who gathers them (match, load,
//! health) does so the same way for every policy, and what only some policies look at is gathered
//! only for these ([`PolicyConfig::needs`]). Ties among near-equal scores are broken by the
//! request's `jitter`, a hash of its id: without it simultaneous arrivals herd. Integers only, so
//! that a decision repeats bit for bit anywhere.
//!
//! A policy is one file (settings, bounds, how it ranks a candidate), named by `mod` and by one
//! entry of the table below; picking, near-equality and jitter are the same for all (`rank`).
//! docs/reference/policies.md says what each one does and where it comes from.

mod chwbl;
mod cost;
mod epp;
mod least_kv;
mod least_request;
mod lmetric;
mod power_of_two;
mod preble_e2;
mod prefix_cache;
mod random;
mod rank;
mod round_robin;
mod session;
#[cfg(test)]
mod tests;
mod vllm_cache_aware;
mod vtc_basic;

use std::collections::BTreeMap;

use bincode::{Decode, Encode};
use serde::{Deserialize, Deserializer, Serialize};

use self::rank::{Policy, Ranks, pick};
use crate::ids::Slot;
use crate::reject::Rejection;
use crate::validate::{at_most, ensure, is_name};

pub use chwbl::ChwblSettings;
pub use cost::CostSettings;
pub use epp::EppSettings;
pub use least_kv::LeastKvSettings;
pub use lmetric::LmetricSettings;
pub use preble_e2::PrebleE2Settings;
pub use prefix_cache::PrefixCacheSettings;
pub use rank::{MatchBy, Needs, SessionNames, Touch};
pub use session::SessionSettings;
pub use vllm_cache_aware::{BlockNaming, VllmCacheAwareSettings};
pub use vtc_basic::{TimeUnit, VtcBasicSettings};

/// Makes [`PolicyConfig`] and everything that must know all policies from one table. An entry is
/// `Variant(settings: Type), "name", policy;`, where `policy` may use `settings`. The order of the
/// entries is part of the log format: new ones come last.
macro_rules! policies {
    ($(
        $(#[$attribute:meta])*
        $variant:ident $(($settings:ident: $type:ty))?, $name:literal, $policy:expr;
    )*) => {
        /// The live policy with its settings: replicated, changed by `PUT /admin/v1/policy`.
        #[derive(Debug, Clone, PartialEq, Encode, Decode, Serialize, Deserialize)]
        #[serde(tag = "policy", rename_all = "kebab-case", deny_unknown_fields)]
        pub enum PolicyConfig {
            $($(#[$attribute])* $variant $(($type))?,)*
        }

        /// Names of all policies, in the order of [`PolicyConfig::defaults`].
        pub const POLICY_NAMES: &[&str] = &[$($name),*];

        impl PolicyConfig {
            /// Every policy with its default settings.
            #[must_use]
            pub fn defaults() -> Vec<Self> {
                vec![$(Self::$variant $((<$type>::default()))?),*]
            }

            /// The policy's name, as config and response headers spell it.
            #[must_use]
            pub fn name(&self) -> &'static str {
                match self {
                    $(Self::$variant { .. } => $name,)*
                }
            }

            /// Checks every setting.
            ///
            /// # Errors
            /// [`Rejection::Invalid`] with the first field that is out of bounds.
            pub fn validate(&self) -> Result<(), Rejection> {
                match self {
                    $(Self::$variant $(($settings))? => Policy::validate($policy),)*
                }
            }

            /// What of [`PolicyRequest`] and [`Candidate`] the policy looks at beside what is always
            /// there.
            #[must_use]
            pub fn needs(&self) -> Needs<'_> {
                match self {
                    $(Self::$variant $(($settings))? => Policy::needs($policy),)*
                }
            }
        }

        fn choose_among(
            policy: &PolicyConfig,
            request: &PolicyRequest,
            candidates: &[Candidate],
        ) -> Option<Choice> {
            match policy {
                $(PolicyConfig::$variant $(($settings))? => pick(
                    &Policy::ranks($policy, request, candidates),
                    request,
                    candidates,
                ),)*
            }
        }

        /// The scores [`choose`] compares, in the order of `candidates`.
        #[must_use]
        pub fn scores(
            policy: &PolicyConfig,
            request: &PolicyRequest,
            candidates: &[Candidate],
        ) -> Vec<Score> {
            match policy {
                $(PolicyConfig::$variant $(($settings))? => {
                    scored(&Policy::ranks($policy, request, candidates), candidates)
                })*
            }
        }
    };
}

policies! {
    /// Least predicted time to first token.
    Cost(settings: CostSettings), "cost", settings;
    /// Fewest requests running and waiting.
    #[serde(deserialize_with = "no_settings")]
    LeastRequest, "least-request", &least_request::LeastRequest;
    /// Least product of prefill tokens and requests.
    Lmetric(settings: LmetricSettings), "lmetric", settings;
    /// AIBrix: longest prefix within one load deviation, unless the load is imbalanced.
    PrefixCache(settings: PrefixCacheSettings), "prefix-cache", settings;
    /// The vLLM cache-aware gateway: longest prefix above a threshold, with bounded load.
    VllmCacheAware(settings: VllmCacheAwareSettings), "vllm-cache-aware", settings;
    /// Gateway API endpoint picker: weighted scores of prefix, queue and KV usage.
    Epp(settings: EppSettings), "epp", settings;
    /// Consistent hashing with bounded loads over the first blocks.
    Chwbl(settings: ChwblSettings), "chwbl", settings;
    /// One backend per session.
    Session(settings: SessionSettings), "session", settings;
    /// The less loaded of two drawn at random.
    #[serde(deserialize_with = "no_settings")]
    PowerOfTwo, "power-of-two", &power_of_two::PowerOfTwo;
    /// One after the other, per replica.
    #[serde(deserialize_with = "no_settings")]
    RoundRobin, "round-robin", &round_robin::RoundRobin;
    /// Any.
    #[serde(deserialize_with = "no_settings")]
    Random, "random", &random::Random;
    /// Least KV cache in use.
    LeastKv(settings: LeastKvSettings), "least-kv", settings;
    /// AIBrix: the user's windowed tokens spread users over backends, with utilisation.
    VtcBasic(settings: VtcBasicSettings), "vtc-basic", settings;
    /// Preble: exploit the longest prefix or explore by cost of load, eviction and prefill.
    PrebleE2(settings: PrebleE2Settings), "preble-e2", settings;
}

/// Most models with a policy of their own.
pub const MODEL_POLICIES_MAX: usize = 64;

/// What routing follows beside the live policy: replicated, changed by `PUT /admin/v1/routing`.
#[derive(Debug, Clone, PartialEq, Encode, Decode, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RoutingSettings {
    /// Policies of models that do not follow the live one.
    pub models: BTreeMap<String, PolicyConfig>,
    /// Whether `cost` uses what it learnt of a backend in place of the constants in its settings.
    pub learn: bool,
    /// A backend whose prefix predictions are off by more than this, in thousandths of the prompt
    /// tokens, is marked.
    pub prediction_off_permille: u32,
}

impl Default for RoutingSettings {
    fn default() -> Self {
        Self {
            models: BTreeMap::new(),
            learn: true,
            prediction_off_permille: 200,
        }
    }
}

impl RoutingSettings {
    /// Checks every setting.
    ///
    /// # Errors
    /// [`Rejection::Invalid`] with the first field that is out of bounds.
    pub fn validate(&self) -> Result<(), Rejection> {
        let is_few = self.models.len() <= MODEL_POLICIES_MAX;
        ensure(is_few, "models", "at most 64 models")?;
        for (model, policy) in &self.models {
            ensure(is_name(model), "models", "model ids of 1 to 256 bytes")?;
            policy.validate().map_err(|reject| match reject {
                Rejection::Invalid { field, expected } => Rejection::Invalid {
                    field: format!("models.{model}.{field}"),
                    expected,
                },
                other => other,
            })?;
        }
        at_most(
            "prediction_off_permille",
            self.prediction_off_permille,
            1000,
        )
    }
}

impl PolicyConfig {
    /// The settings of `vtc-basic`, which say how long usage stays in the users' windows.
    pub(crate) fn vtc_basic(&self) -> Option<VtcBasicSettings> {
        if let Self::VtcBasic(settings) = self {
            Some(*settings)
        } else {
            None
        }
    }
}

/// Reads the settings of a policy that has none, so that whatever else stands there is refused.
fn no_settings<'de, D: Deserializer<'de>>(deserializer: D) -> Result<(), D::Error> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct NoSettings {}
    NoSettings::deserialize(deserializer).map(|NoSettings {}| ())
}

/// What a policy knows of the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PolicyRequest {
    /// Hash of the request id: breaks ties.
    pub jitter: u64,
    /// Full blocks of the prompt that an engine could have (the last-token rule applied).
    pub blocks: u32,
    /// Estimated prompt tokens.
    pub tokens: u32,
    /// Estimated tokens of one block.
    pub tokens_per_block: u32,
    /// Hash of the prompt's first blocks; for [`Needs::prefix_blocks`].
    pub prefix_key: u64,
    /// Hash of the session's name, `None` when the request names none; for [`Needs::session`].
    pub session: Option<u64>,
    /// Requests decided by this replica before, from any start; for [`Needs::turn`].
    pub turn: u64,
    /// What the user and all users used lately; for [`Needs::user_tokens`].
    pub user: UserTokens,
}

/// Weighted tokens that users used within the window, in thousandths of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct UserTokens {
    /// The request's user's.
    pub own_milli: u64,
    /// Least of all users who used any; `None` when nobody did.
    pub least_milli: Option<u64>,
    /// Most of all users; `None` when nobody used any.
    pub most_milli: Option<u64>,
}

/// What a policy knows of one backend it may choose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Candidate {
    /// The backend.
    pub slot: Slot,
    /// Leading blocks of the prompt it is believed to hold.
    pub matched: u32,
    /// Requests dispatched to it and not over, from all replicas.
    pub running: u32,
    /// Requests in the engine's own queue, as it last reported.
    pub waiting: u32,
    /// Uncached prompt tokens dispatched to it whose first byte has not come, from all replicas.
    pub pending_prefill_tokens: u64,
    /// KV cache in use, in thousandths, as the engine last reported.
    pub kv_usage_permille: u32,
    /// Blocks it can take before it evicts any; `u32::MAX` while its capacity is unknown.
    pub free_blocks: u32,
    /// Whether the engine itself lists the model, as it does a loaded LoRA adapter.
    pub is_model_listed: bool,
    /// What its work was learnt to cost; for [`Needs::learnt`], and `None` while that is not known.
    pub prices: Option<Prices>,
}

/// What a backend's work costs before a first token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Prices {
    /// Nanoseconds per uncached prompt token.
    pub prefill_ns_per_token: u32,
    /// Nanoseconds per request running.
    pub decode_ns_per_request: u32,
    /// First tokens behind them, faded: how much they count against those of others.
    pub first_tokens: u32,
}

/// A decision: which candidate, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Choice {
    /// The chosen backend.
    pub slot: Slot,
    /// Blocks of the prompt it is believed to hold.
    pub matched: u32,
    /// Why this one.
    pub reason: Reason,
}

/// Why a candidate was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reason {
    /// The only candidate.
    OnlyCandidate,
    /// Least predicted cost.
    LeastCost,
    /// Fewest requests.
    LeastRequests,
    /// Several were near-equal; the request's jitter decided.
    Jitter,
    /// The load is imbalanced: fewest requests, whatever is held.
    Imbalanced,
    /// Longest prefix among those whose load is acceptable.
    LongestPrefix,
    /// Best weighted score.
    BestScore,
    /// First on the ring with room.
    Ring,
    /// The session's backend.
    Session,
    /// Its turn.
    Turn,
    /// Least KV cache in use.
    LeastKv,
    /// Nearest to the user's share of tokens, with utilisation.
    UserShare,
    /// Most of the prompt is held here.
    Exploit,
    /// Little of the prompt is held, or its holders are overloaded: least cost of load, eviction
    /// and prefill.
    Explore,
}

/// One candidate's score as `explain` shows it. Candidates are compared by tier, score and second
/// score, in this order; lower is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Score {
    /// The candidate.
    pub slot: Slot,
    /// Step of the policy that the candidate counts in; the first is 0.
    pub tier: u8,
    /// What the policy compares within the tier; docs/reference/policies.md has the unit.
    pub score: u64,
    /// What it compares among equal scores.
    pub then: u64,
    /// What a clear choice of this candidate would be explained by.
    pub reason: Reason,
}

impl PolicyRequest {
    /// Prompt tokens that a backend holding `matched` blocks would have to compute.
    fn uncached_tokens(&self, matched: u32) -> u64 {
        let cached = u64::from(matched.min(self.blocks)) * u64::from(self.tokens_per_block);
        u64::from(self.tokens).saturating_sub(cached)
    }

    /// Blocks of the prompt that are not among `matched`.
    fn missing_blocks(&self, matched: u32) -> u32 {
        self.blocks.saturating_sub(matched)
    }
}

/// Chooses among `candidates`; `None` when there are none. Allocates nothing.
///
/// The order of `candidates` does not matter; each slot stands in it once.
#[must_use]
pub fn choose(
    policy: &PolicyConfig,
    request: &PolicyRequest,
    candidates: &[Candidate],
) -> Option<Choice> {
    if let [only] = candidates {
        return Some(Choice {
            slot: only.slot,
            matched: only.matched,
            reason: Reason::OnlyCandidate,
        });
    }
    choose_among(policy, request, candidates)
}

fn scored(ranks: &impl Ranks, candidates: &[Candidate]) -> Vec<Score> {
    let score = |(place, candidate): (usize, &Candidate)| {
        let rank = ranks.rank(place, candidate);
        Score {
            slot: candidate.slot,
            tier: rank.tier,
            score: rank.score,
            then: rank.then,
            reason: rank.reason,
        }
    };
    candidates.iter().enumerate().map(score).collect()
}
