//! Runs a request on two engines at once, which meet in a *room*, as SGLang calls it.
//!
//! Both engines receive the same request, with the address of the prefill engine's bootstrap server
//! and a room number drawn for this attempt. The prefill engine responds once it has transferred
//! the prompt's KV cache. The client receives the decode engine's response. SGLang's own gateway
//! works the same way (`sgl-model-gateway/src/routers/http/pd_router.rs`), with the same fields: a
//! number for one prompt and answer, lists for several prompts or several choices of a chat.
//!
//! Neither engine is useful without the other, so if one fails, the other's connection is closed.
//! No output exists until the response body begins, so a prefill engine that fails earlier is
//! replaced by another one, with a new room. The client's response waits for the end of the prefill
//! engine's response, which reports the cached tokens, but only briefly once its own body has
//! begun.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use bytes::Bytes;
use http::{Response, StatusCode};
use http_body_util::{BodyExt, Limited};
use tokio::time::{Instant, timeout, timeout_at};

use super::attempt::{
    AttemptError, AttemptResult, BootstrapSession, OutgoingRequest, Post, SentRequest, attempt,
    note, post, read_refusal,
};
use super::blame::{refuses_router, report_status};
use crate::engines::backends::EngineUrl;
use crate::engines::backends::pool::{EngineBody, SendError};
use crate::error::ProxyError;
use crate::proxy::Proxy;
use crate::proxy::request::bootstrap::{BootstrapRooms, RankOf, draw};
use crate::proxy::response::answer_usage::read_usage;
use crate::proxy::response::engine_error::EngineError;
use crate::proxy::response::json_scan::value_of;
use crate::routing::{Attempt, AttemptEnd, Decision, PrefillAttempt, PrefillDecision, Usage};
use crate::traces::TracedEnd;

/// Maximum length of a prefill engine's response, in bytes: one token per prompt and choice.
const PREFILL_ANSWER_BYTES_MAX: usize = 4 << 20;
/// Maximum time that a begun response waits for the end of the prefill engine's response.
const PREFILL_END_MAX: Duration = Duration::from_secs(1);
/// Result of the prefill engine's part of an attempt.
enum RemotePrefill {
    /// The engine has computed the prompt and transferred it.
    Computed(Option<Usage>),
    /// The engine refused with this status, and with this response if it could be read.
    Refused(StatusCode, Option<Response<Bytes>>),
    Failed(AttemptError),
}

impl RemotePrefill {
    /// Returns the name in metrics and the admin API. `None` means that the decode engine finished
    /// the request earlier.
    fn label(prefilled: Option<&Self>) -> &'static str {
        match prefilled {
            Some(Self::Computed(_)) => "transferred",
            Some(Self::Refused(..)) => "refused",
            Some(Self::Failed(failure)) => failure.label(),
            None => "abandoned",
        }
    }
}

/// Sends the request to both backends of the decision and waits until the response begins.
///
/// # Errors
/// Returns [`ProxyError::BreaksBackends`] if the prompt has broken too many engines by now. The
/// attempt has then ended.
pub(super) async fn run_pair(
    proxy: &Arc<Proxy>,
    sending: &mut OutgoingRequest<'_>,
    (decision, chosen): (&Decision, &PrefillDecision),
    mut taken: Attempt,
    is_last: bool,
) -> Result<SentRequest, ProxyError> {
    let at_fault = chosen.backend.slot;
    let members = bootstrap_members(proxy, sending, chosen);
    let (Some(prefill), Some(members)) = (taken.take_prefill(), members) else {
        taken.end(AttemptEnd::NotRun, Instant::now());
        let result = Err(AttemptError::Gone);
        return Ok(SentRequest::of(result, Instant::now(), Some(at_fault)));
    };
    let bootstrap_session = Arc::new(BootstrapSession::default());
    sending.transfer = Some(members);
    sending.bootstrap_session = Some(Arc::clone(&bootstrap_session));
    let began = Instant::now();
    let (result, prefilled) = {
        let mut computing = pin!(compute(
            proxy,
            sending,
            (chosen, &prefill),
            &bootstrap_session
        ));
        let mut answering = pin!(attempt(proxy, sending, decision, taken, is_last));
        let mut prefilled = None;
        let mut result = loop {
            tokio::select! {
                biased;
                done = &mut computing, if prefilled.is_none() => {
                    match &done {
                        RemotePrefill::Computed(usage) => {
                            bootstrap_session.computed.get_or_init(|| (Instant::now(), *usage));
                        }
                        RemotePrefill::Refused(..) | RemotePrefill::Failed(_) => {
                            bootstrap_session.failed.cancel();
                        }
                    }
                    prefilled = Some(done);
                }
                result = &mut answering => break result,
            }
        };
        if prefilled.is_none()
            && let Ok((response, _)) = &mut result
            && response.status().is_success()
        {
            match until_computed(computing, response, sending.first_byte_by).await {
                Ok(done) => prefilled = done,
                Err(failure) => result = end_failed(result, failure),
            }
        }
        (result, prefilled)
    };
    let label = RemotePrefill::label(prefilled.as_ref());
    proxy.metrics.stages.prefilled(label, began.elapsed());
    if let Some(record) = &decision.record {
        record.prefilled(label);
    }
    settle(
        proxy,
        sending,
        (decision, chosen),
        prefill,
        (result, prefilled),
        began,
    )
}

/// Returns the body members for both engines; `None` if the prefill backend is gone or the request
/// needs too many rooms.
fn bootstrap_members(
    proxy: &Proxy,
    sending: &OutgoingRequest<'_>,
    to: &PrefillDecision,
) -> Option<Bytes> {
    let registry = proxy.view.registry();
    let backend = registry.backend(to.backend.slot)?;
    let url = EngineUrl::parse(&backend.spec.url).ok()?;
    let port = proxy.backends.bootstrap_port(backend);
    let rank = registry.rank(backend).map(|rank| RankOf {
        rank: rank.into(),
        ranks: registry.ranks.slots_of_engine(to.backend.slot).len().max(1) as u64,
    });
    let host = match url.host() {
        v6 if v6.contains(':') => format!("[{v6}]"),
        host => host.to_owned(),
    };
    let rooms = BootstrapRooms::count(sending.proxied.head.uri.path(), &sending.proxied.parsed)?;
    let room = || rank.map_or_else(draw, |rank| rank.room(draw()));
    Some(rooms.members(&host, port, room))
}

/// Sends the request to the prefill engine and waits until it has transferred the prompt.
async fn compute(
    proxy: &Proxy,
    sending: &OutgoingRequest<'_>,
    (chosen, prefill): (&PrefillDecision, &PrefillAttempt),
    bootstrap_session: &BootstrapSession,
) -> RemotePrefill {
    let mut trace = sending.proxied.attempts(&chosen.name, "prefill");
    let headers = sending.proxied.trace_headers(trace.as_mut());
    let request = Post {
        body: sending.body(),
        trace: headers.as_ref(),
        sent: &|| {
            prefill.sent();
            bootstrap_session.is_sent.store(true, Relaxed);
        },
    };
    let sent = post(
        proxy,
        sending.proxied,
        &sending.uri,
        chosen.backend,
        request,
    );
    let done = match sent.await {
        Ok(answer) => read(answer).await,
        Err(error) => Err(error),
    };
    let failed = |error| RemotePrefill::Failed(AttemptError::of(error, prefill.is_sent()));
    let done = done.unwrap_or_else(failed);
    if let Some(trace) = trace {
        trace.end(&TracedEnd {
            outcome: RemotePrefill::label(Some(&done)),
            is_whole: false,
            is_failure: !matches!(done, RemotePrefill::Computed(_)),
            tokens: None,
            at: Instant::now(),
        });
    }
    done
}

async fn read(answer: Response<EngineBody>) -> Result<RemotePrefill, SendError> {
    let status = answer.status();
    if !status.is_success() {
        return Ok(RemotePrefill::Refused(status, read_refusal(answer).await));
    }
    let body = Limited::new(answer.into_body(), PREFILL_ANSWER_BYTES_MAX).collect();
    let body = body.await.map_err(|_| SendError::Ended)?.to_bytes();
    Ok(parse_prefill_response(&body))
}

/// Parses a prefill engine's response, either whole or a stream of events.
fn parse_prefill_response(answer: &[u8]) -> RemotePrefill {
    let mut usage = None;
    let events = answer.split(|byte| *byte == b'\n');
    let events = events.filter_map(|line| line.strip_prefix(b"data:"));
    for said in std::iter::once(answer).chain(events) {
        if let Some(error) = EngineError::read(said, false) {
            return RemotePrefill::Refused(error.status, None);
        }
        usage = value_of(said, "usage").and_then(read_usage).or(usage);
    }
    RemotePrefill::Computed(usage)
}

/// Waits for the result of the prefill, but only up to [`PREFILL_END_MAX`] after the response body
/// has begun. Returns `None` if the response goes ahead without it.
async fn until_computed(
    mut computing: Pin<&mut impl Future<Output = RemotePrefill>>,
    response: &mut Response<EngineBody>,
    first_byte_by: Instant,
) -> Result<Option<RemotePrefill>, AttemptError> {
    let begun = poll_fn(|cx| response.body_mut().poll_first(cx));
    let begun = tokio::select! {
        biased;
        done = &mut computing => return Ok(Some(done)),
        begun = timeout_at(first_byte_by, begun) => begun,
    };
    match begun {
        Ok(Ok(())) => {}
        Ok(Err(error)) => return Err(AttemptError::of(error, true)),
        Err(_) => return Err(AttemptError::TimedOut),
    }
    match timeout(PREFILL_END_MAX, computing).await {
        Ok(RemotePrefill::Computed(usage)) => Ok(Some(RemotePrefill::Computed(usage))),
        // The response has begun, so a failure of the prefill engine has no effect.
        Ok(RemotePrefill::Refused(..) | RemotePrefill::Failed(_)) | Err(_) => Ok(None),
    }
}

/// Ends an attempt that failed after the response head and before the body.
fn end_failed(result: AttemptResult, failure: AttemptError) -> AttemptResult {
    let (_, attempt) = result?;
    attempt.end(failure.end(), Instant::now());
    Err(failure)
}

/// Applies the results of both engines to the attempts and the prefill backend.
fn settle(
    proxy: &Proxy,
    sending: &OutgoingRequest<'_>,
    (decision, chosen): (&Decision, &PrefillDecision),
    mut prefill: PrefillAttempt,
    (result, prefilled): (AttemptResult, Option<RemotePrefill>),
    began: Instant,
) -> Result<SentRequest, ProxyError> {
    let now = Instant::now();
    let slots = (decision.backend.slot, chosen.backend.slot);
    let sent = |result, at_fault| Ok(SentRequest::of(result, began, Some(at_fault)));
    match (result, prefilled) {
        (Ok((response, mut attempt)), None) if response.status().is_success() => {
            prefill.answered(None, now);
            attempt.prefilled(prefill, None, now);
            sent(Ok((response, attempt)), slots.0)
        }
        (Ok((response, mut attempt)), Some(RemotePrefill::Computed(usage))) => {
            prefill.answered(usage, now);
            attempt.prefilled(prefill, usage, now);
            sent(Ok((response, attempt)), slots.0)
        }
        (result, Some(RemotePrefill::Computed(usage))) => {
            prefill.answered(usage, now);
            prefill.end(AttemptEnd::Finished);
            sent(result, slots.0)
        }
        (result, None) => {
            // The cause of a lost transfer is unknown; the prompt was not transferred yet.
            let is_transfer = matches!(result, Err(AttemptError::Refused(_)));
            let is_late = matches!(
                result,
                Err(AttemptError::TimedOut | AttemptError::TimedOutUnsent)
            );
            if is_late && prefill.is_sent() {
                let (backends, user) = (&proxy.backends, Some(prefill.user()));
                backends.report_no_answer(chosen.backend, user, now);
            }
            prefill.end(AttemptEnd::NotRun);
            sent(result, if is_transfer { slots.1 } else { slots.0 })
        }
        (result, Some(failed)) => {
            if let Ok((_, attempt)) = result {
                attempt.end(AttemptEnd::NotRun, now);
            }
            let (failure, is_final) = without_prompt(proxy, sending, chosen, prefill, failed)?;
            Ok(SentRequest {
                is_final,
                ..SentRequest::of(Err(failure), began, Some(slots.1))
            })
        }
    }
}

/// Handles a failed prefill engine, which fails the whole attempt. Returns the failure, and whether
/// another pair would give the same result, so that none is tried.
fn without_prompt(
    proxy: &Proxy,
    sending: &OutgoingRequest<'_>,
    chosen: &PrefillDecision,
    prefill: PrefillAttempt,
    prefilled: RemotePrefill,
) -> Result<(AttemptError, bool), ProxyError> {
    let (backend, user) = (chosen.backend, prefill.user());
    match prefilled {
        RemotePrefill::Refused(status, refusal) => {
            let refuses_router = refuses_router(proxy, sending.proxied, backend, status);
            report_status(proxy, (backend, user), status, refuses_router);
            prefill.end(AttemptEnd::NotRun);
            if refuses_router {
                return Ok((AttemptError::RefusedCredentials, false));
            }
            let is_clients = status.is_client_error();
            let is_final = is_clients && !proxy.settings.retry.takes(status);
            Ok((AttemptError::Refused(refusal.map(Box::new)), is_final))
        }
        RemotePrefill::Failed(failure) => {
            failure.report(proxy, backend, user);
            prefill.end(failure.end());
            note(proxy, sending, (backend, &chosen.name), &failure);
            if proxy
                .poison_requests
                .refuses(&sending.proxied.body, &sending.proxied.identity)
            {
                proxy.metrics.suspects_refused.inc();
                return Err(ProxyError::BreaksBackends);
            }
            let failure = match failure.may_retry() {
                true => failure,
                false => AttemptError::WithoutPrompt,
            };
            Ok((failure, false))
        }
        RemotePrefill::Computed(_) => Ok((AttemptError::WithoutPrompt, false)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefill_usage_and_errors_are_read_whole_or_streamed() {
        let usage = r#""usage":{"prompt_tokens":9,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":4}}"#;
        let told = |answer: &str| match parse_prefill_response(answer.as_bytes()) {
            RemotePrefill::Computed(usage) => Some(usage.map(|usage| usage.cached_tokens)),
            RemotePrefill::Refused(..) | RemotePrefill::Failed(_) => None,
        };
        assert_eq!(
            told(&format!(r#"{{"choices":[],{usage}}}"#)),
            Some(Some(Some(4)))
        );
        let stream = format!("data: {{\"choices\":[]}}\n\ndata: {{{usage}}}\n\ndata: [DONE]\n\n");
        assert_eq!(told(&stream), Some(Some(Some(4))));
        assert_eq!(
            told("data: {\"usage\":null}\r\n\r\ndata: [DONE]\r\n\r\n"),
            Some(None)
        );
        assert_eq!(told("no JSON"), Some(None));
        assert_eq!(
            told("data: {\"error\":{\"message\":\"x\",\"code\":500}}\n\n"),
            None
        );
        assert_eq!(told("{\"error\":null}"), Some(None));
    }
}
