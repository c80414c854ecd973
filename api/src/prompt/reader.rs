//! Reads a request's body and identifies its prompt with the tokenizer of its model.
//!
//! Parsing a body and hashing its bytes takes microseconds and happens on the calling thread,
//! unless the body is long. Tokenizing takes a millisecond per few kilobytes. Known text is looked
//! up, and a little new text is tokenized inline. The rest goes to the blocking pool, as many
//! prompts at a time as the machine has cores. Engines that tokenize are called over separate
//! connections. If tokenizing fails, the prompt is identified by its characters.
//!
//! [`PromptReader`] depends only on the config, the registry and engines' reports about models.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use state::StateView;
use tokio::sync::Semaphore;
use tokio::time::Instant;
use xxhash_rust::xxh3::xxh3_64;

use super::read::no_model;
use super::tokenize_client::{ReplyJoin, ReplyQuery, TokenizeClient};
use super::{
    BlockUnit, BodyRejection, ChatRenderer, DEADLINE, EncodeError, Encoded, EngineTokenizer,
    Fallback, FormFields, ModelSettings, ParsedBody, Prompt, PromptIdentity, ReplyShape,
    SpecialTokenCount, TokenizeRequest, Tokenizer, TokenizerContent, Truncation, parse_routed,
    tokenize_request,
};
use crate::engines::backends::Backends;

/// Maximum size of a body that is parsed and hashed inline, in bytes. Longer ones would delay other
/// connections of the thread, so they go to the blocking pool.
const PARSED_INLINE_BYTES_MAX: usize = 256 * 1024;
/// Maximum size of a body whose text is prepared for a tokenizer inline, in bytes.
const RENDERED_INLINE_BYTES_MAX: usize = 32 * 1024;
/// Maximum amount of new text that is tokenized inline, in bytes.
const FRESH_INLINE_BYTES_MAX: usize = 512;
/// Maximum wait for a permit to tokenize in the blocking pool. After that, the prompt is identified
/// by its characters, because routing by characters is better than routing late.
const WORKER_WAIT_MAX: Duration = Duration::from_millis(500);
/// Maximum wait for an engine's tokens while they have reliably matched those of the local files.
const CHECK_WAIT_MAX: Duration = Duration::from_millis(50);

/// A request with a parsed body. Its prompt is identified by its characters or given token ids.
#[derive(Debug)]
pub struct ParsedRequest {
    /// Parsed body.
    pub parsed: ParsedBody,
    identity: PromptIdentity,
}

/// A request with an identified prompt.
#[derive(Debug)]
pub struct ReadRequest {
    /// Parsed body without the prompt.
    pub parsed: ParsedBody,
    /// Identity of the prompt.
    pub identity: PromptIdentity,
    /// Token ids of the prompt; empty if they are unknown.
    pub ids: Vec<u32>,
}

/// Reason why a request could not be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReadError {
    /// The body cannot be routed.
    Bad(BodyRejection),
    /// The runtime is shutting down, or a task in the blocking pool panicked.
    Stopping,
}

impl From<BodyRejection> for ReadError {
    fn from(bad: BodyRejection) -> Self {
        Self::Bad(bad)
    }
}

/// Turns bodies into parsed requests with identified prompts. Each replica has one.
pub struct PromptReader {
    pub(super) view: Arc<StateView>,
    /// Provides the engines' reports about their models.
    backends: Arc<Backends>,
    pub(super) models: Vec<ModelSettings>,
    /// Permits to tokenize in the blocking pool; each text holds one.
    pub(crate) workers: Arc<Semaphore>,
    client: Arc<TokenizeClient>,
    metrics: TokenizingMetrics,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TokenizeLabels {
    outcome: &'static str,
}

/// Metrics of how prompts of models with a tokenizer were tokenized, and how long it took.
#[derive(Debug, Clone)]
pub(crate) struct TokenizingMetrics {
    prompts: Family<TokenizeLabels, Counter>,
    seconds: Histogram,
}

impl Default for TokenizingMetrics {
    fn default() -> Self {
        // From 16 us to 1 s.
        let bounds = (0..9).map(|step| 16e-6 * 4_f64.powi(step));
        Self {
            prompts: Family::default(),
            seconds: Histogram::new(bounds),
        }
    }
}

impl TokenizingMetrics {
    pub(crate) fn register(&self, registry: &mut Registry) {
        registry.register(
            "quorate_prefix_tokenized",
            "Prompts of models with a tokenizer, by how they were tokenized",
            self.prompts.clone(),
        );
        registry.register(
            "quorate_prefix_tokenize_seconds",
            "Time to tokenize a prompt",
            self.seconds.clone(),
        );
    }

    fn count(&self, outcome: &'static str, began: Instant) {
        self.prompts
            .get_or_create(&TokenizeLabels { outcome })
            .inc();
        self.seconds.observe(began.elapsed().as_secs_f64());
    }
}

/// The part of a request that a tokenizer reads.
#[derive(Clone, Copy)]
struct PromptSource<'a> {
    path: &'a str,
    body: &'a Bytes,
    /// Engine whose way of rendering chats is followed.
    renderer: ChatRenderer,
}

/// Token ids of a prompt, by source.
enum PromptTokens {
    Encoded(Encoded),
    /// Ids from an engine, with the tokenize request sent to it.
    Asked(Arc<[u32]>, Bytes),
    Ids(Vec<u32>),
    Nothing,
}

impl PromptReader {
    /// Creates a reader for `models`, the entries of `[[models]]`. The first match applies.
    #[must_use]
    pub(crate) fn new(
        view: Arc<StateView>,
        backends: Arc<Backends>,
        models: Vec<ModelSettings>,
        metrics: TokenizingMetrics,
    ) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            client: Arc::new(TokenizeClient::new(
                Arc::clone(&view),
                Arc::clone(&backends),
            )),
            view,
            backends,
            models,
            workers: Arc::new(Semaphore::new(cores)),
            metrics,
        }
    }

    /// Reads the body of a request to `path` and identifies its prompt.
    ///
    /// # Errors
    /// Returns a [`ReadError`] if the body cannot be routed or the runtime is shutting down.
    pub async fn read(
        self: &Arc<Self>,
        path: &str,
        body: &Bytes,
    ) -> Result<ReadRequest, ReadError> {
        let parsed = self.parse(path, body).await?;
        self.tokenize(path, body, parsed).await
    }

    /// Parses the body of a request to `path`.
    ///
    /// # Errors
    /// Returns a [`ReadError`] if the body cannot be routed or the runtime is shutting down.
    pub async fn parse(
        self: &Arc<Self>,
        path: &str,
        body: &Bytes,
    ) -> Result<ParsedRequest, ReadError> {
        if body.len() <= PARSED_INLINE_BYTES_MAX {
            return Ok(self.parse_here(path, body)?);
        }
        let (reader, path, body) = (Arc::clone(self), path.to_owned(), body.clone());
        Ok(blocking(move || reader.parse_here(&path, &body)).await??)
    }

    fn parse_here(&self, path: &str, body: &Bytes) -> Result<ParsedRequest, BodyRejection> {
        self.routed(parse_routed(path, body)?)
    }

    /// Reads a request with a form instead of a JSON body. It has no prompt that could be cached.
    ///
    /// # Errors
    /// Returns a [`BodyRejection`] unless the form names a model or the backends name exactly one.
    pub fn of_form(&self, form: FormFields) -> Result<ParsedRequest, BodyRejection> {
        let parsed = ParsedBody {
            model: form.model.unwrap_or_default(),
            user: form.user,
            stream: form.is_stream,
            choices: 1,
            ..ParsedBody::default()
        };
        self.routed(parsed)
    }

    /// Rehashes a prompt under `salt`, which replaces the salt of the body.
    pub fn salt(&self, request: &mut ParsedRequest, salt: String) {
        request.parsed.cache_salt = Some(salt);
        request.identity = self.identify(&request.parsed);
    }

    /// Fills in a missing model if there is only one, resolves the truncation, and identifies the
    /// prompt.
    fn routed(&self, mut parsed: ParsedBody) -> Result<ParsedRequest, BodyRejection> {
        if parsed.model.is_empty() {
            parsed.model = self.only_model().ok_or_else(no_model)?;
        }
        parsed.truncation = parsed.truncation.and_then(|truncation| {
            let is_generated = parsed.reply != ReplyShape::None;
            let wants_output = is_generated && parsed.max_tokens.is_some_and(|max| max > 0);
            let context = || self.context_of(&parsed.model);
            truncation.within(truncation.is_context.then(context).flatten(), wants_output)
        });
        let identity = self.identify(&parsed);
        Ok(ParsedRequest { parsed, identity })
    }

    /// Returns the least context length, in tokens, that engines report for `model`, if any.
    fn context_of(&self, model: &str) -> Option<u64> {
        let registry = self.view.registry();
        let serving = registry.backends.iter().filter(|it| it.serves(model));
        let told = serving.filter_map(|it| self.backends.listed(it.handle.slot, model));
        told.filter_map(|listed| listed.max_model_len).min()
    }

    /// Returns the model that the backends name, if they name exactly one, adapters aside: without a
    /// model, engines use none.
    fn only_model(&self) -> Option<String> {
        let registry = self.view.registry();
        let mut models = registry.backends.iter().flat_map(|backend| {
            let is_whole = |model: &&str| {
                let listed = self.backends.listed(backend.handle.slot, model);
                !listed.is_some_and(|listed| listed.is_adapter())
            };
            backend.named_models().filter(is_whole)
        });
        let first = models.next()?;
        models.all(|other| other == first).then(|| first.to_owned())
    }

    /// Identifies the prompt of a request that was parsed from `body` by its tokens, if its model
    /// has a tokenizer.
    ///
    /// # Errors
    /// Returns a [`ReadError`] if the runtime is shutting down.
    pub async fn tokenize(
        &self,
        path: &str,
        body: &Bytes,
        request: ParsedRequest,
    ) -> Result<ReadRequest, ReadError> {
        let ParsedRequest { parsed, identity } = request;
        let mut read = ReadRequest {
            parsed,
            identity,
            ids: Vec::new(),
        };
        if let Some(tokenizer) = self.due_tokenizer(&read) {
            // Boxed: large, and not needed for requests without a tokenizer.
            Box::pin(self.tokenize_with(&tokenizer, path, body, &mut read)).await?;
        } else if let Prompt::Tokens(ids) = &mut read.parsed.prompt {
            read.ids = std::mem::take(ids);
        }
        // The prompt may be as long as the body and is no longer needed.
        read.parsed.prompt = Prompt::default();
        Ok(read)
    }

    /// Returns the tokenizer of the request's model, if it has one and the prompt is a non-empty
    /// text.
    fn due_tokenizer(&self, read: &ReadRequest) -> Option<Arc<Tokenizer>> {
        match &read.parsed.prompt {
            Prompt::Text(text) if !text.is_empty() => {
                self.tokenizer_of(&read.parsed.model).cloned()
            }
            Prompt::Text(_) | Prompt::Tokens(_) => None,
        }
    }

    async fn tokenize_with(
        &self,
        tokenizer: &Arc<Tokenizer>,
        path: &str,
        body: &Bytes,
        read: &mut ReadRequest,
    ) -> Result<(), ReadError> {
        let began = Instant::now();
        let source = PromptSource {
            path,
            body,
            renderer: self.renderer_of(&read.parsed.model),
        };
        let (outcome, tokens) = match tokenizer.remote() {
            Some(remote) if tokenizer.has_files() => {
                self.encode_or_ask(tokenizer, remote, source, read).await?
            }
            Some(remote) => ("engine", self.ask(remote, source, read).await),
            None => {
                let salt = read.parsed.cache_salt.as_deref().unwrap_or_default();
                self.encode(tokenizer, source, salt).await?
            }
        };
        let outcome = match tokens {
            Ok(PromptTokens::Encoded(Encoded { ids, around, seam })) => {
                self.take_tokens(read, ids, around, seam.map(ReplyJoin::Local));
                outcome
            }
            Ok(PromptTokens::Asked(ids, tokenize_request)) => {
                let (client, model) = (&self.client, &read.parsed.model);
                let is_wanted = read.parsed.reply != ReplyShape::None && !tokenizer.has_files();
                let asked = is_wanted
                    .then(|| ReplyQuery::of(client, tokenizer, model, (&tokenize_request, &ids)))
                    .flatten();
                let seam = asked.map(ReplyJoin::FromEngine);
                self.take_tokens(read, ids.to_vec(), SpecialTokenCount::default(), seam);
                outcome
            }
            Ok(PromptTokens::Ids(ids)) => {
                self.take_tokens(read, ids, SpecialTokenCount::default(), None);
                outcome
            }
            Ok(PromptTokens::Nothing) => "nothing",
            Err(why) => {
                read.identity.unit = BlockUnit::CharactersFor(why);
                why.label()
            }
        };
        self.metrics.count(outcome, began);
        Ok(())
    }

    /// Returns the way in which the engines of `model` render chats: that of the first engine whose
    /// kind is known. A model rarely has engines of several kinds.
    fn renderer_of(&self, model: &str) -> ChatRenderer {
        let registry = self.view.registry();
        let mut serving = registry.backends.iter().filter(|it| it.serves(model));
        let kind = serving.find_map(|it| self.backends.kind(it.handle.slot));
        ChatRenderer::of(kind)
    }

    /// Tokenizes with the local files and compares the tokens with an engine's: always until
    /// several prompts of the same path and model in a row have matched, then occasionally. The
    /// engine's tokens take precedence. While engines are busy, tokens are not compared.
    async fn encode_or_ask(
        &self,
        tokenizer: &Arc<Tokenizer>,
        remote: &EngineTokenizer,
        source: PromptSource<'_>,
        read: &ReadRequest,
    ) -> Result<(&'static str, Result<PromptTokens, Fallback>), ReadError> {
        let salt = read.parsed.cache_salt.as_deref().unwrap_or_default();
        let (how, here) = self.encode(tokenizer, source, salt).await?;
        let kind = xxh3_64(format!("{:?}", (source.path, &read.parsed.model)).as_bytes());
        let (is_sure, is_due) = {
            let mut agreement = remote.agreement();
            (agreement.is_sure(kind), agreement.is_due(kind))
        };
        let encoded = match here {
            Ok(PromptTokens::Encoded(encoded)) if is_due && !remote.is_busy() => encoded,
            Err(_) if !remote.is_busy() => {
                let asked = self.ask(remote, source, read).await;
                return Ok(if asked.is_ok() {
                    ("engine", asked)
                } else {
                    (how, here)
                });
            }
            here => return Ok((how, here)),
        };
        let patience = if is_sure { CHECK_WAIT_MAX } else { DEADLINE };
        let asked = tokio::time::timeout(patience, self.ask(remote, source, read)).await;
        let Ok(Ok(PromptTokens::Asked(ids, tokenize_request))) = asked else {
            return Ok((how, Ok(PromptTokens::Encoded(encoded))));
        };
        let is_same = encoded.ids[..] == ids[..];
        remote.agreement().saw(kind, is_same);
        let tokens = match is_same {
            true => PromptTokens::Encoded(encoded),
            false => PromptTokens::Asked(ids, tokenize_request),
        };
        Ok(("engine", Ok(tokens)))
    }

    /// Identifies the prompt by its tokens `ids`, after the truncation that the engine applies.
    /// `seam` determines how a response continues them, if known.
    fn take_tokens(
        &self,
        read: &mut ReadRequest,
        mut ids: Vec<u32>,
        around: SpecialTokenCount,
        seam: Option<ReplyJoin>,
    ) {
        let parsed = &read.parsed;
        let is_cut = |cut: Truncation| cut.cut(&mut ids, parsed.reply, around);
        let is_cut = parsed.truncation.is_some_and(is_cut);
        read.identity = self.identify_tokens(parsed, &ids, seam.filter(|_| !is_cut));
        read.ids = ids;
    }

    /// Tokenizes locally: inline if the text is short or known, else in the blocking pool.
    async fn encode(
        &self,
        tokenizer: &Arc<Tokenizer>,
        source: PromptSource<'_>,
        salt: &str,
    ) -> Result<(&'static str, Result<PromptTokens, Fallback>), ReadError> {
        let PromptSource {
            path,
            body,
            renderer,
        } = source;
        let mut prepared = None;
        if body.len() <= RENDERED_INLINE_BYTES_MAX {
            match tokenizer.content(path, body, renderer) {
                Ok(TokenizerContent::Text(text)) => {
                    match tokenizer.encode(&text, salt, FRESH_INLINE_BYTES_MAX) {
                        Ok(encoded) => return Ok(("here", Ok(PromptTokens::Encoded(encoded)))),
                        Err(EncodeError::Never(why)) => return Ok(("here", Err(why))),
                        Err(EncodeError::MoreThanAllowed) => prepared = Some(text),
                    }
                }
                other => return Ok(("here", known(other))),
            }
        }
        // The task keeps the permit until it ends, even if the client has left.
        let workers = Arc::clone(&self.workers);
        let permit = tokio::time::timeout(WORKER_WAIT_MAX, workers.acquire_owned()).await;
        let Ok(permit) = permit else {
            return Ok(("worker", Err(Fallback::Busy)));
        };
        let (tokenizer, path, body) = (Arc::clone(tokenizer), path.to_owned(), body.clone());
        let salt = salt.to_owned();
        let tokens = blocking(move || {
            let _permit = permit;
            let text = match prepared.map_or_else(
                || tokenizer.content(&path, &body, renderer),
                |text| Ok(TokenizerContent::Text(text)),
            ) {
                Ok(TokenizerContent::Text(text)) => text,
                other => return known(other),
            };
            match tokenizer.encode(&text, &salt, usize::MAX) {
                Ok(encoded) => Ok(PromptTokens::Encoded(encoded)),
                Err(EncodeError::Never(why)) => Err(why),
                Err(EncodeError::MoreThanAllowed) => Err(Fallback::TooLong),
            }
        })
        .await?;
        Ok(("worker", tokens))
    }

    /// Requests the prompt's tokens from an engine, if the body contains text.
    async fn ask(
        &self,
        remote: &EngineTokenizer,
        PromptSource {
            path,
            body,
            renderer,
        }: PromptSource<'_>,
        read: &ReadRequest,
    ) -> Result<PromptTokens, Fallback> {
        let model = &read.parsed.model;
        let tokenize_request = match tokenize_request(path, model, body, renderer)? {
            TokenizeRequest::Ask(tokenize_request) => tokenize_request,
            TokenizeRequest::Ids(ids) => return Ok(PromptTokens::Ids(ids)),
            TokenizeRequest::Nothing => return Ok(PromptTokens::Nothing),
        };
        let salt = read.parsed.cache_salt.as_deref().unwrap_or_default();
        let ask = || self.client.ask(model, tokenize_request.clone());
        let tokens = remote.tokens(&tokenize_request, salt, ask).await;
        let ids = tokens.ok_or(Fallback::Engine)?;
        Ok(PromptTokens::Asked(ids, tokenize_request))
    }
}

/// Converts content that needs no tokenizer.
fn known(content: Result<TokenizerContent, Fallback>) -> Result<PromptTokens, Fallback> {
    match content? {
        TokenizerContent::Ids(ids) => Ok(PromptTokens::Ids(ids)),
        TokenizerContent::Nothing => Ok(PromptTokens::Nothing),
        // Unreachable: callers handle text.
        TokenizerContent::Text(_) => Err(Fallback::Unclear),
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ReadError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|_| ReadError::Stopping)
}
