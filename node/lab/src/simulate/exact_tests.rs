//! Tests of runs whose replicas follow the engines' KV events.

use std::sync::Arc;

use super::plan::{EngineModel, SimPlan};
use super::report::RunReport;
use super::tests::{SECOND, json, mix, run, small};
use super::workload::{SimWorkload, WarmPrefix};

/// Returns the plan of engines whose GPUs hold few prompts, and whose disks hold all.
fn tiered() -> SimPlan {
    let mut plan = SimPlan {
        is_exact: true,
        ..small()
    };
    if let EngineModel::Continuous(shape) = &mut plan.engine {
        shape.num_gpu_blocks = 40;
    }
    plan.offload.cpu_blocks = 40;
    plan.offload.disk_blocks = 1000;
    plan
}

/// Returns a mix whose requests each arrive long after the answer to the one before.
fn one_at_a_time() -> SimWorkload {
    let mut workload = mix().generate(1);
    for (number, sent) in (0..).zip(&mut workload.arrivals) {
        sent.at = number * 2 * SECOND;
    }
    workload
}

fn exact(plan: &SimPlan, workload: &SimWorkload) -> RunReport {
    let report = run(plan, workload);
    let tiers = report.tiers.as_ref().unwrap();
    assert!(tiers.found.iter().all(|share| *share > 0.0), "{tiers:?}");
    report
}

#[test]
fn a_lone_request_is_found_on_the_tiers_where_it_is_expected() {
    let tiers = exact(&tiered(), &one_at_a_time()).tiers.unwrap();
    assert_eq!(tiers.expected, tiers.found);
    assert_eq!(tiers.as_expected, 1.0);
}

#[test]
fn most_prompts_of_a_busy_fleet_are_where_they_are_expected() {
    let workload = mix().generate(1);
    let once = exact(&tiered(), &workload);
    assert_eq!(json(&once), json(&exact(&tiered(), &workload)));
    let as_expected = once.tiers.unwrap().as_expected;
    assert!((0.8..1.0).contains(&as_expected), "{as_expected}");
}

#[test]
fn events_show_what_is_cached_at_the_start() {
    let mut workload = mix().generate(1);
    workload.arrivals.truncate(1);
    let prompt = Arc::clone(&workload.arrivals[0].prompt);
    workload.warm.push(WarmPrefix { engine: 2, prompt });
    let warm = run(&tiered(), &workload);
    assert_eq!(warm.by_backend[2], 1);
    let tiers = warm.tiers.unwrap();
    assert!(tiers.expected[0] > 0.8, "{tiers:?}");
    assert_eq!(tiers.expected, tiers.found);
}

#[test]
fn hidden_tiers_are_expected_but_not_weighed() {
    let workload = one_at_a_time();
    let mut plan = tiered();
    let all = exact(&plan, &workload);
    plan.visible_tiers = Some(state::policy::VisibleTiers::Gpu);
    let gpu = exact(&plan, &workload);
    assert_eq!(gpu.tiers.as_ref().unwrap().as_expected, 1.0);
    assert!(
        gpu.hit_rate < all.hit_rate,
        "{} {}",
        gpu.hit_rate,
        all.hit_rate
    );
}

#[test]
fn an_all_knowing_router_answers_no_later() {
    let workload = mix().generate(1);
    let routed = exact(&tiered(), &workload);
    let plan = SimPlan {
        is_all_knowing: true,
        ..tiered()
    };
    let ideal = exact(&plan, &workload);
    let [ideal, routed] = [ideal, routed].map(|it| it.ttft_ms.mean);
    assert!(ideal <= routed, "{ideal} {routed}");
}
