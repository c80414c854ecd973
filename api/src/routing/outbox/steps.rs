//! Lease items on their way: what one attempt tells, in the order it must be told.

use std::sync::Arc;

use state::command::Outcome;
use state::ids::{AttemptId, BackendRef, BlockHash};

use crate::routing::overlay::Run;

/// Blocks of one lease step: longer chains are sent as several. Two fit into one envelope.
pub(super) const RUN_BLOCKS_MAX: usize = 4000;

/// One lease item to come.
#[derive(Debug)]
pub(super) struct Step {
    pub(super) attempt: AttemptId,
    pub(super) backend: BackendRef,
    pub(super) what: What,
}

#[derive(Debug)]
pub(super) enum What {
    Acquire { tip: Option<BlockHash>, run: Run },
    Extend { run: Run },
    Release { outcome: Outcome },
}

impl Step {
    pub(super) fn run(&self) -> Option<&Run> {
        match &self.what {
            What::Acquire { run, .. } | What::Extend { run } => Some(run),
            What::Release { .. } => None,
        }
    }

    /// Upper bound of the item's encoding.
    pub(super) fn bytes(&self) -> usize {
        32 + 8 * self.run().map_or(0, Run::len)
    }
}

/// The parts of `chain` from `from` on, none longer than one step carries.
pub(super) fn runs_of(chain: &Arc<[BlockHash]>, from: usize) -> impl Iterator<Item = Run> {
    let starts = (from..chain.len()).step_by(RUN_BLOCKS_MAX);
    starts.map(|start| {
        let end = chain.len().min(start + RUN_BLOCKS_MAX);
        Run::new(Arc::clone(chain), start..end)
    })
}

/// An acquire of `chain` from `from` on, behind `tip`, with as many extensions as its length asks.
pub(super) fn acquire_steps(
    attempt: AttemptId,
    backend: BackendRef,
    tip: Option<BlockHash>,
    chain: &Arc<[BlockHash]>,
    from: usize,
) -> Vec<Step> {
    let mut runs = runs_of(chain, from);
    let run = runs
        .next()
        .unwrap_or_else(|| Run::new(Arc::clone(chain), from..from));
    let mut steps = vec![Step {
        attempt,
        backend,
        what: What::Acquire { tip, run },
    }];
    steps.extend(runs.map(|run| Step {
        attempt,
        backend,
        what: What::Extend { run },
    }));
    steps
}
