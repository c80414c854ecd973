//! Watches backends' limits over all replicas during a run.
//!
//! The check is on running requests: their sum over the replicas at one moment of the world's clock
//! is compared with the limit, while the replicas that share it agree on their group and on the
//! limit. Otherwise the bound depends on what each had before (docs/internals/limits.md), which no
//! single moment shows.

use std::collections::BTreeMap;

use state::ids::{BackendRef, ReplicaId};

/// One replica's view of one limited backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShareObservation {
    /// The replica.
    pub replica: ReplicaId,
    /// Identifies the replicas that share limits.
    pub epoch: u64,
    /// Number of these replicas, including itself.
    pub members: usize,
    /// Whether the replica knows that they agree.
    pub is_settled: bool,
    /// The limit as the replica sees it.
    pub limit: u32,
    /// Number of requests that it runs there.
    pub running: u32,
    /// Number of requests that it may run there.
    pub allowed: u32,
}

/// Observation of a group of replicas that agree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct GroupLook {
    limit: u32,
    running: u32,
    members: u32,
    /// Whether a replica ran more than it may, left from before.
    is_over: bool,
}

/// Watches all limits.
#[derive(Debug, Default)]
pub struct LimitWatch {
    before: BTreeMap<(BackendRef, u64), GroupLook>,
    /// Moments after requests started, in a group that agreed then and the moment before.
    pub starts: u64,
    /// Those of `starts` after which several replicas together ran as many requests as they may.
    pub filled: u64,
    /// Observations of a limited backend at which a group agreed.
    pub agreed: u64,
    /// Observations at which the replicas of an epoch disagreed, or one of them was not seen.
    pub disagreed: u64,
    /// First start beyond the limit.
    pub exceeded: Option<String>,
}

impl LimitWatch {
    /// Records what all replicas have at each backend at one moment.
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
        before: GroupLook,
        now: GroupLook,
        group: &[ShareObservation],
    ) {
        if before.limit != now.limit || now.running <= before.running {
            return;
        }
        self.starts += 1;
        self.filled += u64::from(now.members > 1 && now.running >= now.limit);
        // Replicas that do not know yet that another one is over may each start one.
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

/// Returns the group's sums, or `None` if its replicas disagree or one was not seen.
fn agreed(group: &[ShareObservation]) -> Option<GroupLook> {
    let first = group.first()?;
    let is_like = |it: &ShareObservation| {
        it.is_settled && it.members == group.len() && it.limit == first.limit
    };
    group.iter().all(is_like).then(|| GroupLook {
        limit: first.limit,
        running: group.iter().map(|it| it.running).sum(),
        members: u32::try_from(group.len()).unwrap_or(u32::MAX),
        is_over: group.iter().any(|it| it.running > it.allowed),
    })
}
