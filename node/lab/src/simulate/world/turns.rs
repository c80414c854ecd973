//! Turns of agents: when each is sent, and whether it reaches the engine that holds its prefix.

use std::sync::Arc;

use super::{Micros, SimEvent, SimWorld, WARM_UP};
use crate::simulate::replica::SimSender;
use crate::simulate::workload::SimWorkload;

/// Progress of all sessions of agents.
pub(super) struct TurnProgress {
    /// For each turn, the number of turns that have to end before it is sent.
    awaited: Vec<usize>,
    /// For each turn, the turns that await its end.
    followers: Vec<Vec<usize>>,
    /// For each session, the engine of its last turn.
    engines: Vec<Option<usize>>,
    /// Number of turns that were not sent yet.
    left: usize,
}

impl TurnProgress {
    /// Returns the progress before the first turn.
    pub(super) fn new(workload: &SimWorkload) -> Self {
        let turns = &workload.turns;
        let mut followers = vec![Vec::new(); turns.len()];
        for (number, turn) in turns.iter().enumerate() {
            for before in &turn.after {
                followers[*before].push(number);
            }
        }
        Self {
            awaited: turns.iter().map(|turn| turn.after.len()).collect(),
            followers,
            engines: vec![None; workload.sessions.len()],
            left: turns.len(),
        }
    }

    /// Returns the engine of the last turn of a session.
    pub(super) fn engine_of(&self, session: usize) -> Option<usize> {
        self.engines[session]
    }

    /// Returns whether turns are still to be sent.
    pub(super) fn is_going_on(&self) -> bool {
        self.left > 0
    }
}

/// Returns the senders of all requests: users, and sessions of agents.
pub(super) fn senders(workload: &SimWorkload) -> Vec<SimSender> {
    let names: Vec<&str> = workload
        .users
        .iter()
        .map(|user| user.name.as_str())
        .collect();
    let users = names.iter().enumerate();
    let users = users.map(|(number, name)| SimSender::user(name, number));
    let sessions = workload
        .sessions
        .iter()
        .enumerate()
        .map(|(number, session)| {
            let parent = session.parent.map(|parent| names.len() + parent);
            SimSender::agent(names[session.user], names.len() + number, parent)
        });
    users.chain(sessions).collect()
}

impl SimWorld<'_> {
    /// Plans the turns that await no other.
    pub(super) fn begin_turns(&mut self) {
        for (number, turn) in self.workload.turns.iter().enumerate() {
            if turn.after.is_empty() {
                self.events.plan(turn.pause, SimEvent::Turn(number));
            }
        }
    }

    pub(super) fn send_turn(&mut self, number: usize) {
        let turn = &self.workload.turns[number];
        let user = self.workload.sessions[turn.session].user;
        let sender = self.workload.users.len() + turn.session;
        self.turns.left -= 1;
        let request = self.arrive((user, sender), Arc::clone(&turn.prompt), turn.output_tokens);
        self.requests[request].turn = Some(number);
        self.admit(request);
    }

    /// Plans the turns that awaited only the end of this one.
    pub(super) fn end_turn(&mut self, number: usize) {
        for follower in &self.turns.followers[number] {
            let awaited = &mut self.turns.awaited[*follower];
            *awaited -= 1;
            if *awaited == 0 {
                let pause = self.workload.turns[*follower].pause;
                self.events
                    .plan(self.now + pause, SimEvent::Turn(*follower));
            }
        }
    }

    /// Records the end of a turn that arrived and was sent at these times, if its session is watched
    /// and the warm-up is over.
    pub(super) fn note_watched(&mut self, turn: usize, arrived: Micros, sent: Micros) {
        let is_watched = self.workload.watched == Some(self.workload.turns[turn].session);
        let horizon = self.plan.horizon;
        if is_watched && arrived >= horizon / WARM_UP && self.now <= horizon {
            let watched = &mut self.tally.watched;
            watched.turns += 1;
            watched.took += self.now - arrived;
            watched.waited += sent - arrived;
        }
    }

    /// Records that a turn of an agent is about to be sent to `engine`. The replica expects the given
    /// numbers of its blocks there, and where it expects most.
    pub(super) fn reaches(&mut self, request: usize, engine: usize, (there, most): (u32, u32)) {
        let Some(turn) = self.requests[request].turn else {
            return;
        };
        let turn = &self.workload.turns[turn];
        let session = self.workload.sessions[turn.session];
        let held = |engine: &super::SimEngine| engine.cached_tokens(&turn.prompt);
        let here = held(&self.engines[engine]);
        let longest = self.engines.iter().map(held).max().unwrap_or(0);
        let agents = &mut self.tally.agents;
        agents.turns += 1;
        agents.with_prefix += u64::from(longest > 0);
        agents.at_longest += u64::from(longest > 0 && here == longest);
        let tokens = |engine: &super::SimEngine| engine.tokens_to_first(&turn.prompt);
        if here < longest {
            let is_known = there < most;
            let holders = self.engines.iter().filter(|it| held(it) == longest);
            let sooner = || holders.map(tokens).min() > Some(tokens(&self.engines[engine]));
            agents.moved_sooner += u64::from(is_known && sooner());
            let is_early = !is_known && here / self.plan.block_tokens < there;
            agents.moved += u64::from(is_known);
            agents.early += u64::from(is_early);
            agents.unseen += u64::from(!is_known && !is_early);
        }
        agents.missed_tokens += u64::from(longest - here);
        if let (Some(parent), Some(shared)) = (session.parent, turn.shared_tokens) {
            let parents = self.turns.engines[parent];
            // A block that has the end of the common text is the sub-agent's own.
            let block = self.plan.block_tokens;
            let has_shared = |engine: usize| held(&self.engines[engine]) / block >= shared / block;
            let parents = parents.filter(|engine| has_shared(*engine));
            let is_there = parents == Some(engine);
            let has_room = parents.is_some_and(|it| self.engines[it].figures().waiting == 0);
            agents.children += 1;
            agents.at_parent += u64::from(is_there);
            agents.with_room += u64::from(has_room);
            agents.at_parent_with_room += u64::from(is_there && has_room);
            if let (Some(parents), true) = (parents, has_room && !is_there) {
                let is_copy = has_shared(engine);
                let [own, parents] = [engine, parents].map(|it| tokens(&self.engines[it]));
                let is_sooner = !is_copy && own < parents;
                agents.at_copy_with_room += u64::from(is_copy);
                agents.sooner_with_room += u64::from(is_sooner);
            }
        }
        self.turns.engines[turn.session] = Some(engine);
        self.requests[request].sent = self.now;
    }
}
