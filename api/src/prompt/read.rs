//! Reads the known fields of a request body in one pass over the JSON.
//!
//! A visitor reads the known fields of the top-level object in order. Fields that prefix identity
//! and charging depend on must have the right type; the engine judges everything else, see
//! [`super::pydantic_lax`]. Nesting cannot exhaust the stack: skipped values are skipped
//! iteratively, and `serde_json`'s recursion limit bounds the rest.

use std::borrow::Cow;
use std::cell::Cell;
use std::fmt;

use bytes::Bytes;
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::error::Category;
use serde_json::value::RawValue;

use super::attribution::Content;
use super::borrowed::Str;
use super::cache_use::CacheFields;
use super::completion_prompt::CompletionPrompt;
use super::flatten::{ContentText, Input, Messages, push_framed};
use super::further_fields::FurtherFields;
use super::pydantic_lax::{LaxError, LaxValue};
use super::session_fields::SessionFields;
use super::{BodyRejection, ParsedBody, Prompt, PromptBatch, ReplyShape};

/// Reads a body posted to `path`.
///
/// # Errors
/// Returns a [`BodyRejection`] for malformed JSON, a missing `model` or an ill-typed known field.
pub fn parse(path: &str, body: &Bytes) -> Result<ParsedBody, BodyRejection> {
    let parsed = read(path, body)?;
    if parsed.model.is_empty() {
        return Err(no_model());
    }
    Ok(parsed)
}

/// Returns the rejection of a body without a model.
pub(super) fn no_model() -> BodyRejection {
    wrong_model("model is missing, expected a model id")
}

/// Reads a body posted to `path`. The model is empty if the body has none.
fn read(path: &str, body: &Bytes) -> Result<ParsedBody, BodyRejection> {
    let text = simdutf8::compat::from_utf8(body).map_err(|error| BodyRejection {
        message: format!(
            "body is not UTF-8 at byte {}, expected a JSON object in UTF-8",
            error.valid_up_to()
        ),
        param: None,
    })?;
    if text.trim_ascii_start().is_empty() {
        return Err(BodyRejection {
            message: "body is empty, expected a JSON object".to_owned(),
            param: None,
        });
    }
    let field = Cell::new(None);
    let mut found = BodyFields::default();
    let mut json = serde_json::Deserializer::from_str(text);
    let top = BodyVisitor {
        text,
        surface: PromptField::of(path),
        is_anthropic: is_anthropic(path),
        field: &field,
        found: &mut found,
    };
    json.deserialize_map(top)
        .and_then(|()| json.end())
        .map_err(|error| bad_body(&error, field.get()))?;
    found.finish(PromptField::of(path), text)
}

/// Reads a body posted to `path` for routing. If the engine answers without running its model
/// (counting or rendering tokens), the result has no prompt, so nothing is charged or counted as
/// cached. The model is empty if the body has none.
///
/// # Errors
/// Returns a [`BodyRejection`] for malformed JSON or an ill-typed known field.
pub fn parse_routed(path: &str, body: &Bytes) -> Result<ParsedBody, BodyRejection> {
    let mut parsed = read(path, body)?;
    if is_uncomputed(path) {
        parsed.prompt = Prompt::default();
        parsed.batch = PromptBatch::default();
        parsed.reply = ReplyShape::None;
    }
    Ok(parsed)
}

fn is_uncomputed(path: &str) -> bool {
    let path = path.split('?').next().unwrap_or(path);
    path == "/tokenize"
        || path.ends_with("/render")
        || path.ends_with("/count_tokens")
        || path.ends_with("/input_tokens")
}

/// Whether bodies for `path` are those of Anthropic's API.
pub(super) fn is_anthropic(path: &str) -> bool {
    path.starts_with("/v1/messages")
}

/// Number of bytes kept at each end of an error's text, which may quote a whole prompt.
const QUOTED_BYTES_MAX: usize = 160;

fn bad_body(error: &serde_json::Error, field: Option<&'static str>) -> BodyRejection {
    let category = error.classify();
    let mut error = error.to_string();
    if error.len() > 2 * QUOTED_BYTES_MAX {
        let head = error.floor_char_boundary(QUOTED_BYTES_MAX);
        let tail = error.ceil_char_boundary(error.len() - QUOTED_BYTES_MAX);
        error.replace_range(head..tail, " [...] ");
    }
    match (category, field) {
        (Category::Data, Some(field)) => BodyRejection {
            message: format!("{field}: {error}"),
            param: Some(field.to_owned()),
        },
        (Category::Data, None) => BodyRejection {
            message: error.to_string(),
            param: None,
        },
        (Category::Syntax | Category::Eof | Category::Io, _) => BodyRejection {
            message: format!("body is not valid JSON: {error}"),
            param: None,
        },
    }
}

/// Fields of a path's body that contain the prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PromptField {
    /// `messages`, with `system` and `tools`.
    Chat,
    /// `prompt`.
    Completions,
    /// `input`, with `instructions` and `tools`.
    Responses,
    /// `input`, `prompt`, `query`, `queries`, `text_1` or `data_1`; else `messages`.
    Pooling,
    /// The body has no prompt; the request is routed by load.
    Other,
}

impl PromptField {
    pub(super) fn of(path: &str) -> Self {
        match path.split('?').next().unwrap_or(path) {
            "/v1/chat/completions"
            | "/v1/chat/completions/render"
            | "/v1/messages"
            | "/v1/messages/count_tokens" => Self::Chat,
            "/v1/completions" | "/v1/completions/render" => Self::Completions,
            "/v1/responses" | "/v1/responses/compact" | "/v1/responses/input_tokens" => {
                Self::Responses
            }
            "/v1/embeddings" | "/v1/rerank" | "/v1/score" | "/v2/rerank" | "/rerank" | "/score"
            | "/classify" | "/pooling" | "/tokenize" => Self::Pooling,
            _ => Self::Other,
        }
    }

    /// Whether an engine skips its prefix cache for a body with these `fields`.
    fn skips_cache(self, fields: &CacheFields) -> bool {
        match self {
            Self::Completions => fields.skips_for_completions(),
            Self::Chat => fields.skips_for_chat(),
            Self::Pooling => fields.pools_tokens(),
            Self::Responses | Self::Other => false,
        }
    }

    fn reply(self) -> ReplyShape {
        match self {
            Self::Chat | Self::Responses => ReplyShape::Message,
            Self::Completions => ReplyShape::Continuation,
            Self::Pooling | Self::Other => ReplyShape::None,
        }
    }
}

/// Known fields of a body read so far.
#[derive(Default)]
struct BodyFields<'de> {
    model: Option<Cow<'de, str>>,
    stream: bool,
    include_usage: Option<bool>,
    continuous_usage: Option<bool>,
    stream_options_span: Option<(usize, usize)>,
    stream_options_null_span: Option<(usize, usize)>,
    are_options_unclear: bool,
    further: FurtherFields,
    cache: CacheFields,
    user: Option<String>,
    cache_salt: Option<String>,
    has_cache_salt: bool,
    lora_path: Option<&'de RawValue>,
    previous_response: Option<String>,
    session: SessionFields<'de>,
    max_tokens: Option<u32>,
    choices: Option<u32>,
    tools: Option<&'de RawValue>,
    system: Option<Vec<u8>>,
    messages: Option<Vec<u8>>,
    plain: Option<Prompt>,
    batch: PromptBatch,
}

impl BodyFields<'_> {
    fn finish(self, surface: PromptField, text: &str) -> Result<ParsedBody, BodyRejection> {
        let model = match self.model {
            Some(model) if !model.is_empty() => model.into_owned(),
            Some(_) => return Err(wrong_model("model: is empty, expected a model id")),
            None => String::new(),
        };
        let prompt = match (self.messages, self.plain) {
            (_, Some(plain)) => plain,
            (messages, None) => {
                Prompt::Text(with_preamble(self.tools, self.system.as_deref(), messages))
            }
        };
        let insert_at = text.find('{').map_or(0, |brace| brace + 1);
        let prompts = self.batch.prompts.saturating_add(1);
        Ok(ParsedBody {
            choices: self.choices.unwrap_or(1).max(1).saturating_mul(prompts),
            model,
            stream: self.stream,
            include_usage: self.include_usage,
            continuous_usage: self.continuous_usage,
            stream_options_span: self.stream_options_span,
            stream_options_null_span: self.stream_options_null_span,
            are_options_unclear: self.are_options_unclear,
            insert_at,
            further: self.further,
            user: self.user,
            cache_salt: self.cache_salt,
            has_cache_salt: self.has_cache_salt,
            adapter: self.lora_path.map(|path| path.get().to_owned()),
            previous_response: self.previous_response,
            session: self.session.names(),
            max_tokens: self.max_tokens,
            skips_cache: surface.skips_cache(&self.cache),
            truncation: self.cache.truncation(),
            prompt,
            batch: self.batch,
            reply: surface.reply(),
        })
    }

    fn take_stream_options(&mut self, text: &str, raw: &RawValue) {
        let start = raw.get().as_ptr().addr() - text.as_ptr().addr();
        let span = Some((start, start + raw.get().len()));
        (self.include_usage, self.continuous_usage) = (None, None);
        (self.stream_options_span, self.stream_options_null_span) = (None, None);
        self.are_options_unclear = false;
        if raw.get() == "null" {
            self.stream_options_null_span = span;
            return;
        }
        let options = serde_json::from_str::<StreamOptions>(raw.get());
        match options.map_err(|_| LaxError).and_then(StreamOptions::flags) {
            Ok((include_usage, continuous_usage)) => {
                self.include_usage = include_usage;
                self.continuous_usage = continuous_usage;
                self.stream_options_span = span;
            }
            Err(LaxError) => self.are_options_unclear = true,
        }
    }
}

fn wrong_model(message: &str) -> BodyRejection {
    BodyRejection {
        message: message.to_owned(),
        param: Some("model".to_owned()),
    }
}

/// Returns the flattened prompt: tools and system text, followed by the messages, each if present.
fn with_preamble(
    tools: Option<&RawValue>,
    system: Option<&[u8]>,
    messages: Option<Vec<u8>>,
) -> Vec<u8> {
    let mut preamble = Vec::new();
    if let Some(tools) = tools {
        push_framed(&mut preamble, "tools", tools.get().as_bytes());
    }
    if let Some(system) = system {
        push_framed(&mut preamble, "system", system);
    }
    let mut prompt = messages.unwrap_or_default();
    if preamble.is_empty() {
        return prompt;
    }
    // Moved within their buffer, which has room for the whole body: a new one costs page faults.
    let (length, shift) = (prompt.len(), preamble.len());
    prompt.resize(length + shift, 0);
    prompt.copy_within(..length, shift);
    prompt[..shift].copy_from_slice(&preamble);
    prompt
}

/// Visitor of the top-level object of a body.
struct BodyVisitor<'a, 'de> {
    text: &'de str,
    surface: PromptField,
    /// Whether the body is one of Anthropic's API.
    is_anthropic: bool,
    /// Known field that is being read, for error messages.
    field: &'a Cell<Option<&'static str>>,
    found: &'a mut BodyFields<'de>,
}

impl<'de> Visitor<'de> for BodyVisitor<'_, 'de> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        while let Some(Str(key)) = map.next_key()? {
            let known = KNOWN.iter().find(|known| **known == key).copied();
            self.field.set(known);
            match known {
                Some(known) => self.field_value(known, &mut map)?,
                None => {
                    self.found.further.add(&key);
                    if CacheFields::has(&key) {
                        self.found.cache.take(&key, &map.next_value()?);
                    } else if SessionFields::has(&key) {
                        self.found.session.take(&key, map.next_value()?);
                    } else {
                        map.next_value::<IgnoredAny>()?;
                    }
                }
            }
            self.field.set(None);
        }
        Ok(())
    }
}

/// Names of the fields that the router reads on at least one path, except those of [`CacheFields`].
const KNOWN: [&str; 22] = [
    "model",
    "messages",
    "stream",
    "stream_options",
    "user",
    "cache_salt",
    "lora_path",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "n",
    "best_of",
    "prompt",
    "input",
    "tools",
    "system",
    "instructions",
    "previous_response_id",
    "query",
    "queries",
    "text_1",
    "data_1",
];

/// Whether the router reads the field `name` on at least one path, not counting fields that only
/// change how an engine uses its cache or truncates the prompt.
#[must_use]
pub fn is_read(name: &str) -> bool {
    KNOWN.contains(&name)
}

impl<'de> BodyVisitor<'_, 'de> {
    fn field_value<A: MapAccess<'de>>(
        &mut self,
        field: &'static str,
        map: &mut A,
    ) -> Result<(), A::Error> {
        let found = &mut *self.found;
        match (field, self.surface) {
            ("model", _) => {
                let model = map.next_value::<Option<Str<'de>>>()?;
                found.model = model.map(|Str(model)| model);
            }
            ("stream", _) => {
                let flag = map.next_value::<LaxValue>()?.flag();
                found.stream = flag == Ok(Some(true));
            }
            ("stream_options", _) => {
                let raw = map.next_value::<&'de RawValue>()?;
                found.take_stream_options(self.text, raw);
            }
            ("user", _) => found.user = map.next_value()?,
            ("cache_salt", _) => {
                found.cache_salt = map.next_value()?;
                found.has_cache_salt = true;
            }
            ("lora_path", _) => {
                let raw = map.next_value::<&'de RawValue>()?;
                found.lora_path = (raw.get() != "null").then_some(raw);
            }
            ("previous_response_id", PromptField::Responses) => {
                found.previous_response = map.next_value()?;
            }
            ("max_tokens" | "max_completion_tokens" | "max_output_tokens", _) => {
                // A `null` does not undo a number given under another name.
                let tokens = map.next_value::<LaxValue>()?.count();
                found.max_tokens = tokens.ok().flatten().or(found.max_tokens);
            }
            ("n" | "best_of", PromptField::Chat | PromptField::Completions) => {
                let choices = map.next_value::<LaxValue>()?.count();
                found.choices = choices.ok().flatten().max(found.choices);
            }
            ("tools", PromptField::Chat | PromptField::Responses | PromptField::Pooling) => {
                let raw = map.next_value::<&'de RawValue>()?;
                found.tools = (raw.get() != "null").then_some(raw);
            }
            ("system", PromptField::Chat) | ("instructions", PromptField::Responses) => {
                let mut text = Content::default();
                let is_some = map.next_value_seed(ContentText { out: &mut text })?;
                let is_bare = field == "system" && text.drop_attributions();
                found.system = (is_some && !is_bare).then_some(text.bytes);
            }
            ("messages", PromptField::Chat | PromptField::Pooling) => {
                let mut out = found.fresh_messages(self.text.len());
                map.next_value_seed(Messages {
                    out: &mut out,
                    drops_attribution: self.is_anthropic,
                })?;
                found.messages = Some(out);
            }
            ("input", PromptField::Responses) => {
                let mut out = found.fresh_messages(self.text.len());
                map.next_value_seed(Input { out: &mut out })?;
                found.messages = Some(out);
            }
            ("prompt", PromptField::Completions)
            | (
                "prompt" | "input" | "query" | "queries" | "text_1" | "data_1",
                PromptField::Pooling,
            ) => {
                found.batch = PromptBatch::default();
                found.plain = map.next_value_seed(CompletionPrompt {
                    batch: &mut found.batch,
                })?;
            }
            _ => drop(map.next_value::<IgnoredAny>()?),
        }
        Ok(())
    }
}

impl BodyFields<'_> {
    /// Returns an empty buffer for flattened messages. Reuses that of an earlier `messages` field.
    fn fresh_messages(&mut self, body_bytes: usize) -> Vec<u8> {
        match self.messages.take() {
            Some(mut earlier) => {
                earlier.clear();
                earlier
            }
            None => Vec::with_capacity(body_bytes),
        }
    }
}

/// The fields of `stream_options` that the router reads.
struct StreamOptions {
    include_usage: LaxValue,
    continuous_usage: LaxValue,
}

impl StreamOptions {
    fn flags(self) -> Result<(Option<bool>, Option<bool>), LaxError> {
        Ok((self.include_usage.flag()?, self.continuous_usage.flag()?))
    }
}

impl<'de> Deserialize<'de> for StreamOptions {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OptionsVisitor;
        impl<'de> Visitor<'de> for OptionsVisitor {
            type Value = StreamOptions;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object or null")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut options = StreamOptions {
                    include_usage: LaxValue::Null,
                    continuous_usage: LaxValue::Null,
                };
                while let Some(Str(key)) = map.next_key()? {
                    match &*key {
                        "include_usage" => options.include_usage = map.next_value()?,
                        "continuous_usage_stats" => options.continuous_usage = map.next_value()?,
                        _ => drop(map.next_value::<IgnoredAny>()?),
                    }
                }
                Ok(options)
            }
        }
        deserializer.deserialize_map(OptionsVisitor)
    }
}
