//! Scripts for one rule each: what engines report, and what is owned as a result.

use state::command::{Command, Item, LeaseOutcome, Reply};
use state::ids::{BackendRef, BlockHash, EngineHash, Slot};
use state::kv_events::{
    KV_BLOCKS_PER_BATCH_MAX, KV_RANKS_MAX, KvBatch, KvCondition, KvEvent, KvMessage, KvMode,
    KvReason, KvRejection, KvUncertainty, KvUpdate,
};

use crate::common::{Driver, batch, restored, snapshot, spec};

/// A backend whose engine names block `n` as `1000 + n`.
pub(crate) struct Scene {
    pub(crate) driver: Driver,
    pub(crate) backend: BackendRef,
    /// Next sequence number, by rank.
    next_seq: [u64; 2],
}

pub(crate) fn hashes(names: &[u64]) -> Vec<BlockHash> {
    names.iter().map(|name| BlockHash(*name)).collect()
}

pub(crate) fn stored(parent: Option<u64>, names: &[u64]) -> KvEvent {
    let engine = |name: u64| EngineHash(1000 + name);
    KvEvent::Stored {
        parent: parent.map(engine),
        blocks: names
            .iter()
            .map(|it| (engine(*it), BlockHash(*it)))
            .collect(),
    }
}

pub(crate) fn removed(names: &[u64]) -> KvEvent {
    KvEvent::Removed {
        blocks: names.iter().map(|name| EngineHash(1000 + name)).collect(),
    }
}

fn because(mode: KvMode, reason: KvReason) -> KvCondition {
    KvCondition {
        mode,
        reason: Some(reason),
    }
}

impl Scene {
    fn new(capacity: Option<u32>) -> Self {
        let mut driver = Driver::new();
        driver.apply(1, Command::PutBackend(spec("a", 1, capacity)));
        let backend = driver.state.backend("a").expect("it was put").handle;
        let next_seq = [0; 2];
        Self {
            driver,
            backend,
            next_seq,
        }
    }

    /// Creates a scene whose reader has caught up with a run that has just begun.
    pub(crate) fn followed(capacity: Option<u32>) -> Self {
        let mut scene = Self::new(capacity);
        scene.tell(0, KvUpdate::Current { seq: None });
        scene
    }

    pub(crate) fn apply(&mut self, item: Item) -> u32 {
        let reply = self.driver.apply(1, batch(vec![item]));
        assert_eq!(self.driver.state.check(), Ok(()));
        // Replicas restored here continue alike.
        let copy = restored(&snapshot(&self.driver.state));
        assert_eq!(copy.digest(), self.driver.state.digest());
        assert_eq!(copy.check(), Ok(()));
        match reply {
            Reply::Batch(reply) => reply.dropped + reply.missing_tip.len() as u32,
            other => panic!("{other:?}"),
        }
    }

    /// Applies an item like [`Scene::apply`], without its slow checks.
    pub(crate) fn note(&mut self, item: Item) {
        self.driver.apply(1, batch(vec![item]));
    }

    /// Reports news of rank 0 like [`Scene::tell`], without its checks.
    pub(crate) fn tell_quickly(&mut self, news: KvUpdate) {
        let backend = self.backend;
        self.note(Item::KvEvents(KvBatch {
            backend,
            rank: 0,
            publisher: 1,
            news,
        }));
    }

    fn tell(&mut self, rank: u16, news: KvUpdate) -> u32 {
        self.tell_of(1, rank, news)
    }

    fn tell_of(&mut self, publisher: u64, rank: u16, news: KvUpdate) -> u32 {
        let backend = self.backend;
        self.apply(Item::KvEvents(KvBatch {
            backend,
            rank,
            publisher,
            news,
        }))
    }

    /// Reports the next message of a rank, and that it is the newest.
    pub(crate) fn hear(&mut self, rank: u16, events: Vec<KvEvent>) {
        let seq = self.next_seq[usize::from(rank)];
        self.next_seq[usize::from(rank)] += 1;
        self.tell(rank, message(seq, false, events));
        self.tell(rank, KvUpdate::Current { seq: Some(seq) });
    }

    pub(crate) fn acquire(&mut self, attempt: u32, new: &[u64]) {
        let (backend, new) = (self.backend, hashes(new));
        let missed = self.apply(Item::Acquire {
            attempt,
            backend,
            tip: None,
            new,
        });
        assert_eq!(missed, 0);
    }

    pub(crate) fn release(&mut self, attempt: u32) -> u32 {
        let outcome = LeaseOutcome::Kept;
        self.apply(Item::Release { attempt, outcome })
    }

    pub(crate) fn owned(&self) -> Vec<u64> {
        let view = self.driver.state.view();
        let owns = |name: &u64| view.blocks.owns(Slot(0), BlockHash(*name));
        (0..100).filter(owns).collect()
    }

    fn condition(&self) -> KvCondition {
        let registry = self.driver.state.view().registry();
        registry.kv(Slot(0)).expect("it is followed")
    }
}

fn message(seq: u64, is_after_loss: bool, events: Vec<KvEvent>) -> KvUpdate {
    KvUpdate::Message(KvMessage {
        seq,
        mark: 77,
        part: 0,
        is_last: true,
        is_after_loss,
        events,
    })
}

#[test]
fn a_block_is_removed_with_its_last_copy() {
    let mut scene = Scene::followed(None);
    scene.hear(0, vec![stored(None, &[1, 2])]);
    scene.hear(0, vec![stored(Some(1), &[2])]);
    scene.hear(0, vec![removed(&[2])]);
    assert_eq!(scene.owned(), [1, 2]);
    scene.hear(0, vec![removed(&[2])]);
    assert_eq!(scene.owned(), [1]);
    assert_eq!(scene.condition(), KvCondition::EXACT);
}

#[test]
fn descendants_return_with_their_missing_block() {
    let mut scene = Scene::followed(None);
    scene.hear(0, vec![stored(None, &[1, 2, 3, 4]), stored(Some(2), &[5])]);
    scene.hear(0, vec![removed(&[2])]);
    assert_eq!(scene.owned(), [1]);
    scene.hear(0, vec![removed(&[4]), stored(Some(5), &[6])]);
    assert_eq!(scene.owned(), [1]);
    scene.hear(0, vec![stored(Some(1), &[2])]);
    assert_eq!(scene.owned(), [1, 2, 3, 5, 6]);
    scene.hear(0, vec![removed(&[1, 2, 3, 5, 6])]);
    assert_eq!(scene.owned(), Vec::<u64>::new());
    let map = scene
        .driver
        .state
        .kv_map(Slot(0), 0)
        .expect("it is followed");
    assert_eq!(map.iter().count(), 0);
}

#[test]
fn a_message_of_a_reader_that_lacks_a_known_block_is_not_applied() {
    let mut scene = Scene::followed(None);
    scene.hear(0, vec![stored(None, &[1, 2])]);
    let left_out = |name: u64| KvEvent::LeftOut {
        parent: EngineHash(1000 + name),
    };
    let of_its_own = vec![removed(&[2]), left_out(1)];
    scene.tell(0, message(1, false, of_its_own));
    scene.tell(0, message(2, false, vec![removed(&[1])]));
    scene.tell(0, KvUpdate::Current { seq: Some(2) });
    let gap = because(KvMode::Degraded, KvReason::Doubt(KvUncertainty::Gap));
    assert_eq!((scene.owned(), scene.condition()), (vec![1, 2], gap));
    // Another reader reports the same messages.
    scene.hear(0, vec![removed(&[2]), stored(Some(1), &[3])]);
    scene.hear(0, vec![left_out(9), KvEvent::Cleared, left_out(1)]);
    assert_eq!(scene.owned(), Vec::<u64>::new());
    assert_eq!(scene.condition(), KvCondition::EXACT);
}

#[test]
fn a_foreign_block_is_never_owned() {
    let mut scene = Scene::followed(None);
    let salted = |blocks: &[(u64, u64)]| KvEvent::Stored {
        parent: None,
        blocks: blocks
            .iter()
            .map(|(engine, router)| (EngineHash(*engine), BlockHash(*router)))
            .collect(),
    };
    scene.hear(0, vec![stored(None, &[1, 2])]);
    scene.hear(0, vec![salted(&[(501, 1), (502, 2), (503, 3)])]);
    assert_eq!(scene.owned(), [1, 2]);
    scene.hear(0, vec![removed(&[2])]);
    assert_eq!(scene.owned(), [1]);
    let ranks = scene
        .driver
        .state
        .kv_status(Slot(0))
        .expect("followed")
        .ranks;
    assert_eq!((ranks[0].blocks, ranks[0].unowned_blocks), (4, 3));
    assert_eq!(
        scene
            .driver
            .state
            .kv_router_hash(Slot(0), 0, EngineHash(503)),
        Some(BlockHash(3))
    );
}

#[test]
fn a_removal_overrides_pins_and_ends_their_leases() {
    let mut scene = Scene::followed(None);
    scene.hear(0, vec![stored(None, &[1, 2])]);
    scene.acquire(1, &[1, 2, 3]);
    scene.hear(0, vec![removed(&[2])]);
    assert_eq!(
        (scene.owned(), scene.driver.state.open_leases()),
        (vec![1], 0)
    );
    // The same blocks again: the end of the first lease must not release the second one.
    scene.acquire(2, &[1, 2, 3]);
    assert_eq!(scene.release(1), 1);
    assert_eq!(
        (scene.owned(), scene.driver.state.open_leases()),
        (vec![1, 2, 3], 1)
    );
    assert_eq!(scene.release(2), 0);
}

#[test]
fn leases_apply_until_events_arrive_and_fade_without_events() {
    let mut scene = Scene::followed(Some(1));
    scene.acquire(1, &[1, 2, 3]);
    assert_eq!(scene.owned(), [1, 2, 3]);
    scene.hear(0, vec![stored(None, &[1, 2])]);
    scene.release(1);
    // The engine reports two of these; the capacity leaves room for one more.
    assert_eq!(scene.owned(), [1, 2, 3]);
    let status = scene.driver.state.kv_status(Slot(0)).expect("followed");
    assert_eq!((status.reported_blocks, status.unconfirmed_blocks), (2, 1));
    for _ in 0..4 {
        scene.driver.apply(1, batch(Vec::new()));
        assert_eq!(scene.owned(), [1, 2, 3]);
    }
    // Nothing fades while the engine cannot be heard.
    scene.tell(0, KvUpdate::Doubt(KvUncertainty::Unreachable));
    for _ in 0..4 {
        scene.driver.apply(1, batch(Vec::new()));
    }
    assert_eq!(scene.owned(), [1, 2, 3]);
    scene.tell(0, KvUpdate::Current { seq: Some(0) });
    assert_eq!(scene.owned(), [1, 2]);
}

#[test]
fn leased_blocks_fade_after_the_first_event() {
    let mut scene = Scene::new(None);
    scene.acquire(1, &[1, 2]);
    scene.release(1);
    scene.tell(0, KvUpdate::Begin);
    assert_eq!(scene.owned(), [1, 2]);
    let gap = because(KvMode::Degraded, KvReason::Doubt(KvUncertainty::Gap));
    assert_eq!(scene.condition(), gap);
    scene.hear(0, vec![stored(None, &[1])]);
    assert_eq!(
        (scene.owned(), scene.condition()),
        (vec![1], KvCondition::EXACT)
    );
}

#[test]
fn a_block_is_owned_while_any_rank_holds_it() {
    let mut scene = Scene::followed(None);
    scene.tell(1, KvUpdate::Current { seq: None });
    scene.hear(0, vec![stored(None, &[1, 2])]);
    scene.hear(1, vec![stored(None, &[1, 5])]);
    scene.hear(0, vec![removed(&[1])]);
    assert_eq!(scene.owned(), [1, 5]);
    scene.hear(1, vec![KvEvent::Cleared]);
    assert_eq!(scene.owned(), Vec::<u64>::new());
    scene.hear(0, vec![stored(None, &[1])]);
    assert_eq!(scene.owned(), [1, 2]);
}

#[test]
fn a_merely_announced_message_does_not_end_degraded_mode() {
    let mut scene = Scene::new(None);
    scene.tell(0, KvUpdate::Begin);
    scene.tell(0, KvUpdate::Current { seq: Some(0) });
    let gap = because(KvMode::Degraded, KvReason::Doubt(KvUncertainty::Gap));
    assert_eq!(scene.condition(), gap);
    scene.hear(0, vec![stored(None, &[1])]);
    assert_eq!(scene.condition(), KvCondition::EXACT);
}

#[test]
fn a_gap_changes_nothing_until_it_is_filled() {
    let mut scene = Scene::followed(None);
    scene.hear(0, vec![stored(None, &[1])]);
    scene.tell(0, message(2, false, vec![stored(Some(2), &[3])]));
    let gap = because(KvMode::Degraded, KvReason::Doubt(KvUncertainty::Gap));
    assert_eq!((scene.owned(), scene.condition()), (vec![1], gap));
    scene.tell(0, message(1, false, vec![stored(Some(1), &[2])]));
    assert_eq!((scene.owned(), scene.condition()), (vec![1, 2], gap));
    scene.tell(0, message(2, false, vec![stored(Some(2), &[3])]));
    scene.tell(0, message(1, false, vec![stored(Some(1), &[2])]));
    assert_eq!(
        (scene.owned(), scene.condition()),
        (vec![1, 2, 3], KvCondition::EXACT)
    );
    let positions = scene.driver.state.kv_positions(Slot(0));
    assert_eq!(positions[0].last, Some((2, 77)));
}

#[test]
fn after_a_loss_leases_count_until_the_cache_is_cleared() {
    let mut scene = Scene::followed(None);
    scene.hear(0, vec![stored(None, &[1, 2])]);
    scene.tell(0, message(9, true, vec![stored(None, &[5])]));
    let lost = because(KvMode::Lease, KvReason::Lost);
    assert_eq!((scene.owned(), scene.condition()), (Vec::new(), lost));
    scene.acquire(1, &[7, 8]);
    scene.release(1);
    scene.next_seq[0] = 10;
    scene.hear(0, vec![stored(None, &[5])]);
    assert_eq!((scene.owned(), scene.condition()), (vec![7, 8], lost));
    scene.hear(0, vec![KvEvent::Cleared, stored(None, &[6])]);
    assert_eq!(
        (scene.owned(), scene.condition()),
        (vec![6], KvCondition::EXACT)
    );
}

#[test]
fn an_unknown_parent_roots_nothing() {
    let mut scene = Scene::followed(None);
    scene.hear(0, vec![stored(Some(40), &[41, 42]), stored(None, &[1])]);
    let unknown = because(KvMode::Degraded, KvReason::UnknownParent);
    assert_eq!((scene.owned(), scene.condition()), (vec![1], unknown));
    scene.hear(0, vec![removed(&[41])]);
    assert_eq!(scene.owned(), [1]);
    scene.hear(0, vec![KvEvent::Cleared]);
    assert_eq!(scene.condition(), KvCondition::EXACT);
}

#[test]
fn an_engine_hash_of_two_blocks_resolves_to_none() {
    let mut scene = Scene::followed(None);
    scene.hear(0, vec![stored(None, &[1, 2])]);
    scene.hear(0, vec![stored(Some(2), &[1])]);
    let condition = because(KvMode::Degraded, KvReason::Contradiction);
    assert_eq!((scene.owned(), scene.condition()), (Vec::new(), condition));
}

#[test]
fn a_new_run_starts_empty_and_an_earlier_one_is_ignored() {
    let mut scene = Scene::followed(None);
    scene.hear(0, vec![stored(None, &[1, 2])]);
    scene.tell_of(2, 0, message(0, false, vec![stored(None, &[3])]));
    scene.tell_of(1, 0, message(1, false, vec![stored(None, &[4])]));
    scene.tell_of(1, 0, KvUpdate::Begin);
    assert_eq!(scene.owned(), [3]);
    scene.tell_of(2, 0, KvUpdate::Current { seq: Some(0) });
    assert_eq!(scene.condition(), KvCondition::EXACT);
    scene.tell_of(2, 0, KvUpdate::Refuse(KvRejection::Models));
    scene.tell_of(2, 0, message(1, false, vec![KvEvent::Cleared]));
    let refused = because(KvMode::Lease, KvReason::Refused(KvRejection::Models));
    assert_eq!((scene.owned(), scene.condition()), (Vec::new(), refused));
    scene.tell_of(3, 0, KvUpdate::Current { seq: None });
    assert_eq!(scene.condition(), KvCondition::EXACT);
}

#[test]
fn messages_out_of_bounds_are_dropped() {
    let mut scene = Scene::followed(None);
    let many: Vec<u64> = (0..=KV_BLOCKS_PER_BATCH_MAX as u64).collect();
    let news = message(0, false, vec![stored(None, &many)]);
    assert_eq!(scene.tell(0, news), 1);
    for rank in 1..KV_RANKS_MAX as u16 {
        assert_eq!(scene.tell(rank, KvUpdate::Begin), 0);
    }
    assert_eq!(scene.tell(KV_RANKS_MAX as u16, KvUpdate::Begin), 1);
    scene.backend.incarnation.0 += 1;
    assert_eq!(scene.tell(0, KvUpdate::Begin), 1);
}
