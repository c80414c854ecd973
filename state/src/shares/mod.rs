//! Shares of a backend's limit: how many requests each replica may have running there.
//!
//! The load that replicas report is up to one exchange old, so replicas that compare it with a
//! limit would all fill the same free place. Here each replica owns *places*: the shares of all add
//! up to the limit, and a request starts only within the share of its replica. No replica has to
//! ask another one (O'Neil's escrow, 1986; the demarcation protocol of Barbará and Garcia-Molina,
//! 1992).
//!
//! A replica's share is an even part of the limit, plus what others handed to it, less what it
//! handed to others. Transfers are a matrix of numbers that only grow, in which each row is written
//! by one replica only (the bounded counter of Balegas et al., 2015). A replica sends its row
//! repeatedly: a lost, repeated or late report creates no places.
//!
//! The matrix belongs to an *epoch*: the set of replicas that hear each other, with their runs. A
//! replica that falls silent, comes back or restarts begins another epoch, with an even split and
//! nothing handed over. Rows of another epoch count for nothing. Until all members have reported
//! the same epoch, or for [`SILENT_MS`] at most, a replica uses no more than it had in the previous
//! one: two concurrent epochs do not add up to more places. Since epochs follow from which replicas
//! are heard, a replica that hears no other has the whole limit; in a partition each side has.
//!
//! [`ShareLedger`] is one replica's part of this: its inputs are the time, peers' reports and what
//! runs, its outputs what may run and which places to hand to which replica. It knows no clock and
//! sends nothing. docs/internals/limits.md describes the protocol, docs/adr/0047 the choice.

mod ledger;
mod members;
mod split;
#[cfg(test)]
mod tests;

pub use ledger::{Plan, ShareLedger};

use crate::ids::{BackendRef, ReplicaId, SessionId};

/// Silence after which a replica is no longer a member, in milliseconds. The time during which this
/// replica itself did not run does not count: it may have missed what it was told.
pub const SILENT_MS: u64 = 500;
/// The most that counts as time between two looks, in milliseconds.
pub const LOOK_MS_MAX: u64 = 50;
/// Requests that were started count as recent for this long at least, and twice as long at most.
const RECENT_MS: u64 = 500;

/// One run of a replica, as far as shares are concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Run {
    /// Its session.
    pub session: SessionId,
    /// How often it has seen other members than before. It distinguishes epochs of equal members.
    pub generation: u64,
}

/// Names an epoch: a hash of its members' runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Epoch(pub u64);

/// What one replica needs of one backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Demand {
    /// Requests that run there.
    pub running: u32,
    /// Requests that wait and would go there if there were places.
    pub waiting: u32,
    /// How long the one that goes next has waited, in milliseconds.
    pub waited_ms: u32,
    /// Requests started lately.
    pub recent: u32,
}

/// One replica at one backend, as it tells the others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlaceReport {
    /// The backend.
    pub backend: BackendRef,
    /// What it needs.
    pub demand: Demand,
    /// Places handed to each replica since the epoch began, by replica.
    pub given: Vec<(ReplicaId, u64)>,
}

/// What one replica tells the others of its shares.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShareReport {
    /// Who tells.
    pub run: Run,
    /// Number of the report within the run, ascending.
    pub number: u64,
    /// The epoch that what was handed over belongs to.
    pub epoch: Epoch,
    /// Whom it hears itself, by replica.
    pub heard: Vec<(ReplicaId, Run)>,
    /// By backend, ascending; what is left out is all zero.
    pub places: Vec<PlaceReport>,
}

impl ShareReport {
    fn place(&self, backend: BackendRef) -> Option<&PlaceReport> {
        let found = self.places.binary_search_by_key(&backend, |it| it.backend);
        found.ok().map(|at| &self.places[at])
    }

    fn has_heard(&self, replica: ReplicaId) -> bool {
        self.heard.iter().any(|(heard, _)| *heard == replica)
    }
}

impl PlaceReport {
    fn given_to(&self, replica: ReplicaId) -> u64 {
        let given = self.given.iter().filter(|(to, _)| *to == replica);
        given.map(|(_, places)| *places).sum()
    }
}
