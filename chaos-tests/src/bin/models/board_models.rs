//! Models of the health table: both of its views show the last change, and a late probe of a
//! replaced backend changes nothing.

use std::sync::Arc;

use loom::thread;
use state::ids::Slot;

use crate::health::{Fault, HealthTable, ProbeRecord};
use crate::{ModelRun, explore};

pub(crate) const ALL: &[ModelRun] = &[
    (
        "board: a late probe does not show on the next backend",
        late_probe,
    ),
    ("board: both faces show the last change", both_faces),
];

const SLOT: Slot = Slot(0);

fn is_healthy(board: &HealthTable) -> (Option<bool>, Option<bool>) {
    let flags = board.flags(SLOT).map(|flags| flags.is_healthy);
    (flags, board.health(SLOT).map(|health| health.is_healthy))
}

fn late_probe() {
    explore(|| {
        let board = Arc::new(HealthTable::new(1));
        let first = board.register(SLOT, "a");
        let probe = thread::spawn({
            let board = Arc::clone(&board);
            move || board.update(SLOT, Some(first), ProbeRecord::passed)
        });
        board.unregister(SLOT);
        board.register(SLOT, "b");
        assert_eq!(is_healthy(&board), (Some(false), Some(false)));
        probe.join().expect("the other does not panic");
        assert_eq!(is_healthy(&board), (Some(false), Some(false)));
    });
}

fn both_faces() {
    explore(|| {
        let board = Arc::new(HealthTable::new(1));
        let tenancy = Some(board.register(SLOT, "a"));
        let probe = thread::spawn({
            let board = Arc::clone(&board);
            move || board.update(SLOT, tenancy, ProbeRecord::passed)
        });
        for _ in 0..2 {
            board.update(SLOT, None, |record| {
                record.probe_failed(Fault::Unwell, "no answer".into());
            });
        }
        probe.join().expect("the other does not panic");
        let (flags, health) = is_healthy(&board);
        assert_eq!(flags, health);
        assert_eq!(flags, board.record(SLOT).map(|record| record.is_healthy));
        assert_eq!(
            board.flags(SLOT),
            board.record(SLOT).map(|record| record.flags())
        );
    });
}
