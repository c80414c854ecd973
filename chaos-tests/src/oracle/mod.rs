//! The oracle: records of a run and the model it is judged against.
//!
//! The world tells what it saw: [`Observation`] is the side of the replicas (what each of them
//! applied, who led, who could reach whom), [`History`] the side of the clients (what they asked
//! for, when, and what they were told). Both are plain records; [`crate::invariants`] are functions
//! over them. Nothing here looks at a clock or calls the product's `apply`: what the state must be
//! is computed by a naive [`model`] that replays the log.

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

/// Everything known of one run of a cluster.
#[derive(Debug, Default)]
pub struct RunRecord {
    /// What the replicas did.
    pub observation: Observation,
    /// What the clients saw.
    pub history: History,
    /// The last [`RunRecord::comparison`], with what it was made of: entries, images.
    compared: Mutex<Option<([usize; 3], Arc<ReplayComparison>)>>,
}

impl RunRecord {
    /// What a client is to make of what a run told it: nothing, while the world has taken the run's
    /// state.
    #[must_use]
    pub fn as_told(&self, run: ReplicaRun, outcome: OperationResult) -> OperationResult {
        if self.observation.is_spoiled(run) {
            OperationResult::Unknown
        } else {
            outcome
        }
    }

    /// The log replayed by the naive model, and where states differ from it. Made once for as long
    /// as nothing was added that it looks at.
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
