//! Readers over real sockets: a state, an engine that repeats what it published, and faults in
//! between.

use std::path::Path;
use std::sync::Mutex;

use bytes::Bytes;
use state::RouterState;
use state::command::{
    BackendSpec, Command, Committed, Envelope, Founding, Lane, LeaseOutcome, Origin,
};
use state::ids::{AttemptId, BlockHash, EngineHash, LogIndex, ReplicaId, SessionId};
use state::kv_events::{KvEvent, KvMessage, KvMode};
use state::policy::{CostSettings, PolicyConfig};
use state::reader_assignment::Assignment;
use tokio::net::TcpListener;

use super::*;
use crate::engines::backends::ProbeSettings;
use crate::engines::kv_transport::zmtp::{SocketType, ZmtpConnection};
use crate::ports::{BoxFuture, ChangeError, ClusterStatus, Propose, ProposeError};
use crate::prompt::{ModelSettings, Tokenizer, TokenizerSpec};
use crate::routing::{self, OutboxSettings, Router};

const MODEL: &str = "tiny";
/// Tokens per block of the engine.
const BLOCK: u32 = 2;
const PATIENCE: Duration = Duration::from_secs(30);

/// A cluster of one replica, which may lose the report of a message once.
struct Log {
    state: Mutex<RouterState>,
    view: Arc<StateView>,
    to_lose: Mutex<Option<u64>>,
}

impl Log {
    fn new() -> Arc<Self> {
        let state = RouterState::new();
        let log = Self {
            view: state.view(),
            state: Mutex::new(state),
            to_lose: Mutex::new(None),
        };
        log.admin(Command::from(Founding::of_seed(
            7,
            PolicyConfig::Cost(CostSettings::default()),
        )));
        Arc::new(log)
    }

    fn apply(&self, envelope: Envelope) -> Committed {
        let mut state = self.state.lock().unwrap();
        let index = LogIndex(state.applied().0 + 1);
        let reply = state.apply(index, envelope);
        Committed { index, reply }
    }

    fn admin(&self, command: Command) {
        let seq = self.view.applied().0 + 1;
        self.apply(Envelope {
            origin: Origin {
                replica: ReplicaId(1),
                session: SessionId(1),
                lane: Lane::Admin,
                seq,
            },
            proposed_at_ms: 0,
            command,
        });
    }

    /// Registers a backend that this replica reads, with its events and replays on these ports.
    fn add(&self, events: u16, replay: u16) -> BackendRef {
        self.admin(Command::PutBackend(BackendSpec {
            id: "gpu".to_owned(),
            url: "http://127.0.0.1:1".to_owned(),
            models: vec![MODEL.to_owned()],
            labels: BTreeMap::new(),
            capacity_blocks: None,
            kv_events: Some(format!("tcp://127.0.0.1:{events}")),
            kv_replay: Some(format!("tcp://127.0.0.1:{replay}")),
            role: state::command::BackendRole::Both,
        }));
        let backend = self.view.registry().backends[0].handle;
        let replica = ReplicaId(1);
        let reader = Assignment { backend, replica };
        self.admin(Command::AssignReaders(vec![reader]));
        backend
    }

    fn tell(&self, backend: BackendRef, news: KvUpdate) {
        let batch = KvBatch {
            backend,
            rank: 0,
            publisher: 5,
            news,
        };
        self.admin(Command::Batch {
            base_attempt: AttemptId(0),
            items: vec![Item::KvEvents(batch)],
        });
    }

    fn condition(&self) -> Option<KvCondition> {
        self.view.registry().kv(Slot(0))
    }

    async fn until(&self, what: impl Fn(KvCondition) -> bool) {
        let waiting = async {
            let mut ticks = tokio::time::interval(Duration::from_millis(5));
            while !self.condition().is_some_and(&what) {
                ticks.tick().await;
            }
        };
        let waited = tokio::time::timeout(PATIENCE, waiting).await;
        assert!(waited.is_ok(), "it stays {:?}", self.condition());
    }
}

impl Propose for Log {
    fn propose(&self, mut envelope: Envelope) -> BoxFuture<'_, Result<Committed, ProposeError>> {
        if let Command::Batch { items, .. } = &mut envelope.command {
            let mut to_lose = self.to_lose.lock().unwrap();
            items.retain(|item| match item {
                Item::KvEvents(batch) => match &batch.news {
                    KvUpdate::Message(message) => {
                        to_lose.take_if(|it| *it == message.seq).is_none()
                    }
                    _ => true,
                },
                _ => true,
            });
        }
        Box::pin(std::future::ready(Ok(self.apply(envelope))))
    }
}

impl Cluster for Log {
    fn submit(&self, _: Command) -> BoxFuture<'_, Result<Committed, ProposeError>> {
        unreachable!("readers use the outbox")
    }

    fn read_barrier(&self) -> BoxFuture<'_, Result<LogIndex, ProposeError>> {
        unreachable!("readers read what is applied")
    }

    fn with_state(&self, read: &mut dyn FnMut(&RouterState)) {
        read(&self.state.lock().unwrap());
    }

    fn status(&self) -> ClusterStatus {
        ClusterStatus {
            id: ReplicaId(1),
            session: SessionId(1),
            cluster_id: None,
            role: "leader",
            term: 1,
            leader: Some(ReplicaId(1)),
            has_quorum: true,
            committed_index: 0,
            applied_index: 0,
            snapshot_index: None,
            caught_up: true,
            is_removed: false,
            fault: None,
            unjoined: None,
            peers: Vec::new(),
            waiting: None,
            scaling: None,
            version: "0.0.0",
            members: BTreeMap::new(),
        }
    }

    fn add_member(&self, _: ReplicaId, _: String) -> BoxFuture<'_, Result<u64, ChangeError>> {
        unreachable!("readers change no members")
    }

    fn promote_member(&self, _: ReplicaId) -> BoxFuture<'_, Result<u64, ChangeError>> {
        unreachable!("readers change no members")
    }

    fn remove_member(&self, _: ReplicaId) -> BoxFuture<'_, Result<u64, ChangeError>> {
        unreachable!("readers change no members")
    }

    fn transfer_leader(
        &self,
        _: Option<ReplicaId>,
    ) -> BoxFuture<'_, Result<ReplicaId, ChangeError>> {
        unreachable!("readers change no leader")
    }

    fn snapshot(&self) -> BoxFuture<'_, Result<u64, ChangeError>> {
        unreachable!("readers take no snapshots")
    }
}

/// Runs the readers in the background for as long as the test's runtime exists.
fn read(log: &Arc<Log>) {
    let spec = TokenizerSpec::HuggingFace(
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/fixtures/tokenizers/chatml/tokenizer.json"),
    );
    let backends = Arc::new(Backends::new(ProbeSettings::default()));
    let router = Arc::new(Router::new(routing::RouterParts {
        view: log.view.clone(),
        backends: backends.clone(),
        models: vec![ModelSettings {
            name: "*".to_owned(),
            tokenizer: Tokenizer::load(spec, None).unwrap(),
            block_size: Some(BLOCK),
            pairs: Default::default(),
        }],
        replica: ReplicaId(1),
        session: SessionId(1),
        outbox: OutboxSettings::default(),
        overrides: PolicyConfig::defaults(),
        select: routing::SelectSettings::default(),
        clock: crate::base::clock::Clock::default(),
    }));
    let parts = ReaderParts {
        cluster: log.clone(),
        view: log.view.clone(),
        outbox: Arc::clone(router.outbox()),
        reader: Arc::clone(router.reader()),
        clock: router.clock().clone(),
        backends,
        sockets: Arc::new(crate::engines::kv_transport::socket::Zmq::default()),
        board: Arc::default(),
    };
    tokio::spawn(run(parts, CancellationToken::new()));
    let log: Arc<dyn Propose> = log.clone();
    tokio::spawn(async move {
        router
            .run_outbox(log, CancellationToken::new(), Duration::ZERO)
            .await
    });
}

/// Returns message number `seq`, with one block that begins a prompt.
fn message(seq: u32) -> Bytes {
    let mut bytes = b"\x92\xa1a\x91\x95\xabBlockStored".to_vec();
    let number = [&[0xce][..], &seq.to_be_bytes()].concat();
    for part in [b"\x91", &number[..], b"\xc0\x92", &number, &number] {
        bytes.extend(part);
    }
    bytes.push(BLOCK as u8);
    bytes.into()
}

/// Queue of a ROUTER socket with libzmq's default high-water mark. It drops what exceeds 1,000
/// messages, and learns in steps of 500 how many have left.
struct RouterQueue {
    /// Messages that leave while 100 are sent.
    speed: u64,
    taken: u64,
    /// Hundredths of messages that have left.
    left: u64,
}

impl RouterQueue {
    fn new(speed: u64) -> Self {
        let (taken, left) = (0, 0);
        Self { speed, taken, left }
    }

    /// Whether the next message enters the queue. Otherwise it is dropped.
    fn takes(&mut self) -> bool {
        self.left = (self.left + self.speed).min(self.taken * 100);
        let known_left = self.left / 100 / 500 * 500;
        let has_room = self.taken - known_left < 1000;
        self.taken += u64::from(has_room);
        has_room
    }
}

/// Starts an engine that has published `messages` messages, and returns the ports of its two
/// sockets. `speed` is that of its ROUTER's queue; 100 drops nothing.
async fn engine(messages: u32, speed: u64) -> (u16, u16) {
    let events = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let replay = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let ports = [&events, &replay].map(|it| it.local_addr().unwrap().port());
    tokio::spawn(async move {
        loop {
            let (socket, _) = events.accept().await.unwrap();
            tokio::spawn(async move {
                let mut peer = ZmtpConnection::open(socket, SocketType::Pub).await.unwrap();
                while peer.receive().await.is_ok() {}
            });
        }
    });
    tokio::spawn(async move {
        loop {
            let (socket, _) = replay.accept().await.unwrap();
            let mut peer = ZmtpConnection::open(socket, SocketType::Router)
                .await
                .unwrap();
            let asked = peer.receive().await.unwrap();
            let from = u64::from_be_bytes(asked.last().unwrap()[..].try_into().unwrap());
            let mut queue = RouterQueue::new(speed);
            let has = (0..messages).filter(|seq| u64::from(*seq) >= from);
            let has = has.map(|seq| (u64::from(seq), message(seq)));
            for (number, payload) in has.chain([(u64::MAX, Bytes::new())]) {
                let frames = [b"", b"", &number.to_be_bytes()[..], &payload];
                if queue.takes() && peer.send(&frames).await.is_err() {
                    break;
                }
            }
            // The peer leaves.
            while peer.receive().await.is_ok() {}
        }
    });
    (ports[0], ports[1])
}

fn stored(seq: u64) -> KvUpdate {
    KvUpdate::Message(KvMessage {
        seq,
        mark: 1,
        part: 0,
        is_last: true,
        is_after_loss: false,
        events: vec![KvEvent::Stored {
            parent: None,
            blocks: vec![(EngineHash(seq), BlockHash(seq))],
        }],
    })
}

#[tokio::test]
async fn an_unreachable_publisher_degrades_exact_mode() {
    let log = Log::new();
    // Nothing listens there any more.
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = closed.local_addr().unwrap().port();
    drop(closed);
    let backend = log.add(port, port);
    log.tell(backend, stored(0));
    log.tell(backend, KvUpdate::Current { seq: Some(0) });
    assert_eq!(log.condition(), Some(KvCondition::EXACT));
    read(&log);
    log.until(|it| matches!(it.reason, Some(KvReason::Doubt(_))))
        .await;
}

#[tokio::test]
async fn a_lost_proposal_is_sent_again() {
    let log = Log::new();
    *log.to_lose.lock().unwrap() = Some(1);
    let (events, replay) = engine(3, 100).await;
    log.add(events, replay);
    read(&log);
    log.until(|it| it == KvCondition::EXACT).await;
    assert_eq!(*log.to_lose.lock().unwrap(), None);
    assert_eq!(log.state.lock().unwrap().owned_blocks(Slot(0)), 3);
}

/// Twenty fresh starts on engines whose ROUTER sockets drop different parts of each replay.
#[tokio::test]
async fn replays_of_5000_messages_end_exact_although_the_engine_drops_some() {
    const MESSAGES: u32 = 5000;
    let drops = |speed| {
        let mut queue = RouterQueue::new(speed);
        (0..=MESSAGES).filter(|_| !queue.takes()).count()
    };
    let starts = (42..).step_by(2).take(20).map(async |speed| {
        assert!(drops(speed) > 100, "{} at {speed}", drops(speed));
        let log = Log::new();
        let (events, replay) = engine(MESSAGES, speed).await;
        log.add(events, replay);
        read(&log);
        log.until(|it| it == KvCondition::EXACT).await;
        let state = log.state.lock().unwrap();
        assert_eq!(state.owned_blocks(Slot(0)), u64::from(MESSAGES));
    });
    futures_util::future::join_all(starts).await;
}

#[tokio::test]
async fn a_fixed_refusal_ends_with_the_next_reader() {
    let log = Log::new();
    let (events, replay) = engine(2, 100).await;
    let backend = log.add(events, replay);
    let refusal = KvRejection::BlockSize {
        engine: BLOCK,
        router: BLOCK + 1,
    };
    log.tell(backend, KvUpdate::Refuse(refusal));
    assert_eq!(log.condition().map(|it| it.mode), Some(KvMode::Lease));
    read(&log);
    log.until(|it| it == KvCondition::EXACT).await;
    assert_eq!(log.state.lock().unwrap().owned_blocks(Slot(0)), 2);
}

#[tokio::test]
async fn unconfirmed_blocks_fade_in_an_idle_cluster() {
    let log = Log::new();
    let (events, replay) = engine(1, 100).await;
    let backend = log.add(events, replay);
    read(&log);
    log.until(|it| it == KvCondition::EXACT).await;
    let items = [
        Item::Acquire {
            attempt: 1,
            backend,
            tip: None,
            new: vec![BlockHash(77)],
        },
        Item::Release {
            attempt: 1,
            outcome: LeaseOutcome::Kept,
        },
    ];
    log.admin(Command::Batch {
        base_attempt: AttemptId(0),
        items: items.into(),
    });
    assert!(log.view.blocks.owns(Slot(0), BlockHash(77)));
    log.until(|_| !log.view.blocks.owns(Slot(0), BlockHash(77)))
        .await;
}
