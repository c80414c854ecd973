//! Automatic promotion of learners to voters by the leader, if its options enable it.
//!
//! A learner is promoted once it has kept up for a while: it responds, it could lead (its log is
//! writable, its state is not in doubt), and its disk holds nearly all of the log, including the
//! entry that made it a member. Learners are promoted only up to an odd number of voters: one voter
//! more tolerates no further failure, but makes every write wait for one more disk.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior};

use super::ReplicaInner;
use super::membership_change::LAG_MAX;
use crate::options::Promotion;
use crate::types::Metrics;
use crate::wire::proto;
use crate::wire::proto::change_request::Change;
use crate::wire::proto::change_response::Result as Outcome;

/// Interval between two checks of the learners.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Promotes learners for as long as this replica leads.
pub(super) async fn promote_learners(inner: Arc<ReplicaInner>) {
    let Some(promotion) = inner.options.promotion.clone() else {
        return;
    };
    let mut ticks = tokio::time::interval(LOOK_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut learners = StableLearners::default();
    loop {
        ticks.tick().await;
        let Some(seen) = inner.electorate() else {
            learners = StableLearners::default();
            continue;
        };
        let Some(id) = learners.look(Instant::now(), &seen, &promotion) else {
            continue;
        };
        let promote = Change::Promote(proto::Promote {
            id,
            voters_below: 0,
        });
        match inner.change_here(promote).await {
            Outcome::Changed(_) => tracing::info!(id, "promoted a learner that kept up"),
            Outcome::Refused(why) | Outcome::Unknown(why) => {
                tracing::warn!(id, why, "could not make a learner a voter");
            }
            Outcome::NotLeader(_) => {}
        }
    }
}

/// Number of voters, and the learners that keep up.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Electorate {
    voters: usize,
    keeping_up: BTreeSet<u64>,
}

/// Times since which each learner has kept up. Reads no clock: time and observations are arguments.
#[derive(Debug, Default)]
struct StableLearners(BTreeMap<u64, Instant>);

impl StableLearners {
    /// Records the observation `seen` at `now`. Returns the learner to promote, if any.
    fn look(&mut self, now: Instant, seen: &Electorate, promotion: &Promotion) -> Option<u64> {
        self.0.retain(|id, _| seen.keeping_up.contains(id));
        for id in &seen.keeping_up {
            self.0.entry(*id).or_insert(now);
        }
        let is_stable = |since: &Instant| now.duration_since(*since) >= promotion.after;
        let mut stable = self.0.iter().filter(|(_, since)| is_stable(since));
        let possible = seen.voters + stable.clone().count();
        let wanted = odd_below(possible.min(promotion.voters_max));
        let first = stable.next().map(|(id, _)| *id);
        first.filter(|_| wanted > seen.voters)
    }
}

/// Returns the greatest odd number that is at most `number`; 0 for 0.
fn odd_below(number: usize) -> usize {
    match number % 2 {
        0 => number.saturating_sub(1),
        _ => number,
    }
}

impl ReplicaInner {
    /// Returns the electorate, if this replica leads with a quorum and no change is pending.
    fn electorate(&self) -> Option<Electorate> {
        let voters = self.settled_voters()?;
        let reports = self.links.reachability.reports();
        let connected = self.connected.borrow().clone();
        let is_sound = |id: u64| {
            let report = reports.get(&id);
            connected.contains(&id) && report.is_some_and(|report| !report.refuses_leadership)
        };
        self.with_metrics(|metrics| {
            let nodes = metrics.membership_config.nodes().map(|(id, _)| *id);
            let learners = nodes.filter(|id| !voters.contains(id));
            Some(Electorate {
                voters: voters.len(),
                keeping_up: learners
                    .filter(|id| is_sound(*id) && has_kept_up(metrics, *id))
                    .collect(),
            })
        })
    }

    /// Returns the voters, if this replica leads with a quorum and no change is pending.
    pub(super) fn settled_voters(&self) -> Option<BTreeSet<u64>> {
        if !*self.has_quorum.borrow() {
            return None;
        }
        self.with_metrics(|metrics| {
            let newest = &metrics.membership_config;
            let is_settled = newest.membership().get_joint_config().len() == 1
                && newest.log_id() == metrics.committed_membership_config.log_id();
            is_settled.then(|| newest.voter_ids().collect())
        })
    }
}

/// Whether the learner's disk holds nearly all of the log, and the entry that made it a member.
fn has_kept_up(metrics: &Metrics, id: u64) -> bool {
    let replication = metrics.replication.as_ref();
    let Some(matched) = replication.and_then(|all| all.get(&id).copied().flatten()) else {
        return false;
    };
    let is_near = (metrics.last_log_index).is_none_or(|last| matched.index + LAG_MAX >= last);
    is_near && Some(matched) >= *metrics.membership_config.log_id()
}

#[cfg(test)]
mod tests {
    use super::*;

    const AFTER: Duration = Duration::from_secs(10);

    /// Returns the learner to promote among `learners`, which have kept up for long enough; `None`
    /// if none should be.
    fn given(voters: usize, learners: &[u64], voters_max: usize) -> Option<u64> {
        let promotion = Promotion {
            after: AFTER,
            voters_max,
        };
        let seen = Electorate {
            voters,
            keeping_up: learners.iter().copied().collect(),
        };
        let (mut stable, start) = (StableLearners::default(), Instant::now());
        assert_eq!(stable.look(start, &seen, &promotion), None);
        stable.look(start + AFTER, &seen, &promotion)
    }

    #[test]
    fn promotion_keeps_the_number_of_voters_odd() {
        assert_eq!(given(3, &[], 5), None);
        assert_eq!(given(3, &[4], 5), None, "four tolerate no more than three");
        assert_eq!(given(3, &[4, 5], 5), Some(4));
        assert_eq!(given(4, &[5], 5), Some(5));
        assert_eq!(given(2, &[3], 5), Some(3));
        assert_eq!(given(1, &[2], 5), None);
        assert_eq!(given(5, &[6, 7], 5), None, "there are enough");
        assert_eq!(given(3, &[4, 5], 4), None);
        assert_eq!(given(5, &[6, 7], 7), Some(6));
    }

    #[test]
    fn a_learner_that_falls_behind_restarts_its_wait() {
        let promotion = Promotion {
            after: AFTER,
            voters_max: 5,
        };
        let seen = |keeping_up: &[u64]| Electorate {
            voters: 3,
            keeping_up: keeping_up.iter().copied().collect(),
        };
        let (mut stable, start) = (StableLearners::default(), Instant::now());
        let mut look = |after: Duration, keeping_up: &[u64]| {
            stable.look(start + after, &seen(keeping_up), &promotion)
        };
        assert_eq!(look(Duration::ZERO, &[4, 5]), None);
        assert_eq!(look(AFTER / 2, &[4]), None);
        assert_eq!(look(AFTER, &[4, 5]), None, "one of two");
        assert_eq!(look(AFTER * 2, &[4, 5]), Some(4));
    }
}
