//! Provides read-only access to the load table, so that a decision cannot add requests to it.

use std::sync::Arc;

use state::ids::BackendRef;
use tokio::time::Instant;

use crate::routing::load::{Gauges, Load, LoadTable};

/// Read-only access to a [`LoadTable`].
pub(in crate::routing) struct LoadReader(Arc<LoadTable>);

impl LoadReader {
    pub(in crate::routing) fn of(table: &Arc<LoadTable>) -> Self {
        Self(Arc::clone(table))
    }

    /// Calls [`LoadTable::here`].
    pub(in crate::routing) fn here(&self, backend: BackendRef) -> Load {
        self.0.here(backend)
    }

    /// Calls [`LoadTable::cluster`].
    pub(in crate::routing) fn cluster(&self, backend: BackendRef, now: Instant) -> Load {
        self.0.cluster(backend, now)
    }

    /// Calls [`LoadTable::add_each`].
    pub(in crate::routing) fn add_each(
        &self,
        now: Instant,
        count: usize,
        backend: impl Fn(usize) -> BackendRef,
        add: impl FnMut(usize, Load),
    ) {
        self.0.add_each(now, count, backend, add);
    }

    /// Calls [`LoadTable::with_gauges`].
    pub(in crate::routing) fn with_gauges<R>(&self, read: impl FnOnce(Gauges<'_>) -> R) -> R {
        self.0.with_gauges(read)
    }

    /// Calls [`LoadTable::places`].
    pub(in crate::routing) fn places(&self, backend: BackendRef, limit: u32) -> Option<(u32, u32)> {
        self.0.places(backend, limit)
    }
}
