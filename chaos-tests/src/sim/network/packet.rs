//! Packets of the simulated network.

use tonic::Status;

use super::body::{BodyPiece, WholeBody};

/// Side of a connection or call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CallSide {
    Client,
    Server,
}

impl CallSide {
    pub(super) fn other(self) -> Self {
        match self {
            Self::Client => Self::Server,
            Self::Server => Self::Client,
        }
    }
}

/// Way in which the body of a response is sent.
pub(super) enum BodyPart {
    Whole(WholeBody),
    Pieces,
}

/// Response of a server, or the error of a broken connection.
pub(super) enum CallAnswer {
    Is(Box<http::response::Parts>, BodyPart),
    Broken(Status),
}

/// A message of the network on its way.
pub(super) enum Packet {
    /// A client opens a connection.
    Open { connection: u64 },
    /// The other host has accepted or refused the connection.
    Opened { connection: u64, refused: bool },
    /// The other side's process is gone, of which `side` is notified.
    Reset { connection: u64, side: CallSide },
    /// A connection breaks on both sides at once, in the middle of its transfers.
    Break { connection: u64 },
    /// `side` detects that its connection is broken.
    Broken { connection: u64, side: CallSide },
    /// A client begins a call.
    Request {
        call: u64,
        to: u8,
        connection_run: Option<u64>,
        head: Box<http::request::Parts>,
        /// Complete body of the request; `None` if it is streamed.
        body: Option<WholeBody>,
        is_repeat: bool,
    },
    /// The server responds to a call.
    Response { call: u64, answer: Box<CallAnswer> },
    /// A piece of a streamed body arrives at `side`.
    Piece {
        call: u64,
        side: CallSide,
        piece: BodyPiece,
    },
    /// The client has dropped a call.
    Cancel { call: u64 },
}

/// A packet with the time of its arrival.
pub(super) struct PlannedPacket {
    pub(super) due_us: u64,
    pub(super) order: u64,
    pub(super) packet: Packet,
}

impl PartialEq for PlannedPacket {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for PlannedPacket {}

impl PartialOrd for PlannedPacket {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for PlannedPacket {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.due_us, self.order).cmp(&(other.due_us, other.order))
    }
}

impl Packet {
    /// Returns the side whose process receives the packet; `None` if both do.
    pub(super) fn side(&self) -> Option<CallSide> {
        match self {
            Self::Open { .. } | Self::Request { .. } | Self::Cancel { .. } => {
                Some(CallSide::Server)
            }
            Self::Opened { .. } | Self::Response { .. } => Some(CallSide::Client),
            Self::Reset { side, .. } | Self::Broken { side, .. } | Self::Piece { side, .. } => {
                Some(*side)
            }
            Self::Break { .. } => None,
        }
    }

    /// Returns whether the host's kernel handles the packet without the process.
    pub(super) fn is_for_kernel(&self) -> bool {
        matches!(self, Self::Open { .. })
    }

    /// Returns the direction of a call within which packets keep their order.
    pub(super) fn ordered_in(&self) -> Option<(u64, CallSide)> {
        match self {
            Self::Request { call, .. } | Self::Cancel { call } => Some((*call, CallSide::Server)),
            Self::Response { call, .. } => Some((*call, CallSide::Client)),
            Self::Piece { call, side, .. } => Some((*call, *side)),
            Self::Open { .. }
            | Self::Opened { .. }
            | Self::Reset { .. }
            | Self::Break { .. }
            | Self::Broken { .. } => None,
        }
    }

    /// Returns the packet as a repeated call; `None` if it is no call or streams its body.
    pub(super) fn repeat(&self) -> Option<Self> {
        let Self::Request {
            call,
            to,
            connection_run,
            head,
            body: Some(body),
            ..
        } = self
        else {
            return None;
        };
        // Extensions are local to the sender.
        let mut copy = http::Request::new(()).into_parts().0;
        copy.method = head.method.clone();
        copy.uri = head.uri.clone();
        copy.version = head.version;
        copy.headers = head.headers.clone();
        Some(Self::Request {
            call: *call,
            to: *to,
            connection_run: *connection_run,
            head: Box::new(copy),
            body: Some(body.clone()),
            is_repeat: true,
        })
    }
}

/// Returns whether the client streams its messages in calls of this path.
pub(super) fn is_request_stream(path: &str) -> bool {
    path.ends_with("/InstallSnapshot") || path.ends_with("/Messages")
}

/// Returns whether the server streams its messages in calls of this path.
pub(super) fn is_answer_stream(path: &str) -> bool {
    path.ends_with("/FetchState") || path.ends_with("/Messages")
}
