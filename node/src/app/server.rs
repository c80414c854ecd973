//! A running replica: its core, and the connections to clients, operators and engines.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use admin::{Admin, CertifiedOperators, LogLevelControl, ReloadRequests};
use anyhow::Context as _;
use api::engines::backends::{EngineDialer, Hooks};
use api::engines::discovery::{DiscoveryBoard, DiscoveryMetrics, DiscoveryParts};
use api::engines::kv_transport::socket;
use api::kv_events::reader;
use api::kv_events::stream_status::StreamBoard;
use api::metrics::Metrics;
use api::net::tls::CertificateMetrics;
use api::ports::Cluster;
use api::proxy::{
    DecisionLog, DrainResult, Proxy, ProxyMetrics, ProxySettings, RequestReader, Server,
};
use api::readiness::{Lifecycle, ReadinessCheck};
use api::scaler::{self, Scaler, ScalerTls};
use api::settings::SharedFileSettings;
use api::traces::{SpanExport, Tracer, TracingMetrics, TracingSettings};
use api::users::api_keys::{KeyRules, ListAge};
use arc_swap::ArcSwap;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use raft::{PeerSecret, Role, Tcp};
use state::command::Item;
use state::ids::ReplicaId;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::App;
use super::key_file::{self, read_admin_tokens, read_api_keys};
use super::leadership::hand_over;
use super::log_metrics::LogMetrics;
use super::picker::PickerParts;
use super::reloading::{ReloadHandle, RunningParts};
use super::replica_core::{CorePorts, ReplicaCore};
use super::replica_stats::FigureSources;
use super::shutdown::ShutdownHandle;
use super::sockets::Addresses;
use super::tls::ReplicaCertificates;
use super::warmup::warm_up;
use super::{events, options, ranks, scaling};
use crate::config::{Config, DrainConfig, foreign_variables};
use crate::process;

/// A replica that serves. Call [`RunningReplica::until`] before dropping it; otherwise its tasks
/// continue.
pub struct RunningReplica {
    addresses: Addresses,
    drain: Arc<ArcSwap<DrainConfig>>,
    core: ReplicaCore,
    lifecycle: Lifecycle,
    stops: ReplicaShutdown,
    proxy: JoinHandle<DrainResult>,
    /// Task that serves gateways; `None` if the replica serves none.
    picker: Option<JoinHandle<DrainResult>>,
}

/// Stop signals of a replica that precede the core's own, in the order in which they are given.
#[derive(Default)]
struct ReplicaShutdown {
    /// Signals that clients must use another replica.
    leaving: CancellationToken,
    /// Signals that the replica accepts no more connections.
    no_more_requests: CancellationToken,
}

/// Returns the transport to peers.
fn peers(
    config: &Config,
    certificates: &ReplicaCertificates,
    listener: TcpListener,
) -> anyhow::Result<Tcp> {
    let mut tcp = Tcp::new(listener)?;
    let certificates = certificates.peer_tls(&config.cluster.name);
    let is_optional = config.cluster.authentication_optional;
    if let Some(secret) = config.secret.clone() {
        tcp = tcp.with_secret(PeerSecret {
            secret,
            // Beside certificates, it is what replicas without one need.
            is_optional: is_optional && certificates.is_none(),
            cluster_name: config.cluster.name.clone(),
            id: config.id.0,
        });
    }
    Ok(match certificates {
        Some(tls) if is_optional => tcp.with_optional_certificates(tls),
        Some(tls) => tcp.with_certificates(tls),
        None => tcp,
    })
}

/// Returns the environment of the core, as the config describes it.
fn core_ports(
    config: &Config,
    tls: &ReplicaCertificates,
    listener: TcpListener,
) -> anyhow::Result<CorePorts> {
    Ok(CorePorts {
        dialer: tls.engines.clone(),
        scale: scaling::source(&config.cluster.statefulset),
        ..CorePorts::real(Arc::new(peers(config, tls, listener)?))
    })
}

/// Assembles and starts a replica.
pub(super) async fn start(app: App) -> anyhow::Result<RunningReplica> {
    let App {
        mut config,
        sockets,
        addresses,
        file,
        reload,
        reload_requests,
        log_level,
        tls,
    } = app;
    // Members must learn the ports that the system chose.
    config.listen.data = addresses.data;
    config.listen.admin = addresses.admin;
    crate::file_permissions::private_folder(&config.node.data_dir).with_context(|| {
        let folder = config.node.data_dir.display();
        format!("make data folder {folder} private")
    })?;
    let ports = core_ports(&config, &tls, sockets.peer)?;
    let core = ReplicaCore::start(config.clone(), ports).await?;
    let (stops, lifecycle) = (ReplicaShutdown::default(), Lifecycle::default());
    let metrics = metrics(&core, &tls, (&config, &reload));
    let discovery = discover(&core, &config, &metrics, &tls);
    warn_of(&config);
    let keys = key_rules(&core, &config);
    let readiness = readiness(&core, &config, (lifecycle.clone(), keys));
    let requests = Arc::new(ProxyMetrics::default());
    let proxy = proxy(&core, &config, (&metrics, &requests), &readiness)?;
    let data_dir = config.node.data_dir.clone();
    let figures = FigureSources::of(&core, &readiness, &requests, data_dir);
    core.spawn_task(figures.run(core.stopping()));
    core.share_decisions(proxy.decisions());
    let reading = (Arc::clone(proxy.requests()), Arc::clone(proxy.decisions()));
    let drain = Arc::new(ArcSwap::from_pointee(config.drain.clone()));
    reload.started(RunningParts {
        proxy: Arc::clone(&proxy),
        backends: Arc::clone(core.backends()),
        drain: Arc::clone(&drain),
        engines: tls.engines.clone(),
    });
    let picker = PickerParts {
        listener: sockets.picker,
        proxy: Arc::clone(&proxy),
        deadline: deadline(&drain),
        no_more: stops.no_more_requests.clone(),
    };
    let picker = picker.serving(&config, &tls, &metrics)?;
    let server = Server::new(sockets.data, proxy).leaving(stops.leaving.clone());
    let server = server.with_tls(tls.data.clone());
    let server = server.run_until(stops.no_more_requests.clone(), deadline(&drain));
    let warm = warm(&core, lifecycle.clone(), stops.no_more_requests.clone());
    let (proxy, picker) = serve_when(warm, server, picker);
    let file = (file, (reload_requests, log_level));
    let shown = (metrics, discovery);
    let admin = admin(&core, reading, shown, (readiness, file), &config);
    spawn_loops(&core, Arc::clone(&admin.kv_board), tls.engines.clone());
    serve_scaler(&core, sockets.scaler, &admin, &tls);
    serve_operators(&core, (sockets.admin, sockets.metrics), admin, &tls);
    follow_files(&core, &config, &tls);
    tell_of_listeners(config.id, addresses);
    Ok(RunningReplica {
        addresses,
        drain,
        core,
        lifecycle,
        stops,
        proxy,
        picker,
    })
}

fn tell_of_listeners(id: ReplicaId, addresses: Addresses) {
    tracing::info!(
        replica = id.0,
        data = %addresses.data,
        admin = %addresses.admin,
        peer = %addresses.peer,
        "replica is listening"
    );
}

fn serve_operators(
    core: &ReplicaCore,
    (listener, metrics): (TcpListener, Option<TcpListener>),
    admin: Arc<Admin>,
    tls: &ReplicaCertificates,
) {
    if let Some(metrics) = metrics {
        let probes = admin::probe_router(Arc::clone(&admin));
        core.spawn_task(admin::serve_probes(metrics, probes, core.stopping()));
    }
    let stopping = core.stopping();
    core.spawn_task(admin::serve(listener, admin, tls.admin.clone(), stopping));
}

/// Serves KEDA, if there is a listener for it.
fn serve_scaler(
    core: &ReplicaCore,
    listener: Option<TcpListener>,
    admin: &Admin,
    tls: &ReplicaCertificates,
) {
    let Some(listener) = listener else {
        return;
    };
    let readiness = Arc::clone(&admin.readiness);
    let scaler = Scaler {
        view: Arc::clone(core.view()),
        admission: Arc::clone(core.admission()),
        has_caught_up: Arc::new(move || readiness.has_caught_up()),
    };
    let tls = tls.scaler.clone();
    let tls = tls.map(|files| -> ScalerTls { Box::new(move || files.current()) });
    core.spawn_task(scaler::serve(listener, scaler, tls, core.stopping()));
}

/// Logs warnings about the config and the environment.
fn warn_of(config: &Config) {
    options::tell_of_names(config);
    for (variable, instead) in foreign_variables() {
        tracing::warn!(
            variable,
            instead,
            "a variable of another router is not read"
        );
    }
    if config.insecure {
        tracing::warn!(
            "insecure: others may reach listeners that are not protected; remove `insecure` when \
             they are"
        );
    }
}

/// Returns the metrics registry, with the metrics of the core and the process.
fn metrics(
    core: &ReplicaCore,
    tls: &ReplicaCertificates,
    (config, reload): (&Config, &ReloadHandle),
) -> Arc<Metrics> {
    let metrics = Arc::new(Metrics::default());
    metrics.register(|registry| registry.register_collector(Box::new(process::ProcessMetrics)));
    let log = LogMetrics {
        replica: core.replica().clone(),
        data_dir: config.node.data_dir.clone(),
    };
    metrics.register(|registry| registry.register_collector(Box::new(log)));
    metrics.register(|registry| reload.register(registry));
    metrics.register(|registry| core.router().metrics().register(registry));
    metrics.register(|registry| core.admission().metrics().register(registry));
    let expiry = CertificateMetrics(tls.watch());
    metrics.register(|registry| registry.register_collector(Box::new(expiry)));
    metrics
}

/// Starts to follow the sources of engines. Returns the board with their status.
fn discover(
    core: &ReplicaCore,
    config: &Config,
    metrics: &Metrics,
    tls: &ReplicaCertificates,
) -> Arc<DiscoveryBoard> {
    let board = DiscoveryBoard::new(&config.discovery, core.clock().clone());
    let board = Arc::new(board);
    let shown = DiscoveryMetrics(Arc::clone(&board));
    metrics.register(|registry| registry.register_collector(Box::new(shown)));
    let parts = DiscoveryParts {
        sources: config.discovery.clone(),
        board: Arc::clone(&board),
        cluster: core.cluster(),
        view: Arc::clone(core.view()),
        dialer: tls.engines.clone(),
    };
    core.spawn_task(api::engines::discovery::run(parts, core.stopping()));
    board
}

/// Starts to reload files of keys, tokens and certificates when they change.
fn follow_files(core: &ReplicaCore, config: &Config, tls: &ReplicaCertificates) {
    core.spawn_task(tls.watch().follow(core.stopping()));
    if let (Some(file), Some(keys)) = (config.users.api_keys_file.clone(), config.api_keys.clone())
    {
        let read = move |file: &Path| read_api_keys(file, &keys);
        core.spawn_task(key_file::follow(file, read, core.stopping()));
    }
    if let (Some(file), Some(tokens)) = (
        config.admin.tokens_file.clone(),
        config.admin_tokens.clone(),
    ) {
        let read = move |file: &Path| read_admin_tokens(file, &tokens);
        core.spawn_task(key_file::follow(file, read, core.stopping()));
    }
}

/// Returns the rules for the cluster's API keys. The replicated list is current while a leader with
/// a quorum is heard and everything that it has committed is applied here.
fn key_rules(core: &ReplicaCore, config: &Config) -> KeyRules {
    let replica = core.replica().clone();
    let current_within = config.cluster.election_timeout.end;
    let list = ListAge::of(current_within, move || replica.confirmed());
    options::key_rules(&config.users, list)
}

fn readiness(
    core: &ReplicaCore,
    config: &Config,
    (lifecycle, keys): (Lifecycle, KeyRules),
) -> Arc<ReadinessCheck> {
    Arc::new(ReadinessCheck {
        cluster: core.cluster(),
        view: Arc::clone(core.view()),
        backends: Arc::clone(core.backends()),
        digests: Arc::clone(core.digests()),
        outbox: Arc::clone(core.router().outbox()),
        lifecycle,
        keys,
        is_insecure: config.insecure,
    })
}

fn proxy(
    core: &ReplicaCore,
    config: &Config,
    (registry, metrics): (&Metrics, &Arc<ProxyMetrics>),
    readiness: &Arc<ReadinessCheck>,
) -> anyhow::Result<Arc<Proxy>> {
    registry.register(|registry| metrics.register(registry));
    let proxy = Proxy::new(
        core.router(),
        Arc::clone(core.admission()),
        Arc::clone(core.backends()),
        ProxySettings {
            keys: readiness.keys.clone(),
            tracer: tracer(core, config, registry)?,
            ..options::proxy_settings(config)
        },
        Arc::clone(metrics),
    );
    Ok(Arc::new(proxy.ready_by(Arc::clone(readiness))))
}

/// Returns the tracer, which exports request traces to the collector; `None` if none is configured.
fn tracer(
    core: &ReplicaCore,
    config: &Config,
    registry: &Metrics,
) -> anyhow::Result<Option<Tracer>> {
    let metrics = TracingMetrics::default();
    registry.register(|registry| metrics.register(registry));
    let Some(endpoint) = &config.tracing.otlp_endpoint else {
        return Ok(None);
    };
    let settings = TracingSettings {
        endpoint: endpoint.clone(),
        sample_ppm: config.tracing.sample,
        replica: config.id,
        cluster: config.cluster.name.clone(),
    };
    let (tracer, export) = SpanExport::new(&settings, metrics)?;
    core.spawn_task(export.run(core.stopping()));
    Ok(Some(tracer))
}

/// Settings of the config file, and the channels for operators' reload requests and log level
/// changes.
type FileParts = (
    SharedFileSettings,
    (Option<ReloadRequests>, Option<LogLevelControl>),
);

fn admin(
    core: &ReplicaCore,
    (requests, decisions): (Arc<RequestReader>, Arc<DecisionLog>),
    (metrics, discovery): (Arc<Metrics>, Arc<DiscoveryBoard>),
    (readiness, (file, (reload, log_level))): (Arc<ReadinessCheck>, FileParts),
    config: &Config,
) -> Arc<Admin> {
    let router = core.router();
    Arc::new(Admin {
        cluster: core.cluster(),
        view: Arc::clone(core.view()),
        decider: Arc::clone(router.decider()),
        load: Arc::clone(router.load()),
        outbox: Arc::clone(router.outbox()),
        clock: router.clock().clone(),
        requests,
        decisions,
        admission: Arc::clone(core.admission()),
        backends: Arc::clone(core.backends()),
        metrics,
        digests: Arc::clone(core.digests()),
        figures: Arc::clone(core.figures()),
        kv_board: Arc::default(),
        discovery,
        events: core.events().clone(),
        readiness,
        file,
        reload,
        log_level,
        hosts: options::own_hosts(config),
        tokens: config.admin_tokens.clone(),
        certified: config
            .tls
            .admin
            .client_ca_file
            .as_ref()
            .map(|_| CertifiedOperators::of_cluster(&config.cluster.name)),
        is_metrics_public: config.admin.metrics_public,
    })
}

/// Starts the loops that connect the core to engines and operators.
fn spawn_loops(core: &ReplicaCore, kv_board: Arc<StreamBoard>, dialer: EngineDialer) {
    let (backends, view) = (core.backends(), core.view());
    let probing = Arc::clone(backends).run(Arc::clone(view), probe_hooks(core), core.stopping());
    core.spawn_task(probing);
    let (cluster, stopping) = (core.cluster(), core.stopping());
    let (views, probed) = (Arc::clone(view), Arc::clone(backends));
    core.spawn_task(ranks::follow(cluster, views, probed, stopping));
    let reading = reader::ReaderParts {
        cluster: core.cluster(),
        view: Arc::clone(view),
        outbox: Arc::clone(core.router().outbox()),
        reader: Arc::clone(core.router().reader()),
        clock: core.router().clock().clone(),
        backends: Arc::clone(backends),
        sockets: Arc::new(socket::Zmq::new(dialer)),
        board: kv_board,
    };
    core.spawn_task(reader::run(reading, core.stopping()));
    core.spawn_task(events::log(core.events().clone(), core.stopping()));
    core.spawn_task(api::cluster::events::follow(
        core.cluster(),
        Arc::clone(view),
        core.events().clone(),
        core.stopping(),
    ));
}

fn probe_hooks(core: &ReplicaCore) -> Hooks {
    let router = core.router();
    let (reader, outbox) = (Arc::clone(router.reader()), Arc::clone(router.outbox()));
    let (sizes, sizes_outbox) = (Arc::clone(&reader), Arc::clone(&outbox));
    let status = core.replica().watch();
    Hooks {
        tokens_per_block: Arc::new(move |model| reader.tokens_per_block(model)),
        token_block_size: Arc::new(move |model| sizes.token_block_size(model)),
        observe_block_size: Arc::new(move |backend, tokens| {
            // If the outbox is full, the engine reports the size again.
            sizes_outbox.note(Item::ObserveBlockSize { backend, tokens });
        }),
        observe: Arc::new(move |backend, facts| outbox.observe(backend, facts)),
        is_leader: Arc::new(move || status.borrow().role == Role::Leader),
        clock: core.clock().clone(),
    }
}

/// Waits until this replica has a state to serve from, then marks it as serving. Ends early once
/// the replica must not take requests any more.
fn warm(
    core: &ReplicaCore,
    lifecycle: Lifecycle,
    no_more: CancellationToken,
) -> impl Future<Output = ()> + Send + use<> {
    let (cluster, router) = (core.cluster(), Arc::clone(core.router()));
    let backends = Arc::clone(core.backends());
    async move {
        tokio::select! {
            biased;
            () = no_more.cancelled() => {}
            () = warm_up(&*cluster, &router, &backends) => lifecycle.serve(),
        }
    }
}

/// Accepts connections for the data plane and the picker once the replica is warm (I146). Until
/// then they wait in the listeners' backlogs.
fn serve_when(
    warm: impl Future<Output = ()> + Send + 'static,
    server: BoxFuture<'static, DrainResult>,
    picker: Option<BoxFuture<'static, DrainResult>>,
) -> (JoinHandle<DrainResult>, Option<JoinHandle<DrainResult>>) {
    let warm = warm.shared();
    let start = |serving: BoxFuture<'static, DrainResult>| {
        let warm = warm.clone();
        tokio::spawn(async move {
            warm.await;
            serving.await
        })
    };
    (start(server), picker.map(start))
}

/// Returns the drain deadline for open requests, as configured at the time of the call.
fn deadline(drain: &Arc<ArcSwap<DrainConfig>>) -> Box<dyn Fn() -> Duration + Send + Sync> {
    let drain = Arc::clone(drain);
    Box::new(move || drain.load().deadline)
}

impl RunningReplica {
    /// Returns the listening addresses.
    #[must_use]
    pub fn addresses(&self) -> Addresses {
        self.addresses
    }

    /// Returns the log and the members, as the port of `api`.
    #[must_use]
    pub fn cluster(&self) -> Arc<dyn Cluster> {
        self.core.cluster()
    }

    /// Returns a function that loses the replicated state, see [`ReplicaCore::state_loss`].
    pub fn state_loss(&self) -> impl Fn() + Send + Sync + use<> {
        self.core.state_loss()
    }

    /// Returns a function that computes the maximum duration of a drain that begins at the time of
    /// the call.
    pub(crate) fn longest_drain(&self) -> impl Fn() -> Duration + Send + use<> {
        let drain = Arc::clone(&self.drain);
        move || {
            let drain = drain.load();
            drain.dns_ttl.saturating_add(drain.deadline)
        }
    }

    /// Serves until `shutdown` requests a drain, then leaves.
    ///
    /// The replica becomes unready at once. For `drain.dns_ttl`, it still accepts connections, and
    /// every response asks the client to go elsewhere. Then it transfers leadership, finishes
    /// requests for up to `drain.deadline`, flushes its updates into the log, leaves the cluster if
    /// it is no longer wanted, and closes the store. An abort skips everything but the last step.
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
        if let Some(picker) = &self.picker {
            picker.abort();
        }
        self.lifecycle.end_streams();
        self.core.end().await;
    }

    /// Finishes the work that clients and the cluster are waiting for.
    async fn finish(&mut self) {
        let dns_ttl = self.drain.load().dns_ttl;
        tokio::time::sleep(dns_ttl).await;
        self.stops.no_more_requests.cancel();
        let (replica, proxy) = (self.core.replica(), &mut self.proxy);
        let picker = async {
            match &mut self.picker {
                Some(picker) => picker.await,
                None => Ok(DrainResult { cut: 0 }),
            }
        };
        let (proxy, picker, ()) = tokio::join!(proxy, picker, hand_over(replica));
        for drained in [proxy, picker] {
            match drained {
                Ok(DrainResult { cut: 0 }) => {}
                Ok(DrainResult { cut }) => {
                    tracing::warn!(connections = cut, "closed remaining connections");
                }
                Err(error) => tracing::error!(%error, "data plane failed"),
            }
        }
        self.core.flush().await;
    }
}
