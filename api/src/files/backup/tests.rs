//! Backups are read back however they are split, and errors locate the damage.

use std::io::{Read, Write};

use super::*;

fn head(bytes: u64) -> BackupHead {
    BackupHead {
        made_at_ms: 1_700_000_000_000,
        cluster: Some("c".to_owned()),
        replica: 1,
        version: "1.2.3".to_owned(),
        index: 42,
        digest: "00ff".to_owned(),
        bytes,
        backends: 1,
        users: 2,
        blocks: 3,
    }
}

fn written(state: &[u8]) -> Vec<u8> {
    let head = head(state.len() as u64);
    let mut writer = BackupWriter::new(Vec::new(), &head).unwrap();
    writer.write_all(state).unwrap();
    let file = writer.finish().unwrap();
    assert_eq!(file.len() as u64, file_bytes(&head).unwrap());
    file
}

fn state(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at % 251) as u8).collect()
}

fn read(file: &[u8]) -> Result<(BackupHead, Vec<u8>), String> {
    let (mut reader, head) = FileReader::open(file).map_err(|error| error.to_string())?;
    let mut state = Vec::new();
    let read = reader.read_to_end(&mut state);
    read.map_err(|error| error.to_string())?;
    Ok((head, state))
}

#[test]
fn backups_of_any_length_round_trip() {
    for length in [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 7] {
        let state = state(length);
        let (read_head, read_state) = read(&written(&state)).unwrap();
        assert_eq!(read_head, head(length as u64));
        assert!(read_state == state, "{length} bytes differ");
    }
}

#[test]
fn backup_chunks_are_decoded_from_any_pieces() {
    let state = state(CHUNK_BYTES + 100);
    let file = written(&state);
    for step in [1, 13, 4096, file.len()] {
        let (mut reader, mut found, mut ends) = (BackupReader::default(), Vec::new(), 0);
        for bytes in file.chunks(step) {
            reader.push(bytes);
            while let Some(piece) = reader.piece().unwrap() {
                match piece {
                    BackupPiece::Head(read) => assert_eq!(read, head(state.len() as u64)),
                    BackupPiece::Chunk(chunk) => found.extend(chunk),
                    BackupPiece::End => ends += 1,
                }
            }
            assert!(reader.end().is_ok() == (ends == 1));
        }
        assert!(found == state && ends == 1, "in steps of {step}");
    }
}

#[test]
fn a_flipped_or_missing_byte_is_detected() {
    let file = written(&state(300));
    for place in 0..file.len() {
        let mut damaged = file.clone();
        damaged[place] ^= 1 << (place % 8);
        assert!(read(&damaged).is_err(), "byte {place}");
        assert!(read(&file[..place]).is_err(), "the first {place} bytes");
    }
    assert!(read(&[&file[..], b"x"].concat()).is_err());
}

#[test]
fn reordered_or_missing_chunks_are_detected() {
    let file = written(&state(3 * CHUNK_BYTES));
    let around = LENGTH_BYTES + CHECKSUM_BYTES;
    let first = file.len() - 3 * (CHUNK_BYTES + around) - (around + END_BYTES);
    let (front, rest) = file.split_at(first);
    let (chunks, end) = rest.split_at(3 * (CHUNK_BYTES + around));
    let chunks: Vec<&[u8]> = chunks.chunks(CHUNK_BYTES + around).collect();
    let with = |order: &[usize]| {
        let mut file = front.to_vec();
        order.iter().for_each(|&at| file.extend(chunks[at]));
        file.extend(end);
        read(&file).map(|(_, state)| state.len())
    };
    assert_eq!(with(&[0, 1, 2]), Ok(3 * CHUNK_BYTES));
    for order in [&[1, 0, 2][..], &[0, 1], &[0, 0, 1], &[0, 1, 2, 2]] {
        assert!(with(order).is_err(), "{order:?}");
    }
}

#[test]
fn backup_errors_name_position_and_expectation() {
    let file = written(&state(300));
    let reason = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut file = file.clone();
        change(&mut file);
        read(&file).unwrap_err()
    };
    let chunk = file.len() - 300 - 12 - 28;
    let reasons = [
        reason(&|file| file[0] = b'X'),
        reason(&|file| file[8] = 2),
        reason(&|file| file[12] = 9),
        reason(&|file| file[30] ^= 1),
        reason(&|file| file[chunk] ^= 1),
        reason(&|file| file[chunk + 50] ^= 1),
        reason(&|file| file.truncate(chunk + 50)),
        reason(&|file| file.push(0)),
        reason(&|file| file.clear()),
    ];
    expect_test::expect![[r#"
        backup damaged at byte 0: not a Quorate backup
        backup damaged at byte 8: format 2, this build reads 1
        backup damaged at byte 10: a head of 589969 bytes, 65536 at most
        backup damaged at byte 0: the head's checksum does not match
        backup damaged at byte 167: a chunk of 301 bytes, 300 expected
        backup damaged at byte 167: the chunk's checksum does not match
        backup damaged at byte 217: the file ends early
        backup damaged at byte 507: 1 bytes follow the end
        backup damaged at byte 0: the file ends early"#]]
    .assert_eq(&reasons.join("\n"));
}

#[test]
fn a_backup_header_of_a_later_build_is_readable() {
    let mut value = serde_json::to_value(head(0)).unwrap();
    value["more"] = "what this build does not know".into();
    assert_eq!(
        serde_json::from_value::<BackupHead>(value).unwrap(),
        head(0)
    );
}

proptest::proptest! {
    #[test]
    fn foreign_bytes_are_refused(
        bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..300),
        kept in 0_usize..400,
    ) {
        let file = written(&state(100));
        let front = &file[..kept.min(file.len() - 1)];
        let foreign = [front, &bytes[..]].concat();
        if foreign != file {
            assert!(read(&foreign).is_err());
        }
    }
}
