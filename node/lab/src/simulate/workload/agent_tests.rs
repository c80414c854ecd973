//! Tests that generated agents have the published statistics, and that their prompts grow by the
//! answers.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use super::*;
use crate::agents::{AgentTree, BURST_MAX};
use crate::replay::trace::LengthScale;

/// A load that is large enough for its statistics, generated once for all tests.
static WORKLOAD: LazyLock<SimWorkload> = LazyLock::new(|| load().generate(1));

fn load() -> AgentLoad {
    AgentLoad {
        rate: 20.0,
        duration: 200_000_000,
        ..AgentLoad::default()
    }
}

/// Returns a load of few turns.
fn little() -> AgentLoad {
    AgentLoad {
        rate: 4.0,
        duration: 20_000_000,
        ..load()
    }
}

/// Returns the middle one of `values`.
fn median<T: Ord + Copy>(values: impl IntoIterator<Item = T>) -> T {
    let mut values: Vec<T> = values.into_iter().collect();
    values.sort_unstable();
    values[values.len() / 2]
}

/// Checks that `found` is within `percent` of `published`.
fn is_near(what: &str, found: f64, published: f64, percent: f64) {
    let off = 100.0 * (found / published - 1.0);
    assert!(off.abs() <= percent, "{what}: {found} for {published}");
}

fn trees() -> Vec<AgentTree> {
    load().trees(1)
}

fn turns_of(tree: &AgentTree) -> usize {
    tree.chains[0].turns.len()
}

#[test]
fn sessions_have_the_published_numbers_of_turns() {
    let trees = trees();
    let turns = median(trees.iter().map(turns_of));
    is_near("median turns", turns as f64, 43.0, 10.0);
    let all: usize = trees.iter().map(turns_of).sum();
    is_near("mean turns", all as f64 / trees.len() as f64, 84.0, 12.0);
}

#[test]
fn sub_agents_have_the_published_shares_and_bursts() {
    let trees = trees();
    let with: usize = trees.iter().filter(|tree| tree.chains.len() > 1).count();
    is_near("sub-agents", with as f64 / trees.len() as f64, 0.44, 10.0);
    let mut bursts: BTreeMap<(usize, usize), u32> = BTreeMap::new();
    for (number, tree) in trees.iter().enumerate() {
        for after in tree.chains.iter().filter_map(|chain| chain.after) {
            *bursts.entry((number, after)).or_default() += 1;
        }
    }
    assert_eq!(bursts.values().max(), Some(&BURST_MAX));
    assert!((5..=9).contains(&median(bursts.into_values())));
}

#[test]
fn turns_have_the_published_lengths() {
    let workload = &*WORKLOAD;
    let turns = &workload.turns;
    let input = median(turns.iter().map(|turn| turn.prompt.tokens));
    is_near("median input", f64::from(input), 142_000.0 / 16.0, 12.0);
    let output = median(turns.iter().map(|turn| turn.output_tokens));
    is_near("median output", f64::from(output), 444.0 / 16.0, 10.0);
    let all: u64 = turns.iter().map(|turn| u64::from(turn.prompt.tokens)).sum();
    is_near(
        "mean input",
        all as f64 / turns.len() as f64,
        154_000.0 / 16.0,
        15.0,
    );
    is_near("rate", turns.len() as f64 / 200.0, 20.0, 30.0);
}

#[test]
fn pauses_are_from_tenths_of_a_second_to_minutes() {
    let trees = trees();
    let chains = trees.iter().flat_map(|tree| &tree.chains);
    let turns = chains.flat_map(|chain| &chain.turns[1..]);
    let pauses: Vec<u64> = turns.map(|turn| turn.pause).collect();
    let range = 100_000..=600_000_000;
    assert!(pauses.iter().all(|pause| range.contains(pause)));
    let within = |most: u64| pauses.iter().filter(|pause| **pause <= most).count();
    let share = |most: u64| within(most) as f64 / pauses.len() as f64;
    is_near("under a second", share(1_000_000), 0.28, 5.0);
    is_near("over a minute", 1.0 - share(60_000_000), 0.023, 10.0);
}

#[test]
fn a_turn_repeats_the_prompt_and_the_answer_before_it() {
    let workload = &*WORKLOAD;
    let (mut grown, mut compacted) = (0, 0);
    for turn in &workload.turns {
        let [before] = turn.after[..] else {
            continue;
        };
        let before = &workload.turns[before];
        if before.session != turn.session {
            continue;
        }
        let prompt = &before.prompt;
        let mut sequence = prompt.sequence.clone();
        for _ in 0..before.output_tokens {
            sequence.push_token();
        }
        let hashes = turn.prompt.sequence.hashes();
        if turn.prompt.tokens < prompt.tokens {
            compacted += 1;
        } else {
            grown += 1;
            assert!(hashes.starts_with(sequence.hashes()));
        }
    }
    assert!(
        grown > 100 * compacted && compacted > 0,
        "{grown}, {compacted}"
    );
}

#[test]
fn sub_agents_begin_with_the_parents_prompt_and_end_before_its_next_turn() {
    let workload = &*WORKLOAD;
    let mut parents: BTreeMap<usize, usize> = BTreeMap::new();
    for (number, turn) in workload.turns.iter().enumerate() {
        let Some(shared) = turn.shared_tokens else {
            continue;
        };
        for before in &turn.after {
            let parent = &workload.turns[*before];
            assert_eq!(workload.sessions[turn.session].parent, Some(parent.session));
            let blocks = (shared.min(parent.prompt.tokens) / BLOCK_TOKENS) as usize;
            let hashes = turn.prompt.sequence.hashes();
            assert_eq!(hashes[..blocks], parent.prompt.sequence.hashes()[..blocks]);
            *parents.entry(*before).or_default() += 1;
        }
        let session = turn.session;
        let last = workload
            .turns
            .iter()
            .rposition(|turn| turn.session == session);
        let waits = workload
            .turns
            .iter()
            .any(|turn| turn.session != session && turn.after.contains(&last.unwrap_or(number)));
        let parent = workload.sessions[session].parent;
        let goes_on = workload
            .turns
            .iter()
            .skip(number)
            .any(|turn| Some(turn.session) == parent);
        assert!(waits || !goes_on, "turn {number}");
    }
    assert!(parents.into_values().max() > Some(20));
}

#[test]
fn sessions_of_a_program_share_their_system_prompt() {
    let workload = &*WORKLOAD;
    let mut first: BTreeMap<_, usize> = BTreeMap::new();
    for turn in &workload.turns {
        *first.entry(turn.prompt.identity.chain[15]).or_default() += 1;
    }
    assert_eq!(first.len(), crate::agents::PROGRAMS.len());
}

#[test]
fn agents_repeat_from_a_seed() {
    let of = |seed| {
        let workload = little().generate(seed);
        let turns = workload.turns.iter();
        let turns = turns.map(|turn| {
            (
                turn.pause,
                turn.prompt.sequence.output().seed(),
                turn.output_tokens,
            )
        });
        turns.collect::<Vec<_>>()
    };
    assert_eq!(of(1), of(1));
    assert_ne!(of(1), of(2));
}

#[test]
fn a_limit_of_requests_keeps_the_earliest_turns() {
    let workload = AgentLoad {
        requests: 10,
        ..little()
    }
    .generate(1);
    assert_eq!(workload.turns.len(), 10);
}

#[test]
fn another_scale_changes_only_lengths() {
    let at = |scale: &str| {
        let scale = scale.parse::<LengthScale>().unwrap();
        AgentLoad { scale, ..little() }.generate(1)
    };
    let (small, large) = (at("1/32"), at("1/8"));
    assert_eq!(small.turns.len(), large.turns.len());
    let tokens = |workload: &SimWorkload| {
        workload
            .turns
            .iter()
            .map(|turn| u64::from(turn.prompt.tokens))
            .sum::<u64>()
    };
    is_near(
        "lengths",
        tokens(&large) as f64 / tokens(&small) as f64,
        4.0,
        5.0,
    );
    let answer = |workload: &SimWorkload| {
        let turn = &workload.turns[0];
        turn.prompt.sequence.output().text(0, turn.output_tokens)
    };
    assert_ne!(answer(&small), answer(&large));
}
