//! Runs the cases of a comparison in parallel, as many at a time as there are cores. Each case is a
//! separate simulation, so threads do not affect the results.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use super::events::Micros;
use super::ideal::IdealBounds;
use super::plan::SimPlan;
use super::report::{ExperimentResult, RunReport, SimComparison};
use super::workload::SimWorkload;
use super::world::SimWorld;

/// Cases of a comparison, with the evaluation of their results.
pub struct ComparisonCases {
    /// Title of the comparison.
    pub title: String,
    /// Cases to run, in the order of the table.
    pub cases: Vec<ComparisonCase>,
    /// Evaluates the runs, which are in the order of the cases.
    pub judge: fn(&[RunReport]) -> Vec<ExperimentResult>,
}

/// One case of a comparison.
pub struct ComparisonCase {
    /// Plan of the simulated cluster.
    pub plan: SimPlan,
    /// Load on the simulated cluster.
    pub workload: Arc<SimWorkload>,
}

/// Number of parts into which the progress of a case is divided.
pub const PROGRESS_PARTS: u64 = 1000;

impl ComparisonCases {
    /// Runs all cases and evaluates them. Passes the number of finished parts to `progress`.
    #[must_use]
    pub fn run(self, seed: u64, command: String, progress: impl Fn(u64) + Sync) -> SimComparison {
        let done: Vec<Mutex<Option<RunReport>>> =
            self.cases.iter().map(|_| Mutex::new(None)).collect();
        let next = AtomicUsize::new(0);
        let parts = Mutex::new(vec![0; self.cases.len()]);
        let work = || {
            while let Some((place, case)) = take(&self.cases, &next) {
                let run = case.run(|part| {
                    let mut parts = parts.lock().unwrap_or_else(PoisonError::into_inner);
                    parts[place] = part;
                    progress(parts.iter().sum());
                });
                *done[place].lock().unwrap_or_else(PoisonError::into_inner) = Some(run);
            }
        };
        let threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        std::thread::scope(|scope| {
            for _ in 1..threads.min(self.cases.len()) {
                scope.spawn(work);
            }
            work();
        });
        let runs: Vec<RunReport> = done
            .into_iter()
            .filter_map(|run| run.into_inner().unwrap_or_else(PoisonError::into_inner))
            .collect();
        SimComparison {
            title: self.title,
            command,
            seed,
            verdicts: (self.judge)(&runs),
            runs,
            recorded: None,
        }
    }
}

fn take<'a>(
    cases: &'a [ComparisonCase],
    next: &AtomicUsize,
) -> Option<(usize, &'a ComparisonCase)> {
    let place = next.fetch_add(1, Relaxed);
    cases.get(place).map(|case| (place, case))
}

impl ComparisonCase {
    /// Runs the case. Passes the number of finished parts of [`PROGRESS_PARTS`] to `progress`.
    #[must_use]
    pub fn run(&self, mut progress: impl FnMut(u64)) -> RunReport {
        let horizon = self.plan.horizon.max(1);
        let part = |now: Micros| (now.min(horizon) * PROGRESS_PARTS) / horizon;
        let outcome = SimWorld::new(&self.plan, &self.workload).run(|now| progress(part(now)));
        // Nothing is ideal about the caches of engines that come and go.
        let ideal = match self.plan.scaling {
            Some(_) => None,
            None => IdealBounds::of(&self.plan, &self.workload.warm, &outcome.asked),
        };
        RunReport::of(&self.plan, &self.workload, outcome, ideal)
    }
}

/// Evaluates no claim, for comparisons that make none.
#[must_use]
pub fn no_verdict(_: &[RunReport]) -> Vec<ExperimentResult> {
    Vec::new()
}
