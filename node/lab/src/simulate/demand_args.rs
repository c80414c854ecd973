//! Flags of `quorate simulate` for the workload.

use std::time::Duration;

use super::events::Micros;
use super::parse::{range, rate, span};
use super::plan::micros;
use super::workload::{AgentLoad, LengthRange, Mix};
use crate::replay::trace::LengthScale;

/// Parameters of the workload.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Workload")]
pub(super) struct DemandArgs {
    /// Mean requests per second [default for a trace: as recorded]
    #[arg(long, value_name = "R", value_parser = rate)]
    pub(super) rate: Option<f64>,
    /// Time until which requests arrive [default: the end of the trace or recording, or as the
    /// workload or experiment has it]
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    pub(super) duration: Option<Duration>,
    /// Maximum number of requests [default: no limit]
    #[arg(long, value_name = "N")]
    pub(super) requests: Option<u64>,
    /// Multiply the lengths in a trace or of `agents` by this fraction, such as 1/16 [default: 1 for
    /// a trace, 1/16 for `agents`]
    #[arg(long, value_name = "FRACTION")]
    pub(super) scale: Option<LengthScale>,
    /// Number of users
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(super) users: u32,
    /// Pin each user to one replica
    #[arg(long)]
    pub(super) pin: bool,
    /// Weights of users, repeated as needed: 1,2,3,4
    #[arg(long, value_name = "W", value_delimiter = ',', default_value = "1", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(super) weights: Vec<u32>,
    /// Relative rates of users in `fairness`, repeated as needed: 1,2,3,4
    #[arg(long, value_name = "R", value_delimiter = ',', default_value = "1,2,3,4", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(super) rates: Vec<u32>,
    /// Requests that a user of rate 1 keeps open in `fairness`, enough to always wait
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(super) backlog: u32,
    /// Time in which the first user of `fairness` sends nothing: 20s..40s [default: none]
    #[arg(long, value_name = "FROM..TO", value_parser = span)]
    pub(super) off: Option<(Micros, Micros)>,
    /// Prompt tokens that are unique to a request: 64..192 [default: as the workload has it]
    #[arg(long, value_name = "A..B", value_parser = range)]
    pub(super) input_tokens: Option<(u32, u32)>,
    /// Output tokens per request: 16..64 [default: as the workload has it]
    #[arg(long, value_name = "A..B", value_parser = range)]
    pub(super) output_tokens: Option<(u32, u32)>,
    /// Number of groups of requests with a shared prefix [default: as the workload has it]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(super) prefixes: Option<u32>,
    /// Tokens of a group's shared prefix [default: as the workload has it]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    pub(super) prefix_tokens: Option<u32>,
}

impl DemandArgs {
    /// Returns the load of `agents`.
    pub(super) fn agents(&self) -> AgentLoad {
        let load = AgentLoad::default();
        AgentLoad {
            rate: self.rate.unwrap_or(load.rate),
            duration: self.duration.map_or(load.duration, micros),
            requests: self.requests.unwrap_or(load.requests),
            users: self.users,
            scale: self.scale.unwrap_or(load.scale),
        }
    }

    /// Returns the load of another kind than `agents` and `fairness`.
    pub(super) fn mix(&self, kind: WorkloadKind) -> Mix {
        let mix = match kind {
            WorkloadKind::SharedPrefix | WorkloadKind::Fairness | WorkloadKind::Agents => {
                Mix::shared_prefix()
            }
            WorkloadKind::OneHot => Mix::one_hot(),
            WorkloadKind::Templated => Mix::templated(),
            WorkloadKind::Volatile => Mix::volatile(),
            WorkloadKind::Burst => Mix::burst(),
            WorkloadKind::Day => Mix::day(),
        };
        Mix {
            rate: self.rate.unwrap_or(mix.rate),
            duration: self.duration.map_or(mix.duration, micros),
            requests: self.requests.unwrap_or(u64::MAX),
            groups: self.prefixes.unwrap_or(mix.groups),
            group_tokens: self.prefix_tokens.unwrap_or(mix.group_tokens),
            lengths: LengthRange {
                input: self.input_tokens.unwrap_or(mix.lengths.input),
                output: self.output_tokens.unwrap_or(mix.lengths.output),
            },
            users: self.users,
            ..mix
        }
    }
}

/// Generated workloads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum WorkloadKind {
    /// Groups with a long shared prefix each
    SharedPrefix,
    /// Most requests in one group
    OneHot,
    /// One prefix shared by all groups
    Templated,
    /// One block that differs between groups, early in otherwise identical prompts
    Volatile,
    /// Bursts: six times the rate for five of every twenty seconds
    Burst,
    /// A day: nothing at night, a steep morning, a peak at noon, a slow evening
    Day,
    /// Users who always have requests waiting
    Fairness,
    /// Sessions of agents: growing prompts, pauses, bursts of sub-agents
    Agents,
}
