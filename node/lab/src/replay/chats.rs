//! A workload of chats: several users, each with chats that grow turn by turn, on system prompts
//! that many of them share. The next turn of a chat waits for the previous response.
//!
//! A new chat replaces each one that ends, and the first ones end after different numbers of turns.
//! The load is thus soon stationary: measurements over a few hundred requests are comparable with
//! later ones.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::sync::Arc;

use bytes::Bytes;
use serde_json::Value;

use super::text::passage;

/// Bit that separates the ids of system prompts from those of messages.
const SYSTEM_IDS: u64 = 1 << 63;

/// Sizes of the chat workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChatsOptions {
    /// Number of users, each with about the same number of chats.
    pub users: u32,
    /// Number of chats that are open at any time.
    pub chats: u32,
    /// Number of distinct system prompts.
    pub systems: u32,
    /// Length of a system prompt, in bytes.
    pub system_bytes: usize,
    /// Length of a user's message, in bytes.
    pub message_bytes: usize,
    /// Number of output tokens per turn.
    pub reply_tokens: u32,
    /// Number of turns of a chat, after which a new chat replaces it.
    pub turns: u32,
    /// Seed of the texts.
    pub seed: u64,
}

impl Default for ChatsOptions {
    fn default() -> Self {
        Self {
            users: 6,
            chats: 48,
            systems: 3,
            system_bytes: 2048,
            message_bytes: 256,
            reply_tokens: 32,
            turns: 8,
            seed: 0,
        }
    }
}

/// State of all chats of a workload.
#[derive(Debug)]
pub struct Chats {
    options: ChatsOptions,
    chats: Vec<Chat>,
    /// Indices of the chats that are ready for their next turn, longest waiting first.
    idle: VecDeque<usize>,
    next_topic: u64,
}

#[derive(Debug)]
struct Chat {
    user: Arc<str>,
    system: u64,
    topic: u64,
    turn: u32,
    last_turn: u32,
    /// Messages so far as JSON objects, separated by commas.
    messages: String,
}

/// The next turn of a chat, as a request to send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChatTurn {
    /// Index of the chat, to pass to [`Chats::answered`] or [`Chats::failed`].
    pub chat: usize,
    /// User who owns the chat.
    pub user: Arc<str>,
    /// Body of the request.
    pub body: Bytes,
}

impl Chats {
    /// Creates the chats. They are staggered, so that they end at different times.
    #[must_use]
    pub fn new(options: ChatsOptions) -> Self {
        let mut chats = Self {
            options,
            chats: Vec::new(),
            idle: (0..options.chats as usize).collect(),
            next_topic: 0,
        };
        for number in 0..options.chats {
            let user = format!("user-{}", number % options.users.max(1) + 1);
            chats.chats.push(Chat {
                user: Arc::from(user),
                system: u64::from(number % options.systems.max(1)),
                topic: 0,
                turn: 0,
                last_turn: 0,
                messages: String::new(),
            });
            chats.begin(number as usize);
            // Makes the first chats end at different times.
            chats.chats[number as usize].last_turn = 1 + number % options.turns.max(1);
        }
        chats
    }

    /// Returns whether a chat is ready for its next turn.
    #[must_use]
    pub fn has_idle(&self) -> bool {
        !self.idle.is_empty()
    }

    /// Returns the next turn of the chat that has waited longest, as a request to `model`; `None`
    /// if all chats wait for responses.
    pub fn next_turn(&mut self, model: &str) -> Option<ChatTurn> {
        let index = self.idle.pop_front()?;
        let chat = &self.chats[index];
        let body = format!(
            "{{\"model\":{},\"messages\":[{}],\"max_tokens\":{},\"stream\":true,\
             \"stream_options\":{{\"include_usage\":true}}}}",
            Value::from(model),
            chat.messages,
            self.options.reply_tokens,
        );
        Some(ChatTurn {
            chat: index,
            user: chat.user.clone(),
            body: Bytes::from(body),
        })
    }

    /// Records the response to a chat's turn. The chat is then ready for its next turn.
    pub fn answered(&mut self, chat: usize, reply: &str) {
        let state = &mut self.chats[chat];
        state.turn += 1;
        if state.turn >= state.last_turn {
            self.begin(chat);
        } else {
            let reply = Value::from(reply);
            let _ = write!(
                state.messages,
                ",{{\"role\":\"assistant\",\"content\":{reply}}}"
            );
            self.ask(chat);
        }
        self.idle.push_back(chat);
    }

    /// Records that a chat's turn got no response. The chat is then ready to try the turn again.
    pub fn failed(&mut self, chat: usize) {
        self.idle.push_back(chat);
    }

    /// Replaces a finished chat by a new one.
    fn begin(&mut self, chat: usize) {
        let Self {
            options,
            chats,
            next_topic,
            ..
        } = self;
        let state = &mut chats[chat];
        state.topic = *next_topic;
        *next_topic += 1;
        state.turn = 0;
        state.last_turn = options.turns.max(1);
        let system = passage(
            options.seed,
            SYSTEM_IDS | state.system,
            options.system_bytes,
        );
        state.messages = format!("{{\"role\":\"system\",\"content\":\"{system}\"}}");
        self.ask(chat);
    }

    /// Appends the user's next message.
    fn ask(&mut self, chat: usize) {
        let state = &mut self.chats[chat];
        let id = state.topic << 16 | u64::from(state.turn);
        let message = passage(self.options.seed, id, self.options.message_bytes);
        let _ = write!(
            state.messages,
            ",{{\"role\":\"user\",\"content\":\"{message}\"}}"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(turn: &ChatTurn) -> Vec<Value> {
        let body: Value = serde_json::from_slice(&turn.body).unwrap();
        body["messages"].as_array().unwrap().clone()
    }

    #[test]
    fn a_chat_grows_by_turns_and_then_restarts() {
        let options = ChatsOptions {
            chats: 1,
            turns: 3,
            ..ChatsOptions::default()
        };
        let mut chats = Chats::new(options);
        chats.chats[0].last_turn = 3;
        let mut last = Vec::new();
        for turn in 0..3 {
            let next = chats.next_turn("m").unwrap();
            assert_eq!(chats.next_turn("m"), None, "it waits for its answer");
            let now = messages(&next);
            assert_eq!(now.len(), 2 + 2 * turn);
            assert_eq!(now[..last.len()], last);
            last = now;
            last.push(serde_json::json!({ "role": "assistant", "content": "so \"said\"" }));
            chats.answered(0, "so \"said\"");
        }
        let anew = messages(&chats.next_turn("m").unwrap());
        assert_eq!(anew.len(), 2);
        assert_eq!(anew[0], last[0], "the system prompt stays");
        assert_ne!(anew[1], last[1]);
    }

    #[test]
    fn a_failed_turn_is_retried_unchanged() {
        let mut chats = Chats::new(ChatsOptions {
            chats: 1,
            ..ChatsOptions::default()
        });
        let first = chats.next_turn("m").unwrap();
        chats.failed(0);
        assert_eq!(chats.next_turn("m").unwrap(), first);
    }

    #[test]
    fn system_prompts_are_shared_between_users() {
        let options = ChatsOptions {
            users: 4,
            chats: 6,
            systems: 3,
            ..ChatsOptions::default()
        };
        let mut chats = Chats::new(options);
        let first: Vec<ChatTurn> = (0..6).map(|_| chats.next_turn("m").unwrap()).collect();
        assert_eq!(messages(&first[0])[0], messages(&first[3])[0]);
        assert_ne!(first[0].user, first[3].user);
        assert_ne!(messages(&first[0])[0], messages(&first[1])[0]);
    }
}
