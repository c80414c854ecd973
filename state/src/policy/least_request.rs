//! `least-request`: fewest requests running and waiting, whatever they hold. A baseline.

use super::Candidate;

/// Requests at the backend.
pub(super) fn score(candidate: &Candidate) -> u64 {
    u64::from(candidate.running) + u64::from(candidate.waiting)
}
