//! Stored responses (`GET` and `DELETE /v1/responses/ID`, `POST /v1/responses/ID/cancel`, and
//! `previous_response_id`), which are routed to the engine that has them.
//!
//! Quorate does not record which engine that is. It asks the available engines in turn and relays
//! the first response other than "not found" or "not supported" (ADR 0038). Engines draw ids at
//! random, so no two have different responses with the same id. No model runs, so nothing is
//! charged.
//!
//! A key or user restricted to some models gets only responses of those. The stored response names
//! its model, so it is read before any other action.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::{StreamExt as _, stream};
use http::request::Parts;
use http::{HeaderValue, Method, Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt, Collected, Limited};
use opentelemetry::trace::TraceId;
use serde::Deserialize;
use state::ids::{BackendRef, Slot};
use tokio::time::{Instant, timeout};

use super::attempt::read_refusal;
use super::request_context::ProxiedRequest;
use super::{ForwardResult, clean_head, content, timeouts};
use crate::engines::backends::pool::{EngineBody, Segments, SendError};
use crate::engines::backends::refuses_credentials;
use crate::error::ProxyError;
use crate::proxy::Proxy;
use crate::proxy::request::dialect::Dialect;
use crate::proxy::request::headers::{Hop, toward_engine};
use crate::proxy::request::routes::is_response_id;
use crate::proxy::request::usage_options::WantedUsage;
use crate::proxy::response::answer_source::AnswerSource;
use crate::proxy::response::response_body::{RespondingBackend, ResponseBody};
use crate::proxy::settings::keys::Holder;
use crate::traces::TraceHeaders;

/// Timeout for one engine, which only looks into a table.
const ENGINE_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum number of engines that are asked at once for the response that a request continues.
const ASKED_AT_ONCE_MAX: usize = 16;

/// Maximum length of a stored response that is read for its model, in bytes.
const STORED_BYTES_MAX: usize = 64 << 20;

/// An engine that may have the response.
struct StoringBackend {
    handle: BackendRef,
    id: String,
    url: String,
}

/// Origin and trace of a request.
#[derive(Clone, Copy)]
pub(in crate::proxy) struct RequestContext<'a> {
    /// Address of the client.
    pub(in crate::proxy) peer: &'a HeaderValue,
    pub(in crate::proxy) request_id: &'a HeaderValue,
    /// Trace headers for engines; `None` to forward the client's.
    pub(in crate::proxy) trace: Option<&'a TraceHeaders>,
    /// Id of the request's trace, for the log; `None` if neither this replica nor the client has
    /// one.
    pub(in crate::proxy) trace_id: Option<TraceId>,
}

/// Responds to a request for a stored response.
pub(in crate::proxy) async fn forward_stored(
    proxy: &Arc<Proxy>,
    holder: &Holder,
    head: &Parts,
    from: RequestContext<'_>,
) -> Result<ForwardResult, ProxyError> {
    let (backends, mut was_silent) = storing_backends(proxy, None);
    let mut refusal = None;
    for backend in backends {
        let asked = async {
            if holder.has_some_models(&proxy.view) {
                let response = ask(proxy, &backend, &reading(head), from).await?;
                if is_elsewhere(response.status()) {
                    return Ok(Ok(response));
                }
                let model = model_of(response).await;
                if let Err(refusal) = holder.check_either_model(&proxy.view, &model) {
                    return Ok(Err(refusal));
                }
            }
            ask(proxy, &backend, head, from).await.map(Ok)
        };
        match timeout(ENGINE_TIMEOUT, asked).await {
            Ok(Ok(Err(refusal))) => return Err(refusal),
            Ok(Ok(Ok(response))) if is_elsewhere(response.status()) => {
                // Read to the end, so that the connection can be reused.
                drop(read_refusal(response).await);
            }
            Ok(Ok(Ok(response))) if response.status().is_success() => {
                return Ok(relay(proxy, &backend, response));
            }
            // Another engine may have it. If none has, its holder refused.
            Ok(Ok(Ok(response))) => {
                let status = response.status();
                let is_clients = status.is_client_error() && !refuses_credentials(status);
                was_silent |= !is_clients;
                if is_clients && refusal.is_none() {
                    refusal = Some(relay(proxy, &backend, response));
                }
            }
            Ok(Err(SendError::Gone)) => {}
            Ok(Err(error)) => {
                let backend = &*backend.id;
                let request_id = from.request_id.to_str().unwrap_or_default();
                let trace_id = from.trace_id.map(tracing::field::display);
                tracing::debug!(request_id, trace_id, backend, %error, "could not ask for a stored response");
                was_silent = true;
            }
            Err(_) => was_silent = true,
        }
    }
    if let Some(refusal) = refusal {
        return Ok(refusal);
    }
    if was_silent {
        // One of the silent engines may have it.
        return Err(ProxyError::Unreachable);
    }
    let path = head.uri.path();
    let id = path.trim_end_matches("/cancel").rsplit('/').next();
    Err(ProxyError::UnknownResponse {
        id: id.unwrap_or_default().to_owned(),
    })
}

/// Returns the slots of the backends that cannot run `proxied` because it continues a response that
/// another engine has stored. They are asked for it at once. If none has it, all may run the
/// request, and its engine reports the unknown id in its own words.
///
/// # Errors
/// Returns [`ProxyError::Unreachable`] if an engine that may have the response was silent.
pub(in crate::proxy) async fn without_previous_response(
    proxy: &Proxy,
    proxied: &ProxiedRequest,
) -> Result<Vec<Slot>, ProxyError> {
    let id = proxied.parsed.previous_response.as_deref();
    let Some(id) = id.filter(|id| is_response_id(id)) else {
        return Ok(Vec::new());
    };
    let (backends, mut was_silent) = storing_backends(proxy, Some(&proxied.parsed.model));
    if backends.len() < 2 && !was_silent {
        return Ok(Vec::new());
    }
    let mut head = proxied.head.clone();
    head.method = Method::GET;
    head.uri = format!("/v1/responses/{id}").parse().unwrap_or_default();
    let trace = proxied.trace_headers(None);
    let from = RequestContext {
        peer: &proxied.peer,
        request_id: &proxied.request_id,
        trace: trace.as_ref(),
        trace_id: proxied.trace_id(),
    };
    let asked = backends
        .into_iter()
        .map(|backend| ask_in_time(proxy, backend, &head, from));
    let mut answers = stream::iter(asked).buffer_unordered(ASKED_AT_ONCE_MAX);
    while let Some((slot, answer)) = answers.next().await {
        match answer {
            Ok(answer) if answer.status().is_success() => {
                let registry = proxy.view.registry();
                let of_engine = registry.ranks.slots_of_engine(slot);
                let others = registry.backends.iter().map(|backend| backend.handle.slot);
                let others = others.filter(|other| *other != slot && !of_engine.contains(other));
                return Ok(others.collect());
            }
            Ok(answer) => {
                was_silent |= !is_elsewhere(answer.status()) && !answer.status().is_client_error();
                // Read to the end, so that the connection can be reused.
                drop(read_refusal(answer).await);
            }
            Err(SendError::Gone) => {}
            Err(_) => was_silent = true,
        }
    }
    match was_silent {
        true => Err(ProxyError::Unreachable),
        false => Ok(Vec::new()),
    }
}

/// Returns all available engines, or those of `model`, draining ones included: they may have stored
/// the response. Also returns whether others are unavailable, which may have it too.
fn storing_backends(proxy: &Proxy, model: Option<&str>) -> (Vec<StoringBackend>, bool) {
    let registry = proxy.view.registry();
    // The ranks of an engine share one store.
    let backends = registry.backends.iter().filter(|it| !it.is_further_rank());
    let backends = backends.filter(|it| model.is_none_or(|model| it.serves(model)));
    let (up, down): (Vec<_>, Vec<_>) = backends.partition(|it| proxy.backends.is_up(&registry, it));
    let up = up.into_iter().map(|backend| StoringBackend {
        handle: backend.handle,
        id: backend.spec.id.clone(),
        url: backend.spec.url.clone(),
    });
    (up.collect(), !down.is_empty())
}

/// Whether `status` means that an engine has no such response or no such route.
fn is_elsewhere(status: StatusCode) -> bool {
    matches!(
        status,
        StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED | StatusCode::NOT_IMPLEMENTED
    )
}

/// Asks within [`ENGINE_TIMEOUT`]. Also returns the slot of the backend.
async fn ask_in_time(
    proxy: &Proxy,
    backend: StoringBackend,
    head: &Parts,
    from: RequestContext<'_>,
) -> (Slot, Result<Response<EngineBody>, SendError>) {
    let asked = timeout(ENGINE_TIMEOUT, ask(proxy, &backend, head, from)).await;
    (backend.handle.slot, asked.unwrap_or(Err(SendError::Ended)))
}

async fn ask(
    proxy: &Proxy,
    backend: &StoringBackend,
    head: &Parts,
    from: RequestContext<'_>,
) -> Result<Response<EngineBody>, SendError> {
    let endpoint = proxy.pool.endpoint(backend.handle, &backend.url)?;
    let keys = proxy.backends.keys();
    let engine_key = keys.of_requests(&backend.id, &backend.url);
    let hop = Hop {
        rank: None,
        trace: from.trace,
        peer: from.peer,
        version: head.version,
        request_id: from.request_id,
        forward_credentials: proxy.settings.api_keys.is_none(),
        engine_key: engine_key.as_ref(),
        strip: &proxy.settings.strip_headers,
    };
    let target = head.uri.path_and_query().cloned();
    let uri = target.map_or_else(Uri::default, Uri::from);
    let build = || {
        let mut request = Request::new(Segments::default());
        *request.method_mut() = match head.method {
            // Engines that serve `GET` need not serve `HEAD`.
            Method::HEAD => Method::GET,
            _ => head.method.clone(),
        };
        *request.uri_mut() = uri.clone();
        *request.headers_mut() = toward_engine(&head.headers, endpoint.host(), &hop);
        request
    };
    endpoint.send(&build).await
}

/// Returns the request that reads the response to which `head` refers.
fn reading(head: &Parts) -> Parts {
    let mut reading = head.clone();
    reading.method = Method::GET;
    let path = head.uri.path();
    let path = path.strip_suffix("/cancel").unwrap_or(path);
    // A prefix of a valid target is valid.
    reading.uri = path.parse().unwrap_or_default();
    reading
}

/// Returns the model of a stored response; empty if it is unknown.
async fn model_of(response: Response<EngineBody>) -> String {
    #[derive(Default, Deserialize)]
    struct Made {
        model: String,
    }
    let body = Limited::new(response.into_body(), STORED_BYTES_MAX).collect();
    let body = body.await.map(Collected::to_bytes).unwrap_or_default();
    let made: Made = serde_json::from_slice(&body).unwrap_or_default();
    made.model
}

fn relay(
    proxy: &Arc<Proxy>,
    backend: &StoringBackend,
    response: Response<EngineBody>,
) -> ForwardResult {
    let (mut head, body) = response.into_parts();
    let dialect = Dialect::Responses;
    let content = content(head.status, &head.headers, dialect, WantedUsage::ALL);
    clean_head(&mut head, &content);
    let source = RespondingBackend {
        proxy: Arc::clone(proxy),
        slot: backend.handle.slot,
        watched: None,
    };
    let first_byte_by = Instant::now() + proxy.settings.timeouts.first_byte;
    let waits = timeouts(proxy, first_byte_by);
    let relay = ResponseBody::new(
        AnswerSource::Engine(body),
        content,
        None,
        source,
        waits,
        None,
    );
    ForwardResult::Relayed(Response::from_parts(head, Arc::new(Mutex::new(relay))))
}
