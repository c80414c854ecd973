//! Canonical bytes of parts of the state: what digests hash, and what snapshots and commands hold.

use bincode::{Decode, Encode};

/// What decoding one section of a snapshot may allocate, in bytes.
pub(crate) const SECTION_BYTES_MAX: usize = 256 << 20;

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
