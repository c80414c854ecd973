//! The experiment `lone-agent`: what an agent gets beside others that send bursts of sub-agents.
//!
//! The lone agent sends a turn at a time, each right after the answer to the one before. Four others do
//! so too, and so does each of their 51 sub-agents, so that three times as many requests are open as
//! engines serve. The lone agent asks for less than an equal part, so its fair share is all that it
//! asks for: one request in service at any time. What it lacks of that is the time that its turns wait
//! for an engine.

use std::sync::Arc;

use state::admission::{Concurrency, Order};

use super::compare::{ComparisonCase, ComparisonCases};
use super::plan::SimPlan;
use super::report::{ExperimentResult, RunReport};
use super::workload::{SimPrompt, SimSession, SimTurn, SimUser, SimWorkload};
use crate::agents::BURST_MAX;
use crate::engine::text::TOKEN_BYTES;
use crate::replay::text::passage;
use crate::rng::Rng;

/// Number of agents with sub-agents.
const CROWD: usize = 4;
/// Time per turn of the lone agent and of others, in microseconds: less than any turn takes, so that
/// there are turns until the end.
const TURN: (u64, u64) = (1_000_000, 2_500_000);
/// Minimum and maximum number of tokens of a first prompt, and of what each turn adds.
const FIRST: (u32, u32) = (1024, 2048);
const ADDED: (u32, u32) = (32, 128);
/// Minimum and maximum number of output tokens.
const OUTPUT: (u32, u32) = (32, 64);
/// Number of turns after which a session begins with a new prompt, as after a compaction.
const TURNS_PER_PROMPT: u64 = 16;

/// Whose bursts they are, the order of the queue, and the claimed range of the lone agent's share.
const BESIDE: [(&str, bool, Order, (f64, f64)); 4] = [
    ("another user's bursts", false, Order::Vtc, (0.95, 1.0)),
    ("its own user's bursts", true, Order::Vtc, (0.90, 1.0)),
    ("another user's, fcfs", false, Order::Fcfs, (0.0, 0.7)),
    ("its own user's, fcfs", true, Order::Fcfs, (0.0, 0.7)),
];

/// Returns the cases of the experiment, which last `horizon`.
pub(super) fn cases(seed: u64, horizon: u64) -> ComparisonCases {
    let case = |(label, is_same_user, order, _): (&str, bool, Order, _)| {
        let mut plan = SimPlan::queueing(seed, horizon, order);
        plan.label = label.to_owned();
        plan.backends = 8;
        plan.admission.concurrency = Concurrency::Fixed(8);
        ComparisonCase {
            plan,
            workload: Arc::new(workload(seed, horizon, is_same_user)),
        }
    };
    ComparisonCases {
        title: format!(
            "A lone agent beside {CROWD} agents with {BURST_MAX} sub-agents each, on 3 replicas and 8 \
             engines"
        ),
        cases: BESIDE.map(case).into(),
        judge,
    }
}

fn judge(runs: &[RunReport]) -> Vec<ExperimentResult> {
    let shares = runs
        .iter()
        .zip(BESIDE)
        .map(|(run, (label, _, _, (least, most)))| {
            let share = run.watched.map_or(0.0, |watched| watched.share);
            ExperimentResult {
                claim: format!(
                    "beside {label}: {share:.3} of its fair share, from {least} to {most}"
                ),
                holds: (least..=most).contains(&share),
            }
        });
    shares.collect()
}

/// Returns the lone agent as the first session, and the agents of the bursts.
fn workload(seed: u64, horizon: u64, is_same_user: bool) -> SimWorkload {
    let mut workload = SimWorkload {
        users: ["crowd", "alone"].map(SimUser::named).into(),
        watched: Some(0),
        ..SimWorkload::default()
    };
    let mut rng = Rng::new(seed, 14);
    let alone = usize::from(!is_same_user);
    add_session(&mut workload, (alone, None), horizon / TURN.0, &mut rng);
    for _ in 0..CROWD {
        let parent = workload.sessions.len();
        add_session(&mut workload, (0, None), horizon / TURN.1, &mut rng);
        for _ in 0..BURST_MAX {
            add_session(&mut workload, (0, Some(parent)), horizon / TURN.1, &mut rng);
        }
    }
    workload
}

/// Adds a session of a user, started by the session `parent`, whose `turns` turns follow each other
/// without a pause.
fn add_session(
    workload: &mut SimWorkload,
    (user, parent): (usize, Option<usize>),
    turns: u64,
    rng: &mut Rng,
) {
    let session = workload.sessions.len();
    workload.sessions.push(SimSession { user, parent });
    let mut text = Vec::new();
    let begins = rng.below(1_000_000);
    for number in 0..turns {
        let lengths = if number % TURNS_PER_PROMPT == 0 {
            text.clear();
            FIRST
        } else {
            ADDED
        };
        let tokens = rng.within(lengths.0, lengths.1) as usize;
        text.extend(passage(rng.next_u64(), 0, tokens * TOKEN_BYTES).into_bytes());
        let prompt = Arc::new(SimPrompt::new(&text));
        let output_tokens = rng.within(OUTPUT.0, OUTPUT.1);
        text.extend(prompt.sequence.output().text(0, output_tokens).into_bytes());
        let before = (number > 0).then(|| workload.turns.len() - 1);
        workload.turns.push(SimTurn {
            session,
            after: before.into_iter().collect(),
            pause: if number == 0 { begins } else { 0 },
            shared_tokens: None,
            prompt,
            output_tokens,
        });
    }
}
