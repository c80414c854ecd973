//! `[admission]`: the initial settings of a new cluster, and what each replica sets for itself.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;
use state::admission::AdmissionSettings;

use super::form::{As, Span};

/// Keys of `[admission]`: queueing and fairness of a new cluster, and how this replica sheds load.
#[derive(Debug, Clone, PartialEq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct AdmissionConfig {
    /// Replicated settings, of a new cluster.
    #[serde(flatten)]
    pub founding: AdmissionSettings,
    /// Maximum waiting time in overload, that is when arrivals exceed service by half for more than
    /// a second. Set it to `max_wait` or more to switch overload handling off.
    #[serde(with = "As::<Span>")]
    #[default(Duration::from_secs(1))]
    pub codel_target: Duration,
    /// Highest priority that `x-quorate-priority` can give; higher values are capped.
    #[schemars(range(min = 0))]
    pub priority_max: i16,
}
