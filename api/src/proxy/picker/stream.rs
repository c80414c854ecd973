//! One stream of a gateway: one request, from its head to the end of its response.
//!
//! The task of the stream owns everything that the request holds, and drops it when it ends. When a
//! gateway ends the stream, its client's request therefore ends at any stage.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use http::{HeaderValue, Response, StatusCode, Version};
use state::ids::LogIndex;
use tokio::time::{Instant, timeout_at};
use tonic::Status;

use super::accounting::StreamAccounting;
use super::answered::{AnswerHead, SentOffer};
use super::answers::StreamEnd;
use super::gateway_message::ToldPart;
use super::gateway_reply::GatewayReply;
use super::heads::{self, HeadChange};
use super::inbound::{GatewayMessages, StreamHalt, out_of_turn, override_ignored};
use super::metrics::PickedOutcome;
use super::offer::EndpointOffer;
use super::outbound::{PickerMessages, answer_head, immediate, request_trailers, untaken};
use super::relayed_answer::RelayedAnswer;
use super::stream_meter::StreamMeter;
use super::upload_shape::UploadShape;
use super::wire::PickerMessage;
use super::{BodyMode, Picker, metadata, own_reply};
use crate::admission::AdmissionTry;
use crate::error::{ProxyError, rescue};
use crate::proxy::answer::{failed, local};
use crate::proxy::forward::attempt::{AttemptError, OutgoingRequest, PendingAttempt};
use crate::proxy::forward::blame::report_status;
use crate::proxy::forward::log_order::known_at;
use crate::proxy::forward::request_context::ProxiedRequest;
use crate::proxy::forward::{admit, excluded_at_first, hidden, prepare, relay};
use crate::proxy::listen::answer_body::AnswerBody;
use crate::proxy::record::metrics::{RequestMetricsGuard, RequestOutcome};
use crate::proxy::request::usage_options::WantedUsage;
use crate::proxy::response::answer_source::{AnswerSource, handed};
use crate::proxy::response::response_body::lock;
use crate::routing::{Attempt, AttemptEnd, Decision, OfferedEndpoints};

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
                if let Some(request_metrics) = request_metrics {
                    reply.account(request_metrics, RequestOutcome::GatewayReply);
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
        let told = (accounting.ignored.take(), accounting.user);
        proxy.sign(
            response.headers_mut(),
            (accounting.dialect, accounting.id()),
            told,
        );
        ended(self.out.send(immediate(response, &details)).await)
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
            offer.headers.set_path(&sending.uri);
        }
        // Without this limit, a gateway that accepts each message late could block for hours.
        let told = timeout_at(sending.first_byte_by, offer.send(&upload, &self.out)).await;
        told.unwrap_or_else(|_| Err(untaken()))?;
        pending.is_sent.store(true, Relaxed);
        meter.outcome = PickedOutcome::Picked;
        let Ok(head) = timeout_at(sending.first_byte_by, self.answer_head(&upload)).await else {
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
        drop((sending, held, upload));
        drop(proxied);
        self.out.send(headers).await?;
        passed
            .pass(modes.answers, &mut self.inbound, &self.out)
            .await
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

    /// Waits for the head of the response.
    async fn answer_head(&mut self, upload: &UploadShape) -> Result<AnswerHead, StreamHalt> {
        let mut may_end = upload.mode == BodyMode::Buffered && !upload.is_bodiless;
        loop {
            let message = self.inbound.next().await?;
            let told = match message.told {
                ToldPart::ResponseHeaders(told) => told,
                ToldPart::RequestTrailers if may_end => {
                    may_end = false;
                    self.out.send(request_trailers()).await?;
                    continue;
                }
                ToldPart::RequestBody(_) if upload.may_go_on() => return Err(override_ignored()),
                told => return Err(out_of_turn(&told, "before response_headers")),
            };
            let limits = **self.picker.proxy.limits.load();
            let Some((status, headers)) = heads::answer(&told, &limits) else {
                let why = "response_headers have no status, or are malformed";
                return Err(StreamHalt::Broken(Status::invalid_argument(why)));
            };
            let told_beside = metadata::read(&message.metadata).map_err(StreamHalt::Broken)?;
            return Ok(AnswerHead {
                status,
                headers,
                is_over: told.end_of_stream,
                served: metadata::served(&told_beside),
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
    ) -> (RelayedAnswer, PickerMessage) {
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
        let mut response = relay(proxy, sending, decision, (response, attempt, None), wanted);
        let expose = proxy.settings.expose;
        expose.index(response.headers_mut(), head.status, known_at);
        let told = (accounting.ignored.take(), accounting.user);
        proxy.sign(
            response.headers_mut(),
            (accounting.dialect, accounting.id()),
            told,
        );
        let change = HeadChange::between(&head.headers, response.headers());
        let headers = answer_head(Some(&change)).last_if(head.is_over);
        let passed = RelayedAnswer {
            answer: response.into_body(),
            writer,
            is_bodiless: head.is_over,
            held_back: proxy.settings.timeouts.held_back,
            idle: proxy.settings.timeouts.answer_idle,
            is_cut: false,
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
