//! One seed, from forming the cluster to healing it.

use std::collections::BTreeMap;
use std::time::Duration;

use super::faults::Fault;
use super::network::NetworkCounts;
use super::panics;
use super::world::{STEP_US, World, WorldCounts, WorldOptions};
use crate::invariants::{self, Subjects, linearizable_by_search, sound_state};
use crate::planted::PlantedBug;

/// How long a cluster may take to form, steps.
const FORM_STEPS_MAX: u64 = 20_000;
/// Steps between two looks at the invariants that can be checked in passing.
const CHECK_EVERY_STEPS: u64 = 5_000;

/// What a seed is run with.
#[derive(Debug, Clone)]
pub struct SeedOptions {
    /// Decides everything.
    pub seed: u64,
    /// How long things go wrong.
    pub faulty: Duration,
    /// What may go wrong; everything when empty.
    pub only: Vec<Fault>,
    /// Whether nothing goes wrong.
    pub is_calm: bool,
    /// Whether lines of text are kept.
    pub is_traced: bool,
    /// A bug that is in the product meanwhile.
    pub bug: Option<PlantedBug>,
}

/// How a seed ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SeedResult {
    /// Everything held.
    Held,
    /// Something did not; says what.
    Broke(String),
}

/// How many things each invariant looked at, by number and statement.
pub type SubjectCounts = BTreeMap<(&'static str, &'static str), Subjects>;

/// What came of a seed.
#[derive(Debug, Clone)]
pub struct SeedReport {
    /// The seed.
    pub seed: u64,
    /// How it ended.
    pub outcome: SeedResult,
    /// Hash of everything that happened.
    pub hash: u64,
    /// Events in it.
    pub events: u64,
    /// Simulated time, microseconds.
    pub simulated_us: u64,
    /// What happened.
    pub counts: WorldCounts,
    /// What the network did.
    pub network: NetworkCounts,
    /// How often something ended how.
    pub outcomes: BTreeMap<(String, String), u64>,
    /// How many things each invariant looked at.
    pub subjects: SubjectCounts,
    /// Lines of text, if they were kept.
    pub text: String,
}

/// Runs a seed on this thread.
///
/// # Errors
/// When a world cannot be made; what the cluster does wrong is [`SeedResult::Broke`].
pub fn run(run: &SeedOptions) -> anyhow::Result<SeedReport> {
    let _planted = run.bug.map(PlantedBug::plant);
    let mut world = World::new(WorldOptions {
        seed: run.seed,
        is_traced: run.is_traced,
        only: run.only.clone(),
        is_calm: run.is_calm,
    })?;
    let mut subjects = BTreeMap::new();
    let done = live(&mut world, run, &mut subjects);
    let mut outcomes: BTreeMap<_, _> = world
        .stage
        .outcomes()
        .into_iter()
        .map(|((what, how), count)| ((what.to_owned(), how.to_owned()), count))
        .collect();
    searched(&world, &mut outcomes);
    watched(&world, &mut outcomes);
    let report = SeedReport {
        seed: run.seed,
        outcome: done.map_or_else(SeedResult::Broke, |()| SeedResult::Held),
        hash: world.trace().hash(),
        events: world.trace().events(),
        simulated_us: world.now_us(),
        counts: world.counts(),
        network: world.network.counts(),
        outcomes,
        subjects,
        text: world.trace().take_text(),
    };
    drop(world);
    panics::leave();
    Ok(report)
}

fn live(world: &mut World, run: &SeedOptions, subjects: &mut SubjectCounts) -> Result<(), String> {
    let mut steps = 0;
    while !world.is_formed() {
        world.step();
        steps += 1;
        if let Some(wrong) = world.ledger.wrong() {
            return Err(wrong);
        }
        if steps > FORM_STEPS_MAX {
            return Err("the cluster did not form".to_owned());
        }
    }
    world.begin_faults();
    let faulty_us = u64::try_from(run.faulty.as_micros()).unwrap_or(u64::MAX);
    for step in 0..faulty_us / STEP_US {
        world.step();
        if let Some(wrong) = world.ledger.wrong() {
            return Err(wrong);
        }
        if step % CHECK_EVERY_STEPS == CHECK_EVERY_STEPS - 1 {
            let passing = world.ledger.with(|it| invariants::check_in_passing(it));
            passing.map_err(|violation| violation.to_string())?;
        }
    }
    world.heal()?;
    check(world, subjects)
}

fn check(world: &World, subjects: &mut SubjectCounts) -> Result<(), String> {
    let checked = world.ledger.with(|record| invariants::check_all(record));
    let checked = checked.map_err(|violation| violation.to_string())?;
    for (invariant, looked_at) in invariants::ALL.iter().zip(checked) {
        subjects.insert((invariant.number, invariant.name), looked_at);
    }
    let states = world.ledger.states_checked();
    subjects.insert(("I1 to I23", sound_state::NAME), states);
    Ok(())
}

/// How far the search for an order of operations came.
fn searched(world: &World, outcomes: &mut BTreeMap<(String, String), u64>) {
    let tally = world.ledger.with(|it| linearizable_by_search::examine(it));
    let Ok(tally) = tally else { return };
    for (how, count) in [
        ("explained", tally.pieces),
        ("undecided", tally.undecided),
        ("operations beyond", tally.beyond),
    ] {
        outcomes.insert(("histories searched".to_owned(), how.to_owned()), count);
    }
}

/// How often limits were looked at, and what there was to see: the subjects of I70.
fn watched(world: &World, outcomes: &mut BTreeMap<(String, String), u64>) {
    world.ledger.with(|record| {
        let limits = &record.observation.limits;
        for (how, count) in [
            ("agreed", limits.agreed),
            ("disagreed", limits.disagreed),
            ("started at", limits.starts),
            ("filled by several", limits.filled),
        ] {
            outcomes.insert(("limits watched".to_owned(), how.to_owned()), count);
        }
    });
}
