//! Counts of each engine's responses, from which a share of refusals follows.
//!
//! A status 4xx is usually a client's fault. An engine that answers many more of its requests with
//! one than the others do is misconfigured, and attracts traffic because refusing is quick.

use http::StatusCode;
use schemars::JsonSchema;
use serde::Serialize;
use state::ids::Slot;

use crate::sync::{AtomicU64, Ordering::Relaxed};

/// Number of responses of one engine since this replica has known it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, JsonSchema)]
pub struct AnswerCount {
    /// Responses with any status.
    pub all: u64,
    /// Responses with a status 4xx.
    pub client_errors: u64,
    /// Responses with a status 5xx.
    pub server_errors: u64,
}

#[derive(Default)]
struct Cell {
    all: AtomicU64,
    client_errors: AtomicU64,
    server_errors: AtomicU64,
}

/// The counts of all slots.
pub(super) struct AnswerCounts(Box<[Cell]>);

impl AnswerCounts {
    pub(super) fn new(slots: usize) -> Self {
        Self((0..slots).map(|_| Cell::default()).collect())
    }

    pub(super) fn count(&self, slot: Slot, status: StatusCode) {
        if let Some(cell) = self.0.get(usize::from(slot.0)) {
            cell.all.fetch_add(1, Relaxed);
            if status.is_client_error() {
                cell.client_errors.fetch_add(1, Relaxed);
            } else if status.is_server_error() {
                cell.server_errors.fetch_add(1, Relaxed);
            }
        }
    }

    pub(super) fn of(&self, slot: Slot) -> AnswerCount {
        let cell = self.0.get(usize::from(slot.0));
        cell.map_or_else(AnswerCount::default, |cell| AnswerCount {
            all: cell.all.load(Relaxed),
            client_errors: cell.client_errors.load(Relaxed),
            server_errors: cell.server_errors.load(Relaxed),
        })
    }

    /// Begins anew, for another backend in `slot`.
    pub(super) fn forget(&self, slot: Slot) {
        if let Some(cell) = self.0.get(usize::from(slot.0)) {
            cell.all.store(0, Relaxed);
            cell.client_errors.store(0, Relaxed);
            cell.server_errors.store(0, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_counted_per_backend() {
        let counts = AnswerCounts::new(2);
        for status in [200, 400, 404, 500] {
            counts.count(Slot(1), StatusCode::from_u16(status).unwrap());
        }
        counts.count(Slot(2), StatusCode::OK);
        let expected = AnswerCount {
            all: 4,
            client_errors: 2,
            server_errors: 1,
        };
        assert_eq!(
            (counts.of(Slot(0)), counts.of(Slot(1))),
            (AnswerCount::default(), expected)
        );
        counts.forget(Slot(1));
        assert_eq!(counts.of(Slot(1)), AnswerCount::default());
    }
}
