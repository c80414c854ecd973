//! Limits of backends over all replicas, watched as a run goes on.
//!
//! What counts is what runs: the sum over the replicas, at one moment of the one clock. It is held
//! against the limit while the replicas that share it are agreed on who they are and on the limit.
//! Else what may run is bounded by what each had before (docs/internals/limits.md), which follows
//! from no single moment.

use std::collections::BTreeMap;

use state::ids::{BackendRef, ReplicaId};

/// One replica at one limited backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShareLook {
    /// The replica.
    pub replica: ReplicaId,
    /// Names those that it shares limits with.
    pub epoch: u64,
    /// How many they are, itself included.
    pub members: usize,
    /// Whether it knows that they agree.
    pub is_settled: bool,
    /// The limit as it sees it.
    pub limit: u32,
    /// What runs there from it.
    pub running: u32,
    /// What may.
    pub allowed: u32,
}

/// What was seen of a group of replicas that agree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct GroupLook {
    limit: u32,
    running: u32,
    members: u32,
    /// Whether a replica ran more than it may, from before.
    is_over: bool,
}

/// Watches all limits.
#[derive(Debug, Default)]
pub struct LimitWatch {
    before: BTreeMap<(BackendRef, u64), GroupLook>,
    /// Moments at which requests had started, of a group that agreed then and the moment before.
    pub starts: u64,
    /// Of these, those after which several replicas together ran as many as they may.
    pub filled: u64,
    /// Looks at a limited backend at which a group agreed.
    pub agreed: u64,
    /// Looks at which the replicas of an epoch did not, or one of them was not seen.
    pub disagreed: u64,
    /// The first time that one started beyond the limit.
    pub exceeded: Option<String>,
}

impl LimitWatch {
    /// Takes in what all replicas have at each backend at a moment.
    pub fn look(&mut self, at_us: u64, looks: &BTreeMap<BackendRef, Vec<ShareLook>>) {
        let mut now = BTreeMap::new();
        for (backend, looks) in looks {
            let mut groups: BTreeMap<u64, Vec<ShareLook>> = BTreeMap::new();
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

    fn compare(&mut self, at_us: u64, before: GroupLook, now: GroupLook, group: &[ShareLook]) {
        if before.limit != now.limit || now.running <= before.running {
            return;
        }
        self.starts += 1;
        self.filled += u64::from(now.members > 1 && now.running >= now.limit);
        // Those who do not know yet that another one is over may each start one.
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

/// `None`: they do not all agree, or one of them was not seen.
fn agreed(group: &[ShareLook]) -> Option<GroupLook> {
    let first = group.first()?;
    let is_like =
        |it: &ShareLook| it.is_settled && it.members == group.len() && it.limit == first.limit;
    group.iter().all(is_like).then(|| GroupLook {
        limit: first.limit,
        running: group.iter().map(|it| it.running).sum(),
        members: u32::try_from(group.len()).unwrap_or(u32::MAX),
        is_over: group.iter().any(|it| it.running > it.allowed),
    })
}
