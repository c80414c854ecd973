//! The endpoints that a request may go to, the best first, and what goes there.

use std::net::SocketAddr;

use http::HeaderValue;
use http_body_util::BodyExt as _;
use state::{Backend, Registry};
use tokio::time::Instant;

use super::ext_proc::HeaderMutation;
use super::outbound::{BodyOf, PIECE_BYTES_MAX, PickerMessages};
use super::{Picker, heads};
use crate::admission::AdmissionRequest as _;
use crate::backends::pool::Segments;
use crate::error::ProxyError;
use crate::proxy::attempt::{OutgoingRequest, hop};
use crate::proxy::headers::{Hop, toward_engine};
use crate::proxy::picker::inbound::StreamHalt;
use crate::routing::{Decision, endpoint_of};
use crate::traces::TraceHeaders;

/// What a gateway is told to do with a request.
pub(super) struct EndpointOffer {
    /// The endpoint that the request was dispatched to.
    pub(super) first: SocketAddr,
    /// Where it may go if that cannot be reached, with what would have been decided.
    pub(super) further: Vec<(SocketAddr, Decision)>,
    /// What is changed of its head.
    pub(super) headers: HeaderMutation,
    /// What the engine gets.
    pub(super) body: Segments,
}

/// Most backends that are left out of one offer, as they do not get just what the first gets: each
/// takes a decision to find.
const UNLIKE_MAX: usize = 8;

/// What one engine gets, beside the body.
struct EngineBound {
    endpoint: SocketAddr,
    headers: HeaderMutation,
    is_salted: bool,
}

impl EndpointOffer {
    /// The offer for a request that was dispatched by `decision`. Whichever engine gets it is told the
    /// same of the trace, as a gateway is told it once.
    pub(super) fn of(
        picker: &Picker,
        sending: &OutgoingRequest<'_>,
        decision: &Decision,
        trace: Option<&TraceHeaders>,
    ) -> Result<Self, ProxyError> {
        // It was removed while it was chosen.
        let gone = ProxyError::Unreachable;
        let registry = picker.proxy.view.registry();
        let backend = decided(&registry, decision).ok_or(gone.clone())?;
        let first = EngineBound::of(picker, sending, (&registry, backend), trace).ok_or(gone)?;
        let further = further(picker, sending, (decision, trace), &first);
        let mut offer = Self {
            first: first.endpoint,
            further,
            headers: first.headers,
            body: sending.body_for(&picker.proxy, backend),
        };
        let name = &picker.settings.destination;
        let endpoints = HeaderValue::from_str(&offer.endpoints());
        let endpoints = endpoints.expect("addresses are visible ascii");
        heads::set(&mut offer.headers, name, &endpoints);
        let from = &sending.asked.head.headers;
        heads::set_length(&mut offer.headers, from, offer.body.len());
        Ok(offer)
    }

    /// The endpoints as gateways read them.
    pub(super) fn endpoints(&self) -> String {
        let further = self.further.iter().map(|(endpoint, _)| endpoint);
        let all: Vec<_> = std::iter::once(&self.first).chain(further).collect();
        let texts: Vec<_> = all.iter().map(ToString::to_string).collect();
        texts.join(",")
    }

    /// Sends the body in pieces, the last with the end unless trailers follow.
    pub(super) async fn send_body(
        body: Segments,
        has_trailers: bool,
        out: &PickerMessages,
    ) -> Result<(), StreamHalt> {
        let mut left = body.len();
        let mut body = body;
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

    /// The body in one piece.
    pub(super) async fn whole_body(body: Segments) -> bytes::Bytes {
        let Ok(collected) = body.collect().await;
        collected.to_bytes()
    }
}

/// Where the request may go besides: engines that get just what the first gets.
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
    while further.len() + 1 < picker.settings.endpoints_max && unlike < UNLIKE_MAX {
        tried.push(last);
        tried.extend_from_slice(proxy.view.registry().ranks.around(last));
        let ask = sending.asked.ask(&tried);
        let decider = proxy.requests.decider();
        let Some(next) = decider.alternative(&ask, Instant::now()) else {
            break;
        };
        last = next.backend.slot;
        let registry = proxy.view.registry();
        let backend = decided(&registry, &next);
        let bound = backend
            .and_then(|backend| EngineBound::of(picker, sending, (&registry, backend), trace));
        let alike = bound
            .filter(|bound| bound.headers == first.headers && bound.is_salted == first.is_salted);
        match alike {
            Some(bound) => further.push((bound.endpoint, next)),
            None => unlike += 1,
        }
    }
    further
}

/// The backend of a decision; `None`: it was removed.
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
            ..hop(proxy, sending.asked, engine_key.as_ref(), rank)
        };
        let from = &sending.asked.head.headers;
        let to = toward_engine(from, &HeaderValue::from_static(""), &hop);
        Some(Self {
            endpoint: endpoint_of(&backend.spec.url)?,
            headers: heads::mutation(from, &to),
            is_salted: sending.salts(proxy, backend),
        })
    }
}
