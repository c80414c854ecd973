//! Engines of several data-parallel ranks: each rank is a backend that follows its engine.

use crate::common::{Driver, batch, block, chain, restored, snapshot, spec};
use proptest::prelude::*;
use state::command::{BackendSpec, Command, EngineFacts, Item, LeaseOutcome, Rejection, Reply};
use state::ids::{BackendRef, BlockHash, EngineHash, Slot};
use state::kv_events::{KvBatch, KvEvent, KvMessage, KvMode, KvUpdate};
use state::{Backend, RouterState};

fn ranks(driver: &Driver, id: &str, ranks: u16) -> Command {
    let backend = driver.state.backend(id).expect("it is registered").handle;
    Command::SetRanks { backend, ranks }
}

/// Creates a cluster with an engine `a` of `count` ranks.
fn of_ranks(count: u16) -> Driver {
    let mut driver = Driver::new();
    driver.apply(1, Command::PutBackend(spec("a", 1, None)));
    let set = ranks(&driver, "a", count);
    assert_eq!(driver.apply(1, set), Reply::Applied);
    driver
}

fn ids(state: &RouterState) -> Vec<String> {
    assert_eq!(state.check(), Ok(()));
    state.backends().map(|it| it.spec.id.clone()).collect()
}

fn handle(state: &RouterState, id: &str) -> BackendRef {
    let mut backends = state.backends();
    backends
        .find(|it| it.spec.id == id)
        .expect("it is registered")
        .handle
}

fn acquire(attempt: u32, backend: BackendRef, path: &[u8]) -> Item {
    Item::Acquire {
        attempt,
        backend,
        tip: None,
        new: chain(path),
    }
}

fn kept(attempt: u32) -> Item {
    Item::Release {
        attempt,
        outcome: LeaseOutcome::Kept,
    }
}

/// Returns the reports of a run of rank `rank` whose only message stores the blocks of `path`.
fn stored(backend: BackendRef, rank: u16, path: &[u8]) -> Vec<Item> {
    let blocks: Vec<BlockHash> = chain(path);
    let blocks = blocks.into_iter().map(|it| (EngineHash(it.0 ^ 7), it));
    let message = KvMessage {
        seq: 0,
        mark: 1,
        part: 0,
        is_last: true,
        is_after_loss: false,
        events: vec![KvEvent::Stored {
            parent: None,
            blocks: blocks.collect(),
        }],
    };
    let news = [
        KvUpdate::Begin,
        KvUpdate::Message(message),
        KvUpdate::Current { seq: Some(0) },
    ];
    let item = |news| {
        Item::KvEvents(KvBatch {
            backend,
            rank,
            publisher: 1,
            news,
        })
    };
    news.map(item).into()
}

#[test]
fn each_rank_is_a_backend_and_follows_its_engine() {
    let mut driver = of_ranks(3);
    assert_eq!(ids(&driver.state), ["a", "a@1", "a@2"]);
    let registry = driver.state.view().registry();
    let rank_of = |backend: &Backend| registry.rank(backend);
    let told: Vec<_> = registry.backends.iter().map(rank_of).collect();
    assert_eq!(told, [Some(0), Some(1), Some(2)]);

    let labelled = BackendSpec {
        labels: [("zone".to_owned(), "x".to_owned())].into(),
        ..spec("a", 1, Some(9))
    };
    driver.apply(1, Command::PutBackend(labelled));
    driver.apply(
        1,
        Command::SetDraining {
            name: "a".to_owned(),
            draining: true,
            moves_streams: false,
        },
    );
    let facts = EngineFacts {
        models: Some(vec!["m".to_owned()]),
        capacity_blocks: None,
        started_at_s: Some(5),
        ..EngineFacts::default()
    };
    let backend = handle(&driver.state, "a");
    driver.apply(1, batch(vec![Item::ObserveEngine { backend, facts }]));
    for backend in driver.state.backends() {
        assert!(backend.draining && backend.serves("m") && !backend.serves("n"));
        assert_eq!(backend.spec.labels["zone"], "x");
        assert_eq!(backend.capacity_blocks(), Some(9));
    }

    // Fewer ranks, one rank, and the ranks of another engine at the same id.
    let set = ranks(&driver, "a", 2);
    driver.apply(1, set);
    assert_eq!(ids(&driver.state), ["a", "a@1"]);
    driver.apply(1, Command::PutBackend(spec("b", 2, None)));
    driver.apply(1, Command::PutBackend(spec("a", 3, None)));
    assert_eq!(ids(&driver.state), ["a", "b"]);
    let set = ranks(&driver, "a", 4);
    driver.apply(1, set);
    assert_eq!(ids(&driver.state), ["a", "a@1", "b", "a@2", "a@3"]);
    let name = "a".to_owned();
    driver.apply(1, Command::DeleteBackend { name });
    assert_eq!(ids(&driver.state), ["b"]);
}

#[test]
fn a_rank_cannot_be_changed_by_itself() {
    let mut driver = of_ranks(2);
    let name = || "a@1".to_owned();
    let draining = true;
    for command in [
        Command::DeleteBackend { name: name() },
        Command::SetDraining {
            name: name(),
            draining,
            moves_streams: false,
        },
        Command::PutBackend(spec("a@1", 1, None)),
    ] {
        let reply = driver.apply(1, command.clone());
        assert!(
            matches!(reply, Reply::Rejected(_)),
            "{command:?}: {reply:?}"
        );
    }
    let rank = handle(&driver.state, "a@1");
    for (backend, ranks) in [(rank, 2), (handle(&driver.state, "a"), 0)] {
        let reply = driver.apply(1, Command::SetRanks { backend, ranks });
        assert!(matches!(reply, Reply::Rejected(_)), "{ranks}: {reply:?}");
    }
    assert_eq!(ids(&driver.state), ["a", "a@1"]);
}

#[test]
fn a_full_registry_refuses_ranks() {
    let mut driver = Driver::new();
    for number in 0..1022 {
        driver.apply(1, Command::PutBackend(spec(&number.to_string(), 1, None)));
    }
    let set = ranks(&driver, "7", 4);
    let full = Reply::Rejected(Rejection::TooManyBackends);
    assert_eq!(driver.apply(1, set), full);
    let set = ranks(&driver, "7", 3);
    assert_eq!(driver.apply(1, set), Reply::Applied);
    assert_eq!(ids(&driver.state).len(), 1024);
}

#[test]
fn a_rank_owns_its_blocks_until_the_engine_restarts() {
    let mut driver = of_ranks(2);
    let started = |driver: &Driver, at| Item::ObserveEngine {
        backend: handle(&driver.state, "a"),
        facts: EngineFacts {
            started_at_s: Some(at),
            ..EngineFacts::default()
        },
    };
    let first = started(&driver, 5);
    let [engine, rank] = ["a", "a@1"].map(|id| handle(&driver.state, id));
    let items = vec![
        first,
        acquire(0, engine, &[1, 2]),
        acquire(1, rank, &[1, 3, 4]),
        kept(0),
        kept(1),
    ];
    driver.apply(1, batch(items));
    let owned = |driver: &Driver| [0, 1].map(|slot| driver.state.owned_blocks(Slot(slot)));
    assert_eq!(owned(&driver), [2, 3]);
    let view = driver.state.view();
    let mut matched = Vec::new();
    let path = chain(&[1, 3, 4, 5]);
    view.blocks
        .match_prefix(&path, |slot, blocks| matched.push((slot.0, blocks)));
    assert_eq!(matched, [(0, 1), (1, 3)]);

    let again = started(&driver, 9);
    driver.apply(1, batch(vec![again]));
    assert_eq!(owned(&driver), [0, 0]);
    assert_ne!(handle(&driver.state, "a@1"), rank, "a new life");
}

#[test]
fn events_of_each_rank_apply_to_its_slot() {
    let mut driver = Driver::new();
    let put = BackendSpec {
        kv_events: Some("auto".to_owned()),
        ..spec("a", 1, None)
    };
    driver.apply(1, Command::PutBackend(put));
    // Until its ranks are known, an engine has one slot for all.
    let engine = handle(&driver.state, "a");
    driver.apply(1, batch(stored(engine, 1, &[1, 2])));
    assert_eq!(driver.state.owned_blocks(engine.slot), 2);
    let set = ranks(&driver, "a", 2);
    driver.apply(1, set);
    let engine = handle(&driver.state, "a");
    assert_eq!(driver.state.owned_blocks(engine.slot), 0);

    driver.apply(1, batch(stored(engine, 0, &[1, 2])));
    driver.apply(1, batch(stored(engine, 1, &[1, 3, 4])));
    let rank = handle(&driver.state, "a@1");
    let reply = driver.apply(1, batch(stored(engine, 2, &[9])));
    let Reply::Batch(reply) = reply else {
        panic!("{reply:?}")
    };
    assert_eq!(reply.dropped, 3, "it has no such rank");
    let state = &driver.state;
    assert_eq!(state.check(), Ok(()));
    for (backend, own, blocks) in [(engine, 0, 2), (rank, 1, 3)] {
        assert_eq!(state.owned_blocks(backend.slot), blocks);
        let status = state.kv_status(backend.slot).unwrap();
        assert_eq!(status.condition.mode, KvMode::Exact);
        assert_eq!((status.ranks.len(), status.ranks[0].rank), (1, own));
    }
    // The reader requests the positions of all ranks by the engine.
    let positions: Vec<u16> = (state.kv_positions(engine.slot).iter())
        .map(|it| it.rank)
        .collect();
    assert_eq!((positions, state.kv_ranks(engine).len()), (vec![0, 1], 2));
    let last = block(&[1, 3, 4]);
    let found = |rank| state.kv_router_hash(engine.slot, rank, EngineHash(last.0 ^ 7));
    assert_eq!((found(0), found(1), found(2)), (None, Some(last), None));
    assert_eq!(state.rank_slot(engine.slot, 1), Some(rank.slot));
}

#[test]
fn ranks_survive_a_snapshot() {
    let mut driver = of_ranks(3);
    let rank = handle(&driver.state, "a@2");
    driver.apply(1, batch(vec![acquire(0, rank, &[1, 2])]));
    let bytes = snapshot(&driver.state);
    let mut copy = restored(&bytes);
    assert_eq!(copy.digest(), driver.state.digest());
    assert_eq!(snapshot(&copy), bytes);
    assert_eq!(ids(&copy), ["a", "a@1", "a@2"]);
    assert_eq!(
        copy.view().registry().ranks,
        driver.state.view().registry().ranks
    );
    let set = ranks(&driver, "a", 1);
    driver.apply(1, set);
    copy = restored(&snapshot(&driver.state));
    assert_eq!(ids(&copy), ["a"]);
}

proptest! {
    /// A rank is equivalent to a separate backend: the same requests leave the same blocks, whether
    /// they went to ranks of one engine or to separate engines.
    #[test]
    fn ranks_own_the_same_blocks_as_separate_engines(
        requests in prop::collection::vec((0_usize..3, prop::collection::vec(0_u8..3, 1..5)), 0..40)
    ) {
        let mut ranks = of_ranks(3);
        let mut apart = Driver::new();
        for (id, port) in [("a", 1), ("b", 2), ("c", 3)] {
            apart.apply(1, Command::PutBackend(spec(id, port, None)));
        }
        let rank_handles = ["a", "a@1", "a@2"].map(|id| handle(&ranks.state, id));
        let engines = ["a", "b", "c"].map(|id| handle(&apart.state, id));
        for (number, (to, path)) in (0..).zip(&requests) {
            for (driver, backend) in [(&mut ranks, rank_handles[*to]), (&mut apart, engines[*to])] {
                driver.apply(1, batch(vec![acquire(number, backend, path), kept(number)]));
            }
        }
        prop_assert_eq!(ranks.state.check(), Ok(()));
        for (rank, engine) in rank_handles.iter().zip(&engines) {
            let owned = |state: &RouterState, slot| {
                let mut owned: Vec<BlockHash> = state.owned(slot).map(|it| it.block).collect();
                owned.sort_unstable();
                owned
            };
            prop_assert_eq!(owned(&ranks.state, rank.slot), owned(&apart.state, engine.slot));
        }
    }
}
