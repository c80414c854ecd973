//! Newtypes for all identifiers, so that one cannot be passed for another.

use bincode::{Decode, Encode};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64_with_seed;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(
            Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Encode, Decode,
            Serialize, Deserialize, JsonSchema,
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
    /// A replica: `node.id` of its config, `1..=255`, unique in the cluster and never reused.
    ReplicaId(u8)
);
id!(
    /// One run of a replica. Drawn at random at every start, so that whatever an earlier run left
    /// open (leases, requests in flight) can be recognised and closed.
    SessionId(u64)
);
id!(
    /// Index of a backend in the registry, `0..BACKENDS_MAX`. Reused after a removal, which is why
    /// commands carry a [`BackendRef`].
    Slot(u16)
);
id!(
    /// Counter of a slot's occupants. A new backend, a new URL and a restarted engine each start a
    /// new incarnation; commands for an earlier one are rejected.
    Incarnation(u32)
);
id!(
    /// One dispatch of a request to a backend. Unique within the replica's session, ascending.
    AttemptId(u64)
);
id!(
    /// A user: `xxh3_64` of the name, seeded with the cluster's hash seed.
    UserKey(u64)
);
id!(
    /// A model: `xxh3_64` of the name, seeded with the cluster's hash seed.
    ModelKey(u64)
);
id!(
    /// One request waiting for admission. Unique within the replica's session, ascending.
    Ticket(u64)
);
id!(
    /// One attempt to restore a backup, drawn at random by the replica that reads it.
    RestoreId(u64)
);
id!(
    /// Index of an entry in the replicated log, from 1. 0 means that nothing is applied.
    LogIndex(u64)
);

impl SessionId {
    /// Returns the session under which a run continues after the cluster has ended this one.
    ///
    /// A run's first session is random, and so is a hash of it: no other run arrives at the same
    /// session. Every component of a run computes the same successor, so all of them remain one
    /// run.
    #[must_use]
    pub fn successor(self) -> Self {
        Self(xxh3_64_with_seed(
            &self.0.to_le_bytes(),
            SUCCESSOR_HASH_SEED,
        ))
    }
}

/// Seed that makes successors of sessions differ from other hashes of the same number.
const SUCCESSOR_HASH_SEED: u64 = 0x7375_6363_6573_736f;

/// Defines a hash type with a fixed-length encoding. Hashes are uniform, so as variable-length
/// integers they would take nine bytes instead of eight.
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
    /// A chained hash that identifies one block together with the whole prefix before it.
    BlockHash
);
hash!(
    /// An engine's own hash of a block in its KV events. Opaque: the low 64 bits of whatever hash
    /// the engine uses.
    EngineHash
);

hash!(
    /// A session of an agent or chat: `xxh3_64` of its user's key and its name, seeded with the
    /// cluster's hash seed.
    AgentSessionKey
);
hash!(
    /// A resumable stream, named by the replica at which it began.
    StreamId
);
hash!(
    /// A request that carries a resumable stream, named by its replica.
    StreamCarrier
);
hash!(
    /// What requests are sent with, an API key and a model: the hash of both.
    SourceKey
);
hash!(
    /// An API key, drawn at random by the replica that made it. Not its secret.
    ApiKeyId
);

impl SourceKey {
    /// Stands for every source that is not told apart.
    pub const OTHER: Self = Self(0);
}

/// A backend as named by commands: its slot, and the incarnation at the time of the command.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Encode,
    Decode,
    Serialize,
    Deserialize,
    JsonSchema,
)]
pub struct BackendRef {
    /// Index in the registry.
    pub slot: Slot,
    /// Incarnation of the slot's occupant.
    pub incarnation: Incarnation,
}
