//! The wire form of commands and replies: a version byte, then bincode with a limit.
//!
//! Log entries live as long as the log does, so every format version stays readable and has golden
//! bytes. What comes in is foreign: lengths are bounded before anything is allocated, trailing
//! bytes are refused, nothing recurses.

mod items;
mod replies;
#[cfg(test)]
mod tests;

use bincode::{Decode, Encode};

use crate::Undecodable;
use crate::command::{Envelope, Reply};

/// First byte of every encoded command and reply.
pub const FORMAT_VERSION: u8 = 1;
/// Longest encoded command, in bytes. Proposers stay far below it: an outbox flushes at 64 KiB and
/// the admin API bounds its bodies.
pub const ENVELOPE_BYTES_MAX: usize = 1 << 20;
/// What decoding may allocate, in bytes: well above what the densest envelope of
/// [`ENVELOPE_BYTES_MAX`] takes in memory, so that whatever can be encoded can be decoded.
const DECODE_BYTES_MAX: usize = 64 << 20;
/// What decoding one section of a snapshot may allocate, in bytes.
pub(crate) const SECTION_BYTES_MAX: usize = 256 << 20;

/// Encodes a command as one log entry's payload.
///
/// # Panics
/// When it is longer than [`ENVELOPE_BYTES_MAX`]: proposed, it would stop every replica.
#[must_use]
pub fn encode_envelope(envelope: &Envelope) -> Vec<u8> {
    let bytes = encode(envelope);
    assert!(
        bytes.len() <= ENVELOPE_BYTES_MAX,
        "a command of {} bytes is above the limit of {ENVELOPE_BYTES_MAX}",
        bytes.len()
    );
    bytes
}

/// Decodes a log entry's payload.
///
/// # Errors
/// When it is not a command of a known version, exceeds the limit or has trailing bytes.
pub fn decode_envelope(bytes: &[u8]) -> Result<Envelope, Undecodable> {
    if bytes.len() > ENVELOPE_BYTES_MAX {
        let length = bytes.len();
        return Err(Undecodable(format!(
            "{length} bytes, at most {ENVELOPE_BYTES_MAX} expected"
        )));
    }
    decode(bytes)
}

/// Encodes what applying a command answered.
#[must_use]
pub fn encode_reply(reply: &Reply) -> Vec<u8> {
    encode(reply)
}

/// Decodes what [`encode_reply`] wrote.
///
/// # Errors
/// As [`decode_envelope`].
pub fn decode_reply(bytes: &[u8]) -> Result<Reply, Undecodable> {
    decode(bytes)
}

/// Canonical bytes of a part of the state, for hashes and snapshots: no version byte.
pub(crate) fn to_bytes<T: Encode>(value: &T) -> Vec<u8> {
    let mut bytes = Vec::new();
    append_bytes(value, &mut bytes);
    bytes
}

/// Appends what [`to_bytes`] gives to `bytes`, for callers that keep a buffer.
pub(crate) fn append_bytes<T: Encode>(value: &T, bytes: &mut Vec<u8>) {
    bincode::encode_into_std_write(value, bytes, bincode::config::standard())
        .expect("encoding into memory cannot fail");
}

/// Reads what [`to_bytes`] wrote; says what is wrong otherwise. `LIMIT` is what may be allocated.
pub(crate) fn from_bytes<T: Decode<()>, const LIMIT: usize>(bytes: &[u8]) -> Result<T, String> {
    let config = bincode::config::standard().with_limit::<LIMIT>();
    let (value, read) =
        bincode::decode_from_slice(bytes, config).map_err(|error| error.to_string())?;
    if read == bytes.len() {
        return Ok(value);
    }
    Err(format!(
        "{} trailing bytes after byte {read}",
        bytes.len() - read
    ))
}

fn encode<T: Encode>(value: &T) -> Vec<u8> {
    let mut bytes = vec![FORMAT_VERSION];
    append_bytes(value, &mut bytes);
    bytes
}

fn decode<T: Decode<()>>(bytes: &[u8]) -> Result<T, Undecodable> {
    match bytes.split_first() {
        Some((&FORMAT_VERSION, payload)) => {
            from_bytes::<T, DECODE_BYTES_MAX>(payload).map_err(Undecodable)
        }
        Some((version, _)) => Err(Undecodable(format!(
            "format version {version}, {FORMAT_VERSION} expected"
        ))),
        None => Err(Undecodable("no bytes".to_owned())),
    }
}
