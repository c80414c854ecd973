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

mod access;
mod answer_body;
mod answer_source;
mod answer_usage;
mod attempt;
mod bootstrap;
mod bootstrap_rooms;
mod clients;
mod cluster_keys;
mod cors;
mod deadline;
mod decisions;
mod dialect;
mod disaggregate;
mod durable_charge;
mod encoding;
mod expose;
mod first_byte;
mod forward;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod headers;
mod identify;
mod json_answer;
mod json_scan;
mod keys;
mod metrics;
mod model_metrics;
mod models;
mod outcome;
mod parse;
pub mod picker;
mod piece;
mod poison_requests;
mod proxied;
mod ratelimit;
mod read_ahead;
mod readiness_gate;
mod recorder;
mod request;
mod request_record;
mod reserved_fields;
mod response_body;
mod retry_budget;
mod routes;
mod server;
mod settings;
mod sse;
mod stage_metrics;
mod status_label;
mod stored;
mod usage_options;
mod user_models;
mod write_timeout;

use std::borrow::Cow;
use std::cell::LazyCell;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use arc_swap::ArcSwap;
use bytes::Bytes;
use http::header::CONNECTION;
use http::{HeaderMap, HeaderValue, Request, Response, Version};
use http_body::Body;
use hyper::body::Incoming;
use state::StateView;
use state::admission::RetryAllowance;
use state::ids::UserKey;
use tokio_util::task::TaskTracker;
use tracing::Instrument;

pub use crate::ip_prefix::{IpPrefix, IpPrefixError};
pub use access::ACCESS_TARGET;
pub(crate) use clients::client_of;
pub use cors::AllowedOrigins;
pub use decisions::DecisionLog;
pub use identify::{RequestOrigin, UserSource};
pub use keys::{ApiKeys, Holder, KeyEntry, key_user_name};
pub use metrics::{
    ProxyMetrics, RecentRequests, RequestLabels, RequestOutcome, Seconds, StatusLabel,
};
pub use parse::{ClientRequest, RequestHead, RequestReader};
pub use piece::ResponseBodyError;
pub(crate) use recorder::{RecordingEnd, RecordingLimits, RecordingState, TakenRequest};
pub use request_record::RequestRecord;
pub(crate) use request_record::{DecidedAttempt, RequestEnd};
pub use reserved_fields::{
    FieldRules, HeaderRules, REFUSED_FIELDS, STRIPPED_FIELDS, STRIPPED_HEADERS,
};
pub use routes::{INFERENCE_PATHS, is_plain};
pub use server::{DrainResult, Server};
pub use settings::{
    Charges, DECISIONS_MAX, Expose, IdentifyBy, IdentifyByError, LoggedRequests, ProxyLimits,
    ProxySettings, ProxyTimeouts, UsageRequest,
};

use crate::admission::Admission;
use crate::backends::Backends;
use crate::backends::pool::Pool;
use crate::error::{ProxyError, rescue};
use crate::readiness::ReadinessCheck;
use crate::routing::Router;
use crate::traces::RequestTrace;
use access::AccessLog;
use answer_body::{AnswerBody, AnswerBodyKind};
use clients::{ClientTable, ConnectionRequestGuard, UserRequests};
use dialect::Dialect;
use forward::{ForwardResult, forward};
use headers::request_id;
use metrics::RequestMetricsGuard;
use poison_requests::PoisonRequests;
use proxied::{ArrivedRequest, ProxiedRequest, begin_trace, trace_id};
use readiness_gate::ReadinessGate;
use request::HeldBodyBytes;
use response_body::{SharedResponseBody, lock};
use retry_budget::RetryBudget;
use routes::{Route, unslashed};
use stored::{RequestContext, forward_stored};
use write_timeout::hand_over;

/// Value of the `connection` header that marks a response as the last of its connection.
const CLOSE: HeaderValue = HeaderValue::from_static("close");

/// State that all connections of a data plane share.
pub struct Proxy {
    admission: Arc<Admission>,
    requests: Arc<RequestReader>,
    decisions: Arc<DecisionLog>,
    backends: Arc<Backends>,
    view: Arc<StateView>,
    pool: Pool,
    settings: Arc<ProxySettings>,
    /// Current limits: those of the settings, or their replacement.
    limits: ArcSwap<ProxyLimits>,
    metrics: Arc<ProxyMetrics>,
    replica: HeaderValue,
    /// Bytes of request bodies and of responses read ahead that are held at present.
    held_bytes: Arc<AtomicU64>,
    /// Tasks other than those of connections: h2 streams, their responses, and refused bodies.
    tasks: TaskTracker,
    clients: Arc<ClientTable>,
    users: Arc<UserRequests>,
    budget: Arc<RetryBudget>,
    poison_requests: Arc<PoisonRequests>,
    access: Arc<AccessLog>,
    readiness_gate: ReadinessGate,
}

/// Result of receiving a request.
enum Intake<'a> {
    /// The holder of the key and the body: the request is routed by its body.
    Whole(Holder, Bytes),
    /// The holder of the key and, for one model only, its id: the request lists models.
    Models(Holder, Option<Cow<'a, str>>),
    /// The holder of the key: the request is for the engine that stored a response.
    Stored(Holder),
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
        let pool = Pool::new(settings.pool, metrics.pool.clone());
        let pool = pool.through(backends.dialer().clone());
        let replica = HeaderValue::from(u16::from(settings.replica.0));
        let limits = &settings.limits;
        let clients = ClientTable::new(
            limits.connections_per_address_max,
            limits.requests_per_address_max,
        );
        let users = UserRequests::new(limits.requests_per_user_max);
        let budget = RetryBudget::new(settings.retry_allowance);
        let clock = router.clock().clone();
        let is_logged = settings.logged_requests != LoggedRequests::Off;
        let decisions = DecisionLog::new(settings.replica, clock, settings.decisions_max);
        let decisions = decisions.for_access_log(is_logged);
        let access = AccessLog::new(settings.logged_requests);
        let limits = ArcSwap::from_pointee(settings.limits);
        let settings = Arc::new(settings);
        let requests = RequestReader::new(router, Arc::clone(&settings));
        Self {
            requests: Arc::new(requests),
            decisions: Arc::new(decisions),
            admission,
            backends,
            view: Arc::clone(router.view()),
            pool,
            settings,
            limits,
            metrics,
            replica,
            held_bytes: Arc::default(),
            tasks: TaskTracker::new(),
            clients: Arc::new(clients),
            users: Arc::new(users),
            budget: Arc::new(budget),
            poison_requests: Arc::new(PoisonRequests::new()),
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
        self.clients.limit(
            limits.connections_per_address_max,
            limits.requests_per_address_max,
        );
        self.users.limit(limits.requests_per_user_max);
        self.limits.store(Arc::new(limits));
    }

    /// Replaces the allowance of the retry budgets for later retries.
    pub fn replace_retry_allowance(&self, allowance: RetryAllowance) {
        self.budget.replace(allowance);
    }

    /// Asks up to `count` client connections without a request to close, the longest idle first, to
    /// make room. Returns their number.
    pub fn close_idle(&self, count: usize) -> usize {
        let closed = self.clients.close_idle(count);
        self.metrics.connections_evicted.inc_by(closed as u64);
        closed
    }

    /// Responds to one request. `peer` is the client's address as a header value.
    async fn answer(
        self: Arc<Self>,
        peer: HeaderValue,
        (request_guard, is_within): (ConnectionRequestGuard, bool),
        request: Request<Incoming>,
    ) -> Response<AnswerBody> {
        if let Some(told) = self
            .readiness_gate
            .probe(request.method(), request.uri().path())
        {
            return told.map(|body| AnswerBody(AnswerBodyKind::Local(Some(body))));
        }
        let mut request_metrics = RequestMetricsGuard::open(&self.metrics, Some(request_guard));
        let id = request_id(request.headers());
        let asked = (request.method(), request.uri(), request.headers());
        let trace = begin_trace(&self.settings, asked, &id);
        request_metrics.traces(trace.clone());
        let span = {
            let trace_id = LazyCell::new(|| trace_id(trace.as_ref(), request.headers()));
            let asked = (request.method(), request.uri());
            request_metrics.logs(self.access.begin(&id, asked, || *trace_id));
            tracing::debug_span!(
                "request",
                request_id = id.to_str().unwrap_or_default(),
                trace_id = trace_id.map(tracing::field::display),
                path = request.uri().path()
            )
        };
        let (mut head, body) = request.into_parts();
        if let Some(uri) = unslashed(&head.uri) {
            head.uri = uri;
        }
        let (version, dialect) = (head.version, Dialect::of(head.uri.path()));
        let origin = self.settings.cors.verdict(&head.headers);
        let ignored = self.requests.ignored(&head.headers);
        let mut user = None;
        let handled = async {
            if !is_within {
                request_metrics.is_refused();
                request::read_on(&self, &head, body).await;
                return Err(ProxyError::AddressAtLimit);
            }
            if let Some(answer) = origin.preflight(&head.method, &head.headers) {
                return Ok(ForwardResult::Held(answer));
            }
            let (from, request) = ((peer, id.clone(), trace), (head, body));
            self.handle(from, request, &mut request_metrics, &mut user)
                .await
        };
        let handled = handled.instrument(span).await;
        let mut response = match handled {
            Ok(answer) => self.passed_on(answer, version, request_metrics),
            Err(failure) => {
                let failure = self.readiness_gate.doubt(failure);
                failed(&failure, dialect, version, request_metrics)
            }
        };
        self.sign(response.headers_mut(), (dialect, id), (ignored, user));
        origin.add_headers(response.headers_mut());
        response
    }

    /// Adds the headers that every response gets.
    fn sign(
        &self,
        headers: &mut HeaderMap,
        (dialect, id): (Dialect, HeaderValue),
        (ignored, user): (Option<HeaderValue>, Option<UserKey>),
    ) {
        let expose = self.settings.expose;
        expose.origin(headers, dialect, id, &self.replica);
        expose.ignored(headers, ignored);
        if let Some(left) = user.and_then(|user| self.admission.limits_left(user)) {
            ratelimit::add_headers(headers, &left);
        }
    }

    fn passed_on(
        &self,
        answer: ForwardResult,
        version: Version,
        mut request_metrics: RequestMetricsGuard,
    ) -> Response<AnswerBody> {
        match answer {
            ForwardResult::Relayed(response) => {
                request_metrics.answered(response.status());
                response.map(|relay| {
                    lock(&relay).account(request_metrics);
                    AnswerBody(self.body(relay, version))
                })
            }
            ForwardResult::Held(response) => {
                let is_error =
                    response.status().is_client_error() || response.status().is_server_error();
                let outcome = if is_error {
                    RequestOutcome::EngineError
                } else {
                    RequestOutcome::Local
                };
                local(response, outcome, request_metrics)
            }
        }
    }

    /// Wraps the body. Over HTTP/1.1 the connection drives the response; see [`write_timeout`].
    fn body(&self, relay: SharedResponseBody, version: Version) -> AnswerBodyKind {
        if version == Version::HTTP_2 && !lock(&relay).is_end_stream() {
            let untaken = self.settings.timeouts.untaken;
            AnswerBodyKind::Handed(hand_over(relay, untaken, &self.tasks))
        } else {
            AnswerBodyKind::Relay(relay)
        }
    }

    /// Returns a counter of a body's bytes in memory, which lives until the response begins.
    fn held_body(&self) -> HeldBodyBytes {
        HeldBodyBytes::none(&self.held_bytes, self.limits.load().held_bytes_max)
    }

    async fn handle(
        self: &Arc<Self>,
        (peer, request_id, trace): (HeaderValue, HeaderValue, Option<Arc<RequestTrace>>),
        (head, mut body): (http::request::Parts, Incoming),
        request_metrics: &mut RequestMetricsGuard,
        user: &mut Option<UserKey>,
    ) -> Result<ForwardResult, ProxyError> {
        let requests_max = self.limits.load().requests_max;
        let mut held = self.held_body();
        let (holder, body_bytes) = match self.take_in(&head, &peer, &mut body, &mut held).await {
            Ok(Intake::Whole(holder, bytes)) => (holder, bytes),
            Ok(Intake::Models(holder, id)) => {
                return self.models(&holder, id.as_deref()).map(ForwardResult::Held);
            }
            Ok(Intake::Stored(holder)) => {
                request_metrics.is_read(requests_max)?;
                let trace_id = trace_id(trace.as_ref(), &head.headers);
                let trace = trace.map(|trace| trace.headers());
                let from = RequestContext {
                    peer: &peer,
                    request_id: &request_id,
                    trace: trace.as_ref(),
                    trace_id,
                };
                return Box::pin(forward_stored(self, &holder, &head, from)).await;
            }
            Err(failure) => {
                drop(held);
                request_metrics.is_refused();
                if failure != ProxyError::BodyTimeout {
                    request::read_on(self, &head, body).await;
                }
                return Err(failure);
            }
        };
        drop(body);
        request_metrics.is_read(requests_max)?;
        let arrived = ArrivedRequest {
            head,
            body: body_bytes,
            holder,
            request_id,
            peer,
            endpoints: None,
            trace,
        };
        let proxied = self.parse(arrived, request_metrics, user).await?;
        forward(self, &Arc::new(proxied), request_metrics).await
    }

    /// Parses a request that has arrived, opens its record, and counts it for its user and model.
    async fn parse(
        &self,
        arrived: ArrivedRequest,
        request_metrics: &mut RequestMetricsGuard,
        user: &mut Option<UserKey>,
    ) -> Result<ProxiedRequest, ProxyError> {
        let ArrivedRequest {
            head,
            mut body,
            holder,
            request_id,
            peer,
            endpoints,
            trace,
        } = arrived;
        let path = head.uri.path();
        let told = request_head(&head, &peer);
        let (read, ids) = self.requests.read(&told, &holder, &mut body).await?;
        // The token ids are as long as the prompt, and no longer needed.
        drop(ids);
        *user = Some(read.user.key(self.requests.hash_seed()));
        let model = &read.parsed.model;
        let is_served = || self.view.registry().names_model(model);
        request_metrics.is_for(self.metrics.models.meter(model, is_served));
        if let Some(trace) = &trace {
            trace.asks(&read.traced(path));
        }
        let record = self.decisions.open(&read, &request_id, path);
        request_metrics.records(record.clone());
        let counted = self.users.count(read.user.as_str());
        request_metrics.counts(counted.ok_or(ProxyError::UserAtLimit)?);
        Ok(ProxiedRequest {
            head,
            body,
            read,
            request_id,
            peer,
            endpoints,
            record,
            trace,
        })
    }

    /// Checks a request's head, and reads the body if the request is routed by it.
    async fn take_in<'a, B: Body<Data = Bytes> + Unpin>(
        &self,
        head: &'a http::request::Parts,
        peer: &'a HeaderValue,
        body: &mut B,
        held: &mut HeldBodyBytes,
    ) -> Result<Intake<'a>, ProxyError> {
        let (holder, route) = self.requests.accept(&request_head(head, peer))?;
        self.readiness_gate.check(&self.view)?;
        match route {
            Route::Models => Ok(Intake::Models(holder, None)),
            Route::Model(id) => Ok(Intake::Models(holder, Some(id))),
            Route::Stored(_) => Ok(Intake::Stored(holder)),
            Route::Engine => {
                let limits = **self.limits.load();
                let is_full = self.metrics.in_flight.get() >= signed(limits.requests_max);
                // This request counts as one of them.
                let reading = self.metrics.reading.get();
                if is_full || reading > signed(limits.reading_max) {
                    return Err(ProxyError::Overloaded);
                }
                let reading_max = signed(limits.reading_max / 2);
                let upload = request::BodyReader {
                    timeouts: &self.settings.timeouts,
                    bytes_max: limits.body_bytes_max,
                    headers: &head.headers,
                    is_crowded: &|| self.metrics.reading.get() > reading_max,
                };
                let bytes = upload.read(body, held).await?;
                self.metrics.request_bytes.inc_by(bytes.len() as u64);
                Ok(Intake::Whole(holder, bytes))
            }
        }
    }
}

/// Returns a request's head in the form that the reader expects.
fn request_head<'a>(head: &'a http::request::Parts, peer: &'a HeaderValue) -> RequestHead<'a> {
    RequestHead {
        method: &head.method,
        path: head.uri.path(),
        version: head.version,
        headers: &head.headers,
        origin: RequestOrigin::Address(peer),
    }
}

/// Returns the response to a failed request.
fn failed(
    failure: &ProxyError,
    dialect: Dialect,
    version: Version,
    mut request_metrics: RequestMetricsGuard,
) -> Response<AnswerBody> {
    let told = rescue(failure);
    request_metrics.fails(told.code);
    if told.status.is_server_error() {
        // The text quotes nothing from the request.
        request_metrics.fails_because(failure.to_string());
    }
    let mut response = dialect.response(failure);
    if *failure == ProxyError::BadKey && version <= Version::HTTP_11 {
        // A client without a valid key must not keep a connection.
        response.headers_mut().insert(CONNECTION, CLOSE);
    }
    let outcome = match told.status.is_client_error() {
        true => RequestOutcome::Refused,
        false => RequestOutcome::Failed,
    };
    local(response, outcome, request_metrics)
}

/// Converts a limit to the type of gauges.
fn signed(limit: usize) -> i64 {
    i64::try_from(limit).unwrap_or(i64::MAX)
}

fn local(
    response: Response<Bytes>,
    outcome: RequestOutcome,
    mut request_metrics: RequestMetricsGuard,
) -> Response<AnswerBody> {
    request_metrics.answered(response.status());
    request_metrics.ends(outcome);
    response.map(|body| {
        AnswerBody(AnswerBodyKind::Local(
            Some(body).filter(|body| !body.is_empty()),
        ))
    })
}
