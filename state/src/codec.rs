//! The wire form of commands and replies: a version byte, then bincode with a limit.

use crate::Undecodable;
use crate::command::{Envelope, Reply};

/// Encodes a command as one log entry's payload.
#[must_use]
pub fn encode_envelope(envelope: &Envelope) -> Vec<u8> {
    let _ = envelope;
    unimplemented!("state helper")
}

/// Decodes a log entry's payload.
///
/// # Errors
/// When it is not a command of a known version, exceeds the limit or has trailing bytes.
pub fn decode_envelope(bytes: &[u8]) -> Result<Envelope, Undecodable> {
    let _ = bytes;
    unimplemented!("state helper")
}

/// Encodes what applying a command answered.
#[must_use]
pub fn encode_reply(reply: &Reply) -> Vec<u8> {
    let _ = reply;
    unimplemented!("state helper")
}

/// Decodes what [`encode_reply`] wrote.
///
/// # Errors
/// As [`decode_envelope`].
pub fn decode_reply(bytes: &[u8]) -> Result<Reply, Undecodable> {
    let _ = bytes;
    unimplemented!("state helper")
}
