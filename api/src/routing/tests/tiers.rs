//! Tests of prompts whose blocks are on cache tiers below the GPU.

use state::command::Item;
use state::ids::EngineHash;
use state::kv_events::{KvBatch, KvEvent, KvMessage, KvUpdate, LowerTier, LowerTierBlocks};
use state::policy::{RoutingSettings, VisibleTiers};

use super::*;

impl Bench {
    /// Reports the first message of the engine in slot 1.
    fn hear(&self, events: Vec<KvEvent>) {
        let backend = self.port.log.lock().unwrap().handle(1);
        let message = KvUpdate::Message(KvMessage {
            seq: 0,
            mark: 7,
            part: 0,
            is_last: true,
            is_after_loss: false,
            events,
        });
        for news in [message, KvUpdate::Current { seq: Some(0) }] {
            let item = Item::KvEvents(KvBatch {
                backend,
                rank: 0,
                publisher: 1,
                news,
            });
            assert!(self.router.outbox().note(item));
        }
        self.flush();
    }

    /// Lets the engine in slot 1 cache `prompt` and evict all but its first `on_gpu` blocks: `in_cpu`
    /// of them to memory, the others to disk.
    fn offloads(&self, prompt: &PromptIdentity, on_gpu: usize, in_cpu: usize) {
        let names: Vec<_> = prompt.chain.iter().map(|it| EngineHash(it.0 ^ 9)).collect();
        let stored = KvEvent::Stored {
            parent: None,
            blocks: names
                .iter()
                .copied()
                .zip(prompt.chain.iter().copied())
                .collect(),
        };
        let (cpu, disk) = names[on_gpu..].split_at(in_cpu);
        let copied = |tier, blocks: &[EngineHash]| KvEvent::TierCopied {
            tier,
            blocks: blocks.to_vec(),
        };
        let removed = KvEvent::Removed {
            blocks: names[on_gpu..].iter().rev().copied().collect(),
        };
        let copies = [copied(LowerTier::Cpu, cpu), copied(LowerTier::Disk, disk)];
        self.hear(
            [stored]
                .into_iter()
                .chain(copies)
                .chain([removed])
                .collect(),
        );
    }

    fn shows(&self, tiers: Option<VisibleTiers>) {
        self.admin(Command::PutRouting(RoutingSettings {
            tiers,
            ..RoutingSettings::default()
        }));
    }
}

#[test]
fn a_request_goes_where_its_blocks_are_loaded_rather_than_computed() {
    let bench = Bench::new(2);
    let prompt = bench.identify(&"a".repeat(1000));
    bench.offloads(&prompt, 10, 20);
    let loaded = |disk| LowerTierBlocks {
        cpu: 20,
        disk,
        store: 0,
    };
    let (decision, attempt) = bench.start(&prompt);
    assert_eq!((decision.backend.slot, decision.matched), (Slot(1), 62));
    assert_eq!((decision.loaded, decision.on_gpu()), (loaded(32), 10));
    let queued = bench.router.decider().best_match(&ask(&prompt, &[]));
    assert_eq!(queued, 62, "the queue expects the same");
    let explained = bench.explain(&ask(&prompt, &[]));
    assert_eq!(explained.backends[0].loaded, LowerTierBlocks::default());
    let row = &explained.backends[1];
    // The request's lease holds its blocks on the GPU by now, before the engine reports them.
    assert_eq!((row.matched_applied, row.matched), (10, 62));
    attempt.end(AttemptEnd::Finished, Instant::now());
    bench.assert_quiet();
}

#[test]
fn policies_follow_loaded_blocks_as_far_as_they_see_tiers() {
    for (tiers, policy, followed) in [
        (Some(VisibleTiers::Gpu), "cost", 0),
        (None, "cost", 1),
        (None, "prefix-cache", 0),
        (Some(VisibleTiers::All), "prefix-cache", 1),
    ] {
        let bench = Bench::new(2);
        bench.shows(tiers);
        let mut policies = PolicyConfig::defaults().into_iter();
        let policy = policies.find(|it| it.name() == policy).unwrap();
        bench.admin(Command::PutPolicy(policy));
        let prompt = bench.identify(&"a".repeat(1000));
        bench.offloads(&prompt, 0, 62);
        // Of equal backends, the request's id draws one.
        let chosen = bench.decide(&prompt, &[]).unwrap();
        if followed == 1 {
            assert_eq!((chosen.backend.slot, chosen.loaded.cpu), (Slot(1), 62));
        } else {
            let reason = [Reason::OnlyCandidate, Reason::LongestPrefix];
            assert!(!reason.contains(&chosen.reason), "{chosen:?}");
        }
        // What an engine loads is cached, whether or not the policy knows.
        let there = bench.decide(&prompt, &[Slot(0)]).unwrap();
        assert_eq!((there.matched, there.loaded.cpu), (62, 62));
    }
}
