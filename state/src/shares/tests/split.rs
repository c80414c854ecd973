//! Tests the arithmetic of splits and transfers alone.

use proptest::prelude::*;

use crate::ids::ReplicaId;
use crate::shares::Demand;
use crate::shares::split::{ReplicaShare, Transfer, apportion, split, transfers};

/// Returns replicas' shares and demands from `(share, running, waiting, waited_ms)`.
fn replica_shares(all: &[(i64, u32, u32, u32)]) -> Vec<ReplicaShare> {
    let standing = |(id, (share, running, waiting, waited_ms)): (u8, &(i64, u32, u32, u32))| {
        let demand = Demand {
            running: *running,
            waiting: *waiting,
            waited_ms: *waited_ms,
            recent: 0,
        };
        ReplicaShare {
            replica: ReplicaId(id),
            share: *share,
            demand,
        }
    };
    (1..).zip(all).map(standing).collect()
}

/// Returns the transfers, as `(from, to, places)`.
fn handed(all: &[(i64, u32, u32, u32)], gather_spare: bool) -> Vec<(usize, usize, i64)> {
    let replica_shares = replica_shares(all);
    let places = replica_shares.iter().map(|it| it.share).sum();
    let split = split(places, &replica_shares, 0, gather_spare);
    let moved = transfers(&replica_shares, &split.targets);
    let parts = |it: Transfer| (it.from + 1, it.to + 1, it.places);
    moved.into_iter().map(parts).collect()
}

#[test]
fn the_remainder_of_a_split_rotates() {
    assert_eq!(apportion(6, &[1, 1, 1], 0), [2, 2, 2]);
    assert_eq!(apportion(1, &[1, 1, 1], 0), [1, 0, 0]);
    assert_eq!(apportion(1, &[1, 1, 1], 4), [0, 1, 0]);
    assert_eq!(apportion(2, &[1, 1, 1], 2), [1, 0, 1]);
    assert_eq!(apportion(10, &[1, 3, 0], 0), [3, 7, 0]);
    assert_eq!(apportion(3, &[0, 0], 1), [1, 2]);
    assert_eq!(apportion(3, &[], 0), [0; 0]);
}

#[test]
fn free_places_move_to_waiting_requests() {
    assert_eq!(handed(&[(2, 2, 3, 5), (2, 0, 0, 0)], false), [(2, 1, 2)]);
    let one_needs = [(1, 0, 0, 0), (1, 1, 1, 5), (1, 0, 0, 0)];
    assert_eq!(
        handed(&one_needs, false),
        [(3, 2, 1)],
        "several donors do not all give"
    );
}

#[test]
fn spare_places_are_spread_in_advance() {
    assert_eq!(
        handed(&[(9, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0)], false),
        [(1, 2, 3), (1, 3, 3)]
    );
    assert_eq!(
        handed(&[(3, 0, 0, 0), (3, 1, 0, 0), (3, 2, 0, 0)], false),
        [(1, 3, 1)]
    );
    let mut busy = replica_shares(&[(3, 0, 0, 0), (3, 0, 0, 0)]);
    busy[1].demand.recent = 99;
    let split = split(6, &busy, 0, false);
    assert_eq!(split.targets, [1, 5], "by what was started lately");
}

#[test]
fn places_follow_running_and_waiting_requests_under_backlog() {
    let all = replica_shares(&[(3, 3, 6, 9), (3, 3, 0, 0)]);
    assert_eq!(split(6, &all, 0, false).fair, Some(vec![4, 2]));
    let all = replica_shares(&[(6, 6, 90, 9), (0, 0, 1, 1)]);
    let fair = split(6, &all, 0, false).fair;
    assert_eq!(fair, Some(vec![5, 1]), "nobody starves");
    assert_eq!(
        handed(&[(6, 5, 90, 9), (0, 0, 1, 1)], false),
        [(1, 2, 1)],
        "who runs its part hands over what falls free, though requests wait there"
    );
    assert_eq!(handed(&[(3, 3, 6, 9), (3, 3, 6, 9)], false), []);
}

#[test]
fn scarce_places_rotate() {
    let fair = |all| split(1, &replica_shares(all), 0, false).fair;
    assert_eq!(
        fair(&[(1, 1, 5, 9), (0, 0, 5, 3), (0, 0, 5, 4)]),
        Some(vec![0, 0, 1])
    );
    assert_eq!(
        fair(&[(1, 0, 5, 9), (0, 0, 5, 3), (0, 1, 5, 4)]),
        Some(vec![1, 0, 0])
    );
    assert_eq!(fair(&[(1, 1, 5, 9), (0, 0, 0, 0)]), Some(vec![1, 0]));
}

#[test]
fn replicas_with_places_offset_a_lowered_limit() {
    assert_eq!(handed(&[(1, 2, 0, 0), (1, 0, 0, 0)], false), [(2, 1, 1)]);
    assert_eq!(
        handed(&[(-1, 2, 9, 9), (2, 0, 9, 9)], false),
        [(2, 1, 2)],
        "before anything new starts"
    );
}

#[test]
fn a_batch_gets_all_places_of_an_idle_backend() {
    let idle = [(2, 0, 4, 1), (2, 0, 4, 7), (2, 0, 0, 0)];
    assert_eq!(handed(&idle, true), [(1, 2, 2), (3, 2, 2)]);
    let begun = [(2, 0, 4, 9), (4, 4, 4, 7)];
    assert_eq!(handed(&begun, true), [(1, 2, 2)], "to whose batch it is");
    assert_eq!(handed(&[(2, 0, 0, 0), (4, 0, 0, 0)], true), []);
}

fn any_replica_shares() -> impl Strategy<Value = Vec<ReplicaShare>> {
    let one = (0..9_i64, 0..9_u32, 0..20_u32, 0..5_u32, 0..9_u32);
    proptest::collection::vec(one, 1..6).prop_map(|all| {
        let standing = |(id, (share, running, waiting, waited_ms, recent))| ReplicaShare {
            replica: ReplicaId(id),
            share,
            demand: Demand {
                running,
                waiting,
                waited_ms,
                recent,
            },
        };
        (1..).zip(all).map(standing).collect()
    })
}

proptest! {
    #[test]
    fn only_free_existing_places_are_handed_over(
        all in any_replica_shares(),
        rotation in 0..1024_usize,
        gather_spare in any::<bool>(),
    ) {
        let places: i64 = all.iter().map(|it| it.share).sum();
        let split = split(places, &all, rotation, gather_spare);
        let mut shares: Vec<i64> = all.iter().map(|it| it.share).collect();
        for it in transfers(&all, &split.targets) {
            prop_assert!(it.places > 0 && it.from != it.to);
            shares[it.from] -= it.places;
            shares[it.to] += it.places;
            prop_assert!(shares[it.from] >= i64::from(all[it.from].demand.running));
            prop_assert!(shares[it.to] <= split.targets[it.to]);
        }
        prop_assert_eq!(shares.iter().sum::<i64>(), places);
    }

    #[test]
    fn targets_add_up_to_places_or_running_requests(
        all in any_replica_shares(),
        rotation in 0..1024_usize,
    ) {
        let places: i64 = all.iter().map(|it| it.share).sum();
        let runs: i64 = all.iter().map(|it| i64::from(it.demand.running)).sum();
        let split = split(places, &all, rotation, false);
        prop_assert_eq!(split.targets.iter().sum::<i64>(), places.max(runs));
        if let Some(fair) = split.fair {
            prop_assert_eq!(fair.iter().sum::<i64>(), places);
        }
    }

    #[test]
    fn no_request_waits_while_a_place_is_free(
        all in any_replica_shares(),
        rotation in 0..1024_usize,
    ) {
        let places: i64 = all.iter().map(|it| it.share).sum();
        let runs: i64 = all.iter().map(|it| i64::from(it.demand.running)).sum();
        let waits: i64 = all.iter().map(|it| i64::from(it.demand.waiting)).sum();
        let split = split(places, &all, rotation, false);
        let served: i64 = all
            .iter()
            .zip(&split.targets)
            .map(|(it, target)| {
                let beyond = target - i64::from(it.demand.running);
                beyond.min(i64::from(it.demand.waiting))
            })
            .sum();
        prop_assert_eq!(served, waits.min((places - runs).max(0)));
    }

    #[test]
    fn apportioned_parts_add_up_to_the_total(
        total in 0..10_000_i64,
        weights in proptest::collection::vec(0..1000_i64, 1..8),
        rotation in 0..1024_usize,
    ) {
        let parts = apportion(total, &weights, rotation);
        prop_assert_eq!(parts.iter().sum::<i64>(), total);
        let sum: i64 = weights.iter().sum::<i64>().max(1);
        if weights.iter().any(|it| *it > 0) {
            for (part, weight) in parts.iter().zip(&weights) {
                let floor = total * weight / sum;
                prop_assert!((floor..=floor + 1).contains(part));
            }
        }
    }
}
