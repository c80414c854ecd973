//! Measurements through the log: prices and marks are the same on every replica, survive snapshots
//! but not a backend's incarnation, and correct the cache size that an engine reports.

use std::collections::{BTreeMap, BTreeSet};

use crate::common::{Driver, batch, restored, snapshot, spec};
use state::command::{BackendSpec, Command, EngineFacts, Item, LeaseOutcome, Reply};
use state::ids::{BackendRef, BlockHash, Incarnation, Slot};
use state::policy::RoutingSettings;
use state::service::{BackendServiceView, BeliefSample, CapacitySource, ServiceSample};

const BACKEND: BackendRef = BackendRef {
    slot: Slot(0),
    incarnation: Incarnation(1),
};

/// Tokens per block.
const BLOCK_TOKENS: u64 = 16;

fn served(driver: &Driver) -> BackendServiceView {
    *driver.state.view().service().get(Slot(0)).unwrap()
}

fn observe(driver: &mut Driver, facts: EngineFacts) {
    let backend = BACKEND;
    driver.apply(1, batch(vec![Item::ObserveEngine { backend, facts }]));
}

/// Creates a cluster with one backend whose engine reports `told` blocks.
fn cluster(told: Option<u32>, spec: BackendSpec) -> Driver {
    let mut driver = Driver::new();
    driver.apply(1, Command::PutBackend(spec));
    let facts = EngineFacts {
        capacity_blocks: told,
        started_at_s: Some(100),
        ..EngineFacts::default()
    };
    observe(&mut driver, facts);
    driver
}

/// A cache of chains like an engine's: the least recently used block goes first, and the deepest
/// first within one chain.
struct Cache {
    capacity: usize,
    used: BTreeMap<BlockHash, (u64, usize)>,
    order: BTreeSet<(u64, usize, BlockHash)>,
    clock: u64,
}

impl Cache {
    fn new(capacity: usize) -> Self {
        Self {
            capacity,
            used: BTreeMap::new(),
            order: BTreeSet::new(),
            clock: 0,
        }
    }

    /// Runs a prompt of these blocks and returns how many were cached.
    fn run(&mut self, chain: &[BlockHash]) -> usize {
        let is_there = |block: &&BlockHash| self.used.contains_key(*block);
        let cached = chain.iter().take_while(is_there).count();
        self.clock += 1;
        for (depth, &block) in chain.iter().enumerate() {
            if let Some((clock, depth)) = self.used.insert(block, (self.clock, depth)) {
                self.order.remove(&(clock, usize::MAX - depth, block));
            }
            self.order.insert((self.clock, usize::MAX - depth, block));
        }
        while self.used.len() > self.capacity {
            let (_, _, block) = self.order.pop_first().unwrap();
            self.used.remove(&block);
        }
        cached
    }
}

fn chain(conversation: u64, blocks: u64) -> Vec<BlockHash> {
    let block = |at: u64| (conversation << 32 | at).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..blocks).map(block).map(BlockHash).collect()
}

/// Sends requests of many conversations to an engine that really holds `holds` blocks, and reports
/// predicted and actual cache hits to the log.
fn drive(driver: &mut Driver, holds: usize, requests: u64) {
    drive_on(driver, &mut Cache::new(holds), requests, Reported::Sums);
}

/// Form in which predictions and hits are reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reported {
    /// Sums of predicted and cached tokens ([`ServiceSample`]).
    Sums,
    /// Counts of correct and failed predictions ([`BeliefSample`]).
    Beliefs,
    /// Like `Beliefs`, but the engine finds only this percentage of the cached blocks.
    Less(u64),
}

/// Sends further requests like [`drive`], to an engine with the given cache, and reports them as
/// `told`.
fn drive_on(driver: &mut Driver, cache: &mut Cache, requests: u64, told: Reported) {
    let mut draw = 1_u64 + cache.clock;
    let mut sample = ServiceSample::empty(BACKEND);
    let mut belief = nothing_believed();
    for request in 0..requests {
        draw = draw
            .wrapping_mul(0x5851_f42d_4c95_7f2d)
            .wrapping_add(0x1405_7b7e_f767_814f);
        // Some conversations are requested more often than others.
        let (a, b) = ((draw >> 33) % 80, (draw >> 45) % 80);
        let chain = chain(a.min(b), 40);
        let mut matched = 0;
        driver
            .state
            .view()
            .blocks
            .match_prefix(&chain, |_, blocks| matched = blocks);
        let attempt = u32::try_from(request).unwrap();
        driver.apply(
            1,
            batch(vec![
                Item::Acquire {
                    attempt,
                    backend: BACKEND,
                    tip: None,
                    new: chain.clone(),
                },
                Item::Release {
                    attempt,
                    outcome: LeaseOutcome::Kept,
                },
            ]),
        );
        let mut cached = cache.run(&chain) as u64;
        if let Reported::Less(percent) = told {
            cached = cached * percent / 100;
        }
        sample.predicted += 1;
        sample.predicted_prompt_tokens += 40 * BLOCK_TOKENS;
        sample.predicted_cached_tokens += u64::from(matched) * BLOCK_TOKENS;
        sample.cached_tokens += cached * BLOCK_TOKENS;
        judge(&mut belief, matched.into(), cached);
        if request % 8 == 7 {
            let item = match told {
                Reported::Sums => Item::ObserveService(Box::new(sample)),
                Reported::Beliefs | Reported::Less(_) => Item::ObserveBelief(belief),
            };
            driver.apply(1, batch(vec![item]));
            sample = ServiceSample::empty(BACKEND);
            belief = nothing_believed();
        }
    }
    assert_eq!(driver.state.check(), Ok(()));
}

fn nothing_believed() -> BeliefSample {
    BeliefSample {
        backend: BACKEND,
        held: 0,
        lost: 0,
        found: 0,
        computed_blocks: 0,
    }
}

/// Counts a prediction as replicas do.
fn judge(belief: &mut BeliefSample, predicted: u64, cached: u64) {
    belief.computed_blocks += 40 - cached;
    if predicted.max(cached) < 4 {
    } else if cached * 2 < predicted {
        belief.lost += 1;
    } else if predicted * 2 < cached {
        belief.found += 1;
    } else {
        belief.held += 1;
    }
}

fn off_beyond(permille: u32) -> Command {
    Command::PutRouting(RoutingSettings {
        prediction_off_permille: permille,
        ..RoutingSettings::default()
    })
}

#[test]
fn an_overreported_capacity_is_corrected_down() {
    let mut driver = cluster(Some(2000), spec("a", 1, None));
    driver.apply(1, off_beyond(60));
    drive(&mut driver, 1000, 6000);
    let served = served(&driver);
    let capacity = served.capacity_blocks.unwrap();
    assert!((1000..=1250).contains(&capacity), "{served:?}");
    let accuracy = served.accuracy.unwrap();
    assert!(accuracy.error_permille < 60, "{accuracy:?}");
    assert!(driver.state.owned_blocks(Slot(0)) <= u64::from(capacity));
}

#[test]
fn an_underreported_capacity_is_corrected_up() {
    let mut driver = cluster(Some(1000), spec("a", 1, None));
    driver.apply(1, off_beyond(60));
    drive(&mut driver, 2000, 6000);
    let served = served(&driver);
    assert!(
        (1500..=2000).contains(&served.capacity_blocks.unwrap()),
        "{served:?}"
    );
    assert!(served.accuracy.unwrap().error_permille > -60, "{served:?}");
}

#[test]
fn a_correctly_reported_capacity_is_not_changed() {
    let mut driver = cluster(Some(1000), spec("a", 1, None));
    drive(&mut driver, 1000, 3000);
    let served = served(&driver);
    let accuracy = served.accuracy.unwrap();
    assert_eq!(served.capacity_blocks, Some(1000));
    assert!(
        !accuracy.is_off && accuracy.error_permille.abs() < 20,
        "{accuracy:?}"
    );
}

#[test]
fn a_slightly_wrong_capacity_is_corrected_early() {
    for (told, holds) in [
        (1100, 1000),
        (900, 1000),
        (1150, 1000),
        (1000, 1000),
        (2000, 2000),
    ] {
        let mut driver = cluster(Some(told), spec("a", 1, None));
        let mut cache = Cache::new(holds);
        drive_on(&mut driver, &mut cache, 2000, Reported::Beliefs);
        let capacity = served(&driver).capacity_blocks.unwrap();
        let off = u64::from(capacity).abs_diff(holds as u64) * 1000 / holds as u64;
        assert!(off <= 35, "{told} was told of {holds}: {capacity}");
        if told as usize == holds {
            assert_eq!(capacity, told, "the truth is left alone");
        }
        let restored = restored(&snapshot(&driver.state));
        assert_eq!(restored.digest(), driver.state.digest());
        let begun = EngineFacts {
            started_at_s: Some(200),
            ..EngineFacts::default()
        };
        observe(&mut driver, begun);
        let facts = EngineFacts {
            capacity_blocks: Some(500),
            ..EngineFacts::default()
        };
        let backend = BackendRef {
            incarnation: Incarnation(2),
            ..BACKEND
        };
        driver.apply(1, batch(vec![Item::ObserveEngine { backend, facts }]));
        assert_eq!(served(&driver).capacity_blocks, Some(500), "another life");
        assert_eq!(driver.state.check(), Ok(()));
    }
}

#[test]
fn unrelated_misses_do_not_move_the_capacity() {
    let mut driver = cluster(Some(1000), spec("a", 1, None));
    let mut cache = Cache::new(1000);
    let mut before = 1000;
    let mut is_left_alone = |driver: &Driver| {
        let capacity = served(driver).capacity_blocks.unwrap();
        let step = capacity.abs_diff(before);
        assert!(step <= before / 32 + 1, "{before} became {capacity}");
        before = capacity;
    };
    drive_on(&mut driver, &mut cache, 1000, Reported::Beliefs);
    // The engine loses its cache and does not report it.
    for _ in 0..4 {
        let clock = cache.clock;
        cache = Cache::new(1000);
        cache.clock = clock;
        drive_on(&mut driver, &mut cache, 400, Reported::Beliefs);
        is_left_alone(&driver);
    }
    // The engine tokenises differently.
    for percent in [0, 30, 45, 60, 90] {
        drive_on(&mut driver, &mut cache, 2000, Reported::Less(percent));
        is_left_alone(&driver);
    }
    assert!((900..=1100).contains(&before), "{before}");
}

#[test]
fn a_configured_capacity_is_not_corrected() {
    let mut driver = cluster(None, spec("a", 1, Some(2000)));
    driver.apply(1, off_beyond(60));
    drive(&mut driver, 1000, 6000);
    let served = served(&driver);
    assert_eq!(served.capacity_blocks, Some(2000));
    assert!(served.accuracy.unwrap().is_off, "but it is marked");
}

/// Returns the share of wrongly predicted prompt tokens, in thousandths, and the final assumed
/// capacity of an engine that holds `holds` blocks and does not report its capacity.
fn error_of_an_untold_capacity(holds: usize) -> (i32, Option<u32>) {
    let mut driver = cluster(None, spec("a", 1, None));
    drive(&mut driver, holds, 4000);
    let served = served(&driver);
    assert_eq!(served.capacity_from, CapacitySource::Assumed);
    let copy = restored(&snapshot(&driver.state));
    assert_eq!(copy.digest(), driver.state.digest());
    assert_eq!(copy.view().service().get(Slot(0)), Some(&served));
    let error = served.accuracy.unwrap().error_permille;
    (error, served.capacity_blocks)
}

#[test]
fn an_unreported_capacity_is_learned_from_cache_hits() {
    for holds in [200, 600, 1200, 2400] {
        let (error, capacity) = error_of_an_untold_capacity(holds);
        assert!(error.abs() <= 50, "{holds} blocks: {error} permille");
        let capacity = capacity.unwrap() as usize;
        let range = holds * 3 / 4..=holds * 5 / 4;
        assert!(range.contains(&capacity), "{holds} blocks: {capacity}");
    }
}

#[test]
fn unreported_capacities_share_the_assumed_total() {
    let mut driver = cluster(None, spec("a", 1, None));
    let assumed = |driver: &Driver, slot| {
        let view = driver.state.view();
        let served = *view.service().get(Slot(slot)).unwrap();
        served.capacity_blocks
    };
    assert_eq!(assumed(&driver, 0), Some(100_000));
    for (number, name) in ["b", "c", "d"].into_iter().enumerate() {
        let port = u16::try_from(number + 2).unwrap();
        driver.apply(1, Command::PutBackend(spec(name, port, None)));
    }
    let shared: Vec<_> = (0..4).map(|slot| assumed(&driver, slot)).collect();
    assert_eq!(shared, [Some(50_000); 4]);
    driver.apply(1, Command::PutBackend(spec("b", 2, Some(7))));
    let name = "c".to_owned();
    driver.apply(1, Command::DeleteBackend { name });
    let shared: Vec<_> = [0, 1, 3].map(|slot| assumed(&driver, slot)).into();
    assert_eq!(shared, [Some(100_000), Some(7), Some(100_000)]);
    for (blocks, total, share) in [(60, 100, 50), (30, 100, 30), (5, 1, 1)] {
        driver.apply(
            1,
            Command::PutRouting(RoutingSettings {
                assumed_blocks: blocks,
                assumed_blocks_total: total,
                ..RoutingSettings::default()
            }),
        );
        let shared: Vec<_> = [0, 1, 3].map(|slot| assumed(&driver, slot)).into();
        assert_eq!(shared, [Some(share), Some(7), Some(share)]);
    }
    assert_eq!(driver.state.check(), Ok(()));
}

/// Returns a sample with a value in every field.
fn sample(backend: BackendRef) -> ServiceSample {
    ServiceSample {
        ended: 8,
        prompt_tokens: 8000,
        output_tokens: 800,
        first_tokens: 64,
        first_token_us: 6_400_000,
        prefill_tokens: 64_000,
        first_running: 128,
        gaps: 800,
        gap_us: 16_000_000,
        gap_running: 1600,
        predicted: 8,
        predicted_prompt_tokens: 8000,
        predicted_cached_tokens: 4000,
        cached_tokens: 4000,
        ..ServiceSample::empty(backend)
    }
}

#[test]
fn learned_measurements_survive_snapshots_but_not_the_engine() {
    let mut driver = cluster(Some(100), spec("a", 1, None));
    let empty = driver.state.digest();
    driver.apply(
        1,
        batch(vec![Item::ObserveService(Box::new(sample(BACKEND)))]),
    );
    assert_ne!(driver.state.digest(), empty);
    let learnt = served(&driver);
    assert!(learnt.learnt.unwrap().trusted().is_some());
    let copy = restored(&snapshot(&driver.state));
    assert_eq!(copy.check(), Ok(()));
    assert_eq!(copy.digest(), driver.state.digest());
    assert_eq!(copy.view().service().get(Slot(0)), Some(&learnt));
    observe(
        &mut driver,
        EngineFacts {
            started_at_s: Some(200),
            ..EngineFacts::default()
        },
    );
    assert_eq!(served(&driver).learnt, None);
    assert_eq!(served(&driver).backend.incarnation, Incarnation(2));
    let late = driver.apply(
        1,
        batch(vec![Item::ObserveService(Box::new(sample(BACKEND)))]),
    );
    let Reply::Batch(reply) = late else {
        panic!("{late:?}");
    };
    assert_eq!(reply.dropped, 1, "a report of the earlier life");
    driver.apply(
        1,
        Command::DeleteBackend {
            name: "a".to_owned(),
        },
    );
    assert_eq!(driver.state.view().service().get(Slot(0)), None);
    assert_eq!(driver.state.check(), Ok(()));
}

#[test]
fn equal_report_orders_give_equal_states() {
    let reports = [(1, 30_000_u64), (2, 90_000), (3, 60_000), (1, 45_000)];
    let run = || {
        let mut driver = cluster(Some(100), spec("a", 1, None));
        for (replica, us) in reports {
            let report = ServiceSample {
                first_token_us: 64 * us,
                ..sample(BACKEND)
            };
            driver.apply(replica, batch(vec![Item::ObserveService(Box::new(report))]));
        }
        driver.state.digest()
    };
    assert_eq!(run(), run());
}

#[test]
fn an_untouched_release_keeps_the_eviction_order() {
    let mut driver = cluster(None, spec("a", 1, Some(8)));
    let mut attempt = 0;
    let mut send = |driver: &mut Driver, conversation: u64, outcome: LeaseOutcome| {
        attempt += 1;
        let acquire = Item::Acquire {
            attempt,
            backend: BACKEND,
            tip: None,
            new: chain(conversation, 4),
        };
        let release = Item::Release { attempt, outcome };
        driver.apply(1, batch(vec![acquire, release]));
        assert_eq!(driver.state.check(), Ok(()));
    };
    let owns = |driver: &Driver, conversation: u64| {
        driver
            .state
            .view()
            .blocks
            .owns(Slot(0), chain(conversation, 4)[3])
    };
    send(&mut driver, 1, LeaseOutcome::Kept);
    send(&mut driver, 2, LeaseOutcome::KeptUntouched);
    // Requests the first again: with a touch the second would be evicted, without it the first is.
    send(&mut driver, 1, LeaseOutcome::KeptUntouched);
    send(&mut driver, 3, LeaseOutcome::KeptUntouched);
    assert_eq!([1, 2, 3].map(|it| owns(&driver, it)), [false, true, true]);
    send(&mut driver, 2, LeaseOutcome::Kept);
    send(&mut driver, 4, LeaseOutcome::Kept);
    assert_eq!([2, 3, 4].map(|it| owns(&driver, it)), [true, false, true]);
    let copy = restored(&snapshot(&driver.state));
    assert_eq!(copy.digest(), driver.state.digest());
}
