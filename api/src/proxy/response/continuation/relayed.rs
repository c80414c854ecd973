//! What a client has received of a streamed answer, as far as another engine needs it to go on.

use super::ContinueRejection;
use crate::proxy::response::answer_usage::AnswerDelta;
use crate::routing::Usage;

/// Maximum length of the text of one token on average, in bytes, for the bound on the text.
const TOKEN_BYTES_MAX: u64 = 16;

/// Text and properties of the answer that a client has received so far.
#[derive(Debug)]
pub(in crate::proxy) struct RelayedText {
    /// Maximum number of tokens that are kept.
    tokens_max: u64,
    /// Text of the answer.
    text: String,
    /// Number of events with text: the number of tokens, if the engine does not report it.
    texts: u64,
    /// Number of tokens up to the last text that is more than white space.
    kept_tokens: u64,
    /// Highest counts that the engine reported; `None` without a report.
    usage: Option<Usage>,
    /// The members `id` and `created` of the first event, as JSON; empty before.
    pub(super) id: Box<[u8]>,
    pub(super) created: Box<[u8]>,
    /// What makes the answer impossible to continue, if anything.
    obstacle: Option<ContinueRejection>,
    /// Whether the answer is complete, even if the stream's end is missing.
    is_complete: bool,
    /// Whether the client has received an event.
    has_begun: bool,
}

/// Properties of an answer besides its text, as far as another replica needs them to go on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::proxy) struct ReceivedAnswer {
    /// Number of output tokens, and of those up to the last that is more than white space.
    pub(super) tokens: u32,
    pub(super) kept_tokens: u32,
    /// Number of prompt tokens; 0 if no engine has reported it.
    pub(super) prompt_tokens: u32,
    /// Whether the answer's only choice has ended.
    pub(in crate::proxy) is_ended: bool,
    /// The members `id` and `created` of the events, as JSON.
    pub(super) id: Box<[u8]>,
    pub(super) created: Box<[u8]>,
}

impl ReceivedAnswer {
    /// Returns the usage of the answer so far.
    pub(in crate::proxy) fn usage(&self) -> Usage {
        Usage {
            prompt_tokens: self.prompt_tokens.into(),
            cached_tokens: None,
            completion_tokens: self.tokens.into(),
        }
    }
}

impl RelayedText {
    /// Creates an answer without output, of which at most `tokens_max` tokens are kept.
    pub(in crate::proxy) fn new(tokens_max: u32) -> Self {
        Self {
            tokens_max: tokens_max.into(),
            text: String::new(),
            texts: 0,
            kept_tokens: 0,
            usage: None,
            id: Box::default(),
            created: Box::default(),
            obstacle: None,
            is_complete: false,
            has_begun: false,
        }
    }

    /// Creates an answer of which a client has received `text`, with these properties.
    pub(in crate::proxy) fn received(tokens_max: u32, answer: &ReceivedAnswer, text: &str) -> Self {
        let usage = answer.usage();
        let mut relayed = Self {
            text: text.to_owned(),
            texts: answer.tokens.into(),
            kept_tokens: answer.kept_tokens.into(),
            usage: (usage.prompt_tokens > 0).then_some(usage),
            id: answer.id.clone(),
            created: answer.created.clone(),
            is_complete: answer.is_ended,
            has_begun: true,
            ..Self::new(tokens_max)
        };
        if relayed.is_too_long() {
            relayed.give_up(ContinueRejection::TooLong);
        }
        relayed
    }

    /// Notes an event that the client receives.
    pub(in crate::proxy) fn note(&mut self, event: &AnswerDelta<'_>) {
        if self.id.is_empty() && !event.id.is_empty() {
            self.id = event.id.into();
            self.created = event.created.into();
        }
        self.has_begun = true;
        self.is_complete |= event.ends_choice;
        if let Some(usage) = event.usage {
            let known = self.usage.get_or_insert(usage);
            known.prompt_tokens = known.prompt_tokens.max(usage.prompt_tokens);
            known.completion_tokens = known.completion_tokens.max(usage.completion_tokens);
            known.cached_tokens = known.cached_tokens.max(usage.cached_tokens);
        }
        if self.obstacle.is_some() {
            return;
        }
        if event.has_other_output {
            self.give_up(ContinueRejection::OtherOutput);
        } else if let Some(text) = &event.text {
            self.text.push_str(text);
            self.texts += 1;
            if !text.trim_ascii().is_empty() {
                self.kept_tokens = self.tokens();
            }
            if self.is_too_long() {
                self.give_up(ContinueRejection::TooLong);
            }
        }
    }

    fn is_too_long(&self) -> bool {
        let bytes_max = self.tokens_max.saturating_mul(TOKEN_BYTES_MAX);
        self.tokens() > self.tokens_max || self.text.len() as u64 > bytes_max
    }

    fn give_up(&mut self, obstacle: ContinueRejection) {
        self.obstacle = Some(obstacle);
        self.text = String::new();
    }

    /// Returns the text.
    ///
    /// # Errors
    /// Returns the obstacle if the answer is more than a text of bounded length.
    pub(in crate::proxy) fn text(&self) -> Result<&str, ContinueRejection> {
        match &self.obstacle {
            Some(obstacle) => Err(obstacle.clone()),
            None => Ok(&self.text),
        }
    }

    /// Returns what another replica needs to go on; `None` if the answer cannot be continued. Without
    /// a count of the prompt, nothing would show whether the next engine goes on with a chat.
    pub(super) fn properties(&self, is_chat: bool) -> Option<ReceivedAnswer> {
        let text = self.text().ok()?;
        let prompt_tokens = self.prompt_tokens();
        if is_chat && prompt_tokens.is_none() && !text.is_empty() {
            return None;
        }
        let count = |count: u64| u32::try_from(count).ok();
        Some(ReceivedAnswer {
            tokens: count(self.tokens())?,
            kept_tokens: count(self.kept_tokens)?,
            prompt_tokens: count(prompt_tokens.unwrap_or(0))?,
            is_ended: self.is_complete,
            id: self.id.clone(),
            created: self.created.clone(),
        })
    }

    /// Returns the part of `text` that the next engine is sent. Some chat templates remove white
    /// space at the end of a message, so it is left to the engine to generate it again.
    pub(super) fn kept(text: &str, is_chat: bool) -> &str {
        if is_chat { text.trim_end() } else { text }
    }

    /// Returns the number of output tokens, as reported or else by the number of events.
    pub(in crate::proxy) fn tokens(&self) -> u64 {
        let reported = self.usage.map_or(0, |usage| usage.completion_tokens);
        if reported > 0 { reported } else { self.texts }
    }

    /// Returns the number of output tokens without those of white space at the end.
    pub(super) fn kept_tokens(&self) -> u64 {
        self.kept_tokens
    }

    /// Returns the number of prompt tokens; `None` if no engine reported it.
    pub(super) fn prompt_tokens(&self) -> Option<u64> {
        let reported = self.usage.map(|usage| usage.prompt_tokens);
        reported.filter(|tokens| *tokens > 0)
    }

    /// Whether the client has received an event.
    pub(in crate::proxy) fn has_begun(&self) -> bool {
        self.has_begun
    }

    /// Whether the last token is more than white space. Behind one of white space, engines go on
    /// less surely.
    pub(in crate::proxy) fn ends_in_a_word(&self) -> bool {
        self.kept_tokens > 0 && self.kept_tokens == self.tokens()
    }

    /// Returns the usage that the engines reported; `None` without a report.
    pub(super) fn usage(&self) -> Option<Usage> {
        self.usage
    }

    /// Whether nothing but the end of the stream is missing.
    pub(in crate::proxy) fn is_complete(&self) -> bool {
        self.is_complete
    }
}
