//! Obtains tokens from engines. Responses are cached by the hash of the request.
//!
//! Concurrent equal requests share one response. A caller without a response after [`DEADLINE`]
//! continues without tokens. After [`FAILURES_MAX`] failures in a row, no request is sent for
//! [`REST`], so that a hanging engine delays only a few requests until the deadline. A rejection is
//! not a failure: otherwise clients could stop all tokenizing with prompts that no engine accepts.
//! Timeouts pause requests only after [`STALL`] without a response, because several prompts that
//! wait for a loaded engine at once are one event.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use serde_json::{Value, json};
use tokio::sync::{OnceCell, Semaphore};
use tokio::time::Instant;

use super::CACHE_BYTES_MAX;
use super::cache::{TextKey, TokenCache};
use super::chat::{self, TokenizerInput};
use super::parts::UnclearBodyError;
use super::sampled_checks::SampledChecks;
use super::sglang::{self, ChatRenderer};
use super::{Fallback, TOKENIZED_BYTES_MAX};
use crate::engines::backends::EngineKind;

/// Maximum wait for an engine's tokens.
pub(crate) const DEADLINE: Duration = Duration::from_millis(500);
/// Number of failures in a row after which no requests are sent for [`REST`].
const FAILURES_MAX: u32 = 3;
/// Length of the pause after [`FAILURES_MAX`] failures in a row.
const REST: Duration = Duration::from_secs(1);
/// Time since the first failure in a row after which timeouts lead to a pause.
const STALL: Duration = Duration::from_secs(1);
/// Maximum number of tokenize requests for prompts in flight.
const UNDER_WAY_MAX: usize = 1024;
/// Number of tokenize requests for prompts in flight at which optional requests are skipped.
const BUSY: usize = 64;
/// Maximum number of tokenize requests for responses in flight.
const REPLIES_UNDER_WAY_MAX: usize = 32;

/// Cell for the tokens in an engine's response, shared by equal requests; `None` on failure.
type SharedAnswer = Arc<OnceCell<Option<Arc<[u32]>>>>;

/// Outcome of a tokenize request to an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum TokenizeResult {
    /// The engine returned these tokens.
    Tokens(Vec<u32>),
    /// The engine rejected the prompt.
    Refused,
    /// The engine returned no usable response.
    Nothing,
}

/// Tokenizer that uses the engines: their cached responses, and requests in flight.
#[derive(Debug)]
pub(crate) struct EngineTokenizer {
    answers: TokenCache,
    state: Mutex<EngineTokenizerState>,
    /// Results of comparing engines' tokens with predicted ones, by kind of request.
    agreement: Mutex<SampledChecks>,
    /// Permits for tokenize requests for responses; each request holds one.
    replies: Semaphore,
}

#[derive(Debug, Default)]
struct EngineTokenizerState {
    under_way: HashMap<TextKey, SharedAnswer>,
    failures: u32,
    /// Time of the first failure in a row; `None` if the last request did not fail.
    failing_since: Option<Instant>,
    backs_off_until: Option<Instant>,
}

impl Default for EngineTokenizer {
    fn default() -> Self {
        Self {
            answers: TokenCache::new(CACHE_BYTES_MAX),
            state: Mutex::default(),
            agreement: Mutex::default(),
            replies: Semaphore::new(REPLIES_UNDER_WAY_MAX),
        }
    }
}

/// The tokenize request for a prompt, or the tokens of a prompt that needs none.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum TokenizeRequest {
    /// Body of a `POST /tokenize` that returns the tokens.
    Ask(Bytes),
    /// The prompt consists of these token ids.
    Ids(Vec<u32>),
    /// There is no prompt.
    Nothing,
}

/// Returns the tokenize request for the prompt of a request to `path`, to an engine like `renderer`.
pub(crate) fn tokenize_request(
    path: &str,
    model: &str,
    body: &[u8],
    renderer: ChatRenderer,
) -> Result<TokenizeRequest, Fallback> {
    let wanted = chat::read(path, body, renderer);
    let wanted = wanted.map_err(|UnclearBodyError| Fallback::Unclear)?;
    let asked = match wanted {
        TokenizerInput::Nothing => return Ok(TokenizeRequest::Nothing),
        TokenizerInput::Ids(ids) => return Ok(TokenizeRequest::Ids(ids)),
        TokenizerInput::Plain {
            text,
            add_special_tokens,
        } => json!({"model": model, "prompt": text, "add_special_tokens": add_special_tokens}),
        // The engines' endpoint accepts no documents.
        TokenizerInput::Chat(chat) if chat.documents.is_some() => return Err(Fallback::Unclear),
        TokenizerInput::Chat(chat) => {
            let mut asked = json!({
                "model": model,
                "messages": chat.messages,
                "add_generation_prompt": chat.add_generation_prompt && !chat.continue_final_message,
                "continue_final_message": chat.continue_final_message,
                "add_special_tokens": chat.add_special_tokens,
            });
            let is_last_assistants = chat.messages.last().is_some_and(sglang::is_assistants);
            if renderer == ChatRenderer::Sglang
                && let Some(asked) = asked.as_object_mut()
            {
                if is_last_assistants {
                    // With this field, SGLang renders the messages as given, unlike those of a chat.
                    asked.shift_remove("add_generation_prompt");
                } else if chat.continue_final_message {
                    // A chat ignores this where it cannot apply; `/tokenize` refuses it.
                    asked.insert("add_generation_prompt".to_owned(), true.into());
                    asked.insert("continue_final_message".to_owned(), false.into());
                }
            }
            if let Some(tools) = chat.tools {
                asked["tools"] = tools;
            }
            if !chat.kwargs.is_empty() {
                asked["chat_template_kwargs"] = Value::Object(chat.kwargs);
            }
            asked
        }
    };
    let asked = asked.to_string();
    if asked.len() > TOKENIZED_BYTES_MAX {
        return Err(Fallback::TooLong);
    }
    Ok(TokenizeRequest::Ask(asked.into()))
}

/// Returns the body of the `POST /tokenize` for the prompt of a request to `path`, to an engine of
/// `kind`. `None` if the prompt is missing, consists of token ids, or cannot be converted.
#[must_use]
pub fn tokenize_question(
    path: &str,
    model: &str,
    body: &[u8],
    kind: Option<EngineKind>,
) -> Option<Bytes> {
    match tokenize_request(path, model, body, ChatRenderer::of(kind)) {
        Ok(TokenizeRequest::Ask(tokenize_request)) => Some(tokenize_request),
        Ok(TokenizeRequest::Ids(_) | TokenizeRequest::Nothing) | Err(_) => None,
    }
}

impl EngineTokenizer {
    /// Returns the tokens of `tokenize_request`, cached under `salt` or from `ask`; `None` if `ask`
    /// fails, is late, or must not be called now.
    pub(crate) async fn tokens<F>(
        &self,
        tokenize_request: &Bytes,
        salt: &str,
        ask: impl FnOnce() -> F,
    ) -> Option<Arc<[u32]>>
    where
        F: Future<Output = TokenizeResult>,
    {
        let key = self.answers.key(tokenize_request, salt);
        if let Some(tokens) = self.answers.get(key) {
            return Some(tokens);
        }
        let place = AnswerWait {
            remote: self,
            key,
            answer: self.join(key)?,
        };
        let asked = place.answer.get_or_init(|| async {
            let heard = tokio::time::timeout(DEADLINE, ask()).await;
            self.heard(key, heard.ok())
        });
        // The request may have been in flight when this caller joined. The caller then waits no
        // longer than if it had sent its own.
        let tokens = tokio::time::timeout(DEADLINE, asked).await.ok().cloned();
        tokens.flatten()
    }

    /// Returns the cell for the response to the request `key`. `None` while requests are paused or
    /// too many are in flight.
    fn join(&self, key: TextKey) -> Option<SharedAnswer> {
        let mut state = self.state();
        if state.is_backing_off() {
            return None;
        }
        let is_full = state.under_way.len() >= UNDER_WAY_MAX;
        match state.under_way.entry(key) {
            Entry::Occupied(known) => Some(Arc::clone(known.get())),
            Entry::Vacant(_) if is_full => None,
            Entry::Vacant(free) => Some(Arc::clone(free.insert(SharedAnswer::default()))),
        }
    }

    /// Returns the tokens of a response from `ask`, for which no client waits. `None` if `ask`
    /// fails or is late, requests are paused, engines are busy, or too many responses are in
    /// flight.
    pub(crate) async fn reply_tokens(
        &self,
        ask: impl Future<Output = TokenizeResult>,
    ) -> Option<Vec<u32>> {
        if self.state().is_backing_off() || self.is_busy() {
            return None;
        }
        let _place = self.replies.try_acquire().ok()?;
        match tokio::time::timeout(DEADLINE, ask).await.ok()? {
            TokenizeResult::Tokens(tokens) => Some(tokens),
            TokenizeResult::Refused | TokenizeResult::Nothing => None,
        }
    }

    /// Whether at least [`BUSY`] tokenize requests for prompts are in flight, so that optional
    /// requests are not sent.
    pub(crate) fn is_busy(&self) -> bool {
        self.state().under_way.len() >= BUSY
    }

    /// Locks and returns the results of comparing engines' tokens with predicted ones.
    pub(crate) fn agreement(&self) -> MutexGuard<'_, SampledChecks> {
        self.agreement
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Handles the response to request `key`, `None` after a timeout. Returns its tokens, if any.
    fn heard(&self, key: TextKey, heard: Option<TokenizeResult>) -> Option<Arc<[u32]>> {
        let mut state = self.state();
        match heard {
            Some(TokenizeResult::Tokens(tokens)) => {
                state.answered();
                state.backs_off_until = None;
                let tokens: Arc<[u32]> = tokens.into();
                self.answers.insert(key, &tokens);
                Some(tokens)
            }
            Some(TokenizeResult::Refused) => {
                state.answered();
                None
            }
            failure @ (Some(TokenizeResult::Nothing) | None) => {
                state.failed(failure.is_none());
                None
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, EngineTokenizerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl EngineTokenizerState {
    fn is_backing_off(&self) -> bool {
        self.backs_off_until
            .is_some_and(|until| Instant::now() < until)
    }

    fn answered(&mut self) {
        (self.failures, self.failing_since) = (0, None);
    }

    fn failed(&mut self, is_late: bool) {
        let now = Instant::now();
        self.failures = self.failures.saturating_add(1);
        let since = *self.failing_since.get_or_insert(now);
        let is_stalled = !is_late || now - since >= STALL;
        if self.failures >= FAILURES_MAX && is_stalled {
            self.backs_off_until = Some(now + REST);
        }
    }
}

/// A caller that waits for the response to a request. Dropping it, even early, removes the request
/// from those in flight.
struct AnswerWait<'a> {
    remote: &'a EngineTokenizer,
    key: TextKey,
    answer: SharedAnswer,
}

impl Drop for AnswerWait<'_> {
    fn drop(&mut self) {
        let mut state = self.remote.state();
        // Other waiters keep the cell and do not need the map entry.
        let is_same = |known: &SharedAnswer| Arc::ptr_eq(known, &self.answer);
        if state.under_way.get(&self.key).is_some_and(is_same) {
            state.under_way.remove(&self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_hanging_tokenizer_engine_costs_few_deadlines() {
        let remote = EngineTokenizer::default();
        let began = tokio::time::Instant::now();
        for nth in 0..20_u32 {
            let tokenize_request = Bytes::from(nth.to_string());
            assert_eq!(remote.tokens(&tokenize_request, "", pending).await, None);
        }
        assert_eq!(began.elapsed(), DEADLINE * FAILURES_MAX);
        assert!(remote.state().under_way.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn concurrent_prompts_wait_for_one_deadline() {
        let remote = EngineTokenizer::default();
        let questions: Vec<_> = (0..10_u32).map(|it| Bytes::from(it.to_string())).collect();
        let waiting = questions.iter().map(|it| remote.tokens(it, "", pending));
        futures_util::future::join_all(waiting).await;
        let tokenize_request = Bytes::from_static(b"q");
        let next = remote.tokens(&tokenize_request, "", || async {
            TokenizeResult::Tokens(vec![1])
        });
        assert_eq!(next.await.as_deref(), Some(&[1][..]));
    }

    #[tokio::test(start_paused = true)]
    async fn replies_are_tokenized_only_when_prompts_leave_room() {
        let remote = EngineTokenizer::default();
        let ask = || remote.reply_tokens(async { TokenizeResult::Tokens(vec![1]) });
        assert_eq!(ask().await, Some(vec![1]));
        let began = Instant::now();
        assert_eq!(remote.reply_tokens(pending()).await, None);
        assert_eq!(began.elapsed(), DEADLINE);
        let questions: Vec<_> = (0..BUSY).map(|it| Bytes::from(it.to_string())).collect();
        let waiting = questions.iter().map(|it| remote.tokens(it, "", pending));
        let waiting = futures_util::future::join_all(waiting);
        let (_, refused) = tokio::join!(waiting, async {
            tokio::task::yield_now().await;
            ask().await
        });
        assert_eq!(refused, None);
        assert_eq!(ask().await, Some(vec![1]), "there is room again");
    }

    #[tokio::test(start_paused = true)]
    async fn a_cancelled_tokenize_call_is_taken_over_by_waiters() {
        let remote = EngineTokenizer::default();
        let tokenize_request = Bytes::from_static(b"q");
        let leaver =
            tokio::time::timeout(DEADLINE / 2, remote.tokens(&tokenize_request, "", pending));
        let stayer = async {
            tokio::task::yield_now().await;
            remote
                .tokens(&tokenize_request, "", || async {
                    TokenizeResult::Tokens(vec![1])
                })
                .await
        };
        let (left, stayed) = tokio::join!(leaver, stayer);
        assert!(left.is_err());
        assert_eq!(stayed.as_deref(), Some(&[1][..]));
        let kept = remote.tokens(&tokenize_request, "", pending).await;
        assert_eq!(kept.as_deref(), Some(&[1][..]));
    }

    #[tokio::test(start_paused = true)]
    async fn a_cancelled_tokenize_call_frees_its_place() {
        let remote = EngineTokenizer::default();
        for nth in 0..10_u32 {
            let tokenize_request = Bytes::from(nth.to_string());
            let asked = remote.tokens(&tokenize_request, "", pending);
            assert!(tokio::time::timeout(DEADLINE / 2, asked).await.is_err());
            assert!(remote.state().under_way.is_empty());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn refused_prompts_do_not_pause_tokenize_calls() {
        let remote = EngineTokenizer::default();
        for nth in 0..10_u32 {
            let tokenize_request = Bytes::from(nth.to_string());
            let tokens = remote
                .tokens(&tokenize_request, "", || async { TokenizeResult::Refused })
                .await;
            assert_eq!(tokens, None);
        }
        let tokenize_request = Bytes::from_static(b"q");
        let good = remote.tokens(&tokenize_request, "", || async {
            TokenizeResult::Tokens(vec![1])
        });
        assert_eq!(good.await.as_deref(), Some(&[1][..]));
    }

    #[test]
    fn tokenize_requests_equal_the_forwarded_request() {
        let content = json!([
            {"type": "text", "text": "a"},
            {"type": "image_url", "image_url": {"url": "http://x/y.png"}},
        ]);
        let body = json!({
            "model": "m",
            "temperature": 1,
            "messages": [{"role": "user", "content": content}],
            "reasoning_effort": "none",
        });
        let asked = tokenize_request(
            "/v1/chat/completions",
            "m",
            body.to_string().as_bytes(),
            ChatRenderer::Vllm,
        );
        let Ok(TokenizeRequest::Ask(asked)) = asked else {
            panic!("{asked:?}");
        };
        let asked: Value = serde_json::from_slice(&asked).unwrap();
        assert_eq!(asked["add_generation_prompt"], true);
        let kwargs = &asked["chat_template_kwargs"];
        assert_eq!(
            kwargs,
            &json!({"enable_thinking": false, "reasoning_effort": "none"})
        );
        let image = asked["messages"][0]["content"][1]["text"].as_str();
        assert!(image.unwrap().starts_with("<|image:"));
        assert_eq!(asked.get("temperature"), None);
        let ids = json!({"prompt": [1, 2]}).to_string();
        let ids = tokenize_request("/v1/completions", "m", ids.as_bytes(), ChatRenderer::Vllm);
        assert_eq!(ids, Ok(TokenizeRequest::Ids(vec![1, 2])));
        let asked = |role: &str, renderer| {
            let body = json!({"messages": [{"role": role, "content": "x"}]}).to_string();
            match tokenize_request("/v1/chat/completions", "m", body.as_bytes(), renderer) {
                Ok(TokenizeRequest::Ask(asked)) => {
                    let asked: Value = serde_json::from_slice(&asked).unwrap();
                    asked["add_generation_prompt"].clone()
                }
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(asked("assistant", ChatRenderer::Vllm), true);
        assert_eq!(asked("user", ChatRenderer::Sglang), true);
        assert_eq!(asked("assistant", ChatRenderer::Sglang), Value::Null);
        let documents = json!({"messages": [], "documents": [{"text": "x"}]}).to_string();
        let documents = tokenize_request(
            "/v1/chat/completions",
            "m",
            documents.as_bytes(),
            ChatRenderer::Vllm,
        );
        assert_eq!(documents, Err(Fallback::Unclear));
    }
}
