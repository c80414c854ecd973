//! A replica without sockets, HTTP and probes: the log with the state behind it, the router and the
//! queues in front of it, and the loops between them.
//!
//! [`RunningReplica`](super::RunningReplica) adds listeners, probes and readers of KV events. A
//! simulation starts the core alone, over its own transport, disk and clock, and simulates
//! everything around it. On a current-thread runtime with paused time the core is deterministic:
//! the same calls in the same order produce the same commands.
//! docs/adr/0045 lists what that requires of the code it runs.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use api::admission::{Admission, HoldAtZero};
use api::base::clock::Clock;
use api::cluster::divergence::Digests;
use api::cluster::events::EventBus;
use api::cluster::figures::FigureBoard;
use api::engines::backends::{Backends, EngineDialer};
use api::ports::{Cluster, Propose};
use api::proxy::{DecisionLog, LoggedRequests};
use api::routing::{OutboxSettings, OutboxStatus, Router, RouterParts};
use raft::{Replica, StartError, Storage, Transport};
use state::ids::SessionId;
use state::prefix::HashSecret;
use state::{RouterState, StateView};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::clocks::ClusterClocks;
use super::gossip::{self, GossipInbox};
use super::leadership::hand_over;
pub use super::machine::ApplyObserver;
use super::machine::{RouterMachine, SharedState};
use super::ports::LogPort;
use super::scaling::{ScaleSource, Scaling};
use super::{divergence, log_format, options, readers, registration, session_expiry};
use crate::config::Config;
use crate::planted::{self, Bug};

/// Maximum time to wait until the last updates are committed when the replica leaves.
const FLUSH_DEADLINE: Duration = Duration::from_secs(5);
/// Maximum time to wait until the background loops end.
const STOP_DEADLINE: Duration = Duration::from_secs(5);

/// Environment of a replica's core: transport, storage, clock and random values.
pub struct CorePorts {
    /// Transport of calls between replicas. Peers learn its port together with `listen.advertise`.
    pub transport: Arc<dyn Transport>,
    /// Storage of the log.
    pub storage: Storage,
    /// Session of this run. Drawn at random at every start, or from the seed of a simulation.
    pub session: SessionId,
    /// Hash seed used if this replica forms the cluster. It is secret, because a known seed makes
    /// collisions easy.
    pub hash_seed: u64,
    /// Hash secret used if this replica forms the cluster.
    pub hash_secret: HashSecret,
    /// Wall clock.
    pub clock: Clock,
    /// Dialer for connections to engines, with TLS where required.
    pub dialer: EngineDialer,
    /// Newest log format that this replica knows and announces: that of this build, or in
    /// simulations that of an earlier one.
    pub format: u8,
    /// Source of the wanted number of replicas; `None` if the membership does not follow any.
    pub scale: Option<Arc<dyn ScaleSource>>,
    /// Observer of every change of the state; `None` in production.
    pub observer: Option<Arc<dyn ApplyObserver>>,
}

impl CorePorts {
    /// Returns the production environment: sled, the system clock, a random session.
    #[must_use]
    pub fn real(transport: Arc<dyn Transport>) -> Self {
        Self {
            transport,
            storage: Storage::Sled,
            session: SessionId(rand::random()),
            hash_seed: rand::random(),
            hash_secret: HashSecret::new(rand::random()),
            clock: Clock::default(),
            dialer: EngineDialer::default(),
            format: state::codec::FORMAT_VERSION,
            scale: None,
            observer: None,
        }
    }
}

/// A running replica core. Its tasks continue until [`ReplicaCore::stop`], or until their runtime
/// is dropped, which looks like a crash from inside.
pub struct ReplicaCore {
    replica: Replica,
    port: Arc<LogPort>,
    parts: CoreParts,
    clock: Clock,
    stops: CoreShutdown,
    tasks: TaskTracker,
    outbox: JoinHandle<OutboxStatus>,
    scaling: Option<Arc<Scaling>>,
}

/// Stop signals of a core, in the order in which they are given.
#[derive(Default)]
struct CoreShutdown {
    /// Signals that no more updates arrive: the outbox drains and ends.
    no_more_facts: CancellationToken,
    /// Signals that everything else ends.
    all: CancellationToken,
}

/// Components that the parts of a core share.
struct CoreParts {
    shared: Arc<SharedState>,
    view: Arc<StateView>,
    backends: Arc<Backends>,
    router: Arc<Router>,
    admission: Arc<Admission>,
    events: EventBus,
    clocks: Arc<ClusterClocks>,
    figures: Arc<FigureBoard>,
    decisions: Arc<OnceLock<Arc<DecisionLog>>>,
}

impl CoreParts {
    fn new(
        config: &Config,
        session: SessionId,
        clocks: Arc<ClusterClocks>,
        dialer: EngineDialer,
    ) -> Self {
        let clock = clocks.clock();
        let shared = Arc::new(SharedState::default());
        let view = shared.state().view();
        let events = EventBus::new(clock.clone());
        shared.digests.announce(events.clone());
        let backends = Backends::new(config.probes.clone())
            .dialing(config.engine_keys.clone(), dialer)
            .breaking(config.circuit)
            .preferring_adapters(config.sections.routing.queueing_threshold_lora);
        let backends = Arc::new(backends);
        backends.announce(events.clone());
        let router = Router::new(RouterParts {
            replica: config.id,
            session,
            view: Arc::clone(&view),
            backends: Arc::clone(&backends),
            models: config.models.clone(),
            outbox: OutboxSettings {
                flush_interval: config.cluster.flush_interval,
                ..OutboxSettings::default()
            },
            overrides: config.policy_overrides.clone(),
            select: config.select.clone(),
            clock,
        });
        let is_logged = config.log.access != LoggedRequests::Off;
        let router = Arc::new(match config.admin.decisions {
            0 if !is_logged => router,
            _ => router.recording(),
        });
        let holds = config.sections.models.iter();
        let holds = holds.map(|model| (model.name.clone(), model.hold_at_zero));
        let admission = Admission::new(&router)
            .codel_target(config.admission.codel_target)
            .hold_at_zero(HoldAtZero::new(holds.collect()));
        let admission = Arc::new(admission);
        Self {
            shared,
            view,
            backends,
            router,
            admission,
            events,
            clocks,
            figures: Arc::default(),
            decisions: Arc::default(),
        }
    }

    /// Returns the receiver of peers' messages. It passes messages that it cannot read to `observer`.
    fn inbox(&self, observer: Option<Arc<dyn ApplyObserver>>) -> Arc<GossipInbox> {
        Arc::new(GossipInbox {
            load: Arc::clone(self.router.load()),
            shares: Arc::clone(self.router.shares()),
            permits: Arc::clone(self.router.permits()),
            admission: Arc::clone(&self.admission),
            digests: Arc::clone(&self.shared.digests),
            clocks: Arc::clone(&self.clocks),
            figures: Arc::clone(&self.figures),
            decisions: Arc::clone(&self.decisions),
            observer,
        })
    }
}

impl ReplicaCore {
    /// Assembles and starts a core. Ignores the config of listeners and clients, except that it
    /// announces the ports of `listen.data` and `listen.admin` to members. Runs no probes.
    ///
    /// # Errors
    /// Fails if the store cannot be opened or is damaged.
    pub async fn start(config: Config, ports: CorePorts) -> anyhow::Result<Self> {
        let CorePorts {
            transport,
            storage,
            session,
            hash_seed,
            hash_secret,
            clock,
            dialer,
            format,
            scale,
            observer,
        } = ports;
        let hashing = (hash_seed, hash_secret);
        let session = match planted::is(Bug::SessionKept) {
            true => SessionId(1),
            false => session,
        };
        let clocks = Arc::new(ClusterClocks::new(clock));
        let clock = clocks.clock();
        let parts = CoreParts::new(&config, session, Arc::clone(&clocks), dialer);
        let first = options::first_command(&config, session, hashing, &clock);
        let mut options = options::raft_options(&config, transport.local_addr(), storage, &first);
        options.labels.extend([log_format::label(format)]);
        let inbox = parts.inbox(observer.clone());
        let machine = RouterMachine::new(Arc::clone(&parts.shared), observer).with_format(format);
        let replica = Replica::start(options, transport, Box::new(machine), inbox).await;
        let replica = replica.map_err(explain_start)?;
        let scaling = Scaling::new(&config, scale);
        let port = LogPort::new(
            config.id,
            session,
            replica.clone(),
            Arc::clone(&parts.shared),
            clocks,
        );
        let port = Arc::new(port.scaled(scaling.clone()));
        let stops = CoreShutdown::default();
        let (router, no_more) = (Arc::clone(&parts.router), stops.no_more_facts.clone());
        let propose: Arc<dyn Propose> = Arc::clone(&port) as _;
        let flushing = async move { router.run_outbox(propose, no_more, FLUSH_DEADLINE).await };
        let core = Self {
            outbox: tokio::spawn(flushing),
            replica,
            port,
            parts,
            clock,
            stops,
            tasks: TaskTracker::new(),
            scaling,
        };
        core.spawn_loops(config);
        Ok(core)
    }

    /// Starts the background loops.
    fn spawn_loops(&self, config: Config) {
        let (tasks, parts) = (&self.tasks, &self.parts);
        let stop = || self.stops.all.clone();
        let (sampler, stopped) = (Arc::clone(parts.router.dispatcher()), stop());
        tasks.spawn(async move { sampler.run_samples(stopped).await });
        tasks.spawn(gossip::run_broadcast(
            self.replica.clone(),
            (
                Arc::clone(parts.router.load()),
                Arc::clone(parts.router.shares()),
            ),
            Arc::clone(&parts.admission),
            Arc::clone(&parts.shared.digests),
            (Arc::clone(&parts.clocks), Arc::clone(&parts.figures)),
            stop(),
        ));
        let (admission, stopped) = (Arc::clone(&parts.admission), stop());
        tasks.spawn(async move { admission.run(stopped).await });
        let (admission, stopped) = (Arc::clone(&parts.admission), stop());
        let replica = config.id;
        tasks.spawn(async move { admission.run_demand(replica, stopped).await });
        let (permits, cluster, stopped) =
            (Arc::clone(parts.router.permits()), self.cluster(), stop());
        tasks.spawn(async move { permits.run(cluster, stopped).await });
        let shared = Arc::clone(&parts.shared);
        tasks.spawn(divergence::watch(self.replica.clone(), shared, stop()));
        tasks.spawn(session_expiry::watch(self.cluster(), stop()));
        let view = Arc::clone(&parts.view);
        tasks.spawn(readers::assign(self.cluster(), view, stop()));
        let (router, backends, file) = (Arc::clone(&parts.router), config.backends, config.file);
        let registering = registration::register(self.cluster(), router, backends, file, stop());
        tasks.spawn(registering);
        if let Some(scaling) = self.scaling.clone() {
            // A replica that leaves must not rejoin.
            let stopped = self.stops.no_more_facts.clone();
            tasks.spawn(scaling.follow(self.replica.clone(), stopped));
        }
    }

    /// Returns the log and its members.
    #[must_use]
    pub fn replica(&self) -> &Replica {
        &self.replica
    }

    /// Returns the log and its members, as the port of `api`.
    #[must_use]
    pub fn cluster(&self) -> Arc<dyn Cluster> {
        Arc::clone(&self.port) as _
    }

    /// Returns the router, which decides where requests go and accounts for them.
    #[must_use]
    pub fn router(&self) -> &Arc<Router> {
        &self.parts.router
    }

    /// Returns the queues in front of the router.
    #[must_use]
    pub fn admission(&self) -> &Arc<Admission> {
        &self.parts.admission
    }

    /// Returns the backends' health. Each is unknown until it is reported, see
    /// [`api::engines::backends::SlotTable`].
    #[must_use]
    pub fn backends(&self) -> &Arc<Backends> {
        &self.parts.backends
    }

    /// Returns the published part of the state.
    #[must_use]
    pub fn view(&self) -> &Arc<StateView> {
        &self.parts.view
    }

    /// Returns the digests of the state by log index.
    #[must_use]
    pub fn digests(&self) -> &Arc<Digests> {
        &self.parts.shared.digests
    }

    /// Returns the bus with the cluster's events, as far as this replica knows them.
    #[must_use]
    pub fn events(&self) -> &EventBus {
        &self.parts.events
    }

    /// Returns the board with the figures of this replica and its peers. Only `super::replica_stats` sets
    /// this replica's.
    #[must_use]
    pub fn figures(&self) -> &Arc<FigureBoard> {
        &self.parts.figures
    }

    /// Starts to exchange past decisions with peers. Only the first log is used.
    pub(super) fn share_decisions(&self, log: &Arc<DecisionLog>) {
        let log = Arc::clone(self.parts.decisions.get_or_init(|| Arc::clone(log)));
        let (cluster, stop) = (self.cluster(), self.stopping());
        self.spawn_task(async move { log.run_archive(cluster, stop).await });
    }

    /// Returns the cluster's clock.
    #[must_use]
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Calls `read` on the state between two applies. `read` must be short, because it blocks
    /// `apply`.
    pub fn with_state<R>(&self, read: impl FnOnce(&RouterState) -> R) -> R {
        read(&self.parts.shared.state())
    }

    /// Returns a function that loses the replicated state of this replica, as a memory fault might:
    /// it leaves an empty state at the same log index. For tests and fault injection.
    pub fn state_loss(&self) -> impl Fn() + Send + Sync + use<> {
        let port = Arc::clone(&self.port);
        move || port.lose_state()
    }

    /// Returns a token that is cancelled when the core ends, for tasks outside its own loops.
    pub(super) fn stopping(&self) -> CancellationToken {
        self.stops.all.clone()
    }

    /// Runs `task` together with the core's own tasks. The core waits for it after cancelling
    /// [`ReplicaCore::stopping`].
    pub(super) fn spawn_task(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(task);
    }

    /// Leaves gracefully: answers waiting requests, transfers leadership, flushes updates, leaves
    /// the cluster if no longer wanted, and closes the store.
    pub async fn stop(mut self) {
        self.parts.admission.reject_all();
        hand_over(&self.replica).await;
        self.flush().await;
        self.end().await;
    }

    /// Commits the remaining updates, and leaves the cluster if no longer wanted. No updates may
    /// arrive after that.
    pub(super) async fn flush(&mut self) {
        self.stops.no_more_facts.cancel();
        match (&mut self.outbox).await {
            Ok(OutboxStatus {
                queued_items: 0, ..
            }) => {}
            Ok(left) => {
                let items = left.queued_items;
                tracing::warn!(items, "exiting with uncommitted updates");
            }
            Err(error) => tracing::error!(%error, "outbox failed"),
        }
        // Stay a member until the last update: others cannot propose it.
        if let Some(scaling) = &self.scaling {
            scaling.leave(&self.replica).await;
        }
    }

    /// Ends all tasks immediately and closes the store.
    pub(super) async fn end(self) {
        self.outbox.abort();
        self.stops.no_more_facts.cancel();
        self.stops.all.cancel();
        self.tasks.close();
        let ended = tokio::time::timeout(STOP_DEADLINE, self.tasks.wait()).await;
        if ended.is_err() {
            let tasks = self.tasks.len();
            tracing::warn!(tasks, "background tasks did not stop in time");
        }
        self.replica.shutdown().await;
        tracing::info!("replica left");
    }
}

/// Converts an error of the start, and adds a remedy if one exists.
fn explain_start(error: StartError) -> anyhow::Error {
    match error {
        StartError::Damaged { .. } => anyhow::anyhow!(
            "{error}; nothing was changed: `quorate recover` sets the store aside, so that the \
             replica can be rebuilt from its peers"
        ),
        StartError::Options(_) | StartError::WrongStore(_) | StartError::Io { .. } => {
            anyhow::Error::new(error).context("start replica")
        }
    }
}

#[cfg(test)]
mod tests;
