//! Newtypes for every identifier, so that none is passed in another's place.

use bincode::{Decode, Encode};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64_with_seed;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(
            Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Encode, Decode,
            Serialize, Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id!(
    /// A replica, by `node.id` of its config: `1..=255`, unique in the cluster, never reused.
    ReplicaId(u8)
);
id!(
    /// One run of a replica: drawn anew at every start, so that what an earlier run left open
    /// (leases, requests in flight) can be told apart and closed.
    SessionId(u64)
);
id!(
    /// A backend's place in the registry, `0..BACKENDS_MAX`. Reused after a removal, which is why
    /// commands carry a [`BackendRef`].
    Slot(u16)
);
id!(
    /// Counts the lives of what stands in one slot: a new backend, a new URL or a restarted engine
    /// each begin a new one, and commands meant for an earlier one are rejected.
    Incarnation(u32)
);
id!(
    /// One dispatch of a request to a backend. Unique within its replica's session, ascending.
    AttemptId(u64)
);
id!(
    /// A user by `xxh3_64` of their name, seeded with the cluster's hash seed.
    UserKey(u64)
);
id!(
    /// A model by `xxh3_64` of its name, seeded with the cluster's hash seed.
    ModelKey(u64)
);
id!(
    /// One request waiting for admission. Unique within its replica's session, ascending.
    Ticket(u64)
);
id!(
    /// One try to bring in a backup, drawn by the replica that reads it.
    RestoreId(u64)
);
id!(
    /// Index of an entry in the replicated log, from 1. 0 stands for "nothing applied".
    LogIndex(u64)
);

impl SessionId {
    /// The session that a run goes on under when the cluster has ended this one. A run's first
    /// session is drawn at random and a hash of it is as random: no other run comes upon it. All
    /// parts of one run find the same one, so that they stay one run.
    #[must_use]
    pub fn successor(self) -> Self {
        Self(xxh3_64_with_seed(
            &self.0.to_le_bytes(),
            SUCCESSOR_HASH_SEED,
        ))
    }
}

/// Keeps the successors of sessions apart from other hashes of the same number.
const SUCCESSOR_HASH_SEED: u64 = 0x7375_6363_6573_736f;

/// Hashes are uniform: a variable-length integer would cost nine bytes, fixed ones cost eight.
macro_rules! hash {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub u64);

        impl Encode for $name {
            fn encode<E: bincode::enc::Encoder>(
                &self,
                encoder: &mut E,
            ) -> Result<(), bincode::error::EncodeError> {
                self.0.to_le_bytes().encode(encoder)
            }
        }

        impl<C> Decode<C> for $name {
            fn decode<D: bincode::de::Decoder<Context = C>>(
                decoder: &mut D,
            ) -> Result<Self, bincode::error::DecodeError> {
                Ok(Self(u64::from_le_bytes(<[u8; 8]>::decode(decoder)?)))
            }
        }
        bincode::impl_borrow_decode!($name);

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, "{:016x}", self.0)
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, "{:016x}", self.0)
            }
        }
    };
}

hash!(
    /// A chained hash that names one block together with the whole prefix before it.
    BlockHash
);
hash!(
    /// An engine's own name for a block in its KV events: opaque, the low 64 bits of whatever hash
    /// the engine uses.
    EngineHash
);

/// A backend as commands name it: the slot and the life of what stood in it when the command was
/// made.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode, Serialize, Deserialize,
)]
pub struct BackendRef {
    /// Place in the registry.
    pub slot: Slot,
    /// Life of what stands there.
    pub incarnation: Incarnation,
}
