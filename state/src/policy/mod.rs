//! Routing policies: pure functions from a request and candidates to a choice with its reason.
//!
//! A policy sees only [`PolicyRequest`] and [`Candidate`]. These are gathered (match, load, health)
//! in the same way for every policy; optional data is gathered only for policies that use it
//! ([`PolicyConfig::needs`]). The request's `jitter`, a hash of its id, breaks ties among
//! near-equal scores; without it, simultaneous arrivals would herd. Policies compute with integers
//! only, so a decision is reproducible bit for bit.
//!
//! A policy consists of one file (settings, bounds, ranking of a candidate), a `mod` line and one
//! entry in the table below. Picking, near-equality and jitter are shared (`rank`).
//! docs/reference/policies.md describes each policy and its source.

mod chwbl;
mod cost;
mod epp;
mod least_kv;
mod least_request;
mod lmetric;
mod pair;
mod power_of_two;
mod preble_e2;
mod prefix_cache;
mod price_classes;
mod prices;
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
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};

use self::rank::{Policy, Ranks, pick};
use crate::ids::Slot;
use crate::kv_events::{LowerTier, LowerTierBlocks};
use crate::reject::Rejection;
use crate::validate::{at_least, at_most, ensure, is_name};

pub use chwbl::ChwblSettings;
pub use cost::CostSettings;
pub use epp::EppSettings;
pub use lmetric::LmetricSettings;
pub use pair::{
    BackendPair, Disaggregate, Handover, PairSettings, PairSides, WholeReason, choose_pair,
    is_worth_two,
};
pub use preble_e2::PrebleE2Settings;
pub use prefix_cache::PrefixCacheSettings;
pub use prices::{LoadPrices, Prices};
pub use rank::{Affinity, MatchBy, PolicyInputs, SessionNames, Touch};
pub use session::SessionSettings;
pub use vllm_cache_aware::{BlockNaming, VllmCacheAwareSettings};
pub use vtc_basic::{TimeUnit, VtcBasicSettings};

/// Defines [`PolicyConfig`] and everything else that lists all policies from one table. An entry is
/// `Variant(variant: Type), "name", policy;`, where `policy` may use the settings, `variant`. The
/// order of the entries is part of the log format: append new ones.
macro_rules! policies {
    ($(
        $(#[$attribute:meta])*
        $variant:ident $(($settings:ident: $type:ty))?, $name:literal, $policy:expr;
    )*) => {
        /// The live policy with its settings. Replicated, changed by `PUT /admin/v1/policy`.
        #[derive(
            Debug, Clone, PartialEq, Encode, Decode, Serialize, Deserialize, JsonSchema,
        )]
        #[serde(tag = "policy", rename_all = "kebab-case", deny_unknown_fields)]
        pub enum PolicyConfig {
            $($(#[$attribute])* $variant $(($type))?,)*
        }

        /// Settings of all policies in a config file, each in a table with the policy's name.
        #[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
        #[serde(default)]
        pub struct PolicyTables {
            $($(
                #[doc = concat!("Settings of `", $name, "`.")]
                #[serde(rename = $name)]
                pub $settings: $type,
            )?)*
        }

        impl PolicyTables {
            /// Returns every policy with the settings from its table.
            #[must_use]
            pub fn policies(self) -> Vec<PolicyConfig> {
                vec![$(PolicyConfig::$variant $((self.$settings))?),*]
            }
        }

        /// Names of all policies, in the order of [`PolicyConfig::defaults`].
        pub const POLICY_NAMES: &[&str] = &[$($name),*];

        impl PolicyConfig {
            /// Returns every policy with its default settings.
            #[must_use]
            pub fn defaults() -> Vec<Self> {
                vec![$(Self::$variant $((<$type>::default()))?),*]
            }

            /// Returns the policy's name as spelled in the config file and response headers.
            #[must_use]
            pub fn name(&self) -> &'static str {
                match self {
                    $(Self::$variant { .. } => $name,)*
                }
            }

            /// Checks every setting of the policy.
            ///
            /// # Errors
            /// [`Rejection::Invalid`] with the first field that is out of bounds.
            pub fn validate(&self) -> Result<(), Rejection> {
                match self {
                    $(Self::$variant $(($settings))? => Policy::validate($policy),)*
                }
            }

            /// Returns the optional parts of [`PolicyRequest`] and [`Candidate`] that the policy
            /// uses.
            #[must_use]
            pub fn needs(&self) -> PolicyInputs<'_> {
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

        /// Returns the score of each of `candidates`, in their order, as [`choose`] compares them.
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
    Cost(cost: CostSettings), "cost", cost;
    /// Fewest requests.
    #[serde(deserialize_with = "no_settings")]
    LeastRequest, "least-request", &least_request::LeastRequest;
    /// Least product of prefill tokens and requests.
    Lmetric(lmetric: LmetricSettings), "lmetric", lmetric;
    /// AIBrix: longest prefix within one load deviation, unless the load is imbalanced.
    PrefixCache(prefix_cache: PrefixCacheSettings), "prefix-cache", prefix_cache;
    /// The vLLM cache-aware gateway: longest prefix above a threshold, with bounded load.
    VllmCacheAware(vllm_cache_aware: VllmCacheAwareSettings), "vllm-cache-aware", vllm_cache_aware;
    /// Gateway API endpoint picker: weighted scores of prefix, queue and KV usage.
    Epp(epp: EppSettings), "epp", epp;
    /// Consistent hashing with bounded loads over the first blocks.
    Chwbl(chwbl: ChwblSettings), "chwbl", chwbl;
    /// One backend per session.
    Session(session: SessionSettings), "session", session;
    /// The less loaded of two candidates drawn at random.
    #[serde(deserialize_with = "no_settings")]
    PowerOfTwo, "power-of-two", &power_of_two::PowerOfTwo;
    /// Round robin, per replica.
    #[serde(deserialize_with = "no_settings")]
    RoundRobin, "round-robin", &round_robin::RoundRobin;
    /// A random candidate.
    #[serde(deserialize_with = "no_settings")]
    Random, "random", &random::Random;
    /// Least KV cache usage.
    #[serde(deserialize_with = "no_settings")]
    LeastKv, "least-kv", &least_kv::LeastKv;
    /// AIBrix: each user's recent tokens select a position among the backends, combined with
    /// utilisation.
    VtcBasic(vtc_basic: VtcBasicSettings), "vtc-basic", vtc_basic;
    /// Preble: exploit the longest prefix, or explore by cost of load, eviction and prefill.
    PrebleE2(preble_e2: PrebleE2Settings), "preble-e2", preble_e2;
}

/// Maximum number of models with their own policy.
pub const MODEL_POLICIES_MAX: usize = 64;

/// Routing settings other than the live policy. Replicated, changed by `PUT /admin/v1/routing`.
#[derive(Debug, Clone, PartialEq, Encode, Decode, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RoutingSettings {
    /// Policies of models that do not use the live one.
    pub models: BTreeMap<String, PolicyConfig>,
    /// Cache tiers of engines that policies see. By default, `cost` sees all, because it knows what
    /// loading costs; other policies see the GPU.
    pub tiers: Option<VisibleTiers>,
    /// Whether `cost` uses learned prices of a backend instead of the constants in its settings.
    pub learn: bool,
    /// Error of cache predictions above which a backend is marked as mispredicted, in thousandths
    /// of the prompt tokens.
    pub prediction_off_permille: u32,
    /// Maximum number of blocks that one backend of unknown cache size is assumed to hold.
    pub assumed_blocks: u32,
    /// Maximum number of blocks that all backends of unknown cache size are assumed to hold
    /// together before their responses say more.
    pub assumed_blocks_total: u32,
}

/// Cache tiers of engines that policies see.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum VisibleTiers {
    /// The GPU.
    Gpu,
    /// All tiers, as if their blocks were on the GPU, except for what `cost` expects of loading.
    All,
}

impl Default for RoutingSettings {
    fn default() -> Self {
        Self {
            models: BTreeMap::new(),
            tiers: None,
            learn: true,
            prediction_off_permille: 200,
            assumed_blocks: 100_000,
            assumed_blocks_total: 200_000,
        }
    }
}

impl RoutingSettings {
    /// Whether `policy` sees blocks on tiers below the GPU.
    #[must_use]
    pub fn shows_lower_tiers(&self, policy: &PolicyConfig) -> bool {
        match self.tiers {
            Some(tiers) => tiers == VisibleTiers::All,
            None => matches!(policy, PolicyConfig::Cost(_)),
        }
    }

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
        let off_permille = self.prediction_off_permille;
        at_most("prediction_off_permille", off_permille, 1000)?;
        at_least("assumed_blocks", self.assumed_blocks, 1)?;
        at_least("assumed_blocks_total", self.assumed_blocks_total, 1)
    }
}

impl PolicyConfig {
    /// Returns the settings of `vtc-basic`, which determine the length of the usage windows; `None`
    /// for another policy.
    pub(crate) fn vtc_basic(&self) -> Option<VtcBasicSettings> {
        if let Self::VtcBasic(settings) = self {
            Some(*settings)
        } else {
            None
        }
    }
}

/// Deserializes the settings of a policy that has none, rejecting any field.
fn no_settings<'de, D: Deserializer<'de>>(deserializer: D) -> Result<(), D::Error> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct NoSettings {}
    NoSettings::deserialize(deserializer).map(|NoSettings {}| ())
}

/// Request as policies see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Encode, Decode)]
pub struct PolicyRequest {
    /// Hash of the request id, which breaks ties.
    pub jitter: u64,
    /// Number of full prompt blocks that an engine could hold, after applying the last-token rule.
    pub blocks: u32,
    /// Estimated number of prompt tokens.
    pub tokens: u32,
    /// Estimated number of tokens per block.
    pub tokens_per_block: u32,
    /// Hash of the prompt's first blocks, gathered for [`PolicyInputs::prefix_blocks`].
    pub prefix_key: u64,
    /// Hash of the session's name, gathered for [`PolicyInputs::session`]. `None` if the request
    /// names none.
    pub session: Option<u64>,
    /// Backend of the last turn of the agent's session, or of its parent in the first turn of a
    /// sub-agent. It wins among near-equal candidates. `None` if there is none.
    pub home: Option<Slot>,
    /// Number of tokens of the session's last turn, prompt and response; 0 in a first turn, or
    /// without a session.
    pub continued_tokens: u64,
    /// Number of requests that this replica has decided before, from an arbitrary start. Gathered
    /// for [`PolicyInputs::turn`].
    pub turn: u64,
    /// Recent usage of the user and of all users, gathered for [`PolicyInputs::user_tokens`].
    pub user: UserTokens,
}

/// Weighted tokens used within the window, in thousandths of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, JsonSchema, Encode, Decode)]
pub struct UserTokens {
    /// Usage of the request's user.
    pub own_milli: u64,
    /// Lowest usage among users with any; `None` if there are none.
    pub least_milli: Option<u64>,
    /// Highest usage among all users; `None` if nobody used any tokens.
    pub most_milli: Option<u64>,
}

/// Backend that a policy may choose, as policies see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Encode, Decode)]
pub struct Candidate {
    /// Slot of the backend.
    pub slot: Slot,
    /// Number of leading prompt blocks that the backend is believed to hold.
    pub matched: u32,
    /// Part of `matched` that the engine loads from tiers below the GPU. Empty if the policy sees the
    /// GPU only.
    pub loaded: LowerTierBlocks,
    /// Fastest tier below the GPU that the engine uses, where evicted blocks stay. `None` if it has
    /// none, or if the policy sees the GPU only.
    pub evicts_to: Option<LowerTier>,
    /// Number of requests that any replica dispatched to the backend and that have not ended.
    pub running: u32,
    /// Number of requests in the engine's own queue, as last reported.
    pub waiting: u32,
    /// Number of requests in `running` whose first byte has not arrived.
    pub pending: u32,
    /// Number of uncached prompt tokens of the requests in `pending`, from all replicas.
    pub pending_prefill_tokens: u64,
    /// KV cache usage as last reported by the engine, in thousandths.
    pub kv_usage_permille: u32,
    /// Number of blocks that the backend can store before it evicts any; `u32::MAX` if its capacity
    /// is unknown.
    pub free_blocks: u32,
    /// Whether the engine itself lists the model, as it does for a loaded LoRA adapter.
    pub is_model_listed: bool,
    /// Learned prices of the backend's work, gathered for [`PolicyInputs::learnt`]. `None` if
    /// unknown.
    pub prices: Option<Prices>,
}

/// Choice of a candidate, with the reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Encode, Decode)]
pub struct Choice {
    /// Slot of the chosen backend.
    pub slot: Slot,
    /// Number of leading prompt blocks that the backend is believed to hold.
    pub matched: u32,
    /// Part of `matched` that the engine loads from tiers below the GPU.
    pub loaded: LowerTierBlocks,
    /// Reason for the choice.
    pub reason: Reason,
}

/// Reason for choosing a candidate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema, Encode, Decode)]
#[serde(rename_all = "kebab-case")]
pub enum Reason {
    /// The only candidate.
    OnlyCandidate,
    /// Least predicted cost.
    LeastCost,
    /// Fewest requests.
    LeastRequests,
    /// Several candidates were near-equal; the request's jitter decided.
    Jitter,
    /// The load is imbalanced: fewest requests, regardless of cached prefixes.
    Imbalanced,
    /// Longest prefix among the candidates with an acceptable load.
    LongestPrefix,
    /// Best weighted score.
    BestScore,
    /// First on the ring with capacity.
    Ring,
    /// The session's backend.
    Session,
    /// Next in turn.
    Turn,
    /// Least KV cache usage.
    LeastKv,
    /// Nearest to the user's position, combined with utilisation.
    UserShare,
    /// Most of the prompt is cached here.
    Exploit,
    /// Little of the prompt is cached, or its owners are overloaded: least cost of load, eviction
    /// and prefill.
    Explore,
    /// Several candidates were near-equal, and one of them was the home of the agent's session.
    Home,
}

impl Reason {
    /// Returns the reason's name, as `explain` spells it.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::OnlyCandidate => "only-candidate",
            Self::LeastCost => "least-cost",
            Self::LeastRequests => "least-requests",
            Self::Jitter => "jitter",
            Self::Imbalanced => "imbalanced",
            Self::LongestPrefix => "longest-prefix",
            Self::BestScore => "best-score",
            Self::Ring => "ring",
            Self::Session => "session",
            Self::Turn => "turn",
            Self::LeastKv => "least-kv",
            Self::UserShare => "user-share",
            Self::Exploit => "exploit",
            Self::Explore => "explore",
            Self::Home => "home",
        }
    }
}

/// One candidate's score as `explain` shows it. Candidates are compared by tier, score and second
/// score, in that order; lower is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Encode, Decode)]
pub struct Score {
    /// Slot of the candidate.
    pub slot: Slot,
    /// Step of the policy in which the candidate is considered, from 0.
    pub tier: u8,
    /// Value compared within the tier. docs/reference/policies.md gives the unit.
    pub score: u64,
    /// Value compared among candidates with equal `score`.
    pub then: u64,
    /// Reason given if no other candidate is near-equal.
    pub reason: Reason,
}

impl PolicyRequest {
    /// Returns the number of prompt tokens that a backend holding `matched` blocks has to compute.
    fn uncached_tokens(&self, matched: u32) -> u64 {
        let cached = u64::from(matched.min(self.blocks)) * u64::from(self.tokens_per_block);
        u64::from(self.tokens).saturating_sub(cached)
    }

    /// Returns the number of prompt blocks that a backend holding `matched` blocks lacks.
    fn missing_blocks(&self, matched: u32) -> u32 {
        self.blocks.saturating_sub(matched)
    }
}

/// Chooses among `candidates`; returns `None` if there are none. Does not allocate for a few
/// candidates in slot order.
///
/// The order of `candidates` does not matter. Each slot must occur only once.
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
            loaded: only.loaded,
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
