//! A bounded set of simulated clusters; the rest runs by hand (docs/internals/testing.md).

use std::time::Duration;

use chaos_tests::sim::faults::Fault;
use chaos_tests::sim::{SeedOptions, SeedReport, SeedResult, run};

fn seed(seed: u64, faulty_ms: u64) -> SeedOptions {
    SeedOptions {
        seed,
        faulty: Duration::from_millis(faulty_ms),
        ..SeedOptions::default()
    }
}

fn held(of: &SeedOptions) -> SeedReport {
    let report = run(of).expect("a world can be made");
    assert_eq!(report.outcome, SeedResult::Held, "seed {}, {of:?}", of.seed);
    report
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    let of = SeedOptions {
        is_traced: true,
        ..seed(1, 1500)
    };
    let (first, second) = (held(&of), held(&of));
    let mut lines = first.text.lines().zip(second.text.lines());
    let differs = lines.find(|(first, second)| first != second);
    assert_eq!(differs, None);
    assert_eq!((first.hash, first.events), (second.hash, second.events));
}

#[test]
fn another_seed_gives_another_trace() {
    assert_ne!(held(&seed(3, 500)).hash, held(&seed(4, 500)).hash);
}

#[test]
fn a_cluster_without_faults_loses_no_request() {
    let calm = SeedOptions {
        is_calm: true,
        ..seed(5, 1500)
    };
    let report = held(&calm);
    assert!(report.counts.faults.is_empty());
    assert_eq!(
        report.counts.leaders, 1,
        "nobody is elected in place of a leader that is well"
    );
    assert_eq!(report.network.broken, 0);
}

/// Runs each kind of fault alone: an impossible fault would go unnoticed among the others.
fn each_of(faults: &[Fault]) {
    for (number, fault) in (100..).zip(faults) {
        let mut happened = 0;
        for extra in 0..4 {
            let report = held(&SeedOptions {
                only: vec![*fault],
                ..seed(number + 100 * extra, 1000)
            });
            happened += report.counts.faults.get(fault).copied().unwrap_or(0);
            if happened > 0 {
                break;
            }
        }
        assert!(happened > 0, "{fault} never happened");
    }
}

#[test]
fn invariants_hold_under_process_and_disk_faults() {
    each_of(&[
        Fault::Crash,
        Fault::CrashAll,
        Fault::Bounce,
        Fault::Leave,
        Fault::Pause,
        Fault::ClockJump,
        Fault::SlowDisk,
        Fault::FailDisk,
        Fault::LoseState,
        Fault::Descriptors,
        Fault::FullDisk,
    ]);
}

#[test]
fn invariants_hold_under_network_faults() {
    each_of(&[
        Fault::Halves,
        Fault::Isolate,
        Fault::IsolateLeader,
        Fault::OneWay,
        Fault::Deafen,
        Fault::Hold,
        Fault::BadLinks,
        Fault::SlowLinks,
        Fault::CutStreams,
    ]);
}

#[test]
fn invariants_hold_under_byzantine_peers() {
    each_of(&[Fault::Liar]);
    held(&SeedOptions {
        only: vec![Fault::Liar, Fault::IsolateLeader, Fault::Crash],
        ..seed(8, 3000)
    });
}

#[test]
fn invariants_hold_under_membership_changes() {
    each_of(&[Fault::Join, Fault::Transfer, Fault::Snapshot]);
    held(&SeedOptions {
        only: vec![Fault::Join, Fault::Promote, Fault::Remove, Fault::Crash],
        ..seed(7, 4000)
    });
}

/// A StatefulSet scales the cluster while replicas crash and leaders change.
#[test]
fn invariants_hold_while_scaling_replicas() {
    each_of(&[Fault::Scale]);
    held(&SeedOptions {
        only: vec![
            Fault::Scale,
            Fault::Crash,
            Fault::Bounce,
            Fault::IsolateLeader,
            Fault::Transfer,
        ],
        ..seed(9, 6000)
    });
}

/// Two builds side by side: upgrades, and downgrades where the formats allow them.
#[test]
fn invariants_hold_with_mixed_builds() {
    each_of(&[Fault::Upgrade]);
    let report = held(&SeedOptions {
        only: vec![Fault::Upgrade, Fault::Crash, Fault::IsolateLeader],
        ..seed(10, 6000)
    });
    let known = report
        .subjects
        .iter()
        .find(|((number, _), _)| *number == "I130");
    assert!(
        known.is_some_and(|(_, subjects)| *subjects > 0),
        "nothing was looked at"
    );
}

#[test]
fn invariants_hold_under_all_faults_together() {
    for number in 20..22 {
        held(&seed(number, 2500));
    }
}

/// Every fifth seed has an operator who sets small budgets, some of which are used up.
#[test]
fn invariants_hold_with_exhausted_budgets() {
    let used_up = (1..6).map(|number| {
        let report = held(&seed(5 * number, 3000));
        let used_up = ("budget".to_owned(), "used up".to_owned());
        report.outcomes.get(&used_up).copied().unwrap_or(0)
    });
    let requests: u64 = used_up.sum();
    assert!(requests > 0, "nobody was over a budget");
}

/// Every eighth seed has a source whose engines roll and flap.
#[test]
fn rolling_and_flapping_sources_lose_no_listed_engine() {
    for number in [3, 11] {
        let report = held(&SeedOptions {
            only: vec![Fault::Crash, Fault::IsolateLeader, Fault::Transfer],
            ..seed(number, 8000)
        });
        let looked_at = report
            .subjects
            .iter()
            .find(|((number, _), _)| *number == "I151");
        assert!(
            looked_at.is_some_and(|(_, subjects)| *subjects > 60),
            "{looked_at:?}"
        );
    }
}

/// Concurrency of 1, batches, budgets of a few tokens, weights of thousandths and the like: no rule may
/// hold by default values only.
#[test]
fn invariants_hold_with_any_settings() {
    for number in [2, 111, 220] {
        held(&SeedOptions {
            varies: true,
            ..seed(number, 3500)
        });
    }
}
