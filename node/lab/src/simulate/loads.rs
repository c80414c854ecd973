//! The `policies` experiment: runs every policy on the same loads, and compares the default one
//! with the best.
//!
//! Five loads are generated. Recorded loads are added: a trace with block ids at a sixteenth of its
//! lengths and three rates, and traces without block ids as they were recorded. All rates are for
//! four engines and grow with the number of engines, so that loads also fit fleets for which no
//! constants were tuned.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use state::policy::PolicyConfig;

use super::argument_error::SimulateArgsError;
use super::compare::{ComparisonCase, ComparisonCases};
use super::events::Micros;
use super::plan::SimPlan;
use super::policies::SimPolicy;
use super::report::{ExperimentResult, RunReport};
use super::workload::{Mix, SimWorkload};
use crate::replay::trace::{self, LengthScale, TraceOptions};

/// Number of engines for which the rates of the loads are defined.
const ENGINES: f64 = 4.0;
/// Rates of a trace with block ids, in requests per second: light, busy, and near capacity.
const RATES: [f64; 3] = [20.0, 30.0, 45.0];
/// Factor by which the lengths of a trace with block ids are scaled.
const SCALE: &str = "1/16";
/// Default duration of generated loads.
const GENERATED: Micros = 300_000_000;
/// Maximum mean time to first token of the default policy, relative to the best one.
const MEAN_MAX: f64 = 1.03;
/// Maximum 99th percentile of the time to first token of the default policy, relative to the best.
const P99_MAX: f64 = 1.05;

/// Parameters of the experiment.
pub struct PolicyLoads<'a> {
    /// Plan of the cluster, without policy and load.
    pub base: SimPlan,
    /// Policies to compare. If empty, all policies with their default settings.
    pub policies: &'a [SimPolicy],
    /// Files with recorded loads.
    pub traces: &'a [PathBuf],
    /// Duration of the loads. If `None`, five minutes for generated loads and the whole trace for
    /// recorded ones.
    pub duration: Option<Micros>,
    /// Factor for all rates, in percent.
    pub percent: u32,
    /// Number of users for loads that name none.
    pub users: u32,
}

impl PolicyLoads<'_> {
    /// Returns a case for each load and policy.
    ///
    /// # Errors
    /// If a trace cannot be read.
    pub fn cases(&self) -> Result<ComparisonCases, SimulateArgsError> {
        let mut loads = self.generated();
        for path in self.traces {
            loads.extend(self.recorded(path)?);
        }
        let all: Vec<SimPolicy> = PolicyConfig::defaults().into_iter().map(plain).collect();
        let policies = match self.policies {
            [] => &all[..],
            some => some,
        };
        let mut cases = Vec::new();
        for load in loads {
            let workload = Arc::new(load);
            let last = workload.arrivals.last().map_or(1, |sent| sent.at);
            cases.extend(policies.iter().map(|policy| ComparisonCase {
                plan: SimPlan {
                    label: policy.label.clone(),
                    policy: policy.config.clone(),
                    reference_policy: policy.reference_policy,
                    horizon: last.max(1),
                    ..self.base.clone()
                },
                workload: Arc::clone(&workload),
            }));
        }
        let SimPlan {
            backends,
            replicas,
            seed,
            ..
        } = self.base;
        Ok(ComparisonCases {
            title: format!(
                "Policies on loads at {} % of their rates: {backends} backends, {replicas} \
                 replicas, seed {seed}",
                self.percent
            ),
            cases,
            judge,
        })
    }

    fn factor(&self) -> f64 {
        f64::from(self.percent) / 100.0 * f64::from(self.base.backends) / ENGINES
    }

    fn generated(&self) -> Vec<SimWorkload> {
        let named = [
            ("shared-prefix", Mix::shared_prefix()),
            ("one-hot", Mix::one_hot()),
            ("templated", Mix::templated()),
            ("volatile", Mix::volatile()),
            ("burst", Mix::burst()),
        ];
        let generate = |(name, mix): (&str, Mix)| {
            let mix = Mix {
                rate: mix.rate * self.factor(),
                duration: self.duration.unwrap_or(GENERATED),
                users: self.users,
                ..mix
            };
            SimWorkload {
                name: name.to_owned(),
                ..mix.generate(self.base.seed)
            }
        };
        named.into_iter().map(generate).collect()
    }

    fn recorded(&self, path: &Path) -> Result<Vec<SimWorkload>, SimulateArgsError> {
        let unreadable = |error: anyhow::Error| SimulateArgsError::new(format!("{error:#}"));
        let names_blocks = path.extension().is_some_and(|it| it == "jsonl");
        let scale = match names_blocks {
            true => SCALE
                .parse::<LengthScale>()
                .map_err(SimulateArgsError::new)?,
            false => LengthScale::ONE,
        };
        let options = TraceOptions {
            scale,
            first: None,
            users: self.users,
            seed: self.base.seed,
            takes_recordings: false,
        };
        let arrivals = trace::read(path, &options).map_err(|it| unreadable(it.into()))?;
        let recorded = SimWorkload::of_trace(&arrivals);
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        let at = |rate: f64, name: String| {
            let mut workload = SimWorkload {
                name,
                ..recorded.clone()
            };
            workload.set_rate(rate * self.factor());
            if let Some(duration) = self.duration {
                workload.arrivals.retain(|sent| sent.at < duration);
            }
            workload
        };
        Ok(match names_blocks {
            true => RATES
                .map(|rate| at(rate, format!("{stem} {rate}/s")))
                .into(),
            false => vec![at(recorded.rate(), stem.into_owned())],
        })
    }
}

fn plain(config: PolicyConfig) -> SimPolicy {
    SimPolicy {
        label: config.name().to_owned(),
        config,
        reference_policy: None,
    }
}

/// Returns the name of a new cluster's policy.
fn default_policy() -> &'static str {
    SimPlan::default().policy.name()
}

/// Compares the default policy with the best one on each load, by mean and 99th percentile.
fn judge(runs: &[RunReport]) -> Vec<ExperimentResult> {
    let by_load = runs.chunk_by(|one, other| one.load == other.load);
    by_load.flat_map(judge_load).collect()
}

/// Function that reads a figure of a run.
type FigureOf = fn(&RunReport) -> f64;

fn judge_load(runs: &[RunReport]) -> Vec<ExperimentResult> {
    let name = default_policy();
    let Some(default) = runs.iter().find(|run| run.label == name) else {
        return Vec::new();
    };
    let figures: [(&str, f64, FigureOf); 2] = [
        ("mean", MEAN_MAX, |run| run.ttft_ms.mean),
        ("p99", P99_MAX, |run| run.ttft_ms.p99),
    ];
    let judged = figures.into_iter().filter_map(|(figure, most, of)| {
        let best = runs.iter().min_by(|a, b| of(a).total_cmp(&of(b)))?;
        let ratio = of(default) / of(best);
        Some(ExperimentResult {
            claim: format!(
                "{}: {figure} TTFT of {name} is {ratio:.3} times that of {}, at most {most}",
                default.load, best.label
            ),
            holds: ratio <= most,
        })
    });
    judged.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulate::matrix;

    #[test]
    fn each_policy_runs_each_load_and_the_default_is_judged() {
        let policies = ["cost", "random"].map(|it| SimPolicy::parse(it).unwrap());
        let loads = PolicyLoads {
            base: SimPlan {
                backends: 2,
                ..SimPlan::default()
            },
            policies: &policies,
            traces: &[],
            duration: Some(3_000_000),
            percent: 200,
            users: 2,
        };
        let comparison = loads.cases().unwrap().run(1, String::new(), |_| {});
        assert_eq!((comparison.runs.len(), comparison.verdicts.len()), (10, 10));
        for run in &comparison.runs {
            assert_eq!(run.faults, Vec::<String>::new());
            // 20 per second for four engines are 20 for two at twice the rate; bursts are more.
            assert!((20..240).contains(&run.requests), "{}", run.requests);
        }
        let text = matrix::tables(&comparison);
        for part in ["| `cost` | 1.", "| `random` | ", " one-hot |", " burst |"] {
            assert!(text.contains(part), "{text}");
        }
        assert!(
            comparison
                .verdicts
                .iter()
                .all(|it| it.claim.contains("of cost is"))
        );
    }

    #[test]
    fn a_default_policy_that_loses_is_reported() {
        let loads = PolicyLoads {
            base: SimPlan::default(),
            policies: &[SimPolicy::default()],
            traces: &[],
            duration: Some(1_000_000),
            percent: 100,
            users: 1,
        };
        let mut runs = loads.cases().unwrap().run(1, String::new(), |_| {}).runs;
        runs.truncate(1);
        assert!(
            judge(&runs).iter().all(|it| it.holds),
            "it is the best of one"
        );
        let mut better = runs[0].clone();
        better.label = "other".to_owned();
        better.ttft_ms.mean *= 0.9;
        better.ttft_ms.p99 *= 0.97;
        runs.push(better);
        let holds: Vec<bool> = judge(&runs).iter().map(|it| it.holds).collect();
        assert_eq!(holds, [false, true]);
    }

    #[test]
    fn a_missing_trace_is_reported() {
        let traces = [PathBuf::from("nowhere.jsonl")];
        let loads = PolicyLoads {
            base: SimPlan::default(),
            policies: &[],
            traces: &traces,
            duration: Some(1_000_000),
            percent: 100,
            users: 1,
        };
        let fault = loads.cases().err().unwrap().to_string();
        assert!(fault.contains("nowhere.jsonl"), "{fault}");
    }
}
