//! Restricts a request for a LoRA adapter to the engines that suit it best.
//!
//! Affinity comes first, up to a threshold: an engine that has the adapter in memory is preferred
//! while its queue is short. When all such queues are long, the request may go to an engine that
//! has to load the adapter. If no engine has the adapter in memory, engines with room for it are
//! preferred to those that would evict another one.

use crate::engines::backends::AdapterPlace;

/// A backend that may take the request, as input for the adapter filter.
#[derive(Debug, Clone, Copy)]
pub(super) struct AdapterCandidate {
    pub(in crate::routing) place: AdapterPlace,
    /// Number of requests queued ahead of this one, in the engine and at this replica.
    pub(in crate::routing) queue: u32,
}

impl AdapterCandidate {
    /// Whether `place` is the adapter's place at the candidate and its queue is at most
    /// `threshold`.
    pub(in crate::routing) fn is(&self, place: AdapterPlace, threshold: u32) -> bool {
        self.place == place && self.queue <= threshold
    }
}

/// Returns the adapter's place that candidates must have, with a queue of at most `threshold`;
/// `None` if all candidates qualify.
pub(super) fn preferred(
    candidates: &(impl Iterator<Item = AdapterCandidate> + Clone),
    threshold: u32,
) -> Option<AdapterPlace> {
    let is_any = |place| {
        let mut candidates = candidates.clone();
        candidates.any(|candidate| candidate.is(place, threshold))
    };
    if is_any(AdapterPlace::Resident) {
        return Some(AdapterPlace::Resident);
    }
    let mut places = candidates.clone().map(|candidate| candidate.place);
    let is_somewhere = places.any(|place| place == AdapterPlace::Resident);
    (!is_somewhere && is_any(AdapterPlace::Room)).then_some(AdapterPlace::Room)
}

#[cfg(test)]
mod tests {
    use super::*;

    const THRESHOLD: u32 = 5;

    /// Returns the indexes of the candidates that remain, given as `(place, queue)`.
    fn kept(candidates: &[(AdapterPlace, u32)]) -> Vec<usize> {
        let candidates = candidates
            .iter()
            .map(|&(place, queue)| AdapterCandidate { place, queue });
        let wanted = preferred(&candidates, THRESHOLD);
        let stays = |it: &AdapterCandidate| wanted.is_none_or(|place| it.is(place, THRESHOLD));
        let kept = candidates.enumerate().filter(|(_, it)| stays(it));
        kept.map(|(at, _)| at).collect()
    }

    #[test]
    fn adapter_affinity_applies_up_to_the_threshold() {
        use AdapterPlace::{Other, Resident, Room};
        assert_eq!(kept(&[(Resident, 0), (Room, 0), (Other, 0)]), [0]);
        assert_eq!(kept(&[(Resident, 5), (Resident, 6), (Room, 0)]), [0]);
        // All queues are long, so any engine may load it.
        assert_eq!(kept(&[(Resident, 6), (Room, 0), (Other, 0)]), [0, 1, 2]);
    }

    #[test]
    fn an_unloaded_adapter_goes_to_an_engine_with_room() {
        use AdapterPlace::{Other, Room};
        assert_eq!(kept(&[(Other, 0), (Room, 3), (Room, 0)]), [1, 2]);
        assert_eq!(kept(&[(Other, 0), (Room, 6), (Room, 0)]), [2]);
        assert_eq!(kept(&[(Other, 0), (Room, 6)]), [0, 1]);
        assert_eq!(kept(&[(Other, 0), (Other, 9)]), [0, 1]);
        assert_eq!(kept(&[]), [0; 0]);
    }
}
