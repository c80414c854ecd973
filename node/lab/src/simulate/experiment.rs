//! The experiments: comparisons with their own settings and with claims about the results.
//! docs/guide/simulator.md describes each.

use std::sync::Arc;
use std::time::Duration;

use state::admission::{AdmissionSettings, Batching, BinSelection, Concurrency, Order};
use state::outputs::theory::batch_time_mean;

use super::argument_error::SimulateArgsError;
use super::compare::{ComparisonCase, ComparisonCases};
use super::lone_agent;
use super::overload;
use super::plan::{BatchTimes, EngineModel, RestartPlan, RestartScope, SimPlan, micros};
use super::report::{ExperimentResult, RunReport};
use super::workload::{LengthRange, Mix, SimUser, SimWorkload};

/// Experiments by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Experiment {
    /// Eight users who always wait, on three replicas: how far their service differs
    Fairness,
    /// A user who comes back from a pause gets no more than its share
    ReturningUser,
    /// One replica against three, and three that share nothing, with and without restarts
    Sharing,
    /// Every policy on the same loads, generated and recorded: how far the default one falls behind
    /// the best
    Policies,
    /// Ten times the load that engines can serve, from clients who wait, who leave and who retry
    Overload,
    /// An agent beside others that send bursts of sub-agents: how much of its fair share it gets
    LoneAgent,
    /// A day with a scaler that starts and stops engines as wanted: its engine-hours, relative to the
    /// least that have the same p99
    Day,
    /// Batches that end together, with 1 to 32 bins by output length, compared with the theory
    StaticBatching,
}

impl Experiment {
    /// Returns the cases, which last `duration` or a default. A `workload` replaces the generated
    /// one of `sharing`.
    ///
    /// # Errors
    /// If the duration is less than a second, or the experiment is `policies`, which has
    /// [`PolicyLoads`](super::loads::PolicyLoads), or `day`, which has
    /// [`DayTrial`](super::day::DayTrial).
    pub fn cases(
        self,
        seed: u64,
        duration: Option<Duration>,
        workload: Option<SimWorkload>,
    ) -> Result<ComparisonCases, SimulateArgsError> {
        let horizon = duration.map(micros);
        if horizon.is_some_and(|horizon| horizon < 1_000_000) {
            return Err(SimulateArgsError::new(
                "expected a --duration of at least 1s",
            ));
        }
        Ok(match self {
            Self::Fairness => fairness(seed, horizon.unwrap_or(600_000_000)),
            Self::ReturningUser => returning_user(seed, horizon.unwrap_or(300_000_000)),
            Self::Sharing => sharing(seed, horizon.unwrap_or(300_000_000), workload),
            Self::Policies | Self::Day => {
                return Err(SimulateArgsError::new("it has loads of its own"));
            }
            Self::Overload => overload::cases(seed, horizon.unwrap_or(60_000_000)),
            Self::LoneAgent => lone_agent::cases(seed, horizon.unwrap_or(120_000_000)),
            Self::StaticBatching => static_batching(seed, horizon.unwrap_or(10_000_000_000)),
        })
    }
}

/// Returns eight users with these weights, who keep 64, 128, 192 or 256 requests waiting.
fn backlogged(weights: &[u32]) -> SimWorkload {
    let user = |number: usize| SimUser {
        weight_milli: weights[number % weights.len()] * 1000,
        backlog: 64 * (1 + u32::try_from(number % 4).expect("less than 4")),
        ..SimUser::named(&format!("user-{}", number + 1))
    };
    SimWorkload {
        users: (0..8).map(user).collect(),
        shape: LengthRange::default(),
        ..SimWorkload::default()
    }
}

fn fairness(seed: u64, horizon: u64) -> ComparisonCases {
    let mut cases = Vec::new();
    for (weights, name) in [(&[1][..], "equal"), (&[1, 2, 3, 4][..], "1:2:3:4")] {
        for is_pinned in [false, true] {
            for order in [Order::Vtc, Order::Fcfs] {
                let mut workload = backlogged(weights);
                let mut plan = SimPlan::queueing(seed, horizon, order);
                if is_pinned {
                    workload.pin(plan.replicas);
                }
                let spread = if is_pinned { "pinned" } else { "spread" };
                let order = if order == Order::Vtc { "vtc" } else { "fcfs" };
                plan.label = format!("{order}, {spread}, weights {name}");
                let workload = Arc::new(workload);
                cases.push(ComparisonCase { plan, workload });
            }
        }
    }
    ComparisonCases {
        title: "Eight users who always wait, sending at 1:2:3:4, on 3 replicas and 4 engines"
            .to_owned(),
        cases,
        judge: judge_fairness,
    }
}

fn judge_fairness(runs: &[RunReport]) -> Vec<ExperimentResult> {
    let mut verdicts = Vec::new();
    for pair in runs.chunks_exact(2) {
        let [vtc, fcfs] = pair else { continue };
        let name = &vtc.label;
        if let (Some(gap), Some(bound)) = (vtc.gap, vtc.gap_bound) {
            verdicts.push(ExperimentResult {
                claim: format!("{name}: largest gap {gap:.0} is within the bound {bound:.0}"),
                holds: gap <= bound,
            });
        }
        let ratio = vtc.service_ratio.unwrap_or(0.0);
        verdicts.push(ExperimentResult {
            claim: format!("{name}: least over greatest service {ratio:.4} is at least 0.98"),
            holds: ratio >= 0.98,
        });
        let throughput = vtc.tokens_per_s / fcfs.tokens_per_s;
        verdicts.push(ExperimentResult {
            claim: format!("{name}: throughput is {throughput:.4} of FCFS's, at least 0.98"),
            holds: throughput >= 0.98,
        });
    }
    verdicts
}

fn returning_user(seed: u64, horizon: u64) -> ComparisonCases {
    let mut workload = backlogged(&[1]);
    workload.users[0].off = Some((horizon / 6, horizon / 2));
    // A small backlog is served soon after the pause begins, so that the user becomes idle.
    workload.users[0].backlog = 32;
    let workload = Arc::new(workload);
    let case = |(order, label): (Order, &str)| ComparisonCase {
        plan: SimPlan {
            label: label.to_owned(),
            ..SimPlan::queueing(seed, horizon, order)
        },
        workload: Arc::clone(&workload),
    };
    ComparisonCases {
        title: "One of eight users pauses from 1/6 to 1/2 of the time and comes back".to_owned(),
        cases: [
            (Order::Vtc, "vtc"),
            (Order::Lcf, "lcf"),
            (Order::Fcfs, "fcfs"),
        ]
        .map(case)
        .into(),
        judge: judge_return,
    }
}

/// Returns the service that the first user got after its pause, relative to the mean of the others.
pub(super) fn share_after_pause(run: &RunReport) -> f64 {
    let service = &run.curves.service;
    let points = service[0].len();
    // From shortly after the return, when its new requests are served, to the end.
    let (from, until) = (points / 2 + points / 60, points - 1);
    let served = |user: &Vec<f64>| user[until] - user[from];
    let others = service.len() - 1;
    let mean = service[1..].iter().map(served).sum::<f64>() / others as f64;
    served(&service[0]) / mean
}

fn judge_return(runs: &[RunReport]) -> Vec<ExperimentResult> {
    let share = runs.first().map_or(0.0, share_after_pause);
    let without_lift = runs.get(1).map_or(0.0, share_after_pause);
    vec![
        ExperimentResult {
            claim: format!(
                "vtc: after its pause the user is served {share:.3} of what others are on average, \
                 from 0.95 to 1.05"
            ),
            holds: (0.95..=1.05).contains(&share),
        },
        ExperimentResult {
            claim: format!(
                "lcf, which does not lift, serves it {without_lift:.2} times as much: more than 1.2"
            ),
            holds: without_lift > 1.2,
        },
    ]
}

/// Returns a mix of prefixes that fit into all engines together but not into one. Its rate is the
/// highest that the engines can serve if half of the requests miss.
fn at_the_edge(horizon: u64) -> Mix {
    Mix {
        duration: horizon,
        rate: 24.0,
        groups: 320,
        ..Mix::shared_prefix()
    }
}

fn sharing(seed: u64, horizon: u64, workload: Option<SimWorkload>) -> ComparisonCases {
    let is_trace = workload.is_some();
    let workload = Arc::new(workload.unwrap_or_else(|| at_the_edge(horizon).generate(seed)));
    let horizon = match workload.arrivals.last() {
        Some(last) if is_trace => last.at.max(1),
        _ => horizon,
    };
    let restart = |wipe| RestartPlan {
        at: horizon / 2,
        who: RestartScope::All,
        wipe,
    };
    let base = SimPlan {
        seed,
        horizon,
        ..SimPlan::default()
    };
    let nothing = SimPlan {
        ownership_lag: None,
        load_lag: None,
        ..base.clone()
    };
    let one = SimPlan {
        replicas: 1,
        ..base.clone()
    };
    let plans = [
        ("1 replica", one.clone(), None),
        ("3 replicas", base.clone(), None),
        ("3 that share nothing", nothing.clone(), None),
        ("1 replica, restart", one, Some(restart(false))),
        (
            "3 replicas, all restart",
            base.clone(),
            Some(restart(false)),
        ),
        ("3 replicas, all lose all", base, Some(restart(true))),
        (
            "3 that share nothing, restart",
            nothing,
            Some(restart(true)),
        ),
    ];
    let case = |(label, plan, restart): (&str, SimPlan, Option<RestartPlan>)| ComparisonCase {
        plan: SimPlan {
            label: label.to_owned(),
            restart,
            ..plan
        },
        workload: Arc::clone(&workload),
    };
    ComparisonCases {
        title: format!(
            "What sharing is worth, on {} load",
            if is_trace {
                "a recorded"
            } else {
                "a shared-prefix"
            }
        ),
        cases: plans.map(case).into(),
        judge: judge_sharing,
    }
}

fn judge_sharing(runs: &[RunReport]) -> Vec<ExperimentResult> {
    let [one, three, nothing, ..] = runs else {
        return Vec::new();
    };
    let ratio = three.hit_rate / one.hit_rate;
    vec![
        ExperimentResult {
            claim: format!("3 replicas hit {ratio:.4} of what 1 does: at least 0.99"),
            holds: ratio >= 0.99,
        },
        ExperimentResult {
            claim: format!(
                "3 that share nothing hit less: {:.3} against {:.3}",
                nothing.hit_rate, three.hit_rate
            ),
            holds: nothing.hit_rate < three.hit_rate,
        },
    ]
}

/// Numbers of bins for static batching.
const BINS: [u16; 6] = [1, 2, 4, 8, 16, 32];
/// Minimum and maximum of the uniformly distributed number of output tokens.
const OUTPUT: (u32, u32) = (1, 1000);
/// Number of bins in the case with predicted output lengths.
const BINS_PREDICTED: u16 = 8;
/// Maximum relative deviation of the batch duration from the theory.
const DEVIATION_MAX: f64 = 0.03;

fn static_batching(seed: u64, horizon: u64) -> ComparisonCases {
    let user = SimUser {
        // Enough to fill a batch from every bin at any time.
        backlog: 2048,
        ..SimUser::named("user-1")
    };
    let workload = Arc::new(SimWorkload {
        users: vec![user],
        shape: LengthRange {
            input: (32, 64),
            output: OUTPUT,
        },
        ..SimWorkload::default()
    });
    let case = |bins: u16, oracle: bool| {
        let known = if oracle { "known" } else { "predicted" };
        let plan = SimPlan {
            label: format!("{bins} bins, lengths {known}"),
            seed,
            horizon,
            replicas: 1,
            backends: 1,
            oracle,
            engine: EngineModel::Static(BatchTimes::CALIBRATED),
            admission: AdmissionSettings {
                order: Order::Fcfs,
                concurrency: Concurrency::Fixed(BatchTimes::CALIBRATED.batch_max),
                max_queue: u32::MAX,
                max_wait_ms: u32::MAX,
                bins,
                // Round-robin would not keep queues with equal arrivals equal.
                bin_selection: BinSelection::LongestQueue,
                // All requests wait for long here, so the age must not decide.
                bin_max_age_ms: u32::MAX,
                batching: Batching::Static,
                ..AdmissionSettings::default()
            },
            ..SimPlan::default()
        };
        let workload = Arc::clone(&workload);
        ComparisonCase { plan, workload }
    };
    let mut cases: Vec<ComparisonCase> = BINS.map(|bins| case(bins, true)).into();
    cases.push(case(BINS_PREDICTED, false));
    ComparisonCases {
        title: format!(
            "Batches of {} that end together, outputs uniform over {} to {} tokens",
            BatchTimes::CALIBRATED.batch_max,
            OUTPUT.0,
            OUTPUT.1
        ),
        cases,
        judge: judge_static_batching,
    }
}

/// Returns the theoretical mean duration of a batch with `bins` bins, in seconds.
fn batch_s(bins: u16) -> f64 {
    let times = BatchTimes::CALIBRATED;
    let at = |tokens| times.service_us(times.batch_max, tokens) as f64 / 1e6;
    batch_time_mean(at(OUTPUT.0), at(OUTPUT.1), bins, times.batch_max)
}

fn judge_static_batching(runs: &[RunReport]) -> Vec<ExperimentResult> {
    // The engine is never idle and batches are full, so their number yields their duration.
    let measured =
        |run: &RunReport| f64::from(BatchTimes::CALIBRATED.batch_max) / run.requests_per_s;
    let mut verdicts = Vec::new();
    for (run, bins) in runs.iter().zip(BINS) {
        let (batch, theory) = (measured(run), batch_s(bins));
        verdicts.push(ExperimentResult {
            claim: format!(
                "{bins} bins: a batch takes {batch:.3} s on average, in theory {theory:.3} s: within \
                 {:.0} %",
                DEVIATION_MAX * 100.0
            ),
            holds: (batch / theory - 1.0).abs() <= DEVIATION_MAX,
        });
    }
    if let ([one, ..], Some(predicted)) = (runs, runs.get(BINS.len())) {
        let ratio = predicted.requests_per_s / one.requests_per_s;
        verdicts.push(ExperimentResult {
            claim: format!(
                "lengths that cannot be predicted: {BINS_PREDICTED} bins serve {ratio:.3} times what \
                 one does, within {:.0} %",
                DEVIATION_MAX * 100.0
            ),
            holds: (ratio - 1.0).abs() <= DEVIATION_MAX,
        });
    }
    verdicts
}
