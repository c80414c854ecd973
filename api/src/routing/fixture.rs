//! A log of one replica for tests, which applies commands synchronously to the real state machine.

use std::sync::{Arc, Mutex};

use state::RouterState;
use state::command::{BackendSpec, Command, Committed, Envelope, Founding, Lane, Origin, Reply};
use state::ids::{BackendRef, LogIndex, ReplicaId, SessionId, Slot};
use state::policy::PolicyConfig;

use super::{OutboxSettings, Router, RouterParts, SelectSettings};
use crate::base::clock::Clock;
use crate::engines::backends::{Backends, Health, ProbeSettings};
use crate::ports::{BoxFuture, Propose, ProposeError};
use crate::prompt::ModelSettings;

/// The state machine and the position in its log.
pub(super) struct Log {
    pub(super) state: RouterState,
    index: u64,
    admin_seq: u64,
}

impl Log {
    /// Returns an initialised cluster with one backend (`b0`, `b1`, ...) per entry of `capacities`.
    pub(super) fn new(capacities: &[Option<u32>]) -> Self {
        let mut log = Self {
            state: RouterState::new(),
            index: 0,
            admin_seq: 0,
        };
        log.admin(Command::from(Founding::of_seed(
            7,
            PolicyConfig::Cost(state::policy::CostSettings::default()),
        )));
        for (at, capacity) in capacities.iter().enumerate() {
            log.admin(Command::PutBackend(spec(at, *capacity)));
        }
        log
    }

    pub(super) fn admin(&mut self, command: Command) {
        self.admin_seq += 1;
        let origin = Origin {
            replica: ReplicaId(1),
            session: SessionId(1),
            lane: Lane::Admin,
            seq: self.admin_seq,
        };
        let committed = self.apply(Envelope {
            origin,
            proposed_at_ms: 0,
            command,
        });
        assert_eq!(committed.reply, Reply::Applied);
    }

    /// Encodes and decodes the envelope, then applies it.
    pub(super) fn apply(&mut self, envelope: Envelope) -> Committed {
        let bytes = state::codec::encode_envelope(&envelope);
        assert!(
            bytes.len() <= 64 << 10,
            "an envelope of {} bytes",
            bytes.len()
        );
        assert_eq!(state::codec::decode_envelope(&bytes).unwrap(), envelope);
        self.index += 1;
        let index = LogIndex(self.index);
        Committed {
            index,
            reply: self.state.apply(index, envelope),
        }
    }

    pub(super) fn handle(&self, slot: u16) -> BackendRef {
        let registry = self.state.view().registry();
        let found = registry
            .backends
            .iter()
            .find(|backend| backend.handle.slot == Slot(slot));
        found.unwrap().handle
    }
}

pub(super) fn spec(at: usize, capacity_blocks: Option<u32>) -> BackendSpec {
    BackendSpec {
        id: format!("b{at}"),
        url: format!("http://127.0.0.1:{}", 9000 + at),
        models: vec!["m".to_owned()],
        labels: std::collections::BTreeMap::new(),
        capacity_blocks,
        kv_events: None,
        kv_replay: None,
        role: state::command::BackendRole::Both,
    }
}

/// Proposes to the log. Each proposal meets the last of `faults`, which is removed.
#[derive(Clone)]
pub(super) struct Port {
    pub(super) log: Arc<Mutex<Log>>,
    pub(super) faults: Arc<Mutex<Vec<Fault>>>,
    pub(super) proposed: Arc<Mutex<Vec<Origin>>>,
}

/// Fault that a proposal can meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// The proposal is refused before it enters the log.
    Refused,
    /// The proposal is committed, but the reply is lost.
    AnswerLost,
    /// The proposal is not committed, and its outcome is reported as unknown.
    Lost,
    /// The proposal fails because the replica stops.
    Stopping,
}

impl Port {
    pub(super) fn new(log: Log) -> Self {
        Self {
            log: Arc::new(Mutex::new(log)),
            faults: Arc::default(),
            proposed: Arc::default(),
        }
    }

    pub(super) fn answer(&self, envelope: Envelope) -> Result<Committed, ProposeError> {
        self.proposed.lock().unwrap().push(envelope.origin);
        let fault = self.faults.lock().unwrap().pop();
        match fault {
            None => Ok(self.log.lock().unwrap().apply(envelope)),
            Some(Fault::Refused) => Err(ProposeError::Unavailable("no leader".to_owned())),
            Some(Fault::AnswerLost) => {
                self.log.lock().unwrap().apply(envelope);
                Err(ProposeError::Unknown("connection lost".to_owned()))
            }
            Some(Fault::Lost) => Err(ProposeError::Unknown("timed out".to_owned())),
            Some(Fault::Stopping) => Err(ProposeError::Stopping),
        }
    }
}

impl Propose for Port {
    fn propose(&self, envelope: Envelope) -> BoxFuture<'_, Result<Committed, ProposeError>> {
        Box::pin(async move { self.answer(envelope) })
    }
}

pub(super) const HEALTHY: Health = Health {
    is_healthy: true,
    detail: None,
    waiting: 0,
    running: 0,
    kv_usage_permille: 0,
    adapters: None,
};

/// Replica and session used by most tests.
const FIRST: (ReplicaId, SessionId) = (ReplicaId(1), SessionId(1));

/// Returns a router over `port`'s log, with healthy backends and blocks of 16 bytes.
pub(super) fn router(port: &Port, outbox: OutboxSettings) -> Arc<Router> {
    router_with(port, outbox, ModelSettings::characters("*", 16))
}

/// Returns a router as [`router`] does, with the settings `model`.
pub(super) fn router_with(
    port: &Port,
    outbox: OutboxSettings,
    model: ModelSettings,
) -> Arc<Router> {
    build(port, outbox, model, SelectSettings::default(), FIRST)
}

/// Returns a router as [`router`] does, for the replica `replica`.
pub(super) fn router_of(port: &Port, replica: u8) -> Arc<Router> {
    router_in(port, ReplicaId(replica), SessionId(replica.into()))
}

/// Returns a router as [`router`] does, for `session` of `replica`.
pub(super) fn router_in(port: &Port, replica: ReplicaId, session: SessionId) -> Arc<Router> {
    let model = ModelSettings::characters("*", 16);
    let (outbox, select) = (OutboxSettings::default(), SelectSettings::default());
    build(port, outbox, model, select, (replica, session))
}

/// Returns a router as [`router`] does, with the label settings `select`.
pub(super) fn router_selecting(port: &Port, select: SelectSettings) -> Arc<Router> {
    let model = ModelSettings::characters("*", 16);
    build(port, OutboxSettings::default(), model, select, FIRST)
}

fn build(
    port: &Port,
    outbox: OutboxSettings,
    model: ModelSettings,
    select: SelectSettings,
    (replica, session): (ReplicaId, SessionId),
) -> Arc<Router> {
    let log = port.log.lock().unwrap();
    let backends = Backends::new(ProbeSettings::default());
    for backend in &log.state.view().registry().backends {
        backends.assume(backend.handle.slot, &HEALTHY);
    }
    Arc::new(Router::new(RouterParts {
        view: log.state.view(),
        backends: Arc::new(backends),
        models: vec![model],
        replica,
        session,
        outbox,
        overrides: PolicyConfig::defaults(),
        select,
        clock: Clock::default(),
    }))
}
