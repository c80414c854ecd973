//! Messages of the simulated network.

use tonic::Status;

use super::body::{BodyPiece, WholeBody};

/// One end of a connection or call.
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

/// How an answer's body comes.
pub(super) enum BodyPart {
    Whole(WholeBody),
    Pieces,
}

/// What a server answers.
pub(super) enum CallAnswer {
    Is(Box<http::response::Parts>, BodyPart),
    Broken(Status),
}

/// A message on its way.
pub(super) enum Packet {
    /// A client asks for a connection.
    Open { connection: u64 },
    /// Whether it has one.
    Opened { connection: u64, refused: bool },
    /// The other side's process is gone; `side` learns it.
    Reset { connection: u64, side: CallSide },
    /// A connection breaks: found out by both sides at once.
    Break { connection: u64 },
    /// `side` finds its connection broken by itself.
    Broken { connection: u64, side: CallSide },
    /// A call begins.
    Request {
        call: u64,
        to: u8,
        connection_run: Option<u64>,
        head: Box<http::request::Parts>,
        /// `None`: it comes in pieces.
        body: Option<WholeBody>,
        is_repeat: bool,
    },
    /// The answer to a call.
    Response { call: u64, answer: Box<CallAnswer> },
    /// A part of a stream, for `side`.
    Piece {
        call: u64,
        side: CallSide,
        piece: BodyPiece,
    },
    /// The client has lost interest.
    Cancel { call: u64 },
}

/// A packet and when it arrives.
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
    /// Whose process takes it.
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

    /// Whether it is answered without the process.
    pub(super) fn is_for_kernel(&self) -> bool {
        matches!(self, Self::Open { .. })
    }

    /// The direction of a call within which packets keep their order.
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

    /// The same call once more, if it is one that can be repeated.
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
        // Extensions hold what the sender keeps for itself.
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

/// Whether the client's messages come one by one.
pub(super) fn is_request_stream(path: &str) -> bool {
    path.ends_with("/InstallSnapshot") || path.ends_with("/Messages")
}

/// Whether the server's messages come one by one.
pub(super) fn is_answer_stream(path: &str) -> bool {
    path.ends_with("/FetchState") || path.ends_with("/Messages")
}
