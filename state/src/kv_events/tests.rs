//! Tests of the bounds of followed backends, with small limits.

use crate::ids::{BackendRef, BlockHash, EngineHash, Incarnation, Slot};
use crate::kv_events::followed::FollowedBackends;
use crate::kv_events::tiers::TierIndexes;
use crate::kv_events::{
    KvBatch, KvEvent, KvMessage, KvMode, KvReason, KvUncertainty, KvUpdate, LowerTier,
};
use crate::ownership::{OWNED_BLOCKS_MAX, Ownership};

struct EventFixture {
    exact: FollowedBackends,
    ownership: Ownership,
    tiers: TierIndexes,
    next_seq: u64,
}

impl EventFixture {
    /// Creates two engines. `per_backend` and `all` limit the blocks kept for one engine and for
    /// both; `owned` limits the owned blocks.
    fn new(per_backend: u64, all: u64, owned: u64) -> Self {
        let mut fixture = Self {
            exact: FollowedBackends::with_limits(per_backend, all),
            ownership: Ownership::with_limits(16, owned),
            tiers: TierIndexes::default(),
            next_seq: 0,
        };
        for slot in 0..2 {
            fixture.ownership.add_backend(Slot(slot), None);
            fixture.tell(slot, KvUpdate::Current { seq: None });
        }
        fixture
    }

    fn tell(&mut self, slot: u16, news: KvUpdate) {
        let backend = BackendRef {
            slot: Slot(slot),
            incarnation: Incarnation(1),
        };
        let batch = KvBatch {
            backend,
            rank: 0,
            publisher: 1,
            news,
        };
        let indexes = (&mut self.ownership, &mut self.tiers);
        let changes = self.exact.apply(backend, &batch, indexes);
        assert!(changes.is_some(), "no bound of a batch is broken");
        assert_eq!(self.exact.check(), Ok(()));
        assert_eq!(self.ownership.check([]), Ok(()));
        let reports = |slot| self.exact.reports(0, slot);
        assert_eq!(self.ownership.check_reports(&reports), Ok(()));
        let below = |level, slot| self.exact.reports(level, slot);
        assert_eq!(self.tiers.check(&below), Ok(()));
    }

    /// Stores first blocks of these names at the engine in slot 0, after clearing it if requested.
    fn store(&mut self, names: &[u64], clears: bool) {
        let blocks = names.iter().map(|name| KvEvent::Stored {
            parent: None,
            blocks: vec![(EngineHash(*name), BlockHash(*name))],
        });
        let clear = clears.then_some(KvEvent::Cleared);
        self.hear(clear.into_iter().chain(blocks).collect());
    }

    /// Reports the next message of the engine in slot 0.
    fn hear(&mut self, events: Vec<KvEvent>) {
        let seq = self.next_seq;
        self.next_seq += 1;
        let message = KvMessage {
            seq,
            mark: 0,
            part: 0,
            is_last: true,
            is_after_loss: false,
            events,
        };
        self.tell(0, KvUpdate::Message(message));
        self.tell(0, KvUpdate::Current { seq: Some(seq) });
    }

    /// Returns mode, reason and owned blocks of slot 0.
    fn shown(&self) -> (KvMode, Option<KvReason>, u64) {
        let (_, it) = self.exact.conditions().next().expect("it is followed");
        (it.mode, it.reason, self.ownership.owned(Slot(0)))
    }
}

const FULL: (KvMode, Option<KvReason>, u64) = (KvMode::Lease, Some(KvReason::TooManyBlocks), 0);

#[test]
fn a_backend_with_too_many_blocks_uses_leases_until_cleared() {
    let mut fixture = EventFixture::new(3, 10, OWNED_BLOCKS_MAX);
    fixture.store(&[1, 2, 3], false);
    assert_eq!(fixture.shown(), (KvMode::Exact, None, 3));
    fixture.store(&[1, 2], false);
    assert_eq!(fixture.shown(), (KvMode::Exact, None, 3));
    fixture.store(&[4], false);
    assert_eq!(fixture.shown(), FULL);
    fixture.store(&[5], false);
    assert_eq!(fixture.shown(), FULL);
    fixture.store(&[6, 7], true);
    assert_eq!(fixture.shown(), (KvMode::Exact, None, 2));
    // One message exceeds the limit, and the next one clears the cache before it stores blocks.
    fixture.store(&[8, 9, 10], false);
    assert_eq!(fixture.shown(), FULL);
    fixture.store(&[11, 12, 13], true);
    assert_eq!(fixture.shown(), (KvMode::Exact, None, 3));
}

#[test]
fn tiers_below_the_gpu_leave_it_a_quarter_of_the_bound() {
    let mut fixture = EventFixture::new(8, 100, OWNED_BLOCKS_MAX);
    let names = |names: [u64; 4]| names.map(EngineHash).to_vec();
    let offloads = |blocks: [u64; 4]| {
        let tier = LowerTier::Cpu;
        let copied = KvEvent::TierCopied {
            tier,
            blocks: names(blocks),
        };
        let removed = KvEvent::Removed {
            blocks: names(blocks),
        };
        vec![copied, removed]
    };
    fixture.store(&[1, 2, 3, 4], false);
    fixture.hear(offloads([1, 2, 3, 4]));
    assert_eq!(fixture.shown(), (KvMode::Exact, None, 0));
    for round in 1..4 {
        let first = 10 * round;
        let blocks = [first, first + 1, first + 2, first + 3];
        fixture.store(&blocks, false);
        assert_eq!(fixture.shown(), (KvMode::Exact, None, 4));
        fixture.hear(offloads(blocks));
        let ranks = fixture.exact.status(Slot(0), &fixture.ownership);
        let rank = ranks.expect("it is followed").ranks[0];
        assert_eq!(rank.lower_tier_blocks.cpu, 4);
        assert_eq!(rank.lower_tier_blocks_left_out, 4 * round);
    }
}

#[test]
fn blocks_of_other_backends_count_toward_the_total_bound() {
    let mut fixture = EventFixture::new(10, 4, OWNED_BLOCKS_MAX);
    let blocks = vec![(EngineHash(1), BlockHash(1)), (EngineHash(2), BlockHash(2))];
    let stored = KvEvent::Stored {
        parent: None,
        blocks,
    };
    let message = KvMessage {
        seq: 0,
        mark: 0,
        part: 0,
        is_last: true,
        is_after_loss: false,
        events: vec![stored],
    };
    fixture.tell(1, KvUpdate::Message(message));
    fixture.store(&[1, 2], false);
    assert_eq!(fixture.shown(), (KvMode::Exact, None, 2));
    fixture.store(&[3], false);
    assert_eq!(fixture.shown(), FULL);
    assert_eq!(fixture.ownership.owned(Slot(1)), 2);
}

#[test]
fn a_backend_uses_leases_when_owned_blocks_are_full() {
    let mut fixture = EventFixture::new(10, 10, 3);
    let chain = [BlockHash(51), BlockHash(52)];
    let lease = fixture.ownership.acquire(Slot(0), None, &chain);
    let lease = lease.expect("no tip is named");
    fixture.ownership.release(lease, true);
    // Blocks from leases make room for those that the engine reports.
    fixture.store(&[1, 2, 3], false);
    assert_eq!(fixture.shown(), (KvMode::Exact, None, 3));
    fixture.store(&[4], false);
    assert_eq!(fixture.shown(), FULL);
}

/// While a replay brings an engine's past, its blocks stand beside those known from leases. The sum
/// can exceed the engine's capacity, because the removals are still to come.
#[test]
fn leased_blocks_add_to_replayed_ones_until_all_are_replayed() {
    let mut fixture = EventFixture::new(1000, 1000, OWNED_BLOCKS_MAX);
    fixture.ownership.set_capacity(Slot(0), Some(256));
    fixture.tell(0, KvUpdate::Doubt(KvUncertainty::Gap));
    let chain: Vec<_> = (1000..1198).map(BlockHash).collect();
    let lease = fixture.ownership.acquire(Slot(0), None, &chain);
    fixture
        .ownership
        .release(lease.expect("no tip is named"), true);
    let tip = chain.last().copied();
    let EventFixture {
        exact, ownership, ..
    } = &mut fixture;
    exact.released(Slot(0), tip, ownership, 0);
    let blocks = (0..256).map(|name| KvEvent::Stored {
        parent: None,
        blocks: vec![(EngineHash(name), BlockHash(name))],
    });
    fixture.tell(
        0,
        KvUpdate::Message(KvMessage {
            seq: 0,
            mark: 0,
            part: 0,
            is_last: true,
            is_after_loss: false,
            events: blocks.collect(),
        }),
    );
    let gap = Some(KvReason::Doubt(KvUncertainty::Gap));
    for now_ms in [0, 12_000] {
        fixture.exact.fade(&mut fixture.ownership, now_ms);
        assert_eq!(fixture.shown(), (KvMode::Degraded, gap, 454));
    }
    fixture.tell(0, KvUpdate::Current { seq: Some(0) });
    fixture.exact.fade(&mut fixture.ownership, 12_000);
    assert_eq!(fixture.shown(), (KvMode::Exact, None, 256));
}
