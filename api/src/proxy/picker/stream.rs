//! One stream of a gateway: one request, from its head to the end of its response.
//!
//! The task of the stream owns everything that the request holds, and drops it when it ends. When a
//! gateway ends the stream, its client's request therefore ends at any stage.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use http::request::Parts;
use http::{HeaderMap, HeaderValue, Response, StatusCode, Version};
use state::ids::{LogIndex, UserKey};
use tokio::time::{Instant, timeout, timeout_at};
use tonic::Status;

use super::answered::{AnswerHead, SentOffer};
use super::answers::StreamEnd;
use super::ext_proc::processing_request::Request;
use super::ext_proc::processing_response::Response as Reply;
use super::gateway_reply::GatewayReply;
use super::inbound::{
    GatewayMessages, StreamHalt, UploadedBody, out_of_turn, override_ignored, override_not_allowed,
};
use super::metrics::PickedOutcome;
use super::offer::EndpointOffer;
use super::outbound::{
    BodyOf, PickerMessages, answer_head, immediate, request_head, request_head_waits,
    request_trailers, untaken,
};
use super::own_reply;
use super::relayed_answer::RelayedAnswer;
use super::stream_meter::StreamMeter;
use super::upload_shape::UploadShape;
use super::{BodyMode, BodyModes, Picker, heads, metadata};
use crate::admission::AdmissionTry;
use crate::error::{ProxyError, rescue};
use crate::proxy::answer::{Intake, failed, local};
use crate::proxy::forward::attempt::{AttemptError, OutgoingRequest, PendingAttempt};
use crate::proxy::forward::blame::report_status;
use crate::proxy::forward::log_order::known_at;
use crate::proxy::forward::request_context::{
    ArrivedRequest, ProxiedRequest, begin_trace, trace_id,
};
use crate::proxy::forward::{admit, excluded_at_first, hidden, prepare, relay};
use crate::proxy::listen::answer_body::AnswerBody;
use crate::proxy::record::metrics::{RequestMetricsGuard, RequestOutcome};
use crate::proxy::request::dialect::Dialect;
use crate::proxy::request::headers::request_id;
use crate::proxy::request::request_body::HeldBodyBytes;
use crate::proxy::request::routes::unslashed;
use crate::proxy::request::usage_options::WantedUsage;
use crate::proxy::response::answer_source::{AnswerSource, handed};
use crate::proxy::response::response_body::lock;
use crate::routing::{Attempt, AttemptEnd, Decision, OfferedEndpoints, RequestStages};
use crate::traces::RequestTrace;

/// One stream of a gateway, which carries one request.
pub(super) struct PickerStream {
    pub(super) picker: Arc<Picker>,
    pub(super) inbound: GatewayMessages,
    pub(super) out: PickerMessages,
    /// Address of the gateway.
    pub(super) peer: HeaderValue,
    /// Mode in which the gateway sends the body of a response.
    pub(super) answers: BodyMode,
}

/// Accounting of a request while its stream is open.
struct StreamAccounting {
    /// Guard of the metrics; `None` before the request's head, and once the response has begun.
    request_metrics: Option<RequestMetricsGuard>,
    user: Option<UserKey>,
    dialect: Dialect,
    id: HeaderValue,
    /// List of the request headers without effect, if any.
    ignored: Option<HeaderValue>,
}

/// Content of a stream's first message.
struct StreamOpening {
    head: Parts,
    /// Whether the path lost a slash at its end.
    is_unslashed: bool,
    is_bodiless: bool,
    endpoints: OfferedEndpoints,
    /// Trace of the request; `None` without tracing.
    trace: Option<Arc<RequestTrace>>,
}

impl StreamAccounting {
    /// Creates the accounting of a stream whose first message is still to come.
    fn new() -> Self {
        Self {
            request_metrics: None,
            user: None,
            dialect: Dialect::OpenAi,
            id: request_id(&HeaderMap::new()),
            ignored: None,
        }
    }

    fn request_metrics(&mut self) -> &mut RequestMetricsGuard {
        let request_metrics = self.request_metrics.as_mut();
        request_metrics.expect("it is handed over when the answer begins, and asked for before")
    }
}

impl PickerStream {
    /// Serves the stream to its end.
    pub(super) async fn run(mut self, mut meter: StreamMeter) -> StreamEnd {
        meter.outcome = PickedOutcome::Left;
        let out = self.out.sender.clone();
        tokio::select! {
            biased;
            () = out.closed() => Ok(()),
            ended = self.serve(&mut meter) => ended,
        }
    }

    async fn serve(&mut self, meter: &mut StreamMeter) -> StreamEnd {
        let picker = Arc::clone(&self.picker);
        let proxy = &picker.proxy;
        let mut accounting = StreamAccounting::new();
        let Err(halt) = self.follow(&mut accounting, meter).await else {
            return Ok(());
        };
        let request_metrics = accounting.request_metrics.take();
        let mut details = "quorate".to_owned();
        let response = match (halt, request_metrics) {
            (StreamHalt::Broken(why), _) => {
                meter.outcome = PickedOutcome::Broken;
                return Err(why);
            }
            (StreamHalt::Refused(failure), Some(request_metrics)) => {
                let failure = proxy.readiness_gate.doubt(failure);
                details = format!("quorate{{{}}}", rescue(&failure).code);
                failed(
                    &failure,
                    accounting.dialect,
                    Version::HTTP_2,
                    request_metrics,
                )
            }
            (StreamHalt::Local(response), Some(request_metrics)) => {
                local(*response, RequestOutcome::Local, request_metrics)
            }
            (StreamHalt::Replied(reply), request_metrics) => {
                if meter.outcome != PickedOutcome::Picked {
                    meter.outcome = PickedOutcome::Passed;
                }
                if let Some(mut request_metrics) = request_metrics {
                    let why = reply.details.as_deref().unwrap_or("no reason was sent");
                    request_metrics.fails_because(format!("the gateway's own response: {why}"));
                    if let Some(status) = reply.status {
                        request_metrics.answered(status);
                    }
                    request_metrics.ends(RequestOutcome::GatewayReply);
                }
                return self.let_pass(&reply).await;
            }
            (StreamHalt::Left, _) => return Ok(()),
            // The gateway must not go on without an answer.
            (StreamHalt::Refused(_) | StreamHalt::Local(_), None) => {
                return Err(Status::internal(
                    "the request was refused after its response began",
                ));
            }
        };
        meter.outcome = PickedOutcome::Answered;
        let mut response = response.map(AnswerBody::into_local);
        let told = (accounting.ignored, accounting.user);
        proxy.sign(
            response.headers_mut(),
            (accounting.dialect, accounting.id),
            told,
        );
        ended(self.out.send(immediate(response, details)).await)
    }

    /// Lets the gateway's own response pass.
    async fn let_pass(&mut self, reply: &GatewayReply) -> StreamEnd {
        let timeouts = self.picker.proxy.settings.timeouts;
        let waits = (self.answers, timeouts.answer_idle, timeouts.held_back);
        ended(own_reply::let_pass(reply, waits, &mut self.inbound, &self.out).await)
    }

    async fn follow(
        &mut self,
        accounting: &mut StreamAccounting,
        meter: &mut StreamMeter,
    ) -> Result<(), StreamHalt> {
        let picker = Arc::clone(&self.picker);
        let proxy = &picker.proxy;
        let (opening, modes) = self.open(accounting).await?;
        let is_unslashed = opening.is_unslashed;
        let mut held = proxy.held_body();
        let (proxied, upload) = self.take_in(opening, modes, &mut held, accounting).await?;
        let (mut sending, wanted) = prepare(proxy, &proxied, accounting.request_metrics())?;
        let (decision, mut attempt) = self
            .admit(&proxied, upload.may_go_on(), accounting.request_metrics())
            .await?;
        let trace = proxied.trace_headers(attempt.trace());
        let sent_at = Instant::now();
        sending.first_byte_by = sent_at + proxy.settings.timeouts.first_byte;
        sending.watched.sent();
        let pending = PendingAttempt::of(attempt);
        let mut offer = EndpointOffer::of(&picker, &sending, &decision, trace.as_ref())?;
        if is_unslashed {
            heads::set_path(&mut offer.headers, &sending.uri);
        }
        // Without this limit, a gateway that accepts each message late could block for hours.
        let told = timeout_at(sending.first_byte_by, self.tell(&offer, upload)).await;
        told.unwrap_or_else(|_| Err(untaken()))?;
        pending.is_sent.store(true, Relaxed);
        meter.outcome = PickedOutcome::Picked;
        let Ok(head) = timeout_at(sending.first_byte_by, self.answer_head(upload)).await else {
            return Err(is_late(pending, accounting));
        };
        let head = head?;
        let (attempt, _) = pending.over();
        let told = SentOffer { offer, sent_at };
        let answered = (&sending, &head);
        let request_metrics = &mut accounting.request_metrics;
        let (decision, attempt) =
            told.judge(&picker, (decision, attempt), answered, request_metrics)?;
        let known_at = known_at(&picker.proxy, &proxied, &decision, &attempt).await;
        let dispatched = (&decision, attempt, known_at);
        let passed = self.begin((&sending, wanted), dispatched, &head, accounting);
        let (passed, headers) = passed;
        drop((sending, held));
        drop(proxied);
        self.out.send(headers).await?;
        passed
            .pass(modes.answers, &mut self.inbound, &self.out)
            .await
    }

    /// Waits for the stream's first message and parses it.
    async fn open(
        &mut self,
        accounting: &mut StreamAccounting,
    ) -> Result<(StreamOpening, BodyModes), StreamHalt> {
        let proxy = &self.picker.proxy;
        let limit = proxy.settings.timeouts.first_request;
        let Ok(message) = timeout(limit, self.inbound.next()).await else {
            let why = "no request_headers came";
            return Err(StreamHalt::Broken(Status::deadline_exceeded(why)));
        };
        let message = message?;
        let settings = &self.picker.settings;
        let modes = match message.protocol {
            Some(protocol) => BodyModes::told(protocol)?,
            None => BodyModes {
                requests: settings.bodies,
                answers: settings.bodies,
            },
        };
        self.answers = modes.answers;
        let told = match message.request {
            Request::RequestHeaders(told) => told,
            // A filter before this one responded, so no request comes.
            Request::ResponseHeaders(told) => {
                let reply = GatewayReply::of(&told, message.details);
                return Err(StreamHalt::Replied(reply));
            }
            request => return Err(out_of_turn(&request, "first")),
        };
        accounting.request_metrics = Some(RequestMetricsGuard::open(&proxy.metrics, None));
        let limits = **proxy.limits.load();
        let mut head = heads::request(&told, &limits)?;
        let unslashed = unslashed(&head.uri);
        let is_unslashed = unslashed.is_some();
        head.uri = unslashed.unwrap_or(head.uri);
        accounting.id = request_id(&head.headers);
        accounting.dialect = Dialect::of(head.uri.path());
        accounting.ignored = proxy.requests.ignored(&head.headers);
        let asked = (&head.method, &head.uri);
        let trace = begin_trace(
            &proxy.settings,
            (asked.0, asked.1, &head.headers),
            &accounting.id,
        );
        let trace_id = || trace_id(trace.as_ref(), &head.headers);
        let access = proxy.access.begin(&accounting.id, asked, trace_id);
        accounting.request_metrics().logs(access);
        accounting.request_metrics().traces(trace.clone());
        let opening = StreamOpening {
            head,
            is_unslashed,
            is_bodiless: told.end_of_stream,
            endpoints: metadata::offered(message.metadata.as_ref()),
            trace,
        };
        Ok((opening, modes))
    }

    /// Receives the rest of the request and parses it.
    async fn take_in(
        &mut self,
        opening: StreamOpening,
        modes: BodyModes,
        held: &mut HeldBodyBytes,
        accounting: &mut StreamAccounting,
    ) -> Result<(Arc<ProxiedRequest>, UploadShape), StreamHalt> {
        let picker = Arc::clone(&self.picker);
        let proxy = &picker.proxy;
        let peer = self.peer.clone();
        let (taken, upload) = self
            .read((&peer, &opening), modes, held, accounting)
            .await?;
        let (holder, bytes) = match taken {
            Intake::Whole(holder, bytes) => (holder, bytes),
            Intake::Models(holder, id) => {
                let told = proxy.models(&holder, id.as_deref())?;
                return Err(StreamHalt::Local(Box::new(told)));
            }
            Intake::Stored(_) => {
                return Err(ProxyError::KeepsNothing { kept: "responses" }.into());
            }
        };
        let requests_max = proxy.limits.load().requests();
        accounting.request_metrics().is_read(requests_max)?;
        let StreamOpening {
            head,
            endpoints,
            trace,
            ..
        } = opening;
        let arrived = ArrivedRequest {
            head,
            body: bytes,
            holder,
            request_id: accounting.id.clone(),
            peer,
            endpoints: Some(endpoints),
            trace,
        };
        let StreamAccounting {
            request_metrics,
            user,
            ..
        } = accounting;
        let request_metrics = request_metrics
            .as_mut()
            .expect("the response has not begun");
        let parsed = proxy.parse(arrived, request_metrics, user).await;
        let mut proxied = parsed.map_err(|failure| match failure {
            ProxyError::BadRequest { .. } if upload.may_go_on() => override_ignored(),
            failure => failure.into(),
        })?;
        if proxied.read.stages != RequestStages::Nothing {
            // A gateway sends a request to only one engine.
            proxied.read.stages = RequestStages::Monolithic;
        }
        Ok((Arc::new(proxied), upload))
    }

    /// Checks the request's head, and reads the body in the gateway's mode.
    async fn read<'a>(
        &mut self,
        (peer, opening): (&'a HeaderValue, &'a StreamOpening),
        modes: BodyModes,
        held: &mut HeldBodyBytes,
        accounting: &mut StreamAccounting,
    ) -> Result<(Intake<'a>, UploadShape), StreamHalt> {
        let is_bodiless = opening.is_bodiless;
        let mode = match modes.requests {
            BodyMode::Streamed => BodyMode::Buffered,
            mode => mode,
        };
        if !is_bodiless {
            match modes.requests {
                BodyMode::Duplex | BodyMode::StreamedEarly => {}
                // Envoy overrides no mode while the other body is in full duplex.
                BodyMode::Streamed
                    if !self.picker.settings.allows_overrides()
                        || modes.answers == BodyMode::Duplex =>
                {
                    return Err(override_not_allowed());
                }
                BodyMode::Streamed => {
                    let withheld = heads::withheld(&opening.head.headers);
                    self.out.ask_for_whole(modes.answers, withheld).await?;
                }
                BodyMode::Buffered => {
                    let withheld = heads::withheld(&opening.head.headers);
                    self.out.send(request_head_waits(withheld)).await?;
                }
            }
        }
        let proxy = &self.picker.proxy;
        let mut body = UploadedBody::new(&mut self.inbound, mode, is_bodiless);
        let head = &opening.head;
        let taken = proxy.take_in(head, peer, &mut body, held).await;
        if let Some(halt) = body.halt.take() {
            let halt = halt.of_upload(proxy.limits.load().body_bytes_max);
            if let StreamHalt::Refused(_) = halt {
                accounting.request_metrics().is_refused();
            }
            return Err(halt);
        }
        let upload = UploadShape {
            mode,
            is_asked_whole: modes.requests == BodyMode::Streamed,
            is_bodiless,
            is_cut: body.is_cut,
            pieces: body.pieces,
            has_trailers: body.has_trailers,
        };
        match taken {
            Ok(taken) => Ok((taken, upload)),
            // What was taken for the whole body is only its first piece.
            Err(ProxyError::BadRequest { .. }) if upload.may_go_on() => Err(override_ignored()),
            Err(failure) => {
                accounting.request_metrics().is_refused();
                Err(failure.into())
            }
        }
    }

    /// Waits for a backend as long as the gateway waits.
    async fn admit(
        &mut self,
        proxied: &Arc<ProxiedRequest>,
        may_go_on: bool,
        request_metrics: &mut RequestMetricsGuard,
    ) -> Result<(Decision, Attempt), StreamHalt> {
        let proxy = &self.picker.proxy;
        let arrived = Instant::now();
        let excluded = excluded_at_first(proxy, proxied).await?;
        let admitted = tokio::select! {
            biased;
            admitted = admit(proxy, proxied, (&excluded, AdmissionTry::First)) => admitted,
            halt = self.inbound.gone(may_go_on) => return Err(halt),
        };
        let (decision, mut attempt) = admitted.map_err(|why| match why {
            ProxyError::NoneOffered if proxied.endpoints == Some(OfferedEndpoints::All) => {
                ProxyError::NoEndpoint
            }
            why => why,
        })?;
        request_metrics.routed(arrived.elapsed());
        attempt.set_hidden_output(hidden(&proxied.parsed).filter(|_| !proxied.parsed.stream));
        Ok((decision, attempt))
    }

    /// Sends the gateway the endpoints and the request for them.
    async fn tell(&mut self, offer: &EndpointOffer, upload: UploadShape) -> Result<(), StreamHalt> {
        let (out, headers) = (&self.out, offer.headers.clone());
        let endpoints = offer.endpoints();
        let beside = metadata::destination(&endpoints);
        if upload.is_bodiless {
            return out.send_with(request_head(headers), Some(beside)).await;
        }
        let body = offer.body.clone();
        match upload.mode {
            BodyMode::Duplex => {
                out.send_with(request_head(headers), Some(beside)).await?;
                EndpointOffer::send_body(body, upload.has_trailers, out).await?;
            }
            BodyMode::StreamedEarly => {
                out.send_with(request_head(headers), Some(beside)).await?;
                let mut whole = EndpointOffer::whole_body(body).await;
                for _ in 0..upload.pieces {
                    // The first piece is replaced by the whole body.
                    let piece = std::mem::take(&mut whole);
                    out.send(BodyOf::Request.replaced(piece, None)).await?;
                }
            }
            BodyMode::Buffered | BodyMode::Streamed => {
                let whole = EndpointOffer::whole_body(body).await;
                let said = BodyOf::Request.replaced(whole, Some(headers));
                return out.send_with(said, Some(beside)).await;
            }
        }
        match upload.has_trailers {
            true => out.send(request_trailers()).await,
            false => Ok(()),
        }
    }

    /// Waits for the head of the response.
    async fn answer_head(&mut self, upload: UploadShape) -> Result<AnswerHead, StreamHalt> {
        let mut may_end = upload.mode == BodyMode::Buffered && !upload.is_bodiless;
        loop {
            let message = self.inbound.next().await?;
            let told = match message.request {
                Request::ResponseHeaders(told) => told,
                Request::RequestTrailers(_) if may_end => {
                    may_end = false;
                    self.out.send(request_trailers()).await?;
                    continue;
                }
                Request::RequestBody(_) if upload.may_go_on() => return Err(override_ignored()),
                request => return Err(out_of_turn(&request, "before response_headers")),
            };
            let limits = **self.picker.proxy.limits.load();
            let Some((status, headers)) = heads::answer(&told, &limits) else {
                let why = "response_headers have no status, or are malformed";
                return Err(StreamHalt::Broken(Status::invalid_argument(why)));
            };
            return Ok(AnswerHead {
                status,
                headers,
                is_over: told.end_of_stream,
                served: metadata::served(message.metadata.as_ref()),
                details: message.details,
            });
        }
    }

    /// Begins to relay a response and returns the reply to its head.
    fn begin(
        &self,
        (sending, wanted): (&OutgoingRequest<'_>, WantedUsage),
        (decision, mut attempt, known_at): (&Decision, Attempt, LogIndex),
        head: &AnswerHead,
        accounting: &mut StreamAccounting,
    ) -> (RelayedAnswer, Reply) {
        let proxy = &self.picker.proxy;
        let (writer, body) = handed();
        if head.is_over {
            writer.end();
        }
        let mut response = Response::new(AnswerSource::Gateway(body));
        *response.status_mut() = head.status;
        *response.headers_mut() = head.headers.clone();
        let (backend, status) = (decision.backend, head.status);
        report_status(proxy, (backend, attempt.user()), status, false);
        if status == StatusCode::NOT_FOUND {
            // The gateway relays it, whatever it is about.
            proxy.backends.doubt_list(backend.slot);
        }
        if let Some(trace) = attempt.trace() {
            trace.answered(head.status.as_u16());
        }
        let mut response = relay(proxy, sending, decision, response, attempt, wanted);
        let expose = proxy.settings.expose;
        expose.index(response.headers_mut(), head.status, known_at);
        let told = (accounting.ignored.take(), accounting.user);
        proxy.sign(
            response.headers_mut(),
            (accounting.dialect, accounting.id.clone()),
            told,
        );
        let headers = answer_head(heads::mutation(&head.headers, response.headers()));
        let passed = RelayedAnswer {
            answer: response.into_body(),
            writer,
            is_bodiless: head.is_over,
            held_back: proxy.settings.timeouts.held_back,
            idle: proxy.settings.timeouts.answer_idle,
        };
        if let Some(mut request_metrics) = accounting.request_metrics.take() {
            request_metrics.answered(head.status);
            lock(&passed.answer).account(request_metrics);
        }
        (passed, headers)
    }
}

/// Ends an attempt whose response did not begin in time.
fn is_late(pending: PendingAttempt, accounting: &mut StreamAccounting) -> StreamHalt {
    let (mut attempt, _) = pending.over();
    if let Some(trace) = attempt.trace() {
        trace.failed(AttemptError::TimedOut.label());
    }
    // The engine may have been computing until the timeout.
    attempt.end(AttemptEnd::Broken, Instant::now());
    let failure = ProxyError::EngineTimeout;
    if let Some(request_metrics) = accounting.request_metrics.take() {
        let dialect = accounting.dialect;
        drop(failed(&failure, dialect, Version::HTTP_2, request_metrics));
    }
    StreamHalt::Broken(Status::deadline_exceeded(failure.to_string()))
}

/// Returns the end of a stream after its last message.
fn ended(sent: Result<(), StreamHalt>) -> StreamEnd {
    match sent {
        Err(StreamHalt::Broken(why)) => Err(why),
        // A gateway that has left needs no message.
        Ok(()) | Err(_) => Ok(()),
    }
}
