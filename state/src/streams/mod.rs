//! Resumable streams: what is charged for each, and who carries it.
//!
//! A client whose router fails goes on with its stream at another replica. The text is the client's;
//! the log only remembers what the answer has cost so far, so that it is charged once. A stream has
//! one *carrier*: the request, at one replica, that relays it. Each charge names its stream and
//! carrier. It reaches the user and the record of the stream in the same step, unless another request
//! has taken the stream over: then the charge is void, because the new carrier has begun with what
//! the record showed, and charges the rest of the answer.
//!
//! A take-over names an epoch, one above that which its proposer sees, and fails if the record has
//! reached it. So one that was given up, and is applied late, takes nothing from its successor, which
//! tries again with a higher epoch if it comes second.
//!
//! A record is kept for [`STREAM_IDLE_MS`] after its last use. There are at most [`STREAMS_MAX`]. The
//! one unused for longest makes room: of all users, or of the one with the most streams if that one
//! holds a sixteenth of them. A stream without a record is charged from its beginning.
//! Records belong to a user, so nobody can touch another's.

mod table;
#[cfg(test)]
mod tests;

use bincode::{Decode, Encode};

use crate::charge::Charge;
use crate::cow::PathKey;
use crate::ids::{StreamCarrier, StreamId, UserKey};
use crate::trees::{SessionTurn, TurnUsage};

pub use table::StreamsView;
pub(crate) use table::{StreamTable, StreamVerdict};

/// Maximum number of streams with a record.
pub const STREAMS_MAX: usize = 65_536;
/// Time after its last use at which the record of a stream is forgotten, in milliseconds: 10
/// minutes.
pub const STREAM_IDLE_MS: u64 = 10 * 60 * 1000;

/// A resumable stream of a user.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Encode, Decode)]
pub struct StreamKey {
    /// The stream. Its hash places it, so it comes first.
    pub stream: StreamId,
    /// User who pays for it.
    pub user: UserKey,
}

impl PathKey for StreamKey {
    // Ids are hashes, hence uniform.
    fn path(&self) -> u64 {
        self.stream.0
    }
}

/// A stream, and the request that carries it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct CarriedStream {
    /// The stream.
    pub stream: StreamId,
    /// The request.
    pub carrier: StreamCarrier,
}

/// Usage of a resumable stream since its carrier's last flush.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamCharge {
    /// The stream, with the carrier that charges.
    pub carried: CarriedStream,
    /// Epoch in which the carrier takes the stream over from whoever carries it; `None` if it carries
    /// the stream already.
    pub takes_over: Option<u32>,
    /// Whether the unused part of the advance has become credit of the user.
    pub is_closed: bool,
    /// Usage of the user.
    pub charge: Charge,
    /// End of the session's turn that the stream is, with the usage of the whole answer.
    pub turn: Option<SessionTurn>,
}

impl StreamCharge {
    /// Returns a charge of `user` without usage.
    #[must_use]
    pub fn empty(user: UserKey, carried: CarriedStream) -> Self {
        Self {
            carried,
            takes_over: None,
            is_closed: false,
            charge: Charge {
                user,
                ..Charge::default()
            },
            turn: None,
        }
    }

    /// Returns the key of the stream.
    #[must_use]
    pub fn key(&self) -> StreamKey {
        StreamKey {
            stream: self.carried.stream,
            user: self.charge.user,
        }
    }
}

/// Record of a stream, as of one applied index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
pub struct StreamRecord {
    /// The request that carries the stream.
    pub carrier: StreamCarrier,
    /// Epoch in which it took the stream over; 0 for the first one.
    pub epoch: u32,
    /// Tokens charged for the answer.
    pub charged: TurnUsage,
    /// Priced tokens that were charged in advance and are not used.
    pub advance: u64,
    /// Usage with which the session's turn has ended; `None` before.
    pub turn: Option<TurnUsage>,
    /// Time of the last charge, in replicated milliseconds.
    pub used_ms: u64,
}
