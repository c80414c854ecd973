//! Models of the load table: every count that is added is removed again, a waiter is woken when
//! room appears, and a place is never both taken and handed over.

use std::sync::Arc;

use loom::future::block_on;
use loom::thread;
use state::ids::{BackendRef, Incarnation, ReplicaId, Slot};
use tokio::time::Instant;

use crate::load::{Load, LoadTable, ReserveRejection, ReservedPlace};
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
    (
        "places: the last one is taken or handed over, not both",
        last_place,
    ),
    (
        "places: requests and hand-overs never use more than there are",
        contended_places,
    ),
    (
        "places: one that is owed is not taken again, and who tells the peers is woken",
        owed_place,
    ),
    (
        "places: a limit that falls is no room for a request that knows of it",
        fallen_limit,
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
    });
}

fn woken() {
    explore(|| {
        let table = Arc::new(LoadTable::of_slots(1));
        let request = table.begin(life(1), 5);
        let end = thread::spawn(move || drop(request));
        // Like the loop that serves the queues: check, then wait.
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

/// Returns the table of a replica that owns `allowed` places of a limit of 4.
fn with_places(allowed: u32, hands_over_next: bool) -> Arc<LoadTable> {
    let table = Arc::new(LoadTable::of_slots(1));
    table.set_places(life(1), LIMIT, allowed, hands_over_next);
    table
}

const LIMIT: u32 = 4;

fn start(table: &LoadTable) -> Result<ReservedPlace, ReserveRejection> {
    table.reserve(life(1), Some(LIMIT))
}

fn last_place() {
    explore(|| {
        let table = with_places(1, false);
        let request = thread::spawn({
            let table = Arc::clone(&table);
            move || start(&table).ok()
        });
        let is_handed_over = table.withdraw(life(1), 0, 0);
        let taken = request.join().expect("the other does not panic");
        assert!(taken.is_some() != is_handed_over);
        drop(taken);
        assert_eq!(start(&table).is_ok(), !is_handed_over);
    });
}

fn contended_places() {
    explore(|| {
        let table = with_places(2, false);
        let requests: Vec<_> = (0..2)
            .map(|_| {
                let table = Arc::clone(&table);
                thread::spawn(move || start(&table).ok())
            })
            .collect();
        // Like a handover in production: withdraws a place, then sets the number that remains.
        let handed_over = u32::from(table.withdraw(life(1), 1, 1));
        table.set_places(life(1), LIMIT, 2 - handed_over, false);
        let join = |it: thread::JoinHandle<_>| it.join().expect("the other does not panic");
        let taken: Vec<ReservedPlace> = requests.into_iter().filter_map(join).collect();
        let running = u32::try_from(taken.len()).expect("there are two");
        assert_eq!(running, 2 - handed_over, "what is left is used");
        assert_eq!(table.here(life(1)).running, running);
        assert_eq!(start(&table).err(), Some(ReserveRejection::Full));
    });
}

fn owed_place() {
    explore(|| {
        let table = with_places(1, true);
        let running = start(&table).expect("there is one").into_guard(0);
        let end = thread::spawn(move || drop(running));
        assert_eq!(start(&table).err(), Some(ReserveRejection::Full));
        block_on(table.report_due().notified());
        assert_eq!(
            start(&table).err(),
            Some(ReserveRejection::Full),
            "it is a peer's"
        );
        end.join().expect("the other does not panic");
        // Meanwhile no peer wants the place any more.
        table.set_places(life(1), LIMIT, 1, false);
        assert!(start(&table).is_ok());
    });
}

fn fallen_limit() {
    explore(|| {
        let table = with_places(1, false);
        let request = thread::spawn({
            let table = Arc::clone(&table);
            move || table.reserve(life(1), Some(1)).err()
        });
        table.set_places(life(1), 1, 0, false);
        let refused = request.join().expect("the other does not panic");
        assert!(refused.is_some(), "it had no place under the limit of 1");
    });
}
