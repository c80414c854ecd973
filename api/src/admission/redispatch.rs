//! Dispatches requests that a gateway sent to another endpoint than the first one offered.

use tokio::time::Instant;

use super::{Admission, AdmissionRequest};
use crate::routing::{Attempt, Decision, DispatchTerms};

impl Admission {
    /// Dispatches an admitted request to another backend, even beyond its limit. A gateway sent the
    /// request there at `then`, because it could not reach the first backend.
    pub(crate) fn redispatch(
        &self,
        decision: &Decision,
        candidate: &dyn AdmissionRequest,
        then: Instant,
    ) -> Attempt {
        let terms = DispatchTerms {
            tokens_max: candidate.tokens_max(),
        };
        let ask = candidate.ask(&[]);
        self.dispatcher.dispatch(decision, &ask, terms, then)
    }
}
