//! Tests the predictions for engines that compute the last block of every hit again.

use state::command::Item;

use super::*;

impl Bench {
    /// Reports what the engine in slot 0 does with the last block of a hit.
    fn drops_last_block(&self, drops_last_block: bool) {
        let facts = EngineFacts {
            drops_last_block: Some(drops_last_block),
            ..EngineFacts::default()
        };
        let handle = self.port.log.lock().unwrap().handle(0);
        self.router.outbox().observe(handle, facts);
        self.flush();
    }

    /// Returns the predicted number of blocks, and how it is explained with and without the backend
    /// as a candidate.
    fn predicted(&self, identity: &PromptIdentity) -> [u32; 3] {
        let shown = |excluded| {
            let row = &self.explain(&ask(identity, excluded)).backends[0];
            assert_eq!(row.matched_applied, 62, "what it holds stays");
            row.matched
        };
        let chosen = self.decide(identity, &[]).unwrap().matched;
        let queued = self.router.decider().best_match(&ask(identity, &[]));
        assert_eq!(queued, chosen, "the queue expects the same");
        [chosen, shown(&[]), shown(&[Slot(0)])]
    }
}

#[test]
fn predicted_hits_are_a_block_shorter_at_an_engine_that_drops_it() {
    let bench = Bench::new(1);
    let size = bench.identify("a").tail.tokens_per_block;
    let handle = bench.port.log.lock().unwrap().handle(0);
    let observed = Item::ObserveBlockSize {
        backend: handle,
        tokens: size,
    };
    assert!(bench.router.outbox().note(observed));
    bench.flush();
    let prompt = bench.identify(&"a".repeat(1000));
    let (_, attempt) = bench.start(&prompt);
    attempt.end(AttemptEnd::Finished, Instant::now());
    bench.flush();
    assert_eq!(bench.predicted(&prompt), [62; 3]);
    bench.drops_last_block(true);
    assert_eq!(bench.predicted(&prompt), [61; 3]);
    assert_eq!(bench.decide(&bench.identify("b"), &[]).unwrap().matched, 0);
    bench.drops_last_block(false);
    assert_eq!(bench.predicted(&prompt), [62; 3]);
}
