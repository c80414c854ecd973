//! Computes how many places of a backend each replica should hold, and the transfers between them.
//!
//! All functions depend only on the replicas' reports, so replicas with the same knowledge compute
//! the same transfers: several with places to spare do not all serve the same need.

use std::cmp::Reverse;

use super::Demand;
use crate::ids::ReplicaId;

/// Share and demand of one replica at one backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ReplicaShare {
    pub(super) replica: ReplicaId,
    /// Number of places that the replica holds; negative if a limit fell below what was handed over
    /// before.
    pub(super) share: i64,
    pub(super) demand: Demand,
}

/// Result of splitting a backend's places among the replicas.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Split {
    /// Number of places that each replica should hold now, including those in use.
    pub(super) targets: Vec<i64>,
    /// Number of requests that each replica should run; `None` if there are enough places. A
    /// replica that runs more hands over its next free place.
    pub(super) fair: Option<Vec<i64>>,
}

/// Transfer of places between two replicas, which are given by their indexes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Transfer {
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) places: i64,
}

/// Splits `total` in proportion to `weights` by largest remainders. Equal remainders are served in
/// order from `rotation` on. If all weights are 0, they count as equal.
pub(super) fn apportion(total: i64, weights: &[i64], rotation: usize) -> Vec<i64> {
    let sum: i128 = weights.iter().map(|it| i128::from(*it)).sum();
    if sum == 0 {
        return match weights.len() {
            0 => Vec::new(),
            len => apportion(total, &vec![1; len], rotation),
        };
    }
    let len = weights.len();
    let quota = |weight: &i64| i128::from(total) * i128::from(*weight);
    let mut parts: Vec<i64> = weights
        .iter()
        .map(|weight| i64::try_from(quota(weight) / sum).unwrap_or(i64::MAX))
        .collect();
    let left = total - parts.iter().sum::<i64>();
    let mut order: Vec<usize> = (0..len).collect();
    order.sort_by_key(|&at| {
        let place = (at + len - rotation % len) % len;
        (Reverse(quota(&weights[at]) % sum), place)
    });
    for at in order.into_iter().take(usize::try_from(left).unwrap_or(0)) {
        parts[at] += 1;
    }
    parts
}

/// Splits `places` among the replicas. `rotation` determines which of them get the remainder of an
/// uneven split. If `gather_spare`, one replica gets all free places.
pub(super) fn split(
    places: i64,
    replica_shares: &[ReplicaShare],
    rotation: usize,
    gather_spare: bool,
) -> Split {
    let running = |it: &ReplicaShare| i64::from(it.demand.running);
    let waiting = |it: &ReplicaShare| i64::from(it.demand.waiting);
    let runs: Vec<i64> = replica_shares.iter().map(running).collect();
    let free = (places - runs.iter().sum::<i64>()).max(0);
    let waits: i64 = replica_shares.iter().map(waiting).sum();
    if gather_spare {
        let mut targets = runs;
        if let Some(at) = next_batch_replica(replica_shares) {
            targets[at] += free;
        }
        return Split {
            targets,
            fair: None,
        };
    }
    if waits > free {
        let fair = fair(places, replica_shares, rotation);
        let mut targets = runs;
        let mut left = free;
        for at in by_wait(replica_shares) {
            let more = (fair[at] - targets[at]).clamp(0, left);
            targets[at] += more;
            left -= more;
        }
        return Split {
            targets,
            fair: Some(fair),
        };
    }
    let spare = spread(free - waits, replica_shares, rotation);
    let targets = replica_shares.iter().zip(spare);
    Split {
        targets: targets
            .map(|(it, spare)| running(it) + waiting(it) + spare)
            .collect(),
        fair: None,
    }
}

/// Splits `spare` places: one for each replica if there are enough, the rest in proportion to the
/// requests that each has started recently.
fn spread(spare: i64, replica_shares: &[ReplicaShare], rotation: usize) -> Vec<i64> {
    let len = i64::try_from(replica_shares.len()).unwrap_or(i64::MAX);
    let each = i64::from(spare >= len);
    let recent = |it: &ReplicaShare| i64::from(it.demand.recent) + 1;
    let weights: Vec<i64> = replica_shares.iter().map(recent).collect();
    let mut parts = apportion(spare - each * len, &weights, rotation);
    parts.iter_mut().for_each(|part| *part += each);
    parts
}

/// Returns how many requests each replica should run when more requests wait than places are free:
/// one for each replica with any demand, the rest in proportion to demand. If places do not suffice
/// for that, replicas that run nothing come first, by the longest wait.
fn fair(places: i64, replica_shares: &[ReplicaShare], rotation: usize) -> Vec<i64> {
    let demand = |it: &ReplicaShare| i64::from(it.demand.running) + i64::from(it.demand.waiting);
    let demands: Vec<i64> = replica_shares.iter().map(demand).collect();
    let wanting = demands.iter().filter(|it| **it > 0).count();
    let wanting = i64::try_from(wanting).unwrap_or(i64::MAX);
    if wanting <= places {
        let beyond: Vec<i64> = demands.iter().map(|it| (it - 1).max(0)).collect();
        let rest = apportion(places - wanting, &beyond, rotation);
        let first = demands.iter().map(|it| i64::from(*it > 0));
        return first.zip(rest).map(|(first, rest)| first + rest).collect();
    }
    let mut parts = vec![0; replica_shares.len()];
    let idle = |at: &usize| replica_shares[*at].demand.running == 0;
    let (first, then): (Vec<usize>, Vec<usize>) =
        by_wait(replica_shares).into_iter().partition(idle);
    let count = usize::try_from(places).unwrap_or(0);
    for at in first.into_iter().chain(then).take(count) {
        parts[at] = 1;
    }
    parts
}

/// Returns the indexes of the replicas with waiting requests, the longest wait first.
fn by_wait(replica_shares: &[ReplicaShare]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..replica_shares.len())
        .filter(|at| replica_shares[*at].demand.waiting > 0)
        .collect();
    order.sort_by_key(|at| Reverse(replica_shares[*at].demand.waited_ms));
    order
}

/// Returns the index of the replica whose batch is next: one that runs requests, else the one with
/// the longest wait. `None` if no replica has any demand.
fn next_batch_replica(replica_shares: &[ReplicaShare]) -> Option<usize> {
    let mut busy = (0..replica_shares.len()).filter(|at| replica_shares[*at].demand.running > 0);
    let holder = busy.next();
    holder.or_else(|| by_wait(replica_shares).first().copied())
}

/// Returns the transfers that bring all replicas nearer to their `targets`, serving current needs
/// before possible ones. No replica hands over places that it uses.
pub(super) fn transfers(replica_shares: &[ReplicaShare], targets: &[i64]) -> Vec<Transfer> {
    let lacks = |at: usize| targets[at] - replica_shares[at].share;
    let is_needed = |at: &usize| {
        let it = &replica_shares[*at];
        it.demand.waiting > 0 || it.share < i64::from(it.demand.running)
    };
    let mut takers: Vec<usize> = (0..replica_shares.len())
        .filter(|at| lacks(*at) > 0)
        .collect();
    takers.sort_by_key(|at| !is_needed(at));
    let mut takers = takers.into_iter().map(|at| (at, lacks(at)));
    let mut transfers = Vec::new();
    let mut taker = takers.next();
    for from in 0..replica_shares.len() {
        let spare = replica_shares[from].share - targets[from].max(0);
        let mut spare = spare.max(0);
        while let Some((to, lack)) = taker.filter(|_| spare > 0) {
            let places = spare.min(lack);
            transfers.push(Transfer { from, to, places });
            spare -= places;
            taker = if places < lack {
                Some((to, lack - places))
            } else {
                takers.next()
            };
        }
    }
    transfers
}
