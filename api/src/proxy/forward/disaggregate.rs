//! Runs the prefill of a request on a different backend from its decode, as in vLLM.
//!
//! The prompt goes to the prefill engine as a request for one token, with `kv_transfer_params` that
//! ask it to keep the blocks. The `kv_transfer_params` in its response locate the blocks. They are
//! added to the request to the decode engine, which fetches the blocks. The format is that of
//! vLLM's NIXL connector (`tests/v1/kv_connector/nixl_integration/toy_proxy_server.py`).
//!
//! A failure of the prefill stage does not fail the request: the decode backend, which already has
//! a place for the request, then computes the prompt itself. The one exception is a prompt that has
//! broken two engines: it is not sent to a third (`poison_requests.rs`).

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use bytes::{BufMut, Bytes, BytesMut};
use http::{Response, StatusCode};
use http_body_util::{BodyExt, Limited};
use tokio::time::{Instant, timeout_at};

use super::attempt::{AttemptError, OutgoingRequest, PendingAttempt, Post, note, post};
use super::blame::{refuses_router, report_status};
use crate::engines::backends::pool::{EngineBody, Segments, SendError};
use crate::error::ProxyError;
use crate::proxy::Proxy;
use crate::proxy::response::answer_usage::read_usage;
use crate::proxy::response::engine_error::EngineError;
use crate::proxy::response::json_scan::{members, value_of};
use crate::routing::{Attempt, AttemptEnd, Decision, PrefillAttempt, PrefillDecision, Usage};
use crate::traces::{TraceHeaders, TracedEnd};

/// Maximum length of a prefill engine's response, in bytes: a token and the block numbers.
const PREFILL_ANSWER_BYTES_MAX: usize = 4 << 20;
/// Divisor of the first-byte timeout that yields the maximum time of the prefill stage. The rest is
/// for computing the prompt elsewhere.
const PREFILL_TIME_PART: u32 = 2;

/// Body members that a prefill engine does not receive, because it generates only one token.
const DROPPED: [&[u8]; 6] = [
    b"stream",
    b"stream_options",
    b"max_tokens",
    b"max_completion_tokens",
    b"min_tokens",
    b"min_completion_tokens",
];
/// Replacement of the dropped members. It follows all of the client's members, where it overrides
/// any other spelling.
const ONE_TOKEN: &str = r#""stream":false,"max_tokens":1,"#;
const ONE_TOKEN_OF_CHAT: &str = r#""max_completion_tokens":1,"#;
const KEEP_FOR_ANOTHER: &str = r#""kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}}"#;

/// The attempt after the prefill stage, and the body member that tells the decode engine where the
/// prompt's blocks are.
type Staged = (Attempt, Option<Bytes>);

/// Result of the prefill stage.
enum Prefilled {
    /// The prompt is computed. `params` is the body member that locates its blocks; `None` if the
    /// engine returned none.
    Computed {
        usage: Option<Usage>,
        params: Option<Bytes>,
    },
    /// The engine refused with this status.
    Refused(StatusCode),
    Failed(AttemptError),
}

impl Prefilled {
    /// Returns the name of the result in metrics, traces and the admin API.
    fn label(&self) -> &'static str {
        match self {
            Self::Computed {
                params: Some(_), ..
            } => "transferred",
            Self::Computed { params: None, .. } => "kept",
            Self::Refused(_) => "refused",
            Self::Failed(failure) => failure.label(),
        }
    }

    fn read(answer: &[u8]) -> Self {
        if let Some(error) = EngineError::read(answer, false) {
            return Self::Refused(error.status);
        }
        let params = value_of(answer, "kv_transfer_params");
        let params = params.filter(|params| params.first() == Some(&b'{'));
        Self::Computed {
            usage: value_of(answer, "usage").and_then(read_usage),
            params: params.map(transfer_member),
        }
    }
}

/// Sends the prompt to the prefill backend of `decision`, if it has one.
///
/// # Errors
/// Returns [`ProxyError::BreaksBackends`] if the prompt has broken too many engines by now. The
/// attempt has then ended.
pub(in crate::proxy) async fn disaggregate(
    proxy: &Arc<Proxy>,
    sending: &OutgoingRequest<'_>,
    decision: &Decision,
    mut attempt: Attempt,
) -> Result<Staged, ProxyError> {
    let (Some(chosen), Some(prefill)) = (&decision.prefill, attempt.take_prefill()) else {
        return Ok((attempt, None));
    };
    let began = Instant::now();
    let pending = PendingAttempt::of(attempt);
    let mut trace = sending.proxied.attempts(&chosen.name, "prefill");
    let headers = sending.proxied.trace_headers(trace.as_mut());
    let to = (chosen, &prefill);
    let prefilled = compute(proxy, sending, to, (&pending, headers.as_ref())).await;
    if let Some(trace) = trace {
        let is_failure = !matches!(prefilled, Prefilled::Computed { .. });
        trace.end(&TracedEnd {
            outcome: prefilled.label(),
            is_whole: false,
            is_failure,
            tokens: None,
            at: Instant::now(),
        });
    }
    let (attempt, _) = pending.over();
    proxy
        .metrics
        .stages
        .prefilled(prefilled.label(), began.elapsed());
    if let Some(record) = &decision.record {
        record.prefilled(prefilled.label());
    }
    settle(proxy, sending, (chosen, prefill), attempt, prefilled)
}

/// Sends the prompt to the prefill engine and reads its response.
async fn compute(
    proxy: &Proxy,
    sending: &OutgoingRequest<'_>,
    (chosen, prefill): (&PrefillDecision, &PrefillAttempt),
    (pending, trace): (&PendingAttempt, Option<&TraceHeaders>),
) -> Prefilled {
    let until = Instant::now() + proxy.settings.timeouts.first_byte / PREFILL_TIME_PART;
    let sent = || {
        prefill.sent();
        // A client that leaves after this point pays for the prompt.
        pending.is_sent.store(true, Relaxed);
    };
    let request = Post {
        body: prefill_body(sending),
        trace,
        sent: &sent,
    };
    let asked = async {
        let to = chosen.backend;
        let answer = post(proxy, sending.proxied, &sending.uri, to, request).await?;
        read(answer).await
    };
    match timeout_at(until.min(sending.first_byte_by), asked).await {
        Ok(Ok(prefilled)) => prefilled,
        Ok(Err(error)) => Prefilled::Failed(AttemptError::of(error, prefill.is_sent())),
        Err(_) if prefill.is_sent() => Prefilled::Failed(AttemptError::TimedOut),
        Err(_) => Prefilled::Failed(AttemptError::TimedOutUnsent),
    }
}

async fn read(answer: Response<EngineBody>) -> Result<Prefilled, SendError> {
    let (head, body) = answer.into_parts();
    if !head.status.is_success() {
        return Ok(Prefilled::Refused(head.status));
    }
    let body = Limited::new(body, PREFILL_ANSWER_BYTES_MAX).collect().await;
    let body = body.map_err(|_| SendError::Ended)?.to_bytes();
    Ok(Prefilled::read(&body))
}

/// Applies the result to the prefill backend, the attempt and the poison requests.
fn settle(
    proxy: &Proxy,
    sending: &OutgoingRequest<'_>,
    (chosen, mut prefill): (&PrefillDecision, PrefillAttempt),
    mut attempt: Attempt,
    prefilled: Prefilled,
) -> Result<Staged, ProxyError> {
    let (backend, user, now) = (chosen.backend, attempt.user(), Instant::now());
    let transfer = match prefilled {
        Prefilled::Computed { usage, params } => {
            prefill.answered(usage, now);
            match &params {
                Some(_) => attempt.prefilled(prefill, usage, now),
                None => attempt.kept(usage),
            }
            params
        }
        Prefilled::Refused(status) => {
            let refuses_router = refuses_router(proxy, sending.proxied, backend, status);
            report_status(proxy, (backend, user), status, refuses_router);
            prefill.end(AttemptEnd::NotRun);
            attempt.fall_back_to_single_backend();
            None
        }
        Prefilled::Failed(failure) => {
            failure.report(proxy, backend, user);
            if let AttemptError::TimedOut = failure {
                proxy.backends.report_no_answer(backend, Some(user), now);
            }
            prefill.end(failure.end());
            note(proxy, sending, (backend, &chosen.name), &failure);
            if proxy
                .poison_requests
                .refuses(&sending.proxied.body, &sending.proxied.identity)
            {
                proxy.metrics.suspects_refused.inc();
                attempt.end(AttemptEnd::Failed, now);
                return Err(ProxyError::BreaksBackends);
            }
            attempt.fall_back_to_single_backend();
            None
        }
    };
    Ok((attempt, transfer))
}

/// Returns the body for a prefill engine: the client's, changed to generate one token and keep the
/// blocks.
fn prefill_body(sending: &OutgoingRequest<'_>) -> Segments {
    let proxied = sending.proxied;
    let body = sending.continued.as_ref().unwrap_or(&proxied.body);
    one_token(proxied.head.uri.path(), body, proxied.salt()).into()
}

fn one_token(path: &str, body: &[u8], salt: Option<&str>) -> Bytes {
    let mut out = BytesMut::with_capacity(body.len() + 512);
    out.put_u8(b'{');
    for member in members(body) {
        let key = &body[member.key];
        let is_dropped = DROPPED.contains(&key) || (salt.is_some() && key == b"cache_salt");
        if !is_dropped {
            for part in [b"\"", key, b"\":", &body[member.value], b","] {
                out.put_slice(part);
            }
        }
    }
    out.put_slice(ONE_TOKEN.as_bytes());
    if path == "/v1/chat/completions" {
        out.put_slice(ONE_TOKEN_OF_CHAT.as_bytes());
    }
    if let Some(salt) = salt {
        // The salt has only base64url characters.
        out.put_slice(format!("\"cache_salt\":\"{salt}\",").as_bytes());
    }
    out.put_slice(KEEP_FOR_ANOTHER.as_bytes());
    out.freeze()
}

/// Returns the body member that locates the blocks for the decode engine, with a trailing comma.
fn transfer_member(params: &[u8]) -> Bytes {
    let mut member = BytesMut::with_capacity(params.len() + 24);
    member.put_slice(br#""kv_transfer_params":"#);
    member.put_slice(params);
    member.put_u8(b',');
    member.freeze()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn asked(path: &str, body: &str, salt: Option<&str>) -> Value {
        serde_json::from_slice(&one_token(path, body.as_bytes(), salt)).unwrap()
    }

    fn params() -> Value {
        json!({
            "do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
            "remote_block_ids": null, "remote_host": null, "remote_port": null,
        })
    }

    #[test]
    fn a_prefill_request_generates_one_token_and_keeps_blocks() {
        let body = r#" { "model":"m", "prompt" : "a\"b", "stream":true, "max_tokens":900,
            "min_tokens":5, "stream_options":{"include_usage":true}, "seed":[1,{"x":2}] } "#;
        let expected = json!({
            "model": "m", "prompt": "a\"b", "seed": [1, { "x": 2 }], "stream": false,
            "max_tokens": 1, "kv_transfer_params": params(),
        });
        assert_eq!(asked("/v1/completions", body, None), expected);
        let body = r#"{"model":"m","messages":[],"max_completion_tokens":9,"cache_salt":"x"}"#;
        let expected = json!({
            "model": "m", "messages": [], "stream": false, "max_tokens": 1,
            "max_completion_tokens": 1, "cache_salt": "s-_", "kv_transfer_params": params(),
        });
        assert_eq!(asked("/v1/chat/completions", body, Some("s-_")), expected);
    }

    #[test]
    fn an_escaped_token_limit_does_not_override_the_prefill_limit() {
        let body = r#"{"max\u005ftokens":900,"model":"m","stream":true}"#;
        assert_eq!(asked("/v1/completions", body, None)["max_tokens"], 1);
    }

    #[test]
    fn transfer_parameters_are_read_if_present() {
        let read = |answer: &[u8]| match Prefilled::read(answer) {
            Prefilled::Computed { usage, params } => (usage, params),
            Prefilled::Refused(_) | Prefilled::Failed(_) => panic!("it was computed"),
        };
        let answer = br#"{"id":"x","usage":{"prompt_tokens":9,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":4}},"kv_transfer_params":{"remote_block_ids":[1,2]}}"#;
        let (usage, params) = read(answer);
        let usage = usage.unwrap();
        assert_eq!((usage.prompt_tokens, usage.cached_tokens), (9, Some(4)));
        let member = br#""kv_transfer_params":{"remote_block_ids":[1,2]},"#;
        assert_eq!(params.unwrap(), &member[..]);
        for none in [&br#"{"kv_transfer_params":null}"#[..], b"{}", b"not json"] {
            assert!(read(none).1.is_none());
        }
    }
}
