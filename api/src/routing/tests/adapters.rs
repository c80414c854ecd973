//! Tests affinity to engines with an adapter in memory, up to a threshold of their queues.

use super::*;
use crate::engines::backends::EngineAdapters;

impl Bench {
    /// Makes the engine list the adapter "m", with `resident` in memory and room for two.
    fn tells(&self, slot: u16, resident: &[&str], waiting: u32) {
        let adapters = EngineAdapters {
            max: 2,
            resident: resident.iter().map(ToString::to_string).collect(),
            listed: vec!["m".to_owned()],
        };
        let health = Health {
            waiting,
            adapters: Some(Arc::new(adapters)),
            ..HEALTHY
        };
        let backends = &self.router.decider().backends;
        backends.assume(Slot(slot), &health);
    }

    fn left(&self, identity: &PromptIdentity, waiting_here: u32) -> Vec<u16> {
        let verdicts = self.verdicts(&RoutingRequest {
            waiting_here,
            ..ask(identity, &[])
        });
        let is_left = |(slot, verdict): (u16, FilterVerdict)| match verdict {
            FilterVerdict::Candidate => Some(slot),
            verdict => {
                assert_eq!(verdict, FilterVerdict::NotResident);
                None
            }
        };
        (0..).zip(verdicts).filter_map(is_left).collect()
    }
}

#[test]
fn adapter_requests_stay_at_loaded_engines_with_short_queues() {
    let bench = Bench::new(3);
    let identity = bench.identify("hello");
    bench.tells(0, &["x", "y"], 0);
    bench.tells(1, &["x"], 0);
    assert_eq!(bench.left(&identity, 0), [1], "the one with room");
    bench.tells(0, &["m", "y"], 50);
    assert_eq!(bench.left(&identity, 0), [0], "the one that has it");
    assert_eq!(bench.left(&identity, 1), [0, 1, 2], "who waits here counts");
    bench.tells(0, &["m", "y"], 51);
    assert_eq!(bench.left(&identity, 0), [0, 1, 2]);
    // A tried engine and one with the base model do not count.
    bench.tells(0, &["m", "y"], 0);
    let tried = bench.decide(&identity, &[Slot(0)]).unwrap();
    assert_eq!(tried.backend.slot, Slot(1));
    let base = bench.verdicts(&RoutingRequest {
        model: "base",
        ..ask(&identity, &[])
    });
    assert!(!base.contains(&FilterVerdict::NotResident), "{base:?}");
}
