//! Every planted bug is caught, most in simulated clusters and one in the log by itself.
//!
//! The table lists the invariant that catches a bug, and the seed that catches it soonest. If a
//! change of the product or the workload moves a bug to another seed, `seeds --bug NAME` finds one.
//! docs/reports/2026-11-planted-bugs.md lists how many seeds of a hundred catch each bug.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use chaos_tests::planted::PlantedBug;
use chaos_tests::sim::faults::Fault;
use chaos_tests::sim::{self, SeedOptions, SeedResult};

/// Number of seeds tried from the recorded one on; one of them must catch the bug.
const SEEDS: u64 = 5;

/// Bugs and their symptoms: the number of an invariant, or a part of another message.
const IN_CLUSTERS: &[InCluster] = &[
    ("raft.AckBeforeFlush", "I25", &[Fault::CrashAll], 6, 27),
    ("raft.VoteNotKept", "I28", STOPPED, 6, 16),
    (
        "raft.OlderStateTakenOver",
        "I26",
        &[Fault::LoseState, Fault::Transfer],
        4,
        10,
    ),
    ("raft.SnapshotNotAdopted", "did not start", STOPPED, 6, 18),
    ("raft.SnapshotNotSynced", "did not start", STOPPED, 6, 2),
    ("raft.BarrierWithoutQuorum", "I41", PARTED, 6, 1),
    ("raft.BarrierNotAwaited", "I31", STOPPED, 6, 1),
    ("api.OutboxForgetsUnknown", "I38", CUT_SHORT, 4, 3),
    ("api.OutboxRenumbersUnknown", "I38", CUT_SHORT, 6, 59),
    ("api.OutboxChargesUnknownAgain", "I38", CUT_SHORT, 6, 7),
    ("api.DrainingChosen", "I39", &[], 4, 3),
    ("api.ShareIgnored", "I70", &[], 4, 9),
    ("api.MinorityUnnoticed", "I32", &[Fault::LoseState], 2, 1),
    ("api.AnswerPaidAgain", "I38", &[], 4, 3),
    ("api.SettingsNoticedLate", "I175", &[], 4, 15),
    ("node.UnknownAcknowledged", "I29", CUT_SHORT, 6, 1),
    ("node.UnknownRenumbered", "I30", CUT_OFF, 6, 1),
    (
        "node.SessionKept",
        "I29",
        &[Fault::Crash, Fault::Bounce],
        4,
        1,
    ),
    ("node.FormatSentEarly", "I130", &[Fault::Upgrade], 8, 5),
];

/// A bug that only the log on sled shows, and no simulated cluster: see `raft::truncated_log`.
const IN_THE_LOG: PlantedBug = PlantedBug::Raft(raft::planted::Bug::TruncationNotKept);

/// A bug, its symptom, the faults to inject (all if empty), for how many seconds, and the first
/// seed to try.
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

const CUT_OFF: &[Fault] = &[
    Fault::Crash,
    Fault::IsolateLeader,
    Fault::Halves,
    Fault::Hold,
];

/// Returns the failure that a simulated cluster shows.
fn seen_in_clusters(run: &SeedOptions) -> Option<String> {
    match catch_unwind(AssertUnwindSafe(|| sim::run(run))) {
        Ok(report) => match report.expect("a world can be made").outcome {
            SeedResult::Held => None,
            SeedResult::Broke(how) => Some(how),
        },
        Err(_) => Some("panicked".to_owned()),
    }
}

/// Returns the first failure of a few seeds.
fn first(from: u64, see: impl FnMut(u64) -> Option<String>) -> Option<String> {
    (from..from + SEEDS).find_map(see)
}

/// Fails if any bug was not caught.
fn report(missed: &[String]) {
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}

/// Returns an error if a bug was not caught. A symptom other than the table's is only printed,
/// because the workload determines which one comes first.
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

/// Looks for a bug of the table and returns any error.
fn look_in_clusters((name, how, only, seconds, from): &InCluster) -> Option<String> {
    let bug = PlantedBug::named(name).expect("the table names bugs");
    let seen = first(*from, |seed| {
        seen_in_clusters(&SeedOptions {
            seed,
            faulty: Duration::from_secs(*seconds),
            only: only.to_vec(),
            bug: Some(bug),
            ..SeedOptions::default()
        })
    });
    verdict(name, how, seen.as_deref())
}

#[test]
fn simulation_catches_planted_bugs() {
    // A bug is planted on one thread, and each world has a thread to itself.
    let next = AtomicUsize::new(0);
    let look = || {
        let each = std::iter::from_fn(|| IN_CLUSTERS.get(next.fetch_add(1, Ordering::Relaxed)));
        each.filter_map(look_in_clusters).collect::<Vec<_>>()
    };
    let missed: Vec<String> = std::thread::scope(|scope| {
        let threads = [scope.spawn(look), scope.spawn(look)];
        let missed = threads.map(|it| it.join().expect("what a world panics of is caught"));
        missed.concat()
    });
    report(&missed);
}

#[test]
fn stale_entries_behind_their_replacement_are_detected() {
    let found = || {
        let folder = tempfile::tempdir().expect("a folder can be made");
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        let runtime = runtime.expect("a runtime can be made");
        runtime.block_on(raft::truncated_log::replace_entries(folder.path()))
    };
    let replaced = [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1), (5, 2), (6, 2)];
    let found_soundly = found().expect("the log can be written and read");
    assert_eq!(found_soundly, replaced);
    let planted = IN_THE_LOG.plant();
    let seen = found().expect_err("the log ends behind where it had been");
    assert!(
        seen.to_string().contains("the log ends at entry 10"),
        "{seen}"
    );
    assert!(planted.met() > 0, "{IN_THE_LOG} was never met");
}

#[test]
fn the_planted_table_lists_every_bug_once() {
    let listed = IN_CLUSTERS.iter().map(|(name, ..)| (*name).to_owned());
    let mut listed: Vec<String> = listed.chain([IN_THE_LOG.to_string()]).collect();
    let mut all: Vec<String> = PlantedBug::all().map(|bug| bug.to_string()).collect();
    listed.sort_unstable();
    all.sort_unstable();
    assert_eq!(listed, all);
}
