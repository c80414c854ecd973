//! A replica leads a term in at most one run.
//!
//! A term can have several leaders, though: votes are ordered by term and then by candidate
//! (openraft's `leader_id_adv`, with which fewer elections end without a leader). A voter may thus
//! turn to a candidate with a higher id in the same term, and the former leader can commit nothing
//! more. The log shows whether they agree. The same pair of term and leader can never occur twice:
//! a restarted replica has forgotten that it led, and campaigns in a later term than that of its
//! persisted vote.

use std::collections::BTreeMap;

use state::ids::ReplicaId;

use super::{PropertyError, Subjects};
use crate::oracle::RunRecord;
use crate::oracle::observation::ReplicaRun;

/// Number of the invariant in docs/internals/invariants.md.
pub const NUMBER: &str = "I28";
/// Statement of the invariant.
pub const NAME: &str = "a replica leads a term in one run at most";

/// Checks every observation of a leader.
///
/// # Errors
/// If two runs of a replica led in one term.
pub fn check(record: &RunRecord) -> Result<Subjects, PropertyError> {
    let mut leaders: BTreeMap<(u64, ReplicaId), ReplicaRun> = BTreeMap::new();
    for leading in &record.observation.leading {
        let key = (leading.term, leading.run.replica);
        let leader = leaders.entry(key).or_insert(leading.run);
        if *leader != leading.run {
            let detail = format!(
                "term {} is led by {leader} and by {} ({} us)",
                leading.term, leading.run, leading.at_us
            );
            return Err(super::violation(NUMBER, NAME, detail));
        }
    }
    Ok(leaders.len() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::fixture::run;

    #[test]
    fn two_leaders_of_one_term_are_detected() {
        let mut record = RunRecord::default();
        let seen = &mut record.observation;
        seen.leads(1, run(1, 1), 1);
        seen.leads(2, run(1, 1), 1);
        seen.leads(3, run(2, 1), 2);
        seen.leads(4, run(3, 1), 2);
        seen.leads(5, run(1, 2), 3);
        assert_eq!(check(&record), Ok(4));
        record.observation.leads(6, run(2, 2), 2);
        assert!(check(&record).is_err());
    }
}
