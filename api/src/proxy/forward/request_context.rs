//! The request that the data plane forwards, and its interface to admission and routing.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Uri};
use opentelemetry::trace::TraceId;
use state::ids::Slot;
use state::streams::CarriedStream;

use crate::admission::AdmissionRequest;
use crate::proxy::record::request_record::RequestRecord;
use crate::proxy::request::client_request::ClientRequest;
use crate::proxy::request::routes::shown_path;
use crate::proxy::response::continuation::{EventIdKey, EventIds, ResumeClaim};
use crate::proxy::settings::ProxySettings;
use crate::proxy::settings::keys::Holder;
use crate::routing::{
    EarlierAttempts, EarlierCharge, OfferedEndpoints, PermitCell, RoutingRequest,
};
use crate::traces::{AttemptTrace, RequestTrace, TraceHeaders, client_trace_id};

/// A request with its whole body, before it is parsed.
pub(in crate::proxy) struct ArrivedRequest {
    pub(in crate::proxy) head: http::request::Parts,
    pub(in crate::proxy) body: Bytes,
    /// Holder of the request's key.
    pub(in crate::proxy) holder: Holder,
    pub(in crate::proxy) request_id: HeaderValue,
    /// Address of the client.
    pub(in crate::proxy) peer: HeaderValue,
    /// Endpoints that the asking gateway can use; `None` if this replica sends the request.
    pub(in crate::proxy) endpoints: Option<OfferedEndpoints>,
    /// Trace of the request; `None` without tracing.
    pub(in crate::proxy) trace: Option<Arc<RequestTrace>>,
}

/// Begins the trace of a request; `None` without tracing.
pub(in crate::proxy) fn begin_trace(
    settings: &ProxySettings,
    (method, uri, headers): (&Method, &Uri, &HeaderMap),
    id: &HeaderValue,
) -> Option<Arc<RequestTrace>> {
    let tracer = settings.tracer.as_ref()?;
    let id = id.to_str().unwrap_or_default();
    Some(tracer.begin(headers, (method, shown_path(uri.path())), id))
}

/// Returns the id of the request's trace, if there is one: that of this replica's span if it is
/// exported, or else the client's.
pub(in crate::proxy) fn trace_id(
    trace: Option<&Arc<RequestTrace>>,
    headers: &HeaderMap,
) -> Option<TraceId> {
    match trace {
        Some(trace) if trace.is_sampled() => Some(trace.trace_id()),
        Some(_) | None => client_trace_id(headers),
    }
}

/// The resumable stream that a request carries, and the key that signs its ids.
pub(in crate::proxy) type ResumableStream = (CarriedStream, Arc<EventIdKey>);

/// A request whose body was parsed and whose user is known.
pub(in crate::proxy) struct ProxiedRequest {
    pub(in crate::proxy) head: http::request::Parts,
    pub(in crate::proxy) body: Bytes,
    pub(in crate::proxy) read: ClientRequest,
    pub(in crate::proxy) request_id: HeaderValue,
    /// Id that engines get: the request's, unless another one with the same id is in flight.
    pub(in crate::proxy) engine_request_id: HeaderValue,
    /// Address of the client.
    pub(in crate::proxy) peer: HeaderValue,
    /// Endpoints that the asking gateway can use; `None` if this replica sends the request.
    pub(in crate::proxy) endpoints: Option<OfferedEndpoints>,
    /// Record of the request's decisions; `None` if no record is kept.
    pub(in crate::proxy) record: Option<Arc<RequestRecord>>,
    /// Trace of the request; `None` without tracing.
    pub(in crate::proxy) trace: Option<Arc<RequestTrace>>,
    /// Permit of the request's user, also for retries.
    pub(in crate::proxy) permit: PermitCell,
    /// The resumable stream that the request carries, if it does.
    pub(in crate::proxy) carried: Option<CarriedStream>,
    /// Signs the ids of the stream's events; `None` if the request carries no resumable stream.
    ids: Option<Arc<EventIdKey>>,
    /// What the client has received of a stream of another replica; `None` if its stream begins.
    pub(in crate::proxy) claim: Option<Box<ResumeClaim>>,
    /// Attempts whose backends failed although they may have generated output, if another backend
    /// may go on.
    pub(in crate::proxy) earlier: EarlierAttempts,
}

impl ProxiedRequest {
    /// Joins a request that has `arrived` and what was `read` of it, with its record and the id that
    /// engines get.
    pub(in crate::proxy) fn new(
        (head, body): (http::request::Parts, Bytes),
        read: ClientRequest,
        ids: (HeaderValue, HeaderValue),
        (peer, endpoints): (HeaderValue, Option<OfferedEndpoints>),
        (record, trace): (Option<Arc<RequestRecord>>, Option<Arc<RequestTrace>>),
        (resumable, claim): (Option<ResumableStream>, Option<Box<ResumeClaim>>),
    ) -> Self {
        let (carried, event_ids) = resumable.unzip();
        Self {
            head,
            body,
            read,
            request_id: ids.0,
            engine_request_id: ids.1,
            peer,
            endpoints,
            record,
            trace,
            permit: PermitCell::new(),
            carried,
            ids: event_ids,
            claim,
            earlier: EarlierAttempts::default(),
        }
    }

    /// Returns the ids of the events of the stream that the request carries; `None` if it carries
    /// none.
    pub(in crate::proxy) fn event_ids(&self, is_chat: bool) -> Option<EventIds> {
        let signed = (self.carried?.stream, Arc::clone(self.ids.as_ref()?));
        let text = self.claim.as_ref().map_or("", |claim| &claim.text);
        Some(EventIds::behind(text, signed, is_chat))
    }

    /// Returns the salt that isolates the user's cached blocks; `None` if the user shares them.
    pub(in crate::proxy) fn salt(&self) -> Option<&str> {
        self.identity.isolation?;
        self.parsed.cache_salt.as_deref()
    }

    /// Returns the trace headers for an engine: those of `attempt`, or else of the request, if
    /// traced.
    pub(in crate::proxy) fn trace_headers(
        &self,
        attempt: Option<&mut AttemptTrace>,
    ) -> Option<TraceHeaders> {
        match attempt {
            Some(attempt) => Some(attempt.headers()),
            None => self.trace.as_ref().map(|trace| trace.headers()),
        }
    }

    /// Returns the id of the request's trace, if there is one.
    pub(in crate::proxy) fn trace_id(&self) -> Option<TraceId> {
        trace_id(self.trace.as_ref(), &self.head.headers)
    }

    /// Begins the span of an attempt at `backend`; `None` without tracing.
    pub(in crate::proxy) fn attempts(
        &self,
        backend: &str,
        stage: &'static str,
    ) -> Option<AttemptTrace> {
        self.trace.as_ref()?.attempts(backend, stage)
    }
}

impl Deref for ProxiedRequest {
    type Target = ClientRequest;

    fn deref(&self) -> &ClientRequest {
        &self.read
    }
}

impl AdmissionRequest for ProxiedRequest {
    fn ask<'a>(&'a self, excluded: &'a [Slot]) -> RoutingRequest<'a> {
        let request_id = self.request_id.to_str().unwrap_or_default();
        RoutingRequest {
            endpoints: self.endpoints.as_ref(),
            ..self.read.ask(&self.head.headers, request_id, excluded)
        }
    }

    fn permit(&self) -> &PermitCell {
        &self.permit
    }

    fn priority(&self) -> i16 {
        self.priority
    }

    fn tokens_max(&self) -> Option<u32> {
        self.parsed.max_tokens
    }

    fn earlier(&self) -> Option<EarlierCharge> {
        self.earlier.charge()
    }

    fn carried(&self) -> Option<CarriedStream> {
        self.carried
    }

    fn is_traced(&self) -> bool {
        self.trace.as_ref().is_some_and(|trace| trace.is_sampled())
    }

    fn is_selective(&self) -> bool {
        let is_limited = matches!(self.endpoints, Some(OfferedEndpoints::Those(_)));
        is_limited || self.read.is_selective()
    }

    fn wait_max(&self, service: Duration) -> Option<Duration> {
        self.read.wait_max(service)
    }
}
