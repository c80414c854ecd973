//! Payloads of the archive: records of requests, and marks of how far a peer's records are here.
//!
//! A payload is its kind, the id of the replica that it concerns, and eight bytes: of a record the
//! hash of the request id, of a mark the peer's place. The record follows, as bincode. A build that
//! changes a record's fields gives it another kind, and ignores payloads of kinds it does not know.

use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, OnceLock};

use bincode::de::Decoder;
use bincode::enc::Encoder;
use bincode::error::{DecodeError, EncodeError};
use bincode::{Decode, Encode};
use state::ids::ReplicaId;
use tokio::time::Instant;
use xxhash_rust::xxh3::xxh3_64;

use crate::base::label::Label;
use crate::files::ring::{PAYLOAD_BYTES_MAX, RingPosition};
use crate::proxy::record::request_record::{RequestEnd, RequestRecord};
use crate::proxy::request::identify::UserSource;
use crate::routing::UserName;

/// Kind of a record's payload. Another layout needs another kind.
const RECORD: u8 = 3;
/// Kind of a mark's payload.
const MARK: u8 = 2;
/// Memory that a record may take while it is read, in bytes.
const RECORD_BYTES_MAX: usize = 16 * PAYLOAD_BYTES_MAX;

/// A payload without its record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PayloadHead {
    /// The record of a request that this replica received.
    Record { replica: ReplicaId, id_hash: u64 },
    /// The records of this peer are here up to this place of its archive.
    Mark { peer: ReplicaId, at: RingPosition },
}

impl PayloadHead {
    /// Reads the head of a payload, and returns it with the rest; `None` if the kind is unknown.
    pub(super) fn read(payload: &[u8]) -> Option<(Self, &[u8])> {
        let [kind, replica, rest @ ..] = payload else {
            return None;
        };
        let (number, rest) = rest.split_first_chunk()?;
        let (replica, number) = (ReplicaId(*replica), u64::from_le_bytes(*number));
        let head = match *kind {
            RECORD => Self::Record {
                replica,
                id_hash: number,
            },
            MARK => Self::Mark {
                peer: replica,
                at: RingPosition(number),
            },
            _ => return None,
        };
        Some((head, rest))
    }

    /// Appends the head to `payload`.
    pub(super) fn write(self, payload: &mut Vec<u8>) {
        let (kind, replica, number) = match self {
            Self::Record { replica, id_hash } => (RECORD, replica, id_hash),
            Self::Mark { peer, at } => (MARK, peer, at.0),
        };
        payload.extend([kind, replica.0]);
        payload.extend(number.to_le_bytes());
    }
}

/// Appends the payload of `record` to `payload`.
pub(super) fn write(record: &RequestRecord, payload: &mut Vec<u8>) {
    let head = PayloadHead::Record {
        replica: record.replica,
        id_hash: xxh3_64(record.id.as_bytes()),
    };
    head.write(payload);
    bincode::encode_into_std_write(record, payload, bincode::config::standard())
        .expect("encoding into memory cannot fail");
}

/// Reads a record's payload; `None` if it is none, or damaged.
pub(super) fn read(payload: &[u8]) -> Option<RequestRecord> {
    let (head, bytes) = PayloadHead::read(payload)?;
    let config = bincode::config::standard().with_limit::<RECORD_BYTES_MAX>();
    match head {
        PayloadHead::Record { .. } => {
            let (record, length) = bincode::decode_from_slice(bytes, config).ok()?;
            (length == bytes.len()).then_some(record)
        }
        PayloadHead::Mark { .. } => None,
    }
}

impl Encode for RequestRecord {
    fn encode<E: Encoder>(&self, encoder: &mut E) -> Result<(), EncodeError> {
        let Self {
            number,
            replica,
            id,
            path,
            model,
            requested,
            user,
            user_source,
            session,
            labels,
            priority,
            deadline,
            tokens_max,
            is_stream,
            is_resumed,
            unit,
            tokens,
            blocks,
            matchable,
            tokens_per_block,
            marks: _,
            at_ms,
            since: _,
            attempts: _,
            end,
            is_archived: _,
        } = self;
        (number, replica, id, path, model, requested, user.as_str()).encode(encoder)?;
        (user_source.text(), session, labels, priority, deadline).encode(encoder)?;
        (tokens_max, is_stream, is_resumed).encode(encoder)?;
        (unit, tokens, blocks).encode(encoder)?;
        (matchable, tokens_per_block, at_ms).encode(encoder)?;
        self.attempts().encode(encoder)?;
        let end = end.get().map(|end| {
            let code = end.code.map(Label);
            (Label(end.outcome), end.status, code, end.after)
        });
        end.encode(encoder)
    }
}

impl<C> Decode<C> for RequestRecord {
    fn decode<D: Decoder<Context = C>>(decoder: &mut D) -> Result<Self, DecodeError> {
        let (number, replica, id, path, model, requested, user) = Decode::decode(decoder)?;
        let (user_source, session, labels, priority, deadline) = Decode::decode(decoder)?;
        let (tokens_max, is_stream, is_resumed) = Decode::decode(decoder)?;
        let (unit, tokens, blocks) = Decode::decode(decoder)?;
        let (matchable, tokens_per_block, at_ms) = Decode::decode(decoder)?;
        let attempts = Decode::decode(decoder)?;
        let (user, user_source): (String, Label) = (user, user_source);
        let end: Option<(Label, u16, Option<Label>, _)> = Decode::decode(decoder)?;
        let end = end.map(|(outcome, status, code, after)| RequestEnd {
            outcome: outcome.0,
            status,
            code: code.map(|code| code.0),
            after,
        });
        Ok(Self {
            number,
            replica,
            id,
            path,
            model,
            requested,
            user: UserName::bounded(user),
            user_source: UserSource::Stored(user_source.0),
            session,
            labels,
            priority,
            deadline,
            tokens_max,
            is_stream,
            is_resumed,
            unit,
            tokens,
            blocks,
            matchable,
            tokens_per_block,
            marks: Box::default(),
            at_ms,
            since: Instant::now(),
            attempts: Mutex::new(attempts),
            end: end.map_or_else(OnceLock::new, OnceLock::from),
            is_archived: AtomicBool::new(true),
        })
    }
}

bincode::impl_borrow_decode!(RequestRecord);
