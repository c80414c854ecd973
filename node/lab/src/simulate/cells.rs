//! The `cells` experiment: the cost of splitting a fleet into cells that share nothing.
//!
//! First, the experiment sends a load of shared prefixes to one ideal router of all engines, which
//! learns everything at once, and to cells of three replicas and four engines behind a first hop.
//! Then cells serve users who always have requests waiting. Half of them send prompts with a common
//! prefix, which the first hop keeps together; the prompts of the others spread.

use std::sync::Arc;

use state::admission::Order;
use state::policy::{ChwblSettings, PolicyConfig};

use super::compare::{ComparisonCase, ComparisonCases};
use super::events::Micros;
use super::plan::{BLOCK_TOKENS, CellPlan, SimPlan};
use super::report::{ExperimentResult, RunReport};
use super::workload::{LengthRange, Mix, SimUser, SimWorkload};
use crate::engine::text::TOKEN_BYTES;
use crate::replay::text::passage;

/// Number of engines per cell.
const ENGINES: u16 = 4;
/// Numbers of cells in the routing cases.
const CELLS: [u16; 2] = [10, 100];
/// Number of cells in the fairness cases.
const FAIR_CELLS: u16 = 10;
/// Load factor that leaves the hash unbounded, in thousandths of the average load per cell.
const UNBOUNDED: u32 = 1_000_000;
/// Interval at which cells exchange their charges, in microseconds.
const CHARGES_EVERY: Micros = 1_000_000;
/// Minimum hit rate of cells, relative to the ideal router's.
const HITS_MIN: f64 = 0.95;
/// Maximum mean time to first token of cells, relative to the ideal router's.
const MEAN_MAX: f64 = 1.25;

/// Returns the cases of the experiment. Each number of cells has four: the ideal router, and cells
/// chosen by a bounded hash, by an unbounded hash, and regardless of prefixes. The fairness cases
/// follow. The last two share charges, and of these the very last omits the lift, which raises a
/// user with nothing waiting in a cell although the user waits in others.
#[must_use]
pub fn cases(seed: u64, horizon: Micros) -> ComparisonCases {
    let mut cases = Vec::new();
    for count in CELLS {
        let workload = Arc::new(shared_prefixes(seed, count, horizon));
        let base = SimPlan {
            seed,
            horizon,
            ..SimPlan::default()
        };
        cases.extend(kinds(&base, count).map(|plan| ComparisonCase {
            plan,
            workload: Arc::clone(&workload),
        }));
    }
    let workload = Arc::new(always_waiting());
    let base = SimPlan::queueing(seed, 3 * horizon, Order::Vtc);
    let [ideal, bounded, hashed, _] = kinds(&base, FAIR_CELLS);
    let mut sharing = bounded.clone();
    sharing.cells.charges_every = Some(CHARGES_EVERY);
    sharing.label.push_str(", charges shared");
    let mut unlifted = sharing.clone();
    unlifted.admission.order = Order::Lcf;
    unlifted.label.push_str(", no lift");
    for mut plan in [ideal, hashed, bounded, sharing, unlifted] {
        plan.label = format!("users who wait: {}", plan.label);
        let workload = Arc::clone(&workload);
        cases.push(ComparisonCase { plan, workload });
    }
    ComparisonCases {
        title: format!(
            "Cells of 3 replicas and {ENGINES} engines behind a first hop, against one ideal router"
        ),
        cases,
        judge,
    }
}

/// Returns plans for one router of all engines, and for `count` cells chosen in three ways.
fn kinds(base: &SimPlan, count: u16) -> [SimPlan; 4] {
    let by_hash = |load_factor_milli| {
        PolicyConfig::Chwbl(ChwblSettings {
            load_factor_milli,
            ..ChwblSettings::default()
        })
    };
    let bounded = ChwblSettings::default().load_factor_milli;
    let cells = |name: &str, hop: PolicyConfig| SimPlan {
        label: format!("{count} cells, {name}"),
        backends: ENGINES,
        cells: CellPlan {
            count,
            hop,
            ..CellPlan::default()
        },
        ..base.clone()
    };
    let ideal = SimPlan {
        label: format!("one router, {} engines", count * ENGINES),
        backends: count * ENGINES,
        replicas: 1,
        ..base.clone()
    };
    [
        ideal,
        cells("bounded hash", by_hash(bounded)),
        cells("hash", by_hash(UNBOUNDED)),
        cells("least busy", PolicyConfig::LeastRequest),
    ]
}

/// Generates a load with 64 shared prefixes per cell, and a hot prefix in one request of twenty,
/// whatever the number of cells.
fn shared_prefixes(seed: u64, cells: u16, horizon: Micros) -> SimWorkload {
    let cells = u32::from(cells);
    let mix = Mix {
        duration: horizon,
        rate: 32.0 * f64::from(cells),
        groups: 64 * cells,
        group_tokens: 1024,
        hot_permille: 50,
        users: 8,
        ..Mix::shared_prefix()
    };
    mix.generate(seed)
}

/// Returns eight users who always have more requests waiting than an equal share of all cells. The
/// prompts of every other user have a common prefix.
fn always_waiting() -> SimWorkload {
    let alike_tokens = (CellPlan::default().hashed_blocks * BLOCK_TOKENS) as usize;
    let user = |number: u64| SimUser {
        backlog: 48 * u32::from(FAIR_CELLS),
        beginning: (number % 2 == 1).then(|| passage(number, 0, alike_tokens * TOKEN_BYTES).into()),
        ..SimUser::named(&format!("user-{}", number + 1))
    };
    SimWorkload {
        name: String::new(),
        users: (0..8).map(user).collect(),
        arrivals: Vec::new(),
        shape: LengthRange::default(),
    }
}

fn judge(runs: &[RunReport]) -> Vec<ExperimentResult> {
    let mut verdicts = Vec::new();
    for (kinds, count) in runs.chunks(4).zip(CELLS) {
        let [ideal, bounded, ..] = kinds else {
            continue;
        };
        let hits = bounded.hit_rate / ideal.hit_rate;
        verdicts.push(ExperimentResult {
            claim: format!(
                "{count} cells hit {hits:.3} of what one ideal router does: at least {HITS_MIN}"
            ),
            holds: hits >= HITS_MIN,
        });
        let mean = bounded.ttft_ms.mean / ideal.ttft_ms.mean;
        verdicts.push(ExperimentResult {
            claim: format!(
                "{count} cells take {mean:.3} times as long to the first token: at most {MEAN_MAX}"
            ),
            holds: mean <= MEAN_MAX,
        });
    }
    if let [.., apart, shared, unlifted] = runs {
        let fairness = |run: &RunReport| {
            let served = || run.service.values().copied();
            served().fold(f64::MAX, f64::min) / served().fold(0.0, f64::max)
        };
        let [apart, shared, unlifted] = [apart, shared, unlifted].map(fairness);
        verdicts.push(ExperimentResult {
            claim: format!(
                "least over greatest service: {unlifted:.3} with charges shared every second and \
                 no lift, above {apart:.3} without; {shared:.3} with the lift"
            ),
            holds: unlifted > apart,
        });
    }
    verdicts
}

#[cfg(test)]
mod tests {
    use super::super::tests::{SECOND, mix, run};
    use super::*;

    #[test]
    fn a_prefix_stays_in_its_cell_until_the_bound() {
        let mix = Mix {
            duration: 3 * SECOND,
            groups: 1,
            ..mix()
        };
        let workload = mix.generate(1);
        let base = SimPlan {
            horizon: 3 * SECOND,
            ..SimPlan::default()
        };
        let [_, bounded, hashed, busy] = kinds(&base, 3).map(|plan| run(&plan, &workload));
        let cells = |run: &RunReport| {
            let cells = run.by_backend.chunks(ENGINES.into());
            cells.map(|it| it.iter().sum()).collect::<Vec<u64>>()
        };
        let [most, rest @ ..] = &sorted(cells(&hashed))[..] else {
            panic!("three cells");
        };
        assert_eq!((*most, rest), (hashed.requests, &[0, 0][..]));
        // Between two reports, the first hop spreads requests by its own counts.
        assert!(sorted(cells(&bounded))[1] > 0, "{:?}", cells(&bounded));
        assert!(
            sorted(cells(&busy))[2] > busy.requests / 5,
            "{:?}",
            cells(&busy)
        );
        assert!(hashed.hit_rate > busy.hit_rate);
    }

    fn sorted(mut cells: Vec<u64>) -> Vec<u64> {
        cells.sort_unstable_by_key(|it| std::cmp::Reverse(*it));
        cells
    }

    #[test]
    fn cells_sharing_charges_serve_evenly_and_charge_once() {
        let mut workload = always_waiting();
        for user in &mut workload.users {
            user.backlog /= 4;
        }
        let base = SimPlan::queueing(2, 15 * SECOND, Order::Vtc);
        let [_, bounded, ..] = kinds(&base, 3);
        let mut sharing = bounded.clone();
        sharing.cells.charges_every = Some(SECOND);
        let [apart, shared] = [bounded, sharing].map(|plan| run(&plan, &workload));
        let least = |run: &RunReport| run.service.values().copied().fold(f64::MAX, f64::min);
        assert!(
            least(&shared) > least(&apart),
            "{shared:?} against {apart:?}"
        );
        let cached = (shared.hit_rate * shared.prompt_tokens as f64).round() as u64;
        let used = shared.prompt_tokens - cached + 2 * shared.output_tokens;
        // Charges after the last report are missing at the end.
        assert!(
            shared.charged <= used && shared.charged > used * 4 / 5,
            "{} of {used}",
            shared.charged
        );
    }
}
