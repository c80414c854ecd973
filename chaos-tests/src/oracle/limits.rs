//! Observes during a run whether all replicas together hold the limits of backends.
//!
//! The check adds up the requests that run at one moment of the world's clock, over the replicas
//! that share a limit. It compares the sum with the limit while these replicas agree on their group
//! and on the limit. Otherwise the bound depends on what each had before
//! (docs/internals/limits.md), which no single moment shows.

use std::collections::BTreeMap;

use state::ids::{BackendRef, ReplicaId};

/// One replica's view of one limited backend at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShareObservation {
    /// Replica that has this view.
    pub replica: ReplicaId,
    /// Epoch that identifies the group of replicas that share the limit.
    pub epoch: u64,
    /// Number of replicas in the group, including this one.
    pub members: usize,
    /// Whether the replica knows that the group agrees.
    pub is_settled: bool,
    /// Limit of the backend as the replica sees it.
    pub limit: u32,
    /// Number of requests that the replica runs at the backend.
    pub running: u32,
    /// Number of requests that the replica may run at the backend.
    pub allowed: u32,
}

/// Sums over a group of replicas that agree, at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct GroupSums {
    limit: u32,
    running: u32,
    members: u32,
    /// Whether a replica ran more requests than it may, because its share has shrunk.
    is_over: bool,
}

/// Observer of the limits of all backends over a run.
#[derive(Debug, Default)]
pub struct LimitWatch {
    before: BTreeMap<(BackendRef, u64), GroupSums>,
    /// Number of times that a group ran more requests than a moment before, and agreed at both.
    pub starts: u64,
    /// Number of `starts` after which a group of several replicas had reached the limit.
    pub filled: u64,
    /// Number of observations of a limited backend in which a group agreed.
    pub agreed: u64,
    /// Number of observations in which the replicas of an epoch disagreed, or one was not seen.
    pub disagreed: u64,
    /// Description of the first start beyond the limit, if any.
    pub exceeded: Option<String>,
}

impl LimitWatch {
    /// Records the views of all replicas on each limited backend at one moment.
    pub fn look(&mut self, at_us: u64, looks: &BTreeMap<BackendRef, Vec<ShareObservation>>) {
        let mut now = BTreeMap::new();
        for (backend, looks) in looks {
            let mut groups: BTreeMap<u64, Vec<ShareObservation>> = BTreeMap::new();
            for look in looks {
                groups.entry(look.epoch).or_default().push(*look);
            }
            for (epoch, group) in groups {
                let Some(look) = agreed(&group) else {
                    self.disagreed += 1;
                    continue;
                };
                self.agreed += 1;
                if let Some(before) = self.before.get(&(*backend, epoch)) {
                    self.compare(at_us, *before, look, &group);
                }
                now.insert((*backend, epoch), look);
            }
        }
        self.before = now;
    }

    fn compare(
        &mut self,
        at_us: u64,
        before: GroupSums,
        now: GroupSums,
        group: &[ShareObservation],
    ) {
        if before.limit != now.limit || now.running <= before.running {
            return;
        }
        self.starts += 1;
        self.filled += u64::from(now.members > 1 && now.running >= now.limit);
        // Until they hear that another replica exceeds its share, the others may each start one.
        let most = match before.is_over {
            true => now.limit.max(before.running) + now.members - 1,
            false => now.limit,
        };
        if now.running > most {
            let detail = format!("at {at_us} us, {} before, {group:?}", before.running);
            self.exceeded.get_or_insert(detail);
        }
    }
}

/// Returns the sums over a group; `None` if its replicas disagree or one was not seen.
fn agreed(group: &[ShareObservation]) -> Option<GroupSums> {
    let first = group.first()?;
    let is_like = |it: &ShareObservation| {
        it.is_settled && it.members == group.len() && it.limit == first.limit
    };
    group.iter().all(is_like).then(|| GroupSums {
        limit: first.limit,
        running: group.iter().map(|it| it.running).sum(),
        members: u32::try_from(group.len()).unwrap_or(u32::MAX),
        is_over: group.iter().any(|it| it.running > it.allowed),
    })
}
