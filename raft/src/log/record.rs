//! On-disk layout of a log entry.
//!
//! ```text
//! version  1 byte   1
//! crc      4 bytes  CRC-32 (IEEE), little-endian, over index (8 bytes, little-endian) and body
//! length   4 bytes  of the body, little-endian
//! body              the entry as protobuf
//! ```
//!
//! The checksum covers the index, so a record under the wrong key counts as damaged. The length
//! distinguishes a complete record from one that lost its last parts.

use prost::Message;

use crate::types::Entry;
use crate::wire::proto;

const VERSION: u8 = 1;
/// Length of a record's head, in bytes.
pub(crate) const HEAD_BYTES: usize = 9;

fn checksum(index: u64, body: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&index.to_le_bytes());
    hasher.update(body);
    hasher.finalize()
}

/// Encodes an entry as a record.
pub(crate) fn encode(entry: &Entry) -> Vec<u8> {
    let wire = proto::Entry::from(entry.clone());
    let mut record = Vec::with_capacity(HEAD_BYTES + wire.encoded_len());
    record.extend_from_slice(&[0; HEAD_BYTES]);
    wire.encode(&mut record).expect("a vector grows as needed");
    seal(entry.log_id.index, &mut record);
    record
}

/// Fills in the head of the record for `index`, whose body must be complete.
pub(crate) fn seal(index: u64, record: &mut [u8]) {
    let body = &record[HEAD_BYTES..];
    let length = u32::try_from(body.len()).expect("commands are bounded far below 4 GiB");
    let crc = checksum(index, body);
    record[0] = VERSION;
    record[1..5].copy_from_slice(&crc.to_le_bytes());
    record[5..9].copy_from_slice(&length.to_le_bytes());
}

/// Decodes the record stored under `index`. Returns a description of the damage if it is invalid.
pub(crate) fn decode(index: u64, record: &[u8]) -> Result<Entry, String> {
    let Some((head, body)) = record.split_at_checked(HEAD_BYTES) else {
        return Err(format!(
            "record of {} bytes is shorter than its head",
            record.len()
        ));
    };
    if head[0] != VERSION {
        return Err(format!("record version {}, known is {VERSION}", head[0]));
    }
    let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
    if word(5) as usize != body.len() {
        return Err(format!(
            "record of {} bytes should have {}",
            body.len(),
            word(5)
        ));
    }
    if word(1) != checksum(index, body) {
        return Err("checksum differs".to_owned());
    }
    let wire = proto::Entry::decode(body).map_err(|error| error.to_string())?;
    let entry = Entry::try_from(wire).map_err(|error| error.to_string())?;
    if entry.log_id.index != index {
        return Err(format!("record of entry {}", entry.log_id.index));
    }
    Ok(entry)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::entry;

    #[test]
    fn any_changed_byte_is_detected() {
        let entry = entry(1, 7, 12);
        let record = encode(&entry);
        assert_eq!(decode(7, &record), Ok(entry));
        assert!(decode(8, &record).is_err());
        for at in 0..record.len() {
            let mut changed = record.clone();
            changed[at] ^= 0x10;
            assert!(decode(7, &changed).is_err(), "byte {at}");
            assert!(decode(7, &record[..at]).is_err(), "first {at} bytes");
        }
    }
}
