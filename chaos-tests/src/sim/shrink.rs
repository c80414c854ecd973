//! Reduces a failing run to a shorter one with fewer faults, clients and replicas that breaks the same
//! rule, and tells it as a story.

use std::collections::BTreeSet;
use std::time::Duration;

use super::faults::Fault;
use super::run::{SeedOptions, SeedReport, SeedResult};

/// Faulty time below which a run is not shortened.
const FAULTY_MIN: Duration = Duration::from_millis(50);

/// Returns what broke in a run: the number of the invariant, or the first words of another message;
/// `None` if everything held.
fn broken(report: &SeedReport) -> Option<&str> {
    match &report.outcome {
        SeedResult::Held => None,
        SeedResult::Broke(how) => how.split([':', ' ']).next(),
    }
}

/// Reduces the run with these options, whose report says that a rule broke, in at most `runs_max` runs
/// of other options, which `again` runs. Every accepted run breaks the same rule in fewer events.
pub fn shrink(
    (options, report): (SeedOptions, SeedReport),
    runs_max: usize,
    mut again: impl FnMut(&SeedOptions) -> Option<SeedReport>,
) -> (SeedOptions, SeedReport) {
    let (mut best, mut least) = (options, report);
    let mut runs = 0;
    'smaller: loop {
        for candidate in smaller(&best, &least) {
            if runs == runs_max {
                return (best, least);
            }
            runs += 1;
            let is_it =
                |found: &SeedReport| broken(found) == broken(&least) && found.events < least.events;
            if let Some(found) = again(&candidate).filter(is_it) {
                (best, least) = (candidate, found);
                continue 'smaller;
            }
        }
        return (best, least);
    }
}

/// Returns simpler options than `of`, whose run had this `report`; those that save most come first.
fn smaller(of: &SeedOptions, report: &SeedReport) -> Vec<SeedOptions> {
    let mut all = Vec::new();
    let mut add = |change: &dyn Fn(&mut SeedOptions)| {
        let mut changed = of.clone();
        change(&mut changed);
        all.push(changed);
    };
    for share in [0.5, 0.8, 0.95] {
        let shorter = of.faulty.mul_f64(share);
        if shorter >= FAULTY_MIN {
            add(&|options| options.faulty = shorter);
        }
    }
    if !of.is_calm {
        add(&|options| (options.is_calm, options.only) = (true, Vec::new()));
    }
    let happened: BTreeSet<Fault> = report.counts.faults.keys().copied().collect();
    if of.only.is_empty() && !happened.is_empty() {
        add(&|options| options.only = happened.iter().copied().collect());
    }
    for kind in of.only.iter().filter(|_| of.only.len() > 1) {
        add(&|options| options.only.retain(|it| it != kind));
    }
    if of.varies {
        add(&|options| options.varies = false);
    }
    for clients in [0, 1] {
        if of.clients.is_none_or(|before| clients < before) {
            add(&|options| options.clients = Some(clients));
        }
    }
    if of.voters.is_none() {
        add(&|options| options.voters = Some(3));
    }
    all
}

/// Returns the events of a trace that a person can follow: starts, roles, faults and their ends, but no
/// messages and no applied entries.
#[must_use]
pub fn story(trace: &str) -> String {
    let told = trace.lines().filter(|line| {
        let mut words = line.split(' ').skip(1);
        let is_message = words.next().is_some_and(|word| word.contains('>'));
        !is_message && words.next() != Some("applied")
    });
    let seconds = |line: &str| {
        let (at_us, what) = line.split_once(' ')?;
        let at_us: u64 = at_us.parse().ok()?;
        Some(format!("{:>10.3} s  {what}\n", at_us as f64 / 1e6))
    };
    told.filter_map(seconds).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planted::PlantedBug;
    use crate::sim::run;

    #[test]
    fn a_failing_run_is_reduced_to_one_that_breaks_the_same_rule() {
        let options = SeedOptions {
            seed: 1,
            faulty: Duration::from_millis(1500),
            bug: PlantedBug::named("api.MinorityUnnoticed"),
            only: vec![Fault::LoseState],
            ..SeedOptions::default()
        };
        let first = run(&options).unwrap();
        let (rule, events) = (broken(&first).map(str::to_owned), first.events);
        assert!(rule.is_some(), "{:?}", first.outcome);
        let (least, report) = shrink((options, first), 4, |of| run(of).ok());
        assert_eq!(broken(&report).map(str::to_owned), rule);
        assert!(report.events < events && least.faulty < Duration::from_millis(1500));
        let repeated = run(&SeedOptions {
            is_traced: true,
            ..least
        });
        let repeated = repeated.unwrap();
        assert_eq!(repeated.hash, report.hash);
        let told = story(&repeated.text);
        assert!(
            told.contains("fault lose-state") && !told.contains('>'),
            "{told}"
        );
    }

    #[test]
    fn a_story_leaves_out_messages_and_applied_entries() {
        let trace = "0 WorldPlan\n1500000 1>2 vote\n2000000 2 applied 7\n2500000 fault crash\n";
        let expected = "     0.000 s  WorldPlan\n     2.500 s  fault crash\n";
        assert_eq!(story(trace), expected);
    }
}
