//! `quorate replay`: its flags, progress bar and exit code.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use state::policy::POLICY_NAMES;

use super::agents::{Agents, AgentsOptions};
use super::client::ReplayClient;
use super::load::{LoadPlan, LoadSource, run as run_load};
use super::policies::{self, ClusterUnderTest, EVERY_POLICY, PolicyComparison};
use super::print;
use super::progress::show;
use super::targets::Targets;
use super::trace::{self, LengthScale, TraceOptions};
use crate::engine::fleet::EnginesPlan;
use crate::engine::offload::OffloadOptions;
use crate::terminal;

/// Replay a recorded trace against running replicas or engines.
#[derive(Debug, Clone, clap::Args)]
pub struct ReplayArgs {
    /// Trace file: a recording of `quorate record`, Mooncake's JSON lines, or Azure's or VTC's CSV
    #[arg(long, value_name = "FILE", required_unless_present = "workload")]
    trace: Option<PathBuf>,
    /// Generated requests instead of a trace: agents, whose prompts grow turn by turn, with pauses
    /// and sub-agents
    #[arg(long, value_name = "NAME", value_parser = ["agents"], conflicts_with_all = ["trace", "policies", "first", "speed"])]
    workload: Option<String>,
    /// Number of agents at a time, without their sub-agents
    #[arg(long, value_name = "N", default_value_t = 16, requires = "workload", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    agents: u32,
    /// Number of turns that the agents send
    #[arg(long, value_name = "N", default_value_t = 1000, requires = "workload", value_parser = clap::value_parser!(u64).range(1..))]
    requests: u64,
    /// Base URLs to send requests to, in turn
    #[arg(
        long,
        value_name = "URL",
        value_delimiter = ',',
        required_unless_present = "policies"
    )]
    target: Vec<String>,
    /// Compare these policies (or all), each with three fresh replicas and fresh emulated engines
    /// in this process
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = policy, conflicts_with_all = ["target", "model"])]
    policies: Vec<String>,
    /// Number of emulated engines of `--policies`
    #[arg(long, value_name = "N", default_value_t = 4, requires = "policies", value_parser = clap::value_parser!(u8).range(1..=64))]
    engines: u8,
    /// Speed of the emulated engines, relative to a small GPU
    #[arg(long, value_name = "X", default_value = "1", requires = "policies", value_parser = speed)]
    engine_speed: f64,
    /// KV cache blocks of each emulated engine [default: as in `quorate engine`]
    #[arg(long, value_name = "N", requires = "policies", value_parser = clap::value_parser!(u32).range(16..))]
    engine_blocks: Option<u32>,
    /// Override a config value of the replicas of `--policies`; may be repeated
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE", requires = "policies")]
    settings: Vec<String>,
    /// Factor by which the trace is replayed faster than it was recorded
    #[arg(long, value_name = "X", default_value = "1", value_parser = speed)]
    speed: f64,
    /// Scale lengths and block size by this factor, such as 1/16
    #[arg(long, value_name = "FRACTION", default_value = "1")]
    scale: LengthScale,
    /// Replay only this much of the trace, such as 10m
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration)]
    first: Option<Duration>,
    /// Number of users to spread conversations over, if the trace names none
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    users: u32,
    /// Maximum number of requests in flight; beyond it requests are sent late
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=16_384))]
    max_in_flight: u32,
    /// Model to request [default: the one that a recording names, if the first target serves it, else
    /// the first one that it serves]
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// Timeout of a request
    #[arg(long, value_name = "DURATION", default_value = "10m", value_parser = humantime::parse_duration)]
    timeout: Duration,
    /// Seed of the generated texts
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
}

/// Parses a speed-up factor: a number above 0 and at most 1e6.
///
/// # Errors
/// If `text` is no such number, with the expected values.
pub fn speed(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number > 0.0 && number <= 1e6 => Ok(number),
        _ => Err("expected a number above 0 and at most 1e6".to_owned()),
    }
}

fn policy(text: &str) -> Result<String, String> {
    if text == EVERY_POLICY || POLICY_NAMES.contains(&text) {
        return Ok(text.to_owned());
    }
    let names = POLICY_NAMES.join(", ");
    Err(format!("expected {EVERY_POLICY:?} or some of {names}"))
}

/// Replays the trace and prints the report. The exit code is 1 if requests failed. A comparison of
/// policies runs clusters of type `C`.
///
/// # Errors
/// If the trace cannot be read or is empty, a target is not a URL, the first target serves no
/// model, or a cluster cannot be started.
pub async fn run<C: ClusterUnderTest>(args: ReplayArgs) -> anyhow::Result<ExitCode> {
    let mut work = args.work()?;
    if !args.policies.is_empty()
        && let LoadSource::Trace(arrivals) = &mut work
    {
        // The emulated engines serve a model of their own.
        arrivals.iter_mut().for_each(|arrival| arrival.model = None);
        return policies::compare::<C>(&args.comparison(), arrivals).await;
    }
    let targets = Targets::new(&args.target)?;
    let served = match &args.model {
        Some(model) => vec![model.clone()],
        None => ReplayClient::new(args.timeout)
            .models(targets.uri(0, "/v1/models"))
            .await
            .with_context(|| format!("ask {} for its models", targets.name(0)))?,
    };
    work.request(&served);
    let model = served.into_iter().next().unwrap_or_default();
    let bar = terminal::progress_bar(work.planned(), terminal::COUNT)?;
    let plan = LoadPlan {
        work,
        model,
        speed: args.speed,
        in_flight_max: args.max_in_flight as usize,
        timeout: args.timeout,
    };
    let report = run_load(plan, &targets, |progress| show(&bar, progress)).await;
    bar.finish_and_clear();
    if args.json {
        terminal::print(serde_json::to_string_pretty(&report)?)?;
    } else {
        terminal::print(print::tables(&report))?;
    }
    let failed = report.total.failed + report.total.lost;
    Ok(if failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

impl ReplayArgs {
    /// Returns the requests to send.
    ///
    /// # Errors
    /// If the trace cannot be read or is empty.
    fn work(&self) -> anyhow::Result<LoadSource<'static>> {
        let Some(trace) = &self.trace else {
            return Ok(LoadSource::Agents {
                agents: Agents::new(AgentsOptions {
                    agents: self.agents,
                    users: self.users,
                    scale: self.scale,
                    seed: self.seed,
                }),
                requests: self.requests,
            });
        };
        let options = TraceOptions {
            scale: self.scale,
            first: self.first,
            users: self.users,
            seed: self.seed,
            takes_recordings: true,
        };
        let arrivals = trace::read(trace, &options)?;
        ensure!(
            !arrivals.is_empty(),
            "{}: no request to replay",
            trace.display()
        );
        Ok(LoadSource::Trace(arrivals))
    }

    fn comparison(&self) -> PolicyComparison<'_> {
        let asked = |name: &&&str| {
            self.policies
                .iter()
                .any(|asked| asked == *name || asked == EVERY_POLICY)
        };
        PolicyComparison {
            policies: POLICY_NAMES.iter().filter(asked).copied().collect(),
            engines: EnginesPlan {
                has_events: false,
                faults: None,
                urls: &[],
                count: self.engines,
                speed: self.engine_speed,
                blocks: self.engine_blocks,
                offload: OffloadOptions::default(),
            },
            settings: &self.settings,
            speed: self.speed,
            in_flight_max: self.max_in_flight as usize,
            timeout: self.timeout,
            is_json: self.json,
        }
    }
}
