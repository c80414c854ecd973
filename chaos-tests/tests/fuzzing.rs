//! The fuzz bodies over seeded mutations of real encodings: bounded, the same in every run, and with
//! an eye on what a forged length has a reader allocate.
//!
//! `chaos-tests/fuzz` runs the same bodies under libFuzzer, for as long as one likes.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

use chaos_tests::fuzzing::{FuzzTarget, TARGETS, named, sweep};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// Held by the one test that runs: what is allocated is counted for the whole process.
static TURN: Mutex<()> = Mutex::new(());

const SEED: u64 = 1;

/// Runs all targets of a crate.
fn check(prefix: &str) {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let targets = TARGETS
        .iter()
        .filter(|target| target.name.starts_with(prefix));
    for target in targets {
        // Once for what is made at first use and kept.
        (target.body)(&[]);
        (target.seeds)().iter().for_each(|seed| (target.body)(seed));
        sweep(target, SEED, target.mutations, |bytes| run(target, bytes));
    }
}

fn run(target: &FuzzTarget, bytes: &[u8]) {
    let before = ALLOCATOR.current_usage();
    ALLOCATOR.reset_peak_usage();
    let outcome = catch_unwind(AssertUnwindSafe(|| (target.body)(bytes)));
    let held = ALLOCATOR.peak_usage().saturating_sub(before);
    let name = target.name;
    assert!(outcome.is_ok(), "{name} panics at {}", shown(bytes));
    assert!(
        held <= target.held_bytes_max,
        "{name} holds {held} bytes at {}",
        shown(bytes)
    );
}

/// Bytes such that they can be pasted into a test.
fn shown(bytes: &[u8]) -> String {
    format!("b\"{}\"", bytes.escape_ascii())
}

#[test]
fn the_state_reads_any_bytes() {
    check("state_");
}

#[test]
fn raft_reads_any_bytes() {
    check("raft_");
}

#[test]
fn the_data_plane_and_the_admin_api_read_any_bytes() {
    check("api_");
}

#[test]
fn the_node_reads_any_bytes() {
    check("node_");
}

#[test]
fn every_target_is_run_and_has_a_name_of_its_own() {
    for target in TARGETS {
        let crates = ["state_", "raft_", "api_", "lab_", "node_"];
        assert!(
            crates.iter().any(|it| target.name.starts_with(it)),
            "{}",
            target.name
        );
        assert!(
            std::ptr::eq(named(target.name).unwrap(), target),
            "{}",
            target.name
        );
        assert!(!(target.seeds)().is_empty(), "{}", target.name);
    }
    // Each is a target of cargo-fuzz too.
    let manifest = include_str!("../fuzz/Cargo.toml");
    let listed = manifest.matches("[[bin]]").count();
    assert_eq!(listed, TARGETS.len());
    for target in TARGETS {
        let line = format!("name = \"{}\"", target.name);
        assert!(
            manifest.contains(&line),
            "{} is no target of cargo-fuzz",
            target.name
        );
    }
}
