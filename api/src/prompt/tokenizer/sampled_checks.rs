//! Tracks which checks have succeeded so often in a row that they are repeated only occasionally.

use std::collections::HashMap;

/// Number of successes in a row after which a check is trusted.
const SURE: u32 = 8;
/// A trusted check is performed once in this many calls.
const LOOK_EVERY: u32 = 16;
/// Maximum number of kinds of checks. Beyond it, the results of all kinds are discarded.
const KINDS_MAX: usize = 1024;

/// Consecutive successes of checks, by kind.
#[derive(Debug, Default)]
pub(crate) struct SampledChecks(HashMap<u64, Streak>);

#[derive(Debug, Default)]
struct Streak {
    held: u32,
    /// Number of calls since a trusted check was last performed.
    believed: u32,
}

impl SampledChecks {
    /// Whether checks of this kind have succeeded often enough in a row to be trusted.
    pub(crate) fn is_sure(&self, kind: u64) -> bool {
        self.0.get(&kind).is_some_and(|streak| streak.held >= SURE)
    }

    /// Whether to perform a check of this kind this time. Counts the call.
    pub(crate) fn is_due(&mut self, kind: u64) -> bool {
        let Some(streak) = self.0.get_mut(&kind).filter(|it| it.held >= SURE) else {
            return true;
        };
        streak.believed = (streak.believed + 1) % LOOK_EVERY;
        streak.believed == 0
    }

    /// Records whether a check `held`. A failure ends the trust in its kind.
    pub(crate) fn saw(&mut self, kind: u64, held: bool) {
        if self.0.len() >= KINDS_MAX && !self.0.contains_key(&kind) {
            self.0.clear();
        }
        let streak = self.0.entry(kind).or_default();
        streak.held = match held {
            true => streak.held.saturating_add(1),
            false => 0,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checks_become_rare_until_one_fails() {
        let mut sampled_checks = SampledChecks::default();
        for _ in 0..SURE {
            assert!(sampled_checks.is_due(1) && !sampled_checks.is_sure(1));
            sampled_checks.saw(1, true);
        }
        assert!(sampled_checks.is_sure(1) && !sampled_checks.is_sure(2));
        let looks = (0..LOOK_EVERY * 10)
            .filter(|_| sampled_checks.is_due(1))
            .count();
        assert_eq!(looks, 10);
        assert!(sampled_checks.is_due(2), "of others nothing is known");
        sampled_checks.saw(1, false);
        assert!(sampled_checks.is_due(1) && !sampled_checks.is_sure(1));
        for kind in 0..5000 {
            sampled_checks.saw(kind, true);
        }
        assert!(sampled_checks.0.len() <= KINDS_MAX);
    }
}
