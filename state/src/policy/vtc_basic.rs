//! `vtc-basic`: AIBrix's simplified virtual token counter.
//!
//! Source: AIBrix gateway, `pkg/plugins/gateway/algorithms/vtc` (`vtc_basic.go`,
//! `token_tracker.go`). A user's weighted tokens within a sliding window, divided by a bucket that
//! adapts to all users, give a position in the list of backends: `min(tokens / bucket, n - 1)` with
//! `bucket = max(min_tokens, (least + most) / 2)`. A backend's score is the weighted sum of its
//! distance from that position and its utilisation `min(running / max_pod_load, 1)`, plus noise
//! below 0.1. The lowest score wins. The policy spreads users over backends but does not limit any
//! user's service, which would require a queue.
//!
//! Two things differ from AIBrix. Token counts are those that engines report, on all replicas,
//! instead of one replica's estimates. Backends are listed by slot, the order of registration,
//! instead of in watch order.

use bincode::{Decode, Encode};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::rank::{BySlot, Policy, PolicyInputs, Rank, Ranks, draw};
use super::{Candidate, PolicyRequest, Reason};
use crate::reject::Rejection;
use crate::validate::{at_least, at_most, ensure};

/// Maximum setting of a weight, in thousandths.
const WEIGHT_MILLI_MAX: u32 = 1_000_000;
/// Maximum setting of the window's length, in time units.
const WINDOW_SIZE_MAX: u32 = 10_000;
/// Resolution: the value of one place in the list of backends, and of a utilisation of 1.
const PARTS: u64 = 1_000_000;
/// Bound of the noise: 0.1 in the score's billionths.
const NOISE: u64 = 100_000_000;

/// Settings of the `vtc-basic` policy, named after AIBrix's environment variables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct VtcBasicSettings {
    /// Time unit of the window.
    pub token_tracker_time_unit: TimeUnit,
    /// Length of the window over which users' tokens are counted, in time units.
    #[schemars(range(min = 1, max = WINDOW_SIZE_MAX))]
    pub token_tracker_window_size: u32,
    /// Smallest bucket in tokens, and the assumed minimum when no user has used any.
    #[schemars(range(min = 1))]
    pub token_tracker_min_tokens: u32,
    /// Assumed maximum of users' tokens when no user has used any; at least
    /// `token_tracker_min_tokens`.
    #[schemars(range(min = 1))]
    pub token_tracker_max_tokens: u32,
    /// Weight of a prompt token, in thousandths.
    #[schemars(range(max = WEIGHT_MILLI_MAX))]
    pub input_token_weight_milli: u32,
    /// Weight of an output token, in thousandths.
    #[schemars(range(max = WEIGHT_MILLI_MAX))]
    pub output_token_weight_milli: u32,
    /// Number of running requests that counts as full utilisation.
    #[schemars(range(min = 1))]
    pub max_pod_load: u32,
    /// Weight of fairness (distance from the user's place among the backends), in thousandths.
    #[schemars(range(max = WEIGHT_MILLI_MAX))]
    pub fairness_weight_milli: u32,
    /// Weight of utilisation, in thousandths.
    #[schemars(range(max = WEIGHT_MILLI_MAX))]
    pub utilization_weight_milli: u32,
}

/// Unit of a window's length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum TimeUnit {
    /// 60 seconds.
    Minutes,
    /// 1000 milliseconds.
    Seconds,
    /// Thousandths of a second.
    Milliseconds,
}

impl Default for VtcBasicSettings {
    fn default() -> Self {
        Self {
            token_tracker_time_unit: TimeUnit::Minutes,
            token_tracker_window_size: 5,
            token_tracker_min_tokens: 1000,
            token_tracker_max_tokens: 8000,
            input_token_weight_milli: 1000,
            output_token_weight_milli: 2000,
            max_pod_load: 100,
            fairness_weight_milli: 1000,
            utilization_weight_milli: 1000,
        }
    }
}

impl VtcBasicSettings {
    /// Returns the length of the window, in milliseconds.
    #[must_use]
    pub fn window_ms(&self) -> u64 {
        let unit_ms = match self.token_tracker_time_unit {
            TimeUnit::Minutes => 60_000,
            TimeUnit::Seconds => 1000,
            TimeUnit::Milliseconds => 1,
        };
        u64::from(self.token_tracker_window_size) * unit_ms
    }

    /// Returns `max(min_tokens, (least + most) / 2)`, in thousandths of a token.
    fn bucket_milli(&self, request: &PolicyRequest) -> u64 {
        let milli = |tokens: u32| u64::from(tokens) * 1000;
        let min_milli = milli(self.token_tracker_min_tokens);
        let least = request.user.least_milli.unwrap_or(min_milli);
        let most = request
            .user
            .most_milli
            .unwrap_or(milli(self.token_tracker_max_tokens));
        least.midpoint(most).max(min_milli).max(1)
    }
}

impl Policy for VtcBasicSettings {
    fn validate(&self) -> Result<(), Rejection> {
        let window_size = self.token_tracker_window_size;
        at_least("token_tracker_window_size", window_size, 1)?;
        at_most("token_tracker_window_size", window_size, WINDOW_SIZE_MAX)?;
        at_least("token_tracker_min_tokens", self.token_tracker_min_tokens, 1)?;
        ensure(
            self.token_tracker_max_tokens >= self.token_tracker_min_tokens,
            "token_tracker_max_tokens",
            "at least token_tracker_min_tokens",
        )?;
        at_least("max_pod_load", self.max_pod_load, 1)?;
        for (field, weight_milli) in [
            ("input_token_weight_milli", self.input_token_weight_milli),
            ("output_token_weight_milli", self.output_token_weight_milli),
            ("fairness_weight_milli", self.fairness_weight_milli),
            ("utilization_weight_milli", self.utilization_weight_milli),
        ] {
            at_most(field, weight_milli, WEIGHT_MILLI_MAX)?;
        }
        Ok(())
    }

    fn needs(&self) -> PolicyInputs<'_> {
        PolicyInputs {
            user_tokens: true,
            ..PolicyInputs::by_load()
        }
    }

    fn ranks<'a>(
        &'a self,
        request: &'a PolicyRequest,
        candidates: &'a [Candidate],
    ) -> impl Ranks + use<'a> {
        let last = (candidates.len() as u64).saturating_sub(1);
        let place = u128::from(request.user.own_milli) * u128::from(PARTS)
            / u128::from(self.bucket_milli(request));
        VtcBasic {
            settings: self,
            jitter: request.jitter,
            line: BySlot::of(candidates),
            user_place: u64::try_from(place).unwrap_or(u64::MAX).min(last * PARTS),
        }
    }
}

struct VtcBasic<'a> {
    settings: &'a VtcBasicSettings,
    jitter: u64,
    line: BySlot<'a>,
    /// Position of the user in the list of backends, in `PARTS` of a place.
    user_place: u64,
}

impl Ranks for VtcBasic<'_> {
    /// Ranks `candidate` by the policy's score, in billionths.
    fn rank(&self, place: usize, candidate: &Candidate) -> Rank {
        let settings = self.settings;
        let weigh = |weight_milli: u32, parts: u64| u64::from(weight_milli).saturating_mul(parts);
        let distance = (self.line.place(place) as u64 * PARTS).abs_diff(self.user_place);
        let utilization =
            u64::from(candidate.running) * PARTS / u64::from(settings.max_pod_load.max(1));
        let noise = u128::from(draw(self.jitter, candidate.slot)) * u128::from(NOISE);
        let score = weigh(settings.fairness_weight_milli, distance)
            .saturating_add(weigh(
                settings.utilization_weight_milli,
                utilization.min(PARTS),
            ))
            .saturating_add((noise >> 64) as u64);
        Rank::first(score, Reason::UserShare)
    }
}
