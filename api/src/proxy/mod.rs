//! The data plane: accepts OpenAI-compatible requests, sends each to the backend that the router
//! chooses, and streams the response back.
//!
//! Bodies pass through byte for byte, except that compressed requests are decoded, and except for
//! the members that the router adds or removes: usage reporting ([`UsageRequest`]), salts, reserved
//! fields, and what two engines need to share a request. `headers.rs` filters the headers. When a
//! client disconnects, its request ends. All resources of a request, down to the engine's
//! connection, belong to its future and later to its body. hyper drops these when the client's
//! connection ends, whether during prefill or in mid-stream.
//!
//! A client that stays but stops reading is treated the same after [`ProxyTimeouts::untaken`].
//! Until then its response is read ahead, so that the engine's place is free once it is done.
//!
//! A client that shuts down only its sending side counts as gone, because no common HTTP client
//! does this and an engine's time is expensive. If a client pipelines requests, its disconnect is
//! noticed only once the previous response is written.
//!
//! `x-quorate-policy` chooses the policy if the config allows it. `x-quorate-session`, or the
//! header in the policy's settings, chooses the backend under `session`. `x-quorate-priority` sets
//! the priority among waiting requests. All three are forwarded.

mod answer;
mod forward;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod limits;
mod listen;
pub mod picker;
mod record;
mod request;
mod response;
mod settings;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};

use arc_swap::ArcSwap;
use http::HeaderValue;
use state::StateView;
use tokio_util::task::TaskTracker;

pub use crate::net::ip_prefix::{IpPrefix, IpPrefixError};
pub use listen::server::{DrainResult, Server};
pub use record::access::ACCESS_TARGET;
pub use record::archive::{ArchiveSize, LostRecords};
pub use record::decision_filter::DecisionFilter;
pub use record::decisions::{DecisionCursor, DecisionLog, DecisionLogSize, DecisionPage};
pub use record::metrics::{
    ProxyMetrics, RecentRequests, RequestLabels, RequestOutcome, Seconds, StatusLabel,
};
pub use record::recorder::{Recorder, RecordingEnd, RecordingLimits, RecordingState, TakenRequest};
pub use record::request_record::{DecidedAttempt, RequestEnd, RequestRecord};
pub use request::client_request::{ClientRequest, RequestHead, RequestReader, UnsentRequest};
pub use request::identify::{RequestOrigin, UserSource};
pub use request::routes::{INFERENCE_PATHS, is_plain};
pub use response::response_chunk::ResponseBodyError;
pub use settings::cors::AllowedOrigins;
pub use settings::keys::{ApiKeys, Holder, KeyEntry, key_user_name};
pub use settings::reserved_fields::{
    FieldRules, HeaderRules, REFUSED_FIELDS, STRIPPED_FIELDS, STRIPPED_HEADERS,
};
pub use settings::{
    Charges, DECISIONS_MAX, Expose, IdentifyBy, IdentifyByError, LoggedRequests, MIN_INDEX_WAIT,
    ProxyLimits, ProxySettings, ProxyTimeouts, RetrySettings, StreamResume, StreamSettings,
    UsageRequest,
};

use self::limits::poison_requests::PoisonRequests;
use self::limits::request_ids::RequestIds;
use self::limits::retry_budget::RetryBudget;
use self::limits::users::UserRequests;
use self::listen::readiness_gate::ReadinessGate;
use self::record::access::AccessLog;
use self::request::request_body::HeldBodyBytes;
use crate::admission::Admission;
use crate::engines::backends::Backends;
use crate::engines::backends::pool::Pool;
use crate::net::connections::ClientTable;
use crate::readiness::ReadinessCheck;
use crate::routing::{Dispatcher, Router};

/// State that all connections of a data plane share.
pub struct Proxy {
    admission: Arc<Admission>,
    requests: Arc<RequestReader>,
    decisions: Arc<DecisionLog>,
    backends: Arc<Backends>,
    dispatcher: Arc<Dispatcher>,
    view: Arc<StateView>,
    pool: Pool,
    settings: Arc<ProxySettings>,
    /// Current limits: those of the settings, or their replacement.
    limits: ArcSwap<ProxyLimits>,
    metrics: Arc<ProxyMetrics>,
    replica: HeaderValue,
    /// Bytes of request bodies and of responses read ahead that are held at present.
    held_bytes: Arc<AtomicU64>,
    /// Bytes of request bodies that are kept so that their streams can go on at another engine.
    kept_bytes: Arc<AtomicU64>,
    /// Number of streams that move from backends that drain.
    moving_streams: Arc<AtomicU32>,
    /// Tasks other than those of connections: h2 streams, their responses, and refused bodies.
    tasks: TaskTracker,
    clients: Arc<ClientTable>,
    users: Arc<UserRequests>,
    budget: Arc<RetryBudget>,
    poison_requests: Arc<PoisonRequests>,
    request_ids: Arc<RequestIds>,
    access: Arc<AccessLog>,
    readiness_gate: ReadinessGate,
}

impl Proxy {
    /// Creates a data plane without connections that routes with `router`.
    #[must_use]
    pub fn new(
        router: &Router,
        admission: Arc<Admission>,
        backends: Arc<Backends>,
        settings: ProxySettings,
        metrics: Arc<ProxyMetrics>,
    ) -> Self {
        let pool = Pool::new(settings.pool(), metrics.pool.clone());
        let pool = pool.through(backends.dialer().clone());
        let replica = HeaderValue::from(u16::from(settings.replica.0));
        let limits = &settings.limits;
        let (connections, requests) = limits.per_address();
        let clients = ClientTable::new(connections, requests);
        let users = UserRequests::new(limits.per_user());
        let budget = RetryBudget::new(settings.retry.allowance());
        let clock = router.clock().clone();
        let is_logged = settings.logged_requests != LoggedRequests::Off;
        let decisions = DecisionLog::new(settings.replica, clock, settings.decisions_max);
        let decisions = decisions
            .for_access_log(is_logged)
            .archived(settings.archive.clone(), metrics.decisions_lost.clone());
        let access = AccessLog::new(settings.logged_requests);
        let limits = ArcSwap::from_pointee(settings.limits);
        let settings = Arc::new(settings);
        let requests = RequestReader::new(router, Arc::clone(&settings));
        Self {
            requests: Arc::new(requests),
            decisions: Arc::new(decisions),
            dispatcher: Arc::clone(router.dispatcher()),
            admission,
            backends,
            view: Arc::clone(router.view()),
            pool,
            settings,
            limits,
            metrics,
            replica,
            held_bytes: Arc::default(),
            kept_bytes: Arc::default(),
            moving_streams: Arc::default(),
            tasks: TaskTracker::new(),
            clients: Arc::new(clients),
            users: Arc::new(users),
            budget: Arc::new(budget),
            poison_requests: Arc::new(PoisonRequests::new()),
            request_ids: Arc::default(),
            access: Arc::new(access),
            readiness_gate: ReadinessGate::default(),
        }
    }

    /// Uses `readiness` for the probes of load balancers, and to find out whether this replica
    /// knows the cluster's models. Without it, the replica counts as ready.
    #[must_use]
    pub fn ready_by(self, readiness: Arc<ReadinessCheck>) -> Self {
        let readiness_gate = ReadinessGate::new(readiness);
        Self {
            readiness_gate,
            ..self
        }
    }

    /// Returns the reader of requests, which `explain` uses too.
    #[must_use]
    pub fn requests(&self) -> &Arc<RequestReader> {
        &self.requests
    }

    /// Returns the log of the latest decisions. They include their inputs if the router is
    /// [recording](crate::routing::Router::recording).
    #[must_use]
    pub fn decisions(&self) -> &Arc<DecisionLog> {
        &self.decisions
    }

    /// Replaces the limits, also for checks that requests in flight still have ahead of them. The
    /// limits on all connections, on the streams of a connection and, for HTTP clients, on request
    /// heads keep their first value.
    pub fn replace_limits(&self, limits: ProxyLimits) {
        let (connections, requests) = limits.per_address();
        self.clients.limit(connections, requests);
        self.users.limit(limits.per_user());
        self.limits.store(Arc::new(limits));
    }

    /// Asks up to `count` client connections without a request to close, the longest idle first, to
    /// make room. Returns their number.
    pub fn close_idle(&self, count: usize) -> usize {
        let closed = self.clients.close_idle(count);
        self.metrics.connections_evicted.inc_by(closed as u64);
        closed
    }

    /// Returns a counter of a body's bytes in memory, which lives until the response begins.
    fn held_body(&self) -> HeldBodyBytes {
        HeldBodyBytes::none(&self.held_bytes, self.limits.load().held_bytes())
    }
}
