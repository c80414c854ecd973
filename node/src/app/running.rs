//! A replica at work: how its parts are put together, and how they are taken apart again.

use std::sync::Arc;
use std::time::Duration;

use api::admin::{self, Admin, Events, Lifecycle};
use api::backends::{Backends, Hooks};
use api::metrics::{self, Metrics};
use api::ports::{Cluster, Propose};
use api::proxy::{Drained, Proxy, ProxyMetrics, Server};
use api::routing::{self, OutboxSettings, OutboxStatus, Router};
use raft::{Member, Replica, Role, StartError};
use state::View;
use state::ids::SessionId;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::exchange::{self, Inbox};
use super::machine::{RouterMachine, Shared};
use super::ports::LogPort;
use super::shutdown::ShutdownHandle;
use super::sockets::{Addresses, Sockets};
use super::warmup::warm_up;
use super::{absence, events, formation, judge, registration};
use crate::config::{Config, Drain};

/// Longest wait for what was learnt last to get into the log when the replica leaves.
const FLUSH_DEADLINE: Duration = Duration::from_secs(5);
/// Longest wait for another replica to take over when the leader leaves.
const HANDOVER_DEADLINE: Duration = Duration::from_secs(3);
/// Longest wait for the background loops to end.
const STOP_DEADLINE: Duration = Duration::from_secs(5);

/// A replica that serves. Drop it only after [`Running::until`]: its tasks go on otherwise.
pub struct Running {
    addresses: Addresses,
    drain: Drain,
    replica: Replica,
    port: Arc<LogPort>,
    lifecycle: Lifecycle,
    stops: Stops,
    tasks: TaskTracker,
    proxy: JoinHandle<Drained>,
    outbox: JoinHandle<OutboxStatus>,
}

/// What is told to end, in this order.
#[derive(Default)]
struct Stops {
    /// Clients are to go elsewhere.
    leaving: CancellationToken,
    /// No more connections are to be accepted.
    no_more_requests: CancellationToken,
    /// Nothing more will be learnt: the outbox is to empty itself and end.
    no_more_facts: CancellationToken,
    /// Everything else is to end.
    all: CancellationToken,
}

/// What the data plane, the admin API and the loops share.
#[derive(Clone)]
struct Parts {
    shared: Arc<Shared>,
    view: Arc<View>,
    backends: Arc<Backends>,
    router: Arc<Router>,
    metrics: Arc<Metrics>,
    events: Events,
    lifecycle: Lifecycle,
}

impl Parts {
    fn new(config: &Config, session: SessionId) -> Self {
        let shared = Arc::new(Shared::default());
        let view = shared.state().view();
        let events = Events::default();
        shared.digests.announce(events.clone());
        let backends = Arc::new(Backends::new(formation::probe_settings(config)));
        backends.announce(events.clone());
        let metrics = Arc::new(Metrics::default());
        let router = Arc::new(Router::new(routing::Parts {
            replica: config.node.id,
            session,
            view: Arc::clone(&view),
            backends: Arc::clone(&backends),
            models: config.models.clone(),
            outbox: OutboxSettings {
                flush_interval: config.cluster.flush_interval,
                ..OutboxSettings::default()
            },
            overrides: config.policy_overrides.clone(),
        }));
        metrics.register(|registry| router.metrics().register(registry));
        Self {
            shared,
            view,
            backends,
            router,
            metrics,
            events,
            lifecycle: Lifecycle::default(),
        }
    }

    fn proxy(&self, config: &Config) -> Arc<Proxy> {
        let metrics = Arc::new(ProxyMetrics::default());
        self.metrics.register(|registry| metrics.register(registry));
        Arc::new(Proxy::new(
            Arc::clone(&self.router),
            Arc::clone(&self.backends),
            Arc::clone(&self.view),
            formation::proxy_settings(config),
            metrics,
        ))
    }

    fn admin(&self, port: &Arc<LogPort>) -> Arc<Admin> {
        let cluster: Arc<dyn Cluster> = Arc::clone(port) as _;
        self.metrics.watch(metrics::Replica {
            cluster: Arc::clone(&cluster),
            view: Arc::clone(&self.view),
            router: Arc::clone(&self.router),
            backends: Arc::clone(&self.backends),
            digests: Arc::clone(&self.shared.digests),
        });
        Arc::new(Admin {
            cluster,
            view: Arc::clone(&self.view),
            router: Arc::clone(&self.router),
            backends: Arc::clone(&self.backends),
            metrics: Arc::clone(&self.metrics),
            digests: Arc::clone(&self.shared.digests),
            events: self.events.clone(),
            lifecycle: self.lifecycle.clone(),
        })
    }

    fn probe_hooks(&self, replica: &Replica) -> Hooks {
        let (ratios, observer) = (Arc::clone(&self.router), Arc::clone(&self.router));
        let status = replica.watch();
        Hooks {
            tokens_per_block: Arc::new(move |model| ratios.tokens_per_block(model)),
            observe: Arc::new(move |backend, facts| observer.observe(backend, facts)),
            is_leader: Arc::new(move || status.borrow().role == Role::Leader),
        }
    }
}

/// Puts a replica together and sets it to work.
pub(super) async fn start(
    config: Config,
    sockets: Sockets,
    addresses: Addresses,
) -> anyhow::Result<Running> {
    let session = SessionId(rand::random());
    let parts = Parts::new(&config, session);
    let inbox = Inbox {
        router: Arc::clone(&parts.router),
        digests: Arc::clone(&parts.shared.digests),
    };
    let replica = Replica::start(
        formation::raft_options(&config, &addresses, session),
        sockets.peer,
        RouterMachine::new(Arc::clone(&parts.shared)),
        Arc::new(inbox),
    )
    .await
    .map_err(explain_start)?;
    let shared = Arc::clone(&parts.shared);
    let port = Arc::new(LogPort::new(
        config.node.id,
        session,
        replica.clone(),
        shared,
    ));
    let (stops, tasks) = (Stops::default(), TaskTracker::new());
    let lifecycle = parts.lifecycle.clone();

    let server = Server::new(sockets.data, parts.proxy(&config)).leaving(stops.leaving.clone());
    let deadline = config.drain.deadline;
    let no_more = stops.no_more_requests.clone();
    let cluster: Arc<dyn Cluster> = Arc::clone(&port) as _;
    let serving = serve_clients(
        server,
        Arc::clone(&cluster),
        parts.clone(),
        no_more,
        deadline,
    );
    let proxy = tokio::spawn(serving);
    let admin = parts.admin(&port);
    tasks.spawn(serve_admin(sockets.admin, admin, stops.all.clone()));
    let outbox = spawn_outbox(&parts, &port, &stops);
    spawn_loops(&tasks, &parts, &replica, &port, &stops.all);
    let view = Arc::clone(&parts.view);
    tasks.spawn(registration::register(
        cluster,
        view,
        config.backends,
        stops.all.clone(),
    ));
    tracing::info!(
        replica = config.node.id.0,
        data = %addresses.data,
        admin = %addresses.admin,
        peer = %addresses.peer,
        "replica listens"
    );
    let drain = config.drain;
    Ok(Running {
        addresses,
        drain,
        replica,
        port,
        lifecycle,
        stops,
        tasks,
        proxy,
        outbox,
    })
}

fn spawn_outbox(parts: &Parts, port: &Arc<LogPort>, stops: &Stops) -> JoinHandle<OutboxStatus> {
    let (router, stop) = (Arc::clone(&parts.router), stops.no_more_facts.clone());
    let propose: Arc<dyn Propose> = Arc::clone(port) as _;
    tokio::spawn(async move { router.run_outbox(propose, stop, FLUSH_DEADLINE).await })
}

/// The loops that run beside requests until `stop`.
fn spawn_loops(
    tasks: &TaskTracker,
    parts: &Parts,
    replica: &Replica,
    port: &Arc<LogPort>,
    stop: &CancellationToken,
) {
    let cluster: Arc<dyn Cluster> = Arc::clone(port) as _;
    let (view, router) = (Arc::clone(&parts.view), Arc::clone(&parts.router));
    let hooks = parts.probe_hooks(replica);
    tasks.spawn(Arc::clone(&parts.backends).run(Arc::clone(&view), hooks, stop.clone()));
    let digests = Arc::clone(&parts.shared.digests);
    tasks.spawn(exchange::tell(
        replica.clone(),
        Arc::clone(&router),
        Arc::clone(&digests),
        stop.clone(),
    ));
    tasks.spawn(judge::watch(replica.clone(), digests, stop.clone()));
    tasks.spawn(absence::watch(Arc::clone(&cluster), stop.clone()));
    tasks.spawn(events::log(parts.events.clone(), stop.clone()));
    tasks.spawn(admin::events::follow(
        cluster,
        view,
        parts.events.clone(),
        stop.clone(),
    ));
}

async fn serve_clients(
    server: Server,
    cluster: Arc<dyn Cluster>,
    parts: Parts,
    no_more: CancellationToken,
    deadline: Duration,
) -> Drained {
    tokio::select! {
        () = no_more.cancelled() => {}
        () = warm_up(&*cluster, &parts.view, &parts.backends) => {}
    }
    parts.lifecycle.serve();
    drop((cluster, parts));
    server.run(no_more, deadline).await
}

async fn serve_admin(listener: TcpListener, admin: Arc<Admin>, stop: CancellationToken) {
    let stopped = stop.cancelled_owned();
    let served = axum::serve(listener, admin::router(admin))
        .with_graceful_shutdown(stopped)
        .await;
    if let Err(error) = served {
        tracing::error!(%error, "admin listener ended");
    }
}

/// Adds what to do to an error that has a remedy.
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

impl Running {
    /// Where it listens.
    #[must_use]
    pub fn addresses(&self) -> Addresses {
        self.addresses
    }

    /// The log and the members.
    #[must_use]
    pub fn cluster(&self) -> Arc<dyn Cluster> {
        Arc::clone(&self.port) as _
    }

    /// Serves until `shutdown` says to leave, then leaves: not ready at once, new connections for
    /// `drain.dns_ttl` more with every answer telling the client to go elsewhere, leadership handed
    /// over, requests finished up to `drain.deadline`, what was learnt flushed into the log, the
    /// store closed. An abort leaves out all but the last.
    pub async fn until(mut self, shutdown: &ShutdownHandle) {
        shutdown.draining().await;
        self.lifecycle.drain();
        self.stops.leaving.cancel();
        tracing::info!("draining");
        tokio::select! {
            biased;
            () = shutdown.aborted() => {}
            () = self.finish() => {}
        }
        self.proxy.abort();
        self.outbox.abort();
        self.lifecycle.end_streams();
        self.stops.all.cancel();
        self.tasks.close();
        if tokio::time::timeout(STOP_DEADLINE, self.tasks.wait())
            .await
            .is_err()
        {
            tracing::warn!(
                tasks = self.tasks.len(),
                "background tasks did not end in time"
            );
        }
        self.replica.shutdown().await;
        tracing::info!("replica left");
    }

    /// Brings to an end what clients and the cluster wait for.
    async fn finish(&mut self) {
        tokio::time::sleep(self.drain.dns_ttl).await;
        self.stops.no_more_requests.cancel();
        let (replica, proxy) = (&self.replica, &mut self.proxy);
        match tokio::join!(proxy, hand_over(replica)).0 {
            Ok(Drained { cut: 0 }) => {}
            Ok(Drained { cut }) => tracing::warn!(connections = cut, "connections cut off"),
            Err(error) => tracing::error!(%error, "data plane broke"),
        }
        self.stops.no_more_facts.cancel();
        match (&mut self.outbox).await {
            Ok(OutboxStatus {
                queued_items: 0, ..
            }) => {}
            Ok(left) => {
                let items = left.queued_items;
                tracing::warn!(items, "left with facts that did not get into the log");
            }
            Err(error) => tracing::error!(%error, "outbox broke"),
        }
    }
}

/// Gives leadership to another voter, if this replica has it and there is one.
pub(super) async fn hand_over(replica: &Replica) {
    let status = replica.status();
    let is_other_voter = |(id, member): (&u8, &Member)| *id != status.id && member.is_voter;
    if status.role != Role::Leader || !status.members.iter().any(is_other_voter) {
        return;
    }
    match tokio::time::timeout(HANDOVER_DEADLINE, replica.transfer_leader(None)).await {
        Ok(Ok(leader)) => tracing::info!(leader, "leadership handed over"),
        Ok(Err(error)) => tracing::warn!(%error, "leadership not handed over"),
        Err(_) => tracing::warn!("leadership not handed over in time"),
    }
}
