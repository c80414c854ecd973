//! Backends that a source lists stay registered, and others are removed slowly. The check uses the
//! log, for a source with a known fleet ([`fleet`]).

use std::collections::BTreeMap;

use state::command::{Command, Envelope, Reply};
use state::discovery::DiscoveryChange;

use super::{PropertyError, Subjects};
use crate::oracle::RunRecord;
use crate::oracle::fleet;
use crate::oracle::model::CommandEffect;
use crate::oracle::observation::EPOCH_MS;

/// Number of the invariant in docs/internals/invariants.md.
pub const NUMBER: &str = "I151";
/// Statement of the invariant.
pub const NAME: &str = "what a source tells of stays, and the rest goes slowly";

/// Maximum time by which a backend may be removed early by the world's clock, in microseconds.
/// Replicated time may run ahead by this much while clocks are set.
const EARLY_US: u64 = 1_000_000;

/// The backends of a source.
#[derive(Default)]
struct SourceFleet {
    /// Backends by name, each with the time since which it is lost; `None` if it is not lost.
    backends: BTreeMap<String, Option<u64>>,
    /// Whether most clocks were wrong at some time, so that replicated time may have leapt.
    are_clocks_doubted: bool,
}

/// Checks every change that the source made, and its backends at the end.
///
/// # Errors
/// If a listed backend was lost or removed, one was removed early although most clocks were right,
/// or too many were lost at once.
pub fn check(record: &RunRecord) -> Result<Subjects, PropertyError> {
    let comparison = record.comparison();
    let mut held = SourceFleet {
        are_clocks_doubted: record.observation.are_clocks_doubted,
        ..SourceFleet::default()
    };
    let mut subjects = 0;
    for (index, envelope) in &comparison.commands {
        let Command::Discover(discovery) = &envelope.command else {
            continue;
        };
        let effect = comparison.effects.get(index);
        let is_done = effect == Some(&CommandEffect::Done(Reply::Applied));
        if discovery.source != fleet::SOURCE || !is_done {
            continue;
        }
        subjects += 1;
        let applied_us = record.observation.log[index].applied_at_us;
        let at_us = match &discovery.change {
            // A leader without a quorum may have decided long before.
            DiscoveryChange::Lost { .. } => applied_us.min(decided_us(envelope)),
            _ => applied_us,
        };
        let changed = held.change(&discovery.change, at_us);
        changed.map_err(|why| broken(format!("index {index}: {why}")))?;
    }
    if subjects > 0 {
        subjects += check_rest(record)?;
    }
    Ok(subjects)
}

impl SourceFleet {
    fn change(&mut self, change: &DiscoveryChange, now_us: u64) -> Result<(), String> {
        let name = change.backend();
        if fleet::is_steady(name) && !matches!(change, DiscoveryChange::Found(_)) {
            return Err(format!(
                "{change:?}, which the source tells of at all times"
            ));
        }
        match change {
            DiscoveryChange::Found(_) => drop(self.backends.insert(name.to_owned(), None)),
            DiscoveryChange::Lost { .. } => {
                let known = self
                    .backends
                    .get_mut(name)
                    .ok_or("an unknown backend is lost")?;
                known.get_or_insert(now_us);
                let lost = self.backends.values().flatten().count();
                let lost_max =
                    self.backends.len() * fleet::rules().lost_permille_max as usize / 1000;
                if lost > lost_max {
                    let all = self.backends.len();
                    return Err(format!(
                        "{lost} of {all} are lost, at most {lost_max} may be"
                    ));
                }
            }
            DiscoveryChange::Forgotten { .. } => {
                let known = self
                    .backends
                    .remove(name)
                    .ok_or("an unknown backend goes")?;
                let since_us = known.ok_or_else(|| format!("{name} goes, and is not lost"))?;
                let lost_us = now_us.saturating_sub(since_us);
                let is_early = lost_us + EARLY_US < fleet::rules().remove_after_ms * 1000;
                if is_early && !self.are_clocks_doubted {
                    return Err(format!(
                        "{name} goes {} ms after it was lost",
                        lost_us / 1000
                    ));
                }
            }
        }
        Ok(())
    }
}

/// Returns the world's time at which a command was proposed, by the median of the clocks.
fn decided_us(envelope: &Envelope) -> u64 {
    envelope.proposed_at_ms.saturating_sub(EPOCH_MS) * 1000
}

/// Checks that exactly the listed engines are registered at the end.
fn check_rest(record: &RunRecord) -> Result<Subjects, PropertyError> {
    let last = fleet::last();
    for (id, at_rest) in &record.observation.at_rest {
        let backends = at_rest.image.backends.keys();
        let held: Vec<&String> = backends
            .filter(|it| it.starts_with(fleet::SOURCE))
            .collect();
        if !held.iter().copied().eq(last.iter()) {
            return Err(broken(format!("replica {id} has {held:?} in the end")));
        }
    }
    Ok(record.observation.at_rest.len() as u64)
}

fn broken(detail: String) -> PropertyError {
    super::violation(NUMBER, NAME, detail)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(name: String) -> DiscoveryChange {
        let super::Command::PutBackend(mut spec) = crate::invariants::fixture::put("a", 1) else {
            unreachable!("it puts a backend");
        };
        spec.id = name;
        DiscoveryChange::Found(spec)
    }

    fn fleet_of(count: u64) -> SourceFleet {
        let mut held = SourceFleet::default();
        for number in 0..count {
            held.change(&found(fleet::name("roll", number)), 0).unwrap();
        }
        held
    }

    fn lost(name: String) -> DiscoveryChange {
        DiscoveryChange::Lost { name }
    }

    #[test]
    fn listed_engines_must_stay() {
        let mut held = fleet_of(4);
        let name = fleet::name("steady", 3);
        held.change(&found(name.clone()), 1).unwrap();
        assert!(held.change(&lost(name.clone()), 2).is_err());
        assert!(
            held.change(&DiscoveryChange::Forgotten { name }, 2)
                .is_err()
        );
    }

    #[test]
    fn losing_over_half_or_too_early_is_detected() {
        let mut held = fleet_of(4);
        let name = |number| fleet::name("roll", number);
        held.change(&lost(name(0)), 1_000_000).unwrap();
        held.change(&lost(name(1)), 1_000_000).unwrap();
        let early = DiscoveryChange::Forgotten { name: name(0) };
        assert!(held.change(&early, 1_900_000).is_err());
        let mut leapt = SourceFleet {
            are_clocks_doubted: true,
            ..fleet_of(4)
        };
        leapt.change(&lost(name(0)), 1_000_000).unwrap();
        leapt.change(&early, 1_900_000).unwrap();
        assert!(held.change(&lost(name(2)), 2_000_000).is_err());
        let gone = DiscoveryChange::Forgotten { name: name(1) };
        assert!(
            fleet_of(4).change(&gone, 9_000_000).is_err(),
            "it was not lost"
        );
        held.change(&gone, 3_100_000).unwrap();
    }
}
