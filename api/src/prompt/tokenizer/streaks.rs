//! Checks that have succeeded so many times in a row that they are repeated only now and then.

use std::collections::HashMap;

/// Times in a row from which on it is believed.
const SURE: u32 = 8;
/// Of what is believed, one in so many is looked at.
const LOOK_EVERY: u32 = 16;
/// Kinds remembered; then all are learnt anew.
const KINDS_MAX: usize = 1024;

/// How often something has held, by kind.
#[derive(Debug, Default)]
pub(crate) struct Streaks(HashMap<u64, Streak>);

#[derive(Debug, Default)]
struct Streak {
    held: u32,
    /// Times that it was believed since the last look.
    believed: u32,
}

impl Streaks {
    /// Whether it has held for this kind often enough to be believed.
    pub(crate) fn is_sure(&self, kind: u64) -> bool {
        self.0.get(&kind).is_some_and(|streak| streak.held >= SURE)
    }

    /// Whether to look this time, which counts as one time.
    pub(crate) fn is_due(&mut self, kind: u64) -> bool {
        let Some(streak) = self.0.get_mut(&kind).filter(|it| it.held >= SURE) else {
            return true;
        };
        streak.believed = (streak.believed + 1) % LOOK_EVERY;
        streak.believed == 0
    }

    /// It held, or it did not: then it is believed no more.
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
    fn what_held_is_believed_until_it_does_not() {
        let mut streaks = Streaks::default();
        for _ in 0..SURE {
            assert!(streaks.is_due(1) && !streaks.is_sure(1));
            streaks.saw(1, true);
        }
        assert!(streaks.is_sure(1) && !streaks.is_sure(2));
        let looks = (0..LOOK_EVERY * 10).filter(|_| streaks.is_due(1)).count();
        assert_eq!(looks, 10);
        assert!(streaks.is_due(2), "of others nothing is known");
        streaks.saw(1, false);
        assert!(streaks.is_due(1) && !streaks.is_sure(1));
        for kind in 0..5000 {
            streaks.saw(kind, true);
        }
        assert!(streaks.0.len() <= KINDS_MAX);
    }
}
