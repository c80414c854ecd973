//! Reads the fields that change how an engine uses its prefix cache or the prompt.
//!
//! vLLM computes a prompt from its first token if it must return the prompt's log probabilities or
//! if the task pools over all tokens. Such a prompt does not use cached blocks. vLLM truncates a
//! prompt if `truncate_prompt_tokens` is set. Other engines ignore the fields or do the same.

use super::ReplyShape;
use super::pydantic_lax::LaxValue;

/// Truncation of a prompt by the engine: which part of a longer prompt it keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Truncation {
    /// Maximum number of prompt tokens that the engine keeps.
    pub tokens: u32,
    /// Whether the engine's context length is the maximum, as `-1` requests. `tokens` is then
    /// `u32::MAX` until the length is looked up.
    pub is_context: bool,
    /// Whether the end is kept, from the request. `None` for the tokenizer's default, which keeps
    /// the end if text is generated.
    pub keeps_end: Option<bool>,
}

/// Number of special tokens that a tokenizer adds around the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct SpecialTokenCount {
    pub(crate) before: usize,
    pub(crate) behind: usize,
}

impl Truncation {
    /// Returns the truncation for engines whose context length, in tokens, is `context`; `None` if
    /// the maximum is the context length and that is unknown. vLLM reserves one token if the
    /// request sets an output length.
    pub(super) fn within(mut self, context: Option<u64>, wants_output: bool) -> Option<Self> {
        if self.is_context {
            let context = u32::try_from(context?).unwrap_or(u32::MAX);
            self.tokens = context.saturating_sub(u32::from(wants_output));
        }
        Some(self)
    }

    /// Truncates `ids` and returns whether anything was cut. A tokenizer's default truncation keeps
    /// the special tokens `around` the text; truncation at a requested side does not.
    pub(crate) fn cut(
        self,
        ids: &mut Vec<u32>,
        reply: ReplyShape,
        around: SpecialTokenCount,
    ) -> bool {
        let kept = self.tokens as usize;
        if ids.len() <= kept {
            return false;
        }
        let around = match self.keeps_end {
            Some(_) => SpecialTokenCount::default(),
            None => around,
        };
        let keeps_end = self.keeps_end.unwrap_or(reply != ReplyShape::None);
        let text = around.before..ids.len() - around.behind;
        let room = kept.saturating_sub(around.before + around.behind);
        let cut = text.len().saturating_sub(room);
        let cut = match keeps_end {
            true => text.start..text.start + cut,
            false => text.end - cut..text.end,
        };
        ids.drain(cut);
        true
    }
}

/// Values read so far of the fields that affect cache use.
#[derive(Debug, Clone, Default)]
pub(super) struct CacheFields {
    prompt_logprobs: bool,
    echo: bool,
    /// Whether `logprobs` is set.
    has_logprobs: bool,
    /// Whether `top_logprobs` is present and null.
    has_no_top_logprobs: bool,
    pools_tokens: bool,
    /// Number of tokens to keep; `-1` for as many as the engine accepts. `None` without truncation.
    tokens: Option<i64>,
    keeps_end: Option<bool>,
}

impl CacheFields {
    /// Whether `field` affects cache use, so that [`Self::take`] reads it.
    pub(super) fn has(field: &str) -> bool {
        matches!(
            field,
            "prompt_logprobs"
                | "prompt_logprob_token_ids"
                | "echo"
                | "logprobs"
                | "top_logprobs"
                | "task"
                | "truncate_prompt_tokens"
                | "truncation_side"
                | "truncation"
        )
    }

    pub(super) fn take(&mut self, field: &str, value: &LaxValue) {
        let is_there = *value != LaxValue::Null;
        match field {
            "prompt_logprobs" | "prompt_logprob_token_ids" => self.prompt_logprobs |= is_there,
            "echo" => self.echo = value.flag() == Ok(Some(true)),
            "logprobs" => self.has_logprobs = is_there,
            "top_logprobs" => self.has_no_top_logprobs = !is_there,
            "task" => {
                let is_of_tokens = |task: &str| matches!(task, "token_embed" | "token_classify");
                self.pools_tokens = matches!(value, LaxValue::Text(task) if is_of_tokens(task));
            }
            "truncate_prompt_tokens" => {
                self.tokens = match value {
                    LaxValue::Number(-1.0) => Some(-1),
                    LaxValue::Text(text) if text.trim() == "-1" => Some(-1),
                    value => value.count().ok().flatten().map(i64::from),
                };
            }
            // The field of `/v1/responses`. Its default is `disabled`.
            "truncation" if *value == LaxValue::Text("auto".to_owned()) => self.tokens = Some(-1),
            "truncation_side" => {
                self.keeps_end = match value {
                    LaxValue::Text(side) if side == "left" => Some(true),
                    LaxValue::Text(side) if side == "right" => Some(false),
                    _ => None,
                };
            }
            _ => {}
        }
    }

    /// Whether a completion requests log probabilities of the prompt, so that it skips the cache.
    pub(super) fn skips_for_completions(&self) -> bool {
        self.prompt_logprobs || self.echo && self.has_logprobs
    }

    /// Whether a chat requests log probabilities of the prompt. `top_logprobs` is 0 by default.
    pub(super) fn skips_for_chat(&self) -> bool {
        self.prompt_logprobs || self.echo && !self.has_no_top_logprobs
    }

    /// Whether the request's task pools over all tokens.
    pub(super) fn pools_tokens(&self) -> bool {
        self.pools_tokens
    }

    pub(super) fn truncation(&self) -> Option<Truncation> {
        self.tokens.map(|tokens| Truncation {
            tokens: u32::try_from(tokens).unwrap_or(u32::MAX),
            is_context: tokens < 0,
            keeps_end: self.keeps_end,
        })
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::prompt::{ParsedBody, parse};

    fn read(path: &str, fields: &str) -> ParsedBody {
        let body = format!(r#"{{"model":"m","prompt":"x","messages":[],"input":"x"{fields}}}"#);
        parse(path, &Bytes::from(body)).unwrap()
    }

    #[test]
    fn requests_for_prompt_logprobs_skip_the_cache() {
        let skips = |path, fields| read(path, fields).skips_cache;
        let (chat, completions) = ("/v1/chat/completions", "/v1/completions");
        for path in [chat, completions] {
            assert!(skips(path, r#","prompt_logprobs":0"#));
            assert!(skips(path, r#","prompt_logprob_token_ids":[3]"#));
            assert!(!skips(path, r#","prompt_logprobs":null,"logprobs":true"#));
        }
        assert!(skips(completions, r#","echo":true,"logprobs":1"#));
        assert!(!skips(completions, r#","echo":true"#));
        assert!(!skips(completions, r#","logprobs":1"#));
        assert!(skips(chat, r#","echo":true"#));
        assert!(!skips(chat, r#","echo":true,"top_logprobs":null"#));
        assert!(skips("/pooling", r#","task":"token_embed""#));
        assert!(!skips("/pooling", r#","task":"embed""#));
    }

    #[test]
    fn prompts_are_truncated_like_the_engine_does() {
        let around = SpecialTokenCount {
            before: 1,
            behind: 1,
        };
        let generated = ReplyShape::Continuation;
        for (keeps_end, reply, tokens, expected) in [
            (None, generated, 4, &[0, 7, 8, 9][..]),
            (None, ReplyShape::None, 4, &[0, 1, 2, 9]),
            (Some(true), generated, 4, &[6, 7, 8, 9]),
            (Some(false), generated, 4, &[0, 1, 2, 3]),
            (Some(true), generated, 0, &[]),
            (None, generated, 1, &[0, 9]),
        ] {
            let mut ids: Vec<u32> = (0..10).collect();
            let truncation = Truncation {
                tokens,
                is_context: false,
                keeps_end,
            };
            assert!(truncation.cut(&mut ids, reply, around));
            assert_eq!(ids, expected, "{keeps_end:?} {tokens}");
        }
        let mut short = vec![1, 2];
        let whole = Truncation {
            tokens: 2,
            is_context: false,
            keeps_end: None,
        };
        assert!(!whole.cut(&mut short, generated, around));
        let truncation = |fields| read("/v1/completions", fields).truncation;
        let left = truncation(r#","truncate_prompt_tokens":9,"truncation_side":"left""#).unwrap();
        assert_eq!((left.tokens, left.keeps_end), (9, Some(true)));
    }

    #[test]
    fn truncation_to_minus_one_means_the_engines_length() {
        let path = "/v1/completions";
        let asked = read(path, r#","truncate_prompt_tokens":-1"#).truncation;
        let asked = asked.unwrap();
        assert!(
            asked.is_context
                && !asked.cut(
                    &mut vec![1; 9],
                    ReplyShape::None,
                    SpecialTokenCount::default()
                )
        );
        let kept = |wants_output| asked.within(Some(4096), wants_output).map(|it| it.tokens);
        assert_eq!((kept(false), kept(true)), (Some(4096), Some(4095)));
        assert_eq!(asked.within(None, false), None);
        let told = read(path, r#","truncate_prompt_tokens":7"#).truncation;
        assert_eq!(told.unwrap().within(None, true), told);
        let auto = read("/v1/responses", r#","truncation":"auto""#).truncation;
        assert_eq!(auto, Some(asked));
        assert_eq!(
            read("/v1/responses", r#","truncation":"disabled""#).truncation,
            None
        );
    }
}
