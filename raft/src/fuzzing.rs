//! Fuzz targets for the decoders of untrusted bytes: log records, peer messages and files. No
//! target may panic, whatever the input. `chaos-tests` runs them.

use std::io::{Read, Write};
use std::path::PathBuf;
use std::sync::Arc;

use prost::Message;

use crate::files::{load_message, store_message};
use crate::log::record;
use crate::memory::MemoryDisk;
use crate::net::validate::{check_entries, check_head};
use crate::net::{self, Secret};
use crate::snapshot::{SnapshotFile, SnapshotReader, SnapshotWriter};
use crate::types::{self, Command, Entry, LogId, Payload, SnapshotMeta, StoredMembership, Vote};
use crate::wire::proto;

const IN_MEMORY: &str = "a file in memory can be written and read";

/// Decodes a log record that follows its index (8 bytes, little-endian), as is and with a matching
/// head and checksum. A record that decodes must encode to the same entry.
pub fn log_record(bytes: &[u8]) {
    let Some((index, found)) = bytes.split_first_chunk() else {
        return;
    };
    let index = u64::from_le_bytes(*index);
    let mut sealed = found.to_vec();
    if sealed.len() >= record::HEAD_BYTES {
        record::seal(index, &mut sealed);
    }
    for found in [found.to_vec(), sealed] {
        if let Ok(entry) = record::decode(index, &found) {
            assert_eq!(record::decode(index, &record::encode(&entry)), Ok(entry));
        }
    }
}

/// Decodes a peer message: one byte for its kind, then its protobuf.
pub fn peer_message(bytes: &[u8]) {
    let Some((kind, bytes)) = bytes.split_first() else {
        return;
    };
    match kind % 17 {
        0 => {
            let append = again::<proto::AppendRequest>(bytes);
            followed(&append);
            append.entries.into_iter().for_each(taken);
        }
        1 => drop(again::<proto::VoteRequest>(bytes)),
        2 => {
            let start = match again::<proto::SnapshotPart>(bytes).part {
                Some(proto::snapshot_part::Part::Start(start)) => start,
                _ => return,
            };
            let vote = start.vote.unwrap_or_default().into();
            drop(start.meta.map(|meta| check_head(vote, &meta)));
        }
        3 => drop(again::<proto::TransferLeaderRequest>(bytes)),
        4 => drop(again::<proto::ProposeRequest>(bytes)),
        5 => drop(again::<proto::ReadBarrierRequest>(bytes)),
        6 => drop(again::<proto::ChangeRequest>(bytes)),
        7 => drop(again::<proto::ClaimRequest>(bytes)),
        8 => drop(again::<proto::FetchStateRequest>(bytes)),
        9 => drop(again::<proto::PeerMessage>(bytes)),
        10 => drop(again::<proto::AppendResponse>(bytes)),
        11 => drop(again::<proto::ProposeResponse>(bytes)),
        12 => drop(again::<proto::ChangeResponse>(bytes)),
        13 => drop(again::<proto::InfoResponse>(bytes)),
        // The first message that a stranger can send to a replica with a secret.
        16 => {
            let secret = Secret::new(&[7; 32]).expect("it is long enough");
            if let Some(hello) = net::read_first(&secret, bytes) {
                let read = net::read_first(&secret, &net::write_first(&secret, &hello));
                assert_eq!(read, Some(hello));
            }
        }
        14 => taken(again::<proto::Entry>(bytes)),
        _ => {
            if let Ok(stored) = StoredMembership::try_from(again::<proto::StoredMembership>(bytes))
            {
                let wire = proto::StoredMembership::from(&stored);
                assert_eq!(StoredMembership::try_from(wire), Ok(stored));
            }
        }
    }
}

/// Reads a snapshot file, as is and with matching lengths and checksums in its frames.
pub fn snapshot_file(bytes: &[u8]) {
    let scratch = scratch();
    for bytes in [bytes.to_vec(), framed(bytes)] {
        scratch.put(&bytes);
        let Ok((mut reader, meta)) = SnapshotReader::open(&scratch) else {
            continue;
        };
        // The machine receives the content of an intact file.
        drop(SnapshotMeta::try_from(meta));
        let mut read = 0;
        while let Ok(chunk) = reader.next_chunk()
            && !chunk.is_empty()
        {
            read += chunk.len();
        }
        assert!(read <= bytes.len(), "{read} bytes of {}", bytes.len());
    }
}

/// Reads a small file, as the identity and as the log's mark.
pub fn small_file(bytes: &[u8]) {
    let scratch = scratch();
    let sealed = bytes.get(12..).map(|body| {
        let crc = crc32fast::hash(body).to_le_bytes();
        [b"quorate1", &crc[..], body].concat()
    });
    for bytes in [Some(bytes.to_vec()), sealed].into_iter().flatten() {
        scratch.put(&bytes);
        if let Ok(Some(identity)) = load_message::<proto::Identity>(&*scratch.files, &scratch.path)
        {
            store_message(&*scratch.files, &scratch.path, &identity).expect(IN_MEMORY);
            assert_eq!(
                load_message(&*scratch.files, &scratch.path).ok(),
                Some(Some(identity))
            );
        }
        drop(load_message::<proto::LogMark>(
            &*scratch.files,
            &scratch.path,
        ));
    }
}

/// Returns valid inputs for [`log_record`].
#[must_use]
pub fn log_record_seeds() -> Vec<Vec<u8>> {
    let record = |entry: &Entry| {
        let index = entry.log_id.index.to_le_bytes();
        [&index[..], &record::encode(entry)].concat()
    };
    entries().iter().map(record).collect()
}

/// Returns valid inputs of every kind for [`peer_message`].
#[must_use]
pub fn peer_message_seeds() -> Vec<Vec<u8>> {
    let header = proto::Header {
        cluster_high: 1,
        cluster_low: 2,
        from: 1,
        to: 2,
        to_store: 77,
        from_store: 78,
    };
    let header = Some(header);
    let vote = Some(proto::Vote {
        term: 3,
        node: 1,
        committed: true,
    });
    let last = Some(log_id(7).into());
    let entries = entries();
    let wire: Vec<proto::Entry> = entries.iter().cloned().map(Into::into).collect();
    let start = proto::SnapshotStart {
        header,
        vote,
        meta: Some(meta()),
    };
    let chunk = proto::SnapshotChunk {
        bytes: "state".into(),
        crc: crc32fast::hash(b"state"),
    };
    let append = proto::AppendRequest {
        header,
        vote,
        previous: last,
        entries: wire.clone(),
        committed: last,
        has_quorum: true,
    };
    let vote_request = proto::VoteRequest {
        header,
        vote,
        last,
        leadership_transfer: true,
        pre_vote: false,
    };
    let part = |part| proto::SnapshotPart { part: Some(part) };
    let message = proto::PeerMessage {
        header,
        bytes: "\x01\x00".into(),
        unix_ms: 1_700_000_000_000,
        applied: 7,
    };
    let secret = Secret::new(&[7; 32]).expect("it is long enough");
    let hello = proto::Hello {
        cluster_name: "quorate".to_owned(),
        id: 3,
    };
    let first = [vec![16], net::write_first(&secret, &hello)].concat();
    let mut seeds = vec![
        first,
        kind(0, &append),
        kind(1, &vote_request),
        kind(2, &part(proto::snapshot_part::Part::Start(start))),
        kind(2, &part(proto::snapshot_part::Part::Chunk(chunk))),
        kind(9, &message),
        kind(15, meta().membership.as_ref().expect("it was just set")),
    ];
    seeds.extend(wire.iter().map(|entry| kind(14, entry)));
    seeds.extend(calls_to_leaders(header));
    seeds
}

/// Returns valid inputs for [`peer_message`] that are calls to the leader or to any peer.
fn calls_to_leaders(header: Option<proto::Header>) -> Vec<Vec<u8>> {
    let change = proto::change_request::Change::AddLearner(proto::AddLearner {
        id: 4,
        address: "127.0.0.1:4".to_owned(),
    });
    let propose = proto::ProposeRequest {
        header,
        command: "command".into(),
        timeout_ms: 5000,
    };
    let change = proto::ChangeRequest {
        cluster_high: 1,
        cluster_low: 2,
        from: 1,
        change: Some(change),
        hops: 1,
        from_store: 78,
        cluster_name: "quorate".to_owned(),
    };
    let info = proto::InfoResponse {
        id: 1,
        store: 77,
        address: "127.0.0.1:1".to_owned(),
        labels: [("version".to_owned(), "1".to_owned())].into(),
        members: vec![1, 2, 3],
        ..proto::InfoResponse::default()
    };
    vec![kind(4, &propose), kind(6, &change), kind(13, &info)]
}

/// Returns valid inputs for [`snapshot_file`].
#[must_use]
pub fn snapshot_file_seeds() -> Vec<Vec<u8>> {
    let file = |content: &[u8]| {
        let scratch = scratch();
        let mut writer = SnapshotWriter::create(&scratch, &meta()).expect(IN_MEMORY);
        let written = writer.write_all(content).and_then(|()| writer.finish());
        written.expect(IN_MEMORY);
        scratch.content()
    };
    vec![file(b""), file(b"state"), file(&[7; 3000])]
}

/// Returns valid inputs for [`small_file`].
#[must_use]
pub fn small_file_seeds() -> Vec<Vec<u8>> {
    let scratch = scratch();
    let identity = proto::Identity {
        id: 1,
        store: 77,
        cluster_high: 1,
        cluster_low: 2,
        claimant: 3,
        cluster_name: "quorate".to_owned(),
    };
    let mark = proto::LogMark {
        vote: None,
        last: Some(log_id(7).into()),
    };
    let read = || scratch.content();
    store_message(&*scratch.files, &scratch.path, &identity).expect(IN_MEMORY);
    let identity = read();
    store_message(&*scratch.files, &scratch.path, &mark).expect(IN_MEMORY);
    vec![identity, read()]
}

/// Decodes a message and checks that encoding and decoding it again does not change it. Returns the
/// default for bytes that cannot be decoded.
fn again<M: Message + Default + PartialEq>(bytes: &[u8]) -> M {
    let Ok(message) = M::decode(bytes) else {
        return M::default();
    };
    let again = M::decode(&message.encode_to_vec()[..]);
    assert!(again.is_ok_and(|again| again == message));
    message
}

/// Checks that entries accepted from a leader are consecutive, and that the last one is of no later
/// term than the leader's.
fn followed(append: &proto::AppendRequest) {
    let vote: Vote = append.vote.unwrap_or_default().into();
    let previous = append.previous.map(LogId::from);
    let entries = append.entries.iter().cloned().map(Entry::try_from);
    let Ok(entries) = entries.collect::<Result<Vec<_>, _>>() else {
        return;
    };
    let committed = append.committed.map(LogId::from);
    if check_entries(vote, previous, committed, &entries).is_ok()
        && let Some(last) = entries.last()
    {
        let first = previous.map_or(0, |previous| previous.index + 1);
        assert_eq!(last.log_id.index, first + entries.len() as u64 - 1);
        assert!(last.log_id.leader_id.term <= vote.leader_id.term);
    }
}

fn taken(wire: proto::Entry) {
    if let Ok(entry) = Entry::try_from(wire) {
        assert_eq!(
            Entry::try_from(proto::Entry::from(entry.clone())),
            Ok(entry)
        );
    }
}

fn kind(kind: u8, message: &impl Message) -> Vec<u8> {
    [&[kind][..], &message.encode_to_vec()].concat()
}

fn log_id(index: u64) -> LogId {
    types::log_id(3, 1, index)
}

fn meta() -> proto::SnapshotMeta {
    let member = |id| proto::Member {
        id,
        address: format!("127.0.0.1:{id}"),
        store: 77 + id,
        cluster_high: 1,
        cluster_low: 2,
        ..proto::Member::default()
    };
    let membership = proto::Membership {
        voters: vec![
            proto::VoterSet { ids: vec![1, 2] },
            proto::VoterSet { ids: vec![2, 3] },
        ],
        members: (1..=4).map(member).collect(),
    };
    proto::SnapshotMeta {
        last: Some(log_id(7).into()),
        membership: Some(proto::StoredMembership {
            log_id: Some(log_id(5).into()),
            membership: Some(membership),
        }),
        has_commands: true,
        removals: vec![proto::Removal {
            id: 5,
            store: 82,
            by: Some(log_id(5).into()),
        }],
    }
}

fn entries() -> Vec<Entry> {
    let membership = SnapshotMeta::try_from(meta()).expect("its voters are members");
    let membership = membership.last_membership.membership().clone();
    let payloads = [
        Payload::Blank,
        Payload::Normal(Command("some command".into())),
        Payload::Membership(membership),
    ];
    let entry = |(payload, index)| Entry {
        log_id: log_id(index),
        payload,
    };
    payloads.into_iter().zip(7..).map(entry).collect()
}

/// Frames `bytes` like a snapshot file: magic, head and frames keep their places, lengths are
/// capped to the available bytes, and checksums are set.
fn framed(bytes: &[u8]) -> Vec<u8> {
    const MAGIC_BYTES: usize = 8;
    let mut file = bytes.to_vec();
    let mut at = MAGIC_BYTES;
    while let Some(head) = file.get(at..at + 8) {
        let word = [head[0], head[1], head[2], head[3]];
        let rest = file.len() - at - 8;
        let length = (u32::from_le_bytes(word) as usize).min(rest);
        let covered = if length == 0 { rest.min(16) } else { length };
        let crc = crc32fast::hash(&file[at + 8..at + 8 + covered]);
        let length = u32::try_from(length).expect("inputs are far below 4 GiB");
        file[at..at + 4].copy_from_slice(&length.to_le_bytes());
        file[at + 4..at + 8].copy_from_slice(&crc.to_le_bytes());
        at += 8 + covered;
    }
    file
}

/// Returns a snapshot file on an in-memory disk.
fn scratch() -> SnapshotFile {
    SnapshotFile {
        files: Arc::new(MemoryDisk::new().open()),
        path: PathBuf::from("folder/file"),
    }
}

impl SnapshotFile {
    fn put(&self, bytes: &[u8]) {
        let made = self.files.create(&self.path);
        let written = made.and_then(|mut file| file.write_all(bytes));
        written.expect(IN_MEMORY);
    }

    fn content(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let opened = self.files.open(&self.path);
        let read = opened.and_then(|mut file| file.read_to_end(&mut bytes));
        read.expect(IN_MEMORY);
        bytes
    }
}
