//! Generated workload of agents: sessions whose prompts grow turn by turn, with pauses for tool
//! calls, and with bursts of sub-agents.
//!
//! The load is a closed loop: a turn is sent a pause after the answer to the previous one. The
//! requests are still generated before the run ([`SimTurn`]), because an answer depends on nothing
//! but its prompt. So all runs of a comparison get the same requests, only at different times.
//!
//! Sessions last longer than most runs. So the load starts in the middle: sessions that opened
//! earlier continue, and engines hold what these sent last. For this, each turn has an *expected*
//! time, as if each answer took [`ANSWER`]. Turns expected before the start or after the end are not
//! sent. [`crate::agents`] draws lengths and times.

use super::agent_text::AgentTexts;
use super::{SimSession, SimUser, SimWorkload};
use crate::agents::{AgentTree, draw, mean_turns};
use crate::replay::trace::LengthScale;
use crate::rng::Rng;
use crate::simulate::events::Micros;

/// Expected time from a turn to the end of its answer.
const ANSWER: Micros = 2_000_000;
/// Time before the start from which sessions are generated. Older ones are few.
const BEFORE: Micros = 3 * 3_600_000_000;

/// Parameters of the generator of agents.
#[derive(Debug, Clone, Copy)]
pub struct AgentLoad {
    /// Expected mean number of turns per second, of sessions and sub-agents.
    pub rate: f64,
    /// Time until which turns are expected.
    pub duration: Micros,
    /// Maximum number of turns.
    pub requests: u64,
    /// Number of users. The `n`-th user has `1/n` of the first one's sessions.
    pub users: u32,
    /// Factor for all lengths in tokens.
    pub scale: LengthScale,
}

impl Default for AgentLoad {
    fn default() -> Self {
        Self {
            rate: 10.0,
            duration: 600_000_000,
            requests: u64::MAX,
            users: 8,
            scale: LengthScale::SIXTEENTH,
        }
    }
}

impl AgentLoad {
    /// Generates the sessions and their turns. Equal seeds give equal requests.
    #[must_use]
    pub fn generate(&self, seed: u64) -> SimWorkload {
        let users = (1..=self.users.max(1)).map(|number| SimUser::named(&format!("user-{number}")));
        let mut workload = SimWorkload {
            users: users.collect(),
            ..SimWorkload::default()
        };
        let trees = self.trees(seed);
        let end = self.end(&trees);
        let texts = AgentTexts::new(Rng::new(seed, 13).next_u64(), self.scale, end);
        let mut warm = Vec::new();
        for (number, tree) in trees.iter().enumerate() {
            let first = workload.sessions.len();
            let sessions = (0..tree.chains.len()).map(|chain| SimSession {
                user: tree.user,
                parent: (chain > 0).then_some(first),
            });
            let turns = texts.turns(tree, &mut |last| {
                warm.push((last.expected, number, last.prompt));
            });
            if turns.is_empty() {
                continue;
            }
            workload.sessions.extend(sessions);
            let offset = workload.turns.len();
            workload.turns.extend(turns.into_iter().map(|mut turn| {
                turn.session += first;
                turn.after.iter_mut().for_each(|before| *before += offset);
                turn
            }));
        }
        // The most recent prompts come last, so that a full cache keeps these.
        warm.sort_by_key(|(expected, number, _)| (*expected, *number));
        workload.warm = warm
            .into_iter()
            .map(|(_, engine, prompt)| super::WarmPrefix { engine, prompt })
            .collect();
        workload
    }

    /// Draws all sessions that open until the end of the load.
    pub(super) fn trees(&self, seed: u64) -> Vec<AgentTree> {
        let mut rng = Rng::new(seed, 11);
        let per_s = self.rate / mean_turns();
        let before = i64::try_from(BEFORE).unwrap_or(i64::MAX);
        let until = i64::try_from(self.duration).unwrap_or(i64::MAX);
        let mut trees = Vec::new();
        let mut at = -before;
        loop {
            at += i64::try_from(rng.gap_us(per_s)).unwrap_or(i64::MAX);
            if at >= until {
                return trees;
            }
            // Each session has a generator of its own, so that it does not shift the others.
            let mut own = Rng::new(rng.next_u64(), 12);
            trees.push(self.tree(at, &mut own));
        }
    }

    fn tree(&self, opens: i64, rng: &mut Rng) -> AgentTree {
        let mut tree = draw(self.users, rng);
        expect_from(&mut tree, opens);
        tree
    }

    /// Returns the expected time after which no turn is sent.
    fn end(&self, trees: &[AgentTree]) -> i64 {
        let until = i64::try_from(self.duration).unwrap_or(i64::MAX);
        let turns = trees
            .iter()
            .flat_map(|tree| &tree.chains)
            .flat_map(|chain| &chain.turns);
        let mut expected: Vec<i64> = turns
            .map(|turn| turn.expected)
            .filter(|at| (0..until).contains(at))
            .collect();
        expected.sort_unstable();
        let most = usize::try_from(self.requests).unwrap_or(usize::MAX);
        expected.get(most).copied().unwrap_or(until)
    }
}

/// Sets the expected times of all turns of a session that opens at `opens`.
fn expect_from(tree: &mut AgentTree, opens: i64) {
    let (root, children) = tree.chains.split_first_mut().expect("a session has turns");
    let mut children = children.iter_mut().peekable();
    let mut at = opens;
    for (number, turn) in root.turns.iter_mut().enumerate() {
        turn.expected = at + whole(turn.pause);
        at = turn.expected + whole(ANSWER);
        let begun = at;
        while let Some(child) = children.next_if(|child| child.after == Some(number)) {
            let mut own = begun;
            for turn in &mut child.turns {
                turn.expected = own + whole(turn.pause);
                own = turn.expected + whole(ANSWER);
            }
            at = at.max(own);
        }
    }
}

fn whole(time: Micros) -> i64 {
    i64::try_from(time).unwrap_or(i64::MAX)
}
