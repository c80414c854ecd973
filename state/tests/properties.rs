//! Any sequence of commands: replicas agree, also through a snapshot, and no invariant breaks.

mod common;

use std::collections::BTreeMap;

use common::{block, chain, envelope, restored, snapshot, spec};
use proptest::prelude::*;
use state::RouterState;
use state::codec;
use state::command::{
    BackendSpec, Charge, Command, EngineFacts, Envelope, Item, Lane, Outcome, Reply, UserSpec,
};
use state::ids::{
    AttemptId, BackendRef, Incarnation, LogIndex, ReplicaId, SessionId, Slot, UserKey,
};
use state::policy::PolicyConfig;
use state::prefix::user_key;

/// One log entry, or a replica that is rebuilt from a snapshot.
#[derive(Debug, Clone)]
enum Step {
    Apply {
        replica: u8,
        session: u64,
        lane: Lane,
        is_repeat: bool,
        command: Command,
    },
    Skip,
    Rebuild,
}

fn path() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(0_u8..3, 0..6)
}

fn backend() -> impl Strategy<Value = BackendRef> {
    (0_u16..3, 1_u32..5).prop_map(|(slot, incarnation)| BackendRef {
        slot: Slot(slot),
        incarnation: Incarnation(incarnation),
    })
}

fn user() -> impl Strategy<Value = (UserKey, String)> {
    (0_u8..5).prop_map(|number| {
        let name = format!("user-{number}");
        (user_key(common::HASH_SEED, &name), name)
    })
}

fn count() -> impl Strategy<Value = u64> {
    prop_oneof![9 => 0_u64..1000, 1 => Just(u64::MAX)]
}

fn item() -> impl Strategy<Value = Item> {
    let attempt = || 0_u32..12;
    let acquire = (attempt(), backend(), path(), 0_usize..6).prop_map(
        |(attempt, backend, path, tip_length)| {
            let mut new = chain(&path);
            let tip_length = tip_length.min(new.len());
            let tip = tip_length.checked_sub(1).map(|place| new[place]);
            new.drain(..tip_length);
            Item::Acquire {
                attempt,
                backend,
                tip,
                new,
            }
        },
    );
    // Chains that are none: repeated and unrelated blocks.
    let forged = (attempt(), backend(), prop::collection::vec(path(), 0..5)).prop_map(
        |(attempt, backend, paths)| {
            let new = paths.iter().map(|path| block(path)).collect();
            Item::Acquire {
                attempt,
                backend,
                tip: None,
                new,
            }
        },
    );
    let materialize = (attempt(), path()).prop_map(|(attempt, path)| Item::Materialize {
        attempt,
        new: chain(&path),
    });
    let outcome = prop_oneof![Just(Outcome::Kept), Just(Outcome::Discarded)];
    let release =
        (attempt(), outcome).prop_map(|(attempt, outcome)| Item::Release { attempt, outcome });
    let charge = (user(), count(), count(), count(), 0_u32..3, 0_u32..3).prop_map(
        |((user, _), input_uncached, input_cached, output, started, ended)| {
            Item::Charge(Charge {
                user,
                input_uncached,
                input_cached,
                output,
                started,
                ended,
            })
        },
    );
    let define = (user(), user())
        .prop_map(|((key, own), (_, other))| {
            [
                Item::DefineUser { key, name: own },
                Item::DefineUser { key, name: other },
            ]
        })
        .prop_flat_map(|names| (0_usize..2).prop_map(move |which| names[which].clone()));
    let observe = (
        backend(),
        prop::option::of(0_u32..12),
        prop::option::of(1_u64..5),
    )
        .prop_map(|(backend, capacity_blocks, started_at_s)| {
            let facts = EngineFacts {
                models: None,
                capacity_blocks,
                started_at_s,
            };
            Item::ObserveEngine { backend, facts }
        });
    prop_oneof![
        8 => acquire, 1 => forged, 4 => materialize, 6 => release, 4 => charge, 1 => define,
        1 => observe,
    ]
}

fn command() -> impl Strategy<Value = Command> {
    let batch =
        (0_u64..4, prop::collection::vec(item(), 0..8)).prop_map(|(base, items)| Command::Batch {
            base_attempt: AttemptId(base),
            items,
        });
    let put = (0_u8..4, 1_u16..3, prop::option::of(0_u32..12)).prop_map(
        |(backend, port, capacity)| -> BackendSpec { spec(&backend.to_string(), port, capacity) },
    );
    let name = || (0_u8..4).prop_map(|backend| backend.to_string());
    let expire = (1_u8..4, 1_u64..4).prop_map(|(replica, session)| Command::ExpireSession {
        replica: ReplicaId(replica),
        session: SessionId(session),
    });
    prop_oneof![
        30 => batch,
        4 => put.prop_map(Command::PutBackend),
        1 => name().prop_map(|name| Command::DeleteBackend { name }),
        1 => (name(), any::<bool>())
            .prop_map(|(name, draining)| Command::SetDraining { name, draining }),
        1 => (user(), 0_u32..3000).prop_map(|((_, name), weight_milli)| {
            Command::PutUser(UserSpec { name, weight_milli })
        }),
        1 => Just(Command::PutPolicy(PolicyConfig::LeastRequest)),
        1 => expire,
        1 => Just(common::init()),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let lane = prop_oneof![Just(Lane::Outbox), Just(Lane::Admin)];
    let session = prop_oneof![20 => Just(1_u64), 1 => 1_u64..4];
    let apply = (1_u8..4, session, lane, prop::bool::weighted(0.1), command()).prop_map(
        |(replica, session, lane, is_repeat, command)| Step::Apply {
            replica,
            session,
            lane,
            is_repeat,
            command,
        },
    );
    prop_oneof![30 => apply, 1 => Just(Step::Skip), 1 => Just(Step::Rebuild)]
}

/// Two replicas of one log; one of them is rebuilt now and then.
struct Pair {
    steady: RouterState,
    rebuilt: RouterState,
    /// Last of each sequence, to be able to repeat it.
    sent: BTreeMap<(u8, u64, u8), Envelope>,
    counters: BTreeMap<UserKey, u64>,
}

impl Pair {
    fn new() -> Self {
        let (sent, counters) = (BTreeMap::new(), BTreeMap::new());
        let mut pair = Self {
            steady: RouterState::new(),
            rebuilt: RouterState::new(),
            sent,
            counters,
        };
        pair.apply(&envelope(1, 1, Lane::Admin, 1, common::init()));
        pair.apply(&envelope(
            1,
            1,
            Lane::Admin,
            2,
            Command::PutBackend(spec("0", 1, Some(8))),
        ));
        pair
    }

    fn apply(&mut self, envelope: &Envelope) -> Reply {
        let index = LogIndex(self.steady.applied().0 + 1);
        // One of them gets it as the log carries it.
        let bytes = codec::encode_envelope(envelope);
        let decoded = codec::decode_envelope(&bytes).expect("what was encoded can be decoded");
        let reply = self.steady.apply(index, envelope.clone());
        assert_eq!(self.rebuilt.apply(index, decoded), reply, "replicas differ");
        let encoded = codec::encode_reply(&reply);
        assert_eq!(
            codec::decode_reply(&encoded).expect("an own reply can be decoded"),
            reply
        );
        reply
    }

    fn run(&mut self, step: Step) {
        match step {
            Step::Apply {
                replica,
                session,
                lane,
                is_repeat,
                command,
            } => {
                let key = (replica, session, lane as u8);
                let last = self.sent.get(&key).cloned();
                let digest = self.steady.digest();
                match last.filter(|_| is_repeat) {
                    Some(last) => {
                        let reply = self.apply(&last);
                        assert!(
                            matches!(reply, Reply::Repeated(_) | Reply::Rejected(_)),
                            "{reply:?}"
                        );
                        assert_eq!(self.steady.digest(), digest, "a repeat changed something");
                    }
                    None => {
                        let seq = self.sent.get(&key).map_or(2, |last| last.origin.seq) + 1;
                        let envelope = envelope(replica, session, lane, seq, command);
                        self.apply(&envelope);
                        self.sent.insert(key, envelope);
                    }
                }
            }
            Step::Skip => {
                let index = LogIndex(self.steady.applied().0 + 1);
                self.steady.skip(index);
                self.rebuilt.skip(index);
            }
            Step::Rebuild => self.rebuilt = restored(&snapshot(&self.steady)),
        }
        assert_eq!(
            self.steady.digest(),
            self.rebuilt.digest(),
            "digests differ"
        );
        assert_eq!(self.steady.check(), Ok(()));
        assert_eq!(self.rebuilt.check(), Ok(()));
        self.counters_never_fall();
    }

    fn counters_never_fall(&mut self) {
        for user in self.steady.users(None, usize::MAX) {
            let counter = user.counter_milli_tokens;
            let before = self.counters.insert(user.key, counter).unwrap_or(0);
            assert!(
                counter >= before,
                "I4: the counter of {user:?} was {before}"
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn replicas_agree_and_invariants_hold(steps in prop::collection::vec(step(), 1..80)) {
        let mut pair = Pair::new();
        for step in steps {
            pair.run(step);
        }
    }

    #[test]
    fn two_histories_that_differ_have_different_digests(
        items in prop::collection::vec(item(), 1..6),
    ) {
        let charge = Charge { user: UserKey(7), output: 1, started: 1, ..Charge::default() };
        let other = [&items[..], &[Item::Charge(charge)]].concat();
        let digest = |items: Vec<Item>| {
            let mut driver = common::Driver::new();
            driver.apply(1, Command::PutBackend(spec("0", 1, None)));
            driver.apply(1, common::batch(items));
            driver.state.digest()
        };
        prop_assert_ne!(digest(items), digest(other));
    }
}
