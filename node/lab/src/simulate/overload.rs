//! The `overload` experiment: ten times the capacity, from clients who wait, who leave after three
//! seconds, and who retry.

use std::sync::Arc;
use std::time::Duration;

use state::admission::{AdmissionSettings, CODEL_TARGET_MS, Concurrency};

use super::compare::{ComparisonCase, ComparisonCases};
use super::events::Micros;
use super::plan::{ClientModel, EngineModel, SimPlan};
use super::report::{ExperimentResult, RunReport};
use super::workload::{LengthRange, SimArrival, SimUser, SimWorkload};
use crate::rng::Rng;

/// Approximate capacity of the experiment's engines, in requests per second. The claims use the
/// measured capacity.
const CAPACITY_PER_S: f64 = 22.0;
/// Concurrency limit of each of the two engines.
const PLACES: u32 = 8;
/// Load before and after the overload, relative to the capacity.
const QUIET: f64 = 0.7;
/// Load during the overload, relative to the capacity.
const TIMES: f64 = 10.0;
const PATIENCE: Micros = 3_000_000;
/// Time after the overload within which service must recover.
const RECOVERY: Micros = 2_000_000;
const LENGTHS: LengthRange = LengthRange {
    input: (32, 64),
    output: (16, 48),
};

/// Client models, with their names.
const KINDS: [(&str, ClientModel); 3] = [
    (
        "patient",
        ClientModel {
            patience: None,
            retries: 0,
        },
    ),
    (
        "leave after 3 s",
        ClientModel {
            patience: Some((PATIENCE, PATIENCE)),
            retries: 0,
        },
    ),
    (
        "leave, try 3 times",
        ClientModel {
            patience: Some((PATIENCE, PATIENCE)),
            retries: 2,
        },
    ),
];
/// Number of runs per client model.
const RUNS_OF_KIND: usize = 3;

/// Returns the cases: the capacity; then, per client model, full load, overload, and overload
/// between two quiet phases.
#[must_use]
pub fn cases(seed: u64, horizon: Micros) -> ComparisonCases {
    let mut cases = vec![ComparisonCase {
        plan: plan("capacity".to_owned(), seed, horizon, ClientModel::default()),
        workload: Arc::new(always_waiting()),
    }];
    let phases = [
        ("1x", vec![(horizon, 1.0)]),
        ("10x", vec![(horizon, TIMES)]),
        (
            "0.7x, 10x, 0.7x",
            vec![
                (horizon / 3, QUIET),
                (horizon / 3, TIMES),
                (horizon / 3, QUIET),
            ],
        ),
    ];
    let loads = phases.map(|(name, phases)| (name, Arc::new(load(seed, &phases))));
    for (kind, clients) in KINDS {
        for (name, workload) in &loads {
            cases.push(ComparisonCase {
                plan: plan(format!("{kind}, {name}"), seed, horizon, clients),
                workload: Arc::clone(workload),
            });
        }
    }
    ComparisonCases {
        title: format!(
            "Ten times what 2 engines of {PLACES} places can serve, from 4 users through 3 replicas"
        ),
        cases,
        judge,
    }
}

fn plan(label: String, seed: u64, horizon: Micros, clients: ClientModel) -> SimPlan {
    let mut plan = SimPlan {
        label,
        seed,
        horizon,
        clients,
        backends: 2,
        codel_target: Duration::from_millis(CODEL_TARGET_MS),
        admission: AdmissionSettings {
            concurrency: Concurrency::Fixed(PLACES),
            ..AdmissionSettings::default()
        },
        ..SimPlan::default()
    };
    if let EngineModel::Continuous(shape) = &mut plan.engine {
        shape.max_num_seqs = PLACES;
    }
    plan
}

fn users() -> Vec<SimUser> {
    let name = |number| SimUser::named(&format!("user-{number}"));
    (1..=4).map(name).collect()
}

fn always_waiting() -> SimWorkload {
    let mut users = users();
    for user in &mut users {
        user.backlog = 2 * PLACES;
    }
    SimWorkload {
        users,
        shape: LENGTHS,
        ..SimWorkload::default()
    }
}

/// Generates a load of phases, each with a duration and a rate relative to the capacity.
fn load(seed: u64, phases: &[(Micros, f64)]) -> SimWorkload {
    let mut rng = Rng::new(seed, 4);
    let mut workload = SimWorkload {
        users: users(),
        ..SimWorkload::default()
    };
    let mut begin = 0;
    for (length, times) in phases {
        let mut at = begin;
        begin += length;
        loop {
            at += rng.gap_us(CAPACITY_PER_S * times);
            if at >= begin {
                break;
            }
            let (prompt, output_tokens) = LENGTHS.draw_request(&mut rng);
            workload.arrivals.push(SimArrival {
                at,
                user: usize::try_from(rng.below(4)).expect("one of four"),
                session: None,
                prompt,
                output_tokens,
                replica: None,
            });
        }
    }
    workload
}

fn judge(runs: &[RunReport]) -> Vec<ExperimentResult> {
    let Some((capacity, runs)) = runs.split_first() else {
        return Vec::new();
    };
    let mut verdicts = Vec::new();
    for of_kind in runs.chunks_exact(RUNS_OF_KIND) {
        let [full, ten, step] = of_kind else { continue };
        verdicts.push(goodput(capacity, ten));
        verdicts.push(times(full, ten));
        verdicts.push(recovery(full, step));
    }
    verdicts
}

fn goodput(capacity: &RunReport, ten: &RunReport) -> ExperimentResult {
    let share = ten.requests_per_s / capacity.requests_per_s;
    ExperimentResult {
        claim: format!(
            "{}: goodput is {share:.3} of the capacity, at least 0.9",
            ten.label
        ),
        holds: share >= 0.9,
    }
}

fn times(full: &RunReport, ten: &RunReport) -> ExperimentResult {
    let (before, after) = (full.ttft_ms, ten.ttft_ms);
    ExperimentResult {
        claim: format!(
            "{}: TTFT p50 {:.0} ms and p99 {:.0} ms are at most twice the {:.0} and {:.0} at full load",
            ten.label, after.p50, after.p99, before.p50, before.p99
        ),
        holds: after.p50 <= 2.0 * before.p50 && after.p99 <= 2.0 * before.p99,
    }
}

/// Checks that service recovers within [`RECOVERY`] after the overload: compares the mean of the
/// steps' median TTFTs with that before the overload. If retries still fill the engines, full load
/// is the reference.
fn recovery(full: &RunReport, step: &RunReport) -> ExperimentResult {
    let curves = &step.curves;
    let third = curves.ended.len() / 3;
    let late = (RECOVERY as f64 / 1e6 / curves.step_s).ceil() as usize;
    // At the start, no request has ended yet.
    let of = |from: usize, until: usize| {
        let medians = curves.ttft_p50_ms[from..until].iter().flatten();
        let (sum, count) = medians.fold((0.0, 0_u32), |(sum, count), it| (sum + it, count + 1));
        let ended: u64 = curves.ended[from..until].iter().sum();
        let per_s = ended as f64 / ((until - from) as f64 * curves.step_s);
        (sum / f64::from(count.max(1)), per_s)
    };
    let (before_ms, before) = of(late, third);
    let (after_ms, after) = of(2 * third + late, 3 * third);
    let (usual_ms, when) = if after > before / QUIET * 0.9 {
        (full.ttft_ms.p50, "at full load, as many try again")
    } else {
        (before_ms, "before")
    };
    ExperimentResult {
        claim: format!(
            "{}: from 2 s after the load TTFT is {after_ms:.0} ms, at most twice the {usual_ms:.0} \
             {when}, and {after:.1}/s are served, at least 0.9 of {before:.1}",
            step.label
        ),
        holds: after_ms <= 2.0 * usual_ms && after >= 0.9 * before,
    }
}
