//! Fuzz targets of `state`: commands, replies and snapshots.
//!
//! A command that can be decoded is applied to two replicas, one of which is rebuilt from a snapshot
//! halfway: replies and digests stay the same and every invariant that `check` knows holds.

use std::collections::BTreeMap;

use state::RouterState;
use state::admission::AdmissionSettings;
use state::codec::{decode_envelope, decode_reply, encode_envelope, encode_reply};
use state::command::{
    BackendSpec, BatchReply, Charge, Command, EngineFacts, Envelope, Item, Lane, LeaseOutcome,
    Origin, Rejection, Reply, UserSpec,
};
use state::exact::{KvBatch, KvEvent, KvMessage, KvNews};
use state::grants::Wait;
use state::ids::{
    AttemptId, BackendRef, BlockHash, EngineHash, Incarnation, LogIndex, ReplicaId, SessionId,
    Slot, Ticket,
};
use state::policy::{CostSettings, PolicyConfig, RoutingSettings};
use state::prefix::{model_key, user_key};
use state::quotas::UserLimits;
use state::readers::Assignment;
use state::service::ServiceSample;
use state::users::FairnessSettings;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

const HASH_SEED: u64 = 42;

/// A log: every entry's length in two bytes, little-endian, and its bytes.
pub(super) fn commands(bytes: &[u8]) {
    let (mut steady, mut rebuilt) = (cluster(), cluster());
    let entries = entries(bytes);
    let half = entries.len() / 2;
    for (number, entry) in entries.into_iter().enumerate() {
        if number == half {
            rebuilt = restored(&image(&rebuilt));
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
        // It looks at all there is, which takes longer than applying.
        if number % 8 == 7 {
            assert_eq!(steady.check(), Ok(()));
        }
    }
    assert_eq!(steady.check(), Ok(()));
    assert_eq!(steady.digest(), rebuilt.digest());
    assert_eq!(restored(&image(&steady)).digest(), steady.digest());
}

/// A reply as followers get it from the leader.
pub(super) fn reply(bytes: &[u8]) {
    if let Ok(reply) = decode_reply(bytes) {
        assert_eq!(decode_reply(&encode_reply(&reply)).ok(), Some(reply));
    }
}

/// A snapshot, as it is and with its checksums and digests made to fit: one that is taken goes
/// through commands of every kind, and what became of it can be written and read again.
pub(super) fn snapshot(bytes: &[u8]) {
    let mut state = RouterState::new();
    let empty = state.digest();
    if state.restore(&mut &*bytes).is_err() {
        assert_eq!(state.digest(), empty, "a refused snapshot changes nothing");
    }
    let Some(mut forged) = SnapshotBytes(bytes.to_vec()).accepted() else {
        return;
    };
    for (command, seq) in every_command(&forged).into_iter().zip(1_000_000..) {
        let index = LogIndex(forged.applied().0.saturating_add(1));
        if index.0 == u64::MAX {
            return;
        }
        forged.apply(index, envelope(1, seq, command));
    }
    image(&forged);
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
    let before = image(&state);
    for (command, seq) in every_command(&state).into_iter().zip(100..) {
        let index = LogIndex(state.applied().0 + 1);
        state.apply(index, envelope(2, seq, command));
    }
    vec![image(&RouterState::new()), before, image(&state)]
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

fn image(state: &RouterState) -> Vec<u8> {
    let mut bytes = Vec::new();
    let written = state.freeze().write_to(&mut bytes);
    written.expect("writing into memory cannot fail");
    bytes
}

fn restored(image: &[u8]) -> RouterState {
    let mut state = RouterState::new();
    let taken = state.restore(&mut &*image);
    taken.expect("a snapshot just written can be read");
    state
}

/// A command of a replica's run.
fn envelope(replica: u8, seq: u64, command: Command) -> Envelope {
    Envelope {
        origin: Origin {
            replica: ReplicaId(replica),
            session: SessionId(1),
            lane: Lane::Admin,
            seq,
        },
        proposed_at_ms: seq * 1000,
        command,
    }
}

/// A cluster with two backends, one of which is full quickly.
fn cluster() -> RouterState {
    let mut state = RouterState::new();
    let init = Command::InitCluster {
        hash_seed: HASH_SEED,
        policy: PolicyConfig::Cost(CostSettings::default()),
        fairness: FairnessSettings::default(),
    };
    let commands = [
        init,
        Command::PutBackend(spec("a", 1, Some(5))),
        Command::PutBackend(spec("b", 2, None)),
    ];
    for (command, seq) in commands.into_iter().zip(1..) {
        let reply = state.apply(LogIndex(seq), envelope(1, seq, command));
        assert_eq!(reply, Reply::Applied);
    }
    state
}

fn spec(id: &str, port: u16, capacity_blocks: Option<u32>) -> BackendSpec {
    BackendSpec {
        id: id.to_owned(),
        url: format!("http://127.0.0.1:{port}"),
        models: vec!["*".to_owned()],
        labels: BTreeMap::from([("zone".to_owned(), "x".to_owned())]),
        capacity_blocks,
        kv_events: None,
        kv_replay: None,
    }
}

/// One of every kind, aimed at what is there.
fn every_command(state: &RouterState) -> Vec<Command> {
    let mut handles: Vec<BackendRef> = state.backends().map(|backend| backend.handle).collect();
    handles.push(BackendRef {
        slot: Slot(7),
        incarnation: Incarnation(1),
    });
    let mut commands: Vec<_> = handles.iter().map(|handle| learnt(*handle)).collect();
    commands.extend(PolicyConfig::defaults().into_iter().map(Command::PutPolicy));
    let name = || "b".to_owned();
    commands.extend([
        Command::SetDraining {
            name: name(),
            draining: true,
        },
        Command::PutUser(UserSpec {
            name: "bob".to_owned(),
            weight_milli: 2000,
        }),
        Command::PutRouting(RoutingSettings::default()),
        Command::PutAdmission(AdmissionSettings {
            bins: 4,
            ..AdmissionSettings::default()
        }),
        Command::PutUserLimits {
            name: "bob".to_owned(),
            limits: UserLimits {
                requests: Some(7),
                tokens: Some(1 << 40),
                concurrent: Some(2),
                window_ms: Some(60_000),
            },
        },
        Command::AssignReaders(vec![Assignment {
            backend: handles[0],
            replica: ReplicaId(2),
        }]),
        Command::ExpireSession {
            replica: ReplicaId(2),
            session: SessionId(1),
        },
        Command::PutBackend(spec("c", 3, Some(100))),
        Command::DeleteBackend { name: name() },
        learnt(handles[0]),
        Command::PaceTime,
        Command::SetUser {
            user: UserSpec {
                name: "bob".to_owned(),
                weight_milli: 500,
            },
            limits: UserLimits::default(),
        },
        learnt(handles[0]),
    ]);
    commands
}

/// What a flush brings: one item of every kind.
fn learnt(backend: BackendRef) -> Command {
    let (user, model) = (user_key(HASH_SEED, "alice"), model_key(HASH_SEED, "m"));
    let mut items = vec![
        Item::DefineUser {
            key: user,
            name: "alice".to_owned(),
        },
        Item::Acquire {
            attempt: 1,
            backend,
            tip: None,
            new: (1..=20).map(block).collect(),
        },
        Item::Acquire {
            attempt: 2,
            backend,
            tip: Some(block(2)),
            new: vec![block(30)],
        },
        Item::Materialize {
            attempt: 1,
            new: vec![block(21)],
        },
        Item::Release {
            attempt: 1,
            outcome: LeaseOutcome::Kept,
        },
        Item::Release {
            attempt: 2,
            outcome: LeaseOutcome::Discarded,
        },
        Item::Charge(Charge {
            user,
            input_uncached: 300,
            input_cached: 20,
            output: 7,
            started: 1,
            queued: 1,
            advance: 9,
            ..Charge::default()
        }),
        Item::ObserveEngine {
            backend,
            facts: EngineFacts {
                models: Some(vec!["m".to_owned()]),
                capacity_blocks: Some(64),
                started_at_s: Some(9),
            },
        },
        Item::ObserveService(Box::new(sample(backend))),
        Item::ObserveOutputs {
            user,
            model,
            tokens: (0..100).collect(),
        },
        Item::Wait(Wait {
            ticket: Ticket(5),
            model,
            user,
            priority: -3,
            tokens: 700,
        }),
        Item::Grant { model, count: 2 },
        Item::Leave { ticket: Ticket(5) },
    ];
    items.extend(read_of_an_engine(backend));
    Command::Batch {
        base_attempt: AttemptId(0),
        items,
    }
}

/// What a replica measured of an engine.
fn sample(backend: BackendRef) -> ServiceSample {
    ServiceSample {
        ended: 20,
        gaps: 90,
        gap_us: 3_600_000,
        gap_running: 2700,
        block_tokens: 16,
        ..ServiceSample::empty(backend)
    }
}

/// Some block's hash; different for different numbers.
fn block(number: u64) -> BlockHash {
    BlockHash(number.wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// What the reader of an engine's KV events tells first.
fn read_of_an_engine(backend: BackendRef) -> impl Iterator<Item = Item> {
    let name = |number: u64| EngineHash(number);
    let stored = KvEvent::Stored {
        parent: None,
        blocks: (1..=4).map(|it| (name(it), block(it))).collect(),
    };
    let child = KvEvent::Stored {
        parent: Some(name(2)),
        blocks: vec![(name(9), block(9))],
    };
    let removed = KvEvent::Removed {
        blocks: vec![name(4)],
    };
    let message = KvMessage {
        seq: 0,
        mark: 9,
        part: 0,
        is_last: true,
        is_after_loss: false,
        events: vec![stored, child, removed],
    };
    let news = [
        KvNews::Begin,
        KvNews::Message(message),
        KvNews::Current { seq: Some(0) },
    ];
    news.into_iter().map(move |news| {
        Item::KvEvents(KvBatch {
            backend,
            rank: 0,
            publisher: 1,
            news,
        })
    })
}

/// A snapshot's bytes, whose checksums and digests are made to fit what stands there. The layout is
/// that of `state/src/machine/snapshot.rs`.
struct SnapshotBytes(Vec<u8>);

impl SnapshotBytes {
    const HEADER_DIGEST: std::ops::Range<usize> = 18..34;
    const HEADER_BYTES: usize = 34;
    const CHECKSUM_BYTES: usize = 8;
    const TAG_AND_LENGTH_BYTES: usize = 5;
    const TAG_END: u8 = 255;

    /// The state in it; `None` when it is refused whatever its checksums are.
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

    /// Makes all checksums right; answers the last section, the content's digest. `None` when
    /// lengths lead beyond the end.
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

    #[test]
    fn seeds_are_what_they_stand_for() {
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
}
