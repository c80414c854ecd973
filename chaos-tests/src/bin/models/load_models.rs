//! The load table: every count that is added is taken out again, and a waiter for room is woken.

use std::sync::Arc;

use loom::future::block_on;
use loom::thread;
use state::ids::{BackendRef, Incarnation, ReplicaId, Slot};
use tokio::time::Instant;

use crate::load::{Load, LoadTable};
use crate::{ModelRun, explore};

pub(crate) const ALL: &[ModelRun] = &[
    (
        "load: requests at two lives of a slot are counted apart",
        two_lives,
    ),
    ("load: who waits for room is woken when there is", woken),
    (
        "load: a reader sees one report of a peer or the next",
        reports,
    ),
];

fn life(incarnation: u32) -> BackendRef {
    BackendRef {
        slot: Slot(0),
        incarnation: Incarnation(incarnation),
    }
}

fn two_lives() {
    explore(|| {
        let table = Arc::new(LoadTable::of_slots(1));
        let old = table.begin(life(1), 5);
        let other = thread::spawn({
            let table = Arc::clone(&table);
            move || {
                let underway = table.begin(life(2), 7);
                let here = table.here(life(2));
                assert_eq!((here.running, here.pending_prefill_tokens), (1, 7));
                drop(underway);
            }
        });
        let late = table.begin(life(1), 3);
        drop(old);
        assert!(table.here(life(1)).running <= 1);
        drop(late);
        other.join().expect("the other does not panic");
        assert_eq!(table.here(life(1)), Load::default());
        assert_eq!(table.here(life(2)), Load::default());
        assert_eq!(table.ended(), 3);
    });
}

fn woken() {
    explore(|| {
        let table = Arc::new(LoadTable::of_slots(1));
        let request = table.begin(life(1), 5);
        let end = thread::spawn(move || drop(request));
        // As the loop does that serves the queues: looks, then waits.
        block_on(async {
            while table.here(life(1)).running > 0 {
                table.less().notified().await;
            }
        });
        end.join().expect("the other does not panic");
    });
}

fn reports() {
    explore(|| {
        let now = Instant::now();
        let (here, peer) = (Arc::new(LoadTable::of_slots(1)), LoadTable::of_slots(1));
        let merge = move |table: &LoadTable, from: u8, report: &[u8]| {
            let merged = table.merge_report(ReplicaId(from), report, now);
            merged.expect("it is a report");
        };
        let _one = peer.begin(life(1), 1);
        let first = peer.local_report();
        let _two = peer.begin(life(1), 1);
        let second = peer.local_report();
        merge(&here, 2, &first);
        let other = thread::spawn({
            let here = Arc::clone(&here);
            move || merge(&here, 2, &second)
        });
        merge(&here, 3, &first);
        let seen = here.cluster(life(1), now).running;
        assert!(matches!(seen, 2 | 3), "{seen}");
        other.join().expect("the other does not panic");
        assert_eq!(here.cluster(life(1), now).running, 3);
        assert_eq!(here.peers_heard(now), 2);
    });
}
