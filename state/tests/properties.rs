//! Any sequence of commands: replicas agree, even across a snapshot, and no invariant breaks.

use std::collections::BTreeMap;

use crate::commands::{Step, item, step};
use crate::common::{self, envelope, restored, snapshot, spec};
use proptest::prelude::*;
use state::RouterState;
use state::caches::CacheScope;
use state::codec;
use state::command::{Charge, Command, Envelope, Item, Lane, Rejection, Reply, UserSettings};
use state::ids::{LogIndex, RestoreId, UserKey};
use state::keys::SecretHash;

/// Two replicas of one log, one of which is occasionally rebuilt.
struct Pair {
    steady: RouterState,
    rebuilt: RouterState,
    /// Last command of each sequence, for repeating it.
    sent: BTreeMap<(u8, u64, u8), Envelope>,
    counters: BTreeMap<UserKey, u64>,
    backup: Vec<u8>,
}

impl Pair {
    fn new() -> Self {
        let (sent, counters) = (BTreeMap::new(), BTreeMap::new());
        let mut pair = Self {
            steady: RouterState::new(),
            rebuilt: RouterState::new(),
            sent,
            counters,
            backup: Vec::new(),
        };
        pair.apply(&envelope(1, 1, Lane::Admin, 1, common::init()));
        pair.apply(&envelope(
            1,
            1,
            Lane::Admin,
            2,
            Command::PutBackend(spec("0", 1, Some(8))),
        ));
        pair.backup = snapshot(&pair.steady);
        pair
    }

    /// Applies the next command of replica 1's first session.
    fn apply_next(&mut self, command: Command) -> Reply {
        let key = (1, 1, Lane::Admin as u8);
        let seq = self.sent.get(&key).map_or(2, |last| last.origin.seq) + 1;
        let envelope = envelope(1, 1, Lane::Admin, seq, command);
        let reply = self.apply(&envelope);
        self.sent.insert(key, envelope);
        reply
    }

    /// Restores the backup, unless the requesting session has ended.
    fn restore(&mut self, is_rebuilt: bool) {
        let restore = RestoreId(7);
        let begin = Command::BeginRestore {
            restore,
            force: true,
        };
        if let Reply::Rejected(Rejection::StaleSession { .. }) = self.apply_next(begin) {
            return;
        }
        let part = Command::RestorePart {
            restore,
            number: 0,
            bytes: self.backup.clone(),
        };
        assert_eq!(self.apply_next(part), Reply::Applied);
        let bytes = self.backup.len() as u64;
        let finish = Command::FinishRestore { restore, bytes };
        if is_rebuilt {
            self.rebuilt = restored(&snapshot(&self.steady));
        } else {
            let staged = self.rebuilt.staged_backup(&finish);
            let staged = staged.expect("all of it is there");
            self.rebuilt.prepare(staged.read());
        }
        assert_eq!(self.apply_next(finish), Reply::Applied);
        // The backup now determines the earlier counters.
        self.counters.clear();
    }

    fn apply(&mut self, envelope: &Envelope) -> Reply {
        let index = LogIndex(self.steady.applied().0 + 1);
        // One of them receives the command as encoded in the log.
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
            Step::Backup => self.backup = snapshot(&self.steady),
            Step::Restore { is_rebuilt } => self.restore(is_rebuilt),
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
        let users = self.steady.users(None, usize::MAX);
        // A deleted user returns as a new one.
        self.counters
            .retain(|key, _| users.iter().any(|user| user.key == *key));
        for user in users {
            let counter = user.counter_milli_tokens;
            let before = self.counters.insert(user.key, counter).unwrap_or(0);
            assert!(
                counter >= before,
                "I4: the counter of {user:?} was {before}"
            );
        }
    }
}

/// A write of an API key or a cache scope, valid or not.
fn key_step() -> impl Strategy<Value = Step> {
    let command = (0_u8..7, 0_u8..6, 0_u8..8, 0_u64..3_000).prop_map(|(what, id, secret, ms)| {
        let secret = SecretHash([secret; 32]);
        let mut spec = common::key_spec(id);
        let id = spec.id;
        match what {
            0 | 1 => {
                spec.secret = secret;
                spec.expires_at_ms = (ms > 1_000).then_some(ms);
                Command::CreateKey(Box::new(spec))
            }
            2 => Command::RevokeKey { id },
            3 => Command::RevokeKey { id },
            4 => {
                let cache = match ms % 5 {
                    0 => None,
                    1 => Some(CacheScope::Shared),
                    2 => Some(CacheScope::Group("team".to_owned())),
                    3 => Some(CacheScope::Group(String::new())),
                    _ => Some(CacheScope::Own),
                };
                let settings = UserSettings {
                    cache,
                    ..UserSettings::default()
                };
                Command::configure_user(format!("user-{}", ms % 4), settings)
            }
            5 => Command::DeleteUser {
                name: format!("user-{}", ms % 4),
            },
            _ => Command::RotateKey {
                id,
                secret,
                grace_ms: ms,
            },
        }
    });
    (1_u8..4, command).prop_map(|(replica, command)| Step::Apply {
        replica,
        session: 1,
        lane: Lane::Admin,
        is_repeat: false,
        command,
    })
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
    fn replicas_agree_on_keys_and_scopes_among_other_commands(
        steps in prop::collection::vec(prop_oneof![2 => key_step(), 1 => step()], 1..80),
    ) {
        let mut pair = Pair::new();
        for step in steps {
            pair.run(step);
        }
    }

    #[test]
    fn different_histories_have_different_digests(
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
