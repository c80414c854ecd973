//! A replica's data plane in front of scripted engines, with a real state and router.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use api::backends::{Backends, Health, ProbeSettings};
use api::ports::{BoxFuture, Propose, ProposeFailure};
use api::prompt::ModelSettings;
use api::proxy::{Drained, Outcome, Proxy, ProxyMetrics, ProxySettings, RequestLabels, Server};
use api::routing::{OutboxSettings, Parts, Router};
use state::RouterState;
use state::command::{
    BackendSpec, Charge, Command, Committed, Envelope, Item, Lane, Origin, Reply,
};
use state::ids::{LogIndex, ReplicaId, SessionId, UserKey};
use state::policy::PolicyConfig;
use state::users::FairnessSettings;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::client::Client;
use super::engine::Engine;

pub(crate) struct Fleet {
    pub(crate) address: SocketAddr,
    pub(crate) metrics: Arc<ProxyMetrics>,
    pub(crate) router: Arc<Router>,
    pub(crate) leaving: CancellationToken,
    pub(crate) drain: CancellationToken,
    pub(crate) server: JoinHandle<Drained>,
    state: RouterState,
    sequence: u64,
}

const HEALTHY: Health = Health {
    is_healthy: true,
    detail: None,
    waiting: 0,
    running: 0,
    kv_usage_permille: 0,
};

/// A drain that never cuts within a test.
const PATIENT: Duration = Duration::from_secs(60);

impl Fleet {
    pub(crate) async fn start(engines: &[&Engine]) -> Self {
        Self::start_with(engines, PATIENT, |_| {}).await
    }

    pub(crate) async fn start_with(
        engines: &[&Engine],
        drain_deadline: Duration,
        change: impl FnOnce(&mut ProxySettings),
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let state = RouterState::new();
        let view = state.view();
        let backends = Arc::new(Backends::new(ProbeSettings::default()));
        let models = ModelSettings {
            name: "*".to_owned(),
            tokenizer: "character".to_owned(),
            block_size: 16,
        };
        let router = Arc::new(Router::new(Parts {
            view: Arc::clone(&view),
            backends: Arc::clone(&backends),
            models: vec![models],
            replica: ReplicaId(1),
            session: SessionId(1),
            outbox: OutboxSettings::default(),
            overrides: PolicyConfig::defaults(),
        }));
        let metrics = Arc::new(ProxyMetrics::default());
        let mut settings = ProxySettings::new(ReplicaId(1));
        change(&mut settings);
        let proxy = Proxy::new(
            Arc::clone(&router),
            backends.clone(),
            view,
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
            leaving,
            drain,
            server,
            state,
            sequence: 0,
        };
        fleet.apply(Command::InitCluster {
            hash_seed: 7,
            policy: PolicyConfig::LeastRequest,
            fairness: FairnessSettings::default(),
        });
        for (number, engine) in engines.iter().enumerate() {
            fleet.apply(Command::PutBackend(BackendSpec {
                id: format!("e{number}"),
                url: format!("http://{}", engine.address),
                models: vec!["m".to_owned()],
                labels: [].into(),
                capacity_blocks: Some(1000),
                kv_events: None,
                kv_replay: None,
            }));
        }
        for backend in &fleet.state.view().registry().backends {
            backends.assume(backend.handle.slot, &HEALTHY);
        }
        fleet
    }

    fn apply(&mut self, command: Command) {
        self.sequence += 1;
        let seq = self.sequence;
        let (replica, session, lane) = (ReplicaId(1), SessionId(1), Lane::Admin);
        let origin = Origin {
            replica,
            session,
            lane,
            seq,
        };
        self.state.apply(
            LogIndex(seq),
            Envelope {
                origin,
                proposed_at_ms: 1,
                command,
            },
        );
    }

    pub(crate) async fn client(&self) -> Client {
        Client::connect(self.address).await
    }

    /// Requests running at all backends, as routing counts them.
    pub(crate) fn running(&self) -> u32 {
        let registry = self.state.view().registry();
        registry
            .backends
            .iter()
            .map(|b| self.router.load().here(b.handle).running)
            .sum()
    }

    pub(crate) fn count(&self, outcome: Outcome, code: u16) -> u64 {
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
            self.running() == 0 && self.metrics.in_flight.get() == 0
        })
        .await;
    }
}

/// A log that adds up charges.
#[derive(Default)]
struct Bill(Mutex<Charge>);

impl Propose for Bill {
    fn propose(&self, envelope: Envelope) -> BoxFuture<'_, Result<Committed, ProposeFailure>> {
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
