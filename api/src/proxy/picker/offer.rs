//! The endpoints for a request, the best first, and what is sent there.

use std::net::SocketAddr;

use http::HeaderValue;
use http_body_util::BodyExt as _;
use state::{Backend, Registry};
use tokio::time::Instant;

use super::heads::HeadChange;
use super::inbound::StreamHalt;
use super::outbound::{
    BodyOf, PIECE_BYTES_MAX, PickerMessages, request_head, request_trailers, request_whole,
};
use super::upload_shape::UploadShape;
use super::{BodyMode, DESTINATION, Picker};
use crate::admission::AdmissionRequest as _;
use crate::engines::backends::pool::Segments;
use crate::error::ProxyError;
use crate::proxy::forward::attempt::{OutgoingRequest, hop};
use crate::proxy::request::headers::{Hop, toward_engine};
use crate::routing::{Decision, endpoint_of};
use crate::traces::TraceHeaders;

/// Instructions to a gateway for one request.
pub(super) struct EndpointOffer {
    /// Endpoint that the request was dispatched to.
    pub(super) first: SocketAddr,
    /// Alternatives if that endpoint is unreachable, each with the decision it stands for.
    pub(super) further: Vec<(SocketAddr, Decision)>,
    /// Mutation of the request's head.
    pub(super) headers: HeadChange,
    /// The endpoints as a comma-separated list, the best first.
    endpoints: String,
    /// Body for the engine.
    body: Segments,
}

/// Maximum number of backends skipped for one offer because their request would differ from the
/// first one's. Finding each of them takes a decision.
const UNLIKE_MAX: usize = 8;

/// Request to one engine, without the body.
struct EngineBound {
    endpoint: SocketAddr,
    headers: HeadChange,
}

impl EndpointOffer {
    /// Builds the offer for a request that `decision` dispatched. Fails if the backend is gone. All
    /// engines get the same trace headers, because the gateway receives only one set.
    pub(super) fn of(
        picker: &Picker,
        sending: &OutgoingRequest<'_>,
        decision: &Decision,
        trace: Option<&TraceHeaders>,
    ) -> Result<Self, ProxyError> {
        // The backend was removed after it was chosen.
        let gone = ProxyError::Unreachable;
        let registry = picker.proxy.view.registry();
        let backend = decided(&registry, decision).ok_or(gone.clone())?;
        let first = EngineBound::of(picker, sending, (&registry, backend), trace).ok_or(gone)?;
        let further = further(picker, sending, (decision, trace), &first);
        let mut endpoints = first.endpoint.to_string();
        for (endpoint, _) in &further {
            endpoints = format!("{endpoints},{endpoint}");
        }
        let mut headers = first.headers;
        let value = HeaderValue::from_str(&endpoints).expect("addresses are visible ascii");
        headers.set(DESTINATION, value);
        let body = sending.body();
        headers.set_length(&sending.proxied.head.headers, body.len());
        Ok(Self {
            first: first.endpoint,
            further,
            headers,
            endpoints,
            body,
        })
    }

    /// Sends the gateway the endpoints and the request for them.
    pub(super) async fn send(
        &mut self,
        upload: &UploadShape,
        out: &PickerMessages,
    ) -> Result<(), StreamHalt> {
        let (headers, endpoints) = (&self.headers, &*self.endpoints);
        let body = std::mem::take(&mut self.body);
        if upload.is_bodiless {
            return out.send(request_head(headers, endpoints)).await;
        }
        match upload.mode {
            BodyMode::Duplex => {
                out.send(request_head(headers, endpoints)).await?;
                Self::send_body(body, upload.has_trailers, out).await?;
            }
            BodyMode::StreamedEarly => {
                out.send(request_head(headers, endpoints)).await?;
                let mut whole = Self::whole_body(body).await;
                for _ in 0..upload.pieces {
                    // The first piece is replaced by the whole body.
                    let piece = std::mem::take(&mut whole);
                    out.send(BodyOf::Request.replaced(piece)).await?;
                }
            }
            BodyMode::Buffered | BodyMode::Streamed => {
                let whole = Self::whole_body(body).await;
                let is_changed = upload.whole.as_ref() != Some(&whole);
                let said = request_whole(headers, endpoints, is_changed.then_some(whole));
                return out.send(said).await;
            }
        }
        match upload.has_trailers {
            true => out.send(request_trailers()).await,
            false => Ok(()),
        }
    }

    /// Sends the body in pieces. The last piece ends the body unless trailers follow.
    async fn send_body(
        mut body: Segments,
        has_trailers: bool,
        out: &PickerMessages,
    ) -> Result<(), StreamHalt> {
        let mut left = body.len();
        if left == 0 {
            let nothing = BodyOf::Request.piece(bytes::Bytes::new(), !has_trailers);
            return out.send(nothing).await;
        }
        while let Some(Ok(frame)) = body.frame().await {
            let mut data = frame.into_data().unwrap_or_default();
            while !data.is_empty() {
                let piece = data.split_to(data.len().min(PIECE_BYTES_MAX));
                left -= piece.len() as u64;
                let is_last = left == 0 && !has_trailers;
                out.send(BodyOf::Request.piece(piece, is_last)).await?;
            }
        }
        Ok(())
    }

    /// Returns the body in one piece.
    async fn whole_body(body: Segments) -> bytes::Bytes {
        let Ok(collected) = body.collect().await;
        collected.to_bytes()
    }
}

/// Returns the alternatives: engines whose request is identical to the first one's.
fn further(
    picker: &Picker,
    sending: &OutgoingRequest<'_>,
    (decision, trace): (&Decision, Option<&TraceHeaders>),
    first: &EngineBound,
) -> Vec<(SocketAddr, Decision)> {
    let proxy = &picker.proxy;
    let mut further = Vec::new();
    let mut tried = Vec::new();
    let mut last = decision.backend.slot;
    let mut unlike = 0;
    while further.len() + 1 < picker.settings.endpoints_max as usize && unlike < UNLIKE_MAX {
        tried.push(last);
        tried.extend_from_slice(proxy.view.registry().ranks.slots_of_engine(last));
        let ask = sending.proxied.ask(&tried);
        let decider = proxy.requests.decider();
        let Some(next) = decider.alternative(&ask, Instant::now()) else {
            break;
        };
        last = next.backend.slot;
        let registry = proxy.view.registry();
        let backend = decided(&registry, &next);
        let bound = backend
            .and_then(|backend| EngineBound::of(picker, sending, (&registry, backend), trace));
        match bound.filter(|bound| bound.headers == first.headers) {
            Some(bound) => further.push((bound.endpoint, next)),
            None => unlike += 1,
        }
    }
    further
}

/// Returns the backend of a decision; `None` if it was removed.
fn decided<'a>(registry: &'a Registry, decision: &Decision) -> Option<&'a Backend> {
    let backend = registry.backend(decision.backend.slot)?;
    (backend.handle == decision.backend).then_some(backend)
}

impl EngineBound {
    fn of(
        picker: &Picker,
        sending: &OutgoingRequest<'_>,
        (registry, backend): (&Registry, &Backend),
        trace: Option<&TraceHeaders>,
    ) -> Option<Self> {
        let proxy = &picker.proxy;
        let keys = proxy.backends.keys();
        let engine_key = keys.of_requests(&backend.spec.id, &backend.spec.url);
        let rank = registry.rank(backend);
        let hop = Hop {
            trace,
            ..hop(proxy, sending.proxied, engine_key.as_ref(), rank)
        };
        let from = &sending.proxied.head.headers;
        let to = toward_engine(from, &HeaderValue::from_static(""), &hop);
        Some(Self {
            endpoint: endpoint_of(&backend.spec.url)?,
            headers: HeadChange::between(from, &to),
        })
    }
}
