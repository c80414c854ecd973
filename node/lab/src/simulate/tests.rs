//! Tests of small whole runs: they repeat, charges match usage, and claims of the experiments hold
//! where that is cheap to check.

use std::sync::Arc;

use state::admission::{AdmissionSettings, Concurrency, Order};
use state::policy::PolicyConfig;

use super::compare::ComparisonCase;
use super::experiment::share_after_pause;
use super::plan::{ClientModel, EngineModel, RestartPlan, RestartScope, SimPlan};
use super::policies::SimPolicy;
use super::report::RunReport;
use super::workload::{AgentLoad, LengthRange, Mix, SimUser, SimWorkload, WarmPrefix};

pub(super) const SECOND: u64 = 1_000_000;

/// Returns a mix of short prompts in many groups, of which an engine of [`small`] holds only some.
pub(super) fn mix() -> Mix {
    Mix {
        rate: 40.0,
        duration: 4 * SECOND,
        groups: 40,
        group_tokens: 256,
        lengths: LengthRange {
            input: (16, 64),
            output: (4, 16),
        },
        ..Mix::shared_prefix()
    }
}

pub(super) fn small() -> SimPlan {
    let mut plan = SimPlan {
        horizon: 4 * SECOND,
        ..SimPlan::default()
    };
    if let EngineModel::Continuous(shape) = &mut plan.engine {
        shape.num_gpu_blocks = 200;
        shape.max_num_seqs = 32;
    }
    plan
}

pub(super) fn run(plan: &SimPlan, workload: &SimWorkload) -> RunReport {
    let case = ComparisonCase {
        plan: plan.clone(),
        workload: Arc::new(workload.clone()),
    };
    let run = case.run(|_| {});
    assert_eq!(run.faults, Vec::<String>::new(), "{}", plan.label);
    assert_eq!(run.ok + run.refused, run.requests);
    run
}

pub(super) fn json(run: &RunReport) -> String {
    serde_json::to_string(run).unwrap()
}

#[test]
fn output_is_determined_by_the_seed() {
    let once = json(&run(&small(), &mix().generate(1)));
    let again = json(&run(&small(), &mix().generate(1)));
    let other = json(&run(&small(), &mix().generate(2)));
    assert_eq!(once, again);
    assert_ne!(once, other);
}

#[test]
fn a_warm_prefix_is_found_where_it_is() {
    let mut workload = mix().generate(1);
    workload.arrivals.truncate(1);
    let prompt = Arc::clone(&workload.arrivals[0].prompt);
    assert_eq!(run(&small(), &workload).hit_rate, 0.0);
    workload.warm.push(WarmPrefix { engine: 2, prompt });
    let warm = run(&small(), &workload);
    assert!(warm.hit_rate > 0.9, "{}", warm.hit_rate);
    assert_eq!(warm.by_backend[2], 1);
}

#[test]
fn tiers_below_the_gpu_save_computing_and_runs_repeat() {
    let workload = mix().generate(1);
    let mut plan = small();
    if let EngineModel::Continuous(shape) = &mut plan.engine {
        shape.num_gpu_blocks = 40;
    }
    let without = run(&plan, &workload);
    assert_eq!(without.loaded_rate, None);
    plan.offload.cpu_blocks = 40;
    plan.offload.disk_blocks = 1000;
    let tiered = run(&plan, &workload);
    assert_eq!(json(&tiered), json(&run(&plan, &workload)));
    let [cpu, disk] = tiered.loaded_rate.unwrap();
    assert!(cpu > 0.0 && disk > 0.0, "{cpu} and {disk}");
    assert!(tiered.hit_rate > without.hit_rate);
    assert!(tiered.ttft_ms.mean < without.ttft_ms.mean);
}

#[test]
fn every_policy_serves_all_requests_and_counts_balance() {
    let workload = mix().generate(3);
    for policy in PolicyConfig::defaults() {
        let plan = SimPlan {
            label: policy.name().to_owned(),
            policy,
            ..small()
        };
        let run = run(&plan, &workload);
        assert_eq!(run.refused, 0);
        assert!(
            run.hit_rate <= run.ideal_hit_rate.unwrap() + 0.05,
            "{run:?}"
        );
    }
}

#[test]
fn literal_policies_lose_where_their_flaws_apply() {
    let hit_rate = |mix: &Mix, policy: &str| {
        let policy = SimPolicy::parse(policy).unwrap();
        let plan = SimPlan {
            label: policy.label,
            policy: policy.config,
            reference_policy: policy.reference_policy,
            ..small()
        };
        let run = run(&plan, &mix.generate(7));
        assert_eq!(run.refused, 0);
        run.hit_rate
    };
    // Blocks after a field that differs are equal by content everywhere, but cached nowhere.
    let volatile = Mix {
        groups: 40,
        shared_after_tokens: 256,
        lengths: mix().lengths,
        rate: 40.0,
        duration: 4 * SECOND,
        ..Mix::volatile()
    };
    let built = hit_rate(&volatile, "vllm-cache-aware");
    let written = hit_rate(&volatile, "vllm-cache-aware-as-written");
    assert!(built > written + 0.1, "{built} against {written}");
    // All prompts have a common prefix, and any match wins.
    let templated = Mix {
        common_tokens: 64,
        ..mix()
    };
    let built = hit_rate(&templated, "prefix-cache");
    let written = hit_rate(&templated, "prefix-cache-as-written");
    assert!(built >= written, "{built} against {written}");
}

#[test]
fn charges_equal_the_work_served() {
    let plan = small();
    let workload = mix().generate(4);
    let run = run(&plan, &workload);
    let cached = (run.hit_rate * run.prompt_tokens as f64).round();
    let served: f64 = run.service.values().sum();
    let expected = run.prompt_tokens as f64 - cached + 2.0 * run.output_tokens as f64;
    // Service counts until the horizon, but the tokens are those of the whole run.
    assert!(
        served <= expected && served > 0.9 * expected,
        "{served} of {expected}"
    );
    assert_eq!(run.charged, served_at_the_end(&run), "{run:?}");
}

fn served_at_the_end(run: &RunReport) -> u64 {
    let cached = (run.hit_rate * run.prompt_tokens as f64).round() as u64;
    run.prompt_tokens - cached + 2 * run.output_tokens
}

#[test]
fn sharing_state_beats_sharing_nothing() {
    let workload = mix().generate(5);
    let together = run(&small(), &workload);
    let apart = run(
        &SimPlan {
            ownership_lag: None,
            load_lag: None,
            ..small()
        },
        &workload,
    );
    assert!(
        together.hit_rate > apart.hit_rate,
        "{} against {}",
        together.hit_rate,
        apart.hit_rate
    );
}

#[test]
fn a_restart_loses_no_requests_and_keeps_state_unless_wiped() {
    let workload = mix().generate(6);
    let restarted = |who, wipe| {
        let restart = Some(RestartPlan {
            at: 2 * SECOND,
            who,
            wipe,
        });
        run(&SimPlan { restart, ..small() }, &workload)
    };
    let undisturbed = run(&small(), &workload);
    for who in [RestartScope::One, RestartScope::All] {
        for wipe in [false, true] {
            let run = restarted(who, wipe);
            assert!(run.resent > 0, "{who:?} {wipe}");
            assert_eq!(run.ok, undisturbed.ok);
        }
    }
}

/// Returns four users who always have requests waiting, each pinned to a replica if `pinned`.
fn backlogged(pinned: bool) -> SimWorkload {
    let user = |number: u32| SimUser {
        backlog: 24 * number,
        ..SimUser::named(&format!("user-{number}"))
    };
    let mut workload = SimWorkload {
        users: (1..=4).map(user).collect(),
        shape: LengthRange {
            input: (32, 64),
            output: (16, 48),
        },
        ..SimWorkload::default()
    };
    if pinned {
        workload.pin(3);
    }
    workload
}

fn queueing(order: Order) -> SimPlan {
    SimPlan {
        backends: 2,
        horizon: 16 * SECOND,
        admission: AdmissionSettings {
            order,
            concurrency: Concurrency::Fixed(4),
            max_queue: u32::MAX,
            max_wait_ms: u32::MAX,
            ..AdmissionSettings::default()
        },
        ..SimPlan::default()
    }
}

#[test]
fn the_service_gap_is_bounded_except_under_fcfs() {
    for (pinned, weights, order) in [
        (false, [1, 1, 1, 1], Order::Vtc),
        (true, [1, 1, 1, 1], Order::Vtc),
        (true, [1, 2, 3, 4], Order::Vtc),
        (true, [1, 2, 3, 4], Order::VtcMaxFair),
        (true, [1, 2, 3, 4], Order::Dlpm),
    ] {
        let mut workload = backlogged(pinned);
        for (user, weight) in workload.users.iter_mut().zip(weights) {
            user.weight_milli = 1000 * weight;
        }
        let fair = run(&queueing(order), &workload);
        // The report has no bound for `dlpm`, which keeps that of `vtc`.
        let bound = fair.gap_bound.unwrap_or_else(|| {
            let vtc = run(&queueing(Order::Vtc), &workload);
            vtc.gap_bound.unwrap()
        });
        let case = format!("{order:?}, pinned: {pinned}, {weights:?}");
        assert!(fair.gap.unwrap() <= bound, "{case}: {:?}", fair.gap);
        let unfair = run(&queueing(Order::Fcfs), &workload);
        let ratios = [&fair, &unfair].map(|run| run.service_ratio.unwrap());
        assert!(ratios[0] > 0.8 && ratios[1] < 0.6, "{case}: {ratios:?}");
        assert!(fair.tokens_per_s > 0.95 * unfair.tokens_per_s, "{case}");
    }
}

/// Returns how much more the most served user got than the least served one, at equal weights.
fn most_over_least(run: &RunReport) -> f64 {
    let most = run.service.values().copied().fold(0.0, f64::max);
    most / run.service.values().copied().fold(f64::MAX, f64::min)
}

#[test]
fn without_reports_from_peers_a_user_alone_at_a_replica_gets_more() {
    let workload = backlogged(true);
    let with_gate = run(&queueing(Order::Vtc), &workload);
    let without = SimPlan {
        load_lag: None,
        ..queueing(Order::Vtc)
    };
    let without = run(&without, &workload);
    assert!(most_over_least(&with_gate) < 1.2, "{with_gate:?}");
    assert!(most_over_least(&without) > 1.4, "{without:?}");
}

#[test]
fn a_user_who_returns_from_a_pause_gets_an_even_share() {
    let mut workload = backlogged(true);
    let horizon = 30 * SECOND;
    workload.users[0].off = Some((horizon / 6, horizon / 2));
    // A small backlog is served soon after the pause begins, so that the user becomes idle.
    workload.users[0].backlog = 8;
    let share = |order| {
        let plan = SimPlan {
            horizon,
            ..queueing(order)
        };
        share_after_pause(&run(&plan, &workload))
    };
    let (with_lift, without) = (share(Order::Vtc), share(Order::Lcf));
    assert!((0.9..=1.1).contains(&with_lift), "{with_lift}");
    assert!(without > 1.2, "{without}");
}

#[test]
fn the_service_gap_is_bounded_when_clients_disconnect() {
    for pinned in [false, true] {
        let mut workload = backlogged(pinned);
        // With long prompts, many clients leave before the first token.
        workload.shape.input = (512, 1024);
        let plan = SimPlan {
            clients: ClientModel {
                patience: Some((SECOND / 2, 4 * SECOND)),
                retries: 3,
            },
            ..queueing(Order::Vtc)
        };
        let case = ComparisonCase {
            plan,
            workload: Arc::new(workload),
        };
        let run = case.run(|_| {});
        assert_eq!(run.faults, Vec::<String>::new());
        assert!(run.departures > 0, "{run:?}");
        let (gap, bound) = (run.gap.unwrap(), run.gap_bound.unwrap());
        assert!(gap <= bound, "{gap} over {bound}, {}", run.departures);
    }
}

#[test]
fn every_order_serves_all_users() {
    let orders = [
        Order::VtcMaxFair,
        Order::VtcPred,
        Order::Dlpm,
        Order::Lcf,
        Order::Rpm,
    ];
    for order in orders {
        let plan = SimPlan {
            horizon: 8 * SECOND,
            ..queueing(order)
        };
        let run = run(&plan, &backlogged(false));
        assert!(
            run.service.values().all(|served| *served > 0.0),
            "{order:?}"
        );
    }
}

#[test]
fn adaptive_limits_are_learned_from_measurements() {
    let mut plan = SimPlan {
        horizon: 10 * SECOND,
        ..queueing(Order::Vtc)
    };
    plan.admission.concurrency = Concurrency::Adaptive;
    plan.admission.inter_token_us = 25_000;
    let run = run(&plan, &backlogged(false));
    assert!(
        run.curves.waiting.iter().any(|waiting| *waiting > 0),
        "no limit ever held"
    );
}

#[test]
fn the_report_page_is_self_contained() {
    let comparison = super::report::SimComparison {
        title: "a </script> in a title".to_owned(),
        command: "quorate simulate".to_owned(),
        seed: 1,
        recorded: None,
        runs: vec![run(&small(), &mix().generate(1))],
        verdicts: Vec::new(),
    };
    let page = super::page::html(&comparison).unwrap();
    assert_eq!(
        page.matches("</script>").count(),
        2,
        "data cannot end its element"
    );
    assert!(!page.contains("src=") && !page.contains("@import") && !page.contains("/*DATA*/"));
}

#[test]
fn tenfold_overload_costs_no_goodput_and_ends_promptly() {
    let experiment = super::experiment::Experiment::Overload;
    let cases = experiment.cases(1, Some(std::time::Duration::from_secs(30)), None);
    let comparison = cases.unwrap().run(1, String::new(), |_| {});
    for run in &comparison.runs {
        assert_eq!(run.faults, Vec::<String>::new(), "{}", run.label);
        let over = run.ok + run.refused + run.abandoned;
        assert_eq!(over, run.requests, "{}", run.label);
    }
    let broken = comparison.verdicts.iter().filter(|it| !it.holds);
    assert_eq!(broken.count(), 0, "{:#?}", comparison.verdicts);
    assert_eq!(comparison.verdicts.len(), 9);
}

#[test]
fn a_lone_agent_gets_its_fair_share_beside_bursts_of_sub_agents() {
    let experiment = super::experiment::Experiment::LoneAgent;
    let cases = experiment.cases(1, Some(std::time::Duration::from_secs(40)), None);
    let comparison = cases.unwrap().run(1, String::new(), |_| {});
    for run in &comparison.runs {
        assert_eq!(run.faults, Vec::<String>::new(), "{}", run.label);
    }
    let broken = comparison.verdicts.iter().filter(|it| !it.holds);
    assert_eq!(broken.count(), 0, "{:#?}", comparison.verdicts);
    assert_eq!(comparison.verdicts.len(), 4);
}

/// Returns a load of long prompts without shared prefixes and with long outputs.
fn long_answers() -> SimWorkload {
    Mix {
        rate: 3.0,
        duration: 20 * SECOND,
        groups: 1_000,
        group_tokens: 0,
        lengths: LengthRange {
            input: (3_000, 4_000),
            output: (100, 200),
        },
        ..Mix::shared_prefix()
    }
    .generate(5)
}

#[test]
fn disaggregated_answers_are_not_delayed_by_prompts() {
    let workload = long_answers();
    let run_with = |prefill| {
        let mut plan = SimPlan {
            horizon: 20 * SECOND,
            ..SimPlan::default()
        };
        plan.disaggregation.prefill = prefill;
        run(&plan, &workload)
    };
    let (mixed, apart) = (run_with(0), run_with(2));
    assert_eq!(apart.ok, mixed.ok);
    assert_eq!(apart.by_backend[..2], [0, 0], "they answer nothing");
    assert!(
        apart.gap_ms.p99 < mixed.gap_ms.p99,
        "{:?} {:?}",
        apart.gap_ms,
        mixed.gap_ms
    );
    assert_eq!(json(&apart), json(&run_with(2)));
}

#[test]
fn disaggregated_requests_leave_nothing_after_disconnects() {
    let mut plan = SimPlan {
        horizon: 20 * SECOND,
        clients: ClientModel {
            patience: Some((SECOND, 4 * SECOND)),
            retries: 1,
        },
        restart: Some(RestartPlan {
            at: 10 * SECOND,
            who: RestartScope::One,
            wipe: false,
        }),
        ..SimPlan::default()
    };
    plan.disaggregation.prefill = 1;
    let case = ComparisonCase {
        plan,
        workload: Arc::new(long_answers()),
    };
    let run = case.run(|_| {});
    assert_eq!(run.faults, Vec::<String>::new());
    assert!(run.departures > 0 && run.resent > 0);
}

/// Returns a short load of agents, and eight engines that hold only some of their sessions.
fn agents() -> (SimPlan, SimWorkload) {
    let workload = AgentLoad {
        rate: 10.0,
        duration: 20 * SECOND,
        ..AgentLoad::default()
    };
    let mut plan = SimPlan {
        backends: 8,
        horizon: 20 * SECOND,
        ..SimPlan::default()
    };
    if let EngineModel::Continuous(shape) = &mut plan.engine {
        shape.num_gpu_blocks = 2048;
    }
    (plan, workload.generate(3))
}

#[test]
fn agents_send_every_turn_once_under_every_policy() {
    let (plan, workload) = agents();
    let mut at_longest = Vec::new();
    for policy in ["cost", "session", "random"] {
        let policy = SimPolicy::parse(policy).unwrap();
        let plan = SimPlan {
            policy: policy.config,
            ..plan.clone()
        };
        let run = run(&plan, &workload);
        assert_eq!(run.requests, workload.turns.len() as u64);
        let outputs: u64 = workload
            .turns
            .iter()
            .map(|it| u64::from(it.output_tokens))
            .sum();
        assert_eq!((run.ok, run.output_tokens), (run.requests, outputs));
        let agents = run.agents.unwrap();
        let children = workload
            .turns
            .iter()
            .filter(|it| it.shared_tokens.is_some());
        let sent = (agents.turns, agents.children);
        assert_eq!(sent, (run.requests, children.count() as u64));
        assert!(agents.at_parents_prefix >= agents.with_room * agents.at_parents_prefix_with_room);
        let placed = agents.at_parents_prefix_with_room + agents.at_copy_with_room;
        assert!(agents.with_room > 0.0 && placed + agents.sooner_with_room <= 1.0 + 1e-9);
        let by_cause = agents.moved + agents.early + agents.unseen;
        let all = agents.at_longest_prefix + by_cause;
        assert!(
            (all - 1.0).abs() < 1e-9,
            "each miss has one cause: {agents:?}"
        );
        at_longest.push(agents.at_longest_prefix);
    }
    let [cost, session, random] = at_longest[..] else {
        panic!("{at_longest:?}");
    };
    assert!(
        cost > 0.8 && session > 0.5 && random < 0.4,
        "{at_longest:?}"
    );
}

#[test]
fn agents_go_on_after_a_restart() {
    let (plan, workload) = agents();
    let plan = SimPlan {
        restart: Some(RestartPlan {
            at: 10 * SECOND,
            who: RestartScope::All,
            wipe: false,
        }),
        ..plan
    };
    let run = run(&plan, &workload);
    assert!(run.resent > 0);
    assert_eq!(run.ok, workload.turns.len() as u64);
    let agents = run.agents.unwrap();
    assert_eq!(agents.turns, run.requests + run.resent);
    assert!(agents.at_longest_prefix > 0.8, "{agents:?}");
}
