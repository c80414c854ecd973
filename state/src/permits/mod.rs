//! Permits: the limit on concurrent requests of a user or of a tree of sessions, held over all
//! replicas. What follows says *user* for both.
//!
//! The log shows another replica's requests some 20 ms after they start. Replicas that compared that
//! with a limit would each admit a burst in full: a limit of 2 ran 6 requests on three replicas.
//! Shares, as backends' limits have ([`crate::shares`]), would leave a user with a limit of 2 without
//! a place at the third replica, and need a row of numbers for every user that ever had a limit.
//!
//! Instead, each user has one *issuer*: a replica of the current epoch, found by rendezvous hashing
//! (Thaler and Ravishankar, 1998), so that users are spread evenly and every replica names the same
//! one without asking. A request of a limited user takes a *permit* before it is queued and returns
//! it when it ends. Its replica, the *holder*, claims permits from the issuer in messages outside the
//! log. A claim states how many the holder has and how many it wants in all. It is absolute, so a
//! message that is lost, late or repeated changes nothing that the next one does not correct.
//!
//! Invariants, for a user's limit `L` within one epoch:
//! - An issuer counts at least as many permits for a holder as that holder uses. A holder uses more
//!   only after an answer that counts more, and an issuer counts less only after a claim with less.
//! - An issuer grants while its counts add up to less than `L`, so no more than `L` are in use.
//! - A new epoch has new issuers, which grant only after every member has told all it holds in that
//!   epoch, or was silent for
//!   [`SILENT_MS`](crate::shares::SILENT_MS); and a member that has told so ignores earlier answers.
//!
//! What the issuer does not confirm in time is for the caller to decide; such a request counts
//! as well ([`PermitHolder::take_unconfirmed`]). [`PermitHolder`] and [`PermitIssuer`] read no clock
//! and send nothing.

mod holder;
mod issuer;
#[cfg(test)]
mod tests;

use bincode::{Decode, Encode};
use xxhash_rust::xxh3::xxh3_64_with_seed;

pub use holder::PermitHolder;
pub use issuer::PermitIssuer;

use crate::encoding;
use crate::ids::{AgentSessionKey, ReplicaId, UserKey};
use crate::shares::{Epoch, EpochMembers};

/// Who has a limit on concurrent requests: a user, or one tree of a user's sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode)]
pub struct PermitSubject {
    /// The user, whose settings contain the limit.
    pub user: UserKey,
    /// Root of the tree; `None` for the user itself.
    pub tree: Option<AgentSessionKey>,
}

impl From<UserKey> for PermitSubject {
    fn from(user: UserKey) -> Self {
        Self { user, tree: None }
    }
}

/// Returns the member of the epoch `now` that issues the permits of `subject`; `None` if it has no
/// members.
#[must_use]
pub fn issuer_of(now: &EpochMembers, subject: PermitSubject) -> Option<ReplicaId> {
    let seed = subject.user.0 ^ subject.tree.map_or(0, |root| root.0);
    let weight = |member: &ReplicaId| xxh3_64_with_seed(&[member.0], seed);
    now.members.iter().copied().max_by_key(weight)
}

/// Permits of one user or tree that a holder has and wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
pub struct PermitClaim {
    /// Whose permits they are.
    pub subject: PermitSubject,
    /// Number of permits that the holder has.
    pub held: u32,
    /// Number of permits that the holder wants in all, at least `held`.
    pub wanted: u32,
}

/// Claims of one holder, for users of one issuer.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub struct ClaimMessage {
    /// Epoch of the holder.
    pub epoch: Epoch,
    /// Number of the message, ascending within a session of the holder.
    pub number: u64,
    /// Whether the holder has no permits of the issuer's other users.
    pub is_complete: bool,
    /// The claims, at most one per user.
    pub claims: Vec<PermitClaim>,
}

/// An issuer's answer to claims.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub enum ClaimAnswer {
    /// The issuer is in another epoch, or has seen a later message.
    Ignored,
    /// The issuer has counted the claims.
    Counted {
        /// Number of permits that the holder has from now on, in the order of the claims.
        permits: Vec<u32>,
        /// Whether the issuer knows what all members hold. Before, it grants nothing.
        is_settled: bool,
    },
}

/// Maximum size of a decoded message, in bytes.
const MESSAGE_BYTES_MAX: usize = 4 << 20;

impl ClaimMessage {
    /// Returns the encoded message.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        encoding::to_bytes(self)
    }

    /// Decodes the output of [`ClaimMessage::to_bytes`]; `None` if it is malformed.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        encoding::from_bytes::<_, MESSAGE_BYTES_MAX>(bytes).ok()
    }
}

impl ClaimAnswer {
    /// Returns the encoded answer.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        encoding::to_bytes(self)
    }

    /// Decodes the output of [`ClaimAnswer::to_bytes`]; `None` if it is malformed.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        encoding::from_bytes::<_, MESSAGE_BYTES_MAX>(bytes).ok()
    }

    fn permits_len(&self) -> usize {
        match self {
            Self::Ignored => 0,
            Self::Counted { permits, .. } => permits.len(),
        }
    }
}
