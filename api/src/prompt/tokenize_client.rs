//! Asks engines for tokens: of prompts, and of answers as the next turn will have them.
//!
//! A model whose tokenizer is its engine has no template here, so only the engine knows how an
//! answer will be tokenized in the next turn. When an answer ends, its text is tokenized alone, and
//! the conversation with the answer and one more message as a whole. If the whole begins with the
//! prompt's tokens followed by the answer's, so will the next turn. Once that has held for the same
//! kind of request several times in a row, only the answer is tokenized, and the whole now and
//! then.

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
use crate::backends::Backends;
use crate::backends::pool::{EngineBody, Pool, PoolCounters, PoolSettings, Segments};

/// Longest answer of an engine's tokenizer, in bytes.
const ANSWER_BYTES_MAX: usize = 16 * 1024 * 1024;

/// How an answer's tokens join those of its prompt.
#[derive(Debug, Clone)]
pub enum ReplySeam {
    /// By a tokenizer that is here.
    Here(ReplyBoundary),
    /// As an engine says.
    Asked(Arc<ReplyQuery>),
}

/// What an engine is asked about an answer, once it is known.
#[derive(Debug)]
pub struct ReplyQuery {
    client: Arc<TokenizeClient>,
    tokenizer: Arc<Tokenizer>,
    model: String,
    /// What the engine was asked for the prompt.
    question: Bytes,
    /// What it answered.
    ids: Arc<[u32]>,
}

/// What an engine answers to `/tokenize`.
#[derive(Deserialize)]
struct TokenizeResponse {
    tokens: Vec<u32>,
}

/// Sends questions to engines. One per replica.
pub(super) struct TokenizeClient {
    view: Arc<StateView>,
    /// Which engines can be asked, and with which keys.
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

    /// `POST /tokenize` to one of the healthy engines that serve `model`: which one, the question
    /// says, so that they share the work.
    pub(super) async fn ask(&self, model: &str, question: Bytes) -> TokenizeResult {
        let Some(response) = self.send(model, question).await else {
            return TokenizeResult::Nothing;
        };
        match response.status() {
            StatusCode::OK => {}
            // The template refuses the conversation, or the prompt is too long.
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
            // Nothing was asked without text: an engine that wants it under another name.
            Ok(TokenizeResponse { tokens }) if tokens.is_empty() => TokenizeResult::Refused,
            Ok(TokenizeResponse { tokens }) => TokenizeResult::Tokens(tokens),
            Err(_) => TokenizeResult::Nothing,
        }
    }

    async fn send(&self, model: &str, question: Bytes) -> Option<Response<EngineBody>> {
        let (handle, url, key) = {
            let registry = self.view.registry();
            let able: Vec<_> = registry
                .backends
                .iter()
                .filter(|it| it.serves(model) && !it.draining && self.backends.is_up(&registry, it))
                .collect();
            let count = u64::try_from(able.len()).ok().filter(|count| *count > 0)?;
            let nth = usize::try_from(xxh3_64(&question) % count).ok()?;
            let (handle, spec) = (able[nth].handle, &able[nth].spec);
            let key = self.backends.keys().of_probes(&spec.id, &spec.url);
            (handle, spec.url.clone(), key)
        };
        let endpoint = self.pool.endpoint(handle, &url).ok()?;
        let build = || {
            let mut request = Request::new(Segments::from(question.clone()));
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
    /// What is to be asked of an answer to the prompt that `question` had these `ids` for. `None`:
    /// answers do not go on with it.
    pub(super) fn of(
        client: &Arc<TokenizeClient>,
        tokenizer: &Arc<Tokenizer>,
        model: &str,
        (question, ids): (&Bytes, &Arc<[u32]>),
    ) -> Option<Arc<Self>> {
        let asked: Value = serde_json::from_slice(question).ok()?;
        let is_open = asked.get("messages").is_none() || asked["add_generation_prompt"] == true;
        is_open.then(|| {
            Arc::new(Self {
                client: Arc::clone(client),
                tokenizer: Arc::clone(tokenizer),
                model: model.to_owned(),
                question: question.clone(),
                ids: Arc::clone(ids),
            })
        })
    }

    /// The tokens that `reply` adds to its prompt's in the next turn, if an engine says so in time.
    pub(crate) async fn continuation(&self, reply: &str) -> Option<Vec<u32>> {
        let remote = self.tokenizer.remote()?;
        let mut whole: Value = serde_json::from_slice(&self.question).ok()?;
        let Some(messages) = whole.get_mut("messages").and_then(Value::as_array_mut) else {
            let prompt = whole["prompt"].as_str()?;
            whole["prompt"] = format!("{prompt}{reply}").into();
            return self.behind_prompt(self.ask(remote, &whole).await?);
        };
        // Templates take earlier thoughts out.
        if reply.contains("</think>") {
            return None;
        }
        messages.push(json!({"role": "assistant", "content": reply}));
        // What templates do with the last answer they may not do with one before it.
        messages.push(json!({"role": "user", "content": "?"}));
        whole["add_generation_prompt"] = false.into();
        let alone = json!({"model": self.model, "prompt": reply, "add_special_tokens": false});
        let kind = self.kind_of(&whole, reply);
        if !remote.habits().is_due(kind) {
            return self.ask(remote, &alone).await;
        }
        let (own, whole) = tokio::join!(self.ask(remote, &alone), self.ask(remote, &whole));
        let (own, whole) = (own?, whole?);
        let behind = self.behind_prompt(whole);
        let is_kept = behind.is_some_and(|behind| behind.starts_with(&own));
        remote.habits().saw(kind, is_kept);
        is_kept.then_some(own)
    }

    async fn ask(&self, remote: &EngineTokenizer, question: &Value) -> Option<Vec<u32>> {
        let question = question.to_string();
        if question.len() > TOKENIZED_BYTES_MAX {
            return None;
        }
        let asked = self.client.ask(&self.model, question.into());
        remote.reply_tokens(asked).await
    }

    fn behind_prompt(&self, mut whole: Vec<u32>) -> Option<Vec<u32>> {
        let is_longer = whole.starts_with(&self.ids);
        is_longer.then(|| whole.split_off(self.ids.len()))
    }

    /// Requests of one kind have their answers repeated in one way: the template's variables are
    /// the same, and the white space around the answer.
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
