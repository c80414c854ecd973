//! The beginning of a stream: the head of its request, then the body in the gateway's mode.

use std::sync::Arc;

use http::HeaderValue;
use http::request::Parts;
use tokio::time::timeout;
use tonic::Status;

use super::accounting::StreamAccounting;
use super::gateway_message::ToldPart;
use super::gateway_reply::GatewayReply;
use super::heads::{self, HeadChange};
use super::inbound::{
    StreamHalt, UploadedBody, out_of_turn, override_ignored, override_not_allowed,
};
use super::outbound::{request_head_waits, request_head_waits_for_whole};
use super::stream::PickerStream;
use super::upload_shape::UploadShape;
use super::{BodyMode, BodyModes, metadata};
use crate::error::ProxyError;
use crate::proxy::answer::Intake;
use crate::proxy::forward::request_context::{
    ArrivedRequest, ProxiedRequest, begin_trace, trace_id,
};
use crate::proxy::record::metrics::RequestMetricsGuard;
use crate::proxy::request::dialect::Dialect;
use crate::proxy::request::headers::request_id;
use crate::proxy::request::request_body::HeldBodyBytes;
use crate::proxy::request::routes::unslashed;
use crate::routing::{OfferedEndpoints, RequestStages};
use crate::traces::RequestTrace;

/// Content of a stream's first message.
pub(super) struct StreamOpening {
    head: Parts,
    /// Whether the path lost a slash at its end.
    pub(super) is_unslashed: bool,
    is_bodiless: bool,
    endpoints: OfferedEndpoints,
    /// Trace of the request; `None` without tracing.
    trace: Option<Arc<RequestTrace>>,
}

impl PickerStream {
    /// Waits for the stream's first message and parses it.
    pub(super) async fn open(
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
        let told = match message.told {
            ToldPart::RequestHeaders(told) => told,
            // A filter before this one responded, so no request comes.
            ToldPart::ResponseHeaders(told) => {
                let reply = GatewayReply::of(&told, message.details);
                return Err(StreamHalt::Replied(reply));
            }
            told => return Err(out_of_turn(&told, "first")),
        };
        accounting.request_metrics = Some(RequestMetricsGuard::open(&proxy.metrics, None));
        let limits = **proxy.limits.load();
        let mut head = heads::request(&told, &limits)?;
        let unslashed = unslashed(&head.uri);
        let is_unslashed = unslashed.is_some();
        head.uri = unslashed.unwrap_or(head.uri);
        let id = request_id(&head.headers);
        accounting.id = Some(id.clone());
        accounting.dialect = Dialect::of(head.uri.path());
        accounting.ignored = proxy.requests.ignored(&head.headers);
        let asked = (&head.method, &head.uri);
        let trace = begin_trace(&proxy.settings, (asked.0, asked.1, &head.headers), &id);
        let trace_id = || trace_id(trace.as_ref(), &head.headers);
        let access = proxy.access.begin(&id, asked, trace_id);
        accounting.request_metrics().logs(access);
        accounting.request_metrics().traces(trace.clone());
        let told_beside = metadata::read(&message.metadata).map_err(StreamHalt::Broken)?;
        let opening = StreamOpening {
            head,
            is_unslashed,
            is_bodiless: told.end_of_stream,
            endpoints: metadata::offered(&told_beside),
            trace,
        };
        Ok((opening, modes))
    }

    /// Receives the rest of the request and parses it.
    pub(super) async fn take_in(
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
            request_id: accounting.id(),
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
                    let withheld = HeadChange::withheld(&opening.head.headers);
                    let waits = request_head_waits_for_whole(modes.answers, withheld.as_ref());
                    self.out.send(waits).await?;
                }
                BodyMode::Buffered => {
                    let withheld = HeadChange::withheld(&opening.head.headers);
                    self.out.send(request_head_waits(withheld.as_ref())).await?;
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
            whole: body.whole.take(),
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
}
