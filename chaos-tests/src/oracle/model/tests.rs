//! The naive model against the product, over random logs.

use std::collections::BTreeMap;

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use state::RouterState;
use state::admission::{AdmissionSettings, ChargeInput};
use state::codec::encode_envelope;
use state::command::{
    BackendSpec, Charge, Command, EngineFacts, Envelope, Item, Lane, LeaseOutcome, Origin, UserSpec,
};
use state::grants::Wait;
use state::ids::{
    AttemptId, BackendRef, BlockHash, LogIndex, ModelKey, ReplicaId, SessionId, Ticket,
};
use state::policy::{CostSettings, PolicyConfig};
use state::prefix::user_key;
use state::quotas::UserLimits;
use state::users::FairnessSettings;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::invariants::fixture::run;
use crate::oracle::RunRecord;
use crate::oracle::comparison::StatePart;
use crate::oracle::image::StateImage;
use crate::oracle::register::RegisterKey;

const HASH_SEED: u64 = 5;
const NAMES: [&str; 4] = ["a", "b", "c", "d"];
const USERS: [&str; 4] = ["ann", "bob", "cyd", "dan"];

/// Makes a log as replicas would, late and repeated commands among it.
struct Script {
    rng: StdRng,
    state: RouterState,
    record: RunRecord,
    sessions: BTreeMap<u8, u64>,
    seqs: BTreeMap<(u8, bool), u64>,
    sent: Vec<Envelope>,
    now_ms: u64,
    open: Vec<(u8, u64)>,
    attempts: u64,
}

impl Script {
    fn new(seed: u64) -> Self {
        let mut script = Self {
            rng: StdRng::seed_from_u64(seed),
            state: RouterState::new(),
            record: RunRecord::default(),
            sessions: (1..=3)
                .map(|replica| (replica, u64::from(replica)))
                .collect(),
            seqs: BTreeMap::new(),
            sent: Vec::new(),
            now_ms: 1_000_000,
            open: Vec::new(),
            attempts: 0,
        };
        let command = Command::InitCluster {
            hash_seed: HASH_SEED,
            policy: PolicyConfig::Cost(CostSettings::default()),
            fairness: FairnessSettings::default(),
        };
        script.propose(1, command);
        script
    }

    fn propose(&mut self, replica: u8, command: Command) {
        let is_batch = matches!(command, Command::Batch { .. });
        let seq = self.seqs.entry((replica, is_batch)).or_default();
        *seq += self.rng.random_range(1..3);
        self.now_ms += self.rng.random_range(0..500);
        let envelope = Envelope {
            origin: Origin {
                replica: ReplicaId(replica),
                session: SessionId(self.sessions[&replica]),
                lane: if is_batch { Lane::Outbox } else { Lane::Admin },
                seq: *seq,
            },
            proposed_at_ms: self.now_ms - self.rng.random_range(0..300),
            command,
        };
        self.sent.push(envelope.clone());
        self.apply(envelope);
    }

    fn apply(&mut self, envelope: Envelope) {
        let index = self.state.applied().0 + 1;
        let bytes = encode_envelope(&envelope);
        let seen = &mut self.record.observation;
        seen.applied(index, run(1, 1), index, Some(&bytes), None);
        self.state.apply(LogIndex(index), envelope);
        if index.is_multiple_of(17) {
            let keys: Vec<RegisterKey> = NAMES
                .iter()
                .map(|name| RegisterKey::Backend((*name).to_owned()))
                .chain(
                    USERS
                        .iter()
                        .map(|name| RegisterKey::Weight((*name).to_owned())),
                )
                .chain(
                    USERS
                        .iter()
                        .map(|name| RegisterKey::Limits((*name).to_owned())),
                )
                .chain([
                    RegisterKey::Policy,
                    RegisterKey::Routing,
                    RegisterKey::Admission,
                ])
                .collect();
            let image = StateImage::of(&self.state, &keys);
            self.record.observation.image(index, run(1, 1), image);
        }
    }

    fn step(&mut self) {
        let replica = self.rng.random_range(1..=3);
        match self.rng.random_range(0..20) {
            0..10 => {
                let items = (0..self.rng.random_range(1..6))
                    .map(|_| self.item(replica))
                    .collect();
                let base_attempt = AttemptId(0);
                self.propose(
                    replica,
                    Command::Batch {
                        base_attempt,
                        items,
                    },
                );
            }
            10..17 => {
                let command = self.admin();
                self.propose(replica, command);
            }
            17 => {
                let at = self.rng.random_range(0..self.sent.len());
                let again = self.sent[at].clone();
                self.apply(again);
            }
            18 => {
                let command = Command::ExpireSession {
                    replica: ReplicaId(replica),
                    session: SessionId(self.sessions[&replica]),
                };
                let teller = self.rng.random_range(1..=3);
                self.propose(teller, command);
            }
            _ => {
                let session = self.rng.random();
                self.sessions.insert(replica, session);
                self.seqs.retain(|(other, _), _| *other != replica);
            }
        }
    }

    fn admin(&mut self) -> Command {
        let name = NAMES[self.rng.random_range(0..4)].to_owned();
        let user = USERS[self.rng.random_range(0..4)].to_owned();
        match self.rng.random_range(0..10) {
            0..3 => Command::PutBackend(BackendSpec {
                id: name,
                url: format!("http://127.0.0.1:{}", self.rng.random_range(1..4)),
                models: vec!["*".to_owned()],
                labels: BTreeMap::new(),
                capacity_blocks: (self.rng.random_range(0..3) > 0)
                    .then(|| self.rng.random_range(4..16)),
                kv_events: None,
                kv_replay: None,
            }),
            3 => Command::DeleteBackend { name },
            4 => Command::SetDraining {
                name,
                draining: self.rng.random(),
            },
            5 => Command::PutUser(UserSpec {
                name: user,
                weight_milli: self.rng.random_range(0..3000),
            }),
            6 => Command::PutUserLimits {
                name: user,
                limits: UserLimits {
                    requests: self.rng.random::<bool>().then_some(7),
                    ..UserLimits::default()
                },
            },
            7 => Command::PutAdmission(AdmissionSettings {
                charge: match self.rng.random_range(0..3) {
                    0 => ChargeInput::Uncached,
                    1 => ChargeInput::Full,
                    _ => ChargeInput::Discounted,
                },
                ..AdmissionSettings::default()
            }),
            8 => Command::SetUser {
                user: UserSpec {
                    name: user,
                    weight_milli: self.rng.random_range(0..3000),
                },
                limits: UserLimits {
                    requests: self.rng.random::<bool>().then_some(7),
                    ..UserLimits::default()
                },
            },
            _ => Command::PutPolicy(PolicyConfig::RoundRobin),
        }
    }

    fn backend(&mut self) -> BackendRef {
        let known: Vec<BackendRef> = self.state.backends().map(|it| it.handle).collect();
        let at = self.rng.random_range(0..known.len().max(1));
        known.get(at).copied().unwrap_or(BackendRef {
            slot: state::ids::Slot(0),
            incarnation: state::ids::Incarnation(1),
        })
    }

    /// The blocks of a prompt: few, so that prompts share beginnings.
    fn chain(&mut self) -> Vec<BlockHash> {
        let depth = self.rng.random_range(0..6);
        let mut hash = 1;
        let mut next = || {
            hash = xxh3_64_with_seed(&[self.rng.random_range(0..2)], hash);
            BlockHash(hash)
        };
        (0..depth).map(|_| next()).collect()
    }

    fn item(&mut self, replica: u8) -> Item {
        let open = self.rng.random_range(0..self.open.len().max(1));
        let known = self.open.get(open).copied();
        let attempt = known.filter(|(holder, _)| *holder == replica);
        let attempt = attempt.map_or(0, |(_, attempt)| attempt as u32);
        let user = user_key(HASH_SEED, USERS[self.rng.random_range(0..4)]);
        match self.rng.random_range(0..12) {
            0..4 => {
                let chain = self.chain();
                let known = self.rng.random_range(0..=chain.len());
                self.attempts += 1;
                self.open.push((replica, self.attempts));
                Item::Acquire {
                    attempt: self.attempts as u32,
                    backend: self.backend(),
                    tip: known.checked_sub(1).map(|at| chain[at]),
                    new: chain[known..].to_vec(),
                }
            }
            4 => {
                let chain = self.chain();
                Item::Materialize {
                    attempt,
                    new: chain,
                }
            }
            5..8 => Item::Release {
                attempt,
                outcome: match self.rng.random_range(0..3) {
                    0 => LeaseOutcome::Kept,
                    1 => LeaseOutcome::Discarded,
                    _ => LeaseOutcome::KeptUntouched,
                },
            },
            8..10 => Item::Charge(Charge {
                user,
                input_uncached: self.rng.random_range(0..100),
                input_cached: self.rng.random_range(0..100),
                output: self.rng.random_range(0..100),
                started: self.rng.random_range(0..3),
                ended: self.rng.random_range(0..3),
                queued: self.rng.random_range(0..2),
                dequeued: self.rng.random_range(0..2),
                advance: self.rng.random_range(0..50),
                settled: self.rng.random_range(0..50),
            }),
            10 => Item::ObserveEngine {
                backend: self.backend(),
                facts: EngineFacts {
                    models: None,
                    capacity_blocks: self.rng.random::<bool>().then_some(9),
                    started_at_s: self
                        .rng
                        .random::<bool>()
                        .then(|| self.rng.random_range(1..4)),
                },
            },
            _ => self.waiting(user),
        }
    }

    fn waiting(&mut self, user: state::ids::UserKey) -> Item {
        let ticket = Ticket(self.rng.random_range(0..9));
        match self.rng.random_range(0..4) {
            0 | 1 => Item::Wait(Wait {
                ticket,
                model: ModelKey(1),
                user,
                priority: self.rng.random_range(0..2),
                tokens: self.rng.random_range(0..100),
            }),
            2 => Item::Leave { ticket },
            _ => Item::Grant {
                model: ModelKey(1),
                count: self.rng.random_range(1..3),
            },
        }
    }
}

#[test]
fn random_logs_are_followed() {
    let mut compared = BTreeMap::new();
    for seed in 0..50 {
        let mut script = Script::new(seed);
        for _ in 0..170 {
            script.step();
        }
        let comparison = script.record.comparison();
        assert_eq!(comparison.differences, [], "seed {seed}");
        for (part, count) in &comparison.compared {
            *compared.entry(*part).or_insert(0) += count;
        }
    }
    for part in [
        StatePart::Time,
        StatePart::Sessions,
        StatePart::Settings,
        StatePart::Users,
        StatePart::Leases,
        StatePart::Blocks,
    ] {
        assert!(compared[&part] > 300, "{part:?}: {compared:?}");
    }
}
