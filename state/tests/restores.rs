//! Restores: the state of a backup returns, whatever happens meanwhile, and nothing of the previous
//! state affects it.

use crate::common::{self, Driver, chain, measured_sample, restored, snapshot, spec};
use state::command::{
    Charge, Command, Item, LeaseOutcome, RESTORE_BYTES_MAX, RESTORE_PART_BYTES, Rejection, Reply,
};
use state::ids::{
    BackendRef, BlockHash, Incarnation, LogIndex, ReplicaId, RestoreId, SessionId, Slot,
};
use state::keys::{FoundKey, SecretHash};
use state::kv_events::{KvMode, KvReason, KvUncertainty};
use state::prefix::user_key;
use state::{AuditAction, RESTORE_IDLE_MS_MAX, RouterState};

const RESTORE: RestoreId = RestoreId(5);

fn begin(force: bool) -> Command {
    Command::BeginRestore {
        restore: RESTORE,
        force,
    }
}

fn parts(backup: &[u8]) -> Vec<Command> {
    let parts = backup.chunks(RESTORE_PART_BYTES).zip(0..);
    parts
        .map(|(bytes, number)| Command::RestorePart {
            restore: RESTORE,
            number,
            bytes: bytes.to_vec(),
        })
        .collect()
}

fn finish(backup: &[u8]) -> Command {
    let bytes = backup.len() as u64;
    let restore = RESTORE;
    Command::FinishRestore { restore, bytes }
}

/// Restores a backup through replica 1.
#[track_caller]
fn bring_in(driver: &mut Driver, backup: &[u8]) {
    assert_eq!(driver.apply(1, begin(true)), Reply::Applied);
    for part in parts(backup) {
        assert_eq!(driver.apply(1, part), Reply::Applied);
    }
    assert_eq!(driver.apply(1, finish(backup)), Reply::Applied);
    assert_eq!(driver.state.check(), Ok(()));
}

/// A cluster with a user, blocks and a lease on them.
fn busy() -> (Driver, BackendRef) {
    let mut driver = Driver::new();
    driver.apply(1, Command::PutBackend(spec("x", 9, None)));
    let backend = driver.state.backend("x").expect("just put").handle;
    let charge = Charge {
        user: user_key(common::HASH_SEED, "alice"),
        output: 1000,
        started: 1,
        ..Charge::default()
    };
    let acquire = Item::Acquire {
        attempt: 77,
        backend,
        tip: None,
        new: chain(&[9, 9]),
    };
    driver.apply(2, common::batch(vec![acquire, Item::Charge(charge)]));
    (driver, backend)
}

/// A state whose backup has several parts, all different.
fn large() -> RouterState {
    let mut driver = Driver::new();
    for (name, first) in [("a", 1_u64 << 32), ("b", 2 << 32)] {
        driver.apply(1, Command::PutBackend(spec(name, 1, None)));
        let backend = driver.state.backend(name).expect("just put").handle;
        let acquire = Item::Acquire {
            attempt: (first >> 32) as u32,
            backend,
            tip: None,
            new: (first..first + 40_000).map(BlockHash).collect(),
        };
        driver.apply(1, common::batch(vec![acquire]));
    }
    driver.state
}

#[track_caller]
fn refused(reply: Reply) -> (String, String) {
    match reply {
        Reply::Rejected(Rejection::Invalid { field, expected }) => (field, expected),
        other => panic!("{other:?}"),
    }
}

#[test]
fn restore_brings_back_the_backups_content() {
    let original = measured_sample();
    let backup = snapshot(&original);
    let mut driver = Driver::new();
    let view = driver.state.view();
    bring_in(&mut driver, &backup);
    let state = &driver.state;

    let registered = |state: &RouterState| {
        let backends = state.backends();
        backends
            .map(|it| (it.spec.clone(), it.draining, it.facts.clone()))
            .collect::<Vec<_>>()
    };
    assert_eq!(registered(state), registered(&original));
    for backend in original.backends() {
        let slot = backend.handle.slot;
        assert_eq!(state.owned_blocks(slot), original.owned_blocks(slot));
    }
    let counters = |state: &RouterState| {
        let users = state.users(None, usize::MAX).into_iter();
        let figures = users.map(|user| (user.name.clone(), user.counter_milli_tokens));
        figures.collect::<Vec<_>>()
    };
    assert_eq!(counters(state), counters(&original));
    let settings = |state: &RouterState| {
        let registry = state.view().registry();
        let (policy, admission) = (registry.policy.clone(), registry.admission.clone());
        (registry.hash_seed, policy, admission)
    };
    assert_eq!(settings(state), settings(&original));
    // Readers on other threads see it through their existing handle.
    assert!(view.blocks.owns(Slot(0), chain(&[1, 1])[1]));
    let audit = state.audit().next().unwrap();
    assert_eq!(audit.action, AuditAction::Restore);
    let subject = format!(
        "restore 5: index {}, digest {:032x}",
        original.applied(),
        original.digest()
    );
    assert_eq!(audit.subject, subject);
    assert_eq!(state.restored_at(RESTORE), Some(state.applied()));
    assert_eq!(state.restored_at(RestoreId(6)), None);
    assert_eq!(state.audit().count(), original.audit().count() + 1);
}

#[test]
fn restore_closes_open_leases_and_requests() {
    let original = measured_sample();
    assert!(original.open_leases() > 0);
    let (mut driver, _) = busy();
    bring_in(&mut driver, &snapshot(&original));
    assert_eq!(driver.state.open_leases(), 0);
    let mut users = driver.state.users(None, usize::MAX).into_iter();
    assert!(users.all(|user| (user.in_flight, user.waiting) == (0, 0)));
    // The current sessions continue: their next commands are new, their last ones repeats.
    let sessions: Vec<_> = driver
        .state
        .sessions()
        .iter()
        .map(|it| it.replica)
        .collect();
    assert_eq!(sessions, [ReplicaId(1), ReplicaId(2)]);
}

#[test]
fn references_from_before_a_restore_name_no_backend() {
    let original = measured_sample();
    let (mut driver, old) = busy();
    bring_in(&mut driver, &snapshot(&original));
    let owned = driver.state.owned_blocks_all();
    // Backends of the backup are in the same slots; no earlier reference names one of them.
    let refs = (0..4).flat_map(|slot| {
        (1..4).map(move |incarnation| BackendRef {
            slot: Slot(slot),
            incarnation: Incarnation(incarnation),
        })
    });
    let known: Vec<_> = driver.state.backends().map(|it| it.handle).collect();
    let mut items: Vec<Item> = refs
        .filter(|it| !known.contains(it))
        .chain([old])
        .map(|backend| Item::Acquire {
            attempt: 5,
            backend,
            tip: None,
            new: chain(&[6, 6, 6]),
        })
        .collect();
    assert!(!known.contains(&old));
    items.push(Item::Materialize {
        attempt: 77,
        new: chain(&[9, 9, 9]),
    });
    items.push(Item::Release {
        attempt: 77,
        outcome: LeaseOutcome::Discarded,
    });
    let sent = items.len();
    match driver.apply(2, common::batch(items)) {
        Reply::Batch(batch) => assert_eq!(batch.dropped as usize, sent),
        other => panic!("{other:?}"),
    }
    assert_eq!(driver.state.owned_blocks_all(), owned);
    assert_eq!(driver.state.check(), Ok(()));
}

#[test]
fn restore_keeps_event_state_in_degraded_mode() {
    let original = measured_sample();
    let followed = original.backends().next().unwrap();
    let before = original.kv_status(followed.handle.slot).unwrap();
    let mut driver = Driver::new();
    bring_in(&mut driver, &snapshot(&original));
    let after = driver.state.kv_status(followed.handle.slot).unwrap();
    assert_eq!(after.reported_blocks, before.reported_blocks);
    assert_eq!(after.condition.mode, KvMode::Degraded);
    let handover = Some(KvReason::Doubt(KvUncertainty::Handover));
    assert_eq!(after.condition.reason, handover);
    assert!(driver.state.backends().any(|it| it.handle == after.backend));
}

#[test]
fn restore_parts_may_arrive_in_any_order_and_twice() {
    let backup = snapshot(&large());
    let parts = parts(&backup);
    assert!(parts.len() > 2, "{}", backup.len());
    let in_order = |order: &mut dyn Iterator<Item = &Command>| {
        let mut driver = Driver::new();
        driver.apply(1, begin(false));
        for part in order {
            assert_eq!(driver.apply(1, part.clone()), Reply::Applied);
        }
        assert_eq!(driver.apply(1, finish(&backup)), Reply::Applied);
        assert_eq!(driver.state.check(), Ok(()));
        let state = driver.state;
        (state.owned_blocks_all(), state.registry_handles())
    };
    let straight = in_order(&mut parts.iter());
    assert_eq!(straight.0, 80_000);
    assert_eq!(in_order(&mut parts.iter().rev()), straight);
    assert_eq!(
        in_order(&mut parts.iter().chain(&parts[..1])),
        straight,
        "twice"
    );
}

/// The handles of the registered backends, which depend on how often an incarnation started.
trait Handles {
    fn registry_handles(&self) -> Vec<BackendRef>;
}

impl Handles for RouterState {
    fn registry_handles(&self) -> Vec<BackendRef> {
        self.backends().map(|it| it.handle).collect()
    }
}

#[test]
fn an_incomplete_restore_changes_nothing() {
    let backup = snapshot(&large());
    let parts = parts(&backup);
    let mut driver = Driver::new();
    driver.apply(1, begin(false));
    driver.apply(1, parts[0].clone());
    driver.apply(1, parts[2].clone());
    let (field, expected) = refused(driver.apply(1, finish(&backup)));
    assert_eq!(field, "parts");
    assert!(
        expected.starts_with("part 1 of 524288 bytes, 0 are"),
        "{expected}"
    );
    assert_eq!(driver.state.backends().count(), 0);
    // It can continue from there.
    driver.apply(1, parts[1].clone());
    let (field, _) = refused(driver.apply(1, finish(&backup[..backup.len() - 1])));
    assert_eq!(field, "parts");
    let (field, _) = refused(driver.apply(1, finish(&[])));
    assert_eq!(field, "bytes");
    let (field, _) = refused(driver.apply(
        1,
        Command::FinishRestore {
            restore: RESTORE,
            bytes: u64::MAX,
        },
    ));
    assert_eq!(field, "parts");
    assert_eq!(driver.apply(1, finish(&backup)), Reply::Applied);
}

#[test]
fn a_damaged_backup_changes_nothing() {
    let good = snapshot(&large());
    for place in [0, 8, 60, good.len() / 2, good.len() - 1] {
        let mut backup = good.clone();
        backup[place] ^= 1;
        let (mut driver, _) = busy();
        let users = driver.state.users(None, usize::MAX);
        driver.apply(1, begin(true));
        for part in parts(&backup) {
            assert_eq!(driver.apply(1, part), Reply::Applied);
        }
        let (field, expected) = refused(driver.apply(1, finish(&backup)));
        assert_eq!(field, "backup");
        assert!(
            expected.starts_with("a whole one: corrupt snapshot at byte"),
            "{expected}"
        );
        assert_eq!(driver.state.users(None, usize::MAX), users);
        assert_eq!(driver.state.owned_blocks_all(), 2);
        assert_eq!(driver.state.restoring(), None);
        assert_eq!(driver.state.check(), Ok(()));
    }
    let of_nobody = snapshot(&RouterState::new());
    let mut driver = Driver::new();
    driver.apply(1, begin(true));
    driver.apply(1, parts(&of_nobody).remove(0));
    let (_, expected) = refused(driver.apply(1, finish(&of_nobody)));
    assert_eq!(expected, "a whole one: it is of no cluster");
}

#[test]
fn restore_into_a_non_empty_cluster_requires_force() {
    let (mut driver, _) = busy();
    let (field, expected) = refused(driver.apply(1, begin(false)));
    assert_eq!(field, "force");
    assert_eq!(
        expected,
        "set: the cluster is not empty, 1 users and 2 blocks would be gone"
    );
    assert_eq!(driver.state.restoring(), None);
    assert_eq!(driver.apply(1, begin(true)), Reply::Applied);
    // What the config of a new cluster creates does not count.
    let mut driver = Driver::new();
    driver.apply(1, Command::PutBackend(spec("x", 9, None)));
    assert_eq!(driver.apply(1, begin(false)), Reply::Applied);
}

#[test]
fn a_second_concurrent_restore_is_refused() {
    let backup = snapshot(&large());
    let mut driver = Driver::new();
    driver.apply(1, begin(false));
    assert_eq!(driver.apply(1, begin(false)), Reply::Applied, "a repeat");
    driver.apply(1, parts(&backup).remove(0));
    let other = RestoreId(6);
    let begin_other = Command::BeginRestore {
        restore: other,
        force: true,
    };
    let (field, expected) = refused(driver.apply(2, begin_other.clone()));
    assert_eq!(field, "restore");
    assert_eq!(
        expected,
        "no other one: 5 is under way, 524288 bytes are there"
    );
    let part = Command::RestorePart {
        restore: other,
        number: 1,
        bytes: vec![1],
    };
    assert_eq!(refused(driver.apply(2, part)).0, "restore");
    let abort_other = Command::AbortRestore { restore: other };
    assert_eq!(driver.apply(2, abort_other), Reply::Applied);
    assert!(driver.state.restoring().is_some());

    let abort = Command::AbortRestore { restore: RESTORE };
    driver.apply(1, abort);
    assert_eq!(driver.state.restoring(), None);
    assert_eq!(refused(driver.apply(1, finish(&backup))).0, "restore");
    assert_eq!(driver.apply(2, begin_other), Reply::Applied);
}

#[test]
fn an_idle_restore_expires() {
    let mut driver = Driver::new();
    driver.apply(1, begin(false));
    let now_ms = driver.state.now_ms();
    let mut pass = |at_ms: u64| {
        let index = LogIndex(driver.state.applied().0 + 1);
        let mut envelope = common::envelope(
            3,
            1,
            state::command::Lane::Outbox,
            index.0,
            common::batch(vec![]),
        );
        envelope.proposed_at_ms = at_ms;
        driver.state.apply(index, envelope);
        driver.state.restoring().is_some()
    };
    assert!(pass(now_ms + RESTORE_IDLE_MS_MAX));
    assert!(!pass(now_ms + RESTORE_IDLE_MS_MAX + 1));
}

#[test]
fn parts_out_of_bounds_are_refused() {
    let mut driver = Driver::new();
    driver.apply(1, begin(false));
    let mut part = |number: u32, length: usize| {
        let bytes = vec![7; length];
        let restore = RESTORE;
        let command = Command::RestorePart {
            restore,
            number,
            bytes,
        };
        driver.apply(1, command)
    };
    let last = (RESTORE_BYTES_MAX / RESTORE_PART_BYTES as u64) as u32 - 1;
    assert_eq!(part(last, 1), Reply::Applied);
    assert_eq!(refused(part(last + 1, 1)).0, "number");
    assert_eq!(refused(part(0, 0)).0, "bytes");
    assert_eq!(refused(part(0, RESTORE_PART_BYTES + 1)).0, "bytes");
    assert_eq!(part(0, 4), Reply::Applied);
    assert_eq!(
        refused(part(0, 5)).1,
        "what came as part 0 before",
        "another one"
    );
}

#[test]
fn a_replica_joining_mid_restore_converges() {
    let backup = snapshot(&large());
    let parts = parts(&backup);
    let mut driver = Driver::new();
    driver.apply(1, begin(false));
    driver.apply(1, parts[0].clone());
    let bytes = snapshot(&driver.state);
    let mut late = Driver::over(restored(&bytes), &driver);
    assert_eq!(late.state.digest(), driver.state.digest());
    assert_eq!(snapshot(&late.state), bytes);
    for command in parts[1..].iter().chain([&finish(&backup)]) {
        assert_eq!(driver.apply(1, command.clone()), Reply::Applied);
        // One replica reads ahead; once, what it read belongs to another restore.
        if let Some(staged) = late.state.staged_backup(command) {
            late.state.prepare(staged.read());
        }
        assert_eq!(late.apply(1, command.clone()), Reply::Applied);
        assert_eq!(late.state.digest(), driver.state.digest());
    }
    assert_eq!(snapshot(&late.state), snapshot(&driver.state));
}

#[test]
fn a_staged_backup_of_other_parts_is_not_used() {
    let (small, large) = (snapshot(&measured_sample()), snapshot(&large()));
    let mut other = Driver::new();
    other.apply(1, begin(false));
    other.apply(1, parts(&small).remove(0));
    let staged = other.state.staged_backup(&finish(&small)).unwrap();

    let mut driver = Driver::new();
    driver.apply(1, begin(false));
    for part in parts(&large) {
        driver.apply(1, part);
    }
    assert!(driver.state.staged_backup(&finish(&small)).is_none());
    driver.state.prepare(staged.read());
    assert_eq!(driver.apply(1, finish(&large)), Reply::Applied);
    assert_eq!(driver.state.owned_blocks_all(), 80_000);
}

#[test]
fn a_backup_of_a_restored_cluster_can_be_restored() {
    let (mut driver, _) = busy();
    let backup = snapshot(&driver.state);
    bring_in(&mut driver, &backup);
    let again = snapshot(&driver.state);
    let mut other = Driver::new();
    bring_in(&mut other, &again);
    assert_eq!(other.state.owned_blocks_all(), 2);
    assert_eq!(other.state.sessions()[0].session, SessionId(1));
}

/// Whether the key with this number is served.
fn is_served(state: &RouterState, number: u8) -> bool {
    let secret = common::key_spec(number).secret;
    let found = state.view().keys().find(&secret, 1);
    matches!(found, FoundKey::Live(_))
}

#[test]
fn a_key_revoked_after_the_backup_stays_revoked() {
    let mut driver = Driver::founded(common::init());
    for number in 1..=3 {
        let spec = common::key_spec(number);
        driver.apply(1, Command::CreateKey(Box::new(spec)));
    }
    let backup = snapshot(&driver.state);
    let id = common::key_spec(1).id;
    assert_eq!(driver.apply(1, Command::RevokeKey { id }), Reply::Applied);
    let rotate = Command::RotateKey {
        id: common::key_spec(2).id,
        secret: SecretHash([77; 32]),
        grace_ms: 0,
    };
    assert_eq!(driver.apply(1, rotate), Reply::Applied);
    let begin = Command::BeginRestore {
        restore: RESTORE,
        force: true,
    };
    assert_eq!(driver.apply(1, begin), Reply::Applied);
    // A member that joins during the restore has the same state.
    assert_eq!(
        restored(&snapshot(&driver.state)).digest(),
        driver.state.digest()
    );
    for part in parts(&backup) {
        driver.apply(1, part);
    }
    assert_eq!(driver.apply(1, finish(&backup)), Reply::Applied);
    assert_eq!(driver.state.check(), Ok(()));
    let served = [1, 2, 3].map(|number| is_served(&driver.state, number));
    assert_eq!(served, [false, false, true]);
    assert_eq!(driver.state.api_keys_len(), 2);
}
