//! Rejections of commands: replies that are equal on every replica and part of the log format.

use bincode::{Decode, Encode};

use crate::bounds::{API_KEYS_MAX, BACKENDS_MAX, USERS_MAX};
use crate::ids::{AgentSessionKey, ApiKeyId, ReplicaId};

/// Reason why a command was rejected.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode, thiserror::Error)]
pub enum Rejection {
    /// The cluster is not initialised yet.
    #[error("cluster is not initialised")]
    NotInitialised,
    /// The cluster is already initialised.
    #[error("cluster is already initialised")]
    AlreadyInitialised,
    /// The session is older than the newest one of its replica.
    #[error("the session of replica {replica} has ended")]
    StaleSession {
        /// Replica whose session has ended.
        replica: ReplicaId,
    },
    /// No backend has this id.
    #[error("no backend has the id {name:?}")]
    UnknownBackend {
        /// Id given in the command.
        name: String,
    },
    /// The registry of backends is full.
    #[error("the registry holds {BACKENDS_MAX} backends, which is the limit")]
    TooManyBackends,
    /// The user table is full of users that cannot be forgotten.
    #[error("there are {USERS_MAX} users, which is the limit, and none of them can be removed")]
    TooManyUsers,
    /// A field is out of bounds.
    #[error("{field}: {expected}")]
    Invalid {
        /// Path of the field.
        field: String,
        /// Valid range or form.
        expected: String,
    },
    /// No user has this name.
    #[error("no user has the name {name:?}")]
    UnknownUser {
        /// Name given in the command.
        name: String,
    },
    /// Requests of the user wait or are in flight.
    #[error("requests of the user {name:?} are waiting or in flight")]
    UserBusy {
        /// Name of the user.
        name: String,
    },
    /// The table of API keys is full, and none has expired.
    #[error("there are {API_KEYS_MAX} API keys, which is the limit, and none has expired")]
    TooManyKeys,
    /// No API key has this id.
    #[error("no API key has the id {id}")]
    UnknownKey {
        /// Id given in the command.
        id: ApiKeyId,
    },
    /// Another key already has the id or the secret.
    #[error("another API key has the id {id} or the same secret")]
    KeyTaken {
        /// Id of the key that the command creates or rotates.
        id: ApiKeyId,
    },
    /// An operator or another source registered the backend, or it is not lost.
    #[error("the backend {name:?} does not belong to this source")]
    NotOfSource {
        /// Id of the backend.
        name: String,
    },
    /// No session has this key, or it has ended.
    #[error("no session has the id {session}")]
    UnknownSession {
        /// Key given in the command.
        session: AgentSessionKey,
    },
}
