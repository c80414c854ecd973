//! Limits, predictions and bins in the whole state: the same on every replica and in snapshots,
//! bound to a backend's incarnation, and changed at one log index.

use crate::common::{Driver, admission, batch, envelope, restored, service, snapshot, spec};
use state::RouterState;
use state::admission::{AdmissionSettings, Concurrency};
use state::command::{Command, Item, Lane};
use state::ids::{BackendRef, Incarnation, LogIndex, ModelKey, Slot, UserKey};
use state::outputs::{Basis, OUTPUT_TOKENS_MAX};

const SLOT: Slot = Slot(0);
const MODEL: ModelKey = ModelKey(1);
const BACKEND: BackendRef = BackendRef {
    slot: SLOT,
    incarnation: Incarnation(1),
};

/// Creates a cluster with one backend of 1000 blocks.
fn driver(settings: AdmissionSettings) -> Driver {
    let mut driver = Driver::new();
    driver.apply(1, Command::PutBackend(spec("a", 1, Some(1000))));
    driver.apply(1, Command::PutAdmission(settings));
    driver
}

fn sample(gaps: u64, inter_token_us: u64) -> Command {
    let sample = service(BACKEND, gaps, inter_token_us);
    batch(vec![Item::ObserveService(Box::new(sample))])
}

fn outputs(user: u64, tokens: Vec<u32>) -> Command {
    let user = UserKey(user);
    batch(vec![Item::ObserveOutputs {
        user,
        model: MODEL,
        tokens,
    }])
}

fn limit(state: &RouterState) -> Option<u32> {
    state.view().limit(SLOT)
}

#[test]
fn memory_limits_apply_once_requests_are_measured() {
    let mut driver = Driver::new();
    driver.apply(1, Command::PutBackend(spec("a", 1, Some(1000))));
    assert_eq!(limit(&driver.state), None);
    // With default settings the limit is adaptive, and 16,000 tokens hold 40 requests.
    driver.apply(1, sample(0, 0));
    assert_eq!(limit(&driver.state), Some(40));
    driver.apply(1, Command::PutBackend(spec("a", 1, Some(2000))));
    assert_eq!(
        limit(&driver.state),
        Some(80),
        "a resized cache counts at once"
    );
    driver.apply(1, Command::PutBackend(spec("a", 1, None)));
    assert_eq!(limit(&driver.state), None, "an unknown one does not bound");
}

#[test]
fn a_new_incarnation_starts_without_measurements() {
    let mut driver = driver(AdmissionSettings::default());
    driver.apply(1, sample(0, 0));
    assert_eq!(limit(&driver.state), Some(40));
    driver.apply(1, Command::PutBackend(spec("a", 2, Some(1000))));
    assert_eq!(limit(&driver.state), None);
    // Reports about the earlier incarnation change nothing.
    driver.apply(2, sample(0, 0));
    assert_eq!(limit(&driver.state), None);
}

#[test]
fn settings_change_the_limit_at_their_log_index() {
    let mut driver = driver(admission());
    assert_eq!(
        limit(&driver.state),
        Some(512),
        "the middle, before any sample"
    );
    for (concurrency, expected) in [
        (Concurrency::Fixed(7), Some(7)),
        (Concurrency::Unlimited, None),
    ] {
        let settings = AdmissionSettings {
            concurrency,
            ..admission()
        };
        driver.apply(1, Command::PutAdmission(settings));
        assert_eq!(limit(&driver.state), expected);
    }
}

/// The controller decides in `apply`, so it decides the same on every replica, regardless of where
/// the replica starts.
#[test]
fn a_restored_replica_keeps_the_limit() {
    let mut driver = driver(admission());
    let mut limits = Vec::new();
    let mut copy: Option<RouterState> = None;
    for step in 0..40 {
        if step % 7 == 5 {
            // In the middle of the samples for a decision.
            copy = Some(restored(&snapshot(&driver.state)));
        }
        let command = sample(400, if step < 20 { 90_000 } else { 30_000 });
        let replica = 1 + step % 3;
        driver.apply(replica, command.clone());
        if let Some(copy) = &mut copy {
            let index = LogIndex(copy.applied().0 + 1);
            copy.apply(
                index,
                envelope(replica, 1, Lane::Admin, 1000 + u64::from(step), command),
            );
            assert_eq!(limit(copy), limit(&driver.state));
        }
        limits.push(limit(&driver.state).expect("a service level is set"));
    }
    limits.dedup();
    expect_test::expect!["[40, 32, 16, 32, 38, 40]"].assert_eq(&format!("{limits:?}"));
}

#[test]
fn bins_apply_at_one_log_index_and_survive_snapshots() {
    let mut driver = driver(AdmissionSettings::default());
    driver.apply(1, outputs(1, (0..200).collect()));
    let bins = |state: &RouterState| state.view().outputs().bins(MODEL).edges().to_vec();
    assert!(bins(&driver.state).is_empty(), "one bin is asked for");
    driver.apply(1, Command::PutAdmission(admission()));
    assert_eq!(bins(&driver.state), [50, 100, 152]);

    let copy = restored(&snapshot(&driver.state));
    assert_eq!(bins(&copy), [50, 100, 152]);
    assert_eq!(copy.digest(), driver.state.digest());
    let of = |state: &RouterState, user| {
        let prediction = state.view().outputs().predict(UserKey(user), MODEL, None);
        (prediction.tokens, prediction.basis)
    };
    assert_eq!(of(&copy, 1), (197, Basis::User));
    // 98 and 99 are in one bucket.
    assert_eq!(of(&copy, 2), (98, Basis::Model));
}

#[test]
fn out_of_bounds_lengths_are_dropped_or_truncated() {
    let mut driver = driver(admission());
    let digest = driver.state.digest();
    for tokens in [vec![], vec![1; 257]] {
        driver.apply(2, outputs(1, tokens));
    }
    let view = driver.state.view();
    assert_eq!(view.outputs().models().count(), 0);
    assert_ne!(driver.state.digest(), digest, "time has passed");
    driver.apply(2, outputs(1, vec![u32::MAX; 256]));
    let longest = view.outputs().predict(UserKey(1), MODEL, None);
    assert_eq!(longest.tokens, OUTPUT_TOKENS_MAX);
    assert_eq!(driver.state.check(), Ok(()));
}
