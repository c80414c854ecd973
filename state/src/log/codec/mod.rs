//! Encoding of commands and replies: a version byte, then bincode with a size limit.
//!
//! Entries live as long as the log does, so every format version stays readable and has golden
//! bytes in the tests. Versions only add to the format, so one decoder reads them all. A command is
//! written with the version that its content requires ([`format_of`]): an earlier build reads the
//! commands that it knows, and can report which version it would need for the others.
//!
//! Input is untrusted: lengths are bounded before anything is allocated, trailing bytes are
//! rejected, and nothing recurses.

mod integers;
mod items;
mod kv;
mod replies;
#[cfg(test)]
mod tests;

use bincode::{Decode, Encode};

use super::command::{BackendRole, Command, Envelope, Item, Reply};
use crate::encoding::{append_bytes, from_bytes, to_bytes};
use crate::error::DecodeEntryError;

/// Newest format version of commands. The first byte of a command is the version of its kind, see
/// [`format_of`].
pub const FORMAT_VERSION: u8 = 10;
/// Format version known to every build that can share a cluster with this one. Replies use it.
pub const FORMAT_VERSION_COMMON: u8 = 2;
/// Oldest format version that this build can read.
const FORMAT_VERSION_FIRST: u8 = 1;
/// Maximum length of an encoded command, in bytes. Proposers stay far below it: an outbox flushes
/// at 64 KiB, and the admin API limits its bodies.
pub const ENVELOPE_BYTES_MAX: usize = 1 << 20;
/// Maximum length of the envelope around a command, in bytes: version, origin and stamp.
const AROUND_BYTES_MAX: usize = 64;
/// Allocation limit for decoding, in bytes. It is well above what the densest envelope of
/// [`ENVELOPE_BYTES_MAX`] takes in memory, so that every encoded command can be decoded.
const DECODE_BYTES_MAX: usize = 64 << 20;
/// Returns the format version needed to apply `command`. A replica stops at a command that it
/// cannot decode, so one above [`FORMAT_VERSION_COMMON`] may only be proposed once all members know
/// that version.
#[must_use]
pub fn format_of(command: &Command) -> u8 {
    match command {
        Command::SetRanks { .. } | Command::Discover(_) => 10,
        Command::PutBackend(spec) if spec.role != BackendRole::Both => 8,
        Command::PutUserDefaults(_) => 8,
        Command::SetCacheScope { .. } => 7,
        // The backup to restore may be of any version that this build reads.
        Command::BeginRestore { .. } => FORMAT_VERSION,
        Command::RevokeKey { .. } | Command::ConfigureUser(_) => 6,
        Command::CreateKey(_) | Command::RotateKey { .. } => 5,
        Command::RestorePart { .. }
        | Command::FinishRestore { .. }
        | Command::AbortRestore { .. } => 3,
        Command::ForgiveUser { .. }
        | Command::PaceTime
        | Command::SetUser { .. }
        | Command::DeleteUser { .. } => 4,
        Command::Batch { items, .. } if items.iter().any(is_of_version_10) => 10,
        Command::Batch { items, .. } if items.iter().any(is_of_version_4) => 4,
        Command::PutBackend(spec) if spec.has_newer_url() => 4,
        Command::Found(_)
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

/// Whether version 10 introduced the kind of `item`.
fn is_of_version_10(item: &Item) -> bool {
    matches!(item, Item::ObserveBelief(_))
}

/// Whether version 4 introduced the kind of `item`.
fn is_of_version_4(item: &Item) -> bool {
    matches!(item, Item::ObserveText(_) | Item::ObserveBlockSize { .. })
}

/// Encodes a command as the payload of a log entry.
///
/// # Panics
/// If the result is longer than [`ENVELOPE_BYTES_MAX`]: such an entry would stop every replica.
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

/// Whether the encoded `command` fits into a log entry, whatever its origin.
#[must_use]
pub fn fits(command: &Command) -> bool {
    to_bytes(command).len() <= ENVELOPE_BYTES_MAX - AROUND_BYTES_MAX
}

/// Decodes the payload of a log entry.
///
/// # Errors
/// If `bytes` is not a command of a known version, is too long or has trailing bytes.
pub fn decode_envelope(bytes: &[u8]) -> Result<Envelope, DecodeEntryError> {
    if bytes.len() > ENVELOPE_BYTES_MAX {
        let length = bytes.len();
        return Err(DecodeEntryError(format!(
            "{length} bytes, at most {ENVELOPE_BYTES_MAX} expected"
        )));
    }
    decode(bytes)
}

/// Returns the length of the encoded `item` in a batch, in bytes.
#[must_use]
pub fn item_bytes(item: &Item) -> usize {
    to_bytes(item).len()
}

/// Encodes a reply as the result of a log entry.
#[must_use]
pub fn encode_reply(reply: &Reply) -> Vec<u8> {
    encode(FORMAT_VERSION_COMMON, reply)
}

/// Decodes a reply that [`encode_reply`] encoded.
///
/// # Errors
/// If `bytes` is not a reply of a known version or has trailing bytes.
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
