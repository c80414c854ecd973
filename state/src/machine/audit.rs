//! The last administrative writes, as replicated facts.

use std::collections::VecDeque;

use bincode::{Decode, Encode};
use serde::Serialize;

use crate::ids::{LogIndex, ReplicaId};

/// Writes kept.
pub const AUDIT_ENTRIES_MAX: usize = 256;

/// One administrative write that took effect.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode, Serialize)]
pub struct AuditEntry {
    /// Where in the log it stands.
    pub index: LogIndex,
    /// Replicated time, unix milliseconds.
    pub at_ms: u64,
    /// Which replica proposed it.
    pub replica: ReplicaId,
    /// What was done.
    pub action: AuditAction,
    /// To whom: a backend's id, a user's name, a policy's name, a replica's id.
    pub subject: String,
}

/// What an administrative write does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum AuditAction {
    /// The cluster was initialised.
    InitCluster,
    /// A backend was added or changed.
    PutBackend,
    /// A backend was removed.
    DeleteBackend,
    /// A backend gets no new requests.
    Drain,
    /// A backend gets new requests again.
    Undrain,
    /// A user's weight was set.
    PutUser,
    /// The routing policy was replaced.
    PutPolicy,
    /// What a replica had left open was closed.
    ExpireSession,
    /// What routing follows beside the policy was replaced.
    PutRouting,
    /// How requests are admitted was replaced.
    PutAdmission,
    /// What a user may use was set.
    PutUserLimits,
    /// Backends' KV events were given other readers.
    AssignReaders,
    /// The state of a backup took the place of the one before.
    Restore,
    /// What a user had used of its limits was forgotten.
    ForgiveUser,
}

/// The ring of writes, oldest first.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
pub(super) struct Audit(VecDeque<AuditEntry>);

impl Audit {
    pub(super) fn push(&mut self, entry: AuditEntry) {
        self.0.push_back(entry);
        if self.0.len() > AUDIT_ENTRIES_MAX {
            self.0.pop_front();
        }
    }

    /// Whether an entry is of a kind that came with version 4 of the formats.
    pub(super) fn has_version_4(&self) -> bool {
        self.iter()
            .any(|entry| entry.action == AuditAction::ForgiveUser)
    }

    /// Where the last restore stands, if the ring still knows of one.
    pub(super) fn restored(&self) -> Option<LogIndex> {
        let is_restore = |entry: &&AuditEntry| entry.action == AuditAction::Restore;
        self.iter().rfind(is_restore).map(|entry| entry.index)
    }

    pub(super) fn iter(&self) -> impl DoubleEndedIterator<Item = &AuditEntry> {
        self.0.iter()
    }
}
