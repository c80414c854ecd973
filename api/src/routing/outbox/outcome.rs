//! Handles the outcome of a proposed envelope: committed, rejected, or unknown.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use state::command::{BatchReply, Committed, LeaseOutcome, Rejection, Reply};
use state::ids::{AttemptId, BlockHash, LogIndex};

use super::overlay::BlockRun;
use super::steps::{LeaseStep, LeaseStepKind, acquire_steps};
use super::{CommittedEnvelope, Outbox};
use crate::planted::{self, Bug};
use crate::ports::ProposeError;

/// Step that follows the outcome of a proposal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AfterProposal {
    /// The envelope is committed: continue with the next one.
    Continue,
    /// The state rejected the envelope for this reason: continue with the next one.
    Refused(String),
    /// The envelope is not known to be committed, for this reason: propose [`Outbox::outstanding`]
    /// again later.
    Retry(String),
    /// The state contains a later run of this replica: two processes share its id, or a backup was
    /// restored. Propose [`Outbox::outstanding`] again later, in a new session.
    Renewed,
    /// The replica is stopping: propose nothing more.
    Stop,
}

impl Outbox {
    /// Handles the outcome of the outstanding envelope. If the cluster ended its session because
    /// the replica seemed gone, this run continues under the successor session.
    pub fn handle_outcome(&mut self, outcome: Result<Committed, ProposeError>) -> AfterProposal {
        let committed = match outcome {
            Ok(committed) => committed,
            Err(ProposeError::Stopping) => return AfterProposal::Stop,
            Err(ProposeError::Unknown(_)) if planted::is(Bug::OutboxForgetsUnknown) => {
                self.confirmed(LogIndex(0), &BatchReply::default());
                return AfterProposal::Continue;
            }
            Err(failure @ (ProposeError::Unavailable(_) | ProposeError::Unknown(_))) => {
                let is_unknown = matches!(failure, ProposeError::Unknown(_));
                if is_unknown && planted::is(Bug::OutboxRenumbersUnknown) {
                    self.renumber();
                }
                if is_unknown && planted::is(Bug::OutboxChargesUnknownAgain) {
                    let outstanding = self.outstanding.iter().flat_map(|it| it.charges.values());
                    let charges: Vec<_> = outstanding.copied().collect();
                    charges.into_iter().for_each(|charge| self.charge(charge));
                }
                return AfterProposal::Retry(failure.to_string());
            }
        };
        match plain(committed.reply) {
            Reply::Batch(reply) => self.confirmed(committed.index, &reply),
            Reply::Applied | Reply::Repeated(_) => {
                self.confirmed(committed.index, &BatchReply::default());
            }
            Reply::Rejected(reject @ Rejection::NotInitialised) => {
                self.renumber();
                return AfterProposal::Retry(reject.to_string());
            }
            Reply::Rejected(Rejection::StaleSession { .. }) => {
                (self.session, self.last_seq) = (self.session.successor(), 0);
                self.renumber();
                return AfterProposal::Renewed;
            }
            Reply::Rejected(reject) => {
                let items = self.outstanding.as_ref().map_or(0, |it| it.size.items);
                self.dropped += items as u64;
                self.commits.refused();
                self.confirmed(committed.index, &BatchReply::default());
                return AfterProposal::Refused(reject.to_string());
            }
        }
        AfterProposal::Continue
    }

    /// Gives the outstanding envelope the current session and a new sequence number, because a
    /// rejection used up the old one.
    fn renumber(&mut self) {
        self.last_seq += 1;
        if let Some(outstanding) = &mut self.outstanding {
            outstanding.envelope.origin.session = self.session;
            outstanding.envelope.origin.seq = self.last_seq;
        }
    }

    fn confirmed(&mut self, index: LogIndex, reply: &BatchReply) {
        let Some(outstanding) = self.outstanding.take() else {
            return;
        };
        self.commits.committed(index);
        self.committed_to = index;
        self.dropped += u64::from(reply.dropped);
        self.settling.push_back(CommittedEnvelope {
            index,
            runs: outstanding.runs,
            charges: outstanding.charges,
        });
        let missing: BTreeSet<AttemptId> = reply.missing_tip.iter().copied().collect();
        for attempt in &outstanding.acquires {
            if missing.contains(attempt) {
                continue;
            }
            if let Some(lease) = self.leases.get_mut(attempt) {
                lease.unconfirmed = None;
                if lease.end.is_some() {
                    self.leases.remove(attempt);
                }
            }
        }
        self.acquire_whole(&missing);
    }

    /// Queues all steps of the attempts in `missing` again: at the front, in order, without a tip.
    fn acquire_whole(&mut self, missing: &BTreeSet<AttemptId>) {
        if missing.is_empty() {
            return;
        }
        let void: Vec<AttemptId> = missing
            .iter()
            .copied()
            .filter(|attempt| self.leases.contains_key(attempt))
            .collect();
        self.void_steps(missing);
        let mut steps: VecDeque<LeaseStep> = VecDeque::new();
        let mut ascending = void;
        ascending.sort_unstable();
        for attempt in ascending {
            steps.extend(self.whole_steps(attempt));
        }
        for step in steps.into_iter().rev() {
            if let Some(run) = step.run() {
                self.overlay.add(step.backend, run);
            }
            self.queued.add(step.bytes());
            self.steps.push_front(step);
        }
    }

    /// Removes the queued steps of `attempts`, because their acquires did not happen.
    fn void_steps(&mut self, attempts: &BTreeSet<AttemptId>) {
        let Self {
            steps,
            queued,
            overlay,
            ..
        } = self;
        steps.retain(|step| {
            if !attempts.contains(&step.attempt) {
                return true;
            }
            queued.take(step.bytes());
            if let Some(run) = step.run() {
                overlay.remove(step.backend, run);
            }
            false
        });
    }

    /// Returns all steps of an attempt, from the prompt's first block to the release, if it has
    /// ended. Drops an attempt whose blocks are to be discarded.
    fn whole_steps(&mut self, attempt: AttemptId) -> Vec<LeaseStep> {
        let Some(lease) = self.leases.get_mut(&attempt) else {
            return Vec::new();
        };
        if lease.end == Some(LeaseOutcome::Discarded) {
            self.leases.remove(&attempt);
            return Vec::new();
        }
        let runs = lease.unconfirmed.iter().flatten();
        let chain: Arc<[BlockHash]> = runs.flat_map(BlockRun::blocks).copied().collect();
        lease.unconfirmed = Some(vec![BlockRun::new(Arc::clone(&chain), 0..chain.len())]);
        let backend = lease.backend;
        let mut steps = acquire_steps(attempt, backend, None, &chain, 0);
        steps.extend(lease.end.map(|outcome| LeaseStep {
            attempt,
            backend,
            what: LeaseStepKind::Release { outcome },
        }));
        steps
    }
}

fn plain(reply: Reply) -> Reply {
    match reply {
        Reply::Repeated(first) => plain(*first),
        Reply::Applied | Reply::Batch(_) | Reply::Rejected(_) => reply,
    }
}
