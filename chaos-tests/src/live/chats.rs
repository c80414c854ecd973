//! Chats that together need several times the engines' cache, with early and late next turns.

use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::seq::IndexedRandom as _;
use rand::{Rng, SeedableRng};
use serde_json::{Map, Value, json};

use super::endpoints::{Said, Way, call_and_result};

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
    pub(super) way: Way,
    pub(super) body: Value,
}

/// A chat with everything that was said in it.
#[derive(Debug)]
struct Chat {
    way: Way,
    turns: usize,
    messages: Vec<Value>,
    /// All that was said, for [`Way::Text`].
    text: String,
    /// All that was said, for [`Way::Ids`].
    ids: Vec<u64>,
}

/// The tokens of responses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answers {
    /// What the model says. An untrained model says texts that often become other tokens when they
    /// come back.
    Model,
    /// Words that stay the same tokens.
    Words,
}

/// All chats of a run.
#[derive(Debug)]
pub(super) struct Chats {
    model: String,
    /// Token ids of words.
    words: Vec<u64>,
    answers: Answers,
    ways: &'static [Way],
    random: SmallRng,
    /// Number that distinguishes this run's texts from those of other runs.
    run: u64,
    chats: Vec<Chat>,
    /// Chats without a request in flight, each with the time of its last response, oldest first.
    idle: Vec<(Instant, usize)>,
    /// Minimum time from a response to the next turn.
    pause: Duration,
}

impl Chats {
    /// Creates chats that need `tokens` tokens in total.
    pub(super) fn new(
        model: &str,
        (answers, words): (Answers, &[u64]),
        ways: &'static [Way],
        (tokens, run): (u64, u64),
        pause: Duration,
    ) -> Self {
        let count = usize::try_from(tokens / CHAT_TOKENS)
            .unwrap_or(usize::MAX)
            .max(16);
        Self {
            model: model.to_owned(),
            words: words.to_vec(),
            answers,
            ways,
            random: SmallRng::seed_from_u64(run),
            run,
            chats: (0..count).map(|_| Chat::new(Way::Chat)).collect(),
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
        let (_, number) = self.idle.remove(place);
        let turns = self.chats[number].turns;
        if turns == 0 || turns >= TURNS_MAX {
            self.chats[number] = self.begin();
        }
        let count = self.random.random_range(MESSAGE_WORDS);
        let text = words(&mut self.random, count);
        let limit = self.random.random_range(ANSWER_TOKENS);
        let chat = &mut self.chats[number];
        chat.turns += 1;
        let mut body = match chat.way {
            Way::Ids => {
                let word = |_| self.words[self.random.random_range(0..self.words.len())];
                chat.ids.extend((0..count).map(word));
                plain(json!(chat.ids), limit)
            }
            Way::Text => {
                chat.text.push_str(&format!("\n{text}"));
                plain(json!(chat.text), limit)
            }
            way => {
                let message = json!({ "role": "user", "content": text });
                chat.messages.push(message);
                way.chat_body(&chat.messages, limit)
            }
        };
        body.insert("model".to_owned(), json!(self.model));
        body.insert("temperature".to_owned(), json!(1.0));
        if self.random.random_bool(0.5) {
            chat.way.stream(&mut body);
        }
        if !self.words.is_empty() && self.answers == Answers::Words {
            // Both vLLM and SGLang add these to the logits.
            let pairs = self.words.iter().map(|id| (id.to_string(), json!(100)));
            body.insert("logit_bias".to_owned(), pairs.collect());
        }
        Turn {
            chat: number,
            way: chat.way,
            body: Value::Object(body),
        }
    }

    /// Begins a chat in a random way, with one of the system prompts.
    fn begin(&mut self) -> Chat {
        let mut way = *self.ways.choose(&mut self.random).unwrap_or(&Way::Chat);
        if way == Way::Ids && self.words.is_empty() {
            way = Way::Text;
        }
        let system = self.random.random_range(0..SYSTEMS);
        let mut voice = SmallRng::seed_from_u64(self.run << 8 | system);
        let mut chat = Chat::new(way);
        chat.text = format!("{} {}", self.run, words(&mut voice, SYSTEM_WORDS));
        if !self.words.is_empty() {
            let word = |_| self.words[voice.random_range(0..self.words.len())];
            chat.ids = (0..SYSTEM_WORDS).map(word).collect();
        }
        chat.messages = vec![json!({ "role": "system", "content": chat.text })];
        chat
    }

    /// Records the response to a chat's turn.
    pub(super) fn answered(&mut self, number: usize, said: &Said) {
        let calls = self.random.random_bool(0.5);
        let query = words(&mut self.random, SYSTEM_WORDS / 4);
        let chat = &mut self.chats[number];
        let text = said.text.as_str();
        chat.text.push_str(text);
        chat.ids.extend(&said.ids);
        if chat.way == Way::Tools && calls {
            chat.messages
                .extend(call_and_result(text, &query, chat.turns));
        } else if !chat.way.is_plain() {
            let message = json!({ "role": "assistant", "content": text });
            chat.messages.push(message);
        }
        self.idle.push((Instant::now(), number));
    }

    /// Ends a chat of which a turn got no response.
    pub(super) fn failed(&mut self, number: usize) {
        self.chats[number].turns = 0;
        self.idle.push((Instant::now(), number));
    }
}

impl Chat {
    fn new(way: Way) -> Self {
        Self {
            way,
            turns: 0,
            messages: Vec::new(),
            text: String::new(),
            ids: Vec::new(),
        }
    }
}

/// Returns the body of a request of `/v1/completions`.
fn plain(prompt: Value, max_tokens: u32) -> Map<String, Value> {
    let mut body = Map::new();
    body.insert("prompt".to_owned(), prompt);
    body.insert("max_tokens".to_owned(), json!(max_tokens));
    // Only vLLM does so; other engines ignore it.
    body.insert("return_token_ids".to_owned(), json!(true));
    body
}

fn words(random: &mut SmallRng, count: usize) -> String {
    let word = |_| WORDS[random.random_range(0..WORDS.len())];
    let words: Vec<&str> = (0..count).map(word).collect();
    words.join(" ")
}
