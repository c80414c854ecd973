//! Dependencies of the proxy: a state, a router and an outbox.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use api::admission::Admission;
use api::base::clock::Clock;
use api::engines::backends::{Backends, Health, ProbeSettings};
use api::net::tls::{Certificates, ListenerFiles};
use api::ports::{BoxFuture, Propose, ProposeError};
use api::prompt::{ModelSettings, Tokenizer};
use api::proxy::picker::{Picker, PickerMetrics, PickerServer, PickerSettings};
use api::proxy::{Proxy, ProxyMetrics, ProxySettings, Server};
use api::routing::{OutboxSettings, Router, RouterParts, SelectSettings};
use api::traces::Tracer;
use state::RouterState;
use state::command::{BackendSpec, Command, Committed, Envelope, Founding, Lane, Origin};
use state::ids::{LogIndex, ReplicaId, SessionId};
use state::policy::PolicyConfig;
use tokio_util::sync::CancellationToken;

use crate::{MeasuredThread, listen, listening, on_thread};

const ENGINES: usize = 4;

/// Starts a proxy for `fleet` on its own thread.
pub(super) fn spawn_proxy(
    fleet: &Fleet,
    tls: Option<Arc<Certificates<ListenerFiles>>>,
    tracer: Option<Tracer>,
) -> MeasuredThread {
    let mut settings = ProxySettings::new(ReplicaId(1));
    settings.tracer = tracer;
    settings.pool.idle_timeout = Duration::from_secs(60);
    let metrics = Arc::new(ProxyMetrics::default());
    let (router, backends) = (Arc::clone(&fleet.router), Arc::clone(&fleet.backends));
    listening(move |tell| async move {
        let (listener, address) = listen().await;
        tell.send(address).expect("main waits for it");
        let admission = Arc::new(Admission::new(&router));
        let serving = Arc::clone(&admission);
        tokio::spawn(async move { serving.run(CancellationToken::new()).await });
        let proxy = Arc::new(Proxy::new(&router, admission, backends, settings, metrics));
        Server::new(listener, proxy)
            .with_tls(tls)
            .run(CancellationToken::new(), Duration::ZERO)
            .await;
    })
}

/// Starts a picker for `fleet` on its own thread.
pub(super) fn spawn_picker(fleet: &Fleet) -> MeasuredThread {
    let settings = ProxySettings::new(ReplicaId(1));
    let metrics = Arc::new(ProxyMetrics::default());
    let (router, backends) = (Arc::clone(&fleet.router), Arc::clone(&fleet.backends));
    listening(move |tell| async move {
        let (listener, address) = listen().await;
        tell.send(address).expect("main waits for it");
        let admission = Arc::new(Admission::new(&router));
        let serving = Arc::clone(&admission);
        tokio::spawn(async move { serving.run(CancellationToken::new()).await });
        let proxy = Arc::new(Proxy::new(&router, admission, backends, settings, metrics));
        let picker = Picker::new(proxy, PickerSettings::default(), PickerMetrics::default());
        PickerServer::new(listener, picker, None)
            .run_until(CancellationToken::new(), Box::new(|| Duration::ZERO))
            .await;
    })
}

/// The state and the next log index: a cluster of one that commits at once.
struct Log(Mutex<(RouterState, u64)>);

impl Log {
    fn apply(&self, envelope: Envelope) -> Committed {
        let mut log = self.0.lock().expect("nobody panics");
        log.1 += 1;
        let index = LogIndex(log.1);
        let reply = log.0.apply(index, envelope);
        Committed { index, reply }
    }
}

impl Propose for Log {
    fn propose(&self, envelope: Envelope) -> BoxFuture<'_, Result<Committed, ProposeError>> {
        Box::pin(async move { Ok(self.apply(envelope)) })
    }
}

/// A cluster of one, in memory.
pub(super) struct Fleet {
    pub(super) router: Arc<Router>,
    backends: Arc<Backends>,
    log: Arc<Log>,
}

impl Fleet {
    /// Creates four backends that share one engine.
    pub(super) fn new(engine: SocketAddr) -> Self {
        Self::of(&[engine; ENGINES])
    }

    /// Creates a backend for each address.
    pub(super) fn of(engines: &[SocketAddr]) -> Self {
        let log = Arc::new(Log(Mutex::new((RouterState::new(), 0))));
        let view = log.0.lock().expect("nobody panics").0.view();
        let backends = Arc::new(Backends::new(ProbeSettings::default()));
        let name = "*".to_owned();
        let models = vec![ModelSettings {
            name,
            tokenizer: Tokenizer::character(),
            block_size: Some(128),
            pairs: Default::default(),
        }];
        let router = Arc::new(Router::new(RouterParts {
            view: Arc::clone(&view),
            backends: Arc::clone(&backends),
            models,
            replica: ReplicaId(1),
            session: SessionId(1),
            outbox: OutboxSettings::default(),
            overrides: Vec::new(),
            select: SelectSettings::default(),
            clock: Clock::default(),
        }));
        for (seq, command) in (1..).zip(commands(engines)) {
            let origin = Origin {
                replica: ReplicaId(1),
                session: SessionId(1),
                lane: Lane::Admin,
                seq,
            };
            log.apply(Envelope {
                origin,
                proposed_at_ms: 1,
                command,
            });
        }
        for backend in &view.registry().backends {
            let (waiting, running, kv_usage_permille) = (0, 0, 0);
            let detail = None;
            let health = Health {
                is_healthy: true,
                detail,
                waiting,
                running,
                kv_usage_permille,
                adapters: None,
            };
            backends.assume(backend.handle.slot, &health);
        }
        let fleet = Self {
            router,
            backends,
            log,
        };
        let (router, log) = (Arc::clone(&fleet.router), Arc::clone(&fleet.log));
        on_thread(move |tell| async move {
            tell.send(()).expect("main waits for it");
            router
                .run_outbox(log, CancellationToken::new(), Duration::ZERO)
                .await;
        });
        fleet
    }
}

/// Returns the commands that found a cluster with backends at these addresses.
fn commands(engines: &[SocketAddr]) -> Vec<Command> {
    let mut commands = vec![Command::from(Founding::of_seed(
        7,
        PolicyConfig::Cost(Default::default()),
    ))];
    commands.extend(engines.iter().enumerate().map(|(number, engine)| {
        Command::PutBackend(BackendSpec {
            id: format!("engine-{number}"),
            url: format!("http://{engine}"),
            models: vec!["m".to_owned()],
            labels: [].into(),
            capacity_blocks: Some(30_000),
            kv_events: None,
            kv_replay: None,
            role: state::command::BackendRole::Both,
        })
    }));
    commands
}
