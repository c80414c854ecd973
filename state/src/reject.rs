//! Why a command is refused: an answer, the same on every replica, and part of the log's format.

use bincode::{Decode, Encode};

use crate::bounds::{BACKENDS_MAX, USERS_MAX};
use crate::ids::ReplicaId;

/// Why a command was refused.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode, thiserror::Error)]
pub enum Rejection {
    /// The command needs an initialised cluster.
    #[error("cluster is not initialised")]
    NotInitialised,
    /// `InitCluster` came a second time.
    #[error("cluster is initialised already")]
    AlreadyInitialised,
    /// The session is older than the replica's newest one.
    #[error("session of replica {replica} is over")]
    StaleSession {
        /// The replica.
        replica: ReplicaId,
    },
    /// No backend has this id.
    #[error("no backend has the id {name:?}")]
    UnknownBackend {
        /// As asked.
        name: String,
    },
    /// The registry is full.
    #[error("the registry holds {BACKENDS_MAX} backends, which is the limit")]
    TooManyBackends,
    /// The user table is full of users that cannot be forgotten.
    #[error("{USERS_MAX} users are kept and none of them can be forgotten")]
    TooManyUsers,
    /// A field is outside its bounds.
    #[error("{field}: {expected}")]
    Invalid {
        /// Path of the field.
        field: String,
        /// What would be right.
        expected: String,
    },
}
