//! `quorate simulate`: the flags, what they mean together, and how it ends.

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use state::admission::{AdmissionSettings, Batching, CODEL_TARGET_MS, Concurrency, Order};

use super::apart_args::ApartArgs;
use super::compare::{ComparisonCase, ComparisonCases, PROGRESS_PARTS, no_verdict};
use super::events::Micros;
use super::experiment::Experiment;
use super::page;
use super::plan::{
    BLOCK_TOKENS, BatchTimes, ClientModel, EngineModel, RestartPlan, RestartScope, SimPlan, micros,
};
use super::policies::SimPolicy;
use super::print;
use super::unusable::SimulateArgsError;
use super::workload::{LengthRange, Mix, SimUser, SimWorkload};
use crate::engine::model::EngineShape;
use crate::replay::trace::{self, LengthScale, TraceOptions};
use crate::terminal;

/// Simulate a cluster, its engines and its clients; repeatable from a seed.
#[derive(Debug, Clone, clap::Args)]
pub struct SimulateArgs {
    /// Recorded trace: Mooncake's JSON lines, or Azure's or VTC's CSV
    #[arg(long, value_name = "FILE", conflicts_with = "workload")]
    trace: Option<PathBuf>,
    /// Generated workload
    #[arg(long, value_enum, conflicts_with = "experiment")]
    workload: Option<WorkloadKind>,
    /// Predefined comparison, with its own settings and claims
    #[arg(long, value_enum)]
    experiment: Option<Experiment>,
    /// Policies to compare, one run each, with settings as in NAME:KEY=VALUE:KEY=VALUE;
    /// prefix-cache-as-written and vllm-cache-aware-as-written decide by their sources' pseudo-code
    #[arg(long, value_name = "P", value_delimiter = ',', default_value = "cost", value_parser = SimPolicy::parse)]
    policy: Vec<SimPolicy>,
    /// Orders of the admission queue to compare, one run each
    #[arg(long, value_name = "O", value_delimiter = ',', default_value = "vtc", value_parser = order)]
    order: Vec<Order>,
    /// Numbers of output-length bins to compare, one run each
    #[arg(long, value_name = "K", value_delimiter = ',', default_value = "1", value_parser = clap::value_parser!(u16).range(1..=64))]
    bins: Vec<u16>,
    /// Number of engines
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=512))]
    backends: u16,
    /// Number of replicas
    #[arg(long, value_name = "R", default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=64))]
    replicas: u8,
    /// What replicas share; `nothing` sets both lags to `never`
    #[arg(long, value_enum, default_value = "all")]
    share: ShareMode,
    /// Time from a proposal until it is applied everywhere: 20ms, or never
    #[arg(long, value_name = "TIME", default_value = "20ms", value_parser = lag)]
    ownership_lag: NewsLag,
    /// Time from a load report until peers have it: 20ms, or never
    #[arg(long, value_name = "TIME", default_value = "20ms", value_parser = lag)]
    load_lag: NewsLag,
    /// Minimum time between two batches of a replica
    #[arg(long, value_name = "TIME", default_value = "20ms", value_parser = humantime::parse_duration)]
    flush_interval: Duration,
    /// Time at which replicas crash and restart
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    restart_at: Option<Duration>,
    /// Which replicas restart
    #[arg(long, value_enum, default_value = "all", requires = "restart_at")]
    restart: RestartScope,
    /// Restarting replicas lose their disks
    #[arg(long, requires = "restart_at")]
    wipe: bool,
    /// Maximum concurrent requests per engine: a number, `adaptive` or `unlimited`
    #[arg(long, value_name = "N", default_value = "unlimited", value_parser = concurrency)]
    concurrency: Concurrency,
    /// Clients leave if they do not have their whole answer by then: 3s, or 2s..10s. Waiting is
    /// then bounded as in production
    #[arg(long, value_name = "TIME", value_parser = patience)]
    patience: Option<(Micros, Micros)>,
    /// How often clients retry after a refusal or after leaving
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=10))]
    retries: u32,
    /// Know output lengths in advance instead of predicting them
    #[arg(long)]
    oracle: bool,
    /// Let `cost` learn its prices
    #[arg(long)]
    learn: bool,
    #[command(flatten)]
    demand: DemandArgs,
    #[command(flatten)]
    engine: SimEngineArgs,
    #[command(flatten)]
    apart: ApartArgs,
    /// Seed of all random choices
    #[arg(long, value_name = "S", default_value_t = 1)]
    seed: u64,
    /// Print the results as JSON
    #[arg(long)]
    json: bool,
    /// Write an HTML page with plots
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
}

/// What is asked for.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Workload")]
struct DemandArgs {
    /// Mean requests per second [default for a trace: as recorded]
    #[arg(long, value_name = "R", value_parser = rate)]
    rate: Option<f64>,
    /// Time until which requests arrive
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    duration: Option<Duration>,
    /// Maximum number of requests
    #[arg(long, value_name = "N")]
    requests: Option<u64>,
    /// Multiply the lengths in a trace by this fraction, such as 1/16
    #[arg(long, value_name = "FRACTION", default_value = "1")]
    scale: LengthScale,
    /// Number of users
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    users: u32,
    /// Pin each user to one replica
    #[arg(long)]
    pin: bool,
    /// Weights of users, repeated as needed: 1,2,3,4
    #[arg(long, value_name = "W", value_delimiter = ',', default_value = "1", value_parser = clap::value_parser!(u32).range(1..=1000))]
    weights: Vec<u32>,
    /// Rates of users in `fairness`, repeated as needed: 1,2,3,4
    #[arg(long, value_name = "R", value_delimiter = ',', default_value = "1,2,3,4", value_parser = clap::value_parser!(u32).range(1..=1000))]
    rates: Vec<u32>,
    /// Requests that a user of rate 1 keeps open in `fairness`, enough to always wait
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    backlog: u32,
    /// Time in which the first user of `fairness` sends nothing: 20s..40s
    #[arg(long, value_name = "FROM..TO", value_parser = span)]
    off: Option<(Micros, Micros)>,
    /// Prompt tokens that are unique to a request: 64..192
    #[arg(long, value_name = "A..B", value_parser = range)]
    input_tokens: Option<(u32, u32)>,
    /// Output tokens per request: 16..64
    #[arg(long, value_name = "A..B", value_parser = range)]
    output_tokens: Option<(u32, u32)>,
    /// Number of groups of requests with a shared prefix
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    prefixes: Option<u32>,
    /// Tokens of a group's shared prefix
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    prefix_tokens: Option<u32>,
}

/// How engines are.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Engines")]
struct SimEngineArgs {
    /// KV blocks of 32 tokens per engine
    #[arg(long, value_name = "N", default_value_t = 8192, value_parser = clap::value_parser!(u32).range(2..=10_000_000))]
    blocks: u32,
    /// Maximum number of running requests per engine
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    max_num_seqs: u32,
    /// Maximum number of tokens computed per step
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    max_num_batched_tokens: u32,
    /// Prompt tokens computed per second
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=100_000_000))]
    prefill_rate: u32,
    /// Time of a decode step for a single request
    #[arg(long, value_name = "TIME", default_value = "20ms", value_parser = humantime::parse_duration)]
    decode: Duration,
    /// Static batches of this many requests, which end together
    #[arg(long, value_name = "B", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    static_batch: Option<u32>,
}

/// Workloads that are generated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum WorkloadKind {
    /// Groups with a long shared prefix each
    SharedPrefix,
    /// Most requests in one group
    OneHot,
    /// One prefix shared by all groups
    Templated,
    /// One block that differs between groups, early in prompts that are alike otherwise
    Volatile,
    /// Bursts: six times the rate for five of every twenty seconds
    Burst,
    /// Users who always have requests waiting
    Fairness,
}

/// What replicas share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum ShareMode {
    /// Ownership, counters and load
    All,
    /// Nothing
    Nothing,
}

/// How late news are; `NewsLag(None)`: they never come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct NewsLag(Option<Micros>);

fn order(text: &str) -> Result<Order, String> {
    serde_json::from_value(text.into())
        .map_err(|_| "expected vtc, vtc-max-fair, vtc-pred, dlpm, lcf, rpm or fcfs".to_owned())
}

fn lag(text: &str) -> Result<NewsLag, String> {
    if text == "never" {
        return Ok(NewsLag(None));
    }
    let time = humantime::parse_duration(text);
    time.map(|time| NewsLag(Some(micros(time))))
        .map_err(|error| format!("expected a time like 20ms, or never: {error}"))
}

fn concurrency(text: &str) -> Result<Concurrency, String> {
    match text {
        "adaptive" => Ok(Concurrency::Adaptive),
        "unlimited" => Ok(Concurrency::Unlimited),
        number => match number.parse::<u32>() {
            Ok(requests) if requests > 0 => Ok(Concurrency::Fixed(requests)),
            _ => Err("expected a number from 1, adaptive or unlimited".to_owned()),
        },
    }
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number > 0.0 && number <= 1e6 => Ok(number),
        _ => Err("expected a number above 0 and at most 1e6".to_owned()),
    }
}

fn range(text: &str) -> Result<(u32, u32), String> {
    let (least, most) = text.split_once("..").unwrap_or((text, text));
    let tokens = |part: &str| {
        part.parse::<u32>()
            .ok()
            .filter(|n| (1..1 << 20).contains(n))
    };
    match (tokens(least), tokens(most)) {
        (Some(least), Some(most)) if least <= most => Ok((least, most)),
        _ => Err("expected tokens like 64..192".to_owned()),
    }
}

fn patience(text: &str) -> Result<(Micros, Micros), String> {
    if text.contains("..") {
        return span(text);
    }
    let time = humantime::parse_duration(text).map_err(|_| "expected a time like 3s".to_owned())?;
    Ok((micros(time), micros(time)))
}

fn span(text: &str) -> Result<(Micros, Micros), String> {
    let expected = || "expected times like 20s..40s".to_owned();
    let (from, until) = text.split_once("..").ok_or_else(expected)?;
    let time = |part| humantime::parse_duration(part).map_err(|_| expected());
    let (from, until) = (micros(time(from)?), micros(time(until)?));
    if from < until {
        Ok((from, until))
    } else {
        Err(expected())
    }
}

/// Simulates and prints; the exit code is 1 when an experiment's claim fails or the books do not
/// balance, 2 when the arguments make no sense together.
///
/// # Errors
/// [`SimulateArgsError`], or when the page cannot be written.
pub fn run(args: &SimulateArgs) -> anyhow::Result<ExitCode> {
    let cases = args.cases()?;
    let parts = cases.cases.len() as u64 * PROGRESS_PARTS;
    let bar = terminal::progress_bar(parts, terminal::COUNT)?;
    let comparison = cases.run(args.seed, command_line(), |parts| bar.set_position(parts));
    bar.finish_and_clear();
    if let Some(path) = &args.report {
        fs::write(path, page::html(&comparison)?)
            .with_context(|| format!("write {}", path.display()))?;
    }
    if args.json {
        terminal::print(serde_json::to_string_pretty(&comparison)?)?;
    } else {
        terminal::print(print::tables(&comparison))?;
    }
    let is_sound = comparison.runs.iter().all(|run| run.faults.is_empty());
    let has_shown = comparison.verdicts.iter().all(|verdict| verdict.holds);
    Ok(if is_sound && has_shown {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// The arguments as they were given, for whoever reads the results.
fn command_line() -> String {
    let arguments = std::env::args().skip(1);
    std::iter::once("quorate".to_owned())
        .chain(arguments)
        .collect::<Vec<_>>()
        .join(" ")
}

impl SimulateArgs {
    fn cases(&self) -> Result<ComparisonCases, SimulateArgsError> {
        if let Some(experiment) = self.experiment {
            if self.trace.is_some() && experiment != Experiment::Sharing {
                return Err(SimulateArgsError::new(
                    "of the experiments only sharing takes a --trace",
                ));
            }
            let workload = self.trace.is_some().then(|| self.workload());
            return experiment.cases(self.seed, self.demand.duration, workload.transpose()?);
        }
        let workload = Arc::new(self.workload()?);
        if workload.arrivals.is_empty() && !workload.is_backlogged() {
            return Err(SimulateArgsError::new("no request to simulate"));
        }
        let base = self.plan(&workload)?;
        let mut cases = Vec::new();
        for policy in &self.policy {
            for order in &self.order {
                for bins in &self.bins {
                    let plan = self.variant(&base, policy, *order, *bins);
                    let plans = self.apart.plans(&plan);
                    cases.extend(plans.map(|plan| ComparisonCase {
                        plan,
                        workload: Arc::clone(&workload),
                    }));
                }
            }
        }
        Ok(ComparisonCases {
            title: format!(
                "{} backends, {} replicas, seed {}",
                self.backends, self.replicas, self.seed
            ),
            cases,
            judge: no_verdict,
        })
    }

    fn variant(&self, base: &SimPlan, policy: &SimPolicy, order: Order, bins: u16) -> SimPlan {
        let mut parts = Vec::new();
        if self.policy.len() > 1 || self.order.len() * self.bins.len() == 1 {
            parts.push(policy.label.clone());
        }
        if self.order.len() > 1 {
            let name = serde_json::to_value(order).unwrap_or_default();
            parts.push(name.as_str().unwrap_or_default().to_owned());
        }
        if self.bins.len() > 1 {
            parts.push(format!("K={bins}"));
        }
        SimPlan {
            label: parts.join(" "),
            policy: policy.config.clone(),
            as_written: policy.as_written,
            admission: AdmissionSettings {
                order,
                bins,
                ..base.admission.clone()
            },
            ..base.clone()
        }
    }

    fn plan(&self, workload: &SimWorkload) -> Result<SimPlan, SimulateArgsError> {
        let last = workload.arrivals.last().map_or(0, |sent| sent.at);
        let horizon = self.demand.duration.map_or(last.max(1), micros);
        let horizon = if workload.is_backlogged() {
            self.demand.duration.map_or(60_000_000, micros)
        } else {
            horizon.min(last.max(1))
        };
        let is_shared = self.share == ShareMode::All;
        let restart = self.restart_at.map(|at| RestartPlan {
            at: micros(at),
            who: self.restart,
            wipe: self.wipe,
        });
        if restart.is_some_and(|restart| restart.at >= horizon) {
            return Err(SimulateArgsError::new(
                "--restart-at is after the last request",
            ));
        }
        self.apart.check(self.backends)?;
        let engine = &self.engine;
        let plan = SimPlan {
            label: String::new(),
            policy: self.policy[0].config.clone(),
            admission: AdmissionSettings {
                concurrency: engine
                    .static_batch
                    .map_or(self.concurrency, Concurrency::Fixed),
                batching: match engine.static_batch {
                    Some(_) => Batching::Static,
                    None => Batching::Continuous,
                },
                ..self.waits()
            },
            codel_target: match self.patience {
                Some(_) => Duration::from_millis(CODEL_TARGET_MS),
                None => Duration::MAX,
            },
            clients: ClientModel {
                patience: self.patience,
                retries: self.retries,
            },
            oracle: self.oracle,
            learn: self.learn,
            backends: self.backends,
            engine: engine.model(),
            apart: self.apart.plan(),
            goal: self.apart.goal(),
            replicas: self.replicas,
            ownership_lag: self.ownership_lag.0.filter(|_| is_shared),
            load_lag: self.load_lag.0.filter(|_| is_shared),
            flush: micros(self.flush_interval).max(1),
            restart,
            horizon,
            seed: self.seed,
            ..SimPlan::default()
        };
        plan.admission
            .validate()
            .map_err(|reject| SimulateArgsError::new(reject.to_string()))?;
        Ok(plan)
    }

    /// Patient clients wait without bounds: what waits too long is seen in the times.
    fn waits(&self) -> AdmissionSettings {
        if self.patience.is_some() {
            return AdmissionSettings::default();
        }
        AdmissionSettings {
            queue_max: u32::MAX,
            wait_ms_max: u32::MAX,
            ..AdmissionSettings::default()
        }
    }

    fn workload(&self) -> Result<SimWorkload, SimulateArgsError> {
        let demand = &self.demand;
        let mut workload = match (&self.trace, self.workload) {
            (Some(path), _) => {
                let options = TraceOptions {
                    scale: demand.scale,
                    first: None,
                    users: demand.users,
                    seed: self.seed,
                };
                let mut arrivals = trace::read(path, &options).map_err(|error| {
                    SimulateArgsError::new(format!("{:#}", anyhow::Error::from(error)))
                })?;
                if let (Some(duration), None) = (demand.duration, demand.rate) {
                    arrivals.retain(|arrival| arrival.at < duration);
                }
                if let Some(requests) = demand.requests {
                    arrivals.truncate(usize::try_from(requests).unwrap_or(usize::MAX));
                }
                SimWorkload::of_trace(&arrivals)
            }
            (None, Some(WorkloadKind::Fairness)) => return Ok(self.fairness()),
            (None, Some(kind)) => self.mix(kind).generate(self.seed),
            (None, None) => {
                return Err(SimulateArgsError::new(
                    "expected one of --trace, --workload and --experiment",
                ));
            }
        };
        if let (Some(per_s), true) = (demand.rate, self.trace.is_some()) {
            workload.set_rate(per_s);
            if let Some(duration) = demand.duration {
                workload.arrivals.retain(|it| it.at < micros(duration));
            }
        }
        self.dress(&mut workload);
        Ok(workload)
    }

    /// Gives users their weights and replicas.
    fn dress(&self, workload: &mut SimWorkload) {
        let weights = self.demand.weights.iter().cycle();
        for (user, weight) in workload.users.iter_mut().zip(weights) {
            user.weight_milli = weight * 1000;
        }
        if self.demand.pin {
            workload.pin(self.replicas);
        }
    }

    fn fairness(&self) -> SimWorkload {
        let demand = &self.demand;
        let user = |(number, rate): (u32, &u32)| SimUser {
            backlog: rate * demand.backlog,
            off: demand.off.filter(|_| number == 1),
            ..SimUser::named(&format!("user-{number}"))
        };
        let shape = LengthRange::default();
        let mut workload = SimWorkload {
            users: (1..=demand.users)
                .zip(demand.rates.iter().cycle())
                .map(user)
                .collect(),
            arrivals: Vec::new(),
            shape: LengthRange {
                input: demand.input_tokens.unwrap_or(shape.input),
                output: demand.output_tokens.unwrap_or(shape.output),
            },
        };
        self.dress(&mut workload);
        workload
    }

    fn mix(&self, kind: WorkloadKind) -> Mix {
        let demand = &self.demand;
        let mix = match kind {
            WorkloadKind::SharedPrefix | WorkloadKind::Fairness => Mix::shared_prefix(),
            WorkloadKind::OneHot => Mix::one_hot(),
            WorkloadKind::Templated => Mix::templated(),
            WorkloadKind::Volatile => Mix::volatile(),
            WorkloadKind::Burst => Mix::burst(),
        };
        Mix {
            rate: demand.rate.unwrap_or(mix.rate),
            duration: demand.duration.map_or(mix.duration, micros),
            requests: demand.requests.unwrap_or(u64::MAX),
            groups: demand.prefixes.unwrap_or(mix.groups),
            group_tokens: demand.prefix_tokens.unwrap_or(mix.group_tokens),
            lengths: LengthRange {
                input: demand.input_tokens.unwrap_or(mix.lengths.input),
                output: demand.output_tokens.unwrap_or(mix.lengths.output),
            },
            users: demand.users,
            ..mix
        }
    }
}

impl SimEngineArgs {
    fn model(&self) -> EngineModel {
        match self.static_batch {
            Some(batch_max) => EngineModel::Static(BatchTimes {
                batch_max,
                ..BatchTimes::CALIBRATED
            }),
            None => EngineModel::Continuous(EngineShape {
                num_gpu_blocks: self.blocks,
                block_size: BLOCK_TOKENS,
                max_num_seqs: self.max_num_seqs,
                max_num_batched_tokens: self.max_num_batched_tokens,
                prefill_tokens_per_s: self.prefill_rate,
                decode: self.decode,
            }),
        }
    }
}
