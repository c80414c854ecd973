//! Shares of a backend's limit: how many requests each replica may run there.
//!
//! The load that replicas report is up to one exchange old, so replicas that compare it with a
//! limit would all fill the same free place. Instead, each replica owns *places*: all shares add up
//! to the limit, and a request starts only within its replica's share. No replica has to ask
//! another one (O'Neil's escrow, 1986; the demarcation protocol of Barbará and Garcia-Molina,
//! 1992).
//!
//! A replica's share is an even part of the limit, plus what others handed to it, less what it
//! handed to others. Transfers are a matrix of numbers that only grow; each replica writes only its
//! own row (the bounded counter of Balegas et al., 2015). A replica sends its row repeatedly: a
//! lost, repeated or late report creates no places.
//!
//! The matrix belongs to an *epoch*: the set of replicas that hear each other, with their runs. A
//! replica that falls silent, returns or restarts starts another epoch, with an even split and
//! nothing handed over. Rows of another epoch do not count. Until all members have reported the
//! same epoch, or for at most [`SILENT_MS`], a replica uses no more than it had in the previous
//! one. Two concurrent epochs therefore do not add up to more places. Since epochs follow from
//! which replicas are heard, an isolated replica has the whole limit; in a partition each side has.
//!
//! [`ShareLedger`] is one replica's part of this. Its inputs are the time, peers' reports and the
//! running requests; its outputs are what may run and which places to hand to which replica. It
//! reads no clock and sends nothing. docs/internals/limits.md describes the protocol, docs/adr/0032
//! the choice.

mod ledger;
mod members;
mod split;
#[cfg(test)]
mod tests;

pub use ledger::{ShareLedger, TransferPlan};

use bincode::{Decode, Encode};

use crate::ids::{BackendRef, ReplicaId, SessionId};

/// Silence after which a replica is no longer a member, in milliseconds. Time during which this
/// replica itself did not run does not count: it may have missed reports.
pub const SILENT_MS: u64 = 500;
/// Maximum time that counts between two calls of [`ShareLedger::advance_time`], in milliseconds.
/// The replica counts as suspended during the rest.
pub const LOOK_MS_MAX: u64 = 50;
/// Time for which a started request counts as recent, in milliseconds. The actual time is between
/// this and twice this.
const RECENT_MS: u64 = 500;

/// One run of a replica, by which epochs tell members apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Run {
    /// Session of the replica.
    pub session: SessionId,
    /// Number of times that the replica's members have changed. Distinguishes epochs with the same
    /// members.
    pub generation: u64,
}

/// Identifier of an epoch: a hash of its members' runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Encode, Decode)]
pub struct Epoch(pub u64);

/// Members of an epoch, as one replica knows them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct EpochMembers {
    /// Identifier of the epoch.
    pub epoch: Epoch,
    /// All members, including this replica, ascending.
    pub members: Vec<ReplicaId>,
    /// Whether this replica knows that all members are in this epoch, or has waited long enough for
    /// it.
    pub is_settled: bool,
    /// Time during which this replica was awake, in milliseconds.
    pub awake_ms: u64,
}

/// Demand of one replica at one backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Demand {
    /// Number of requests that the replica runs at the backend.
    pub running: u32,
    /// Number of requests that wait at the replica and could go to the backend if it had places.
    pub waiting: u32,
    /// Time that the replica's next request has waited, in milliseconds.
    pub waited_ms: u32,
    /// Number of requests that the replica started recently at the backend.
    pub recent: u32,
}

/// Report of one replica about one backend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlaceReport {
    /// Backend that the report describes.
    pub backend: BackendRef,
    /// The replica's demand at the backend.
    pub demand: Demand,
    /// Number of places handed to each replica since the epoch began, ascending by replica.
    pub given: Vec<(ReplicaId, u64)>,
}

/// Report of one replica about all its shares.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShareReport {
    /// Run of the sending replica.
    pub run: Run,
    /// Number of the report within the run, ascending.
    pub number: u64,
    /// Epoch to which the transfers in `places` belong.
    pub epoch: Epoch,
    /// Replicas that the sender hears, with their runs, ascending by replica.
    pub heard: Vec<(ReplicaId, Run)>,
    /// Reports by backend, ascending. For a backend without one, all figures are zero.
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
