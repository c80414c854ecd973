//! Settings that operators write and several areas read: admission and user limits.
//!
//! The settings are replicated. A command replaces them, and they apply from its log index on.
//! Settings that only one area reads, such as those of a policy, are defined in that area.

use bincode::{Decode, Encode};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::pricing::ChargeInput;
use crate::reject::Rejection;
use crate::validate::{at_least, at_most, ensure};

/// Admission settings. They are replicated, and `PUT /admin/v1/admission` changes them.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdmissionSettings {
    /// Order of waiting requests with equal priority.
    pub order: Order,
    /// Limit on the requests that a backend runs at once.
    pub concurrency: Concurrency,
    /// Maximum number of waiting requests per model and replica; further ones are rejected.
    pub queue_max: u32,
    /// Longest wait before a request is rejected, in milliseconds.
    pub wait_ms_max: u32,
    /// Rule for which prompt tokens are charged at dispatch.
    pub charge: ChargeInput,
    /// Maximum by which one dispatch may raise a counter, in priced tokens at weight 1; 0 for the
    /// price of the largest request seen. The gate's slack `G` is the larger of this and what the
    /// replicas' lag requires.
    pub gate_tokens: u32,
    /// Number of output-length bins, `K` of Algorithm 6; 1 for no bins.
    pub bins: u16,
    /// Rule that selects the next bin (Algorithm 5).
    pub bin_selection: BinSelection,
    /// Wait after which a request goes ahead of its bin's turn, in milliseconds.
    pub bin_age_ms_max: u32,
    /// Use of the bins: as classes in the queue's order, or as batches for one backend.
    pub batching: Batching,
    /// Settings of limits by service level (Algorithms 1, 2 and 7), for adaptive `concurrency`.
    pub sla: SlaSettings,
    /// Limits of users who have no limits of their own.
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

/// Queue order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Order {
    /// Least virtual token counter (VTC).
    Vtc,
    /// Like `vtc`, with the counter raised by the user's requests in flight.
    VtcMaxFair,
    /// Like `vtc`, with the predicted output charged at dispatch and settled at the end.
    VtcPred,
    /// Deficit longest prefix match: cache locality within fairness.
    Dlpm,
    /// Least counter first, without lift.
    Lcf,
    /// Fewest requests in the last minute.
    Rpm,
    /// First come, first served.
    Fcfs,
}

/// Limit on the requests that a backend runs at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Concurrency {
    /// The limit is learned per backend from memory and service level.
    Adaptive,
    /// The number of requests is unlimited.
    Unlimited,
    /// The limit is this number of requests.
    Fixed(u32),
}

/// How the next bin is selected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum BinSelection {
    /// Round robin.
    RoundRobin,
    /// The bin with the most requests.
    LongestQueue,
}

/// How bins are used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Batching {
    /// A bin is a class in the queue's order.
    Continuous,
    /// A bin is a batch sent to one backend together, for engines that batch with a barrier.
    Static,
}

/// Maximum of `sla.batch_max`, in requests.
pub const BATCH_MAX: u32 = 1 << 16;
/// Maximum of `sla.memory_z_milli`, in thousandths.
pub const MEMORY_Z_MILLI_MAX: u32 = 10_000;

/// Settings of limits by service level (Algorithms 1, 2 and 7).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SlaSettings {
    /// Target time between tokens (`D_SLA`), in microseconds; 0 to limit by memory only.
    pub inter_token_us: u32,
    /// Half width of the tolerance band around the target (`eps_D`), in microseconds.
    pub tolerance_us: u32,
    /// Lower bound of the limit (`B_min`), in requests.
    pub batch_min: u32,
    /// Upper bound of the limit (`B_max`), in requests.
    pub batch_max: u32,
    /// Quantile `z` of Algorithm 1, in thousandths: with 1645, memory overflows in 5 % of cases.
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
    /// Checks the bounds of every field.
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

    /// Whether the settings use output lengths, so that replicas must report them through the log.
    #[must_use]
    pub fn wants_outputs(&self) -> bool {
        self.bins > 1 || self.order == Order::VtcPred
    }
}

/// Maximum length of a window, in milliseconds: one day.
pub const WINDOW_MS_MAX: u32 = 24 * 60 * 60 * 1000;
/// Maximum number of tokens per window or budget: all integers up to it are exact as JSON numbers.
pub const TOKENS_MAX: u64 = 1 << 53;
/// Default length of a window, in milliseconds.
pub const WINDOW_MS_DEFAULT: u32 = 1000;

/// Limits of one user. A limit that is `None` does not apply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Encode, Decode, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct UserLimits {
    /// Maximum number of requests per window.
    pub requests: Option<u32>,
    /// Maximum number of tokens per window, not counting cached ones.
    pub tokens: Option<u64>,
    /// Maximum number of requests in flight at once.
    pub concurrent: Option<u32>,
    /// Length of the window, in milliseconds; `None` for one second.
    pub window_ms: Option<u32>,
}

impl UserLimits {
    /// Checks the bounds of every field.
    ///
    /// # Errors
    /// [`Rejection::Invalid`] with the first field that is out of bounds.
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

    /// Whether no limit is set. The window alone is no limit.
    #[must_use]
    pub fn is_unbounded(&self) -> bool {
        self.requests.is_none() && self.tokens.is_none() && self.concurrent.is_none()
    }

    /// Returns the length of the window, in milliseconds.
    #[must_use]
    pub fn window_ms(&self) -> u32 {
        self.window_ms.unwrap_or(WINDOW_MS_DEFAULT)
    }

    /// Whether a limit per window is set.
    pub(crate) fn has_rate(&self) -> bool {
        self.requests.is_some() || self.tokens.is_some()
    }
}
