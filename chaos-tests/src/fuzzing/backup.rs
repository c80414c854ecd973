//! Backup files, as an operator passes them to `quorate restore` or to a replica.
//!
//! Reading a file must give the same result however its bytes arrive. A file that was read
//! completely can be written and read again. The targets also read each file with corrected
//! checksums, so that mutations get past them.

use std::io::{Read, Write};

use api::files::backup::{
    BackupError, BackupHead, BackupPiece, BackupReader, BackupWriter, CHUNK_BYTES, FileReader,
    HEAD_BYTES_MAX, MAGIC, file_bytes,
};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// Length of the file's prefix in bytes: the magic, the format and the length of the head.
const PREFIX_BYTES: usize = 14;

pub(super) fn file(bytes: &[u8]) {
    read_both_ways(bytes);
    if let Some(sealed) = sealed(bytes) {
        read_both_ways(&sealed);
    }
}

pub(super) fn file_seeds() -> Vec<Vec<u8>> {
    let lengths = [0, 1, 300, CHUNK_BYTES + 3];
    let written = lengths.map(|length| {
        let state: Vec<u8> = (0..length).map(|at| (at % 253) as u8).collect();
        let head = BackupHead {
            made_at_ms: 1_700_000_000_000,
            cluster: (length > 1).then(|| "c".repeat(32)),
            replica: 3,
            version: "1.0.0".to_owned(),
            index: 812,
            digest: "0".repeat(32),
            bytes: state.len() as u64,
            backends: 1,
            users: 2,
            blocks: 3,
        };
        write(&head, &state)
    });
    written.into()
}

fn write(head: &BackupHead, state: &[u8]) -> Vec<u8> {
    let mut writer = BackupWriter::new(Vec::new(), head).expect("memory takes it");
    writer.write_all(state).expect("memory takes it");
    writer.finish().expect("memory takes it")
}

fn read_both_ways(bytes: &[u8]) {
    let step = bytes.first().map_or(1, |first| usize::from(*first) * 8 + 1);
    let in_steps = in_steps(bytes, step).ok();
    assert_eq!(in_steps, at_once(bytes), "in steps of {step}");
    if let Some((head, state)) = in_steps {
        let again = write(&head, &state);
        let length = file_bytes(&head).expect("a head that was read fits");
        assert_eq!(again.len() as u64, length);
        assert_eq!(at_once(&again), Some((head, state)));
    }
}

fn in_steps(bytes: &[u8], step: usize) -> Result<(BackupHead, Vec<u8>), BackupError> {
    let mut reader = BackupReader::default();
    let (mut head, mut state) = (None, Vec::new());
    for bytes in bytes.chunks(step) {
        reader.push(bytes);
        while let Some(piece) = reader.piece()? {
            match piece {
                BackupPiece::Head(read) => head = Some(read),
                BackupPiece::Chunk(chunk) => state.extend(chunk),
                BackupPiece::End => {}
            }
        }
    }
    reader.end()?;
    Ok((head.expect("a file that ends has a head"), state))
}

fn at_once(bytes: &[u8]) -> Option<(BackupHead, Vec<u8>)> {
    let (mut reader, head) = FileReader::open(bytes).ok()?;
    let mut state = Vec::new();
    reader.read_to_end(&mut state).ok()?;
    Some((head, state))
}

/// Returns the file with correct checksums, as far as its lengths allow.
fn sealed(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut sealed = bytes.to_vec();
    sealed.get_mut(..MAGIC.len())?.copy_from_slice(&MAGIC);
    let mut seal = |from: usize, length: usize, checksum: &dyn Fn(&[u8]) -> u64| {
        let (covered, rest) = sealed.get_mut(from..)?.split_at_mut_checked(length)?;
        let place = rest.first_chunk_mut()?;
        *place = checksum(covered).to_le_bytes();
        Some(from + length + 8)
    };
    let length_at = |at: usize| Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?) as usize);
    let head = length_at(MAGIC.len() + 2)?.min(HEAD_BYTES_MAX);
    let mut at = seal(0, PREFIX_BYTES + head, &xxh3_64)?;
    for number in 0.. {
        let Some(length) = length_at(at) else { break };
        let next = match length {
            0 => seal(at + 4, 16, &xxh3_64),
            length => seal(at + 4, length, &|chunk| xxh3_64_with_seed(chunk, number)),
        };
        match next {
            Some(next) => at = next,
            None => break,
        }
    }
    Some(sealed)
}
