//! A replica's data plane in front of scripted engines, with a real state and router.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use api::admission::Admission;
use api::backends::{Backends, EngineKeys, Health, Hooks, ProbeSettings};
use api::clock::Clock;
use api::ports::{BoxFuture, Propose, ProposeError};
use api::prompt::{ModelSettings, Tokenizer};
use api::proxy::{
    DrainResult, Expose, Proxy, ProxyMetrics, ProxySettings, RequestLabels, RequestOutcome, Server,
};
use api::routing::{OutboxSettings, Router, RouterParts, SelectSettings};
use state::command::{
    BackendSpec, Charge, Command, Committed, Envelope, Item, Lane, Origin, Reply,
};
use state::ids::{BackendRef, LogIndex, ReplicaId, SessionId, UserKey};
use state::policy::PolicyConfig;
use state::prefix::HashSecret;
use state::users::FairnessSettings;
use state::{Registry, RouterState};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::client::Client;
use super::engine::Engine;

pub(crate) struct Fleet {
    pub(crate) address: SocketAddr,
    pub(crate) metrics: Arc<ProxyMetrics>,
    pub(crate) router: Arc<Router>,
    pub(crate) backends: Arc<Backends>,
    pub(crate) admission: Arc<Admission>,
    pub(crate) leaving: CancellationToken,
    pub(crate) drain: CancellationToken,
    pub(crate) server: JoinHandle<DrainResult>,
    log: Arc<Log>,
}

const HEALTHY: Health = Health {
    is_healthy: true,
    detail: None,
    waiting: 0,
    running: 0,
    kv_usage_permille: 0,
};

/// A drain that never cuts within a test.
pub(crate) const PATIENT: Duration = Duration::from_secs(60);

impl Fleet {
    pub(crate) async fn start(engines: &[&Engine]) -> Self {
        Self::start_with(engines, PATIENT, |_| {}).await
    }

    pub(crate) async fn start_with(
        engines: &[&Engine],
        drain_deadline: Duration,
        change: impl FnOnce(&mut ProxySettings),
    ) -> Self {
        Self::start_keyed(engines, EngineKeys::default(), drain_deadline, change).await
    }

    /// With keys that engines want.
    pub(crate) async fn start_keyed(
        engines: &[&Engine],
        keys: EngineKeys,
        drain_deadline: Duration,
        change: impl FnOnce(&mut ProxySettings),
    ) -> Self {
        let probes = ProbeSettings {
            keys,
            ..ProbeSettings::default()
        };
        Self::start_as(engines, probes, drain_deadline, change).await
    }

    /// With engines that are really probed; returns when each was.
    pub(crate) async fn start_probed(engines: &[&Engine], probes: ProbeSettings) -> Self {
        let fleet = Self::start_as(engines, probes, PATIENT, |_| {}).await;
        let hooks = Hooks {
            tokens_per_block: Arc::new(|_| 16.0),
            observe: Arc::new(|_, _| {}),
            is_leader: Arc::new(|| false),
            clock: Clock::default(),
        };
        let (view, stop) = (Arc::clone(fleet.router.view()), CancellationToken::new());
        tokio::spawn(Arc::clone(&fleet.backends).run(view, hooks, stop));
        let backends = &fleet.backends;
        let is_probed = |slot| backends.record(slot).is_some_and(|it| it.probes_total > 0);
        let are_probed = || {
            let registry = fleet.registry();
            registry.backends.iter().all(|it| is_probed(it.handle.slot))
        };
        eventually("every engine is probed", are_probed).await;
        fleet
    }

    async fn start_as(
        engines: &[&Engine],
        probes: ProbeSettings,
        drain_deadline: Duration,
        change: impl FnOnce(&mut ProxySettings),
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let state = RouterState::new();
        let view = state.view();
        let backends = Arc::new(Backends::new(probes));
        let models = ModelSettings {
            name: "*".to_owned(),
            tokenizer: Tokenizer::character(),
            block_size: 16,
        };
        let router = Arc::new(Router::new(RouterParts {
            view: Arc::clone(&view),
            backends: Arc::clone(&backends),
            models: vec![models],
            replica: ReplicaId(1),
            session: SessionId(1),
            outbox: OutboxSettings::default(),
            overrides: PolicyConfig::defaults(),
            select: SelectSettings::default(),
            clock: Clock::default(),
        }));
        let metrics = Arc::new(ProxyMetrics::default());
        let mut settings = ProxySettings::new(ReplicaId(1));
        settings.expose = Expose::Full;
        change(&mut settings);
        let admission = Arc::new(Admission::new(&router));
        let serving = Arc::clone(&admission);
        tokio::spawn(async move { serving.run(CancellationToken::new()).await });
        let proxy = Proxy::new(
            &router,
            Arc::clone(&admission),
            Arc::clone(&backends),
            settings,
            metrics.clone(),
        );
        let (leaving, drain) = (CancellationToken::new(), CancellationToken::new());
        let server = Server::new(listener, Arc::new(proxy)).leaving(leaving.clone());
        let server = tokio::spawn(server.run(drain.clone(), drain_deadline));
        let mut fleet = Self {
            address,
            metrics,
            router,
            backends,
            admission,
            leaving,
            drain,
            server,
            log: Arc::new(Log(Mutex::new((state, 0)))),
        };
        fleet.found(engines);
        for backend in &fleet.registry().backends {
            fleet.backends.assume(backend.handle.slot, &HEALTHY);
        }
        fleet
    }

    /// Forms the cluster and registers `engines`.
    fn found(&mut self, engines: &[&Engine]) {
        self.apply(Command::FoundCluster {
            hash_seed: 7,
            hash_secret: HashSecret::of_number(7),
            policy: PolicyConfig::LeastRequest,
            fairness: FairnessSettings::default(),
        });
        for (number, engine) in engines.iter().enumerate() {
            self.apply(Command::PutBackend(BackendSpec {
                id: format!("e{number}"),
                url: format!("http://{}", engine.address),
                models: vec!["m".to_owned()],
                labels: [].into(),
                capacity_blocks: Some(100_000),
                kv_events: None,
                kv_replay: None,
            }));
        }
    }

    pub(crate) fn apply(&mut self, command: Command) {
        let mut log = self.log.0.lock().unwrap();
        let (replica, session, lane) = (ReplicaId(1), SessionId(1), Lane::Admin);
        let origin = Origin {
            replica,
            session,
            lane,
            seq: log.1 + 1,
        };
        append(
            &mut log,
            Envelope {
                origin,
                proposed_at_ms: 1,
                command,
            },
        );
    }

    fn registry(&self) -> Arc<Registry> {
        self.router.view().registry()
    }

    /// From here on carries what is known to the state as it comes.
    pub(crate) fn keep_flushing(&self) {
        let (router, log) = (Arc::clone(&self.router), self.log.clone());
        let never = CancellationToken::new();
        tokio::spawn(async move { router.run_outbox(log, never, PATIENT).await });
    }

    /// Carries all that is known to the state.
    pub(crate) async fn flush(&self) {
        let stop = CancellationToken::new();
        stop.cancel();
        let left = self
            .router
            .run_outbox(self.log.clone(), stop, PATIENT)
            .await;
        assert_eq!(left.queued_items, 0);
    }

    pub(crate) async fn client(&self) -> Client {
        Client::connect(self.address).await
    }

    /// The backend of the engine with this number.
    pub(crate) fn backend(&self, number: usize) -> BackendRef {
        self.registry().backends[number].handle
    }

    /// Requests running at all backends, as routing counts them.
    pub(crate) fn running(&self) -> u32 {
        let registry = self.registry();
        registry
            .backends
            .iter()
            .map(|b| self.router.load().here(b.handle).running)
            .sum()
    }

    pub(crate) fn count(&self, outcome: RequestOutcome, code: u16) -> u64 {
        self.metrics
            .requests
            .get_or_create(&RequestLabels { outcome, code })
            .get()
    }

    /// All that was charged. Ends the outbox: once per fleet.
    pub(crate) async fn charged(&self) -> Charge {
        let stop = CancellationToken::new();
        stop.cancel();
        let bill = Arc::new(Bill::default());
        let left = self.router.run_outbox(bill.clone(), stop, PATIENT).await;
        assert_eq!(left.queued_items, 0);
        let bill = bill.0.lock().unwrap();
        Charge {
            user: UserKey::default(),
            ..*bill
        }
    }

    /// Waits until nothing is under way, here and in routing's books.
    pub(crate) async fn is_idle(&self) {
        eventually("no request under way", || {
            let here = self.metrics.reading.get() + self.metrics.in_flight.get();
            self.running() == 0 && here == 0
        })
        .await;
    }
}

/// A log that commits at once, and the state it drives.
struct Log(Mutex<(RouterState, u64)>);

fn append(log: &mut (RouterState, u64), envelope: Envelope) -> Committed {
    log.1 += 1;
    let index = LogIndex(log.1);
    let reply = log.0.apply(index, envelope);
    Committed { index, reply }
}

impl Propose for Log {
    fn propose(&self, envelope: Envelope) -> BoxFuture<'_, Result<Committed, ProposeError>> {
        let committed = append(&mut self.0.lock().unwrap(), envelope);
        Box::pin(async move { Ok(committed) })
    }
}

/// A log that adds up charges.
#[derive(Default)]
struct Bill(Mutex<Charge>);

impl Propose for Bill {
    fn propose(&self, envelope: Envelope) -> BoxFuture<'_, Result<Committed, ProposeError>> {
        let Command::Batch { items, .. } = envelope.command else {
            unreachable!("an outbox proposes batches")
        };
        let mut sum = self.0.lock().unwrap();
        for item in items {
            if let Item::Charge(charge) = item {
                sum.input_uncached += charge.input_uncached;
                sum.input_cached += charge.input_cached;
                sum.output += charge.output;
                sum.started += charge.started;
                sum.ended += charge.ended;
                sum.queued += charge.queued;
                sum.dequeued += charge.dequeued;
            }
        }
        let (index, reply) = (LogIndex(1), Reply::Applied);
        Box::pin(async move { Ok(Committed { index, reply }) })
    }
}

/// Waits for something that stays once it has come about.
pub(crate) async fn eventually(what: &str, condition: impl Fn() -> bool) {
    let wait = async {
        let mut tick = tokio::time::interval(Duration::from_millis(1));
        while !condition() {
            tick.tick().await;
        }
    };
    assert!(
        tokio::time::timeout(Duration::from_secs(20), wait)
            .await
            .is_ok(),
        "{what}"
    );
}
