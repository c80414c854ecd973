//! The plan of one run: the cluster, its lags, its engines, and what happens to them.

use std::time::Duration;

use state::admission::{AdmissionSettings, Concurrency, Order};
use state::policy::{ChwblSettings, CostSettings, PairSettings, PolicyConfig};
use state::users::FairnessSettings;

use super::events::Micros;
use super::literal_policies::AsWritten;
use crate::engine::model::EngineShape;

/// Tokens of one block where no recording says otherwise.
pub const BLOCK_TOKENS: u32 = 32;

/// Everything about a run but the requests.
#[derive(Debug, Clone, PartialEq)]
pub struct SimPlan {
    /// Names the run in tables and plots.
    pub label: String,
    /// How backends are chosen.
    pub policy: PolicyConfig,
    /// A source's pseudo-code that chooses in its place.
    pub as_written: Option<AsWritten>,
    /// How requests are admitted.
    pub admission: AdmissionSettings,
    /// What tokens cost.
    pub prices: FairnessSettings,
    /// How long a request waits at most in overload.
    pub codel_target: Duration,
    /// How clients are.
    pub clients: ClientModel,
    /// Whether output lengths are known when a request comes, in place of predicted.
    pub oracle: bool,
    /// Whether `cost` learns its constants from what was measured.
    pub learn: bool,
    /// Tokens of a block, in router and engine alike.
    pub block_tokens: u32,
    /// Engines.
    pub backends: u16,
    /// Each engine's sizes and speeds.
    pub engine: EngineModel,
    /// How many of the engines compute prompts for the others, and when.
    pub apart: ApartPlan,
    /// What a request must keep to count as served well.
    pub goal: ServiceGoal,
    /// Replicas.
    pub replicas: u8,
    /// Clusters of so many engines and replicas, each with a log of its own.
    pub cells: CellPlan,
    /// From a batch's proposal until it is applied, on every replica; `None`: what a replica learns
    /// stays with it.
    pub ownership_lag: Option<Micros>,
    /// From a load report until peers have it; `None`: none is sent.
    pub load_lag: Option<Micros>,
    /// Least time between two batches of a replica.
    pub flush: Micros,
    /// Every replica sees the engines' own figures this often.
    pub probe: Micros,
    /// What breaks, and when.
    pub restart: Option<RestartPlan>,
    /// Until when requests come, and until when service is counted for fairness.
    pub horizon: Micros,
    /// Seed of everything drawn.
    pub seed: u64,
}

/// Disaggregated prefill and decode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ApartPlan {
    /// The first engines, which compute prompts for the others; 0: all do all.
    pub prefill: u16,
    /// When prompts go through them.
    pub pairs: PairSettings,
    /// Time of a transfer before its first token.
    pub transfer: Micros,
    /// Tokens whose blocks go over per second.
    pub transfer_tokens_per_s: u32,
}

impl Default for ApartPlan {
    fn default() -> Self {
        Self {
            prefill: 0,
            pairs: PairSettings::default(),
            transfer: 5_000,
            transfer_tokens_per_s: 200_000,
        }
    }
}

impl ApartPlan {
    /// How long the blocks of so many tokens take.
    #[must_use]
    pub fn transfer_us(&self, tokens: u32) -> Micros {
        let rate = u64::from(self.transfer_tokens_per_s.max(1));
        self.transfer + u64::from(tokens) * 1_000_000 / rate
    }
}

/// What a request must keep to count as served well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServiceGoal {
    /// Longest time to the first token.
    pub ttft: Micros,
    /// Longest mean time between its tokens.
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

/// How clients are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ClientModel {
    /// From when to when they leave unless they have their whole answer; `None`: they never do.
    pub patience: Option<(Micros, Micros)>,
    /// How often they try again when they are refused or have left, as OpenAI's SDKs do.
    pub retries: u32,
}

/// How an engine serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineModel {
    /// vLLM's scheduler and block pool: continuous batching.
    Continuous(EngineShape),
    /// A batch starts together and ends with its longest request.
    Static(BatchTimes),
}

/// The service time of a batch: `base + longest output * per_token * (1 + spread * (b - 1) / b)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchTimes {
    /// Requests of a batch at most.
    pub batch_max: u32,
    /// Time of a batch besides its tokens, microseconds.
    pub base_us: u64,
    /// Time of one output token of a batch of one, microseconds.
    pub token_us: u64,
    /// What a large batch adds to it, in thousandths.
    pub spread_permille: u64,
}

/// A crash in the middle, with an immediate new start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RestartPlan {
    /// When.
    pub at: Micros,
    /// Who.
    pub who: RestartScope,
    /// Whether what they had on disk is lost.
    pub wipe: bool,
}

/// Which replicas restart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum RestartScope {
    /// All at once.
    All,
    /// The first.
    One,
}

impl BatchTimes {
    /// The seed's calibrated latency model: 5.74 ms a token, a spread of 0.316.
    pub const CALIBRATED: Self = Self {
        batch_max: 8,
        base_us: 0,
        token_us: 5_740,
        spread_permille: 316,
    };

    /// Time of a batch of `requests` whose longest output has `tokens`.
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
            as_written: None,
            admission: AdmissionSettings::default(),
            prices: FairnessSettings::default(),
            codel_target: Duration::MAX,
            clients: ClientModel::default(),
            oracle: false,
            learn: false,
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
            apart: ApartPlan::default(),
            goal: ServiceGoal::default(),
            replicas: 3,
            cells: CellPlan::default(),
            ownership_lag: Some(ms(20)),
            load_lag: Some(ms(20)),
            flush: ms(20),
            probe: ms(1000),
            restart: None,
            horizon: ms(60_000),
            seed: 1,
        }
    }
}

/// Cells behind a first hop, which share nothing but what this says.
#[derive(Debug, Clone, PartialEq)]
pub struct CellPlan {
    /// How many; 1: there is no first hop.
    pub count: u16,
    /// How the first hop chooses a cell, as a policy chooses a backend.
    pub hop: PolicyConfig,
    /// Leading blocks of a prompt that the first hop hashes; all of a shorter one.
    pub hashed_blocks: u32,
    /// How often cells tell the first hop what they have under way.
    pub told_every: Micros,
    /// How often cells charge users for what they were served elsewhere; `None`: never.
    pub charges_every: Option<Micros>,
    /// From cell to cell.
    pub lag: Micros,
}

impl Default for CellPlan {
    fn default() -> Self {
        Self {
            count: 1,
            hop: PolicyConfig::Chwbl(ChwblSettings::default()),
            hashed_blocks: 4,
            told_every: 100_000,
            charges_every: None,
            lag: 50_000,
        }
    }
}

impl SimPlan {
    /// Small engines, so that a queue forms, which never queue themselves.
    pub(super) fn queueing(seed: u64, horizon: Micros, order: Order) -> Self {
        let mut plan = Self {
            seed,
            horizon,
            admission: AdmissionSettings {
                order,
                concurrency: Concurrency::Fixed(16),
                queue_max: u32::MAX,
                wait_ms_max: u32::MAX,
                ..AdmissionSettings::default()
            },
            ..Self::default()
        };
        if let EngineModel::Continuous(shape) = &mut plan.engine {
            shape.max_num_seqs = 24;
        }
        plan
    }

    /// Engines of all cells.
    #[must_use]
    pub fn engines(&self) -> u32 {
        u32::from(self.backends) * u32::from(self.cells.count)
    }

    /// Whether a wait can end before a request goes.
    #[must_use]
    pub fn bounds_waits(&self) -> bool {
        self.admission.wait_ms_max < u32::MAX
    }
}

/// A duration as simulated time.
#[must_use]
pub fn micros(time: Duration) -> Micros {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
