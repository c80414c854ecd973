//! The flow of a request: accept, read, parse, forward, relay.
//!
//! `listen/server.rs` calls [`Proxy::answer`] for each request. Every request ends in one response,
//! in one metrics record and, if it was parsed, in one entry of the decision log.

use std::borrow::Cow;
use std::cell::LazyCell;
use std::sync::Arc;

use bytes::Bytes;
use http::header::CONNECTION;
use http::{HeaderMap, HeaderValue, Method, Request, Response, Version, request};
use http_body::Body;
use hyper::body::Incoming;
use state::ids::UserKey;
use tracing::Instrument;

use super::Proxy;
use super::forward::log_order::catch_up;
use super::forward::request_context::{
    ArrivedRequest, ProxiedRequest, ResumableStream, begin_trace, trace_id,
};
use super::forward::stored::{RequestContext, forward_stored};
use super::forward::{ForwardResult, forward};
use super::listen::answer_body::{AnswerBody, AnswerBodyKind};
use super::listen::write_timeout::hand_over;
use super::record::metrics::{RequestMetricsGuard, RequestOutcome};
use super::request::client_request::{ClientRequest, RequestHead};
use super::request::dialect::Dialect;
use super::request::headers::{CLOSE, UPGRADE_AND_CLOSE, client_request_id, request_id};
use super::request::identify::RequestOrigin;
use super::request::request_body::{BodyReader, HeldBodyBytes, read_on};
use super::request::routes::{Route, unslashed};
use super::response::continuation::{EventIdKey, ResumeClaim, is_resumable, take_claim};
use super::response::ratelimit;
use super::response::response_body::{SharedResponseBody, lock};
use super::settings::keys::Holder;
use crate::error::{ProxyError, rescue};
use crate::net::connections::ConnectionRequestGuard;
use crate::traces::RequestTrace;

/// Result of receiving a request.
pub(super) enum Intake<'a> {
    /// The holder of the key and the body: the request is routed by its body.
    Whole(Holder, Bytes),
    /// The holder of the key and, for one model only, its id: the request lists models.
    Models(Holder, Option<Cow<'a, str>>),
    /// The holder of the key: the request is for the engine that stored a response.
    Stored(Holder),
}

impl Proxy {
    /// Responds to one request. `peer` is the client's address as a header value.
    pub(super) async fn answer(
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
        let is_head = head.method == Method::HEAD;
        let origin = self.settings.cors.verdict(&head.headers);
        let ignored = self.requests.ignored(&head.headers);
        let mut user = None;
        let handled = async {
            if !is_within {
                request_metrics.is_refused();
                read_on(&self, &head, body).await;
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
            Ok(answer) if is_head => {
                self.passed_on(answer.without_body(), version, request_metrics)
            }
            Ok(answer) => self.passed_on(answer, version, request_metrics),
            Err(failure) => {
                let failure = self.readiness_gate.doubt(failure);
                failed(&failure, dialect, version, request_metrics)
            }
        };
        if is_head {
            *response.body_mut() = AnswerBody(AnswerBodyKind::Local(None));
        }
        self.sign(response.headers_mut(), (dialect, id), (ignored, user));
        origin.add_headers(response.headers_mut());
        response
    }

    /// Adds the headers that every response gets.
    pub(super) fn sign(
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

    async fn handle(
        self: &Arc<Self>,
        (peer, request_id, trace): (HeaderValue, HeaderValue, Option<Arc<RequestTrace>>),
        (head, mut body): (http::request::Parts, Incoming),
        request_metrics: &mut RequestMetricsGuard,
        user: &mut Option<UserKey>,
    ) -> Result<ForwardResult, ProxyError> {
        let requests_max = self.limits.load().requests();
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
                    read_on(self, &head, body).await;
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
    pub(super) async fn parse(
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
        let streams = &self.settings.streams;
        let claim = match &endpoints {
            None => take_claim(streams, &head, &mut body)?,
            Some(_) => None,
        };
        let told = RequestHead {
            request_id: request_id.to_str().unwrap_or_default(),
            is_resumed: claim.is_some(),
            endpoints: endpoints.as_ref(),
            ..request_head(&head, &peer)
        };
        let (read, ids) = self.requests.read(&told, &holder, &mut body).await?;
        let user_key = read.user.key(self.requests.hash_seed());
        let resumable = match &endpoints {
            None => self.resumable((&head, &body), &read, user_key, claim.as_deref())?,
            Some(_) => None,
        };
        // The token ids are as long as the prompt, and no longer needed.
        drop(ids);
        *user = Some(user_key);
        let model = &read.parsed.model;
        let is_served = || self.view.registry().names_model(model);
        request_metrics.is_for(self.metrics.models.meter(model, is_served));
        if let Some(resolved) = read.resolved.as_ref().filter(|it| it.is_fallback) {
            self.metrics.models.falls_back(&resolved.meant);
        }
        if let Some(trace) = &trace {
            trace.asks(&read.traced(path));
        }
        let record = self.decisions.open(&read, &request_id, path);
        request_metrics.records(record.clone(), &self.decisions);
        catch_up(self, read.preferences.min_index).await;
        let counted = self.users.count(read.user.as_str());
        request_metrics.counts(counted.ok_or(ProxyError::UserAtLimit)?);
        let engine_request_id = match client_request_id(&head.headers) {
            None => request_id.clone(),
            Some(id) => {
                let (id, claim) = self.request_ids.claim(id);
                request_metrics.claims(claim);
                id
            }
        };
        let ids = (request_id, engine_request_id);
        Ok(ProxiedRequest::new(
            (head, body),
            read,
            ids,
            (peer, endpoints),
            (record, trace),
            (resumable, claim),
        ))
    }

    /// Returns the stream that a request carries; `None` if its client cannot go on elsewhere.
    fn resumable(
        &self,
        (head, body): (&request::Parts, &Bytes),
        read: &ClientRequest,
        user: UserKey,
        claim: Option<&ResumeClaim>,
    ) -> Result<Option<ResumableStream>, ProxyError> {
        let sign = || {
            let secret = &self.view.registry().hash_secret;
            Arc::new(EventIdKey::new(secret, user, (head.uri.path(), body)))
        };
        if let Some(claim) = claim {
            let key = sign();
            claim.check(&key)?;
            return Ok(Some((self.dispatcher.new_carrier(claim.id.stream), key)));
        }
        // The client would come back with the same name, and must get the same model.
        let is_momentary = read.resolved.as_ref().is_some_and(|it| it.is_momentary());
        let streams = &self.settings.streams;
        let is_resumable = !is_momentary && is_resumable(streams, head, (&read.parsed, body));
        Ok(is_resumable.then(|| (self.dispatcher.new_stream(), sign())))
    }

    /// Checks a request's head, and reads the body if the request is routed by it.
    pub(super) async fn take_in<'a, B: Body<Data = Bytes> + Unpin>(
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
                let is_full = self.metrics.in_flight.get() >= signed(limits.requests());
                // This request counts as one of them.
                let reading = self.metrics.reading.get();
                if is_full || reading > signed(limits.reading()) {
                    return Err(ProxyError::Overloaded);
                }
                let reading_max = signed(limits.reading() / 2);
                let upload = BodyReader {
                    timeouts: &self.settings.timeouts,
                    bytes_max: limits.body_bytes_max,
                    headers: &head.headers,
                    is_overloaded: &|| self.metrics.reading.get() > reading_max,
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
        request_id: "",
        is_resumed: false,
        endpoints: None,
    }
}

/// Returns the response to a failed request.
pub(super) fn failed(
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
    if version <= Version::HTTP_11 {
        if *failure == ProxyError::BadKey {
            // A client without a valid key must not keep a connection.
            response.headers_mut().insert(CONNECTION, CLOSE);
        } else if *failure == ProxyError::HttpOnly {
            response.headers_mut().insert(CONNECTION, UPGRADE_AND_CLOSE);
        }
    }
    let outcome = match told.status.is_client_error() {
        true => RequestOutcome::Refused,
        false => RequestOutcome::Failed,
    };
    local(response, outcome, request_metrics)
}

/// Converts a limit to the type of gauges.
pub(super) fn signed(limit: usize) -> i64 {
    i64::try_from(limit).unwrap_or(i64::MAX)
}

pub(super) fn local(
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
