//! Tests that workloads have the shape they are named for.

use state::ids::BlockHash;

use super::*;

fn second(mix: &Mix) -> Vec<usize> {
    let workload = mix.generate(1);
    let mut counts = vec![0; 60];
    for sent in &workload.arrivals {
        counts[usize::try_from(sent.at / 1_000_000).unwrap()] += 1;
    }
    counts
}

#[test]
fn groups_share_only_their_first_blocks() {
    let workload = Mix::shared_prefix().generate(1);
    let first = &workload.arrivals[0].prompt.identity.chain;
    let shared = |chain: &[BlockHash]| first.iter().zip(chain).take_while(|(a, b)| a == b).count();
    let lengths: Vec<usize> = workload.arrivals[1..]
        .iter()
        .map(|sent| shared(&sent.prompt.identity.chain))
        .collect();
    assert!(
        lengths.iter().all(|length| *length == 0 || *length == 64),
        "{lengths:?}"
    );
    assert!(lengths.contains(&0) && lengths.contains(&64));
}

#[test]
fn templates_share_their_first_blocks_with_all_requests() {
    let workload = Mix::templated().generate(1);
    let first = workload.arrivals[0].prompt.identity.chain[7];
    assert!(
        workload
            .arrivals
            .iter()
            .all(|sent| sent.prompt.identity.chain[7] == first)
    );
}

#[test]
fn the_hot_group_gets_most_requests() {
    let workload = Mix::one_hot().generate(1);
    let first = |sent: &SimArrival| sent.prompt.identity.chain[0];
    let mut counts = std::collections::BTreeMap::new();
    for sent in &workload.arrivals {
        *counts.entry(first(sent)).or_insert(0_usize) += 1;
    }
    let most = *counts.values().max().unwrap();
    assert!(most * 10 > workload.arrivals.len() * 7);
}

#[test]
fn bursts_arrive_at_the_configured_rate() {
    let counts = second(&Mix::burst());
    let in_burst: usize = (0..60).filter(|at| at % 20 < 5).map(|at| counts[at]).sum();
    let all: usize = counts.iter().sum();
    assert!((1000..1400).contains(&all), "{all} for 1200");
    assert!(in_burst * 10 > all * 6, "{in_burst} of {all}");
}

#[test]
fn a_configured_rate_stretches_a_trace() {
    let mut workload = Mix::shared_prefix().generate(1);
    let requests = workload.arrivals.len() as f64;
    workload.set_rate(5.0);
    let seconds = workload.arrivals.last().unwrap().at as f64 / 1e6;
    assert!((requests / seconds - 5.0).abs() < 0.01);
    assert!(workload.arrivals.is_sorted_by_key(|sent| sent.at));
}

#[test]
fn a_day_is_quiet_at_night_and_highest_at_noon() {
    let day = Mix::day();
    let workload = Mix { rate: 0.5, ..day }.generate(1);
    let mut by_hour = [0_usize; 24];
    for sent in &workload.arrivals {
        by_hour[(sent.at / (day.duration / 24)) as usize] += 1;
    }
    let all = workload.arrivals.len();
    assert!((41_000..46_000).contains(&all), "{all} for 43200");
    assert_eq!((by_hour[..6].iter().sum::<usize>(), by_hour[23]), (0, 0));
    assert!(by_hour[12] * 100 > by_hour[9] * 110, "{by_hour:?}");
    assert!(
        by_hour[7] < by_hour[8] && by_hour[20] < by_hour[18],
        "{by_hour:?}"
    );
}
