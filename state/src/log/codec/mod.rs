//! Encoding of commands and replies: a version byte, then bincode with a size limit.
//!
//! Entries live as long as the log does, so every format version stays readable and has golden
//! bytes in the tests. Versions only add to the format, so one decoder reads them all. A command is
//! written with the version that its content requires ([`format_of`]): an earlier build reads the
//! commands that it knows, and can report which version it would need for the others. ADR 0004
//! describes how a format is added.
//!
//! The feature `planted` rehearses that: its builds count some commands as one format newer, so
//! that simulations roll out a newer format among builds that do not know it.
//!
//! Input is untrusted: lengths are bounded before anything is allocated, trailing bytes are
//! rejected, and nothing recurses.

mod integers;
mod items;
mod kv;
mod replies;
#[cfg(test)]
mod shape_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod value_tests;

use bincode::{Decode, Encode};

use super::command::{Command, Envelope, Item, Reply};
use crate::encoding::{append_bytes, from_bytes, to_bytes};
use crate::error::DecodeEntryError;

/// Format version that every build knows. Replies use it.
pub const FORMAT_VERSION_FIRST: u8 = 1;
/// Newest format version of commands. The first byte of a command is the version of its content,
/// see [`format_of`].
pub const FORMAT_VERSION: u8 = FORMAT_VERSION_FIRST + cfg!(feature = "planted") as u8;
/// Maximum length of an encoded command, in bytes. Proposers stay far below it: an outbox flushes
/// at 64 KiB, and the admin API limits its bodies.
pub const ENVELOPE_BYTES_MAX: usize = 1 << 20;
/// Maximum length of the envelope around a command, in bytes: version, origin and stamp.
const AROUND_BYTES_MAX: usize = 64;
/// Allocation limit for decoding, in bytes. It is well above what the densest envelope of
/// [`ENVELOPE_BYTES_MAX`] takes in memory, so that every encoded command can be decoded.
const DECODE_BYTES_MAX: usize = 64 << 20;
/// Returns the format version needed to apply `command`. A replica stops at a command that it
/// cannot decode, so one above [`FORMAT_VERSION_FIRST`] may only be proposed once all members know
/// that version. It follows from everything inside the command: one that contains a policy which
/// format 2 added is of format 2.
#[must_use]
pub fn format_of(command: &Command) -> u8 {
    FORMAT_VERSION_FIRST + u8::from(is_rehearsed(command))
}

/// Whether `command` counts as one of the next format, in builds that rehearse it: a whole command
/// and a policy, as if it had just been appended to the policies.
#[cfg(feature = "planted")]
fn is_rehearsed(command: &Command) -> bool {
    use crate::policy::PolicyConfig;
    matches!(
        command,
        Command::ForgiveUser { .. } | Command::PutPolicy(PolicyConfig::PrebleE2(_))
    )
}

#[cfg(not(feature = "planted"))]
fn is_rehearsed(_command: &Command) -> bool {
    false
}

/// Returns the format version of an encoded command, without decoding it.
///
/// # Errors
/// If `bytes` are none of a command.
pub fn encoded_format(bytes: &[u8]) -> Result<u8, DecodeEntryError> {
    match bytes.first() {
        Some(version @ FORMAT_VERSION_FIRST..) => Ok(*version),
        Some(version) => Err(unknown_version(*version)),
        None => Err(DecodeEntryError("no bytes".to_owned())),
    }
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
    encode(FORMAT_VERSION_FIRST, reply)
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
    match encoded_format(bytes)? {
        ..=FORMAT_VERSION => {
            from_bytes::<T, DECODE_BYTES_MAX>(&bytes[1..]).map_err(DecodeEntryError)
        }
        version => Err(unknown_version(version)),
    }
}

fn unknown_version(version: u8) -> DecodeEntryError {
    DecodeEntryError(format!(
        "format version {version}, one up to {FORMAT_VERSION} expected"
    ))
}
