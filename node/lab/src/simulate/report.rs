//! What a run came to, as numbers: one row of the table, one object of the JSON.

use std::collections::BTreeMap;

use serde::Serialize;
use state::admission::{Order, bound};

use super::ideal::IdealBounds;
use super::literal_policies::AsWritten;
use super::plan::SimPlan;
use super::recorded::RecordedFigures;
use super::tally::SimTally;
use super::times::{QUANTILES, quantile, summary};
use super::workload::SimWorkload;
use super::world::SimOutcome;
use crate::replay::report::{LatencySummary, jain_index};

/// All runs of one comparison.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SimComparison {
    /// What was simulated, in words.
    pub title: String,
    /// The arguments it was made with.
    pub command: String,
    /// Seed of everything drawn.
    pub seed: u64,
    /// One per policy, order or arrangement.
    pub runs: Vec<RunReport>,
    /// What the cluster that was recorded made of it; absent where none was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recorded: Option<RecordedFigures>,
    /// What the experiment set out to show, and whether it did.
    pub verdicts: Vec<ExperimentResult>,
}

/// One thing that an experiment set out to show.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ExperimentResult {
    /// In words, with the numbers.
    pub claim: String,
    /// Whether it is so.
    pub holds: bool,
}

/// One run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RunReport {
    /// Its name in the comparison.
    pub label: String,
    /// The load's name; empty where all runs have the same.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub load: String,
    /// The policy.
    pub policy: String,
    /// The queue's order.
    pub order: String,
    /// Requests that arrived.
    pub requests: u64,
    /// Served to their end.
    pub ok: u64,
    /// Refused.
    pub refused: u64,
    /// Left by their clients.
    pub abandoned: u64,
    /// Refusals, of all tries.
    pub refusals: u64,
    /// Times a client left, of all tries.
    pub departures: u64,
    /// Tokens computed and made for clients who left.
    pub wasted_tokens: u64,
    /// Cut off by a restart and sent again.
    pub resent: u64,
    /// From the first arrival to the last end, seconds.
    pub duration_s: f64,
    /// Until when requests came, seconds; throughput and fairness count until then.
    pub horizon_s: f64,
    /// Prompt tokens.
    pub prompt_tokens: u64,
    /// Output tokens.
    pub output_tokens: u64,
    /// Prompt tokens found in engines' caches over all of them.
    pub hit_rate: f64,
    /// What routers believed to be there over all prompt tokens.
    pub predicted_hit_rate: f64,
    /// The pooled cache's; `None` where engines have no prefix cache.
    pub ideal_hit_rate: Option<f64>,
    /// Of what the pooled cache would have hit, the share that was hit.
    pub share_of_ideal: Option<f64>,
    /// Time to first token, milliseconds.
    pub ttft_ms: LatencySummary,
    /// Time to the end, milliseconds.
    pub latency_ms: LatencySummary,
    /// Mean time to first token above its lower bound, milliseconds.
    pub regret_ms: Option<f64>,
    /// Requests per second until the horizon.
    pub requests_per_s: f64,
    /// Requests that kept the goals for the first token and the time between tokens, over the time
    /// until the horizon.
    pub goodput_per_s: f64,
    /// Mean time between a request's tokens, milliseconds.
    pub gap_ms: LatencySummary,
    /// Computed prompt tokens and output tokens per second until the horizon.
    pub tokens_per_s: f64,
    /// Mean over time of the difference between the busiest backend and the idlest, in requests.
    pub load_spread: f64,
    /// Requests of the busiest backend over an even share.
    pub busiest_share: f64,
    /// Requests whose blocks engines took away.
    pub preemptions: u64,
    /// Largest service gap of two users who both waited, priced tokens at weight 1.
    pub gap: Option<f64>,
    /// What it may be at most; `None` where nothing bounds it.
    pub gap_bound: Option<f64>,
    /// `U` of the bound: price of the largest request.
    pub largest_request: u64,
    /// `X`: most that a user had used and not been charged in some replica's eyes, with the most
    /// that its dispatched requests had yet to make.
    pub uncharged: u64,
    /// `G`: the gate's highest slack.
    pub slack: u64,
    /// Upper ends of the output-length bins at the end, but the last.
    pub bin_edges: Vec<u32>,
    /// Jain's index over what users were served, by weight.
    pub jain_index: Option<f64>,
    /// Least over greatest service, by weight, of users who always waited; `None` when fewer than
    /// two did.
    pub service_ratio: Option<f64>,
    /// Priced tokens at weight 1 by user.
    pub service: BTreeMap<String, f64>,
    /// Requests by backend.
    pub by_backend: Vec<u64>,
    /// Bytes of the log per request.
    pub log_bytes_per_request: f64,
    /// Entries of the log.
    pub log_entries: u64,
    /// Priced tokens that the replicated state has charged at the end, all users.
    pub charged: u64,
    /// Digest of the replicated state at the end.
    pub digest: String,
    /// Events of the simulation.
    pub events: u64,
    /// Faults of the books; none in a correct run.
    pub faults: Vec<String>,
    /// For plots.
    pub curves: RunCurves,
}

/// Curves over time and distributions.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RunCurves {
    /// Seconds between two points.
    pub step_s: f64,
    /// Hit rate within each step; `None` where no first token came.
    pub hit_rate: Vec<Option<f64>>,
    /// Time to first token at 1, 2, .. 100 percent, milliseconds.
    pub ttft_ms: Vec<f64>,
    /// Requests that ended within each step.
    pub ended: Vec<u64>,
    /// Median time to first token within each step, milliseconds; `None` where none came.
    pub ttft_p50_ms: Vec<Option<f64>>,
    /// Requests at each backend, by backend.
    pub load: Vec<Vec<u32>>,
    /// Requests waiting for admission.
    pub waiting: Vec<u64>,
    /// Requests waiting for admission by bin, by bin.
    pub bins: Vec<Vec<usize>>,
    /// Service by user, priced tokens at weight 1.
    pub service: Vec<Vec<f64>>,
    /// Names of the users in `service`.
    pub users: Vec<String>,
}

impl RunReport {
    /// The figures of a run.
    #[must_use]
    pub fn of(
        plan: &SimPlan,
        workload: &SimWorkload,
        outcome: SimOutcome,
        ideal: Option<IdealBounds>,
    ) -> Self {
        let gap_bound = gap_bound(plan, &outcome);
        let SimOutcome {
            mut tally, digest, ..
        } = outcome;
        let horizon_s = tally.horizon as f64 / 1e6;
        let shares = tally.service.shares();
        let names = || workload.users.iter().map(|user| user.name.clone());
        let hit_rate = ratio(tally.cached_tokens, tally.prompt_tokens);
        let ttft_ms = summary(&mut tally.ttft);
        Self {
            label: plan.label.clone(),
            load: workload.name.clone(),
            policy: plan
                .as_written
                .map_or(plan.policy.name(), AsWritten::name)
                .to_owned(),
            order: name_of(&plan.admission.order),
            requests: tally.arrived,
            ok: tally.ended,
            refused: tally.refused,
            abandoned: tally.abandoned,
            refusals: tally.refusals,
            departures: tally.departures,
            wasted_tokens: tally.wasted_tokens,
            resent: tally.resent,
            duration_s: tally.last_end as f64 / 1e6,
            horizon_s,
            prompt_tokens: tally.prompt_tokens,
            output_tokens: tally.output_tokens,
            hit_rate,
            predicted_hit_rate: ratio(tally.predicted_tokens, tally.prompt_tokens),
            ideal_hit_rate: ideal.map(|ideal| ideal.hit_rate),
            share_of_ideal: ideal
                .filter(|ideal| ideal.hit_rate > 0.0)
                .map(|ideal| hit_rate / ideal.hit_rate),
            regret_ms: ideal.map(|ideal| ttft_ms.mean - ideal.ttft_ms),
            latency_ms: summary(&mut tally.latency),
            requests_per_s: tally.ended_in_time as f64 / horizon_s,
            goodput_per_s: tally.good as f64 / horizon_s,
            gap_ms: summary(&mut tally.gaps),
            tokens_per_s: tally.tokens_in_time as f64 / horizon_s,
            load_spread: load_spread(&tally),
            busiest_share: busiest_share(&tally.by_backend),
            preemptions: outcome.preemptions,
            gap: tally.service.gap(),
            gap_bound,
            largest_request: tally.largest_priced,
            uncharged: outcome.uncharged,
            slack: outcome.slack,
            bin_edges: outcome.bin_edges,
            jain_index: jain_index(&shares),
            service_ratio: service_ratio(&tally.service.shares_of_always_waiting()),
            service: names().zip(shares).collect(),
            log_bytes_per_request: ratio(tally.log_bytes, tally.arrived),
            log_entries: tally.log_entries,
            charged: outcome.charged,
            digest: format!("{digest:032x}"),
            events: outcome.events,
            faults: outcome.faults,
            curves: RunCurves::of(&tally, names().collect()),
            by_backend: tally.by_backend,
            ttft_ms,
        }
    }
}

impl RunCurves {
    /// `tally.ttft` is sorted.
    fn of(tally: &SimTally, users: Vec<String>) -> Self {
        let points = &tally.points;
        let rate = |(prompts, hits): &(u64, u64)| (*prompts > 0).then(|| ratio(*hits, *prompts));
        let ttft = (1..=QUANTILES).filter(|_| !tally.ttft.is_empty());
        let backends = tally.by_backend.len();
        let of_backend = |backend: usize| points.load.iter().map(|it| it[backend]).collect();
        let bins = points.bins.first().map_or(0, Vec::len);
        let of_bin = |bin: usize| points.bins.iter().map(|it| it[bin]).collect();
        let of_user = |user: usize| points.shares.iter().map(|it| it[user]).collect();
        Self {
            step_s: tally.step() as f64 / 1e6,
            hit_rate: points.hits.iter().map(rate).collect(),
            ttft_ms: ttft
                .map(|percent| quantile(&tally.ttft, percent) as f64 / 1e3)
                .collect(),
            ended: points.ended.clone(),
            ttft_p50_ms: points.ttft.iter().map(|times| median(times)).collect(),
            load: (0..backends).map(of_backend).collect(),
            waiting: points.waiting.clone(),
            bins: (0..bins).map(of_bin).collect(),
            service: (0..users.len()).map(of_user).collect(),
            users,
        }
    }
}

fn median(times: &[u64]) -> Option<f64> {
    let mut times = times.to_owned();
    times.sort_unstable();
    (!times.is_empty()).then(|| quantile(&times, 50) as f64 / 1e3)
}

/// `2(U + X + G)`, for orders that bound the gap at all.
fn gap_bound(plan: &SimPlan, outcome: &SimOutcome) -> Option<f64> {
    let is_bounded = match plan.admission.order {
        Order::Vtc | Order::VtcMaxFair | Order::VtcPred => true,
        Order::Dlpm | Order::Lcf | Order::Rpm | Order::Fcfs => false,
    };
    let SimOutcome {
        tally,
        uncharged,
        slack,
        ..
    } = outcome;
    let bound = bound(tally.largest_priced, *uncharged, *slack);
    (is_bounded && plan.load_lag.is_some()).then_some(bound as f64)
}

/// A setting's name as the config spells it.
fn name_of(setting: &impl Serialize) -> String {
    match serde_json::to_value(setting) {
        Ok(serde_json::Value::String(name)) => name,
        Ok(other) => other.to_string(),
        Err(_) => String::new(),
    }
}

fn ratio(part: u64, whole: u64) -> f64 {
    part as f64 / whole.max(1) as f64
}

fn load_spread(tally: &SimTally) -> f64 {
    let loads = &tally.points.load;
    let spread = |load: &Vec<u32>| {
        let most = load.iter().max().copied().unwrap_or(0);
        f64::from(most - load.iter().min().copied().unwrap_or(0))
    };
    loads.iter().map(spread).sum::<f64>() / loads.len().max(1) as f64
}

fn busiest_share(by_backend: &[u64]) -> f64 {
    let all: u64 = by_backend.iter().sum();
    let most = by_backend.iter().max().copied().unwrap_or(0);
    ratio(most * by_backend.len() as u64, all)
}

fn service_ratio(shares: &[f64]) -> Option<f64> {
    let least = shares.iter().copied().fold(f64::MAX, f64::min);
    let most = shares.iter().copied().fold(0.0, f64::max);
    (shares.len() > 1 && most > 0.0).then(|| least / most)
}
