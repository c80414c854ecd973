//! Random requests for streams, all of which can be continued at another engine.

use rand::rngs::SmallRng;
use rand::seq::IndexedRandom as _;
use rand::{Rng as _, SeedableRng as _};
use serde_json::{Value, json};

use super::received::RequestedUsage;

/// Number of users.
pub(super) const USERS: u64 = 5;
/// Output tokens of a request.
const TOKENS: std::ops::RangeInclusive<u32> = 40..=400;
/// Beginning of some prompts, of several blocks.
const SYSTEM: &str = "You keep the log of a lighthouse. Write what the keeper sees, in plain words \
    and in the order of the night: ships, weather, birds, the lamp and its oil. Leave nothing out. ";
/// Pieces of prompts; some need escapes in JSON, and some have several bytes per character.
const PIECES: &[&str] = &[
    "lamp ",
    "a \"quoted\" ship ",
    "back\\slash ",
    "line\nbreak ",
    "tab\t",
    "Straße ",
    "灯台 ",
    "🦊 ",
    "abc def ",
    "oil, ",
    "</s> ",
    "\u{e9}t\u{e9} ",
    "x",
];

/// A request for a stream.
#[derive(Debug, Clone)]
pub(super) struct StreamRequest {
    pub(super) path: &'static str,
    pub(super) user: String,
    pub(super) usage: RequestedUsage,
    body: Value,
}

impl StreamRequest {
    /// Draws the request with this number, whose prompt no other request has.
    pub(super) fn draw(seed: u64, number: u64) -> Self {
        let mut random = SmallRng::seed_from_u64(seed ^ number.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let is_chat = random.random();
        let most = random.random_range(TOKENS);
        let mut body = match is_chat {
            true => json!({ "messages": messages(number, &mut random) }),
            false => json!({ "prompt": prompt(number, &mut random) }),
        };
        let limit = match is_chat && random.random() {
            true => "max_completion_tokens",
            false => "max_tokens",
        };
        body[limit] = most.into();
        body["model"] = "emulated".into();
        body["stream"] = true.into();
        let usage = *[
            RequestedUsage::None,
            RequestedUsage::Last,
            RequestedUsage::All,
        ]
        .choose(&mut random)
        .expect("three of them");
        match usage {
            RequestedUsage::None => {}
            RequestedUsage::Last => body["stream_options"] = json!({ "include_usage": true }),
            RequestedUsage::All => {
                body["stream_options"] =
                    json!({ "include_usage": true, "continuous_usage_stats": true });
            }
        }
        Self {
            path: match is_chat {
                true => "/v1/chat/completions",
                false => "/v1/completions",
            },
            user: format!("user-{}", number % USERS),
            usage,
            body,
        }
    }

    /// Returns whether the request is a chat.
    pub(super) fn is_chat(&self) -> bool {
        self.body.get("messages").is_some()
    }

    /// Returns the body of the request, of a client that has received this text, if any.
    pub(super) fn body(&self, received: Option<&str>) -> String {
        let mut body = self.body.clone();
        if let Some(received) = received {
            body["quorate_received"] = received.into();
        }
        body.to_string()
    }

    /// Returns the body of the same request with its usage in the last chunk only.
    pub(super) fn undisturbed_body(&self) -> String {
        let mut body = self.body.clone();
        body["stream_options"] = json!({ "include_usage": true });
        body.to_string()
    }
}

fn messages(number: u64, random: &mut SmallRng) -> Value {
    let mut messages = Vec::new();
    if random.random() {
        messages.push(json!({ "role": "system", "content": SYSTEM }));
    }
    if random.random() {
        messages.push(json!({ "role": "user", "content": "Good evening." }));
        messages.push(json!({ "role": "assistant", "content": "The lamp is lit. " }));
    }
    let text = prompt(number, random);
    let content = match random.random_ratio(1, 3) {
        true => json!([{ "type": "text", "text": text }]),
        false => json!(text),
    };
    messages.push(json!({ "role": "user", "content": content }));
    messages.into()
}

fn prompt(number: u64, random: &mut SmallRng) -> String {
    let beginning = match random.random() {
        true => SYSTEM,
        false => "",
    };
    let mut text = format!("{beginning}Night {number}: ");
    for _ in 0..random.random_range(1..120) {
        text.push_str(PIECES.choose(random).expect("there are pieces"));
    }
    text
}
