//! Models of the overlay: a replica finds the blocks that it has routed, whatever other threads add
//! and remove meanwhile.

use std::sync::Arc;

use loom::thread;
use state::ids::{BackendRef, BlockHash, Incarnation, Slot};

use crate::overlay::{BlockRun, Overlay};
use crate::{ModelRun, explore};

pub(crate) const ALL: &[ModelRun] = &[
    (
        "overlay: a run that was added is found until it is removed",
        found,
    ),
    (
        "overlay: what is added and removed leaves nothing",
        nothing_leaks,
    ),
];

const BACKEND: BackendRef = BackendRef {
    slot: Slot(0),
    incarnation: Incarnation(1),
};

fn run(blocks: &[u64]) -> BlockRun {
    let chain: Arc<[BlockHash]> = blocks.iter().map(|block| BlockHash(*block)).collect();
    let length = chain.len();
    BlockRun::new(chain, 0..length)
}

fn matched(overlay: &Overlay, chain: &[u64]) -> u32 {
    let chain: Vec<_> = chain.iter().map(|block| BlockHash(*block)).collect();
    let mut matched = 0;
    overlay.extend(&chain, [(BACKEND, &mut matched)].into_iter());
    matched
}

fn found() {
    explore(|| {
        let overlay = Arc::new(Overlay::default());
        let other = thread::spawn({
            let overlay = Arc::clone(&overlay);
            move || {
                let run = run(&[7, 8]);
                overlay.add(BACKEND, &run);
                assert_eq!(matched(&overlay, &[7, 8, 9]), 2);
                overlay.remove(BACKEND, &run);
                assert_eq!(matched(&overlay, &[7, 8, 9]), 0);
            }
        });
        let own = run(&[1, 2, 3]);
        overlay.add(BACKEND, &own);
        assert_eq!(matched(&overlay, &[1, 2, 3]), 3);
        other.join().expect("the other does not panic");
        assert_eq!(matched(&overlay, &[1, 2, 3]), 3);
    });
}

fn nothing_leaks() {
    explore(|| {
        let overlay = Arc::new(Overlay::default());
        let same = run(&[1, 2]);
        let others = [(), ()].map(|()| {
            let (overlay, run) = (Arc::clone(&overlay), same.clone());
            thread::spawn(move || {
                overlay.add(BACKEND, &run);
                overlay.remove(BACKEND, &run);
            })
        });
        for other in others {
            other.join().expect("the other does not panic");
        }
        assert_eq!(matched(&overlay, &[1, 2]), 0);
        assert!(overlay.is_empty());
    });
}
