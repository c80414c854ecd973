//! Prompts of agents: each contains the previous prompt and its answer.

use std::sync::Arc;

use super::{SimPrompt, SimTurn};
use crate::agents::{AgentTree, PROGRAMS, SUMMARY, TurnDraft, WINDOW};
use crate::engine::text::{TOKEN_BYTES, token_count};
use crate::replay::text::passage;
use crate::replay::trace::LengthScale;

/// Writer of agents' prompts.
pub(super) struct AgentTexts {
    /// System prompts and tools of the programs.
    programs: Vec<String>,
    scale: LengthScale,
    /// Expected time after which no turn is sent.
    end: i64,
}

/// What an engine holds of a chain at the start of the run: its last prompt with the answer.
pub(super) struct HeldAtStart {
    /// Expected time of the turn.
    pub(super) expected: i64,
    /// Prompt and answer.
    pub(super) prompt: Arc<SimPrompt>,
}

/// Text of a chain as it grows.
struct ChainWriter<'a> {
    texts: &'a AgentTexts,
    tree: &'a AgentTree,
    text: Vec<u8>,
    /// Number of tokens with which a sub-agent's text began.
    shared_tokens: Option<u32>,
    /// Number of passages of the tree so far, from which each gets its own words.
    passages: u64,
}

impl AgentTexts {
    /// Creates the writer for turns that are expected from the start of the run until `end`.
    pub(super) fn new(seed: u64, scale: LengthScale, end: i64) -> Self {
        let bytes = |tokens: &u32| scale.apply(*tokens) as usize * TOKEN_BYTES;
        let texts = PROGRAMS.iter().enumerate();
        Self {
            programs: texts
                .map(|(number, tokens)| passage(seed, number as u64, bytes(tokens)))
                .collect(),
            scale,
            end,
        }
    }

    /// Returns the turns of a session and its sub-agents that are sent. Sessions and turns count
    /// from 0 within the tree. Passes to `hold` what engines hold at the start.
    pub(super) fn turns(
        &self,
        tree: &AgentTree,
        hold: &mut impl FnMut(HeldAtStart),
    ) -> Vec<SimTurn> {
        let mut turns = Vec::new();
        let all = tree.chains.iter().flat_map(|chain| &chain.turns);
        if !all.clone().any(|turn| self.is_sent(turn)) {
            return turns;
        }
        let mut root = ChainWriter {
            texts: self,
            tree,
            text: self.programs[tree.program].clone().into_bytes(),
            shared_tokens: None,
            passages: 0,
        };
        // Turns in flight when the next turn of the session begins.
        let mut before: Vec<usize> = Vec::new();
        let mut children = tree.chains.iter().enumerate().skip(1).peekable();
        for number in 0..tree.chains[0].turns.len() {
            before = root.turn((0, number), before, &mut turns, hold);
            let parent = before.clone();
            while let Some((chain, _)) = children.next_if(|(_, child)| child.after == Some(number))
            {
                let mut child = root.child(chain);
                let mut last = parent.clone();
                for number in 0..tree.chains[chain].turns.len() {
                    last = child.turn((chain, number), last, &mut turns, hold);
                }
                root.passages = child.passages;
                before.extend(last);
            }
            before.sort_unstable();
            before.dedup();
        }
        turns
    }

    fn is_sent(&self, turn: &TurnDraft) -> bool {
        (0..self.end).contains(&turn.expected)
    }
}

impl ChainWriter<'_> {
    /// Writes the prompt and the answer of a turn, given as numbers of chain and turn. Adds it to
    /// `turns` if it is sent. Returns the turns that must have ended before the next one.
    fn turn(
        &mut self,
        (chain, number): (usize, usize),
        after: Vec<usize>,
        turns: &mut Vec<SimTurn>,
        hold: &mut impl FnMut(HeldAtStart),
    ) -> Vec<usize> {
        let drafts = &self.tree.chains[chain].turns;
        let draft = drafts[number];
        let scale = self.texts.scale;
        self.add(draft.added_tokens);
        if self.text.len() > scale.apply(WINDOW) as usize * TOKEN_BYTES {
            self.text
                .truncate(self.texts.programs[self.tree.program].len());
            self.add(SUMMARY);
        }
        let output_tokens = scale.apply(draft.output_tokens);
        if self.texts.is_sent(&draft) {
            let prompt = Arc::new(SimPrompt::new(&self.text));
            let answer = prompt.sequence.output().text(0, output_tokens);
            self.text.extend_from_slice(answer.as_bytes());
            turns.push(SimTurn {
                session: chain,
                pause: match after.is_empty() {
                    true => draft.expected.unsigned_abs(),
                    false => draft.pause,
                },
                after,
                shared_tokens: self.shared_tokens.filter(|_| number == 0),
                prompt,
                output_tokens,
            });
            return vec![turns.len() - 1];
        }
        // Nobody will see this prompt, so any words can be its answer.
        self.add(draft.output_tokens);
        let goes_on = drafts
            .get(number + 1)
            .is_some_and(|next| self.texts.is_sent(next));
        if draft.expected < 0 && goes_on {
            hold(HeldAtStart {
                expected: draft.expected,
                prompt: Arc::new(SimPrompt::new(&self.text)),
            });
        }
        after
    }

    /// Appends `tokens` tokens of new text, before scaling.
    fn add(&mut self, tokens: u32) {
        let bytes = self.texts.scale.apply(tokens) as usize * TOKEN_BYTES;
        self.passages += 1;
        let text = passage(self.tree.seed, self.passages, bytes);
        self.text.extend_from_slice(text.as_bytes());
    }

    /// Begins the text of a sub-agent: the program's system prompt and tools, and part of what
    /// follows in the parent's prompt and answer.
    fn child(&self, chain: usize) -> Self {
        let common = self.texts.programs[self.tree.program].len();
        let own = (self.text.len() - common) / TOKEN_BYTES;
        let permille = self.tree.chains[chain].shared_permille as usize;
        let shared = common + own * permille / 1000 * TOKEN_BYTES;
        Self {
            text: self.text[..shared].to_vec(),
            shared_tokens: Some(token_count(shared)),
            texts: self.texts,
            tree: self.tree,
            passages: self.passages,
        }
    }
}
