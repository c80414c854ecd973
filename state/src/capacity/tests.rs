//! Properties of the engines that a model wants.

use proptest::prelude::*;

use super::need::smoothed;
use super::*;
use crate::bounds::BACKENDS_MAX;
use crate::ids::ReplicaId;

const MODEL: &str = "m";
const ROOM: EngineRoom = EngineRoom {
    places: 10,
    prefill_ns: 100_000,
};
/// Time for which a need may count beyond [`HOLD_MS`], in milliseconds.
const HELD_LONGER_MS: u64 = 15_000;

fn demand(running: u32, waiting: u32) -> ModelDemand {
    ModelDemand {
        running,
        waiting,
        waiting_tokens: 0,
    }
}

fn report(demand: ModelDemand, started: u32) -> DemandReport {
    DemandReport {
        model: MODEL.to_owned(),
        demand,
        started,
    }
}

fn engines(engines: u32) -> EngineFigures {
    EngineFigures {
        engines,
        places: Some(ROOM.places),
        prefill_ns: Some(ROOM.prefill_ns),
    }
}

/// Reports demand of replica 1 at `now_ms` and returns the number of wanted engines.
fn tell(capacity: &mut Capacity, now_ms: u64, demand: ModelDemand) -> u32 {
    assert!(capacity.observe(ReplicaId(1), &report(demand, 0), engines(3), now_ms));
    capacity.check().unwrap();
    capacity.view().wanted(MODEL)
}

/// Reports the same demand every 5 s for `ms` and returns the number of wanted engines at the end.
fn hold(capacity: &mut Capacity, from_ms: u64, ms: u64, demand: ModelDemand) -> u32 {
    let mut wanted = 0;
    for passed_ms in (0..=ms).step_by(5_000) {
        wanted = tell(capacity, from_ms + passed_ms, demand);
    }
    wanted
}

#[test]
fn the_first_waiting_request_wants_an_engine_at_once() {
    let mut capacity = Capacity::default();
    assert_eq!(capacity.view().wanted(MODEL), 0);
    assert_eq!(tell(&mut capacity, 7, demand(0, 1)), 1);
}

#[test]
fn wanted_engines_follow_the_places_that_requests_take() {
    let mut capacity = Capacity::default();
    // 64 requests need 64 + 8 places, of which an engine has 10.
    assert_eq!(hold(&mut capacity, 0, 200_000, demand(60, 4)), 8);
    assert_eq!(hold(&mut capacity, 200_000, 200_000, demand(72, 1)), 9);
    let view = capacity.view().model(MODEL);
    assert_eq!(view.saturation_permille, 73 * 1000 / 30);
    // Of many, a twelfth is more than the root.
    assert_eq!(hold(&mut capacity, 400_000, 200_000, demand(1200, 0)), 130);
}

#[test]
fn a_burst_of_a_second_wants_no_further_engine() {
    let mut capacity = Capacity::default();
    assert_eq!(hold(&mut capacity, 0, 60_000, demand(4, 0)), 1);
    assert_eq!(tell(&mut capacity, 61_000, demand(40, 0)), 1);
    assert_eq!(tell(&mut capacity, 62_000, demand(4, 0)), 1);
    let later = hold(&mut capacity, 63_000, 60_000, demand(40, 0));
    assert_eq!(later, 5, "demand that lasts does");
}

#[test]
fn long_prompts_that_wait_want_engines_for_their_computation() {
    let mut capacity = Capacity::default();
    // 100,000 tokens take an engine 10 s, and 2 s are allowed.
    let waiting = ModelDemand {
        waiting_tokens: 100_000,
        ..demand(0, 1)
    };
    assert_eq!(tell(&mut capacity, 0, waiting), 5);
    let view = capacity.view().model(MODEL);
    assert_eq!(view.saturation_permille, 10_000 / 3 / 2, "of three engines");
}

#[test]
fn no_engine_is_wanted_once_no_request_came_for_the_time_of_hold() {
    let mut capacity = Capacity::default();
    hold(&mut capacity, 0, 60_000, demand(1, 0));
    // The last request leaves less than one smoothed request.
    assert_eq!(tell(&mut capacity, 61_000, demand(0, 0)), 1);
    assert_eq!(
        hold(&mut capacity, 65_000, HOLD_MS - 65_000, demand(0, 0)),
        1
    );
    let gone = hold(
        &mut capacity,
        HOLD_MS,
        61_000 + HELD_LONGER_MS,
        demand(0, 0),
    );
    assert_eq!(gone, 0);
}

#[test]
fn requests_too_short_to_be_seen_running_keep_an_engine() {
    let mut capacity = Capacity::default();
    for second in 0..1000 {
        let started = u32::from(second % 200 == 0);
        let now_ms = second * 1000;
        let told = report(ModelDemand::default(), started);
        assert!(capacity.observe(ReplicaId(1), &told, engines(1), now_ms));
        assert_eq!(capacity.view().wanted(MODEL), 1);
    }
}

#[test]
fn a_replica_that_ends_takes_its_demand_along() {
    let mut capacity = Capacity::default();
    for replica in 1..=2 {
        let told = report(demand(30, 0), 0);
        assert!(capacity.observe(ReplicaId(replica), &told, engines(3), 0));
    }
    assert!(capacity.close_replica(ReplicaId(2), 1));
    assert!(!capacity.close_replica(ReplicaId(2), 1), "it has none left");
    let view = capacity.view();
    assert_eq!(view.model(MODEL).demand, demand(30, 0));
    assert_eq!(view.reported(ReplicaId(1), MODEL), demand(30, 0));
    assert_eq!(view.reported(ReplicaId(2), MODEL), demand(0, 0));
}

#[test]
fn a_full_table_forgets_a_model_that_wants_no_engine_and_never_another() {
    let mut capacity = Capacity::default();
    let told = |model: usize, waiting| DemandReport {
        model: format!("m{model}"),
        demand: demand(0, waiting),
        started: 0,
    };
    for model in 0..DEMAND_MODELS_MAX {
        let waiting = u32::from(model != 5);
        assert!(capacity.observe(ReplicaId(1), &told(model, waiting), engines(1), 0));
    }
    let more = DEMAND_MODELS_MAX;
    assert!(capacity.observe(ReplicaId(1), &told(more, 1), engines(1), 1));
    assert!(!capacity.observe(ReplicaId(1), &told(more + 1, 1), engines(1), 1));
    let view = capacity.view();
    let kept: Vec<&str> = view.iter().map(|(model, _)| model).collect();
    assert!(!kept.contains(&"m5") && kept.contains(&"m64"));
    capacity.check().unwrap();
}

#[test]
fn implausible_reports_change_nothing() {
    let mut capacity = Capacity::default();
    let absurd = [
        demand(DEMAND_REQUESTS_MAX + 1, 0),
        demand(0, DEMAND_REQUESTS_MAX + 1),
        ModelDemand {
            waiting_tokens: DEMAND_TOKENS_MAX + 1,
            ..demand(0, 1)
        },
    ];
    for demand in absurd {
        assert!(!capacity.observe(ReplicaId(1), &report(demand, 0), engines(1), 0));
    }
    assert_eq!(capacity, Capacity::default());
}

fn any_demand() -> impl Strategy<Value = ModelDemand> {
    let count = || prop_oneof![4 => 0_u32..200, 1 => Just(0), 1 => Just(DEMAND_REQUESTS_MAX)];
    let tokens = prop_oneof![4 => 0_u64..1_000_000, 1 => Just(DEMAND_TOKENS_MAX)];
    (count(), count(), tokens).prop_map(|(running, waiting, waiting_tokens)| ModelDemand {
        running,
        waiting,
        waiting_tokens: if waiting == 0 { 0 } else { waiting_tokens },
    })
}

fn any_room() -> impl Strategy<Value = EngineRoom> {
    (any::<u32>(), any::<u32>()).prop_map(|(places, prefill_ns)| EngineRoom { places, prefill_ns })
}

proptest! {
    #[test]
    fn more_demand_needs_no_less_and_more_places_no_more(
        milli in prop_oneof![0_u64..1_000_000, any::<u64>()],
        more in 0_u64..1_000_000,
        one in any_demand(),
        other in any_demand(),
        room in any_room(),
        places in 0_u32..1000,
    ) {
        let needed = needed_engines(milli, &one, room);
        let mut both = one;
        both.add(&other);
        prop_assert!(needed_engines(milli.saturating_add(more), &both, room) >= needed);
        let wider = EngineRoom { places: room.places.saturating_add(places), ..room };
        prop_assert!(needed_engines(milli, &one, wider) <= needed);
        prop_assert!(needed as usize <= BACKENDS_MAX);
        prop_assert_eq!(needed == 0, one.requests() == 0 && milli < 1000);
    }

    #[test]
    fn the_needed_engines_are_the_fewest_with_spare_places_and_short_waits(
        milli in 1000_u64..10_000_000,
        waiting_tokens in 0_u64..10_000_000,
        places in 20_u32..200,
        prefill_ns in 1_u32..100_000,
    ) {
        let room = EngineRoom { places, prefill_ns };
        let demand = ModelDemand { waiting_tokens, ..demand(1, 1) };
        let fits = |engines: u32| {
            let all_milli = 1000 * u64::from(places) * u64::from(engines);
            let due_ns = WAIT_TARGET_MS * 1_000_000 * u64::from(engines);
            let is_in_time = waiting_tokens * u64::from(prefill_ns) <= due_ns;
            // The root and the twelfth are rounded down.
            all_milli.checked_sub(milli).is_some_and(|spare| {
                is_in_time && (spare + 1).pow(2) > milli * 1000 && (spare + 1) * SPARE_DIVISOR > milli
            })
        };
        let needed = needed_engines(milli, &demand, room);
        prop_assert!(fits(needed));
        prop_assert!(needed == 1 || !fits(needed - 1));
    }

    #[test]
    fn smoothing_approaches_and_never_overshoots(
        milli in any::<u64>(),
        target in any::<u64>(),
        passed_ms in any::<u64>(),
    ) {
        let after = smoothed(milli, target, passed_ms);
        prop_assert!(after >= milli.min(target) && after <= milli.max(target));
        prop_assert_eq!(after == milli, milli == target || passed_ms == 0);
    }

    /// The number of wanted engines is the greatest need of the last [`HOLD_MS`], give or take a period.
    #[test]
    fn the_number_rises_at_once_and_falls_only_after_the_time_of_hold(
        steps in prop::collection::vec((1_u64..60_000, 0_u8..3, any_demand(), 0_u32..2), 1..60),
    ) {
        let mut capacity = Capacity::default();
        let (mut now_ms, mut needs) = (0, Vec::new());
        let (mut milli, mut demands) = (0, [ModelDemand::default(); 3]);
        for (passed_ms, replica, demand, started) in steps {
            now_ms += passed_ms;
            let sum = |demands: &[ModelDemand; 3]| {
                let mut sum = ModelDemand::default();
                demands.iter().for_each(|it| sum.add(it));
                sum
            };
            milli = smoothed(milli, sum(&demands).requests() * 1000, if needs.is_empty() { 0 } else { passed_ms });
            demands[usize::from(replica)] = demand;
            let told = report(demand, started);
            prop_assert!(capacity.observe(ReplicaId(replica), &told, engines(1), now_ms));
            capacity.check().unwrap();
            needs.push((now_ms, needed_engines(milli, &sum(&demands), ROOM).max(started)));
            let greatest = |ms: u64| {
                let recent = needs.iter().filter(|(at_ms, _)| at_ms + ms >= now_ms);
                recent.map(|(_, need)| *need).max().unwrap_or_default()
            };
            let wanted = capacity.view().wanted(MODEL);
            prop_assert!(wanted >= greatest(HOLD_MS), "{wanted} of {needs:?}");
            prop_assert!(wanted <= greatest(HOLD_MS + HELD_LONGER_MS), "{wanted} of {needs:?}");
        }
    }

    #[test]
    fn a_need_does_not_depend_on_who_reports_the_demand(
        demands in prop::collection::vec((1_u64..60_000, any_demand(), any_demand()), 1..30),
    ) {
        let (mut one, mut two) = (Capacity::default(), Capacity::default());
        let mut now_ms = 0;
        for (passed_ms, first, second) in demands {
            now_ms += passed_ms;
            let mut sum = first;
            sum.add(&second);
            let tells = |capacity: &mut Capacity, replica, demand| {
                capacity.observe(ReplicaId(replica), &report(demand, 0), engines(2), now_ms)
            };
            if tells(&mut one, 1, sum) {
                prop_assert!(tells(&mut two, 1, first));
                prop_assert!(tells(&mut two, 2, second));
                let (one, two) = (one.view().model(MODEL), two.view().model(MODEL));
                prop_assert_eq!(one.demand, two.demand);
                prop_assert_eq!(one.saturation_permille, two.saturation_permille);
            } else {
                return Ok(());
            }
        }
    }
}
