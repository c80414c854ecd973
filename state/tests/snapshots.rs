//! Snapshots: what was frozen is restored, and a damaged one is rejected without any change.

use std::collections::BTreeSet;

use crate::common::{self, Driver, chain, restored, sample, snapshot, spec};
use proptest::prelude::*;
use state::RouterState;
use state::budgets::{Budget, BudgetPeriod};
use state::caches::CacheScope;
use state::command::{BackendSpec, Charge, Command, Item, Lane, Reply, UserDefaults, UserSettings};
use state::discovery::{Discovery, DiscoveryChange};
use state::ids::{
    AgentSessionKey, ApiKeyId, BackendRef, Incarnation, LogIndex, ModelKey, RestoreId, Slot,
    StreamCarrier, StreamId,
};
use state::keys::{FoundKey, SecretHash};
use state::prefix::user_key;
use state::ratios::TextSample;
use state::streams::{CarriedStream, StreamCharge};
use state::trees::NewSession;
use state::usage::UsageSource;

#[test]
fn a_restored_state_is_equal_and_continues_equally() {
    let mut original = common::measured_sample();
    let bytes = snapshot(&original);
    let mut copy = restored(&bytes);
    assert_eq!(
        (copy.digest(), copy.applied()),
        (original.digest(), original.applied())
    );
    assert_eq!(copy.check(), Ok(()));
    assert_eq!(snapshot(&copy), bytes);
    for (number, state) in [&mut original, &mut copy].into_iter().enumerate() {
        let index = LogIndex(state.applied().0 + 1);
        let release = Item::Release {
            attempt: 1,
            outcome: state::command::LeaseOutcome::Kept,
        };
        let command = common::batch(vec![release]);
        state.apply(
            index,
            common::envelope(2, 1, state::command::Lane::Admin, 99, command),
        );
        assert_eq!(state.open_leases(), 1, "state {number}");
    }
    assert_eq!(copy.digest(), original.digest());
}

#[test]
fn a_frozen_snapshot_ignores_later_commands() {
    let mut driver = Driver::new();
    driver.apply(1, Command::PutBackend(spec("a", 1, None)));
    let backend = driver.state.backend("a").unwrap().handle;
    let digest = driver.state.digest();
    let frozen = driver.state.freeze();
    for attempt in 0..200_u8 {
        let charge = Charge {
            user: state::ids::UserKey(u64::from(attempt) << 50),
            started: 1,
            ..Charge::default()
        };
        let new = chain(&[attempt, 1, 2]);
        let acquire = Item::Acquire {
            attempt: u32::from(attempt),
            backend,
            tip: None,
            new,
        };
        driver.apply(1, common::batch(vec![acquire, Item::Charge(charge)]));
    }
    let mut bytes = Vec::new();
    frozen.write_to(&mut bytes).unwrap();
    assert_eq!(
        (frozen.digest(), restored(&bytes).digest()),
        (digest, digest)
    );
    assert_ne!(driver.state.digest(), digest);
}

#[test]
fn readers_keep_their_handle_through_a_restore() {
    let original = sample();
    let mut state = RouterState::new();
    let view = state.view();
    state.restore(&mut &*snapshot(&original)).unwrap();
    assert_eq!(view.applied(), original.applied());
    assert_eq!(*view.registry(), *original.view().registry());
    assert!(view.blocks.owns(Slot(0), chain(&[1, 2, 3])[2]));
}

/// A non-empty state that no snapshot below may change.
struct Victim {
    state: RouterState,
    digest: u128,
}

impl Victim {
    fn new() -> Self {
        let mut driver = Driver::new();
        driver.apply(1, Command::PutBackend(spec("kept", 9, None)));
        let backend = driver.state.backend("kept").expect("just put").handle;
        let new = chain(&[9, 9]);
        let acquire = Item::Acquire {
            attempt: 1,
            backend,
            tip: None,
            new,
        };
        driver.apply(1, common::batch(vec![acquire]));
        let digest = driver.state.digest();
        Self {
            state: driver.state,
            digest,
        }
    }

    /// Expects `bytes` to be rejected and the state to be unchanged. Returns the error.
    #[track_caller]
    fn refuses(&mut self, bytes: &[u8], what: &str) -> String {
        let Err(fault) = self.state.restore(&mut &*bytes) else {
            panic!("{what} was taken")
        };
        assert!(fault.offset <= bytes.len() as u64, "{what}: {fault}");
        assert_eq!(self.state.digest(), self.digest, "{what}");
        assert!(
            self.state.view().blocks.owns(Slot(0), chain(&[9, 9])[1]),
            "{what}"
        );
        fault.to_string()
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert_eq!(self.state.check(), Ok(()));
        }
    }
}

#[test]
fn a_truncated_snapshot_is_refused() {
    let bytes = snapshot(&sample());
    let mut victim = Victim::new();
    for length in 0..bytes.len() {
        victim.refuses(&bytes[..length], &format!("the first {length} bytes"));
    }
    victim.refuses(&[&bytes[..], &[0]].concat(), "a trailing byte");
}

#[test]
fn snapshot_errors_name_their_position() {
    let bytes = snapshot(&sample());
    let mut victim = Victim::new();
    let mut damaged = |place: usize, byte: u8| {
        let mut damaged = bytes.clone();
        damaged[place] ^= byte;
        victim.refuses(&damaged, &format!("byte {place}"))
    };
    let faults = [
        damaged(0, 1),
        damaged(8, 2),
        damaged(12, 1),
        damaged(42, 64),
        damaged(46, 0xff),
        damaged(60, 1),
    ];
    expect_test::expect![[r#"
        corrupt snapshot at byte 0: this is not a snapshot of a router's state
        corrupt snapshot at byte 8: format version 3, 1 expected
        corrupt snapshot at byte 34: the header's checksum does not match
        corrupt snapshot at byte 42: the section's checksum does not match
        corrupt snapshot at byte 42: section of 4278190292 bytes, 268435456 at most
        corrupt snapshot at byte 42: the section's checksum does not match"#]]
    .assert_eq(&faults.join("\n"));
}

/// Returns a state that has something in every section of a snapshot.
fn full_sample() -> RouterState {
    let mut state = common::measured_sample();
    let [first, second] = [1, 2].map(common::key_spec);
    let (revoked, rotated) = (first.id, second.id);
    let text = TextSample {
        model: ModelKey(9),
        bytes: 30_000,
        tokens: 10_000,
    };
    let discovery = Discovery {
        source: "pods".to_owned(),
        change: DiscoveryChange::Found(spec("d", 4, None)),
    };
    let restore = RestoreId(5);
    let commands = [
        Command::PutUserDefaults(Box::new(UserDefaults {
            weight_milli: 500,
            ..UserDefaults::default()
        })),
        Command::configure_user(
            "ada",
            UserSettings {
                models: vec!["m*".to_owned()],
                cache: Some(CacheScope::Own),
                ..UserSettings::default()
            },
        ),
        common::batch(vec![Item::ObserveText(text)]),
        Command::CreateKey(Box::new(first)),
        Command::CreateKey(Box::new(second)),
        Command::RevokeKey { id: revoked },
        Command::RotateKey {
            id: rotated,
            secret: SecretHash([8; 32]),
            grace_ms: 3_600_000,
        },
        Command::Discover(Box::new(discovery)),
        Command::BeginRestore {
            restore,
            force: true,
        },
        Command::RestorePart {
            restore,
            number: 1,
            bytes: vec![1, 2, 3],
        },
        common::batch(vec![begin_session(0, 0)]),
        common::batch(source_and_stream()),
        common::batch(vec![common::demand("m", 3, 40)]),
        // More sessions than one command ends.
        common::batch((1..260).map(|key| begin_session(key, 1)).collect()),
        Command::EndTree {
            root: AgentSessionKey(1),
        },
    ];
    for (command, seq) in commands.into_iter().zip(6000..) {
        let index = LogIndex(state.applied().0 + 1);
        let envelope = common::envelope(1, 1, Lane::Admin, seq, command);
        let reply = state.apply(index, envelope);
        assert!(!matches!(reply, Reply::Rejected(_)), "{reply:?}");
    }
    assert_eq!(state.check(), Ok(()));
    state
}

/// Returns the name of a source, and the charge of a resumable stream.
fn source_and_stream() -> Vec<Item> {
    let carried = CarriedStream {
        stream: StreamId(5),
        carrier: StreamCarrier(6),
    };
    let user = user_key(common::HASH_SEED, "ada");
    vec![
        Item::DefineSource(UsageSource {
            key: Some(ApiKeyId(7)),
            model: "m".to_owned(),
        }),
        Item::ChargeStream(Box::new(StreamCharge::empty(user, carried))),
    ]
}

fn begin_session(key: u64, root: u64) -> Item {
    Item::BeginSession(NewSession {
        key: AgentSessionKey(key),
        parent: Some(AgentSessionKey(root)),
        user: user_key(common::HASH_SEED, "ada"),
        model: ModelKey(9),
        home: BackendRef {
            slot: Slot(0),
            incarnation: Incarnation(1),
        },
    })
}

/// Returns the tags of the sections of a snapshot, from its first one on.
fn tags(snapshot: &[u8]) -> BTreeSet<u8> {
    const HEADER_BYTES: usize = 42;
    const END: u8 = 255;
    let (mut rest, mut tags) = (&snapshot[HEADER_BYTES..], BTreeSet::new());
    loop {
        let tag = rest[0];
        if tag == END {
            return tags;
        }
        tags.insert(tag);
        let payload = u32::from_le_bytes(rest[1..5].try_into().unwrap());
        rest = &rest[5 + payload as usize + 8..];
    }
}

#[test]
fn the_sample_has_every_section() {
    const LAST: u8 = 29;
    assert_eq!(tags(&snapshot(&full_sample())), (1..=LAST).collect());
}

#[test]
fn a_snapshot_has_its_golden_bytes() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/snapshot.bin");
    let written = snapshot(&full_sample());
    if std::env::var_os("UPDATE_EXPECT").is_some() {
        std::fs::write(path, &written).unwrap();
    }
    let golden = std::fs::read(path).unwrap();
    assert_eq!(restored(&golden).digest(), full_sample().digest());
    assert_eq!(golden, written);
}

#[test]
fn a_snapshot_round_trips_with_its_secret() {
    let mut driver = Driver::founded(common::init());
    driver.apply(1, Command::PutBackend(spec("a", 1, None)));
    let bytes = snapshot(&driver.state);
    let copy = restored(&bytes);
    assert_eq!(copy.digest(), driver.state.digest());
    let registry = copy.view().registry();
    assert_eq!(registry.hash_secret, common::secret());
    assert_eq!(snapshot(&copy), bytes);
    let shown = format!("{:?} {:?}", common::init(), registry);
    assert!(shown.contains("HashSecret(..)"), "{shown}");
}

#[test]
fn every_flipped_byte_is_detected() {
    let bytes = snapshot(&sample());
    let mut victim = Victim::new();
    for place in 0..bytes.len() {
        let mut damaged = bytes.clone();
        // A different bit each time, because the relevant bits differ between fields.
        damaged[place] ^= 1 << (place % 8);
        victim.refuses(&damaged, &format!("byte {place} flipped"));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn foreign_bytes_are_refused(
        streams in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 8),
    ) {
        let mut victim = Victim::new();
        let header = snapshot(&victim.state)[..42].to_vec();
        for bytes in streams {
            victim.refuses(&bytes, "foreign bytes");
            victim.refuses(&[&header[..], &bytes[..]].concat(), "foreign bytes after a header");
        }
    }
}

#[test]
fn learned_bytes_per_token_survive_in_a_snapshot() {
    let mut driver = Driver::new();
    let model = ModelKey(9);
    let sample = TextSample {
        model,
        bytes: 30_000,
        tokens: 10_000,
    };
    driver.apply(1, common::batch(vec![Item::ObserveText(sample)]));
    assert_eq!(driver.state.view().ratio(model).milli_bytes(), 3093);
    let bytes = snapshot(&driver.state);
    let copy = restored(&bytes);
    assert_eq!(copy.digest(), driver.state.digest());
    assert_eq!(copy.view().ratio(model).milli_bytes(), 3093);
}

#[test]
fn api_keys_survive_a_snapshot() {
    let mut driver = Driver::founded(common::init());
    let before = driver.state.digest();
    let spec = common::key_spec(7);
    let (id, first) = (spec.id, spec.secret);
    driver.apply(1, Command::CreateKey(Box::new(spec)));
    let secret = SecretHash([8; 32]);
    let grace_ms = 3_600_000;
    driver.apply(
        1,
        Command::RotateKey {
            id,
            secret,
            grace_ms,
        },
    );
    let bytes = snapshot(&driver.state);
    let copy = restored(&bytes);
    assert_eq!(copy.digest(), driver.state.digest());
    assert_ne!(copy.digest(), before);
    assert_eq!(copy.check(), Ok(()));
    assert_eq!(snapshot(&copy), bytes);
    for secret in [first, secret] {
        let found = copy.view().keys().find(&secret, 1);
        assert!(matches!(found, FoundKey::Live(key) if key.spec.id == id));
    }
}

#[test]
fn revoked_api_keys_survive_a_snapshot() {
    let mut driver = Driver::founded(common::init());
    let spec = common::key_spec(7);
    let id = spec.id;
    driver.apply(1, Command::CreateKey(Box::new(spec)));
    let before = driver.state.digest();
    driver.apply(1, Command::RevokeKey { id });
    let bytes = snapshot(&driver.state);
    let copy = restored(&bytes);
    assert_eq!(copy.digest(), driver.state.digest());
    assert_ne!(copy.digest(), before);
    assert_eq!(copy.check(), Ok(()));
    assert_eq!(snapshot(&copy), bytes);
    assert_eq!((copy.api_keys_len(), copy.revoked_api_keys_len()), (0, 1));
}

#[test]
fn settings_of_users_survive_a_snapshot() {
    let mut driver = Driver::founded(common::init());
    let team = CacheScope::Group("team".to_owned());
    let settings = UserSettings {
        budget: Some(Budget {
            day: Some(1000),
            month: None,
        }),
        models: vec!["m*".to_owned()],
        cache: Some(team.clone()),
        ..UserSettings::default()
    };
    let configure = Command::configure_user("ada", settings.clone());
    assert_eq!(driver.apply(1, configure), Reply::Applied);
    let defaults = UserDefaults {
        weight_milli: 2000,
        cache: CacheScope::Own,
        ..UserDefaults::default()
    };
    driver.apply(1, Command::PutUserDefaults(Box::new(defaults)));
    let key = |name| user_key(common::HASH_SEED, name);
    let charge = Charge {
        user: key("ada"),
        input_cached: 30,
        output: 4,
        ..Charge::default()
    };
    driver.apply(1, common::batch(vec![Item::Charge(charge)]));
    let bytes = snapshot(&driver.state);
    let copy = restored(&bytes);
    assert_eq!(copy.digest(), driver.state.digest());
    assert_eq!(copy.check(), Ok(()));
    assert_eq!(snapshot(&copy), bytes);
    let user = copy.user_named("ada").unwrap();
    let left = user.budget.left(BudgetPeriod::Day, 1, 0).unwrap();
    assert_eq!((left.limit, left.used), (1000, 34));
    assert_eq!((user.own, user.weight_milli), (settings, 2000));
    let users = copy.view().users();
    assert_eq!(users.scope(key("ada")), &team);
    assert_eq!(users.scope(key("bob")), &CacheScope::Own);
    // A deleted user loses its settings.
    let name = "ada".to_owned();
    driver.apply(1, Command::DeleteUser { name });
    let users = driver.state.view().users();
    assert_eq!(users.scope(key("ada")), &CacheScope::Own);
    assert_eq!(driver.state.check(), Ok(()));
}

#[test]
fn roles_of_backends_survive_a_snapshot() {
    let mut driver = Driver::new();
    let role = state::command::BackendRole::Prefill;
    let with_role = |role| BackendSpec {
        role,
        ..spec("p", 9, None)
    };
    driver.apply(1, Command::PutBackend(with_role(role)));
    let again = restored(&snapshot(&driver.state));
    assert_eq!(again.digest(), driver.state.digest());
    assert_eq!(again.backend("p").unwrap().spec.role, role);
}
