//! A workload of agents: a fixed number of sessions at a time, whose prompts grow by each answer and
//! by what tools return, with pauses and with bursts of sub-agents.
//!
//! Lengths, pauses and bursts are those of `quorate simulate --workload agents`
//! ([`crate::agents`]). Here, prompts contain the answers that arrived, from whatever
//! engine. A session that ends is replaced by a new one.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;
use std::time::Duration;

use super::text::passage;
use super::trace::LengthScale;
use crate::agents::{AgentChain, AgentTree, PROGRAMS, SUMMARY, TurnDraft, WINDOW, draw};
use crate::engine::text::TOKEN_BYTES;
use crate::rng::Rng;

/// Time after which a turn without an answer is sent again.
const AGAIN: Duration = Duration::from_secs(1);

/// Sizes of the workload.
#[derive(Debug, Clone, Copy)]
pub struct AgentsOptions {
    /// Number of sessions that are open at any time, without their sub-agents.
    pub agents: u32,
    /// Number of users. The `n`-th has `1/n` of the first one's sessions.
    pub users: u32,
    /// Factor for all lengths in tokens.
    pub scale: LengthScale,
    /// Seed of lengths, pauses and texts.
    pub seed: u64,
}

/// The next turn of a session, as a request to send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentTurn {
    /// Index of the session, to pass to [`Agents::answered`] or [`Agents::failed`].
    pub session: usize,
    /// User who owns the session.
    pub user: Arc<str>,
    /// Name of the session.
    pub name: String,
    /// Name of the session that started it; `None` for a root.
    pub parent: Option<String>,
    /// Text of the prompt.
    pub prompt: String,
    /// Number of output tokens.
    pub output_tokens: u32,
}

/// State of all sessions of a workload.
pub struct Agents {
    options: AgentsOptions,
    rng: Rng,
    /// System prompts and tools of the client programs.
    programs: Vec<String>,
    trees: Vec<AgentTree>,
    sessions: Vec<OpenSession>,
    /// Sessions by the time of their next turn since the start.
    ready: BinaryHeap<Reverse<(Duration, usize)>>,
    passages: u64,
}

/// A session or sub-agent as it goes on.
struct OpenSession {
    /// Index of its tree.
    tree: usize,
    /// Number of its chain in the tree; 0 for the root.
    chain: usize,
    /// Session that started it.
    parent: Option<usize>,
    /// Number of turns that were answered.
    turn: usize,
    /// Whether the text has what the next turn adds.
    is_asking: bool,
    /// Number of sub-agents that have not ended.
    children: usize,
    text: String,
}

impl std::fmt::Debug for Agents {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Agents")
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

impl Agents {
    /// Creates the sessions. They begin within the first seconds, one after another.
    #[must_use]
    pub fn new(options: AgentsOptions) -> Self {
        let mut rng = Rng::new(options.seed, 15);
        let seed = rng.next_u64();
        let bytes = |tokens: &u32| options.scale.apply(*tokens) as usize * TOKEN_BYTES;
        let programs = PROGRAMS.iter().enumerate();
        let programs = programs.map(|(number, it)| passage(seed, number as u64, bytes(it)));
        let mut agents = Self {
            options,
            rng,
            programs: programs.collect(),
            trees: Vec::new(),
            sessions: Vec::new(),
            ready: BinaryHeap::new(),
            passages: 0,
        };
        for number in 0..options.agents {
            agents.open(Duration::from_millis(u64::from(number) * 100));
        }
        agents
    }

    /// Returns the time of the next turn since the start; `None` if all sessions wait for answers.
    #[must_use]
    pub fn due(&self) -> Option<Duration> {
        self.ready.peek().map(|Reverse((at, _))| *at)
    }

    /// Returns the turn that is due first; `None` if all sessions wait for answers.
    pub fn next_turn(&mut self) -> Option<AgentTurn> {
        let Reverse((_, session)) = self.ready.pop()?;
        if !std::mem::replace(&mut self.sessions[session].is_asking, true) {
            self.ask(session);
        }
        let open = &self.sessions[session];
        Some(AgentTurn {
            session,
            user: Arc::from(format!("user-{}", self.trees[open.tree].user + 1)),
            name: self.name(session),
            parent: open.parent.map(|parent| self.name(parent)),
            prompt: open.text.clone(),
            output_tokens: self.options.scale.apply(self.draft(session).output_tokens),
        })
    }

    /// Records the answer to a session's turn at `now` since the start.
    pub fn answered(&mut self, session: usize, answer: &str, now: Duration) {
        let number = self.sessions[session].turn;
        let open = &mut self.sessions[session];
        open.text.push_str(answer);
        open.turn += 1;
        open.is_asking = false;
        let chain = open.chain;
        if chain == 0 {
            self.start_children(session, number, now);
        }
        self.go_on(session, now);
    }

    /// Records that a session's turn got no answer. It is sent again.
    pub fn failed(&mut self, session: usize, now: Duration) {
        self.ready.push(Reverse((now + AGAIN, session)));
    }

    /// Opens a session at `at`.
    fn open(&mut self, at: Duration) {
        let tree = draw(self.options.users, &mut self.rng);
        let text = self.programs[tree.program].clone();
        self.trees.push(tree);
        self.begin(self.trees.len() - 1, 0, None, text, at);
    }

    fn begin(
        &mut self,
        tree: usize,
        chain: usize,
        parent: Option<usize>,
        text: String,
        at: Duration,
    ) {
        self.sessions.push(OpenSession {
            tree,
            chain,
            parent,
            turn: 0,
            is_asking: false,
            children: 0,
            text,
        });
        self.ready.push(Reverse((at, self.sessions.len() - 1)));
    }

    /// Starts the sub-agents that follow the turn `number` of a session. They share the beginning of
    /// its prompt.
    fn start_children(&mut self, session: usize, number: usize, now: Duration) {
        let open = &self.sessions[session];
        let (tree, text) = (open.tree, open.text.clone());
        let common = self.programs[self.trees[tree].program]
            .len()
            .min(text.len());
        let chains = &self.trees[tree].chains;
        let children: Vec<(usize, usize, Duration)> = chains
            .iter()
            .enumerate()
            .filter(|(_, chain)| chain.after == Some(number))
            .map(|(place, chain)| {
                let own = (text.len() - common) / TOKEN_BYTES;
                let shared = common + own * chain.shared_permille as usize / 1000 * TOKEN_BYTES;
                let pause = chain.turns.first().map_or(0, |turn| turn.pause);
                (place, shared, Duration::from_micros(pause))
            })
            .collect();
        self.sessions[session].children = children.len();
        for (chain, shared, pause) in children {
            // Answers of engines may have characters of several bytes.
            let shared = text.floor_char_boundary(shared);
            let text = text[..shared].to_owned();
            self.begin(tree, chain, Some(session), text, now + pause);
        }
    }

    /// Plans the next turn of a session, unless its sub-agents are at work, or ends it.
    fn go_on(&mut self, session: usize, now: Duration) {
        if self.sessions[session].children > 0 {
            return;
        }
        if self.sessions[session].turn < self.chain(session).turns.len() {
            let pause = Duration::from_micros(self.draft(session).pause);
            self.ready.push(Reverse((now + pause, session)));
            return;
        }
        self.sessions[session].text = String::new();
        match self.sessions[session].parent {
            None => self.open(now),
            Some(parent) => {
                self.sessions[parent].children -= 1;
                self.go_on(parent, now);
            }
        }
    }

    /// Appends what the next turn adds to a session's prompt. A prompt beyond the context window is
    /// compacted before.
    fn ask(&mut self, session: usize) {
        let draft = self.draft(session);
        let open = &self.sessions[session];
        let window = self.options.scale.apply(WINDOW) as usize * TOKEN_BYTES;
        if open.text.len() > window {
            let program = &self.programs[self.trees[open.tree].program];
            let compacted = program.clone() + &self.more(session, SUMMARY);
            self.sessions[session].text = compacted;
        }
        let more = self.more(session, draft.added_tokens);
        self.sessions[session].text.push_str(&more);
    }

    /// Returns new text of `tokens` tokens, before scaling.
    fn more(&mut self, session: usize, tokens: u32) -> String {
        self.passages += 1;
        let seed = self.trees[self.sessions[session].tree].seed;
        let bytes = self.options.scale.apply(tokens) as usize * TOKEN_BYTES;
        passage(seed, self.passages, bytes)
    }

    fn chain(&self, session: usize) -> &AgentChain {
        let open = &self.sessions[session];
        &self.trees[open.tree].chains[open.chain]
    }

    fn draft(&self, session: usize) -> TurnDraft {
        self.chain(session).turns[self.sessions[session].turn]
    }

    fn name(&self, session: usize) -> String {
        format!("agent-{}-{session}", self.options.seed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPTIONS: AgentsOptions = AgentsOptions {
        agents: 20,
        users: 4,
        scale: LengthScale::SIXTEENTH,
        seed: 1,
    };

    #[test]
    fn a_turn_continues_the_previous_prompt_and_its_answer() {
        let mut agents = Agents::new(OPTIONS);
        let mut last: Vec<Option<String>> = Vec::new();
        let (mut continued, mut children) = (0, 0);
        for _ in 0..2_000 {
            let now = agents.due().expect("no turn is left open");
            let turn = agents.next_turn().expect("one is due");
            last.resize(last.len().max(turn.session + 1), None);
            let is_compacted =
                turn.prompt.len() < last[turn.session].as_ref().map_or(0, String::len);
            if let Some(before) = last[turn.session].as_ref().filter(|_| !is_compacted) {
                assert!(turn.prompt.starts_with(before));
                continued += 1;
            } else if turn.parent.is_some() {
                children += 1;
            }
            last[turn.session] = Some(turn.prompt + "answer");
            agents.answered(turn.session, "answer", now);
        }
        assert!(
            continued > 1_000 && children > 20,
            "{continued}, {children}"
        );
    }

    #[test]
    fn a_parent_waits_for_its_sub_agents() {
        let mut agents = Agents::new(OPTIONS);
        let mut waited = 0;
        for _ in 0..2_000 {
            let now = agents.due().expect("no turn is left open");
            let turn = agents.next_turn().expect("one is due");
            assert_eq!(agents.sessions[turn.session].children, 0);
            agents.answered(turn.session, "answer", now);
            waited += usize::from(agents.sessions[turn.session].children > 0);
        }
        assert!(waited > 5, "{waited}");
    }

    #[test]
    fn a_turn_without_an_answer_is_sent_again() {
        let mut agents = Agents::new(OPTIONS);
        let first = agents.next_turn().expect("one is due");
        agents.failed(first.session, Duration::ZERO);
        let mut later = std::iter::from_fn(|| agents.next_turn());
        assert!(later.any(|turn| turn == first));
    }
}
