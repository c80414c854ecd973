//! The plan of one run: cluster, lags, engines, and faults.

use std::time::Duration;

use state::admission::{AdmissionSettings, Concurrency, Order};
use state::policy::{CostSettings, PairSettings, PolicyConfig, VisibleTiers};
use state::users::FairnessSettings;

use super::events::Micros;
use super::literal_policies::ReferencePolicy;
use crate::engine::model::EngineShape;
use crate::engine::offload::OffloadOptions;

/// Default number of tokens per block in router and engines.
pub const BLOCK_TOKENS: u32 = 32;

/// Parameters of a run, except for its requests.
#[derive(Debug, Clone, PartialEq)]
pub struct SimPlan {
    /// Name of the run, for tables and plots.
    pub label: String,
    /// Routing policy.
    pub policy: PolicyConfig,
    /// Reference policy that decides instead of `policy`, if any.
    pub reference_policy: Option<ReferencePolicy>,
    /// Admission settings.
    pub admission: AdmissionSettings,
    /// Prices of tokens, by which users are charged.
    pub prices: FairnessSettings,
    /// Maximum time for which a request waits in overload.
    pub codel_target: Duration,
    /// Patience and retries of clients.
    pub clients: ClientModel,
    /// Whether output lengths are known at arrival instead of predicted.
    pub oracle: bool,
    /// Whether `cost` learns its prices from measurements.
    pub learn: bool,
    /// Whether replicas follow the engines' KV events, instead of inferring caches from leases.
    pub is_exact: bool,
    /// Whether the policy decides by the engines' true caches, work and prices.
    pub is_all_knowing: bool,
    /// Cache tiers that the policy sees (`routing.tiers`).
    pub visible_tiers: Option<VisibleTiers>,
    /// Number of tokens per block, in router and engines.
    pub block_tokens: u32,
    /// Number of engines; with `scaling`, of those that can run at once.
    pub backends: u16,
    /// Batching model, sizes and speeds of each engine.
    pub engine: EngineModel,
    /// Tiers of each engine below the GPU.
    pub offload: OffloadOptions,
    /// Settings of disaggregated prefill and decode.
    pub disaggregation: DisaggregationPlan,
    /// Latency goals that requests must meet to count for goodput.
    pub goal: ServiceGoal,
    /// Number of replicas.
    pub replicas: u8,
    /// Time from a batch's proposal until every replica applies it; `None`: replicas do not share
    /// what they learn.
    pub ownership_lag: Option<Micros>,
    /// Time from a load report until peers receive it; `None` if replicas send none.
    pub load_lag: Option<Micros>,
    /// Minimum time between two batches that a replica proposes.
    pub flush: Micros,
    /// Interval at which every replica probes the engines.
    pub probe: Micros,
    /// Crash and restart during the run, if any.
    pub restart: Option<RestartPlan>,
    /// Starts and stops of engines during the run; `None` if all run from start to end.
    pub scaling: Option<ScalingPlan>,
    /// End of the time in which requests arrive and service counts for fairness.
    pub horizon: Micros,
    /// Seed of all random choices.
    pub seed: u64,
}

/// Engines, conditions and transfers for disaggregated prefill and decode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DisaggregationPlan {
    /// Number of engines that only prefill, the first ones of the fleet. If 0, every engine serves
    /// whole requests.
    pub prefill: u16,
    /// Conditions under which requests are disaggregated.
    pub pairs: PairSettings,
    /// Fixed duration of a transfer, before its first token.
    pub transfer: Micros,
    /// Number of tokens whose blocks a transfer moves per second.
    pub transfer_tokens_per_s: u32,
}

impl Default for DisaggregationPlan {
    fn default() -> Self {
        Self {
            prefill: 0,
            pairs: PairSettings::default(),
            transfer: 5_000,
            transfer_tokens_per_s: 200_000,
        }
    }
}

impl DisaggregationPlan {
    /// Returns the duration of a transfer of the blocks of `tokens` tokens.
    #[must_use]
    pub fn transfer_us(&self, tokens: u32) -> Micros {
        let rate = u64::from(self.transfer_tokens_per_s.max(1));
        self.transfer + u64::from(tokens) * 1_000_000 / rate
    }
}

/// Latency goals that a request must meet to count for goodput.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServiceGoal {
    /// Maximum time to the first token.
    pub ttft: Micros,
    /// Maximum mean time between output tokens.
    pub gap: Micros,
}

impl Default for ServiceGoal {
    fn default() -> Self {
        Self {
            ttft: 2_000_000,
            gap: 50_000,
        }
    }
}

/// Patience and retries of clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ClientModel {
    /// Range of the time after which clients leave without a complete response; `None`: never.
    pub patience: Option<(Micros, Micros)>,
    /// Number of retries after a rejection or departure, as in OpenAI's SDKs.
    pub retries: u32,
}

/// Batching model of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineModel {
    /// Continuous batching, with vLLM's scheduler and block pool.
    Continuous(EngineShape),
    /// Static batching: a batch starts together and ends with its longest request.
    Static(BatchTimes),
}

/// Parameters of the service time of a batch of `b` requests: `base + longest output * per_token *
/// (1 + spread * (b - 1) / b)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchTimes {
    /// Maximum number of requests in a batch (`b`).
    pub batch_max: u32,
    /// Duration of a batch without its tokens (`base`), in microseconds.
    pub base_us: u64,
    /// Time per output token in a batch of one (`per_token`), in microseconds.
    pub token_us: u64,
    /// Relative increase of the time per token in a large batch (`spread`), in thousandths.
    pub spread_permille: u64,
}

/// Starts and stops of engines during a run, which begins without any.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScalingPlan {
    /// What determines the number of engines.
    pub rule: ScalingRule,
    /// Time from the start of an engine until it takes requests.
    pub start: Micros,
    /// Longest wait of a request while there is no engine.
    pub hold: Micros,
}

/// What determines the number of engines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ScalingRule {
    /// An autoscaler, which asks how many the replicas want, at this interval.
    Wanted(Micros),
    /// Numbers of engines that run or start, from the given times on.
    Schedule(Vec<(Micros, u16)>),
}

/// A crash and immediate restart during the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RestartPlan {
    /// Time of the crash.
    pub at: Micros,
    /// Replicas that crash.
    pub who: RestartScope,
    /// Whether the crashed replicas lose their disks.
    pub wipe: bool,
}

/// Which replicas restart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum RestartScope {
    /// All replicas at once.
    All,
    /// The first replica.
    One,
}

impl BatchTimes {
    /// Latency model with measured constants: 5.74 ms per token, a spread of 0.316.
    pub const CALIBRATED: Self = Self {
        batch_max: 8,
        base_us: 0,
        token_us: 5_740,
        spread_permille: 316,
    };

    /// Returns the duration of a batch of `requests` requests whose longest has `tokens` output
    /// tokens.
    #[must_use]
    pub fn service_us(&self, requests: u32, tokens: u32) -> Micros {
        let requests = u64::from(requests.max(1));
        let slowed = 1000 * requests + self.spread_permille * (requests - 1);
        let tokens = u64::from(tokens) * self.token_us * slowed / (1000 * requests);
        self.base_us + tokens
    }
}

impl Default for SimPlan {
    fn default() -> Self {
        let ms = |ms| micros(Duration::from_millis(ms));
        Self {
            label: String::new(),
            policy: PolicyConfig::Cost(CostSettings::default()),
            reference_policy: None,
            admission: AdmissionSettings::default(),
            prices: FairnessSettings::default(),
            codel_target: Duration::MAX,
            clients: ClientModel::default(),
            oracle: false,
            learn: false,
            is_exact: false,
            is_all_knowing: false,
            visible_tiers: None,
            block_tokens: BLOCK_TOKENS,
            backends: 4,
            engine: EngineModel::Continuous(EngineShape {
                num_gpu_blocks: 8192,
                block_size: BLOCK_TOKENS,
                max_num_seqs: 256,
                max_num_batched_tokens: 2048,
                prefill_tokens_per_s: 10_000,
                decode: Duration::from_millis(20),
            }),
            offload: OffloadOptions::default(),
            disaggregation: DisaggregationPlan::default(),
            goal: ServiceGoal::default(),
            replicas: 3,
            ownership_lag: Some(ms(20)),
            load_lag: Some(ms(20)),
            flush: ms(20),
            probe: ms(1000),
            restart: None,
            scaling: None,
            horizon: ms(60_000),
            seed: 1,
        }
    }
}

impl SimPlan {
    /// Returns a plan with low concurrency limits, so that requests queue at replicas, not engines.
    pub(super) fn queueing(seed: u64, horizon: Micros, order: Order) -> Self {
        let mut plan = Self {
            seed,
            horizon,
            admission: AdmissionSettings {
                order,
                concurrency: Concurrency::Fixed(16),
                max_queue: u32::MAX,
                max_wait_ms: u32::MAX,
                ..AdmissionSettings::default()
            },
            ..Self::default()
        };
        if let EngineModel::Continuous(shape) = &mut plan.engine {
            shape.max_num_seqs = 24;
        }
        plan
    }

    /// Returns whether the admission settings limit waits.
    #[must_use]
    pub fn bounds_waits(&self) -> bool {
        self.admission.max_wait_ms < u32::MAX
    }
}

/// Converts a duration to simulated time.
#[must_use]
pub fn micros(time: Duration) -> Micros {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
