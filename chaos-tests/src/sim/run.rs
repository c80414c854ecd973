//! Runs of seeds, from founding a cluster to healing it.

use std::collections::BTreeMap;
use std::time::Duration;

use super::faults::Fault;
use super::network::NetworkCounts;
use super::panics;
use super::world::{STEP_US, World, WorldCounts, WorldOptions};
use crate::invariants::{self, Subjects, linearizable_by_search, sound_state};
use crate::planted::PlantedBug;

/// Maximum number of steps until the cluster has formed.
const FORM_STEPS_MAX: u64 = 20_000;
/// Number of steps between two checks of the cheap invariants.
const CHECK_EVERY_STEPS: u64 = 5_000;

/// Options for the run of a seed.
#[derive(Debug, Clone, Default)]
pub struct SeedOptions {
    /// Seed that decides everything.
    pub seed: u64,
    /// Duration for which faults are injected.
    pub faulty: Duration,
    /// Faults that may happen; all faults if empty.
    pub only: Vec<Fault>,
    /// Whether no fault happens.
    pub is_calm: bool,
    /// Whether the seed draws values of the config, inside their documented ranges.
    pub varies: bool,
    /// Number of clients per replica that send requests; as the seed decides if `None`.
    pub clients: Option<u8>,
    /// Number of replicas that found the cluster; as the seed decides if `None`.
    pub voters: Option<u8>,
    /// Whether the trace keeps text.
    pub is_traced: bool,
    /// Bug to plant during the run, if any.
    pub bug: Option<PlantedBug>,
}

/// Result of the run of a seed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SeedResult {
    /// All checks held.
    Held,
    /// A check failed, with its description.
    Broke(String),
}

/// Number of subjects of each invariant, by its number and statement.
pub type SubjectCounts = BTreeMap<(&'static str, &'static str), Subjects>;

/// Report of the run of a seed.
#[derive(Debug, Clone)]
pub struct SeedReport {
    /// Seed that was run.
    pub seed: u64,
    /// Result of the run.
    pub outcome: SeedResult,
    /// Hash of all events, which is equal for equal runs.
    pub hash: u64,
    /// Number of events in the trace.
    pub events: u64,
    /// Simulated time, in microseconds.
    pub simulated_us: u64,
    /// Counts of the world.
    pub counts: WorldCounts,
    /// Counts of the network.
    pub network: NetworkCounts,
    /// Number of operations by kind and outcome.
    pub outcomes: BTreeMap<(String, String), u64>,
    /// Number of subjects of each invariant.
    pub subjects: SubjectCounts,
    /// Text of the trace; empty if it was not kept.
    pub text: String,
}

/// Runs a seed on this thread.
///
/// # Errors
/// If the world cannot be created. A failure of the cluster is [`SeedResult::Broke`].
pub fn run(run: &SeedOptions) -> anyhow::Result<SeedReport> {
    let _planted = run.bug.map(PlantedBug::plant);
    let mut world = World::new(WorldOptions {
        seed: run.seed,
        is_traced: run.is_traced,
        only: run.only.clone(),
        is_calm: run.is_calm,
        varies: run.varies,
        clients: run.clients,
        voters: run.voters,
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

/// Counts the results of the search for an order of the operations.
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

/// Counts observations of limits, which are the subjects of I70.
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
