//! Lease steps: queued updates of one attempt's lease.

use std::sync::Arc;

use state::command::LeaseOutcome;
use state::ids::{AttemptId, BackendRef, BlockHash};

use super::overlay::BlockRun;

/// Maximum number of blocks per lease step; longer chains are split. Two steps fit an envelope.
pub(super) const RUN_BLOCKS_MAX: usize = 4000;

/// One queued update of an attempt's lease.
#[derive(Debug)]
pub(super) struct LeaseStep {
    pub(super) attempt: AttemptId,
    pub(super) backend: BackendRef,
    pub(super) what: LeaseStepKind,
}

#[derive(Debug)]
pub(super) enum LeaseStepKind {
    Acquire {
        tip: Option<BlockHash>,
        run: BlockRun,
    },
    Extend {
        run: BlockRun,
    },
    Release {
        outcome: LeaseOutcome,
    },
}

impl LeaseStep {
    pub(super) fn run(&self) -> Option<&BlockRun> {
        match &self.what {
            LeaseStepKind::Acquire { run, .. } | LeaseStepKind::Extend { run } => Some(run),
            LeaseStepKind::Release { .. } => None,
        }
    }

    /// Returns an upper bound of the size of the encoded step, in bytes.
    pub(super) fn bytes(&self) -> usize {
        32 + 8 * self.run().map_or(0, BlockRun::len)
    }
}

/// Splits the blocks of `chain` from index `from` on into runs that each fit into one step.
pub(super) fn runs_of(chain: &Arc<[BlockHash]>, from: usize) -> impl Iterator<Item = BlockRun> {
    let starts = (from..chain.len()).step_by(RUN_BLOCKS_MAX);
    starts.map(|start| {
        let end = chain.len().min(start + RUN_BLOCKS_MAX);
        BlockRun::new(Arc::clone(chain), start..end)
    })
}

/// Returns the steps that acquire `chain` from index `from` on, after the block `tip` (`None`: at
/// the start of a prompt): an acquire, and extensions with the blocks that do not fit into it.
pub(super) fn acquire_steps(
    attempt: AttemptId,
    backend: BackendRef,
    tip: Option<BlockHash>,
    chain: &Arc<[BlockHash]>,
    from: usize,
) -> Vec<LeaseStep> {
    let mut runs = runs_of(chain, from);
    let run = runs
        .next()
        .unwrap_or_else(|| BlockRun::new(Arc::clone(chain), from..from));
    let mut steps = vec![LeaseStep {
        attempt,
        backend,
        what: LeaseStepKind::Acquire { tip, run },
    }];
    steps.extend(runs.map(|run| LeaseStep {
        attempt,
        backend,
        what: LeaseStepKind::Extend { run },
    }));
    steps
}
