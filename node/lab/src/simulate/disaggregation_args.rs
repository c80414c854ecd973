//! Flags of `quorate simulate` for disaggregation, and for the latency goals of goodput.

use std::time::Duration;

use state::policy::PairSettings;

use super::argument_error::SimulateArgsError;
use super::plan::{DisaggregationPlan, ServiceGoal, SimPlan, micros};

/// Disaggregated prefill and decode.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Disaggregated prefill and decode")]
pub(super) struct ApartArgs {
    /// Numbers of prefill engines to compare, one run each; the others decode. 0: all engines do
    /// both
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "0")]
    prefill: Vec<u16>,
    /// Uncached prompt tokens above which a request uses a prefill engine
    #[arg(long, value_name = "N", default_value_t = PairSettings::ABOVE_TOKENS_DEFAULT)]
    disaggregate_above_tokens: u32,
    /// Tokens whose KV blocks are transferred per second
    #[arg(long, value_name = "N", default_value_t = 200_000, value_parser = clap::value_parser!(u32).range(1..))]
    transfer_rate: u32,
    /// Longest time to first token of requests that count in good/s
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = humantime::parse_duration)]
    goal_ttft: Duration,
    /// Longest mean time between tokens of requests that count in good/s
    #[arg(long, value_name = "TIME", default_value = "50ms", value_parser = humantime::parse_duration)]
    goal_gap: Duration,
}

impl ApartArgs {
    /// Checks that at least one of `backends` engines is left to decode.
    ///
    /// # Errors
    /// If a number of prefill engines leaves none.
    pub(super) fn check(&self, backends: u16) -> Result<(), SimulateArgsError> {
        if self.prefill.iter().all(|prefill| *prefill < backends) {
            return Ok(());
        }
        Err(SimulateArgsError::new(
            "--prefill leaves no engine that answers",
        ))
    }

    pub(super) fn plan(&self) -> DisaggregationPlan {
        DisaggregationPlan {
            pairs: PairSettings {
                above_tokens: self.disaggregate_above_tokens,
                ..PairSettings::default()
            },
            transfer_tokens_per_s: self.transfer_rate,
            ..DisaggregationPlan::default()
        }
    }

    pub(super) fn goal(&self) -> ServiceGoal {
        ServiceGoal {
            ttft: micros(self.goal_ttft),
            gap: micros(self.goal_gap),
        }
    }

    /// Returns a copy of `plan` for each number of prefill engines.
    pub(super) fn plans<'a>(&'a self, plan: &'a SimPlan) -> impl Iterator<Item = SimPlan> + 'a {
        self.prefill.iter().map(move |prefill| {
            let mut plan = plan.clone();
            plan.disaggregation.prefill = *prefill;
            if self.prefill.len() > 1 {
                plan.label = format!("{} {prefill}P", plan.label).trim().to_owned();
            }
            plan
        })
    }
}
