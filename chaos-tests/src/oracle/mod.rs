//! The oracle: records of a run, and the model by which runs are judged.
//!
//! The simulated world records what it sees. [`Observation`] holds the replicas' side (what each
//! applied, which one led, which ones could reach each other), [`History`] the clients' side
//! (operations, times, results). Both are plain records, and [`crate::invariants`] are functions
//! over them. The oracle neither reads a clock nor calls the product's `apply`: a naive [`model`]
//! replays the log to compute the state.

pub mod comparison;
pub mod fleet;
pub mod history;
pub mod image;
pub mod limits;
pub mod linear;
pub mod model;
pub mod observation;
pub mod register;
pub mod search;

use std::sync::{Arc, Mutex, PoisonError};

use comparison::ReplayComparison;
pub use history::History;
use history::OperationResult;
pub use observation::Observation;
use observation::ReplicaRun;

/// Everything that is known about one run of a cluster.
#[derive(Debug, Default)]
pub struct RunRecord {
    /// Observations of the replicas.
    pub observation: Observation,
    /// History of the clients.
    pub history: History,
    /// Cached result of [`RunRecord::comparison`], with the numbers of entries and images from
    /// which it was made.
    compared: Mutex<Option<([usize; 3], Arc<ReplayComparison>)>>,
}

impl RunRecord {
    /// Returns the outcome that a client may trust: [`OperationResult::Unknown`] while the state of
    /// the replica's run is corrupted on purpose, otherwise `outcome`.
    #[must_use]
    pub fn outcome_if_trusted(&self, run: ReplicaRun, outcome: OperationResult) -> OperationResult {
        if self.observation.is_spoiled(run) {
            OperationResult::Unknown
        } else {
            outcome
        }
    }

    /// Returns the naive replay of the log and its differences from state images. The result is
    /// cached until its inputs change.
    pub fn comparison(&self) -> Arc<ReplayComparison> {
        let seen = &self.observation;
        let made_of = [seen.log.len(), seen.images.len(), seen.at_rest.len()];
        let mut compared = self.compared.lock().unwrap_or_else(PoisonError::into_inner);
        match &*compared {
            Some((known, comparison)) if *known == made_of => Arc::clone(comparison),
            _ => {
                let comparison = Arc::new(ReplayComparison::of(seen));
                *compared = Some((made_of, Arc::clone(&comparison)));
                comparison
            }
        }
    }
}
