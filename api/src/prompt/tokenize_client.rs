//! Requests tokens from engines: of prompts, and of responses as the next turn will contain them.
//!
//! If a model's tokenizer is its engine, the router has no template, so only the engine knows how
//! the next turn tokenizes a response. When a response ends, its text is tokenized alone, and so is
//! the conversation with the response and one more message. If the latter's tokens begin with those
//! of the prompt and the response, those of the next turn will too. After several matches in a row
//! for the same kind of request, only the response is tokenized, and the conversation occasionally.

use std::sync::Arc;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HOST};
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Limited};
use serde::Deserialize;
use serde_json::{Value, json};
use state::StateView;
use xxhash_rust::xxh3::xxh3_64;

use super::tokenizer::TOKENIZED_BYTES_MAX;
use super::{EngineTokenizer, ReplyBoundary, TokenizeResult, Tokenizer};
use crate::engines::backends::Backends;
use crate::engines::backends::pool::{EngineBody, Pool, PoolCounters, PoolSettings, Segments};

/// Maximum size of an engine's `/tokenize` response, in bytes.
const ANSWER_BYTES_MAX: usize = 16 * 1024 * 1024;

/// Source of the tokens that a response adds to those of its prompt.
#[derive(Debug, Clone)]
pub enum ReplyJoin {
    /// A local tokenizer computes them.
    Local(ReplyBoundary),
    /// An engine returns them.
    FromEngine(Arc<ReplyQuery>),
}

/// Query for the tokens of a response, sent to an engine once the text is known.
#[derive(Debug)]
pub struct ReplyQuery {
    client: Arc<TokenizeClient>,
    tokenizer: Arc<Tokenizer>,
    model: String,
    /// Tokenize request that was sent for the prompt.
    tokenize_request: Bytes,
    /// Token ids of the prompt, from the engine.
    ids: Arc<[u32]>,
}

/// Response of an engine to `POST /tokenize`.
#[derive(Deserialize)]
struct TokenizeResponse {
    tokens: Vec<u32>,
}

/// Sends tokenize requests to engines. Each replica has one.
pub(super) struct TokenizeClient {
    view: Arc<StateView>,
    /// Provides health and API keys of engines.
    backends: Arc<Backends>,
    pool: Pool,
}

impl std::fmt::Debug for TokenizeClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TokenizeClient").finish_non_exhaustive()
    }
}

impl TokenizeClient {
    pub(super) fn new(view: Arc<StateView>, backends: Arc<Backends>) -> Self {
        let pool = Pool::new(PoolSettings::default(), PoolCounters::default());
        Self {
            pool: pool.through(backends.dialer().clone()),
            view,
            backends,
        }
    }

    /// Sends `POST /tokenize` to one of the healthy engines that serve `model`. The request's hash
    /// selects the engine, so that engines share the work.
    pub(super) async fn ask(&self, model: &str, tokenize_request: Bytes) -> TokenizeResult {
        let Some(response) = self.send(model, tokenize_request).await else {
            return TokenizeResult::Nothing;
        };
        match response.status() {
            StatusCode::OK => {}
            // The template rejects the conversation, or the prompt is too long.
            StatusCode::BAD_REQUEST
            | StatusCode::PAYLOAD_TOO_LARGE
            | StatusCode::UNPROCESSABLE_ENTITY => return TokenizeResult::Refused,
            _ => return TokenizeResult::Nothing,
        }
        let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX);
        let Ok(body) = body.collect().await else {
            return TokenizeResult::Nothing;
        };
        let answer = serde_json::from_slice(&body.to_bytes());
        match answer {
            // Requests always contain text, so this engine expects it in another field.
            Ok(TokenizeResponse { tokens }) if tokens.is_empty() => TokenizeResult::Refused,
            Ok(TokenizeResponse { tokens }) => TokenizeResult::Tokens(tokens),
            Err(_) => TokenizeResult::Nothing,
        }
    }

    async fn send(&self, model: &str, tokenize_request: Bytes) -> Option<Response<EngineBody>> {
        let (handle, url, key) = {
            let registry = self.view.registry();
            let able: Vec<_> = registry
                .backends
                .iter()
                .filter(|it| it.serves(model) && !it.draining && self.backends.is_up(&registry, it))
                .collect();
            let count = u64::try_from(able.len()).ok().filter(|count| *count > 0)?;
            let nth = usize::try_from(xxh3_64(&tokenize_request) % count).ok()?;
            let (handle, spec) = (able[nth].handle, &able[nth].spec);
            let key = self.backends.keys().of_probes(&spec.id, &spec.url);
            (handle, spec.url.clone(), key)
        };
        let endpoint = self.pool.endpoint(handle, &url).ok()?;
        let build = || {
            let mut request = Request::new(Segments::from(tokenize_request.clone()));
            *request.method_mut() = Method::POST;
            *request.uri_mut() = http::Uri::from_static("/tokenize");
            let headers = request.headers_mut();
            headers.insert(HOST, endpoint.host().clone());
            headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
            if let Some(key) = &key {
                key.put_into(headers);
            }
            request
        };
        endpoint.send(&build).await.ok()
    }
}

impl ReplyQuery {
    /// Returns the query for a response to the prompt of `tokenize_request`, whose tokens are
    /// `ids`. `None` if responses do not continue that prompt.
    pub(super) fn of(
        client: &Arc<TokenizeClient>,
        tokenizer: &Arc<Tokenizer>,
        model: &str,
        (tokenize_request, ids): (&Bytes, &Arc<[u32]>),
    ) -> Option<Arc<Self>> {
        let asked: Value = serde_json::from_slice(tokenize_request).ok()?;
        let is_open = asked.get("messages").is_none() || asked["add_generation_prompt"] == true;
        is_open.then(|| {
            Arc::new(Self {
                client: Arc::clone(client),
                tokenizer: Arc::clone(tokenizer),
                model: model.to_owned(),
                tokenize_request: tokenize_request.clone(),
                ids: Arc::clone(ids),
            })
        })
    }

    /// Returns the tokens that `reply` adds in the next turn; `None` if they are not known exactly
    /// or no engine answers in time.
    pub(crate) async fn continuation(&self, reply: &str) -> Option<Vec<u32>> {
        let remote = self.tokenizer.remote()?;
        let mut whole: Value = serde_json::from_slice(&self.tokenize_request).ok()?;
        let Some(messages) = whole.get_mut("messages").and_then(Value::as_array_mut) else {
            let prompt = whole["prompt"].as_str()?;
            whole["prompt"] = format!("{prompt}{reply}").into();
            return self.behind_prompt(self.ask(remote, &whole).await?);
        };
        // Templates remove the reasoning of earlier responses.
        if reply.contains("</think>") {
            return None;
        }
        messages.push(json!({"role": "assistant", "content": reply}));
        // Templates may treat the last response differently from earlier ones.
        messages.push(json!({"role": "user", "content": "?"}));
        whole["add_generation_prompt"] = false.into();
        let alone = json!({"model": self.model, "prompt": reply, "add_special_tokens": false});
        let kind = self.kind_of(&whole, reply);
        if !remote.agreement().is_due(kind) {
            return self.ask(remote, &alone).await;
        }
        let (own, whole) = tokio::join!(self.ask(remote, &alone), self.ask(remote, &whole));
        let (own, whole) = (own?, whole?);
        let behind = self.behind_prompt(whole);
        let is_kept = behind.is_some_and(|behind| behind.starts_with(&own));
        remote.agreement().saw(kind, is_kept);
        is_kept.then_some(own)
    }

    async fn ask(&self, remote: &EngineTokenizer, tokenize_request: &Value) -> Option<Vec<u32>> {
        let tokenize_request = tokenize_request.to_string();
        if tokenize_request.len() > TOKENIZED_BYTES_MAX {
            return None;
        }
        let asked = self.client.ask(&self.model, tokenize_request.into());
        remote.reply_tokens(asked).await
    }

    fn behind_prompt(&self, mut whole: Vec<u32>) -> Option<Vec<u32>> {
        let is_longer = whole.starts_with(&self.ids);
        is_longer.then(|| whole.split_off(self.ids.len()))
    }

    /// Returns a key of the kind of request. Templates treat responses of one kind alike: same
    /// model and template variables, and the same white space around the response.
    fn kind_of(&self, whole: &Value, reply: &str) -> u64 {
        let text = reply.trim();
        let ends = reply.split_once(text).unwrap_or_default();
        let variables = (
            whole.get("chat_template_kwargs"),
            whole.get("tools").is_some(),
        );
        xxh3_64(format!("{:?}", (&self.model, variables, ends)).as_bytes())
    }
}
