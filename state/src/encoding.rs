//! Canonical encoding of parts of the state, used by digests, snapshots and commands.

use bincode::{Decode, Encode};

/// Allocation limit for decoding one section of a snapshot, in bytes.
pub(crate) const SECTION_BYTES_MAX: usize = 256 << 20;

/// Encodes a part of the state canonically, without a version byte.
pub(crate) fn to_bytes<T: Encode>(value: &T) -> Vec<u8> {
    let mut bytes = Vec::new();
    append_bytes(value, &mut bytes);
    bytes
}

/// Appends the encoding that [`to_bytes`] returns to `bytes`, a buffer that the caller reuses.
pub(crate) fn append_bytes<T: Encode>(value: &T, bytes: &mut Vec<u8>) {
    bincode::encode_into_std_write(value, bytes, bincode::config::standard())
        .expect("encoding into memory cannot fail");
}

/// Encodes `items` in pieces of at most `items_max`, each as [`to_bytes`] encodes a list.
pub(crate) fn pieces<T: Encode>(
    items: impl Iterator<Item = T>,
    items_max: usize,
) -> impl Iterator<Item = Vec<u8>> {
    let mut items = items.peekable();
    std::iter::from_fn(move || {
        items.peek()?;
        let piece: Vec<T> = items.by_ref().take(items_max).collect();
        Some(to_bytes(&piece))
    })
}

/// Decodes the output of [`to_bytes`], without trailing bytes. `LIMIT` bounds the allocation, in
/// bytes. An error describes the fault.
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
