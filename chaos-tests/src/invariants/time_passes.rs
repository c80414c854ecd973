//! Replicated time passes as fast as real time, whatever a minority of the clocks show: never
//! faster, and after healing not slower.

use super::{PropertyError, Subjects};
use crate::oracle::RunRecord;

/// Number of the invariant in docs/internals/invariants.md.
pub const NUMBER: &str = "I50";
/// Statement of the invariant.
pub const NAME: &str = "replicated time passes as real time does";

/// Allowance for differences between correct clocks, message delays, and the time to the next
/// command, in milliseconds.
const SLACK_MS: u64 = 5000;

/// Compares the time of states with that of the first one with a command, which may have been seen
/// long after its stamp, but was stamped after the start of the world. Skips runs in which too many
/// clocks were wrong to determine the time.
///
/// # Errors
/// If a state is ahead of real time, or a state at rest is behind.
pub fn check(record: &RunRecord) -> Result<Subjects, PropertyError> {
    let observation = &record.observation;
    let mut begun = observation.images.iter();
    let mut begun = begun.by_ref().skip_while(|(_, _, image)| image.now_ms == 0);
    let Some((began_us, _, first)) = begun.next() else {
        return Ok(0);
    };
    if observation.are_clocks_doubted {
        return Ok(0);
    }
    let mut subjects = 0;
    for (at_us, run, image) in begun {
        let (seen_ms, real_ms) = (at_us.saturating_sub(*began_us) / 1000, at_us / 1000);
        let passed_ms = image.now_ms.saturating_sub(first.now_ms);
        let rests = observation.at_rest.values();
        let is_at_rest = rests.into_iter().any(|it| it.image.index == image.index);
        let is_behind = is_at_rest && passed_ms + SLACK_MS < seen_ms;
        if is_behind || passed_ms > real_ms + SLACK_MS {
            let detail = format!(
                "{run}, index {}: {passed_ms} ms passed since index {}, seen {seen_ms} ms ago; \
                 the world is {real_ms} ms old",
                image.index, first.index
            );
            return Err(super::violation(NUMBER, NAME, detail));
        }
        subjects += 1;
    }
    Ok(subjects)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::fixture::RecordBuilder;

    /// Checks a cluster at rest ten seconds after its first image, in which `passed_ms` of
    /// replicated time have passed.
    fn after_ten_seconds(
        passed_ms: u64,
        are_clocks_doubted: bool,
    ) -> Result<Subjects, PropertyError> {
        let mut story = RecordBuilder::lively();
        story.image(|image| image.now_ms = 1000);
        story.rest();
        let observation = &mut story.record.observation;
        observation.are_clocks_doubted = are_clocks_doubted;
        let (began_us, run, first) = observation.images[0].clone();
        let mut last = (*first).clone();
        last.now_ms += passed_ms;
        let last = std::sync::Arc::new(last);
        observation.images.push((began_us + 10_000_000, run, last));
        // The first image is not at rest.
        std::sync::Arc::make_mut(&mut observation.images[0].2).index = 0;
        check(&story.record)
    }

    #[test]
    fn a_racing_or_frozen_time_is_detected() {
        assert_eq!(after_ten_seconds(10_000, false), Ok(1));
        assert!(after_ten_seconds(3_600_000, false).is_err());
        assert!(after_ten_seconds(4000, false).is_err());
        assert_eq!(after_ten_seconds(4000, true), Ok(0));
    }

    #[test]
    fn a_stamp_long_before_its_state_was_seen_is_no_violation() {
        let mut story = RecordBuilder::lively();
        story.image(|image| image.now_ms = 1000);
        let observation = &mut story.record.observation;
        observation.images[0].0 = 8_000_000;
        let (_, run, first) = observation.images[0].clone();
        let mut last = (*first).clone();
        last.now_ms += 9000;
        let last = std::sync::Arc::new(last);
        observation.images.push((9_000_000, run, last));
        assert_eq!(check(&story.record), Ok(1));
    }
}
