//! How requests are admitted, as operators write it: settings that several areas read.
//!
//! They are replicated: a command replaces them, and they hold from its log index on. Settings that one
//! area alone reads, as those of a policy, stand in that area.

use bincode::{Decode, Encode};
use serde::{Deserialize, Serialize};

use crate::pricing::ChargeInput;
use crate::reject::Rejection;
use crate::validate::{at_least, at_most, ensure};

/// How requests are admitted: replicated, changed by `PUT /admin/v1/admission`.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdmissionSettings {
    /// Who goes first among requests of equal priority.
    pub order: Order,
    /// How many requests a backend is given at once.
    pub concurrency: Concurrency,
    /// Requests that wait per model and replica at most; beyond, they are refused.
    pub queue_max: u32,
    /// Longest wait, milliseconds; after it a request is refused.
    pub wait_ms_max: u32,
    /// What of the prompt is charged at dispatch.
    pub charge: ChargeInput,
    /// Who decides the order over replicas under backlog.
    pub grants: Grants,
    /// Most that one dispatch may raise a counter, in priced tokens at weight 1: `G` of the gate is
    /// this, or what the replicas' lag allows, whichever is more. 0: the largest request seen.
    pub gate_tokens: u32,
    /// Output-length bins, `K` of Algorithm 6; 1: none.
    pub bins: u16,
    /// How the next bin is selected (Algorithm 5).
    pub bin_selection: BinSelection,
    /// A request that has waited this long goes before its bin's turn, milliseconds.
    pub bin_age_ms_max: u32,
    /// What a bin is: a class in the queue's order, or a batch for one backend.
    pub batching: Batching,
    /// Limits by service level (Algorithms 1, 2 and 7); for `concurrency = "adaptive"`.
    pub sla: SlaSettings,
    /// What users without limits of their own may use.
    pub user_limits: UserLimits,
}

impl Default for AdmissionSettings {
    fn default() -> Self {
        Self {
            order: Order::Vtc,
            concurrency: Concurrency::Adaptive,
            queue_max: 4096,
            wait_ms_max: 10_000,
            charge: ChargeInput::Uncached,
            grants: Grants::Gate,
            gate_tokens: 0,
            bins: 1,
            bin_selection: BinSelection::RoundRobin,
            bin_age_ms_max: 5_000,
            batching: Batching::Continuous,
            sla: SlaSettings::default(),
            user_limits: UserLimits::default(),
        }
    }
}

/// Who goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Order {
    /// Least virtual token counter (VTC).
    Vtc,
    /// As `vtc`, with the counter raised by what the user has under way.
    VtcMaxFair,
    /// As `vtc`, with the predicted output charged at dispatch and settled at the end.
    VtcPred,
    /// Deficit longest prefix match: locality within fairness.
    Dlpm,
    /// Least counter first, without lift.
    Lcf,
    /// Fewest requests within the last minute.
    Rpm,
    /// First come, first served.
    Fcfs,
}

/// How many requests a backend is given at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Concurrency {
    /// As memory and service level allow, learnt per backend.
    Adaptive,
    /// As many as come.
    Unlimited,
    /// This many.
    Fixed(u32),
}

/// Who decides the order over replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Grants {
    /// Each replica, gated by the cluster's smallest backlogged counter.
    Gate,
    /// The log, one commit per dispatch while requests wait.
    Log,
}

/// How the next bin is selected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BinSelection {
    /// One after the other.
    RoundRobin,
    /// The one with most requests.
    LongestQueue,
}

/// What a bin is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Batching {
    /// A class in the queue's order.
    Continuous,
    /// A batch that goes to one backend together, for engines that batch with a barrier.
    Static,
}

/// Upper bound of `sla.batch_max`.
pub const BATCH_MAX: u32 = 1 << 16;
/// Upper bound of `sla.memory_z_milli`.
const MEMORY_Z_MILLI_MAX: u32 = 10_000;

/// Settings of Algorithms 1, 2 and 7.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SlaSettings {
    /// `D_SLA`: inter-token time to keep, microseconds; 0: none, memory alone limits.
    pub inter_token_us: u32,
    /// `eps_D`: half width of the band around it, microseconds.
    pub tolerance_us: u32,
    /// `B_min`.
    pub batch_min: u32,
    /// `B_max`.
    pub batch_max: u32,
    /// `z` of Algorithm 1 in thousandths: 1645 lets memory overflow with a probability of 5 %.
    pub memory_z_milli: u32,
}

impl Default for SlaSettings {
    fn default() -> Self {
        Self {
            inter_token_us: 0,
            tolerance_us: 5_000,
            batch_min: 1,
            batch_max: 1024,
            memory_z_milli: 1645,
        }
    }
}

impl AdmissionSettings {
    /// Checks every setting.
    ///
    /// # Errors
    /// [`Rejection::Invalid`] with the first field that is out of bounds.
    pub fn validate(&self) -> Result<(), Rejection> {
        if let Concurrency::Fixed(requests) = self.concurrency {
            at_least("concurrency", requests, 1)?;
        }
        at_least("queue_max", self.queue_max, 1)?;
        at_least("wait_ms_max", self.wait_ms_max, 1)?;
        ensure((1..=64).contains(&self.bins), "bins", "1 to 64")?;
        self.user_limits.validate()?;
        ensure(
            self.grants == Grants::Gate || self.batching == Batching::Continuous,
            "batching",
            "continuous with grants through the log",
        )?;
        at_least("sla.batch_min", self.sla.batch_min, 1)?;
        ensure(
            self.sla.batch_min <= self.sla.batch_max,
            "sla.batch_max",
            "at least sla.batch_min",
        )?;
        ensure(
            self.sla.batch_max <= BATCH_MAX,
            "sla.batch_max",
            "at most 65536",
        )?;
        ensure(
            self.sla.memory_z_milli <= MEMORY_Z_MILLI_MAX,
            "sla.memory_z_milli",
            "at most 10000",
        )
    }

    /// Whether output lengths are worth a place in the log.
    #[must_use]
    pub fn wants_outputs(&self) -> bool {
        self.bins > 1 || self.order == Order::VtcPred
    }
}

/// Longest window: a day.
pub const WINDOW_MS_MAX: u32 = 24 * 60 * 60 * 1000;
/// Most tokens per window: what JSON numbers hold exactly.
pub const TOKENS_MAX: u64 = 1 << 53;
/// The window when none is set.
pub const WINDOW_MS_DEFAULT: u32 = 1000;

/// Bounds on one user's use; `None`: unbounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Encode, Decode, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct UserLimits {
    /// Requests per window.
    pub requests: Option<u32>,
    /// Tokens per window, cached ones not counted.
    pub tokens: Option<u64>,
    /// Requests in flight at once.
    pub concurrent: Option<u32>,
    /// The window, milliseconds; `None`: one second.
    pub window_ms: Option<u32>,
}

impl UserLimits {
    /// Checks every bound.
    ///
    /// # Errors
    /// [`Rejection::Invalid`] with the first that is out of bounds.
    pub fn validate(&self) -> Result<(), Rejection> {
        ensure(self.requests != Some(0), "limits.requests", "at least 1")?;
        ensure(
            self.tokens
                .is_none_or(|tokens| (1..=TOKENS_MAX).contains(&tokens)),
            "limits.tokens",
            "1 to 2^53",
        )?;
        ensure(
            self.concurrent != Some(0),
            "limits.concurrent",
            "at least 1",
        )?;
        ensure(self.window_ms != Some(0), "limits.window_ms", "at least 1")?;
        at_most("limits.window_ms", self.window_ms(), WINDOW_MS_MAX)
    }

    /// Whether nothing is bounded.
    #[must_use]
    pub fn is_unbounded(&self) -> bool {
        self.requests.is_none() && self.tokens.is_none() && self.concurrent.is_none()
    }

    /// The window, milliseconds.
    #[must_use]
    pub fn window_ms(&self) -> u32 {
        self.window_ms.unwrap_or(WINDOW_MS_DEFAULT)
    }

    /// Whether something is bounded per window.
    pub(crate) fn has_rate(&self) -> bool {
        self.requests.is_some() || self.tokens.is_some()
    }
}
