//! Chats that together need several times the engines' cache, with early and late next turns.

use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};

/// Maximum number of turns of a chat, after which a new chat replaces it.
const TURNS_MAX: usize = 6;
/// Number of different system prompts.
const SYSTEMS: u64 = 3;
/// Number of words in a system prompt.
const SYSTEM_WORDS: usize = 120;
/// Range of the number of words in a message.
const MESSAGE_WORDS: std::ops::Range<usize> = 30..130;
/// Range of the number of tokens in a response.
const ANSWER_TOKENS: std::ops::Range<u32> = 8..40;
/// Average number of tokens of a chat that is half way through its turns.
const CHAT_TOKENS: u64 = 450;

/// Vocabulary of messages and responses. With a leading space, each word is one token of most
/// tokenizers.
pub(super) const WORDS: [&str; 24] = [
    "time", "people", "water", "house", "light", "number", "country", "question", "school",
    "family", "morning", "system", "company", "problem", "service", "market", "history", "picture",
    "summer", "letter", "window", "garden", "moment", "reason",
];

/// The next turn of a chat, ready to be sent.
#[derive(Debug)]
pub(super) struct Turn {
    pub(super) chat: usize,
    pub(super) body: Value,
}

/// All chats of a run with their messages.
#[derive(Debug)]
pub(super) struct Chats {
    model: String,
    /// Token ids that responses consist of. If empty, the model decides.
    answer_tokens: Vec<u64>,
    random: SmallRng,
    /// Number that distinguishes this run's texts from those of other runs.
    run: u64,
    messages: Vec<Vec<Value>>,
    /// Chats without a request in flight, each with the time of its last response, oldest first.
    idle: Vec<(Instant, usize)>,
    /// Minimum time from a response to the next turn.
    pause: Duration,
}

impl Chats {
    /// Creates chats that need `tokens` tokens in total.
    pub(super) fn new(
        model: &str,
        answer_tokens: &[u64],
        (tokens, run): (u64, u64),
        pause: Duration,
    ) -> Self {
        let count = usize::try_from(tokens / CHAT_TOKENS)
            .unwrap_or(usize::MAX)
            .max(16);
        Self {
            model: model.to_owned(),
            answer_tokens: answer_tokens.to_vec(),
            random: SmallRng::seed_from_u64(run),
            run,
            messages: vec![Vec::new(); count],
            idle: (0..count).map(|chat| (Instant::now(), chat)).collect(),
            pause,
        }
    }

    /// Returns the next turn of a random chat. The more recent the chat's last response, the
    /// likelier it is.
    ///
    /// # Panics
    /// If every chat waits for a response.
    pub(super) fn next(&mut self) -> Turn {
        let now = Instant::now();
        let ready = self.idle.partition_point(|(at, _)| *at + self.pause <= now);
        let ready = ready.max(1);
        let back = self.random.random::<f64>().powi(3) * ready as f64;
        let place = ready - 1 - (back as usize).min(ready - 1);
        let (_, chat) = self.idle.remove(place);
        if self.messages[chat].len() >= 2 * TURNS_MAX {
            self.messages[chat].clear();
        }
        if self.messages[chat].is_empty() {
            let system = self.random.random_range(0..SYSTEMS);
            let mut voice = SmallRng::seed_from_u64(self.run << 8 | system);
            let text = format!("{} {}", self.run, words(&mut voice, SYSTEM_WORDS));
            self.messages[chat].push(json!({ "role": "system", "content": text }));
        }
        let count = self.random.random_range(MESSAGE_WORDS);
        let text = words(&mut self.random, count);
        self.messages[chat].push(json!({ "role": "user", "content": text }));
        let mut body = json!({
            "model": self.model,
            "messages": self.messages[chat],
            "max_tokens": self.random.random_range(ANSWER_TOKENS),
            "temperature": 1.0,
            "seed": self.random.random::<u32>(),
        });
        if !self.answer_tokens.is_empty() {
            body["allowed_token_ids"] = json!(self.answer_tokens);
        }
        Turn { chat, body }
    }

    /// Records the response to a chat's turn.
    pub(super) fn answered(&mut self, chat: usize, answer: &str) {
        self.messages[chat].push(json!({ "role": "assistant", "content": answer }));
        self.idle.push((Instant::now(), chat));
    }

    /// Removes a chat's turn that got no response. Its next turn is a different one.
    pub(super) fn failed(&mut self, chat: usize) {
        self.messages[chat].pop();
        self.idle.push((Instant::now(), chat));
    }
}

fn words(random: &mut SmallRng, count: usize) -> String {
    let word = |_| WORDS[random.random_range(0..WORDS.len())];
    let words: Vec<&str> = (0..count).map(word).collect();
    words.join(" ")
}
