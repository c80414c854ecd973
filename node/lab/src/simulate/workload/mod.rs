//! The workload: requests with their users, prompts and times.
//!
//! A workload is generated once per seed and shared by all runs of a comparison, so that every
//! policy gets the same requests. Requests arrive at given times ([`SimWorkload::arrivals`]), or a
//! user keeps so many requests open that some always wait ([`SimUser::backlog`]), or they follow the
//! answers to others ([`SimWorkload::turns`]).

#[cfg(test)]
mod agent_tests;
mod agent_text;
mod agents;
mod day;
mod mix;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use api::prompt::{BlockUnit, ChainTail, PromptIdentity, ReplyShape};
use state::ids::BlockHash;
use state::prefix::{BlockHasher, Scope, chain_bytes, matchable_blocks};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::events::Micros;
use super::plan::BLOCK_TOKENS;
use crate::engine::text::{Sequence, TOKEN_BYTES};
use crate::replay::text::passage;
use crate::replay::trace::Arrival;
use crate::rng::Rng;

pub use agents::AgentLoad;
pub use mix::Mix;

/// Seed of the block and user hashes of all simulated clusters.
pub const HASH_SEED: u64 = 0x5eed;
/// Name of the only model that simulated clusters serve.
pub const MODEL: &str = "simulated";

/// Workload of a run: its requests, and the users who send them.
#[derive(Debug, Clone, Default)]
pub struct SimWorkload {
    /// Name of the workload among several; empty if there is only one.
    pub name: String,
    /// Users who send the requests.
    pub users: Vec<SimUser>,
    /// Requests with given arrival times, in ascending order of time.
    pub arrivals: Vec<SimArrival>,
    /// Sessions of agents, to which `turns` belong.
    pub sessions: Vec<SimSession>,
    /// Requests that are sent after the answers to others.
    pub turns: Vec<SimTurn>,
    /// Index in `sessions` of a session whose waits are measured, if any.
    pub watched: Option<usize>,
    /// Ranges of lengths for the requests of users with a backlog.
    pub shape: LengthRange,
    /// What the engines have cached at the start.
    pub warm: Vec<WarmPrefix>,
}

/// A user of the workload.
#[derive(Debug, Clone, PartialEq)]
pub struct SimUser {
    /// Name of the user.
    pub name: String,
    /// Weight of the user, in thousandths.
    pub weight_milli: u32,
    /// Replica that receives all the user's requests, counted from 0; `None` for any.
    pub replica: Option<u8>,
    /// Number of requests that the user keeps open, running or waiting. If 0, it sends at given
    /// times.
    pub backlog: u32,
    /// Period in which the user sends nothing, from start to end, if any.
    pub off: Option<(Micros, Micros)>,
}

/// A request that arrives at a given time.
#[derive(Debug, Clone)]
pub struct SimArrival {
    /// Time at which the request arrives.
    pub at: Micros,
    /// Index of the request's user in [`SimWorkload::users`].
    pub user: usize,
    /// Index of the request's session in [`SimWorkload::sessions`]; `None` if it has none.
    pub session: Option<usize>,
    /// Prompt of the request.
    pub prompt: Arc<SimPrompt>,
    /// Number of output tokens.
    pub output_tokens: u32,
    /// Replica that receives the request, from 0, unless its user is pinned; `None` for any.
    pub replica: Option<u8>,
}

/// A session of an agent or sub-agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SimSession {
    /// Index of the session's user in [`SimWorkload::users`].
    pub user: usize,
    /// Index of the session that started this one in [`SimWorkload::sessions`]; `None` unless it
    /// is a sub-agent.
    pub parent: Option<usize>,
}

/// A request of a session, which is sent after the answers to others.
#[derive(Debug, Clone)]
pub struct SimTurn {
    /// Index of the request's session in [`SimWorkload::sessions`].
    pub session: usize,
    /// Indices in [`SimWorkload::turns`] of the turns that must have ended before this one is sent.
    pub after: Vec<usize>,
    /// Time from the last of these ends, or from the start of the run if there are none.
    pub pause: Micros,
    /// Number of leading tokens of the prompt that a sub-agent's first turn has in common with its
    /// parent's prompt and answer; `None` for other turns.
    pub shared_tokens: Option<u32>,
    /// Prompt of the request.
    pub prompt: Arc<SimPrompt>,
    /// Number of output tokens.
    pub output_tokens: u32,
}

/// Blocks that an engine has cached at the start of the run.
#[derive(Debug, Clone)]
pub struct WarmPrefix {
    /// Number of the engine, from 0. Numbers beyond the last engine begin again.
    pub engine: usize,
    /// A prompt that ends with the last of the blocks.
    pub prompt: Arc<SimPrompt>,
}

/// A prompt in the forms that router and engine use.
#[derive(Debug, Clone)]
pub struct SimPrompt {
    /// Identity of the prompt for the router.
    pub identity: PromptIdentity,
    /// Number of tokens of the prompt.
    pub tokens: u32,
    /// Token sequence of the prompt for the engine.
    pub sequence: Sequence,
    /// Keys of the full blocks, by position and content only, regardless of preceding blocks.
    pub positions: Arc<[u64]>,
}

/// Ranges from which lengths are drawn, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LengthRange {
    /// Minimum and maximum number of prompt tokens.
    pub input: (u32, u32),
    /// Minimum and maximum number of output tokens.
    pub output: (u32, u32),
}

impl Default for LengthRange {
    fn default() -> Self {
        Self {
            input: (128, 512),
            output: (64, 256),
        }
    }
}

impl SimPrompt {
    /// Creates the prompt with this text, in blocks of the default size.
    #[must_use]
    pub fn new(text: &[u8]) -> Self {
        Self::cut(text, BLOCK_TOKENS)
    }

    /// Creates the prompt with this text, in blocks of `block_tokens` tokens.
    #[must_use]
    pub fn cut(text: &[u8], block_tokens: u32) -> Self {
        let block_bytes = block_tokens * TOKEN_BYTES as u32;
        let scope = Scope {
            model: MODEL,
            adapter: "",
            salt: "",
            tokenizer: "character",
            block_size: block_bytes,
        };
        let root = BlockHasher::from(HASH_SEED).root(&scope);
        let block_bytes = block_bytes as usize;
        let mut chain = Vec::new();
        chain_bytes(&root, text, block_bytes, &mut chain);
        let matchable = matchable_blocks(text.len() as u64, scope.block_size);
        let sequence = Sequence::new(text, "", block_tokens, 0);
        let blocks = (0..).zip(text.chunks_exact(block_bytes));
        let positions = blocks.map(|(position, block)| xxh3_64_with_seed(block, position));
        Self {
            positions: positions.collect(),
            identity: PromptIdentity {
                root,
                tokens: sequence.prompt_tokens(),
                matchable: u32::try_from(matchable).unwrap_or(u32::MAX),
                unit: BlockUnit::Characters,
                isolation: None,
                tail: ChainTail {
                    bytes: text[chain.len() * block_bytes..].to_vec(),
                    block_bytes,
                    reply: ReplyShape::Continuation,
                    tokens_per_block: block_tokens,
                    ..ChainTail::default()
                },
                chain: chain.into(),
            },
            tokens: sequence.prompt_tokens(),
            sequence,
        }
    }
}

impl SimPrompt {
    /// Returns the prompt's identity for a router that follows the engines' KV events: in tokens, with
    /// the engines' hashes as its own. Answers are left to the events.
    #[must_use]
    pub fn exact_identity(&self) -> PromptIdentity {
        let hashes = self.sequence.hashes().iter();
        PromptIdentity {
            chain: hashes.map(|hash| BlockHash(*hash)).collect(),
            unit: BlockUnit::Tokens,
            tail: ChainTail {
                block_bytes: 0,
                reply: ReplyShape::None,
                ..self.identity.tail.clone()
            },
            ..self.identity.clone()
        }
    }
}

impl LengthRange {
    fn draw(range: (u32, u32), rng: &mut Rng) -> u32 {
        rng.within(range.0, range.1).max(1)
    }

    /// Draws a unique prompt and an output length.
    #[must_use]
    pub fn draw_request(&self, rng: &mut Rng) -> (Arc<SimPrompt>, u32) {
        let tokens = Self::draw(self.input, rng) as usize;
        let text = passage(rng.next_u64(), 0, tokens * TOKEN_BYTES);
        let prompt = Arc::new(SimPrompt::new(text.as_bytes()));
        (prompt, Self::draw(self.output, rng))
    }
}

impl SimUser {
    /// Creates a user of average weight who sends at given times to any replica.
    #[must_use]
    pub fn named(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            weight_milli: 1000,
            replica: None,
            backlog: 0,
            off: None,
        }
    }

    /// Returns whether the user sends requests at the time `at`.
    #[must_use]
    pub fn sends_at(&self, at: Micros) -> bool {
        self.off
            .is_none_or(|(from, until)| at < from || at >= until)
    }
}

impl SimWorkload {
    /// Converts the requests of a trace to a workload.
    #[must_use]
    pub fn of_trace(arrivals: &[Arrival]) -> Self {
        let mut workload = Self::default();
        for arrival in arrivals {
            let name: &str = &arrival.user;
            let known = workload.users.iter().position(|user| user.name == name);
            let user = known.unwrap_or_else(|| {
                workload.users.push(SimUser::named(name));
                workload.users.len() - 1
            });
            workload.arrivals.push(SimArrival {
                at: super::plan::micros(arrival.at),
                user,
                session: None,
                prompt: Arc::new(SimPrompt::new(arrival.prompt.text().as_bytes())),
                output_tokens: arrival.output_tokens.max(1),
                replica: None,
            });
        }
        workload
    }

    /// Pins the users to `replicas` replicas in turn.
    pub fn pin(&mut self, replicas: u8) {
        for (place, user) in self.users.iter_mut().enumerate() {
            let replica = place % usize::from(replicas.max(1));
            user.replica = u8::try_from(replica).ok();
        }
    }

    /// Scales all arrival times so that `per_s` requests arrive per second on average.
    pub fn set_rate(&mut self, per_s: f64) {
        let last = self.arrivals.last().map_or(0, |sent| sent.at);
        if last == 0 {
            return;
        }
        let factor = self.arrivals.len() as f64 / per_s * 1e6 / last as f64;
        for sent in &mut self.arrivals {
            sent.at = (sent.at as f64 * factor) as u64;
        }
    }

    /// Returns the mean number of requests per second until the last arrival.
    #[must_use]
    pub fn rate(&self) -> f64 {
        let last = self.arrivals.last().map_or(1, |sent| sent.at.max(1));
        self.arrivals.len() as f64 * 1e6 / last as f64
    }

    /// Returns whether there is no request.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.arrivals.is_empty() && self.turns.is_empty() && !self.is_backlogged()
    }

    /// Returns whether some user keeps a backlog.
    #[must_use]
    pub fn is_backlogged(&self) -> bool {
        self.users.iter().any(|user| user.backlog > 0)
    }
}
