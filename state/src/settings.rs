//! Settings that operators write and several areas read: of admission, and the limits of a user.
//!
//! The settings are replicated. A command replaces them, and they apply from its log index on.
//! Settings that only one area reads, such as those of a policy, are defined in that area.

use bincode::{Decode, Encode};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use crate::bounds::{BATCH_MAX, WINDOW_MS_MAX};
use crate::bounds::{USAGE_DAYS_DEFAULT, USAGE_DAYS_MAX};
pub use crate::concurrency::Concurrency;
use crate::form::{As, AsOption, MicrosOrZero, Millis, MillisOfDay, MillisOrZero, Slots};
use crate::pricing::ChargeInput;
use crate::reject::Rejection;
use crate::validate::{at_least, at_most, ensure};

/// The replicated settings of `[admission]`, which `PUT /admin/v1/admission` changes.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct AdmissionSettings {
    /// Order in which waiting requests of equal priority are served. Like all keys of `[admission]`
    /// except `codel_target` and `priority_max`, it is read when a cluster is created; later use
    /// `PUT /admin/v1/admission`.
    pub order: Order,
    /// Maximum number of concurrent requests per backend. `adaptive`: as many as its memory and
    /// `inter_token` allow, once those are known.
    #[serde(with = "As::<Slots>")]
    pub concurrency: Concurrency,
    /// Maximum number of waiting requests per model and replica; further ones get a 503. Each takes
    /// about 32 KiB, connection included.
    #[schemars(range(min = 1))]
    pub max_queue: u32,
    /// Maximum waiting time; after that a request gets a 503. A request that is predicted to wait
    /// longer gets it immediately.
    #[serde(rename = "max_wait", with = "As::<Millis>")]
    pub max_wait_ms: u32,
    /// Which prompt tokens are charged: only uncached ones, all, or all with cached ones at a
    /// tenth.
    pub charge: ChargeInput,
    /// Number of bins by predicted output length (`K` of Algorithm 6); 1 means no bins.
    #[schemars(range(min = 1, max = 64))]
    pub bins: u16,
    /// Which bin is served next (Algorithm 5).
    pub bin_selection: BinSelection,
    /// A request that has waited this long is served before its bin's turn.
    #[serde(rename = "bin_max_age", with = "As::<MillisOrZero>")]
    pub bin_max_age_ms: u32,
    /// `continuous`: bins only order the queue. `static`: a batch of one bin goes to one backend
    /// together, for engines whose batches end together.
    pub batching: Batching,
    /// Maximum number of requests in a static batch of each bin, from the bin of the shortest
    /// responses on (`BIN_B_MAX` of Algorithm 1). Bins without a number: the backend's limit.
    #[schemars(length(max = 64), inner(range(min = 1)))]
    pub bin_batch_max: Vec<u32>,
    /// Target for the time between output tokens that `adaptive` keeps (`D_SLA`). 0: limit by
    /// memory alone.
    #[serde(rename = "inter_token", with = "As::<MicrosOrZero>")]
    pub inter_token_us: u32,
    /// Number of days, today included, for which `GET /admin/v1/usage` knows the usage.
    #[schemars(range(min = 1, max = USAGE_DAYS_MAX))]
    pub usage_days: u16,
}

impl Default for AdmissionSettings {
    fn default() -> Self {
        Self {
            order: Order::Vtc,
            concurrency: Concurrency::Adaptive,
            max_queue: 4096,
            max_wait_ms: 10_000,
            charge: ChargeInput::Uncached,
            bins: 1,
            bin_selection: BinSelection::RoundRobin,
            bin_max_age_ms: 5_000,
            batching: Batching::Continuous,
            bin_batch_max: Vec::new(),
            inter_token_us: 0,
            usage_days: USAGE_DAYS_DEFAULT,
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

impl AdmissionSettings {
    /// Checks the bounds of every field.
    ///
    /// # Errors
    /// [`Rejection::Invalid`] with the first field that is out of bounds.
    pub fn validate(&self) -> Result<(), Rejection> {
        if let Concurrency::Fixed(requests) = self.concurrency {
            at_least("concurrency", requests, 1)?;
        }
        at_least("max_queue", self.max_queue, 1)?;
        at_least("max_wait", self.max_wait_ms, 1)?;
        ensure((1..=64).contains(&self.bins), "bins", "1 to 64")?;
        let days = 1..=USAGE_DAYS_MAX;
        ensure(days.contains(&self.usage_days), "usage_days", "1 to 400")?;
        let is_sound = self.bin_batch_max.len() <= 64 && !self.bin_batch_max.contains(&0);
        ensure(
            is_sound,
            "bin_batch_max",
            "at most 64 numbers of at least 1",
        )
    }

    /// Whether the settings use output lengths, so that replicas must report them through the log.
    #[must_use]
    pub fn wants_outputs(&self) -> bool {
        self.bins > 1 || self.order == Order::VtcPred
    }
}

/// Maximum number of tokens per window or budget: all integers up to it are exact as JSON numbers.
pub const TOKENS_MAX: u64 = 1 << 53;
/// Default length of a window, in milliseconds.
pub const WINDOW_MS_DEFAULT: u32 = 1000;

/// Limits of one user: how much they may use per window. A limit that is `None` does not apply.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Default, Encode, Decode, Serialize, Deserialize, JsonSchema,
)]
#[serde(default, deny_unknown_fields)]
pub struct UserLimits {
    /// Requests per window. Default: unlimited.
    #[schemars(range(min = 1))]
    pub requests: Option<u32>,
    /// Tokens per window, not counting cached ones. Default: unlimited.
    #[schemars(range(min = 1, max = TOKENS_MAX))]
    pub tokens: Option<u64>,
    /// Concurrent requests. Default: unlimited.
    #[schemars(range(min = 1))]
    pub concurrent: Option<u32>,
    /// Concurrent requests of one tree of sessions: an agent with its sub-agents. Default:
    /// unlimited.
    #[schemars(range(min = 1))]
    pub concurrent_per_tree: Option<u32>,
    /// Tokens of one tree of sessions, prompts and responses together, until its last session ends.
    /// Default: unlimited.
    #[schemars(range(min = 1, max = TOKENS_MAX))]
    pub tokens_per_tree: Option<u64>,
    /// Length of the window. Default: one second.
    #[serde(rename = "window", with = "AsOption::<MillisOfDay>")]
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
        ensure(
            self.concurrent_per_tree != Some(0),
            "limits.concurrent_per_tree",
            "at least 1",
        )?;
        ensure(
            self.tokens_per_tree
                .is_none_or(|tokens| (1..=TOKENS_MAX).contains(&tokens)),
            "limits.tokens_per_tree",
            "1 to 2^53",
        )?;
        ensure(self.window_ms != Some(0), "limits.window", "at least 1")?;
        at_most("limits.window", self.window_ms(), WINDOW_MS_MAX)
    }

    /// Whether no limit is set. The window alone is no limit.
    #[must_use]
    pub fn is_unbounded(&self) -> bool {
        self.requests.is_none()
            && self.tokens.is_none()
            && self.concurrent.is_none()
            && self.concurrent_per_tree.is_none()
            && self.tokens_per_tree.is_none()
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
