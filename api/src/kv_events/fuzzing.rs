//! Fuzz targets for KV events published by engines, see [`crate::fuzzing`].

use std::cell::LazyCell;
use std::collections::{BTreeMap, HashMap};
use std::io::Cursor;

use bytes::{Bytes, BytesMut};
use state::RouterState;
use state::command::{BackendSpec, Command, Envelope, Founding, Item, Lane, Origin, Reply};
use state::ids::{
    AttemptId, BackendRef, BlockHash, EngineHash, Incarnation, LogIndex, ReplicaId, SessionId, Slot,
};
use state::kv_events::{KvBatch, KvEvent, KvUpdate};
use state::policy::{CostSettings, PolicyConfig};
use tokio::runtime::Runtime;

use super::stream::{EventStream, HashIdentity, StreamContext, StreamEffect};
use crate::engines::kv_transport::endpoint::{
    KvAddress, KvEndpoint, KvEventsSource, RANKS_MAX, check,
};
use crate::engines::kv_transport::wire;
use crate::engines::kv_transport::zmtp::{SocketType, ZmtpConnection, greeting, put_frame, ready};

/// Decodes a payload of KV events.
pub fn kv_payload(bytes: &[u8]) {
    let Ok(payload) = wire::decode(bytes) else {
        return;
    };
    // Every hash, token and event took at least one byte.
    let told: usize = payload
        .events
        .iter()
        .map(|event| match event {
            wire::EngineEvent::Stored(stored) => 1 + stored.hashes.len() + stored.tokens.len(),
            wire::EngineEvent::Removed(removed) => 1 + removed.hashes.len(),
            wire::EngineEvent::Cleared | wire::EngineEvent::Unknown => 1,
        })
        .sum();
    assert!(told <= bytes.len(), "{told} of {} bytes", bytes.len());
    assert_eq!(wire::decode(bytes), Ok(payload));
}

/// Drives the reader of a stream and applies the reports to a state. The input is a sequence of
/// steps: kind (1 byte), sequence number (1 byte), length of a payload (2 bytes, little-endian),
/// payload.
pub fn kv_stream(mut bytes: &[u8]) {
    let mut fixture = EventFixture::new();
    let mut stream = EventStream::new(identity(), true, None);
    let mut now_ms = 1_000_000;
    while let Some(([what, seq, low, high], rest)) = bytes.split_first_chunk() {
        let length = usize::from(u16::from_le_bytes([*low, *high])).min(rest.len());
        let (payload, rest) = rest.split_at(length);
        bytes = rest;
        now_ms += 20;
        let known = |engine: EngineHash| fixture.known(engine);
        let around = StreamContext {
            now_ms,
            known: &known,
        };
        let (seq, payload) = (u64::from(*seq), Bytes::copy_from_slice(payload));
        match what % 10 {
            0 => stream.connected(),
            1 | 2 => stream.live(seq, payload, &around),
            3 | 4 => stream.replayed(seq, &payload, &around),
            5 => stream.replay_ended(&around),
            6 => stream.replay_failed(&around),
            7 => stream.disconnected(),
            8 => stream.check(seq % 2 == 0),
            _ => {
                if seq % 2 == 0 {
                    stream.object();
                } else {
                    stream.fall_behind();
                }
            }
        }
        fixture.tell(stream.take_effects());
    }
    assert_eq!(fixture.state.check(), Ok(()));
}

/// Receives a peer's bytes over a connection. The first byte selects the socket type of this end.
pub fn zmtp(bytes: &[u8]) {
    thread_local! {
        static RUNTIME: LazyCell<Runtime> = LazyCell::new(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
            runtime.expect("a runtime without I/O takes nothing that could be missing")
        });
    }
    let Some((kind, bytes)) = bytes.split_first() else {
        return;
    };
    let kind = [
        SocketType::Pub,
        SocketType::Sub,
        SocketType::Dealer,
        SocketType::Router,
    ][usize::from(kind % 4)];
    for peer in [bytes.to_vec(), [&greeted(kind)[..], bytes].concat()] {
        let sent = peer.len();
        let stream = tokio::io::join(Cursor::new(peer), tokio::io::sink());
        RUNTIME.with(|runtime| {
            runtime.block_on(async {
                let Ok(mut connection) = ZmtpConnection::open(stream, kind).await else {
                    return;
                };
                let mut received = 0;
                while let Ok(frames) = connection.receive().await {
                    received += frames.iter().map(Bytes::len).sum::<usize>();
                    assert!(received <= sent, "{received} bytes of {sent}");
                }
            });
        });
    }
}

/// Parses an endpoint in the forms that operators write and engines report.
pub fn endpoint(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    if let Ok(endpoint) = text.parse::<KvEndpoint>() {
        assert!((1..=RANKS_MAX).contains(&endpoint.ranks));
        for rank in [0, 1, endpoint.ranks - 1, u16::MAX] {
            let Some(address) = endpoint.of_rank(rank, "10.0.0.1") else {
                continue;
            };
            assert_eq!(address.to_string().parse::<KvAddress>(), Ok(address));
        }
    }
    let source = text.parse::<KvEventsSource>();
    let pair = text.split_once(' ');
    let (events, replay) = pair.map_or((Some(text), None), |(a, b)| (Some(a), Some(b)));
    if check(events, replay).is_ok() && pair.is_none() {
        assert!(source.is_ok(), "{text:?}");
    }
}

/// Returns payloads in the form of released engines, with events as arrays and as maps.
#[must_use]
pub fn kv_payload_seeds() -> Vec<Vec<u8>> {
    let mut seeds = vec![payload(&[stored(1, None, 2), removed(2), cleared()])];
    seeds.push(payload(&[stored(3, Some(2), 4)]));
    // This payload has the form of newer engines, with adapter, medium, extra keys and group.
    let mut long = Vec::new();
    rmp::encode::write_map_len(&mut long, 6).expect(IN_MEMORY);
    text(&mut long, "type");
    text(&mut long, "BlockStored");
    text(&mut long, "block_hashes");
    rmp::encode::write_array_len(&mut long, 1).expect(IN_MEMORY);
    rmp::encode::write_bin(&mut long, &[7; 32]).expect(IN_MEMORY);
    text(&mut long, "parent_block_hash");
    rmp::encode::write_nil(&mut long).expect(IN_MEMORY);
    text(&mut long, "token_ids");
    tokens(&mut long, 1);
    text(&mut long, "block_size");
    rmp::encode::write_uint(&mut long, 16).expect(IN_MEMORY);
    text(&mut long, "medium");
    text(&mut long, "GPU");
    seeds.push(payload(&[long]));
    seeds
}

/// Returns sequences of steps for readers: catching up, following, losing messages and asking
/// again.
#[must_use]
pub fn kv_stream_seeds() -> Vec<Vec<u8>> {
    let message = |number: u64| payload(&[stored(number * 4 + 1, None, 3)]);
    let step = |what: u8, seq: u8, payload: &[u8]| {
        let length = u16::try_from(payload.len()).expect("payloads of this file are short");
        [&[what, seq][..], &length.to_le_bytes(), payload].concat()
    };
    let replayed = [
        step(0, 0, b""),
        step(3, 0, &message(0)),
        step(1, 2, &message(2)),
        step(3, 1, &payload(&[stored(9, Some(3), 2), removed(1)])),
        step(5, 0, b""),
        step(1, 3, &payload(&[cleared()])),
    ];
    let lost = [
        step(0, 0, b""),
        step(5, 0, b""),
        step(1, 0, &message(0)),
        step(1, 5, &message(1)),
        step(6, 0, b""),
        step(3, 4, &message(4)),
        step(5, 0, b""),
        step(7, 0, b""),
        step(0, 0, b""),
        step(3, 0, &message(7)),
        step(5, 0, b""),
    ];
    vec![replayed.concat(), lost.concat()]
}

/// Returns bytes of peers: greeting, `READY`, messages and pings.
#[must_use]
pub fn zmtp_seeds() -> Vec<Vec<u8>> {
    let mut message = BytesMut::new();
    put_frame(&mut message, 1, b"topic");
    put_frame(&mut message, 1, &7_u64.to_be_bytes());
    put_frame(&mut message, 0, &kv_payload_seeds()[0]);
    put_frame(&mut message, 4, b"\x04PING\x00\x0acontext");
    put_frame(&mut message, 0, &[5; 300]);
    vec![
        [&[1][..], &greeted(SocketType::Sub), &message].concat(),
        [&[1][..], &message].concat(),
        [&[2][..], &greeted(SocketType::Dealer), &message].concat(),
    ]
}

/// Returns endpoints of every form.
#[must_use]
pub fn endpoint_seeds() -> Vec<Vec<u8>> {
    let forms = [
        "auto",
        "tcp://*:5557",
        "tcp://[::1]:5557?ranks=8",
        "bind:tcp://0.0.0.0:6000 tcp://engine:5558?ranks=2",
        "ipc:///run/kv.sock",
    ];
    forms.map(|form| form.as_bytes().to_vec()).to_vec()
}

const IN_MEMORY: &str = "writing into memory cannot fail";

/// Returns the bytes that the peer of a `kind` socket sends before its first message.
fn greeted(kind: SocketType) -> Vec<u8> {
    let peer = match kind {
        SocketType::Pub => SocketType::Sub,
        SocketType::Sub => SocketType::Pub,
        SocketType::Dealer => SocketType::Router,
        SocketType::Router => SocketType::Dealer,
    };
    [&greeting()[..], &ready(peer)].concat()
}

fn identity() -> HashIdentity {
    HashIdentity {
        hashing: 7.into(),
        model: "tiny".to_owned(),
        has_qualified_adapters: false,
        block_size: 16,
        parts: 1,
    }
}

fn text(out: &mut Vec<u8>, text: &str) {
    rmp::encode::write_str(out, text).expect(IN_MEMORY);
}

fn tokens(out: &mut Vec<u8>, blocks: u32) {
    rmp::encode::write_array_len(out, blocks * 16).expect(IN_MEMORY);
    for token in 0..blocks * 16 {
        rmp::encode::write_uint(out, u64::from(token) * 3).expect(IN_MEMORY);
    }
}

/// Returns a payload of a time stamp, `events` and a rank.
fn payload(events: &[Vec<u8>]) -> Vec<u8> {
    let mut out = Vec::new();
    rmp::encode::write_array_len(&mut out, 3).expect(IN_MEMORY);
    rmp::encode::write_f64(&mut out, 1.75e9).expect(IN_MEMORY);
    let count = u32::try_from(events.len()).expect("payloads of this file are short");
    rmp::encode::write_array_len(&mut out, count).expect(IN_MEMORY);
    out.extend(events.concat());
    rmp::encode::write_nil(&mut out).expect(IN_MEMORY);
    out
}

fn stored(first: u64, parent: Option<u64>, blocks: u32) -> Vec<u8> {
    let mut out = Vec::new();
    rmp::encode::write_array_len(&mut out, 6).expect(IN_MEMORY);
    text(&mut out, "BlockStored");
    rmp::encode::write_array_len(&mut out, blocks).expect(IN_MEMORY);
    for hash in first..first + u64::from(blocks) {
        rmp::encode::write_uint(&mut out, hash).expect(IN_MEMORY);
    }
    match parent {
        Some(parent) => drop(rmp::encode::write_uint(&mut out, parent).expect(IN_MEMORY)),
        None => rmp::encode::write_nil(&mut out).expect(IN_MEMORY),
    }
    tokens(&mut out, blocks);
    rmp::encode::write_uint(&mut out, 16).expect(IN_MEMORY);
    rmp::encode::write_nil(&mut out).expect(IN_MEMORY);
    out
}

fn removed(hash: u64) -> Vec<u8> {
    let mut out = Vec::new();
    rmp::encode::write_array_len(&mut out, 2).expect(IN_MEMORY);
    text(&mut out, "BlockRemoved");
    rmp::encode::write_array_len(&mut out, 1).expect(IN_MEMORY);
    rmp::encode::write_uint(&mut out, hash).expect(IN_MEMORY);
    out
}

fn cleared() -> Vec<u8> {
    let mut out = Vec::new();
    rmp::encode::write_array_len(&mut out, 1).expect(IN_MEMORY);
    text(&mut out, "AllBlocksCleared");
    out
}

/// A state that receives the reports of a reader.
struct EventFixture {
    state: RouterState,
    backend: BackendRef,
    seq: u64,
    /// Reported blocks that may become parents.
    known: HashMap<EngineHash, BlockHash>,
}

impl EventFixture {
    fn new() -> Self {
        let mut fixture = Self {
            state: RouterState::new(),
            backend: BackendRef {
                slot: Slot(0),
                incarnation: Incarnation(0),
            },
            seq: 0,
            known: HashMap::new(),
        };
        fixture.apply(Command::from(Founding::of_seed(
            7,
            PolicyConfig::Cost(CostSettings::default()),
        )));
        fixture.apply(Command::PutBackend(BackendSpec {
            id: "a".to_owned(),
            url: "http://127.0.0.1:1".to_owned(),
            models: vec!["*".to_owned()],
            labels: BTreeMap::new(),
            capacity_blocks: Some(100),
            kv_events: Some("tcp://*:5557".to_owned()),
            kv_replay: None,
            role: state::command::BackendRole::Both,
        }));
        let backend = fixture
            .state
            .backends()
            .next()
            .map(|backend| backend.handle);
        fixture.backend = backend.expect("it was just put");
        fixture
    }

    fn apply(&mut self, command: Command) {
        self.seq += 1;
        let envelope = Envelope {
            origin: Origin {
                replica: ReplicaId(1),
                session: SessionId(1),
                lane: Lane::Admin,
                seq: self.seq,
            },
            proposed_at_ms: self.seq,
            command,
        };
        let bytes = state::codec::encode_envelope(&envelope);
        assert!(state::codec::decode_envelope(&bytes).is_ok());
        let reply = self.state.apply(LogIndex(self.seq), envelope);
        assert!(!matches!(reply, Reply::Rejected(_)), "{reply:?}");
    }

    fn known(&self, engine: EngineHash) -> Option<BlockHash> {
        self.known.get(&engine).copied()
    }

    fn tell(&mut self, effects: Vec<StreamEffect>) {
        let mut items = Vec::new();
        for effect in effects {
            let StreamEffect::Tell { publisher, news } = effect else {
                continue;
            };
            if let KvUpdate::Message(message) = &news {
                for event in &message.events {
                    if let KvEvent::Stored { blocks, .. } = event {
                        self.known.extend(blocks.iter().copied());
                    }
                }
            }
            items.push(Item::KvEvents(KvBatch {
                backend: self.backend,
                rank: 0,
                publisher,
                news,
            }));
        }
        if !items.is_empty() {
            self.apply(Command::Batch {
                base_attempt: AttemptId(0),
                items,
            });
        }
    }
}
