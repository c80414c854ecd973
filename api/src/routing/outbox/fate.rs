//! Handles the outcome of a proposed envelope: applied, rejected, or unknown.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use state::command::{BatchReply, Committed, LeaseOutcome, Rejection, Reply};
use state::ids::{AttemptId, BlockHash, LogIndex};

use super::overlay::BlockRun;
use super::steps::{LeaseStep, LeaseStepKind, acquire_steps};
use super::{CommittedEnvelope, Outbox};
use crate::planted::{self, Bug};
use crate::ports::ProposeError;

/// What to do after an envelope's fate was reported.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AfterProposal {
    /// It is applied: go on.
    GoOn,
    /// It was refused for good, says why: go on without it.
    Refused(String),
    /// It is not known to be applied, says why: propose again what [`Outbox::outstanding`] says,
    /// later.
    Retry(String),
    /// The state knows a later run of this replica: two processes share its id, or a backup was
    /// put back. Go on as [`AfterProposal::Retry`], in a session of its own.
    Renewed,
    /// The replica stops.
    Stop,
}

impl Outbox {
    /// Notes the fate of the outstanding envelope. Where its session was declared over while the
    /// replica was thought gone, this run goes on under the next one.
    pub fn fate(&mut self, fate: Result<Committed, ProposeError>) -> AfterProposal {
        let committed = match fate {
            Ok(committed) => committed,
            Err(ProposeError::Stopping) => return AfterProposal::Stop,
            Err(ProposeError::Unknown(_)) if planted::is(Bug::OutboxForgetsUnknown) => {
                self.confirmed(LogIndex(0), &BatchReply::default());
                return AfterProposal::GoOn;
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
        AfterProposal::GoOn
    }

    /// Gives the outstanding envelope a new number: its last one was used up by a refusal.
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
        self.commits.committed();
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

    /// Queues attempts anew whose tip was missing, at the front and in order, without a tip.
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

    /// Takes queued steps of `attempts` out: they lean on an acquire that did not happen.
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

    /// All steps of an attempt from the prompt's first block to its release. An attempt whose
    /// blocks would be given back at once is let go instead.
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
