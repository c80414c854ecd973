//! The admin API, with which operators query and change the cluster, on its own listener.
//!
//! Reads of replicated state are answered from this replica's copy, with the index at which it was
//! read. `?read=linearizable` first waits until everything committed before is applied here. Writes
//! to replicated state go through the log and return the index at which they were committed, or
//! report that they were rejected or that their outcome is unknown. Some calls concern this replica
//! alone, such as the log level and recordings. Errors are problem+json. A `GET` response can be
//! edited and sent to `PUT`.
//!
//! With a tokens file, or certificate authorities for operators, a call needs a token or a
//! certificate with a sufficient role for its route (`gate`, `routes`). Probes, the console's files
//! and, if configured, `/metrics` are open. Without either, the listener belongs on loopback.
//! Requests that a browser sends on behalf of another site are rejected (`origin`).

mod admission;
mod answer;
mod audit;
mod backends;
mod backup;
mod bins;
mod calls;
mod certified;
mod cluster;
mod config;
mod console;
mod decisions;
mod describe;
mod discovery;
mod document;
mod explain;
mod failures;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod gate;
mod keys;
mod listener;
mod log_level;
mod openapi;
mod origin;
mod ownership;
mod policy;
mod prefixes;
mod probes;
mod problem;
mod readback;
mod recordings;
mod reload;
mod replicas;
mod restore;
mod roles;
mod routes;
mod session_trees;
mod sessions;
mod stream;
mod tokens;
mod usage;
mod user_defaults;
mod users;
mod versions;
mod waiting;
mod what_if;
mod whoami;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::middleware;
use axum::routing::MethodFilter;
use bytes::Bytes;
use http::StatusCode;
use state::StateView;
use tokio::sync::{Mutex, Semaphore};

pub use certified::{CertifiedOperators, role_name};
pub use explain::explain_offline;
pub use listener::{serve, serve_probes};
pub use log_level::LogLevelControl;
pub use reload::{ReloadError, ReloadReport, ReloadRequests, ReloadResult, ReloadedKey};
pub use roles::{AdminRole, AdminRoleError};
pub use stream::STREAMS_MAX;
pub use tokens::{AdminTokens, NewToken, TokenEntry, check_token_name, read_tokens};

use api::admission::Admission;
use api::base::clock::Clock;
use api::cluster::divergence::Digests;
use api::cluster::events::EventBus;
use api::cluster::figures::FigureBoard;
use api::engines::backends::Backends;
use api::engines::discovery::DiscoveryBoard;
use api::error::Problem;
use api::kv_events::stream_status::StreamBoard;
use api::metrics::{Metrics, ScrapedReplica};
use api::ports::Cluster;
use api::proxy::{DecisionLog, RequestReader};
use api::readiness::ReadinessCheck;
use api::routing::{Decider, LoadTable, SharedOutbox};
use api::settings::SharedFileSettings;
use calls::CallLog;
use document::{API, known_keys};
use gate::{Gate, guard};
use origin::{AllowedHosts, own_site};
use routes::ROUTES;
use stream::EventEpoch;

/// Maximum length of a request body, in bytes.
pub const BODY_BYTES_MAX: usize = 1 << 20;
/// Default number of entries in a list.
pub const PAGE_ENTRIES_DEFAULT: usize = 100;
/// Maximum number of entries in a list.
pub const PAGE_ENTRIES_MAX: usize = 1000;

/// Dependencies of the admin API of one replica.
pub struct Admin {
    /// The log and the membership.
    pub cluster: Arc<dyn Cluster>,
    /// Published part of the state.
    pub view: Arc<StateView>,
    /// Parses requests like the data plane does, for `explain`.
    pub requests: Arc<RequestReader>,
    /// The data plane's last decisions.
    pub decisions: Arc<DecisionLog>,
    /// Makes decisions, for `explain`.
    pub decider: Arc<Decider>,
    /// Numbers of requests in flight by backend.
    pub load: Arc<LoadTable>,
    /// Updates that the log does not contain yet.
    pub outbox: Arc<SharedOutbox>,
    /// Wall clock, which dates backups and determines which keys have expired.
    pub clock: Clock,
    /// Queues of waiting requests.
    pub admission: Arc<Admission>,
    /// Health of the engines.
    pub backends: Arc<Backends>,
    /// Metrics for `/metrics`.
    pub metrics: Arc<Metrics>,
    /// State digests by log index.
    pub digests: Arc<Digests>,
    /// Figures that this replica and its peers report about themselves.
    pub figures: Arc<FigureBoard>,
    /// KV event streams that this replica reads.
    pub kv_board: Arc<StreamBoard>,
    /// Latest reports of the sources of engines.
    pub discovery: Arc<DiscoveryBoard>,
    /// Events for `/admin/v1/events`.
    pub events: EventBus,
    /// Checks whether this replica should get traffic.
    pub readiness: Arc<ReadinessCheck>,
    /// Settings in this replica's config.
    pub file: SharedFileSettings,
    /// Sender of requests to reload the config; `None` if reloading is not possible.
    pub reload: Option<ReloadRequests>,
    /// Control of the log level; `None` if the level cannot be changed.
    pub log_level: Option<LogLevelControl>,
    /// Host names under which the listener serves, in addition to IP addresses and `localhost`.
    pub hosts: Vec<String>,
    /// Tokens of operators and their roles. If this and `certified` are `None`, all calls are
    /// allowed.
    pub tokens: Option<AdminTokens>,
    /// Operators recognised by certificate; `None` if client certificates are ignored.
    pub certified: Option<CertifiedOperators>,
    /// Whether `/metrics` needs no token.
    pub is_metrics_public: bool,
}

/// State shared by the handlers.
#[derive(Clone)]
struct AdminState {
    admin: Arc<Admin>,
    /// One permit per event stream that may be open.
    streams: Arc<Semaphore>,
    /// A single permit, for the backup in progress.
    backups: Arc<Semaphore>,
    /// One permit per recording that may be fetched at a time.
    recordings: Arc<Semaphore>,
    /// A single permit, for the what-if evaluation in progress.
    what_ifs: Arc<Semaphore>,
    /// A single permit, for the usage that is being added up.
    usages: Arc<Semaphore>,
    /// Calls that required more than read access.
    calls: Arc<CallLog>,
    /// Lock held during conditional writes, from checking the version until the commit.
    writes: Arc<Mutex<()>>,
    /// OpenAPI document of the API.
    document: Bytes,
    /// Epoch of this process, a part of each event id.
    epoch: EventEpoch,
}

impl AdminState {
    fn new(admin: Arc<Admin>, calls: Arc<CallLog>) -> Self {
        Self {
            admin,
            streams: Arc::new(Semaphore::new(STREAMS_MAX)),
            backups: Arc::new(Semaphore::new(1)),
            recordings: Arc::new(Semaphore::new(recordings::FETCHES_MAX)),
            what_ifs: Arc::new(Semaphore::new(1)),
            usages: Arc::new(Semaphore::new(1)),
            calls,
            writes: Arc::default(),
            document: API.text.clone(),
            epoch: EventEpoch::draw(),
        }
    }
}

impl std::ops::Deref for AdminState {
    type Target = Admin;

    fn deref(&self) -> &Admin {
        &self.admin
    }
}

/// Builds the admin API over `admin`, to be served on the admin listener. From then on,
/// `admin.metrics` reads the replica at each scrape.
pub fn router(admin: Arc<Admin>) -> Router {
    admin.metrics.watch(ScrapedReplica {
        cluster: Arc::clone(&admin.cluster),
        view: Arc::clone(&admin.view),
        load: Arc::clone(&admin.load),
        backends: Arc::clone(&admin.backends),
        digests: Arc::clone(&admin.digests),
        kv_board: Arc::clone(&admin.kv_board),
        is_insecure: admin.readiness.is_insecure,
        events: admin.events.clone(),
        clock: admin.clock.clone(),
    });
    let names = AllowedHosts::new(&admin.hosts);
    let calls = Arc::<CallLog>::default();
    let gate = Gate::new(&admin, &calls);
    routes(|_| true)
        .layer(middleware::from_fn(known_keys))
        .layer(middleware::from_fn_with_state(gate, guard))
        // The outermost layer, so that a request forged by another site does not count as an
        // attempt to guess a token.
        .layer(middleware::from_fn_with_state(names, own_site))
        .with_state(AdminState::new(admin, calls))
}

/// Builds the part of the admin API that scrapers and orchestrators call, to be served without
/// authentication: `/livez`, `/readyz` and `/metrics`.
pub fn probe_router(admin: Arc<Admin>) -> Router {
    routes(|path| matches!(path, "/livez" | "/readyz" | "/metrics"))
        .with_state(AdminState::new(admin, Arc::default()))
}

/// Returns the routes whose paths satisfy `is_served`.
fn routes(is_served: impl Fn(&str) -> bool) -> Router<AdminState> {
    let mut router = Router::new();
    for route in ROUTES.iter().filter(|route| is_served(route.path)) {
        for call in route.calls {
            let method = MethodFilter::try_from(call.method.clone());
            let method = method.expect("the table has methods of HTTP only");
            router = router.route(route.path, ((call.handler)().on)(method));
        }
    }
    router
        .fallback(unknown_path)
        .method_not_allowed_fallback(wrong_method)
}

async fn unknown_path(request: Request) -> Problem {
    Problem::new(
        StatusCode::NOT_FOUND,
        "unknown-path",
        "the path does not exist",
    )
    .detail(format!("{} is not served here", request.uri().path()))
}

async fn wrong_method(request: Request) -> Problem {
    Problem::new(
        StatusCode::METHOD_NOT_ALLOWED,
        "wrong-method",
        "the path does not accept this method",
    )
    .detail(format!("{} {}", request.method(), request.uri().path()))
}
