//! `quorate simulate`: its flags, the plans that they result in, and its exit code.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use api::files::recording::Recording;
use state::admission::{AdmissionSettings, Batching, CODEL_TARGET_MS, Concurrency, Order};

use super::argument_error::SimulateArgsError;
use super::compare::{ComparisonCase, ComparisonCases, PROGRESS_PARTS, no_verdict};
use super::day::DayTrial;
use super::demand_args::{DemandArgs, WorkloadKind};
use super::disaggregation_args::ApartArgs;
use super::engine_args::SimEngineArgs;
use super::events::Micros;
use super::experiment::Experiment;
use super::loads::PolicyLoads;
use super::page;
use super::parse::{NewsLag, concurrency, lag, order, patience};
use super::plan::{
    BLOCK_TOKENS, ClientModel, EngineModel, RestartPlan, RestartScope, SimPlan, micros,
};
use super::policies::SimPolicy;
use super::print;
use super::recorded::RecordedDemand;
use super::recorded_args::RecordedArgs;
use super::scaling_args::ScalingArgs;
use super::workload::{LengthRange, SimUser, SimWorkload};
use crate::replay::trace::{self, LengthScale, TraceOptions};
use crate::terminal;

/// Simulate a cluster, its engines and its clients; repeatable from a seed.
#[derive(Debug, Clone, clap::Args)]
pub struct SimulateArgs {
    /// Recorded trace: Mooncake's JSON lines, or Azure's or VTC's CSV; the experiment `policies`
    /// takes several
    #[arg(long, value_name = "FILE", conflicts_with = "workload")]
    trace: Vec<PathBuf>,
    /// Generated workload, instead of a trace, a recording or an experiment
    #[arg(long, value_enum, conflicts_with = "experiment")]
    workload: Option<WorkloadKind>,
    /// Predefined comparison, with its own settings and claims
    #[arg(long, value_enum)]
    experiment: Option<Experiment>,
    /// Policies to compare, one run each, with settings as in NAME:KEY=VALUE:KEY=VALUE;
    /// prefix-cache-as-written and vllm-cache-aware-as-written follow their sources' pseudo-code
    /// [default: cost; in the experiment `policies` all]
    #[arg(long, value_name = "P", value_delimiter = ',', value_parser = SimPolicy::parse)]
    policy: Vec<SimPolicy>,
    /// Factor for the rates of the experiment `policies`, in percent
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1000))]
    load_percent: u32,
    /// Orders of the admission queue to compare, one run each
    #[arg(long, value_name = "O", value_delimiter = ',', default_value = "vtc", value_parser = order)]
    order: Vec<Order>,
    /// Numbers of output-length bins to compare, one run each
    #[arg(long, value_name = "K", value_delimiter = ',', default_value = "1", value_parser = clap::value_parser!(u16).range(1..=64))]
    bins: Vec<u16>,
    /// Numbers of engines to compare, one run each [default: 4, or as recorded]
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=512))]
    backends: Vec<u16>,
    /// Number of replicas [default: 3, or as recorded]
    #[arg(long, value_name = "R", value_parser = clap::value_parser!(u8).range(1..=64))]
    replicas: Option<u8>,
    /// What replicas share; `nothing` sets both lags to `never`
    #[arg(long, value_enum, default_value = "all")]
    share: ShareMode,
    /// Time from a proposal until it is applied everywhere: 20ms, or never
    #[arg(long, value_name = "TIME", default_value = "20ms", value_parser = lag)]
    ownership_lag: NewsLag,
    /// Time from a load report until peers receive it: 20ms, or never
    #[arg(long, value_name = "TIME", default_value = "20ms", value_parser = lag)]
    load_lag: NewsLag,
    /// Minimum time between two batches of a replica
    #[arg(long, value_name = "TIME", default_value = "20ms", value_parser = humantime::parse_duration)]
    flush_interval: Duration,
    /// Time at which replicas crash and restart [default: never]
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    restart_at: Option<Duration>,
    /// Which replicas restart
    #[arg(long, value_enum, default_value = "all", requires = "restart_at")]
    restart: RestartScope,
    /// Restarting replicas lose their disks
    #[arg(long, requires = "restart_at")]
    wipe: bool,
    /// Maximum concurrent requests per engine to compare, one run each: numbers, `adaptive` or
    /// `unlimited` [default: unlimited, or as recorded]
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = concurrency)]
    concurrency: Vec<Concurrency>,
    /// Target for the time between output tokens (`admission.inter_token`), which `--concurrency
    /// adaptive` keeps [default: limit by memory alone]
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    inter_token: Option<Duration>,
    /// Time after which clients leave if their response is not complete: 3s, or 2s..10s. Waits are
    /// then bounded as in production
    #[arg(long, value_name = "TIME", value_parser = patience)]
    patience: Option<(Micros, Micros)>,
    /// Maximum number of retries of a client, after a rejection or after leaving [default: 0; in the
    /// experiment `day` 2, as in OpenAI's SDKs]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=10))]
    retries: Option<u32>,
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
    #[command(flatten)]
    scaling: ScalingArgs,
    #[command(flatten)]
    recorded: RecordedArgs,
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

/// What replicas share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum ShareMode {
    /// Ownership, counters and load
    All,
    /// Nothing
    Nothing,
}

/// Size of a fleet: the number of engines, and the concurrency limit of each.
struct FleetSize {
    backends: u16,
    concurrency: Concurrency,
}

/// Runs the simulations and prints the results. `fetched` is the recording from the replicas at
/// [`SimulateArgs::urls`]. The exit code is 1 if a claim fails or a run violates an invariant.
///
/// # Errors
/// [`SimulateArgsError`] if the arguments conflict or an input cannot be read. Another error if the
/// results cannot be written.
pub fn run(args: &SimulateArgs, fetched: Option<Recording>) -> anyhow::Result<ExitCode> {
    let recorded = args.recorded.demand(fetched)?;
    let mut comparison = match args.experiment {
        Some(Experiment::Day) => {
            let day = args.day()?;
            let bar = terminal::progress_bar(DayTrial::PARTS, terminal::COUNT)?;
            let comparison = day.run(command_line(), |parts| bar.set_position(parts));
            bar.finish_and_clear();
            comparison
        }
        _ => {
            let cases = args.cases(recorded.as_ref())?;
            let parts = cases.cases.len() as u64 * PROGRESS_PARTS;
            let bar = terminal::progress_bar(parts, terminal::COUNT)?;
            let run = cases.run(args.seed, command_line(), |parts| bar.set_position(parts));
            bar.finish_and_clear();
            run
        }
    };
    comparison.recorded = recorded.map(|recorded| recorded.figures);
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

/// Returns the command line, which results include so that they can be reproduced.
fn command_line() -> String {
    let arguments = std::env::args().skip(1);
    std::iter::once("quorate".to_owned())
        .chain(arguments)
        .collect::<Vec<_>>()
        .join(" ")
}

impl SimulateArgs {
    /// Returns the comma-separated admin URLs of the replicas whose last decisions are simulated;
    /// `None` if no replica is queried.
    #[must_use]
    pub fn urls(&self) -> Option<&str> {
        self.recorded.urls()
    }

    fn cases(
        &self,
        recorded: Option<&RecordedDemand>,
    ) -> Result<ComparisonCases, SimulateArgsError> {
        if self.experiment == Some(Experiment::Policies) {
            return self.policy_loads();
        }
        if self.trace.len() > 1 {
            return Err(SimulateArgsError::new("expected one --trace"));
        }
        if let Some(experiment) = self.experiment {
            let has_trace = !self.trace.is_empty();
            if has_trace && experiment != Experiment::Sharing {
                return Err(SimulateArgsError::new(
                    "of the experiments only sharing and policies take a --trace",
                ));
            }
            let workload = has_trace.then(|| self.workload(None));
            return experiment.cases(self.seed, self.demand.duration, workload.transpose()?);
        }
        let mut workload = self.workload(recorded)?;
        if self.demand.pin {
            workload.pin(self.replicas(recorded));
        }
        let workload = Arc::new(workload);
        if workload.is_empty() {
            return Err(SimulateArgsError::new("no request to simulate"));
        }
        let base = self.plan(&workload, recorded)?;
        let sizes = self.sizes(&base);
        let mut cases = Vec::new();
        for policy in self.policies().iter() {
            for order in &self.order {
                for bins in &self.bins {
                    for size in &sizes {
                        let plan = self.variant(&base, policy, (*order, *bins), size);
                        let plans = self.apart.plans(&plan);
                        cases.extend(plans.map(|plan| ComparisonCase {
                            plan,
                            workload: Arc::clone(&workload),
                        }));
                    }
                }
            }
        }
        let backends: BTreeSet<u16> = sizes.iter().map(|size| size.backends).collect();
        let backends: Vec<String> = backends.iter().map(u16::to_string).collect();
        Ok(ComparisonCases {
            title: format!(
                "{} backends, {} replicas, seed {}",
                backends.join(" or "),
                base.replicas,
                self.seed
            ),
            cases,
            judge: no_verdict,
        })
    }

    /// Returns the policies to run: the requested ones, or the default.
    fn policies(&self) -> Cow<'_, [SimPolicy]> {
        match self.policy.as_slice() {
            [] => Cow::Owned(vec![SimPolicy::default()]),
            some => Cow::Borrowed(some),
        }
    }

    fn day(&self) -> Result<DayTrial, SimulateArgsError> {
        let mix = self.demand.mix(WorkloadKind::Day);
        let base = self.plan(&SimWorkload::default(), None)?;
        let plan = SimPlan {
            scaling: Some(self.scaling.plan()),
            engine: EngineModel::Continuous(self.engine.shape(&DayTrial::ENGINE)),
            backends: self.backends.first().copied().unwrap_or(DayTrial::ENGINES),
            admission: AdmissionSettings {
                concurrency: self.concurrency.first().copied().unwrap_or(DayTrial::LIMIT),
                ..AdmissionSettings::default()
            },
            codel_target: Duration::from_millis(CODEL_TARGET_MS),
            clients: ClientModel {
                retries: self.retries.unwrap_or(DayTrial::RETRIES),
                ..base.clients
            },
            learn: true,
            horizon: mix.duration,
            ..base
        };
        let mut workload = mix.generate(self.seed);
        self.dress(&mut workload);
        DayTrial::new(plan, workload)
    }

    fn policy_loads(&self) -> Result<ComparisonCases, SimulateArgsError> {
        let loads = PolicyLoads {
            base: self.plan(&SimWorkload::default(), None)?,
            policies: &self.policy,
            traces: &self.trace,
            duration: self.demand.duration.map(micros),
            percent: self.load_percent,
            users: self.demand.users,
        };
        loads.cases()
    }

    /// Returns the fleet sizes to run: each number of engines with each concurrency limit.
    fn sizes(&self, base: &SimPlan) -> Vec<FleetSize> {
        let or = |given: &Vec<u16>| match given.is_empty() {
            true => vec![base.backends],
            false => given.clone(),
        };
        let concurrency = match self.engine.static_batch.is_some() || self.concurrency.is_empty() {
            true => vec![base.admission.concurrency],
            false => self.concurrency.clone(),
        };
        let each = or(&self.backends).into_iter();
        each.flat_map(|backends| {
            let limits = concurrency.iter();
            limits.map(move |concurrency| FleetSize {
                backends,
                concurrency: *concurrency,
            })
        })
        .collect()
    }

    fn variant(
        &self,
        base: &SimPlan,
        policy: &SimPolicy,
        (order, bins): (Order, u16),
        size: &FleetSize,
    ) -> SimPlan {
        let mut parts = Vec::new();
        let others = [
            self.order.len(),
            self.bins.len(),
            self.backends.len().max(1),
        ];
        let others = others.iter().product::<usize>() * self.concurrency.len().max(1);
        if self.policies().len() > 1 || others == 1 {
            parts.push(policy.label.clone());
        }
        if self.backends.len() > 1 {
            parts.push(format!("N={}", size.backends));
        }
        if self.concurrency.len() > 1 {
            let limit = match size.concurrency {
                Concurrency::Adaptive => "adaptive".to_owned(),
                Concurrency::Unlimited => "unlimited".to_owned(),
                Concurrency::Fixed(requests) => requests.to_string(),
            };
            parts.push(format!("limit={limit}"));
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
            reference_policy: policy.reference_policy,
            admission: AdmissionSettings {
                order,
                bins,
                concurrency: size.concurrency,
                ..base.admission.clone()
            },
            backends: size.backends,
            ..base.clone()
        }
    }

    fn plan(
        &self,
        workload: &SimWorkload,
        recorded: Option<&RecordedDemand>,
    ) -> Result<SimPlan, SimulateArgsError> {
        let horizon = self.horizon(workload);
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
        let asked = self.backends.iter().min().copied();
        let backends = asked.unwrap_or(recorded.map_or(4, |it| it.backends));
        self.apart.check(backends)?;
        let limit = recorded.and_then(|it| it.limit);
        let limit = limit.map_or(Concurrency::Unlimited, Concurrency::Fixed);
        let engine = &self.engine;
        let plan = SimPlan {
            label: String::new(),
            policy: self.policies()[0].config.clone(),
            admission: AdmissionSettings {
                concurrency: engine.static_batch.map_or(
                    self.concurrency.first().copied().unwrap_or(limit),
                    Concurrency::Fixed,
                ),
                batching: match engine.static_batch {
                    Some(_) => Batching::Static,
                    None => Batching::Continuous,
                },
                inter_token_us: self.inter_token.map_or(0, |target| {
                    u32::try_from(target.as_micros()).unwrap_or(u32::MAX)
                }),
                ..self.waits()
            },
            codel_target: match self.patience {
                Some(_) => Duration::from_millis(CODEL_TARGET_MS),
                None => Duration::MAX,
            },
            clients: ClientModel {
                patience: self.patience,
                retries: self.retries.unwrap_or(0),
            },
            oracle: self.oracle,
            learn: self.learn,
            is_exact: engine.exact,
            is_all_knowing: engine.all_knowing,
            visible_tiers: engine.tiers,
            block_tokens: recorded.map_or(BLOCK_TOKENS, |it| it.block_tokens),
            backends,
            engine: engine.model(recorded),
            offload: engine.offload.into(),
            disaggregation: self.apart.plan(),
            goal: self.apart.goal(),
            replicas: self.replicas(recorded),
            ownership_lag: self.ownership_lag.0.filter(|_| is_shared),
            load_lag: self.load_lag.0.filter(|_| is_shared),
            flush: micros(self.flush_interval).max(1),
            restart,
            horizon,
            seed: self.seed,
            ..SimPlan::default()
        };
        checked(plan)
    }

    /// Returns the time until which requests arrive.
    fn horizon(&self, workload: &SimWorkload) -> Micros {
        let asked = self.demand.duration.map(micros);
        if workload.is_backlogged() {
            return asked.unwrap_or(60_000_000);
        }
        if !workload.turns.is_empty() {
            return self.demand.agents().duration;
        }
        let last = workload.arrivals.last().map_or(1, |sent| sent.at.max(1));
        asked.map_or(last, |asked| asked.min(last))
    }

    /// Returns admission settings that do not limit waits, so that reported times include them,
    /// unless clients have limited patience.
    fn waits(&self) -> AdmissionSettings {
        if self.patience.is_some() {
            return AdmissionSettings::default();
        }
        AdmissionSettings {
            max_queue: u32::MAX,
            max_wait_ms: u32::MAX,
            ..AdmissionSettings::default()
        }
    }

    fn workload(
        &self,
        recorded: Option<&RecordedDemand>,
    ) -> Result<SimWorkload, SimulateArgsError> {
        let demand = &self.demand;
        if let Some(recorded) = recorded {
            let mut workload = recorded.workload.clone();
            if let Some(duration) = demand.duration.filter(|_| demand.rate.is_none()) {
                workload.arrivals.retain(|it| it.at < micros(duration));
            }
            self.shape(&mut workload);
            return Ok(workload);
        }
        let mut workload = match (self.trace.first(), self.workload) {
            (Some(path), _) => {
                let options = TraceOptions {
                    scale: demand.scale.unwrap_or(LengthScale::ONE),
                    first: None,
                    users: demand.users,
                    seed: self.seed,
                    takes_recordings: false,
                };
                let mut arrivals = trace::read(path, &options).map_err(|error| {
                    SimulateArgsError::new(format!("{:#}", anyhow::Error::from(error)))
                })?;
                if let (Some(duration), None) = (demand.duration, demand.rate) {
                    arrivals.retain(|arrival| arrival.at < duration);
                }
                SimWorkload::of_trace(&arrivals)
            }
            (None, Some(WorkloadKind::Fairness)) => return Ok(self.fairness()),
            (None, Some(WorkloadKind::Agents)) => self.demand.agents().generate(self.seed),
            (None, Some(kind)) => self.demand.mix(kind).generate(self.seed),
            (None, None) => {
                return Err(SimulateArgsError::new(
                    "expected one of --trace, --workload, --experiment and --from-decisions",
                ));
            }
        };
        match self.trace.is_empty() {
            true => self.dress(&mut workload),
            false => self.shape(&mut workload),
        }
        Ok(workload)
    }

    /// Limits a recorded workload to the requested number and rate of requests.
    fn shape(&self, workload: &mut SimWorkload) {
        let demand = &self.demand;
        if let Some(requests) = demand.requests {
            let requests = usize::try_from(requests).unwrap_or(usize::MAX);
            workload.arrivals.truncate(requests);
        }
        if let Some(per_s) = demand.rate {
            workload.set_rate(per_s);
            if let Some(duration) = demand.duration {
                workload.arrivals.retain(|it| it.at < micros(duration));
            }
        }
        self.dress(workload);
    }

    /// Sets the users' weights.
    fn dress(&self, workload: &mut SimWorkload) {
        let weights = self.demand.weights.iter().cycle();
        for (user, weight) in workload.users.iter_mut().zip(weights) {
            user.weight_milli = weight * 1000;
        }
    }

    /// Returns the number of replicas: as requested, as recorded, or 3.
    fn replicas(&self, recorded: Option<&RecordedDemand>) -> u8 {
        self.replicas
            .unwrap_or(recorded.map_or(3, |it| it.replicas))
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
            shape: LengthRange {
                input: demand.input_tokens.unwrap_or(shape.input),
                output: demand.output_tokens.unwrap_or(shape.output),
            },
            ..SimWorkload::default()
        };
        self.dress(&mut workload);
        workload
    }
}

/// Returns `plan` unless its settings conflict.
fn checked(plan: SimPlan) -> Result<SimPlan, SimulateArgsError> {
    if plan.is_exact && plan.ownership_lag.is_none() {
        return Err(SimulateArgsError::new(
            "--exact needs a log that replicas share",
        ));
    }
    if (plan.is_exact || plan.is_all_knowing) && plan.scaling.is_some() {
        return Err(SimulateArgsError::new(
            "--exact and --all-knowing need engines that stay",
        ));
    }
    plan.admission
        .validate()
        .map_err(|reject| SimulateArgsError::new(reject.to_string()))?;
    Ok(plan)
}
