//! Predicted evictions of an engine for requests in progress, as scripts.

use state::command::{EngineFacts, Item};
use state::ids::BlockHash;

use super::scenes::{Scene, hashes, removed, stored};
use crate::common::{restored, snapshot};

impl Scene {
    /// Creates a followed backend whose engine has `blocks` blocks, one of which no request can
    /// use.
    fn with_blocks(blocks: u32) -> Self {
        let mut scene = Self::followed(None);
        let facts = EngineFacts {
            capacity_blocks: Some(blocks),
            ..EngineFacts::default()
        };
        let backend = scene.backend;
        scene.apply(Item::ObserveEngine { backend, facts });
        scene
    }

    /// Starts, computes and ends a request for these blocks.
    fn serve(&mut self, attempt: u32, names: &[u64]) {
        self.acquire(attempt, names);
        self.hear(0, vec![stored(None, names)]);
        self.release(attempt);
    }

    /// Returns how much is left of each chain, given requests and new blocks in progress.
    fn left<const N: usize>(&self, under_way: (u32, usize), chains: [&[u64]; N]) -> [u32; N] {
        let view = self.driver.state.view();
        let evictions = view.evictions();
        let coming = evictions.get(self.backend).expect("its size is known");
        let used = BlockHash(13);
        chains.map(|names| {
            let chain = hashes(names);
            coming.left(&chain, chain.len() as u32, under_way, |block| block == used)
        })
    }
}

const A: &[u64] = &[1, 2, 3];
const B: &[u64] = &[1, 2, 4];
const C: &[u64] = &[11, 12];

#[test]
fn evictions_by_requests_in_flight_are_predicted() {
    let mut scene = Scene::with_blocks(7);
    scene.serve(1, A);
    scene.acquire(2, B);
    scene.hear(0, vec![stored(Some(2), &[4])]);
    scene.release(2);
    scene.serve(3, C);
    // Six of six blocks are used; each request takes one for its last, partial block.
    assert_eq!(scene.left((0, 0), [A, B, C]), [3, 3, 2]);
    assert_eq!(scene.left((1, 0), [A, B, C]), [2, 3, 2]);
    // A shared block has the age of its last use.
    assert_eq!(scene.left((1, 1), [A, B, C]), [2, 2, 2]);
    assert_eq!(scene.left((1, 3), [A, B, C]), [0, 0, 2]);
    assert_eq!(scene.left((2, 9), [A, B, C]), [0, 0, 0]);
    // A request of the log whose blocks the engine has not stored yet.
    scene.acquire(4, &[21, 22]);
    assert_eq!(scene.left((1, 0), [A, B, C]), [1, 1, 2]);
    // Its events confirm the prediction.
    let events = vec![removed(&[3, 4, 2]), stored(None, &[21, 22])];
    scene.hear(0, events);
    assert_eq!(scene.owned(), [1, 11, 12, 21, 22]);
    assert_eq!(scene.left((1, 0), [C, &[1], &[21, 22]]), [2, 1, 2]);
    // Blocks that a request uses stay; others are evicted.
    assert_eq!(scene.left((3, 0), [C, &[1], &[21, 22]]), [1, 0, 2]);
}

#[test]
fn blocks_in_use_are_not_predicted_evicted() {
    let mut scene = Scene::with_blocks(5);
    scene.serve(1, &[13]);
    scene.serve(2, &[14]);
    scene.serve(3, &[15]);
    scene.serve(4, &[16]);
    let chains: [&[u64]; 4] = [&[13], &[14], &[15], &[16]];
    assert_eq!(scene.left((2, 0), chains), [1, 0, 0, 1]);
    scene.acquire(5, &[14]);
    assert_eq!(scene.left((2, 0), chains), [1, 1, 0, 0]);
}

#[test]
fn a_block_without_a_lease_is_as_old_as_its_parent() {
    let mut scene = Scene::with_blocks(8);
    // Blocks of a response, stored while its request runs and after the router learned of its end.
    scene.acquire(1, &[1, 2]);
    scene.hear(0, vec![stored(None, &[1, 2])]);
    scene.hear(0, vec![stored(Some(2), &[3])]);
    scene.serve(2, C);
    assert_eq!(scene.left((2, 0), [A, C]), [3, 2], "it runs, there is room");
    assert_eq!(scene.left((3, 0), [A, C]), [3, 1], "the other one goes");
    scene.release(1);
    scene.hear(0, vec![stored(Some(3), &[4])]);
    let whole: &[u64] = &[1, 2, 3, 4];
    assert_eq!(scene.left((2, 0), [whole, C]), [4, 1], "it ended later");
    // Blocks that bypassed the router count as released when they were stored.
    scene.hear(0, vec![stored(None, &[31])]);
    assert_eq!(scene.left((2, 0), [whole, C, &[31]]), [4, 0, 1]);
    assert_eq!(scene.left((7, 0), [whole, C, &[31]]), [0, 0, 0]);
}

#[test]
fn a_restored_replica_predicts_the_same_evictions() {
    let mut scene = Scene::with_blocks(7);
    scene.serve(1, A);
    let (view, copy) = (
        scene.driver.state.view(),
        restored(&snapshot(&scene.driver.state)),
    );
    assert!(view.evictions().get(scene.backend).is_some());
    assert_eq!(**copy.view().evictions(), **view.evictions());
}

#[test]
fn no_eviction_is_predicted_for_an_engine_of_unknown_size() {
    let mut scene = Scene::followed(Some(4));
    scene.serve(1, A);
    let view = scene.driver.state.view();
    assert_eq!(view.evictions().get(scene.backend), None);
}
