//! A replica's data plane in front of scripted engines, with a real state and router.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use admin::Admin;
use api::admission::{Admission, HoldAtZero};
use api::base::clock::Clock;
use api::cluster::events::EventBus;
use api::engines::backends::{Backends, EngineDialer, EngineKeys, Health, Hooks, ProbeSettings};
use api::ports::{BoxFuture, ChangeError, Cluster, ClusterStatus, Propose, ProposeError};
use api::prompt::{ModelSettings, Tokenizer};
use api::proxy::{
    DrainResult, Expose, Proxy, ProxyMetrics, ProxySettings, RequestLabels, RequestOutcome, Server,
};
use api::readiness::{Lifecycle, ReadinessCheck};
use api::routing::{OutboxSettings, Router, RouterParts, SelectSettings};
use http::Request;
use http_body_util::BodyExt;
use serde_json::Value;
use state::command::{
    BackendSpec, Charge, Command, Committed, Envelope, Founding, Item, Lane, Origin, Reply,
};
use state::ids::{BackendRef, LogIndex, ReplicaId, SessionId, UserKey};
use state::policy::PolicyConfig;
use state::{Registry, RouterState, StateView};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

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
    pub(crate) proxy: Arc<Proxy>,
    admin: axum::Router,
    log: Arc<Log>,
}

pub(crate) const HEALTHY: Health = Health {
    is_healthy: true,
    detail: None,
    waiting: 0,
    running: 0,
    kv_usage_permille: 0,
    adapters: None,
};

/// A drain timeout that is never reached in a test.
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

    /// Starts with API keys that engines require.
    pub(crate) async fn start_keyed(
        engines: &[&Engine],
        keys: EngineKeys,
        drain_deadline: Duration,
        change: impl FnOnce(&mut ProxySettings),
    ) -> Self {
        let backends = Backends::new(ProbeSettings::default());
        let backends = backends.dialing(keys, EngineDialer::default());
        Self::start_of(characters(), engines, backends, drain_deadline, change).await
    }

    /// Starts with real probes of the engines; returns once each was probed.
    pub(crate) async fn start_probed(engines: &[&Engine], probes: ProbeSettings) -> Self {
        Self::start_probed_by(engines, Backends::new(probes)).await
    }

    /// Starts like [`Fleet::start_probed`] with these probes.
    pub(crate) async fn start_probed_by(engines: &[&Engine], backends: Backends) -> Self {
        Self::start_probed_with(engines, backends, |_| {}).await
    }

    /// Starts like [`Fleet::start_probed_by`] with other settings.
    pub(crate) async fn start_probed_with(
        engines: &[&Engine],
        backends: Backends,
        change: impl FnOnce(&mut ProxySettings),
    ) -> Self {
        let fleet = Self::start_of(characters(), engines, backends, PATIENT, change).await;
        let hooks = Hooks {
            tokens_per_block: Arc::new(|_| 16.0),
            token_block_size: Arc::new(|_| None),
            observe_block_size: Arc::new(|_, _| {}),
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

    /// Starts with prompts cut into blocks by `models`.
    pub(crate) async fn start_cutting(engines: &[&Engine], models: ModelSettings) -> Self {
        let backends = Backends::new(ProbeSettings::default());
        Self::start_of(models, engines, backends, PATIENT, |_| {}).await
    }

    async fn start_of(
        models: ModelSettings,
        engines: &[&Engine],
        backends: Backends,
        drain_deadline: Duration,
        change: impl FnOnce(&mut ProxySettings),
    ) -> Self {
        let state = RouterState::new();
        let view = state.view();
        let log = Arc::new(Log(Mutex::new(LogStates {
            states: vec![state],
            last: 0,
        })));
        let router = router_of(models, ReplicaId(1), view, backends, true);
        let mut settings = ProxySettings::new(ReplicaId(1));
        settings.expose = Expose::Full;
        change(&mut settings);
        let fleet = Self::serve(router, settings, drain_deadline, log).await;
        fleet.found(engines);
        fleet.assume_healthy();
        fleet
    }

    /// Starts without the choice of policy or backends for requests.
    pub(crate) async fn start_strict(engines: &[&Engine]) -> Self {
        let state = RouterState::new();
        let view = state.view();
        let log = Arc::new(Log(Mutex::new(LogStates {
            states: vec![state],
            last: 0,
        })));
        let backends = Backends::new(ProbeSettings::default());
        let router = router(ReplicaId(1), view, backends, false);
        let settings = ProxySettings::new(ReplicaId(1));
        let fleet = Self::serve(router, settings, PATIENT, log).await;
        fleet.found(engines);
        fleet.assume_healthy();
        fleet
    }

    /// Starts replicas 1 and up of one cluster, each with its own settings, behind one log that all
    /// of them apply at once.
    pub(crate) async fn replicas(engines: &[&Engine], settings: Vec<ProxySettings>) -> Vec<Self> {
        let states: Vec<_> = settings.iter().map(|_| RouterState::new()).collect();
        let views: Vec<_> = states.iter().map(RouterState::view).collect();
        let log = Arc::new(Log(Mutex::new(LogStates { states, last: 0 })));
        let mut replicas = Vec::new();
        for (settings, view) in settings.into_iter().zip(views) {
            let backends = Backends::new(ProbeSettings::default());
            let router = router(settings.replica, view, backends, true);
            let replica = Self::serve(router, settings, PATIENT, Arc::clone(&log));
            replicas.push(replica.await);
        }
        replicas[0].found(engines);
        replicas.iter().for_each(Self::assume_healthy);
        replicas
    }

    /// Serves with `router`.
    async fn serve(
        (router, backends): (Arc<Router>, Arc<Backends>),
        settings: ProxySettings,
        drain_deadline: Duration,
        log: Arc<Log>,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let metrics = Arc::new(ProxyMetrics::default());
        let admission = Admission::new(&router).hold_at_zero(HoldAtZero::new(held()));
        let admission = Arc::new(admission);
        let serving = Arc::clone(&admission);
        tokio::spawn(async move { serving.run(CancellationToken::new()).await });
        let proxy = Arc::new(Proxy::new(
            &router,
            Arc::clone(&admission),
            Arc::clone(&backends),
            settings,
            metrics.clone(),
        ));
        let admin = admin(&router, &backends, &admission, &proxy, &log);
        let (leaving, drain) = (CancellationToken::new(), CancellationToken::new());
        let server = Server::new(listener, Arc::clone(&proxy)).leaving(leaving.clone());
        let server = tokio::spawn(server.run(drain.clone(), drain_deadline));
        Self {
            address,
            metrics,
            router,
            backends,
            admission,
            leaving,
            drain,
            server,
            proxy,
            admin,
            log,
        }
    }

    /// Marks every backend as healthy.
    pub(crate) fn assume_healthy(&self) {
        for backend in &self.registry().backends {
            self.backends.assume(backend.handle.slot, &HEALTHY);
        }
    }

    /// Founds the cluster and registers `engines`.
    fn found(&self, engines: &[&Engine]) {
        self.apply(Command::from(Founding::of_seed(
            7,
            PolicyConfig::LeastRequest,
        )));
        for (number, engine) in engines.iter().enumerate() {
            self.apply(Command::PutBackend(BackendSpec {
                labels: [("parity".to_owned(), (number % 2).to_string())].into(),
                ..engine.spec(number)
            }));
        }
    }

    /// Calls the admin API; returns the status and JSON body of the response.
    pub(crate) async fn call(&self, method: &str, path: &str, body: &Value) -> (u16, Value) {
        let request = Request::builder().method(method).uri(path);
        let request = request.header("content-type", "application/json");
        let request = request.body(axum::body::Body::from(body.to_string()));
        let response = self.admin.clone().oneshot(request.unwrap()).await.unwrap();
        let status = response.status().as_u16();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, serde_json::from_slice(&body).unwrap())
    }

    pub(crate) fn apply(&self, command: Command) {
        self.apply_at(1, command);
    }

    /// Like [`Self::apply`], proposed at this time.
    pub(crate) fn apply_at(&self, proposed_at_ms: u64, command: Command) {
        let mut log = self.log.0.lock().unwrap();
        let (replica, session, lane) = (ReplicaId(1), SessionId(1), Lane::Admin);
        let origin = Origin {
            replica,
            session,
            lane,
            seq: log.last + 1,
        };
        append(
            &mut log,
            &Envelope {
                origin,
                proposed_at_ms,
                command,
            },
        );
    }

    /// Returns the seed under which names and secrets are hashed.
    pub(crate) fn hash_seed(&self) -> u64 {
        self.registry().hash_seed
    }

    pub(crate) fn registry(&self) -> Arc<Registry> {
        self.router.view().registry()
    }

    /// Flushes the outbox continuously from here on.
    pub(crate) fn keep_flushing(&self) {
        let (router, log) = (Arc::clone(&self.router), self.log.clone());
        let never = CancellationToken::new();
        tokio::spawn(async move { router.run_outbox(log, never, PATIENT).await });
    }

    /// Writes past decisions to the archive until the result is stopped.
    pub(crate) fn keep_archiving(&self) -> Archiving {
        let (decisions, log) = (Arc::clone(self.proxy.decisions()), self.log.clone());
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        let task = tokio::spawn(async move { decisions.run_archive(log, stopped).await });
        Archiving { stop, task }
    }

    /// Flushes the outbox to the state.
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

    /// Returns the backend of the engine with this number.
    pub(crate) fn backend(&self, number: usize) -> BackendRef {
        self.registry().backends[number].handle
    }

    /// Returns the number of requests running at all backends, as routing counts them.
    pub(crate) fn running(&self) -> u32 {
        let registry = self.registry();
        registry
            .backends
            .iter()
            .map(|b| self.router.load().here(b.handle).running)
            .sum()
    }

    pub(crate) fn count(&self, outcome: RequestOutcome, code: u16) -> u64 {
        let code = code.into();
        self.metrics
            .requests
            .get_or_create(&RequestLabels { outcome, code })
            .get()
    }

    /// Returns the sum of all charges. Ends the outbox: call this once per fleet.
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

    /// Waits until nothing is in flight, here and in routing's accounting.
    pub(crate) async fn is_idle(&self) {
        eventually("no request under way", || {
            let here = self.metrics.reading.get() + self.metrics.in_flight.get();
            self.running() == 0 && here == 0
        })
        .await;
    }
}

/// The task that writes past decisions.
pub(crate) struct Archiving {
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Archiving {
    /// Waits until all decisions so far are written.
    pub(crate) async fn stop(self) {
        self.stop.cancel();
        self.task.await.unwrap();
    }
}

/// Model whose requests wait for an engine for as long as a test needs.
pub(crate) const HELD: &str = "held";
/// Model whose requests wait for an engine for a moment.
pub(crate) const HELD_BRIEFLY: &str = "held-briefly";

/// Returns the models whose requests wait while no engine is up.
fn held() -> Vec<(String, Option<Duration>)> {
    let held = [(HELD, PATIENT), (HELD_BRIEFLY, Duration::from_millis(30))];
    held.map(|(model, time)| (model.to_owned(), Some(time)))
        .to_vec()
}

/// Returns settings with blocks of 16 bytes.
fn characters() -> ModelSettings {
    ModelSettings {
        name: "*".to_owned(),
        tokenizer: Tokenizer::character(),
        block_size: Some(16),
        pairs: Default::default(),
    }
}

fn router(
    replica: ReplicaId,
    view: Arc<StateView>,
    backends: Backends,
    may_choose: bool,
) -> (Arc<Router>, Arc<Backends>) {
    router_of(characters(), replica, view, backends, may_choose)
}

/// Creates a recording router for `replica`. With `may_choose`, requests may select their policy
/// and backends.
fn router_of(
    models: ModelSettings,
    replica: ReplicaId,
    view: Arc<StateView>,
    backends: Backends,
    may_choose: bool,
) -> (Arc<Router>, Arc<Backends>) {
    let backends = Arc::new(backends);
    let router = Router::new(RouterParts {
        view,
        backends: Arc::clone(&backends),
        models: vec![models],
        replica,
        session: SessionId(u64::from(replica.0)),
        outbox: OutboxSettings::default(),
        overrides: match may_choose {
            true => PolicyConfig::defaults(),
            false => Vec::new(),
        },
        select: SelectSettings {
            allow: may_choose,
            models: Vec::new(),
        },
        clock: Clock::default(),
    });
    (Arc::new(router.recording()), backends)
}

fn admin(
    router: &Arc<Router>,
    backends: &Arc<Backends>,
    admission: &Arc<Admission>,
    proxy: &Proxy,
    log: &Arc<Log>,
) -> axum::Router {
    let readiness = ReadinessCheck {
        cluster: Arc::clone(log) as Arc<dyn Cluster>,
        view: Arc::clone(router.view()),
        backends: Arc::clone(backends),
        digests: Arc::default(),
        outbox: Arc::clone(router.outbox()),
        lifecycle: Lifecycle::default(),
        keys: api::users::api_keys::KeyRules::default(),
        is_insecure: false,
    };
    admin::router(Arc::new(Admin {
        cluster: Arc::clone(log) as Arc<dyn Cluster>,
        view: Arc::clone(router.view()),
        decider: Arc::clone(router.decider()),
        load: Arc::clone(router.load()),
        outbox: Arc::clone(router.outbox()),
        clock: router.clock().clone(),
        requests: Arc::clone(proxy.requests()),
        decisions: Arc::clone(proxy.decisions()),
        admission: Arc::clone(admission),
        backends: Arc::clone(backends),
        metrics: Arc::default(),
        digests: Arc::default(),
        figures: Arc::default(),
        kv_board: Arc::default(),
        discovery: Arc::default(),
        events: EventBus::default(),
        readiness: Arc::new(readiness),
        file: api::settings::SharedFileSettings::default(),
        reload: None,
        log_level: None,
        hosts: Vec::new(),
        tokens: None,
        certified: None,
        is_metrics_public: false,
    }))
}

/// A log that commits at once, and the states that it drives, one per replica.
struct Log(Mutex<LogStates>);

struct LogStates {
    states: Vec<RouterState>,
    last: u64,
}

fn append(log: &mut LogStates, envelope: &Envelope) -> Committed {
    log.last += 1;
    let index = LogIndex(log.last);
    let replies = log.states.iter_mut();
    let mut replies = replies.map(|state| state.apply(index, envelope.clone()));
    let reply = replies.next().unwrap();
    assert!(replies.all(|other| other == reply), "states differ");
    Committed { index, reply }
}

/// Implements only what `explain` and decisions need.
impl Cluster for Log {
    fn submit(&self, _: Command) -> BoxFuture<'_, Result<Committed, ProposeError>> {
        unreachable!("nothing is written through the admin API")
    }

    fn read_barrier(&self) -> BoxFuture<'_, Result<LogIndex, ProposeError>> {
        let last = self.0.lock().unwrap().last;
        Box::pin(async move { Ok(LogIndex(last)) })
    }

    fn with_state(&self, read: &mut dyn FnMut(&RouterState)) {
        read(&self.0.lock().unwrap().states[0]);
    }

    fn status(&self) -> ClusterStatus {
        unreachable!("nobody asks")
    }

    fn add_member(&self, _: ReplicaId, _: String) -> BoxFuture<'_, Result<u64, ChangeError>> {
        unreachable!("nobody is added")
    }

    fn promote_member(&self, _: ReplicaId) -> BoxFuture<'_, Result<u64, ChangeError>> {
        unreachable!("nobody is promoted")
    }

    fn remove_member(&self, _: ReplicaId) -> BoxFuture<'_, Result<u64, ChangeError>> {
        unreachable!("nobody is removed")
    }

    fn transfer_leader(
        &self,
        _: Option<ReplicaId>,
    ) -> BoxFuture<'_, Result<ReplicaId, ChangeError>> {
        unreachable!("nobody leads")
    }

    fn snapshot(&self) -> BoxFuture<'_, Result<u64, ChangeError>> {
        unreachable!("none is taken")
    }
}

impl Propose for Log {
    fn propose(&self, envelope: Envelope) -> BoxFuture<'_, Result<Committed, ProposeError>> {
        let committed = append(&mut self.0.lock().unwrap(), &envelope);
        Box::pin(async move { Ok(committed) })
    }
}

/// A log that sums up charges.
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

/// Waits until `condition` holds; it must then stay true.
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
