//! Sessions of agents as published figures describe them: turns, lengths, pauses and bursts of
//! sub-agents, without texts. The simulator and the load generator send them.
//!
//! Published figures of agents' traffic, from which the constants below are taken:
//! - *AgentX*, traces of coding agents at vLLM (<https://github.com/vllm-project/vllm/pull/57103>):
//!   a median of 43 turns per session, 142,000 tokens in, 444 out, more than 96 % of the prompt
//!   found in caches, sub-agents in 44 % of the sessions.
//! - *llm-d* (<https://github.com/llm-d/llm-d-router/issues/2305>), a trace of one model: outputs of
//!   317 tokens at the median and 7,551 at p99, bursts of up to 51 sub-agents at p90.
//! - *TraceLab* (<https://arxiv.org/abs/2606.30560>), 4,265 sessions with 357,161 requests: 84
//!   requests per session and 154,000 tokens in on average.
//!
//! Constants without a source are assumptions. Lengths are in tokens, before scaling.

use crate::rng::Rng;

/// Turns of a session, without those of its sub-agents. The median is AgentX's; the spread is such
/// that the mean is TraceLab's.
const TURNS: LogNormal = LogNormal::new(43.0, 1.16);
/// Maximum number of turns of a session: about TraceLab's p99.
const TURNS_MAX: u32 = 1100;
/// Sessions with sub-agents, in thousandths (AgentX).
const WITH_CHILDREN_PERMILLE: u64 = 440;
/// Maximum number of bursts of sub-agents in such a session.
const BURSTS_MAX: u32 = 3;
/// Maximum number of sub-agents in a burst (llm-d). The logarithm of the number is uniform, so half
/// of the bursts have at most 7.
pub const BURST_MAX: u32 = 51;
/// Turns of a sub-agent, at most [`CHILD_TURNS_MAX`].
const CHILD_TURNS: LogNormal = LogNormal::new(6.0, 0.8);
const CHILD_TURNS_MAX: u32 = 60;
/// Output tokens of a turn. The median is AgentX's; the spread is llm-d's ratio of p99 to median.
const OUTPUT: LogNormal = LogNormal::new(444.0, 1.36);
const OUTPUT_MAX: u32 = 16_384;
/// Tokens that a tool's result or a user's text adds to the prompt. With the outputs, their mean
/// results in AgentX's share of found tokens.
const ADDED: LogNormal = LogNormal::new(2700.0, 1.0);
const ADDED_MAX: u32 = 32_768;
/// Tokens of a session's or sub-agent's first text of its own.
const TASK: LogNormal = LogNormal::new(4000.0, 0.8);
/// System prompts and tools of the client programs; each is common to all sessions of its program.
/// The `n`-th program has `1/n` of the first one's sessions.
pub const PROGRAMS: [u32; 4] = [24_576, 16_384, 12_288, 8_192];
/// Context window: a longer prompt is compacted to the system prompt, the tools, and a summary of
/// [`SUMMARY`] tokens. With 384K, the median prompt is as long as in AgentX.
pub const WINDOW: u32 = 393_216;
/// Tokens of the summary that is left of a compacted prompt.
pub const SUMMARY: u32 = 8_192;
/// Seconds from an answer to the session's next turn: tool calls, from tenths of a second to
/// minutes.
const PAUSE_S: LogNormal = LogNormal::new(2.5, 1.6);
const PAUSE_RANGE_S: (f64, f64) = (0.1, 600.0);
/// Maximum time from a parent's answer until a sub-agent of the burst sends its first turn.
const LAUNCH: u64 = 500_000;
/// Number of sessions over which the mean number of turns is taken.
const SAMPLED: u32 = 2000;

/// A log-normal distribution: the usual shape of numbers of turns, lengths and times with a heavy
/// tail.
#[derive(Debug, Clone, Copy)]
struct LogNormal {
    median: f64,
    /// Standard deviation of the logarithm.
    sigma: f64,
}

impl LogNormal {
    const fn new(median: f64, sigma: f64) -> Self {
        Self { median, sigma }
    }

    /// Draws a value by the Box-Muller transform.
    fn draw(self, rng: &mut Rng) -> f64 {
        let (radius, angle) = (1.0 - rng.unit(), rng.unit());
        let normal = (-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * angle).cos();
        self.median * (self.sigma * normal).exp()
    }

    /// Draws a whole number from `least` to `most`.
    fn count(self, rng: &mut Rng, least: u32, most: u32) -> u32 {
        self.draw(rng).clamp(f64::from(least), f64::from(most)) as u32
    }
}

/// A session with its sub-agents, without texts.
pub struct AgentTree {
    /// Index of the user.
    pub user: usize,
    /// Index of the client program in [`PROGRAMS`].
    pub program: usize,
    /// Seed of the texts.
    pub seed: u64,
    /// Chains of turns, first that of the session, then those of its sub-agents.
    pub chains: Vec<AgentChain>,
}

/// Consecutive turns of a session or sub-agent.
pub struct AgentChain {
    /// The turn of the session whose answer starts this sub-agent; `None` for the session itself.
    pub after: Option<usize>,
    /// Part of the parent's prompt with which the sub-agent's prompt begins, in thousandths.
    pub shared_permille: u64,
    /// The turns in their order.
    pub turns: Vec<TurnDraft>,
}

/// Lengths and times of a turn.
#[derive(Debug, Clone, Copy)]
pub struct TurnDraft {
    /// Expected time of the turn; negative before the start of the run.
    pub expected: i64,
    /// Pause before the turn.
    pub pause: u64,
    /// Number of tokens that are new in the prompt, besides the previous answer.
    pub added_tokens: u32,
    /// Number of output tokens.
    pub output_tokens: u32,
}

/// Draws a session of one of `users` users, with its sub-agents.
pub fn draw(users: u32, rng: &mut Rng) -> AgentTree {
    AgentTree {
        user: harmonic(users.max(1), rng),
        program: harmonic(PROGRAMS.len() as u32, rng),
        seed: rng.next_u64(),
        chains: chains(rng),
    }
}

/// Draws the chains of a session and of its sub-agents, which are in the order of their parents'
/// turns.
fn chains(rng: &mut Rng) -> Vec<AgentChain> {
    let turns = TURNS.count(rng, 2, TURNS_MAX);
    let mut chains = vec![AgentChain {
        after: None,
        shared_permille: 0,
        turns: (0..turns).map(|number| draft(number == 0, rng)).collect(),
    }];
    if rng.below(1000) >= WITH_CHILDREN_PERMILLE {
        return chains;
    }
    let mut bursts: Vec<u32> = (0..rng.within(1, BURSTS_MAX))
        .map(|_| rng.within(0, turns - 2))
        .collect();
    bursts.sort_unstable();
    bursts.dedup();
    for after in bursts {
        let children = f64::from(BURST_MAX + 1).powf(rng.unit()) as u32;
        let shared_permille = rng.below(1001);
        for _ in 0..children {
            let turns = CHILD_TURNS.count(rng, 1, CHILD_TURNS_MAX);
            let mut turns: Vec<TurnDraft> =
                (0..turns).map(|number| draft(number == 0, rng)).collect();
            turns[0].pause = rng.below(LAUNCH);
            chains.push(AgentChain {
                after: Some(after as usize),
                shared_permille,
                turns,
            });
        }
    }
    chains
}

fn draft(is_first: bool, rng: &mut Rng) -> TurnDraft {
    let seconds = PAUSE_S.draw(rng).clamp(PAUSE_RANGE_S.0, PAUSE_RANGE_S.1);
    let added = if is_first { TASK } else { ADDED };
    TurnDraft {
        expected: 0,
        pause: if is_first { 0 } else { (seconds * 1e6) as u64 },
        added_tokens: added.count(rng, 1, ADDED_MAX),
        output_tokens: OUTPUT.count(rng, 1, OUTPUT_MAX),
    }
}

/// Returns the mean number of turns of a session with its sub-agents, from a fixed sample.
pub fn mean_turns() -> f64 {
    let mut rng = Rng::new(0, 14);
    let turns =
        |chains: Vec<AgentChain>| chains.iter().map(|chain| chain.turns.len()).sum::<usize>();
    let all: usize = (0..SAMPLED).map(|_| turns(chains(&mut rng))).sum();
    all as f64 / f64::from(SAMPLED)
}

/// Draws an index below `count`, the `n`-th with `1/n` of the first one's probability.
fn harmonic(count: u32, rng: &mut Rng) -> usize {
    let weights = (1..=count).map(|rank| 1.0 / f64::from(rank));
    let mut left = rng.unit() * weights.clone().sum::<f64>();
    let mut place = 0;
    for weight in weights {
        left -= weight;
        if left < 0.0 {
            break;
        }
        place += 1;
    }
    place.min(count as usize - 1)
}
