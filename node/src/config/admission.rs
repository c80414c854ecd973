//! `[admission]`: the initial settings of a new cluster. Names and units differ from those in the log.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;
use state::admission::{
    AdmissionSettings, BATCH_MAX, Batching, BinSelection, ChargeInput, Grants, MEMORY_Z_MILLI_MAX,
    Order, SlaSettings,
};

use super::form::{Parsed, Slots, Span, SpanOrZero, ms};

/// `[admission]`.
#[derive(Debug, Clone, PartialEq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct AdmissionConfig {
    /// Order in which waiting requests of equal priority are served. Like all keys of `[admission]`
    /// except `codel_target` and `priority_max`, it is read when a cluster is created; later use
    /// `PUT /admin/v1/admission`.
    #[default(AdmissionSettings::default().order)]
    pub order: Order,
    /// Maximum number of concurrent requests per backend. `adaptive`: as many as its memory and
    /// `sla.inter_token` allow, as far as those are known.
    #[default(Parsed(AdmissionSettings::default().concurrency))]
    pub concurrency: Parsed<Slots>,
    /// Maximum number of waiting requests per model and replica; further ones get a 503. Each takes
    /// about 64 KiB, connection included.
    #[schemars(range(min = 1))]
    #[default(AdmissionSettings::default().queue_max)]
    pub max_queue: u32,
    /// Maximum waiting time; after that a request gets a 503. A request that is predicted to wait
    /// longer gets it immediately.
    #[default(ms(AdmissionSettings::default().wait_ms_max))]
    pub max_wait: Parsed<Span>,
    /// Maximum waiting time in overload, that is when arrivals exceed service by half for more than
    /// a second. Set it to `max_wait` or more to switch overload handling off.
    #[default(ms(1_000))]
    pub codel_target: Parsed<Span>,
    /// Highest priority that `x-quorate-priority` can give; higher values are capped.
    #[schemars(range(min = 0))]
    pub priority_max: i16,
    /// Which prompt tokens are charged: the uncached ones, all, or all with cached ones at a tenth.
    #[default(AdmissionSettings::default().charge)]
    pub charge: ChargeInput,
    /// How replicas keep one order while requests wait: `gate` (each replica decides, bounded by
    /// what waits elsewhere) or `log` (exact, at one commit per dispatch).
    #[default(AdmissionSettings::default().grants)]
    pub grants: Grants,
    /// Slack of the gate: how far above the lowest waiting user's counter another user may still be
    /// served, in priced tokens. 0: the largest request seen.
    #[default(AdmissionSettings::default().gate_tokens)]
    pub gate_tokens: u32,
    /// Number of bins by predicted output length; 1 means no bins.
    #[schemars(range(min = 1, max = 64))]
    #[default(AdmissionSettings::default().bins)]
    pub bins: u16,
    /// Which bin is served next.
    #[default(AdmissionSettings::default().bin_selection)]
    pub bin_selection: BinSelection,
    /// A request that has waited this long is served before its bin's turn.
    #[default(ms(AdmissionSettings::default().bin_age_ms_max))]
    pub bin_max_age: Parsed<Span>,
    /// `continuous`: bins only order the queue. `static`: a batch of one bin goes to one backend
    /// together, for engines whose batches end together.
    #[default(AdmissionSettings::default().batching)]
    pub batching: Batching,
    /// What `adaptive` keeps.
    pub sla: SlaConfig,
    /// Limits of users without limits of their own.
    pub user_limits: UserLimitsConfig,
}

/// `[admission.sla]`.
#[derive(Debug, Clone, PartialEq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SlaConfig {
    /// Target for the time between output tokens that `adaptive` keeps. 0: limit by memory alone.
    #[default(us(SlaSettings::default().inter_token_us))]
    pub inter_token: Parsed<SpanOrZero>,
    /// Tolerance around that target within which the limit stays unchanged.
    #[default(us(SlaSettings::default().tolerance_us))]
    pub tolerance: Parsed<SpanOrZero>,
    /// Lowest limit that `adaptive` sets.
    #[schemars(range(min = 1))]
    #[default(SlaSettings::default().batch_min)]
    pub min_batch: u32,
    /// Highest limit that `adaptive` sets.
    #[schemars(range(min = 1, max = BATCH_MAX))]
    #[default(SlaSettings::default().batch_max)]
    pub max_batch: u32,
    /// Safety margin of the memory limit, in thousandths of a standard deviation: with 1645
    /// requests exceed the cache with a probability of 5 %.
    #[schemars(range(max = MEMORY_Z_MILLI_MAX))]
    #[default(SlaSettings::default().memory_z_milli)]
    pub memory_z_milli: u32,
}

/// `[admission.user_limits]`.
#[derive(Debug, Clone, PartialEq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct UserLimitsConfig {
    /// Requests per window for users without limits of their own. Default: unlimited.
    #[schemars(range(min = 1))]
    pub requests: Option<u32>,
    /// Tokens per window, not counting cached ones. Default: unlimited.
    #[schemars(range(min = 1))]
    pub tokens: Option<u32>,
    /// Concurrent requests. Default: unlimited.
    #[schemars(range(min = 1))]
    pub concurrent: Option<u32>,
    /// Length of the window. Default: one second.
    pub window: Option<Parsed<Span>>,
}

fn us(us: u32) -> Parsed<SpanOrZero> {
    Parsed(Duration::from_micros(us.into()))
}
