//! Results of a comparison: each run is a row of the table and an object of the JSON.

use std::collections::BTreeMap;

use serde::Serialize;
use state::admission::{Order, bound};
use state::policy::Prices;

use super::ideal::IdealBounds;
use super::literal_policies::ReferencePolicy;
use super::plan::SimPlan;
use super::recorded::RecordedFigures;
use super::tally::SimTally;
use super::times::{QUANTILES, quantile, summary};
use super::workload::SimWorkload;
use super::world::SimOutcome;
use crate::replay::report::{LatencySummary, jain_index};

/// Results of a comparison.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SimComparison {
    /// Title of the comparison.
    pub title: String,
    /// Command line that reproduces the comparison.
    pub command: String,
    /// Seed of all random choices.
    pub seed: u64,
    /// Results of the runs, one per policy, order or arrangement.
    pub runs: Vec<RunReport>,
    /// Results of the recorded cluster, if the workload was recorded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recorded: Option<RecordedFigures>,
    /// Claims of the experiment, with whether they hold.
    pub verdicts: Vec<ExperimentResult>,
}

/// Verdict on one claim of an experiment.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ExperimentResult {
    /// Text of the claim, with the measured numbers.
    pub claim: String,
    /// Whether the claim holds.
    pub holds: bool,
}

/// Results of one run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RunReport {
    /// Name of the run in the comparison.
    pub label: String,
    /// Name of the load; empty if all runs have the same load.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub load: String,
    /// Name of the routing policy.
    pub policy: String,
    /// Order of the admission queue.
    pub order: String,
    /// Number of requests that arrived.
    pub requests: u64,
    /// Number of requests served to the end.
    pub ok: u64,
    /// Number of requests finally rejected.
    pub refused: u64,
    /// Number of requests that their clients finally abandoned.
    pub abandoned: u64,
    /// Number of rejections, including those followed by a retry.
    pub refusals: u64,
    /// Number of departures of clients, including those followed by a retry.
    pub departures: u64,
    /// Number of uncached prompt tokens and output tokens served to clients who then left. A prompt
    /// counts from its first output token on.
    pub wasted_tokens: u64,
    /// Number of requests cut off by a restart and sent again.
    pub resent: u64,
    /// Time from the start of the simulation to the end of the last completed request, in seconds.
    pub duration_s: f64,
    /// Time until which requests arrived, in seconds; throughput and fairness cover this period.
    pub horizon_s: f64,
    /// Number of prompt tokens.
    pub prompt_tokens: u64,
    /// Number of output tokens.
    pub output_tokens: u64,
    /// Share of prompt tokens that were found in engines' caches.
    pub hit_rate: f64,
    /// Shares of prompt tokens that were loaded from CPU memory and from disk, parts of `hit_rate`;
    /// `None` if none were.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loaded_rate: Option<[f64; 2]>,
    /// Share of prompt tokens that routers predicted to be cached.
    pub predicted_hit_rate: f64,
    /// Hit rate of the pooled cache; `None` if engines have no prefix cache.
    pub ideal_hit_rate: Option<f64>,
    /// Hit rate relative to that of the pooled cache; `None` if there is none or it never hits.
    pub share_of_ideal: Option<f64>,
    /// Time from arrival, or from the last retry, to the first token, in milliseconds.
    pub ttft_ms: LatencySummary,
    /// Time from arrival, or from the last retry, to the end of the response, in milliseconds.
    pub latency_ms: LatencySummary,
    /// Mean time to first token minus its lower bound, in milliseconds; `None` without a bound.
    pub regret_ms: Option<f64>,
    /// Number of requests completed per second until the horizon.
    pub requests_per_s: f64,
    /// Number of completed requests that met the goals for the first token and the time between
    /// tokens, divided by the horizon; includes requests that ended after it.
    pub goodput_per_s: f64,
    /// Mean time between a request's tokens, in milliseconds.
    pub gap_ms: LatencySummary,
    /// Number of computed prompt tokens and output tokens per second until the horizon.
    pub tokens_per_s: f64,
    /// Mean difference in requests, running or waiting, between the busiest and the idlest backend,
    /// over time.
    pub load_spread: f64,
    /// Number of requests of the busiest backend, relative to an even share.
    pub busiest_share: f64,
    /// Number of preemptions in engines.
    pub preemptions: u64,
    /// Largest service gap between two users, in priced tokens at weight 1; `None` if not measured.
    pub gap: Option<f64>,
    /// Bound of the service gap, `2(U + X + G)`, in priced tokens at weight 1; `None` if the order has
    /// none, or if replicas do not report their load.
    pub gap_bound: Option<f64>,
    /// Price of the largest request: `U` in the bound.
    pub largest_request: u64,
    /// `X` in the bound: largest service of a user that some replica did not know to be charged,
    /// plus the largest outstanding output of a user's dispatched requests, in priced tokens at
    /// weight 1.
    pub uncharged: u64,
    /// Highest slack of the gate, in priced tokens at weight 1: `G` in the bound.
    pub slack: u64,
    /// Final upper bounds of all output-length bins but the last.
    pub bin_edges: Vec<u32>,
    /// Jain's index of the users' service per weight.
    pub jain_index: Option<f64>,
    /// Least over greatest service per weight, of users who always had requests waiting; `None`
    /// with fewer than two such users.
    pub service_ratio: Option<f64>,
    /// Service of each user, in priced tokens at weight 1.
    pub service: BTreeMap<String, f64>,
    /// Number of requests of each backend.
    pub by_backend: Vec<u64>,
    /// Number of bytes in the log per request.
    pub log_bytes_per_request: f64,
    /// Number of entries in the log.
    pub log_entries: u64,
    /// Number of priced tokens that the replicated state has charged by the end, over all users.
    pub charged: u64,
    /// Digest of the replicated state at the end.
    pub digest: String,
    /// Number of simulated events.
    pub events: u64,
    /// Descriptions of inconsistencies; empty in a correct run.
    pub faults: Vec<String>,
    /// Where turns of agents were sent; `None` for other loads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agents: Option<AgentFigures>,
    /// Where prompts were found, and where routers expected them; `None` unless routers follow KV
    /// events.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tiers: Option<TierFigures>,
    /// Engines that were started and stopped; `None` if all ran from start to end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fleet: Option<FleetFigures>,
    /// What the watched session got; `None` if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub watched: Option<WatchedFigures>,
    /// Data of the plots.
    pub curves: RunCurves,
}

/// Where turns of agents were sent.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct AgentFigures {
    /// Number of turns.
    pub turns: u64,
    /// Share of the turns that were sent to an engine with their longest cached prefix, of those
    /// with a block in some cache.
    pub at_longest_prefix: f64,
    /// Share of them that were sent elsewhere although the replica knew of a longer prefix.
    pub moved: f64,
    /// Share of them that had fewer prompt tokens before their first output token where they were sent
    /// than at every engine with their longest prefix; part of `moved`.
    pub moved_sooner: f64,
    /// Share of them whose engine lacked what the replica expected there: it was not computed yet, or
    /// evicted.
    pub early: f64,
    /// Share of them of whose longest prefix the replica did not know.
    pub unseen: f64,
    /// Share of the prompt tokens that another engine had cached and the chosen one had not.
    pub missed_elsewhere: f64,
    /// Number of first turns of sub-agents.
    pub children: u64,
    /// Share of these that were sent to the engine of their parent's last turn, while it had all
    /// that their prompts share.
    pub at_parents_prefix: f64,
    /// Share of the first turns of sub-agents for which that engine had room: it had all that their
    /// prompts share, and no request waited there.
    pub with_room: f64,
    /// Share of these that were sent there.
    pub at_parents_prefix_with_room: f64,
    /// Share of them that were sent to another engine that had the same.
    pub at_copy_with_room: f64,
    /// Share of them that were sent to another engine without it, where fewer prompt tokens were to
    /// be computed before their first output token.
    pub sooner_with_room: f64,
}

/// Where prompts were found, and where routers expected them: on the GPU, in CPU memory, on disk.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TierFigures {
    /// Shares of prompt tokens that routers expected on each tier, at dispatch.
    pub expected: [f64; 3],
    /// Shares of prompt tokens that were found on each tier.
    pub found: [f64; 3],
    /// Share of the expected tokens that were found on the tier where they were expected.
    pub as_expected: f64,
    /// Prices that each engine's measurements have taught; none without learning.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub learnt: Vec<Option<Prices>>,
}

/// Engines that were started and stopped.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct FleetFigures {
    /// Total time of the engines from start to stop, in hours.
    pub engine_hours: f64,
    /// Number of starts.
    pub starts: u64,
    /// Highest number of engines at the same time.
    pub most: usize,
    /// Number of requests that waited because there was no engine.
    pub held: u64,
}

/// What one session got between the warm-up and the horizon.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct WatchedFigures {
    /// Number of turns.
    pub turns: u64,
    /// Share of the time of its turns in which an engine served them.
    pub share: f64,
}

/// Curves and distributions of a run, for plots.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RunCurves {
    /// Time between two points, in seconds.
    pub step_s: f64,
    /// Hit rate within each step; `None` for a step without a first token.
    pub hit_rate: Vec<Option<f64>>,
    /// Percentiles 1 to 100 of the time to first token, in milliseconds.
    pub ttft_ms: Vec<f64>,
    /// Number of requests that ended within each step.
    pub ended: Vec<u64>,
    /// Median time to first token within each step, in milliseconds; `None` without a first token.
    pub ttft_p50_ms: Vec<Option<f64>>,
    /// Number of requests at each backend at each point.
    pub load: Vec<Vec<u32>>,
    /// Number of requests waiting for admission at each point.
    pub waiting: Vec<u64>,
    /// Number of requests waiting for admission in each bin at each point.
    pub bins: Vec<Vec<usize>>,
    /// Service of each user at each point, in priced tokens at weight 1.
    pub service: Vec<Vec<f64>>,
    /// Names of the users in `service`.
    pub users: Vec<String>,
}

impl RunReport {
    /// Computes the results of a run from its outcome and, if known, the ideal bounds.
    #[must_use]
    pub fn of(
        plan: &SimPlan,
        workload: &SimWorkload,
        outcome: SimOutcome,
        ideal: Option<IdealBounds>,
    ) -> Self {
        let policy = plan.reference_policy.map(ReferencePolicy::name);
        let gap_bound = gap_bound(plan, &outcome);
        let SimOutcome {
            mut tally, digest, ..
        } = outcome;
        let horizon_s = tally.horizon as f64 / 1e6;
        let shares = tally.service.shares();
        let names = || workload.users.iter().map(|user| user.name.clone());
        let [_, loaded @ ..] = tally.found_tokens;
        let hit_rate = ratio(tally.cached_tokens, tally.prompt_tokens);
        let ttft_ms = summary(&mut tally.ttft);
        Self {
            label: plan.label.clone(),
            load: workload.name.clone(),
            policy: policy.unwrap_or(plan.policy.name()).to_owned(),
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
            loaded_rate: (loaded != [0, 0])
                .then(|| loaded.map(|tokens| ratio(tokens, tally.prompt_tokens))),
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
            agents: AgentFigures::of(&tally),
            tiers: plan
                .is_exact
                .then(|| TierFigures::of(&tally, outcome.learnt)),
            fleet: plan.scaling.is_some().then(|| FleetFigures::of(&tally)),
            watched: WatchedFigures::of(&tally),
            curves: RunCurves::of(&tally, names().collect()),
            by_backend: tally.by_backend,
            ttft_ms,
        }
    }
}

impl AgentFigures {
    fn of(tally: &SimTally) -> Option<Self> {
        let agents = tally.agents;
        (agents.turns > 0).then(|| Self {
            turns: agents.turns,
            at_longest_prefix: ratio(agents.at_longest, agents.with_prefix),
            moved: ratio(agents.moved, agents.with_prefix),
            moved_sooner: ratio(agents.moved_sooner, agents.with_prefix),
            early: ratio(agents.early, agents.with_prefix),
            unseen: ratio(agents.unseen, agents.with_prefix),
            missed_elsewhere: ratio(agents.missed_tokens, tally.prompt_tokens),
            children: agents.children,
            at_parents_prefix: ratio(agents.at_parent, agents.children),
            with_room: ratio(agents.with_room, agents.children),
            at_parents_prefix_with_room: ratio(agents.at_parent_with_room, agents.with_room),
            at_copy_with_room: ratio(agents.at_copy_with_room, agents.with_room),
            sooner_with_room: ratio(agents.sooner_with_room, agents.with_room),
        })
    }
}

impl TierFigures {
    fn of(tally: &SimTally, learnt: Vec<Option<Prices>>) -> Self {
        let share = |tokens| ratio(tokens, tally.prompt_tokens);
        Self {
            expected: tally.expected_tokens.map(share),
            found: tally.found_tokens.map(share),
            as_expected: ratio(tally.kept_tokens, tally.expected_tokens.iter().sum()),
            learnt,
        }
    }
}

impl FleetFigures {
    fn of(tally: &SimTally) -> Self {
        Self {
            engine_hours: tally.fleet.ran as f64 / 3.6e9,
            starts: tally.fleet.starts,
            most: tally.fleet.most,
            held: tally.held,
        }
    }
}

impl WatchedFigures {
    fn of(tally: &SimTally) -> Option<Self> {
        let watched = tally.watched;
        (watched.turns > 0).then(|| Self {
            turns: watched.turns,
            share: 1.0 - ratio(watched.waited, watched.took),
        })
    }
}

impl RunCurves {
    /// Computes the curves of a run. `tally.ttft` must be sorted.
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

/// Returns the bound of the service gap, `2(U + X + G)`; `None` if the order or the lack of load
/// reports leaves the gap unbounded.
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

/// Returns the name of a setting's value, as in the config.
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
