//! Snapshots with changed bytes whose checksums and digests were corrected: they are rejected, or
//! accepted, in which case no command panics. Bit rot never gets this far, but a faulty peer might.

mod common;

use common::{block, chain, envelope, measured, measured_sample, snapshot, spec};
use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{RngCore, SeedableRng};
use state::RouterState;
use state::admission::AdmissionSettings;
use state::command::{Charge, Command, EngineFacts, Item, Lane, LeaseOutcome, UserSpec};
use state::ids::{BackendRef, Incarnation, LogIndex, ModelKey, ReplicaId, SessionId, Slot};
use state::policy::PolicyConfig;
use state::prefix::user_key;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

const HEADER_DIGEST: std::ops::Range<usize> = 18..34;
const HEADER_BYTES: usize = 34;
const CHECKSUM_BYTES: usize = 8;
const TAG_AND_LENGTH_BYTES: usize = 5;
const TAG_END: u8 = 255;

/// Enough for every field of the sample to be hit several times.
const IMAGES: usize = 500;

/// A snapshot with the position of every payload.
struct Image {
    bytes: Vec<u8>,
    /// Payloads of the tagged sections.
    tagged: Vec<std::ops::Range<usize>>,
    /// Payloads of the ownership's sections.
    owned: Vec<std::ops::Range<usize>>,
}

impl Image {
    fn of(bytes: Vec<u8>) -> Self {
        let length = |at: usize| {
            let length = bytes[at..at + 4].try_into().expect("four bytes");
            u32::from_le_bytes(length) as usize
        };
        let (mut tagged, mut owned) = (Vec::new(), Vec::new());
        let mut at = HEADER_BYTES + CHECKSUM_BYTES;
        loop {
            let start = at + TAG_AND_LENGTH_BYTES;
            let payload = start..start + length(at + 1);
            let is_end = bytes[at] == TAG_END;
            at = payload.end + CHECKSUM_BYTES;
            tagged.push(payload);
            if is_end {
                break;
            }
        }
        while at < bytes.len() {
            let payload = at + 4..at + 4 + length(at);
            at = payload.end + CHECKSUM_BYTES;
            owned.push(payload);
        }
        Self {
            bytes,
            tagged,
            owned,
        }
    }

    /// Corrects all checksums.
    fn seal(&mut self) {
        let bytes = &mut self.bytes;
        let set = |end: usize, sum: u64, bytes: &mut Vec<u8>| {
            bytes[end..end + CHECKSUM_BYTES].copy_from_slice(&sum.to_le_bytes());
        };
        set(HEADER_BYTES, xxh3_64(&bytes[..HEADER_BYTES]), bytes);
        for payload in &self.tagged {
            let sum = xxh3_64(&bytes[payload.start - TAG_AND_LENGTH_BYTES..payload.end]);
            set(payload.end, sum, bytes);
        }
        for (section, payload) in (0..).zip(&self.owned) {
            let sum = xxh3_64_with_seed(&bytes[payload.clone()], section);
            set(payload.end, sum, bytes);
        }
    }

    /// Reads it, correcting the digests to those that the reader computes; `None` if it is
    /// rejected.
    fn accepted(&mut self) -> Option<RouterState> {
        let digest_after = |text: &str, what: &str| {
            let digest = text.split_once(what)?.1.get(..32)?;
            u128::from_str_radix(digest, 16).ok()
        };
        for _ in 0..3 {
            self.seal();
            let mut state = RouterState::new();
            let Err(fault) = state.restore(&mut &*self.bytes) else {
                return Some(state);
            };
            let place = if let Some(found) = digest_after(&fault.what, "of the content ") {
                let end = self.owned.last().expect("the digest is a section").clone();
                (end, found)
            } else if let Some(found) = digest_after(&fault.what, "has the digest ") {
                (HEADER_DIGEST, found)
            } else {
                return None;
            };
            self.bytes[place.0].copy_from_slice(&place.1.to_le_bytes());
        }
        panic!("the digests do not settle");
    }
}

/// Uniform numbers that are the same in every run.
struct Numbers(SplitMix64);

impl Numbers {
    fn below(&mut self, end: usize) -> usize {
        self.0.next_u64() as usize % end
    }
}

/// A batch that touches leases, blocks and users, both of the sample and others.
fn batch(handle: BackendRef) -> Command {
    let user = user_key(common::HASH_SEED, "alice");
    let mut items = Vec::new();
    for attempt in 0..4 {
        for (tip, new) in [
            (None, chain(&[1, attempt, 3, 4, 5])),
            (Some(block(&[1])), vec![block(&[9]), block(&[1])]),
        ] {
            items.push(Item::Acquire {
                attempt: u32::from(attempt) + 2,
                backend: handle,
                tip,
                new,
            });
        }
        items.push(Item::Materialize {
            attempt: u32::from(attempt),
            new: chain(&[7, 8]),
        });
        let outcome = if attempt % 2 == 0 {
            LeaseOutcome::Kept
        } else {
            LeaseOutcome::Discarded
        };
        items.push(Item::Release {
            attempt: u32::from(attempt),
            outcome,
        });
    }
    items.push(Item::Charge(Charge {
        user,
        input_uncached: u64::MAX,
        input_cached: u64::MAX,
        output: u64::MAX,
        started: u32::MAX,
        ended: 1,
        ..Charge::default()
    }));
    let facts = EngineFacts {
        models: None,
        capacity_blocks: Some(3),
        started_at_s: Some(9),
    };
    items.push(Item::ObserveEngine {
        backend: handle,
        facts,
    });
    common::batch(items)
}

/// Applies commands of every kind to a state of unknown origin.
fn exercise(mut state: RouterState) {
    let handles: Vec<BackendRef> = state.backends().map(|backend| backend.handle).collect();
    let other = BackendRef {
        slot: Slot(7),
        incarnation: Incarnation(1),
    };
    let samples = handles.iter().map(|handle| measured(*handle, ModelKey(1)));
    let heard = handles.iter().flat_map(|handle| {
        let runs = [(1, 0), (1, 1), (2, 0)];
        runs.map(|(publisher, seq)| common::heard(*handle, publisher, seq))
    });
    let samples: Vec<Command> = samples.chain(heard).collect();
    let batches = handles.into_iter().chain([other]).map(batch);
    let name = |name: &str| name.to_owned();
    let commands = samples.into_iter().chain(batches).chain([
        Command::PutAdmission(AdmissionSettings::default()),
        Command::PutBackend(spec("c", 3, Some(1))),
        Command::PutBackend(spec("b", 9, Some(1))),
        Command::PutBackend(spec("d", 4, Some(1))),
        Command::DeleteBackend { name: name("c") },
        Command::PutUser(UserSpec {
            name: name("bob"),
            weight_milli: 1,
        }),
        Command::PutPolicy(PolicyConfig::LeastRequest),
        Command::ExpireSession {
            replica: ReplicaId(1),
            session: SessionId(1),
        },
    ]);
    for (command, seq) in commands.zip(1_000_000..) {
        for replica in 1..=3 {
            let index = LogIndex(state.applied().0 + 1);
            let envelope = envelope(replica, 1, Lane::Admin, seq, command.clone());
            state.apply(index, envelope);
        }
    }
    let user = user_key(common::HASH_SEED, "alice");
    assert!(state.user(user).is_some_and(|user| user.key.0 > 0));
    // The result can be written and queried.
    assert!(!snapshot(&state).is_empty());
    assert_eq!(state.users(None, usize::MAX).len(), state.users_len());
}

#[test]
fn a_forged_snapshot_is_refused_or_harmless() {
    let original = snapshot(&measured_sample());
    let mut numbers = Numbers(SplitMix64::seed_from_u64(1));
    let mut taken = 0;
    for _ in 0..IMAGES {
        let mut image = Image::of(original.clone());
        let payloads: Vec<_> = image.tagged.iter().chain(&image.owned).cloned().collect();
        let payloads: Vec<_> = payloads.into_iter().filter(|it| !it.is_empty()).collect();
        for _ in 0..=numbers.below(3) {
            let payload = payloads[numbers.below(payloads.len())].clone();
            let at = payload.start + numbers.below(payload.len());
            // Bits, small numbers and extremes find different faults.
            image.bytes[at] = match numbers.below(4) {
                0 => image.bytes[at] ^ (1 << numbers.below(8)),
                1 => numbers.below(4) as u8,
                2 => u8::MAX,
                _ => numbers.below(256) as u8,
            };
        }
        if let Some(state) = image.accepted() {
            taken += 1;
            exercise(state);
        }
    }
    assert!(taken > IMAGES / 20, "{taken} of {IMAGES} images were taken");
}
