//! Flags of `quorate simulate` for engines that start and stop.

use std::time::Duration;

use super::day::HOLD;
use super::plan::{ScalingPlan, ScalingRule, micros};

/// The scaler and the engines of the experiment `day`.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Starts and stops of engines (experiment `day`)")]
pub(super) struct ScalingArgs {
    /// Time from the start of an engine until it takes requests
    #[arg(long, value_name = "TIME", default_value = "90s", value_parser = humantime::parse_duration)]
    engine_start: Duration,
    /// Interval at which the scaler asks how many engines are wanted
    #[arg(long, value_name = "TIME", default_value = "15s", value_parser = humantime::parse_duration)]
    scaler_poll: Duration,
}

impl ScalingArgs {
    /// Returns the plan of a scaler that starts as many engines as are wanted.
    pub(super) fn plan(&self) -> ScalingPlan {
        ScalingPlan {
            rule: ScalingRule::Wanted(micros(self.scaler_poll).max(1_000_000)),
            start: micros(self.engine_start),
            hold: HOLD,
        }
    }
}
