//! Every bug that can be planted is caught: in states that apply a made-up log where the bug is in the
//! state, in simulated clusters where it is elsewhere.
//!
//! The table says which invariant catches it, and by which seed soonest. When a change of the product or
//! of the workload moves that to another seed, `seeds --bug NAME` finds one; docs/TESTING.md says how
//! many seeds of a hundred catch each.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use chaos_tests::planted::Bug;
use chaos_tests::sim::faults::Fault;
use chaos_tests::sim::{self, Outcome, Run};
use chaos_tests::states;

/// Steps of a made-up log.
const STEPS: u32 = 200;
/// Seeds tried from the one that caught the bug when it was written down: one of them must.
const SEEDS: u64 = 5;

/// Bugs of the replicated state: which invariant catches it, from which seed on.
const IN_STATES: &[(&str, &str, u64)] = &[
    ("state.DedupDropped", "I33", 0),
    ("state.DedupOfLastOnly", "I32", 0),
    ("state.EndedRunComesBack", "I33", 0),
    ("state.SnapshotWithoutSessions", "I5", 0),
    ("state.RestoreNotShown", "I2", 0),
    ("state.LiftLost", "I33", 0),
    ("state.LiftOverAll", "I33", 0),
    ("state.WeightRewritesPast", "I33", 0),
    ("state.AdvanceForgotten", "I44", 0),
    ("state.EvictsByPlace", "I26", 0),
    ("state.EvictsPinned", "I6", 1),
    ("state.CapacityOffByOne", "I3", 0),
    ("state.RemovalStrandsBlocks", "I6", 0),
    ("state.IncarnationIgnored", "I34", 3),
    ("state.MissingTipIsFirst", "I34", 1),
    ("state.DiscardKeepsPin", "I6", 0),
    ("state.DigestNotFollowed", "I8", 0),
    ("state.RegistryNotFollowed", "I8", 0),
    ("state.OwnClock", "I26", 0),
    ("state.TimeGoesBack", "I36", 0),
    ("state.ExpiryLeavesLeases", "I34", 0),
    ("state.ExpiryLeavesRequests", "I33", 0),
    ("state.EventsReadTwice", "I24", 4),
    ("state.GapUnnoticed", "I24", 0),
    ("state.LossIgnored", "I24", 5),
    ("state.ExactAfterGap", "I24", 9),
];

/// Bugs elsewhere, and how each shows: an invariant's number, or a part of what else is said.
const IN_CLUSTERS: &[InCluster] = &[
    ("raft.VoteNotKept", "panic", STOPPED, 6, 1),
    ("raft.SnapshotNotAdopted", "did not start", STOPPED, 6, 16),
    ("raft.SnapshotNotSynced", "did not start", STOPPED, 6, 2),
    ("raft.BarrierWithoutQuorum", "I41", PARTED, 6, 1),
    ("raft.BarrierNotAwaited", "I31", STOPPED, 6, 1),
    ("api.AbortNotCharged", "I38", &[], 4, 2),
    ("api.DrainingChosen", "I39", &[], 4, 3),
    ("api.OverlayKeepsApplied", "I14", &[], 4, 1),
    ("node.UnknownAcknowledged", "I29", CUT_SHORT, 6, 1),
];

/// Bugs that take many seeds, or clusters that wait in vain to heal: looked for by hand, as docs/TESTING.md
/// says.
const BY_HAND: &[&str] = &[
    "api.AbortNotReleased",
    "api.MinorityUnnoticed",
    "node.SessionKept",
    "raft.AckBeforeFlush",
    "raft.TruncationNotKept",
    "raft.OlderStateTakenOver",
    "api.OutboxForgetsUnknown",
    "api.OutboxRenumbersUnknown",
    "api.OutboxChargesUnknownAgain",
    "api.OverlayKeepsVoided",
    "node.UnknownRenumbered",
];

/// A bug, how it shows, what goes wrong meanwhile (all of it when empty), for how many seconds, and the
/// seed from which on it is looked for.
type InCluster = (&'static str, &'static str, &'static [Fault], u64, u64);

const STOPPED: &[Fault] = &[
    Fault::Crash,
    Fault::Bounce,
    Fault::CrashAll,
    Fault::Halves,
    Fault::IsolateLeader,
];
const PARTED: &[Fault] = &[Fault::IsolateLeader, Fault::Halves, Fault::OneWay];
const CUT_SHORT: &[Fault] = &[
    Fault::Crash,
    Fault::Bounce,
    Fault::IsolateLeader,
    Fault::Transfer,
    Fault::Pause,
    Fault::Hold,
];

/// What made-up logs show of a seed; `None`: nothing.
fn seen_in_states(seed: u64) -> Option<String> {
    match catch_unwind(AssertUnwindSafe(|| states::run(seed, STEPS))) {
        Ok(Ok(_)) => None,
        Ok(Err(violation)) => Some(violation.to_string()),
        Err(_) => Some("panicked".to_owned()),
    }
}

/// What a simulated cluster shows of a seed.
fn seen_in_clusters(run: &Run) -> Option<String> {
    match catch_unwind(AssertUnwindSafe(|| sim::run(run))) {
        Ok(report) => match report.expect("a world can be made").outcome {
            Outcome::Held => None,
            Outcome::Broke(how) => Some(how),
        },
        Err(_) => Some("panicked".to_owned()),
    }
}

/// The first that some seed of a few shows.
fn first(from: u64, see: impl FnMut(u64) -> Option<String>) -> Option<String> {
    (from..from + SEEDS).find_map(see)
}

/// Bugs that nothing caught, or something else did than the table says.
fn report(missed: &[String]) {
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}

/// What is wrong with how a bug showed: it must, one way or another. Which way comes first may change with
/// the workload, so that another one than the table's is no fault.
fn verdict(name: &str, how: &str, seen: Option<&str>) -> Option<String> {
    match seen {
        None => Some(format!("{name}: not caught, {how} was expected")),
        Some(seen) if seen.contains(how) => None,
        Some(seen) => {
            println!("{name}: {how} was expected, it shows as {seen}");
            None
        }
    }
}

#[test]
fn bugs_of_the_state_are_caught() {
    let missed = IN_STATES.iter().filter_map(|(name, how, from)| {
        let bug = Bug::named(name).expect("the table names bugs");
        let planted = bug.plant();
        let seen = first(*from, seen_in_states);
        assert!(planted.met() > 0, "{name} was never met");
        verdict(name, how, seen.as_deref())
    });
    report(&missed.collect::<Vec<_>>());
}

#[test]
fn bugs_elsewhere_are_caught() {
    let missed = IN_CLUSTERS
        .iter()
        .filter_map(|(name, how, only, seconds, from)| {
            let bug = Bug::named(name).expect("the table names bugs");
            let seen = first(*from, |seed| {
                seen_in_clusters(&Run {
                    seed,
                    faulty: Duration::from_secs(*seconds),
                    only: only.to_vec(),
                    is_calm: false,
                    is_traced: false,
                    bug: Some(bug),
                })
            });
            verdict(name, how, seen.as_deref())
        });
    report(&missed.collect::<Vec<_>>());
}

#[test]
fn nothing_is_caught_where_nothing_is_planted() {
    let seen: Vec<_> = (0..12).filter_map(seen_in_states).collect();
    assert_eq!(seen, Vec::<String>::new());
}

#[test]
fn the_table_lists_every_bug_once() {
    let states = IN_STATES.iter().map(|(name, ..)| *name);
    let clusters = IN_CLUSTERS.iter().map(|(name, ..)| *name);
    let by_hand = BY_HAND.iter().copied();
    let listed = states.chain(clusters).chain(by_hand);
    let mut listed: Vec<String> = listed.map(str::to_owned).collect();
    let mut all: Vec<String> = Bug::all().map(|bug| bug.to_string()).collect();
    listed.sort_unstable();
    all.sort_unstable();
    assert_eq!(listed, all);
}
