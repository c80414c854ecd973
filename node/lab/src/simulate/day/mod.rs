//! The experiment `day`: a day's requests on engines that a scaler starts and stops, compared with the
//! schedule that takes the fewest engine-hours at the same p99 of the time to first token.
//!
//! The schedule knows all arrivals (`KnownDemand`). Engines start before they are needed, and their
//! start counts, as it does for the scaler. A lower number of engines delays more requests, so the
//! schedule's target for the use of places is raised until its p99 exceeds the scaler's. It is the best
//! of these schedules, not of all.

mod known_demand;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use state::admission::Concurrency;

use super::argument_error::SimulateArgsError;
use super::compare::{ComparisonCase, ComparisonCases, PROGRESS_PARTS, no_verdict};
use super::events::Micros;
use super::plan::{BLOCK_TOKENS, EngineModel, ScalingPlan, ScalingRule, SimPlan};
use super::report::{ExperimentResult, RunReport, SimComparison};
use super::workload::SimWorkload;
use crate::engine::model::EngineShape;
use known_demand::KnownDemand;

/// Longest wait of a request for a first engine, in microseconds.
pub(super) const HOLD: Micros = 300_000_000;
/// Maximum engine-hours of the scaler, relative to the schedule.
const RATIO_MAX: f64 = 1.1;
/// Window over which the schedule's needs are averaged, in microseconds.
const WINDOW: Micros = 60_000_000;
/// Targets for the use of places between which the best one is sought, in thousandths.
const TARGETS: (u32, u32) = (257, 1229);
/// Number of steps of the search, each of which leaves a third of the range.
const STEPS: u64 = 5;
/// Number of schedules tried in a step.
const TRIED: u64 = 2;

/// A day's requests with the plan of a scaler.
pub struct DayTrial {
    plan: SimPlan,
    scaling: ScalingPlan,
    places: u32,
    shape: EngineShape,
    workload: Arc<SimWorkload>,
}

impl DayTrial {
    /// Number of parts of the progress.
    pub const PARTS: u64 = PROGRESS_PARTS * (1 + STEPS * TRIED);
    /// Default number of engines that can run at once.
    pub const ENGINES: u16 = 16;
    /// Default limit of requests at an engine.
    pub const LIMIT: Concurrency = Concurrency::Fixed(8);
    /// Default number of retries of a client, as in OpenAI's SDKs.
    pub const RETRIES: u32 = 2;
    /// Default engines, with an eighth of the usual speed for prompts and answers of an eighth.
    pub const ENGINE: EngineShape = EngineShape {
        num_gpu_blocks: 1024,
        block_size: BLOCK_TOKENS,
        max_num_seqs: 256,
        max_num_batched_tokens: 256,
        prefill_tokens_per_s: 1250,
        decode: std::time::Duration::from_millis(160),
    };

    /// Creates the trial of a plan with a scaler.
    ///
    /// # Errors
    /// If the plan has no scaler, no fixed limit, other engines than with continuous batching, replicas
    /// that do not share their log, prefill engines, or no request.
    pub fn new(plan: SimPlan, workload: SimWorkload) -> Result<Self, SimulateArgsError> {
        let Concurrency::Fixed(places) = plan.admission.concurrency else {
            return Err(SimulateArgsError::new("expected a number as --concurrency"));
        };
        let (EngineModel::Continuous(shape), Some(scaling)) = (plan.engine, plan.scaling.clone())
        else {
            return Err(SimulateArgsError::new("expected engines that start"));
        };
        if plan.ownership_lag.is_none() || plan.disaggregation.prefill > 0 {
            return Err(SimulateArgsError::new(
                "expected replicas that share all, and engines that serve whole requests",
            ));
        }
        if workload.arrivals.is_empty() {
            return Err(SimulateArgsError::new("no request to simulate"));
        }
        Ok(Self {
            plan,
            scaling,
            places,
            shape,
            workload: Arc::new(workload),
        })
    }

    /// Runs the scaler, then schedules. Passes the number of finished parts to `progress`.
    #[must_use]
    pub fn run(&self, command: String, progress: impl Fn(u64) + Sync) -> SimComparison {
        let wanted = self.scaling.rule.clone();
        let mut runs = self.run_all(vec![("as wanted".to_owned(), wanted)], &progress);
        runs.extend(self.optimum(&runs[0], &progress));
        SimComparison {
            title: self.title(),
            command,
            seed: self.plan.seed,
            verdicts: judge(&runs),
            runs,
            recorded: None,
        }
    }

    fn title(&self) -> String {
        format!(
            "A day of {} requests, on up to {} engines of {} places that take {} s to start, {} \
             replicas, seed {}",
            self.workload.arrivals.len(),
            self.plan.backends,
            self.places,
            self.scaling.start / 1_000_000,
            self.plan.replicas,
            self.plan.seed
        )
    }

    fn run_all(
        &self,
        rules: Vec<(String, ScalingRule)>,
        progress: &(impl Fn(u64) + Sync),
    ) -> Vec<RunReport> {
        let case = |(label, rule)| ComparisonCase {
            plan: SimPlan {
                label,
                scaling: Some(ScalingPlan {
                    rule,
                    ..self.scaling.clone()
                }),
                ..self.plan.clone()
            },
            workload: Arc::clone(&self.workload),
        };
        let cases = ComparisonCases {
            title: String::new(),
            cases: rules.into_iter().map(case).collect(),
            judge: no_verdict,
        };
        cases.run(self.plan.seed, String::new(), progress).runs
    }

    /// Returns the schedule with the fewest engine-hours of those whose p99 is at most that of
    /// `scaler`.
    fn optimum(&self, scaler: &RunReport, progress: &(impl Fn(u64) + Sync)) -> Option<RunReport> {
        let known = KnownDemand::of(&self.workload, &self.shape, self.places, WINDOW);
        let (mut low, mut high) = TARGETS;
        let mut best = None;
        for step in 0..STEPS {
            let third = (high - low) / 3;
            let targets = [low + third, high - third];
            let rules = targets.map(|target| {
                let steps = known.schedule(target, self.scaling.start, self.plan.backends);
                let label = format!("schedule, {:.1} % of places", f64::from(target) / 10.0);
                (label, ScalingRule::Schedule(steps))
            });
            let done = PROGRESS_PARTS * (1 + step * TRIED);
            let runs = self.run_all(rules.into(), &|parts| progress(done + parts));
            let is_as_good =
                |run: &RunReport| is_sound(run) && run.ttft_ms.p99 <= scaler.ttft_ms.p99;
            let good = runs.iter().take_while(|run| is_as_good(run)).count();
            let ends = [low, targets[0], targets[1], high];
            (low, high) = (ends[good], ends[good + 1]);
            best = runs.into_iter().take(good).next_back().or(best);
        }
        best
    }
}

fn is_sound(run: &RunReport) -> bool {
    run.refused + run.abandoned == 0 && run.faults.is_empty()
}

fn hours(run: &RunReport) -> f64 {
    run.fleet.map_or(0.0, |fleet| fleet.engine_hours)
}

fn judge(runs: &[RunReport]) -> Vec<ExperimentResult> {
    let scaler = &runs[0];
    let failed = scaler.refused + scaler.abandoned;
    let held = scaler.fleet.map_or(0, |fleet| fleet.held);
    let mut verdicts = vec![ExperimentResult {
        claim: format!(
            "{failed} of {} requests failed, none allowed; {held} waited for a first engine",
            scaler.requests
        ),
        holds: failed == 0,
    }];
    verdicts.push(match runs.get(1) {
        Some(optimum) => {
            let ratio = hours(scaler) / hours(optimum);
            ExperimentResult {
                claim: format!(
                    "engine-hours are {ratio:.3} times those of the best schedule with at most the \
                     same p99, at most {RATIO_MAX}"
                ),
                holds: ratio <= RATIO_MAX,
            }
        }
        None => ExperimentResult {
            claim: "no schedule has the same p99".to_owned(),
            holds: false,
        },
    });
    verdicts
}
