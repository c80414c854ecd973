//! The replicated audit log of the most recent admin writes.

use std::collections::VecDeque;

use bincode::{Decode, Encode};
use schemars::JsonSchema;
use serde::Serialize;

use crate::ids::{LogIndex, ReplicaId};

/// Maximum number of audit entries that are kept.
pub const AUDIT_ENTRIES_MAX: usize = 256;

/// One admin write that took effect.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode, Serialize, JsonSchema)]
pub struct AuditEntry {
    /// Log index of the write.
    pub index: LogIndex,
    /// Time of the write by the cluster's clock, as Unix time in milliseconds.
    pub at_ms: u64,
    /// Replica that proposed it.
    pub replica: ReplicaId,
    /// Kind of write.
    pub action: AuditAction,
    /// Object of the write: a backend id, user name, policy name, replica id or key id.
    pub subject: String,
}

/// Kind of an admin write. What replicas do by themselves is not among them, so that it does not
/// displace what operators did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum AuditAction {
    /// The cluster was founded.
    FoundCluster,
    /// A backend was added or changed.
    PutBackend,
    /// A backend was removed.
    DeleteBackend,
    /// A backend was set to draining.
    Drain,
    /// A backend was set to draining, and its streams to go on elsewhere.
    DrainMovingStreams,
    /// Draining of a backend was cancelled.
    Undrain,
    /// The routing policy was replaced.
    PutPolicy,
    /// The routing settings other than the policy were replaced.
    PutRouting,
    /// The admission settings were replaced.
    PutAdmission,
    /// The state was replaced by a backup.
    Restore,
    /// A user's usage of limits and budgets was reset.
    ForgiveUser,
    /// A user was deleted.
    DeleteUser,
    /// An API key was created.
    CreateKey,
    /// An API key was revoked.
    RevokeKey,
    /// An API key got a new secret.
    RotateKey,
    /// The settings of a user were replaced.
    ConfigureUser,
    /// The defaults of users were set.
    PutUserDefaults,
    /// A tree of sessions was ended.
    EndTree,
}

/// Audit entries, oldest first. The oldest one is dropped beyond [`AUDIT_ENTRIES_MAX`].
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
pub(super) struct Audit(VecDeque<AuditEntry>);

impl Audit {
    pub(super) fn push(&mut self, entry: AuditEntry) {
        self.0.push_back(entry);
        if self.0.len() > AUDIT_ENTRIES_MAX {
            self.0.pop_front();
        }
    }

    /// Returns the log index of the last kept entry that makes replicas define user names again, if
    /// there is one.
    pub(super) fn names_since(&self) -> Option<LogIndex> {
        let forgets = |action| matches!(action, AuditAction::Restore | AuditAction::DeleteUser);
        let mut entries = self.iter();
        let last = entries.rfind(|entry| forgets(entry.action));
        last.map(|entry| entry.index)
    }

    pub(super) fn iter(&self) -> impl DoubleEndedIterator<Item = &AuditEntry> {
        self.0.iter()
    }
}
