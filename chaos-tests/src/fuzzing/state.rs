//! Fuzz targets of `state`: commands, replies and snapshots.
//!
//! Each command that decodes is applied to two replicas, one of which is rebuilt from a snapshot
//! halfway. Their replies and digests must be equal, and every invariant of `check` must hold.

use std::collections::BTreeMap;

use state::RouterState;
use state::admission::AdmissionSettings;
use state::budgets::Budget;
use state::caches::CacheScope;
use state::capacity::{DemandReport, ModelDemand};
use state::codec::{decode_envelope, decode_reply, encode_envelope, encode_reply};
use state::command::{
    BackendSpec, BatchReply, Charge, Command, EngineFacts, Envelope, Item, Lane, LeaseOutcome,
    Rejection, Reply, UserDefaults, UserSettings,
};
use state::discovery::{Discovery, DiscoveryChange};
use state::ids::{
    AttemptId, BackendRef, Incarnation, LogIndex, ReplicaId, SessionId, Slot, UserKey,
};
use state::policy::{PolicyConfig, RoutingSettings};
use state::prefix::{model_key, user_key};
use state::quotas::UserLimits;
use state::ratios::TextSample;
use state::reader_assignment::Assignment;
use state::service::BeliefSample;
use state::usage::UsageSource;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use super::fixtures::{self as common, Driver, block, chain, restored, spec};

/// Reads a log and applies its commands. Each entry is its length in two bytes, little-endian,
/// followed by its bytes.
pub(super) fn commands(bytes: &[u8]) {
    let (mut steady, mut rebuilt) = (cluster(), cluster());
    let entries = entries(bytes);
    let half = entries.len() / 2;
    for (number, entry) in entries.into_iter().enumerate() {
        if number == half {
            rebuilt = restored(&common::snapshot(&rebuilt));
        }
        let Ok(envelope) = decode_envelope(entry) else {
            continue;
        };
        let again = decode_envelope(&encode_envelope(&envelope));
        assert_eq!(again.as_ref().ok(), Some(&envelope), "{again:?}");
        let index = LogIndex(steady.applied().0 + 1);
        let reply = steady.apply(index, envelope.clone());
        assert_eq!(rebuilt.apply(index, envelope), reply);
        assert_eq!(decode_reply(&encode_reply(&reply)).ok(), Some(reply));
        // The check visits the whole state, which takes longer than applying.
        if number % 8 == 7 {
            assert_eq!(steady.check(), Ok(()));
        }
    }
    assert_eq!(steady.check(), Ok(()));
    assert_eq!(steady.digest(), rebuilt.digest());
    assert_eq!(
        restored(&common::snapshot(&steady)).digest(),
        steady.digest()
    );
}

/// Reads a reply in the form in which followers receive it from the leader.
pub(super) fn reply(bytes: &[u8]) {
    if let Ok(reply) = decode_reply(bytes) {
        assert_eq!(decode_reply(&encode_reply(&reply)).ok(), Some(reply));
    }
}

/// Reads a snapshot as it is, and with corrected checksums and digests. Applies commands of every
/// kind to an accepted snapshot. The result can be written and queried.
pub(super) fn snapshot(bytes: &[u8]) {
    let mut state = RouterState::new();
    let empty = state.digest();
    if state.restore(&mut &*bytes).is_err() {
        assert_eq!(state.digest(), empty, "a refused snapshot changes nothing");
    }
    if let Some(forged) = SnapshotBytes(bytes.to_vec()).accepted() {
        exercise(forged, &[1]);
    }
}

/// Applies commands of every kind to a state of unknown origin, each proposed by each of
/// `replicas`. No command may panic.
fn exercise(mut state: RouterState, replicas: &[u8]) {
    for (command, seq) in every_command(&state).into_iter().zip(1_000_000..) {
        for &replica in replicas {
            let index = LogIndex(state.applied().0.saturating_add(1));
            if index.0 == u64::MAX {
                return;
            }
            state.apply(index, envelope(replica, seq, command.clone()));
        }
    }
    // The result can be written and queried.
    assert!(!common::snapshot(&state).is_empty());
    assert_eq!(state.users(None, usize::MAX).len(), state.users_len());
}

pub(super) fn commands_seeds() -> Vec<Vec<u8>> {
    let state = cluster();
    let log: Vec<Vec<u8>> = every_command(&state)
        .into_iter()
        .zip(100..)
        .map(|(command, seq)| encode_envelope(&envelope(2, seq, command)))
        .collect();
    let mut seeds: Vec<_> = log.iter().map(|entry| framed([entry])).collect();
    seeds.push(framed(&log));
    seeds
}

pub(super) fn reply_seeds() -> Vec<Vec<u8>> {
    let batch = BatchReply {
        missing_tip: vec![AttemptId(3), AttemptId(9)],
        dropped: 4,
    };
    let replies = [
        Reply::Applied,
        Reply::Repeated(Box::new(Reply::Batch(batch.clone()))),
        Reply::Batch(batch),
        Reply::Rejected(Rejection::NotInitialised),
    ];
    replies.iter().map(encode_reply).collect()
}

pub(super) fn snapshot_seeds() -> Vec<Vec<u8>> {
    let mut state = cluster();
    let before = common::snapshot(&state);
    for (command, seq) in every_command(&state).into_iter().zip(100..) {
        let index = LogIndex(state.applied().0 + 1);
        state.apply(index, envelope(2, seq, command));
    }
    let full = [RouterState::new(), state, common::measured_sample()];
    let full = full.iter().map(common::snapshot);
    full.chain([before]).collect()
}

fn entries(mut bytes: &[u8]) -> Vec<&[u8]> {
    let mut entries = Vec::new();
    while let Some((length, rest)) = bytes.split_first_chunk() {
        let length = usize::from(u16::from_le_bytes(*length)).min(rest.len());
        let (entry, rest) = rest.split_at(length);
        entries.push(entry);
        bytes = rest;
    }
    entries
}

fn framed<'a>(entries: impl IntoIterator<Item = &'a Vec<u8>>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for entry in entries {
        let length = u16::try_from(entry.len()).expect("the commands of this file are short");
        bytes.extend(length.to_le_bytes());
        bytes.extend(entry);
    }
    bytes
}

/// Wraps a command in an envelope of the replica's session.
fn envelope(replica: u8, seq: u64, command: Command) -> Envelope {
    common::envelope(replica, 1, Lane::Admin, seq, command)
}

/// Returns a cluster with two backends, one of which is soon full.
fn cluster() -> RouterState {
    let mut driver = Driver::new();
    for backend in [spec("a", 1, Some(5)), spec("b", 2, None)] {
        assert_eq!(
            driver.apply(1, Command::PutBackend(backend)),
            Reply::Applied
        );
    }
    driver.state
}

/// Returns commands of every kind that refer to existing objects of `state`.
fn every_command(state: &RouterState) -> Vec<Command> {
    let mut handles: Vec<BackendRef> = state.backends().map(|backend| backend.handle).collect();
    let heard = handles.iter().flat_map(|handle| {
        let runs = [(1, 0), (1, 1), (2, 0)];
        runs.map(|(publisher, seq)| common::heard(*handle, publisher, seq))
    });
    let mut commands: Vec<_> = heard.collect();
    handles.push(BackendRef {
        slot: Slot(7),
        incarnation: Incarnation(1),
    });
    commands.extend(handles.iter().map(|handle| learnt(*handle)));
    commands.extend(PolicyConfig::defaults().into_iter().map(Command::PutPolicy));
    let name = || "b".to_owned();
    commands.extend([
        Command::SetDraining {
            name: name(),
            draining: true,
            moves_streams: true,
        },
        Command::configure_user("bob", UserSettings::of_weight(2000)),
        Command::PutRouting(RoutingSettings::default()),
        Command::PutAdmission(AdmissionSettings {
            bins: 4,
            ..AdmissionSettings::default()
        }),
        limit_bob(),
        Command::AssignReaders(vec![Assignment {
            backend: handles[0],
            replica: ReplicaId(2),
        }]),
        Command::ExpireSession {
            replica: ReplicaId(2),
            session: SessionId(1),
        },
        Command::PutBackend(BackendSpec {
            labels: BTreeMap::from([("zone".to_owned(), "x".to_owned())]),
            ..spec("c", 3, Some(1))
        }),
        Command::PutBackend(spec("b", 9, Some(1))),
        Command::DeleteBackend { name: name() },
        learnt(handles[0]),
    ]);
    commands.extend(discovered());
    commands.extend(user_commands(handles[0]));
    commands
}

/// Returns changes that a source reports for its own backend and for a foreign one.
fn discovered() -> impl Iterator<Item = Command> {
    let name = || "pods-a".to_owned();
    let changes = [
        DiscoveryChange::Found(spec("pods-a", 11, None)),
        DiscoveryChange::Lost { name: name() },
        DiscoveryChange::Found(spec("pods-a", 12, Some(4))),
        DiscoveryChange::Lost { name: name() },
        DiscoveryChange::Forgotten { name: name() },
        DiscoveryChange::Lost {
            name: "c".to_owned(),
        },
    ];
    changes.into_iter().map(|change| {
        let source = "pods".to_owned();
        Command::Discover(Box::new(Discovery { source, change }))
    })
}

fn limit_bob() -> Command {
    let limits = UserLimits {
        requests: Some(7),
        tokens: Some(1 << 40),
        concurrent: Some(2),
        concurrent_per_tree: Some(3),
        tokens_per_tree: Some(1 << 30),
        window_ms: Some(60_000),
    };
    let settings = UserSettings {
        limits: Some(limits),
        ..UserSettings::default()
    };
    Command::configure_user("bob", settings)
}

/// Returns operators' changes of a user's settings, with charges in between.
fn user_commands(backend: BackendRef) -> [Command; 7] {
    let bob = UserSettings {
        weight_milli: Some(1500),
        limits: Some(UserLimits::default()),
        budget: Some(Budget {
            day: Some(700),
            month: None,
        }),
        models: vec!["m*".to_owned()],
        cache: Some(CacheScope::Own),
    };
    let eve = UserSettings {
        cache: Some(CacheScope::Group("team".to_owned())),
        ..UserSettings::default()
    };
    [
        Command::configure_user("bob", bob),
        learnt(backend),
        Command::configure_user("eve", eve),
        Command::PutUserDefaults(Box::new(UserDefaults {
            weight_milli: 700,
            limits: UserLimits {
                requests: Some(9),
                ..UserLimits::default()
            },
            budget: Budget {
                day: None,
                month: Some(900),
            },
            cache: CacheScope::Own,
        })),
        learnt(backend),
        Command::ForgiveUser {
            name: "bob".to_owned(),
        },
        Command::DeleteUser {
            name: "bob".to_owned(),
        },
    ]
}

/// Returns a batch with one item of every kind, for known and unknown blocks and users.
fn learnt(backend: BackendRef) -> Command {
    let user = user_key(common::HASH_SEED, "alice");
    let model = model_key(common::HASH_SEED, "m");
    let acquire = |attempt, tip, new| Item::Acquire {
        attempt,
        backend,
        tip,
        new,
    };
    let release = |attempt, outcome| Item::Release { attempt, outcome };
    common::batch(vec![
        Item::DefineUser {
            key: user,
            name: "alice".to_owned(),
        },
        acquire(2, None, chain(&[1, 1, 3, 4, 5, 6, 7, 8])),
        acquire(3, Some(block(&[1])), vec![block(&[9]), block(&[1])]),
        Item::Materialize {
            attempt: 1,
            new: chain(&[7, 8]),
        },
        release(1, LeaseOutcome::Kept),
        release(2, LeaseOutcome::Kept),
        release(3, LeaseOutcome::Discarded),
        charge(user, 300),
        Item::DefineSource(UsageSource {
            key: None,
            model: "m".to_owned(),
        }),
        charge(user, u64::MAX),
        Item::ObserveEngine {
            backend,
            facts: EngineFacts {
                models: Some(vec!["m".to_owned()]),
                capacity_blocks: Some(3),
                started_at_s: Some(9),
                ..EngineFacts::default()
            },
        },
        Item::ObserveService(Box::new(common::service(backend, 90, 40_000))),
        Item::ObserveOutputs {
            user,
            model,
            tokens: (0..100).collect(),
        },
        Item::ObserveText(TextSample {
            model,
            bytes: 9000,
            tokens: 2000,
        }),
        Item::ObserveDemand(Box::new(DemandReport {
            model: "m".to_owned(),
            demand: ModelDemand {
                waiting: 3,
                running: 9,
                waiting_tokens: 700,
            },
            started: 1,
        })),
        Item::ObserveBlockSize {
            backend,
            tokens: 32,
        },
        Item::ObserveBelief(BeliefSample {
            backend,
            held: 9,
            lost: 2,
            found: 1,
            computed_blocks: 300,
        }),
    ])
}

fn charge(user: UserKey, tokens: u64) -> Item {
    Item::Charge(Charge {
        user,
        input_uncached: tokens,
        input_cached: tokens,
        output: tokens,
        started: 1,
        queued: 1,
        advance: 9,
        ..Charge::default()
    })
}

/// Bytes of a snapshot, whose checksums and digests can be corrected to match the contents. The
/// layout is that of `state/src/machine/snapshot/mod.rs`.
struct SnapshotBytes(Vec<u8>);

impl SnapshotBytes {
    const HEADER_DIGEST: std::ops::Range<usize> = 18..34;
    const HEADER_BYTES: usize = 34;
    const CHECKSUM_BYTES: usize = 8;
    const TAG_AND_LENGTH_BYTES: usize = 5;
    const TAG_END: u8 = 255;

    /// Corrects all checksums and returns the restored state; `None` if it is still rejected.
    fn accepted(mut self) -> Option<RouterState> {
        let digest_after = |text: &str, what: &str| {
            let digest = text.split_once(what)?.1.get(..32)?;
            u128::from_str_radix(digest, 16).ok()
        };
        // The content's digest is found first, then that of the whole.
        for _ in 0..3 {
            let content_digest = self.seal()?;
            let mut state = RouterState::new();
            let Err(fault) = state.restore(&mut &*self.0) else {
                return Some(state);
            };
            let (place, digest) = if let Some(digest) = digest_after(&fault.what, "of the content ")
            {
                (content_digest, digest)
            } else {
                let digest = digest_after(&fault.what, "has the digest ")?;
                (Self::HEADER_DIGEST, digest)
            };
            let place = self.0.get_mut(place).filter(|place| place.len() == 16)?;
            place.copy_from_slice(&digest.to_le_bytes());
        }
        None
    }

    /// Corrects all checksums and returns the range of the last section's digest, that of the
    /// content. Returns `None` if lengths lead beyond the end.
    fn seal(&mut self) -> Option<std::ops::Range<usize>> {
        self.put(
            Self::HEADER_BYTES,
            xxh3_64(self.0.get(..Self::HEADER_BYTES)?),
        )?;
        let mut at = Self::HEADER_BYTES + Self::CHECKSUM_BYTES;
        loop {
            let is_end = *self.0.get(at)? == Self::TAG_END;
            let end = at + Self::TAG_AND_LENGTH_BYTES + self.length(at + 1)?;
            self.put(end, xxh3_64(self.0.get(at..end)?))?;
            at = end + Self::CHECKSUM_BYTES;
            if is_end {
                break;
            }
        }
        let mut last = at..at;
        for section in 0.. {
            if at == self.0.len() {
                break;
            }
            last = at + 4..at + 4 + self.length(at)?;
            self.put(
                last.end,
                xxh3_64_with_seed(self.0.get(last.clone())?, section),
            )?;
            at = last.end + Self::CHECKSUM_BYTES;
        }
        Some(last)
    }

    fn length(&self, at: usize) -> Option<usize> {
        let bytes = self.0.get(at..)?.first_chunk()?;
        Some(u32::from_le_bytes(*bytes) as usize)
    }

    fn put(&mut self, at: usize, checksum: u64) -> Option<()> {
        let place = self.0.get_mut(at..)?.first_chunk_mut()?;
        *place = checksum.to_le_bytes();
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuzzing::mutate::MutationRng;

    #[test]
    fn fuzzing_seeds_are_valid_inputs() {
        for seed in commands_seeds() {
            for entry in entries(&seed) {
                decode_envelope(entry).unwrap();
            }
        }
        for seed in snapshot_seeds() {
            let mut broken = seed.clone();
            broken[SnapshotBytes::HEADER_BYTES] ^= 1;
            assert!(RouterState::new().restore(&mut &*broken).is_err());
            let sealed = SnapshotBytes(broken)
                .accepted()
                .expect("sealed, it is whole again");
            assert_eq!(sealed.digest(), restored(&seed).digest());
        }
    }

    #[test]
    fn a_forged_snapshot_is_refused_or_harmless() {
        // Enough to hit every field of the sample a few times.
        const IMAGES: usize = 500;
        let original = common::snapshot(&common::measured_sample());
        let mut numbers = MutationRng::new(1);
        let mut taken = 0;
        for _ in 0..IMAGES {
            let mut image = original.clone();
            for _ in 0..=numbers.below(3) {
                let at = numbers.below(image.len());
                // Flipped bits, small numbers and extremes find different faults.
                image[at] = match numbers.below(4) {
                    0 => image[at] ^ (1 << numbers.below(8)),
                    1 => numbers.below(4) as u8,
                    2 => u8::MAX,
                    _ => numbers.below(256) as u8,
                };
            }
            if let Some(state) = SnapshotBytes(image).accepted() {
                taken += 1;
                exercise(state, &[1, 2, 3]);
            }
        }
        assert!(taken > IMAGES / 20, "{taken} of {IMAGES} images were taken");
    }
}
