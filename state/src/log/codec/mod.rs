//! The wire form of commands and replies: a version byte, then bincode with a limit.
//!
//! Log entries live as long as the log does, so every format version stays readable and has golden
//! bytes. Versions only add kinds of commands and items, so one decoder reads them all. A command is
//! written with the version that brought its kind: a replica of an earlier build reads what it knows, and of
//! the rest it can tell which version it would need. What comes in is foreign: lengths are bounded before anything is allocated, trailing
//! bytes are refused, nothing recurses.

mod integers;
mod items;
mod kv;
mod replies;
#[cfg(test)]
mod tests;

use bincode::{Decode, Encode};

use super::command::{Command, Envelope, Item, Reply};
use crate::encoding::{append_bytes, from_bytes, to_bytes};
use crate::error::DecodeEntryError;

/// The newest version of commands. Their first byte is that of their kind, see [`format_of`].
pub const FORMAT_VERSION: u8 = 4;
/// The version that every build knows which may stand in one cluster with this one. Replies have it.
pub const FORMAT_VERSION_COMMON: u8 = 2;
/// The first version, which is still read.
const FORMAT_VERSION_FIRST: u8 = 1;
/// Longest encoded command, in bytes. Proposers stay far below it: an outbox flushes at 64 KiB and
/// the admin API bounds its bodies.
pub const ENVELOPE_BYTES_MAX: usize = 1 << 20;
/// Longest that what stands around a command is: version, origin and stamp.
const AROUND_BYTES_MAX: usize = 64;
/// What decoding may allocate, in bytes: well above what the densest envelope of
/// [`ENVELOPE_BYTES_MAX`] takes in memory, so that whatever can be encoded can be decoded.
const DECODE_BYTES_MAX: usize = 64 << 20;
/// The format version that a replica must know to apply `command`. Above [`FORMAT_VERSION_COMMON`] it
/// is to be proposed only when all members know it: a replica stops at a command it cannot read.
#[must_use]
pub fn format_of(command: &Command) -> u8 {
    match command {
        Command::BeginRestore { .. }
        | Command::RestorePart { .. }
        | Command::FinishRestore { .. }
        | Command::AbortRestore { .. } => 3,
        Command::FoundCluster { .. }
        | Command::ForgiveUser { .. }
        | Command::PaceTime
        | Command::SetUser { .. } => 4,
        Command::InitCluster { .. }
        | Command::Batch { .. }
        | Command::PutBackend(_)
        | Command::DeleteBackend { .. }
        | Command::SetDraining { .. }
        | Command::PutUser(_)
        | Command::PutPolicy(_)
        | Command::ExpireSession { .. }
        | Command::PutRouting(_)
        | Command::PutAdmission(_)
        | Command::PutUserLimits { .. }
        | Command::AssignReaders(_) => FORMAT_VERSION_COMMON,
    }
}

/// Encodes a command as one log entry's payload.
///
/// # Panics
/// When it is longer than [`ENVELOPE_BYTES_MAX`]: proposed, it would stop every replica.
#[must_use]
pub fn encode_envelope(envelope: &Envelope) -> Vec<u8> {
    let bytes = encode(format_of(&envelope.command), envelope);
    assert!(
        bytes.len() <= ENVELOPE_BYTES_MAX,
        "a command of {} bytes is above the limit of {ENVELOPE_BYTES_MAX}",
        bytes.len()
    );
    bytes
}

/// Whether `command` can be encoded as a log entry's payload, whoever proposes it.
#[must_use]
pub fn fits(command: &Command) -> bool {
    to_bytes(command).len() <= ENVELOPE_BYTES_MAX - AROUND_BYTES_MAX
}

/// Decodes a log entry's payload.
///
/// # Errors
/// When it is not a command of a known version, exceeds the limit or has trailing bytes.
pub fn decode_envelope(bytes: &[u8]) -> Result<Envelope, DecodeEntryError> {
    if bytes.len() > ENVELOPE_BYTES_MAX {
        let length = bytes.len();
        return Err(DecodeEntryError(format!(
            "{length} bytes, at most {ENVELOPE_BYTES_MAX} expected"
        )));
    }
    decode(bytes)
}

/// Bytes that `item` takes in a batch.
#[must_use]
pub fn item_bytes(item: &Item) -> usize {
    to_bytes(item).len()
}

/// Encodes what applying a command answered.
#[must_use]
pub fn encode_reply(reply: &Reply) -> Vec<u8> {
    encode(FORMAT_VERSION_COMMON, reply)
}

/// Decodes what [`encode_reply`] wrote.
///
/// # Errors
/// As [`decode_envelope`].
pub fn decode_reply(bytes: &[u8]) -> Result<Reply, DecodeEntryError> {
    decode(bytes)
}

fn encode<T: Encode>(version: u8, value: &T) -> Vec<u8> {
    let mut bytes = vec![version];
    append_bytes(value, &mut bytes);
    bytes
}

fn decode<T: Decode<()>>(bytes: &[u8]) -> Result<T, DecodeEntryError> {
    match bytes.split_first() {
        Some((FORMAT_VERSION_FIRST..=FORMAT_VERSION, payload)) => {
            from_bytes::<T, DECODE_BYTES_MAX>(payload).map_err(DecodeEntryError)
        }
        Some((version, _)) => Err(DecodeEntryError(format!(
            "format version {version}, {FORMAT_VERSION} or an earlier one expected"
        ))),
        None => Err(DecodeEntryError("no bytes".to_owned())),
    }
}
